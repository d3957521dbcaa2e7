/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tile_ptx.cuh - the machine instructions of linear_tiled.cu: asynchronous copies, matrix
 * products, e4m3. sm_80 on; where e4m3 has no instruction (before sm_89) integers do it.
 */
#ifndef KVK_TILE_PTX_CUH
#define KVK_TILE_PTX_CUH

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

/* This thread's copies, but those of the latest group, have landed. */
KVK_DEV void tile_wait_all_but_one(void)
{
	asm volatile("cp.async.wait_group 1;" ::: "memory");
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

/* Two e4m3 (low byte first) to f16x2; exact */
KVK_DEV u32 tile_e4m3_f16(u32 two)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
	u32 d;

	asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"((u16)two));
	return d;
#else
	return kvk_f32_to_f16(kvk_e4m3_decode((u8)two)) |
	       (u32)kvk_f32_to_f16(kvk_e4m3_decode((u8)(two >> 8))) << 16;
#endif
}

/* Two floats to e4m3, the first in the low byte */
KVK_DEV u32 tile_f32_e4m3(float lo, float hi)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
	u16 d;

	asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
	return d;
#else
	return kvk_e4m3_encode(lo) | (u32)kvk_e4m3_encode(hi) << 8;
#endif
}

#endif /* KVK_TILE_PTX_CUH */
