/* SPDX-License-Identifier: Apache-2.0 */
/* How much one session gets in a turn: others wait for as long as it takes. */
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#define ENTRIES 16u

static bool turning;

static void *turns(void *arg)
{
	while (__atomic_load_n(&turning, __ATOMIC_ACQUIRE))
		KVT_EXPECT(!kvd_turn(&daemon_kvd));
	return NULL;
}

/* A daemon in this process; its turns are ours once a client has opened a session. */
static void scene(struct daemon *d, struct raw *c)
{
	struct kvd_options opt = {.check = -1,
				  .socket_mode = 0600,
				  .host_bytes = 1ull << 30,
				  .ready_fd = -1};
	char error[KVD_CONFIG_ERROR_BYTES];
	pthread_t thread;

	strcpy(d->dir, "/tmp/kvt-ipc.XXXXXX");
	KVT_EXPECT(mkdtemp(d->dir));
	snprintf(d->socket_path, sizeof(d->socket_path), "%s/kvmd.sock", d->dir);
	strcpy(opt.socket_path, d->socket_path);
	snprintf(opt.admin_path, sizeof(opt.admin_path), "%s/admin.sock", d->dir);
	strcpy(opt.state_dir, d->dir);
	if (kvd_init(&daemon_kvd, &opt, error))
		KVT_FAIL("kvd_init: %s", error);
	turning = true;
	KVT_EXPECT(!pthread_create(&thread, NULL, turns, NULL));
	raw_open(c, d);
	__atomic_store_n(&turning, false, __ATOMIC_RELEASE);
	pthread_join(thread, NULL);
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
	char command[96];
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
	kvd_fini(&daemon_kvd);
	snprintf(command, sizeof(command), "rm -r %s", d.dir);
	KVT_EXPECT_EQ(system(command), 0);
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
	char command[96];
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
	kvd_fini(&daemon_kvd);
	snprintf(command, sizeof(command), "rm -r %s", d.dir);
	KVT_EXPECT_EQ(system(command), 0);
}

KVT_MAIN()
