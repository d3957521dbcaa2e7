/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ident.c - model_id: what makes two engines' pages interchangeable.
 *
 * BLAKE2b-256 over every number that a forward pass uses: the configuration and the
 * weights as they lie in memory. A directory that was quantised by kvquant and one
 * quantised on load by the same scheme have equal bits and therefore one id. Layers are
 * hashed in parallel.
 */
#include <errno.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include "engine/model/weights.h"

#define ID_BYTES KV_MODEL_ID_BYTES

struct hash {
	crypto_generichash_state st;
};

static void hash_start(struct hash *h)
{
	crypto_generichash_init(&h->st, NULL, 0, ID_BYTES);
}

static void hash_bytes(struct hash *h, const void *p, u64 bytes)
{
	u8 len[8];

	for (u32 i = 0; i < 8; i++)
		len[i] = (u8)(bytes >> (8 * i));
	crypto_generichash_update(&h->st, len, sizeof(len));
	if (bytes)
		crypto_generichash_update(&h->st, p, bytes);
}

static void hash_u32(struct hash *h, u32 v)
{
	u8 raw[4] = {(u8)v, (u8)(v >> 8), (u8)(v >> 16), (u8)(v >> 24)};

	crypto_generichash_update(&h->st, raw, sizeof(raw));
}

static void hash_double(struct hash *h, double v)
{
	hash_bytes(h, &v, sizeof(v));
}

static void hash_floats(struct hash *h, const float *v, u32 n)
{
	hash_bytes(h, v, v ? (u64)n * 4 : 0);
}

static void hash_weight(struct hash *h, const struct kvk_weight *w, u32 nr_batch)
{
	const u32 dims[] = {w->dtype, w->rows,	      w->cols,
			    w->group, w->scale_dtype, nr_batch};

	for (u32 i = 0; i < KV_ARRAY_SIZE(dims); i++)
		hash_u32(h, dims[i]);
	hash_bytes(h, w->data, w->data ? nr_batch * eng_weight_data_bytes(w) : 0);
	hash_bytes(h, w->scales, w->scales ? eng_weight_scale_bytes(w) : 0);
}

static void hash_experts(struct hash *h, const struct kvk_experts *e)
{
	const u32 dims[] = {e->dtype,	   e->group,  e->scale_dtype,
			    e->nr_experts, e->hidden, e->inter};
	const void *arrays[4] = {e->w13, e->w2, e->s13, e->s2};
	u64 bytes[4];

	eng_experts_bytes(e, bytes);
	for (u32 i = 0; i < KV_ARRAY_SIZE(dims); i++)
		hash_u32(h, dims[i]);
	for (u32 i = 0; i < 4; i++)
		hash_bytes(h, arrays[i], bytes[i]);
}

static void hash_config(struct hash *h, const struct eng_config *c)
{
	const u32 ints[] = {c->arch,
			    c->hidden,
			    c->nr_layers,
			    c->vocab,
			    c->nr_q_heads,
			    c->nr_kv_heads,
			    c->head_dim,
			    c->qk_norm,
			    c->qkv_bias,
			    c->q_rank,
			    c->latent_dim,
			    c->nope_dim,
			    c->rope_dim,
			    c->v_dim,
			    c->nr_dense,
			    c->dense_inter,
			    c->nr_experts,
			    c->top_k,
			    c->expert_inter,
			    c->shared_inter,
			    c->nr_groups,
			    c->top_groups,
			    c->norm_topk,
			    c->tie_embed,
			    c->rope.dim,
			    c->rope.yarn,
			    c->rope.interleaved,
			    c->rope.original_positions};
	const double reals[] = {(double)c->norm_eps, (double)c->latent_norm_eps,
				(double)c->sm_scale, (double)c->routed_scale,
				c->rope.theta,	     c->rope.factor,
				c->rope.beta_fast,   c->rope.beta_slow,
				c->rope.mscale,	     c->rope.mscale_all_dim};

	for (u32 i = 0; i < KV_ARRAY_SIZE(ints); i++)
		hash_u32(h, ints[i]);
	for (u32 i = 0; i < KV_ARRAY_SIZE(reals); i++)
		hash_double(h, reals[i]);
}

static void hash_layer(struct hash *h, const struct eng_config *c,
		       const struct eng_layer *y)
{
	const struct kvk_weight *plain[] = {&y->q_a,
					    &y->q_b,
					    &y->kv_a,
					    &y->q,
					    &y->k,
					    &y->v,
					    &y->o,
					    &y->dense.gate_up,
					    &y->dense.down,
					    &y->router,
					    &y->shared.gate_up,
					    &y->shared.down};
	u32 q_rows = c->nr_q_heads * c->head_dim, kv_rows = c->nr_kv_heads * c->head_dim;

	hash_floats(h, y->attn_norm, c->hidden);
	hash_floats(h, y->mlp_norm, c->hidden);
	hash_floats(h, y->q_a_norm, c->q_rank);
	hash_floats(h, y->kv_a_norm, c->latent_dim);
	hash_floats(h, y->q_bias, q_rows);
	hash_floats(h, y->k_bias, kv_rows);
	hash_floats(h, y->v_bias, kv_rows);
	hash_floats(h, y->q_norm, c->head_dim);
	hash_floats(h, y->k_norm, c->head_dim);
	hash_floats(h, y->router_bias, c->nr_experts);
	for (u32 i = 0; i < KV_ARRAY_SIZE(plain); i++)
		hash_weight(h, plain[i], 1);
	hash_weight(h, &y->w_uk_t, c->nr_q_heads);
	hash_weight(h, &y->w_uv, c->nr_q_heads);
	hash_u32(h, y->is_moe);
	if (y->is_moe)
		hash_experts(h, &y->experts);
}

int eng_model_hash(struct eng_model *m, struct eng_err *err)
{
	const struct eng_config *c = &m->config;
	u8(*digests)[ID_BYTES] = calloc(c->nr_layers, sizeof(*digests));
	struct hash h;

	if (!digests || sodium_init() < 0) {
		free(digests);
		return eng_refuse(err, -ENOMEM, "model id: out of memory");
	}
#pragma omp parallel for schedule(dynamic)
	for (u32 i = 0; i < c->nr_layers; i++) {
		struct hash hl;

		hash_start(&hl);
		hash_layer(&hl, c, &m->layers[i]);
		crypto_generichash_final(&hl.st, digests[i], ID_BYTES);
	}
	hash_start(&h);
	hash_config(&h, c);
	hash_weight(&h, &m->embed, 1);
	hash_weight(&h, &m->lm_head, 1);
	hash_floats(&h, m->final_norm, c->hidden);
	hash_bytes(&h, digests, (u64)c->nr_layers * ID_BYTES);
	crypto_generichash_final(&h.st, m->model_id, ID_BYTES);
	free(digests);
	return 0;
}
