/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_ref.c - attention over pages on the host: MLA (absorbed) and GQA, decode and
 * prefill (tour 10/12).
 *
 * One algorithm for all: a row is one (token, query head); it walks its pages in order
 * with an online softmax a page of 64 tokens at a time. A row's arithmetic never depends
 * on which rows share its task, so decode, prefill, any chunking and any thread count
 * give the same bits.
 *
 * A task is up to 32 rows of one request that share K and V. Each page's bytes become an
 * f32 tile once per task. Slots past what a row sees are never used in arithmetic: 0 *
 * NaN is NaN.
 *
 * No state beyond the call; any thread.
 */
#include <omp.h>
#include <string.h>
#include "ref.h"

#define TASK_ROWS 32u
#define DK_MAX	  640u /* latent + rope, or head */
#define DV_MAX	  512u
#define HEAD_MAX  256u
#define LOAD_STEP 16u /* tokens converted at a time: they stay in the L1 cache */

struct attn_shape {
	const struct kvk_attn_args *a;
	const struct kvk_simd *simd;
	u32 dk;
	u32 dv;
	u32 group;	/* rows of a token that share K and V */
	u32 nr_groups;	/* MLA 1, GQA kv heads */
	u32 chunk_rows; /* rows of a task, a multiple of 4 */
	u32 nr_chunks;	/* of the longest request */
};

/* Everything a task needs, on its thread's stack. Arrays of rows hold TASK_ROWS. */
struct attn_task {
	float q[TASK_ROWS * DK_MAX] __attribute__((aligned(64)));
	float o[TASK_ROWS * DV_MAX] __attribute__((aligned(64)));
	float k[KV_PAGE_TOKENS * DK_MAX] __attribute__((aligned(64)));
	float v[KV_PAGE_TOKENS * HEAD_MAX] __attribute__((aligned(64)));
	float s[TASK_ROWS * KV_PAGE_TOKENS] __attribute__((aligned(64)));
	float max[TASK_ROWS];
	float sum[TASK_ROWS];
	float alpha[TASK_ROWS];
	s64 sees[TASK_ROWS]; /* tokens from position 0 */
	u32 n[TASK_ROWS];    /* of the current page */
	s64 sees_max;
	u32 request;
	u32 group;
	u32 row0;
	u32 nr_rows;
};

/* Element index of a row's query or output, @dim values each. */
static size_t row_index(const struct attn_shape *sh, const struct attn_task *t, u32 i,
			u32 dim)
{
	u32 row = t->row0 + i;
	u32 token = sh->a->batch.q_start[t->request] + row / sh->group;
	u32 head = t->group * sh->group + row % sh->group;

	return ((size_t)token * sh->a->nr_q_heads + head) * dim;
}

static void task_start(const struct attn_shape *sh, struct attn_task *t)
{
	const struct kvk_attn_args *a = sh->a;
	s64 first = kvk_first_position(&a->batch, t->request);
	u32 padded = (u32)kv_round_up(t->nr_rows, 4);

	memset(t->o, 0, (size_t)padded * sh->dv * sizeof(float));
	memset(t->s, 0, (size_t)padded * KV_PAGE_TOKENS * sizeof(float));
	t->sees_max = 0;
	for (u32 i = 0; i < padded; i++) {
		float *q = t->q + (size_t)i * sh->dk;
		bool real = i < t->nr_rows;

		t->max[i] = -__builtin_inff();
		t->sum[i] = 0;
		t->alpha[i] = 0;
		t->sees[i] = real ? KV_MAX(first + (t->row0 + i) / sh->group + 1, 0) : 0;
		t->sees_max = KV_MAX(t->sees_max, t->sees[i]);
		if (real)
			kvk_act_load(a->act_dtype, a->q, row_index(sh, t, i, sh->dk), q,
				     sh->dk);
		else
			memset(q, 0, sh->dk * sizeof(float));
	}
}

/* Tokens [j0, j1) of a page into the tiles, and zero K rows up to the next multiple of 4.
 */
static void task_load(const struct attn_shape *sh, struct attn_task *t, const u8 *part,
		      u32 j0, u32 j1)
{
	const struct kvk_pages *p = &sh->a->pages;
	struct kvk_plane k = kvk_plane_get(&p->layout, sh->a->layer, t->group * 2);
	struct kvk_plane v = kvk_plane_get(&p->layout, sh->a->layer, t->group * 2 + 1);
	bool mla = p->layout.kind == KV_LAYOUT_MLA;

	for (u32 j = j0; j < j1; j++) {
		float *kj = t->k + (size_t)j * sh->dk;

		kvk_plane_load(sh->simd, p, part, &k, j, kj);
		kvk_plane_load(sh->simd, p, part, &v, j,
			       mla ? kj + k.dim : t->v + (size_t)j * sh->dv);
	}
	memset(t->k + (size_t)j1 * sh->dk, 0,
	       (size_t)(kv_round_up(j1, 4) - j1) * sh->dk * sizeof(float));
}

static void task_scores(const struct attn_shape *sh, struct attn_task *t, const u8 *part,
			u32 n)
{
	for (u32 j0 = 0; j0 < n; j0 += LOAD_STEP) {
		u32 j1 = KV_MIN(n, j0 + LOAD_STEP);

		task_load(sh, t, part, j0, j1);
		for (u32 i = 0; i < t->nr_rows; i += 4)
			sh->simd->scores(t->q + (size_t)i * sh->dk, sh->dk,
					 t->k + (size_t)j0 * sh->dk, sh->dk, sh->dk,
					 (u32)kv_round_up(j1 - j0, 4),
					 t->s + (size_t)i * KV_PAGE_TOKENS + j0);
	}
}

static void task_page(const struct attn_shape *sh, struct attn_task *t, u32 page)
{
	const struct kvk_batch *b = &sh->a->batch;
	const struct kv_row *row = &b->rows[b->row_start[t->request] + page];
	s64 at = (s64)page * KV_PAGE_TOKENS;
	bool mla = sh->a->pages.layout.kind == KV_LAYOUT_MLA, tail = KV_MUTANT(attn_tail);
	u32 n_max = tail ? KV_PAGE_TOKENS : (u32)KV_MIN(t->sees_max - at, KV_PAGE_TOKENS);
	u32 padded = (u32)kv_round_up(t->nr_rows, 4);

	task_scores(sh, t, kvk_row_layer(&sh->a->pages, row, sh->a->layer), n_max);
	for (u32 i = 0; i < padded; i++) {
		s64 left = KV_MAX(t->sees[i] - at, 0);

		t->n[i] = (u32)KV_MIN(left, KV_PAGE_TOKENS);
		if (t->n[i])
			t->alpha[i] = sh->simd->softmax(t->s + (size_t)i * KV_PAGE_TOKENS,
							t->n[i], sh->a->sm_scale,
							&t->max[i], &t->sum[i]);
		if (t->n[i] && tail)
			t->n[i] = KV_PAGE_TOKENS;
	}
	for (u32 i = 0; i < padded; i += 4) {
		struct kvk_mix m = {.o = t->o + (size_t)i * sh->dv,
				    .p = t->s + (size_t)i * KV_PAGE_TOKENS,
				    .v = mla ? t->k : t->v,
				    .o_stride = sh->dv,
				    .v_stride = mla ? sh->dk : sh->dv,
				    .dim = sh->dv};

		memcpy(m.n, t->n + i, sizeof(m.n));
		memcpy(m.alpha, t->alpha + i, sizeof(m.alpha));
		sh->simd->mix(&m);
	}
}

/* A row that sees nothing divides 0 by 0: NaN, as for a failed request. */
static void task_finish(const struct attn_shape *sh, struct attn_task *t)
{
	for (u32 i = 0; i < t->nr_rows; i++) {
		float *o = t->o + (size_t)i * sh->dv;

		for (u32 d = 0; d < sh->dv; d++)
			o[d] /= t->sum[i];
		kvk_act_store(sh->a->act_dtype, o, sh->a->out,
			      row_index(sh, t, i, sh->dv), sh->dv);
	}
}

static void attn_task(const struct attn_shape *sh, u32 request, u32 group, u32 chunk)
{
	const struct kvk_batch *b = &sh->a->batch;
	u32 rows = kvk_q_len(b, request) * sh->group, row0 = chunk * sh->chunk_rows;
	struct attn_task t;

	if (row0 >= rows)
		return;
	t.request = request;
	t.group = group;
	t.row0 = row0;
	t.nr_rows = KV_MIN(rows - row0, sh->chunk_rows);
	if (!kvk_request_ok(b, &sh->a->pages, request)) {
		for (u32 i = 0; i < t.nr_rows; i++)
			kvk_act_nan(sh->a->act_dtype, sh->a->out,
				    row_index(sh, &t, i, sh->dv), sh->dv);
		return;
	}
	task_start(sh, &t);
	for (u32 page = 0; (s64)page * KV_PAGE_TOKENS < t.sees_max; page++)
		task_page(sh, &t, page);
	task_finish(sh, &t);
}

static int shape_init(struct attn_shape *sh, const struct kvk_attn_args *a)
{
	const struct kv_layout *l = &a->pages.layout;

	sh->a = a;
	sh->simd = kvk_simd_get();
	if (l->kind == KV_LAYOUT_MLA) {
		sh->dk = l->latent_dim + l->rope_dim;
		sh->dv = l->latent_dim;
		sh->nr_groups = 1;
		if (l->latent_dim > DV_MAX || sh->dk > DK_MAX || a->nr_q_heads > 128)
			return -EINVAL;
	} else {
		sh->dk = l->head_dim;
		sh->dv = l->head_dim;
		sh->nr_groups = l->nr_kv_heads;
		if (l->head_dim > HEAD_MAX || a->nr_q_heads % l->nr_kv_heads ||
		    a->nr_q_heads / l->nr_kv_heads > 16)
			return -EINVAL;
	}
	/* mix takes 64 values at a time, the conversions 16 */
	if (!a->nr_q_heads || sh->dv % 64 || sh->dk % KVK_LANES)
		return -EINVAL;
	sh->group = a->nr_q_heads / sh->nr_groups;
	return 0;
}

/* Long tasks share a page's conversion; short ones keep all threads busy. */
static void shape_chunks(struct attn_shape *sh, u32 q_len_max)
{
	u32 rows = q_len_max * sh->group;
	u64 others = (u64)sh->a->batch.nr_requests * sh->nr_groups;

	sh->chunk_rows = TASK_ROWS;
	while (sh->chunk_rows > 4 && others * kv_div_round_up(rows, sh->chunk_rows) <
					     (u64)omp_get_max_threads())
		sh->chunk_rows /= 2;
	sh->nr_chunks = (u32)kv_div_round_up(rows, sh->chunk_rows);
}

static int attn_run(const struct kvk_attn_args *a, u32 q_len_limit)
{
	const struct kvk_batch *b = &a->batch;
	struct attn_shape sh;
	u32 q_len_max = 0;
	u64 nr;

	if (kvk_batch_check(b, true) || kvk_pages_check(&a->pages) ||
	    shape_init(&sh, a) || a->layer >= a->pages.layout.nr_layers || !a->q ||
	    !a->out || !kvk_act_dtype_ok(a->act_dtype))
		return -EINVAL;
	for (u32 r = 0; r < b->nr_requests; r++)
		q_len_max = KV_MAX(q_len_max, kvk_q_len(b, r));
	if (q_len_max > q_len_limit)
		return -EINVAL;
	shape_chunks(&sh, q_len_max);
	nr = (u64)sh.nr_chunks * b->nr_requests * sh.nr_groups;
	/* the last chunks see the most tokens: they go first */
#pragma omp parallel for schedule(dynamic)
	for (u64 i = 0; i < nr; i++) {
		u64 rest = i / sh.nr_groups;

		attn_task(&sh, (u32)(rest % b->nr_requests), (u32)(i % sh.nr_groups),
			  sh.nr_chunks - 1 - (u32)(rest / b->nr_requests));
	}
	return 0;
}

int kvk_attn_mla_ref(const struct kvk_attn_args *a, kvk_stream stream)
{
	return a->pages.layout.kind == KV_LAYOUT_MLA ? attn_run(a, 4) : -EINVAL;
}

int kvk_attn_gqa_ref(const struct kvk_attn_args *a, kvk_stream stream)
{
	return a->pages.layout.kind == KV_LAYOUT_GQA ? attn_run(a, 4) : -EINVAL;
}

int kvk_attn_prefill_ref(const struct kvk_attn_args *a, kvk_stream stream)
{
	return attn_run(a, UINT32_MAX);
}

size_t kvk_attn_workspace_ref(const struct kvk_attn_args *a)
{
	return 0;
}
