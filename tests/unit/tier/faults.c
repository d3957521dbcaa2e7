/* SPDX-License-Identifier: Apache-2.0 */
/* kvmd/tier when disks, copies and bytes are bad: misses, counted, and nothing else. */
#include "tests/unit/tier/world.h"

/* ----------------------------------------------------------------- bad copies */

/* O36: the second of four pages cannot be read: the run is one page, whatever the disk did. */
KVT_TEST(o36_failed_read_is_a_miss)
{
	static const enum kvd_fault_point points[] = {
		KVD_FAULT_tier_read_eio, KVD_FAULT_tier_read_short,
		KVD_FAULT_tier_read_flip, KVD_FAULT_tier_read_swap, KVD_FAULT_tier_copy};

	for (u32 i = 0; i < KV_ARRAY_SIZE(points); i++) {
		u64 before;

		world_open(true, 0);
		to_nvme_only(100 + i, 4);
		before = stats()->read_errors + stats()->read_shorts +
			 stats()->bad_digests + stats()->bad_names +
			 stats()->restores_failed;
		KVT_EXPECT_EQ(fetch(100 + i, 1), 1); /* the first one is there */
		arm(points[i], 0, 1);
		look(w.s, w.a, 100 + i, 2, NULL);
		settle();
		KVT_EXPECT_EQ(look(w.s, w.a, 100 + i, 4, NULL), 1);
		KVT_EXPECT_EQ(stats()->read_errors + stats()->read_shorts +
				      stats()->bad_digests + stats()->bad_names +
				      stats()->restores_failed,
			      before + 1);
		settle();
		world_check();
		/* A failed copy can be tried again; what the disk lost is lost. */
		KVT_EXPECT_EQ(fetch(100 + i, 4),
			      points[i] == KVD_FAULT_tier_copy ? 4 : 1);
		world_close();
		unlink(scratch("nvme/journal"));
	}
}

/* R6: each step of a restore fails once. */
KVT_TEST_T(r6_error_at_every_step_of_a_restore, 120)
{
	static const enum kvd_fault_point points[] = {
		KVD_FAULT_tier_read_eio,   KVD_FAULT_tier_read_short,
		KVD_FAULT_tier_read_flip,  KVD_FAULT_tier_read_swap,
		KVD_FAULT_tier_read_late,  KVD_FAULT_tier_copy,
		KVD_FAULT_tier_write_eio,  KVD_FAULT_tier_write_full,
		KVD_FAULT_tier_write_torn, KVD_FAULT_tier_journal};

	world_open(true, 0);
	for (u32 round = 0; round < 120; round++) {
		u64 seq = 1 + round % 30;

		arm(points[round % KV_ARRAY_SIZE(points)], kvt_rand_below(6),
		    1 + kvt_rand_below(3));
		if (fetch(seq, 4) < 4)
			cache(seq, 4);
		KVT_EXPECT(look(w.s, w.a, seq, 4, NULL) ==
			   4); /* right bytes, in look() */
		evict(w.a, w.a->pool->nr[KVD_CACHED]);
		w.rig.now += 2000000000ull;
		kvd_tier_tick(w.tiers);
		settle();
		world_check();
	}
	KVT_EXPECT(kvd_fault_fired() >= 30);
	world_close();
}

/* R5: the n-th step that can fail fails, for every n: what is left is whole, and what is
 * found is right. */
KVT_TEST_T(r5_each_step_fails_once, 120)
{
	u32 nth;

	for (nth = 1; nth < 400; nth++) {
		u64 fired;

		world_open(true, 0);
		kvd_fault_fail_nth(nth);
		cache(1, 6);
		evict(w.a, 6);
		for (u64 i = 0; i < 7; i++) {
			cache(1000 + i, 8);
			evict(w.a, 8);
		}
		fetch(1, 6);
		w.rig.now += 12000000000ull;
		kvd_tier_tick(w.tiers);
		settle();
		fired = kvd_fault_fired();
		kvd_fault_fail_nth(0);
		world_check();
		if (fetch(1, 6) < 6)
			cache(2, 6);
		world_close();
		unlink(scratch("nvme/journal"));
		if (!fired)
			break;
		nth += nth > 40 ? kvt_rand_below(8) : 0;
	}
	KVT_EXPECT(nth > 40 && nth < 400);
}

/* Tokens under another key, with every digest right: a header that was made up. */
KVT_TEST(tokens_must_be_the_keys)
{
	struct kvd_page_hdr *hdr;

	world_open(false, 0);
	cache(1, 1);
	evict(w.a, 1);
	hdr = (void *)w.dram;
	KVT_EXPECT_EQ(hdr->magic, KVD_PAGE_HDR_MAGIC);
	rig_tokens(2, 0, hdr->tokens);
	kvd_page_hdr_seal(hdr);
	KVT_EXPECT_EQ(fetch(1, 1), 0);
	KVT_EXPECT_EQ(look(w.s, w.a, 2, 1, NULL), 0);
	KVT_EXPECT(stats()->bad_names >= 1);
	world_close();
}

/* LMCache#4385 (R7): eight tenants' pages, of two domains, come back through a disk that
 * exchanges slots: all noticed. */
KVT_TEST(r7_swapped_offsets_are_all_noticed)
{
	enum { TENANTS = 8, PAGES = 2 };
	struct kvd_session *s[TENANTS];
	struct kvd_attach *a[TENANTS];
	u32 swaps = 0;

	world_open(true, 0);
	for (u32 i = 0; i < TENANTS; i++) {
		struct kvd_domain *d = i & 1 ? w.rig.blue : w.rig.red;
		struct kvd_tenant *t;
		char name[8];

		snprintf(name, sizeof(name), "r7-%u", i);
		t = rig_tenant(&w.rig, d, name, 0, 0);
		limits_set(t->index, 0, 1ull << 40);
		a[i] = rig_client(&w.rig, t, &s[i]);
		cache_with(s[i], a[i], 1 + i / 2, PAGES, 0); /* equal prompts, too */
	}
	evict(a[0], a[0]->pool->nr[KVD_CACHED]);
	evict(a[1], a[1]->pool->nr[KVD_CACHED]);
	for (u32 i = 0; i < 3 * TENANTS; i++) { /* each pushes its own out of DRAM */
		cache_with(s[i % TENANTS], a[i % TENANTS], 1000 + i, 4, 0);
		evict(a[i % TENANTS], 4);
	}
	for (u32 i = 0; i < TENANTS; i++) {
		u64 reads = stats()->reads, bad = stats()->bad_names;

		arm(KVD_FAULT_tier_read_swap, 0, PAGES);
		KVT_EXPECT_EQ(look(s[i], a[i], 1 + i / 2, PAGES, NULL), 0);
		settle();
		KVT_EXPECT_EQ(look(s[i], a[i], 1 + i / 2, PAGES, NULL), 0);
		settle();
		KVT_EXPECT(stats()->reads > reads);
		KVT_EXPECT_EQ(stats()->bad_names - bad, stats()->reads - reads);
		swaps += (u32)(stats()->reads - reads);
		kvd_fault_arm(KVD_FAULT_tier_read_swap, NULL);
	}
	KVT_EXPECT(swaps >= TENANTS);
	KVT_EXPECT(w.told >= swaps);
	world_close();
}

/* R8: the same tokens in another domain are other pages, in the tiers as well. */
KVT_TEST(r8_other_domain_misses_in_the_tiers)
{
	u32 coming;

	world_open(true, 0);
	to_nvme_only(1, 4);
	KVT_EXPECT_EQ(look(w.sb, w.ab, 1, 4, &coming), 0);
	KVT_EXPECT_EQ(coming, 0);
	KVT_EXPECT_EQ(look(w.s2, w.a2, 1, 4, &coming), 0);
	KVT_EXPECT_EQ(coming, 4); /* same domain, another tenant */
	settle();
	KVT_EXPECT_EQ(look(w.s2, w.a2, 1, 4, NULL), 4);
	KVT_EXPECT_EQ(look(w.sb, w.ab, 1, 4, NULL), 0);
	world_close();
}

/* A page whose bytes are not those that were sealed never becomes a stored page. */
KVT_TEST(wrong_digest_is_a_miss_and_is_told)
{
	world_open(false, 0);
	cache_with(w.s, w.a, 1, 2, 0x1000);
	evict(w.a, 2);
	KVT_EXPECT_EQ(stats()->bad_digests, 2);
	KVT_EXPECT_EQ(stats()->spills, 0);
	KVT_EXPECT_EQ(w.told, 2);
	KVT_EXPECT_EQ(fetch(1, 2), 0);
	world_close();
}

/* A bit of DRAM turns over: noticed before anybody may read the page. */
KVT_TEST(flipped_bit_in_dram_is_a_miss)
{
	world_open(false, 0);
	cache(1, 3);
	evict(w.a, 3);
	for (u64 off = 4096 + 1000; off < 3 * 77824; off += 77824)
		w.dram[off] ^= 1;
	KVT_EXPECT_EQ(fetch(1, 3), 0);
	KVT_EXPECT_EQ(stats()->bad_digests, 3);
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_CACHED], 0);
	world_close();
}

/* -------------------------------------------------------------- full and slow */

/* ENOSPC and EIO stop the writes, and nothing else; a later write that goes well starts
 * them again. */
KVT_TEST(full_disk_stops_writes_only)
{
	world_open(true, 0);
	arm(KVD_FAULT_tier_write_full, 0, 0);
	cache(1, 8);
	evict(w.a, 8);
	KVT_EXPECT(stats()->write_full >= 1);
	KVT_EXPECT_HAS(kvd_tier_fault(w.tiers), "No space left");
	KVT_EXPECT_EQ(stats()->writes, 0);
	KVT_EXPECT_EQ(fetch(1, 8), 8); /* from DRAM */
	kvd_fault_arm(KVD_FAULT_tier_write_full, NULL);
	w.rig.now += 11000000000ull;
	settle();
	KVT_EXPECT_STR(kvd_tier_fault(w.tiers), "");
	KVT_EXPECT_EQ(stats()->writes, 8);
	world_close();
}

/* The journal's disk is full: the loop comes to rest, and asks again with its tick. */
KVT_TEST(journal_that_fails_does_not_keep_the_loop_busy)
{
	const struct kvd_journal_stats *js;

	world_open(true, 0);
	js = kvd_journal_stats(kvd_tier_store(w.tiers)->journal);
	arm(KVD_FAULT_tier_journal, 0, 0);
	cache(1, 8);
	evict(w.a, 8);
	settle();
	KVT_EXPECT_EQ(stats()->writes, 8);
	KVT_EXPECT_EQ(js->errors, 1);
	kvd_tier_tick(w.tiers);
	settle();
	KVT_EXPECT_EQ(js->errors, 2);
	kvd_fault_arm(KVD_FAULT_tier_journal, NULL);
	kvd_tier_tick(w.tiers);
	settle();
	KVT_EXPECT_EQ(js->errors, 2);
	KVT_EXPECT(js->written > 8 && !js->lost);
	world_close();
}

KVT_TEST(late_read_is_not_waited_for)
{
	u32 coming;

	world_open(true, 0);
	to_nvme_only(1, 2);
	arm(KVD_FAULT_tier_read_late, 0, 2);
	look(w.s, w.a, 1, 2, &coming);
	KVT_EXPECT_EQ(coming, 2);
	KVT_EXPECT(kvd_tier_oldest(w.tiers, w.a->pool) <= kvd_tier_serial(w.tiers));
	kvd_tier_tick(w.tiers);
	KVT_EXPECT_EQ(stats()->read_late, 2);
	KVT_EXPECT_EQ(kvd_tier_oldest(w.tiers, w.a->pool), KVD_TIER_NONE);
	settle();
	/* They were right after all, and are in DRAM for the next one. */
	KVT_EXPECT_EQ(stats()->restores, 0);
	KVT_EXPECT_EQ(fetch(1, 2), 2);
	KVT_EXPECT_EQ(stats()->restores_dram, 2);
	world_close();
}

/* So many pages are being stored that reclaim has to wait: it goes on by itself. */
KVT_TEST(reclaim_waits_for_the_copier)
{
	struct kv_grant g[NR_PAGES];
	u32 pending = 0;

	world_open(false, 0);
	for (u64 seq = 1; seq <= 8; seq++)
		cache(seq, 8);
	KVT_EXPECT(w.a->pool->nr[KVD_CACHED] >= NR_PAGES - w.a->pool->high_pages);
	w.hold[KVD_TIER_OUT] = true;
	/* What is SPILLING counts as on its way: wait, do not preempt. */
	KVT_EXPECT_EQ(
		kvd_lease_alloc(w.s, w.a, 40, KV_GFP_WAIT | KV_GFP_RECLAIM, g, &pending),
		KV_PENDING);
	KVT_EXPECT(pending >= 40);
	settle();
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_SPILLING], NR_PAGES / 4);
	KVT_EXPECT(stats()->spills_waited > 0);
	world_check();
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(rig_alloc(w.s, w.a, 40, KV_GFP_NOWAIT, g), 0);
	for (u32 i = 0; i < 40; i++)
		rig_free1(w.s, w.a, g[i]);
	world_close();
}

/* The copier answers nothing: pages are dropped instead, and allocations go on. */
KVT_TEST(stuck_copier_does_not_hold_up_allocations)
{
	struct kv_grant g[NR_PAGES];

	world_open(false, 0);
	for (u64 seq = 1; seq <= 8; seq++)
		cache(seq, 8);
	w.hold[KVD_TIER_OUT] = true;
	kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 60, false);
	settle();
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_SPILLING], NR_PAGES / 4);
	w.rig.now += 300000000ull;
	rig_run(&w.rig);
	kvd_tier_turn(w.tiers);
	KVT_EXPECT_EQ(rig_alloc(w.s, w.a, 40, KV_GFP_WAIT | KV_GFP_RECLAIM, g), 0);
	KVT_EXPECT_EQ(rig_alloc(w.s2, w.a2, 20, KV_GFP_WAIT | KV_GFP_RECLAIM, g + 40),
		      KV_FULL); /* not PENDING: nobody knows when */
	world_check();
	w.hold[KVD_TIER_OUT] = false;
	settle();
	for (u32 i = 0; i < 40; i++)
		rig_free1(w.s, w.a, g[i]);
	world_close();
}

/* Nor does it get more frames: what is asked for meanwhile is a miss, what it has is awaited. */
KVT_TEST(stuck_copier_gets_no_more_frames)
{
	struct kvd_pool *pool;
	u32 coming;

	world_open(true, 0);
	pool = w.a->pool;
	cache(1, 4);
	cache(2, 4);
	evict(w.a, 8);
	w.hold[KVD_TIER_IN] = true;
	look(w.s, w.a, 1, 4, &coming);
	KVT_EXPECT_EQ(coming, 4);
	settle();
	KVT_EXPECT_EQ(pool->nr[KVD_RESTORING], 4);
	w.rig.now += 300000000ull;
	rig_run(&w.rig);
	kvd_tier_turn(w.tiers);
	look(w.s, w.a, 2, 4, &coming);
	KVT_EXPECT_EQ(coming, 0);
	look(w.s, w.a, 1, 4, &coming);
	KVT_EXPECT_EQ(coming, 4);
	settle();
	KVT_EXPECT_EQ(pool->nr[KVD_RESTORING], 4);
	w.hold[KVD_TIER_IN] = false;
	settle();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 4, NULL), 4);
	KVT_EXPECT_EQ(fetch(2, 4), 4);
	world_close();
}

/* The copier's process is gone: its jobs fail, pages are lost, nothing else. */
KVT_TEST(dead_copier_costs_its_jobs)
{
	world_open(false, 0);
	cache(1, 8);
	w.hold[KVD_TIER_OUT] = true;
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 8, false), 8);
	settle();
	while (w.nr_jobs)
		job_end(0, -EPIPE);
	settle();
	KVT_EXPECT_EQ(stats()->spills_failed, 8);
	KVT_EXPECT_EQ(fetch(1, 8), 0);
	kvd_tier_copier(w.tiers, true); /* it starts again: nobody waits for it */
	cache(2, 8);
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 8, false), 8);
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_SPILLING], 0);
	settle();
	world_close();
}

TIER_MAIN("/tmp")
