/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_tile_ptx.cuh - the machine instructions of attn_mla_tile.cu: warpgroup products of
 * bf16 and copies of 16 bytes. Device code only; no state.
 */
#ifndef KVK_ATTN_MLA_TILE_PTX_CUH
#define KVK_ATTN_MLA_TILE_PTX_CUH

#include "kernels/common.cuh"

/* ------------------------------------------------------------------------------- wgmma
 */

KVK_DEV void wg_fence(void)
{
	SM90_ASM("wgmma.fence.sync.aligned;" ::: "memory");
}

KVK_DEV void wg_commit(void)
{
	SM90_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> KVK_DEV void wg_wait(void)
{
	SM90_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from touching registers that a wgmma still uses. */
template <int N> KVK_DEV void wg_keep(float *d)
{
#pragma unroll
	for (int i = 0; i < N; i++)
		asm volatile("" : "+f"(d[i])::"memory");
}

#define WG_D4(i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WG_D16(i) WG_D4(i), WG_D4(i + 4), WG_D4(i + 8), WG_D4(i + 12)
#define WG_D64(i) WG_D16(i), WG_D16(i + 16), WG_D16(i + 32), WG_D16(i + 48)

/* d[64][64] = (use_d ? d : 0) + a[64][16] b[64][16]^T, both in shared memory */
KVK_DEV void wgmma_scores(float *d, uint64_t a, uint64_t b, int use_d)
{
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
		 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
		 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
		 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
		 "%32, %33, p, 1, 1, 0, 0;\n}"
		 : WG_D16(0), WG_D16(16)
		 : "l"(a), "l"(b), "r"(use_d));
}

/* d[64][256] += a[64][16] b[16][256]; rows of b's memory are k */
KVK_DEV void wgmma_values(float *d, const uint32_t *a, uint64_t b)
{
	SM90_ASM("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
		 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
		 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
		 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
		 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
		 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
		 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
		 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"
		 "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,"
		 "%123,%124,%125,%126,%127}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;\n"
		 : WG_D64(0), WG_D64(64)
		 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* ------------------------------------------------------------------------------- copies
 */

/* To the L2. @bytes: a multiple of 16 */
KVK_DEV void feed_prefetch(const uint8_t *src, uint32_t bytes)
{
	SM90_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes)
		 : "memory");
}

/* 16 bytes from @src, or zeros. */
KVK_DEV void feed_copy(uint32_t dst, const uint8_t *src, bool in, uint64_t policy)
{
	asm volatile(
		"cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
			dst),
		"l"(src), "r"(in ? 16 : 0), "l"(policy)
		: "memory");
}

/* This thread's copies so far count as one arrival when they have landed. */
KVK_DEV void feed_copied(uint64_t *bar)
{
	asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
			     smem_addr(bar))
		     : "memory");
}

KVK_DEV void feed_wait(void)
{
	asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif /* KVK_ATTN_MLA_TILE_PTX_CUH */
