/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_plan.cuh - sort a step's slots by expert and cut them into token tiles.
 *
 * One CTA, or many where there are many slots and memory for their counts; also zeroes the
 * counters of the kernel that follows. Slots of an expert keep their order, so every kernel
 * that reads the plan sees the same tiles, whoever made it.
 */
#ifndef KVK_MOE_PLAN_CUH
#define KVK_MOE_PLAN_CUH

#include <stdint.h>

#define MOE_PLAN_THREADS 1024u
#define MOE_PLAN_EXPERTS 512u
#define MOE_PLAN_SHARE	 2048u /* slots a CTA is worth */
#define MOE_PLAN_CTAS	 64u
#define MOE_PLACE_ROW	 29u

/* struct moe_plan - all pointers are device memory; a slot is token * top_k + k */
struct moe_plan {
	const uint32_t *ids; /* [nr_slots] */
	uint32_t nr_slots;
	uint32_t nr_experts;
	uint32_t tile_tokens;
	uint32_t nr_zero;
	uint32_t *zero; /* [nr_zero] words to clear */
	uint32_t even;	/* an expert's tiles are about equal, not full but for the last
			* one; only for tiles of more than 64 */
	uint32_t only_zero; /* the kernel that follows sorts for itself */
	uint32_t *counts;   /* or NULL: [MOE_PLAN_CTAS][nr_experts], until it is done */
	uint32_t *nr_tiles; /* written */
	uint2 *tiles;	    /* expert | tokens << 16, first position in list */
	uint32_t *list;	    /* slots sorted by expert */
	uint32_t *place;    /* or NULL: [slot] its position in list | its number among its
			     * tile's tokens, modulo 8, << MOE_PLACE_ROW (tiles of 8 n tokens) */
};

/* A persistent kernel's unit: row block of a tile. Eight tiles in turn share a row block, so
 * that the tiles of an expert read the same weights at about the same time. */
struct moe_where {
	uint32_t tile, rb;
};

#ifdef __CUDACC__
#define MOE_PLAN_DEV static __device__ __forceinline__
#else
#define MOE_PLAN_DEV static inline
#endif

MOE_PLAN_DEV struct moe_where moe_unit_where(uint32_t u, uint32_t nr_tiles,
					     uint32_t rblocks)
{
	const uint32_t first = u / (8 * rblocks) * 8;
	const uint32_t left = nr_tiles - first < 8 ? nr_tiles - first : 8;
	const uint32_t v = u - first * rblocks;
	const struct moe_where w = {first + v % left, v / left};

	return w;
}

/**
 * moe_plan_launch() - queue what fills a plan: one kernel, or two where many CTAs share the sort
 * @p: nr_slots > 0, at most 2^20; nr_experts at most MOE_PLAN_EXPERTS. ids out of range go to the last
 *	expert: who adds up makes their tokens NaN. only_zero: zero[] is cleared and nothing else written
 * @stream: a cudaStream_t. Each kernel may begin while the one before it still runs, and reads and
 *	writes nothing before that has ended
 *
 * Context: any thread; never allocates, never waits, may be captured. counts may lie where a later
 * kernel of the call writes.
 * Return: 0 or -EIO.
 */
int moe_plan_launch(const struct moe_plan *p, void *stream);

#endif /* KVK_MOE_PLAN_CUH */
