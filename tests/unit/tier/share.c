/* SPDX-License-Identifier: Apache-2.0 */
/* kvmd/tier: more pages wait for frames of one pool than there may be, and another domain's
 * come back all the same. */
#define DRAM_BYTES (32ull << 20) /* 416 pages */
#include "tests/unit/tier/world.h"

#define RUNS 90u
#define RUN  6u

KVT_TEST(one_pools_waiting_pages_leave_room_for_another)
{
	struct kv_grant red[NR_PAGES], blue;
	u32 nr, coming;

	world_open(true, 0);
	cache_with(w.sb, w.ab, 5000, 4, 0);
	evict(w.ab, 4);
	for (u64 seq = 1; seq <= RUNS; seq++) {
		cache(seq, RUN);
		evict(w.a, RUN);
	}
	blue = rig_alloc1(w.sb, w.ab); /* of an extent with seven more */
	w.ab->pool->low_pages = w.ab->pool->high_pages = 0;
	for (nr = 0; nr < NR_PAGES - 8; nr++)
		red[nr] = rig_alloc1(w.s2, w.a2);
	for (u64 seq = 1; seq <= RUNS; seq++) {
		look(w.s, w.a, seq, RUN, NULL);
		settle();
	}
	KVT_EXPECT_EQ(w.tiers->nr_frames, KVD_TIER_WAITING_MAX);
	KVT_EXPECT_EQ(w.tiers->nr_restores, KVD_TIER_WAITING_MAX);
	look(w.sb, w.ab, 5000, 4, &coming);
	KVT_EXPECT_EQ(coming, 4);
	settle();
	KVT_EXPECT_EQ(look(w.sb, w.ab, 5000, 4, NULL), 4);
	rig_free1(w.sb, w.ab, blue);
	while (nr)
		rig_free1(w.s2, w.a2, red[--nr]);
	world_close();
}

TIER_MAIN("/tmp")
