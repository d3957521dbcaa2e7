/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/reclaim.h - turning CACHED pages into FREE ones.   (tour 12/12)
 *
 * Tenants whose cache is of no use to them give first, then those above `high`, then
 * those above `min` by weight, nobody below `min` (except to itself). Inside a tenant:
 * leaf-first LRU. Background work is done in slices
 * by kvd_reclaim_run(), never inside an admission; KV_GFP_WAIT may reclaim directly.
 */
#ifndef KVD_RECLAIM_H
#define KVD_RECLAIM_H

#include "kvmd/mm/pool.h"

#define KVD_RECLAIM_SLICE 256u /* evictions in one loop turn */

/** kvd_reclaim_hit() - a CACHED page that @acct pays for was found again */
void kvd_reclaim_hit(struct kvd_account *acct);

/**
 * kvd_reclaim_available() - CACHED pages of @pool that @tenant's request may take
 */
u32 kvd_reclaim_available(const struct kvd_pool *pool, u16 tenant);

/**
 * kvd_reclaim_pool() - evict up to @nr CACHED pages of @pool on behalf of @tenant
 * @own_only: only pages that @tenant itself pays for (it is at its own max)
 *
 * Return: pages evicted: in QUARANTINE now.
 */
u32 kvd_reclaim_pool(struct kvd_pool *pool, u16 tenant, u32 nr, bool own_only);

/** kvd_reclaim_wake() - let background reclaim free @nr pages of @pool */
void kvd_reclaim_wake(struct kvd_pool *pool, u32 nr);

/**
 * kvd_reclaim_extents() - let background reclaim empty an extent of another pool for
 * @pool
 *
 * Return: true: there is an extent of FREE and CACHED pages only, whose payers stay above
 * min.
 */
bool kvd_reclaim_extents(struct kvd_pool *pool);

/**
 * kvd_reclaim_run() - one slice of background reclaim over all pools
 *
 * Return: true when there is more to do now.
 */
bool kvd_reclaim_run(struct kvd_mm *mm);

#endif /* KVD_RECLAIM_H */
