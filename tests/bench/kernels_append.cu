/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_append.cu - append in kvbench-kernels, and all that lies between a layer's projections
 * and its attention. One thread.
 */
#include "kernels_pages.h"
#include "kernels/moe_cuda.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------ append */

static void append_args(struct pages_case *c, struct kvk_append_args *a, uint32_t set)
{
	*a = c->append;
	a->pages = c->pages;
	a->batch = c->batch;
	a->layer = set % NR_LAYERS;
	if (c->pages.layout.kind == KV_LAYOUT_MLA) {
		a->latent = c->x + set % X_SETS * c->x_bytes;
		a->rope = c->x2 + set % X_SETS * c->x2_bytes;
	} else {
		a->k = c->x + set % X_SETS * c->x_bytes;
		a->v = c->x2 + set % X_SETS * c->x2_bytes;
	}
}

static int call_append(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct pages_case *c = (struct pages_case *)arg;
	struct kvk_append_args a;

	append_args(c, &a, set);
	return kvk_append_cuda(&a, ctx->stream);
}

/* The reference stores sampled tokens once more: no byte of their pages may change. */
static double append_err(struct kvb_ctx *ctx, struct pages_case *c, struct pages_shape s)
{
	const size_t bytes = kv_page_bytes(&c->pages.layout);
	const uint32_t nr = s.nr * s.q_len;
	uint8_t *got = (uint8_t *)malloc(bytes), *want = (uint8_t *)malloc(bytes);
	uint8_t *x = (uint8_t *)malloc(c->x_bytes / nr + c->x2_bytes / nr);
	double err = 0.0;

	if (call_append(ctx, c, 3))
		return INFINITY;
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	for (uint32_t i = 0; i < SAMPLES; i++) {
		const uint32_t t = (uint32_t)((uint64_t)nr * i / SAMPLES);
		const uint32_t r = t / s.q_len;
		const uint32_t pos = c->host_arrays[s.nr + 1 + r] - s.q_len + t % s.q_len;
		const size_t b1 = c->x_bytes / nr, b2 = c->x2_bytes / nr;
		struct host_page h;
		struct kvk_append_args a;

		append_args(c, &a, 3);
		KVB_CUDA(cudaMemcpy(x, c->x + 3 * c->x_bytes + t * b1, b1,
				    cudaMemcpyDeviceToHost));
		KVB_CUDA(cudaMemcpy(x + b1, c->x2 + 3 * c->x2_bytes + t * b2, b2,
				    cudaMemcpyDeviceToHost));
		kvb_page_fetch(&c->pages,
			       c->host_rows[r * s.rows + pos / KV_PAGE_TOKENS].pfn, got);
		memcpy(want, got, bytes);
		kvb_host_page_make(&h, &c->pages, want, pos % KV_PAGE_TOKENS + 1);
		a.pages = h.pages;
		a.batch = h.batch;
		a.latent = a.k = x;
		a.rope = a.v = x + b1;
		a.nan_count = NULL;
		if (kvk_host_ops()->append(&a, NULL) || memcmp(got, want, bytes))
			err = INFINITY;
	}
	free(got);
	free(want);
	free(x);
	return err;
}

struct format {
	const char *name;
	uint32_t kind, dtype, scale_kind;
};

static const struct format formats[] = {
	{"mla fp8", KV_LAYOUT_MLA, KV_DTYPE_E4M3, KV_SCALE_TOKEN},
	{"mla fp8_s", KV_LAYOUT_MLA, KV_DTYPE_E4M3, KV_SCALE_STATIC},
	{"mla bf16", KV_LAYOUT_MLA, KV_DTYPE_BF16, KV_SCALE_NONE},
	{"gqa fp8", KV_LAYOUT_GQA, KV_DTYPE_E4M3, KV_SCALE_TOKEN},
};
#define NR_FORMATS (sizeof(formats) / sizeof(formats[0]))

static int append_line(struct kvb_ctx *ctx, const struct format *f, struct pages_shape s,
		       double ours)
{
	const uint32_t nr = s.nr * s.q_len;
	struct pages_case c = {};
	struct kvb_row row = {};
	size_t dim, dim2;
	int r;

	snprintf(row.name, sizeof(row.name), "append %s", f->name);
	snprintf(row.shape, sizeof(row.shape), "%u", nr);
	if (!kvb_selected(ctx, row.name, row.shape))
		return 0;
	kvb_pool_make(ctx, &c, &c.pages,
		      kvb_layout_make(f->kind, f->dtype, f->scale_kind));
	kvb_batch_make(&c, s, NR_PAGES, 1, s.nr * s.rows <= NR_PAGES);
	dim = f->kind == KV_LAYOUT_MLA ? 512 : 8 * 128;
	dim2 = f->kind == KV_LAYOUT_MLA ? 64 : 8 * 128;
	c.x_bytes = dim * nr * 2;
	c.x2_bytes = dim2 * nr * 2;
	c.x = (const uint8_t *)kvb_dev_alloc(&c, c.x_bytes * X_SETS);
	c.x2 = (const uint8_t *)kvb_dev_alloc(&c, c.x2_bytes * X_SETS);
	kvb_fill_bf16(ctx, (void *)c.x, c.x_bytes * X_SETS / 2, 31, 1.0f);
	kvb_fill_bf16(ctx, (void *)c.x2, c.x2_bytes * X_SETS / 2, 32, 1.0f);
	c.append.src_dtype = KVK_BF16;
	c.append.nan_count = (uint64_t *)kvb_dev_alloc(&c, 8);
	row.bytes = (double)(c.x_bytes + c.x2_bytes) +
		    (double)kv_layer_bytes(&c.pages.layout) / KV_PAGE_TOKENS * nr;
	row.ours_us = ours;
	row.err = append_err(ctx, &c, s);
	r = kvb_pages_line(ctx, call_append, &c, &row, NR_LAYERS);
	kvb_case_free(ctx, &c);
	return r;
}

/* ---------------------------------------------------------------- norm, rope and append */

/* What kernels a layer's query and key take. */
struct key_shape {
	const char *name;
	uint32_t kind, nr_q, head; /* MLA: q's heads have 128 values more */
};

struct key_case {
	struct pages_case c;
	struct kvk_norm_rope_append_args a;
	uint8_t *kv, *q;
	size_t kv_bytes, q_bytes; /* of one set */
	bool parts;
};

static int key_parts(const struct kvk_norm_rope_append_args *a, kvk_stream s)
{
	int r = a->q_norm.weight ? kvk_norm_cuda(&a->q_norm, s) : 0;

	if (!r)
		r = kvk_norm_cuda(&a->k_norm, s);
	if (!r)
		r = kvk_rope_cuda(&a->q_rope, s);
	if (!r)
		r = kvk_rope_cuda(&a->k_rope, s);
	return r ? r : kvk_append_cuda(&a->append, s);
}

static int call_key(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct key_case *k = (struct key_case *)arg;
	struct kvk_norm_rope_append_args a = k->a;
	uint8_t *kv = k->kv + set % X_SETS * k->kv_bytes;
	uint8_t *q = k->q + set % X_SETS * k->q_bytes;

	a.append.layer = set % NR_LAYERS;
	a.k_norm.x = kv;
	a.k_rope.x = kv;
	a.q_rope.x = q;
	if (a.append.pages.layout.kind == KV_LAYOUT_GQA) {
		a.append.k = a.k_norm.y = kv;
		a.q_norm.x = a.q_norm.y = q;
	}
	return k->parts ? key_parts(&a, ctx->stream)
			: kvk_norm_rope_append_cuda(&a, ctx->stream);
}

/* Both families' fields, MLA's first; GQA takes over what differs. */
static void key_args(struct key_case *k, const struct key_shape *s, uint32_t n)
{
	struct kvk_norm_rope_append_args *a = &k->a;
	const uint32_t mla = s->kind == KV_LAYOUT_MLA, qd = mla ? 192 : s->head;

	a->append = k->c.append;
	a->append.pages = k->c.pages;
	a->append.batch = k->c.batch;
	a->k_norm.nr_rows = mla ? n : n * 8;
	a->k_norm.cols = mla ? 512 : s->head;
	a->k_norm.x_stride = mla ? 576 : 0;
	a->k_norm.eps = a->q_norm.eps = 1e-6f;
	a->k_norm.act_dtype = a->q_norm.act_dtype = KVK_BF16;
	a->k_norm.y = (void *)a->append.latent;
	a->q_norm.nr_rows = n * s->nr_q;
	a->q_norm.cols = s->head;
	a->k_rope.nr_tokens = n;
	a->k_rope.nr_heads = mla ? 1 : 8;
	a->k_rope.head_stride = mla ? 576 : s->head;
	a->k_rope.token_stride = mla ? 576 : 8 * s->head;
	a->k_rope.offset = mla ? 512 : 0;
	a->k_rope.y = (void *)a->append.rope;
	a->k_rope.y_head_stride = a->k_rope.y_token_stride = 64;
	a->k_rope.rope_dim = 64;
	a->k_rope.act_dtype = KVK_BF16;
	a->k_rope.interleaved = mla;
	a->q_rope = a->k_rope;
	a->q_rope.nr_heads = s->nr_q;
	a->q_rope.head_stride = qd;
	a->q_rope.token_stride = s->nr_q * qd;
	a->q_rope.offset = mla ? 128 : 0;
	a->q_rope.y_head_stride = 576;
	a->q_rope.y_token_stride = s->nr_q * 576;
	a->q_rope.y_offset = mla ? 512 : 0;
}

static void key_make(struct kvb_ctx *ctx, struct key_case *k, const struct key_shape *s,
		     uint32_t n)
{
	const uint32_t mla = s->kind == KV_LAYOUT_MLA, qd = mla ? 192 : s->head;
	struct pages_case *c = &k->c;
	uint32_t *positions = (uint32_t *)malloc(n * 4);
	float *weight, *table;

	kvb_pool_make(ctx, c, &c->pages,
		      kvb_layout_make(s->kind, KV_DTYPE_E4M3, KV_SCALE_TOKEN));
	kvb_batch_make(c, {n, 16, 1}, NR_PAGES, 1, n * 16 <= NR_PAGES);
	c->append.src_dtype = KVK_BF16;
	c->append.nan_count = (uint64_t *)kvb_dev_alloc(c, 8);
	k->kv_bytes = (mla ? 576 : 8 * s->head) * 2ul * n;
	k->q_bytes = s->nr_q * qd * 2ul * n;
	k->kv = (uint8_t *)kvb_dev_alloc(c, k->kv_bytes * X_SETS);
	k->q = (uint8_t *)kvb_dev_alloc(c, k->q_bytes * X_SETS);
	weight = (float *)kvb_dev_alloc(c, 512 * 4);
	table = (float *)kvb_dev_alloc(c, 1024 * 64 * 4);
	kvb_fill_bf16(ctx, k->kv, k->kv_bytes * X_SETS / 2, 61, 1.0f);
	kvb_fill_bf16(ctx, k->q, k->q_bytes * X_SETS / 2, 62, 1.0f);
	kvb_fill_f32(ctx, weight, 512, 63, 1.0f);
	kvb_fill_f32(ctx, table, 1024 * 64, 64, 0.5f);
	if (mla) {
		c->append.latent = kvb_dev_alloc(c, n * 1024);
		c->append.rope = kvb_dev_alloc(c, n * 128);
	}
	for (uint32_t i = 0; i < n; i++)
		positions[i] = c->host_arrays[n + 1 + i] - 1;
	key_args(k, s, n);
	k->a.k_norm.weight = weight;
	k->a.q_norm.weight = mla ? NULL : weight;
	k->a.q_rope.positions = k->a.k_rope.positions =
		(const uint32_t *)kvb_dev_copy(c, positions, n * 4);
	k->a.q_rope.cos_sin = k->a.k_rope.cos_sin = table;
	k->a.q_rope.y = mla ? kvb_dev_alloc(c, s->nr_q * 1152ul * n) : NULL;
	if (!mla) {
		k->a.k_rope.y = NULL;
		k->a.append.v = kvb_dev_alloc(c, k->kv_bytes);
		kvb_fill_bf16(ctx, (void *)k->a.append.v, k->kv_bytes / 2, 65, 1.0f);
	}
	free(positions);
}

static int key_line(struct kvb_ctx *ctx, const struct key_shape *s, uint32_t n,
		    bool parts)
{
	struct key_case k = {};
	struct kvb_row row = {};
	int r;

	snprintf(row.name, sizeof(row.name), "%s %s", parts ? "key parts" : "key at once",
		 s->name);
	snprintf(row.shape, sizeof(row.shape), "%u", n);
	if (!kvb_selected(ctx, row.name, row.shape))
		return 0;
	key_make(ctx, &k, s, n);
	k.parts = parts;
	row.bytes = (double)(k.kv_bytes * (s->kind == KV_LAYOUT_MLA ? 1 : 2) +
			     2 * k.q_bytes) +
		    (double)kv_layer_bytes(&k.c.pages.layout) / KV_PAGE_TOKENS * n;
	snprintf(row.family, sizeof(row.family), "pages");
	row.err = -1; /* tests/kernels/cuda_dense compares every byte */
	r = kvb_time(ctx, call_key, &k, NR_LAYERS, 24, &row);
	if (!r)
		kvb_row_add(ctx, &row);
	kvb_case_free(ctx, &k.c);
	return r;
}

/* The calls between projections and attention: one after the other, and in one kernel. */
static int key_lines(struct kvb_ctx *ctx)
{
	static const struct key_shape s[] = {{"mla fp8, 8 heads", KV_LAYOUT_MLA, 8, 0},
					     {"mla fp8, 64 heads", KV_LAYOUT_MLA, 64, 0},
					     {"gqa fp8 96/8", KV_LAYOUT_GQA, 96, 128}};
	static const uint32_t counts[] = {1, 16, 64, 256, 4096};
	int r = 0;

	for (size_t i = 0; i < sizeof(s) / sizeof(s[0]); i++)
		for (uint32_t k = 0; k < 10 && !r; k++)
			r = key_line(ctx, &s[i], counts[k / 2], k % 2 == 0);
	return r;
}

/* Return: 0 or -errno. */
int kvb_append_lines(struct kvb_ctx *ctx)
{
	int r = 0;

	for (size_t i = 0; i < NR_FORMATS && !r; i++) {
		r = append_line(ctx, &formats[i], {1, CTX_ROWS, 1}, 0);
		if (!r)
			r = append_line(ctx, &formats[i], {64, CTX_ROWS - 16, 1}, 0);
		if (!r)
			r = append_line(ctx, &formats[i], {256, 32, 1}, 2.5);
		if (!r)
			r = append_line(ctx, &formats[i], {8, 64, 4096}, 0);
	}
	return r ? r : key_lines(ctx);
}
