/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_wide.cu - MLA decode over FP8 pages for 17 to 64 query rows a CTA (64 heads;
 * 128 heads and drafts are cut into blocks of 64), on wgmma.
 *
 * Budget for a piece (a page, 64 tokens) and 64 rows, in clocks of an SM:
 *   matrix   64 x 64 x (576 + 512) x 2 flops at 4,096: 2,176
 *   memory   37,120 bytes at 18.6: 2,000
 *   shared   37 KB in, keys out 36 KB, values out 32 KB (two-way conflicts: 64 KB), Q as
 * N operand 72 KB, P as N operand 64 KB, P written 8 KB: 2,300 of 128 bytes convert
 * 69,632 values at 96: 725 The matrix units and shared memory are the walls. Staging FP8
 * as f16 tiles would add 220 KB of shared traffic a piece, so as in attn_mla.cu the
 * tokens (scores) and the latent dims (values) are M and their operands are built in
 * registers from the FP8 bytes; only Q and P lie in shared memory, swizzled for wgmma.
 *
 * Roles: a producer warp; one warpgroup for the scores, 16 tokens a warp; two warpgroups
 * for the values, 64 dims a warp (4 tiles of 64 x 64 in registers). The score warps agree
 * on the running maximum (an integer in log2 units) through shared memory, so that P
 * needs no factor of its own; when it grows they publish the factors and the value warps
 * rescale.
 */
#include "kernels/attn_mla.cuh"

#include <errno.h>
#include <math.h>

#define WIDE	  64 /* query rows of a CTA */
#define BAR_SCORE 2
#define NR_SCORE  4
#define NR_VALUE  8
#define SLACK	  12.f /* P may grow to 2^12 before its reference is raised */

struct wide_cfg {
	static constexpr int ES = 1;
	static constexpr int RB = LATENT;
	static constexpr int RR = ROPE;
	static constexpr int ROPE_OFF = TOKENS * RB;
	static constexpr int SCALE_OFF = TOKENS * (RB + RR);
	static constexpr int STAGE = SCALE_OFF + 256;
	static constexpr int STAGES = 3;
	static constexpr int NR_WARPS = NR_SCORE + NR_VALUE;
	static constexpr int NR_THREADS = (NR_WARPS + 4) * 32;
};

/* Aligned to 1,024 bytes: q and p are read by wgmma with the 128-byte swizzle. */
struct wide_smem {
	using C = wide_cfg;
	uint8_t q[NR_KS / 4][WIDE][128]; /* f16 [64 permuted dims][row][dim] */
	uint8_t p[2][TOKENS][128];	 /* f16 [buffer][token][row] */
	uint8_t ring[C::STAGES][C::STAGE];
	float cmax[NR_SCORE][WIDE]; /* a warp's largest scores, above m */
	float smax[NR_SCORE];	    /* ... and latent scale */
	float m[WIDE];		    /* reference of the exponents */
	float f[2][WIDE];	    /* factors for the values' sums */
	float fin_l[2][NR_SCORE][WIDE];
	float fin_m[2][WIDE];
	float fin_unit[2];
	uint32_t changed[2]; /* f[] is not all ones */
	struct mla_seg segs[SEG_RING];
	struct plan_pending pend[2];
	uint64_t full[C::STAGES];
	uint64_t empty[C::STAGES];
	uint64_t p_full[2];
	uint64_t p_empty[2];
	uint64_t fin_full[2];
	uint64_t fin_empty[2];
	uint32_t issued;
	uint32_t segs_in;
	uint32_t segs_done;
	uint32_t flag;
};

/* ------------------------------------------------------------------------------- wgmma
 */

KVK_DEV void wg_fence(void)
{
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

KVK_DEV void wg_commit(void)
{
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> KVK_DEV void wg_wait(void)
{
	asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from touching registers that a wgmma still uses. */
template <int N> KVK_DEV void wg_keep(float *d)
{
#pragma unroll
	for (int i = 0; i < N; i++)
		asm volatile("" : "+f"(d[i])::"memory");
}

/* Descriptor of an operand with 128-byte swizzle; groups of 8 rows lie 1,024 bytes apart.
 */
KVK_DEV uint64_t wg_desc(uint32_t addr)
{
	return (uint64_t)((addr & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) |
	       (1ull << 62);
}

/* d[64][64] = (use_d ? d : 0) + a[64][16] b[16][64]. TRANS: rows of b's memory are k. */
template <int TRANS>
KVK_DEV void wgmma_64x64(float *d, const uint32_t *a, uint64_t desc, int use_d)
{
	asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
		     "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
		     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
		     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
		     "{%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
		     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),
		       "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
		       "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
		       "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
		       "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
		       "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
		       "+f"(d[30]), "+f"(d[31])
		     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc), "r"(use_d),
		       "n"(TRANS));
}

/* ------------------------------------------------------------------------------ queries
 */

/* Sixteen neighbouring dims of a query row: four k-steps of lane c. */
KVK_DEV void load_q16(const struct attn_params &p, size_t d, bool in, float *v)
{
#pragma unroll
	for (int i = 0; i < 16; i += 2) {
		float2 x = in ? act_load2(p, d + i) : make_float2(0.f, 0.f);

		v[i] = x.x;
		v[i + 1] = x.y;
	}
}

/* The block's queries to shared memory as f16, in the k-steps' order; all consumers. */
KVK_DEV void load_q(const struct attn_params &p, const struct plan_seg &s,
		    struct wide_smem *sm)
{
	const uint32_t rows = s.q_len * p.nr_q_heads, first = s.hblk * WIDE;

	grid_wait();
#pragma unroll 3
	for (uint32_t i = threadIdx.x; i < WIDE * NR_KS; i += wide_cfg::NR_WARPS * 32) {
		uint32_t c = i % 4, ks = i / 4 % (NR_KS / 4) * 4, row = i / NR_KS;
		size_t d = ((size_t)s.q0 * p.nr_q_heads + first + row) * (LATENT + ROPE) +
			   ks_dim<true>(ks, c);
		uint8_t *dst = sm->q[ks / 4][row] + c * 4;
		float v[16];

		load_q16(p, d, first + row < rows, v);
#pragma unroll
		for (int k = 0; k < 8; k++) /* chunk k: k-step ks + k / 2, half k % 2 */
			*(uint32_t *)(dst + (k ^ (row & 7)) * 16) =
				pack_f16(v[2 * k], v[2 * k + 1]);
	}
	fence_proxy_async();
	bar_sync(BAR_ALL, wide_cfg::NR_WARPS * 32);
}

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

KVK_DEV void score_end(uint32_t i, int w, struct wide_state &st, struct wide_smem *sm)
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
			sm->fin_l[i & 1][w][8 * (k / 2) + 2 * lane + k % 2] = l;
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
		score_end(i, w, st, sm);
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
			plan_finish<LATENT, mla_row_elem>(
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
