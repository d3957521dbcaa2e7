/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/tenant.h - who pays. Bound to Unix credentials by configuration (ipc/, config),
 * never by what a request says. Loop thread only.
 */
#ifndef KVD_TENANT_H
#define KVD_TENANT_H

#include "base/list.h"
#include "kvmd/mm/pool.h"
#include "kvmd/own/pressure.h"

struct kvd_core;
struct kvd_domain;

/**
 * struct kvd_limits - what a tenant may have on this GPU
 * @min_bytes: guaranteed, never reclaimed for others; sum of all <= capacity
 * @high_bytes: reclaim takes from tenants above it first; min <= high <= max
 * @max_bytes: hard
 * @weight: 1..1000
 */
struct kvd_limits {
	u64 min_bytes;
	u64 high_bytes;
	u64 max_bytes;
	u32 weight;
};

/**
 * struct kvd_tenant - one tenant
 * @node: in domain->tenants
 * @domain: borrowed
 * @name: unique in the core
 * @index: in core->tenants and in page records
 * @account: usage and limits
 * @nr_sessions: connected
 * @revision: of the limits
 * @pressure: how long its engines wait for memory
 * @quota_refusals, @full_refusals, @allocs: counters
 */
struct kvd_tenant {
	struct list_node node;
	struct kvd_domain *domain;
	char name[KV_NAME_BYTES];
	u16 index;
	struct kvd_account account;
	u32 nr_sessions;
	u64 revision;
	struct kvd_pressure pressure;
	u64 quota_refusals, full_refusals, allocs;
};

/**
 * kvd_limits_check() - are limits of a tenant acceptable?
 * @tenant: whose they will be; NULL = a new one
 * @ret_field: "min", "high", "max" or "weight" on failure
 *
 * Return: 0; -EINVAL.
 */
int kvd_limits_check(const struct kvd_core *core, const struct kvd_tenant *tenant,
		     const struct kvd_limits *limits, const char **ret_field);

/**
 * kvd_tenant_create() - a tenant in a domain
 *
 * Return: 0; -EEXIST the name is taken; -EINVAL limits or name; -ENOSPC too many;
 * -ENOMEM.
 */
int kvd_tenant_create(struct kvd_core *core, struct kvd_domain *domain, const char *name,
		      const struct kvd_limits *limits, struct kvd_tenant **ret_tenant);

/** kvd_tenant_create_at() - the same under a given index; limits are not checked. Return:
 * also -EBUSY it is taken */
int kvd_tenant_create_at(struct kvd_core *core, struct kvd_domain *domain, u32 index,
			 const char *name, const struct kvd_limits *limits,
			 struct kvd_tenant **ret_tenant);

/** kvd_tenant_find() - by name, or NULL */
struct kvd_tenant *kvd_tenant_find(struct kvd_core *core, const char *name);

/**
 * kvd_tenant_set_limits() - new limits; lowering under use is accepted
 * @ret_deferred: usage is above the new max: no grants until it has fallen
 *
 * Return: 0; -EINVAL as kvd_limits_check().
 */
int kvd_tenant_set_limits(struct kvd_core *core, struct kvd_tenant *tenant,
			  const struct kvd_limits *limits, bool *ret_deferred);

/** kvd_tenant_destroy() - Return: 0; -EBUSY it has sessions or pages (CACHED ones count)
 */
int kvd_tenant_destroy(struct kvd_core *core, struct kvd_tenant *tenant);

#endif /* KVD_TENANT_H */
