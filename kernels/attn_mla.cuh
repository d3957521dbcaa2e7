/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla.cuh - what the two MLA decode kernels share: the ring's producer warp, reads
 * of operands from it, the order of dims in the k-steps. SM is a kernel's shared memory,
 * SM::C its constants.
 */
#ifndef KVK_ATTN_MLA_CUH
#define KVK_ATTN_MLA_CUH

#include "kernels/attn_merge.cuh"

#define BAR_ALL	 1 /* all consumers */
#define LATENT	 512
#define ROPE	 64
#define TOKENS	 KV_PAGE_TOKENS
#define NR_KS	 ((LATENT + ROPE) / 16)
#define SEG_RING 16

/* What the warps agree on for a segment. */
struct mla_seg {
	struct plan_seg s;
	uint32_t ok;
	uint32_t nr_pieces;
	uint32_t poisoned; /* read nothing; the output is NaN */
	uint32_t reserved;
};

/* ----------------------------------------------------------------------------- producer
 */

/*
 * A place in the ring of segments is free: by all lanes. A counter a warp: of failed requests nothing
 * else keeps the warps together, and in a sum the fast ones count for the slow ones. One for
 * all is enough where all meet in every segment.
 */
template <int N>
KVK_DEV void segs_wait(const uint32_t (&done)[N], uint32_t nr_warps, uint32_t i)
{
	spin_until(&done[threadIdx.x % N], i - SEG_RING);
	__syncwarp();
}

KVK_DEV void segs_wait(const uint32_t &done, uint32_t nr_warps, uint32_t i)
{
	spin_until(&done, nr_warps * (i - SEG_RING + 1) - 1);
}

template <class SM>
KVK_DEV struct mla_seg publish_seg(const struct attn_params &p,
				   const struct plan_cta &cta, uint32_t i, uint64_t step,
				   SM *sm)
{
	struct mla_seg g = {};
	enum plan_state state;

	g.s = i == 0 ? cta.first : p.mem.segs[cta.base + i];
	state = plan_state_of(p, cta, i, g.s, step);
	g.ok = state != PLAN_FAILED;
	g.poisoned = state == PLAN_POISONED;
	g.nr_pieces = state == PLAN_OK ? g.s.nr_pages : 0;
	if (i >= SEG_RING)
		segs_wait(sm->segs_done, SM::C::NR_WARPS, i);
	if ((threadIdx.x & 31) == 0) {
		sm->segs[i % SEG_RING] = g;
		sts_release(&sm->segs_in, i + 1);
	}
	return g;
}

/*
 * A CTA's begin, by the producer, from its entry alone: the first copies, a lane each, and the first
 * segment's description (attn_gqa_feed.cuh says why it is short). Return: copies started.
 */
template <class SM>
KVK_DEV uint32_t begin(const struct attn_params &p, uint32_t touched, uint64_t step,
		       SM *sm)
{
	using C = typename SM::C;
	const uint32_t bytes = C::SCALE_OFF + (C::ES == 1 && p.token_scales ? 256 : 0);
	const uint32_t lane = threadIdx.x & 31, count = plan_count(touched);
	const uint32_t nr = PLAN_WORD(touched, first.nr_pages);
	const enum plan_state state = plan_state_first(p, touched, step);
	const uint8_t *page = plan_page_first(p, touched, lane);
	/* FP8: the last stage has queries at first */
	uint32_t early = min(p.flight, (uint32_t)C::STAGES - (C::ES == 1));

	early = state == PLAN_OK ? min(min(early, PLAN_FIRST), nr) : 0;
	plan_seg_first(touched, &sm->segs[0].s);
	if (lane == 0) {
		sm->segs[0].nr_pieces = state == PLAN_OK ? nr : 0;
		sm->segs[0].ok = state != PLAN_FAILED;
		sm->segs[0].poisoned = state == PLAN_POISONED;
		sm->count = count;
	}
	__syncwarp();
	if (lane == 0) /* first: queries should not come behind pages */
		sts_release(&sm->segs_in, 1);
	if (early)
		grid_wait();
	if (lane < early) {
		mbar_arrive_expect(&sm->full[lane], bytes);
		bulk_load(sm->ring[lane], page, bytes, &sm->full[lane],
			  policy_evict_first());
	}
	__syncwarp();
	if (lane == 0)
		sts_release(&sm->issued, early);
	return early;
}

/* Before page @seq of a CTA is asked for: at most @flight on their way; of the ring's first ones one. */
template <class SM> KVK_DEV void ring_wait(SM *sm, uint32_t seq, uint32_t flight)
{
	const uint32_t before = seq - (seq < SM::C::STAGES ? 1 : flight);

	if (seq)
		mbar_wait(&sm->full[before % SM::C::STAGES], before / SM::C::STAGES & 1);
}

/* @early: pages whose copies begin() has started. */
template <class SM>
KVK_DEV void produce(const struct attn_params &p, const struct plan_cta &cta,
		     uint32_t count, uint64_t step, uint32_t early, SM *sm)
{
	using C = typename SM::C;
	const uint64_t policy = policy_evict_first();
	const uint32_t bytes = C::SCALE_OFF + (C::ES == 1 && p.token_scales ? 256 : 0);
	const int lane = threadIdx.x & 31;
	const uint32_t flight = min(p.flight, (uint32_t)C::STAGES);
	uint32_t stage = 0, phase = 1, issued = 0;

	for (uint32_t i = 0; i < count; i++) {
		const struct plan_seg *ps =
			i == 0 ? &cta.first : &p.mem.segs[cta.base + i];
		const struct kv_row *rows = p.rows + ps->row0 + ps->page0;
		uint32_t have, pfn = plan_pages(p, cta, i, *ps, &have);
		const struct mla_seg g =
			i ? publish_seg(p, cta, i, step, sm) : sm->segs[0];

		for (uint32_t pg = 0, n; pg < g.nr_pieces; pg += n, have = 32) {
			uint64_t off = page_offset(p, pfn);

			n = min(have, g.s.nr_pages - pg);
			if (pg + have + lane < g.s.nr_pages)
				pfn = rows[pg + have + lane].pfn;
			for (uint32_t j = 0; j < n; j++) {
				const uint8_t *at = p.base + __shfl_sync(~0u, off, j);

				if (issued++ == 0)
					grid_wait();
				if (lane == 0 && issued > early) {
					uint32_t before = issued - 1 - flight;

					if (issued > flight)
						mbar_wait(&sm->full[before % C::STAGES],
							  before / C::STAGES & 1);
					mbar_wait(&sm->empty[stage], phase);
					if (C::ES == 1 &&
					    issued == C::STAGES) /* queries */
						spin_until(&sm->q_read, C::NR_SCORE - 1);
					mbar_arrive_expect(&sm->full[stage], bytes);
					bulk_load(sm->ring[stage], at, bytes,
						  &sm->full[stage], policy);
					sts_release(&sm->issued, issued);
				}
				if (++stage == C::STAGES) {
					stage = 0;
					phase ^= 1;
				}
			}
		}
	}
}

/* ------------------------------------------------------------------------- operand reads
 */

/*
 * Chunks 2c and 2c + 1 (16 bytes each) of a row's block of 128 bytes, in order. Rows lie
 * a multiple of 128 bytes apart, so odd rows read the second chunk first: eight lanes
 * then touch all 32 banks once.
 */
KVK_DEV void lds_pair(uint32_t block, int c, bool odd, uint32_t *w)
{
	uint4 x = lds128(block + (2 * c + odd) * 16),
	      y = lds128(block + (2 * c + !odd) * 16);

	w[0] = odd ? y.x : x.x;
	w[1] = odd ? y.y : x.y;
	w[2] = odd ? y.z : x.z;
	w[3] = odd ? y.w : x.w;
	w[4] = odd ? x.x : y.x;
	w[5] = odd ? x.y : y.y;
	w[6] = odd ? x.z : y.z;
	w[7] = odd ? x.w : y.w;
}

/* One chunk. */
KVK_DEV void lds_one(uint32_t at, uint32_t *w)
{
	uint4 x = lds128(at);

	w[0] = x.x;
	w[1] = x.y;
	w[2] = x.z;
	w[3] = x.w;
}

/* First dim of k-step @ks for lane c; four dims follow (pairs of b0, b1 / a0, a2). */
template <bool FP8> KVK_DEV uint32_t ks_dim(int ks, int c)
{
	if (FP8 && ks >= 32) /* rope rows are 64 bytes: one chunk per lane */
		return LATENT + c * 16 + (ks - 32) * 4;
	if (FP8)
		return (ks / 8) * 128 + (2 * c + ks % 8 / 4) * 16 + ks % 4 * 4;
	return (ks / 4) * 64 + (2 * c + ks % 4 / 2) * 8 + ks % 2 * 4;
}

/* hbs carries the rows of a block. */
KVK_DEV size_t mla_row_elem(const struct attn_params &p, const struct plan_seg &s,
			    uint32_t hbs, uint32_t row)
{
	return ((size_t)s.q0 * p.nr_q_heads + s.hblk * hbs + row) * LATENT;
}

/**
 * mla_reg_launch(), mla_fast_launch(), mla_tile_launch() - queue decode of blocks of up to 64 query
 * rows: FP8 pages (attn_mla_reg.cu), these with KVK_ATTN_FAST (attn_mla_fast.cu), BF16 pages
 * @p: plan_params(), with the schedule that is queued before
 * @nr_ctas: of the schedule
 * @pairs: launch clusters of two, since units may have two parts (attn_mla_pair.cuh)
 * Return: 0 or -EIO.
 */
int mla_reg_launch(const struct attn_params *p, uint32_t nr_ctas, bool pairs,
		   cudaStream_t stream);
int mla_fast_launch(const struct attn_params *p, uint32_t nr_ctas, bool pairs,
		    cudaStream_t stream);
int mla_tile_launch(const struct attn_params *p, uint32_t nr_ctas, bool pairs,
		    cudaStream_t stream);

#endif /* KVK_ATTN_MLA_CUH */
