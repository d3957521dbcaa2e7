/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/tenant.c - tenants and their limits. See tenant.h. Loop thread only.
 */
#include "kvmd/own/tenant.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "kvmd/own/core.h"
#include "kvmd/own/image.h"

#define WEIGHT_MAX 1000u

int kvd_limits_check(const struct kvd_core *core, const struct kvd_tenant *tenant,
		     const struct kvd_limits *limits, const char **ret_field)
{
	u64 promised = core->min_bytes_total - (tenant ? tenant->account.min_bytes : 0);

	if (limits->max_bytes == 0) {
		*ret_field = "max";
		return -EINVAL;
	}
	if (limits->high_bytes > limits->max_bytes) {
		*ret_field = "high";
		return -EINVAL;
	}
	if (limits->min_bytes > limits->high_bytes ||
	    limits->min_bytes > core->mm.limits.capacity_bytes ||
	    promised > core->mm.limits.capacity_bytes - limits->min_bytes) {
		*ret_field = "min";
		return -EINVAL;
	}
	if (limits->weight == 0 || limits->weight > WEIGHT_MAX) {
		*ret_field = "weight";
		return -EINVAL;
	}
	return 0;
}

static void limits_apply(struct kvd_core *core, struct kvd_tenant *t,
			 const struct kvd_limits *l)
{
	core->unmet_valid = false;
	core->min_bytes_total += l->min_bytes - t->account.min_bytes;
	t->account.min_bytes = l->min_bytes;
	t->account.high_bytes = l->high_bytes;
	t->account.max_bytes = l->max_bytes;
	t->account.weight = l->weight;
	t->revision++;
}

static u32 tenant_index(const struct kvd_core *core)
{
	u32 i = 0;

	while (i < KVD_TENANTS_MAX && core->tenants[i])
		i++;
	return i;
}

int kvd_tenant_create(struct kvd_core *core, struct kvd_domain *domain, const char *name,
		      const struct kvd_limits *limits, struct kvd_tenant **ret_tenant)
{
	const char *field;
	int r;

	if (!name[0] || strlen(name) >= KV_NAME_BYTES)
		return -EINVAL;
	if (kvd_tenant_find(core, name))
		return -EEXIST;
	r = kvd_limits_check(core, NULL, limits, &field);
	if (r)
		return r;
	return kvd_tenant_create_at(core, domain, tenant_index(core), name, limits,
				    ret_tenant);
}

int kvd_tenant_create_at(struct kvd_core *core, struct kvd_domain *domain, u32 index,
			 const char *name, const struct kvd_limits *limits,
			 struct kvd_tenant **ret_tenant)
{
	struct kvd_tenant *t;
	u32 slot = 0;

	if (index < KVD_TENANTS_MAX && core->tenants[index])
		return -EBUSY;
	while (slot < KVD_DOMAIN_TENANTS_MAX && (domain->tenant_slots & (1u << slot)))
		slot++;
	if (index >= KVD_TENANTS_MAX || slot == KVD_DOMAIN_TENANTS_MAX)
		return -ENOSPC;
	t = calloc(1, sizeof(*t));
	if (!t)
		return -ENOMEM;
	strcpy(t->name, name);
	t->domain = domain;
	t->index = (u16)index;
	t->account.slot = slot;
	t->account.domain_id = domain->id;
	t->account.cache_use = KVD_CACHE_USE_ONE / 2;
	limits_apply(core, t, limits);
	kvd_pressure_init(&t->pressure, core->mm.now_ns);
	domain->tenant_slots |= 1u << slot;
	domain->nr_tenants++;
	list_add_tail(&domain->tenants, &t->node);
	core->tenants[index] = t;
	core->mm.accounts[index] = &t->account;
	kvd_image_tenant_set(core->image, index, domain->id, t->name);
	*ret_tenant = t;
	return 0;
}

struct kvd_tenant *kvd_tenant_find(struct kvd_core *core, const char *name)
{
	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		if (core->tenants[i] && !strcmp(core->tenants[i]->name, name))
			return core->tenants[i];
	}
	return NULL;
}

int kvd_tenant_set_limits(struct kvd_core *core, struct kvd_tenant *tenant,
			  const struct kvd_limits *limits, bool *ret_deferred)
{
	const char *field;
	int r = kvd_limits_check(core, tenant, limits, &field);

	if (r)
		return r;
	limits_apply(core, tenant, limits);
	*ret_deferred = tenant->account.used_bytes > limits->max_bytes;
	return 0;
}

int kvd_tenant_destroy(struct kvd_core *core, struct kvd_tenant *tenant)
{
	struct kvd_domain *domain = tenant->domain;

	kv_assert(core->tenants[tenant->index] == tenant);
	if (tenant->nr_sessions || tenant->account.used_bytes)
		return -EBUSY;
	core->unmet_valid = false;
	core->min_bytes_total -= tenant->account.min_bytes;
	core->tenants[tenant->index] = NULL;
	core->mm.accounts[tenant->index] = NULL;
	kvd_image_tenant_set(core->image, tenant->index, 0, NULL);
	domain->tenant_slots &= ~(1u << tenant->account.slot);
	domain->nr_tenants--;
	list_del(&tenant->node);
	free(tenant);
	return 0;
}
