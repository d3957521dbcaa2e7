/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_ref.c - routed experts on the host: INT4, FP8 block, BF16 and F32 weights.
 *
 * (token, slot) pairs are sorted by expert, so that each expert's weights are read once
 * for all its tokens; results lie per pair and are added per token in slot order, so a
 * token's result does not depend on the sort. The workspace is the call's own. Any
 * thread.
 */
#include <string.h>
#include "ref.h"

/* Parts of the workspace, in floats; pairs = nr_tokens * top_k. */
struct moe_work {
	float *x;     /* [nr_tokens][padded hidden] */
	float *h;     /* [pairs][padded inter] */
	float *z;     /* [pairs][padded hidden] */
	u32 *pairs;   /* [pairs] sorted by expert */
	u32 *start;   /* [nr_experts + 1] */
	size_t bytes; /* of all */
};

static void work_layout(const struct kvk_moe_args *a, u8 *base, struct moe_work *w)
{
	size_t pairs = (size_t)a->nr_tokens * a->top_k;
	size_t hidden = kvk_padded(a->experts.hidden),
	       inter = kvk_padded(a->experts.inter);
	size_t off = (64 - (uintptr_t)base % 64) % 64;

	w->x = (float *)(void *)(base + off);
	off += a->nr_tokens * hidden * sizeof(float);
	w->h = (float *)(void *)(base + off);
	off += pairs * inter * sizeof(float);
	w->z = (float *)(void *)(base + off);
	off += pairs * hidden * sizeof(float);
	w->pairs = (u32 *)(void *)(base + off);
	off += pairs * sizeof(u32);
	w->start = (u32 *)(void *)(base + off);
	off += ((size_t)a->experts.nr_experts + 1) * sizeof(u32);
	w->bytes = off;
}

size_t kvk_moe_workspace_ref(const struct kvk_moe_args *a)
{
	struct moe_work w;

	work_layout(a, NULL, &w);
	return w.bytes + 64;
}

/* Counting sort of the pairs by expert. Pairs with an id out of range are left out. */
static void work_sort(const struct kvk_moe_args *a, struct moe_work *w)
{
	u32 pairs = a->nr_tokens * a->top_k, nr_experts = a->experts.nr_experts, at = 0;

	memset(w->start, 0, ((size_t)nr_experts + 1) * sizeof(u32));
	for (u32 p = 0; p < pairs; p++)
		if (a->ids[p] < nr_experts)
			w->start[a->ids[p]]++;
	for (u32 e = 0; e <= nr_experts; e++) {
		u32 n = w->start[e];

		w->start[e] = at;
		at += n;
	}
	for (u32 p = 0; p < pairs; p++)
		if (a->ids[p] < nr_experts)
			w->pairs[w->start[a->ids[p]]++] = p;
	for (u32 e = nr_experts; e > 0; e--)
		w->start[e] = w->start[e - 1];
	w->start[0] = 0;
}

static struct kvk_weight expert_weight(const struct kvk_experts *e, bool second,
				       size_t index)
{
	struct kvk_weight w = {.dtype = e->dtype,
			       .rows = second ? e->hidden : e->inter,
			       .cols = second ? e->inter : e->hidden,
			       .group = e->group,
			       .scale_dtype = e->scale_dtype,
			       .data = second ? e->w2 : e->w13,
			       .scales = second ? e->s2 : e->s13};

	return kvk_weight_at(&w, index);
}

/* 16 rows of gate and up for all tokens of an expert, joined by silu. */
static void expert_up(const struct kvk_moe_args *a, const struct moe_work *w, u32 e,
		      u32 row)
{
	struct kvk_weight gate = expert_weight(&a->experts, false, (size_t)e * 2);
	struct kvk_weight up = expert_weight(&a->experts, false, (size_t)e * 2 + 1);
	u32 hidden = kvk_padded(a->experts.hidden), inter = kvk_padded(a->experts.inter);
	const struct kvk_simd *simd = kvk_simd_get();

	for (u32 i = w->start[e]; i < w->start[e + 1]; i += KVK_GEMM_TOKENS) {
		u32 nr = KV_MIN(w->start[e + 1] - i, KVK_GEMM_TOKENS);
		float g[KVK_GEMM_TOKENS * KVK_TILE_ROWS],
			u[KVK_GEMM_TOKENS * KVK_TILE_ROWS];
		const float *x[KVK_GEMM_TOKENS];

		for (u32 j = 0; j < nr; j++)
			x[j] = w->x + (size_t)(w->pairs[i + j] / a->top_k) * hidden;
		kvk_gemm16(&gate, row, x, nr, g);
		kvk_gemm16(&up, row, x, nr, u);
		for (u32 j = 0; j < nr; j++)
			simd->silu_mul(g + (size_t)j * KVK_TILE_ROWS,
				       u + (size_t)j * KVK_TILE_ROWS,
				       w->h + (size_t)w->pairs[i + j] * inter + row,
				       KVK_TILE_ROWS);
	}
}

static void expert_down(const struct kvk_moe_args *a, const struct moe_work *w, u32 e,
			u32 row)
{
	struct kvk_weight down = expert_weight(&a->experts, true, e);
	u32 hidden = kvk_padded(a->experts.hidden), inter = kvk_padded(a->experts.inter);

	for (u32 i = w->start[e]; i < w->start[e + 1]; i += KVK_GEMM_TOKENS) {
		u32 nr = KV_MIN(w->start[e + 1] - i, KVK_GEMM_TOKENS);
		float out[KVK_GEMM_TOKENS * KVK_TILE_ROWS];
		const float *h[KVK_GEMM_TOKENS];

		for (u32 j = 0; j < nr; j++)
			h[j] = w->h + (size_t)w->pairs[i + j] * inter;
		kvk_gemm16(&down, row, h, nr, out);
		for (u32 j = 0; j < nr; j++)
			memcpy(w->z + (size_t)w->pairs[i + j] * hidden + row,
			       out + (size_t)j * KVK_TILE_ROWS,
			       KVK_TILE_ROWS * sizeof(float));
	}
}

static void token_load(const struct kvk_moe_args *a, const struct moe_work *w, u32 t)
{
	u32 hidden = a->experts.hidden, padded = kvk_padded(hidden);
	float *x = w->x + (size_t)t * padded;

	kvk_act_load(a->act_dtype, a->x, (size_t)t * hidden, x, hidden);
	memset(x + hidden, 0, (padded - hidden) * sizeof(float));
	if (a->experts.dtype == KVK_E4M3)
		kvk_act_fp8(x, hidden);
}

/* A pair with an id out of range makes its token NaN: nothing was computed for it. */
static void token_combine(const struct kvk_moe_args *a, const struct moe_work *w, u32 t)
{
	u32 hidden = a->experts.hidden, padded = kvk_padded(hidden);
	u32 dtype = kvk_moe_y_dtype(a);
	float y[KVK_LANES];

	for (u32 c = 0; c < hidden; c += KVK_LANES) {
		u32 n = KV_MIN(hidden - c, KVK_LANES);
		float sum[KVK_LANES] = {0};

		for (u32 k = 0; k < a->top_k; k++) {
			size_t p = (size_t)t * a->top_k + k;
			const float *z = w->z + p * padded + c;
			bool valid = a->ids[p] < a->experts.nr_experts;

			for (u32 i = 0; i < n; i++)
				sum[i] +=
					valid ? a->weights[p] * z[i] : __builtin_nanf("");
		}
		if (a->accumulate) {
			kvk_act_load(dtype, a->y, (size_t)t * hidden + c, y, n);
			for (u32 i = 0; i < n; i++)
				sum[i] = y[i] + sum[i];
		}
		kvk_act_store(dtype, sum, a->y, (size_t)t * hidden + c, n);
	}
}

static void moe_thread(const struct kvk_moe_args *a, struct moe_work *w)
{
	u32 up_blocks = kvk_padded(a->experts.inter) / KVK_TILE_ROWS;
	u32 down_blocks = kvk_padded(a->experts.hidden) / KVK_TILE_ROWS;
	u32 pairs = a->nr_tokens * a->top_k, inter = kvk_padded(a->experts.inter);

#pragma omp single nowait
	work_sort(a, w);
#pragma omp for schedule(static)
	for (u32 t = 0; t < a->nr_tokens; t++)
		token_load(a, w, t);
#pragma omp for schedule(dynamic, 2)
	for (u32 i = 0; i < a->experts.nr_experts * up_blocks; i++)
		expert_up(a, w, i / up_blocks, i % up_blocks * KVK_TILE_ROWS);
	if (a->experts.dtype == KVK_E4M3) {
#pragma omp for schedule(static)
		for (u32 p = 0; p < pairs; p++)
			kvk_act_fp8(w->h + (size_t)p * inter, a->experts.inter);
	}
#pragma omp for schedule(dynamic, 2)
	for (u32 i = 0; i < a->experts.nr_experts * down_blocks; i++)
		expert_down(a, w, i / down_blocks, i % down_blocks * KVK_TILE_ROWS);
#pragma omp for schedule(static)
	for (u32 t = 0; t < a->nr_tokens; t++)
		token_combine(a, w, t);
}

static int moe_run(const struct kvk_moe_args *a)
{
	const struct kvk_experts *e = &a->experts;
	struct kvk_weight w13 = expert_weight(e, false, 0),
			  w2 = expert_weight(e, true, 0);
	struct moe_work w;

	if (kvk_weight_check(&w13) || kvk_weight_check(&w2) || !e->nr_experts ||
	    !a->top_k || e->order != KVK_ORDER_STANDARD ||
	    !kvk_act_dtype_ok(a->act_dtype) || !a->x || !a->y || !a->ids || !a->weights)
		return -EINVAL;
	if ((u64)a->nr_tokens * a->top_k > UINT32_MAX)
		return -EINVAL;
	if (!a->nr_tokens)
		return 0;
	if (!a->workspace)
		return -EINVAL;
	work_layout(a, a->workspace, &w);
	if (w.bytes > a->workspace_bytes)
		return -EINVAL;
#pragma omp parallel
	moe_thread(a, &w);
	return 0;
}

int kvk_moe_int4_ref(const struct kvk_moe_args *a, kvk_stream stream)
{
	return a->experts.dtype == KVK_INT4 ? moe_run(a) : -EINVAL;
}

int kvk_moe_fp8_ref(const struct kvk_moe_args *a, kvk_stream stream)
{
	return a->experts.dtype == KVK_E4M3 ? moe_run(a) : -EINVAL;
}

int kvk_moe_bf16_ref(const struct kvk_moe_args *a, kvk_stream stream)
{
	u32 dtype = a->experts.dtype;

	return dtype == KVK_BF16 || dtype == KVK_F32 ? moe_run(a) : -EINVAL;
}
