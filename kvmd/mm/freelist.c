/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/freelist.c - FREE pages of a pool. See freelist.h.
 *
 * All O(1): an extent changes its bucket only when its share of FREE pages passes a
 * quarter, or its last page of a kind goes or its first one comes. Loop thread only.
 */
#include "kvmd/mm/freelist.h"
#include "base/mutant.h"
#include "kvmd/mm/pool.h"

void kvd_freelist_init(struct kvd_freelist *fl)
{
	for (u32 k = 0; k < KVD_FREE_KINDS; k++) {
		fl->nr[k] = 0;
		for (u32 b = 0; b < KVD_FILL_BUCKETS; b++)
			fl->first[k][b] = KVD_EXTENT_NIL;
	}
}

void kvd_extent_free_init(struct kvd_extent_free *ef)
{
	for (u32 k = 0; k < KVD_FREE_KINDS; k++) {
		kvd_pfn_list_init(&ef->pages[k]);
		ef->next[k] = ef->prev[k] = KVD_EXTENT_NIL;
		ef->bucket[k] = KVD_NO_BUCKET;
	}
}

static u32 bucket_of(const struct kvd_pool *pool, u32 nr_free)
{
	if (KV_MUTANT(any_extent))
		return 0;
	if (nr_free >> pool->geo.shift)
		return KVD_FILL_BUCKETS - 1;
	return nr_free ? (nr_free * 4 - 1) >> pool->geo.shift : 0;
}

static void bucket_leave(struct kvd_pool *pool, u32 index, u32 kind)
{
	struct kvd_extent_free *ef = &pool->extents[index].free;
	u32 next = ef->next[kind], prev = ef->prev[kind];

	if (prev != KVD_EXTENT_NIL)
		pool->extents[prev].free.next[kind] = next;
	else
		pool->free.first[kind][ef->bucket[kind]] = next;
	if (next != KVD_EXTENT_NIL)
		pool->extents[next].free.prev[kind] = prev;
	ef->bucket[kind] = KVD_NO_BUCKET;
}

static void bucket_enter(struct kvd_pool *pool, u32 index, u32 kind, u32 bucket)
{
	struct kvd_extent_free *ef = &pool->extents[index].free;
	u32 first = pool->free.first[kind][bucket];

	ef->bucket[kind] = (u8)bucket;
	ef->prev[kind] = KVD_EXTENT_NIL;
	ef->next[kind] = first;
	if (first != KVD_EXTENT_NIL)
		pool->extents[first].free.prev[kind] = index;
	pool->free.first[kind][bucket] = index;
}

/* nr_free or one of the lists has changed. */
static void extent_place(struct kvd_pool *pool, u32 index)
{
	struct kvd_extent *e = &pool->extents[index];
	u32 bucket = bucket_of(pool, e->nr_free);

	for (u32 k = 0; k < KVD_FREE_KINDS; k++) {
		u32 want = e->free.pages[k].nr ? bucket : KVD_NO_BUCKET;

		if (e->free.bucket[k] == want && !KV_MUTANT(any_extent))
			continue;
		if (e->free.bucket[k] != KVD_NO_BUCKET)
			bucket_leave(pool, index, k);
		if (want != KVD_NO_BUCKET)
			bucket_enter(pool, index, k, want);
	}
}

/* A page nobody was ever given since its extent was created has no owner. */
static u32 kind_of(const struct kvd_pool *pool, u32 pfn)
{
	return pool->frames[pfn].owner ? KVD_FREE_USED : KVD_FREE_CLEAN;
}

void kvd_freelist_put(struct kvd_pool *pool, u32 pfn)
{
	u32 index = kvd_pool_extent_of(pool, pfn), kind = kind_of(pool, pfn);
	struct kvd_extent *e = &pool->extents[index];

	kv_assert(pool->frames[pfn].state == KVD_FREE);
	kvd_pfn_list_add_head(pool->links, &e->free.pages[kind], pfn);
	pool->free.nr[kind]++;
	e->nr_free++;
	kvd_freelist_placed(pool, index);
}

void kvd_freelist_placed(struct kvd_pool *pool, u32 index)
{
	struct kvd_extent *e = &pool->extents[index];

	extent_place(pool, index);
	if (e->nr_free == 1u << pool->geo.shift)
		e->idle_since_ns = pool->mm->now_ns;
}

static u32 fullest(const struct kvd_freelist *fl, u32 kind)
{
	for (u32 b = 0; b < KVD_FILL_BUCKETS; b++) {
		if (fl->first[kind][b] != KVD_EXTENT_NIL)
			return fl->first[kind][b];
	}
	return KVD_EXTENT_NIL;
}

u32 kvd_freelist_run(const struct kvd_pool *pool, bool clean_first, u32 max,
		     struct kvd_free_run *ret_run)
{
	u32 kind = clean_first ? KVD_FREE_CLEAN : KVD_FREE_USED, index;
	const struct kvd_pfn_list *pages;

	if (!pool->free.nr[kind])
		kind = clean_first ? KVD_FREE_USED : KVD_FREE_CLEAN;
	index = fullest(&pool->free, kind);
	kv_assert(index != KVD_EXTENT_NIL);
	pages = &pool->extents[index].free.pages[kind];
	kv_assert(pages->nr && max);
	*ret_run = (struct kvd_free_run){index, kind, KV_MIN(max, pages->nr)};
	return pages->head;
}

void kvd_freelist_run_taken(struct kvd_pool *pool, const struct kvd_free_run *run,
			    u32 next)
{
	struct kvd_extent *e = &pool->extents[run->index];

	kvd_pfn_list_cut(pool->links, &e->free.pages[run->kind], next, run->nr);
	pool->free.nr[run->kind] -= run->nr;
	e->nr_free -= run->nr;
	extent_place(pool, run->index);
}

u32 kvd_freelist_take(struct kvd_pool *pool, bool clean_first)
{
	struct kvd_free_run run;
	u32 pfn = kvd_freelist_run(pool, clean_first, 1, &run);

	kvd_freelist_run_taken(pool, &run, pool->links[pfn].next);
	return pfn;
}

void kvd_freelist_del(struct kvd_pool *pool, u32 pfn)
{
	u32 index = kvd_pool_extent_of(pool, pfn), kind = kind_of(pool, pfn);
	struct kvd_extent *e = &pool->extents[index];

	kv_assert(pool->frames[pfn].state == KVD_FREE);
	kvd_pfn_list_del(pool->links, &e->free.pages[kind], pfn);
	pool->free.nr[kind]--;
	e->nr_free--;
	extent_place(pool, index);
}
