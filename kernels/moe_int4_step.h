/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_step.h - routed INT4 experts for the few tokens of a decode step, in a rank of a
 * wide split; for moe_int4.cu alone.
 */
#ifndef KVK_MOE_INT4_STEP_H
#define KVK_MOE_INT4_STEP_H

#include "kernels.h"
#include "moe_int4.cuh"

#define STEP_SLOTS 64u /* tokens x top k that are sorted */
#define STEP_LANES 32u /* tokens: a lane of the feeding warp knows one's units */
#define STEP_VALUES \
	16384u /* of h: slots x inter. From there on moe_int4.cuh's kernel is better */
#define STEP_OWNERS 64u /* workspaces that have packets of their own */

/* struct moe_step - argument block; all pointers are device memory */
struct moe_step {
	struct moe_mat w13;
	struct moe_mat w2;
	const uint16_t *x; /* [nr_tokens][hidden] bf16 */
	struct moe_y y;
	const uint32_t *ids;  /* [nr_slots] */
	const float *weights; /* [nr_slots] */
	uint32_t *state;   /* CTAs that are through, the last call's tag, units claimed */
	uint64_t *packets; /* [slot][inter / 2]: two columns of h, tag | exponent */
	uint32_t hidden;
	uint32_t inter;
	uint32_t nr_tokens;
	uint32_t top_k;
	uint32_t nr_experts;
	uint32_t log_rows;   /* row tiles of a SECOND unit */
	uint32_t by_columns; /* 65536 / w2.kbricks, rounded up */
	uint32_t by_tiles;   /* 2^32 / w13.mtiles, rounded up; 0: of 1 */
	uint32_t scale_f16;
	uint32_t loads_only; /* bench: stream everything, multiply nothing */
	uint32_t any_tag;    /* mutant: take what is there */
};

/* Is that kernel the one for these shapes? Groups of 32 alone. */
bool moe_step_ok(const struct kvk_moe_args *a);

/**
 * moe_step_launch() - queue it
 * @k: all but state, packets and by_...
 * @owner: number of the workspace, below STEP_OWNERS; two calls with the same never overlap
 *
 * Return: 0 or -EIO.
 */
int moe_step_launch(struct moe_step *k, uint32_t owner, void *stream);

#endif /* KVK_MOE_INT4_STEP_H */
