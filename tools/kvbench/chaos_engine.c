/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chaos_engine.c - an engine process of chaos.h: alloc, write, seal, look up, compare,
 * free, in a loop until it is told to stop or killed.
 */
#include "chaos.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "kernels/ref.h"

#define TIMEOUT_MS 20000u

struct held {
	struct kv_grant grant;
	u64 run;
	bool live;
};

struct engine {
	const struct chaos_engine *opt;
	struct chaos_count *n;
	struct kvc *c;
	struct kvc_pool *pool;
	struct held held[CHAOS_HELD];
	u64 words, random, session, steps;
	u64 *want;
};

struct kv_layout chaos_layout(void)
{
	return (struct kv_layout){.format_version = KV_LAYOUT_VERSION,
				  .kind = KV_LAYOUT_GQA,
				  .dtype = KV_DTYPE_E4M3,
				  .scale_kind = KV_SCALE_STATIC,
				  .page_tokens = KV_PAGE_TOKENS,
				  .nr_layers = 1,
				  .nr_kv_heads = 1,
				  .head_dim = 64,
				  .nr_scales = 2};
}

u64 chaos_random(u64 *state)
{
	u64 z = *state += 0x9e3779b97f4a7c15ull;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

void chaos_fill(u64 *page, u64 words, u64 run, u32 i)
{
	u64 seed = run * CHAOS_RUN_PAGES + i, first = chaos_random(&seed);

	for (u64 k = 0; k < words; k++)
		page[k] = first + k * 0x9e3779b97f4a7c15ull;
}

void chaos_tokens(u32 *ret, u64 run)
{
	for (u32 i = 0; i < CHAOS_RUN_PAGES * KV_PAGE_TOKENS; i++)
		ret[i] = (u32)run * 1000003u + i;
}

static void phase(struct engine *e, enum chaos_phase p)
{
	__atomic_store_n(&e->n->phase, p, __ATOMIC_RELEASE);
}

/* Positive and negative answers that the loop goes on after. Return: @r */
static int said(struct engine *e, int r)
{
	struct chaos_count *n = e->n;

	if (r == KV_STALE)
		n->stale++;
	else if (r == -ETIMEDOUT)
		n->away++;
	else if (r == KV_FULL || r == KV_QUOTA || r == KV_PENDING)
		n->full++;
	else if (r < 0) {
		n->errors++;
		if (n->errors <= 3)
			fprintf(stderr, "kvbench: engine: %d %s\n", r,
				kvc_strerror(e->c));
	}
	return r;
}

/* A child that only lives on; it knows nothing. */
static void fork_in_step(struct engine *e)
{
	pid_t pid;

	if (!e->opt->fork_in_step || e->steps++ % e->opt->fork_in_step || e->n->child)
		return;
	phase(e, CHAOS_FORKED);
	pid = fork();
	if (pid == 0) {
		alarm(20);
		for (;;)
			pause();
	}
	e->n->child = pid;
}

/* In a step: are these pages still ours, and what lies in them? Return: 0 */
static int compare(struct engine *e, const struct kv_grant *g, u32 nr, const u64 *runs,
		   const u32 *at, bool write, bool *ret_ok)
{
	struct kvc_check_request q = {.nonce = 9, .nr_rows = nr, .length = nr * 64};
	struct kv_row rows[CHAOS_RUN_PAGES];
	struct kvc_step *step;
	struct kv_verdict v;
	int r;

	phase(e, CHAOS_STEP);
	for (u32 i = 0; i < nr; i++)
		rows[i] = kv_row_make(g[i].pfn, g[i].tag, write ? KV_ROW_WRITE : 0, 9, i);
	q.rows = rows;
	r = kvc_step_begin(e->c, &step);
	if (r)
		return said(e, r);
	r = kvc_step_check(step, e->pool, &q, 1, &v);
	*ret_ok = !r && kv_verdict_ok(v, kvc_step_number(step), nr);
	for (u32 i = 0; *ret_ok && i < nr; i++) {
		u64 *page = kvc_page_addr(e->pool, g[i].pfn);

		chaos_fill(e->want, e->words, runs[i], at[i]);
		if (write) {
			memcpy(page, e->want, e->words * 8);
			continue;
		}
		for (u64 k = 0; k < e->words; k++)
			e->n->wrong += page[k] == e->want[k] ? 0 : 8;
		e->n->pages++;
		e->n->bytes += e->words * 8;
	}
	fork_in_step(e);
	kvc_step_retire(step);
	return said(e, r);
}

static int seal(struct engine *e, const struct kv_grant *g, u32 nr, u64 run)
{
	u32 tokens[CHAOS_RUN_PAGES * KV_PAGE_TOKENS], crc[CHAOS_RUN_PAGES];
	struct kv_seal_ret rets[CHAOS_RUN_PAGES];
	struct kvc_seal s = {.size_bytes = sizeof(s),
			     .nr_pages = nr,
			     .pages = g,
			     .crc32c = crc,
			     .tokens = tokens,
			     .ret_seals = rets};

	phase(e, CHAOS_SEAL);
	chaos_tokens(tokens, run);
	for (u32 i = 0; i < nr; i++) {
		chaos_fill(e->want, e->words, run, i);
		crc[i] = kvk_crc32c(e->want, e->words * 8);
	}
	return said(e, kvc_seal(e->pool, &s));
}

static int look(struct engine *e, u64 run)
{
	u32 tokens[CHAOS_RUN_PAGES * KV_PAGE_TOKENS], at[CHAOS_RUN_PAGES], found = 0;
	struct kv_hit hits[CHAOS_RUN_PAGES];
	struct kv_grant g[CHAOS_RUN_PAGES];
	u64 runs[CHAOS_RUN_PAGES];
	bool ok = true;
	int r;

	phase(e, CHAOS_LOOKUP);
	chaos_tokens(tokens, run);
	r = kvc_lookup(e->pool, tokens, KV_ARRAY_SIZE(tokens), CHAOS_RUN_PAGES, hits,
		       &found);
	if (r || !found) {
		e->n->misses++;
		return said(e, r);
	}
	e->n->hits += found;
	for (u32 i = 0; i < found; i++) {
		g[i] = hits[i].grant;
		runs[i] = run;
		at[i] = i;
	}
	r = compare(e, g, found, runs, at, false, &ok);
	if (!r && !ok)
		e->n->refused += found;
	phase(e, CHAOS_FREE);
	return said(e, kvc_free(e->pool, g, found));
}

static int take(struct engine *e, u32 nr, u64 run, struct kv_grant *g)
{
	u32 at[CHAOS_RUN_PAGES];
	u64 runs[CHAOS_RUN_PAGES];
	bool ok = true;
	int r;

	phase(e, CHAOS_ALLOC);
	r = kvc_alloc(e->pool, nr, KV_GFP_PREFILL, g);
	if (r)
		return said(e, r);
	for (u32 i = 0; i < nr; i++) {
		runs[i] = run;
		at[i] = i;
	}
	r = compare(e, g, nr, runs, at, true, &ok);
	if (!r && ok)
		r = compare(e, g, nr, runs, at, false, &ok);
	if (!r && !ok)
		e->n->refused += nr;
	return 0;
}

/* All of what it holds at once if its session is another, else some of it. */
static int look_at_held(struct engine *e)
{
	struct kvc_info info;
	u32 zero = 0;
	int r = 0;

	kvc_info(e->c, &info);
	if (info.session != e->session) {
		e->n->sessions += e->session != 0;
		e->session = info.session;
		memset(e->held, 0, sizeof(e->held));
	}
	for (u32 i = 0; i < 4 && !r; i++) {
		struct held *h = &e->held[chaos_random(&e->random) % CHAOS_HELD];
		bool ok = true;

		if (!h->live) {
			h->run = CHAOS_RUNS + chaos_random(&e->random) % 100000;
			r = take(e, 1, h->run, &h->grant);
			h->live = !r;
			continue;
		}
		r = compare(e, &h->grant, 1, &h->run, &zero, false, &ok);
		if (!r && !ok) {
			kvc_info(e->c, &info);
			if (info.session != e->session)
				return 0;
			e->n->refused++;
			h->live = false;
			said(e, kvc_free(e->pool, &h->grant, 1));
		}
	}
	return r;
}

static void one_round(struct engine *e)
{
	u64 x = chaos_random(&e->random), run = x % CHAOS_RUNS;
	u32 nr = 1 + (u32)(x >> 32) % CHAOS_RUN_PAGES;
	struct kv_grant g[CHAOS_RUN_PAGES];

	if (!take(e, nr, run, g)) {
		if (x >> 48 & 1)
			seal(e, g, nr, run);
		phase(e, CHAOS_FREE);
		said(e, kvc_free(e->pool, g, nr));
	}
	look(e, chaos_random(&e->random) % CHAOS_RUNS);
	look_at_held(e);
	if (e->n->rounds++ % 16 == 0) {
		int r = kvc_flush(e->c);

		if (r != KV_BUSY)
			said(e, r);
		kvc_dispatch(e->c, NULL, NULL);
	}
}

/* There may be no kvmd at the moment, or it dies in HELLO. */
static int open_session(const struct kvc_options *o, struct kvc **ret)
{
	u64 end_ns = kv_now_ns() + TIMEOUT_MS * KV_NSEC_PER_MSEC;
	int r;

	while ((r = kvc_open(o, ret)) && kv_now_ns() < end_ns)
		usleep(2000);
	return r ? kvb_said("kvc_open", r) : 0;
}

static int engine_run(const struct chaos_engine *opt)
{
	struct kvc_options o = {.size_bytes = sizeof(o),
				.socket_path = opt->socket_path,
				.client_name = "kvbench-chaos",
				.timeout_ms = TIMEOUT_MS};
	struct engine e = {.opt = opt, .n = opt->count, .random = opt->seed};
	struct kv_layout layout = chaos_layout();
	const float scales[2] = {1, 1};
	int r;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	phase(&e, CHAOS_HELLO);
	r = open_session(&o, &e.c);
	if (r)
		return r;
	phase(&e, CHAOS_OPEN);
	r = kvc_pool_open(e.c, &layout, scales, NULL, &e.pool);
	if (r)
		return kvb_said("kvc_pool_open", r);
	e.words = kv_page_bytes(&layout) / 8;
	e.want = malloc(e.words * 8);
	if (!e.want)
		return -ENOMEM;
	while (!__atomic_load_n(&e.n->stop, __ATOMIC_ACQUIRE)) {
		u64 start_ns = kv_now_ns();

		one_round(&e);
		e.n->gap_ns = KV_MAX(e.n->gap_ns, kv_now_ns() - start_ns);
	}
	kvc_close(e.c);
	free(e.want);
	return 0;
}

pid_t chaos_fork(const struct chaos_engine *e)
{
	pid_t pid = fork();

	if (pid == 0)
		_exit(engine_run(e) ? 1 : 0);
	return pid < 0 ? -errno : pid;
}
