/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4.cuh - one persistent kernel for the routed INT4 experts of a layer: its
 * arguments, its shared memory, its work list.
 *
 * Work is a list of units, claimed in order from one counter by whichever CTA is free:
 *
 *	FIRST	(token tile, row block) of h = silu(W1 x) * (W3 x)
 *	SECOND	(token tile, row block) of out[slot] = W2 h; waits for the tile's FIRST
 *	units SUM	(row block, a few tokens) of y = sum_k weight * out; waits for the block's
 *	SECONDs. With many tokens most row blocks are early: their SECONDs come before the others'
 *	and their SUMs among them, while weights go on streaming
 *
 * A unit waits only for units claimed before it, and those never wait for later ones: no
 * deadlock whatever the order in which CTAs run. A token tile is up to 8 NTMAX tokens of
 * one expert; experts without tokens have no tile and cost nothing.
 *
 * A CTA is sixteen consumer warps and four feeding ones around two rings in shared
 *	memory. The weight warp runs ahead through units of all kinds, so the stream never
 *	drains at the end of an expert or of a GEMM. Two token warps take turns: they wait for
 *	what a unit depends on and bring its rows of x or h. The last warp makes finished units
 *	known, so that no consumer ever waits for a fence. Consumers are two groups of eight
 *	that take alternate stages; group 1 hands its sums to group 0 at the end of a unit.
 *
 * Weights are the A operand (rows on M), tokens the narrow N side. Products are exact
 *	(bf16 or f16 times small integers), sums f32, the group's scale multiplies the group's
 *	sum. h is f16 with a power of two per slot and 128 columns (or f32 where warps split the
 * columns): no overflow, no loss to bf16 rounding.
 */
#ifndef KVK_MOE_INT4_CUH
#define KVK_MOE_INT4_CUH

#include "moe_pack.h"
#include "moe_ptx.cuh"
#include "moe_y.cuh"

#define MOE_GROUP     8u /* consumer warps of a group */
#define MOE_CONSUMERS 16u
#define MOE_THREADS   640u
#define MOE_QUEUE     8u /* units the feeders may be ahead */
#define MOE_SMEM      (226u * 1024u)
#define MOE_INLINE    256u    /* slots that every CTA sorts for itself */
#define MOE_H_BRICK   272u    /* 128 f16 and their f32 scale, padded */
#define MOE_H_HIGH    0.0625f /* columns whose nibble is taken as 16 q */
#define MOE_REGS_USE  104     /* what group 0 and 1 gain, the feeding warps give up */
#define MOE_REGS_FEED 56

static_assert((MOE_REGS_USE - 96) * 512 <= (96 - MOE_REGS_FEED) * 128,
	      "the CTA's register pool is 96 per thread");

enum moe_unit_type { MOE_FIRST, MOE_SECOND, MOE_SUM, MOE_END };

/* How a product reads its tokens: x bf16; h f16 with block scales; h f32 */
enum moe_mode { MOE_X, MOE_H16, MOE_H32 };

/* struct moe_mat - a packed matrix of all experts */
struct moe_mat {
	const uint8_t *base;
	uint64_t expert_bytes;
	uint32_t mtiles;
	uint32_t kbricks;
	uint32_t wl;
	uint32_t rblocks; /* row blocks of 32 * WM * rsub rows */
	uint32_t rsub; /* parts of a row block that share its tokens in shared memory */
};

/* struct moe_i4 - argument block; all pointers are device memory */
struct moe_i4 {
	struct moe_mat w13;
	struct moe_mat w2;
	const uint16_t *x; /* [nr_tokens][hidden] bf16 */
	struct moe_y y;
	const uint32_t *ids;  /* [nr_slots] */
	const float *weights; /* [nr_slots] */
	uint32_t *claim;      /* units claimed beyond the CTAs' first ones */
	uint32_t *exits;    /* CTAs that are through; the last one clears the counters */
	uint32_t *nr_tiles; /* this and the next two: written by the plan kernel */
	const uint2 *tiles; /* expert | tokens << 16, first position in list */
	const uint32_t *list; /* slots sorted by expert */
	uint32_t *done1;      /* [tile] FIRST units finished */
	uint32_t *done2;      /* [w2.rblocks] SECOND units finished */
	uint32_t *amax;	      /* [slot] bits of the largest |h|; MOE_H32 only */
	uint8_t *h;	      /* [slot][inter / 128][MOE_H_BRICK] or f32 [slot][inter] */
	uint16_t *out;	      /* [slot][hidden] f16, in the order of store_out() */
	float *out_scale;     /* [slot][hidden / 32] */
	uint32_t hidden;
	uint32_t inter;
	uint32_t nr_tokens;
	uint32_t top_k;
	uint32_t nr_experts;
	uint32_t sum_toks;   /* tokens of a SUM unit */
	uint32_t sum_chunks; /* SUM units of a row block */
	uint32_t
		early; /* row blocks whose SECONDs come first and whose SUMs do not come last */
	uint32_t scale_f16;
	uint32_t own_plan;   /* few slots: each CTA sorts them itself */
	uint32_t nr_clear;   /* words to clear from claim on; 0: a kernel before did it */
	uint32_t loads_only; /* bench: stream everything, multiply nothing */
};

/* struct i4_variant - which kernel; follows from shapes and the number of tokens alone */
struct i4_variant {
	uint32_t ntmax; /* tiles of 8 tokens */
	uint32_t wk;	/* warps that split the columns of the first product */
	uint32_t rsub;	/* row blocks of the second product in a unit */
};

/* One per group size, each in its own file: they take long to compile. 0 or -EIO. */
int moe_i4_launch_g32(struct moe_i4 *k, const struct i4_variant *v, void *stream);
int moe_i4_launch_g64(struct moe_i4 *k, const struct i4_variant *v, void *stream);
int moe_i4_launch_g128(struct moe_i4 *k, const struct i4_variant *v, void *stream);

struct moe_unit {
	uint32_t type, tile, rb, expert, start, n, pad[2];
};

template <int NTMAX> struct moe_shared {
	uint64_t full[12], empty[12]; /* weight ring */
	uint64_t xfull[4], xempty[4]; /* token ring */
	uint64_t turn[2];	      /* of the token warps, to use their ring */
	uint64_t q_full[MOE_QUEUE];   /* unit written by the weight warp */
	uint64_t q_ready[MOE_QUEUE];  /* slots written by a token warp */
	uint64_t q_done[MOE_QUEUE];   /* results stored */
	uint64_t q_empty[MOE_QUEUE];  /* everybody is through */
	struct moe_unit unit[MOE_QUEUE];
	uint32_t slot[MOE_QUEUE][8 * NTMAX];
	uint32_t amax[MOE_QUEUE][8 * NTMAX];
	float inv[MOE_QUEUE][8 * NTMAX];
	uint2 tiles[MOE_INLINE]; /* own_plan */
	uint32_t list[MOE_INLINE];
	alignas(16) uint32_t ids[MOE_INLINE];
	uint32_t heads[MOE_INLINE / 32];
	uint32_t nr_tiles;
	uint32_t begun; /* column bricks of the first unit that are on their way */
};

/* Sizes that follow from the template arguments. Token rows are padded to 64 mod 128
 * bytes (f32: 16) so that the lanes of a quarter warp hit different banks. */
template <int NTMAX, int WK, int G> struct moe_shape {
	static constexpr uint32_t WM = MOE_GROUP / WK;
	static constexpr uint32_t NTOK = 8 * NTMAX;
	static constexpr uint32_t BRICK = KVK_BRICK_NIBBLES + 64u * (KVK_BRICK_COLS / G);
	static constexpr uint32_t STAGE = 8u * BRICK;
	/* bricks of columns in a chunk of the token ring */
	static constexpr uint32_t XC1 = WK > 1 ? 8 : NTMAX == 1 ? 6 : 4;
	/* tiles of up to 2 and 4 tokens with 4 and 2 scale groups, or shares of one, side by
	 * side (moe_int4_few.cuh); each one is code to fetch */
	static constexpr bool SETS_4 = NTMAX == 1;
	static constexpr bool SETS_2 = NTMAX <= 2;
	static constexpr uint32_t XC2 = WK > 1 ? 2 : XC1;
	static constexpr enum moe_mode MODE2 = WK > 1 ? MOE_H32 : MOE_H16;
	static constexpr uint32_t H_STEP = WK > 1 ? 512u : MOE_H_BRICK;
	static constexpr uint32_t XROW1 = XC1 * 256u + 64u;
	static constexpr uint32_t
		XROW2 = WK > 1 ? XC2 * 512u + 16u
			       : (XC2 *MOE_H_BRICK + 63u) / 128u * 128u + 64u;
	static constexpr uint32_t CHUNK = NTOK * (XROW1 > XROW2 ? XROW1 : XROW2);
	static constexpr uint32_t CHUNKS = WK > 1 ? 3 : 2;
	/* many rows: by the copy engine, which needs a fence; few: by the warp, at once
	 */
	static constexpr bool BULK = NTMAX == 4;
	static constexpr uint32_t RED = (WK > 1 ? 16u : 8u) * 1024u * NTMAX;
	static constexpr uint32_t FIT =
		(MOE_SMEM - RED - CHUNKS * CHUNK -
		 (uint32_t)sizeof(struct moe_shared<NTMAX>) - 256u) /
		STAGE;
	/* even: a slot of the ring always belongs to the same consumer group, which so
	 * sees each of its phases (copies may complete out of order) */
	static constexpr uint32_t STAGES = (FIT > 12u ? 12u : FIT) / 2u * 2u;
	static constexpr uint32_t DYNAMIC = STAGES * STAGE + CHUNKS * CHUNK + RED + 128u;
};

/* struct moe_ring - a warp's place in one of the rings */
struct moe_ring {
	uint32_t base; /* shared address of stage 0 */
	uint32_t full, empty;
	uint32_t stage, phase;
};

template <uint32_t STAGES> __device__ __forceinline__ void ring_next(struct moe_ring &r)
{
	if (++r.stage == STAGES) {
		r.stage = 0;
		r.phase ^= 1;
	}
}

/* @n stages on; n <= STAGES */
template <uint32_t STAGES>
__device__ __forceinline__ void ring_skip(struct moe_ring &r, uint32_t n)
{
	r.stage += n;
	if (r.stage >= STAGES) {
		r.stage -= STAGES;
		r.phase ^= 1;
	}
}

/* struct moe_place - a warp's place in the unit queue */
struct moe_place {
	uint32_t q, phase;
};

__device__ __forceinline__ void place_next(struct moe_place &p)
{
	if (++p.q == MOE_QUEUE) {
		p.q = 0;
		p.phase ^= 1;
	}
}

/* Unit number @c of the list, as the counter gave it. */
template <int NTMAX>
__device__ __forceinline__ struct moe_unit
unit_decode(const struct moe_i4 &a, const struct moe_shared<NTMAX> &sh, uint32_t c)
{
	struct moe_unit u = {};
	const uint32_t nr_first = sh.nr_tiles * a.w13.rblocks;
	const uint32_t late = a.w2.rblocks - a.early;
	/* SECONDs, and how many come before the early SUMs */
	const uint32_t nr_early = sh.nr_tiles * a.early, nr_late = sh.nr_tiles * late;
	const uint32_t before = nr_early + nr_late / 2, sums = a.early * a.sum_chunks;
	uint2 tile;

	u.type = c < nr_first ? MOE_FIRST : MOE_SECOND;
	if (c < nr_first) {
		u.tile = c / a.w13.rblocks;
		u.rb = c % a.w13.rblocks;
	} else if (c -= nr_first; c - before < sums) {
		u.type = MOE_SUM;
		u.rb = (c - before) % a.early;
		u.tile = (c - before) / a.early;
	} else {
		c -= c < before ? 0 : sums;
		if (c < nr_early) {
			u.tile = c / a.early;
			u.rb = c % a.early;
		} else if (c -= nr_early; c < nr_late) {
			u.tile = c / late;
			u.rb = a.early + c % late;
		} else {
			c -= nr_late;
			u.type = c < late * a.sum_chunks ? MOE_SUM : MOE_END;
			u.rb = a.early + c % late;
			u.tile = c / late;
		}
	}
	if (u.type >= MOE_SUM)
		return u;
	tile = a.own_plan ? sh.tiles[u.tile] : __ldcg(&a.tiles[u.tile]);
	u.expert = tile.x & 0xffffu;
	u.n = tile.x >> 16;
	u.start = tile.y;
	return u;
}

/* Sort up to MOE_INLINE slots by expert in shared memory: a slot's place is the number of
 * smaller (expert, slot) pairs. Same result as the plan kernel. */
template <int NTMAX>
__device__ __forceinline__ void own_plan(const struct moe_i4 &a,
					 struct moe_shared<NTMAX> &sh)
{
	constexpr uint32_t NTOK = 8 * NTMAX;
	const uint32_t n = a.nr_tokens * a.top_k, i = threadIdx.x;
	uint32_t less = 0, rank = 0, equal = 0, id = 0, pos;
	bool head;

	if (i < MOE_INLINE / 32)
		sh.heads[i] = 0;
	if (i < n)
		id = min(a.ids[i], a.nr_experts - 1);
	if (i < (n + 3) / 4 * 4)
		sh.ids[i] = i < n ? id : ~0u;
	__syncthreads();
#pragma unroll 4
	for (uint32_t j = 0; j < n && i < n; j += 4) {
		const uint4 v = *(const uint4 *)&sh.ids[j];
		const uint32_t o[4] = {v.x, v.y, v.z, v.w};

		for (uint32_t k = 0; k < 4; k++) {
			less += o[k] < id;
			equal += o[k] == id;
			rank += o[k] == id && j + k < i;
		}
	}
	pos = less + rank;
	head = i < n && rank % NTOK == 0;
	if (i < n)
		sh.list[pos] = i;
	if (head)
		atomicOr(&sh.heads[pos / 32], 1u << pos % 32);
	__syncthreads();
	if (head) {
		uint32_t tile = __popc(sh.heads[pos / 32] & ((1u << pos % 32) - 1));

		for (uint32_t w = 0; w < pos / 32; w++)
			tile += __popc(sh.heads[w]);
		sh.tiles[tile] = make_uint2(id | min(NTOK, equal - rank) << 16, pos);
	}
	if (i == 0) {
		uint32_t tiles = 0;

		for (uint32_t w = 0; w < MOE_INLINE / 32; w++)
			tiles += __popc(sh.heads[w]);
		sh.nr_tiles = tiles;
	}
	__syncthreads();
}

#endif /* KVK_MOE_INT4_CUH */
