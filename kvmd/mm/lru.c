/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/lru.c - CACHED pages, least recently used first, leaves first. See lru.h.
 *
 * A CACHED page is on `held` if it has that flag, else on `leaf` exactly if it has no
 * indexed child, so the list it is on is known without a mark. Loop thread only.
 */
#include "kvmd/mm/lru.h"
#include "base/mutant.h"
#include "kvmd/mm/pool.h"

/* Steps that a parent may go to find its place by age among the leaves. */
#define PLACE_STEPS 16u

void kvd_lru_init(struct kvd_lru *lru)
{
	kvd_pfn_list_init(&lru->leaf);
	kvd_pfn_list_init(&lru->inner);
	kvd_pfn_list_init(&lru->held);
}

static struct kvd_lru *lru_of(struct kvd_pool *pool, u32 pfn)
{
	const struct kvd_account *acct = pool->mm->accounts[pool->frames[pfn].tenant];

	kv_assert(acct && acct->slot < KVD_DOMAIN_TENANTS_MAX);
	return &pool->lru[acct->slot];
}

static bool is_held(const struct kvd_pool *pool, u32 pfn)
{
	return (pool->frames[pfn].flags & KVD_FRAME_HELD) && !KV_MUTANT(held_evicted);
}

static struct kvd_pfn_list *list_of(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_lru *lru = lru_of(pool, pfn);

	if (is_held(pool, pfn))
		return &lru->held;
	return pool->links[pfn].nr_children ? &lru->inner : &lru->leaf;
}

void kvd_lru_add(struct kvd_pool *pool, u32 pfn)
{
	kv_assert(pool->frames[pfn].state == KVD_CACHED);
	pool->links[pfn].stamp = ++pool->mm->lru_clock;
	/* An extent with a held page cannot be emptied, so that page does not count. */
	pool->extents[kvd_pool_extent_of(pool, pfn)].nr_cached += !is_held(pool, pfn);
	kvd_pfn_list_add_tail(pool->links, list_of(pool, pfn), pfn);
}

void kvd_lru_del(struct kvd_pool *pool, u32 pfn)
{
	pool->extents[kvd_pool_extent_of(pool, pfn)].nr_cached -= !is_held(pool, pfn);
	kvd_pfn_list_del(pool->links, list_of(pool, pfn), pfn);
}

void kvd_lru_child_added(struct kvd_pool *pool, u32 parent)
{
	struct kvd_link *link = &pool->links[parent];
	struct kvd_lru *lru;

	if (pool->frames[parent].state == KVD_CACHED && !link->nr_children &&
	    !is_held(pool, parent)) {
		lru = lru_of(pool, parent);
		kvd_pfn_list_del(pool->links, &lru->leaf, parent);
		kvd_pfn_list_add_tail(pool->links, &lru->inner, parent);
	}
	link->nr_children++;
}

/*
 * A parent that lost its last child is as old as its own last use, which is at least as
 * recent as its child's. It goes near the old end, behind the leaves that are older
 * still.
 */
static void leaf_place(struct kvd_pool *pool, struct kvd_pfn_list *leaf, u32 pfn)
{
	struct kvd_link *links = pool->links;
	u32 at = leaf->head;

	for (u32 i = 0; i < PLACE_STEPS && at != KVD_PFN_NONE; i++) {
		if (links[at].stamp > links[pfn].stamp)
			break;
		at = links[at].next;
	}
	if (at == KVD_PFN_NONE) {
		kvd_pfn_list_add_tail(links, leaf, pfn);
		return;
	}
	if (at == leaf->head) {
		kvd_pfn_list_add_head(links, leaf, pfn);
		return;
	}
	links[pfn].next = at;
	links[pfn].prev = links[at].prev;
	links[links[at].prev].next = pfn;
	links[at].prev = pfn;
	leaf->nr++;
}

void kvd_lru_child_removed(struct kvd_pool *pool, u32 parent)
{
	struct kvd_link *link = &pool->links[parent];
	struct kvd_lru *lru;

	/* An orphan whose parent's pfn came back with the same low half of a generation. */
	if (!link->nr_children)
		return;
	if (pool->frames[parent].state != KVD_CACHED || link->nr_children > 1 ||
	    is_held(pool, parent)) {
		link->nr_children--;
		return;
	}
	lru = lru_of(pool, parent);
	kvd_pfn_list_del(pool->links, &lru->inner, parent);
	link->nr_children = 0;
	leaf_place(pool, &lru->leaf, parent);
}

u32 kvd_lru_victim(const struct kvd_lru *lru)
{
	return lru->leaf.nr ? lru->leaf.head : lru->inner.head;
}
