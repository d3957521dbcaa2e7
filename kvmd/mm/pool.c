/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/pool.c - pools, and the end of a page: killed, released.
 *
 * Loop thread only.
 */
#include "kvmd/mm/pool.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/mutant.h"
#include "kvmd/mm/audit.h"
#include "kvmd/mm/change.h"

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

static u64 extents_off(const struct kvd_pool *pool)
{
	return KVD_FRAMES_OFF + pool->geo.nr_pages * sizeof(struct kvd_frame);
}

static u64 scales_off(const struct kvd_pool *pool)
{
	return extents_off(pool) + pool->nr_extents * sizeof(u64);
}

static u64 frames_bytes(const struct kvd_pool *pool)
{
	return kv_round_up(scales_off(pool) + pool->layout.nr_scales * sizeof(float),
			   4096);
}

/* What is made anew after a restart. */
static int volatile_get(struct kvd_pool *pool)
{
	u64 n = pool->geo.nr_pages;
	int r;

	r = region_get(pool->mm, &pool->scratch_region, KVD_REGION_SCRATCH, pool->id,
		       n * sizeof(struct kvd_link) +
			       2 * (u64)hash_size((u32)n) * sizeof(u32));
	if (r)
		return r;
	r = region_get(pool->mm, &pool->table_region, KVD_REGION_TABLE, pool->id,
		       kv_table_bytes((u32)n));
	if (r)
		region_put(pool->mm, &pool->scratch_region);
	return r;
}

static int regions_get(struct kvd_pool *pool)
{
	struct kvd_mm *mm = pool->mm;
	u64 n = pool->geo.nr_pages;
	int r;

	r = region_get(mm, &pool->frames_region, KVD_REGION_FRAMES, pool->id,
		       frames_bytes(pool));
	if (r)
		return r;
	r = region_get(mm, &pool->tokens_region, KVD_REGION_TOKENS, pool->id,
		       n * KV_PAGE_TOKENS * sizeof(u32));
	if (r)
		goto put_frames;
	r = volatile_get(pool);
	if (!r)
		return 0;
	region_put(mm, &pool->tokens_region);
put_frames:
	region_put(mm, &pool->frames_region);
	return r;
}

/* The head comes last: without its magic a half-made pool is none. */
static void hdr_format(struct kvd_pool *pool)
{
	struct kvd_frames_hdr *hdr = pool->frames_region.addr;

	hdr->version = KVD_FRAMES_VERSION;
	hdr->record_bytes = sizeof(struct kvd_frame);
	hdr->record_off = KVD_FRAMES_OFF;
	hdr->nr_pages = pool->geo.nr_pages;
	hdr->pool_id = pool->id;
	hdr->domain_id = pool->domain_id;
	hdr->fingerprint = pool->fingerprint;
	hdr->geometry = pool->geo;
	hdr->layout = pool->layout;
	hdr->extents_off = extents_off(pool);
	hdr->scales_off = scales_off(pool);
	if (pool->layout.nr_scales)
		memcpy((u8 *)hdr + hdr->scales_off, pool->scales,
		       pool->layout.nr_scales * sizeof(float));
	hdr->magic = KVD_FRAMES_MAGIC;
	hdr->check = kvd_check_bytes(hdr, offsetof(struct kvd_frames_hdr, check));
}

static void pool_setup(struct kvd_pool *pool)
{
	u32 n = pool->geo.nr_pages;

	pool->hdr = pool->frames_region.addr;
	pool->frames = (struct kvd_frame *)((u8 *)pool->hdr + KVD_FRAMES_OFF);
	pool->extent_words = (u64 *)((u8 *)pool->hdr + extents_off(pool));
	pool->tokens = pool->tokens_region.addr;
	pool->links = pool->scratch_region.addr;
	pool->hash_heads = (u32 *)(pool->links + n);
	pool->hash_mask = hash_size(n) - 1;
	pool->walk_heads = pool->hash_heads + pool->hash_mask + 1;
	memset(pool->hash_heads, 0xff, 2 * ((u64)pool->hash_mask + 1) * sizeof(u32));
	kvd_table_init(&pool->table, pool->table_region.addr, pool->id, pool->fingerprint,
		       pool->mm->table_epoch, n, pool->mm->grace.epoch);
	kvd_freelist_init(&pool->free);
	for (u32 i = 0; i < KVD_DOMAIN_TENANTS_MAX; i++)
		kvd_lru_init(&pool->lru[i]);
	kvd_batch_set_init(&pool->quarantine, pool, NULL, KVD_BATCH_QUARANTINE);
	kvd_batch_set_init(&pool->seals, pool, NULL, KVD_BATCH_SEAL);
	pool->key_bits = KV_KEY_BYTES * 8;
	pool->low_pages = KV_MIN(n / 64, 1024u);
	pool->high_pages = pool->low_pages * 2;
}

static int pool_layout_copy(struct kvd_pool *pool, const struct kv_layout *layout,
			    const float *scales)
{
	u64 bytes = (u64)layout->nr_scales * sizeof(float);

	pool->layout = *layout;
	pool->scales = malloc(bytes ? bytes : 1);
	if (!pool->scales)
		return -ENOMEM;
	if (bytes)
		memcpy(pool->scales, scales, bytes);
	return 0;
}

/*
 * A pool may be left out by an adopting kvmd for damage and made anew under the same id,
 * while clients have its old extents mapped: serials differ by a number that every
 * restart raises (generations start 2^32 further on).
 */
static u64 first_serial(const struct kvd_mm *mm)
{
	if (KV_MUTANT(serial_repeat))
		return 0;
	return (mm->gens.source->next >> 32 & 0xffffff) << 18;
}

static struct kvd_extent *extents_new(u32 nr)
{
	struct kvd_extent *e = calloc(nr, sizeof(*e));

	for (u32 i = 0; e && i < nr; i++)
		kvd_extent_free_init(&e[i].free);
	return e;
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
	r = pool_layout_copy(pool, p->layout, p->scales);
	if (r)
		goto free_pool;
	pool->nr_extents = pool->geo.nr_pages >> pool->geo.shift;
	pool->extents = extents_new(pool->nr_extents);
	r = -ENOMEM;
	if (!pool->extents)
		goto free_scales;
	r = regions_get(pool);
	if (r)
		goto free_extents;
	pool_setup(pool);
	pool->nr[KVD_ABSENT] = pool->geo.nr_pages;
	pool->next_serial = first_serial(mm);
	hdr_format(pool);
	mm->pools[slot] = pool;
	mm->pools_end = KV_MAX(mm->pools_end, slot + 1);
	if (mm->recount)
		mm->recount->stale = true;
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

static bool hdr_whole(const struct kvd_region *r, u32 id)
{
	const struct kvd_frames_hdr *hdr = r->addr;

	return r->size_bytes >= KVD_FRAMES_OFF && hdr->magic == KVD_FRAMES_MAGIC &&
	       hdr->check ==
		       kvd_check_bytes(hdr, offsetof(struct kvd_frames_hdr, check)) &&
	       hdr->version == KVD_FRAMES_VERSION && hdr->pool_id == id &&
	       hdr->record_bytes == sizeof(struct kvd_frame) &&
	       hdr->record_off == KVD_FRAMES_OFF &&
	       hdr->nr_pages == hdr->geometry.nr_pages && hdr->geometry.shift < 32;
}

int kvd_pool_domain(const struct kvd_region *frames, u32 id)
{
	const struct kvd_frames_hdr *hdr = frames->addr;

	return hdr_whole(frames, id) ? (int)hdr->domain_id : -1;
}

int kvd_pool_adopt(struct kvd_mm *mm, u32 id, void *owner, struct kvd_reader_group *group,
		   const struct kvd_region *frames, const struct kvd_region *tokens,
		   bool *ret_damage, struct kvd_pool **ret_pool)
{
	const struct kvd_frames_hdr *hdr = frames->addr;
	struct kvd_pool *pool;
	int r = -EBADMSG;

	*ret_damage = frames->size_bytes < KVD_FRAMES_OFF || hdr->magic;
	if (!hdr_whole(frames, id) || mm->pools[id - 1])
		return r;
	pool = calloc(1, sizeof(*pool));
	if (!pool)
		return -ENOMEM;
	pool->mm = mm;
	pool->id = id;
	pool->domain_id = hdr->domain_id;
	pool->owner = owner;
	pool->group = group;
	pool->fingerprint = hdr->fingerprint;
	pool->geo = hdr->geometry;
	pool->layout = hdr->layout;
	pool->nr_extents = pool->geo.nr_pages >> pool->geo.shift;
	if (frames->size_bytes < frames_bytes(pool) ||
	    tokens->size_bytes < (u64)pool->geo.nr_pages * KV_PAGE_TOKENS * sizeof(u32) ||
	    hdr->extents_off != extents_off(pool) || hdr->scales_off != scales_off(pool))
		goto free_pool;
	r = pool_layout_copy(pool, &hdr->layout,
			     (const float *)((const u8 *)hdr + hdr->scales_off));
	if (r)
		goto free_pool;
	r = -ENOMEM;
	pool->extents = extents_new(pool->nr_extents);
	if (!pool->extents)
		goto free_scales;
	r = volatile_get(pool);
	if (r)
		goto free_extents;
	pool->frames_region = *frames;
	pool->tokens_region = *tokens;
	pool_setup(pool);
	mm->pools[id - 1] = pool;
	mm->pools_end = KV_MAX(mm->pools_end, id);
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

void kvd_pool_count(const struct kvd_pool *pool, struct kvd_pool_counters *sum)
{
	sum->nr_lookups += pool->nr_lookups;
	sum->nr_hits += pool->nr_hits;
	sum->nr_allocs += pool->nr_allocs;
	sum->nr_frees += pool->nr_frees;
	sum->nr_evictions += pool->nr_evictions;
	sum->nr_seals += pool->nr_seals;
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
	if (mm->recount)
		mm->recount->stale = true;
	while (mm->pools_end && !mm->pools[mm->pools_end - 1])
		mm->pools_end--;
	kvd_pool_count(pool, &mm->gone_counters);
	pool->hdr->magic = 0;
	kvd_crash_point();
	region_put(mm, &pool->table_region);
	region_put(mm, &pool->scratch_region);
	region_put(mm, &pool->tokens_region);
	region_put(mm, &pool->frames_region);
	free(pool->extents);
	free(pool->scales);
	free(pool);
}

void kvd_pool_kill(struct kvd_pool *pool, u32 pfn, u32 event, u64 session)
{
	struct kvd_frame *f = &pool->frames[pfn];

	kv_assert(f->refs == 0 && kv_tag_live(f->tag));
	kv_assert(!(f->flags & KVD_FRAME_INDEXED));
	kvd_frame_touch(pool, pfn);
	f->tag = kv_tag_make(kvd_gens_dead(&pool->mm->gens), 0);
	f->flags &= KVD_FRAME_FOREIGN;
	f->parent = KVD_PFN_NONE;
	kvd_frame_set(pool, pfn, KVD_QUARANTINE, event, session);
	kvd_table_set(&pool->table, pfn, f->tag);
	pool->mm->accounts[f->tenant]->quarantine_bytes += pool->geo.stride_bytes;
	if (KV_MUTANT(no_quarantine)) {
		struct kvd_pfn_list page = {KVD_PFN_NONE, KVD_PFN_NONE, 0};

		kvd_pfn_list_add_tail(pool->links, &page, pfn);
		kvd_pool_release(pool, &page, 1);
		return;
	}
	kvd_grace_add(&pool->quarantine, pfn);
}

/* What is counted once for a run of pages of one tenant and one extent. */
struct release_run {
	u32 tenant, index, nr;
};

static void run_end(struct kvd_pool *pool, struct release_run *run)
{
	if (!run->nr)
		return;
	pool->mm->accounts[run->tenant]->quarantine_bytes -=
		run->nr * pool->geo.stride_bytes;
	kvd_frames_moved(pool, run->tenant, KVD_QUARANTINE, KVD_FREE, run->nr);
	kvd_freelist_placed(pool, run->index);
	pool->mm->ops->released(pool, run->tenant, run->nr);
	run->nr = 0;
}

static inline void release_one(struct kvd_pool *pool, u32 pfn, struct release_run *run)
{
	u32 index = kvd_pool_extent_of(pool, pfn), kind;
	struct kvd_extent *e = &pool->extents[index];
	u64 w[KVD_WORDS];

	kvd_change_begin(pool, pfn, w);
	kv_assert(kvd_w_state(w) == KVD_QUARANTINE && !kvd_w_refs(w) &&
		  !kv_tag_live(w[KVD_W_TAG]));
	if (run->tenant != kvd_w_tenant(w) || run->index != index) {
		run_end(pool, run);
		run->tenant = kvd_w_tenant(w);
		run->index = index;
	}
	run->nr++;
	kvd_change_end(pool, pfn, w, 0, KVD_FREE, KVD_EV_RELEASE, 0);
	kind = w[KVD_W_OWNER] ? KVD_FREE_USED : KVD_FREE_CLEAN;
	kvd_pfn_list_add_head(pool->links, &e->free.pages[kind], pfn);
	pool->free.nr[kind]++;
	e->nr_free++;
}

u32 kvd_pool_release(struct kvd_pool *pool, struct kvd_pfn_list *pages, u32 max)
{
	struct release_run run = {0};
	u32 nr = KV_MIN(pages->nr, max), pfn = pages->head;

	for (u32 i = 0; i < nr; i++) {
		u32 next = pool->links[pfn].next;

		kvd_change_prefetch(pool, next);
		pool->links[pfn].batch = NULL;
		release_one(pool, pfn, &run);
		pfn = next;
	}
	run_end(pool, &run);
	kvd_pfn_list_cut(pool->links, pages, pfn, nr);
	return nr;
}
