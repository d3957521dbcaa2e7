/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.h - config.json of a model directory, checked and reduced to what a forward pass
 * needs.
 *
 * Two architectures: DeepseekV3ForCausalLM (and KimiK2ForCausalLM, or either nested under
 * "text_config"): MLA; Glm4MoeForCausalLM: GQA. Anything else is refused.
 */
#ifndef ENG_MODEL_CONFIG_H
#define ENG_MODEL_CONFIG_H

#include <stdbool.h>
#include "base/util.h"
#include "engine/model/err.h"

enum eng_arch { ENG_ARCH_MLA = 1, ENG_ARCH_GQA = 2 };

/** enum eng_quant - how a directory's matrices are stored */
enum eng_quant {
	ENG_QUANT_NONE = 0, /* BF16 (or F32) throughout */
	ENG_QUANT_INT4 = 1, /* compressed-tensors pack-quantized, symmetric, by groups */
	ENG_QUANT_FP8 = 2,  /* e4m3, 128 x 128 blocks, weight_scale_inv */
	ENG_QUANT_GPTQ = 3, /* INT4 in GPTQ's layout, symmetric, in group order */
};

#define ENG_EOS_MAX 8u

/**
 * struct eng_rope - rotary position embedding
 * @theta: base
 * @dim: rotated values of a head: MLA rope_dim, GQA part of head_dim
 * @interleaved: pairs (2i, 2i + 1) in, halves out (DeepSeek); else halves in, halves out
 * @yarn: the fields below apply
 * @factor, @beta_fast, @beta_slow, @mscale, @mscale_all_dim: YaRN
 * @original_positions: original_max_position_embeddings
 */
struct eng_rope {
	double theta;
	u32 dim;
	bool interleaved;
	bool yarn;
	double factor;
	double beta_fast;
	double beta_slow;
	double mscale;
	double mscale_all_dim;
	u32 original_positions;
};

/**
 * struct eng_config - the model's dimensions
 * @arch: enum eng_arch
 * @hidden, @nr_layers, @vocab: as named
 * @max_positions: max_position_embeddings
 * @norm_eps: rms_norm_eps: layer norms, final norm, GQA's q and k norms
 * @nr_q_heads: query heads
 * @nr_kv_heads: GQA: kv heads; MLA: 0
 * @head_dim: GQA: head_dim; MLA: 0
 * @qk_norm, @qkv_bias: GQA: per-head RMS norm of q and k before rope; q, k, v have a bias
 * @q_rank, @latent_dim, @nope_dim, @rope_dim, @v_dim: MLA: q_lora_rank, kv_lora_rank,
 *	qk_nope_head_dim, qk_rope_head_dim, v_head_dim
 * @latent_norm_eps: MLA: q_a and kv_a norms (1e-6 whatever rms_norm_eps says)
 * @sm_scale: multiplies attention scores: 1 / sqrt(q head size), times YaRN's mscale
 *	squared (MLA)
 * @nr_dense: layers 0 .. nr_dense - 1 have a dense MLP, the rest experts
 * @dense_inter: inner size of a dense MLP
 * @nr_experts, @top_k, @expert_inter: routed experts
 * @shared_inter: inner size of the shared expert (n_shared_experts * expert_inter); 0 =
 *	none
 * @nr_groups, @top_groups: group limit of the router; 1, 1 = off
 * @norm_topk: weights divided by their sum
 * @routed_scale: routed_scaling_factor
 * @tie_embed: lm_head is embed_tokens
 * @bos: token id, or -1
 * @eos, @nr_eos: ids that end a text
 * @quant: enum eng_quant of the directory
 * @quant_group: INT4, GPTQ: group size
 * @quant_zero: GPTQ: what qzeros hold: 7 (zero point 8 minus one), or 8 ("gptq_v2")
 */
struct eng_config {
	u32 arch;
	u32 hidden;
	u32 nr_layers;
	u32 vocab;
	u32 max_positions;
	float norm_eps;
	u32 nr_q_heads;
	u32 nr_kv_heads;
	u32 head_dim;
	bool qk_norm;
	bool qkv_bias;
	u32 q_rank;
	u32 latent_dim;
	u32 nope_dim;
	u32 rope_dim;
	u32 v_dim;
	float latent_norm_eps;
	float sm_scale;
	u32 nr_dense;
	u32 dense_inter;
	u32 nr_experts;
	u32 top_k;
	u32 expert_inter;
	u32 shared_inter;
	u32 nr_groups;
	u32 top_groups;
	bool norm_topk;
	float routed_scale;
	bool tie_embed;
	s32 bos;
	u32 eos[ENG_EOS_MAX];
	u32 nr_eos;
	u32 quant;
	u32 quant_group;
	u32 quant_zero;
	struct eng_rope rope;
};

/**
 * eng_config_load() - read and check DIR/config.json
 * @dir: model directory
 * @ret: filled on success only
 * @err: names file, field and value when refused
 *
 * Context: any thread; reads one file.
 * Return: 0; -ENOENT no such file; -EINVAL refused; -ENOTSUP an architecture or option
 * that is not built; -ENOMEM.
 */
int eng_config_load(const char *dir, struct eng_config *ret, struct eng_err *err);

/**
 * eng_rope_table() - cosines and sines for kvk_rope_args.cos_sin
 * @r: rope parameters
 * @nr_positions: rows
 * @ret: f32 [nr_positions][dim]: dim / 2 cosines, then dim / 2 sines, YaRN's factor in
 *
 * Angles are computed in double.
 */
void eng_rope_table(const struct eng_rope *r, u32 nr_positions, float *ret);

#endif
