/* SPDX-License-Identifier: Apache-2.0 */
/*
 * norm_rope.cuh - the arithmetic of norm and rope that more than one kernel does: each operation
 * by its name, so that the compiler fuses the same ones everywhere and results are bit-equal.
 */
#ifndef KVK_NORM_ROPE_CUH
#define KVK_NORM_ROPE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

/* @sum and the squares of two neighbours. */
static __device__ __forceinline__ float norm_add(float sum, float lo, float hi)
{
	return sum + fmaf(lo, lo, hi * hi);
}

/* What values are multiplied with before their weights. */
static __device__ __forceinline__ float norm_inverse(float sum, uint32_t cols, float eps)
{
	return 1.0f / sqrtf(sum / (float)cols + eps);
}

/* The first and the second one of a rotated pair; @c, @s: its cosine and sine. */
static __device__ __forceinline__ float rope_first(float p, float q, float c, float s)
{
	return fmaf(p, c, -(q * s));
}

static __device__ __forceinline__ float rope_second(float p, float q, float c, float s)
{
	return fmaf(q, c, p * s);
}

#endif /* KVK_NORM_ROPE_CUH */
