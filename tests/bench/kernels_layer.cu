/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_layer.cu - the expert half of a decode layer of Kimi K2 as one graph in
 * kvbench-kernels, whole and one rank of TP 8: norm, router, routed experts in INT4, shared expert
 * in BF16. As in the engine's decode graphs, the shared expert's first half is a branch beside the
 * router, and its second half adds what the routed experts give, in f32, before y is rounded. One
 * thread.
 *
 * The floor is the sum of the bytes of router, shared expert and the distinct experts that the
 * router chose, over the read ceiling.
 */
#include "kernels_moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/fp8.h"
#include "kernels/moe_cuda.h"

enum { HIDDEN = 7168, EXPERTS = 384, TOP_K = 8, GROUP = 32 };
/* y is rounded to bf16 once; the shared expert's inner values, a small part of y here, twice */
#define ERR 2e-3
enum { TOKENS_MAX = 128, SETS_MAX = 16, COPIES = 8 };

/* struct layer - device memory. Router and shared expert are there COPIES times, more than L2 holds.
 * The residual differs from set to set, so the router's choice does, and x is too small to change
 * that however often it is added. */
struct layer {
	struct kvk_experts e;
	uint8_t *w13, *w2, *router, *shared13, *shared2;
	uint16_t *x, *residual, *normed, *y, *gu, *act;
	float *norm, *logits, *weights, *routed;
	uint32_t *ids;
	void *ws;
	size_t ws_bytes;
	uint32_t nr_tokens, inter;
	cudaStream_t side;
	cudaEvent_t forked, joined;
};

static int layer_linear(cudaStream_t stream, const struct layer *d, const void *w,
			uint32_t rows, uint32_t cols, const void *x, void *y,
			uint32_t y_dtype, const float *add)
{
	struct kvk_linear_args a = {};

	a.w.data = w;
	a.w.dtype = KVK_BF16;
	a.w.rows = rows;
	a.w.cols = cols;
	a.x = x;
	a.y = y;
	a.nr_tokens = d->nr_tokens;
	a.x_dtype = KVK_BF16;
	a.y_dtype = y_dtype;
	a.nr_batch = 1;
	a.add = add;
	return kvk_cuda_ops()->linear(&a, stream);
}

static int layer_norm(struct kvb_ctx *ctx, const struct layer *d, uint32_t set)
{
	struct kvk_norm_args a = {};

	a.x = d->x;
	a.residual = d->residual + (size_t)set * d->nr_tokens * HIDDEN;
	a.weight = d->norm;
	a.y = d->normed;
	a.eps = 1e-6f;
	a.nr_rows = d->nr_tokens;
	a.cols = a.x_stride = a.y_stride = HIDDEN;
	a.act_dtype = KVK_BF16;
	return kvk_cuda_ops()->norm(&a, ctx->stream);
}

static int layer_route(struct kvb_ctx *ctx, const struct layer *d)
{
	struct kvk_moe_route_args a = {};

	a.logits = d->logits;
	a.ret_ids = d->ids;
	a.ret_weights = d->weights;
	a.nr_tokens = d->nr_tokens;
	a.nr_experts = EXPERTS;
	a.top_k = TOP_K;
	a.nr_groups = a.top_groups = 1;
	a.norm = true;
	a.scale = 2.5f;
	return kvk_cuda_ops()->moe_route(&a, ctx->stream);
}

static int layer_experts(struct kvb_ctx *ctx, const struct layer *d)
{
	struct kvk_moe_args a = {};

	a.experts = d->e;
	a.x = d->normed;
	a.y = d->routed;
	a.y_f32 = true;
	a.ids = d->ids;
	a.weights = d->weights;
	a.nr_tokens = d->nr_tokens;
	a.top_k = TOP_K;
	a.act_dtype = KVK_BF16;
	a.workspace = d->ws;
	a.workspace_bytes = d->ws_bytes;
	return kvk_cuda_ops()->moe_int4(&a, ctx->stream);
}

/* The shared expert up to its second product, beside what follows on the main stream. */
static int layer_inner(struct kvb_ctx *ctx, const struct layer *d,
		       const uint8_t *shared13)
{
	struct kvk_silu_args s = {};
	int r;

	KVB_CUDA(cudaEventRecord(d->forked, ctx->stream));
	KVB_CUDA(cudaStreamWaitEvent(d->side, d->forked, 0));
	r = layer_linear(d->side, d, shared13, 2 * d->inter, HIDDEN, d->normed, d->gu,
			 KVK_BF16, NULL);
	s.gu = d->gu;
	s.y = d->act;
	s.nr_tokens = d->nr_tokens;
	s.inter = d->inter;
	s.act_dtype = KVK_BF16;
	if (!r)
		r = kvk_cuda_ops()->silu(&s, d->side);
	KVB_CUDA(cudaEventRecord(d->joined, d->side));
	return r;
}

static int call_layer(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	const struct layer *d = (const struct layer *)arg;
	const size_t copy = set % COPIES, half = (size_t)d->inter * HIDDEN * 2;
	int r = layer_norm(ctx, d, set);

	if (!r)
		r = layer_inner(ctx, d, d->shared13 + copy * 2 * half);
	if (!r)
		r = layer_linear(ctx->stream, d, d->router + copy * EXPERTS * HIDDEN * 2,
				 EXPERTS, HIDDEN, d->normed, d->logits, KVK_F32, NULL);
	if (!r)
		r = layer_route(ctx, d);
	if (!r)
		r = layer_experts(ctx, d);
	KVB_CUDA(cudaStreamWaitEvent(ctx->stream, d->joined, 0));
	return r ? r
		 : layer_linear(ctx->stream, d, d->shared2 + copy * half, HIDDEN,
				d->inter, d->act, d->y, KVK_BF16, d->routed);
}

/* Distinct experts that a set chooses, on average. */
static int layer_distinct(struct kvb_ctx *ctx, struct layer *d, uint32_t nr_sets,
			  double *ret_distinct)
{
	uint32_t ids[TOKENS_MAX * TOP_K];
	uint8_t used[EXPERTS];
	double sum = 0;

	for (uint32_t set = 0; set < nr_sets; set++) {
		const int r = call_layer(ctx, d, set);

		if (r)
			return r;
		KVB_CUDA(cudaMemcpyAsync(ids, d->ids, (size_t)d->nr_tokens * TOP_K * 4,
					 cudaMemcpyDeviceToHost, ctx->stream));
		KVB_CUDA(cudaStreamSynchronize(ctx->stream));
		memset(used, 0, sizeof(used));
		for (uint32_t i = 0; i < d->nr_tokens * TOP_K; i++) {
			sum += !used[ids[i]];
			used[ids[i]] = 1;
		}
	}
	*ret_distinct = sum / nr_sets;
	return 0;
}

/* The shared expert of sampled tokens from what the norm gave: its inner values to d.h, then
 * its part of y to d.ref. One warp per value. */
__global__ void shared_first(const __grid_constant__ struct layer l,
			     const __grid_constant__ struct kvb_moe d)
{
	const uint32_t j = blockIdx.x * 8 + threadIdx.x / 32, tok = d.sample[blockIdx.y];
	const uint16_t *w = (const uint16_t *)l.shared13 + (size_t)j * HIDDEN;
	double gate = 0, up = 0;

	for (uint32_t c = threadIdx.x % 32; c < HIDDEN; c += 32) {
		const double x = kvk_bf16_to_f32(l.normed[(size_t)tok * HIDDEN + c]);

		gate += x * kvk_bf16_to_f32(w[c]);
		up += x * kvk_bf16_to_f32(w[(size_t)l.inter * HIDDEN + c]);
	}
	for (int o = 16; o; o /= 2) {
		gate += __shfl_xor_sync(~0u, gate, o);
		up += __shfl_xor_sync(~0u, up, o);
	}
	if (threadIdx.x % 32 == 0)
		d.h[(size_t)blockIdx.y * l.inter + j] = gate / (1.0 + exp(-gate)) * up;
}

__global__ void shared_second(const __grid_constant__ struct layer l,
			      const __grid_constant__ struct kvb_moe d)
{
	const uint32_t row = blockIdx.x * 8 + threadIdx.x / 32;
	const uint16_t *w = (const uint16_t *)l.shared2 + (size_t)row * l.inter;
	const double *h = d.h + (size_t)blockIdx.y * l.inter;
	double sum = 0;

	for (uint32_t c = threadIdx.x % 32; c < l.inter; c += 32)
		sum += h[c] * kvk_bf16_to_f32(w[c]);
	for (int o = 16; o; o /= 2)
		sum += __shfl_xor_sync(~0u, sum, o);
	if (threadIdx.x % 32 == 0)
		d.ref[(size_t)blockIdx.y * HIDDEN + row] += sum;
}

/* Routed and shared experts against float64, from x and experts as norm and router left them. */
static double layer_err(struct kvb_ctx *ctx, kvb_call call, void *arg)
{
	const struct layer *l = (const struct layer *)arg;
	uint32_t tokens[KVB_CHECK_TOKENS];
	const uint32_t nr = kvb_sample(l->nr_tokens, tokens);
	struct kvb_moe d = {};
	double err;

	if (call(ctx, arg, 0))
		return INFINITY;
	d.e = l->e;
	d.w13 = l->w13;
	d.w2 = l->w2;
	d.x = l->normed;
	d.y = l->y;
	d.ids = l->ids;
	d.weights = l->weights;
	d.nr_tokens = l->nr_tokens;
	d.top_k = TOP_K;
	KVB_CUDA(cudaMalloc((void **)&d.sample, sizeof(tokens)));
	KVB_CUDA(cudaMalloc((void **)&d.h,
			    sizeof(double) * KVB_CHECK_TOKENS * TOP_K * l->inter));
	KVB_CUDA(cudaMalloc((void **)&d.ref, sizeof(double) * KVB_CHECK_TOKENS * HIDDEN));
	kvb_moe_ref(ctx, &d, tokens, nr);
	shared_first<<<dim3(l->inter / 8, nr), 256, 0, ctx->stream>>>(*l, d);
	shared_second<<<dim3(HIDDEN / 8, nr), 256, 0, ctx->stream>>>(*l, d);
	KVB_CUDA(cudaGetLastError());
	err = kvb_moe_err(ctx, &d, tokens, nr);
	KVB_CUDA(cudaFree(d.sample));
	KVB_CUDA(cudaFree(d.h));
	KVB_CUDA(cudaFree(d.ref));
	return err;
}

static void *layer_bf16(struct kvb_ctx *ctx, size_t n, uint64_t seed, float stddev)
{
	void *p;

	KVB_CUDA(cudaMalloc(&p, n * 2));
	kvb_fill_bf16(ctx, p, n, seed, stddev);
	return p;
}

static void *layer_f32(struct kvb_ctx *ctx, size_t n, uint64_t seed)
{
	void *p;

	KVB_CUDA(cudaMalloc(&p, n * 4));
	kvb_fill_f32(ctx, (float *)p, n, seed, 1.0f);
	return p;
}

static void layer_init(struct kvb_ctx *ctx, struct layer *d, uint32_t inter)
{
	struct kvk_moe_args a = {};

	d->e.dtype = KVK_INT4;
	d->e.group = GROUP;
	d->e.scale_dtype = KVK_BF16;
	d->e.order = KVK_ORDER_PACKED;
	d->e.nr_experts = EXPERTS;
	d->e.hidden = HIDDEN;
	d->e.inter = d->inter = inter;
	d->w13 = kvb_bricks_new(ctx, &d->e, 0);
	d->w2 = kvb_bricks_new(ctx, &d->e, 1);
	d->e.w13 = d->w13;
	d->e.w2 = d->w2;
	d->router =
		(uint8_t *)layer_bf16(ctx, (size_t)COPIES * EXPERTS * HIDDEN, 21, 0.02f);
	d->shared13 =
		(uint8_t *)layer_bf16(ctx, 2ul * COPIES * inter * HIDDEN, 22, 0.01f);
	d->shared2 =
		(uint8_t *)layer_bf16(ctx, (size_t)COPIES * inter * HIDDEN, 23, 0.02f);
	d->x = (uint16_t *)layer_bf16(ctx, (size_t)TOKENS_MAX * HIDDEN, 24, 1e-3f);
	d->residual = (uint16_t *)layer_bf16(ctx, (size_t)SETS_MAX * TOKENS_MAX * HIDDEN,
					     25, 1.0f);
	d->normed = (uint16_t *)layer_bf16(ctx, (size_t)TOKENS_MAX * HIDDEN, 26, 1.0f);
	d->y = (uint16_t *)layer_bf16(ctx, (size_t)TOKENS_MAX * HIDDEN, 27, 1.0f);
	d->gu = (uint16_t *)layer_bf16(ctx, 2ul * TOKENS_MAX * inter, 28, 1.0f);
	d->act = (uint16_t *)layer_bf16(ctx, (size_t)TOKENS_MAX * inter, 29, 1.0f);
	d->norm = (float *)layer_f32(ctx, HIDDEN, 30);
	d->logits = (float *)layer_f32(ctx, (size_t)TOKENS_MAX * EXPERTS, 31);
	d->weights = (float *)layer_f32(ctx, (size_t)TOKENS_MAX * TOP_K, 32);
	d->ids = (uint32_t *)layer_f32(ctx, (size_t)TOKENS_MAX * TOP_K, 33);
	d->routed = (float *)layer_f32(ctx, (size_t)TOKENS_MAX * HIDDEN, 34);
	a.experts = d->e;
	a.nr_tokens = TOKENS_MAX;
	a.top_k = TOP_K;
	a.act_dtype = KVK_BF16;
	d->ws_bytes = kvk_moe_workspace_cuda(&a);
	KVB_CUDA(cudaMalloc(&d->ws, d->ws_bytes));
	KVB_CUDA(cudaStreamCreateWithFlags(&d->side, cudaStreamNonBlocking));
	KVB_CUDA(cudaEventCreateWithFlags(&d->forked, cudaEventDisableTiming));
	KVB_CUDA(cudaEventCreateWithFlags(&d->joined, cudaEventDisableTiming));
}

static void layer_fini(struct layer *d)
{
	void *all[] = {d->w13, d->w2,	    d->router, d->shared13, d->shared2,
		       d->x,   d->residual, d->normed, d->y,	    d->gu,
		       d->act, d->norm,	    d->logits, d->weights,  d->ids,
		       d->ws,  d->routed};

	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		KVB_CUDA(cudaFree(all[i]));
	KVB_CUDA(cudaEventDestroy(d->joined));
	KVB_CUDA(cudaEventDestroy(d->forked));
	KVB_CUDA(cudaStreamDestroy(d->side));
}

static int layer_model(struct kvb_ctx *ctx, const char *name, uint32_t inter)
{
	static const uint32_t counts[] = {1, 2, 4, 8, 16, 32, 64, 128};
	const double dense = 2.0 * HIDDEN * (EXPERTS + 3 * inter);
	struct layer d = {};
	double expert;
	int r = 0;

	if (!kvb_selected(ctx, name, ""))
		return 0;
	layer_init(ctx, &d, inter);
	kvb_settle(ctx);
	struct kvb_dense line = {name, call_layer, layer_err, &d, 0, SETS_MAX, 0, 0, ERR};
	expert = (double)(kvk_moe_packed_bytes(&d.e, 0) + kvk_moe_packed_bytes(&d.e, 1));
	for (uint32_t c = 0; c < sizeof(counts) / sizeof(counts[0]) && !r; c++) {
		double distinct = 0;

		d.nr_tokens = counts[c];
		r = layer_distinct(ctx, &d, SETS_MAX, &distinct);
		line.n = counts[c];
		line.bytes = dense + distinct * expert;
		if (!r)
			r = kvb_dense_line(ctx, &line);
	}
	layer_fini(&d);
	return r;
}

int kvb_layer_lines(struct kvb_ctx *ctx)
{
	int r = layer_model(ctx, "layer k2 full", 2048);

	return r ? r : layer_model(ctx, "layer k2 tp8", 256);
}
