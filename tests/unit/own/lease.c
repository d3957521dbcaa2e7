/* SPDX-License-Identifier: Apache-2.0 */
/* Leases: alloc, free, pin, revoke, forks; outcomes and what they leave behind. */
#include "tests/unit/own/common.h"

static struct rig r;

KVT_TEST(alloc_and_free_one_page)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g;

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	g = rig_alloc1(s, a);
	KVT_EXPECT(kv_tag_live(g.tag) && !kv_tag_sealed(g.tag));
	KVT_EXPECT_EQ(g.flags, 0);
	KVT_EXPECT_EQ(a->pool->table.shared->log_head.word, 1);
	KVT_EXPECT_EQ(a->pool->table.tags[g.pfn], g.tag);
	KVT_EXPECT_EQ(s->tenant->account.used_bytes, RIG_STRIDE);
	rig_audit(&r);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	KVT_EXPECT(a->pool->table.tags[g.pfn] > g.tag);
	KVT_EXPECT(!kv_tag_live(a->pool->table.tags[g.pfn]));
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 1);
	rig_audit(&r);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
	KVT_EXPECT_EQ(kvd_pool_nr_free(a->pool), 8);
	KVT_EXPECT_EQ(s->tenant->account.used_bytes, 0);
	rig_fini(&r);
}

/* P1: a page's word only grows, and no generation is on two pages. */
KVT_TEST(generations_never_repeat)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[16];
	u64 last = 0;

	rig_init(&r, 2, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	for (u32 round = 0; round < 50; round++) {
		KVT_EXPECT_EQ(rig_alloc(s, a, 16, KV_GFP_NOWAIT, g), 0);
		for (u32 i = 0; i < 16; i++) {
			KVT_EXPECT(kv_tag_gen(g[i].tag) > last);
			last = kv_tag_gen(g[i].tag);
		}
		rig_audit(&r);
		for (u32 i = 0; i < 16; i++)
			KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
		rig_run(&r);
	}
	rig_fini(&r);
}

/* All or nothing, with the outcome that says why (I10). */
KVT_TEST(outcomes_leave_nothing_behind)
{
	struct kv_grant g[32] = {0};
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_tenant *t;
	u32 pending = 0;

	rig_init(&r, 2, 8);
	t = rig_tenant(&r, r.red, "t", 0, 12);
	a = rig_client(&r, t, &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 0, KV_GFP_NOWAIT, g), -EINVAL);
	KVT_EXPECT_EQ(rig_alloc(s, a, KV_BATCH_MAX + 1, KV_GFP_NOWAIT, g), -EINVAL);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, 0x80, g), -EINVAL);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_ATOMIC, g),
		      KV_FULL); /* no extent, may not grow */
	KVT_EXPECT_EQ(rig_alloc(s, a, 13, KV_GFP_PREFILL, g), KV_QUOTA);
	KVT_EXPECT_EQ(t->account.used_bytes, 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 10, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 3, KV_GFP_PREFILL, g + 10), KV_QUOTA);
	KVT_EXPECT_EQ(g[10].pfn, 0);
	KVT_EXPECT_EQ(t->account.used_bytes, 10 * RIG_STRIDE);
	/* what waits in quarantine comes back: wait, do not preempt */
	rig_announce(s, 0, a->pool);
	for (u32 i = 0; i < 4; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
	KVT_EXPECT_EQ(kvd_lease_alloc(s, a, 5, KV_GFP_NOWAIT, g + 10, &pending),
		      KV_PENDING);
	KVT_EXPECT_EQ(pending, 4);
	KVT_EXPECT_EQ(kvd_lease_alloc(s, a, 7, KV_GFP_NOWAIT, g + 10, &pending),
		      KV_QUOTA);
	rig_audit(&r);
	rig_retire(s, 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 5, KV_GFP_NOWAIT, g + 10), 0);
	rig_fini(&r);
}

KVT_TEST(full_pool_says_full_and_reclaims_with_wait)
{
	struct kv_grant g[16];
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_hit hits[8];
	u32 nr, pending = 0;

	rig_init(&r, 2, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	rig_cache(&r, s, a, 1, 8);
	KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 9, KV_GFP_PREFILL, g + 8), KV_FULL);
	/* without WAIT nothing is reclaimed inside the call, but it is on its way */
	KVT_EXPECT_EQ(kvd_lease_alloc(s, a, 2, KV_GFP_NOWAIT, g + 8, &pending),
		      KV_PENDING);
	KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], 8);
	rig_run(&r);
	KVT_EXPECT_EQ(r.pages_freed, 1);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, g + 8), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_PREFILL, g + 10), 0);
	/* leaves first: what is left is the start of the sequence */
	KVT_EXPECT_EQ(rig_lookup(s, a, 1, 8, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 4);
	/* pinned pages are nobody's to take */
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, g + 12), KV_FULL);
	rig_audit(&r);
	rig_fini(&r);
}

/* A pin keeps its page, whatever the pressure. */
KVT_TEST(pinned_pages_are_not_evicted)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_hit hits[4];
	struct kv_grant g[8];
	struct kvd_tenant *t;
	u64 tag;
	u32 nr;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	rig_cache(&r, s, a, 1, 4);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 1, hits, &nr), 0);
	tag = hits[0].grant.tag;
	KVT_EXPECT_EQ(rig_alloc(s, a, 7, KV_GFP_PREFILL, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, g + 7), KV_FULL);
	KVT_EXPECT_EQ(a->pool->table.tags[hits[0].grant.pfn], tag);
	rig_audit(&r);
	KVT_EXPECT_EQ(rig_free1(s2, b, hits[0].grant), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, g + 7), 0);
	rig_fini(&r);
}

/* Two sessions, two hits each: four references, four UNPINs. */
KVT_TEST(references_are_counted_per_lease)
{
	struct kvd_session *s[2];
	struct kvd_attach *a[2];
	struct kv_hit hits[2];
	struct kvd_tenant *t;
	u32 nr;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a[0] = rig_client(&r, t, &s[0]);
	a[1] = rig_client(&r, t, &s[1]);
	rig_cache(&r, s[0], a[0], 1, 1);
	for (u32 i = 0; i < 4; i++)
		KVT_EXPECT_EQ(rig_lookup(s[i % 2], a[i % 2], 1, 1, hits, &nr), 0);
	KVT_EXPECT_EQ(a[0]->pool->frames[hits[0].grant.pfn].refs, 4);
	rig_audit(&r);
	for (u32 i = 0; i < 4; i++) {
		KVT_EXPECT_EQ(a[0]->pool->nr[KVD_CACHED], 0);
		KVT_EXPECT_EQ(rig_free1(s[i % 2], a[i % 2], hits[0].grant), 0);
		rig_audit(&r);
	}
	KVT_EXPECT_EQ(a[0]->pool->nr[KVD_CACHED], 1);
	KVT_EXPECT_EQ(rig_free1(s[0], a[0], hits[0].grant), KV_STALE);
	rig_fini(&r);
}

/* A page of another session, one that is gone and one that never was: the same answer. */
KVT_TEST(foreign_and_absent_pages_answer_alike)
{
	struct kv_page_ref refs[2];
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	struct kv_grant g, gone;
	u32 nr, first;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	g = rig_alloc1(s, a);
	gone = rig_alloc1(s, a);
	KVT_EXPECT_EQ(rig_free1(s, a, gone), 0);
	KVT_EXPECT_EQ(rig_free1(s2, b, g), KV_STALE);
	KVT_EXPECT_EQ(rig_free1(s2, b, gone), KV_STALE);
	refs[0] = (struct kv_page_ref){.pfn = 7, .tag = 0};
	KVT_EXPECT_EQ(kvd_lease_free(s2, b, refs, 1, &nr, &first), KV_STALE);
	KVT_EXPECT_EQ(kvd_lease_pin(s2, b, refs, 1), KV_STALE);
	refs[0].pfn = a->pool->geo.nr_pages;
	KVT_EXPECT_EQ(kvd_lease_free(s2, b, refs, 1, &nr, &first), -EINVAL);
	refs[0] = (struct kv_page_ref){.pfn = g.pfn, .reserved = 1, .tag = g.tag};
	KVT_EXPECT_EQ(kvd_lease_free(s, a, refs, 1, &nr, &first), -EINVAL);
	/* each on its own: the good one goes, the stale one is named */
	refs[0] = (struct kv_page_ref){.pfn = gone.pfn, .tag = gone.tag};
	refs[1] = (struct kv_page_ref){.pfn = g.pfn, .tag = g.tag};
	KVT_EXPECT_EQ(kvd_lease_free(s, a, refs, 2, &nr, &first), KV_STALE);
	KVT_EXPECT_EQ(nr, 1);
	KVT_EXPECT_EQ(first, 0);
	rig_fini(&r);
}

/* DIRTY until the page is sealed, also through a magazine and back. */
KVT_TEST(bytes_of_another_session_are_announced)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_seal_ret ret;
	struct kvd_tenant *t;
	struct kv_grant g;
	u32 nr, pending;

	rig_init(&r, 1, 1);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(g.flags & KV_GRANT_DIRTY, 0); /* from the driver: zero */
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_run(&r);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(g.flags & KV_GRANT_DIRTY, 0); /* its own bytes */
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_run(&r);
	/* stocked for s2, recalled without being popped: the bytes are still s's */
	KVT_EXPECT_EQ(kvd_lease_stock(s2, b, 0, 1, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT(s2->page->magazines[0].slots[0].word & KV_MAG_DIRTY);
	KVT_EXPECT_EQ(kvd_lease_recall(b->pool), 1);
	rig_run(&r);
	g = rig_alloc1(s2, b);
	KVT_EXPECT_EQ(g.flags & KV_GRANT_DIRTY, KV_GRANT_DIRTY);
	KVT_EXPECT_EQ(rig_free1(s2, b, g), 0);
	rig_run(&r);
	g = rig_alloc1(s2, b); /* nobody knows whether it was zeroed */
	KVT_EXPECT_EQ(g.flags & KV_GRANT_DIRTY, KV_GRANT_DIRTY);
	KVT_EXPECT_EQ(rig_seal(s2, b, &g, 1, 1, 0, NULL, &ret), 0);
	KVT_EXPECT_EQ(rig_free1(s2, b, g), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_PREFILL, &g), 0);
	KVT_EXPECT_EQ(g.flags & KV_GRANT_DIRTY, 0); /* written from end to end by s2 */
	rig_fini(&r);
}

KVT_TEST(clean_pages_go_first_when_asked_for)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g, h;

	rig_init(&r, 1, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT | KV_GFP_ZERO, &h), 0);
	KVT_EXPECT(h.pfn != g.pfn);
	h = rig_alloc1(s, a);
	KVT_EXPECT_EQ(h.pfn, g.pfn);
	rig_fini(&r);
}

/* cases O41 (Rapid-MLX 196): a copy is a page of its own; its source may go. */
KVT_TEST(o41_fork_gives_private_pages)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_page_ref src[2];
	struct kvd_tenant *t;
	struct kv_grant g, copy[2];
	u32 pending;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	g = rig_alloc1(s, a);
	src[0] = (struct kv_page_ref){.pfn = g.pfn, .tag = g.tag};
	KVT_EXPECT_EQ(kvd_fork(s2, b, src, 1, KV_GFP_NOWAIT, copy, &pending), KV_STALE);
	src[1] = src[0];
	KVT_EXPECT_EQ(kvd_fork(s, a, src, 2, KV_GFP_NOWAIT, copy, &pending), 0);
	KVT_EXPECT(copy[0].pfn != g.pfn && copy[1].pfn != g.pfn &&
		   copy[0].pfn != copy[1].pfn);
	KVT_EXPECT(kv_tag_gen(copy[0].tag) != kv_tag_gen(g.tag));
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(a->pool->frames[copy[0].pfn].state, KVD_ACTIVE);
	src[0].pfn = 999;
	KVT_EXPECT_EQ(kvd_fork(s, a, src, 1, KV_GFP_NOWAIT, copy, &pending), -EINVAL);
	rig_fini(&r);
}

/* Revoke kills a page in every state in which somebody may have it, and tells each
 * holder. */
KVT_TEST(revoke_takes_a_page_from_all_holders)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_seal_ret ret;
	struct kvd_tenant *t;
	struct kv_hit hit;
	struct kv_grant g;
	u32 nr, pending;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	g = rig_alloc1(s, a); /* ACTIVE */
	KVT_EXPECT_EQ(kvd_lease_revoke(a->pool, g.pfn, g.tag + 256), KV_STALE);
	KVT_EXPECT_EQ(kvd_lease_revoke(a->pool, g.pfn, g.tag), 0);
	KVT_EXPECT_EQ(r.revoked, 1);
	KVT_EXPECT_EQ(r.last_revoked.tag, g.tag);
	KVT_EXPECT_EQ(rig_free1(s, a, g), KV_STALE);
	g = rig_alloc1(s, a); /* SEALED, grace not over */
	rig_announce(s, 0, a->pool);
	KVT_EXPECT_EQ(rig_seal(s, a, &g, 1, 1, 0, NULL, &ret), 0);
	KVT_EXPECT_EQ(kvd_lease_revoke(a->pool, g.pfn, 0), 0);
	rig_audit(&r);
	rig_retire(s, 0);
	rig_run(&r);
	KVT_EXPECT_EQ(kvd_pool_nr_used(a->pool), 0);
	rig_cache(&r, s, a, 2, 1); /* SEALED with two readers */
	KVT_EXPECT_EQ(rig_lookup(s, a, 2, 1, &hit, &nr), 0);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 2, 1, &hit, &nr), 0);
	KVT_EXPECT_EQ(kvd_lease_revoke(a->pool, hit.grant.pfn, 0), 0);
	KVT_EXPECT_EQ(r.revoked, 4);
	KVT_EXPECT_EQ(rig_lookup(s, a, 2, 1, &hit, &nr), KV_MISS);
	rig_cache(&r, s, a, 3, 1); /* CACHED */
	KVT_EXPECT_EQ(rig_lookup(s, a, 3, 1, &hit, &nr), 0);
	KVT_EXPECT_EQ(rig_free1(s, a, hit.grant), 0);
	KVT_EXPECT_EQ(kvd_lease_revoke(a->pool, hit.grant.pfn, 0), 0);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 2, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT(rig_pop(s, 0, 0, &g)); /* MAGAZINE: one popped, one in stock */
	KVT_EXPECT_EQ(kvd_lease_revoke(a->pool, g.pfn, 0), 0);
	KVT_EXPECT_EQ(r.revoked, 5);
	rig_audit(&r);
	rig_run(&r);
	KVT_EXPECT_EQ(kvd_pool_nr_used(a->pool), 0);
	KVT_EXPECT_EQ(kvd_lease_revoke(a->pool, g.pfn, 0), KV_STALE);
	rig_fini(&r);
}

KVT_TEST(duplicates_are_sealed_but_not_found)
{
	struct kv_seal_ret r1[2], r2[2];
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_grant g[2], h[2];
	struct kvd_tenant *t;
	struct kv_hit hits[2];
	u32 nr;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 2, KV_GFP_NOWAIT, h), 0);
	KVT_EXPECT_EQ(rig_seal(s, a, g, 2, 1, 0, NULL, r1), 0);
	KVT_EXPECT_EQ(rig_seal(s2, b, h, 2, 1, 0, NULL, r2), 0);
	KVT_EXPECT_EQ(r1[1].flags, 0);
	KVT_EXPECT_EQ(r2[1].flags, KV_SEALED_DUP);
	KVT_EXPECT(!memcmp(r1[1].key, r2[1].key, KV_KEY_BYTES));
	rig_run(&r);
	rig_audit(&r);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), 0);
	KVT_EXPECT_EQ(hits[0].grant.pfn, g[0].pfn);
	KVT_EXPECT_EQ(rig_free1(s2, b, h[0]), 0);
	KVT_EXPECT_EQ(rig_free1(s2, b, h[1]), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(kvd_pool_nr_used(b->pool), 2); /* the duplicates are FREE */
	rig_fini(&r);
}

/* Two domains never meet: not in pages, not in keys, not in grace periods. */
KVT_TEST(domains_are_apart)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_hit hits[2];
	u32 nr;

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	b = rig_client(&r, rig_tenant(&r, r.blue, "u", 0, 0), &s2);
	KVT_EXPECT(a->pool != b->pool);
	KVT_EXPECT(memcmp(a->pool->root_key, b->pool->root_key, KV_KEY_BYTES));
	rig_cache(&r, s, a, 1, 2);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), KV_MISS);
	rig_announce(s2, 0, b->pool); /* blue's step does not hold red back */
	KVT_EXPECT_EQ(rig_free1(s, a, rig_alloc1(s, a)), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
	KVT_EXPECT_EQ(r.red->extent_bytes, 8 * RIG_STRIDE);
	rig_fini(&r);
}

KVT_TEST(incidents_keep_the_page_history)
{
	struct kv_incident in = {.request_id = 5, .step = 6, .bits = KV_BAD_GEN};
	const struct kvd_incident *i;
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g;

	rig_init(&r, 1, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_run(&r);
	in.pfn = g.pfn;
	in.expected = g.tag;
	KVT_EXPECT_EQ(kvd_incident_report(s, a, &in), 0);
	i = kvd_incident_get(&r.core.incidents, 1);
	KVT_EXPECT(i && i->client_id == s->id);
	KVT_EXPECT_STR(i->tenant, "t");
	KVT_EXPECT_EQ(i->nr_past, 4);
	KVT_EXPECT_EQ(i->past[1].event, KVD_EV_ALLOC);
	KVT_EXPECT_EQ(i->past[1].session, s->id);
	KVT_EXPECT_EQ(i->past[2].event, KVD_EV_FREE);
	KVT_EXPECT_EQ(i->past[3].event, KVD_EV_RELEASE);
	in.pfn = 0xffffffff;
	KVT_EXPECT_EQ(kvd_incident_report(s, a, &in), 0);
	KVT_EXPECT_EQ(kvd_incident_get(&r.core.incidents, 2)->nr_past, 0);
	in.reserved = 1;
	KVT_EXPECT_EQ(kvd_incident_report(s, a, &in), -EINVAL);
	in.reserved = 0;
	for (u32 n = 0; n < KVD_INCIDENTS; n++)
		KVT_EXPECT_EQ(kvd_incident_report(s, a, &in), 0);
	KVT_EXPECT(!kvd_incident_get(&r.core.incidents, 2));
	KVT_EXPECT(kvd_incident_get(&r.core.incidents, 3) != NULL);
	rig_fini(&r);
}

/*
 * A burst fills every extent; what stays lies scattered. As pages come and go the memory
 * held must fall to 1.3 times what is needed, and the rest go back to the driver.
 */
KVT_TEST(scattered_memory_goes_back)
{
	enum { EXTENTS = 32, EACH = 8, KEEP = 64 };
	struct kv_grant g[EXTENTS * EACH];
	u32 nr = EXTENTS * EACH, k;
	struct kvd_session *s;
	struct kvd_attach *a;

	rig_init(&r, EXTENTS, EACH);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	for (u32 i = 0; i < nr; i += EACH)
		KVT_EXPECT_EQ(rig_alloc(s, a, EACH, KV_GFP_PREFILL, g + i), 0);
	while (nr > KEEP) {
		k = kvt_rand_below(nr);
		KVT_EXPECT_EQ(rig_free1(s, a, g[k]), 0);
		g[k] = g[--nr];
	}
	rig_run(&r);
	for (u32 i = 0; i < 20 * KEEP; i++) {
		k = kvt_rand_below(nr);
		KVT_EXPECT_EQ(rig_free1(s, a, g[k]), 0);
		rig_run(&r);
		g[k] = rig_alloc1(s, a);
	}
	rig_audit(&r);
	/* idle extents go, one of them is kept for the next burst */
	r.now += 61ull * 1000000000;
	kvd_core_now(&r.core, r.now);
	rig_run(&r);
	printf("# %u of %u extents are left for %u pages\n", a->pool->nr_live_extents,
	       EXTENTS, KEEP);
	KVT_EXPECT(a->pool->nr_live_extents <= KEEP / EACH * 13 / 10 + 1);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_MAIN()
