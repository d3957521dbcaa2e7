/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_chunk.h - between moe_plain.cu, which prepares a launch, and moe_fp8_chunk.cu.
 */
#ifndef KVK_MOE_FP8_CHUNK_H
#define KVK_MOE_FP8_CHUNK_H

#include <vector_types.h>
#include "kernels.h"
#include "moe_y.cuh"

#define MOE_CHUNK_TOKENS 128u /* of a tile */

/* struct moe_chunk - argument block; all pointers are device memory */
struct moe_chunk {
	const uint16_t *x; /* [nr_tokens][hidden] bf16 */
	struct moe_y y;
	const uint32_t *ids;	  /* [nr_slots] */
	const float *weights;	  /* [nr_slots] */
	const uint32_t *nr_tiles; /* the plan (moe_plan.cuh) */
	const uint2 *tiles;
	const uint32_t *list;
	const uint32_t *place;
	uint32_t *claim;  /* [2] units claimed of each product; cleared by the plan */
	uint8_t *x_codes; /* e4m3 [hidden / 128][nr_slots][128], in the plan's order */
	float *x_scales;  /* [hidden / 128][nr_slots] */
	uint8_t *h_codes; /* as x_codes, of inter */
	float *h_scales;
	uint16_t *out; /* [slot][hidden] bf16 */
	uint32_t hidden;
	uint32_t inter;
	uint32_t nr_tokens;
	uint32_t top_k;
	uint32_t nr_experts;
	uint32_t nr_slots;
	uint32_t tiles_max;
};

/* What follows the plan, for a shape that moe_fp8_wide_ok() takes. 0 or -EIO. */
int moe_chunk_launch(const struct moe_chunk *a, const struct kvk_experts *e,
		     void *stream);

#endif /* KVK_MOE_FP8_CHUNK_H */
