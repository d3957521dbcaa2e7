/* SPDX-License-Identifier: Apache-2.0 */
/* Leases: alloc, free, pin, revoke, magazines, forks; outcomes and what they leave
 * behind. */
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
	KVT_EXPECT(a->pool->table.tags[g.pfn] > g.tag &&
		   !kv_tag_live(a->pool->table.tags[g.pfn]));
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 1);
	rig_audit(&r);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_quarantine(a->pool), 0);
	KVT_EXPECT_EQ(kvd_pool_nr_free(a->pool), 8);
	KVT_EXPECT_EQ(s->tenant->account.used_bytes, 0);
	rig_fini(&r);
}

KVT_MAIN()
