/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rank_model.c - true shapes of one rank, random weights.
 *
 * Heads, inner sizes of experts and MLPs and the vocabulary are divided by the number of ranks;
 * q_a, kv_a, the router and the norms are on each rank whole. Values are scaled so that a matrix
 * keeps the size of what it gets; INT4 experts are made in the checkpoint's order and go
 * through the same repack as a loaded model's. One thread.
 */
#include "rank.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/moe_cuda.h"
#include "rank_fill.h"

/* A whole model. */
struct preset {
	const char *name;
	u32 hidden, layers, dense, vocab;
	u32 heads, q_rank, nope, v_dim;
	u32 dense_inter, experts, top_k, inter, group;
	float routed_scale;
	const char *left_out;
};

static const struct preset presets[] = {
	{"kimi-k2.6", 7168, 61, 1, 163840, 64, 1536, 128, 128, 18432, 384, 8, 2048, 32,
	 2.827f, "collectives between ranks"},
	{"glm-5.2", 6144, 78, 3, 154880, 64, 2048, 192, 256, 12288, 256, 8, 2048, 128,
	 2.5f,
	 "collectives between ranks; the sparse indexer: attention is over all tokens"},
	{"tiny", 256, 3, 1, 4096, 16, 96, 32, 32, 1024, 16, 4, 1024, 32, 2.5f,
	 "collectives between ranks"},
};

static const struct preset *preset_find(const char *name)
{
	for (size_t i = 0; i < KV_ARRAY_SIZE(presets); i++)
		if (!strcmp(name, presets[i].name))
			return &presets[i];
	return NULL;
}

const char *rank_model_left_out(const char *name)
{
	const struct preset *p = preset_find(name);

	return p ? p->left_out : "";
}

/* State of one rank_model_open(). */
struct maker {
	struct rank_model *r;
	u64 seed;
	u32 matrix;	/* dtype of attention and MLP matrices */
	void *stage[4]; /* one INT4 expert: w13, w2, s13, s2 */
	int rc;		/* of the first failure */
};

static void *get(struct maker *k, u64 bytes)
{
	void *p = NULL;

	if (!k->rc)
		k->rc = k->r->mem->ops->alloc(k->r->mem, bytes, &p);
	k->r->m.weight_bytes += bytes;
	return p;
}

static void fill(struct maker *k, u32 kind, void *dst, u64 n, float a, float b)
{
	struct rank_fill f = {
		.dst = dst, .n = n, .seed = k->seed++, .kind = kind, .a = a, .b = b};

	if (!k->rc)
		k->rc = rank_fill(k->r->mem, &f);
}

static struct kvk_weight matrix(struct maker *k, u32 dtype, u32 nr, u32 rows, u32 cols)
{
	struct kvk_weight w = {.dtype = dtype, .rows = rows, .cols = cols};
	const u64 n = (u64)nr * rows * cols;
	const float size = 1.0f / sqrtf((float)cols);
	void *data = get(k, n * (dtype == KVK_BF16 ? 2 : 1)), *scales;

	w.data = data;
	if (dtype == KVK_BF16) {
		fill(k, RANK_BF16, data, n, 0, size);
		return w;
	}
	scales = get(k, nr * eng_weight_scale_bytes(&w));
	w.scales = scales;
	fill(k, RANK_E4M3, data, n, 0, 0);
	fill(k, RANK_F32, scales, nr * eng_weight_scale_bytes(&w) / 4, size * 0.75f / 112,
	     size * 1.25f / 112);
	return w;
}

static const float *vector(struct maker *k, u32 n, float a, float b)
{
	float *v = get(k, (u64)n * sizeof(*v));

	fill(k, RANK_F32, v, n, a, b);
	return v;
}

static struct eng_mlp mlp(struct maker *k, u32 hidden, u32 inter)
{
	struct eng_mlp m = {.inter = inter};

	m.gate_up = matrix(k, k->matrix, 1, 2 * inter, hidden);
	m.down = matrix(k, k->matrix, 1, hidden, inter);
	return m;
}

/* q has a deviation of 4.2. */
static void int4_fill(struct maker *k, void *words, void *scales, u64 n, u32 cols,
		      u32 group)
{
	const float s = 1.0f / sqrtf((float)cols) / 4.2f;

	fill(k, RANK_INT4, words, n / 8, 0, 0);
	fill(k, RANK_BF16_UNIFORM, scales, n / group, s * 0.75f, s * 1.25f);
}

/* Standard order, as a checkpoint has it. */
static void experts_standard(struct maker *k, struct kvk_experts *x)
{
	const u64 n = (u64)x->nr_experts * x->hidden * x->inter;
	void *p[4];
	u64 bytes[4];

	eng_experts_bytes(x, bytes);
	for (u32 i = 0; i < 4; i++)
		p[i] = get(k, bytes[i]);
	x->w13 = p[0];
	x->w2 = p[1];
	x->s13 = p[2];
	x->s2 = p[3];
	if (x->dtype == KVK_INT4) {
		int4_fill(k, p[0], p[2], 2 * n, x->hidden, x->group);
		int4_fill(k, p[1], p[3], n, x->inter, x->group);
		return;
	}
	fill(k, RANK_E4M3, p[0], 2 * n, 0, 0);
	fill(k, RANK_E4M3, p[1], n, 0, 0);
	for (u32 i = 0; i < 2; i++) {
		const float s = 1.0f / sqrtf((float)(i ? x->inter : x->hidden)) / 112;

		fill(k, RANK_F32, p[2 + i], bytes[2 + i] / 4, s * 0.75f, s * 1.25f);
	}
}

/* The GPU kernel's order, through one expert's staging. */
static void experts_packed(struct maker *k, struct kvk_experts *x)
{
	const struct eng_mem_ops *ops = k->r->mem->ops;
	const u64 b13 = ops->packed_bytes(x, 0), b2 = ops->packed_bytes(x, 1);
	const u64 n = (u64)x->hidden * x->inter;
	u8 *w13 = get(k, x->nr_experts * b13), *w2 = get(k, x->nr_experts * b2);
	u64 bytes[4];

	eng_experts_bytes(x, bytes);
	for (u32 i = 0; i < 4; i++)
		if (!k->stage[i] && !k->rc)
			k->rc = ops->alloc(k->r->mem, bytes[i] / x->nr_experts,
					   &k->stage[i]);
	for (u32 i = 0; i < x->nr_experts && !k->rc; i++) {
		struct kvk_repack r = {.shape = *x,
				       .w13 = k->stage[0],
				       .w2 = k->stage[1],
				       .s13 = k->stage[2],
				       .s2 = k->stage[3],
				       .packed13 = w13 + i * b13,
				       .packed2 = w2 + i * b2};

		int4_fill(k, k->stage[0], k->stage[2], 2 * n, x->hidden, x->group);
		int4_fill(k, k->stage[1], k->stage[3], n, x->inter, x->group);
		if (!k->rc)
			k->rc = ops->repack(k->r->mem, &r);
	}
	x->order = KVK_ORDER_PACKED;
	x->w13 = w13;
	x->w2 = w2;
}

static void attention(struct maker *k, struct eng_layer *l)
{
	const struct eng_config *c = &k->r->m.config;
	const u32 heads = c->nr_q_heads, latent = c->latent_dim;

	l->q_a = matrix(k, k->matrix, 1, c->q_rank, c->hidden);
	l->q_b = matrix(k, k->matrix, 1, heads * (c->nope_dim + c->rope_dim), c->q_rank);
	l->kv_a = matrix(k, k->matrix, 1, latent + c->rope_dim, c->hidden);
	l->w_uk_t = matrix(k, KVK_BF16, heads, latent, c->nope_dim);
	l->w_uv = matrix(k, KVK_BF16, heads, c->v_dim, latent);
	l->o = matrix(k, k->matrix, 1, c->hidden, heads * c->v_dim);
	l->q_a_norm = vector(k, c->q_rank, 0.9f, 1.1f);
	l->kv_a_norm = vector(k, latent, 0.9f, 1.1f);
	l->attn_norm = vector(k, c->hidden, 0.9f, 1.1f);
	l->mlp_norm = vector(k, c->hidden, 0.9f, 1.1f);
}

static void layer(struct maker *k, struct eng_layer *l, u32 index, u32 weights, u32 group)
{
	const struct eng_config *c = &k->r->m.config;

	attention(k, l);
	l->is_moe = index >= c->nr_dense;
	if (!l->is_moe) {
		l->dense = mlp(k, c->hidden, c->dense_inter);
		return;
	}
	l->router = matrix(k, KVK_BF16, 1, c->nr_experts, c->hidden);
	l->router_bias = vector(k, c->nr_experts, -0.05f, 0.05f);
	l->shared = mlp(k, c->hidden, c->shared_inter);
	l->experts =
		(struct kvk_experts){.dtype = weights,
				     .group = weights == KVK_INT4 ? group : 0,
				     .scale_dtype = weights == KVK_INT4 ? KVK_BF16 : 0,
				     .nr_experts = c->nr_experts,
				     .hidden = c->hidden,
				     .inter = c->expert_inter};
	if (weights == KVK_INT4 && k->r->mem->packs_int4)
		experts_packed(k, &l->experts);
	else
		experts_standard(k, &l->experts);
}

static void config_fill(struct eng_config *c, const struct preset *p, u32 tp)
{
	*c = (struct eng_config){
		.arch = ENG_ARCH_MLA,
		.hidden = p->hidden,
		.nr_layers = p->layers,
		.vocab = p->vocab / tp,
		.max_positions = 262144,
		.norm_eps = 1e-5f,
		.nr_q_heads = p->heads / tp,
		.q_rank = p->q_rank,
		.latent_dim = 512,
		.nope_dim = p->nope,
		.rope_dim = 64,
		.v_dim = p->v_dim,
		.latent_norm_eps = 1e-6f,
		.sm_scale = 1.0f / sqrtf((float)(p->nope + 64)),
		.nr_dense = p->dense,
		.dense_inter = p->dense_inter / tp,
		.nr_experts = p->experts,
		.top_k = p->top_k,
		.expert_inter = p->inter / tp,
		.shared_inter = p->inter / tp,
		.nr_groups = 1,
		.top_groups = 1,
		.norm_topk = true,
		.routed_scale = p->routed_scale,
		.bos = -1,
		.rope = {.theta = 50000, .dim = 64, .interleaved = true},
	};
}

int rank_model_open(struct rank_model *r, const char *name, u32 tp, u32 weights,
		    struct eng_mem *mem, struct eng_err *err)
{
	const struct preset *p = preset_find(name);
	struct maker k = {
		.r = r, .seed = 1, .matrix = weights == KVK_INT4 ? KVK_BF16 : KVK_E4M3};
	struct eng_model *m = &r->m;
	float *scales;

	if (!p)
		return eng_refuse(err, -EINVAL, "--preset %s: kimi-k2.6, glm-5.2 or tiny",
				  name);
	if (tp != 1 && tp != 2 && tp != 4 && tp != 8)
		return eng_refuse(err, -EINVAL, "--tp %u: 1, 2, 4 or 8", tp);
	memset(r, 0, sizeof(*r));
	r->mem = mem;
	config_fill(&m->config, p, tp);
	m->layers = calloc(p->layers, sizeof(*m->layers));
	scales = calloc(p->layers, sizeof(*scales));
	m->kv_scales = scales;
	m->nr_kv_scales = p->layers;
	if (!m->layers || !scales) {
		rank_model_close(r);
		return eng_refuse(err, -ENOMEM, "out of memory");
	}
	for (u32 i = 0; i < p->layers; i++) {
		scales[i] = 0.006f + 0.00001f * (float)i;
		layer(&k, &m->layers[i], i, weights, p->group);
	}
	m->embed = matrix(&k, KVK_BF16, 1, m->config.vocab, p->hidden);
	/* tokens differ by as much as a layer adds */
	fill(&k, RANK_BF16, (void *)(uintptr_t)m->embed.data,
	     (u64)m->config.vocab * p->hidden, 0, 1);
	m->lm_head = matrix(&k, KVK_BF16, 1, m->config.vocab, p->hidden);
	m->final_norm = vector(&k, p->hidden, 0.9f, 1.1f);
	/* another preset, another layout: pages are never shared between two of them */
	snprintf((char *)m->model_id, sizeof(m->model_id), "rank %s %u", name, tp);
	if (!k.rc)
		k.rc = mem->ops->sync(mem);
	if (k.rc) {
		rank_model_close(r);
		return eng_refuse(err, k.rc, "%s, %u ranks: %.1f GB of weights: %s", name,
				  tp, (double)m->weight_bytes / 1e9, strerror(-k.rc));
	}
	return 0;
}

void rank_model_close(struct rank_model *r)
{
	free(r->m.layers);
	free((void *)(uintptr_t)r->m.kv_scales);
	memset(r, 0, sizeof(*r));
}
