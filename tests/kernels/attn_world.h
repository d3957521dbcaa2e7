/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_world.h - one case of attention on both sides: a pool of pages, queries, the host's
 * answer and the GPU's. Included by attn_cuda.c,
 * attn_split_cuda.c and attn_bf16_cuda.c.
 */
#ifndef TESTS_KERNELS_ATTN_WORLD_H
#define TESTS_KERNELS_ATTN_WORLD_H

#include "tests/kvt.h"
#include "cuda_common.h"

#include <cuda_runtime_api.h>
#include "kernels/attn_cuda.h"
#include "kernels/fp8.h"

#define CUDA_OK(expr) KVT_EXPECT_EQ((int)(expr), 0)

/* What kernels.h promises of KVK_ATTN_FAST on FP8 pages. */
#define FAST_FP8      8e-2

/* One case: a pool on both sides, queries, outputs. */
struct world {
	struct kvt_rng g;
	struct kvt_paged f;
	const struct kvk_ops *ops;
	float *q;   /* bf16-exact */
	float *ref; /* host's answer */
	float *out; /* device's */
	void *d[10];
	struct kvk_attn_args dev;
	size_t nr_q;
	size_t nr_out;
};

static void *to_device(struct world *w, int i, const void *src, size_t bytes)
{
	if (!w->d[i])
		CUDA_OK(cudaMalloc(&w->d[i], bytes + 64));
	if (src)
		CUDA_OK(cudaMemcpy(w->d[i], src, bytes, cudaMemcpyHostToDevice));
	return w->d[i];
}

/* Not 0: tokens grow by this, and some are zeros. */
static float ramp;
/*
 * Not 0: latents are this times larger and only ropes make scores; above 1 every other page's latents
 * are zeros. FP8's scales are f16: 2^-10 to 2^20 at most.
 */
static float latent_gain;
/* Queries that KVK_ATTN_FAST holds without loss */
static bool q_in_e4m3;

/* Append random values of all tokens through the host reference, layer by layer. */
static void fill_pages(struct world *w, const u32 *lengths, u32 nr)
{
	const struct kv_layout *l = &w->f.pages.layout;
	bool mla = l->kind == KV_LAYOUT_MLA;
	u32 dims[2] = {mla ? l->latent_dim : l->nr_kv_heads * l->head_dim, 0};
	float *src[2];

	dims[1] = mla ? l->rope_dim : dims[0];
	kvt_paged_batch(&w->f, &w->g, lengths, lengths, nr);
	for (int i = 0; i < 2; i++) {
		size_t n = (size_t)w->f.batch.nr_tokens * dims[i];

		src[i] = malloc((n + 1) * sizeof(float));
		kvt_rng_fill(&w->g, src[i], n, i ? 0.6f : 1.5f);
		for (size_t t = 0; ramp && t < w->f.batch.nr_tokens; t++)
			for (u32 d = 0; d < dims[i]; d++)
				src[i][t * dims[i] + d] *=
					t % 7 == 3 + (size_t)i ? 0.f : ramp * (float)t;
		for (size_t e = 0; latent_gain && !i && e < n; e++)
			src[i][e] *= latent_gain > 1.f && e / dims[i] / KV_PAGE_TOKENS % 2
					     ? 0.f
					     : latent_gain;
	}
	kvt_paged_append(&w->f, src[0], src[1]);
	free(src[0]);
	free(src[1]);
}

/* The same batch, but only the last q_lens tokens ask. */
static void set_queries(struct world *w, const u32 *q_lens, u32 nr, u32 dk, u32 dv,
			u32 heads)
{
	u32 t;

	kvt_paged_ask(&w->f, q_lens, nr);
	t = w->f.batch.nr_tokens;
	w->nr_q = (size_t)t * heads * dk;
	w->nr_out = (size_t)t * heads * dv;
	w->q = malloc(w->nr_q * sizeof(float));
	w->ref = malloc(w->nr_out * sizeof(float));
	w->out = malloc(w->nr_out * sizeof(float));
	kvt_rng_fill(&w->g, w->q, w->nr_q, 1.0f);
	for (size_t i = 0; i < w->nr_q; i++) {
		w->q[i] = (float)kvt_bf16(kvt_to_bf16(w->q[i]));
		if (q_in_e4m3) /* a row's largest is 448 / 128 */
			w->q[i] = i % dk ? kvk_e4m3_decode(
						   kvk_e4m3_encode(w->q[i] * 128.f)) /
						   128.f
					 : 3.5f;
		if (latent_gain && i % dk < dv)
			w->q[i] = 0.f;
	}
}

static void upload(struct world *w, u32 heads, u32 layer)
{
	const struct kvk_batch *b = &w->f.batch;
	struct kvk_attn_args *a = &w->dev;
	u32 nr = b->nr_requests;

	memset(a, 0, sizeof(*a));
	a->pages = w->f.pages;
	a->pages.base = to_device(w, 0, w->f.pages.base, w->f.bytes);
	a->pages.scales = to_device(w, 1, w->f.scales, sizeof(w->f.scales));
	a->batch = *b;
	a->batch.rows =
		to_device(w, 2, b->rows, b->row_start[nr] * sizeof(struct kv_row));
	a->batch.row_start = to_device(w, 3, b->row_start, (nr + 1) * 4);
	a->batch.lengths = to_device(w, 4, b->lengths, nr * 4);
	a->batch.q_start = to_device(w, 5, b->q_start, (nr + 1) * 4);
	a->batch.verdicts = to_device(w, 6, b->verdicts, nr * sizeof(struct kv_verdict));
	a->batch.step = to_device(w, 7, b->step, 8);
	a->layer = layer;
	a->nr_q_heads = heads;
	a->sm_scale = 0.07f;
	a->act_dtype = KVK_F32;
	a->q = to_device(w, 8, w->q, w->nr_q * sizeof(float));
	a->out = to_device(w, 9, NULL, w->nr_out * sizeof(float));
	a->workspace_bytes = kvk_attn_workspace_cuda(a);
	CUDA_OK(cudaMalloc(&a->workspace, a->workspace_bytes + 16));
	if (gpu_poisoned())
		CUDA_OK(cudaMemset(a->workspace, 0xff, a->workspace_bytes + 16));
}

/* The next step: all requests pass its check as they did this one's. */
static inline void next_step(struct world *w)
{
	const u32 nr = w->f.batch.nr_requests;

	w->f.step++;
	for (u32 r = 0; r < nr; r++)
		w->f.verdicts[r].step = w->f.step;
	to_device(w, 6, w->f.verdicts, nr * sizeof(struct kv_verdict));
	to_device(w, 7, &w->f.step, 8);
}

static void run_device(struct world *w, u32 flags, bool prefill)
{
	struct kvk_attn_args a = w->dev;
	int r;

	a.flags |= flags;
	if (gpu_poisoned())
		CUDA_OK(cudaMemset(a.out, 0xff, w->nr_out * sizeof(float)));
	if (prefill)
		r = kvk_attn_prefill_cuda(&a, NULL);
	else
		r = a.pages.layout.kind == KV_LAYOUT_MLA ? kvk_attn_mla_cuda(&a, NULL)
							 : kvk_attn_gqa_cuda(&a, NULL);
	KVT_EXPECT_EQ(r, 0);
	CUDA_OK(cudaDeviceSynchronize());
	CUDA_OK(cudaMemcpy(w->out, a.out, w->nr_out * sizeof(float),
			   cudaMemcpyDeviceToHost));
}

static inline void run_host(struct world *w, u32 heads, u32 layer)
{
	struct kvk_attn_args a = w->dev;

	a.pages = w->f.pages;
	a.batch = w->f.batch;
	a.layer = layer;
	a.nr_q_heads = heads;
	a.q = w->q;
	a.out = w->ref;
	KVT_EXPECT_EQ(w->ops->attn_prefill(&a, NULL), 0);
}

static inline void world_init(struct world *w, const struct kv_layout *l, u32 heads,
			      u32 nr_pages, const u32 *lengths, const u32 *q_lens, u32 nr)
{
	bool mla = l->kind == KV_LAYOUT_MLA;
	int count = 0;

	if (cudaGetDeviceCount(&count) != cudaSuccess || !count)
		KVT_SKIP("no GPU");
	memset(w, 0, sizeof(*w));
	w->g.state = kvt_rand64();
	w->ops = kvk_host_ops();
	kvt_paged_init(&w->f, &w->g, l, nr_pages);
	fill_pages(w, lengths, nr);
	set_queries(w, q_lens, nr, mla ? l->latent_dim + l->rope_dim : l->head_dim,
		    mla ? l->latent_dim : l->head_dim, heads);
	upload(w, heads, l->nr_layers - 1);
}

static void world_fini(struct world *w)
{
	for (int i = 0; i < 10; i++)
		CUDA_OK(cudaFree(w->d[i]));
	CUDA_OK(cudaFree(w->dev.workspace));
	kvt_paged_fini(&w->f);
	free(w->q);
	free(w->ref);
	free(w->out);
}

static double rel_err(const float *a, const float *b, size_t n)
{
	double num = 0, den = 0;

	for (size_t i = 0; i < n; i++) {
		double d = (double)a[i] - b[i];

		if (!(fabs(d) <= 1e30))
			return 1e30;
		num += d * d;
		den += (double)b[i] * b[i];
	}
	return den > 0 ? sqrt(num / den) : num;
}

static inline void expect_close(struct world *w, const char *what, u32 a, u32 b,
				double limit)
{
	double err = rel_err(w->out, w->ref, w->nr_out);

	if (!(err <= limit))
		KVT_FAIL("%s %u/%u: error %.3g > %.3g", what, a, b, err, limit);
}

#endif /* TESTS_KERNELS_ATTN_WORLD_H */
