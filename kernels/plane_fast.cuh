/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plane_fast.cuh - BF16 values of a plane into a page slot, for the planes models have: 64, 128
 * and 512 values, aligned. What plane.cuh does for any shape, with a third of its instructions;
 * the bytes are the same.
 *
 * A plane is CHUNKS times LANES lanes of 8 neighbouring values, so a warp stores 32 / LANES
 * planes at once, of whichever tokens, and each of its loads and stores is of whole sectors. All
 * lanes of the warp take part, also those with nothing to store.
 *
 * A quotient that decides a code without a division: x has 8 significant bits, a token's scale
 * s has 11 and a tie t between two codes has 5. If x / s is not t, then x and t s are whole
 * numbers of one grid, t s below 2^16 of it, so they are 2^-16 apart at least; and x times 1 / s
 * is off by three units of 2^-24. So that product, rounded to 20 bits, is t exactly when x / s
 * is, and is on the same side of t when it is not. The scale itself goes the same way: amax /
 * 448 is a number of fp16 or 2^-14 away from one. Static scales are any float: there values near
 * a tie are divided (quant.cuh), and one is near when 2^-21 of it decides: x / s is off from x times
 * 1 / s, both rounded, by three units of 2^-24.
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
	const uint4 *at = (const uint4 *)src + threadIdx.x % LANES;

#pragma unroll
	for (u32 c = 0; c < CHUNKS; c++)
		x.v[c] = in ? at[c * LANES] : make_uint4(0, 0, 0, 0);
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

/* What a lane stores: words of its values, and the plane's scale. */
template <u32 CHUNKS> struct fast_coded {
	u32 w[CHUNKS * 4]; /* E4M3: the first half */
	u32 nr_nan;
	u16 scale;
};

/* Magnitudes whose scale fast_f16_up() finds: 2^-95 .. 2^23. */
#define FAST_PLAIN_MIN 0x1000u
#define FAST_PLAIN_END 0x4b00u

/*
 * Values that fast_encode() leaves: NaN, infinity, scales of unusual size, quotients near a tie.
 * Out of line and in loops: a kernel of few tokens runs each instruction once and waits for all
 * that lies between them (four planes of a warp took 5.4 us with this inline, one 2.3).
 */
template <u32 LANES, u32 CHUNKS, bool E4M3, bool TOKEN>
static __device__ __attribute__((noinline)) void
fast_encode_odd(struct fast_coded<CHUNKS> *r, const struct fast_values<CHUNKS> *x,
		const struct kvk_quant *fixed)
{
	struct kvk_quant q = *fixed;

	if (TOKEN) {
		u32 top = fast_lanes_max<LANES>(fast_top_finite(*x));

		r->scale = kvk_fp8_token_scale(kvk_bf16_to_f32((u16)top));
		q = kvk_quant_make(kvk_f16_to_f32(r->scale));
	}
	r->nr_nan = 0;
#pragma unroll 1
	for (u32 i = 0; i < CHUNKS * 4; i++) {
		const u32 w = fast_word(x->v[i / 4], i % 4);
		float v[2] = {kvk_bf16_to_f32((u16)w), kvk_bf16_to_f32((u16)(w >> 16))};

		r->nr_nan += kvk_is_nan(v[0]) + kvk_is_nan(v[1]);
		if (!E4M3) {
			r->w[i] = fast_quiet(w);
			continue;
		}
		kvk_quant_div(v, q);
		if (i % 2 == 0)
			r->w[i / 2] = plane_codes(v[0], v[1]);
		else
			r->w[i / 2] |= plane_codes(v[0], v[1]) << 16;
	}
}

/* @sum, not 0 any more when either one is no number or infinite. */
KVK_DEV float fast_zero(float sum, float lo, float hi)
{
	return fmaf(lo, 0.0f, fmaf(hi, 0.0f, sum));
}

/* Codes of a lane's values by a token's scale, whose inverse is @inverse. */
template <u32 CHUNKS>
KVK_DEV void fast_codes_token(struct fast_coded<CHUNKS> &r,
			      const struct fast_values<CHUNKS> &x, float inverse)
{
#pragma unroll
	for (u32 i = 0; i < CHUNKS * 4; i++) {
		const u32 w = fast_word(x.v[i / 4], i % 4);
		const u32 two = arch_f32_e4m3(
			fast_snap(kvk_bf16_to_f32((u16)w) * inverse),
			fast_snap(kvk_bf16_to_f32((u16)(w >> 16)) * inverse));

		r.w[i / 2] = i % 2 ? r.w[i / 2] | two << 16 : two;
	}
}

/*
 * By a static scale: any float. What is a little below the quotient and what is a little above it
 * have the same code, which then is the quotient's; if not, false: a tie is near, or no number.
 */
template <u32 CHUNKS>
KVK_DEV bool fast_codes_static(struct fast_coded<CHUNKS> &r,
			       const struct fast_values<CHUNKS> &x,
			       const struct kvk_quant &q)
{
	const float below = q.inverse * (1.0f - 0x1p-21f);
	const float above = q.inverse * (1.0f + 0x1p-21f);
	float zero = 0.0f;
	u32 other = 0;

#pragma unroll
	for (u32 i = 0; i < CHUNKS * 4; i++) {
		const u32 w = fast_word(x.v[i / 4], i % 4);
		const float lo = kvk_bf16_to_f32((u16)w);
		const float hi = kvk_bf16_to_f32((u16)(w >> 16));
		const u32 two = arch_f32_e4m3(lo * below, hi * below);

		other |= two ^ arch_f32_e4m3(lo * above, hi * above);
		zero = fast_zero(zero, lo, hi);
		r.w[i / 2] = i % 2 ? r.w[i / 2] | two << 16 : two;
	}
	return q.quick && !other && zero == 0.0f;
}

/**
 * fast_encode() - a lane's values as its slot will hold them
 * @TOKEN: E4M3 with scales in the page; @E4M3 without: static scales; neither: BF16
 * @fixed: static scale; used without TOKEN
 */
template <u32 LANES, u32 CHUNKS, bool E4M3, bool TOKEN>
KVK_DEV void fast_encode(struct fast_coded<CHUNKS> &r,
			 const struct fast_values<CHUNKS> &x,
			 const struct kvk_quant &fixed)
{
	bool plain;

	r.nr_nan = 0;
	r.scale = 0;
	if (TOKEN) {
		const u32 top = fast_lanes_max<LANES>(fast_top(x));

		/* planes of zeros: any scale of ordinary size gives their codes */
		plain = __ballot_sync(~0u, top && top - FAST_PLAIN_MIN >=
							   FAST_PLAIN_END -
								   FAST_PLAIN_MIN) == 0;
		r.scale = fast_f16_up(
			fast_snap(kvk_bf16_to_f32((u16)top) * (1.0f / KVK_E4M3_MAX)));
		r.scale = top ? r.scale : KVK_F16_ONE;
		fast_codes_token<CHUNKS>(r, x, fast_inverse(kvk_f16_to_f32(r.scale)));
	} else if (E4M3) {
		plain = fast_codes_static<CHUNKS>(r, x, fixed);
	} else {
		plain = fast_top(x) <= 0x7f80u;
#pragma unroll
		for (u32 i = 0; i < CHUNKS * 4; i++)
			r.w[i] = fast_word(x.v[i / 4], i % 4);
	}
	if (!plain) {
		/* copies of their own: x and r stay in registers */
		const struct fast_values<CHUNKS> odd = x;
		const struct kvk_quant q = fixed;
		struct fast_coded<CHUNKS> ret;

		ret.scale = r.scale;
		fast_encode_odd<LANES, CHUNKS, E4M3, TOKEN>(&ret, &odd, &q);
		r = ret;
	}
}

/* Scale of a plane whose values are stored so; @scales: of the pool, NULL without. */
template <bool E4M3, bool TOKEN>
KVK_DEV struct kvk_quant fast_fixed(const float *scales, const struct dev_plane &pl)
{
	struct kvk_quant q = {};

	if (E4M3 && !TOKEN)
		q = kvk_quant_make(scales[pl.scale_index]);
	return q;
}

/* Coded values into their slot; @part: the layer's part of the page. */
template <u32 LANES, u32 CHUNKS, bool E4M3>
KVK_DEV void fast_put(u8 *part, const struct dev_plane &pl, u32 slot,
		      const struct fast_coded<CHUNKS> &r)
{
	const u32 bytes = E4M3 ? 8 : 16;
	u8 *to = part + pl.off + (slot * CHUNKS * LANES + threadIdx.x % LANES) * bytes;

#pragma unroll
	for (u32 c = 0; c < CHUNKS; c++, to += LANES * bytes) {
		const u32 *w = r.w + c * bytes / 4;

		if (E4M3)
			*(uint2 *)to = make_uint2(w[0], w[1]);
		else
			*(uint4 *)to = make_uint4(w[0], w[1], w[2], w[3]);
	}
}

/* As fast_put(), and the scale. */
template <u32 LANES, u32 CHUNKS, bool E4M3, bool TOKEN>
KVK_DEV void fast_store(u8 *part, const struct dev_plane &pl, u32 slot,
			const struct fast_coded<CHUNKS> &r)
{
	if (TOKEN && threadIdx.x % LANES == 0)
		*(u16 *)(part + pl.scale_off + slot * pl.scale_step) = r.scale;
	fast_put<LANES, CHUNKS, E4M3>(part, pl, slot, r);
}

/* The first @nr of N tokens' values of a plane, @stride bytes apart. */
template <u32 LANES, u32 CHUNKS, u32 N>
KVK_DEV void fast_read_run(struct fast_values<CHUNKS> (&x)[N], const u8 *src, u32 stride,
			   u32 nr)
{
#pragma unroll
	for (u32 k = 0; k < N; k++)
		fast_read<LANES, CHUNKS>(x[k], src + k * stride, k < nr);
}

/**
 * fast_store_run() - N tokens' values of a plane into their slots
 * @part, @slot: of the token that lane @first + k holds, for k = 0 .. N - 1; a part of NULL is
 *	nowhere
 * @in: this lane's plane is one
 *
 * The scales of a run are neighbours: one store of a lane each. Return: NaN values of the lane.
 */
template <u32 LANES, u32 CHUNKS, u32 N, bool E4M3, bool TOKEN>
KVK_DEV u32 fast_store_run(u8 *part, u32 slot, u32 first, const struct dev_plane &pl,
			   const struct fast_values<CHUNKS> (&x)[N],
			   const struct kvk_quant &fixed, bool in)
{
	u16 scale = 0;
	u32 nr_nan = 0;
	u8 *scale_to = NULL;

#pragma unroll
	for (u32 k = 0; k < N; k++) {
		u8 *to = (u8 *)__shfl_sync(~0u, (u64)part, (int)(first + k));
		const u32 at = __shfl_sync(~0u, slot, (int)(first + k));
		struct fast_coded<CHUNKS> coded;

		fast_encode<LANES, CHUNKS, E4M3, TOKEN>(coded, x[k], fixed);
		if (!to || !in)
			continue;
		fast_put<LANES, CHUNKS, E4M3>(to, pl, at, coded);
		if (TOKEN && threadIdx.x % LANES == k) {
			scale = coded.scale;
			scale_to = to + pl.scale_off + at * pl.scale_step;
		}
		nr_nan += coded.nr_nan;
	}
	if (TOKEN && scale_to)
		*(u16 *)scale_to = scale;
	return nr_nan;
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
