/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fp8_quotient.h - BF16 activations on their way to e4m3 without a division each: for the host
 * (which tests all of it) and the device. Pure functions; see fp8.h.
 */
#ifndef KVK_FP8_QUOTIENT_H
#define KVK_FP8_QUOTIENT_H

#include "kernels/fp8.h"

/**
 * struct kvk_fp8_divisor - the scale of a token's block
 * @up: what values are multiplied with first: nearly always 1
 * @scale: times up, neither small nor large; 0 for an infinite one
 * @inverse: of that; 0 for an infinite one
 */
struct kvk_fp8_divisor {
	float up;
	float scale;
	float inverse;
};

/* a b + c, rounded once */
KV_INLINE float kvk_fma_rn(float a, float b, float c)
{
#ifdef __CUDA_ARCH__
	return __fmaf_rn(a, b, c);
#else
	return __builtin_fmaf(a, b, c);
#endif
}

/* @scale: kvk_fp8_act_scale() of a BF16 value */
KV_INLINE struct kvk_fp8_divisor kvk_fp8_divide_by(float scale)
{
	struct kvk_fp8_divisor d;

	d.up = scale > 0x1p100f ? 0x1p-64f : scale < 0x1p-100f ? 0x1p64f : 1.0f;
	d.scale = scale * d.up;
	d.inverse = kvk_div_rn(1.0f, d.scale);
	d.scale = d.inverse == 0.0f ? 0.0f : d.scale;
	return d;
}

/**
 * kvk_fp8_quotient() - x / scale, as far as e4m3 codes can tell
 * @x: a BF16 value, |x| <= 448 scale, times d's up; or NaN
 * @d: kvk_fp8_divide_by(scale)
 *
 * x times the inverse alone gives another code once in 3,000, at ties. With what it leaves of x
 * added it never does: tests/kernels/format_ref.c tries all pairs of mantissas.
 *
 * Return: a number with the code of kvk_div_rn(x, scale); a zero of any sign for a zero, NaN for
 * NaN.
 */
KV_INLINE float kvk_fp8_quotient(float x, struct kvk_fp8_divisor d)
{
	const float q = x * d.inverse;

	return kvk_fma_rn(kvk_fma_rn(-q, d.scale, x), d.inverse, q);
}

#endif /* KVK_FP8_QUOTIENT_H */
