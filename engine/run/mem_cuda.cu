/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem_cuda.cu - a GPU's memory, streams and graphs for the engine (see mem.h), and the
 * small kernels that are its own: rows copied, prompts scored, a step's data fetched.
 *
 * CUDA's answers become errno here and go no further. Any error is -EIO, and is no
 * completion: what was queued may still run (design 5, P8), so the caller must not retire
 * a step after it.
 *
 * Weights go through two pinned buffers: one is filled while the other is on its way.
 */
#include "engine/run/mem.h"

#include <cuda_runtime.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dev.cuh"
#include "kernels/fp8.h"
#include "kernels/moe_cuda.h"

#define STAGE_BYTES   ((size_t)16 << 20)
#define COPY_THREADS  256u
#define SCORE_THREADS 256u
#define FETCH_CTAS    32u
#define FETCH_THREADS 256u
#define FETCH_ILP     4u

struct cuda_block {
	struct cuda_block *next;
	void *p;
	bool host;
};

struct cuda_mem {
	struct eng_mem base;
	cudaStream_t main, side;
	cudaEvent_t forked, joined;
	struct cuda_block *blocks;
	void *stage[2];
	cudaEvent_t staged[2];
	u32 turn;
};

static struct cuda_mem *cuda(struct eng_mem *m)
{
	return (struct cuda_mem *)m;
}

static int answer(cudaError_t e)
{
	if (e == cudaSuccess)
		return 0;
	(void)cudaGetLastError();
	return e == cudaErrorMemoryAllocation ? -ENOMEM : -EIO;
}

/* -------------------------------------------------------------------------- kernels */

__device__ __forceinline__ float value_get(u32 dtype, const void *p, size_t i)
{
	return dtype == KVK_F32 ? ((const float *)p)[i]
				: kvk_bf16_to_f32(((const u16 *)p)[i]);
}

__global__ void __launch_bounds__(COPY_THREADS) copy_kernel(const struct eng_copy_args a)
{
	const u32 i = blockIdx.x;
	const size_t to = (size_t)i * a.dst_stride;
	size_t from;

	dev_grid_launch();
	dev_grid_wait();
	from = (size_t)(a.rows ? a.rows[i] : i) * a.src_stride;
	for (u32 c = threadIdx.x; c < a.cols; c += blockDim.x) {
		if (a.dst_dtype == KVK_F32)
			((float *)a.dst)[to + c] =
				value_get(a.src_dtype, a.src, from + c);
		else if (a.src_dtype == KVK_BF16) /* as it is, NaN's bits too */
			((u16 *)a.dst)[to + c] = ((const u16 *)a.src)[from + c];
		else
			((u16 *)a.dst)[to + c] =
				kvk_f32_to_bf16(((const float *)a.src)[from + c]);
	}
}

static int cuda_copy(struct eng_mem *m, const struct eng_copy_args *a)
{
	u32 threads = a->cols >= COPY_THREADS ? COPY_THREADS : (a->cols + 31) / 32 * 32;

	if (!a->nr_rows || !a->cols)
		return 0;
	DEV_LAUNCH_EARLY(copy_kernel, a->nr_rows, threads, m->stream, *a);
	return answer(cudaGetLastError());
}

/* A CTA per row; the sum in double, in a fixed order. */
__global__ void __launch_bounds__(SCORE_THREADS)
	score_kernel(const struct eng_score_args a)
{
	__shared__ double part[SCORE_THREADS];
	__shared__ float top[SCORE_THREADS];
	const u32 i = blockIdx.x, t = threadIdx.x;
	const float *x = a.logits + (size_t)i * a.vocab;
	const u32 target = a.targets[i];
	float max = -INFINITY;
	double sum = 0;

	if (target == ENG_NO_TARGET)
		return;
	for (u32 c = t; c < a.vocab; c += SCORE_THREADS)
		max = fmaxf(max, x[c]);
	top[t] = max;
	__syncthreads();
	for (u32 o = SCORE_THREADS / 2; o; o /= 2) {
		if (t < o)
			top[t] = fmaxf(top[t], top[t + o]);
		__syncthreads();
	}
	max = top[0];
	for (u32 c = t; c < a.vocab; c += SCORE_THREADS)
		sum += (double)expf(x[c] - max);
	part[t] = sum;
	__syncthreads();
	for (u32 o = SCORE_THREADS / 2; o; o /= 2) {
		if (t < o)
			part[t] += part[t + o];
		__syncthreads();
	}
	if (t == 0)
		a.ret[i] = (float)((double)x[target] - (double)max - log(part[0]));
}

static int cuda_score(struct eng_mem *m, const struct eng_score_args *a)
{
	if (!a->nr_rows)
		return 0;
	score_kernel<<<a->nr_rows, SCORE_THREADS, 0, cuda(m)->main>>>(*a);
	return answer(cudaGetLastError());
}

/* A host's memory is microseconds away: the count first, then all of a piece at once. */
__global__ void __launch_bounds__(FETCH_THREADS)
	fetch_kernel(const __grid_constant__ struct eng_fetch_args a)
{
	const struct eng_piece &p = a.piece[blockIdx.y];
	const size_t step = FETCH_CTAS * FETCH_THREADS;
	size_t n = p.bytes, at = blockIdx.x * FETCH_THREADS + threadIdx.x;

	if (p.count) {
		size_t used = p.head + (size_t) * (const volatile u32 *)p.count * p.unit;

		n = used < n ? used : n;
	}
	n = (n + 15) / 16;
	for (; at < n; at += step * FETCH_ILP) {
		uint4 v[FETCH_ILP];

#pragma unroll
		for (u32 k = 0; k < FETCH_ILP; k++)
			if (at + k * step < n)
				v[k] = ((const uint4 *)p.src)[at + k * step];
#pragma unroll
		for (u32 k = 0; k < FETCH_ILP; k++)
			if (at + k * step < n)
				((uint4 *)p.dst)[at + k * step] = v[k];
	}
}

static int cuda_fetch(struct eng_mem *m, const struct eng_fetch_args *a)
{
	struct cuda_mem *c = cuda(m);

	if (!a->nr)
		return 0;
	fetch_kernel<<<dim3(FETCH_CTAS, a->nr), FETCH_THREADS, 0,
		       a->side ? c->side : c->main>>>(*a);
	return answer(cudaGetLastError());
}

/* --------------------------------------------------------------------------- memory */

static int block_add(struct cuda_mem *c, void *p, bool host)
{
	struct cuda_block *b = (struct cuda_block *)calloc(1, sizeof(*b));

	if (!b)
		return -ENOMEM;
	b->next = c->blocks;
	b->p = p;
	b->host = host;
	c->blocks = b;
	return 0;
}

static int cuda_alloc(struct eng_mem *m, size_t bytes, void **ret)
{
	void *p = NULL;
	int rc = answer(cudaMalloc(&p, bytes ? bytes : 1));

	if (rc)
		return rc;
	rc = block_add(cuda(m), p, false);
	if (rc) {
		cudaFree(p);
		return rc;
	}
	*ret = p;
	return answer(cudaMemsetAsync(p, 0, bytes, cuda(m)->main));
}

static int cuda_alloc_host(struct eng_mem *m, size_t bytes, void **ret)
{
	void *p = NULL;
	int rc = answer(cudaMallocHost(&p, bytes ? bytes : 1));

	if (rc)
		return rc;
	rc = block_add(cuda(m), p, true);
	if (rc) {
		cudaFreeHost(p);
		return rc;
	}
	memset(p, 0, bytes);
	*ret = p;
	return 0;
}

static void cuda_close(struct eng_mem *m)
{
	struct cuda_mem *c = cuda(m);

	while (c->blocks) {
		struct cuda_block *b = c->blocks;

		c->blocks = b->next;
		if (b->host)
			cudaFreeHost(b->p);
		else
			cudaFree(b->p);
		free(b);
	}
	for (int i = 0; i < 2; i++) {
		if (c->staged[i])
			cudaEventDestroy(c->staged[i]);
	}
	if (c->forked)
		cudaEventDestroy(c->forked);
	if (c->joined)
		cudaEventDestroy(c->joined);
	if (c->side)
		cudaStreamDestroy(c->side);
	if (c->main)
		cudaStreamDestroy(c->main);
	free(c);
}

static int cuda_upload(struct eng_mem *m, void *dst, const void *src, size_t bytes)
{
	if (!bytes)
		return 0;
	return answer(
		cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, cuda(m)->main));
}

static int cuda_download(struct eng_mem *m, void *dst, const void *src, size_t bytes)
{
	if (!bytes)
		return 0;
	return answer(
		cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, cuda(m)->main));
}

static int cuda_zero(struct eng_mem *m, void *dst, size_t bytes)
{
	return answer(cudaMemsetAsync(dst, 0, bytes, cuda(m)->main));
}

static int cuda_load(struct eng_mem *m, void *dst, const void *src, size_t bytes)
{
	struct cuda_mem *c = cuda(m);
	size_t at = 0;
	int rc = 0;

	while (at < bytes && !rc) {
		size_t n = bytes - at < STAGE_BYTES ? bytes - at : STAGE_BYTES;
		u32 i = c->turn++ % 2;

		/* the buffer's last copy is over; the other one's may run on */
		rc = answer(cudaEventSynchronize(c->staged[i]));
		if (rc)
			return rc;
		memcpy(c->stage[i], (const char *)src + at, n);
		rc = cuda_upload(m, (char *)dst + at, c->stage[i], n);
		if (!rc)
			rc = answer(cudaEventRecord(c->staged[i], c->main));
		at += n;
	}
	return rc;
}

static int cuda_sync(struct eng_mem *m)
{
	return answer(cudaStreamSynchronize(cuda(m)->main));
}

static int cuda_fork(struct eng_mem *m)
{
	struct cuda_mem *c = cuda(m);
	int rc = answer(cudaEventRecord(c->forked, c->main));

	return rc ? rc : answer(cudaStreamWaitEvent(c->side, c->forked, 0));
}

static int cuda_join(struct eng_mem *m)
{
	struct cuda_mem *c = cuda(m);
	int rc = answer(cudaEventRecord(c->joined, c->side));

	return rc ? rc : answer(cudaStreamWaitEvent(c->main, c->joined, 0));
}

static int cuda_repack(struct eng_mem *m, const struct kvk_repack *r)
{
	return kvk_moe_int4_repack(r, cuda(m)->main);
}

/* --------------------------------------------------------------------------- graphs */

static int cuda_graph_begin(struct eng_mem *m)
{
	return answer(
		cudaStreamBeginCapture(cuda(m)->main, cudaStreamCaptureModeThreadLocal));
}

static int cuda_graph_end(struct eng_mem *m, void **ret_graph)
{
	cudaGraph_t graph = NULL;
	cudaGraphExec_t exec = NULL;
	int rc = answer(cudaStreamEndCapture(cuda(m)->main, &graph));

	if (rc)
		return rc;
	rc = answer(cudaGraphInstantiate(&exec, graph, 0));
	cudaGraphDestroy(graph);
	if (rc)
		return rc;
	*ret_graph = exec;
	return 0;
}

static int cuda_graph_launch(struct eng_mem *m, void *graph)
{
	return answer(cudaGraphLaunch((cudaGraphExec_t)graph, cuda(m)->main));
}

static void cuda_graph_free(struct eng_mem *m, void *graph)
{
	cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

static struct eng_mem_ops make_ops(void)
{
	struct eng_mem_ops o = {};

	o.name = "cuda";
	o.close = cuda_close;
	o.alloc = cuda_alloc;
	o.alloc_host = cuda_alloc_host;
	o.upload = cuda_upload;
	o.download = cuda_download;
	o.zero = cuda_zero;
	o.load = cuda_load;
	o.sync = cuda_sync;
	o.fork = cuda_fork;
	o.join = cuda_join;
	o.copy = cuda_copy;
	o.score = cuda_score;
	o.fetch = cuda_fetch;
	o.repack = cuda_repack;
	o.packed_bytes = kvk_moe_packed_bytes;
	o.graph_begin = cuda_graph_begin;
	o.graph_end = cuda_graph_end;
	o.graph_launch = cuda_graph_launch;
	o.graph_free = cuda_graph_free;
	return o;
}

static const struct eng_mem_ops cuda_ops = make_ops();

/* ----------------------------------------------------------------------------- open */

/* Ordinals differ under CUDA_VISIBLE_DEVICES: a GPU is known by its UUID. */
static int find_gpu(const u8 *uuid, int *ret_ordinal, u8 *ret_uuid)
{
	cudaDeviceProp prop;
	int nr = 0;

	if (cudaGetDeviceCount(&nr) != cudaSuccess) {
		(void)cudaGetLastError();
		return -ENODEV;
	}
	for (int i = 0; i < nr; i++) {
		if (cudaGetDeviceProperties(&prop, i) != cudaSuccess)
			return -ENODEV;
		if (uuid && memcmp(prop.uuid.bytes, uuid, 16))
			continue;
		memcpy(ret_uuid, prop.uuid.bytes, 16);
		*ret_ordinal = i;
		return 0;
	}
	return -ENODEV;
}

static int open_streams(struct cuda_mem *c)
{
	int rc = answer(cudaStreamCreateWithFlags(&c->main, cudaStreamNonBlocking));

	if (!rc)
		rc = answer(cudaStreamCreateWithFlags(&c->side, cudaStreamNonBlocking));
	if (!rc)
		rc = answer(cudaEventCreateWithFlags(&c->forked, cudaEventDisableTiming));
	if (!rc)
		rc = answer(cudaEventCreateWithFlags(&c->joined, cudaEventDisableTiming));
	for (int i = 0; i < 2 && !rc; i++) {
		rc = cuda_alloc_host(&c->base, STAGE_BYTES, &c->stage[i]);
		if (!rc)
			rc = answer(cudaEventCreateWithFlags(&c->staged[i],
							     cudaEventDisableTiming));
	}
	c->base.stream = c->main;
	c->base.side = c->side;
	return rc;
}

int eng_mem_open_cuda(const u8 *gpu_uuid, struct eng_mem **ret, struct eng_err *err)
{
	struct cuda_mem *c;
	int ordinal, rc;

	c = (struct cuda_mem *)calloc(1, sizeof(*c));
	if (!c)
		return eng_refuse(err, -ENOMEM, "device: out of memory");
	c->base.ops = &cuda_ops;
	c->base.act_dtype = KVK_BF16;
	c->base.separate = true;
	c->base.has_graphs = true;
	c->base.packs_int4 = true;
	rc = find_gpu(gpu_uuid, &ordinal, c->base.gpu_uuid);
	if (rc) {
		free(c);
		return eng_refuse(err, rc, "device=cuda: %s",
				  gpu_uuid ? "this process sees no GPU of that UUID"
					   : "this process sees no GPU");
	}
	rc = answer(cudaSetDevice(ordinal));
	c->base.kernels = rc ? NULL : kvk_cuda_ops();
	if (!c->base.kernels) {
		free(c);
		return eng_refuse(err, -ENODEV,
				  "device=cuda: the GPU cannot run this build's kernels");
	}
	rc = open_streams(c);
	if (rc) {
		cuda_close(&c->base);
		return eng_refuse(err, rc, "device=cuda: %s", strerror(-rc));
	}
	*ret = &c->base;
	return 0;
}
