/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm_core.c - the daemon's core in this process, for kvbench mm: no socket, no ring, no
 * page memory; records, tags, log, charges and grace periods are the real ones.
 *
 * The pool is nearly full. Each pair frees a random live page and allocates one, so that
 * the records it touches are cold; a turn is closed every PAIRS pairs, as the loop does
 * after a batch of requests, and its time counts.
 */
#include "tools/kvbench/mm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kvmd/own/lease.h"
#include "kvmd/own/prefix.h"
#include "kvmd/own/walk.h"
#include "tests/bench/core_rig.h"

#define PAIRS	     32u
#define SPARE_PAGES  4096u
#define EXTENT_PAGES 1024u

struct rig {
	struct core_rig core_rig;
	struct core_client client;
	u64 rng;
	u32 next;
};

/* ------------------------------------------------------------------------------- timing
 */

static u32 rng_below(struct rig *r, u32 n)
{
	r->rng ^= r->rng << 13;
	r->rng ^= r->rng >> 7;
	r->rng ^= r->rng << 17;
	return (u32)((r->rng >> 32) * n >> 32);
}

static int fill(struct rig *r, struct kv_grant *live, u32 nr)
{
	u32 pending, step;
	int e = 0;

	for (u32 i = 0; i < nr && !e; i += step) {
		step = KV_MIN(nr - i, 1024u);
		e = kvd_lease_alloc(r->client.session, r->client.attach, step,
				    KV_GFP_NOWAIT, live + i, &pending);
		kvd_core_run(&r->core_rig.core);
	}
	return e;
}

/* The page just allocated goes at once. */
static int pair_some(struct rig *r)
{
	u32 freed, first, pending;
	int e = 0;

	for (u32 k = 0; k < PAIRS && !e; k++) {
		struct kv_page_ref ref = {0};
		struct kv_grant g;

		e = kvd_lease_alloc(r->client.session, r->client.attach, 1, KV_GFP_NOWAIT,
				    &g, &pending);
		ref.pfn = g.pfn;
		ref.tag = g.tag;
		if (!e)
			e = kvd_lease_free(r->client.session, r->client.attach, &ref, 1,
					   &freed, &first);
	}
	kvd_core_run(&r->core_rig.core);
	return e;
}

static void shuffle(struct rig *r, struct kv_grant *live, u32 nr)
{
	for (u32 i = nr - 1; i > 0; i--) {
		u32 k = rng_below(r, i + 1);
		struct kv_grant g = live[i];

		live[i] = live[k];
		live[k] = g;
	}
}

/* A random live page goes, and one comes. The list is in random order already, so that
 * it is kvmd's memory that is cold, not the list. */
static int replace_some(struct rig *r, struct kv_grant *live, u32 nr)
{
	u32 freed, first, pending;
	int e = 0;

	for (u32 k = 0; k < PAIRS && !e; k++) {
		struct kv_grant *g = &live[r->next++ % nr];
		struct kv_page_ref ref = {.pfn = g->pfn, .tag = g->tag};

		e = kvd_lease_free(r->client.session, r->client.attach, &ref, 1, &freed,
				   &first);
		if (!e)
			e = kvd_lease_alloc(r->client.session, r->client.attach, 1,
					    KV_GFP_NOWAIT, g, &pending);
	}
	kvd_core_run(&r->core_rig.core);
	return e;
}

static int time_pairs(struct rig *r, struct kv_grant *live, u32 nr_live, double *ns,
		      u32 samples)
{
	int e = 0;

	for (u32 i = 0; i < samples && !e; i++) {
		u64 start_ns = kv_now_ns();

		e = live ? replace_some(r, live, nr_live) : pair_some(r);
		ns[i] = (double)(kv_now_ns() - start_ns) / PAIRS;
		kvd_core_now(&r->core_rig.core, start_ns);
	}
	return e;
}

static struct rig *rig_create(u32 nr_pages)
{
	struct rig *r = calloc(1, sizeof(*r));
	struct kvd_tenant *t;

	if (!r)
		return NULL;
	r->rng = 88172645463325252ull;
	if (core_rig_init(&r->core_rig, nr_pages, EXTENT_PAGES))
		goto free_rig;
	if (core_rig_tenant(&r->core_rig, "bench", 0, 0, &t) ||
	    core_rig_client(&r->core_rig, t, &r->client))
		goto fini_core;
	return r;
fini_core:
	core_rig_fini(&r->core_rig);
free_rig:
	free(r);
	return NULL;
}

static void rig_destroy(struct rig *r)
{
	if (!r)
		return;
	core_rig_fini(&r->core_rig);
	free(r);
}

int kvb_mm_core_pair(u32 nr_pages, u32 samples, struct kvb_dist *ret,
		     struct kvb_dist *ret_random)
{
	u32 nr_live = nr_pages - KV_MIN(SPARE_PAGES, nr_pages / 2);
	struct kv_grant *live = calloc(nr_live, sizeof(*live));
	double *ns = calloc(samples, sizeof(*ns));
	struct rig *r = rig_create(nr_pages);
	int e = -ENOMEM;

	if (!r || !live || !ns)
		goto free_all;
	e = fill(r, live, nr_live);
	if (!e)
		e = time_pairs(r, NULL, 0, ns, samples);
	if (!e)
		kvb_dist_of(ret, ns, samples);
	shuffle(r, live, nr_live);
	if (!e)
		e = time_pairs(r, live, nr_live, ns, samples);
	if (!e)
		kvb_dist_of(ret_random, ns, samples);
free_all:
	rig_destroy(r);
	free(ns);
	free(live);
	return e;
}

/* ----------------------------------------------------------------------------- lookups
 */

#define RUN_PAGES 512u

/* Tokens of prefix @run: no two pages of the index are equal. */
static void run_tokens(u32 run, u32 *ret)
{
	for (u32 i = 0; i < RUN_PAGES * KV_PAGE_TOKENS; i++)
		ret[i] = (run * 1000003u + i) * 2654435761u;
}

static int let_go(struct rig *r, struct kv_page_ref *refs)
{
	u32 freed, first;
	int e = kvd_lease_free(r->client.session, r->client.attach, refs, RUN_PAGES,
			       &freed, &first);

	kvd_core_run(&r->core_rig.core);
	kvd_core_now(&r->core_rig.core, kv_now_ns());
	return e;
}

/* One prefix more in the index, its pages CACHED. */
static int run_seal(struct rig *r, const u32 *tokens)
{
	static struct kv_seal_page pages[RUN_PAGES];
	static struct kv_page_ref refs[RUN_PAGES];
	static struct kv_grant grants[RUN_PAGES];
	static struct kv_seal_ret rets[RUN_PAGES];
	struct kvd_seal_op op = {.s = r->client.session,
				 .a = r->client.attach,
				 .arg.flags = KV_SEAL_ROOT,
				 .pages = pages,
				 .tokens = tokens,
				 .rets = rets,
				 .nr = RUN_PAGES};
	u32 pending;
	int e;

	e = kvd_lease_alloc(r->client.session, r->client.attach, RUN_PAGES, KV_GFP_NOWAIT,
			    grants, &pending);
	if (e)
		return e;
	for (u32 i = 0; i < RUN_PAGES; i++) {
		pages[i] =
			(struct kv_seal_page){.pfn = grants[i].pfn, .tag = grants[i].tag};
		refs[i] =
			(struct kv_page_ref){.pfn = grants[i].pfn, .tag = grants[i].tag};
	}
	e = kvd_seal_start(&op);
	do {
		e = e ? e : kvd_seal_step(&op);
	} while (e == -EAGAIN && !(e = 0));
	kvd_core_run(&r->core_rig.core);
	return e ? e : let_go(r, refs);
}

static int run_lookup(struct rig *r, const u32 *tokens, bool by_key, double *ret_ns)
{
	static struct kv_hit hits[RUN_PAGES];
	struct kv_page_ref refs[RUN_PAGES] = {0};
	struct kvd_lookup_op op = {.s = r->client.session,
				   .a = r->client.attach,
				   .tokens = tokens,
				   .nr_tokens = RUN_PAGES * KV_PAGE_TOKENS,
				   .hits = hits,
				   .hits_max = RUN_PAGES};
	u64 start_ns = kv_now_ns();
	int e = kvd_lookup_start(&op);

	while (!e && (e = kvd_lookup_step(&op)) == -EAGAIN) {
		kvd_core_run(&r->core_rig.core); /* as between two turns of the loop */
		e = 0;
	}
	*ret_ns = (double)(kv_now_ns() - start_ns);
	if (e || op.nr != RUN_PAGES)
		return e ? e : -EIO;
	for (u32 i = 0; i < RUN_PAGES; i++) {
		refs[i].pfn = hits[i].grant.pfn;
		refs[i].tag = hits[i].grant.tag;
		if (by_key) /* the next lookup of this prefix finds no walk again */
			kvd_walk_del(r->client.attach->pool, refs[i].pfn);
	}
	return let_go(r, refs);
}

static int time_lookups(struct rig *r, u32 nr_runs, u32 *tokens, bool by_key, double *ns,
			u32 samples)
{
	int e = 0;

	for (u32 pfn = 0; by_key && pfn < r->client.attach->pool->geo.nr_pages; pfn++)
		kvd_walk_del(r->client.attach->pool, pfn);
	for (u32 i = 0; i < samples && !e; i++) {
		run_tokens(rng_below(r, nr_runs), tokens);
		e = run_lookup(r, tokens, by_key, &ns[i]);
	}
	return e;
}

int kvb_mm_core_lookup(u32 nr_pages, u32 samples, struct kvb_dist *ret,
		       struct kvb_dist *ret_by_key)
{
	u32 *tokens = calloc(RUN_PAGES * KV_PAGE_TOKENS, sizeof(*tokens));
	u32 nr_runs = nr_pages / RUN_PAGES;
	double *ns = calloc(samples, sizeof(*ns));
	struct rig *r = rig_create((nr_runs + 2) * RUN_PAGES);
	int e = r && tokens && ns ? 0 : -ENOMEM;

	for (u32 i = 0; i < nr_runs && !e; i++) {
		run_tokens(i, tokens);
		e = run_seal(r, tokens);
	}
	if (!e)
		e = time_lookups(r, nr_runs, tokens, false, ns, samples);
	if (!e)
		kvb_dist_of(ret, ns, samples);
	if (!e)
		e = time_lookups(r, nr_runs, tokens, true, ns, samples);
	if (!e)
		kvb_dist_of(ret_by_key, ns, samples);
	rig_destroy(r);
	free(ns);
	free(tokens);
	return e;
}
