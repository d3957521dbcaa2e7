/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm_replay.c - kvbench replay: hit rates of a multi-turn agent trace in kvmd's core.
 *
 * The trace is made, not recorded. Nine quiet tenants each hold CONVS conversations at a
 * time, which begin with the tenant's own system prompt. A turn looks the whole
 * conversation up, adds 1 to 12 pages (tool output and answer) and goes to sleep; after
 * 2 to 18 turns another conversation takes its place. One noisy tenant sends prompts of
 * NOISE_PAGES pages that never come again. Each event is a turn of a random conversation,
 * or, with probability `noise`, a prompt of the noisy tenant. Everything follows from the
 * seed.
 *
 * Four caches of the same size see the same trace: kvmd with the tenants as tenants
 * (equal weights, `high` at the fair share: the policy that is used), kvmd with all of
 * them as one tenant (leaf-first LRU), and, simulated on page numbers, plain LRU and
 * S3-FIFO (Yang et al., SOSP 2023: small queue 10 %, main queue, ghosts). The hit rate is
 * hits over pages looked up of quiet tenants; `alone` is the trace without the noise.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "base/clock.h"
#include "kvmd/own/lease.h"
#include "kvmd/own/prefix.h"
#include "tests/bench/core_rig.h"
#include "tools/kvbench/mm.h"

#define QUIET	     9u
#define CONVS	     8u
#define PROMPT_PAGES 16u
#define NOISE_PAGES  128u
#define PAGES_MAX    512u
#define EXTENT_PAGES 64u

struct options {
	u32 pages, events, noise_pct;
	u64 seed;
	bool json;
};

/* --------------------------------------------------------------- the trace */

struct conv {
	u32 id; /* 0 = none yet */
	u32 nr_pages;
	u32 turns_left;
};

/** struct turn - @pages[nr] are looked up; those not found are computed and kept */
struct turn {
	u32 tenant; /* QUIET = the noisy one */
	u32 nr;
	u64 pages[PAGES_MAX];
};

struct trace {
	struct conv convs[QUIET][CONVS];
	u64 rng;
	u32 next_id;
	u32 noise_pct;
};

static u32 below(struct trace *t, u32 n)
{
	t->rng ^= t->rng << 13;
	t->rng ^= t->rng >> 7;
	t->rng ^= t->rng << 17;
	return (u32)((t->rng >> 32) * n >> 32);
}

/* The number of a page says which it is; its tokens are made from it. */
static u64 page_no(u32 tenant, u32 conv, u32 index)
{
	return (u64)(tenant + 1) << 56 | (u64)conv << 16 | index;
}

static void trace_init(struct trace *t, u64 seed, u32 noise_pct)
{
	memset(t, 0, sizeof(*t));
	t->rng = seed * 2654435761u + 88172645463325252ull;
	t->noise_pct = noise_pct;
}

/* Returns false: this event is noise, and the trace has none. */
static bool trace_next(struct trace *t, bool with_noise, struct turn *turn)
{
	bool noise = below(t, 100) < t->noise_pct;
	struct conv *c;
	u32 tenant, i;

	if (noise) {
		turn->tenant = QUIET;
		turn->nr = NOISE_PAGES;
		t->next_id++;
		for (i = 0; i < NOISE_PAGES; i++)
			turn->pages[i] = page_no(QUIET, t->next_id, i);
		return with_noise;
	}
	tenant = below(t, QUIET);
	c = &t->convs[tenant][below(t, CONVS)];
	if (!c->turns_left) {
		*c = (struct conv){.id = ++t->next_id,
				   .nr_pages = PROMPT_PAGES,
				   .turns_left = 2 + below(t, 17)};
	}
	c->turns_left--;
	c->nr_pages = KV_MIN(c->nr_pages + 1 + below(t, 12), PAGES_MAX);
	turn->tenant = tenant;
	turn->nr = c->nr_pages;
	for (i = 0; i < c->nr_pages; i++)
		turn->pages[i] = page_no(tenant, i < PROMPT_PAGES ? 0 : c->id, i);
	return true;
}

/* ------------------------------------------------------------- kvmd's core */

struct cache {
	struct core_rig rig;
	struct core_client clients[QUIET + 1];
	u32 *tokens;
	u64 refusals;
};

static int cache_init(struct cache *c, u32 pages, bool tenants)
{
	struct kvd_tenant *t = NULL;
	char name[16];
	int e;

	c->refusals = 0;
	c->tokens = calloc((size_t)PAGES_MAX * KV_PAGE_TOKENS, sizeof(*c->tokens));
	if (!c->tokens)
		return -ENOMEM;
	e = core_rig_init(&c->rig, pages, EXTENT_PAGES);
	if (e)
		goto free_tokens;
	for (u32 i = 0; i <= QUIET && !e; i++) {
		snprintf(name, sizeof(name), "tenant%u", i);
		if (tenants || !i)
			e = core_rig_tenant(&c->rig, name, 0,
					    tenants ? pages / (QUIET + 1) : 0, &t);
		if (!e)
			e = core_rig_client(&c->rig, t, &c->clients[i]);
	}
	if (!e)
		return 0;
	core_rig_fini(&c->rig);
free_tokens:
	free(c->tokens);
	return e;
}

static void cache_fini(struct cache *c)
{
	core_rig_fini(&c->rig);
	free(c->tokens);
}

static void turn_tokens(const struct turn *turn, u32 *ret)
{
	for (u32 i = 0; i < turn->nr; i++)
		for (u32 k = 0; k < KV_PAGE_TOKENS; k++)
			ret[i * KV_PAGE_TOKENS + k] =
				(u32)((turn->pages[i] ^ turn->pages[i] >> 24) *
					      2654435761u +
				      k * 40503u);
}

static int look_up(struct core_client *cl, const u32 *tokens, u32 nr,
		   struct kvd_lookup_op *op, struct kv_hit *hits)
{
	int e;

	*op = (struct kvd_lookup_op){.s = cl->session,
				     .a = cl->attach,
				     .tokens = tokens,
				     .nr_tokens = nr * KV_PAGE_TOKENS,
				     .hits = hits,
				     .hits_max = PAGES_MAX};
	e = kvd_lookup_start(op);
	while (!e && (e = kvd_lookup_step(op)) == -EAGAIN)
		e = 0;
	return e;
}

/* Gets pages for what was not found, seals them behind the last hit. */
static int compute(struct cache *c, struct core_client *cl, const struct turn *turn,
		   const struct kvd_lookup_op *found, struct kv_page_ref *refs)
{
	static struct kv_seal_page pages[PAGES_MAX];
	static struct kv_grant grants[PAGES_MAX];
	static struct kv_seal_ret rets[PAGES_MAX];
	u32 nr = turn->nr - found->nr, pending, tries = 0;
	struct kvd_seal_op op = {.s = cl->session,
				 .a = cl->attach,
				 .pages = pages,
				 .tokens = c->tokens + found->nr * KV_PAGE_TOKENS,
				 .rets = rets,
				 .nr = nr};
	int e;

	do {
		e = kvd_lease_alloc(cl->session, cl->attach, nr, KV_GFP_PREFILL, grants,
				    &pending);
		kvd_core_run(&c->rig.core);
	} while (e == KV_PENDING && ++tries < 64);
	if (e) {
		c->refusals++;
		return e;
	}
	for (u32 i = 0; i < nr; i++) {
		pages[i].pfn = refs[i].pfn = grants[i].pfn;
		pages[i].tag = refs[i].tag = grants[i].tag;
	}
	if (found->nr)
		memcpy(op.arg.parent_key, found->key, KV_KEY_BYTES);
	else
		op.arg.flags = KV_SEAL_ROOT;
	e = kvd_seal_start(&op);
	while (!e && (e = kvd_seal_step(&op)) == -EAGAIN)
		e = 0;
	return e;
}

/* Return: pages found; -errno */
static int cache_turn(struct cache *c, const struct turn *turn)
{
	static struct kv_page_ref refs[PAGES_MAX];
	static struct kv_hit hits[PAGES_MAX];
	struct core_client *cl = &c->clients[turn->tenant];
	struct kvd_lookup_op found;
	u32 nr, freed, first;
	int e;

	turn_tokens(turn, c->tokens);
	e = look_up(cl, c->tokens, turn->nr, &found, hits);
	if (e < 0)
		return e;
	for (u32 i = 0; i < found.nr; i++)
		refs[i] = (struct kv_page_ref){.pfn = hits[i].grant.pfn,
					       .tag = hits[i].grant.tag};
	nr = found.nr;
	if (turn->nr > found.nr) {
		e = compute(c, cl, turn, &found, refs + found.nr);
		if (e < 0)
			return e;
		if (!e)
			nr = turn->nr;
	}
	kvd_core_run(&c->rig.core);
	if (nr)
		e = kvd_lease_free(cl->session, cl->attach, refs, nr, &freed, &first);
	kvd_core_now(&c->rig.core, c->rig.core.mm.now_ns + 10000000);
	kvd_core_run(&c->rig.core);
	return e < 0 ? e : (int)found.nr;
}

/* ------------------------------------------- LRU and S3-FIFO on page numbers */

/** struct node - a page that a simulated cache has or remembers */
struct node {
	u64 page; /* 0 = unused */
	u32 prev, next, chain;
	u8 freq, queue;
};

enum { Q_NONE, Q_SMALL, Q_MAIN, Q_GHOST, QUEUES };

/** struct sim - @s3: S3-FIFO, else LRU, which uses Q_MAIN alone */
struct sim {
	struct node *nodes;
	u32 *heads; /* hash */
	u32 nr_nodes, hash_mask, unused;
	u32 first[QUEUES], last[QUEUES], nr[QUEUES], room[QUEUES];
	bool s3;
};

static u32 *sim_head(struct sim *s, u64 page)
{
	return &s->heads[(u32)((page * 0x9e3779b97f4a7c15ull) >> 40) & s->hash_mask];
}

static int sim_init(struct sim *s, u32 pages, bool s3)
{
	memset(s, 0, sizeof(*s));
	s->s3 = s3;
	s->nr_nodes = 2 * pages + 2;
	s->hash_mask = 1;
	while (s->hash_mask < s->nr_nodes)
		s->hash_mask = s->hash_mask * 2 + 1;
	s->nodes = calloc(s->nr_nodes, sizeof(*s->nodes));
	s->heads = calloc(s->hash_mask + 1, sizeof(*s->heads));
	if (!s->nodes || !s->heads) {
		free(s->nodes);
		free(s->heads);
		return -ENOMEM;
	}
	s->room[Q_SMALL] = s3 ? pages / 10 : 0;
	s->room[Q_MAIN] = pages - s->room[Q_SMALL];
	s->room[Q_GHOST] = s3 ? s->room[Q_MAIN] : 0;
	for (u32 i = 1; i < s->nr_nodes; i++) {
		s->nodes[i].next = s->unused;
		s->unused = i;
	}
	return 0;
}

static void sim_fini(struct sim *s)
{
	free(s->nodes);
	free(s->heads);
}

static u32 sim_find(struct sim *s, u64 page)
{
	u32 at = *sim_head(s, page);

	while (at && s->nodes[at].page != page)
		at = s->nodes[at].chain;
	return at;
}

static void queue_del(struct sim *s, u32 at)
{
	struct node *n = &s->nodes[at];

	*(n->prev ? &s->nodes[n->prev].next : &s->first[n->queue]) = n->next;
	*(n->next ? &s->nodes[n->next].prev : &s->last[n->queue]) = n->prev;
	s->nr[n->queue]--;
}

/* At the young end. */
static void queue_add(struct sim *s, u32 at, u32 queue)
{
	struct node *n = &s->nodes[at];

	n->queue = (u8)queue;
	n->prev = s->last[queue];
	n->next = 0;
	*(n->prev ? &s->nodes[n->prev].next : &s->first[queue]) = at;
	s->last[queue] = at;
	s->nr[queue]++;
}

static void sim_drop(struct sim *s, u32 at)
{
	u32 *link = sim_head(s, s->nodes[at].page);

	queue_del(s, at);
	while (*link != at)
		link = &s->nodes[*link].chain;
	*link = s->nodes[at].chain;
	s->nodes[at].page = 0;
	s->nodes[at].next = s->unused;
	s->unused = at;
}

static void evict_main(struct sim *s)
{
	for (;;) {
		u32 at = s->first[Q_MAIN];

		if (!s->s3 || !s->nodes[at].freq) {
			sim_drop(s, at);
			return;
		}
		s->nodes[at].freq--;
		queue_del(s, at);
		queue_add(s, at, Q_MAIN);
	}
}

/* Pages seen more than once go on to main, the others are only remembered. */
static void evict_small(struct sim *s)
{
	u32 at = s->first[Q_SMALL];

	queue_del(s, at);
	if (s->nodes[at].freq > 1) {
		if (s->nr[Q_MAIN] == s->room[Q_MAIN])
			evict_main(s);
		queue_add(s, at, Q_MAIN);
	} else {
		if (s->nr[Q_GHOST] == s->room[Q_GHOST])
			sim_drop(s, s->first[Q_GHOST]);
		queue_add(s, at, Q_GHOST);
	}
	s->nodes[at].freq = 0;
}

static void sim_insert(struct sim *s, u64 page)
{
	u32 at = sim_find(s, page), queue = s->s3 && !at ? Q_SMALL : Q_MAIN;

	if (at)
		sim_drop(s, at); /* a ghost comes back: straight to main */
	while (s->nr[queue] >= s->room[queue]) {
		if (queue == Q_SMALL)
			evict_small(s);
		else
			evict_main(s);
	}
	at = s->unused;
	s->unused = s->nodes[at].next;
	s->nodes[at] = (struct node){.page = page, .chain = *sim_head(s, page)};
	*sim_head(s, page) = at;
	queue_add(s, at, queue);
}

/* Return: pages found: those before the first that is not there */
static int sim_turn(struct sim *s, const struct turn *turn)
{
	bool missed = false;
	int found = 0;

	for (u32 i = 0; i < turn->nr; i++) {
		u32 at = sim_find(s, turn->pages[i]);
		bool there = at && s->nodes[at].queue != Q_GHOST;

		missed |= !there;
		found += !missed;
		if (!there) {
			sim_insert(s, turn->pages[i]);
		} else if (s->s3) {
			s->nodes[at].freq = (u8)KV_MIN(s->nodes[at].freq + 1, 3);
		} else {
			queue_del(s, at);
			queue_add(s, at, Q_MAIN);
		}
	}
	return found;
}

/* ------------------------------------------------------------------ running */

enum kind { KVMD, KVMD_ONE, LRU, S3FIFO, KINDS };

static const char *const names[KINDS] = {"kvmd", "kvmd one tenant", "LRU", "S3-FIFO"};

struct result {
	double hit_pct;
	u64 looked, refusals;
};

static int run(const struct options *opt, enum kind kind, bool with_noise,
	       struct result *ret)
{
	u64 looked = 0, hits = 0;
	static struct turn turn;
	struct cache cache;
	struct trace trace;
	struct sim sim;
	int e;

	e = kind <= KVMD_ONE ? cache_init(&cache, opt->pages, kind == KVMD)
			     : sim_init(&sim, opt->pages, kind == S3FIFO);
	if (e)
		return e;
	trace_init(&trace, opt->seed, opt->noise_pct);
	for (u32 i = 0; i < opt->events && e >= 0; i++) {
		if (!trace_next(&trace, with_noise, &turn))
			continue;
		e = kind <= KVMD_ONE ? cache_turn(&cache, &turn) : sim_turn(&sim, &turn);
		/* the first tenth fills the cache */
		if (e < 0 || turn.tenant == QUIET || i < opt->events / 10)
			continue;
		looked += turn.nr;
		hits += (u64)e;
	}
	*ret = (struct result){.looked = looked,
			       .refusals = kind <= KVMD_ONE ? cache.refusals : 0,
			       .hit_pct = looked ? 100.0 * (double)hits / (double)looked
						 : 0};
	if (kind <= KVMD_ONE)
		cache_fini(&cache);
	else
		sim_fini(&sim);
	return e < 0 ? e : 0;
}

static void report_text(const struct options *opt, struct result (*res)[2])
{
	printf("agent trace: %u quiet tenants x %u conversations, %u events, %u %% noise, "
	       "seed %llu, cache of %u pages\n",
	       QUIET, CONVS, opt->events, opt->noise_pct, (unsigned long long)opt->seed,
	       opt->pages);
	printf("%-18s %12s %12s %12s\n", "cache", "alone %", "with noise %",
	       "lost points");
	for (u32 k = 0; k < KINDS; k++)
		printf("%-18s %12.2f %12.2f %12.2f\n", names[k], res[k][0].hit_pct,
		       res[k][1].hit_pct, res[k][0].hit_pct - res[k][1].hit_pct);
}

static int report_json(const struct options *opt, struct result (*res)[2])
{
	cJSON *doc = cJSON_CreateObject(), *rows, *o;

	cJSON_AddStringToObject(doc, "schema", "kvbench.replay/1");
	cJSON_AddNumberToObject(doc, "pages", opt->pages);
	cJSON_AddNumberToObject(doc, "events", opt->events);
	cJSON_AddNumberToObject(doc, "noise_pct", opt->noise_pct);
	cJSON_AddNumberToObject(doc, "seed", (double)opt->seed);
	rows = cJSON_AddArrayToObject(doc, "rows");
	for (u32 k = 0; k < KINDS; k++) {
		o = cJSON_CreateObject();
		cJSON_AddStringToObject(o, "cache", names[k]);
		cJSON_AddNumberToObject(o, "alone_hit_pct", res[k][0].hit_pct);
		cJSON_AddNumberToObject(o, "noise_hit_pct", res[k][1].hit_pct);
		cJSON_AddNumberToObject(o, "looked_up_pages", (double)res[k][1].looked);
		cJSON_AddNumberToObject(o, "refusals", (double)res[k][1].refusals);
		cJSON_AddItemToArray(rows, o);
	}
	return kvb_json_print(doc) ? 1 : 0;
}

static int parse(int argc, char **argv, struct options *opt)
{
	const struct {
		const char *name;
		u32 *to, min, max;
	} numbers[] = {
		{"--pages", &opt->pages, 1024, 1u << 22},
		{"--events", &opt->events, 10, 10000000},
		{"--noise", &opt->noise_pct, 0, 100},
	};

	for (int i = 1; i < argc; i++) {
		char *end = NULL;
		unsigned long v = 0;
		size_t k;

		if (!strcmp(argv[i], "--json")) {
			opt->json = true;
			continue;
		}
		if (i + 1 < argc)
			v = strtoul(argv[i + 1], &end, 10);
		if (!end || end == argv[i + 1] || *end) {
			fprintf(stderr, "kvbench replay: %s: needs a number\n", argv[i]);
			return 2;
		}
		if (!strcmp(argv[i], "--seed")) {
			opt->seed = v;
			i++;
			continue;
		}
		for (k = 0; k < KV_ARRAY_SIZE(numbers); k++)
			if (!strcmp(argv[i], numbers[k].name))
				break;
		if (k == KV_ARRAY_SIZE(numbers) || v < numbers[k].min ||
		    v > numbers[k].max) {
			fprintf(stderr,
				"kvbench replay: %s %s: not an option, or out of "
				"range\n",
				argv[i], argv[i + 1]);
			return 2;
		}
		*numbers[k].to = (u32)v;
		i++;
	}
	return 0;
}

int kvb_replay(int argc, char **argv)
{
	struct options opt = {.pages = 8192, .events = 20000, .noise_pct = 50, .seed = 1};
	struct result res[KINDS][2];
	int e = parse(argc, argv, &opt);

	if (e)
		return e;
	for (u32 k = 0; k < KINDS; k++) {
		for (u32 noise = 0; noise < 2; noise++) {
			e = run(&opt, (enum kind)k, noise, &res[k][noise]);
			if (e) {
				fprintf(stderr, "kvbench replay: %s: %s\n", names[k],
					strerror(-e));
				return 1;
			}
		}
	}
	if (opt.json)
		return report_json(&opt, res);
	report_text(&opt, res);
	return 0;
}
