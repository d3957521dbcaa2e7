/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_wide.cuh - constants, shared memory, wgmma and queries of the MLA decode kernel for
 * up to 64 query rows; attn_mla_wide.cu explains it.
 */
#ifndef KVK_ATTN_MLA_WIDE_CUH
#define KVK_ATTN_MLA_WIDE_CUH

#include "kernels/attn_mla.cuh"

#define WIDE	  64 /* query rows of a CTA */
#define BAR_SCORE 2
#define NR_SCORE  4
#define NR_VALUE  8
#define SLACK	  12.f /* P may grow to 2^12 before its reference is raised */

struct wide_cfg {
	static constexpr int ES = 1;
	static constexpr int RB = LATENT;
	static constexpr int RR = ROPE;
	static constexpr int ROPE_OFF = TOKENS * RB;
	static constexpr int SCALE_OFF = TOKENS * (RB + RR);
	static constexpr int STAGE = SCALE_OFF + 256;
	static constexpr int STAGES = 3;
	static constexpr int NR_WARPS = NR_SCORE + NR_VALUE;
	static constexpr int NR_THREADS = (NR_WARPS + 4) * 32;
};

/* Aligned to 1,024 bytes: q and p are read by wgmma with the 128-byte swizzle. */
struct wide_smem {
	using C = wide_cfg;
	uint8_t q[NR_KS / 4][WIDE][128]; /* f16 [64 permuted dims][row][dim] */
	uint8_t p[2][TOKENS][128];	 /* f16 [buffer][token][row] */
	uint8_t ring[C::STAGES][C::STAGE];
	float cmax[NR_SCORE][WIDE]; /* a warp's largest scores, above m */
	float smax[NR_SCORE];	    /* ... and latent scale */
	float m[WIDE];		    /* reference of the exponents */
	float f[2][WIDE];	    /* factors for the values' sums */
	float fin_l[2][NR_SCORE][WIDE];
	float fin_m[2][WIDE];
	float fin_unit[2];
	uint32_t changed[2]; /* f[] is not all ones */
	struct mla_seg segs[SEG_RING];
	struct plan_pending pend[2];
	uint64_t full[C::STAGES];
	uint64_t empty[C::STAGES];
	uint64_t p_full[2];
	uint64_t p_empty[2];
	uint64_t fin_full[2];
	uint64_t fin_empty[2];
	uint32_t issued;
	uint32_t segs_in;
	uint32_t segs_done;
	uint32_t flag;
};

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

/* Descriptor of an operand with 128-byte swizzle; groups of 8 rows lie 1,024 bytes apart.
 */
KVK_DEV uint64_t wg_desc(uint32_t addr)
{
	return (uint64_t)((addr & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) |
	       (1ull << 62);
}

/* d[64][64] = (use_d ? d : 0) + a[64][16] b[16][64]. TRANS: rows of b's memory are k. */
template <int TRANS>
KVK_DEV void wgmma_64x64(float *d, const uint32_t *a, uint64_t desc, int use_d)
{
	SM90_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
		 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
		 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
		 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
		 "{%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
		 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
		   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
		   "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
		   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
		   "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
		   "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
		   "+f"(d[31])
		 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc), "r"(use_d),
		   "n"(TRANS));
}

/* ------------------------------------------------------------------------------ queries
 */

/* Sixteen neighbouring dims of a query row: four k-steps of lane c. */
KVK_DEV void load_q16(const struct attn_params &p, size_t d, bool in, float *v)
{
#pragma unroll
	for (int i = 0; i < 16; i += 2) {
		float2 x = in ? act_load2(p, d + i) : make_float2(0.f, 0.f);

		v[i] = x.x;
		v[i + 1] = x.y;
	}
}

/* The block's queries to shared memory as f16, in the k-steps' order; all consumers. */
KVK_DEV void load_q(const struct attn_params &p, const struct plan_seg &s,
		    struct wide_smem *sm)
{
	const uint32_t rows = s.q_len * p.nr_q_heads, first = s.hblk * WIDE;

	grid_wait();
#pragma unroll 3
	for (uint32_t i = threadIdx.x; i < WIDE * NR_KS; i += wide_cfg::NR_WARPS * 32) {
		uint32_t c = i % 4, ks = i / 4 % (NR_KS / 4) * 4, row = i / NR_KS;
		size_t d = ((size_t)s.q0 * p.nr_q_heads + first + row) * (LATENT + ROPE) +
			   ks_dim<true>(ks, c);
		uint8_t *dst = sm->q[ks / 4][row] + c * 4;
		float v[16];

		load_q16(p, d, first + row < rows, v);
#pragma unroll
		for (int k = 0; k < 8; k++) /* chunk k: k-step ks + k / 2, half k % 2 */
			*(uint32_t *)(dst + (k ^ (row & 7)) * 16) =
				pack_f16(v[2 * k], v[2 * k + 1]);
	}
	fence_proxy_async();
	bar_sync(BAR_ALL, wide_cfg::NR_WARPS * 32);
}

#endif /* KVK_ATTN_MLA_WIDE_CUH */
