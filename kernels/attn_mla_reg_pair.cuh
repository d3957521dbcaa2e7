/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_reg_pair.cuh - the merge of attn_mla_pair.cuh for the two kernels for FP8 pages, attn_mla_reg.cu
 * and attn_mla_fast.cu, whose threads hold 16 rows of 8 dims: each CTA of a pair writes 32 of the rows.
 */
#ifndef KVK_ATTN_MLA_REG_PAIR_CUH
#define KVK_ATTN_MLA_REG_PAIR_CUH

#include "kernels/attn_mla_pair.cuh"
#include "kernels/attn_mla_reg_math.cuh"

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

#endif /* KVK_ATTN_MLA_REG_PAIR_CUH */
