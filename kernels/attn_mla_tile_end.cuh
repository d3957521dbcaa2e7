/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_tile_end.cuh - what attn_mla_tile.cu does with a segment's sums: the output, the unit's slot
 * (attn_mla_slot.cuh), or the exchange with the other CTA of a pair (attn_mla_pair.cuh).
 */
#ifndef KVK_ATTN_MLA_TILE_END_CUH
#define KVK_ATTN_MLA_TILE_END_CUH

#include "kernels/attn_mla_pair.cuh"
#include "kernels/attn_mla_slot.cuh"
#include "kernels/attn_mla_tile.cuh"

#include <math.h>

/* A consumer thread's sums: rows g and g + 8 of its warp's 16, 256 latent dims. */
struct tile_state {
	float o[128]; /* o[4 i + 2 h + e]: dim 8 i + 2 c + e of row g + 8 h */
	float m[2];   /* reference of the exponents */
	float l[2];   /* this lane's share, of the pages this warpgroup scored */
};

/* 4 x 4 words of four neighbouring lanes: lane k's w[i] becomes lane i's w[k]. */
KVK_DEV void tile_turn(uint32_t *w)
{
	const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;

#pragma unroll
	for (int i = 0; i < 4; i += 2) {
		const uint32_t v = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);

		w[i] = odd ? v : w[i];
		w[i + 1] = odd ? w[i + 1] : v;
	}
#pragma unroll
	for (int i = 0; i < 2; i++) {
		const uint32_t v = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);

		w[i] = upper ? v : w[i];
		w[i + 2] = upper ? w[i + 2] : v;
	}
}

/*
 * A lane's values of a row, times @f, to the output: 2 of each 8 dims of NR groups. @o: those of the
 * row half in struct tile_state; @at: elements to the first group. All lanes; @in: the row exists.
 * Four lanes put their words together, so that each stores 16 bytes.
 */
template <int NR>
KVK_DEV void tile_out(const struct attn_params &p, size_t at, const float *o, float f,
		      bool in)
{
	const uint32_t c = threadIdx.x & 3;

	if (p.act_f32) {
#pragma unroll
		for (int i = 0; i < NR && in; i++)
			*(float2 *)((float *)p.out + at + 8 * i + 2 * c) =
				make_float2(o[4 * i] * f, o[4 * i + 1] * f);
		return;
	}
#pragma unroll
	for (int i = 0; i < NR; i += 4) {
		uint32_t w[4];

#pragma unroll
		for (int k = 0; k < 4; k++)
			w[k] = pack_bf16(o[4 * (i + k)] * f, o[4 * (i + k) + 1] * f);
		tile_turn(w);
		if (in)
			*(uint4 *)((__nv_bfloat16 *)p.out + at + 8 * (i + c)) =
				make_uint4(w[0], w[1], w[2], w[3]);
	}
}

/* Words of a slot: of a row two of each 8 dims of four groups. */
struct tile_words {
	KVK_DEV uint32_t row(uint32_t e)
	{
		return e / 32 % 4 * 16 + e / 4 % 8 + e / (8 * SLOT_THREADS) * 8;
	}

	KVK_DEV void out(const struct attn_params &p, size_t at, uint32_t e,
			 const float *x)
	{
		at += e / 128 % 2 * 256 + e / SLOT_THREADS % 8 * 32 + 2 * (e & 3);
#pragma unroll
		for (int b = 0; b < 4; b++)
			out_store2(p, at + 8 * b, x[2 * b], x[2 * b + 1]);
	}
};

/* The segment's rows to the output, normalised. */
KVK_DEV void tile_write(const struct attn_params &p, const struct plan_seg &s,
			const struct tile_state &st, uint32_t rows,
			const struct tile_smem *sm)
{
	const int lane = threadIdx.x & 31, wg = threadIdx.x / 128;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		const uint32_t row = threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * h;
		const float l = sm->lsum[0][row] + sm->lsum[1][row];

		tile_out<32>(p, mla_row_elem(p, s, TILE_ROWS, row) + wg * 256,
			     &st.o[2 * h], l > 0.f ? 1.f / l : l, row < rows);
	}
}

/* The largest magnitudes of the warpgroup's dims. */
KVK_DEV void tile_tops(const struct tile_state &st, struct tile_smem *sm)
{
	const int lane = threadIdx.x & 31;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		float top = 0.f;

#pragma unroll
		for (int i = 0; i < 32; i++)
			top = fmaxf(top, fmaxf(fabsf(st.o[4 * i + 2 * h]),
					       fabsf(st.o[4 * i + 2 * h + 1])));
		top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
		top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
		if (lane % 4 == 0)
			sm->top[threadIdx.x / 128]
			       [threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * h] = top;
	}
}

/* The segment's sums to the unit's slot. */
KVK_DEV void tile_slot(const struct attn_params &p, const struct plan_seg &s,
		       const struct tile_state &st, uint32_t rows,
		       const struct tile_smem *sm)
{
	const int lane = threadIdx.x & 31;
	float *slot = slot_ptr(p.mem, plan_slot(s, s.part));

#pragma unroll
	for (int h = 0; h < 2; h++) {
		const uint32_t row = threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * h;
		const float l = sm->lsum[0][row] + sm->lsum[1][row];
		const float shift = slot_shift(fmaxf(sm->top[0][row], sm->top[1][row]));
		const float f = exp2_fast(-shift);

		if (row >= rows)
			continue;
		if (threadIdx.x < 128 && lane % 4 == 0)
			((float2 *)slot)[row] = slot_ml(st.m[h], l, shift);
#pragma unroll
		for (int i = 0; i < 8; i++) {
			const float *o = &st.o[16 * i + 2 * h];

			*slot_word(slot, 8 * h + i) =
				make_uint4(pack_f16(o[0] * f, o[1] * f),
					   pack_f16(o[4] * f, o[5] * f),
					   pack_f16(o[8] * f, o[9] * f),
					   pack_f16(o[12] * f, o[13] * f));
		}
	}
}

/*
 * Merge with the other CTA of the unit, each one half of every warpgroup's dims, and write the output.
 * The tiles are empty, and so is the memory where P travels: there m and l of rows are.
 */
KVK_DEV void tile_pair(const struct attn_params &p, const struct plan_seg &s,
		       struct tile_state &st, uint32_t rows, struct tile_smem *sm)
{
	const uint32_t lane = threadIdx.x & 31, wg = threadIdx.x / 128, c = lane % 4;
	const uint32_t first = threadIdx.x / 32 % 4 * 16 + lane / 4;
	const bool odd = s.part;
	float4 *room = (float4 *)sm->tile + threadIdx.x;
	float2 *ml = (float2 *)sm->px, mine[2], f[2];
	const uint32_t there = pair_addr(smem_addr(room));
	const uint32_t ml_there = pair_addr(smem_addr(ml + first));

#pragma unroll
	for (int h = 0; h < 2; h++) {
		const uint32_t row = first + 8 * h;
		const float l = sm->lsum[0][row] + sm->lsum[1][row];

		/* nothing seen: m must not count */
		mine[h] = make_float2(l == 0.f ? -INFINITY : st.m[h], l);
		if (wg == 0 && c == 0)
			ml[row] = mine[h];
	}
#pragma unroll
	for (int i = 0; i < 16; i++) { /* the other one's dims there, ours down */
		float *lo = &st.o[4 * i], *hi = lo + 64;

		room[i * 256] = odd ? make_float4(lo[0], lo[1], lo[2], lo[3])
				    : make_float4(hi[0], hi[1], hi[2], hi[3]);
#pragma unroll
		for (int k = 0; k < 4; k++)
			lo[k] = odd ? hi[k] : lo[k];
	}
	pair_arrive();
	pair_wait();
#pragma unroll
	for (int h = 0; h < 2; h++)
		f[h] = pair_factors(mine[h], pair_read2(ml_there + 8 * h * 8));
#pragma unroll
	for (int i = 0; i < 16; i++) {
		const float4 v = pair_read4(there + i * 256 * 16);
		float *o = &st.o[4 * i];

		o[0] = o[0] * f[0].x + v.x * f[0].y;
		o[1] = o[1] * f[0].x + v.y * f[0].y;
		o[2] = o[2] * f[1].x + v.z * f[1].y;
		o[3] = o[3] * f[1].x + v.w * f[1].y;
	}
	pair_arrive();
#pragma unroll
	for (int h = 0; h < 2; h++) {
		const uint32_t row = first + 8 * h;

		tile_out<16>(p, mla_row_elem(p, s, TILE_ROWS, row) + wg * 256 + odd * 128,
			     &st.o[2 * h], 1.f, row < rows);
	}
	pair_wait(); /* our shared memory stays until the other one has read it */
}

#endif /* KVK_ATTN_MLA_TILE_END_CUH */
