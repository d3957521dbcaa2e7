/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/freelist.c - FREE pages of a pool: two LIFO lists, clean and used. See freelist.h.
 *
 * LIFO, because the record, tag and history of the page that was freed last are still in
 * the cache. Loop thread only.
 */
#include "kvmd/mm/freelist.h"
#include "kvmd/mm/pool.h"

void kvd_freelist_init(struct kvd_freelist *fl)
{
	kvd_pfn_list_init(&fl->clean);
	kvd_pfn_list_init(&fl->used);
}

/* A page nobody was ever given since its extent was created has no owner. */
static struct kvd_pfn_list *list_of(struct kvd_pool *pool, u32 pfn)
{
	return pool->frames[pfn].owner ? &pool->free.used : &pool->free.clean;
}

void kvd_freelist_put(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_extent *e = &pool->extents[kvd_pool_extent_of(pool, pfn)];

	kv_assert(pool->frames[pfn].state == KVD_FREE);
	kvd_pfn_list_add_head(pool->links, list_of(pool, pfn), pfn);
	e->nr_free++;
	if (e->nr_free == 1u << pool->geo.shift)
		e->idle_since_ns = pool->mm->now_ns;
}

u32 kvd_freelist_take(struct kvd_pool *pool, bool clean_first)
{
	struct kvd_freelist *fl = &pool->free;
	struct kvd_pfn_list *l = clean_first ? &fl->clean : &fl->used;
	u32 pfn;

	if (!l->nr)
		l = clean_first ? &fl->used : &fl->clean;
	pfn = kvd_pfn_list_pop(pool->links, l);
	kv_assert(pfn != KVD_PFN_NONE);
	pool->extents[kvd_pool_extent_of(pool, pfn)].nr_free--;
	return pfn;
}

void kvd_freelist_del(struct kvd_pool *pool, u32 pfn)
{
	kv_assert(pool->frames[pfn].state == KVD_FREE);
	kvd_pfn_list_del(pool->links, list_of(pool, pfn), pfn);
	pool->extents[kvd_pool_extent_of(pool, pfn)].nr_free--;
}
