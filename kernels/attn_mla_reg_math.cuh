/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_reg_math.cuh - scores, softmax and values of the MLA decode kernel with operands in
 * registers; attn_mla_reg.cu explains it.
 *
 * The assembler keeps products under way only if it can follow them: every loop is unrolled, each
 * product is a group of its own, nobody waits for more products than there are, and sums are
 * touched behind a wait for all. Else it says so (C7510 to C7518) and waits for each one.
 */
#ifndef KVK_ATTN_MLA_REG_MATH_CUH
#define KVK_ATTN_MLA_REG_MATH_CUH

#include "kernels/attn_mla_reg.cuh"

#include <math.h>

/* Of a thread's tokens g and g + 8 of its warp's sixteen. */
struct reg_tokens {
	float ks[2]; /* factor of the scores */
	float sl[2]; /* ... of the probabilities */
};

/* ------------------------------------------------------------------------------- scores
 */

/* Latent and rope scale of token @at of a page with @valid ones. */
KVK_DEV float2 reg_scale(const struct attn_params &p, int32_t valid,
			 const struct reg_smem *sm, uint32_t stage, uint32_t at)
{
	float2 v = make_float2(1.f, 1.f);

	if (!p.token_scales)
		v.x = v.y = sm->fixed;
	else if ((int32_t)at < valid)
		v = unpack_f16(*(const uint32_t *)(sm->scales[stage] + at * 4));
	v.x = v.x == 0.f ? 0x1p-24f : v.x; /* a latent of zeros: 0 / 0 is NaN */
	return v;
}

KVK_DEV struct reg_tokens reg_scales(const struct attn_params &p, int32_t valid,
				     const struct reg_smem *sm, uint32_t stage)
{
	const uint32_t first = threadIdx.x / 32 % 4 * 16 + (threadIdx.x & 31) / 4;
	struct reg_tokens t;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		t.sl[h] = reg_scale(p, valid, sm, stage, first + 8 * h).x;
		t.ks[h] = t.sl[h] * p.scale;
	}
	return t;
}

/* What a warp needs to read a page's bytes, and to name the other operands. */
struct reg_lane {
	uint32_t rope;	/* of stage 0 */
	uint32_t key;	/* first chunk of a key */
	uint32_t value; /* first k-step of the warpgroup's dims */
	uint64_t q;	/* descriptor */
};

KVK_DEV struct reg_lane reg_lane_init(const struct reg_smem *sm, int own)
{
	const uint32_t lane = threadIdx.x & 31, g = lane / 4, c = lane & 3;
	const uint32_t w = threadIdx.x / 32 % 4, row = w * 16 + g;
	struct reg_lane r;

	r.rope = smem_addr(sm->rope[0]) + row * ROPE + c * 16;
	r.key = smem_addr(sm->latent[0]) + row * 128 + ((2 * c) ^ g) * 16;
	r.value = smem_addr(sm->latent[0][own * 2 + w / 2]) + 2 * c * 128 +
		  (((w & 1) * 4 + g / 2) ^ (2 * c)) * 16 + (g & 1) * 8;
	r.q = wgm_desc(smem_addr(sm->q));
	return r;
}

/* Group @u of a page's keys: 0 is the rope. */
KVK_DEV void reg_score_group(const struct reg_lane &r, uint32_t stage, int u,
			     uint32_t (&w)[8])
{
	if (u == 0)
		reg_key_read(r.rope + stage * REG_ROPE, 8 * ROPE, w);
	else
		reg_key_read((r.key ^ ((u - 1) & 1) * 16) + stage * (4 * REG_BLOCK) +
				     (u - 1) / 2 * REG_BLOCK,
			     1024, w);
}

KVK_DEV void reg_value_group(const struct reg_lane &r, uint32_t stage, int t,
			     uint32_t (&w)[8])
{
	reg_value_read(r.value + stage * (4 * REG_BLOCK) + t * 2048, w);
}

/* Group u's words are in w[u & 1]; a stream may leave the next one's first two. */
KVK_DEV void reg_score_start(const struct reg_lane &r, uint32_t stage, struct reg_feed &f)
{
	reg_score_group(r, stage, 0, f.w[0]);
	reg_score_group(r, stage, 1, f.w[1]);
#pragma unroll
	for (int j = 0; j < REG_AHEAD; j++)
		reg_key_cvt(f.w[0], j, f.a[j]);
}

KVK_DEV void reg_value_start(const struct reg_lane &r, uint32_t stage, struct reg_feed &f)
{
	reg_value_group(r, stage, 0, f.w[0]);
	reg_value_group(r, stage, 1, f.w[1]);
#pragma unroll
	for (int j = 0; j < REG_AHEAD; j++)
		reg_value_cvt(f.w[0], j, f.a[j]);
}

/*
 * Scores of a page, in units of the latent scales: the rope's, times rope scale over latent
 * scale, then the latent's.
 */
KVK_DEV void reg_scores(const struct attn_params &p, const struct reg_lane &r,
			int32_t valid, uint32_t stage, const struct reg_smem *sm,
			struct reg_feed &f, float (&s)[32])
{
	const uint32_t first = threadIdx.x / 32 % 4 * 16 + (threadIdx.x & 31) / 4;
	float ratio[2];

#pragma unroll
	for (int h = 0; h < 2; h++) {
		const float2 v = reg_scale(p, valid, sm, stage, first + 8 * h);

		ratio[h] = __fdividef(v.y, v.x);
	}
#pragma unroll
	for (int i = 0; i < 36; i++) {
		const int j = i + REG_AHEAD, u = j / 4;

		wgm_fence();
		wgm_rs<64, 0, true>(
			s, f.a[i % REG_SLOTS],
			wgm_desc_at(r.q, (i + 32) / 4 % 9 * (REG_BLOCK / 16) + i % 4 * 2),
			i > 0);
		wgm_commit();
		if (i == 3) {
			wgm_wait<0>();
			wgm_keep<32>(s);
#pragma unroll
			for (int k = 0; k < 32; k++)
				s[k] *= ratio[k / 2 & 1];
		} else if (i >= REG_AHEAD) {
			wgm_wait<REG_AHEAD>();
		}
		if (j < 36)
			reg_key_cvt(f.w[u & 1], j % 4, f.a[j % REG_SLOTS]);
		if (j % 4 == 3 && u < 7)
			reg_score_group(r, stage, u + 2, f.w[u & 1]);
	}
	wgm_wait<0>();
	wgm_keep<32>(s);
}

/* Tokens that a row must not see: those behind its own, and behind the end. */
KVK_DEV void reg_mask(const struct attn_params &p, const struct plan_seg &g,
		      int32_t valid, float (&s)[32])
{
	const int lane = threadIdx.x & 31, first = threadIdx.x / 32 % 4 * 16 + lane / 4;
	const int32_t sees = valid - (int32_t)g.q_len + 1;

#pragma unroll
	for (int i = 0; i < 32; i++) {
		const uint32_t row =
			g.hblk * REG_ROWS + i / 4 * 8 + 2 * (lane & 3) + (i & 1);

		if (first + 8 * (i / 2 & 1) >= sees + (int32_t)(row / p.nr_q_heads))
			s[i] = -INFINITY;
	}
}

/* Values of tokens behind the end to zero: 0 x NaN is NaN. By one warpgroup. */
KVK_DEV void reg_tail(struct reg_smem *sm, uint32_t stage, uint32_t valid)
{
	for (uint32_t i = threadIdx.x % 128 + valid * 32; i < TOKENS * 32; i += 128)
		*(uint4 *)(sm->latent[stage][i % 4] + i / 32 * 128 + i / 4 % 8 * 16) =
			make_uint4(0, 0, 0, 0);
	bar_sync(REG_OWN + threadIdx.x / 128, 128);
}

/* ------------------------------------------------------------------------------ softmax
 */

KVK_DEV void reg_references(const struct reg_smem *sm, float2 (&m)[8])
{
#pragma unroll
	for (int j = 0; j < 8; j++)
		m[j] = *(const float2 *)&sm->m[8 * j + 2 * (threadIdx.x & 3)];
}

/*
 * P of the thread's tokens to shared memory, their sums to ls[2 j + e]. Returns whether some P
 * is too large.
 */
KVK_DEV bool reg_probs(struct reg_smem *sm, uint32_t seq, const float (&s)[32],
		       const struct reg_tokens &t, const float2 (&m)[8], float *ls)
{
	const uint32_t lane = threadIdx.x & 31;
	const uint32_t at = (threadIdx.x / 32 % 4 * 8 + (lane & 7)) * 128 +
			    ((lane >> 3) ^ (lane & 7)) * 16;
	const uint32_t to[2] = {smem_addr(sm->rope[seq % reg_cfg::STAGES]) + at,
				smem_addr(sm->p[seq & 1]) + at};
	__half2 top = __float2half2_rn(0.f);

#pragma unroll
	for (int q = 0; q < 2; q++) {
		uint32_t v[2][4];

#pragma unroll
		for (int i = 0; i < 4; i++) {
			const int j = 4 * q + i;

#pragma unroll
			for (int h = 0; h < 2; h++) {
				float x = exp2_fast(
					fmaf(s[4 * j + 2 * h], t.ks[h], -m[j].x));
				float y = exp2_fast(
					fmaf(s[4 * j + 2 * h + 1], t.ks[h], -m[j].y));
				__half2 both;

				ls[2 * j] = h ? ls[2 * j] + x : x;
				ls[2 * j + 1] = h ? ls[2 * j + 1] + y : y;
				v[h][i] = pack_f16(x * t.sl[h], y * t.sl[h]);
				memcpy(&both, &v[h][i], 4);
				top = __hmax2(top, both);
			}
		}
		stmatrix4(to[0] ^ q * 64, v[0]);
		stmatrix4(to[1] ^ q * 64, v[1]);
	}
	return __hgt(__hmax(__low2half(top), __high2half(top)), __float2half(256.f));
}

/*
 * Lanes that differ in bit 2 N split 2 N values between them; first what they give is sent. Done
 * for 8, 4 and 2, the sums ls[2 j + e] of lanes 4 g + c are in ls[e] of lane 4 j + c.
 */
template <int N> KVK_DEV void reg_halve_send(float *ls)
{
	const bool upper = threadIdx.x & 2 * N;

#pragma unroll
	for (int i = 0; i < N; i++) {
		const float lo = ls[i], hi = ls[N + i];

		ls[i] = upper ? hi : lo;
		ls[N + i] = __shfl_xor_sync(~0u, upper ? lo : hi, 2 * N);
	}
}

template <int N> KVK_DEV void reg_halve_add(float *ls)
{
#pragma unroll
	for (int i = 0; i < N; i++)
		ls[i] += ls[N + i];
}

/* Columns shrink to a page's reference. */
KVK_DEV void reg_shrink(const float *shrink, struct reg_state &st)
{
	const int c = threadIdx.x & 3;
	const float2 mine = *(const float2 *)&shrink[(threadIdx.x & 31) * 2];

	st.l[0] *= mine.x;
	st.l[1] *= mine.y;
#pragma unroll
	for (int j = 0; j < 8; j++) {
		const float2 f = *(const float2 *)&shrink[8 * j + 2 * c];

#pragma unroll
		for (int b = 0; b < 4; b++)
#pragma unroll
			for (int h = 0; h < 2; h++) {
				st.o[b][4 * j + 2 * h] *= f.x;
				st.o[b][4 * j + 2 * h + 1] *= f.y;
			}
	}
}

/* New references for rows with too large a P. By the warpgroup that has P's memory. */
KVK_DEV void reg_raise(struct reg_smem *sm, uint32_t seq, const float (&s)[32],
		       const struct reg_tokens &t)
{
	const int lane = threadIdx.x & 31, tid = threadIdx.x % 128;
	float *top = (float *)sm->p[seq & 1]; /* [warp][row] */
	const float lg[2] = {__log2f(t.sl[0]), __log2f(t.sl[1])};

#pragma unroll
	for (int i = 0; i < 16; i++) {
		const int at = i / 2 * 4 + (i & 1);
		float z = fmaxf(fmaf(s[at], t.ks[0], lg[0]),
				fmaf(s[at + 2], t.ks[1], lg[1]));

#pragma unroll
		for (int k = 4; k < 32; k *= 2)
			z = fmaxf(z, __shfl_xor_sync(~0u, z, k));
		if (lane < 4)
			top[tid / 32 * REG_ROWS + i / 2 * 8 + 2 * lane + (i & 1)] = z;
	}
	bar_sync(REG_OWN + threadIdx.x / 128, 128);
	if (tid < REG_ROWS) {
		const float old = sm->m[tid];
		const float z =
			fmaxf(fmaxf(top[tid], top[REG_ROWS + tid]),
			      fmaxf(top[2 * REG_ROWS + tid], top[3 * REG_ROWS + tid]));
		const float now = z > old + REG_SLACK ? ceilf(z) : old;

		sm->shrink[seq & 1][tid] = exp2_fast(old - now);
		sm->m[tid] = now;
	}
	bar_sync(REG_OWN + threadIdx.x / 128, 128);
}

/*
 * Softmax of page @seq that this warpgroup scored, with the references as they are, before the page in
 * front of it is waited for; if that one raised them, once more. @prev: there is one, of this segment; if
 * not there are no references yet.
 * Returns whether this page raised them; *ret_prev: whether the other did.
 */
KVK_DEV bool reg_softmax(struct reg_smem *sm, uint32_t seq, bool prev,
			 const float (&s)[32], const struct reg_tokens &t,
			 float (&ls)[16], bool *ret_prev)
{
	const uint32_t b = seq & 1;
	bool raise = true;
	float2 m[8];

	mbar_wait(&sm->p_empty[b], (seq / 2 & 1) ^ 1);
	*ret_prev = false;
	if (prev) {
		reg_references(sm, m);
		raise = reg_probs(sm, seq, s, t, m, ls);
		fence_proxy_async();
		mbar_wait(&sm->p_full[b ^ 1], (seq - 1) / 2 & 1);
		*ret_prev = *(volatile uint32_t *)&sm->raised[b ^ 1];
	}
	if (*ret_prev) {
		reg_references(sm, m);
		raise = reg_probs(sm, seq, s, t, m, ls);
		fence_proxy_async();
	}
	if (prev)
		raise = bar_or(REG_OWN + threadIdx.x / 128, 128, raise);
	if (raise) {
		reg_raise(sm, seq, s, t);
		reg_references(sm, m);
		reg_probs(sm, seq, s, t, m, ls);
		fence_proxy_async();
		bar_sync(REG_OWN + threadIdx.x / 128, 128);
	}
	if (threadIdx.x % 128 == 0) {
		sm->raised[b] = raise;
		mbar_arrive(&sm->p_full[b]);
	}
	return raise;
}

/* ------------------------------------------------------------------------------- values
 */

enum reg_next { REG_END, REG_VALUES, REG_SCORES };

/* P of page @seq: from 8 tokens to the next 8 it is as far as from its rope to its half of p. */
KVK_DEV uint64_t reg_p_desc(const struct reg_smem *sm, uint32_t seq)
{
	const uint32_t rope = smem_addr(sm->rope[seq % reg_cfg::STAGES]);

	return wgm_desc_rows(rope, smem_addr(sm->p[seq & 1]) - rope);
}

/* This warpgroup's products with page @seq and its P are complete. */
KVK_DEV void reg_page_done(uint32_t seq, struct reg_smem *sm)
{
	__syncwarp();
	if ((threadIdx.x & 31) == 0) {
		mbar_arrive(&sm->p_empty[seq & 1]);
		mbar_arrive(&sm->empty[seq % reg_cfg::STAGES]);
	}
}

/*
 * O^T += V^T P^T of page @seq, for this warpgroup's half of the dims; its first words are read. FIRST: no
 * products are under way, else those of the page in front of it. NEXT: what follows, of stage @next. OWN:
 * it scored the page; meanwhile ls is added up.
 */
template <bool FIRST, enum reg_next NEXT, bool OWN>
KVK_DEV void reg_values(const struct reg_lane &r, struct reg_smem *sm, uint32_t seq,
			uint32_t next, struct reg_feed &f, float (&ls)[16],
			float (&o)[4][32])
{
	const uint32_t stage = seq % reg_cfg::STAGES;
	const uint64_t p = reg_p_desc(sm, seq);

#pragma unroll
	for (int i = 0; i < 16; i++) {
		const int j = i + REG_AHEAD, t = j / 4;

		wgm_fence();
		wgm_rs<64, 1, true>(o[i % 4], f.a[i % REG_SLOTS],
				    wgm_desc_at(p, i / 4 * (1024 / 16)), 1);
		wgm_commit();
		if (i >= REG_AHEAD || !FIRST)
			wgm_wait<REG_AHEAD>();
		if (!FIRST && i == REG_AHEAD)
			reg_page_done(seq - 1, sm);
		if (j < 16 || NEXT == REG_VALUES)
			reg_value_cvt(f.w[t & 1], j % 4, f.a[j % REG_SLOTS]);
		else if (NEXT == REG_SCORES)
			reg_key_cvt(f.w[0], j % 4, f.a[j % REG_SLOTS]);
		if (j % 4 == 3 && t < 2)
			reg_value_group(r, stage, t + 2, f.w[t & 1]);
		else if (j % 4 == 3 && NEXT == REG_VALUES)
			reg_value_group(r, next, t - 2, f.w[t & 1]);
		else if (j % 4 == 3 && NEXT == REG_SCORES)
			reg_score_group(r, next, t - 2, f.w[t & 1]);
		if (OWN && i == 3)
			reg_halve_send<8>(ls);
		else if (OWN && i == 6)
			reg_halve_add<8>(ls);
		else if (OWN && i == 7)
			reg_halve_send<4>(ls);
		else if (OWN && i == 10)
			reg_halve_add<4>(ls);
		else if (OWN && i == 11)
			reg_halve_send<2>(ls);
	}
	if (OWN)
		reg_halve_add<2>(ls);
}

KVK_DEV void reg_arrive(uint64_t *bar)
{
	__syncwarp();
	if ((threadIdx.x & 31) == 0)
		mbar_arrive(bar);
}

#endif /* KVK_ATTN_MLA_REG_MATH_CUH */
