/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_moe_fp8.c - E4M3 experts on the GPU beside real numbers: float64 on the dequantised
 * weights, where neither x nor h is rounded.
 *
 * The tensor core adds e4m3 products with 14 bits (moe_fp8_chunk.cuh). Against the reference
 * that shows as an h near a tie of two codes that gets the other one, which is as near to h.
 * So the kernels must be as near to the real numbers as the reference is. Skipped without a
 * GPU.
 */
#ifdef CONFIG_CUDA
#include "cuda_common.h"

#define HIDDEN	896u
#define INTER	512u
#define EXPERTS 7u
#define TOP_K	3u

/* struct layer - one call in host memory */
struct layer {
	struct kvt_matrix w13, w2;
	struct kvk_moe_args a;
	u16 *x;
	u32 *ids;
	float *weights;
	size_t n, slots;
};

static struct layer layer_make(struct kvt_rng *g, u32 nr_tokens)
{
	struct layer l = {.n = (size_t)nr_tokens * HIDDEN,
			  .slots = (size_t)nr_tokens * TOP_K};

	l.w13 = kvt_matrix_make(g, KVK_E4M3, EXPERTS * 2, INTER, HIDDEN, 0, KVK_BF16);
	l.w2 = kvt_matrix_make(g, KVK_E4M3, EXPERTS, HIDDEN, INTER, 0, KVK_BF16);
	l.x = malloc(2 * l.n);
	l.ids = malloc(4 * l.slots);
	l.weights = malloc(4 * l.slots);
	for (size_t i = 0; i < l.n; i++)
		l.x[i] = kvt_to_bf16(kvt_rng_normal(g));
	for (size_t i = 0; i < l.slots; i++) {
		l.ids[i] = (u32)((i / TOP_K * 5 + i % TOP_K * 2) % EXPERTS);
		l.weights[i] = 0.1f + (float)kvt_rng_below(g, 1000) / 1000.0f;
	}
	l.a = (struct kvk_moe_args){.experts = {.dtype = KVK_E4M3,
						.nr_experts = EXPERTS,
						.hidden = HIDDEN,
						.inter = INTER,
						.w13 = l.w13.data,
						.w2 = l.w2.data,
						.s13 = l.w13.scales,
						.s2 = l.w2.scales},
				    .x = l.x,
				    .ids = l.ids,
				    .weights = l.weights,
				    .nr_tokens = nr_tokens,
				    .top_k = TOP_K,
				    .act_dtype = KVK_BF16};
	return l;
}

static u16 *run_host(const struct layer *l)
{
	struct kvk_moe_args a = l->a;
	u16 *y = malloc(2 * l->n);

	a.y = y;
	a.workspace_bytes = kvk_host_ops()->moe_workspace(&a);
	a.workspace = malloc(a.workspace_bytes);
	KVT_EXPECT_EQ(kvk_host_ops()->moe_fp8(&a, NULL), 0);
	free(a.workspace);
	return y;
}

static u16 *run_gpu(const struct kvk_ops *ops, const struct layer *l)
{
	const size_t nw = (size_t)EXPERTS * HIDDEN * INTER, ns = nw / (128 * 128);
	struct kvk_moe_args a = l->a;

	a.experts.w13 = gpu_copy(l->w13.data, 2 * nw);
	a.experts.w2 = gpu_copy(l->w2.data, nw);
	a.experts.s13 = gpu_copy(l->w13.scales, 2 * ns * 4);
	a.experts.s2 = gpu_copy(l->w2.scales, ns * 4);
	a.x = gpu_copy(l->x, 2 * l->n);
	a.ids = gpu_copy(l->ids, 4 * l->slots);
	a.weights = gpu_copy(l->weights, 4 * l->slots);
	a.y = gpu_alloc(2 * l->n);
	a.workspace_bytes = ops->moe_workspace(&a);
	a.workspace = gpu_alloc(a.workspace_bytes);
	KVT_EXPECT_EQ(ops->moe_fp8(&a, NULL), 0);
	return gpu_fetch(a.y, 2 * l->n);
}

static double dot(const double *w, const double *x, u32 n)
{
	double sum = 0;

	for (u32 i = 0; i < n; i++)
		sum += w[i] * x[i];
	return sum;
}

/* y of a token */
static void truth(const struct layer *l, u32 token, double *y)
{
	double x[HIDDEN], h[INTER];

	for (u32 i = 0; i < HIDDEN; i++) {
		x[i] = kvt_bf16(l->x[(size_t)token * HIDDEN + i]);
		y[i] = 0;
	}
	for (u32 k = 0; k < TOP_K; k++) {
		const size_t slot = (size_t)token * TOP_K + k, id = l->ids[slot];
		const double *w13 = l->w13.truth + id * 2 * INTER * HIDDEN;
		const double *w2 = l->w2.truth + id * HIDDEN * INTER;

		for (u32 j = 0; j < INTER; j++) {
			double gate = dot(w13 + (size_t)j * HIDDEN, x, HIDDEN);
			double up = dot(w13 + (size_t)(INTER + j) * HIDDEN, x, HIDDEN);

			h[j] = gate / (1 + exp(-gate)) * up;
		}
		for (u32 i = 0; i < HIDDEN; i++)
			y[i] += (double)l->weights[slot] *
				dot(w2 + (size_t)i * INTER, h, INTER);
	}
}

/* |a - b| / |b| of every @step-th token, of both results at once */
static void errors(const struct layer *l, const u16 *host, const u16 *gpu, u32 step,
		   double ret[2])
{
	double num[2] = {}, den = 0, y[HIDDEN];

	for (u32 t = 0; t < l->a.nr_tokens; t += step) {
		truth(l, t, y);
		for (u32 i = 0; i < HIDDEN; i++) {
			const size_t at = (size_t)t * HIDDEN + i;
			double h = kvt_bf16(host[at]) - y[i],
			       g = kvt_bf16(gpu[at]) - y[i];

			num[0] += h * h;
			num[1] += g * g;
			den += y[i] * y[i];
		}
	}
	ret[0] = sqrt(num[0] / den);
	ret[1] = sqrt(num[1] / den);
}

/* From few tokens a tile to several tiles an expert; the last time two blocks sort the slots. */
KVT_TEST(fp8_products_are_as_near_as_the_reference)
{
	static const u32 counts[] = {9, 40, 130, 400, 1400};
	const struct kvk_ops *ops = gpu_ops();
	struct kvt_rng g = {.state = kvt_rand64()};

	for (size_t i = 0; i < KV_ARRAY_SIZE(counts); i++) {
		struct layer l = layer_make(&g, counts[i]);
		u16 *want = run_host(&l), *got = run_gpu(ops, &l);
		double error[2];

		errors(&l, want, got, counts[i] / 64 + 1, error);
		KVT_NOTE("%u tokens: error of the reference %.4e, of the kernels %.4e",
			 counts[i], error[0], error[1]);
		KVT_EXPECT(error[1] <= error[0] * 1.05);
	}
}
#else
#include "tests/kvt.h"

KVT_TEST(cuda_moe_fp8)
{
	KVT_SKIP("built without CUDA");
}
#endif

KVT_MAIN()
