/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prefill_cuda.c - the prefill kernels with BF16 activations over pages against the host
 * reference: odd shapes, poisoned tails and outputs, chunking, failed verdicts, rows outside
 * the pool, scales of any size, bit-equal reruns.
 */
#include "tests/kvt.h"

#ifdef CONFIG_CUDA
#include "prefill_cuda.h"

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

/* What kv-engine asks for, with every format of pages: nothing is left to attn_any. */
KVT_TEST(models_prompts_take_the_fast_kernels)
{
	static const u32 heads[] = {8, 64, 96, 8}; /* K2 by 8 and whole, GLM, tiny-glm */
	struct kvk_attn_args a = {.sm_scale = SCALE, .act_dtype = KVK_BF16};

	a.q = a.out = a.pages.base = (void *)4096;
	a.pages.scales = (const float *)4096;
	for (u32 i = 0; i < 4; i++)
		for (u32 kind = 0; kind < 3; kind++) {
			u32 dtype = kind ? KV_DTYPE_E4M3 : KV_DTYPE_BF16;
			struct kv_layout *l = &a.pages.layout;

			*l = i < 2 ? kvt_layout_mla(dtype, kind, 5)
				   : kvt_layout_gqa(dtype, kind, 5, i == 2 ? 8 : 2, 128);
			a.pages.geometry.nr_pages = 10;
			a.pages.geometry.stride_bytes = kv_page_stride(l);
			a.pages.geometry.extent_bytes = 4 * kv_page_stride(l);
			a.nr_q_heads = heads[i];
			KVT_EXPECT(kvk_attn_prefill_fast_cuda(&a));
			a.act_dtype = KVK_F32;
			KVT_EXPECT(!kvk_attn_prefill_fast_cuda(&a));
			a.act_dtype = KVK_BF16;
		}
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

KVT_TEST_T(mla_pages_match_the_reference, 120)
{
	static const u32 heads[] = {8, 1, 64, 20, 128}, length = 5000, q = 40;
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 2);

	for (u32 i = 0; i < KV_ARRAY_SIZE(heads); i++)
		check(&l, heads[i], lengths_mixed, i < 2 ? lengths_mixed : q_some,
		      NR_MIXED);
	check(&l, 16, &length, &q, 1);
}

KVT_TEST_T(mla_fp8_pages_match_the_reference, 120)
{
	static const u32 heads[] = {8, 1, 64, 20, 128}, length = 5000, q = 40;
	struct kv_layout l;

	for (u32 i = 0; i < KV_ARRAY_SIZE(heads); i++) {
		l = kvt_layout_mla(KV_DTYPE_E4M3,
				   i % 2 ? KV_SCALE_STATIC : KV_SCALE_TOKEN, 2);
		check(&l, heads[i], lengths_mixed, i < 2 ? lengths_mixed : q_some,
		      NR_MIXED);
	}
	l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
	check(&l, 16, &length, &q, 1);
}

/* f16 products, and scales of neighbouring tokens that it could not hold side by side. */
KVT_TEST_T(fp8_scales_far_apart_match_the_reference, 60)
{
	struct kv_layout l[2] = {kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 2, 128),
				 kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1)};
	struct world w;

	for (u32 i = 0; i < 4; i++) {
		world_init_spread(&w, &l[i / 2], 8, lengths_mixed, q_some, NR_MIXED,
				  i % 2 ? 12 : 5);
		run_host(&w);
		run_device(&w);
		expect_close(&w, "spread layout/spread", i / 2, w.spread);
		world_fini(&w);
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
		size_t at = (size_t)done * 8 * w.dim;

		done += chunks[i];
		w.f.lengths[0] = done;
		kvt_paged_ask(&w.f, chunks + i, 1);
		w.dev.batch = upload_batch(&w);
		w.dev.q = (u16 *)w.d[QUERY] + at / w.dim * w.dim_q;
		run_device(&w);
		KVT_EXPECT(
			!memcmp(w.out16, whole + at, (size_t)chunks[i] * 8 * w.dim * 2));
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

static void check_reruns(const struct kv_layout *l, u32 heads)
{
	struct world w;
	u16 *first;

	world_init(&w, l, heads, lengths_mixed, q_some, NR_MIXED);
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

	check_reruns(&l, 96);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 8, 128);
	check_reruns(&l, 96);
}

/* How a request goes wrong; the last one passes the check. */
enum wrong { WRONG_STEP, WRONG_GEN, WRONG_ROW, NR_WRONG };

static void spoil(struct world *w, u32 bad, enum wrong how)
{
	u32 first = w->f.batch.row_start[bad], end = w->f.batch.row_start[bad + 1];

	if (how == WRONG_STEP)
		w->f.verdicts[bad].step++;
	else
		w->f.rows[how == WRONG_ROW ? end - 1 : first].pfn = 0x7fffffff;
	if (how == WRONG_GEN)
		w->f.verdicts[bad].bits = KV_BAD_GEN;
}

static void check_failed(const struct kv_layout *l, enum wrong from, enum wrong end)
{
	static const u32 fails[] = {4, 0, 9, 5};
	struct world w;

	for (u32 i = 0; i < KV_ARRAY_SIZE(fails); i++) {
		u32 bad = fails[i];

		world_init(&w, l, 8, lengths_mixed, q_some, NR_MIXED);
		run_host(&w);
		spoil(&w, bad, from + i % (end - from));
		w.dev.batch = upload_batch(&w);
		run_device(&w);
		mark_failed(&w, bad);
		expect_close(&w, "beside a failed request", 8, bad);
		world_fini(&w);
	}
}

KVT_TEST_T(failed_prefill_gives_nan_and_disturbs_nobody, 60)
{
	struct kv_layout l = bf16_layout(1, 2, 128);

	check_failed(&l, WRONG_STEP, WRONG_ROW);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 2, 128);
	check_failed(&l, WRONG_STEP, WRONG_ROW);
}

KVT_TEST_T(mla_chunks_reruns_and_failures, 60)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);

	for (u32 i = 0; i < 2; i++) {
		check_chunks(&l);
		check_reruns(&l, 64);
		check_failed(&l, WRONG_STEP, WRONG_ROW);
		l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
	}
}

/* The check passed it all the same (design 5, P5): NaN, and no address is made of it. */
KVT_TEST_T(row_outside_the_pool_is_never_read_by_prefill, 60)
{
	struct kv_layout l[4] = {bf16_layout(1, 2, 128),
				 kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 2, 128),
				 kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1),
				 kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1)};

	for (u32 i = 0; i < 4; i++)
		check_failed(&l[i], WRONG_ROW, NR_WRONG);
}

#else
/* By name, so that a mutant of the GPU's side counts as not run, and not as a survivor. */
KVT_TEST(row_outside_the_pool_is_never_read_by_prefill)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif /* CONFIG_CUDA */

KVT_MAIN()
