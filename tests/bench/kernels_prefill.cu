/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_prefill.cu - the prefill lines of kvbench-kernels attn: one request, BF16, causal,
 * pages at random places, or expanded MLA. Error: the last rows of the chunk and rows of
 * its middle against float64. One thread.
 */
#include "gpu_bench.h"
#include "kernels/attn_any.cuh"
#include "kernels/attn_cuda.h"
#include "kernels/attn_expanded.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEP	    7u
#define NR_SETS	    2u
#define CHECK_ROWS  8u
#define ERR_LIMIT   2.6e-3 /* P and the output are rounded to bf16: 1.7e-3 each */
#define ERR_FP8	    2e-3   /* P to f16 */
#define POOL_FACTOR 2u	   /* pages of the pool for each page of the request */

struct prefill_line {
	const char *name;
	uint32_t heads;
	uint32_t kv_heads; /* 0: MLA */
	uint32_t dtype;
	uint32_t head_dim;
	uint32_t q_len;
	uint32_t len;
	double target_tflops;
};

#define BF KV_DTYPE_BF16
#define E4 KV_DTYPE_E4M3

static const struct prefill_line lines[] = {
	{"gqa bf16 96/8 prefill", 96, 8, BF, 128, 1024, 1024, 0},
	{"gqa bf16 96/8 prefill", 96, 8, BF, 128, 2048, 2048, 0},
	{"gqa bf16 96/8 prefill", 96, 8, BF, 128, 8192, 8192, 550},
	{"gqa bf16 96/8 prefill", 96, 8, BF, 128, 1024, 32768, 0},
	{"gqa bf16 64/8 prefill", 64, 8, BF, 128, 8192, 8192, 0},
	{"gqa bf16 32/4 prefill", 32, 4, BF, 64, 8192, 8192, 0},
	{"gqa fp8 96/8 prefill", 96, 8, E4, 128, 2048, 2048, 0},
	{"gqa fp8 96/8 prefill", 96, 8, E4, 128, 8192, 8192, 0},
	{"gqa fp8 96/8 prefill", 96, 8, E4, 128, 1024, 32768, 0},
	{"mla bf16 64 prefill", 64, 0, BF, 576, 2048, 2048, 0},
	{"mla bf16 64 prefill", 64, 0, BF, 576, 8192, 8192, 0},
	{"mla fp8 64 prefill", 64, 0, E4, 576, 2048, 2048, 0},
	{"mla fp8 64 prefill", 64, 0, E4, 576, 8192, 8192, 0},
	{"mla bf16 64 prefill-expanded", 64, 0, BF, 192, 2048, 2048, 0},
	{"mla bf16 64 prefill-expanded", 64, 0, BF, 192, 8192, 8192, 450},
	{"mla bf16 64 prefill-expanded", 64, 0, BF, 192, 1024, 32768, 0},
};

/* A line's arrays on the device. */
struct prefill_case {
	const struct prefill_line *ln;
	struct kvk_pages pages;
	struct kvk_batch batch;
	const uint32_t *kv_start;
	uint16_t *kv;
	uint16_t *rope;
	uint16_t *q;
	uint16_t *out;
	void *to_free[8];
	uint32_t dq;
	uint32_t dv;
	float sm_scale;
};

static void *upload(const void *src, size_t bytes)
{
	void *d;

	KVB_CUDA(cudaMalloc(&d, bytes));
	KVB_CUDA(cudaMemcpy(d, src, bytes, cudaMemcpyHostToDevice));
	return d;
}

/* A batch of one request that asks for tokens [len - q_len, len). */
static void *make_batch(struct kvk_batch *b, uint32_t q_len, uint32_t len)
{
	struct {
		struct kv_verdict v;
		uint64_t step;
		uint32_t row_start[2], q_start[2], len, kv_start;
	} h = {};
	uint8_t *d;

	h.v.step = h.step = STEP;
	h.v.rows_checked = h.row_start[1] = (len + 63) / 64;
	h.q_start[1] = q_len;
	h.len = len;
	d = (uint8_t *)upload(&h, sizeof(h));
#define AT(member, type) ((const type *)(d + ((uint8_t *)&h.member - (uint8_t *)&h)))
	b->verdicts = AT(v, struct kv_verdict);
	b->step = AT(step, uint64_t);
	b->row_start = AT(row_start, uint32_t);
	b->q_start = AT(q_start, uint32_t);
	b->lengths = AT(len, uint32_t);
#undef AT
	b->nr_requests = 1;
	b->nr_tokens = b->q_len_max = q_len;
	return d;
}

/* fp16 scales of all tokens: 0.004 .. 0.012. A CTA per page and layer. */
__global__ void prefill_scales_kernel(uint8_t *base, uint64_t stride,
				      uint64_t layer_stride, uint32_t off, uint32_t n)
{
	uint16_t *s = (uint16_t *)(base + blockIdx.x / NR_SETS * stride +
				   blockIdx.x % NR_SETS * layer_stride + off);

	for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
		s[i] = kvk_f32_to_f16(0.004f +
				      (float)((blockIdx.x * n + i) * 2654435761u % 1021) *
					      8e-6f);
}

static void fill_pages(struct kvb_ctx *ctx, const struct kvk_pages *pg)
{
	const struct kv_layout *l = &pg->layout;
	size_t bytes = (size_t)pg->geometry.nr_pages * pg->geometry.stride_bytes;

	if (l->dtype == BF) {
		kvb_fill_bf16(ctx, pg->base, bytes / 2, 3, 1.0f);
		return;
	}
	kvb_fill_e4m3(ctx, pg->base, bytes, 3);
	prefill_scales_kernel<<<pg->geometry.nr_pages * NR_SETS, 256, 0, ctx->stream>>>(
		(uint8_t *)pg->base, pg->geometry.stride_bytes, kv_layer_stride(l),
		l->nr_kv_heads ? kv_gqa_scale_off(l, 0, 0, 0) : kv_mla_scale_off(l, 0),
		2 * KV_PAGE_TOKENS * (l->nr_kv_heads ? l->nr_kv_heads : 1));
	KVB_CUDA(cudaGetLastError());
}

/* Pages, or arrays that were expanded from them? */
static bool is_paged(const struct prefill_line *ln)
{
	return ln->kv_heads || ln->head_dim == 576;
}

static void make_pages(struct kvb_ctx *ctx, struct prefill_case *c)
{
	uint32_t nr = (c->ln->len + 63) / 64, nr_pages = nr * POOL_FACTOR;
	struct kv_row *rows = (struct kv_row *)malloc(nr_pages * sizeof(*rows));
	struct kv_layout *l = &c->pages.layout;
	uint64_t rng = 99;

	l->format_version = KV_LAYOUT_VERSION;
	l->kind = c->ln->kv_heads ? KV_LAYOUT_GQA : KV_LAYOUT_MLA;
	l->dtype = c->ln->dtype;
	l->scale_kind = c->ln->dtype == E4 ? KV_SCALE_TOKEN : KV_SCALE_NONE;
	l->page_tokens = KV_PAGE_TOKENS;
	l->nr_layers = NR_SETS;
	l->nr_kv_heads = c->ln->kv_heads;
	if (c->ln->kv_heads) {
		l->head_dim = c->ln->head_dim;
	} else {
		l->latent_dim = 512;
		l->rope_dim = 64;
	}
	c->pages.geometry.stride_bytes = c->pages.geometry.extent_bytes =
		kv_page_stride(l);
	c->pages.geometry.nr_pages = nr_pages;
	KVB_CUDA(cudaMalloc(&c->pages.base, nr_pages * kv_page_stride(l)));
	fill_pages(ctx, &c->pages);
	for (uint32_t i = 0; i < nr_pages; i++)
		rows[i] = kv_row_make(i, kv_tag_make(1, KV_TAG_LIVE), 0, 0, i);
	for (uint32_t i = 0; i < nr; i++) {
		uint32_t j = i + (uint32_t)(kvb_random(&rng) % (nr_pages - i)),
			 t = rows[i].pfn;

		rows[i].pfn = rows[j].pfn;
		rows[j].pfn = t;
	}
	c->batch.rows = (const struct kv_row *)upload(rows, nr * sizeof(*rows));
	c->to_free[0] = c->pages.base;
	c->to_free[1] = (void *)c->batch.rows;
	free(rows);
}

static void make_expanded(struct kvb_ctx *ctx, struct prefill_case *c)
{
	size_t n = (size_t)c->ln->len * c->ln->heads * 256, nr = (size_t)c->ln->len * 64;
	uint32_t zero = 0;

	KVB_CUDA(cudaMalloc((void **)&c->kv, n * 2));
	KVB_CUDA(cudaMalloc((void **)&c->rope, nr * 2));
	kvb_fill_bf16(ctx, c->kv, n, 3, 1.0f);
	kvb_fill_bf16(ctx, c->rope, nr, 4, 1.0f);
	c->kv_start = (const uint32_t *)upload(&zero, 4);
	c->to_free[0] = c->kv;
	c->to_free[1] = c->rope;
	c->to_free[2] = (void *)c->kv_start;
}

static void case_init(struct kvb_ctx *ctx, const struct prefill_line *ln,
		      struct prefill_case *c)
{
	size_t rows = (size_t)ln->q_len * ln->heads;

	memset(c, 0, sizeof(*c));
	c->ln = ln;
	c->dq = ln->head_dim;
	c->dv = ln->kv_heads ? ln->head_dim : is_paged(ln) ? 512 : 128;
	/* MLA: scores of 192 values, whatever the form */
	c->sm_scale = 1.0f / sqrtf(ln->kv_heads ? (float)c->dq : 192.0f);
	c->to_free[3] = make_batch(&c->batch, ln->q_len, ln->len);
	if (is_paged(ln))
		make_pages(ctx, c);
	else
		make_expanded(ctx, c);
	KVB_CUDA(cudaMalloc((void **)&c->q, rows * c->dq * 2));
	KVB_CUDA(cudaMalloc((void **)&c->out, rows * c->dv * 2));
	kvb_fill_bf16(ctx, c->q, rows * c->dq, 5, 1.0f);
	c->to_free[4] = c->q;
	c->to_free[5] = c->out;
}

static struct kvk_attn_args paged_args(const struct prefill_case *c, uint32_t layer)
{
	struct kvk_attn_args a = {};

	a.pages = c->pages;
	a.batch = c->batch;
	a.layer = layer;
	a.nr_q_heads = c->ln->heads;
	a.sm_scale = c->sm_scale;
	a.act_dtype = KVK_BF16;
	a.q = c->q;
	a.out = c->out;
	return a;
}

static int prefill_call(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	const struct prefill_case *c = (const struct prefill_case *)arg;
	struct kvk_attn_args a = paged_args(c, set);
	struct kvk_attn_expanded_args e = {};

	if (is_paged(c->ln))
		return kvk_attn_prefill_cuda(&a, ctx->stream);
	e.batch = c->batch;
	e.kv_start = c->kv_start;
	e.nr_kv_tokens = c->ln->len;
	e.nr_heads = c->ln->heads;
	e.nope_dim = e.v_dim = 128;
	e.rope_dim = 64;
	e.act_dtype = KVK_BF16;
	e.sm_scale = c->sm_scale;
	e.kv = c->kv;
	e.rope = c->rope;
	e.q = c->q;
	e.out = c->out;
	return kvk_attn_expanded_cuda(&e, ctx->stream);
}

/* One row of expanded MLA in float64: a CTA per (token, head). */
__global__ void expanded_ref_kernel(const uint16_t *q, const uint16_t *kv,
				    const uint16_t *rope, double *out, uint32_t heads,
				    uint32_t len, uint32_t rows, float scale)
{
	const uint32_t t = blockIdx.x / heads, h = blockIdx.x % heads, d = threadIdx.x;
	const uint32_t sees = len - rows + t + 1;
	__shared__ double part[4];
	double sum = 0, acc = 0;

	for (uint32_t i = 0; i < sees; i++) { /* scores are small: no maximum needed */
		const uint16_t *k = kv + ((size_t)i * heads + h) * 256;
		double x = (double)kvk_bf16_to_f32(q[(size_t)blockIdx.x * 192 + d]) *
			   kvk_bf16_to_f32(k[d]);

		if (d < 64)
			x += (double)kvk_bf16_to_f32(
				     q[(size_t)blockIdx.x * 192 + 128 + d]) *
			     kvk_bf16_to_f32(rope[(size_t)i * 64 + d]);
		for (int o = 16; o; o /= 2)
			x += __shfl_xor_sync(~0u, x, o);
		__syncthreads();
		if (d % 32 == 0)
			part[d / 32] = x;
		__syncthreads();
		x = exp((part[0] + part[1] + part[2] + part[3]) * (double)scale);
		sum += x;
		acc += x * kvk_bf16_to_f32(k[128 + d]);
	}
	out[(size_t)blockIdx.x * 128 + d] = acc / sum;
}

/* |out - ref| / |ref| of CHECK_ROWS tokens of the chunk from token @at on. */
static double check_rows(struct kvb_ctx *ctx, const struct prefill_case *c, uint32_t at)
{
	size_t per = (size_t)c->ln->heads * c->dv, n = per * CHECK_ROWS;
	uint32_t len = c->ln->len - c->ln->q_len + at + CHECK_ROWS;
	uint16_t *h = (uint16_t *)malloc(n * 2);
	float *f = (float *)malloc(n * 4);
	double *ref = (double *)malloc(n * 8), *d_ref, err;
	struct kvk_attn_args a = paged_args(c, 0);
	void *batch = make_batch(&a.batch, CHECK_ROWS, len);
	int r = 0;

	KVB_CUDA(cudaMalloc((void **)&d_ref, n * 8));
	a.q = c->q + (size_t)at * c->ln->heads * c->dq;
	a.out = d_ref;
	if (is_paged(c->ln))
		r = any_launch<double>(&a, ctx->stream);
	else
		expanded_ref_kernel<<<CHECK_ROWS * c->ln->heads, 128, 0, ctx->stream>>>(
			(const uint16_t *)a.q, c->kv, c->rope, d_ref, c->ln->heads, len,
			CHECK_ROWS, c->sm_scale);
	if (r)
		exit(1);
	KVB_CUDA(cudaGetLastError());
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	KVB_CUDA(cudaMemcpy(ref, d_ref, n * 8, cudaMemcpyDeviceToHost));
	KVB_CUDA(cudaMemcpy(h, c->out + at * per, n * 2, cudaMemcpyDeviceToHost));
	for (size_t i = 0; i < n; i++)
		f[i] = kvk_bf16_to_f32(h[i]);
	err = kvb_rel_err(f, ref, n);
	KVB_CUDA(cudaFree(d_ref));
	KVB_CUDA(cudaFree(batch));
	free(h);
	free(f);
	free(ref);
	return err;
}

static double check(struct kvb_ctx *ctx, struct prefill_case *c)
{
	size_t n = (size_t)c->ln->q_len * c->ln->heads * c->dv;
	double last, middle;

	KVB_CUDA(cudaMemsetAsync(c->out, 0xff, n * 2, ctx->stream));
	if (prefill_call(ctx, c, 0))
		exit(1);
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	last = check_rows(ctx, c, c->ln->q_len - CHECK_ROWS);
	middle = check_rows(ctx, c, c->ln->q_len / 2 - 3);
	return last > middle ? last : middle;
}

static int run_line(struct kvb_ctx *ctx, const struct prefill_line *ln)
{
	double seen = (double)ln->q_len * (ln->len - ln->q_len) +
		      0.5 * ln->q_len * (ln->q_len + 1.0);
	struct kvb_row row = {};
	struct prefill_case c;
	int r;

	snprintf(row.family, sizeof(row.family), "attn");
	snprintf(row.name, sizeof(row.name), "%s", ln->name);
	snprintf(row.shape, sizeof(row.shape), "%uk x %uk", ln->q_len / 1024,
		 ln->len / 1024);
	if (!kvb_selected(ctx, row.name, row.shape))
		return 0;
	case_init(ctx, ln, &c);
	row.flops = 2.0 * seen * ln->heads * (c.dq + c.dv);
	row.ours_us = ln->target_tflops > 0 ? row.flops / ln->target_tflops * 1e-6 : 0;
	row.products = true;
	row.err = -1.0;
	if (ctx->check) {
		row.err = check(ctx, &c);
		if (!(row.err <= (ln->dtype == E4 ? ERR_FP8 : ERR_LIMIT)))
			ctx->failed = true;
	}
	r = kvb_time(ctx, prefill_call, &c, is_paged(ln) ? NR_SETS : 1, 8, &row);
	if (!r) {
		kvb_row_add(ctx, &row);
		fprintf(stderr, "%-24s %-12s %8.1f TFLOP/s\n", row.name, row.shape,
			row.flops / row.us * 1e-6);
	}
	for (int i = 0; i < 8; i++)
		KVB_CUDA(cudaFree(c.to_free[i]));
	return r;
}

/**
 * kvb_kernels_prefill() - all prefill lines
 * Return: 0 or -errno of a launcher.
 */
int kvb_kernels_prefill(struct kvb_ctx *ctx)
{
	int r = 0;

	for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]) && !r; i++)
		r = run_line(ctx, &lines[i]);
	return r;
}
