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

/* The first @nr pages have left; @next was behind them. Their own links are stale. */
static inline void kvd_pfn_list_cut(struct kvd_link *links, struct kvd_pfn_list *l,
				    u32 next, u32 nr)
{
	kv_assert(l->nr >= nr && (next == KVD_PFN_NONE) == (l->nr == nr));
	l->head = next;
	if (next != KVD_PFN_NONE)
		links[next].prev = KVD_PFN_NONE;
	else
		l->tail = KVD_PFN_NONE;
	l->nr -= nr;
}

/* Of FREE pages: clean ones were never given to anybody since their extent was created,
 * used ones may hold bytes of an earlier session. */
enum kvd_free_kind { KVD_FREE_CLEAN, KVD_FREE_USED, KVD_FREE_KINDS };

#define KVD_FILL_BUCKETS 5u
#define KVD_NO_BUCKET	 0xffu
#define KVD_EXTENT_NIL	 0xffffffffu

/**
 * struct kvd_extent_free - FREE pages of one extent; embedded in struct kvd_extent
 * @pages: LIFO: the record, tag and history of the page freed last are still cached
 * @next, @prev: extents in the same bucket; KVD_EXTENT_NIL = none
 * @bucket: where the extent is, per kind; KVD_NO_BUCKET: it has no such page
 */
struct kvd_extent_free {
	struct kvd_pfn_list pages[KVD_FREE_KINDS];
	u32 next[KVD_FREE_KINDS], prev[KVD_FREE_KINDS];
	u8 bucket[KVD_FREE_KINDS];
};

/**
 * struct kvd_freelist - a pool's FREE pages, by how full their extents are
 * @first: first extent of each bucket. Bucket 0: at most a quarter of its pages is FREE,
 *	.. 3: more than three quarters, 4: all of them
 * @nr: FREE pages of each kind
 *
 * Pages go out of the fullest extents, so that the others run empty and can go back to the
 * driver although pages are freed in any order.
 */
struct kvd_freelist {
	u32 first[KVD_FREE_KINDS][KVD_FILL_BUCKETS];
	u32 nr[KVD_FREE_KINDS];
};

/** kvd_freelist_init() - no page is FREE yet */
void kvd_freelist_init(struct kvd_freelist *fl);

/** kvd_extent_free_init() - an extent without FREE pages */
void kvd_extent_free_init(struct kvd_extent_free *ef);

/** kvd_freelist_put() - add a FREE page; of its extent the hottest goes out first */
void kvd_freelist_put(struct kvd_pool *pool, u32 pfn);

/**
 * kvd_freelist_take() - take one page of the fullest extent; the caller has checked that there is one
 * @clean_first: prefer pages that need no zeroing (KV_GFP_ZERO); else used ones go first,
 *	so that untouched memory stays untouched
 */
u32 kvd_freelist_take(struct kvd_pool *pool, bool clean_first);

/**
 * struct kvd_free_run - pages of one extent's list, about to be taken together
 * @index: extent
 * @kind: enum kvd_free_kind
 * @nr: pages
 */
struct kvd_free_run {
	u32 index;
	u32 kind;
	u32 nr;
};

/**
 * kvd_freelist_run() - the pages that kvd_freelist_take() would take next, as many as the fullest
 *	extent has, at most @max
 *
 * The caller has checked that there is a FREE page. It follows links[].next @ret_run->nr
 * times and then calls kvd_freelist_run_taken(); until then the list is as it was.
 *
 * Return: the first of them.
 */
u32 kvd_freelist_run(const struct kvd_pool *pool, bool clean_first, u32 max,
		     struct kvd_free_run *ret_run);

/** kvd_freelist_run_taken() - they are off the list; @next is the one behind the last */
void kvd_freelist_run_taken(struct kvd_pool *pool, const struct kvd_free_run *run,
			    u32 next);

/** kvd_freelist_placed() - pages were put on the lists of extent @index by hand: its place
 * among the extents is made right */
void kvd_freelist_placed(struct kvd_pool *pool, u32 index);

/** kvd_freelist_del() - take a given FREE page off (its extent goes) */
void kvd_freelist_del(struct kvd_pool *pool, u32 pfn);

#endif /* KVD_FREELIST_H */
