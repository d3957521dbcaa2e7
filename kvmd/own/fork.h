/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/fork.h - FORK: private pages that will hold copies of pages the session holds.
 *
 * kvmd gives the pages; the bytes are copied by the engine's own stream, in an announced
 * step, under both leases. Source and copy have different pfns and generations, so
 * evicting either leaves the other alone. Loop thread only.
 */
#ifndef KVD_FORK_H
#define KVD_FORK_H

#include "kvmd/own/session.h"

/**
 * kvd_fork() - all or nothing
 * @sources: [nr] pages that the session holds
 * @ret_grants: [nr]
 *
 * Return: as kvd_lease_alloc(); KV_STALE a source is not held with that generation.
 */
int kvd_fork(struct kvd_session *s, struct kvd_attach *a,
	     const struct kv_page_ref *sources, u32 nr, u32 gfp,
	     struct kv_grant *ret_grants, u32 *ret_pending);

#endif /* KVD_FORK_H */
