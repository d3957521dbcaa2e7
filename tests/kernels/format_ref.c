/* SPDX-License-Identifier: Apache-2.0 */
/*
 * format_ref.c - e4m3, fp16, bf16 and INT4 helpers: bit-exact against their definitions.
 */
#include "tests/kvt.h"
#include "common.h"
#include "kernels/fp8_quotient.h"
#include "kernels/int4.h"

/* O47: the table of the specification. 448 is 0x7e; NaN keeps its sign. */
KVT_TEST(o47_saturate_and_keep_nan)
{
	static const struct {
		float x;
		u8 code;
	} t[] = {{447, 0x7e},	    {448, 0x7e},
		 {449, 0x7e},	    {464, 0x7e},
		 {465, 0x7e},	    {1e9f, 0x7e},
		 {INFINITY, 0x7e},  {-INFINITY, 0xfe},
		 {-465, 0xfe},	    {-0.0f, 0x80},
		 {0.0f, 0x00},	    {0x1p-9f, 0x01},
		 {0x1p-10f, 0x00},  {-0x1p-10f, 0x80},
		 {0x1.8p-9f, 0x02}, {0x1.000002p-10f, 0x01},
		 {0x1p-6f, 0x08},   {0x1.cp-7f, 0x07},
		 {0x1.ep-7f, 0x08}, {17, 0x58},
		 {19, 0x5a},	    {1e-40f, 0x00}};

	for (size_t i = 0; i < KV_ARRAY_SIZE(t); i++)
		if (kvk_e4m3_encode(t[i].x) != t[i].code)
			KVT_FAIL("e4m3(%a) is 0x%02x, expected 0x%02x", t[i].x,
				 kvk_e4m3_encode(t[i].x), t[i].code);
	KVT_EXPECT_EQ(kvk_e4m3_encode(kvk_bits_f32(0x7fc00000)), 0x7f);
	KVT_EXPECT_EQ(kvk_e4m3_encode(kvk_bits_f32(0xffc00000)), 0xff);
	KVT_EXPECT_EQ(kvk_e4m3_encode(kvk_bits_f32(0x7f800001)), 0x7f);
	KVT_EXPECT_EQ(kvk_e4m3_encode(kvk_bits_f32(0xff800001)), 0xff);
}

KVT_TEST(o47_all_codes_round_trip)
{
	for (u32 c = 0; c < 256; c++) {
		float d = kvk_e4m3_decode((u8)c);
		double want = kvt_e4m3((u8)c);

		KVT_EXPECT_EQ(kvk_e4m3_encode(d), c);
		KVT_EXPECT(isnan(want) ? isnan(d) : d == want);
		KVT_EXPECT_EQ(signbit(d) != 0, c >> 7);
		KVT_EXPECT(isnan(want) ? isnan(kvk_e4m3_table[c])
				       : kvk_e4m3_table[c] == want);
		KVT_EXPECT_EQ(kvk_e4m3_is_nan((u8)c) != 0, isnan(want) != 0);
	}
}

/* Every boundary: just below, at and above each midpoint, for all neighbours. */
KVT_TEST(o47_rounds_to_nearest_even_everywhere)
{
	for (u32 c = 0; c < 0x7e; c++) {
		double lo = kvt_e4m3((u8)c), hi = kvt_e4m3((u8)(c + 1));
		float mid = (float)((lo + hi) / 2); /* exact */
		u8 even = c % 2 ? (u8)(c + 1) : (u8)c;

		KVT_EXPECT_EQ(kvk_e4m3_encode(mid), even);
		KVT_EXPECT_EQ(kvk_e4m3_encode(nextafterf(mid, 0)), c);
		KVT_EXPECT_EQ(kvk_e4m3_encode(nextafterf(mid, 1e9f)), c + 1);
		KVT_EXPECT_EQ(kvk_e4m3_encode(-mid), even | 0x80);
	}
}

static void check_nearest(float x)
{
	u8 c = kvk_e4m3_encode(x) & 0x7f;
	double v = fabs((double)x), d = fabs(kvt_e4m3(c) - v);

	KVT_EXPECT(c <= 0x7e);
	KVT_EXPECT_EQ(kvk_e4m3_encode(x) >> 7, signbit(x) != 0);
	if (c > 0)
		KVT_EXPECT(d <= fabs(kvt_e4m3((u8)(c - 1)) - v));
	if (c < 0x7e)
		KVT_EXPECT(d <= fabs(kvt_e4m3((u8)(c + 1)) - v));
}

/* All bf16 values, and floats in steps up to infinity: none has a nearer code. */
KVT_TEST(o47_nearest_by_distance)
{
	for (u32 h = 0; h < 65536; h++)
		if (!isnan(kvt_bf16((u16)h)) && !isinf(kvt_bf16((u16)h)))
			check_nearest((float)kvt_bf16((u16)h));
	for (u32 b = 0; b < 0x7f800000; b += 499)
		check_nearest(kvk_bits_f32(b));
}

KVT_TEST(fp16_all_values_round_trip)
{
	for (u32 h = 0; h < 65536; h++) {
		float f = kvk_f16_to_f32((u16)h);
		double want = kvt_f16((u16)h);

		KVT_EXPECT(isnan(want) ? isnan(f) : f == want);
		if (!isnan(want))
			KVT_EXPECT_EQ(kvk_f32_to_f16(f), h);
	}
	KVT_EXPECT(isnan(kvk_f16_to_f32(kvk_f32_to_f16(NAN))));
}

KVT_TEST(fp16_and_bf16_round_to_nearest_even)
{
	for (u32 h = 0; h < 0x7bff; h++) {
		float lo = kvk_f16_to_f32((u16)h), hi = kvk_f16_to_f32((u16)(h + 1));
		float mid = (float)(((double)lo + hi) / 2);

		KVT_EXPECT_EQ(kvk_f32_to_f16(mid), h + h % 2);
		KVT_EXPECT_EQ(kvk_f32_to_f16(nextafterf(mid, 0)), h);
		KVT_EXPECT_EQ(kvk_f32_to_f16(nextafterf(mid, 1e9f)), h + 1);
	}
	KVT_EXPECT_EQ(kvk_f32_to_f16(65519.9f), 0x7bff);
	KVT_EXPECT_EQ(kvk_f32_to_f16(65520.0f), 0x7c00);
	for (u64 b = 0; b < 0x100000000ull; b += 65521) {
		float x = kvk_bits_f32((u32)b);

		if (isnan(x))
			KVT_EXPECT(isnan(kvk_bf16_to_f32(kvk_f32_to_bf16(x))));
		else
			KVT_EXPECT_EQ(kvk_f32_to_bf16(x), kvt_to_bf16(x));
	}
}

/* A token's scale never lets a value saturate and is the smallest fp16 that does so. */
KVT_TEST(token_scale_is_rounded_up)
{
	struct kvt_rng g = {.state = kvt_rand64()};

	KVT_EXPECT_EQ(kvk_fp8_token_scale(0), KVK_F16_ONE);
	KVT_EXPECT_EQ(kvk_fp8_token_scale(448), KVK_F16_ONE);
	KVT_EXPECT_EQ(kvk_fp8_token_scale(1e-30f), 1);
	KVT_EXPECT_EQ(kvk_fp8_token_scale(3e38f), KVK_F16_FINITE);
	KVT_EXPECT_EQ(kvk_fp8_token_scale(INFINITY), KVK_F16_FINITE);
	for (u32 i = 0; i < 100000; i++) {
		float amax = ldexpf(1.0f + (float)kvt_rng_below(&g, 1 << 23) * 0x1p-23f,
				    (int)kvt_rng_below(&g, 36) - 14);
		u16 h = kvk_fp8_token_scale(amax);
		float want = amax / 448.0f;

		KVT_EXPECT((float)kvt_f16(h) >= want || h == KVK_F16_FINITE);
		KVT_EXPECT(h == 0 || (float)kvt_f16((u16)(h - 1)) < want);
	}
	KVT_EXPECT(kvk_fp8_act_scale(0) == 1.0f);
	KVT_EXPECT(kvk_fp8_act_scale(896) == 2.0f);
}

/* The codes of BF16 values of a block whose largest is @amax, by quotient and by division.
 * Return: how many a product with the inverse alone would have got wrong */
static u32 quotients(float amax)
{
	const float scale = kvk_fp8_act_scale(amax);
	const struct kvk_fp8_divisor d = kvk_fp8_divide_by(scale);
	u32 nr_wrong = 0, top = kvk_f32_bits(amax) >> 16;

	for (u32 b = top; b && b + 22 * 128 > top; b--) {
		const float x = kvk_bits_f32(b << 16);
		const u8 want = kvk_e4m3_encode(kvk_div_rn(x, scale));

		if (kvk_e4m3_encode(kvk_fp8_quotient(x * d.up, d)) != want ||
		    kvk_e4m3_encode(kvk_fp8_quotient(-x * d.up, d)) != (want | 0x80))
			KVT_FAIL("%a of %a: another code than 0x%02x", x, amax, want);
		nr_wrong += kvk_e4m3_encode(x * d.up * d.inverse) != want;
	}
	return nr_wrong;
}

/* All mantissas, exponents from the smallest to the largest. */
KVT_TEST(quotients_have_the_codes_of_division)
{
	static const u32 exponents[] = {0,   1,	  2,   7,   34,	 35,  36,  126,
					127, 130, 227, 234, 235, 236, 237, 254};
	u32 nr_wrong = 0;

	for (u32 m = 1; m < 128 * KV_ARRAY_SIZE(exponents); m++)
		nr_wrong +=
			quotients(kvk_bits_f32(exponents[m / 128] << 23 | m % 128 << 16));
	KVT_EXPECT(nr_wrong > 0); /* so it takes what kvk_fp8_quotient() does */
	KVT_EXPECT(kvk_fp8_quotient(-3.0f, kvk_fp8_divide_by(INFINITY)) == 0);
	KVT_EXPECT(isnan(kvk_fp8_quotient(INFINITY, kvk_fp8_divide_by(INFINITY))));
	KVT_EXPECT(isnan(kvk_fp8_quotient(NAN, kvk_fp8_divide_by(3.0f))));
}

KVT_TEST(block_scales_are_indexed_row_major)
{
	u32 seen = 0;

	KVT_EXPECT_EQ(kvk_fp8_blocks(1), 1);
	KVT_EXPECT_EQ(kvk_fp8_blocks(128), 1);
	KVT_EXPECT_EQ(kvk_fp8_blocks(129), 2);
	for (u32 r = 0; r < 300; r++)
		for (u32 c = 0; c < 400; c++) {
			KVT_EXPECT_EQ(kvk_fp8_scale_index(r, c, 400),
				      (r >> 7) * 4 + (c >> 7));
			seen = KV_MAX(seen, (u32)kvk_fp8_scale_index(r, c, 400));
		}
	KVT_EXPECT_EQ(seen, 11);
}

KVT_TEST(o48_int4_pack_unpack)
{
	struct kvt_rng g = {.state = kvt_rand64()};
	int8_t q[8], back[8];

	/* the convention: lowest nibble first, zero point 8 */
	KVT_EXPECT_EQ(kvk_int4_get(0x76543210u, 0), -8);
	KVT_EXPECT_EQ(kvk_int4_get(0xf6543218u, 7), 7);
	for (u32 round = 0; round < 10000; round++) {
		u32 w;

		for (u32 i = 0; i < 8; i++)
			q[i] = (int8_t)((int)kvt_rng_below(&g, 16) - 8);
		w = kvk_int4_pack8(q);
		kvk_int4_unpack8(w, back);
		KVT_EXPECT(!memcmp(q, back, 8));
		for (u32 i = 0; i < 8; i++) {
			KVT_EXPECT_EQ(kvk_int4_get(w, i), q[i]);
			KVT_EXPECT_EQ((w >> (4 * i)) & 15, (u32)(q[i] + 8));
		}
	}
	for (u32 i = 0; i < 8; i++)
		q[i] = i % 2 ? 127 : -128;
	kvk_int4_unpack8(kvk_int4_pack8(q), back); /* clamped, no wrap into a neighbour */
	for (u32 i = 0; i < 8; i++)
		KVT_EXPECT_EQ(back[i], i % 2 ? 7 : -8);
}

KVT_TEST(o48_odd_tails_and_groups_are_refused)
{
	static const u32 good[][2] = {
		{32, 32}, {64, 64}, {128, 128}, {7168, 32}, {384, 128}};
	static const u32 bad[][2] = {{0, 32},	{31, 32}, {100, 32}, {72, 64},
				     {64, 128}, {64, 16}, {64, 0},   {64, 0xffffffff}};

	for (size_t i = 0; i < KV_ARRAY_SIZE(good); i++) {
		KVT_EXPECT(kvk_int4_shape_ok(good[i][0], good[i][1]));
		KVT_EXPECT_EQ(kvk_int4_row_words(good[i][0]) * 8, good[i][0]);
		KVT_EXPECT_EQ(kvk_int4_row_scales(good[i][0], good[i][1]) * good[i][1],
			      good[i][0]);
	}
	for (size_t i = 0; i < KV_ARRAY_SIZE(bad); i++)
		KVT_EXPECT(!kvk_int4_shape_ok(bad[i][0], bad[i][1]));
}

KVT_MAIN()
