/* SPDX-License-Identifier: Apache-2.0 */
/* Magazines: pages stocked for a session, popped without kvmd, recalled; and junk in them. */
#include "tests/unit/own/common.h"

static struct rig r;

KVT_TEST(magazine_pages_are_stocked_popped_and_recognised)
{
	struct kv_page_ref ref;
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[4];
	u32 nr, pending;

	rig_init(&r, 2, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 8, 4, KV_GFP_NOWAIT, &nr, &pending), -EINVAL);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 2, 8, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(nr, 8);
	KVT_EXPECT_EQ(s->tenant->account.used_bytes, 8 * RIG_STRIDE);
	KVT_EXPECT_EQ(a->pool->table.shared->log_head.word, 8);
	rig_audit(&r);
	for (u32 i = 0; i < 3; i++) {
		KVT_EXPECT(rig_pop(s, 2, i, &g[i]));
		KVT_EXPECT_EQ(a->pool->table.tags[g[i].pfn], g[i].tag);
	}
	/* FREE, PIN and SEAL of popped pages are accepted */
	KVT_EXPECT_EQ(rig_free1(s, a, g[0]), 0);
	ref = (struct kv_page_ref){.pfn = g[1].pfn, .tag = g[1].tag};
	KVT_EXPECT_EQ(kvd_lease_pin(s, a, &ref, 1), 0);
	KVT_EXPECT_EQ(a->pool->frames[g[1].pfn].state, KVD_ACTIVE);
	/* one that is still in stock is not the session's */
	g[3].pfn = KV_MAG_PFN(s->page->magazines[2].slots[5].word);
	g[3].tag = s->page->magazines[2].slots[5].tag;
	KVT_EXPECT_EQ(rig_free1(s, a, g[3]), KV_STALE);
	rig_audit(&r);
	/* refill: popped slots are seen and filled again */
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 2, 64, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(a->pool->frames[g[2].pfn].state, KVD_ACTIVE);
	KVT_EXPECT_LE(3, nr);
	rig_audit(&r);
	rig_fini(&r);
}

/* Pop and recall race for one word; a popped page is never taken away. */
KVT_TEST(recall_does_not_take_a_popped_page)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_grant g, h[8];
	struct kvd_tenant *t;
	u32 nr, pending;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 8, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(nr, 8);
	KVT_EXPECT(rig_pop(s, 0, 4, &g));
	/* pressure of another session takes the seven others */
	KVT_EXPECT_EQ(rig_alloc(s2, b, 7, KV_GFP_NOWAIT, h), 0);
	for (u32 i = 0; i < 7; i++)
		KVT_EXPECT(h[i].pfn != g.pfn);
	KVT_EXPECT_EQ(a->pool->table.tags[g.pfn], g.tag);
	KVT_EXPECT_EQ(a->pool->frames[g.pfn].state, KVD_ACTIVE);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_PREFILL, h + 7), KV_FULL);
	for (u32 i = 0; i < 8; i++) {
		struct kv_grant no;

		KVT_EXPECT(!rig_pop(s, 0, i, &no));
	}
	rig_audit(&r);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_fini(&r);
}

/* What a hostile client writes into its session page harms nobody else. */
KVT_TEST(junk_in_a_magazine_is_ignored)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	struct kv_grant g;
	u32 nr, pending;

	rig_init(&r, 2, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	g = rig_alloc1(s2, b);
	for (u32 i = 0; i < KV_MAGAZINE_SLOTS; i += 2)
		s->page->magazines[0].slots[i].word = KV_MAG_STOCKED | g.pfn;
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 4, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(nr, 4);
	for (u32 i = 0; i < KV_MAGAZINE_SLOTS; i++) {
		s->page->magazines[0].slots[i].word = kvt_rand64() | KV_MAG_STOCKED;
		s->page->slots[i % 8].word = kvt_rand64();
	}
	kvd_lease_recall(a->pool);
	rig_audit(&r);
	KVT_EXPECT_EQ(b->pool->frames[g.pfn].state, KVD_ACTIVE);
	KVT_EXPECT_EQ(rig_free1(s2, b, g), 0);
	kvd_session_work_ended(s);
	rig_run(&r);
	KVT_EXPECT_EQ(kvd_pool_nr_used(b->pool), 0);
	rig_fini(&r);
}

KVT_MAIN()
