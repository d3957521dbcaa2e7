/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quant.c - INT4 groups and FP8 blocks: packing, error, ties, odd values (case O48).
 */
#include <omp.h>
#include "engine/model/quant.h"
#include "engine/model/source.h"
#include "kernels/fp8.h"
#include "kernels/int4.h"
#include "tests/kvt.h"

#define COLS 256u

/* unpack(pack(x)) is x for every code in every place, for all groups that are built. */
KVT_TEST(o48_pack_and_unpack_every_code)
{
	static const u32 groups[] = {32, 64, 128};

	for (size_t g = 0; g < KV_ARRAY_SIZE(groups); g++) {
		u32 group = groups[g];
		float x[COLS], y[COLS];
		u32 words[COLS / 8];
		u16 scales[COLS / 32];

		/* scale 1 is the only one that has no error for whole numbers -8..7 */
		for (u32 i = 0; i < COLS; i++)
			x[i] = (float)((s32)((i * 7 + i / 16) % 16) - 8);
		KVT_EXPECT(eng_quant_int4_row(x, COLS, group, words, scales) == 0);
		eng_dequant_int4_row(words, scales, false, COLS, group, y);
		for (u32 i = 0; i < COLS; i++) {
			KVT_EXPECT(y[i] == x[i]);
			/* zero point 8, lowest nibble first: never zero - 1 */
			KVT_EXPECT_EQ(words[i / 8] >> (i % 8 * 4) & 0xf, (u32)(x[i] + 8));
		}
	}
}

/* Rows that are no multiple of the group, and groups that are not built, are refused. */
KVT_TEST(o48_odd_tails_are_refused)
{
	static const struct {
		u32 cols, group;
		bool ok;
	} cases[] = {
		{256, 32, true},   {256, 64, true},  {256, 128, true},
		{128, 128, true},  {250, 32, false}, {192, 128, false},
		{96, 64, false},   {0, 32, false},   {256, 16, false},
		{256, 256, false}, {256, 0, false},  {256, (u32)-1, false},
		{32, 32, true},
	};

	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++) {
		struct eng_source s = {.name = "model.w.weight",
				       .file = "f.safetensors",
				       .dtype = KVK_BF16,
				       .rows = 4,
				       .cols = cases[i].cols};
		struct eng_err err = {{0}};
		int r = eng_source_put_check(&s, KVK_INT4, cases[i].group, &err);

		KVT_EXPECT_EQ(r == 0, cases[i].ok);
		if (r)
			KVT_EXPECT_HAS(err.text,
				       "f.safetensors: tensor model.w.weight: rows of");
	}
}

/* Searched scales never do worse than absmax, and clearly better over many groups. */
KVT_TEST(int4_scales_are_searched_for)
{
	static const u32 groups[] = {32, 128};

	for (size_t g = 0; g < KV_ARRAY_SIZE(groups); g++) {
		double searched = 0, absmax = 0, energy = 0;

		for (int row = 0; row < 200; row++) {
			float x[COLS], y[COLS];
			u32 words[COLS / 8];
			u16 scales[COLS / 32];
			double e, back = 0, a;

			for (u32 i = 0; i < COLS; i++) {
				x[i] = kvt_randn() * 0.02f;
				energy += (double)x[i] * (double)x[i];
			}
			e = eng_quant_int4_row(x, COLS, groups[g], words, scales);
			a = eng_quant_int4_absmax(x, COLS, groups[g]);
			eng_dequant_int4_row(words, scales, false, COLS, groups[g], y);
			for (u32 i = 0; i < COLS; i++)
				back += (double)(x[i] - y[i]) * (double)(x[i] - y[i]);
			/* the reported error is the error of what was stored */
			KVT_EXPECT(fabs(back - e) <= 1e-4 * e);
			KVT_EXPECT_LE(e, a * (1 + 1e-6));
			searched += e;
			absmax += a;
		}
		KVT_NOTE("group %u: relative error %.4f, absmax %.4f", groups[g],
			 sqrt(searched / energy), sqrt(absmax / energy));
		KVT_EXPECT_LE(sqrt(searched / absmax), 0.93);
	}
}

KVT_TEST(int4_odd_groups)
{
	float x[32] = {0}, y[32];
	u32 words[4];
	u16 scale;

	/* all zero: scale 1, codes 8 */
	KVT_EXPECT(eng_quant_int4_row(x, 32, 32, words, &scale) == 0);
	KVT_EXPECT(words[0] == 0x88888888u && kvk_bf16_to_f32(scale) == 1.0f);
	/* one value alone is met to the scale's own 8 bits */
	x[5] = -3.7f;
	eng_quant_int4_row(x, 32, 32, words, &scale);
	eng_dequant_int4_row(words, &scale, false, 32, 32, y);
	KVT_EXPECT_LE(fabsf(y[5] + 3.7f), 3.7f / 256);
	/* the smallest and largest finite values do not divide by zero or overflow */
	x[5] = 0x1p-149f;
	eng_quant_int4_row(x, 32, 32, words, &scale);
	KVT_EXPECT(words[0] == 0x88888888u && kvk_bf16_to_f32(scale) == 1.0f);
	x[5] = 0x1p-90f;
	eng_quant_int4_row(x, 32, 32, words, &scale);
	eng_dequant_int4_row(words, &scale, false, 32, 32, y);
	KVT_EXPECT_LE(fabsf(y[5] / x[5] - 1), 1.0 / 256);
	for (u32 i = 0; i < 32; i++)
		x[i] = i % 2 ? 3.38e38f : -3.38e38f;
	eng_quant_int4_row(x, 32, 32, words, &scale);
	eng_dequant_int4_row(words, &scale, false, 32, 32, y);
	KVT_EXPECT(kvk_bf16_to_f32(scale) > 0 && kvk_bf16_to_f32(scale) < INFINITY);
	KVT_EXPECT_LE(fabsf(y[0] / x[0] - 1), 0.01);
}

KVT_TEST(fp8_blocks)
{
	const u32 rows = 130, cols = 200; /* short last blocks both ways */
	float *x = malloc(rows * cols * sizeof(*x)), y[200];
	u8 *codes = malloc(rows * cols);
	float scales[4];

	KVT_EXPECT(x && codes);
	for (u32 i = 0; i < rows * cols; i++)
		x[i] = kvt_randn() * (i / cols < 128 ? 0.02f : 5.0f);
	x[3] = 0.5f; /* amax of block (0, 0) */
	eng_quant_fp8_rows(x, 128, cols, codes, scales);
	eng_quant_fp8_rows(x + 128 * cols, 2, cols, codes + 128 * cols, scales + 2);
	KVT_EXPECT(scales[0] == 0.5f / 448.0f);
	KVT_EXPECT_EQ(codes[3], 0x7e);
	for (u32 r = 0; r < rows; r++) {
		eng_dequant_fp8_row(codes + r * cols, scales + r / 128 * 2, cols, y);
		for (u32 c = 0; c < cols; c++) {
			float s = scales[r / 128 * 2 + c / 128],
			      e = fabsf(y[c] - x[r * cols + c]);

			/* half a step: 2^-4 of the value, or of the smallest step */
			KVT_EXPECT_LE(e,
				      fmaxf(fabsf(x[r * cols + c]) / 16, s * 0x1p-10f) *
					      1.0001f);
		}
	}
	memset(x, 0, rows * cols * sizeof(*x));
	eng_quant_fp8_rows(x, 128, cols, codes, scales);
	KVT_EXPECT(scales[0] == 1.0f && codes[0] == 0);
	free(codes);
	free(x);
}

/* Values that cannot be quantised are reported, not turned into something. */
KVT_TEST(infinite_and_nan_are_refused)
{
	static const u16 odd[] = {0x7f80, 0xff80, 0x7fc0, 0xffff};
	u16 x[8 * 128] = {0}, scales[8 * 4];
	u8 data[8 * 128];
	struct eng_source s = {
		.dtype = KVK_BF16, .rows = 8, .cols = 128, .data = (u8 *)x};

	KVT_EXPECT_EQ(eng_source_put(&s, KVK_INT4, 32, data, scales), 0);
	for (size_t i = 0; i < KV_ARRAY_SIZE(odd); i++) {
		x[700] = odd[i];
		KVT_EXPECT_EQ(eng_source_put(&s, KVK_INT4, 32, data, scales), -EDOM);
		KVT_EXPECT_EQ(eng_source_put(&s, KVK_E4M3, 0, data, (float[4]){0}),
			      -EDOM);
	}
}

KVT_TEST(threads_do_not_change_bits)
{
	const u32 rows = 300, cols = 256;
	u16 *x = malloc(rows * cols * 2), *sa = malloc(rows * cols),
	    *sb = malloc(rows * cols);
	u8 *a = malloc(rows * cols), *b = malloc(rows * cols);
	struct eng_source s = {
		.dtype = KVK_BF16, .rows = rows, .cols = cols, .data = (u8 *)x};

	KVT_EXPECT(x && sa && sb && a && b);
	for (u32 i = 0; i < rows * cols; i++)
		x[i] = kvk_f32_to_bf16(kvt_randn());
	omp_set_num_threads(1);
	KVT_EXPECT_EQ(eng_source_put(&s, KVK_INT4, 128, a, sa), 0);
	omp_set_num_threads(3);
	KVT_EXPECT_EQ(eng_source_put(&s, KVK_INT4, 128, b, sb), 0);
	KVT_EXPECT(!memcmp(a, b, rows * cols / 2));
	KVT_EXPECT(!memcmp(sa, sb, rows * cols / 128 * 2));
	free(x);
	free(sa);
	free(sb);
	free(a);
	free(b);
}

KVT_MAIN()
