/* SPDX-License-Identifier: Apache-2.0 */
/* rank_fill.cu - rank_fill.h on a GPU. */
#include "tools/kvbench/rank_fill.h"

#include <cuda_runtime.h>
#include <errno.h>

#define FILL_CTAS    1056u
#define FILL_THREADS 256u
#define READ_CTAS    528u
#define READ_THREADS 512u

static int launched(void)
{
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

__global__ void __launch_bounds__(FILL_THREADS) fill_kernel(const struct rank_fill f)
{
	const u64 step = (u64)gridDim.x * blockDim.x;

	for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < f.n; i += step)
		rank_put(&f, i);
}

int rank_fill_cuda(struct eng_mem *m, const struct rank_fill *f)
{
	fill_kernel<<<FILL_CTAS, FILL_THREADS, 0, (cudaStream_t)m->stream>>>(*f);
	return launched();
}

/* A CTA per layer of a page. */
__global__ void __launch_bounds__(FILL_THREADS)
	pages_kernel(const __grid_constant__ struct kvk_pages p, const u32 *pfns,
		     u64 seed)
{
	const struct kv_layout &l = p.layout;
	const u32 pfn = pfns[blockIdx.x], layer = blockIdx.y,
		  words = kv_layer_bytes(&l) / 4;
	u32 *part = (u32 *)((u8 *)p.base + kv_page_offset(&p.geometry, pfn) +
			    (u64)layer * kv_layer_stride(&l));

	for (u32 w = threadIdx.x; w < words; w += FILL_THREADS)
		part[w] = rank_page_word(
			&l, w * 4, rank_mix(seed + ((u64)pfn << 32) + (layer << 20) + w));
}

int rank_fill_pages_cuda(struct eng_mem *m, const struct kvk_pages *p, const u32 *pfns,
			 u32 nr, u64 seed)
{
	if (!nr)
		return 0;
	pages_kernel<<<dim3(nr, p->layout.nr_layers), FILL_THREADS, 0,
		       (cudaStream_t)m->stream>>>(*p, pfns, seed);
	return launched();
}

__global__ void __launch_bounds__(READ_THREADS)
	read_kernel(const uint4 *src, u64 n, u32 *sink)
{
	const u64 step = (u64)gridDim.x * blockDim.x;
	u32 sum = 0;

	for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i + 3 * step < n;
	     i += 4 * step) {
		uint4 v[4];

#pragma unroll
		for (u32 k = 0; k < 4; k++)
			v[k] = __ldcs(src + i + k * step);
#pragma unroll
		for (u32 k = 0; k < 4; k++)
			sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
	}
	if (sum == 0x12345678u)
		*sink = sum; /* keeps the loads */
}

int rank_read_cuda(struct eng_mem *m, const void *src, u64 bytes, u32 *sink)
{
	read_kernel<<<READ_CTAS, READ_THREADS, 0, (cudaStream_t)m->stream>>>(
		(const uint4 *)src, bytes / 16, sink);
	return launched();
}
