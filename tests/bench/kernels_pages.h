/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_pages.h - pools and batches that the page lines of kvbench-kernels share. One thread.
 */
#ifndef KVB_KERNELS_PAGES_H
#define KVB_KERNELS_PAGES_H

#include "gpu_bench.h"
#include "kernels/attn_cuda.h"

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

/* struct pages_shape - nr requests, each with rows pages of which the last q_len tokens are new */
struct pages_shape {
	uint32_t nr, rows, q_len;
};

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

/* Device memory of the case, freed with it. */
void *kvb_dev_alloc(struct pages_case *c, size_t bytes);
void *kvb_dev_copy(struct pages_case *c, const void *src, size_t bytes);
void kvb_case_free(struct kvb_ctx *ctx, struct pages_case *c);

struct kv_layout kvb_layout_make(uint32_t kind, uint32_t dtype, uint32_t scale_kind);
void kvb_pool_make(struct kvb_ctx *ctx, struct pages_case *c, struct kvk_pages *p,
		   struct kv_layout l);

/**
 * kvb_batch_make() - sets of WRITE rows over pages chosen at random, and verdicts that passed
 * @distinct: no page twice in any of them
 *
 * Lengths end anywhere in the last page when q_len is 1.
 */
void kvb_batch_make(struct pages_case *c, struct pages_shape s, uint32_t nr_pages,
		    uint32_t nr_sets, bool distinct);

/* One line: name, shape, bytes and targets are in @row. */
int kvb_pages_line(struct kvb_ctx *ctx, kvb_call call, struct pages_case *c,
		   struct kvb_row *row, uint32_t nr_sets);

/* A page of a pool to host memory; a batch of that page alone, for the reference. */
void kvb_page_fetch(const struct kvk_pages *p, uint32_t pfn, void *dst);
void kvb_host_page_make(struct host_page *h, const struct kvk_pages *p, void *page,
			uint32_t length);

/* Lines of kernels_append.cu and kernels_copy.cu. Return 0 or -errno. */
int kvb_append_lines(struct kvb_ctx *ctx);
int kvb_copy_lines(struct kvb_ctx *ctx);

#endif /* KVB_KERNELS_PAGES_H */
