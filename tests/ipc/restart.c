/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd dies by kill -9 under its clients, at any store, and the next one takes up what
 * the keeper holds: leases, bytes, prefixes, quarantine (design 5 P7, design 9; cases
 * O32, O33, O56).
 */
#include "tests/ipc/common.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "kvmd/own/image.h"

static struct eng_private_kvmd kvmd;
static const char *host_bytes = "256MiB";

/* ------------------------------------------------------------------- kill and start */

static void again_with(const char *faults)
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
		execl(path, path, "--private", kvmd.dir, "--die-with-parent", "--keeper",
		      "--host-bytes", host_bytes, "--faults", faults, "--ready-fd",
		      fd_text, NULL);
		_exit(127);
	}
	close(fds[1]);
	if (read(fds[0], &byte, 1) != 1 && !strcmp(faults, "crash=0")) {
		ipc_show_log(&kvmd);
		KVT_FAIL("kvmd does not start again");
	}
	close(fds[0]);
}

static void again(void)
{
	again_with("crash=0");
}

static void kill_kvmd(void)
{
	kill(kvmd.pid, SIGKILL);
	waitpid(kvmd.pid, NULL, 0);
}

static void start(void)
{
	const char *args[] = {"--keeper",     "--faults", "crash=0",
			      "--host-bytes", host_bytes, NULL};

	ipc_start(&kvmd, args);
}

static bool log_has(const char *text)
{
	char line[512];
	FILE *f = fopen(kvmd.log_path, "r");
	bool found = false;

	while (f && !found && fgets(line, sizeof(line), f))
		found = strstr(line, text) != NULL;
	if (f)
		fclose(f);
	return found;
}

/* Keepers end with us: their command line names us. */
static pid_t keeper_pid(void)
{
	char path[300], text[200], want[32];
	DIR *dir = opendir("/proc");
	struct dirent *d;
	pid_t pid = 0;

	snprintf(want, sizeof(want), "%d", getpid());
	while (!pid && (d = readdir(dir))) {
		const char *arg[4] = {NULL};
		ssize_t n;
		int fd, nr = 0;

		snprintf(path, sizeof(path), "/proc/%s/cmdline", d->d_name);
		fd = atoi(d->d_name) > 0 ? open(path, O_RDONLY) : -1;
		n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
		if (fd >= 0)
			close(fd);
		for (ssize_t i = 0; i < n && nr < 4; i += (ssize_t)strlen(text + i) + 1) {
			text[n] = 0;
			arg[nr++] = text + i;
		}
		if (nr == 4 && !strcmp(arg[1], "--keeper-process") &&
		    !strcmp(arg[3], want))
			pid = atoi(d->d_name);
	}
	closedir(dir);
	return pid;
}

static struct kv_stat stat_of(struct kvc_pool *pool)
{
	struct kv_stat s;

	KVT_EXPECT_EQ(kvc_stat(pool, &s), 0);
	return s;
}

/* ------------------------------------------------------------------------- helpers */

static void tokens_of(u32 seed, u32 *ret, u32 pages)
{
	for (u32 i = 0; i < pages * KV_PAGE_TOKENS; i++)
		ret[i] = seed * 1000003u + i;
}

static void fill(struct kvc_pool *pool, u32 pfn, u32 seed)
{
	u32 *p = kvc_page_addr(pool, pfn);

	for (u32 i = 0; i < 1024; i++)
		p[i] = seed * 2654435761u + i;
}

static bool filled(struct kvc_pool *pool, u32 pfn, u32 seed)
{
	const u32 *p = kvc_page_addr(pool, pfn);

	for (u32 i = 0; p && i < 1024; i++)
		if (p[i] != seed * 2654435761u + i)
			return false;
	return p != NULL;
}

/* Does a step still find the page to be the one it was given? */
static bool passes(struct kvc *c, struct kvc_pool *pool, struct kv_grant g)
{
	struct kv_row row = kv_row_make(g.pfn, g.tag, 0, 7, 0);
	struct kvc_check_request q = {
		.rows = &row, .nonce = 7, .nr_rows = 1, .length = 1};
	struct kvc_step *step;
	struct kv_verdict v;
	bool ok;

	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	ok = kv_verdict_ok(v, kvc_step_number(step), 1);
	kvc_step_retire(step);
	return ok;
}

static int seal(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr, u32 seed)
{
	u32 tokens[8 * KV_PAGE_TOKENS], crc[8] = {0};
	struct kv_seal_ret rets[8];
	struct kvc_seal s = {.size_bytes = sizeof(s),
			     .nr_pages = nr,
			     .pages = pages,
			     .crc32c = crc,
			     .tokens = tokens,
			     .ret_seals = rets};

	tokens_of(seed, tokens, nr);
	return kvc_seal(pool, &s);
}

static u32 lookup(struct kvc_pool *pool, u32 nr, u32 seed, struct kv_hit *hits)
{
	u32 tokens[8 * KV_PAGE_TOKENS], found = 0;
	int r;

	tokens_of(seed, tokens, nr);
	r = kvc_lookup(pool, tokens, nr * KV_PAGE_TOKENS, nr, hits, &found);
	if (r && r != KV_MISS)
		KVT_FAIL("kvc_lookup: %d %s", r, kvc_strerror(NULL));
	return r ? 0 : found;
}

/* Wait until @nr pages are found, and let them go again. */
static void wait_findable(struct kvc_pool *pool, u32 nr, u32 seed)
{
	struct kv_hit hits[8];
	u32 got = 0;

	for (u32 i = 0; i < 1000 && got != nr; i++) {
		got = lookup(pool, nr, seed, hits);
		for (u32 k = 0; k < got; k++)
			KVT_EXPECT_EQ(kvc_unpin(pool, &hits[k].grant, 1), 0);
		if (got != nr)
			usleep(1000);
	}
	KVT_EXPECT_EQ(got, nr);
}

/* ---------------------------------------------------------------------- what stays */

KVT_TEST(leases_bytes_and_prefixes_survive)
{
	struct kv_grant pages[16], one[3];
	struct kvc_pool *p1, *p2;
	struct kv_hit hits[8];
	struct kv_stat before, after;
	struct kvc_info was, is;
	struct kvc *c1, *c2;

	start();
	c1 = ipc_connect(&kvmd);
	c2 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	p2 = ipc_pool(c2);
	KVT_EXPECT_EQ(kvc_alloc(p1, 16, KV_GFP_NOWAIT, pages), 0);
	for (u32 i = 0; i < 3; i++) /* the first is from kvmd, then from a magazine */
		KVT_EXPECT_EQ(kvc_alloc(p1, 1, KV_GFP_NOWAIT, &one[i]), 0);
	for (u32 i = 0; i < 16; i++)
		fill(p1, pages[i].pfn, i);
	KVT_EXPECT_EQ(seal(p1, pages, 8, 5), 0);
	wait_findable(p2, 8, 5);
	KVT_EXPECT_EQ(lookup(p2, 8, 5, hits), 8);
	kvc_info(c1, &was);
	before = stat_of(p1);
	for (u32 round = 0; round < 3; round++) {
		kill_kvmd();
		/* with nobody there a magazine still gives pages and steps go on */
		KVT_EXPECT(passes(c1, p1, pages[0]));
		again();
		after = stat_of(p1);
		kvc_info(c1, &is);
		KVT_EXPECT_EQ(is.client_id, was.client_id);
		KVT_EXPECT_EQ(is.session, was.session);
		KVT_EXPECT(is.table_epoch != was.table_epoch);
		/* pops are noticed by the way, so a popped page counts as either */
		KVT_EXPECT_EQ(after.nr_active + after.nr_magazine,
			      before.nr_active + before.nr_magazine);
		KVT_EXPECT_EQ(after.nr_sealed, before.nr_sealed);
		KVT_EXPECT_EQ(after.nr_pages, before.nr_pages);
		KVT_EXPECT_EQ(after.tenant_used_bytes, before.tenant_used_bytes);
		for (u32 i = 0; i < 16; i++) {
			KVT_EXPECT(filled(p1, pages[i].pfn, i));
			KVT_EXPECT(passes(c1, p1, pages[i]));
			KVT_EXPECT(i >= 8 || filled(p2, hits[i].grant.pfn, i));
		}
		KVT_EXPECT(passes(c2, p2, hits[7].grant));
		KVT_EXPECT_EQ(lookup(p2, 8, 5, hits), 8);
	}
	KVT_EXPECT_EQ(kvc_free(p1, pages, 16), 0);
	KVT_EXPECT_EQ(kvc_free(p1, one, 3), 0);
	KVT_EXPECT_EQ(kvc_flush(c1), 0);
	for (u32 i = 0; i < 8; i++)
		for (u32 k = 0; k < 4; k++)
			KVT_EXPECT_EQ(kvc_unpin(p2, &hits[i].grant, 1), 0);
	KVT_EXPECT_EQ(kvc_flush(c2), 0);
	after = stat_of(p1);
	KVT_EXPECT_EQ(after.nr_active, 0);
	KVT_EXPECT_EQ(after.nr_sealed, 0);
	KVT_EXPECT_EQ(after.nr_cached, 8);
	kvc_close(c1);
	kvc_close(c2);
	ipc_stop(&kvmd);
}

/* P7: a killed page waits for the steps that may use it, also under the next kvmd. */
KVT_TEST(quarantine_waits_for_a_step_of_before)
{
	struct kv_grant pages[4], more[64];
	char request[160];
	struct kvc_step *step;
	struct kvc_pool *p1;
	struct kvc *c1;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	for (u32 i = 0; i < 12; i++) { /* epochs go by */
		KVT_EXPECT_EQ(kvc_alloc(p1, 64, KV_GFP_PREFILL, more), 0);
		KVT_EXPECT_EQ(kvc_free(p1, more, 64), 0);
		KVT_EXPECT_EQ(kvc_flush(c1), 0);
	}
	KVT_EXPECT_EQ(kvc_alloc(p1, 4, KV_GFP_PREFILL, pages), 0);
	expect_within(stat_of(p1).nr_quarantine == 0, 1000);
	KVT_EXPECT_EQ(kvc_step_begin(c1, &step), 0);
	kvc_step_launched(step);
	snprintf(request, sizeof(request),
		 "{\"op\":\"evict\",\"target\":\"page\",\"pool\":1,\"pfn\":%u,"
		 "\"revoke\":true}",
		 pages[2].pfn);
	free(ipc_admin(&kvmd, request));
	KVT_EXPECT_EQ(stat_of(p1).nr_quarantine, 1);
	for (u32 round = 0; round < 2; round++) {
		kill_kvmd();
		again();
		usleep(50000);
		KVT_EXPECT_EQ(stat_of(p1).nr_quarantine, 1);
		KVT_EXPECT_EQ(stat_of(p1).nr_active, 3);
	}
	kvc_step_retire(step);
	expect_within(stat_of(p1).nr_quarantine == 0, 1000);
	KVT_EXPECT(!passes(c1, p1, pages[2]));
	KVT_EXPECT(passes(c1, p1, pages[1]));
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* P8: who died while nobody was there is ended by the next kvmd. */
static int dying_client(void *arg)
{
	struct kv_grant pages[32];
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);
	struct kvc_step *step;
	int *fds = arg;

	if (kvc_alloc(pool, 32, KV_GFP_NOWAIT, pages) || kvc_step_begin(c, &step))
		return 2;
	kvc_step_launched(step);
	if (write(fds[1], "x", 1) != 1)
		return 3;
	for (;;)
		pause();
}

KVT_TEST(sessions_that_died_meanwhile_are_reaped)
{
	struct kvc_pool *p1;
	struct kvc *c1;
	int fds[2];
	char byte;
	pid_t pid;

	start();
	KVT_EXPECT_EQ(pipe(fds), 0);
	pid = ipc_child(dying_client, fds);
	KVT_EXPECT_EQ(read(fds[0], &byte, 1), 1);
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 32);
	kill_kvmd();
	kill(pid, SIGKILL);
	ipc_wait(pid);
	again();
	expect_within(stat_of(p1).nr_active == 0 && stat_of(p1).nr_quarantine == 0, 1000);
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* ------------------------------------------------------------- cookies and old rings */

struct thief {
	u8 cookie[KV_COOKIE_BYTES];
	u64 client_id;
};

static u64 hello_with(struct ipc_raw *raw, const u8 *cookie, bool *ret_resumed)
{
	struct kv_msg_hello hello = raw_hello_msg();

	memcpy(hello.cookie, cookie, sizeof(hello.cookie));
	raw->sock = raw_connect(&kvmd);
	raw_send(raw, &hello, sizeof(hello), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(raw, 5000), KV_MSG_HELLO_REPLY);
	KVT_EXPECT_EQ(raw->in.hello.result, 0);
	*ret_resumed = raw->in.hello.flags & KV_HELLO_RESUMED;
	return raw->in.hello.client_id;
}

static int steal(void *arg)
{
	const struct thief *t = arg;
	static struct ipc_raw raw;
	bool resumed;
	u64 id = hello_with(&raw, t->cookie, &resumed);

	return resumed || id == t->client_id;
}

KVT_TEST(cookie_of_another_process_is_refused)
{
	static struct ipc_raw raw, late;
	struct thief t;
	bool resumed;

	start();
	raw_open(&raw, &kvmd);
	/* raw_open() has read POOL_REPLY over it: ask for one more session */
	t.client_id = hello_with(&raw, (const u8 *)"0123456789abcdef", &resumed);
	KVT_EXPECT(!resumed); /* a cookie that nobody has */
	memcpy(t.cookie, raw.in.hello.cookie, sizeof(t.cookie));
	/* as long as kvmd lives, a session is its connection's */
	hello_with(&late, t.cookie, &resumed);
	KVT_EXPECT(!resumed);
	kill_kvmd();
	again();
	KVT_EXPECT_EQ(ipc_wait(ipc_child(steal, &t)), 0);
	KVT_EXPECT_EQ(hello_with(&late, t.cookie, &resumed), t.client_id);
	KVT_EXPECT(resumed);
	KVT_EXPECT(hello_with(&late, t.cookie, &resumed) != t.client_id);
	KVT_EXPECT(!resumed); /* once */
	ipc_stop(&kvmd);
}

/* cases O32, O56: what lies in a ring of before is never executed. */
KVT_TEST(o32_o56_old_rings_have_no_effect)
{
	static struct ipc_raw raw;
	struct kv_grant *grants;
	struct kv_page_ref *ref;
	struct kvc_pool *p1;
	struct kv_sqe sqe;
	struct kv_cqe cqe;
	struct kvc *c1;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	raw_open(&raw, &kvmd);
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 4;
	sqe.ret_off = 4096;
	sqe.ret_bytes = 4 * sizeof(struct kv_grant);
	KVT_EXPECT_EQ(raw_call(&raw, sqe).result, 0);
	grants = raw_arg(&raw, 4096);
	ref = raw_arg(&raw, 0);
	*ref = (struct kv_page_ref){.pfn = grants[1].pfn, .tag = grants[1].tag};
	kill(kvmd.pid, SIGSTOP);
	sqe = raw_sqe(&raw, KV_OP_FREE);
	sqe.nr = 1;
	sqe.arg_bytes = sizeof(*ref);
	raw_push(&raw, sqe); /* submitted, not served */
	kill_kvmd();
	again();
	raw_push(&raw, sqe);
	raw_kick(&raw);
	usleep(50000);
	KVT_EXPECT(raw_pop(&raw, &cqe, 50) != 0);
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 4);
	raw_close(&raw);
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* -------------------------------------------------------------------------- damage */

/* Map kvmd's page records, as somebody who can flip bits in them. */
static u8 *records_map(const char *name, size_t *ret_bytes)
{
	char path[64], link[128];
	u8 *map = NULL;

	for (int i = 0; i < 256 && !map; i++) {
		struct stat st;
		ssize_t n;
		int fd;

		snprintf(path, sizeof(path), "/proc/%d/fd/%d", kvmd.pid, i);
		n = readlink(path, link, sizeof(link) - 1);
		if (n < 0)
			continue;
		link[n] = 0;
		if (!strstr(link, name))
			continue;
		fd = open(path, O_RDWR);
		KVT_EXPECT(fd >= 0 && !fstat(fd, &st));
		map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED,
			   fd, 0);
		*ret_bytes = (size_t)st.st_size;
		close(fd);
	}
	KVT_EXPECT(map && map != MAP_FAILED);
	return map;
}

KVT_TEST(damaged_records_cost_their_pages_and_are_counted)
{
	struct kv_grant pages[24];
	struct kvc_pool *p1;
	struct kv_hit hits[8];
	struct kv_stat s;
	size_t bytes;
	struct kvc *c1;
	char *status;
	u8 *map;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 24, KV_GFP_NOWAIT, pages), 0);
	for (u32 i = 0; i < 24; i++)
		fill(p1, pages[i].pfn, i);
	KVT_EXPECT_EQ(seal(p1, pages, 8, 9), 0);
	wait_findable(p1, 8, 9);
	map = records_map("kvmd-frames", &bytes);
	kill_kvmd();
	/* one bit each, anywhere in what the check word covers, in five records */
	for (u32 i = 6; i < 11; i++) {
		u32 bit = kvt_rand_below(512);

		map[KVD_FRAMES_OFF + pages[i].pfn * sizeof(struct kvd_frame) + bit / 8] ^=
			(u8)(1u << (bit % 8));
	}
	munmap(map, bytes);
	again();
	s = stat_of(p1);
	KVT_EXPECT(log_has("damage 5 (5 poisoned)"));
	status = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	KVT_EXPECT(strstr(status, "ADOPT_DAMAGE") != NULL);
	free(status);
	KVT_EXPECT_EQ(s.nr_active, 24 - 8 - 3);
	KVT_EXPECT_EQ(s.nr_sealed, 6);
	for (u32 i = 0; i < 24; i++)
		KVT_EXPECT_EQ(passes(c1, p1, pages[i]), i < 6 || i >= 11);
	KVT_EXPECT_EQ(lookup(p1, 8, 9, hits), 6); /* a miss from there on */
	KVT_EXPECT_EQ(kvc_alloc(p1, 5, KV_GFP_NOWAIT, pages + 6), 0);
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* A reference count that fits no record: the page is taken from its holders. */
KVT_TEST(damaged_leases_cost_the_page)
{
	struct kv_grant pages[8];
	struct kvc_pool *p1;
	size_t bytes;
	struct kvc *c1;
	u16 *refs;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	refs = (u16 *)records_map("kvmd-leases", &bytes);
	kill_kvmd();
	refs[pages[1].pfn] ^= 1u << kvt_rand_below(16);
	refs[pages[2].pfn + 100] ^= 1u; /* a page that nobody has */
	again();
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 7);
	KVT_EXPECT(log_has("damage 2 (0 poisoned)") || log_has("damage 1 (0 poisoned)"));
	for (u32 i = 0; i < 8; i++)
		KVT_EXPECT_EQ(passes(c1, p1, pages[i]), i != 1);
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* A pool whose head is damaged starts empty, and its memory is not the old one's. */
KVT_TEST(damaged_head_costs_the_pool)
{
	struct kv_grant pages[8], other[8];
	struct kvc_pool *p1, *p2;
	struct kvc *c1, *c2;
	size_t bytes;
	u8 *map;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	fill(p1, pages[0].pfn, 1);
	map = records_map("kvmd-frames", &bytes);
	kill_kvmd();
	map[16] ^= 4;
	again();
	/* another one comes first: the new pool has an extent when the old client is back */
	c2 = ipc_connect(&kvmd);
	p2 = ipc_pool(c2);
	KVT_EXPECT_EQ(kvc_alloc(p2, 1, KV_GFP_NOWAIT, other), 0);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, other), 0);
	KVT_EXPECT(!passes(c1, p1, pages[0]));
	KVT_EXPECT(log_has("damage 1 "));
	/* what one writes into the new pool, another one reads there */
	for (u32 i = 0; i < 8; i++)
		fill(p1, other[i].pfn, 40 + i);
	KVT_EXPECT_EQ(seal(p1, other, 8, 3), 0);
	wait_findable(p2, 8, 3);
	for (u32 i = 0; i < 8; i++)
		KVT_EXPECT(filled(p2, other[i].pfn, 40 + i));
	kvc_close(c1);
	kvc_close(c2);
	ipc_stop(&kvmd);
}

/* A session's entry that is damaged: that session is over, the others go on. */
KVT_TEST(damaged_session_costs_the_session)
{
	struct kv_grant mine[8], theirs[8];
	struct kvd_image *image;
	struct kvc_pool *p1, *p2;
	struct kvc *c1, *c2;
	size_t bytes;

	start();
	c1 = ipc_connect(&kvmd);
	c2 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	p2 = ipc_pool(c2);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, mine), 0);
	KVT_EXPECT_EQ(kvc_alloc(p2, 8, KV_GFP_NOWAIT, theirs), 0);
	image = (struct kvd_image *)records_map("kvmd-image", &bytes);
	kill_kvmd();
	image->sessions[0].cookie[kvt_rand_below(16)] ^= 1;
	again();
	expect_within(stat_of(p2).nr_active == 8 && !stat_of(p2).nr_quarantine, 1000);
	KVT_EXPECT(passes(c2, p2, theirs[7]));
	stat_of(p1);
	KVT_EXPECT(!passes(c1, p1, mine[7]));
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, mine), 0);
	KVT_EXPECT(passes(c1, p1, mine[7]));
	kvc_close(c1);
	kvc_close(c2);
	ipc_stop(&kvmd);
}

/* Tokens have no check word: one that is wrong fits no key. */
KVT_TEST(damaged_tokens_are_a_miss)
{
	struct kv_grant pages[8];
	struct kvc_pool *p1;
	struct kv_hit hits[8];
	size_t bytes;
	struct kvc *c1;
	u32 *tokens;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(seal(p1, pages, 8, 9), 0);
	wait_findable(p1, 8, 9);
	tokens = (u32 *)records_map("kvmd-tokens", &bytes);
	kill_kvmd();
	tokens[pages[3].pfn * KV_PAGE_TOKENS + 17] ^= 1u << 5;
	again();
	KVT_EXPECT_EQ(lookup(p1, 8, 9, hits), 3);
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* ------------------------------------------------------------------------- the keeper */

KVT_TEST(killed_keeper_is_replaced_and_refilled)
{
	struct kv_grant pages[8];
	struct kvc_pool *p1;
	struct kvc *c1;
	pid_t keeper;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	fill(p1, pages[5].pfn, 5);
	keeper = keeper_pid();
	KVT_EXPECT(keeper > 0);
	kill(keeper, SIGKILL);
	expect_within(log_has("a new one holds everything"), 2000);
	KVT_EXPECT(keeper_pid() > 0 && keeper_pid() != keeper);
	kill_kvmd();
	again();
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 8);
	KVT_EXPECT(passes(c1, p1, pages[5]) && filled(p1, pages[5].pfn, 5));
	kvc_close(c1);
	ipc_stop(&kvmd);
	for (int i = 0; i < 1000 && keeper_pid(); i++)
		usleep(1000);
	KVT_EXPECT_EQ(keeper_pid(), 0); /* a kvmd that ends takes its keeper along */
}

KVT_TEST(both_killed_is_a_cold_start)
{
	struct kv_grant pages[8], other[8];
	struct kvc_pool *p1;
	struct kvc *c1;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	kill(kvmd.pid, SIGSTOP);
	kill(keeper_pid(), SIGKILL);
	kill_kvmd();
	again();
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, other), 0);
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 8);
	KVT_EXPECT(!passes(c1, p1, pages[0]));
	KVT_EXPECT(passes(c1, p1, other[0]));
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* kvmctl upgrade: the same process executes the program again. */
KVT_TEST(upgrade_keeps_everything)
{
	struct kv_grant pages[8];
	struct kvc_info was, is;
	struct kvc_pool *p1;
	struct kvc *c1;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	fill(p1, pages[5].pfn, 5);
	kvc_info(c1, &was);
	free(ipc_admin(&kvmd, "{\"op\":\"upgrade\"}"));
	expect_within(log_has("adopted 1 pools"), 2000);
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 8);
	kvc_info(c1, &is);
	KVT_EXPECT(is.session == was.session && is.table_epoch != was.table_epoch);
	KVT_EXPECT(passes(c1, p1, pages[5]) && filled(p1, pages[5].pfn, 5));
	KVT_EXPECT_EQ(waitpid(kvmd.pid, NULL, WNOHANG), 0);
	kvc_close(c1);
	ipc_stop(&kvmd);
}

KVT_TEST(second_daemon_in_the_same_directory_is_refused)
{
	char path[1200];
	pid_t pid;

	start();
	ipc_build_path("kvmd", path, sizeof(path));
	pid = fork();
	if (pid == 0) {
		int null = open("/dev/null", O_WRONLY);

		dup2(null, 2);
		execl(path, path, "--private", kvmd.dir, "--keeper", NULL);
		_exit(127);
	}
	KVT_EXPECT_EQ(ipc_wait(pid), 1);
	ipc_stop(&kvmd);
}

/* --------------------------------------------------------------------- crash points */

/* Starts a new kvmd whenever one has died. Its thread must live as long as they do:
 * --die-with-parent means the thread that forked. */
static struct {
	pthread_t thread;
	bool stop;
	u32 deaths;
	const char *next_faults; /* of the next start: it may die while it adopts */
} super;

static void *supervise(void *arg)
{
	while (!__atomic_load_n(&super.stop, __ATOMIC_ACQUIRE)) {
		const char *faults;

		if (waitpid(kvmd.pid, NULL, WNOHANG) != kvmd.pid) {
			usleep(200);
			continue;
		}
		__atomic_add_fetch(&super.deaths, 1, __ATOMIC_RELEASE);
		faults = __atomic_exchange_n(&super.next_faults, NULL, __ATOMIC_ACQ_REL);
		again_with(faults ? faults : "crash=0");
	}
	return NULL;
}

struct model {
	struct kvc *c;
	struct kvc_pool *pool;
	struct kv_grant held[80];
	u32 seeds[80];
	u32 nr;
};

static void model_check(struct model *m)
{
	for (u32 i = 0; i < m->nr; i++) {
		if (!filled(m->pool, m->held[i].pfn, m->seeds[i]))
			KVT_FAIL("page %u of %u: wrong bytes", i, m->nr);
		if (!passes(m->c, m->pool, m->held[i]))
			KVT_FAIL("page %u of %u is not ours any more", i, m->nr);
	}
}

static void model_alloc(struct model *m, u32 nr, u32 seed)
{
	struct kv_grant *g = m->held + m->nr;

	KVT_EXPECT_EQ(kvc_alloc(m->pool, nr, KV_GFP_PREFILL, g), 0);
	for (u32 i = 0; i < nr; i++) {
		m->seeds[m->nr] = seed + i;
		fill(m->pool, g[i].pfn, seed + i);
		m->nr++;
	}
}

/* kvmd may die anywhere in it; every call must succeed all the same. */
static void workload(struct model *a, struct model *b, u32 round)
{
	struct kv_hit hits[8];
	struct kvc_pool *extra;
	struct kv_grant fork_of;
	u32 seed = 1000 + round * 10, got;

	model_alloc(a, 12, 1);
	model_alloc(b, 1, 100);
	model_alloc(b, 1, 101);
	KVT_EXPECT_EQ(seal(a->pool, a->held, 6, seed), 0);
	got = lookup(b->pool, 6, seed, hits);
	for (u32 i = 0; i < got; i++) {
		KVT_EXPECT(filled(b->pool, hits[i].grant.pfn, 1 + i));
		KVT_EXPECT(passes(b->c, b->pool, hits[i].grant));
	}
	KVT_EXPECT_EQ(kvc_pin(a->pool, a->held + 8, 2), 0);
	KVT_EXPECT_EQ(kvc_fork(a->pool, a->held + 9, 1, KV_GFP_PREFILL, &fork_of), 0);
	KVT_EXPECT_EQ(kvc_free(a->pool, &fork_of, 1), 0);
	KVT_EXPECT_EQ(kvc_free(a->pool, a->held + 8, 2), 0);
	KVT_EXPECT_EQ(kvc_flush(a->c), 0);
	if (got)
		for (u32 i = 0; i < got; i++)
			KVT_EXPECT_EQ(kvc_unpin(b->pool, &hits[i].grant, 1), 0);
	KVT_EXPECT_EQ(kvc_flush(b->c), 0);
	extra = ipc_pool(b->c);
	kvc_pool_close(extra);
	model_check(a);
	model_check(b);
	KVT_EXPECT_EQ(kvc_free(a->pool, a->held, a->nr), 0);
	KVT_EXPECT_EQ(kvc_flush(a->c), 0);
	KVT_EXPECT_EQ(kvc_free(b->pool, b->held, b->nr), 0);
	KVT_EXPECT_EQ(kvc_flush(b->c), 0);
	a->nr = b->nr = 0;
}

/* As ipc_admin(), of a kvmd that may go while it answers. */
static char *ask(const char *request)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	char *ret = calloc(1, 1 << 16);
	ssize_t n = 0;

	strcpy(addr.sun_path, kvmd.admin_path);
	for (int i = 0; i < 1000 && n <= 0; i++) {
		int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

		if (!connect(sock, (void *)&addr, sizeof(addr)) &&
		    send(sock, request, strlen(request), MSG_NOSIGNAL) > 0)
			n = recv(sock, ret, (1 << 16) - 1, 0);
		close(sock);
		if (n <= 0)
			usleep(5000);
	}
	if (n <= 0)
		KVT_FAIL("admin socket: no reply to %s", request);
	ret[n] = 0;
	return ret;
}

static void arm(u64 n)
{
	char request[96];

	snprintf(request, sizeof(request), "{\"op\":\"fault\",\"spec\":\"crash=%llu\"}\n",
		 (unsigned long long)n);
	free(ask(request));
}

/* kvc_open() does not wait for a kvmd that goes while it says HELLO. */
static struct kvc *connect_patiently(void)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = kvmd.socket_path,
				  .client_name = "test"};
	struct kvc *c;
	int r = -1;

	for (int i = 0; i < 500 && r; i++) {
		r = kvc_open(&opt, &c);
		if (r)
			usleep(10000);
	}
	if (r)
		KVT_FAIL("kvc_open: %d %s", r, kvc_strerror(NULL));
	return c;
}

/* Return: it died. */
static bool crash_at(u64 n, u32 round, bool fresh)
{
	u32 before = super.deaths;
	struct model a = {0}, b = {0};
	struct kv_stat s;
	char *audit;

	if (!fresh)
		arm(n);
	a.c = connect_patiently();
	b.c = connect_patiently();
	a.pool = ipc_pool(a.c);
	b.pool = ipc_pool(b.c);
	workload(&a, &b, round);
	/* What a request that died with kvmd had got, its client gives back when it is
	 * attached again; both are, after this. */
	stat_of(b.pool);
	stat_of(a.pool);
	stat_of(b.pool);
	/* A session that was closed while kvmd was away is seen within a second. */
	for (int i = 0; i < 3000; i++) {
		s = stat_of(a.pool);
		if (!s.nr_active && !s.nr_sealed)
			break;
		usleep(1000);
	}
	if (s.nr_active || s.nr_sealed) {
		ipc_show_log(&kvmd);
		printf("# %s\n", ask("{\"op\":\"pages\",\"pool\":1}\n"));
		printf("# %s\n", ask("{\"op\":\"ps\"}\n"));
		KVT_FAIL("crash point %llu: %u active, %u sealed left",
			 (unsigned long long)n, s.nr_active, s.nr_sealed);
	}
	kvc_close(a.c);
	kvc_close(b.c);
	arm(0);
	audit = ask("{\"op\":\"audit\"}\n");
	if (!strstr(audit, "\"damage\":0")) {
		ipc_show_log(&kvmd);
		KVT_FAIL("crash point %llu: %s", (unsigned long long)n, audit);
	}
	free(audit);
	return __atomic_load_n(&super.deaths, __ATOMIC_ACQUIRE) != before;
}

KVT_TEST_T(killed_at_any_store, 600)
{
	const char *all = getenv("KVT_LONG");
	u32 died = 0, run = 0, nested = 0;
	char faults[32];
	u64 n = 1;

	start();
	pthread_create(&super.thread, NULL, supervise, NULL);
	for (;; run++) {
		if (run % 3 == 2) { /* the one that takes over dies as well */
			snprintf(faults, sizeof(faults), "crash=%u",
				 1 + kvt_rand_below(400));
			__atomic_store_n(&super.next_faults, faults, __ATOMIC_RELEASE);
			nested++;
		}
		if (!crash_at(n, run, false))
			break;
		died++;
		__atomic_store_n(&super.next_faults, NULL, __ATOMIC_RELEASE);
		n += all ? 1 : 1 + kvt_rand_below(20);
	}
	KVT_NOTE("%llu crash points, %u run, %u deaths, %u of them twice",
		 (unsigned long long)n, run, died, nested);
	KVT_EXPECT(died > 20 && !log_has("damage 1") && !log_has("assert"));
	__atomic_store_n(&super.stop, true, __ATOMIC_RELEASE);
	pthread_join(super.thread, NULL);
	eng_private_kvmd_stop(&kvmd);
}

/* ---------------------------------------------------------------------------- time */

static int cmp_ms(const void *a, const void *b)
{
	const double *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

#define PAGES	 100000u
#define RESTARTS 50u

/* Restart to serving with 100,000 pages: most cached prefixes, some held. */
KVT_TEST_T(restart_to_serving_is_short, 300)
{
	struct kv_layout layout = {.format_version = KV_LAYOUT_VERSION,
				   .kind = KV_LAYOUT_GQA,
				   .dtype = KV_DTYPE_E4M3,
				   .scale_kind = KV_SCALE_STATIC,
				   .page_tokens = KV_PAGE_TOKENS,
				   .nr_layers = 1,
				   .nr_kv_heads = 1,
				   .head_dim = 64,
				   .nr_scales = 2};
	static struct kv_grant pages[PAGES];
	float scales[2] = {1, 1};
	double ms[RESTARTS];
	struct kvc_pool *pool;
	struct kvc *c;

	host_bytes = "832MiB";
	start();
	c = ipc_connect(&kvmd);
	KVT_EXPECT_EQ(kvc_pool_open(c, &layout, scales, NULL, &pool), 0);
	for (u32 i = 0; i < PAGES; i += 4000) {
		int r = kvc_alloc(pool, 4000, KV_GFP_PREFILL, pages + i);

		if (r == KV_FULL)
			KVT_SKIP("no memory for %u pages", PAGES);
		if (r)
			KVT_FAIL("page %u: %d %s", i, r, kvc_strerror(c));
	}
	for (u32 i = 0; i < PAGES * 3 / 4; i += 8)
		KVT_EXPECT_EQ(seal(pool, pages + i, 8, i), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, PAGES / 2), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_NOTE("pages %u, cached %u, sealed %u, active %u", stat_of(pool).nr_pages,
		 stat_of(pool).nr_cached, stat_of(pool).nr_sealed,
		 stat_of(pool).nr_active);
	for (u32 i = 0; i < RESTARTS; i++) {
		u64 start_ns;

		kill_kvmd();
		start_ns = kv_now_ns();
		again();
		ms[i] = (double)(kv_now_ns() - start_ns) * 1e-6;
		KVT_EXPECT_EQ(stat_of(pool).nr_active, PAGES / 4);
		if (getenv("KVT_SHOW") && i == RESTARTS - 1)
			ipc_show_log(&kvmd);
	}
	qsort(ms, RESTARTS, sizeof(*ms), cmp_ms);
	KVT_NOTE("restart to serving, %u pages, %u restarts: p50 %.1f ms, p99 %.1f ms",
		 PAGES, RESTARTS, ms[RESTARTS / 2], ms[RESTARTS * 99 / 100]);
	KVT_EXPECT_LE(ms[RESTARTS / 2], 1000);
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_MAIN()
