/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe.c - the experts in INT4 and E4M3 and linear for few tokens, as Hopper would run them, on the CPU
 * (machine.cc), against the host references. Outputs and workspaces are NaN before a call,
 * and threads and copies take another order in every run.
 */
#include "tests/kvt.h"
#include "kernels/linear_few.h"
#include "kernels/linear_fp8.h"
#include "kernels/linear_mid.h"
#include "kernels/linear_tiled.h"
#include "kernels/moe_cuda.h"
#include "kernels/moe_pack.h"
#include "machine.h"
#include "tests/kernels/common.h"

static struct kvt_rng rng;

/* @bytes, at an address that the copy engine takes; all 0xff (NaN in every dtype) */
static void *nan_new(size_t bytes)
{
	void *p = aligned_alloc(256, (bytes + 511) / 256 * 256);

	KVT_EXPECT(p != NULL);
	memset(p, 0xff, (bytes + 511) / 256 * 256);
	return p;
}

static u16 *bf16_new(size_t n)
{
	u16 *x = nan_new(2 * n);

	for (size_t i = 0; i < n; i++)
		x[i] = kvt_to_bf16(kvt_rng_normal(&rng));
	return x;
}

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

struct moe_case {
	u32 dtype, hidden, inter, group, scale_dtype, nr_experts, top_k, nr_tokens;
	bool accumulate, bad_id;
};

/* Look at the bench's reference as well. */
static bool bench_too;

/* bench_ref.cc */
void hopper_bench_ref(const struct kvk_moe_args *a, double *y);

/* One expert's matrix to the kernels' order (moe_pack.h). */
static void pack(const struct kvk_pack *p, const u32 *w, const u16 *s, u8 *packed)
{
	u32 words = p->kbricks * 16, groups = KVK_BRICK_COLS / p->group;

	for (u32 i = 0; i < p->mtiles * p->kbricks * 32; i++) {
		u32 m = i / 32 / p->kbricks, k = i / 32 % p->kbricks, r = i % 32;
		u8 *brick = packed + kvk_pack_brick(p, m, k);
		size_t row = kvk_pack_row(p, m, r);

		for (u32 c8 = 0; c8 < 16; c8++)
			((u32 *)brick)[kvk_brick_word(r, c8)] =
				kvk_pack_word(w[row * words + k * 16 + c8]);
		for (u32 j = 0; j < groups; j++)
			((u16 *)(brick + KVK_BRICK_NIBBLES))[kvk_brick_scale(p, r, j)] =
				s[(row * p->kbricks + k) * groups + j];
	}
}

static void *pack_all(const struct kvk_pack *p, const struct kvt_matrix *m, u32 nr)
{
	size_t bytes = kvk_pack_bytes(p);
	size_t nr_weights =
		(size_t)p->mtiles * p->kbricks * KVK_BRICK_ROWS * KVK_BRICK_COLS;
	u8 *packed = nan_new(bytes * nr);

	for (u32 i = 0; i < nr; i++)
		pack(p, (const u32 *)m->data + i * nr_weights / 8,
		     (const u16 *)m->scales + i * nr_weights / p->group,
		     packed + i * bytes);
	return packed;
}

/* Expert 0 is crowded, the last one sees nobody. */
static void routing(const struct moe_case *c, u32 *ids, float *weights)
{
	for (u32 i = 0; i < c->nr_tokens * c->top_k; i++) {
		u32 k = i % c->top_k;

		ids[i] = k ? 1 + (i / c->top_k * 5 + k * 3) % (c->nr_experts - 2) : 0;
		weights[i] = 0.1f + kvt_randf();
	}
	if (c->bad_id)
		ids[c->nr_tokens * c->top_k / 2] = c->nr_experts + 3;
}

/* The experts as the kernels take them. */
static void experts_move(struct kvk_experts *e, const struct kvt_matrix *w13,
			 const struct kvt_matrix *w2)
{
	size_t n = (size_t)e->nr_experts * e->hidden * e->inter;

	if (e->dtype == KVK_INT4) {
		const struct kvk_pack p13 =
			kvk_pack_make(2 * e->inter, e->hidden, e->group, 1);
		const struct kvk_pack p2 =
			kvk_pack_make(e->hidden, e->inter, e->group, 0);

		e->order = KVK_ORDER_PACKED;
		e->w13 = pack_all(&p13, w13, e->nr_experts);
		e->w2 = pack_all(&p2, w2, e->nr_experts);
		e->s13 = e->s2 = NULL;
	} else {
		e->w13 = memcpy(nan_new(2 * n), w13->data, 2 * n);
		e->w2 = memcpy(nan_new(n), w2->data, n);
	}
}

static int moe_call(const struct kvk_ops *host, const struct kvk_moe_args *a)
{
	if (a->experts.dtype == KVK_INT4)
		return host ? host->moe_int4(a, NULL) : kvk_moe_int4_cuda(a, NULL);
	return host ? host->moe_fp8(a, NULL) : kvk_moe_fp8_cuda(a, NULL);
}

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

static void moe_once(const struct moe_case *c)
{
	struct kvt_matrix w13 =
		kvt_matrix_make(&rng, c->dtype, c->nr_experts * 2, c->inter, c->hidden,
				c->group, c->scale_dtype);
	struct kvt_matrix w2 = kvt_matrix_make(&rng, c->dtype, c->nr_experts, c->hidden,
					       c->inter, c->group, c->scale_dtype);
	size_t n = (size_t)c->nr_tokens * c->hidden, slots = c->nr_tokens * c->top_k;
	u16 *want = bf16_new(n), *got = nan_new(2 * n);
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
	if (c->accumulate)
		memcpy(got, want, 2 * n);
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

/* -------------------------------------------------------------------------------- linear */

static void linear_once(u32 nr_tokens, u32 rows, u32 cols, u32 nr_batch)
{
	struct kvt_matrix m =
		kvt_matrix_make(&rng, KVK_BF16, nr_batch, rows, cols, 32, KVK_BF16);
	size_t nw = (size_t)nr_batch * rows * cols,
	       ny = (size_t)nr_tokens * nr_batch * rows;
	float *want = nan_new(4 * ny), *few = nan_new(4 * ny), *tiled = nan_new(4 * ny);
	struct kvk_linear_args a = {.w = m.w,
				    .x = bf16_new((size_t)nr_tokens * nr_batch * cols),
				    .y = want,
				    .nr_tokens = nr_tokens,
				    .x_dtype = KVK_BF16,
				    .y_dtype = KVK_F32,
				    .nr_batch = nr_batch};
	void *w = nan_new(2 * nw);

	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
	a.w.data = memcpy(w, m.data, 2 * nw);
	a.y = few;
	KVT_EXPECT(kvk_linear_few_ok(&a));
	KVT_EXPECT_EQ(kvk_linear_few_cuda(&a, NULL), 0);
	a.y = tiled;
	KVT_EXPECT_EQ(kvk_linear_tiled_cuda(&a, NULL), 0);
	KVT_EXPECT(memcmp(few, tiled, 4 * ny) == 0);
	for (size_t i = 0; i < ny; i++)
		KVT_EXPECT(fabsf(few[i] - want[i]) < 1e-4f * sqrtf((float)cols));
	kvt_matrix_fini(&m);
}

/* The number of row tiles a block has decides how many a warp takes at once. */
KVT_TEST(hopper_linear_few_has_the_bits_of_tiles)
{
	rng.state = kvt_rand64();
	linear_once(1, 40, 1312, 1);
	linear_once(9, 90, 1100 / 8 * 8, 1);
	linear_once(5, 200, 2064, 1);
	linear_once(16, 72, 256, 3);
	linear_once(3, 33, 128, 2);
}

static void mid_once(u32 nr_tokens, u32 rows, u32 cols, u32 nr_batch)
{
	const u32 xb = cols + 8, yb = rows + 3, xs = nr_batch * xb + 16,
		  ys = nr_batch * yb + 1;
	struct kvt_matrix m =
		kvt_matrix_make(&rng, KVK_BF16, nr_batch, rows, cols, 32, KVK_BF16);
	size_t nw = (size_t)nr_batch * rows * cols, ny = (size_t)nr_tokens * ys;
	float *mid = nan_new(4 * ny), *tiled = nan_new(4 * ny);
	struct kvk_linear_args a = {.w = m.w,
				    .x = bf16_new((size_t)nr_tokens * xs),
				    .y = mid,
				    .nr_tokens = nr_tokens,
				    .x_stride = xs,
				    .y_stride = ys,
				    .x_dtype = KVK_BF16,
				    .y_dtype = KVK_F32,
				    .nr_batch = nr_batch,
				    .x_batch = xb,
				    .y_batch = yb};

	a.w.data = memcpy(nan_new(2 * nw), m.data, 2 * nw);
	KVT_EXPECT(kvk_linear_mid_ok(&a));
	KVT_EXPECT_EQ(kvk_linear_mid_cuda(&a, NULL), 0);
	a.y = tiled;
	KVT_EXPECT_EQ(kvk_linear_tiled_cuda(&a, NULL), 0);
	KVT_EXPECT(memcmp(mid, tiled, 4 * ny) == 0);
	kvt_matrix_fini(&m);
}

/* A cluster of eight, of four, of two, of four with two chains each; a block alone; 8, 16, 32 and
 * 64 tokens. */
KVT_TEST(hopper_linear_mid_has_the_bits_of_tiles)
{
	rng.state = kvt_rand64();
	mid_once(50, 100, 1160, 1);
	mid_once(20, 70, 1032, 2);
	mid_once(64, 65, 264, 1);
	mid_once(33, 40, 136, 1);
	mid_once(40, 72, 120, 3);
	mid_once(64, 64 * 11, 1160, 1);
	mid_once(130, 100, 1160, 1);
	mid_once(70, 64 * 65, 136, 1);
	mid_once(37, 64 * 67 - 5, 200, 1);
	mid_once(5, 70, 1160, 1);
	mid_once(11, 100, 264, 2);
	mid_once(8, 64 * 65, 136, 1);
	mid_once(30, 64 * 29 - 5, 1672, 1);
	mid_once(64, 12, 776, 30);
}

/* @strided: rows of y that are not aligned, and x and y in wider places */
static void fp8_once(u32 nr_tokens, u32 rows, u32 cols, u32 nr_batch, bool strided)
{
	const u32 xb = cols + strided * 8, yb = rows + strided * 3,
		  xs = nr_batch * xb + strided * 16, ys = nr_batch * yb + strided;
	struct kvt_matrix m =
		kvt_matrix_make(&rng, KVK_E4M3, nr_batch, rows, cols, 0, KVK_BF16);
	size_t nw = (size_t)nr_batch * rows * cols, ny = (size_t)nr_tokens * ys;
	u16 *x = bf16_new((size_t)nr_tokens * xs), *was = bf16_new(ny);
	u16 *fp8 = memcpy(nan_new(2 * ny), was, 2 * ny),
	    *tiled = memcpy(nan_new(2 * ny), was, 2 * ny);
	struct kvk_linear_args a = {.w = m.w,
				    .x = x,
				    .y = fp8,
				    .nr_tokens = nr_tokens,
				    .x_stride = xs,
				    .y_stride = ys,
				    .x_dtype = KVK_BF16,
				    .y_dtype = KVK_BF16,
				    .nr_batch = nr_batch,
				    .x_batch = xb,
				    .y_batch = yb,
				    .accumulate = strided};

	memset(x, 0, 2 * KV_MIN(cols, 128u)); /* a block without a value has scale 1 */
	x[(nr_tokens - 1) * xs] = 0x0080;     /* and one whose quotients are divided */
	memset(&x[(nr_tokens - 1) * xs + 1], 0, 2 * (KV_MIN(cols, 128u) - 1));
	a.w.data = memcpy(nan_new(nw), m.data, nw);
	KVT_EXPECT(kvk_linear_fp8_ok(&a));
	KVT_EXPECT_EQ(kvk_linear_fp8_cuda(&a, NULL), 0);
	a.y = tiled;
	KVT_EXPECT_EQ(kvk_linear_tiled_cuda(&a, NULL), 0);
	KVT_EXPECT(memcmp(fp8, tiled, 2 * ny) == 0);
	kvt_matrix_fini(&m);
}

/* Clusters of eight, four and two, of four with two chains each, blocks alone; 8 to 64 tokens at
 * once, several steps of x; the last rows and columns of a matrix that are no whole block. */
KVT_TEST(hopper_linear_fp8_has_the_bits_of_tiles)
{
	rng.state = kvt_rand64();
	fp8_once(64, 64, 128, 1, false);
	fp8_once(50, 100, 1168, 1, true);
	fp8_once(5, 170, 2192, 1, true);
	fp8_once(33, 65, 528, 1, false);
	fp8_once(11, 100, 272, 2, true);
	fp8_once(20, 130, 1040, 1, true);
	fp8_once(40, 12, 1552, 15, true);
	fp8_once(7, 9, 1072, 29, false);
	fp8_once(16, 9, 1168, 66, true);
	fp8_once(70, 30, 272, 33, false);
	fp8_once(8, 20, 7184, 1, false);
}

KVT_MAIN()
