/* SPDX-License-Identifier: Apache-2.0 */
/* pages.c - attacks on pages: the victim's, one's own twice, ones that never were. */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#include "base/clock.h"
#include "tests/hostile/hostile.h"

static struct ipc_raw r;
static struct held held;

static struct kv_sqe refs_sqe(u8 op, const struct kv_page_ref *refs, u32 nr)
{
	struct kv_sqe sqe = raw_sqe(&r, op);

	memcpy(raw_arg(&r, 0), refs, nr * sizeof(*refs));
	sqe.nr = nr;
	sqe.arg_bytes = nr * (u32)sizeof(*refs);
	sqe.ret_off = 65536;
	sqe.ret_bytes = op == KV_OP_FORK ? nr * (u32)sizeof(struct kv_grant) : 0;
	return sqe;
}

static struct kv_grant alloc_one(void)
{
	struct kv_sqe sqe = raw_sqe(&r, KV_OP_ALLOC);
	struct kv_grant g;

	sqe.nr = 1;
	sqe.ret_off = 131072;
	sqe.ret_bytes = sizeof(g);
	answers(&r, sqe, 0);
	memcpy(&g, raw_arg(&r, 131072), sizeof(g));
	return g;
}

/* The victim's page by its true number and tag: nothing may be done with it. */
static void victims_page(const struct scene *sc, u8 op)
{
	struct kv_page_ref ref = {.pfn = sc->seen->page.pfn, .tag = sc->seen->page.tag};

	attacker_open(sc, &r, &held);
	answers(&r, refs_sqe(op, &ref, 1), KV_STALE);
}

static void free_victims(const struct scene *sc)
{
	victims_page(sc, KV_OP_FREE);
}

static void unpin_victims(const struct scene *sc)
{
	victims_page(sc, KV_OP_UNPIN);
}

static void pin_victims(const struct scene *sc)
{
	victims_page(sc, KV_OP_PIN);
}

static void fork_victims(const struct scene *sc)
{
	victims_page(sc, KV_OP_FORK);
}

static void seal_victims(const struct scene *sc)
{
	struct kv_seal_arg *arg;
	struct kv_seal_page *page;
	struct kv_sqe sqe;

	attacker_open(sc, &r, &held);
	arg = raw_arg(&r, 0);
	page = (void *)(arg + 1);
	*arg = (struct kv_seal_arg){.flags = KV_SEAL_ROOT};
	*page = (struct kv_seal_page){.pfn = sc->seen->page.pfn,
				      .tag = sc->seen->page.tag};
	sqe = raw_sqe(&r, KV_OP_SEAL);
	sqe.nr = 1;
	sqe.arg_bytes = sizeof(*arg) + sizeof(*page) + KV_PAGE_TOKENS * 4;
	sqe.ret_off = 65536;
	sqe.ret_bytes = sizeof(struct kv_seal_ret);
	answers(&r, sqe, KV_STALE);
}

static int lookup(const u32 *tokens)
{
	struct kv_lookup_arg *arg = raw_arg(&r, 0);
	struct kv_sqe sqe = raw_sqe(&r, KV_OP_LOOKUP);

	*arg = (struct kv_lookup_arg){0};
	memcpy(arg + 1, tokens, KV_PAGE_TOKENS * 4);
	sqe.nr = KV_PAGE_TOKENS;
	sqe.arg_bytes = sizeof(*arg) + KV_PAGE_TOKENS * 4;
	sqe.ret_off = 65536;
	sqe.ret_bytes = sizeof(struct kv_hit);
	return raw_call(&r, sqe).result;
}

static void victims_prefix(const struct scene *sc)
{
	attacker_open(sc, &r, &held);
	for (u32 i = 0; i < 200; i++)
		KVT_EXPECT_EQ(lookup(sc->seen->tokens), KV_MISS);
}

static int cmp(const void *a, const void *b)
{
	const u64 *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

/* Median of the answers to a foreign page over that to an absent one. */
static double answer_ratio(const struct kv_page_ref *foreign,
			   const struct kv_page_ref *absent)
{
	enum { NR = 2000 };
	static u64 ns[2][NR];
	u32 nr[2] = {0, 0};

	while (nr[0] < NR || nr[1] < NR) {
		/* in no order: what the last one left behind helps neither */
		u32 kind = (u32)(rand() >> 8) & 1;
		struct kv_sqe sqe;
		struct kv_cqe cqe;
		u64 start_ns;

		if (nr[kind] == NR)
			kind = !kind;
		sqe = refs_sqe(KV_OP_PIN, kind ? foreign : absent, 1);
		start_ns = kv_now_ns();
		raw_push(&r, sqe);
		while (kv_load_acquire32(&r.ring->cq_tail) == r.cq_head)
			;
		ns[kind][nr[kind]++] = kv_now_ns() - start_ns;
		KVT_EXPECT_EQ(raw_pop(&r, &cqe, 1000), 0);
		KVT_EXPECT_EQ(cqe.result, KV_STALE);
	}
	for (u32 k = 0; k < 2; k++)
		qsort(ns[k], NR, sizeof(u64), cmp);
	return (double)ns[1][NR / 2] / (double)ns[0][NR / 2];
}

/*
 * Foreign, absent, out of date: the same answer, and the medians tell nothing apart. A
 * machine with other work disturbs single tries; a difference that is real is there in
 * each of them. On one CPU kvmd answers when the scheduler lets it: nothing to be told then.
 */
static void equal_timing(const struct scene *sc)
{
	struct kv_page_ref foreign, absent;
	double ratio = 0;
	cpu_set_t cpus;

	attacker_open(sc, &r, &held);
	if (sched_getaffinity(0, sizeof(cpus), &cpus) || CPU_COUNT(&cpus) < 2)
		return;
	foreign = (struct kv_page_ref){.pfn = sc->seen->page.pfn,
				       .tag = sc->seen->page.tag};
	absent = (struct kv_page_ref){.pfn = sc->seen->page.pfn, .tag = 0x700};
	for (u32 try = 0; try < 8; try++) {
		ratio = answer_ratio(&foreign, &absent);
		if (ratio > 0.9 && ratio < 1.1)
			return;
	}
	KVT_FAIL("a foreign page is answered in %.2f times the time", ratio);
}

static void free_twice(const struct scene *sc)
{
	struct kv_page_ref refs[2];
	struct kv_grant g;

	attacker_open(sc, &r, &held);
	g = alloc_one();
	refs[0] = refs[1] = (struct kv_page_ref){.pfn = g.pfn, .tag = g.tag};
	answers(&r, refs_sqe(KV_OP_FREE, refs, 2), KV_STALE);
	answers(&r, refs_sqe(KV_OP_FREE, refs, 1), KV_STALE);
}

static void old_generations(const struct scene *sc)
{
	struct kv_page_ref ref;
	struct kv_grant g;

	attacker_open(sc, &r, &held);
	g = alloc_one();
	for (u64 gen = 0; gen < 300; gen++) {
		ref = (struct kv_page_ref){.pfn = g.pfn, .tag = gen << 8 | 1};
		if (kv_tag_gen(ref.tag) != kv_tag_gen(g.tag))
			answers(&r, refs_sqe(KV_OP_FREE, &ref, 1), KV_STALE);
	}
	ref = (struct kv_page_ref){.pfn = g.pfn, .tag = ~0ull};
	answers(&r, refs_sqe(KV_OP_FREE, &ref, 1), KV_STALE);
	ref.tag = g.tag;
	answers(&r, refs_sqe(KV_OP_FREE, &ref, 1), 0);
}

static void far_pages(const struct scene *sc)
{
	static const u32 pfns[] = {~0u, 1u << 31, 1u << 24};
	struct kv_page_ref ref;

	attacker_open(sc, &r, &held);
	for (u32 op = KV_OP_FREE; op <= KV_OP_FORK; op++) {
		if (op == KV_OP_SEAL || op == KV_OP_LOOKUP)
			continue;
		for (u32 i = 0; i < KV_ARRAY_SIZE(pfns); i++) {
			ref = (struct kv_page_ref){.pfn = pfns[i], .tag = 0x101};
			KVT_EXPECT(raw_call(&r, refs_sqe((u8)op, &ref, 1)).result != 0);
		}
	}
}

static void forged_parent(const struct scene *sc)
{
	struct kv_seal_arg *arg;
	struct kv_seal_page *page;
	struct kv_grant g;
	struct kv_sqe sqe;

	attacker_open(sc, &r, &held);
	g = alloc_one();
	arg = raw_arg(&r, 0);
	page = (void *)(arg + 1);
	*arg = (struct kv_seal_arg){0};
	memset(arg->parent_key, 0x41, KV_KEY_BYTES);
	*page = (struct kv_seal_page){.pfn = g.pfn, .tag = g.tag};
	memcpy(page + 1, sc->seen->tokens, KV_PAGE_TOKENS * 4);
	sqe = raw_sqe(&r, KV_OP_SEAL);
	sqe.nr = 1;
	sqe.arg_bytes = sizeof(*arg) + sizeof(*page) + KV_PAGE_TOKENS * 4;
	sqe.ret_off = 65536;
	sqe.ret_bytes = sizeof(struct kv_seal_ret);
	raw_call(&r, sqe); /* its own to poison, nobody else's */
	KVT_EXPECT_EQ(lookup(sc->seen->tokens), KV_MISS);
}

static void forged_incidents(const struct scene *sc)
{
	struct kv_sqe sqe;

	attacker_open(sc, &r, &held);
	for (u32 i = 0; i < 2000; i++) {
		struct kv_incident *in = raw_arg(&r, 0);

		*in = (struct kv_incident){.pfn = i * 7919u, .bits = ~0u, .found = i};
		sqe = raw_sqe(&r, KV_OP_REPORT);
		sqe.arg_bytes = sizeof(*in);
		raw_call(&r, sqe);
	}
}

static void unmapped_lies(const struct scene *sc)
{
	struct kv_sqe sqe;

	attacker_open(sc, &r, &held);
	for (u32 i = 0; i < 100; i++) {
		struct kv_extent_ref *ref = raw_arg(&r, 0);

		*ref = (struct kv_extent_ref){.index = i * 1001, .serial = i};
		sqe = raw_sqe(&r, KV_OP_UNMAPPED);
		sqe.arg_bytes = sizeof(*ref);
		KVT_EXPECT(raw_call(&r, sqe).result != 0);
	}
}

/* 16 rings ask for half the quota each, at the same time. */
static int race(void *arg)
{
	const struct scene *sc = *(const struct scene **)arg;
	struct kv_sqe sqe;
	u32 got = 0;

	raw_open(&r, &sc->d);
	for (u32 i = 0; i < 64; i++) {
		sqe = raw_sqe(&r, KV_OP_ALLOC);
		sqe.nr = 64;
		sqe.ret_bytes = 64 * sizeof(struct kv_grant);
		got += raw_call(&r, sqe).result == 0;
	}
	usleep(200000);
	return (int)KV_MIN(got, 100u);
}

static void quota_race(const struct scene *sc)
{
	u64 pages = 0, stride;
	struct kv_sqe sqe;
	struct kv_stat *stat;
	pid_t pids[16];

	attacker_open(sc, &r, &held);
	for (u32 i = 0; i < KV_ARRAY_SIZE(pids); i++) {
		pids[i] = fork();
		if (!pids[i])
			_exit(race(&sc));
	}
	for (u32 i = 0; i < KV_ARRAY_SIZE(pids); i++)
		pages += (u64)ipc_wait(pids[i]) * 64;
	sqe = raw_sqe(&r, KV_OP_STAT);
	sqe.ret_bytes = sizeof(*stat);
	answers(&r, sqe, 0);
	stat = raw_arg(&r, 0);
	stride = 69632; /* at least: the page's own bytes */
	KVT_EXPECT(stat->tenant_used_bytes <= stat->tenant_max_bytes);
	KVT_EXPECT(pages * stride <= stat->tenant_max_bytes + stat->tenant_max_bytes);
}

static void all_of_the_quota(const struct scene *sc)
{
	struct kv_sqe sqe;
	u32 i;

	attacker_open(sc, &r, &held);
	for (i = 0; i < 4096; i++) {
		sqe = raw_sqe(&r, KV_OP_ALLOC);
		sqe.nr = 64;
		sqe.ret_bytes = 64 * sizeof(struct kv_grant);
		if (raw_call(&r, sqe).result)
			break;
	}
	KVT_EXPECT(i > 0 && i < 4096);
	usleep(200000); /* the victim is served meanwhile */
}

static void long_lookups(const struct scene *sc)
{
	struct kv_sqe sqe;

	attacker_open(sc, &r, &held);
	for (u32 i = 0; i < 300; i++) {
		struct kv_lookup_arg *arg = raw_arg(&r, 0);
		u32 *tokens = (u32 *)(arg + 1);

		*arg = (struct kv_lookup_arg){0};
		for (u32 k = 0; k < 131072; k += 64)
			tokens[k] = i * 131071 + k;
		sqe = raw_sqe(&r, KV_OP_LOOKUP);
		sqe.nr = 131072;
		sqe.arg_bytes = (u32)sizeof(*arg) + 131072 * 4;
		sqe.ret_off = 1 << 20;
		sqe.ret_bytes = 64 * sizeof(struct kv_hit);
		KVT_EXPECT_EQ(raw_call(&r, sqe).result, KV_MISS);
	}
}

const struct attack attacks_pages[] = {
	{"FREE of the victim's page", "STALE", free_victims},
	{"UNPIN of the victim's page", "STALE", unpin_victims},
	{"PIN of the victim's page", "STALE", pin_victims},
	{"FORK of the victim's page", "STALE", fork_victims},
	{"SEAL of the victim's page", "STALE", seal_victims},
	{"LOOKUP of the victim's prefix", "MISS", victims_prefix},
	{"foreign and absent pages, timed", "medians within 10 %", equal_timing},
	{"double free, in one batch and after", "STALE", free_twice},
	{"300 old generations", "STALE each", old_generations},
	{"pages out of range", "refused each", far_pages},
	{"a forged parent key", "finds nobody's pages", forged_parent},
	{"2,000 forged incidents", "bounded, named", forged_incidents},
	{"UNMAPPED of what was never given", "refused each", unmapped_lies},
	{"quota race of 16 rings", "never above the quota", quota_race},
	{"all of the quota at once", "the victim is served", all_of_the_quota},
	{"300 lookups of 131,072 tokens", "the victim is served", long_lookups},
	{NULL, NULL, NULL},
};
