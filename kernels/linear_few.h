/* SPDX-License-Identifier: Apache-2.0 */
/* linear_few.h - the third of linear on the GPU: up to 16 tokens, at the speed of memory. */
#ifndef KVK_LINEAR_FEW_H
#define KVK_LINEAR_FEW_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Is this shape built? x and W BF16, at most 16 tokens; cols and strides as linear.cu. */
bool kvk_linear_few_ok(const struct kvk_linear_args *a);

/**
 * kvk_linear_few_cuda() - linear for a decode step
 * @a: kvk_linear_few_ok(), and what kvk_linear_cuda() checks
 * @stream: queued here; never waits, may be captured
 *
 * Requests W before the kernel in front of it has ended (programmatic launch): that kernel
 * must not write W. The same bits as kvk_linear_cuda().
 *
 * Return: 0; -ENOSPC: this device has too little shared memory; -EIO.
 */
int kvk_linear_few_cuda(const struct kvk_linear_args *a, kvk_stream stream);

#ifdef __cplusplus
}
#endif
#endif /* KVK_LINEAR_FEW_H */
