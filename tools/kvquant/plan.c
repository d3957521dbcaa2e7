/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - which tensors the output has, and where each lies (kvquant.h).
 *
 * Matrices are told apart by name, as the loader does: routed experts become INT4 or FP8,
 * other projections FP8; kv_b_proj (absorbed at load), router, norms, embeddings, head
 * and layers beyond num_hidden_layers stay. In a file larger elements come first, so that
 * everything is aligned without holes.
 */
#include "tools/kvquant/kvquant.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/fp8.h"
#include "kernels/int4.h"

static const char *const attn_parts[] = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
					 "q_proj",   "k_proj",	 "v_proj",
					 "o_proj"};
static const char *const mlp_parts[] = {"gate_proj", "up_proj", "down_proj"};

enum matrix_kind { NOT_A_MATRIX, PROJECTION, EXPERT };

static bool part_of(const char *name, size_t len, const char *const *parts, size_t nr)
{
	for (size_t i = 0; i < nr; i++)
		if (strlen(parts[i]) == len && !strncmp(parts[i], name, len))
			return true;
	return false;
}

/* "self_attn.q_proj.weight" and the like; @rest follows "model.layers.N." */
static enum matrix_kind kind_in_layer(const char *rest)
{
	static const char tail[] = ".weight";
	size_t len = strlen(rest), nr_tail = sizeof(tail) - 1;
	unsigned int expert;
	int n = 0;

	if (len <= nr_tail || strcmp(rest + len - nr_tail, tail))
		return NOT_A_MATRIX;
	len -= nr_tail;
	if (!strncmp(rest, "self_attn.", 10))
		return part_of(rest + 10, len - 10, attn_parts, KV_ARRAY_SIZE(attn_parts))
			       ? PROJECTION
			       : NOT_A_MATRIX;
	if (!strncmp(rest, "mlp.shared_experts.", 19))
		n = 19;
	else if (sscanf(rest, "mlp.experts.%u.%n", &expert, &n) == 1 && n)
		return part_of(rest + n, len - (size_t)n, mlp_parts,
			       KV_ARRAY_SIZE(mlp_parts))
			       ? EXPERT
			       : NOT_A_MATRIX;
	else if (!strncmp(rest, "mlp.", 4))
		n = 4;
	return n && part_of(rest + n, len - (size_t)n, mlp_parts,
			    KV_ARRAY_SIZE(mlp_parts))
		       ? PROJECTION
		       : NOT_A_MATRIX;
}

static enum matrix_kind kind_of(const char *name, u32 nr_layers)
{
	static const char wrapper[] = "language_model.";
	unsigned int layer;
	int n = 0;

	if (!strncmp(name, wrapper, sizeof(wrapper) - 1))
		name += sizeof(wrapper) - 1;
	if (sscanf(name, "model.layers.%u.%n", &layer, &n) != 1 || !n ||
	    layer >= nr_layers)
		return NOT_A_MATRIX;
	return kind_in_layer(name + n);
}

/* ------------------------------------------------------------------- building */

/* Appends a copy of @t, whose name is @base plus @suffix. */
static int add(struct kvq_plan *p, struct kvq_tensor t, const char *base,
	       const char *suffix, struct eng_err *err)
{
	size_t nr = strlen(base) + strlen(suffix) + 1;

	if (p->nr == p->room) {
		size_t room = p->room ? 2 * p->room : 1024;
		struct kvq_tensor *list = realloc(p->list, room * sizeof(*list));

		if (!list)
			return eng_refuse(err, -ENOMEM, "plan: out of memory");
		p->list = list;
		p->room = room;
	}
	t.name = malloc(nr);
	if (!t.name)
		return eng_refuse(err, -ENOMEM, "plan: out of memory");
	snprintf(t.name, nr, "%s%s", base, suffix);
	t.bytes = eng_st_dtype_bytes(t.dtype);
	for (u32 i = 0; i < t.nr_dims; i++)
		t.bytes *= t.shape[i];
	p->bytes += t.bytes;
	p->list[p->nr++] = t;
	return 0;
}

static int add_copy(struct kvq_plan *p, const struct eng_tensor *t, struct eng_err *err)
{
	struct kvq_tensor q = {
		.kind = KVQ_COPY, .dtype = t->dtype, .nr_dims = t->nr_dims, .source = t};

	if (t->dtype == ENG_ST_OTHER)
		return eng_refuse(err, -ENOTSUP,
				  "%s: tensor %.200s: dtype cannot be copied", t->file,
				  t->name);
	memcpy(q.shape, t->shape, sizeof(q.shape));
	return add(p, q, t->name, "", err);
}

static int add_int4(struct kvq_plan *p, const struct eng_tensor *t, const char *base,
		    struct eng_err *err)
{
	u64 rows = t->shape[0], cols = t->shape[1];
	struct kvq_tensor q = {.kind = KVQ_DATA,
			       .dtype = ENG_ST_I32,
			       .nr_dims = 2,
			       .shape = {rows, cols / KVK_INT4_PER_WORD},
			       .source = t};
	struct kvq_tensor scale = {.kind = KVQ_SCALE,
				   .dtype = ENG_ST_BF16,
				   .nr_dims = 2,
				   .shape = {rows, cols / p->group},
				   .source = t};
	struct kvq_tensor shape = {.kind = KVQ_SHAPE,
				   .dtype = ENG_ST_I64,
				   .nr_dims = 1,
				   .shape = {2},
				   .source = t};
	int r;

	r = add(p, q, base, ".weight_packed", err);
	r = r ?: add(p, scale, base, ".weight_scale", err);
	return r ?: add(p, shape, base, ".weight_shape", err);
}

static int add_fp8(struct kvq_plan *p, const struct eng_tensor *t, const char *base,
		   struct eng_err *err)
{
	u32 rows = (u32)t->shape[0], cols = (u32)t->shape[1];
	struct kvq_tensor q = {.kind = KVQ_DATA,
			       .dtype = ENG_ST_E4M3,
			       .nr_dims = 2,
			       .shape = {rows, cols},
			       .source = t};
	struct kvq_tensor scale = {.kind = KVQ_SCALE,
				   .dtype = ENG_ST_F32,
				   .nr_dims = 2,
				   .shape = {kvk_fp8_blocks(rows), kvk_fp8_blocks(cols)},
				   .source = t};
	int r = add(p, q, base, ".weight", err);

	return r ?: add(p, scale, base, ".weight_scale_inv", err);
}

/* Shapes were compared with the configuration before; a matrix has two dimensions. */
static int add_tensor(struct kvq_plan *p, const struct eng_config *c,
		      const struct eng_tensor *t, struct eng_err *err)
{
	enum matrix_kind kind = kind_of(t->name, c->nr_layers);
	char base[512];

	if (kind == NOT_A_MATRIX || !p->target ||
	    (p->target == KVK_INT4 && kind != EXPERT))
		return add_copy(p, t, err);
	snprintf(base, sizeof(base), "%.*s", (int)(strlen(t->name) - strlen(".weight")),
		 t->name);
	return p->target == KVK_INT4 ? add_int4(p, t, base, err)
				     : add_fp8(p, t, base, err);
}

/*
 * model.layers.N.self_attn.k_scale and v_scale. The layout has [layers][heads][K, V]; a
 * tensor holds one plane's heads, so values are gathered. MLA has one plane of one.
 */
static int add_kv_scales(struct kvq_plan *p, const struct eng_config *c,
			 const float *scales, const char *prefix, struct eng_err *err)
{
	u32 heads = c->arch == ENG_ARCH_MLA ? 1 : c->nr_kv_heads;
	u32 planes = c->arch == ENG_ARCH_MLA ? 1 : 2;
	int r = 0;

	for (u32 i = 0; i < c->nr_layers * planes && !r; i++) {
		float *values = malloc(heads * sizeof(*values));
		struct kvq_tensor q = {.kind = KVQ_KV_SCALE,
				       .dtype = ENG_ST_F32,
				       .nr_dims = 1,
				       .shape = {heads},
				       .values = values};
		char name[256];

		if (!values)
			return eng_refuse(err, -ENOMEM, "plan: out of memory");
		for (u32 h = 0; h < heads; h++)
			values[h] =
				scales[(i / planes * heads + h) * planes + i % planes];
		snprintf(name, sizeof(name), "%smodel.layers.%u.self_attn.%c_scale",
			 prefix, i / planes, i % planes ? 'v' : 'k');
		r = add(p, q, name, "", err);
		if (r)
			free(values);
	}
	return r;
}

/* ------------------------------------------------------------------- placing */

/* Shards by size; parts of one matrix stay together. */
static void place_in_shards(struct kvq_plan *p, u64 shard_bytes)
{
	u64 used = 0;

	p->nr_shards = p->nr ? 1 : 0;
	for (size_t i = 0; i < p->nr; i++) {
		struct kvq_tensor *t = &p->list[i];
		bool starts = t->kind == KVQ_COPY || t->kind == KVQ_DATA ||
			      t->kind == KVQ_KV_SCALE;

		if (starts && used && used + t->bytes > shard_bytes) {
			p->nr_shards++;
			used = 0;
		}
		t->shard = p->nr_shards - 1;
		used += t->bytes;
	}
}

static int place_offsets(struct kvq_plan *p, struct eng_err *err)
{
	u64 *used = calloc(p->nr_shards + 1, sizeof(*used));

	if (!used)
		return eng_refuse(err, -ENOMEM, "plan: out of memory");
	for (u32 elem = 8; elem; elem /= 2) {
		for (size_t i = 0; i < p->nr; i++) {
			struct kvq_tensor *t = &p->list[i];

			if (eng_st_dtype_bytes(t->dtype) != elem)
				continue;
			t->offset = used[t->shard];
			used[t->shard] += t->bytes;
		}
	}
	free(used);
	return 0;
}

int kvq_plan_build(const struct kvq_options *o, const struct eng_config *c,
		   const struct eng_tensors *ts, const float *scales,
		   struct kvq_plan *ret, struct eng_err *err)
{
	const char *prefix =
		eng_tensors_find(ts, "model.norm.weight") ? "" : "language_model.";
	int r = 0;

	*ret = (struct kvq_plan){0};
	if (o->weights == ENG_WEIGHTS_FP8)
		ret->target = KVK_E4M3;
	else if (o->weights != ENG_WEIGHTS_AS_IS)
		ret->target = KVK_INT4;
	ret->group = o->weights == ENG_WEIGHTS_INT4_G32 ? 32 : 128;
	for (size_t i = 0; i < ts->nr && !r; i++)
		r = add_tensor(ret, c, &ts->list[i], err);
	if (!r && scales)
		r = add_kv_scales(ret, c, scales, prefix, err);
	if (r)
		return r;
	place_in_shards(ret, o->shard_bytes);
	return place_offsets(ret, err);
}

void kvq_plan_free(struct kvq_plan *p)
{
	for (size_t i = 0; i < p->nr; i++) {
		free(p->list[i].name);
		free((void *)(uintptr_t)p->list[i].values);
	}
	free(p->list);
	*p = (struct kvq_plan){0};
}

void kvq_shard_name(const struct kvq_plan *p, u32 shard, char *buf, size_t size)
{
	snprintf(buf, size, "model-%05u-of-%05u.safetensors", shard + 1, p->nr_shards);
}
