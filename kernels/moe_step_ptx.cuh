/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_step_ptx.cuh - what moe_int4_step.cuh's kernel has beside moe_ptx.cuh: packets that are
 * read and written as one word each, and groups of asynchronous copies. Device code only.
 */
#ifndef KVK_MOE_STEP_PTX_CUH
#define KVK_MOE_STEP_PTX_CUH

#include "moe_ptx.cuh"

/* Two packets; each is read as one. */
__device__ __forceinline__ uint4 step_packets(const uint4 *from)
{
	uint64_t a, b;

	asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
		     : "=l"(a), "=l"(b)
		     : "l"(from)
		     : "memory");
	return make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b,
			  (uint32_t)(b >> 32));
}

__device__ __forceinline__ void step_send(uint64_t *to, uint32_t two, uint32_t tag)
{
	asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to),
		     "l"(two | (uint64_t)tag << 32)
		     : "memory");
}

__device__ __forceinline__ void step_sts64(uint32_t a, uint32_t lo, uint32_t hi)
{
	asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(a), "r"(lo), "r"(hi)
		     : "memory");
}

__device__ __forceinline__ void step_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

/* All groups but the latest are there. */
__device__ __forceinline__ void step_wait_but_one(void)
{
	asm volatile("cp.async.wait_group 1;" ::: "memory");
}

#endif /* KVK_MOE_STEP_PTX_CUH */
