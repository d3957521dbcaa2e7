/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_step.h - routed E4M3 experts for the few tokens of a decode step, as one kernel; between
 * moe_plain.cu, which chooses it, and moe_fp8_step.cu.
 */
#ifndef KVK_MOE_FP8_STEP_H
#define KVK_MOE_FP8_STEP_H

#include "kernels.h"

#define F8S_SLOTS  64u	  /* tokens x top k that are sorted */
#define F8S_VALUES 32768u /* of h: slots x inter */
#define F8S_OWNERS 16u	  /* workspaces that have packets of their own */

/* Is it the one for these shapes? Those of moe_fp8_wide_ok(). */
bool moe_fp8_step_ok(const struct kvk_moe_args *a);

/**
 * moe_fp8_step_launch() - queue it
 * @a: shapes for which moe_fp8_step_ok() holds; of the workspace the address alone, which says
 *	whose packets these are: two calls with the same never overlap
 *
 * Return: 0; 1: too many workspaces, nothing was queued; -EIO.
 */
int moe_fp8_step_launch(const struct kvk_moe_args *a, void *stream);

#endif /* KVK_MOE_FP8_STEP_H */
