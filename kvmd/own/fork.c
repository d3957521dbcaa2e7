/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/fork.c - FORK. See fork.h. Loop thread only.
 */
#include "kvmd/own/fork.h"
#include <errno.h>
#include "base/mutant.h"
#include "kvmd/own/core.h"

int kvd_fork(struct kvd_session *s, struct kvd_attach *a,
	     const struct kv_page_ref *sources, u32 nr, u32 gfp,
	     struct kv_grant *ret_grants, u32 *ret_pending)
{
	kv_assert(s->state == KVD_SESSION_LIVE && a->pool);
	if (nr == 0 || nr > KV_BATCH_MAX)
		return -EINVAL;
	for (u32 i = 0; i < nr; i++) {
		if (sources[i].pfn >= a->pool->geo.nr_pages || sources[i].reserved)
			return -EINVAL;
	}
	for (u32 i = 0; i < nr; i++) {
		if (!kvd_lease_holds(s, a, sources[i].pfn, sources[i].tag))
			return KV_STALE;
	}
	for (u32 i = 0; i < nr && KV_MUTANT(fork_is_reference); i++)
		ret_grants[i] =
			(struct kv_grant){.pfn = sources[i].pfn, .tag = sources[i].tag};
	if (KV_MUTANT(fork_is_reference))
		return 0;
	return kvd_lease_alloc(s, a, nr, gfp, ret_grants, ret_pending);
}
