/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/lru.h - CACHED pages of a pool, per tenant, least recently used first, leaves first.
 *
 * Two lists per tenant: `leaf` holds pages without an indexed child, `inner` the others.
 * An entry with children is not evicted before them unless no leaf is left. Pages that an
 * operator holds (KVD_FRAME_HELD) are on a third list that nobody takes from. Loop thread
 * only.
 */
#ifndef KVD_LRU_H
#define KVD_LRU_H

#include "kvmd/mm/freelist.h"

/**
 * struct kvd_lru - CACHED pages one tenant pays for in one pool
 */
struct kvd_lru {
	struct kvd_pfn_list leaf;
	struct kvd_pfn_list inner;
	struct kvd_pfn_list held;
};

/** kvd_lru_init() - nothing is CACHED yet */
void kvd_lru_init(struct kvd_lru *lru);

/** kvd_lru_add() - the page became CACHED: newest */
void kvd_lru_add(struct kvd_pool *pool, u32 pfn);

/** kvd_lru_del() - the page is CACHED no more */
void kvd_lru_del(struct kvd_pool *pool, u32 pfn);

/** kvd_lru_child_added() - @parent has one more indexed child */
void kvd_lru_child_added(struct kvd_pool *pool, u32 parent);

/** kvd_lru_child_removed() - @parent has one less; the last one makes it a leaf, as old
 * as its own last use */
void kvd_lru_child_removed(struct kvd_pool *pool, u32 parent);

/** kvd_lru_victim() - page to evict next from @lru, or KVD_PFN_NONE */
u32 kvd_lru_victim(const struct kvd_lru *lru);

/** kvd_lru_nr() - pages that may be evicted */
static inline u32 kvd_lru_nr(const struct kvd_lru *lru)
{
	return lru->leaf.nr + lru->inner.nr;
}

#endif /* KVD_LRU_H */
