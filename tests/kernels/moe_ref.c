/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_ref.c - the host's routed experts in every weight dtype against float64, and their
 * batch invariance.
 */
#include <omp.h>
#include "tests/kvt.h"
#include "common.h"

static struct kvt_rng rng;

struct moe {
	struct kvt_matrix w13;
	struct kvt_matrix w2;
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

	m->w13 = kvt_matrix_make(&rng, dtype, nr_experts * 2, inter, hidden, group,
				 KVK_BF16);
	m->w2 = kvt_matrix_make(&rng, dtype, nr_experts, hidden, inter, group, KVK_BF16);
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
	kvt_matrix_fini(&m->w13);
	kvt_matrix_fini(&m->w2);
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

	kvt_acts(dtype, m->x + (size_t)t * hidden, x, hidden);
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
			kvt_act_fp8(hf, h, inter);
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

/* |y - truth| / |truth| of a layer in BF16: routed experts, whose sum stays f32, and a second product
 * of a shared one, added to it. @act: [nr_tokens][inter] of that one, bf16 */
static double layer_error(struct moe *m, const u16 *act, u32 nr_tokens)
{
	u32 hidden = m->a.experts.hidden, inter = m->a.experts.inter;
	struct kvt_matrix down = kvt_matrix_make(&rng, KVK_BF16, 1, hidden, inter, 0, 0);
	size_t n = (size_t)nr_tokens * hidden;
	double *truth = malloc(sizeof(double) * hidden), num = 0, den = 0;
	float *routed = malloc(sizeof(float) * n);
	u16 *x = malloc(2 * n), *y = malloc(2 * n);
	struct kvk_moe_args a = m->a;
	struct kvk_linear_args l = {.w = down.w,
				    .x = act,
				    .y = y,
				    .nr_tokens = nr_tokens,
				    .x_dtype = KVK_BF16,
				    .y_dtype = KVK_BF16,
				    .nr_batch = 1,
				    .add = routed};

	memset(routed, 0xff, sizeof(float) * n);
	memset(y, 0xff, 2 * n);
	for (size_t i = 0; i < n; i++) {
		x[i] = kvt_to_bf16(m->x[i]);
		m->x[i] = (float)kvt_bf16(x[i]);
	}
	a.x = x;
	a.y = routed;
	a.act_dtype = KVK_BF16;
	a.y_f32 = true;
	KVT_EXPECT_EQ(moe_call(&a), 0);
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&l, NULL), 0);
	for (u32 t = 0; t < nr_tokens; t++) {
		moe_truth(m, t, truth);
		for (u32 r = 0; r < hidden; r++) {
			double d;

			for (u32 c = 0; c < inter; c++)
				truth[r] += down.truth[(size_t)r * inter + c] *
					    kvt_bf16(act[(size_t)t * inter + c]);
			d = kvt_bf16(y[(size_t)t * hidden + r]) - truth[r];
			num += d * d;
			den += truth[r] * truth[r];
		}
	}
	kvt_matrix_fini(&down);
	free(truth);
	free(routed);
	free(x);
	free(y);
	return sqrt(num / den);
}

/* One rounding to bf16 is 1.7e-3, two are 2.4e-3. E4M3 as the format has it: moe_truth() rounds x
 * and h as well. */
KVT_TEST(a_layer_in_bf16_is_rounded_once)
{
	rng.state = kvt_rand64();
	for (size_t s = 0; s < KV_ARRAY_SIZE(moe_shapes); s++) {
		u32 inter = moe_shapes[s].inter;
		u16 *act = malloc(2ul * 45 * inter);
		struct moe m;
		double err;

		moe_init(&m, moe_shapes[s].dtype, 45, moe_shapes[s].hidden, inter,
			 moe_shapes[s].group);
		for (u32 i = 0; i < 45 * inter; i++)
			act[i] = kvt_to_bf16(kvt_rng_normal(&rng));
		err = layer_error(&m, act, 45);
		KVT_NOTE("dtype %u: error %.2e", moe_shapes[s].dtype, err);
		KVT_EXPECT_LE(err, 2e-3);
		moe_fini(&m);
		free(act);
	}
}

/* y in f32 is what y in bf16 is rounded from, also where it is added to. */
KVT_TEST(moe_y_f32_before_it_is_rounded)
{
	rng.state = kvt_rand64();
	for (size_t s = 0; s < 2 * KV_ARRAY_SIZE(moe_shapes); s++) {
		u32 hidden = moe_shapes[s / 2].hidden;
		size_t n = 9ul * hidden;
		u16 *x = malloc(2 * n), *y = malloc(2 * n);
		struct moe m;

		moe_init(&m, moe_shapes[s / 2].dtype, 9, hidden, moe_shapes[s / 2].inter,
			 moe_shapes[s / 2].group);
		for (size_t i = 0; i < n; i++) {
			x[i] = kvt_to_bf16(m.x[i]);
			y[i] = s % 2 ? x[i] : 0xffff;
			m.y[i] = s % 2 ? (float)kvt_bf16(y[i]) : NAN;
		}
		m.a.accumulate = s % 2;
		m.a.act_dtype = KVK_BF16;
		m.a.x = x;
		m.a.y_f32 = true;
		KVT_EXPECT_EQ(moe_call(&m.a), 0);
		m.a.y_f32 = false;
		m.a.y = y;
		KVT_EXPECT_EQ(moe_call(&m.a), 0);
		for (size_t i = 0; i < n; i++)
			KVT_EXPECT_EQ(y[i], kvt_to_bf16(m.y[i]));
		moe_fini(&m);
		free(x);
		free(y);
	}
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
