/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_work.cu - see gpu_work.h. Everything runs on m->stream. */
#include "tools/kvbench/gpu_work.h"

#include <cuda_runtime.h>
#include <errno.h>

#define READ_THREADS 512u
#define READ_CTAS    528u
#define READ_ILP     8u

static int answer(cudaError_t e)
{
	return e == cudaSuccess ? 0 : -EIO;
}

int kvb_gpu_share(void *host, size_t bytes, void **ret_dev)
{
	int r = answer(cudaHostRegister(host, bytes, cudaHostRegisterMapped));

	return r ? r : answer(cudaHostGetDevicePointer(ret_dev, host, 0));
}

__device__ __forceinline__ u64 timer_ns(void)
{
	u64 ns;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
	return ns;
}

__global__ void store_kernel(volatile u64 *page, volatile u64 *counter, u64 ns)
{
	const u64 end_ns = timer_ns() + ns;
	u64 i = *counter;

	while (timer_ns() < end_ns) {
		*page = ++i;
		__threadfence_system();
		*counter = i;
	}
}

int kvb_gpu_store(struct eng_mem *m, u64 *page, u64 *counter, u64 ns)
{
	store_kernel<<<1, 1, 0, (cudaStream_t)m->stream>>>(page, counter, ns);
	return answer(cudaGetLastError());
}

__global__ void __launch_bounds__(READ_THREADS)
	read_kernel(const uint4 *__restrict__ from, u64 nr, u64 *sink)
{
	const u64 stride = (u64)gridDim.x * READ_THREADS;
	u32 sum = 0;

	for (u64 at = (u64)blockIdx.x * READ_THREADS + threadIdx.x; at < nr;
	     at += stride * READ_ILP) {
		uint4 v[READ_ILP];

#pragma unroll
		for (u32 k = 0; k < READ_ILP; k++)
			v[k] = at + k * stride < nr ? __ldcs(from + at + k * stride)
						    : make_uint4(0, 0, 0, 0);
#pragma unroll
		for (u32 k = 0; k < READ_ILP; k++)
			sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
	}
	if (sum == 0x9e3779b9u) /* hardly ever, but the reads must be made */
		*sink = sum;
}

int kvb_gpu_read(struct eng_mem *m, const void *from, size_t bytes, u64 *sink)
{
	read_kernel<<<READ_CTAS, READ_THREADS, 0, (cudaStream_t)m->stream>>>(
		(const uint4 *)from, bytes / 16, sink);
	return answer(cudaGetLastError());
}
