/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/audit.c - what mm/ can check alone: records, lists, counters. See audit.h.
 *
 * Reads everything, changes nothing, trusts nothing but pfn ranges. Loop thread only.
 */
#include "kvmd/mm/audit.h"
#include <stdarg.h>
#include <stdio.h>
#include "base/mutant.h"
#include "kvmd/mm/change.h"

#define LIVE_STATES                                                       \
	((1u << KVD_MAGAZINE) | (1u << KVD_ACTIVE) | (1u << KVD_SEALED) | \
	 (1u << KVD_CACHED) | (1u << KVD_SPILLING))
#define SEALED_STATES ((1u << KVD_SEALED) | (1u << KVD_CACHED) | (1u << KVD_SPILLING))

void kvd_finding_add(struct kvd_findings *fs, u32 invariant, u32 pool_id, u32 pfn,
		     const char *fmt, ...)
{
	struct kvd_finding *f;
	va_list ap;

	if (fs->nr++ >= fs->max)
		return;
	f = &fs->list[fs->nr - 1];
	f->invariant = invariant;
	f->pool_id = pool_id;
	f->pfn = pfn;
	va_start(ap, fmt);
	vsnprintf(f->text, sizeof(f->text), fmt, ap);
	va_end(ap);
}

static void audit_tag(const struct kvd_pool *pool, u32 pfn, struct kvd_findings *fs)
{
	const struct kvd_frame *f = &pool->frames[pfn];
	bool live = (1u << f->state) & LIVE_STATES;
	bool sealed = (1u << f->state) & SEALED_STATES;
	u64 published = kv_load_relaxed64(&pool->table.tags[pfn]);

	if (published != f->tag)
		kvd_finding_add(
			fs, 3, pool->id, pfn, "published tag %#llx, record has %#llx",
			(unsigned long long)published, (unsigned long long)f->tag);
	if (live != kv_tag_live(f->tag))
		kvd_finding_add(fs, 3, pool->id, pfn, "%s page, tag %#llx is %s",
				kvd_frame_state_str(f->state), (unsigned long long)f->tag,
				live ? "dead" : "live");
	if (sealed != kv_tag_sealed(f->tag))
		kvd_finding_add(fs, 6, pool->id, pfn, "%s page, tag %#llx is %s",
				kvd_frame_state_str(f->state), (unsigned long long)f->tag,
				sealed ? "not sealed" : "sealed");
	if (kv_tag_gen(f->tag) >= pool->mm->gens.source->next)
		kvd_finding_add(fs, 4, pool->id, pfn,
				"generation %#llx was never given out",
				(unsigned long long)kv_tag_gen(f->tag));
}

static void audit_extent(const struct kvd_pool *pool, u32 pfn, struct kvd_findings *fs)
{
	const struct kvd_extent *e = &pool->extents[kvd_pool_extent_of(pool, pfn)];
	bool backed = e->state == KVD_EXTENT_LIVE;

	if (backed == (pool->frames[pfn].state == KVD_ABSENT))
		kvd_finding_add(fs, 1, pool->id, pfn, "%s page in extent state %u",
				kvd_frame_state_str(pool->frames[pfn].state), e->state);
	if (e->state != KVD_EXTENT_NONE && e->domain_id != pool->domain_id)
		kvd_finding_add(fs, 8, pool->id, pfn,
				"extent of domain %u in a pool of domain %u",
				e->domain_id, pool->domain_id);
}

void kvd_audit_frame(const struct kvd_pool *pool, u32 pfn, struct kvd_findings *fs)
{
	const struct kvd_frame *f = &pool->frames[pfn];
	u32 waits_in = KVD_BATCH_KINDS;

	fs->checked++;
	if (!f->nr_events && !f->check)
		return; /* no extent has covered it yet */
	if (f->check != kvd_frame_check_word(f) || f->pfn != pfn) {
		kvd_finding_add(fs, 1, pool->id, pfn, "record damaged: check %#x, pfn %u",
				f->check, f->pfn);
		return;
	}
	if (f->state >= KVD_FRAME_STATES) {
		kvd_finding_add(fs, 1, pool->id, pfn, "state %u", f->state);
		return;
	}
	if (f->tenant >= KVD_TENANTS_MAX) {
		kvd_finding_add(fs, 1, pool->id, pfn, "tenant %u", f->tenant);
		return;
	}
	audit_tag(pool, pfn, fs);
	audit_extent(pool, pfn, fs);
	if (f->state == KVD_QUARANTINE)
		waits_in = KVD_BATCH_QUARANTINE;
	else if (f->flags & KVD_FRAME_SEALING)
		waits_in = KVD_BATCH_SEAL;
	if (waits_in == KVD_BATCH_KINDS
		    ? pool->links[pfn].batch != NULL
		    : !pool->links[pfn].batch || pool->links[pfn].batch->kind != waits_in)
		kvd_finding_add(fs, 5, pool->id, pfn,
				"%s page does not wait as it should",
				kvd_frame_state_str(f->state));
}

void kvd_audit_counters(const struct kvd_pool *pool, struct kvd_findings *fs)
{
	u64 sum = 0, backed = (u64)pool->nr_live_extents << pool->geo.shift;
	u32 free = pool->free.nr[KVD_FREE_CLEAN] + pool->free.nr[KVD_FREE_USED],
	    cached = 0;

	for (u32 i = 0; i < KVD_FRAME_STATES; i++)
		sum += pool->nr[i];
	if (sum != pool->geo.nr_pages)
		kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
				"states sum to %llu of %u pages", (unsigned long long)sum,
				pool->geo.nr_pages);
	if (pool->geo.nr_pages - pool->nr[KVD_ABSENT] != backed)
		kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE, "%u pages backed by %llu",
				pool->geo.nr_pages - pool->nr[KVD_ABSENT],
				(unsigned long long)backed);
	if (free != pool->nr[KVD_FREE])
		kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
				"%u pages on free lists, %u FREE", free,
				pool->nr[KVD_FREE]);
	for (u32 i = 0; i < KVD_DOMAIN_TENANTS_MAX; i++)
		cached += kvd_lru_nr(&pool->lru[i]) + pool->lru[i].held.nr;
	if (cached != pool->nr[KVD_CACHED])
		kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
				"%u pages on LRUs, %u CACHED", cached,
				pool->nr[KVD_CACHED]);
}

/* Walk one list; every member must be in @state. Bounded by the number of pages. */
static u32 audit_list(const struct kvd_pool *pool, const struct kvd_pfn_list *l,
		      u32 state, const char *name, struct kvd_findings *fs)
{
	u32 nr = 0, prev = KVD_PFN_NONE;

	for (u32 pfn = l->head; pfn != KVD_PFN_NONE; pfn = pool->links[pfn].next) {
		if (pfn >= pool->geo.nr_pages || nr > pool->geo.nr_pages ||
		    pool->links[pfn].prev != prev) {
			kvd_finding_add(fs, 1, pool->id, pfn,
					"%s is broken after %u pages", name, nr);
			return nr;
		}
		if (pool->frames[pfn].state != state)
			kvd_finding_add(fs, state == KVD_FREE ? 5 : 1, pool->id, pfn,
					"%s page on %s",
					kvd_frame_state_str(pool->frames[pfn].state),
					name);
		prev = pfn;
		nr++;
	}
	if (nr != l->nr || l->tail != prev)
		kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
				"%s counts %u pages, has %u", name, l->nr, nr);
	return nr;
}

static void audit_bucket(const struct kvd_extent *e, u32 index,
			 const struct kvd_pool *pool, struct kvd_findings *fs)
{
	for (u32 k = 0; k < KVD_FREE_KINDS; k++) {
		if (!e->free.pages[k].nr != (e->free.bucket[k] == KVD_NO_BUCKET))
			kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
					"extent %u is in the wrong bucket", index);
	}
}

/* Each extent's lists hold its FREE pages, and all of them together are what the pool
 * counts. */
static void audit_free(const struct kvd_pool *pool, struct kvd_findings *fs)
{
	u32 nr[KVD_FREE_KINDS] = {0};

	for (u32 i = 0; i < pool->nr_extents; i++) {
		const struct kvd_extent *e = &pool->extents[i];
		u32 here = 0;

		for (u32 k = 0; k < KVD_FREE_KINDS; k++) {
			here += audit_list(pool, &e->free.pages[k], KVD_FREE,
					   "a free list", fs);
			nr[k] += e->free.pages[k].nr;
		}
		audit_bucket(e, i, pool, fs);
		if (here != e->nr_free)
			kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
					"extent %u has %u FREE pages, counter says %u", i,
					here, e->nr_free);
	}
	for (u32 k = 0; k < KVD_FREE_KINDS; k++) {
		if (nr[k] != pool->free.nr[k])
			kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
					"%u pages on free lists, counter says %u", nr[k],
					pool->free.nr[k]);
	}
}

static u32 audit_batches(const struct kvd_pool *pool, struct kvd_findings *fs)
{
	u32 nr = 0;

	for (u32 i = 0; i < KVD_BATCH_SET; i++)
		nr += audit_list(pool, &pool->quarantine.b[i].pages, KVD_QUARANTINE,
				 "a quarantine batch", fs);
	return nr;
}

void kvd_audit_lists(const struct kvd_pool *pool, struct kvd_findings *fs)
{
	u32 nr[KVD_FRAME_STATES] = {0};
	u32 waiting;

	for (u32 pfn = 0; pfn < pool->geo.nr_pages; pfn++) {
		if (pool->frames[pfn].state < KVD_FRAME_STATES)
			nr[pool->frames[pfn].state]++;
	}
	for (u32 i = 0; i < KVD_FRAME_STATES; i++) {
		if (nr[i] != pool->nr[i])
			kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
					"%u pages %s, counter says %u", nr[i],
					kvd_frame_state_str(i), pool->nr[i]);
	}
	audit_free(pool, fs);
	for (u32 i = 0; i < KVD_DOMAIN_TENANTS_MAX; i++) {
		audit_list(pool, &pool->lru[i].leaf, KVD_CACHED, "a leaf LRU", fs);
		audit_list(pool, &pool->lru[i].inner, KVD_CACHED, "an inner LRU", fs);
		audit_list(pool, &pool->lru[i].held, KVD_CACHED, "a held list", fs);
	}
	waiting = audit_batches(pool, fs);
	if (waiting != nr[KVD_QUARANTINE])
		kvd_finding_add(fs, 5, pool->id, KVD_PFN_NONE,
				"%u pages in batches, %u QUARANTINE", waiting,
				nr[KVD_QUARANTINE]);
}

/* ------------------------------------------------------------------- beside the work */

static bool owned(u32 state)
{
	return !(KVD_UNOWNED & 1u << state);
}

static bool same_extent(const struct kvd_pool *pool, u32 a, u32 b)
{
	return kvd_pool_extent_of(pool, a) == kvd_pool_extent_of(pool, b);
}

void kvd_recount_moved(struct kvd_recount *rc, const struct kvd_pool *pool, u32 pfn,
		       u32 from, u32 to, u32 tenant)
{
	u32 index = pool->id - 1;

	if (from == to || index > rc->index || (index == rc->index && pfn >= rc->pfn) ||
	    KV_MUTANT(recount_not_moved))
		return;
	if (owned(from))
		rc->used[tenant] -= pool->geo.stride_bytes;
	if (owned(to))
		rc->used[tenant] += pool->geo.stride_bytes;
	if (index != rc->index)
		return;
	rc->nr[from]--;
	rc->nr[to]++;
	if (same_extent(pool, pfn, rc->pfn)) {
		rc->nr_free -= from == KVD_FREE;
		rc->nr_free += to == KVD_FREE;
	}
}

void kvd_recount_add(struct kvd_recount *rc, const struct kvd_pool *pool)
{
	const struct kvd_frame *f = &pool->frames[rc->pfn++];

	if (f->state >= KVD_FRAME_STATES || f->tenant >= KVD_TENANTS_MAX)
		return; /* kvd_audit_frame() has said so */
	rc->nr[f->state]++;
	rc->nr_free += f->state == KVD_FREE;
	if (owned(f->state))
		rc->used[f->tenant] += pool->geo.stride_bytes;
}

void kvd_recount_extent(struct kvd_recount *rc, const struct kvd_pool *pool,
			struct kvd_findings *fs)
{
	u32 index = kvd_pool_extent_of(pool, rc->pfn - 1);
	const struct kvd_extent *e = &pool->extents[index];

	if (rc->nr_free != e->nr_free ||
	    e->free.pages[KVD_FREE_CLEAN].nr + e->free.pages[KVD_FREE_USED].nr !=
		    e->nr_free)
		kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
				"extent %u has %u FREE pages, counter says %u", index,
				rc->nr_free, e->nr_free);
	audit_bucket(e, index, pool, fs);
	rc->nr_free = 0;
}

void kvd_recount_pool(struct kvd_recount *rc, const struct kvd_pool *pool,
		      struct kvd_findings *fs)
{
	kvd_audit_counters(pool, fs);
	for (u32 i = 0; i < KVD_FRAME_STATES; i++) {
		if (rc->nr[i] != pool->nr[i])
			kvd_finding_add(fs, 1, pool->id, KVD_PFN_NONE,
					"%u pages %s, counter says %u", rc->nr[i],
					kvd_frame_state_str(i), pool->nr[i]);
		rc->nr[i] = 0;
	}
	rc->index++;
	rc->pfn = 0;
	rc->nr_free = 0;
}

static const struct kvd_pfn_list *list_of(const struct kvd_pool *pool, u32 pfn)
{
	const struct kvd_frame *f = &pool->frames[pfn];
	const struct kvd_link *link = &pool->links[pfn];
	const struct kvd_account *acct =
		f->tenant < KVD_TENANTS_MAX ? pool->mm->accounts[f->tenant] : NULL;
	u32 index = kvd_pool_extent_of(pool, pfn);

	switch (f->state) {
	case KVD_FREE:
		return &pool->extents[index]
				.free.pages[f->owner ? KVD_FREE_USED : KVD_FREE_CLEAN];
	case KVD_QUARANTINE:
		return link->batch ? &link->batch->pages : NULL;
	case KVD_CACHED:
		if (!acct || acct->slot >= KVD_DOMAIN_TENANTS_MAX)
			return NULL;
		if (f->flags & KVD_FRAME_HELD)
			return &pool->lru[acct->slot].held;
		return link->nr_children ? &pool->lru[acct->slot].inner
					 : &pool->lru[acct->slot].leaf;
	default:
		return NULL;
	}
}

void kvd_audit_links(const struct kvd_pool *pool, u32 pfn, struct kvd_findings *fs)
{
	const struct kvd_pfn_list *l = list_of(pool, pfn);
	const struct kvd_link *link = &pool->links[pfn];
	u32 n = pool->geo.nr_pages, before, after;

	if (!l)
		return;
	before = link->prev == KVD_PFN_NONE ? l->head
		 : link->prev < n	    ? pool->links[link->prev].next
					    : KVD_PFN_NONE;
	after = link->next == KVD_PFN_NONE ? l->tail
		: link->next < n	   ? pool->links[link->next].prev
					   : KVD_PFN_NONE;
	if (before != pfn || after != pfn)
		kvd_finding_add(fs, pool->frames[pfn].state == KVD_QUARANTINE ? 5 : 1,
				pool->id, pfn, "%s page is not on its list",
				kvd_frame_state_str(pool->frames[pfn].state));
}
