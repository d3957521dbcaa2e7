/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_step.cuh - one persistent kernel for the routed E4M3 experts of a decode step of few
 * tokens, where six kernels one after the other are mostly latency: its work list, and the warp
 * that feeds the others. moe_fp8_step_use.cuh has these.
 *
 * Units are claimed in order from one counter:
 *
 *	FIRST	(token tile, 16 or 32 columns) of h = silu(W1 x) * (W3 x)
 *	SECOND	(row tiles, token) of y, all experts of the token, so that nothing is left to add
 *		up between CTAs
 *
 * TWO: a unit of twice the rows is read in two turns a column block, so that a warp rounds and asks for its
 * tokens once for both, and all meet once for both: consumers are then no longer what a stage waits for.
 * But a unit is twice as long, so this is for steps whose units go up evenly in the CTAs
 * (moe_fp8_step.cu).
 *
 * A CTA is sixteen consumer warps, each with a brick (32 rows, 128 columns: 16 gate and 16 up rows
 * of W13, or 32 of W2) of a stage of sixteen, and a feeding warp that sorts the slots and runs
 * ahead through the units: of one token on a rank of a wide split all of the second product's
 * weights come while h is on its way.
 *
 * h travels as f32 in packets of eight bytes whose other half is a tag that says which call they
 * are of. Who needs them reads until the tag is right; no counter, no fence, no second read.
 * Packets are in memory of their own, which nobody else writes to: a tag cannot be there by
 * chance. A unit waits only for units claimed before it. Who reads h rounds it to e4m3, by
 * the largest of 128 columns, which no CTA has alone; x likewise: that costs each brick some 80
 * instructions of 250, and no kernel is waited for.
 *
 * Products are of f16, exact; each brick's sums, times the scales of its block and of the token,
 * are added in f32.
 */
#ifndef KVK_MOE_FP8_STEP_CUH
#define KVK_MOE_FP8_STEP_CUH

#include <cuda.h>
#include "fp8.h"
#include "moe_fp8_step.h"
#include "moe_loads.h"
#include "moe_step_ptx.cuh"
#include "moe_y.cuh"
#include "wgmma.cuh"

#define F8S_WARPS	   16u	/* consumers */
#define F8S_THREADS	   640u /* a feeding warp, and three that only give up registers */
#define F8S_REGS_USE(TWO)  ((TWO) ? 112 : 104)
#define F8S_REGS_FEED(TWO) ((TWO) ? 32 : 56)
#define F8S_STAGES	   3u
#define F8S_BRICK	   4096u
#define F8S_STAGE	   (F8S_WARPS * F8S_BRICK)
#define F8S_TOKENS	   8u /* of a tile */
#define F8S_QUEUE	   8u /* units the feeding warp may be ahead */
#define F8S_NONE	   0xffu
#define F8S_HALF	   4u	/* tokens whose codes are in a warp's slot at once */
#define F8S_ROW		   192u /* bytes between them there: different banks */
#define F8S_SLOT	   (F8S_HALF * F8S_ROW + 4 * F8S_HALF)
#define F8S_APART	   (F8S_TOKENS / 2) /* tokens between two turns' sums */
#define F8S_TOKEN_SUMS	   36u /* floats; lanes of a quarter hit different banks */
#define F8S_WARP_SUMS	   (F8S_TOKENS * F8S_TOKEN_SUMS)
#define F8S_DYNAMIC	   (F8S_STAGES * F8S_STAGE + 1024u)

static_assert((F8S_REGS_USE(true) - 96) * 512 <= (96 - F8S_REGS_FEED(true)) * 128 &&
		      (F8S_REGS_USE(false) - 96) * 512 <=
			      (96 - F8S_REGS_FEED(false)) * 128,
	      "the CTA's register pool is 96 per thread");

/* struct f8s_args - a launch's kernel parameters; pointers are device memory */
struct f8s_args {
	/* all experts' rows: 128 columns, rows, blocks of columns; boxes of 16 rows and 16 blocks,
	 * of 32 rows and w2_blocks */
	CUtensorMap w13, w2;
	const float *s13, *s2;
	const uint16_t *x; /* [nr_tokens][hidden] bf16 */
	struct moe_y y;
	const uint32_t *ids;  /* [nr_slots] */
	const float *weights; /* [nr_slots] */
	uint32_t *state;      /* units claimed, CTAs that are through, calls so far */
	uint64_t *packets;    /* [slot][inter]: h | tag << 32 */
	uint32_t hidden;
	uint32_t inter;
	uint32_t nr_tokens;
	uint32_t top_k;
	uint32_t nr_experts;
	uint32_t w2_blocks;    /* blocks of columns that a copy brings */
	uint32_t log_rows;     /* row tiles of a SECOND unit: 2^log_rows fill a stage */
	uint32_t log_turns[2]; /* TWO: stages of a column block, of FIRST and SECOND */
	uint32_t by_columns;   /* 65536 / (inter / 128), rounded up */
	uint32_t
		by_tiles; /* 2^32 / FIRST units of a tile and / nr_tokens, rounded up; 0: of 1 */
	uint32_t by_tokens;
	uint32_t any_tag; /* mutant: take what is there */
};

enum f8s_type { F8S_FIRST, F8S_SECOND, F8S_END };

/* struct f8s_unit - @tile: of FIRST; of SECOND the token; @row: first row tile; @nr: bricks */
struct f8s_unit {
	uint32_t type, tile, row, nr;
};

/* Beside what is dynamic: the ring. */
struct f8s_shared {
	uint64_t full[F8S_STAGES], empty[F8S_STAGES];
	uint64_t q_full[F8S_QUEUE], q_empty[F8S_QUEUE];
	uint64_t sums_free; /* of a unit's sums: who reads them is through */
	struct f8s_unit unit[F8S_QUEUE];
	uint32_t tag;
	uint32_t expert[F8S_SLOTS]; /* of a tile */
	uint32_t id[F8S_SLOTS];	    /* of a slot, as it came */
	/* of a tile: slots, and their tokens; F8S_NONE: none */
	uint8_t slots[F8S_SLOTS][F8S_TOKENS];
	alignas(8) uint8_t tokens[F8S_SLOTS][F8S_TOKENS];
	float sums[F8S_WARPS * F8S_WARP_SUMS];
	alignas(16) uint8_t x[F8S_WARPS][F8S_SLOT];
};

/* struct f8s_ring - a warp's place in the ring */
struct f8s_ring {
	uint32_t base; /* shared address of stage 0 */
	uint32_t stage, phase;
};

__device__ __forceinline__ void f8s_next(struct f8s_ring &r)
{
	if (++r.stage == F8S_STAGES) {
		r.stage = 0;
		r.phase ^= 1;
	}
}

/* struct f8s_place - a warp's place in the queue of units */
struct f8s_place {
	uint32_t q, phase;
};

__device__ __forceinline__ void f8s_place_next(struct f8s_place &p)
{
	if (++p.q == F8S_QUEUE) {
		p.q = 0;
		p.phase ^= 1;
	}
}

__device__ __forceinline__ void f8s_prefetch_map(const void *map)
{
	SM90_ASM("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* ----------------------------------------------------------------------------- the plan */

/* struct f8s_rank - how many slots before a slot @s have its expert, and the slot that its tile
 * begins with */
struct f8s_rank {
	uint32_t rank, head;
};

__device__ __forceinline__ struct f8s_rank f8s_count(const struct f8s_args &a,
						     const struct f8s_shared &sh,
						     uint32_t s, uint32_t expert,
						     uint32_t nr)
{
	struct f8s_rank r = {0, s};

#pragma unroll 4
	for (uint32_t j = 0; j < nr; j++) {
		const bool same = j < s && min(sh.id[j], a.nr_experts - 1) == expert;

		if (same && r.rank % F8S_TOKENS == 0)
			r.head = j;
		r.rank += same;
	}
	if (r.rank % F8S_TOKENS == 0)
		r.head = s;
	return r;
}

/* Tiles by the order of their first slots; returns how many. */
__device__ __forceinline__ uint32_t f8s_plan(const struct f8s_args &a,
					     struct f8s_shared &sh)
{
	const uint32_t n = a.nr_tokens * a.top_k, lane = threadIdx.x % 32;
	uint32_t expert[F8S_SLOTS / 32], heads[F8S_SLOTS / 32], nr = 0;
	struct f8s_rank r[F8S_SLOTS / 32];

#pragma unroll
	for (uint32_t i = 0; i < F8S_SLOTS / 32; i++) {
		const uint32_t s = lane + 32 * i;

		expert[i] = s < n ? __ldcg(&a.ids[s]) : ~0u;
		sh.id[s] = expert[i];
		expert[i] = min(expert[i], a.nr_experts - 1);
		*(uint64_t *)sh.tokens[s] = ~0ull;
	}
	__syncwarp();
#pragma unroll
	for (uint32_t i = 0; i < F8S_SLOTS / 32; i++) {
		const uint32_t s = lane + 32 * i;

		heads[i] = 0;
		if (32 * i >= n)
			continue;
		r[i] = f8s_count(a, sh, s, expert[i], min(n, 32 * i + 32));
		heads[i] = __ballot_sync(~0u, s < n && r[i].head == s);
	}
#pragma unroll
	for (uint32_t i = 0; i < F8S_SLOTS / 32; i++) {
		const uint32_t s = lane + 32 * i;
		uint32_t tile = 0;

		if (s >= n)
			continue;
#pragma unroll
		for (uint32_t w = 0; w <= i; w++)
			tile += __popc(r[i].head / 32 > w ? heads[w]
				       : r[i].head / 32 == w
					       ? heads[w] & ((1u << r[i].head % 32) - 1)
					       : 0);
		sh.slots[tile][r[i].rank % F8S_TOKENS] = (uint8_t)s;
		sh.tokens[tile][r[i].rank % F8S_TOKENS] = (uint8_t)(s / a.top_k);
		sh.expert[tile] = expert[i];
	}
	__syncwarp();
#pragma unroll
	for (uint32_t i = 0; i < F8S_SLOTS / 32; i++)
		nr += __popc(heads[i]);
	return nr;
}

/* log2 of the stages of a column block. */
template <bool TWO>
__device__ __forceinline__ uint32_t f8s_log_turns(const struct f8s_args &a, uint32_t type)
{
	return TWO ? a.log_turns[type == F8S_SECOND] : 0;
}

template <bool TWO>
__device__ __forceinline__ struct f8s_unit f8s_decode(const struct f8s_args &a,
						      uint32_t nr_tiles, uint32_t c)
{
	const uint32_t log = f8s_log_turns<TWO>(a, F8S_FIRST);
	const uint32_t per = a.inter / 16 >> log, nr_first = nr_tiles * per;
	struct f8s_unit u = {F8S_FIRST, 0, 0, 0};

	if (c < nr_first) {
		u.tile = __umulhi(c, a.by_tiles);
		u.row = (c - u.tile * per) << log;
		u.nr = a.hidden / 128;
		return u;
	}
	/* tokens of a row tile one after the other: where they share an expert, its weights are
	 * in L2 */
	c -= nr_first;
	u.row = a.by_tokens ? __umulhi(c, a.by_tokens) : c;
	u.tile = c - u.row * a.nr_tokens;
	u.row <<= a.log_rows + f8s_log_turns<TWO>(a, F8S_SECOND);
	u.type = u.row < a.hidden / 32 ? F8S_SECOND : F8S_END;
	if (u.type == F8S_SECOND)
		u.nr = (a.top_k * (a.inter / 128)) << a.log_rows;
	return u;
}

/* Of SECOND: what brick @all >> log_rows of a row tile is: column block @k of slot @s. */
__device__ __forceinline__ void f8s_column(const struct f8s_args &a, uint32_t all,
					   uint32_t &s, uint32_t &k)
{
	s = all * a.by_columns >> 16;
	k = all - s * (a.inter / 128);
}

/* ------------------------------------------------------------------------ feeding warp */

#define F8S_SECTOR 32u /* bytes that come from memory at least */

/* Each @step-th of @at's floats @from .. @n - 1, to L2. */
__device__ __forceinline__ void f8s_prefetch(const float *at, uint32_t n, uint32_t from,
					     uint32_t step)
{
	for (uint32_t i = from; i < n; i += step)
		SM90_ASM("prefetch.global.L2 [%0];" ::"l"(at + i) : "memory");
}

/* The scales of a unit's blocks to L2, before its weights are asked for; a warp. Consumers ask for
 * each brick's a turn ahead, and would get it behind all weights that are under way. */
template <bool TWO>
__device__ __forceinline__ void f8s_scales(const struct f8s_args &a,
					   const struct f8s_shared &sh,
					   const struct f8s_unit &u)
{
	const uint32_t h_blocks = a.inter / 128, x_blocks = a.hidden / 128;
	const uint32_t lane = threadIdx.x % 32, step = F8S_SECTOR / 4;

	if (u.type == F8S_FIRST) {
		const uint64_t row =
			(uint64_t)(sh.expert[u.tile] * 2 + lane / 16) * h_blocks +
			u.row / 8;

		/* every eighth, and the last: a row of scales may begin inside a sector */
		f8s_prefetch(a.s13 + row * x_blocks, x_blocks, lane % 16 * step,
			     16 * step);
		f8s_prefetch(a.s13 + row * x_blocks, lane % 16 ? 0 : x_blocks,
			     x_blocks - 1, step);
		return;
	}
	for (uint32_t s = lane; s < a.top_k; s += 32) {
		const uint64_t expert =
			min(sh.id[u.tile * a.top_k + s], a.nr_experts - 1);
		const uint32_t log = a.log_rows + f8s_log_turns<TWO>(a, F8S_SECOND);
		const uint32_t last = u.row + (1u << log) - 1;

		for (uint32_t b = u.row / 4; b <= min(last / 4, x_blocks - 1); b++) {
			const float *at = a.s2 + (expert * x_blocks + b) * h_blocks;

			f8s_prefetch(at, h_blocks, 0, step);
			f8s_prefetch(at, h_blocks, h_blocks - 1, step);
		}
	}
}

/* A stage of the ring, empty, for @bytes. One lane. */
__device__ __forceinline__ uint32_t f8s_stage(struct f8s_shared &sh,
					      const struct f8s_ring &r, uint32_t bytes)
{
	const uint32_t bar = ptx_smem(&sh.full[r.stage]);

	ptx_mbar_wait(ptx_smem(&sh.empty[r.stage]), r.phase ^ 1);
	ptx_mbar_expect(bar, bytes);
	return bar;
}

/* All bricks of a unit; one lane. */
template <bool TWO>
__device__ __forceinline__ void
f8s_stream_first(const struct f8s_args &a, struct f8s_shared &sh,
		 const struct f8s_unit &u, struct f8s_ring &r)
{
	const uint32_t gate = sh.expert[u.tile] * 2 * a.inter + u.row * 16;
	const uint32_t turns = 1u << f8s_log_turns<TWO>(a, F8S_FIRST);

	for (uint32_t at = 0; at < u.nr; at += F8S_WARPS) {
		for (uint32_t turn = 0; turn < turns; turn++, f8s_next(r)) {
			/* bricks behind the last one come as zeros */
			const uint32_t bar = f8s_stage(sh, r, F8S_STAGE);
			const uint32_t dst = r.base + r.stage * F8S_STAGE;
			const uint32_t row = gate + turn * 16;

			tma_load_4d(dst, &a.w13, bar, 0, (int)row, (int)at, 0);
			tma_load_4d(dst + F8S_STAGE / 2, &a.w13, bar, 0,
				    (int)(row + a.inter), (int)at, 0);
		}
	}
}

/* Bricks @at .. of row tiles @row0 .. of SECOND unit @u: a stage. Of a last unit some row tiles may not
 * be there. */
__device__ __forceinline__ void f8s_stream_rows(const struct f8s_args &a,
						struct f8s_shared &sh,
						const struct f8s_unit &u, uint32_t at,
						uint32_t row0, const struct f8s_ring &r)
{
	const uint32_t rows = 1u << a.log_rows, n = min(F8S_WARPS, u.nr - at);
	const uint32_t there = min(rows, a.hidden / 32 - min(row0, a.hidden / 32));
	const uint32_t *ids = sh.id + u.tile * a.top_k;
	const uint32_t bar = f8s_stage(sh, r, (n >> a.log_rows) * there * F8S_BRICK);
	const uint32_t dst = r.base + r.stage * F8S_STAGE;

	for (uint32_t j = 0; j < n; j += a.w2_blocks) {
		const uint32_t row = j & (rows - 1);
		uint32_t s, k;

		if (row >= there)
			continue;
		f8s_column(a, (at + j) >> a.log_rows, s, k);
		tma_load_4d(dst + j * F8S_BRICK, &a.w2, bar, 0,
			    (int)(min(ids[s], a.nr_experts - 1) * a.hidden +
				  (row0 + row) * 32),
			    (int)k, 0);
	}
}

template <bool TWO>
__device__ __forceinline__ void
f8s_stream_second(const struct f8s_args &a, struct f8s_shared &sh,
		  const struct f8s_unit &u, struct f8s_ring &r)
{
	const uint32_t turns = 1u << f8s_log_turns<TWO>(a, F8S_SECOND);

	for (uint32_t at = 0; at < u.nr; at += F8S_WARPS)
		for (uint32_t turn = 0; turn < turns; turn++, f8s_next(r))
			f8s_stream_rows(a, sh, u, at, u.row + (turn << a.log_rows), r);
}

/* The last CTA leaves the counters at zero and counts the call. When tags begin anew, old
 * packets must go, and not before the consumers have seen all of this call's. */
__device__ __forceinline__ void f8s_leave(const struct f8s_args &a, struct f8s_shared &sh,
					  uint32_t calls, struct f8s_place p)
{
	const uint32_t lane = threadIdx.x % 32;
	const bool wrap = calls + 2 == 0; /* the next tag is 1 again */
	uint32_t before = 0;

	if (wrap)
		ptx_mbar_wait(ptx_smem(&sh.q_empty[p.q]), p.phase);
	if (lane == 0) {
		__threadfence();
		before = atomicAdd(&a.state[1], 1);
	}
	if (__shfl_sync(~0u, before, 0) != gridDim.x - 1)
		return;
	for (uint32_t i = lane; wrap && i < F8S_VALUES; i += 32)
		a.packets[i] = 0;
	if (lane == 0) {
		a.state[0] = 0;
		a.state[1] = 0;
		a.state[2] = wrap ? 0 : calls + 1;
	}
}

/* Claims units, hands them on, streams their weights. A CTA's first one is its own number. */
template <bool TWO>
__device__ __forceinline__ void f8s_feed(const struct f8s_args &a, struct f8s_shared &sh,
					 struct f8s_ring r)
{
	const uint32_t lane = threadIdx.x % 32;
	const uint32_t calls = __ldcg(&a.state[2]);
	const uint32_t nr_tiles = f8s_plan(a, sh);
	struct f8s_unit u = f8s_decode<TWO>(a, nr_tiles, blockIdx.x);
	struct f8s_place p = {};
	uint32_t c = 0;

	if (lane == 0)
		sh.tag = calls + 1;
	for (;; f8s_place_next(p)) {
		ptx_mbar_wait(ptx_smem(&sh.q_empty[p.q]), p.phase ^ 1);
		if (lane == 0)
			sh.unit[p.q] = u;
		__syncwarp(); /* the first time: all that f8s_plan() wrote */
		if (lane == 0)
			ptx_mbar_arrive(ptx_smem(&sh.q_full[p.q]));
		if (u.type == F8S_END)
			break;
		f8s_scales<TWO>(a, sh, u);
		if (lane == 0) {
			/* the claim's round trip hides behind the unit's own weights */
			c = gridDim.x + atomicAdd(&a.state[0], 1);
			if (u.type == F8S_FIRST)
				f8s_stream_first<TWO>(a, sh, u, r);
			else
				f8s_stream_second<TWO>(a, sh, u, r);
		}
		__syncwarp();
		u = f8s_decode<TWO>(a, nr_tiles, __shfl_sync(~0u, c, 0));
	}
	f8s_leave(a, sh, calls, p);
}

#endif /* KVK_MOE_FP8_STEP_CUH */
