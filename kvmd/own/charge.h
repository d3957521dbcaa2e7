/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/charge.h - the one ledger: check and charge are one act (design section 7).
 *
 * A tenant pays pages x stride for every page of its that is neither FREE nor ABSENT.
 * Quarantine is still paid for: the memory is not back yet. Loop thread only.
 */
#ifndef KVD_CHARGE_H
#define KVD_CHARGE_H

#include "kvmd/mm/pool.h"

struct kvd_core;
struct kvd_tenant;

/**
 * kvd_charge_try() - charge @nr pages of @pool to @tenant, or nothing
 *
 * Return: 0; KV_QUOTA: above the tenant's max; KV_FULL: the memory is promised to tenants
 *	that are below their min.
 */
int kvd_charge_try(struct kvd_tenant *tenant, struct kvd_pool *pool, u32 nr);

/** kvd_charge_cached() - bytes of CACHED pages that @t pays for */
u64 kvd_charge_cached(const struct kvd_core *core, const struct kvd_tenant *t);

/** kvd_charge_drop() - give back @nr pages' worth */
void kvd_charge_drop(struct kvd_tenant *tenant, struct kvd_pool *pool, u32 nr);

#endif /* KVD_CHARGE_H */
