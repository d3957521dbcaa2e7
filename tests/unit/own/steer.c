/* SPDX-License-Identifier: Apache-2.0 */
/* What operators do: held prefixes, draining tenants, limits by revision. */
#include "kvmd/own/steer.h"
#include "tests/unit/own/common.h"

static struct rig r;

/* A cached run of @nr pages. Return: pfn of the last one */
static u32 cached_run(struct kvd_session *s, struct kvd_attach *a, u64 seq, u32 nr)
{
	struct kv_hit hits[16];
	u32 n = 0;

	rig_cache(&r, s, a, seq, nr);
	KVT_EXPECT_EQ(rig_lookup(s, a, seq, nr, hits, &n), 0);
	KVT_EXPECT_EQ(n, nr);
	for (u32 i = 0; i < n; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, hits[i].grant), 0);
	return hits[n - 1].grant.pfn;
}

static u32 found(struct kvd_session *s, struct kvd_attach *a, u64 seq, u32 nr)
{
	struct kv_hit hits[16];
	u32 n = 0;
	int ret = rig_lookup(s, a, seq, nr, hits, &n);

	KVT_EXPECT(ret == 0 || ret == KV_MISS);
	for (u32 i = 0; i < n; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, hits[i].grant), 0);
	return n;
}

/* Reclaim takes everything but the held prefix, whatever is asked of it. */
KVT_TEST(held_pages_stay)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_tenant *t;
	u32 last, nr = 0;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	last = cached_run(s, a, 1, 4);
	cached_run(s, a, 2, 4);
	KVT_EXPECT_EQ(kvd_steer_hold(a->pool, last, true, &nr), 0);
	KVT_EXPECT_EQ(nr, 4);
	KVT_EXPECT_EQ(kvd_steer_nr_held(a->pool, t), 0);
	KVT_EXPECT_EQ(kvd_steer_hold(a->pool, last, false, &nr), 0);
	KVT_EXPECT_EQ(kvd_steer_nr_held(a->pool, t), 4);
	KVT_EXPECT_EQ(kvd_steer_hold(a->pool, last, false, &nr), 0);
	KVT_EXPECT_EQ(nr, 0);
	rig_audit(&r);
	KVT_EXPECT_EQ(kvd_reclaim_pool(a->pool, t->index, 100, true), 4);
	rig_run(&r);
	KVT_EXPECT_EQ(found(s, a, 1, 4), 4);
	KVT_EXPECT_EQ(found(s, a, 2, 4), 0);
	rig_audit(&r);
	/* used by a reader in between: still held afterwards */
	KVT_EXPECT_EQ(kvd_reclaim_pool(a->pool, t->index, 100, true), 0);
	KVT_EXPECT_EQ(kvd_steer_unhold(a->pool, last, false, &nr), 0);
	KVT_EXPECT_EQ(nr, 4);
	KVT_EXPECT_EQ(kvd_steer_unhold(a->pool, last, false, &nr), -ENOENT);
	KVT_EXPECT_EQ(kvd_reclaim_pool(a->pool, t->index, 100, true), 4);
	rig_run(&r);
	rig_audit(&r);
	rig_fini(&r);
}

/* Two held branches share their first pages: these stay until both are let go. */
KVT_TEST(shared_parents_stay_for_the_other)
{
	struct kv_seal_ret rets[4];
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_tenant *t;
	struct kv_grant g;
	u32 trunk, twig, nr = 0;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	trunk = cached_run(s, a, 1, 2);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(rig_seal(s, a, &g, 1, 7, 2, a->pool->frames[trunk].key, rets), 0);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_run(&r);
	twig = g.pfn;
	KVT_EXPECT_EQ(kvd_steer_hold(a->pool, twig, false, &nr), 0);
	KVT_EXPECT_EQ(nr, 3);
	/* the trunk has a held child: letting it go lets nothing go */
	KVT_EXPECT_EQ(kvd_steer_unhold(a->pool, trunk, false, &nr), 0);
	KVT_EXPECT_EQ(nr, 0);
	KVT_EXPECT_EQ(kvd_steer_unhold(a->pool, twig, true, &nr), 0);
	KVT_EXPECT_EQ(nr, 3);
	KVT_EXPECT_EQ(kvd_steer_nr_held(a->pool, t), 3);
	KVT_EXPECT_EQ(kvd_steer_unhold(a->pool, twig, false, &nr), 0);
	KVT_EXPECT_EQ(kvd_steer_nr_held(a->pool, t), 0);
	KVT_EXPECT_EQ(kvd_steer_hold(a->pool, 31, false, &nr), -ENOENT);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_TEST(draining_gets_nothing_and_gives_back)
{
	struct kvd_drained d;
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t, *u;
	struct kv_grant g[4];
	u32 stocked, pending;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	u = rig_tenant(&r, r.red, "u", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, u, &s2);
	rig_cache(&r, s, a, 1, 4);
	rig_cache(&r, s2, b, 2, 4);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 4, KV_GFP_NOWAIT, &stocked, &pending), 0);
	kvd_steer_drain(&r.core, t, true, true, &d);
	KVT_EXPECT_EQ(d.evicted, 4);
	KVT_EXPECT_EQ(d.left_pages, 2 + stocked);
	KVT_EXPECT(!t->account.draining);
	kvd_steer_drain(&r.core, t, true, false, &d);
	KVT_EXPECT_EQ(d.evicted, 4);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, g + 2), KV_QUOTA);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 1, KV_GFP_NOWAIT, &stocked, &pending),
		      KV_QUOTA);
	rig_run(&r);
	/* what is in use stays in use, and neighbours keep what they have */
	KVT_EXPECT_EQ(t->account.nr[KVD_ACTIVE], 2);
	KVT_EXPECT_EQ(t->account.used_bytes, 2 * RIG_STRIDE);
	KVT_EXPECT_EQ(u->account.nr[KVD_CACHED], 4);
	KVT_EXPECT_EQ(rig_free1(s, a, g[0]), 0);
	KVT_EXPECT_EQ(rig_free1(s, a, g[1]), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(t->account.used_bytes, 0);
	kvd_steer_drain(&r.core, t, false, false, &d);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, g), 0);
	rig_audit(&r);
	rig_fini(&r);
}

/* Whatever way memory comes by: a page that a lookup brings back from a tier, too. */
KVT_TEST(draining_gets_nothing_back_from_a_tier)
{
	struct kvd_drained d;
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_tenant *t;
	u32 pfn = 0;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	kvd_steer_drain(&r.core, t, true, false, &d);
	KVT_EXPECT_EQ(kvd_restore_begin(t, a->pool, &pfn), KV_QUOTA);
	KVT_EXPECT_EQ(t->account.used_bytes, 0);
	KVT_EXPECT_EQ(t->account.nr[KVD_RESTORING], 0);
	kvd_steer_drain(&r.core, t, false, false, &d);
	KVT_EXPECT_EQ(kvd_restore_begin(t, a->pool, &pfn), 0);
	kvd_restore_fail(a->pool, pfn);
	rig_run(&r);
	KVT_EXPECT_EQ(t->account.used_bytes, 0);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_TEST(limits_by_revision)
{
	struct kvd_limits l = {
		.max_bytes = 4 * RIG_STRIDE, .high_bytes = 4 * RIG_STRIDE, .weight = 1};
	const char *field = "";
	struct kv_grant g[8];
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_tenant *t;
	u64 rev;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 8);
	a = rig_client(&r, t, &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_NOWAIT, g), 0);
	rev = t->revision;
	KVT_EXPECT_EQ(kvd_steer_limits(&r.core, t, &l, rev, true, &field),
		      KVD_STEER_DEFERRED);
	KVT_EXPECT_EQ(t->revision, rev);
	KVT_EXPECT_EQ(kvd_steer_limits(&r.core, t, &l, rev, false, &field),
		      KVD_STEER_DEFERRED);
	KVT_EXPECT_EQ(t->account.max_bytes, 4 * RIG_STRIDE);
	/* from an old reading: refused, nothing changed */
	l.max_bytes = 100 * RIG_STRIDE;
	KVT_EXPECT_EQ(kvd_steer_limits(&r.core, t, &l, rev, false, &field),
		      KVD_STEER_STALE);
	KVT_EXPECT_EQ(t->account.max_bytes, 4 * RIG_STRIDE);
	rev = t->revision;
	l.min_bytes = 33 * RIG_STRIDE;
	l.high_bytes = l.max_bytes;
	KVT_EXPECT_EQ(kvd_steer_limits(&r.core, t, &l, rev, false, &field),
		      KVD_STEER_CONFLICT);
	KVT_EXPECT_STR(field, "min");
	KVT_EXPECT_EQ(t->revision, rev);
	l.min_bytes = 0;
	KVT_EXPECT_EQ(kvd_steer_limits(&r.core, t, &l, rev, false, &field),
		      KVD_STEER_APPLIED);
	KVT_EXPECT_EQ(t->revision, rev + 1);
	KVT_EXPECT_STR(kvd_steered_str(KVD_STEER_CONFLICT), "conflict");
	rig_audit(&r);
	rig_fini(&r);
}

KVT_MAIN()
