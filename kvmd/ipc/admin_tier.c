/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/admin_tier.c - `tier`: what lies below the pools, by tier and tenant. */
#include "kvmd/ipc/admin_priv.h"

static void tenant_row(cJSON *list, const struct kvd *kvd, const char *tier, u32 i,
		       const struct kvd_space_account *a)
{
	cJSON *o = cJSON_CreateObject();

	cJSON_AddStringToObject(o, "tenant", kvd->core.tenants[i]->name);
	cJSON_AddStringToObject(o, "tier", tier);
	cJSON_AddNumberToObject(o, "pages", a->nr);
	kvd_admin_u64(o, "used_bytes", a->used_bytes);
	kvd_admin_u64(o, "min_bytes", a->min_bytes);
	kvd_admin_u64(o, "high_bytes", a->high_bytes);
	kvd_admin_u64(o, "max_bytes", a->max_bytes);
	cJSON_AddNumberToObject(o, "weight", a->weight);
	cJSON_AddItemToArray(list, o);
}

int kvd_admin_tier(struct kvd_admin_call *call)
{
	static const char *const names[KVD_TIER_NR] = {"dram", "nvme"};
	struct kvd *kvd = call->kvd;
	cJSON *list;

	kvd_tiering_status(kvd, call->out);
	list = cJSON_AddArrayToObject(call->out, "tenants");
	for (u32 t = 0; kvd->tiering.tiers && t < KVD_TIER_NR; t++) {
		const struct kvd_space *sp = kvd_tier_space(kvd->tiering.tiers, t);

		for (u32 i = 0; sp && i < KVD_TENANTS_MAX; i++)
			if (kvd->core.tenants[i])
				tenant_row(list, kvd, names[t], i, &sp->acct[i]);
	}
	return 0;
}
