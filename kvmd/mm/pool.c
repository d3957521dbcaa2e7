/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/pool.c - pools, and the life of one page: taken, killed, released.   (tour 6/12)
 *
 * Loop thread only.
 */
#include "kvmd/mm/pool.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/mutant.h"

static int region_get(struct kvd_mm *mm, struct kvd_region *r, enum kvd_region_kind kind,
		      u32 pool_id, u64 size_bytes)
{
	memset(r, 0, sizeof(*r));
	r->kind = kind;
	r->pool_id = pool_id;
	r->size_bytes = kv_round_up(size_bytes, 4096);
	r->fd = -1;
	return mm->env->region_alloc(mm->env->arg, r);
}

static void region_put(struct kvd_mm *mm, struct kvd_region *r)
{
	mm->env->region_free(mm->env->arg, r);
	r->addr = NULL;
}

/* Hash heads: a power of two near the number of pages keeps chains short. */
static u32 hash_size(u32 nr_pages)
{
	u32 n = 16;

	while (n < nr_pages)
		n <<= 1;
	return n;
}

static int regions_get(struct kvd_pool *pool)
{
	struct kvd_mm *mm = pool->mm;
	u64 n = pool->geo.nr_pages;
	int r;

	r = region_get(mm, &pool->frames_region, KVD_REGION_FRAMES, pool->id,
		       KVD_FRAMES_OFF + n * sizeof(struct kvd_frame));
	if (r)
		return r;
	r = region_get(mm, &pool->tokens_region, KVD_REGION_TOKENS, pool->id,
		       n * KV_PAGE_TOKENS * sizeof(u32));
	if (r)
		goto put_frames;
	r = region_get(mm, &pool->scratch_region, KVD_REGION_SCRATCH, pool->id,
		       n * sizeof(struct kvd_link) +
			       2 * (u64)hash_size((u32)n) * sizeof(u32));
	if (r)
		goto put_tokens;
	r = region_get(mm, &pool->table_region, KVD_REGION_TABLE, pool->id,
		       kv_table_bytes((u32)n));
	if (r)
		goto put_scratch;
	return 0;
put_scratch:
	region_put(mm, &pool->scratch_region);
put_tokens:
	region_put(mm, &pool->tokens_region);
put_frames:
	region_put(mm, &pool->frames_region);
	return r;
}

static void pool_format(struct kvd_pool *pool, const struct kvd_pool_params *p)
{
	u32 n = pool->geo.nr_pages;

	pool->hdr = pool->frames_region.addr;
	pool->hdr->magic = KVD_FRAMES_MAGIC;
	pool->hdr->version = KVD_FRAMES_VERSION;
	pool->hdr->record_bytes = sizeof(struct kvd_frame);
	pool->hdr->record_off = KVD_FRAMES_OFF;
	pool->hdr->nr_pages = n;
	pool->hdr->pool_id = pool->id;
	pool->hdr->domain_id = pool->domain_id;
	pool->hdr->fingerprint = p->fingerprint;
	pool->hdr->geometry = pool->geo;
	pool->hdr->layout = *p->layout;
	pool->frames = (struct kvd_frame *)((u8 *)pool->hdr + KVD_FRAMES_OFF);
	pool->tokens = pool->tokens_region.addr;
	pool->links = pool->scratch_region.addr;
	pool->hash_heads = (u32 *)(pool->links + n);
	pool->hash_mask = hash_size(n) - 1;
	pool->walk_heads = pool->hash_heads + pool->hash_mask + 1;
	memset(pool->hash_heads, 0xff, 2 * ((u64)pool->hash_mask + 1) * sizeof(u32));
	kvd_table_init(&pool->table, pool->table_region.addr, pool->id, p->fingerprint,
		       pool->mm->table_epoch, n, pool->mm->grace.epoch);
	kvd_freelist_init(&pool->free);
	for (u32 i = 0; i < KVD_DOMAIN_TENANTS_MAX; i++)
		kvd_lru_init(&pool->lru[i]);
	kvd_batch_set_init(&pool->quarantine, pool, NULL, KVD_BATCH_QUARANTINE);
	kvd_batch_set_init(&pool->seals, pool, NULL, KVD_BATCH_SEAL);
	pool->nr[KVD_ABSENT] = n;
	pool->key_bits = KV_KEY_BYTES * 8;
	pool->low_pages = KV_MIN(n / 64, 1024u);
	pool->high_pages = pool->low_pages * 2;
}

static int pool_layout_copy(struct kvd_pool *pool, const struct kvd_pool_params *p)
{
	u64 bytes = (u64)p->layout->nr_scales * sizeof(float);

	pool->layout = *p->layout;
	pool->scales = malloc(bytes ? bytes : 1);
	if (!pool->scales)
		return -ENOMEM;
	if (bytes)
		memcpy(pool->scales, p->scales, bytes);
	return 0;
}

int kvd_pool_create(struct kvd_mm *mm, const struct kvd_pool_params *p,
		    struct kvd_pool **ret_pool)
{
	struct kvd_backend_limits limits = mm->limits;
	struct kvd_pool *pool;
	u32 slot = 0;
	int r;

	while (slot < KVD_POOLS_MAX && mm->pools[slot])
		slot++;
	if (slot == KVD_POOLS_MAX)
		return -ENOSPC;
	pool = calloc(1, sizeof(*pool));
	if (!pool)
		return -ENOMEM;
	pool->mm = mm;
	pool->id = slot + 1;
	pool->domain_id = p->domain_id;
	pool->owner = p->owner;
	pool->group = p->group;
	pool->fingerprint = p->fingerprint;
	if (p->capacity_bytes)
		limits.capacity_bytes = KV_MIN(limits.capacity_bytes, p->capacity_bytes);
	r = kvd_geometry_choose(kv_page_stride(p->layout), &limits, &pool->geo);
	if (r)
		goto free_pool;
	r = pool_layout_copy(pool, p);
	if (r)
		goto free_pool;
	pool->nr_extents = pool->geo.nr_pages >> pool->geo.shift;
	pool->extents = calloc(pool->nr_extents, sizeof(*pool->extents));
	r = -ENOMEM;
	if (!pool->extents)
		goto free_scales;
	r = regions_get(pool);
	if (r)
		goto free_extents;
	pool_format(pool, p);
	mm->pools[slot] = pool;
	*ret_pool = pool;
	return 0;
free_extents:
	free(pool->extents);
free_scales:
	free(pool->scales);
free_pool:
	free(pool);
	return r;
}

void kvd_pool_destroy(struct kvd_pool *pool)
{
	struct kvd_mm *mm = pool->mm;

	kv_assert(kvd_pool_nr_used(pool) == 0);
	for (u32 i = 0; i < pool->nr_extents; i++) {
		if (pool->extents[i].state == KVD_EXTENT_LIVE)
			kv_assert(kvd_extent_shrink(pool, i) == 0);
		kv_assert(pool->extents[i].state == KVD_EXTENT_NONE);
	}
	kv_assert(mm->pools[pool->id - 1] == pool);
	mm->pools[pool->id - 1] = NULL;
	region_put(mm, &pool->table_region);
	region_put(mm, &pool->scratch_region);
	region_put(mm, &pool->tokens_region);
	region_put(mm, &pool->frames_region);
	free(pool->extents);
	free(pool->scales);
	free(pool);
}

u32 kvd_pool_take(struct kvd_pool *pool, u32 state, u16 tenant, u64 session,
		  bool clean_first, bool *ret_dirty)
{
	u32 pfn = kvd_freelist_take(pool, clean_first);
	struct kvd_frame *f = &pool->frames[pfn];
	bool foreign;

	kv_assert(session && f->state == KVD_FREE && f->refs == 0);
	kv_assert(state == KVD_ACTIVE || state == KVD_MAGAZINE);
	/*
	 * Once a page may hold another session's bytes it counts as such until it is
	 * sealed, that is, written from end to end: we do not see whether the engine
	 * zeroed it.
	 */
	foreign = f->owner && f->owner != session;
	if (!KV_MUTANT(dirty_flag_lost))
		foreign |= (f->flags & KVD_FRAME_FOREIGN) != 0;
	f->flags = foreign ? KVD_FRAME_FOREIGN : 0;
	f->owner = session;
	f->tenant = tenant;
	f->refs = 1;
	f->tag = kv_tag_make(kvd_gens_live(&pool->mm->gens), KV_TAG_LIVE);
	kvd_frame_set(pool, pfn, state, state == KVD_ACTIVE ? KVD_EV_ALLOC : KVD_EV_STOCK,
		      session);
	kvd_table_set(&pool->table, pfn, f->tag);
	*ret_dirty = foreign;
	return pfn;
}

void kvd_pool_kill(struct kvd_pool *pool, u32 pfn, u32 event, u64 session)
{
	struct kvd_frame *f = &pool->frames[pfn];

	kv_assert(f->refs == 0 && kv_tag_live(f->tag));
	kv_assert(!(f->flags & KVD_FRAME_INDEXED));
	f->tag = kv_tag_make(kvd_gens_dead(&pool->mm->gens), 0);
	f->flags &= KVD_FRAME_FOREIGN;
	f->parent = KVD_PFN_NONE;
	kvd_frame_set(pool, pfn, KVD_QUARANTINE, event, session);
	kvd_table_set(&pool->table, pfn, f->tag);
	pool->mm->accounts[f->tenant]->quarantine_bytes += pool->geo.stride_bytes;
	if (KV_MUTANT(no_quarantine)) {
		pool->mm->ops->quarantine_done(pool, pfn);
		return;
	}
	kvd_grace_add(&pool->quarantine, pfn);
}

void kvd_pool_release(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_frame *f = &pool->frames[pfn];

	kv_assert(f->state == KVD_QUARANTINE && f->refs == 0 && !kv_tag_live(f->tag));
	pool->mm->accounts[f->tenant]->quarantine_bytes -= pool->geo.stride_bytes;
	kvd_frame_set(pool, pfn, KVD_FREE, KVD_EV_RELEASE, 0);
	kvd_freelist_put(pool, pfn);
}
