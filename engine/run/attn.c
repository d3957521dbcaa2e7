/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn.c - the attention block of a layer: projections, rope, append, attention, output.
 *
 * MLA in absorbed form. With q = (q_nope, q_rope) per head and W_UK, W_UV the two halves
 *	of kv_b_proj, scores against a token's latent c and rotated k_rope are
 *
 *	q_nope . (W_UK c) + q_rope . k_rope  =  (W_UK^T q_nope) . c + q_rope . k_rope
 *
 * so a page holds (c, k_rope) only, the query is moved into latent space once per token,
 *	and the sum of latents comes back through W_UV.
 *
 * GQA: optional bias and per-head RMS norm of q and k, rope on the first rope.dim values.
 */
#include "engine/run/internal.h"

#include <math.h>
#include <string.h>

static int linear(struct eng_engine *e, const struct kvk_weight *w, const void *x,
		  void *y, const float *bias)
{
	struct eng_linear l = {.w = w, .x = x, .y = y, .bias = bias};

	return eng_call_linear(e, &l);
}

/* One matrix per head: x [tokens][heads][x_batch] -> y [tokens][heads][y_batch]; 0: dense. */
static int linear_heads(struct eng_engine *e, const struct kvk_weight *w, const void *x,
			u32 x_batch, void *y, u32 y_batch)
{
	struct eng_linear l = {.w = w,
			       .x = x,
			       .y = y,
			       .nr_batch = e->m->config.nr_q_heads,
			       .x_batch = x_batch,
			       .y_batch = y_batch};

	return eng_call_linear(e, &l);
}

/* Dense heads of @stride values: values @at .. of each. */
struct heads {
	void *x;
	u32 stride;
	u32 at;
};

static int rope(struct eng_engine *e, const struct heads *from, const struct heads *to,
		u32 nr_heads)
{
	const struct eng_rope *r = &e->m->config.rope;
	struct kvk_rope_args a = {
		.x = from->x,
		.y = to->x,
		.positions = eng_dev(e, e->step.positions),
		.cos_sin = e->act.cos_sin,
		.nr_tokens = e->step.nr_tokens,
		.nr_heads = nr_heads,
		.head_stride = from->stride,
		.token_stride = nr_heads * from->stride,
		.offset = from->at,
		.y_head_stride = to->stride,
		.y_token_stride = nr_heads * to->stride,
		.y_offset = to->at,
		.rope_dim = r->dim,
		.act_dtype = e->mem->act_dtype,
		.interleaved = r->interleaved,
	};

	return e->ops->rope(&a, e->mem->stream);
}

/* GQA: the first values of each head, in place. */
static int rope_here(struct eng_engine *e, void *x, u32 nr_heads)
{
	const struct heads h = {.x = x, .stride = e->m->config.head_dim};

	return rope(e, &h, &h, nr_heads);
}

static void amax_note(float *amax, const float *x, u32 nr_rows, u32 stride, u32 cols)
{
	for (u32 i = 0; i < nr_rows; i++) {
		for (u32 j = 0; j < cols; j++)
			*amax = fmaxf(*amax, fabsf(x[(size_t)i * stride + j]));
	}
}

/* Calibration (amax.c), on the host only: the largest values before they are rounded to
 * the page's format. */
static void note_amax(struct eng_engine *e, u32 layer)
{
	const struct eng_config *c = &e->m->config;
	u32 n = e->step.nr_tokens, width = c->nr_kv_heads * c->head_dim;

	if (c->arch == ENG_ARCH_MLA) {
		amax_note(&e->amax[layer], e->act.latent, n, c->latent_dim,
			  c->latent_dim);
		amax_note(&e->amax[layer], e->act.k_rope, n, c->rope_dim, c->rope_dim);
		return;
	}
	for (u32 h = 0; h < c->nr_kv_heads; h++) {
		float *amax = e->amax + ((size_t)layer * c->nr_kv_heads + h) * 2;
		const float *k = e->act.k, *v = e->act.v;

		amax_note(amax, k + h * c->head_dim, n, width, c->head_dim);
		amax_note(amax + 1, v + h * c->head_dim, n, width, c->head_dim);
	}
}

static int append(struct eng_engine *e, u32 layer)
{
	struct eng_act *a = &e->act;
	struct kvk_append_args args = {
		.pages = e->pages,
		.batch = eng_batch_view(e, ENG_GROUP_SEQ),
		.layer = layer,
		.src_dtype = e->mem->act_dtype,
		.latent = a->latent,
		.rope = a->k_rope,
		.k = a->k,
		.v = a->v,
		.nan_count = eng_dev(e, e->step.nan_count),
	};
	int rc = eng_check_join(e);

	if (e->amax)
		note_amax(e, layer);
	return rc ? rc : e->ops->append(&args, e->mem->stream);
}

/*
 * Decoding sequences (one token) and prompts go to their own families; they are
 * neighbours in the step's arrays, one token sequences first.
 */
static int attention(struct eng_engine *e, u32 layer, const void *q)
{
	const struct eng_config *c = &e->m->config;
	struct eng_step *s = &e->step;
	struct kvk_attn_args a = {
		.pages = e->pages,
		.batch = eng_batch_view(e, ENG_GROUP_SEQ),
		.layer = layer,
		.nr_q_heads = c->nr_q_heads,
		.sm_scale = c->sm_scale,
		.act_dtype = e->mem->act_dtype,
		.flags = layer ? KVK_ATTN_PLAN : 0,
		.q = q,
		.out = e->act.attn,
		.workspace = e->act.attn_ws,
		.workspace_bytes = e->act.attn_ws_bytes,
	};

	if (s->q_len_max > 1)
		return e->ops->attn_prefill(&a, e->mem->stream);
	return c->arch == ENG_ARCH_MLA ? e->ops->attn_mla(&a, e->mem->stream)
				       : e->ops->attn_gqa(&a, e->mem->stream);
}

/* latent = norm of the first part of kv, k_rope = the rest, rotated */
static int mla_key(struct eng_engine *e, const struct eng_layer *l)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	u32 n = e->step.nr_tokens, kd = c->latent_dim + c->rope_dim;
	struct eng_norm norm = {
		.x = a->kv,
		.weight = l->kv_a_norm,
		.y = a->latent,
		.eps = c->latent_norm_eps,
		.nr_rows = n,
		.cols = c->latent_dim,
		.x_stride = kd,
	};
	const struct heads from = {.x = a->kv, .stride = kd, .at = c->latent_dim};
	const struct heads to = {.x = a->k_rope, .stride = c->rope_dim};
	int rc = linear(e, &l->kv_a, a->h, a->kv, NULL);

	if (!rc)
		rc = eng_call_norm(e, &norm);
	return rc ? rc : rope(e, &from, &to, 1);
}

/* q_abs = (W_UK^T q_nope, rotated q_rope) */
static int mla_query(struct eng_engine *e, const struct eng_layer *l)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	u32 qd = c->nope_dim + c->rope_dim, kd = c->latent_dim + c->rope_dim;
	const struct heads from = {.x = a->q, .stride = qd, .at = c->nope_dim};
	const struct heads to = {.x = a->q_abs, .stride = kd, .at = c->latent_dim};
	int rc = linear_heads(e, &l->w_uk_t, a->q, qd, a->q_abs, kd);

	return rc ? rc : rope(e, &from, &to, c->nr_q_heads);
}

static int mla_project(struct eng_engine *e, const struct eng_layer *l)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	struct eng_norm q_norm = {
		.x = a->q_a,
		.weight = l->q_a_norm,
		.y = a->q_a,
		.eps = c->latent_norm_eps,
		.nr_rows = e->step.nr_tokens,
		.cols = c->q_rank,
	};
	int rc = eng_side_begin(e);

	/* the key beside the query */
	if (!rc)
		rc = mla_key(e, l);
	eng_side_end(e);
	if (!rc)
		rc = linear(e, &l->q_a, a->h, a->q_a, NULL);
	if (!rc)
		rc = eng_call_norm(e, &q_norm);
	if (!rc)
		rc = linear(e, &l->q_b, a->q_a, a->q, NULL);
	return rc ? rc : mla_query(e, l);
}

static int mla_block(struct eng_engine *e, u32 layer)
{
	const struct eng_layer *l = &e->w.layers[layer];
	struct eng_act *a = &e->act;
	int rc;

	rc = mla_project(e, l);
	if (!rc)
		rc = append(e, layer);
	if (!rc)
		rc = attention(e, layer, a->q_abs);
	if (!rc)
		rc = linear_heads(e, &l->w_uv, a->attn, 0, a->attn_v, 0);
	if (!rc)
		rc = linear(e, &l->o, a->attn_v, a->y, NULL);
	return rc;
}

/* Norm of each head, where the model has one. */
static int norm_heads(struct eng_engine *e, const float *weight, void *x, u32 nr_rows)
{
	const struct eng_config *c = &e->m->config;
	struct eng_norm n = {.x = x,
			     .weight = weight,
			     .y = x,
			     .eps = c->norm_eps,
			     .nr_rows = nr_rows,
			     .cols = c->head_dim};

	return weight ? eng_call_norm(e, &n) : 0;
}

static int gqa_block(struct eng_engine *e, u32 layer)
{
	const struct eng_config *c = &e->m->config;
	const struct eng_layer *l = &e->w.layers[layer];
	struct eng_act *a = &e->act;
	u32 n = e->step.nr_tokens;
	int rc;

	rc = linear(e, &l->q, a->h, a->q, l->q_bias);
	if (!rc)
		rc = linear(e, &l->k, a->h, a->k, l->k_bias);
	if (!rc)
		rc = linear(e, &l->v, a->h, a->v, l->v_bias);
	if (!rc)
		rc = norm_heads(e, l->q_norm, a->q, n * c->nr_q_heads);
	if (!rc)
		rc = norm_heads(e, l->k_norm, a->k, n * c->nr_kv_heads);
	if (!rc)
		rc = rope_here(e, a->q, c->nr_q_heads);
	if (!rc)
		rc = rope_here(e, a->k, c->nr_kv_heads);
	if (!rc)
		rc = append(e, layer);
	if (!rc)
		rc = attention(e, layer, a->q);
	if (!rc)
		rc = linear(e, &l->o, a->attn, a->y, NULL);
	return rc;
}

/**
 * eng_attn_block() - act.y = attention block of @layer over act.h
 *
 * Context: inside an announced step, behind its check.
 * Return: 0; -errno of a kernel.
 */
int eng_attn_block(struct eng_engine *e, u32 layer)
{
	return e->m->config.arch == ENG_ARCH_MLA ? mla_block(e, layer)
						 : gqa_block(e, layer);
}
