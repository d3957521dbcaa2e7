/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a page costs does not depend on how many pages, sessions and tenants there are. The
 * best of many blocks is compared, so that a busy machine does not matter; the bounds
 * are far from what is measured and near to nothing that grows with the number.
 */
#include "base/clock.h"
#include "tests/unit/own/common.h"

enum { BLOCKS = 400, PAIRS = 16 };

static struct rig r;

/* ns of one alloc + free, and of the turn that ends a block. */
struct cost {
	double pair, turn;
};

static struct cost measure(struct kvd_session *s, struct kvd_attach *a)
{
	struct cost best = {1e12, 1e12};

	for (u32 b = 0; b < BLOCKS; b++) {
		u64 start_ns = kv_now_ns(), mid_ns, end_ns;

		for (u32 i = 0; i < PAIRS; i++) {
			struct kv_grant g = rig_alloc1(s, a);

			rig_free1(s, a, g);
		}
		mid_ns = kv_now_ns();
		kvd_core_run(&r.core);
		end_ns = kv_now_ns();
		best.pair = KV_MIN(best.pair, (double)(mid_ns - start_ns) / PAIRS);
		best.turn = KV_MIN(best.turn, (double)(end_ns - mid_ns));
	}
	return best;
}

static void hold(struct kvd_session *s, struct kvd_attach *a, u32 nr)
{
	static struct kv_grant g[4096];

	for (u32 done = 0; done < nr; done += 4096) {
		KVT_EXPECT_EQ(rig_alloc(s, a, KV_MIN(nr - done, 4096u),
					KV_GFP_NOWAIT | KV_GFP_GROW, g),
			      0);
		kvd_core_run(&r.core);
	}
}

static struct cost small_one(void)
{
	struct kvd_session *s;
	struct kvd_attach *a;
	struct cost c;

	rig_init(&r, 1, 1024);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	hold(s, a, 512);
	c = measure(s, a);
	rig_fini(&r);
	return c;
}

static void show(const char *what, struct cost c)
{
	printf("# %s: %.1f ns a pair, %.0f ns a turn\n", what, c.pair, c.turn);
}

/* 512 K pages, nearly all of them in use. */
KVT_TEST(cost_does_not_grow_with_pages)
{
	enum { EXTENT = 4096, EXTENTS = 128 };
	struct cost one = small_one(), many;
	struct kvd_session *s;
	struct kvd_attach *a;

	rig_init(&r, EXTENTS, EXTENT);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	hold(s, a, (EXTENTS - 1) * EXTENT);
	many = measure(s, a);
	show("1 K pages", one);
	show("512 K pages", many);
	KVT_EXPECT(many.pair <= 3 * one.pair);
	KVT_EXPECT(many.turn <= 3 * one.turn + 1000);
	rig_fini(&r);
}

/*
 * 200 more sessions of the domain: a request does not notice them. A turn that ends a
 * grace period reads their announce slots: that is what grace means, once for all pages.
 */
KVT_TEST(cost_does_not_grow_with_sessions)
{
	struct cost one = small_one(), many;
	struct kvd_session *s, *other;
	struct kvd_tenant *t;
	struct kvd_attach *a;

	rig_init(&r, 1, 1024);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	for (u32 i = 0; i < 200; i++)
		rig_client(&r, t, &other);
	hold(s, a, 512);
	many = measure(s, a);
	show("1 session", one);
	show("201 sessions", many);
	KVT_EXPECT(many.pair <= 3 * one.pair);
	KVT_EXPECT(many.turn <= one.turn + 200 * 300);
	rig_fini(&r);
}

/* 127 more tenants in four domains, each with a min that nobody has yet: each charge has
 * to leave that memory alone. */
KVT_TEST(cost_does_not_grow_with_tenants)
{
	struct kvd_domain *d[4] = {NULL};
	static const u8 secret[KVD_DOMAIN_SECRET_BYTES] = {1};
	struct cost one = small_one(), many;
	struct kvd_session *s;
	struct kvd_tenant *t;
	struct kvd_attach *a;
	char name[16];

	rig_init(&r, 4, 1024);
	d[0] = r.red;
	d[1] = r.blue;
	KVT_EXPECT_EQ(kvd_domain_create(&r.core, "green", secret, &d[2]), 0);
	KVT_EXPECT_EQ(kvd_domain_create(&r.core, "grey", secret, &d[3]), 0);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	for (u32 i = 1; i < 128; i++) {
		snprintf(name, sizeof(name), "t%u", i);
		rig_tenant(&r, d[i % 4], name, 2, 0);
	}
	a = rig_client(&r, t, &s);
	hold(s, a, 512);
	many = measure(s, a);
	show("1 tenant", one);
	show("128 tenants with a min", many);
	KVT_EXPECT(many.pair <= 4 * one.pair);
	KVT_EXPECT(many.turn <= 3 * one.turn + 1000);
	rig_fini(&r);
}

KVT_MAIN()
