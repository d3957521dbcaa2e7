/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_wide.cu - MLA decode over FP8 pages for 17 to 64 query rows a CTA (64 heads;
 * 128 heads and drafts are cut into blocks of 64), on wgmma.
 *
 * Budget for a piece (a page, 64 tokens) and 64 rows, in clocks of an SM:
 *
 * - matrix: 64 x 64 x (576 + 512) x 2 flops at 4,096 a clock: 2,176
 *
 * - memory: 37,120 bytes at 18.6: 2,000
 *
 * - shared memory at 128 bytes: 37 KB in, keys out 36 KB, values out 32 KB with two-way
 *   conflicts, Q as N operand 72 KB, P as N operand 64 KB, P in 8 KB: 2,300
 *
 * - conversion: 69,632 values at 96: 725
 *
 * The matrix units and shared memory are the walls. Staging FP8 as f16 tiles would add
 * 220 KB of shared traffic a piece, so as in attn_mla.cu the tokens (scores) and the
 * latent dims (values) are M and their operands are built in registers from the FP8
 * bytes; only Q and P lie in shared memory, swizzled for wgmma.
 *
 * Roles: a producer warp; one warpgroup for the scores, 16 tokens a warp; two warpgroups
 * for the values, 64 dims a warp (4 tiles of 64 x 64 in registers). Exponents are taken
 * relative to a reference m per query row (an integer in log2 units) that all score warps
 * share. P may exceed it by 2^12; only if a score goes beyond that do the score warps
 * agree on a larger m and publish the factors by which the value warps rescale.
 *
 * Measured: 5,500 clocks a piece. The score warpgroup's chain is serial within a piece;
 * docs/performance-attn.md says what would shorten it.
 */
#include "kernels/attn_mla_wide.cuh"

#include <errno.h>
#include <math.h>

/* ------------------------------------------------------------------------------- scores
 */

/* Four k-steps of M operands from four words of token rows g and g + 8. */
KVK_DEV void score_operands(const uint32_t *w0, const uint32_t *w1, uint32_t (*a)[4])
{
#pragma unroll
	for (int i = 0; i < 4; i++) {
		e4m3x4_f16(w0[i], a[i][0], a[i][2]);
		e4m3x4_f16(w1[i], a[i][1], a[i][3]);
	}
}

/* s = scores of the warp's 16 tokens in units of the latent scale; @ratio: rope / latent.
 */
KVK_DEV void score_tile(uint32_t stage, int t0, uint32_t q, const float *ratio, float *s)
{
	using C = wide_cfg;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	const uint32_t row = stage + (t0 + g) * C::RB;
	const uint32_t rope = stage + C::ROPE_OFF + (t0 + g) * C::RR + c * 16;
	uint32_t a[2][4][4], w0[8], w1[8];

	lds_one(rope, w0);
	lds_one(rope + 8 * C::RR, w1);
	score_operands(w0, w1, a[1]);
	wg_fence();
#pragma unroll
	for (int i = 0; i < 4; i++)
		wgmma_64x64<0>(s, a[1][i], wg_desc(q + 8 * 8192 + i * 32), i);
	wg_commit();
	lds_pair(row, c, g & 1, w0);
	lds_pair(row + 8 * C::RB, c, g & 1, w1);
	score_operands(w0, w1, a[0]);
	wg_wait<0>();
	wg_keep<32>(s);
#pragma unroll
	for (int i = 0; i < 32; i++)
		s[i] *= ratio[i / 2 % 2];
#pragma unroll
	for (int b = 0; b < 8; b++) { /* half blocks: 64 dims */
		wg_fence();
#pragma unroll
		for (int i = 0; i < 4; i++)
			wgmma_64x64<0>(s, a[b & 1][i], wg_desc(q + b * 8192 + i * 32), 1);
		wg_commit();
		if (b == 7)
			break;
		if (b & 1) {
			lds_pair(row + (b + 1) / 2 * 128, c, g & 1, w0);
			lds_pair(row + 8 * C::RB + (b + 1) / 2 * 128, c, g & 1, w1);
		}
		wg_wait<1>();
		score_operands(w0 + (b & 1 ? 0 : 4), w1 + (b & 1 ? 0 : 4),
			       a[(b + 1) & 1]);
	}
	wg_wait<0>();
	wg_keep<32>(s);
}

/* A score warp's state beside sm->m. l[2 j + e]: this lane's share of row 8 j + 2 c + e.
 */
struct wide_state {
	float l[16];
	float unit; /* log2 of the largest latent scale so far, rounded up */
};

/* Token scales of rows g, g + 8; tokens past the end get harmless ones. */
KVK_DEV void token_scales(const struct attn_params &p, uint32_t sc, int t0, int32_t valid,
			  float *sl, float *ratio)
{
	const int g = (threadIdx.x & 31) / 4;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		float st = p.scales ? p.scales[0] : 1.f;

		sl[h] = st;
		ratio[h] = 1.f;
		if (p.token_scales) {
			float2 v = unpack_f16(lds32(sc + (t0 + g + 8 * h) * 4));
			bool in = t0 + g + 8 * h < valid;

			sl[h] = in ? v.x : 0.f;
			ratio[h] = in ? __fdividef(v.y, v.x) : 0.f;
		}
	}
}

/* Exponents: s = s * k - m, masked. Return: some exponent of this lane is too large. */
KVK_DEV bool score_exponents(const struct attn_params &p, const struct plan_seg &sg,
			     int t0, int32_t valid, const float *sl, float *s,
			     const struct wide_smem *sm)
{
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	const bool tail = valid - (int32_t)sg.q_len + 1 < (int32_t)TOKENS;
	const float k[2] = {sl[0] * p.scale, sl[1] * p.scale};
	float top = -INFINITY;

#pragma unroll
	for (int j = 0; j < 8; j++) {
		float2 m = *(const float2 *)&sm->m[8 * j + 2 * c];

#pragma unroll
		for (int e = 0; e < 4; e++) {
			s[4 * j + e] = fmaf(s[4 * j + e], k[e / 2], e % 2 ? -m.y : -m.x);
			if (tail) {
				uint32_t row = sg.hblk * WIDE + 8 * j + 2 * c + e % 2;
				int32_t limit = valid - (int32_t)sg.q_len + 1 +
						(int32_t)(row / p.nr_q_heads);

				if (t0 + g + e / 2 * 8 >= limit)
					s[4 * j + e] = -INFINITY;
			}
			top = fmaxf(top, s[4 * j + e]);
		}
	}
	return top > SLACK;
}

/* The warp's largest exponents and scale to shared memory. */
KVK_DEV void score_max(const float *sl, const float *s, int w, struct wide_smem *sm)
{
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	float mx = fmaxf(sl[0], sl[1]);

	mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 4));
	mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 8));
	mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 16));
	if (lane == 0)
		sm->smax[w] = mx;
#pragma unroll
	for (int k = 0; k < 16; k++) {
		float m = fmaxf(s[4 * (k / 2) + k % 2], s[4 * (k / 2) + 2 + k % 2]);

		m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
		m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
		m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
		if (g == 0)
			sm->cmax[w][8 * (k / 2) + 2 * c + k % 2] = m;
	}
}

/*
 * The rare path: raise the reference m to the integer above the largest score (the first piece
 * of a segment also lowers it), with the factors for sums taken so far. The four warps agree.
 */
KVK_DEV void score_raise(const struct attn_params &p, const float *sl, float *s, int w,
			 bool first, uint32_t buf, struct wide_state &st,
			 struct wide_smem *sm)
{
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	float unit = st.unit, du;

	score_max(sl, s, w, sm);
	bar_sync(BAR_SCORE, NR_SCORE * 32);
	if (p.token_scales) {
		float smax = 0.f;

		for (int i = 0; i < NR_SCORE; i++)
			smax = fmaxf(smax, sm->smax[i]);
		if (smax > 0.f)
			unit = fmaxf(unit, ceilf(__log2f(smax)));
	}
	du = exp2_fast(st.unit - unit);
	st.unit = unit;
#pragma unroll
	for (int k = 0; k < 16; k++) {
		const int col = 8 * (k / 2) + 2 * c + k % 2;
		float d = -INFINITY, cr;

#pragma unroll
		for (int i = 0; i < NR_SCORE; i++)
			d = fmaxf(d, sm->cmax[i][col]);
		d = first && d > -INFINITY ? ceilf(d) : fmaxf(ceilf(d), 0.f);
		cr = first ? 0.f : exp2_fast(-d);
		st.l[k] *= cr;
		s[4 * (k / 2) + k % 2] -= d;
		s[4 * (k / 2) + 2 + k % 2] -= d;
		if (g == 0 && k / 4 == w) {
			sm->m[col] += d;
			sm->f[buf][col] = cr * du;
		}
	}
	bar_sync(BAR_SCORE, NR_SCORE * 32);
}

/* P of the piece to shared memory and the sums. */
KVK_DEV void score_probs(const struct attn_params &p, int t0, const float *sl,
			 const float *s, uint32_t buf, struct wide_state &st,
			 struct wide_smem *sm)
{
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	const uint32_t pb = smem_addr(sm->p[buf]) + (t0 + g) * 128 + c * 4;
	const float u = p.token_scales ? exp2_fast(-st.unit) : 1.f;
	const float sv[2] = {p.token_scales ? sl[0] * u : 1.f,
			     p.token_scales ? sl[1] * u : 1.f};

#pragma unroll
	for (int j = 0; j < 8; j++)
#pragma unroll
		for (int h = 0; h < 2; h++) {
			float x = exp2_fast(s[4 * j + 2 * h]);
			float y = exp2_fast(s[4 * j + 2 * h + 1]);
			uint32_t v = pack_f16(x * sv[h], y * sv[h]);

			st.l[2 * j] += x;
			st.l[2 * j + 1] += y;
			asm volatile("st.shared.u32 [%0], %1;" ::"r"(pb + h * 1024 +
								     ((j ^ g) << 4)),
				     "r"(v)
				     : "memory");
		}
}

KVK_DEV void score_end(uint32_t i, int w, bool poisoned, struct wide_state &st,
			struct wide_smem *sm)
{
	const int lane = threadIdx.x & 31;

	mbar_wait(&sm->fin_empty[i & 1], (i >> 1 & 1) ^ 1);
#pragma unroll
	for (int k = 0; k < 16; k++) {
		float l = st.l[k];

		l += __shfl_xor_sync(~0u, l, 4);
		l += __shfl_xor_sync(~0u, l, 8);
		l += __shfl_xor_sync(~0u, l, 16);
		if (lane < 4)
			sm->fin_l[i & 1][w][8 * (k / 2) + 2 * lane + k % 2] =
				poisoned ? NAN : l;
	}
	if (w == 0) {
		sm->fin_m[i & 1][lane] = sm->m[lane];
		sm->fin_m[i & 1][lane + 32] = sm->m[lane + 32];
		if (lane == 0)
			sm->fin_unit[i & 1] = st.unit;
	}
	bar_sync(BAR_SCORE, NR_SCORE * 32); /* before m is set for the next segment */
	__syncwarp();
	if (lane == 0) {
		mbar_arrive(&sm->fin_full[i & 1]);
		atoms_add_release(&sm->segs_done, 1);
	}
}

KVK_DEV void score_warps(const struct attn_params &p, uint32_t count,
			 struct wide_smem *sm)
{
	using C = wide_cfg;
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32, t0 = 16 * w;
	const uint32_t q = smem_addr(sm->q);
	uint32_t seq = 0;

	for (uint32_t i = 0; i < count; i++) {
		struct wide_state st = {};
		struct mla_seg g;

		spin_until(&sm->segs_in, i);
		g = sm->segs[i % SEG_RING];
		if (lane < 16)
			sm->m[16 * w + lane] = 0.f;
		load_q(p, g.s, sm);
		st.unit = p.token_scales ? -126.f : 0.f;
		for (uint32_t n = 0; n < g.nr_pieces; n++, seq++) {
			int32_t valid = (int32_t)(g.s.len - (g.s.page0 + n) * TOKENS);
			uint32_t stage = seq % C::STAGES, buf = seq & 1;
			uint32_t at = smem_addr(sm->ring[stage]);
			float s[32], sl[2], ratio[2];

			mbar_wait(&sm->full[stage], seq / C::STAGES & 1);
			if (!(p.flags & KVK_ATTN_LOADS)) {
				token_scales(p, at + C::SCALE_OFF, t0, valid, sl, ratio);
				score_tile(at, t0, q, ratio, s);
			}
			__syncwarp();
			if (lane == 0)
				mbar_arrive(&sm->empty[stage]);
			mbar_wait(&sm->p_empty[buf], (seq >> 1 & 1) ^ 1);
			if (!(p.flags & KVK_ATTN_LOADS)) {
				bool raise =
					score_exponents(p, g.s, t0, valid, sl, s, sm);

				raise |= n == 0 ||
					 (p.token_scales &&
					  fmaxf(sl[0], sl[1]) > exp2_fast(st.unit));
				raise = bar_or(BAR_SCORE, NR_SCORE * 32, raise);
				if (raise)
					score_raise(p, sl, s, w, n == 0, buf, st, sm);
				if (w == 0 && lane == 0)
					sm->changed[buf] = raise;
				score_probs(p, t0, sl, s, buf, st, sm);
				fence_proxy_async();
			}
			__syncwarp();
			if (lane == 0)
				mbar_arrive(&sm->p_full[buf]);
		}
		score_end(i, w, g.poisoned, st, sm);
	}
}

/* ------------------------------------------------------------------------------- values
 */

/* Dim of row g (@hi 0) or g + 8 (@hi 1) of tile @mt, for value warp @w: 64 dims a warp.
 */
KVK_DEV uint32_t out_dim(int w, int mt, int hi)
{
	const int g = (threadIdx.x & 31) / 4;

	return w / 2 * 128 + (2 * (g >> 1) + w % 2) * 16 + 4 * mt + 2 * (g & 1) + hi;
}

/* Rows of V past the end become zero in the columns that this warp reads. */
KVK_DEV void zero_tail(uint8_t *stage, int w, uint32_t valid)
{
	for (uint32_t i = valid * 8 + (threadIdx.x & 31); i < TOKENS * 8; i += 32)
		*(uint4 *)(stage + i / 8 * LATENT + w / 2 * 128 + i % 8 * 16) =
			make_uint4(0, 0, 0, 0);
	fence_proxy_async();
	__syncwarp();
}

/* M operands of 16 tokens from their bytes: 4 tiles of 16 dims. */
KVK_DEV void value_operands(const uint32_t *w0, const uint32_t *w1, uint32_t (*a)[4])
{
#pragma unroll
	for (int i = 0; i < 4; i++) {
		e4m3x4_f16(__byte_perm(movmatrix_trans(w0[i]), 0, 0x3120), a[i][0],
			   a[i][1]);
		e4m3x4_f16(__byte_perm(movmatrix_trans(w1[i]), 0, 0x3120), a[i][2],
			   a[i][3]);
	}
}

/*
 * O^T += V^T P^T of a piece. One set of operands: registers are short, and while this
 * warpgroup converts, the other two keep the matrix units busy.
 */
KVK_DEV void value_tile(uint32_t stage, int w, uint32_t pb, float (*o)[32])
{
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	const uint32_t row = stage + g * LATENT + w / 2 * 128 + (2 * c + w % 2) * 16;
	uint32_t a[4][4], w0[4], w1[4];

	lds_one(row, w0);
	lds_one(row + 8 * LATENT, w1);
#pragma unroll
	for (int t = 0; t < 4; t++) {
		if (t > 0)
			wg_wait<0>();
		value_operands(w0, w1, a);
		wg_fence();
#pragma unroll
		for (int mt = 0; mt < 4; mt++)
			wgmma_64x64<1>(o[mt], a[mt], wg_desc(pb + t * 2048), 1);
		wg_commit();
		if (t < 3) {
			lds_one(row + (t + 1) * 16 * LATENT, w0);
			lds_one(row + (t + 1) * 16 * LATENT + 8 * LATENT, w1);
		}
	}
	wg_wait<0>();
#pragma unroll
	for (int mt = 0; mt < 4; mt++)
		wg_keep<32>(o[mt]);
}

KVK_DEV void rescale(const float *f, float (*o)[32])
{
	const int c = threadIdx.x & 3;

#pragma unroll
	for (int j = 0; j < 8; j++) {
		float2 v = *(const float2 *)&f[8 * j + 2 * c];

#pragma unroll
		for (int mt = 0; mt < 4; mt++) {
			o[mt][4 * j] *= v.x;
			o[mt][4 * j + 1] *= v.y;
			o[mt][4 * j + 2] *= v.x;
			o[mt][4 * j + 3] *= v.y;
		}
	}
}

/* The segment's rows to the output (normalised) or to the unit's slot. */
KVK_DEV void value_write(const struct attn_params &p, const struct plan_seg &s, int w,
			 uint32_t i, float (*o)[32], uint32_t rows, struct wide_smem *sm)
{
	const int lane = threadIdx.x & 31, c = lane % 4;
	float *slot = s.nr_parts > 1 ? slot_ptr(p.mem, plan_slot(s, s.part)) : NULL;
	const float unit = exp2_fast(sm->fin_unit[i]) * (p.scales ? p.scales[0] : 1.f);

#pragma unroll
	for (int k = 0; k < 16; k++) {
		const uint32_t row = 8 * (k / 2) + 2 * c + k % 2;
		float l = 0.f, f = unit;
		size_t off;

		for (int t = 0; t < NR_SCORE; t++)
			l += sm->fin_l[i][t][row];
		if (!slot)
			f = l > 0.f ? f / l : l;
		if (row >= rows)
			continue;
		if (slot && w == 0 && lane < 4) /* nothing seen: m must not count */
			((float2 *)slot)[row] =
				make_float2(l == 0.f ? -INFINITY : sm->fin_m[i][row], l);
		off = slot ? slot_o_off(rows) + (size_t)row * LATENT
			   : mla_row_elem(p, s, WIDE, row);
#pragma unroll
		for (int mt = 0; mt < 4; mt++) {
			float x = o[mt][4 * (k / 2) + k % 2] * f;
			float y = o[mt][4 * (k / 2) + 2 + k % 2] * f;

			if (slot)
				*(float2 *)(slot + off + out_dim(w, mt, 0)) =
					make_float2(x, y);
			else
				out_store2(p, off + out_dim(w, mt, 0), x, y);
		}
	}
}

KVK_DEV void value_warps(const struct attn_params &p, uint32_t count,
			 struct wide_smem *sm)
{
	using C = wide_cfg;
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32 - NR_SCORE;
	uint32_t seq = 0;

	for (uint32_t i = 0; i < count; i++) {
		float o[4][32] = {};
		struct mla_seg g;
		uint32_t rows;

		spin_until(&sm->segs_in, i);
		g = sm->segs[i % SEG_RING];
		__syncwarp();
		if (lane == 0)
			atoms_add_release(&sm->segs_done, 1);
		rows = min((uint32_t)WIDE, g.s.q_len * p.nr_q_heads - g.s.hblk * WIDE);
		load_q(p, g.s, sm);
		for (uint32_t n = 0; n < g.nr_pieces; n++, seq++) {
			int32_t valid = (int32_t)(g.s.len - (g.s.page0 + n) * TOKENS);
			uint32_t stage = seq % C::STAGES, buf = seq & 1;

			mbar_wait(&sm->p_full[buf], seq >> 1 & 1);
			mbar_wait(&sm->full[stage], seq / C::STAGES & 1);
			if (!(p.flags & KVK_ATTN_LOADS)) {
				if (valid < (int32_t)TOKENS)
					zero_tail(sm->ring[stage], w, valid);
				if (sm->changed[buf])
					rescale(sm->f[buf], o);
				value_tile(smem_addr(sm->ring[stage]), w,
					   smem_addr(sm->p[buf]), o);
			}
			__syncwarp();
			if (lane == 0) {
				mbar_arrive(&sm->p_empty[buf]);
				mbar_arrive(&sm->empty[stage]);
			}
		}
		mbar_wait(&sm->fin_full[i & 1], i >> 1 & 1);
		if (g.ok)
			value_write(p, g.s, w, i & 1, o, rows, sm);
		else if (g.s.part == 0)
			for (uint32_t e = w * 32 + lane; e < rows * (LATENT / 2);
			     e += NR_VALUE * 32)
				out_store2(p, mla_row_elem(p, g.s, WIDE, 0) + 2 * e, NAN,
					   NAN);
		__syncwarp();
		if (lane == 0)
			mbar_arrive(&sm->fin_empty[i & 1]);
		if (g.ok && g.s.nr_parts > 1)
			plan_arrive(p, g.s, g.s.nr_parts * NR_VALUE,
				    &sm->pend[g.s.part == 0]);
	}
}

/* The CTA's end: its split units, by all consumers. The ring is empty and serves as
 * scratch. */
KVK_DEV void finish_cta(const struct attn_params &p, struct wide_smem *sm)
{
	bar_sync(BAR_ALL, wide_cfg::NR_WARPS * 32);
	for (int i = 0; i < 2; i++) {
		const struct plan_pending *pend = &sm->pend[i];
		uint32_t rows = pend->s.q_len * p.nr_q_heads - pend->s.hblk * WIDE;

		if (pend->epoch)
			plan_finish<LATENT, mla_row_elem, 1>(
				p, pend, WIDE, min((uint32_t)WIDE, rows),
				pend->s.nr_parts * NR_VALUE, (struct plan_part *)sm->ring,
				&sm->flag, threadIdx.x, BAR_ALL, wide_cfg::NR_WARPS * 32);
	}
}

__global__ void __launch_bounds__(wide_cfg::NR_THREADS, 1)
	attn_mla_wide_kernel(const __grid_constant__ struct attn_params p)
{
	using C = wide_cfg;
	extern __shared__ __align__(1024) uint8_t smem_raw[];
	struct wide_smem *sm = (struct wide_smem *)smem_raw;
	const uint32_t warp = threadIdx.x / 32;

	if (threadIdx.x == 0) {
		for (int i = 0; i < C::STAGES; i++) {
			mbar_init(&sm->full[i], 1);
			mbar_init(&sm->empty[i], C::NR_WARPS);
		}
		for (int i = 0; i < 2; i++) {
			mbar_init(&sm->p_full[i], NR_SCORE);
			mbar_init(&sm->p_empty[i], NR_VALUE);
			mbar_init(&sm->fin_full[i], NR_SCORE);
			mbar_init(&sm->fin_empty[i], NR_VALUE);
			sm->pend[i].epoch = sm->pend[i].last = 0;
		}
		sm->issued = sm->segs_in = sm->segs_done = 0;
		mbar_init_fence();
	}
	__syncthreads();
	plan_enter(p);
	if (warp >= C::NR_WARPS) {
		regs_dec<24>();
		if (warp == C::NR_WARPS)
			produce(p, p.mem.ctas[blockIdx.x], *p.step, sm);
	} else if (warp < NR_SCORE) {
		regs_dec<120>();
		score_warps(p, p.mem.ctas[blockIdx.x].count, sm);
		finish_cta(p, sm);
	} else {
		regs_inc<184>();
		value_warps(p, p.mem.ctas[blockIdx.x].count, sm);
		finish_cta(p, sm);
	}
}

int mla_wide_launch(const struct attn_params *p, uint32_t nr_ctas, cudaStream_t stream)
{
	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};

	static_assert(sizeof(struct wide_smem) <= 227 * 1024, "too much shared memory");
	if (cudaFuncSetAttribute(attn_mla_wide_kernel,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)sizeof(struct wide_smem)) != cudaSuccess)
		return -EIO;
	attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr.val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(nr_ctas);
	cfg.blockDim = dim3(wide_cfg::NR_THREADS);
	cfg.dynamicSmemBytes = sizeof(struct wide_smem);
	cfg.stream = stream;
	cfg.attrs = &attr;
	cfg.numAttrs = 1;
	return cudaLaunchKernelEx(&cfg, attn_mla_wide_kernel, *p) == cudaSuccess ? 0
										 : -EIO;
}
