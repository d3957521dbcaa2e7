/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Announce, blocks, positions, retire: design 5, P3 and P6, against a scripted kvmd.
 *
 * The races are made to happen: the session page is read-only when the client announces,
 * and the fault handler plays kvmd's part at exactly that store before it lets the store
 * go on.
 */
#include "tests/unit/client/common.h"

#include <sched.h>
#include <sys/mman.h>
#include "base/clock.h"

static struct fake fake;
static struct kvc *c;
static struct kvc_pool *pool;

static void start(void)
{
	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
}

/* ----------------------------------------- kvmd acts at the moment of the announce */

static struct kv_session_page *client_page; /* the client's own mapping */
static void (*at_announce)(void);

static void on_fault(int sig, siginfo_t *info, void *context)
{
	u8 *addr = info->si_addr;

	if (addr < (u8 *)client_page || addr >= (u8 *)client_page + 4096 || !at_announce)
		_exit(99);
	at_announce();
	at_announce = NULL;
	mprotect(client_page, 4096, PROT_READ | PROT_WRITE);
}

/* The library's mapping of the session page, found by its file. */
static struct kv_session_page *find_client_page(void)
{
	FILE *f = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned long at;
	void *found = NULL;

	while (f && fgets(line, sizeof(line), f))
		if (strstr(line, "fake-session") && sscanf(line, "%lx", &at) == 1 &&
		    (void *)at != (void *)fake.session)
			found = (void *)at;
	if (f)
		fclose(f);
	KVT_EXPECT(found != NULL);
	return found;
}

static void act_at_announce(void (*fn)(void))
{
	struct sigaction sa = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};

	sigaction(SIGSEGV, &sa, NULL);
	client_page = find_client_page();
	at_announce = fn;
	mprotect(client_page, 4096, PROT_READ);
}

static struct kv_grant page;
static bool reused;

/* kvmd's half of P6: kill, log, advance, barrier, read the slots; all IDLE: hand out
 * again. */
static void kill_and_reuse(void)
{
	fake_kill(&fake, page.pfn);
	kv_store_release64(&fake.table->grace_epoch.word,
			   fake.table->grace_epoch.word + 1);
	kv_full_barrier();
	reused = true;
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		reused &= fake.session->slots[i].word == KV_SLOT_IDLE;
	if (reused)
		fake_give(&fake, page.pfn);
}

static void end_session(void)
{
	kv_store_release64(&fake.session->table_epoch.word, 0);
	kv_full_barrier();
	reused = true;
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		reused &= fake.session->slots[i].word == KV_SLOT_IDLE;
}

static struct kv_verdict check_one(struct kvc_step *step, struct kv_grant g, u32 flags)
{
	struct kv_row row = kv_row_make(g.pfn, g.tag, flags, 99, 0);
	struct kvc_check_request q = {
		.rows = &row, .nonce = 99, .nr_rows = 1, .length = 10};
	struct kv_verdict v;

	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	return v;
}

KVT_TEST(page_reused_at_the_announce_fails_the_check)
{
	struct kvc_step *step;
	struct kv_verdict v;

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	v = check_one(step, page, 0); /* from now on the mirror moves by deltas */
	KVT_EXPECT(kv_verdict_ok(v, kvc_step_number(step), 1));
	kvc_step_retire(step);
	act_at_announce(kill_and_reuse);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT(reused); /* no slot was announced: kvmd was right to reuse it */
	v = check_one(step, page, 0);
	KVT_EXPECT(!kv_verdict_ok(v, kvc_step_number(step), 1));
	KVT_EXPECT(v.bits & KV_BAD_GEN);
	kvc_step_retire(step);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_TEST(session_ended_at_the_announce_starts_no_step)
{
	struct kvc_step *step;

	start();
	act_at_announce(end_session);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), -ESHUTDOWN);
	KVT_EXPECT(reused);
	KVT_EXPECT_EQ(fake.session->slots[0].word, KV_SLOT_IDLE);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_TEST(block_has_what_was_logged_after_the_announce)
{
	struct kvc_step *step;
	struct {
		struct kv_step_block head;
		u64 words[FAKE_PAGES];
	} b;

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	fake_kill(&fake, page.pfn);
	KVT_EXPECT_EQ(kvc_step_block(step, pool, 0, &b, sizeof(b)), 0);
	KVT_EXPECT_EQ(b.head.log_to, fake.table->log_head.word);
	KVT_EXPECT_EQ(b.head.kind, KV_BLOCK_FULL);
	KVT_EXPECT(!kv_tag_live(b.words[page.pfn]));
	kvc_step_retire(step);
	kvc_close(c);
	fake_stop(&fake);
}

/* --------------------------------------------------------------------------- slots */

KVT_TEST(announce_stores_the_grace_epoch)
{
	struct kvc_step *step;

	start();
	fake.table->grace_epoch.word = 77;
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(fake.session->slots[0].word, 77);
	kvc_step_retire(step);
	KVT_EXPECT_EQ(fake.session->slots[0].word, KV_SLOT_IDLE);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_TEST(two_steps_have_two_slots)
{
	struct kvc_step *a, *b;

	start();
	KVT_EXPECT_EQ(kvc_step_begin(c, &a), 0);
	fake.table->grace_epoch.word = 9;
	KVT_EXPECT_EQ(kvc_step_begin(c, &b), 0);
	KVT_EXPECT_EQ(fake.session->slots[0].word, 5);
	KVT_EXPECT_EQ(fake.session->slots[1].word, 9);
	KVT_EXPECT(kvc_step_number(a) != kvc_step_number(b));
	kvc_step_retire(b);
	KVT_EXPECT_EQ(fake.session->slots[0].word, 5); /* a still holds its pages */
	kvc_step_retire(a);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_TEST(ninth_step_is_busy)
{
	struct kvc_step *steps[KV_ANNOUNCE_SLOTS], *ninth;

	start();
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		KVT_EXPECT_EQ(kvc_step_begin(c, &steps[i]), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &ninth), KV_BUSY);
	kvc_step_retire(steps[3]);
	KVT_EXPECT_EQ(kvc_step_begin(c, &ninth), 0);
	kvc_step_retire(ninth);
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		if (i != 3)
			kvc_step_retire(steps[i]);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_TEST(ended_session_starts_no_step)
{
	struct kvc_step *step;

	start();
	kv_store_release64(&fake.session->table_epoch.word, 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), -ESHUTDOWN);
	KVT_EXPECT_EQ(fake.session->slots[0].word, KV_SLOT_IDLE);
	KVT_EXPECT_HAS(kvc_strerror(c), "ended");
	kvc_close(c);
	fake_stop(&fake);
}

static void *claim_loop(void *arg)
{
	for (int i = 0; i < 20000; i++) {
		struct kvc_step *step;
		u64 number;

		if (kvc_step_begin(c, &step))
			continue;
		number = kvc_step_number(step);
		if (!number)
			return (void *)"a step without a number";
		if (kvc_step_number(step) != number)
			return (void *)"a step number that changed";
		kvc_step_retire(step);
	}
	return NULL;
}

KVT_TEST(claims_from_many_threads_do_not_meet)
{
	pthread_t threads[12];
	void *why;

	start();
	for (u32 i = 0; i < KV_ARRAY_SIZE(threads); i++)
		pthread_create(&threads[i], NULL, claim_loop, NULL);
	for (u32 i = 0; i < KV_ARRAY_SIZE(threads); i++) {
		pthread_join(threads[i], &why);
		if (why)
			KVT_FAIL("%s", (const char *)why);
	}
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		KVT_EXPECT_EQ(fake.session->slots[i].word, KV_SLOT_IDLE);
	kvc_close(c);
	fake_stop(&fake);
}

/* ----------------------------------------------------------------- retire and kick */

/* The ring's eventfd, taken away from the scripted daemon, so that a test sees each kick.
 */
static int take_kicks(void)
{
	int efd = fake.sq_efd;
	u64 count;

	fake.sq_efd = -1;
	usleep(20000);
	while (read(efd, &count, sizeof(count)) > 0)
		;
	return efd;
}

KVT_TEST(retire_kicks_only_a_waiting_daemon)
{
	struct kvc_step *step;
	u64 count;
	int efd;

	start();
	efd = take_kicks();
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	kvc_step_retire(step);
	KVT_EXPECT_EQ(read(efd, &count, sizeof(count)), -1);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	fake.session->wake.word = 1;
	kvc_step_retire(step);
	KVT_EXPECT_EQ(read(efd, &count, sizeof(count)), 8);
	kvc_close(c);
	fake_stop(&fake);
}

#define ROUNDS 40000
#define RACE_MAX_NS \
	(20 * KV_NSEC_PER_SEC) /* where two threads share a busy CPU it is fewer */
#define RACE_OVER (~0u)

static u32 race_round, race_done;
static u64 race_slot, race_ns;

/* Both sides go at one moment of the clock, give or take a few ns that differ by round.
 */
static void wait_for_moment(u32 round, u32 period)
{
	u64 ns = kv_load_relaxed64(&race_ns) + round % period;

	while (kv_now_ns() < ns)
		;
	for (volatile u32 spin = round % (period / 2); spin; spin--)
		;
}

/* The other thread's word; it may need this CPU to get there. Return: it */
static u32 wait_for_other(const u32 *word, u32 before)
{
	for (u32 spins = 0; kv_load_acquire32(word) == before; spins++)
		if (spins > 200000) /* a ms */
			sched_yield();
	return kv_load_acquire32(word);
}

/* kvmd's side: set wake, full barrier, read the slot. */
static void *set_wake_and_look(void *arg)
{
	for (u32 round = 1; wait_for_other(&race_round, round - 1) != RACE_OVER;
	     round++) {
		wait_for_moment(round, 59);
		kv_store_relaxed64(&fake.session->wake.word, 1);
		kv_full_barrier();
		race_slot = kv_load_relaxed64(&fake.session->slots[0].word);
		kv_store_release32(&race_done, round);
	}
	return NULL;
}

/*
 * Store buffering: kvmd sets wake and reads the slot, the client clears the slot and
 * reads wake. Without both barriers each can miss the other, and a page waits for the 10
 * ms timer.
 */
KVT_TEST(retire_and_wake_do_not_miss_each_other)
{
	pthread_t thread;
	u64 end_ns = kv_now_ns() + RACE_MAX_NS;
	u32 missed = 0, both = 0, round;
	u64 count;
	int efd;

	start();
	efd = take_kicks();
	race_round = race_done = 0;
	pthread_create(&thread, NULL, set_wake_and_look, NULL);
	for (round = 1; round <= ROUNDS && kv_now_ns() < end_ns; round++) {
		struct kvc_step *step;
		bool kicked;

		kv_store_relaxed64(&fake.session->wake.word, 0);
		KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
		kv_store_relaxed64(&race_ns, kv_now_ns() + 700);
		kv_store_release32(&race_round, round);
		wait_for_moment(round, 67);
		kvc_step_retire(step);
		wait_for_other(&race_done, round - 1);
		kicked = read(efd, &count, sizeof(count)) > 0;
		missed += race_slot != KV_SLOT_IDLE && !kicked;
		both += race_slot == KV_SLOT_IDLE && kicked;
	}
	kv_store_release32(&race_round, RACE_OVER);
	pthread_join(thread, NULL);
	KVT_NOTE("each saw the other in %u of %u rounds", both, round - 1);
	KVT_EXPECT_EQ(missed, 0);
	kvc_close(c);
	fake_stop(&fake);
}

/* kvmd's side of P8: store table_epoch 0, full barrier, read the slot. */
static void *end_and_look(void *arg)
{
	for (u32 round = 1; wait_for_other(&race_round, round - 1) != RACE_OVER;
	     round++) {
		wait_for_moment(round, 59);
		kv_store_relaxed64(&fake.session->table_epoch.word, 0);
		kv_full_barrier();
		race_slot = kv_load_relaxed64(&fake.session->slots[0].word);
		kv_store_release32(&race_done, round);
	}
	return NULL;
}

/* The same for the announce: an IDLE slot must mean that no step starts any more. */
KVT_TEST(announce_and_end_of_session_do_not_miss_each_other)
{
	pthread_t thread;
	u64 end_ns = kv_now_ns() + RACE_MAX_NS;
	u32 missed = 0, both = 0, idle = 0, round;

	start();
	race_round = race_done = 0;
	pthread_create(&thread, NULL, end_and_look, NULL);
	for (round = 1; round <= ROUNDS && kv_now_ns() < end_ns; round++) {
		struct kvc_step *step;
		int r;

		kv_store_relaxed64(&fake.session->table_epoch.word, fake.table_epoch);
		kv_store_relaxed64(&race_ns, kv_now_ns() + 700);
		kv_store_release32(&race_round, round);
		wait_for_moment(round, 67);
		r = kvc_step_begin(c, &step);
		wait_for_other(&race_done, round - 1);
		missed += !r && race_slot == KV_SLOT_IDLE;
		both += r && race_slot != KV_SLOT_IDLE;
		idle += r && race_slot == KV_SLOT_IDLE;
		if (!r)
			kvc_step_retire(step);
	}
	kv_store_release32(&race_round, RACE_OVER);
	pthread_join(thread, NULL);
	KVT_NOTE("%u rounds: each saw the other %u times, kvmd was first %u times",
		 round - 1, both, idle);
	KVT_EXPECT_EQ(missed, 0);
	kvc_close(c);
	fake_stop(&fake);
}

/* ----------------------------------------------------- blocks and stream positions */

static struct {
	struct kv_step_block head;
	u64 words[FAKE_PAGES];
} block;

static void get_block(struct kvc_step *step, u32 stream)
{
	memset(&block, 0xee, sizeof(block));
	KVT_EXPECT_EQ(kvc_step_block(step, pool, stream, &block, sizeof(block)), 0);
	KVT_EXPECT_EQ(block.head.step, kvc_step_number(step));
	KVT_EXPECT_EQ(block.head.nr_pages, FAKE_PAGES);
	KVT_EXPECT_EQ(block.head.reserved, 0);
}

KVT_TEST(first_block_is_full_then_deltas)
{
	const struct kv_log_entry *log = (const void *)block.words;
	struct kvc_step *step;
	u64 tag;

	start();
	for (u32 i = 0; i < 20; i++)
		fake_give(&fake, i);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	get_block(step, 2);
	KVT_EXPECT_EQ(block.head.kind, KV_BLOCK_FULL);
	KVT_EXPECT_EQ(block.head.nr_entries, 20); /* used pages only */
	KVT_EXPECT_EQ(block.head.log_to, 20);
	KVT_EXPECT_EQ(block.words[7], *fake_tag(&fake, 7));
	kvc_step_launched(step);
	kvc_step_retire(step);
	tag = fake_give(&fake, 500);
	fake_kill(&fake, 7);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	get_block(step, 2);
	KVT_EXPECT_EQ(block.head.kind, KV_BLOCK_DELTA);
	KVT_EXPECT_EQ(block.head.log_from, 20);
	KVT_EXPECT_EQ(block.head.log_to, 22);
	KVT_EXPECT_EQ(block.head.nr_entries, 2);
	KVT_EXPECT_EQ(log[0].pfn, 500);
	KVT_EXPECT_EQ(log[0].tag, tag);
	KVT_EXPECT_EQ(log[1].pfn, 7);
	get_block(step, 3); /* another mirror starts from nothing */
	KVT_EXPECT_EQ(block.head.kind, KV_BLOCK_FULL);
	KVT_EXPECT_EQ(block.head.nr_entries, 501);
	kvc_step_retire(step);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_TEST(position_moves_only_when_launched)
{
	struct kvc_step *step;

	start();
	fake_give(&fake, 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	get_block(step, 0);
	kvc_step_launched(step);
	kvc_step_retire(step);
	fake_give(&fake, 1);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	get_block(step, 0); /* its launch is refused */
	kvc_step_retire(step);
	fake_give(&fake, 2);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	get_block(step, 0);
	KVT_EXPECT_EQ(block.head.log_from, 1);
	KVT_EXPECT_EQ(block.head.log_to, 3);
	kvc_step_launched(step);
	get_block(step, 0);
	KVT_EXPECT_EQ(block.head.log_from, 3);
	kvc_step_retire(step);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_TEST(long_delta_becomes_a_full_table)
{
	struct kvc_step *step;

	start();
	fake_give(&fake, 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	get_block(step, 0);
	kvc_step_launched(step);
	kvc_step_retire(step);
	for (u32 i = 0; i < FAKE_PAGES / 2; i++)
		fake_give(&fake, i);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	get_block(step, 0);
	KVT_EXPECT_EQ(block.head.kind, KV_BLOCK_DELTA);
	KVT_EXPECT_EQ(block.head.nr_entries, FAKE_PAGES / 2);
	fake_give(&fake, 9);
	get_block(step, 0);
	KVT_EXPECT_EQ(block.head.kind, KV_BLOCK_FULL);
	kvc_step_retire(step);
	kvc_close(c);
	fake_stop(&fake);
}

/* An entry that kvmd has overwritten carries another sequence: the table is right
 * instead. */
KVT_TEST(overwritten_log_entry_is_not_used)
{
	struct kvc_step *step;
	struct kv_log_entry *log;

	start();
	fake_give(&fake, 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	get_block(step, 0);
	kvc_step_launched(step);
	fake_give(&fake, 1);
	log = (void *)((u8 *)fake.table + fake.table->log_off);
	log[1].sequence += KV_LOG_ENTRIES;
	log[1].pfn = 900;
	get_block(step, 0);
	KVT_EXPECT_EQ(block.head.kind, KV_BLOCK_FULL);
	KVT_EXPECT_EQ(block.words[1], *fake_tag(&fake, 1));
	kvc_step_retire(step);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_TEST(block_arguments_are_checked)
{
	struct kvc_step *step;

	start();
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_block(step, pool, 8, &block, sizeof(block)), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "stream=8");
	KVT_EXPECT_EQ(kvc_step_block(step, pool, 0, &block, sizeof(block) - 1), -ENOSPC);
	KVT_EXPECT_EQ(kvc_step_block_bytes(pool), sizeof(block));
	kvc_step_retire(step);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_MAIN()
