/* SPDX-License-Identifier: Apache-2.0 */
/* linear_tiled.h - the other half of linear on the GPU: many tokens. */
#ifndef KVK_LINEAR_TILED_H
#define KVK_LINEAR_TILED_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Is this shape built? x BF16; W BF16 or E4M3; 16-byte aligned rows. */
bool kvk_linear_tiled_ok(const struct kvk_linear_args *a);

/**
 * kvk_linear_tiled_cuda() - linear with tiles of 128 rows by 64 tokens
 * @a: kvk_linear_tiled_ok()
 * @stream: queued here; never waits, may be captured
 *
 * The same bits as kvk_linear_cuda(). Return: 0, -EINVAL, -EIO.
 */
int kvk_linear_tiled_cuda(const struct kvk_linear_args *a, kvk_stream stream);

#ifdef __cplusplus
}
#endif
#endif /* KVK_LINEAR_TILED_H */
