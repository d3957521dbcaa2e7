/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/alloc.c - allocation: generations, charge, free list, growth, reclaim, outcome.
 * (tour 5/12)
 *
 * All or nothing. The common case is three comparisons before the pages are taken;
 * everything else is in the slow functions below. Loop thread only.
 */
#include "kvmd/own/lease.h"
#include <errno.h>
#include "base/mutant.h"
#include "kvmd/mm/change.h"
#include "kvmd/own/core.h"
#include "kvmd/own/turn.h"

#define HARVEST_SLICES 8u

static u32 pages_of(const struct kvd_pool *pool, u64 bytes)
{
	return (u32)kv_div_round_up(bytes, pool->geo.stride_bytes);
}

/* Let go what waits only for a look at the slots; more than the largest batch can use. */
static void harvest(struct kvd_mm *mm)
{
	for (u32 i = 0; i < HARVEST_SLICES && kvd_grace_advance(mm); i++)
		;
}

static u32 tenant_recall(struct kvd_tenant *t, struct kvd_core *core)
{
	struct kvd_session *s;
	u32 nr = 0;

	if (!t->account.nr[KVD_MAGAZINE])
		return 0;
	list_for_each_entry (s, &core->sessions, node) {
		if (s->tenant == t && s->state == KVD_SESSION_LIVE)
			nr += kvd_lease_mags_recall(s, NULL);
	}
	return nr;
}

/* Evict @tenant's own CACHED pages, this pool's first, until @bytes are on their way
 * back. */
static void tenant_reclaim(struct kvd_tenant *t, struct kvd_pool *pool, u64 bytes)
{
	struct kvd_mm *mm = pool->mm;
	u64 got;

	got = kvd_reclaim_pool(pool, t->index, pages_of(pool, bytes), true) *
	      pool->geo.stride_bytes;
	for (u32 i = 0; i < KVD_POOLS_MAX && got < bytes; i++) {
		struct kvd_pool *other = mm->pools[i];

		if (other && other != pool && other->domain_id == pool->domain_id)
			got += kvd_reclaim_pool(other, t->index,
						pages_of(other, bytes - got), true) *
			       other->geo.stride_bytes;
	}
}

/*
 * The tenant is at its max (KV_QUOTA), or what is left is promised to others (KV_FULL).
 * Only its own pages can help: those in quarantine, in stock, and CACHED ones.
 */
static int charge_slow(struct kvd_session *s, struct kvd_pool *pool, u32 nr, u32 gfp,
		       int why, u32 *ret_pending)
{
	struct kvd_tenant *t = s->tenant;
	struct kvd_account *acct = &t->account;
	u64 need = (u64)nr * pool->geo.stride_bytes, coming;
	int r = why;

	if (need > acct->max_bytes)
		return KV_QUOTA;
	harvest(pool->mm);
	r = kvd_charge_try(t, pool, nr);
	if (!r)
		return 0;
	if ((gfp & KV_GFP_RECLAIM) && tenant_recall(t, s->core)) {
		harvest(pool->mm);
		r = kvd_charge_try(t, pool, nr);
		if (!r)
			return 0;
	}
	/* At the max only what is above it must go; for a promise to others all of it. */
	if (r == KV_QUOTA)
		need = acct->used_bytes + need - acct->max_bytes;
	if ((gfp & KV_GFP_WAIT) &&
	    acct->quarantine_bytes + kvd_charge_cached(s->core, t) >= need) {
		tenant_reclaim(t, pool, need - KV_MIN(need, acct->quarantine_bytes));
		harvest(pool->mm);
		r = kvd_charge_try(t, pool, nr);
		if (!r)
			return 0;
		if (r == KV_QUOTA)
			need = acct->used_bytes + (u64)nr * pool->geo.stride_bytes -
			       acct->max_bytes;
	}
	coming = acct->quarantine_bytes;
	if ((gfp & KV_GFP_RECLAIM) && coming < need &&
	    coming + kvd_charge_cached(s->core, t) >= need) {
		acct->reclaim_debt = KV_MAX(acct->reclaim_debt, need - coming);
		pool->mm->own_debts = true;
		coming = need;
	}
	if (coming < need)
		return r;
	*ret_pending = pages_of(pool, coming);
	return KV_PENDING;
}

static int grow(struct kvd_pool *pool, u32 nr, u32 gfp)
{
	int r = KV_FULL;

	if (!(gfp & KV_GFP_GROW))
		return r;
	while (kvd_pool_nr_free(pool) < nr) {
		r = kvd_extent_grow(pool);
		if (r)
			return r;
	}
	return 0;
}

/* The free list is too short and the charge is made: grow, recall, reclaim, or say why
 * not. */
static int room_slow(struct kvd_session *s, struct kvd_pool *pool, u32 nr, u32 gfp,
		     u32 *ret_pending)
{
	u32 coming, lacking;
	int r = grow(pool, nr, gfp);

	if (r <= 0)
		return r;
	harvest(pool->mm);
	if (kvd_pool_nr_free(pool) >= nr)
		return 0;
	if ((gfp & KV_GFP_RECLAIM) && kvd_lease_recall(pool)) {
		harvest(pool->mm);
		if (kvd_pool_nr_free(pool) >= nr)
			return 0;
	}
	if ((gfp & KV_GFP_WAIT) || KV_MUTANT(reclaim_in_admission)) {
		/* Nothing is evicted for a request that cannot be served even so. */
		coming = kvd_pool_nr_free(pool) + kvd_pool_nr_coming(pool);
		if (coming < nr &&
		    coming + kvd_reclaim_available(pool, s->tenant->index) >= nr)
			kvd_reclaim_pool(pool, s->tenant->index, nr - coming, false);
		harvest(pool->mm);
		if (kvd_pool_nr_free(pool) >= nr)
			return 0;
	}
	lacking = nr - kvd_pool_nr_free(pool);
	coming = kvd_pool_nr_coming(pool);
	pool->starved = true;
	pool->starved_ns = pool->mm->now_ns;
	if ((gfp & KV_GFP_RECLAIM) && coming < lacking) {
		if (coming + kvd_reclaim_available(pool, s->tenant->index) >= lacking) {
			kvd_reclaim_wake(pool, lacking - coming);
			coming = lacking;
		} else if (kvd_reclaim_extents(pool) || kvd_lease_recall_idle(pool)) {
			r = KV_PENDING;
		}
	}
	if (coming < lacking && r != KV_PENDING)
		return KV_FULL;
	*ret_pending = KV_MAX(coming, 1u);
	return KV_PENDING;
}

/* Somebody else goes first (own/turn.h). Nothing is reclaimed for this one meanwhile. */
static int turn_refusal(struct kvd_tenant *t, const struct kvd_pool *pool, u32 nr)
{
	u64 bytes = (u64)nr * pool->geo.stride_bytes;

	if (t->account.used_bytes + bytes > t->account.max_bytes) {
		t->quota_refusals++;
		return KV_QUOTA;
	}
	t->full_refusals++;
	return KV_FULL;
}

/* Charge @nr pages and see that they are on the free list. */
static int lease_prepare(struct kvd_session *s, struct kvd_pool *pool, u32 nr, u32 gfp,
			 u32 *ret_pending)
{
	struct kvd_tenant *t = s->tenant;
	int r = kvd_gens_reserve(&pool->mm->gens, nr);

	if (r)
		return r;
	if (t->account.draining && !KV_MUTANT(drain_grants)) {
		t->quota_refusals++;
		return KV_QUOTA;
	}
	if (kvd_turn_waits(s, (u64)nr * pool->geo.stride_bytes))
		return turn_refusal(t, pool, nr);
	r = kvd_charge_try(t, pool, nr);
	if (r) {
		r = charge_slow(s, pool, nr, gfp, r, ret_pending);
		if (r) {
			t->quota_refusals += r == KV_QUOTA;
			return r;
		}
	}
	if (kvd_pool_nr_free(pool) >= nr)
		return 0;
	r = room_slow(s, pool, nr, gfp, ret_pending);
	if (r) {
		if (!KV_MUTANT(refusal_keeps_charge))
			kvd_charge_drop(t, pool, nr);
		t->full_refusals += r == KV_FULL;
	}
	return r;
}

/* An answer to ALLOC: pressure and turns depend on it. */
static inline void told(struct kvd_session *s, int r)
{
	kvd_pressure_asked(s, !r);
	if (r)
		kvd_turn_refused(s);
	else
		kvd_turn_served(s, s->core->mm.now_ns);
}

/* A FREE page becomes the session's: live, one reference. */
static inline void take_one(struct kvd_session *s, struct kvd_attach *a, u32 state,
			    u32 pfn, struct kv_grant *ret)
{
	struct kvd_pool *pool = a->pool;
	u64 w[KVD_WORDS];
	bool foreign;

	kvd_change_begin(pool, pfn, w);
	kv_assert(kvd_w_state(w) == KVD_FREE && !kvd_w_refs(w));
	/*
	 * Once a page may hold another session's bytes it counts as such until it is
	 * sealed, that is, written from end to end: we do not see whether the engine
	 * zeroed it.
	 */
	foreign = w[KVD_W_OWNER] && w[KVD_W_OWNER] != s->id;
	if (!KV_MUTANT(dirty_flag_lost))
		foreign |= (kvd_w_flags(w) & KVD_FRAME_FOREIGN) != 0;
	w[KVD_W_TAG] = kv_tag_make(kvd_gens_live(&pool->mm->gens), KV_TAG_LIVE);
	w[KVD_W_OWNER] = s->id;
	kvd_w_set_refs(w, 1);
	kvd_w_set_tenant(w, s->tenant->index);
	kvd_w_set_flags(w, foreign ? KVD_FRAME_FOREIGN : 0);
	kvd_lease_hold(a, pfn);
	kvd_change_end(pool, pfn, w,
		       1u << KVD_W_TAG | 1u << KVD_W_OWNER | 1u << KVD_W_PFN_REFS, state,
		       state == KVD_ACTIVE ? KVD_EV_ALLOC : KVD_EV_STOCK, s->id);
	kvd_table_set(&pool->table, pfn, w[KVD_W_TAG]);
	ret->pfn = pfn;
	ret->flags = foreign ? KV_GRANT_DIRTY : 0;
	ret->tag = w[KVD_W_TAG];
}

/* @nr pages that are charged, on the free list and have generations. Nothing is published
 * yet. */
static void take(struct kvd_session *s, struct kvd_attach *a, u32 state, u32 nr, u32 gfp,
		 struct kv_grant *ret_grants)
{
	struct kvd_pool *pool = a->pool;
	struct kvd_free_run run;
	u32 done = 0;

	kv_assert(s->id);
	while (done < nr) {
		u32 pfn = kvd_freelist_run(pool, gfp & KV_GFP_ZERO, nr - done, &run);

		for (u32 i = 0; i < run.nr; i++) {
			u32 next = pool->links[pfn].next;

			kvd_change_prefetch(pool, next);
			take_one(s, a, state, pfn, &ret_grants[done++]);
			pfn = next;
		}
		kvd_freelist_run_taken(pool, &run, pfn);
	}
	kvd_frames_moved(pool, s->tenant->index, KVD_FREE, state, nr);
	pool->nr_allocs += nr;
	s->tenant->allocs += nr;
}

int kvd_lease_alloc(struct kvd_session *s, struct kvd_attach *a, u32 nr, u32 gfp,
		    struct kv_grant *ret_grants, u32 *ret_pending)
{
	struct kvd_pool *pool = a->pool;
	int r;

	kv_assert(s->state == KVD_SESSION_LIVE && pool);
	if (nr == 0 || nr > KV_BATCH_MAX || (gfp & ~KV_GFP_VALID))
		return -EINVAL;
	r = lease_prepare(s, pool, nr, gfp, ret_pending);
	if (r >= 0)
		told(s, r);
	if (r)
		return r;
	take(s, a, KVD_ACTIVE, nr, gfp, ret_grants);
	kvd_table_publish(&pool->table);
	return 0;
}

/* Slots that can be stocked: pops are recognised on the way. */
static u32 mag_room(struct kvd_session *s, u32 mag, u32 *ret_slots)
{
	struct kv_magazine *shared = &s->page->magazines[mag];
	struct kvd_magazine *m = &s->mags[mag];
	u32 nr = 0;

	for (u32 slot = 0; slot < KV_MAGAZINE_SLOTS; slot++) {
		if (m->slots[slot].word && kvd_mag_popped(m, shared, slot))
			kvd_lease_popped(s, m, slot);
		/* A word that we did not put there is junk: leave the slot alone. */
		if (!m->slots[slot].word && !kv_load_relaxed64(&shared->slots[slot].word))
			ret_slots[nr++] = slot;
	}
	return nr;
}

/* Fewer will do: stock is not worth a refusal, one page is what is wanted. */
static int stock_prepare(struct kvd_session *s, struct kvd_pool *pool, u32 *nr, u32 gfp,
			 u32 *ret_pending)
{
	u64 quota = s->tenant->quota_refusals, full = s->tenant->full_refusals;
	u64 starved_ns = pool->starved_ns;
	bool starved = pool->starved;
	int r;

	for (;; *nr /= 2) {
		r = lease_prepare(s, pool, *nr, *nr > 1 ? gfp & KV_GFP_GROW : gfp,
				  ret_pending);
		if (r <= 0 || *nr == 1)
			return r;
		s->tenant->quota_refusals = quota;
		s->tenant->full_refusals = full;
		pool->starved_ns = starved_ns;
		pool->starved = starved;
	}
}

int kvd_lease_stock(struct kvd_session *s, struct kvd_attach *a, u32 mag, u32 nr, u32 gfp,
		    u32 *ret_nr, u32 *ret_pending)
{
	struct kvd_magazine *m = &s->mags[mag % KV_MAGAZINES];
	struct kv_grant grants[KV_MAGAZINE_SLOTS];
	u32 slots[KV_MAGAZINE_SLOTS], room;
	struct kvd_pool *pool = a->pool;
	int r;

	kv_assert(s->state == KVD_SESSION_LIVE && pool);
	if (mag >= KV_MAGAZINES || nr == 0 || (gfp & ~KV_GFP_VALID))
		return -EINVAL;
	if (m->nr && m->pool != pool) {
		/* Popped pages may be all that is left of the other pool. */
		mag_room(s, mag, slots);
		if (m->nr)
			return -EINVAL;
	}
	m->pool = pool;
	room = mag_room(s, mag, slots);
	nr = KV_MIN(nr, room);
	*ret_nr = 0;
	if (!nr)
		return 0;
	r = stock_prepare(s, pool, &nr, gfp, ret_pending);
	if (r >= 0)
		told(s, r);
	if (r)
		return r;
	take(s, a, KVD_MAGAZINE, nr, gfp, grants);
	for (u32 i = 0; i < nr; i++)
		pool->links[grants[i].pfn].next = mag << 8 | slots[i];
	/* The words come last: a page may be popped and checked the moment its word is
	 * there. */
	kvd_table_publish(&pool->table);
	for (u32 i = 0; i < nr; i++)
		kvd_mag_put(m, &s->page->magazines[mag], slots[i], grants[i].pfn,
			    grants[i].tag, grants[i].flags & KV_GRANT_DIRTY);
	*ret_nr = nr;
	return 0;
}
