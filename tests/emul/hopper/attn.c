/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn.c - decode attention as Hopper would run it, on the CPU (machine.cc): random shapes and
 * steps against the host's reference, units cut between many CTAs, and what the rules of P5
 * keep it from reading.
 */
#include "tests/kvt.h"
#include "attn_step.h"

static const struct shape gqa_shapes[] = {
	GQA(E4M3, TOKEN, 96, 8, 128),  GQA(E4M3, STATIC, 96, 8, 128),
	GQA(E4M3, TOKEN, 64, 8, 128),  GQA(E4M3, TOKEN, 12, 1, 128),
	GQA(E4M3, STATIC, 12, 1, 128), GQA(E4M3, TOKEN, 6, 6, 128),
	GQA(E4M3, TOKEN, 96, 8, 64),   GQA(E4M3, STATIC, 12, 1, 64),
	GQA(E4M3, TOKEN, 6, 6, 64),    GQA(BF16, NONE, 96, 8, 128),
	GQA(BF16, NONE, 12, 1, 128),   GQA(BF16, NONE, 64, 8, 64),
	GQA(BF16, NONE, 6, 6, 64),
};

static const struct shape mla_shapes[] = {
	MLA(E4M3, TOKEN, 8, 1, 0),  MLA(E4M3, TOKEN, 8, 2, 0),
	MLA(E4M3, TOKEN, 16, 1, 0), MLA(E4M3, STATIC, 8, 1, 0),
	MLA(E4M3, STATIC, 4, 4, 0), MLA(E4M3, TOKEN, 5, 3, 0),
	MLA(BF16, NONE, 8, 1, 0),   MLA(BF16, NONE, 8, 2, 0),
	MLA(BF16, NONE, 16, 1, 0),  MLA(BF16, NONE, 2, 4, 0),
};

static const struct shape tile_shapes[] = {
	MLA(BF16, NONE, 64, 1, 0),
	MLA(BF16, NONE, 64, 1, KVK_ATTN_FAST),
	MLA(BF16, NONE, 20, 3, 0),
	MLA(E4M3, TOKEN, 64, 1, 0),
	MLA(E4M3, STATIC, 64, 1, 0),
	MLA(E4M3, TOKEN, 20, 3, 0),
	MLA(E4M3, TOKEN, 64, 1, KVK_ATTN_FAST),
	MLA(E4M3, STATIC, 20, 3, KVK_ATTN_FAST),
};

/* Somebody asks. */
static struct step step_random(u32 nr, u32 q_max)
{
	static const u32 tops[] = {1, 5, 65, 65, 200, 330};
	struct step t = {.nr = nr};

	for (u32 r = 0; r < nr; r++) {
		t.lengths[r] = kvt_rand_below(tops[kvt_rand_below(6)]) + !r;
		t.q[r] = r ? kvt_rand_below(q_max + 1) : 1 + kvt_rand_below(q_max);
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

static void check(struct world *w, const struct shape *s, const char *what)
{
	const double fast = s->dtype == KV_DTYPE_BF16 ? 2.1e-3 : 6e-2;

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

/* Any step, on any number of SMs; again with the schedule it has, and with a new one. */
static void shapes(const struct shape *s, u32 nr, u32 nr_requests)
{
	for (u32 i = 0; i < nr; i++) {
		struct step t = step_random(1 + kvt_rand_below(nr_requests), s[i].q_max);
		struct world w;
		float *first;

		hopper_has_sms(1 + (int)kvt_rand_below(8));
		make(&w, &s[i], &t);
		run(&w, &s[i], 0);
		check(&w, &s[i], "heads/kv heads");
		first = keep(&w);
		run(&w, &s[i], i % 2 ? KVK_ATTN_PLAN : 0);
		same(&w, first);
		free(first);
		world_fini(&w);
	}
}

KVT_TEST(hopper_attn_gqa)
{
	shapes(gqa_shapes, KV_ARRAY_SIZE(gqa_shapes), 6);
}

KVT_TEST(hopper_attn_mla)
{
	shapes(mla_shapes, KV_ARRAY_SIZE(mla_shapes), 6);
}

KVT_TEST(hopper_attn_mla_wgmma)
{
	shapes(tile_shapes, KV_ARRAY_SIZE(tile_shapes), 3);
}

/* Other queries for the same step: the same ones backwards. */
static void turn(struct world *w)
{
	for (size_t i = 0; i < w->nr_q / 2; i++) {
		const float v = w->q[i];

		w->q[i] = w->q[w->nr_q - 1 - i];
		w->q[w->nr_q - 1 - i] = v;
	}
	to_device(w, 8, w->q, w->nr_q * sizeof(float));
}

/*
 * One request, cut into a part an SM: equal to the bit whoever comes first. The layers of a step
 * have one schedule and queries of their own: what a slot still holds of the last layer but one,
 * or of the last step, is not this one's.
 */
static void cut(const struct shape *s, u32 length, int nr_sms, u32 nr_runs, u32 late)
{
	const struct step t = {1, {length}, {1}};
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
		run(&w, s, KVK_ATTN_PLAN | (i % 3 ? late : 0));
		same(&w, first[now]);
	}
	turn(&w);
	run(&w, s, 0);
	same(&w, first[!now]);
	free(first[0]);
	free(first[1]);
	world_fini(&w);
}

KVT_TEST(hopper_attn_one_request_on_all_sms)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 12, 1, 128),
		GQA(E4M3, STATIC, 16, 2, 128),
		GQA(BF16, NONE, 12, 1, 128),
		MLA(E4M3, TOKEN, 8, 1, 0),
		MLA(E4M3, STATIC, 16, 1, 0),
		MLA(BF16, NONE, 8, 1, 0),
		MLA(BF16, NONE, 64, 1, 0),
		MLA(E4M3, TOKEN, 64, 1, 0),
		MLA(E4M3, TOKEN, 64, 1, KVK_ATTN_FAST),
	};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++)
		cut(&s[i], i < 3 ? 64 * 40 - 7 : 64 * 7 - 60, 7, 3, 0);
}

/* Parts travel in f16, which holds 2^-24 to 2^16: larger ones, smaller ones, and some all zeros. */
KVT_TEST(hopper_attn_parts_of_any_size)
{
	static const struct shape s[] = {
		MLA(E4M3, TOKEN, 8, 1, 0),
		MLA(BF16, NONE, 8, 1, 0),
		MLA(BF16, NONE, 64, 1, 0),
		MLA(E4M3, TOKEN, 64, 1, 0),
	};

	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(s); i++) {
		if (s[i / 2].dtype == KV_DTYPE_E4M3)
			latent_gain = i % 2 ? 0x1p-10f : 0x1p20f;
		else
			latent_gain = i % 2 ? 0x1p-40f : 0x1p40f;
		cut(&s[i / 2], 64 * 7 - 60, 7, 1, 0);
	}
	latent_gain = 0.f;
}

KVT_TEST(hopper_attn_many_requests_on_few_sms)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 12, 1, 128), GQA(E4M3, TOKEN, 8, 4, 64),
		GQA(BF16, NONE, 6, 6, 64),    MLA(E4M3, TOKEN, 8, 1, 0),
		MLA(BF16, NONE, 16, 1, 0),    MLA(BF16, NONE, 64, 1, 0),
		MLA(E4M3, TOKEN, 64, 1, 0),   MLA(E4M3, TOKEN, 64, 1, KVK_ATTN_FAST),
	};
	struct step t = {.nr = 20};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++) {
		struct world w;

		for (u32 r = 0; r < t.nr; r++) {
			t.lengths[r] = 1 + kvt_rand_below(r % 4 ? 64 : 100);
			t.q[r] = 1;
		}
		hopper_has_sms(1 +
			       (i == 1)); /* more segments than there are places for */
		make(&w, &s[i], &t);
		run(&w, &s[i], 0);
		check(&w, &s[i], "many requests, heads/kv heads");
		world_fini(&w);
	}
}

/*
 * Half as many units as SMs: units of two parts, which the blocks of a cluster exchange, beside units of
 * one and of three, and of two that begin in the middle of a cluster; then the same by slots.
 */
KVT_TEST(hopper_attn_pairs)
{
	static const u32 steps[][4] = {{128, 100, 65, 90},
				       {250, 193, 256, 200},
				       {128, 190, 64, 90},
				       {64, 100, 65, 130}};

	for (u32 k = 0; k < 4 * KV_ARRAY_SIZE(steps); k++) {
		const u32 i = k / 2, heads = i % 3 ? 64 : 20;
		const u32 flags = i % 2 ? KVK_ATTN_FAST : 0;
		const struct shape bf16 = MLA(BF16, NONE, heads, 1, flags);
		const struct shape fp8 = MLA(E4M3, TOKEN, heads, 1, flags);
		const struct shape s = k % 2 ? fp8 : bf16;
		struct step t = {4, {0}, {1, 1, 1, 1}};
		struct world w;
		float *first;

		memcpy(t.lengths, steps[i / 2], sizeof(steps[0]));
		hopper_has_sms(8);
		make(&w, &s, &t);
		run(&w, &s, KVK_ATTN_NO_PAIRS);
		check(&w, &s, "by slots, heads/kv heads");
		run(&w, &s, 0);
		check(&w, &s, "pairs, heads/kv heads");
		first = keep(&w);
		run(&w, &s, KVK_ATTN_PLAN);
		same(&w, first);
		verdict_fail(&w.f, 3, i % 4);
		w.f.rows[w.f.row_start[2] - 1].pfn = w.f.pages.geometry.nr_pages;
		upload(&w, s.heads, 1);
		run(&w, &s, 0);
		for (u32 r = 1; r <= 3; r += 2) {
			const size_t per = w.nr_out / 4;

			KVT_EXPECT_EQ(kvt_nr_finite(w.out + r * per, per), 0);
			memcpy(w.out + r * per, first + r * per, per * sizeof(float));
		}
		same(&w, first);
		free(first);
		world_fini(&w);
	}
}

/* A merge of more parts than a warp reads at once. */
KVT_TEST(hopper_attn_many_parts)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 12, 1, 128), MLA(E4M3, TOKEN, 8, 1, 0),
		MLA(BF16, NONE, 64, 1, 0), MLA(E4M3, TOKEN, 64, 1, 0)};

	cut(&s[0], 64 * 92 - 1, 23, 1, 0);
	cut(&s[1], 64 * 23 - 1, 23, 1, 0);
	cut(&s[2], 64 * 23 - 1, 23, 1, 0);
	cut(&s[3], 64 * 23 - 1, 23, 1, 0);
}

/* CTAs that begin when the others' patience is over: those leave them their slices. */
KVT_TEST(hopper_attn_late_ctas_merge_what_the_others_left)
{
	static const struct shape s[] = {GQA(E4M3, TOKEN, 12, 1, 128),
					 GQA(E4M3, STATIC, 8, 2, 128)};

	cut(&s[0], 64 * 28 - 5, 7, 4, KVK_ATTN_LATE);
	cut(&s[1], 64 * 28 - 5, 8, 4, KVK_ATTN_LATE);
}

/*
 * Copies come in any order, and one of them may come when others are long in use: who reads a page has
 * waited for that page.
 */
KVT_TEST(hopper_attn_late_copies)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 12, 1, 128), MLA(E4M3, TOKEN, 8, 1, 0),
		MLA(BF16, NONE, 20, 1, 0),    MLA(E4M3, TOKEN, 20, 1, KVK_ATTN_FAST),
		MLA(E4M3, TOKEN, 20, 1, 0),   MLA(E4M3, TOKEN, 20, 1, 0),
	};
	static const struct step t = {3, {64 * 4, 64 * 3, 64 * 4 - 9}, {1, 1, 1}};

	hopper_copies_late(40000);
	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++) {
		struct world w;

		hopper_has_sms(1);
		make(&w, &s[i], &t);
		run(&w, &s[i], 0);
		check(&w, &s[i], "late copies, heads/kv heads");
		world_fini(&w);
	}
	hopper_copies_late(0);
}

/* Queries that BF16 holds give the F32 answer, rounded once; every element is looked at. */
KVT_TEST(hopper_attn_bf16_activations)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 96, 8, 128), GQA(E4M3, TOKEN, 12, 1, 128),
		GQA(BF16, NONE, 6, 6, 64),    MLA(E4M3, TOKEN, 5, 2, 0),
		MLA(BF16, NONE, 16, 1, 0),    MLA(BF16, NONE, 20, 1, 0),
		MLA(E4M3, TOKEN, 20, 1, 0),   MLA(E4M3, TOKEN, 64, 1, KVK_ATTN_FAST),
	};
	static const struct step t = {4, {130, 64, 3, 65}, {1, 1, 1, 1}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++) {
		struct world w;
		float *first;
		u16 *q;

		hopper_has_sms(4);
		make(&w, &s[i], &t);
		run(&w, &s[i], 0);
		check(&w, &s[i], "f32, heads/kv heads");
		first = keep(&w);
		q = malloc(w.nr_q * sizeof(u16));
		for (size_t k = 0; k < w.nr_q; k++)
			q[k] = kvt_to_bf16(w.q[k]);
		w.dev.q = to_device(&w, 8, q, w.nr_q * sizeof(u16));
		w.dev.act_dtype = KVK_BF16;
		run(&w, &s[i], 0);
		for (size_t k = 0; k < w.nr_out; k++)
			KVT_EXPECT_EQ(((const u16 *)w.dev.out)[k], kvt_to_bf16(first[k]));
		free(q);
		free(first);
		world_fini(&w);
	}
}

KVT_TEST(hopper_attn_shared_pages)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 12, 1, 128), GQA(BF16, NONE, 6, 6, 64),
		MLA(E4M3, TOKEN, 8, 1, 0), MLA(BF16, NONE, 16, 1, 0)};
	static const struct step t = {3, {200, 150, 70}, {1, 1, 1}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++) {
		struct world w;

		hopper_has_sms(5);
		make(&w, &s[i], &t);
		for (u32 r = 1; r < 3; r++)
			w.f.rows[w.f.row_start[r]].pfn = w.f.rows[0].pfn;
		w.f.rows[w.f.row_start[1] + 1].pfn = w.f.rows[2].pfn;
		upload(&w, s[i].heads, 1);
		run_host(&w, s[i].heads, 1);
		run(&w, &s[i], 0);
		check(&w, &s[i], "shared pages, heads/kv heads");
		world_fini(&w);
	}
}

/* --------------------------------------------------------------------------- P5, design 5 */

static const struct shape rule_shapes[] = {
	GQA(E4M3, TOKEN, 12, 1, 128), GQA(E4M3, TOKEN, 64, 8, 128),
	GQA(E4M3, STATIC, 6, 6, 64),  GQA(BF16, NONE, 12, 1, 128),
	MLA(E4M3, TOKEN, 8, 1, 0),    MLA(E4M3, TOKEN, 16, 1, 0),
	MLA(BF16, NONE, 8, 1, 0),     MLA(BF16, NONE, 64, 1, 0),
	MLA(E4M3, TOKEN, 64, 1, 0),   MLA(E4M3, TOKEN, 64, 1, KVK_ATTN_FAST),
};

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

/* Each way to fail; its pages are good, or reading one would be the end. */
KVT_TEST(hopper_attn_failed_request)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(rule_shapes); i++)
		for (u32 bad = SHORT; bad <= LONG; bad++) {
			const struct shape *s = &rule_shapes[i];
			struct world w;
			float *first;

			hopper_has_sms(3 + (int)bad);
			make(&w, s, &rule_step);
			run(&w, s, 0);
			check(&w, s, "before, heads/kv heads");
			first = keep(&w);
			verdict_fail(&w.f, bad, (i + bad) % 4);
			if (i % 3 == 2)
				w.f.rows[w.f.row_start[bad]].pfn = 0x7fffffff;
			upload(&w, s->heads, 1);
			run(&w, s, 0);
			alone(&w, bad, first);
			free(first);
			world_fini(&w);
		}
}

/* Nothing is copied for them: only the ring of segments holds the producer back. */
KVT_TEST(hopper_attn_many_failed_requests_in_a_row)
{
	const u32 nr = STEP_MAX;

	for (u32 i = 0; i < KV_ARRAY_SIZE(rule_shapes); i++) {
		const struct shape *s = &rule_shapes[i];
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

KVT_TEST(hopper_attn_row_outside_the_pool)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(rule_shapes); i++)
		for (int nr_sms = 3; nr_sms < 6; nr_sms += 2)
			row_outside(&rule_shapes[i], nr_sms);
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

/*
 * Verdicts do not change within a step (P4). Should one, parts of a unit do not agree: the first segments of CTAs
 * go by the schedule, the others look. No number comes of it, nobody waits for ever, others are as they were.
 */
KVT_TEST(hopper_attn_parts_that_do_not_agree)
{
	static const struct shape s[] = {GQA(E4M3, TOKEN, 12, 1, 128),
					 GQA(E4M3, STATIC, 8, 2, 128)};
	static const struct step t = {3, {64 * 6, 64 * 20, 64 * 9 + 1}, {1, 1, 1}};

	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(s); i++) {
		const u32 bad = i % 2 ? KV_BAD_GEN : 0;
		struct world w;
		float *first;

		hopper_has_sms(5 + 8 * (int)(i / 2));
		make(&w, &s[i / 2], &t);
		run(&w, &s[i / 2], 0);
		check(&w, &s[i / 2], "before, heads/kv heads");
		first = keep(&w);
		w.f.verdicts[1].bits = bad; /* when the schedule is made */
		upload(&w, s[i / 2].heads, 1);
		run(&w, &s[i / 2], 0);
		w.f.verdicts[1].bits = bad ^ KV_BAD_GEN;
		to_device(&w, 6, w.f.verdicts, t.nr * sizeof(struct kv_verdict));
		run(&w, &s[i / 2], KVK_ATTN_PLAN);
		alone(&w, 1, first);
		free(first);
		world_fini(&w);
	}
}

/* A schedule says what may be read in its own step. In the next one it is good for nothing. */
KVT_TEST(hopper_attn_schedule_of_another_step)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(rule_shapes); i++) {
		const struct shape *s = &rule_shapes[i];
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
}

KVT_TEST(hopper_attn_length_beyond_the_rows)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(rule_shapes); i++)
		for (u32 bad = SHORT; bad <= LONG; bad++)
			length_beyond(&rule_shapes[i], bad);
}

KVT_MAIN()
