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

#endif /* KVD_AUDIT_H */
