/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_cost.c - kvbench check-cost: what the batch check adds to a decode step.
 *
 * Two private daemons, one with check off, one with check batch, and one engine on each;
 * rounds of decode steps alternate between them, so that slow drifts of the machine hit
 * both alike. The medians over the rounds are compared. One thread.
 */
#include <cjson/cJSON.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "inject.h"
#include "scene.h"

#define ROUNDS_MAX 101u

struct side {
	struct kvb_scene scene;
	struct eng_engine *engine;
	double tok_s[ROUNDS_MAX];
	double step_us[ROUNDS_MAX];
};

static int cmp_double(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(const double *v, u32 n)
{
	double sorted[ROUNDS_MAX];

	memcpy(sorted, v, n * sizeof(*v));
	qsort(sorted, n, sizeof(*v), cmp_double);
	return sorted[n / 2];
}

static int side_open(struct side *s, const char *model, const char *check, u32 batch)
{
	struct eng_options opt = {
		.size_bytes = sizeof(opt),
		.kv = ENG_KV_FP8,
		.client_name = "kvbench-cost",
		.batch_max = batch,
		.no_prefix = true,
		.no_seal = true,
	};
	struct eng_err err = {{0}};

	if (kvb_scene_open(&s->scene, model, NULL, "bf16", NULL, check))
		return 1;
	opt.socket_path = s->scene.socket_path;
	if (eng_engine_create(s->scene.model, &opt, &s->engine, &err)) {
		fprintf(stderr, "kvbench: %s\n", err.text);
		return 1;
	}
	return 0;
}

static void side_close(struct side *s)
{
	if (s->engine)
		eng_engine_destroy(s->engine);
	kvb_scene_close(&s->scene);
}

/* One round: prefill @batch requests, then time nothing but decode steps. */
static int side_round(struct side *s, u32 batch, u32 steps, u32 round)
{
	struct eng_request *rq[64];
	struct eng_stats before, after;
	struct eng_err err = {{0}};
	struct eng_result res;
	u64 t0, t1;
	int r = 0;

	for (u32 i = 0; i < batch; i++) {
		struct eng_params p = {
			.prompt = s->scene.prompts[i % KVB_PROMPTS],
			.nr_prompt = KVB_PROMPT_TOKENS - i / KVB_PROMPTS,
			.max_tokens = steps + 8,
			.ignore_eos = true,
		};

		if (eng_request_submit(s->engine, &p, &rq[i], &err)) {
			fprintf(stderr, "kvbench: %s\n", err.text);
			return 1;
		}
	}
	for (bool ready = false; !ready && r >= 0;) {
		r = eng_engine_turn(s->engine);
		ready = true;
		for (u32 i = 0; i < batch; i++) {
			eng_request_result(rq[i], &res);
			ready &= res.state == ENG_DECODE;
		}
	}
	eng_engine_stats(s->engine, &before);
	t0 = kv_now_ns();
	for (u32 i = 0; r >= 0 && i < steps; i++)
		r = eng_engine_turn(s->engine);
	t1 = kv_now_ns();
	eng_engine_stats(s->engine, &after);
	for (u32 i = 0; i < batch; i++)
		eng_request_free(rq[i]);
	if (r < 0 || after.steps == before.steps)
		return 1;
	s->tok_s[round] = (double)(after.generated_tokens - before.generated_tokens) /
			  ((double)(t1 - t0) / 1e9);
	s->step_us[round] =
		(double)(t1 - t0) / 1e3 / (double)(after.steps - before.steps);
	return 0;
}

static void report(const struct side *off, const struct side *batch, u32 rounds, u32 nr,
		   bool json)
{
	double off_tok = median(off->tok_s, rounds),
	       batch_tok = median(batch->tok_s, rounds);
	double diff[ROUNDS_MAX];
	cJSON *o;
	char *text;

	/* paired: each round's own neighbour, so that drift cancels */
	for (u32 i = 0; i < rounds; i++)
		diff[i] = batch->step_us[i] - off->step_us[i];
	if (!json) {
		printf("batch %u, %u rounds\n", nr, rounds);
		printf("check off    %8.1f tok/s  %9.1f us a step\n", off_tok,
		       median(off->step_us, rounds));
		printf("check batch  %8.1f tok/s  %9.1f us a step\n", batch_tok,
		       median(batch->step_us, rounds));
		printf("added        %8.2f us a step (median of the paired differences)\n",
		       median(diff, rounds));
		return;
	}
	o = cJSON_CreateObject();
	cJSON_AddNumberToObject(o, "off_tok_s", off_tok);
	cJSON_AddNumberToObject(o, "batch_tok_s", batch_tok);
	cJSON_AddNumberToObject(o, "added_us_per_step", median(diff, rounds));
	cJSON_AddNumberToObject(o, "off_step_us", median(off->step_us, rounds));
	cJSON_AddNumberToObject(o, "batch_step_us", median(batch->step_us, rounds));
	cJSON_AddNumberToObject(o, "batch", nr);
	cJSON_AddNumberToObject(o, "rounds", rounds);
	text = cJSON_Print(o);
	puts(text);
	free(text);
	cJSON_Delete(o);
}

static int usage(void)
{
	fprintf(stderr,
		"usage: kvbench check-cost [--model DIR] [--batch 1..64] [--steps N] "
		"[--rounds 1..101] [--json]\n");
	return 2;
}

static int parse_u32(const char *name, const char *text, u32 lo, u32 hi, u32 *ret)
{
	char *end;
	unsigned long v = strtoul(text, &end, 10);

	if (*end || end == text || v < lo || v > hi) {
		fprintf(stderr, "kvbench: --%s %s: %u..%u\n", name, text, lo, hi);
		return 2;
	}
	*ret = (u32)v;
	return 0;
}

int kvb_check_cost(int argc, char **argv)
{
	static const struct option opts[] = {
		{"model", 1, 0, 'm'},  {"batch", 1, 0, 'b'}, {"steps", 1, 0, 's'},
		{"rounds", 1, 0, 'r'}, {"json", 0, 0, 'j'},  {0, 0, 0, 0},
	};
	const char *model = "tests/models/tiny-k2";
	u32 nr = 8, steps = 64, rounds = 11;
	static struct side off, batch;
	bool json = false;
	int c, r = 0;

	optind = 1;
	while (!r && (c = getopt_long(argc, argv, "", opts, NULL)) >= 0) {
		switch (c) {
		case 'm':
			model = optarg;
			break;
		case 'b':
			r = parse_u32("batch", optarg, 1, 64, &nr);
			break;
		case 's':
			r = parse_u32("steps", optarg, 1, 4096, &steps);
			break;
		case 'r':
			r = parse_u32("rounds", optarg, 1, ROUNDS_MAX, &rounds);
			break;
		case 'j':
			json = true;
			break;
		default:
			r = usage();
		}
	}
	if (r)
		return r;
	r = side_open(&off, model, "off", nr) || side_open(&batch, model, "batch", nr);
	/* one round each to warm caches; overwritten by round 0 */
	if (!r)
		r = side_round(&off, nr, steps, 0) || side_round(&batch, nr, steps, 0);
	for (u32 i = 0; !r && i < rounds; i++)
		r = side_round(i & 1 ? &batch : &off, nr, steps, i) ||
		    side_round(i & 1 ? &off : &batch, nr, steps, i);
	if (!r)
		report(&off, &batch, rounds, nr, json);
	side_close(&off);
	side_close(&batch);
	return r ? 1 : 0;
}
