/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prefill_cuda.c - the prefill kernel with BF16 activations against the host reference
 * (pages) and float64 (expanded MLA): odd shapes, poisoned tails and outputs, chunking,
 * failed verdicts, bit-equal reruns.
 */
#include "tests/kvt.h"
#include "common.h"

#ifdef CONFIG_CUDA
#include <cuda_runtime_api.h>
#include "kernels/attn_cuda.h"
#include "kernels/attn_expanded.h"

#define CUDA_OK(expr) KVT_EXPECT_EQ((int)(expr), 0)
#define SCALE	      0.07f
#define LIMIT	      2.6e-3 /* P and the output are rounded to bf16: 1.7e-3 each */
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
	u32 dim;
	size_t nr_out;
};

static void *to_device(struct world *w, int i, const void *src, size_t bytes)
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

static bool no_gpu(void)
{
	int count = 0;

	return cudaGetDeviceCount(&count) != cudaSuccess || !count;
}

/* Append random values of all tokens through the host reference, layer by layer. */
static void fill_pages(struct world *w, const u32 *lengths, u32 nr)
{
	const struct kv_layout *l = &w->f.pages.layout;
	struct kvk_append_args a = {.src_dtype = KVK_F32};
	float *src[2];
	size_t n;

	kvt_paged_batch(&w->f, &w->g, lengths, lengths, nr);
	n = (size_t)w->f.batch.nr_tokens * l->nr_kv_heads * l->head_dim;
	for (int i = 0; i < 2; i++) {
		src[i] = malloc((n + 1) * sizeof(float));
		kvt_rng_fill(&w->g, src[i], n, i ? 0.6f : 1.5f);
	}
	a.pages = w->f.pages;
	a.batch = w->f.batch;
	a.k = src[0];
	a.v = src[1];
	for (a.layer = 0; a.layer < l->nr_layers; a.layer++)
		KVT_EXPECT_EQ(w->ops->append(&a, NULL), 0);
	free(src[0]);
	free(src[1]);
}

/* Queries in bf16 for all tokens of a batch that is set up, and room for the answers. */
static void make_queries(struct world *w, u32 nr_tokens, u32 dq, u32 dv)
{
	size_t n = (size_t)nr_tokens * w->heads * dq;

	w->dim = dv;
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

static void set_q_lens(struct world *w, const u32 *q_lens, u32 nr)
{
	u32 most = 0;

	w->f.q_start[0] = 0;
	for (u32 r = 0; r < nr; r++) {
		w->f.q_start[r + 1] = w->f.q_start[r] + q_lens[r];
		most = KV_MAX(most, q_lens[r]);
	}
	w->f.batch.q_start = w->f.q_start;
	w->f.batch.nr_tokens = w->f.q_start[nr];
	w->f.batch.q_len_max = most;
}

static struct kvk_batch upload_batch(struct world *w)
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

static void upload(struct world *w, u32 layer)
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

static void fetch(struct world *w)
{
	CUDA_OK(cudaDeviceSynchronize());
	CUDA_OK(cudaMemcpy(w->out16, w->d[OUT], w->nr_out * sizeof(u16),
			   cudaMemcpyDeviceToHost));
	for (size_t i = 0; i < w->nr_out; i++)
		w->out[i] = (float)kvt_bf16(w->out16[i]);
}

/* No workspace: short chunks take the prefill kernel too. */
static void run_device(struct world *w)
{
	struct kvk_attn_args a = w->dev;

	CUDA_OK(cudaMemset(a.out, 0xff, w->nr_out * sizeof(u16)));
	KVT_EXPECT_EQ(kvk_attn_prefill_cuda(&a, NULL), 0);
	fetch(w);
}

static void run_host(struct world *w)
{
	struct kvk_attn_args a = w->dev;

	a.pages = w->f.pages;
	a.batch = w->f.batch;
	a.act_dtype = KVK_F32;
	a.q = w->q;
	a.out = w->ref;
	KVT_EXPECT_EQ(w->ops->attn_prefill(&a, NULL), 0);
}

static void world_init(struct world *w, const struct kv_layout *l, u32 heads,
		       const u32 *lengths, const u32 *q_lens, u32 nr)
{
	u32 pages = 3;

	if (no_gpu())
		KVT_SKIP("no GPU");
	memset(w, 0, sizeof(*w));
	w->g.state = kvt_rand64();
	w->ops = kvk_host_ops();
	w->heads = heads;
	for (u32 r = 0; r < nr; r++)
		pages += (lengths[r] + 63) / 64;
	kvt_paged_init(&w->f, &w->g, l, pages);
	fill_pages(w, lengths, nr);
	set_q_lens(w, q_lens, nr);
	make_queries(w, w->f.batch.nr_tokens, l->head_dim, l->head_dim);
	upload(w, l->nr_layers - 1);
}

static void world_fini(struct world *w)
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

/* The whole output, and every row of it. */
static void expect_close(struct world *w, const char *what, u32 a, u32 b)
{
	double err = rel_err(w->out, w->ref, w->nr_out);
	size_t nr_rows = w->nr_out / w->dim, bad = 0;

	for (size_t i = 0; i < nr_rows; i++) {
		double e = rel_err(w->out + i * w->dim, w->ref + i * w->dim, w->dim);

		if (!(e <= ROW_LIMIT) && !bad++)
			KVT_NOTE("%s %u/%u: token %zu head %zu: error %.3g", what, a, b,
				 i / w->heads, i % w->heads, e);
	}
	if (!(err <= LIMIT) || bad)
		KVT_FAIL("%s %u/%u: error %.3g, %zu of %zu rows wrong", what, a, b, err,
			 bad, nr_rows);
}

static struct kv_layout bf16_layout(u32 nr_layers, u32 kv_heads, u32 head_dim)
{
	return kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, nr_layers, kv_heads,
			      head_dim);
}

static void check(const struct kv_layout *l, u32 heads, const u32 *lengths,
		  const u32 *q_lens, u32 nr)
{
	struct world w;

	world_init(&w, l, heads, lengths, q_lens, nr);
	run_host(&w);
	run_device(&w);
	expect_close(&w, "heads/kv heads", heads, l->nr_kv_heads);
	world_fini(&w);
}

KVT_TEST_T(small_prompts_match_the_reference, 20)
{
	static const u32 lengths[] = {128, 64, 7, 129, 300};
	struct kv_layout l = bf16_layout(1, 1, 128);

	for (u32 i = 0; i < KV_ARRAY_SIZE(lengths); i++)
		check(&l, 1, lengths + i, lengths + i, 1);
}

static const u32 lengths_mixed[] = {1, 63, 64, 65, 1000, 130, 7, 5, 449, 2};
static const u32 q_some[] = {1, 5, 64, 2, 300, 130, 0, 1, 17, 2};
#define NR_MIXED KV_ARRAY_SIZE(lengths_mixed)

KVT_TEST_T(odd_shapes_match_the_reference, 120)
{
	static const u32 shapes[][2] = {{96, 8}, {12, 1}, {8, 2},  {8, 1},
					{5, 5},	 {48, 3}, {32, 2}, {7, 1}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(shapes); i++)
		for (u32 hd = 64; hd <= 128; hd += 64) {
			struct kv_layout l = bf16_layout(2, shapes[i][1], hd);

			if (i < 2) /* what the host can do in a second or two */
				check(&l, shapes[i][0], lengths_mixed, q_some, NR_MIXED);
			else
				check(&l, shapes[i][0], lengths_mixed, lengths_mixed,
				      NR_MIXED);
		}
}

KVT_TEST_T(fp8_pages_match_the_reference, 120)
{
	static const u32 shapes[][2] = {{12, 1}, {96, 8}, {8, 2}, {5, 5}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(shapes); i++)
		for (u32 k = 0; k < 4; k++) {
			u32 hd = k % 2 ? 64 : 128;
			u32 scales = k / 2 ? KV_SCALE_STATIC : KV_SCALE_TOKEN;
			struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, scales, 2,
							    shapes[i][1], hd);

			check(&l, shapes[i][0], lengths_mixed,
			      i % 2 ? q_some : lengths_mixed, NR_MIXED);
		}
}

KVT_TEST_T(long_prefixes_match_the_reference, 120)
{
	static const u32 lengths[] = {131072, 5000, 4097}, q[] = {20, 150, 33};
	struct kv_layout l = bf16_layout(1, 1, 128);

	check(&l, 12, lengths, q, 3);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 1, 128);
	check(&l, 12, lengths, q, 3);
}

/* More requests than a launch takes. */
KVT_TEST_T(many_requests_match_the_reference, 60)
{
	struct kv_layout l = bf16_layout(1, 2, 128);
	u32 lengths[200], q[200];

	for (u32 i = 0; i < 200; i++) {
		lengths[i] = 1 + kvt_rand_below(150);
		q[i] = 1 + kvt_rand_below(lengths[i]);
	}
	check(&l, 8, lengths, q, 200);
}

/* The same tokens in chunks: the bits of one go. */
static void check_chunks(const struct kv_layout *l)
{
	static const u32 length = 1100, chunks[] = {1, 37, 128, 200, 64, 300, 250, 120};
	struct world w;
	u16 *whole;
	u32 done = 0;

	world_init(&w, l, 8, &length, &length, 1);
	run_device(&w);
	whole = malloc(w.nr_out * sizeof(u16));
	memcpy(whole, w.out16, w.nr_out * sizeof(u16));
	for (u32 i = 0; i < KV_ARRAY_SIZE(chunks); i++) {
		size_t at = (size_t)done * 8 * 128;

		done += chunks[i];
		w.f.lengths[0] = done;
		set_q_lens(&w, chunks + i, 1);
		w.dev.batch = upload_batch(&w);
		w.dev.q = (u16 *)w.d[QUERY] + at;
		run_device(&w);
		KVT_EXPECT(!memcmp(w.out16, whole + at, (size_t)chunks[i] * 8 * 128 * 2));
	}
	KVT_EXPECT_EQ(done, length);
	free(whole);
	world_fini(&w);
}

KVT_TEST_T(chunking_changes_no_bit, 60)
{
	struct kv_layout l = bf16_layout(1, 2, 128);

	check_chunks(&l);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 2, 128);
	check_chunks(&l);
}

static void check_reruns(const struct kv_layout *l)
{
	struct world w;
	u16 *first;

	world_init(&w, l, 96, lengths_mixed, q_some, NR_MIXED);
	run_device(&w);
	first = malloc(w.nr_out * sizeof(u16));
	memcpy(first, w.out16, w.nr_out * sizeof(u16));
	for (int i = 0; i < 20; i++) {
		run_device(&w);
		KVT_EXPECT(!memcmp(first, w.out16, w.nr_out * sizeof(u16)));
	}
	free(first);
	world_fini(&w);
}

KVT_TEST_T(prefill_reruns_are_bit_equal, 60)
{
	struct kv_layout l = bf16_layout(2, 8, 128);

	check_reruns(&l);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 8, 128);
	check_reruns(&l);
}

/* Values of a request's tokens in the flat output. */
static void mark_failed(struct world *w, u32 bad)
{
	size_t per = (size_t)w->heads * w->dim;
	size_t at = w->f.q_start[bad] * per, n = w->f.q_start[bad + 1] * per - at;

	KVT_EXPECT_EQ(kvt_nr_finite(w->out + at, n), 0);
	memcpy(w->out + at, w->ref + at, n * sizeof(float));
}

KVT_TEST_T(failed_prefill_gives_nan_and_disturbs_nobody, 60)
{
	static const u32 fails[] = {4, 0, 9, 5};
	struct kv_layout l[2] = {
		bf16_layout(1, 2, 128),
		kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 2, 128)};
	struct world w;

	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(fails); i++) {
		u32 bad = fails[i / 2];

		world_init(&w, &l[i % 2], 8, lengths_mixed, q_some, NR_MIXED);
		run_host(&w);
		if (i / 2 % 2) {
			w.f.verdicts[bad].bits = KV_BAD_GEN;
			w.f.rows[w.f.batch.row_start[bad]].pfn = 0x7fffffff;
		} else {
			w.f.verdicts[bad].step++; /* of another step */
		}
		w.dev.batch = upload_batch(&w);
		run_device(&w);
		mark_failed(&w, bad);
		expect_close(&w, "beside a failed request", 8, bad);
		world_fini(&w);
	}
}

/* ------------------------------------------------------------------------- expanded MLA
 */

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
KVT_TEST(prefill_on_the_gpu)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif /* CONFIG_CUDA */

KVT_MAIN()
