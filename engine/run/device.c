/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c - a model's weights where the kernels want them.
 *
 * On the host those are the model's own arrays. Elsewhere every array is copied once;
 * INT4 experts are brought into the kernel's order on the way, one expert at a time, so
 * that nothing but one expert lies there twice.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/moe_cuda.h"

struct upload {
	struct eng_engine *e;
	u64 done;
	void *stage[4]; /* one INT4 expert in standard order: w13, w2, s13, s2 */
};

static int load(struct upload *u, void *dst, const void *src, u64 bytes)
{
	struct eng_engine *e = u->e;
	int rc = e->mem->ops->load(e->mem, dst, src, bytes);

	u->done += bytes;
	if (!rc && e->opt.progress)
		e->opt.progress(e->opt.progress_arg, KV_MIN(u->done, e->m->weight_bytes),
				e->m->weight_bytes);
	return rc;
}

/* The pointer at @p becomes that of a copy in device memory; NULL stays. */
static int put(struct upload *u, void *p, u64 bytes)
{
	const void *src;
	void *dst;
	int rc;

	memcpy(&src, p, sizeof(src));
	if (!src || !bytes)
		return 0;
	rc = u->e->mem->ops->alloc(u->e->mem, bytes, &dst);
	if (!rc)
		rc = load(u, dst, src, bytes);
	if (!rc)
		memcpy(p, &dst, sizeof(dst));
	return rc;
}

static int put_floats(struct upload *u, const float **p, u32 nr)
{
	return put(u, p, (u64)nr * sizeof(float));
}

static int put_weights(struct upload *u, struct kvk_weight *w, u32 nr)
{
	u64 data = w->data ? nr * eng_weight_data_bytes(w) : 0;
	u64 scales = w->scales ? nr * eng_weight_scale_bytes(w) : 0;
	int rc = put(u, &w->data, data);

	return rc ? rc : put(u, &w->scales, scales);
}

static int put_mlp(struct upload *u, struct eng_mlp *m)
{
	int rc = m->inter ? put_weights(u, &m->gate_up, 1) : 0;

	return rc || !m->inter ? rc : put_weights(u, &m->down, 1);
}

/* One expert through the staging buffers into its place. */
static int pack_expert(struct upload *u, const struct kvk_experts *x,
		       const u64 expert_bytes[4], u32 i, char *packed13, char *packed2)
{
	const void *from[4] = {x->w13, x->w2, x->s13, x->s2};
	struct eng_mem *m = u->e->mem;
	struct kvk_repack r = {
		.shape = *x,
		.w13 = u->stage[0],
		.w2 = u->stage[1],
		.s13 = u->stage[2],
		.s2 = u->stage[3],
		.packed13 = packed13 + i * m->ops->packed_bytes(x, 0),
		.packed2 = packed2 + i * m->ops->packed_bytes(x, 1),
	};
	int rc = 0;

	for (u32 k = 0; k < 4 && !rc; k++)
		rc = load(u, u->stage[k], (const char *)from[k] + i * expert_bytes[k],
			  expert_bytes[k]);
	return rc ? rc : m->ops->repack(m, &r);
}

static int pack_experts(struct upload *u, struct kvk_experts *x)
{
	struct eng_mem *m = u->e->mem;
	void *packed13, *packed2;
	u64 bytes[4];
	int rc = 0;

	eng_experts_bytes(x, bytes);
	for (u32 k = 0; k < 4; k++) {
		bytes[k] /= x->nr_experts;
		/* all layers' experts are of one shape */
		if (!rc && !u->stage[k])
			rc = m->ops->alloc(m, bytes[k], &u->stage[k]);
	}
	if (!rc)
		rc = m->ops->alloc(m, x->nr_experts * m->ops->packed_bytes(x, 0),
				   &packed13);
	if (!rc)
		rc = m->ops->alloc(m, x->nr_experts * m->ops->packed_bytes(x, 1),
				   &packed2);
	for (u32 i = 0; i < x->nr_experts && !rc; i++)
		rc = pack_expert(u, x, bytes, i, packed13, packed2);
	if (rc)
		return rc;
	x->order = KVK_ORDER_PACKED;
	x->w13 = packed13;
	x->w2 = packed2;
	x->s13 = NULL;
	x->s2 = NULL;
	return 0;
}

static int put_experts(struct upload *u, struct kvk_experts *x)
{
	u64 bytes[4];
	int rc;

	if (x->dtype == KVK_INT4 && u->e->mem->packs_int4)
		return pack_experts(u, x);
	eng_experts_bytes(x, bytes);
	rc = put(u, &x->w13, bytes[0]);
	if (!rc)
		rc = put(u, &x->w2, bytes[1]);
	if (!rc)
		rc = put(u, &x->s13, bytes[2]);
	return rc ? rc : put(u, &x->s2, bytes[3]);
}

static int put_attn(struct upload *u, struct eng_layer *l)
{
	const struct eng_config *c = &u->e->m->config;
	struct kvk_weight *mats[] = {&l->q_a, &l->q_b, &l->kv_a, &l->q,
				     &l->k,   &l->v,   &l->o};
	int rc = 0;

	for (u32 i = 0; i < KV_ARRAY_SIZE(mats) && !rc; i++)
		rc = put_weights(u, mats[i], 1);
	if (!rc)
		rc = put_weights(u, &l->w_uk_t, c->nr_q_heads);
	if (!rc)
		rc = put_weights(u, &l->w_uv, c->nr_q_heads);
	if (!rc)
		rc = put_floats(u, &l->q_a_norm, c->q_rank);
	if (!rc)
		rc = put_floats(u, &l->kv_a_norm, c->latent_dim);
	if (!rc)
		rc = put_floats(u, &l->q_bias, c->nr_q_heads * c->head_dim);
	if (!rc)
		rc = put_floats(u, &l->k_bias, c->nr_kv_heads * c->head_dim);
	if (!rc)
		rc = put_floats(u, &l->v_bias, c->nr_kv_heads * c->head_dim);
	if (!rc)
		rc = put_floats(u, &l->q_norm, c->head_dim);
	return rc ? rc : put_floats(u, &l->k_norm, c->head_dim);
}

static int put_layer(struct upload *u, struct eng_layer *l)
{
	const struct eng_config *c = &u->e->m->config;
	int rc = put_floats(u, &l->attn_norm, c->hidden);

	if (!rc)
		rc = put_floats(u, &l->mlp_norm, c->hidden);
	if (!rc)
		rc = put_attn(u, l);
	if (!rc && !l->is_moe)
		return put_mlp(u, &l->dense);
	if (!rc)
		rc = put_weights(u, &l->router, 1);
	if (!rc)
		rc = put_floats(u, &l->router_bias, c->nr_experts);
	if (!rc)
		rc = put_experts(u, &l->experts);
	return rc ? rc : put_mlp(u, &l->shared);
}

/**
 * eng_weights_place() - fill e->w
 *
 * Context: e->mem is open; may take as long as reading the model does.
 * Return: 0; -ENOMEM; -EIO.
 */
int eng_weights_place(struct eng_engine *e)
{
	const struct eng_model *m = e->m;
	struct upload u = {.e = e};
	bool tied = m->lm_head.data == m->embed.data;
	int rc = 0;

	e->w = (struct eng_placed){
		.layers = m->layers,
		.embed = m->embed,
		.lm_head = m->lm_head,
		.final_norm = m->final_norm,
	};
	if (!e->mem->separate || e->opt.placed)
		return 0;
	e->own_layers = calloc(m->config.nr_layers, sizeof(*e->own_layers));
	if (!e->own_layers)
		return -ENOMEM;
	memcpy(e->own_layers, m->layers, m->config.nr_layers * sizeof(*e->own_layers));
	e->w.layers = e->own_layers;
	rc = put_weights(&u, &e->w.embed, 1);
	for (u32 i = 0; i < m->config.nr_layers && !rc; i++)
		rc = put_layer(&u, &e->own_layers[i]);
	if (!rc)
		rc = put_floats(&u, &e->w.final_norm, m->config.hidden);
	if (!rc && tied)
		e->w.lm_head = e->w.embed;
	else if (!rc)
		rc = put_weights(&u, &e->w.lm_head, 1);
	return rc ? rc : e->mem->ops->sync(e->mem);
}
