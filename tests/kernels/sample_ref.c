/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample_ref.c - the host's sampler: greedy and its log-probability, rows without a number, the
 * distribution it draws from, and that a draw is a function of logits and seed.
 */
#include "tests/kvt.h"
#include "common.h"

static struct kvt_rng rng;

/* ------------------------------------------------------------------------- sampler */

static int sample(const float *logits, u32 rows, u32 vocab, float t, float p, u64 seed,
		  u32 *ids, float *lp)
{
	float temperature[64], top_p[64];
	u64 seeds[64];
	struct kvk_sample_args a = {.logits = logits,
				    .temperature = temperature,
				    .top_p = top_p,
				    .seeds = seeds,
				    .ret_ids = ids,
				    .ret_logprob = lp,
				    .nr_rows = rows,
				    .vocab = vocab};

	for (u32 r = 0; r < rows; r++) {
		temperature[r] = t;
		top_p[r] = p;
		seeds[r] = seed + r * 0x9e3779b97f4a7c15ull;
	}
	return kvk_host_ops()->sample(&a, NULL);
}

KVT_TEST(sample_greedy_and_logprob)
{
	float logits[4 * 1000], lp[4];
	u32 ids[4];

	rng.state = kvt_rand64();
	kvt_rng_fill(&rng, logits, 4000, 3.0f);
	logits[1000 + 17] = logits[1000 + 400] = 50; /* tie: the smaller id */
	KVT_EXPECT_EQ(sample(logits, 4, 1000, 0, 1, 1, ids, lp), 0);
	KVT_EXPECT_EQ(ids[1], 17);
	for (u32 r = 0; r < 4; r++) {
		const float *l = logits + r * 1000;
		double sum = 0;

		for (u32 i = 0; i < 1000; i++) {
			KVT_EXPECT(l[i] <= l[ids[r]]);
			sum += exp((double)l[i] - l[ids[r]]);
		}
		KVT_EXPECT_LE(fabs(-log(sum) - lp[r]), 2e-6);
	}
}

KVT_TEST(sample_nan_rows_give_valid_ids)
{
	float logits[4 * 100], lp[4];
	u32 ids[4];

	rng.state = kvt_rand64();
	for (int t = 0; t < 2; t++) {
		kvt_rng_fill(&rng, logits, 400, 1.0f);
		logits[57] = NAN;
		for (u32 i = 100; i < 200; i++)
			logits[i] = NAN;
		for (u32 i = 200; i < 300; i++)
			logits[i] = -INFINITY;
		logits[342] = INFINITY;
		memset(ids, 0xff, sizeof(ids));
		KVT_EXPECT_EQ(sample(logits, 4, 100, (float)t, 0.9f, 5, ids, lp), 0);
		KVT_EXPECT_EQ(ids[0], 0);
		KVT_EXPECT_EQ(ids[1], 0);
		KVT_EXPECT_EQ(ids[2], 0);
		KVT_EXPECT_EQ(ids[3], 42);
		KVT_EXPECT(isnan(lp[0]) && isnan(lp[1]));
	}
}

/* Frequencies of many draws against the distribution that top-p should leave. */
KVT_TEST(sample_follows_the_distribution)
{
	enum { VOCAB = 40, DRAWS = 20000 };
	static const float top_ps[] = {1.0f, 0.8f, 0.3f, 1e-6f};
	float logits[64 * VOCAB];
	double p[VOCAB], total = 0;

	rng.state = kvt_rand64();
	kvt_rng_fill(&rng, logits, VOCAB, 2.0f);
	logits[7] = logits[3]; /* equal mass at whatever place */
	for (u32 r = 1; r < 64; r++)
		memcpy(logits + r * VOCAB, logits, VOCAB * sizeof(float));
	for (u32 i = 0; i < VOCAB; i++)
		total += p[i] = exp(logits[i] / 0.7);
	for (u32 c = 0; c < 4; c++) {
		u32 count[VOCAB] = {0}, ids[64];
		double kept[VOCAB] = {0}, mass = 0, chi = 0;
		bool taken[VOCAB] = {false};

		while (mass < top_ps[c] * total * (1 - 1e-9)) {
			u32 best = VOCAB;

			for (u32 i = 0; i < VOCAB; i++)
				if (!taken[i] &&
				    (best == VOCAB || logits[i] > logits[best]))
					best = i;
			taken[best] = true;
			kept[best] = p[best];
			mass += p[best];
		}
		for (u32 d = 0; d < DRAWS; d += 64) {
			KVT_EXPECT_EQ(sample(logits, 64, VOCAB, 0.7f, top_ps[c],
					     kvt_rng_next(&rng), ids, NULL),
				      0);
			for (u32 r = 0; r < 64; r++)
				count[ids[r]]++;
		}
		for (u32 i = 0; i < VOCAB; i++) {
			double want = kept[i] / mass * (DRAWS + 63) / 64 * 64;

			if (kept[i] == 0)
				KVT_EXPECT_EQ(count[i], 0);
			else
				chi += (count[i] - want) * (count[i] - want) / want;
		}
		/* 39 degrees of freedom: beyond 100 has a chance of 3e-7 */
		KVT_EXPECT_LE(chi, 100);
	}
}

KVT_TEST(sample_is_a_function_of_logits_and_seed)
{
	float logits[16 * 500];
	u32 all[16], one;

	rng.state = kvt_rand64();
	kvt_rng_fill(&rng, logits, 8000, 2.0f);
	KVT_EXPECT_EQ(sample(logits, 16, 500, 1, 0.95f, 77, all, NULL), 0);
	for (u32 r = 0; r < 16; r++) {
		KVT_EXPECT_EQ(sample(logits + r * 500, 1, 500, 1, 0.95f,
				     77 + r * 0x9e3779b97f4a7c15ull, &one, NULL),
			      0);
		KVT_EXPECT_EQ(one, all[r]);
	}
}

KVT_MAIN()
