/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_plan.cuh - sort a step's slots by expert and cut them into token tiles.
 *
 * One CTA; also zeroes the counters of the kernel that follows. Slots of an expert keep
 * their order, so every kernel that reads the plan sees the same tiles.
 */
#ifndef KVK_MOE_PLAN_CUH
#define KVK_MOE_PLAN_CUH

#include <stdint.h>

#define MOE_PLAN_THREADS 1024u
#define MOE_PLAN_EXPERTS 512u

/* struct moe_plan - all pointers are device memory; a slot is token * top_k + k */
struct moe_plan {
	const uint32_t *ids; /* [nr_slots] */
	uint32_t nr_slots;
	uint32_t nr_experts;
	uint32_t tile_tokens;
	uint32_t nr_zero;
	uint32_t *zero; /* [nr_zero] words to clear */
	uint32_t
		even; /* an expert's tiles are about equal, not full but for the last one; only
			* for tiles of 128 */
	uint32_t only_zero; /* the kernel that follows sorts for itself */
	uint32_t *nr_tiles; /* written */
	uint2 *tiles;	    /* expert | tokens << 16, first position in list */
	uint32_t *list;	    /* slots sorted by expert */
};

int moe_plan_launch(const struct moe_plan *p, void *stream);

#endif /* KVK_MOE_PLAN_CUH */
