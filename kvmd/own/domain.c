/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/domain.c - domains: what they were promised, forgetting their prefixes. See
 * domain.h.
 *
 * Loop thread only.
 */
#include "kvmd/own/domain.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/mutant.h"
#include "kvmd/own/core.h"
#include "kvmd/own/image.h"

int kvd_domain_create(struct kvd_core *core, const char *name, const u8 *secret,
		      struct kvd_domain **ret_domain)
{
	u32 id = 0;

	while (id < KVD_DOMAINS_MAX && core->domains[id])
		id++;
	return kvd_domain_create_at(core, id, name, secret, ret_domain);
}

int kvd_domain_create_at(struct kvd_core *core, u32 id, const char *name,
			 const u8 *secret, struct kvd_domain **ret_domain)
{
	struct kvd_domain *d;

	if (!name[0] || strlen(name) >= sizeof(d->name))
		return -EINVAL;
	if (kvd_domain_find(core, name))
		return -EEXIST;
	if (id >= KVD_DOMAINS_MAX)
		return -ENOSPC;
	if (core->domains[id])
		return -EBUSY;
	d = calloc(1, sizeof(*d));
	if (!d)
		return -ENOMEM;
	d->id = id;
	strcpy(d->name, name);
	memcpy(d->secret, secret, sizeof(d->secret));
	kvd_reader_group_init(&d->group, core->mm.grace.epoch);
	list_init(&d->tenants);
	core->domains[id] = d;
	core->domains_end = KV_MAX(core->domains_end, id + 1);
	core->unmet_valid = false;
	kvd_image_domain_set(core->image, id, d->name);
	*ret_domain = d;
	return 0;
}

struct kvd_domain *kvd_domain_find(struct kvd_core *core, const char *name)
{
	for (u32 i = 0; i < KVD_DOMAINS_MAX; i++) {
		if (core->domains[i] && !strcmp(core->domains[i]->name, name))
			return core->domains[i];
	}
	return NULL;
}

/* Can the pool go? Nothing used, nobody there, no fd of an extent with anybody. */
static bool pool_unused(const struct kvd_pool *pool)
{
	if (kvd_pool_nr_used(pool) || pool->nr_sessions)
		return false;
	for (u32 i = 0; i < pool->nr_extents; i++) {
		if (pool->extents[i].nr_given)
			return false;
	}
	return true;
}

int kvd_domain_destroy(struct kvd_core *core, struct kvd_domain *domain)
{
	if (domain->nr_tenants || !list_empty(&domain->group.readers))
		return -EBUSY;
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		if (core->mm.pools[i] && core->mm.pools[i]->owner == domain &&
		    !pool_unused(core->mm.pools[i]))
			return -EBUSY;
	}
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		if (core->mm.pools[i] && core->mm.pools[i]->owner == domain)
			kvd_pool_destroy(core->mm.pools[i]);
	}
	kv_assert(domain->extent_bytes == 0);
	core->domains[domain->id] = NULL;
	while (core->domains_end && !core->domains[core->domains_end - 1])
		core->domains_end--;
	kvd_image_domain_set(core->image, domain->id, NULL);
	core->unmet_valid = false;
	memset(domain->secret, 0, sizeof(domain->secret));
	free(domain);
	return 0;
}

u32 kvd_domain_pool_room(const struct kvd_core *core, const struct kvd_domain *domain)
{
	u32 nr_of[KVD_DOMAINS_MAX] = {0}, unused = 0, kept = 0;

	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		if (core->mm.pools[i])
			nr_of[core->mm.pools[i]->domain_id]++;
		else
			unused++;
	}
	for (u32 i = 0; i < KVD_DOMAINS_MAX; i++)
		kept += core->domains[i] && core->domains[i] != domain && !nr_of[i];
	return unused - KV_MIN(unused, kept);
}

void kvd_domain_pools_trim(struct kvd_core *core)
{
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		if (core->mm.pools[i] && pool_unused(core->mm.pools[i]))
			kvd_pool_destroy(core->mm.pools[i]);
	}
	core->unmet_valid = false;
}

static void pool_evict(struct kvd_pool *pool, bool dry_run, struct kvd_evicted *ret)
{
	for (u32 pfn = 0; pfn < pool->geo.nr_pages; pfn++) {
		struct kvd_frame *f = &pool->frames[pfn];

		if (f->state == KVD_CACHED) {
			ret->cached++;
			if (!dry_run)
				kvd_prefix_evict(pool, pfn);
		} else if (f->state == KVD_SEALED && (f->flags & KVD_FRAME_INDEXED)) {
			ret->unindexed++;
			if (!dry_run && !KV_MUTANT(reset_keeps_index))
				kvd_prefix_forget(pool, pfn);
		}
	}
	kvd_table_publish(&pool->table);
}

void kvd_domain_evict(struct kvd_core *core, struct kvd_domain *domain, bool dry_run,
		      struct kvd_evicted *ret)
{
	memset(ret, 0, sizeof(*ret));
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		struct kvd_pool *pool = core->mm.pools[i];

		if (pool && pool->owner == domain)
			pool_evict(pool, dry_run, ret);
	}
}

/* Bytes of extents that hold @bytes of pages, padding included. */
static u64 extents_for(const struct kvd_core *core, const struct kvd_domain *domain,
		       u64 bytes)
{
	const struct kvd_pool *best = NULL;

	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		const struct kvd_pool *pool = core->mm.pools[i];

		if (pool && pool->owner == domain &&
		    (!best || pool->geo.extent_bytes > best->geo.extent_bytes))
			best = pool;
	}
	if (!best)
		return kv_div_round_up(bytes, core->mm.limits.extent_min_bytes) *
		       core->mm.limits.extent_min_bytes;
	return kv_div_round_up(bytes, best->geo.stride_bytes << best->geo.shift) *
	       best->geo.extent_bytes;
}

u64 kvd_domain_unmet_min(const struct kvd_core *core, const struct kvd_domain *domain)
{
	const struct kvd_tenant *t;
	u64 min_bytes = 0;

	list_for_each_entry (t, &domain->tenants, node)
		min_bytes += t->account.min_bytes;
	min_bytes = extents_for(core, domain, min_bytes);
	return min_bytes - KV_MIN(min_bytes, domain->extent_bytes);
}

u64 kvd_domain_unmet_others(struct kvd_core *core, const struct kvd_domain *domain)
{
	if (!core->unmet_valid) {
		core->unmet_bytes = 0;
		for (u32 i = 0; i < KVD_DOMAINS_MAX; i++) {
			struct kvd_domain *d = core->domains[i];

			if (!d)
				continue;
			d->unmet_bytes = kvd_domain_unmet_min(core, d);
			core->unmet_bytes += d->unmet_bytes;
		}
		core->unmet_valid = true;
	}
	return core->unmet_bytes - domain->unmet_bytes;
}

bool kvd_domain_may_grow(struct kvd_pool *pool)
{
	struct kvd_core *core = kvd_core_of(pool->mm);
	u64 need = core->mm.extent_bytes_used + pool->geo.extent_bytes;

	/* Beyond the capacity another extent goes first, one that no min needs. */
	need = KV_MIN(need, core->mm.limits.capacity_bytes);
	if (!core->min_bytes_total)
		return true;
	need += kvd_domain_unmet_others(core, pool->owner);
	return need <= core->mm.limits.capacity_bytes;
}

bool kvd_domain_may_shrink(struct kvd_pool *pool)
{
	struct kvd_core *core = kvd_core_of(pool->mm);
	struct kvd_domain *domain = pool->owner;
	bool ok;

	if (!core->min_bytes_total)
		return true;
	domain->extent_bytes -= pool->geo.extent_bytes;
	ok = !kvd_domain_unmet_min(core, domain);
	domain->extent_bytes += pool->geo.extent_bytes;
	return ok;
}
