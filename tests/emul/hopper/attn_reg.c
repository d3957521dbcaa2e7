/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_reg.c - decode attention of MLA on FP8 pages with more than 16 query rows as Hopper would run
 * it, on the CPU (machine.cc): attn_mla_reg.cu, and attn_mla_fast.cu with a bound of its own. Random steps
 * against the host's reference, units cut between many CTAs and in pairs, CTAs that begin late, and
 * what the rules of P5 keep them from reading.
 */
#include "tests/kvt.h"
#include "machine.h"
#include "tests/kernels/common.h"
#include "tests/kernels/attn_world.h"

#define STEP_MAX 40u

/* Tokens of each request, and how many of them ask. */
struct step {
	u32 nr;
	u32 lengths[STEP_MAX], q[STEP_MAX];
};

struct shape {
	u32 scale_kind;
	u32 heads;
	u32 q_max;
	u32 flags;
};

#define EXACT(scales, heads, q_max)                \
	{                                          \
		KV_SCALE_##scales, heads, q_max, 0 \
	}
#define FAST(scales, heads, q_max)                             \
	{                                                      \
		KV_SCALE_##scales, heads, q_max, KVK_ATTN_FAST \
	}

/* Each kernel, with tokens' scales and with one */
static const struct shape some[] = {EXACT(TOKEN, 64, 1), FAST(TOKEN, 64, 1),
				    EXACT(STATIC, 128, 1), FAST(STATIC, 24, 1)};

/* Of a case: what KVK_ATTN_FAST may be off by. Its queries and P are in e4m3. */
#define FAST_LIMIT 6e-2

static struct kv_layout layout_of(const struct shape *s)
{
	return kvt_layout_mla(KV_DTYPE_E4M3, s->scale_kind, 2);
}

/* Somebody asks, with all that the shape has: fewer rows are another kernel's. */
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
	KVT_EXPECT(s->heads * w->f.batch.q_len_max > 16);
	run_host(w, s->heads, l.nr_layers - 1);
}

/* Of the bytes behind the output none changes. */
static void run(struct world *w, const struct shape *s, u32 flags)
{
	const u8 *end = (const u8 *)w->dev.out + w->nr_out * sizeof(float);

	hopper_seed(kvt_rand64());
	run_device(w, s->flags | flags, false);
	for (u32 i = 0; i < 64; i++)
		KVT_EXPECT_EQ(end[i], 0xff);
}

static void check(struct world *w, const struct shape *s, const char *what)
{
	const bool fast = s->flags & KVK_ATTN_FAST;

	expect_close(w, what, s->heads, fast, fast ? FAST_LIMIT : 1e-3);
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
		hopper_begin_late(i % 2 ? 1000 : 0);
		hopper_copies_late(i % 3 ? 400 : 0);
		make(&w, &s[i], &t);
		run(&w, &s[i], 0);
		check(&w, &s[i], "heads/fast");
		first = keep(&w);
		run(&w, &s[i], i % 2 ? KVK_ATTN_PLAN : 0);
		same(&w, first);
		free(first);
		world_fini(&w);
	}
	hopper_begin_late(0);
	hopper_copies_late(0);
}

KVT_TEST(hopper_attn_reg_steps)
{
	static const struct shape s[] = {
		EXACT(TOKEN, 64, 1),  EXACT(STATIC, 64, 1), EXACT(TOKEN, 17, 1),
		EXACT(TOKEN, 20, 3),  EXACT(STATIC, 16, 4), EXACT(TOKEN, 33, 2),
		EXACT(TOKEN, 128, 1), EXACT(STATIC, 64, 2), EXACT(TOKEN, 128, 2),
		EXACT(TOKEN, 64, 4),
	};

	shapes(s, KV_ARRAY_SIZE(s), 4);
}

KVT_TEST(hopper_attn_fast_steps)
{
	static const struct shape s[] = {
		FAST(TOKEN, 64, 1),  FAST(STATIC, 64, 1), FAST(TOKEN, 17, 1),
		FAST(TOKEN, 20, 3),  FAST(STATIC, 16, 4), FAST(TOKEN, 33, 2),
		FAST(TOKEN, 128, 1), FAST(STATIC, 64, 2), FAST(TOKEN, 128, 2),
		FAST(TOKEN, 64, 4),
	};

	shapes(s, KV_ARRAY_SIZE(s), 4);
}

/* Other queries for the same step: the same rows, the last one first. */
static void turn(struct world *w)
{
	const u32 dim = w->f.pages.layout.latent_dim + w->f.pages.layout.rope_dim;

	for (size_t a = 0, b = w->nr_q - dim; a < b; a += dim, b -= dim)
		for (u32 i = 0; i < dim; i++) {
			const float v = w->q[a + i];

			w->q[a + i] = w->q[b + i];
			w->q[b + i] = v;
		}
	to_device(w, 8, w->q, w->nr_q * sizeof(float));
}

/*
 * One request, cut into a part an SM: equal to the bit whoever comes first, and whoever comes so late that
 * the others have given up its slice. What a slot still holds of the last layer is not this one's.
 */
static void cut(const struct shape *s, u32 length, int nr_sms, u32 nr_runs, unsigned late)
{
	const struct step t = {1, {length}, {s->q_max}};
	struct world w;
	float *first[2];

	hopper_has_sms(nr_sms);
	make(&w, s, &t);
	for (u32 k = 0; k < 2; k++) {
		if (k)
			turn(&w);
		run_host(&w, s->heads, 1);
		run(&w, s, 0);
		check(&w, s, "one request, heads/fast");
		first[k] = keep(&w);
	}
	for (u32 i = 0; i < nr_runs; i++) { /* 0 1 0 1 ... */
		turn(&w);
		hopper_begin_late(i % 3 ? late : 0);
		run(&w, s, KVK_ATTN_PLAN);
		same(&w, first[i % 2]);
	}
	hopper_begin_late(0);
	free(first[0]);
	free(first[1]);
	world_fini(&w);
}

KVT_TEST(hopper_attn_reg_one_request_on_all_sms)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		cut(&some[i], 64 * 7 - 60, 7, 2, 0);
	for (u32 i = 0; i < 2;
	     i++) { /* a merge of more parts than a warp reads at once */
		const struct shape s = {KV_SCALE_TOKEN, i ? 64 : 20, 1, some[i].flags};

		cut(&s, 64 * 19 - 1, 19, 0, 0);
	}
}

/* A CTA begins when the others' patience is over: those leave it their slices, or it them. */
KVT_TEST(hopper_attn_reg_late_ctas)
{
	static const struct shape s[] = {EXACT(TOKEN, 64, 1), FAST(TOKEN, 64, 1),
					 EXACT(TOKEN, 64, 2)};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++)
		cut(&s[i], 64 * 9 - 5, 5, 3, 6000);
}

/*
 * Parts travel in f16, which holds 2^-24 to 2^16: larger ones, smaller ones, and those of every other page
 * all zeros, whose scales are 0.
 */
KVT_TEST(hopper_attn_reg_parts_of_any_size)
{
	for (u32 i = 0; i < 4; i++) {
		latent_gain = i % 2 ? 0x1p-10f : 0x1p20f;
		cut(&some[i / 2], 64 * 7 - 60, 7, 1, 0);
		cut(&some[i / 2], 64 * 3, 1, 0, 0);
	}
	latent_gain = 0.f;
}

/*
 * Scores and scales grow along the context by far more than a reference's slack; some latents and some ropes
 * are zeros. KVK_ATTN_FAST: queries that it holds as they are, since what scores lose grows with them.
 */
KVT_TEST(hopper_attn_reg_references_rise)
{
	static const struct step t = {3, {900, 333, 64}, {1, 2, 1}};

	ramp = 0.01f;
	for (u32 i = 0; i < 4; i++) {
		const bool fast = i % 2;
		const struct shape s = {KV_SCALE_TOKEN, 32, 2, some[fast].flags};
		struct world w;
		float *first;

		q_in_e4m3 = fast;
		hopper_has_sms(i < 2 ? 1 : 5);
		make(&w, &s, &t);
		run(&w, &s, 0);
		expect_close(&w, "growing, heads/fast", s.heads, fast,
			     fast ? 4e-2 : 2e-3);
		first = keep(&w);
		run(&w, &s, KVK_ATTN_PLAN);
		same(&w, first);
		free(first);
		world_fini(&w);
	}
	ramp = 0.f;
	q_in_e4m3 = false;
}

KVT_TEST(hopper_attn_reg_many_requests_on_few_sms)
{
	struct step t = {.nr = 20};

	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++) {
		struct world w;

		for (u32 r = 0; r < t.nr; r++) {
			t.lengths[r] = 1 + kvt_rand_below(r % 4 ? 64 : 200);
			t.q[r] = 1;
		}
		hopper_has_sms(1 + (int)i / 2);
		make(&w, &some[i], &t);
		run(&w, &some[i], 0);
		check(&w, &some[i], "many requests, heads/fast");
		world_fini(&w);
	}
}

/*
 * Pages that land long behind those asked for after them: from the second request of a CTA on, whose first
 * pages are asked for while the ones before are read.
 */
KVT_TEST(hopper_attn_reg_pages_land_in_any_order)
{
	static const struct step t = {5, {330, 130, 192, 256, 100}, {1, 1, 1, 1, 1}};

	hopper_copies_late(5000);
	for (u32 i = 0; i < 4; i++) {
		const struct shape *s = &some[i / 2];
		struct world w;
		float *first;

		hopper_has_sms(1 + (int)i % 2);
		make(&w, s, &t);
		run(&w, s, 0);
		check(&w, s, "late pages, heads/fast");
		first = keep(&w);
		for (u32 k = 0; k < 2; k++) {
			run(&w, s, KVK_ATTN_PLAN);
			same(&w, first);
		}
		free(first);
		world_fini(&w);
	}
	hopper_copies_late(0);
}

/*
 * Half as many units as SMs: units of two parts, which the blocks of a cluster exchange, beside units of
 * one and of three, and of two that begin in the middle of a cluster; then the same by slots. A request that
 * fails and one with a row outside the pool leave the others as they were.
 */
static void pairs(const struct shape *s, const u32 (*lengths)[4])
{
	struct step t = {4, {0}, {1, 1, 1, 1}};
	struct world w;
	float *first;

	memcpy(t.lengths, *lengths, sizeof(*lengths));
	hopper_has_sms(8);
	make(&w, s, &t);
	run(&w, s, KVK_ATTN_NO_PAIRS);
	check(&w, s, "by slots, heads/fast");
	run(&w, s, 0);
	check(&w, s, "pairs, heads/fast");
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

KVT_TEST(hopper_attn_reg_pairs)
{
	static const u32 steps[][4] = {{128, 100, 65, 90},
				       {250, 193, 256, 200},
				       {128, 190, 64, 90},
				       {64, 100, 65, 130}};

	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(steps); i++) {
		const struct shape s = {i % 4 < 2 ? KV_SCALE_TOKEN : KV_SCALE_STATIC,
					i % 3 ? 64 : 21, 1, some[i % 2].flags};

		pairs(&s, &steps[i / 2]);
	}
}

/* Queries that BF16 holds give the F32 answer, rounded once; every element is looked at. */
KVT_TEST(hopper_attn_reg_bf16_activations)
{
	static const struct step t = {4, {130, 64, 3, 65}, {1, 1, 1, 1}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		for (int nr_sms = 4; nr_sms <= 8; nr_sms += 4) { /* slots; pairs */
			struct world w;
			float *first;
			u16 *q;

			hopper_has_sms(nr_sms);
			make(&w, &some[i], &t);
			run(&w, &some[i], 0);
			check(&w, &some[i], "f32, heads/fast");
			first = keep(&w);
			q = malloc(w.nr_q * sizeof(u16));
			for (size_t k = 0; k < w.nr_q; k++)
				q[k] = kvt_to_bf16(w.q[k]);
			w.dev.q = to_device(&w, 8, q, w.nr_q * sizeof(u16));
			w.dev.act_dtype = KVK_BF16;
			run(&w, &some[i], 0);
			for (size_t k = 0; k < w.nr_out; k++)
				KVT_EXPECT_EQ(((const u16 *)w.dev.out)[k],
					      kvt_to_bf16(first[k]));
			free(q);
			free(first);
			world_fini(&w);
		}
}

KVT_TEST(hopper_attn_reg_shared_pages)
{
	static const struct step t = {3, {200, 150, 70}, {1, 1, 1}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++) {
		struct world w;

		hopper_has_sms(5);
		make(&w, &some[i], &t);
		for (u32 r = 1; r < 3; r++)
			w.f.rows[w.f.row_start[r]].pfn = w.f.rows[0].pfn;
		w.f.rows[w.f.row_start[1] + 1].pfn = w.f.rows[2].pfn;
		upload(&w, some[i].heads, 1);
		run_host(&w, some[i].heads, 1);
		run(&w, &some[i], 0);
		check(&w, &some[i], "shared pages, heads/fast");
		world_fini(&w);
	}
}

/* --------------------------------------------------------------------------- P5, design 5 */

/* Four requests: SHORT has a page, LONG many parts. */
enum { SHORT = 1, LONG = 2 };
static const struct step rule_step = {4, {70, 40, 320, 65}, {1, 1, 1, 1}};

/* The request has NaN and nothing else; the others are as they were, to the bit. */
static void alone(struct world *w, u32 bad, const float *first)
{
	const size_t per = w->nr_out / w->f.batch.nr_tokens;

	KVT_EXPECT_EQ(kvt_nr_finite(w->out + bad * per, per), 0);
	memcpy(w->out + bad * per, first + bad * per, per * sizeof(float));
	same(w, first);
}

/* Each way to fail; its pages are good, or reading one would be the end. */
KVT_TEST(hopper_attn_reg_failed_request)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		for (u32 bad = SHORT; bad <= LONG; bad++) {
			const struct shape *s = &some[i];
			struct world w;
			float *first;

			hopper_has_sms(3 + (int)bad);
			make(&w, s, &rule_step);
			run(&w, s, 0);
			check(&w, s, "before, heads/fast");
			first = keep(&w);
			verdict_fail(&w.f, bad, (i + bad) % 4);
			if (i % 2)
				w.f.rows[w.f.row_start[bad]].pfn = 0x7fffffff;
			upload(&w, s->heads, 1);
			run(&w, s, 0);
			alone(&w, bad, first);
			free(first);
			world_fini(&w);
		}
}

/* Nothing is copied for them: only the ring of segments holds the producer back. */
KVT_TEST(hopper_attn_reg_many_failed_requests_in_a_row)
{
	const u32 nr = STEP_MAX;

	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++) {
		const struct shape *s = &some[i];
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
		check(&w, s, "beside failed requests, heads/fast");
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

KVT_TEST(hopper_attn_reg_row_outside_the_pool)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		row_outside(&some[i], 3 + 2 * ((int)i / 2));
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
	check(&w, s, "beside a wrong length, heads/fast");
	world_fini(&w);
}

KVT_TEST(hopper_attn_reg_length_beyond_the_rows)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		length_beyond(&some[i], i / 2 ? SHORT : LONG);
}

/* A schedule says what may be read in its own step. In the next one it is good for nothing. */
KVT_TEST(hopper_attn_reg_schedule_of_another_step)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++) {
		const struct shape *s = &some[i];
		struct world w;

		hopper_has_sms(4);
		make(&w, s, &rule_step);
		run(&w, s, 0);
		check(&w, s, "its own step, heads/fast");
		next_step(&w);
		run(&w, s, KVK_ATTN_PLAN);
		KVT_EXPECT_EQ(kvt_nr_finite(w.out, w.nr_out), 0);
		run(&w, s, 0);
		check(&w, s, "a schedule of the next step, heads/fast");
		world_fini(&w);
	}
}

KVT_MAIN()
