/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prefill_cuda.h - what the test programs of the prefill kernels share: a pool on both
 * sides, queries, runs on host and device, comparison. One thread.
 */
#ifndef TESTS_KERNELS_PREFILL_CUDA_H
#define TESTS_KERNELS_PREFILL_CUDA_H

#include "tests/kvt.h"
#include "cuda_common.h"
#include <cuda_runtime_api.h>
#include "kernels/attn_cuda.h"
#include "kernels/attn_expanded.h"

#define CUDA_OK(expr) KVT_EXPECT_EQ((int)(expr), 0)
#define SCALE	      0.07f
#define LIMIT	      2.6e-3 /* P and the output are rounded to bf16: 1.7e-3 each */
#define LIMIT_FP8     2e-3   /* P to f16, the output to bf16 */
#define ROW_LIMIT     8e-3   /* of any one row */

enum {
	PAGES,
	STATIC,
	ROWS,
	ROW_START,
	LENGTHS,
	Q_START,
	VERDICTS,
	STEP,
	QUERY,
	OUT,
	KV,
	ROPE,
	KV_START,
	NR_ARRAYS
};

/* One case: a pool on both sides, queries, outputs. */
struct world {
	struct kvt_rng g;
	struct kvt_paged f;
	const struct kvk_ops *ops;
	u16 *q16;
	float *q;   /* the same values */
	float *ref; /* host's answer */
	u16 *out16; /* device's */
	float *out;
	void *d[NR_ARRAYS];
	size_t room[NR_ARRAYS];
	struct kvk_attn_args dev;
	u32 heads;
	u32 dim;    /* of an output row */
	u32 dim_q;  /* ... of a query */
	u32 spread; /* tokens' values (latents) lie up to 2^spread apart */
	size_t nr_out;
};

static inline void *to_device(struct world *w, int i, const void *src, size_t bytes)
{
	if (bytes > w->room[i] || !w->d[i]) {
		CUDA_OK(cudaFree(w->d[i]));
		CUDA_OK(cudaMalloc(&w->d[i], bytes + 64));
		w->room[i] = bytes;
	}
	if (src)
		CUDA_OK(cudaMemcpy(w->d[i], src, bytes, cudaMemcpyHostToDevice));
	return w->d[i];
}

static inline bool no_gpu(void)
{
	int count = 0;

	return cudaGetDeviceCount(&count) != cudaSuccess || !count;
}

static inline void spread_tokens(struct world *w, float *x, u32 dim)
{
	for (u32 t = 0; t < w->f.batch.nr_tokens; t++) {
		float by = ldexpf(1, -(int)kvt_rng_below(&w->g, w->spread + 1));

		for (u32 i = 0; i < dim; i++)
			x[(size_t)t * dim + i] *= by;
	}
}

/* Append random values of all tokens through the host reference, layer by layer. */
static inline void fill_pages(struct world *w, const u32 *lengths, u32 nr)
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
		if (w->spread && i == !mla)
			spread_tokens(w, src[i], dims[i]);
	}
	kvt_paged_append(&w->f, src[0], src[1]);
	free(src[0]);
	free(src[1]);
}

/* Queries in bf16 for all tokens of a batch that is set up, and room for the answers. */
static inline void make_queries(struct world *w, u32 nr_tokens, u32 dq, u32 dv)
{
	size_t n = (size_t)nr_tokens * w->heads * dq;

	w->dim = dv;
	w->dim_q = dq;
	w->nr_out = (size_t)nr_tokens * w->heads * dv;
	w->q = malloc((n + 1) * sizeof(float));
	w->q16 = malloc((n + 1) * sizeof(u16));
	w->ref = malloc((w->nr_out + 1) * sizeof(float));
	w->out = malloc((w->nr_out + 1) * sizeof(float));
	w->out16 = malloc((w->nr_out + 1) * sizeof(u16));
	kvt_rng_fill(&w->g, w->q, n, 1.0f);
	for (size_t i = 0; i < n; i++) {
		w->q16[i] = kvt_to_bf16(w->q[i]);
		w->q[i] = (float)kvt_bf16(w->q16[i]);
	}
	to_device(w, QUERY, w->q16, n * sizeof(u16));
	to_device(w, OUT, NULL, w->nr_out * sizeof(u16));
}

static inline struct kvk_batch upload_batch(struct world *w)
{
	struct kvk_batch b = w->f.batch;
	u32 nr = b.nr_requests;

	b.rows = to_device(w, ROWS, b.rows, b.row_start[nr] * sizeof(struct kv_row));
	b.row_start = to_device(w, ROW_START, b.row_start, (nr + 1) * 4);
	b.lengths = to_device(w, LENGTHS, b.lengths, nr * 4);
	b.q_start = to_device(w, Q_START, b.q_start, (nr + 1) * 4);
	b.verdicts = to_device(w, VERDICTS, b.verdicts, nr * sizeof(struct kv_verdict));
	b.step = to_device(w, STEP, b.step, 8);
	return b;
}

static inline void upload(struct world *w, u32 layer)
{
	struct kvk_attn_args *a = &w->dev;

	memset(a, 0, sizeof(*a));
	a->pages = w->f.pages;
	a->pages.base = to_device(w, PAGES, w->f.pages.base, w->f.bytes);
	a->pages.scales = to_device(w, STATIC, w->f.scales, sizeof(w->f.scales));
	a->batch = upload_batch(w);
	a->layer = layer;
	a->nr_q_heads = w->heads;
	a->sm_scale = SCALE;
	a->act_dtype = KVK_BF16;
	a->q = w->d[QUERY];
	a->out = w->d[OUT];
}

static inline void fetch(struct world *w)
{
	CUDA_OK(cudaDeviceSynchronize());
	CUDA_OK(cudaMemcpy(w->out16, w->d[OUT], w->nr_out * sizeof(u16),
			   cudaMemcpyDeviceToHost));
	for (size_t i = 0; i < w->nr_out; i++)
		w->out[i] = (float)kvt_bf16(w->out16[i]);
}

/* No workspace: short chunks take the prefill kernel too. */
static inline void run_device(struct world *w)
{
	struct kvk_attn_args a = w->dev;

	if (gpu_poisoned())
		CUDA_OK(cudaMemset(a.out, 0xff, w->nr_out * sizeof(u16)));
	KVT_EXPECT_EQ(kvk_attn_prefill_cuda(&a, NULL), 0);
	fetch(w);
}

static inline void run_host(struct world *w)
{
	struct kvk_attn_args a = w->dev;

	a.pages = w->f.pages;
	a.batch = w->f.batch;
	a.act_dtype = KVK_F32;
	a.q = w->q;
	a.out = w->ref;
	KVT_EXPECT_EQ(w->ops->attn_prefill(&a, NULL), 0);
}

static inline void world_init_spread(struct world *w, const struct kv_layout *l,
				     u32 heads, const u32 *lengths, const u32 *q_lens,
				     u32 nr, u32 spread)
{
	u32 pages = 3;

	if (no_gpu())
		KVT_SKIP("no GPU");
	memset(w, 0, sizeof(*w));
	w->g.state = kvt_rand64();
	w->ops = kvk_host_ops();
	w->heads = heads;
	w->spread = spread;
	for (u32 r = 0; r < nr; r++)
		pages += (lengths[r] + 63) / 64;
	kvt_paged_init(&w->f, &w->g, l, pages);
	fill_pages(w, lengths, nr);
	kvt_paged_ask(&w->f, q_lens, nr);
	if (l->kind == KV_LAYOUT_MLA)
		make_queries(w, w->f.batch.nr_tokens, l->latent_dim + l->rope_dim,
			     l->latent_dim);
	else
		make_queries(w, w->f.batch.nr_tokens, l->head_dim, l->head_dim);
	upload(w, l->nr_layers - 1);
}

static inline void world_init(struct world *w, const struct kv_layout *l, u32 heads,
			      const u32 *lengths, const u32 *q_lens, u32 nr)
{
	world_init_spread(w, l, heads, lengths, q_lens, nr, 0);
}

static inline void world_fini(struct world *w)
{
	for (int i = 0; i < NR_ARRAYS; i++)
		CUDA_OK(cudaFree(w->d[i]));
	if (w->f.pages.base)
		kvt_paged_fini(&w->f);
	free(w->q);
	free(w->q16);
	free(w->ref);
	free(w->out);
	free(w->out16);
}

static inline double rel_err(const float *a, const float *b, size_t n)
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

/* The whole output, and every row of it. */
static inline void expect_close(struct world *w, const char *what, u32 a, u32 b)
{
	double limit = w->f.pages.layout.dtype == KV_DTYPE_E4M3 ? LIMIT_FP8 : LIMIT;
	double err = rel_err(w->out, w->ref, w->nr_out);
	size_t nr_rows = w->nr_out / w->dim, bad = 0;

	for (size_t i = 0; i < nr_rows; i++) {
		double e = rel_err(w->out + i * w->dim, w->ref + i * w->dim, w->dim);

		if (!(e <= ROW_LIMIT) && !bad++)
			KVT_NOTE("%s %u/%u: token %zu head %zu: error %.3g", what, a, b,
				 i / w->heads, i % w->heads, e);
	}
	if (!(err <= limit) || bad)
		KVT_FAIL("%s %u/%u: error %.3g, %zu of %zu rows wrong", what, a, b, err,
			 bad, nr_rows);
}

static inline struct kv_layout bf16_layout(u32 nr_layers, u32 kv_heads, u32 head_dim)
{
	return kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, nr_layers, kv_heads,
			      head_dim);
}

/* Values of a request's tokens in the flat output. */
static inline void mark_failed(struct world *w, u32 bad)
{
	size_t per = (size_t)w->heads * w->dim;
	size_t at = w->f.q_start[bad] * per, n = w->f.q_start[bad + 1] * per - at;

	KVT_EXPECT_EQ(kvt_nr_finite(w->out + at, n), 0);
	memcpy(w->out + at, w->ref + at, n * sizeof(float));
}

#endif /* TESTS_KERNELS_PREFILL_CUDA_H */
