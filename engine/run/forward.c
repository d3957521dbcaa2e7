/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forward.c - one forward pass over the step's tokens.
 *
 *	embed -> per layer: norm, attention block, norm, dense MLP or router + experts +
 *shared
 *	-> final norm -> lm_head on the rows that are sampled or scored -> sample
 *
 * x is the residual stream: each norm first adds the last block's output y to it. Shapes
 *are in struct eng_act. Failed requests flow through as NaN rows and disturb nobody:
 *every token is computed by itself.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static float bf16_to_f32(u16 v)
{
	u32 bits = (u32)v << 16;
	float f;

	memcpy(&f, &bits, sizeof(f));
	return f;
}

static void embed(struct eng_engine *e)
{
	const struct kvk_weight *w = &e->m->embed;
	struct eng_step *s = &e->step;
	u32 cols = e->m->config.hidden;

	for (u32 t = 0; t < s->nr_tokens; t++) {
		size_t row = (size_t)s->ids[t] * cols;
		float *x = e->act.x + (size_t)t * cols;

		if (w->dtype == KVK_F32) {
			memcpy(x, (const float *)w->data + row, cols * sizeof(float));
			continue;
		}
		for (u32 i = 0; i < cols; i++)
			x[i] = bf16_to_f32(((const u16 *)w->data)[row + i]);
	}
}

/* h = norm(x [+= y]) */
static int norm_residual(struct eng_engine *e, const float *weight, bool add_y)
{
	const struct eng_config *c = &e->m->config;
	struct kvk_norm_args a = {
		.x = add_y ? e->act.y : e->act.x,
		.residual = add_y ? e->act.x : NULL,
		.weight = weight,
		.y = e->act.h,
		.eps = c->norm_eps,
		.nr_rows = e->step.nr_tokens,
		.cols = c->hidden,
		.x_stride = c->hidden,
		.y_stride = c->hidden,
		.act_dtype = KVK_F32,
	};

	return e->ops->norm(&a, NULL);
}

static int linear(struct eng_engine *e, const struct kvk_weight *w, const float *x,
		  float *y, u32 nr_tokens, bool accumulate)
{
	struct kvk_linear_args a = {
		.w = *w,
		.x = x,
		.y = y,
		.nr_tokens = nr_tokens,
		.x_dtype = KVK_F32,
		.y_dtype = KVK_F32,
		.nr_batch = 1,
		.accumulate = accumulate,
	};

	return e->ops->linear(&a, NULL);
}

/* y (+)= down(silu(gate h) * up h) */
static int mlp(struct eng_engine *e, const struct eng_mlp *m, bool accumulate)
{
	u32 n = e->step.nr_tokens;
	struct kvk_silu_args silu = {
		.gu = e->act.gu,
		.y = e->act.silu,
		.nr_tokens = n,
		.inter = m->inter,
		.act_dtype = KVK_F32,
	};
	int rc;

	rc = linear(e, &m->gate_up, e->act.h, e->act.gu, n, false);
	if (!rc)
		rc = e->ops->silu(&silu, NULL);
	if (!rc)
		rc = linear(e, &m->down, e->act.silu, e->act.y, n, accumulate);
	return rc;
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
	int rc;

	rc = linear(e, &l->router, e->act.h, e->act.router, e->step.nr_tokens, false);
	return rc ? rc : e->ops->moe_route(&a, NULL);
}

static int experts(struct eng_engine *e, const struct eng_layer *l)
{
	struct kvk_moe_args a = {
		.experts = l->experts,
		.x = e->act.h,
		.y = e->act.y,
		.ids = e->act.expert_ids,
		.weights = e->act.expert_weights,
		.nr_tokens = e->step.nr_tokens,
		.top_k = e->m->config.top_k,
		.act_dtype = KVK_F32,
		.workspace = e->act.moe_ws,
		.workspace_bytes = e->act.moe_ws_bytes,
	};

	switch (l->experts.dtype) {
	case KVK_INT4:
		return e->ops->moe_int4(&a, NULL);
	case KVK_E4M3:
		return e->ops->moe_fp8(&a, NULL);
	default:
		return e->ops->moe_bf16(&a, NULL);
	}
}

static int mlp_block(struct eng_engine *e, u32 layer)
{
	const struct eng_layer *l = &e->m->layers[layer];
	int rc;

	if (!l->is_moe)
		return mlp(e, &l->dense, false);
	rc = route(e, l);
	if (!rc)
		rc = experts(e, l);
	if (!rc && l->shared.inter)
		rc = mlp(e, &l->shared, true);
	return rc;
}

/* log-probability of @target; NaN rows give NaN */
static float logprob(const float *logits, u32 vocab, u32 target)
{
	float max = logits[0];
	double sum = 0;

	for (u32 i = 1; i < vocab; i++)
		max = logits[i] > max ? logits[i] : max;
	for (u32 i = 0; i < vocab; i++)
		sum += (double)expf(logits[i] - max);
	return (float)((double)logits[target] - (double)max - log(sum));
}

/* A scored prompt: every row of the chunk through lm_head, some rows at a time. */
static int score(struct eng_engine *e, u32 index)
{
	struct eng_request *r = e->step.seqs[index];
	const struct eng_config *c = &e->m->config;
	u32 done = 0;

	while (done < r->q_len) {
		u32 n = KV_MIN(r->q_len - done, ENG_LOGIT_ROWS);
		u32 at = r->nr_in_pages + done;
		size_t row = e->step.q_start[index] + done;
		int rc = linear(e, &e->m->lm_head, e->act.h + row * c->hidden,
				e->act.logits, n, false);

		if (rc)
			return rc;
#pragma omp parallel for schedule(static)
		for (u32 i = 0; i < n; i++) {
			if (at + i < r->nr_prompt)
				r->target_logprobs[at + i] =
					logprob(e->act.logits + (size_t)i * c->vocab,
						c->vocab, r->targets[at + i]);
		}
		done += n;
	}
	return 0;
}

static int sample(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	const struct eng_config *c = &e->m->config;
	struct kvk_sample_args a = {
		.logits = e->act.logits,
		.temperature = s->temperature,
		.top_p = s->top_p,
		.seeds = s->seeds,
		.ret_ids = s->sample_ids,
		.ret_logprob = s->sample_logprob,
		.nr_rows = s->nr_samples,
		.vocab = c->vocab,
	};
	int rc;

	if (s->nr_samples == 0)
		return 0;
	for (u32 i = 0; i < s->nr_samples; i++)
		memcpy(e->act.head_in + (size_t)i * c->hidden,
		       e->act.h + (size_t)s->sample_row[i] * c->hidden,
		       c->hidden * sizeof(float));
	rc = linear(e, &e->m->lm_head, e->act.head_in, e->act.logits, s->nr_samples,
		    false);
	if (rc)
		return rc;
	for (u32 i = 0; i < s->nr_samples; i++) {
		struct eng_request *r = s->seqs[s->sample_seq[i]];

		if (r->logits)
			memcpy(r->logits, e->act.logits + (size_t)i * c->vocab,
			       c->vocab * sizeof(float));
	}
	return e->ops->sample(&a, NULL);
}

/**
 * eng_forward() - run the step's tokens through the model
 *
 * Fills step.sample_ids and sample_logprob, target_logprobs of scored requests.
 * Context: inside an announced step, behind its check.
 * Return: 0; -errno of a kernel.
 */
int eng_forward(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	int rc = 0;

	s->nan_count = 0;
	embed(e);
	for (u32 l = 0; l < e->m->config.nr_layers && !rc; l++) {
		rc = norm_residual(e, e->m->layers[l].attn_norm, l > 0);
		if (!rc)
			rc = eng_attn_block(e, l);
		if (!rc)
			rc = norm_residual(e, e->m->layers[l].mlp_norm, true);
		if (!rc)
			rc = mlp_block(e, l);
	}
	if (!rc)
		rc = norm_residual(e, e->m->final_norm, true);
	for (u32 i = 0; i < s->nr_seqs && !rc; i++) {
		if (s->seqs[i]->targets)
			rc = score(e, i);
	}
	if (!rc)
		rc = sample(e);
	eng_stat_add(e->stats.nan_values, s->nan_count);
	return rc;
}
