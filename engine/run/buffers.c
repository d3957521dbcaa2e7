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

/* Device memory for @nr values of the activations' dtype, or of @size bytes. */
static int get_dev(struct eng_engine *e, void *ret_ptr, u64 nr, u64 size)
{
	void *p;
	u64 bytes;
	int rc;

	if (__builtin_mul_overflow(nr, size, &bytes))
		return -ENOMEM;
	rc = e->mem->ops->alloc(e->mem, bytes, &p);
	if (!rc)
		memcpy(ret_ptr, &p, sizeof(p));
	return rc;
}

#define GET_ACT(field_, nr_)                                            \
	do {                                                            \
		if (!rc)                                                \
			rc = get_dev(e, &(field_), (nr_),               \
				     eng_act_bytes(e->mem->act_dtype)); \
	} while (0)

#define GET_DEV(field_, nr_)                                                  \
	do {                                                                  \
		if (!rc)                                                      \
			rc = get_dev(e, &(field_), (nr_), sizeof(*(field_))); \
	} while (0)

static size_t take(char *base, size_t at, void *ret_ptr, u64 bytes)
{
	char *p = base ? base + at : NULL;

	memcpy(ret_ptr, &p, sizeof(p));
	return kv_round_up(at + bytes, ALIGN);
}

#define TAKE(field_, nr_) (at = take(base, at, &(field_), (u64)(nr_) * sizeof(*(field_))))

/* What both sides see of a step. Return: its size; with @base NULL nothing but that. */
static size_t place_shared(struct eng_engine *e, char *base)
{
	struct eng_step *s = &e->step;
	u64 batch = e->opt.batch_max;
	size_t at = 0;

	TAKE(s->number_arg, 1);
	TAKE(s->row_start, s->cap + 1);
	TAKE(s->lengths, s->cap);
	TAKE(s->nonces, s->cap);
	for (u32 g = 0; g < ENG_GROUP_NR; g++)
		TAKE(s->view[g].row_start, batch + 1);
	TAKE(s->q_start, batch + 1);
	TAKE(s->zero_q, s->cap + 1);
	TAKE(s->ids, e->tokens_max);
	TAKE(s->positions, e->tokens_max);
	TAKE(s->targets, e->tokens_max);
	TAKE(s->copy_tokens, batch);
	TAKE(s->sample_row, batch);
	TAKE(s->temperature, batch);
	TAKE(s->top_p, batch);
	TAKE(s->seeds, batch);
	s->out_first = at;
	TAKE(s->verdicts, s->cap);
	TAKE(s->nan_count, 1);
	s->in_bytes = at;
	TAKE(s->sample_ids, batch);
	TAKE(s->sample_logprob, batch);
	TAKE(s->crc, s->crc_max);
	TAKE(s->target_logprobs, e->tokens_max);
	s->out_end = at;
	at = take(base, at, &s->block, s->block_bytes);
	TAKE(s->rows, s->cap_rows);
	return at;
}

static int alloc_shared(struct eng_engine *e)
{
	size_t bytes = place_shared(e, NULL);
	void *host, *dev, *kept;
	int rc = e->mem->ops->alloc_host(e->mem, bytes, &host);

	if (rc)
		return rc;
	dev = host;
	if (e->mem->separate)
		rc = e->mem->ops->alloc(e->mem, bytes, &dev);
	if (rc)
		return rc;
	place_shared(e, host);
	if (e->mem->separate) {
		rc = e->mem->ops->alloc_host(e->mem, e->m->config.vocab * sizeof(float),
					     &kept);
		e->kept_logits = kept;
	}
	if (rc)
		return rc;
	e->step.shared = host;
	e->step.delta = (char *)dev - (char *)host;
	return 0;
}

static int alloc_step(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	u64 batch = e->opt.batch_max;
	u64 written = e->tokens_max / KV_PAGE_TOKENS + 2 * batch;
	int rc = 0;

	s->crc_max = (u32)written;
	s->cap = (u32)(5 * batch);
	s->cap_rows = (u32)(batch * e->pages_max + 4 * written + 2 * batch);
	rc = alloc_shared(e);
	GET(s->owner, s->cap);
	GET(s->seqs, batch);
	GET(s->crc_first, batch);
	GET(s->crc_nr, batch);
	GET(s->sample_seq, batch);
	GET(s->row_codes, batch);
	GET(s->seq_ok, batch);
	GET(e->hits, e->pages_max);
	GET(e->grants, e->pages_max);
	GET(e->seal_rets, e->pages_max);
	return rc;
}

static int alloc_rope(struct eng_engine *e)
{
	const struct eng_rope *r = &e->m->config.rope;
	u64 nr = (u64)e->opt.length_max * r->dim;
	float *table = calloc(nr, sizeof(*table));
	int rc;

	if (!table)
		return -ENOMEM;
	eng_rope_table(r, e->opt.length_max, table);
	rc = get_dev(e, &e->act.cos_sin, nr, sizeof(*table));
	if (!rc)
		rc = e->mem->ops->load(e->mem, e->act.cos_sin, table,
				       nr * sizeof(*table));
	free(table);
	return rc;
}

static int alloc_attn(struct eng_engine *e)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	u64 t = e->tokens_max, h = c->nr_q_heads;
	int rc = 0;

	if (c->arch == ENG_ARCH_MLA) {
		GET_ACT(a->q_a, t * c->q_rank);
		GET_ACT(a->q, t * h * (c->nope_dim + c->rope_dim));
		GET_ACT(a->q_abs, t * h * (c->latent_dim + c->rope_dim));
		GET_ACT(a->kv, t * (c->latent_dim + c->rope_dim));
		GET_ACT(a->latent, t * c->latent_dim);
		GET_ACT(a->k_rope, t * c->rope_dim);
		GET_ACT(a->attn, t * h * c->latent_dim);
		GET_ACT(a->attn_v, t * h * c->v_dim);
	} else {
		GET_ACT(a->q, t * h * c->head_dim);
		GET_ACT(a->k, t * c->nr_kv_heads * c->head_dim);
		GET_ACT(a->v, t * c->nr_kv_heads * c->head_dim);
		GET_ACT(a->attn, t * h * c->head_dim);
	}
	return rc ? rc : alloc_rope(e);
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
		.act_dtype = e->mem->act_dtype,
	};
	struct kvk_moe_args moe = {
		.nr_tokens = e->tokens_max,
		.top_k = c->top_k,
		.act_dtype = e->mem->act_dtype,
	};
	size_t bytes;
	int rc;

	/* one workspace for all kinds of steps */
	a->attn_ws_bytes = e->ops->attn_workspace(&attn);
	for (attn.batch.q_len_max = 1; attn.batch.q_len_max <= 4; attn.batch.q_len_max++)
		a->attn_ws_bytes =
			KV_MAX(a->attn_ws_bytes, e->ops->attn_workspace(&attn));
	for (u32 l = 0; l < c->nr_layers; l++) {
		if (!e->w.layers[l].is_moe)
			continue;
		moe.experts = e->w.layers[l].experts;
		bytes = e->ops->moe_workspace(&moe);
		if (bytes == 0 && e->opt.device == ENG_DEVICE_CUDA)
			return -ENOTSUP; /* a shape that is not built */
		a->moe_ws_bytes = KV_MAX(a->moe_ws_bytes, bytes);
	}
	rc = get_dev(e, &a->attn_ws, 1, a->attn_ws_bytes);
	if (!rc)
		rc = get_dev(e, &a->moe_ws, 1, a->moe_ws_bytes);
	return rc;
}

/** eng_buffers_alloc() - step arrays, activations, workspaces. Return: 0; -ENOMEM; -EIO;
 * -ENOTSUP the device's kernels are not built for the experts' shape */
int eng_buffers_alloc(struct eng_engine *e)
{
	const struct eng_config *c = &e->m->config;
	struct eng_act *a = &e->act;
	u64 t = e->tokens_max, rows = KV_MAX(ENG_LOGIT_ROWS, e->opt.batch_max);
	u32 inter = KV_MAX(c->dense_inter, c->shared_inter);
	int rc = alloc_step(e);

	GET_ACT(a->x, t * c->hidden);
	GET_ACT(a->h, t * c->hidden);
	GET_ACT(a->y, t * c->hidden);
	GET_ACT(a->gu, t * 2 * inter);
	GET_ACT(a->silu, t * inter);
	GET_DEV(a->router, t * c->nr_experts);
	if (c->shared_inter)
		GET_DEV(a->routed, t * c->hidden);
	GET_DEV(a->expert_ids, t * c->top_k);
	GET_DEV(a->expert_weights, t * c->top_k);
	GET_ACT(a->head_in, rows * c->hidden);
	GET_DEV(a->logits, rows * c->vocab);
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
