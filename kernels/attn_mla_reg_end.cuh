/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_reg_end.cuh - what the two kernels for FP8 pages, attn_mla_reg.cu and attn_mla_fast.cu, do with a
 * segment's sums. Their threads hold 16 rows of 8 dims: a word of a slot is a row of a thread. Of a pair
 * (attn_mla_pair.cuh) each CTA writes 32 of the rows.
 */
#ifndef KVK_ATTN_MLA_REG_END_CUH
#define KVK_ATTN_MLA_REG_END_CUH

#include "kernels/attn_mla_pair.cuh"
#include "kernels/attn_mla_reg_math.cuh"
#include "kernels/attn_mla_slot.cuh"

/*
 * Eight neighbouring f32 values of a lane to @to: lanes g and g ^ 1 exchange halves, so that each
 * store fills whole sectors of 32 bytes.
 */
KVK_DEV void reg_store_f32(float *to, const float *x, bool in)
{
	const bool odd = threadIdx.x & 4;
	float y[4];

#pragma unroll
	for (int k = 0; k < 4; k++)
		y[k] = __shfl_xor_sync(~0u, odd ? x[k] : x[4 + k], 4);
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

/* What the consumers tell each other at a segment's end; where P was. */
struct reg_ends {
	float l[reg_cfg::NR_WARPS][REG_ROWS];
	float top[reg_cfg::NR_WARPS][REG_ROWS]; /* largest magnitude of the warp's dims */
	float2 ml[REG_ROWS];
	float scale[REG_ROWS]; /* of O in the slot */
};

static_assert(sizeof(struct reg_ends) <= REG_BLOCK, "P is smaller");

/* Words of a slot. FAST: a thread's dims are two of each of four blocks of 16, else neighbours */
template <bool FAST> struct reg_words {
	KVK_DEV uint32_t row(uint32_t e)
	{
		return e / (2 * SLOT_THREADS) * 8 + 2 * (e & 3) + (e / SLOT_THREADS & 1);
	}

	KVK_DEV void out(const struct attn_params &p, size_t at, uint32_t e,
			 const float *x)
	{
		const uint32_t g = e / 4 % 8;

		at += e / 32 % 8 * 64 + (FAST ? 2 * g : 8 * g);
		if (FAST) {
#pragma unroll
			for (int b = 0; b < 4; b++)
				out_store2(p, at + 16 * b, x[2 * b], x[2 * b + 1]);
			return;
		}
		out_store4(p, at, make_float4(x[0], x[1], x[2], x[3]));
		out_store4(p, at + 4, make_float4(x[4], x[5], x[6], x[7]));
	}
};

/* Lanes that differ in bit 2 N split 2 N values between them, as in reg_halve_send(). */
template <int N> KVK_DEV void reg_halve_top(float *top)
{
	const bool upper = threadIdx.x & 2 * N;

#pragma unroll
	for (int i = 0; i < N; i++) {
		const float lo = top[i], hi = top[N + i];
		const float got = __shfl_xor_sync(~0u, upper ? lo : hi, 2 * N);

		top[i] = fmaxf(upper ? hi : lo, got);
	}
}

/* The largest magnitudes of the warp's dims of rows 2 lane and 2 lane + 1. */
KVK_DEV float2 reg_tops(const struct reg_state &st)
{
	float top[16];

#pragma unroll
	for (int i = 0; i < 16; i++) {
		top[i] = 0.f;
#pragma unroll
		for (int k = 0; k < 8; k++)
			top[i] = fmaxf(
				top[i],
				fabsf(st.o[k / 2][i / 2 * 4 + 2 * (k & 1) + (i & 1)]));
	}
	reg_halve_top<8>(top);
	reg_halve_top<4>(top);
	reg_halve_top<2>(top);
	return make_float2(top[0], top[1]);
}

/* A row's m and l; if they go to a slot, shifted with O. One thread. */
KVK_DEV void reg_row_end(struct reg_ends *e, uint32_t row, float m, float l, bool slot)
{
	float top = 0.f, shift = 0.f;

	if (slot) {
		for (int w = 0; w < reg_cfg::NR_WARPS; w++)
			top = fmaxf(top, e->top[w][row]);
		shift = slot_shift(top);
	}
	e->ml[row] = slot_ml(m, l, shift);
	e->scale[row] = exp2_fast(-shift);
}

/* The segment's sums to the unit's slot. */
KVK_DEV void reg_slot(const struct attn_params &p, const struct plan_seg &s,
		      const struct reg_state &st, uint32_t rows, const struct reg_ends *e)
{
	float *slot = slot_ptr(p.mem, plan_slot(s, s.part));

	if (threadIdx.x < rows)
		((float2 *)slot)[threadIdx.x] = e->ml[threadIdx.x];
#pragma unroll
	for (int i = 0; i < SLOT_WORDS; i++) {
		const uint32_t row = i / 2 * 8 + 2 * (threadIdx.x & 3) + (i & 1);
		const float f = e->scale[row];
		uint32_t w[4];

#pragma unroll
		for (int b = 0; b < 4; b++)
			w[b] = pack_f16(st.o[b][i / 2 * 4 + (i & 1)] * f,
					st.o[b][i / 2 * 4 + 2 + (i & 1)] * f);
		if (row < rows)
			*slot_word(slot, i) = make_uint4(w[0], w[1], w[2], w[3]);
	}
}

/* A row's 8 values of a lane, two of each of four blocks, to the output. FAST: blocks lie 16 dims apart */
template <bool FAST>
KVK_DEV void reg_pair_out(const struct attn_params &p, size_t row, const float *x,
			  bool in)
{
	const uint32_t g = (threadIdx.x & 31) / 4;
	const size_t at = row + threadIdx.x / 32 * 64 + (FAST ? 2 * g : 8 * g);

	if (FAST) {
#pragma unroll
		for (int b = 0; b < 4 && in; b++)
			out_store2(p, at + 16 * b, x[2 * b], x[2 * b + 1]);
	} else if (p.act_f32) {
		reg_store_f32((float *)p.out + at, x, in);
	} else if (in) {
		*(uint4 *)((__nv_bfloat16 *)p.out + at) =
			make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
				   pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
	}
}

/* Merge with the other CTA of the unit and write the output. @ml: m and l of rows; @room: 64 KB, free */
template <bool FAST>
KVK_DEV void reg_pair(const struct attn_params &p, const struct plan_seg &s,
		      struct reg_state &st, uint32_t rows, const float2 *ml, float4 *room)
{
	const uint32_t odd = s.part;
	const uint32_t there = pair_addr(smem_addr(room + threadIdx.x));
	const uint32_t ml_there = pair_addr(smem_addr(ml));

	room += threadIdx.x;
#pragma unroll
	for (int i = 0; i < 16; i++) { /* the other one's rows there, ours down */
		float *lo = &st.o[i / 4][i % 4 * 4], *hi = lo + 16;

		room[i * 256] = odd ? make_float4(lo[0], lo[1], lo[2], lo[3])
				    : make_float4(hi[0], hi[1], hi[2], hi[3]);
#pragma unroll
		for (int k = 0; k < 4; k++)
			lo[k] = odd ? hi[k] : lo[k];
	}
	pair_arrive();
	pair_wait();
#pragma unroll
	for (int i = 0; i < 16; i++) {
		const float4 v = pair_read4(there + i * 256 * 16);
		float4 *mine = (float4 *)&st.o[i / 4][i % 4 * 4 + 16];

		*mine = v; /* in place of what was sent */
	}
#pragma unroll
	for (int i = 0; i < 8; i++) {
		const uint32_t row =
			odd * 32 + i / 2 * 8 + 2 * (threadIdx.x & 3) + (i & 1);
		const float2 f = pair_factors(ml[row], pair_read2(ml_there + row * 8));
		float x[8];

#pragma unroll
		for (int k = 0; k < 8; k++) {
			const float *o = &st.o[k / 2][i / 2 * 4 + 2 * (k & 1) + (i & 1)];

			x[k] = o[0] * f.x + o[16] * f.y;
		}
		reg_pair_out<FAST>(p, mla_row_elem(p, s, REG_ROWS, row), x, row < rows);
	}
	pair_arrive();
	pair_wait(); /* our shared memory stays until the other one has read it */
}

#endif /* KVK_ATTN_MLA_REG_END_CUH */
