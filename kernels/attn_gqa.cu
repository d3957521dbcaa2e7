/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_gqa.cu - paged decode attention for grouped queries, FP8 and BF16 pages.
 *
 * Budget (H200, 132 SMs at about 1.9 GHz, 4.66 TB/s: 18.6 bytes per clock and SM). A
 * *piece* is one kv head of a page: K [64][128] and V [64][128] of e4m3 are 16 KB and
 * take 880 clocks of memory time. Work per piece, for up to 16 query rows of the kv head:
 *   matrix   64 mma.m16n8k16 for Q K^T and 64 for P V: about 210 clocks at the mma.sync
 * rate convert  16,384 values at 96 per clock: 171 clocks shared   16 KB in by the copy
 * engine, 16 KB out as operands: 256 of 128 bytes per clock issue    about 760 warp
 * instructions of 3,520 issue slots so memory is the wall and everything else has room,
 * if nothing stalls the copies.
 *
 * Structure. One CTA per SM walks its segments of the step's schedule (attn_plan.cuh). A
 * producer warp copies pieces into a ring of stages (one bulk copy of 16 KB, 256 bytes of
 * scales by a second). Tensor copies would land swizzled, but they were measured 7 %
 * slower than plain bulk copies of the same bytes. Eight consumer warps take pieces in
 * turn, a whole piece each, and keep their own m, l and O: no barrier between warps
 * inside a segment, and while they work ten more pieces are on their way. More than 16
 * query rows (drafts) use 2 to 4 warps a piece. Copies may land out of order, so a warp
 * first sees that its piece was issued (then the stage's barrier is in the right round)
 * and then waits for its bytes.
 *
 * FP8 operands are built in registers. Lane (g, c) reads 16-byte chunks of token row g. Q
 * K^T: heads are M, tokens are N; the order of head_dim values inside the k-steps is
 * permuted, and Q is permuted alike. P V: bytes taken as 16-bit pairs go through
 * movmatrix, which gives tokens 2c, 2c + 1 and two dims; one byte permute and two
 * conversions make the (k, k + 1) pairs of two operand registers. The K scale multiplies
 * the score, the V scale the probability, relative to the largest V scale so far, so that
 * P stays in the good range of f16.
 *
 * At a segment's end the warps of a head merge through shared memory by a fixed tree; a
 * unit cut between CTAs goes on in plan_finish(). The next segment's description and
 * queries are read while the last one is being merged. Tour 10/12.
 */
#include "kernels/attn_plan.cuh"

#include <errno.h>
#include <math.h>

#define NR_WARPS 8 /* consumers */
#define NR_THREADS \
	((NR_WARPS + 4) * 32) /* a warpgroup, for setmaxnreg; one warp of it works */
#define BAR_ALL 1	      /* the consumers */

template <int HD, bool FP8> struct gqa_cfg {
	static constexpr int RB = HD * (FP8 ? 1 : 2); /* bytes of a token's K */
	static constexpr int PIECE = 2 * KV_PAGE_TOKENS * RB;
	static constexpr int SCALES = FP8 ? 256 : 0; /* per piece: K [64], V [64] fp16 */
	static constexpr int NJ = RB / 64;     /* 16-byte reads per lane and token */
	static constexpr int E = FP8 ? 16 : 8; /* values in 16 bytes */
	static constexpr int KPC = E / 4;      /* k-steps in 16 bytes of four lanes */
	static constexpr int KS = HD / 16;
	static constexpr int NT = HD / 8;
	static constexpr int PART = 16 * HD * 4; /* a warp's O */
	static constexpr int MERGE = NR_WARPS * (PART + 16 * 8) + 3584;
	/* neighbouring heads of small pieces come by one copy: larger copies stream
	 * faster */
	static constexpr bool PAIR = PIECE <= 16384;
	/* warps that merge need 8 results; the ring takes their place if none does */
	static constexpr int STAGES =
		((227 * 1024 - MERGE) / (PIECE + (FP8 ? 256 : 16) + 16)) & ~1;
	static constexpr int LONG = STAGES + NR_WARPS * PART / PIECE;
};

#define SEG_RING 32

/* What the warps agree on for a segment. */
struct gqa_seg {
	struct plan_seg s;
	uint32_t hbs;
	uint32_t nr_pieces;
	uint32_t ok;
	uint32_t reserved;
};

/* Shared memory, in this order. */
template <int HD, bool FP8> struct gqa_smem {
	using C = gqa_cfg<HD, FP8>;
	uint8_t ring[C::STAGES][C::PIECE];
	float4 part[NR_WARPS][16 * HD / 4]; /* warps' results for the segment's merge, or
					     * stages STAGES .. LONG - 1 of the ring */
	uint8_t scales[C::LONG][C::SCALES ? C::SCALES : 16];
	float2 ml[NR_WARPS][16];
	struct plan_pending pend[2];   /* first, last segment */
	struct gqa_seg segs[SEG_RING]; /* written by the producer */
	uint64_t full[C::LONG];
	uint64_t empty[C::LONG];
	uint32_t issued;	    /* pieces whose copies were started */
	uint32_t segs_in;	    /* segments described in segs[] */
	uint32_t segs_done;	    /* consumer warps that finished a segment, summed */
	uint32_t arrived[NR_WARPS]; /* warps that left a result, per head and row block */
	uint32_t merged[NR_WARPS];  /* segments merged, likewise */
	uint32_t hbs;
	uint32_t flag;
};

/* ----------------------------------------------------------------------------- producer
 */

/* How the warps share pieces: a piece takes nm warps (16 query rows each). */
struct gqa_role {
	uint32_t nm;	/* warps per piece */
	uint32_t slots; /* pieces worked on at once */
	uint32_t slot;	/* this warp's */
	uint32_t row0;	/* its first query row */
	bool idle;	/* left over */
};

KVK_DEV struct gqa_role role_of(const struct attn_params &p, uint32_t warp)
{
	uint32_t rows = p.q_len_max * p.group;
	struct gqa_role r;

	r.nm = rows <= 16 ? 1 : rows <= 32 ? 2 : rows <= 48 ? 3 : 4;
	r.slots = r.nm == 1 ? 8 : r.nm == 2 ? 4 : 2;
	r.slot = warp / r.nm;
	r.row0 = (warp % r.nm) * 16;
	r.idle = r.slot >= r.slots;
	return r;
}

/* Stage and round of ring position @seq. */
struct ring_at {
	uint32_t stage;
	uint32_t round;
};

template <int HD, bool FP8> KVK_DEV struct ring_at ring_pos(uint32_t seq, bool is_long)
{
	using C = gqa_cfg<HD, FP8>;
	struct ring_at r;

	r.round = is_long ? seq / C::LONG : seq / C::STAGES;
	r.stage = seq - r.round * (is_long ? C::LONG : C::STAGES);
	return r;
}

/* Describe segment @i in the ring of segments once its place is free. */
template <int HD, bool FP8>
KVK_DEV struct gqa_seg publish_seg(const struct attn_params &p,
				   const struct plan_cta &cta, uint32_t i, uint64_t step,
				   gqa_smem<HD, FP8> *sm)
{
	struct gqa_seg g = {};

	g.s = i == 0 ? cta.first : p.mem.segs[cta.base + i];
	g.hbs = cta.hbs;
	g.ok = kv_verdict_ok(p.verdicts[g.s.req], step, g.s.nr_rows);
	g.nr_pieces = g.ok ? g.s.nr_pages * cta.hbs : 0;
	if (i >= SEG_RING)
		spin_until(&sm->segs_done, NR_WARPS * (i - SEG_RING + 1) - 1);
	if ((threadIdx.x & 31) == 0) {
		sm->hbs = cta.hbs;
		sm->segs[i % SEG_RING] = g;
		sts_release(&sm->segs_in, i + 1);
	}
	return g;
}

/* Start the copy of @gp neighbouring heads' pieces, ring positions @seq on. One lane. */
template <int HD, bool FP8>
KVK_DEV void copy_pieces(const struct attn_params &p, const uint8_t *at, uint32_t head,
			 uint32_t seq, uint32_t gp, bool is_long, gqa_smem<HD, FP8> *sm,
			 uint64_t policy)
{
	using C = gqa_cfg<HD, FP8>;
	const struct ring_at r = ring_pos<HD, FP8>(seq, is_long);
	const uint32_t stage = r.stage, flight = min(p.flight, (uint32_t)C::STAGES);
	uint64_t *full = &sm->full[stage];

	if (seq >= flight) {
		const struct ring_at b =
			ring_pos<HD, FP8>((seq - flight) & ~(gp - 1), is_long);

		mbar_wait(&sm->full[b.stage], b.round & 1);
	}
	for (uint32_t i = 0; i < gp; i++)
		mbar_wait(&sm->empty[stage + i], (r.round & 1) ^ 1);
	mbar_arrive_expect(full, gp * (C::PIECE + (p.token_scales ? 256 : 0)));
	bulk_load(sm->ring[stage], at + head * C::PIECE, gp * C::PIECE, full, policy);
	if (FP8 && p.token_scales)
		bulk_load(sm->scales[stage], at + p.nr_kv_heads * C::PIECE + head * 256,
			  gp * 256, full, policy);
	sts_release(&sm->issued, seq + gp);
}

template <int HD, bool FP8>
KVK_DEV void produce(const struct attn_params &p, const struct plan_cta &cta,
		     uint64_t step, gqa_smem<HD, FP8> *sm)
{
	using C = gqa_cfg<HD, FP8>;
	const uint64_t policy = policy_evict_first();
	const int lane = threadIdx.x & 31;
	const uint32_t gp = C::PAIR && cta.hbs >= 2 ? 2 : 1;
	const bool is_long = cta.hbs == role_of(p, 0).slots;
	uint32_t issued = 0;

	for (uint32_t i = 0; i < cta.count; i++) {
		const struct plan_seg *ps =
			i == 0 ? &cta.first : &p.mem.segs[cta.base + i];
		const struct kv_row *rows = p.rows + ps->row0 + ps->page0;
		uint32_t n = min(32u, ps->nr_pages);
		uint32_t pfn =
			lane < n && ps->page0 + lane < ps->nr_rows ? rows[lane].pfn : 0;
		struct gqa_seg g = publish_seg<HD, FP8>(p, cta, i, step, sm);

		for (uint32_t pg = 0; pg < g.s.nr_pages && g.ok; pg += 32) {
			uint64_t off = page_offset(p, pfn);

			n = min(32u, g.s.nr_pages - pg);
			if (pg + 32 + lane < g.s.nr_pages)
				pfn = rows[pg + 32 + lane].pfn;
			for (uint32_t j = 0; j < n * g.hbs; j += gp) {
				const uint8_t *at =
					p.base + __shfl_sync(~0u, off, j / g.hbs);
				uint32_t head = g.s.hblk * g.hbs + j % g.hbs;

				if (issued == 0)
					grid_wait();
				if (lane == 0)
					copy_pieces<HD, FP8>(p, at, head, issued, gp,
							     is_long, sm, policy);
				issued += gp;
			}
		}
	}
}

/* ----------------------------------------------------------------------------- consumers
 */

/* A warp's state for its 16 query rows of one kv head; [0] is row g, [1] row g + 8. */
template <int HD> struct gqa_acc {
	float o[HD / 8][4];
	float m[2];
	float l[2];   /* this lane's share until gqa_reduce_l() */
	float sv_max; /* o is in units of this */
};

/* The 16-byte chunk of a token's row that lane c reads as its @j-th. */
template <int NJ> KVK_DEV int chunk_of(int c, int j)
{
	return NJ == 1 ? c : (j >> 1) * 8 + 2 * c + (j & 1);
}

/* Start reading a warp's queries: raw bf16 pairs (f32 activations are rounded to bf16).
 */
template <int HD, bool FP8>
KVK_DEV void load_q(const struct attn_params &p, const struct plan_seg &s, uint32_t head,
		    uint32_t row_first, uint32_t (*qf)[4])
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;

#pragma unroll
	for (int half = 0; half < 2; half++) {
		uint32_t row = row_first + g + 8 * half, t = row / p.group,
			 h = row % p.group;
		bool in = row < s.q_len * p.group;
		size_t base =
			((size_t)(s.q0 + t) * p.nr_q_heads + head * p.group + h) * HD;

#pragma unroll
		for (int ks = 0; ks < C::KS; ks++) {
			size_t d = base + chunk_of<C::NJ>(c, ks / C::KPC) * C::E +
				   (ks % C::KPC) * 4;
			uint2 v = make_uint2(0, 0);

			if (in && !p.act_f32) {
				const __nv_bfloat16 *src = (const __nv_bfloat16 *)p.q + d;

				/* not one 8-byte load: that would tie x and y to neighbouring
				 * registers, where the matrix unit does not want them */
				v = make_uint2(ldg32(src), ldg32(src + 2));
			}
			if (in && p.act_f32) {
				float4 f = *(const float4 *)((const float *)p.q + d);

				v = make_uint2(pack_bf16(f.x, f.y), pack_bf16(f.z, f.w));
			}
			qf[ks][half] = v.x;
			qf[ks][half + 2] = v.y;
		}
	}
}

/* ... and make operands of them. */
template <int HD, bool FP8> KVK_DEV void convert_q(uint32_t (*qf)[4])
{
	if constexpr (FP8) {
#pragma unroll
		for (int i = 0; i < HD / 4; i++) {
			float2 v = unpack_bf16(qf[i / 4][i % 4]);

			qf[i / 4][i % 4] = pack_f16(v.x, v.y);
		}
	}
}

/* s = Q K^T of 64 tokens; s[jt] are tokens 8 jt + 2c, + 1. */
template <int HD, bool FP8>
KVK_DEV void scores(uint32_t k_addr, const uint32_t (*qf)[4], float (*s)[4])
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;

	k_addr += g * C::RB;
#pragma unroll
	for (int j0 = 0; j0 < 8; j0 += 4) {
#pragma unroll
		for (int jt = j0; jt < j0 + 4; jt++)
			s[jt][0] = s[jt][1] = s[jt][2] = s[jt][3] = 0.f;
#pragma unroll
		for (int j = 0; j < C::NJ; j++) {
			uint4 v[4];

#pragma unroll
			for (int t = 0; t < 4; t++)
				v[t] = lds128(k_addr + (j0 + t) * 8 * C::RB +
					      chunk_of<C::NJ>(c, j) * 16);
#pragma unroll
			for (int i = 0; i < C::KPC; i++) {
#pragma unroll
				for (int t = 0; t < 4; t++) {
					const uint32_t w[4] = {v[t].x, v[t].y, v[t].z,
							       v[t].w};
					uint32_t b0, b1;

					if (FP8) {
						e4m3x4_f16(w[i], b0, b1);
					} else {
						b0 = w[2 * i & 3];
						b1 = w[(2 * i + 1) & 3];
					}
					mma_16816<!FP8>(s[j0 + t], qf[j * C::KPC + i], b0,
							b1);
				}
			}
		}
	}
}

/*
 * o += P V of 64 tokens; a[ks] is P of tokens 16 ks .. 16 ks + 15. Word i of chunk j
 * makes n-tile(s) o[]: FP8 o[8 j + 2 i], o[8 j + 2 i + 1] (even and odd dims), BF16 o[4 j
 * + i].
 */
template <int HD, bool FP8>
KVK_DEV void values(uint32_t v_addr, const uint32_t (*a)[4], const uint32_t (*lo)[4],
		    float (*o)[4])
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;

	v_addr += g * C::RB;
#pragma unroll
	for (int ks = 0; ks < 4; ks++) {
#pragma unroll
		for (int j = 0; j < C::NJ; j++) {
			const uint32_t at =
				v_addr + 16 * ks * C::RB + chunk_of<C::NJ>(c, j) * 16;
			const uint4 v0 = lds128(at), v1 = lds128(at + 8 * C::RB);
			const uint32_t w0[4] = {v0.x, v0.y, v0.z, v0.w};
			const uint32_t w1[4] = {v1.x, v1.y, v1.z, v1.w};

#pragma unroll
			for (int i = 0; i < 4; i++) {
				uint32_t r0 = movmatrix_trans(w0[i]),
					 r1 = movmatrix_trans(w1[i]);

				if (FP8) {
					uint32_t lo0, hi0, lo1, hi1;
					float(*t)[4] = o + 8 * j + 2 * i;

					e4m3x4_f16(__byte_perm(r0, 0, 0x3120), lo0, hi0);
					e4m3x4_f16(__byte_perm(r1, 0, 0x3120), lo1, hi1);
					mma_16816<false>(t[0], a[ks], lo0, lo1);
					mma_16816<false>(t[1], a[ks], hi0, hi1);
				} else {
					mma_16816<true>(o[4 * j + i], a[ks], r0, r1);
					mma_16816<true>(o[4 * j + i], lo[ks], r0, r1);
				}
			}
		}
	}
}

/* Rows of V (and scales) past the end become zero: their bytes never reach arithmetic. */
template <int HD, bool FP8>
KVK_DEV void zero_tail(uint8_t *stage, uint8_t *scales, uint32_t valid)
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31;

	for (uint32_t i = valid * (C::RB / 16) + lane; i < KV_PAGE_TOKENS * (C::RB / 16);
	     i += 32)
		*(uint4 *)(stage + C::PIECE / 2 + i * 16) = make_uint4(0, 0, 0, 0);
	if (FP8)
		for (uint32_t i = valid + lane; i < KV_PAGE_TOKENS; i += 32)
			((uint16_t *)scales)[i] = ((uint16_t *)scales)[64 + i] = 0;
	fence_proxy_async();
	__syncwarp();
}

/* What one piece needs beside the ring. */
struct gqa_piece {
	uint32_t k_addr;
	uint32_t v_addr;
	uint32_t sc_addr;
	int32_t limit[2]; /* tokens of this page that row g, g + 8 may see */
	bool tail;	  /* some token of the page is out of sight */
	float sk;	  /* static scales */
	float sv;
};

/* Scores to probabilities: scales, mask, running maximum; returns with P in a[][]. */
template <int HD, bool FP8>
KVK_DEV void softmax(const struct attn_params &p, const struct gqa_piece &pc,
		     float (*s)[4], gqa_acc<HD> &acc, uint32_t (*a)[4], uint32_t (*lo)[4])
{
	const int c = threadIdx.x & 3;
	const bool tok = FP8 && p.token_scales;
	float mx[2] = {-INFINITY, -INFINITY}, corr[2], mu[2], sv_new = acc.sv_max,
	      inv_sv = 1.f;
	uint32_t svw[8];

	if (tok) {
		__half2 big = __float2half2_rn(0.f);

#pragma unroll
		for (int jt = 0; jt < 8; jt++) {
			__half2 h;

			svw[jt] = lds32(pc.sc_addr + 128 + 16 * jt + 4 * c);
			memcpy(&h, &svw[jt], 4);
			big = __hmax2(big, h);
		}
		sv_new = fmaxf(sv_new, fmaxf(__low2float(big), __high2float(big)));
		sv_new = fmaxf(sv_new, __shfl_xor_sync(~0u, sv_new, 1));
		sv_new = fmaxf(sv_new, __shfl_xor_sync(~0u, sv_new, 2));
		inv_sv = sv_new > 0.f ? 1.f / sv_new : 0.f;
	}
#pragma unroll
	for (int jt = 0; jt < 8; jt++) {
		float2 k = make_float2(pc.sk, pc.sk);

		if (tok)
			k = unpack_f16(lds32(pc.sc_addr + 16 * jt + 4 * c));
		k.x *= p.scale;
		k.y *= p.scale;
#pragma unroll
		for (int e = 0; e < 4; e++) {
			s[jt][e] *= e & 1 ? k.y : k.x;
		}
	}
	if (pc.tail) {
#pragma unroll
		for (int i = 0; i < 32; i++)
			if (i / 4 * 8 + 2 * c + (i & 1) >= pc.limit[i / 2 & 1])
				s[i / 4][i % 4] = -INFINITY;
	}
#pragma unroll
	for (int i = 0; i < 32; i++)
		mx[i / 2 & 1] = fmaxf(mx[i / 2 & 1], s[i / 4][i % 4]);
#pragma unroll
	for (int h = 0; h < 2; h++) {
		mx[h] = fmaxf(mx[h], __shfl_xor_sync(~0u, mx[h], 1));
		mx[h] = fmaxf(mx[h], __shfl_xor_sync(~0u, mx[h], 2));
		mx[h] = fmaxf(mx[h], acc.m[h]);
		mu[h] = mx[h] == -INFINITY ? 0.f : mx[h];
		corr[h] = exp2_fast(acc.m[h] - mu[h]);
		acc.l[h] *= corr[h];
		corr[h] *= acc.sv_max * inv_sv;
		if (!tok)
			corr[h] = exp2_fast(acc.m[h] - mu[h]);
	}
	if (__any_sync(~0u,
		       mx[0] != acc.m[0] || mx[1] != acc.m[1] || sv_new != acc.sv_max)) {
#pragma unroll
		for (int i = 0; i < HD / 8; i++) {
			acc.o[i][0] *= corr[0];
			acc.o[i][1] *= corr[0];
			acc.o[i][2] *= corr[1];
			acc.o[i][3] *= corr[1];
		}
		acc.m[0] = mx[0];
		acc.m[1] = mx[1];
		acc.sv_max = sv_new;
	}
#pragma unroll
	for (int jt = 0; jt < 8; jt++) {
		float2 v = make_float2(1.f, 1.f);

		if (tok) {
			v = unpack_f16(svw[jt]);
			v.x *= inv_sv;
			v.y *= inv_sv;
		}
#pragma unroll
		for (int h = 0; h < 2; h++) {
			float e0 = exp2_fast(s[jt][2 * h] - mu[h]);
			float e1 = exp2_fast(s[jt][2 * h + 1] - mu[h]);

			acc.l[h] += e0 + e1;
			if (FP8) {
				a[jt / 2][2 * (jt & 1) + h] =
					pack_f16(e0 * v.x, e1 * v.y);
			} else { /* P in two bf16 parts: one alone is off by 1e-3 */
				uint32_t hi = pack_bf16(e0, e1);
				float2 f = unpack_bf16(hi);

				a[jt / 2][2 * (jt & 1) + h] = hi;
				lo[jt / 2][2 * (jt & 1) + h] =
					pack_bf16(e0 - f.x, e1 - f.y);
			}
		}
	}
}

/* --------------------------------------------------------------------------- segment end
 */

/* Fold a warp's result from shared memory into @acc. */
template <int HD> KVK_DEV void fold(gqa_acc<HD> &acc, const float4 *o, const float2 *ml)
{
	const int lane = threadIdx.x & 31, g = lane / 4;
	float ca[2], cb[2];

#pragma unroll
	for (int h = 0; h < 2; h++) {
		float2 b = ml[g + 8 * h];
		float mn = fmaxf(acc.m[h], b.x), mu = mn == -INFINITY ? 0.f : mn;

		ca[h] = exp2_fast(acc.m[h] - mu);
		cb[h] = exp2_fast(b.x - mu);
		acc.l[h] = acc.l[h] * ca[h] + b.y * cb[h];
		acc.m[h] = mn;
	}
#pragma unroll
	for (int i = 0; i < HD / 8; i++) {
		float4 v = o[i * 32 + lane];

		acc.o[i][0] = acc.o[i][0] * ca[0] + v.x * cb[0];
		acc.o[i][1] = acc.o[i][1] * ca[0] + v.y * cb[0];
		acc.o[i][2] = acc.o[i][2] * ca[1] + v.z * cb[1];
		acc.o[i][3] = acc.o[i][3] * ca[1] + v.w * cb[1];
	}
}

/* Bring o to true units and l to the row's sum. */
template <int HD> KVK_DEV void settle(gqa_acc<HD> &acc, float sv)
{
#pragma unroll
	for (int i = 0; i < HD / 8; i++)
#pragma unroll
		for (int e = 0; e < 4; e++)
			acc.o[i][e] *= sv;
#pragma unroll
	for (int h = 0; h < 2; h++) {
		acc.l[h] += __shfl_xor_sync(~0u, acc.l[h], 1);
		acc.l[h] += __shfl_xor_sync(~0u, acc.l[h], 2);
	}
}

/* Four neighbouring values of row half @h, the @q-th of a lane, and the dim of the first.
 */
template <int HD, bool FP8>
KVK_DEV float4 out_quad(const gqa_acc<HD> &acc, int h, int q, int *ret_dim)
{
	using C = gqa_cfg<HD, FP8>;
	const int c = threadIdx.x & 3;

	if (FP8) { /* q is word q % 4 of chunk q / 4; n-tiles hold even and odd dims */
		*ret_dim = chunk_of<C::NJ>(c, q / 4) * 16 + 4 * (q % 4);
		return make_float4(acc.o[2 * q][2 * h], acc.o[2 * q + 1][2 * h],
				   acc.o[2 * q][2 * h + 1], acc.o[2 * q + 1][2 * h + 1]);
	}
	/* words 2 q, 2 q + 1 */
	*ret_dim = chunk_of<C::NJ>(c, q / 2) * 8 + 4 * (q % 2);
	return make_float4(acc.o[2 * q][2 * h], acc.o[2 * q][2 * h + 1],
			   acc.o[2 * q + 1][2 * h], acc.o[2 * q + 1][2 * h + 1]);
}

KVK_DEV size_t gqa_row_off(const struct attn_params &p, const struct plan_seg &s,
			   uint32_t hbs, uint32_t row)
{
	uint32_t per = s.q_len * p.group;
	uint32_t head = s.hblk * hbs + row / per, r = row % per;

	return ((size_t)(s.q0 + r / p.group) * p.nr_q_heads + head * p.group +
		r % p.group);
}

template <int HD>
KVK_DEV size_t gqa_row_elem(const struct attn_params &p, const struct plan_seg &s,
			    uint32_t hbs, uint32_t row)
{
	return gqa_row_off(p, s, hbs, row) * HD;
}

/* Write a warp's rows to the output (normalised) or to the unit's slot. */
template <int HD, bool FP8>
KVK_DEV void write_rows(const struct attn_params &p, const struct gqa_seg &g,
			const gqa_acc<HD> &acc, uint32_t head_in_block,
			uint32_t row_first)
{
	const int lane = threadIdx.x & 31;
	uint32_t per = g.s.q_len * p.group, rows = per * g.hbs;
	float *slot = g.s.nr_parts > 1 ? slot_ptr(p.mem, plan_slot(g.s, g.s.part)) : NULL;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		uint32_t r = row_first + lane / 4 + 8 * h, row = head_in_block * per + r;
		float inv = acc.l[h] > 0.f ? 1.f / acc.l[h] : 0.f;
		size_t off;

		if (r >= per)
			continue;
		if (slot && lane % 4 == 0)
			((float2 *)slot)[row] = make_float2(acc.m[h], acc.l[h]);
		off = slot ? slot_o_off(rows) + (size_t)row * HD
			   : gqa_row_elem<HD>(p, g.s, g.hbs, row);
#pragma unroll
		for (int q = 0; q < HD / 16; q++) {
			int d;
			float4 v = out_quad<HD, FP8>(acc, h, q, &d);

			if (slot) {
				*(float4 *)(slot + off + d) = v;
			} else {
				v.x *= inv;
				v.y *= inv;
				v.z *= inv;
				v.w *= inv;
				out_store4(p, off + d, v);
			}
		}
	}
}

/* NaN for a request that failed its check. */
template <int HD>
KVK_DEV void write_nan(const struct attn_params &p, const struct gqa_seg &g)
{
	uint32_t rows = g.s.q_len * p.group * g.hbs;
	float nan = __int_as_float(0x7fffffff);

	if (g.s.part != 0)
		return;
	for (uint32_t e = threadIdx.x; e < rows * (HD / 4); e += NR_WARPS * 32)
		out_store4(p,
			   gqa_row_elem<HD>(p, g.s, g.hbs, e / (HD / 4)) +
				   4 * (e % (HD / 4)),
			   make_float4(nan, nan, nan, nan));
}

/*
 * Merge the warps of a head and row block. A warp leaves its result and goes on; the one
 * that comes last folds all of them in warp order. @nth: segments merged before. Return:
 * this warp holds the result.
 */
template <int HD, bool FP8>
KVK_DEV bool merge_warps(const struct gqa_role &role, uint32_t hbs, uint32_t nth,
			 bool worked, gqa_acc<HD> &acc, gqa_smem<HD, FP8> *sm)
{
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
	const uint32_t peers = role.slots / hbs, head = role.slot % hbs,
		       mt = role.row0 / 16;
	const uint32_t id = head * role.nm + mt;
	uint32_t last = 0;

	if (peers == 1)
		return true;
	while (lds_acquire(&sm->merged[id]) < nth)
		;
	if (worked)
#pragma unroll
		for (int i = 0; i < HD / 8; i++)
			sm->part[warp][i * 32 + lane] = make_float4(
				acc.o[i][0], acc.o[i][1], acc.o[i][2], acc.o[i][3]);
#pragma unroll
	for (int h = 0; h < 2; h++)
		if (lane % 4 == 0)
			sm->ml[warp][lane / 4 + 8 * h] =
				make_float2(acc.m[h], worked ? acc.l[h] : -1.f);
	__syncwarp();
	if (lane == 0)
		last = atoms_add_acq_rel(&sm->arrived[id], 1) % peers == peers - 1;
	if (!__shfl_sync(~0u, last, 0))
		return false;
	__syncwarp();
	acc = {};
	acc.m[0] = acc.m[1] = -INFINITY;
	for (uint32_t i = 0; i < peers; i++) {
		uint32_t w = (i * hbs + head) * role.nm + mt;

		if (sm->ml[w][0].y >= 0.f || sm->ml[w][0].y != sm->ml[w][0].y)
			fold<HD>(acc, sm->part[w], sm->ml[w]);
	}
	__syncwarp();
	if (lane == 0)
		sts_release(&sm->merged[id], nth + 1);
	return true;
}

/* The warp's end of a segment: merge, write, and count a split unit's part in. */
template <int HD, bool FP8>
KVK_DEV void finish_segment(const struct attn_params &p, const struct gqa_seg &g,
			    const struct gqa_role &role, uint32_t nth, gqa_acc<HD> &acc,
			    gqa_smem<HD, FP8> *sm, float sv)
{
	const struct plan_seg &s = g.s;

	settle<HD>(acc, sv);
	if (!merge_warps<HD, FP8>(role, g.hbs, nth, role.slot < g.nr_pieces, acc, sm))
		return;
	write_rows<HD, FP8>(p, g, acc, role.slot % g.hbs, role.row0);
	if (s.nr_parts > 1)
		plan_arrive(p, s, s.nr_parts * g.hbs * role.nm, &sm->pend[s.part == 0]);
}

/* One warp's pieces of a segment. @seq: ring position of the segment's first piece. */
template <int HD, bool FP8>
KVK_DEV void consume_pieces(const struct attn_params &p, const struct gqa_seg &g,
			    const struct gqa_role &role, uint32_t seq,
			    const uint32_t (*qf)[4], gqa_acc<HD> &acc,
			    struct gqa_piece &pc, gqa_smem<HD, FP8> *sm)
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31;

	for (uint32_t i = role.slot; i < g.nr_pieces && !role.idle; i += role.slots) {
		const struct ring_at at = ring_pos<HD, FP8>(seq + i, g.hbs == role.slots);
		uint32_t stage = at.stage, phase = at.round & 1;
		int32_t first = (int32_t)((g.s.page0 + i / g.hbs) * KV_PAGE_TOKENS);
		int32_t valid = (int32_t)g.s.len - first;

		spin_until(&sm->issued, seq + i);
		mbar_wait(&sm->full[C::PAIR && g.hbs >= 2 ? stage & ~1u : stage], phase);
		if (!(p.flags & KVK_ATTN_LOADS)) {
			float s[8][4];
			uint32_t a[4][4], lo[4][4];

			pc.k_addr = smem_addr(sm->ring[stage]);
			pc.v_addr = pc.k_addr + C::PIECE / 2;
			pc.sc_addr = smem_addr(sm->scales[stage]);
			pc.tail =
				valid - (int32_t)g.s.q_len + 1 < (int32_t)KV_PAGE_TOKENS;
#pragma unroll
			for (int h = 0; h < 2; h++) {
				uint32_t row = role.row0 + lane / 4 + 8 * h;

				pc.limit[h] = valid - (int32_t)g.s.q_len + 1 +
					      (int32_t)(row / p.group);
			}
			if (valid < (int32_t)KV_PAGE_TOKENS)
				zero_tail<HD, FP8>(sm->ring[stage], sm->scales[stage],
						   valid);
			scores<HD, FP8>(pc.k_addr, qf, s);
			softmax<HD, FP8>(p, pc, s, acc, a, lo);
			values<HD, FP8>(pc.v_addr, a, lo, acc.o);
		}
		__syncwarp();
		if (lane == 0)
			mbar_arrive(&sm->empty[stage]);
	}
}

/* A consumer warp: all segments of the CTA. */
template <int HD, bool FP8>
KVK_DEV void consume(const struct attn_params &p, uint32_t count, gqa_smem<HD, FP8> *sm)
{
	using C = gqa_cfg<HD, FP8>;
	const struct gqa_role role = role_of(p, threadIdx.x / 32);
	uint32_t qf[C::KS][4], seq = 0, nth = 0;
	struct gqa_seg g;

	for (uint32_t i = 0; i < count; i++) {
		gqa_acc<HD> acc = {};
		struct gqa_piece pc;
		uint32_t head;

		if (i == 0) {
			spin_until(&sm->segs_in, 0);
			g = sm->segs[0];
			grid_wait();
			load_q<HD, FP8>(p, g.s, g.s.hblk * g.hbs + role.slot % g.hbs,
					role.row0, qf);
		}
		head = g.s.hblk * g.hbs + role.slot % g.hbs;
		acc.m[0] = acc.m[1] = -INFINITY;
		pc.sk = p.scales && FP8 ? p.scales[2 * head] : 1.f;
		pc.sv = p.scales && FP8 ? p.scales[2 * head + 1] : 1.f;
		convert_q<HD, FP8>(qf);
		consume_pieces<HD, FP8>(p, g, role, seq, qf, acc, pc, sm);
		seq += g.nr_pieces;
		if (i + 1 < count) { /* on its way while this one is finished */
			const struct gqa_seg *n = &sm->segs[(i + 1) % SEG_RING];

			spin_until(&sm->segs_in, i + 1);
			load_q<HD, FP8>(p, n->s, n->s.hblk * n->hbs + role.slot % n->hbs,
					role.row0, qf);
		}
		if (!g.ok)
			write_nan<HD>(p, g);
		else if (!role.idle)
			finish_segment<HD, FP8>(
				p, g, role, nth++, acc, sm,
				FP8 ? (p.token_scales ? acc.sv_max : pc.sv) : 1.f);
		g = sm->segs[(i + 1) % SEG_RING];
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			atoms_add_release(&sm->segs_done, 1);
	}
	bar_sync(BAR_ALL, NR_WARPS * 32);
	for (int i = 0; i < 2; i++) {
		const struct plan_pending *pend = &sm->pend[i];
		uint32_t hbs = sm->hbs;

		if (pend->epoch)
			plan_finish<HD, gqa_row_elem<HD>>(
				p, pend, hbs, pend->s.q_len * p.group * hbs,
				pend->s.nr_parts * hbs * role.nm,
				(struct plan_part *)sm->part, &sm->flag, threadIdx.x,
				BAR_ALL, NR_WARPS * 32);
	}
}

template <int HD, bool FP8>
__global__ void __launch_bounds__(NR_THREADS, 1)
	attn_gqa_kernel(const __grid_constant__ struct attn_params p)
{
	using C = gqa_cfg<HD, FP8>;
	extern __shared__ __align__(128) uint8_t smem_raw[];
	gqa_smem<HD, FP8> *sm = (gqa_smem<HD, FP8> *)smem_raw;
	const uint32_t warp = threadIdx.x / 32;

	if (threadIdx.x == 0) {
		uint32_t nm = role_of(p, 0).nm;

		for (int i = 0; i < C::LONG; i++) {
			mbar_init(&sm->full[i], 1);
			mbar_init(&sm->empty[i], nm);
		}
		sm->issued = sm->segs_in = sm->segs_done = 0;
		for (int i = 0; i < NR_WARPS; i++)
			sm->arrived[i] = sm->merged[i] = 0;
		for (int i = 0; i < 2; i++)
			sm->pend[i].epoch = sm->pend[i].last = 0;
		mbar_init_fence();
	}
	__syncthreads();
	plan_enter(p);
	if (warp >= NR_WARPS) {
		regs_dec<40>();
		if (warp == NR_WARPS)
			produce<HD, FP8>(p, p.mem.ctas[blockIdx.x], *p.step, sm);
	} else {
		regs_inc<232>();
		consume<HD, FP8>(p, p.mem.ctas[blockIdx.x].count, sm);
	}
}

/* ----------------------------------------------------------------------------- launcher
 */

template <int HD, bool FP8>
static int launch(const struct kvk_attn_args *a, const struct attn_params *p,
		  uint32_t nr_ctas, cudaStream_t stream)
{
	using C = gqa_cfg<HD, FP8>;
	const size_t smem = sizeof(gqa_smem<HD, FP8>);
	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};

	static_assert(C::STAGES >= 4, "the ring is too short");
	if (cudaFuncSetAttribute(attn_gqa_kernel<HD, FP8>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)smem) != cudaSuccess)
		return -EIO;
	attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr.val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(nr_ctas);
	cfg.blockDim = dim3(NR_THREADS);
	cfg.dynamicSmemBytes = smem;
	cfg.stream = stream;
	cfg.attrs = &attr;
	cfg.numAttrs = 1;
	if (cudaLaunchKernelEx(&cfg, attn_gqa_kernel<HD, FP8>, *p) != cudaSuccess)
		return -EIO;
	return 0;
}

/* The schedule's shape; false if the fast kernel does not build it. */
static bool gqa_shape(const struct kvk_attn_args *a, struct plan_shape *ret_s)
{
	const struct kv_layout *l = &a->pages.layout;
	struct plan_shape s = {};
	uint32_t group = l->nr_kv_heads ? a->nr_q_heads / l->nr_kv_heads : 0, slots;

	if (l->kind != KV_LAYOUT_GQA || !group || group > 16 ||
	    group * l->nr_kv_heads != a->nr_q_heads || a->batch.q_len_max > 4 ||
	    (l->head_dim != 64 && l->head_dim != 128) || l->dtype == KV_DTYPE_F32)
		return false;
	s.nr_ctas = (uint32_t)plan_nr_ctas();
	s.nr_heads = l->nr_kv_heads;
	s.unit_rows = group * a->batch.q_len_max;
	slots = s.unit_rows <= 16 ? 8 : s.unit_rows <= 32 ? 4 : 2;
	for (s.hbs_max = slots; l->nr_kv_heads % s.hbs_max; s.hbs_max /= 2)
		;
	s.row_dim = l->head_dim;
	s.hbs_force = a->flags >> 24 & 15;
	*ret_s = s;
	return s.nr_ctas > 0;
}

size_t kvk_attn_gqa_workspace(const struct kvk_attn_args *a)
{
	struct plan_shape s;

	return gqa_shape(a, &s) ? plan_workspace(a, &s, NULL) : 0;
}

/**
 * kvk_attn_gqa_cuda() - see struct kvk_attn_args
 * Context: any thread; the verdicts were written earlier on the same stream.
 * Return: 0, -EINVAL for a shape that is not built or a short workspace, -EIO.
 */
int kvk_attn_gqa_cuda(const struct kvk_attn_args *a, kvk_stream stream)
{
	const struct kv_layout *l = &a->pages.layout;
	cudaStream_t st = (cudaStream_t)stream;
	struct attn_params p;
	struct plan_shape s;
	int r;

	if (l->kind != KV_LAYOUT_GQA || a->batch.q_len_max > 4)
		return -EINVAL;
	if (!gqa_shape(a, &s))
		return kvk_attn_any_cuda(a, stream);
	r = plan_params(a, &p);
	if (r)
		return r;
	p.group = a->nr_q_heads / l->nr_kv_heads;
	if (a->workspace_bytes < plan_workspace(a, &s, &p.mem))
		return -EINVAL;
	if (!(a->flags & KVK_ATTN_PLAN))
		r = plan_launch(a, &s, &p.mem, st);
	if (r)
		return r;
	if (l->dtype == KV_DTYPE_E4M3)
		return l->head_dim == 128 ? launch<128, true>(a, &p, s.nr_ctas, st)
					  : launch<64, true>(a, &p, s.nr_ctas, st);
	return l->head_dim == 128 ? launch<128, false>(a, &p, s.nr_ctas, st)
				  : launch<64, false>(a, &p, s.nr_ctas, st);
}
