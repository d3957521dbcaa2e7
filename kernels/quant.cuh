/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quant.cuh - quotients on their way to e4m3, without a division each.
 *
 * x times 1 / scale is off from kvk_div_rn(x, scale) by two units in the last place at
 * most. That changes the e4m3 code only near a tie between two codes, and among the
 * smallest codes, whose ties are elsewhere; there the division decides. So the codes are
 * those of fp8.h for every x and scale.
 */
#ifndef KVK_QUANT_CUH
#define KVK_QUANT_CUH

#include <cuda_runtime.h>
#include "fp8.h"

/**
 * struct kvk_quant - a scale
 * @inverse: 1 / scale
 * @quick: inverse is a good number
 */
struct kvk_quant {
	float scale;
	float inverse;
	bool quick;
};

static __device__ __forceinline__ struct kvk_quant kvk_quant_make(float scale)
{
	struct kvk_quant q;

	q.scale = scale;
	q.inverse = 1.0f / scale;
	q.quick = scale > 0x1p-100f && scale < 0x1p100f;
	return q;
}

/* Must a value be divided by its scale, @v being the quotient nearly? */
static __device__ __forceinline__ bool kvk_quant_near(float v)
{
	uint32_t a = kvk_f32_bits(v) & 0x7fffffffu;

	return (a & 0xfffffu) - 0x7fff8u <= 16u || (a && a < 0x3c800000u) ||
	       a > 0x7f800000u;
}

/* x / scale for e4m3, in place. NaN keeps its sign, which a GPU's own quotient loses. */
template <int N>
static __device__ __forceinline__ void kvk_quant_div(float (&x)[N],
						     const struct kvk_quant &q)
{
	bool exact = !q.quick;
	float v[N];

#pragma unroll
	for (int i = 0; i < N; i++) {
		v[i] = x[i] * q.inverse;
		exact |= kvk_quant_near(v[i]);
	}
	if (!exact) {
#pragma unroll
		for (int i = 0; i < N; i++)
			x[i] = v[i];
		return;
	}
#pragma unroll
	for (int i = 0; i < N; i++)
		x[i] = kvk_is_nan(x[i]) ? x[i] : kvk_div_rn(x[i], q.scale);
}

#endif /* KVK_QUANT_CUH */
