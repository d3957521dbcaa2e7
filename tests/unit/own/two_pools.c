/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/own/alloc: a session with two pools. A magazine holds pages of one of them, and a
 * tenant at its max gives up its cache in the one for pages in the other.
 */
#include "tests/unit/own/common.h"

static struct rig r;

static struct kvd_attach *second_pool(struct kvd_session *s)
{
	struct kv_layout l = rig_layout(7);

	return rig_open(s, &l);
}

static bool pop(struct kvd_session *s, u32 mag, u32 slot)
{
	u32 pfn;
	u64 tag;
	int dirty;

	return kv_mag_pop(&s->page->magazines[mag].slots[slot], &pfn, &tag, &dirty);
}

KVT_TEST(a_magazine_is_of_one_pool)
{
	struct kvd_attach *a, *b;
	struct kvd_session *s;
	u32 nr = 77, pending;

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	b = second_pool(s);
	KVT_EXPECT(b->pool != a->pool);
	/* what no client may ask for */
	KVT_EXPECT_EQ(
		kvd_lease_stock(s, a, KV_MAGAZINES, 1, KV_GFP_NOWAIT, &nr, &pending),
		-EINVAL);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 1, 0, KV_GFP_NOWAIT, &nr, &pending), -EINVAL);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 1, 1, 1u << 31, &nr, &pending), -EINVAL);
	KVT_EXPECT_EQ(nr, 77);
	KVT_EXPECT_EQ(s->tenant->account.used_bytes, 0);
	/* tied to the pool of its first stock, until every page of it is popped */
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 1, 2, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(nr, 2);
	KVT_EXPECT_EQ(kvd_lease_stock(s, b, 1, 2, KV_GFP_NOWAIT, &nr, &pending), -EINVAL);
	KVT_EXPECT(pop(s, 1, 0));
	KVT_EXPECT_EQ(kvd_lease_stock(s, b, 1, 2, KV_GFP_NOWAIT, &nr, &pending), -EINVAL);
	KVT_EXPECT(pop(s, 1, 1));
	KVT_EXPECT_EQ(kvd_lease_stock(s, b, 1, 2, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(nr, 2);
	KVT_EXPECT_EQ(b->pool->nr[KVD_MAGAZINE], 2);
	KVT_EXPECT_EQ(a->pool->nr[KVD_MAGAZINE], 0);
	KVT_EXPECT_EQ(a->pool->nr[KVD_ACTIVE], 2);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_TEST(a_full_magazine_takes_nothing)
{
	struct kvd_attach *a;
	struct kvd_session *s;
	u32 nr, pending;
	u64 used;

	rig_init(&r, 16, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	KVT_EXPECT_EQ(
		kvd_lease_stock(s, a, 0, KV_MAGAZINE_SLOTS, KV_GFP_NOWAIT, &nr, &pending),
		0);
	KVT_EXPECT_EQ(nr, KV_MAGAZINE_SLOTS);
	used = s->tenant->account.used_bytes;
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 1, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(nr, 0);
	KVT_EXPECT_EQ(s->tenant->account.used_bytes, used);
	rig_audit(&r);
	rig_fini(&r);
}

/* Its own cache goes, wherever it is, and nobody else's. */
KVT_TEST(a_tenant_at_its_max_gives_up_cache_of_its_other_pool)
{
	struct kvd_attach *a, *b, *c;
	struct kvd_session *s, *s2;
	struct kvd_tenant *t, *other;
	struct kv_grant g[8];
	int rc = -1;

	rig_init(&r, 8, 8);
	t = rig_tenant(&r, r.red, "t", 0, 16);
	other = rig_tenant(&r, r.red, "other", 0, 0);
	a = rig_client(&r, t, &s);
	c = rig_client(&r, other, &s2);
	b = second_pool(s);
	rig_cache(&r, s, a, 1, 12);
	rig_cache(&r, s2, c, 2, 6);
	KVT_EXPECT(a->pool == c->pool);
	KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], 18);
	for (u32 i = 0; i < 10 && rc; i++) {
		rc = rig_alloc(s, b, 8, KV_GFP_PREFILL, g);
		KVT_EXPECT(rc == 0 || rc == KV_PENDING);
		rig_run(&r);
	}
	KVT_EXPECT_EQ(rc, 0);
	KVT_EXPECT_EQ(b->pool->nr[KVD_ACTIVE], 8);
	KVT_EXPECT_LE(t->account.used_bytes, 16 * RIG_STRIDE);
	KVT_EXPECT(a->pool->nr[KVD_CACHED] >= 6 && a->pool->nr[KVD_CACHED] <= 14);
	KVT_EXPECT_EQ(other->account.used_bytes, 6 * RIG_STRIDE);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_MAIN()
