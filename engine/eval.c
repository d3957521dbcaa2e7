/* SPDX-License-Identifier: Apache-2.0 */
/*
 * eval.c - `kv-engine eval`: held-out loss.
 *
 * The stream is every document encoded alone with an end token after each, cut into
 * windows of 1,024 from position 0, each window alone: window i predicts ids[i * 1024 + 1
 * .. i * 1024 + 1024]. --tokens N takes the first N predictions. The standard error is
 * that of a mean of tokens taken as independent, a lower bound (neighbouring tokens are
 * not).
 */
#include "engine/cli.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

#define WINDOW	  1024u
#define IN_FLIGHT 4u

struct sums {
	double nll;
	double nll_squared;
	u64 nr;
	FILE *each; /* --nll-out, or NULL */
};

static int submit_window(struct eng_engine *e, const u32 *ids, u64 at, u64 nr_left,
			 struct eng_request **ret)
{
	struct eng_params p = {
		.prompt = ids + at,
		.targets = ids + at + 1,
		.nr_prompt = (u32)KV_MIN(nr_left, WINDOW),
		.no_prefix = true,
	};
	struct eng_err err;
	int rc = eng_request_submit(e, &p, ret, &err);

	if (rc)
		fprintf(stderr, "kv-engine: window at %llu: %s\n", (unsigned long long)at,
			err.text);
	return rc;
}

static int take_window(struct eng_request *r, struct sums *s)
{
	struct eng_result res;

	eng_request_result(r, &res);
	if (res.finish != ENG_FINISH_LENGTH) {
		fprintf(stderr, "kv-engine: a window ended in %s (%d)\n",
			eng_finish_str(res.finish), res.code);
		return -EIO;
	}
	for (u32 i = 0; i < res.nr_prompt; i++) {
		double nll = -(double)res.target_logprobs[i];

		s->nll += nll;
		s->nll_squared += nll * nll;
		s->nr++;
		if (s->each)
			fprintf(s->each, "%.6f\n", nll);
	}
	return 0;
}

static int run_windows(struct eng_engine *e, const u32 *ids, u64 nr_predictions,
		       struct sums *s)
{
	struct eng_request *reqs[IN_FLIGHT];
	u64 at = 0;
	int rc = 0;

	while (at < nr_predictions && !rc && !eng_stop_signal) {
		u32 n = 0;

		for (; n < IN_FLIGHT && at < nr_predictions && !rc; at += WINDOW) {
			rc = submit_window(e, ids, at, nr_predictions - at, &reqs[n]);
			n += rc == 0;
		}
		if (!rc)
			rc = eng_engine_run(e);
		for (u32 i = 0; i < n; i++) {
			if (!rc)
				rc = take_window(reqs[i], s);
			eng_request_free(reqs[i]);
		}
	}
	return rc ? rc : eng_stop_signal ? -EINTR : 0;
}

static void print_result(const struct eng_cli *cli, struct eng_host *h,
			 const struct sums *s, double seconds)
{
	const struct kv_layout *l = eng_engine_layout(h->e);
	double mean = s->nll / (double)s->nr;
	double var = fmax(s->nll_squared / (double)s->nr - mean * mean, 0);
	double stderr_mean = s->nr > 1 ? sqrt(var / (double)(s->nr - 1)) : 0;
	double kv_bytes = (double)kv_page_bytes(l) / l->page_tokens;
	cJSON *o;
	char *text, name[32];

	if (!cli->json) {
		printf("loss per token %.5f +- %.5f over %llu tokens, %.0f bytes of K/V a token, "
		       "%.1f s\n",
		       mean, stderr_mean, (unsigned long long)s->nr, kv_bytes, seconds);
		return;
	}
	o = cJSON_CreateObject();
	cJSON_AddStringToObject(o, "schema", "kv-engine-eval/1");
	cJSON_AddStringToObject(o, "weights", eng_host_weights(h, name, sizeof(name)));
	cJSON_AddStringToObject(o, "kv", eng_kv_str(cli->kv));
	cJSON_AddNumberToObject(o, "nll_per_token", mean);
	cJSON_AddNumberToObject(o, "stderr", stderr_mean);
	cJSON_AddNumberToObject(o, "tokens", (double)s->nr);
	cJSON_AddNumberToObject(o, "kv_bytes_per_token", kv_bytes);
	cJSON_AddNumberToObject(o, "expert_bytes", (double)h->m->expert_bytes);
	cJSON_AddStringToObject(o, "kv_scales", h->scales_from);
	cJSON_AddNumberToObject(o, "seconds", seconds);
	text = cJSON_PrintUnformatted(o);
	puts(text ? text : "{}");
	free(text);
	cJSON_Delete(o);
}

static int eval_stream(const struct eng_cli *cli, struct eng_host *h, const char *text,
		       size_t bytes)
{
	u64 nr_predictions, start_ns;
	struct sums s = {0};
	u32 *ids = NULL;
	size_t nr_ids;
	int rc;

	rc = eng_stream_ids(h->m, text, bytes, cli->tokens ? (size_t)cli->tokens + 1 : 0,
			    &ids, &nr_ids);
	if (rc) {
		fprintf(stderr, "kv-engine: %s: %s\n", cli->text, strerror(-rc));
		return ENG_EXIT_FAIL;
	}
	nr_predictions = nr_ids ? (nr_ids - 1) / WINDOW * WINDOW : 0;
	if (cli->tokens)
		nr_predictions = KV_MIN(nr_ids ? nr_ids - 1 : 0, cli->tokens);
	if (cli->nll_out && !(s.each = fopen(cli->nll_out, "we"))) {
		fprintf(stderr, "kv-engine: --nll-out %s: %s\n", cli->nll_out,
			strerror(errno));
		free(ids);
		return ENG_EXIT_FAIL;
	}
	start_ns = kv_now_ns();
	if (nr_predictions == 0) {
		fprintf(stderr, "kv-engine: %s: less than one window of %u tokens\n",
			cli->text, WINDOW);
		rc = -ENODATA;
	} else {
		rc = run_windows(h->e, ids, nr_predictions, &s);
	}
	if (s.each && fclose(s.each)) {
		fprintf(stderr, "kv-engine: --nll-out %s: %s\n", cli->nll_out,
			strerror(errno));
		rc = -EIO;
	}
	if (!rc)
		print_result(cli, h, &s, (double)(kv_now_ns() - start_ns) * 1e-9);
	free(ids);
	return rc ? ENG_EXIT_FAIL : ENG_EXIT_OK;
}

int eng_cmd_eval(const struct eng_cli *cli)
{
	struct eng_host h;
	size_t bytes;
	char *text;
	int rc;

	if (!cli->text) {
		fprintf(stderr, "kv-engine eval: --text is missing\n");
		return ENG_EXIT_USAGE;
	}
	if (cli->attention == ENG_ATTENTION_FAST) {
		fprintf(stderr,
			"kv-engine eval: --attention fast: for decode steps, and a "
			"text that is scored has none\n");
		return ENG_EXIT_USAGE;
	}
	if (eng_read_file(cli->text, &text, &bytes))
		return ENG_EXIT_FAIL;
	rc = eng_host_open(cli, &h);
	if (!rc) {
		rc = eval_stream(cli, &h, text, bytes);
		eng_host_close(&h);
	}
	free(text);
	return rc;
}
