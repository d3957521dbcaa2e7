/* SPDX-License-Identifier: Apache-2.0 */
/* linear_fp8.h - linear on the GPU with E4M3 weights: a decode step. */
#ifndef KVK_LINEAR_FP8_H
#define KVK_LINEAR_FP8_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Is this shape built? x BF16, W E4M3 with scales; rows of W and x aligned to 16 bytes. */
bool kvk_linear_fp8_ok(const struct kvk_linear_args *a);

/**
 * kvk_linear_fp8_cuda() - linear, a tile of rows by a CTA or by a cluster
 * @a: kvk_linear_fp8_ok(), and what kvk_linear_cuda() checks
 * @stream: queued here; never waits, may be captured
 *
 * Context: Hopper code. Requests W before the kernel in front of it has ended. More than 64
 * tokens take W again for every 64.
 * The same bits as kvk_linear_cuda(). Return: 0; -EIO.
 */
int kvk_linear_fp8_cuda(const struct kvk_linear_args *a, kvk_stream stream);

#ifdef __cplusplus
}
#endif
#endif /* KVK_LINEAR_FP8_H */
