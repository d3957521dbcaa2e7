/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_sample.c - the GPU's samplers against the host's: long and odd vocabularies, ties, extreme
 * temperatures and top-p, rows without a number. A draw within rounding of a border between two
 * tokens may fall on its other side; that is rare, and counted.
 */
#ifdef CONFIG_CUDA
#include "cuda_common.h"
#include "kernels/moe_cuda.h"

enum logits {
	NORMAL,
	PEAKED,
	EQUAL,	  /* all the same */
	FEW,	  /* seven values */
	HALF_INF, /* every other one is -inf */
	NR_LOGITS
};

static void logits_fill(struct kvt_rng *g, enum logits kind, float *x, u32 vocab)
{
	kvt_rng_fill(g, x, vocab, kind == PEAKED ? 12.0f : 2.0f);
	for (u32 i = 0; i < vocab; i++) {
		if (kind == EQUAL)
			x[i] = -3.25f;
		else if (kind == FEW)
			x[i] = (float)(kvt_rng_next(g) % 7) * 0.5f - 1.0f;
		else if (kind == HALF_INF && i % 2)
			x[i] = -INFINITY;
	}
}

static const float temperatures[] = {0.0f, 1.0f, 0.3f, 4.0f, 1e-6f, 1e6f, 1e30f};
static const float top_ps[] = {0.9f, 1.0f, 0.5f, 0.0f, 1e-6f, 0.999f, 2.0f, 0.1f};

struct rows {
	float *logits, *temperature, *top_p, *lp, *got_lp;
	u64 *seeds;
	u32 *ids, *got;
	u32 nr, vocab;
};

static struct rows rows_make(u32 nr, u32 vocab)
{
	return (struct rows){.logits = malloc(4ul * nr * vocab),
			     .temperature = malloc(4ul * nr),
			     .top_p = malloc(4ul * nr),
			     .lp = malloc(4ul * nr),
			     .got_lp = malloc(4ul * nr),
			     .seeds = malloc(8ul * nr),
			     .ids = malloc(4ul * nr),
			     .got = malloc(4ul * nr),
			     .nr = nr,
			     .vocab = vocab};
}

static void rows_fini(struct rows *r)
{
	free(r->logits);
	free(r->temperature);
	free(r->top_p);
	free(r->lp);
	free(r->got_lp);
	free(r->seeds);
	free(r->ids);
	free(r->got);
}

/* Both sides' ids and log-probabilities; the GPU twice, which must be the same twice. */
static void rows_run(struct rows *r)
{
	struct kvk_sample_args a = {.logits = r->logits,
				    .temperature = r->temperature,
				    .top_p = r->top_p,
				    .seeds = (const uint64_t *)r->seeds,
				    .ret_ids = r->ids,
				    .ret_logprob = r->lp,
				    .nr_rows = r->nr,
				    .vocab = r->vocab};
	u32 *again;

	KVT_EXPECT_EQ(kvk_host_ops()->sample(&a, NULL), 0);
	a.logits = gpu_copy(r->logits, 4ul * r->nr * r->vocab);
	a.temperature = gpu_copy(r->temperature, 4ul * r->nr);
	a.top_p = gpu_copy(r->top_p, 4ul * r->nr);
	a.seeds = gpu_copy(r->seeds, 8ul * r->nr);
	a.ret_ids = gpu_copy(r->ids, 4ul * r->nr);
	a.ret_logprob = gpu_copy(r->lp, 4ul * r->nr);
	KVT_EXPECT_EQ(kvk_sample_cuda(&a, NULL), 0);
	memcpy(r->got, gpu_fetch(a.ret_ids, 4ul * r->nr), 4ul * r->nr);
	memcpy(r->got_lp, gpu_fetch(a.ret_logprob, 4ul * r->nr), 4ul * r->nr);
	a.ret_logprob = NULL;
	KVT_EXPECT_EQ(kvk_sample_cuda(&a, NULL), 0);
	again = gpu_fetch(a.ret_ids, 4ul * r->nr);
	KVT_EXPECT(memcmp(again, r->got, 4ul * r->nr) == 0);
}

/* Return: rows whose draws differ. */
static u32 rows_differ(const struct rows *r)
{
	u32 differ = 0;

	for (u32 i = 0; i < r->nr; i++) {
		KVT_EXPECT_LE(r->got[i], r->vocab - 1);
		if (!(r->temperature[i] > 0) || !(r->top_p[i] > 0))
			KVT_EXPECT_EQ(r->got[i], r->ids[i]);
		if (r->got[i] == r->ids[i])
			KVT_EXPECT((isnan(r->lp[i]) && isnan(r->got_lp[i])) ||
				   fabsf(r->lp[i] - r->got_lp[i]) < 1e-3f);
		differ += r->got[i] != r->ids[i];
	}
	return differ;
}

static void sample_case(struct kvt_rng *g, enum logits kind, u32 nr, u32 vocab)
{
	struct rows r = rows_make(nr, vocab);
	u32 differ;

	for (u32 i = 0; i < nr; i++) {
		logits_fill(g, kind, r.logits + (size_t)i * vocab, vocab);
		r.temperature[i] = temperatures[i % KV_ARRAY_SIZE(temperatures)];
		r.top_p[i] = top_ps[i % KV_ARRAY_SIZE(top_ps)];
		r.seeds[i] = i % 9 == 8 ? ~0ull : kvt_rng_next(g);
	}
	rows_run(&r);
	differ = rows_differ(&r);
	if (differ > 1 + nr / 32)
		KVT_FAIL("logits %u, %u rows of %u: %u draws are others", kind, nr, vocab,
			 differ);
	rows_fini(&r);
}

KVT_TEST(cuda_sample_draws_as_the_reference)
{
	static const struct {
		u32 nr, vocab;
	} shapes[] = {{56, 163840}, {56, 20480}, {56, 5003},
		      {56, 129},    {56, 1},	 {24, 262144}};
	/* racecheck is some hundred times slower: every path once, a row of each temperature */
	const bool brief = gpu_sanitizer("racecheck");
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 i = 0; i < KV_ARRAY_SIZE(shapes); i++)
		for (u32 kind = 0; kind < NR_LOGITS; kind++)
			if (brief ? shapes[i].vocab < 5003 ||
					    (shapes[i].vocab == 5003 && kind % 3 == 0)
				  : shapes[i].vocab <= 20480 || kind == i % 2 + NORMAL ||
					    kind == FEW)
				sample_case(&g, kind, brief ? 7 : shapes[i].nr,
					    shapes[i].vocab);
}

/* 64 and more rows share the GPU otherwise than a few do: fewer CTAs of a row. */
KVT_TEST(cuda_sample_any_number_of_rows)
{
	static const u32 rows[] = {1, 3, 17, 64, 133, 256};
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 i = 0; i < KV_ARRAY_SIZE(rows); i++)
		if (rows[i] <= 17 || !gpu_sanitizer("racecheck"))
			sample_case(&g, NORMAL, rows[i], 20000);
}

KVT_TEST(cuda_sample_rows_too_long_for_a_cluster)
{
	const bool brief = gpu_sanitizer("racecheck");
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 kind = 0; kind < NR_LOGITS; kind += brief ? FEW : 1)
		sample_case(&g, kind, brief ? 2 : 16, 262147);
}

/* A whole number of equal tokens is kept, and which ones is known: the smallest ids. */
KVT_TEST(cuda_sample_ties_at_the_cut_go_to_the_smaller_ids)
{
	const u32 nr = 64, vocab = 16384;
	struct rows r = rows_make(nr, vocab);
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 i = 0; i < nr; i++) {
		for (u32 k = 0; k < vocab; k++)
			r.logits[(size_t)i * vocab + k] = 1.5f;
		r.temperature[i] = 0.7f;
		r.top_p[i] = 0.25f;
		/* the last one kept, the first, and what lies between */
		r.seeds[i] = i == 0 ? ~0ull : i == 1 ? 0 : kvt_rng_next(&g);
	}
	rows_run(&r);
	KVT_EXPECT_EQ(r.got[0], vocab / 4 - 1);
	KVT_EXPECT_EQ(r.got[1], 0);
	for (u32 i = 2; i < nr; i++)
		KVT_EXPECT_EQ(r.got[i],
			      (u32)((double)(r.seeds[i] >> 11) * 0x1p-53 * (vocab / 4)));
	rows_fini(&r);
}

KVT_TEST(cuda_sample_rows_without_a_number_give_valid_ids)
{
	const u32 nr = 8, vocab = 9000;
	struct rows r = rows_make(nr, vocab);
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 i = 0; i < nr; i++) {
		float *x = r.logits + (size_t)i * vocab;

		logits_fill(&g, NORMAL, x, vocab);
		r.temperature[i] = i % 2 ? 1.0f : 0.0f;
		r.top_p[i] = 0.9f;
		r.seeds[i] = kvt_rng_next(&g);
		if (i < 4)
			x[vocab - 1 - i] = NAN;
		else
			x[vocab - i] = i < 6 ? INFINITY : x[0];
	}
	for (u32 k = 0; k < vocab; k++)
		r.logits[6 * vocab + k] = -INFINITY;
	rows_run(&r);
	(void)rows_differ(&r);
	for (u32 i = 0; i < 4; i++) {
		KVT_EXPECT_EQ(r.got[i], 0);
		KVT_EXPECT(isnan(r.got_lp[i]));
	}
	KVT_EXPECT_EQ(r.got[4], vocab - 4);
	KVT_EXPECT_EQ(r.got[5], vocab - 5);
	KVT_EXPECT_EQ(r.got[6], r.ids[6]);
	rows_fini(&r);
}
#else
#include "tests/kvt.h"

KVT_TEST(cuda_sample)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif

KVT_MAIN()
