/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real kvmd, its mover and a disk: pages go down when memory is short and come back with
 * their bytes, over restarts, kills and bad disks.
 */
#include "tests/ipc/tier.h"

/* -------------------------------------------------------------------------- paths */

KVT_TEST(pages_go_to_dram_and_come_back)
{
	struct kv_stat s;
	u32 nr;

	begin(DRAM_ONLY);
	make_many(40);
	expect_within(counter("spills") >= 150, 5000);
	KVT_EXPECT(look(1) < SEQ_PAGES);
	KVT_EXPECT_EQ(prefetch(1, &nr), 0);
	KVT_EXPECT_EQ(nr, SEQ_PAGES);
	KVT_EXPECT_EQ(kvc_stat(pool, &s), 0);
	KVT_EXPECT_EQ(s.nr_sealed, 0); /* it promises nothing and holds nothing */
	KVT_EXPECT_EQ(look(1), SEQ_PAGES);
	KVT_EXPECT_EQ(fetch_all(40), 40 * SEQ_PAGES);
	KVT_EXPECT_EQ(counter("bad_digests"), 0);
	KVT_EXPECT_EQ(counter("restores_nvme"), 0);
	finish();
}

/* A lookup that misses starts the restore by itself: the next one finds the pages. */
KVT_TEST(lookup_starts_to_bring_pages_back)
{
	u32 nr = 0;

	begin(DRAM_ONLY);
	make_many(40);
	KVT_EXPECT(look(1) < SEQ_PAGES);
	for (u32 i = 0; i < 2000 && nr != SEQ_PAGES; i++) {
		usleep(1000);
		nr = look(1);
	}
	KVT_EXPECT_EQ(nr, SEQ_PAGES);
	finish();
}

KVT_TEST(without_tiers_prefetch_says_so)
{
	u32 nr;

	ipc_start(&kvmd, NULL);
	attach();
	KVT_EXPECT_EQ(prefetch(1, &nr), -EOPNOTSUPP);
	kvc_close(c);
	ipc_stop(&kvmd);
}

static void nvme_over_restart(int sig)
{
	u32 found = 0;

	begin(BOTH);
	make_many(60); /* 480 pages: 8 MiB + 8 MiB hold 230 */
	expect_within(counter("writes") > 100, 5000);
	for (u32 seq = 1; seq <= 50; seq++)
		fetch(seq);
	KVT_EXPECT(counter("restores_nvme") >= SEQ_PAGES);
	usleep(200000); /* the journal's last batch */
	kvc_close(c);
	end(sig);
	again();
	attach();
	KVT_EXPECT(number("tier", "tiers.nvme.adopted") > 100);
	for (u32 seq = 1; seq <= 60; seq++)
		found += fetch(seq);
	KVT_EXPECT(found >= 100);
	KVT_EXPECT(counter("reads") >= 100);
	KVT_EXPECT_EQ(counter("bad_names") + counter("bad_old") + counter("bad_headers") +
			      counter("bad_digests"),
		      0);
	finish();
}

KVT_TEST(o46_nvme_tier_survives_a_clean_restart)
{
	nvme_over_restart(SIGTERM);
}

KVT_TEST(nvme_tier_survives_a_kill)
{
	nvme_over_restart(SIGKILL);
}

/* Killed with copies and writes under way, again and again: never a wrong byte. */
static void killed_while_moving(void)
{
	u32 found = 0;

	begin(BOTH);
	for (u32 round = 0; round < 6; round++) {
		for (u32 seq = 1; seq <= 30; seq++) {
			make(100 * round + seq);
			if (seq % 5 == 0)
				found += fetch(100 * round + seq / 2 + 1);
		}
		kill(kvmd.pid, SIGKILL);
		waitpid(kvmd.pid, NULL, 0);
		kvc_close(c);
		again();
		attach();
		for (u32 seq = 1; seq <= 30; seq += 3)
			found += fetch(100 * round + seq);
	}
	KVT_NOTE("%u pages were found again", found);
	KVT_EXPECT(found > 100);
	finish();
}

KVT_TEST_T(killed_while_pages_move, 120)
{
	killed_while_moving();
}

/* With a keeper the pool's pages stay: also those that were SPILLING and RESTORING, which
 * wait for the end of the dead kvmd's mover. The audit at the end says that they are right. */
KVT_TEST_T(killed_with_a_keeper_while_pages_move, 120)
{
	keeper = true;
	killed_while_moving();
}

/* kvmctl upgrade: what is under way ends, the journal is closed, the next program goes on. */
KVT_TEST(upgrade_leaves_a_clean_tier)
{
	keeper = true;
	begin(BOTH);
	make_many(40);
	expect_within(counter("writes") > 50, 5000);
	free(ipc_admin(&kvmd, "{\"op\":\"upgrade\"}"));
	usleep(500000);
	expect_within(number("tier", "tiers.nvme.adopted") > 50, 3000);
	KVT_EXPECT_EQ(number("audit", "damage"), 0);
	for (u32 seq = 1; seq <= 40; seq++)
		fetch(seq);
	KVT_EXPECT(counter("reads") >= SEQ_PAGES);
	finish();
}

/* The mover is killed in the middle: its jobs are lost, another one goes on (O21). */
KVT_TEST(mover_killed_while_pages_move)
{
	pid_t mover;

	begin(BOTH);
	make_many(20);
	for (u32 i = 0; i < 4; i++) {
		for (u32 seq = 1; seq <= 12; seq++)
			make(200 + 20 * i + seq);
		mover = (pid_t)number("status", "mover.pid");
		if (mover > 0)
			kill(mover, SIGKILL);
		fetch(3);
	}
	expect_within(number("status", "mover.deaths") >= 1, 3000);
	for (u32 i = 0; i < 3000 && fetch(290) != SEQ_PAGES; i++) {
		make(290);
		make_many(14);
	}
	KVT_EXPECT_EQ(fetch(290), SEQ_PAGES);
	finish();
}

/* ------------------------------------------------------------------------- bad disks */

static void with_faults(const char *spec, const char *const *counters, bool reads)
{
	double moved = 0;
	u32 found;

	faults = spec;
	begin(BOTH);
	make_many(60);
	expect_within(!reads || counter("writes") > 100, 5000);
	found = fetch_all(60);
	for (u32 i = 0; counters[i]; i++)
		moved += counter(counters[i]);
	KVT_EXPECT(moved >= 1);
	KVT_EXPECT(found < 60 * SEQ_PAGES); /* misses; look() has compared the others */
	/* A torn page ends its run: one page in three leaves about one a sequence. */
	KVT_EXPECT_LE(SEQ_PAGES, found);
	finish();
}

KVT_TEST(o36_bad_reads_are_misses)
{
	static const char *const counters[] = {"read_errors", "read_shorts",
					       "bad_digests", "bad_names", NULL};

	with_faults("tier_read_eio:interval=11;tier_read_short:interval=13;"
		    "tier_read_flip:interval=17;tier_read_swap:interval=19",
		    counters, true);
}

KVT_TEST(torn_writes_are_misses)
{
	static const char *const counters[] = {"bad_digests", "bad_headers", "bad_names",
					       "bad_old", NULL};

	with_faults("tier_write_torn:interval=3", counters, true);
}

KVT_TEST(full_disk_stops_writes_and_says_so)
{
	faults = "tier_write_full";
	begin(BOTH);
	make_many(40);
	expect_within(counter("write_full") >= 1, 3000);
	KVT_EXPECT(health_has("TIER_NVME_WRITES_OFF"));
	KVT_EXPECT(health_has("No space left on device"));
	make(99);
	KVT_EXPECT_EQ(fetch(99), SEQ_PAGES);
	finish();
}

/* A page that engine and digest disagree about is told and never stored. */
KVT_TEST(copy_that_fails_is_a_miss)
{
	static const char *const counters[] = {"spills_failed", "restores_failed", NULL};

	with_faults("tier_copy:interval=5", counters, false);
}

KVT_MAIN()
