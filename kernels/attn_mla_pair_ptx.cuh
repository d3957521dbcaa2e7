/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_pair_ptx.cuh - the machine instructions of attn_mla_pair.cuh: the other CTA of a cluster of
 * two. Device code only; no state.
 */
#ifndef KVK_ATTN_MLA_PAIR_PTX_CUH
#define KVK_ATTN_MLA_PAIR_PTX_CUH

#include "kernels/common.cuh"

/* All consumers of both CTAs: what they wrote before is there to be read behind pair_wait(). */
KVK_DEV void pair_arrive(void)
{
	SM90_ASM("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

KVK_DEV void pair_wait(void)
{
	SM90_ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The neighbour's shared memory at what is @addr here. */
KVK_DEV uint32_t pair_addr(uint32_t addr)
{
	uint32_t r = 0;

	SM90_ASM("mapa.shared::cluster.u32 %0, %1, %2;"
		 : "=r"(r)
		 : "r"(addr), "r"((blockIdx.x & 1) ^ 1));
	return r;
}

KVK_DEV float4 pair_read4(uint32_t addr)
{
	float4 v = make_float4(0.f, 0.f, 0.f, 0.f);

	SM90_ASM("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
		 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
		 : "r"(addr)
		 : "memory");
	return v;
}

KVK_DEV float2 pair_read2(uint32_t addr)
{
	float2 v = make_float2(0.f, 0.f);

	SM90_ASM("ld.shared::cluster.v2.f32 {%0,%1}, [%2];"
		 : "=f"(v.x), "=f"(v.y)
		 : "r"(addr)
		 : "memory");
	return v;
}

/* This CTA's place in the cluster. */
KVK_DEV uint32_t pair_rank(void)
{
	uint32_t r = 0;

	SM90_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
	return r;
}

#endif /* KVK_ATTN_MLA_PAIR_PTX_CUH */
