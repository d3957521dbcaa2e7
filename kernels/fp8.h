/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fp8.h - number formats, once, for host and device: bf16, fp16, e4m3 and their scales.
 *
 * Everything is written with integers and single IEEE operations, so that gcc, clang and
 * nvcc give the same bits. e4m3 is the OCP "FN" format: no infinity, 0x7f and 0xff are
 * NaN, the largest value is 448. Encoding rounds to nearest even, saturates at 448 and
 * keeps NaN as NaN with its sign (layout.h: format_version covers these rules).
 *
 * Loops over these functions vectorise: bodies are selects, not branches. Pure functions,
 * any thread. The FTZ/DAZ modes must be off.
 */
#ifndef KVK_FP8_H
#define KVK_FP8_H

#include "kv/types.h"

#define KVK_E4M3_MAX 448.0f
#define KVK_FP8_BLOCK \
	128u /* rows and columns that share a weight scale; act. columns too */
#define KVK_F16_ONE    0x3c00u
#define KVK_F16_FINITE 0x7bffu /* 65504 */

KV_INLINE uint32_t kvk_f32_bits(float x)
{
#ifdef __CUDA_ARCH__
	return __float_as_uint(x);
#else
	uint32_t b;

	__builtin_memcpy(&b, &x, sizeof(b));
	return b;
#endif
}

KV_INLINE float kvk_bits_f32(uint32_t b)
{
#ifdef __CUDA_ARCH__
	return __uint_as_float(b);
#else
	float x;

	__builtin_memcpy(&x, &b, sizeof(x));
	return x;
#endif
}

/* a / b and a + b rounded to nearest, whatever nvcc's flags and contraction say */
KV_INLINE float kvk_div_rn(float a, float b)
{
#ifdef __CUDA_ARCH__
	return __fdiv_rn(a, b);
#else
	return a / b;
#endif
}

KV_INLINE float kvk_add_rn(float a, float b)
{
#ifdef __CUDA_ARCH__
	return __fadd_rn(a, b);
#else
	return a + b;
#endif
}

KV_INLINE int kvk_is_nan(float x)
{
	return (kvk_f32_bits(x) & 0x7fffffffu) > 0x7f800000u;
}

KV_INLINE float kvk_absf(float x)
{
	return kvk_bits_f32(kvk_f32_bits(x) & 0x7fffffffu);
}

/* ---------------------------------------------------------------------- bf16, fp16 */

KV_INLINE float kvk_bf16_to_f32(uint16_t h)
{
	return kvk_bits_f32((uint32_t)h << 16);
}

/* Round to nearest even; NaN stays NaN (quiet). */
KV_INLINE uint16_t kvk_f32_to_bf16(float x)
{
	uint32_t b = kvk_f32_bits(x);
	uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1)) >> 16;
	uint32_t quiet = (b >> 16) | 0x40u;

	return (uint16_t)((b & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

KV_INLINE float kvk_f16_to_f32(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
	uint32_t a = h & 0x7fffu;
	uint32_t normal = (a << 13) + (112u << 23);
	uint32_t special = (a << 13) | 0x7f800000u;
	uint32_t small = kvk_f32_bits((float)(int32_t)a * 0x1p-24f);

	return kvk_bits_f32(sign | (a >= 0x7c00u ? special
				    : a < 0x400u ? small
						 : normal));
}

/* Round to nearest even; overflow to infinity; NaN stays NaN. */
KV_INLINE uint16_t kvk_f32_to_f16(float x)
{
	uint32_t b = kvk_f32_bits(x);
	uint32_t sign = (b >> 16) & 0x8000u;
	uint32_t a = b & 0x7fffffffu;
	uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1)) >> 13;
	/* one ulp of a float in [0.5, 1) is fp16's smallest step, 2^-24 */
	uint32_t small = kvk_f32_bits(kvk_add_rn(kvk_bits_f32(a), 0.5f)) - 0x3f000000u;
	uint32_t r = a < 0x38800000u ? small : normal;

	r = a >= 0x477ff000u ? 0x7c00u : r;
	r = a > 0x7f800000u ? 0x7e00u : r;
	return (uint16_t)(sign | r);
}

/* ---------------------------------------------------------------------------- e4m3 */

/**
 * kvk_e4m3_encode() - nearest e4m3 code
 * @x: any float
 *
 * Return: round to nearest even; |x| > 448 and infinity give +-448; NaN gives 0x7f with
 * x's sign; values that round to zero keep their sign.
 */
KV_INLINE uint8_t kvk_e4m3_encode(float x)
{
	uint32_t b = kvk_f32_bits(x);
	uint32_t sign = (b >> 24) & 0x80u;
	uint32_t a = b & 0x7fffffffu;
	uint32_t normal = (a - (120u << 23) + 0x7ffffu + ((a >> 20) & 1)) >> 20;
	/* one ulp of a float in [2^14, 2^15) is e4m3's smallest step, 2^-9 */
	uint32_t small =
		kvk_f32_bits(kvk_add_rn(kvk_bits_f32(a), 16384.0f)) - 0x46800000u;
	uint32_t r = a < 0x3c800000u ? small : normal;

	r = a > 0x43e00000u ? 0x7eu : r;
	r = a > 0x7f800000u ? 0x7fu : r;
	return (uint8_t)(sign | r);
}

/* Exact. 0x7f and 0xff give NaN. */
KV_INLINE float kvk_e4m3_decode(uint8_t c)
{
	uint32_t sign = (uint32_t)(c & 0x80u) << 24;
	uint32_t a = c & 0x7fu;
	uint32_t normal = (a << 20) + (120u << 23);
	uint32_t small = kvk_f32_bits((float)(int32_t)a * 0x1p-9f);
	uint32_t r = a < 8u ? small : normal;

	return kvk_bits_f32(sign | (a == 0x7fu ? 0x7fc00000u : r));
}

KV_INLINE int kvk_e4m3_is_nan(uint8_t c)
{
	return (c & 0x7fu) == 0x7fu;
}

/* kvk_e4m3_decode() of each code; host only, in fp8_table.c */
#ifdef __cplusplus
extern "C" const float kvk_e4m3_table[256];
#else
extern const float kvk_e4m3_table[256];
#endif

/* -------------------------------------------------------------------------- scales */

/**
 * kvk_fp8_token_scale() - fp16 scale of a token's values in a page (KV_SCALE_TOKEN)
 * @amax: largest |x| of the values that are not NaN
 *
 * amax / 448 rounded up to fp16, so that no value saturates; 1 when amax is 0. Too large
 * for fp16 (or infinite): 65504, and the values saturate. Values are e4m3(kvk_div_rn(x,
 * scale)).
 *
 * Return: fp16 bits.
 */
KV_INLINE uint16_t kvk_fp8_token_scale(float amax)
{
	float want = kvk_div_rn(amax, KVK_E4M3_MAX);
	uint32_t h = kvk_f32_to_f16(want);

	h += kvk_f16_to_f32((uint16_t)h) < want ? 1u : 0u;
	h = h > KVK_F16_FINITE ? KVK_F16_FINITE : h;
	return (uint16_t)(amax == 0.0f ? KVK_F16_ONE : h);
}

/**
 * kvk_fp8_act_scale() - f32 scale of 128 activations of a token (E4M3 weights)
 * @amax: largest |x|; NaN values may be left out, they stay NaN as codes
 *
 * Return: amax / 448; 1 when amax is 0. Values are e4m3(kvk_div_rn(x, scale)).
 */
KV_INLINE float kvk_fp8_act_scale(float amax)
{
	return amax == 0.0f ? 1.0f : kvk_div_rn(amax, KVK_E4M3_MAX);
}

/* Blocks of 128 along an axis; the last one may be short. */
KV_INLINE uint32_t kvk_fp8_blocks(uint32_t n)
{
	return (n + KVK_FP8_BLOCK - 1) / KVK_FP8_BLOCK;
}

/* Index of the scale of element (row, col) in f32 [ceil(rows / 128)][ceil(cols / 128)].
 */
KV_INLINE size_t kvk_fp8_scale_index(uint32_t row, uint32_t col, uint32_t cols)
{
	return (size_t)(row / KVK_FP8_BLOCK) * kvk_fp8_blocks(cols) + col / KVK_FP8_BLOCK;
}

#endif /* KVK_FP8_H */
