/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_fp16.h - pairs of 16-bit floats as the attention kernels use them, for the CPU. Found in
 * place of the toolkit's header of this name.
 */
#ifndef HOPPER_CUDA_FP16_H
#define HOPPER_CUDA_FP16_H

#include <cuda_runtime.h>
#include "kernels/fp8.h"

struct __half2 {
	uint16_t x, y;
};

static inline float __low2float(__half2 v)
{
	return kvk_f16_to_f32(v.x);
}

static inline float __high2float(__half2 v)
{
	return kvk_f16_to_f32(v.y);
}

static inline float2 __half22float2(__half2 v)
{
	return {__low2float(v), __high2float(v)};
}

static inline __half2 __floats2half2_rn(float x, float y)
{
	return {kvk_f32_to_f16(x), kvk_f32_to_f16(y)};
}

static inline __half2 __float2half2_rn(float v)
{
	return __floats2half2_rn(v, v);
}

/* One number. */
typedef float __half;

static inline __half __low2half(__half2 v)
{
	return __low2float(v);
}

static inline __half __high2half(__half2 v)
{
	return __high2float(v);
}

static inline __half __float2half(float v)
{
	return kvk_f16_to_f32(kvk_f32_to_f16(v));
}

static inline __half __hmax(__half a, __half b)
{
	return fmaxf(a, b);
}

static inline bool __hgt(__half a, __half b)
{
	return a > b;
}

/* A float holds the product of two exactly. */
static inline __half2 __hmul2(__half2 a, __half2 b)
{
	return __floats2half2_rn(__low2float(a) * __low2float(b),
				 __high2float(a) * __high2float(b));
}

/* The larger ones; a NaN only where both are. */
static inline __half2 __hmax2(__half2 a, __half2 b)
{
	return __floats2half2_rn(fmaxf(__low2float(a), __low2float(b)),
				 fmaxf(__high2float(a), __high2float(b)));
}

#endif /* HOPPER_CUDA_FP16_H */
