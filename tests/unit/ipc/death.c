/* SPDX-License-Identifier: Apache-2.0 */
/* P8: how sessions end, and when their pages may be used again. */
#include "base/clock.h"
#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#include <sys/socket.h>

#define PAGES "{\"op\":\"pages\"}"

static struct daemon d;

/* A client process that holds @nr pages and stands in a step (or not) until it is killed.
 */
static pid_t engine(u32 nr, bool in_step)
{
	struct kv_grant *g = calloc(nr, sizeof(*g));
	struct raw c;
	int p[2];
	pid_t pid;
	char byte;

	KVT_EXPECT(!pipe(p));
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		raw_open(&c, &d);
		KVT_EXPECT_EQ(raw_alloc(&c, nr, KV_GFP_NOWAIT, g), 0);
		if (in_step)
			kv_slot_announce(c.page, 5, 1);
		KVT_EXPECT_EQ(write(p[1], "x", 1), 1);
		for (;;)
			pause();
	}
	close(p[1]);
	KVT_EXPECT_EQ(read(p[0], &byte, 1), 1);
	close(p[0]);
	free(g);
	return pid;
}

static double reclaim_ms(pid_t pid)
{
	u64 t0 = kv_now_ns();

	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	while (daemon_number(&d, PAGES, "pools.0.active") +
		       daemon_number(&d, PAGES, "pools.0.quarantine") >
	       0) {
		if (kv_now_ns() - t0 > 5 * KV_NSEC_PER_SEC)
			KVT_FAIL("pages are not back after 5 s");
		usleep(200);
	}
	return (double)(kv_now_ns() - t0) / 1e6;
}

KVT_TEST(killed_engine_gives_its_pages_back_within_a_second)
{
	double ms;
	int i;

	daemon_start(&d, NULL);
	for (i = 0; i < 10; i++) {
		ms = reclaim_ms(engine(500, i % 2));
		if (i < 2)
			KVT_NOTE("%s: %.1f ms", i ? "in a step" : "between steps", ms);
		KVT_EXPECT_LE(ms, 1000);
	}
	KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"audit\"}", "damage"), 0);
	daemon_stop(&d);
}

/* A hang-up is not the end of the work: the process lives and its step runs on. */
KVT_TEST(hung_up_step_holds_its_pages_until_it_retires)
{
	struct kv_session_page *page;
	struct kv_grant g[20];
	struct raw c;

	daemon_start(&d, NULL);
	raw_open(&c, &d);
	KVT_EXPECT_EQ(raw_alloc(&c, 20, KV_GFP_NOWAIT, g), 0);
	page = c.page;
	kv_slot_announce(page, 2, 1);
	shutdown(c.fd, SHUT_RDWR);
	daemon_wait(&d, PAGES, "pools.0.quarantine", 20, 1000);
	KVT_EXPECT_EQ(kv_load_acquire64(&page->table_epoch.word), 0);
	usleep(300000);
	KVT_EXPECT_EQ(daemon_number(&d, PAGES, "pools.0.quarantine"), 20);
	kv_slot_retire(page, 2);
	daemon_wait(&d, PAGES, "pools.0.quarantine", 0, 1000);
	daemon_wait(&d, "{\"op\":\"status\"}", "sessions", 0, 1000);
	raw_close(&c);
	daemon_stop(&d);
}

/* The slots are read, not believed for ever: an ended session that announces again is
 * late. */
KVT_TEST(ended_session_cannot_start_a_step)
{
	struct kv_grant g[4];
	struct raw c;

	daemon_start(&d, NULL);
	raw_open(&c, &d);
	KVT_EXPECT_EQ(raw_alloc(&c, 4, KV_GFP_NOWAIT, g), 0);
	c.ring->sq_tail += 50000;
	KVT_EXPECT_EQ(write(c.sq_event, &(u64){1}, 8), 8);
	KVT_EXPECT(raw_hung_up(&c));
	kv_slot_announce(c.page, 0, 1);
	KVT_EXPECT_EQ(kv_load_acquire64(&c.page->table_epoch.word), 0);
	daemon_wait(&d, PAGES, "pools.0.quarantine", 0, 1000);
	daemon_wait(&d, PAGES, "pools.0.active", 0, 1000);
	raw_close(&c);
	daemon_stop(&d);
}

static void with_kill(struct kvd_options *opt)
{
	static char path[96];
	FILE *f;

	snprintf(path, sizeof(path), "%.80s/kvmd.json", opt->state_dir);
	opt->config_path = path;
	f = fopen(path, "we");
	fprintf(f,
		"{\"tenants\":[{\"name\":\"red\",\"uids\":[%u],\"gpus\":[{\"gpu\":\"*\","
		"\"max\":\"1GiB\"}]}],\"stall_ms\":200,\"on_stall\":\"kill\"}",
		geteuid());
	fclose(f);
}

KVT_TEST(a_stuck_step_is_killed_when_the_operator_says_so)
{
	struct kv_grant g[4];
	struct raw other;
	int status;
	pid_t pid;

	daemon_start(&d, with_kill);
	pid = engine(10, true);
	raw_open(&other, &d);
	KVT_EXPECT_EQ(raw_alloc(&other, 4, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(raw_free(&other, g, 4),
		      0); /* now the stuck step holds something back */
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	daemon_wait(&d, PAGES, "pools.0.quarantine", 0, 1000);
	raw_close(&other);
	daemon_stop(&d);
}

/* O08, O09: ids are never used again, whoever connects. */
KVT_TEST(o08_client_ids_are_never_reused)
{
	u64 last = 0;
	struct raw c;
	int i;

	daemon_start(&d, NULL);
	for (i = 0; i < 20; i++) {
		raw_connect(&c, &d);
		KVT_EXPECT_EQ(raw_hello(&c, "again"), 0);
		KVT_EXPECT(c.hello.client_id > last);
		last = c.hello.client_id;
		raw_close(&c);
	}
	daemon_stop(&d);
}

/* O56: the ring of a dead session, still mapped somewhere, reaches nobody. */
KVT_TEST(o56_ring_of_yesterday_has_no_effect)
{
	struct kv_sqe s = {.opcode = KV_OP_ALLOC, .nr = 1, .ret_bytes = 16};
	struct raw old, new;
	u64 one = 1;
	int i;

	daemon_start(&d, NULL);
	raw_open(&old, &d);
	shutdown(old.fd, SHUT_RDWR);
	daemon_wait(&d, "{\"op\":\"status\"}", "sessions", 0, 1000);
	raw_open(&new, &d);
	s.pool_id = new.pool.pool_id;
	s.gfp = KV_GFP_NOWAIT;
	s.ring_nonce = old.hello.ring_nonce;
	for (i = 0; i < 100; i++) {
		old.sq[old.ring->sq_tail & (old.ring->sq_depth - 1)] = s;
		kv_store_release32(&old.ring->sq_tail, old.ring->sq_tail + 1);
		KVT_EXPECT_EQ(write(old.sq_event, &one, sizeof(one)), sizeof(one));
	}
	usleep(20000);
	KVT_EXPECT_EQ(daemon_number(&d, PAGES, "pools.0.active"), 0);
	KVT_EXPECT_EQ(new.ring->cq_tail, 0);
	KVT_EXPECT(old.hello.ring_nonce != new.hello.ring_nonce);
	raw_close(&old);
	raw_close(&new);
	daemon_stop(&d);
}

/* Sessions that one process leaves behind in a step, until it is refused; it lives on. */
static pid_t litter(u32 most, u32 *ret_nr)
{
	struct raw c;
	int p[2], r = 0;
	pid_t pid;

	KVT_EXPECT(!pipe(p));
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		for (*ret_nr = 0; *ret_nr < most && !r; *ret_nr += !r) {
			raw_connect(&c, &d);
			r = raw_hello_try(&c, "litter");
			if (!r)
				kv_slot_announce(c.page, 0, 1);
			raw_close(&c);
		}
		KVT_EXPECT_EQ(write(p[1], ret_nr, sizeof(*ret_nr)), sizeof(*ret_nr));
		for (;;)
			pause();
	}
	close(p[1]);
	KVT_EXPECT_EQ(read(p[0], ret_nr, sizeof(*ret_nr)), sizeof(*ret_nr));
	close(p[0]);
	return pid;
}

/*
 * An ended session whose step is not over takes a place of its uid's as before: else one uid
 * that hangs up in a step, again and again, would take all of kvmd's.
 */
KVT_TEST_T(sessions_left_behind_in_a_step_count, 60)
{
	struct raw c;
	pid_t pid;
	u32 nr;

	daemon_start(&d, NULL);
	pid = litter(KVD_CONNS_EACH_MAX + 50, &nr);
	KVT_EXPECT_EQ(nr, KVD_CONNS_EACH_MAX);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	daemon_wait(&d, "{\"op\":\"status\"}", "sessions", 0, 10000);
	raw_connect(&c, &d);
	KVT_EXPECT_EQ(raw_hello(&c, "later"), 0);
	raw_close(&c);
	daemon_stop(&d);
}

KVT_MAIN()
