/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.h - a model directory in memory: configuration, weights, tokenizer.
 *
 * eng_model_load() either returns everything, checked, or refuses with one line that
 * names file, tensor and reason. A loaded model is immutable; all threads may read it.
 * Weights are in host memory; an engine on a GPU copies them (each struct kvk_weight says
 * how many bytes: eng_weight_bytes()).
 *
 * Shapes are outermost first. All matrices are [out][in]: y = x W^T.
 */
#ifndef ENG_MODEL_MODEL_H
#define ENG_MODEL_MODEL_H

#include "kernels/kernels.h"
#include "engine/model/config.h"
#include "engine/model/tokenizer.h"

/** enum eng_weights - what to make of a directory's matrices */
enum eng_weights {
	ENG_WEIGHTS_AS_IS = 0,	  /* BF16, INT4 or FP8, as stored */
	ENG_WEIGHTS_FP8 = 1,	  /* BF16 directory, quantised on load as kvquant would */
	ENG_WEIGHTS_INT4_G32 = 2, /* routed experts only */
	ENG_WEIGHTS_INT4_G128 = 3, /* routed experts only */
	ENG_WEIGHTS_F32 = 4, /* everything widened to F32 (dequantised if need be) */
};

/**
 * struct eng_model_options - for eng_model_load(); zero = defaults
 * @weights: enum eng_weights. A quantised directory takes AS_IS or F32, or its own scheme
 * @no_tokenizer: do not read tokenizer.json; model.tok is NULL
 */
struct eng_model_options {
	u32 weights;
	bool no_tokenizer;
};

/**
 * struct eng_mlp - a dense MLP or the shared expert: down(silu(gate x) * up x)
 * @gate_up: [2 * inter][hidden]: gate rows, then up rows (kvk_silu_args.gu)
 * @down: [hidden][inter]
 * @inter: 0 = there is none
 */
struct eng_mlp {
	struct kvk_weight gate_up;
	struct kvk_weight down;
	u32 inter;
};

/**
 * struct eng_layer - one layer's weights
 * @attn_norm: [hidden] input_layernorm
 * @mlp_norm: [hidden] post_attention_layernorm
 *
 * MLA: q = q_b(norm(q_a x)): [heads][nope + rope]; (latent, rope) = kv_a x, latent normed
 * @q_a: [q_rank][hidden]
 * @q_a_norm: [q_rank]
 * @q_b: [heads * (nope + rope)][q_rank]
 * @kv_a: [latent + rope][hidden]
 * @kv_a_norm: [latent]
 * @w_uk_t: [heads][latent][nope], from kv_b_proj: absorbed query = W q_nope, per head;
 *	for linear with nr_batch = heads (rows latent, cols nope). BF16 or F32, never quantised
 * @w_uv: [heads][v][latent], from kv_b_proj: head output = W (attention over latents)
 * @o: [hidden][heads * v]
 *
 * GQA
 * @q: [heads * head_dim][hidden]
 * @k, @v: [kv_heads * head_dim][hidden]
 * @q_bias, @k_bias, @v_bias: one per row, or NULL
 * @q_norm, @k_norm: [head_dim], or NULL
 * @o: [hidden][heads * head_dim]
 *
 * @is_moe: router, experts, shared are used; else dense
 * @dense: dense MLP
 * @router: [nr_experts][hidden], BF16 or F32
 * @router_bias: [nr_experts] e_score_correction_bias
 * @experts: routed experts, KVK_ORDER_STANDARD
 * @shared: shared expert; inter 0 = none
 */
struct eng_layer {
	const float *attn_norm;
	const float *mlp_norm;

	struct kvk_weight q_a;
	struct kvk_weight q_b;
	struct kvk_weight kv_a;
	struct kvk_weight w_uk_t;
	struct kvk_weight w_uv;
	const float *q_a_norm;
	const float *kv_a_norm;

	struct kvk_weight q;
	struct kvk_weight k;
	struct kvk_weight v;
	const float *q_bias;
	const float *k_bias;
	const float *v_bias;
	const float *q_norm;
	const float *k_norm;

	struct kvk_weight o;

	bool is_moe;
	struct eng_mlp dense;
	struct kvk_weight router;
	const float *router_bias;
	struct kvk_experts experts;
	struct eng_mlp shared;
};

struct eng_arena;

/**
 * struct eng_model - a loaded model
 * @config: dimensions
 * @weights: enum eng_weights asked for
 * @layers: [config.nr_layers]
 * @embed: [vocab][hidden], BF16 or F32
 * @lm_head: [vocab][hidden], BF16 or F32 (the same memory as embed when tied)
 * @final_norm: [hidden]
 * @tok: owner; NULL with no_tokenizer
 * @model_id: BLAKE2b-256 over configuration and weights as loaded: equal weights equal
 *	id, other quantisation other id; shards, file names and the tokenizer do not count
 * @kv_scales: static KV scales in struct kv_layout's order (MLA [layers], GQA
 *	[layers][kv_heads][2]), or NULL if the directory has none
 * @nr_kv_scales: their number
 * @expert_bytes: weights and scales of all routed experts
 * @weight_bytes: all weights
 * @arena: owner of all arrays above
 */
struct eng_model {
	struct eng_config config;
	u32 weights;
	struct eng_layer *layers;
	struct kvk_weight embed;
	struct kvk_weight lm_head;
	const float *final_norm;
	struct eng_tokenizer *tok;
	u8 model_id[KV_MODEL_ID_BYTES];
	const float *kv_scales;
	u32 nr_kv_scales;
	u64 expert_bytes;
	u64 weight_bytes;
	struct eng_arena *arena;
};

/**
 * eng_model_load() - load a Hugging Face directory
 * @dir: holds config.json, *.safetensors (with model.safetensors.index.json or one
 *	model.safetensors), tokenizer.json
 * @opt: NULL = defaults
 * @ret: owner; eng_model_free()
 * @err: one line when refused
 *
 * Context: any thread; blocks on files; uses all OpenMP threads.
 * Return: 0; -ENOENT a file is missing; -EINVAL malformed; -ENOTSUP not built; -ENOMEM;
 *	-EIO.
 */
int eng_model_load(const char *dir, const struct eng_model_options *opt,
		   struct eng_model **ret, struct eng_err *err);

void eng_model_free(struct eng_model *m);

/**
 * eng_model_check() - would eng_model_load() accept the directory?
 * @dir, @opt, @err: as there
 *
 * Looks at configuration, tokenizer, headers and every tensor's name, shape and dtype,
 * but not at matrices: cheap for any size. Values that cannot be quantised are found by
 * loading only.
 *
 * Return: as eng_model_load().
 */
int eng_model_check(const char *dir, const struct eng_model_options *opt,
		    struct eng_err *err);

/**
 * eng_weights_parse() - "bf16" or "as-is", "fp8", "int4-g32", "int4-g128", "f32"
 * Return: enum eng_weights, or -EINVAL.
 */
int eng_weights_parse(const char *text);

const char *eng_weights_name(u32 weights);

/**
 * eng_model_layout() - the page layout of this model
 * @dtype: enum kv_dtype
 * @scale_kind: enum kv_scale_kind
 * @ret: filled; the scales that go with STATIC are m->kv_scales
 *
 * Return: 0; -EINVAL @dtype and @scale_kind do not go together; -ENODATA STATIC asked for
 * and the directory has no scales.
 */
int eng_model_layout(const struct eng_model *m, u32 dtype, u32 scale_kind,
		     struct kv_layout *ret);

/** eng_weight_data_bytes(), eng_weight_scale_bytes() - size of one matrix's arrays */
u64 eng_weight_data_bytes(const struct kvk_weight *w);
u64 eng_weight_scale_bytes(const struct kvk_weight *w);

/** eng_experts_bytes() - sizes of the four arrays of @e, in the order w13, w2, s13, s2 */
void eng_experts_bytes(const struct kvk_experts *e, u64 ret_bytes[4]);

#endif
