/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_cuda.c - the CUDA router, experts and linear against the host references, on the same
 * bytes.
 *
 * Outputs and workspaces are poisoned with NaN first and every call runs twice: the second
 * result must be the same bits. Skipped without a GPU.
 */
#include "tests/kvt.h"
#include "common.h"

#ifndef CONFIG_CUDA
KVT_TEST(cuda_kernels)
{
	KVT_SKIP("built without CUDA");
}
#else
#include <cuda_runtime_api.h>
#include "cuda_common.h"
#include "kernels/moe_cuda.h"
#include "kernels/fp8.h"

static struct kvt_rng rng;

static void need_gpu(void)
{
	int nr = 0;

	rng.state = kvt_rand64();
	if (cudaGetDeviceCount(&nr) != cudaSuccess || nr == 0)
		KVT_SKIP("no GPU");
}

static void *dev_new(size_t bytes)
{
	void *p = NULL;

	KVT_EXPECT_EQ(cudaMalloc(&p, bytes ? bytes : 16), cudaSuccess);
	if (gpu_poisoned())
		KVT_EXPECT_EQ(cudaMemset(p, 0xff, bytes), cudaSuccess);
	return p;
}

static void *dev_copy(const void *src, size_t bytes)
{
	void *p = dev_new(bytes);

	KVT_EXPECT_EQ(cudaMemcpy(p, src, bytes, cudaMemcpyHostToDevice), cudaSuccess);
	return p;
}

static void dev_read(void *dst, const void *src, size_t bytes)
{
	KVT_EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
	KVT_EXPECT_EQ(cudaMemcpy(dst, src, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
}

/* |a - b| / |b|; 1 if a NaN is in one of them only */
static double rel_bf16(const u16 *a, const u16 *b, size_t n)
{
	double num = 0, den = 0;

	for (size_t i = 0; i < n; i++) {
		double x = kvt_bf16(a[i]), y = kvt_bf16(b[i]);

		if (isnan(x) || isnan(y))
			return 1;
		num += (x - y) * (x - y);
		den += y * y;
	}
	return den > 0 ? sqrt(num / den) : num > 0;
}

static void fill_bf16(u16 *x, size_t n, float scale)
{
	for (size_t i = 0; i < n; i++)
		x[i] = kvt_to_bf16(kvt_rng_normal(&rng) * scale);
}

/* ------------------------------------------------------------------------------- router */

static void route_once(u32 nr_experts, u32 top_k, u32 nr_groups, u32 top_groups, u32 n)
{
	size_t slots = (size_t)n * top_k;
	float *logits = malloc(sizeof(float) * n * nr_experts),
	      *bias = malloc(4 * nr_experts);
	u32 *ids = malloc(4 * slots), *got_ids = malloc(4 * slots);
	float *w = malloc(4 * slots), *got_w = malloc(4 * slots);
	struct kvk_moe_route_args a = {.logits = logits,
				       .bias = bias,
				       .ret_ids = ids,
				       .ret_weights = w,
				       .nr_tokens = n,
				       .nr_experts = nr_experts,
				       .top_k = top_k,
				       .nr_groups = nr_groups,
				       .top_groups = top_groups,
				       .norm = true,
				       .scale = 2.5f};

	kvt_rng_fill(&rng, logits, (size_t)n * nr_experts, 2.0f);
	kvt_rng_fill(&rng, bias, nr_experts, 0.1f);
	logits[(size_t)(n - 1) * nr_experts + 3] = NAN;
	KVT_EXPECT_EQ(kvk_host_ops()->moe_route(&a, NULL), 0);
	a.logits = dev_copy(logits, 4ul * n * nr_experts);
	a.bias = dev_copy(bias, 4ul * nr_experts);
	a.ret_ids = dev_new(4 * slots);
	a.ret_weights = dev_new(4 * slots);
	KVT_EXPECT_EQ(kvk_moe_route_cuda(&a, NULL), 0);
	dev_read(got_ids, a.ret_ids, 4 * slots);
	dev_read(got_w, a.ret_weights, 4 * slots);
	for (size_t i = 0; i < slots; i++) {
		KVT_EXPECT_EQ(got_ids[i], ids[i]);
		KVT_EXPECT((isnan(w[i]) && isnan(got_w[i])) ||
			   fabsf(w[i] - got_w[i]) < 1e-5f);
	}
	free(logits);
	free(bias);
	free(ids);
	free(got_ids);
	free(w);
	free(got_w);
}

KVT_TEST(route_chooses_as_the_reference)
{
	need_gpu();
	route_once(16, 4, 1, 1, 5);
	route_once(384, 8, 1, 1, 33);
	route_once(256, 8, 8, 4, 17);
	route_once(160, 8, 1, 1, 1);
}

/* ------------------------------------------------------------------------------ experts */

struct moe_case {
	u32 dtype, hidden, inter, group, scale_dtype, nr_experts, top_k, nr_tokens;
	bool accumulate;
};

/* Standard INT4 on the device becomes packed, expert by expert, and is verified. */
static void pack_experts(struct kvk_experts *e)
{
	size_t n13 = (size_t)e->inter * e->hidden, b13 = kvk_moe_packed_bytes(e, 0),
	       b2 = kvk_moe_packed_bytes(e, 1);
	u8 *p13 = dev_new(b13 * e->nr_experts), *p2 = dev_new(b2 * e->nr_experts);
	u32 *bad = dev_new(4), count;

	KVT_EXPECT_EQ(cudaMemset(bad, 0, 4), cudaSuccess);
	for (u32 i = 0; i < e->nr_experts; i++) {
		struct kvk_repack r = {.shape = *e,
				       .w13 = (const u8 *)e->w13 + i * n13,
				       .w2 = (const u8 *)e->w2 + i * n13 / 2,
				       .s13 = (const u8 *)e->s13 + i * n13 * 4 / e->group,
				       .s2 = (const u8 *)e->s2 + i * n13 * 2 / e->group,
				       .packed13 = p13 + i * b13,
				       .packed2 = p2 + i * b2};

		KVT_EXPECT_EQ(kvk_moe_int4_repack(&r, NULL), 0);
		KVT_EXPECT_EQ(kvk_moe_int4_verify(&r, bad, NULL), 0);
	}
	dev_read(&count, bad, 4);
	KVT_EXPECT_EQ(count, 0);
	/* no byte more than nibbles and scales */
	KVT_EXPECT_EQ(b13 + b2, n13 * 3 / 2 + n13 * 6 / e->group);
	e->w13 = p13;
	e->w2 = p2;
	e->s13 = e->s2 = NULL;
	e->order = KVK_ORDER_PACKED;
}

static size_t weight_size(u32 dtype, size_t n)
{
	return dtype == KVK_INT4   ? n / 2
	       : dtype == KVK_E4M3 ? n
	       : dtype == KVK_BF16 ? 2 * n
				   : 4 * n;
}

static size_t scale_size(u32 dtype, u32 nr, u32 rows, u32 cols, u32 group)
{
	if (dtype == KVK_INT4)
		return (size_t)nr * rows * (cols / group) * 2;
	if (dtype == KVK_E4M3)
		return (size_t)nr * ((rows + 127) / 128) * ((cols + 127) / 128) * 4;
	return 0;
}

static int moe_call(const struct kvk_moe_args *a, const struct kvk_ops *host)
{
	switch (a->experts.dtype) {
	case KVK_INT4:
		return host ? host->moe_int4(a, NULL) : kvk_moe_int4_cuda(a, NULL);
	case KVK_E4M3:
		return host ? host->moe_fp8(a, NULL) : kvk_moe_fp8_cuda(a, NULL);
	default:
		return host ? host->moe_bf16(a, NULL) : kvk_moe_bf16_cuda(a, NULL);
	}
}

/* struct moe_host - one case in host memory; owns everything */
struct moe_host {
	struct kvt_matrix w13, w2;
	struct kvk_moe_args a;
	u16 *x, *y, *y0; /* y0: what y holds before the call */
	u32 *ids;
	float *weights;
	size_t n, slots;
};

static void moe_host_init(struct moe_host *m, const struct moe_case *c)
{
	m->w13 = kvt_matrix_make(&rng, c->dtype, c->nr_experts * 2, c->inter, c->hidden,
				 c->group, c->scale_dtype);
	m->w2 = kvt_matrix_make(&rng, c->dtype, c->nr_experts, c->hidden, c->inter,
				c->group, c->scale_dtype);
	m->n = (size_t)c->nr_tokens * c->hidden;
	m->slots = (size_t)c->nr_tokens * c->top_k;
	m->x = malloc(2 * m->n);
	m->y = malloc(2 * m->n);
	m->y0 = malloc(2 * m->n);
	m->ids = malloc(4 * m->slots);
	m->weights = malloc(4 * m->slots);
	fill_bf16(m->x, m->n, 1.0f);
	fill_bf16(m->y0, m->n, 1.0f);
	memcpy(m->y, m->y0, 2 * m->n);
	for (size_t i = 0; i < m->slots; i++) {
		/* expert 0 is crowded, the last one sees nobody */
		u32 k = (u32)i % c->top_k;

		m->ids[i] =
			k ? 1 + (u32)((i / c->top_k * 5 + k * 3) % (c->nr_experts - 2))
			  : 0;
		m->weights[i] = 0.1f + kvt_randf();
	}
	m->a = (struct kvk_moe_args){.experts = {.dtype = c->dtype,
						 .group = c->group,
						 .scale_dtype = c->scale_dtype,
						 .nr_experts = c->nr_experts,
						 .hidden = c->hidden,
						 .inter = c->inter,
						 .w13 = m->w13.data,
						 .w2 = m->w2.data,
						 .s13 = m->w13.scales,
						 .s2 = m->w2.scales},
				     .x = m->x,
				     .y = m->y,
				     .ids = m->ids,
				     .weights = m->weights,
				     .nr_tokens = c->nr_tokens,
				     .top_k = c->top_k,
				     .act_dtype = KVK_BF16,
				     .accumulate = c->accumulate};
	m->a.workspace_bytes = kvk_host_ops()->moe_workspace(&m->a);
	m->a.workspace = malloc(m->a.workspace_bytes);
}

static void moe_host_fini(struct moe_host *m)
{
	kvt_matrix_fini(&m->w13);
	kvt_matrix_fini(&m->w2);
	free(m->x);
	free(m->y);
	free(m->y0);
	free(m->ids);
	free(m->weights);
	free(m->a.workspace);
}

/* The same call with everything but y in device memory. */
static struct kvk_moe_args moe_to_device(const struct moe_host *m)
{
	const struct kvk_experts *e = &m->a.experts;
	size_t nw = (size_t)e->nr_experts * e->inter * e->hidden;
	struct kvk_moe_args d = m->a;

	d.x = dev_copy(m->x, 2 * m->n);
	d.ids = dev_copy(m->ids, 4 * m->slots);
	d.weights = dev_copy(m->weights, 4 * m->slots);
	d.experts.w13 = dev_copy(m->w13.data, weight_size(e->dtype, 2 * nw));
	d.experts.w2 = dev_copy(m->w2.data, weight_size(e->dtype, nw));
	d.experts.s13 =
		dev_copy(m->w13.scales, scale_size(e->dtype, 2 * e->nr_experts, e->inter,
						   e->hidden, e->group));
	d.experts.s2 = dev_copy(m->w2.scales, scale_size(e->dtype, e->nr_experts,
							 e->hidden, e->inter, e->group));
	if (e->dtype == KVK_INT4)
		pack_experts(&d.experts);
	d.workspace_bytes = kvk_moe_workspace_cuda(&d);
	KVT_EXPECT(d.workspace_bytes > 0);
	d.workspace = dev_new(d.workspace_bytes);
	return d;
}

/* y in f32 is what y in bf16 is rounded from, also where it is added to; @got: of the same call */
static void moe_in_f32(struct kvk_moe_args d, const struct moe_host *m, const u16 *got)
{
	float *y = malloc(4 * m->n);

	for (size_t i = 0; i < m->n; i++)
		y[i] = kvk_bf16_to_f32(m->y0[i]);
	d.y = dev_copy(y, 4 * m->n);
	d.y_f32 = true;
	KVT_EXPECT_EQ(moe_call(&d, NULL), 0);
	dev_read(y, d.y, 4 * m->n);
	for (size_t i = 0; i < m->n; i++)
		if (kvk_f32_to_bf16(y[i]) != got[i])
			KVT_FAIL("element %zu is %g in f32, %g in bf16", i, (double)y[i],
				 (double)kvk_bf16_to_f32(got[i]));
	free(y);
}

static void moe_once(const struct moe_case *c)
{
	struct kvk_moe_args d;
	struct moe_host m;
	u16 *got;

	moe_host_init(&m, c);
	got = malloc(4 * m.n);
	KVT_EXPECT_EQ(moe_call(&m.a, kvk_host_ops()), 0);
	d = moe_to_device(&m);
	for (u32 run = 0; run < 2; run++) {
		d.y = c->accumulate ? dev_copy(m.y0, 2 * m.n) : dev_new(2 * m.n);
		if (gpu_poisoned())
			KVT_EXPECT_EQ(cudaMemset(d.workspace, 0xff, d.workspace_bytes),
				      cudaSuccess);
		KVT_EXPECT_EQ(moe_call(&d, NULL), 0);
		dev_read(got + run * m.n, d.y, 2 * m.n);
	}
	KVT_NOTE("dtype %u %ux%u group %u tokens %u: error %.2e", c->dtype, c->hidden,
		 c->inter, c->group, c->nr_tokens, rel_bf16(got, m.y, m.n));
	/* both round to bf16 at the end: 1.7e-3 each. Whole blocks in E4M3: products on e4m3
	 * keep 14 bits, and an h near a tie may get the other code (1 token, 768 values of h:
	 * one code is 5e-3) */
	KVT_EXPECT(rel_bf16(got, m.y, m.n) <
		   (c->dtype == KVK_E4M3 && c->inter % 128 == 0 ? 1e-2 : 3e-3));
	KVT_EXPECT(memcmp(got, got + m.n, 2 * m.n) == 0);
	moe_in_f32(d, &m, got);
	d.workspace_bytes--;
	KVT_EXPECT_EQ(moe_call(&d, NULL), -EINVAL);
	moe_host_fini(&m);
	free(got);
}

static void moe_tokens(struct moe_case c)
{
	static const u32 counts[] = {1, 3, 7, 9, 20, 33, 65, 130, 400};

	need_gpu();
	for (size_t i = 0; i < KV_ARRAY_SIZE(counts); i++) {
		/* hundreds of times slower; what is left has the same kernels */
		if (gpu_sanitizer("racecheck") && i % 2 == 0 && i > 0)
			continue;
		c.nr_tokens = counts[i];
		c.accumulate = i == 2;
		moe_once(&c);
	}
}

KVT_TEST(int4_group_32)
{
	moe_tokens((struct moe_case){KVK_INT4, 256, 128, 32, KVK_BF16, 9, 4, 0, false});
}

KVT_TEST(int4_many_experts)
{
	moe_tokens((struct moe_case){KVK_INT4, 256, 128, 32, KVK_BF16, 64, 4, 0, false});
}

KVT_TEST(int4_many_columns)
{
	moe_tokens((struct moe_case){KVK_INT4, 256, 1152, 64, KVK_F16, 40, 2, 0, false});
}

/* Two warps share the columns of a row tile; with 33 tokens early sums too. */
KVT_TEST(int4_two_warps_a_row_tile)
{
	struct moe_case c = {KVK_INT4, 1152, 128, 32, KVK_BF16, 70, 8, 9, false};

	need_gpu();
	moe_once(&c);
	c.nr_tokens = 33;
	moe_once(&c);
}

/* From 33 tokens on: sums of the early row blocks among the last products. */
KVT_TEST(int4_early_sums)
{
	moe_tokens((struct moe_case){KVK_INT4, 2304, 128, 32, KVK_BF16, 40, 8, 0, false});
}

KVT_TEST(int4_group_64_f16_scales)
{
	moe_tokens((struct moe_case){KVK_INT4, 384, 256, 64, KVK_F16, 7, 3, 0, false});
}

KVT_TEST(int4_group_128_many_rows)
{
	moe_tokens(
		(struct moe_case){KVK_INT4, 2304, 1152, 128, KVK_BF16, 5, 2, 0, false});
}

/* Where moe_int4_step.cu works: units of two row tiles and of more, a last one that lacks some, of one stage and of more; experts with one token, with eight and with more. */
KVT_TEST(int4_few_slots)
{
	static const struct moe_case cases[] = {
		{KVK_INT4, 2176, 256, 32, KVK_BF16, 40, 8, 0, false},
		{KVK_INT4, 640, 512, 32, KVK_F16, 12, 8, 0, false},
		{KVK_INT4, 384, 128, 32, KVK_BF16, 24, 3, 0, false},
		{KVK_INT4, 384, 128, 32, KVK_BF16, 9, 1, 0, false},
		{KVK_INT4, 640, 256, 32, KVK_BF16, 16, 8, 0, false},
		{KVK_INT4, 256, 384, 32, KVK_F16, 30, 5, 0, false},
	};

	need_gpu();
	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++)
		for (u32 n = 1; n * cases[i].top_k <= 64; n += 1 + n / 3 * 2) {
			struct moe_case c = cases[i];

			if (n * c.top_k * c.inter > 16384)
				break;
			/* slow there: one token, and the most */
			if (gpu_sanitizer("racecheck") && n > 1 &&
			    (2 * n + 1) * c.top_k <= 64)
				continue;
			c.nr_tokens = n;
			c.accumulate = n == 2;
			moe_once(&c);
		}
}

KVT_TEST(fp8_blocks)
{
	moe_tokens((struct moe_case){KVK_E4M3, 264, 144, 0, KVK_BF16, 7, 3, 0, false});
}

KVT_TEST(fp8_whole_blocks)
{
	moe_tokens((struct moe_case){KVK_E4M3, 384, 256, 0, KVK_BF16, 7, 3, 0, false});
}

/* Where moe_fp8_step.cu works: tiles of one token, of eight and of what is left; one row tile in a
 * unit, two and eight, of which some are not there; many stages; more units than SMs. */
KVT_TEST(fp8_few_slots)
{
	static const struct moe_case cases[] = {
		{KVK_E4M3, 640, 256, 0, KVK_BF16, 24, 2, 23, false},
		{KVK_E4M3, 2176, 128, 0, KVK_BF16, 16, 2, 4, true},
		{KVK_E4M3, 640, 256, 0, KVK_BF16, 24, 8, 8, false},
		{KVK_E4M3, 2176, 1152, 0, KVK_BF16, 9, 2, 7, true},
		{KVK_E4M3, 128, 128, 0, KVK_BF16, 9, 1, 3, false},
		{KVK_E4M3, 128, 128, 0, KVK_BF16, 9, 1, 50, true},
		{KVK_E4M3, 640, 384, 0, KVK_BF16, 12, 8, 1, false},
		{KVK_E4M3, 7168, 256, 0, KVK_BF16, 20, 8, 3, false},
	};

	need_gpu();
	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++)
		moe_once(&cases[i]);
}

/* More slots, below three an expert, where moe_fp8_wide.cu works: many steps; more units than
 * SMs. */
KVT_TEST(fp8_whole_blocks_few_slots)
{
	static const u32 counts[] = {17, 20, 26};
	struct moe_case c = {KVK_E4M3, 640, 256, 0, KVK_BF16, 72, 8, 0, false};

	need_gpu();
	for (size_t i = 0; i < 2 * KV_ARRAY_SIZE(counts); i++) {
		c.nr_tokens = i % 2 ? 17 : counts[i / 2];
		c.accumulate = i == 2;
		c.hidden = i % 2 ? 2176 : 640;
		c.inter = i % 2 ? 128 : 256;
		c.nr_experts = i % 2 ? 48 : 72;
		moe_once(&c);
	}
}

KVT_TEST(bf16_and_f32)
{
	moe_tokens((struct moe_case){KVK_BF16, 256, 136, 0, KVK_BF16, 7, 3, 0, false});
	moe_tokens((struct moe_case){KVK_F32, 136, 128, 0, KVK_BF16, 5, 2, 0, false});
}

/* ------------------------------------------------------------------------------- linear */

static void linear_once(u32 dtype, u32 x_dtype, u32 n, u32 rows, u32 cols, u32 nr_batch)
{
	struct kvt_matrix m =
		kvt_matrix_make(&rng, dtype, nr_batch, rows, cols, 32, KVK_BF16);
	size_t nx = (size_t)n * nr_batch * cols, ny = (size_t)n * nr_batch * rows;
	size_t xb = x_dtype == KVK_F32 ? 4 : 2;
	void *x = malloc(nx * 4);
	float *y = malloc(4 * ny), *got = malloc(4 * ny), *one = malloc(4 * ny), *bias;
	double num = 0, den = 0;
	struct kvk_linear_args a = {.w = m.w,
				    .x = x,
				    .y = y,
				    .nr_tokens = n,
				    .x_dtype = x_dtype,
				    .y_dtype = KVK_F32,
				    .nr_batch = nr_batch};

	bias = malloc(4ul * rows);
	kvt_rng_fill(&rng, bias, rows, 1.0f);
	if (x_dtype == KVK_F32)
		kvt_rng_fill(&rng, x, nx, 1.0f);
	else
		fill_bf16(x, nx, 1.0f);
	a.bias = nr_batch == 1 ? bias : NULL;
	KVT_EXPECT_EQ(kvk_host_ops()->linear(&a, NULL), 0);
	a.x = dev_copy(x, nx * xb);
	a.y = dev_new(4 * ny);
	a.w.data = dev_copy(m.data, weight_size(dtype, (size_t)nr_batch * rows * cols));
	a.w.scales = dev_copy(m.scales, scale_size(dtype, nr_batch, rows, cols, 32));
	a.bias = a.bias ? dev_copy(bias, 4ul * rows) : NULL;
	KVT_EXPECT_EQ(kvk_linear_cuda(&a, NULL), 0);
	dev_read(got, a.y, 4 * ny);
	for (size_t i = 0; i < ny; i++) {
		num += (double)(got[i] - y[i]) * (got[i] - y[i]);
		den += (double)y[i] * y[i];
	}
	KVT_NOTE("dtype %u x %u, %u tokens %ux%u: error %.2e", dtype, x_dtype, n, rows,
		 cols, sqrt(num / den));
	KVT_EXPECT(sqrt(num / den) < (dtype == KVK_E4M3 ? 5e-4 : 3e-5));
	/* the same bits alone as in a batch */
	a.nr_tokens = 1;
	KVT_EXPECT_EQ(kvk_linear_cuda(&a, NULL), 0);
	dev_read(one, a.y, 4ul * nr_batch * rows);
	KVT_EXPECT(memcmp(one, got, 4ul * nr_batch * rows) == 0);
	kvt_matrix_fini(&m);
	free(x);
	free(y);
	free(got);
	free(one);
	free(bias);
}

KVT_TEST(linear_all_dtypes)
{
	static const u32 dtypes[] = {KVK_F32, KVK_BF16, KVK_E4M3, KVK_INT4};
	static const u32 counts[] = {1, 5, 9, 33};

	need_gpu();
	for (u32 d = 0; d < 4; d++)
		for (u32 i = 0; i < 4; i++) {
			linear_once(dtypes[d], KVK_BF16, counts[i], 200, 1312, 1);
			linear_once(dtypes[d], KVK_F32, counts[i], 72, 256, 3);
		}
}
#endif

KVT_MAIN()
