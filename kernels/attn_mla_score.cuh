/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_score.cuh - constants, shared memory and score warps of the MLA decode kernel for up
 * to 16 query rows; attn_mla.cu explains it.
 */
#ifndef KVK_ATTN_MLA_SCORE_CUH
#define KVK_ATTN_MLA_SCORE_CUH

#include "kernels/attn_mla_few.cuh"

#define BAR_ALL	  1 /* scores and values */
#define BAR_SCORE 2
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
	static constexpr int CHAINS = 2; /* independent sums of a score */
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
	static constexpr int REGS_REST = TEAMS == 2 ? 32 : 40;
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
	uint32_t q_read;		 /* score warps that have their first queries */
	uint32_t segs_done[C::NR_WARPS]; /* segments that each warp has read */
	uint32_t q_asked
		[C::NR_SCORE]; /* score warps whose first queries are on their way */
	uint32_t written[2]; /* value warps that have left their share of pend[]'s part */
	uint32_t count;	     /* segments of the CTA */
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

/* Raw queries to operands. */
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

/*
 * FP8: the first queries of a CTA, as operands, for all score warps, through the last stage of the
 * ring: each of them alone would read 150 KB, as much as four pages, in sectors of which it wants 8 bytes.
 * The producer leaves that stage alone until all have said that they have theirs. BF16 has three
 * stages and all of them are on their way by then.
 */
template <int NTL, bool FP8>
KVK_DEV void share_q(const struct attn_params &p, const struct plan_seg &s,
		     uint32_t (*qf)[NTL][2], mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	constexpr uint32_t ALL = NR_KS / 2 * NTL; /* of 32 x 8 values */
	constexpr uint32_t EACH = (ALL + C::NR_SCORE - 1) / C::NR_SCORE;
	uint4(*stage)[32] = (uint4(*)[32])sm->ring[C::STAGES - 1];
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
	uint4 v[EACH];

#pragma unroll
	for (uint32_t i = 0; i < EACH; i++) {
		const uint32_t k = i * C::NR_SCORE + warp;
		const uint32_t row = s.hblk * (8 * NTL) + k % NTL * 8 + lane / 4;

		v[i] = make_uint4(0, 0, 0, 0);
		if (k < ALL && row < s.q_len * p.nr_q_heads)
			v[i] = act_load8(p, ((size_t)s.q0 * p.nr_q_heads + row) *
							    (LATENT + ROPE) +
						    ks_dim<FP8>(k / NTL * 2, lane & 3));
	}
#pragma unroll
	for (uint32_t i = 0; i < EACH; i++)
		if (i * C::NR_SCORE + warp < ALL)
			stage[i * C::NR_SCORE + warp][lane] =
				make_uint4(bf16_f16(v[i].x), bf16_f16(v[i].y),
					   bf16_f16(v[i].z), bf16_f16(v[i].w));
	fence_proxy_async();
	bar_sync(BAR_SCORE, 32 * C::NR_SCORE);
#pragma unroll
	for (int k = 0; k < NR_KS / 2 * NTL; k++) {
		const uint4 all = stage[k][lane];

		qf[k / NTL * 2][k % NTL][0] = all.x;
		qf[k / NTL * 2][k % NTL][1] = all.y;
		qf[k / NTL * 2 + 1][k % NTL][0] = all.z;
		qf[k / NTL * 2 + 1][k % NTL][1] = all.w;
	}
	__syncwarp();
	if (lane == 0)
		atoms_add_release(&sm->q_read, 1);
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
	float m[2 * NTL]; /* integers, log2 units: what P is relative to */
	float l[2 * NTL]; /* this lane's share */
	float unit; /* log2 of what latent scales in P are relative to, an integer */
};

/*
 * A reference is raised when a score is more than 2^ROOM_M above it, a scale more than 2^ROOM_UNIT:
 * rarely after the first pages, so that a page costs one vote and no trips between the lanes. P
 * in f16 stays below 2^(ROOM_M + ROOM_UNIT), and is as exact there as below 1.
 */
#define ROOM_M	  6.f
#define ROOM_UNIT 4

KVK_DEV float max_over_tokens(float v)
{
	v = fmaxf(v, __shfl_xor_sync(~0u, v, 4));
	v = fmaxf(v, __shfl_xor_sync(~0u, v, 8));
	return fmaxf(v, __shfl_xor_sync(~0u, v, 16));
}

/* Scales of a lane's two tokens (t, t + 8): of the latent's and the rope's score, and of P. */
template <int NTL, bool FP8>
KVK_DEV void score_scales(const struct attn_params &p, uint32_t sc_addr, int t,
			  int32_t valid, score_state<NTL> &st, float *sl, float *sr,
			  float *sv)
{
	const float fixed = FP8 && p.scales ? p.scales[0] : 1.f;

	sl[0] = sl[1] = sr[0] = sr[1] = fixed;
	sv[0] = sv[1] = 1.f;
	if (FP8 && p.token_scales) {
		float f = exp2_fast(-st.unit);

#pragma unroll
		for (int h = 0; h < 2; h++) {
			float2 v = unpack_f16(lds32(sc_addr + (t + 8 * h) * 4));
			bool in = t + 8 * h < valid;

			sl[h] = in ? v.x : 0.f;
			sr[h] = in ? v.y : 0.f;
		}
		if (__any_sync(~0u, fmaxf(sl[0], sl[1]) * f > (float)(1 << ROOM_UNIT))) {
			st.unit = fmaxf(
				st.unit,
				ceilf(__log2f(max_over_tokens(fmaxf(sl[0], sl[1])))));
			f = exp2_fast(-st.unit);
		}
		sv[0] = sl[0] * f;
		sv[1] = sl[1] * f;
	}
}

/* Scores that a row may not see become -infinity; the row's part of a page that is not whole. */
template <int NTL>
KVK_DEV void score_mask(const struct attn_params &p, const struct plan_seg &s, int t,
			int32_t valid, float (*x)[2])
{
	const int c = threadIdx.x % 4;

#pragma unroll
	for (int k = 0; k < 2 * NTL; k++) {
		uint32_t row = s.hblk * (8 * NTL) + 8 * (k / 2) + 2 * c + k % 2;
		int32_t limit =
			valid - (int32_t)s.q_len + 1 + (int32_t)(row / p.nr_q_heads);

#pragma unroll
		for (int h = 0; h < 2; h++)
			if (t + 8 * h >= limit)
				x[k][h] = -INFINITY;
	}
}

/* Raise the references of the rows that need it to the rows' largest scores. */
template <int NTL> KVK_DEV void score_raise(float (*x)[2], score_state<NTL> &st)
{
	bool high = false;

#pragma unroll
	for (int k = 0; k < 2 * NTL; k++)
		high |= fmaxf(x[k][0], x[k][1]) > st.m[k] + ROOM_M;
	if (!__any_sync(~0u, high))
		return;
#pragma unroll
	for (int k = 0; k < 2 * NTL; k++) {
		float m = fmaxf(ceilf(max_over_tokens(fmaxf(x[k][0], x[k][1]))), st.m[k]);

		st.l[k] *= exp2_fast(st.m[k] - (m == -INFINITY ? 0.f : m));
		st.m[k] = m;
	}
}

/* Scores to P in shared memory. @valid: tokens of the page below the request's length. */
template <int NTL, bool FP8>
KVK_DEV void score_softmax(const struct attn_params &p, const struct plan_seg &s, int t0,
			   int32_t valid, float (*l)[4], float (*r)[4],
			   score_state<NTL> &st, uint32_t sc_addr, uint32_t buf,
			   mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4, w = t0 / 16;
	float sl[2], sr[2], sv[2], x[2 * NTL][2];

	score_scales<NTL, FP8>(p, sc_addr, t0 + g, valid, st, sl, sr, sv);
#pragma unroll
	for (int h = 0; h < 2; h++) {
		sl[h] *= p.scale;
		sr[h] *= p.scale;
	}
#pragma unroll
	for (int i = 0; i < 4 * NTL; i++)
		x[i / 2][i % 2] = l[i / 4][2 * (i % 2) + i / 2 % 2] * sl[i % 2] +
				  r[i / 4][2 * (i % 2) + i / 2 % 2] * sr[i % 2];
	if (valid - (int32_t)s.q_len + 1 < (int32_t)TOKENS)
		score_mask<NTL>(p, s, t0 + g, valid, x);
	score_raise<NTL>(x, st);
#pragma unroll
	for (int k = 0; k < 2 * NTL; k++) {
		const int row = 8 * (k / 2) + 2 * c + k % 2;
		const float mu = st.m[k] == -INFINITY ? 0.f : st.m[k];

#pragma unroll
		for (int h = 0; h < 2; h++) {
			float e = exp2_fast(x[k][h] - mu), v = e * sv[h];
			uint32_t u = FP8 ? pack_f16(v, 0.f) : pack_bf16(v, 0.f);

			st.l[k] += e;
			sm->p[0][buf][w][row][g + 8 * h] = (uint16_t)u;
			if (!FP8)
				sm->p[C::PLANES - 1][buf][w][row][g + 8 * h] =
					(uint16_t)pack_bf16(v - unpack_bf16(u).x, 0.f);
		}
		if (g == 0)
			sm->e[buf][w][row] =
				st.m[k] + (FP8 && p.token_scales ? st.unit : 0.f);
	}
}

/* A score warp's 16 tokens of the piece at ring position @seq, page @n of the segment. */
template <int NTL, bool FP8>
KVK_DEV void score_piece(const struct attn_params &p, const struct mla_seg &g,
			 uint32_t seq, uint32_t n, int t0, const uint32_t (*qf)[NTL][2],
			 score_state<NTL> &st, mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	const uint32_t stage = seq % C::STAGES, buf = seq & 1;
	const int32_t valid = (int32_t)(g.s.len - (g.s.page0 + n) * TOKENS);
	const uint32_t at = smem_addr(sm->ring[stage]);

	/* a team that has stages of its own misses no round of their barriers */
	if constexpr (C::STAGES % C::TEAMS != 0)
		spin_until(&sm->issued, seq);
	mbar_wait(&sm->full[stage], seq / C::STAGES & 1);
	if (p.flags & KVK_ATTN_LOADS) {
		mbar_wait(&sm->p_empty[buf], (seq >> 1 & 1) ^ 1);
	} else {
		float l[NTL][4], r[NTL][4];

		score_tile<NTL, FP8>(at, t0, qf, l, r);
		mbar_wait(&sm->p_empty[buf], (seq >> 1 & 1) ^ 1);
		score_softmax<NTL, FP8>(p, g.s, t0, valid, l, r, st, at + C::SCALE_OFF,
					buf, sm);
	}
	__syncwarp();
	if ((threadIdx.x & 31) == 0) {
		mbar_arrive(&sm->p_full[buf]);
		mbar_arrive(&sm->empty[stage]);
	}
}

/* A score warp's m and l of segment @i to the value warps. */
template <int NTL, bool FP8>
KVK_DEV void score_end(const score_state<NTL> &st, uint32_t i, bool poisoned,
		       mla_smem<NTL, FP8> *sm)
{
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32;

	mbar_wait(&sm->fin_empty[i & 1], (i >> 1 & 1) ^ 1);
#pragma unroll
	for (int k = 0; k < 2 * NTL; k++) {
		float l = st.l[k];

		l += __shfl_xor_sync(~0u, l, 4);
		l += __shfl_xor_sync(~0u, l, 8);
		l += __shfl_xor_sync(~0u, l, 16);
		if (lane < 4)
			sm->fin[i & 1][w][8 * (k / 2) + 2 * lane + k % 2] =
				make_float2(st.m[k], poisoned ? NAN : l);
	}
}

/* A score warp: 16 tokens of its team's pieces. */
template <int NTL, bool FP8>
KVK_DEV void score_warp(const struct attn_params &p, mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	const int w = threadIdx.x / 32;
	uint32_t qf[NR_KS][NTL][2], base = 0, count;
	struct mla_seg g;

	spin_until(&sm->segs_in, 0);
	count = sm->count;
	for (uint32_t i = 0; i < count; i++) {
		score_state<NTL> st;

		if (i == 0) {
			g = sm->segs[0];
			grid_wait();
			if constexpr (FP8)
				share_q<NTL, FP8>(p, g.s, qf, sm);
			else
				load_q<NTL, FP8>(p, g.s, qf);
		} else {
			convert_q<NTL, FP8>(qf);
		}
#pragma unroll
		for (int k = 0; k < 2 * NTL; k++) {
			st.m[k] = -INFINITY;
			st.l[k] = 0.f;
		}
		st.unit = -126.f;
		for (uint32_t n = (w / 4 - base) % C::TEAMS; n < g.nr_pieces;
		     n += C::TEAMS)
			score_piece<NTL, FP8>(p, g, base + n, n, 16 * (w % 4), qf, st,
					      sm);
		base += g.nr_pieces;
		if (i + 1 < count) { /* on its way while this one is finished */
			spin_until(&sm->segs_in, i + 1);
			load_q<NTL, FP8>(p, sm->segs[(i + 1) % SEG_RING].s, qf);
		}
		score_end<NTL, FP8>(st, i, g.poisoned, sm);
		g = sm->segs[(i + 1) % SEG_RING];
		__syncwarp();
		if (threadIdx.x % 32 == 0) {
			mbar_arrive(&sm->fin_full[i & 1]);
			sts_release(&sm->segs_done[w], i + 1);
		}
	}
}

#endif /* KVK_ATTN_MLA_SCORE_CUH */
