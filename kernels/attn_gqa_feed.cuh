/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_gqa_feed.cuh - constants, shared memory, roles of the warps and the producer of the GQA
 * decode kernel; attn_gqa.cu explains it.
 */
#ifndef KVK_ATTN_GQA_FEED_CUH
#define KVK_ATTN_GQA_FEED_CUH

#include "kernels/attn_quick.cuh"

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
	uint32_t poisoned; /* read nothing; the output is NaN */
};

/* Shared memory, in this order. */
template <int HD, bool FP8> struct gqa_smem {
	using C = gqa_cfg<HD, FP8>;
	uint8_t ring[C::STAGES][C::PIECE];
	float4 part[NR_WARPS][16 * HD / 4]; /* warps' results for the segment's merge, or
					     * stages STAGES .. LONG - 1 of the ring */
	uint8_t scales[C::LONG][C::SCALES ? C::SCALES : 16];
	float2 ml[NR_WARPS][16];
	uint4 q[FP8 && HD == 128 ? HD / 16 : 1][32]; /* few units: queries as operands */
	struct plan_pending pend[2];		     /* first, last segment */
	struct quick_pending quick[2];		     /* ... of a quick step */
	struct gqa_seg segs[SEG_RING];		     /* written by the producer */
	uint64_t full[C::LONG];
	uint64_t empty[C::LONG];
	uint32_t issued;	      /* pieces whose copies were started */
	uint32_t segs_in;	      /* segments described in segs[] */
	uint32_t segs_done[NR_WARPS]; /* segments that each consumer warp has finished */
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
	uint32_t tok0;	/* its first token of a piece */
	bool idle;	/* left over */
};

/* @half: a piece takes two warps, half the tokens each (steps of few units, up to 16 rows) */
KVK_DEV struct gqa_role role_of(const struct attn_params &p, uint32_t warp, bool half)
{
	uint32_t rows = p.q_len_max * p.group;
	struct gqa_role r;

	r.tok0 = half ? warp % 2 * (KV_PAGE_TOKENS / 2) : 0;
	if (half) {
		r.nm = 1;
		r.slots = NR_WARPS / 2;
		r.slot = warp / 2;
		r.row0 = 0;
		r.idle = false;
		return r;
	}

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
	enum plan_state state;

	g.s = i == 0 ? cta.first : p.mem.segs[cta.base + i];
	g.hbs = cta.hbs;
	state = plan_state_of(p, cta, i, g.s, step);
	/* who merges without counters waits for every part, whatever that saw: NaN is an answer */
	if (state == PLAN_FAILED && p.mem.quick_floats && g.s.nr_parts > 1 &&
	    !(p.off & PLAN_NO_ANSWER))
		state = PLAN_POISONED;
	g.ok = state != PLAN_FAILED;
	g.poisoned = state == PLAN_POISONED;
	g.nr_pieces = state == PLAN_OK ? g.s.nr_pages * cta.hbs : 0;
	/* by all: where requests have failed nothing else keeps the warps together */
	if (i >= SEG_RING)
		spin_until(&sm->segs_done[threadIdx.x % NR_WARPS], i - SEG_RING);
	__syncwarp();
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
		     uint32_t count, uint64_t step, gqa_smem<HD, FP8> *sm)
{
	using C = gqa_cfg<HD, FP8>;
	const uint64_t policy = policy_evict_first();
	const int lane = threadIdx.x & 31;
	const uint32_t gp = C::PAIR && cta.hbs >= 2 ? 2 : 1;
	const bool is_long = cta.hbs == role_of(p, 0, false).slots;
	uint32_t issued = 0;

	for (uint32_t i = 0; i < count; i++) {
		const struct plan_seg *ps =
			i == 0 ? &cta.first : &p.mem.segs[cta.base + i];
		const struct kv_row *rows = p.rows + ps->row0 + ps->page0;
		uint32_t have, pfn = plan_pages(p, cta, i, *ps, &have);
		struct gqa_seg g = publish_seg<HD, FP8>(p, cta, i, step, sm);

		for (uint32_t pg = 0, n; pg < g.s.nr_pages && g.nr_pieces;
		     pg += n, have = 32) {
			uint64_t off = page_offset(p, pfn);

			n = min(have, g.s.nr_pages - pg);
			if (pg + have + lane < g.s.nr_pages)
				pfn = rows[pg + have + lane].pfn;
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

#endif /* KVK_ATTN_GQA_FEED_CUH */
