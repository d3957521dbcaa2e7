/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_ptx.cuh - reads and writes of global memory that other CTAs of a decode step read and
 * write at the same time. Device code of attn_plan.cuh and attn_quick.cuh; no state.
 */
#ifndef KVK_ATTN_PTX_CUH
#define KVK_ATTN_PTX_CUH

#include "kernels/common.cuh"

/* Reads of what other CTAs may be writing; @v stays as it is unless @in. */
KVK_DEV void ldg_relaxed2(const float *at, bool in, float2 &v)
{
	asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n"
		     "@p ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n}"
		     : "+f"(v.x), "+f"(v.y)
		     : "l"(at), "r"((uint32_t)in)
		     : "memory");
}

KVK_DEV void ldg_relaxed4(const float *at, bool in, float4 &v)
{
	asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
		     "@p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
		     : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
		     : "l"(at), "r"((uint32_t)in)
		     : "memory");
}

KVK_DEV uint32_t ldg_acquire(const uint32_t *at)
{
	uint32_t v;

	asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
		     : "=r"(v)
		     : "l"(at)
		     : "memory");
	return v;
}

KVK_DEV void stg_relaxed2(float *at, float2 v)
{
	asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(v.x),
		     "f"(v.y)
		     : "memory");
}

KVK_DEV void stg_relaxed4(float *at, float4 v)
{
	asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at),
		     "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
		     : "memory");
}

#endif /* KVK_ATTN_PTX_CUH */
