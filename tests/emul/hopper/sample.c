/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample.c - the samplers as Hopper would run them, on the CPU (machine.cc): a cluster of CTAs a
 * row must draw what one CTA a row draws, and both what the host's reference does but for draws
 * within rounding of a border between two tokens.
 */
#include "tests/kvt.h"
#include "kernels/moe_cuda.h"
#include "machine.h"
#include "tests/kernels/common.h"

#define ROWS_MAX 64u

enum logits {
	NORMAL,
	FLAT,	  /* most of them are kept */
	PEAKED,	  /* few have all the mass */
	EQUAL,	  /* all the same */
	FEW,	  /* seven values */
	HALF_INF, /* every other one is -inf */
	RISING,	  /* the best ones come last */
	NR_LOGITS
};

static const float temperatures[] = {1.0f, 0.0f, 0.3f, 1.0f, 4.0f, 1e-6f, 1e6f, 1e30f};
static const float top_ps[] = {0.9f, 0.5f, 1.0f, 0.9f, 0.0f, 1e-6f, 0.999f, 2.0f, 0.1f};

struct rows {
	struct kvk_sample_args a;
	float *logits, *temperature, *top_p;
	u64 *seeds;
};

static struct rows rows_make(struct kvt_rng *g, u32 nr, u32 vocab)
{
	struct rows r = {.logits = aligned_alloc(16, (4ul * nr * vocab + 15) & ~15ul),
			 .temperature = malloc(4ul * nr),
			 .top_p = malloc(4ul * nr),
			 .seeds = malloc(8ul * nr)};

	for (u32 i = 0; i < nr; i++) {
		r.temperature[i] = temperatures[i % KV_ARRAY_SIZE(temperatures)];
		r.top_p[i] = top_ps[i % KV_ARRAY_SIZE(top_ps)];
		r.seeds[i] = i % 9 == 8 ? ~0ull : kvt_rng_next(g);
	}
	r.a = (struct kvk_sample_args){.logits = r.logits,
				       .temperature = r.temperature,
				       .top_p = r.top_p,
				       .seeds = (const uint64_t *)r.seeds,
				       .nr_rows = nr,
				       .vocab = vocab};
	return r;
}

static void rows_fini(struct rows *r)
{
	free(r->logits);
	free(r->temperature);
	free(r->top_p);
	free(r->seeds);
}

static void logits_fill(struct kvt_rng *g, enum logits kind, float *x, u32 vocab)
{
	kvt_rng_fill(g, x, vocab, kind == PEAKED ? 12.0f : kind == FLAT ? 0.7f : 3.0f);
	for (u32 i = 0; i < vocab; i++) {
		if (kind == EQUAL)
			x[i] = -3.25f;
		else if (kind == FEW)
			x[i] = (float)(kvt_rng_next(g) % 7) * 0.5f - 1.0f;
		else if (kind == HALF_INF && i % 2)
			x[i] = -INFINITY;
		else if (kind == RISING)
			x[i] = x[i] * 0.1f + 20.0f * (float)i / (float)vocab;
	}
}

/* With which of the samplers: a device of that compute capability. @ids, @lp: [nr_rows] */
static void rows_run(const struct rows *r, int major, u32 *ids, float *lp)
{
	struct kvk_sample_args a = r->a;

	memset(ids, 0xff, 4ul * a.nr_rows);
	a.ret_ids = ids;
	a.ret_logprob = lp;
	hopper_seed(kvt_rand64());
	hopper_is(major);
	KVT_EXPECT_EQ(kvk_sample_cuda(&a, NULL), 0);
}

/* Return: rows whose draws are not the reference's. */
static u32 rows_check(const struct rows *r)
{
	const u32 nr = r->a.nr_rows;
	u32 one[ROWS_MAX], wide[ROWS_MAX], ref[ROWS_MAX], differ = 0;
	float lp[ROWS_MAX], lp_ref[ROWS_MAX];
	struct kvk_sample_args a = r->a;

	a.ret_ids = ref;
	a.ret_logprob = lp_ref;
	KVT_EXPECT_EQ(kvk_host_ops()->sample(&a, NULL), 0);
	rows_run(r, 8, one, NULL);
	rows_run(r, 9, wide, lp);
	for (u32 i = 0; i < nr; i++) {
		if (wide[i] != one[i])
			KVT_FAIL(
				"row %u of %u logits, temperature %g, top-p %g: %u, by one "
				"CTA %u, by the host %u",
				i, r->a.vocab, (double)r->temperature[i],
				(double)r->top_p[i], wide[i], one[i], ref[i]);
		if (!(r->temperature[i] > 0) || !(r->top_p[i] > 0))
			KVT_EXPECT_EQ(wide[i], ref[i]);
		if (wide[i] == ref[i])
			KVT_EXPECT((isnan(lp[i]) && isnan(lp_ref[i])) ||
				   fabsf(lp[i] - lp_ref[i]) < 1e-3f);
		differ += wide[i] != ref[i];
	}
	return differ;
}

static u32 sample_case(struct kvt_rng *g, enum logits kind, u32 nr, u32 vocab)
{
	struct rows r = rows_make(g, nr, vocab);
	u32 differ;

	for (u32 i = 0; i < nr; i++)
		logits_fill(g, kind, r.logits + (size_t)i * vocab, vocab);
	differ = rows_check(&r);
	rows_fini(&r);
	return differ;
}

KVT_TEST(hopper_sample_draws_what_one_cta_a_row_draws)
{
	static const u32 vocabs[] = {1, 129, 5003, 20480};
	struct kvt_rng g = {kvt_rand64()};
	u32 differ = 0;

	for (u32 i = 0; i < KV_ARRAY_SIZE(vocabs); i++)
		for (u32 kind = 0; kind < NR_LOGITS; kind++)
			differ += sample_case(&g, kind, vocabs[i] > 10000 ? 3 : 9,
					      vocabs[i]);
	KVT_EXPECT_LE(differ, 4 * NR_LOGITS * 9 / 32);
}

KVT_TEST(hopper_sample_rows_of_a_whole_vocabulary)
{
	struct kvt_rng g = {kvt_rand64()};
	u32 differ = 0;

	for (u32 kind = 0; kind < NR_LOGITS; kind += 3)
		differ += sample_case(&g, kind, 1, 163840);
	KVT_EXPECT_LE(differ, 1);
}

/* So many rows that each has a pair of CTAs, which do not have room for all of it. */
KVT_TEST(hopper_sample_many_long_rows)
{
	const u32 nr = 28, vocab = 115004;
	struct kvt_rng g = {kvt_rand64()};
	struct rows r = rows_make(&g, nr, vocab);

	for (u32 i = 0; i < nr; i++) {
		logits_fill(&g, i % NR_LOGITS, r.logits + (size_t)i * vocab, vocab);
		r.top_p[i] = i % 3 ? top_ps[i % KV_ARRAY_SIZE(top_ps)] : 0.9f;
	}
	KVT_EXPECT_LE(rows_check(&r), 2);
	rows_fini(&r);
}

/* No number, nothing finite, the infinite one: an id of the row, and which one. */
KVT_TEST(hopper_sample_rows_without_a_number)
{
	const u32 nr = 8, vocab = 9000;
	struct kvt_rng g = {kvt_rand64()};
	struct rows r = rows_make(&g, nr, vocab);
	u32 ids[ROWS_MAX];
	float lp[ROWS_MAX];

	for (u32 i = 0; i < nr; i++) {
		float *x = r.logits + (size_t)i * vocab;

		logits_fill(&g, NORMAL, x, vocab);
		r.temperature[i] = i % 2 ? 1.0f : 0.0f;
		r.top_p[i] = 0.9f;
		if (i < 4)
			x[vocab - 1 - i] = NAN;
		else if (i < 6)
			x[vocab - i] = INFINITY;
		else
			for (u32 k = 0; k < vocab; k++)
				x[k] = -INFINITY;
	}
	KVT_EXPECT_LE(rows_check(&r), 0);
	rows_run(&r, 9, ids, lp);
	for (u32 i = 0; i < nr; i++) {
		KVT_EXPECT_EQ(ids[i], i == 4 || i == 5 ? vocab - i : 0);
		KVT_EXPECT(i >= 4 || isnan(lp[i]));
	}
	rows_fini(&r);
}

KVT_MAIN()
