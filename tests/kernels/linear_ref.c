/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_ref.c - the host's linear and experts in every weight dtype against float64, and
 * their batch invariance.
 */
#include <omp.h>
#include "tests/kvt.h"
#include "common.h"

/* A random matrix, packed, and what it means in float64. */
struct matrix {
	struct kvk_weight w;
	u8 *data;
	u8 *scales;
	double *truth; /* [nr][rows][cols] */
};

static struct kvt_rng rng;

static void matrix_int4(struct matrix *m, u32 nr)
{
	size_t n = (size_t)nr * m->w.rows * m->w.cols;
	u16 *scales;

	m->data = malloc(n / 2);
	m->scales = malloc(n / m->w.group * 2);
	scales = (u16 *)(void *)m->scales;
	for (size_t i = 0; i < n / 2; i++)
		m->data[i] = (u8)kvt_rng_next(&rng);
	for (size_t i = 0; i < n / m->w.group; i++)
		scales[i] = m->w.scale_dtype == KVK_F16
				    ? (u16)(0x2000 + kvt_rng_below(&rng, 0x400))
				    : (u16)(0x3c00 + kvt_rng_below(&rng, 0x80));
	for (size_t i = 0; i < n; i++) {
		int q = (m->data[i / 2] >> (i % 2 * 4) & 15) - 8;
		u16 s = scales[i / m->w.group];

		m->truth[i] =
			q * (m->w.scale_dtype == KVK_F16 ? kvt_f16(s) : kvt_bf16(s));
	}
}

static void matrix_e4m3(struct matrix *m, u32 nr)
{
	u32 rb = (m->w.rows + 127) / 128, cb = (m->w.cols + 127) / 128;
	size_t per = (size_t)m->w.rows * m->w.cols, n = nr * per;
	float *scales = malloc(sizeof(float) * nr * rb * cb);

	m->data = malloc(n);
	m->scales = (u8 *)scales;
	for (size_t i = 0; i < (size_t)nr * rb * cb; i++)
		scales[i] = 0.0001f * (1.0f + (float)kvt_rng_below(&rng, 1000) * 0.001f);
	for (size_t i = 0; i < n; i++) {
		size_t k = i / per, r = i % per / m->w.cols, c = i % m->w.cols;

		m->data[i] = (u8)kvt_rng_next(&rng);
		if ((m->data[i] & 0x7f) == 0x7f)
			m->data[i] = 0;
		m->truth[i] =
			kvt_e4m3(m->data[i]) * scales[(k * rb + r / 128) * cb + c / 128];
	}
}

static struct matrix matrix_make(u32 dtype, u32 nr, u32 rows, u32 cols, u32 group,
				 u32 scale_dtype)
{
	struct matrix m = {.w = {.dtype = dtype,
				 .rows = rows,
				 .cols = cols,
				 .group = group,
				 .scale_dtype = scale_dtype}};
	size_t n = (size_t)nr * rows * cols;

	m.truth = malloc(n * sizeof(double));
	if (dtype == KVK_INT4) {
		matrix_int4(&m, nr);
	} else if (dtype == KVK_E4M3) {
		matrix_e4m3(&m, nr);
	} else {
		float *f = malloc(n * sizeof(float));

		kvt_rng_fill(&rng, f, n, 0.05f);
		m.data = (u8 *)f;
		for (size_t i = 0; i < n; i++) {
			if (dtype == KVK_BF16) {
				u16 h = kvt_to_bf16(f[i]);

				m.truth[i] = kvt_bf16(h);
				((u16 *)(void *)f)[i] = h;
			} else {
				m.truth[i] = f[i];
			}
		}
	}
	m.w.data = m.data;
	m.w.scales = m.scales;
	return m;
}

static void matrix_free(struct matrix *m)
{
	free(m->data);
	free(m->scales);
	free(m->truth);
}

/* Nearest e4m3 by search: no code of kernels/. Ties to the even code. */
static double nearest_e4m3(double x)
{
	double best = 0, dist = INFINITY;

	if (isnan(x))
		return x;
	for (int c = 0; c < 0x7f; c++) {
		double d = fabs(kvt_e4m3((u8)c) - fabs(x));

		if (d < dist || (d == dist && c % 2 == 0)) {
			dist = d;
			best = kvt_e4m3((u8)c);
		}
	}
	return x < 0 ? -best : best;
}

/* What an FP8 kernel sees of its activations. */
static void act_fp8(const float *x, double *y, u32 n)
{
	for (u32 b = 0; b < n; b += 128) {
		u32 len = KV_MIN(n - b, 128u);
		float amax = 0, scale;

		for (u32 i = 0; i < len; i++)
			amax = fabsf(x[b + i]) > amax ? fabsf(x[b + i]) : amax;
		scale = amax > 0 ? amax / 448.0f : 1.0f;
		for (u32 i = 0; i < len; i++)
			y[b + i] = nearest_e4m3(x[b + i] / scale) * scale;
	}
}

static void acts(u32 dtype, const float *x, double *y, u32 n)
{
	if (dtype == KVK_E4M3)
		act_fp8(x, y, n);
	else
		for (u32 i = 0; i < n; i++)
			y[i] = x[i];
}

/* Largest error, relative to the sum of the magnitudes of the products. */
static double linear_error(const struct matrix *m, u32 b, const float *x, const float *y)
{
	u32 cols = m->w.cols;
	double *xt = malloc(cols * sizeof(double)), worst = 0;

	acts(m->w.dtype, x, xt, cols);
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
		struct matrix m = matrix_make(shapes[s].dtype, 1, rows, cols,
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
		matrix_free(&m);
		free(x);
		free(y);
	}
}

KVT_TEST(linear_is_batch_invariant)
{
	rng.state = kvt_rand64();
	for (size_t s = 0; s < KV_ARRAY_SIZE(shapes); s++) {
		u32 rows = shapes[s].rows, cols = shapes[s].cols;
		struct matrix m = matrix_make(shapes[s].dtype, 1, rows, cols,
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
		matrix_free(&m);
		free(x);
		free(all);
		free(one);
	}
}

/* Strides, bias, accumulate, BF16 activations, and a batch of matrices. */
KVT_TEST(linear_options)
{
	struct matrix m;
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
				    .accumulate = true};

	rng.state = kvt_rand64();
	m = matrix_make(KVK_BF16, 1, 21, 45, 0, 0);
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
	a.x_dtype = KVK_BF16;
	a.y_dtype = KVK_BF16;
	for (u32 i = 0; i < 240; i++)
		yb[i] = kvt_to_bf16(old[i]);
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
	for (u32 i = 0; i < 240; i++)
		KVT_EXPECT_LE(fabs(kvt_bf16(yb[i]) - y[i]), 0.02 * (1 + fabs(y[i])));
	matrix_free(&m);
}

KVT_TEST(linear_batch_of_matrices)
{
	u32 dtypes[] = {KVK_F32, KVK_BF16, KVK_E4M3, KVK_INT4};

	rng.state = kvt_rand64();
	for (u32 d = 0; d < 4; d++) {
		struct matrix m = matrix_make(dtypes[d], 5, 150, 192, 64, KVK_F16);
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
		matrix_free(&m);
		free(x);
		free(y);
	}
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

/* ------------------------------------------------------------------------- experts */

struct moe {
	struct matrix w13;
	struct matrix w2;
	struct kvk_moe_args a;
	float *x;
	float *y;
	u32 *ids;
	float *weights;
};

static int moe_call(const struct kvk_moe_args *a)
{
	const struct kvk_ops *ops = kvk_host_ops();

	switch (a->experts.dtype) {
	case KVK_INT4:
		return ops->moe_int4(a, NULL);
	case KVK_E4M3:
		return ops->moe_fp8(a, NULL);
	default:
		return ops->moe_bf16(a, NULL);
	}
}

static void moe_init(struct moe *m, u32 dtype, u32 nr_tokens, u32 hidden, u32 inter,
		     u32 group)
{
	u32 nr_experts = 7, top_k = 3;

	m->w13 = matrix_make(dtype, nr_experts * 2, inter, hidden, group, KVK_BF16);
	m->w2 = matrix_make(dtype, nr_experts, hidden, inter, group, KVK_BF16);
	m->x = malloc(sizeof(float) * nr_tokens * hidden);
	m->y = malloc(sizeof(float) * nr_tokens * hidden);
	m->ids = malloc(sizeof(u32) * nr_tokens * top_k);
	m->weights = malloc(sizeof(float) * nr_tokens * top_k);
	kvt_rng_fill(&rng, m->x, (size_t)nr_tokens * hidden, 1.0f);
	memset(m->y, 0xff, sizeof(float) * nr_tokens * hidden);
	for (u32 t = 0; t < nr_tokens; t++)
		for (u32 k = 0; k < top_k; k++) {
			/* expert 0 is crowded, some experts see nobody */
			m->ids[t * top_k + k] = k ? 1 + (t + k * 2) % 4 : 0;
			m->weights[t * top_k + k] = 0.1f + 0.3f * (float)k;
		}
	m->a = (struct kvk_moe_args){.experts = {.dtype = dtype,
						 .group = group,
						 .scale_dtype = KVK_BF16,
						 .nr_experts = nr_experts,
						 .hidden = hidden,
						 .inter = inter,
						 .w13 = m->w13.data,
						 .w2 = m->w2.data,
						 .s13 = m->w13.scales,
						 .s2 = m->w2.scales},
				     .x = m->x,
				     .y = m->y,
				     .ids = m->ids,
				     .weights = m->weights,
				     .nr_tokens = nr_tokens,
				     .top_k = top_k,
				     .act_dtype = KVK_F32};
	m->a.workspace_bytes = kvk_host_ops()->moe_workspace(&m->a);
	m->a.workspace = malloc(m->a.workspace_bytes);
	memset(m->a.workspace, 0xff, m->a.workspace_bytes);
}

static void moe_fini(struct moe *m)
{
	matrix_free(&m->w13);
	matrix_free(&m->w2);
	free(m->x);
	free(m->y);
	free(m->ids);
	free(m->weights);
	free(m->a.workspace);
}

/* One token in float64, except that e4m3 rounding of the inner activation is done on f32.
 */
static void moe_truth(const struct moe *m, u32 t, double *y)
{
	u32 hidden = m->a.experts.hidden, inter = m->a.experts.inter,
	    dtype = m->a.experts.dtype;
	double *x = malloc(sizeof(double) * hidden), *h = malloc(sizeof(double) * inter);
	float *hf = malloc(sizeof(float) * inter);

	acts(dtype, m->x + (size_t)t * hidden, x, hidden);
	memset(y, 0, sizeof(double) * hidden);
	for (u32 k = 0; k < m->a.top_k; k++) {
		u32 e = m->ids[t * m->a.top_k + k];

		for (u32 i = 0; i < inter; i++) {
			const double *wg =
				m->w13.truth + ((size_t)e * 2 * inter + i) * hidden;
			const double *wu = wg + (size_t)inter * hidden;
			double g = 0, u = 0;

			for (u32 c = 0; c < hidden; c++) {
				g += wg[c] * x[c];
				u += wu[c] * x[c];
			}
			h[i] = g / (1 + exp(-g)) * u;
			hf[i] = (float)h[i];
		}
		if (dtype == KVK_E4M3)
			act_fp8(hf, h, inter);
		for (u32 r = 0; r < hidden; r++) {
			const double *w = m->w2.truth + ((size_t)e * hidden + r) * inter;
			double sum = 0;

			for (u32 i = 0; i < inter; i++)
				sum += w[i] * h[i];
			y[r] += m->weights[t * m->a.top_k + k] * sum;
		}
	}
	free(x);
	free(h);
	free(hf);
}

static const struct {
	u32 dtype, hidden, inter, group;
} moe_shapes[] = {{KVK_F32, 48, 40, 0},
		  {KVK_BF16, 100, 64, 0},
		  {KVK_E4M3, 256, 144, 0},
		  {KVK_INT4, 256, 128, 32},
		  {KVK_INT4, 128, 256, 128}};

KVT_TEST(moe_against_float64)
{
	rng.state = kvt_rand64();
	for (size_t s = 0; s < KV_ARRAY_SIZE(moe_shapes); s++) {
		u32 hidden = moe_shapes[s].hidden;
		double *truth = malloc(sizeof(double) * hidden), worst = 0, size = 0;
		struct moe m;

		moe_init(&m, moe_shapes[s].dtype, 45, hidden, moe_shapes[s].inter,
			 moe_shapes[s].group);
		KVT_EXPECT_EQ(moe_call(&m.a), 0);
		for (u32 t = 0; t < 45; t++) {
			double d;

			moe_truth(&m, t, truth);
			d = kvt_max_diff(m.y + (size_t)t * hidden, truth, hidden);
			if (isnan(d))
				KVT_FAIL("NaN in token %u", t);
			worst = d > worst ? d : worst;
			for (u32 i = 0; i < hidden; i++)
				size = fabs(truth[i]) > size ? fabs(truth[i]) : size;
		}
		KVT_NOTE("dtype %u: error %.2e of %.2e", moe_shapes[s].dtype, worst,
			 size);
		/* e4m3: an inner value near a rounding boundary may go the other way
		 * (2^-4 of one value of many) */
		KVT_EXPECT_LE(worst,
			      size * (moe_shapes[s].dtype == KVK_E4M3 ? 2e-2 : 2e-6));
		moe_fini(&m);
		free(truth);
	}
}

KVT_TEST(moe_is_batch_invariant)
{
	rng.state = kvt_rand64();
	for (size_t s = 0; s < KV_ARRAY_SIZE(moe_shapes); s++) {
		u32 hidden = moe_shapes[s].hidden, nr;
		struct moe m;
		float *y;

		moe_init(&m, moe_shapes[s].dtype, 45, hidden, moe_shapes[s].inter,
			 moe_shapes[s].group);
		KVT_EXPECT_EQ(moe_call(&m.a), 0);
		y = malloc(sizeof(float) * 45 * hidden);
		for (u32 t = 0; t < 45; t += nr) {
			struct kvk_moe_args a = m.a;

			nr = 1 + kvt_rand_below(6);
			nr = KV_MIN(nr, 45 - t);
			omp_set_num_threads(1 + kvt_rand_below(3));
			a.nr_tokens = nr;
			a.x = m.x + (size_t)t * hidden;
			a.y = y + (size_t)t * hidden;
			a.ids += t * a.top_k;
			a.weights += t * a.top_k;
			KVT_EXPECT_EQ(moe_call(&a), 0);
		}
		KVT_EXPECT(!memcmp(y, m.y, sizeof(float) * 45 * hidden));
		free(y);
		moe_fini(&m);
	}
}

KVT_TEST(moe_accumulates_and_keeps_nan_with_its_token)
{
	struct moe m;
	float *once;

	rng.state = kvt_rand64();
	moe_init(&m, KVK_F32, 5, 48, 32, 0);
	KVT_EXPECT_EQ(moe_call(&m.a), 0);
	once = malloc(sizeof(float) * 5 * 48);
	memcpy(once, m.y, sizeof(float) * 5 * 48);
	m.a.accumulate = true;
	KVT_EXPECT_EQ(moe_call(&m.a), 0);
	for (u32 i = 0; i < 5 * 48; i++)
		KVT_EXPECT(m.y[i] == once[i] + once[i]);
	m.a.accumulate = false;
	for (u32 k = 0; k < 3; k++)
		m.weights[2 * 3 + k] = NAN; /* as moe_route gives for a NaN token */
	m.ids[4 * 3] = 7;		    /* out of range */
	KVT_EXPECT_EQ(moe_call(&m.a), 0);
	KVT_EXPECT(!memcmp(once, m.y, sizeof(float) * 2 * 48));
	KVT_EXPECT(!memcmp(once + 3 * 48, m.y + 3 * 48, sizeof(float) * 48));
	KVT_EXPECT_EQ(kvt_nr_finite(m.y + 2 * 48, 48), 0);
	KVT_EXPECT_EQ(kvt_nr_finite(m.y + 4 * 48, 48), 0);
	free(once);
	moe_fini(&m);
}

KVT_TEST(moe_refuses_what_it_cannot_do)
{
	struct moe m;
	struct kvk_moe_args a;

	rng.state = kvt_rand64();
	moe_init(&m, KVK_INT4, 5, 128, 64, 32);
	a = m.a;
	a.workspace_bytes = 100;
	KVT_EXPECT_EQ(moe_call(&a), -EINVAL);
	a = m.a;
	a.experts.order = KVK_ORDER_PACKED;
	KVT_EXPECT_EQ(moe_call(&a), -EINVAL);
	a = m.a;
	a.experts.inter = 48; /* not a multiple of the group */
	KVT_EXPECT_EQ(moe_call(&a), -EINVAL);
	KVT_EXPECT_EQ(kvk_host_ops()->moe_fp8(&m.a, NULL), -EINVAL);
	KVT_EXPECT_EQ(kvk_host_ops()->moe_bf16(&m.a, NULL), -EINVAL);
	moe_fini(&m);
}

KVT_MAIN()
