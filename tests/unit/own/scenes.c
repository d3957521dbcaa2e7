/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scenes with many tenants in one core: admission beside heavy reclaim (R3), six engines
 * that drain a pool (R5), quotas up and down at random, forged salts (R8), and a probe
 * of another domain's prefixes that times the answers (O44).
 */
#include <stdlib.h>

#include "base/clock.h"
#include "tests/unit/own/common.h"

static struct rig r;

/*
 * R3: 90 % of the pool is being reclaimed for one tenant. Another one's single pages are
 * admitted meanwhile: no call evicts anything, no turn evicts more than a slice, and a
 * page comes within a few turns.
 */
KVT_TEST(r3_admission_beside_reclaim)
{
	enum { EXTENTS = 64, EACH = 64, PAGES = EXTENTS * EACH };
	u32 wanted = PAGES * 9 / 10, got = 0, turns = 0, longest = 0, since = 0;
	static struct kv_grant g[PAGES];
	struct kvd_session *s, *s2, *s3;
	struct kvd_attach *a, *b, *c;
	struct kv_grant one;
	u64 evicted;

	rig_init(&r, EXTENTS, EACH);
	a = rig_client(&r, rig_tenant(&r, r.red, "cache", 0, 0), &s);
	b = rig_client(&r, rig_tenant(&r, r.red, "hungry", 0, 0), &s2);
	c = rig_client(&r, rig_tenant(&r, r.red, "small", 0, 0), &s3);
	for (u32 i = 0; i < PAGES / 64; i++)
		rig_cache(&r, s, a, i, 64);
	KVT_EXPECT(a->pool->nr[KVD_CACHED] > PAGES * 9 / 10);
	for (; got < wanted && turns < 1000; turns++) {
		u32 nr = KV_MIN(512u, wanted - got);
		int rc;

		evicted = a->pool->nr_evictions;
		if (!rig_alloc(s2, b, nr, KV_GFP_NOWAIT, g + got))
			got += nr;
		rc = rig_alloc(s3, c, 1, KV_GFP_NOWAIT, &one);
		KVT_EXPECT(rc == 0 || rc == KV_PENDING);
		KVT_EXPECT_EQ(a->pool->nr_evictions, evicted);
		since = rc ? since + 1 : 0;
		longest = KV_MAX(longest, since);
		if (!rc)
			KVT_EXPECT_EQ(rig_free1(s3, c, one), 0);
		kvd_core_now(&r.core, r.now += 1000000);
		kvd_core_run(&r.core);
		KVT_EXPECT(a->pool->nr_evictions - evicted <= KVD_RECLAIM_SLICE);
	}
	printf("# %u pages in %u turns, a single page waited for %u turns at most\n", got,
	       turns, longest);
	KVT_EXPECT_EQ(got, wanted);
	KVT_EXPECT(longest <= 3);
	rig_audit(&r);
	rig_fini(&r);
}

/*
 * R5: six engines drain one pool in batches while one outside call after the other fails.
 * Nothing leaks, every batch is whole or not at all, and when pages come back each of the
 * six gets some again.
 */
KVT_TEST(r5_six_engines_drain_a_pool)
{
	enum { ENGINES = 6, BATCH = 5 };
	struct kv_grant g[ENGINES][32], again;
	struct kvd_session *s[ENGINES];
	struct kvd_attach *a[ENGINES];

	for (u32 n = 1; n < 40; n++) {
		u32 have[ENGINES] = {0}, refused = 0, sum = 0;
		struct kvd_tenant *t;

		rig_init(&r, 8, 8);
		t = rig_tenant(&r, r.red, "t", 0, 0);
		for (u32 i = 0; i < ENGINES; i++)
			a[i] = rig_client(&r, t, &s[i]);
		r.calls = 0;
		r.fail_at = n;
		while (refused < ENGINES) {
			refused = 0;
			for (u32 i = 0; i < ENGINES; i++) {
				u32 used = a[i]->nr_held;
				int rc = rig_alloc(s[i], a[i], BATCH, KV_GFP_NOWAIT,
						   g[i] + have[i]);

				KVT_EXPECT_EQ(a[i]->nr_held - used, rc ? 0 : BATCH);
				have[i] += rc ? 0 : BATCH;
				refused += rc == KV_FULL;
				rig_run(&r);
			}
			rig_audit(&r);
		}
		r.fail_at = 0;
		for (u32 i = 0; i < ENGINES; i++) {
			KVT_EXPECT(have[i] >= BATCH);
			sum += have[i];
		}
		KVT_EXPECT_EQ(sum, 64 / BATCH * BATCH);
		for (u32 i = 0; i < ENGINES; i++) {
			KVT_EXPECT_EQ(rig_free1(s[i], a[i], g[i][0]), 0);
			rig_run(&r);
			KVT_EXPECT_EQ(rig_alloc(s[i], a[i], 1, KV_GFP_NOWAIT, &again), 0);
		}
		rig_audit(&r);
		if (!r.fired) {
			rig_fini(&r);
			KVT_EXPECT(n > 8);
			return;
		}
		rig_fini(&r);
	}
	KVT_FAIL("the faults never end");
}

/* What a tenant holds: never above the max that was in force when it was granted, never
 * reclaimed below its min, and the promises of all add up. */
KVT_TEST(quotas_up_and_down)
{
	enum { TENANTS = 4, PAGES = 128 };
	struct kvd_tenant *t[TENANTS];
	struct kvd_session *s[TENANTS];
	struct kvd_attach *a[TENANTS];
	static struct kv_grant g[TENANTS][PAGES];
	u32 nr[TENANTS] = {0}, deferrals = 0;
	char name[8];

	rig_init(&r, 16, 8);
	for (u32 i = 0; i < TENANTS; i++) {
		snprintf(name, sizeof(name), "t%u", i);
		t[i] = rig_tenant(&r, r.red, name, 0, PAGES);
		a[i] = rig_client(&r, t[i], &s[i]);
	}
	for (u32 round = 0; round < 4000; round++) {
		u32 i = kvt_rand_below(TENANTS), k;
		u64 max = t[i]->account.max_bytes, used = t[i]->account.used_bytes;

		switch (kvt_rand_below(4)) {
		case 0: {
			struct kvd_limits l = {.weight = 1 + kvt_rand_below(4)};
			bool deferred = false;

			l.max_bytes = (1 + kvt_rand_below(PAGES)) * RIG_STRIDE;
			l.high_bytes = l.max_bytes;
			l.min_bytes = kvt_rand_below(24) * RIG_STRIDE;
			if (kvd_tenant_set_limits(&r.core, t[i], &l, &deferred))
				KVT_EXPECT_EQ(t[i]->account.max_bytes, max);
			else
				KVT_EXPECT_EQ(deferred, used > l.max_bytes);
			deferrals += deferred;
			break;
		}
		case 1:
			k = 1 + kvt_rand_below(8);
			if (nr[i] + k > PAGES ||
			    rig_alloc(s[i], a[i], k, KV_GFP_PREFILL, g[i] + nr[i]))
				break;
			nr[i] += k;
			KVT_EXPECT(t[i]->account.used_bytes <= max);
			break;
		case 2:
			if (!nr[i])
				break;
			k = kvt_rand_below(nr[i]);
			KVT_EXPECT_EQ(rig_free1(s[i], a[i], g[i][k]), 0);
			g[i][k] = g[i][--nr[i]];
			break;
		default:
			rig_run(&r);
		}
		if (round % 256 == 0)
			rig_audit(&r);
	}
	KVT_EXPECT(deferrals > 10);
	/* raised again: everybody is served */
	for (u32 i = 0; i < TENANTS; i++) {
		struct kvd_limits l = {.high_bytes = PAGES * RIG_STRIDE,
				       .max_bytes = PAGES * RIG_STRIDE,
				       .weight = 1};
		bool deferred;

		while (nr[i])
			KVT_EXPECT_EQ(rig_free1(s[i], a[i], g[i][--nr[i]]), 0);
		KVT_EXPECT_EQ(kvd_tenant_set_limits(&r.core, t[i], &l, &deferred), 0);
	}
	rig_run(&r);
	for (u32 i = 0; i < TENANTS; i++)
		KVT_EXPECT_EQ(rig_alloc(s[i], a[i], 8, KV_GFP_PREFILL, g[i]), 0);
	rig_audit(&r);
	rig_fini(&r);
}

/* The session unmaps what it is told to. */
static void unmap(struct kvd_session *s, struct kvd_attach *a)
{
	for (u32 i = 0; i < a->pool->nr_extents; i++) {
		struct kv_extent_ref ref = {.index = i,
					    .serial = a->pool->extents[i].serial};

		if (a->pool->extents[i].state == KVD_EXTENT_DRAINING)
			KVT_EXPECT_EQ(kvd_session_unmapped(s, a->pool->id, &ref), 0);
	}
}

/* Leaves memory as an engine does that was busy and is idle now: cached prefixes, free
 * extents, and a stocked page in every extent that is left. */
static void use_and_idle(struct kvd_session *s, struct kvd_attach *a, u32 extents)
{
	u32 nr, pending, each = 1u << a->pool->geo.shift;
	struct kv_grant g[256];

	rig_cache(&r, s, a, 1, each);
	nr = (extents - 1) * each;
	KVT_EXPECT(nr <= KV_ARRAY_SIZE(g));
	KVT_EXPECT_EQ(rig_alloc(s, a, nr, KV_GFP_NOWAIT, g), 0);
	/* one page of each extent goes into the magazine, then the others are freed */
	for (u32 i = 0; i < nr; i += each) {
		KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
		rig_run(&r);
		KVT_EXPECT_EQ(
			kvd_lease_stock(s, a, 0, 1, KV_GFP_NOWAIT, &pending, &pending),
			0);
	}
	for (u32 i = 0; i < nr; i++)
		if (i % each)
			KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(a->pool->nr_live_extents, extents);
	KVT_EXPECT_EQ(a->pool->nr[KVD_MAGAZINE], extents - 1);
}

/* Time until @nr pages are served, one try every 10 ms. */
static u64 time_until_served(struct kvd_session *s, struct kvd_attach *a, u32 nr,
			     struct kvd_session *idle, struct kvd_attach *b)
{
	static struct kv_grant g[256];
	u64 start = r.now;
	u32 tries = 0;

	while (rig_alloc(s, a, nr, KV_GFP_PREFILL, g)) {
		KVT_EXPECT(++tries < 300);
		kvd_core_now(&r.core, r.now += 10000000);
		rig_run(&r);
		unmap(idle, b);
	}
	return r.now - start;
}

/*
 * A tenant that idles gives back within a second: to another layout's pool of its domain,
 * and to another domain, where memory goes through unmap and the driver. Nobody works on
 * its cache, its free extents or its stock.
 */
KVT_TEST(idle_memory_goes_to_who_needs_it)
{
	enum { EXTENTS = 8, EACH = 8 };
	struct kv_layout lora = rig_layout(1);

	for (u32 across = 0; across < 2; across++) {
		struct kvd_tenant *t, *t2;
		struct kvd_session *s, *s2;
		struct kvd_attach *a, *b;
		u64 ns;

		rig_init(&r, EXTENTS, EACH);
		t = rig_tenant(&r, r.red, "idle", 0, 0);
		t2 = rig_tenant(&r, across ? r.blue : r.red, "needs", 0, 0);
		a = rig_client(&r, t, &s);
		use_and_idle(s, a, EXTENTS);
		if (across) {
			b = rig_client(&r, t2, &s2);
		} else {
			s2 = rig_session(&r, t2);
			b = rig_open(s2, &lora);
		}
		ns = time_until_served(s2, b, EXTENTS * EACH, s, a);
		printf("# %s: %llu ms\n", across ? "across domains" : "across pools",
		       (unsigned long long)(ns / 1000000));
		KVT_EXPECT(ns <= 1000000000);
		KVT_EXPECT_EQ(t->account.used_bytes, 0);
		rig_audit(&r);
		rig_fini(&r);
	}
}

/* R8: the same prompt in two domains; what a client says of itself changes nothing. */
KVT_TEST(r8_same_prompt_two_domains)
{
	struct kvd_session *s, *s2, *s3;
	struct kvd_attach *a, *b, *c;
	struct kv_seal_ret rets[8], forged;
	struct kv_grant g[8], one;
	struct kv_hit hits[9];
	u32 nr = 0;

	rig_init(&r, 8, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "a", 0, 0), &s);
	b = rig_client(&r, rig_tenant(&r, r.red, "b", 0, 0), &s2);
	c = rig_client(&r, rig_tenant(&r, r.blue, "c", 0, 0), &s3);
	KVT_EXPECT_EQ(rig_alloc(s, a, 8, KV_GFP_PREFILL, g), 0);
	KVT_EXPECT_EQ(rig_seal(s, a, g, 8, 1, 0, NULL, rets), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 8, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 8);
	KVT_EXPECT_EQ(rig_lookup(s3, c, 1, 8, hits, &nr), KV_MISS);
	KVT_EXPECT_EQ(nr, 0);
	KVT_EXPECT(memcmp(a->pool->root_key, c->pool->root_key, KV_KEY_BYTES));
	/* a key taken from the other domain is no way in: as a salt it makes a page that
	 * neither side finds, and none of what lies below it */
	one = rig_alloc1(s3, c);
	KVT_EXPECT_EQ(rig_seal(s3, c, &one, 1, 1, 8, rets[7].key, &forged), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 9, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 8);
	KVT_EXPECT_EQ(rig_lookup(s3, c, 1, 9, hits, &nr), KV_MISS);
	rig_audit(&r);
	rig_fini(&r);
}

static int cmp_sample(const void *x, const void *y)
{
	const double *a = x, *b = y;

	return a[0] < b[0] ? -1 : a[0] > b[0];
}

/* Chance that a present prefix takes longer than an absent one: 0.5 tells nothing. */
static double auc(double (*samples)[2], u32 nr)
{
	double rank_sum = 0, present = 0;

	qsort(samples, nr, sizeof(*samples), cmp_sample);
	for (u32 i = 0; i < nr; i++) {
		if (samples[i][1] == 0)
			continue;
		rank_sum += i + 1;
		present++;
	}
	return (rank_sum - present * (present + 1) / 2) /
	       (present * ((double)nr - present));
}

/*
 * O44: a tenant of another domain probes 10,000 prefixes, half of which the first domain
 * has. It never hits, and how long the answers take says nothing about which they are.
 */
KVT_TEST(o44_probe_of_another_domain)
{
	enum { PROBES = 10000, RUNS = 200 };
	static double samples[PROBES][2];
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kv_hit hits[4];
	double best = 1;
	u32 nr, k;

	rig_init(&r, 128, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "victim", 0, 0), &s);
	b = rig_client(&r, rig_tenant(&r, r.blue, "prober", 0, 0), &s2);
	for (u32 i = 0; i < RUNS; i++)
		rig_cache(&r, s, a, i, 4);
	/* a busy machine disturbs both sorts alike; the best of three is what counts */
	for (u32 try = 0; try < 3; try++) {
		double gap;

		for (u32 i = 0; i < PROBES; i++) {
			u32 present = kvt_rand_below(2);
			u64 seq = kvt_rand_below(RUNS) + (present ? 0 : RUNS), start_ns;

			start_ns = kv_now_ns();
			k = (u32)rig_lookup(s2, b, seq, 4, hits, &nr);
			samples[i][0] = (double)(kv_now_ns() - start_ns);
			samples[i][1] = present;
			KVT_EXPECT_EQ(k, KV_MISS);
		}
		gap = auc(samples, PROBES) - 0.5;
		best = KV_MIN(best, gap < 0 ? -gap : gap);
	}
	printf("# area under the curve 0.5 +- %.4f over %u probes\n", best, PROBES);
	KVT_EXPECT(best <= 0.02);
	rig_fini(&r);
}

KVT_MAIN()
