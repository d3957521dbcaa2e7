/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_dense.cu - linear and the router in kvbench-kernels, each line with its error against
 * float64: of some rows of some tokens, with weights dequantised and x as it is. One thread.
 */
#include "kernels_moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "kernels/fp8.h"
#include "kernels/linear_tiled.h"
#include "kernels/moe_cuda.h"

/* What the formats explain: f32 sums; x rounded to e4m3; f32 of sigmoids */
#define ERR_BF16  1e-4
#define ERR_E4M3  6e-2
#define ERR_ROUTE 1e-5
#define ERR_ROWS  128u

/* struct dense_data - one call of what has no routing to draw */
struct dense_data {
	struct kvk_linear_args linear;
	struct kvk_moe_route_args route;
	const uint8_t *w;
	size_t w_bytes; /* of one data set */
};

struct dense_sample {
	uint32_t tokens[KVB_CHECK_TOKENS];
};

static int call_linear(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct dense_data *d = (struct dense_data *)arg;
	struct kvk_linear_args a = d->linear;

	a.w.data = d->w + set * d->w_bytes;
	return kvk_cuda_ops()->linear(&a, ctx->stream);
}

static int call_route(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	(void)set;
	return kvk_moe_route_cuda(&((struct dense_data *)arg)->route, ctx->stream);
}

/* --------------------------------------------------------------------------------- check
 */

/* @ref: [token][ERR_ROWS] of rows spread over the matrix, @got beside it; one warp per value */
__global__ void ref_linear(const __grid_constant__ struct kvk_linear_args a,
			   const __grid_constant__ struct dense_sample s, double *ref,
			   float *got)
{
	const uint32_t i = blockIdx.x * 8 + threadIdx.x / 32, tok = s.tokens[blockIdx.y];
	const uint32_t row = (uint64_t)i * (a.w.rows - 1) / (ERR_ROWS - 1);
	const uint64_t at = (uint64_t)row * a.w.cols, y = (uint64_t)tok * a.w.rows + row;
	const uint16_t *x = (const uint16_t *)a.x + (uint64_t)tok * a.w.cols;
	double sum = 0;

	for (uint32_t c = threadIdx.x % 32; c < a.w.cols; c += 32) {
		double w;

		if (a.w.dtype == KVK_E4M3)
			w = (double)kvk_e4m3_decode(((const uint8_t *)a.w.data)[at + c]) *
			    ((const float *)a.w.scales)[row / KVK_FP8_BLOCK *
								kvk_fp8_blocks(a.w.cols) +
							c / KVK_FP8_BLOCK];
		else
			w = kvk_bf16_to_f32(((const uint16_t *)a.w.data)[at + c]);
		sum += w * kvk_bf16_to_f32(x[c]);
	}
	for (int o = 16; o; o /= 2)
		sum += __shfl_xor_sync(~0u, sum, o);
	if (threadIdx.x % 32)
		return;
	ref[blockIdx.y * ERR_ROWS + i] = sum;
	got[blockIdx.y * ERR_ROWS + i] =
		a.y_dtype == KVK_F32 ? ((const float *)a.y)[y]
				     : kvk_bf16_to_f32(((const uint16_t *)a.y)[y]);
}

/* The largest error of a token. */
static double linear_err(struct kvb_ctx *ctx, kvb_call call, void *arg)
{
	const struct dense_data *d = (const struct dense_data *)arg;
	struct kvk_linear_args a = d->linear;
	const size_t y_bytes =
		(size_t)a.nr_tokens * a.w.rows * (a.y_dtype == KVK_F32 ? 4 : 2);
	double ref[KVB_CHECK_TOKENS][ERR_ROWS], err = 0, *dev_ref;
	float got[KVB_CHECK_TOKENS][ERR_ROWS], *dev_got;
	struct dense_sample s;
	const uint32_t nr = kvb_sample(a.nr_tokens, s.tokens);

	a.w.data = d->w;
	KVB_CUDA(cudaMalloc((void **)&dev_ref, sizeof(ref)));
	KVB_CUDA(cudaMalloc((void **)&dev_got, sizeof(got)));
	KVB_CUDA(cudaMemsetAsync(a.y, 0xff, y_bytes, ctx->stream));
	if (call(ctx, arg, 0))
		err = INFINITY;
	ref_linear<<<dim3(ERR_ROWS / 8, nr), 256, 0, ctx->stream>>>(a, s, dev_ref,
								    dev_got);
	KVB_CUDA(cudaGetLastError());
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	KVB_CUDA(cudaMemcpy(ref, dev_ref, sizeof(ref[0]) * nr, cudaMemcpyDeviceToHost));
	KVB_CUDA(cudaMemcpy(got, dev_got, sizeof(got[0]) * nr, cudaMemcpyDeviceToHost));
	for (uint32_t i = 0; i < nr; i++)
		err = fmax(err, kvb_rel_err(got[i], ref[i], ERR_ROWS));
	KVB_CUDA(cudaFree(dev_ref));
	KVB_CUDA(cudaFree(dev_got));
	return err;
}

/* A token's weights for the experts it chose; infinite if another expert is clearly better than
 * one of these. */
static double route_token_err(const struct kvk_moe_route_args *a, const float *logits,
			      const float *bias, const uint32_t *ids,
			      const float *weights)
{
	double want[32], sum = 0, worst = INFINITY;
	bool chosen[512] = {};

	for (uint32_t k = 0; k < a->top_k; k++) {
		if (ids[k] >= a->nr_experts || chosen[ids[k]])
			return INFINITY;
		chosen[ids[k]] = true;
		want[k] = 1.0 / (1.0 + exp(-(double)logits[ids[k]]));
		sum += want[k];
		worst = fmin(worst, want[k] + bias[ids[k]]);
	}
	for (uint32_t e = 0; e < a->nr_experts; e++)
		if (!chosen[e] &&
		    1.0 / (1.0 + exp(-(double)logits[e])) + bias[e] > worst + 1e-6)
			return INFINITY;
	for (uint32_t k = 0; k < a->top_k; k++)
		want[k] *= a->scale / (a->norm ? sum : 1.0);
	return kvb_rel_err(weights, want, a->top_k);
}

static void *fetch(const void *src, size_t bytes)
{
	void *p = malloc(bytes);

	KVB_CUDA(cudaMemcpy(p, src, bytes, cudaMemcpyDeviceToHost));
	return p;
}

/* The largest error of a token, of all. */
static double route_err(struct kvb_ctx *ctx, kvb_call call, void *arg)
{
	const struct kvk_moe_route_args *a = &((const struct dense_data *)arg)->route;
	const size_t slots = (size_t)a->nr_tokens * a->top_k;
	float *logits, *bias, *weights;
	double err = 0;
	uint32_t *ids;

	KVB_CUDA(cudaMemsetAsync(a->ret_weights, 0xff, slots * 4, ctx->stream));
	KVB_CUDA(cudaMemsetAsync(a->ret_ids, 0xff, slots * 4, ctx->stream));
	if (call(ctx, arg, 0))
		err = INFINITY;
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	logits = (float *)fetch(a->logits, 4ul * a->nr_tokens * a->nr_experts);
	bias = (float *)fetch(a->bias, 4ul * a->nr_experts);
	ids = (uint32_t *)fetch(a->ret_ids, slots * 4);
	weights = (float *)fetch(a->ret_weights, slots * 4);
	for (uint32_t t = 0; t < a->nr_tokens; t++)
		err = fmax(err,
			   route_token_err(a, logits + (size_t)t * a->nr_experts, bias,
					   ids + t * a->top_k, weights + t * a->top_k));
	free(logits);
	free(bias);
	free(ids);
	free(weights);
	return err;
}

/* --------------------------------------------------------------------------------- lines
 */

int kvb_dense_line(struct kvb_ctx *ctx, const struct kvb_dense *line)
{
	struct kvb_row row = {};
	int r;

	snprintf(row.family, sizeof(row.family), "moe");
	snprintf(row.name, sizeof(row.name), "%s", line->name);
	snprintf(row.shape, sizeof(row.shape), "%u", line->n);
	row.bytes = line->bytes;
	row.flops = line->flops;
	row.err = ctx->check ? line->err(ctx, line->call, line->arg) : -1;
	if (ctx->check && !(row.err <= line->most))
		ctx->failed = true;
	r = kvb_time(ctx, line->call, line->arg, line->nr_sets, kvb_calls(line->bytes),
		     &row);
	if (!r)
		kvb_row_add(ctx, &row);
	return r;
}

static int linear_lines(struct kvb_ctx *ctx)
{
	static const struct {
		const char *name;
		uint32_t rows, cols;
	} m[] = {{"linear head 163840x7168", 163840, 7168},
		 {"linear head 20480x7168", 20480, 7168},
		 {"linear 7168x2048", 7168, 2048},
		 {"linear 2112x7168", 2112, 7168},
		 {"linear 1536x7168", 1536, 7168}};
	static const uint32_t counts[] = {1, 4, 8, 16, 32, 64, 128};
	int r = 0;

	for (size_t i = 0; i < sizeof(m) / sizeof(m[0]); i++) {
		struct dense_data d = {};
		uint32_t nr_sets;
		void *x, *y, *w;

		if (!kvb_selected(ctx, m[i].name, ""))
			continue;
		d.w_bytes = (size_t)m[i].rows * m[i].cols * 2;
		nr_sets = kvb_calls((double)d.w_bytes);
		nr_sets = d.w_bytes > KVB_ROTATE ? 1 : nr_sets;
		KVB_CUDA(cudaMalloc(&w, d.w_bytes * nr_sets));
		KVB_CUDA(cudaMalloc(&x, 128ul * m[i].cols * 2));
		KVB_CUDA(cudaMalloc(&y, 128ul * m[i].rows * 4));
		kvb_fill_bf16(ctx, w, d.w_bytes / 2 * nr_sets, 5, 0.02f);
		kvb_fill_bf16(ctx, x, 128ul * m[i].cols, 6, 1.0f);
		d.w = (const uint8_t *)w;
		d.linear.w.dtype = KVK_BF16;
		d.linear.w.rows = m[i].rows;
		d.linear.w.cols = m[i].cols;
		d.linear.x = x;
		d.linear.y = y;
		d.linear.x_dtype = KVK_BF16;
		d.linear.y_dtype = KVK_F32;
		d.linear.nr_batch = 1;
		struct kvb_dense line = {m[i].name, call_linear, linear_err,	    &d,
					 0,	    nr_sets,	 (double)d.w_bytes, 0,
					 ERR_BF16};
		for (uint32_t c = 0; c < 7 && !r; c++) {
			d.linear.nr_tokens = counts[c];
			line.n = counts[c];
			line.flops = 2.0 * counts[c] * m[i].rows * m[i].cols;
			r = kvb_dense_line(ctx, &line);
		}
		KVB_CUDA(cudaFree(w));
		KVB_CUDA(cudaFree(x));
		KVB_CUDA(cudaFree(y));
	}
	return r;
}

/* What E4M3 takes without linear_fp8.cu. */
static int call_tiled(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct dense_data *d = (struct dense_data *)arg;
	struct kvk_linear_args a = d->linear;

	a.w.data = d->w + set * d->w_bytes;
	if (a.nr_tokens > 32)
		return kvk_linear_tiled_cuda(&a, ctx->stream);
	return kvk_linear_cuda(&a, ctx->stream);
}

/* E4M3, as GLM-5.2's ranks of eight have it; each with the tiles beside it. */
static int fp8_lines(struct kvb_ctx *ctx)
{
	static const struct {
		const char *name, *tiled;
		uint32_t rows, cols;
	} m[] = {{"linear fp8 2048x6144", "linear fp8 tiles 2048x6144", 2048, 6144},
		 {"linear fp8 576x6144", "linear fp8 tiles 576x6144", 576, 6144},
		 {"linear fp8 512x6144", "linear fp8 tiles 512x6144", 512, 6144},
		 {"linear fp8 2048x2048", "linear fp8 tiles 2048x2048", 2048, 2048},
		 {"linear fp8 6144x2048", "linear fp8 tiles 6144x2048", 6144, 2048},
		 {"linear fp8 6144x256", "linear fp8 tiles 6144x256", 6144, 256}};
	static const uint32_t counts[] = {1, 8, 16, 32, 64, 128, 512, 2048};
	int r = 0;

	for (size_t i = 0; i < sizeof(m) / sizeof(m[0]); i++) {
		const size_t scales = 4ul * ((m[i].rows + 127) / 128) * (m[i].cols / 128);
		struct dense_data d = {};
		uint32_t nr_sets;
		void *x, *y, *w, *s;

		if (!kvb_selected(ctx, m[i].name, "") &&
		    !kvb_selected(ctx, m[i].tiled, ""))
			continue;
		d.w_bytes = (size_t)m[i].rows * m[i].cols;
		nr_sets = kvb_calls((double)d.w_bytes);
		KVB_CUDA(cudaMalloc(&w, d.w_bytes * nr_sets));
		KVB_CUDA(cudaMalloc(&s, scales));
		KVB_CUDA(cudaMalloc(&x, 2048ul * m[i].cols * 2));
		KVB_CUDA(cudaMalloc(&y, 2048ul * m[i].rows * 2));
		kvb_fill_e4m3(ctx, w, d.w_bytes * nr_sets, 5);
		kvb_fill_f32(ctx, (float *)s, scales / 4, 7, 0.02f);
		kvb_fill_bf16(ctx, x, 2048ul * m[i].cols, 6, 1.0f);
		d.w = (const uint8_t *)w;
		d.linear.w.dtype = KVK_E4M3;
		d.linear.w.rows = m[i].rows;
		d.linear.w.cols = m[i].cols;
		d.linear.w.scales = s;
		d.linear.x = x;
		d.linear.y = y;
		d.linear.x_dtype = KVK_BF16;
		d.linear.y_dtype = KVK_BF16;
		d.linear.nr_batch = 1;
		struct kvb_dense line = {NULL,	  NULL,	   linear_err,	      &d,
					 0,	  nr_sets, (double)d.w_bytes, 0,
					 ERR_E4M3};
		for (uint32_t c = 0; c < 16 && !r; c++) {
			line.n = d.linear.nr_tokens = counts[c / 2];
			line.flops = 2.0 * line.n * m[i].rows * m[i].cols;
			line.name = c % 2 ? m[i].tiled : m[i].name;
			line.call = c % 2 ? call_tiled : call_linear;
			if (kvb_selected(ctx, line.name, ""))
				r = kvb_dense_line(ctx, &line);
		}
		KVB_CUDA(cudaFree(w));
		KVB_CUDA(cudaFree(s));
		KVB_CUDA(cudaFree(x));
		KVB_CUDA(cudaFree(y));
	}
	return r;
}

static int route_lines(struct kvb_ctx *ctx)
{
	static const uint32_t counts[] = {1, 16, 128, 1024};
	struct dense_data d = {};
	void *logits, *bias, *ids, *weights;
	int r = 0;

	if (!kvb_selected(ctx, "route 384 top 8", ""))
		return 0;
	KVB_CUDA(cudaMalloc(&logits, 1024ul * 384 * 4));
	KVB_CUDA(cudaMalloc(&bias, 384 * 4));
	KVB_CUDA(cudaMalloc(&ids, 1024ul * 8 * 4));
	KVB_CUDA(cudaMalloc(&weights, 1024ul * 8 * 4));
	kvb_fill_f32(ctx, (float *)logits, 1024ul * 384, 8, 2.0f);
	kvb_fill_f32(ctx, (float *)bias, 384, 9, 0.1f);
	d.route.logits = (const float *)logits;
	d.route.bias = (const float *)bias;
	d.route.ret_ids = (uint32_t *)ids;
	d.route.ret_weights = (float *)weights;
	d.route.nr_experts = 384;
	d.route.top_k = 8;
	d.route.nr_groups = d.route.top_groups = 1;
	d.route.norm = true;
	d.route.scale = 2.5f;
	struct kvb_dense line = {"route 384 top 8", call_route, route_err, &d, 0, 1, 0, 0,
				 ERR_ROUTE};
	for (uint32_t c = 0; c < 4 && !r; c++) {
		line.n = d.route.nr_tokens = counts[c];
		line.bytes = counts[c] * 384.0 * 4;
		r = kvb_dense_line(ctx, &line);
	}
	KVB_CUDA(cudaFree(logits));
	KVB_CUDA(cudaFree(bias));
	KVB_CUDA(cudaFree(ids));
	KVB_CUDA(cudaFree(weights));
	return r;
}

int kvb_dense_lines(struct kvb_ctx *ctx)
{
	int r;

	kvb_settle(ctx);
	r = route_lines(ctx);

	r = r ? r : linear_lines(ctx);
	return r ? r : fp8_lines(ctx);
}
