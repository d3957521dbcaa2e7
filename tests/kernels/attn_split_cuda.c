/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_split_cuda.c - decode attention on CUDA where a unit of work is cut in parts and CTAs merge
 * them: long requests, parts that meet in a pair of CTAs, slots whose owners begin late, many units.
 */
#include "tests/kvt.h"
#include "common.h"

#ifdef CONFIG_CUDA
#include "attn_world.h"

/* A pool that holds one request of many parts */
#define PAGES_POOL 64u

/* One long request: cut into a hundred parts, merged by many CTAs. */
static void check_long(const struct kv_layout *l, u32 heads)
{
	static const u32 lengths[] = {19999, 70}, q[] = {1, 1};
	struct world w;

	world_init(&w, l, heads, 324, lengths, q, 2);
	run_device(&w, 0, false);
	run_host(&w, heads, l->nr_layers - 1);
	expect_close(&w, "long heads/kind", heads, l->kind, 1e-3);
	world_fini(&w);
}

KVT_TEST_T(long_requests_are_split_and_merged, 120)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 1, 128);

	check_long(&l, 12);
	l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
	check_long(&l, 8);
	check_long(&l, 64);
	l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);
	check_long(&l, 8);
	check_long(&l, 64);
}

/* Good requests first, bit-equal in all reruns; then request 3 fails, and a row of request 1 is outside the pool. */
static void check_pairs_run(struct world *w, u32 flags, u32 heads, double limit)
{
	const u32 nr = w->f.batch.nr_requests, *start = w->f.batch.row_start;
	struct kv_row kept[2] = {w->f.rows[start[2] - 1], w->f.rows[start[3]]};
	const size_t per = w->nr_out / nr;
	float *first = malloc(w->nr_out * sizeof(float));

	run_device(w, flags | KVK_ATTN_NO_PAIRS, false);
	expect_close(w, "no pairs: requests/flags", nr, flags, limit);
	run_device(w, flags, false);
	expect_close(w, "pairs: requests/flags", nr, flags, limit);
	memcpy(first, w->out, w->nr_out * sizeof(float));
	for (int i = 0; i < 8; i++) {
		run_device(w, flags | (i % 4 ? KVK_ATTN_PLAN : 0), false);
		KVT_EXPECT(!memcmp(first, w->out, w->nr_out * sizeof(float)));
	}
	w->f.verdicts[3].bits = KV_BAD_GEN;
	w->f.rows[start[3]].pfn = 0x7fffffff;
	w->f.rows[start[2] - 1].pfn = w->f.pages.geometry.nr_pages;
	upload(w, heads, 0);
	run_device(w, flags, false);
	for (u32 r = 1; r <= 3; r += 2) {
		KVT_EXPECT_EQ(kvt_nr_finite(w->out + r * per, per), 0);
		memcpy(w->out + r * per, first + r * per, per * sizeof(float));
	}
	KVT_EXPECT(!memcmp(first, w->out, w->nr_out * sizeof(float)));
	w->f.verdicts[3].bits = 0;
	w->f.rows[start[2] - 1] = kept[0];
	w->f.rows[start[3]] = kept[1];
	upload(w, heads, 0);
	free(first);
}

/* About half as many units as SMs, so that CTAs are launched in pairs. */
static void check_pairs(u32 heads, const u32 *lengths, u32 q_len, u32 nr)
{
	const struct kv_layout l[2] = {kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1),
				       kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1)};
	u32 q[66], pages = 0;

	for (u32 r = 0; r < nr; r++) {
		q[r] = q_len;
		pages += (lengths[r] + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	}
	for (int i = 0; i < 2; i++) {
		struct world w;

		world_init(&w, &l[i], heads, pages + 8, lengths, q, nr);
		run_host(&w, heads, 0);
		check_pairs_run(&w, KVK_ATTN_FAST, heads, i ? FAST_FP8 : 2.1e-3);
		check_pairs_run(&w, 0, heads, 1e-3);
		world_fini(&w);
	}
}

/* 64 units on 128 CTAs, 65 on 130: a pair is all of a unit. */
KVT_TEST_T(mla_units_of_two_parts_merge_in_place, 120)
{
	u32 lengths[65];

	for (u32 r = 0; r < 65; r++)
		lengths[r] = 128 - r * 5 % 60;
	check_pairs(128, lengths, 2, 16);
	check_pairs(64, lengths, 1, 65);
}

/*
 * 132 tiles on as many CTAs: 60 units of two parts beside four of three. Then 100 tiles on as many: units of
 * one part and of two, whose first CTA is even or odd; an odd one's merge by slots.
 */
KVT_TEST_T(mla_units_of_two_parts_beside_others, 120)
{
	u32 lengths[60];

	for (u32 r = 0; r < 16; r++)
		lengths[r] = (r == 5 ? 192 : 128) - r * 5 % 60;
	check_pairs(128, lengths, 2, 16);
	for (u32 r = 0; r < 60; r++)
		lengths[r] = (r % 3 ? 128 : 64) - r * 7 % 60;
	check_pairs(64, lengths, 1, 60);
}

/* Parts of MLA travel in f16, which holds 2^-24 to 2^16: larger ones, smaller ones, some all zeros. */
KVT_TEST_T(parts_of_any_size, 120)
{
	static const u32 lengths[] = {3499, 300}, q[] = {1, 1}, heads[] = {8, 64, 8, 64};
	struct kv_layout l;

	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(heads); i++) {
		const bool fp8 = i / 2 < 2;
		struct world w;

		l = kvt_layout_mla(fp8 ? KV_DTYPE_E4M3 : KV_DTYPE_BF16,
				   fp8 ? KV_SCALE_TOKEN : KV_SCALE_NONE, 1);
		if (fp8)
			latent_gain = i % 2 ? 0x1p-10f : 0x1p20f;
		else
			latent_gain = i % 2 ? 0x1p-40f : 0x1p40f;
		world_init(&w, &l, heads[i / 2], PAGES_POOL, lengths, q, 2);
		run_device(&w, 0, false);
		run_host(&w, heads[i / 2], 0);
		expect_close(&w, "large and small, heads/kind", heads[i / 2], l.kind,
			     1e-3);
		world_fini(&w);
	}
	latent_gain = 0.f;
}

/* CTAs that begin long after the others' patience has ended: the others leave their slices. */
static void check_late(const struct kv_layout *l, u32 heads)
{
	static const u32 lengths[] = {PAGES_POOL * KV_PAGE_TOKENS - 5}, q[] = {1};
	struct world w;
	float *first;

	world_init(&w, l, heads, PAGES_POOL, lengths, q, 1);
	run_device(&w, 0, false);
	run_host(&w, heads, l->nr_layers - 1);
	expect_close(&w, "one request, heads/kv heads", heads, l->nr_kv_heads, 1e-3);
	first = malloc(w.nr_out * sizeof(float));
	memcpy(first, w.out, w.nr_out * sizeof(float));
	for (int i = 0; i < 6; i++) { /* each half of the slots, whole and left */
		run_device(&w, i % 3 ? KVK_ATTN_LATE | KVK_ATTN_PLAN : KVK_ATTN_PLAN,
			   false);
		KVT_EXPECT(!memcmp(first, w.out, w.nr_out * sizeof(float)));
	}
	free(first);
	world_fini(&w);
}

KVT_TEST_T(late_ctas_merge_what_the_others_left, 120)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 1, 128);

	check_late(&l, 12);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 8, 128);
	check_late(&l, 96);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_STATIC, 1, 2, 128);
	check_late(&l, 8);
}

/* One kv head merges by what the slots hold however many units there are; many are whole, some cut. */
KVT_TEST_T(many_requests_of_one_kv_head, 120)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 1, 128);
	u32 lengths[200], q[200], pages = 0;
	struct world w;
	float *first;

	for (u32 r = 0; r < 200; r++) {
		lengths[r] = 1 + r * 37 % 300;
		q[r] = 1;
		pages += (lengths[r] + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	}
	world_init(&w, &l, 12, pages + 1, lengths, q, 200);
	run_device(&w, 0, false);
	run_host(&w, 12, 0);
	expect_close(&w, "requests/kv heads", 200, 1, 1e-3);
	first = malloc(w.nr_out * sizeof(float));
	memcpy(first, w.out, w.nr_out * sizeof(float));
	for (int i = 0; i < 6; i++) {
		run_device(&w, i % 3 ? KVK_ATTN_LATE | KVK_ATTN_PLAN : KVK_ATTN_PLAN,
			   false);
		KVT_EXPECT(!memcmp(first, w.out, w.nr_out * sizeof(float)));
	}
	free(first);
	world_fini(&w);
}
/* Short requests between long ones: a CTA has more segments than the ring has places for. */
static void check_short(const struct kv_layout *l, u32 heads, u32 flags, double limit)
{
	u32 lengths[42], q[42];
	struct world w;

	for (u32 r = 0; r < 42; r++) {
		lengths[r] = r % 41 ? 1 + r : 82000; /* 20 pages a CTA */
		q[r] = 1;
	}
	world_init(&w, l, heads, 2 * 1282 + 40, lengths, q, 42);
	run_host(&w, heads, 0);
	run_device(&w, 0, false);
	expect_close(&w, "short ones: heads/kind", heads, l->kind, 1e-3);
	run_device(&w, flags, false);
	expect_close(&w, "short ones: heads/flags", heads, flags, limit);
	world_fini(&w);
}

KVT_TEST_T(many_short_requests_in_one_cta, 120)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);

	check_short(&l, 64, KVK_ATTN_FAST, FAST_FP8);
	check_short(&l, 8, 0, 1e-3);
	l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);
	check_short(&l, 64, KVK_ATTN_FAST, 2.1e-3);
	l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 1, 128);
	check_short(&l, 12, 0, 1e-3);
}
#else
/* By name, so that a mutant of the GPU's side counts as not run, and not as a survivor. */
KVT_TEST(late_ctas_merge_what_the_others_left)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif /* CONFIG_CUDA */

KVT_MAIN()
