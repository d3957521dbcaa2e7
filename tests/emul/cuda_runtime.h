/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_runtime.h - CUDA's words for a C++ compiler, so that kernels/x.cu run on the CPU.
 *
 * Found in place of the toolkit's header of this name. It has what the kernels
 * of emul.mk use, on top of emul.cc. __shared__ variables are static: one block runs at a
 * time, and finds in them what the block before left, as on a device. Atomics are plain:
 * one thread runs at a time. Instructions of the machine (inline PTX: copies in bulk,
 * matrix products) are not here; those kernels are not emulated.
 */
#ifndef EMUL_CUDA_RUNTIME_H
#define EMUL_CUDA_RUNTIME_H

#include <functional>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "cuda_runtime_api.h"

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__   static
#define __align__(x) __attribute__((aligned(x)))

struct dim3 {
	unsigned x, y, z;
	dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz)
	{
	}
};

struct __align__(8) uint2
{
	unsigned x, y;
};

struct __align__(16) uint4
{
	unsigned x, y, z, w;
};

struct __align__(16) float4
{
	float x, y, z, w;
};

static inline uint2 make_uint2(unsigned x, unsigned y)
{
	return {x, y};
}

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
	return {x, y, z, w};
}

static inline float4 make_float4(float x, float y, float z, float w)
{
	return {x, y, z, w};
}

/* ------------------------------------------------------------------------------ emul.cc
 */

/* What a lane gets of its warp's values. */
enum emul_how { EMUL_XOR, EMUL_LANE, EMUL_BALLOT };

struct emul_index {
	unsigned x, y, z;
};

/* Of the thread that runs now; emul.cc sets them. */
extern emul_index threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

void emul_launch(dim3 grid, dim3 block, std::function<void()> thread);
void emul_launch_host(std::function<void()> call);
void emul_block_barrier(void);
uint64_t emul_warp_exchange(uint64_t value, enum emul_how how, unsigned arg);

/* The arguments are copied at the launch, as CUDA does. Shadows dev.cuh's. */
#define DEV_LAUNCH(kernel, grid, block, stream, args)                     \
	do {                                                              \
		auto args_ = args;                                        \
		(void)(stream);                                           \
		emul_launch((grid), (block), [args_] { kernel(args_); }); \
	} while (0)

/* One kernel after the other here. */
#define DEV_LAUNCH_EARLY DEV_LAUNCH

/* ---------------------------------------------------------------------- device functions
 */

static inline void __syncthreads(void)
{
	emul_block_barrier();
}

template <class T> static inline T __shfl_xor_sync(unsigned, T value, unsigned mask)
{
	uint64_t bits = 0;

	memcpy(&bits, &value, sizeof(value));
	bits = emul_warp_exchange(bits, EMUL_XOR, mask);
	memcpy(&value, &bits, sizeof(value));
	return value;
}

template <class T> static inline T __shfl_sync(unsigned, T value, int lane)
{
	uint64_t bits = 0;

	memcpy(&bits, &value, sizeof(value));
	bits = emul_warp_exchange(bits, EMUL_LANE, (unsigned)lane);
	memcpy(&value, &bits, sizeof(value));
	return value;
}

static inline unsigned __ballot_sync(unsigned, int predicate)
{
	return (unsigned)emul_warp_exchange(predicate != 0, EMUL_BALLOT, 0);
}

static inline void __syncwarp(void)
{
	(void)emul_warp_exchange(0, EMUL_BALLOT, 0);
}

template <class T> static inline T atomicAdd(T *p, T value)
{
	T old = *p;

	*p += value;
	return old;
}

template <class T> static inline T atomicMax(T *p, T value)
{
	T old = *p;

	*p = old > value ? old : value;
	return old;
}

template <class T> static inline T atomicMin(T *p, T value)
{
	T old = *p;

	*p = old < value ? old : value;
	return old;
}

template <class T> static inline T atomicOr(T *p, T value)
{
	T old = *p;

	*p |= value;
	return old;
}

template <class T> static inline T atomicXor(T *p, T value)
{
	T old = *p;

	*p ^= value;
	return old;
}

template <class T> static inline T min(T a, T b)
{
	return a < b ? a : b;
}

template <class T> static inline T max(T a, T b)
{
	return a > b ? a : b;
}

static inline int __popc(unsigned v)
{
	return __builtin_popcount(v);
}

static inline unsigned __float_as_uint(float f)
{
	unsigned u;

	memcpy(&u, &f, sizeof(u));
	return u;
}

static inline float __uint_as_float(unsigned u)
{
	float f;

	memcpy(&f, &u, sizeof(f));
	return f;
}

static inline float __fadd_rn(float a, float b)
{
	return a + b;
}

static inline float __fdiv_rn(float a, float b)
{
	return a / b;
}

#endif /* EMUL_CUDA_RUNTIME_H */
