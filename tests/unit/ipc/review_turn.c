/* SPDX-License-Identifier: Apache-2.0 */
/* How much one session gets in a turn: others wait for as long as it takes. */
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "kvmd/ipc/conn.h"
#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#define ENTRIES 16u

/* A daemon in this process; its turns are ours once a client has opened a session. */
static void scene(struct daemon *d, struct raw *c)
{
	daemon_here(d, 1ull << 30);
	daemon_here_turns(true);
	raw_open(c, d);
	daemon_here_turns(false);
}

static u32 completed(const struct raw *c)
{
	return kv_load_acquire32(&c->ring->cq_tail);
}

KVT_TEST(a_turn_serves_a_bounded_number_of_pages)
{
	u32 before, most = 0, turn = 0;
	struct daemon d;
	struct kv_sqe sqe = {.opcode = KV_OP_FREE,
			     .nr = KV_BATCH_MAX,
			     .arg_bytes = KV_BATCH_MAX * sizeof(struct kv_page_ref)};
	struct raw c;

	scene(&d, &c);
	sqe.pool_id = c.pool.pool_id;
	for (u32 i = 0; i < ENTRIES; i++)
		raw_submit(&c, sqe); /* pages that it does not hold: as many looks */
	for (; completed(&c) < ENTRIES && turn < 1000; turn++) {
		before = completed(&c);
		KVT_EXPECT(!kvd_turn(&daemon_kvd));
		most = KV_MAX(most, completed(&c) - before);
	}
	KVT_EXPECT_EQ(completed(&c), ENTRIES);
	KVT_EXPECT_LE(most, 1);
	sqe.nr = 1;
	sqe.arg_bytes = sizeof(struct kv_page_ref);
	for (u32 i = 0; i < ENTRIES; i++)
		raw_submit(&c, sqe); /* small ones still go together */
	for (turn = 0; completed(&c) < 2 * ENTRIES && turn < 1000; turn++)
		KVT_EXPECT(!kvd_turn(&daemon_kvd));
	KVT_EXPECT_LE(turn, 4);
	raw_close(&c);
	daemon_here_end(&d);
}

static int admin_connect(const struct daemon *d)
{
	struct sockaddr_un sa = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	snprintf(sa.sun_path, sizeof(sa.sun_path), "%s/admin.sock", d->dir);
	KVT_EXPECT(fd >= 0 && !connect(fd, (struct sockaddr *)&sa, sizeof(sa)));
	return fd;
}

/* Turns until @fd has a line, and no byte more of it is read. */
static u32 turns_to_answer(int fd, char *line, size_t room)
{
	size_t used = 0;
	u32 nr = 0;

	while (!memchr(line, '\n', used) && nr < 100000) {
		ssize_t n = recv(fd, line + used, used + 1 < room, MSG_DONTWAIT);

		used += n > 0 ? (size_t)n : 0;
		if (n <= 0) {
			KVT_EXPECT(!kvd_turn(&daemon_kvd));
			nr++;
		}
	}
	line[used] = 0;
	return nr;
}

/* An operator's audit shares the thread with everybody, slice by slice. */
KVT_TEST(audit_takes_many_turns)
{
	static const char audit[] = "{\"op\":\"audit\"}\n{\"op\":\"version\"}\n";
	static char line[8192];
	struct daemon d;
	struct raw c;
	u32 pages, nr;
	int fd, gone;

	scene(&d, &c);
	pages = c.pool.geometry.nr_pages;
	fd = admin_connect(&d);
	gone = admin_connect(&d);
	KVT_EXPECT_EQ(send(gone, audit, sizeof(audit) - 1, 0), sizeof(audit) - 1);
	KVT_EXPECT_EQ(send(fd, audit, sizeof(audit) - 1, 0), sizeof(audit) - 1);
	nr = turns_to_answer(fd, line, sizeof(line));
	KVT_NOTE("%u pages, %u turns: %.60s", pages, nr, line);
	KVT_EXPECT(nr >= pages / KVD_AUDIT_SLICE &&
		   nr < 100 + 3 * pages / KVD_AUDIT_SLICE);
	KVT_EXPECT_HAS(line, "\"damage\":0");
	/* what was asked behind it is answered behind it */
	turns_to_answer(fd, line, sizeof(line));
	/* nobody waits any more: it ends */
	KVT_EXPECT_EQ(send(fd, audit, sizeof(audit) - 1, 0), sizeof(audit) - 1);
	for (u32 i = 0; i < 6; i++)
		KVT_EXPECT(!kvd_turn(&daemon_kvd));
	KVT_EXPECT(daemon_kvd.audit_run);
	close(fd);
	close(gone);
	for (u32 i = 0; i < 20 && daemon_kvd.audit_run; i++)
		KVT_EXPECT(!kvd_turn(&daemon_kvd));
	KVT_EXPECT(!daemon_kvd.audit_run);
	raw_close(&c);
	daemon_here_end(&d);
}

#define SEALERS (KVD_REQUESTS + 8)
#define SEALED	512u

/* Entries that are hashed over 32 turns each and then refused: the pages are not its own. */
static void seals_without_end(struct raw *c)
{
	struct kv_sqe sqe = {.opcode = KV_OP_SEAL,
			     .pool_id = c->pool.pool_id,
			     .nr = SEALED,
			     .arg_bytes = sizeof(struct kv_seal_arg) +
					  SEALED * (sizeof(struct kv_seal_page) +
						    KV_PAGE_TOKENS * sizeof(u32)),
			     .ret_off = 1u << 20,
			     .ret_bytes = SEALED * sizeof(struct kv_seal_ret)};

	((struct kv_seal_arg *)c->args)->flags = KV_SEAL_ROOT;
	for (u32 i = 0; i < ENTRIES; i++)
		raw_submit(c, sqe);
}

/* What one tenant has hashed takes turns, not the requests that others are served with. */
KVT_TEST(a_tenant_that_has_much_hashed_leaves_requests_for_others)
{
	struct kvd_limits lim = {.high_bytes = 1, .max_bytes = 1, .weight = 1};
	static struct raw sealers[SEALERS];
	struct kv_sqe nop = {.opcode = KV_OP_NOP};
	struct kvd_tenant *mine, *other;
	struct kvd_session *s, *each;
	struct daemon d;
	struct rlimit lim_fds;
	struct raw c;
	u32 turn, before;

	KVT_EXPECT(!getrlimit(RLIMIT_NOFILE, &lim_fds));
	lim_fds.rlim_cur = lim_fds.rlim_max;
	KVT_EXPECT(!setrlimit(RLIMIT_NOFILE, &lim_fds));
	if (lim_fds.rlim_max < 20 * SEALERS)
		KVT_SKIP("RLIMIT_NOFILE is %llu", (unsigned long long)lim_fds.rlim_max);
	scene(&d, &c);
	s = kv_container_of(daemon_kvd.core.sessions.next, struct kvd_session, node);
	daemon_here_turns(true);
	for (u32 i = 0; i < SEALERS; i++)
		raw_open(&sealers[i], &d);
	daemon_here_turns(false);
	/* the one that was there first is somebody else's */
	mine = s->tenant;
	KVT_EXPECT(!kvd_tenant_create(&daemon_kvd.core, mine->domain, "other", &lim,
				      &other));
	s->tenant = other;
	for (u32 i = 0; i < SEALERS; i++)
		seals_without_end(&sealers[i]);
	/* The thread that armed their eventfds has ended, and the kernel takes its time. */
	list_for_each_entry (each, &daemon_kvd.core.sessions, node)
		kvd_conn_awake(each->owner);
	for (turn = 0; turn < 200; turn++)
		KVT_EXPECT(!kvd_turn(&daemon_kvd));
	/* whoever's turn it is when one of them ends */
	KVT_EXPECT(!list_empty(&daemon_kvd.requests.free));
	for (u32 i = 0; i < 3; i++) {
		before = completed(&c);
		raw_submit(&c, nop);
		kvd_conn_awake(s->owner);
		for (turn = 0; turn < 20000 && completed(&c) == before; turn++)
			KVT_EXPECT(!kvd_turn(&daemon_kvd));
		KVT_EXPECT_LE(turn, 4);
	}
	s->tenant = mine;
	for (u32 i = 0; i < SEALERS; i++)
		raw_close(&sealers[i]);
	raw_close(&c);
	daemon_here_end(&d);
}

KVT_MAIN()
