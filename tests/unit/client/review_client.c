/* SPDX-License-Identifier: Apache-2.0 */
/* Rules that a review found broken once: frees that were never sent, slow reconnects. */
#include "tests/unit/client/common.h"

#include <sys/socket.h>

#define SLOTS 64u

static struct fake f;
static u64 withheld[SLOTS];
static u32 nr_withheld;

static bool withhold_stat(struct fake *fake, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	if (sqe->opcode != KV_OP_STAT)
		return fake_serve(fake, sqe, cqe);
	if (nr_withheld < SLOTS)
		withheld[nr_withheld] = sqe->user_data;
	__atomic_add_fetch(&nr_withheld, 1, __ATOMIC_RELEASE);
	return false;
}

/*
 * kvmd is slow, every place in the ring is taken, and a batch of frees does not get in: the
 * pages are still ours to give back.
 */
KVT_TEST(a_batch_of_frees_that_was_not_sent_is_not_lost)
{
	struct kv_grant pages[SLOTS];
	struct kvc_pool *pool;
	struct kv_stat st;
	struct kvc *c;

	memset(&f, 0, sizeof(f));
	nr_withheld = 0;
	f.serve = withhold_stat;
	fake_start(&f);
	c = fake_connect(&f, 20);
	pool = fake_pool(&f, c);
	expect_within(!kvc_alloc(pool, SLOTS, KV_GFP_NOWAIT, pages), 100);
	for (u32 i = 0; i < SLOTS; i++)
		KVT_EXPECT_EQ(kvc_stat(pool, &st), -ETIMEDOUT);
	expect_within(__atomic_load_n(&nr_withheld, __ATOMIC_ACQUIRE) == SLOTS, 1000);
	KVT_EXPECT_EQ(kvc_free(pool, pages, SLOTS), 0);
	KVT_EXPECT_EQ(f.pages_freed, 0);
	for (u32 i = 0; i < SLOTS; i++)
		fake_post(&f, (struct kv_cqe){.user_data = withheld[i]});
	expect_within(!kvc_flush(c), 100);
	KVT_EXPECT(__atomic_load_n(&f.pages_freed, __ATOMIC_RELAXED) >= SLOTS);
	kvc_close(c);
	fake_stop(&f);
}

/* A pool whose POOL_OPEN came too late after a reconnect is opened by a later call. */
KVT_TEST(a_slow_reconnect_does_not_lose_the_pool)
{
	struct kvc_pool *pool;
	struct kv_grant g;
	struct kv_stat st;
	struct kvc *c;
	int r;

	memset(&f, 0, sizeof(f));
	fake_start(&f);
	c = fake_connect(&f, 200);
	pool = fake_pool(&f, c);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	__atomic_store_n(&f.silent_pools, 1, __ATOMIC_RELEASE);
	f.next_pfn = 0;
	f.table_epoch++;
	shutdown(f.sock, SHUT_RDWR);
	r = kvc_stat(pool, &st);
	KVT_EXPECT(r == -ETIMEDOUT || r == 0);
	expect_within(!__atomic_load_n(&f.silent_pools, __ATOMIC_ACQUIRE), 1000);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &g), 0);
	kvc_close(c);
	fake_stop(&f);
}

KVT_MAIN()
