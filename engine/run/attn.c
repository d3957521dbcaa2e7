/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn.c - the attention block of a layer: projections, rope, append, attention, output.
 *
 * MLA in absorbed form. With q = (q_nope, q_rope) per head and W_UK, W_UV the two halves
 *of kv_b_proj, scores against a token's latent c and rotated k_rope are
 *
 *	q_nope . (W_UK c) + q_rope . k_rope  =  (W_UK^T q_nope) . c + q_rope . k_rope
 *
 * so a page holds (c, k_rope) only, the query is moved into latent space once per token,
 *and the sum of latents comes back through W_UV.
 *
 * GQA: optional bias and per-head RMS norm of q and k, rope on the first rope.dim values.
 */
#include "engine/run/internal.h"

#include <math.h>
#include <string.h>

static int linear(struct eng_engine *e, const struct kvk_weight *w, const float *x,
		  float *y, const float *bias)
{
	struct kvk_linear_args a = {
		.w = *w,
		.x = x,
		.y = y,
		.bias = bias,
		.nr_tokens = e->step.nr_tokens,
		.x_dtype = KVK_F32,
		.y_dtype = KVK_F32,
		.nr_batch = 1,
	};

	return e->ops->linear(&a, NULL);
}

/* One matrix per head: x [tokens][heads][cols] -> y [tokens][heads][rows]. */
static int linear_heads(struct eng_engine *e, const struct kvk_weight *w, const float *x,
			float *y)
{
	struct kvk_linear_args a = {
		.w = *w,
		.x = x,
		.y = y,
		.nr_tokens = e->step.nr_tokens,
		.x_dtype = KVK_F32,
		.y_dtype = KVK_F32,
		.nr_batch = e->m->config.nr_q_heads,
	};

	return e->ops->linear(&a, NULL);
}

static int norm(struct eng_engine *e, const float *x, u32 x_stride, const float *weight,
		float eps, float *y, u32 nr_rows, u32 cols)
{
	struct kvk_norm_args a = {
		.x = x,
		.weight = weight,
		.y = y,
		.eps = eps,
		.nr_rows = nr_rows,
		.cols = cols,
		.x_stride = x_stride,
		.y_stride = cols,
		.act_dtype = KVK_F32,
	};

	return e->ops->norm(&a, NULL);
}

static int rope(struct eng_engine *e, float *x, u32 nr_heads, u32 head_stride, u32 offset)
{
	const struct eng_rope *r = &e->m->config.rope;
	struct kvk_rope_args a = {
		.x = x,
		.positions = e->step.positions,
		.cos_sin = e->act.cos_sin,
		.nr_tokens = e->step.nr_tokens,
		.nr_heads = nr_heads,
		.head_stride = head_stride,
		.token_stride = nr_heads * head_stride,
		.offset = offset,
		.rope_dim = r->dim,
		.act_dtype = KVK_F32,
		.interleaved = r->interleaved,
	};

	return e->ops->rope(&a, NULL);
}

/* Columns [from, from + nr) of each of nr_rows rows. */
static void copy_cols(float *dst, u32 dst_stride, const float *src, u32 src_stride,
		      u32 nr_rows, u32 nr)
{
	for (u32 i = 0; i < nr_rows; i++)
		memcpy(dst + (size_t)i * dst_stride, src + (size_t)i * src_stride,
		       nr * sizeof(float));
}

static void amax_note(float *amax, const float *x, u32 nr_rows, u32 stride, u32 cols)
{
	for (u32 i = 0; i < nr_rows; i++) {
		for (u32 j = 0; j < cols; j++)
			*amax = fmaxf(*amax, fabsf(x[(size_t)i * stride + j]));
	}
}

/* Calibration (amax.c): the largest values before they are rounded to the page's format.
 */
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

		amax_note(amax, e->act.k + h * c->head_dim, n, width, c->head_dim);
		amax_note(amax + 1, e->act.v + h * c->head_dim, n, width, c->head_dim);
	}
}

static int append(struct eng_engine *e, u32 layer)
{
	struct eng_act *a = &e->act;
	struct kvk_append_args args = {
		.pages = e->pages,
		.batch = eng_batch_view(&e->step, ENG_GROUP_SEQ),
		.layer = layer,
		.src_dtype = KVK_F32,
		.latent = a->latent,
		.rope = a->k_rope,
		.k = a->k,
		.v = a->v,
		.nan_count = &e->step.nan_count,
	};

	if (e->amax)
		note_amax(e, layer);
	return e->ops->append(&args, NULL);
}

/*
 * Decoding sequences (one token) and prompts go to their own families; they are
 * neighbours in the step's arrays, one token sequences first.
 */
static int attention(struct eng_engine *e, u32 layer, const float *q)
{
	const struct eng_config *c = &e->m->config;
	struct eng_step *s = &e->step;
	struct kvk_attn_args a = {
		.pages = e->pages,
		.batch = eng_batch_view(s, ENG_GROUP_SEQ),
		.layer = layer,
		.nr_q_heads = c->nr_q_heads,
		.sm_scale = c->sm_scale,
		.act_dtype = KVK_F32,
		.flags = layer ? KVK_ATTN_PLAN : 0,
		.q = q,
		.out = e->act.attn,
		.workspace = e->act.attn_ws,
		.workspace_bytes = e->act.attn_ws_bytes,
	};

	if (s->q_len_max > 1)
		return e->ops->attn_prefill(&a, NULL);
	return c->arch == ENG_ARCH_MLA ? e->ops->attn_mla(&a, NULL)
				       : e->ops->attn_gqa(&a, NULL);
}

static int mla_project(struct eng_engine *e, const struct eng_layer *l)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	u32 n = e->step.nr_tokens, h = c->nr_q_heads;
	u32 qd = c->nope_dim + c->rope_dim, kd = c->latent_dim + c->rope_dim;
	int rc;

	rc = linear(e, &l->q_a, a->h, a->q_a, NULL);
	if (!rc)
		rc = norm(e, a->q_a, c->q_rank, l->q_a_norm, c->latent_norm_eps, a->q_a,
			  n, c->q_rank);
	if (!rc)
		rc = linear(e, &l->q_b, a->q_a, a->q, NULL);
	if (!rc)
		rc = rope(e, a->q, h, qd, c->nope_dim);
	if (!rc)
		rc = linear(e, &l->kv_a, a->h, a->kv, NULL);
	if (!rc)
		rc = norm(e, a->kv, kd, l->kv_a_norm, c->latent_norm_eps, a->latent, n,
			  c->latent_dim);
	if (rc)
		return rc;
	copy_cols(a->k_rope, c->rope_dim, a->kv + c->latent_dim, kd, n, c->rope_dim);
	rc = rope(e, a->k_rope, 1, c->rope_dim, 0);
	if (rc)
		return rc;
	copy_cols(a->q_nope, c->nope_dim, a->q, qd, n * h, c->nope_dim);
	rc = linear_heads(e, &l->w_uk_t, a->q_nope, a->q_lat);
	if (rc)
		return rc;
	copy_cols(a->q_abs, kd, a->q_lat, c->latent_dim, n * h, c->latent_dim);
	copy_cols(a->q_abs + c->latent_dim, kd, a->q + c->nope_dim, qd, n * h,
		  c->rope_dim);
	return 0;
}

static int mla_block(struct eng_engine *e, u32 layer)
{
	const struct eng_layer *l = &e->m->layers[layer];
	struct eng_act *a = &e->act;
	int rc;

	rc = mla_project(e, l);
	if (!rc)
		rc = append(e, layer);
	if (!rc)
		rc = attention(e, layer, a->q_abs);
	if (!rc)
		rc = linear_heads(e, &l->w_uv, a->attn, a->attn_v);
	if (!rc)
		rc = linear(e, &l->o, a->attn_v, a->y, NULL);
	return rc;
}

static int gqa_block(struct eng_engine *e, u32 layer)
{
	const struct eng_config *c = &e->m->config;
	const struct eng_layer *l = &e->m->layers[layer];
	struct eng_act *a = &e->act;
	u32 n = e->step.nr_tokens, d = c->head_dim;
	int rc;

	rc = linear(e, &l->q, a->h, a->q, l->q_bias);
	if (!rc)
		rc = linear(e, &l->k, a->h, a->k, l->k_bias);
	if (!rc)
		rc = linear(e, &l->v, a->h, a->v, l->v_bias);
	if (!rc && l->q_norm)
		rc = norm(e, a->q, d, l->q_norm, c->norm_eps, a->q, n * c->nr_q_heads, d);
	if (!rc && l->k_norm)
		rc = norm(e, a->k, d, l->k_norm, c->norm_eps, a->k, n * c->nr_kv_heads,
			  d);
	if (!rc)
		rc = rope(e, a->q, c->nr_q_heads, d, 0);
	if (!rc)
		rc = rope(e, a->k, c->nr_kv_heads, d, 0);
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
