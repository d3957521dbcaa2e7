/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_fast_math.cuh - softmax and values of the MLA decode kernel for FP8 pages with
 * KVK_ATTN_FAST; attn_mla_fast.cu explains it.
 */
#ifndef KVK_ATTN_MLA_FAST_MATH_CUH
#define KVK_ATTN_MLA_FAST_MATH_CUH

#include "kernels/attn_mla_fast.cuh"

/* A thread's scores: s[4 j + 2 h + e] is of row g + 8 h of its warp's sixteen, token 8 j + 2 c + e. */

/* The rope's scores, in units of the latent scales, and the latent's. */
KVK_DEV void fast_add(const struct fast_factors &f, const float (&rope)[32],
		      float (&s)[32])
{
	const float2 *ratio = (const float2 *)f.ratio + (threadIdx.x & 3);

#pragma unroll
	for (int j = 0; j < 8; j++) {
		const float2 v = ratio[4 * j];

#pragma unroll
		for (int h = 0; h < 2; h++) {
			const int i = 4 * j + 2 * h;

			s[i] = fmaf(rope[i], v.x, s[i]);
			s[i + 1] = fmaf(rope[i + 1], v.y, s[i + 1]);
		}
	}
}

/* Tokens that a row must not see: those behind its own, and behind the end. */
KVK_DEV void fast_mask(const struct attn_params &p, const struct plan_seg &g,
		       int32_t valid, float (&s)[32])
{
	const int lane = threadIdx.x & 31;
	const uint32_t row = g.hblk * REG_ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4;
	const int32_t sees = valid - (int32_t)g.q_len + 1 - 2 * (lane & 3);

#pragma unroll
	for (int h = 0; h < 2; h++) {
		const int32_t left = sees + (int32_t)((row + 8 * h) / p.nr_q_heads);

#pragma unroll
		for (int i = 0; i < 16; i++)
			if (i / 2 * 8 + (i & 1) >= left)
				s[i / 2 * 4 + 2 * h + (i & 1)] = -INFINITY;
	}
}

/* Of a thread's rows g and g + 8 of its warp's sixteen. */
struct fast_rows {
	float q[2]; /* factor of the scores */
	float m[2]; /* reference */
};

KVK_DEV struct fast_rows fast_rows_read(const struct attn_params &p,
					const struct fast_smem *sm)
{
	const uint32_t row = threadIdx.x / 32 % 4 * 16 + (threadIdx.x & 31) / 4;
	struct fast_rows r;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		r.q[h] = sm->q_scale[row + 8 * h] * p.scale;
		r.m[h] = sm->m[row + 8 * h];
	}
	return r;
}

/*
 * P to shared memory in e4m3: of tokens 16 t + 0 .. 15 a lane's 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 are bytes
 * 4 c .. 4 c + 3. Their sums to ls. Returns whether some P is 2^8 and more, so too large.
 */
KVK_DEV bool fast_probs(uint32_t to, const struct fast_factors &f, const float (&s)[32],
			const struct fast_rows &w, float (&ls)[2])
{
	const float2 *sl = (const float2 *)f.sl + (threadIdx.x & 3);
	uint32_t top = 0;

	ls[0] = ls[1] = 0.f;
#pragma unroll
	for (int q = 0; q < 2; q++) {
		uint32_t v[4];

#pragma unroll
		for (int t = 0; t < 2; t++) {
			const int j = 4 * q + 2 * t;
			const float2 a = sl[4 * j], b = sl[4 * j + 4];
			const float k[4] = {a.x, a.y, b.x, b.y};

#pragma unroll
			for (int h = 0; h < 2; h++) {
				float x[4];

#pragma unroll
				for (int e = 0; e < 4; e++) {
					x[e] = exp2_fast(fmaf(
						s[4 * (j + e / 2) + 2 * h + (e & 1)] *
							w.q[h],
						k[e], -w.m[h]));
					ls[h] += x[e];
				}
				v[2 * t + h] = arch_f32_e4m3(x[0] * k[0], x[1] * k[1]) |
					       arch_f32_e4m3(x[2] * k[2], x[3] * k[3])
						       << 16;
				top |= v[2 * t + h] + 0x08080808u;
			}
		}
		stmatrix4(to ^ q * 32, v);
	}
	return top & 0x80808080u;
}

/* O's columns, and the sums of rows, shrink to a page's reference. */
KVK_DEV void fast_shrink(const float *shrink, struct reg_state &st)
{
	const int lane = threadIdx.x & 31, c = lane & 3;

#pragma unroll
	for (int h = 0; h < 2; h++)
		st.l[h] *= shrink[threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * h];
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
KVK_DEV void fast_raise(const struct fast_lane &r, const struct fast_factors &f,
			const float (&s)[32], const struct fast_rows &w, float *shrink,
			struct fast_smem *sm)
{
	const int lane = threadIdx.x & 31;
	const uint32_t row = threadIdx.x / 32 % 4 * 16 + lane / 4;
	float z[2] = {-INFINITY, -INFINITY};

#pragma unroll
	for (int i = 0; i < 16; i++) {
		const float sl = f.sl[i / 2 * 8 + 2 * (lane & 3) + (i & 1)];
		const float lg = __log2f(sl);

#pragma unroll
		for (int h = 0; h < 2; h++)
			z[h] = fmaxf(z[h], fmaf(s[i / 2 * 4 + 2 * h + (i & 1)] * w.q[h],
						sl, lg));
	}
#pragma unroll
	for (int h = 0; h < 2; h++) {
		const float old = w.m[h];
		float now;

		z[h] = fmaxf(z[h], __shfl_xor_sync(~0u, z[h], 1));
		z[h] = fmaxf(z[h], __shfl_xor_sync(~0u, z[h], 2));
		now = z[h] > old + REG_SLACK ? ceilf(z[h]) - FAST_ROOM : old;
		if ((lane & 3) == 0) {
			shrink[row + 8 * h] = exp2_fast(old - now);
			sm->m[row + 8 * h] = now;
		}
	}
	bar_sync(REG_OWN + r.own, 128);
}

/* Where page @seq has its P, and the operand. */
KVK_DEV uint32_t fast_p_at(uint32_t seq)
{
	return seq / 2 % (FAST_PS / 2) * REG_BLOCK;
}

/*
 * Softmax of page @seq that this warpgroup scored, with the references as they are, before the one
 * before it is waited for; if that one raised them, once more. @prev: there is one, of this segment; if not
 * there are no references yet.
 * Returns whether this page raised them; *ret_prev: whether the other did.
 */
KVK_DEV bool fast_softmax(const struct attn_params &p, const struct fast_lane &r,
			  uint32_t seq, bool prev, const float (&s)[32], float (&ls)[2],
			  bool *ret_prev, struct fast_smem *sm)
{
	const uint32_t b = seq % FAST_PS, before = (seq - 1) % FAST_PS;
	const struct fast_factors &f = sm->f[seq % fast_cfg::STAGES];
	const uint32_t to = (r.p ^ (seq & 1) * 64) + fast_p_at(seq);
	struct fast_rows w;
	bool raise = true;

	mbar_wait(&sm->p_empty[b], (seq / FAST_PS & 1) ^ 1);
	w = fast_rows_read(p, sm);
	*ret_prev = false;
	if (prev) {
		raise = fast_probs(to, f, s, w, ls);
		fence_proxy_async();
		mbar_wait(&sm->p_full[before], (seq - 1) / FAST_PS & 1);
		*ret_prev = *(volatile uint32_t *)&sm->raised[before];
	}
	if (*ret_prev) {
		w = fast_rows_read(p, sm);
		raise = fast_probs(to, f, s, w, ls);
		fence_proxy_async();
	}
	if (prev)
		raise = bar_or(REG_OWN + r.own, 128, raise);
	if (raise) {
		fast_raise(r, f, s, w, sm->shrink[b], sm);
		w = fast_rows_read(p, sm);
		fast_probs(to, f, s, w, ls);
		fence_proxy_async();
		bar_sync(REG_OWN + r.own, 128);
	}
	if (r.tid == 0) {
		sm->raised[b] = raise;
		mbar_arrive(&sm->p_full[b]);
	}
	return raise;
}

/* ------------------------------------------------------------------------------- values
 */

#define FAST_AHEAD 2 /* products whose operands are ready */
#define FAST_WORDS 4 /* products whose words are read */

/* Words of a page's product @i: tokens 32 (i / 4) + 0 .. 31, dims 16 (i % 4) + 0 .. 15 of the warp's 64. */
KVK_DEV void fast_value_read(const struct fast_lane &r, uint32_t stage, int i,
			     uint32_t (&w)[4])
{
	ldmatrix4_trans((r.value ^ (i % 4) * 16) + stage * (4 * REG_BLOCK) + i / 4 * 4096,
			w);
}

/* Rows g and g + 8 are dims 2 g and 2 g + 1; the order of tokens is that of P. */
KVK_DEV void fast_value_sort(const uint32_t (&w)[4], uint32_t (&a)[4])
{
	a[0] = __byte_perm(w[0], w[1], 0x6420);
	a[1] = __byte_perm(w[0], w[1], 0x7531);
	a[2] = __byte_perm(w[2], w[3], 0x6420);
	a[3] = __byte_perm(w[2], w[3], 0x7531);
}

struct fast_feed {
	uint32_t a[2 * FAST_AHEAD][4];
	uint32_t w[FAST_WORDS][4];
};

KVK_DEV void fast_value_start(const struct fast_lane &r, uint32_t stage,
			      struct fast_feed &f)
{
#pragma unroll
	for (int i = 0; i < FAST_WORDS; i++)
		fast_value_read(r, stage, i, f.w[i]);
#pragma unroll
	for (int i = 0; i < FAST_AHEAD; i++) {
		fast_value_sort(f.w[i], f.a[i]);
		fast_value_read(r, stage, i + FAST_WORDS, f.w[i]);
	}
}

/* O^T += V^T P^T of page @seq for this warpgroup's half of the dims. FIRST: no products are
 * under way; NEXT: those of @seq + 1 follow */
template <bool FIRST, bool NEXT>
KVK_DEV void fast_values(const struct fast_lane &r, uint32_t seq,
			 const struct fast_smem *sm, struct fast_feed &f,
			 float (&o)[4][32])
{
	const uint32_t stage = seq % fast_cfg::STAGES;
	const uint32_t next = (seq + 1) % fast_cfg::STAGES;
	const uint64_t p = wgm_desc(smem_addr(sm->p) + fast_p_at(seq)) + (seq & 1) * 4;

#pragma unroll
	for (int i = 0; i < 8; i++) {
		const int j = i + FAST_AHEAD, k = j + FAST_WORDS;

		wgm_fence();
		wgm_rs_e4m3(o[i % 4], f.a[i % (2 * FAST_AHEAD)],
			    wgm_desc_at(p, i / 4 * 2), 1);
		wgm_commit();
		if (j >= 8 && !NEXT)
			continue;
		if (i >= FAST_AHEAD || !FIRST)
			wgm_wait<FAST_AHEAD>();
		fast_value_sort(f.w[j % FAST_WORDS], f.a[j % (2 * FAST_AHEAD)]);
		if (k < 8)
			fast_value_read(r, stage, k, f.w[j % FAST_WORDS]);
		else if (NEXT)
			fast_value_read(r, next, k - 8, f.w[j % FAST_WORDS]);
	}
}

#endif /* KVK_ATTN_MLA_FAST_MATH_CUH */
