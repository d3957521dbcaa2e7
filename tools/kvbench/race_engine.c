/* SPDX-License-Identifier: Apache-2.0 */
/*
 * race_engine.c - an engine process of kvbench race (race.h): opening, the loop, and what a
 * finished step has read.
 *
 * Two lanes, each a stream with a mirror and buffers of its own, take steps in turn, so
 * that a step can be launched while the one before it runs. Half of the steps wait for the
 * other lane first: then what is freed goes to kvmd at once, in the middle of the step, and
 * not when the other lane retires. One thread a process.
 */
#include "race_engine.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

/* ---------------------------------------------------------------------- opening */

/* Memory on both sides; without separate memory they are the same. */
static int both(struct lane *l, size_t bytes, void **ret_host, void **ret_dev)
{
	int r = l->m->ops->alloc_host(l->m, bytes, ret_host);

	if (!r && l->m->separate)
		return l->m->ops->alloc(l->m, bytes, ret_dev);
	*ret_dev = *ret_host;
	return r;
}

static int lane_open(struct engine *e, struct lane *l, u32 id)
{
	u64 nr_pages = e->info.geometry.nr_pages;
	struct kv_mirror head = {.nr_pages = (u32)nr_pages};
	void *mirror;
	int r = 0;

	l->id = id;
	l->block_bytes = kvc_step_block_bytes(e->pool);
#define BOTH(member, bytes)                                          \
	do {                                                         \
		if (!r)                                              \
			r = both(l, bytes, (void **)&l->host.member, \
				 (void **)&l->dev.member);           \
	} while (0)
	BOTH(block, l->block_bytes);
	BOTH(rows, ROWS_MAX * sizeof(struct kv_row));
	BOTH(row_start, (REQUESTS_MAX + 1) * sizeof(u32));
	BOTH(lengths, REQUESTS_MAX * sizeof(u32));
	BOTH(nonces, REQUESTS_MAX * sizeof(u64));
	BOTH(verdicts, REQUESTS_MAX * sizeof(struct kv_verdict));
	BOTH(in, (2 * e->per + LATE) * e->page_bytes);
	BOTH(out, (e->per + LATE + SEAL) * e->page_bytes);
#undef BOTH
	if (!r)
		r = l->m->ops->alloc(l->m, sizeof(head) + nr_pages * sizeof(u64),
				     &mirror);
	if (r)
		return r;
	l->mirror = mirror;
	return l->m->ops->load(l->m, l->mirror, &head, sizeof(head));
}

static int engine_open(struct engine *e, const char *socket_path)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = socket_path,
				  .client_name = "kvbench-race"};
	struct kv_layout layout = kvb_layout(0);
	struct kvc_info info;
	struct kv_stat stat;
	int r = 0;

	for (u32 i = 0; i < LANES && !r; i++)
		r = kvb_device_open(e->opt->backend, &e->lanes[i].m);
	if (r)
		return r;
	r = kvc_open(&opt, &e->c);
	if (r)
		return kvb_said("kvc_open", r);
	r = kvc_pool_open(e->c, &layout, NULL, NULL, &e->pool);
	if (r)
		return kvb_said("kvc_pool_open", r);
	kvc_info(e->c, &info);
	e->check_mode = info.check_mode;
	kvc_pool_get_info(e->pool, &e->info);
	e->pages = (struct kvk_pages){.base = e->info.base,
				      .geometry = e->info.geometry,
				      .layout = e->info.layout};
	e->page_bytes = kv_page_bytes(&e->info.layout);
	r = kvc_stat(e->pool, &stat);
	if (r)
		return kvb_said("kvc_stat", r);
	/* both engines together hold all pages but one run each, which they take */
	e->live_max = stat.nr_pages_max / (RACE_ENGINES * e->per) - 1;
	e->live_max = KV_MIN(KV_MAX(e->live_max, 2u), LIVE_MAX - 1);
	if (stat.nr_pages_max > RACE_PAGES_MAX)
		return -E2BIG;
	for (u32 i = 0; i < LANES && !r; i++)
		r = lane_open(e, &e->lanes[i], i);
	return r;
}

/* ------------------------------------------------------------------------ a step ends */

static void compare(struct engine *e, struct lane *l, u32 q)
{
	u32 first_read = l->host.row_start[l->nr_w], kind = l->kind[q];

	for (u32 i = l->host.row_start[q]; i < l->host.row_start[q + 1]; i++) {
		const struct kv_row *row = &l->host.rows[i];
		u32 bad = race_pattern_differs(
			e, l->host.out + (i - first_read) * e->page_bytes,
			race_pattern_of(l->owner[q], row->pfn, row->expected));

		e->count->words += e->page_bytes / 8;
		e->count->foreign_bytes += bad * 8ull;
		e->count->foreign_pages[kind] += bad != 0;
	}
}

/* Wait for the lane's step, retire it, look at what it read. */
static int lane_finish(struct engine *e, struct lane *l)
{
	struct kv_grant found[SEAL];
	int r;

	if (!l->step)
		return 0;
	r = l->m->ops->sync(l->m);
	if (r) /* no completion: the slot stays, the process ends */
		return kvb_said("the device failed", r);
	kvc_step_retire(l->step);
	l->step = NULL;
	for (u32 q = 0; q < l->nr_w + l->nr_r; q++) {
		u32 nr_rows = l->host.row_start[q + 1] - l->host.row_start[q];
		bool ok = kv_verdict_ok(l->host.verdicts[q], l->number, nr_rows);

		e->count->ok[l->kind[q]] += ok;
		e->count->bad[l->kind[q]] += !ok;
		if (!ok && l->kind[q] == OWN) {
			fprintf(stderr,
				"kvbench: step %llu: own new pages fail the check: "
				"%#x\n",
				(unsigned long long)l->number, l->host.verdicts[q].bits);
			return -EPROTO;
		}
		if (ok && q >= l->nr_w)
			compare(e, l, q);
	}
	for (u32 i = 0; i < l->nr_hits; i++)
		found[i] = l->hits[i].grant;
	r = l->nr_hits ? kvc_free(e->pool, found, l->nr_hits) : 0;
	l->nr_hits = 0;
	return r < 0 ? kvb_said("kvc_free", r) : 0;
}

/* -------------------------------------------------------------------- a step is built */

static void count_grants(struct engine *e, const struct kv_grant *pages)
{
	for (u32 i = 0; i < e->per; i++) {
		u32 was = __atomic_exchange_n(&e->shared->owner[pages[i].pfn], e->me + 1,
					      __ATOMIC_RELAXED);

		e->count->grants++;
		e->count->cross += was && was != e->me + 1;
		if (was)
			__atomic_fetch_add(&e->shared->reissues, 1, __ATOMIC_RELAXED);
	}
}

/* A new run; what is needed is in the other engine's hands or in quarantine. */
static int take(struct engine *e, struct run *run)
{
	int r;

	for (u32 tries = 0;; tries++) {
		/* what waits inside kvmd must not wait for a step of this thread */
		u32 gfp = tries > 64 ? KV_GFP_PREFILL : KV_GFP_NOWAIT;

		r = kvc_alloc(e->pool, e->per, gfp, run->pages);
		if (r <= 0)
			break;
		for (u32 i = 0; i < LANES; i++) {
			r = lane_finish(e, &e->lanes[i]);
			if (r)
				return r;
		}
		r = kvc_flush(e->c);
		if (r < 0)
			return kvb_said("kvc_flush", r);
		kvc_dispatch(e->c, NULL, NULL);
		sched_yield();
	}
	if (r)
		return kvb_said("kvc_alloc", r);
	run->sealed = false;
	run->step = e->step;
	count_grants(e, run->pages);
	return 0;
}

static int one_step(struct engine *e)
{
	struct lane *l = &e->lanes[e->step % LANES];
	struct run *run = &e->live[e->nr_live], old;
	bool full = e->nr_live == e->live_max;
	int r = lane_finish(e, l);

	if (!r && race_below(e, 2))
		r = lane_finish(e, &e->lanes[1 - e->step % LANES]);
	if (!r)
		r = take(e, run);
	if (!r)
		r = race_look_up(e, l);
	if (r)
		return r;
	r = kvc_step_begin(e->c, &l->step);
	if (r)
		return kvb_said("kvc_step_begin", r);
	l->number = kvc_step_number(l->step);
	old = e->live[0];
	race_make_rows(e, l, run, full ? &old : NULL);
	r = race_middle(e, l, run, full ? &old : NULL);
	if (!r)
		r = race_launch(e, l);
	if (r)
		return r;
	if (full && !(e->opt->kinds & (RACE_READ | RACE_WRITE)))
		r = race_free_run(e, &old); /* waits for this step: nothing races */
	if (full)
		memmove(&e->live[0], &e->live[1], e->nr_live * sizeof(e->live[0]));
	else
		e->nr_live++;
	e->step++;
	e->count->steps++;
	kvc_dispatch(e->c, NULL, NULL);
	return r;
}

int race_engine(const struct race_options *opt, const char *socket_path, u32 engine,
		struct race_shared *shared)
{
	struct engine *e = calloc(1, sizeof(*e));
	int r;

	if (!e)
		return 1;
	e->opt = opt;
	e->shared = shared;
	e->count = &shared->count[engine];
	e->me = engine;
	e->per = (u32)opt->per_step;
	e->random = opt->seed * 2 + engine;
	r = engine_open(e, socket_path);
	while (!r && __atomic_load_n(&shared->reissues, __ATOMIC_RELAXED) < opt->reissues)
		r = one_step(e);
	for (u32 i = 0; i < LANES && !r; i++)
		r = lane_finish(e, &e->lanes[i]);
	if (!r) /* a device error is no completion: then only the process's end is */
		kvc_close(e->c);
	return r ? 1 : 0;
}
