/* SPDX-License-Identifier: Apache-2.0 */
/* Pressure: times in some and full, averages, who counts as asking. */
#include "tests/unit/own/common.h"

#define SEC 1000000000ull

static struct rig r;

static void pass(u64 ns)
{
	/* in steps of the daemon's tick */
	for (u64 end = r.now + ns; r.now < end;) {
		r.now += KV_MIN(SEC, end - r.now);
		kvd_core_now(&r.core, r.now);
		kvd_core_run(&r.core);
	}
}

static u32 pct(u32 ppm)
{
	return (ppm + 5000) / 10000;
}

KVT_TEST(nobody_asks_no_pressure)
{
	struct kvd_session *s;
	struct kvd_tenant *t;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	rig_client(&r, t, &s);
	pass(30 * SEC);
	KVT_EXPECT_EQ(t->pressure.total_ns[KVD_PRESSURE_SOME], 0);
	KVT_EXPECT_EQ(t->pressure.avg[KVD_PRESSURE_SOME][0], 0);
	rig_fini(&r);
}

/* One of two engines waits: some, not full. Both wait: full. Served: neither. */
KVT_TEST(some_and_full)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_grant g[8], h;
	struct kvd_pressure *p;
	struct kvd_tenant *t;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 8);
	p = &t->pressure;
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_NOWAIT, &h), KV_QUOTA);
	KVT_EXPECT_EQ(p->nr_asking, 2);
	KVT_EXPECT_EQ(p->nr_stalled, 1);
	pass(SEC);
	KVT_EXPECT_EQ(p->total_ns[KVD_PRESSURE_SOME], SEC);
	KVT_EXPECT_EQ(p->total_ns[KVD_PRESSURE_FULL], 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, &h), KV_QUOTA);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_NOWAIT, &h), KV_QUOTA);
	KVT_EXPECT_EQ(p->nr_stalled, 2);
	pass(SEC);
	KVT_EXPECT_EQ(p->total_ns[KVD_PRESSURE_SOME], 2 * SEC);
	KVT_EXPECT_EQ(p->total_ns[KVD_PRESSURE_FULL], SEC);
	KVT_EXPECT_EQ(rig_free1(s, a, g[0]), 0);
	KVT_EXPECT_EQ(rig_free1(s, a, g[1]), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, &h), 0);
	/* nobody got on, so s goes first until something of its is done (own/turn.h) */
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_NOWAIT, &h), KV_FULL);
	KVT_EXPECT_EQ(rig_free1(s, a, g[2]), 0);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_NOWAIT, &h), 0);
	KVT_EXPECT_EQ(p->nr_stalled, 0);
	KVT_EXPECT_EQ(p->nr_asking, 2);
	rig_fini(&r);
}

/* A refusal that nobody repeats is no pressure for ever. */
KVT_TEST(quiet_sessions_leave)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_tenant *t;
	struct kv_grant g;
	u64 total;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 1);
	a = rig_client(&r, t, &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, &g), KV_QUOTA);
	pass(4 * SEC);
	KVT_EXPECT_EQ(t->pressure.nr_asking, 0);
	total = t->pressure.total_ns[KVD_PRESSURE_SOME];
	KVT_EXPECT(total >= 2 * SEC && total <= 3 * SEC);
	pass(10 * SEC);
	KVT_EXPECT_EQ(t->pressure.total_ns[KVD_PRESSURE_SOME], total);
	rig_fini(&r);
}

/* A session that ends while it waits takes its stall with it. */
KVT_TEST(ended_sessions_leave)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_tenant *t;
	struct kv_grant g;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 1);
	a = rig_client(&r, t, &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, &g), KV_QUOTA);
	KVT_EXPECT_EQ(t->pressure.nr_stalled, 1);
	kvd_session_end(s, "test");
	KVT_EXPECT_EQ(t->pressure.nr_stalled, 0);
	KVT_EXPECT_EQ(t->pressure.nr_asking, 0);
	rig_fini(&r);
}

/* Averages against exp(): stalled all the time for 10 s, then never for 10 s. */
KVT_TEST(averages_decay)
{
	struct kvd_pressure p;
	u64 now = 5 * SEC;

	kvd_pressure_init(&p, now);
	p.nr_asking = p.nr_stalled = 1;
	for (u32 i = 0; i < 5; i++)
		kvd_pressure_update(&p, now += 2 * SEC);
	/* 1 - exp(-10/10), 1 - exp(-10/60), 1 - exp(-10/300) */
	KVT_EXPECT_EQ(pct(p.avg[KVD_PRESSURE_FULL][0]), 63);
	KVT_EXPECT_EQ(pct(p.avg[KVD_PRESSURE_SOME][1]), 15);
	KVT_EXPECT_EQ(pct(p.avg[KVD_PRESSURE_SOME][2]), 3);
	p.nr_stalled = 0;
	/* one late look is worth five in time */
	kvd_pressure_update(&p, now += 10 * SEC);
	KVT_EXPECT_EQ(pct(p.avg[KVD_PRESSURE_SOME][0]), 23);
	p.nr_stalled = 1;
	kvd_pressure_update(&p, now += 100000 * SEC);
	KVT_EXPECT_EQ(p.avg[KVD_PRESSURE_SOME][2], KVD_PRESSURE_ONE);
	KVT_EXPECT_EQ(p.total_ns[KVD_PRESSURE_SOME], 100010 * SEC);
}

/* Half of the time. */
KVT_TEST(shares_are_exact)
{
	struct kvd_pressure p;
	u64 now = 0;

	kvd_pressure_init(&p, now);
	for (u32 i = 0; i < 600; i++) {
		p.nr_asking = p.nr_stalled = 1;
		kvd_pressure_update(&p, now += SEC);
		p.nr_asking = p.nr_stalled = 0;
		kvd_pressure_update(&p, now += SEC);
	}
	KVT_EXPECT_EQ(p.total_ns[KVD_PRESSURE_FULL], 600 * SEC);
	KVT_EXPECT_EQ(pct(p.avg[KVD_PRESSURE_SOME][0]), 50);
	KVT_EXPECT_EQ(pct(p.avg[KVD_PRESSURE_SOME][2]), 49);
}

KVT_MAIN()
