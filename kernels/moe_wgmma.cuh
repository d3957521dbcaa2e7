/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_wgmma.cuh - the warpgroup products of the wide MoE kernels: f16 with weights in
 * registers, and e4m3 with both operands in shared memory. Device code only; see wgmma.cuh
 * for the layout in shared memory.
 */
#ifndef KVK_MOE_WGMMA_CUH
#define KVK_MOE_WGMMA_CUH

#include "wgmma.cuh"

#define MOE_F8(d, i)                                                              \
	"+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), \
		"+f"((d)[(i) + 4]), "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]),       \
		"+f"((d)[(i) + 7])
#define MOE_D8(d)  MOE_F8(d, 0)
#define MOE_D12(d) MOE_D8(d), "+f"((d)[8]), "+f"((d)[9]), "+f"((d)[10]), "+f"((d)[11])
#define MOE_D16(d) MOE_D8(d), MOE_F8(d, 8)
#define MOE_D24(d) MOE_D16(d), MOE_F8(d, 16)
#define MOE_D32(d) MOE_D24(d), MOE_F8(d, 24)
#define MOE_D40(d) MOE_D32(d), MOE_F8(d, 32)
#define MOE_D48(d) MOE_D40(d), MOE_F8(d, 40)
#define MOE_D56(d) MOE_D48(d), MOE_F8(d, 48)
#define MOE_D64(d) MOE_D56(d), MOE_F8(d, 56)
#define MOE_R8	   "%0,%1,%2,%3,%4,%5,%6,%7"
#define MOE_R12	   MOE_R8 ",%8,%9,%10,%11"
#define MOE_R16	   MOE_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define MOE_R24	   MOE_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define MOE_R32	   MOE_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define MOE_R40	   MOE_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define MOE_R48	   MOE_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define MOE_R56	   MOE_R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define MOE_R64	   MOE_R56 ",%56,%57,%58,%59,%60,%61,%62,%63"

/* @o0 .. : numbers of the operands that follow the sums */
#define MOE_RS(n, regs, sums, o0, o1, o2, o3, o4, o5)                                 \
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" o5 ", 0;\n"                     \
		 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" regs "}, " \
		 "{%" o0 ",%" o1 ",%" o2 ",%" o3 "}, %" o4 ", p, 1, 1, 0;\n}"         \
		 : sums                                                               \
		 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(use_d))
#define MOE_SS(n, regs, sums, o0, o1, o2)                                         \
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" o2 ", 0;\n"                 \
		 "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" regs \
		 "}, %" o0 ", %" o1 ", p, 1, 1;\n}"                               \
		 : sums                                                           \
		 : "l"(a), "l"(b), "r"(use_d))

/* d[64][N] = (use_d ? d : 0) + a[64][16] b[16][N], f16, a in registers, b K-major; a
 * lane's share of d is its first N / 2 values. */
template <int N>
WGM_DEV void moe_wgmma(float *d, const uint32_t (&a)[4], uint64_t b, int use_d)
{
	static_assert(N == 24 || (N % 16 == 0 && N >= 16 && N <= 128), "not built");
	if constexpr (N == 16)
		MOE_RS("16", MOE_R8, MOE_D8(d), "8", "9", "10", "11", "12", "13");
	else if constexpr (N == 24)
		MOE_RS("24", MOE_R12, MOE_D12(d), "12", "13", "14", "15", "16", "17");
	else if constexpr (N == 32)
		MOE_RS("32", MOE_R16, MOE_D16(d), "16", "17", "18", "19", "20", "21");
	else if constexpr (N == 48)
		MOE_RS("48", MOE_R24, MOE_D24(d), "24", "25", "26", "27", "28", "29");
	else if constexpr (N == 64)
		MOE_RS("64", MOE_R32, MOE_D32(d), "32", "33", "34", "35", "36", "37");
	else if constexpr (N == 80)
		MOE_RS("80", MOE_R40, MOE_D40(d), "40", "41", "42", "43", "44", "45");
	else if constexpr (N == 96)
		MOE_RS("96", MOE_R48, MOE_D48(d), "48", "49", "50", "51", "52", "53");
	else if constexpr (N == 112)
		MOE_RS("112", MOE_R56, MOE_D56(d), "56", "57", "58", "59", "60", "61");
	else
		MOE_RS("128", MOE_R64, MOE_D64(d), "64", "65", "66", "67", "68", "69");
}

/* d[64][N] = (use_d ? d : 0) + a[64][32] b[32][N], e4m3, both in shared memory, K-major */
template <int N> WGM_DEV void moe_wgmma_e4m3(float *d, uint64_t a, uint64_t b, int use_d)
{
	static_assert(N % 16 == 0 && N >= 16 && N <= 128, "not built");
	if constexpr (N == 16)
		MOE_SS("16", MOE_R8, MOE_D8(d), "8", "9", "10");
	else if constexpr (N == 32)
		MOE_SS("32", MOE_R16, MOE_D16(d), "16", "17", "18");
	else if constexpr (N == 48)
		MOE_SS("48", MOE_R24, MOE_D24(d), "24", "25", "26");
	else if constexpr (N == 64)
		MOE_SS("64", MOE_R32, MOE_D32(d), "32", "33", "34");
	else if constexpr (N == 80)
		MOE_SS("80", MOE_R40, MOE_D40(d), "40", "41", "42");
	else if constexpr (N == 96)
		MOE_SS("96", MOE_R48, MOE_D48(d), "48", "49", "50");
	else if constexpr (N == 112)
		MOE_SS("112", MOE_R56, MOE_D56(d), "56", "57", "58");
	else
		MOE_SS("128", MOE_R64, MOE_D64(d), "64", "65", "66");
}

#endif /* KVK_MOE_WGMMA_CUH */
