/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear.c - linear for few tokens, and what follows the routed experts in a layer, as Hopper would run
 * them, on the CPU (machine.cc). Outputs and workspaces are NaN before a call, and threads and copies
 * take another order in every run.
 */
#include "rig.h"
#include "kernels/linear_few.h"
#include "kernels/linear_fp8.h"
#include "kernels/linear_mid.h"
#include "kernels/linear_tiled.h"

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

/* What is added, at a 16-byte boundary or not, to y in f32 (which it may be itself) or bf16: each
 * kernel has the tiles' bits, and y in bf16 is what y in f32 is rounded to. */
static void add_once(u32 nr_tokens, u32 rows, u32 cols, u32 off)
{
	struct kvt_matrix m = kvt_matrix_make(&rng, KVK_BF16, 1, rows, cols, 0, KVK_BF16);
	int (*const calls[])(const struct kvk_linear_args *, kvk_stream) = {
		kvk_linear_tiled_cuda, kvk_linear_mid_cuda, kvk_linear_few_cuda};
	const size_t n = (size_t)nr_tokens * rows;
	float *add = f32_new(n + off), *f32 = nan_new(4 * n), *first = nan_new(4 * n);
	u16 *y = nan_new(2 * n);
	struct kvk_linear_args a = {.w = m.w,
				    .x = bf16_new((size_t)nr_tokens * cols),
				    .nr_tokens = nr_tokens,
				    .x_dtype = KVK_BF16,
				    .nr_batch = 1};

	a.w.data = memcpy(nan_new(2ul * rows * cols), m.data, 2ul * rows * cols);
	for (size_t i = 0; i < KV_ARRAY_SIZE(calls) - (nr_tokens > 16); i++) {
		a.add = add + off;
		a.y = y;
		a.y_dtype = KVK_BF16;
		memset(y, 0xff, 2 * n);
		KVT_EXPECT_EQ(calls[i](&a, NULL), 0);
		a.y = memcpy(f32, add + off, 4 * n);
		a.y_dtype = KVK_F32;
		if (!off)
			a.add = f32;
		KVT_EXPECT_EQ(calls[i](&a, NULL), 0);
		if (!i)
			memcpy(first, f32, 4 * n);
		KVT_EXPECT(!memcmp(first, f32, 4 * n));
		for (size_t j = 0; j < n; j++)
			KVT_EXPECT_EQ(y[j], kvt_to_bf16(f32[j]));
	}
	for (size_t j = 0; j < n; j++) {
		double want = add[off + j];

		for (u32 c = 0; c < cols; c++)
			want += m.truth[j % rows * cols + c] *
				kvt_bf16(((const u16 *)a.x)[j / rows * cols + c]);
		KVT_EXPECT(fabs(f32[j] - want) < 1e-4);
	}
	kvt_matrix_fini(&m);
}

KVT_TEST(hopper_linear_adds_before_it_rounds)
{
	rng.state = kvt_rand64();
	for (u32 off = 0; off < 2; off++) {
		add_once(3, 72, 264, off);
		add_once(16, 64 * 65, 72, off);
		add_once(40, 68, 1160, off);
		add_once(9, 33, 136, off);
	}
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
				    .add = strided ? f32_new(ny) : NULL};

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

/* -------------------------------------------------------------- routed and shared experts */

/* float64 of the second product of a shared expert is added to @y, that of the routed ones. */
static double layer_err(const struct kvk_linear_args *l, const struct kvt_matrix *down,
			const u16 *got, const double *routed)
{
	const u32 rows = down->w.rows, cols = down->w.cols;
	double num = 0, den = 0;

	for (size_t i = 0; i < (size_t)l->nr_tokens * rows; i++) {
		const double *w = down->truth + i % rows * cols;
		const u16 *x = (const u16 *)l->x + i / rows * cols;
		double y = routed[i], d;

		for (u32 c = 0; c < cols; c++)
			y += w[c] * kvt_bf16(x[c]);
		d = kvt_bf16(got[i]) - y;
		num += d * d;
		den += y * y;
	}
	return sqrt(num / den);
}

/* Routed experts, whose sum stays in f32, and a second product of a shared one by each kernel
 * that may have it. */
static void layer_once(const struct moe_case *c)
{
	struct kvt_matrix w13 =
		kvt_matrix_make(&rng, c->dtype, c->nr_experts * 2, c->inter, c->hidden,
				c->group, c->scale_dtype);
	struct kvt_matrix w2 = kvt_matrix_make(&rng, c->dtype, c->nr_experts, c->hidden,
					       c->inter, c->group, c->scale_dtype);
	struct kvt_matrix down =
		kvt_matrix_make(&rng, KVK_BF16, 1, c->hidden, c->inter, 0, KVK_BF16);
	int (*const calls[])(const struct kvk_linear_args *, kvk_stream) = {
		kvk_linear_mid_cuda, kvk_linear_tiled_cuda, kvk_linear_few_cuda};
	size_t n = (size_t)c->nr_tokens * c->hidden, slots = c->nr_tokens * c->top_k;
	double *ref = nan_new(8 * n);
	float *routed = nan_new(4 * n);
	u16 *y = nan_new(2 * n);
	u32 *ids = nan_new(4 * slots);
	float *weights = nan_new(4 * slots);
	struct kvk_moe_args a = {.experts = {.dtype = c->dtype,
					     .group = c->group,
					     .scale_dtype = c->scale_dtype,
					     .nr_experts = c->nr_experts,
					     .hidden = c->hidden,
					     .inter = c->inter},
				 .x = bf16_new(n),
				 .y = routed,
				 .ids = ids,
				 .weights = weights,
				 .nr_tokens = c->nr_tokens,
				 .top_k = c->top_k,
				 .act_dtype = KVK_BF16,
				 .y_f32 = true};
	struct kvk_linear_args l = {.w = down.w,
				    .x = bf16_new((size_t)c->nr_tokens * c->inter),
				    .y = y,
				    .nr_tokens = c->nr_tokens,
				    .x_dtype = KVK_BF16,
				    .y_dtype = KVK_BF16,
				    .nr_batch = 1,
				    .add = routed};

	routing(c, ids, weights);
	experts_move(&a.experts, &w13, &w2);
	a.workspace_bytes = kvk_moe_workspace_cuda(&a);
	a.workspace = nan_new(a.workspace_bytes);
	KVT_EXPECT_EQ(moe_call(NULL, &a), 0);
	hopper_bench_ref(&a, ref);
	l.w.data = memcpy(nan_new(2ul * c->hidden * c->inter), down.data,
			  2ul * c->hidden * c->inter);
	for (size_t i = 0; i < KV_ARRAY_SIZE(calls) - (c->nr_tokens > 16); i++) {
		memset(y, 0xff, 2 * n);
		KVT_EXPECT_EQ(calls[i](&l, NULL), 0);
		KVT_NOTE("%u tokens: error %.2e", c->nr_tokens,
			 layer_err(&l, &down, y, ref));
		KVT_EXPECT(layer_err(&l, &down, y, ref) < 2e-3);
	}
	kvt_matrix_fini(&w13);
	kvt_matrix_fini(&w2);
	kvt_matrix_fini(&down);
}

/* One rounding to bf16 is 1.7e-3, two are 2.4e-3. INT4 alone: E4M3 rounds x and h to its format. The
 * kernels of a decode step of a rank, of few tokens and of many. */
KVT_TEST(hopper_layer_is_rounded_once)
{
	static const struct moe_case cases[] = {
		{KVK_INT4, 256, 128, 32, KVK_BF16, 24, 4, 5, false, false},
		{KVK_INT4, 256, 256, 64, KVK_BF16, 9, 3, 4, false, false},
		{KVK_INT4, 256, 128, 32, KVK_BF16, 5, 4, 40, false, false},
	};

	rng.state = kvt_rand64();
	hopper_seed(kvt_rand64());
	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++)
		layer_once(&cases[i]);
}

KVT_MAIN()
