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

static struct kvk_rope_args rope_args(const struct eng_engine *e,
				      const struct heads *from, const struct heads *to,
				      u32 nr_heads)
{
	const struct eng_rope *r = &e->m->config.rope;

	return (struct kvk_rope_args){
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
}

/* GQA: the first values of each head, in place. */
static struct kvk_rope_args rope_here(const struct eng_engine *e, void *x, u32 nr_heads)
{
	const struct heads h = {.x = x, .stride = e->m->config.head_dim};

	return rope_args(e, &h, &h, nr_heads);
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

/*
 * Norm, rotation and append of the step's tokens: @a but for the append. Context: behind
 * eng_check_join().
 */
static int key_append(struct eng_engine *e, u32 layer,
		      struct kvk_norm_rope_append_args *a)
{
	struct eng_act *act = &e->act;
	int rc;

	a->append = (struct kvk_append_args){
		.pages = e->pages,
		.batch = eng_batch_view(e, ENG_GROUP_SEQ),
		.layer = layer,
		.src_dtype = e->mem->act_dtype,
		.latent = act->latent,
		.rope = act->k_rope,
		.k = act->k,
		.v = act->v,
		.nan_count = eng_dev(e, e->step.nan_count),
	};
	rc = e->ops->norm_rope_append(a, e->mem->stream);
	if (!rc && e->amax)
		note_amax(e, layer);
	return rc;
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
	/* not above: pages of prompts are what other engines find */
	if (e->opt.attention == ENG_ATTENTION_FAST)
		a.flags |= KVK_ATTN_FAST;
	return c->arch == ENG_ARCH_MLA ? e->ops->attn_mla(&a, e->mem->stream)
				       : e->ops->attn_gqa(&a, e->mem->stream);
}

/* To the page: (norm of kv's first part, the rest rotated); to q_abs: rotated q_rope. */
static int mla_key(struct eng_engine *e, u32 layer)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	const u32 qd = c->nope_dim + c->rope_dim, kd = c->latent_dim + c->rope_dim;
	const struct heads kv = {.x = a->kv, .stride = kd, .at = c->latent_dim};
	const struct heads k_rope = {.x = a->k_rope, .stride = c->rope_dim};
	const struct heads q = {.x = a->q, .stride = qd, .at = c->nope_dim};
	const struct heads q_abs = {.x = a->q_abs, .stride = kd, .at = c->latent_dim};
	const struct eng_norm norm = {
		.x = a->kv,
		.weight = e->w.layers[layer].kv_a_norm,
		.y = a->latent,
		.eps = c->latent_norm_eps,
		.nr_rows = e->step.nr_tokens,
		.cols = c->latent_dim,
		.x_stride = kd,
	};
	struct kvk_norm_rope_append_args args = {
		.k_norm = eng_norm_args(e, &norm),
		.k_rope = rope_args(e, &kv, &k_rope, 1),
		.q_rope = rope_args(e, &q, &q_abs, c->nr_q_heads),
	};
	int rc = eng_check_join(e); /* kv has come as well */

	return rc ? rc : key_append(e, layer, &args);
}

/* q and kv of the step's tokens */
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
		rc = linear(e, &l->kv_a, a->h, a->kv, NULL);
	eng_side_end(e);
	if (!rc)
		rc = linear(e, &l->q_a, a->h, a->q_a, NULL);
	if (!rc)
		rc = eng_call_norm(e, &q_norm);
	return rc ? rc : linear(e, &l->q_b, a->q_a, a->q, NULL);
}

static int mla_block(struct eng_engine *e, u32 layer)
{
	const struct eng_config *c = &e->m->config;
	const struct eng_layer *l = &e->w.layers[layer];
	struct eng_act *a = &e->act;
	int rc = mla_project(e, l);

	if (!rc)
		rc = mla_key(e, layer);
	/* W_UK^T q_nope to the first part of q_abs */
	if (!rc)
		rc = linear_heads(e, &l->w_uk_t, a->q, c->nope_dim + c->rope_dim,
				  a->q_abs, c->latent_dim + c->rope_dim);
	if (!rc)
		rc = attention(e, layer, a->q_abs);
	if (!rc)
		rc = linear_heads(e, &l->w_uv, a->attn, 0, a->attn_v, 0);
	if (!rc)
		rc = linear(e, &l->o, a->attn_v, a->y, NULL);
	return rc;
}

/* Norm of each head, where the model has one. */
static struct kvk_norm_args norm_heads(const struct eng_engine *e, const float *weight,
				       void *x, u32 nr_heads)
{
	const struct eng_config *c = &e->m->config;
	const struct eng_norm n = {.x = x,
				   .weight = weight,
				   .y = x,
				   .eps = c->norm_eps,
				   .nr_rows = e->step.nr_tokens * nr_heads,
				   .cols = c->head_dim};

	return eng_norm_args(e, &n);
}

static int gqa_block(struct eng_engine *e, u32 layer)
{
	const struct eng_config *c = &e->m->config;
	const struct eng_layer *l = &e->w.layers[layer];
	struct eng_act *a = &e->act;
	struct kvk_norm_rope_append_args key = {
		.q_norm = norm_heads(e, l->q_norm, a->q, c->nr_q_heads),
		.k_norm = norm_heads(e, l->k_norm, a->k, c->nr_kv_heads),
		.q_rope = rope_here(e, a->q, c->nr_q_heads),
		.k_rope = rope_here(e, a->k, c->nr_kv_heads),
	};
	int rc = linear(e, &l->q, a->h, a->q, l->q_bias);

	if (!rc)
		rc = linear(e, &l->k, a->h, a->k, l->k_bias);
	if (!rc)
		rc = linear(e, &l->v, a->h, a->v, l->v_bias);
	if (!rc)
		rc = eng_check_join(e);
	if (!rc)
		rc = key_append(e, layer, &key);
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
