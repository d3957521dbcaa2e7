/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wgmma.cuh - thin names for Hopper's own instructions: warpgroup matrix products and
 * tensor copies. Device code only; no state; usable beside common.cuh or moe_ptx.cuh.
 *
 * Operands in shared memory lie in rows of 128 bytes with the 128-byte swizzle (the 16-byte
 * piece c of row r is at piece c ^ (r & 7)), which is what a tensor copy with
 * CU_TENSOR_MAP_SWIZZLE_128B writes; a group of 8 rows (1,024 bytes) starts at a multiple
 * of 1,024.
 *
 * - K-major: a row holds 64 values of k of one row of the operand. A step of 16 k is 32
 *   bytes further.
 *
 * - MN-major (TRANS): a row holds 64 values of m or n at one k. A step of 16 k is 2,048
 *   bytes further; the next 64 of m or n are @mn_bytes away.
 */
#ifndef KVK_WGMMA_CUH
#define KVK_WGMMA_CUH

#include <stdint.h>
#include "kernels/arch.cuh"

#define WGM_DEV static __device__ __forceinline__

/* ------------------------------------------------------------------------------- wgmma
 */

/* Before the first product, and after registers of one were written. */
WGM_DEV void wgm_fence(void)
{
	SM90_ASM("wgmma.fence.sync.aligned;" ::: "memory");
}

WGM_DEV void wgm_commit(void)
{
	SM90_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* All but the latest N groups are complete. */
template <int N> WGM_DEV void wgm_wait(void)
{
	SM90_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from moving uses of d above a wait. */
template <int N> WGM_DEV void wgm_keep(float (&d)[N])
{
#pragma unroll
	for (int i = 0; i < N; i++)
		asm volatile("" : "+f"(d[i])::"memory");
}

/* Descriptor of an operand at shared address @addr; @mn_bytes: MN-major only */
WGM_DEV uint64_t wgm_desc(uint32_t addr, uint32_t mn_bytes = 16)
{
	return (uint64_t)((addr & 0x3ffff) >> 4) | (uint64_t)(mn_bytes >> 4) << 16 |
	       (64ull << 32) | (1ull << 62);
}

/* ... whose groups of 8 rows lie @apart bytes apart */
WGM_DEV uint64_t wgm_desc_rows(uint32_t addr, uint32_t apart)
{
	return (uint64_t)((addr & 0x3ffff) >> 4) | 1ull << 16 |
	       (uint64_t)(apart >> 4) << 32 | 1ull << 62;
}

/* The descriptor of what lies @units of 16 bytes further. */
WGM_DEV uint64_t wgm_desc_at(uint64_t desc, uint32_t units)
{
	return (desc & 0xffffffff00000000ull) | ((uint32_t)desc + units);
}

#define WGM_F8(d, i)                                                              \
	"+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), \
		"+f"((d)[(i) + 4]), "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]),       \
		"+f"((d)[(i) + 7])
#define WGM_F32(d) WGM_F8(d, 0), WGM_F8(d, 8), WGM_F8(d, 16), WGM_F8(d, 24)
#define WGM_F64(d) WGM_F32(d), WGM_F8(d, 32), WGM_F8(d, 40), WGM_F8(d, 48), WGM_F8(d, 56)
#define WGM_F128(d)                                                             \
	WGM_F64(d), WGM_F8(d, 64), WGM_F8(d, 72), WGM_F8(d, 80), WGM_F8(d, 88), \
		WGM_F8(d, 96), WGM_F8(d, 104), WGM_F8(d, 112), WGM_F8(d, 120)
#define WGM_R32                                                          \
	"%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17," \
	"%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGM_R64                                                                     \
	WGM_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
		"%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGM_R128                                                                    \
	WGM_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
		"%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"  \
		"%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,"     \
		"%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,"      \
		"%121,%122,%123,%124,%125,%126,%127"

/* Few columns: a decode step's tokens. Both K-major, bf16. */
#define WGM_SS_FEW(N, R, F, A, B, P)                                            \
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"               \
		 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" R \
		 "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}"                       \
		 : F                                                            \
		 : "l"(a), "l"(b), "r"(use_d))
#define WGM_F4(d)   "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3])
#define WGM_TWO8(d) WGM_F8(d, 0), WGM_F8(d, 8)
#define WGM_R8	    "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGM_R16	    WGM_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"

/* T: "f16" or "bf16" */
#define WGM_SS_64(T)                                                                \
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                       \
		 "wgmma.mma_async.sync.aligned.m64n64k16.f32." T "." T " {" WGM_R32 \
		 "}, %32, %33, p, 1, 1, 0, %35;\n}"                                 \
		 : WGM_F32(d)                                                       \
		 : "l"(a), "l"(b), "r"(use_d), "n"(TRANS))
#define WGM_RS_64(T)                                                                \
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                       \
		 "wgmma.mma_async.sync.aligned.m64n64k16.f32." T "." T " {" WGM_R32 \
		 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"                      \
		 : WGM_F32(d)                                                       \
		 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(use_d),  \
		   "n"(TRANS))
#define WGM_SS_128(T)                                                                \
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                        \
		 "wgmma.mma_async.sync.aligned.m64n128k16.f32." T "." T " {" WGM_R64 \
		 "}, %64, %65, p, 1, 1, 0, %67;\n}"                                  \
		 : WGM_F64(d)                                                        \
		 : "l"(a), "l"(b), "r"(use_d), "n"(TRANS))
#define WGM_RS_128(T)                                                                \
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                        \
		 "wgmma.mma_async.sync.aligned.m64n128k16.f32." T "." T " {" WGM_R64 \
		 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"                       \
		 : WGM_F64(d)                                                        \
		 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(use_d),   \
		   "n"(TRANS))
#define WGM_SS_256(T)                                                                 \
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                        \
		 "wgmma.mma_async.sync.aligned.m64n256k16.f32." T "." T " {" WGM_R128 \
		 "}, %128, %129, p, 1, 1, 0, %131;\n}"                                \
		 : WGM_F128(d)                                                        \
		 : "l"(a), "l"(b), "r"(use_d), "n"(TRANS))
#define WGM_RS_256(T)                                                                 \
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"                        \
		 "wgmma.mma_async.sync.aligned.m64n256k16.f32." T "." T " {" WGM_R128 \
		 "}, {%128,%129,%130,%131}, %132, p, 1, 1, %134;\n}"                  \
		 : WGM_F128(d)                                                        \
		 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(use_d),    \
		   "n"(TRANS))

/* d[64][N] = (use_d ? d : 0) + a[64][16] b[16][N] for few columns: bf16, both K-major. */
template <int N>
WGM_DEV void wgm_ss_few(float (&d)[N / 2], uint64_t a, uint64_t b, int use_d)
{
	static_assert(N == 8 || N == 16 || N == 32 || N == 64, "not built");
	if constexpr (N == 8)
		WGM_SS_FEW(8, "%0,%1,%2,%3", WGM_F4(d), 4, 5, 6);
	else if constexpr (N == 16)
		WGM_SS_FEW(16, WGM_R8, WGM_F8(d, 0), 8, 9, 10);
	else if constexpr (N == 32)
		WGM_SS_FEW(32, WGM_R16, WGM_TWO8(d), 16, 17, 18);
	else
		WGM_SS_FEW(64, WGM_R32, WGM_F32(d), 32, 33, 34);
}

/*
 * d[64][N] = (use_d ? d : 0) + a[64][16] b[16][N], in f16 or bf16. a in shared memory,
 * K-major; TRANS: b is MN-major, else K-major.
 */
template <int N, int TRANS, bool F16 = false>
WGM_DEV void wgm_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int use_d)
{
	static_assert(N == 64 || N == 128 || N == 256, "not built");
	if constexpr (N == 64 && F16)
		WGM_SS_64("f16");
	else if constexpr (N == 64)
		WGM_SS_64("bf16");
	else if constexpr (N == 128 && F16)
		WGM_SS_128("f16");
	else if constexpr (N == 128)
		WGM_SS_128("bf16");
	else if constexpr (N == 256 && F16)
		WGM_SS_256("f16");
	else if constexpr (N == 256)
		WGM_SS_256("bf16");
}

/* The same with a in registers. */
template <int N, int TRANS, bool F16 = false>
WGM_DEV void wgm_rs(float (&d)[N / 2], const uint32_t *a, uint64_t b, int use_d)
{
	static_assert(N == 64 || N == 128 || N == 256, "not built");
	if constexpr (N == 64 && F16)
		WGM_RS_64("f16");
	else if constexpr (N == 64)
		WGM_RS_64("bf16");
	else if constexpr (N == 128 && F16)
		WGM_RS_128("f16");
	else if constexpr (N == 128)
		WGM_RS_128("bf16");
	else if constexpr (N == 256 && F16)
		WGM_RS_256("f16");
	else if constexpr (N == 256)
		WGM_RS_256("bf16");
}

/* d[64][64] = (use_d ? d : 0) + a[64][32] b[32][64] in e4m3; both in shared memory, K-major */
WGM_DEV void wgm_ss_e4m3(float (&d)[32], uint64_t a, uint64_t b, int use_d)
{
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
		 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGM_R32
		 "}, %32, %33, p, 1, 1;\n}"
		 : WGM_F32(d)
		 : "l"(a), "l"(b), "r"(use_d));
}

/* The same with a in registers. */
WGM_DEV void wgm_rs_e4m3(float (&d)[32], const uint32_t *a, uint64_t b, int use_d)
{
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
		 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGM_R32
		 "}, {%32,%33,%34,%35}, %36, p, 1, 1;\n}"
		 : WGM_F32(d)
		 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(use_d));
}

/* ----------------------------------------------------------------------- tensor copies
 */

/* @map: a CUtensorMap in kernel parameters or global memory; the box completes on @bar */
WGM_DEV void tma_load_4d(uint32_t dst, const void *map, uint32_t bar, int c0, int c1,
			 int c2, int c3)
{
	SM90_ASM(
		"cp.async.bulk.tensor.4d.shared::cluster.global.tile"
		".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
			dst),
		"l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
		: "memory");
}

/* @bytes from @src, in order; both addresses and the size multiples of 16 */
WGM_DEV void tma_bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
	SM90_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
		 " [%0], [%1], %2, [%3];" ::"r"(dst),
		 "l"(src), "r"(bytes), "r"(bar)
		 : "memory");
}

/* The same with five coordinates, and what the L2 is to do with the bytes. */
WGM_DEV void tma_load_5d(uint32_t dst, const void *map, uint32_t bar, const int (&c)[5],
			 uint64_t policy)
{
	SM90_ASM("cp.async.bulk.tensor.5d.shared::cluster.global.tile"
		 ".mbarrier::complete_tx::bytes.L2::cache_hint"
		 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
		 "l"(map), "r"(bar), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]),
		 "r"(c[4]), "l"(policy)
		 : "memory");
}

WGM_DEV void tma_prefetch_map(const void *map)
{
	SM90_ASM("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

#endif /* KVK_WGMMA_CUH */
