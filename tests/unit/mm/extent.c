/* SPDX-License-Identifier: Apache-2.0 */
/* Geometry of pools, and the LRU's order: leaves first, oldest first. */
#include "tests/unit/own/common.h"

#define MIB (1ull << 20)

KVT_TEST(geometry_wastes_less_than_3_percent)
{
	static const struct kvd_backend_limits gpu = {0, 64 * MIB, 1024 * MIB, 2 * MIB,
						      141ull << 30};
	static const struct kvd_backend_limits host = {0, 2 * MIB, 1024 * MIB, 4096,
						       4ull << 30};
	static const u64 strides[] = {2265088, /* K2, mla_fp8 rounded, 61 layers */
				      4497408, 2248704, 36864,	  40960,    73728,
				      81920,   131072,	12058624, 24117248, 188416};

	for (u32 i = 0; i < KV_ARRAY_SIZE(strides); i++) {
		struct kv_geometry g;
		u64 used;

		KVT_EXPECT_EQ(kvd_geometry_choose(strides[i], &gpu, &g), 0);
		used = strides[i] << g.shift;
		KVT_EXPECT(g.extent_bytes >= 64 * MIB && g.extent_bytes <= 1024 * MIB);
		KVT_EXPECT_EQ(g.extent_bytes % (2 * MIB), 0);
		KVT_EXPECT_LE((double)(g.extent_bytes - used),
			      0.03 * (double)g.extent_bytes);
		KVT_EXPECT_EQ(g.nr_pages % (1u << g.shift), 0);
		KVT_EXPECT_LE((double)g.nr_pages * (double)strides[i],
			      (double)gpu.capacity_bytes);
		KVT_EXPECT_EQ(kvd_geometry_choose(strides[i], &host, &g), 0);
		used = strides[i] << g.shift;
		KVT_EXPECT_LE((double)(g.extent_bytes - used),
			      0.03 * (double)g.extent_bytes);
		KVT_EXPECT_LE((double)g.extent_bytes,
			      32.0 * MIB); /* small hosts grow in small steps */
	}
}

KVT_TEST(geometry_at_the_edges)
{
	struct kvd_backend_limits l = {0, 2 * MIB, 64 * MIB, 4096, 16 * MIB};
	struct kv_geometry g;

	KVT_EXPECT_EQ(kvd_geometry_choose(16 * MIB + 4096, &l, &g), -E2BIG);
	KVT_EXPECT_EQ(kvd_geometry_choose(16 * MIB, &l, &g), 0);
	KVT_EXPECT_EQ(g.shift, 0);
	KVT_EXPECT_EQ(g.nr_pages, 1);
	/* nothing is good: the least bad, never beyond the capacity */
	KVT_EXPECT_EQ(kvd_geometry_choose(1 * MIB + 4096, &l, &g), 0);
	KVT_EXPECT_LE(g.extent_bytes, 16 * MIB);
	for (u64 stride = 4096; stride < 16 * MIB; stride += 4096 * 37) {
		KVT_EXPECT_EQ(kvd_geometry_choose(stride, &l, &g), 0);
		KVT_EXPECT((stride << g.shift) <= g.extent_bytes);
		KVT_EXPECT(kv_page_offset(&g, g.nr_pages - 1) + stride <=
			   l.capacity_bytes);
	}
}

static struct rig r;
static struct kvd_session *s;
static struct kvd_attach *a;

static u32 cached_of(u64 seq, u32 max)
{
	struct kv_hit hits[64];
	u32 nr = 0;

	rig_lookup(s, a, seq, max, hits, &nr);
	for (u32 i = 0; i < nr; i++) /* let go in order, as a request's table is freed */
		KVT_EXPECT_EQ(rig_free1(s, a, hits[i].grant), 0);
	return nr;
}

static void evict(u32 nr)
{
	KVT_EXPECT_EQ(kvd_reclaim_pool(a->pool, s->tenant->index, nr, false), nr);
	rig_run(&r);
	rig_audit(&r);
}

/* A sequence loses its end, never its middle. */
KVT_TEST(leaves_go_first)
{
	rig_init(&r, 4, 16);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	rig_cache(&r, s, a, 1, 8);
	for (u32 left = 8; left-- > 0;) {
		evict(1);
		KVT_EXPECT_EQ(cached_of(1, 8), left);
	}
	rig_fini(&r);
}

KVT_TEST(oldest_goes_first)
{
	rig_init(&r, 4, 16);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	for (u64 seq = 0; seq < 4; seq++)
		rig_cache(&r, s, a, seq, 4);
	KVT_EXPECT_EQ(cached_of(0, 4), 4); /* used again: the newest now */
	evict(4); /* the tail of each other one, then the next layer */
	KVT_EXPECT_EQ(cached_of(0, 4), 4);
	evict(8);
	KVT_EXPECT_EQ(cached_of(0, 4), 4);
	KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], 4);
	rig_fini(&r);
}

/* A parent whose children are all in use goes only when there is nothing else. */
KVT_TEST(parents_of_used_pages_go_last)
{
	struct kv_hit hits[4];
	u32 nr;

	rig_init(&r, 4, 16);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	rig_cache(&r, s, a, 1, 3);
	KVT_EXPECT_EQ(rig_lookup(s, a, 1, 3, hits, &nr), 0);
	KVT_EXPECT_EQ(rig_free1(s, a, hits[0].grant), 0);
	KVT_EXPECT_EQ(rig_free1(s, a, hits[1].grant), 0); /* page 2 stays in use */
	rig_cache(&r, s, a, 2, 2);
	evict(2);
	KVT_EXPECT_EQ(cached_of(2, 2), 0);
	KVT_EXPECT_EQ(cached_of(1, 3), 3);
	evict(2); /* nothing else is left */
	KVT_EXPECT_EQ(a->pool->nr[KVD_CACHED], 0);
	KVT_EXPECT_EQ(cached_of(1, 3), 0); /* page 2 is not found without its parents */
	/* they come back under new pfns, and the orphan is found behind them again */
	rig_cache(&r, s, a, 1, 2);
	KVT_EXPECT_EQ(cached_of(1, 3), 3);
	KVT_EXPECT_EQ(rig_free1(s, a, hits[2].grant), 0);
	evict(1);
	KVT_EXPECT_EQ(cached_of(1, 3), 2); /* it was the leaf again */
	rig_fini(&r);
}

KVT_TEST(background_reclaim_keeps_the_watermark)
{
	u32 n = 0;

	rig_init(&r, 4, 64); /* 256 pages: low 4, high 8 */
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	while (n < 200)
		rig_cache(&r, s, a, n++, 2);
	KVT_EXPECT_EQ(a->pool->nr_live_extents, 4);
	rig_run(&r);
	KVT_EXPECT_LE(4, kvd_pool_nr_free(a->pool));
	KVT_EXPECT_LE(kvd_pool_nr_free(a->pool), 8);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_MAIN()
