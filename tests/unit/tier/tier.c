/* SPDX-License-Identifier: Apache-2.0 */
/* kvmd/tier over a real core: pages go down and come back, and nothing wrong is ever read. */
#include "tests/unit/tier/world.h"

/* ----------------------------------------------------------------------- paths */

KVT_TEST(evicted_pages_come_back_from_dram)
{
	u32 coming;
	u64 tag;

	world_open(false, 0);
	cache(1, 8);
	tag = w.a->pool->frames[0].tag;
	evict(w.a, 8);
	KVT_EXPECT_EQ(stats()->spills, 8);
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_CACHED], 0);
	world_check();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 8, &coming), 0);
	KVT_EXPECT_EQ(coming, 8);
	settle();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 8, &coming), 8);
	KVT_EXPECT_EQ(coming, 0);
	KVT_EXPECT_EQ(stats()->restores_dram, 8);
	for (u32 pfn = 0; pfn < NR_PAGES; pfn++)
		if (w.a->pool->frames[pfn].state == KVD_CACHED)
			KVT_EXPECT(w.a->pool->frames[pfn].tag > tag);
	/* Evicting them again copies nothing. */
	evict(w.a, 8);
	KVT_EXPECT_EQ(stats()->spills_had, 8);
	KVT_EXPECT_EQ(fetch(1, 8), 8);
	world_close();
}

KVT_TEST(pages_come_back_from_nvme)
{
	world_open(true, 0);
	to_nvme_only(1, 4);
	KVT_EXPECT(stats()->writes >= 60);
	KVT_EXPECT_EQ(fetch(1, 4), 4);
	KVT_EXPECT_EQ(stats()->restores_nvme, 4);
	world_close();
}

/* A disk that is given one transfer at a time (tiers.nvme.depth 1) is written, too. */
KVT_TEST(disk_of_depth_one_is_written_and_read)
{
	nvme_depth = 1;
	world_open(true, 0);
	to_nvme_only(1, 8);
	KVT_EXPECT(stats()->writes >= 8);
	KVT_EXPECT_EQ(fetch(1, 8), 8);
	KVT_EXPECT_EQ(stats()->restores_nvme, 8);
	world_close();
}

/* The NVMe tier is there after a restart, in a fresh core with other pfns and tags (O46: the
 * scales are in the page and under its digest). */
KVT_TEST(o46_pages_survive_a_restart_on_nvme)
{
	world_open(true, 0);
	to_nvme_only(1, 4);
	world_close();
	world_open(true, 0);
	KVT_EXPECT(kvd_tier_store(w.tiers)->found.clean);
	KVT_EXPECT(kvd_tier_store(w.tiers)->adopted >= 60);
	cache(77, 3); /* the frames that come back are other ones */
	KVT_EXPECT_EQ(fetch(1, 4), 4);
	KVT_EXPECT_EQ(stats()->restores_nvme, 4);
	world_close();
}

/* ------------------------------------------------------------ copies in flight */

/* O24: a page is being stored, its frame is wanted: nobody gets it before the copy ended,
 * and what was stored is the page. */
KVT_TEST(o24_frame_being_stored_is_not_used_again)
{
	struct kv_grant g[NR_PAGES];
	u32 nr;

	world_open(false, 0);
	cache(1, 8);
	w.hold[KVD_TIER_OUT] = true;
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 8, false), 8);
	settle();
	for (nr = 0; nr < NR_PAGES; nr++) {
		if (rig_alloc(w.s, w.a, 1, KV_GFP_NOWAIT, &g[nr]))
			break;
		memset(frame(w.a->pool, g[nr].pfn), 0xee, PAGE);
	}
	KVT_EXPECT_EQ(nr, NR_PAGES - 8);
	world_check();
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(stats()->spills, 8);
	for (u32 i = 0; i < nr; i++)
		rig_free1(w.s, w.a, g[i]);
	rig_run(&w.rig);
	KVT_EXPECT_EQ(fetch(1, 8), 8);
	world_close();
}

/* Pages of a job wait for its end: it takes no more than its bytes. */
KVT_TEST(copy_jobs_end_at_their_bytes)
{
	u32 nr = 0;

	world_open(false, 0);
	w.tiers->p.job_bytes = 3 * kv_page_bytes(&w.a->pool->layout);
	cache(1, 8);
	w.hold[KVD_TIER_OUT] = true;
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 8, false), 8);
	settle();
	KVT_EXPECT_EQ(w.nr_jobs, 3);
	for (u32 i = 0; i < w.nr_jobs; i++) {
		KVT_EXPECT(w.jobs[i].nr && w.jobs[i].nr <= 3);
		nr += w.jobs[i].nr;
	}
	KVT_EXPECT_EQ(nr, 8);
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(fetch(1, 8), 8);
	world_close();
}

/* O21: the session that wanted the page is gone, the copy into it comes late. */
KVT_TEST(o21_session_ends_while_a_page_comes_back)
{
	struct kv_grant g[NR_PAGES];
	u32 coming, nr;

	world_open(false, 0);
	cache(1, 8);
	evict(w.a, 8);
	w.hold[KVD_TIER_IN] = true;
	KVT_EXPECT_EQ(look(w.s2, w.a2, 1, 8, &coming), 0);
	KVT_EXPECT_EQ(coming, 8);
	settle();
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_RESTORING], 8);
	kvd_session_end(w.s2, "test");
	kvd_session_work_ended(w.s2);
	rig_run(&w.rig);
	for (nr = 0; nr < NR_PAGES; nr++) {
		if (rig_alloc(w.s, w.a, 1, KV_GFP_NOWAIT, &g[nr]))
			break;
		pattern(frame(w.a->pool, g[nr].pfn), 500, nr);
	}
	KVT_EXPECT_EQ(nr, NR_PAGES - 8);
	w.hold[KVD_TIER_IN] = false;
	settle();
	for (u32 i = 0; i < nr; i++) {
		KVT_EXPECT(is_pattern(frame(w.a->pool, g[i].pfn), 500, i));
		rig_free1(w.s, w.a, g[i]);
	}
	KVT_EXPECT_EQ(fetch(1, 8), 8);
	world_close();
}

/* O35: DRAM is under pressure while a slot of it is copied back. */
KVT_TEST(o35_source_is_not_evicted_during_load_back)
{
	u32 coming;

	world_open(false, 0);
	cache(1, 6);
	evict(w.a, 6);
	w.hold[KVD_TIER_IN] = true;
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 6, &coming), 0);
	KVT_EXPECT_EQ(coming, 6);
	settle();
	for (u64 i = 0; i < 10; i++) {
		cache(1000 + i, 8);
		KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 8, false), 8);
		settle();
	}
	KVT_EXPECT(kvd_tier_space(w.tiers, KVD_TIER_DRAM)->evictions > 20);
	w.hold[KVD_TIER_IN] = false;
	settle();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 6, &coming), 6);
	world_close();
}

/* While copies are under way, what is taken is made up for at once, not at the low mark;
 * when none is, the low mark counts. */
KVT_TEST(copies_under_way_are_refilled_up_to_the_high_mark)
{
	struct kv_grant g[NR_PAGES];
	struct kvd_pool *pool;

	world_open(false, 0);
	pool = w.a->pool;
	pool->low_pages = pool->high_pages = 0;
	for (u64 seq = 1; seq <= NR_PAGES / 8; seq++)
		cache(seq, 8);
	KVT_EXPECT_EQ(pool->nr[KVD_CACHED], NR_PAGES);
	w.hold[KVD_TIER_OUT] = true;
	pool->low_pages = 4;
	pool->high_pages = 6;
	settle();
	KVT_EXPECT_EQ(pool->nr[KVD_SPILLING], 6);
	pool->high_pages = 13; /* one page less than is worth a job */
	settle();
	KVT_EXPECT_EQ(pool->nr[KVD_SPILLING], 6);
	pool->high_pages = 14;
	settle();
	KVT_EXPECT_EQ(pool->nr[KVD_SPILLING], 14);
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(kvd_pool_nr_free(pool), 14);
	KVT_EXPECT_EQ(rig_alloc(w.s, w.a, 8, KV_GFP_NOWAIT, g), 0);
	settle();
	KVT_EXPECT_EQ(kvd_pool_nr_free(pool), 6);
	for (u32 i = 0; i < 8; i++)
		rig_free1(w.s, w.a, g[i]);
	world_close();
}

/* The pool is full of cached pages: what comes back takes their place. */
KVT_TEST(full_pool_makes_room_for_what_comes_back)
{
	world_open(true, 0);
	for (u64 seq = 1; seq <= 16; seq++) {
		while (kvd_pool_nr_used(w.a->pool) > NR_PAGES - 8)
			evict(w.a, 8);
		cache(seq, 8);
	}
	for (u32 round = 0; round < 3; round++)
		for (u64 seq = 1; seq <= 16; seq++)
			KVT_EXPECT_EQ(fetch(seq, 8), 8);
	KVT_EXPECT_EQ(stats()->restores_no_room, 0);
	world_close();
}

/* No page of it can be had: whoever waits is let go at the deadline. */
KVT_TEST(pool_in_use_lets_restores_go)
{
	struct kv_grant g[NR_PAGES];
	u32 nr;

	world_open(false, 0);
	cache(1, 4);
	evict(w.a, 4);
	for (nr = 0; nr < NR_PAGES; nr++)
		g[nr] = rig_alloc1(w.s2, w.a2);
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 4, NULL), 0);
	settle();
	KVT_EXPECT(kvd_tier_oldest(w.tiers, w.a->pool) != KVD_TIER_NONE);
	w.rig.now += 2000000000ull;
	rig_run(&w.rig);
	kvd_tier_tick(w.tiers);
	KVT_EXPECT_EQ(kvd_tier_oldest(w.tiers, w.a->pool), KVD_TIER_NONE);
	KVT_EXPECT_EQ(stats()->restores_no_room, 4);
	for (u32 i = 0; i < nr; i++)
		rig_free1(w.s2, w.a2, g[i]);
	rig_run(&w.rig);
	KVT_EXPECT_EQ(fetch(1, 4), 4);
	world_close();
}

/* O37: a page that is being copied is on its way, and found only when that is over. */
KVT_TEST(o37_page_is_found_after_copy_and_digest)
{
	u32 coming;

	world_open(false, 0);
	cache(1, 4);
	evict(w.a, 4);
	for (u32 pfn = 0; pfn < NR_PAGES; pfn++)
		memset(frame(w.a->pool, pfn), 0xee, PAGE);
	w.hold[KVD_TIER_IN] = true;
	look(w.s, w.a, 1, 4, &coming);
	settle(); /* copies are not done */
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 4, &coming), 0);
	KVT_EXPECT_EQ(coming, 4);
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_RESTORING], 4);
	w.hold[KVD_TIER_IN] = false;
	settle();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 4, NULL), 4);
	world_close();
}

/* The digest is taken of bytes that have been copied: what flips before that is noticed. */
KVT_TEST(o37_bit_that_flips_before_the_copy_is_a_miss)
{
	world_open(true, 0);
	cache(1, 4);
	evict(w.a, 4);
	w.hold[KVD_TIER_IN] = true;
	look(w.s, w.a, 1, 4, NULL);
	settle();
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_RESTORING], 4);
	for (u64 off = 4096 + 1000; off < 4 * 77824; off += 77824)
		w.dram[off] ^= 1;
	w.hold[KVD_TIER_IN] = false;
	settle();
	KVT_EXPECT_EQ(stats()->bad_digests, 4);
	KVT_EXPECT_EQ(stats()->restores, 0);
	KVT_EXPECT_EQ(fetch(1, 4), 4); /* from NVMe */
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_CACHED], 4);
	world_close();
}

/* Rapid-MLX#196 (O41): a fork is another page, wherever its source goes. */
KVT_TEST(o41_copy_stands_alone)
{
	struct kv_page_ref src;
	struct kv_grant g;
	struct kv_hit hit;
	u32 crc, nr = 0;

	world_open(true, 0);
	cache(1, 1);
	KVT_EXPECT_EQ(rig_lookup(w.s, w.a, 1, 1, &hit, &nr), 0);
	KVT_EXPECT_EQ(nr, 1);
	src = (struct kv_page_ref){.pfn = hit.grant.pfn, .tag = hit.grant.tag};
	KVT_EXPECT_EQ(kvd_fork(w.s, w.a, &src, 1, KV_GFP_NOWAIT, &g, &nr), 0);
	KVT_EXPECT(g.pfn != hit.grant.pfn);
	/* the engine's fork copy */
	memmove(frame(w.a->pool, g.pfn), frame(w.a->pool, hit.grant.pfn), PAGE);
	crc = kvd_crc32c(frame(w.a->pool, hit.grant.pfn), PAGE);
	KVT_EXPECT_EQ(rig_free1(w.s, w.a, hit.grant), 0);
	evict(w.a, 1);
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_CACHED], 0);
	to_nvme_only(2, 2);
	KVT_EXPECT_EQ(kvd_crc32c(frame(w.a->pool, g.pfn), PAGE), crc);
	KVT_EXPECT(is_pattern(frame(w.a->pool, g.pfn), 1, 0));
	KVT_EXPECT_EQ(fetch(1, 1), 1);
	KVT_EXPECT(is_pattern(frame(w.a->pool, g.pfn), 1, 0));
	rig_free1(w.s, w.a, g);
	world_close();
}

/* R9: a page that is held is not evicted, however long its reader takes. */
KVT_TEST(r9_pinned_page_outlasts_any_reclaim)
{
	struct kv_hit hits[8];
	u32 nr;

	world_open(false, 0);
	cache(1, 4);
	KVT_EXPECT_EQ(rig_lookup(w.s, w.a, 1, 4, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 4);
	for (u64 i = 0; i < 20; i++) {
		cache(1000 + i, 8);
		w.rig.now += 10000000000ull;
		kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, NR_PAGES, false);
		settle();
		for (u32 k = 0; k < 4; k++)
			KVT_EXPECT(is_pattern(frame(w.a->pool, hits[k].grant.pfn), 1, k));
	}
	for (u32 k = 0; k < 4; k++)
		KVT_EXPECT_EQ(rig_free1(w.s, w.a, hits[k].grant), 0);
	rig_run(&w.rig);
	world_close();
}

/* A restored page's bytes are another session's to whoever gets the frame next. */
KVT_TEST(restored_bytes_are_dirty_for_the_next_session)
{
	struct kv_grant g[NR_PAGES];
	bool held[NR_PAGES] = {false};

	world_open(false, 0);
	KVT_EXPECT_EQ(rig_alloc(w.s2, w.a2, 60, KV_GFP_NOWAIT | KV_GFP_GROW, g), 0);
	for (u32 i = 0; i < 60; i++)
		KVT_EXPECT_EQ(rig_free1(w.s2, w.a2, g[i]), 0);
	rig_run(&w.rig);
	cache(1, 4);
	evict(w.a, 4);
	KVT_EXPECT_EQ(rig_alloc(w.s2, w.a2, 60, KV_GFP_NOWAIT | KV_GFP_GROW, g), 0);
	for (u32 i = 0; i < 60; i++)
		KVT_EXPECT_EQ(rig_free1(w.s2, w.a2, g[i]), 0);
	rig_run(&w.rig);
	KVT_EXPECT_EQ(look(w.s2, w.a2, 1, 4, NULL), 0);
	settle();
	for (u32 pfn = 0; pfn < NR_PAGES; pfn++)
		held[pfn] = w.a->pool->frames[pfn].state == KVD_CACHED;
	evict(w.a, 4);
	KVT_EXPECT_EQ(rig_alloc(w.s2, w.a2, 60, KV_GFP_NOWAIT | KV_GFP_GROW, g), 0);
	for (u32 i = 0; i < 60; i++) {
		if (held[g[i].pfn])
			KVT_EXPECT(g[i].flags & KV_GRANT_DIRTY);
		KVT_EXPECT_EQ(rig_free1(w.s2, w.a2, g[i]), 0);
	}
	rig_run(&w.rig);
	world_close();
}

/* --------------------------------------------------------------------- owners */

KVT_TEST(tenant_budget_in_a_tier_is_kept)
{
	const struct kvd_space *dram;

	world_open(true, 0);
	dram = kvd_tier_space(w.tiers, KVD_TIER_DRAM);
	limits_set(w.red->index, 0, 10 * 77824);
	for (u64 seq = 1; seq <= 6; seq++) {
		cache(seq, 8);
		evict(w.a, 8);
		KVT_EXPECT(dram->acct[w.red->index].used_bytes <= 10 * 77824);
	}
	KVT_EXPECT_EQ(dram->acct[w.red->index].nr, 10);
	limits_set(w.red->index, 0, 0); /* lowered under use: it goes */
	settle();
	KVT_EXPECT_EQ(dram->acct[w.red->index].nr, 0);
	cache(9, 8);
	evict(w.a, 8);
	KVT_EXPECT_EQ(dram->acct[w.red->index].nr, 0);
	world_close();
}

/* A tenant that left the policy stores nothing, and its place is nobody's inheritance. */
KVT_TEST(tenant_that_left_stores_nothing)
{
	const struct kvd_space *dram, *nvme;
	u16 index;

	world_open(true, 0);
	dram = kvd_tier_space(w.tiers, KVD_TIER_DRAM);
	nvme = kvd_tier_space(w.tiers, KVD_TIER_NVME);
	cache_with(w.sb, w.ab, 1, 8, 0);
	evict(w.ab, 8);
	index = w.blue->index;
	KVT_EXPECT(dram->acct[index].nr == 8 && nvme->acct[index].nr == 8);
	kvd_session_end(w.sb, "test");
	kvd_session_work_ended(w.sb);
	rig_run(&w.rig);
	KVT_EXPECT_EQ(kvd_tenant_destroy(&w.rig.core, w.blue), 0);
	w.blue = rig_tenant(&w.rig, w.rig.blue, "azure", 0, 0);
	KVT_EXPECT_EQ(w.blue->index, index);
	kvd_tier_tick(w.tiers);
	KVT_EXPECT(dram->acct[index].nr == 0 && nvme->acct[index].nr == 0);
	world_close();
}

/* O38: forgetting a domain's pages is forgetting them in the tiers, also those on their
 * way there. */
KVT_TEST(o38_reset_reaches_the_tiers)
{
	world_open(true, 0);
	to_nvme_only(1, 4);
	cache(2, 4);
	w.hold[KVD_TIER_OUT] = true;
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 4, false), 4);
	settle();
	KVT_EXPECT(kvd_tier_drop_domain(w.tiers, w.rig.red->id) > 60);
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(kvd_tier_count_domain(w.tiers, w.rig.red->id), 0);
	KVT_EXPECT_EQ(fetch(1, 4), 0);
	KVT_EXPECT_EQ(fetch(2, 4), 0);
	world_close();
	world_open(true, 0); /* and after a restart */
	KVT_EXPECT_EQ(kvd_tier_store(w.tiers)->adopted, 0);
	world_close();
}

static bool drop_first_page(u64 seq)
{
	u8 key[KV_KEY_BYTES];
	struct kvd_slot_name name = {key, w.a->pool->fingerprint, w.a->pool->domain_id};
	u32 tokens[KV_PAGE_TOKENS];

	rig_tokens(seq, 0, tokens);
	kvd_prefix_pool_key(w.a->pool, w.a->pool->root_key, tokens, key);
	return kvd_tier_drop_page(w.tiers, &name);
}

/* So is forgetting one page: out to DRAM, back from there, and from the disk; the one beside it
 * is not touched. */
KVT_TEST(o38_forgotten_page_is_not_stored_or_found_either)
{
	world_open(true, 0);
	cache(1, 1);
	cache(2, 1);
	w.hold[KVD_TIER_OUT] = true;
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 2, false), 2);
	settle();
	KVT_EXPECT(drop_first_page(1));
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT(!drop_first_page(1));
	KVT_EXPECT_EQ(fetch(1, 1), 0);
	KVT_EXPECT_EQ(fetch(2, 1), 1);

	cache(3, 1);
	evict(w.a, 2);
	w.hold[KVD_TIER_IN] = true;
	look(w.s, w.a, 2, 1, NULL);
	look(w.s, w.a, 3, 1, NULL);
	settle();
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_RESTORING], 2);
	KVT_EXPECT(drop_first_page(2));
	w.hold[KVD_TIER_IN] = false;
	settle();
	KVT_EXPECT_EQ(fetch(2, 1), 0);
	KVT_EXPECT_EQ(look(w.s, w.a, 3, 1, NULL), 1);

	to_nvme_only(4, 1);
	look(w.s, w.a, 4, 1, NULL); /* the disk has its buffer */
	KVT_EXPECT(drop_first_page(4));
	settle();
	KVT_EXPECT_EQ(fetch(4, 1), 0);
	world_close();
}

/* ---------------------------------------------------------------------- chance */

/* Random work, jobs ended in random order, faults: a hit always has the right bytes (that
 * look() checks), and all sums hold. */
KVT_TEST_T(random_work_never_reads_wrong_bytes, 120)
{
	static const enum kvd_fault_point points[] = {
		KVD_FAULT_tier_read_eio,   KVD_FAULT_tier_read_short,
		KVD_FAULT_tier_read_flip,  KVD_FAULT_tier_read_swap,
		KVD_FAULT_tier_read_late,  KVD_FAULT_tier_copy,
		KVD_FAULT_tier_write_eio,  KVD_FAULT_tier_write_torn,
		KVD_FAULT_tier_write_full, KVD_FAULT_tier_journal};
	u32 hits = 0;

	kvd_fault_seed(kvt_rand64());
	world_open(true, 50);
	for (u32 i = 0; i < KV_ARRAY_SIZE(points); i++) {
		struct kvd_fault_spec spec = {.probability = 20000};

		kvd_fault_arm(points[i], &spec);
	}
	for (u32 i = 0; i < 3000; i++) {
		u64 seq = 1 + kvt_rand_below(24);
		u32 nr = 1 + kvt_rand_below(6), got;
		bool two = kvt_rand_below(2);

		w.hold[0] = w.hold[1] = true;
		got = look(two ? w.s2 : w.s, two ? w.a2 : w.a, seq, nr, NULL);
		hits += got;
		if (got < nr && kvd_pool_nr_used(w.a->pool) + 8 < NR_PAGES &&
		    kvt_rand_below(3) == 0)
			cache_with(two ? w.s2 : w.s, two ? w.a2 : w.a, seq, nr, 0);
		if (kvt_rand_below(2))
			kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX,
					 1 + kvt_rand_below(8), false);
		kvd_tier_turn(w.tiers);
		while (w.nr_jobs && kvt_rand_below(3))
			job_end(kvt_rand_below(w.nr_jobs),
				kvt_rand_below(40) ? 0 : -EPIPE);
		kvd_tier_ready(w.tiers);
		rig_run(&w.rig);
		if (i % 64 == 0) {
			w.rig.now += 3000000000ull;
			kvd_tier_tick(w.tiers);
			w.hold[0] = w.hold[1] = false;
			settle();
			world_check();
		}
	}
	KVT_NOTE("%u hits; spilled %llu, restored %llu + %llu, written %llu", hits,
		 (unsigned long long)stats()->spills,
		 (unsigned long long)stats()->restores_dram,
		 (unsigned long long)stats()->restores_nvme,
		 (unsigned long long)stats()->writes);
	KVT_EXPECT(stats()->restores_nvme > 20 && stats()->restores_dram > 100);
	for (u32 i = 0; i < KV_ARRAY_SIZE(points); i++)
		kvd_fault_arm(points[i], NULL);
	w.rig.now += 20000000000ull;
	world_close();
}

TIER_MAIN("/tmp")
