/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_cases.h - what every kernel of decode attention has to do on the CPU, each a function of a
 * shape: attn.c and attn_reg.c call them with the shapes of their kernels. Included behind tests/kvt.h.
 */
#ifndef HOPPER_ATTN_CASES_H
#define HOPPER_ATTN_CASES_H

#include "attn_step.h"

/* Somebody asks: the first request with all tokens that the shape has, so that its kernel is the one meant. */
static struct step step_random(u32 nr, u32 q_max)
{
	static const u32 tops[] = {1, 5, 65, 65, 200, 330};
	struct step t = {.nr = nr};

	for (u32 r = 0; r < nr; r++) {
		t.lengths[r] = kvt_rand_below(tops[kvt_rand_below(6)]) + (r ? 0 : q_max);
		t.q[r] = r ? kvt_rand_below(q_max + 1) : q_max;
		t.q[r] = KV_MIN(t.q[r], t.lengths[r]);
	}
	return t;
}

static void make(struct world *w, const struct shape *s, const struct step *t)
{
	const struct kv_layout l = layout_of(s);
	u32 pages = 1;

	for (u32 r = 0; r < t->nr; r++)
		pages += (t->lengths[r] + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	world_init(w, &l, s->heads, pages, t->lengths, t->q, t->nr);
	run_host(w, s->heads, l.nr_layers - 1);
}

/* KVK_ATTN_FAST: P is in bf16, or queries and P are in e4m3. */
static void check(struct world *w, const struct shape *s, const char *what)
{
	const double fast = s->dtype == KV_DTYPE_BF16 ? 2.1e-3 : FAST_FP8;

	expect_close(w, what, s->heads, s->kv_heads,
		     s->flags & KVK_ATTN_FAST ? fast : 1e-3);
}

static float *keep(const struct world *w)
{
	float *p = malloc(w->nr_out * sizeof(float));

	return memcpy(p, w->out, w->nr_out * sizeof(float));
}

static void same(const struct world *w, const float *first)
{
	KVT_EXPECT(!memcmp(first, w->out, w->nr_out * sizeof(float)));
}

/* ------------------------------------------------------------------------ right answers */

/*
 * Any step, on any number of SMs; again with the schedule it has, and with a new one.
 * @begin_late, @copies_late: of some of them (machine.h)
 */
static void shapes(const struct shape *s, u32 nr, u32 nr_requests, unsigned begin_late,
		   unsigned copies_late)
{
	for (u32 i = 0; i < nr; i++) {
		struct step t = step_random(1 + kvt_rand_below(nr_requests), s[i].q_max);
		struct world w;
		float *first;

		hopper_has_sms(1 + (int)kvt_rand_below(8));
		hopper_begin_late(i % 2 ? begin_late : 0);
		hopper_copies_late(i % 3 ? copies_late : 0);
		make(&w, &s[i], &t);
		run(&w, &s[i], 0);
		check(&w, &s[i], "heads/kv heads");
		first = keep(&w);
		run(&w, &s[i], i % 2 ? KVK_ATTN_PLAN : 0);
		same(&w, first);
		free(first);
		world_fini(&w);
	}
	hopper_begin_late(0);
	hopper_copies_late(0);
}

/* Other queries for the same step: the same rows, the last one first. */
static void turn(struct world *w)
{
	const size_t dim = w->nr_q / (w->f.batch.nr_tokens * w->dev.nr_q_heads);

	for (size_t a = 0, b = w->nr_q - dim; a < b; a += dim, b -= dim)
		for (size_t i = 0; i < dim; i++) {
			const float v = w->q[a + i];

			w->q[a + i] = w->q[b + i];
			w->q[b + i] = v;
		}
	to_device(w, 8, w->q, w->nr_q * sizeof(float));
}

/*
 * One request, cut into a part an SM: equal to the bit whoever comes first, and whoever comes so late
 * that the others have given up its slice. The layers of a step have one schedule and queries of their
 * own: what a slot still holds of the last layer but one, or of the last step, is not this one's.
 * @flags, @begin_late: of some runs
 */
static void cut(const struct shape *s, u32 length, int nr_sms, u32 nr_runs, u32 flags,
		unsigned begin_late)
{
	const struct step t = {1, {length}, {s->kv_heads ? 1 : s->q_max}};
	u32 now = 1;
	struct world w;
	float *first[2];

	hopper_has_sms(nr_sms);
	make(&w, s, &t);
	for (u32 k = 0; k < 2; k++) {
		if (k)
			turn(&w);
		run_host(&w, s->heads, 1);
		run(&w, s, 0);
		check(&w, s, "one request, heads/kv heads");
		first[k] = keep(&w);
	}
	for (u32 i = 0; i < nr_runs; i++) { /* 1 0 0 1 1 ... */
		if ((i + 3) / 2 % 2 != now)
			turn(&w);
		now = (i + 3) / 2 % 2;
		hopper_begin_late(i % 3 ? begin_late : 0);
		run(&w, s, KVK_ATTN_PLAN | (i % 3 ? flags : 0));
		same(&w, first[now]);
	}
	hopper_begin_late(0);
	turn(&w);
	run(&w, s, 0);
	same(&w, first[!now]);
	free(first[0]);
	free(first[1]);
	world_fini(&w);
}

/* More segments of a CTA than there are places for. */
static void many_requests(const struct shape *s, int nr_sms)
{
	struct step t = {.nr = 20};
	struct world w;

	for (u32 r = 0; r < t.nr; r++) {
		t.lengths[r] = 1 + kvt_rand_below(r % 4 ? 64 : 200);
		t.q[r] = 1;
	}
	hopper_has_sms(nr_sms);
	make(&w, s, &t);
	run(&w, s, 0);
	check(&w, s, "many requests, heads/kv heads");
	world_fini(&w);
}

/* Copies come in any order, and one may come when others are long in use: who reads a page has waited for it. */
static void late_copies(const struct shape *s, const struct step *t, int nr_sms,
			unsigned late, u32 nr_runs)
{
	struct world w;
	float *first;

	hopper_copies_late(late);
	hopper_has_sms(nr_sms);
	make(&w, s, t);
	run(&w, s, 0);
	check(&w, s, "late copies, heads/kv heads");
	first = keep(&w);
	for (u32 i = 0; i < nr_runs; i++) {
		run(&w, s, KVK_ATTN_PLAN);
		same(&w, first);
	}
	free(first);
	world_fini(&w);
	hopper_copies_late(0);
}

/*
 * Half as many units as SMs: units of two parts, which the blocks of a cluster exchange, beside units of
 * one and of three, and of two that begin in the middle of a cluster; then the same by slots. A request that
 * fails and one with a row outside the pool leave the others as they were.
 */
static const u32 pair_steps[][4] = {
	{128, 100, 65, 90}, {250, 193, 256, 200}, {128, 190, 64, 90}, {64, 100, 65, 130}};

static void pairs(const struct shape *s, const u32 (*lengths)[4])
{
	struct step t = {4, {0}, {1, 1, 1, 1}};
	struct world w;
	float *first;

	memcpy(t.lengths, *lengths, sizeof(*lengths));
	hopper_has_sms(8);
	make(&w, s, &t);
	run(&w, s, KVK_ATTN_NO_PAIRS);
	check(&w, s, "by slots, heads/kv heads");
	run(&w, s, 0);
	check(&w, s, "pairs, heads/kv heads");
	first = keep(&w);
	hopper_begin_late(1000);
	run(&w, s, KVK_ATTN_PLAN);
	same(&w, first);
	verdict_fail(&w.f, 3, s->heads % 4);
	w.f.rows[w.f.row_start[2] - 1].pfn = w.f.pages.geometry.nr_pages;
	upload(&w, s->heads, 1);
	run(&w, s, 0);
	hopper_begin_late(0);
	for (u32 r = 1; r <= 3; r += 2) {
		const size_t per = w.nr_out / 4;

		KVT_EXPECT_EQ(kvt_nr_finite(w.out + r * per, per), 0);
		memcpy(w.out + r * per, first + r * per, per * sizeof(float));
	}
	same(&w, first);
	free(first);
	world_fini(&w);
}

/* Queries that BF16 holds give the F32 answer, rounded once; every element is looked at. */
static void bf16_activations(const struct shape *s, int nr_sms)
{
	static const struct step t = {4, {130, 64, 3, 65}, {1, 1, 1, 1}};
	struct world w;
	float *first;
	u16 *q;

	hopper_has_sms(nr_sms);
	make(&w, s, &t);
	run(&w, s, 0);
	check(&w, s, "f32, heads/kv heads");
	first = keep(&w);
	q = malloc(w.nr_q * sizeof(u16));
	for (size_t k = 0; k < w.nr_q; k++)
		q[k] = kvt_to_bf16(w.q[k]);
	w.dev.q = to_device(&w, 8, q, w.nr_q * sizeof(u16));
	w.dev.act_dtype = KVK_BF16;
	run(&w, s, 0);
	for (size_t k = 0; k < w.nr_out; k++)
		KVT_EXPECT_EQ(((const u16 *)w.dev.out)[k], kvt_to_bf16(first[k]));
	free(q);
	free(first);
	world_fini(&w);
}

static void shared_pages(const struct shape *s)
{
	static const struct step t = {3, {200, 150, 70}, {1, 1, 1}};
	struct world w;

	hopper_has_sms(5);
	make(&w, s, &t);
	for (u32 r = 1; r < 3; r++)
		w.f.rows[w.f.row_start[r]].pfn = w.f.rows[0].pfn;
	w.f.rows[w.f.row_start[1] + 1].pfn = w.f.rows[2].pfn;
	upload(&w, s->heads, 1);
	run_host(&w, s->heads, 1);
	run(&w, s, 0);
	check(&w, s, "shared pages, heads/kv heads");
	world_fini(&w);
}

/* --------------------------------------------------------------------------- P5, design 5 */

/* Four requests: SHORT has a page, LONG many parts. */
enum { SHORT = 1, LONG = 2 };
static const struct step rule_step = {4, {70, 40, 320, 65}, {1, 1, 1, 1}};

/*
 * The request has NaN and nothing else; the others are as they were, to the bit. Not those of
 * MLA with 8 rows, where two teams of warps take turns over all pages that a CTA reads: a page
 * less, and the next request's go to the other team, whose sums meet in the other order.
 */
static void alone(struct world *w, u32 bad, const float *first)
{
	const size_t per = w->nr_out / w->f.batch.nr_tokens;

	KVT_EXPECT_EQ(kvt_nr_finite(w->out + bad * per, per), 0);
	memcpy(w->out + bad * per, first + bad * per, per * sizeof(float));
	if (w->f.pages.layout.kind == KV_LAYOUT_MLA && w->dev.nr_q_heads <= 8)
		KVT_EXPECT(rel_err(w->out, first, w->nr_out) < 1e-6);
	else
		same(w, first);
}

/* @how to fail; its pages are good, or reading one would be the end. */
static void failed_request(const struct shape *s, u32 how, u32 bad)
{
	struct world w;
	float *first;

	hopper_has_sms(3 + (int)bad);
	make(&w, s, &rule_step);
	run(&w, s, 0);
	check(&w, s, "before, heads/kv heads");
	first = keep(&w);
	verdict_fail(&w.f, bad, (how + bad) % 4);
	if (how % 3 == 2)
		w.f.rows[w.f.row_start[bad]].pfn = 0x7fffffff;
	upload(&w, s->heads, 1);
	run(&w, s, 0);
	alone(&w, bad, first);
	free(first);
	world_fini(&w);
}

/* Nothing is copied for them: only the ring of segments holds the producer back. */
static void many_failed(const struct shape *s)
{
	const u32 nr = STEP_MAX;
	struct step t = {.nr = nr};
	struct world w;
	size_t per, bad;

	for (u32 r = 0; r < nr; r++) {
		t.lengths[r] = 1 + (r == 0 || r + 1 == nr) * 99;
		t.q[r] = 1;
	}
	hopper_has_sms(1);
	make(&w, s, &t);
	for (u32 r = 1; r + 1 < nr; r++)
		verdict_fail(&w.f, r, r % 4);
	upload(&w, s->heads, 1);
	run(&w, s, 0);
	per = w.nr_out / nr;
	bad = w.nr_out - 2 * per;
	KVT_EXPECT_EQ(kvt_nr_finite(w.out + per, bad), 0);
	memcpy(w.out + per, w.ref + per, bad * sizeof(float));
	check(&w, s, "beside failed requests, heads/kv heads");
	world_fini(&w);
}

/* The check kernel has passed it, and memory is there, but the pool ends before its last page. */
static void row_outside(const struct shape *s, int nr_sms)
{
	struct world w;
	u32 top = 0, bad = 0;
	float *first;

	hopper_has_sms(nr_sms);
	make(&w, s, &rule_step);
	run(&w, s, 0);
	first = keep(&w);
	for (u32 i = 1; i < w.f.row_start[rule_step.nr]; i++)
		top = w.f.rows[i].pfn > w.f.rows[top].pfn ? i : top;
	while (w.f.row_start[bad + 1] <= top)
		bad++;
	w.f.pages.geometry.nr_pages = w.f.rows[top].pfn;
	upload(&w, s->heads, 1);
	run(&w, s, 0);
	alone(&w, bad, first);
	w.f.rows[top].pfn = 0x7fffffff; /* reading it would be the end */
	upload(&w, s->heads, 1);
	run(&w, s, 0);
	alone(&w, bad, first);
	free(first);
	world_fini(&w);
}

/* A token more than there are rows. What would be read of it is zeros, not NaN already. */
static void length_beyond(const struct shape *s, u32 bad)
{
	const struct kv_layout l = layout_of(s);
	struct world w;
	size_t per;
	u32 nr_rows;

	hopper_has_sms(3 + (int)bad);
	make(&w, s, &rule_step);
	nr_rows = w.f.row_start[bad + 1] - w.f.row_start[bad];
	w.f.lengths[bad] = nr_rows * KV_PAGE_TOKENS + 1;
	memset(kvt_paged_part(&w.f, bad, (nr_rows - 1) * KV_PAGE_TOKENS, 0), 0,
	       kv_page_bytes(&l));
	upload(&w, s->heads, 1);
	run(&w, s, 0);
	per = w.nr_out / w.f.batch.nr_tokens;
	KVT_EXPECT_EQ(kvt_nr_finite(w.out + bad * per, per), 0);
	memcpy(w.out + bad * per, w.ref + bad * per, per * sizeof(float));
	check(&w, s, "beside a wrong length, heads/kv heads");
	world_fini(&w);
}

/* A schedule says what may be read in its own step. In the next one it is good for nothing. */
static void schedule_of_another_step(const struct shape *s)
{
	struct world w;

	hopper_has_sms(4);
	make(&w, s, &rule_step);
	run(&w, s, 0);
	check(&w, s, "its own step, heads/kv heads");
	next_step(&w);
	run(&w, s, KVK_ATTN_PLAN);
	KVT_EXPECT_EQ(kvt_nr_finite(w.out, w.nr_out), 0);
	run(&w, s, 0);
	check(&w, s, "a schedule of the next step, heads/kv heads");
	world_fini(&w);
}

#endif /* HOPPER_ATTN_CASES_H */
