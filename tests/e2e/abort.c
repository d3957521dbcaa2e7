/* SPDX-License-Identifier: Apache-2.0 */
/*
 * abort.c - O26: a request is aborted in every state of its life, and once more.
 *
 * Each time its pages return within one grace period, a second abort does nothing, and a
 * neighbour's numbers stay what they were.
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>
#include <time.h>

#define PROMPT 200
#define NEW    30

static struct rig rig;
static u32 prompt[PROMPT], neighbour_prompt[PROMPT];
static struct trace alone, neighbour, victim;
static struct eng_engine *e;
static struct eng_request *other;

static void open_scene(u32 batch_max)
{
	struct eng_options opt = {.kv = ENG_KV_FP8,
				  .batch_max = batch_max,
				  .chunk_tokens = 50,
				  .no_prefix = true,
				  .no_seal = true};

	rig_kvmd(&rig, NULL);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	rig_prompt(70, prompt, PROMPT);
	rig_prompt(71, neighbour_prompt, PROMPT);
	e = rig_engine(&rig, &opt);
	trace_submit(e, &alone, neighbour_prompt, PROMPT, NEW, false);
	rig_run(e);
	other = trace_submit(e, &neighbour, neighbour_prompt, PROMPT, NEW, false);
}

static u32 pages_active(void)
{
	cJSON *reply = rig_admin(&rig, "{\"op\":\"pool\"}");
	const cJSON *pool = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "pools"), 0);
	const cJSON *states = cJSON_GetObjectItem(pool, "states");
	u32 n;

	if (!states)
		states = pool;
	n = (u32)cJSON_GetObjectItem(states, "active")->valuedouble +
	    (u32)cJSON_GetObjectItem(states, "quarantine")->valuedouble;
	cJSON_Delete(reply);
	return n;
}

/* Abort twice; then only the neighbour's pages are left. */
static void abort_and_check(struct eng_request *r, enum eng_request_state in_state)
{
	struct kv_grant pages[16];
	struct eng_result res;

	eng_request_result(r, &res);
	KVT_EXPECT_STR(eng_state_str(res.state), eng_state_str(in_state));
	eng_request_abort(r);
	eng_request_abort(r);
	eng_request_result(r, &res);
	KVT_EXPECT_EQ(res.state, ENG_DONE);
	KVT_EXPECT_EQ(res.finish,
		      in_state == ENG_DONE ? ENG_FINISH_LENGTH : ENG_FINISH_ABORT);
	KVT_EXPECT_EQ(eng_request_pages(r, pages, 16), 0);
	KVT_EXPECT(victim.done);
	for (int i = 0;; i++) {
		struct timespec ts = {0, 1000000};

		kvc_flush(eng_engine_kvc(e));
		if (pages_active() == eng_request_pages(other, pages, 16))
			break;
		KVT_EXPECT(i < 200);
		nanosleep(&ts, NULL);
	}
	rig_run(e);
	trace_expect_equal(&alone, &neighbour, "neighbour of an aborted request");
	eng_request_free(r);
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_TEST(o26_abort_before_the_first_turn)
{
	struct eng_request *r;

	open_scene(4);
	r = trace_submit(e, &victim, prompt, PROMPT, NEW, false);
	abort_and_check(r, ENG_WAITING);
}

KVT_TEST(o26_abort_while_it_waits_for_a_place)
{
	struct eng_request *r;

	open_scene(1);
	r = trace_submit(e, &victim, prompt, PROMPT, NEW, false);
	rig_turns(e, other, 3);
	abort_and_check(r, ENG_WAITING);
}

KVT_TEST(o26_abort_between_two_chunks_of_the_prompt)
{
	struct eng_request *r;

	open_scene(4);
	rig_turns(e, other, 1);
	r = trace_submit(e, &victim, prompt, PROMPT, NEW, false);
	KVT_EXPECT(eng_engine_turn(e) > 0);
	KVT_EXPECT(eng_engine_turn(e) > 0);
	abort_and_check(r, ENG_PREFILL);
}

KVT_TEST(o26_abort_while_it_decodes)
{
	struct eng_request *r;

	open_scene(4);
	r = trace_submit(e, &victim, prompt, PROMPT, NEW, false);
	rig_turns(e, r, 5);
	abort_and_check(r, ENG_DECODE);
}

KVT_TEST(o26_abort_after_it_finished)
{
	struct eng_request *r;

	open_scene(4);
	r = trace_submit(e, &victim, prompt, PROMPT, 2, false);
	rig_turns(e, r, 2);
	abort_and_check(r, ENG_DONE);
}

static void abort_in_callback(void *arg, struct eng_request *r, u32 token, float logprob)
{
	u32 *calls = arg;

	if (++*calls == 3) {
		eng_request_abort(r);
		eng_request_abort(r);
	}
}

static void free_when_done(void *arg, struct eng_request *r)
{
	u32 *calls = arg;

	*calls += 100;
	eng_request_free(r);
}

KVT_TEST(o26_abort_and_free_inside_callbacks)
{
	u32 calls = 0;
	struct eng_params p = {.prompt = prompt,
			       .nr_prompt = PROMPT,
			       .max_tokens = NEW,
			       .ignore_eos = true,
			       .on_token = abort_in_callback,
			       .on_done = free_when_done,
			       .arg = &calls};
	struct eng_request *r;
	struct eng_stats st;
	struct eng_err err;

	open_scene(4);
	KVT_EXPECT_EQ(eng_request_submit(e, &p, &r, &err), 0);
	rig_run(e);
	KVT_EXPECT_EQ(calls, 103);
	trace_expect_equal(&alone, &neighbour, "neighbour of an aborted request");
	eng_engine_stats(e, &st);
	KVT_EXPECT_EQ(st.finished[ENG_FINISH_ABORT], 1);
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_TEST(bad_parameters_are_named)
{
	static const struct {
		struct eng_params p;
		int code;
		const char *text;
	} bad[] = {
		{{.nr_prompt = 0, .max_tokens = 1}, -EINVAL, "prompt"},
		{{.nr_prompt = 5, .max_tokens = 0}, -EINVAL, "max_tokens=0"},
		{{.nr_prompt = 5, .max_tokens = 1, .temperature = -1},
		 -EINVAL,
		 "temperature=-1"},
		{{.nr_prompt = 5, .max_tokens = 1, .top_p = 2}, -EINVAL, "top_p=2"},
		{{.nr_prompt = 5, .max_tokens = 9000}, -E2BIG, "max_tokens=9000"},
	};
	struct eng_request *r = NULL;
	struct eng_err err;

	open_scene(4);
	for (size_t i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		struct eng_params p = bad[i].p;

		p.prompt = prompt;
		KVT_EXPECT_EQ(eng_request_submit(e, &p, &r, &err), bad[i].code);
		KVT_EXPECT_HAS(err.text, bad[i].text);
	}
	prompt[2] = 4096;
	{
		struct eng_params p = {.prompt = prompt, .nr_prompt = 5, .max_tokens = 1};

		KVT_EXPECT_EQ(eng_request_submit(e, &p, &r, &err), -EINVAL);
		KVT_EXPECT_HAS(err.text, "prompt[2]=4096");
	}
	KVT_EXPECT(r == NULL);
	rig_run(e);
	trace_expect_equal(&alone, &neighbour, "neighbour of refused requests");
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_MAIN()
