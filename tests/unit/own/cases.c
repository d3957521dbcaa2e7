/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Real failures of other systems as tests of the core, named as in the case list
 * (docs/testing.md). One thread plays kvmd and its clients.
 */
#include <errno.h>

#include "tests/unit/own/common.h"

static struct rig r;

/* sglang#24527: abort freed pages while the sender's DMA was still to land in them. */
KVT_TEST(o21_abort_while_writer_in_flight)
{
	struct kv_grant g[8], h[8];
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	u32 pending = 0;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(rig_alloc(s, a, 4, KV_GFP_NOWAIT, g), 0);
	rig_announce(s, 3, a->pool); /* the step that still writes g[0] */
	KVT_EXPECT_EQ(rig_free1(s, a, g[0]), 0);
	for (u32 i = 0; i < 20; i++)
		rig_run(&r);
	KVT_EXPECT_EQ(a->pool->frames[g[0].pfn].state, KVD_QUARANTINE);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 4, KV_GFP_PREFILL, h), 0);
	for (u32 i = 0; i < 4; i++)
		KVT_EXPECT(h[i].pfn != g[0].pfn);
	KVT_EXPECT_EQ(kvd_lease_alloc(s2, b, 1, KV_GFP_PREFILL, h, &pending), KV_PENDING);
	KVT_EXPECT_EQ(pending, 1);
	KVT_EXPECT_EQ(rig_retire(s, 3), 1); /* kvmd waits: it wants a kick */
	rig_run(&r);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_NOWAIT, h), 0);
	KVT_EXPECT_EQ(h[0].pfn, g[0].pfn);
	rig_fini(&r);
}

/* The same when the writer's process hangs up: its work on pages may go on. */
KVT_TEST(o21_hangup_is_not_the_end_of_work)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_grant g[8], h;
	struct kvd_tenant *t;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_NOWAIT, g), 0);
	rig_announce(s, 0, a->pool);
	kvd_session_end(s, "hang-up");
	for (u32 i = 0; i < 20; i++)
		rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(b->pool), 8);
	KVT_EXPECT_EQ(r.reaped, 0);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_PREFILL, &h), KV_PENDING);
	kvd_session_work_ended(s); /* the proof of death */
	rig_run(&r);
	KVT_EXPECT_EQ(r.reaped, 1);
	KVT_EXPECT_EQ(rig_quarantine(b->pool), 0);
	KVT_EXPECT_EQ(rig_alloc(s2, b, 1, KV_GFP_NOWAIT, &h), 0);
	rig_fini(&r);
}

struct o23_client {
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[3];
	u32 have;
	bool stepping, done;
};

static void o23_drop(struct o23_client *c)
{
	for (u32 i = 0; i < c->have; i++)
		KVT_EXPECT_EQ(rig_free1(c->s, c->a, c->g[i]), 0);
	c->have = 0;
}

/* One tick of a client: frees happen while its step is announced, so all of them are
 * deferred. */
static void o23_tick(struct o23_client *c, bool one_by_one)
{
	int rc = 0;

	if (c->stepping) {
		o23_drop(c);
		rig_retire(c->s, 0);
		c->stepping = false;
		c->done = true;
		return;
	}
	while (c->have < 3 && rc == 0) {
		u32 nr = one_by_one ? 1 : 3;

		rc = rig_alloc(c->s, c->a, nr, KV_GFP_PREFILL, c->g + c->have);
		if (rc == 0)
			c->have += nr;
	}
	if (rc == KV_FULL)
		o23_drop(c); /* preempted: starts again */
	else if (rc == 0 && c->have == 3) {
		rig_announce(c->s, 0, c->a->pool);
		c->stepping = true;
	} else {
		KVT_EXPECT_EQ(rc, KV_PENDING);
	}
}

/* vllm#49674: frees wait for steps, steps wait for pages, and nothing moves any more. */
KVT_TEST(o23_deferral_that_never_ends)
{
	for (u32 one_by_one = 0; one_by_one < 2; one_by_one++) {
		struct o23_client c[4] = {0};
		struct kvd_tenant *t;
		u32 tick, done = 0, before = 0;

		rig_init(&r, 1, 8);
		t = rig_tenant(&r, r.red, "t", 0, 0);
		for (u32 i = 0; i < 4; i++)
			c[i].a = rig_client(&r, t, &c[i].s);
		for (tick = 0; tick < 64 && done < 4; tick++) {
			for (u32 i = 0; i < 4; i++) {
				if (!c[i].done)
					o23_tick(&c[i], one_by_one);
			}
			rig_run(&r);
			rig_audit(&r);
			done = 0;
			for (u32 i = 0; i < 4; i++)
				done += c[i].done;
			/* somebody finishes in every 16 ticks */
			if (tick % 16 == 15) {
				KVT_EXPECT(done > before);
				before = done;
			}
		}
		KVT_EXPECT_EQ(done, 4);
		KVT_NOTE("%s: all done after %u ticks",
			 one_by_one ? "one by one" : "batch", tick);
		rig_fini(&r);
	}
}

enum o26_phase {
	BEFORE_ALLOC,
	ALLOCED,
	IN_STEP,
	SEALING,
	FINDABLE,
	FINISHED,
	O26_PHASES
};

/* vllm#46283: three leaks, one for each phase in which a request was aborted. */
KVT_TEST(o26_abort_in_every_phase)
{
	struct kv_seal_ret rets[4];
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[4];

	for (u32 phase = 0; phase < O26_PHASES; phase++) {
		rig_init(&r, 2, 8);
		a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
		memset(g, 0, sizeof(g));
		if (phase >= ALLOCED)
			KVT_EXPECT_EQ(rig_alloc(s, a, 4, KV_GFP_NOWAIT, g), 0);
		if (phase >= IN_STEP)
			rig_announce(s, 0, a->pool);
		if (phase >= SEALING)
			KVT_EXPECT_EQ(rig_seal(s, a, g, 4, 1, 0, NULL, rets), 0);
		if (phase >= FINDABLE) {
			rig_retire(s, 0);
			rig_run(&r);
		}
		if (phase >= FINISHED) {
			for (u32 i = 0; i < 4; i++)
				KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
		}
		for (u32 i = 0; i < 4; i++)
			KVT_EXPECT_EQ(rig_free1(s, a, g[i]),
				      phase == BEFORE_ALLOC || phase == FINISHED
					      ? KV_STALE
					      : 0);
		for (u32 i = 0; i < 4; i++)
			KVT_EXPECT_EQ(rig_free1(s, a, g[i]), KV_STALE); /* twice: no-op */
		rig_audit(&r);
		rig_retire(s, 0);
		rig_run(&r);
		KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
		KVT_EXPECT_EQ(kvd_pool_nr_used(a->pool), phase >= SEALING ? 4 : 0);
		KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], phase >= SEALING ? 4 : 0);
		rig_fini(&r);
	}
}

/* sglang#30233: the producer died half way, the consumer used what had arrived. */
KVT_TEST(o27_partial_result_used)
{
	struct kv_seal_ret rets[8];
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_grant g[8];
	struct kv_hit hits[8];
	struct kvd_tenant *t;
	u32 nr;

	for (u32 sealed = 0; sealed <= 3; sealed += 3) {
		rig_init(&r, 2, 8);
		t = rig_tenant(&r, r.red, "t", 0, 0);
		a = rig_client(&r, t, &s);
		b = rig_client(&r, t, &s2);
		KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_NOWAIT, g), 0);
		if (sealed)
			KVT_EXPECT_EQ(rig_seal(s, a, g, sealed, 5, 0, NULL, rets), 0);
		rig_run(&r);
		rig_announce(s, 0, a->pool); /* writes g[sealed .. 4] */
		kvd_session_end(s, "killed");
		rig_run(&r);
		KVT_EXPECT_EQ(rig_lookup(s2, b, 5, 8, hits, &nr), sealed ? 0 : KV_MISS);
		KVT_EXPECT_EQ(nr, sealed);
		for (u32 i = 0; i < nr; i++)
			KVT_EXPECT_EQ(hits[i].grant.pfn, g[i].pfn);
		rig_audit(&r);
		rig_fini(&r);
	}
}

/* sglang#35270: a shared page was counted twice as evictable. */
KVT_TEST(o28_counters_of_shared_pages)
{
	static const u8 orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
					{1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
	struct kvd_session *s[3];
	struct kvd_attach *a[3];
	struct kv_hit hits[4];
	struct kvd_tenant *t;
	u32 nr;

	for (u32 o = 0; o < 6; o++) {
		rig_init(&r, 2, 8);
		t = rig_tenant(&r, r.red, "t", 0, 0);
		for (u32 i = 0; i < 3; i++)
			a[i] = rig_client(&r, t, &s[i]);
		rig_cache(&r, s[0], a[0], 1, 4);
		KVT_EXPECT_EQ(a[0]->pool->nr[KVD_CACHED], 4);
		for (u32 i = 0; i < 3; i++) {
			KVT_EXPECT_EQ(rig_lookup(s[i], a[i], 1, 4, hits, &nr), 0);
			KVT_EXPECT_EQ(nr, 4);
			KVT_EXPECT_EQ(a[0]->pool->nr[KVD_CACHED], 0);
		}
		for (u32 i = 0; i < 3; i++) {
			u32 who = orders[o][i];

			/* nothing that is pinned can be evicted in between */
			KVT_EXPECT_EQ(kvd_reclaim_pool(a[0]->pool, t->index, 4, false),
				      0);
			for (u32 p = 4; p-- > 0;) {
				u32 before = a[0]->pool->nr[KVD_CACHED];

				KVT_EXPECT_EQ(rig_free1(s[who], a[who], hits[p].grant),
					      0);
				KVT_EXPECT_EQ(a[0]->pool->nr[KVD_CACHED],
					      before + (i == 2));
				rig_audit(&r);
			}
		}
		KVT_EXPECT_EQ(rig_free1(s[0], a[0], hits[0].grant), KV_STALE);
		KVT_EXPECT_EQ(kvd_reclaim_pool(a[0]->pool, t->index, 9, false), 4);
		rig_run(&r);
		KVT_EXPECT_EQ(kvd_pool_nr_used(a[0]->pool), 0);
		rig_fini(&r);
	}
}

/* vllm#1556: a table held one block twice, and it was freed twice. */
KVT_TEST(o29_window_and_sharing)
{
	struct kv_seal_ret ret;
	struct kvd_session *s;
	struct kvd_attach *a;

	for (u32 sealed = 0; sealed < 2; sealed++) {
		struct kv_page_ref table[3], one;
		struct kv_grant p1, p2;
		u32 nr, first;

		rig_init(&r, 2, 8);
		a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
		p1 = rig_alloc1(s, a);
		p2 = rig_alloc1(s, a);
		if (sealed)
			KVT_EXPECT_EQ(rig_seal(s, a, &p1, 1, 1, 0, NULL, &ret), 0);
		rig_run(&r);
		table[0] = table[2] = one =
			(struct kv_page_ref){.pfn = p1.pfn, .tag = p1.tag};
		table[1] = (struct kv_page_ref){.pfn = p2.pfn, .tag = p2.tag};
		KVT_EXPECT_EQ(kvd_lease_pin(s, a, &one, 1), 0);
		KVT_EXPECT_EQ(a->pool->frames[p1.pfn].refs, 2);
		rig_audit(&r);
		KVT_EXPECT_EQ(kvd_lease_free(s, a, table, 3, &nr, &first), 0);
		KVT_EXPECT_EQ(nr, 3);
		KVT_EXPECT_EQ(kvd_lease_free(s, a, &one, 1, &nr, &first), KV_STALE);
		KVT_EXPECT_EQ(nr, 0);
		KVT_EXPECT_EQ(first, 0);
		rig_run(&r);
		KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], sealed);
		/* the next owner's page does not suffer from a free of the old generation
		 */
		if (!sealed) {
			struct kv_grant p3 = rig_alloc1(s, a);

			KVT_EXPECT_EQ(p3.pfn, p2.pfn == p3.pfn ? p2.pfn : p1.pfn);
			KVT_EXPECT_EQ(rig_free1(s, a, p1), KV_STALE);
			KVT_EXPECT_EQ(a->pool->frames[p3.pfn].state, KVD_ACTIVE);
		}
		rig_fini(&r);
	}
}

/* vllm PR#37152: the index entry came with the allocation, a second request hit it. */
KVT_TEST(o30_hit_on_a_page_not_yet_written)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_seal_ret rets[2];
	struct kv_grant g[2];
	struct kvd_tenant *t;
	struct kv_hit hits[2];
	u32 nr;

	rig_init(&r, 2, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), KV_MISS);
	rig_announce(s, 0, a->pool); /* announced before the seal: it may still write */
	KVT_EXPECT_EQ(rig_seal(s, a, g, 2, 1, 0, NULL, rets), 0);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), KV_MISS);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), KV_MISS);
	/* another session's step does not hold the seal back, only the sealer's own */
	rig_announce(s2, 0, b->pool);
	rig_retire(s, 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 2);
	KVT_EXPECT(kv_tag_sealed(hits[0].grant.tag) && kv_tag_live(hits[0].grant.tag));
	rig_retire(s2, 0);
	rig_fini(&r);
}

/* A run that cannot be sealed as a whole leaves no entry behind. */
KVT_TEST(o30_failed_seal_publishes_nothing)
{
	struct kv_seal_ret rets[2];
	struct kv_grant g[2], bad;
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_hit hits[2];
	u32 nr;

	rig_init(&r, 2, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, g), 0);
	bad = g[1];
	g[1].tag += 1ull << KV_TAG_GEN_SHIFT;
	KVT_EXPECT_EQ(rig_seal(s, a, g, 2, 1, 0, NULL, rets), KV_STALE);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_lookup(s, a, 1, 2, hits, &nr), KV_MISS);
	KVT_EXPECT_EQ(a->pool->frames[g[0].pfn].state, KVD_ACTIVE);
	g[1] = g[0]; /* one page twice */
	KVT_EXPECT_EQ(rig_seal(s, a, g, 2, 1, 0, NULL, rets), KV_STALE);
	KVT_EXPECT_EQ(a->pool->nr[KVD_SEALED], 0);
	g[1] = bad;
	KVT_EXPECT_EQ(rig_seal(s, a, g, 2, 1, 0, NULL, rets), 0);
	KVT_EXPECT_EQ(rig_seal(s, a, g, 2, 1, 0, NULL, rets),
		      KV_STALE); /* sealed already */
	rig_fini(&r);
}

/* kvcached#262: the free count was read, then pages were taken. */
KVT_TEST(o31_check_then_allocate)
{
	struct kvd_session *s[64];
	struct kvd_attach *a[64];
	struct kv_grant g[64][8];
	struct kvd_tenant *t;

	rig_init(&r, 8, 8);
	t = rig_tenant(&r, r.red, "t", 0, 16);
	for (u32 i = 0; i < 64; i++)
		a[i] = rig_client(&r, t, &s[i]);
	for (u32 round = 0; round < 500; round++) {
		u32 granted = 0, first = kvt_rand_below(64);
		bool got[64] = {false};

		for (u32 k = 0; k < 64; k++) {
			u32 i = (first + k) % 64;
			int rc = rig_alloc(s[i], a[i], 8, KV_GFP_NOWAIT, g[i]);

			KVT_EXPECT(rc == 0 || rc == KV_QUOTA);
			got[i] = rc == 0;
			granted += rc == 0 ? 8 : 0;
			KVT_EXPECT_LE(t->account.used_bytes, t->account.max_bytes);
		}
		KVT_EXPECT_EQ(granted, 16);
		for (u32 i = 0; i < 64; i++) {
			for (u32 p = 0; got[i] && p < 8; p++)
				KVT_EXPECT_EQ(rig_free1(s[i], a[i], g[i][p]), 0);
		}
		rig_run(&r);
		KVT_EXPECT_EQ(t->account.used_bytes, 0);
	}
	KVT_EXPECT_EQ(t->quota_refusals, 500 * 62);
	rig_fini(&r);
}

/* vllm#49449: memory was dropped, the hash index kept. */
KVT_TEST(o38_reset_that_forgets_the_index)
{
	struct kv_layout next = rig_layout(0);
	struct kvd_attach *a, *b, *a2;
	struct kvd_session *s, *s2;
	struct kvd_evicted evicted;
	struct kv_hit hits[4];
	struct kvd_tenant *t;
	u32 nr;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	rig_cache(&r, s, a, 1, 4);
	/* new weights: another model id is another fingerprint, so old keys mean nothing
	 */
	next.model_id[0] = 2;
	a2 = rig_open(s, &next);
	KVT_EXPECT_EQ(rig_lookup(s, a2, 1, 4, hits, &nr), KV_MISS);
	/* reset while a reader holds the first two pages */
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), 0);
	kvd_domain_evict(&r.core, r.red, true, &evicted);
	KVT_EXPECT_EQ(evicted.cached, 2);
	KVT_EXPECT_EQ(evicted.unindexed, 2);
	KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], 2); /* dry run */
	kvd_domain_evict(&r.core, r.red, false, &evicted);
	KVT_EXPECT_EQ(evicted.cached, 2);
	KVT_EXPECT_EQ(evicted.unindexed, 2);
	rig_run(&r);
	rig_audit(&r);
	KVT_EXPECT_EQ(a->pool->frames[hits[0].grant.pfn].state, KVD_SEALED);
	KVT_EXPECT(kv_tag_live(a->pool->table.tags[hits[0].grant.pfn]));
	KVT_EXPECT_EQ(rig_free1(s2, b, hits[0].grant), 0);
	KVT_EXPECT_EQ(rig_free1(s2, b, hits[1].grant), 0);
	KVT_EXPECT_EQ(rig_lookup(s, a, 1, 4, hits, &nr), KV_MISS);
	rig_run(&r);
	KVT_EXPECT_EQ(kvd_pool_nr_used(a->pool), 0);
	rig_fini(&r);
}

/* GHSA-rm76-4mrf-v9r8: a weak hash and no look at the tokens on a hit. */
KVT_TEST(o42_weak_hash)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_hit hits[2];
	u32 nr, same = 0;

	rig_init(&r, 4, 512);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	a->pool->key_bits = 8;
	for (u64 seq = 0; seq < 1000; seq++)
		rig_cache(&r, s, a, seq, 2);
	for (u64 seq = 0; seq < 1000; seq++) {
		KVT_EXPECT_EQ(rig_lookup(s, a, 5000 + seq, 2, hits, &nr), KV_MISS);
		if (rig_lookup(s, a, seq, 2, hits, &nr))
			continue;
		for (u32 i = 0; i < nr; i++) {
			u32 want[KV_PAGE_TOKENS];

			rig_tokens(seq, i, want);
			KVT_EXPECT(!memcmp(a->pool->tokens +
						   hits[i].grant.pfn * KV_PAGE_TOKENS,
					   want, sizeof(want)));
			KVT_EXPECT_EQ(rig_free1(s, a, hits[i].grant), 0);
			same++;
		}
	}
	KVT_EXPECT_EQ(same, 2000);
	rig_audit(&r);
	rig_fini(&r);
}

/* inference-sim#196: chunked prefill hashed offsets that were relative to the chunk. */
KVT_TEST(o45_relative_offset_in_a_chain)
{
	static const u8 chunks[4][5] = {{8}, {3, 5}, {1, 1, 6}, {2, 2, 2, 2}};
	u8 keys[4][8][KV_KEY_BYTES];
	struct kvd_session *s;
	struct kvd_attach *a;

	for (u32 c = 0; c < 4; c++) {
		struct kv_seal_ret rets[8];
		struct kv_grant g[8];
		u32 at = 0;

		rig_init(&r, 2, 8);
		a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
		KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_NOWAIT, g), 0);
		for (u32 i = 0; i < 5 && at < 8; at += chunks[c][i++])
			KVT_EXPECT_EQ(rig_seal(s, a, g + at, chunks[c][i], 9, at,
					       at ? rets[at - 1].key : NULL, rets + at),
				      0);
		for (u32 i = 0; i < 8; i++)
			memcpy(keys[c][i], rets[i].key, KV_KEY_BYTES);
		KVT_EXPECT(!memcmp(keys[c], keys[0], sizeof(keys[0])));
		rig_run(&r);
		/* every page but the last has exactly one child: the chunks made one
		 * chain */
		for (u32 i = 0; i < 8; i++)
			KVT_EXPECT_EQ(a->pool->links[g[i].pfn].nr_children, i < 7);
		rig_fini(&r);
	}
}

/*
 * O39, frozen block list (TensorRT-LLM 8813, 13320): a transfer names pages with their generations
 * and tokens, and takes time. What the request grows by meanwhile is not part of it; if a named page
 * has become somebody else's, none of it is.
 */
static void o39_names(const struct kv_grant *g, u32 nr, struct kv_seal_page *sp,
		      u32 *tokens)
{
	for (u32 i = 0; i < nr; i++) {
		sp[i] = (struct kv_seal_page){
			.pfn = g[i].pfn, .crc32c = i, .tag = g[i].tag};
		rig_tokens(9, i, tokens + i * KV_PAGE_TOKENS);
	}
}

KVT_TEST(o39_frozen_block_list)
{
	enum { FROZEN = KVD_HASH_SLICE + 4, GROWN = FROZEN + 2 };
	static u32 tokens[FROZEN * KV_PAGE_TOKENS];
	struct kv_seal_page sp[FROZEN];
	struct kv_seal_ret rets[GROWN];
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_grant g[GROWN], other;
	struct kv_hit hits[GROWN];
	struct kvd_tenant *t;
	u32 nr;

	for (u32 lost = 0; lost < 2; lost++) {
		struct kvd_seal_op op = {
			.pages = sp, .tokens = tokens, .rets = rets, .nr = FROZEN};

		rig_init(&r, 4, 16);
		t = rig_tenant(&r, r.red, "t", 0, 0);
		a = rig_client(&r, t, &s);
		b = rig_client(&r, t, &s2);
		KVT_EXPECT_EQ(rig_alloc(s, a, FROZEN, KV_GFP_NOWAIT, g), 0);
		o39_names(g, FROZEN, sp, tokens);
		op.s = s;
		op.a = a;
		op.arg.flags = KV_SEAL_ROOT;
		KVT_EXPECT_EQ(kvd_seal_start(&op), 0);
		KVT_EXPECT_EQ(kvd_seal_step(&op), -EAGAIN); /* under way */
		KVT_EXPECT_EQ(rig_alloc(s, a, 2, KV_GFP_NOWAIT, g + FROZEN), 0);
		if (lost) {
			KVT_EXPECT_EQ(rig_free1(s, a, g[3]), 0);
			rig_run(&r);
			do { /* until another session has it */
				other = rig_alloc1(s2, b);
			} while (other.pfn != g[3].pfn);
		}
		KVT_EXPECT_EQ(kvd_seal_step(&op), lost ? KV_STALE : 0);
		rig_run(&r);
		KVT_EXPECT_EQ(rig_lookup(s2, b, 9, GROWN, hits, &nr), lost ? KV_MISS : 0);
		KVT_EXPECT_EQ(nr, lost ? 0 : FROZEN);
		for (u32 i = 0; i < nr; i++)
			KVT_EXPECT_EQ(hits[i].grant.pfn, g[i].pfn);
		if (!lost)
			KVT_EXPECT_EQ(rig_seal(s, a, g + FROZEN, 2, 9, FROZEN,
					       rets[FROZEN - 1].key, rets + FROZEN),
				      0);
		rig_audit(&r);
		rig_fini(&r);
	}
}

KVT_MAIN()
