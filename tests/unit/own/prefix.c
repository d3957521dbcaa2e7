/* SPDX-License-Identifier: Apache-2.0 */
/* SEAL and LOOKUP in slices: what a turn may do, and what happens between two turns. */
#include "tests/unit/own/common.h"
#include "kvmd/own/walk.h"

static struct rig r;
static struct kvd_session *s, *s2;
static struct kvd_attach *a, *b;
static u32 tokens[64 * KV_PAGE_TOKENS];
static struct kv_hit hits[64];

static void setup(u32 nr_pages)
{
	struct kvd_tenant *t;

	rig_init(&r, 2, 64);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	rig_cache(&r, s, a, 1, nr_pages);
	for (u32 i = 0; i < 64; i++)
		rig_tokens(1, i, tokens + i * KV_PAGE_TOKENS);
}

/* As after a restart: entries that only their keys find. */
static void forget_walks(void)
{
	for (u32 pfn = 0; pfn < a->pool->geo.nr_pages; pfn++)
		kvd_walk_del(a->pool, pfn);
}

static struct kvd_lookup_op lookup_op(u32 nr_tokens, u32 max_pages, u32 room)
{
	struct kvd_lookup_op op = {.s = s2,
				   .a = b,
				   .tokens = tokens,
				   .nr_tokens = nr_tokens,
				   .max_pages = max_pages,
				   .hits = hits,
				   .hits_max = room};

	return op;
}

KVT_TEST(lookup_hashes_16_pages_a_turn)
{
	struct kvd_lookup_op op;

	setup(40);
	forget_walks();
	op = lookup_op(64 * KV_PAGE_TOKENS, 0, 64);
	KVT_EXPECT_EQ(kvd_lookup_start(&op), 0);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), -EAGAIN);
	/* The entries of the last three are still coming in. */
	KVT_EXPECT_EQ(op.hashed, KVD_HASH_SLICE);
	KVT_EXPECT_EQ(op.nr, KVD_HASH_SLICE - KVD_LOOKUP_KEYS + 1);
	KVT_EXPECT_EQ(b->nr_held, op.nr);
	/* what is pinned cannot go between two turns, what is not yet may */
	KVT_EXPECT_EQ(kvd_reclaim_pool(a->pool, s->tenant->index, 10, false), 10);
	rig_run(&r);
	rig_audit(&r);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), -EAGAIN);
	KVT_EXPECT_EQ(op.hashed, 2 * KVD_HASH_SLICE);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), 0);
	KVT_EXPECT_EQ(op.nr, 30);
	for (u32 i = 0; i < op.nr; i++)
		KVT_EXPECT_EQ(rig_free1(s2, b, hits[i].grant), 0);
	rig_fini(&r);
}

KVT_TEST(lookup_stops_where_it_is_told)
{
	struct kvd_lookup_op op;

	setup(40);
	forget_walks();
	op = lookup_op(20 * KV_PAGE_TOKENS + 63, 0, 64); /* the last page is not whole */
	KVT_EXPECT_EQ(kvd_lookup_start(&op), 0);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), -EAGAIN);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), 0);
	KVT_EXPECT_EQ(op.nr, 20);
	op = lookup_op(40 * KV_PAGE_TOKENS, 16, 64);
	KVT_EXPECT_EQ(kvd_lookup_start(&op), 0);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), 0);
	KVT_EXPECT_EQ(op.nr, 16);
	op = lookup_op(40 * KV_PAGE_TOKENS, 0, 3);
	KVT_EXPECT_EQ(kvd_lookup_start(&op), 0);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), 0);
	KVT_EXPECT_EQ(op.nr, 3);
	op = lookup_op(63, 0, 3);
	KVT_EXPECT_EQ(kvd_lookup_start(&op), 0);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), KV_MISS);
	op = lookup_op(KV_LOOKUP_MAX + 1, 0, 3);
	KVT_EXPECT_EQ(kvd_lookup_start(&op), -EINVAL);
	KVT_EXPECT_EQ(a->pool->frames[hits[0].grant.pfn].refs, 3);
	rig_audit(&r);
	rig_fini(&r);
}

static void expect_run(u32 nr, bool at_once)
{
	struct kvd_lookup_op op = lookup_op(64 * KV_PAGE_TOKENS, 0, 64);

	KVT_EXPECT_EQ(kvd_lookup_start(&op), 0);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), at_once ? 0 : -EAGAIN);
	while (!at_once && kvd_lookup_step(&op) == -EAGAIN)
		;
	KVT_EXPECT_EQ(op.nr, nr);
	for (u32 i = 0; i < op.nr; i++) {
		KVT_EXPECT(!memcmp(a->pool->tokens + hits[i].grant.pfn * KV_PAGE_TOKENS,
				   tokens + i * KV_PAGE_TOKENS, KV_PAGE_TOKENS * 4));
		KVT_EXPECT_EQ(rig_free1(s2, b, hits[i].grant), 0);
	}
	rig_run(&r);
	rig_audit(&r);
}

/* 40 pages in one turn: no key was computed on the way. */
KVT_TEST(walk_finds_known_pages_without_keys)
{
	setup(40);
	expect_run(40, true);
	forget_walks();
	expect_run(40, false); /* by keys, which enters them again */
	expect_run(40, true);
	rig_fini(&r);
}

/* A page in the middle goes and comes back under another pfn and generation: what came
 * after it is found by its key once, then by the walk again. */
KVT_TEST(walk_goes_on_after_a_parent_came_back)
{
	struct kv_seal_ret ret;
	struct kv_grant g;
	u32 nr;

	setup(40);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 40, hits, &nr), 0);
	for (u32 i = 0; i < nr; i++)
		KVT_EXPECT_EQ(rig_free1(s2, b, hits[i].grant), 0);
	KVT_EXPECT_EQ(kvd_lease_revoke(a->pool, hits[9].grant.pfn, hits[9].grant.tag), 0);
	rig_run(&r);
	expect_run(9, true);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(rig_seal(s, a, &g, 1, 1, 9, hits[8].key, &ret), 0);
	rig_run(&r);
	KVT_EXPECT(!memcmp(ret.key, hits[9].key, KV_KEY_BYTES));
	expect_run(40, true);
	KVT_EXPECT_EQ(a->pool->frames[hits[10].grant.pfn].parent, g.pfn);
	KVT_EXPECT_EQ(a->pool->links[hits[10].grant.pfn].walk_parent, kv_tag_gen(g.tag));
	expect_run(40, true);
	rig_fini(&r);
}

/* All hashes collide: tokens and parent decide. Two sequences whose second pages hold the
 * same tokens, and a third that has only the first page. */
KVT_TEST(walk_believes_no_hash)
{
	struct kv_seal_ret rets[2];
	struct kv_grant g[2];
	u32 nr;

	setup(1);
	a->pool->key_bits = 0;
	for (u64 seq = 2; seq < 4; seq++) {
		KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, g), 0);
		KVT_EXPECT_EQ(rig_seal(s, a, g, 1, seq, 0, NULL, rets), 0);
		if (seq == 2)
			KVT_EXPECT_EQ(
				rig_seal(s, a, g + 1, 1, 9, 1, rets[0].key, rets + 1), 0);
		rig_run(&r);
	}
	rig_tokens(2, 0, tokens);
	rig_tokens(9, 1, tokens + KV_PAGE_TOKENS);
	expect_run(2, true);
	rig_tokens(3, 0, tokens); /* its second page was never computed */
	expect_run(1, true);
	rig_tokens(9, 1, tokens); /* that page is no first page */
	KVT_EXPECT_EQ(rig_lookup(s2, b, 7, 2, hits, &nr), KV_MISS);
	rig_audit(&r);
	rig_fini(&r);
}

/*
 * A lookup that goes on over many turns stands on the page it found last. Whoever gives up
 * that reference meanwhile (FREE beside a parked PREFETCH, a revoke) lets the pfn be
 * another page by the next turn: what is found then is not its child.
 */
static struct kvd_lookup_op stands_on(u32 *ret_parent)
{
	struct kvd_lookup_op op;
	u32 nr_seen;

	setup(40);
	forget_walks();
	op = lookup_op(40 * KV_PAGE_TOKENS, 0, 64);
	KVT_EXPECT_EQ(kvd_lookup_start(&op), 0);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), -EAGAIN);
	nr_seen = op.nr;
	*ret_parent = op.parent;
	KVT_EXPECT_EQ(hits[nr_seen - 1].grant.pfn, op.parent);
	KVT_EXPECT_EQ(rig_free1(s2, b, hits[nr_seen - 1].grant), 0);
	kvd_prefix_evict(a->pool, op.parent);
	rig_run(&r);
	KVT_EXPECT_EQ(a->pool->frames[op.parent].state, KVD_FREE);
	return op;
}

/* A page of @s in that very frame. */
static void alloc_pfn(u32 pfn)
{
	struct kv_grant g[128];
	u32 nr = 0;

	do
		g[nr] = rig_alloc1(s, a);
	while (g[nr++].pfn != pfn);
	for (u32 i = 0; i + 1 < nr; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
}

/* Everything found is let go, and everything is evicted: the tree's counts are right. */
static void all_goes(struct kvd_lookup_op *op)
{
	u32 nr, first;

	while (kvd_lookup_step(op) == -EAGAIN)
		;
	for (u32 i = 0; i < op->nr; i++) {
		struct kv_page_ref ref = {.pfn = hits[i].grant.pfn,
					  .tag = hits[i].grant.tag};

		kvd_lease_free(s2, b, &ref, 1, &nr, &first); /* one is gone: STALE */
	}
	rig_run(&r);
	rig_audit(&r);
	kvd_reclaim_pool(a->pool, s->tenant->index, 128, true);
	rig_run(&r);
	KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], 0);
	rig_audit(&r);
	rig_fini(&r);
}

static void seal_pfn(u32 pfn, u64 seq, u32 page, const u8 *parent_key)
{
	struct kv_seal_ret ret;
	struct kv_grant g = {.pfn = pfn, .tag = a->pool->frames[pfn].tag};

	KVT_EXPECT_EQ(rig_seal(s, a, &g, 1, seq, page, parent_key, &ret), 0);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_run(&r);
}

KVT_TEST(a_page_found_in_its_parents_old_place_is_not_its_own_parent)
{
	u32 parent, page;
	struct kvd_lookup_op op = stands_on(&parent);

	page = op.nr;
	/* the page behind it comes again, in the frame that the one before it had */
	for (u32 pfn = 0; pfn < a->pool->geo.nr_pages; pfn++) {
		if (a->pool->frames[pfn].state == KVD_CACHED &&
		    !memcmp(a->pool->tokens + (u64)pfn * KV_PAGE_TOKENS,
			    tokens + page * KV_PAGE_TOKENS, KV_PAGE_TOKENS * sizeof(u32)))
			kvd_prefix_evict(a->pool, pfn);
	}
	alloc_pfn(parent);
	seal_pfn(parent, 1, page, hits[page - 1].key);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), -EAGAIN);
	KVT_EXPECT_EQ(hits[page].grant.pfn, parent);
	KVT_EXPECT(kvd_prefix_parent(a->pool, parent) != parent);
	all_goes(&op);
}

KVT_TEST(a_page_is_no_child_of_what_came_into_its_parents_place)
{
	u32 parent, page;
	struct kvd_lookup_op op = stands_on(&parent);

	page = op.nr;
	alloc_pfn(parent);
	seal_pfn(parent, 7, 0, NULL); /* a sequence of its own begins there */
	KVT_EXPECT_EQ(kvd_lookup_step(&op), -EAGAIN);
	KVT_EXPECT(op.nr > page);
	KVT_EXPECT_EQ(kvd_prefix_parent(a->pool, hits[page].grant.pfn), KVD_PFN_NONE);
	all_goes(&op);
}

/* The session dies between two turns: the pins of the first one drop with it. */
KVT_TEST(lookup_of_a_dead_session_leaves_no_pin)
{
	struct kvd_lookup_op op;

	setup(40);
	forget_walks();
	op = lookup_op(40 * KV_PAGE_TOKENS, 0, 64);
	KVT_EXPECT_EQ(kvd_lookup_start(&op), 0);
	KVT_EXPECT_EQ(kvd_lookup_step(&op), -EAGAIN);
	kvd_session_work_ended(s2);
	rig_run(&r);
	KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], 40);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_TEST(seal_hashes_in_slices_and_commits_at_once)
{
	static struct kv_seal_page pages[40];
	static struct kv_seal_ret rets[40];
	struct kv_grant g[40];
	struct kvd_seal_op op;
	u32 nr;

	setup(1);
	KVT_EXPECT_EQ(rig_alloc(s, a, 40, KV_GFP_NOWAIT, g), 0);
	for (u32 i = 0; i < 40; i++)
		pages[i] = (struct kv_seal_page){.pfn = g[i].pfn, .tag = g[i].tag};
	op = (struct kvd_seal_op){
		.s = s, .a = a, .pages = pages, .tokens = tokens, .rets = rets, .nr = 40};
	op.arg.flags = KV_SEAL_ROOT;
	KVT_EXPECT_EQ(kvd_seal_start(&op), 0);
	KVT_EXPECT_EQ(kvd_seal_step(&op), -EAGAIN);
	KVT_EXPECT_EQ(kvd_seal_step(&op), -EAGAIN);
	KVT_EXPECT_EQ(a->pool->nr[KVD_SEALED], 0);
	/* a page of it goes between two turns: nothing is sealed */
	KVT_EXPECT_EQ(rig_free1(s, a, g[3]), 0);
	KVT_EXPECT_EQ(kvd_seal_step(&op), KV_STALE);
	KVT_EXPECT_EQ(a->pool->nr[KVD_SEALED], 0);
	rig_audit(&r);
	/* again, without it: page 0 is there already, the rest hangs on the entry that is
	 */
	op.nr = 3;
	KVT_EXPECT_EQ(kvd_seal_start(&op), 0);
	KVT_EXPECT_EQ(kvd_seal_step(&op), 0);
	KVT_EXPECT_EQ(rets[0].flags, KV_SEALED_DUP);
	KVT_EXPECT_EQ(rets[1].flags, 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 3, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 3);
	KVT_EXPECT(hits[0].grant.pfn != g[0].pfn && hits[1].grant.pfn == g[1].pfn);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_TEST(seal_arguments_are_checked)
{
	struct kv_seal_page page = {.pfn = 1};
	struct kv_seal_ret ret;
	struct kvd_seal_op op, good;

	setup(1);
	good = (struct kvd_seal_op){
		.s = s, .a = a, .pages = &page, .tokens = tokens, .rets = &ret, .nr = 1};
	op = good;
	KVT_EXPECT_EQ(kvd_seal_start(&op), 0);
	op.nr = 0;
	KVT_EXPECT_EQ(kvd_seal_start(&op), -EINVAL);
	op.nr = KV_BATCH_MAX + 1;
	KVT_EXPECT_EQ(kvd_seal_start(&op), -EINVAL);
	op = good;
	op.arg.flags = 4;
	KVT_EXPECT_EQ(kvd_seal_start(&op), -EINVAL);
	op = good;
	op.arg.reserved[2] = 1;
	KVT_EXPECT_EQ(kvd_seal_start(&op), -EINVAL);
	op = good;
	page.pfn = a->pool->geo.nr_pages;
	KVT_EXPECT_EQ(kvd_seal_start(&op), -EINVAL);
	rig_fini(&r);
}

/* References of one lease are bounded; the hit that would go over is not given. */
KVT_TEST(references_do_not_overflow)
{
	struct kv_page_ref ref;
	u32 nr;

	setup(1);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 1, hits, &nr), 0);
	ref = (struct kv_page_ref){.pfn = hits[0].grant.pfn, .tag = hits[0].grant.tag};
	for (u32 i = 1; i < KVD_LEASE_REFS_MAX; i++)
		KVT_EXPECT_EQ(kvd_lease_pin(s2, b, &ref, 1), 0);
	KVT_EXPECT_EQ(kvd_lease_pin(s2, b, &ref, 1), -EOVERFLOW);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 1, hits, &nr), KV_MISS);
	KVT_EXPECT_EQ(a->pool->frames[ref.pfn].refs, KVD_LEASE_REFS_MAX);
	rig_audit(&r);
	kvd_session_work_ended(s2);
	rig_run(&r);
	KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], 1);
	rig_fini(&r);
}

KVT_MAIN()
