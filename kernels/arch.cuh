/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arch.cuh - what compiles where. sm_90a has everything; elsewhere the table takes other
 * kernels (ops_cuda.cu), and those written for Hopper alone only have to compile.
 */
#ifndef KVK_ARCH_CUH
#define KVK_ARCH_CUH

#include <cuda_runtime.h>
#include "fp8.h"

/* An instruction of Hopper alone; code with it is never launched on another device. */
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SM90_ASM(...) __trap()
#else
#define SM90_ASM(...) asm volatile(__VA_ARGS__)
#endif

/* Programmatic launch: before Hopper a kernel simply starts behind the one before. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define GRID_ASM(...) ((void)0)
#else
#define GRID_ASM(...) asm volatile(__VA_ARGS__)
#endif

/* 2^x within two units of the last place; results below 2^-126 are 0. */
static __device__ __forceinline__ float arch_exp2(float x)
{
	float e;

	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
	return e;
}

/* Two e4m3 (low byte first) to f16x2. Exact. */
static __device__ __forceinline__ uint32_t arch_e4m3_f16(uint32_t two)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
	uint32_t d;

	asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"((uint16_t)two));
	return d;
#else
	return kvk_f32_to_f16(kvk_e4m3_decode((uint8_t)two)) |
	       (uint32_t)kvk_f32_to_f16(kvk_e4m3_decode((uint8_t)(two >> 8))) << 16;
#endif
}

/* Two floats to e4m3, the first in the low byte; saturates. A NaN may lose its sign. */
static __device__ __forceinline__ uint32_t arch_f32_e4m3(float lo, float hi)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
	uint16_t d;

	asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
	return d;
#else
	return kvk_e4m3_encode(lo) | (uint32_t)kvk_e4m3_encode(hi) << 8;
#endif
}

#endif /* KVK_ARCH_CUH */
