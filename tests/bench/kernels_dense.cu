/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_dense.cu - linear and the router in kvbench-kernels. One thread.
 */
#include "kernels_moe.h"

#include <stdio.h>
#include "kernels/linear_tiled.h"
#include "kernels/moe_cuda.h"

/* struct dense_data - one call of what has no routing to draw */
struct dense_data {
	struct kvk_linear_args linear;
	struct kvk_moe_route_args route;
	const uint8_t *w;
	size_t w_bytes; /* of one data set */
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

/* One row of a dense family, if it is wanted. */
int kvb_dense_line(struct kvb_ctx *ctx, kvb_call call, void *arg, const char *name,
		   uint32_t n, double bytes, double flops, uint32_t nr_sets)
{
	struct kvb_row row = {};
	int r;

	snprintf(row.family, sizeof(row.family), "moe");
	snprintf(row.name, sizeof(row.name), "%s", name);
	snprintf(row.shape, sizeof(row.shape), "%u", n);
	row.bytes = bytes;
	row.flops = flops;
	row.err = -1;
	r = kvb_time(ctx, call, arg, nr_sets, kvb_calls(bytes), &row);
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
		for (uint32_t c = 0; c < 7 && !r; c++) {
			d.linear.nr_tokens = counts[c];
			r = kvb_dense_line(ctx, call_linear, &d, m[i].name, counts[c],
					   (double)d.w_bytes,
					   2.0 * counts[c] * m[i].rows * m[i].cols,
					   nr_sets);
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
		for (uint32_t c = 0; c < 16 && !r; c++) {
			const uint32_t n = d.linear.nr_tokens = counts[c / 2];
			const char *name = c % 2 ? m[i].tiled : m[i].name;

			if (kvb_selected(ctx, name, ""))
				r = kvb_dense_line(ctx, c % 2 ? call_tiled : call_linear,
						   &d, name, n, (double)d.w_bytes,
						   2.0 * n * m[i].rows * m[i].cols,
						   nr_sets);
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
	for (uint32_t c = 0; c < 4 && !r; c++) {
		d.route.nr_tokens = counts[c];
		r = kvb_dense_line(ctx, call_route, &d, "route 384 top 8", counts[c],
				   counts[c] * 384.0 * 4, 0, 1);
	}
	KVB_CUDA(cudaFree(logits));
	KVB_CUDA(cudaFree(bias));
	KVB_CUDA(cudaFree(ids));
	KVB_CUDA(cudaFree(weights));
	return r;
}

int kvb_dense_lines(struct kvb_ctx *ctx)
{
	int r = route_lines(ctx);

	r = r ? r : linear_lines(ctx);
	return r ? r : fp8_lines(ctx);
}
