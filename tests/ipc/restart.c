/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd dies by kill -9 under its clients, and the next one takes up what the keeper
 * holds: leases, bytes, prefixes, quarantine (design 5 P7, design 9; cases O32, O56).
 */
#include "tests/ipc/restart.h"

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
		KVT_EXPECT(ipc_passes(c1, p1, pages[0]));
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
			KVT_EXPECT(ipc_passes(c1, p1, pages[i]));
			KVT_EXPECT(i >= 8 || filled(p2, hits[i].grant.pfn, i));
		}
		KVT_EXPECT(ipc_passes(c2, p2, hits[7].grant));
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
	KVT_EXPECT(!ipc_passes(c1, p1, pages[2]));
	KVT_EXPECT(ipc_passes(c1, p1, pages[1]));
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
	pid = ipc_child_with(dying_client, fds, sizeof(fds));
	KVT_EXPECT_EQ(read(fds[0], &byte, 1), 1);
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 32);
	kill_kvmd();
	kill(pid, SIGKILL);
	ipc_wait(pid);
	again();
	/* It was in a step. On a GPU its end is proven if the kvmd before saw it in NVML's list
	 * (ipc/cuda_orphan), which it may have had no time for. */
	expect_within(stat_of(p1).nr_active == 0 &&
			      (stat_of(p1).nr_quarantine == 0 ||
			       (ipc_on_cuda() && stat_of(p1).nr_quarantine == 32)),
		      1000);
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
	KVT_EXPECT_EQ(ipc_wait(ipc_child_with(steal, &t, sizeof(t))), 0);
	KVT_EXPECT_EQ(hello_with(&late, t.cookie, &resumed), t.client_id);
	KVT_EXPECT(resumed);
	KVT_EXPECT(hello_with(&late, t.cookie, &resumed) != t.client_id);
	KVT_EXPECT(!resumed); /* once */
	ipc_stop(&kvmd);
}

/* ---------------------------------------------------------- a resume that takes too long */

static bool answers(struct kvc_pool *pool)
{
	struct kv_stat st;
	int r = kvc_stat(pool, &st);

	KVT_EXPECT(!r || r == -ETIMEDOUT);
	return !r;
}

/* The deadline of a call passes while kvmd is slow to take the session up: the call is lost,
 * the session is not. */
KVT_TEST(a_deadline_in_a_resume_costs_no_session)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = kvmd.socket_path,
				  .client_name = "test",
				  .timeout_ms = 1500};
	struct kv_grant pages[8];
	struct kvc_info was, is;
	struct kvc_pool *pool;
	struct kvc *c;

	start();
	if (ipc_on_cuda())
		ipc_gpu_context(0);
	KVT_EXPECT_EQ(kvc_open(&opt, &c), 0);
	pool = ipc_pool(c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 8, KV_GFP_NOWAIT, pages), 0);
	fill(pool, pages[5].pfn, 5);
	kvc_info(c, &was);
	for (u32 round = 0; round < 2; round++) {
		kill_kvmd();
		again();
		kill(kvmd.pid, SIGSTOP);
		for (u32 i = 0; i <= round; i++)
			KVT_EXPECT(!answers(pool));
		kill(kvmd.pid, SIGCONT);
		expect_within(answers(pool), 100);
		kvc_info(c, &is);
		KVT_EXPECT_EQ(is.client_id, was.client_id);
		KVT_EXPECT_EQ(is.session, was.session);
		KVT_EXPECT(ipc_passes(c, pool, pages[5]) &&
			   filled(pool, pages[5].pfn, 5));
	}
	kvc_close(c);
	ipc_stop(&kvmd);
}

/* It has its session again, uses it, and then hangs up. */
static int hangs_up(void *arg)
{
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);
	struct kv_grant pages[32];
	int *fds = arg, type;
	char byte;

	if (kvc_alloc(pool, 32, KV_GFP_NOWAIT, pages) || write(fds[1], "x", 1) != 1 ||
	    read(fds[2], &byte, 1) != 1 || stat_of(pool).nr_active != 32)
		return 2;
	for (int fd = 3; fd < 256; fd++) {
		socklen_t len = sizeof(type);

		if (!getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) &&
		    type == SOCK_SEQPACKET)
			shutdown(fd, SHUT_RDWR);
	}
	for (;;)
		pause();
}

KVT_TEST(a_hang_up_after_a_resume_is_the_end)
{
	struct kvc_pool *pool;
	struct kvc *c;
	int fds[4];
	char byte;
	pid_t pid;

	start();
	KVT_EXPECT(!pipe(fds) && !pipe(fds + 2));
	pid = ipc_child_with(hangs_up, fds, sizeof(fds));
	KVT_EXPECT_EQ(read(fds[0], &byte, 1), 1);
	kill_kvmd();
	again();
	KVT_EXPECT_EQ(write(fds[3], "x", 1), 1);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	expect_within(stat_of(pool).nr_active == 0, 1000);
	KVT_EXPECT(!kill(pid, SIGKILL));
	KVT_EXPECT_EQ(ipc_wait(pid), 128 + SIGKILL); /* it lived, and had all it held */
	kvc_close(c);
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
	u64 epoch;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	raw_open(&raw, &kvmd);
	epoch = kv_load_acquire64(&raw.session->table_epoch.word);
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
	/* who is mapped still sees that its tables are of before */
	KVT_EXPECT(kv_load_acquire64(&raw.session->table_epoch.word) != epoch);
	raw_push(&raw, sqe);
	raw_kick(&raw);
	usleep(50000);
	KVT_EXPECT(raw_pop(&raw, &cqe, 50) != 0);
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 4);
	raw_close(&raw);
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* cases O32: no memory has a name; a file of somebody else's where the socket was is not
 * kvmd's to remove. */
KVT_TEST(o32_foreign_file_is_left_alone)
{
	char path[1200], line[64] = "";
	int status, fd;
	pid_t pid;

	start();
	kill(ipc_keeper_pid(), SIGKILL);
	kill_kvmd();
	KVT_EXPECT(!unlink(kvmd.socket_path));
	fd = open(kvmd.socket_path, O_CREAT | O_EXCL | O_RDWR, 0600);
	KVT_EXPECT(fd >= 0 && write(fd, "not yours", 9) == 9);
	close(fd);
	ipc_build_path("kvmd", path, sizeof(path));
	pid = fork();
	if (!pid) {
		int log = open(kvmd.log_path, O_WRONLY | O_APPEND | O_CREAT, 0600);

		dup2(log, 1);
		dup2(log, 2);
		alarm(20);
		execl(path, path, "--private", kvmd.dir, "--die-with-parent", "--backend",
		      "host", "--host-bytes", host_bytes, NULL);
		_exit(127);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT(WIFEXITED(status) && WEXITSTATUS(status));
	KVT_EXPECT(log_has("exists and is no socket"));
	fd = open(kvmd.socket_path, O_RDONLY);
	KVT_EXPECT(fd >= 0 && read(fd, line, sizeof(line)) == 9);
	KVT_EXPECT_STR(line, "not yours");
	close(fd);
	KVT_EXPECT(!unlink(kvmd.socket_path));
	again();
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
	keeper = ipc_keeper_pid();
	KVT_EXPECT(keeper > 0);
	kill(keeper, SIGKILL);
	expect_within(log_has("a new one holds everything"), 2000);
	KVT_EXPECT(ipc_keeper_pid() > 0 && ipc_keeper_pid() != keeper);
	kill_kvmd();
	again();
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 8);
	KVT_EXPECT(ipc_passes(c1, p1, pages[5]) && filled(p1, pages[5].pfn, 5));
	kvc_close(c1);
	ipc_stop(&kvmd);
	for (int i = 0; i < 1000 && ipc_keeper_pid(); i++)
		usleep(1000);
	KVT_EXPECT_EQ(ipc_keeper_pid(), 0); /* a kvmd that ends takes its keeper along */
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
	kill(ipc_keeper_pid(), SIGKILL);
	kill_kvmd();
	again();
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, other), 0);
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 8);
	KVT_EXPECT(!ipc_passes(c1, p1, pages[0]));
	KVT_EXPECT(ipc_passes(c1, p1, other[0]));
	kvc_close(c1);
	ipc_stop(&kvmd);
}

static u32 nr_kept, nr_lost;

static void count_epochs(void *arg, const struct kvc_event *event)
{
	nr_kept += event->type == KV_MSG_EPOCH && event->nr;
	nr_lost += event->type == KV_MSG_EPOCH && !event->nr;
}

/* A stop ends the keeper, so a stop and a start (systemctl restart) keep nothing, as
 * docs/operations.md warns; the engine is told so. */
KVT_TEST(a_stop_and_a_start_keep_nothing)
{
	struct kv_grant pages[8];
	struct kvc_pool *p1;
	struct kvc *c1;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	kill(kvmd.pid, SIGTERM);
	waitpid(kvmd.pid, NULL, 0);
	for (int i = 0; i < 5000 && ipc_keeper_pid(); i++)
		usleep(1000);
	KVT_EXPECT_EQ(ipc_keeper_pid(), 0);
	again();
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 0);
	KVT_EXPECT(!ipc_passes(c1, p1, pages[0]));
	KVT_EXPECT(kvc_dispatch(c1, count_epochs, NULL) > 0);
	KVT_EXPECT_EQ(nr_kept, 0);
	KVT_EXPECT_EQ(nr_lost, 1);
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
	free(ipc_admin(&kvmd, "{\"op\":\"upgrade\",\"dry_run\":true}"));
	usleep(100000);
	KVT_EXPECT(!log_has("adopted 1 pools")); /* it only said so */
	free(ipc_admin(&kvmd, "{\"op\":\"upgrade\"}"));
	expect_within(log_has("adopted 1 pools"), 2000);
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 8);
	kvc_info(c1, &is);
	KVT_EXPECT(is.session == was.session && is.table_epoch != was.table_epoch);
	KVT_EXPECT(ipc_passes(c1, p1, pages[5]) && filled(p1, pages[5].pfn, 5));
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
