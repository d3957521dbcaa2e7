/* SPDX-License-Identifier: Apache-2.0 */
/*
 * race_step.c - a step of an engine of kvbench race: rows, what happens to its pages between
 * announce and launch, and the work itself (race_engine.h).
 *
 * A step's requests, in this order: runs that are written (the new one; the freed one in a
 * `write` race), single rows of old pages to write; then what is read: the freed run,
 * single rows of old pages, pages found in the cache. Reading comes before writing on the
 * stream, so that the engine's own late write cannot hide what it was to find.
 */
#include "race_engine.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kernels/ref.h"

#define DELAY_US 40u
#define SEAL_US	 200u

static u64 next_random(u64 *state)
{
	u64 z = (*state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

u32 race_below(struct engine *e, u32 n)
{
	return (u32)((next_random(&e->random) >> 32) * n >> 32);
}

/* ------------------------------------------------------------------------- pattern */

u64 race_pattern_of(u32 engine, u32 pfn, u64 tag)
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

u32 race_pattern_differs(struct engine *e, const u8 *from, u64 first)
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

/* ----------------------------------------------------------------- requests and rows */

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
		const struct kv_grant *g = &e->graves[race_below(e, nr)];
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
int race_look_up(struct engine *e, struct lane *l)
{
	u32 other = 1 - e->me, tokens[SEAL * KV_PAGE_TOKENS];
	u64 run = __atomic_load_n(&e->shared->published[other], __ATOMIC_ACQUIRE);
	int r;

	l->nr_hits = 0;
	if (!run || !(e->opt->kinds & RACE_SHARE))
		return 0;
	if (run == e->seen && race_below(e, 4))
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

	if (!(e->opt->kinds & RACE_SHARE) || race_below(e, 2))
		return 0;
	page = malloc(e->page_bytes);
	if (!page)
		return -ENOMEM;
	for (u32 i = 0; i < SEAL; i++) {
		tokens_of(e->me, nr, i, tokens + i * KV_PAGE_TOKENS);
		pattern_write(
			e, page,
			race_pattern_of(e->me, run->pages[i].pfn, run->pages[i].tag));
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
	wait_us(race_below(e, SEAL_US));
	return 0;
}

int race_free_run(struct engine *e, const struct run *run)
{
	int r = kvc_free(e->pool, run->pages, e->per);

	for (u32 i = 0; i < 4; i++)
		e->graves[e->nr_graves++ % GRAVES] = run->pages[race_below(e, e->per)];
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

int race_launch(struct engine *e, struct lane *l)
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
		pattern_write(e, l->host.in + i * e->page_bytes,
			      race_pattern_of(e->me, l->host.rows[i].pfn,
					      l->host.rows[i].expected));
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
void race_make_rows(struct engine *e, struct lane *l, const struct run *run,
		    const struct run *old)
{
	u32 kinds = e->opt->kinds;
	bool late = (kinds & RACE_LATE) && e->step > 2 * e->live_max;

	l->nr_w = l->nr_r = 0;
	l->host.row_start[0] = 0;
	request_run(e, l, run, OWN, true);
	kvc_step_rows(l->step, e->pool, l->host.rows, e->per);
	if (old && (kinds & RACE_WRITE) && !old->sealed && race_below(e, 2))
		request_run(e, l, old, FREED, true);
	if (late)
		request_old(e, l, true);
	if (old && (!(kinds & RACE_WRITE) || race_below(e, 2) || old->sealed ||
		    l->nr_w < 2 || l->kind[1] != FREED))
		request_run(e, l, old, FREED, false);
	if (late)
		request_old(e, l, false);
	request_hits(e, l);
}

/* Between announce and launch: the block, and the end of the oldest run, in either order. */
int race_middle(struct engine *e, struct lane *l, struct run *run, const struct run *old)
{
	bool race = old && (e->opt->kinds & (RACE_READ | RACE_WRITE));
	bool first = !race || race_below(e, 4);
	int r;

	if (!first) {
		r = race_free_run(e, old);
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
		r = race_free_run(e, old);
	if (!r && race_below(e, 2))
		wait_us(race_below(e, DELAY_US));
	return r;
}
