/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_runtime.h - CUDA's words for a C++ compiler, so that kernels written for Hopper run
 * on the CPU: found in place of the toolkit's header of this name. On top of machine.cc.
 *
 * It has what the kernels in hopper.mk use. "Device" memory is host memory, a launch runs at
 * once. Atomics and global loads are plain: one thread runs at a time.
 */
#ifndef HOPPER_CUDA_RUNTIME_H
#define HOPPER_CUDA_RUNTIME_H

#include "cuda.h"

#include <algorithm>
#include <functional>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

using std::max;
using std::min;

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(x) __attribute__((aligned(x)))

struct dim3 {
	unsigned x, y, z;
	dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz)
	{
	}
};

struct alignas(8) uint2 {
	unsigned x, y;
};

struct alignas(16) uint4 {
	unsigned x, y, z, w;
};

struct alignas(8) float2 {
	float x, y;
};

struct alignas(16) float4 {
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

static inline float2 make_float2(float x, float y)
{
	return {x, y};
}

/* ---------------------------------------------------------------------------- machine.cc
 */

struct hopper_index {
	unsigned x, y, z;
};

/* Of the thread that runs now. */
extern hopper_index threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

/* A launch: all blocks of a small grid at once, else one cluster of them after another. */
void hopper_launch(dim3 grid, dim3 block, std::function<void()> thread,
		   unsigned cluster = 1);
void hopper_yield(void);
void hopper_barrier(uint32_t id, uint32_t nr_threads);
bool hopper_barrier_or(uint32_t id, uint32_t nr_threads,
		       bool yes); /* has any said yes? */
void hopper_arrive(uint32_t id, uint32_t nr_threads);
long long hopper_clock(void);
void hopper_warp_barrier(void);
uint64_t *hopper_lanes(void); /* the warp's exchange: 16 words a lane */
uint8_t *hopper_shared(void); /* the block's shared memory, address 0 */
void hopper_cluster_barrier(void);
void hopper_cluster_arrive(void);
void hopper_cluster_wait(void);
uint8_t *hopper_cluster_shared(uint32_t rank); /* of another block of the cluster */
void *hopper_static(size_t bytes);

template <class T> static inline T &hopper_static_as(void)
{
	return *(T *)hopper_static(sizeof(T));
}

/* moe_ptx.cuh's and dev.cuh's words for shared memory */
#define MOE_SHARED(type, name) type &name = hopper_static_as<type>()
#define MOE_DYNAMIC(name)      uint8_t *const name = hopper_shared() + 1024
#define MOE_LAUNCH(kernel, grid, threads, stream, ...)                          \
	do {                                                                    \
		(void)(stream);                                                 \
		hopper_launch((grid), (threads), [=] { kernel(__VA_ARGS__); }); \
	} while (0)
#define DEV_SHARED(type, name)	    MOE_SHARED(type, name)
#define DEV_DYNAMIC_SHARED(name)    uint8_t *const name = hopper_shared() + 1024
#define DEV_DYNAMIC_SHARED_1K(name) DEV_DYNAMIC_SHARED(name)
#define DEV_LAUNCH(kernel, grid, block, stream, args) \
	DEV_LAUNCH_SHARED(kernel, grid, block, 0, stream, args)
#define DEV_LAUNCH_SHARED(kernel, grid, block, bytes, stream, args)         \
	do {                                                                \
		auto args_ = args;                                          \
		(void)(stream);                                             \
		(void)(bytes);                                              \
		hopper_launch((grid), (block), [args_] { kernel(args_); }); \
	} while (0)

/* ---------------------------------------------------------------------- device functions
 */

static inline void __syncthreads(void)
{
	hopper_barrier(0, blockDim.x);
}

static inline void __syncwarp(unsigned = ~0u)
{
	hopper_warp_barrier();
}

/* Every lane gives @value and gets what @pick makes of all 32. */
template <class T, class F> static inline T hopper_exchange(T value, F pick)
{
	uint64_t *lanes = hopper_lanes();
	T all[32], result;

	memcpy(&lanes[threadIdx.x % 32 * 16], &value, sizeof(value));
	hopper_warp_barrier();
	for (int i = 0; i < 32; i++)
		memcpy(&all[i], &lanes[i * 16], sizeof(value));
	result = pick(all);
	hopper_warp_barrier();
	return result;
}

template <class T> static inline T __shfl_sync(unsigned, T value, unsigned lane)
{
	return hopper_exchange(value, [=](const T *all) { return all[lane % 32]; });
}

template <class T> static inline T __shfl_xor_sync(unsigned, T value, unsigned mask)
{
	return __shfl_sync(~0u, value, threadIdx.x ^ mask);
}

template <class T> static inline T __shfl_up_sync(unsigned, T value, unsigned by)
{
	const unsigned lane = threadIdx.x % 32;

	return __shfl_sync(~0u, value, lane < by ? lane : lane - by);
}

template <class T> static inline T __shfl_down_sync(unsigned, T value, unsigned by)
{
	const unsigned lane = threadIdx.x % 32;

	return __shfl_sync(~0u, value, lane + by > 31 ? lane : lane + by);
}

static inline unsigned __ballot_sync(unsigned, int predicate)
{
	return hopper_exchange((unsigned)(predicate != 0), [](const unsigned *all) {
		unsigned bits = 0;

		for (int i = 0; i < 32; i++)
			bits |= all[i] << i;
		return bits;
	});
}

static inline unsigned __reduce_max_sync(unsigned, unsigned value)
{
	return hopper_exchange(value, [](const unsigned *all) {
		return *std::max_element(all, all + 32);
	});
}

static inline unsigned __match_any_sync(unsigned, unsigned value)
{
	return hopper_exchange(value, [=](const unsigned *all) {
		unsigned bits = 0;

		for (int i = 0; i < 32; i++)
			bits |= (unsigned)(all[i] == value) << i;
		return bits;
	});
}

static inline unsigned __reduce_min_sync(unsigned, unsigned value)
{
	return ~__reduce_max_sync(~0u, ~value);
}

static inline int __any_sync(unsigned, int predicate)
{
	return __ballot_sync(~0u, predicate) != 0;
}

static inline int __all_sync(unsigned, int predicate)
{
	return __ballot_sync(~0u, predicate) == ~0u;
}

static inline int __syncthreads_or(int v)
{
	return hopper_barrier_or(0, blockDim.x, v != 0);
}

static inline int __syncthreads_and(int v)
{
	return !hopper_barrier_or(0, blockDim.x, v == 0);
}

static inline long long clock64(void)
{
	return hopper_clock();
}

static inline int __ffs(int v)
{
	return __builtin_ffs(v);
}

static inline int __ffsll(long long v)
{
	return __builtin_ffsll(v);
}

static inline int __clz(int v)
{
	return v ? __builtin_clz((unsigned)v) : 32;
}

static inline int __popc(unsigned v)
{
	return __builtin_popcount(v);
}

static inline int __popcll(unsigned long long v)
{
	return __builtin_popcountll(v);
}

static inline unsigned __umulhi(unsigned a, unsigned b)
{
	return (unsigned)((uint64_t)a * b >> 32);
}

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
	return (unsigned long long)((unsigned __int128)a * b >> 64);
}

/* Towards zero, of numbers of one sign: what long double lacks of the sum is below a float. */
static inline float __fadd_rz(float a, float b)
{
	const long double sum = (long double)a + b;
	const float r = (float)sum;

	return fabsl((long double)r) > fabsl(sum) ? nextafterf(r, 0.0f) : r;
}

void hopper_fault(const char *what);

template <class T> static inline T __ldcg(const T *p)
{
	return *p;
}

/* Tests fill workspaces with NaN of all bits: nobody reads a factor that is not written yet. */
static inline float __ldcg(const float *p)
{
	uint32_t bits;

	memcpy(&bits, p, sizeof(bits));
	if (bits == ~0u)
		hopper_fault("what is read was written");
	return *p;
}

template <class T> static inline T __ldg(const T *p)
{
	return *p;
}

template <class T> static inline T __ldcs(const T *p)
{
	return *p;
}

template <class T> static inline T atomicAdd(T *p, T value)
{
	T old = *p;

	*p += value;
	return old;
}

static inline unsigned atomicAdd(unsigned *p, int value)
{
	return atomicAdd(p, (unsigned)value);
}

template <class T> static inline T atomicMax(T *p, T value)
{
	T old = *p;

	*p = max(old, value);
	return old;
}

template <class T> static inline T atomicMin(T *p, T value)
{
	T old = *p;

	*p = min(old, value);
	return old;
}

template <class T> static inline T atomicOr(T *p, T value)
{
	T old = *p;

	*p |= value;
	return old;
}

static inline void __threadfence(void)
{
}

static inline float __uint_as_float(uint32_t bits)
{
	float v;

	memcpy(&v, &bits, sizeof(v));
	return v;
}

static inline float __int_as_float(int bits)
{
	return __uint_as_float((uint32_t)bits);
}

static inline uint32_t __float_as_uint(float v)
{
	uint32_t bits;

	memcpy(&bits, &v, sizeof(bits));
	return bits;
}

static inline float __fdiv_rn(float a, float b)
{
	return a / b;
}

#define __expf(x)	 expf(x)
#define __log2f(x)	 log2f(x)
#define __logf(x)	 logf(x)
#define __fdividef(a, b) ((a) / (b))

/* ------------------------------------------------------------------------------- runtime
 */

typedef struct hopper_stream *cudaStream_t;
typedef enum cudaError { cudaSuccess = 0 } cudaError_t;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID {
	cudaLaunchAttributeProgrammaticStreamSerialization,
	cudaLaunchAttributeClusterDimension,
};

struct cudaLaunchAttribute {
	enum cudaLaunchAttributeID id;
	struct {
		int programmaticStreamSerializationAllowed;
		struct {
			unsigned x, y, z;
		} clusterDim;
	} val;
};

struct cudaLaunchConfig_t {
	dim3 gridDim, blockDim;
	size_t dynamicSmemBytes;
	cudaStream_t stream;
	cudaLaunchAttribute *attrs;
	unsigned numAttrs;
};

/* A kernel of Hopper code (ops_cuda.cu), it says. */
struct cudaFuncAttributes {
	size_t sharedSizeBytes;
};

static inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret_attr,
						const void *)
{
	ret_attr->sharedSizeBytes = 1;
	return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };

/* The one entry point that the kernels ask for. */
static inline cudaError_t
cudaGetDriverEntryPointByVersion(const char *, void **ret_fn, int, int,
				 cudaDriverEntryPointQueryResult *ret_found)
{
	*ret_fn = (void *)hopper_encode;
	*ret_found = cudaDriverEntryPointSuccess;
	return cudaSuccess;
}

#define HOPPER_SMS 3 /* so few that blocks meet each other's work */

static inline cudaError_t cudaGetDevice(int *ret_device)
{
	*ret_device = 0;
	return cudaSuccess;
}

extern int hopper_major; /* compute capability: 9, or what a test makes it */
extern int hopper_nr_sms;

static inline cudaError_t cudaDeviceGetAttribute(int *ret_value, cudaDeviceAttr attr, int)
{
	*ret_value =
		attr == cudaDevAttrMultiProcessorCount ? hopper_nr_sms : hopper_major;
	return cudaSuccess;
}

static inline cudaError_t cudaGetLastError(void)
{
	return cudaSuccess;
}

/* More than an SM has: as on a device, an error. */
template <class K>
static inline cudaError_t cudaFuncSetAttribute(K, cudaFuncAttribute, int bytes)
{
	return bytes <= (227 << 10) ? cudaSuccess : (cudaError_t)1;
}

template <class T> static inline cudaError_t cudaGetSymbolAddress(void **ret_p, T &symbol)
{
	*ret_p = (void *)&symbol;
	return cudaSuccess;
}

template <class A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c,
					     void (*kernel)(A), const A &args)
{
	unsigned cluster = 1;
	A copy = args;

	for (unsigned i = 0; i < c->numAttrs; i++)
		if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
			cluster = c->attrs[i].val.clusterDim.x;
	hopper_launch(
		c->gridDim, c->blockDim, [=] { kernel(copy); }, cluster);
	return cudaSuccess;
}

#endif /* HOPPER_CUDA_RUNTIME_H */
