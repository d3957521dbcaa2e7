/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_bf16.h - the same as cuda_fp16.h for bfloat16 */
#ifndef HOPPER_CUDA_BF16_H
#define HOPPER_CUDA_BF16_H

#include <cuda_runtime.h>
#include "kernels/fp8.h"

struct __nv_bfloat16 {
	uint16_t v;
};

struct __nv_bfloat162 {
	uint16_t x, y;
};

static inline float __bfloat162float(__nv_bfloat16 v)
{
	return kvk_bf16_to_f32(v.v);
}

static inline __nv_bfloat16 __float2bfloat16(float v)
{
	return {kvk_f32_to_bf16(v)};
}

static inline __nv_bfloat162 __float2bfloat162_rn(float v)
{
	return {kvk_f32_to_bf16(v), kvk_f32_to_bf16(v)};
}

static inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b)
{
	return {kvk_f32_to_bf16(kvk_bf16_to_f32(a.x) * kvk_bf16_to_f32(b.x)),
		kvk_f32_to_bf16(kvk_bf16_to_f32(a.y) * kvk_bf16_to_f32(b.y))};
}

#endif /* HOPPER_CUDA_BF16_H */
