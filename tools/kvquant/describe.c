/* SPDX-License-Identifier: Apache-2.0 */
/*
 * describe.c - config.json of the output and copies of the small files (kvquant.h).
 *
 * quantization_config follows the two formats' own conventions: compressed-tensors
 * "pack-quantized" as Kimi K2 uses it, fp8 with weight_block_size as DeepSeek-V3 does.
 */
#include "tools/kvquant/kvquant.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "engine/model/json.h"

#define COPY_MAX (64u << 20)

/* Whatever a loader may want beside weights; patterns are suffixes. */
static const char *const copy_names[] = {
	"tokenizer.json",
	"tokenizer_config.json",
	"special_tokens_map.json",
	"added_tokens.json",
	"vocab.json",
	"merges.txt",
	"generation_config.json",
	"chat_template.jinja",
	"chat_template.json",
	"LICENSE",
};
static const char *const copy_suffixes[] = {".py", ".model", ".tiktoken"};

static bool is_copied(const char *name)
{
	size_t n = strlen(name);

	for (size_t i = 0; i < KV_ARRAY_SIZE(copy_names); i++)
		if (!strcmp(name, copy_names[i]))
			return true;
	for (size_t i = 0; i < KV_ARRAY_SIZE(copy_suffixes); i++) {
		size_t k = strlen(copy_suffixes[i]);

		if (n > k && !strcmp(name + n - k, copy_suffixes[i]))
			return true;
	}
	return false;
}

static int copy_file(const char *dir, const char *name, int dirfd, struct eng_err *err)
{
	size_t bytes = 0;
	char path[4096], *text = NULL;
	int r;

	if ((size_t)snprintf(path, sizeof(path), "%s/%s", dir, name) >= sizeof(path))
		return eng_refuse(err, -ENAMETOOLONG, "%s: path too long", name);
	r = eng_file_read(path, COPY_MAX, &text, &bytes, err);
	r = r ?: kvq_write_file(dirfd, name, text, bytes, err);
	free(text);
	return r;
}

static int copy_files(const char *model, int dirfd, struct eng_err *err)
{
	DIR *dir = opendir(model);
	struct dirent *e;
	int r = 0;

	if (!dir)
		return eng_refuse(err, -errno, "%s: %s", model, strerror(errno));
	while (!r && (e = readdir(dir)))
		if (is_copied(e->d_name))
			r = copy_file(model, e->d_name, dirfd, err);
	closedir(dir);
	return r;
}

/* ------------------------------------------------------- quantization_config */

static cJSON *int4_config(const struct eng_config *c, u32 group)
{
	static const char form[] =
		"{\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\","
		"\"quantization_status\":\"compressed\",\"kv_cache_scheme\":null,"
		"\"global_compression_ratio\":null,\"config_groups\":{\"group_0\":{"
		"\"targets\":[\"Linear\"],\"input_activations\":null,"
		"\"output_activations\":null,\"weights\":{\"num_bits\":4,\"type\":\"int\","
		"\"symmetric\":true,\"strategy\":\"group\",\"group_size\":%u,"
		"\"actorder\":null,\"block_structure\":null,\"dynamic\":false,"
		"\"observer\":\"mse\",\"observer_kwargs\":{}}}},\"ignore\":[\"lm_head\","
		"\"re:.*self_attn.*\",\"re:.*shared_experts.*\","
		"\"re:.*mlp\\\\.(gate|up|gate_up|down)_proj.*\",\"re:.*mlp\\\\.gate$\"]}";
	char text[sizeof(form) + 16], extra[64];
	cJSON *q;

	snprintf(text, sizeof(text), form, group);
	q = cJSON_Parse(text);
	/* layers behind the last one (multi-token prediction) stay as they are */
	snprintf(extra, sizeof(extra), "re:.*layers\\.%u\\..*", c->nr_layers);
	if (q)
		cJSON_AddItemToArray(cJSON_GetObjectItem(q, "ignore"),
				     cJSON_CreateString(extra));
	return q;
}

static bool add_name(cJSON *list, const char *prefix, u32 layer, const char *rest)
{
	char name[128];

	snprintf(name, sizeof(name), "%smodel.layers.%u%s", prefix, layer, rest);
	return cJSON_AddItemToArray(list, cJSON_CreateString(name));
}

static cJSON *fp8_config(const struct eng_config *c, const char *prefix)
{
	cJSON *q = cJSON_Parse("{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\","
			       "\"activation_scheme\":\"dynamic\","
			       "\"weight_block_size\":[128,128],"
			       "\"modules_to_not_convert\":[\"lm_head\"]}");
	cJSON *list = cJSON_GetObjectItem(q, "modules_to_not_convert");
	bool ok = list;

	for (u32 i = 0; i < c->nr_layers && ok; i++) {
		if (c->arch == ENG_ARCH_MLA)
			ok = add_name(list, prefix, i, ".self_attn.kv_b_proj");
		if (i >= c->nr_dense)
			ok = ok && add_name(list, prefix, i, ".mlp.gate");
	}
	if (ok && add_name(list, prefix, c->nr_layers, ""))
		return q;
	cJSON_Delete(q);
	return NULL;
}

int kvq_write_config(const struct kvq_options *o, const struct eng_config *c,
		     const struct eng_tensors *ts, int dirfd, struct eng_err *err)
{
	const char *prefix =
		eng_tensors_find(ts, "model.norm.weight") ? "" : "language_model.";
	cJSON *root = NULL, *q = NULL;
	char path[4096], *text;
	int r;

	snprintf(path, sizeof(path), "%s/config.json", o->model);
	r = eng_json_load(path, &root, err);
	if (r)
		return r;
	if (o->weights == ENG_WEIGHTS_FP8)
		q = fp8_config(c, prefix);
	else if (o->weights != ENG_WEIGHTS_AS_IS)
		q = int4_config(c, o->weights == ENG_WEIGHTS_INT4_G32 ? 32 : 128);
	if (q && !cJSON_AddItemToObject(root, "quantization_config", q)) {
		cJSON_Delete(q);
		q = NULL;
	}
	text = q || o->weights == ENG_WEIGHTS_AS_IS ? cJSON_Print(root) : NULL;
	cJSON_Delete(root);
	if (!text)
		return eng_refuse(err, -ENOMEM, "config.json: out of memory");
	r = kvq_write_file(dirfd, "config.json", text, strlen(text), err);
	cJSON_free(text);
	return r ?: copy_files(o->model, dirfd, err);
}
