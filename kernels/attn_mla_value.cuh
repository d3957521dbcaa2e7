/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_value.cuh - value warps of the MLA decode kernel for up to 16 query rows;
 * attn_mla.cu explains it.
 */
#ifndef KVK_ATTN_MLA_VALUE_CUH
#define KVK_ATTN_MLA_VALUE_CUH

#include "kernels/attn_mla_score.cuh"

/* ------------------------------------------------------------------------------ values
 */

/* O^T of a warp's dims: [m-tile][n-tile] fragments; m[nt]: unit of query row 8 nt + g. */
template <int NTL> struct value_state {
	float o[NTL == 1 ? 4 : 8][NTL][4];
	float m[NTL];
};

/* Dim of row g (@hi 0) or g + 8 (@hi 1) of m-tile @mt, for value warp @w. */
template <int NTL, bool FP8> KVK_DEV uint32_t out_dim(int w, int mt, int hi)
{
	using C = mla_cfg<NTL, FP8>;
	const int g = (threadIdx.x & 31) / 4;

	if (FP8 && C::TEAMS == 2)
		return w / 2 * 128 + (2 * (g >> 1) + w % 2) * 16 + 4 * mt + 2 * (g & 1) +
		       hi;
	if (FP8)
		return w * 128 + (2 * (g >> 1) + mt / 4) * 16 + 4 * (mt % 4) +
		       2 * (g & 1) + hi;
	return w * 16 * C::MT + (mt / 4) * 64 + (2 * (g >> 1) + hi) * 8 + 2 * (mt % 4) +
	       (g & 1);
}

/* Rows of V past the end become zero in the columns that this warp reads. */
template <int NTL, bool FP8> KVK_DEV void zero_tail(uint8_t *stage, int w, uint32_t valid)
{
	using C = mla_cfg<NTL, FP8>;
	constexpr int BYTES = FP8 ? 128 : 32 * C::MT, PER = BYTES / 16;
	const int first = (FP8 ? w / C::TEAMS : w) * BYTES;

	for (uint32_t i = valid * PER + (threadIdx.x & 31); i < TOKENS * PER; i += 32)
		*(uint4 *)(stage + i / PER * C::RB + first + i % PER * 16) =
			make_uint4(0, 0, 0, 0);
	fence_proxy_async();
	__syncwarp();
}

/* P of the piece as N operands b[16 tokens][nt], in units of st.m after the call. */
template <int NTL, bool FP8>
KVK_DEV void value_probs(const mla_smem<NTL, FP8> *sm, uint32_t buf, value_state<NTL> &st,
			 uint32_t (*b)[4][NTL][2])
{
	using C = mla_cfg<NTL, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;

#pragma unroll
	for (int nt = 0; nt < NTL; nt++) {
		float e[4], m = st.m[nt], mu, corr;

#pragma unroll
		for (int t = 0; t < 4; t++) {
			e[t] = sm->e[buf][t][8 * nt + g];
			m = fmaxf(m, e[t]);
		}
		mu = m == -INFINITY ? 0.f : m;
		corr = exp2_fast(st.m[nt] - mu);
		if (__any_sync(~0u, m != st.m[nt])) {
			float c0 = __shfl_sync(~0u, corr, 8 * c);
			float c1 = __shfl_sync(~0u, corr, 8 * c + 4);

#pragma unroll
			for (int mt = 0; mt < C::MT; mt++) {
				st.o[mt][nt][0] *= c0;
				st.o[mt][nt][1] *= c1;
				st.o[mt][nt][2] *= c0;
				st.o[mt][nt][3] *= c1;
			}
			st.m[nt] = m;
		}
#pragma unroll
		for (int t = 0; t < 4; t++) {
			float f = exp2_fast(e[t] - mu);

#pragma unroll
			for (int k = 0; k < 2 * C::PLANES; k++) {
				const uint32_t *src =
					(const uint32_t *)
						sm->p[k / 2][buf][t][8 * nt + g];
				uint32_t v = src[c + 4 * (k % 2)];

				if (FP8) {
					__half2 h;

					memcpy(&h, &v, 4);
					h = __hmul2(h, __float2half2_rn(f));
					memcpy(&v, &h, 4);
				} else {
					__nv_bfloat162 h;

					memcpy(&h, &v, 4);
					h = __hmul2(h, __float2bfloat162_rn(f));
					memcpy(&v, &h, 4);
				}
				b[k / 2][t][nt][k % 2] = v;
			}
		}
	}
}

/* O^T += V^T P^T for m-tile @mt: operands a[] are 16 dims x 16 tokens. */
template <int NTL, bool FP8>
KVK_DEV void value_step(const uint32_t *a, const uint32_t (*b)[4][NTL][2], int t,
			float (*o)[4])
{
#pragma unroll
	for (int nt = 0; nt < NTL; nt++)
#pragma unroll
		for (int k = 0; k < mla_cfg<NTL, FP8>::PLANES; k++)
			mma_16816<!FP8>(o[nt], a, b[k][t][nt][0], b[k][t][nt][1]);
}

/* A value warp's dims of 16 tokens: words of rows g and g + 8, as they lie in the page. */
template <int NTL, bool FP8> struct value_words {
	static constexpr bool HALF = FP8 && mla_cfg<NTL, FP8>::TEAMS == 2;
	static constexpr int BLOCKS = FP8 ? 1 : 2 / mla_cfg<NTL, FP8>::TEAMS;
	static constexpr int EACH = HALF ? 4 : 8; /* one chunk per lane and row, or two */
	uint32_t w0[BLOCKS][EACH];
	uint32_t w1[BLOCKS][EACH];
};

template <int NTL, bool FP8>
KVK_DEV void value_read(uint32_t stage, int w, int t, value_words<NTL, FP8> &v)
{
	using C = mla_cfg<NTL, FP8>;
	using V = value_words<NTL, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	const uint32_t row =
		stage + (16 * t + g) * C::RB + (FP8 ? w / C::TEAMS : w * V::BLOCKS) * 128;

#pragma unroll
	for (int k = 0; k < V::BLOCKS; k++) {
		const uint32_t at = row + k * 128;

		if constexpr (V::HALF) {
			lds_one(at + (2 * c + w % 2) * 16, v.w0[k]);
			lds_one(at + 8 * C::RB + (2 * c + w % 2) * 16, v.w1[k]);
		} else {
			lds_pair(at, c, g & 1, v.w0[k]);
			lds_pair(at + 8 * C::RB, c, g & 1, v.w1[k]);
		}
	}
}

/* O^T += V^T P^T of tokens 16 t .. 16 t + 15. */
template <int NTL, bool FP8>
KVK_DEV void value_block(const value_words<NTL, FP8> &v, const uint32_t (*b)[4][NTL][2],
			 int t, value_state<NTL> &st)
{
	using V = value_words<NTL, FP8>;

#pragma unroll
	for (int k = 0; k < V::BLOCKS; k++) {
#pragma unroll
		for (int i = 0; i < (FP8 ? V::EACH : 4); i++) {
			uint32_t a[4];

			if (FP8) {
				uint32_t r0 = movmatrix_trans(v.w0[k][i]);
				uint32_t r1 = movmatrix_trans(v.w1[k][i]);

				e4m3x4_f16(__byte_perm(r0, 0, 0x3120), a[0], a[1]);
				e4m3x4_f16(__byte_perm(r1, 0, 0x3120), a[2], a[3]);
			} else {
				a[0] = movmatrix_trans(v.w0[k][i]);
				a[1] = movmatrix_trans(v.w0[k][(4 + i) % V::EACH]);
				a[2] = movmatrix_trans(v.w1[k][i]);
				a[3] = movmatrix_trans(v.w1[k][(4 + i) % V::EACH]);
			}
			value_step<NTL, FP8>(a, b, t, st.o[4 * k + i]);
		}
	}
}

/* O^T += V^T P^T for this warp's dims; @v: words of the first tokens. */
template <int NTL, bool FP8>
KVK_DEV void value_tile(uint32_t stage, int w, const uint32_t (*b)[4][NTL][2],
			value_words<NTL, FP8> &v, value_state<NTL> &st)
{
#pragma unroll
	for (int t = 0; t < 4; t++) {
		if (t)
			value_read<NTL, FP8>(stage, w, t, v);
		value_block<NTL, FP8>(v, b, t, st);
	}
}

/* A row's m and l, from all score warps. */
template <int NTL, int N>
KVK_DEV float2 value_ml(const float2 (*fin)[8 * NTL], uint32_t row)
{
	float m = -INFINITY, l = 0.f, mu;

	for (int t = 0; t < N; t++)
		m = fmaxf(m, fin[t][row].x);
	mu = m == -INFINITY ? 0.f : m;
	for (int t = 0; t < N; t++)
		l += fin[t][row].y * exp2_fast(fin[t][row].x - mu);
	return make_float2(m, l);
}

/* value_write() of a kernel of 8 rows: in words of 8 neighbouring values. */
template <bool FP8>
KVK_DEV void value_write_few(const struct attn_params &p, const struct plan_seg &s, int w,
			     const float2 (*fin)[8], value_state<1> &st, uint32_t rows)
{
	const int lane = threadIdx.x & 31, c = lane % 4;
	const uint32_t block = few_block<FP8>(w, lane / 4);
	const float sv = FP8 && p.scales ? p.scales[0] : 1.f;

#pragma unroll
	for (int k = 0; k < 2; k++) {
		const uint32_t row = 2 * c + k;
		const float unit = __shfl_sync(~0u, st.m[0], 4 * row);
		const float2 ml = value_ml<1, mla_cfg<1, FP8>::NR_SCORE>(fin, row);
		float f = sv * exp2_fast(unit - (ml.x == -INFINITY ? 0.f : ml.x));
		float x[4], y[4], v[8];

		if (s.nr_parts < 2)
			f = ml.y > 0.f ? f / ml.y : ml.y;
#pragma unroll
		for (int mt = 0; mt < 4; mt++) {
			x[mt] = st.o[mt][0][k] * f;
			y[mt] = st.o[mt][0][2 + k] * f;
		}
		few_gather<FP8>(x, y, v);
		if (s.nr_parts > 1)
			few_store(slot_ptr(p.mem, plan_slot(s, s.part)), w, row, block,
				  row < rows, ml.x, ml.y, v);
		else if (row < rows)
			few_out8(p, mla_row_elem(p, s, 8, row) + 8 * block, v);
	}
}

/* The segment's rows to the output (normalised) or to the unit's slot. */
template <int NTL, bool FP8>
KVK_DEV void value_write(const struct attn_params &p, const struct plan_seg &s, int w,
			 const float2 (*fin)[8 * NTL], value_state<NTL> &st,
			 uint32_t rows)
{
	using C = mla_cfg<NTL, FP8>;
	const int lane = threadIdx.x & 31, c = lane % 4;
	float *slot = s.nr_parts > 1 ? slot_ptr(p.mem, plan_slot(s, s.part)) : NULL;
	const float sv = FP8 && p.scales ? p.scales[0] : 1.f;

#pragma unroll
	for (int k = 0; k < 2 * NTL; k++) {
		const uint32_t row = 8 * (k / 2) + 2 * c + k % 2;
		float unit = __shfl_sync(~0u, st.m[k / 2], 4 * (2 * c + k % 2));
		const float2 ml = value_ml<NTL, C::NR_SCORE>(fin, row);
		const float m = ml.x, l = ml.y;
		float f = sv * exp2_fast(unit - (m == -INFINITY ? 0.f : m));
		size_t off;

		if (!slot)
			f = l > 0.f ? f / l : (l == 0.f ? 0.f : l);
		if (row >= rows)
			continue;
		if (slot && w == 0 && lane < 4)
			((float2 *)slot)[row] = make_float2(m, l);
		off = slot ? slot_o_off(rows) + (size_t)row * LATENT
			   : mla_row_elem(p, s, 8 * NTL, row);
#pragma unroll
		for (int mt = 0; mt < C::MT; mt++) {
			float x = st.o[mt][k / 2][k % 2] * f,
			      y = st.o[mt][k / 2][2 + k % 2] * f;
			uint32_t d0 = out_dim<NTL, FP8>(w, mt, 0),
				 d1 = out_dim<NTL, FP8>(w, mt, 1);

			if (slot && FP8) {
				*(float2 *)(slot + off + d0) = make_float2(x, y);
			} else if (slot) {
				slot[off + d0] = x;
				slot[off + d1] = y;
			} else if (FP8) {
				out_store2(p, off + d0, x, y);
			} else {
				out_store1(p, off + d0, x);
				out_store1(p, off + d1, y);
			}
		}
	}
}

/*
 * Values of the piece at ring position @seq. With FP8 pages their first words are read while the
 * scores are still being made; not those of a page that is not whole, which is changed first.
 */
template <int NTL, bool FP8>
KVK_DEV void value_piece(const struct attn_params &p, uint32_t seq, int w, int32_t valid,
			 value_state<NTL> &st, mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	const uint32_t stage = seq % C::STAGES, buf = seq & 1;
	const uint32_t at = smem_addr(sm->ring[stage]);
	uint32_t b[C::PLANES][4][NTL][2];
	value_words<NTL, FP8> v;

	mbar_wait(&sm->full[stage], seq / C::STAGES & 1);
	if (FP8)
		value_read<NTL, FP8>(at, w, 0, v);
	mbar_wait(&sm->p_full[buf], seq >> 1 & 1);
	if (p.flags & KVK_ATTN_LOADS)
		return;
	if (valid < (int32_t)TOKENS)
		zero_tail<NTL, FP8>(sm->ring[stage], w, valid);
	if (!FP8 || valid < (int32_t)TOKENS)
		value_read<NTL, FP8>(at, w, 0, v);
	value_probs<NTL, FP8>(sm, buf, st, b);
	value_tile<NTL, FP8>(at, w, b, v, st);
}

template <int NTL, bool FP8>
KVK_DEV void value_end(const struct attn_params &p, const struct plan_seg &s, int w,
		       const float2 (*fin)[8 * NTL], value_state<NTL> &st, uint32_t rows)
{
	if constexpr (NTL == 1)
		value_write_few<FP8>(p, s, w, fin, st, rows);
	else
		value_write<NTL, FP8>(p, s, w, fin, st, rows);
}

/*
 * Count a part in: with 8 rows the last of its warps does, since 64 parts of 8 warps would take turns
 * at a counter. (No barrier: with one here the compiler does not overlap the loop's steps.)
 */
template <int NTL, bool FP8>
KVK_DEV void value_arrive(const struct attn_params &p, const struct plan_seg &s,
			  mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	struct plan_pending *pend = &sm->pend[s.part == 0];
	uint32_t nth = 0;

	if constexpr (NTL == 1) {
		__syncwarp();
		if ((threadIdx.x & 31) == 0)
			nth = atoms_add_acq_rel(&sm->written[s.part == 0], 1);
		if (__shfl_sync(~0u, nth, 0) % C::NR_VALUE == C::NR_VALUE - 1)
			plan_arrive(p, s, s.nr_parts, pend);
	} else {
		plan_arrive(p, s, s.nr_parts * C::NR_VALUE, pend);
	}
}

/* A value warp: its latent dims of every piece, and the segment's end. */
template <int NTL, bool FP8>
KVK_DEV void value_warp(const struct attn_params &p, mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32 - C::NR_SCORE;
	uint32_t seq = 0, count;

	spin_until(&sm->segs_in, 0);
	count = sm->count;
	for (uint32_t i = 0; i < count; i++) {
		value_state<NTL> st = {};
		struct mla_seg g;
		uint32_t rows;

		spin_until(&sm->segs_in, i);
		g = sm->segs[i % SEG_RING];
		grid_wait();
		__syncwarp();
		if (lane == 0)
			sts_release(&sm->segs_done[C::NR_SCORE + w], i + 1);
		rows = min(8u * NTL, g.s.q_len * p.nr_q_heads - g.s.hblk * 8 * NTL);
#pragma unroll
		for (int nt = 0; nt < NTL; nt++)
			st.m[nt] = -INFINITY;
		for (uint32_t n = 0; n < g.nr_pieces; n++, seq++) {
			int32_t valid = (int32_t)(g.s.len - (g.s.page0 + n) * TOKENS);

			value_piece<NTL, FP8>(p, seq, w, valid, st, sm);
			__syncwarp();
			if (lane == 0) {
				mbar_arrive(&sm->p_empty[seq & 1]);
				mbar_arrive(&sm->empty[seq % C::STAGES]);
			}
		}
		mbar_wait(&sm->fin_full[i & 1], i >> 1 & 1);
		if (g.ok)
			value_end<NTL, FP8>(p, g.s, w, sm->fin[i & 1], st, rows);
		else if (g.s.part == 0)
			for (uint32_t e = w * 32 + lane; e < rows * (LATENT / 2);
			     e += C::NR_VALUE * 32)
				out_store2(p, mla_row_elem(p, g.s, 8 * NTL, 0) + 2 * e,
					   NAN, NAN);
		__syncwarp();
		if (lane == 0)
			mbar_arrive(&sm->fin_empty[i & 1]);
		if (g.ok && g.s.nr_parts > 1)
			value_arrive<NTL, FP8>(p, g.s, sm);
	}
}

#endif /* KVK_ATTN_MLA_VALUE_CUH */
