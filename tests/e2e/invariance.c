/* SPDX-License-Identifier: Apache-2.0 */
/*
 * invariance.c - a request's numbers do not depend on its company.
 *
 * Each case runs one request twice, alone and in other circumstances, and compares every
 * token and every bit of every logits row: neighbours, chunk sizes, other pages, a prefix
 * hit, a fork of the last page, recomputation after preemption.
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#define PROMPT 150 /* two full pages and a part */
#define NEW    20

static struct rig rig;
static u32 prompt[1024];

static struct eng_engine *engine_with(u32 kv, u32 chunk, bool share)
{
	struct eng_options opt = {
		.kv = kv, .chunk_tokens = chunk, .no_prefix = !share, .no_seal = !share};

	return rig_engine(&rig, &opt);
}

static void run_alone(u32 kv, u32 nr_prompt, u32 chunk, struct trace *ret)
{
	struct eng_engine *e = engine_with(kv, chunk, false);

	trace_submit(e, ret, prompt, nr_prompt, NEW, false);
	rig_run(e);
	KVT_EXPECT_EQ(ret->res.finish, ENG_FINISH_LENGTH);
	eng_engine_destroy(e);
}

static void check_neighbours(u32 kv, const struct trace *alone)
{
	struct eng_engine *e = engine_with(kv, 64, false);
	static struct trace t, other[6];
	u32 text[400];

	for (u32 i = 0; i < 3; i++) {
		rig_prompt(10 + i, text, 90 + 70 * i);
		trace_submit(e, &other[i], text, 90 + 70 * i, 40, false);
	}
	for (u32 i = 0; i < 5; i++)
		eng_engine_turn(e);
	trace_submit(e, &t, prompt, PROMPT, NEW, false);
	for (u32 i = 3; i < 6; i++) {
		rig_prompt(10 + i, text, 30 * i);
		trace_submit(e, &other[i], text, 30 * i, 10, false);
	}
	rig_run(e);
	trace_expect_equal(alone, &t, "with neighbours");
	eng_engine_destroy(e);
}

static void check_chunks(u32 kv, const struct trace *alone)
{
	static const u32 sizes[] = {7, 33, 64, 149};
	static struct trace t;

	for (u32 i = 0; i < 4; i++) {
		run_alone(kv, PROMPT, sizes[i], &t);
		trace_expect_equal(alone, &t, "other chunk size");
	}
}

/* Pages in another order, far from each other. */
static void check_placement(u32 kv, const struct trace *alone)
{
	struct eng_engine *e = engine_with(kv, 256, false);
	struct kvc_pool *pool = eng_engine_pool(e);
	struct kv_grant held[64];
	static struct trace t;
	struct eng_request *r;

	KVT_EXPECT_EQ(kvc_alloc(pool, 64, KV_GFP_PREFILL, held), 0);
	for (u32 i = 0; i < 64; i += 3)
		kvc_free(pool, &held[i], 1);
	kvc_flush(eng_engine_kvc(e));
	r = trace_submit(e, &t, prompt, PROMPT, NEW, false);
	rig_turns(e, r, 1);
	rig_run(e);
	trace_expect_equal(alone, &t, "other pages");
	for (u32 i = 0; i < 64; i++) {
		if (i % 3)
			kvc_free(pool, &held[i], 1);
	}
	eng_engine_destroy(e);
}

static void check_model(const char *model, u32 weights, u32 kv)
{
	static struct trace alone;

	rig_kvmd(&rig, NULL);
	rig_model(&rig, model, weights);
	rig_prompt(1, prompt, PROMPT);
	run_alone(kv, PROMPT, 256, &alone);
	check_neighbours(kv, &alone);
	check_chunks(kv, &alone);
	check_placement(kv, &alone);
	rig_close(&rig);
}

KVT_TEST(mla_fp8_pages_bit_equal_in_any_company)
{
	check_model("tiny-k2", ENG_WEIGHTS_AS_IS, ENG_KV_FP8);
}

KVT_TEST(mla_int4_experts_bit_equal_in_any_company)
{
	check_model("tiny-k2", ENG_WEIGHTS_INT4_G32, ENG_KV_FP8);
}

KVT_TEST(gqa_fp8_pages_fp8_weights_bit_equal_in_any_company)
{
	check_model("tiny-glm", ENG_WEIGHTS_FP8, ENG_KV_FP8);
}

/* The second request of each pair must find what the first one sealed, and change
 * nothing. */
static void check_hit(u32 kv, u32 nr_prompt, u32 cached)
{
	static struct trace miss, first, hit;
	struct eng_engine *e;

	run_alone(kv, nr_prompt, 256, &miss);
	e = engine_with(kv, 50, true);
	trace_submit(e, &first, prompt, nr_prompt, NEW, false);
	rig_run(e);
	KVT_EXPECT_EQ(first.res.nr_cached, 0);
	trace_expect_equal(&miss, &first, "sealing");
	trace_submit(e, &hit, prompt, nr_prompt, NEW, false);
	rig_run(e);
	KVT_EXPECT_EQ(hit.res.nr_cached, cached);
	KVT_EXPECT_EQ(hit.res.nr_computed, nr_prompt - cached);
	trace_expect_equal(&miss, &hit, "prefix hit");
	eng_engine_destroy(e);
}

KVT_TEST(prefix_hit_is_bit_equal_to_a_miss)
{
	rig_kvmd(&rig, NULL);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	rig_prompt(2, prompt, 400);
	check_hit(ENG_KV_FP8, 150, 128);
	rig_prompt(3, prompt, 400);
	check_hit(ENG_KV_FP8, 65, 64);
	rig_close(&rig);
}

/* 128 tokens are two whole pages: the last one is forked, 63 tokens copied, one computed.
 */
KVT_TEST(whole_page_hit_forks_the_last_page)
{
	rig_kvmd(&rig, NULL);
	rig_model(&rig, "tiny-glm", ENG_WEIGHTS_AS_IS);
	rig_prompt(4, prompt, 400);
	check_hit(ENG_KV_FP8, 128, 127);
	rig_prompt(5, prompt, 400);
	check_hit(ENG_KV_BF16, 64, 63);
	rig_close(&rig);
}

/* A multi-turn talk: the second turn's prompt holds the first one's answer. */
KVT_TEST(generated_pages_are_found_too)
{
	static struct trace a, b, miss;
	struct eng_engine *e;

	rig_kvmd(&rig, NULL);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	rig_prompt(6, prompt, 60);
	e = engine_with(ENG_KV_FP8, 256, true);
	trace_submit(e, &a, prompt, 60, 80, false);
	rig_run(e);
	memcpy(prompt + 60, a.tokens, 80 * sizeof(u32));
	rig_prompt(7, prompt + 140, 20);
	trace_submit(e, &b, prompt, 160, NEW, false);
	rig_run(e);
	KVT_EXPECT_EQ(b.res.nr_cached, 128);
	eng_engine_destroy(e);
	run_alone(ENG_KV_FP8, 160, 256, &miss);
	trace_expect_equal(&miss, &b, "second turn");
	rig_close(&rig);
}

/*
 * Bit 6 of byte 3 of a token's latent, bit 5 where that would make a NaN. One token is enough for F32
 * sums; BF16 may round a far token's share away, so on a GPU it is done to the whole page.
 */
static void flip(struct eng_engine *e, u32 pfn, u32 token)
{
	u64 at = kv_mla_latent_off(eng_engine_layout(e), token) + 3;
	u8 byte;

	rig_page_get(e, pfn, at, &byte, 1);
	byte ^= (byte & 0x7f) == 0x3f ? 0x20 : 0x40;
	rig_page_put(e, pfn, at, &byte, 1);
}

/* One byte of one page changes the next logits: pages are what attention reads. */
KVT_TEST(one_flipped_byte_changes_the_next_logits)
{
	static struct trace clean, dirty;
	struct kv_grant pages[8];
	struct eng_request *r;
	struct eng_engine *e;

	rig_kvmd(&rig, NULL);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	rig_prompt(1, prompt, PROMPT);
	run_alone(ENG_KV_FP8, PROMPT, 256, &clean);
	e = engine_with(ENG_KV_FP8, 256, false);
	r = trace_submit(e, &dirty, prompt, PROMPT, NEW, false);
	rig_turns(e, r, 5);
	KVT_EXPECT_EQ(eng_request_pages(r, pages, 8), 3);
	for (u32 t = rig_on_cuda() ? 0 : 17; t < (rig_on_cuda() ? KV_PAGE_TOKENS : 18);
	     t++)
		flip(e, pages[1].pfn, t);
	rig_run(e);
	KVT_EXPECT_EQ(dirty.nr, clean.nr);
	for (u32 i = 0; i < 5; i++)
		KVT_EXPECT(dirty.hashes[i] == clean.hashes[i]);
	KVT_EXPECT(dirty.hashes[5] != clean.hashes[5]);
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_MAIN()
