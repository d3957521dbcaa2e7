/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/spill.h - pages on their way to and from the tiers below the pool (design 4, 8).
 *
 *	CACHED -> SPILLING -> QUARANTINE -> FREE     the copier reads the page
 *	FREE -> RESTORING -> CACHED | QUARANTINE     the copier writes it
 *
 * The tiers (kvmd/tier) decide and copy; these calls change page state. A page that is
 * copied is in no index and on no list, so nobody finds, reads, frees or evicts it, and it
 * is not FREE before its copier is done (I5). A restored page is found only after
 * kvd_restore_end(): under a new generation, in a new frame, its bytes checked (P1, P6).
 *
 * Loop thread only.
 */
#ifndef KVD_SPILL_H
#define KVD_SPILL_H

#include "kvmd/mm/pool.h"

struct kvd_tenant;

/** Owner of a restored page: no session, so that whoever gets the frame later zeroes it. */
#define KVD_OWNER_TIER (~0ull)

/**
 * struct kvd_restore_ask - a page that a lookup wants and the pool does not have
 * @pool, @tenant: where, and who would pay
 * @key: of the page; @parent_key: of the page before it
 * @root: it starts its sequence
 */
struct kvd_restore_ask {
	struct kvd_pool *pool;
	struct kvd_tenant *tenant;
	const u8 *key;
	const u8 *parent_key;
	bool root;
};

/**
 * struct kvd_spill_ops - the tiers, as reclaim and lookups see them
 * @evict: a CACHED page is about to go. Return: 0 drop it: a tier has it, or none wants it;
 *	1 it is SPILLING; -EAGAIN not now, so many are being copied: leave it CACHED
 * @restore: start to bring a page back, or join in if it is on its way. Return: false: no
 *	tier has it, or it cannot be had now
 */
struct kvd_spill_ops {
	int (*evict)(void *arg, struct kvd_pool *pool, u32 pfn);
	bool (*restore)(void *arg, const struct kvd_restore_ask *ask);
};

/** kvd_spill_evict() - kvd_mm_ops.evict. Return: 0 it is on its way to FREE; -EAGAIN */
int kvd_spill_evict(struct kvd_pool *pool, u32 pfn);

/** kvd_spill_begin() - CACHED -> SPILLING: out of the index; counts as on its way back */
void kvd_spill_begin(struct kvd_pool *pool, u32 pfn);

/** kvd_spill_end() - the copier reads it no more: SPILLING -> QUARANTINE */
void kvd_spill_end(struct kvd_pool *pool, u32 pfn);

/**
 * kvd_restore_begin() - a FREE page to be written by the copier, charged to @tenant
 * @ret_pfn: written on success
 *
 * Return: 0; KV_QUOTA, KV_FULL, KV_PENDING: none can be had now; -errno of the backend.
 */
int kvd_restore_begin(struct kvd_tenant *tenant, struct kvd_pool *pool, u32 *ret_pfn);

/** struct kvd_restored - what came back */
struct kvd_restored {
	const u8 *key;
	const u8 *parent_key;
	const u32 *tokens;
	u32 crc32c;
	bool root;
};

/**
 * kvd_restore_end() - bytes and digest are right: RESTORING -> CACHED, findable
 *
 * Return: 0; KV_STALE: the same page was sealed meanwhile, this one goes.
 */
int kvd_restore_end(struct kvd_pool *pool, u32 pfn, const struct kvd_restored *r);

/** kvd_restore_fail() - RESTORING -> QUARANTINE */
void kvd_restore_fail(struct kvd_pool *pool, u32 pfn);

#endif
