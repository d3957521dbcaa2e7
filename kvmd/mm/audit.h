/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/audit.h - findings of an audit, and the checks that mm/ can do alone (I1, I3-I6,
 * I8).
 *
 * own/core.h has the whole audit (kvd_audit(), kvd_audit_slice()), which adds references,
 * index and charges (I2, I7).
 */
#ifndef KVD_AUDIT_H
#define KVD_AUDIT_H

#include "kvmd/mm/pool.h"

/**
 * struct kvd_finding - one broken invariant
 * @invariant: 1..8
 * @pool_id: 0 = not about a pool
 * @pfn: KVD_PFN_NONE = not about a page
 * @text: in words, with the values
 */
struct kvd_finding {
	u32 invariant;
	u32 pool_id;
	u32 pfn;
	char text[116];
};

/**
 * struct kvd_findings - bounded list, owned by the caller
 * @list: [max]
 * @nr: findings, also those beyond @max
 * @checked: records looked at
 */
struct kvd_findings {
	struct kvd_finding *list;
	u32 max;
	u32 nr;
	u64 checked;
};

/** kvd_finding_add() - note one; printf-like */
void kvd_finding_add(struct kvd_findings *fs, u32 invariant, u32 pool_id, u32 pfn,
		     const char *fmt, ...) __attribute__((format(printf, 5, 6)));

/** kvd_audit_frame() - one record against table, state, flags and extent (I1, I3, I4, I6,
 * I8) */
void kvd_audit_frame(const struct kvd_pool *pool, u32 pfn, struct kvd_findings *fs);

/** kvd_audit_counters() - sums of a pool's counters (I1); O(1) */
void kvd_audit_counters(const struct kvd_pool *pool, struct kvd_findings *fs);

/** kvd_audit_lists() - free lists, LRUs, batches and recounted states of a pool (I1, I5);
 * O(n) */
void kvd_audit_lists(const struct kvd_pool *pool, struct kvd_findings *fs);

/**
 * struct kvd_recount - states and charges counted again from the records while they change
 * @index: of the pool being counted; pools before it are in
 * @pfn: its records before this one are in
 * @nr: of them, by state
 * @nr_free: FREE ones among those of @pfn's extent
 * @used: bytes by tenant, all that is in
 * @stale: a pool came or went: begin again
 *
 * A record that is in and changes is moved here as well (kvd_recount_moved()), so that at
 * any time between two calls of the core the sums are those of the records that are in.
 */
struct kvd_recount {
	u32 index;
	u32 pfn;
	u32 nr[KVD_FRAME_STATES];
	u32 nr_free;
	u64 used[KVD_TENANTS_MAX];
	bool stale;
};

/** kvd_recount_add() - the next record is in */
void kvd_recount_add(struct kvd_recount *rc, const struct kvd_pool *pool);

/** kvd_recount_extent() - @rc->pfn is the end of an extent: its FREE pages, its bucket */
void kvd_recount_extent(struct kvd_recount *rc, const struct kvd_pool *pool,
			struct kvd_findings *fs);

/** kvd_recount_pool() - all records of the pool are in: its counters; then the next pool */
void kvd_recount_pool(struct kvd_recount *rc, const struct kvd_pool *pool,
		      struct kvd_findings *fs);

/** kvd_audit_links() - does the list that a page's state puts it on know it? O(1) */
void kvd_audit_links(const struct kvd_pool *pool, u32 pfn, struct kvd_findings *fs);

#endif /* KVD_AUDIT_H */
