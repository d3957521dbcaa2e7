/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forward.c - one forward pass over the step's tokens.
 *
 *	embed -> per layer: norm, attention block, norm, dense MLP or router + experts +
 *	shared
 *	-> final norm -> lm_head on the rows that are sampled or scored -> sample
 *
 * x is the residual stream: each norm first adds the last block's output y to it. Shapes
 *	are in struct eng_act. Failed requests flow through as NaN rows and disturb nobody:
 *	every token is computed by itself.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <string.h>

static int embed(struct eng_engine *e)
{
	u32 cols = e->m->config.hidden;
	struct eng_copy_args a = {
		.dst = e->act.x,
		.src = e->w.embed.data,
		.rows = eng_dev(e, e->step.ids),
		.dst_stride = cols,
		.src_stride = cols,
		.dst_dtype = e->mem->act_dtype,
		.src_dtype = e->w.embed.dtype,
		.nr_rows = e->step.nr_tokens,
		.cols = cols,
	};

	return e->mem->ops->copy(e->mem, &a);
}

/* h = norm(x [+= y]) */
static int norm_residual(struct eng_engine *e, const float *weight, bool add_y)
{
	const struct eng_config *c = &e->m->config;
	struct eng_norm n = {
		.x = add_y ? e->act.y : e->act.x,
		.residual = add_y ? e->act.x : NULL,
		.weight = weight,
		.y = e->act.h,
		.eps = c->norm_eps,
		.nr_rows = e->step.nr_tokens,
		.cols = c->hidden,
	};

	return eng_call_norm(e, &n);
}

/* silu = silu(gate h) * up h */
static int mlp_inner(struct eng_engine *e, const struct eng_mlp *m)
{
	struct kvk_silu_args silu = {
		.gu = e->act.gu,
		.y = e->act.silu,
		.nr_tokens = e->step.nr_tokens,
		.inter = m->inter,
		.act_dtype = e->mem->act_dtype,
	};
	struct eng_linear up = {.w = &m->gate_up, .x = e->act.h, .y = e->act.gu};
	int rc = eng_call_linear(e, &up);

	return rc ? rc : e->ops->silu(&silu, e->mem->stream);
}

/* y = down silu + add */
static int mlp_outer(struct eng_engine *e, const struct eng_mlp *m, const float *add)
{
	struct eng_linear down = {
		.w = &m->down, .x = e->act.silu, .y = e->act.y, .add = add};

	return eng_call_linear(e, &down);
}

static int route(struct eng_engine *e, const struct eng_layer *l)
{
	const struct eng_config *c = &e->m->config;
	struct kvk_moe_route_args a = {
		.logits = e->act.router,
		.bias = l->router_bias,
		.ret_ids = e->act.expert_ids,
		.ret_weights = e->act.expert_weights,
		.nr_tokens = e->step.nr_tokens,
		.nr_experts = c->nr_experts,
		.top_k = c->top_k,
		.nr_groups = c->nr_groups,
		.top_groups = c->top_groups,
		.norm = c->norm_topk,
		.scale = c->routed_scale,
	};
	struct eng_linear router = {
		.w = &l->router, .x = e->act.h, .y = e->act.router, .y_f32 = true};
	int rc = eng_call_linear(e, &router);

	return rc ? rc : e->ops->moe_route(&a, e->mem->stream);
}

/* To y, or in f32 to where the shared expert finds it: a layer's output is rounded once. */
static int experts(struct eng_engine *e, const struct eng_layer *l)
{
	const bool shared = l->shared.inter != 0;
	struct kvk_moe_args a = {
		.experts = l->experts,
		.x = e->act.h,
		.y = shared ? (void *)e->act.routed : e->act.y,
		.y_f32 = shared,
		.ids = e->act.expert_ids,
		.weights = e->act.expert_weights,
		.nr_tokens = e->step.nr_tokens,
		.top_k = e->m->config.top_k,
		.act_dtype = e->mem->act_dtype,
		.workspace = e->act.moe_ws,
		.workspace_bytes = e->act.moe_ws_bytes,
	};

	switch (l->experts.dtype) {
	case KVK_INT4:
		return e->ops->moe_int4(&a, e->mem->stream);
	case KVK_E4M3:
		return e->ops->moe_fp8(&a, e->mem->stream);
	default:
		return e->ops->moe_bf16(&a, e->mem->stream);
	}
}

static int mlp_block(struct eng_engine *e, u32 layer)
{
	const struct eng_layer *l = &e->w.layers[layer];
	int rc;

	if (!l->is_moe) {
		rc = mlp_inner(e, &l->dense);
		return rc ? rc : mlp_outer(e, &l->dense, NULL);
	}
	/* the shared expert beside the routed ones; added behind them, as everywhere */
	rc = l->shared.inter ? eng_side_begin(e) : 0;
	if (!rc && l->shared.inter)
		rc = mlp_inner(e, &l->shared);
	eng_side_end(e);
	if (!rc)
		rc = route(e, l);
	if (!rc)
		rc = experts(e, l);
	if (!rc)
		rc = eng_check_join(e);
	if (!rc && l->shared.inter)
		rc = mlp_outer(e, &l->shared, e->act.routed);
	return rc;
}

/* A scored prompt: every row of the chunk through lm_head, some rows at a time. */
static int score(struct eng_engine *e, u32 index)
{
	const struct eng_config *c = &e->m->config;
	struct eng_step *s = &e->step;
	u32 at = s->q_start[index], end = s->q_start[index + 1];
	int rc = 0;

	while (at < end && !rc) {
		u32 n = KV_MIN(end - at, ENG_LOGIT_ROWS);
		struct eng_linear head = {
			.w = &e->w.lm_head,
			.x = eng_act_at(e, e->act.h, (size_t)at * c->hidden),
			.y = e->act.logits,
			.nr_tokens = n,
			.y_f32 = true,
		};
		struct eng_score_args a = {
			.logits = e->act.logits,
			.targets = eng_dev(e, s->targets + at),
			.ret = eng_dev(e, s->target_logprobs + at),
			.nr_rows = n,
			.vocab = c->vocab,
		};

		rc = eng_call_linear(e, &head);
		if (!rc)
			rc = e->mem->ops->score(e->mem, &a);
		at += n;
	}
	return rc;
}

static int sample(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	const struct eng_config *c = &e->m->config;
	/* a graph samples for all it has room for */
	u32 nr = s->bucket ? s->bucket : s->nr_samples;
	struct eng_copy_args rows = {
		.dst = e->act.head_in,
		.src = e->act.h,
		.rows = eng_dev(e, s->sample_row),
		.dst_stride = c->hidden,
		.src_stride = c->hidden,
		.dst_dtype = e->mem->act_dtype,
		.src_dtype = e->mem->act_dtype,
		.nr_rows = nr,
		.cols = c->hidden,
	};
	struct eng_linear head = {.w = &e->w.lm_head,
				  .x = e->act.head_in,
				  .y = e->act.logits,
				  .nr_tokens = nr,
				  .y_f32 = true};
	struct kvk_sample_args a = {
		.logits = e->act.logits,
		.temperature = eng_dev(e, s->temperature),
		.top_p = eng_dev(e, s->top_p),
		.seeds = eng_dev(e, s->seeds),
		.ret_ids = eng_dev(e, s->sample_ids),
		.ret_logprob = eng_dev(e, s->sample_logprob),
		.nr_rows = nr,
		.vocab = c->vocab,
	};
	int rc;

	if (nr == 0)
		return 0;
	rc = e->mem->ops->copy(e->mem, &rows);
	if (!rc)
		rc = eng_call_linear(e, &head);
	return rc ? rc : e->ops->sample(&a, e->mem->stream);
}

/**
 * eng_forward() - run the step's tokens through the model
 *
 * Fills step.sample_ids and sample_logprob, target_logprobs of scored tokens. May be
 * captured when no sequence is scored: nothing here depends on the step but by way of
 * bucket and the arrays' contents.
 *
 * Context: inside an announced step; the check is launched. Pages are touched behind
 * eng_check_join().
 * Return: 0; -errno of a kernel.
 */
int eng_forward(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	int rc = embed(e);

	for (u32 l = 0; l < e->m->config.nr_layers && !rc; l++) {
		rc = norm_residual(e, e->w.layers[l].attn_norm, l > 0);
		if (!rc)
			rc = eng_attn_block(e, l);
		if (!rc)
			rc = norm_residual(e, e->w.layers[l].mlp_norm, true);
		if (!rc)
			rc = mlp_block(e, l);
	}
	if (!rc)
		rc = norm_residual(e, e->w.final_norm, true);
	for (u32 i = 0; i < s->nr_seqs && !rc; i++) {
		if (s->seqs[i]->targets)
			rc = score(e, i);
	}
	return rc ? rc : sample(e);
}

/* Logits that a request keeps: a row at a time, by way of memory copies may run from. */
static int keep_logits(struct eng_engine *e, float *dst, u32 row)
{
	const float *src = e->act.logits + (size_t)row * e->m->config.vocab;
	size_t bytes = e->m->config.vocab * sizeof(float);
	int rc;

	if (!e->mem->separate) {
		memcpy(dst, src, bytes);
		return 0;
	}
	rc = e->mem->ops->download(e->mem, e->kept_logits, src, bytes);
	if (!rc)
		rc = e->mem->ops->sync(e->mem);
	if (!rc)
		memcpy(dst, e->kept_logits, bytes);
	return rc;
}

/**
 * eng_forward_results() - hand results of the step to its requests
 *
 * Context: all work of the step is complete, and what comes back has come.
 * Return: 0; -EIO.
 */
int eng_forward_results(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	int rc = 0;

	for (u32 i = 0; i < s->nr_seqs; i++) {
		struct eng_request *r = s->seqs[i];

		for (u32 t = 0; r->targets && t < r->q_len; t++) {
			u32 at = s->q_start[i] + t;

			if (s->targets[at] != ENG_NO_TARGET)
				r->target_logprobs[r->nr_in_pages + t] =
					s->target_logprobs[at];
		}
	}
	for (u32 i = 0; i < s->nr_samples && !rc; i++) {
		struct eng_request *r = s->seqs[s->sample_seq[i]];

		if (r->logits)
			rc = keep_logits(e, r->logits, i);
	}
	eng_stat_add(e->stats.nan_values, *s->nan_count);
	return rc;
}
