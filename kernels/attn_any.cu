/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_any.cu - the fallback for shapes that the fast kernels do not build. Correct and
 * slow.
 */
#include "kernels/attn_any.cuh"
#include "kernels/attn_cuda.h"

int kvk_attn_any_cuda(const struct kvk_attn_args *a, kvk_stream stream)
{
	return any_launch<float>(a, (cudaStream_t)stream);
}
