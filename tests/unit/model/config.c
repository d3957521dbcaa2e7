/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - config.json: both models' values, old and new rope fields, wrappers, and one
 * refusal per field that a forward pass depends on.
 */
#include "engine/model/config.h"
#include "tests/unit/model/modeldir.h"

static void load_ok(const char *dir, struct eng_config *c)
{
	struct eng_err err = {{0}};

	if (eng_config_load(dir, c, &err))
		KVT_FAIL("%s", err.text);
}

KVT_TEST(tiny_k2_values)
{
	struct eng_config c;

	load_ok(md_model("tiny-k2"), &c);
	KVT_EXPECT_EQ(c.arch, ENG_ARCH_MLA);
	KVT_EXPECT_EQ(c.hidden, 256);
	KVT_EXPECT_EQ(c.nr_layers, 5);
	KVT_EXPECT_EQ(c.vocab, 4096);
	KVT_EXPECT_EQ(c.nr_q_heads, 8);
	KVT_EXPECT_EQ(c.nr_kv_heads, 0);
	KVT_EXPECT_EQ(c.q_rank, 192);
	KVT_EXPECT_EQ(c.latent_dim, 512);
	KVT_EXPECT_EQ(c.rope_dim, 64);
	KVT_EXPECT_EQ(c.nope_dim, 64);
	KVT_EXPECT_EQ(c.v_dim, 64);
	KVT_EXPECT_EQ(c.nr_dense, 1);
	KVT_EXPECT_EQ(c.dense_inter, 512);
	KVT_EXPECT_EQ(c.nr_experts, 16);
	KVT_EXPECT_EQ(c.top_k, 4);
	KVT_EXPECT_EQ(c.expert_inter, 128);
	KVT_EXPECT_EQ(c.shared_inter, 128);
	KVT_EXPECT(c.norm_topk && !c.tie_embed);
	KVT_EXPECT_EQ(c.nr_eos, 1);
	KVT_EXPECT_EQ(c.eos[0], 0);
	KVT_EXPECT_EQ(c.quant, ENG_QUANT_NONE);
	KVT_EXPECT(c.rope.yarn && c.rope.interleaved);
	KVT_EXPECT_EQ(c.rope.dim, 64);
	/* (0.1 ln 8 + 1)^2 / sqrt(128) */
	KVT_EXPECT(fabsf(c.sm_scale - 0.128966f) < 1e-5f);
	KVT_EXPECT(c.routed_scale == 2.5f);
}

KVT_TEST(tiny_glm_values)
{
	struct eng_config c;

	load_ok(md_model("tiny-glm"), &c);
	KVT_EXPECT_EQ(c.arch, ENG_ARCH_GQA);
	KVT_EXPECT_EQ(c.nr_q_heads, 8);
	KVT_EXPECT_EQ(c.nr_kv_heads, 2);
	KVT_EXPECT_EQ(c.head_dim, 128);
	KVT_EXPECT_EQ(c.latent_dim, 0);
	KVT_EXPECT(c.qk_norm && c.qkv_bias);
	KVT_EXPECT(!c.rope.yarn && !c.rope.interleaved);
	KVT_EXPECT_EQ(c.rope.dim, 64);
	KVT_EXPECT(c.rope.theta == 10000.0);
	KVT_EXPECT(c.norm_eps == 1e-5f);
}

/* transformers 4: rope_theta at the top, rope_scaling for YaRN */
KVT_TEST(old_rope_fields_mean_the_same)
{
	struct eng_config a, b;
	char *dir = md_clone("tiny-k2");

	load_ok(dir, &a);
	md_edit(dir, "config.json", "rope_parameters", NULL);
	md_edit(dir, "config.json", "rope_theta", "50000.0");
	md_edit(dir, "config.json", "rope_scaling",
		"{\"type\":\"yarn\",\"factor\":8.0,\"beta_fast\":32.0,\"beta_slow\":1.0,"
		"\"mscale\":1.0,\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":1024}");
	load_ok(dir, &b);
	KVT_EXPECT(!memcmp(&a.rope, &b.rope, sizeof(a.rope)));
	KVT_EXPECT(a.sm_scale == b.sm_scale);
	md_remove(dir);
	dir = md_clone("tiny-glm");
	load_ok(dir, &a);
	md_edit(dir, "config.json", "rope_parameters", NULL);
	md_edit(dir, "config.json", "rope_theta", "10000");
	md_edit(dir, "config.json", "rope_scaling", "null");
	load_ok(dir, &b);
	KVT_EXPECT(!memcmp(&a.rope, &b.rope, sizeof(a.rope)));
	md_remove(dir);
}

KVT_TEST(kimi_names_and_wrappers)
{
	struct eng_config a, b;
	char *dir = md_clone("tiny-k2"), *text, *path;
	size_t bytes;
	cJSON *inner, *outer;

	load_ok(dir, &a);
	md_edit(dir, "config.json", "architectures", "[\"KimiK2ForCausalLM\"]");
	load_ok(dir, &b);
	KVT_EXPECT_EQ(b.arch, ENG_ARCH_MLA);
	path = strdup(md_path("%s/config.json", dir));
	text = md_read(path, &bytes);
	inner = cJSON_Parse(text);
	outer = cJSON_CreateObject();
	cJSON_AddItemToObject(outer, "architectures",
			      cJSON_Parse("[\"KimiK25ForConditionalGeneration\"]"));
	cJSON_AddItemToObject(outer, "text_config", inner);
	free(text);
	text = cJSON_Print(outer);
	md_write(path, text, strlen(text));
	load_ok(dir, &b);
	KVT_EXPECT(!memcmp(&a, &b, sizeof(a)));
	free(text);
	free(path);
	cJSON_Delete(outer);
	md_remove(dir);
}

/* The fields of published configurations, as far as a forward pass needs them. */
KVT_TEST(published_configurations)
{
	static const char kimi[] =
		"{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"attention_bias\":false,"
		"\"bos_token_id\":163584,\"eos_token_id\":163585,\"first_k_dense_replace\":1,"
		"\"hidden_act\":\"silu\",\"hidden_size\":7168,\"intermediate_size\":18432,"
		"\"kv_lora_rank\":512,\"max_position_embeddings\":131072,"
		"\"model_type\":\"kimi_k2\",\"moe_intermediate_size\":2048,"
		"\"moe_layer_freq\":1,\"n_group\":1,\"n_routed_experts\":384,"
		"\"n_shared_experts\":1,\"norm_topk_prob\":true,\"num_attention_heads\":64,"
		"\"num_experts_per_tok\":8,\"num_hidden_layers\":61,"
		"\"num_key_value_heads\":64,\"q_lora_rank\":1536,\"qk_nope_head_dim\":128,"
		"\"qk_rope_head_dim\":64,\"quantization_config\":{\"activation_scheme\":"
		"\"dynamic\",\"fmt\":\"e4m3\",\"quant_method\":\"fp8\","
		"\"weight_block_size\":[128,128]},\"rms_norm_eps\":1e-06,\"rope_scaling\":"
		"{\"beta_fast\":1.0,\"beta_slow\":1.0,\"factor\":32.0,\"mscale\":1.0,"
		"\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096,"
		"\"type\":\"yarn\"},\"rope_theta\":50000.0,\"routed_scaling_factor\":2.827,"
		"\"scoring_func\":\"sigmoid\",\"topk_group\":1,\"topk_method\":\"noaux_tc\","
		"\"v_head_dim\":128,\"vocab_size\":163840}";
	static const char glm[] =
		"{\"architectures\":[\"Glm4MoeForCausalLM\"],\"attention_bias\":true,"
		"\"eos_token_id\":[151329,151336,151338],\"head_dim\":128,"
		"\"hidden_act\":\"silu\",\"hidden_size\":5120,\"partial_rotary_factor\":0.5,"
		"\"intermediate_size\":12288,\"max_position_embeddings\":131072,"
		"\"moe_intermediate_size\":1536,\"norm_topk_prob\":true,"
		"\"num_attention_heads\":96,\"n_group\":1,\"topk_group\":1,"
		"\"n_routed_experts\":160,\"n_shared_experts\":1,"
		"\"routed_scaling_factor\":2.5,\"num_experts_per_tok\":8,"
		"\"first_k_dense_replace\":3,\"num_hidden_layers\":92,"
		"\"num_key_value_heads\":8,\"rms_norm_eps\":1e-05,\"rope_scaling\":null,"
		"\"rope_theta\":1000000,\"use_qk_norm\":true,\"vocab_size\":151552}";
	char *dir = md_temp();
	struct eng_config c;

	md_write(md_path("%s/config.json", dir), kimi, strlen(kimi));
	load_ok(dir, &c);
	KVT_EXPECT_EQ(c.quant, ENG_QUANT_FP8);
	KVT_EXPECT_EQ(c.nr_experts, 384);
	KVT_EXPECT(fabsf(c.sm_scale - 0.130861f) <
		   1e-5f); /* (0.1 ln 32 + 1)^2 / sqrt(192) */
	md_write(md_path("%s/config.json", dir), glm, strlen(glm));
	load_ok(dir, &c);
	KVT_EXPECT_EQ(c.nr_eos, 3);
	KVT_EXPECT_EQ(c.rope.dim, 64);
	KVT_EXPECT_EQ(c.nr_dense, 3);
	md_remove(dir);
}

/* Angles and YaRN's ramp against values worked out by the NumPy specification. */
KVT_TEST(rope_tables)
{
	struct eng_config c;
	float *t = malloc(4000 * 64 * sizeof(*t));

	KVT_EXPECT(t);
	load_ok(md_model("tiny-glm"), &c);
	eng_rope_table(&c.rope, 4000, t);
	KVT_EXPECT(t[0] == 1.0f && t[32] == 0.0f);
	KVT_EXPECT(fabs((double)t[64 * 3999] - cos(3999.0)) < 1e-7);
	KVT_EXPECT(fabs((double)t[64 * 3999 + 32 + 31] -
			sin(3999.0 / pow(10000.0, 62.0 / 64.0))) < 1e-7);
	load_ok(md_model("tiny-k2"), &c);
	eng_rope_table(&c.rope, 4000, t);
	/* mscale equals mscale_all_dim: no factor; pair 0 is not interpolated, pair 31 is
	 * by 8 */
	KVT_EXPECT(t[0] == 1.0f);
	KVT_EXPECT(fabs((double)t[64 * 3999] - cos(3999.0)) < 1e-7);
	KVT_EXPECT(fabs((double)t[64 * 3999 + 31] -
			cos(3999.0 / (8 * pow(50000.0, 62.0 / 64.0)))) < 1e-7);
	free(t);
}

static const struct bad {
	const char *model, *field, *value, *has;
} bad[] = {
	{"tiny-k2", "architectures", "[\"LlamaForCausalLM\"]",
	 "architectures is [\"LlamaForCausalLM\"]"},
	{"tiny-k2", "architectures", "[]", "architectures is []"},
	{"tiny-k2", "architectures", NULL, "architectures is missing"},
	{"tiny-k2", "hidden_size", NULL, "hidden_size is missing"},
	{"tiny-k2", "hidden_size", "0",
	 "hidden_size is 0, expected an integer in 1..1048576"},
	{"tiny-k2", "hidden_size", "-256", "hidden_size is -256"},
	{"tiny-k2", "hidden_size", "256.5", "hidden_size is 256.5"},
	{"tiny-k2", "hidden_size", "\"256\"", "hidden_size is \"256\""},
	{"tiny-k2", "hidden_size", "1e300", "hidden_size is 1e+300"},
	{"tiny-k2", "num_hidden_layers", "257", "num_hidden_layers is 257"},
	{"tiny-k2", "vocab_size", "null", "vocab_size is null"},
	{"tiny-k2", "max_position_embeddings", "[]", "max_position_embeddings is []"},
	{"tiny-k2", "rms_norm_eps", "-1", "rms_norm_eps is -1"},
	{"tiny-k2", "hidden_act", "\"gelu\"", "hidden_act is \"gelu\""},
	{"tiny-k2", "num_attention_heads", "129", "num_attention_heads is 129"},
	{"tiny-k2", "num_key_value_heads", "2", "num_key_value_heads is 2"},
	{"tiny-k2", "q_lora_rank", "null", "q_lora_rank is null"},
	{"tiny-k2", "kv_lora_rank", "256", "kv_lora_rank is 256, expected 512"},
	{"tiny-k2", "qk_rope_head_dim", "32", "qk_rope_head_dim is 32, expected 64"},
	{"tiny-k2", "qk_nope_head_dim", NULL, "qk_nope_head_dim is missing"},
	{"tiny-k2", "v_head_dim", "0", "v_head_dim is 0"},
	{"tiny-k2", "attention_bias", "true", "attention_bias is true"},
	{"tiny-k2", "first_k_dense_replace", "6", "first_k_dense_replace is 6"},
	{"tiny-k2", "n_routed_experts", "0", "n_routed_experts is 0"},
	{"tiny-k2", "num_experts_per_tok", "17", "num_experts_per_tok is 17"},
	{"tiny-k2", "n_group", "3", "n_group is 3, expected a divisor"},
	{"tiny-k2", "topk_group", "2", "topk_group is 2"},
	{"tiny-k2", "n_group", "8", "num_experts_per_tok is 4, expected at most"},
	{"tiny-k2", "norm_topk_prob", "1", "norm_topk_prob is 1"},
	{"tiny-k2", "routed_scaling_factor", NULL, "routed_scaling_factor is missing"},
	{"tiny-k2", "scoring_func", "\"softmax\"", "scoring_func is \"softmax\""},
	{"tiny-k2", "topk_method", "\"greedy\"", "topk_method is \"greedy\""},
	{"tiny-k2", "moe_layer_freq", "2", "moe_layer_freq is 2"},
	{"tiny-k2", "eos_token_id", "4096", "eos_token_id is 4096"},
	{"tiny-k2", "eos_token_id", "[1,\"x\"]", "eos_token_id is [1,\"x\"]"},
	{"tiny-k2", "bos_token_id", "-1", "bos_token_id is -1"},
	{"tiny-k2", "rope_parameters", "7", "rope_parameters is 7"},
	{"tiny-k2", "rope_parameters", NULL, "rope_theta is missing"},
	{"tiny-k2", "rope_parameters.rope_theta", "0", "rope_parameters.rope_theta is 0"},
	{"tiny-k2", "rope_parameters.rope_type", "\"llama3\"",
	 "rope_parameters.rope_type is \"llama3\""},
	{"tiny-k2", "rope_parameters.factor", NULL, "rope_parameters.factor is missing"},
	{"tiny-k2", "rope_parameters.factor", "0.5", "rope_parameters.factor is 0.5"},
	{"tiny-k2", "rope_parameters.original_max_position_embeddings", NULL,
	 "original_max_position_embeddings is missing"},
	{"tiny-k2", "rope_parameters.attention_factor", "1.2", "attention_factor is 1.2"},
	{"tiny-k2", "quantization_config", "[]", "quantization_config is []"},
	{"tiny-k2", "quantization_config", "{\"quant_method\":\"awq\"}",
	 "quant_method is \"awq\""},
	{"tiny-k2", "quantization_config", "{\"quant_method\":\"fp8\"}",
	 "weight_block_size is missing"},
	{"tiny-k2", "quantization_config",
	 "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,64]}",
	 "weight_block_size is [128,64]"},
	{"tiny-k2", "quantization_config",
	 "{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\",\"weight_block_size\":[128,128]}",
	 "fmt is \"e5m2\""},
	{"tiny-k2", "quantization_config",
	 "{\"quant_method\":\"compressed-tensors\",\"format\":\"marlin-24\"}",
	 "format is \"marlin-24\""},
	{"tiny-glm", "head_dim", "96", "head_dim is 96"},
	{"tiny-glm", "num_key_value_heads", "3", "num_attention_heads is 8"},
	{"tiny-glm", "num_attention_heads", "34", "num_attention_heads is 34"},
	{"tiny-glm", "attention_bias", NULL, "attention_bias is missing"},
	{"tiny-glm", "rope_parameters.rope_type", "\"yarn\"", "rope_type is \"yarn\""},
	{"tiny-glm", "rope_parameters.partial_rotary_factor", "1.5",
	 "partial_rotary_factor is 1.5"},
	{"tiny-glm", "rope_parameters.partial_rotary_factor", "0.008",
	 "partial_rotary_factor is 0.008"},
};

KVT_TEST(bad_fields_are_named_with_their_value)
{
	for (size_t i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		char *dir = md_clone(bad[i].model);
		struct eng_config c = {.hidden = 77};
		struct eng_err err = {{0}};
		int r;

		md_edit(dir, "config.json", bad[i].field, bad[i].value);
		r = eng_config_load(dir, &c, &err);
		if (r >= 0)
			KVT_FAIL("%s: %s accepted", bad[i].field, bad[i].value);
		KVT_EXPECT_HAS(err.text, "config.json: ");
		KVT_EXPECT_HAS(err.text, bad[i].has);
		KVT_EXPECT_EQ(c.hidden, 77); /* untouched */
		md_remove(dir);
	}
}

/* O48: conventions that differ in a word are told apart by that word. */
KVT_TEST(o48_int4_conventions_in_config)
{
	static const struct {
		const char *field, *value, *has;
	} cases[] = {
		{"symmetric", "false", "symmetric is false, expected true (zero points"},
		{"symmetric", NULL, "symmetric is missing"},
		{"group_size", "-1", "group_size is -1"},
		{"group_size", "48", "group_size is 48, expected 32, 64 or 128"},
		{"group_size", "null", "group_size is null"},
		{"num_bits", "8", "num_bits is 8"},
		{"type", "\"float\"", "type is \"float\""},
		{"strategy", "\"channel\"", "strategy is \"channel\""},
		{"actorder", "\"group\"", "actorder is \"group\""},
	};
	const char *good =
		"{\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\","
		"\"config_groups\":{\"group_0\":{\"weights\":{\"num_bits\":4,"
		"\"type\":\"int\",\"symmetric\":true,\"strategy\":\"group\","
		"\"group_size\":32}}}}";
	char *dir = md_clone("tiny-k2"), field[128];
	struct eng_config c;
	struct eng_err err;

	md_edit(dir, "config.json", "quantization_config", good);
	load_ok(dir, &c);
	KVT_EXPECT_EQ(c.quant, ENG_QUANT_INT4);
	KVT_EXPECT_EQ(c.quant_group, 32);
	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++) {
		md_edit(dir, "config.json", "quantization_config", good);
		snprintf(field, sizeof(field),
			 "quantization_config.config_groups.group_0.weights.%s",
			 cases[i].field);
		md_edit(dir, "config.json", field, cases[i].value);
		KVT_EXPECT(eng_config_load(dir, &c, &err) < 0);
		KVT_EXPECT_HAS(err.text, cases[i].has);
	}
	md_remove(dir);
}

KVT_TEST(files_that_are_no_config)
{
	static const struct {
		const char *text, *has;
	} cases[] = {
		{"", "not JSON"},
		{"{", "not JSON"},
		{"[]", "not a JSON object"},
		{"7", "not a JSON object"},
		{"{}", "architectures is missing"},
		{"{\"a\":1,\"a\":2}", "the name \"a\" appears twice"},
		{"{} {}", "after the JSON value"},
	};
	char *dir = md_clone("tiny-k2");
	struct eng_config c;
	struct eng_err err;

	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++) {
		md_write(md_path("%s/config.json", dir), cases[i].text,
			 strlen(cases[i].text));
		KVT_EXPECT(eng_config_load(dir, &c, &err) < 0);
		KVT_EXPECT_HAS(err.text, "config.json");
		KVT_EXPECT_HAS(err.text, cases[i].has);
	}
	unlink(md_path("%s/config.json", dir));
	KVT_EXPECT_EQ(eng_config_load(dir, &c, &err), -ENOENT);
	KVT_EXPECT_HAS(err.text, "config.json: No such file");
	/* sparse, larger than any configuration: refused before it is read */
	md_write(md_path("%s/config.json", dir), "{", 1);
	KVT_EXPECT_EQ(truncate(md_path("%s/config.json", dir), 1ll << 40), 0);
	KVT_EXPECT_EQ(eng_config_load(dir, &c, &err), -EFBIG);
	KVT_EXPECT_HAS(err.text, "more than the limit of 268435456");
	md_remove(dir);
}

KVT_MAIN()
