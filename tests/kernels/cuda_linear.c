/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_linear.c - linear for many tokens on the GPU: the same bits as for few tokens, and
 * the host's values.
 */
#ifdef CONFIG_CUDA
#include "cuda_common.h"
#include "kernels/linear_fp8.h"
#include "kernels/linear_mid.h"
#include "kernels/linear_tiled.h"
#include "kernels/moe_cuda.h"

struct shape {
	u32 rows, cols, nr_tokens, nr_batch;
	bool bias, add, strided;
};

/* A kernel gives the bits that the tiles gave, and again. */
static void same_bits(int (*call)(const struct kvk_linear_args *a, kvk_stream stream),
		      struct kvk_linear_args *a, const void *before, const void *tiled,
		      size_t bytes, const char *name)
{
	for (u32 i = 0; i < 2; i++) {
		a->y = gpu_copy(before, bytes);
		KVT_EXPECT_EQ(call(a, NULL), 0);
		if (memcmp(tiled, gpu_fetch(a->y, bytes), bytes))
			KVT_FAIL(
				"%u x %u, %u tokens, run %u: linear_%s's bits are others",
				a->w.rows, a->w.cols, a->nr_tokens, i, name);
	}
}

static void linear_case(struct kvt_rng *g, u32 dtype, u32 y_dtype, const struct shape *s)
{
	struct kvt_matrix m =
		kvt_matrix_make(g, dtype, s->nr_batch, s->rows, s->cols, 32, 0);
	u32 xb = s->cols + s->strided * 8, yb = s->rows + s->strided;
	u32 xs = s->nr_batch * xb + s->strided * 24;
	u32 ys = s->nr_batch * yb + s->strided * 3;
	size_t nx = (size_t)s->nr_tokens * xs, ny = (size_t)s->nr_tokens * ys;
	size_t per = (size_t)s->rows * s->cols * s->nr_batch;
	size_t scales =
		4ull * s->nr_batch * ((s->rows + 127) / 128) * ((s->cols + 127) / 128);
	float *x = malloc(nx * 4), *y = malloc(ny * 4), *bias = malloc(s->rows * 4);
	float *add = malloc(ny * 4);
	struct kvk_linear_args a = {.w = m.w,
				    .nr_tokens = s->nr_tokens,
				    .x_stride = s->strided ? xs : 0,
				    .y_stride = s->strided ? ys : 0,
				    .x_dtype = KVK_BF16,
				    .y_dtype = y_dtype,
				    .nr_batch = s->nr_batch,
				    .x_batch = s->strided ? xb : 0,
				    .y_batch = s->strided ? yb : 0,
				    .add = s->add ? add : NULL},
			       d, few;
	size_t y_bytes = acts_bytes(y_dtype, ny);
	void *host_y, *tiled, *a_y_before;

	kvt_rng_fill(g, x, nx, 1.0f);
	kvt_rng_fill(g, y, ny, 1.0f);
	kvt_rng_fill(g, add, ny, 1.0f);
	kvt_rng_fill(g, bias, s->rows, 1.0f);
	/* a block with a scale beyond what quotients without a division take */
	for (u32 i = 0; i < KV_MIN(s->cols, 128u); i++)
		x[i] = i ? 0 : 1e-37f;
	x[nx / 2] = NAN; /* one token's results are NaN, or its padding */
	a.x = acts_make(KVK_BF16, x, nx);
	a.y = host_y = acts_make(y_dtype, y, ny);
	a.bias = s->bias ? bias : NULL;
	d = a;
	d.w.data = gpu_copy(m.data, dtype == KVK_E4M3 ? per : per * 2);
	d.w.scales = dtype == KVK_E4M3 ? gpu_copy(m.scales, scales) : NULL;
	d.x = gpu_copy(a.x, acts_bytes(KVK_BF16, nx));
	d.y = gpu_copy(a.y, y_bytes);
	d.bias = s->bias ? gpu_copy(bias, s->rows * 4) : NULL;
	d.add = s->add ? gpu_copy(add, ny * 4) : NULL;
	few = d;
	few.y = gpu_copy(a.y, y_bytes);
	a_y_before = malloc(y_bytes);
	memcpy(a_y_before, a.y, y_bytes);
	KVT_EXPECT(kvk_linear_tiled_ok(&d));
	KVT_EXPECT_EQ(kvk_linear_tiled_cuda(&d, NULL), 0);
	KVT_EXPECT_EQ(kvk_linear_cuda(&few, NULL), 0);
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
	tiled = gpu_fetch(d.y, y_bytes);
	if (memcmp(tiled, gpu_fetch(few.y, y_bytes), y_bytes))
		KVT_FAIL("dtype %u, %u x %u, %u tokens: not the bits of few tokens",
			 dtype, s->rows, s->cols, s->nr_tokens);
	if (kvk_linear_mid_ok(&d))
		same_bits(kvk_linear_mid_cuda, &few, a_y_before, tiled, y_bytes, "mid");
	if (kvk_linear_fp8_ok(&d))
		same_bits(kvk_linear_fp8_cuda, &few, a_y_before, tiled, y_bytes, "fp8");
	acts_equal(y_dtype, tiled, host_y, ny, y_dtype == KVK_F32 ? 1e-4 : 0.03,
		   "linear");
	kvt_matrix_fini(&m);
	free(a_y_before);
	free(add);
}

static const struct shape shapes[] = {
	{128, 128, 64, 1, false, false, false},	 {1, 16, 1, 1, false, false, false},
	{130, 272, 65, 1, true, true, true},	 {257, 1424, 33, 1, false, true, false},
	{48, 64, 70, 3, false, false, true},	 {129, 2064, 5, 2, false, true, true},
	{200, 1160, 48, 1, true, false, false},	 {72, 520, 40, 3, false, true, true},
	{96, 384, 17, 2, false, false, false},	 {1000, 2304, 64, 1, false, false, false},
	{6200, 1032, 50, 1, true, false, true},	 {600, 904, 23, 11, false, true, true},
	{513, 128, 61, 12, false, false, true},	 {260, 120, 64, 2, false, true, false},
	{6272, 256, 64, 1, false, true, false},	 {6208, 1032, 8, 1, true, true, false},
	{512, 128, 13, 13, false, true, false},	 {6150, 784, 31, 1, true, true, true},
	{576, 7168, 16, 1, false, false, false}, {192, 7168, 7, 1, false, true, false},
	{576, 7168, 33, 1, true, true, false},	 {384, 7168, 128, 1, false, false, false},
	{512, 7168, 193, 1, true, true, false},	 {4224, 520, 130, 1, false, true, true},
	{2060, 1296, 40, 1, true, true, true},	 {1933, 2064, 6, 1, false, true, false},
	{100, 1168, 20, 31, false, false, true}, {300, 1040, 200, 1, true, true, false},
	{12900, 272, 9, 1, true, false, false},	 {8500, 2064, 7, 1, false, true, false},
	{8500, 1040, 64, 1, true, false, true},	 {3700, 2064, 8, 1, false, true, false},
	{3700, 1296, 27, 1, false, true, true},
};

/*
 * What racecheck, some hundred times slower, can do: every kernel and every number of tokens it is
 * built for; CTAs alone, clusters of four and of eight, two chains of a CTA.
 */
static const struct shape brief[] = {
	{130, 272, 65, 1, true, true, true},   {200, 1040, 5, 1, false, true, false},
	{100, 544, 20, 2, false, true, false}, {68, 144, 130, 1, true, false, false},
	{72, 528, 12, 1, false, false, true},
};

/* 29 tiles of 64 or 128 rows, more than clusters of eight find room for; 66, a CTA each */
static void linear_brief(struct kvt_rng *g, u32 dtype)
{
	const u32 tile = dtype == KVK_E4M3 ? 128 : 64;
	const struct shape many[] = {{tile * 29 - 3, 528, 7, 1, false, true, false},
				     {tile * 66, 144, 9, 1, true, false, false}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(brief); i++)
		linear_case(g, dtype, i % 2 ? KVK_BF16 : KVK_F32, &brief[i]);
	for (u32 i = 0; i < KV_ARRAY_SIZE(many); i++)
		linear_case(g, dtype, KVK_BF16, &many[i]);
}

static void linear_all(u32 dtype)
{
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	if (gpu_sanitizer("racecheck")) {
		linear_brief(&g, dtype);
		return;
	}
	for (u32 i = 0; i < KV_ARRAY_SIZE(shapes); i++) {
		if (dtype == KVK_E4M3 && shapes[i].cols % 16)
			continue; /* rows of bytes would not start at 16 */
		for (u32 y_dtype = KVK_F32; y_dtype <= KVK_BF16; y_dtype++)
			linear_case(&g, dtype, y_dtype, &shapes[i]);
	}
}

KVT_TEST(cuda_linear_tiled_bf16_has_the_bits_of_few_tokens)
{
	linear_all(KVK_BF16);
}

KVT_TEST(cuda_linear_tiled_e4m3_has_the_bits_of_few_tokens)
{
	linear_all(KVK_E4M3);
}

KVT_TEST(cuda_linear_tiled_refuses_what_is_not_built)
{
	static u16 x[64] __attribute__((aligned(16)));
	const struct kvk_linear_args good = {
		.w = {.dtype = KVK_BF16, .rows = 4, .cols = 16, .data = x},
		.x = x,
		.y = x,
		.nr_tokens = 2,
		.x_dtype = KVK_BF16,
		.y_dtype = KVK_F32,
		.nr_batch = 1};
	struct kvk_linear_args bad[6];

	for (u32 i = 0; i < 6; i++)
		bad[i] = good;
	bad[0].w.dtype = KVK_INT4;
	bad[1].x_dtype = KVK_F32;
	bad[2].w.cols = 12;
	bad[3].x = x + 1;
	bad[4].x_stride = 20;
	bad[5].w.dtype = KVK_E4M3; /* no scales */
	KVT_EXPECT(kvk_linear_tiled_ok(&good));
	for (u32 i = 0; i < 6; i++)
		KVT_EXPECT_EQ(kvk_linear_tiled_cuda(&bad[i], NULL), -EINVAL);
}
#else
#include "tests/kvt.h"

KVT_TEST(cuda_linear)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif

KVT_MAIN()
