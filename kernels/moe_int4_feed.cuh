/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_feed.cuh - the feeding warps of moe_int4.cuh: weights, tokens, signals.
 *
 * Warps 16 .. 19. Each walks the same unit queue; a queue entry is free again when the
 * consumers, both token warps and the signal warp have let go of it.
 */
#ifndef KVK_MOE_INT4_FEED_CUH
#define KVK_MOE_INT4_FEED_CUH

#include "moe_int4.cuh"

/* Parts of row block @rb that exist. */
template <int WK>
__device__ __forceinline__ uint32_t rsub_of(const struct moe_mat &m, uint32_t rb)
{
	constexpr uint32_t WM = MOE_GROUP / WK;

	return min(m.rsub, (m.mtiles + WM - 1) / WM - rb * m.rsub);
}

/* Stage @k of row block @rb of one matrix: WM row tiles x WK bricks. */
template <int WK, uint32_t BRICK, uint32_t STAGE, uint32_t STAGES>
__device__ __forceinline__ void stream_stage(const struct moe_mat &m, const uint8_t *w,
					     uint32_t rb, uint32_t k, struct moe_ring &r,
					     uint64_t policy)
{
	constexpr uint32_t WM = MOE_GROUP / WK;
	const uint32_t lane = threadIdx.x % 32;
	const uint32_t m0 = rb * WM, nm = min(WM, m.mtiles - m0);
	/* Pieces: a whole stage, a row tile's bricks, or single bricks. */
	const bool whole = m.wl == WM && nm == WM, rows = m.wl == 1;
	const uint32_t lm = lane / WK, lk = lane % WK, mt = m0 + lm;
	const uint32_t bmt = mt / m.wl * m.wl * m.kbricks + mt % m.wl;
	const uint32_t nk = min((uint32_t)WK, m.kbricks - k);
	const uint32_t bar = r.full + 8 * r.stage, dst = r.base + r.stage * STAGE;
	const uint8_t *src = w + (uint64_t)(bmt + (k + lk) * m.wl) * BRICK;

	ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
	if (lane == 0)
		ptx_mbar_expect(bar, nm * nk * BRICK);
	__syncwarp();
	if (whole) {
		if (lane == 0)
			ptx_bulk_stream(dst, src, WM * nk * BRICK, bar, policy);
	} else if (rows) {
		if (lm < nm && lk == 0)
			ptx_bulk_stream(dst + lane * BRICK, src, nk * BRICK, bar, policy);
	} else if (lm < nm && lk < nk) {
		ptx_bulk_stream(dst + lane * BRICK, src, BRICK, bar, policy);
	}
	ring_next<STAGES>(r);
}

/* Stages of FIRST unit @rb of an expert, from column brick *@k on, up to @most of them. */
template <int NTMAX, int WK, int G>
__device__ __forceinline__ void stream_first(const struct moe_i4 &a, uint32_t expert,
					     uint32_t rb, uint32_t *k, uint32_t most,
					     struct moe_ring &r, uint64_t policy)
{
	using S = moe_shape<NTMAX, WK, G>;
	const uint8_t *w = a.w13.base + expert * a.w13.expert_bytes;

	for (uint32_t i = 0; i < most && *k < a.w13.kbricks; i++, *k += WK)
		stream_stage<WK, S::BRICK, S::STAGE, S::STAGES>(a.w13, w, rb, *k, r,
								policy);
}

/* The expert of tile @tile, of @n slots, of which a lane has one each: own_plan() numbers tiles by
 * experts, if none has more than a tile of @most; ~0u: there is none, or one has. */
__device__ __forceinline__ uint32_t expert_of(const struct moe_i4 &a, uint32_t n,
					      uint32_t tile, uint32_t most)
{
	const uint32_t lane = threadIdx.x % 32;
	uint32_t id = ~0u, same, heads, less = 0;
	bool head;

	if (lane < n)
		id = min(__ldcg(&a.ids[lane]), a.nr_experts - 1);
	same = __match_any_sync(~0u, id);
	if (__any_sync(~0u, lane < n && __popc(same) > most))
		return ~0u;
	head = lane < n && (same & ((1u << lane) - 1)) == 0;
	heads = __ballot_sync(~0u, head);
	for (uint32_t left = heads; left; left &= left - 1)
		less += __shfl_sync(~0u, id, __ffs(left) - 1) < id;
	heads = __ballot_sync(~0u, head && less == tile);
	return heads ? __shfl_sync(~0u, id, __ffs(heads) - 1) : ~0u;
}

/*
 * The weight warp, before slots are sorted. Few slots, at most a warp: the CTA's first unit, if it
 * is a FIRST, is known as soon as ids are there. Its first stages, as many as the ring holds, are
 * asked for then.
 */
template <int NTMAX, int WK, int G>
__device__ __forceinline__ void
weight_begin(const struct moe_i4 &a, struct moe_shared<NTMAX> &sh, struct moe_ring r)
{
	const uint32_t n = a.nr_tokens * a.top_k, tile = blockIdx.x / a.w13.rblocks;
	uint32_t expert = ~0u, k = 0;

	if (a.own_plan && n <= 32)
		expert = expert_of(a, n, tile, 8 * NTMAX);
	if (expert != ~0u)
		stream_first<NTMAX, WK, G>(a, expert, blockIdx.x - tile * a.w13.rblocks,
					   &k, moe_shape<NTMAX, WK, G>::STAGES, r,
					   ptx_policy_stream());
	if (threadIdx.x % 32 == 0)
		sh.begun = k;
}

/* A unit's weights, of FIRST from column brick @k on. Row blocks of SECOND that share their tokens come in pairs, stage by
 * stage in turn, so that each consumer group has a row block for itself. */
template <int NTMAX, int WK, int G>
__device__ __forceinline__ void stream_unit(const struct moe_i4 &a,
					    const struct moe_unit &u, uint32_t k,
					    struct moe_ring &r, uint64_t policy)
{
	using S = moe_shape<NTMAX, WK, G>;
	const struct moe_mat &m = a.w2;
	const uint8_t *w = m.base + u.expert * m.expert_bytes;

	if (u.type == MOE_FIRST) {
		stream_first<NTMAX, WK, G>(a, u.expert, u.rb, &k, ~0u, r, policy);
		return;
	}
	for (uint32_t i = 0, nr = rsub_of<1>(m, u.rb); i < nr; i += 2)
		for (k = 0; k < m.kbricks; k++)
			for (uint32_t j = i; j < i + 2 && j < nr; j++)
				stream_stage<1, S::BRICK, S::STAGE, S::STAGES>(
					m, w, u.rb * m.rsub + j, k, r, policy);
}

/* Claims units, hands them on, streams their weights. The first unit is the
 * CTA's own number, so that the stream starts without a round trip, and may have begun. */
template <int NTMAX, int WK, int G>
__device__ __forceinline__ void
weight_warp(const struct moe_i4 &a, struct moe_shared<NTMAX> &sh, struct moe_ring r)
{
	using S = moe_shape<NTMAX, WK, G>;
	uint32_t begun = sh.begun;
	const uint32_t lane = threadIdx.x % 32;
	const uint64_t policy = ptx_policy_stream();
	struct moe_place p = {};
	uint32_t c = 0;
	struct moe_unit u = unit_decode<NTMAX>(a, sh, blockIdx.x);

	ring_skip<S::STAGES>(r, (begun + WK - 1) / WK);
	for (;; place_next(p)) {
		ptx_mbar_wait(ptx_smem(&sh.q_empty[p.q]), p.phase ^ 1);
		if (lane == 0) {
			sh.unit[p.q] = u;
			ptx_mbar_arrive(ptx_smem(&sh.q_full[p.q]));
		}
		__syncwarp();
		if (u.type == MOE_END)
			return;
		/* the round trip of the claim hides behind the unit's own weights */
		if (lane == 0)
			c = gridDim.x + atomicAdd(a.claim, 1);
		if (u.type <= MOE_SECOND)
			stream_unit<NTMAX, WK, G>(a, u, begun, r, policy);
		begun = 0;
		u = unit_decode<NTMAX>(a, sh, __shfl_sync(~0u, c, 0));
	}
}

/* struct moe_rows - where a unit's token rows come from */
struct moe_rows {
	const uint8_t *base;
	uint32_t row_bytes;
	uint32_t per_row; /* slot / per_row = row */
	uint32_t step;	  /* bytes of a row in a chunk */
	uint32_t pad;	  /* bytes between rows in shared memory */
};

template <class S>
__device__ __forceinline__ void stream_tokens(const struct moe_rows &rows,
					      const uint32_t *slot, uint32_t n,
					      struct moe_ring &r)
{
	const uint32_t lane = threadIdx.x % 32;
	uint64_t src = 0;

	static_assert(S::NTOK <= 32, "a lane knows one row");
	if (lane < n)
		src = (uint64_t)(rows.base +
				 (uint64_t)(slot[lane] / rows.per_row) * rows.row_bytes);
	for (uint32_t at = 0; at < rows.row_bytes; at += rows.step) {
		uint32_t bytes = min(rows.step, rows.row_bytes - at),
			 bar = r.full + 8 * r.stage;
		uint32_t dst = r.base + r.stage * S::CHUNK;

		ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
		if constexpr (S::BULK) {
			if (lane == 0)
				ptx_mbar_expect(bar, n * bytes);
			__syncwarp();
			if (lane < n)
				ptx_bulk(dst + lane * rows.pad, (const uint8_t *)src + at,
					 bytes, bar);
		} else {
			for (uint32_t i = 0; i < n; i++, dst += rows.pad) {
				const uint8_t *row =
					(const uint8_t *)__shfl_sync(~0u, src, i) + at;

				for (uint32_t b = lane * 16; b < bytes; b += 512)
					ptx_copy16(dst + b, row + b);
			}
			ptx_copy_arrive(bar);
		}
		ring_next<S::CHUNKS>(r);
	}
}

/* Power of two that brings a largest |h| near 2^14; 1 for Inf and NaN. */
__device__ __forceinline__ float h_scale(uint32_t amax_bits)
{
	uint32_t e = amax_bits >> 23;

	if (e == 255)
		return 1.0f;
	return __uint_as_float((268u - (e < 15 ? 15u : e)) << 23);
}

/* Inverse of a power of two, exactly. */
__device__ __forceinline__ float h_back(float inv)
{
	return __uint_as_float((254u << 23) - __float_as_uint(inv));
}

/* What the consumers need to know about a unit's tokens. */
template <int NTMAX, int WK, bool BULK>
__device__ __forceinline__ void unit_prepare(const struct moe_i4 &a,
					     struct moe_shared<NTMAX> &sh,
					     const struct moe_unit &u, uint32_t q)
{
	const uint32_t lane = threadIdx.x % 32;
	uint32_t slot = 0;

	if (lane < u.n)
		slot = a.own_plan ? sh.list[u.start + lane]
				  : __ldcg(&a.list[u.start + lane]);
	if (u.type == MOE_SECOND) {
		if (lane == 0)
			while (ptx_ld_acquire(&a.done1[u.tile]) < a.w13.rblocks)
				;
		__syncwarp();
		if (BULK)
			ptx_fence_async();
	}
	if (lane < u.n) {
		sh.slot[q][lane] = slot;
		sh.amax[q][lane] = 0;
		if (WK > 1 && u.type == MOE_SECOND)
			sh.inv[q][lane] = h_scale(__ldcg(&a.amax[slot]));
	}
	__syncwarp();
}

/* Two warps take turns: wait for what a unit depends on, bring its tokens. The waiting of
 * one overlaps the copies of the other; the copies go into the ring in unit order. */
template <int NTMAX, int WK, int G>
__device__ __forceinline__ void token_warp(const struct moe_i4 &a,
					   struct moe_shared<NTMAX> &sh,
					   struct moe_ring r, const uint32_t self)
{
	using S = moe_shape<NTMAX, WK, G>;
	const uint32_t lane = threadIdx.x % 32;
	const struct moe_rows first = {(const uint8_t *)a.x, a.hidden * 2, a.top_k,
				       S::XC1 * 256, S::XROW1};
	const struct moe_rows second = {a.h, a.inter / KVK_BRICK_COLS * S::H_STEP, 1,
					S::XC2 * S::H_STEP, S::XROW2};
	struct moe_place p = {};

	for (uint32_t i = 0;; i++) {
		ptx_mbar_wait(ptx_smem(&sh.q_full[p.q]), p.phase);
		const struct moe_unit u = sh.unit[p.q];
		const struct moe_rows &rows = u.type == MOE_FIRST ? first : second;

		if (i % 2 == self) {
			if (u.type <= MOE_SECOND)
				unit_prepare<NTMAX, WK, S::BULK>(a, sh, u, p.q);
			if (lane == 0)
				ptx_mbar_arrive(ptx_smem(&sh.q_ready[p.q]));
			if (u.type == MOE_END)
				return;
			if (i)
				ptx_mbar_wait(ptx_smem(&sh.turn[self]), (i - 1) / 2 % 2);
			if (u.type <= MOE_SECOND)
				stream_tokens<S>(rows, sh.slot[p.q], u.n, r);
			if (lane == 0)
				ptx_mbar_arrive(ptx_smem(&sh.turn[1 - self]));
		} else if (u.type <= MOE_SECOND) {
			for (uint32_t at = 0; at < rows.row_bytes; at += rows.step)
				ring_next<S::CHUNKS>(r);
		} else if (u.type == MOE_END) {
			return;
		}
		__syncwarp();
		if (lane == 0)
			ptx_mbar_arrive(ptx_smem(&sh.q_empty[p.q]));
		place_next(p);
	}
}

/* The last CTA leaves the counters as it found them: zero. */
__device__ __forceinline__ void clear_counters(const struct moe_i4 &a)
{
	const uint32_t lane = threadIdx.x % 32;
	uint32_t before = 0;

	if (lane == 0) {
		__threadfence();
		before = atomicAdd(a.exits, 1);
	}
	if (__shfl_sync(~0u, before, 0) != gridDim.x - 1)
		return;
	for (uint32_t i = lane; i < a.nr_clear; i += 32)
		a.claim[i] = 0;
}

/* Makes a unit's results known to the other CTAs: fences here, not in the consumers. */
template <int NTMAX, bool BULK>
__device__ __forceinline__ void signal_warp(const struct moe_i4 &a,
					    struct moe_shared<NTMAX> &sh)
{
	struct moe_place p = {};

	for (;;) {
		ptx_mbar_wait(ptx_smem(&sh.q_full[p.q]), p.phase);
		const struct moe_unit u = sh.unit[p.q];

		if (u.type == MOE_END)
			break;
		ptx_mbar_wait(ptx_smem(&sh.q_done[p.q]), p.phase);
		if (u.type <= MOE_SECOND && threadIdx.x % 32 == 0) {
			if (BULK && u.type == MOE_FIRST)
				ptx_fence_async();
			__threadfence();
			ptx_red_release(u.type == MOE_FIRST ? &a.done1[u.tile]
							    : &a.done2[u.rb],
					1);
		}
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			ptx_mbar_arrive(ptx_smem(&sh.q_empty[p.q]));
		place_next(p);
	}
	if (a.nr_clear)
		clear_counters(a);
}

#endif /* KVK_MOE_INT4_FEED_CUH */
