/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_ref.c - the host's attention and append: against float64, batch invariance, tails.
 */
#include <omp.h>
#include "tests/kvt.h"
#include "common.h"

#define NR_PAGES 96u

static const u32 lengths_mixed[] = {1, 63, 64, 65, 1000, 130, 7, 0};
#define NR_MIXED KV_ARRAY_SIZE(lengths_mixed)

/* Everything of one case. Prefill appends whole sequences, then decode asks for the last
 * ones. */
struct world {
	struct kvt_rng g;
	struct kvt_paged f;
	const struct kvk_ops *ops;
	float *src[2]; /* latent, rope or k, v of all tokens */
	float *q;
	float *out;
	u32 nr_heads;
	u32 dk;
	u32 dv;
	u32 nr_tokens;
};

static void world_append(struct world *w, u32 layer)
{
	struct kvk_append_args a = {.pages = w->f.pages,
				    .batch = w->f.batch,
				    .layer = layer,
				    .src_dtype = KVK_F32,
				    .latent = w->src[0],
				    .rope = w->src[1],
				    .k = w->src[0],
				    .v = w->src[1]};

	KVT_EXPECT_EQ(w->ops->append(&a, NULL), 0);
}

static int world_attn(struct world *w, u32 layer, bool prefill, const float *q,
		      float *out)
{
	struct kvk_attn_args a = {.pages = w->f.pages,
				  .batch = w->f.batch,
				  .layer = layer,
				  .nr_q_heads = w->nr_heads,
				  .sm_scale = 0.07f,
				  .act_dtype = KVK_F32,
				  .q = q,
				  .out = out};

	if (prefill)
		return w->ops->attn_prefill(&a, NULL);
	return w->f.pages.layout.kind == KV_LAYOUT_MLA ? w->ops->attn_mla(&a, NULL)
						       : w->ops->attn_gqa(&a, NULL);
}

static void world_init(struct world *w, const struct kv_layout *l, u32 nr_heads)
{
	u32 dims[2];

	memset(w, 0, sizeof(*w));
	w->g.state = kvt_rand64();
	w->ops = kvk_host_ops();
	kvt_paged_init(&w->f, &w->g, l, NR_PAGES);
	kvt_paged_batch(&w->f, &w->g, lengths_mixed, lengths_mixed, NR_MIXED);
	w->nr_heads = nr_heads;
	w->nr_tokens = w->f.batch.nr_tokens;
	dims[0] = l->kind == KV_LAYOUT_MLA ? l->latent_dim : l->nr_kv_heads * l->head_dim;
	dims[1] = l->kind == KV_LAYOUT_MLA ? l->rope_dim : dims[0];
	w->dk = l->kind == KV_LAYOUT_MLA ? l->latent_dim + l->rope_dim : l->head_dim;
	w->dv = l->kind == KV_LAYOUT_MLA ? l->latent_dim : l->head_dim;
	for (int i = 0; i < 2; i++) {
		w->src[i] = malloc((size_t)w->nr_tokens * dims[i] * sizeof(float));
		kvt_rng_fill(&w->g, w->src[i], (size_t)w->nr_tokens * dims[i], 1.5f);
	}
	w->q = malloc((size_t)w->nr_tokens * nr_heads * w->dk * sizeof(float));
	w->out = malloc((size_t)w->nr_tokens * nr_heads * w->dv * sizeof(float));
	kvt_rng_fill(&w->g, w->q, (size_t)w->nr_tokens * nr_heads * w->dk, 1.0f);
	memset(w->out, 0xff, (size_t)w->nr_tokens * nr_heads * w->dv * sizeof(float));
	for (u32 layer = 0; layer < l->nr_layers; layer++)
		world_append(w, layer);
}

static void world_fini(struct world *w)
{
	free(w->src[0]);
	free(w->src[1]);
	free(w->q);
	free(w->out);
	kvt_paged_fini(&w->f);
}

/* Some rows of a step's output against float64; all for short requests. */
static double world_error(const struct world *w, u32 layer, const float *q,
			  const float *out)
{
	u32 group = w->f.pages.layout.kind == KV_LAYOUT_MLA
			    ? w->nr_heads
			    : w->nr_heads / w->f.pages.layout.nr_kv_heads;
	double worst = 0;

	for (u32 r = 0; r < w->f.batch.nr_requests; r++) {
		u32 q_len = w->f.q_start[r + 1] - w->f.q_start[r];

		for (u32 t = 0; t<q_len; t += q_len> 70 ? 61 : 13) {
			u32 h = (r * 5 + t) % w->nr_heads, head = h / group;
			size_t row = (size_t)(w->f.q_start[r] + t) * w->nr_heads + h;
			u32 sees = w->f.lengths[r] - q_len + t + 1;
			bool mla = w->f.pages.layout.kind == KV_LAYOUT_MLA;
			double truth[512], d;

			kvt_attn_truth(&w->f, r, layer, mla ? 0 : head * 2,
				       mla ? 0 : head * 2 + 1, sees, q + row * w->dk,
				       0.07f, truth);
			d = kvt_max_diff(out + row * w->dv, truth, w->dv);
			if (isnan(d))
				KVT_FAIL("NaN in request %u token %u head %u", r, t, h);
			worst = d > worst ? d : worst;
		}
	}
	return worst;
}

static void check_layout(const struct kv_layout *l, u32 nr_heads)
{
	struct world w;
	double e;

	world_init(&w, l, nr_heads);
	for (u32 layer = 0; layer < l->nr_layers; layer++) {
		KVT_EXPECT_EQ(world_attn(&w, layer, true, w.q, w.out), 0);
		e = world_error(&w, layer, w.q, w.out);
		KVT_NOTE("kind %u dtype %u scales %u layer %u heads %u: error %.2e",
			 l->kind, l->dtype, l->scale_kind, layer, nr_heads, e);
		/* 1000 weighted values of size 1.5 in f32 */
		KVT_EXPECT_LE(e, 2e-5);
	}
	world_fini(&w);
}

KVT_TEST(mla_against_float64)
{
	struct kv_layout l[] = {kvt_layout_mla(KV_DTYPE_F32, KV_SCALE_NONE, 1),
				kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1),
				kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2),
				kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_STATIC, 2)};
	u32 heads[] = {8, 1, 5, 16};

	for (size_t i = 0; i < KV_ARRAY_SIZE(l); i++)
		check_layout(&l[i], heads[i]);
}

KVT_TEST(gqa_against_float64)
{
	struct kv_layout l[] = {kvt_layout_gqa(KV_DTYPE_F32, KV_SCALE_NONE, 1, 2, 128),
				kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 1, 3, 64),
				kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 2, 128),
				kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_STATIC, 2, 3, 64),
				kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 1, 1, 128)};
	u32 heads[] = {8, 9, 32, 3, 7};

	for (size_t i = 0; i < KV_ARRAY_SIZE(l); i++)
		check_layout(&l[i], heads[i]);
}

/* The same tokens asked one step later, in other batches, chunks, threads and places. */
static void check_invariance(const struct kv_layout *l, u32 nr_heads)
{
	u32 q_lens[NR_MIXED], lens[NR_MIXED];
	struct world w;
	float *out;
	size_t row_bytes;

	world_init(&w, l, nr_heads);
	row_bytes = (size_t)nr_heads * w.dv * sizeof(float);
	out = malloc(w.nr_tokens * row_bytes);
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, w.out), 0);
	omp_set_num_threads(1);
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, out), 0);
	KVT_EXPECT(!memcmp(out, w.out, w.nr_tokens * row_bytes));
	for (int round = 0; round < 6; round++) {
		u32 at = 0, full_start[NR_MIXED];
		float *q = malloc((size_t)w.nr_tokens * nr_heads * w.dk * sizeof(float));
		struct kvk_batch whole = w.f.batch;
		u32 q_start[NR_MIXED + 1] = {0};

		omp_set_num_threads(1 + round % 3);
		for (u32 r = 0; r < NR_MIXED; r++) {
			full_start[r] = at;
			at += lengths_mixed[r];
			lens[r] = lengths_mixed[r] ? 1 + kvt_rand_below(lengths_mixed[r])
						   : 0;
			q_lens[r] =
				round < 3 ? 1 + kvt_rand_below(4) : kvt_rand_below(200);
			q_lens[r] = KV_MIN(q_lens[r], lens[r]);
			w.f.lengths[r] = lens[r];
			w.f.verdicts[r].rows_checked =
				w.f.row_start[r + 1] - w.f.row_start[r];
			q_start[r + 1] = q_start[r] + q_lens[r];
			memcpy(q + (size_t)q_start[r] * nr_heads * w.dk,
			       w.q + (size_t)(full_start[r] + lens[r] - q_lens[r]) *
					       nr_heads * w.dk,
			       (size_t)q_lens[r] * nr_heads * w.dk * sizeof(float));
		}
		w.f.batch.q_start = q_start;
		w.f.batch.nr_tokens = q_start[NR_MIXED];
		memset(out, 0xff, w.nr_tokens * row_bytes);
		KVT_EXPECT_EQ(world_attn(&w, 0, round >= 3, q, out), 0);
		for (u32 r = 0; r < NR_MIXED; r++)
			KVT_EXPECT(!memcmp((u8 *)out + q_start[r] * row_bytes,
					   (u8 *)w.out +
						   (full_start[r] + lens[r] - q_lens[r]) *
							   row_bytes,
					   q_lens[r] * row_bytes));
		w.f.batch = whole;
		free(q);
	}
	free(out);
	world_fini(&w);
}

KVT_TEST(batch_invariance_mla)
{
	struct kv_layout fp8 = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
	struct kv_layout f32 = kvt_layout_mla(KV_DTYPE_F32, KV_SCALE_NONE, 1);

	check_invariance(&fp8, 8);
	check_invariance(&f32, 3);
}

KVT_TEST(batch_invariance_gqa)
{
	struct kv_layout fp8 = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 2, 128);
	struct kv_layout bf16 = kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 1, 2, 64);

	check_invariance(&fp8, 8);
	check_invariance(&bf16, 6);
}

KVT_TEST(page_placement_does_not_matter)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
	struct kvt_rng g;
	struct world w;
	float *first;
	size_t bytes;

	world_init(&w, &l, 8);
	bytes = (size_t)w.nr_tokens * 8 * w.dv * sizeof(float);
	first = malloc(bytes);
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, first), 0);
	g.state = w.g.state + 99;
	memset(w.f.pages.base, 0xff, w.f.bytes);
	kvt_paged_batch(&w.f, &g, lengths_mixed, lengths_mixed, NR_MIXED);
	world_append(&w, 0);
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, w.out), 0);
	KVT_EXPECT(!memcmp(first, w.out, bytes));
	free(first);
	world_fini(&w);
}

KVT_TEST(pages_shared_by_many_requests)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);
	u32 lens[16], ones[16];
	struct world w;

	world_init(&w, &l, 4);
	for (u32 r = 0; r < 16; r++) {
		lens[r] = 640;
		ones[r] = 1;
	}
	/* rows of all requests are those of request 4 (1000 tokens) from now on */
	{
		struct kv_row shared[10];

		memcpy(shared, w.f.rows + w.f.row_start[4], sizeof(shared));
		w.f.pages.geometry.nr_pages = NR_PAGES * 2; /* only to draw 160 pfns */
		kvt_paged_batch(&w.f, &w.g, lens, ones, 16);
		w.f.pages.geometry.nr_pages = NR_PAGES;
		for (u32 r = 0; r < 16; r++)
			memcpy(w.f.rows + w.f.row_start[r], shared, sizeof(shared));
	}
	KVT_EXPECT_EQ(world_attn(&w, 0, false, w.q, w.out), 0);
	KVT_EXPECT_LE(world_error(&w, 0, w.q, w.out), 2e-5);
	world_fini(&w);
}

KVT_TEST(o34_poisoned_tail_stays_finite)
{
	struct kv_layout l[] = {kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1),
				kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1),
				kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 1, 64)};
	u32 three = 3;

	for (size_t i = 0; i < KV_ARRAY_SIZE(l); i++) {
		struct world w;

		world_init(&w, &l[i], 2);
		/* page bytes are 0xff (NaN) wherever append did not write */
		memset(w.f.pages.base, 0xff, w.f.bytes);
		kvt_paged_batch(&w.f, &w.g, &three, &three, 1);
		world_append(&w, 0);
		KVT_EXPECT_EQ(
			kvt_paged_part(&w.f, 0, 0,
				       0)[3 * (i == 2 ? 64 : 512) * (i == 1 ? 2 : 1)],
			0xff);
		KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, w.out), 0);
		KVT_EXPECT_EQ(kvt_nr_finite(w.out, 3ull * 2 * w.dv), 3ull * 2 * w.dv);
		KVT_EXPECT_EQ(world_attn(&w, 0, false, w.q, w.out), 0);
		KVT_EXPECT_EQ(kvt_nr_finite(w.out, 3ull * 2 * w.dv), 3ull * 2 * w.dv);
		world_fini(&w);
	}
}

/* A NaN at a later position of the same page must not reach an earlier token. */
KVT_TEST(nan_stays_in_its_future)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_F32, KV_SCALE_NONE, 1);
	u32 len = 40;
	struct world w;

	world_init(&w, &l, 4);
	kvt_paged_batch(&w.f, &w.g, &len, &len, 1);
	w.src[0][20 * 512 + 3] = NAN;
	world_append(&w, 0);
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, w.out), 0);
	KVT_EXPECT_EQ(kvt_nr_finite(w.out, 20ull * 4 * 512), 20ull * 4 * 512);
	KVT_EXPECT_EQ(kvt_nr_finite(w.out + 20ull * 4 * 512, 20ull * 4 * 512), 0);
	world_fini(&w);
}

KVT_TEST(failed_request_is_nan_and_its_neighbours_are_not_disturbed)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 2, 64);
	struct world w;
	float *good;
	size_t bytes;

	world_init(&w, &l, 4);
	bytes = (size_t)w.nr_tokens * 4 * w.dv * sizeof(float);
	good = malloc(bytes);
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, good), 0);
	for (u32 r = 0; r < 7; r++) {
		struct kv_verdict keep = w.f.verdicts[r];
		u64 per_token = 4ull * w.dv;

		switch (r % 3) {
		case 0:
			w.f.verdicts[r].bits = KV_BAD_GEN;
			break;
		case 1:
			w.f.verdicts[r].step--;
			break;
		default:
			w.f.verdicts[r].rows_checked--;
		}
		memset(w.out, 0, bytes);
		KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, w.out), 0);
		KVT_EXPECT_EQ(
			kvt_nr_finite(w.out + w.f.q_start[r] * per_token,
				      (w.f.q_start[r + 1] - w.f.q_start[r]) * per_token),
			0);
		for (u32 i = 0; i < NR_MIXED; i++)
			if (i != r)
				KVT_EXPECT(!memcmp(w.out + w.f.q_start[i] * per_token,
						   good + w.f.q_start[i] * per_token,
						   (w.f.q_start[i + 1] - w.f.q_start[i]) *
							   per_token * sizeof(float)));
		w.f.verdicts[r] = keep;
	}
	free(good);
	world_fini(&w);
}

KVT_TEST(bf16_activations)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);
	struct world w;
	u16 *q, *out;
	size_t nq, no;

	world_init(&w, &l, 3);
	nq = (size_t)w.nr_tokens * 3 * w.dk;
	no = (size_t)w.nr_tokens * 3 * w.dv;
	q = malloc(nq * 2);
	out = malloc(no * 2);
	for (size_t i = 0; i < nq; i++) {
		q[i] = kvt_to_bf16(w.q[i]);
		w.q[i] = (float)kvt_bf16(q[i]);
	}
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, w.out), 0);
	{
		struct kvk_attn_args a = {.pages = w.f.pages,
					  .batch = w.f.batch,
					  .nr_q_heads = 3,
					  .sm_scale = 0.07f,
					  .act_dtype = KVK_BF16,
					  .q = q,
					  .out = out};

		KVT_EXPECT_EQ(w.ops->attn_prefill(&a, NULL), 0);
	}
	for (size_t i = 0; i < no; i++)
		KVT_EXPECT_EQ(out[i], kvt_to_bf16(w.out[i]));
	free(q);
	free(out);
	world_fini(&w);
}

KVT_TEST(shapes_that_are_not_built_are_refused)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 1, 3, 64);
	struct world w;

	world_init(&w, &l, 6);
	KVT_EXPECT_EQ(world_attn(&w, 1, true, w.q, w.out), -EINVAL); /* no such layer */
	KVT_EXPECT_EQ(world_attn(&w, 0, false, w.q, w.out),
		      -EINVAL); /* decode of 1000 tokens */
	KVT_EXPECT_EQ(world_attn(&w, 0, true, NULL, w.out), -EINVAL);
	w.nr_heads = 7; /* not a multiple of 3 */
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, w.out), -EINVAL);
	w.nr_heads = 6;
	w.f.pages.layout.scale_kind = KV_SCALE_TOKEN; /* BF16 has none */
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, w.out), -EINVAL);
	w.f.pages.layout.scale_kind = KV_SCALE_NONE;
	w.f.batch.verdicts = NULL;
	KVT_EXPECT_EQ(world_attn(&w, 0, true, w.q, w.out), -EINVAL);
	world_fini(&w);
}

KVT_MAIN()
