/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions: begin, pools, the end in the order of P8, stalls, extents given and taken
 * back. */
#include <sys/mman.h>
#include "tests/unit/own/common.h"

static struct rig r;

KVT_TEST(session_page_is_set_up)
{
	struct kvd_session *s, *s2;
	struct kvd_session_params p = {.client_id = 0};
	struct kvd_tenant *t;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	s = rig_session(&r, t);
	KVT_EXPECT_EQ(s->page->magic, KV_SESSION_MAGIC);
	KVT_EXPECT_EQ(s->page->client_id, s->id);
	KVT_EXPECT_EQ(s->page->table_epoch.word, 7);
	p.tenant = t;
	p.name = "x";
	KVT_EXPECT_EQ(kvd_session_create(&r.core, &p, &s2), -EINVAL);
	p.client_id = s->id;
	KVT_EXPECT_EQ(kvd_session_create(&r.core, &p, &s2), -EINVAL);
	KVT_EXPECT(kvd_session_find(&r.core, s->id) == s);
	KVT_EXPECT(!kvd_session_find(&r.core, 99));
	KVT_EXPECT_EQ(kvd_tenant_destroy(&r.core, t), -EBUSY);
	rig_fini(&r);
}

/* P8: pins drop only after table_epoch 0 was stored. A trap on the page's first store
 * tells. */
static struct kvd_session *trap_s;
static struct kvd_attach *trap_a;
static u32 trap_held = ~0u;

static void on_store(int sig, siginfo_t *info, void *uc)
{
	trap_held = trap_a->nr_held;
	mprotect(trap_s->page, 4096, PROT_READ | PROT_WRITE);
}

KVT_TEST(table_epoch_0_comes_before_pins_drop)
{
	struct sigaction sa = {.sa_sigaction = on_store, .sa_flags = SA_SIGINFO};
	struct kv_grant g[3];

	rig_init(&r, 4, 8);
	trap_a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &trap_s);
	KVT_EXPECT_EQ(rig_alloc(trap_s, trap_a, 3, KV_GFP_NOWAIT, g), 0);
	sigaction(SIGSEGV, &sa, NULL);
	KVT_EXPECT_EQ(mprotect(trap_s->page, 4096, PROT_READ), 0);
	kvd_session_end(trap_s, "hang-up");
	KVT_EXPECT_EQ(trap_s->page->table_epoch.word, 0);
	KVT_EXPECT_EQ(trap_held, 3); /* what it held when the store came */
	KVT_EXPECT_EQ(trap_a->nr_held, 0);
	rig_run(&r);
	KVT_EXPECT_EQ(r.reaped, 1);
	rig_fini(&r);
}

/* An ended session leaves the scan when every slot is quiet: by retiring, one after
 * another. */
KVT_TEST(ended_session_waits_for_each_slot)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a;
	struct kvd_tenant *t;
	struct kv_grant g[4];

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(rig_alloc(s, a, 4, KV_GFP_NOWAIT, g), 0);
	rig_announce(s, 1, a->pool);
	rig_announce(s, 6, a->pool);
	kvd_session_end(s, "bye");
	kvd_session_end(s, "twice");
	rig_run(&r);
	KVT_EXPECT_EQ(s->reader.busy_slots, 0x42);
	/* quiet for good: a late store of a slot that was seen IDLE does not count any
	 * more */
	s->page->slots[0].word = 1;
	rig_retire(s, 1);
	rig_run(&r);
	KVT_EXPECT_EQ(r.reaped, 0);
	KVT_EXPECT_EQ(a->pool->nr[KVD_QUARANTINE], 4);
	rig_retire(s, 6);
	rig_run(&r);
	KVT_EXPECT_EQ(r.reaped, 1);
	KVT_EXPECT_EQ(r.last_reaped, 1);
	KVT_EXPECT_EQ(t->account.used_bytes, 0);
	KVT_EXPECT_EQ(t->nr_sessions, 1);
	rig_fini(&r);
}

KVT_TEST(death_drops_everything_and_keeps_the_cache)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_seal_ret rets[4];
	struct kvd_tenant *t;
	struct kv_grant g[4];
	struct kv_hit hits[8];
	u32 nr, pending;

	rig_init(&r, 8, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	rig_cache(&r, s2, b, 1, 4);
	KVT_EXPECT_EQ(rig_lookup(s, a, 1, 4, hits, &nr), 0);
	KVT_EXPECT_EQ(rig_lookup(s, a, 1, 4, hits, &nr), 0); /* two hits each */
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 4, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_seal(s, a, g, 2, 2, 0, NULL, rets), 0);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 8, KV_GFP_NOWAIT, &nr, &pending), 0);
	s->page->magazines[0].slots[3].word = 0; /* popped */
	kvd_session_work_ended(s);
	rig_audit(&r);
	rig_run(&r);
	KVT_EXPECT_EQ(r.reaped, 1);
	KVT_EXPECT_EQ(b->pool->nr[KVD_SEALED], 2);
	KVT_EXPECT_EQ(b->pool->nr[KVD_CACHED], 4); /* two of seq 1, two of seq 2 */
	KVT_EXPECT_EQ(kvd_pool_nr_used(b->pool), 6);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 2, 2, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 2);
	rig_fini(&r);
}

/* A large session is dropped in slices; nothing of it is lost on the way. */
KVT_TEST(large_sessions_are_dropped_in_slices)
{
	static struct kv_grant g[4096];
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	u64 next;

	rig_init(&r, 5, 4096);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	for (u32 i = 0; i < 5; i++)
		KVT_EXPECT_EQ(rig_alloc(s, a, 4096, KV_GFP_NOWAIT, g), 0);
	kvd_session_work_ended(s);
	KVT_EXPECT(b->pool->nr[KVD_ACTIVE] > 4096);
	rig_audit(&r);
	next = kvd_core_run(&r.core);
	KVT_EXPECT(next <= r.now); /* more to do at once */
	rig_audit(&r);
	rig_run(&r);
	KVT_EXPECT_EQ(kvd_pool_nr_free(b->pool), 5 * 4096);
	KVT_EXPECT_EQ(r.reaped, 1);
	rig_fini(&r);
}

/* What a session did not give back is counted and said; what lies in stock is no leak. */
KVT_TEST(pages_left_at_the_end_are_counted)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	u32 nr, pending;

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	b = rig_client(&r, kvd_tenant_find(&r.core, "t"), &s2);
	rig_alloc1(s, a);
	rig_alloc1(s, a);
	KVT_EXPECT_EQ(kvd_lease_stock(s, a, 0, 4, KV_GFP_NOWAIT, &nr, &pending), 0);
	KVT_EXPECT_EQ(kvd_session_nr_held(s), 6);
	kvd_session_work_ended(s);
	KVT_EXPECT_EQ(r.core.nr_left_pages, 2);
	KVT_EXPECT_EQ(rig_free1(s2, b, rig_alloc1(s2, b)), 0);
	kvd_session_work_ended(s2);
	KVT_EXPECT_EQ(r.core.nr_left_pages, 2);
	rig_fini(&r);
}

KVT_TEST(stalled_session_is_reported_by_name)
{
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	struct kv_grant g;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	rig_announce(s, 0, a->pool);
	g = rig_alloc1(s2, b);
	KVT_EXPECT_EQ(rig_free1(s2, b, g), 0);
	rig_run(&r);
	r.now += 900000000;
	rig_run(&r);
	KVT_EXPECT_EQ(r.stalls, 0);
	r.now += 200000000;
	rig_run(&r);
	KVT_EXPECT_EQ(r.stalls, 1);
	KVT_EXPECT_EQ(r.stalled_id, s->id);
	r.now += 2000000000;
	rig_run(&r);
	KVT_EXPECT_EQ(r.stalls, 1);		   /* once per stall */
	KVT_EXPECT_EQ(rig_quarantine(b->pool), 1); /* never a timeout alone */
	rig_retire(s, 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(b->pool), 0);
	KVT_EXPECT_EQ(s->page->wake.word, 0);
	rig_fini(&r);
}

/* Extents go to every session of the pool, and are released when the last one has
 * unmapped. */
KVT_TEST(extent_index_is_reused_only_after_the_last_unmap)
{
	struct kv_extent_ref ref = {0};
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	struct kv_grant g;
	u64 serial;

	rig_init(&r, 1, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(r.added, 2);
	KVT_EXPECT_EQ(kvd_extent_shrink(a->pool, 0), KV_BUSY);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	KVT_EXPECT_EQ(kvd_extent_shrink(a->pool, 0), KV_BUSY); /* quarantine counts */
	rig_run(&r);
	serial = ref.serial = a->pool->extents[0].serial;
	KVT_EXPECT_EQ(kvd_session_unmapped(s, a->pool->id, &ref),
		      -EINVAL); /* not asked for */
	KVT_EXPECT_EQ(kvd_extent_shrink(a->pool, 0), 0);
	KVT_EXPECT_EQ(r.removed, 2);
	KVT_EXPECT_EQ(r.red->extent_bytes, 8 * RIG_STRIDE); /* charged until it is gone */
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, &g), KV_FULL);
	rig_audit(&r);
	ref.serial++;
	KVT_EXPECT_EQ(kvd_session_unmapped(s, a->pool->id, &ref), -ENOENT);
	ref.serial--;
	KVT_EXPECT_EQ(kvd_session_unmapped(s, a->pool->id, &ref), 0);
	KVT_EXPECT_EQ(kvd_session_unmapped(s, a->pool->id, &ref), -ENOENT);
	KVT_EXPECT_EQ(r.frees, 0);
	kvd_session_work_ended(s2); /* reaped: the other way to let go */
	rig_run(&r);
	KVT_EXPECT_EQ(r.frees, 1);
	KVT_EXPECT_EQ(r.red->extent_bytes, 0);
	g = rig_alloc1(s, a);
	KVT_EXPECT(a->pool->extents[0].serial != serial);
	KVT_EXPECT_EQ(g.flags & KV_GRANT_DIRTY, 0);
	KVT_EXPECT(b != NULL);
	rig_fini(&r);
}

KVT_TEST(idle_extents_go_back)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[32];

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 32, KV_GFP_NOWAIT, g), 0);
	for (u32 i = 0; i < 32; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(a->pool->nr_live_extents, 4);
	r.now += 61000000000ull;
	rig_run(&r);
	KVT_EXPECT_EQ(a->pool->nr_live_extents, 1); /* one is kept for the next burst */
	KVT_EXPECT_EQ(r.removed, 3);
	rig_audit(&r);
	rig_fini(&r);
}

/* A large pool is closed in slices: others are served in between. */
KVT_TEST(large_pools_are_closed_in_slices)
{
	static struct kv_grant g[4096];
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	u32 calls = 0, left = 4096;
	int rc;

	rig_init(&r, 2, 4096);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &s2);
	KVT_EXPECT_EQ(rig_alloc(s, a, 4096, KV_GFP_NOWAIT, g), 0);
	while ((rc = kvd_session_close_pool(s, a->pool->id)) == -EAGAIN) {
		KVT_EXPECT_EQ(left - a->nr_held, KVD_DROP_SLICE);
		left = a->nr_held;
		calls++;
		rig_free1(s2, b, rig_alloc1(s2, b));
		rig_run(&r);
		rig_audit(&r);
	}
	KVT_EXPECT_EQ(rc, 0);
	KVT_EXPECT_EQ(calls, 4096 / KVD_DROP_SLICE - 1);
	rig_run(&r);
	KVT_EXPECT_EQ(kvd_pool_nr_used(b->pool), 0);
	rig_fini(&r);
}

KVT_TEST(pool_close_frees_and_leaves_the_rest)
{
	struct kv_layout lora = rig_layout(1);
	struct kvd_attach *a, *b;
	struct kv_seal_ret ret;
	struct kvd_session *s;
	struct kv_grant g, h;

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	b = rig_open(s, &lora);
	KVT_EXPECT(rig_open(s, &lora) == b); /* twice: the same */
	g = rig_alloc1(s, a);
	h = rig_alloc1(s, b);
	rig_announce(s, 0, b->pool);
	KVT_EXPECT_EQ(rig_seal(s, b, &h, 1, 1, 0, NULL, &ret), 0);
	KVT_EXPECT_EQ(kvd_session_close_pool(s, 99), -ENOENT);
	KVT_EXPECT_EQ(kvd_session_close_pool(s, 2), 0);
	rig_audit(&r);
	rig_run(&r);
	KVT_EXPECT_EQ(r.core.mm.pools[1]->nr[KVD_SEALED], 1); /* its grace goes on */
	rig_retire(s, 0);
	rig_run(&r);
	KVT_EXPECT_EQ(r.core.mm.pools[1]->nr[KVD_CACHED], 1);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_fini(&r);
}

KVT_TEST(pools_max_per_session)
{
	struct kv_layout l = rig_layout(0);
	struct kvd_refusal why;
	struct kvd_attach *a;
	struct kvd_session *s;

	rig_init(&r, 2, 1);
	s = rig_session(&r, rig_tenant(&r, r.red, "t", 0, 0));
	for (l.lora_id = 0; l.lora_id < KV_POOLS_MAX; l.lora_id++)
		KVT_EXPECT_EQ(kvd_session_open_pool(s, &l, NULL, &a, &why), 0);
	KVT_EXPECT_EQ(kvd_session_open_pool(s, &l, NULL, &a, &why), -EMFILE);
	KVT_EXPECT_EQ(kvd_session_close_pool(s, 3), 0);
	KVT_EXPECT_EQ(kvd_session_open_pool(s, &l, NULL, &a, &why), 0);
	/* unused pools of sessions that are gone make room */
	kvd_session_work_ended(s);
	rig_run(&r);
	for (u32 n = 0; n < 8; n++) {
		s = rig_session(&r, kvd_tenant_find(&r.core, "t"));
		for (u32 i = 0; i < 10; i++, l.lora_id++)
			KVT_EXPECT_EQ(kvd_session_open_pool(s, &l, NULL, &a, &why), 0);
		kvd_session_work_ended(s);
		rig_run(&r);
	}
	rig_fini(&r);
}

KVT_MAIN()
