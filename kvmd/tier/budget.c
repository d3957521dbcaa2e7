/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/budget.c - tenants as the tiers see them: names that mean nothing outside their
 * domain, and what each may store.
 *
 * Loop thread only.
 */
#include <sodium.h>
#include <string.h>

#include "kvmd/tier/tier_priv.h"

#define DROP_SLICE 4096u

static void ident_make(const struct kvd_tenant *tenant, struct kvd_ident *ret)
{
	static const u8 message[] = "kvmd tier";
	const struct kvd_domain *d = tenant->domain;
	u8 hash[crypto_generichash_BYTES_MIN];

	kv_assert(!crypto_generichash(ret->domain, sizeof(ret->domain), message,
				      sizeof(message), d->secret, sizeof(d->secret)));
	kv_assert(!crypto_generichash(hash, sizeof(hash), (const u8 *)tenant->name,
				      strlen(tenant->name), d->secret,
				      sizeof(d->secret)));
	memcpy(&ret->tenant, hash, sizeof(ret->tenant));
}

bool tier_same_domain(const struct kvd_tenant *tenant, const struct kvd_ident *ident)
{
	struct kvd_ident now;

	ident_make(tenant, &now);
	return !memcmp(now.domain, ident->domain, sizeof(now.domain));
}

const struct tier_ident *tier_ident_of(struct kvd_tiers *t, u16 tenant)
{
	struct tier_ident *id = &t->idents[tenant];
	const struct kvd_tenant *have = t->core->tenants[tenant];

	if (!id->valid && have) {
		ident_make(have, &id->ident);
		id->domain_id = have->domain->id;
		id->valid = true;
	}
	return id;
}

bool tier_identify(void *arg, const struct kvd_ident *ident, u32 *ret_domain,
		   u16 *ret_tenant)
{
	struct kvd_tiers *t = arg;

	for (u16 i = 0; i < KVD_TENANTS_MAX; i++) {
		const struct tier_ident *id = tier_ident_of(t, i);

		if (!id->valid || memcmp(&id->ident, ident, sizeof(*ident)))
			continue;
		*ret_domain = id->domain_id;
		*ret_tenant = i;
		return true;
	}
	return false;
}

void tier_describe(void *arg, u16 tenant, struct kvd_ident *ret)
{
	struct kvd_tiers *t = arg;

	*ret = t->idents[tenant].ident;
}

/* A tenant or domain that is gone, or has its index from another one, stores nothing. */
void tier_tenants_check(struct kvd_tiers *t)
{
	for (u16 i = 0; i < KVD_TENANTS_MAX; i++) {
		struct tier_ident *id = &t->idents[i];
		struct tier_ident now = {.valid = false};
		const struct kvd_tenant *have = t->core->tenants[i];
		u32 left =
			t->dram.acct[i].nr + (t->store ? t->store->space.acct[i].nr : 0);

		if (!id->valid)
			continue;
		if (have) {
			ident_make(have, &now.ident);
			if (have->domain->id == id->domain_id &&
			    !memcmp(&now.ident, &id->ident, sizeof(now.ident)))
				continue;
		}
		left -= kvd_space_drop_tenant(&t->dram, i, DROP_SLICE);
		if (t->store)
			left -= kvd_space_drop_tenant(&t->store->space, i, DROP_SLICE);
		id->valid = left != 0; /* what is being copied goes next time */
	}
}

void kvd_tier_set_limits(struct kvd_tiers *t, enum kvd_tier_id tier, u16 tenant,
			 const struct kvd_tier_limits *l)
{
	struct kvd_space *sp = tier_space_of(t, tier);
	struct kvd_space_account *a;

	if (!sp)
		return;
	a = &sp->acct[tenant];
	a->min_bytes = l->min_bytes;
	a->high_bytes = l->high_bytes;
	a->max_bytes = l->max_bytes;
	a->weight = l->weight;
	while (a->used_bytes > a->max_bytes && kvd_space_drop_tenant(sp, tenant, 1))
		;
}
