/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_cost.c - kvbench check-cost: what the batch check adds to a decode step.
 *
 * Two private daemons, one with check off, one with check batch, and one engine on each. Both decode
 * the same requests, a step here and a step there in turn, so that context lengths, caches and slow
 * drifts of the machine hit both alike. The medians are compared, and the added time is the median
 * of the differences of neighbouring steps. That difference is the sum of everything that differs between
 * two engines, page placement included; `check alone` times mirror update and check by themselves.
 * One thread.
 */
#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "inject.h"
#include "scene.h"

#define STEPS_MAX    4096u
#define REQUESTS_MAX 64u

/**
 * struct side - one daemon and its engine
 * @step_us: time of each measured step
 */
struct side {
	struct kvb_scene scene;
	struct eng_engine *engine;
	struct eng_request *requests[REQUESTS_MAX];
	double step_us[STEPS_MAX];
};

static int cmp_double(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(const double *v, u32 n)
{
	static double sorted[STEPS_MAX];

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

	s->scene.device = ENG_DEVICE_HOST;
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

/* Submit @nr requests and run until all of them decode. */
static int side_fill(struct side *s, u32 nr, u32 steps)
{
	struct eng_err err = {{0}};
	struct eng_result res;
	int r = 0;

	for (u32 i = 0; i < nr; i++) {
		struct eng_params p = {
			.prompt = s->scene.prompts[i % KVB_PROMPTS],
			.nr_prompt = KVB_PROMPT_TOKENS - i / KVB_PROMPTS,
			.max_tokens = steps + 8 * nr, /* all must decode at once */
			.ignore_eos = true,
		};

		if (eng_request_submit(s->engine, &p, &s->requests[i], &err)) {
			fprintf(stderr, "kvbench: %s\n", err.text);
			return 1;
		}
	}
	for (bool ready = false; !ready && r >= 0;) {
		r = eng_engine_turn(s->engine);
		ready = true;
		for (u32 i = 0; i < nr; i++) {
			eng_request_result(s->requests[i], &res);
			ready &= res.state == ENG_DECODE;
			if (res.state == ENG_DONE)
				r = -EIO;
		}
	}
	return r < 0;
}

/* One decode step of all @nr requests; anything else is a failure. */
static int side_step(struct side *s, u32 nr, u32 at)
{
	u64 t0 = kv_now_ns();
	int r = eng_engine_turn(s->engine);

	s->step_us[at] = (double)(kv_now_ns() - t0) / 1e3;
	if (r != (int)nr)
		fprintf(stderr, "kvbench: step %u: %d of %u requests took part\n", at, r,
			nr);
	return r != (int)nr;
}

#define ALONE_PAGES 16384u
#define ALONE_ROWS  12u
#define ALONE_CALLS 2001u

struct alone {
	struct {
		struct kv_step_block block;
		struct kv_log_entry log[8];
	} step;
	struct {
		struct kv_mirror head;
		u64 tags[ALONE_PAGES];
	} mirror;
	struct kv_row rows[REQUESTS_MAX * ALONE_ROWS];
	u32 row_start[REQUESTS_MAX + 1];
	u32 lengths[REQUESTS_MAX];
	u64 nonces[REQUESTS_MAX];
	struct kv_verdict verdicts[REQUESTS_MAX];
};

static void alone_fill(struct alone *a, u32 nr)
{
	a->mirror.head.nr_pages = ALONE_PAGES;
	for (u32 i = 0; i < ALONE_PAGES; i++)
		a->mirror.tags[i] = kv_tag_make(i + 1, KV_TAG_LIVE);
	for (u32 r = 0; r < nr; r++) {
		a->nonces[r] = 0x9e3779b97f4a7c15ull * (r + 1);
		a->lengths[r] = ALONE_ROWS * KV_PAGE_TOKENS;
		for (u32 i = 0; i < ALONE_ROWS; i++) {
			u32 pfn = (r * 7919 + i * 104729) % ALONE_PAGES;

			a->rows[r * ALONE_ROWS + i] =
				kv_row_make(pfn, a->mirror.tags[pfn], 0, a->nonces[r], i);
		}
		a->row_start[r + 1] = (r + 1) * ALONE_ROWS;
	}
}

/* Mirror update and check by themselves: @nr requests of ALONE_ROWS rows, 8 changes a step. */
static double alone_us(u32 nr)
{
	static struct alone a;
	static double us[ALONE_CALLS];
	struct kvk_tag_check_args args = {
		.block = &a.step.block,
		.mirror = &a.mirror.head,
		.batch = {.rows = a.rows,
			  .row_start = a.row_start,
			  .lengths = a.lengths,
			  .nr_requests = nr},
		.nonces = a.nonces,
		.page_tokens = KV_PAGE_TOKENS,
		.ret_verdicts = a.verdicts,
	};

	alone_fill(&a, nr);
	for (u32 i = 0; i < ALONE_CALLS; i++) {
		u64 t0;

		a.step.block = (struct kv_step_block){.step = i + 1,
						      .log_from = i * 8,
						      .log_to = i * 8 + 8,
						      .nr_pages = ALONE_PAGES,
						      .kind = KV_BLOCK_DELTA,
						      .nr_entries = 8};
		for (u32 k = 0; k < 8; k++)
			a.step.log[k] = (struct kv_log_entry){
				.tag = a.mirror.tags[k], .pfn = k, .sequence = i * 8 + k};
		t0 = kv_now_ns();
		kvk_host_ops()->tag_check(&args, NULL);
		us[i] = (double)(kv_now_ns() - t0) / 1e3;
	}
	for (u32 r = 0; r < nr; r++)
		if (!kv_verdict_ok(a.verdicts[r], ALONE_CALLS, ALONE_ROWS))
			return -1; /* a check that does not pass is not what we time */
	return median(us, ALONE_CALLS);
}

static void report(const struct side *off, const struct side *batch, u32 steps, u32 nr,
		   bool json)
{
	double off_us = median(off->step_us, steps),
	       batch_us = median(batch->step_us, steps);
	static double diff[STEPS_MAX];
	double added;
	cJSON *o;
	char *text;

	for (u32 i = 0; i < steps; i++)
		diff[i] = batch->step_us[i] - off->step_us[i];
	added = median(diff, steps);
	if (!json) {
		printf("%u requests, %u steps each side, in turn\n", nr, steps);
		printf("check off    %8.1f tok/s  %9.1f us a step\n", nr * 1e6 / off_us,
		       off_us);
		printf("check batch  %8.1f tok/s  %9.1f us a step\n", nr * 1e6 / batch_us,
		       batch_us);
		printf("added        %8.2f us a step (%.2f %%)\n", added,
		       100 * added / off_us);
		printf("check alone  %8.2f us (%u rows)\n", alone_us(nr),
		       nr * ALONE_ROWS);
		return;
	}
	o = cJSON_CreateObject();
	cJSON_AddNumberToObject(o, "off_tok_s", nr * 1e6 / off_us);
	cJSON_AddNumberToObject(o, "batch_tok_s", nr * 1e6 / batch_us);
	cJSON_AddNumberToObject(o, "added_us_per_step", added);
	cJSON_AddNumberToObject(o, "check_alone_us", alone_us(nr));
	cJSON_AddNumberToObject(o, "off_step_us", off_us);
	cJSON_AddNumberToObject(o, "batch_step_us", batch_us);
	cJSON_AddNumberToObject(o, "batch", nr);
	cJSON_AddNumberToObject(o, "steps", steps);
	text = cJSON_Print(o);
	puts(text);
	free(text);
	cJSON_Delete(o);
}

static int usage(void)
{
	fprintf(stderr,
		"usage: kvbench check-cost [--model DIR] [--batch 1..64] [--steps 1..4096] "
		"[--json]\n");
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
		{"model", 1, 0, 'm'}, {"batch", 1, 0, 'b'}, {"steps", 1, 0, 's'},
		{"json", 0, 0, 'j'},  {0, 0, 0, 0},
	};
	const char *model = "tests/models/tiny-k2";
	u32 nr = 8, steps = 512;
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
			r = parse_u32("batch", optarg, 1, REQUESTS_MAX, &nr);
			break;
		case 's':
			r = parse_u32("steps", optarg, 1, STEPS_MAX, &steps);
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
	if (!r)
		r = side_fill(&off, nr, steps) || side_fill(&batch, nr, steps);
	/* who goes first changes each time */
	for (u32 i = 0; !r && i < steps; i++)
		r = side_step(i & 1 ? &batch : &off, nr, i) ||
		    side_step(i & 1 ? &off : &batch, nr, i);
	if (!r)
		report(&off, &batch, steps, nr, json);
	side_close(&off);
	side_close(&batch);
	return r ? 1 : 0;
}
