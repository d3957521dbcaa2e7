/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_wide.h - between moe_plain.cu, which prepares a launch, and moe_fp8_wide.cu.
 */
#ifndef KVK_MOE_FP8_WIDE_H
#define KVK_MOE_FP8_WIDE_H

#include <cuda.h>
#include "kernels.h"
#include "moe_int4_wide.h"

#define MOE_FP8_WIDE_TOKENS 16u /* of a tile */

/**
 * struct moe_fp8_wide - what a launch needs beside the call's arguments
 * @w: all but the packed matrices; x_panels and h_panels hold e4m3 codes as f16; x_back and
 *	h_back their scales: [columns / 128][nr_slots]
 */
struct moe_fp8_wide {
	struct moe_wide w;
	const struct kvk_experts *experts;
};

/* A tensor map of boxes of 128 rows of 128 columns of bytes. 0 or -EIO. */
int moe_fp8_map(CUtensorMap *map, const void *base, uint64_t rows, uint64_t cols);

/* Is this shape built, and the device one of Hopper? Whole blocks of 128 columns and inner
 * columns. */
bool moe_fp8_wide_ok(const struct kvk_experts *e);

/* What follows the plan. 0 or -EIO. */
int moe_fp8_wide_launch(const struct moe_fp8_wide *a, void *stream);

#endif /* KVK_MOE_FP8_WIDE_H */
