/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/pace.c - see pace.h. */
#include "kvmd/ipc/pace.h"

#include "base/assert.h"
#include "base/mutant.h"

static u32 bucket_of(struct kvd_pace *pace, u32 uid, u64 now_ns)
{
	u32 i, fullest = 0;

	for (i = 0; i < pace->nr; i++) {
		if (pace->who[i].uid == uid)
			return i;
		if (pace->who[i].full_ns < pace->who[fullest].full_ns)
			fullest = i;
	}
	if (pace->nr < KVD_PACE_UIDS) {
		fullest = pace->nr++;
		pace->who[fullest].full_ns = now_ns;
	}
	pace->who[fullest].uid = uid;
	if (KV_MUTANT(pace_forgets))
		pace->who[fullest].full_ns = now_ns;
	return fullest;
}

bool kvd_pace_take(struct kvd_pace *pace, u32 uid, u64 now_ns)
{
	u32 i = bucket_of(pace, KV_MUTANT(pace_shared) ? 0 : uid, now_ns);
	u64 full_ns = KV_MAX(pace->who[i].full_ns, now_ns);

	kv_assert(pace->nr <= KVD_PACE_UIDS);
	if (KV_MUTANT(accepts_unpaced))
		return true;
	if (full_ns - now_ns > (KVD_PACE_BURST - 1) * KVD_PACE_EACH_NS)
		return false;
	pace->who[i].full_ns = full_ns + KVD_PACE_EACH_NS;
	return true;
}
