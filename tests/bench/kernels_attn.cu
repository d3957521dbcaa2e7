/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_attn.cu - the attention lines of kvbench-kernels: decode over pages at random
 * places of a pool of more than 8 GB, each line beside its floor, the best peer and our
 * target, with the error against a float64 reference on the cache as stored, and beside the
 * time of its own loads: the same kernel in the same run streams the same pages through the
 * same ring and does no arithmetic (KVK_ATTN_LOADS). One thread.
 */
#include "gpu_bench.h"
#include "kernels/attn_any.cuh"
#include "kernels/attn_cuda.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POOL_BYTES    (33ull << 30)
#define POOL_MIN      (9ull << 30)
#define NR_LAYERS     4u
#define STEP	      7u
#define LOADS_REPLAYS 5 /* their spread is a fraction of a percent */

/* Stored figures of docs/performance.md, microseconds; 0 = none. */
struct line {
	uint32_t batch;
	uint32_t len;
	double peer;
	double ours;
};

struct model {
	const char *name;
	uint32_t kind;
	uint32_t dtype;
	uint32_t scale_kind;
	uint32_t kv_heads;
	uint32_t q_heads;
	uint32_t flags;
	struct line lines[8];
};

#define E4 KV_DTYPE_E4M3
#define BF KV_DTYPE_BF16
#define GQ KV_LAYOUT_GQA
#define ML KV_LAYOUT_MLA
#define TK KV_SCALE_TOKEN

static const struct model models[] = {
	{"gqa fp8 96/8",
	 GQ,
	 E4,
	 TK,
	 8,
	 96,
	 0,
	 {{1, 4096, 11.8, 8},
	  {1, 131072, 82.8, 66},
	  {8, 8192, 44.1, 34},
	  {32, 8192, 127, 125},
	  {64, 9216, 283, 279},
	  {256, 2048, 272, 252},
	  {64, 32768, 1023, 985}}},
	{"gqa fp8 64/8",
	 GQ,
	 E4,
	 TK,
	 8,
	 64,
	 0,
	 {{1, 4096, 9.8, 8},
	  {1, 131072, 70.2, 66},
	  {8, 8192, 36.4, 34},
	  {32, 8192, 129, 125},
	  {64, 9216, 284, 279},
	  {256, 2048, 264, 252},
	  {64, 32768, 997, 985}}},
	{"gqa fp8 12/1",
	 GQ,
	 E4,
	 TK,
	 1,
	 12,
	 0,
	 {{1, 4096, 16, 8},
	  {1, 131072, 40, 16},
	  {8, 8192, 13.9, 9},
	  {32, 8192, 26, 19},
	  {64, 9216, 46.6, 37},
	  {256, 2048, 35.8, 33},
	  {64, 32768, 142, 124}}},
	{"gqa bf16 96/8",
	 GQ,
	 BF,
	 KV_SCALE_NONE,
	 8,
	 96,
	 0,
	 {{1, 4096, 12.1, 9},
	  {1, 131072, 134.6, 128},
	  {8, 8192, 72.1, 66},
	  {32, 8192, 251, 248},
	  {64, 9216, 550, 548},
	  {256, 2048, 504, 500},
	  {64, 32768, 1920, 1910}}},
	{"mla fp8 8",
	 ML,
	 E4,
	 TK,
	 0,
	 8,
	 0,
	 {{1, 4096, 16.4, 8},
	  {1, 131072, 47.2, 22},
	  {8, 8192, 29.5, 13},
	  {32, 8192, 68.5, 39},
	  {64, 9216, 133, 84},
	  {128, 4096, 115, 77},
	  {128, 8192, 214, 147}}},
	{"mla fp8 64",
	 ML,
	 E4,
	 TK,
	 0,
	 64,
	 0,
	 {{1, 4096, 16.4, 10},
	  {1, 131072, 47.2, 33},
	  {8, 8192, 29.5, 20},
	  {32, 8192, 68.5, 60},
	  {64, 9216, 133, 127},
	  {128, 4096, 115, 113},
	  {128, 8192, 214, 226}}},
	{"mla fp8 64 fast",
	 ML,
	 E4,
	 TK,
	 0,
	 64,
	 KVK_ATTN_FAST,
	 {{1, 4096, 16.4, 10},
	  {1, 131072, 47.2, 28},
	  {8, 8192, 29.5, 17},
	  {32, 8192, 68.5, 50},
	  {64, 9216, 133, 105},
	  {128, 4096, 115, 95},
	  {128, 8192, 214, 185}}},
	{"mla bf16 8",
	 ML,
	 BF,
	 KV_SCALE_NONE,
	 0,
	 8,
	 0,
	 {{1, 4096, 17.3, 8},
	  {1, 131072, 63.2, 40},
	  {8, 8192, 34.7, 23},
	  {32, 8192, 89.6, 74},
	  {64, 9216, 179, 163},
	  {128, 4096, 151, 148},
	  {128, 8192, 296, 288}}},
	{"mla bf16 64",
	 ML,
	 BF,
	 KV_SCALE_NONE,
	 0,
	 64,
	 0,
	 {{1, 4096, 17.3, 10},
	  {1, 131072, 63.2, 42},
	  {8, 8192, 34.7, 24},
	  {32, 8192, 89.6, 76},
	  {64, 9216, 179, 163},
	  {128, 4096, 151, 146},
	  {128, 8192, 296, 285}}},
	{"mla bf16 64 fast",
	 ML,
	 BF,
	 KV_SCALE_NONE,
	 0,
	 64,
	 KVK_ATTN_FAST,
	 {{1, 4096, 17.3, 10},
	  {1, 131072, 63.2, 42},
	  {8, 8192, 34.7, 24},
	  {32, 8192, 89.6, 76},
	  {64, 9216, 179, 163},
	  {128, 4096, 151, 146},
	  {128, 8192, 296, 285}}},
};

/* One set-up line: device arrays for a batch, and its page tables. */
struct attn_case {
	struct kvk_attn_args args;
	struct kv_row *rows; /* [nr_sets][rows] */
	uint32_t nr_rows;
	uint32_t nr_sets;
	void *to_free[8];
};

static struct kv_layout layout_of(const struct model *m)
{
	struct kv_layout l = {};

	l.format_version = KV_LAYOUT_VERSION;
	l.kind = m->kind;
	l.dtype = m->dtype;
	l.scale_kind = m->scale_kind;
	l.page_tokens = KV_PAGE_TOKENS;
	l.nr_layers = NR_LAYERS;
	if (m->kind == GQ) {
		l.nr_kv_heads = m->kv_heads;
		l.head_dim = 128;
	} else {
		l.latent_dim = 512;
		l.rope_dim = 64;
	}
	return l;
}

/* fp16 scales of every page and layer: 0.004 .. 0.012 */
__global__ void scales_kernel(uint8_t *base, uint64_t stride, uint32_t nr_pages,
			      uint64_t layer_stride, uint32_t off, uint32_t n)
{
	uint64_t total = (uint64_t)nr_pages * NR_LAYERS * n;
	uint64_t step = (uint64_t)gridDim.x * blockDim.x;

	for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total;
	     i += step) {
		uint64_t page = i / n / NR_LAYERS, layer = i / n % NR_LAYERS;
		uint16_t *s =
			(uint16_t *)(base + page * stride + layer * layer_stride + off);

		s[i % n] =
			kvk_f32_to_f16(0.004f + (float)(i * 2654435761u % 1021) * 8e-6f);
	}
}

static void fill_pool(struct kvb_ctx *ctx, const struct kvk_pages *pg)
{
	const struct kv_layout *l = &pg->layout;
	const struct kv_geometry *g = &pg->geometry;
	size_t bytes = (size_t)g->nr_pages * g->stride_bytes;
	uint32_t off, n;

	if (l->dtype == BF) {
		kvb_fill_bf16(ctx, pg->base, bytes / 2, 11, 1.0f);
		return;
	}
	kvb_fill_e4m3(ctx, pg->base, bytes, 12);
	if (l->scale_kind != TK)
		return;
	off = l->kind == ML ? kv_mla_scale_off(l, 0) : kv_gqa_scale_off(l, 0, 0, 0);
	n = l->kind == ML ? 2 * KV_PAGE_TOKENS : 2 * KV_PAGE_TOKENS * l->nr_kv_heads;
	scales_kernel<<<1056, 256, 0, ctx->stream>>>((uint8_t *)pg->base, g->stride_bytes,
						     g->nr_pages, kv_layer_stride(l), off,
						     n);
	KVB_CUDA(cudaGetLastError());
}

static void *upload(const void *src, size_t bytes)
{
	void *d;

	KVB_CUDA(cudaMalloc(&d, bytes));
	KVB_CUDA(cudaMemcpy(d, src, bytes, cudaMemcpyHostToDevice));
	return d;
}

/* Page tables: every set is a random choice of pages without repetition. */
static struct kv_row *make_rows(uint32_t nr_sets, uint32_t nr_rows, uint32_t nr_pages)
{
	uint32_t *perm = (uint32_t *)malloc((size_t)nr_pages * 4);
	struct kv_row *rows =
		(struct kv_row *)malloc((size_t)nr_sets * nr_rows * sizeof(*rows));
	uint64_t rng = 99;
	struct kv_row *d;

	for (uint32_t i = 0; i < nr_pages; i++)
		perm[i] = i;
	for (uint32_t s = 0; s < nr_sets; s++)
		for (uint32_t i = 0; i < nr_rows; i++) {
			uint32_t j = i + (uint32_t)(kvb_random(&rng) % (nr_pages - i)),
				 t = perm[i];

			perm[i] = perm[j];
			perm[j] = t;
			rows[(size_t)s * nr_rows + i] = kv_row_make(
				perm[i], kv_tag_make(1, KV_TAG_LIVE), 0, 0, i);
		}
	d = (struct kv_row *)upload(rows, (size_t)nr_sets * nr_rows * sizeof(*rows));
	free(rows);
	free(perm);
	return d;
}

/* Pages of request @i. KVB_ATTN_MIXED: half to one and a half times @per; the floor stays. */
static uint32_t request_pages(uint32_t per, uint32_t i)
{
	return getenv("KVB_ATTN_MIXED") ? per / 2 + 1 + i * 37 % per : per;
}

static void case_init(struct kvb_ctx *ctx, const struct model *m, const struct line *ln,
		      const struct kvk_pages *pages, struct attn_case *c)
{
	uint32_t b = ln->batch, per = (ln->len + 63) / 64, dq = m->kind == ML ? 576 : 128;
	uint32_t dout = m->kind == ML ? 512 : 128;
	uint32_t *h = (uint32_t *)malloc(4 * (b + 1) * 4);
	uint32_t *rs = h, *len = h + b + 1, *qs = h + 2 * (b + 1);
	struct kv_verdict *v = (struct kv_verdict *)malloc(b * sizeof(*v));
	uint64_t step = STEP;
	struct kvk_attn_args *a = &c->args;

	memset(c, 0, sizeof(*c));
	rs[0] = 0;
	for (uint32_t i = 0; i < b; i++) {
		const uint32_t n = request_pages(per, i);

		rs[i + 1] = rs[i] + n;
		len[i] = n == per ? ln->len : n * 64;
		qs[i] = i;
		v[i].step = STEP;
		v[i].bits = 0;
		v[i].rows_checked = n;
	}
	len[b] = 0;
	qs[b] = b;
	c->nr_rows = rs[b];
	c->nr_sets = kvb_calls((double)c->nr_rows * kv_layer_bytes(&pages->layout));
	a->pages = *pages;
	c->rows = make_rows(c->nr_sets, c->nr_rows, pages->geometry.nr_pages);
	c->to_free[0] = c->rows;
	c->to_free[1] = upload(h, 4 * (b + 1) * 4);
	c->to_free[2] = upload(v, b * sizeof(*v));
	c->to_free[3] = upload(&step, 8);
	KVB_CUDA(cudaMalloc(&c->to_free[4], (size_t)b * m->q_heads * dq * 2));
	KVB_CUDA(cudaMalloc(&c->to_free[5], (size_t)b * m->q_heads * dout * 2));
	a->batch.rows = c->rows;
	a->batch.row_start = (const uint32_t *)c->to_free[1];
	a->batch.lengths = a->batch.row_start + b + 1;
	a->batch.q_start = a->batch.row_start + 2 * (b + 1);
	a->batch.verdicts = (const struct kv_verdict *)c->to_free[2];
	a->batch.step = (const uint64_t *)c->to_free[3];
	a->batch.nr_requests = a->batch.nr_tokens = b;
	a->batch.q_len_max = 1;
	a->nr_q_heads = m->q_heads;
	a->sm_scale = m->kind == ML ? 0.0721687836f : 0.0883883476f;
	a->act_dtype = KVK_BF16;
	a->flags = m->flags;
	if (getenv("KVB_ATTN_FLAGS")) /* tuning: attn_cuda.h */
		a->flags |= (uint32_t)strtoul(getenv("KVB_ATTN_FLAGS"), NULL, 0);
	a->q = c->to_free[4];
	a->out = c->to_free[5];
	a->reserved = KVK_ATTN_STEPS(c->nr_sets, 0);
	a->workspace_bytes = kvk_attn_workspace_cuda(a);
	KVB_CUDA(cudaMalloc(&a->workspace, a->workspace_bytes + 16));
	c->to_free[6] = a->workspace;
	kvb_fill_bf16(ctx, c->to_free[4], (size_t)b * m->q_heads * dq, 5, 1.0f);
	free(h);
	free(v);
}

/* Each set is a step of its own, with tables and a schedule of its own; they share the rest. */
static int attn_call(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct attn_case *c = (struct attn_case *)arg;
	struct kvk_attn_args a = c->args;

	a.batch.rows = c->rows + (size_t)set * c->nr_rows;
	a.layer = set % NR_LAYERS;
	a.reserved = KVK_ATTN_STEPS(c->nr_sets, set);
	return a.pages.layout.kind == ML ? kvk_attn_mla_cuda(&a, ctx->stream)
					 : kvk_attn_gqa_cuda(&a, ctx->stream);
}

/* The schedules, once: then calls are those of layers after the first. */
static int make_schedules(struct kvb_ctx *ctx, struct attn_case *c)
{
	int r = 0;

	for (uint32_t i = 0; i < c->nr_sets && !r; i++)
		r = attn_call(ctx, c, i);
	c->args.flags |= KVK_ATTN_PLAN;
	return r;
}

/* |out - ref| / |ref| of set 1. */
static double check(struct kvb_ctx *ctx, struct attn_case *c, size_t nr_out)
{
	struct kvk_attn_args a = c->args;
	uint16_t *h = (uint16_t *)malloc(nr_out * 2);
	float *f = (float *)malloc(nr_out * 4);
	double *ref = (double *)malloc(nr_out * 8), *d_ref, err;

	KVB_CUDA(cudaMalloc((void **)&d_ref, nr_out * 8));
	KVB_CUDA(cudaMemsetAsync(a.out, 0xff, nr_out * 2, ctx->stream));
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	if (attn_call(ctx, c, 1))
		exit(1);
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	KVB_CUDA(cudaMemcpy(h, a.out, nr_out * 2, cudaMemcpyDeviceToHost));
	a.batch.rows = c->rows + c->nr_rows;
	a.layer = 1;
	a.out = d_ref;
	if (any_launch<double>(&a, ctx->stream))
		exit(1);
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	KVB_CUDA(cudaMemcpy(ref, d_ref, nr_out * 8, cudaMemcpyDeviceToHost));
	for (size_t i = 0; i < nr_out; i++)
		f[i] = kvk_bf16_to_f32(h[i]);
	err = kvb_rel_err(f, ref, nr_out);
	KVB_CUDA(cudaFree(d_ref));
	free(h);
	free(f);
	free(ref);
	return err;
}

/* The same calls without arithmetic on the pages; after the line's own, whose output it spoils. */
static int time_loads(struct kvb_ctx *ctx, struct attn_case *c, struct kvb_row *row)
{
	struct kvb_row loads = {};
	int r;

	c->args.flags |= KVK_ATTN_LOADS;
	ctx->replays = LOADS_REPLAYS;
	r = kvb_time(ctx, attn_call, c, c->nr_sets, c->nr_sets, &loads);
	ctx->replays = 0;
	row->loads_us = loads.us;
	return r;
}

static int run_line(struct kvb_ctx *ctx, const struct model *m, const struct line *ln,
		    const struct kvk_pages *pages)
{
	double tokens = (double)ln->batch * ln->len;
	struct kvb_row row = {};
	struct attn_case c;
	int r;

	snprintf(row.family, sizeof(row.family), "attn");
	snprintf(row.name, sizeof(row.name), "%s", m->name);
	snprintf(row.shape, sizeof(row.shape), "%u x %uk", ln->batch, ln->len / 1024);
	if (!kvb_selected(ctx, row.name, row.shape))
		return 0;
	case_init(ctx, m, ln, pages, &c);
	row.bytes = tokens * kv_layer_bytes(&pages->layout) / KV_PAGE_TOKENS;
	if (m->kind == ML)
		row.flops = 2.0 * tokens * m->q_heads * (576 + 512);
	row.peer_us = ln->peer;
	row.ours_us = ln->ours;
	/* fast on FP8 pages has e4m3 products, at twice the rate: bytes are its floor */
	row.products = !(m->flags & KVK_ATTN_FAST) &&
		       row.flops / KVB_FLOPS > row.bytes / KVB_TARGET_CEILING;
	row.err = -1.0;
	r = make_schedules(ctx, &c);
	if (!r && ctx->check) {
		row.err = check(ctx, &c,
				(size_t)ln->batch * m->q_heads *
					(m->kind == ML ? 512 : 128));
		/* fast: P in one part is as exact as the bf16 output, Q and P in e4m3 are not */
		if (!(row.err <= (!(m->flags & KVK_ATTN_FAST) ? 2e-3
				  : pages->layout.dtype == BF ? 3e-3
							      : 6e-2)))
			ctx->failed = true;
	}
	if (!r)
		r = kvb_time(ctx, attn_call, &c, c.nr_sets, c.nr_sets, &row);
	if (!r)
		r = time_loads(ctx, &c, &row);
	if (!r)
		kvb_row_add(ctx, &row);
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	for (int i = 0; i < 8; i++)
		KVB_CUDA(cudaFree(c.to_free[i]));
	return r;
}

/**
 * kvb_kernels_attn() - all attention lines
 * Return: 0 or -errno of a launcher.
 */
int kvb_kernels_attn(struct kvb_ctx *ctx)
{
	struct kvk_pages pages = {};
	int r = 0;

	KVB_CUDA(cudaMalloc(&pages.base, POOL_BYTES));
	for (size_t i = 0; i < sizeof(models) / sizeof(models[0]) && !r; i++) {
		const struct model *m = &models[i];
		struct kv_geometry *g = &pages.geometry;
		bool refill, wanted = false;

		for (int k = 0; k < 8 && m->lines[k].batch; k++) {
			char shape[32];

			snprintf(shape, sizeof(shape), "%u x %uk", m->lines[k].batch,
				 m->lines[k].len / 1024);
			wanted |= kvb_selected(ctx, m->name, shape);
		}
		if (!wanted)
			continue;
		refill = memcmp(&pages.layout, &(const struct kv_layout &)layout_of(m),
				sizeof(pages.layout)) != 0;
		pages.layout = layout_of(m);
		g->stride_bytes = kv_page_stride(&pages.layout);
		g->shift = 0;
		g->extent_bytes = g->stride_bytes;
		g->nr_pages =
			(uint32_t)((m->dtype == BF ? POOL_BYTES : POOL_BYTES * 2 / 3) /
				   g->stride_bytes);
		if (refill)
			fill_pool(ctx, &pages);
		for (int k = 0; k < 8 && m->lines[k].batch && !r; k++)
			if ((uint64_t)m->lines[k].batch * m->lines[k].len / 64 <=
			    g->nr_pages)
				r = run_line(ctx, m, &m->lines[k], &pages);
	}
	KVB_CUDA(cudaFree(pages.base));
	return r;
}
