/* SPDX-License-Identifier: Apache-2.0 */
/* How much one session gets in a turn: others wait for as long as it takes. */
#include <pthread.h>

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
				  .host_bytes = 64u << 20,
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

KVT_MAIN()
