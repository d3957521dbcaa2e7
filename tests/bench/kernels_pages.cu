/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_pages.cu - what a step does to pages beside attention, in kvbench-kernels: check with
 * mirror refresh, append, BF16 -> FP8 conversion, zeroing, copies, digests.
 *
 * As in a step, the calls of a graph share the batch's arrays (rows, lengths, verdicts) and take
 * another layer or other pages each. A line is compared with the C reference on sampled pages:
 * err is 0 when every byte is the same, infinite when one is not. One thread.
 */
#include "gpu_bench.h"
#include "kernels/attn_cuda.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NR_LAYERS    8u
#define NR_PAGES     8192u
#define CTX_ROWS     144u   /* rows of a request: 9,216 tokens */
#define MIRROR_PAGES 21300u /* of 48.2 GB of Kimi K2.6 pages */
#define LOG_ENTRIES  64u
#define STEP	     7u
#define X_SETS	     8u
#define SAMPLES	     4u

/* struct pages_case - what the calls of a line share; device memory, owner */
struct pages_case {
	struct kvk_pages pages, from;
	struct kvk_batch batch;
	struct kvk_append_args append;
	struct kvk_move_args move;
	struct kvk_tag_check_args check;
	struct kv_row *host_rows;
	uint32_t *host_arrays; /* row_start, lengths, q_start */
	const uint8_t *x, *x2;
	size_t x_bytes, x2_bytes; /* of one set */
	void *pinned;
	size_t block_bytes;
	uint32_t rows_per_set;
	uint32_t nr_freed;
	void *to_free[24];
};

static void *dev_alloc(struct pages_case *c, size_t bytes)
{
	void *p;

	KVB_CUDA(cudaMalloc(&p, bytes));
	c->to_free[c->nr_freed++] = p;
	return p;
}

static void *dev_copy(struct pages_case *c, const void *src, size_t bytes)
{
	void *p = dev_alloc(c, bytes);

	KVB_CUDA(cudaMemcpy(p, src, bytes, cudaMemcpyHostToDevice));
	return p;
}

static void case_free(struct kvb_ctx *ctx, struct pages_case *c)
{
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	for (uint32_t i = 0; i < c->nr_freed; i++)
		KVB_CUDA(cudaFree(c->to_free[i]));
	if (c->pinned)
		KVB_CUDA(cudaFreeHost(c->pinned));
	free(c->host_rows);
	free(c->host_arrays);
	memset(c, 0, sizeof(*c));
}

/* ----------------------------------------------------------------------------- layouts */

static struct kv_layout layout_make(uint32_t kind, uint32_t dtype, uint32_t scale_kind)
{
	struct kv_layout l = {};

	l.format_version = KV_LAYOUT_VERSION;
	l.kind = kind;
	l.dtype = dtype;
	l.scale_kind = scale_kind;
	l.page_tokens = KV_PAGE_TOKENS;
	l.nr_layers = NR_LAYERS;
	if (kind == KV_LAYOUT_GQA) {
		l.nr_kv_heads = 8;
		l.head_dim = 128;
		l.nr_scales = scale_kind == KV_SCALE_STATIC ? NR_LAYERS * 16 : 0;
	} else {
		l.latent_dim = 512;
		l.rope_dim = 64;
		l.nr_scales = scale_kind == KV_SCALE_STATIC ? NR_LAYERS : 0;
	}
	return l;
}

static void pool_make(struct kvb_ctx *ctx, struct pages_case *c, struct kvk_pages *p,
		      struct kv_layout l)
{
	float scales[NR_LAYERS * 16];
	size_t bytes;

	p->layout = l;
	p->geometry.stride_bytes = kv_page_stride(&l);
	p->geometry.extent_bytes = p->geometry.stride_bytes;
	p->geometry.shift = 0;
	p->geometry.nr_pages = NR_PAGES;
	bytes = (size_t)NR_PAGES * p->geometry.stride_bytes;
	p->base = dev_alloc(c, bytes);
	if (l.dtype == KV_DTYPE_BF16)
		kvb_fill_bf16(ctx, p->base, bytes / 2, 21, 1.0f);
	else
		kvb_fill_e4m3(ctx, p->base, bytes, 22);
	for (uint32_t i = 0; i < l.nr_scales; i++)
		scales[i] = 0.01f + 0.0001f * (float)i;
	p->scales =
		l.nr_scales ? (const float *)dev_copy(c, scales, l.nr_scales * 4) : NULL;
}

/* ------------------------------------------------------------------------------- batch */

/* struct shape - nr requests, each with rows pages of which the last q_len tokens are new */
struct shape {
	uint32_t nr, rows, q_len;
};

/*
 * Sets of WRITE rows over pages chosen at random, @distinct: no page twice in any of them, and
 * verdicts that passed. Lengths end anywhere in the last page when q_len is 1.
 */
static void batch_make(struct pages_case *c, struct shape s, uint32_t nr_pages,
		       uint32_t nr_sets, bool distinct)
{
	const uint32_t per_set = s.nr * s.rows, total = per_set * nr_sets;
	struct kv_row *rows = (struct kv_row *)malloc(total * sizeof(*rows));
	uint32_t *perm = (uint32_t *)malloc(nr_pages * 4), *h;
	struct kv_verdict *v = (struct kv_verdict *)calloc(s.nr, sizeof(*v));
	uint64_t rng = 5, step = STEP;

	for (uint32_t i = 0; i < nr_pages; i++)
		perm[i] = i;
	for (uint32_t i = 0; i < total; i++) {
		uint32_t at = i % per_set, from = distinct ? i : 0;
		uint32_t j = from + (uint32_t)(kvb_random(&rng) % (nr_pages - from));
		uint32_t pfn = perm[j];

		if (distinct) {
			perm[j] = perm[i];
			perm[i] = pfn;
		}
		rows[i] = kv_row_make(pfn, kv_tag_make(pfn + 1, KV_TAG_LIVE),
				      KV_ROW_WRITE, at / s.rows + 1, at % s.rows);
	}
	h = (uint32_t *)calloc(3 * (s.nr + 1), 4);
	for (uint32_t r = 0; r <= s.nr; r++) {
		h[r] = r * s.rows;
		h[2 * (s.nr + 1) + r] = r * s.q_len;
		if (r == s.nr)
			break;
		h[s.nr + 1 + r] = s.rows * KV_PAGE_TOKENS -
				  (s.q_len == 1 ? (uint32_t)(kvb_random(&rng) % 64) : 0);
		v[r].step = STEP;
		v[r].rows_checked = s.rows;
	}
	c->host_rows = rows;
	c->host_arrays = h;
	c->rows_per_set = per_set;
	c->batch.rows = (const struct kv_row *)dev_copy(c, rows, total * sizeof(*rows));
	c->batch.row_start = (const uint32_t *)dev_copy(c, h, 3 * (s.nr + 1) * 4);
	c->batch.lengths = c->batch.row_start + s.nr + 1;
	c->batch.q_start = c->batch.row_start + 2 * (s.nr + 1);
	c->batch.verdicts = (const struct kv_verdict *)dev_copy(c, v, s.nr * sizeof(*v));
	c->batch.step = (const uint64_t *)dev_copy(c, &step, 8);
	c->batch.nr_requests = s.nr;
	c->batch.nr_tokens = s.nr * s.q_len;
	c->batch.q_len_max = s.q_len;
	free(perm);
	free(v);
}

/* One line: name, shape, bytes and targets are in @row. */
static int line(struct kvb_ctx *ctx, kvb_call call, struct pages_case *c,
		struct kvb_row *row, uint32_t nr_sets)
{
	uint32_t nr_calls = kvb_calls(row->bytes);
	int r;

	nr_calls = nr_calls < 24 ? (nr_calls + 7) / 8 * 8 : 24;
	snprintf(row->family, sizeof(row->family), "pages");
	r = kvb_time(ctx, call, c, nr_sets, nr_calls, row);
	if (!(row->err <= 0.0) && row->err != -1.0)
		ctx->failed = true;
	if (!r)
		kvb_row_add(ctx, row);
	return r;
}

/* ------------------------------------------------------------------------------- check */

static int call_check(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct pages_case *c = (struct pages_case *)arg;
	struct kvk_tag_check_args a = c->check;

	a.batch.rows = c->batch.rows + (size_t)set * c->rows_per_set;
	return kvk_tag_check_cuda(&a, ctx->stream);
}

/* The block comes from pinned memory by a copy in the graph. */
static int call_check_copy(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct pages_case *c = (struct pages_case *)arg;

	if (cudaMemcpyAsync((void *)c->check.block, c->pinned, c->block_bytes,
			    cudaMemcpyHostToDevice, ctx->stream) != cudaSuccess)
		return -EIO;
	return call_check(ctx, arg, set);
}

/* The block is read where the host wrote it. */
static int call_check_pinned(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct pages_case *c = (struct pages_case *)arg;
	struct kvk_tag_check_args a = c->check;

	a.block = (const struct kv_step_block *)c->pinned;
	a.batch.rows = c->batch.rows + (size_t)set * c->rows_per_set;
	return kvk_tag_check_cuda(&a, ctx->stream);
}

/* Mirror and block: @full: every word, else LOG_ENTRIES changes. */
static void check_make(struct pages_case *c, struct shape s, bool full)
{
	const uint32_t nr = full ? MIRROR_PAGES : LOG_ENTRIES;
	const size_t mirror_bytes = sizeof(struct kv_mirror) + MIRROR_PAGES * 8;
	struct kv_mirror *m = (struct kv_mirror *)calloc(1, mirror_bytes);
	struct kv_step_block *b;
	uint64_t *nonces = (uint64_t *)malloc(s.nr * 8);

	c->block_bytes =
		sizeof(*b) + (size_t)nr * (full ? 8 : sizeof(struct kv_log_entry));
	KVB_CUDA(cudaMallocHost(&c->pinned, c->block_bytes));
	b = (struct kv_step_block *)c->pinned;
	memset(b, 0, sizeof(*b));
	b->step = STEP;
	b->log_to = nr;
	b->nr_pages = MIRROR_PAGES;
	b->kind = full ? KV_BLOCK_FULL : KV_BLOCK_DELTA;
	b->nr_entries = nr;
	m->nr_pages = MIRROR_PAGES;
	for (uint32_t i = 0; i < MIRROR_PAGES; i++) {
		uint64_t tag = kv_tag_make(i + 1, KV_TAG_LIVE);
		struct kv_log_entry *e = (struct kv_log_entry *)(b + 1);

		((uint64_t *)(m + 1))[i] = tag;
		if (full)
			((uint64_t *)(b + 1))[i] = tag;
		else if (i < nr)
			e[i] = (struct kv_log_entry){tag, i, i};
	}
	for (uint32_t r = 0; r < s.nr; r++)
		nonces[r] = r + 1;
	c->check.block =
		(const struct kv_step_block *)dev_copy(c, c->pinned, c->block_bytes);
	c->check.mirror = (struct kv_mirror *)dev_copy(c, m, mirror_bytes);
	c->check.nonces = (const uint64_t *)dev_copy(c, nonces, s.nr * 8);
	c->check.page_tokens = KV_PAGE_TOKENS;
	c->check.ret_verdicts =
		(struct kv_verdict *)dev_alloc(c, s.nr * sizeof(struct kv_verdict));
	c->check.batch = c->batch;
	free(m);
	free(nonces);
}

/* 0 if all pass, and a request with a changed row fails and no other does. */
static double check_err(struct kvb_ctx *ctx, struct pages_case *c, uint32_t nr_rows)
{
	struct kv_verdict *v =
		(struct kv_verdict *)calloc(c->batch.nr_requests, sizeof(*v));
	const uint32_t nr = c->batch.nr_requests;
	struct kv_row bad = c->host_rows[nr_rows - 1];
	double err = 0.0;

	for (int pass = 0; pass < 2; pass++) {
		bad.expected += (uint64_t)pass << KV_TAG_GEN_SHIFT;
		KVB_CUDA(cudaMemcpy((void *)(c->batch.rows + nr_rows - 1), &bad,
				    sizeof(bad), cudaMemcpyHostToDevice));
		if (call_check(ctx, c, 0))
			return INFINITY;
		KVB_CUDA(cudaStreamSynchronize(ctx->stream));
		KVB_CUDA(cudaMemcpy(v, c->check.ret_verdicts, nr * sizeof(*v),
				    cudaMemcpyDeviceToHost));
		for (uint32_t r = 0; r < nr; r++) {
			uint32_t want = pass && r == 0 ? KV_BAD_GEN : 0;

			if (v[r].step != STEP || v[r].bits != want ||
			    v[r].rows_checked != nr_rows)
				err = INFINITY;
		}
	}
	KVB_CUDA(cudaMemcpy((void *)(c->batch.rows + nr_rows - 1),
			    &c->host_rows[nr_rows - 1], sizeof(bad),
			    cudaMemcpyHostToDevice));
	free(v);
	return err;
}

/* A step's rows have just been written by the step before the check reads them: they lie in L2. */
static uint32_t check_sets(struct shape s)
{
	const size_t bytes = (size_t)s.nr * s.rows * sizeof(struct kv_row);
	const size_t nr = (20ull << 20) / bytes;

	return nr < 1 ? 1 : nr > 8 ? 8 : (uint32_t)nr;
}

static int check_lines(struct kvb_ctx *ctx)
{
	static const struct {
		struct shape s;
		const char *name;
		kvb_call call;
		bool full;
		double ours;
	} l[] = {
		{{1, 144, 1}, "tag_check", call_check, false, 4},
		{{64, 144, 1}, "tag_check", call_check, false, 4},
		{{64, 2048, 1}, "tag_check", call_check, false, 8},
		{{256, 2048, 1}, "tag_check", call_check, false, 8},
		{{64, 144, 1}, "tag_check +copy", call_check_copy, false, 0},
		{{64, 144, 1}, "tag_check pinned", call_check_pinned, false, 0},
		{{64, 144, 1}, "tag_check full", call_check, true, 0},
	};
	int r = 0;

	for (size_t i = 0; i < sizeof(l) / sizeof(l[0]) && !r; i++) {
		const uint32_t nr_sets = check_sets(l[i].s);
		struct pages_case c = {};
		struct kvb_row row = {};

		snprintf(row.name, sizeof(row.name), "%s", l[i].name);
		snprintf(row.shape, sizeof(row.shape), "%ux%u", l[i].s.nr, l[i].s.rows);
		if (!kvb_selected(ctx, row.name, row.shape))
			continue;
		batch_make(&c, l[i].s, MIRROR_PAGES, nr_sets, false);
		check_make(&c, l[i].s, l[i].full);
		row.bytes =
			(double)l[i].s.nr * l[i].s.rows * (sizeof(struct kv_row) + 8) +
			(double)c.block_bytes;
		row.ours_us = l[i].ours;
		row.err = check_err(ctx, &c, l[i].s.rows);
		r = line(ctx, l[i].call, &c, &row, nr_sets);
		case_free(ctx, &c);
	}
	return r;
}

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

static void page_fetch(const struct kvk_pages *p, uint32_t pfn, void *dst)
{
	KVB_CUDA(cudaMemcpy(dst,
			    (const uint8_t *)p->base + kv_page_offset(&p->geometry, pfn),
			    kv_page_bytes(&p->layout), cudaMemcpyDeviceToHost));
}

/* A batch of one page on the host, for the reference. */
struct host_page {
	struct kv_row row;
	uint32_t row_start[2], length, q_start[2];
	struct kv_verdict verdict;
	uint64_t step;
	struct kvk_batch batch;
	struct kvk_pages pages;
	float scales[NR_LAYERS * 16];
};

static void host_page_make(struct host_page *h, const struct kvk_pages *p, void *page,
			   uint32_t length)
{
	memset(h, 0, sizeof(*h));
	h->row = kv_row_make(0, 0, KV_ROW_WRITE, 0, 0);
	h->row_start[1] = h->q_start[1] = 1;
	h->length = length;
	h->verdict.step = h->step = STEP;
	h->verdict.rows_checked = 1;
	h->batch.rows = &h->row;
	h->batch.row_start = h->row_start;
	h->batch.lengths = &h->length;
	h->batch.q_start = h->q_start;
	h->batch.verdicts = &h->verdict;
	h->batch.step = &h->step;
	h->batch.nr_requests = h->batch.nr_tokens = h->batch.q_len_max = 1;
	h->pages = *p;
	h->pages.base = page;
	h->pages.geometry.nr_pages = 1;
	if (p->scales) {
		KVB_CUDA(cudaMemcpy(h->scales, p->scales, p->layout.nr_scales * 4,
				    cudaMemcpyDeviceToHost));
		h->pages.scales = h->scales;
	}
}

/* The reference stores sampled tokens once more: no byte of their pages may change. */
static double append_err(struct kvb_ctx *ctx, struct pages_case *c, struct shape s)
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
		page_fetch(&c->pages, c->host_rows[r * s.rows + pos / KV_PAGE_TOKENS].pfn,
			   got);
		memcpy(want, got, bytes);
		host_page_make(&h, &c->pages, want, pos % KV_PAGE_TOKENS + 1);
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

static int append_line(struct kvb_ctx *ctx, const struct format *f, struct shape s,
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
	pool_make(ctx, &c, &c.pages, layout_make(f->kind, f->dtype, f->scale_kind));
	batch_make(&c, s, NR_PAGES, 1, s.nr * s.rows <= NR_PAGES);
	dim = f->kind == KV_LAYOUT_MLA ? 512 : 8 * 128;
	dim2 = f->kind == KV_LAYOUT_MLA ? 64 : 8 * 128;
	c.x_bytes = dim * nr * 2;
	c.x2_bytes = dim2 * nr * 2;
	c.x = (const uint8_t *)dev_alloc(&c, c.x_bytes * X_SETS);
	c.x2 = (const uint8_t *)dev_alloc(&c, c.x2_bytes * X_SETS);
	kvb_fill_bf16(ctx, (void *)c.x, c.x_bytes * X_SETS / 2, 31, 1.0f);
	kvb_fill_bf16(ctx, (void *)c.x2, c.x2_bytes * X_SETS / 2, 32, 1.0f);
	c.append.src_dtype = KVK_BF16;
	c.append.nan_count = (uint64_t *)dev_alloc(&c, 8);
	row.bytes = (double)(c.x_bytes + c.x2_bytes) +
		    (double)kv_layer_bytes(&c.pages.layout) / KV_PAGE_TOKENS * nr;
	row.ours_us = ours;
	row.err = append_err(ctx, &c, s);
	r = line(ctx, call_append, &c, &row, NR_LAYERS);
	case_free(ctx, &c);
	return r;
}

static int append_lines(struct kvb_ctx *ctx)
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
	return r;
}

/* ------------------------------------------------------------------------- whole pages */

static int call_move(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct pages_case *c = (struct pages_case *)arg;
	struct kvk_move_args a = c->move;

	a.dst_batch.rows = c->batch.rows + (size_t)set * c->rows_per_set;
	/* never the page that is written */
	a.src_batch.rows = c->batch.rows + (size_t)(set ^ 1) * c->rows_per_set;
	return kvk_page_move_cuda(&a, ctx->stream);
}

/* Sampled pages as the reference has them, from the same source. */
static double move_err(struct kvb_ctx *ctx, struct pages_case *c, uint32_t nr)
{
	const size_t src_bytes = kv_page_bytes(&c->move.src.layout);
	const size_t dst_bytes = kv_page_bytes(&c->move.dst.layout);
	uint8_t *src = (uint8_t *)malloc(src_bytes), *got = (uint8_t *)malloc(dst_bytes);
	uint8_t *want = (uint8_t *)malloc(dst_bytes);
	double err = 0.0;

	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	for (uint32_t i = 0; i < SAMPLES; i++) {
		const uint32_t k = (uint32_t)((uint64_t)nr * i / SAMPLES);
		struct kvk_move_args a = c->move;
		struct host_page hs, hd;
		uint32_t crc = 0, got_crc = 0;

		page_fetch(&c->move.src, c->host_rows[c->rows_per_set + k].pfn, src);
		if (call_move(ctx, c, 0))
			return INFINITY;
		KVB_CUDA(cudaStreamSynchronize(ctx->stream));
		page_fetch(&c->move.dst, c->host_rows[k].pfn, got);
		memcpy(want, got, dst_bytes);
		host_page_make(&hs, &c->move.src, src, KV_PAGE_TOKENS);
		host_page_make(&hd, &c->move.dst, want, KV_PAGE_TOKENS);
		a.src = hs.pages;
		a.src_batch = hs.batch;
		a.dst = hd.pages;
		a.dst_batch = hd.batch;
		a.ret_crc = &crc;
		if (kvk_host_ops()->page_move(&a, NULL) || memcmp(got, want, dst_bytes))
			err = INFINITY;
		if (a.op == KVK_MOVE_CRC) {
			KVB_CUDA(cudaMemcpy(&got_crc, c->move.ret_crc + k, 4,
					    cudaMemcpyDeviceToHost));
			if (crc != got_crc)
				err = INFINITY;
		}
	}
	free(src);
	free(got);
	free(want);
	return err;
}

static int move_line(struct kvb_ctx *ctx, const char *name, uint32_t op, uint32_t nr)
{
	const bool convert = op == KVK_MOVE_CONVERT;
	const struct kv_layout fp8 =
		layout_make(KV_LAYOUT_MLA, KV_DTYPE_E4M3, KV_SCALE_TOKEN);
	struct pages_case c = {};
	struct kvb_row row = {};
	double page = (double)kv_page_bytes(&fp8);
	int r;

	snprintf(row.name, sizeof(row.name), "page_move %s", name);
	snprintf(row.shape, sizeof(row.shape), "%u", nr);
	if (!kvb_selected(ctx, row.name, row.shape))
		return 0;
	pool_make(ctx, &c, &c.pages, fp8);
	c.move.dst = c.move.src = c.pages;
	row.bytes = op == KVK_MOVE_COPY ? 2 * page * nr : page * nr;
	if (convert) {
		pool_make(ctx, &c, &c.from,
			  layout_make(KV_LAYOUT_MLA, KV_DTYPE_BF16, KV_SCALE_NONE));
		c.move.src = c.from;
		row.bytes += (double)kv_page_bytes(&c.from.layout) * nr;
	}
	batch_make(&c, {1, nr, 1}, NR_PAGES, 8, true);
	c.move.op = op;
	c.move.src_batch = c.move.dst_batch = c.batch;
	c.move.ret_crc = (uint32_t *)dev_alloc(&c, nr * 4);
	row.err = move_err(ctx, &c, nr);
	r = line(ctx, call_move, &c, &row, 8);
	case_free(ctx, &c);
	return r;
}

static int move_lines(struct kvb_ctx *ctx)
{
	static const struct {
		const char *name;
		uint32_t op;
	} ops[] = {{"convert mla", KVK_MOVE_CONVERT},
		   {"zero", KVK_MOVE_ZERO},
		   {"copy", KVK_MOVE_COPY},
		   {"digest", KVK_MOVE_CRC}};
	static const uint32_t counts[] = {1, 64, 512};
	int r = 0;

	for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
		for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]) && !r; k++)
			r = move_line(ctx, ops[i].name, ops[i].op, counts[k]);
	return r;
}

/**
 * kvb_kernels_pages() - all lines of this file
 * Return: 0 or -errno of a launcher.
 */
int kvb_kernels_pages(struct kvb_ctx *ctx)
{
	int r = check_lines(ctx);

	if (!r)
		r = append_lines(ctx);
	return r ? r : move_lines(ctx);
}
