/* SPDX-License-Identifier: Apache-2.0 */
/* The ring as the client sees it: completions it must not believe, deadlines, many
 * threads. */
#include "tests/unit/client/common.h"
#include "base/clock.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

static struct fake fake;
static struct kvc *c;
static struct kvc_pool *pool;

static void start(fake_serve_fn *serve, u32 timeout_ms)
{
	fake.serve = serve;
	fake_start(&fake);
	c = fake_connect(&fake, timeout_ms);
	pool = fake_pool(&fake, c);
}

static void stop(void)
{
	kvc_close(c);
	fake_stop(&fake);
}

/* ----------------------------------------------------------------------------- O57 */

/* cases O57: recycled memory looked like a completion with a huge id (libevpl PR 90) */
KVT_TEST(o57_dirty_ring_memory_is_no_completion)
{
	struct kv_stat stat;

	fake.poison_ring = true;
	start(NULL, 1000);
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), 0);
	KVT_EXPECT_EQ(fake.served[KV_OP_STAT], 1);
	stop();
}

static struct kv_cqe wrong;
static int wrong_field;

static bool serve_wrong(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	struct kv_cqe *cq = (void *)((u8 *)f->ring + f->ring->cq_off);

	if (sqe->opcode != KV_OP_STAT)
		return fake_serve(f, sqe, cqe);
	if (wrong_field == 1)
		cqe->user_data = ~0ull;
	if (wrong_field == 2)
		cqe->user_data += 1ull << 32; /* the slot's next request, not yet made */
	if (wrong_field == 3)
		cqe->user_data += 1; /* a slot that is free */
	fake_post(f, *cqe);
	wrong = cq[(f->cq_tail - 1) % 64];
	return false;
}

static void expect_corruption(int field)
{
	struct kv_stat stat;

	wrong_field = field;
	start(serve_wrong, 1000);
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), -EPROTO);
	KVT_EXPECT_HAS(kvc_strerror(c), "matches nothing");
	stop();
}

KVT_TEST(o57_unknown_user_data_is_corruption)
{
	expect_corruption(1);
}

KVT_TEST(o57_user_data_of_another_request_is_corruption)
{
	expect_corruption(2);
}

KVT_TEST(o57_user_data_of_a_free_slot_is_corruption)
{
	expect_corruption(3);
}

/* The fake writes completions by itself here: other nonce, sequence or tail. */
static bool serve_raw(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	struct kv_cqe *cq = (void *)((u8 *)f->ring + f->ring->cq_off);
	u64 one = 1;

	if (sqe->opcode != KV_OP_STAT)
		return fake_serve(f, sqe, cqe);
	cqe->ring_nonce = f->ring->nonce + (wrong_field == 4);
	cqe->sequence = f->cq_tail + (wrong_field == 5);
	cqe->result = wrong_field == 6 ? KV_OUTCOME_NR : 0;
	cq[f->cq_tail % 64] = *cqe;
	f->cq_tail += wrong_field == 7 ? 65 : 1;
	kv_store_release32(&f->ring->cq_tail, f->cq_tail);
	if (write(f->cq_efd, &one, sizeof(one)) < 0)
		KVT_FAIL("cq eventfd");
	return false;
}

static void expect_raw(int field, int result)
{
	struct kv_stat stat;

	wrong_field = field;
	start(serve_raw, 1000);
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), result);
	stop();
}

KVT_TEST(o57_raw_completion_is_believed_when_right)
{
	expect_raw(0, 0);
}

KVT_TEST(o57_other_nonce_is_corruption)
{
	expect_raw(4, -EPROTO);
}

KVT_TEST(o57_other_sequence_is_corruption)
{
	expect_raw(5, -EPROTO);
}

KVT_TEST(o57_unknown_outcome_is_corruption)
{
	expect_raw(6, -EPROTO);
}

KVT_TEST(o57_tail_beyond_the_ring_is_corruption)
{
	expect_raw(7, -EPROTO);
}

static bool serve_many_hits(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	if (sqe->opcode != KV_OP_LOOKUP)
		return fake_serve(f, sqe, cqe);
	cqe->nr = 1u << 30;
	return true;
}

KVT_TEST(o57_more_results_than_room_is_corruption)
{
	u32 tokens[128] = {0}, nr = 99;
	struct kv_hit hits[2];

	start(serve_many_hits, 1000);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, 128, 2, hits, &nr), -EPROTO);
	KVT_EXPECT_EQ(nr, 0);
	stop();
}

/* ----------------------------------------------------------------------- deadlines */

static bool serve_nothing(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	return false;
}

KVT_TEST(silent_daemon_ends_in_etimedout)
{
	struct kv_stat stat;
	u64 start_ns;

	start(serve_nothing, 100);
	start_ns = kv_now_ns();
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), -ETIMEDOUT);
	KVT_EXPECT(kv_now_ns() - start_ns >= 99 * KV_NSEC_PER_MSEC);
	KVT_EXPECT_LE((double)(kv_now_ns() - start_ns) * 1e-6, 1000);
	stop();
}

static struct kv_cqe late;

static bool serve_late(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	bool post = fake_serve(f, sqe, cqe);

	if (sqe->opcode != KV_OP_ALLOC)
		return post;
	late = *cqe;
	return false;
}

/* Pages of an answer that nobody waits for any more go back, each exactly once. */
KVT_TEST(pages_of_a_late_answer_go_back)
{
	struct kv_grant pages[70];
	struct kv_stat stat;

	start(serve_late, 100);
	KVT_EXPECT_EQ(kvc_alloc(pool, 70, KV_GFP_NOWAIT, pages), -ETIMEDOUT);
	fake_post(&fake, late);
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), 0); /* takes the late completion too */
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(fake.pages_freed, 70);
	stop();
}

static bool serve_pin_late(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	if (sqe->opcode != KV_OP_PIN)
		return fake_serve(f, sqe, cqe);
	cqe->nr = sqe->nr;
	late = *cqe;
	return false;
}

/* A reference that a caller was told it did not get is not kept for it. */
KVT_TEST(pins_of_a_late_answer_go_back)
{
	struct kv_grant pages[70];
	struct kv_stat stat;

	start(serve_pin_late, 1000);
	KVT_EXPECT_EQ(kvc_alloc(pool, 70, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_pin(pool, pages, 70), -ETIMEDOUT);
	fake_post(&fake, late);
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), 0); /* takes the late completion too */
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(fake.pages_freed, 70);
	stop();
}

/* ---------------------------------------------------------- argument area, threads */

static bool serve_lookup(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	const struct kv_lookup_arg *arg = fake_arg(f, sqe->arg_off);
	const u32 *tokens = (const u32 *)(arg + 1);
	struct kv_hit *hits = fake_arg(f, sqe->ret_off);

	if (sqe->opcode != KV_OP_LOOKUP)
		return fake_serve(f, sqe, cqe);
	KVT_EXPECT_EQ(sqe->arg_bytes, sizeof(*arg) + sqe->nr * 4);
	KVT_EXPECT(sqe->arg_off + sqe->arg_bytes <= sqe->ret_off);
	KVT_EXPECT(sqe->ret_off + sqe->ret_bytes <= KV_ARG_BYTES);
	for (u32 i = 0; i < sqe->nr; i++)
		KVT_EXPECT_EQ(tokens[i], i * 3);
	cqe->nr = arg->max_pages;
	memset(hits, 0, cqe->nr * sizeof(*hits));
	if (!f->extent_serial[0])
		fake_extent_add(f, 0);
	return true;
}

KVT_TEST(largest_lookup_fits)
{
	static u32 tokens[KV_LOOKUP_MAX];
	static struct kv_hit hits[KV_LOOKUP_MAX / KV_PAGE_TOKENS];
	u32 nr;

	start(serve_lookup, 2000);
	for (u32 i = 0; i < KV_LOOKUP_MAX; i++)
		tokens[i] = i * 3;
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, KV_LOOKUP_MAX, ~0u, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, KV_LOOKUP_MAX / KV_PAGE_TOKENS);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, KV_LOOKUP_MAX + 1, ~0u, hits, &nr),
		      -EINVAL);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, KV_PAGE_TOKENS - 1, 1, hits, &nr),
		      KV_MISS);
	stop();
}

/* Answers in another order than requests, results unlike for every request. */
static bool serve_pin(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	static struct kv_cqe held;
	static bool holding;
	const struct kv_page_ref *ref = fake_arg(f, sqe->arg_off);

	if (sqe->opcode != KV_OP_PIN)
		return fake_serve(f, sqe, cqe);
	cqe->result = ref->tag == ref->pfn + 1000ull ? 0 : -EIO;
	cqe->result = cqe->result ? cqe->result : (int)(ref->pfn % 2) * KV_STALE;
	if (!holding && f->sq_head % 3 == 0) {
		held = *cqe;
		holding = true;
		return false;
	}
	fake_post(f, *cqe);
	if (holding) {
		holding = false;
		fake_post(f, held);
	}
	return false;
}

static u32 worker_errors;

static void *pin_loop(void *arg)
{
	u32 id = (u32)(uintptr_t)arg;

	for (u32 i = 0; i < 300; i++) {
		struct kv_grant g = {.pfn = (id * 300 + i) % FAKE_PAGES};
		int r;

		g.tag = g.pfn + 1000ull;
		r = kvc_pin(pool, &g, 1);
		if (r != (int)(g.pfn % 2) * KV_STALE && r != -ETIMEDOUT)
			__atomic_add_fetch(&worker_errors, 1, __ATOMIC_RELAXED);
	}
	return NULL;
}

/* One held answer may wait for the next request; with several threads there is one. */
KVT_TEST(answers_in_any_order_reach_their_callers)
{
	pthread_t threads[8];

	start(serve_pin, 300);
	for (u32 i = 0; i < KV_ARRAY_SIZE(threads); i++)
		pthread_create(&threads[i], NULL, pin_loop, (void *)(uintptr_t)i);
	for (u32 i = 0; i < KV_ARRAY_SIZE(threads); i++)
		pthread_join(threads[i], NULL);
	KVT_EXPECT_EQ(worker_errors, 0);
	KVT_EXPECT_EQ(fake.served[KV_OP_PIN], 8 * 300);
	stop();
}

static void *big_loop(void *arg)
{
	static u32 tokens[KV_LOOKUP_MAX];
	struct kv_hit *hits = malloc(2048 * sizeof(*hits));
	u32 nr;

	for (u32 i = 0; i < KV_LOOKUP_MAX; i++)
		tokens[i] = i * 3; /* every thread writes the same */
	for (u32 i = 0; i < 6; i++)
		if (kvc_lookup(pool, tokens, KV_LOOKUP_MAX, 2048, hits, &nr) ||
		    nr != 2048)
			__atomic_add_fetch(&worker_errors, 1, __ATOMIC_RELAXED);
	free(hits);
	return NULL;
}

/* Six big requests do not fit at once: some wait for room, none fails. */
KVT_TEST(requests_wait_for_argument_room)
{
	pthread_t threads[6];

	start(serve_lookup, 5000);
	for (u32 i = 0; i < KV_ARRAY_SIZE(threads); i++)
		pthread_create(&threads[i], NULL, big_loop, NULL);
	for (u32 i = 0; i < KV_ARRAY_SIZE(threads); i++)
		pthread_join(threads[i], NULL);
	KVT_EXPECT_EQ(worker_errors, 0);
	stop();
}

/* As many of the largest requests as the argument area has room for. */
#define SLOW_NR	   3u
#define SLOW_BYTES (KV_LOOKUP_MAX / KV_PAGE_TOKENS * sizeof(struct kv_hit))

static u8 *slow_hits;
static u32 slow_stopped, slow_go;

/*
 * The first store of a result stops its thread, as if the kernel had put it aside there:
 * its completion is taken, its room is not free yet.
 */
static void stop_in_copy(int sig)
{
	(void)sig;
	__atomic_add_fetch(&slow_stopped, 1, __ATOMIC_RELEASE);
	while (!kv_load_acquire32(&slow_go))
		usleep(1000);
	if (mprotect(slow_hits, SLOW_NR * SLOW_BYTES, PROT_READ | PROT_WRITE))
		abort();
}

static void *lookup_into(void *hits)
{
	static u32 tokens[KV_LOOKUP_MAX];
	u32 nr;

	for (u32 i = 0; i < KV_LOOKUP_MAX; i++)
		tokens[i] = i * 3; /* every thread writes the same */
	if (kvc_lookup(pool, tokens, KV_LOOKUP_MAX, ~0u, hits, &nr))
		__atomic_add_fetch(&worker_errors, 1, __ATOMIC_RELAXED);
	return NULL;
}

/* In the order of who polls: it lowers its word, takes the count, sends its request. */
static bool waiter_was_told(u32 tail)
{
	struct pollfd p = {.fd = fake.cq_efd, .events = POLLIN};

	return poll(&p, 1, 0) == 1 || !kv_load_acquire32(&fake.ring->cq_need_wakeup) ||
	       kv_load_acquire32(&fake.ring->sq_tail) != tail;
}

/*
 * Room comes without a completion: when results were copied out. With nothing under way
 * nothing else wakes the thread that waits for room and polls for all.
 */
KVT_TEST(room_without_a_completion_wakes_who_polls)
{
	struct sigaction act = {.sa_handler = stop_in_copy};
	static struct kv_hit hits[KV_LOOKUP_MAX / KV_PAGE_TOKENS];
	pthread_t slow[SLOW_NR], waiter;
	u32 tail;

	slow_hits = mmap(NULL, SLOW_NR * SLOW_BYTES, PROT_NONE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	KVT_EXPECT(slow_hits != MAP_FAILED);
	KVT_EXPECT_EQ(sigaction(SIGSEGV, &act, NULL), 0);
	start(serve_lookup, 20000);
	for (u32 i = 0; i < SLOW_NR; i++)
		pthread_create(&slow[i], NULL, lookup_into, slow_hits + i * SLOW_BYTES);
	while (kv_load_acquire32(&slow_stopped) < SLOW_NR)
		usleep(1000);
	KVT_EXPECT_EQ(fake.ring->cq_need_wakeup, 0);
	tail = fake.ring->sq_tail;
	pthread_create(&waiter, NULL, lookup_into, hits);
	while (!kv_load_acquire32(&fake.ring->cq_need_wakeup))
		usleep(1000);
	kv_store_release32(&slow_go, 1);
	for (u32 i = 0; i < SLOW_NR; i++)
		pthread_join(slow[i], NULL);
	KVT_EXPECT(waiter_was_told(tail));
	pthread_join(waiter, NULL);
	KVT_EXPECT_EQ(worker_errors, 0);
	KVT_EXPECT_EQ(fake.served[KV_OP_LOOKUP], SLOW_NR + 1);
	stop();
}

KVT_MAIN()
