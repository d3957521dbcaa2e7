/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load.c - whole directories: every weight in its place, identity, and the matrix of
 * malformed directories, each refused by file, tensor and reason with nothing loaded.
 */
#include "engine/model/model.h"
#include "engine/model/safetensors.h"
#include "kernels/fp8.h"
#include "tests/unit/model/modeldir.h"

static struct eng_model *load(const char *dir, u32 weights)
{
	struct eng_model_options opt = {.weights = weights};
	struct eng_model *m = NULL;
	struct eng_err err = {{0}};

	if (eng_model_load(dir, &opt, &m, &err))
		KVT_FAIL("%s", err.text);
	return m;
}

static const u16 *raw(const struct eng_tensors *ts, const char *name)
{
	const struct eng_tensor *t = eng_tensors_find(ts, name);

	if (!t)
		KVT_FAIL("no tensor %s", name);
	return (const u16 *)(const void *)t->data; /* these files happen to be aligned */
}

KVT_TEST(mla_weights_are_in_their_places)
{
	struct eng_model *m = load(md_model("tiny-k2"), ENG_WEIGHTS_AS_IS);
	const struct eng_layer *y = &m->layers[3];
	const u16 *kv_b, *uk = y->w_uk_t.data, *uv = y->w_uv.data;
	struct eng_tensors ts;
	struct eng_err err;

	KVT_EXPECT_EQ(eng_tensors_open(md_model("tiny-k2"), &ts, &err), 0);
	KVT_EXPECT_EQ(y->w_uk_t.rows, 512);
	KVT_EXPECT_EQ(y->w_uk_t.cols, 64);
	KVT_EXPECT_EQ(y->w_uv.rows, 64);
	KVT_EXPECT_EQ(y->w_uv.cols, 512);
	kv_b = raw(&ts, "model.layers.3.self_attn.kv_b_proj.weight");
	for (u32 h = 0; h < 8; h++)
		for (u32 d = 0; d < 64; d++)
			for (u32 k = 0; k < 512; k++) {
				KVT_EXPECT(uk[(h * 512 + k) * 64 + d] ==
					   kv_b[(h * 128 + d) * 512 + k]);
				KVT_EXPECT(uv[(h * 64 + d) * 512 + k] ==
					   kv_b[(h * 128 + 64 + d) * 512 + k]);
			}
	KVT_EXPECT_EQ(y->q_a.rows, 192);
	KVT_EXPECT(!memcmp(y->q_b.data,
			   raw(&ts, "model.layers.3.self_attn.q_b_proj.weight"),
			   1024 * 192 * 2));
	KVT_EXPECT(!memcmp(y->kv_a.data,
			   raw(&ts, "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"),
			   576 * 256 * 2));
	KVT_EXPECT(y->kv_a_norm[511] ==
		   kvk_bf16_to_f32(raw(
			   &ts, "model.layers.3.self_attn.kv_a_layernorm.weight")[511]));
	KVT_EXPECT(!m->layers[0].is_moe && y->is_moe);
	KVT_EXPECT(!memcmp((const u16 *)m->layers[0].dense.gate_up.data + 512 * 256,
			   raw(&ts, "model.layers.0.mlp.up_proj.weight"), 512 * 256 * 2));
	KVT_EXPECT(!memcmp(m->lm_head.data, raw(&ts, "lm_head.weight"), 4096 * 256 * 2));
	eng_tensors_close(&ts);
	eng_model_free(m);
}

KVT_TEST(gqa_and_expert_weights_are_in_their_places)
{
	struct eng_model *m = load(md_model("tiny-glm"), ENG_WEIGHTS_AS_IS);
	const struct eng_layer *y = &m->layers[2];
	const struct kvk_experts *e = &y->experts;
	struct eng_tensors ts;
	struct eng_err err;

	KVT_EXPECT_EQ(eng_tensors_open(md_model("tiny-glm"), &ts, &err), 0);
	KVT_EXPECT_EQ(e->dtype, KVK_BF16);
	KVT_EXPECT_EQ(e->order, KVK_ORDER_STANDARD);
	for (u32 x = 0; x < 16; x++) {
		static const char *const parts[] = {"gate", "up", "down"};

		for (u32 p = 0; p < 3; p++) {
			const u16 *at =
				p < 2 ? (const u16 *)e->w13 +
						(size_t)(2 * x + p) * 128 * 256
				      : (const u16 *)e->w2 + (size_t)x * 256 * 128;

			KVT_EXPECT(
				!memcmp(at,
					raw(&ts, md_path("model.layers.2.mlp.experts.%u."
							 "%s_proj.weight",
							 x, parts[p])),
					128 * 256 * 2));
		}
	}
	KVT_EXPECT(
		y->v_bias[255] ==
		kvk_bf16_to_f32(raw(&ts, "model.layers.2.self_attn.v_proj.bias")[255]));
	KVT_EXPECT(y->q_norm && y->k_norm && !y->q_a.data);
	KVT_EXPECT(y->router_bias[15] ==
		   kvk_bf16_to_f32(raw(
			   &ts, "model.layers.2.mlp.gate.e_score_correction_bias")[15]));
	KVT_EXPECT_EQ(m->expert_bytes, 3 * 16 * 3 * 128 * 256 * 2);
	eng_tensors_close(&ts);
	eng_model_free(m);
}

/* Each scheme changes what it should and nothing else. */
KVT_TEST(schemes_touch_their_classes_only)
{
	static const struct {
		u32 weights, expert, attn, plain;
	} cases[] = {
		{ENG_WEIGHTS_AS_IS, KVK_BF16, KVK_BF16, KVK_BF16},
		{ENG_WEIGHTS_FP8, KVK_E4M3, KVK_E4M3, KVK_BF16},
		{ENG_WEIGHTS_INT4_G32, KVK_INT4, KVK_BF16, KVK_BF16},
		{ENG_WEIGHTS_INT4_G128, KVK_INT4, KVK_BF16, KVK_BF16},
		{ENG_WEIGHTS_F32, KVK_F32, KVK_F32, KVK_F32},
	};

	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++) {
		struct eng_model *m = load(md_model("tiny-k2"), cases[i].weights);
		const struct eng_layer *y = &m->layers[4];

		KVT_EXPECT_EQ(y->experts.dtype, cases[i].expert);
		KVT_EXPECT_EQ(y->q_b.dtype, cases[i].attn);
		KVT_EXPECT_EQ(y->o.dtype, cases[i].attn);
		KVT_EXPECT_EQ(y->shared.gate_up.dtype, cases[i].attn);
		KVT_EXPECT_EQ(m->layers[0].dense.down.dtype, cases[i].attn);
		KVT_EXPECT_EQ(y->router.dtype, cases[i].plain);
		KVT_EXPECT_EQ(y->w_uk_t.dtype, cases[i].plain);
		KVT_EXPECT_EQ(m->embed.dtype, cases[i].plain);
		if (y->experts.dtype == KVK_INT4) {
			KVT_EXPECT_EQ(y->experts.group,
				      cases[i].weights == ENG_WEIGHTS_INT4_G32 ? 32
									       : 128);
			KVT_EXPECT_EQ(y->experts.scale_dtype, KVK_BF16);
		}
		eng_model_free(m);
	}
}

static void ids_differ(const struct eng_model *a, const struct eng_model *b, bool differ)
{
	KVT_EXPECT_EQ(memcmp(a->model_id, b->model_id, sizeof(a->model_id)) != 0, differ);
}

KVT_TEST(model_id_follows_the_weights)
{
	struct eng_model *a = load(md_model("tiny-glm"), ENG_WEIGHTS_AS_IS), *b;
	char *dir = md_clone("tiny-glm"), *path;
	size_t bytes;
	char *shard;

	/* the same weights behind another name and tokenizer settings: equal */
	md_edit(dir, "config.json", "bos_token_id", "5");
	b = load(dir, ENG_WEIGHTS_AS_IS);
	ids_differ(a, b, false);
	eng_model_free(b);
	for (u32 w = ENG_WEIGHTS_FP8; w <= ENG_WEIGHTS_F32; w++) {
		b = load(dir, w);
		ids_differ(a, b, true);
		eng_model_free(b);
	}
	/* one bit of the last norm */
	path = strdup(md_path("%s/model-00002-of-00002.safetensors", dir));
	shard = md_read(path, &bytes);
	shard[bytes - 2] ^= 1;
	md_write(path, shard, bytes);
	b = load(dir, ENG_WEIGHTS_AS_IS);
	ids_differ(a, b, true);
	eng_model_free(b);
	/* a number that changes what is computed */
	shard[bytes - 2] ^= 1;
	md_write(path, shard, bytes);
	md_edit(dir, "config.json", "rope_parameters.rope_theta", "10001");
	b = load(dir, ENG_WEIGHTS_AS_IS);
	ids_differ(a, b, true);
	eng_model_free(b);
	eng_model_free(a);
	free(shard);
	free(path);
	md_remove(dir);
}

KVT_TEST(layouts_of_both_models)
{
	struct eng_model *m = load(md_model("tiny-k2"), ENG_WEIGHTS_AS_IS);
	struct kv_layout y;

	KVT_EXPECT_EQ(eng_model_layout(m, KV_DTYPE_E4M3, KV_SCALE_TOKEN, &y), 0);
	KVT_EXPECT_EQ(kv_layer_bytes(&y), 37120);
	KVT_EXPECT_EQ(y.nr_layers, 5);
	KVT_EXPECT(!memcmp(y.model_id, m->model_id, sizeof(y.model_id)));
	KVT_EXPECT_EQ(eng_model_layout(m, KV_DTYPE_BF16, KV_SCALE_NONE, &y), 0);
	KVT_EXPECT_EQ(kv_layer_bytes(&y), 73728);
	KVT_EXPECT_EQ(eng_model_layout(m, KV_DTYPE_BF16, KV_SCALE_TOKEN, &y), -EINVAL);
	KVT_EXPECT_EQ(eng_model_layout(m, KV_DTYPE_E4M3, KV_SCALE_NONE, &y), -EINVAL);
	KVT_EXPECT_EQ(eng_model_layout(m, KV_DTYPE_E4M3, KV_SCALE_STATIC, &y), -ENODATA);
	eng_model_free(m);
	m = load(md_model("tiny-glm"), ENG_WEIGHTS_AS_IS);
	KVT_EXPECT_EQ(eng_model_layout(m, KV_DTYPE_E4M3, KV_SCALE_TOKEN, &y), 0);
	KVT_EXPECT_EQ(kv_layer_bytes(&y), 64 * 2 * 2 * 128 + 2 * 2 * 64 * 2);
	eng_model_free(m);
}

/* ------------------------------------------------------ malformed directories */

static const char shard2[] = "model-00002-of-00003.safetensors";
static const char index_json[] = "model.safetensors.index.json";

/* Load and check refuse alike; nothing comes out. */
static void refused(const char *dir, u32 weights, const char *a, const char *b,
		    const char *c)
{
	struct eng_model_options opt = {.weights = weights};
	struct eng_model *m = (struct eng_model *)dir; /* must stay as it is */
	struct eng_err err = {{0}}, err2 = {{0}};
	int r = eng_model_load(dir, &opt, &m, &err);

	KVT_NOTE("%s", err.text);
	KVT_EXPECT(r < 0);
	KVT_EXPECT(m == (struct eng_model *)dir);
	KVT_EXPECT_HAS(err.text, a);
	KVT_EXPECT_HAS(err.text, b);
	KVT_EXPECT_HAS(err.text, c);
	if (!strstr(c, "infinite")) {
		KVT_EXPECT_EQ(eng_model_check(dir, &opt, &err2), r);
		KVT_EXPECT_STR(err2.text, err.text);
	}
}

struct edit {
	const char *tensor, *field, *value;
};

static void edit_entry(cJSON *header, void *arg)
{
	const struct edit *e = arg;
	cJSON *t = cJSON_GetObjectItemCaseSensitive(header, e->tensor);

	KVT_EXPECT(t);
	md_set(t, e->field, e->value);
}

KVT_TEST(malformed_wrong_dtype_or_shape)
{
	static const struct {
		struct edit e;
		const char *has;
	} cases[] = {
		{{"model.layers.3.self_attn.o_proj.weight", "dtype", "\"F16\""},
		 "is F16 [256,512], expected"},
		{{"model.layers.3.self_attn.o_proj.weight", "shape", "[512,256]"},
		 "is BF16 [512,256], expected"},
		{{"model.layers.3.self_attn.o_proj.weight", "shape", "[131072]"},
		 "is BF16 [131072], expected"},
		{{"model.layers.3.self_attn.o_proj.weight", "dtype", "\"F32\""},
		 "need 524288 bytes"},
		{{"model.layers.3.input_layernorm.weight", "shape", "[1,256]"},
		 "is BF16 [1,256], expected"},
		{{"model.layers.3.input_layernorm.weight", "dtype", "\"F16\""},
		 "is F16 [256], expected"},
		{{"model.layers.3.mlp.experts.7.up_proj.weight", "shape", "[256,128]"},
		 "is BF16 [256,128]"},
		{{"model.layers.3.mlp.gate.weight", "shape", "[256,16]"},
		 "is BF16 [256,16], expected"},
		{{"model.layers.3.mlp.gate.e_score_correction_bias", "dtype", "\"I16\""},
		 "is other [16]"},
		{{"model.layers.3.self_attn.kv_b_proj.weight", "shape", "[512,1024]"},
		 "is BF16 [512,1024]"},
	};

	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++) {
		char *dir = md_clone("tiny-k2");
		struct edit e = cases[i].e;

		md_edit_shard(dir, shard2, edit_entry, &e);
		refused(dir, ENG_WEIGHTS_AS_IS, shard2, e.tensor, cases[i].has);
		md_remove(dir);
	}
}

/* An FP8 dtype without scales, packed without configuration. */
KVT_TEST(malformed_quantised_without_its_parts)
{
	struct edit e = {"model.layers.3.self_attn.o_proj.weight", "dtype",
			 "\"F8_E4M3\""};
	char *dir = md_clone("tiny-k2");

	md_edit_shard(dir, shard2, edit_entry, &e);
	refused(dir, ENG_WEIGHTS_AS_IS, shard2, e.tensor, "need 131072 bytes");
	e.field = "shape";
	e.value = "[256,1024]";
	md_edit_shard(dir, shard2, edit_entry, &e);
	refused(dir, ENG_WEIGHTS_AS_IS, shard2, e.tensor,
		"is F8_E4M3 [256,1024], expected");
	md_remove(dir);
}

static void rename_entry(cJSON *header, void *arg)
{
	const char **names = arg;
	cJSON *t = cJSON_DetachItemFromObjectCaseSensitive(header, names[0]);

	KVT_EXPECT(t);
	cJSON_AddItemToObject(header, names[1], t);
}

/* Renames a tensor in shard and index alike. */
static char *renamed(const char *from, const char *to)
{
	char *dir = md_clone("tiny-k2"),
	     *path = strdup(md_path("%s/%s", dir, index_json)), *text;
	const char *names[2] = {from, to};
	size_t bytes;
	cJSON *root;

	md_edit_shard(dir, shard2, rename_entry, names);
	text = md_read(path, &bytes);
	root = cJSON_Parse(text);
	rename_entry(cJSON_GetObjectItem(root, "weight_map"), names);
	free(text);
	text = cJSON_Print(root);
	md_write(path, text, strlen(text));
	cJSON_Delete(root);
	free(text);
	free(path);
	return dir;
}

KVT_TEST(malformed_missing_and_unexpected_tensors)
{
	static const char *const tensors[] = {
		"model.layers.3.mlp.experts.7.up_proj.weight",
		"model.layers.3.mlp.gate.weight",
		"model.layers.3.mlp.gate.e_score_correction_bias",
		"model.layers.3.self_attn.kv_a_layernorm.weight",
		"model.layers.3.self_attn.kv_b_proj.weight",
		"model.layers.3.post_attention_layernorm.weight",
		"model.layers.3.mlp.shared_experts.down_proj.weight",
	};
	char *dir;

	for (size_t i = 0; i < KV_ARRAY_SIZE(tensors); i++) {
		/* layers behind the last may be there: the rename itself is harmless */
		dir = renamed(tensors[i], "model.layers.5.spare.weight");
		refused(dir, ENG_WEIGHTS_AS_IS, index_json, tensors[i], "is missing");
		md_remove(dir);
	}
	/* a bias that the forward pass does not know would be left out silently */
	dir = md_clone("tiny-glm");
	md_edit(dir, "config.json", "attention_bias", "false");
	refused(dir, ENG_WEIGHTS_AS_IS, ".safetensors",
		"model.layers.0.self_attn.k_proj.bias",
		"is not part of this architecture");
	md_remove(dir);
	dir = md_clone("tiny-glm");
	md_edit(dir, "config.json", "use_qk_norm", "false");
	refused(dir, ENG_WEIGHTS_AS_IS, ".safetensors", "self_attn.k_norm.weight",
		"is not part");
	md_remove(dir);
}

KVT_TEST(malformed_index_and_shards)
{
	char *dir = md_clone("tiny-k2"), *raw_bytes;
	size_t bytes;

	unlink(md_path("%s/%s", dir, shard2));
	refused(dir, ENG_WEIGHTS_AS_IS, shard2, "shard", "No such file");
	md_remove(dir);

	dir = md_clone("tiny-k2");
	raw_bytes = md_read(md_path("%s/%s", dir, shard2), &bytes);
	for (int i = 0; i < 4; i++) {
		size_t n[] = {bytes - 1, bytes / 2, 30000, 5};
		const char *has[] = {"truncated", "truncated", "", "too short"};

		md_write(md_path("%s/%s", dir, shard2), raw_bytes, n[i]);
		refused(dir, ENG_WEIGHTS_AS_IS, shard2, "", has[i]);
	}
	memset(raw_bytes, 0, 8);
	raw_bytes[7] = (char)0x80; /* 2^63 */
	md_write(md_path("%s/%s", dir, shard2), raw_bytes, bytes);
	refused(dir, ENG_WEIGHTS_AS_IS, shard2, "header length 9223372036854775808",
		"limit of 100000000 bytes");
	free(raw_bytes);
	md_remove(dir);

	dir = md_clone("tiny-k2");
	unlink(md_path("%s/%s", dir, index_json));
	refused(dir, ENG_WEIGHTS_AS_IS, dir, index_json, "neither");
	md_remove(dir);
	refused("/nonexistent/model", ENG_WEIGHTS_AS_IS, "/nonexistent/model/config.json",
		"", "No such");
}

KVT_TEST(malformed_spans)
{
	static const struct {
		struct edit e;
		const char *has;
	} cases[] = {
		{{"model.layers.3.input_layernorm.weight", "data_offsets", "[0,512]"},
		 "overlaps"},
		{{"model.layers.3.input_layernorm.weight", "data_offsets", "[512,0]"},
		 "before it begins"},
		{{"model.layers.3.input_layernorm.weight", "data_offsets", "[0,1e15]"},
		 "only"},
		{{"model.layers.3.input_layernorm.weight", "shape",
		  "[9007199254740992,4096]"},
		 "overflows"},
	};

	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++) {
		char *dir = md_clone("tiny-k2");
		struct edit e = cases[i].e;

		md_edit_shard(dir, shard2, edit_entry, &e);
		refused(dir, ENG_WEIGHTS_AS_IS, shard2,
			i ? e.tensor : "tensor model.layers.", cases[i].has);
		md_remove(dir);
	}
}

KVT_TEST(malformed_config_and_tokenizer)
{
	char *dir = md_clone("tiny-k2");

	md_edit(dir, "config.json", "architectures", "[\"GPT2LMHeadModel\"]");
	refused(dir, ENG_WEIGHTS_AS_IS, "config.json", "architectures",
		"GPT2LMHeadModel");
	md_remove(dir);

	dir = md_clone("tiny-k2");
	md_edit(dir, "tokenizer.json", "model.merges", NULL);
	refused(dir, ENG_WEIGHTS_AS_IS, "tokenizer.json", "model.merges", "missing");
	unlink(md_path("%s/tokenizer.json", dir));
	refused(dir, ENG_WEIGHTS_AS_IS, "tokenizer.json", "", "No such file");
	md_remove(dir);

	dir = md_clone("tiny-k2");
	md_edit(dir, "config.json", "vocab_size", "4095");
	refused(dir, ENG_WEIGHTS_AS_IS, "tokenizer.json", "token id 4095",
		"vocab_size 4095");
	md_edit(dir, "config.json", "vocab_size", "8192");
	refused(dir, ENG_WEIGHTS_AS_IS, ".safetensors", "model.embed_tokens.weight",
		"expected BF16, F32 or F8_E4M3 [8192,256]");
	md_remove(dir);

	dir = md_clone("tiny-k2");
	md_edit(dir, "config.json", "hidden_size", "512");
	refused(dir, ENG_WEIGHTS_AS_IS, ".safetensors", "model.embed_tokens.weight",
		"[4096,512]");
	md_remove(dir);

	dir = md_clone("tiny-k2");
	md_edit(dir, "config.json", "quantization_config",
		"{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}");
	refused(dir, ENG_WEIGHTS_INT4_G32, "config.json", "quantization_config says fp8",
		"int4-g32");
	md_remove(dir);
}

KVT_TEST(values_that_cannot_be_quantised)
{
	char *dir = md_clone("tiny-glm"), *path, *bytes;
	unsigned long long n = 0;
	struct eng_model *m;
	size_t size;

	path = strdup(md_path("%s/model-00001-of-00002.safetensors", dir));
	bytes = md_read(path, &size);
	memcpy(&n, bytes, 8);
	/* a value of model.layers.2.mlp.experts.0.down_proj.weight, see its data_offsets
	 */
	memcpy(bytes + 8 + n + 10962464 + 100, (u16[]){0x7f80}, 2);
	md_write(path, bytes, size);
	m = load(dir, ENG_WEIGHTS_AS_IS); /* as it is it can be loaded */
	eng_model_free(m);
	refused(dir, ENG_WEIGHTS_INT4_G32, "model-00001-of-00002.safetensors",
		"model.layers.2.mlp.experts.0.down_proj.weight", "infinite");
	refused(dir, ENG_WEIGHTS_FP8, "model-00001-of-00002.safetensors",
		"model.layers.2.mlp.experts.0.down_proj.weight", "infinite");
	free(bytes);
	free(path);
	md_remove(dir);
}

/* Damage to a real shard's header: an error with a text, or a model; never a crash. */
KVT_TEST(mutated_shards_never_crash)
{
	char *dir = md_clone("tiny-glm"), *path, *bytes, *copy;
	const char *file = "model-00002-of-00002.safetensors";
	size_t size, header;
	int ok = 0;

	path = strdup(md_path("%s/%s", dir, file));
	bytes = md_read(path, &size);
	header = 8 + (size_t)(u8)bytes[0] + 256 * (size_t)(u8)bytes[1];
	copy = malloc(size);
	KVT_EXPECT(copy);
	for (int round = 0; round < 60; round++) {
		struct eng_err err = {{0}};
		int r;

		memcpy(copy, bytes, size);
		for (u32 i = 1 + kvt_rand_below(3); i; i--)
			copy[kvt_rand_below((u32)header)] =
				(char)(32 + kvt_rand_below(95));
		md_write(path, copy, size);
		r = eng_model_check(dir, NULL, &err);
		KVT_EXPECT(r <= 0 && !r == !err.text[0]);
		ok += !r;
	}
	KVT_NOTE("%d of 60 still load", ok);
	free(copy);
	free(bytes);
	free(path);
	md_remove(dir);
}

KVT_MAIN()
