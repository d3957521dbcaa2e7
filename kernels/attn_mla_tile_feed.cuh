/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_tile_feed.cuh - the warps that fill the tiles of the wide MLA decode kernel from
 * pages; attn_mla_tile.cu explains it. Each of the four takes 16 tokens of every page and
 * walks the CTA's segments by itself; the first one also tells the consumers.
 *
 * Bytes go to their place unchanged, by asynchronous copies of 16.
 */
#ifndef KVK_ATTN_MLA_TILE_FEED_CUH
#define KVK_ATTN_MLA_TILE_FEED_CUH

#include "kernels/attn_mla_tile.cuh"

/* Where a warp is in the CTA's run of pages. */
struct tile_walk {
	const struct kv_row *rows; /* of the segment */
	uint64_t off[2]; /* of page pg / 32 * 32 + lane, of the page 32 behind */
	uint32_t seg;	 /* next one */
	uint32_t pg;
	uint32_t nr_pages;
	uint32_t left; /* tokens from page pg to the request's end */
};

KVK_DEV uint64_t walk_off(const struct attn_params &p, const struct tile_walk &w,
			  uint32_t i)
{
	return i < w.nr_pages ? page_offset(p, w.rows[i].pfn) : 0;
}

/* Page @i to the L2. @bytes: a multiple of 16 */
KVK_DEV void walk_fetch(const struct attn_params &p, const struct tile_walk &w,
			uint32_t i, uint32_t bytes)
{
	const bool far = i / 32 != w.pg / 32;
	const uint64_t off = __shfl_sync(~0u, far ? w.off[1] : w.off[0], i % 32);

	if (i < w.nr_pages && (threadIdx.x & 31) == 0)
		feed_prefetch(p.base + off, bytes);
}

/* Tell the consumers about segment @i. */
KVK_DEV void tile_publish(const struct plan_seg &s, uint32_t i, enum plan_state state,
			  struct tile_smem *sm)
{
	struct mla_seg g = {};

	g.s = s;
	g.ok = state != PLAN_FAILED;
	g.poisoned = state == PLAN_POISONED;
	g.nr_pieces = state == PLAN_OK ? s.nr_pages : 0;
	if (i >= TILE_SEGS)
		spin_until(&sm->segs_done, 8 * (i - TILE_SEGS + 1) - 1);
	if ((threadIdx.x & 31) == 0) {
		sm->segs[i % TILE_SEGS] = g;
		sts_release(&sm->segs_in, i + 1);
	}
}

/* The next page, or NULL; *ret_valid: its tokens. @lead: publishes segments. */
KVK_DEV const uint8_t *tile_next(const struct attn_params &p, const struct plan_cta &cta,
				 uint64_t step, bool lead, struct tile_walk &w,
				 uint32_t *ret_valid, struct tile_smem *sm)
{
	const uint32_t lane = threadIdx.x & 31;
	const uint8_t *at;

	while (w.pg == w.nr_pages) {
		const struct plan_seg *s;
		enum plan_state state;

		if (w.seg == cta.count)
			return NULL;
		s = w.seg ? &p.mem.segs[cta.base + w.seg] : &cta.first;
		state = plan_state_of(p, cta, w.seg, *s, step);
		w.rows = p.rows + s->row0 + s->page0;
		w.left = s->len - s->page0 * TOKENS;
		w.pg = 0;
		w.nr_pages = state == PLAN_OK ? s->nr_pages : 0;
		if (lead)
			tile_publish(*s, w.seg, state, sm);
		w.seg++;
	}
	if (w.pg == 0) {
		w.off[0] = walk_off(p, w, lane);
		w.off[1] = walk_off(p, w, lane + 32);
	} else if (w.pg % 32 == 0) {
		w.off[0] = w.off[1];
		w.off[1] = walk_off(p, w, w.pg + 32 + lane);
	}
	if (lead && p.flight) {
		const uint32_t bytes = p.page_bytes;

		if (w.pg == 0)
			for (uint32_t i = 1; i < p.flight; i++)
				walk_fetch(p, w, i, bytes);
		walk_fetch(p, w, w.pg + p.flight, bytes);
	}
	at = p.base + __shfl_sync(~0u, w.off[0], w.pg % 32);
	*ret_valid = min(w.left, (uint32_t)TOKENS);
	w.left -= TOKENS;
	w.pg++;
	return at;
}

/*
 * Fill the tiles. The second one is asked for when the first is there: all SMs begin at once, and what is
 * asked for together comes together, late.
 */
KVK_DEV void feed_bf16(const struct attn_params &p, const struct plan_cta &cta,
		       uint64_t step, struct tile_smem *sm)
{
	using C = tile_cfg<1>;
	const uint32_t lane = threadIdx.x & 31, w = threadIdx.x / 32 - C::NR_USE;
	const uint64_t policy = policy_evict_first();
	struct tile_walk walk = {};
	const uint8_t *at;
	uint32_t valid;

	at = tile_next(p, cta, step, w == 0, walk, &valid, sm);
	grid_wait();
	for (uint32_t seq = 0; at; seq++) {
		const uint32_t buf = seq & 1, phase = (seq >> 1 & 1) ^ 1;
		const uint32_t tile = smem_addr(sm->tile[buf]);

		if (seq == 1)
			mbar_wait(&sm->full[0][PART_RIGHT], 0);
		mbar_wait(&sm->empty[buf][PART_ROPE], phase);
#pragma unroll
		for (int i = 0; i < 4; i++) { /* 4 tokens of 8 chunks */
			const uint32_t t = 16 * w + 4 * i + lane / 8;

			feed_copy(tile + 8 * TILE_BLOCK + t * 128 + ((lane ^ t) & 7) * 16,
				  at + C::ROPE_OFF + t * C::RR + (lane & 7) * 16,
				  t < valid, policy);
		}
		feed_copied(&sm->full[buf][PART_ROPE]);
#pragma unroll
		for (int half = 0; half < 2; half++) {
			mbar_wait(&sm->empty[buf][PART_LEFT + half], phase);
#pragma unroll 4
			for (int i = 0; i < 16; i++) { /* half a token's latent */
				const uint32_t t = 16 * w + i;

				feed_copy(tile + (4 * half + lane / 8) * TILE_BLOCK +
						  t * 128 + ((lane ^ t) & 7) * 16,
					  at + t * C::RB + half * 512 + lane * 16,
					  t < valid, policy);
			}
			feed_copied(&sm->full[buf][PART_LEFT + half]);
		}
		at = tile_next(p, cta, step, w == 0, walk, &valid, sm);
	}
	feed_wait();
}

#endif /* KVK_ATTN_MLA_TILE_FEED_CUH */
