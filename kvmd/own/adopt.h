/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/adopt.h - a core from what an earlier one left: image, page records, tokens,
 * leases, session pages, extents (design 5 P7, design 9).
 *
 * Page records and leases are the only truth; lists, counters, charges, LRU and index are
 * made from them. The caller maps and names things; the order is the protocol:
 *
 *	kvd_core_init()			with the image
 *	kvd_adopt_domain(), _tenants()	under their old numbers
 *	kvd_adopt_session() each	no tag has changed yet
 *	kvd_adopt_epochs()		table_epoch in every session page, full barrier (P7)
 *	kvd_adopt_pool() each		leases, extents, then the records; tags change here
 *	kvd_adopt_done()		what is left of ended sessions goes on ending
 *
 * Damage is counted and costs pages, never an answer. Loop thread only.
 */
#ifndef KVD_ADOPT_H
#define KVD_ADOPT_H

#include "kvmd/own/core.h"

/**
 * struct kvd_adopted - what was found
 * @sessions, @ended: taken over; @ended of them were over
 * @pools, @pages: taken over; pages are those of extents that exist
 * @undone: records whose change had been cut short
 * @finished: pages that an operation had left between two states
 * @killed: pages that nobody held or could find any more
 * @damage: entries, records, leases, extents that were not as they should be
 * @poisoned: pages among them
 */
struct kvd_adopted {
	u32 sessions, ended;
	u32 pools, pages;
	u32 undone, finished, killed;
	u32 damage, poisoned;
};

/** kvd_adopt_domain() - a domain under its old id. Return: as kvd_domain_create() */
int kvd_adopt_domain(struct kvd_core *core, u32 id, const u8 *secret);

/** kvd_adopt_tenants() - tenants of the adopted domains, without any memory of their own
 * until the policy is applied */
int kvd_adopt_tenants(struct kvd_core *core, struct kvd_adopted *ad);

/**
 * struct kvd_adopt_session_params - a session page from the keeper
 * @id: client id, @tenant: index, both as the keeper noted them
 * @page, @owner: as in struct kvd_session_params
 */
struct kvd_adopt_session_params {
	u64 id;
	u32 tenant;
	struct kv_session_page *page;
	void *owner;
};

/**
 * kvd_adopt_session() - LIVE as it was, or ENDED if its entry is missing or damaged
 * Return: 0; -ENODATA no tenant for it; -ENOMEM.
 */
int kvd_adopt_session(struct kvd_core *core, const struct kvd_adopt_session_params *p,
		      struct kvd_session **ret_s, struct kvd_adopted *ad);

/** kvd_adopt_epochs() - P7: from here on no step starts on an old table */
void kvd_adopt_epochs(struct kvd_core *core);

/**
 * struct kvd_adopt_pool_params - a pool's regions, and where the rest is found
 * @id: pool id
 * @frames, @tokens: mapped
 * @leases: fill in the mapped region of @session_id in this pool. Return: 0; -ENOENT;
 *	-ENOMEM
 * @extent: fd of an extent, or -1; the core's if the extent is taken over
 * @arg: first argument of both
 */
struct kvd_adopt_pool_params {
	u32 id;
	struct kvd_region frames, tokens;
	int (*leases)(void *arg, u32 pool_id, u64 session_id, struct kvd_region *ret);
	int (*extent)(void *arg, u32 pool_id, u32 index, u64 serial);
	void (*extent_taken)(void *arg, u32 pool_id, u32 index, u64 serial);
	void *arg;
};

/** kvd_adopt_pool() - Return: 0; -EBADMSG it was left out, regions are the caller's;
 * -ENOMEM; -EOVERFLOW */
int kvd_adopt_pool(struct kvd_core *core, const struct kvd_adopt_pool_params *p,
		   struct kvd_adopted *ad);

/** kvd_adopt_frames() - used by kvd_adopt_pool(): every record finds its place */
int kvd_adopt_frames(struct kvd_core *core, struct kvd_pool *pool, bool lossy,
		     struct kvd_adopted *ad);

/** kvd_adopt_done() - sessions that had ended go on ending */
void kvd_adopt_done(struct kvd_core *core);

#endif /* KVD_ADOPT_H */
