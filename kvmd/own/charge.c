/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/charge.c - the ledger. See charge.h.
 *
 * Loop thread only, so check and charge cannot come apart (case O31).
 */
#include "kvmd/own/charge.h"
#include "base/mutant.h"
#include "kvmd/own/core.h"

/*
 * What @domain could have in all, less what its other tenants are still promised. An
 * extent that lies in another pool of the domain counts although its free pages have
 * another size; min is a promise about bytes, and growing one pool never takes what
 * another domain is promised.
 */
static bool promises_kept(const struct kvd_core *core, const struct kvd_tenant *tenant,
			  u64 bytes)
{
	const struct kvd_domain *domain = tenant->domain;
	s64 room = (s64)core->mm.limits.capacity_bytes - (s64)core->mm.extent_bytes_used;
	const struct kvd_tenant *t;

	room += (s64)domain->extent_bytes;
	for (u32 i = 0; i < KVD_DOMAINS_MAX; i++) {
		if (core->domains[i] && core->domains[i] != domain)
			room -= (s64)kvd_domain_unmet_min(core, core->domains[i]);
	}
	list_for_each_entry (t, &domain->tenants, node) {
		u64 used = t->account.used_bytes;

		if (t != tenant)
			used = KV_MAX(used, t->account.min_bytes);
		room -= (s64)used;
	}
	return room >= (s64)bytes;
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
	    !promises_kept(core, tenant, bytes))
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
