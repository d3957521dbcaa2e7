/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/charge.c - the ledger. See charge.h.
 *
 * Loop thread only, so check and charge cannot come apart (case O31).
 */
#include "kvmd/own/charge.h"
#include "base/mutant.h"
#include "kvmd/own/core.h"

u64 kvd_charge_cached(const struct kvd_core *core, const struct kvd_tenant *t)
{
	u64 bytes = 0;

	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		const struct kvd_pool *pool = core->mm.pools[i];

		if (pool && pool->domain_id == t->account.domain_id)
			bytes += (u64)kvd_lru_nr(&pool->lru[t->account.slot]) *
				 pool->geo.stride_bytes;
	}
	return bytes;
}

/* CACHED pages that others may have: they bring the tenant no lower than its min. */
static u64 spare_cached(const struct kvd_core *core, const struct kvd_tenant *t)
{
	u64 used = t->account.used_bytes;
	u64 above = used - KV_MIN(used, t->account.min_bytes);

	return KV_MIN(above, kvd_charge_cached(core, t));
}

/*
 * Tenants of the domain that are below their min must still find their memory after this
 * charge: in what the domain can have, less what is used, plus caches that may be taken.
 * Other domains' promises are kept where extents are made (kvd_domain_may_grow()). An
 * extent that lies in another pool of the domain counts although its free pages have
 * another size: min is about bytes.
 */
static bool promises_kept(struct kvd_core *core, const struct kvd_tenant *tenant,
			  u64 bytes)
{
	const struct kvd_domain *domain = tenant->domain;
	s64 room = (s64)core->mm.limits.capacity_bytes - (s64)core->mm.extent_bytes_used;
	const struct kvd_tenant *t;
	u64 unmet = 0;

	list_for_each_entry (t, &domain->tenants, node) {
		u64 used = t->account.used_bytes;

		if (t != tenant)
			unmet +=
				t->account.min_bytes - KV_MIN(used, t->account.min_bytes);
		room -= (s64)used;
	}
	if (!unmet)
		return true;
	room += (s64)domain->extent_bytes - (s64)kvd_domain_unmet_others(core, domain);
	if (room >= (s64)(bytes + unmet) && !KV_MUTANT(charge_walks_pools))
		return true;
	/* Every pool's lists are looked at only when it matters. */
	list_for_each_entry (t, &domain->tenants, node)
		room += (s64)spare_cached(core, t);
	return room >= (s64)(bytes + unmet);
}

int kvd_charge_try(struct kvd_tenant *tenant, struct kvd_pool *pool, u32 nr)
{
	struct kvd_core *core = kvd_core_of(pool->mm);
	struct kvd_account *acct = &tenant->account;
	u64 bytes = (u64)nr * pool->geo.stride_bytes;

	kv_assert(acct->domain_id == pool->domain_id);
	if (acct->used_bytes + bytes > acct->max_bytes && !KV_MUTANT(no_quota))
		return KV_QUOTA;
	if (core->min_bytes_total && acct->used_bytes + bytes > acct->min_bytes &&
	    !promises_kept(core, tenant, bytes) && !KV_MUTANT(min_not_kept))
		return KV_FULL;
	acct->used_bytes += bytes;
	return 0;
}

void kvd_charge_drop(struct kvd_tenant *tenant, struct kvd_pool *pool, u32 nr)
{
	u64 bytes = (u64)nr * pool->geo.stride_bytes;

	kv_assert(tenant->account.used_bytes >= bytes);
	tenant->account.used_bytes -= bytes;
}
