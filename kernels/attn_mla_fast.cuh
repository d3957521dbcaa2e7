/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_fast.cuh - shared memory, queries and operands of the MLA decode kernel for FP8
 * pages with KVK_ATTN_FAST; attn_mla_fast.cu explains it.
 */
#ifndef KVK_ATTN_MLA_FAST_CUH
#define KVK_ATTN_MLA_FAST_CUH

#include "kernels/attn_mla_reg.cuh"

#include <math.h>

#define FAST_ROOM \
	2.f /* a raised reference leaves P at most 2^2: e4m3 has little below 2^-6 */
#define FAST_PS 4 /* pages whose P is there at once */

struct fast_params {
	CUtensorMap latent; /* of the layer: byte, token, block of 128, page, extent */
	CUtensorMap rope;   /* byte, token, page, extent */
	struct attn_params a;
};

struct fast_cfg {
	static constexpr int NR_USE = 8;   /* consumer warps */
	static constexpr int NR_WARPS = 9; /* that read segments */
	static constexpr int NR_THREADS = 384;
	static constexpr int STAGES = 4;
	static constexpr int REGS_USE = 240;
	static constexpr int REGS_FEED = 24;
};

/* What a page's scores and probabilities are multiplied by, of each token. */
struct fast_factors {
	float ratio[TOKENS]; /* rope scale over latent scale */
	float sl[TOKENS];    /* latent scale */
};

/* q, latent and p have the 128-byte swizzle, rope that of 64 bytes. */
struct fast_smem {
	using C = fast_cfg;
	uint8_t q
		[5]
		[REG_BLOCK]; /* [128 dims][row] e4m3; the last: rope, and what it leaves */
	uint8_t latent[C::STAGES][4][REG_BLOCK]; /* [128 dims][token] e4m3 */
	uint8_t p[FAST_PS / 2][REG_BLOCK]; /* [row][of two pages][token]; or scratch */
	uint8_t rope[C::STAGES][REG_ROPE]; /* [token][dim] e4m3 */
	uint8_t scales[C::STAGES][REG_SCALES];
	struct fast_factors f[C::STAGES];
	float m[REG_ROWS];		 /* reference of a row's exponents, log2 */
	float shrink[FAST_PS][REG_ROWS]; /* what a page's raise makes of older sums */
	float q_scale[REG_ROWS];	 /* of a row's query */
	struct mla_seg segs[SEG_RING];
	struct plan_pending pend[2];
	uint64_t full[C::STAGES];
	uint64_t ready[C::STAGES]; /* the factors are there */
	uint64_t empty[C::STAGES];
	uint64_t p_full[FAST_PS];
	uint64_t p_empty[FAST_PS];
	uint32_t raised[FAST_PS]; /* with this P */
	uint32_t segs_in;
	uint32_t segs_done[fast_cfg::NR_WARPS]; /* of each warp: one prepares pages */
	uint32_t flag;
	uint32_t pair; /* this CTA and the other one of its cluster have a unit alone */
};

/* ------------------------------------------------------------------------------ queries
 */

/* Largest magnitude of two bf16 values, and @top. */
KVK_DEV float fast_q_top(uint32_t two, float top)
{
	const float2 v = unpack_bf16(two);

	return fmaxf(top, fmaxf(fabsf(v.x), fabsf(v.y)));
}

/* Two bf16 values times @f in e4m3 */
KVK_DEV uint32_t fast_q_e4m3(uint32_t two, float f)
{
	const float2 v = unpack_bf16(two);

	return arch_f32_e4m3(v.x * f, v.y * f);
}

/*
 * One row's queries in e4m3 with one scale, by a warp: the lane has 16 latent dims and two of the
 * rope. The rope's come with what the rounding left of them, so they are good for 8 bits.
 */
KVK_DEV void fast_quantize_q(const uint32_t (&lat)[8], uint32_t rope, uint32_t row,
			     struct fast_smem *sm)
{
	const uint32_t lane = threadIdx.x & 31, at = lane / 8;
	uint8_t *rest = sm->q[4] + row * 128 + lane % 8 * 2;
	float top = fast_q_top(rope, 0.f), scale, f;
	uint32_t w[4], hi;
	float2 r, left;

#pragma unroll
	for (int i = 0; i < 8; i++)
		top = fast_q_top(lat[i], top);
#pragma unroll
	for (int k = 1; k < 32; k *= 2)
		top = fmaxf(top, __shfl_xor_sync(~0u, top, k));
	scale = top > 0x1p-100f ? top / 448.f : 1.f;
	f = 1.f / scale;
#pragma unroll
	for (int i = 0; i < 4; i++)
		w[i] = fast_q_e4m3(lat[2 * i], f) | fast_q_e4m3(lat[2 * i + 1], f) << 16;
	*(uint4 *)(sm->q[at] + row * 128 + ((lane ^ row) & 7) * 16) =
		make_uint4(w[0], w[1], w[2], w[3]);
	hi = fast_q_e4m3(rope, f);
	r = unpack_bf16(rope);
	left = unpack_f16(arch_e4m3_f16(hi));
	*(uint16_t *)(rest + ((at ^ row) & 7) * 16) = (uint16_t)hi;
	*(uint16_t *)(rest + (((at + 4) ^ row) & 7) * 16) =
		(uint16_t)arch_f32_e4m3(r.x * f - left.x, r.y * f - left.y);
	if (lane == 0)
		sm->q_scale[row] = scale;
}

/* The block's queries to shared memory: a warp takes eight rows, all loads are on their way at once. */
template <bool F32>
KVK_DEV void fast_copy_q(const struct attn_params &p, const struct plan_seg &s,
			 struct fast_smem *sm)
{
	constexpr int NR = REG_ROWS / fast_cfg::NR_USE;
	const uint32_t rows = s.q_len * p.nr_q_heads, first = s.hblk * REG_ROWS;
	const uint32_t lane = threadIdx.x & 31, row0 = threadIdx.x / 32 * NR;
	uint4 v[NR][2];
	uint32_t rope[NR];

#pragma unroll
	for (int i = 0; i < NR; i++) {
		const uint32_t row = first + row0 + i;
		const size_t at = ((size_t)s.q0 * p.nr_q_heads + row) * (LATENT + ROPE);

		v[i][0] = v[i][1] = make_uint4(0, 0, 0, 0);
		rope[i] = 0;
		if (row >= rows)
			continue;
		v[i][0] = reg_q_read<F32>(p.q, at + lane * 16);
		v[i][1] = reg_q_read<F32>(p.q, at + lane * 16 + 8);
		if (F32) {
			const float2 r = *(const float2 *)((const float *)p.q + at +
							   LATENT + lane * 2);

			rope[i] = pack_bf16(r.x, r.y);
		} else {
			rope[i] = *(const uint32_t *)((const __nv_bfloat16 *)p.q + at +
						      LATENT + lane * 2);
		}
	}
#pragma unroll
	for (int i = 0; i < NR; i++) {
		const uint32_t lat[8] = {v[i][0].x, v[i][0].y, v[i][0].z, v[i][0].w,
					 v[i][1].x, v[i][1].y, v[i][1].z, v[i][1].w};

		fast_quantize_q(lat, rope[i], row0 + i, sm);
	}
}

KVK_DEV void fast_load_q(const struct attn_params &p, const struct plan_seg &s,
			 struct fast_smem *sm)
{
	grid_wait();
	if (p.act_f32)
		fast_copy_q<true>(p, s, sm);
	else
		fast_copy_q<false>(p, s, sm);
	fence_proxy_async();
	bar_sync(BAR_ALL, 256);
}

/* ----------------------------------------------------------------------------- operands
 */

/* What a warp needs to read a page's bytes, and to name the other operands. */
struct fast_lane {
	uint32_t value; /* of stage 0: the lane's row of the warp's dims */
	uint32_t p;	/* where its rows of the first P go */
	uint32_t tid;	/* of 128 */
	int own;	/* warpgroup */
};

KVK_DEV struct fast_lane fast_lane_init(const struct fast_smem *sm, int own)
{
	const uint32_t lane = threadIdx.x & 31, w = threadIdx.x / 32 % 4;
	struct fast_lane r;

	r.value = smem_addr(sm->latent[0][own * 2 + w / 2]) + lane * 128 +
		  (((w & 1) * 4) ^ (lane & 7)) * 16;
	r.p = smem_addr(sm->p) + (w * 16 + (lane & 15)) * 128 +
	      (lane / 16 ^ (lane & 7)) * 16;
	r.tid = threadIdx.x % 128;
	r.own = own;
	return r;
}

/* An operand with the 64-byte swizzle: rows of 64 bytes. */
KVK_DEV uint64_t fast_desc64(uint32_t addr)
{
	return (uint64_t)((addr & 0x3ffff) >> 4) | 1ull << 16 | 32ull << 32 | 2ull << 62;
}

/*
 * Rope products, then (behind a wait and the ratio) the latent's. A: 64 rows of Q, B: 64 tokens, at
 * @rope.
 */
KVK_DEV void fast_rope_products(const struct fast_smem *sm, const uint8_t *rope,
				float (&s)[32])
{
	const uint64_t q = wgm_desc(smem_addr(sm->q[4]));
	const uint64_t k = fast_desc64(smem_addr(rope));

	wgm_fence();
#pragma unroll
	for (int i = 0; i < 4; i++)
		wgm_ss_e4m3(s, wgm_desc_at(q, i * 2), wgm_desc_at(k, i % 2 * 2), i > 0);
	wgm_commit();
}

KVK_DEV void fast_latent_products(const struct fast_smem *sm, uint32_t stage,
				  float (&s)[32])
{
	const uint64_t q = wgm_desc(smem_addr(sm->q));
	const uint64_t k = wgm_desc(smem_addr(sm->latent[stage]));

	wgm_fence();
#pragma unroll
	for (int i = 0; i < 16; i++)
		wgm_ss_e4m3(s, wgm_desc_at(q, i / 4 * (REG_BLOCK / 16) + i % 4 * 2),
			    wgm_desc_at(k, i / 4 * (REG_BLOCK / 16) + i % 4 * 2), 1);
	wgm_commit();
}

#endif /* KVK_ATTN_MLA_FAST_CUH */
