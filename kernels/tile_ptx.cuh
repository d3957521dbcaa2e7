/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tile_ptx.cuh - the machine instructions of linear_tiled.cu, linear_mid.cu, linear_fp8.cu,
 * linear_few.cu and sample_wide.cu: asynchronous copies and matrix products, sm_80 on; clusters.
 */
#ifndef KVK_TILE_PTX_CUH
#define KVK_TILE_PTX_CUH

#include "kernels/arch.cuh"
#include "kernels/dev.cuh"

/* @bytes of 16 from @src, zeros behind them; both aligned to 16 */
KVK_DEV void tile_copy16(void *dst, const void *src, u32 bytes)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
			     (u32)__cvta_generic_to_shared(dst)),
		     "l"(src), "r"(bytes)
		     : "memory");
}

KVK_DEV void tile_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

/* This thread's copies, but those of the latest @N groups, have landed. */
template <int N> KVK_DEV void tile_wait_all_but(void)
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* d[16][8] += a[16][16] b[16][8]; bf16 or f16 in, f32 out */
template <bool BF16>
KVK_DEV void tile_mma16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
	if (BF16)
		asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
		    " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
		    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
	else
		asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
		    " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
		    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The larger of two pairs' values; a NaN only where both are. */
KVK_DEV u32 tile_max_bf16x2(u32 a, u32 b)
{
	u32 d;

	asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
	return d;
}

/* Ordinary stores to shared memory before, wgmma and the copy engine after. Without ::cta it
 * waits for everything under way in the whole device, a thousand clocks. */
KVK_DEV void tile_fence_async(void)
{
	SM90_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

/* d[64][8] = (use_d ? d : 0) + a[64][16] b[16][8], f16; a in registers, b as in wgmma.cuh */
KVK_DEV void tile_wgmma8(float *d, const u32 (&a)[4], u64 b, int use_d)
{
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
		 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, "
		 "{%4,%5,%6,%7}, %8, p, 1, 1, 0;\n}"
		 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
		 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(use_d));
}

/* All threads of a cluster's CTAs; Hopper. */
KVK_DEV void tile_cluster_sync(void)
{
	SM90_ASM("barrier.cluster.arrive.release.aligned;\n"
		 "barrier.cluster.wait.acquire.aligned;" ::
			 : "memory");
}

/* The same where nothing is handed over: others' memory was read, and its owner may go now. Does
 * not wait for this thread's stores as the other does. */
KVK_DEV void tile_cluster_leave(void)
{
	SM90_ASM("barrier.cluster.arrive.relaxed.aligned;\n"
		 "barrier.cluster.wait.aligned;" ::
			 : "memory");
}

/* The halves of tile_cluster_sync(). */
KVK_DEV void tile_cluster_arrive(void)
{
	SM90_ASM("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

KVK_DEV void tile_cluster_wait(void)
{
	SM90_ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* What is at this CTA's shared address @p in CTA @rank of the cluster. */
KVK_DEV u32 tile_cluster_peer(const void *p, u32 rank)
{
	u32 at = 0;

	SM90_ASM("mapa.shared::cluster.u32 %0, %1, %2;"
		 : "=r"(at)
		 : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
	return at;
}

KVK_DEV u32 tile_cluster_get32(const void *p, u32 rank)
{
	u32 v = 0;

	SM90_ASM("ld.shared::cluster.u32 %0, [%1];"
		 : "=r"(v)
		 : "r"(tile_cluster_peer(p, rank))
		 : "memory");
	return v;
}

KVK_DEV u64 tile_cluster_get64(const void *p, u32 rank)
{
	u64 v = 0;

	SM90_ASM("ld.shared::cluster.u64 %0, [%1];"
		 : "=l"(v)
		 : "r"(tile_cluster_peer(p, rank))
		 : "memory");
	return v;
}

KVK_DEV void tile_cluster_put(const void *to, u32 rank, uint4 v)
{
	SM90_ASM("st.shared::cluster.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(
			 tile_cluster_peer(to, rank)),
		 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
		 : "memory");
}

/* Four floats of CTA @rank of the cluster, at this CTA's shared address @p. */
KVK_DEV float4 tile_cluster_get(const float4 *p, u32 rank)
{
	float4 v = make_float4(0, 0, 0, 0);

	SM90_ASM("{\n.reg .u32 at;\n"
		 "mapa.shared::cluster.u32 at, %4, %5;\n"
		 "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [at];\n}"
		 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
		 : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank)
		 : "memory");
	return v;
}

#endif /* KVK_TILE_PTX_CUH */
