/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe.c - the experts in INT4 and E4M3, as Hopper would run them, on the CPU (machine.cc), against
 * the host references. Outputs and workspaces are NaN before a call, and threads and copies take another
 * order in every run.
 */
#include "rig.h"

/* |a - b| / |b|; 1 if a NaN is in one of them only */
static double rel_bf16(const u16 *a, const u16 *b, size_t n)
{
	double num = 0, den = 0;

	for (size_t i = 0; i < n; i++) {
		double x = kvt_bf16(a[i]), y = kvt_bf16(b[i]);

		if (isnan(x) != isnan(y))
			return 1;
		if (isnan(x))
			continue;
		num += (x - y) * (x - y);
		den += y * y;
	}
	return den > 0 ? sqrt(num / den) : num > 0;
}

/* ------------------------------------------------------------------------------- experts */

/* Look at the bench's reference as well. */
static bool bench_too;

/* The second token has an Inf: its h is NaN, and its neighbours are as without it. */
static bool one_nan;

/* |want - y| / |y|, y in float64 with x and h as they are */
static double bench_err(const struct kvk_moe_args *a, const u16 *want)
{
	const size_t n = (size_t)a->nr_tokens * a->experts.hidden;
	double *y = nan_new(n * sizeof(*y)), num = 0, den = 0;

	hopper_bench_ref(a, y);
	for (size_t i = 0; i < n; i++) {
		const double d = kvt_bf16(want[i]) - y[i];

		num += d * d;
		den += y[i] * y[i];
	}
	KVT_NOTE("against float64: %.2e", sqrt(num / den));
	return sqrt(num / den);
}

/* y in f32 is what y in bf16 is rounded from, also where it is added to; @got: of the same call.
 * @was: what y held, or NULL */
static void moe_in_f32(struct kvk_moe_args a, const u16 *got, const u16 *was)
{
	const size_t n = (size_t)a.nr_tokens * a.experts.hidden;
	float *y = nan_new(4 * n);

	for (size_t i = 0; i < n && was; i++)
		y[i] = (float)kvt_bf16(was[i]);
	a.y = y;
	a.y_f32 = true;
	memset(a.workspace, 0xff, a.workspace_bytes);
	KVT_EXPECT_EQ(moe_call(NULL, &a), 0);
	for (size_t i = 0; i < n; i++)
		KVT_EXPECT(isnan(y[i]) ? isnan(kvt_bf16(got[i]))
				       : kvt_to_bf16(y[i]) == got[i]);
	free(y);
}

static void moe_once(const struct moe_case *c)
{
	struct kvt_matrix w13 =
		kvt_matrix_make(&rng, c->dtype, c->nr_experts * 2, c->inter, c->hidden,
				c->group, c->scale_dtype);
	struct kvt_matrix w2 = kvt_matrix_make(&rng, c->dtype, c->nr_experts, c->hidden,
					       c->inter, c->group, c->scale_dtype);
	size_t n = (size_t)c->nr_tokens * c->hidden, slots = c->nr_tokens * c->top_k;
	u16 *want = bf16_new(n), *got = nan_new(2 * n), *was = NULL;
	u32 *ids = nan_new(4 * slots);
	float *weights = nan_new(4 * slots);
	struct kvk_moe_args a = {.experts = {.dtype = c->dtype,
					     .group = c->group,
					     .scale_dtype = c->scale_dtype,
					     .nr_experts = c->nr_experts,
					     .hidden = c->hidden,
					     .inter = c->inter,
					     .w13 = w13.data,
					     .w2 = w2.data,
					     .s13 = w13.scales,
					     .s2 = w2.scales},
				 .x = bf16_new(n),
				 .y = want,
				 .ids = ids,
				 .weights = weights,
				 .nr_tokens = c->nr_tokens,
				 .top_k = c->top_k,
				 .act_dtype = KVK_BF16,
				 .accumulate = c->accumulate};

	routing(c, ids, weights);
	if (one_nan)
		((u16 *)a.x)[c->hidden + 7] = 0x7f80;
	if (c->accumulate)
		was = memcpy(nan_new(2 * n), memcpy(got, want, 2 * n), 2 * n);
	a.workspace_bytes = kvk_host_ops()->moe_workspace(&a);
	a.workspace = nan_new(a.workspace_bytes);
	KVT_EXPECT_EQ(moe_call(kvk_host_ops(), &a), 0);
	experts_move(&a.experts, &w13, &w2);
	a.y = got;
	a.workspace_bytes = kvk_moe_workspace_cuda(&a);
	KVT_EXPECT(a.workspace_bytes > 0);
	a.workspace = nan_new(a.workspace_bytes);
	KVT_EXPECT_EQ(moe_call(NULL, &a), 0);
	KVT_NOTE("%ux%u group %u tokens %u: error %.2e", c->hidden, c->inter, c->group,
		 c->nr_tokens, rel_bf16(got, want, n));
	if (c->bad_id || c->accumulate) /* of each kernel some: they take long */
		moe_in_f32(a, got, was);
	/* both round to bf16 at the end, and E4M3 rounds h, where an h near a tie may get the
	 * other code; a case that hangs ends by itself (machine.cc) */
	KVT_EXPECT(rel_bf16(got, want, n) < (c->dtype == KVK_E4M3 ? 5e-3 : 3e-3));
	if (bench_too)
		KVT_EXPECT(bench_err(&a, want) < (c->dtype == KVK_E4M3 ? 6e-2 : 3e-3));
	kvt_matrix_fini(&w13);
	kvt_matrix_fini(&w2);
}

static void moe_tokens(struct moe_case c, const u32 *counts, size_t nr)
{
	rng.state = kvt_rand64();
	hopper_seed(kvt_rand64());
	for (size_t i = 0; i < nr; i++) {
		c.nr_tokens = counts[i];
		c.accumulate = i == 1;
		c.bad_id = i == 0;
		moe_once(&c);
	}
}

/* Where moe_int4_step.cuh works: two row tiles in a unit and more; tiles of one token, of
 * eight and of what is left; a last unit that lacks row tiles; packets of a call before; a first unit
 * that is more than the ring. */
KVT_TEST(hopper_int4_few_slots)
{
	static const u32 counts[] = {5, 16, 2}, crowd[] = {21, 1, 7}, rows[] = {3, 40};
	static const u32 one[] = {1, 2};

	moe_tokens((struct moe_case){KVK_INT4, 256, 128, 32, KVK_BF16, 24, 4, 0, false,
				     false},
		   counts, 3);
	moe_tokens(
		(struct moe_case){KVK_INT4, 384, 128, 32, KVK_F16, 9, 3, 0, false, false},
		crowd, 3);
	moe_tokens((struct moe_case){KVK_INT4, 384, 512, 32, KVK_BF16, 12, 8, 0, false,
				     false},
		   counts + 2, 1);
	moe_tokens((struct moe_case){KVK_INT4, 384, 128, 32, KVK_BF16, 9, 1, 0, false,
				     false},
		   rows, 2);
	hopper_has_sms(12); /* most end with a unit of the first product */
	moe_tokens((struct moe_case){KVK_INT4, 384, 128, 32, KVK_BF16, 9, 1, 0, false,
				     false},
		   one, 2);
	hopper_has_sms(3);
	moe_tokens((struct moe_case){KVK_INT4, 10368, 128, 32, KVK_BF16, 2, 1, 0, false,
				     false},
		   counts + 2, 1);
}

/* Two warps split the columns, then none. */
KVT_TEST(hopper_int4_few_rows)
{
	static const u32 counts[] = {17, 19, 24};

	moe_tokens((struct moe_case){KVK_INT4, 256, 128, 32, KVK_BF16, 20, 4, 0, false,
				     false},
		   counts, 3);
}

/* A row tile per warp, h in f16 with a scale per 128 columns; tiles of one token, of up to two,
 * up to four and more share a brick's columns in other ways, in groups of each size. */
KVT_TEST(hopper_int4_many_rows)
{
	static const u32 counts[] = {3, 5};

	moe_tokens((struct moe_case){KVK_INT4, 256, 1024, 128, KVK_F16, 6, 2, 0, false,
				     false},
		   counts, 2);
	moe_tokens((struct moe_case){KVK_INT4, 256, 1024, 64, KVK_BF16, 8, 2, 0, false,
				     false},
		   counts, 2);
	moe_tokens((struct moe_case){KVK_INT4, 128, 1024, 32, KVK_BF16, 6, 2, 0, false,
				     false},
		   counts, 2);
}

/* More slots than each block sorts for itself: the plan kernel. */
KVT_TEST(hopper_int4_plan)
{
	static const u32 counts[] = {70};

	moe_tokens((struct moe_case){KVK_INT4, 128, 128, 64, KVK_BF16, 90, 4, 0, false,
				     false},
		   counts, 1);
}

/* Sums of the early row blocks among the last products: two warps a row tile, then one; tiles of
 * eight and of less. */
KVT_TEST(hopper_int4_early_sums)
{
	static const u32 counts[] = {64};

	moe_tokens((struct moe_case){KVK_INT4, 1152, 128, 32, KVK_BF16, 70, 4, 0, true,
				     false},
		   counts, 1);
	moe_tokens((struct moe_case){KVK_INT4, 1152, 128, 32, KVK_BF16, 45, 4, 0, true,
				     false},
		   counts, 1);
}

/* The last row block has four row tiles of 32, so it is summed while the first one of the last
 * expert, which the first token has too, is still under way: where there are no rows nothing is
 * read but what the row block has written. */
KVT_TEST(hopper_int4_last_row_block)
{
	static const u32 counts[] = {16, 21, 11};

	for (int i = 0; i < 2; i++)
		moe_tokens((struct moe_case){KVK_INT4, 1152, 256, 64, KVK_BF16, 6, 2, 0,
					     false, false},
			   counts, 3);
}

/* Tiles of 32, 64, 112 and 128 tokens; an expert with several. */
KVT_TEST(hopper_int4_wide)
{
	static const u32 all[] = {72, 150, 50, 220}, some[] = {40, 100};

	moe_tokens((struct moe_case){KVK_INT4, 256, 128, 32, KVK_BF16, 9, 4, 0, false,
				     false},
		   all, KV_ARRAY_SIZE(all));
	moe_tokens(
		(struct moe_case){KVK_INT4, 384, 256, 64, KVK_F16, 7, 3, 0, false, false},
		some, 2);
	moe_tokens((struct moe_case){KVK_INT4, 256, 1024, 128, KVK_BF16, 5, 2, 0, false,
				     false},
		   some, 1);
}

/* A warp's tokens share what their results are shifted by. */
KVT_TEST(hopper_int4_wide_nan_disturbs_nobody)
{
	static const u32 counts[] = {13, 35};

	one_nan = true;
	moe_tokens((struct moe_case){KVK_INT4, 256, 128, 32, KVK_BF16, 5, 4, 0, false,
				     false},
		   counts, 2);
	one_nan = false;
}

/* Where moe_fp8_step.cuh works: tiles of one token, of eight and of what is left, more tokens than a
 * warp's slot holds; one row tile in a unit, two and eight, of which some are not there; a last
 * stage that is half empty; packets of a call before. */
KVT_TEST(hopper_fp8_step)
{
	static const u32 counts[] = {5, 21, 2}, rows[] = {3, 40}, one[] = {1, 2, 4};

	moe_tokens(
		(struct moe_case){KVK_E4M3, 384, 256, 0, KVK_BF16, 7, 3, 0, false, false},
		counts, 3);
	moe_tokens(
		(struct moe_case){KVK_E4M3, 128, 128, 0, KVK_BF16, 9, 1, 0, false, false},
		rows, 2);
	moe_tokens((struct moe_case){KVK_E4M3, 640, 384, 0, KVK_BF16, 12, 8, 0, false,
				     false},
		   one, 3);
	/* more units than SMs, many stages */
	moe_tokens((struct moe_case){KVK_E4M3, 2176, 1152, 0, KVK_BF16, 9, 2, 0, false,
				     false},
		   one, 1);
}

/* Units of two turns: a stage's two row tiles and one, several stages; tiles of more tokens than have room
 * for both turns' sums at once; of the second product alone. */
KVT_TEST(hopper_fp8_step_two_turns)
{
	static const u32 many[] = {8, 5}, two[] = {2};

	hopper_has_sms(4);
	moe_tokens(
		(struct moe_case){KVK_E4M3, 384, 512, 0, KVK_BF16, 3, 2, 0, false, false},
		many, 2);
	moe_tokens((struct moe_case){KVK_E4M3, 640, 384, 0, KVK_BF16, 12, 8, 0, false,
				     false},
		   two, 1);
	hopper_has_sms(3);
	moe_tokens(
		(struct moe_case){KVK_E4M3, 768, 256, 0, KVK_BF16, 9, 8, 0, false, false},
		two, 1);
}

/* Tiles of 16; rows that are no whole tile. */
KVT_TEST(hopper_fp8_wide)
{
	static const u32 counts[] = {17, 22}, more[] = {28};

	moe_tokens((struct moe_case){KVK_E4M3, 384, 256, 0, KVK_BF16, 66, 8, 0, false,
				     false},
		   counts, 2);
	/* more units than SMs, more steps than stages of the ring */
	moe_tokens((struct moe_case){KVK_E4M3, 896, 1152, 0, KVK_BF16, 20, 2, 0, false,
				     false},
		   more, 1);
}

/* Products on e4m3: tiles of every size that is built, experts with several, rows that are
 * half a unit. */
KVT_TEST(hopper_fp8_chunk)
{
	static const u32 counts[] = {9, 40, 70, 150}, more[] = {300, 1550};

	moe_tokens(
		(struct moe_case){KVK_E4M3, 384, 256, 0, KVK_BF16, 7, 3, 0, false, false},
		counts, 4);
	/* the second time three blocks sort */
	moe_tokens(
		(struct moe_case){KVK_E4M3, 128, 128, 0, KVK_BF16, 5, 4, 0, false, false},
		more, 2);
}

/* What kvbench-kernels holds its lines against: as near to the host references as their roundings,
 * of y, and for E4M3 of x and h, explain. The last shape is no multiple of a scale's
 * block. */
KVT_TEST(hopper_bench_reference)
{
	static const struct moe_case cases[] = {
		{KVK_INT4, 256, 128, 32, KVK_BF16, 9, 3, 4, false, false},
		{KVK_INT4, 256, 1024, 128, KVK_BF16, 5, 2, 3, false, false},
		{KVK_E4M3, 384, 256, 0, KVK_BF16, 7, 3, 4, false, false},
		{KVK_E4M3, 264, 144, 0, KVK_BF16, 7, 3, 4, false, false},
	};

	rng.state = kvt_rand64();
	hopper_seed(kvt_rand64());
	bench_too = true;
	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++)
		moe_once(&cases[i]);
	bench_too = false;
}

/* An engine asks once, for its largest step. */
KVT_TEST(hopper_workspace_for_many_is_enough_for_few)
{
	static const u32 dtypes[] = {KVK_INT4, KVK_E4M3};
	struct kvk_moe_args a = {.experts = {.group = 32,
					     .scale_dtype = KVK_BF16,
					     .nr_experts = 24,
					     .hidden = 384,
					     .inter = 256},
				 .top_k = 4,
				 .act_dtype = KVK_BF16};

	for (size_t d = 0; d < KV_ARRAY_SIZE(dtypes); d++) {
		size_t before = 0;

		a.experts.dtype = dtypes[d];
		a.experts.order = d ? KVK_ORDER_STANDARD : KVK_ORDER_PACKED;
		for (a.nr_tokens = 1; a.nr_tokens < 900; a.nr_tokens++) {
			size_t bytes = kvk_moe_workspace_cuda(&a);

			KVT_EXPECT(bytes >= before);
			before = bytes;
		}
	}
}

/* Columns that are no whole blocks: without wgmma. */
KVT_TEST(hopper_fp8_rows)
{
	static const u32 counts[] = {1, 9};

	moe_tokens(
		(struct moe_case){KVK_E4M3, 264, 144, 0, KVK_BF16, 7, 3, 0, false, false},
		counts, 2);
}

KVT_MAIN()
