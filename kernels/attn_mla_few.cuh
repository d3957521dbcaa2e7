/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_few.cuh - slots of the MLA decode kernel for up to 8 query rows, and the merge of a unit's
 * parts from them. attn_mla.cu explains the kernel, attn_plan.cuh who merges what and when.
 *
 * All CTAs write their slots at once and then read others', each line on the way being paid for, so
 * a slot is small and its words are whole: O in f16 (attn_mla_f16.cuh), 8 neighbouring values of
 * a row in 16 bytes. m and l are there once for each value warp and row.
 *
 * A slot: ml [8 value warps][8 rows] float2, then words [row][64].
 */
#ifndef KVK_ATTN_MLA_FEW_CUH
#define KVK_ATTN_MLA_FEW_CUH

#include "kernels/attn_mla.cuh"
#include "kernels/attn_mla_f16.cuh"

#define FEW_ROWS    8
#define FEW_WARPS   8 /* who merge: the value warps */
#define FEW_THREADS (32 * FEW_WARPS)
#define FEW_BLOCKS  (LATENT / 8)	      /* words of a row */
#define FEW_O	    (2 * FEW_ROWS * FEW_ROWS) /* floats in front of the words */
#define FEW_AT_ONCE 5			      /* slots that a warp reads at once */

/* Warps' sums of their parts, in shared memory. */
struct few_scratch {
	float4 o[FEW_WARPS][32][2];
	float2 ml[FEW_WARPS][32];
};

/* Block of 8 dims that lane row @g of value warp @w has after few_gather(). */
template <bool FP8> KVK_DEV uint32_t few_block(int w, int g)
{
	return FP8 ? w / 2 * 16 + (g >> 1) * 4 + w % 2 * 2 + (g & 1) : w * 8 + g;
}

/* ... and whose block it is. */
template <bool FP8> KVK_DEV uint32_t few_warp(uint32_t block)
{
	return FP8 ? block / 16 * 2 + block / 2 % 2 : block / 8;
}

/*
 * Lanes g and g ^ 1 have 16 dims of a row between them, interleaved as the fragments are (x: their
 * row g, y: g + 8 of each m-tile). Each gets 8 neighbouring ones.
 */
template <bool FP8> KVK_DEV void few_gather(const float *x, const float *y, float *v)
{
	const bool odd = threadIdx.x & 4;
	float r[4];

#pragma unroll
	for (int i = 0; i < 4; i++) {
		const float to_even = FP8 ? (i & 1 ? y : x)[i / 2] : x[i];
		const float to_odd = FP8 ? (i & 1 ? y : x)[2 + i / 2] : y[i];

		r[i] = __shfl_xor_sync(~0u, odd ? to_even : to_odd, 4);
	}
#pragma unroll
	for (int i = 0; i < 4; i++) {
		if (FP8) { /* a pair of mine, a pair of the other's */
			const int mine = i / 2 * 4 + i % 2;
			const float even = (i & 1 ? y : x)[i / 2],
				    other = (i & 1 ? y : x)[2 + i / 2];

			v[mine] = odd ? r[i] : even;
			v[mine + 2] = odd ? other : r[i];
		} else {
			v[2 * i] = odd ? r[i] : x[i];
			v[2 * i + 1] = odd ? y[i] : r[i];
		}
	}
}

KVK_DEV void few_out8(const struct attn_params &p, size_t at, const float *v)
{
	if (p.act_f32) {
		float4 *o = (float4 *)((float *)p.out + at);

		o[0] = make_float4(v[0], v[1], v[2], v[3]);
		o[1] = make_float4(v[4], v[5], v[6], v[7]);
	} else {
		*(uint4 *)((__nv_bfloat16 *)p.out + at) =
			make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
				   pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
	}
}

/* Value warp @w's 8 values of row @row to its part's slot. All lanes; nothing unless @in. */
KVK_DEV void few_store(float *slot, int w, uint32_t row, uint32_t block, bool in, float m,
		       float l, const float *v)
{
	float top = 0.f, down, shift;

#pragma unroll
	for (int i = 0; i < 8; i++)
		top = fmaxf(top, fabsf(v[i]));
	top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
	top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
	top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
	shift = slot_shift(top);
	down = exp2_fast(-shift);
	if (!in)
		return;
	if ((threadIdx.x & 31) < 4)
		((float2 *)slot)[w * FEW_ROWS + row] = slot_ml(m, l, shift);
	((uint4 *)(slot + FEW_O))[row * FEW_BLOCKS + block] = make_uint4(
		pack_f16(v[0] * down, v[1] * down), pack_f16(v[2] * down, v[3] * down),
		pack_f16(v[4] * down, v[5] * down), pack_f16(v[6] * down, v[7] * down));
}

/* ------------------------------------------------------------------------------- merge
 */

/* Parts @way, @way + @ways, ... of word @e of a unit. */
template <bool FP8>
KVK_DEV void few_read(const struct attn_params &p, const struct plan_seg &s, uint32_t e,
		      uint32_t way, uint32_t ways, struct slot_sum &a)
{
	const uint32_t ml_at = few_warp<FP8>(e % FEW_BLOCKS) * FEW_ROWS + e / FEW_BLOCKS;

	for (uint32_t i = way; i < s.nr_parts; i += FEW_AT_ONCE * ways) {
		uint4 w[FEW_AT_ONCE];
		float2 ml[FEW_AT_ONCE];

#pragma unroll
		for (uint32_t j = 0; j < FEW_AT_ONCE; j++) {
			const uint32_t part = i + j * ways;
			const float *slot = slot_ptr(p.mem, plan_slot(s, part));

			ml[j] = make_float2(-INFINITY, 0.f);
			w[j] = make_uint4(0, 0, 0, 0);
			if (part < s.nr_parts) {
				ml[j] = __ldcg((const float2 *)slot + ml_at);
				w[j] = __ldcg((const uint4 *)(slot + FEW_O) + e);
			}
		}
		slot_add<FEW_AT_ONCE>(a, w, ml);
	}
}

/* Value @k of a word from the sums of @ways warps, in their order. */
KVK_DEV float few_value(const struct few_scratch *sc, uint32_t warp, uint32_t ways,
			uint32_t word, uint32_t k)
{
	float m = -INFINITY, o = 0.f, l = 0.f;

#pragma unroll 4
	for (uint32_t i = 0; i < ways; i++)
		m = fmaxf(m, sc->ml[warp + i][word].x);
	m = m == -INFINITY ? 0.f : m;
#pragma unroll 4
	for (uint32_t i = 0; i < ways; i++) {
		const float2 ml = sc->ml[warp + i][word];
		const float f = exp2_fast(ml.x - m);

		o += ((const float *)sc->o[warp + i][word])[k] * f;
		l += ml.y * f;
	}
	return l > 0.f ? o / l : o * l;
}

/*
 * Merge slice @slice of @slices: groups of 32 words. Teams of @ways warps share a group, each warp
 * every ways-th part; then a thread has a value. By all of FEW_THREADS.
 */
template <bool FP8>
KVK_DEV void few_merge(const struct attn_params &p, const struct plan_seg &s,
		       uint32_t rows, uint32_t slice, uint32_t slices,
		       struct few_scratch *sc, int tid, int bar)
{
	const uint32_t groups = rows * FEW_BLOCKS / 32, lane = tid & 31, warp = tid / 32;
	const uint32_t lo = slice * groups / slices,
		       nr = (slice + 1) * groups / slices - lo;
	const uint32_t ways = nr > 4 ? 1 : nr > 2 ? 2 : nr > 1 ? 4 : 8;
	struct slot_sum a = {{}, -INFINITY, 0.f};

	if (warp / ways < nr)
		few_read<FP8>(p, s, (lo + warp / ways) * 32 + lane, warp % ways, ways, a);
	sc->o[warp][lane][0] = make_float4(a.o[0], a.o[1], a.o[2], a.o[3]);
	sc->o[warp][lane][1] = make_float4(a.o[4], a.o[5], a.o[6], a.o[7]);
	sc->ml[warp][lane] = make_float2(a.m, a.l);
	bar_sync(bar, FEW_THREADS);
	for (uint32_t i = tid; i < nr * 256; i += FEW_THREADS) {
		const uint32_t e = lo * 32 + i / 8;

		out_store1(p,
			   mla_row_elem(p, s, FEW_ROWS, e / FEW_BLOCKS) +
				   e % FEW_BLOCKS * 8 + i % 8,
			   few_value(sc, i / 256 * ways, ways, i / 8 % 32, i % 8));
	}
	bar_sync(bar, FEW_THREADS);
}

/* plan_finish() for these slots. */
template <bool FP8>
KVK_DEV void few_finish(const struct attn_params &p, const struct plan_pending *pend,
			struct few_scratch *sc, uint32_t *flag, int tid, int bar)
{
	const struct plan_seg s = pend->s;
	const uint32_t rows = s.q_len * p.nr_q_heads; /* a block has all of them */
	const uint32_t slices = min(s.nr_parts, rows * FEW_BLOCKS / 32);

	plan_share(p, pend, slices, s.nr_parts, flag, tid, bar, FEW_THREADS,
		   [&](uint32_t slice) {
			   few_merge<FP8>(p, s, rows, slice, slices, sc, tid, bar);
		   });
}

#endif /* KVK_ATTN_MLA_FEW_CUH */
