/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pressure.c - too few pages: requests are preempted, computed again, and all of them
 * finish with the tokens they would have had alone.
 */
#include "tests/kvt.h"
#include <unistd.h>

#include "base/clock.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>

#define NR	8
#define PROMPT	150
#define NEW	60 /* 210 tokens: 4 pages */
#define TEXT_AT 40

static struct rig rig;
static u32 prompts[NR][PROMPT];
static struct trace alone[NR], t[NR];

static void open_small(const char *host_bytes)
{
	const char *args[] = {"--host-bytes", host_bytes, NULL};

	rig_kvmd(&rig, args);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	for (u32 i = 0; i < NR; i++)
		rig_prompt(TEXT_AT + i, prompts[i], PROMPT);
}

static u32 pool_pages(struct eng_engine *e)
{
	struct kvc_pool_info info;

	kvc_pool_get_info(eng_engine_pool(e), &info);
	return info.geometry.nr_pages;
}

/* Four at a time, which the pool can hold. */
static void run_unpressed(u32 nr_new)
{
	struct eng_options opt = {
		.kv = ENG_KV_FP8, .no_seal = true, .no_prefix = true, .batch_max = 4};
	struct eng_engine *e = rig_engine(&rig, &opt);

	for (u32 i = 0; i < NR; i++)
		trace_submit(e, &alone[i], prompts[i], PROMPT, nr_new, true);
	rig_run(e);
	for (u32 i = 0; i < NR; i++)
		KVT_EXPECT_EQ(alone[i].res.nr_preempted, 0);
	eng_engine_destroy(e);
}

/* With sealing: what was computed before a preemption is mostly found again. */
static void check_preempt(bool seal)
{
	struct eng_options opt = {.kv = ENG_KV_FP8, .no_seal = !seal, .no_prefix = !seal};
	struct eng_engine *e;
	struct eng_stats st;

	open_small("4MiB");
	run_unpressed(NEW);
	e = rig_engine(&rig, &opt);
	KVT_NOTE("pool of %u pages for %u requests of 4", pool_pages(e), NR);
	KVT_EXPECT(pool_pages(e) < NR * 4 && pool_pages(e) >= 8);
	for (u32 i = 0; i < NR; i++)
		trace_submit(e, &t[i], prompts[i], PROMPT, NEW, false);
	rig_run(e);
	eng_engine_stats(e, &st);
	for (u32 i = 0; i < NR; i++) {
		KVT_EXPECT_STR(eng_finish_str(t[i].res.finish), "length");
		trace_expect_equal(&alone[i], &t[i], "under pressure");
	}
	KVT_NOTE("%llu preemptions", (unsigned long long)st.preemptions);
	KVT_EXPECT(st.preemptions > 0);
	KVT_EXPECT_EQ(t[0].res.nr_preempted, 0); /* the oldest is nobody's victim */
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_TEST(preempted_requests_finish_with_the_same_bits)
{
	check_preempt(false);
}

KVT_TEST(preempted_requests_find_their_sealed_pages)
{
	check_preempt(true);
}

/*
 * O23: four engines share a pool that holds two of their requests; all frees
 * pass through steps and quarantine. Each engine must finish.
 */
KVT_TEST(o23_engines_short_of_pages_all_finish)
{
	struct eng_options opt = {.kv = ENG_KV_FP8, .no_seal = true, .no_prefix = true};
	struct eng_engine *e[4];
	u64 turns = 0;
	u32 left = 4;

	open_small("2MiB");
	for (u32 i = 0; i < 4; i++) {
		e[i] = rig_engine(&rig, &opt);
		trace_submit(e[i], &t[i], prompts[i], 20 + i, 200, true);
	}
	KVT_NOTE("pool of %u pages, 4 engines that need 4 each", pool_pages(e[0]));
	KVT_EXPECT(pool_pages(e[0]) < 16);
	while (left) {
		bool ran = false;

		left = 0;
		for (u32 i = 0; i < 4; i++) {
			int rc = t[i].done ? 0 : eng_engine_turn(e[i]);

			KVT_EXPECT(rc >= 0);
			ran |= rc > 0;
			left += !t[i].done;
		}
		if (left && !ran)
			eng_engine_wait(e[0], 1);
		turns++;
	}
	for (u32 i = 0; i < 4; i++) {
		KVT_EXPECT_STR(eng_finish_str(t[i].res.finish), "length");
		KVT_EXPECT_EQ(t[i].nr, 200);
		KVT_NOTE("engine %u: %u preemptions", i, t[i].res.nr_preempted);
		eng_engine_destroy(e[i]);
	}
	KVT_NOTE("%llu rounds", (unsigned long long)turns);
	rig_close(&rig);
}

KVT_TEST(request_larger_than_the_pool_is_refused_at_submit)
{
	struct eng_options opt = {.kv = ENG_KV_FP8};
	struct eng_params p = {
		.prompt = prompts[0], .nr_prompt = PROMPT, .max_tokens = 4000};
	struct eng_request *r = NULL;
	struct eng_engine *e;
	struct eng_err err;

	open_small("2MiB");
	e = rig_engine(&rig, &opt);
	KVT_EXPECT_EQ(eng_request_submit(e, &p, &r, &err), -E2BIG);
	KVT_EXPECT_HAS(err.text, "max_tokens=4000");
	eng_engine_destroy(e);
	rig_close(&rig);
}

/* Somebody else holds the pages and does not give them back: an outcome, not a hang. */
KVT_TEST(no_pages_ends_in_an_outcome)
{
	struct eng_options opt = {.kv = ENG_KV_FP8, .no_seal = true, .admit_ms = 300};
	struct kv_grant held[64];
	struct eng_engine *e, *other;
	u32 nr = 0;

	open_small("2MiB");
	other = rig_engine(&rig, &opt);
	while (nr < 64 &&
	       kvc_alloc(eng_engine_pool(other), 1, KV_GFP_NOWAIT, &held[nr]) == 0)
		nr++;
	KVT_EXPECT_EQ(nr, pool_pages(other));
	e = rig_engine(&rig, &opt);
	trace_submit(e, &t[0], prompts[0], PROMPT, 4, true);
	rig_run(e);
	KVT_EXPECT_EQ(t[0].res.finish, ENG_FINISH_NO_PAGES);
	KVT_EXPECT_EQ(t[0].res.code, KV_FULL);
	KVT_EXPECT_EQ(kvc_free(eng_engine_pool(other), held, nr), 0);
	KVT_EXPECT_EQ(kvc_flush(eng_engine_kvc(other)), 0);
	trace_submit(e, &t[1], prompts[1], PROMPT, 4, true);
	rig_run(e);
	KVT_EXPECT_EQ(t[1].res.finish, ENG_FINISH_LENGTH);
	eng_engine_destroy(e);
	eng_engine_destroy(other);
	rig_close(&rig);
}

/* Who stood in the queue for longer than that has not asked for pages yet: no reason to end it
 * when the first answer is that there are none at the moment. */
KVT_TEST(time_in_the_queue_is_no_time_without_pages)
{
	struct eng_options opt = {.kv = ENG_KV_FP8,
				  .no_seal = true,
				  .no_prefix = true,
				  .batch_max = 1,
				  .admit_ms = 1500};
	struct kv_grant held[64];
	struct eng_request *r;
	struct eng_result res;
	struct eng_engine *e, *other;
	u32 nr = 0;

	open_small("2MiB");
	other = rig_engine(&rig, &opt);
	e = rig_engine(&rig, &opt);
	trace_submit(e, &t[0], prompts[0], 20, 10, true);
	r = trace_submit(e, &t[1], prompts[1], PROMPT, 4, true);
	while (t[0].nr < 5)
		KVT_EXPECT(eng_engine_turn(e) >= 0);
	usleep(1600000);
	while (nr < 64 &&
	       kvc_alloc(eng_engine_pool(other), 1, KV_GFP_NOWAIT, &held[nr]) == 0)
		nr++;
	while (!t[0].done)
		KVT_EXPECT(eng_engine_turn(e) >= 0);
	KVT_EXPECT_EQ(eng_engine_turn(e), 0); /* refused */
	eng_request_result(r, &res);
	KVT_EXPECT_STR(eng_state_str(res.state), "waiting");
	KVT_EXPECT_EQ(kvc_free(eng_engine_pool(other), held, nr), 0);
	KVT_EXPECT_EQ(kvc_flush(eng_engine_kvc(other)), 0);
	rig_run(e);
	KVT_EXPECT_EQ(t[1].res.finish, ENG_FINISH_LENGTH);
	eng_engine_destroy(e);
	eng_engine_destroy(other);
	rig_close(&rig);
}

/* Pages are coming, but not before a step of somebody else retires, and it never does: that
 * is an outcome as well, also for a request that runs. */
KVT_TEST(pending_for_long_ends_in_an_outcome)
{
	struct eng_options opt = {
		.kv = ENG_KV_FP8, .no_seal = true, .no_prefix = true, .admit_ms = 300};
	struct eng_engine *e, *other, *stuck;
	u64 until_ns = kv_now_ns() + 15 * KV_NSEC_PER_SEC;
	struct kv_grant held[64];
	struct kvc_step *step;
	u32 nr = 0;

	open_small("2MiB");
	other = rig_engine(&rig, &opt);
	stuck = rig_engine(&rig, &opt);
	e = rig_engine(&rig, &opt);
	trace_submit(e, &t[0], prompts[0], PROMPT, 200, true);
	while (!t[0].nr)
		KVT_EXPECT(eng_engine_turn(e) >= 0);
	while (nr < 64 &&
	       kvc_alloc(eng_engine_pool(other), 1, KV_GFP_NOWAIT, &held[nr]) == 0)
		nr++;
	KVT_EXPECT(nr > 1);
	KVT_EXPECT_EQ(kvc_step_begin(eng_engine_kvc(stuck), &step), 0);
	KVT_EXPECT_EQ(kvc_free(eng_engine_pool(other), held, nr), 0);
	KVT_EXPECT_EQ(kvc_flush(eng_engine_kvc(other)), 0);
	while (!t[0].done && kv_now_ns() < until_ns) {
		KVT_EXPECT(eng_engine_turn(e) >= 0);
		usleep(200);
	}
	KVT_EXPECT(t[0].done);
	KVT_EXPECT_EQ(t[0].res.finish, ENG_FINISH_NO_PAGES);
	KVT_EXPECT(t[0].res.code == KV_PENDING || t[0].res.code == KV_FULL);
	kvc_step_retire(step);
	trace_submit(e, &t[1], prompts[1], PROMPT, 4, true);
	rig_run(e);
	KVT_EXPECT_EQ(t[1].res.finish, ENG_FINISH_LENGTH);
	eng_engine_destroy(e);
	eng_engine_destroy(stuck);
	eng_engine_destroy(other);
	rig_close(&rig);
}

/* An engine that ends has given every page back: kvmd counts what is left. */
KVT_TEST(an_engine_leaves_no_page_behind)
{
	struct eng_options opt = {.kv = ENG_KV_FP8, .admit_ms = 300};
	cJSON *reply, *left;
	struct eng_engine *e;

	open_small("16MiB");
	e = rig_engine(&rig, &opt);
	for (u32 i = 0; i < 3; i++)
		trace_submit(e, &t[i], prompts[i], PROMPT, NEW, i == 1);
	rig_run(e);
	trace_submit(e, &t[3], prompts[3], PROMPT, NEW, false);
	while (!t[3].nr) /* one that is under way as well */
		KVT_EXPECT(eng_engine_turn(e) >= 0);
	eng_engine_destroy(e);
	usleep(50000);
	reply = rig_admin(&rig, "{\"op\":\"vmstat\"}");
	left = cJSON_GetObjectItem(cJSON_GetObjectItem(reply, "vmstat"), "left_pages");
	KVT_EXPECT(cJSON_IsNumber(left));
	KVT_EXPECT_EQ(left->valueint, 0);
	cJSON_Delete(reply);
	rig_close(&rig);
}

/*
 * kvmd takes a page from its holder (kvmctl evict --revoke). The page may already carry
 * another's bytes: the request is computed again elsewhere. No incident: it is an outcome.
 */
static void check_revoke(bool seal, u32 row)
{
	struct eng_options opt = {.kv = ENG_KV_FP8, .no_seal = !seal, .no_prefix = true};
	struct kv_grant pages[8];
	struct kvc_pool_info info;
	struct eng_request *r;
	struct eng_engine *e;
	struct eng_stats st;
	char request[128];
	cJSON *reply;

	open_small("16MiB");
	e = rig_engine(&rig, &opt);
	trace_submit(e, &alone[0], prompts[0], PROMPT, 30, true);
	trace_submit(e, &alone[1], prompts[1], PROMPT, 30, true);
	rig_run(e);
	r = trace_submit(e, &t[0], prompts[0], PROMPT, 30, false);
	trace_submit(e, &t[1], prompts[1], PROMPT, 30, false);
	rig_turns(e, r, 5);
	KVT_EXPECT_EQ(eng_request_pages(r, pages, 8), 3);
	kvc_pool_get_info(eng_engine_pool(e), &info);
	snprintf(
		request, sizeof(request),
		"{\"op\":\"evict\",\"target\":\"page\",\"pool\":%u,\"pfn\":%u,\"revoke\":true}",
		info.pool_id, pages[row].pfn);
	cJSON_Delete(rig_admin(&rig, request));
	rig_run(e);
	for (u32 i = 0; i < 2; i++) {
		KVT_EXPECT_STR(eng_finish_str(t[i].res.finish), "length");
		trace_expect_equal(&alone[i], &t[i], "after REVOKE");
	}
	KVT_EXPECT_EQ(t[0].res.nr_preempted, 1);
	KVT_EXPECT_EQ(t[1].res.nr_preempted, 0);
	eng_engine_stats(e, &st);
	KVT_EXPECT_EQ(st.revoked, 1);
	KVT_EXPECT_EQ(st.stale_aborts, 0);
	reply = rig_admin(&rig, "{\"op\":\"incidents\"}");
	KVT_EXPECT_EQ(cJSON_GetArraySize(cJSON_GetObjectItem(reply, "incidents")), 0);
	cJSON_Delete(reply);
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_TEST(revoked_page_is_computed_again)
{
	check_revoke(false, 1);
}

KVT_TEST(revoked_sealed_page_is_computed_again)
{
	check_revoke(true, 0);
}

/* The page it appends to goes: whether the news or the check comes first must not matter. */
KVT_TEST(revoked_page_of_the_writer_is_computed_again)
{
	check_revoke(false, 2);
}

static void open_with_quota(const char *max)
{
	static char path[64];
	const char *args[] = {"--config", path, "--host-bytes", "64MiB", NULL};
	FILE *f;
	int fd;

	snprintf(path, sizeof(path), "/tmp/kvmd-test-XXXXXX");
	fd = mkstemp(path);
	f = fdopen(fd, "w");
	KVT_EXPECT(f);
	fprintf(f,
		"{\"domains\":[{\"name\":\"d\",\"tenants\":[\"t\"]}],\"tenants\":[{\"name\":"
		"\"t\",\"uids\":[%u],\"gpus\":[{\"gpu\":\"*\",\"max\":\"%s\"}]}]}",
		getuid(), max);
	fclose(f);
	rig_kvmd(&rig, args);
	unlink(path);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	for (u32 i = 0; i < NR; i++)
		rig_prompt(TEXT_AT + i, prompts[i], PROMPT);
}

/* The tenant may hold 5 pages: requests of 4 take turns, one of 8 is told at once. */
KVT_TEST(quota_preempts_or_refuses_but_never_hangs)
{
	struct eng_options opt = {.kv = ENG_KV_FP8, .no_seal = true, .no_prefix = true};
	static struct trace big;
	struct eng_engine *e;
	u32 text[500];

	open_with_quota("1MiB");
	e = rig_engine(&rig, &opt);
	rig_prompt(TEXT_AT + NR, text, 500);
	trace_submit(e, &t[0], prompts[0], PROMPT, NEW, true);
	trace_submit(e, &big, text, 500, 4, true);
	trace_submit(e, &t[1], prompts[1], PROMPT, NEW, true);
	trace_submit(e, &t[2], prompts[2], PROMPT, NEW, true);
	rig_run(e);
	for (u32 i = 0; i < 3; i++)
		KVT_EXPECT_STR(eng_finish_str(t[i].res.finish), "length");
	KVT_EXPECT_EQ(big.res.finish, ENG_FINISH_NO_PAGES);
	KVT_EXPECT_EQ(big.res.code, KV_QUOTA);
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_MAIN()
