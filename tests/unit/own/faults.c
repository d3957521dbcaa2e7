/* SPDX-License-Identifier: Apache-2.0 */
/* Each hook that may fail does so, at its first call, its second, ...: all or nothing
 * (I10). */
#include "tests/unit/own/common.h"

static struct rig r;

/* Everything that a failed call must not change. */
struct snapshot {
	u64 used, quarantine, extent_bytes;
	u32 nr[KVD_FRAME_STATES], held, regions, sessions;
};

static void snapshot(struct snapshot *st, struct kvd_tenant *t, struct kvd_attach *a)
{
	memset(st, 0, sizeof(*st));
	st->used = t->account.used_bytes;
	st->quarantine = t->account.quarantine_bytes;
	st->regions = r.regions;
	st->sessions = t->nr_sessions;
	if (!a)
		return;
	st->held = a->nr_held;
	memcpy(st->nr, a->pool->nr, sizeof(st->nr));
	/* a call that got one extent of two may keep it: it is FREE memory, charged to
	 * nobody */
	st->nr[KVD_FREE] += st->nr[KVD_ABSENT];
	st->nr[KVD_ABSENT] = 0;
}

KVT_TEST(opening_a_pool_is_all_or_nothing)
{
	for (u32 n = 1; n < 50; n++) {
		struct kv_layout l = rig_layout(0);
		struct snapshot before, after;
		struct kvd_refusal why;
		struct kvd_attach *a;
		struct kvd_session *s;
		struct kvd_tenant *t;
		int rc;

		rig_init(&r, 4, 8);
		t = rig_tenant(&r, r.red, "t", 0, 0);
		s = rig_session(&r, t);
		snapshot(&before, t, NULL);
		r.calls = 0;
		r.fail_at = n;
		rc = kvd_session_open_pool(s, &l, NULL, &a, &why);
		r.fail_at = 0;
		if (!r.fired) {
			KVT_EXPECT_EQ(rc, 0);
			KVT_EXPECT_EQ(
				n, 6); /* four regions of the pool, one of the leases */
			rig_fini(&r);
			return;
		}
		KVT_EXPECT_EQ(rc, -ENOMEM);
		kvd_domain_pools_trim(&r.core);
		snapshot(&after, t, NULL);
		KVT_EXPECT(!memcmp(&before, &after, sizeof(before)));
		KVT_EXPECT_EQ(kvd_session_open_pool(s, &l, NULL, &a, &why),
			      0); /* retry */
		rig_fini(&r);
	}
	KVT_FAIL("the faults never end");
}

/* R5: a batch that needs three extents, the first, second, third of which fails. */
KVT_TEST(allocation_is_all_or_nothing)
{
	for (u32 n = 1; n < 50; n++) {
		struct snapshot before, after;
		struct kv_grant g[20] = {0};
		struct kvd_attach *a;
		struct kvd_session *s;
		struct kvd_tenant *t;
		int rc;

		rig_init(&r, 4, 8);
		t = rig_tenant(&r, r.red, "t", 0, 0);
		a = rig_client(&r, t, &s);
		snapshot(&before, t, a);
		r.calls = 0;
		r.fail_at = n;
		rc = rig_alloc(s, a, 20, KV_GFP_PREFILL, g);
		r.fail_at = 0;
		rig_audit(&r);
		if (!r.fired) {
			KVT_EXPECT_EQ(rc, 0);
			KVT_EXPECT_EQ(n, 4 + 1); /* generation bound, three extents */
			rig_fini(&r);
			return;
		}
		KVT_EXPECT_EQ(rc, -EIO);
		KVT_EXPECT_EQ(g[0].tag, 0);
		snapshot(&after, t, a);
		KVT_EXPECT(!memcmp(&before, &after, sizeof(before)));
		KVT_EXPECT_EQ(rig_alloc(s, a, 20, KV_GFP_PREFILL, g), 0);
		rig_fini(&r);
	}
	KVT_FAIL("the faults never end");
}

/* What the backend answers becomes the outcome its table promises. */
KVT_TEST(backend_errors_become_outcomes)
{
	static const struct {
		int error, gives;
	} t[] = {{-ENOMEM, KV_FULL},
		 {-EAGAIN, KV_PENDING},
		 {-EIO, -EIO},
		 {-EMFILE, -EMFILE}};
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g;

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	for (u32 i = 0; i < KV_ARRAY_SIZE(t); i++) {
		r.backend_error = t[i].error;
		KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, &g), t[i].gives);
		KVT_EXPECT_EQ(s->tenant->account.used_bytes, 0);
		rig_audit(&r);
	}
	r.backend_error = 0;
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_PREFILL, &g), 0);
	rig_fini(&r);
}

/* A grace epoch that cannot be saved is not published; pages wait and come back later. */
KVT_TEST(unsaved_grace_epoch_is_not_published)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g;
	u64 epoch;

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	r.core.mm.grace.bound = r.core.mm.grace.epoch + 1;
	epoch = r.core.mm.grace.epoch;
	r.calls = 0;
	r.fail_at = 1;
	kvd_grace_advance(&r.core.mm);
	KVT_EXPECT(r.fired);
	KVT_EXPECT_EQ(r.core.mm.grace.epoch, epoch);
	KVT_EXPECT_EQ(a->pool->table.shared->grace_epoch.word, epoch);
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 1);
	rig_audit(&r);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
	KVT_EXPECT(r.saved[KVD_SAVED_GRACE] > r.core.mm.grace.epoch);
	rig_fini(&r);
}

/* Damage is found, each flip once, and nothing is reported where nothing was damaged. */
KVT_TEST(audit_finds_flipped_bits)
{
	struct kvd_finding list[64];
	struct kvd_findings fs = {.list = list, .max = 64};
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[8];
	bool swept = false;

	rig_init(&r, 4, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_NOWAIT, g), 0);
	for (u32 i = 0; i < 10 && !swept; i++)
		swept = kvd_audit_slice(&r.core, 4, &fs);
	KVT_EXPECT(swept);
	KVT_EXPECT_EQ(fs.nr, 0);
	for (u32 n = 0; n < 200; n++) {
		u32 pfn = kvt_rand_below(8), bit = kvt_rand_below(60 * 8);
		u8 *byte = (u8 *)&a->pool->frames[pfn] + bit / 8;
		u64 *tag = &a->pool->table.tags[pfn];

		*byte ^= (u8)(1u << (bit % 8));
		fs.nr = 0;
		while (!kvd_audit_slice(&r.core, 1000, &fs))
			;
		KVT_EXPECT_EQ(fs.nr, 1);
		KVT_EXPECT_EQ(list[0].pfn, pfn);
		*byte ^= (u8)(1u << (bit % 8));
		*tag ^= 1ull << kvt_rand_below(64);
		fs.nr = 0;
		while (!kvd_audit_slice(&r.core, 1000, &fs))
			;
		KVT_EXPECT_EQ(fs.nr, 1);
		KVT_EXPECT_EQ(list[0].invariant, 3);
		*tag = a->pool->frames[pfn].tag;
	}
	a->refs[g[3].pfn]++; /* a reference that nobody counted */
	fs.nr = 0;
	KVT_EXPECT(kvd_audit(&r.core, &fs) > 0);
	KVT_EXPECT_EQ(list[0].invariant, 2);
	a->refs[g[3].pfn]--;
	s->tenant->account.used_bytes++;
	KVT_EXPECT_EQ(kvd_audit(&r.core, &fs), 1);
	KVT_EXPECT_EQ(list[0].invariant, 7);
	s->tenant->account.used_bytes--;
	a->pool->extents[0].domain_id++;
	KVT_EXPECT_EQ(kvd_audit(&r.core, &fs), 8);
	KVT_EXPECT_EQ(list[0].invariant, 8);
	a->pool->extents[0].domain_id--;
	rig_fini(&r);
}

KVT_MAIN()
