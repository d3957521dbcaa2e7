/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/pool.h - a pool (pages of one domain and layout on one GPU) and the loop's memory
 * state. struct kvd_mm is the memory half of the core: backend, generations,
 * grace periods, pools, clock. mm/ knows tenants only as struct kvd_account by index,
 * sessions only as struct kvd_reader. What own/ must do when a grace period ends or a
 * page is evicted goes up through struct kvd_mm_ops. Loop thread only.
 */
#ifndef KVD_POOL_H
#define KVD_POOL_H

#include "base/list.h"
#include "kvmd/backend/backend.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/mm/env.h"
#include "kvmd/mm/extent.h"
#include "kvmd/mm/freelist.h"
#include "kvmd/mm/grace.h"
#include "kvmd/mm/lru.h"
#include "kvmd/mm/page.h"
#include "kvmd/mm/tag.h"

#define KVD_POOLS_MAX	       64u
#define KVD_TENANTS_MAX	       256u
#define KVD_DOMAIN_TENANTS_MAX 32u

struct kvd_pool;

/**
 * struct kvd_pool_counters - what happened in pools since kvmd started; hits, allocs,
 * frees, evictions and seals in pages
 */
struct kvd_pool_counters {
	u64 nr_lookups, nr_hits, nr_allocs, nr_frees, nr_evictions, nr_seals;
};

/**
 * struct kvd_mm_ops - what mm/ asks of own/; all mandatory
 * @released: @nr pages of @tenant are FREE: no step can touch them any more; drop their
 *	charge
 * @seal_done: @pfn may be found from now on
 * @evict: take CACHED @pfn out of the index; it goes to QUARANTINE, or to a tier first.
 *	Return: 0; -EAGAIN: not now, it stays CACHED
 * @may_grow: may @pool's domain take @extent_bytes more from the device? (min of others)
 * @may_shrink: may another domain get an extent of @pool? (min of its own)
 * @extent_live: a new extent: sessions of the pool must get it
 * @extent_draining: sessions that hold it must unmap it
 * @extent_gone: released to the backend
 * @stalled: @r has held back a grace period for too long; called once per stall
 */
struct kvd_mm_ops {
	void (*released)(struct kvd_pool *pool, u32 tenant, u32 nr);
	void (*seal_done)(struct kvd_pool *pool, u32 pfn);
	int (*evict)(struct kvd_pool *pool, u32 pfn);
	bool (*may_grow)(struct kvd_pool *pool);
	bool (*may_shrink)(struct kvd_pool *pool);
	void (*extent_live)(struct kvd_pool *pool, u32 index);
	void (*extent_draining)(struct kvd_pool *pool, u32 index);
	void (*extent_gone)(struct kvd_pool *pool, u32 index);
	void (*stalled)(struct kvd_mm *mm, struct kvd_reader *r);
};

/**
 * struct kvd_mm - memory state of one loop
 * @env: outside services; borrowed
 * @ops: own/'s hooks; borrowed
 * @backend: borrowed
 * @limits: of @backend; capacity_bytes may have been lowered by configuration; 0: not known
 *	yet, a GPU is starting
 * @now_ns: time; set by kvd_core_run() and by whoever calls in between
 * @table_epoch: this instance of kvmd
 * @gens, @grace: see tag.h, grace.h
 * @extent_bytes_used: all extents, DRAINING ones included
 * @adopted_bytes: so much of it may be there although it is beyond the capacity
 * @pools: by index; pool_id = index + 1
 * @pools_end: no pool lies at or behind this index
 * @accounts: by tenant index; NULL = unused; borrowed from own/
 * @lru_clock: counts uses
 * @stall_ns: a slot older than this is a stall
 * @draining_bytes: part of @extent_bytes_used that comes back when sessions have unmapped
 * it
 * @own_debts: some account has a reclaim_debt
 * @spill_stuck: nobody knows when SPILLING pages come back: the copier stands still
 * @own_debts_wait: and goes on when a tier takes pages again
 * @keep: NULL: nobody keeps extents
 * @gone_counters: of pools that are no more
 * @undo: record of the change in progress; NULL: nothing outlives this process
 * @recount: of the audit that runs beside the work (own/verify.h); NULL: none does
 */
struct kvd_mm {
	const struct kvd_env *env;
	const struct kvd_mm_ops *ops;
	struct kvd_backend *backend;
	struct kvd_backend_limits limits;
	u64 now_ns;
	u64 table_epoch;
	struct kvd_gens gens;
	struct kvd_grace grace;
	u64 extent_bytes_used;
	u64 adopted_bytes;
	struct kvd_pool *pools[KVD_POOLS_MAX];
	u32 pools_end;
	struct kvd_account *accounts[KVD_TENANTS_MAX];
	u64 lru_clock;
	u64 stall_ns;
	u64 draining_bytes;
	bool own_debts;
	bool own_debts_wait;
	bool spill_stuck;
	const struct kvd_keep_ops *keep;
	struct kvd_pool_counters gone_counters;
	struct kvd_undo *undo;
	struct kvd_recount *recount;
};

/**
 * struct kvd_pool - pages of one layout in one domain
 * @mm: borrowed
 * @id: 1..KVD_POOLS_MAX
 * @domain_id: domain
 * @group: the domain's readers; borrowed
 * @owner: own/'s struct kvd_domain; borrowed
 * @quarantine: killed pages that wait
 * @seals: sealed pages whose session closed the pool or ended: they wait for the group
 * @nr_sessions: sessions that have it open
 * @layout, @scales, @fingerprint: what the bytes mean; @scales owned
 * @geo: where a page lies
 * @frames_region, @table_region, @tokens_region, @scratch_region: owned
 * @hdr: head of the records
 * @frames: records, [geo.nr_pages]
 * @links: volatile part, [geo.nr_pages]
 * @tokens: [geo.nr_pages][KV_PAGE_TOKENS] token ids of indexed pages
 * @table: published
 * @free: FREE pages
 * @lru: by the tenant's slot in its domain (account index -> @lru_slot)
 * @extents: [nr_extents]; owned
 * @extent_words: what of them is persistent; in @frames_region
 * @nr_extents: most extents
 * @nr_live_extents: LIVE ones
 * @next_serial: of the next extent
 * @nr: pages by state; ABSENT counted too, so they sum to geo.nr_pages
 * @reclaim_debt: pages that background reclaim was asked to free
 * @evict_again: the last reclaim ended because a tier takes no more for the moment
 * @low_pages, @high_pages: watermarks of free pages
 * @wants_extent: it could grow if another pool gave an extent back
 * @starved: an allocation has failed since pages were last freed
 * @starved_ns: when the last one failed; 0 = never
 * @pressure: level that sessions were told last
 * @hash_heads: prefix index, [hash_mask + 1] pfns
 * @walk_heads: the same by token hash (own/walk.h)
 * @hash_mask: power of two - 1, of both
 * @key_bits: bits of a key that count; 128, less only in tests (case O42)
 * @root_key, @personal, @walk_key: of keys and token hashes; filled by own/
 * @nr_lookups .. @nr_seals: counters; hits and evictions in pages
 * @sweep_pfn: where the audit slice goes on
 */
struct kvd_pool {
	struct kvd_mm *mm;
	u32 id;
	u32 domain_id;
	struct kvd_reader_group *group;
	void *owner;
	struct kvd_batch_set quarantine, seals;
	u32 nr_sessions;
	struct kv_layout layout;
	float *scales;
	u64 fingerprint;
	struct kv_geometry geo;
	struct kvd_region frames_region, table_region, tokens_region, scratch_region;
	struct kvd_frames_hdr *hdr;
	struct kvd_frame *frames;
	struct kvd_link *links;
	u32 *tokens;
	struct kvd_table table;
	struct kvd_freelist free;
	struct kvd_lru lru[KVD_DOMAIN_TENANTS_MAX];
	struct kvd_extent *extents;
	u64 *extent_words;
	u32 nr_extents;
	u32 nr_live_extents;
	u64 next_serial;
	u32 nr[KVD_FRAME_STATES];
	u32 reclaim_debt;
	bool evict_again;
	u32 low_pages, high_pages;
	bool wants_extent;
	bool starved;
	u64 starved_ns;
	u32 pressure;
	u32 *hash_heads;
	u32 *walk_heads;
	u32 hash_mask;
	u32 key_bits;
	u8 root_key[KV_KEY_BYTES];
	u8 personal[KV_KEY_BYTES];
	u32 walk_key[KV_PAGE_TOKENS];
	u64 nr_lookups, nr_hits, nr_allocs, nr_frees, nr_evictions, nr_seals;
	u32 sweep_pfn;
};

/**
 * struct kvd_pool_params - a new pool
 */
struct kvd_pool_params {
	u32 domain_id;
	void *owner;
	struct kvd_reader_group *group;
	const struct kv_layout *layout;
	const float *scales;
	u64 fingerprint;
	u64 capacity_bytes; /* most bytes of extents; 0 = the backend's */
};

/**
 * kvd_pool_create() - regions, table, empty lists; no extent yet
 *
 * Return: 0; -ENOSPC KVD_POOLS_MAX reached; -E2BIG as kvd_geometry_choose(); -ENOMEM;
 * -EMFILE.
 */
int kvd_pool_create(struct kvd_mm *mm, const struct kvd_pool_params *p,
		    struct kvd_pool **ret_pool);

/** kvd_pool_count() - add @pool's counters to @sum */
void kvd_pool_count(const struct kvd_pool *pool, struct kvd_pool_counters *sum);

/** kvd_pool_destroy() - all pages are FREE or ABSENT, no extent is given to a session */
void kvd_pool_destroy(struct kvd_pool *pool);

/**
 * kvd_pool_adopt() - a pool from the regions of an earlier kvmd
 * @id: pool id
 * @owner, @group: as in struct kvd_pool_params
 * @frames, @tokens: mapped; the pool's on success
 * @ret_damage: false: it was never finished, or is being destroyed; true: damage
 *
 * Fresh table and lists; no record is looked at yet: all counters are 0.
 *
 * Return: 0; -EBADMSG the header is not right; -ENOMEM; -EMFILE.
 */
int kvd_pool_adopt(struct kvd_mm *mm, u32 id, void *owner, struct kvd_reader_group *group,
		   const struct kvd_region *frames, const struct kvd_region *tokens,
		   bool *ret_damage, struct kvd_pool **ret_pool);

/** kvd_pool_domain() - domain id in a frames region, or -1: not a whole header */
int kvd_pool_domain(const struct kvd_region *frames, u32 id);

/** kvd_recount_moved() - a record went from one state to another (mm/audit.h) */
void kvd_recount_moved(struct kvd_recount *rc, const struct kvd_pool *pool, u32 pfn,
		       u32 from, u32 to, u32 tenant);

/** kvd_frame_touch() - a record is about to change; kvd_frame_set() ends it */
static inline void kvd_frame_touch(struct kvd_pool *pool, u32 pfn)
{
	if (pool->mm->undo)
		kvd_frame_touch_slow(pool->mm->undo, pool, pfn);
}

/** kvd_pool_nr_free() - FREE pages */
static inline u32 kvd_pool_nr_free(const struct kvd_pool *pool)
{
	return pool->nr[KVD_FREE];
}

/** kvd_pool_nr_used() - pages that are neither ABSENT nor FREE nor POISONED */
static inline u32 kvd_pool_nr_used(const struct kvd_pool *pool)
{
	return pool->geo.nr_pages - pool->nr[KVD_ABSENT] - pool->nr[KVD_FREE] -
	       pool->nr[KVD_POISONED];
}

/** kvd_pool_nr_coming() - pages that become FREE by themselves, and soon */
static inline u32 kvd_pool_nr_coming(const struct kvd_pool *pool)
{
	return pool->nr[KVD_QUARANTINE] +
	       (pool->mm->spill_stuck ? 0 : pool->nr[KVD_SPILLING]);
}

static inline u32 kvd_pool_extent_of(const struct kvd_pool *pool, u32 pfn)
{
	return pfn >> pool->geo.shift;
}

/**
 * kvd_grace_add() - a page waits
 *
 * It is on no list; its new tag is stored and logged.
 */
static inline void kvd_grace_add(struct kvd_batch_set *set, u32 pfn)
{
	struct kvd_batch *b = kvd_grace_open(set);

	kvd_pfn_list_add_tail(b->pool->links, &b->pages, pfn);
	b->pool->links[pfn].batch = b;
	b->pool->mm->grace.nr_pages[b->kind]++;
}

/**
 * kvd_pool_kill() - the page dies: further generation without LIVE, logged, QUARANTINE
 *
 * No reference is left and the page is on no list. It becomes FREE by
 * kvd_grace_advance().
 */
void kvd_pool_kill(struct kvd_pool *pool, u32 pfn, u32 event, u64 session);

/**
 * kvd_pool_release() - QUARANTINE -> FREE: no step can touch them any more
 * @pages: a batch's list; they leave it from its head
 * @max: at most so many
 *
 * Return: how many.
 */
u32 kvd_pool_release(struct kvd_pool *pool, struct kvd_pfn_list *pages, u32 max);

#endif /* KVD_POOL_H */
