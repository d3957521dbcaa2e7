/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/reclaim.c - CACHED pages become FREE ones: who gives, and how many.   (tour 12/12)
 *
 * Loop thread only.
 */
#include "kvmd/mm/reclaim.h"
#include "base/mutant.h"

/* Pages taken from one tenant before the choice is made again. */
#define DONOR_CHUNK  16u
/* Pages that are worth a copy job of their own. */
#define REFILL_LEAST 8u

/* Evicted pages are charged until their grace period is over, so they count as given
 * here. */
static u64 standing(const struct kvd_account *acct)
{
	return acct->used_bytes - KV_MIN(acct->used_bytes, acct->quarantine_bytes);
}

static bool donor_ok(const struct kvd_pool *pool, const struct kvd_account *acct,
		     bool self)
{
	return self || standing(acct) >= acct->min_bytes + pool->geo.stride_bytes;
}

/*
 * A page that leaves the cache by a hit and one that leaves by eviction pull the average
 * to opposite ends, by 1/256 each.
 */
#define USE_SHIFT 8

void kvd_reclaim_hit(struct kvd_account *acct)
{
	acct->cache_use +=
		(KVD_CACHE_USE_ONE - acct->cache_use + (1u << USE_SHIFT) - 1) >>
		USE_SHIFT;
}

static void use_miss(struct kvd_account *acct)
{
	acct->cache_use -= (acct->cache_use + (1u << USE_SHIFT) - 1) >> USE_SHIFT;
}

/*
 * How urgently a tenant gives, before it matters how much it has:
 *	2: its cache is of no use to it (one page in eight at most is found again) and takes
 *	   more than a quarter of `high`: a neighbour that streams through prompts once does
 *	   not push out caches that are in use (measured: kvbench replay). The quarter stays,
 *	   so that it can show use again;
 *	1: above `high`;
 *	0: all others.
 */
static u32 urgency(const struct kvd_account *acct, u64 have)
{
	if (acct->cache_use < KVD_CACHE_USE_ONE / 8 && have > acct->high_bytes / 4 &&
	    !KV_MUTANT(cache_use_ignored))
		return 2;
	return have > acct->high_bytes;
}

/*
 * Who gives next: the most urgent, among these the one that is furthest above its min for
 * its weight. The asker's own pages count like a tenant's at its min if nobody else's may
 * be taken.
 */
static struct kvd_account *donor(const struct kvd_pool *pool, u16 tenant)
{
	const struct kvd_mm *mm = pool->mm;
	struct kvd_account *best = NULL;
	u64 best_score = 0;
	u32 best_urgency = 0;

	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		struct kvd_account *acct = mm->accounts[i];
		u64 score, have;
		u32 urgent;

		if (!acct || acct->domain_id != pool->domain_id ||
		    !kvd_lru_nr(&pool->lru[acct->slot]))
			continue;
		if (!donor_ok(pool, acct, i == tenant))
			continue;
		have = standing(acct);
		urgent = urgency(acct, have);
		score = (have - KV_MIN(have, acct->min_bytes)) /
			(KV_MUTANT(weights_ignored) ? 1 : acct->weight);
		if (!best || urgent > best_urgency ||
		    (urgent == best_urgency && score > best_score)) {
			best = acct;
			best_score = score;
			best_urgency = urgent;
		}
	}
	return best;
}

/* No further below a quarter of `high` than the choice was meant. */
static u32 chunk_of(const struct kvd_pool *pool, const struct kvd_account *acct)
{
	u64 have = standing(acct), spare = have - KV_MIN(have, acct->high_bytes / 4);

	if (urgency(acct, have) < 2)
		return DONOR_CHUNK;
	return (u32)KV_MIN((u64)DONOR_CHUNK,
			   kv_div_round_up(spare, pool->geo.stride_bytes));
}

u32 kvd_reclaim_available(const struct kvd_pool *pool, u16 tenant)
{
	const struct kvd_mm *mm = pool->mm;
	u32 nr = 0;

	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		const struct kvd_account *acct = mm->accounts[i];
		u64 above;
		u32 cached;

		if (!acct || acct->domain_id != pool->domain_id)
			continue;
		cached = kvd_lru_nr(&pool->lru[acct->slot]);
		above = standing(acct) - KV_MIN(standing(acct), acct->min_bytes);
		if (i != tenant)
			cached = (u32)KV_MIN((u64)cached, above / pool->geo.stride_bytes);
		nr += cached;
	}
	return nr;
}

static bool evict_one(struct kvd_pool *pool, struct kvd_account *acct)
{
	u32 pfn = kvd_lru_victim(&pool->lru[acct->slot]);

	if (pfn == KVD_PFN_NONE)
		return false;
	/* A tier takes no more for the moment: what it has comes back first. */
	if (pool->mm->ops->evict(pool, pfn)) {
		pool->evict_again = true;
		return false;
	}
	use_miss(acct);
	pool->nr_evictions++;
	return true;
}

u32 kvd_reclaim_pool(struct kvd_pool *pool, u16 tenant, u32 nr, bool own_only)
{
	struct kvd_account *acct = own_only ? pool->mm->accounts[tenant] : NULL;
	u32 done = 0, chunk = 0;

	pool->evict_again = false;
	while (done < nr) {
		if (!own_only && !chunk) {
			acct = donor(pool, tenant);
			if (!acct)
				break;
			chunk = chunk_of(pool, acct);
		}
		if (!own_only && !donor_ok(pool, acct,
					   tenant < KVD_TENANTS_MAX &&
						   pool->mm->accounts[tenant] == acct)) {
			chunk = 0;
			continue;
		}
		if (!evict_one(pool, acct)) {
			if (own_only || pool->evict_again)
				break;
			chunk = 0;
			continue;
		}
		chunk = own_only ? 0 : chunk - 1;
		done++;
	}
	kvd_table_publish(&pool->table);
	return done;
}

void kvd_reclaim_wake(struct kvd_pool *pool, u32 nr)
{
	pool->reclaim_debt = KV_MAX(pool->reclaim_debt, nr);
}

/*
 * A pool that cannot grow any more keeps a few pages free ahead of need: from the low mark
 * on up to the high one. Pages that a tier is copying count as given, but are not there
 * yet: until they are, what is taken meanwhile is made up for at once, so that the copies
 * lie one behind the other in a small pool, too (measured: kvbench spill, 4 GiB).
 */
static u32 watermark_debt(const struct kvd_pool *pool)
{
	u32 coming = pool->nr[KVD_FREE] + kvd_pool_nr_coming(pool);
	const struct kvd_mm *mm = pool->mm;

	if (mm->extent_bytes_used + pool->geo.extent_bytes <= mm->limits.capacity_bytes ||
	    !mm->limits.capacity_bytes)
		return 0;
	if (coming >= pool->low_pages &&
	    (!pool->nr[KVD_SPILLING] || coming + REFILL_LEAST > pool->high_pages))
		return 0;
	return pool->high_pages - coming;
}

static u32 own_debt_run(struct kvd_pool *pool, u16 tenant, u32 budget)
{
	struct kvd_account *acct = pool->mm->accounts[tenant];
	u64 stride = pool->geo.stride_bytes;
	u32 want = (u32)KV_MIN((u64)budget, kv_div_round_up(acct->reclaim_debt, stride));
	u32 got = kvd_reclaim_pool(pool, tenant, want, true);

	acct->reclaim_debt -= KV_MIN(acct->reclaim_debt, (u64)got * stride);
	pool->mm->own_debts_wait |= pool->evict_again;
	return got;
}

static u32 own_debts_run(struct kvd_mm *mm, u32 budget)
{
	u32 done = 0;

	mm->own_debts_wait = false;
	for (u32 t = 0; t < KVD_TENANTS_MAX && done < budget; t++) {
		struct kvd_account *acct = mm->accounts[t];

		for (u32 p = 0; p < KVD_POOLS_MAX && acct && acct->reclaim_debt; p++) {
			struct kvd_pool *pool = mm->pools[p];

			if (pool && pool->domain_id == acct->domain_id && done < budget)
				done += own_debt_run(pool, (u16)t, budget - done);
		}
		/* What is left cannot be had: every page of it is in use. */
		if (acct && done < budget && !mm->own_debts_wait)
			acct->reclaim_debt = 0;
	}
	return done;
}

/* FREE and CACHED pages only, at least one of these, and no payer falls below its min by
 * it. */
static bool extent_can_go(const struct kvd_pool *pool, u32 index)
{
	const struct kvd_extent *e = &pool->extents[index];
	u32 nr = 1u << pool->geo.shift, first = index << pool->geo.shift;
	u64 bytes = (u64)e->nr_cached * pool->geo.stride_bytes;

	if (e->state != KVD_EXTENT_LIVE || !e->nr_cached ||
	    e->nr_free + e->nr_cached != nr)
		return false;
	for (u32 pfn = first; pfn < first + nr; pfn++) {
		const struct kvd_frame *f = &pool->frames[pfn];

		if (f->state == KVD_CACHED &&
		    standing(pool->mm->accounts[f->tenant]) <
			    pool->mm->accounts[f->tenant]->min_bytes + bytes)
			return false;
	}
	return true;
}

/* The one that costs the fewest cached bytes. */
static bool extent_find(struct kvd_pool *not_this, struct kvd_pool **ret_pool,
			u32 *ret_index)
{
	struct kvd_mm *mm = not_this->mm;
	u64 least = ~0ull, bytes;

	for (u32 p = 0; p < KVD_POOLS_MAX; p++) {
		struct kvd_pool *pool = mm->pools[p];

		if (!pool || pool == not_this || !pool->nr[KVD_CACHED])
			continue;
		if (pool->domain_id != not_this->domain_id && !mm->ops->may_shrink(pool))
			continue;
		for (u32 i = 0; i < pool->nr_extents; i++) {
			bytes = pool->extents[i].nr_cached * pool->geo.stride_bytes;
			if (bytes >= least || !extent_can_go(pool, i))
				continue;
			least = bytes;
			*ret_pool = pool;
			*ret_index = i;
		}
	}
	return least != ~0ull;
}

bool kvd_reclaim_extents(struct kvd_pool *pool)
{
	struct kvd_pool *donor_pool;
	u32 index;

	if (!pool->mm->ops->may_grow(pool) || !extent_find(pool, &donor_pool, &index))
		return false;
	pool->wants_extent = true;
	return true;
}

static u32 extent_empty(struct kvd_pool *for_pool)
{
	struct kvd_pool *pool;
	u32 index, done = 0;

	for_pool->wants_extent = false;
	if (!extent_find(for_pool, &pool, &index))
		return 0;
	for (u32 pfn = index << pool->geo.shift; pfn < (index + 1) << pool->geo.shift;
	     pfn++) {
		if (pool->frames[pfn].state != KVD_CACHED)
			continue;
		if (pool->mm->ops->evict(pool, pfn)) {
			for_pool->wants_extent = true; /* the rest in a later turn */
			break;
		}
		pool->nr_evictions++;
		done++;
	}
	kvd_table_publish(&pool->table);
	return done;
}

bool kvd_reclaim_run(struct kvd_mm *mm)
{
	u32 done = mm->own_debts ? own_debts_run(mm, KVD_RECLAIM_SLICE) : 0;

	if (done < KVD_RECLAIM_SLICE)
		mm->own_debts = mm->own_debts && mm->own_debts_wait;
	for (u32 p = 0; p < mm->pools_end; p++) {
		struct kvd_pool *pool = mm->pools[p];
		u32 debt, want, got;

		if (!pool)
			continue;
		if (pool->wants_extent)
			done += extent_empty(pool);
		debt = KV_MAX(pool->reclaim_debt, watermark_debt(pool));
		want = KV_MIN(debt, KVD_RECLAIM_SLICE - KV_MIN(done, KVD_RECLAIM_SLICE));
		if (KV_MUTANT(reclaim_whole_debt))
			want = debt;
		if (!want)
			continue;
		got = kvd_reclaim_pool(pool, KVD_TENANTS_MAX, want, false);
		done += got;
		if (got < want && !pool->evict_again)
			pool->reclaim_debt = 0;
		pool->reclaim_debt -= KV_MIN(pool->reclaim_debt, got);
	}
	return done >= KVD_RECLAIM_SLICE;
}
