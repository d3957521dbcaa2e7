/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_wide.h - between moe_int4.cu, which prepares a launch, and moe_int4_wide.cuh.
 */
#ifndef KVK_MOE_INT4_WIDE_H
#define KVK_MOE_INT4_WIDE_H

#include <stddef.h>
#include <stdint.h>
#include <vector_types.h>
#include "moe_y.cuh"

#define MOE_WIDE_COLS 8192u /* of a token, or of h, at most */

/* struct wide_mat - a packed matrix of all experts (moe_pack.h) */
struct wide_mat {
	const uint8_t *base;
	uint64_t expert_bytes;
	uint32_t mtiles;
	uint32_t kbricks;
	uint32_t wl;
};

/* struct moe_wide - argument block; all pointers are device memory */
struct moe_wide {
	struct wide_mat w13;
	struct wide_mat w2;
	const uint16_t *x; /* [nr_tokens][hidden] bf16 */
	struct moe_y y;
	const uint32_t *ids;	  /* [nr_slots] */
	const float *weights;	  /* [nr_slots] */
	const uint32_t *nr_tiles; /* the plan (moe_plan.cuh), tiles of tile_tokens */
	const uint2 *tiles;
	const uint32_t *list;
	const uint32_t *place; /* INT4 only */
	uint32_t *
		claim; /* INT4 only: [2] units claimed of each product; cleared by the plan */
	/* [hidden / 64][nr_slots][128 bytes], in the plan's order; INT4, tiles of 32: [token] */
	uint8_t *x_panels;
	float *x_back;	   /* [nr_slots] what a row of x_panels was divided by, / 64 */
	float *h;	   /* [nr_slots][inter], in the plan's order; INT4: not used */
	uint16_t *h_f16;   /* INT4: the same as f16, of a block of 16 times ... */
	float *h_scale;	   /* ... [nr_slots][inter / 16] */
	uint8_t *h_panels; /* as x_panels */
	float *h_back;
	float *out;	   /* [slot][hidden]; INT4: not used */
	uint16_t *out_f16; /* INT4: [slot][hidden] f16, of a block of 32 times ... */
	float *out_back;   /* ... [slot][hidden / 32] */
	uint32_t hidden;
	uint32_t inter;
	uint32_t nr_tokens;
	uint32_t top_k;
	uint32_t nr_experts;
	uint32_t nr_slots;
	uint32_t tiles_max;
	uint32_t tile_tokens; /* 32, 64, 112 or 128 */
	uint32_t group;
	uint32_t scale_f16;
};

/* Power of two that brings a largest value near 2^14; 1 for Inf and NaN. Its inverse is the
 * float of 254 << 23 minus its bits. */
static __device__ __forceinline__ float moe_wide_scale(uint32_t amax_bits)
{
	const uint32_t e = amax_bits >> 23;

	return e == 255 ? 1.0f : __uint_as_float((268u - (e < 15 ? 15u : e)) << 23);
}

static __device__ __forceinline__ float moe_wide_inverse(float scale)
{
	return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

/* What follows the plan. 0 or -EIO. */
int moe_wide_launch(const struct moe_wide *a, void *stream);

/* The last step alone: y from out (not out_f16). */
int moe_wide_sum(const struct moe_wide *a, void *stream);

/* One product, one per group size, each in its own file: they take long to compile. */
int moe_wide_gemm_g32(const struct moe_wide *a, int second, void *stream);
int moe_wide_gemm_g64(const struct moe_wide *a, int second, void *stream);
int moe_wide_gemm_g128(const struct moe_wide *a, int second, void *stream);

#endif /* KVK_MOE_INT4_WIDE_H */
