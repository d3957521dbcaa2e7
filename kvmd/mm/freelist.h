/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/freelist.h - lists of pages by pfn: O(1) add, take, remove; no scan, no allocation.
 *
 * Links are pfns in the pool's kvd_link array. A frame is on at most one list. Also used
 * for LRU lists, quarantine and seal batches.
 */
#ifndef KVD_FREELIST_H
#define KVD_FREELIST_H

#include "kvmd/mm/page.h"

/**
 * struct kvd_pfn_list - doubly linked list of pages
 * @head, @tail: KVD_PFN_NONE when empty
 * @nr: pages on it
 */
struct kvd_pfn_list {
	u32 head;
	u32 tail;
	u32 nr;
};

static inline void kvd_pfn_list_init(struct kvd_pfn_list *l)
{
	l->head = KVD_PFN_NONE;
	l->tail = KVD_PFN_NONE;
	l->nr = 0;
}

static inline void kvd_pfn_list_add_head(struct kvd_link *links, struct kvd_pfn_list *l,
					 u32 pfn)
{
	links[pfn].prev = KVD_PFN_NONE;
	links[pfn].next = l->head;
	if (l->head != KVD_PFN_NONE)
		links[l->head].prev = pfn;
	else
		l->tail = pfn;
	l->head = pfn;
	l->nr++;
}

static inline void kvd_pfn_list_add_tail(struct kvd_link *links, struct kvd_pfn_list *l,
					 u32 pfn)
{
	links[pfn].next = KVD_PFN_NONE;
	links[pfn].prev = l->tail;
	if (l->tail != KVD_PFN_NONE)
		links[l->tail].next = pfn;
	else
		l->head = pfn;
	l->tail = pfn;
	l->nr++;
}

static inline void kvd_pfn_list_del(struct kvd_link *links, struct kvd_pfn_list *l,
				    u32 pfn)
{
	u32 next = links[pfn].next, prev = links[pfn].prev;

	kv_assert(l->nr > 0);
	if (prev != KVD_PFN_NONE)
		links[prev].next = next;
	else
		l->head = next;
	if (next != KVD_PFN_NONE)
		links[next].prev = prev;
	else
		l->tail = prev;
	links[pfn].next = KVD_PFN_NONE;
	links[pfn].prev = KVD_PFN_NONE;
	l->nr--;
}

static inline u32 kvd_pfn_list_pop(struct kvd_link *links, struct kvd_pfn_list *l)
{
	u32 pfn = l->head;

	if (pfn != KVD_PFN_NONE)
		kvd_pfn_list_del(links, l, pfn);
	return pfn;
}

/**
 * struct kvd_freelist - a pool's FREE pages
 * @clean: never given to anybody since their extent was created
 * @used: may hold bytes of an earlier session
 */
struct kvd_freelist {
	struct kvd_pfn_list clean;
	struct kvd_pfn_list used;
};

/** kvd_freelist_init() - no page is FREE yet */
void kvd_freelist_init(struct kvd_freelist *fl);

/** kvd_freelist_put() - add a FREE page; the hottest goes out first */
void kvd_freelist_put(struct kvd_pool *pool, u32 pfn);

/**
 * kvd_freelist_take() - take one page; the caller has checked that there is one
 * @clean_first: prefer pages that need no zeroing (KV_GFP_ZERO); else used ones go first,
 *	so that untouched memory stays untouched
 */
u32 kvd_freelist_take(struct kvd_pool *pool, bool clean_first);

/** kvd_freelist_del() - take a given FREE page off (its extent goes) */
void kvd_freelist_del(struct kvd_pool *pool, u32 pfn);

#endif /* KVD_FREELIST_H */
