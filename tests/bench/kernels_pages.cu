/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_pages.cu - what a step does to pages beside attention, in kvbench-kernels: check with
 * mirror refresh, append (kernels_append.cu), BF16 -> FP8 conversion, zeroing, copies, digests, and
 * what plain copies get (kernels_copy.cu).
 *
 * A line is compared with the C reference on sampled pages: err is 0 when every byte is the same,
 * infinite when one is not. One thread.
 */
#include "kernels_pages.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
static void check_make(struct pages_case *c, struct pages_shape s, bool full)
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
		(const struct kv_step_block *)kvb_dev_copy(c, c->pinned, c->block_bytes);
	c->check.mirror = (struct kv_mirror *)kvb_dev_copy(c, m, mirror_bytes);
	c->check.nonces = (const uint64_t *)kvb_dev_copy(c, nonces, s.nr * 8);
	c->check.page_tokens = KV_PAGE_TOKENS;
	c->check.ret_verdicts =
		(struct kv_verdict *)kvb_dev_alloc(c, s.nr * sizeof(struct kv_verdict));
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
static uint32_t check_sets(struct pages_shape s)
{
	const size_t bytes = (size_t)s.nr * s.rows * sizeof(struct kv_row);
	const size_t nr = (20ull << 20) / bytes;

	return nr < 1 ? 1 : nr > 8 ? 8 : (uint32_t)nr;
}

static int check_lines(struct kvb_ctx *ctx)
{
	static const struct {
		struct pages_shape s;
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
		kvb_batch_make(&c, l[i].s, MIRROR_PAGES, nr_sets, false);
		check_make(&c, l[i].s, l[i].full);
		row.bytes =
			(double)l[i].s.nr * l[i].s.rows * (sizeof(struct kv_row) + 8) +
			(double)c.block_bytes;
		row.ours_us = l[i].ours;
		row.err = check_err(ctx, &c, l[i].s.rows);
		r = kvb_pages_line(ctx, l[i].call, &c, &row, nr_sets);
		kvb_case_free(ctx, &c);
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

		kvb_page_fetch(&c->move.src, c->host_rows[c->rows_per_set + k].pfn, src);
		if (call_move(ctx, c, 0))
			return INFINITY;
		KVB_CUDA(cudaStreamSynchronize(ctx->stream));
		kvb_page_fetch(&c->move.dst, c->host_rows[k].pfn, got);
		memcpy(want, got, dst_bytes);
		kvb_host_page_make(&hs, &c->move.src, src, KV_PAGE_TOKENS);
		kvb_host_page_make(&hd, &c->move.dst, want, KV_PAGE_TOKENS);
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
		kvb_layout_make(KV_LAYOUT_MLA, KV_DTYPE_E4M3, KV_SCALE_TOKEN);
	struct pages_case c = {};
	struct kvb_row row = {};
	double page = (double)kv_page_bytes(&fp8);
	int r;

	snprintf(row.name, sizeof(row.name), "page_move %s", name);
	snprintf(row.shape, sizeof(row.shape), "%u", nr);
	if (!kvb_selected(ctx, row.name, row.shape))
		return 0;
	kvb_pool_make(ctx, &c, &c.pages, fp8);
	c.move.dst = c.move.src = c.pages;
	row.bytes = op == KVK_MOVE_COPY ? 2 * page * nr : page * nr;
	if (convert) {
		kvb_pool_make(
			ctx, &c, &c.from,
			kvb_layout_make(KV_LAYOUT_MLA, KV_DTYPE_BF16, KV_SCALE_NONE));
		c.move.src = c.from;
		row.bytes += (double)kv_page_bytes(&c.from.layout) * nr;
	}
	kvb_batch_make(&c, {1, nr, 1}, NR_PAGES, 8, true);
	c.move.op = op;
	c.move.src_batch = c.move.dst_batch = c.batch;
	c.move.ret_crc = (uint32_t *)kvb_dev_alloc(&c, nr * 4);
	row.err = move_err(ctx, &c, nr);
	r = kvb_pages_line(ctx, call_move, &c, &row, 8);
	kvb_case_free(ctx, &c);
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
 * kvb_kernels_pages() - all lines of this file, and of the two beside it
 * Return: 0 or -errno of a launcher.
 */
int kvb_kernels_pages(struct kvb_ctx *ctx)
{
	int r = check_lines(ctx);

	if (!r)
		r = kvb_append_lines(ctx);
	if (!r)
		r = move_lines(ctx);
	return r ? r : kvb_copy_lines(ctx);
}
