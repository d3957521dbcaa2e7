/* SPDX-License-Identifier: Apache-2.0 */
/* Turns: engines that hold parts of a pool and want more get on, one after the other. */
#include "kvmd/own/turn.h"
#include "tests/unit/own/common.h"

#define PAGES	    32u
#define MS	    1000000ull
#define ENGINES_MAX 4u

static struct rig r;

/* An engine with one request at a time: a page a round, back to none when refused. */
struct model {
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[PAGES];
	u32 nr, need;
	bool refused;
	u32 finished;
};

static struct model m[ENGINES_MAX];

static void pass(u64 ns)
{
	kvd_core_now(&r.core, r.now += ns);
	kvd_core_run(&r.core);
	rig_run(&r);
}

static void give_back(struct model *e)
{
	while (e->nr)
		KVT_EXPECT_EQ(rig_free1(e->s, e->a, e->g[--e->nr]), 0);
}

/* All ask, and then all that were refused step back: the worst order there is. */
static void round_of(u32 nr)
{
	for (u32 i = 0; i < nr; i++)
		m[i].refused = rig_alloc(m[i].s, m[i].a, 1, KV_GFP_NOWAIT,
					 &m[i].g[m[i].nr]) != 0;
	for (u32 i = 0; i < nr; i++) {
		m[i].nr += !m[i].refused;
		if (m[i].refused) {
			give_back(&m[i]);
		} else if (m[i].nr == m[i].need) {
			give_back(&m[i]);
			m[i].finished++;
		}
	}
	pass(MS);
}

static void start(struct kvd_tenant **t, u32 nr, u32 need)
{
	for (u32 i = 0; i < nr; i++) {
		m[i] = (struct model){.need = need};
		m[i].a = rig_client(&r, t[i], &m[i].s);
	}
}

/* Two engines of one domain that each hold half and want three quarters. */
KVT_TEST(somebody_always_gets_on)
{
	for (u32 nr = 2; nr <= ENGINES_MAX; nr++) {
		struct kvd_tenant *t[ENGINES_MAX];
		u32 finished = 0;

		rig_init(&r, 4, 8);
		t[0] = rig_tenant(&r, r.red, "t", 0, 0);
		for (u32 i = 1; i < nr; i++)
			t[i] = t[0];
		start(t, nr, PAGES * 3 / 4);
		for (u32 i = 0; i < 2000; i++)
			round_of(nr);
		for (u32 i = 0; i < nr; i++)
			finished += m[i].finished;
		printf("# %u engines: %u requests in 2000 rounds, %llu turns\n", nr,
		       finished, (unsigned long long)r.core.nr_turns);
		KVT_EXPECT(finished >= 10);
		rig_audit(&r);
		for (u32 i = 0; i < nr; i++)
			give_back(&m[i]);
		rig_fini(&r);
	}
}

/* The same at a tenant's max, in a pool that is large enough. */
KVT_TEST(somebody_gets_on_at_a_quota)
{
	struct kvd_tenant *t[2];

	rig_init(&r, 8, 8);
	t[0] = t[1] = rig_tenant(&r, r.red, "t", 0, PAGES);
	start(t, 2, PAGES * 3 / 4);
	for (u32 i = 0; i < 1000; i++)
		round_of(2);
	KVT_EXPECT(m[0].finished + m[1].finished >= 5);
	rig_fini(&r);
}

/* A turn is no way below a neighbour's min, and no obstacle to another domain. */
KVT_TEST(turn_leaves_min_alone)
{
	struct kvd_tenant *t[2], *small, *other;
	struct kv_grant g[4], h;
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;

	rig_init(&r, 5, 8);
	t[0] = t[1] = rig_tenant(&r, r.red, "t", 0, PAGES);
	small = rig_tenant(&r, r.red, "small", 4, 8);
	other = rig_tenant(&r, r.blue, "other", 0, 0);
	a = rig_client(&r, small, &s);
	b = rig_client(&r, other, &s2);
	start(t, 2, PAGES);
	for (u32 i = 0; i < 2000 && !r.red->turn; i++)
		round_of(2);
	KVT_EXPECT(r.red->turn != NULL);
	KVT_EXPECT_EQ(rig_alloc(s, a, 4, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, &h), KV_FULL);
	KVT_EXPECT(!kvd_turn_waits(s2, b->pool->geo.stride_bytes));
	rig_fini(&r);
}

/* Who is at work on the pages it holds is not disturbed by one that waits. */
KVT_TEST(no_turn_while_somebody_is_at_work)
{
	struct kvd_tenant *t[2];
	struct kv_grant g;

	rig_init(&r, 4, 8);
	t[0] = t[1] = rig_tenant(&r, r.red, "t", 0, 0);
	start(t, 2, PAGES);
	KVT_EXPECT_EQ(rig_alloc(m[0].s, m[0].a, PAGES, KV_GFP_NOWAIT, m[0].g), 0);
	for (u32 i = 0; i < 100; i++) {
		KVT_EXPECT(rig_alloc(m[1].s, m[1].a, 1, KV_GFP_NOWAIT, &g) != 0);
		pass(10 * MS);
	}
	KVT_EXPECT_EQ(r.core.nr_turns, 0);
	rig_fini(&r);
}

/* The one that has the turn goes: its place is free. */
KVT_TEST(turn_ends_with_its_session)
{
	struct kvd_tenant *t[2];

	rig_init(&r, 4, 8);
	t[0] = t[1] = rig_tenant(&r, r.red, "t", 0, 0);
	start(t, 2, PAGES);
	for (u32 i = 0; i < 2000 && !r.red->turn; i++)
		round_of(2);
	KVT_EXPECT(r.red->turn == m[0].s || r.red->turn == m[1].s);
	kvd_session_work_ended(r.red->turn);
	rig_run(&r);
	KVT_EXPECT(r.red->turn == NULL);
	rig_fini(&r);
}

/* One that has given up asking stands in nobody's way. */
KVT_TEST(turn_is_for_those_who_ask)
{
	struct model *asks;
	struct kvd_tenant *t[2];
	struct kv_grant g;
	u32 tries = 0;

	rig_init(&r, 4, 8);
	t[0] = t[1] = rig_tenant(&r, r.red, "t", 0, 0);
	start(t, 2, PAGES);
	for (u32 i = 0; i < 2000 && !r.red->turn; i++)
		round_of(2);
	KVT_EXPECT(r.red->turn != NULL);
	asks = r.red->turn == m[0].s ? &m[1] : &m[0];
	while (rig_alloc(asks->s, asks->a, 1, KV_GFP_NOWAIT, &g)) {
		KVT_EXPECT(++tries < 25);
		pass(10 * MS);
	}
	KVT_EXPECT(tries > 0);
	rig_fini(&r);
}

/* One that cannot be helped - others keep what they hold - does not keep the turn. */
KVT_TEST(turn_goes_round)
{
	struct kvd_session *first;
	struct kvd_tenant *t[2];
	struct kv_grant g;

	rig_init(&r, 4, 8);
	t[0] = t[1] = rig_tenant(&r, r.red, "t", 0, 0);
	start(t, 2, PAGES);
	for (u32 i = 0; i < 2; i++)
		KVT_EXPECT_EQ(rig_alloc(m[i].s, m[i].a, PAGES / 2, KV_GFP_NOWAIT, m[i].g),
			      0);
	for (u32 i = 0; i < 20; i++) {
		for (u32 k = 0; k < 2; k++)
			KVT_EXPECT(rig_alloc(m[k].s, m[k].a, 1, KV_GFP_NOWAIT, &g) != 0);
		pass(10 * MS);
	}
	first = r.red->turn;
	KVT_EXPECT(first != NULL);
	for (u32 i = 0; i < 60; i++) {
		for (u32 k = 0; k < 2; k++)
			KVT_EXPECT(rig_alloc(m[k].s, m[k].a, 1, KV_GFP_NOWAIT, &g) != 0);
		pass(10 * MS);
	}
	KVT_EXPECT(r.red->turn && r.red->turn != first);
	rig_fini(&r);
}

/* One engine fills the pool, is refused for long and gives half of it back: what is free is
 * there for the next one, at once. */
KVT_TEST(no_turn_for_one_alone)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_grant g[32], h;
	struct kvd_tenant *t;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	for (u32 i = 0; i < 30; i++) {
		KVT_EXPECT(rig_alloc(s, a, 64, KV_GFP_NOWAIT, g) > 0);
		kvd_core_now(&r.core, r.now += 10000000);
		kvd_core_run(&r.core);
	}
	KVT_EXPECT_EQ(rig_alloc(s, a, 32, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, &h), KV_FULL);
	for (u32 i = 0; i < 16; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
	rig_run(&r);
	b = rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_NOWAIT, &h), 0);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_MAIN()
