/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_pages_case.cu - pools and batches of kernels_pages.h. As in a step, the calls of a graph
 * share the batch's arrays (rows, lengths, verdicts) and take another layer or other pages each.
 */
#include "kernels_pages.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *kvb_dev_alloc(struct pages_case *c, size_t bytes)
{
	void *p;

	KVB_CUDA(cudaMalloc(&p, bytes));
	c->to_free[c->nr_freed++] = p;
	return p;
}

void *kvb_dev_copy(struct pages_case *c, const void *src, size_t bytes)
{
	void *p = kvb_dev_alloc(c, bytes);

	KVB_CUDA(cudaMemcpy(p, src, bytes, cudaMemcpyHostToDevice));
	return p;
}

void kvb_case_free(struct kvb_ctx *ctx, struct pages_case *c)
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

struct kv_layout kvb_layout_make(uint32_t kind, uint32_t dtype, uint32_t scale_kind)
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

void kvb_pool_make(struct kvb_ctx *ctx, struct pages_case *c, struct kvk_pages *p,
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
	p->base = kvb_dev_alloc(c, bytes);
	if (l.dtype == KV_DTYPE_BF16)
		kvb_fill_bf16(ctx, p->base, bytes / 2, 21, 1.0f);
	else
		kvb_fill_e4m3(ctx, p->base, bytes, 22);
	for (uint32_t i = 0; i < l.nr_scales; i++)
		scales[i] = 0.01f + 0.0001f * (float)i;
	p->scales = l.nr_scales ? (const float *)kvb_dev_copy(c, scales, l.nr_scales * 4)
				: NULL;
}

/* ------------------------------------------------------------------------------- batch */

/*
 * Sets of WRITE rows over pages chosen at random, @distinct: no page twice in any of them, and
 * verdicts that passed. Lengths end anywhere in the last page when q_len is 1.
 */
void kvb_batch_make(struct pages_case *c, struct pages_shape s, uint32_t nr_pages,
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
	c->batch.rows =
		(const struct kv_row *)kvb_dev_copy(c, rows, total * sizeof(*rows));
	c->batch.row_start = (const uint32_t *)kvb_dev_copy(c, h, 3 * (s.nr + 1) * 4);
	c->batch.lengths = c->batch.row_start + s.nr + 1;
	c->batch.q_start = c->batch.row_start + 2 * (s.nr + 1);
	c->batch.verdicts =
		(const struct kv_verdict *)kvb_dev_copy(c, v, s.nr * sizeof(*v));
	c->batch.step = (const uint64_t *)kvb_dev_copy(c, &step, 8);
	c->batch.nr_requests = s.nr;
	c->batch.nr_tokens = s.nr * s.q_len;
	c->batch.q_len_max = s.q_len;
	free(perm);
	free(v);
}

/* One line: name, shape, bytes and targets are in @row. */
int kvb_pages_line(struct kvb_ctx *ctx, kvb_call call, struct pages_case *c,
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

void kvb_page_fetch(const struct kvk_pages *p, uint32_t pfn, void *dst)
{
	KVB_CUDA(cudaMemcpy(dst,
			    (const uint8_t *)p->base + kv_page_offset(&p->geometry, pfn),
			    kv_page_bytes(&p->layout), cudaMemcpyDeviceToHost));
}

void kvb_host_page_make(struct host_page *h, const struct kvk_pages *p, void *page,
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
