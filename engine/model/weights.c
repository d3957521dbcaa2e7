/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights.c - every weight of both architectures, by name, shape and class.
 *
 * A class says what a scheme may do to a matrix: routed experts become INT4 or FP8, other
 * projections FP8, and embeddings, router and kv_b_proj never change. Every tensor of the
 * model must be taken by someone: one that nobody expects (a bias the forward pass does
 * not know) is refused rather than ignored. One thread; quantisation is parallel inside.
 */
#include "engine/model/weights.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include "engine/model/source.h"
#include "kernels/fp8.h"

#define NAME_BYTES 200u

enum weight_class {
	CLASS_PLAIN,  /* embeddings, head, router: as stored */
	CLASS_MATRIX, /* attention projections, dense and shared MLPs */
	CLASS_EXPERT, /* routed experts */
};

struct wname {
	char text[NAME_BYTES];
};

__attribute__((format(printf, 2, 3))) static struct wname
wname(const struct eng_loader *l, const char *fmt, ...)
{
	struct wname n;
	int used = snprintf(n.text, sizeof(n.text), "%s", l->prefix);
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(n.text + used, sizeof(n.text) - (size_t)used, fmt, ap);
	va_end(ap);
	return n;
}

static int no_memory(struct eng_loader *l, const char *name)
{
	return eng_refuse(l->err, -ENOMEM, "%s: out of memory", name);
}

/* What the kernels get for @s under the scheme; *ret_group for INT4. */
static int target_dtype(const struct eng_loader *l, enum weight_class cls,
			const struct eng_source *s, u32 *ret_dtype, u32 *ret_group)
{
	bool quantised = s->dtype == KVK_INT4 || s->dtype == KVK_E4M3;

	*ret_dtype = s->dtype;
	*ret_group = s->group;
	if (cls == CLASS_PLAIN && quantised)
		return eng_refuse(
			l->err, -ENOTSUP,
			"%s: tensor %.200s is quantised; embeddings, head and router "
			"must be BF16 or F32",
			s->file, s->name);
	if (l->scheme == ENG_WEIGHTS_F32) {
		*ret_dtype = KVK_F32;
	} else if (l->scheme == ENG_WEIGHTS_FP8 && cls != CLASS_PLAIN) {
		*ret_dtype = KVK_E4M3;
	} else if (cls == CLASS_EXPERT && (l->scheme == ENG_WEIGHTS_INT4_G32 ||
					   l->scheme == ENG_WEIGHTS_INT4_G128)) {
		*ret_dtype = KVK_INT4;
		*ret_group = l->scheme == ENG_WEIGHTS_INT4_G32 ? 32 : 128;
	}
	return eng_source_put_check(s, *ret_dtype, *ret_group, l->err);
}

static int put(struct eng_loader *l, const struct eng_source *s, u32 dtype, u32 group,
	       void *data, void *scales)
{
	int r = eng_source_put(s, dtype, group, data, scales);

	if (r == -EDOM)
		return eng_refuse(l->err, -EINVAL,
				  "%s: tensor %.200s has values that are infinite or NaN",
				  s->file, s->name);
	return r ? no_memory(l, s->name) : 0;
}

/* Reserves the arrays of @w, whose dimensions and dtype are set. */
static int alloc_weight(struct eng_loader *l, struct kvk_weight *w, const char *name)
{
	u64 scales = eng_weight_scale_bytes(w);

	w->data = eng_arena_alloc(l->m->arena, eng_weight_data_bytes(w));
	w->scales = scales ? eng_arena_alloc(l->m->arena, scales) : NULL;
	return w->data && (w->scales || !scales) ? 0 : no_memory(l, name);
}

/* The arrays are const for everybody but the loader that fills them. */
static void *writable(const void *p, u64 offset)
{
	return p ? (u8 *)(uintptr_t)p + offset : NULL;
}

static int find(struct eng_loader *l, const char *name, u32 rows, u32 cols,
		struct eng_source *ret)
{
	return eng_source_find(&l->ts, &l->m->config, name, rows, cols, ret, l->err);
}

static int load_matrix(struct eng_loader *l, enum weight_class cls, struct wname name,
		       u32 rows, u32 cols, struct kvk_weight *ret)
{
	struct kvk_weight w = {.rows = rows, .cols = cols};
	struct eng_source s = {0};
	int r;

	r = find(l, name.text, rows, cols, &s);
	r = r ?: target_dtype(l, cls, &s, &w.dtype, &w.group);
	if (r)
		return r;
	w.scale_dtype = w.dtype != KVK_INT4   ? 0
			: s.dtype == KVK_INT4 ? s.scale_dtype
					      : KVK_BF16;
	r = alloc_weight(l, &w, name.text);
	r = r ?: put(l, &s, w.dtype, w.group, writable(w.data, 0), writable(w.scales, 0));
	if (!r)
		*ret = w;
	return r;
}

/* gate and up of a dense MLP as one matrix; quantised blocks and rows keep their places.
 */
static int load_gate_up(struct eng_loader *l, struct wname gate, struct wname up,
			u32 inter, struct kvk_weight *ret)
{
	struct kvk_weight w = {.rows = 2 * inter, .cols = l->m->config.hidden};
	struct eng_source s[2] = {0};
	u32 dtype = 0, group = 0;
	int r;

	r = find(l, gate.text, inter, w.cols, &s[0]);
	r = r ?: find(l, up.text, inter, w.cols, &s[1]);
	r = r ?: target_dtype(l, CLASS_MATRIX, &s[0], &w.dtype, &w.group);
	r = r ?: target_dtype(l, CLASS_MATRIX, &s[1], &dtype, &group);
	if (r)
		return r;
	if (dtype != w.dtype || s[0].scale_dtype != s[1].scale_dtype)
		return eng_refuse(l->err, -EINVAL,
				  "%s: tensors %.150s and %.150s differ in dtype",
				  s[0].file, s[0].name, s[1].name);
	if (dtype == KVK_E4M3 && inter % KVK_FP8_BLOCK)
		return eng_refuse(
			l->err, -ENOTSUP,
			"%s: tensor %.200s: %u rows are no multiple of the 128-row FP8 block",
			s[0].file, s[0].name, inter);
	w.scale_dtype = w.dtype == KVK_INT4 ? s[0].scale_dtype : 0;
	r = alloc_weight(l, &w, gate.text);
	for (u32 i = 0; i < 2 && !r; i++)
		r = put(l, &s[i], w.dtype, w.group,
			writable(w.data, i * (eng_weight_data_bytes(&w) / 2)),
			writable(w.scales, i * (eng_weight_scale_bytes(&w) / 2)));
	if (!r)
		*ret = w;
	return r;
}

/* [1] or a scalar */
static bool is_single(const struct eng_tensor *t)
{
	return t->nr_dims == 0 || (t->nr_dims == 1 && t->shape[0] == 1);
}

static int load_vector(struct eng_loader *l, struct wname name, u32 n, const float **ret)
{
	const struct eng_tensor *t = eng_tensors_use(&l->ts, name.text);
	char have[160];
	float *v;

	if (!t)
		return eng_refuse(l->err, -EINVAL, "%s: tensor %s is missing",
				  l->ts.nr ? l->ts.list[0].file : "model", name.text);
	if ((t->dtype != ENG_ST_BF16 && t->dtype != ENG_ST_F32) ||
	    !(is_single(t) ? n == 1 : t->nr_dims == 1 && t->shape[0] == n))
		return eng_refuse(l->err, -EINVAL,
				  "%s: tensor %.200s is %s, expected BF16 or F32 [%u]",
				  t->file, t->name,
				  eng_tensor_describe(t, have, sizeof(have)), n);
	v = eng_arena_alloc(l->m->arena, (u64)n * 4);
	if (!v)
		return no_memory(l, name.text);
	if (t->dtype == ENG_ST_F32) {
		memcpy(v, t->data, (size_t)n * 4);
	} else {
		for (u32 i = 0; i < n; i++)
			v[i] = kvk_bf16_to_f32(
				(u16)(t->data[2 * i] | t->data[2 * i + 1] << 8));
	}
	*ret = v;
	return 0;
}

/* ---------------------------------------------------------------------------------
 * attention */

/*
 * kv_b_proj [heads][nope + v][latent] holds W_UK and W_UV of each head. Attention works
 * on latents, so queries go through W_UK transposed and outputs through W_UV. Moving BF16
 * values is exact; an FP8 kv_b_proj is dequantised and rounded to BF16.
 */
static int absorb_kv_b(struct eng_loader *l, struct wname name, struct eng_layer *y)
{
	const struct eng_config *c = &l->m->config;
	u32 per_head = c->nope_dim + c->v_dim;
	bool f32;
	struct eng_source s = {0};
	float *x;
	int r;

	r = find(l, name.text, c->nr_q_heads * per_head, c->latent_dim, &s);
	if (r)
		return r;
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
		return no_memory(l, name.text);
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
				void *to =
					writable(is_k ? y->w_uk_t.data : y->w_uv.data, 0);
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
	struct wname at = wname(l, "model.layers.%u.self_attn", i);
	u32 q_rows = c->nr_q_heads * (c->nope_dim + c->rope_dim);
	const char *p = at.text + strlen(l->prefix);
	int r = 0;

	if (!r)
		r = load_matrix(l, CLASS_MATRIX, wname(l, "%s.q_a_proj", p), c->q_rank,
				c->hidden, &y->q_a);
	if (!r)
		r = load_vector(l, wname(l, "%s.q_a_layernorm.weight", p), c->q_rank,
				&y->q_a_norm);
	if (!r)
		r = load_matrix(l, CLASS_MATRIX, wname(l, "%s.q_b_proj", p), q_rows,
				c->q_rank, &y->q_b);
	if (!r)
		r = load_matrix(l, CLASS_MATRIX, wname(l, "%s.kv_a_proj_with_mqa", p),
				c->latent_dim + c->rope_dim, c->hidden, &y->kv_a);
	if (!r)
		r = load_vector(l, wname(l, "%s.kv_a_layernorm.weight", p), c->latent_dim,
				&y->kv_a_norm);
	r = r ?: absorb_kv_b(l, wname(l, "%s.kv_b_proj", p), y);
	if (!r)
		r = load_matrix(l, CLASS_MATRIX, wname(l, "%s.o_proj", p), c->hidden,
				c->nr_q_heads * c->v_dim, &y->o);
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
		r = load_matrix(
			l, CLASS_MATRIX,
			wname(l, "model.layers.%u.self_attn.%s_proj", i, proj[n].name),
			proj[n].rows, c->hidden, proj[n].w);
		if (!r && c->qkv_bias)
			r = load_vector(l,
					wname(l, "model.layers.%u.self_attn.%s_proj.bias",
					      i, proj[n].name),
					proj[n].rows, proj[n].bias);
	}
	if (c->qk_norm) {
		if (!r)
			r = load_vector(
				l, wname(l, "model.layers.%u.self_attn.q_norm.weight", i),
				c->head_dim, &y->q_norm);
		if (!r)
			r = load_vector(
				l, wname(l, "model.layers.%u.self_attn.k_norm.weight", i),
				c->head_dim, &y->k_norm);
	}
	if (!r)
		r = load_matrix(l, CLASS_MATRIX,
				wname(l, "model.layers.%u.self_attn.o_proj", i),
				c->hidden, q_rows, &y->o);
	return r;
}

/* ---------------------------------------------------------------------------------------
 * MLP */

static int load_mlp(struct eng_loader *l, u32 i, const char *part, u32 inter,
		    struct eng_mlp *ret)
{
	int r;

	r = load_gate_up(l, wname(l, "model.layers.%u.%s.gate_proj", i, part),
			 wname(l, "model.layers.%u.%s.up_proj", i, part), inter,
			 &ret->gate_up);
	if (!r)
		r = load_matrix(l, CLASS_MATRIX,
				wname(l, "model.layers.%u.%s.down_proj", i, part),
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
		struct wname name = wname(l, "model.layers.%u.mlp.experts.%u.%s_proj",
					  layer, n / 3, parts[n % 3]);

		r = find(l, name.text, down ? e->hidden : e->inter,
			 down ? e->inter : e->hidden, &s[n]);
		r = r ?: target_dtype(l, CLASS_EXPERT, &s[n], &dtype, &group);
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

static int put_expert(const struct eng_source *s, const struct kvk_experts *e,
		      const u64 bytes[4], u32 x)
{
	u64 half13 = bytes[0] / e->nr_experts / 2, halfs13 = bytes[2] / e->nr_experts / 2;
	int r = 0;

	for (u32 i = 0; i < 2 && !r; i++)
		r = eng_source_put(&s[i], e->dtype, e->group,
				   writable(e->w13, (2 * (u64)x + i) * half13),
				   writable(e->s13, (2 * (u64)x + i) * halfs13));
	return r
		       ?: eng_source_put(&s[2], e->dtype, e->group,
					 writable(e->w2, x * (bytes[1] / e->nr_experts)),
					 writable(e->s2, x * (bytes[3] / e->nr_experts)));
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
		return no_memory(l, "experts");
	e->nr_experts = c->nr_experts;
	e->hidden = c->hidden;
	e->inter = c->expert_inter;
	r = find_experts(l, layer, s, e);
	if (r)
		goto free_s;
	eng_experts_bytes(e, bytes);
	for (u32 i = 0; i < 4 && !r; i++) {
		*arrays[i] = bytes[i] ? eng_arena_alloc(l->m->arena, bytes[i]) : NULL;
		if (bytes[i] && !*arrays[i])
			r = no_memory(l, "experts");
		l->m->expert_bytes += bytes[i];
	}
	if (r)
		goto free_s;
#pragma omp parallel for schedule(dynamic)
	for (u32 x = 0; x < e->nr_experts; x++) {
		int rx = put_expert(s + (size_t)x * 3, e, bytes, x);

		if (rx) {
#pragma omp critical(load_experts_failed)
			{
				failed = KV_MIN(failed, x);
				code = rx;
			}
		}
	}
	if (code)
		r = code == -EDOM
			    ? eng_refuse(
				      l->err, -EINVAL,
				      "%s: expert %u of layer %u (%.150s) has values that "
				      "are infinite or NaN",
				      s[failed * 3].file, failed, layer,
				      s[failed * 3].name)
			    : no_memory(l, "experts");
free_s:
	free(s);
	return r;
}

static int load_moe(struct eng_loader *l, u32 i, struct eng_layer *y)
{
	const struct eng_config *c = &l->m->config;
	int r;

	y->is_moe = true;
	r = load_matrix(l, CLASS_PLAIN, wname(l, "model.layers.%u.mlp.gate", i),
			c->nr_experts, c->hidden, &y->router);
	if (!r)
		r = load_vector(
			l,
			wname(l, "model.layers.%u.mlp.gate.e_score_correction_bias", i),
			c->nr_experts, &y->router_bias);
	r = r ?: load_experts(l, i, &y->experts);
	if (!r && c->shared_inter)
		r = load_mlp(l, i, "mlp.shared_experts", c->shared_inter, &y->shared);
	return r;
}

static int load_layer(struct eng_loader *l, u32 i)
{
	const struct eng_config *c = &l->m->config;
	struct eng_layer *y = &l->m->layers[i];
	int r = 0;

	if (!r)
		r = load_vector(l, wname(l, "model.layers.%u.input_layernorm.weight", i),
				c->hidden, &y->attn_norm);
	r = r ?: (c->arch == ENG_ARCH_MLA ? load_mla(l, i, y) : load_gqa(l, i, y));
	if (!r)
		r = load_vector(
			l, wname(l, "model.layers.%u.post_attention_layernorm.weight", i),
			c->hidden, &y->mlp_norm);
	if (r)
		return r;
	return i < c->nr_dense ? load_mlp(l, i, "mlp", c->dense_inter, &y->dense)
			       : load_moe(l, i, y);
}

/* ---------------------------------------------------------------------------- whole
 * model */

/* model.layers.N.self_attn.{k,v}_scale: one value or GQA [kv_heads]; all layers or none.
 */
static int load_kv_scales(struct eng_loader *l)
{
	const struct eng_config *c = &l->m->config;
	u32 heads = c->arch == ENG_ARCH_MLA ? 1 : c->nr_kv_heads;
	u32 planes = c->arch == ENG_ARCH_MLA ? 1 : 2;
	u32 per_layer = heads * planes;
	float *out;

	if (!eng_tensors_find(&l->ts, wname(l, "model.layers.0.self_attn.k_scale").text))
		return 0; /* a stray scale of a later layer is then refused as unexpected
			   */
	out = eng_arena_alloc(l->m->arena, (u64)c->nr_layers * per_layer * 4);
	if (!out)
		return no_memory(l, "k_scale");
	for (u32 i = 0; i < c->nr_layers * planes; i++) {
		struct wname name = wname(l, "model.layers.%u.self_attn.%c_scale",
					  i / planes, i % planes ? 'v' : 'k');
		const struct eng_tensor *t = eng_tensors_find(&l->ts, name.text);
		bool one = t && is_single(t);
		const float *v = NULL;
		int r;

		r = load_vector(l, name, one ? 1 : heads, &v);
		if (r)
			return r;
		for (u32 h = 0; h < heads; h++) {
			float s = v[one ? 0 : h];

			if (!(s > 0 && s <= 3.4e38f))
				return eng_refuse(
					l->err, -EINVAL,
					"%s: tensor %s holds %g, expected a positive scale",
					t ? t->file : "model", name.text, (double)s);
			out[i / planes * per_layer + h * planes + i % planes] = s;
		}
	}
	l->m->kv_scales = out;
	l->m->nr_kv_scales = c->nr_layers * per_layer;
	return 0;
}

/* Tensors that no forward pass needs: multi-token prediction layers, saved frequencies,
 * vision. */
static bool may_be_unused(const struct eng_loader *l, const char *name)
{
	size_t n = strlen(l->prefix), len = strlen(name);
	static const char tail[] = "rotary_emb.inv_freq";
	unsigned int layer;

	if (strncmp(name, l->prefix, n))
		return true;
	if (sscanf(name + n, "model.layers.%u.", &layer) == 1 &&
	    layer >= l->m->config.nr_layers)
		return true;
	return len > sizeof(tail) && !strcmp(name + len - (sizeof(tail) - 1), tail);
}

int eng_weights_load(struct eng_loader *l)
{
	struct eng_model *m = l->m;
	const struct eng_config *c = &m->config;
	int r;

	l->prefix = "";
	if (!eng_tensors_find(&l->ts, "model.embed_tokens.weight") &&
	    eng_tensors_find(&l->ts, "language_model.model.embed_tokens.weight"))
		l->prefix = "language_model.";
	r = load_matrix(l, CLASS_PLAIN, wname(l, "model.embed_tokens"), c->vocab,
			c->hidden, &m->embed);
	m->lm_head = m->embed;
	if (!r && !c->tie_embed)
		r = load_matrix(l, CLASS_PLAIN, wname(l, "lm_head"), c->vocab, c->hidden,
				&m->lm_head);
	r = r ?: load_vector(l, wname(l, "model.norm.weight"), c->hidden, &m->final_norm);
	for (u32 i = 0; i < c->nr_layers && !r; i++)
		r = load_layer(l, i);
	r = r ?: load_kv_scales(l);
	for (size_t i = 0; i < l->ts.nr && !r; i++)
		if (!l->ts.used[i] && !may_be_unused(l, l->ts.list[i].name))
			r = eng_refuse(
				l->err, -EINVAL,
				"%s: tensor %.200s is not part of this architecture",
				l->ts.list[i].file, l->ts.list[i].name);
	return r;
}
