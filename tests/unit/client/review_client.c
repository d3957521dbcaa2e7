/* SPDX-License-Identifier: Apache-2.0 */
/* Rules that a review found broken once: frees that were never sent, slow reconnects. */
#include "libkvclient/internal.h"
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

/* ------------------------------------------------------------------- several pools */

static u64 free_waits;

static bool withhold_free(struct fake *fake, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	if (sqe->opcode != KV_OP_FREE)
		return fake_serve(fake, sqe, cqe);
	__atomic_store_n(&free_waits, sqe->user_data, __ATOMIC_RELEASE);
	return false;
}

static void *flush(void *conn)
{
	return (void *)(intptr_t)kvc_flush(conn);
}

static void *close_pool(void *pool)
{
	kvc_pool_close(pool);
	return NULL;
}

/* kvc_flush() names no pool: one that is closed beside it stays until it is through. */
KVT_TEST(pool_is_not_closed_under_a_flush)
{
	pthread_t flusher, closer;
	struct kv_grant pages[4];
	struct kvc_pool *pool;
	struct kvc *c;
	void *ret;

	memset(&f, 0, sizeof(f));
	f.serve = withhold_free;
	fake_start(&f);
	c = fake_connect(&f, 10000);
	pool = fake_pool(&f, c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 4), 0);
	KVT_EXPECT(!pthread_create(&flusher, NULL, flush, c));
	expect_within(__atomic_load_n(&free_waits, __ATOMIC_ACQUIRE), 5000);
	KVT_EXPECT(!pthread_create(&closer, NULL, close_pool, pool));
	usleep(50000);
	KVT_EXPECT_EQ(__atomic_load_n(&f.pools_closed, __ATOMIC_ACQUIRE), 0);
	fake_post(&f, (struct kv_cqe){.user_data = free_waits, .nr = 4});
	KVT_EXPECT(!pthread_join(flusher, &ret));
	KVT_EXPECT_EQ((int)(intptr_t)ret, 0);
	KVT_EXPECT(!pthread_join(closer, NULL));
	expect_within(__atomic_load_n(&f.pools_closed, __ATOMIC_ACQUIRE) == 1, 5000);
	kvc_close(c);
	fake_stop(&f);
}

/* ---------------------------------------------------------------------- deadlines */

static void *stat_one(void *pool)
{
	struct kv_stat st;

	return (void *)(intptr_t)kvc_stat(pool, &st);
}

/* Who connects again holds the lock until its own deadline, another call until its own. */
KVT_TEST(calls_end_while_another_holds_the_lock)
{
	struct kvc_pool *pool;
	pthread_t thread;
	struct kvc *c;
	void *ret;

	memset(&f, 0, sizeof(f));
	nr_withheld = 0;
	f.serve = withhold_stat;
	fake_start(&f);
	c = fake_connect(&f, 500);
	pool = fake_pool(&f, c);
	pthread_mutex_lock(&c->lock);
	KVT_EXPECT(!pthread_create(&thread, NULL, flush, c));
	KVT_EXPECT(!pthread_join(thread, &ret));
	KVT_EXPECT_EQ((int)(intptr_t)ret, -ETIMEDOUT);
	pthread_mutex_unlock(&c->lock);
	/* now one that is under way when its connection is lost */
	KVT_EXPECT(!pthread_create(&thread, NULL, stat_one, pool));
	expect_within(__atomic_load_n(&nr_withheld, __ATOMIC_ACQUIRE) == 1, 5000);
	pthread_mutex_lock(&c->lock);
	kvc_ring_fail(&c->link->ring, -ECONNRESET);
	KVT_EXPECT(!pthread_join(thread, &ret));
	KVT_EXPECT_EQ((int)(intptr_t)ret, -ETIMEDOUT);
	pthread_mutex_unlock(&c->lock);
	kvc_close(c);
	fake_stop(&f);
}

static struct kvc *locked;
static u32 lock_is_held, events_seen;

static void *hold_lock(void *arg)
{
	pthread_mutex_lock(&locked->lock);
	__atomic_store_n(&lock_is_held, 1, __ATOMIC_RELEASE);
	while (__atomic_load_n(&lock_is_held, __ATOMIC_ACQUIRE))
		usleep(1000);
	pthread_mutex_unlock(&locked->lock);
	return NULL;
}

static void first_event_waits_for_a_holder(void *arg, const struct kvc_event *event)
{
	if (!events_seen++)
		KVT_EXPECT(!pthread_create(arg, NULL, hold_lock, NULL));
	expect_within(__atomic_load_n(&lock_is_held, __ATOMIC_ACQUIRE), 5000);
}

/* kvc_dispatch() never blocks, also if a thread begins to connect again beside it. */
KVT_TEST(dispatch_does_not_wait_for_the_lock)
{
	struct kv_page_ref ref = {.pfn = 5, .tag = 7};
	pthread_t holder;
	struct kvc *c;

	memset(&f, 0, sizeof(f));
	fake_start(&f);
	locked = c = fake_connect(&f, 1000);
	fake_pool(&f, c);
	fake_send_revoke(&f, &ref, 1);
	fake_send_revoke(&f, &ref, 1);
	KVT_EXPECT_EQ(kvc_dispatch(c, first_event_waits_for_a_holder, &holder), 2);
	KVT_EXPECT_EQ(events_seen, 2);
	__atomic_store_n(&lock_is_held, 0, __ATOMIC_RELEASE);
	KVT_EXPECT(!pthread_join(holder, NULL));
	kvc_close(c);
	fake_stop(&f);
}

/* A pool that came back different after a restart does not keep the others' frees. */
KVT_TEST(lost_pool_does_not_stop_a_flush)
{
	struct kv_layout layout = fake_layout();
	struct kvc_pool *lost, *pool;
	struct kv_grant pages[5];
	struct kvc *c;

	memset(&f, 0, sizeof(f));
	fake_start(&f);
	c = fake_connect(&f, 1000);
	lost = fake_pool(&f, c);
	layout.model_id[0] = 1;
	KVT_EXPECT_EQ(kvc_pool_open(c, &layout, NULL, NULL, &pool), 0);
	KVT_EXPECT(lost->slot < pool->slot);
	KVT_EXPECT_EQ(kvc_alloc(lost, 5, KV_GFP_NOWAIT, pages), 0);
	lost->broken = -ESHUTDOWN; /* as adopt() says it */
	KVT_EXPECT_EQ(kvc_free(lost, pages, 1), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages + 1, 4), 0); /* the script knows but pages */
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(f.pages_freed, 4);
	kvc_close(c);
	fake_stop(&f);
}

KVT_MAIN()
