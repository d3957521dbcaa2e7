/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla.cu - paged decode attention on the absorbed latent cache, FP8 and BF16 pages,
 * up to 16 query rows a CTA (8 or 16 heads; more rows are cut into blocks of 16).
 *
 * Budget (H200: 18.6 bytes per clock and SM). A *piece* is a page: latent [64][512], rope
 * [64][64] and scales, 37,120 bytes of FP8, one bulk copy, 2,000 clocks of memory time.
 * For 8 query rows: matrix   144 mma.m16n8k16 for the scores, 128 for the values: about
 * 450 clocks convert  36,864 + 32,768 values at 96 per clock: 725 clocks shared   37 KB
 * in, 36 KB out as keys, 32 KB out as values: 830 of 128 bytes per clock so memory is the
 * wall; 16 rows double the first line only.
 *
 * Structure. One CTA per SM walks its segments (attn_plan.cuh). The operands are swapped:
 * tokens are M, query rows are N, so that 8 rows waste nothing. Three roles, no barrier
 * between the warps inside a segment: producer  one warp copies pieces into the ring;
 *   scores    4 warps, 16 tokens of the piece each: S = K Q^T with Q in registers,
 * scales, mask, own running maximum (rounded up to an integer, in log2 units), P to
 * shared memory; values    4 warps, 128 latent dims each: O^T += V^T P^T. The score
 * warps' maxima differ by whole powers of two, so bringing P to a common one is exact. P
 * has two buffers, so scores of the next piece run beside values of this one.
 *
 * Keys become the M operand by plain 16-byte reads and conversion (the order of dims in
 * the k-steps is permuted, Q alike); odd token rows read their two chunks in the other
 * order, which keeps the reads free of bank conflicts. Values: bytes as 16-bit pairs
 * through movmatrix, one byte permute and two conversions. The latent scale multiplies
 * score and probability (relative to the largest scale so far, a power of two), the rope
 * scale its part of the score. Tour 10/12.
 */
#include "kernels/attn_mla.cuh"

#include <errno.h>
#include <math.h>

#define BAR_ALL 1 /* scores and values */
template <int NTL, bool FP8> struct mla_cfg {
	static constexpr int ES = FP8 ? 1 : 2;
	static constexpr int RB = LATENT * ES;	/* bytes of a token's latent */
	static constexpr int RR = ROPE * ES;	/* ... of its rope */
	static constexpr int NB = RB / 128;	/* blocks of 128 bytes */
	static constexpr int KPW = FP8 ? 8 : 4; /* k-steps in a block */
	static constexpr int ROPE_OFF = TOKENS * RB;
	static constexpr int SCALE_OFF = TOKENS * (RB + RR);
	static constexpr int STAGE = SCALE_OFF + (FP8 ? 256 : 0);
	static constexpr int ROWS = 8 * NTL;
	static constexpr int CHAINS = NTL == 1 ? 4 : 2; /* independent sums of a score */
	static constexpr int STAGES = FP8 ? 6 : 3;
	static constexpr int PLANES = FP8 ? 1 : 2; /* BF16: P in two parts */
	/* few rows: two teams of score warps take pieces in turn */
	static constexpr int TEAMS = NTL == 1 ? 2 : 1;
	static constexpr int NR_SCORE = 4 * TEAMS;
	static constexpr int NR_VALUE = 4 * TEAMS;
	static constexpr int NR_WARPS = NR_SCORE + NR_VALUE;
	static constexpr int NR_THREADS =
		(NR_WARPS + 4) * 32;	     /* + a warpgroup, one warp works */
	static constexpr int MT = 8 / TEAMS; /* m-tiles (16 dims) of a value warp */
	static constexpr int REGS_SCORE = TEAMS == 2 ? 136 : 232;
	static constexpr int REGS_VALUE = TEAMS == 2 ? 88 : 232;
	static constexpr int REGS_REST = TEAMS == 2 ? 24 : 40;
};

template <int NTL, bool FP8> struct mla_smem {
	using C = mla_cfg<NTL, FP8>;
	uint8_t ring[C::STAGES][C::STAGE];
	uint16_t p[C::PLANES][2][4][C::ROWS]
		  [16];			     /* [buffer][16 tokens][query row][token] */
	float e[2][4][C::ROWS];		     /* log2 of the unit of p */
	float2 fin[2][C::NR_SCORE][C::ROWS]; /* m, l of a score warp, segment's end */
	struct mla_seg segs[SEG_RING];	     /* written by the producer */
	struct plan_pending pend[2];	     /* first, last segment */
	uint64_t full[C::STAGES];
	uint64_t empty[C::STAGES];
	uint64_t p_full[2];
	uint64_t p_empty[2];
	uint64_t fin_full[2];
	uint64_t fin_empty[2];
	uint32_t issued; /* pieces whose copies were started */
	uint32_t segs_in;
	uint32_t segs_done;
	uint32_t flag;
};

/* ------------------------------------------------------------------------------- scores
 */

/* Start reading the block's queries, raw bf16 pairs (f32 activations are rounded). */
template <int NTL, bool FP8>
KVK_DEV void load_q(const struct attn_params &p, const struct plan_seg &s,
		    uint32_t (*qf)[NTL][2])
{
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;

#pragma unroll
	for (int nt = 0; nt < NTL; nt++) {
		uint32_t row = s.hblk * (8 * NTL) + 8 * nt + g;
		bool in = row < s.q_len * p.nr_q_heads;
		size_t base = ((size_t)s.q0 * p.nr_q_heads + row) * (LATENT + ROPE);

#pragma unroll
		for (int ks = 0; ks < NR_KS; ks++) {
			size_t d = base + ks_dim<FP8>(ks, c);
			uint2 v = make_uint2(0, 0);

			if (in && !p.act_f32)
				v = *(const uint2 *)((const __nv_bfloat16 *)p.q + d);
			if (in && p.act_f32) {
				float4 f = *(const float4 *)((const float *)p.q + d);

				v = make_uint2(pack_bf16(f.x, f.y), pack_bf16(f.z, f.w));
			}
			qf[ks][nt][0] = v.x;
			qf[ks][nt][1] = v.y;
		}
	}
}

template <int NTL, bool FP8> KVK_DEV void convert_q(uint32_t (*qf)[NTL][2])
{
	if constexpr (FP8) {
#pragma unroll
		for (int i = 0; i < NR_KS * NTL * 2; i++) {
			uint32_t *q = &qf[i / (2 * NTL)][i / 2 % NTL][i % 2];
			float2 v = unpack_bf16(*q);

			*q = pack_f16(v.x, v.y);
		}
	}
}

/* One k-step: 4 bytes (FP8) or 8 bytes (BF16) of token rows g and g + 8. */
template <int NTL, bool FP8>
KVK_DEV void score_step(float (*acc)[4], const uint32_t *w0, const uint32_t *w1,
			const uint32_t (*q)[2])
{
	uint32_t a[4];

	if (FP8) {
		e4m3x4_f16(w0[0], a[0], a[2]);
		e4m3x4_f16(w1[0], a[1], a[3]);
	} else {
		a[0] = w0[0];
		a[2] = w0[1];
		a[1] = w1[0];
		a[3] = w1[1];
	}
#pragma unroll
	for (int nt = 0; nt < NTL; nt++)
		mma_16816<!FP8>(acc[nt], a, q[nt][0], q[nt][1]);
}

/* Latent (l) and rope (r) scores of tokens t0 + g, t0 + g + 8. */
template <int NTL, bool FP8>
KVK_DEV void score_tile(uint32_t stage, int t0, const uint32_t (*qf)[NTL][2],
			float (*l)[4], float (*r)[4])
{
	using C = mla_cfg<NTL, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	const uint32_t row = stage + (t0 + g) * C::RB;
	float acc[C::CHAINS][NTL][4] = {};
	constexpr int WPS = FP8 ? 1 : 2; /* words of a k-step */

#pragma unroll
	for (int b = 0; b < C::NB; b++) {
		uint32_t w0[8], w1[8];

		lds_pair(row + b * 128, c, g & 1, w0);
		lds_pair(row + 8 * C::RB + b * 128, c, g & 1, w1);
#pragma unroll
		for (int i = 0; i < C::KPW; i++)
			score_step<NTL, FP8>(acc[i % C::CHAINS], w0 + i * WPS,
					     w1 + i * WPS, qf[b * C::KPW + i]);
	}
#pragma unroll
	for (int i = 0; i < NTL * 4; i++) {
		l[i / 4][i % 4] = r[i / 4][i % 4] = 0.f;
#pragma unroll
		for (int k = 0; k < C::CHAINS; k++)
			l[i / 4][i % 4] += acc[k][i / 4][i % 4];
	}
	if (FP8) {
		const uint32_t at = stage + C::ROPE_OFF + (t0 + g) * C::RR + c * 16;
		const uint4 x = lds128(at), y = lds128(at + 8 * C::RR);
		const uint32_t w0[4] = {x.x, x.y, x.z, x.w}, w1[4] = {y.x, y.y, y.z, y.w};

#pragma unroll
		for (int i = 0; i < 4; i++)
			score_step<NTL, FP8>(r, w0 + i, w1 + i, qf[32 + i]);
	} else {
		const uint32_t at = stage + C::ROPE_OFF + (t0 + g) * C::RR;
		uint32_t w0[8], w1[8];

		lds_pair(at, c, g & 1, w0);
		lds_pair(at + 8 * C::RR, c, g & 1, w1);
#pragma unroll
		for (int i = 0; i < 4; i++)
			score_step<NTL, FP8>(r, w0 + (2 * i & 7), w1 + (2 * i & 7),
					     qf[32 + i]);
	}
}

/* A score warp's running state; index 2 nt + j is query row 8 nt + 2c + j. */
template <int NTL> struct score_state {
	float m[2 * NTL]; /* integers, log2 units */
	float l[2 * NTL]; /* this lane's share */
	float unit;	  /* log2 of the largest latent scale so far, rounded up */
};

/* Scores to P in shared memory. @valid: tokens of the page below the request's length. */
template <int NTL, bool FP8>
KVK_DEV void score_softmax(const struct attn_params &p, const struct plan_seg &s, int t0,
			   int32_t valid, float (*l)[4], float (*r)[4],
			   score_state<NTL> &st, uint32_t sc_addr, uint32_t buf,
			   mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4, w = t0 / 16;
	const bool tok = FP8 && p.token_scales;
	float sl[2] = {1.f, 1.f}, sr[2] = {1.f, 1.f}, sv[2] = {1.f, 1.f};

	if (FP8 && p.scales)
		sl[0] = sl[1] = sr[0] = sr[1] = p.scales[0];
	if (tok) {
		float mx;

#pragma unroll
		for (int h = 0; h < 2; h++) {
			float2 v = unpack_f16(lds32(sc_addr + (t0 + g + 8 * h) * 4));
			bool in = t0 + g + 8 * h < valid;

			sl[h] = in ? v.x : 0.f;
			sr[h] = in ? v.y : 0.f;
		}
		mx = fmaxf(sl[0], sl[1]);
		mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 4));
		mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 8));
		mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 16));
		if (mx > 0.f)
			st.unit = fmaxf(st.unit, ceilf(__log2f(mx)));
		sv[0] = sl[0] * exp2_fast(-st.unit);
		sv[1] = sl[1] * exp2_fast(-st.unit);
	}
#pragma unroll
	for (int k = 0; k < 2 * NTL; k++) {
		const int nt = k / 2, j = k % 2;
		uint32_t row = s.hblk * (8 * NTL) + 8 * nt + 2 * c + j;
		int32_t limit =
			valid - (int32_t)s.q_len + 1 + (int32_t)(row / p.nr_q_heads);
		float x[2], m = -INFINITY, mu, corr;

#pragma unroll
		for (int h = 0; h < 2; h++) {
			x[h] = (l[nt][2 * h + j] * sl[h] + r[nt][2 * h + j] * sr[h]) *
			       p.scale;
			if (t0 + g + 8 * h >= limit)
				x[h] = -INFINITY;
			m = fmaxf(m, x[h]);
		}
		m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
		m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
		m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
		m = fmaxf(ceilf(m), st.m[k]);
		mu = m == -INFINITY ? 0.f : m;
		corr = exp2_fast(st.m[k] - mu);
		st.m[k] = m;
		x[0] = exp2_fast(x[0] - mu);
		x[1] = exp2_fast(x[1] - mu);
		st.l[k] = st.l[k] * corr + x[0] + x[1];
#pragma unroll
		for (int h = 0; h < 2; h++) {
			float v = tok && t0 + g + 8 * h >= valid ? 0.f : x[h] * sv[h];
			uint32_t u = FP8 ? pack_f16(v, 0.f) : pack_bf16(v, 0.f);

			sm->p[0][buf][w][8 * nt + 2 * c + j][g + 8 * h] = (uint16_t)u;
			if (!FP8)
				sm->p[C::PLANES - 1][buf][w][8 * nt + 2 * c + j]
				     [g + 8 * h] =
					(uint16_t)pack_bf16(v - unpack_bf16(u).x, 0.f);
		}
		if (g == 0)
			sm->e[buf][w][8 * nt + 2 * c + j] = m + (tok ? st.unit : 0.f);
	}
}

/* A score warp: 16 tokens of its team's pieces. */
template <int NTL, bool FP8>
KVK_DEV void score_warp(const struct attn_params &p, uint32_t count,
			mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32, t0 = 16 * (w % 4);
	uint32_t qf[NR_KS][NTL][2], base = 0;
	struct mla_seg g;

	for (uint32_t i = 0; i < count; i++) {
		score_state<NTL> st;

		if (i == 0) {
			spin_until(&sm->segs_in, 0);
			g = sm->segs[0];
			grid_wait();
			load_q<NTL, FP8>(p, g.s, qf);
		}
#pragma unroll
		for (int k = 0; k < 2 * NTL; k++) {
			st.m[k] = -INFINITY;
			st.l[k] = 0.f;
		}
		st.unit = -126.f;
		convert_q<NTL, FP8>(qf);
		for (uint32_t n = (w / 4 - base) % C::TEAMS; n < g.nr_pieces;
		     n += C::TEAMS) {
			uint32_t seq = base + n, stage = seq % C::STAGES, buf = seq & 1;
			int32_t valid = (int32_t)(g.s.len - (g.s.page0 + n) * TOKENS);
			uint32_t at = smem_addr(sm->ring[stage]);

			spin_until(&sm->issued, seq);
			mbar_wait(&sm->full[stage], seq / C::STAGES & 1);
			if (p.flags & KVK_ATTN_LOADS) {
				mbar_wait(&sm->p_empty[buf], (seq >> 1 & 1) ^ 1);
			} else {
				float l[NTL][4], r[NTL][4];

				score_tile<NTL, FP8>(at, t0, qf, l, r);
				mbar_wait(&sm->p_empty[buf], (seq >> 1 & 1) ^ 1);
				score_softmax<NTL, FP8>(p, g.s, t0, valid, l, r, st,
							at + C::SCALE_OFF, buf, sm);
			}
			__syncwarp();
			if (lane == 0) {
				mbar_arrive(&sm->p_full[buf]);
				mbar_arrive(&sm->empty[stage]);
			}
		}
		base += g.nr_pieces;
		if (i + 1 < count) { /* on its way while this one is finished */
			spin_until(&sm->segs_in, i + 1);
			load_q<NTL, FP8>(p, sm->segs[(i + 1) % SEG_RING].s, qf);
		}
		mbar_wait(&sm->fin_empty[i & 1], (i >> 1 & 1) ^ 1);
#pragma unroll
		for (int k = 0; k < 2 * NTL; k++) {
			float l = st.l[k];

			l += __shfl_xor_sync(~0u, l, 4);
			l += __shfl_xor_sync(~0u, l, 8);
			l += __shfl_xor_sync(~0u, l, 16);
			if (lane < 4)
				sm->fin[i & 1][w][8 * (k / 2) + 2 * lane + k % 2] =
					make_float2(st.m[k], l);
		}
		g = sm->segs[(i + 1) % SEG_RING];
		__syncwarp();
		if (lane == 0) {
			mbar_arrive(&sm->fin_full[i & 1]);
			atoms_add_release(&sm->segs_done, 1);
		}
	}
}

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

/* O^T += V^T P^T for this warp's dims. */
template <int NTL, bool FP8>
KVK_DEV void value_tile(uint32_t stage, int w, const uint32_t (*b)[4][NTL][2],
			value_state<NTL> &st)
{
	using C = mla_cfg<NTL, FP8>;
	constexpr bool HALF = FP8 && C::TEAMS == 2; /* one chunk per lane and row */
	constexpr int BLOCKS = FP8 ? 1 : 2 / C::TEAMS;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	const uint32_t row = stage + g * C::RB + (FP8 ? w / C::TEAMS : w * BLOCKS) * 128;

#pragma unroll
	for (int t = 0; t < 4; t++) {
#pragma unroll
		for (int k = 0; k < BLOCKS; k++) {
			const uint32_t at = row + 16 * t * C::RB + k * 128;
			uint32_t w0[8], w1[8], a[4];

			if (HALF) {
				lds_one(at + (2 * c + w % 2) * 16, w0);
				lds_one(at + 8 * C::RB + (2 * c + w % 2) * 16, w1);
			} else {
				lds_pair(at, c, g & 1, w0);
				lds_pair(at + 8 * C::RB, c, g & 1, w1);
			}
#pragma unroll
			for (int i = 0; i < (FP8 && !HALF ? 8 : 4); i++) {
				if (FP8) {
					uint32_t r0 = movmatrix_trans(w0[i]);
					uint32_t r1 = movmatrix_trans(w1[i]);

					e4m3x4_f16(__byte_perm(r0, 0, 0x3120), a[0],
						   a[1]);
					e4m3x4_f16(__byte_perm(r1, 0, 0x3120), a[2],
						   a[3]);
				} else {
					a[0] = movmatrix_trans(w0[i]);
					a[1] = movmatrix_trans(w0[(4 + i) & 7]);
					a[2] = movmatrix_trans(w1[i]);
					a[3] = movmatrix_trans(w1[(4 + i) & 7]);
				}
				value_step<NTL, FP8>(a, b, t, st.o[4 * k + i]);
			}
		}
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
		float m = -INFINITY, l = 0.f, f, mu;
		size_t off;

		for (int t = 0; t < C::NR_SCORE; t++)
			m = fmaxf(m, fin[t][row].x);
		mu = m == -INFINITY ? 0.f : m;
		for (int t = 0; t < C::NR_SCORE; t++)
			l += fin[t][row].y * exp2_fast(fin[t][row].x - mu);
		f = sv * exp2_fast(unit - mu);
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

/* A value warp: its latent dims of every piece, and the segment's end. */
template <int NTL, bool FP8>
KVK_DEV void value_warp(const struct attn_params &p, uint32_t count,
			mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32 - C::NR_SCORE;
	uint32_t seq = 0;

	for (uint32_t i = 0; i < count; i++) {
		value_state<NTL> st = {};
		struct mla_seg g;
		uint32_t rows;

		spin_until(&sm->segs_in, i);
		g = sm->segs[i % SEG_RING];
		grid_wait();
		__syncwarp();
		if (lane == 0)
			atoms_add_release(&sm->segs_done, 1);
		rows = min(8u * NTL, g.s.q_len * p.nr_q_heads - g.s.hblk * 8 * NTL);
#pragma unroll
		for (int nt = 0; nt < NTL; nt++)
			st.m[nt] = -INFINITY;
		for (uint32_t n = 0; n < g.nr_pieces; n++, seq++) {
			int32_t valid = (int32_t)(g.s.len - (g.s.page0 + n) * TOKENS);
			uint32_t stage = seq % C::STAGES, buf = seq & 1;

			mbar_wait(&sm->p_full[buf], seq >> 1 & 1);
			mbar_wait(&sm->full[stage], seq / C::STAGES & 1);
			if (!(p.flags & KVK_ATTN_LOADS)) {
				uint32_t b[C::PLANES][4][NTL][2];

				if (valid < (int32_t)TOKENS)
					zero_tail<NTL, FP8>(sm->ring[stage], w, valid);
				value_probs<NTL, FP8>(sm, buf, st, b);
				value_tile<NTL, FP8>(smem_addr(sm->ring[stage]), w, b,
						     st);
			}
			__syncwarp();
			if (lane == 0) {
				mbar_arrive(&sm->p_empty[buf]);
				mbar_arrive(&sm->empty[stage]);
			}
		}
		mbar_wait(&sm->fin_full[i & 1], i >> 1 & 1);
		if (g.ok)
			value_write<NTL, FP8>(p, g.s, w, sm->fin[i & 1], st, rows);
		else if (g.s.part == 0)
			for (uint32_t e = w * 32 + lane; e < rows * (LATENT / 2);
			     e += C::NR_VALUE * 32)
				out_store2(p, mla_row_elem(p, g.s, 8 * NTL, 0) + 2 * e,
					   NAN, NAN);
		__syncwarp();
		if (lane == 0)
			mbar_arrive(&sm->fin_empty[i & 1]);
		if (g.ok && g.s.nr_parts > 1)
			plan_arrive(p, g.s, g.s.nr_parts * C::NR_VALUE,
				    &sm->pend[g.s.part == 0]);
	}
}

/* The CTA's end: its split units, by all consumers. The ring is empty and serves as
 * scratch. */
template <int NTL, bool FP8>
KVK_DEV void finish_cta(const struct attn_params &p, mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;

	bar_sync(BAR_ALL, C::NR_WARPS * 32);
	for (int i = 0; i < 2; i++) {
		const struct plan_pending *pend = &sm->pend[i];
		uint32_t rows = pend->s.q_len * p.nr_q_heads - pend->s.hblk * 8 * NTL;

		if (pend->epoch)
			plan_finish<LATENT, mla_row_elem>(
				p, pend, 8 * NTL, min(8u * NTL, rows),
				pend->s.nr_parts * C::NR_VALUE,
				(struct plan_part *)sm->ring, &sm->flag, threadIdx.x,
				BAR_ALL, C::NR_WARPS * 32);
	}
}

template <int NTL, bool FP8>
__global__ void __launch_bounds__(mla_cfg<NTL, FP8>::NR_THREADS, 1)
	attn_mla_kernel(const __grid_constant__ struct attn_params p)
{
	using C = mla_cfg<NTL, FP8>;
	extern __shared__ __align__(128) uint8_t smem_raw[];
	mla_smem<NTL, FP8> *sm = (mla_smem<NTL, FP8> *)smem_raw;
	const uint32_t warp = threadIdx.x / 32;

	if (threadIdx.x == 0) {
		for (int i = 0; i < C::STAGES; i++) {
			mbar_init(&sm->full[i], 1);
			mbar_init(&sm->empty[i], 4 + C::NR_VALUE);
		}
		for (int i = 0; i < 2; i++) {
			mbar_init(&sm->p_full[i], 4);
			mbar_init(&sm->p_empty[i], C::NR_VALUE);
			mbar_init(&sm->fin_full[i], C::NR_SCORE);
			mbar_init(&sm->fin_empty[i], C::NR_VALUE);
			sm->pend[i].epoch = sm->pend[i].last = 0;
		}
		sm->issued = sm->segs_in = sm->segs_done = 0;
		mbar_init_fence();
	}
	__syncthreads();
	plan_enter(p);
	if (warp >= C::NR_WARPS) {
		regs_dec<C::REGS_REST>();
		if (warp == C::NR_WARPS)
			produce(p, p.mem.ctas[blockIdx.x], *p.step, sm);
	} else if (warp < C::NR_SCORE) {
		regs_inc<C::REGS_SCORE>();
		score_warp<NTL, FP8>(p, p.mem.ctas[blockIdx.x].count, sm);
		finish_cta<NTL, FP8>(p, sm);
	} else {
		if constexpr (C::TEAMS == 1)
			regs_inc<C::REGS_VALUE>();
		else
			regs_dec<C::REGS_VALUE>();
		value_warp<NTL, FP8>(p, p.mem.ctas[blockIdx.x].count, sm);
		finish_cta<NTL, FP8>(p, sm);
	}
}

/* ------------------------------------------------------------------------------ launcher
 */

template <int NTL, bool FP8>
static int launch(const struct attn_params *p, uint32_t nr_ctas, cudaStream_t stream)
{
	const size_t smem = sizeof(mla_smem<NTL, FP8>);
	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};

	static_assert(sizeof(mla_smem<NTL, FP8>) <= 227 * 1024, "too much shared memory");
	if (cudaFuncSetAttribute(attn_mla_kernel<NTL, FP8>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)smem) != cudaSuccess)
		return -EIO;
	attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr.val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(nr_ctas);
	cfg.blockDim = dim3(mla_cfg<NTL, FP8>::NR_THREADS);
	cfg.dynamicSmemBytes = smem;
	cfg.stream = stream;
	cfg.attrs = &attr;
	cfg.numAttrs = 1;
	if (cudaLaunchKernelEx(&cfg, attn_mla_kernel<NTL, FP8>, *p) != cudaSuccess)
		return -EIO;
	return 0;
}

/* The schedule's shape; false if the fast kernel does not build it. */
static bool mla_shape(const struct kvk_attn_args *a, struct plan_shape *ret_s)
{
	const struct kv_layout *l = &a->pages.layout;
	uint32_t rows = a->nr_q_heads * a->batch.q_len_max;
	struct plan_shape s = {};

	if (l->kind != KV_LAYOUT_MLA || !rows || a->nr_q_heads > 128 ||
	    a->batch.q_len_max > 4 || l->latent_dim != LATENT || l->rope_dim != ROPE ||
	    l->dtype == KV_DTYPE_F32)
		return false;
	s.nr_ctas = (uint32_t)plan_nr_ctas();
	/* wgmma wants 64 rows; the BF16 kernel has 16 */
	s.unit_rows = rows <= 8 ? 8 : rows <= 16 || l->dtype == KV_DTYPE_BF16 ? 16 : 64;
	s.nr_heads = (rows + s.unit_rows - 1) / s.unit_rows;
	s.hbs_max = 1;
	s.q_rows = a->nr_q_heads;
	s.row_dim = LATENT;
	*ret_s = s;
	return s.nr_ctas > 0;
}

size_t kvk_attn_mla_workspace(const struct kvk_attn_args *a)
{
	struct plan_shape s;

	return mla_shape(a, &s) ? plan_workspace(a, &s, NULL) : 0;
}

/**
 * kvk_attn_mla_cuda() - see struct kvk_attn_args
 * Context: any thread; the verdicts were written earlier on the same stream.
 * Return: 0, -EINVAL for a shape that is not built or a short workspace, -EIO.
 */
int kvk_attn_mla_cuda(const struct kvk_attn_args *a, kvk_stream stream)
{
	const bool fp8 = a->pages.layout.dtype == KV_DTYPE_E4M3;
	cudaStream_t st = (cudaStream_t)stream;
	struct attn_params p;
	struct plan_shape s;
	int r;

	if (a->pages.layout.kind != KV_LAYOUT_MLA || a->batch.q_len_max > 4)
		return -EINVAL;
	if (!mla_shape(a, &s))
		return kvk_attn_any_cuda(a, stream);
	r = plan_params(a, &p);
	if (r)
		return r;
	if (a->workspace_bytes < plan_workspace(a, &s, &p.mem))
		return -EINVAL;
	if (!(a->flags & KVK_ATTN_PLAN))
		r = plan_launch(a, &s, &p.mem, st);
	if (r)
		return r;
	if (s.unit_rows == 64)
		return mla_wide_launch(&p, s.nr_ctas, st);
	if (s.unit_rows == 8)
		return fp8 ? launch<1, true>(&p, s.nr_ctas, st)
			   : launch<1, false>(&p, s.nr_ctas, st);
	return fp8 ? launch<2, true>(&p, s.nr_ctas, st)
		   : launch<2, false>(&p, s.nr_ctas, st);
}
