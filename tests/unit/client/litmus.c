/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store-buffering litmus of P3 and P6 on this machine, with the code's own functions: a
 * session stores its slot and loads log_head, kvmd stores log_head and loads the slot. With the
 * full barriers one of them sees the other's store in every round; without them, on x86 as well,
 * both may miss it. KVT_LONG: 10^7 rounds. The exhaustive form is tests/model/storebuf.pml.
 */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/util.h"
#include "kv/session.h"
#include "tests/kvt.h"

#define BATCH	   4096u
#define SHORT	   200000ull
#define CHUNK	   1000ull
#define LONG	   10000000ull
#define GIVE_UP_NS (20 * KV_NSEC_PER_SEC)

struct litmus {
	struct kv_session_page *page;
	u64 *log_head;
	bool barrier;
	u64 rounds;
	u64 at[2][8]; /* each side's round; a line of its own */
	u64 seen[2][BATCH];
	u64 both_missed;
};

/* Both are in the same round, as near as can be, and leave it together. */
static void meet(struct litmus *l, u32 me, u64 i)
{
	u64 spins = 0;

	__atomic_store_n(&l->at[me][0], i, __ATOMIC_RELEASE);
	while (__atomic_load_n(&l->at[!me][0], __ATOMIC_ACQUIRE) < i)
		if (++spins % 4096 == 0)
			sched_yield();
}

static u64 client_round(struct litmus *l, u64 i)
{
	if (l->barrier)
		kv_slot_announce(l->page, 0, i);
	else
		kv_store_relaxed64(&l->page->slots[0].word, i);
	return kv_load_relaxed64(l->log_head);
}

static u64 kvmd_round(struct litmus *l, u64 i)
{
	kv_store_release64(l->log_head, i);
	if (l->barrier)
		kv_full_barrier();
	return kv_load_relaxed64(&l->page->slots[0].word);
}

static void *client(void *arg)
{
	struct litmus *l = arg;

	for (u64 i = 1; i <= l->rounds; i++) {
		meet(l, 0, 2 * i - 1);
		l->seen[0][i % BATCH] = client_round(l, i);
		meet(l, 0, 2 * i);
	}
	return NULL;
}

static void *kvmd(void *arg)
{
	struct litmus *l = arg;

	for (u64 i = 1; i <= l->rounds; i++) {
		u64 seen;

		meet(l, 1, 2 * i - 1);
		seen = kvmd_round(l, i);
		meet(l, 1, 2 * i);
		l->both_missed += seen < i && l->seen[0][i % BATCH] < i;
	}
	return NULL;
}

static u64 run(bool barrier, u64 rounds)
{
	struct litmus *l = aligned_alloc(4096, kv_round_up(sizeof(*l), 4096ull));
	pthread_t t[2];
	u64 missed;

	KVT_EXPECT(l);
	memset(l, 0, sizeof(*l));
	l->page = aligned_alloc(4096, kv_round_up(sizeof(*l->page), 4096ull));
	l->log_head = aligned_alloc(4096, 4096);
	KVT_EXPECT(l->page && l->log_head);
	memset(l->page, 0, sizeof(*l->page));
	*l->log_head = 0;
	l->barrier = barrier;
	l->rounds = rounds;
	KVT_EXPECT_EQ(pthread_create(&t[0], NULL, client, l), 0);
	KVT_EXPECT_EQ(pthread_create(&t[1], NULL, kvmd, l), 0);
	pthread_join(t[0], NULL);
	pthread_join(t[1], NULL);
	missed = l->both_missed;
	free(l->page);
	free(l->log_head);
	free(l);
	return missed;
}

static bool two_cpus(void)
{
	cpu_set_t set;

	return !sched_getaffinity(0, sizeof(set), &set) && CPU_COUNT(&set) >= 2;
}

/* Until one was missed (where that is what is looked for), or enough rounds or seconds are over. */
static u64 run_many(bool barrier, u64 rounds, u64 limit_ns, u64 *ret_rounds)
{
	u64 end_ns = kv_now_ns() + limit_ns, missed = 0;

	*ret_rounds = 0;
	do {
		missed += run(barrier, CHUNK);
		*ret_rounds += CHUNK;
	} while (*ret_rounds < rounds && kv_now_ns() < end_ns && (barrier || !missed));
	return missed;
}

KVT_TEST_T(announce_and_kill_never_miss_each_other, 300)
{
	u64 missed, rounds;

	if (!two_cpus())
		KVT_SKIP("takes two CPUs");
	missed = getenv("KVT_LONG") ? run_many(true, LONG, 10 * GIVE_UP_NS, &rounds)
				    : run_many(true, SHORT, GIVE_UP_NS, &rounds);
	KVT_NOTE("%llu rounds with the barriers: both missed %llu times",
		 (unsigned long long)rounds, (unsigned long long)missed);
	KVT_EXPECT_EQ(missed, 0);
}

/* The mutant: it shows that the rounds above could have found it. */
KVT_TEST(without_barriers_both_miss)
{
	u64 missed, rounds;

	if (!two_cpus())
		KVT_SKIP("takes two CPUs");
	missed = run_many(false, LONG, GIVE_UP_NS, &rounds);
	KVT_NOTE("%llu rounds without them: both missed %llu times",
		 (unsigned long long)rounds, (unsigned long long)missed);
	if (!missed)
		KVT_SKIP("the two threads never ran at one moment");
}

KVT_MAIN()
