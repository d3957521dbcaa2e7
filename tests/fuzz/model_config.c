/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a model's config.json: refused with a sentence that names the file and
 * nothing written, or every dimension within what the engine can compute with.
 *
 * The input is the text; where it begins with a byte above 0x7f, it is a list of changes to
 * one of two right configs: a field's value replaced, a field gone, a field twice.
 */
#include <cjson/cJSON.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/model/config.h"
#include "tests/fuzz/fuzz.h"

#define TEXT_MAX (64u << 10)

static const char mla[] =
	"{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"hidden_size\":256,"
	"\"num_hidden_layers\":3,\"vocab_size\":1000,\"max_position_embeddings\":4096,"
	"\"rms_norm_eps\":1e-6,\"tie_word_embeddings\":false,\"hidden_act\":\"silu\","
	"\"bos_token_id\":1,\"eos_token_id\":[2,3],\"first_k_dense_replace\":1,"
	"\"intermediate_size\":512,\"n_routed_experts\":8,\"num_experts_per_tok\":2,"
	"\"moe_intermediate_size\":64,\"n_shared_experts\":1,\"n_group\":2,"
	"\"topk_group\":1,\"moe_layer_freq\":1,\"norm_topk_prob\":true,"
	"\"routed_scaling_factor\":2.5,\"scoring_func\":\"sigmoid\","
	"\"topk_method\":\"noaux_tc\",\"num_attention_heads\":4,"
	"\"num_key_value_heads\":4,\"q_lora_rank\":96,\"kv_lora_rank\":512,"
	"\"qk_rope_head_dim\":64,\"qk_nope_head_dim\":32,\"v_head_dim\":32,"
	"\"attention_bias\":false,\"rope_theta\":10000,\"rope_scaling\":{\"type\":\"yarn\","
	"\"factor\":40,\"original_max_position_embeddings\":512,\"beta_fast\":32,"
	"\"beta_slow\":1,\"mscale\":1,\"mscale_all_dim\":1},\"quantization_config\":{"
	"\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\","
	"\"config_groups\":{\"group_0\":{\"weights\":{\"num_bits\":4,\"type\":\"int\","
	"\"strategy\":\"group\",\"symmetric\":true,\"group_size\":32}}}}}";

static const char gqa[] =
	"{\"architectures\":[\"Glm4MoeForCausalLM\"],\"hidden_size\":256,"
	"\"num_hidden_layers\":3,\"vocab_size\":1000,\"max_position_embeddings\":4096,"
	"\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\",\"eos_token_id\":2,"
	"\"first_k_dense_replace\":1,\"intermediate_size\":512,\"n_routed_experts\":8,"
	"\"num_experts_per_tok\":2,\"moe_intermediate_size\":64,\"n_shared_experts\":1,"
	"\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":true,"
	"\"routed_scaling_factor\":1,\"num_attention_heads\":16,"
	"\"num_key_value_heads\":4,\"head_dim\":64,\"use_qk_norm\":true,"
	"\"attention_bias\":true,\"rope_theta\":1000000,\"partial_rotary_factor\":0.5,"
	"\"quantization_config\":{\"quant_method\":\"gptq\",\"bits\":4,"
	"\"group_size\":128,\"sym\":true,\"desc_act\":false}}";

static const char *const values[] = {"0",
				     "1",
				     "2",
				     "3",
				     "7",
				     "8",
				     "32",
				     "64",
				     "100",
				     "128",
				     "512",
				     "-1",
				     "0.5",
				     "0.03125",
				     "1e30",
				     "1e999",
				     "1048577",
				     "4294967296",
				     "null",
				     "true",
				     "[]",
				     "{}",
				     "\"\"",
				     "\"default\"",
				     "\"yarn\"",
				     "\"fp8\"",
				     "[128,128]",
				     "[1,2,3,4,5,6,7,8,9]",
				     "18446744073709551616",
				     "{\"weights\":{}}",
				     "\"gptq_v2\"",
				     "16777216"};

static char dir[64];

static void clean_up(void)
{
	char path[96];

	snprintf(path, sizeof(path), "%s/config.json", dir);
	unlink(path);
	rmdir(dir);
}

/* A directory with one file: the input. */
static void write_config(const void *text, size_t bytes)
{
	char path[96];
	FILE *f;

	if (!dir[0]) {
		snprintf(dir, sizeof(dir), "%s/kvt-fuzz-XXXXXX", fuzz_tmp());
		FUZZ_CHECK(mkdtemp(dir));
		atexit(clean_up);
	}
	snprintf(path, sizeof(path), "%s/config.json", dir);
	f = fopen(path, "wb");
	FUZZ_CHECK(f && fwrite(text, 1, bytes, f) == bytes && !fclose(f));
}

/* ------------------------------------------------------------------------- changes */

/* The object that @path leads to: one level down for each set bit that finds one. */
static cJSON *object_at(cJSON *v, u8 path)
{
	for (u32 i = 0; i < 4 && path >> 6; i++) {
		cJSON *c, *into = NULL;

		cJSON_ArrayForEach(c, v) if (cJSON_IsObject(c)) into = c;
		if (!into)
			break;
		v = into;
		path = (u8)(path << 1);
	}
	return v;
}

static void change(struct fuzz_in *in, cJSON *root)
{
	cJSON *o = object_at(root, fuzz_u8(in)), *value;
	u32 at = fuzz_u8(in), how = fuzz_u8(in), nr = (u32)cJSON_GetArraySize(o);
	char name[64];

	if (!nr)
		return;
	snprintf(name, sizeof(name), "%s", cJSON_GetArrayItem(o, (int)(at % nr))->string);
	value = cJSON_Parse(values[how % KV_ARRAY_SIZE(values)]);
	if (how < 0xc0)
		cJSON_ReplaceItemInObjectCaseSensitive(o, name, value);
	else if (how < 0xe0)
		cJSON_AddItemToObject(o, name, value);
	if (how < 0xe0)
		return;
	cJSON_Delete(value);
	cJSON_DeleteItemFromObjectCaseSensitive(o, name);
}

static void write_changed(struct fuzz_in *in)
{
	cJSON *root = cJSON_Parse(fuzz_u8(in) & 1 ? gqa : mla), *outer;
	char *text;

	FUZZ_CHECK(root);
	if (fuzz_u8(in) & 1) {
		outer = cJSON_CreateObject();
		cJSON_AddItemToObject(outer, "text_config", root);
		root = outer;
	}
	while (in->left >= 3)
		change(in, root);
	text = cJSON_PrintUnformatted(root);
	FUZZ_CHECK(text);
	write_config(text, strlen(text));
	cJSON_free(text);
	cJSON_Delete(root);
}

/* ------------------------------------------------------------------------- promises */

static void check_moe(const struct eng_config *c)
{
	FUZZ_CHECK(c->nr_experts && c->top_k && c->top_k <= c->nr_experts);
	FUZZ_CHECK(c->nr_groups && c->nr_experts % c->nr_groups == 0);
	FUZZ_CHECK(c->top_groups && c->top_groups <= c->nr_groups);
	FUZZ_CHECK(c->top_k <= c->nr_experts / c->nr_groups * c->top_groups);
	FUZZ_CHECK(c->nr_dense <= c->nr_layers && c->dense_inter && c->expert_inter);
	FUZZ_CHECK(isfinite(c->routed_scale) && c->routed_scale > 0);
}

static void check_attention(const struct eng_config *c)
{
	FUZZ_CHECK(c->nr_q_heads && isfinite(c->sm_scale) && c->sm_scale > 0);
	FUZZ_CHECK(c->rope.theta > 1 && c->rope.dim >= 2 && c->rope.dim % 2 == 0);
	FUZZ_CHECK(!c->rope.yarn || (c->rope.factor >= 1 && c->rope.original_positions));
	if (c->arch == ENG_ARCH_MLA) {
		FUZZ_CHECK(c->latent_dim == 512 && c->rope_dim == 64 && c->q_rank);
		FUZZ_CHECK(c->nope_dim && c->v_dim && c->nr_q_heads <= 128);
		return;
	}
	FUZZ_CHECK(c->arch == ENG_ARCH_GQA && c->nr_kv_heads);
	FUZZ_CHECK(c->head_dim == 64 || c->head_dim == 128);
	FUZZ_CHECK(c->nr_q_heads % c->nr_kv_heads == 0 && c->rope.dim <= c->head_dim);
}

static void check_config(const struct eng_config *c)
{
	FUZZ_CHECK(c->hidden && c->nr_layers && c->vocab && c->max_positions);
	FUZZ_CHECK(c->norm_eps >= 0 && c->norm_eps <= 1);
	FUZZ_CHECK(c->bos < (s32)c->vocab && c->nr_eos <= ENG_EOS_MAX);
	for (u32 i = 0; i < c->nr_eos; i++)
		FUZZ_CHECK(c->eos[i] < c->vocab);
	if (c->quant == ENG_QUANT_INT4 || c->quant == ENG_QUANT_GPTQ)
		FUZZ_CHECK(c->quant_group == 32 || c->quant_group == 64 ||
			   c->quant_group == 128);
	check_moe(c);
	check_attention(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_in in = {data, bytes};
	struct eng_config c, before;
	struct eng_err err;
	int r;

	if (bytes > TEXT_MAX)
		return 0;
	if (bytes && data[0] >= 0x80) {
		fuzz_u8(&in);
		write_changed(&in);
	} else {
		write_config(data, bytes);
	}
	memset(&c, 0x5a, sizeof(c));
	memset(&err, 0, sizeof(err));
	before = c;
	r = eng_config_load(dir, &c, &err);
	FUZZ_CHECK(r <= 0);
	if (r) {
		FUZZ_CHECK(memchr(err.text, 0, sizeof(err.text)) &&
			   strstr(err.text, "config.json"));
		FUZZ_CHECK(!memcmp(&c, &before, sizeof(c)));
		return 0;
	}
	check_config(&c);
	return 0;
}
