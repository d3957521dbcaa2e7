/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/domain.h - a set of tenants that trust each other: shares prefixes, extents and
 * grace periods. Nothing of a domain is visible outside it. Loop thread only.
 */
#ifndef KVD_DOMAIN_H
#define KVD_DOMAIN_H

#include "base/list.h"
#include "kvmd/mm/pool.h"

struct kvd_core;

#define KVD_DOMAINS_MAX		64u
#define KVD_DOMAIN_SECRET_BYTES 32u

/**
 * struct kvd_domain - one domain
 * @id: index in core->domains
 * @name: unique
 * @secret: keys the prefix hashes; never leaves kvmd
 * @group: announce slots of all its sessions
 * @tenants: struct kvd_tenant.node
 * @nr_tenants: how many
 * @tenant_slots: bit per used kvd_tenant.slot
 * @extent_bytes: charged: whole extents, DRAINING ones included
 * @unmet_bytes: kvd_domain_unmet_min() when core->unmet_valid
 * @turn: own/turn.h: the session that goes first, or NULL
 * @served_ns: when one of its sessions was given memory last
 * @steps_back: refused sessions that gave back, since one gave back unrefused
 * @turns: given since then
 */
struct kvd_domain {
	u32 id;
	char name[KV_NAME_BYTES];
	u8 secret[KVD_DOMAIN_SECRET_BYTES];
	struct kvd_reader_group group;
	struct list_node tenants;
	u32 nr_tenants;
	u32 tenant_slots;
	u64 extent_bytes;
	u64 unmet_bytes;
	struct kvd_session *turn;
	u64 served_ns;
	u32 steps_back;
	u32 turns;
};

/**
 * kvd_domain_create() - an empty domain
 * @secret: KVD_DOMAIN_SECRET_BYTES random bytes, copied
 *
 * Return: 0; -EEXIST; -EINVAL the name; -ENOSPC; -ENOMEM.
 */
int kvd_domain_create(struct kvd_core *core, const char *name, const u8 *secret,
		      struct kvd_domain **ret_domain);

/** kvd_domain_create_at() - the same under a given id. Return: also -EBUSY it is taken */
int kvd_domain_create_at(struct kvd_core *core, u32 id, const char *name,
			 const u8 *secret, struct kvd_domain **ret_domain);

/** kvd_domain_find() - by name, or NULL */
struct kvd_domain *kvd_domain_find(struct kvd_core *core, const char *name);

/** kvd_domain_destroy() - Return: 0; -EBUSY it has tenants, pools with pages or sessions
 */
int kvd_domain_destroy(struct kvd_core *core, struct kvd_domain *domain);

/** kvd_domain_pool_room() - pools that @domain may still make: every other one that has
 * none yet is left a place for its first */
u32 kvd_domain_pool_room(const struct kvd_core *core, const struct kvd_domain *domain);

/** kvd_domain_pools_trim() - destroy pools with no page, no session and no extent given
 * out */
void kvd_domain_pools_trim(struct kvd_core *core);

/**
 * struct kvd_evicted - what kvd_domain_evict() did or would do
 * @cached: CACHED pages, evicted
 * @unindexed: SEALED pages that stay with their readers but are not found any more
 */
struct kvd_evicted {
	u32 cached;
	u32 unindexed;
};

/**
 * kvd_domain_evict() - forget every prefix of a domain (case O38)
 * @dry_run: only count
 */
void kvd_domain_evict(struct kvd_core *core, struct kvd_domain *domain, bool dry_run,
		      struct kvd_evicted *ret);

/** kvd_domain_unmet_min() - bytes of extents that must stay obtainable so that every
 * tenant of
 * @domain can reach its min */
u64 kvd_domain_unmet_min(const struct kvd_core *core, const struct kvd_domain *domain);

/** kvd_domain_unmet_others() - the sum of it over all domains but @domain; kept until an
 * extent, a limit, a pool or a domain comes or goes (core->unmet_valid) */
u64 kvd_domain_unmet_others(struct kvd_core *core, const struct kvd_domain *domain);

/** kvd_domain_may_grow() - kvd_mm_ops.may_grow: min of other domains stays obtainable */
bool kvd_domain_may_grow(struct kvd_pool *pool);

/** kvd_domain_may_shrink() - kvd_mm_ops.may_shrink: the domain's own min stays obtainable */
bool kvd_domain_may_shrink(struct kvd_pool *pool);

#endif /* KVD_DOMAIN_H */
