/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_reg.c - decode attention of MLA on FP8 pages with more than 16 query rows as Hopper would run
 * it, on the CPU (machine.cc): attn_mla_reg.cu, and attn_mla_fast.cu with a bound of its own. The cases
 * of attn.c, and CTAs that begin late.
 */
#include "tests/kvt.h"
#include "attn_cases.h"

#define EXACT(scales, heads, q_max) MLA(E4M3, scales, heads, q_max, 0)
#define FAST(scales, heads, q_max)  MLA(E4M3, scales, heads, q_max, KVK_ATTN_FAST)

/* Each kernel, with tokens' scales and with one */
static const struct shape some[] = {EXACT(TOKEN, 64, 1), FAST(TOKEN, 64, 1),
				    EXACT(STATIC, 128, 1), FAST(STATIC, 24, 1)};

KVT_TEST(hopper_attn_reg_steps)
{
	static const struct shape s[] = {
		EXACT(TOKEN, 64, 1),  EXACT(STATIC, 64, 1), EXACT(TOKEN, 17, 1),
		EXACT(TOKEN, 20, 3),  EXACT(STATIC, 16, 4), EXACT(TOKEN, 33, 2),
		EXACT(TOKEN, 128, 1), EXACT(STATIC, 64, 2), EXACT(TOKEN, 128, 2),
		EXACT(TOKEN, 64, 4),
	};

	shapes(s, KV_ARRAY_SIZE(s), 4, 1000, 400);
}

KVT_TEST(hopper_attn_fast_steps)
{
	static const struct shape s[] = {
		FAST(TOKEN, 64, 1),  FAST(STATIC, 64, 1), FAST(TOKEN, 17, 1),
		FAST(TOKEN, 20, 3),  FAST(STATIC, 16, 4), FAST(TOKEN, 33, 2),
		FAST(TOKEN, 128, 1), FAST(STATIC, 64, 2), FAST(TOKEN, 128, 2),
		FAST(TOKEN, 64, 4),
	};

	shapes(s, KV_ARRAY_SIZE(s), 4, 1000, 400);
}

KVT_TEST(hopper_attn_reg_one_request_on_all_sms)
{
	static const struct shape wide[] = {EXACT(TOKEN, 20, 1), FAST(TOKEN, 64, 1)};

	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		cut(&some[i], 64 * 7 - 60, 7, 2, 0, 0);
	/* a merge of more parts than a warp reads at once */
	for (u32 i = 0; i < KV_ARRAY_SIZE(wide); i++)
		cut(&wide[i], 64 * 19 - 1, 19, 0, 0, 0);
}

/* A CTA begins when the others' patience is over: those leave it their slices, or it them. */
KVT_TEST(hopper_attn_reg_late_ctas)
{
	static const struct shape s[] = {EXACT(TOKEN, 64, 1), FAST(TOKEN, 64, 1),
					 EXACT(TOKEN, 64, 2)};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++)
		cut(&s[i], 64 * 9 - 5, 5, 3, 0, 6000);
}

/*
 * Parts travel in f16, which holds 2^-24 to 2^16: larger ones, smaller ones, and those of every other page
 * all zeros, whose scales are 0.
 */
KVT_TEST(hopper_attn_reg_parts_of_any_size)
{
	for (u32 i = 0; i < 4; i++) {
		latent_gain = i % 2 ? 0x1p-10f : 0x1p20f;
		cut(&some[i / 2], 64 * 7 - 60, 7, 1, 0, 0);
		cut(&some[i / 2], 64 * 3, 1, 0, 0, 0);
	}
	latent_gain = 0.f;
}

/*
 * Scores and scales grow along the context by far more than a reference's slack; some latents and some ropes
 * are zeros. KVK_ATTN_FAST: queries that it holds as they are, since what scores lose grows with them.
 */
KVT_TEST(hopper_attn_reg_references_rise)
{
	static const struct step t = {3, {900, 333, 64}, {1, 2, 1}};

	ramp = 0.01f;
	for (u32 i = 0; i < 4; i++) {
		const bool fast = i % 2;
		const struct shape s = MLA(E4M3, TOKEN, 32, 2, some[fast].flags);
		struct world w;
		float *first;

		q_in_e4m3 = fast;
		hopper_has_sms(i < 2 ? 1 : 5);
		make(&w, &s, &t);
		run(&w, &s, 0);
		expect_close(&w, "growing, heads/fast", s.heads, fast,
			     fast ? 4e-2 : 2e-3);
		first = keep(&w);
		run(&w, &s, KVK_ATTN_PLAN);
		same(&w, first);
		free(first);
		world_fini(&w);
	}
	ramp = 0.f;
	q_in_e4m3 = false;
}

KVT_TEST(hopper_attn_reg_many_requests_on_few_sms)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		many_requests(&some[i], 1 + (int)i / 2);
}

/* From the second request of a CTA on: its first pages are asked for while the ones before are read. */
KVT_TEST(hopper_attn_reg_pages_land_in_any_order)
{
	static const struct step t = {5, {330, 130, 192, 256, 100}, {1, 1, 1, 1, 1}};

	for (u32 i = 0; i < 4; i++)
		late_copies(&some[i / 2], &t, 1 + (int)i % 2, 5000, 2);
}

KVT_TEST(hopper_attn_reg_pairs)
{
	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(pair_steps); i++) {
		struct shape s = MLA(E4M3, TOKEN, i % 3 ? 64 : 21, 1, some[i % 2].flags);

		s.scale_kind = i % 4 < 2 ? KV_SCALE_TOKEN : KV_SCALE_STATIC;
		pairs(&s, &pair_steps[i / 2]);
	}
}

KVT_TEST(hopper_attn_reg_bf16_activations)
{
	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(some); i++)
		bf16_activations(&some[i / 2], i % 2 ? 8 : 4); /* pairs; slots */
}

/* Masked scores are -Inf before they are scaled: attn_any takes what would make them anything else. */
KVT_TEST(hopper_attn_reg_scale_that_is_not_positive)
{
	static const float scale[] = {0.f, -0.07f, NAN};
	const struct step t = {1, {70}, {1}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(some) * KV_ARRAY_SIZE(scale); i++) {
		struct world w;

		make(&w, &some[i % KV_ARRAY_SIZE(some)], &t);
		w.dev.flags |= some[i % KV_ARRAY_SIZE(some)].flags;
		w.dev.sm_scale = scale[i / KV_ARRAY_SIZE(some)];
		/* who asks how much it takes has not chosen one */
		KVT_EXPECT_EQ(kvk_attn_workspace_cuda(&w.dev), w.dev.workspace_bytes);
		KVT_EXPECT_EQ(kvk_attn_mla_cuda(&w.dev, NULL),
			      -ENOSYS); /* attn_rest.cc */
		world_fini(&w);
	}
}

KVT_TEST(hopper_attn_reg_shared_pages)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		shared_pages(&some[i]);
}

/* --------------------------------------------------------------------------- P5, design 5 */

KVT_TEST(hopper_attn_reg_failed_request)
{
	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(some); i++)
		failed_request(&some[i / 2], i / 2, i % 2 ? LONG : SHORT);
}

KVT_TEST(hopper_attn_reg_many_failed_requests_in_a_row)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		many_failed(&some[i]);
}

KVT_TEST(hopper_attn_reg_row_outside_the_pool)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		row_outside(&some[i], 3 + 2 * ((int)i / 2));
}

KVT_TEST(hopper_attn_reg_length_beyond_the_rows)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		length_beyond(&some[i], i / 2 ? SHORT : LONG);
}

KVT_TEST(hopper_attn_reg_schedule_of_another_step)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		schedule_of_another_step(&some[i]);
}

KVT_MAIN()
