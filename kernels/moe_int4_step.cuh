/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_step.cuh - one persistent kernel for the routed INT4 experts of a decode step of few
 * tokens, where the time is latency: a rank of a wide split.
 *
 * Units are dealt out in turn, CTA b has b, b + CTAs and so on, but for the last ones:
 *
 *	FIRST	(token tile, row tile) of h = silu(W1 x) * (W3 x)
 *	SECOND	(row tiles, token) of y, all experts of the token, so that nothing is left to add
 *		up between CTAs
 *
 * A token's SECONDs come behind the FIRSTs of the token after it, so that its h is there when
 * their weights are.
 *
 * A CTA is sixteen consumer warps, each with a brick of a stage of sixteen, a feeding warp that
 * runs ahead through the units, so that weights of the second product stream while h is on its way,
 * and one that works out who multiplies what. Both sort the slots, so that the first weights are
 * asked for as soon as ids are there; what else comes from memory is asked for before them, as
 * it would wait behind them.
 *
 * h travels in packets of eight bytes: two columns and, in the same word, a tag that says which
 * call they are of. Who needs them reads until the tag is right; no counter, no fence, no second
 * read. Packets are in memory of their own, which nobody else writes to: a tag cannot be there by
 * chance. A unit waits only for units of smaller numbers, and a CTA takes its own in order.
 * All CTAs must come to run: there are as many as SMs.
 *
 * Arithmetic as in moe_int4.cuh; h is f16 with a power of two per 16 columns on its way and per
 * 128 in the products.
 */
#ifndef KVK_MOE_INT4_STEP_CUH
#define KVK_MOE_INT4_STEP_CUH

#include "moe_int4_mma.cuh"
#include "moe_int4_step.h"
#include "moe_plan.cuh"

#define STEP_WARPS 16u /* consumers */
#define STEP_THREADS \
	MOE_THREADS /* a feeding warp, one that plans, and two that only give up registers */
#define STEP_STAGES	5u
#define STEP_TOKENS	8u	  /* of a tile */
#define STEP_TAGS	0xffffffu /* a tag is 24 bits and never 0 */
#define STEP_TOKEN_SUMS 36u	  /* floats; lanes of a quarter hit different banks */
#define STEP_NARROW	2u	  /* tokens whose columns are copied ahead, to a slot */
#define STEP_ROW	320u	  /* bytes between them there: different banks */
#define STEP_SLOT	(STEP_NARROW * STEP_ROW)
#define STEP_NONE	0xffu
#define STEP_WARP_SUMS	(STEP_TOKENS * STEP_TOKEN_SUMS)

enum step_type { STEP_FIRST, STEP_SECOND, STEP_END };

/* struct step_unit - @tile: of FIRST; @token: of SECOND; @row: first row tile; @nr: bricks */
struct step_unit {
	uint32_t type, tile, row, nr;
};

/* Beside what is dynamic: the ring, and behind it two slots for each warp. */
struct step_shared {
	uint64_t full[STEP_STAGES], empty[STEP_STAGES];
	uint64_t q_full[MOE_QUEUE], q_empty[MOE_QUEUE];
	uint64_t sums_free; /* of a unit's sums: who reads them is through */
	uint64_t planned;   /* what follows is there, but for sums */
	struct step_unit unit[MOE_QUEUE];
	uint32_t tag;
	alignas(8) uint32_t
		same[MOE_PLAN_EXPERTS][2]; /* slots of an expert; zero at first */
	uint32_t expert[STEP_SLOTS];	   /* of a tile */
	uint32_t id[STEP_SLOTS];	   /* of a slot, in range */
	float weight[STEP_SLOTS];	   /* NaN where the id was not */
	/* of a tile; STEP_NONE: none */
	alignas(8) uint8_t slots[STEP_SLOTS][STEP_TOKENS];
	uint8_t tokens[STEP_SLOTS][STEP_TOKENS];
	uint8_t nr[STEP_SLOTS];
	float sums[STEP_WARPS * STEP_WARP_SUMS];
};

template <int G> struct step_shape {
	static constexpr int P = G == 32 ? 4 : G == 64 ? 2 : 1; /* sets side by side */
	static constexpr uint32_t BRICK = KVK_BRICK_NIBBLES + 64u * (KVK_BRICK_COLS / G);
	static constexpr uint32_t STAGE = STEP_WARPS * BRICK;
	/* and rows of tokens that are not there, read behind the last slot */
	static constexpr uint32_t DYNAMIC =
		STEP_STAGES * STAGE + 2 * STEP_WARPS * STEP_SLOT + 2 * STEP_ROW + 128u;
};

/* --------------------------------------------------------------------------- feeding warp
 */

/* struct step_sorted - a warp's: ids of slots lane and lane + 32, in range; slots that have the
 * same; first slots of tiles, by which tiles are numbered */
struct step_sorted {
	uint32_t id[2];
	uint64_t same[2], heads;
	uint32_t bad; /* bit i: the lane's i-th id was out of range */
};

/* struct step_order - lane t: numbers of the first units of token t; @each: SECONDs of a token */
struct step_order {
	uint32_t first, second, each;
};

/* Tiles whose first slot is below slot @s. */
__device__ __forceinline__ uint32_t step_tiles(uint64_t heads, uint32_t s)
{
	return __popcll(s < 64 ? heads & ((1ull << s) - 1) : heads);
}

/* Which of the first @n slots go together. Both warps that sort set the same bits of same[]. */
__device__ __forceinline__ void step_sort(const struct moe_step &a,
					  struct step_shared &sh, uint32_t n,
					  struct step_sorted &o)
{
	const uint32_t lane = threadIdx.x % 32;

	o.bad = 0;
	o.heads = 0;
#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		const uint32_t s = lane + 32 * i;

		o.id[i] = s < n ? __ldcg(&a.ids[s]) : 0;
	}
#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		o.bad |= (uint32_t)(o.id[i] >= a.nr_experts) << i;
		o.id[i] = min(o.id[i], a.nr_experts - 1);
		if (lane + 32 * i < n)
			atomicOr(&sh.same[o.id[i]][i], 1u << lane);
	}
	__syncwarp();
#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		const uint32_t s = lane + 32 * i;
		bool head;

		o.same[i] = *(const uint64_t *)sh.same[o.id[i]];
		head = s < n &&
		       __popcll(o.same[i] & ((1ull << s) - 1)) % STEP_TOKENS == 0;
		o.heads |= (uint64_t)__ballot_sync(~0u, head) << 32 * i;
	}
}

/* The expert of tile @tile, which exists. */
__device__ __forceinline__ uint32_t step_expert(const struct step_sorted &o,
						uint32_t tile)
{
	uint32_t mine = 0;

#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		const uint32_t s = threadIdx.x % 32 + 32 * i;

		if (o.heads >> s & 1 && step_tiles(o.heads, s) == tile)
			mine = o.id[i];
	}
	return ptx_redux_max(mine);
}

/* Put slot @s in its tile. */
__device__ __forceinline__ void step_place(struct step_shared &sh, uint64_t same,
					   uint64_t heads, uint32_t s, uint32_t id,
					   uint32_t top_k)
{
	const uint32_t rank = __popcll(same & ((1ull << s) - 1));
	uint32_t tile;

	for (uint32_t i = 0; i < rank / STEP_TOKENS * STEP_TOKENS; i++)
		same &= same - 1;
	tile = __popcll(heads & ((same & -same) - 1));
	sh.slots[tile][rank % STEP_TOKENS] = (uint8_t)s;
	sh.tokens[tile][rank % STEP_TOKENS] = (uint8_t)(s / top_k);
	if (rank % STEP_TOKENS)
		return;
	sh.expert[tile] = id;
	sh.nr[tile] = (uint8_t)min(STEP_TOKENS, (uint32_t)__popcll(same & (~0ull << s)));
}

/* The planning warp: tiles in the order of their first slots, the call's tag. */
__device__ __forceinline__ void step_plan(const struct moe_step &a,
					  struct step_shared &sh)
{
	const uint32_t n = a.nr_tokens * a.top_k, lane = threadIdx.x % 32;
	struct step_sorted o;
	uint32_t calls;
	float weight[2];

	ptx_grid_wait();
	calls = __ldcg(&a.state[1]);
#pragma unroll
	for (uint32_t i = 0; i < 2; i++)
		weight[i] = lane + 32 * i < n ? __ldcg(&a.weights[lane + 32 * i]) : 0.0f;
	step_sort(a, sh, n, o);
#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		const uint32_t s = lane + 32 * i;

		if (s >= n)
			continue;
		step_place(sh, o.same[i], o.heads, s, o.id[i], a.top_k);
		sh.id[s] = o.id[i];
		sh.weight[s] = o.bad >> i & 1 ? NAN : weight[i];
	}
	if (lane == 0)
		sh.tag = calls + 1;
	__syncwarp();
	if (lane == 0)
		ptx_mbar_arrive(ptx_smem(&sh.planned));
}

/* n / d by moe_step's @by of d; one warp's chain of instructions is what a step waits for */
__device__ __forceinline__ uint32_t step_div(uint32_t n, uint32_t by)
{
	return by ? __umulhi(n, by) : n;
}

__device__ __forceinline__ struct step_unit step_first(const struct moe_step &a,
						       uint32_t c)
{
	const uint32_t tile = step_div(c, a.by_tiles);
	const struct step_unit u = {STEP_FIRST, tile, c - tile * a.w13.mtiles,
				    a.w13.kbricks};

	return u;
}

__device__ __forceinline__ struct step_order step_order_make(const struct moe_step &a,
							     uint64_t heads)
{
	const uint32_t t = threadIdx.x % 32, ahead = min(t + 2, a.nr_tokens);
	struct step_order o;

	o.each = (a.w2.mtiles + (1u << a.log_rows) - 1) >> a.log_rows;
	o.first =
		step_tiles(heads, t * a.top_k) * a.w13.mtiles + (t ? t - 1 : 0) * o.each;
	o.second = step_tiles(heads, ahead * a.top_k) * a.w13.mtiles + t * o.each;
	if (t >= a.nr_tokens)
		o.first = o.second = ~0u;
	return o;
}

/* Unit number @c: FIRSTs of token 0, of 1, SECONDs of 0, FIRSTs of 2, SECONDs of 1 and so on. */
__device__ __forceinline__ struct step_unit
step_decode(const struct moe_step &a, const struct step_order &o, uint32_t c)
{
	const uint32_t firsts = __popc(__ballot_sync(~0u, o.first <= c));
	const uint32_t seconds = __popc(__ballot_sync(~0u, o.second <= c));
	struct step_unit u = {STEP_END, seconds - 1, 0, 0};

	if (!seconds || firsts > seconds + 1)
		return step_first(a, c - (firsts < 2 ? 0 : firsts - 2) * o.each);
	u.row = (c - __shfl_sync(~0u, o.second, seconds - 1)) << a.log_rows;
	if (u.row >= a.w2.mtiles)
		return u;
	u.type = STEP_SECOND;
	u.nr = (a.top_k * a.w2.kbricks) << a.log_rows;
	return u;
}

/* An expert's brick of row tile @row and column brick @k. */
template <int G>
__device__ __forceinline__ const uint8_t *
step_brick(const struct moe_mat &m, uint32_t expert, uint32_t row, uint32_t k)
{
	const uint32_t in = row & (m.wl - 1); /* wl: 1 or 8 */

	return m.base + expert * m.expert_bytes +
	       (uint64_t)((row - in) * m.kbricks + k * m.wl + in) * step_shape<G>::BRICK;
}

/* One stage: lane i brings @bytes from @src to brick @j of it, if there are any; @all together */
template <int G>
__device__ __forceinline__ void step_stage(struct moe_ring &r, uint32_t j,
					   const uint8_t *src, uint32_t bytes,
					   uint32_t all, uint64_t policy)
{
	using S = step_shape<G>;
	const uint32_t bar = r.full + 8 * r.stage;

	ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
	if (threadIdx.x % 32 == 0)
		ptx_mbar_expect(bar, all);
	__syncwarp();
	if (bytes)
		ptx_bulk_stream(r.base + r.stage * S::STAGE + j * S::BRICK, src, bytes,
				bar, policy);
	ring_next<STEP_STAGES>(r);
}

/* A row tile's bricks from @k on, four a piece: they lie one after the other. */
template <int G>
__device__ __forceinline__ void
step_stream_first(const struct moe_step &a, uint32_t expert, const struct step_unit &u,
		  uint32_t k, struct moe_ring &r, uint64_t policy)
{
	constexpr uint32_t BRICK = step_shape<G>::BRICK;
	const uint32_t j = threadIdx.x % 32 * 4;
	const uint8_t *src = step_brick<G>(a.w13, expert, u.row, k + j);

	for (uint32_t left = u.nr - k; k < u.nr; left -= STEP_WARPS, k += STEP_WARPS) {
		const uint32_t n = min(STEP_WARPS, left);

		step_stage<G>(r, j, src, j < n ? min(4u, n - j) * BRICK : 0, n * BRICK,
			      policy);
		src += STEP_WARPS * BRICK;
	}
}

/* struct step_start - of the stages that a CTA begins with, all at once while the ring is empty:
 * the lane's piece, whose bytes are at @at of its expert */
struct step_start {
	uint32_t at, stage, brick, bytes, all;
};

/* What can be worked out while the kernel before still runs. */
template <int G>
__device__ __forceinline__ struct step_start step_start_make(const struct moe_step &a,
							     const struct step_unit &u)
{
	constexpr uint32_t BRICK = step_shape<G>::BRICK;
	const uint32_t lane = threadIdx.x % 32;
	const uint32_t from = lane / 4 * STEP_WARPS + lane % 4 * 4; /* of the row tile */
	struct step_start s = {};

	s.at = (u.row * u.nr + from) * BRICK;
	s.stage = lane / 4;
	s.brick = lane % 4 * 4;
	if (s.stage < STEP_STAGES && from < u.nr)
		s.bytes = min(4u, u.nr - from) * BRICK;
	if (s.stage < STEP_STAGES && lane % 4 == 0 && from < u.nr)
		s.all = min(STEP_WARPS, u.nr - from) * BRICK;
	asm volatile("" : "+r"(s.at), "+r"(s.stage), "+r"(s.bytes), "+r"(s.all));
	return s;
}

/* Ask for the first unit's stages that the ring has room for; unless it is @meant, for none. */
template <int G>
__device__ __forceinline__ void
step_begin(const struct moe_step &a, const struct step_start &s, uint32_t expert,
	   const struct step_unit &u, struct moe_ring &r, uint64_t policy, bool meant)
{
	using S = step_shape<G>;
	const uint32_t bar = r.full + 8 * s.stage;
	const uint32_t nr = min((u.nr + STEP_WARPS - 1) / STEP_WARPS, STEP_STAGES);

	if (meant && s.all)
		ptx_mbar_expect(bar, s.all);
	__syncwarp();
	if (meant && s.bytes)
		ptx_bulk_stream(r.base + s.stage * S::STAGE + s.brick * S::BRICK,
				a.w13.base + expert * a.w13.expert_bytes + s.at, s.bytes,
				bar, policy);
	if (meant)
		ring_skip<STEP_STAGES>(r, nr);
}

/* Bricks by (slot, column brick, row tile): neighbouring row tiles' are a piece. Of a last unit
 * some row tiles may not be there. */
template <int G>
__device__ __forceinline__ void
step_stream_second(const struct moe_step &a, const struct step_shared &sh,
		   const struct step_unit &u, struct moe_ring &r, uint64_t policy)
{
	constexpr uint32_t BRICK = step_shape<G>::BRICK;
	const uint32_t log = a.log_rows, rows = 1u << log;
	const uint32_t there = min(rows, a.w2.mtiles - u.row);
	const uint32_t piece = a.w2.wl == 1 ? 1 : min(rows, a.w2.wl);
	const uint32_t j = threadIdx.x % 32 * piece, row = j & (rows - 1);

	for (uint32_t at = 0; at < u.nr; at += STEP_WARPS) {
		const uint32_t n = min(STEP_WARPS, u.nr - at);
		const uint32_t all = (at + j) >> log, s = all * a.by_columns >> 16;
		const bool mine = j < n && row < there;
		const uint8_t *src = NULL;

		if (mine)
			src = step_brick<G>(a.w2, sh.id[u.tile * a.top_k + s],
					    u.row + row, all - s * a.w2.kbricks);
		step_stage<G>(r, j, src, mine ? min(piece, there - row) * BRICK : 0,
			      (n >> log) * there * BRICK, policy);
	}
}

/* The last CTA leaves the counters at zero and counts the call. When tags begin anew, old
 * packets must go, and not before the consumers have seen all of this call's. */
__device__ __forceinline__ void step_leave(const struct moe_step &a,
					   struct step_shared &sh, struct moe_place p)
{
	const uint32_t lane = threadIdx.x % 32, tag = sh.tag;
	const bool wrap = tag == STEP_TAGS;
	uint32_t before = 0;

	if (wrap)
		ptx_mbar_wait(ptx_smem(&sh.q_empty[p.q]), p.phase);
	if (lane == 0) {
		__threadfence();
		before = atomicAdd(&a.state[0], 1);
	}
	if (__shfl_sync(~0u, before, 0) != gridDim.x - 1)
		return;
	for (uint32_t i = lane; wrap && i < STEP_VALUES / 2; i += 32)
		a.packets[i] = 0;
	if (lane == 0) {
		a.state[0] = 0;
		a.state[1] = wrap ? 0 : tag;
		a.state[2] = 0;
	}
}

/* A CTA's first unit is its own number. Is it a FIRST of the first two tokens it is known as soon
 * as slots are sorted: then its weights are asked for. All of it is gone through without effect
 * before ids may be read, so that the instructions are there. */
template <int G>
__device__ __forceinline__ bool
step_first_unit(const struct moe_step &a, struct step_shared &sh, struct step_sorted &o,
		struct moe_ring &r, uint64_t policy)
{
	const struct step_unit u = step_first(a, blockIdx.x);
	const struct step_start start = step_start_make<G>(a, u);
	uint32_t go = 0;
	bool begun;

#pragma unroll 1
	for (;; go = 1) {
		asm volatile("" : "+r"(go));
		if (go)
			ptx_grid_wait();
		step_sort(a, sh, go ? a.nr_tokens * a.top_k : 0, o);
		begun = u.tile < step_tiles(o.heads, 2 * a.top_k);
		if (begun || !go)
			step_begin<G>(a, start, step_expert(o, u.tile), u, r, policy,
				      begun);
		if (go)
			return begun;
	}
}

/* Deals out units, hands them on, streams their weights. The last token's SECONDs, from @last on,
 * are for whoever is first, as they are what a call ends with; a CTA takes its share at most. */
template <int G>
__device__ __forceinline__ void step_feed(const struct moe_step &a,
					  struct step_shared &sh, struct moe_ring r)
{
	const uint32_t lane = threadIdx.x % 32;
	const uint64_t policy = ptx_policy_stream();
	struct step_sorted o;
	bool begun = step_first_unit<G>(a, sh, o, r, policy);
	const struct step_order order = step_order_make(a, o.heads);
	const uint32_t last = __shfl_sync(~0u, order.second, a.nr_tokens - 1);
	uint32_t share = (order.each + gridDim.x - 1) / gridDim.x;
	uint32_t c = blockIdx.x, got = 0;
	struct moe_place p = {};

	if (c >= last) {
		if (lane == 0)
			got = atomicAdd(&a.state[2], 1);
		c = last + __shfl_sync(~0u, got, 0);
		share--;
	}
	for (;; place_next(p)) {
		const struct step_unit u = step_decode(a, order, c);
		const bool any = c + gridDim.x >= last;

		ptx_mbar_wait(ptx_smem(&sh.q_empty[p.q]), p.phase ^ 1);
		if (lane == 0) {
			sh.unit[p.q] = u;
			ptx_mbar_arrive(ptx_smem(&sh.q_full[p.q]));
		}
		__syncwarp();
		ptx_mbar_wait(ptx_smem(&sh.planned), 0);
		if (u.type == STEP_END)
			break;
		/* the round trip hides behind the unit's own weights */
		if (any && share && lane == 0)
			got = atomicAdd(&a.state[2], 1);
		if (u.type == STEP_SECOND)
			step_stream_second<G>(a, sh, u, r, policy);
		else
			step_stream_first<G>(a, sh.expert[u.tile], u,
					     begun ? STEP_STAGES * STEP_WARPS : 0, r,
					     policy);
		begun = false;
		c = !any ? c + gridDim.x
			 : last + (share ? __shfl_sync(~0u, got, 0) : order.each);
		share -= any && share;
	}
	step_leave(a, sh, p);
}

#endif /* KVK_MOE_INT4_STEP_CUH */
