/* SPDX-License-Identifier: Apache-2.0 */
/* ops_none.c - kvk_cuda_ops() of a build that holds no table of CUDA kernels. */
#include "kernels.h"

const struct kvk_ops *kvk_cuda_ops(void)
{
	return NULL;
}
