/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.c - load and free a model directory; sizes and layout of what is loaded
 * (model.h).
 *
 * All or nothing: configuration, headers, tokenizer and weights are checked in that
 * order, and a refusal at any point frees what was built. Any thread; one load at a time
 * per model.
 */
#include "engine/model/model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "engine/model/weights.h"
#include "kernels/fp8.h"

static const char *const weights_names[] = {
	[ENG_WEIGHTS_AS_IS] = "bf16",	     [ENG_WEIGHTS_FP8] = "fp8",
	[ENG_WEIGHTS_INT4_G32] = "int4-g32", [ENG_WEIGHTS_INT4_G128] = "int4-g128",
	[ENG_WEIGHTS_F32] = "f32",
};

int eng_weights_parse(const char *text)
{
	if (!strcmp(text, "as-is"))
		return ENG_WEIGHTS_AS_IS;
	for (u32 i = 0; i < KV_ARRAY_SIZE(weights_names); i++)
		if (!strcmp(text, weights_names[i]))
			return (int)i;
	return -EINVAL;
}

const char *eng_weights_name(u32 weights)
{
	return weights < KV_ARRAY_SIZE(weights_names) ? weights_names[weights] : "?";
}

u64 eng_weight_data_bytes(const struct kvk_weight *w)
{
	u64 n = (u64)w->rows * w->cols;

	switch (w->dtype) {
	case KVK_F32:
		return n * 4;
	case KVK_BF16:
	case KVK_F16:
		return n * 2;
	case KVK_E4M3:
		return n;
	case KVK_INT4:
		return n / 2;
	default:
		return 0;
	}
}

u64 eng_weight_scale_bytes(const struct kvk_weight *w)
{
	if (w->dtype == KVK_E4M3)
		return 4ull * kvk_fp8_blocks(w->rows) * kvk_fp8_blocks(w->cols);
	if (w->dtype == KVK_INT4)
		return 2ull * w->rows * (w->cols / w->group);
	return 0;
}

void eng_experts_bytes(const struct kvk_experts *e, u64 ret_bytes[4])
{
	struct kvk_weight up = {.dtype = e->dtype,
				.rows = e->inter,
				.cols = e->hidden,
				.group = e->group};
	struct kvk_weight down = up;

	down.rows = e->hidden;
	down.cols = e->inter;
	ret_bytes[0] = 2 * e->nr_experts * eng_weight_data_bytes(&up);
	ret_bytes[1] = e->nr_experts * eng_weight_data_bytes(&down);
	ret_bytes[2] = 2 * e->nr_experts * eng_weight_scale_bytes(&up);
	ret_bytes[3] = e->nr_experts * eng_weight_scale_bytes(&down);
}

/* The scheme that a quantised directory is stored in, if it is one that can be asked for.
 */
static u32 stored_scheme(const struct eng_config *c)
{
	if (c->quant == ENG_QUANT_FP8)
		return ENG_WEIGHTS_FP8;
	if (c->quant_group == 32)
		return ENG_WEIGHTS_INT4_G32;
	return c->quant_group == 128 ? ENG_WEIGHTS_INT4_G128 : ENG_WEIGHTS_AS_IS;
}

/* What @asked means for this directory: AS_IS when it is stored that way already. */
static int pick_scheme(const char *dir, const struct eng_config *c, u32 asked, u32 *ret,
		       struct eng_err *err)
{
	if (asked >= KV_ARRAY_SIZE(weights_names))
		return eng_refuse(err, -EINVAL, "weights: scheme %u is not known", asked);
	if (c->quant == ENG_QUANT_NONE || asked == ENG_WEIGHTS_F32) {
		*ret = asked;
		return 0;
	}
	if (asked != ENG_WEIGHTS_AS_IS && asked != stored_scheme(c))
		return eng_refuse(
			err, -EINVAL,
			"%s/config.json: quantization_config says %s, %s asked for", dir,
			c->quant == ENG_QUANT_FP8 ? "fp8" : "int4",
			eng_weights_name(asked));
	*ret = ENG_WEIGHTS_AS_IS;
	return 0;
}

static int load_tokenizer(const char *dir, struct eng_model *m, struct eng_err *err)
{
	char path[4096];
	int r;

	snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
	r = eng_tokenizer_load(path, &m->tok, err);
	if (r)
		return r;
	if (eng_tokenizer_size(m->tok) > m->config.vocab)
		return eng_refuse(err, -EINVAL,
				  "%s: token id %u, but config.json has vocab_size %u",
				  path, eng_tokenizer_size(m->tok) - 1, m->config.vocab);
	return 0;
}

/* @check_only: *ret has no weights and is good for eng_model_free() only */
static int load(const char *dir, const struct eng_model_options *opt, bool check_only,
		struct eng_model **ret, struct eng_err *err)
{
	static const struct eng_model_options defaults;
	struct eng_loader l = {.err = err, .check_only = check_only};
	struct eng_model *m;
	int r;

	opt = opt ? opt : &defaults;
	err->text[0] = 0;
	m = calloc(1, sizeof(*m));
	if (!m)
		return eng_refuse(err, -ENOMEM, "%s: out of memory", dir);
	l.m = m;
	m->weights = opt->weights;
	r = eng_config_load(dir, &m->config, err);
	r = r ?: pick_scheme(dir, &m->config, opt->weights, &l.scheme, err);
	if (!r && !opt->no_tokenizer)
		r = load_tokenizer(dir, m, err);
	r = r ?: eng_tensors_open(dir, &l.ts, err);
	if (r)
		goto free_model;
	m->layers = calloc(m->config.nr_layers, sizeof(*m->layers));
	m->arena = eng_arena_create();
	if (!m->layers || !m->arena)
		r = eng_refuse(err, -ENOMEM, "%s: out of memory", dir);
	r = r ?: eng_weights_load(&l);
	if (!r && !check_only)
		r = eng_model_hash(m, err);
	eng_tensors_close(&l.ts);
	if (r)
		goto free_model;
	m->weight_bytes = eng_arena_bytes(m->arena);
	*ret = m;
	return 0;
free_model:
	eng_model_free(m);
	return r;
}

int eng_model_load(const char *dir, const struct eng_model_options *opt,
		   struct eng_model **ret, struct eng_err *err)
{
	return load(dir, opt, false, ret, err);
}

int eng_model_check(const char *dir, const struct eng_model_options *opt,
		    struct eng_err *err)
{
	struct eng_model *m = NULL;
	int r = load(dir, opt, true, &m, err);

	if (!r)
		eng_model_free(m);
	return r;
}

void eng_model_free(struct eng_model *m)
{
	if (!m)
		return;
	eng_tokenizer_free(m->tok);
	eng_arena_destroy(m->arena);
	free(m->layers);
	free(m);
}

int eng_model_layout(const struct eng_model *m, u32 dtype, u32 scale_kind,
		     struct kv_layout *ret)
{
	const struct eng_config *c = &m->config;
	bool fp8 = dtype == KV_DTYPE_E4M3;
	struct kv_layout y = {
		.format_version = KV_LAYOUT_VERSION,
		.kind = c->arch == ENG_ARCH_MLA ? KV_LAYOUT_MLA : KV_LAYOUT_GQA,
		.dtype = dtype,
		.scale_kind = scale_kind,
		.page_tokens = KV_PAGE_TOKENS,
		.nr_layers = c->nr_layers,
		.nr_kv_heads = c->nr_kv_heads,
		.head_dim = c->head_dim,
		.latent_dim = c->latent_dim,
		.rope_dim = c->rope_dim,
	};

	if (dtype != KV_DTYPE_BF16 && dtype != KV_DTYPE_F32 && !fp8)
		return -EINVAL;
	if (fp8 != (scale_kind == KV_SCALE_TOKEN || scale_kind == KV_SCALE_STATIC))
		return -EINVAL;
	if (scale_kind == KV_SCALE_STATIC) {
		if (!m->kv_scales)
			return -ENODATA;
		y.nr_scales = m->nr_kv_scales;
	}
	memcpy(y.model_id, m->model_id, sizeof(y.model_id));
	*ret = y;
	return 0;
}
