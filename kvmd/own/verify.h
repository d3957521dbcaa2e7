/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/verify.h - the whole audit in slices, while sessions go on.
 *
 * kvd_audit() (own/core.h) looks at everything in one call: 139 ms for a million pages. This
 * one looks at some records a turn. What a sum has to show is counted from the records as
 * they are passed, and kept right as they change (struct kvd_recount), and compared
 * between two turns. Lists are checked link by link instead of being walked: a ring of
 * pages beside a list that is shorter by as many would only be seen by kvd_audit().
 * Loop thread only.
 */
#ifndef KVD_VERIFY_H
#define KVD_VERIFY_H

#include "kvmd/mm/audit.h"
#include "kvmd/own/core.h"

/**
 * struct kvd_audit_run - an audit under way
 * @findings: list and max are the caller's
 * @count: where it is, and the sums
 * @gens: generations seen: open addressing, a power of two, @gens_mask + 1; 0 = empty
 * @error: 0, or -ENOMEM: it could not go on
 */
struct kvd_audit_run {
	struct kvd_findings findings;
	struct kvd_recount count;
	u64 *gens;
	u64 gens_mask;
	int error;
};

/** kvd_audit_begin() - one at a time; @run stays where it is. Return: 0; -ENOMEM */
int kvd_audit_begin(struct kvd_core *core, struct kvd_audit_run *run);

/**
 * kvd_audit_step() - the next @nr records, between two calls of the core
 *
 * Begins again when a pool was opened or closed. Return: true: @run->findings is complete,
 * or @run->error says why not: call kvd_audit_end().
 */
bool kvd_audit_step(struct kvd_core *core, struct kvd_audit_run *run, u32 nr);

/** kvd_audit_end() - also at any time before */
void kvd_audit_end(struct kvd_core *core, struct kvd_audit_run *run);

#endif /* KVD_VERIFY_H */
