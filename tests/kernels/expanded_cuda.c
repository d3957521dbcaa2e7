/* SPDX-License-Identifier: Apache-2.0 */
/* expanded_cuda.c - expanded MLA with BF16 activations against float64. */
#include "tests/kvt.h"

#ifdef CONFIG_CUDA
#include "prefill_cuda.h"

#define NOPE	 128u
#define ROPE_DIM 64u
#define VDIM	 128u

/* One row in float64; @kv: the head's values of position 0. */
static void truth_row(const float *q, const float *kv, const float *rope, size_t stride,
		      u32 sees, float *out)
{
	double *s = malloc(sees * sizeof(double)), top = -1e300, sum = 0;

	for (u32 t = 0; t < sees; t++) {
		double x = 0;

		for (u32 d = 0; d < NOPE; d++)
			x += (double)q[d] * kv[t * stride + d];
		for (u32 d = 0; d < ROPE_DIM; d++)
			x += (double)q[NOPE + d] * rope[t * ROPE_DIM + d];
		s[t] = x * (double)SCALE;
		top = s[t] > top ? s[t] : top;
	}
	for (u32 t = 0; t < sees; t++)
		sum += s[t] = exp(s[t] - top);
	for (u32 d = 0; d < VDIM; d++) {
		double x = 0;

		for (u32 t = 0; t < sees; t++)
			x += s[t] * kv[t * stride + NOPE + d];
		out[d] = (float)(x / sum);
	}
	free(s);
}

static float *random_bf16(struct world *w, int i, size_t n)
{
	float *x = malloc(n * sizeof(float));
	u16 *h = malloc(n * sizeof(u16));

	kvt_rng_fill(&w->g, x, n, 0.8f);
	for (size_t k = 0; k < n; k++) {
		h[k] = kvt_to_bf16(x[k]);
		x[k] = (float)kvt_bf16(h[k]);
	}
	to_device(w, i, h, n * sizeof(u16));
	free(h);
	return x;
}

static void expanded_truth(struct world *w, const u32 *kv_start, const float *kv,
			   const float *rope)
{
	size_t stride = (size_t)w->heads * (NOPE + VDIM);

	for (u32 r = 0; r < w->f.batch.nr_requests; r++) {
		u32 n = w->f.q_start[r + 1] - w->f.q_start[r];

		for (u32 i = 0; i < n * w->heads; i++) {
			u32 t = i / w->heads, h = i % w->heads;
			size_t row = ((size_t)w->f.q_start[r] + t) * w->heads + h;

			truth_row(w->q + row * (NOPE + ROPE_DIM),
				  kv + kv_start[r] * stride + h * (NOPE + VDIM),
				  rope + (size_t)kv_start[r] * ROPE_DIM, stride,
				  w->f.lengths[r] - n + t + 1, w->ref + row * VDIM);
		}
	}
}

static void check_expanded(u32 heads, const u32 *lengths, const u32 *q_lens, u32 nr,
			   u32 bad)
{
	struct kvk_attn_expanded_args a = {.nope_dim = NOPE,
					   .rope_dim = ROPE_DIM,
					   .v_dim = VDIM,
					   .act_dtype = KVK_BF16,
					   .sm_scale = SCALE};
	struct kv_layout l = bf16_layout(1, 1, 64);
	u32 kv_start[16], total = 3;
	struct world w;
	float *kv, *rope;

	world_init(&w, &l, heads, lengths, q_lens, nr); /* for its batch */
	for (u32 r = 0; r < nr; total += lengths[r++])
		kv_start[r] = total;
	free(w.q), free(w.q16), free(w.ref), free(w.out), free(w.out16);
	make_queries(&w, w.f.batch.nr_tokens, NOPE + ROPE_DIM, VDIM);
	kv = random_bf16(&w, KV, (size_t)total * heads * (NOPE + VDIM));
	rope = random_bf16(&w, ROPE, (size_t)total * ROPE_DIM);
	expanded_truth(&w, kv_start, kv, rope);
	if (bad < nr)
		w.f.verdicts[bad].bits = KV_BAD_GEN;
	a.batch = upload_batch(&w);
	a.kv_start = to_device(&w, KV_START, kv_start, nr * 4);
	a.nr_kv_tokens = total;
	a.nr_heads = heads;
	a.kv = w.d[KV];
	a.rope = w.d[ROPE];
	a.q = w.d[QUERY];
	a.out = w.d[OUT];
	if (gpu_poisoned())
		CUDA_OK(cudaMemset(a.out, 0xff, w.nr_out * sizeof(u16)));
	KVT_EXPECT_EQ(kvk_attn_expanded_cuda(&a, NULL), 0);
	fetch(&w);
	if (bad < nr)
		mark_failed(&w, bad);
	expect_close(&w, "expanded heads/requests", heads, nr);
	free(kv);
	free(rope);
	world_fini(&w);
}

KVT_TEST_T(expanded_mla_matches_float64, 60)
{
	static const u32 small = 100, lengths[] = {300, 1, 64, 129, 700},
			 q[] = {300, 1, 3, 129, 250};

	check_expanded(1, &small, &small, 1, ~0u);
	check_expanded(3, lengths, q, 5, ~0u);
	check_expanded(2, lengths, q, 5, 3);
}

KVT_TEST(bad_expanded_arguments_are_refused)
{
	struct kvk_attn_expanded_args a = {.nope_dim = NOPE,
					   .rope_dim = ROPE_DIM,
					   .v_dim = 256,
					   .act_dtype = KVK_BF16,
					   .sm_scale = SCALE,
					   .nr_heads = 1,
					   .nr_kv_tokens = 1};

	if (no_gpu())
		KVT_SKIP("no GPU");
	a.kv = a.rope = a.q = a.out = (void *)4096;
	a.kv_start = (const u32 *)4096;
	KVT_EXPECT_EQ(kvk_attn_expanded_cuda(&a, NULL), -EINVAL);
	a.v_dim = VDIM;
	a.act_dtype = KVK_F32;
	KVT_EXPECT_EQ(kvk_attn_expanded_cuda(&a, NULL), -EINVAL);
	a.act_dtype = KVK_BF16;
	a.q = (void *)4098;
	KVT_EXPECT_EQ(kvk_attn_expanded_cuda(&a, NULL), -EINVAL);
}
#else
KVT_TEST(expanded_on_the_gpu)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif /* CONFIG_CUDA */

KVT_MAIN()
