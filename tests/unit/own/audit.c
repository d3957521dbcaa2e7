/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/mm/audit, own/verify: each thing that may be wrong, made wrong in one place of a
 * sound core: the audit says so under its invariant, and is clean again afterwards.
 */
#include "kvmd/own/verify.h"
#include "kvmd/own/walk.h"
#include "tests/unit/own/common.h"

static struct rig r;
static struct kvd_session *s, *other;
static struct kvd_attach *a, *b;
static struct kvd_pool *pool;
static u32 active, sealed, cached, waiting, unused;

/* A page of each state that a list or a reference has to do with. */
static void sound(void)
{
	struct kvd_tenant *t;
	struct kv_grant g[8];
	struct kv_seal_ret rets[8];
	struct kv_layout l = rig_layout(0);

	rig_init(&r, 3, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	other = rig_session(&r, t);
	b = rig_open(other, &l);
	pool = a->pool;
	rig_cache(&r, s, a, 7, 2);
	KVT_EXPECT_EQ(rig_alloc(s, a, 4, KV_GFP_PREFILL, g), 0);
	KVT_EXPECT_EQ(rig_seal(s, a, g, 1, 9, 0, NULL, rets), 0);
	rig_run(&r);
	rig_announce(s, 0, pool);
	KVT_EXPECT_EQ(rig_free1(s, a, g[1]), 0);
	sealed = g[0].pfn;
	waiting = g[1].pfn;
	active = g[2].pfn;
	for (cached = 0; pool->frames[cached].state != KVD_CACHED;)
		cached++;
	for (unused = 0; pool->frames[unused].state != KVD_FREE;)
		unused++;
	rig_audit(&r);
}

static bool finds(u32 invariant, bool quick)
{
	static struct kvd_finding list[64];
	struct kvd_findings fs = {.list = list, .max = KV_ARRAY_SIZE(list)};
	bool found = false;

	(void)(quick ? kvd_audit_quick(&r.core, &fs) : kvd_audit(&r.core, &fs));
	for (u32 i = 0; i < KV_MIN(fs.nr, fs.max); i++)
		found |= list[i].invariant == invariant;
	return found;
}

static struct kvd_finding run_list[64];

/* The same by slices of @nr records; @between: what happens between two of them. */
static u32 run_audit(u32 nr, void (*between)(u32 slice), u32 *ret_slices)
{
	struct kvd_audit_run run = {
		.findings = {.list = run_list, .max = KV_ARRAY_SIZE(run_list)}};

	*ret_slices = 1;
	KVT_EXPECT_EQ(kvd_audit_begin(&r.core, &run), 0);
	for (; !kvd_audit_step(&r.core, &run, nr); ++*ret_slices)
		if (between)
			between(*ret_slices);
	KVT_EXPECT_EQ(run.error, 0);
	kvd_audit_end(&r.core, &run);
	return run.findings.nr;
}

static bool run_finds(u32 invariant)
{
	u32 slices, nr = run_audit(5, NULL, &slices);

	for (u32 i = 0; i < KV_MIN(nr, KV_ARRAY_SIZE(run_list)); i++)
		if (run_list[i].invariant == invariant)
			return true;
	return false;
}

/* @value where @at is: found as @invariant; and as before: nothing. */
static void wrong(u32 invariant, void *at, size_t bytes, u64 value, const char *what)
{
	u8 old[8];

	memcpy(old, at, bytes);
	memcpy(at, &value, bytes);
	if (!finds(invariant, false))
		KVT_FAIL("not found: %s", what);
	if (!run_finds(invariant))
		KVT_FAIL("not found beside the work: %s", what);
	memcpy(at, old, bytes);
	rig_audit(&r);
}

#define WRONG(invariant, field, value) \
	wrong(invariant, &(field), sizeof(field), (u64)(value), #field)

/* The same for a field of a record that is whole. */
static void wrong_record(u32 invariant, u32 pfn, size_t off, size_t bytes, u64 value)
{
	struct kvd_frame *f = &pool->frames[pfn], old = *f;
	u64 tag = pool->table.tags[pfn];

	memcpy((u8 *)f + off, &value, KV_MIN(bytes, sizeof(value)));
	f->check = kvd_frame_check_word(f);
	if (f->tag != old.tag)
		pool->table.tags[pfn] = f->tag;
	if (!finds(invariant, false))
		KVT_FAIL("pfn %u: offset %zu as %llu: not found", pfn, off,
			 (unsigned long long)value);
	*f = old;
	pool->table.tags[pfn] = tag;
	rig_audit(&r);
}

#define RECORD(invariant, pfn, field, value)                            \
	wrong_record(invariant, pfn, offsetof(struct kvd_frame, field), \
		     sizeof(((struct kvd_frame *)0)->field), (u64)(value))

static u64 tag_of(u32 pfn, u64 flags)
{
	return kv_tag_make(kv_tag_gen(pool->frames[pfn].tag), flags);
}

KVT_TEST(wrong_records)
{
	struct kvd_batch seal = {.kind = KVD_BATCH_SEAL};
	struct kvd_frame was;

	sound();
	WRONG(1, pool->frames[active].check, 1);
	RECORD(1, active, pfn, active + 1);
	RECORD(1, active, state, KVD_FRAME_STATES);
	RECORD(1, active, tenant, KVD_TENANTS_MAX);
	RECORD(1, cached, tenant, 0xffff);
	RECORD(1, active, state, KVD_ABSENT);
	RECORD(1, active, state, KVD_SEALED);
	RECORD(3, active, tag, tag_of(active, 0));
	RECORD(3, unused, tag, kv_tag_make(1, KV_TAG_LIVE));
	RECORD(6, active, tag, tag_of(active, KV_TAG_LIVE | KV_TAG_SEALED));
	RECORD(6, sealed, tag, tag_of(sealed, KV_TAG_LIVE));
	RECORD(4, active, tag, kv_tag_make(1ull << 50, KV_TAG_LIVE));
	RECORD(4, active, tag, pool->frames[sealed].tag);
	WRONG(3, pool->table.tags[active], 0);
	RECORD(2, active, refs, 2);
	RECORD(2, sealed, refs, 0);
	RECORD(2, active, owner, other->id);
	RECORD(2, active, flags, KVD_FRAME_INDEXED);
	RECORD(3, cached, flags, 0);
	RECORD(2, sealed, key, 77);
	RECORD(5, sealed, flags, pool->frames[sealed].flags | KVD_FRAME_SEALING);
	was = pool->frames[sealed];
	pool->links[sealed].batch = &seal; /* it waits, and may be found already */
	pool->frames[sealed].flags |= KVD_FRAME_SEALING | KVD_FRAME_FINDABLE;
	pool->frames[sealed].refs++;
	pool->frames[sealed].check = kvd_frame_check_word(&pool->frames[sealed]);
	KVT_EXPECT(finds(6, false));
	pool->frames[sealed] = was;
	pool->links[sealed].batch = NULL;
	rig_fini(&r);
}

KVT_TEST(wrong_lists_and_counters)
{
	struct kvd_extent *e;
	struct kvd_batch *batch;

	sound();
	e = &pool->extents[unused >> pool->geo.shift];
	batch = pool->links[waiting].batch;
	WRONG(1, pool->nr[KVD_ACTIVE], 0);
	WRONG(1, pool->nr[KVD_ABSENT], 0);
	WRONG(1, pool->nr_live_extents, 0);
	WRONG(1, pool->free.nr[KVD_FREE_CLEAN], 99);
	WRONG(1, pool->free.nr[KVD_FREE_USED], 99);
	WRONG(1, e->nr_free, 0);
	WRONG(1, e->free.bucket[KVD_FREE_CLEAN],
	      e->free.bucket[KVD_FREE_CLEAN] == KVD_NO_BUCKET ? 0 : KVD_NO_BUCKET);
	WRONG(1, e->state, KVD_EXTENT_DRAINING);
	WRONG(8, e->domain_id, 1);
	WRONG(1, pool->links[unused].prev, 3);
	WRONG(1, pool->links[cached].next, 5000);
	WRONG(1, pool->lru[0].leaf.nr, 7);
	WRONG(1, pool->lru[0].leaf.tail, KVD_PFN_NONE);
	WRONG(1, pool->lru[0].leaf.head, active);
	WRONG(5, pool->links[waiting].batch, 0);
	WRONG(5, pool->links[active].batch, (uintptr_t)batch);
	WRONG(5, batch->kind, KVD_BATCH_SEAL);
	WRONG(5, batch->pages.head, KVD_PFN_NONE);
	RECORD(5, unused, state, KVD_ABSENT);
	rig_fini(&r);
}

KVT_TEST(wrong_leases_index_and_charges)
{
	struct kvd_account *acct;
	u32 *head;

	sound();
	acct = &s->tenant->account;
	head = kvd_prefix_head(pool, pool->frames[cached].key);
	WRONG(2, a->refs[active], 0);
	WRONG(2, a->refs[active], 2);
	WRONG(2, b->refs[sealed], 1);
	WRONG(2, b->refs[active], 1);
	WRONG(2, a->held[active / 64], 0);
	WRONG(2, *head, KVD_PFN_NONE);
	WRONG(2, pool->links[active].walk, 5);
	WRONG(1, acct->nr[KVD_ACTIVE], 9);
	WRONG(7, acct->used_bytes, 1);
	WRONG(7, r.core.mm.extent_bytes_used, 1);
	WRONG(7, r.core.mm.limits.capacity_bytes, 1);
	rig_fini(&r);
}

/* The sum over pools is enough after a restart; the slice comes by all pages in turn. */
KVT_TEST(quick_and_slice_find_their_part)
{
	struct kvd_finding list[4];
	struct kvd_findings fs = {.list = list, .max = 4};
	u32 slices = 1;

	sound();
	KVT_EXPECT(!finds(1, true));
	pool->nr[KVD_ACTIVE]++;
	KVT_EXPECT(finds(1, true));
	pool->nr[KVD_ACTIVE]--;
	pool->frames[active].refs++;
	while (!kvd_audit_slice(&r.core, 5, &fs))
		slices++;
	KVT_EXPECT(slices > 2 && fs.nr == 1 && list[0].pfn == active);
	pool->frames[active].refs--;
	/* more findings than the list has room for are counted */
	for (u32 i = 0; i < 8; i++)
		pool->frames[i].check ^= 1;
	KVT_EXPECT(kvd_audit(&r.core, &fs) >= 8);
	for (u32 i = 0; i < 8; i++)
		pool->frames[i].check ^= 1;
	rig_fini(&r);
}

static struct kv_grant held[16];
static u32 nr_held;

/* Pages come, go, are sealed and found, on both sides of where the audit is. */
static void work(u32 slice)
{
	struct kv_seal_ret rets[2];
	struct kv_hit hits[2];
	u32 at = kvt_rand_below(nr_held + 1), nr_hits;

	switch (kvt_rand_below(4)) {
	case 0:
		if (nr_held < KV_ARRAY_SIZE(held) &&
		    !rig_alloc(s, a, 1, KV_GFP_PREFILL, &held[nr_held]))
			nr_held++;
		break;
	case 1:
		if (at < nr_held && !rig_free1(s, a, held[at]))
			held[at] = held[--nr_held];
		break;
	case 2:
		rig_lookup(s, a, 7, 2, hits, &nr_hits);
		break;
	default:
		if (at < nr_held)
			rig_seal(s, a, &held[at], 1, 100 + kvt_rand_below(9), 0, NULL,
				 rets);
	}
	rig_run(&r);
}

static void new_pool(u32 slice)
{
	struct kv_layout l = rig_layout(slice == 2);

	if (slice == 2)
		rig_open(other, &l);
}

/* An audit that takes many turns counts what changes behind it as well. */
KVT_TEST(audit_beside_the_work_is_clean)
{
	u32 slices, most = 0;

	sound();
	for (u32 i = 0; i < 200; i++) {
		u32 nr = run_audit(1, work, &slices);

		most = KV_MAX(most, slices);
		if (nr)
			KVT_FAIL("round %u: %s", i, run_list[0].text);
	}
	rig_audit(&r);
	KVT_EXPECT(most >= pool->geo.nr_pages);
	KVT_EXPECT_EQ(run_audit(4, new_pool, &slices), 0);
	KVT_EXPECT(slices > 2 + pool->geo.nr_pages / 4);
	pool->frames[active].refs++;
	KVT_EXPECT(run_finds(1));
	pool->frames[active].refs--;
	rig_fini(&r);
}

KVT_MAIN()
