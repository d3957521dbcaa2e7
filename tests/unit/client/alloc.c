/* SPDX-License-Identifier: Apache-2.0 */
/* Magazines and the return list, against a scripted kvmd. */
#include "tests/unit/client/common.h"

static struct fake fake;
static struct kvc *c;
static struct kvc_pool *pool;

static void start(fake_serve_fn *serve)
{
	fake.serve = serve;
	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
}

static void stop(void)
{
	kvc_close(c);
	fake_stop(&fake);
}

static struct kv_grant alloc_one(void)
{
	struct kv_grant g = {.pfn = ~0u};

	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &g), 0);
	KVT_EXPECT(kvc_page_addr(pool, g.pfn) != NULL);
	return g;
}

/* ------------------------------------------------------------------------ magazine */

static u32 stock_asked;

static bool note_refill(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	if (sqe->opcode == KV_OP_ALLOC && (sqe->flags & KV_SQE_MAGAZINE))
		__atomic_store_n(&stock_asked, sqe->nr, __ATOMIC_RELEASE);
	return fake_serve(f, sqe, cqe);
}

/* Pages are popped until the next refill is asked for: how large is it? */
static u32 next_refill(void)
{
	__atomic_store_n(&stock_asked, 0, __ATOMIC_RELEASE);
	for (u32 i = 0; i < 200 && !__atomic_load_n(&stock_asked, __ATOMIC_ACQUIRE);
	     i++) {
		alloc_one();
		usleep(500);
	}
	return __atomic_load_n(&stock_asked, __ATOMIC_ACQUIRE);
}

/* Stock is charged and of use to nobody else: it follows what the thread uses. */
KVT_TEST(a_thread_that_rarely_allocates_holds_few)
{
	u32 busy, rare = 0;

	start(note_refill);
	for (u32 i = 0; i < 100; i++)
		alloc_one();
	busy = next_refill();
	for (u32 i = 0; i < 3; i++) {
		usleep(600000);
		rare = next_refill();
	}
	KVT_NOTE("a refill is %u pages when busy, %u when not", busy, rare);
	KVT_EXPECT(busy >= 16);
	KVT_EXPECT(rare && rare <= busy / 4);
	stop();
}

KVT_TEST(most_single_pages_come_without_a_request)
{
	bool seen[FAKE_PAGES] = {false};

	start(NULL);
	for (u32 i = 0; i < 600; i++) {
		struct kv_grant g = alloc_one();

		KVT_EXPECT(!seen[g.pfn]); /* handed out once */
		KVT_EXPECT_EQ(g.tag, *fake_tag(&fake, g.pfn));
		seen[g.pfn] = true;
		if (i % 16 == 0)
			usleep(500); /* the scripted daemon is slower than a real one */
	}
	KVT_NOTE("600 pages took %u requests", fake.served[KV_OP_ALLOC]);
	KVT_EXPECT_LE(fake.served[KV_OP_ALLOC], 200);
	stop();
}

static u32 owners[FAKE_PAGES];

static void *take_pages(void *arg)
{
	for (u32 i = 0; i < 30; i++) {
		struct kv_grant g;

		if (kvc_alloc(pool, 1, KV_GFP_NOWAIT, &g))
			return (void *)"alloc failed";
		if (__atomic_exchange_n(&owners[g.pfn], 1, __ATOMIC_RELAXED))
			return (void *)"two threads got one page";
	}
	return NULL;
}

/* More threads than magazines, and threads that end: magazines change hands. */
KVT_TEST(threads_share_no_page)
{
	pthread_t threads[12];
	void *why;

	start(NULL);
	for (u32 i = 0; i < KV_ARRAY_SIZE(threads); i++)
		pthread_create(&threads[i], NULL, take_pages, NULL);
	for (u32 i = 0; i < KV_ARRAY_SIZE(threads); i++) {
		pthread_join(threads[i], &why);
		if (why)
			KVT_FAIL("%s", (const char *)why);
	}
	stop();
}

/* kvmd takes a stocked page back: it must not come out of the magazine as well. */
KVT_TEST(recalled_page_is_not_handed_out)
{
	struct kv_mag_slot *slots;
	u32 recalled = 0;

	start(NULL);
	alloc_one();
	usleep(20000);
	slots = fake.session->magazines[0].slots;
	for (u32 i = 0; i < KV_MAGAZINE_SLOTS; i++) {
		u64 word = kv_load_acquire64(&slots[i].word);

		if (!word || !kv_cas64(&slots[i].word, word, 0))
			continue;
		fake_kill(&fake, KV_MAG_PFN(word));
		recalled++;
	}
	KVT_EXPECT(recalled > 0);
	for (u32 i = 0; i < 40; i++) {
		struct kv_grant g = alloc_one();

		KVT_EXPECT(kv_tag_live(*fake_tag(&fake, g.pfn)));
	}
	stop();
}

static int outcome;

static bool serve_outcome(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	if (sqe->opcode != KV_OP_ALLOC || !outcome)
		return fake_serve(f, sqe, cqe);
	cqe->result = outcome;
	return true;
}

/* The last pages of a quota sit in the magazine: a batch gets them all the same. */
KVT_TEST(stock_serves_a_batch_when_kvmd_is_full)
{
	struct kv_grant pages[64];

	start(serve_outcome);
	alloc_one();
	usleep(20000); /* eight pages are stocked now */
	outcome = KV_QUOTA;
	KVT_EXPECT_EQ(kvc_alloc(pool, 6, KV_GFP_NOWAIT, pages), 0);
	for (u32 i = 0; i < 6; i++)
		KVT_EXPECT_EQ(pages[i].tag, *fake_tag(&fake, pages[i].pfn));
	KVT_EXPECT_EQ(kvc_alloc(pool, 6, KV_GFP_NOWAIT, pages), KV_QUOTA);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(fake.pages_freed, 2); /* the two left over went back */
	stop();
}

KVT_TEST(outcomes_reach_the_caller)
{
	struct kv_grant pages[4];

	start(serve_outcome);
	for (outcome = KV_FULL; outcome <= KV_PENDING; outcome++)
		KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_NOWAIT, pages), outcome);
	outcome = -EOVERFLOW;
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_NOWAIT, pages), -EOVERFLOW);
	KVT_EXPECT_EQ(kvc_alloc(pool, 0, KV_GFP_NOWAIT, pages), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "nr=0");
	KVT_EXPECT_EQ(kvc_alloc(pool, KV_BATCH_MAX + 1, KV_GFP_NOWAIT, pages), -EINVAL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, 0x40, pages), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "gfp=0x40");
	stop();
}

static u32 pendings;

static bool serve_pending(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	if (sqe->opcode != KV_OP_ALLOC || pendings == 0)
		return fake_serve(f, sqe, cqe);
	pendings--;
	cqe->result = KV_PENDING;
	return true;
}

KVT_TEST(wait_asks_again_while_pages_are_in_quarantine)
{
	struct kv_grant pages[4];

	start(serve_pending);
	pendings = 10;
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_PREFILL, pages), 0);
	KVT_EXPECT_EQ(pendings, 0);
	pendings = 1u << 30;
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_PREFILL, pages), KV_PENDING);
	stop();
}

static u64 refill_waits;
static u32 asked_directly;
static bool hold_refills;

static bool withhold_refill(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	bool stock = sqe->flags & KV_SQE_MAGAZINE;

	if (sqe->opcode == KV_OP_ALLOC && !stock)
		asked_directly++;
	if (sqe->opcode != KV_OP_ALLOC || !stock || !hold_refills)
		return fake_serve(f, sqe, cqe);
	__atomic_store_n(&refill_waits, sqe->user_data, __ATOMIC_RELEASE);
	return false;
}

/* A pool that closes while its magazine is being refilled leaves the magazine unused, until
 * the refill is over: a session has but KV_MAGAZINES of them. */
KVT_TEST(pools_that_close_in_a_refill_cost_no_magazine)
{
	struct kv_grant g;

	hold_refills = true;
	start(withhold_refill);
	for (u32 i = 0; i < 2 * KV_MAGAZINES; i++) {
		__atomic_store_n(&refill_waits, 0, __ATOMIC_RELEASE);
		g = alloc_one();
		expect_within(__atomic_load_n(&refill_waits, __ATOMIC_ACQUIRE), 5000);
		kvc_pool_close(pool);
		fake_post(&fake, (struct kv_cqe){.user_data = refill_waits});
		pool = fake_pool(&fake, c);
		KVT_EXPECT(!kvc_page_addr(pool, g.pfn));
	}
	hold_refills = false;
	asked_directly = 0;
	for (u32 i = 0; i < 64; i++) {
		alloc_one();
		usleep(500);
	}
	KVT_NOTE("%u of 64 pages took a request of their own", asked_directly);
	KVT_EXPECT(asked_directly < 32);
	stop();
}

/* ---------------------------------------------------------------------------- fork */

static u32 freed_wanted, fork_answer;
static bool wait_parks;

/* Forks are served when so many pages have come back; a request with WAIT is held. */
static bool serve_fork(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	if (sqe->opcode != KV_OP_FORK)
		return fake_serve(f, sqe, cqe);
	if (wait_parks && (sqe->gfp & KV_GFP_WAIT))
		return false;
	if (f->pages_freed < freed_wanted) {
		cqe->result = (int)fork_answer;
		return true;
	}
	for (u32 i = 0; i < sqe->nr; i++)
		((struct kv_grant *)fake_arg(f, sqe->ret_off))[i] = (struct kv_grant){
			.pfn = f->next_pfn, .tag = fake_give(f, f->next_pfn++)};
	cqe->nr = sqe->nr;
	return true;
}

static void *fork_one(void *source)
{
	struct kv_grant g;

	return (void *)(intptr_t)kvc_fork(pool, source, 1, KV_GFP_PREFILL, &g);
}

/* What a fork waits for may be on our own list, behind a step that retires meanwhile. */
KVT_TEST(waiting_fork_sends_what_a_retire_lets_go)
{
	struct kv_grant pages[5];
	struct kvc_step *step;
	pthread_t thread;
	void *ret;

	fork_answer = KV_PENDING;
	freed_wanted = 4;
	start(serve_fork);
	KVT_EXPECT_EQ(kvc_alloc(pool, 5, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	kvc_step_launched(step);
	KVT_EXPECT_EQ(kvc_free(pool, pages + 1, 4), 0);
	KVT_EXPECT(!pthread_create(&thread, NULL, fork_one, pages));
	expect_within(__atomic_load_n(&fake.served[KV_OP_FORK], __ATOMIC_RELAXED) >= 3,
		      1000);
	kvc_step_retire(step);
	KVT_EXPECT(!pthread_join(thread, &ret));
	KVT_EXPECT_EQ((int)(intptr_t)ret, 0);
	stop();
}

/* kvmd holds a request with WAIT longer than the call may last: as with kvc_alloc(). */
KVT_TEST(waiting_fork_ends_in_pending)
{
	struct kv_grant pages[2];

	fork_answer = KV_PENDING;
	freed_wanted = ~0u;
	wait_parks = true;
	start(serve_fork);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_ATOMIC, pages), 0);
	KVT_EXPECT_EQ(kvc_fork(pool, pages, 1, KV_GFP_PREFILL, pages + 1), KV_PENDING);
	stop();
}

/* Stock is charged: a fork is not refused for want of what lies in our own magazines. */
KVT_TEST(stock_goes_back_before_a_fork_is_refused)
{
	struct kv_grant page, copy;

	fork_answer = KV_QUOTA;
	freed_wanted = 1;
	start(serve_fork);
	page = alloc_one();
	expect_within(fake.next_pfn > 1, 1000); /* a refill has come */
	KVT_EXPECT_EQ(kvc_fork(pool, &page, 1, KV_GFP_ATOMIC, &copy), 0);
	KVT_EXPECT(fake.pages_freed >= 1);
	stop();
}

/* --------------------------------------------------------------------- return list */

KVT_TEST(frees_go_in_batches)
{
	struct kv_grant pages[200];

	start(NULL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 200, KV_GFP_NOWAIT, pages), 0);
	for (u32 i = 0; i < 63; i++)
		KVT_EXPECT_EQ(kvc_free(pool, &pages[i], 1), 0);
	KVT_EXPECT_EQ(fake.pages_freed, 0);
	KVT_EXPECT_EQ(kvc_free(pool, &pages[63], 1), 0);
	expect_within(fake.pages_freed == 64,
		      1000); /* sent by that call, not waited for */
	KVT_EXPECT_EQ(kvc_free(pool, &pages[64], 136), 0);
	KVT_EXPECT_EQ(fake.free_batches, 2);
	KVT_EXPECT_EQ(fake.pages_freed, 200);
	stop();
}

/* cases O22: step N+1 is launched and writes p8, then p8 is freed (vllm PR 45357) */
KVT_TEST(o22_free_waits_for_steps_launched_before_it)
{
	struct kv_grant pages[80];
	struct kvc_step *before, *begun, *after;

	start(NULL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 80, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &before), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &begun), 0); /* never launched */
	kvc_step_launched(before);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 80), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &after), 0);
	kvc_step_launched(after);
	KVT_EXPECT_EQ(kvc_flush(c), KV_BUSY);
	KVT_EXPECT_EQ(fake.pages_freed, 0);
	kvc_step_retire(after);
	KVT_EXPECT_EQ(kvc_flush(c), KV_BUSY);
	KVT_EXPECT_EQ(fake.pages_freed, 0);
	kvc_step_retire(before); /* sends them itself: they are more than a batch */
	expect_within(fake.pages_freed == 80, 1000);
	kvc_step_retire(begun);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	stop();
}

KVT_TEST(flush_sends_small_lists_and_tells_of_stale_pages)
{
	struct kv_grant pages[3];

	start(NULL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 3, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 3), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(fake.pages_freed, 3);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 1), 0); /* a second time */
	KVT_EXPECT_EQ(kvc_flush(c), KV_STALE);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	pages[1].pfn = FAKE_PAGES;
	KVT_EXPECT_EQ(kvc_free(pool, pages, 2), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "pages[1].pfn=1024");
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(fake.pages_freed, 3);
	stop();
}

KVT_TEST(seal_waits_for_launched_steps)
{
	u32 tokens[KV_PAGE_TOKENS] = {1}, crc = 0;
	struct kv_seal_ret ret;
	struct kv_grant page;
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = 1,
				.pages = &page,
				.crc32c = &crc,
				.tokens = tokens,
				.ret_seals = &ret};
	struct {
		struct kvc_seal seal;
		u64 more;
	} later = {0}; /* of an application with a later header (docs/abi.md) */
	struct kvc_step *step;

	start(NULL);
	page = alloc_one();
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), 0); /* not launched: it writes nothing */
	kvc_step_launched(step);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), KV_BUSY);
	KVT_EXPECT_EQ(fake.served[KV_OP_SEAL], 1);
	kvc_step_retire(step);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), 0);
	seal.flags = 1;
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), -EINVAL);
	seal.flags = 0;
	seal.size_bytes--;
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "size_bytes");
	later.seal = seal;
	later.seal.size_bytes = sizeof(later);
	KVT_EXPECT_EQ(kvc_seal(pool, &later.seal), 0);
	later.more = 1;
	KVT_EXPECT_EQ(kvc_seal(pool, &later.seal), -EINVAL);
	KVT_EXPECT_EQ(fake.served[KV_OP_SEAL], 3);
	stop();
}

KVT_MAIN()
