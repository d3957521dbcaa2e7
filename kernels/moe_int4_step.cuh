/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_step.cuh - one persistent kernel for the routed INT4 experts of a decode step of few
 * tokens, where the time is latency: a rank of a wide split.
 *
 * Units are claimed in order from one counter:
 *
 *	FIRST	(token tile, row tile) of h = silu(W1 x) * (W3 x)
 *	SECOND	(row tiles, token) of y, all experts of the token, so that nothing is left to add
 *		up between CTAs
 *
 * A token's SECONDs come behind the FIRSTs of the token after it, so that its h is there when
 * their weights are.
 *
 * A CTA is sixteen consumer warps, each with a brick of a stage of sixteen, and a feeding warp
 * that sorts the slots and runs ahead through the units, so that weights of the second product
 * stream while h is on its way.
 *
 * h travels in packets of eight bytes: two columns and, in the same word, a tag that says which
 * call they are of. Who needs them reads until the tag is right; no counter, no fence, no second
 * read. Packets are in memory of their own, which nobody else writes to: a tag cannot be there by
 * chance. A unit waits only for units claimed before it.
 *
 * Arithmetic as in moe_int4.cuh; h is f16 with a power of two per 16 columns on its way and per
 * 128 in the products.
 */
#ifndef KVK_MOE_INT4_STEP_CUH
#define KVK_MOE_INT4_STEP_CUH

#include "moe_int4_mma.cuh"
#include "moe_int4_step.h"

#define STEP_WARPS 16u /* consumers */
#define STEP_THREADS \
	MOE_THREADS /* a feeding warp, and three that only give up registers */
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
	struct step_unit unit[MOE_QUEUE];
	uint32_t tag;
	uint32_t expert[STEP_SLOTS]; /* of a tile */
	uint32_t id[STEP_SLOTS];     /* of a slot, as it came */
	/* of a tile; STEP_NONE: none */
	alignas(8) uint8_t slots[STEP_SLOTS][STEP_TOKENS];
	uint8_t tokens[STEP_SLOTS][STEP_TOKENS];
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

/* Row tiles of a SECOND unit: a power of two, as many as fill a stage, and not only one, so that
 * neighbours' bricks are one piece. */
__device__ __forceinline__ uint32_t step_log_rows(const struct moe_step &a)
{
	const uint32_t bricks = a.top_k * a.w2.kbricks; /* of a row tile */

	return bricks > 4 ? 1 : bricks > 2 ? 2 : 5 - bricks;
}

__device__ __forceinline__ uint32_t step_rows(const struct moe_step &a)
{
	return 1u << step_log_rows(a);
}

/* --------------------------------------------------------------------------- feeding warp
 */

/* Slots of lanes and of lanes + 32 that have the same expert as this lane's slot @s. */
__device__ __forceinline__ uint64_t step_same(uint32_t id0, uint32_t id1, uint32_t s,
					      bool more)
{
	const uint32_t mine = s < 32 ? id0 : id1;
	uint32_t other = 0;

	if (more)
#pragma unroll 8
		for (uint32_t j = 0; j < 32; j++)
			other |= (uint32_t)(__shfl_sync(~0u, s < 32 ? id1 : id0, j) ==
					    mine)
				 << j;
	if (s < 32)
		return __match_any_sync(~0u, mine) | (uint64_t)other << 32;
	return other | (uint64_t)__match_any_sync(~0u, mine) << 32;
}

/* struct step_sorted - the feeding warp's: ids of slots lane and lane + 32, in range; slots that
 * have the same; first slots of tiles, by which tiles are numbered. Lane t: the numbers of the
 * first units of token t */
struct step_sorted {
	uint32_t id[2];
	uint64_t same[2], heads;
	uint32_t first, second;
	uint32_t each; /* SECONDs of a token */
};

/* Tiles whose first slot is below slot @s. */
__device__ __forceinline__ uint32_t step_tiles(uint64_t heads, uint32_t s)
{
	return __popcll(s < 64 ? heads & ((1ull << s) - 1) : heads);
}

/* Which slots go together; what follows from it can wait. */
__device__ __forceinline__ void step_sort(const struct moe_step &a,
					  struct step_shared &sh, struct step_sorted &o)
{
	const uint32_t n = a.nr_tokens * a.top_k, lane = threadIdx.x % 32;
	const bool more = n > 32;

#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		const uint32_t s = lane + 32 * i;

		o.id[i] = s < n ? __ldcg(&a.ids[s]) : ~0u;
		sh.id[s] = o.id[i];
		/* nobody's: different from all others */
		o.id[i] = s < n ? min(o.id[i], a.nr_experts - 1) : ~0u - s;
	}
	o.heads = 0;
#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		const uint32_t s = lane + 32 * i;
		bool head;

		if (i && !more)
			break;
		o.same[i] = step_same(o.id[0], o.id[1], s, more);
		head = s < n &&
		       __popcll(o.same[i] & ((1ull << s) - 1)) % STEP_TOKENS == 0;
		o.heads |= (uint64_t)__ballot_sync(~0u, head) << 32 * i;
	}
}

/* The expert of tile @tile, which exists. */
__device__ __forceinline__ uint32_t step_expert(const struct step_sorted &o,
						uint32_t tile)
{
	uint64_t heads = o.heads;
	uint32_t s, low, high;

	for (uint32_t i = 0; i < tile; i++)
		heads &= heads - 1;
	s = __ffsll((long long)heads) - 1;
	low = __shfl_sync(~0u, o.id[0], s % 32);
	high = __shfl_sync(~0u, o.id[1], s % 32);
	return s < 32 ? low : high;
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
	sh.expert[tile] = id;
}

/* Tiles by the order of their first slots, for up to 64 slots of up to 32 tokens. */
__device__ __forceinline__ void step_plan(const struct moe_step &a,
					  struct step_shared &sh, struct step_sorted &o)
{
	const uint32_t n = a.nr_tokens * a.top_k, lane = threadIdx.x % 32;
	const uint32_t ahead = min(lane + 2, a.nr_tokens);

	*(uint64_t *)sh.slots[lane] = ~0ull;
	*(uint64_t *)sh.slots[lane + 32] = ~0ull;
	__syncwarp();
#pragma unroll
	for (uint32_t i = 0; i < 2; i++)
		if (lane + 32 * i < n)
			step_place(sh, o.same[i], o.heads, lane + 32 * i, o.id[i],
				   a.top_k);
	o.each = (a.w2.mtiles + step_rows(a) - 1) >> step_log_rows(a);
	o.first = step_tiles(o.heads, lane * a.top_k) * a.w13.mtiles +
		  (lane ? lane - 1 : 0) * o.each;
	o.second = step_tiles(o.heads, ahead * a.top_k) * a.w13.mtiles + lane * o.each;
	if (lane >= a.nr_tokens)
		o.first = o.second = ~0u;
	__syncwarp();
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

/* Unit number @c: FIRSTs of token 0, of 1, SECONDs of 0, FIRSTs of 2, SECONDs of 1 and so on. */
__device__ __forceinline__ struct step_unit
step_decode(const struct moe_step &a, const struct step_sorted &o, uint32_t c)
{
	const uint32_t firsts = __popc(__ballot_sync(~0u, o.first <= c));
	const uint32_t seconds = __popc(__ballot_sync(~0u, o.second <= c));
	struct step_unit u = {STEP_END, seconds - 1, 0, 0};

	if (!seconds || firsts > seconds + 1)
		return step_first(a, c - (firsts < 2 ? 0 : firsts - 2) * o.each);
	u.row = (c - __shfl_sync(~0u, o.second, seconds - 1)) << step_log_rows(a);
	if (u.row >= a.w2.mtiles)
		return u;
	u.type = STEP_SECOND;
	u.nr = (a.top_k * a.w2.kbricks) << step_log_rows(a);
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

/* A row tile's bricks; where they lie one after the other four are a piece. */
template <int G>
__device__ __forceinline__ void
step_stream_first(const struct moe_step &a, uint32_t expert, const struct step_unit &u,
		  struct moe_ring &r, uint64_t policy)
{
	constexpr uint32_t BRICK = step_shape<G>::BRICK;
	const uint32_t piece = a.w13.wl == 1 ? 4 : 1, j = threadIdx.x % 32 * piece;
	const uint8_t *src = step_brick<G>(a.w13, expert, u.row, j);

	for (uint32_t left = u.nr;; left -= STEP_WARPS) {
		const uint32_t n = min(STEP_WARPS, left);

		step_stage<G>(r, j, src, j < n ? min(piece, n - j) * BRICK : 0, n * BRICK,
			      policy);
		if (left <= STEP_WARPS)
			return;
		src += STEP_WARPS * a.w13.wl * BRICK;
	}
}

/* Bricks by (slot, column brick, row tile): neighbouring row tiles' are a piece. Of a last unit
 * some row tiles may not be there. */
template <int G>
__device__ __forceinline__ void
step_stream_second(const struct moe_step &a, const struct step_shared &sh,
		   const struct step_unit &u, struct moe_ring &r, uint64_t policy)
{
	constexpr uint32_t BRICK = step_shape<G>::BRICK;
	const uint32_t log = step_log_rows(a), rows = 1u << log;
	const uint32_t there = min(rows, a.w2.mtiles - u.row);
	const uint32_t piece = a.w2.wl == 1 ? 1 : min(rows, a.w2.wl);
	const uint32_t j = threadIdx.x % 32 * piece, row = j & (rows - 1);

	for (uint32_t at = 0; at < u.nr; at += STEP_WARPS) {
		const uint32_t n = min(STEP_WARPS, u.nr - at);
		const uint32_t all = (at + j) >> log, s = all * a.by_columns >> 16;
		const bool mine = j < n && row < there;
		const uint8_t *src = NULL;

		if (mine)
			src = step_brick<G>(
				a.w2, min(sh.id[u.tile * a.top_k + s], a.nr_experts - 1),
				u.row + row, all - s * a.w2.kbricks);
		step_stage<G>(r, j, src, mine ? min(piece, there - row) * BRICK : 0,
			      (n >> log) * there * BRICK, policy);
	}
}

/* The last CTA leaves the counters at zero and counts the call. When tags begin anew, old
 * packets must go, and not before the consumers have seen all of this call's. */
__device__ __forceinline__ void step_leave(const struct moe_step &a,
					   struct step_shared &sh, uint32_t calls,
					   struct moe_place p)
{
	const uint32_t lane = threadIdx.x % 32;
	const bool wrap = (calls + 1) % STEP_TAGS == 0;
	uint32_t before = 0;

	if (wrap)
		ptx_mbar_wait(ptx_smem(&sh.q_empty[p.q]), p.phase);
	if (lane == 0) {
		__threadfence();
		before = atomicAdd(&a.state[1], 1);
	}
	if (__shfl_sync(~0u, before, 0) != gridDim.x - 1)
		return;
	for (uint32_t i = lane; wrap && i < STEP_VALUES / 2; i += 32)
		a.packets[i] = 0;
	if (lane == 0) {
		a.state[0] = 0;
		a.state[1] = 0;
		a.state[2] = calls + 1;
	}
}

/* A CTA's first unit is its own number. Is it a FIRST, its weights are asked for before anything
 * else is worked out. */
template <int G>
__device__ __forceinline__ bool step_begin(const struct moe_step &a,
					   struct step_shared &sh, struct step_sorted &o,
					   struct moe_ring &r, uint64_t policy)
{
	struct step_unit u = step_first(a, blockIdx.x);

	/* worked out while the kernel before still runs */
	asm volatile("" : "+r"(u.tile), "+r"(u.row), "+r"(u.nr));
	ptx_grid_wait();
	step_sort(a, sh, o);
	if (u.tile >= step_tiles(o.heads, 2 * a.top_k))
		return false;
	step_stream_first<G>(a, step_expert(o, u.tile), u, r, policy);
	return true;
}

/* Claims units, hands them on, streams their weights. */
template <int G>
__device__ __forceinline__ void step_feed(const struct moe_step &a,
					  struct step_shared &sh, struct moe_ring r)
{
	const uint32_t lane = threadIdx.x % 32;
	const uint64_t policy = ptx_policy_stream();
	struct step_sorted o;
	bool begun = step_begin<G>(a, sh, o, r, policy);
	const uint32_t calls = __ldcg(&a.state[2]);
	struct step_unit u;
	struct moe_place p = {};
	uint32_t c = blockIdx.x;

	step_plan(a, sh, o);
	u = step_decode(a, o, c);
	if (lane == 0)
		sh.tag = calls % STEP_TAGS + 1;
	for (;; place_next(p)) {
		ptx_mbar_wait(ptx_smem(&sh.q_empty[p.q]), p.phase ^ 1);
		if (lane == 0)
			sh.unit[p.q] = u;
		__syncwarp(); /* the first time: all that step_plan() wrote */
		if (lane == 0)
			ptx_mbar_arrive(ptx_smem(&sh.q_full[p.q]));
		if (u.type == STEP_END)
			break;
		/* the round trip of the claim hides behind the unit's own weights */
		if (lane == 0)
			c = gridDim.x + atomicAdd(&a.state[0], 1);
		if (u.type == STEP_SECOND)
			step_stream_second<G>(a, sh, u, r, policy);
		else if (!begun)
			step_stream_first<G>(a, sh.expert[u.tile], u, r, policy);
		begun = false;
		c = __shfl_sync(~0u, c, 0);
		u = step_decode(a, o, c);
	}
	step_leave(a, sh, calls, p);
}

#endif /* KVK_MOE_INT4_STEP_CUH */
