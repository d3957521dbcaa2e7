/* SPDX-License-Identifier: Apache-2.0 */
/*
 * race_engine.c - an engine process of kvbench race (race.h).
 *
 * Two lanes, each a stream with a mirror and buffers of its own, take steps in turn, so
 * that a step can be launched while the one before it runs. Half of the steps wait for the
 * other lane first: then what is freed goes to kvmd at once, in the middle of the step, and
 * not when the other lane retires. One thread a process.
 *
 * A step's requests, in this order: runs that are written (the new one; the freed one in a
 * `write` race), single rows of old pages to write; then what is read: the freed run,
 * single rows of old pages, pages found in the cache. Reading comes before writing on the
 * stream, so that the engine's own late write cannot hide what it was to find.
 */
#include "race.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kernels/ref.h"

#define LANES	     2u
#define LATE	     8u /* single rows of old pages for reading, as many for writing */
#define SEAL	     4u /* pages of a run that are sealed */
#define GRAVES	     32u
#define LIVE_MAX     64u
#define REQUESTS_MAX (3 + 2 * LATE + 1)
#define ROWS_MAX     (3 * RACE_PER_MAX + 2 * LATE + SEAL)
#define DELAY_US     40u
#define SEAL_US	     200u

enum request_kind { OWN, FREED, OLD, SHARED };

/**
 * struct run - pages that were taken together
 * @step: number of the step that wrote it
 */
struct run {
	struct kv_grant pages[RACE_PER_MAX];
	u64 step;
	bool sealed;
};

/**
 * struct lane - a stream and what a step on it needs
 * @dev: the same as @host in the kernels' memory
 * @in, @out: pages to write and pages read, dense, in row order
 * @owner: engine whose pattern row i must show
 * @nr_w, @nr_r: requests that write and that read; the former come first
 */
struct lane {
	struct eng_mem *m;
	u32 id;
	struct kvc_step *step;
	u64 number;
	struct kv_mirror *mirror;
	struct lane_data {
		struct kv_step_block *block;
		struct kv_row *rows;
		u32 *row_start;
		u32 *lengths;
		u64 *nonces;
		struct kv_verdict *verdicts;
		u8 *in;
		u8 *out;
	} host, dev;
	size_t block_bytes;
	u8 kind[REQUESTS_MAX];
	u8 owner[REQUESTS_MAX];
	u32 nr_w, nr_r;
	struct kv_hit hits[SEAL];
	u32 nr_hits;
};

struct engine {
	const struct race_options *opt;
	struct race_shared *shared;
	struct race_count *count;
	u32 me;
	u32 per;
	u64 random;
	struct kvc *c;
	struct kvc_pool *pool;
	struct kvc_pool_info info;
	struct kvk_pages pages;
	u32 check_mode;
	u64 page_bytes;
	struct lane lanes[LANES];
	struct run live[LIVE_MAX];
	u32 nr_live, live_max;
	struct kv_grant graves[GRAVES];
	u64 nr_graves;
	u64 step;
	u64 seen; /* newest run of the other engine that was looked for */
};

static u64 next_random(u64 *state)
{
	u64 z = (*state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static u32 below(struct engine *e, u32 n)
{
	return (u32)((next_random(&e->random) >> 32) * n >> 32);
}

/* ------------------------------------------------------------------------- pattern */

static u64 pattern_of(u32 engine, u32 pfn, u64 tag)
{
	u64 state = kv_tag_gen(tag) * 0xd1342543de82ef95ull + ((u64)pfn << 8) + engine;

	return next_random(&state);
}

static void pattern_write(struct engine *e, u8 *to, u64 first)
{
	u64 *w = (u64 *)to;

	for (u64 i = 0; i < e->page_bytes / 8; i++)
		w[i] = first + i * 0x9e3779b97f4a7c15ull;
}

static u32 pattern_differs(struct engine *e, const u8 *from, u64 first)
{
	const u64 *w = (const u64 *)from;
	u32 nr = 0;

	for (u64 i = 0; i < e->page_bytes / 8; i++)
		nr += w[i] != first + i * 0x9e3779b97f4a7c15ull;
	return nr;
}

/* Token ids of page @i of a sealed run: nobody else's. */
static void tokens_of(u32 engine, u64 run, u32 i, u32 *ret)
{
	u64 state = run * 1000003 + i * 7 + engine;

	for (u32 t = 0; t < KV_PAGE_TOKENS; t++)
		ret[t] = (u32)next_random(&state) & 0xfffff;
}

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
		u32 bad =
			pattern_differs(e, l->host.out + (i - first_read) * e->page_bytes,
					pattern_of(l->owner[q], row->pfn, row->expected));

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

static void request_begin(struct lane *l, u32 kind, u32 owner, u64 nonce)
{
	u32 q = l->nr_w + l->nr_r;

	l->kind[q] = (u8)kind;
	l->owner[q] = (u8)owner;
	l->host.nonces[q] = nonce;
	l->host.row_start[q + 1] = l->host.row_start[q];
}

static void request_row(struct lane *l, const struct kv_grant *g, u32 flags)
{
	u32 q = l->nr_w + l->nr_r, at = l->host.row_start[q + 1]++;

	l->host.rows[at] = kv_row_make(g->pfn, g->tag, flags, l->host.nonces[q],
				       at - l->host.row_start[q]);
}

static void request_end(struct lane *l, bool writes)
{
	u32 q = l->nr_w + l->nr_r;

	l->host.lengths[q] =
		(l->host.row_start[q + 1] - l->host.row_start[q]) * KV_PAGE_TOKENS;
	if (writes)
		l->nr_w++;
	else
		l->nr_r++;
}

static void request_run(struct engine *e, struct lane *l, const struct run *run, u32 kind,
			bool writes)
{
	request_begin(l, kind, e->me, next_random(&e->random));
	for (u32 i = 0; i < e->per; i++)
		request_row(l, &run->pages[i], writes ? KV_ROW_WRITE : 0);
	request_end(l, writes);
}

/* Single rows: one that passes must not hide behind one that fails. */
static void request_old(struct engine *e, struct lane *l, bool writes)
{
	u32 nr = (u32)KV_MIN(e->nr_graves, (u64)GRAVES);

	for (u32 i = 0; i < LATE && nr; i++) {
		const struct kv_grant *g = &e->graves[below(e, nr)];
		struct kv_row row = {.pfn = g->pfn, .flags = KV_ROW_WRITE};

		/* the library refuses a second WRITE row for a page (P4) */
		if (writes && kvc_step_rows(l->step, e->pool, &row, 1))
			continue;
		request_begin(l, OLD, e->me, next_random(&e->random));
		request_row(l, g, writes ? KV_ROW_WRITE : 0);
		request_end(l, writes);
	}
}

/* Pages that the other engine has sealed, perhaps before it wrote them. */
static int look_up(struct engine *e, struct lane *l)
{
	u32 other = 1 - e->me, tokens[SEAL * KV_PAGE_TOKENS];
	u64 run = __atomic_load_n(&e->shared->published[other], __ATOMIC_ACQUIRE);
	int r;

	l->nr_hits = 0;
	if (!run || !(e->opt->kinds & RACE_SHARE))
		return 0;
	if (run == e->seen && below(e, 4))
		return 0;
	for (u32 i = 0; i < SEAL; i++)
		tokens_of(other, run, i, tokens + i * KV_PAGE_TOKENS);
	r = kvc_lookup(e->pool, tokens, SEAL * KV_PAGE_TOKENS, SEAL, l->hits,
		       &l->nr_hits);
	if (r < 0)
		return kvb_said("kvc_lookup", r);
	if (!r)
		e->seen = run;
	e->count->hits += l->nr_hits;
	return 0;
}

static void request_hits(struct engine *e, struct lane *l)
{
	if (!l->nr_hits)
		return;
	request_begin(l, SHARED, 1 - e->me, next_random(&e->random));
	for (u32 i = 0; i < l->nr_hits; i++)
		request_row(l, &l->hits[i].grant, 0);
	request_end(l, false);
}

static void wait_us(u32 us)
{
	u64 end_ns = kv_now_ns() + us * 1000ull;

	while (kv_now_ns() < end_ns)
		sched_yield();
}

/* Announced, the block is made, nothing is launched: the seal must wait for this step. */
static int seal_early(struct engine *e, struct run *run)
{
	u64 nr = e->shared->published[e->me] + 1;
	u32 tokens[SEAL * KV_PAGE_TOKENS], crc[SEAL];
	struct kv_seal_ret ret[SEAL];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = SEAL,
				.pages = run->pages,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = ret};
	u8 *page;
	int r;

	if (!(e->opt->kinds & RACE_SHARE) || below(e, 2))
		return 0;
	page = malloc(e->page_bytes);
	if (!page)
		return -ENOMEM;
	for (u32 i = 0; i < SEAL; i++) {
		tokens_of(e->me, nr, i, tokens + i * KV_PAGE_TOKENS);
		pattern_write(e, page,
			      pattern_of(e->me, run->pages[i].pfn, run->pages[i].tag));
		crc[i] = kvk_crc32c(page, e->page_bytes);
	}
	free(page);
	r = kvc_seal(e->pool, &seal);
	if (r == KV_BUSY) /* the other lane runs */
		return 0;
	if (r)
		return kvb_said("kvc_seal", r);
	run->sealed = true;
	e->count->seals++;
	__atomic_store_n(&e->shared->published[e->me], nr, __ATOMIC_RELEASE);
	wait_us(below(e, SEAL_US));
	return 0;
}

static int free_run(struct engine *e, const struct run *run)
{
	int r = kvc_free(e->pool, run->pages, e->per);

	for (u32 i = 0; i < 4; i++)
		e->graves[e->nr_graves++ % GRAVES] = run->pages[below(e, e->per)];
	/* no answer is lost: STALE would say that a page was taken from us */
	return r ? kvb_said("kvc_free", r ? r : -EIO) : 0;
}

/* ---------------------------------------------------------------------- a step runs */

static struct kvk_batch batch_of(const struct lane *l, u32 first, u32 nr)
{
	return (struct kvk_batch){.rows = l->dev.rows,
				  .row_start = l->dev.row_start + first,
				  .lengths = l->dev.lengths + first,
				  .verdicts = l->dev.verdicts + first,
				  .step = &l->dev.block->step,
				  .nr_requests = nr};
}

static int upload(struct lane *l)
{
	const struct kv_step_block *b = l->host.block;
	u32 nr = l->nr_w + l->nr_r;
	size_t bytes =
		sizeof(*b) + b->nr_entries * (b->kind == KV_BLOCK_FULL
						      ? sizeof(u64)
						      : sizeof(struct kv_log_entry));
	int r = l->m->ops->upload(l->m, l->dev.block, b, bytes);

#define UP(member, n)                                                   \
	(r = r ? r                                                      \
	       : l->m->ops->upload(l->m, l->dev.member, l->host.member, \
				   (n) * sizeof(*l->host.member)))
	UP(rows, l->host.row_start[nr]);
	UP(row_start, nr + 1);
	UP(lengths, nr);
	UP(nonces, nr);
#undef UP
	return r;
}

/* With the check off, every verdict is good (design 5, modes). */
static int no_check(struct lane *l)
{
	for (u32 q = 0; q < l->nr_w + l->nr_r; q++)
		l->host.verdicts[q] = (struct kv_verdict){
			.step = l->number,
			.rows_checked = l->host.row_start[q + 1] - l->host.row_start[q]};
	return l->m->ops->upload(l->m, l->dev.verdicts, l->host.verdicts,
				 (l->nr_w + l->nr_r) * sizeof(struct kv_verdict));
}

static int check(struct engine *e, struct lane *l)
{
	struct kvk_tag_check_args a = {.block = l->dev.block,
				       .mirror = l->mirror,
				       .batch = batch_of(l, 0, l->nr_w + l->nr_r),
				       .nonces = l->dev.nonces,
				       .page_tokens = KV_PAGE_TOKENS,
				       .ret_verdicts = l->dev.verdicts};

	if (e->check_mode == KV_CHECK_OFF)
		return no_check(l);
	return l->m->kernels->tag_check(&a, l->m->stream);
}

static int launch(struct engine *e, struct lane *l)
{
	u32 nr_in = l->host.row_start[l->nr_w];
	u32 nr_out = l->host.row_start[l->nr_w + l->nr_r] - nr_in;
	struct kvk_move_args read = {.op = KVK_MOVE_GATHER,
				     .src = e->pages,
				     .src_batch = batch_of(l, l->nr_w, l->nr_r),
				     .buf = l->dev.out};
	struct kvk_move_args write = {.op = KVK_MOVE_SCATTER,
				      .dst = e->pages,
				      .dst_batch = batch_of(l, 0, l->nr_w),
				      .buf = l->dev.in};
	int r = upload(l);

	for (u32 i = 0; i < nr_in; i++)
		pattern_write(
			e, l->host.in + i * e->page_bytes,
			pattern_of(e->me, l->host.rows[i].pfn, l->host.rows[i].expected));
	if (!r)
		r = l->m->ops->upload(l->m, l->dev.in, l->host.in, nr_in * e->page_bytes);
	if (!r)
		r = check(e, l);
	if (!r && l->nr_r)
		r = l->m->kernels->page_move(&read, l->m->stream);
	if (!r)
		r = l->m->kernels->page_move(&write, l->m->stream);
	if (!r)
		r = l->m->ops->download(l->m, l->host.out, l->dev.out,
					nr_out * e->page_bytes);
	if (!r)
		r = l->m->ops->download(l->m, l->host.verdicts, l->dev.verdicts,
					(l->nr_w + l->nr_r) * sizeof(struct kv_verdict));
	if (r)
		return kvb_said("launch", r);
	kvc_step_launched(l->step);
	return 0;
}

static int make_block(struct engine *e, struct lane *l)
{
	int r = kvc_step_block(l->step, e->pool, l->id, l->host.block, l->block_bytes);

	return r ? kvb_said("kvc_step_block", r) : 0;
}

/* All rows of the step; @old is the run that is freed in it, or NULL. */
static void make_rows(struct engine *e, struct lane *l, const struct run *run,
		      const struct run *old)
{
	u32 kinds = e->opt->kinds;
	bool late = (kinds & RACE_LATE) && e->step > 2 * e->live_max;

	l->nr_w = l->nr_r = 0;
	l->host.row_start[0] = 0;
	request_run(e, l, run, OWN, true);
	kvc_step_rows(l->step, e->pool, l->host.rows, e->per);
	if (old && (kinds & RACE_WRITE) && !old->sealed && below(e, 2))
		request_run(e, l, old, FREED, true);
	if (late)
		request_old(e, l, true);
	if (old && (!(kinds & RACE_WRITE) || below(e, 2) || old->sealed || l->nr_w < 2 ||
		    l->kind[1] != FREED))
		request_run(e, l, old, FREED, false);
	if (late)
		request_old(e, l, false);
	request_hits(e, l);
}

/* Between announce and launch: the block, and the end of the oldest run, in either order. */
static int middle(struct engine *e, struct lane *l, struct run *run,
		  const struct run *old)
{
	bool race = old && (e->opt->kinds & (RACE_READ | RACE_WRITE));
	bool first = !race || below(e, 4);
	int r;

	if (!first) {
		r = free_run(e, old);
		if (r)
			return r;
	}
	r = make_block(e, l);
	if (!r && first)
		r = seal_early(e, run);
	if (r || !race)
		return r;
	e->count->races++;
	if (first)
		r = free_run(e, old);
	if (!r && below(e, 2))
		wait_us(below(e, DELAY_US));
	return r;
}

static int one_step(struct engine *e)
{
	struct lane *l = &e->lanes[e->step % LANES];
	struct run *run = &e->live[e->nr_live], old;
	bool full = e->nr_live == e->live_max;
	int r = lane_finish(e, l);

	if (!r && below(e, 2))
		r = lane_finish(e, &e->lanes[1 - e->step % LANES]);
	if (!r)
		r = take(e, run);
	if (!r)
		r = look_up(e, l);
	if (r)
		return r;
	r = kvc_step_begin(e->c, &l->step);
	if (r)
		return kvb_said("kvc_step_begin", r);
	l->number = kvc_step_number(l->step);
	old = e->live[0];
	make_rows(e, l, run, full ? &old : NULL);
	r = middle(e, l, run, full ? &old : NULL);
	if (!r)
		r = launch(e, l);
	if (r)
		return r;
	if (full && !(e->opt->kinds & (RACE_READ | RACE_WRITE)))
		r = free_run(e, &old); /* waits for this step: nothing races */
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
