/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_expanded.h - MLA attention in expanded form: K and V of all heads have been made from
 * the latents (kv_b_proj) for all tokens that a chunk sees. Prefill only: for long chunks
 * the 192 + 128 values of a head cost 3.4 times fewer operations than the 576 + 512 of the
 * absorbed form that struct kvk_attn_args has.
 */
#ifndef KVK_ATTN_EXPANDED_H
#define KVK_ATTN_EXPANDED_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * struct kvk_attn_expanded_args - causal attention of chunks over expanded K and V
 * @batch: as for attn_prefill; rows are not read, but verdicts are
 * @kv_start: [nr_requests] where a request's position 0 is in @kv and @rope
 * @nr_kv_tokens: tokens of @kv and @rope
 * @kv: [nr_kv_tokens][nr_heads][nope_dim + v_dim]: K's part without rope, then V
 * @rope: [nr_kv_tokens][rope_dim]: the rotated part of K, the same for all heads
 * @q: [nr_tokens][nr_heads][nope_dim + rope_dim]
 * @out: [nr_tokens][nr_heads][v_dim]
 * @nr_heads: heads
 * @nope_dim, @rope_dim, @v_dim: 128, 64, 128
 * @sm_scale: multiplies scores; > 0
 * @act_dtype: of all arrays: KVK_BF16
 * @reserved: 0
 *
 * A request that did not pass its check gets NaN and none of its tokens is read.
 */
struct kvk_attn_expanded_args {
	struct kvk_batch batch;
	const uint32_t *kv_start;
	uint32_t nr_kv_tokens;
	uint32_t nr_heads;
	uint32_t nope_dim;
	uint32_t rope_dim;
	uint32_t v_dim;
	uint32_t act_dtype;
	uint32_t reserved;
	float sm_scale;
	const void *kv;
	const void *rope;
	const void *q;
	void *out;
};

int kvk_attn_expanded_cuda(const struct kvk_attn_expanded_args *a, kvk_stream stream);

#ifdef __cplusplus
}
#endif
#endif /* KVK_ATTN_EXPANDED_H */
