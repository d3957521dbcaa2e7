/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plane_fast.cuh - BF16 values of a plane into a page slot, for the planes models have: 64, 128
 * and 512 values, aligned. What plane.cuh does for any shape, with a third of its instructions;
 * the bytes are the same.
 *
 * A plane is LANES lanes of CHUNKS * 8 neighbouring values, so a warp stores 32 / LANES planes
 * at once, of whichever tokens. All lanes of the warp take part, also those with nothing to
 * store.
 *
 * A quotient that decides a code without a division: x has 8 significant bits, a token's scale
 * s has 11 and a tie t between two codes has 5. If x / s is not t, then x and t s are whole
 * numbers of one grid, t s below 2^16 of it, so they are 2^-16 apart at least; and x times 1 / s
 * is off by three units of 2^-24. So that product, rounded to 20 bits, is t exactly when x / s
 * is, and is on the same side of t when it is not. The scale itself goes the same way: amax /
 * 448 is a number of fp16 or 2^-14 away from one. Static scales are any float: there values near
 * a tie are divided (quant.cuh).
 */
#ifndef KVK_PLANE_FAST_CUH
#define KVK_PLANE_FAST_CUH

#include "kernels/plane.cuh"

/* Values of a lane. */
template <u32 CHUNKS> struct fast_values {
	uint4 v[CHUNKS]; /* bf16 */
};

KVK_DEV u32 fast_word(const uint4 &v, u32 i)
{
	return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* This lane's values of a plane at @src; zeros unless @in. */
template <u32 LANES, u32 CHUNKS>
KVK_DEV void fast_read(struct fast_values<CHUNKS> &x, const void *src, bool in)
{
	const uint4 *at = (const uint4 *)src + threadIdx.x % LANES * CHUNKS;

#pragma unroll
	for (u32 c = 0; c < CHUNKS; c++)
		x.v[c] = in ? at[c] : make_uint4(0, 0, 0, 0);
}

/* Larger one of both halves. */
KVK_DEV u32 fast_max2(u32 a, u32 b)
{
	u32 lo = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
	u32 hi = a >> 16 > b >> 16 ? a >> 16 : b >> 16;

#ifdef __CUDA_ARCH__
	return __vmaxu2(a, b);
#endif
	return lo | hi << 16;
}

/* Largest magnitude of this lane's values as bf16 bits; above 0x7f80: a NaN is among them. */
template <u32 CHUNKS> KVK_DEV u32 fast_top(const struct fast_values<CHUNKS> &x)
{
	u32 top = 0;

#pragma unroll
	for (u32 c = 0; c < CHUNKS; c++)
#pragma unroll
		for (u32 i = 0; i < 4; i++)
			top = fast_max2(top, fast_word(x.v[c], i) & 0x7fff7fffu);
	return top >> 16 > (top & 0xffffu) ? top >> 16 : top & 0xffffu;
}

/* As fast_top(), of the values that are not NaN. */
template <u32 CHUNKS> KVK_DEV u32 fast_top_finite(const struct fast_values<CHUNKS> &x)
{
	u32 top = 0;

#pragma unroll
	for (u32 c = 0; c < CHUNKS; c++)
#pragma unroll
		for (u32 i = 0; i < 4; i++) {
			u32 lo = fast_word(x.v[c], i) & 0x7fffu;
			u32 hi = fast_word(x.v[c], i) >> 16 & 0x7fffu;

			top = lo <= 0x7f80u && lo > top ? lo : top;
			top = hi <= 0x7f80u && hi > top ? hi : top;
		}
	return top;
}

template <u32 LANES> KVK_DEV u32 fast_lanes_max(u32 top)
{
	for (u32 o = LANES / 2; o; o >>= 1) {
		u32 other = __shfl_xor_sync(~0u, top, (int)o);

		top = other > top ? other : top;
	}
	return top;
}

/* To 20 significant bits. */
KVK_DEV float fast_snap(float x)
{
	return kvk_bits_f32((kvk_f32_bits(x) + 8u) & ~15u);
}

/* Up to fp16. */
KVK_DEV u16 fast_f16_up(float x)
{
#ifdef __CUDA_ARCH__
	u16 h;

	asm("cvt.rp.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
	return h;
#else
	u16 h = kvk_f32_to_f16(x);

	return (u16)(h + (kvk_f16_to_f32(h) < x));
#endif
}

/* 1 / x, off by one unit of 2^-23 at most. */
KVK_DEV float fast_inverse(float x)
{
#ifdef __CUDA_ARCH__
	float r;

	asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
	return r;
#else
	return 1.0f / x;
#endif
}

/* Two values as a conversion to BF16 leaves them: a NaN is a quiet one. */
KVK_DEV u32 fast_quiet(u32 w)
{
	return kvk_f32_to_bf16(kvk_bf16_to_f32((u16)w)) |
	       (u32)kvk_f32_to_bf16(kvk_bf16_to_f32((u16)(w >> 16))) << 16;
}

/* Four codes of two words of bf16; @plain: no NaN, no infinity, a scale of ordinary size. */
template <bool TOKEN>
KVK_DEV u32 fast_codes(u32 a, u32 b, const struct kvk_quant &q, bool plain)
{
	float x[4] = {kvk_bf16_to_f32((u16)a), kvk_bf16_to_f32((u16)(a >> 16)),
		      kvk_bf16_to_f32((u16)b), kvk_bf16_to_f32((u16)(b >> 16))};

	if (TOKEN && plain) {
#pragma unroll
		for (u32 i = 0; i < 4; i++)
			x[i] = fast_snap(x[i] * q.inverse);
	} else {
		kvk_quant_div(x, q);
	}
	if (plain)
		return arch_f32_e4m3(x[0], x[1]) | arch_f32_e4m3(x[2], x[3]) << 16;
	return plane_codes(x[0], x[1]) | plane_codes(x[2], x[3]) << 16;
}

/* What a lane stores: words of its values, and the plane's scale. */
template <u32 CHUNKS> struct fast_coded {
	u32 w[CHUNKS * 4]; /* E4M3: the first half */
	u32 nr_nan;
	u16 scale;
};

/* Magnitudes whose scale fast_f16_up() finds: 2^-95 .. 2^23. */
#define FAST_PLAIN_MIN 0x1000u
#define FAST_PLAIN_END 0x4b00u

/**
 * fast_encode() - a lane's values as its slot will hold them
 * @TOKEN: E4M3 with scales in the page; @E4M3 without: static scales; neither: BF16
 * @fixed: static scale
 */
template <u32 LANES, u32 CHUNKS, bool E4M3, bool TOKEN>
KVK_DEV void fast_encode(struct fast_coded<CHUNKS> &r,
			 const struct fast_values<CHUNKS> &x, float fixed)
{
	u32 top = fast_top(x);
	struct kvk_quant q = {};
	bool plain;

	if (TOKEN)
		top = fast_lanes_max<LANES>(top);
	plain = __ballot_sync(~0u, TOKEN ? top - FAST_PLAIN_MIN >=
						   FAST_PLAIN_END - FAST_PLAIN_MIN
					 : top >= 0x7f80u) == 0;
	r.nr_nan = 0;
	r.scale = 0;
	if (TOKEN && plain) {
		r.scale = fast_f16_up(
			fast_snap(kvk_bf16_to_f32((u16)top) * (1.0f / KVK_E4M3_MAX)));
		q.inverse = fast_inverse(kvk_f16_to_f32(r.scale));
	} else if (TOKEN) {
		top = fast_lanes_max<LANES>(fast_top_finite(x));
		r.scale = kvk_fp8_token_scale(kvk_bf16_to_f32((u16)top));
		q = kvk_quant_make(kvk_f16_to_f32(r.scale));
	} else if (E4M3) {
		q = kvk_quant_make(fixed);
	}
#pragma unroll
	for (u32 i = 0; i < CHUNKS * 4; i++) {
		u32 w = fast_word(x.v[i / 4], i % 4);

		if (!plain)
			r.nr_nan += ((w & 0x7fffu) > 0x7f80u) +
				    ((w >> 16 & 0x7fffu) > 0x7f80u);
		if (!E4M3)
			r.w[i] = plain ? w : fast_quiet(w);
		else if (i % 2 == 0)
			r.w[i / 2] = fast_codes<TOKEN>(
				w, fast_word(x.v[i / 4], i % 4 + 1), q, plain);
	}
}

/**
 * fast_store() - coded values into their slot
 * @part: the layer's part of the page
 */
template <u32 LANES, u32 CHUNKS, bool E4M3, bool TOKEN>
KVK_DEV void fast_store(u8 *part, const struct dev_plane &pl, u32 slot,
			const struct fast_coded<CHUNKS> &r)
{
	const u32 lane = threadIdx.x % LANES, bytes = CHUNKS * (E4M3 ? 8 : 16);
	u8 *to = part + pl.off + (slot * LANES + lane) * bytes;

	if (TOKEN && lane == 0)
		*(u16 *)(part + pl.scale_off + slot * pl.scale_step) = r.scale;
	if (bytes == 8) {
		*(uint2 *)to = make_uint2(r.w[0], r.w[1]);
		return;
	}
	*(uint4 *)to = make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]);
	if (bytes == 32)
		((uint4 *)to)[1] = make_uint4(r.w[CHUNKS * 4 - 4], r.w[CHUNKS * 4 - 3],
					      r.w[CHUNKS * 4 - 2], r.w[CHUNKS * 4 - 1]);
}

/* enum fast_shape - planes that are built */
enum fast_shape { FAST_NONE = 0, FAST_MLA, FAST_GQA64, FAST_GQA128 };

/* Which of them is it? BF16 values go into BF16 or E4M3 pages. */
static inline u32 fast_shape_of(const struct kv_layout *l)
{
	if (l->dtype != KV_DTYPE_E4M3 && l->dtype != KV_DTYPE_BF16)
		return FAST_NONE;
	if (l->kind == KV_LAYOUT_MLA)
		return l->latent_dim == 512 && l->rope_dim == 64 ? FAST_MLA : FAST_NONE;
	return l->head_dim == 64    ? FAST_GQA64
	       : l->head_dim == 128 ? FAST_GQA128
				    : FAST_NONE;
}

#endif /* KVK_PLANE_FAST_CUH */
