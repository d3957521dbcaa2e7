/* SPDX-License-Identifier: Apache-2.0 */
/* linear_mid.h - linear on the GPU for up to 64 tokens, for few rows up to 256: a decode step. */
#ifndef KVK_LINEAR_MID_H
#define KVK_LINEAR_MID_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Is this shape built, and better here? x and W BF16, 16-byte aligned rows; 1 to 64 tokens, up to
 * 256 where tiles of 128 rows by 64 tokens would leave SMs without work. */
bool kvk_linear_mid_ok(const struct kvk_linear_args *a);

/**
 * kvk_linear_mid_cuda() - linear, a tile of rows by a CTA or by a cluster
 * @a: kvk_linear_mid_ok(), and what kvk_linear_cuda() checks
 * @stream: queued here; never waits, may be captured
 *
 * Context: Hopper code. Requests W before the kernel in front of it has ended.
 * The same bits as kvk_linear_cuda(). Return: 0; -EIO.
 */
int kvk_linear_mid_cuda(const struct kvk_linear_args *a, kvk_stream stream);

#ifdef __cplusplus
}
#endif
#endif /* KVK_LINEAR_MID_H */
