/* SPDX-License-Identifier: Apache-2.0 */
/* moe_int4_wide_g64.cu - the wide INT4 products for scale groups of 64. */
#include "moe_int4_wide.cuh"

int moe_wide_gemm_g64(const struct moe_wide *a, int second, void *stream)
{
	return wide_gemm<64>(a, second, stream);
}
