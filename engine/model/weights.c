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

struct eng_wname eng_wname(const struct eng_loader *l, const char *fmt, ...)
{
	struct eng_wname n;
	int used = snprintf(n.text, sizeof(n.text), "%s", l->prefix);
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(n.text + used, sizeof(n.text) - (size_t)used, fmt, ap);
	va_end(ap);
	return n;
}

int eng_load_no_memory(struct eng_loader *l, const char *name)
{
	return eng_refuse(l->err, -ENOMEM, "%s: out of memory", name);
}

/* What the kernels get for @s under the scheme; *ret_group for INT4. */
int eng_load_dtype(const struct eng_loader *l, enum eng_weight_class cls,
		   const struct eng_source *s, u32 *ret_dtype, u32 *ret_group)
{
	bool quantised = s->dtype == KVK_INT4 || s->dtype == KVK_E4M3;

	*ret_dtype = s->dtype;
	*ret_group = s->group;
	if (cls == ENG_CLASS_PLAIN && quantised)
		return eng_refuse(
			l->err, -ENOTSUP,
			"%s: tensor %.200s is quantised; embeddings, head and router "
			"must be BF16 or F32",
			s->file, s->name);
	if (l->scheme == ENG_WEIGHTS_F32) {
		*ret_dtype = KVK_F32;
	} else if (l->scheme == ENG_WEIGHTS_FP8 && cls != ENG_CLASS_PLAIN) {
		*ret_dtype = KVK_E4M3;
	} else if (cls == ENG_CLASS_EXPERT && (l->scheme == ENG_WEIGHTS_INT4_G32 ||
					       l->scheme == ENG_WEIGHTS_INT4_G128)) {
		*ret_dtype = KVK_INT4;
		*ret_group = l->scheme == ENG_WEIGHTS_INT4_G32 ? 32 : 128;
	}
	return eng_source_put_check(s, *ret_dtype, *ret_group, l->err);
}

int eng_load_put_failed(struct eng_loader *l, const struct eng_source *s, int code)
{
	if (code == -EDOM)
		return eng_refuse(l->err, -EINVAL,
				  "%s: tensor %.200s has values that are infinite or NaN",
				  s->file, s->name);
	return eng_load_no_memory(l, s->name);
}

static int put(struct eng_loader *l, const struct eng_source *s, u32 dtype, u32 group,
	       void *data, void *scales)
{
	int r = l->check_only ? 0 : eng_source_put(s, dtype, group, data, scales);

	return r ? eng_load_put_failed(l, s, r) : 0;
}

/* Reserves the arrays of @w, whose dimensions and dtype are set. */
static int alloc_weight(struct eng_loader *l, struct kvk_weight *w, const char *name)
{
	u64 scales = eng_weight_scale_bytes(w);

	if (l->check_only)
		return 0;
	w->data = eng_arena_alloc(l->m->arena, eng_weight_data_bytes(w));
	w->scales = scales ? eng_arena_alloc(l->m->arena, scales) : NULL;
	return w->data && (w->scales || !scales) ? 0 : eng_load_no_memory(l, name);
}

/* The arrays are const for everybody but the loader that fills them. */
void *eng_writable(const void *p, u64 offset)
{
	return p ? (u8 *)(uintptr_t)p + offset : NULL;
}

int eng_load_find(struct eng_loader *l, const char *name, u32 rows, u32 cols,
		  struct eng_source *ret)
{
	return eng_source_find(&l->ts, &l->m->config, name, rows, cols, ret, l->err);
}

int eng_load_matrix(struct eng_loader *l, enum eng_weight_class cls,
		    struct eng_wname name, u32 rows, u32 cols, struct kvk_weight *ret)
{
	struct kvk_weight w = {.rows = rows, .cols = cols};
	struct eng_source s = {0};
	int r;

	r = eng_load_find(l, name.text, rows, cols, &s);
	r = r ?: eng_load_dtype(l, cls, &s, &w.dtype, &w.group);
	if (r)
		return r;
	w.scale_dtype = w.dtype != KVK_INT4   ? 0
			: s.dtype == KVK_INT4 ? s.scale_dtype
					      : KVK_BF16;
	r = alloc_weight(l, &w, name.text);
	if (!r)
		r = put(l, &s, w.dtype, w.group, eng_writable(w.data, 0),
			eng_writable(w.scales, 0));
	if (!r)
		*ret = w;
	return r;
}

/* gate and up of a dense MLP as one matrix; quantised blocks and rows keep their places.
 */
int eng_load_gate_up(struct eng_loader *l, struct eng_wname gate, struct eng_wname up,
		     u32 inter, struct kvk_weight *ret)
{
	struct kvk_weight w = {.rows = 2 * inter, .cols = l->m->config.hidden};
	struct eng_source s[2] = {0};
	u32 dtype = 0, group = 0;
	int r;

	r = eng_load_find(l, gate.text, inter, w.cols, &s[0]);
	r = r ?: eng_load_find(l, up.text, inter, w.cols, &s[1]);
	r = r ?: eng_load_dtype(l, ENG_CLASS_MATRIX, &s[0], &w.dtype, &w.group);
	r = r ?: eng_load_dtype(l, ENG_CLASS_MATRIX, &s[1], &dtype, &group);
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
			eng_writable(w.data, i * (eng_weight_data_bytes(&w) / 2)),
			eng_writable(w.scales, i * (eng_weight_scale_bytes(&w) / 2)));
	if (!r)
		*ret = w;
	return r;
}

/* [1] or a scalar */
static bool is_single(const struct eng_tensor *t)
{
	return t->nr_dims == 0 || (t->nr_dims == 1 && t->shape[0] == 1);
}

int eng_load_vector(struct eng_loader *l, struct eng_wname name, u32 n, const float **ret)
{
	const struct eng_tensor *t = eng_tensors_use(&l->ts, name.text);
	char have[160];
	float *v;

	if (!t)
		return eng_refuse(l->err, -EINVAL, "%s: tensor %s is missing", l->ts.path,
				  name.text);
	if ((t->dtype != ENG_ST_BF16 && t->dtype != ENG_ST_F32) ||
	    !(is_single(t) ? n == 1 : t->nr_dims == 1 && t->shape[0] == n))
		return eng_refuse(l->err, -EINVAL,
				  "%s: tensor %.200s is %s, expected BF16 or F32 [%u]",
				  t->file, t->name,
				  eng_tensor_describe(t, have, sizeof(have)), n);
	v = eng_arena_alloc(l->m->arena, (u64)n * 4);
	if (!v)
		return eng_load_no_memory(l, name.text);
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

/* --------------------------------------------------------------- whole model */

/* model.layers.N.self_attn.{k,v}_scale: one value or GQA [kv_heads]; all layers or none.
 */
static int load_kv_scales(struct eng_loader *l)
{
	const struct eng_config *c = &l->m->config;
	u32 heads = c->arch == ENG_ARCH_MLA ? 1 : c->nr_kv_heads;
	u32 planes = c->arch == ENG_ARCH_MLA ? 1 : 2;
	u32 per_layer = heads * planes;
	float *out;

	if (!eng_tensors_find(&l->ts,
			      eng_wname(l, "model.layers.0.self_attn.k_scale").text))
		return 0; /* a later layer's scale is then refused as unexpected */
	out = eng_arena_alloc(l->m->arena, (u64)c->nr_layers * per_layer * 4);
	if (!out)
		return eng_load_no_memory(l, "k_scale");
	for (u32 i = 0; i < c->nr_layers * planes; i++) {
		struct eng_wname name = eng_wname(l, "model.layers.%u.self_attn.%c_scale",
						  i / planes, i % planes ? 'v' : 'k');
		const struct eng_tensor *t = eng_tensors_find(&l->ts, name.text);
		bool one = t && is_single(t);
		const float *v = NULL;
		int r;

		r = eng_load_vector(l, name, one ? 1 : heads, &v);
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

/* No forward pass needs these: multi-token prediction, saved frequencies, vision. */
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
	r = eng_load_matrix(l, ENG_CLASS_PLAIN, eng_wname(l, "model.embed_tokens"),
			    c->vocab, c->hidden, &m->embed);
	m->lm_head = m->embed;
	if (!r && !c->tie_embed)
		r = eng_load_matrix(l, ENG_CLASS_PLAIN, eng_wname(l, "lm_head"), c->vocab,
				    c->hidden, &m->lm_head);
	if (!r)
		r = eng_load_vector(l, eng_wname(l, "model.norm.weight"), c->hidden,
				    &m->final_norm);
	for (u32 i = 0; i < c->nr_layers && !r; i++)
		r = eng_load_layer(l, i);
	r = r ?: load_kv_scales(l);
	for (size_t i = 0; i < l->ts.nr && !r; i++)
		if (!l->ts.used[i] && !may_be_unused(l, l->ts.list[i].name))
			r = eng_refuse(
				l->err, -EINVAL,
				"%s: tensor %.200s is not part of this architecture",
				l->ts.list[i].file, l->ts.list[i].name);
	return r;
}
