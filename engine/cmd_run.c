/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_run.c - `kv-engine run`: generate from prompts on the command line.
 *
 * One prompt streams its text. Several run in one batch and print one JSON document.
 * --inject (tests, demo) damages the first prompt's request once it decodes; with "reuse"
 * the second prompt is submitted after that and gets the pages that were freed under the
 * first.
 */
#include "engine/cli.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/model/json.h"
#include "engine/run/inject.h"

#define INJECT_AFTER 4u /* tokens the victim has published before */

struct job {
	const struct eng_cli *cli;
	struct eng_request *r;
	struct eng_detok detok;
	char *out;  /* owner; eng_detok_room() bytes */
	char *text; /* owner */
	size_t bytes;
	size_t cap;
	bool stream;
	u64 first_ns; /* time of the first token */
};

struct run {
	const struct eng_cli *cli;
	struct eng_host h;
	struct job jobs[ENG_PROMPTS_MAX];
	u64 start_ns;
};

static void job_emit(struct job *j, const char *bytes, size_t nr)
{
	if (j->stream) {
		fwrite(bytes, 1, nr, stdout);
		fflush(stdout);
	}
	if (j->bytes + nr + 1 > j->cap) {
		size_t cap = (j->cap + nr) * 2 + 256;
		char *text = realloc(j->text, cap);

		if (!text)
			return; /* the text ends here, the tokens do not */
		j->text = text;
		j->cap = cap;
	}
	memcpy(j->text + j->bytes, bytes, nr);
	j->bytes += nr;
	j->text[j->bytes] = 0;
}

static void on_token(void *arg, struct eng_request *r, u32 token, float logprob)
{
	struct job *j = arg;

	if (j->first_ns == 0)
		j->first_ns = kv_now_ns();
	job_emit(j, j->out, eng_detok_push(&j->detok, token, j->out));
}

static void on_done(void *arg, struct eng_request *r)
{
	struct job *j = arg;

	job_emit(j, j->out, eng_detok_flush(&j->detok, j->out));
}

static int job_submit(struct run *run, u32 i)
{
	const struct eng_cli *cli = run->cli;
	struct job *j = &run->jobs[i];
	struct eng_params p = {
		.max_tokens = cli->max_tokens,
		.temperature = cli->temperature,
		.top_p = cli->top_p,
		.seed = cli->seed + i,
		.ignore_eos = cli->ignore_eos,
		.on_token = on_token,
		.on_done = on_done,
		.arg = j,
	};
	struct eng_err err = {{0}};
	u32 *ids = NULL;
	size_t nr;
	int rc;

	j->cli = cli;
	j->stream = !cli->json;
	eng_detok_init(&j->detok, run->h.m->tok, true);
	j->out = malloc(eng_detok_room(run->h.m->tok));
	if (!j->out)
		return -ENOMEM;
	rc = eng_tokenizer_encode(run->h.m->tok, cli->prompts[i], strlen(cli->prompts[i]),
				  ENG_ENCODE_PLAIN, &ids, &nr);
	if (!rc) {
		p.prompt = ids;
		p.nr_prompt = (u32)KV_MIN(nr, UINT32_MAX);
		rc = eng_request_submit(run->h.e, &p, &j->r, &err);
	}
	free(ids);
	if (rc)
		fprintf(stderr, "kv-engine: prompt %u: %s\n", i,
			err.text[0] ? err.text : strerror(-rc));
	return rc;
}

/* Turn until the first request has published some tokens. */
static int run_until_decoding(struct run *run)
{
	struct eng_result res;

	for (;;) {
		int rc = eng_engine_turn(run->h.e);

		if (rc < 0)
			return rc;
		eng_request_result(run->jobs[0].r, &res);
		if (res.state == ENG_DONE || eng_stop_signal)
			return -ENODATA;
		if (res.nr_tokens >= INJECT_AFTER)
			return 0;
		if (rc == 0)
			eng_engine_wait(run->h.e, 50);
	}
}

static int run_injected(struct run *run)
{
	const struct eng_cli *cli = run->cli;
	bool reuse =
		cli->inject == ENG_INJECT_REUSE || cli->inject == ENG_INJECT_LATE_WRITER;
	struct eng_inject in = {.kind = (enum eng_inject_kind)cli->inject};
	struct eng_result res;
	int rc = job_submit(run, 0);

	for (u32 i = reuse ? 2 : 1; i < cli->nr_prompts && !rc; i++)
		rc = job_submit(run, i);
	if (!rc)
		rc = run_until_decoding(run);
	if (rc)
		return rc;
	eng_request_result(run->jobs[0].r, &res);
	in.victim = run->jobs[0].r;
	in.other = cli->inject == ENG_INJECT_SWAP_ROWS ? run->jobs[1].r : NULL;
	in.nr_rows = reuse ? KV_MAX(res.nr_prompt / KV_PAGE_TOKENS, 1u) : 1;
	rc = eng_inject_arm(run->h.e, &in);
	if (rc) {
		fprintf(stderr, "kv-engine: --inject %s: %s\n", eng_inject_str(in.kind),
			rc < 0 ? strerror(-rc) : kv_outcome_str(rc));
		return rc < 0 ? rc : -EAGAIN;
	}
	return reuse && cli->nr_prompts > 1 ? job_submit(run, 1) : 0;
}

static cJSON *job_json(const struct run *run, const struct job *j)
{
	cJSON *o = cJSON_CreateObject(), *ids = cJSON_CreateArray(), *usage;
	struct eng_result res;

	eng_request_result(j->r, &res);
	for (u32 i = 0; i < res.nr_tokens; i++)
		cJSON_AddItemToArray(ids, cJSON_CreateNumber(res.tokens[i]));
	eng_json_add_text(o, "text", j->text ? j->text : "", j->bytes);
	cJSON_AddItemToObject(o, "token_ids", ids);
	cJSON_AddStringToObject(o, "finish_reason", eng_finish_str(res.finish));
	if (res.finish == ENG_FINISH_STALE) {
		cJSON_AddNumberToObject(o, "bad_bits", res.bad_bits);
		cJSON_AddNumberToObject(o, "bad_row", res.bad_row);
		cJSON_AddNumberToObject(o, "bad_pfn", res.bad_pfn);
	}
	usage = cJSON_AddObjectToObject(o, "usage");
	cJSON_AddNumberToObject(usage, "prompt_tokens", res.nr_prompt);
	cJSON_AddNumberToObject(usage, "cached_tokens", res.nr_cached);
	cJSON_AddNumberToObject(usage, "completion_tokens", res.nr_tokens);
	cJSON_AddNumberToObject(usage, "total_tokens", res.nr_prompt + res.nr_tokens);
	if (j->first_ns)
		cJSON_AddNumberToObject(o, "first_token_ms",
					(double)(j->first_ns - run->start_ns) * 1e-6);
	return o;
}

static void print_json(const struct run *run)
{
	double seconds = (double)(kv_now_ns() - run->start_ns) * 1e-9;
	cJSON *o, *all;
	char *text;

	if (run->cli->nr_prompts == 1) {
		o = job_json(run, &run->jobs[0]);
	} else {
		o = cJSON_CreateObject();
		all = cJSON_AddArrayToObject(o, "results");
		for (u32 i = 0; i < run->cli->nr_prompts; i++)
			cJSON_AddItemToArray(all, job_json(run, &run->jobs[i]));
	}
	cJSON_AddStringToObject(o, "schema", "kv-engine-run/1");
	cJSON_AddNumberToObject(o, "seconds", seconds);
	text = cJSON_PrintUnformatted(o);
	puts(text ? text : "{}");
	free(text);
	cJSON_Delete(o);
}

/* Did every request end as it should? Says why not on stderr. */
static int exit_code(const struct run *run)
{
	int code = ENG_EXIT_OK;

	for (u32 i = 0; i < run->cli->nr_prompts; i++) {
		struct eng_result res;

		eng_request_result(run->jobs[i].r, &res);
		if (res.finish == ENG_FINISH_STOP || res.finish == ENG_FINISH_LENGTH)
			continue;
		fprintf(stderr, "kv-engine: prompt %u ended in %s", i,
			eng_finish_str(res.finish));
		if (res.code)
			fprintf(stderr, " (%s)",
				res.code > 0 ? kv_outcome_str(res.code)
					     : strerror(-res.code));
		fprintf(stderr, "\n");
		code = res.finish == ENG_FINISH_STALE || res.finish == ENG_FINISH_NO_PAGES
			       ? ENG_EXIT_REFUSED
			       : ENG_EXIT_FAIL;
	}
	return code;
}

static bool all_done(const struct run *run)
{
	struct eng_result res;

	for (u32 i = 0; i < run->cli->nr_prompts; i++) {
		eng_request_result(run->jobs[i].r, &res);
		if (res.state != ENG_DONE)
			return false;
	}
	return true;
}

/* A signal ends also what has no token yet: it may wait for pages for long. */
static int run_to_end(struct run *run)
{
	int rc = 0;

	while (rc >= 0 && !all_done(run)) {
		for (u32 i = 0; i < run->cli->nr_prompts && eng_stop_signal; i++)
			eng_request_abort(run->jobs[i].r);
		rc = eng_engine_turn(run->h.e);
		if (rc == 0 && !all_done(run))
			eng_engine_wait(run->h.e, 50);
	}
	return rc < 0 ? rc : 0;
}

static int run_all(struct run *run)
{
	int rc = 0;

	run->start_ns = kv_now_ns();
	if (run->cli->inject) {
		rc = run_injected(run);
	} else {
		for (u32 i = 0; i < run->cli->nr_prompts && !rc; i++)
			rc = job_submit(run, i);
	}
	if (!rc)
		rc = run_to_end(run);
	if (rc) {
		fprintf(stderr, "kv-engine: %s\n", strerror(-rc));
		return ENG_EXIT_FAIL;
	}
	if (run->cli->json)
		print_json(run);
	else
		puts("");
	return exit_code(run);
}

int eng_cmd_run(const struct eng_cli *cli)
{
	struct run *run;
	int rc;

	if (cli->nr_prompts == 0) {
		fprintf(stderr, "kv-engine run: --prompt is missing\n");
		return ENG_EXIT_USAGE;
	}
	if (cli->nr_prompts > 1 && !cli->json) {
		fprintf(stderr, "kv-engine run: several --prompt need --json\n");
		return ENG_EXIT_USAGE;
	}
	if (cli->inject && cli->nr_prompts < 2) {
		fprintf(stderr, "kv-engine run: --inject needs two or more --prompt\n");
		return ENG_EXIT_USAGE;
	}
	run = calloc(1, sizeof(*run));
	if (!run)
		return ENG_EXIT_FAIL;
	run->cli = cli;
	rc = eng_host_open(cli, &run->h);
	if (!rc) {
		rc = run_all(run);
		eng_host_close(&run->h);
	}
	for (u32 i = 0; i < cli->nr_prompts; i++) {
		free(run->jobs[i].text);
		free(run->jobs[i].out);
	}
	free(run);
	return rc;
}
