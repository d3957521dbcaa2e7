/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.c - `kv-engine bench`: prefill and decode speed by batch size.
 *
 * Prompts are seeded random tokens, different per request, so that nothing hits a prefix.
 * Decode is timed over steps in which every request of the batch takes part.
 */
#include "engine/cli.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

#define PROMPT_TOKENS 128u
#define DECODE_TOKENS 64u

struct row {
	u32 batch;
	double prefill_tok_s;
	double decode_tok_s;
	double step_us;
};

static u64 next_random(u64 *state)
{
	u64 z = (*state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static int submit_batch(struct eng_engine *e, struct eng_model *m, u32 batch,
			u32 nr_decode, u64 *random, struct eng_request **reqs)
{
	u32 prompt[PROMPT_TOKENS];

	for (u32 i = 0; i < batch; i++) {
		struct eng_params p = {
			.prompt = prompt,
			.nr_prompt = PROMPT_TOKENS,
			/* the first to be prefilled decode while the last are */
			.max_tokens = nr_decode + batch + 8,
			.ignore_eos = true,
			.no_prefix = true,
		};
		struct eng_err err;
		int rc;

		for (u32 t = 0; t < PROMPT_TOKENS; t++)
			prompt[t] = (u32)(next_random(random) % m->config.vocab);
		rc = eng_request_submit(e, &p, &reqs[i], &err);
		if (rc) {
			fprintf(stderr, "kv-engine: bench: %s\n", err.text);
			return rc;
		}
	}
	return 0;
}

static int turn(struct eng_engine *e)
{
	int rc = eng_engine_turn(e);

	if (rc == 0)
		eng_engine_wait(e, 10);
	return rc;
}

static bool all_decode(struct eng_request **reqs, u32 nr)
{
	struct eng_result res;

	for (u32 i = 0; i < nr; i++) {
		eng_request_result(reqs[i], &res);
		if (res.state != ENG_DECODE)
			return false;
	}
	return true;
}

static int run_batch(struct eng_engine *e, struct eng_request **reqs, u32 batch,
		     u32 nr_decode, struct row *ret)
{
	u64 start_ns = kv_now_ns(), decode_ns;
	u32 steps = 0;
	int rc = 0;

	while (rc >= 0 && !all_decode(reqs, batch) && !eng_stop_signal)
		rc = turn(e);
	decode_ns = kv_now_ns();
	while (rc >= 0 && steps < nr_decode && !eng_stop_signal) {
		rc = turn(e);
		steps += rc == (int)batch;
		if (rc > 0 && rc != (int)batch)
			rc = -EPROTO; /* a request is missing: the figure would lie */
	}
	if (rc < 0 || eng_stop_signal)
		return rc < 0 ? rc : -EINTR;
	ret->batch = batch;
	ret->prefill_tok_s = batch * PROMPT_TOKENS * 1e9 / (double)(decode_ns - start_ns);
	ret->step_us = (double)(kv_now_ns() - decode_ns) * 1e-3 / steps;
	ret->decode_tok_s = batch * 1e6 / ret->step_us;
	return 0;
}

static int bench_batch(struct eng_host *h, u32 batch, u32 nr_decode, u64 *random,
		       struct row *ret)
{
	struct eng_request *reqs[256] = {NULL};
	int rc = submit_batch(h->e, h->m, batch, nr_decode, random, reqs);

	if (!rc)
		rc = run_batch(h->e, reqs, batch, nr_decode, ret);
	for (u32 i = 0; i < batch; i++)
		eng_request_free(reqs[i]);
	return rc;
}

static void print_rows(const struct eng_cli *cli, const struct eng_host *h,
		       const struct row *rows, u32 nr)
{
	cJSON *o, *list;
	char *text, name[32];

	if (!cli->json) {
		printf("%6s %14s %13s %9s\n", "batch", "prefill tok/s", "decode tok/s",
		       "step us");
		for (u32 i = 0; i < nr; i++)
			printf("%6u %14.0f %13.0f %9.0f\n", rows[i].batch,
			       rows[i].prefill_tok_s, rows[i].decode_tok_s,
			       rows[i].step_us);
		return;
	}
	o = cJSON_CreateObject();
	cJSON_AddStringToObject(o, "schema", "kv-engine-bench/1");
	cJSON_AddStringToObject(o, "weights", eng_host_weights(h, name, sizeof(name)));
	cJSON_AddStringToObject(o, "kv", eng_kv_str(cli->kv));
	cJSON_AddStringToObject(o, "attention", eng_attention_str(cli->attention));
	list = cJSON_AddArrayToObject(o, "rows");
	for (u32 i = 0; i < nr; i++) {
		cJSON *r = cJSON_CreateObject();

		cJSON_AddNumberToObject(r, "batch", rows[i].batch);
		cJSON_AddNumberToObject(r, "prefill_tok_s", rows[i].prefill_tok_s);
		cJSON_AddNumberToObject(r, "decode_tok_s", rows[i].decode_tok_s);
		cJSON_AddNumberToObject(r, "step_us", rows[i].step_us);
		cJSON_AddItemToArray(list, r);
	}
	text = cJSON_PrintUnformatted(o);
	puts(text ? text : "{}");
	free(text);
	cJSON_Delete(o);
}

int eng_cmd_bench(const struct eng_cli *cli)
{
	static const u32 dflt[] = {1, 2, 4, 8, 16};
	const u32 *batches = cli->nr_batches ? cli->batches : dflt;
	u32 nr = cli->nr_batches ? cli->nr_batches : (u32)KV_ARRAY_SIZE(dflt);
	u32 nr_decode = cli->tokens ? cli->tokens : DECODE_TOKENS;
	struct eng_cli c = *cli;
	struct row rows[ENG_BATCHES_MAX];
	struct eng_host h;
	u64 random = cli->seed + 1;
	int rc;

	for (u32 i = 0; i < nr; i++)
		c.batch = KV_MAX(c.batch, batches[i]);
	rc = eng_host_open(&c, &h);
	if (rc)
		return rc;
	for (u32 i = 0; i < nr && !rc; i++)
		rc = bench_batch(&h, batches[i], nr_decode, &random, &rows[i]);
	if (rc)
		fprintf(stderr, "kv-engine: bench: %s\n", strerror(-rc));
	else
		print_rows(cli, &h, rows, nr);
	eng_host_close(&h);
	return rc ? ENG_EXIT_FAIL : ENG_EXIT_OK;
}
