/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tile_ptx.cuh - the machine instructions of linear_tiled.cu, linear_mid.cu and linear_few.cu:
 * asynchronous copies and matrix products, sm_80 on; clusters.
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

/* All threads of a cluster's CTAs; Hopper. */
KVK_DEV void tile_cluster_sync(void)
{
	SM90_ASM("barrier.cluster.arrive.release.aligned;\n"
		 "barrier.cluster.wait.acquire.aligned;" ::
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
