/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - config.json to struct eng_config.
 *
 * Every field that a forward pass depends on is either read and checked or refused: a
 * value that is silently ignored gives a model that answers nonsense fluently. Any
 * thread.
 */
#include "engine/model/config.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/mutant.h"
#include "kv/layout.h"
#include "engine/model/json.h"
#include "engine/model/rope.h"

#define DIM_MAX	       (1u << 20)
#define VOCAB_MAX      (1u << 24)
#define EXPERTS_MAX    4096u
#define POSITIONS_MAX  (1u << 27)
#define MLA_HEADS_MAX  128u
#define GQA_RATIO_MAX  16u
#define MLA_LATENT_DIM 512u
#define MLA_ROPE_DIM   64u

static const struct arch_name {
	const char *name;
	u32 arch;
} arch_names[] = {
	{"DeepseekV3ForCausalLM", ENG_ARCH_MLA},
	{"KimiK2ForCausalLM", ENG_ARCH_MLA},
	{"Glm4MoeForCausalLM", ENG_ARCH_GQA},
};

/* The one architecture named in @j; *ret_arch 0 if there is no such field. */
static int parse_arch(const struct eng_json *j, u32 *ret_arch)
{
	const cJSON *list = eng_json_field(j, "architectures");
	const cJSON *name = cJSON_GetArrayItem(list, 0);

	*ret_arch = 0;
	if (eng_json_absent(j, "architectures"))
		return 0;
	if (cJSON_IsArray(list) && cJSON_GetArraySize(list) == 1 && cJSON_IsString(name))
		for (size_t i = 0; i < KV_ARRAY_SIZE(arch_names); i++)
			if (!strcmp(name->valuestring, arch_names[i].name))
				*ret_arch = arch_names[i].arch;
	if (!*ret_arch)
		return eng_json_refuse(j, "architectures", -ENOTSUP,
				       "one of DeepseekV3ForCausalLM, KimiK2ForCausalLM, "
				       "Glm4MoeForCausalLM");
	return 0;
}

static int parse_yarn(const struct eng_json *j, struct eng_rope *r)
{
	int rc = 0;

	r->yarn = true;
	rc = rc ?: eng_json_double(j, "factor", 1, 1e6, &r->factor);
	if (!rc)
		rc = eng_json_u32(j, "original_max_position_embeddings", 1, POSITIONS_MAX,
				  &r->original_positions);
	rc = rc ?: eng_json_double_or(j, "beta_fast", 1e-3, 1e6, 32, &r->beta_fast);
	rc = rc ?: eng_json_double_or(j, "beta_slow", 1e-3, 1e6, 1, &r->beta_slow);
	rc = rc ?: eng_json_double_or(j, "mscale", 0, 1e3, 1, &r->mscale);
	rc = rc ?: eng_json_double_or(j, "mscale_all_dim", 0, 1e3, 0, &r->mscale_all_dim);
	if (!rc && !eng_json_absent(j, "attention_factor"))
		rc = eng_json_refuse(j, "attention_factor", -ENOTSUP, "no such field");
	if (!rc && cJSON_IsFalse(eng_json_field(j, "truncate")))
		rc = eng_json_refuse(j, "truncate", -ENOTSUP, "true");
	return rc;
}

/*
 * Where the rope fields are: transformers 5 has all of them in rope_parameters; before
 * that rope_theta was at the top and rope_scaling held the type, or was null.
 */
static int parse_rope(const struct eng_json *top, u32 arch, struct eng_rope *r)
{
	bool is_new = !eng_json_absent(top, "rope_parameters");
	const char *field = is_new ? "rope_parameters" : "rope_scaling";
	struct eng_json j = {.file = top->file,
			     .path = is_new ? "rope_parameters." : "rope_scaling.",
			     .obj = eng_json_field(top, field),
			     .err = top->err};
	const struct eng_json *theta = &j;
	const char *type = "default";
	int rc = 0;

	if (!eng_json_absent(top, field) && !cJSON_IsObject(j.obj))
		return eng_json_refuse(top, field, -EINVAL, "an object");
	if (!is_new || eng_json_absent(&j, "rope_theta"))
		theta = top;
	rc = eng_json_double(theta, "rope_theta", 1.0 + 1e-6, 1e12, &r->theta);
	if (!rc && cJSON_IsObject(j.obj))
		rc = eng_json_str(&j,
				  eng_json_absent(&j, "rope_type") ? "type" : "rope_type",
				  &type);
	if (rc)
		return rc;
	if (!strcmp(type, "default"))
		return 0;
	if (!strcmp(type, "yarn") && arch == ENG_ARCH_MLA)
		return parse_yarn(&j, r);
	return eng_json_refuse(
		&j, eng_json_absent(&j, "rope_type") ? "type" : "rope_type", -ENOTSUP,
		arch == ENG_ARCH_MLA ? "\"default\" or \"yarn\"" : "\"default\"");
}

static int only_dim(const struct eng_json *j, const char *field, u32 only, u32 *ret)
{
	char want[64];
	int rc = eng_json_u32(j, field, 1, DIM_MAX, ret);

	if (!rc && *ret != only) {
		snprintf(want, sizeof(want), "%u (nothing else is built)", only);
		rc = eng_json_refuse(j, field, -ENOTSUP, want);
	}
	return rc;
}

static int parse_mla(const struct eng_json *j, struct eng_config *c)
{
	bool bias = false;
	u32 kv_heads = 0;
	int rc = 0;

	if (!rc)
		rc = eng_json_u32(j, "num_attention_heads", 1, MLA_HEADS_MAX,
				  &c->nr_q_heads);
	if (!rc)
		rc = eng_json_u32_or(j, "num_key_value_heads", c->nr_q_heads,
				     c->nr_q_heads, c->nr_q_heads, &kv_heads);
	rc = rc ?: eng_json_u32(j, "q_lora_rank", 1, DIM_MAX, &c->q_rank);
	rc = rc ?: only_dim(j, "kv_lora_rank", MLA_LATENT_DIM, &c->latent_dim);
	rc = rc ?: only_dim(j, "qk_rope_head_dim", MLA_ROPE_DIM, &c->rope_dim);
	rc = rc ?: eng_json_u32(j, "qk_nope_head_dim", 1, 1024, &c->nope_dim);
	rc = rc ?: eng_json_u32(j, "v_head_dim", 1, 1024, &c->v_dim);
	rc = rc ?: eng_json_bool_or(j, "attention_bias", false, &bias);
	rc = rc ?: eng_json_bool_or(j, "rope_interleave", true, &c->rope.interleaved);
	rc = rc ?: parse_rope(j, ENG_ARCH_MLA, &c->rope);
	if (!rc && bias)
		rc = eng_json_refuse(j, "attention_bias", -ENOTSUP, "false");
	if (rc)
		return rc;
	c->rope.dim = c->rope_dim;
	c->latent_norm_eps = 1e-6f;
	c->sm_scale = (float)(1.0 / sqrt(c->nope_dim + c->rope_dim));
	if (c->rope.yarn) {
		double m = eng_yarn_mscale(c->rope.factor, c->rope.mscale_all_dim);

		c->sm_scale = (float)(m * m / sqrt(c->nope_dim + c->rope_dim));
	}
	return 0;
}

static int parse_partial_rotary(const struct eng_json *j, struct eng_config *c)
{
	struct eng_json rp = *j;
	const struct eng_json *at = j;
	double part, dim;
	int rc;

	rp.obj = eng_json_field(j, "rope_parameters");
	rp.path = "rope_parameters.";
	if (cJSON_IsObject(rp.obj) && !eng_json_absent(&rp, "partial_rotary_factor"))
		at = &rp;
	rc = eng_json_double(at, "partial_rotary_factor", 0, 1, &part);
	if (rc)
		return rc;
	dim = floor(c->head_dim * part);
	if (dim < 2 || fmod(dim, 2) != 0)
		return eng_json_refuse(
			at, "partial_rotary_factor", -EINVAL,
			"a factor that gives an even number of rotated values");
	c->rope.dim = (u32)dim;
	return 0;
}

static int parse_gqa(const struct eng_json *j, struct eng_config *c)
{
	int rc = 0;

	rc = rc ?: eng_json_u32(j, "num_attention_heads", 1, DIM_MAX, &c->nr_q_heads);
	if (!rc)
		rc = eng_json_u32(j, "num_key_value_heads", 1, KV_KV_HEADS_MAX,
				  &c->nr_kv_heads);
	rc = rc ?: eng_json_u32(j, "head_dim", 1, DIM_MAX, &c->head_dim);
	rc = rc ?: eng_json_bool_or(j, "use_qk_norm", false, &c->qk_norm);
	rc = rc ?: eng_json_bool(j, "attention_bias", &c->qkv_bias);
	if (rc)
		return rc;
	if (c->head_dim != 64 && c->head_dim != 128)
		return eng_json_refuse(j, "head_dim", -ENOTSUP, "64 or 128");
	if (c->nr_q_heads % c->nr_kv_heads ||
	    c->nr_q_heads / c->nr_kv_heads > GQA_RATIO_MAX)
		return eng_json_refuse(j, "num_attention_heads", -ENOTSUP,
				       "1..16 times num_key_value_heads");
	c->sm_scale = (float)(1.0 / sqrt(c->head_dim));
	rc = parse_rope(j, ENG_ARCH_GQA, &c->rope);
	return rc ?: parse_partial_rotary(j, c);
}

static int parse_moe(const struct eng_json *j, struct eng_config *c)
{
	u32 nr_shared = 0, freq = 1;
	double scale = 1;
	int rc = 0;

	if (!rc)
		rc = eng_json_u32(j, "first_k_dense_replace", 0, c->nr_layers,
				  &c->nr_dense);
	rc = rc ?: eng_json_u32(j, "intermediate_size", 1, DIM_MAX, &c->dense_inter);
	rc = rc ?: eng_json_u32(j, "n_routed_experts", 1, EXPERTS_MAX, &c->nr_experts);
	rc = rc ?: eng_json_u32(j, "num_experts_per_tok", 1, c->nr_experts, &c->top_k);
	rc = rc ?: eng_json_u32(j, "moe_intermediate_size", 1, DIM_MAX, &c->expert_inter);
	rc = rc ?: eng_json_u32_or(j, "n_shared_experts", 0, 64, 0, &nr_shared);
	rc = rc ?: eng_json_u32_or(j, "n_group", 1, c->nr_experts, 1, &c->nr_groups);
	rc = rc ?: eng_json_u32_or(j, "topk_group", 1, c->nr_groups, 1, &c->top_groups);
	rc = rc ?: eng_json_u32_or(j, "moe_layer_freq", 1, 1, 1, &freq);
	rc = rc ?: eng_json_bool(j, "norm_topk_prob", &c->norm_topk);
	rc = rc ?: eng_json_double(j, "routed_scaling_factor", 1e-6, 1e6, &scale);
	rc = rc ?: eng_json_only_str(j, "scoring_func", "sigmoid");
	rc = rc ?: eng_json_only_str(j, "topk_method", "noaux_tc");
	if (rc)
		return rc;
	if (c->nr_experts % c->nr_groups)
		return eng_json_refuse(j, "n_group", -EINVAL,
				       "a divisor of n_routed_experts");
	if (c->top_k > c->nr_experts / c->nr_groups * c->top_groups &&
	    !KV_MUTANT(top_k_beyond_groups))
		return eng_json_refuse(j, "num_experts_per_tok", -EINVAL,
				       "at most the experts of topk_group groups");
	c->shared_inter = nr_shared * c->expert_inter;
	c->routed_scale = (float)scale;
	return 0;
}

static int parse_tokens(const struct eng_json *j, struct eng_config *c)
{
	const cJSON *eos = eng_json_field(j, "eos_token_id"), *v;
	u32 bos = 0;
	u64 id;
	int rc;

	c->bos = -1;
	if (!eng_json_absent(j, "bos_token_id")) {
		rc = eng_json_u32(j, "bos_token_id", 0, c->vocab - 1, &bos);
		if (rc)
			return rc;
		c->bos = (s32)bos;
	}
	if (eng_json_absent(j, "eos_token_id"))
		return 0;
	if (!cJSON_IsArray(eos)) {
		c->nr_eos = 1;
		return eng_json_u32(j, "eos_token_id", 0, c->vocab - 1, &c->eos[0]);
	}
	cJSON_ArrayForEach(v, eos)
	{
		if (!eng_json_int(v, &id) || id >= c->vocab || c->nr_eos == ENG_EOS_MAX)
			return eng_json_refuse(j, "eos_token_id", -EINVAL,
					       "at most 8 ids below vocab_size");
		c->eos[c->nr_eos++] = (u32)id;
	}
	return 0;
}

/* weights of one compressed-tensors group: {"num_bits": 4, "type": "int", ...} */
static int parse_ct_weights(const struct eng_json *j, struct eng_config *c)
{
	u32 bits = 0, group = 0;
	bool symmetric = false;
	int rc = 0;

	rc = rc ?: eng_json_u32(j, "num_bits", 4, 4, &bits);
	rc = rc ?: eng_json_only_str(j, "type", "int");
	rc = rc ?: eng_json_only_str(j, "strategy", "group");
	rc = rc ?: eng_json_bool(j, "symmetric", &symmetric);
	if (!rc && !symmetric)
		rc = eng_json_refuse(j, "symmetric", -ENOTSUP,
				     "true (zero points are not built)");
	if (!rc && !eng_json_absent(j, "actorder") &&
	    !cJSON_IsFalse(eng_json_field(j, "actorder")))
		rc = eng_json_refuse(j, "actorder", -ENOTSUP, "null");
	rc = rc ?: eng_json_u32(j, "group_size", 32, 128, &group);
	if (!rc && group != 32 && group != 64 && group != 128)
		rc = eng_json_refuse(j, "group_size", -ENOTSUP, "32, 64 or 128");
	if (!rc && c->quant_group && c->quant_group != group)
		rc = eng_json_refuse(j, "group_size", -ENOTSUP,
				     "one size for all groups");
	c->quant_group = group;
	return rc;
}

static int parse_compressed_tensors(const struct eng_json *j, struct eng_config *c)
{
	const cJSON *groups = eng_json_field(j, "config_groups"), *g;
	const char *format = NULL;
	int rc;

	rc = eng_json_str(j, "format", &format);
	rc = rc ?: eng_json_only_str(j, "format", "pack-quantized");
	if (rc)
		return rc;
	if (!cJSON_IsObject(groups) || !groups->child)
		return eng_json_refuse(j, "config_groups", -EINVAL,
				       "an object with groups");
	cJSON_ArrayForEach(g, groups)
	{
		struct eng_json jg = {.file = j->file,
				      .path = "quantization_config.config_groups.*.",
				      .obj = g,
				      .err = j->err};
		struct eng_json jw = jg;

		jw.obj = cJSON_IsObject(g) ? eng_json_field(&jg, "weights") : NULL;
		jw.path = "quantization_config.config_groups.*.weights.";
		if (!cJSON_IsObject(jw.obj))
			return eng_json_refuse(j, "config_groups", -EINVAL,
					       "a weights object in each group");
		if (!eng_json_absent(&jg, "input_activations"))
			return eng_json_refuse(&jg, "input_activations", -ENOTSUP,
					       "null");
		rc = parse_ct_weights(&jw, c);
		if (rc)
			return rc;
	}
	c->quant = ENG_QUANT_INT4;
	return 0;
}

static int parse_fp8(const struct eng_json *j, struct eng_config *c)
{
	const cJSON *block = eng_json_field(j, "weight_block_size");
	u64 rows = 0, cols = 0;
	int rc;

	rc = eng_json_only_str(j, "fmt", "e4m3");
	rc = rc ?: eng_json_only_str(j, "activation_scheme", "dynamic");
	if (rc)
		return rc;
	if (cJSON_GetArraySize(block) != 2 ||
	    !eng_json_int(cJSON_GetArrayItem(block, 0), &rows) ||
	    !eng_json_int(cJSON_GetArrayItem(block, 1), &cols) || rows != 128 ||
	    cols != 128)
		return eng_json_refuse(j, "weight_block_size", -ENOTSUP, "[128,128]");
	c->quant = ENG_QUANT_FP8;
	return 0;
}

/*
 * {"bits": 4, "group_size": 128, "sym": true, "desc_act": false}. The first format stores
 * zero points minus one: which of the two a file follows is said by name, never guessed.
 */
static int parse_gptq(const struct eng_json *j, struct eng_config *c)
{
	bool sym = false, desc_act = false;
	const char *format = "gptq";
	u32 bits = 0;
	int rc = 0;

	rc = rc ?: eng_json_u32(j, "bits", 4, 4, &bits);
	rc = rc ?: eng_json_u32(j, "group_size", 32, 128, &c->quant_group);
	rc = rc ?: eng_json_bool(j, "sym", &sym);
	rc = rc ?: eng_json_bool_or(j, "desc_act", false, &desc_act);
	if (!rc && !eng_json_absent(j, "checkpoint_format"))
		rc = eng_json_str(j, "checkpoint_format", &format);
	if (rc)
		return rc;
	if (!sym)
		return eng_json_refuse(j, "sym", -ENOTSUP,
				       "true (zero points are not built)");
	if (desc_act)
		return eng_json_refuse(j, "desc_act", -ENOTSUP, "false");
	if (c->quant_group != 32 && c->quant_group != 64 && c->quant_group != 128)
		return eng_json_refuse(j, "group_size", -ENOTSUP, "32, 64 or 128");
	if (strcmp(format, "gptq") && strcmp(format, "gptq_v2"))
		return eng_json_refuse(j, "checkpoint_format", -ENOTSUP,
				       "\"gptq\" or \"gptq_v2\"");
	c->quant = ENG_QUANT_GPTQ;
	c->quant_zero = strcmp(format, "gptq") ? 8 : 7;
	return 0;
}

static int parse_quant(const struct eng_json *top, struct eng_config *c)
{
	struct eng_json j = {.file = top->file,
			     .path = "quantization_config.",
			     .obj = eng_json_field(top, "quantization_config"),
			     .err = top->err};
	const char *method = NULL;
	int rc;

	if (eng_json_absent(top, "quantization_config"))
		return 0;
	if (!cJSON_IsObject(j.obj))
		return eng_json_refuse(top, "quantization_config", -EINVAL, "an object");
	rc = eng_json_str(&j, "quant_method", &method);
	if (rc)
		return rc;
	if (!strcmp(method, "compressed-tensors"))
		return parse_compressed_tensors(&j, c);
	if (!strcmp(method, "fp8"))
		return parse_fp8(&j, c);
	if (!strcmp(method, "gptq"))
		return parse_gptq(&j, c);
	return eng_json_refuse(&j, "quant_method", -ENOTSUP,
			       "\"compressed-tensors\", \"gptq\" or \"fp8\"");
}

static int parse_config(const struct eng_json *j, struct eng_config *c)
{
	double eps = 0;
	int rc = 0;

	rc = rc ?: eng_json_u32(j, "hidden_size", 1, DIM_MAX, &c->hidden);
	rc = rc ?: eng_json_u32(j, "num_hidden_layers", 1, KV_LAYERS_MAX, &c->nr_layers);
	rc = rc ?: eng_json_u32(j, "vocab_size", 1, VOCAB_MAX, &c->vocab);
	if (!rc)
		rc = eng_json_u32(j, "max_position_embeddings", 1, POSITIONS_MAX,
				  &c->max_positions);
	rc = rc ?: eng_json_double(j, "rms_norm_eps", 0, 1, &eps);
	rc = rc ?: eng_json_bool_or(j, "tie_word_embeddings", false, &c->tie_embed);
	rc = rc ?: eng_json_only_str(j, "hidden_act", "silu");
	rc = rc ?: parse_tokens(j, c);
	rc = rc ?: parse_moe(j, c);
	rc = rc ?: parse_quant(j, c);
	c->norm_eps = (float)eps;
	if (rc)
		return rc;
	return c->arch == ENG_ARCH_MLA ? parse_mla(j, c) : parse_gqa(j, c);
}

int eng_config_load(const char *dir, struct eng_config *ret, struct eng_err *err)
{
	struct eng_config c = {0};
	struct eng_json j = {.path = "", .err = err};
	cJSON *root = NULL;
	char path[4096];
	u32 outer = 0;
	int rc;

	if ((size_t)snprintf(path, sizeof(path), "%s/config.json", dir) >= sizeof(path))
		return eng_refuse(err, -ENAMETOOLONG, "model directory: path too long");
	rc = eng_json_load(path, &root, err);
	if (rc)
		return rc;
	j.file = path;
	j.obj = root;
	if (cJSON_IsObject(eng_json_field(&j, "text_config"))) {
		struct eng_json inner = j;

		inner.obj = eng_json_field(&j, "text_config");
		inner.path = "text_config.";
		rc = parse_arch(&inner, &c.arch);
		/* the outer name is a wrapper's; the quantisation may stand at either
		 * level */
		rc = rc ?: parse_quant(&j, &c);
		j = inner;
	} else {
		rc = parse_arch(&j, &outer);
		c.arch = outer;
	}
	if (!rc && !c.arch)
		rc = eng_json_refuse(&j, "architectures", -EINVAL, "an architecture");
	rc = rc ?: parse_config(&j, &c);
	if (!rc)
		*ret = c;
	cJSON_Delete(root);
	return rc;
}
