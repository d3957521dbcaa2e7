/* SPDX-License-Identifier: Apache-2.0 */
/* Grace periods (P6, P8): slots, epochs, batches, wake words. */
#include "tests/unit/own/common.h"

static struct rig r;
static struct kvd_session *s, *s2;
static struct kvd_attach *a, *b;

static void setup(void)
{
	struct kvd_tenant *t;

	rig_init(&r, 4, 64);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
}

static void kill_one(void)
{
	KVT_EXPECT_EQ(rig_free1(s2, b, rig_alloc1(s2, b)), 0);
}

KVT_TEST(nothing_moves_when_nothing_waits)
{
	u64 epoch;

	setup();
	rig_run(&r);
	epoch = r.core.mm.grace.epoch;
	for (u32 i = 0; i < 100; i++)
		KVT_EXPECT_EQ(kvd_core_run(&r.core), KVD_CORE_IDLE);
	KVT_EXPECT_EQ(r.core.mm.grace.epoch, epoch);
	kill_one();
	rig_run(&r);
	KVT_EXPECT_EQ(r.core.mm.grace.epoch, epoch + 1);
	KVT_EXPECT_EQ(a->pool->table.shared->grace_epoch.word, epoch + 1);
	rig_fini(&r);
}

KVT_TEST(each_slot_counts)
{
	for (u32 slot = 0; slot < KV_ANNOUNCE_SLOTS; slot++) {
		setup();
		rig_announce(s, slot, a->pool);
		kill_one();
		rig_run(&r);
		KVT_EXPECT_EQ(rig_quarantine(a->pool), 1);
		KVT_EXPECT_EQ(kvd_core_run(&r.core),
			      r.now + 10000000); /* it asks for a timer */
		rig_retire(s, slot);
		rig_run(&r);
		KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
		rig_fini(&r);
	}
}

/* Every slot has to be seen past the epoch once, not all of them at one moment. */
KVT_TEST(slots_are_seen_one_by_one)
{
	setup();
	rig_announce(s, 0, a->pool);
	rig_announce(s, 1, a->pool);
	kill_one();
	rig_run(&r);
	rig_retire(s, 0);
	rig_run(&r); /* slot 0 was seen IDLE */
	s->page->slots[0].word =
		1; /* announces late with the old epoch: it saw the new log_head */
	kv_slot_retire(s->page, 1);
	rig_run(&r); /* slot 1 was seen IDLE, slot 0 again not */
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
	rig_fini(&r);
}

KVT_TEST(steps_that_announced_later_do_not_hold_back)
{
	setup();
	rig_announce(s, 0, a->pool);
	kill_one();
	rig_run(&r);
	rig_announce(s, 1, a->pool); /* sees the new word */
	rig_retire(s, 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
	rig_fini(&r);
}

/* An epoch from the future is a lie: it counts as the present at most. */
KVT_TEST(epochs_from_the_future_buy_nothing)
{
	setup();
	s->page->slots[2].word = ~0ull;
	kill_one();
	rig_run(&r);
	kill_one();
	rig_run(&r);
	KVT_EXPECT_LE(s->reader.seen[2], r.core.mm.grace.epoch);
	rig_fini(&r);
}

KVT_TEST(wake_word_asks_for_a_kick_only_while_waiting)
{
	setup();
	rig_announce(s, 0, a->pool);
	KVT_EXPECT_EQ(rig_retire(s, 0), 0);
	rig_announce(s, 0, a->pool);
	rig_run(&r);
	KVT_EXPECT_EQ(s->page->wake.word, 0); /* nothing waits */
	kill_one();
	rig_run(&r);
	KVT_EXPECT_EQ(s->page->wake.word, 1);
	KVT_EXPECT_EQ(s2->page->wake.word, 0); /* it does not hold anything back */
	KVT_EXPECT_EQ(rig_retire(s, 0), 1);
	rig_run(&r);
	KVT_EXPECT_EQ(s->page->wake.word, 0);
	rig_fini(&r);
}

/* Thousands of turns of frees while one step runs: batches are merged, none is lost. */
KVT_TEST(a_long_step_does_not_use_up_the_batches)
{
	struct kv_grant g[64];
	u32 freed = 0;

	setup();
	rig_announce(s, 0, a->pool);
	for (u32 round = 0; round < 60; round++) {
		u32 nr = 1 + round % 4;

		KVT_EXPECT_EQ(rig_alloc(s2, b, nr, KV_GFP_NOWAIT, g), 0);
		for (u32 i = 0; i < nr; i++)
			KVT_EXPECT_EQ(rig_free1(s2, b, g[i]), 0);
		freed += nr;
		rig_run(&r);
		KVT_EXPECT_EQ(rig_quarantine(a->pool), freed);
		rig_audit(&r);
	}
	rig_retire(s, 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
	rig_fini(&r);
}

KVT_TEST(a_large_batch_goes_in_slices)
{
	static struct kv_grant g[4096];
	u64 next;

	rig_init(&r, 8, 4096);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	for (u32 n = 0; n < 5; n++)
		KVT_EXPECT_EQ(rig_alloc(s, a, 4096, KV_GFP_NOWAIT, g), 0);
	while (kvd_session_close_pool(s, a->pool->id) == -EAGAIN)
		continue;
	next = kvd_core_run(&r.core);
	KVT_EXPECT_EQ(next, r.now); /* at once */
	KVT_EXPECT_EQ(r.core.mm.pools[0]->nr[KVD_QUARANTINE], 5 * 4096 - KVD_GRACE_SLICE);
	rig_audit(&r);
	rig_run(&r);
	KVT_EXPECT_EQ(r.core.mm.pools[0]->nr[KVD_QUARANTINE], 0);
	rig_fini(&r);
}

/* Epochs go on from the saved value, as after a restart. */
KVT_TEST(epochs_go_on_after_a_restart)
{
	struct kvd_core_config cfg;
	u64 saved;

	setup();
	kill_one();
	rig_run(&r);
	saved = r.saved[KVD_SAVED_GRACE];
	KVT_EXPECT(saved > r.core.mm.grace.epoch);
	kvd_core_fini(&r.core);
	cfg = r.core.cfg;
	KVT_EXPECT_EQ(kvd_core_init(&r.core, &cfg), 0);
	KVT_EXPECT_EQ(r.core.mm.grace.epoch, 1); /* the rig's config says "fresh host" */
	r.core.cfg.saved_grace = saved;
	cfg = r.core.cfg;
	KVT_EXPECT_EQ(kvd_core_init(&r.core, &cfg), 0);
	KVT_EXPECT_EQ(r.core.mm.grace.epoch, saved);
	KVT_EXPECT(r.saved[KVD_SAVED_GRACE] > saved);
}

KVT_MAIN()
