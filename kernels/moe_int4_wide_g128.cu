/* SPDX-License-Identifier: Apache-2.0 */
/* moe_int4_wide_g128.cu - the wide INT4 products for scale groups of 128. */
#include "moe_int4_wide.cuh"

int moe_wide_gemm_g128(const struct moe_wide *a, int second, void *stream)
{
	return wide_gemm<128>(a, second, stream);
}
