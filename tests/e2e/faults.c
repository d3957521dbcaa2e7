/* SPDX-License-Identifier: Apache-2.0 */
/*
 * faults.c - what a broken engine could do, one injection each (engine/run/inject.h).
 *
 * With the check: exactly the offender ends in KV_STALE, for the right reason, at once;
 * nothing of the bad step is published; an incident with the page's history is kept;
 * neighbours are bit-equal to a run without the injection; the audit is clean. Without
 * the check, swapped rows, a reused page and an old generation give other bytes: the
 * injections are real.
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>

#define VICTIM 0
#define OTHER  1
#define NR     4
#define PROMPT 150
#define NEW    24
#define AT     5 /* tokens the victim has when it is hit */

struct scene {
	struct rig rig;
	u32 prompts[NR][PROMPT];
	struct trace clean[NR];
	struct trace t[NR];
	struct eng_request *r[NR];
};

static struct scene sc;

static struct eng_engine *make_engine(bool seal)
{
	struct eng_options opt = {
		.kv = ENG_KV_FP8, .no_seal = !seal, .no_prefix = true, .inject = true};

	return rig_engine(&sc.rig, &opt);
}

static void open_scene(const char *check)
{
	const char *args[] = {"--check", check, NULL};
	struct eng_engine *e;

	rig_kvmd(&sc.rig, args);
	rig_model(&sc.rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = make_engine(false);
	for (u32 i = 0; i < NR; i++) {
		rig_prompt(20 + i, sc.prompts[i], PROMPT);
		trace_submit(e, &sc.clean[i], sc.prompts[i], PROMPT, NEW, false);
	}
	rig_run(e);
	eng_engine_destroy(e);
}

static void submit(struct eng_engine *e, u32 i)
{
	sc.r[i] = trace_submit(e, &sc.t[i], sc.prompts[i], PROMPT, NEW, false);
}

static bool is_reuse(enum eng_inject_kind kind)
{
	return kind == ENG_INJECT_REUSE || kind == ENG_INJECT_LATE_WRITER;
}

/* A page of another pool: another layout has its own pages and generations. */
static struct kv_grant foreign_page(void)
{
	struct eng_options opt = {.kv = ENG_KV_BF16, .no_seal = true};
	struct eng_engine *e = rig_engine(&sc.rig, &opt);
	struct kv_grant page = {0};
	static struct trace t;
	struct eng_request *r = trace_submit(e, &t, sc.prompts[OTHER], PROMPT, 2, true);

	rig_turns(e, r, 1);
	KVT_EXPECT(eng_request_pages(r, &page, 1) == 1);
	eng_engine_destroy(e);
	return page;
}

static void run_injected(enum eng_inject_kind kind, u32 nr_rows)
{
	struct eng_engine *e = make_engine(kind == ENG_INJECT_WRITE_SEALED);
	struct eng_inject in = {.kind = kind, .nr_rows = nr_rows};
	u32 late = is_reuse(kind) ? OTHER : NR;
	struct kv_grant held[3];
	int rc;

	if (kind == ENG_INJECT_FOREIGN)
		in.foreign = foreign_page();
	for (u32 i = 0; i < NR; i++) {
		if (i != late)
			submit(e, i);
	}
	rig_turns(e, sc.r[VICTIM], AT);
	in.victim = sc.r[VICTIM];
	in.other = kind == ENG_INJECT_SWAP_ROWS ? sc.r[OTHER] : NULL;
	/* so that the victim's step has words to apply */
	if (kind == ENG_INJECT_MIRROR_BEHIND)
		KVT_EXPECT_EQ(kvc_alloc(eng_engine_pool(e), 3, KV_GFP_PREFILL, held), 0);
	rc = eng_inject_arm(e, &in);
	if (rc)
		KVT_FAIL("arm %s: %d", eng_inject_str(kind), rc);
	if (late == OTHER)
		submit(e, OTHER);
	rig_run(e);
	eng_engine_destroy(e);
}

static void expect_audit_clean(void)
{
	cJSON *reply = rig_admin(&sc.rig, "{\"op\":\"audit\"}");

	KVT_EXPECT_EQ(cJSON_GetObjectItem(reply, "damage")->valuedouble, 0);
	cJSON_Delete(reply);
}

static void expect_victim_stale(const struct trace *t, const struct trace *clean, u32 bit)
{
	KVT_EXPECT_STR(eng_finish_str(t->res.finish), "KV_STALE");
	KVT_EXPECT_EQ(t->res.code, KV_STALE);
	if (!(t->res.bad_bits & bit))
		KVT_FAIL("verdict bits 0x%x, expected 0x%x", t->res.bad_bits, bit);
	KVT_EXPECT_EQ(t->nr, AT); /* nothing of the bad step got out */
	trace_expect_begins(t, clean, t->nr, "victim before the fault");
}

static void check_caught(enum eng_inject_kind kind, u32 nr_rows, u32 bit)
{
	bool both = kind == ENG_INJECT_SWAP_ROWS;

	open_scene("batch");
	run_injected(kind, nr_rows);
	expect_victim_stale(&sc.t[VICTIM], &sc.clean[VICTIM], bit);
	for (u32 i = 1; i < NR; i++) {
		if (both && i == OTHER)
			KVT_EXPECT_EQ(sc.t[i].res.finish, ENG_FINISH_STALE);
		else
			trace_expect_equal(&sc.clean[i], &sc.t[i], "neighbour");
	}
	expect_audit_clean();
	KVT_NOTE("%s: bits 0x%x row %u", eng_inject_str(kind), sc.t[VICTIM].res.bad_bits,
		 sc.t[VICTIM].res.bad_row);
}

static void expect_incidents(u32 bit, u32 nr)
{
	cJSON *reply = rig_admin(&sc.rig, "{\"op\":\"incidents\"}"), *in;
	const cJSON *list = cJSON_GetObjectItem(reply, "incidents");

	KVT_EXPECT_EQ(cJSON_GetArraySize(list), nr);
	cJSON_ArrayForEach(in, list)
	{
		u32 bits = (u32)cJSON_GetObjectItem(in, "bits")->valuedouble;

		if (!(bits & bit))
			KVT_FAIL("incident has bits 0x%x, not 0x%x", bits, bit);
		KVT_EXPECT(cJSON_GetObjectItem(in, "page") != NULL);
	}
	cJSON_Delete(reply);
}

#define CAUGHT(name_, kind_, rows_, bit_)                                        \
	KVT_TEST_T(name_, 15)                                                    \
	{                                                                        \
		check_caught(kind_, rows_, bit_);                                \
		expect_incidents(bit_, (kind_) == ENG_INJECT_SWAP_ROWS ? 2 : 1); \
		rig_close(&sc.rig);                                              \
	}

CAUGHT(rows_swapped_between_requests, ENG_INJECT_SWAP_ROWS, 1, KV_BAD_HASH)
CAUGHT(page_freed_and_reused_under_its_reader, ENG_INJECT_REUSE, 2, KV_BAD_GEN)
CAUGHT(late_writer, ENG_INJECT_LATE_WRITER, 1, KV_BAD_GEN)
CAUGHT(old_generation, ENG_INJECT_OLD_GEN, 1, KV_BAD_GEN)
CAUGHT(pfn_out_of_range, ENG_INJECT_BAD_PFN, 1, KV_BAD_PFN)
CAUGHT(write_to_a_sealed_page, ENG_INJECT_WRITE_SEALED, 1, KV_BAD_SEALED)
CAUGHT(truncated_table, ENG_INJECT_TRUNCATED, 1, KV_BAD_LENGTH)
CAUGHT(check_left_out, ENG_INJECT_NO_CHECK, 1, KV_BAD_NOCHECK)
CAUGHT(mirror_behind, ENG_INJECT_MIRROR_BEHIND, 1, KV_BAD_MIRROR)
CAUGHT(page_of_another_pool, ENG_INJECT_FOREIGN, 1, KV_BAD_GEN)

/* strict walks the rows on the host once more, on a mirror of its own. */
KVT_TEST(strict_passes_sound_requests_and_catches_a_reused_page)
{
	open_scene("strict");
	run_injected(ENG_INJECT_REUSE, 2);
	expect_victim_stale(&sc.t[VICTIM], &sc.clean[VICTIM], KV_BAD_GEN);
	for (u32 i = 0; i < NR; i++)
		KVT_EXPECT_EQ(sc.clean[i].res.finish, ENG_FINISH_LENGTH);
	for (u32 i = 1; i < NR; i++)
		trace_expect_equal(&sc.clean[i], &sc.t[i], "neighbour");
	rig_close(&sc.rig);
}

/* Without the check the victim goes on, on other bytes. */
static void check_wrong_bytes(enum eng_inject_kind kind, u32 nr_rows)
{
	u32 differ = 0;

	open_scene("off");
	run_injected(kind, nr_rows);
	KVT_EXPECT_EQ(sc.t[VICTIM].res.finish, ENG_FINISH_LENGTH);
	KVT_EXPECT_EQ(sc.t[VICTIM].nr, NEW);
	for (u32 i = 0; i < NEW; i++)
		differ += sc.t[VICTIM].hashes[i] != sc.clean[VICTIM].hashes[i];
	KVT_NOTE("%s with check off: %u of %u logits rows differ", eng_inject_str(kind),
		 differ, NEW);
	KVT_EXPECT(differ > 0);
	for (u32 i = 2; i < NR; i++)
		trace_expect_equal(&sc.clean[i], &sc.t[i], "neighbour");
	rig_close(&sc.rig);
}

KVT_TEST(check_off_swapped_rows_give_wrong_bytes)
{
	check_wrong_bytes(ENG_INJECT_SWAP_ROWS, 2);
}

KVT_TEST(check_off_reused_page_gives_wrong_bytes)
{
	check_wrong_bytes(ENG_INJECT_REUSE, 2);
}

KVT_TEST(check_off_old_generation_gives_wrong_bytes)
{
	check_wrong_bytes(ENG_INJECT_OLD_GEN, 1);
}

/* O34: pages come back from another session full of NaN bytes; the new owner sees none.
 */
KVT_TEST(o34_dirty_pages_are_zeroed_before_use)
{
	static struct trace t;
	struct kv_grant held[64], pages[8];
	struct eng_engine *a, *b;
	struct eng_stats st;
	struct eng_request *r;
	u32 nr, layers;
	u8 *page;

	open_scene("batch");
	a = make_engine(false);
	KVT_EXPECT_EQ(kvc_alloc(eng_engine_pool(a), 64, KV_GFP_PREFILL, held), 0);
	page = malloc(kv_page_bytes(eng_engine_layout(a)));
	KVT_EXPECT(page);
	memset(page, 0xff, kv_page_bytes(eng_engine_layout(a)));
	for (u32 i = 0; i < 64; i++)
		rig_page_put(a, held[i].pfn, 0, page,
			     kv_page_bytes(eng_engine_layout(a)));
	kvc_free(eng_engine_pool(a), held, 64);
	eng_engine_destroy(a);
	b = make_engine(false);
	r = trace_submit(b, &t, sc.prompts[VICTIM], PROMPT, NEW, false);
	rig_turns(b, r, 3);
	eng_engine_stats(b, &st);
	nr = eng_request_pages(r, pages, 8);
	KVT_EXPECT_EQ(nr, 3);
	layers = eng_engine_layout(b)->nr_layers;
	rig_page_get(b, pages[nr - 1].pfn, 0, page, kv_page_bytes(eng_engine_layout(b)));
	for (u32 l = 0; l < layers; l++) {
		const struct kv_layout *lay = eng_engine_layout(b);
		const u8 *part = page + (size_t)l * kv_layer_stride(lay);

		for (u32 s = 40; s < 64; s++) {
			const u8 *latent = part + kv_mla_latent_off(lay, s);

			for (u32 i = 0; i < lay->latent_dim; i++)
				KVT_EXPECT_EQ(latent[i], 0);
		}
	}
	free(page);
	rig_run(b);
	trace_expect_equal(&sc.clean[VICTIM], &t, "on pages that were full of NaN");
	KVT_NOTE("%llu pages zeroed", (unsigned long long)st.zeroed_pages);
	KVT_EXPECT(st.zeroed_pages >= 1);
	eng_engine_destroy(b);
	rig_close(&sc.rig);
}

/*
 * The step that fills a page fails: its last token was never appended. Were the page sealed, its
 * key would promise bytes that it does not hold.
 */
KVT_TEST(failed_step_seals_nothing)
{
	enum { SHORT = 120, FILL = 8, LONG = 148 };
	struct eng_inject in = {.kind = ENG_INJECT_NO_CHECK};
	struct eng_options opt = {.kv = ENG_KV_FP8, .inject = true};
	static struct trace clean, t;
	struct eng_engine *e;
	u32 ids[LONG];

	open_scene("batch");
	e = make_engine(false);
	trace_submit(e, &clean, sc.prompts[VICTIM], SHORT, FILL, false);
	rig_run(e);
	memcpy(ids, sc.prompts[VICTIM], SHORT * sizeof(u32));
	memcpy(ids + SHORT, clean.tokens, FILL * sizeof(u32));
	memcpy(ids + SHORT + FILL, sc.prompts[OTHER],
	       (LONG - SHORT - FILL) * sizeof(u32));
	trace_submit(e, &clean, ids, LONG, 5, false);
	rig_run(e);
	eng_engine_destroy(e);
	e = rig_engine(&sc.rig, &opt);
	in.victim = trace_submit(e, &t, sc.prompts[VICTIM], SHORT, NEW, false);
	rig_turns(e, in.victim, FILL);
	KVT_EXPECT_EQ(eng_inject_arm(e, &in), 0);
	rig_run(e);
	KVT_EXPECT_EQ(t.res.finish, ENG_FINISH_STALE);
	trace_submit(e, &t, ids, LONG, 5, false);
	rig_run(e);
	KVT_EXPECT_EQ(t.res.nr_cached, 64);
	trace_expect_equal(&clean, &t, "behind a failed request");
	eng_engine_destroy(e);
	rig_close(&sc.rig);
}

KVT_TEST(injections_need_the_option)
{
	struct eng_options opt = {.kv = ENG_KV_FP8};
	struct eng_inject in = {.kind = ENG_INJECT_BAD_PFN};
	struct eng_engine *e;

	rig_kvmd(&sc.rig, NULL);
	rig_model(&sc.rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&sc.rig, &opt);
	KVT_EXPECT_EQ(eng_inject_arm(e, &in), -EPERM);
	eng_engine_destroy(e);
	rig_close(&sc.rig);
}

KVT_MAIN()
