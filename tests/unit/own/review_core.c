/* SPDX-License-Identifier: Apache-2.0 */
/* Rules that a review found broken once: stalls, index chains, growth beside promises. */
#include "tests/unit/own/common.h"
#include <errno.h>

static struct rig r;

/*
 * A session is a stall only while it holds something back. Its own domain's batch is over;
 * another domain's goes on waiting for somebody else.
 */
KVT_TEST(a_stall_is_told_only_of_those_who_hold_something_back)
{
	struct kvd_session *red, *red2, *blue, *blue2;
	struct kvd_attach *a, *b;

	rig_init(&r, 4, 64);
	a = rig_client(&r, rig_tenant(&r, r.red, "red", 0, 0), &red);
	rig_client(&r, r.core.tenants[0], &red2);
	b = rig_client(&r, rig_tenant(&r, r.blue, "blue", 0, 0), &blue);
	rig_client(&r, r.core.tenants[1], &blue2);
	rig_announce(red2, 0, a->pool);
	KVT_EXPECT_EQ(rig_free1(red, a, rig_alloc1(red, a)), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(red2->page->wake.word, 1);
	rig_announce(blue2, 0, b->pool);
	rig_announce(red2, 1, a->pool); /* behind red's kill, before blue's */
	KVT_EXPECT_EQ(rig_retire(red2, 0), 1);
	KVT_EXPECT_EQ(rig_free1(blue, b, rig_alloc1(blue, b)), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
	KVT_EXPECT_EQ(rig_quarantine(b->pool), 1);
	rig_retire(red2, 1);
	r.now += 2000000000ull;
	rig_run(&r);
	KVT_EXPECT_EQ(r.stalls, 1);
	KVT_EXPECT_EQ(r.stalled_id, blue2->id);
	KVT_EXPECT(!red2->reader.stalled);
	rig_retire(blue2, 0);
	rig_run(&r);
	rig_fini(&r);
}

/* What is over does not stay on the session: neither the stall nor the wish for kicks. */
KVT_TEST(a_stall_that_is_over_is_not_shown_any_more)
{
	struct kvd_session *s, *s2, *blue;
	struct kvd_attach *a, *b;

	rig_init(&r, 4, 64);
	a = rig_client(&r, rig_tenant(&r, r.red, "red", 0, 0), &s);
	rig_client(&r, r.core.tenants[0], &s2);
	b = rig_client(&r, rig_tenant(&r, r.blue, "blue", 0, 0), &blue);
	rig_announce(s2, 0, a->pool);
	KVT_EXPECT_EQ(rig_free1(s, a, rig_alloc1(s, a)), 0);
	rig_run(&r);
	r.now += 2000000000ull;
	rig_run(&r);
	KVT_EXPECT(s2->reader.stalled);
	rig_announce(s2, 1, a->pool);
	rig_retire(s2, 0);
	KVT_EXPECT_EQ(rig_free1(blue, b, rig_alloc1(blue, b)), 0); /* a later epoch */
	rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
	KVT_EXPECT(!s2->reader.stalled);
	KVT_EXPECT_EQ(s2->page->wake.word, 0);
	rig_retire(s2, 1);
	rig_fini(&r);
}

/*
 * The same where it is not the end of a turn that brings the end: a page whose grace
 * period is cancelled, and a batch that an allocation lets go.
 */
static void over_between_turns(bool cancelled)
{
	struct kvd_session *s, *s2;
	struct kv_seal_ret ret;
	struct kvd_attach *a;
	struct kv_grant g, more[64];

	rig_init(&r, 1, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "red", 0, 0), &s);
	rig_client(&r, r.core.tenants[0], &s2);
	g = rig_alloc1(s, a);
	rig_announce(s, 0, a->pool);
	rig_announce(s2, 0, a->pool);
	KVT_EXPECT_EQ(rig_seal(s, a, &g, 1, 1, 0, NULL, &ret), 0);
	rig_run(&r);
	r.now += 2000000000ull;
	rig_run(&r);
	KVT_EXPECT(s2->reader.stalled);
	KVT_EXPECT_EQ(s2->page->wake.word, 1);
	if (cancelled) {
		/* what a sealed page's revoke does; its own end waits for both */
		kvd_prefix_forget(a->pool, g.pfn);
	} else {
		rig_retire(s, 0);
		KVT_EXPECT_EQ(rig_alloc(s, a, 7, KV_GFP_NOWAIT, more), 0);
		KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, more + 7), KV_FULL);
	}
	KVT_EXPECT_EQ(kvd_grace_nr_waiting(&r.core.mm.grace), 0);
	rig_run(&r);
	KVT_EXPECT(!s2->reader.stalled);
	KVT_EXPECT_EQ(s2->page->wake.word, 0);
	rig_retire(s, 0);
	KVT_EXPECT_EQ(rig_retire(s2, 0), 0); /* no kick for nothing */
	rig_fini(&r);
}

KVT_TEST(a_stall_that_is_over_between_two_turns_is_not_shown)
{
	over_between_turns(true);
	over_between_turns(false);
}

static u32 longest_chain(const struct kvd_pool *pool)
{
	u32 longest = 0;

	for (u32 h = 0; h <= pool->hash_mask; h++) {
		u32 nr = 0;

		for (u32 at = pool->hash_heads[h]; at != KVD_PFN_NONE;
		     at = pool->links[at].hash_next)
			nr++;
		longest = KV_MAX(longest, nr);
	}
	return longest;
}

/*
 * The key of a page under a parent that the client names is no secret: a client can choose
 * tokens whose keys fall on one chain. Where an entry lies must not be his choice, or his
 * lookups take the loop's time from everybody.
 */
KVT_TEST(a_client_cannot_choose_its_chain_in_the_index)
{
	enum { NR = 128 };
	u32 tokens[KV_PAGE_TOKENS] = {0}, h;
	u8 key[KV_KEY_BYTES];
	struct kvd_session *s;
	struct kvd_attach *a;

	rig_init(&r, 4, 64);
	a = rig_client(&r, rig_tenant(&r, r.red, "red", 0, 0), &s);
	for (u32 i = 0; i < NR; i++) {
		struct kv_grant g = rig_alloc1(s, a);
		struct kv_seal_page page = {.pfn = g.pfn, .tag = g.tag};
		struct kv_seal_ret ret;
		struct kvd_seal_op op = {.s = s,
					 .a = a,
					 .pages = &page,
					 .tokens = tokens,
					 .rets = &ret,
					 .nr = 1};

		do {
			tokens[0]++;
			kvd_prefix_key(a->pool->fingerprint, op.arg.parent_key, tokens,
				       key);
			memcpy(&h, key, sizeof(h));
		} while (h & a->pool->hash_mask);
		KVT_EXPECT_EQ(kvd_seal_start(&op), 0);
		KVT_EXPECT_EQ(kvd_seal_step(&op), 0);
	}
	KVT_EXPECT_LE(longest_chain(a->pool), 10);
	rig_run(&r);
	rig_fini(&r);
}

/*
 * An orphan knows its parent by pfn and the low half of its generation. Generations can be
 * counted by a client, so it can bring the same half back on the same page.
 */
KVT_TEST(a_parent_generation_that_comes_round_is_no_damage)
{
	struct kv_seal_ret rets[2];
	struct kvd_gens *gens;
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[2], again;

	rig_init(&r, 4, 64);
	a = rig_client(&r, rig_tenant(&r, r.red, "red", 0, 0), &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_seal(s, a, g, 2, 5, 0, NULL, rets), 0);
	KVT_EXPECT_EQ(rig_free1(s, a, g[0]), 0);
	KVT_EXPECT_EQ(rig_free1(s, a, g[1]), 0);
	rig_run(&r);
	kvd_prefix_evict(a->pool, g[0].pfn);
	rig_run(&r);
	gens = &r.core.mm.gens;
	gens->next = kv_tag_gen(g[0].tag) + (1ull << 32);
	gens->end = gens->next + KVD_GEN_BLOCK;
	r.gens.next = gens->end;
	r.gens.bound = gens->end + KVD_GEN_BOUND_AHEAD;
	again = rig_alloc1(s, a);
	KVT_EXPECT_EQ(again.pfn, g[0].pfn);
	KVT_EXPECT_EQ(rig_seal(s, a, &again, 1, 6, 0, NULL, rets), 0);
	rig_run(&r);
	kvd_prefix_evict(a->pool, g[1].pfn);
	rig_run(&r);
	rig_fini(&r);
}

static int grow_beside(u32 min)
{
	struct kv_layout other = rig_layout(9);
	struct kv_grant g[3 * 64], one;
	struct kvd_session *red, *blue;
	struct kvd_attach *a, *b, *b2;
	u32 removed;
	int ret;

	rig_init(&r, 4, 64);
	a = rig_client(&r, rig_tenant(&r, r.red, "red", min, 0), &red);
	b = rig_client(&r, rig_tenant(&r, r.blue, "blue", 0, 0), &blue);
	rig_alloc1(red, a);
	KVT_EXPECT_EQ(rig_alloc(blue, b, 3 * 64, KV_GFP_NOWAIT, g), 0);
	for (u32 i = 0; i < 3 * 64; i++)
		KVT_EXPECT_EQ(rig_free1(blue, b, g[i]), 0);
	rig_run(&r);
	b2 = rig_open(blue, &other);
	removed = r.removed;
	ret = rig_alloc(blue, b2, 1, KV_GFP_NOWAIT, &one);
	if (ret == KV_PENDING) {
		KVT_EXPECT_EQ(r.removed, removed + 1);
		for (u32 i = 0; i < b->pool->nr_extents; i++) {
			struct kv_extent_ref ref = {.index = i,
						    .serial = b->pool->extents[i].serial};

			if (b->pool->extents[i].state == KVD_EXTENT_DRAINING)
				KVT_EXPECT_EQ(
					kvd_session_unmapped(blue, b->pool->id, &ref), 0);
		}
		ret = rig_alloc(blue, b2, 1, KV_GFP_NOWAIT, &one);
	}
	rig_run(&r);
	rig_fini(&r);
	return ret;
}

/* A promise that is kept already does not stop others from moving their free extents. */
KVT_TEST(a_min_that_is_met_does_not_stop_growth_from_idle_extents)
{
	KVT_EXPECT_EQ(grow_beside(0), 0);
	KVT_EXPECT_EQ(grow_beside(64), 0);
}

/* ... and a growing pool does not take the extent that another domain's min needs. */
KVT_TEST(idle_extents_under_a_min_stay_where_they_are)
{
	struct kv_layout other = rig_layout(9);
	struct kv_grant g[3 * 64], one;
	struct kvd_session *red, *blue;
	struct kvd_attach *a, *b, *b2;

	rig_init(&r, 4, 64);
	a = rig_client(&r, rig_tenant(&r, r.red, "red", 64, 0), &red);
	b = rig_client(&r, rig_tenant(&r, r.blue, "blue", 0, 0), &blue);
	KVT_EXPECT_EQ(rig_free1(red, a, rig_alloc1(red, a)), 0);
	KVT_EXPECT_EQ(rig_alloc(blue, b, 3 * 64, KV_GFP_NOWAIT, g), 0);
	rig_run(&r);
	b2 = rig_open(blue, &other);
	KVT_EXPECT_EQ(rig_alloc(blue, b2, 1, KV_GFP_NOWAIT, &one), KV_FULL);
	KVT_EXPECT_EQ(a->pool->nr_live_extents, 1);
	rig_fini(&r);
}

/* A stock that takes fewer pages than it asked for is no refusal and no pressure. */
KVT_TEST(a_smaller_stock_is_no_refusal)
{
	struct kv_grant g[4 * 64 - 9];
	struct kvd_session *s;
	struct kvd_tenant *t;
	struct kvd_attach *a;
	u32 nr = 0, pending = 0;

	rig_init(&r, 4, 64);
	t = rig_tenant(&r, r.red, "red", 0, 5);
	a = rig_client(&r, t, &s);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 32, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(nr, 4);
	KVT_EXPECT_EQ(t->quota_refusals, 0);
	a = rig_client(&r, rig_tenant(&r, r.blue, "blue", 0, 0), &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 3 * 64 - 9, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 32, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(nr, 8);
	KVT_EXPECT_EQ(s->tenant->full_refusals, 0);
	rig_run(&r);
	KVT_EXPECT_LE(r.pressure, 1); /* few pages are free: some, not full */
	rig_fini(&r);
}

/* Places for pools are few: whoever takes many leaves one for every other domain. */
KVT_TEST(every_domain_finds_a_place_for_its_first_pool)
{
	struct kvd_tenant *red, *blue;
	struct kvd_attach *a;
	struct kvd_session *s = NULL;
	struct kvd_refusal why;
	struct kv_layout l;
	u32 nr = 0;
	int ret;

	rig_init(&r, 4, 64);
	red = rig_tenant(&r, r.red, "red", 0, 0);
	blue = rig_tenant(&r, r.blue, "blue", 0, 0);
	do {
		if (nr % KV_POOLS_MAX == 0)
			s = rig_session(&r, red);
		l = rig_layout(100 + nr);
		ret = kvd_session_open_pool(s, &l, NULL, &a, &why);
	} while (!ret && nr++ < 1000);
	KVT_EXPECT_EQ(ret, -ENOSPC);
	KVT_EXPECT_EQ(nr, KVD_POOLS_MAX - 1);
	l = rig_layout(1);
	s = rig_session(&r, blue);
	a = rig_open(s, &l);
	rig_alloc1(s, a);
	l = rig_layout(2);
	KVT_EXPECT_EQ(kvd_session_open_pool(s, &l, NULL, &a, &why), -ENOSPC);
	rig_fini(&r);
}

/* I10: the refusal of a seventeenth pool leaves no pool behind. */
KVT_TEST(a_refused_pool_is_not_made)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_refusal why;
	struct kv_layout l;
	u32 nr = 0;

	rig_init(&r, 4, 64);
	s = rig_session(&r, rig_tenant(&r, r.red, "red", 0, 0));
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		l = rig_layout(i);
		rig_open(s, &l);
	}
	l = rig_layout(KV_POOLS_MAX);
	KVT_EXPECT_EQ(kvd_session_open_pool(s, &l, NULL, &a, &why), -EMFILE);
	for (u32 i = 0; i < KVD_POOLS_MAX; i++)
		nr += r.core.mm.pools[i] != NULL;
	KVT_EXPECT_EQ(nr, KV_POOLS_MAX);
	l = rig_layout(3); /* one that is open is opened again */
	KVT_EXPECT(rig_open(s, &l) == &s->attach[3]);
	rig_fini(&r);
}

KVT_MAIN()
