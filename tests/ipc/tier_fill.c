/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A kvmd that comes back under living engines serves them while the memory of its DRAM tier is
 * still being allocated (ipc/filling.h). The fault tier_fill makes a try fail: the next one is
 * two seconds later, so what is asked right after the start is asked without tiers.
 */
#include "tests/ipc/tier.h"

#define LARGE "{\"dram\": {\"size\": \"128MiB\"}}"
#define LARGE_BOTH                                                                        \
	"{\"dram\": {\"size\": \"128MiB\"}, \"nvme\": {\"path\": \"%s/nvme\", \"size\": " \
	"\"64MiB\", \"write_from\": 0}}"

static bool tiers_are(const char *state)
{
	char want[64], *text = ipc_admin(&kvmd, "{\"op\":\"tier\"}");
	bool are;

	snprintf(want, sizeof(want), "\"state\":\"%s\"", state);
	are = strstr(text, want) != NULL;
	free(text);
	return are;
}

static void restart(const char *spec)
{
	kill(kvmd.pid, SIGKILL);
	waitpid(kvmd.pid, NULL, 0);
	faults = spec;
	again();
}

KVT_TEST(engines_are_served_while_the_tiers_memory_comes)
{
	struct kv_grant g[4];
	u32 nr;

	keeper = true;
	begin(LARGE);
	KVT_EXPECT(tiers_are("ready")); /* a cold start waits for it */
	make(1);
	restart("tier_fill:times=1");
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_WAIT | KV_GFP_PREFILL, g), 0);
	KVT_EXPECT_EQ(look(1),
		      SEQ_PAGES); /* by the engine of before, its bytes compared */
	KVT_EXPECT(tiers_are("filling"));
	KVT_EXPECT(health_has("TIER_FILLING"));
	KVT_EXPECT_EQ(kvc_free(pool, g, 4), 0);
	/* Pressure without tiers: the oldest pages are dropped, nobody waits for ever. */
	for (u32 seq = 100; seq < 120; seq++)
		make(seq);
	KVT_EXPECT_EQ(look(1), 0);
	KVT_EXPECT_EQ(prefetch(1, &nr), KV_MISS); /* there are tiers, but for now */
	KVT_EXPECT(tiers_are("filling"));
	expect_within(health_has("Cannot allocate memory"), 5000);
	expect_within(tiers_are("ready"), 10000);
	KVT_EXPECT(!health_has("TIER_FILLING"));
	make_many(40);
	KVT_EXPECT_EQ(fetch_all(40), 40 * SEQ_PAGES);
	KVT_EXPECT(counter("restores") > 0);
	finish();
}

/* A page on NVMe that nobody can name yet would be back after its eviction. */
KVT_TEST(evict_is_refused_while_the_tiers_are_unknown)
{
	char *text;

	keeper = true;
	begin(LARGE_BOTH);
	make_many(40);
	expect_within(counter("writes") > 200, 5000);
	usleep(50000); /* most of them are in the journal, whatever is late */
	restart("tier_fill:times=1");
	text = ipc_admin(&kvmd,
			 "{\"op\":\"evict\",\"target\":\"domain\",\"name\":\"red\"}");
	KVT_EXPECT_HAS(text, "the tiers are not there yet");
	free(text);
	text = ipc_admin(&kvmd,
			 "{\"op\":\"evict\",\"target\":\"tenant\",\"name\":\"red\"}");
	KVT_EXPECT_HAS(text, "\"ok\":true"); /* it means the pools alone */
	free(text);
	expect_within(tiers_are("ready"), 10000);
	KVT_EXPECT(number("tier", "tiers.nvme.adopted") > 100);
	text = ipc_admin(&kvmd,
			 "{\"op\":\"evict\",\"target\":\"domain\",\"name\":\"red\"}");
	KVT_EXPECT_HAS(text, "\"ok\":true");
	free(text);
	KVT_EXPECT_EQ(fetch(1), 0);
	finish();
}

/* The memory is there and the NVMe tier cannot be opened: said, tried again, and put right. */
KVT_TEST(a_directory_that_is_not_there_is_waited_for)
{
	char path[128], aside[128];
	int fd;

	keeper = true;
	begin(LARGE_BOTH);
	make_many(40);
	expect_within(counter("writes") > 200, 5000);
	usleep(50000); /* most of them are in the journal, whatever is late */
	snprintf(path, sizeof(path), "%s/nvme", dir);
	snprintf(aside, sizeof(aside), "%s/aside", dir);
	kill(kvmd.pid, SIGKILL);
	waitpid(kvmd.pid, NULL, 0);
	KVT_EXPECT_EQ(rename(path, aside), 0);
	fd = open(path, O_CREAT | O_WRONLY, 0600);
	KVT_EXPECT(fd >= 0);
	close(fd);
	again();
	expect_within(health_has("is a symbolic link or no directory"), 5000);
	KVT_EXPECT(tiers_are("filling"));
	make(200);
	KVT_EXPECT_EQ(unlink(path), 0);
	KVT_EXPECT_EQ(rename(aside, path), 0);
	expect_within(tiers_are("ready"), 10000);
	KVT_EXPECT(number("tier", "tiers.nvme.adopted") > 100);
	KVT_EXPECT_EQ(fetch(200), SEQ_PAGES);
	finish();
}

/* How many descriptors of such memory a process has. */
static u32 pools_of(pid_t pid)
{
	char path[64], link[96];
	struct dirent *e;
	u32 nr = 0;
	ssize_t n;
	DIR *d;

	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	d = opendir(path);
	KVT_EXPECT(d);
	while ((e = readdir(d))) {
		n = readlinkat(dirfd(d), e->d_name, link, sizeof(link) - 1);
		link[n > 0 ? n : 0] = 0;
		nr += strstr(link, "kvmd-mover-pool") != NULL;
	}
	closedir(d);
	return nr;
}

/* One look: a dying keeper is there at the first and gone at the second. */
static bool keeper_is_new(pid_t old)
{
	pid_t now = ipc_keeper_pid();

	return now > 1 && now != old;
}

/* A killed kvmd's memory is freed by the next one, not by its own end, and stays nowhere. */
KVT_TEST(memory_of_a_killed_kvmd_is_freed_by_the_next)
{
	pid_t k;

	keeper = true;
	begin(LARGE);
	for (u32 i = 0; i < 4; i++) {
		k = ipc_keeper_pid();
		KVT_EXPECT(k > 1);
		expect_within(pools_of(k) == 1, 5000);
		kill(kvmd.pid, SIGKILL);
		waitpid(kvmd.pid, NULL, 0);
		KVT_EXPECT_EQ(pools_of(k), 1);
		again();
		expect_within(tiers_are("ready"), 10000);
		KVT_EXPECT_EQ(pools_of(kvmd.pid), 1);
	}
	make_many(40);
	KVT_EXPECT_EQ(fetch_all(40), 40 * SEQ_PAGES);
	/* A keeper that died is given it again. */
	kill(k, SIGKILL);
	expect_within(keeper_is_new(k), 5000);
	expect_within(pools_of(ipc_keeper_pid()) == 1, 5000);
	finish();
}

/* Told to end while the thread is at it, or killed: nobody waits for memory that does not
 * come, and nothing stays. */
KVT_TEST_T(ends_while_the_tiers_memory_comes, 20)
{
	keeper = true;
	begin(LARGE);
	restart("tier_fill_stuck");
	KVT_EXPECT(tiers_are("filling"));
	restart("tier_fill_stuck");
	KVT_EXPECT(tiers_are("filling"));
	kvc_close(c);
	end(SIGTERM);
	faults = "crash=0";
	again();
	KVT_EXPECT(tiers_are("ready"));
	attach();
	finish();
}

KVT_MAIN()
