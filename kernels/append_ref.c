/* SPDX-License-Identifier: Apache-2.0 */
/*
 * append_ref.c - this step's K/V, or latent and rope, into page slots (tour 8/12).
 *
 * Verdict first, then WRITE rows only: a token whose row lacks WRITE, or whose position
 * lies before the sequence, is skipped and nothing is written for it. Slots of different
 * tokens never overlap, so threads take tokens in any order.
 */
#include "ref.h"

#define PLANE_DIM_MAX 1024u

/* Where the step's values of a plane are, in elements. */
static const void *plane_src(const struct kvk_append_args *a, u32 plane, u32 token,
			     size_t *ret_index)
{
	const struct kv_layout *l = &a->pages.layout;

	if (l->kind == KV_LAYOUT_MLA) {
		*ret_index = (size_t)token * (plane ? l->rope_dim : l->latent_dim);
		return plane ? a->rope : a->latent;
	}
	*ret_index = ((size_t)token * l->nr_kv_heads + plane / 2) * l->head_dim;
	return plane % 2 ? a->v : a->k;
}

static u32 append_token(const struct kvk_append_args *a, u32 r, u32 t)
{
	const struct kvk_batch *b = &a->batch;
	s64 pos = kvk_first_position(b, r) + t;
	const struct kv_row *row;
	u32 nr_nan = 0;
	u8 *part;

	if (pos < 0)
		return 0;
	row = &b->rows[b->row_start[r] + pos / KV_PAGE_TOKENS];
	if (!(row->flags & KV_ROW_WRITE) && !KV_MUTANT(append_no_write_flag))
		return 0;
	part = kvk_row_layer(&a->pages, row, a->layer);
	for (u32 i = 0; i < kvk_nr_planes(&a->pages.layout); i++) {
		struct kvk_plane pl = kvk_plane_get(&a->pages.layout, a->layer, i);
		float x[PLANE_DIM_MAX];
		size_t index;
		const void *src = plane_src(a, i, b->q_start[r] + t, &index);

		kvk_act_load(a->src_dtype, src, index, x, pl.dim);
		nr_nan += kvk_plane_store(&a->pages, part, &pl,
					  (u32)(pos % KV_PAGE_TOKENS), x);
	}
	return nr_nan;
}

int kvk_append_check(const struct kvk_append_args *a)
{
	const struct kv_layout *l = &a->pages.layout;

	if (kvk_batch_check(&a->batch, true) || kvk_pages_check(&a->pages))
		return -EINVAL;
	if (a->layer >= l->nr_layers || !kvk_act_dtype_ok(a->src_dtype))
		return -EINVAL;
	if (l->kind == KV_LAYOUT_MLA)
		return a->latent && a->rope && l->latent_dim <= PLANE_DIM_MAX &&
				       l->rope_dim <= PLANE_DIM_MAX
			       ? 0
			       : -EINVAL;
	return a->k && a->v && l->head_dim <= PLANE_DIM_MAX ? 0 : -EINVAL;
}

int kvk_append_ref(const struct kvk_append_args *a, kvk_stream stream)
{
	const struct kvk_batch *b = &a->batch;
	u64 nr_nan = 0;
	int r = kvk_append_check(a);

	if (r)
		return r;
#pragma omp parallel for schedule(dynamic) reduction(+ : nr_nan) if (b->nr_tokens > 16)
	for (u32 q = 0; q < b->nr_requests; q++) {
		if (!kvk_request_ok(b, &a->pages, q))
			continue;
		for (u32 t = 0; t < kvk_q_len(b, q); t++)
			nr_nan += append_token(a, q, t);
	}
	if (a->nan_count)
		*a->nan_count += nr_nan;
	return 0;
}
