/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real kvmd, its mover and a disk: pages go down when memory is short and come back with
 * their bytes, over restarts, kills and bad disks.
 */
#include "tests/ipc/common.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "kernels/ref.h"

#define SEQ_PAGES 8u

static struct eng_private_kvmd kvmd;
static char dir[64]; /* configuration and NVMe tier */
static char config[96];
static const char *faults = "crash=0";
static bool keeper;

/* ------------------------------------------------------------------- surroundings */

static void dir_make(void)
{
	strcpy(dir, "/tmp/kvmd-tier-XXXXXX");
	KVT_EXPECT(mkdtemp(dir));
	snprintf(config, sizeof(config), "%s/kvmd.json", dir);
}

static void dir_remove(void)
{
	static const char *const names[] = {"nvme/pages", "nvme/journal",
					    "nvme/journal.new", "nvme/lock", "kvmd.json"};
	char path[160];

	for (size_t i = 0; i < KV_ARRAY_SIZE(names); i++) {
		snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
		unlink(path);
	}
	snprintf(path, sizeof(path), "%s/nvme", dir);
	rmdir(path);
	rmdir(dir);
}

/* @tiers: the object's text; %s in it is the directory */
static void config_write(const char *tiers, const char *tenant_tiers)
{
	char text[1024], all[2048];
	FILE *f = fopen(config, "w");

	KVT_EXPECT(f);
	snprintf(text, sizeof(text), tiers, dir);
	snprintf(
		all, sizeof(all),
		"{\"tenants\": [{\"name\": \"red\", \"uids\": [%u], \"gpus\": [{\"gpu\": "
		"\"*\", \"max\": \"1GiB\"}]%s%s}], \"tiers\": %s}",
		getuid(), tenant_tiers ? ", \"tiers\": " : "",
		tenant_tiers ? tenant_tiers : "", text);
	fputs(all, f);
	fclose(f);
}

#define DRAM_ONLY "{\"dram\": {\"size\": \"64MiB\"}}"
#define BOTH                                                                            \
	"{\"dram\": {\"size\": \"8MiB\"}, \"nvme\": {\"path\": \"%s/nvme\", \"size\": " \
	"\"64MiB\", \"write_from\": 0}}"

static void start(void)
{
	const char *args[] = {"--config", config, "--host-bytes", "8MiB", "--faults",
			      faults,	  NULL};
	const char *kept[] = {"--config", config, "--host-bytes", "8MiB",
			      "--faults", faults, "--keeper",	  NULL};

	ipc_start(&kvmd, keeper ? kept : args);
}

/* The same daemon again: its directory, with the host's secret, is still there. */
static void again(void)
{
	char path[1200], fd_text[16], byte;
	int fds[2];

	ipc_build_path("kvmd", path, sizeof(path));
	KVT_EXPECT_EQ(pipe(fds), 0);
	snprintf(fd_text, sizeof(fd_text), "%d", fds[1]);
	kvmd.pid = fork();
	if (kvmd.pid == 0) {
		int log = open(kvmd.log_path, O_WRONLY | O_APPEND | O_CREAT, 0600);

		dup2(log, 1);
		dup2(log, 2);
		close(fds[0]);
		execl(path, path, "--private", kvmd.dir, "--die-with-parent", "--config",
		      config, "--backend", "host", "--host-bytes", "8MiB", "--faults",
		      faults, "--ready-fd", fd_text, keeper ? "--keeper" : NULL, NULL);
		_exit(127);
	}
	close(fds[1]);
	if (read(fds[0], &byte, 1) != 1) {
		ipc_show_log(&kvmd);
		KVT_FAIL("kvmd does not start again");
	}
	close(fds[0]);
}

static void end(int sig)
{
	int status;

	kill(kvmd.pid, sig);
	waitpid(kvmd.pid, &status, 0);
	if (sig == SIGTERM)
		KVT_EXPECT_EQ(status, 0);
}

/* A number of the admin socket's reply, by a path of field names: each is looked for behind
 * the one before. */
static double number(const char *op, const char *path)
{
	char request[64], words[128], want[64], *save = NULL, *text, *w;
	const char *at;
	double v;

	snprintf(request, sizeof(request), "{\"op\":\"%s\"}", op);
	at = text = ipc_admin(&kvmd, request);
	snprintf(words, sizeof(words), "%s", path);
	for (w = strtok_r(words, ".", &save); w && at; w = strtok_r(NULL, ".", &save)) {
		snprintf(want, sizeof(want), "\"%s\":", w);
		at = strstr(at, want);
		at += at ? strlen(want) : 0;
	}
	if (!at)
		KVT_FAIL("%s has no %s: %s", op, path, text);
	v = strtod(at, NULL);
	free(text);
	return v;
}

static double counter(const char *name)
{
	char path[80];

	snprintf(path, sizeof(path), "tiers.counters.%s", name);
	return number("tier", path);
}

static bool health_has(const char *code)
{
	char *text = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	bool has = strstr(text, code) != NULL;

	free(text);
	return has;
}

/* ------------------------------------------------------------------------ engines */

static struct kvc *c;
static struct kvc_pool *pool;
static u32 bytes;

static void attach(void)
{
	struct kv_layout l = ipc_layout();

	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	bytes = (u32)kv_page_bytes(&l);
}

static void pattern(u8 *p, u32 seq, u32 page)
{
	u32 z = seq * 2654435761u + page * 40503u + 1;

	for (u32 i = 0; i < bytes; i += 4) {
		z = z * 1664525u + 1013904223u;
		memcpy(p + i, &z, 4);
	}
}

static void tokens_of(u32 seq, u32 *ret)
{
	for (u32 i = 0; i < SEQ_PAGES * KV_PAGE_TOKENS; i++)
		ret[i] = seq * 1000003u + i;
}

/* Write, seal and let go a sequence. */
static void make(u32 seq)
{
	u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS], crc[SEQ_PAGES];
	struct kv_seal_ret rets[SEQ_PAGES];
	struct kv_grant g[SEQ_PAGES];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = SEQ_PAGES,
				.pages = g,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = rets};
	struct kvc_step *step;
	u8 *p = malloc(bytes);
	int r;

	for (u32 i = 0; i < 5000; i++) {
		r = kvc_alloc(pool, SEQ_PAGES, KV_GFP_WAIT | KV_GFP_PREFILL, g);
		if (r != KV_PENDING)
			break;
		usleep(1000);
	}
	KVT_EXPECT_EQ(r, 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	for (u32 i = 0; i < SEQ_PAGES; i++) {
		pattern(p, seq, i);
		ipc_page_put(pool, g[i].pfn, 0, p, bytes);
		crc[i] = kvk_crc32c(p, bytes);
	}
	kvc_step_retire(step);
	free(p);
	tokens_of(seq, tokens);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), 0);
	KVT_EXPECT_EQ(kvc_free(pool, g, SEQ_PAGES), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
}

/* Look up; each hit must have its bytes. Return: hits */
static u32 look(u32 seq)
{
	u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS], nr;
	struct kv_hit hits[SEQ_PAGES];
	struct kvc_step *step;
	u8 *want = malloc(bytes), *got = malloc(bytes);
	int r;

	tokens_of(seq, tokens);
	r = kvc_lookup(pool, tokens, KV_ARRAY_SIZE(tokens), SEQ_PAGES, hits, &nr);
	KVT_EXPECT(r == 0 || r == KV_MISS);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	for (u32 i = 0; i < nr; i++) {
		pattern(want, seq, i);
		ipc_page_get(pool, hits[i].grant.pfn, 0, got, bytes);
		if (memcmp(want, got, bytes))
			KVT_FAIL("wrong bytes: sequence %u page %u", seq, i);
	}
	kvc_step_retire(step);
	for (u32 i = 0; i < nr; i++)
		KVT_EXPECT_EQ(kvc_unpin(pool, &hits[i].grant, 1), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	free(want);
	free(got);
	return nr;
}

static int prefetch(u32 seq, u32 *ret_nr)
{
	u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS];

	tokens_of(seq, tokens);
	return kvc_prefetch(pool, tokens, KV_ARRAY_SIZE(tokens), SEQ_PAGES, ret_nr);
}

static u32 fetch(u32 seq)
{
	u32 nr;

	prefetch(seq, &nr);
	return look(seq);
}

/* So many sequences that the first ones are in the pool no more; 8 MiB hold about 14. */
static void make_many(u32 nr)
{
	for (u32 seq = 1; seq <= nr; seq++)
		make(seq);
}

static u32 fetch_all(u32 nr)
{
	u32 all = 0;

	for (u32 seq = 1; seq <= nr; seq++)
		all += fetch(seq);
	return all;
}

static void begin(const char *tiers)
{
	dir_make();
	config_write(tiers, NULL);
	start();
	attach();
}

static void finish(void)
{
	kvc_close(c);
	ipc_stop(&kvmd);
	dir_remove();
}

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
	usleep(50000); /* the journal's last batch */
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

/* ---------------------------------------------------------------------- odd clients */

static struct kv_sqe prefetch_sqe(struct ipc_raw *r, u32 seq)
{
	struct kv_lookup_arg *arg = raw_arg(r, 0);
	struct kv_sqe sqe = raw_sqe(r, KV_OP_PREFETCH);

	memset(arg, 0, sizeof(*arg));
	tokens_of(seq, (u32 *)(arg + 1));
	sqe.nr = SEQ_PAGES * KV_PAGE_TOKENS;
	sqe.arg_off = 0;
	sqe.arg_bytes = (u32)(sizeof(*arg) + sqe.nr * sizeof(u32));
	return sqe;
}

KVT_TEST(prefetch_with_junk_is_refused)
{
	static struct ipc_raw r;
	struct kv_sqe sqe;

	begin(DRAM_ONLY);
	make_many(40);
	raw_open(&r, &kvmd);
	sqe = prefetch_sqe(&r, 1);
	((struct kv_lookup_arg *)raw_arg(&r, 0))->reserved[2] = 1;
	KVT_EXPECT_EQ(raw_call(&r, sqe).result, -EINVAL);
	sqe = prefetch_sqe(&r, 1);
	sqe.nr--;
	KVT_EXPECT_EQ(raw_call(&r, sqe).result, -EINVAL); /* arg_bytes does not fit */
	sqe = prefetch_sqe(&r, 1);
	sqe.gfp = KV_GFP_WAIT;
	KVT_EXPECT_EQ(raw_call(&r, sqe).result, -EINVAL);
	sqe = prefetch_sqe(&r, 1);
	((struct kv_lookup_arg *)raw_arg(&r, 0))->max_pages = 3;
	KVT_EXPECT_EQ(raw_call(&r, sqe).nr, 3);
	raw_close(&r);
	finish();
}

/* A client goes away, another one closes its pool, while what they asked for is on its way
 * and the mover stands still. */
KVT_TEST(clients_leave_while_pages_come_back)
{
	static struct ipc_raw r;
	struct kv_cqe cqe;
	pid_t mover;

	begin(DRAM_ONLY);
	make_many(40);
	raw_open(&r, &kvmd);
	mover = (pid_t)number("status", "mover.pid");
	KVT_EXPECT(mover > 1);
	kill(mover, SIGSTOP);
	raw_push(&r, prefetch_sqe(&r, 1));
	raw_push(&r, prefetch_sqe(&r, 2));
	raw_kick(&r);
	KVT_EXPECT_EQ(raw_pop(&r, &cqe, 200), -1); /* they wait */
	raw_close(&r);
	make(500); /* the others go on: its pages are free ones, or PENDING */
	kill(mover, SIGCONT);
	KVT_EXPECT_EQ(fetch(1), SEQ_PAGES);
	expect_within(number("tier", "tiers.busy") == 0, 3000);
	KVT_EXPECT_EQ(number("audit", "damage"), 0);
	finish();
}

/* A mover that stands still: whoever waits is let go after a second. */
KVT_TEST(prefetch_gives_up_in_time)
{
	u64 start;
	u32 nr;
	pid_t mover;
	int r;

	begin(DRAM_ONLY);
	make_many(40);
	mover = (pid_t)number("status", "mover.pid");
	kill(mover, SIGSTOP);
	start = kv_now_ns();
	r = prefetch(1, &nr);
	KVT_EXPECT(r == KV_PENDING || r == -ETIMEDOUT);
	KVT_EXPECT(kv_now_ns() - start < 3 * KV_NSEC_PER_SEC);
	kill(mover, SIGCONT);
	KVT_EXPECT_EQ(fetch(1), SEQ_PAGES);
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
	KVT_EXPECT(found > 5 * SEQ_PAGES);
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

/* --------------------------------------------------------------------- configuration */

static void refused(const char *tiers, const char *tenant, const char *has,
		    const char *has_too)
{
	const char *args[] = {"--config", config, "--host-bytes", "8MiB", NULL};
	char error[512];
	int r;

	config_write(tiers, tenant);
	r = eng_private_kvmd_start(args, &kvmd, error, sizeof(error));
	if (!r)
		KVT_FAIL("kvmd started with %s", tiers);
	KVT_EXPECT_HAS(error, has);
	KVT_EXPECT_HAS(error, has_too);
}

KVT_TEST(bad_configuration_is_refused_by_field)
{
	char path[128], to[128];

	dir_make();
	refused("{\"dram\": {\"size\": \"1KiB\"}}", NULL, "tiers.dram.size", "1KiB");
	refused("{\"dram\": {}}", NULL, "tiers.dram", "\"size\" is missing");
	refused("{\"nvme\": {\"path\": \"%s/nvme\", \"size\": \"16MiB\"}}", NULL, "tiers",
		"needs \"dram\"");
	refused("{\"dram\": {\"size\": \"8MiB\"}, \"nvme\": {\"path\": \"nvme\", "
		"\"size\": \"16MiB\"}}",
		NULL, "tiers.nvme.path", "absolute");
	refused("{\"dram\": {\"size\": \"8MiB\", \"colour\": 1}}", NULL,
		"tiers.dram.colour", "unknown field");
	refused(DRAM_ONLY, "[{\"tier\": \"tape\", \"max\": 5}]",
		"tenants[0].tiers[0].tier", "tape");
	refused(DRAM_ONLY, "[{\"tier\": \"dram\", \"min\": \"1GiB\"}]",
		"tenants[0].tiers", "min");
	refused("{\"dram\": {\"size\": \"8MiB\"}, \"nvme\": {\"path\": \"%s/nvme\", "
		"\"size\": \"8TiB\"}}",
		NULL, "tiers.nvme.size", "bytes are free there");
	refused("{\"dram\": {\"size\": \"8TiB\"}}", NULL, "tiers.dram.size",
		"of this host's memory");
	snprintf(path, sizeof(path), "%s/nvme/pages", dir);
	snprintf(to, sizeof(to), "%s/elsewhere", dir);
	unlink(path);
	KVT_EXPECT_EQ(symlink(to, path), 0);
	refused(BOTH, NULL, "tiers.nvme.path", "symbolic link");
	KVT_EXPECT(access(to, F_OK));
	unlink(path);
	dir_remove();
}

KVT_TEST(tenant_budget_of_a_tier_is_kept)
{
	dir_make();
	config_write(DRAM_ONLY, "[{\"tier\": \"dram\", \"max\": \"1500KiB\"}]");
	start();
	attach();
	make_many(40);
	expect_within(number("tier", "tiers.dram.pages") >= 15, 3000);
	KVT_EXPECT(number("tier", "tiers.dram.used_bytes") <= 1500 * 1024);
	KVT_EXPECT_EQ(fetch(40), SEQ_PAGES);
	finish();
}

/* O38: evict domain reaches the tiers. */
KVT_TEST(o38_evicted_domain_is_gone_in_the_tiers)
{
	char *text;

	begin(BOTH);
	make_many(40);
	expect_within(counter("writes") > 100, 5000);
	text = ipc_admin(
		&kvmd,
		"{\"op\":\"evict\",\"target\":\"domain\",\"name\":\"red\",\"dry_run\":true}");
	KVT_EXPECT_HAS(text, "\"stored\":");
	free(text);
	text = ipc_admin(&kvmd,
			 "{\"op\":\"evict\",\"target\":\"domain\",\"name\":\"red\"}");
	KVT_EXPECT_HAS(text, "\"ok\":true");
	free(text);
	KVT_EXPECT_EQ(number("tier", "tiers.nvme.pages"), 0);
	KVT_EXPECT_EQ(fetch_all(40), 0);
	finish();
}

/* Without io_uring: threads, and status says so. */
KVT_TEST(works_on_threads_and_says_so)
{
	const char *args[] = {"--config", config,	"--host-bytes",
			      "8MiB",	  "--no-uring", NULL};

	dir_make();
	config_write(BOTH, NULL);
	ipc_start(&kvmd, args);
	attach();
	make_many(60);
	expect_within(counter("writes") > 100, 5000);
	KVT_EXPECT(fetch_all(60) >= 10 * SEQ_PAGES);
	KVT_EXPECT(health_has("TIER_NVME_SLOW_IO"));
	KVT_EXPECT(health_has("threads (io_uring: switched off)"));
	finish();
}

static void ctl(const char *verb, const char *has, int exit_code)
{
	char command[1600], path[1200], out[8192];
	size_t n;
	FILE *f;

	ipc_build_path("kvmctl", path, sizeof(path));
	snprintf(command, sizeof(command), "%s --socket %s %s 2>&1", path,
		 kvmd.admin_path, verb);
	f = popen(command, "r");
	n = fread(out, 1, sizeof(out) - 1, f);
	out[n] = 0;
	KVT_EXPECT_EQ(WEXITSTATUS(pclose(f)), exit_code);
	KVT_EXPECT_HAS(out, has);
}

KVT_TEST(kvmctl_shows_the_tiers)
{
	begin(BOTH);
	make_many(30);
	expect_within(counter("writes") > 50, 5000);
	ctl("tier", "NVMe tier", 0);
	ctl("tier", "restores_nvme", 0);
	ctl("tier --json", "\"schema\":\"kvmctl.tier/1\"", 0);
	ctl("tier --format csv --fields tenant,tier,used_bytes", "red,nvme,", 0);
	ctl("status", "DRAM tier", 7); /* --faults is a warning */
	finish();
}

KVT_MAIN()
