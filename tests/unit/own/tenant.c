/* SPDX-License-Identifier: Apache-2.0 */
/* Tenants and domains: the ledger, min, high and max, what a neighbour may count on. */
#include "tests/unit/own/common.h"

static struct rig r;

KVT_TEST(limits_are_checked_and_named)
{
	struct kvd_limits l = {
		.min_bytes = 1, .high_bytes = 2, .max_bytes = 3, .weight = 1};
	struct kvd_tenant *t, *u;
	const char *field = "";
	bool deferred;

	rig_init(&r, 4, 8);
	KVT_EXPECT_EQ(kvd_limits_check(&r.core, NULL, &l, &field), 0);
	l.weight = 1001;
	KVT_EXPECT_EQ(kvd_limits_check(&r.core, NULL, &l, &field), -EINVAL);
	KVT_EXPECT_STR(field, "weight");
	l.weight = 1;
	l.high_bytes = 4;
	KVT_EXPECT_EQ(kvd_limits_check(&r.core, NULL, &l, &field), -EINVAL);
	KVT_EXPECT_STR(field, "high");
	l.high_bytes = 3;
	l.min_bytes = 4;
	KVT_EXPECT_EQ(kvd_limits_check(&r.core, NULL, &l, &field), -EINVAL);
	KVT_EXPECT_STR(field, "min");
	l.max_bytes = 0;
	KVT_EXPECT_EQ(kvd_limits_check(&r.core, NULL, &l, &field), -EINVAL);
	KVT_EXPECT_STR(field, "max");
	/* the sum of all min must be there */
	t = rig_tenant(&r, r.red, "t", 20, 0);
	l.max_bytes = l.high_bytes = l.min_bytes = 13 * RIG_STRIDE;
	KVT_EXPECT_EQ(kvd_tenant_create(&r.core, r.blue, "u", &l, &u), -EINVAL);
	l.max_bytes = l.high_bytes = l.min_bytes = 32 * RIG_STRIDE;
	KVT_EXPECT_EQ(kvd_tenant_set_limits(&r.core, t, &l, &deferred), 0);
	KVT_EXPECT_EQ(kvd_tenant_create(&r.core, r.blue, "t", &l, &u), -EEXIST);
	KVT_EXPECT_EQ(kvd_tenant_create(&r.core, r.blue, "", &l, &u), -EINVAL);
	KVT_EXPECT(kvd_tenant_find(&r.core, "t") == t && !kvd_tenant_find(&r.core, "u"));
	KVT_EXPECT_EQ(kvd_tenant_destroy(&r.core, t), 0);
	KVT_EXPECT_EQ(r.core.min_bytes_total, 0);
	rig_fini(&r);
}

/* I7: no grant takes a tenant above its max, whoever asks, whatever the state of its
 * pages. */
KVT_TEST(quota_is_hard)
{
	struct kv_grant g[16], h[16];
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	u32 nr, pending;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 10);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(rig_alloc(s, a, 6, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 5, KV_GFP_NOWAIT, h), KV_QUOTA);
	KVT_EXPECT_EQ(kvd_lease_stock(s2, b, 0, 64, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(nr, 4); /* as many as there were left */
	KVT_EXPECT_EQ(kvd_lease_stock(s2, b, 1, 1, KV_GFP_GROW, &nr, &pending), KV_QUOTA);
	KVT_EXPECT_EQ(t->account.used_bytes, 10 * RIG_STRIDE);
	rig_audit(&r);
	/* at the max, pressure takes the tenant's own stock back */
	KVT_EXPECT_EQ(rig_alloc(s, a, 3, KV_GFP_NOWAIT, g + 6), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, g + 9), KV_QUOTA);
	rig_audit(&r);
	rig_fini(&r);
}

/* A tenant at its max evicts its own cache, never its neighbour's. */
KVT_TEST(at_max_only_the_own_cache_gives)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t, *u;
	struct kv_grant g[16];
	u32 pending;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 8);
	u = rig_tenant(&r, r.red, "u", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, u, &s2);
	rig_cache(&r, s, a, 1, 6);
	rig_cache(&r, s2, b, 2, 6);
	KVT_EXPECT_EQ(kvd_lease_alloc(s, a, 4, KV_GFP_NOWAIT, g, &pending), KV_PENDING);
	rig_run(&r); /* the background has evicted two of its own */
	KVT_EXPECT_EQ(t->account.nr[KVD_CACHED], 4);
	KVT_EXPECT_EQ(rig_alloc(s, a, 4, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 4, KV_GFP_PREFILL, g + 4), 0);
	KVT_EXPECT_EQ(t->account.nr[KVD_CACHED], 0);
	KVT_EXPECT_EQ(u->account.nr[KVD_CACHED], 6);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, g + 8), KV_QUOTA);
	rig_audit(&r);
	rig_fini(&r);
}

/* Above high gives first; nobody is taken below its min for another. */
KVT_TEST(reclaim_order_and_floor)
{
	struct kvd_limits l = {
		.high_bytes = 4 * RIG_STRIDE, .max_bytes = 1ull << 40, .weight = 1};
	struct kvd_session *s[4];
	struct kvd_attach *a[4];
	struct kvd_tenant *t[4];
	struct kv_grant g[32];
	bool deferred;

	rig_init(&r, 4, 8);
	t[0] = rig_tenant(&r, r.red, "low", 8, 0);  /* all of it below its min */
	t[1] = rig_tenant(&r, r.red, "high", 0, 0); /* above its high */
	t[2] = rig_tenant(&r, r.red, "mid", 0, 0);
	t[3] = rig_tenant(&r, r.red, "asks", 0, 0);
	KVT_EXPECT_EQ(kvd_tenant_set_limits(&r.core, t[1], &l, &deferred), 0);
	for (u32 i = 0; i < 4; i++)
		a[i] = rig_client(&r, t[i], &s[i]);
	for (u32 i = 0; i < 3; i++)
		rig_cache(&r, s[i], a[i], i, 8);
	KVT_EXPECT_EQ(rig_alloc(s[3], a[3], 8, KV_GFP_PREFILL, g), 0); /* full now */
	KVT_EXPECT_EQ(rig_alloc(s[3], a[3], 4, KV_GFP_PREFILL, g + 8), 0);
	KVT_EXPECT_EQ(t[0]->account.nr[KVD_CACHED], 8);
	KVT_EXPECT_EQ(t[1]->account.nr[KVD_CACHED], 4);
	KVT_EXPECT_EQ(t[2]->account.nr[KVD_CACHED], 8);
	KVT_EXPECT_EQ(rig_alloc(s[3], a[3], 12, KV_GFP_PREFILL, g + 12), 0);
	KVT_EXPECT_EQ(t[0]->account.nr[KVD_CACHED], 8);
	KVT_EXPECT_EQ(rig_alloc(s[3], a[3], 1, KV_GFP_PREFILL, g + 24), KV_FULL);
	KVT_EXPECT_EQ(t[0]->account.nr[KVD_CACHED], 8);
	/* its own cache is its own to give */
	KVT_EXPECT_EQ(rig_alloc(s[0], a[0], 8, KV_GFP_PREFILL, g + 24), 0);
	rig_audit(&r);
	rig_fini(&r);
}

/* What is lent beyond min is taken back by weight, and lent again when it is free. */
KVT_TEST(weights_share_what_is_lent)
{
	enum { EACH = 240 };
	struct kvd_session *s[3];
	struct kvd_attach *a[3];
	struct kvd_tenant *t[3];
	static struct kv_grant g[512];
	u32 left[2], nr = 512 - 2 * EACH;

	rig_init(&r, 32, 16);
	for (u32 i = 0; i < 3; i++) {
		struct kvd_limits l = {.high_bytes = 1ull << 40,
				       .max_bytes = 1ull << 40,
				       .weight = i ? 3 : 1};
		bool deferred;

		t[i] = rig_tenant(&r, r.red,
				  i == 0   ? "one"
				  : i == 1 ? "three"
					   : "asks",
				  0, 0);
		KVT_EXPECT_EQ(kvd_tenant_set_limits(&r.core, t[i], &l, &deferred), 0);
		a[i] = rig_client(&r, t[i], &s[i]);
	}
	for (u32 i = 0; i < EACH / 16; i++) {
		rig_cache(&r, s[0], a[0], i, 16);
		rig_cache(&r, s[1], a[1], 1000 + i, 16);
	}
	KVT_EXPECT_EQ(rig_alloc(s[2], a[2], nr, KV_GFP_PREFILL, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s[2], a[2], EACH, KV_GFP_PREFILL, g + nr), 0);
	left[0] = t[0]->account.nr[KVD_CACHED];
	left[1] = t[1]->account.nr[KVD_CACHED];
	KVT_EXPECT_EQ(left[0] + left[1], EACH);
	/* 1 to 3, to within what is taken at a time */
	KVT_EXPECT(left[0] * 3 <= left[1] + 64 && left[1] <= left[0] * 3 + 64);
	for (u32 i = 0; i < nr + EACH; i++)
		KVT_EXPECT_EQ(rig_free1(s[2], a[2], g[i]), 0);
	rig_run(&r);
	for (u32 i = 0; i < EACH / 16; i++)
		rig_cache(&r, s[0], a[0], 2000 + i, 16);
	KVT_EXPECT_EQ(t[0]->account.nr[KVD_CACHED], left[0] + EACH);
	KVT_EXPECT_EQ(t[1]->account.nr[KVD_CACHED], left[1]);
	rig_audit(&r);
	rig_fini(&r);
}

/* A request of a neighbour below its min always finds memory: in the domain, and across.
 */
KVT_TEST(min_is_always_there)
{
	for (u32 across = 0; across < 2; across++) {
		struct kvd_session *s, *s2;
		struct kvd_attach *a, *b;
		struct kvd_tenant *t, *u;
		struct kv_grant g[32];
		u32 have = 0, pending = 0;

		rig_init(&r, 4, 8);
		t = rig_tenant(&r, r.red, "greedy", 0, 0);
		u = rig_tenant(&r, across ? r.blue : r.red, "modest", 10, 0);
		a = rig_client(&r, t, &s);
		b = rig_client(&r, u, &s2);
		while (have < 32 && !rig_alloc(s, a, 1, KV_GFP_PREFILL, g + have))
			have++;
		/* across domains whole extents are kept back */
		KVT_EXPECT_EQ(have, across ? 16 : 22);
		KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, g), KV_FULL);
		rig_audit(&r);
		KVT_EXPECT_EQ(rig_alloc(s2, b, 10, KV_GFP_NOWAIT, g), 0);
		/* a cache is no reason to refuse: it goes when its owner must make room
		 */
		for (u32 i = 10; i < 16 && across; i++)
			KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_NOWAIT, g + i), 0);
		KVT_EXPECT_EQ(kvd_lease_alloc(s2, b, 1, KV_GFP_NOWAIT, g, &pending),
			      KV_FULL);
		rig_audit(&r);
		rig_fini(&r);
	}
}

KVT_TEST(lowering_max_under_use_is_deferred)
{
	struct kvd_limits l = {
		.high_bytes = 4 * RIG_STRIDE, .max_bytes = 4 * RIG_STRIDE, .weight = 1};
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_tenant *t;
	struct kv_grant g[16];
	bool deferred = false;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(kvd_tenant_set_limits(&r.core, t, &l, &deferred), 0);
	KVT_EXPECT(deferred);
	rig_audit(&r);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, g + 8), KV_QUOTA);
	for (u32 i = 0; i < 5; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, g + 1), KV_QUOTA);
	l.max_bytes = l.high_bytes = 16 * RIG_STRIDE;
	KVT_EXPECT_EQ(kvd_tenant_set_limits(&r.core, t, &l, &deferred), 0);
	KVT_EXPECT(!deferred);
	KVT_EXPECT_EQ(rig_alloc(s, a, 12, KV_GFP_PREFILL, g + 1), 0);
	rig_fini(&r);
}

/* What a tenant was charged comes back exactly, over every way a page can end. */
KVT_TEST(charges_come_back)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	struct kv_grant g[8];
	u32 nr, pending;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 32);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	for (u32 round = 0; round < 3; round++) {
		KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_NOWAIT, g), 0);
		for (u32 i = 0; i < 4; i++)
			KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
		for (u32 i = 4; i < 8; i++)
			KVT_EXPECT_EQ(kvd_lease_revoke(a->pool, g[i].pfn, 0), 0);
		KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 8, KV_GFP_NOWAIT, &nr, &pending),
			      0);
		KVT_EXPECT_EQ(kvd_lease_recall(a->pool), 8);
		rig_cache(&r, s, a, round, 4);
		KVT_EXPECT_EQ(kvd_reclaim_pool(a->pool, t->index, 99, false), 4);
		rig_run(&r);
		rig_audit(&r);
		KVT_EXPECT_EQ(t->account.used_bytes, 0);
		KVT_EXPECT_EQ(t->account.quarantine_bytes, 0);
	}
	KVT_EXPECT_EQ(rig_alloc(s2, b, 8, KV_GFP_NOWAIT, g), 0);
	kvd_session_work_ended(s2);
	rig_run(&r);
	KVT_EXPECT_EQ(t->account.used_bytes, 0);
	rig_fini(&r);
}

/* Idle extents of one pool make room for another pool, cached ones too. */
KVT_TEST(memory_moves_between_pools)
{
	struct kv_layout lora = rig_layout(1);
	struct kvd_attach *a, *b;
	struct kvd_session *s;
	struct kv_grant g[32];
	u32 pending = 0, tries = 0;
	int rc;

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	b = rig_open(s, &lora);
	for (u64 seq = 0; seq < 4; seq++)
		rig_cache(&r, s, a, seq, 8);
	KVT_EXPECT_EQ(r.extents, 4);
	do {
		rc = kvd_lease_alloc(s, b, 8, KV_GFP_PREFILL, g, &pending);
		KVT_EXPECT(rc == 0 || rc == KV_PENDING);
		rig_run(&r);
		rig_audit(&r);
		/* the session unmaps what it is told to */
		for (u32 i = 0; i < 4; i++) {
			struct kv_extent_ref ref = {.index = i,
						    .serial = a->pool->extents[i].serial};

			if (a->pool->extents[i].state == KVD_EXTENT_DRAINING)
				KVT_EXPECT_EQ(kvd_session_unmapped(s, a->pool->id, &ref),
					      0);
		}
	} while (rc && ++tries < 10);
	KVT_EXPECT_EQ(rc, 0);
	KVT_EXPECT_EQ(a->pool->nr_live_extents, 3);
	KVT_EXPECT_EQ(b->pool->nr_live_extents, 1);
	rig_fini(&r);
}

/* Pressure is a state, told when it changes: refusals in a row are one event. */
KVT_TEST(pressure_is_told_on_change)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[16];

	rig_init(&r, 2, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 16, KV_GFP_NOWAIT, g), 0);
	for (u32 i = 0; i < 100; i++) {
		KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, g), KV_FULL);
		rig_run(&r);
	}
	KVT_EXPECT_EQ(r.pressure, 2);
	KVT_EXPECT_EQ(r.pressures, 1);
	KVT_EXPECT_EQ(rig_free1(s, a, g[0]), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(r.pages_freed, 1);
	KVT_EXPECT_EQ(r.pressures, 1);
	r.now += 1100000000ull;
	rig_run(&r);
	KVT_EXPECT_EQ(r.pressure, 0);
	KVT_EXPECT_EQ(r.pressures, 2);
	rig_fini(&r);
}

/* A cache that is never found again gives before one that is above `high`. */
KVT_TEST(useless_caches_give_first)
{
	struct kvd_limits l = {
		.high_bytes = 10 * RIG_STRIDE, .max_bytes = 32 * RIG_STRIDE, .weight = 1};
	struct kvd_tenant *quiet, *noisy;
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_hit hits[16];
	bool deferred;
	u32 nr = 0;

	rig_init(&r, 4, 8);
	quiet = rig_tenant(&r, r.red, "quiet", 0, 0);
	noisy = rig_tenant(&r, r.red, "noisy", 0, 0);
	KVT_EXPECT_EQ(kvd_tenant_set_limits(&r.core, quiet, &l, &deferred), 0);
	KVT_EXPECT_EQ(kvd_tenant_set_limits(&r.core, noisy, &l, &deferred), 0);
	a = rig_client(&r, quiet, &s);
	b = rig_client(&r, noisy, &s2);
	rig_cache(&r, s, a, 1, 12);
	for (u32 i = 0; i < 60; i++) {
		rig_cache(&r, s2, b, 100 + i, 8);
		KVT_EXPECT_EQ(kvd_reclaim_pool(b->pool, noisy->index, 8, true), 8);
		rig_run(&r);
	}
	rig_cache(&r, s2, b, 99, 8);
	/* found again: of use */
	KVT_EXPECT_EQ(rig_lookup(s, a, 1, 12, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 12);
	for (u32 i = 0; i < nr; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, hits[i].grant), 0);
	KVT_EXPECT(quiet->account.cache_use > noisy->account.cache_use);
	KVT_EXPECT_EQ(kvd_reclaim_pool(a->pool, KVD_TENANTS_MAX, 5, false), 5);
	KVT_EXPECT_EQ(quiet->account.nr[KVD_CACHED], 12);
	KVT_EXPECT_EQ(noisy->account.nr[KVD_CACHED], 3);
	/* a quarter of high stays with it: then who is above high gives */
	KVT_EXPECT_EQ(kvd_reclaim_pool(a->pool, KVD_TENANTS_MAX, 2, false), 2);
	KVT_EXPECT(noisy->account.nr[KVD_CACHED] >= 2);
	KVT_EXPECT(quiet->account.nr[KVD_CACHED] < 12);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_MAIN()
