/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engines that die with kill -9, at every step of their life (design 9: their pages are
 * back in under a second, others see nothing), and a kvmd that dies under its engines.
 */
#include "tests/ipc/common.h"

#include <sys/prctl.h>

static struct eng_private_kvmd kvmd;
static struct kvc *c;
static struct kvc_pool *pool;

static struct kv_stat stat_now(void)
{
	struct kv_stat s;

	KVT_EXPECT_EQ(kvc_stat(pool, &s), 0);
	return s;
}

static void start(void)
{
	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
}

static void stop(void)
{
	kvc_close(c);
	ipc_stop(&kvmd);
}

/* ---------------------------------------------------------- where the victim stops */

enum stop_at {
	STOP_CONNECTED,
	STOP_POOL_OPEN,
	STOP_ALLOCATED,
	STOP_STEP_BEGUN,
	STOP_IN_STEP,
	STOP_STEP_RETIRED,
	STOP_SEALED,
	STOP_FREED,
	STOP_FORKED_PAGES,
	STOP_MANY_STEPS,
	STOP_NR
};

static const char *const stop_names[] = {
	"connected", "pool open",    "allocated", "step begun", "in a step",
	"retired",   "pages sealed", "freed",	  "forked",	"eight steps",
};

struct victim {
	enum stop_at at;
	int ready; /* pipe: one byte when it is there */
	u32 seed;
};

static void reached(const struct victim *v, enum stop_at at)
{
	if (v->at != at)
		return;
	if (write(v->ready, "x", 1) != 1)
		_exit(5);
	for (;;)
		pause();
}

static int victim_run(void *arg)
{
	const struct victim *v = arg;
	u32 tokens[8 * KV_PAGE_TOKENS], crc[8] = {0};
	struct kv_seal_ret rets[8];
	struct kv_grant pages[72], copies[4];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = 8,
				.pages = pages,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = rets};
	struct kvc_step *step;
	struct kvc_pool *p;
	struct kvc *mine;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	mine = ipc_connect(&kvmd);
	reached(v, STOP_CONNECTED);
	p = ipc_pool(mine);
	reached(v, STOP_POOL_OPEN);
	if (kvc_alloc(p, 72, KV_GFP_PREFILL, pages))
		return 2;
	reached(v, STOP_ALLOCATED);
	for (int i = 0; v->at == STOP_MANY_STEPS && i < 8; i++)
		if (kvc_step_begin(mine, &step))
			return 3;
	reached(v, STOP_MANY_STEPS);
	if (kvc_step_begin(mine, &step))
		return 3;
	reached(v, STOP_STEP_BEGUN);
	kvc_step_launched(step);
	for (u32 i = 0; i < 72; i++)
		ipc_page_fill(p, pages[i].pfn, 0xcc, 4096);
	reached(v, STOP_IN_STEP);
	kvc_step_retire(step);
	reached(v, STOP_STEP_RETIRED);
	for (u32 i = 0; i < 8 * KV_PAGE_TOKENS; i++)
		tokens[i] = v->seed * 100000 + i;
	if (kvc_seal(p, &seal))
		return 4;
	reached(v, STOP_SEALED);
	if (kvc_free(p, pages, 72))
		return 4;
	reached(v, STOP_FREED);
	if (kvc_alloc(p, 4, KV_GFP_PREFILL, pages) ||
	    kvc_fork(p, pages, 4, KV_GFP_PREFILL, copies))
		return 4;
	reached(v, STOP_FORKED_PAGES);
	return 1;
}

static pid_t victim_at(enum stop_at at, u32 seed)
{
	struct victim v = {.at = at, .seed = seed};
	int fds[2];
	pid_t pid;
	char byte;

	KVT_EXPECT_EQ(pipe(fds), 0);
	v.ready = fds[1];
	pid = ipc_child_with(victim_run, &v, sizeof(v));
	close(fds[1]);
	if (read(fds[0], &byte, 1) != 1)
		KVT_FAIL("victim did not reach \"%s\": exit %d", stop_names[at],
			 ipc_wait(pid));
	close(fds[0]);
	return pid;
}

static bool all_back(const struct kv_stat *before)
{
	struct kv_stat s = stat_now();

	return s.nr_active == before->nr_active && s.nr_quarantine == 0 &&
	       s.nr_magazine == before->nr_magazine && s.nr_sealed == before->nr_sealed;
}

static double back_after_ms(const struct kv_stat *before)
{
	u64 start_ns = kv_now_ns();

	while (!all_back(before)) {
		if (kv_now_ns() - start_ns > 2 * KV_NSEC_PER_SEC) {
			struct kv_stat s = stat_now();

			KVT_NOTE("active %u, quarantine %u, magazine %u, sealed %u",
				 s.nr_active, s.nr_quarantine, s.nr_magazine,
				 s.nr_sealed);
			return 2000;
		}
		usleep(500);
	}
	return (double)(kv_now_ns() - start_ns) * 1e-6;
}

KVT_TEST(killed_at_each_step_gives_its_pages_back_in_a_second)
{
	struct kv_stat before;

	start();
	before = stat_now();
	for (enum stop_at at = 0; at < STOP_NR; at++) {
		pid_t pid = victim_at(at, at);
		double ms;

		kill(pid, SIGKILL);
		KVT_EXPECT_EQ(ipc_wait(pid), 128 + SIGKILL);
		ms = back_after_ms(&before);
		KVT_NOTE("killed when %-12s pages back after %.1f ms", stop_names[at],
			 ms);
		KVT_EXPECT_LE(ms, 1000);
	}
	/* what it sealed stays findable */
	KVT_EXPECT(stat_now().nr_cached >= 8);
	stop();
}

/* Leases that go while a step of the session runs: their pages wait for it. */
KVT_TEST(closed_pool_waits_for_the_running_step)
{
	struct kv_stat before, during;
	struct kvc_step *step;
	struct kv_grant pages[8];
	struct kvc_pool *p;
	struct kvc *mine;

	start();
	before = stat_now();
	mine = ipc_connect(&kvmd);
	p = ipc_pool(mine);
	KVT_EXPECT_EQ(kvc_alloc(p, 8, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_step_begin(mine, &step), 0);
	kvc_step_launched(step);
	kvc_pool_close(p); /* all its leases are freed, under the step's nose */
	usleep(100000);
	during = stat_now();
	KVT_EXPECT_EQ(during.nr_quarantine, before.nr_quarantine + 8);
	kvc_step_retire(step);
	KVT_EXPECT_LE(back_after_ms(&before), 1000);
	kvc_close(mine);
	stop();
}

/* The same with a raw client whose socket goes while its slot is announced. */
KVT_TEST(announced_slot_outlives_the_socket)
{
	struct kv_stat before;
	struct ipc_raw raw;
	struct kv_sqe sqe;

	start();
	before = stat_now();
	raw_open(&raw, &kvmd);
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 16;
	sqe.ret_bytes = 16 * sizeof(struct kv_grant);
	KVT_EXPECT_EQ(raw_call(&raw, sqe).result, 0);
	kv_slot_announce(raw.session, 5, 1);
	raw_close(&raw);
	expect_within(kv_load_acquire64(&raw.session->table_epoch.word) == 0, 1000);
	usleep(100000);
	KVT_EXPECT_EQ(stat_now().nr_quarantine, 16); /* we live, the slot is not IDLE */
	kv_slot_retire(raw.session, 5);
	KVT_EXPECT_LE(back_after_ms(&before), 1000);
	stop();
}

/* cases R1: rounds of kill -9; figures back to baseline each time, survivors untouched.
 */
KVT_TEST(r1_rounds_of_kill_return_to_baseline)
{
	struct kv_stat before;
	struct kv_grant kept[8];

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 8, KV_GFP_NOWAIT, kept), 0);
	before = stat_now();
	for (u32 round = 0; round < 12; round++) {
		pid_t a = victim_at(STOP_IN_STEP, 50);
		pid_t b = victim_at(STOP_SEALED, 51); /* the same prefix every round */

		kill(a, SIGKILL);
		kill(b, SIGKILL);
		ipc_wait(a);
		ipc_wait(b);
		KVT_EXPECT_LE(back_after_ms(&before), 1000);
	}
	KVT_EXPECT_EQ(stat_now().nr_cached, before.nr_cached + 8); /* the prefix, once */
	KVT_EXPECT_EQ(kvc_free(pool, kept, 8), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	stop();
}

/* ---------------------------------------------------------------------------- fork */

static int sleep_as_child(void *arg)
{
	usleep(3000000);
	return 0;
}

static int engine_with_helper(void *arg)
{
	struct kv_grant pages[16];
	struct kvc *mine = ipc_connect(&kvmd);
	struct kvc_pool *p = ipc_pool(mine);

	if (kvc_alloc(p, 16, KV_GFP_NOWAIT, pages))
		return 2;
	ipc_fork(sleep_as_child, NULL); /* inherits all that is not close-on-exec */
	_exit(0);
}

/* cases O19: a forked helper that lives on keeps nothing of its dead parent (kvcached
 * 477) */
KVT_TEST(o19_forked_child_does_not_keep_the_pages)
{
	struct kv_stat before;

	start();
	before = stat_now();
	KVT_EXPECT_EQ(ipc_wait(ipc_child(engine_with_helper, NULL)), 0);
	KVT_EXPECT_LE(back_after_ms(&before), 1000);
	stop();
}

static int speak_as_child(void *arg)
{
	struct kv_grant g;

	return kvc_alloc(pool, 1, KV_GFP_NOWAIT, &g) == -EOWNERDEAD ? 0 : 1;
}

/* cases O09: who is who is decided at HELLO; the child is told that it is not the owner
 */
KVT_TEST(o09_child_is_not_its_parent)
{
	struct kv_grant g;

	start();
	KVT_EXPECT_EQ(ipc_wait(ipc_fork(speak_as_child, NULL)), 0);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &g), 0);
	stop();
}

/* ----------------------------------------------------------------------- kvmd dies */

/* A new kvmd at the same place, with the same state directory. */
static void restart(const struct eng_private_kvmd *old)
{
	char exe[64], path[1024];
	ssize_t n;

	/* the dead one's program, which the first start had to find */
	snprintf(exe, sizeof(exe), "/proc/%d/exe", old->pid);
	n = readlink(exe, path, sizeof(path) - 1);
	KVT_EXPECT(n > 0);
	path[n] = 0;
	kill(old->pid, SIGKILL);
	waitpid(old->pid, NULL, 0);
	/* a dead kvmd's io_uring keeps its listening socket open for some ms */
	for (u32 i = 0; i < 50; i++) {
		kvmd.pid = fork();
		if (kvmd.pid == 0) {
			execl(path, path, "--private", old->dir, "--die-with-parent",
			      "--backend", ipc_on_cuda() ? "cuda" : "host",
			      ipc_on_cuda() ? "--gpu-bytes" : "--host-bytes", "256MiB",
			      "--test-extents", NULL);
			_exit(127);
		}
		usleep(100000);
		if (waitpid(kvmd.pid, NULL, WNOHANG) == 0)
			return;
	}
	KVT_FAIL("%s does not start again", path);
}

/*
 * Without the keeper a new kvmd knows no session of the old one. Engines finish what they
 * have, reconnect by themselves, and are told that their leases are gone.
 */
KVT_TEST(kvmd_killed_and_started_again)
{
	struct kv_row row;
	struct kvc_check_request q = {
		.rows = &row, .nonce = 1, .nr_rows = 1, .length = 1};
	struct eng_private_kvmd old;
	struct kv_grant before[70], after[70];
	struct kvc_step *step;
	struct kv_verdict v;
	int r;

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 70, KV_GFP_NOWAIT, before), 0);
	row = kv_row_make(before[0].pfn, before[0].tag, KV_ROW_WRITE, 1, 0);
	old = kvmd;
	kill(kvmd.pid, SIGSTOP); /* away, as far as anyone can tell */
	/* decoding goes on on the pages it holds */
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	KVT_EXPECT(kv_verdict_ok(v, kvc_step_number(step), 1));
	ipc_page_fill(pool, before[0].pfn, 1, 4096);
	kvc_step_retire(step);
	restart(&old);
	r = kvc_alloc(pool, 70, KV_GFP_NOWAIT, after);
	if (r)
		KVT_FAIL("kvc_alloc after the restart: %d %s", r, kvc_strerror(c));
	KVT_EXPECT_EQ(kvc_free(pool, before, 70), KV_STALE);
	for (u32 i = 0; i < 70; i++)
		KVT_EXPECT(kv_tag_gen(after[i].tag) > kv_tag_gen(before[69].tag));
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	KVT_EXPECT(!kv_verdict_ok(v, kvc_step_number(step), 1)); /* its page is gone */
	kvc_step_retire(step);
	KVT_EXPECT_EQ(kvc_free(pool, after, 70), 0);
	stop();
}

KVT_MAIN()
