/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/steer.h - what an operator does to pages and tenants at run time: hold cached
 * prefixes, drain a tenant, change its limits by revision. Each has a dry run that counts
 * and changes nothing. Loop thread only; not a request path: a call may look at every
 * page of a pool once.
 */
#ifndef KVD_STEER_H
#define KVD_STEER_H

#include "kvmd/own/tenant.h"

/**
 * kvd_steer_hold() - no reclaim and no eviction takes this page or those before it, but one of
 *	the whole domain
 * @pfn: in the prefix index
 * @ret_nr: pages that were not held before
 *
 * The pages of the prefix up to @pfn are held, or those that are left would not be found.
 * Held pages stay charged to their tenant; the mark is in the page record and outlives
 * kvmd. A revoke takes them all the same.
 *
 * Return: 0; -ENOENT the page is not in the index.
 */
int kvd_steer_hold(struct kvd_pool *pool, u32 pfn, bool dry_run, u32 *ret_nr);

/**
 * kvd_steer_unhold() - undo it, for the pages that no other held page comes after
 * @ret_nr: pages that are not held any more
 *
 * Return: 0; -ENOENT the page is not held; -ENOMEM.
 */
int kvd_steer_unhold(struct kvd_pool *pool, u32 pfn, bool dry_run, u32 *ret_nr);

/** kvd_steer_nr_held() - held pages that nobody uses, of one tenant in one pool */
static inline u32 kvd_steer_nr_held(const struct kvd_pool *pool,
				    const struct kvd_tenant *t)
{
	return pool->domain_id == t->account.domain_id
		       ? pool->lru[t->account.slot].held.nr
		       : 0;
}

/**
 * struct kvd_drained - how far a tenant is
 * @evicted: pages dropped by this call
 * @left_pages: still there: in use, in quarantine or held
 * @sessions: connected
 */
struct kvd_drained {
	u32 evicted;
	u32 left_pages;
	u32 sessions;
};

/**
 * kvd_steer_drain() - a tenant gets nothing more and gives back what nobody uses
 * @on: false: it may have memory again
 *
 * Stocked pages are recalled, CACHED ones evicted; what its engines use they keep until
 * they are done with it. Every later request for memory is KV_QUOTA. Not kept across a
 * restart of kvmd.
 */
void kvd_steer_drain(struct kvd_core *core, struct kvd_tenant *t, bool on, bool dry_run,
		     struct kvd_drained *ret);

/** enum kvd_steered - what became of new limits */
enum kvd_steered {
	KVD_STEER_APPLIED,
	KVD_STEER_DEFERRED, /* applied; the tenant holds more than its new max for now */
	KVD_STEER_STALE,    /* the limits were changed since they were read */
	KVD_STEER_CONFLICT, /* they contradict each other or what others were promised */
};

/** kvd_steered_str() - "applied", "deferred", "stale", "conflict" */
const char *kvd_steered_str(enum kvd_steered s);

/**
 * kvd_steer_limits() - change a tenant's limits if nobody else has since
 * @revision: of the limits the change was made from
 * @ret_field: which one contradicts, on KVD_STEER_CONFLICT
 *
 * Only KVD_STEER_APPLIED and KVD_STEER_DEFERRED change anything. The next reload of the
 * configuration sets what the file says.
 */
enum kvd_steered kvd_steer_limits(struct kvd_core *core, struct kvd_tenant *t,
				  const struct kvd_limits *limits, u64 revision,
				  bool dry_run, const char **ret_field);

#endif /* KVD_STEER_H */
