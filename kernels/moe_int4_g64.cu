/* SPDX-License-Identifier: Apache-2.0 */
/* moe_int4_g64.cu - the INT4 kernel for scale groups of 64. */
#include "moe_int4_launch.cuh"

int moe_i4_launch_g64(struct moe_i4 *k, const struct i4_variant *v, void *stream)
{
	return i4_launch_group<64>(k, v, (cudaStream_t)stream);
}
