/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_copy.cu - what the card gives to plain copies of as many bytes as append and conversion
 * move, in kvbench-kernels: the limit that those lines are judged by. Reads and writes share the
 * memory's wires and it turns round between them, so they are slower than reads alone.
 *
 * Three ways: the driver's copy, 16-byte loads and stores, and the copy engine of each SM (bulk
 * loads into shared memory and bulk stores out of it). "1:1" writes what it reads (pages in BF16),
 * "2:1" half of that (pages in FP8). One thread.
 */
#include "kernels_pages.h"
#include "kernels/moe_ptx.cuh"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define COPY_CTAS    132u
#define COPY_THREADS 512u
#define COPY_ILP     4u
#define COPY_CHUNK   16384u
#define COPY_STAGES  12u
#define COPY_BEHIND  4u /* stores whose chunk may still be on its way out */
#define COPY_SETS    8u

struct copy_case {
	const uint8_t *src;
	uint8_t *dst;
	size_t read, write; /* bytes of a call */
};

/* ----------------------------------------------------------------------------- 16-byte words */

/*
 * A store for each HALF + 1 loads; all loads of a thread are on their way together. A CTA for each
 * piece: 132 or 528 that walk over the pieces are 5 to 10 % slower (453 MB 2:1 105.7, 109 us).
 */
template <uint32_t HALF>
__global__ void __launch_bounds__(COPY_THREADS)
	copy_words(const uint4 *src, uint4 *dst, size_t nr_words)
{
	const size_t first = (size_t)blockIdx.x * COPY_THREADS * COPY_ILP + threadIdx.x;
	uint4 v[COPY_ILP][HALF + 1];

#pragma unroll
	for (uint32_t k = 0; k < COPY_ILP; k++)
#pragma unroll
		for (uint32_t h = 0; h <= HALF; h++)
			if (first + k * COPY_THREADS < nr_words)
				v[k][h] = src[(first + k * COPY_THREADS - threadIdx.x) *
						      (HALF + 1) +
					      h * COPY_THREADS + threadIdx.x];
#pragma unroll
	for (uint32_t k = 0; k < COPY_ILP; k++) {
		uint4 w = v[k][0];

		if (HALF) {
			const uint4 x = v[k][HALF];

			w = make_uint4(w.x ^ x.x, w.y ^ x.y, w.z ^ x.z, w.w ^ x.w);
		}
		if (first + k * COPY_THREADS < nr_words)
			dst[first + k * COPY_THREADS] = w;
	}
}

/* ------------------------------------------------------------------------------- bulk copies */

__device__ __forceinline__ void bulk_store(void *dst, uint32_t src, uint32_t bytes)
{
	SM90_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
		 "cp.async.bulk.commit_group;" ::"l"(dst),
		 "r"(src), "r"(bytes)
		 : "memory");
}

/* One thread of a CTA keeps loads and stores of COPY_STAGES chunks going. */
__global__ void __launch_bounds__(32) copy_bulk(const uint8_t *src, uint8_t *dst,
						size_t nr_chunks, uint32_t store_bytes)
{
	extern __shared__ __align__(128) uint8_t copy_smem[];
	__shared__ uint64_t full[COPY_STAGES];
	const size_t first = blockIdx.x, step = gridDim.x;
	const size_t nr = first < nr_chunks ? (nr_chunks - first - 1) / step + 1 : 0;
	const uint32_t smem = ptx_smem(copy_smem), bar = ptx_smem(full);
	const uint64_t policy = ptx_policy_stream();

	if (threadIdx.x)
		return;
	for (uint32_t s = 0; s < COPY_STAGES; s++)
		ptx_mbar_init(bar + s * 8, 1);
	SM90_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
	for (size_t i = 0; i < nr; i++) {
		const size_t end = i + COPY_STAGES - COPY_BEHIND;
		const uint32_t s = (uint32_t)(i % COPY_STAGES);

		/* the chunk COPY_BEHIND before has left its place, and the next one moves in */
		SM90_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(COPY_BEHIND - 1)
			 : "memory");
		for (size_t k = i ? end - 1 : 0; k < end && k < nr; k++) {
			const uint32_t to = (uint32_t)(k % COPY_STAGES);

			ptx_mbar_expect(bar + to * 8, COPY_CHUNK);
			ptx_bulk_stream(smem + to * COPY_CHUNK,
					src + (first + k * step) * COPY_CHUNK, COPY_CHUNK,
					bar + to * 8, policy);
		}
		ptx_mbar_wait(bar + s * 8, (uint32_t)(i / COPY_STAGES) & 1);
		bulk_store(dst + (first + i * step) * store_bytes, smem + s * COPY_CHUNK,
			   store_bytes);
	}
	SM90_ASM("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ------------------------------------------------------------------------------------- calls */

static int call_driver(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct copy_case *c = (struct copy_case *)arg;

	return cudaMemcpyAsync(c->dst + set * c->write, c->src + set * c->read, c->write,
			       cudaMemcpyDeviceToDevice, ctx->stream) == cudaSuccess
		       ? 0
		       : -EIO;
}

static int call_words(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct copy_case *c = (struct copy_case *)arg;
	const uint4 *src = (const uint4 *)(c->src + set * c->read);
	uint4 *dst = (uint4 *)(c->dst + set * c->write);

	const size_t n = c->write / 16, per = COPY_THREADS * COPY_ILP;
	const uint32_t ctas = (uint32_t)((n + per - 1) / per);

	if (c->read == c->write)
		copy_words<0><<<ctas, COPY_THREADS, 0, ctx->stream>>>(src, dst, n);
	else
		copy_words<1><<<ctas, COPY_THREADS, 0, ctx->stream>>>(src, dst, n);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

static int call_bulk(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct copy_case *c = (struct copy_case *)arg;
	const uint32_t store = (uint32_t)(COPY_CHUNK * c->write / c->read);

	copy_bulk<<<COPY_CTAS, 32, COPY_STAGES * COPY_CHUNK, ctx->stream>>>(
		c->src + set * c->read, c->dst + set * c->write, c->read / COPY_CHUNK,
		store);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

/* ------------------------------------------------------------------------------------- lines */

static int copy_line(struct kvb_ctx *ctx, struct copy_case *c, const char *name,
		     const char *shape, kvb_call call)
{
	struct kvb_row row = {};
	uint32_t nr_calls;
	int r;

	if (!kvb_selected(ctx, name, shape))
		return 0;
	snprintf(row.family, sizeof(row.family), "pages");
	snprintf(row.name, sizeof(row.name), "%s", name);
	snprintf(row.shape, sizeof(row.shape), "%s", shape);
	row.bytes = (double)(c->read + c->write);
	row.err = -1;
	nr_calls = kvb_calls(row.bytes);
	nr_calls = nr_calls < 24 ? (nr_calls + 7) / 8 * 8 : 24;
	r = kvb_time(ctx, call, c, COPY_SETS, nr_calls, &row);
	if (!r)
		kvb_row_add(ctx, &row);
	return r;
}

/**
 * kvb_copy_lines() - copies of the bytes of append 32,768 and of conversion of 512 pages
 * Return: 0 or -errno.
 */
int kvb_copy_lines(struct kvb_ctx *ctx)
{
	static const struct {
		const char *shape;
		size_t tokens, value_bytes;
		uint32_t half;
	} l[] = {{"1:1 mla 32768", 32768, 1152, 0},
		 {"2:1 mla 32768", 32768, 1152, 1},
		 {"2:1 gqa 32768", 32768, 4096, 1},
		 {"2:1 512 pages", 512 * 64, 1152 * 8, 1},
		 {"1:1 512 pages", 512 * 64, 580 * 8, 0}};
	const size_t most = 512ul * 64 * 1152 * 8;
	void *src, *dst;
	int r = 0;

	if (!kvb_selected(ctx, "limit", ""))
		return 0;
	if (cudaFuncSetAttribute((const void *)copy_bulk,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 COPY_STAGES * COPY_CHUNK) != cudaSuccess)
		return -EIO;
	KVB_CUDA(cudaMalloc(&src, most * COPY_SETS));
	KVB_CUDA(cudaMalloc(&dst, most * COPY_SETS));
	kvb_fill_bf16(ctx, src, most * COPY_SETS / 2, 51, 1.0f);
	for (size_t i = 0; i < sizeof(l) / sizeof(l[0]) && !r; i++) {
		struct copy_case c = {(const uint8_t *)src, (uint8_t *)dst, 0, 0};

		c.read = l[i].tokens * l[i].value_bytes / COPY_CHUNK * COPY_CHUNK;
		c.write = c.read >> l[i].half;
		if (!l[i].half)
			r = copy_line(ctx, &c, "limit driver's copy", l[i].shape,
				      call_driver);
		if (!r)
			r = copy_line(ctx, &c, "limit 16-byte words", l[i].shape,
				      call_words);
		if (!r)
			r = copy_line(ctx, &c, "limit bulk copies", l[i].shape,
				      call_bulk);
	}
	KVB_CUDA(cudaFree(src));
	KVB_CUDA(cudaFree(dst));
	return r;
}
