/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn.c - decode attention as Hopper would run it, on the CPU (machine.cc): random shapes and
 * steps against the host's reference, units cut between many CTAs, and what the rules of P5
 * keep it from reading. FP8 pages with more than 16 rows of MLA: attn_reg.c.
 */
#include "tests/kvt.h"
#include "attn_cases.h"

static const struct shape gqa_shapes[] = {
	GQA(E4M3, TOKEN, 96, 8, 128),  GQA(E4M3, STATIC, 96, 8, 128),
	GQA(E4M3, TOKEN, 64, 8, 128),  GQA(E4M3, TOKEN, 12, 1, 128),
	GQA(E4M3, STATIC, 12, 1, 128), GQA(E4M3, TOKEN, 6, 6, 128),
	GQA(E4M3, TOKEN, 96, 8, 64),   GQA(E4M3, STATIC, 12, 1, 64),
	GQA(E4M3, TOKEN, 6, 6, 64),    GQA(BF16, NONE, 96, 8, 128),
	GQA(BF16, NONE, 12, 1, 128),   GQA(BF16, NONE, 64, 8, 64),
	GQA(BF16, NONE, 6, 6, 64),
};

static const struct shape mla_shapes[] = {
	MLA(E4M3, TOKEN, 8, 1, 0),  MLA(E4M3, TOKEN, 8, 2, 0),
	MLA(E4M3, TOKEN, 16, 1, 0), MLA(E4M3, STATIC, 8, 1, 0),
	MLA(E4M3, STATIC, 4, 4, 0), MLA(E4M3, TOKEN, 5, 3, 0),
	MLA(BF16, NONE, 8, 1, 0),   MLA(BF16, NONE, 8, 2, 0),
	MLA(BF16, NONE, 16, 1, 0),  MLA(BF16, NONE, 2, 4, 0),
};

static const struct shape tile_shapes[] = {
	MLA(BF16, NONE, 64, 1, 0),
	MLA(BF16, NONE, 64, 1, KVK_ATTN_FAST),
	MLA(BF16, NONE, 20, 3, 0),
};

/* One of each kernel */
static const struct shape some[] = {
	GQA(E4M3, TOKEN, 12, 1, 128), GQA(E4M3, TOKEN, 64, 8, 128),
	GQA(E4M3, STATIC, 6, 6, 64),  GQA(BF16, NONE, 12, 1, 128),
	MLA(E4M3, TOKEN, 8, 1, 0),    MLA(E4M3, TOKEN, 16, 1, 0),
	MLA(BF16, NONE, 8, 1, 0),     MLA(BF16, NONE, 64, 1, 0),
};

KVT_TEST(hopper_attn_gqa)
{
	shapes(gqa_shapes, KV_ARRAY_SIZE(gqa_shapes), 6, 0, 0);
}

KVT_TEST(hopper_attn_mla)
{
	shapes(mla_shapes, KV_ARRAY_SIZE(mla_shapes), 6, 0, 0);
}

KVT_TEST(hopper_attn_mla_wgmma)
{
	shapes(tile_shapes, KV_ARRAY_SIZE(tile_shapes), 3, 0, 0);
}

KVT_TEST(hopper_attn_one_request_on_all_sms)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 12, 1, 128), GQA(E4M3, STATIC, 16, 2, 128),
		GQA(BF16, NONE, 12, 1, 128),  MLA(E4M3, TOKEN, 8, 1, 0),
		MLA(E4M3, STATIC, 16, 1, 0),  MLA(BF16, NONE, 8, 1, 0),
		MLA(BF16, NONE, 64, 1, 0),
	};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++)
		cut(&s[i], i < 3 ? 64 * 40 - 7 : 64 * 7 - 60, 7, 3, 0, 0);
}

/* Parts travel in f16, which holds 2^-24 to 2^16: larger ones, smaller ones, and some all zeros. */
KVT_TEST(hopper_attn_parts_of_any_size)
{
	static const struct shape s[] = {
		MLA(E4M3, TOKEN, 8, 1, 0),
		MLA(BF16, NONE, 8, 1, 0),
		MLA(BF16, NONE, 64, 1, 0),
	};

	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(s); i++) {
		if (s[i / 2].dtype == KV_DTYPE_E4M3)
			latent_gain = i % 2 ? 0x1p-10f : 0x1p20f;
		else
			latent_gain = i % 2 ? 0x1p-40f : 0x1p40f;
		cut(&s[i / 2], 64 * 7 - 60, 7, 1, 0, 0);
	}
	latent_gain = 0.f;
}

KVT_TEST(hopper_attn_many_requests_on_few_sms)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 12, 1, 128), GQA(E4M3, TOKEN, 8, 4, 64),
		GQA(BF16, NONE, 6, 6, 64),    MLA(E4M3, TOKEN, 8, 1, 0),
		MLA(BF16, NONE, 16, 1, 0),    MLA(BF16, NONE, 64, 1, 0),
	};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++)
		many_requests(&s[i], 1 + (i == 1));
}

KVT_TEST(hopper_attn_pairs)
{
	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(pair_steps); i++) {
		const struct shape s =
			MLA(BF16, NONE, i % 3 ? 64 : 20, 1, i % 2 ? KVK_ATTN_FAST : 0);

		pairs(&s, &pair_steps[i / 2]);
	}
}

/* A merge of more parts than a warp reads at once. */
KVT_TEST(hopper_attn_many_parts)
{
	static const struct shape s[] = {GQA(E4M3, TOKEN, 12, 1, 128),
					 MLA(E4M3, TOKEN, 8, 1, 0),
					 MLA(BF16, NONE, 64, 1, 0)};

	cut(&s[0], 64 * 92 - 1, 23, 1, 0, 0);
	cut(&s[1], 64 * 23 - 1, 23, 1, 0, 0);
	cut(&s[2], 64 * 23 - 1, 23, 1, 0, 0);
}

/* One CTA has 1 to 26 pieces: a warp each, or two for the last ones (whole_pieces()). */
KVT_TEST(hopper_attn_any_number_of_pieces)
{
	static const struct shape s = GQA(E4M3, TOKEN, 12, 1, 128);
	static const u32 pieces[] = {1, 4, 8, 9, 16, 17, 24, 25, 26};

	for (u32 i = 0; i < KV_ARRAY_SIZE(pieces); i++)
		cut(&s, 64 * pieces[i] - kvt_rand_below(64), 1, 1, 0, 0);
}

/* CTAs that begin when the others' patience is over: those leave them their slices. */
KVT_TEST(hopper_attn_late_ctas_merge_what_the_others_left)
{
	static const struct shape s[] = {GQA(E4M3, TOKEN, 12, 1, 128),
					 GQA(E4M3, STATIC, 8, 2, 128)};

	cut(&s[0], 64 * 28 - 5, 7, 4, KVK_ATTN_LATE, 0);
	cut(&s[1], 64 * 28 - 5, 8, 4, KVK_ATTN_LATE, 0);
}

KVT_TEST(hopper_attn_late_copies)
{
	static const struct shape s[] = {GQA(E4M3, TOKEN, 12, 1, 128),
					 MLA(E4M3, TOKEN, 8, 1, 0),
					 MLA(BF16, NONE, 20, 1, 0)};
	static const struct step t = {3, {64 * 4, 64 * 3, 64 * 4 - 9}, {1, 1, 1}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++)
		late_copies(&s[i], &t, 1, 40000, 0);
}

KVT_TEST(hopper_attn_bf16_activations)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 96, 8, 128), GQA(E4M3, TOKEN, 12, 1, 128),
		GQA(BF16, NONE, 6, 6, 64),    MLA(E4M3, TOKEN, 5, 2, 0),
		MLA(BF16, NONE, 16, 1, 0),    MLA(BF16, NONE, 20, 1, 0),
	};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++)
		bf16_activations(&s[i], 4);
}

KVT_TEST(hopper_attn_shared_pages)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 12, 1, 128), GQA(BF16, NONE, 6, 6, 64),
		MLA(E4M3, TOKEN, 8, 1, 0), MLA(BF16, NONE, 16, 1, 0)};

	for (u32 i = 0; i < KV_ARRAY_SIZE(s); i++)
		shared_pages(&s[i]);
}

/* --------------------------------------------------------------------------- P5, design 5 */

KVT_TEST(hopper_attn_failed_request)
{
	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(some); i++)
		failed_request(&some[i / 2], i / 2, i % 2 ? LONG : SHORT);
}

KVT_TEST(hopper_attn_many_failed_requests_in_a_row)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		many_failed(&some[i]);
}

KVT_TEST(hopper_attn_row_outside_the_pool)
{
	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(some); i++)
		row_outside(&some[i / 2], i % 2 ? 5 : 3);
}

KVT_TEST(hopper_attn_length_beyond_the_rows)
{
	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(some); i++)
		length_beyond(&some[i / 2], i % 2 ? LONG : SHORT);
}

KVT_TEST(hopper_attn_schedule_of_another_step)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(some); i++)
		schedule_of_another_step(&some[i]);
}

/*
 * Verdicts do not change within a step (P4). Should one, parts of a unit do not agree: the first segments of CTAs
 * go by the schedule, the others look. No number comes of it, nobody waits for ever, others are as they were.
 */
KVT_TEST(hopper_attn_parts_that_do_not_agree)
{
	static const struct shape s[] = {GQA(E4M3, TOKEN, 12, 1, 128),
					 GQA(E4M3, STATIC, 8, 2, 128)};
	static const struct step t = {3, {64 * 6, 64 * 20, 64 * 9 + 1}, {1, 1, 1}};

	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(s); i++) {
		const u32 bad = i % 2 ? KV_BAD_GEN : 0;
		struct world w;
		float *first;

		hopper_has_sms(5 + 8 * (int)(i / 2));
		make(&w, &s[i / 2], &t);
		run(&w, &s[i / 2], 0);
		check(&w, &s[i / 2], "before, heads/kv heads");
		first = keep(&w);
		w.f.verdicts[1].bits = bad; /* when the schedule is made */
		upload(&w, s[i / 2].heads, 1);
		run(&w, &s[i / 2], 0);
		w.f.verdicts[1].bits = bad ^ KV_BAD_GEN;
		to_device(&w, 6, w.f.verdicts, t.nr * sizeof(struct kv_verdict));
		run(&w, &s[i / 2], KVK_ATTN_PLAN);
		alone(&w, 1, first);
		free(first);
		world_fini(&w);
	}
}

KVT_MAIN()
