/* SPDX-License-Identifier: Apache-2.0 */
/*
 * standins.cc - what kernels/ops_cuda.cu needs of the families that are not emulated.
 *
 * Their kernels hold inline PTX. Here the host reference stands in, queued like a kernel so
 * that a captured step replays it too. A test that passes with these has shown nothing
 * about the kernels they stand for: attention, experts and the dense layers.
 */
#include "cuda_runtime.h"
#include "kernels/attn_cuda.h"
#include "kernels/linear_fp8.h"
#include "kernels/linear_mid.h"
#include "kernels/linear_tiled.h"
#include "kernels/moe_cuda.h"
extern "C" {
#include "kernels/ref.h"
}

#define STAND_IN(name, ref, args_type)                             \
	extern "C" int name(const struct args_type *a, kvk_stream) \
	{                                                          \
		struct args_type copy = *a;                        \
                                                                   \
		emul_launch_host([copy] { ref(&copy, NULL); });    \
		return 0;                                          \
	}

STAND_IN(kvk_attn_mla_cuda, kvk_attn_mla_ref, kvk_attn_args)
STAND_IN(kvk_attn_gqa_cuda, kvk_attn_gqa_ref, kvk_attn_args)
STAND_IN(kvk_attn_prefill_cuda, kvk_attn_prefill_ref, kvk_attn_args)
STAND_IN(kvk_attn_any_cuda, kvk_attn_prefill_ref, kvk_attn_args)
STAND_IN(kvk_moe_route_cuda, kvk_moe_route_ref, kvk_moe_route_args)
STAND_IN(kvk_moe_int4_cuda, kvk_moe_int4_ref, kvk_moe_args)
STAND_IN(kvk_moe_fp8_cuda, kvk_moe_fp8_ref, kvk_moe_args)
STAND_IN(kvk_moe_bf16_cuda, kvk_moe_bf16_ref, kvk_moe_args)
STAND_IN(kvk_linear_cuda, kvk_linear_ref, kvk_linear_args)
STAND_IN(kvk_sample_cuda, kvk_sample_ref, kvk_sample_args)
STAND_IN(kvk_linear_tiled_cuda, kvk_linear_ref, kvk_linear_args)
STAND_IN(kvk_linear_mid_cuda, kvk_linear_ref, kvk_linear_args)
STAND_IN(kvk_linear_fp8_cuda, kvk_linear_ref, kvk_linear_args)

extern "C" bool kvk_linear_mid_ok(const struct kvk_linear_args *a)
{
	return false;
}

extern "C" bool kvk_linear_fp8_ok(const struct kvk_linear_args *a)
{
	return false;
}

extern "C" bool kvk_linear_tiled_ok(const struct kvk_linear_args *a)
{
	return false;
}

extern "C" size_t kvk_attn_workspace_cuda(const struct kvk_attn_args *a)
{
	return kvk_attn_workspace_ref(a);
}

extern "C" size_t kvk_moe_workspace_cuda(const struct kvk_moe_args *a)
{
	return kvk_moe_workspace_ref(a);
}
