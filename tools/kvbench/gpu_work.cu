/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_work.cu - see gpu_work.h. Everything runs on m->stream. */
#include "tools/kvbench/gpu_work.h"

#include <cuda_runtime.h>
#include <errno.h>

#define READ_THREADS 512u
#define READ_CTAS    528u
#define READ_ILP     8u
#define COPIES_AHEAD 128u /* rounds */

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

/* What a process's copies come from: a page of bytes, and one number for each round ahead. */
struct copies_from {
	void *page;
	u64 *numbers;
	cudaEvent_t done[COPIES_AHEAD];
};

static int copies_open(const struct kvb_gpu_copies *c, struct copies_from *from)
{
	const size_t bytes = COPIES_AHEAD * 2 * sizeof(u64);
	u64 numbers[COPIES_AHEAD * 2];
	int r = answer(cudaMallocHost(&from->page, c->page_bytes));

	if (!r)
		r = answer(cudaMalloc((void **)&from->numbers, bytes));
	for (u32 i = 0; i < COPIES_AHEAD && !r; i++)
		r = answer(
			cudaEventCreateWithFlags(&from->done[i], cudaEventDisableTiming));
	if (r)
		return r;
	for (u32 i = 0; i < COPIES_AHEAD * 2; i++)
		numbers[i] = i + 1;
	return answer(cudaMemcpy(from->numbers, numbers, bytes, cudaMemcpyHostToDevice));
}

int kvb_gpu_copies(struct eng_mem *m, struct kvb_gpu_copies *c)
{
	static struct copies_from from;
	const u32 slot = (u32)(c->step % COPIES_AHEAD);
	cudaStream_t stream = (cudaStream_t)m->stream;
	int r = from.page ? 0 : copies_open(c, &from);

	if (!r && c->step >= COPIES_AHEAD)
		r = answer(cudaEventSynchronize(from.done[slot]));
	for (u32 i = 0; i < c->nr_pages && !r; i++)
		r = answer(cudaMemcpyAsync(c->pages[i], from.page, c->page_bytes,
					   cudaMemcpyHostToDevice, stream));
	if (!r)
		r = answer(cudaMemcpyAsync(c->counter,
					   from.numbers + c->step % (COPIES_AHEAD * 2),
					   sizeof(u64), cudaMemcpyDeviceToHost, stream));
	if (!r)
		r = answer(cudaEventRecord(from.done[slot], stream));
	c->step++;
	return r;
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
