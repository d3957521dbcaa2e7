/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_reg_out.cuh - where sums of a segment go in the MLA decode kernels for FP8 pages and 17 to
 * 64 query rows (attn_mla_reg.cu, attn_mla_fast.cu): output, slot, or the other CTA of a pair.
 */
#ifndef KVK_ATTN_MLA_REG_OUT_CUH
#define KVK_ATTN_MLA_REG_OUT_CUH

#include "kernels/attn_mla_pair.cuh"
#include "kernels/attn_mla_reg.cuh"

/*
 * Eight neighbouring f32 values of a lane to @to: lanes that differ in @step, whose values are neighbours
 * too, exchange halves, so that each store fills whole sectors of 32 bytes.
 */
KVK_DEV void reg_store_f32(float *to, const float *x, uint32_t step, bool in)
{
	const bool odd = threadIdx.x & step;
	float y[4];

#pragma unroll
	for (int k = 0; k < 4; k++)
		y[k] = __shfl_xor_sync(~0u, odd ? x[k] : x[4 + k], step);
	if (!in)
		return;
	if (odd) {
		*(float4 *)(to - 4) = make_float4(y[0], y[1], y[2], y[3]);
		*(float4 *)(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
	} else {
		*(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
		*(float4 *)(to + 8) = make_float4(y[0], y[1], y[2], y[3]);
	}
}

/*
 * KVK_ATTN_FAST: a lane's sums are of two dims of each product. Four lanes exchange them: then it has
 * eight neighbouring dims, o[b][4 j + 2 h + e]: dim 2 b + h of them.
 */
template <int NR_ROWS> KVK_DEV void reg_turn(struct reg_state &st)
{
#pragma unroll
	for (int i = 0; i < 2 * NR_ROWS; i++)
		pair_transpose(4, st.o[0][i], st.o[1][i], st.o[2][i], st.o[3][i]);
}

/*
 * Rows @row0 + 0 .. 4 NR_ROWS - 1 of the segment, sums of a thread's NR_ROWS, to the output, times
 * 1 / l of @ml (or as they are), or to the unit's slot.
 */
template <bool FAST, int NR_ROWS>
KVK_DEV void reg_write(const struct attn_params &p, const struct plan_seg &s,
		       struct reg_state &st, uint32_t rows, uint32_t row0,
		       const float2 *ml, float *slot)
{
	const uint32_t lane = threadIdx.x & 31, g = lane / 4;
	const uint32_t dim =
		threadIdx.x / 32 * 64 + (FAST ? (g & 3) * 16 + g / 4 * 8 : g * 8);

	if (FAST)
		reg_turn<NR_ROWS>(st);
#pragma unroll
	for (int i = 0; i < NR_ROWS; i++) {
		const uint32_t row = row0 + i / 2 * 8 + 2 * (lane & 3) + (i & 1);
		const bool in = row < rows;
		float l = 1.f, x[8];

		if (ml && !slot) {
			l = ml[row].y;
			l = l > 0.f ? 1.f / l : l;
		}
#pragma unroll
		for (int k = 0; k < 8; k++)
			x[k] = st.o[k / 2][i / 2 * 4 + 2 * (k & 1) + (i & 1)] * l;
		if (slot)
			reg_store_f32(slot + slot_o_off(rows) + (size_t)row * LATENT +
					      dim,
				      x, FAST ? 16 : 4, in);
		else if (p.act_f32)
			reg_store_f32((float *)p.out + mla_row_elem(p, s, REG_ROWS, row) +
					      dim,
				      x, FAST ? 16 : 4, in);
		else if (in)
			*(uint4 *)((__nv_bfloat16 *)p.out +
				   mla_row_elem(p, s, REG_ROWS, row) + dim) =
				make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
					   pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
	}
}

/* Merge with the other CTA of a pair, each one half of the rows. @room: 64 KB */
template <bool FAST>
KVK_DEV void reg_pair(const struct attn_params &p, const struct plan_seg &s,
		      struct reg_state &st, uint32_t rows, const float2 *ml, float4 *room,
		      struct plan_pending *pend)
{
	const bool whole = s.nr_parts == 2, odd = s.part & 1;
	const uint32_t there = pair_addr(smem_addr(room + threadIdx.x));
	const uint32_t ml_there = pair_addr(smem_addr(ml));
	const uint32_t row0 = odd * (REG_ROWS / 2);
	struct plan_seg unit;
	float *slot = whole ? NULL : pair_slot(p, s, &unit);
	float2 f[8];

#pragma unroll
	for (int i = 0; i < 16; i++) {
		float *lo = &st.o[i / 4][i % 4 * 4], *hi = lo + 16;

		room[i * 256 + threadIdx.x] =
			odd ? make_float4(lo[0], lo[1], lo[2], lo[3])
			    : make_float4(hi[0], hi[1], hi[2], hi[3]);
#pragma unroll
		for (int k = 0; k < 4; k++)
			lo[k] = odd ? hi[k] : lo[k];
	}
	pair_arrive();
	pair_wait();
#pragma unroll
	for (int i = 0; i < 8; i++) {
		const uint32_t row = row0 + i / 2 * 8 + 2 * (threadIdx.x & 3) + (i & 1);
		float2 both;

		f[i] = pair_factors(ml[row], pair_read2(ml_there + row * 8), whole,
				    &both);
		if (slot && threadIdx.x < 4 && row < rows)
			((float2 *)slot)[row] = both;
	}
#pragma unroll
	for (int i = 0; i < 16; i++) {
		const float4 v = pair_read4(there + i * 256 * 16);
		const float2 a = f[i % 4 * 2], b = f[i % 4 * 2 + 1];
		float *o = &st.o[i / 4][i % 4 * 4];

		o[0] = o[0] * a.x + v.x * a.y;
		o[1] = o[1] * b.x + v.y * b.y;
		o[2] = o[2] * a.x + v.z * a.y;
		o[3] = o[3] * b.x + v.w * b.y;
	}
	pair_arrive();
	reg_write<FAST, 8>(p, s, st, rows, row0, NULL, slot);
	if (slot)
		plan_arrive(p, unit, s.nr_parts * reg_cfg::NR_WARPS, pend, 2);
	pair_wait(); /* its shared memory is not ours to give up before */
}

/* A segment's sums leave the CTA. @ml: m and l of its rows; @room: the ring, of use if @pair. */
template <bool FAST>
KVK_DEV void reg_leave(const struct attn_params &p, const struct mla_seg &g, bool pair,
		       struct reg_state &st, const float2 *ml, float4 *room,
		       struct plan_pending *pend)
{
	const uint32_t rows =
		min((uint32_t)REG_ROWS, g.s.q_len * p.nr_q_heads - g.s.hblk * REG_ROWS);
	float *slot = g.s.nr_parts > 1 ? slot_ptr(p.mem, plan_slot(g.s, g.s.part)) : NULL;

	if (!g.ok) {
		if (g.s.part == 0)
			for (uint32_t e = threadIdx.x; e < rows * (LATENT / 2); e += 256)
				out_store2(p, mla_row_elem(p, g.s, REG_ROWS, 0) + 2 * e,
					   NAN, NAN);
		return;
	}
	if (pair) {
		reg_pair<FAST>(p, g.s, st, rows, ml, room, pend);
		return;
	}
	if (slot && threadIdx.x < rows)
		((float2 *)slot)[threadIdx.x] = ml[threadIdx.x];
	reg_write<FAST, 16>(p, g.s, st, rows, 0, ml, slot);
	if (slot)
		plan_arrive(p, g.s, g.s.nr_parts * reg_cfg::NR_WARPS,
			    &pend[g.s.part == 0]);
}

#endif /* KVK_ATTN_MLA_REG_OUT_CUH */
