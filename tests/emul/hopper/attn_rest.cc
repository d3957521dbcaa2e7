/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_rest.cc - the launchers that attn_gqa.cu and attn_mla.cu leave other shapes to, and whose
 * kernels are not built for the CPU: they say so.
 */
#include "kernels/attn_mla.cuh"

int kvk_attn_any_cuda(const struct kvk_attn_args *, kvk_stream)
{
	return -ENOSYS;
}

int kvk_attn_prefill_cuda(const struct kvk_attn_args *, kvk_stream)
{
	return -ENOSYS;
}
