/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_ref.c - y = x W^T + bias on the host, all weight dtypes.
 *
 * Threads share the rows of W. Each prepares the activations of a block of tokens for
 * itself (f32, padded, rounded to e4m3 for E4M3 weights) unless they can be read in
 * place. No state beyond the call; any thread.
 */
#include <string.h>
#include "ref.h"

#define XBUF_FLOATS (128u << 10) /* stack of a thread: 512 KiB */
#define WORK_MIN    (1u << 18)	 /* multiply-adds below which one thread is faster */

struct x_block {
	const float *row[KVK_GEMM_TOKENS];
	u32 t0;
	u32 nr;
};

static bool x_in_place(const struct kvk_linear_args *a)
{
	return a->x_dtype == KVK_F32 && a->w.dtype != KVK_E4M3 &&
	       a->w.cols % KVK_LANES == 0;
}

static size_t x_index(const struct kvk_linear_args *a, u32 t, u32 b)
{
	return t * kvk_linear_x_stride(a) + b * kvk_linear_x_batch(a);
}

static void x_prepare(const struct kvk_linear_args *a, u32 b, struct x_block *blk,
		      float *buf)
{
	u32 cols = a->w.cols, padded = kvk_padded(cols);

	for (u32 i = 0; i < blk->nr; i++) {
		size_t at = x_index(a, blk->t0 + i, b);
		float *dst = buf + (size_t)i * padded;

		if (x_in_place(a)) {
			blk->row[i] = (const float *)a->x + at;
			continue;
		}
		kvk_act_load(a->x_dtype, a->x, at, dst, cols);
		memset(dst + cols, 0, (padded - cols) * sizeof(float));
		if (a->w.dtype == KVK_E4M3)
			kvk_act_fp8(dst, cols);
		blk->row[i] = dst;
	}
}

static void y_store(const struct kvk_linear_args *a, u32 b, u32 t, u32 row,
		    const float *dots)
{
	size_t at = t * kvk_linear_y_stride(a) + b * kvk_linear_y_batch(a) + row;
	u32 n = KV_MIN(a->w.rows - row, KVK_TILE_ROWS);
	float v[KVK_TILE_ROWS];

	memcpy(v, dots, sizeof(v));
	if (a->bias)
		for (u32 i = 0; i < n; i++)
			v[i] += a->bias[row + i];
	if (a->add)
		for (u32 i = 0; i < n; i++)
			v[i] += a->add[at + i];
	kvk_act_store(a->y_dtype, v, a->y, at, n);
}

/* Called by all threads of a team: one block of tokens times one matrix. */
static void linear_block(const struct kvk_linear_args *a, const struct kvk_weight *w,
			 u32 b, const struct x_block *blk)
{
#pragma omp for schedule(static) nowait
	for (u32 row = 0; row < w->rows; row += KVK_TILE_ROWS) {
		float out[KVK_GEMM_TOKENS * KVK_TILE_ROWS];

		kvk_gemm16(w, row, blk->row, blk->nr, out);
		for (u32 i = 0; i < blk->nr; i++)
			y_store(a, b, blk->t0 + i, row, out + (size_t)i * KVK_TILE_ROWS);
	}
}

/* One thread's share. */
static void linear_thread(const struct kvk_linear_args *a)
{
	u32 step = KV_MIN(KVK_GEMM_TOKENS, XBUF_FLOATS / kvk_padded(a->w.cols));
	float buf[XBUF_FLOATS] __attribute__((aligned(64)));
	struct x_block blk;

	for (u32 b = 0; b < a->nr_batch; b++) {
		struct kvk_weight w = kvk_weight_at(&a->w, b);

		for (blk.t0 = 0; blk.t0 < a->nr_tokens; blk.t0 += step) {
			blk.nr = KV_MIN(a->nr_tokens - blk.t0, step);
			x_prepare(a, b, &blk, buf);
			linear_block(a, &w, b, &blk);
		}
	}
}

int kvk_linear_ref(const struct kvk_linear_args *a, kvk_stream stream)
{
	u64 work = (u64)a->nr_tokens * a->w.rows * a->w.cols * a->nr_batch;

	if (kvk_weight_check(&a->w) || !a->x || !a->y || !kvk_linear_strides_ok(a) ||
	    !kvk_act_dtype_ok(a->x_dtype) || !kvk_act_dtype_ok(a->y_dtype) ||
	    kvk_padded(a->w.cols) > XBUF_FLOATS)
		return -EINVAL;
	if (a->bias && a->nr_batch != 1)
		return -EINVAL;
#pragma omp parallel if (work > WORK_MIN)
	linear_thread(a);
	return 0;
}
