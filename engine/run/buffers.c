/* SPDX-License-Identifier: Apache-2.0 */
/*
 * buffers.c - everything a step needs, allocated once: a step itself allocates nothing.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN 64u

struct chunk {
	struct chunk *next;
};

/* Zeroed, 64-byte aligned, freed with the engine; 0 bytes is fine. */
static int get(struct eng_engine *e, void *ret_ptr, u64 nr, u64 size)
{
	struct chunk *c;
	u64 bytes;

	if (__builtin_mul_overflow(nr, size, &bytes))
		return -ENOMEM;
	bytes = kv_round_up(bytes + ALIGN, ALIGN);
	c = aligned_alloc(ALIGN, bytes);
	if (!c)
		return -ENOMEM;
	memset(c, 0, bytes);
	c->next = e->arena;
	e->arena = c;
	*(void **)ret_ptr = (char *)c + ALIGN;
	return 0;
}

#define GET(field_, nr_)                                                  \
	do {                                                              \
		if (!rc)                                                  \
			rc = get(e, &(field_), (nr_), sizeof(*(field_))); \
	} while (0)

static int alloc_step(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	u64 batch = e->opt.batch_max;
	u64 written = e->tokens_max / KV_PAGE_TOKENS + 2 * batch;
	int rc = 0;

	s->crc_max = (u32)written;
	s->cap = (u32)(5 * batch);
	s->cap_rows = (u32)(batch * e->pages_max + 4 * written + 2 * batch);
	GET(s->rows, s->cap_rows);
	GET(s->row_start, s->cap + 1);
	GET(s->lengths, s->cap);
	GET(s->nonces, s->cap);
	GET(s->verdicts, s->cap);
	GET(s->owner, s->cap);
	for (u32 g = 0; g < ENG_GROUP_NR; g++)
		GET(s->view[g].row_start, batch + 1);
	GET(s->seqs, batch);
	GET(s->q_start, batch + 1);
	GET(s->zero_q, s->cap + 1);
	GET(s->ids, e->tokens_max);
	GET(s->positions, e->tokens_max);
	GET(s->copy_tokens, batch);
	GET(s->crc, s->crc_max);
	GET(s->crc_first, batch);
	GET(s->crc_nr, batch);
	GET(s->sample_seq, batch);
	GET(s->sample_row, batch);
	GET(s->sample_ids, batch);
	GET(s->sample_logprob, batch);
	GET(s->temperature, batch);
	GET(s->top_p, batch);
	GET(s->seeds, batch);
	GET(s->row_codes, batch);
	GET(s->seq_ok, batch);
	GET(e->hits, e->pages_max);
	GET(e->grants, e->pages_max);
	GET(e->seal_rets, e->pages_max);
	if (!rc)
		rc = get(e, &s->block, 1, s->block_bytes);
	return rc;
}

static int alloc_attn(struct eng_engine *e)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	u64 t = e->tokens_max, h = c->nr_q_heads;
	int rc = 0;

	if (c->arch == ENG_ARCH_MLA) {
		GET(a->q_a, t * c->q_rank);
		GET(a->q, t * h * (c->nope_dim + c->rope_dim));
		GET(a->q_nope, t * h * c->nope_dim);
		GET(a->q_lat, t * h * c->latent_dim);
		GET(a->q_abs, t * h * (c->latent_dim + c->rope_dim));
		GET(a->kv, t * (c->latent_dim + c->rope_dim));
		GET(a->latent, t * c->latent_dim);
		GET(a->k_rope, t * c->rope_dim);
		GET(a->attn, t * h * c->latent_dim);
		GET(a->attn_v, t * h * c->v_dim);
	} else {
		GET(a->q, t * h * c->head_dim);
		GET(a->k, t * c->nr_kv_heads * c->head_dim);
		GET(a->v, t * c->nr_kv_heads * c->head_dim);
		GET(a->attn, t * h * c->head_dim);
	}
	GET(a->cos_sin, (u64)e->opt.length_max * c->rope.dim);
	if (!rc)
		eng_rope_table(&c->rope, e->opt.length_max, a->cos_sin);
	return rc;
}

static int alloc_workspaces(struct eng_engine *e)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	struct kvk_attn_args attn = {
		.pages = e->pages,
		.batch = {.nr_requests = e->opt.batch_max,
			  .nr_tokens = e->tokens_max,
			  .q_len_max = e->tokens_max},
		.nr_q_heads = c->nr_q_heads,
		.act_dtype = KVK_F32,
	};
	struct kvk_moe_args moe = {
		.nr_tokens = e->tokens_max,
		.top_k = c->top_k,
		.act_dtype = KVK_F32,
	};
	int rc;

	a->attn_ws_bytes = e->ops->attn_workspace(&attn);
	for (u32 l = 0; l < c->nr_layers; l++) {
		if (!e->m->layers[l].is_moe)
			continue;
		moe.experts = e->m->layers[l].experts;
		a->moe_ws_bytes = KV_MAX(a->moe_ws_bytes, e->ops->moe_workspace(&moe));
	}
	rc = get(e, &a->attn_ws, 1, a->attn_ws_bytes);
	if (!rc)
		rc = get(e, &a->moe_ws, 1, a->moe_ws_bytes);
	return rc;
}

/** eng_buffers_alloc() - step arrays, activations, workspaces. Return: 0; -ENOMEM */
int eng_buffers_alloc(struct eng_engine *e)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	u64 t = e->tokens_max, rows = KV_MAX(ENG_LOGIT_ROWS, e->opt.batch_max);
	u32 inter = KV_MAX(c->dense_inter, c->shared_inter);
	int rc = alloc_step(e);

	GET(a->x, t * c->hidden);
	GET(a->h, t * c->hidden);
	GET(a->y, t * c->hidden);
	GET(a->gu, t * 2 * inter);
	GET(a->silu, t * inter);
	GET(a->router, t * c->nr_experts);
	GET(a->expert_ids, t * c->top_k);
	GET(a->expert_weights, t * c->top_k);
	GET(a->head_in, rows * c->hidden);
	GET(a->logits, rows * c->vocab);
	if (!rc)
		rc = alloc_attn(e);
	if (!rc)
		rc = alloc_workspaces(e);
	return rc;
}

void eng_buffers_free(struct eng_engine *e)
{
	struct chunk *c = e->arena;

	while (c) {
		struct chunk *next = c->next;

		free(c);
		c = next;
	}
	e->arena = NULL;
}
