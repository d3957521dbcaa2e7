/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_ref.c - the host's linear in every weight dtype against float64, and its batch
 * invariance.
 */
#include <omp.h>
#include "tests/kvt.h"
#include "common.h"

static struct kvt_rng rng;

/* Largest error, relative to the sum of the magnitudes of the products. */
static double linear_error(const struct kvt_matrix *m, u32 b, const float *x,
			   const float *y)
{
	u32 cols = m->w.cols;
	double *xt = malloc(cols * sizeof(double)), worst = 0;

	kvt_acts(m->w.dtype, x, xt, cols);
	for (u32 r = 0; r < m->w.rows; r++) {
		const double *w = m->truth + ((size_t)b * m->w.rows + r) * cols;
		double sum = 0, mag = 1e-30, d;

		for (u32 c = 0; c < cols; c++) {
			sum += w[c] * xt[c];
			mag += fabs(w[c] * xt[c]);
		}
		d = fabs(sum - y[r]) / mag;
		if (isnan(d))
			KVT_FAIL("NaN in row %u", r);
		worst = d > worst ? d : worst;
	}
	free(xt);
	return worst;
}

static const struct {
	u32 dtype, rows, cols, group, scale_dtype;
} shapes[] = {
	{KVK_F32, 256, 256, 0, 0},
	{KVK_F32, 17, 1000, 0, 0},
	{KVK_F32, 5, 3, 0, 0},
	{KVK_BF16, 100, 513, 0, 0},
	{KVK_BF16, 64, 1536, 0, 0},
	{KVK_E4M3, 130, 384, 0, 0},
	{KVK_E4M3, 33, 1100, 0, 0},
	{KVK_INT4, 48, 256, 32, KVK_BF16},
	{KVK_INT4, 19, 1152, 128, KVK_F16},
	{KVK_INT4, 16, 1088, 64, KVK_BF16},
};

KVT_TEST(linear_against_float64)
{
	rng.state = kvt_rand64();
	for (size_t s = 0; s < KV_ARRAY_SIZE(shapes); s++) {
		u32 rows = shapes[s].rows, cols = shapes[s].cols,
		    nr = 1 + kvt_rand_below(40);
		struct kvt_matrix m =
			kvt_matrix_make(&rng, shapes[s].dtype, 1, rows, cols,
					shapes[s].group, shapes[s].scale_dtype);
		float *x = malloc(sizeof(float) * nr * cols),
		      *y = malloc(sizeof(float) * nr * rows);
		struct kvk_linear_args a = {.w = m.w,
					    .x = x,
					    .y = y,
					    .nr_tokens = nr,
					    .x_dtype = KVK_F32,
					    .y_dtype = KVK_F32,
					    .nr_batch = 1};
		double worst = 0;

		kvt_rng_fill(&rng, x, (size_t)nr * cols, 2.0f);
		memset(y, 0xff, sizeof(float) * nr * rows);
		KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
		for (u32 t = 0; t < nr; t++) {
			double e = linear_error(&m, 0, x + (size_t)t * cols,
						y + (size_t)t * rows);

			worst = e > worst ? e : worst;
		}
		KVT_NOTE("dtype %u %ux%u, %u tokens: error %.2e", shapes[s].dtype, rows,
			 cols, nr, worst);
		/* 16 lanes: about cols / 16 roundings of 6e-8 at worst */
		KVT_EXPECT_LE(worst, 2e-6);
		kvt_matrix_fini(&m);
		free(x);
		free(y);
	}
}

KVT_TEST(linear_is_batch_invariant)
{
	rng.state = kvt_rand64();
	for (size_t s = 0; s < KV_ARRAY_SIZE(shapes); s++) {
		u32 rows = shapes[s].rows, cols = shapes[s].cols;
		struct kvt_matrix m =
			kvt_matrix_make(&rng, shapes[s].dtype, 1, rows, cols,
					shapes[s].group, shapes[s].scale_dtype);
		float *x = malloc(sizeof(float) * 50 * cols),
		      *all = malloc(sizeof(float) * 50 * rows);
		float *one = malloc(sizeof(float) * 50 * rows);
		struct kvk_linear_args a = {.w = m.w,
					    .x = x,
					    .y = all,
					    .nr_tokens = 50,
					    .x_dtype = KVK_F32,
					    .y_dtype = KVK_F32,
					    .nr_batch = 1};

		kvt_rng_fill(&rng, x, (size_t)50 * cols, 1.0f);
		KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
		a.y = one;
		for (u32 t = 0; t < 50; t += a.nr_tokens) {
			omp_set_num_threads(1 + kvt_rand_below(3));
			a.nr_tokens = 1 + kvt_rand_below(7);
			a.nr_tokens = KV_MIN(a.nr_tokens, 50 - t);
			a.x = x + (size_t)t * cols;
			a.y = one + (size_t)t * rows;
			KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
		}
		KVT_EXPECT(!memcmp(all, one, sizeof(float) * 50 * rows));
		kvt_matrix_fini(&m);
		free(x);
		free(all);
		free(one);
	}
}

/* Strides, bias, what is added (y itself too), and BF16 activations, which are rounded once. */
KVT_TEST(linear_options)
{
	struct kvt_matrix m;
	float x[6 * 50], y[6 * 40], bias[21], old[6 * 40];
	u16 xb[6 * 50], yb[6 * 40];
	struct kvk_linear_args a = {.x = x,
				    .y = y,
				    .bias = bias,
				    .nr_tokens = 6,
				    .x_stride = 50,
				    .y_stride = 40,
				    .x_dtype = KVK_F32,
				    .y_dtype = KVK_F32,
				    .nr_batch = 1,
				    .add = y};

	rng.state = kvt_rand64();
	m = kvt_matrix_make(&rng, KVK_BF16, 1, 21, 45, 0, 0);
	a.w = m.w;
	kvt_rng_fill(&rng, x, 300, 1.0f);
	kvt_rng_fill(&rng, y, 240, 1.0f);
	kvt_rng_fill(&rng, bias, 21, 1.0f);
	memcpy(old, y, sizeof(y));
	for (u32 i = 0; i < 300; i++) {
		xb[i] = kvt_to_bf16(x[i]);
		x[i] = (float)kvt_bf16(xb[i]);
	}
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
	for (u32 t = 0; t < 6; t++)
		for (u32 r = 0; r < 40; r++) {
			double sum = old[t * 40 + r];

			for (u32 c = 0; c < 45 && r < 21; c++)
				sum += m.truth[r * 45 + c] * x[t * 50 + c];
			sum += r < 21 ? bias[r] : 0;
			KVT_EXPECT_LE(fabs(sum - y[t * 40 + r]), 2e-6);
		}
	a.x = xb;
	a.y = yb;
	a.add = old;
	a.x_dtype = KVK_BF16;
	a.y_dtype = KVK_BF16;
	for (u32 i = 0; i < 240; i++)
		yb[i] = (u16)i;
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
	for (u32 i = 0; i < 240; i++)
		KVT_EXPECT_EQ(yb[i], i % 40 < 21 ? kvt_to_bf16(y[i]) : i);
	kvt_matrix_fini(&m);
}

KVT_TEST(linear_batch_of_matrices)
{
	u32 dtypes[] = {KVK_F32, KVK_BF16, KVK_E4M3, KVK_INT4};

	rng.state = kvt_rand64();
	for (u32 d = 0; d < 4; d++) {
		struct kvt_matrix m =
			kvt_matrix_make(&rng, dtypes[d], 5, 150, 192, 64, KVK_F16);
		float *x = malloc(sizeof(float) * 3 * 5 * 192);
		float *y = malloc(sizeof(float) * 3 * 5 * 150);
		struct kvk_linear_args a = {.w = m.w,
					    .x = x,
					    .y = y,
					    .nr_tokens = 3,
					    .x_dtype = KVK_F32,
					    .y_dtype = KVK_F32,
					    .nr_batch = 5};

		kvt_rng_fill(&rng, x, 3 * 5 * 192, 1.0f);
		KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
		for (u32 i = 0; i < 15; i++)
			KVT_EXPECT_LE(linear_error(&m, i % 5, x + i * 192, y + i * 150),
				      1e-6);
		kvt_matrix_fini(&m);
		free(x);
		free(y);
	}
}

/* Vectors of a batch that lie apart: the same bits, and what lies between stays. */
KVT_TEST(linear_batch_with_strides)
{
	enum { T = 3, B = 5, R = 30, C = 64, XB = 70, YB = 33, XS = 360, YS = 170 };
	float x[T * XS], dense[T * B * C], y[T * YS], want[T * B * R];
	struct kvk_linear_args a = {.x = dense,
				    .y = want,
				    .nr_tokens = T,
				    .x_dtype = KVK_F32,
				    .y_dtype = KVK_F32,
				    .nr_batch = B};
	struct kvt_matrix m;

	rng.state = kvt_rand64();
	m = kvt_matrix_make(&rng, KVK_BF16, B, R, C, 0, 0);
	a.w = m.w;
	kvt_rng_fill(&rng, x, T * XS, 1.0f);
	for (u32 i = 0; i < T * B * C; i++)
		dense[i] = x[i / (B * C) * XS + i / C % B * XB + i % C];
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
	for (u32 i = 0; i < T * YS; i++)
		y[i] = 77.0f;
	a.x = x;
	a.y = y;
	a.x_stride = XS;
	a.y_stride = YS;
	a.x_batch = XB;
	a.y_batch = YB;
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
	for (u32 i = 0; i < T * YS; i++) {
		u32 at = i % YS, r = at % YB;

		if (at / YB < B && r < R)
			KVT_EXPECT(y[i] == want[(i / YS * B + at / YB) * R + r]);
		else
			KVT_EXPECT(y[i] == 77.0f);
	}
	a.y_batch = R - 1; /* vectors would overlap */
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), -EINVAL);
	a.y_batch = YB;
	a.x_stride = 4 * XB + C - 1; /* tokens would */
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), -EINVAL);
	kvt_matrix_fini(&m);
}

KVT_TEST(linear_refuses_what_it_cannot_do)
{
	float x[64] = {0}, y[64];
	u32 w[64] = {0}, s[64] = {0};
	struct kvk_linear_args good = {.w = {.dtype = KVK_INT4,
					     .rows = 2,
					     .cols = 64,
					     .group = 32,
					     .scale_dtype = KVK_BF16,
					     .data = w,
					     .scales = s},
				       .x = x,
				       .y = y,
				       .nr_tokens = 1,
				       .x_dtype = KVK_F32,
				       .y_dtype = KVK_F32,
				       .nr_batch = 1};
	struct kvk_linear_args a = good;

	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
	a.w.cols = 60; /* odd tail of a group */
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), -EINVAL);
	a = good;
	a.w.group = 16;
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), -EINVAL);
	a = good;
	a.w.scales = NULL;
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), -EINVAL);
	a = good;
	a.w.scale_dtype = KVK_F32;
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), -EINVAL);
	a = good;
	a.x_dtype = KVK_F16;
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), -EINVAL);
	a = good;
	a.y_stride = 1;
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), -EINVAL);
	a = good;
	a.w.dtype = 99;
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), -EINVAL);
}

KVT_MAIN()
