/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layers.c - which tensors a layer of each architecture has (weights.h).
 *
 * One thread; experts are brought into the kernels' form in parallel.
 */
#include "engine/model/weights.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/fp8.h"

/* ----------------------------------------------------------------- attention */

/*
 * kv_b_proj [heads][nope + v][latent] holds W_UK and W_UV of each head. Attention works
 * on latents, so queries go through W_UK transposed and outputs through W_UV. Moving BF16
 * values is exact; an FP8 kv_b_proj is dequantised and rounded to BF16.
 */
static int absorb_kv_b(struct eng_loader *l, struct eng_wname name, struct eng_layer *y)
{
	const struct eng_config *c = &l->m->config;
	u32 per_head = c->nope_dim + c->v_dim;
	bool f32;
	struct eng_source s = {0};
	float *x;
	int r;

	r = eng_load_find(l, name.text, c->nr_q_heads * per_head, c->latent_dim, &s);
	if (r)
		return r;
	if (l->check_only)
		return 0;
	f32 = l->scheme == ENG_WEIGHTS_F32 || s.dtype == KVK_F32;
	y->w_uk_t = (struct kvk_weight){.dtype = f32 ? KVK_F32 : KVK_BF16,
					.rows = c->latent_dim,
					.cols = c->nope_dim};
	y->w_uv = (struct kvk_weight){.dtype = f32 ? KVK_F32 : KVK_BF16,
				      .rows = c->v_dim,
				      .cols = c->latent_dim};
	y->w_uk_t.data = eng_arena_alloc(
		l->m->arena, c->nr_q_heads * eng_weight_data_bytes(&y->w_uk_t));
	y->w_uv.data = eng_arena_alloc(l->m->arena,
				       c->nr_q_heads * eng_weight_data_bytes(&y->w_uv));
	x = malloc((size_t)per_head * c->latent_dim * sizeof(*x));
	if (!y->w_uk_t.data || !y->w_uv.data || !x) {
		free(x);
		return eng_load_no_memory(l, name.text);
	}
	for (u32 h = 0; h < c->nr_q_heads; h++) {
		size_t uk = (size_t)h * c->latent_dim * c->nope_dim;
		size_t uv = (size_t)h * c->v_dim * c->latent_dim;

		eng_source_rows(&s, h * per_head, per_head, x);
		for (u32 i = 0; i < per_head; i++) {
			for (u32 k = 0; k < c->latent_dim; k++) {
				bool is_k = i < c->nope_dim;
				size_t at = is_k ? uk + (size_t)k * c->nope_dim + i
						 : uv +
							    (size_t)(i - c->nope_dim) *
								    c->latent_dim +
							    k;
				void *to = eng_writable(
					is_k ? y->w_uk_t.data : y->w_uv.data, 0);
				float value = x[(size_t)i * c->latent_dim + k];

				if (f32)
					((float *)to)[at] = value;
				else
					((u16 *)to)[at] = kvk_f32_to_bf16(value);
			}
		}
	}
	free(x);
	return 0;
}

static int load_mla(struct eng_loader *l, u32 i, struct eng_layer *y)
{
	const struct eng_config *c = &l->m->config;
	struct eng_wname at = eng_wname(l, "model.layers.%u.self_attn", i);
	u32 q_rows = c->nr_q_heads * (c->nope_dim + c->rope_dim);
	const char *p = at.text + strlen(l->prefix);
	int r = 0;

	if (!r)
		r = eng_load_matrix(l, ENG_CLASS_MATRIX, eng_wname(l, "%s.q_a_proj", p),
				    c->q_rank, c->hidden, &y->q_a);
	if (!r)
		r = eng_load_vector(l, eng_wname(l, "%s.q_a_layernorm.weight", p),
				    c->q_rank, &y->q_a_norm);
	if (!r)
		r = eng_load_matrix(l, ENG_CLASS_MATRIX, eng_wname(l, "%s.q_b_proj", p),
				    q_rows, c->q_rank, &y->q_b);
	if (!r)
		r = eng_load_matrix(l, ENG_CLASS_MATRIX,
				    eng_wname(l, "%s.kv_a_proj_with_mqa", p),
				    c->latent_dim + c->rope_dim, c->hidden, &y->kv_a);
	if (!r)
		r = eng_load_vector(l, eng_wname(l, "%s.kv_a_layernorm.weight", p),
				    c->latent_dim, &y->kv_a_norm);
	r = r ?: absorb_kv_b(l, eng_wname(l, "%s.kv_b_proj", p), y);
	if (!r)
		r = eng_load_matrix(l, ENG_CLASS_MATRIX, eng_wname(l, "%s.o_proj", p),
				    c->hidden, c->nr_q_heads * c->v_dim, &y->o);
	return r;
}

static int load_gqa(struct eng_loader *l, u32 i, struct eng_layer *y)
{
	const struct eng_config *c = &l->m->config;
	u32 q_rows = c->nr_q_heads * c->head_dim, kv_rows = c->nr_kv_heads * c->head_dim;
	struct {
		const char *name;
		u32 rows;
		struct kvk_weight *w;
		const float **bias;
	} proj[] = {
		{"q", q_rows, &y->q, &y->q_bias},
		{"k", kv_rows, &y->k, &y->k_bias},
		{"v", kv_rows, &y->v, &y->v_bias},
	};
	int r = 0;

	for (u32 n = 0; n < KV_ARRAY_SIZE(proj) && !r; n++) {
		r = eng_load_matrix(l, ENG_CLASS_MATRIX,
				    eng_wname(l, "model.layers.%u.self_attn.%s_proj", i,
					      proj[n].name),
				    proj[n].rows, c->hidden, proj[n].w);
		if (!r && c->qkv_bias)
			r = eng_load_vector(
				l,
				eng_wname(l, "model.layers.%u.self_attn.%s_proj.bias", i,
					  proj[n].name),
				proj[n].rows, proj[n].bias);
	}
	if (c->qk_norm) {
		if (!r)
			r = eng_load_vector(
				l,
				eng_wname(l, "model.layers.%u.self_attn.q_norm.weight",
					  i),
				c->head_dim, &y->q_norm);
		if (!r)
			r = eng_load_vector(
				l,
				eng_wname(l, "model.layers.%u.self_attn.k_norm.weight",
					  i),
				c->head_dim, &y->k_norm);
	}
	if (!r)
		r = eng_load_matrix(l, ENG_CLASS_MATRIX,
				    eng_wname(l, "model.layers.%u.self_attn.o_proj", i),
				    c->hidden, q_rows, &y->o);
	return r;
}

/* ----------------------------------------------------------------------- MLP */

static int load_mlp(struct eng_loader *l, u32 i, const char *part, u32 inter,
		    struct eng_mlp *ret)
{
	int r;

	r = eng_load_gate_up(l, eng_wname(l, "model.layers.%u.%s.gate_proj", i, part),
			     eng_wname(l, "model.layers.%u.%s.up_proj", i, part), inter,
			     &ret->gate_up);
	if (!r)
		r = eng_load_matrix(l, ENG_CLASS_MATRIX,
				    eng_wname(l, "model.layers.%u.%s.down_proj", i, part),
				    l->m->config.hidden, inter, &ret->down);
	ret->inter = inter;
	return r;
}

/* Sources of all experts, [nr_experts][gate, up, down], of one dtype. */
static int find_experts(struct eng_loader *l, u32 layer, struct eng_source *s,
			struct kvk_experts *e)
{
	static const char *const parts[] = {"gate", "up", "down"};
	u32 dtype = 0, group = 0;
	int r = 0;

	for (u32 n = 0; n < e->nr_experts * 3; n++) {
		bool down = n % 3 == 2;
		struct eng_wname name =
			eng_wname(l, "model.layers.%u.mlp.experts.%u.%s_proj", layer,
				  n / 3, parts[n % 3]);

		r = eng_load_find(l, name.text, down ? e->hidden : e->inter,
				  down ? e->inter : e->hidden, &s[n]);
		r = r ?: eng_load_dtype(l, ENG_CLASS_EXPERT, &s[n], &dtype, &group);
		if (r)
			return r;
		if (s[n].dtype != s[0].dtype || s[n].scale_dtype != s[0].scale_dtype)
			return eng_refuse(
				l->err, -EINVAL,
				"%s: tensor %.150s differs in dtype from %.150s",
				s[n].file, s[n].name, s[0].name);
		e->dtype = dtype;
		e->group = group;
	}
	e->scale_dtype = e->dtype != KVK_INT4	  ? 0
			 : s[0].dtype == KVK_INT4 ? s[0].scale_dtype
						  : KVK_BF16;
	return 0;
}

/* Matrix @n of find_experts()' list to its place. */
static int put_expert(const struct eng_source *s, const struct kvk_experts *e,
		      const u64 bytes[4], u32 n)
{
	u32 x = n / 3, part = n % 3, nr = e->nr_experts;

	if (part == 2)
		return eng_source_put(s, e->dtype, e->group,
				      eng_writable(e->w2, x * (bytes[1] / nr)),
				      eng_writable(e->s2, x * (bytes[3] / nr)));
	return eng_source_put(
		s, e->dtype, e->group,
		eng_writable(e->w13, (2 * (u64)x + part) * (bytes[0] / nr / 2)),
		eng_writable(e->s13, (2 * (u64)x + part) * (bytes[2] / nr / 2)));
}

static int load_experts(struct eng_loader *l, u32 layer, struct kvk_experts *e)
{
	const struct eng_config *c = &l->m->config;
	struct eng_source *s = calloc((size_t)c->nr_experts * 3, sizeof(*s));
	const void **arrays[4] = {&e->w13, &e->w2, &e->s13, &e->s2};
	u32 failed = UINT32_MAX;
	u64 bytes[4];
	int r, code = 0;

	if (!s)
		return eng_load_no_memory(l, "experts");
	e->nr_experts = c->nr_experts;
	e->hidden = c->hidden;
	e->inter = c->expert_inter;
	r = find_experts(l, layer, s, e);
	if (r || l->check_only)
		goto free_s;
	eng_experts_bytes(e, bytes);
	for (u32 i = 0; i < 4 && !r; i++) {
		*arrays[i] = bytes[i] ? eng_arena_alloc(l->m->arena, bytes[i]) : NULL;
		if (bytes[i] && !*arrays[i])
			r = eng_load_no_memory(l, "experts");
		l->m->expert_bytes += bytes[i];
	}
	if (r)
		goto free_s;
#pragma omp parallel for schedule(dynamic)
	for (u32 n = 0; n < e->nr_experts * 3; n++) {
		int rn = put_expert(&s[n], e, bytes, n);

		if (rn) {
#pragma omp critical(load_experts_failed)
			{
				failed = KV_MIN(failed, n);
				code = rn;
			}
		}
	}
	if (code)
		r = eng_load_put_failed(l, &s[failed], code);
free_s:
	free(s);
	return r;
}

static int load_moe(struct eng_loader *l, u32 i, struct eng_layer *y)
{
	const struct eng_config *c = &l->m->config;
	int r;

	y->is_moe = true;
	r = eng_load_matrix(l, ENG_CLASS_PLAIN,
			    eng_wname(l, "model.layers.%u.mlp.gate", i), c->nr_experts,
			    c->hidden, &y->router);
	if (!r)
		r = eng_load_vector(
			l,
			eng_wname(l, "model.layers.%u.mlp.gate.e_score_correction_bias",
				  i),
			c->nr_experts, &y->router_bias);
	r = r ?: load_experts(l, i, &y->experts);
	if (!r && c->shared_inter)
		r = load_mlp(l, i, "mlp.shared_experts", c->shared_inter, &y->shared);
	return r;
}

int eng_load_layer(struct eng_loader *l, u32 i)
{
	const struct eng_config *c = &l->m->config;
	struct eng_layer *y = &l->m->layers[i];
	int r = 0;

	if (!r)
		r = eng_load_vector(
			l, eng_wname(l, "model.layers.%u.input_layernorm.weight", i),
			c->hidden, &y->attn_norm);
	r = r ?: (c->arch == ENG_ARCH_MLA ? load_mla(l, i, y) : load_gqa(l, i, y));
	if (!r)
		r = eng_load_vector(
			l,
			eng_wname(l, "model.layers.%u.post_attention_layernorm.weight",
				  i),
			c->hidden, &y->mlp_norm);
	if (r)
		return r;
	return i < c->nr_dense ? load_mlp(l, i, "mlp", c->dense_inter, &y->dense)
			       : load_moe(l, i, y);
}
