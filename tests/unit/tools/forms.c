/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forms.c - other stored forms of quantised weights: GPTQ's layout and its two zero-point
 * conventions (case O48), fp16 scales, an FP8 kv_b_proj. Made from kvquant's directories
 * by moving bytes, so that the same numbers must come out.
 */
#include "kernels/fp8.h"
#include "tests/unit/model/modeldir.h"
#include "tools/kvquant/kvquant.h"

static const volatile int running;

/* A checkpoint in the making: one file without index. */
struct maker {
	cJSON *header;
	char *data;
	size_t nr, room;
};

static void maker_add(struct maker *k, const char *name, const char *dtype, u64 a, u64 b,
		      const void *bytes, size_t nr)
{
	cJSON *e = cJSON_AddObjectToObject(k->header, name), *list;

	if (k->nr + nr > k->room) {
		k->room = 2 * (k->nr + nr);
		k->data = realloc(k->data, k->room);
		KVT_EXPECT(k->data);
	}
	memcpy(k->data + k->nr, bytes, nr);
	cJSON_AddStringToObject(e, "dtype", dtype);
	list = cJSON_AddArrayToObject(e, "shape");
	cJSON_AddItemToArray(list, cJSON_CreateNumber((double)a));
	if (b)
		cJSON_AddItemToArray(list, cJSON_CreateNumber((double)b));
	list = cJSON_AddArrayToObject(e, "data_offsets");
	cJSON_AddItemToArray(list, cJSON_CreateNumber((double)k->nr));
	cJSON_AddItemToArray(list, cJSON_CreateNumber((double)(k->nr + nr)));
	k->nr += nr;
}

static void maker_copy(struct maker *k, const struct eng_tensor *t)
{
	maker_add(k, t->name, eng_st_dtype_name(t->dtype), t->shape[0],
		  t->nr_dims == 2 ? t->shape[1] : 0, t->data, t->bytes);
}

static void maker_write(struct maker *k, const char *dir)
{
	char *text = cJSON_PrintUnformatted(k->header);

	md_write_shard(md_path("%s/model.safetensors", dir), strlen(text), text, k->data,
		       k->nr);
	free(text);
	cJSON_Delete(k->header);
	free(k->data);
}

/* Words or 16-bit scales [rows][n] as [n][rows]. */
static void *transpose(const struct eng_tensor *t, size_t elem)
{
	u64 rows = t->shape[0], n = t->shape[1];
	char *out = malloc(t->bytes);

	KVT_EXPECT(out);
	for (u64 r = 0; r < rows; r++)
		for (u64 i = 0; i < n; i++)
			memcpy(out + (i * rows + r) * elem, t->data + (r * n + i) * elem,
			       elem);
	return out;
}

static void *to_f16(const void *bf16, size_t nr)
{
	u16 *out = malloc(nr * 2), in;

	KVT_EXPECT(out);
	for (size_t i = 0; i < nr; i++) {
		memcpy(&in, (const char *)bf16 + 2 * i, 2);
		out[i] = kvk_f32_to_f16(kvk_bf16_to_f32(in));
		/* these scales are exact in both, or nothing below would be equal */
		KVT_EXPECT(kvk_f16_to_f32(out[i]) == kvk_bf16_to_f32(in));
	}
	return out;
}

static char *quantised(const char *model, u32 weights, struct eng_tensors *ret)
{
	char *dir = md_temp(), *out = strdup(md_path("%s/q", dir)),
	     *from = strdup(md_model(model));
	struct kvq_options o = {
		.model = from, .out = out, .weights = weights, .shard_bytes = 1 << 30};
	struct kvq_report report;
	struct eng_err err = {{0}};

	if (kvq_run(&o, &running, &report, &err) || eng_tensors_open(out, ret, &err))
		KVT_FAIL("%s", err.text);
	free(out);
	free(from);
	return dir;
}

/* The directory's small files for a maker's output. */
static char *shell_of(const char *q)
{
	char *dir = md_temp();

	KVT_EXPECT(
		!symlink(md_path("%s/q/config.json", q), md_path("%s/config.json", dir)));
	KVT_EXPECT(!symlink(md_path("%s/q/tokenizer.json", q),
			    md_path("%s/tokenizer.json", dir)));
	return dir;
}

static struct eng_model *load(const char *dir, u32 weights)
{
	struct eng_model_options opt = {.weights = weights};
	struct eng_model *m = NULL;
	struct eng_err err = {{0}};

	if (eng_model_load(dir, &opt, &m, &err))
		KVT_FAIL("%s", err.text);
	return m;
}

static const struct eng_tensor *part(const struct eng_tensors *ts, const char *base,
				     const char *suffix)
{
	const struct eng_tensor *t = eng_tensors_find(ts, md_path("%s%s", base, suffix));

	KVT_EXPECT(t);
	return t;
}

/* One packed matrix in GPTQ's layout; @zero: the nibble in qzeros. */
static void add_gptq(struct maker *k, const struct eng_tensors *ts, const char *base,
		     u32 zero, bool with_order)
{
	const struct eng_tensor *w = part(ts, base, ".weight_packed");
	const struct eng_tensor *s = part(ts, base, ".weight_scale");
	u64 rows = w->shape[0], cols = w->shape[1] * 8, groups = s->shape[1];
	void *words = transpose(w, 4), *scales = transpose(s, 2),
	     *f16 = to_f16(scales, rows * groups);
	u8 *zeros = malloc(groups * rows / 2);
	s32 *order = malloc(cols * 4);

	KVT_EXPECT(zeros && order);
	memset(zeros, (int)(zero * 0x11), groups * rows / 2);
	for (u64 i = 0; i < cols; i++)
		order[i] = (s32)(i / (cols / groups));
	maker_add(k, md_path("%s.qweight", base), "I32", cols / 8, rows, words, w->bytes);
	maker_add(k, md_path("%s.scales", base), "F16", groups, rows, f16, s->bytes);
	maker_add(k, md_path("%s.qzeros", base), "I32", groups, rows / 8, zeros,
		  groups * rows / 2);
	if (with_order)
		maker_add(k, md_path("%s.g_idx", base), "I32", cols, 0, order, cols * 4);
	free(words);
	free(scales);
	free(f16);
	free(zeros);
	free(order);
}

/* All of @ts, packed matrices in GPTQ's layout. */
static void make_gptq(const char *dir, const struct eng_tensors *ts, u32 zero,
		      bool with_order)
{
	struct maker k = {.header = cJSON_CreateObject()};

	for (size_t i = 0; i < ts->nr; i++) {
		const char *name = ts->list[i].name,
			   *dot = strstr(name, ".weight_packed");
		char base[256];

		if (!dot && !strstr(name, ".weight_scale") &&
		    !strstr(name, ".weight_shape"))
			maker_copy(&k, &ts->list[i]);
		if (!dot)
			continue;
		snprintf(base, sizeof(base), "%.*s", (int)(dot - name), name);
		add_gptq(&k, ts, base, zero, with_order);
	}
	maker_write(&k, dir);
}

static void same_experts(const char *a_dir, const char *b_dir)
{
	struct eng_model *a = load(a_dir, ENG_WEIGHTS_AS_IS),
			 *b = load(b_dir, ENG_WEIGHTS_AS_IS);
	u64 bytes[4];

	for (u32 i = a->config.nr_dense; i < a->config.nr_layers; i++) {
		const struct kvk_experts *x = &a->layers[i].experts,
					 *y = &b->layers[i].experts;

		KVT_EXPECT_EQ(y->dtype, KVK_INT4);
		KVT_EXPECT_EQ(y->scale_dtype, KVK_F16);
		eng_experts_bytes(x, bytes);
		KVT_EXPECT(!memcmp(x->w13, y->w13, bytes[0]));
		KVT_EXPECT(!memcmp(x->w2, y->w2, bytes[1]));
	}
	eng_model_free(a);
	eng_model_free(b);
	/* and as numbers, scales included */
	a = load(a_dir, ENG_WEIGHTS_F32);
	b = load(b_dir, ENG_WEIGHTS_F32);
	KVT_EXPECT(!memcmp(a->model_id, b->model_id, sizeof(a->model_id)));
	eng_model_free(a);
	eng_model_free(b);
}

static const char gptq_v1[] = "{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":32,"
			      "\"sym\":true,\"desc_act\":false}";
static const char gptq_v2[] = "{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":32,"
			      "\"sym\":true,\"checkpoint_format\":\"gptq_v2\"}";

static void refused(const char *dir, const char *a, const char *b)
{
	struct eng_model *m = NULL;
	struct eng_err err = {{0}};

	KVT_EXPECT(eng_model_load(dir, NULL, &m, &err) < 0);
	KVT_NOTE("%s", err.text);
	KVT_EXPECT_HAS(err.text, a);
	KVT_EXPECT_HAS(err.text, b);
}

/* Zero points are stored minus one, or not: the file's name for it decides, never a
 * guess. */
KVT_TEST_T(o48_gptq_zero_point_conventions, 120)
{
	struct eng_tensors ts;
	char *q = quantised("tiny-glm", ENG_WEIGHTS_INT4_G32, &ts), *dir = shell_of(q);
	char *stored = strdup(md_path("%s/q", q));

	make_gptq(dir, &ts, 7, true);
	md_edit(dir, "config.json", "quantization_config", gptq_v1);
	same_experts(stored, dir);
	md_edit(dir, "config.json", "quantization_config", gptq_v2);
	refused(dir, ".qzeros", "zero points 0x77, expected 0x88");
	make_gptq(dir, &ts, 8, false);
	same_experts(stored, dir);
	md_edit(dir, "config.json", "quantization_config", gptq_v1);
	refused(dir, ".qzeros", "zero points 0x88, expected 0x77");
	make_gptq(dir, &ts, 15, false); /* zero - 1 wrapped */
	refused(dir, ".qzeros", "zero points 0xff, expected 0x77");
	md_edit(dir, "config.json", "quantization_config", NULL);
	refused(dir, ".qweight", "no gptq quantization_config");
	eng_tensors_close(&ts);
	free(stored);
	md_remove(dir);
	md_remove(q);
}

KVT_TEST(o48_gptq_options_are_refused_by_name)
{
	static const struct {
		const char *value, *has;
	} cases[] = {
		{"{\"quant_method\":\"gptq\"}", "bits is missing"},
		{"{\"quant_method\":\"gptq\",\"bits\":8}", "bits is 8"},
		{"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":-1}",
		 "group_size is -1"},
		{"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":48,\"sym\":true}",
		 "group_size is 48"},
		{"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":32,\"sym\":false}",
		 "sym is false"},
		{"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":32,\"sym\":true,"
		 "\"desc_act\":true}",
		 "desc_act is true"},
		{"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":32,\"sym\":true,"
		 "\"checkpoint_format\":\"marlin\"}",
		 "checkpoint_format is \"marlin\""},
	};
	char *dir = md_clone("tiny-glm");

	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++) {
		md_edit(dir, "config.json", "quantization_config", cases[i].value);
		refused(dir, "config.json", cases[i].has);
	}
	md_remove(dir);
}

/* compressed-tensors with fp16 scales; a zero point beside them; a wrong weight_shape. */
KVT_TEST_T(pack_quantized_with_f16_scales, 120)
{
	struct eng_tensors ts;
	char *q = quantised("tiny-glm", ENG_WEIGHTS_INT4_G128, &ts), *dir = shell_of(q);
	char *stored = strdup(md_path("%s/q", q));
	const char *base = "model.layers.2.mlp.experts.3.up_proj";

	for (int round = 0; round < 4; round++) {
		struct maker k = {.header = cJSON_CreateObject()};

		for (size_t i = 0; i < ts.nr; i++) {
			const struct eng_tensor *t = &ts.list[i];
			bool scale = strstr(t->name, ".weight_scale");
			bool ours = !strncmp(t->name, base, strlen(base));

			if (round == 1 && ours && strstr(t->name, ".weight_shape")) {
				maker_add(&k, t->name, "I64", 2, 0, (s64[]){128, 255},
					  16);
			} else if (round == 3 && ours && scale) {
				continue;
			} else if (scale) {
				void *f16 = to_f16(t->data, t->bytes / 2);

				maker_add(&k, t->name, "F16", t->shape[0], t->shape[1],
					  f16, t->bytes);
				free(f16);
			} else {
				maker_copy(&k, t);
			}
		}
		if (round == 2)
			maker_add(&k, md_path("%s.weight_zero_point", base), "I32", 1, 0,
				  "\0\0\0\0", 4);
		maker_write(&k, dir);
		if (round == 0)
			same_experts(stored, dir);
		else
			refused(dir, base,
				round == 1
					? "weight_shape says [128,255], expected [128,256]"
				: round == 2 ? "zero points are not built"
					     : "weight_scale is missing");
	}
	eng_tensors_close(&ts);
	free(stored);
	md_remove(dir);
	md_remove(q);
}

/* DeepSeek's own FP8 files quantise kv_b_proj too: it is dequantised and rounded to BF16.
 */
KVT_TEST(fp8_kv_b_proj_is_absorbed_in_bf16)
{
	struct eng_tensors ts;
	char *q = quantised("tiny-k2", ENG_WEIGHTS_FP8, &ts), *dir = shell_of(q);
	struct maker k = {.header = cJSON_CreateObject()};
	const char *base = "model.layers.2.self_attn.kv_b_proj";
	struct eng_model *a, *b;
	const struct eng_tensor *t = part(&ts, base, ".weight");
	struct eng_source s = {
		.dtype = KVK_BF16, .rows = 1024, .cols = 512, .data = t->data};
	u8 *codes = malloc(1024 * 512);
	float scales[8 * 4];
	double err = 0, energy = 0;

	KVT_EXPECT(codes);
	KVT_EXPECT_EQ(eng_source_put(&s, KVK_E4M3, 0, codes, scales), 0);
	for (size_t i = 0; i < ts.nr; i++)
		if (&ts.list[i] != t)
			maker_copy(&k, &ts.list[i]);
	maker_add(&k, md_path("%s.weight", base), "F8_E4M3", 1024, 512, codes,
		  1024 * 512);
	maker_add(&k, md_path("%s.weight_scale_inv", base), "F32", 8, 4, scales,
		  sizeof(scales));
	maker_write(&k, dir);
	a = load(md_path("%s/q", q), ENG_WEIGHTS_AS_IS);
	b = load(dir, ENG_WEIGHTS_AS_IS);
	KVT_EXPECT_EQ(b->layers[2].w_uv.dtype, KVK_BF16);
	for (u32 i = 0; i < 8 * 64 * 512; i++) {
		float x = kvk_bf16_to_f32(((const u16 *)a->layers[2].w_uv.data)[i]);
		float y = kvk_bf16_to_f32(((const u16 *)b->layers[2].w_uv.data)[i]);

		err += (double)(x - y) * (double)(x - y);
		energy += (double)x * (double)x;
	}
	KVT_EXPECT(err > 0);
	KVT_EXPECT_LE(sqrt(err / energy), 0.03);
	KVT_EXPECT(!memcmp(a->layers[1].w_uv.data, b->layers[1].w_uv.data,
			   8 * 64 * 512 * 2));
	KVT_EXPECT(memcmp(a->model_id, b->model_id, sizeof(a->model_id)));
	eng_model_free(a);
	eng_model_free(b);
	eng_tensors_close(&ts);
	free(codes);
	md_remove(dir);
	md_remove(q);
}

KVT_MAIN()
