/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/tier: pages that come back and wait for a frame. What that costs those who do not
 * wait: nothing.
 */
#include "tests/unit/tier/world.h"

#include "kvmd/own/steer.h"

static void turns(u32 nr)
{
	for (u32 i = 0; i < nr; i++) {
		kvd_tier_turn(w.tiers);
		jobs_run();
		rig_run(&w.rig);
	}
}

/* @nr pages that stay in use, from @s */
static void use(struct kvd_session *s, struct kvd_attach *a, u32 nr, struct kv_grant *g)
{
	for (u32 i = 0; i < nr; i++)
		g[i] = rig_alloc1(s, a);
}

static void let_go(struct kvd_session *s, struct kvd_attach *a, u32 nr,
		   const struct kv_grant *g)
{
	for (u32 i = 0; i < nr; i++)
		rig_free1(s, a, g[i]);
}

/* Sequence 1 of @nr pages lies in DRAM only, and the pool is full of cached pages. */
static struct kvd_pool *full_of_cache(u32 nr)
{
	struct kvd_pool *pool;

	world_open(false, 0);
	pool = w.a->pool;
	pool->low_pages = pool->high_pages = 0;
	cache(1, nr);
	evict(w.a, nr);
	for (u64 seq = 2; seq < 2 + NR_PAGES / 8; seq++)
		cache(seq, 8);
	KVT_EXPECT_EQ(pool->nr[KVD_CACHED], NR_PAGES);
	return pool;
}

/* One frame is wanted, and the page that goes for it is on its way: no other has to go. */
static void one_goes_for_one(u32 nr)
{
	struct kvd_pool *pool = full_of_cache(nr);
	u64 before = pool->nr_evictions;
	u32 coming;

	w.hold[KVD_TIER_OUT] = true;
	look(w.s, w.a, 1, nr, &coming);
	KVT_EXPECT_EQ(coming, nr);
	turns(40);
	KVT_EXPECT_EQ(pool->nr_evictions - before, nr);
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(fetch(1, nr), nr);
	KVT_EXPECT_EQ(pool->nr_evictions - before, nr);
	KVT_EXPECT_EQ(stats()->restores, nr);
	world_close();
}

KVT_TEST(waiting_restore_evicts_one_page)
{
	one_goes_for_one(1);
}

KVT_TEST(waiting_restores_evict_a_page_each)
{
	one_goes_for_one(7);
}

/* The same while a step holds the quarantine. */
KVT_TEST(grace_period_is_waited_for_and_not_paid_in_pages)
{
	struct kvd_pool *pool = full_of_cache(1);
	u64 before = pool->nr_evictions;

	rig_announce(w.s2, 0, pool);
	look(w.s, w.a, 1, 1, NULL);
	turns(40);
	KVT_EXPECT_EQ(pool->nr[KVD_QUARANTINE], 1);
	KVT_EXPECT_EQ(pool->nr_evictions - before, 1);
	rig_retire(w.s2, 0);
	settle();
	KVT_EXPECT_EQ(fetch(1, 1), 1);
	world_close();
}

/* Those who wait in one pool count in that pool: another one's cache does not pay. */
KVT_TEST(another_domains_cache_does_not_pay)
{
	struct kv_grant red[NR_PAGES];
	u64 before;

	world_open(false, 0);
	w.a->pool->low_pages = w.a->pool->high_pages = 0;
	w.ab->pool->low_pages = w.ab->pool->high_pages = 0;
	cache(1, 8);
	evict(w.a, 8);
	cache_with(w.sb, w.ab, 50, 1, 0);
	evict(w.ab, 1);
	for (u64 seq = 60; seq < 64; seq++)
		cache_with(w.sb, w.ab, seq, 8, 0);
	use(w.s2, w.a2, NR_PAGES / 2, red);
	look(w.s, w.a, 1, 8, NULL);
	before = w.ab->pool->nr_evictions;
	look(w.sb, w.ab, 50, 1, NULL);
	turns(40);
	KVT_EXPECT_EQ(w.ab->pool->nr_evictions - before, 1);
	let_go(w.s2, w.a2, NR_PAGES / 2, red);
	world_close();
}

/* Whoever waits for a pool that has nothing to give does not hold up another pool's. */
KVT_TEST(full_pool_holds_up_no_other)
{
	struct kv_grant red[NR_PAGES], blue[NR_PAGES];
	u32 coming;

	world_open(false, 0);
	cache(1, 4);
	evict(w.a, 4);
	cache_with(w.sb, w.ab, 50, 4, 0);
	evict(w.ab, 4);
	use(w.s2, w.a2, NR_PAGES / 2, red);
	use(w.sb, w.ab, NR_PAGES / 2, blue);
	w.ab->pool->low_pages = w.ab->pool->high_pages = 0;
	look(w.s, w.a, 1, 4, &coming);
	KVT_EXPECT_EQ(coming, 4);
	look(w.sb, w.ab, 50, 4, &coming);
	KVT_EXPECT_EQ(coming, 4);
	settle();
	KVT_EXPECT_EQ(stats()->restores, 0);
	for (u32 i = 0; i < NR_PAGES / 2; i += 8) /* no extent that red could have */
		rig_free1(w.sb, w.ab, blue[i]);
	rig_run(&w.rig);
	settle();
	KVT_EXPECT_EQ(look(w.sb, w.ab, 50, 4, NULL), 4);
	KVT_EXPECT_EQ(stats()->restores, 4);
	for (u32 i = 0; i < NR_PAGES / 2; i++)
		if (i % 8)
			rig_free1(w.sb, w.ab, blue[i]);
	/* and those of one pool come in the order in which they asked */
	let_go(w.s2, w.a2, NR_PAGES / 2, red);
	rig_run(&w.rig);
	settle();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 4, NULL), 4);
	world_close();
}

/* Nor does it keep those waiting who wait for another pool's pages (PREFETCH). */
KVT_TEST(full_pool_is_not_waited_for_elsewhere)
{
	struct kv_grant red[NR_PAGES], blue[NR_PAGES];
	u64 serial;

	world_open(false, 0);
	cache(1, 4);
	evict(w.a, 4);
	cache_with(w.sb, w.ab, 50, 4, 0);
	evict(w.ab, 4);
	use(w.s2, w.a2, NR_PAGES / 2, red);
	use(w.sb, w.ab, NR_PAGES / 2, blue);
	w.ab->pool->low_pages = w.ab->pool->high_pages = 0;
	for (u32 i = 0; i < NR_PAGES / 2; i += 8)
		rig_free1(w.sb, w.ab, blue[i]);
	rig_run(&w.rig);
	serial = kvd_tier_serial(w.tiers);
	look(w.s, w.a, 1, 4, NULL);
	look(w.sb, w.ab, 50, 4, NULL);
	KVT_EXPECT_EQ(kvd_tier_oldest(w.tiers, w.a->pool), serial + 1);
	KVT_EXPECT_EQ(kvd_tier_oldest(w.tiers, w.ab->pool), serial + 5);
	settle();
	KVT_EXPECT_EQ(kvd_tier_oldest(w.tiers, w.a->pool), serial + 1);
	KVT_EXPECT_EQ(kvd_tier_oldest(w.tiers, w.ab->pool), KVD_TIER_NONE);
	KVT_EXPECT_EQ(look(w.sb, w.ab, 50, 4, NULL), 4);
	for (u32 i = 0; i < NR_PAGES / 2; i++)
		if (i % 8)
			rig_free1(w.sb, w.ab, blue[i]);
	let_go(w.s2, w.a2, NR_PAGES / 2, red);
	world_close();
}

/* What is free is promised to one tenant: its pages do not wait behind a neighbour's. */
KVT_TEST(refused_tenant_holds_up_no_neighbour)
{
	struct kv_grant g[NR_PAGES];
	u32 coming;

	world_open(false, 0);
	w.a->pool->low_pages = w.a->pool->high_pages = 0;
	cache(1, 2);
	cache_with(w.s2, w.a2, 2, 2, 0);
	evict(w.a, 4);
	use(w.s, w.a, NR_PAGES, g);
	look(w.s, w.a, 1, 2, &coming);
	KVT_EXPECT_EQ(coming, 2);
	look(w.s2, w.a2, 2, 2, &coming);
	KVT_EXPECT_EQ(coming, 2);
	w.red2->account.min_bytes = 4 * RIG_STRIDE;
	w.rig.core.min_bytes_total += 4 * RIG_STRIDE;
	let_go(w.s, w.a, 4, g);
	settle();
	KVT_EXPECT_EQ(stats()->restores, 2);
	KVT_EXPECT_EQ(look(w.s2, w.a2, 2, 2, NULL), 2);
	w.red2->account.min_bytes = 0;
	w.rig.core.min_bytes_total -= 4 * RIG_STRIDE;
	let_go(w.s, w.a, NR_PAGES - 4, g + 4);
	world_close();
}

/* Lookups of long prompts have all they may have under way, and wait: pages still go to the
 * tier, or there would never be a frame. */
KVT_TEST(restores_leave_room_for_what_makes_frames_free)
{
	static struct tier_op *held[4096];
	struct kv_grant g[NR_PAGES];
	u32 nr = 0;

	world_open(true, 0);
	w.a->pool->low_pages = w.a->pool->high_pages = 0;
	for (u64 seq = 1; seq <= NR_PAGES / 8; seq++)
		cache(seq, 8);
	while ((held[nr] = tier_op_get(w.tiers, OP_RESTORE)))
		nr++;
	KVT_EXPECT(nr > 0);
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 16, false), 16);
	settle();
	KVT_EXPECT_EQ(stats()->spills, 16);
	KVT_EXPECT_EQ(stats()->writes, 16);
	KVT_EXPECT_EQ(stats()->spills_waited, 0);
	KVT_EXPECT_EQ(rig_alloc(w.s, w.a, 16, KV_GFP_NOWAIT, g), 0);
	let_go(w.s, w.a, 16, g);
	while (nr)
		tier_op_put(held[--nr]);
	world_close();
}

/* What is asked for between two turns of the tiers is for the next turn: the loop does not sleep
 * before that. And it does sleep when a turn found nothing to go on with. */
KVT_TEST(what_is_queued_between_turns_makes_a_turn)
{
	world_open(true, 0);
	w.a->pool->low_pages = w.a->pool->high_pages = 0;
	cache(1, 4);
	settle();
	KVT_EXPECT(!kvd_tier_more(w.tiers));
	w.hold[KVD_TIER_OUT] = w.hold[KVD_TIER_IN] = true;
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 4, false), 4);
	KVT_EXPECT(kvd_tier_more(w.tiers)); /* SPILL */
	settle();
	KVT_EXPECT_EQ(w.nr_jobs, 1);
	KVT_EXPECT(!kvd_tier_more(w.tiers)); /* the copier has it */
	w.hold[KVD_TIER_OUT] = false;
	settle();
	look(w.s, w.a, 1, 4, NULL);
	KVT_EXPECT(kvd_tier_more(w.tiers)); /* RESTORE from DRAM */
	settle();
	KVT_EXPECT_EQ(w.nr_jobs, 1);
	KVT_EXPECT(!kvd_tier_more(w.tiers));
	w.hold[KVD_TIER_IN] = false;
	settle();
	to_nvme_only(2, 4);
	KVT_EXPECT(!kvd_tier_more(w.tiers));
	look(w.s, w.a, 2, 4, NULL);
	KVT_EXPECT(
		kvd_tier_more(w.tiers)); /* RESTORE from NVMe: not handed to the kernel */
	settle();
	KVT_EXPECT(!kvd_tier_more(w.tiers));
	KVT_EXPECT_EQ(look(w.s, w.a, 2, 4, NULL), 4);
	world_close();
}

/* A tenant's cache is dropped, and a tier takes only a part of it at a time: the rest follows by
 * itself, and nobody else's goes for it. */
KVT_TEST(drained_cache_goes_though_the_copier_is_slow)
{
	struct kvd_drained d;
	struct kvd_pool *pool;

	world_open(false, 0);
	pool = w.a->pool;
	pool->low_pages = pool->high_pages = 0;
	for (u64 seq = 1; seq <= 6; seq++)
		cache(seq, 8);
	cache_with(w.s2, w.a2, 7, 8, 0);
	w.hold[KVD_TIER_OUT] = true;
	kvd_steer_drain(&w.rig.core, w.red, true, false, &d);
	KVT_EXPECT(d.evicted >= 8 && d.evicted < 48);
	settle();
	KVT_EXPECT(pool->nr[KVD_SPILLING] > 0);
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(w.red->account.used_bytes, 0);
	KVT_EXPECT_EQ(pool->nr[KVD_CACHED], 8);
	KVT_EXPECT_EQ(look(w.s2, w.a2, 7, 8, NULL), 8);
	world_close();
}

TIER_MAIN("/tmp")
