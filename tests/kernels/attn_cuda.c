/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_cuda.c - the CUDA attention kernels against the host reference: odd shapes, drafts,
 * NaN-poisoned tails and outputs, shared pages, failed verdicts, bit-equal reruns. How the parts
 * of a cut unit are merged is in attn_split_cuda.c.
 */
#include "tests/kvt.h"
#include "common.h"

#ifdef CONFIG_CUDA
#include "attn_world.h"

static const u32 lengths_mixed[] = {1, 63, 64, 65, 1000, 130, 7, 4, 449, 2};
static const u32 q_mixed[] = {1, 4, 2, 3, 1, 4, 0, 4, 1, 2};
static const u32 q_ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
#define NR_MIXED    KV_ARRAY_SIZE(lengths_mixed)
#define PAGES_MIXED 64u

static const struct {
	u32 dtype;
	u32 scale_kind;
	double limit;
} formats[] = {{KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1e-3},
	       {KV_DTYPE_E4M3, KV_SCALE_STATIC, 1e-3},
	       {KV_DTYPE_BF16, KV_SCALE_NONE, 1e-3}};

static void check_shape(const struct kv_layout *l, u32 heads, const u32 *q_lens,
			double limit)
{
	struct world w;

	world_init(&w, l, heads, PAGES_MIXED, lengths_mixed, q_lens, NR_MIXED);
	run_device(&w, 0, false);
	run_host(&w, heads, l->nr_layers - 1);
	expect_close(&w,
		     l->kind == KV_LAYOUT_MLA ? "mla heads/dtype" : "gqa heads/kv heads",
		     heads, l->kind == KV_LAYOUT_MLA ? l->dtype : l->nr_kv_heads, limit);
	world_fini(&w);
}

KVT_TEST_T(gqa_odd_shapes_match_the_reference, 120)
{
	static const u32 shapes[][2] = {{96, 8}, {64, 8}, {32, 4}, {12, 1}, {8, 2},
					{8, 1},	 {5, 5},  {48, 3}, {6, 6}};

	for (u32 f = 0; f < KV_ARRAY_SIZE(formats); f++)
		for (u32 i = 0; i < KV_ARRAY_SIZE(shapes); i++)
			for (u32 hd = 64; hd <= 128; hd += 64) {
				struct kv_layout l = kvt_layout_gqa(formats[f].dtype,
								    formats[f].scale_kind,
								    2, shapes[i][1], hd);

				check_shape(&l, shapes[i][0], i % 2 ? q_mixed : q_ones,
					    formats[f].limit);
				check_shape(&l, shapes[i][0], i % 2 ? q_ones : q_mixed,
					    formats[f].limit);
			}
}

KVT_TEST_T(mla_odd_shapes_match_the_reference, 120)
{
	static const u32 heads[] = {8, 1, 5, 16, 20, 32, 64, 100, 128};

	for (u32 f = 0; f < KV_ARRAY_SIZE(formats); f++)
		for (u32 i = 0; i < KV_ARRAY_SIZE(heads); i++) {
			struct kv_layout l = kvt_layout_mla(formats[f].dtype,
							    formats[f].scale_kind, 2);

			check_shape(&l, heads[i], q_ones, formats[f].limit);
			if (i % 3 == 0)
				check_shape(&l, heads[i], q_mixed, formats[f].limit);
		}
}

/* KVK_ATTN_FAST: P in 8 bits on BF16 pages, the latent part of Q in 4 on FP8 pages. */
KVT_TEST_T(mla_fast_stays_within_its_bound, 120)
{
	static const u32 heads[] = {32, 64, 100, 128};

	for (u32 f = 0; f < KV_ARRAY_SIZE(formats); f++)
		for (u32 i = 0; i < KV_ARRAY_SIZE(heads); i++) {
			const bool fp8 = formats[f].dtype == KV_DTYPE_E4M3;
			struct kv_layout l = kvt_layout_mla(formats[f].dtype,
							    formats[f].scale_kind, 2);
			struct world w;

			world_init(&w, &l, heads[i], PAGES_MIXED, lengths_mixed,
				   i % 2 ? q_mixed : q_ones, NR_MIXED);
			run_host(&w, heads[i], l.nr_layers - 1);
			run_device(&w, 0, false);
			expect_close(&w, "exact heads/dtype", heads[i], l.dtype,
				     formats[f].limit);
			run_device(&w, KVK_ATTN_FAST, false);
			expect_close(&w, "fast heads/dtype", heads[i], l.dtype,
				     fp8 ? FAST_FP8 : 2.1e-3);
			KVT_NOTE("fast, %u heads, dtype %u: error %.3g", heads[i],
				 l.dtype, rel_err(w.out, w.ref, w.nr_out));
			world_fini(&w);
		}
}

/* From nothing in the pages and nobody asking to the longest context there is. */
KVT_TEST_T(lengths_from_none_to_131072, 120)
{
	static const u32 lengths[] = {0, 131072, 1, 0, 19999, 64, 4097},
			 q[] = {0, 2, 1, 0, 1, 1, 4};
	static const u32 heads[] = {12, 8, 64, 8};
	struct kv_layout l[] = {kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 1, 128),
				kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1),
				kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1),
				kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1)};

	for (u32 i = 0; i < KV_ARRAY_SIZE(l); i++) {
		struct world w;

		world_init(&w, &l[i], heads[i], 2432, lengths, q, KV_ARRAY_SIZE(q));
		run_device(&w, 0, false);
		run_host(&w, heads[i], 0);
		expect_close(&w, "0 to 131072 heads/kind", heads[i], l[i].kind, 1e-3);
		world_fini(&w);
	}
}

/* Scores and scales grow along the context by far more than the slack of a reference. */
KVT_TEST_T(references_rise_along_the_context, 120)
{
	static const u32 lengths[] = {1000, 333, 64}, q[] = {1, 2, 1};
	struct kv_layout l[3] = {
		kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1),
		kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1),
		kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 1, 128)};
	static const u32 heads[3] = {64, 8, 12};

	ramp = 0.01f;
	for (u32 i = 0; i < 3; i++) {
		struct world w;

		world_init(&w, &l[i], heads[i], PAGES_MIXED, lengths, q, 3);
		run_device(&w, 0, false);
		run_host(&w, heads[i], 0);
		expect_close(&w, "growing heads/kind", heads[i], l[i].kind, 2e-3);
		world_fini(&w);
	}
	ramp = 0.f;
}

/*
 * The same with KVK_ATTN_FAST, on FP8 pages; queries that it holds as they are, since what scores lose
 * grows with them. Reruns are equal to the bit, and a long request is cut as any other.
 */
KVT_TEST_T(mla_fast_raises_references, 120)
{
	static const u32 lengths[2][3] = {{1000, 333, 64}, {5000, 70, 1}},
			 q[] = {1, 2, 1};
	static const u32 heads[2] = {64, 100};
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);

	q_in_e4m3 = true;
	for (u32 i = 0; i < 2; i++) {
		struct world w;
		float *first;

		ramp = i ? 0.f : 0.01f;
		world_init(&w, &l, heads[i], 2 * PAGES_MIXED, lengths[i], q, 3);
		run_device(&w, KVK_ATTN_FAST, false);
		run_host(&w, heads[i], 0);
		expect_close(&w, "fast, growing: heads/kind", heads[i], l.kind, 4e-2);
		KVT_NOTE("%u heads: error %.3g", heads[i],
			 rel_err(w.out, w.ref, w.nr_out));
		first = malloc(w.nr_out * sizeof(float));
		memcpy(first, w.out, w.nr_out * sizeof(float));
		for (int k = 0; k < 20; k++) {
			run_device(&w, KVK_ATTN_FAST | (k % 4 ? KVK_ATTN_PLAN : 0),
				   false);
			KVT_EXPECT(!memcmp(first, w.out, w.nr_out * sizeof(float)));
		}
		free(first);
		world_fini(&w);
	}
	ramp = 0.f;
	q_in_e4m3 = false;
}

static void check_reruns(const struct kv_layout *l, u32 heads)
{
	struct world w;
	float *first;

	world_init(&w, l, heads, PAGES_MIXED, lengths_mixed, q_ones, NR_MIXED);
	run_device(&w, 0, false);
	first = malloc(w.nr_out * sizeof(float));
	memcpy(first, w.out, w.nr_out * sizeof(float));
	for (int i = 0; i < 20; i++) {
		run_device(&w, i % 4 ? KVK_ATTN_PLAN : 0, false);
		KVT_EXPECT(!memcmp(first, w.out, w.nr_out * sizeof(float)));
	}
	free(first);
	world_fini(&w);
}

KVT_TEST_T(reruns_are_bit_equal, 120)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 8, 128);

	check_reruns(&l, 96);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 1, 128);
	check_reruns(&l, 12);
	l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2);
	check_reruns(&l, 8);
	check_reruns(&l, 64);
	l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 2);
	check_reruns(&l, 16);
	check_reruns(&l, 64);
}

/* Request @bad fails: NaN there, the others as the reference has them. */
static void check_failed(const struct kv_layout *l, u32 heads, u32 bad)
{
	struct world w;
	size_t per, at;

	world_init(&w, l, heads, PAGES_MIXED, lengths_mixed, q_ones, NR_MIXED);
	run_host(&w, heads, l->nr_layers - 1);
	w.f.verdicts[bad].bits = KV_BAD_GEN;
	w.f.rows[w.f.batch.row_start[bad]].pfn = 0x7fffffff; /* reading it would fault */
	upload(&w, heads, l->nr_layers - 1);
	run_device(&w, 0, false);
	per = w.nr_out / w.f.batch.nr_tokens;
	at = bad * per;
	KVT_EXPECT_EQ(kvt_nr_finite(w.out + at, per), 0);
	memcpy(w.out + at, w.ref + at, per * sizeof(float));
	expect_close(&w, "beside a failed request", heads, bad, 1e-3);
	world_fini(&w);
}

KVT_TEST_T(failed_verdict_gives_nan_and_disturbs_nobody, 120)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 8, 128);

	check_failed(&l, 96, 4);
	check_failed(&l, 96, 0);
	l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2);
	check_failed(&l, 8, 4);
	check_failed(&l, 64, 4);
	l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 2);
	check_failed(&l, 8, 9);
	check_failed(&l, 64, 4);
}

/* The check kernel passed a request that it should not have: still no page is read. */
enum wrong { WRONG_ROW, WRONG_LENGTH };

static void check_wrong(const struct kv_layout *l, u32 heads, u32 bad, enum wrong what)
{
	struct world w;
	size_t per, at;
	bool used = false;

	world_init(&w, l, heads, PAGES_MIXED, lengths_mixed, q_ones, NR_MIXED);
	run_host(&w, heads, l->nr_layers - 1);
	if (what == WRONG_ROW) { /* memory is there, but the pool ends before */
		u32 top = 0;

		for (u32 i = 1; i < w.f.batch.row_start[NR_MIXED]; i++)
			top = w.f.rows[i].pfn > w.f.rows[top].pfn ? i : top;
		w.f.pages.geometry.nr_pages = w.f.rows[top].pfn;
		for (bad = 0; w.f.batch.row_start[bad + 1] <= top; bad++)
			;
	} else {
		u32 nr_rows = w.f.batch.row_start[bad + 1] - w.f.batch.row_start[bad];

		w.f.lengths[bad] = nr_rows * KV_PAGE_TOKENS + 1;
		/* what is read behind the old length, and for the row that is not there, must
		 * not be NaN already */
		memset(kvt_paged_part(&w.f, bad, (nr_rows - 1) * KV_PAGE_TOKENS, 0), 0,
		       kv_page_bytes(l));
		for (u32 i = 0; i < w.f.batch.row_start[NR_MIXED] && !used; i++)
			used = w.f.rows[i].pfn == 0;
		if (!used)
			memset(w.f.pages.base, 0, kv_page_bytes(l));
	}
	upload(&w, heads, l->nr_layers - 1);
	run_device(&w, 0, false);
	per = w.nr_out / w.f.batch.nr_tokens;
	at = bad * per;
	KVT_EXPECT_EQ(kvt_nr_finite(w.out + at, per), 0);
	memcpy(w.out + at, w.ref + at, per * sizeof(float));
	expect_close(&w, "beside a wrong request", heads, bad, 1e-3);
	world_fini(&w);
}

static void check_wrong_all(enum wrong what)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 8, 128);

	check_wrong(&l, 96, 4, what); /* many parts, */
	check_wrong(&l, 96, 6, what); /* one part */
	l = kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 2, 1, 128);
	check_wrong(&l, 12, 4, what);
	l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2);
	check_wrong(&l, 8, 4, what);
	check_wrong(&l, 16, 6, what);
	check_wrong(&l, 64, 4, what);
	check_wrong(&l, 64, 6, what);
	l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 2);
	check_wrong(&l, 8, 4, what);
	check_wrong(&l, 64, 4, what);
}

KVT_TEST_T(row_outside_the_pool_is_never_read, 120)
{
	check_wrong_all(WRONG_ROW);
}

KVT_TEST_T(length_beyond_the_rows_is_never_read, 120)
{
	check_wrong_all(WRONG_LENGTH);
}

/* What may be read the schedule says of its own step; in the next one it is good for nothing. */
static void check_old_schedule(const struct kv_layout *l, u32 heads, u32 flags)
{
	struct world w;

	world_init(&w, l, heads, PAGES_MIXED, lengths_mixed, q_ones, NR_MIXED);
	run_host(&w, heads, l->nr_layers - 1);
	run_device(&w, flags, false);
	next_step(&w);
	run_device(&w, flags | KVK_ATTN_PLAN, false);
	KVT_EXPECT_EQ(kvt_nr_finite(w.out, w.nr_out), 0);
	run_device(&w, flags, false);
	expect_close(&w, "with a schedule of the next step", heads, l->kind, FAST_FP8);
	world_fini(&w);
}

KVT_TEST_T(schedule_of_another_step_reads_nothing, 120)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 8, 128);

	check_old_schedule(&l, 96, 0);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 1, 128);
	check_old_schedule(&l, 12, 0);
	l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2);
	check_old_schedule(&l, 8, 0);
	check_old_schedule(&l, 64, 0);
	check_old_schedule(&l, 64, KVK_ATTN_FAST);
	l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 2);
	check_old_schedule(&l, 8, 0);
	check_old_schedule(&l, 64, 0);
}

/* Many failed requests in a row, between good ones, on few SMs' worth of work. */
KVT_TEST_T(many_failed_requests_in_a_row, 120)
{
	static const u32 lengths[] = {65, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 900};
	static const u32 q[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
	struct world w;
	size_t per;

	world_init(&w, &l, 64, 40, lengths, q, 16);
	run_host(&w, 64, 0);
	for (u32 r = 1; r < 15; r++)
		w.f.verdicts[r].bits = KV_BAD_GEN;
	upload(&w, 64, 0);
	run_device(&w, 0, false);
	per = w.nr_out / w.f.batch.nr_tokens;
	KVT_EXPECT_EQ(kvt_nr_finite(w.out + per, 14 * per), 0);
	memcpy(w.out + per, w.ref + per, 14 * per * sizeof(float));
	expect_close(&w, "beside failed requests", 64, 0, 1e-3);
	world_fini(&w);
}

KVT_TEST(shared_pages_are_read_by_both)
{
	static const u32 lengths[] = {200, 150}, q[] = {1, 1};
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
	struct world w;

	world_init(&w, &l, 8, 16, lengths, q, 2);
	w.f.rows[w.f.batch.row_start[1]].pfn = w.f.rows[w.f.batch.row_start[0]].pfn;
	upload(&w, 8, 0);
	run_device(&w, 0, false);
	run_host(&w, 8, 0);
	expect_close(&w, "shared", 8, 0, 1e-3);
	world_fini(&w);
}

/* Shapes of the fallback, and prefill. */
KVT_TEST_T(fallback_and_prefill_match_the_reference, 120)
{
	static const u32 lengths[] = {100, 65, 3}, q_all[] = {100, 65, 3},
			 q_some[] = {30, 1, 2};
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_F32, KV_SCALE_NONE, 1);
	struct world w;

	for (int i = 0; i < 4; i++) {
		if (i == 1)
			l.latent_dim = 128;
		if (i >= 2)
			l = kvt_layout_gqa(i == 2 ? KV_DTYPE_BF16 : KV_DTYPE_E4M3,
					   i == 2 ? KV_SCALE_NONE : KV_SCALE_TOKEN, 1, 2,
					   128);
		world_init(&w, &l, 8, 16, lengths, i % 2 ? q_all : q_some, 3);
		run_device(&w, 0, true);
		run_host(&w, 8, 0);
		expect_close(&w, "prefill", 8, (u32)i, 1e-3);
		world_fini(&w);
	}
}

/* Whatever the scale is: scores all alike, and the smallest that weighs most. */
KVT_TEST_T(scales_that_are_not_positive, 120)
{
	static const float scale[] = {0.f, -0.07f};

	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(formats) * 3; i++) {
		const u32 f = i / 2 % KV_ARRAY_SIZE(formats), heads = i % 2 ? 64 : 8;
		const u32 kind = i / 2 / KV_ARRAY_SIZE(formats);
		struct kv_layout l =
			kind == 2 ? kvt_layout_gqa(formats[f].dtype,
						   formats[f].scale_kind, 2, 8, 128)
				  : kvt_layout_mla(formats[f].dtype,
						   formats[f].scale_kind, 2);

		for (u32 k = 0; k < KV_ARRAY_SIZE(scale); k++) {
			struct world w;

			world_init(&w, &l, heads, PAGES_MIXED, lengths_mixed,
				   kind ? q_mixed : q_ones, NR_MIXED);
			w.dev.sm_scale = scale[k];
			run_device(&w, 0, false);
			run_host(&w, heads, l.nr_layers - 1);
			expect_close(&w, "heads/scale", heads, k, formats[f].limit);
			world_fini(&w);
		}
	}
}

KVT_TEST(bad_arguments_are_refused)
{
	static const u32 lengths[] = {70}, q[] = {1};
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 8, 128);
	struct kvk_attn_args a;
	struct world w;

	world_init(&w, &l, 96, 4, lengths, q, 1);
	a = w.dev;
	a.workspace_bytes--;
	KVT_EXPECT_EQ(kvk_attn_gqa_cuda(&a, NULL), -EINVAL);
	a = w.dev;
	a.layer = 1;
	KVT_EXPECT_EQ(kvk_attn_gqa_cuda(&a, NULL), -EINVAL);
	a = w.dev;
	KVT_EXPECT_EQ(kvk_attn_mla_cuda(&a, NULL), -EINVAL);
	a.act_dtype = KVK_E4M3;
	KVT_EXPECT_EQ(kvk_attn_gqa_cuda(&a, NULL), -EINVAL);
	a = w.dev;
	a.batch.q_len_max = 5;
	KVT_EXPECT_EQ(kvk_attn_gqa_cuda(&a, NULL), -EINVAL);
	world_fini(&w);
}
#else
/* By name, so that a mutant of the GPU's side counts as not run, and not as a survivor. */
#define ON_THE_GPU(name)                                \
	KVT_TEST(name)                                  \
	{                                               \
		KVT_SKIP("no GPU: built without CUDA"); \
	}
ON_THE_GPU(row_outside_the_pool_is_never_read)
ON_THE_GPU(length_beyond_the_rows_is_never_read)
ON_THE_GPU(many_failed_requests_in_a_row)
ON_THE_GPU(schedule_of_another_step_reads_nothing)
#endif /* CONFIG_CUDA */

KVT_MAIN()
