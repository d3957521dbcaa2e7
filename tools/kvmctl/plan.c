/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - how many tokens of KV cache fit into so much memory? Needs no daemon.
 *
 * The layouts are the real ones (kv/layout.h), so padding and scales are counted. With
 * MLA the latent is the same on every tensor-parallel rank; with GQA the kv heads are
 * divided.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvmctl/kvmctl.h"

#define CONFIG_BYTES_MAX (1u << 20)

/* Per-layer shape of a model's KV cache. */
struct shape {
	char name[128];
	u32 layers;
	u32 kv_heads; /* 0: MLA */
	u32 head_dim;
	u32 latent_dim;
	u32 rope_dim;
};

static const struct shape presets[] = {
	{.name = "kimi-k2.6", .layers = 61, .latent_dim = 512, .rope_dim = 64},
	{.name = "glm-5.2", .layers = 78, .latent_dim = 512, .rope_dim = 64},
	{.name = "glm-4.6", .layers = 92, .kv_heads = 8, .head_dim = 128},
};

static const struct {
	const char *mla, *gqa;
	u32 dtype, scale_kind;
} formats[] = {
	{"mla_bf16", "gqa_bf16", KV_DTYPE_BF16, KV_SCALE_NONE},
	{"mla_fp8", "gqa_fp8", KV_DTYPE_E4M3, KV_SCALE_TOKEN},
	{"mla_fp8_s", "gqa_fp8_s", KV_DTYPE_E4M3, KV_SCALE_STATIC},
};

/* ---------------------------------------------------------------- the model */

static int read_file(struct ctl *ctl, const char *path, char **ret_text)
{
	FILE *f = fopen(path, "re");
	char *text;
	size_t n;

	if (!f)
		return ctl_error(ctl, CTL_NO_OBJECT, "%s: %s", path, strerror(errno));
	text = malloc(CONFIG_BYTES_MAX + 1);
	n = text ? fread(text, 1, CONFIG_BYTES_MAX + 1, f) : 0;
	fclose(f);
	if (!text || n > CONFIG_BYTES_MAX) {
		free(text);
		return ctl_error(ctl, CTL_FAILED, "%s: larger than %u bytes", path,
				 CONFIG_BYTES_MAX);
	}
	text[n] = 0;
	*ret_text = text;
	return CTL_OK;
}

/* A whole number >= 1, or 0 and an error unless @optional. */
static int get_dim(struct ctl *ctl, const char *path, const cJSON *config,
		   const char *field, bool optional, u32 *ret)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, field);

	*ret = 0;
	if ((!item || cJSON_IsNull(item)) && optional)
		return CTL_OK;
	if (!item)
		return ctl_error(ctl, CTL_FAILED, "%s: field \"%s\" is missing", path,
				 field);
	if (!cJSON_IsNumber(item) || item->valuedouble < 1 ||
	    item->valuedouble > 1 << 20 ||
	    item->valuedouble != (double)(u32)item->valuedouble)
		return ctl_error(ctl, CTL_FAILED,
				 "%s: %s: %g: not a whole number from 1 to %d", path,
				 field, item->valuedouble, 1 << 20);
	*ret = (u32)item->valuedouble;
	return CTL_OK;
}

static int config_shape(struct ctl *ctl, const char *path, const cJSON *root,
			struct shape *shape)
{
	const cJSON *config = cJSON_GetObjectItemCaseSensitive(root, "text_config");
	u32 hidden, heads;
	int r;

	config = cJSON_IsObject(config) ? config : root;
	r = get_dim(ctl, path, config, "num_hidden_layers", false, &shape->layers);
	if (!r)
		r = get_dim(ctl, path, config, "kv_lora_rank", true, &shape->latent_dim);
	if (r)
		return r;
	if (shape->latent_dim)
		return get_dim(ctl, path, config, "qk_rope_head_dim", false,
			       &shape->rope_dim);
	r = get_dim(ctl, path, config, "num_key_value_heads", false, &shape->kv_heads);
	if (!r)
		r = get_dim(ctl, path, config, "head_dim", true, &shape->head_dim);
	if (r || shape->head_dim)
		return r;
	r = get_dim(ctl, path, config, "hidden_size", false, &hidden);
	if (!r)
		r = get_dim(ctl, path, config, "num_attention_heads", false, &heads);
	if (!r)
		shape->head_dim = hidden / heads;
	return r;
}

static int load_shape(struct ctl *ctl, struct shape *shape)
{
	char path[1024], *text = NULL;
	cJSON *root;
	int r;

	memset(shape, 0, sizeof(*shape));
	snprintf(shape->name, sizeof(shape->name), "%s", ctl->args.model);
	snprintf(path, sizeof(path), "%s/config.json", ctl->args.model);
	r = read_file(ctl, path, &text);
	if (r)
		return r;
	root = cJSON_Parse(text);
	if (!cJSON_IsObject(root))
		r = ctl_error(ctl, CTL_FAILED, "%s: not a JSON object", path);
	else
		r = config_shape(ctl, path, root, shape);
	cJSON_Delete(root);
	free(text);
	return r;
}

static int choose_shape(struct ctl *ctl, struct shape *shape)
{
	size_t i;

	if (!ctl->args.model == !ctl->args.preset)
		return ctl_error(ctl, CTL_USAGE,
				 "plan: give --model DIR or --preset NAME");
	if (ctl->args.model)
		return load_shape(ctl, shape);
	for (i = 0; i < KV_ARRAY_SIZE(presets); i++) {
		if (strcmp(presets[i].name, ctl->args.preset))
			continue;
		*shape = presets[i];
		return CTL_OK;
	}
	return ctl_error(ctl, CTL_NO_OBJECT,
			 "--preset \"%s\": kimi-k2.6, glm-5.2 or glm-4.6",
			 ctl->args.preset);
}

/* ----------------------------------------------------------------- the plan */

static cJSON *plan_row(const struct shape *s, u32 format, double bytes,
		       double bf16_tokens)
{
	struct kv_layout l = {
		.format_version = KV_LAYOUT_VERSION,
		.kind = s->kv_heads ? KV_LAYOUT_GQA : KV_LAYOUT_MLA,
		.dtype = formats[format].dtype,
		.scale_kind = formats[format].scale_kind,
		.page_tokens = KV_PAGE_TOKENS,
		.nr_layers = s->layers,
		.nr_kv_heads = s->kv_heads,
		.head_dim = s->head_dim,
		.latent_dim = s->latent_dim,
		.rope_dim = s->rope_dim,
	};
	double pages = (double)(u64)(bytes / (double)kv_page_stride(&l));
	cJSON *row = cJSON_CreateObject();

	cJSON_AddStringToObject(row, "kv",
				s->kv_heads ? formats[format].gqa : formats[format].mla);
	cJSON_AddNumberToObject(row, "bytes_per_token",
				(double)kv_page_bytes(&l) / KV_PAGE_TOKENS);
	cJSON_AddNumberToObject(row, "page_bytes", (double)kv_page_stride(&l));
	cJSON_AddNumberToObject(row, "pages", pages);
	cJSON_AddNumberToObject(row, "tokens", pages * KV_PAGE_TOKENS);
	if (format)
		cJSON_AddNumberToObject(
			row, "times_bf16",
			bf16_tokens > 0 ? pages * KV_PAGE_TOKENS / bf16_tokens : 0);
	else
		cJSON_AddNumberToObject(row, "times_bf16", 1);
	return row;
}

static void plan_text(struct ctl *ctl, const struct shape *s, double bytes,
		      const cJSON *rows)
{
	char size[32], page[32];
	const cJSON *row;

	printf("%s: %u layers, ", s->name, s->layers);
	if (s->kv_heads)
		printf("%u kv heads x %u (this rank)", s->kv_heads, s->head_dim);
	else
		printf("MLA latent %u + rope %u (the same on each rank)", s->latent_dim,
		       s->rope_dim);
	printf("; %s of KV memory\n\n", ctl_size(ctl, bytes, size, sizeof(size)));
	printf("%-10s  %11s  %10s  %9s  %10s  %7s\n", "KV FORMAT", "BYTES/TOKEN", "PAGE",
	       "PAGES", "TOKENS", "BF16 x");
	cJSON_ArrayForEach(row, rows)
	{
		printf("%-10s  %11.0f  %10s  %9.0f  %10.0f  %7.3f\n", ctl_str(row, "kv"),
		       ctl_num(row, "bytes_per_token"),
		       ctl_size(ctl, ctl_num(row, "page_bytes"), page, sizeof(page)),
		       ctl_num(row, "pages"), ctl_num(row, "tokens"),
		       ctl_num(row, "times_bf16"));
	}
}

int ctl_plan(struct ctl *ctl)
{
	double bytes = 0, bf16_tokens = 0;
	struct shape shape;
	cJSON *doc, *rows, *row;
	u32 i;
	int r;

	if (!ctl->args.kv_bytes || ctl_parse_size(ctl->args.kv_bytes, &bytes) ||
	    bytes < 1)
		return ctl_error(ctl, CTL_USAGE,
				 "plan --bytes \"%s\": a size like 48.2GB or 44GiB",
				 ctl->args.kv_bytes ? ctl->args.kv_bytes : "");
	r = choose_shape(ctl, &shape);
	if (r)
		return r;
	if (ctl->args.tp < 1)
		return ctl_error(ctl, CTL_USAGE, "--tp %ld: at least 1", ctl->args.tp);
	if (shape.kv_heads)
		shape.kv_heads = KV_MAX(1u, shape.kv_heads / (u32)ctl->args.tp);
	doc = cJSON_CreateObject();
	cJSON_AddStringToObject(doc, "model", shape.name);
	cJSON_AddNumberToObject(doc, "bytes", bytes);
	cJSON_AddNumberToObject(doc, "layers", shape.layers);
	cJSON_AddNumberToObject(doc, "tp", (double)ctl->args.tp);
	rows = cJSON_AddArrayToObject(doc, "rows");
	for (i = 0; i < KV_ARRAY_SIZE(formats); i++) {
		row = plan_row(&shape, i, bytes, bf16_tokens);
		if (!i)
			bf16_tokens = ctl_num(row, "tokens");
		cJSON_AddItemToArray(rows, row);
	}
	if (ctl->args.json)
		r = ctl_json(ctl, doc, "plan");
	else
		plan_text(ctl, &shape, bytes, rows);
	cJSON_Delete(doc);
	return r;
}
