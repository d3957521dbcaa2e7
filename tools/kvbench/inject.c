/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inject.c - kvbench inject: what the check catches, and what would happen without it.
 *
 * For each fault four requests decode side by side: the victim, another one whose pages
 * or rows come into play, and two neighbours. A clean run of the same prompts gives the
 * text that each must publish; a token's bytes depend on its own request alone, so any
 * difference is a wrong byte (but see LEAD_MIN). One thread.
 */
#include "inject.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "engine/run/inject.h"
#include "scene.h"

#define NR_REQUESTS   4u
#define VICTIM	      0u
#define OTHER	      1u
#define MAX_TOKENS    48u
#define TOKENS_BEFORE 4u /* tokens of the victim before the fault */

/**
 * struct answer - what a request published
 * @state: as eng_result
 * @leads: [nr_leads] of the best logit over the second, for each token; on a GPU only
 * @text: malloc'd
 */
struct answer {
	enum eng_finish finish;
	u32 bad_bits;
	u32 nr_tokens;
	u32 tokens[MAX_TOKENS];
	float leads[MAX_TOKENS];
	u32 nr_leads;
	u32 vocab;
	char *text;
};

struct inject_run {
	struct kvb_scene *scene;
	u32 kv;
	enum eng_inject_kind kind;
	struct answer answers[NR_REQUESTS];
	bool armed;
};

/* On a GPU the order of sums depends on the batch: where the best logit led by less than this,
 * answers may part. Elsewhere every bit is the same. */
#define LEAD_MIN 0.5f

/**
 * struct inject_case - a fault and what the check must say
 * @bits: KV_BAD_* of which at least one must be in the victim's verdict
 * @no_seal: needs full pages that are not sealed
 * @other_late: the other request is submitted after the fault, so that it takes freed
 * pages
 * @both: the other request is an offender as well
 * @append_row: the fault is in the page the victim appends to
 * @nr_rows: rows damaged
 */
struct inject_case {
	enum eng_inject_kind kind;
	u32 bits;
	bool no_seal;
	bool other_late;
	bool both;
	bool append_row;
	u32 nr_rows;
};

static const struct inject_case cases[] = {
	{.kind = ENG_INJECT_SWAP_ROWS,
	 .bits = KV_BAD_HASH,
	 .no_seal = true,
	 .both = true,
	 .nr_rows = 3},
	{.kind = ENG_INJECT_REUSE,
	 .bits = KV_BAD_GEN | KV_BAD_DEAD,
	 .no_seal = true,
	 .other_late = true,
	 .nr_rows = 3},
	{.kind = ENG_INJECT_LATE_WRITER,
	 .bits = KV_BAD_GEN | KV_BAD_DEAD,
	 .no_seal = true,
	 .other_late = true,
	 .append_row = true,
	 .nr_rows = 1},
	{.kind = ENG_INJECT_OLD_GEN,
	 .bits = KV_BAD_GEN | KV_BAD_DEAD,
	 .no_seal = true,
	 .nr_rows = 3},
	{.kind = ENG_INJECT_BAD_PFN, .bits = KV_BAD_PFN, .nr_rows = 1},
	{.kind = ENG_INJECT_WRITE_SEALED, .bits = KV_BAD_SEALED, .nr_rows = 1},
	{.kind = ENG_INJECT_TRUNCATED, .bits = KV_BAD_LENGTH, .nr_rows = 1},
	{.kind = ENG_INJECT_NO_CHECK, .bits = KV_BAD_NOCHECK, .nr_rows = 1},
	{.kind = ENG_INJECT_MIRROR_BEHIND, .bits = KV_BAD_MIRROR, .nr_rows = 1},
	{.kind = ENG_INJECT_FOREIGN,
	 .bits = KV_BAD_GEN | KV_BAD_DEAD | KV_BAD_PFN,
	 .nr_rows = 1},
};

static void keep_lead(void *arg, struct eng_request *r, u32 token, float logprob)
{
	float best = -INFINITY, second = -INFINITY;
	struct answer *a = arg;
	struct eng_result res;

	eng_request_result(r, &res);
	for (u32 i = 0; i < a->vocab; i++) {
		if (res.logits[i] > best) {
			second = best;
			best = res.logits[i];
		} else if (res.logits[i] > second) {
			second = res.logits[i];
		}
	}
	if (a->nr_leads < MAX_TOKENS)
		a->leads[a->nr_leads++] = best - second;
}

static int submit(struct inject_run *run, struct eng_engine *e, u32 i,
		  struct eng_request **ret)
{
	const bool ties = run->scene->device == ENG_DEVICE_CUDA;
	struct eng_params p = {
		.prompt = run->scene->prompts[i],
		.nr_prompt = KVB_PROMPT_TOKENS,
		.max_tokens = MAX_TOKENS,
		.ignore_eos = true,
		.keep_logits = ties,
		.on_token = ties ? keep_lead : NULL,
		.arg = &run->answers[i],
	};
	struct eng_err err = {{0}};
	int r;

	run->answers[i].vocab = run->scene->model->config.vocab;
	run->answers[i].nr_leads = 0;
	r = eng_request_submit(e, &p, ret, &err);

	if (r)
		fprintf(stderr, "kvbench: submit: %s\n", err.text);
	return r;
}

static void keep_answer(struct inject_run *run, u32 i, struct eng_request *rq)
{
	struct answer *a = &run->answers[i];
	struct eng_result res;
	size_t bytes;

	eng_request_result(rq, &res);
	a->finish = res.finish;
	a->bad_bits = res.bad_bits;
	a->nr_tokens = KV_MIN(res.nr_tokens, MAX_TOKENS);
	memcpy(a->tokens, res.tokens, a->nr_tokens * sizeof(u32));
	if (eng_tokenizer_decode(run->scene->model->tok, a->tokens, a->nr_tokens, false,
				 &a->text, &bytes))
		a->text = NULL;
}

static void free_answers(struct inject_run *run)
{
	for (u32 i = 0; i < NR_REQUESTS; i++)
		free(run->answers[i].text);
}

/* Turns until the victim has published TOKENS_BEFORE tokens. */
static int run_until_decoding(struct eng_engine *e, struct eng_request *victim)
{
	struct eng_result res;

	for (;;) {
		int r = eng_engine_turn(e);

		if (r < 0)
			return r;
		eng_request_result(victim, &res);
		if (res.state == ENG_DONE)
			return -EIO;
		if (res.nr_tokens >= TOKENS_BEFORE)
			return 0;
		if (r == 0)
			eng_engine_wait(e, 100);
	}
}

/* A page of another pool: an engine with another page format holds it meanwhile. */
static int foreign_grant(struct inject_run *run, struct eng_engine *fe,
			 struct kv_grant *ret)
{
	struct eng_request *rq;
	int r = submit(run, fe, OTHER, &rq);

	if (!r)
		r = run_until_decoding(fe, rq);
	if (!r && eng_request_pages(rq, ret, 1) < 1)
		r = -ENODATA;
	return r;
}

static struct eng_engine *make_engine(struct inject_run *run, u32 kv, bool no_seal)
{
	struct eng_options opt = {
		.size_bytes = sizeof(opt),
		.kv = kv,
		.device = run->scene->device,
		.socket_path = run->scene->socket_path,
		.client_name = "kvbench-inject",
		.no_prefix = true,
		.no_seal = no_seal,
		.inject = true,
	};
	struct eng_engine *e = NULL;
	struct eng_err err = {{0}};

	if (eng_engine_create(run->scene->model, &opt, &e, &err)) {
		fprintf(stderr, "kvbench: %s\n", err.text);
		return NULL;
	}
	return e;
}

static int arm(struct inject_run *run, struct eng_engine *e, const struct inject_case *c,
	       struct eng_request **rq)
{
	struct eng_inject inject = {
		.kind = c->kind,
		.victim = rq[VICTIM],
		.other = c->kind == ENG_INJECT_SWAP_ROWS ? rq[OTHER] : NULL,
		.nr_rows = c->nr_rows,
	};
	struct eng_engine *fe = NULL;
	struct kv_grant held[16];
	int r = 0;

	if (c->append_row)
		inject.row = eng_request_pages(rq[VICTIM], held, 16) - 1;
	if (c->kind == ENG_INJECT_FOREIGN) {
		fe = make_engine(run, run->kv == ENG_KV_BF16 ? ENG_KV_FP8 : ENG_KV_BF16,
				 true);
		r = fe ? foreign_grant(run, fe, &inject.foreign) : -EIO;
	}
	if (!r)
		r = eng_inject_arm(e, &inject);
	if (r)
		fprintf(stderr, "kvbench: inject %s: %s\n", eng_inject_str(c->kind),
			r < 0 ? strerror(-r) : kv_outcome_str(r));
	if (fe)
		eng_engine_destroy(fe);
	return r;
}

/* @c NULL: the clean run. */
static int play(struct inject_run *run, const struct inject_case *c)
{
	struct eng_engine *e = make_engine(run, run->kv, c && c->no_seal);
	struct eng_request *rq[NR_REQUESTS] = {NULL};
	int r = e ? 0 : -EIO;

	for (u32 i = 0; !r && i < NR_REQUESTS; i++)
		if (!(c && c->other_late && i == OTHER))
			r = submit(run, e, i, &rq[i]);
	if (!r && c) {
		r = run_until_decoding(e, rq[VICTIM]);
		if (!r)
			r = arm(run, e, c, rq);
		if (!r && !rq[OTHER])
			r = submit(run, e, OTHER, &rq[OTHER]);
	}
	if (!r)
		r = eng_engine_run(e);
	for (u32 i = 0; !r && i < NR_REQUESTS; i++)
		keep_answer(run, i, rq[i]);
	if (e)
		eng_engine_destroy(e);
	return r;
}

/* Bytes of published text that are not the clean run's. */
static u32 wrong_bytes(const struct answer *got, const struct answer *clean)
{
	size_t n = got->text ? strlen(got->text) : 0;
	size_t m = clean->text ? strlen(clean->text) : 0;
	u32 wrong = n > m ? (u32)(n - m) : 0;

	for (size_t i = 0; i < KV_MIN(n, m); i++)
		wrong += got->text[i] != clean->text[i];
	return wrong;
}

/* Is the first token that differs one that either run was not sure of? */
static bool parts_at_a_tie(const struct answer *a, const struct answer *b)
{
	const u32 nr = KV_MIN(a->nr_tokens, b->nr_tokens);
	u32 i = 0;

	while (i < nr && a->tokens[i] == b->tokens[i])
		i++;
	return i < nr && i < a->nr_leads && i < b->nr_leads &&
	       KV_MIN(a->leads[i], b->leads[i]) < LEAD_MIN;
}

static bool same_answer(const struct answer *a, const struct answer *b)
{
	return a->finish == b->finish && a->nr_tokens == b->nr_tokens &&
	       (!memcmp(a->tokens, b->tokens, a->nr_tokens * sizeof(u32)) ||
		parts_at_a_tie(a, b));
}

struct row {
	const char *name;
	bool detected;
	bool only_offender;
	u32 wrong;
	u32 ties; /* answers that part where the choice was not clear */
	u32 bits;
};

static struct row judge(const struct inject_run *run, const struct inject_run *clean,
			const struct inject_case *c, const char *check)
{
	struct row row = {.name = eng_inject_str(c->kind), .only_offender = true};
	const struct answer *v = &run->answers[VICTIM];

	row.bits = v->bad_bits;
	row.detected = v->finish == ENG_FINISH_STALE && (v->bad_bits & c->bits);
	for (u32 i = 0; i < NR_REQUESTS; i++) {
		const bool tie = strcmp(check, "off") &&
				 parts_at_a_tie(&run->answers[i], &clean->answers[i]);

		row.ties += tie;
		if (!tie)
			row.wrong += wrong_bytes(&run->answers[i], &clean->answers[i]);
		if (i == VICTIM)
			continue;
		if (c->both && i == OTHER) {
			row.detected &= run->answers[i].finish == ENG_FINISH_STALE;
			continue;
		}
		row.only_offender &= same_answer(&run->answers[i], &clean->answers[i]);
	}
	return row;
}

static cJSON *row_json(const struct row *row, const struct inject_run *run,
		       const struct inject_run *clean, bool texts)
{
	cJSON *o = cJSON_CreateObject();
	char *prompt;
	size_t bytes;

	cJSON_AddStringToObject(o, "name", row->name);
	cJSON_AddBoolToObject(o, "detected", row->detected);
	cJSON_AddBoolToObject(o, "only_offender", row->only_offender);
	cJSON_AddNumberToObject(o, "wrong_bytes", row->wrong);
	cJSON_AddNumberToObject(o, "parted_at_ties", row->ties);
	cJSON_AddNumberToObject(o, "bits", row->bits);
	cJSON_AddStringToObject(o, "finish", eng_finish_str(run->answers[VICTIM].finish));
	if (!texts)
		return o;
	cJSON_AddStringToObject(o, "clean", clean->answers[VICTIM].text);
	cJSON_AddStringToObject(o, "published", run->answers[VICTIM].text);
	cJSON_AddStringToObject(o, "other_answer", run->answers[OTHER].text);
	for (u32 i = VICTIM; i <= OTHER; i++) {
		if (eng_tokenizer_decode(run->scene->model->tok, run->scene->prompts[i],
					 KVB_PROMPT_TOKENS, false, &prompt, &bytes))
			continue;
		cJSON_AddStringToObject(o, i == VICTIM ? "prompt" : "other_prompt",
					prompt);
		free(prompt);
	}
	return o;
}

struct inject_args {
	const char *model, *text, *weights, *socket, *check, *only;
	const char *prompts[2]; /* victim's and other's own texts, or NULL */
	u32 kv, device;
	bool json, texts;
};

static int usage(void)
{
	fprintf(stderr,
		"usage: kvbench inject [--model DIR] [--text FILE] [--weights bf16|fp8|int4-g32|int4-g128]\n"
		"       [--kv bf16|fp8] [--check batch|off] [--only NAME] [--texts] [--json] [--socket PATH]\n"
		"       [--device host|cuda]\n"
		"       [--prompt TEXT] [--other-prompt TEXT]   repeated to fill three pages and a tail\n"
		"Each fault against a kvmd (a private one without --socket, where --check applies).\n");
	return 2;
}

static int parse(int argc, char **argv, struct inject_args *a)
{
	static const struct option opts[] = {
		{"model", 1, 0, 'm'},	{"text", 1, 0, 't'},
		{"weights", 1, 0, 'w'}, {"kv", 1, 0, 'k'},
		{"check", 1, 0, 'c'},	{"only", 1, 0, 'o'},
		{"prompt", 1, 0, 'p'},	{"other-prompt", 1, 0, 'q'},
		{"texts", 0, 0, 'T'},	{"json", 0, 0, 'j'},
		{"socket", 1, 0, 's'},	{"device", 1, 0, 'd'},
		{0, 0, 0, 0},
	};
	int c, kv;

	*a = (struct inject_args){.model = "tests/models/tiny-k2",
				  .weights = "bf16",
				  .check = "batch",
				  .kv = ENG_KV_FP8};
	optind = 1;
	while ((c = getopt_long(argc, argv, "", opts, NULL)) >= 0) {
		switch (c) {
		case 'm':
			a->model = optarg;
			break;
		case 't':
			a->text = optarg;
			break;
		case 'w':
			a->weights = optarg;
			break;
		case 'c':
			a->check = optarg;
			break;
		case 'o':
			a->only = optarg;
			break;
		case 'p':
		case 'q':
			a->prompts[c == 'q'] = optarg;
			break;
		case 'T':
			a->texts = true;
			break;
		case 'j':
			a->json = true;
			break;
		case 's':
			a->socket = optarg;
			break;
		case 'd':
			if (strcmp(optarg, "host") && strcmp(optarg, "cuda")) {
				fprintf(stderr, "kvbench: --device %s: host or cuda\n",
					optarg);
				return 2;
			}
			a->device = strcmp(optarg, "cuda") ? ENG_DEVICE_HOST
							   : ENG_DEVICE_CUDA;
			break;
		case 'k':
			kv = eng_kv_parse(optarg);
			if (kv != ENG_KV_BF16 && kv != ENG_KV_FP8) {
				fprintf(stderr, "kvbench: --kv %s: bf16 or fp8\n",
					optarg);
				return 2;
			}
			a->kv = (u32)kv;
			break;
		default:
			return usage();
		}
	}
	if (optind < argc) {
		fprintf(stderr, "kvbench: unexpected argument %s\n", argv[optind]);
		return 2;
	}
	if (strcmp(a->check, "batch") && strcmp(a->check, "off")) {
		fprintf(stderr, "kvbench: --check %s: batch or off\n", a->check);
		return 2;
	}
	if (a->only && eng_inject_parse(a->only) < 0) {
		fprintf(stderr, "kvbench: --only %s: no such fault\n", a->only);
		return 2;
	}
	return 0;
}

/*
 * With the check on every fault must be caught. With it off nothing is promised, but rows
 * of another request must show as wrong bytes: otherwise this bench could not see a
 * missing check.
 */
static bool row_good(const struct row *row, const struct inject_case *c,
		     const struct inject_args *a)
{
	if (!strcmp(a->check, "off"))
		return row->wrong ||
		       !(c->kind == ENG_INJECT_SWAP_ROWS || c->kind == ENG_INJECT_REUSE ||
			 c->kind == ENG_INJECT_OLD_GEN);
	return row->detected && row->only_offender && !row->wrong;
}

static void print_row(const struct row *row)
{
	printf("%-16s %-9s %-14s %11u\n", row->name, row->detected ? "yes" : "no",
	       row->only_offender ? "yes" : "no", row->wrong);
}

int kvb_inject(int argc, char **argv)
{
	struct inject_run clean = {0};
	struct kvb_scene scene;
	struct inject_args a;
	cJSON *out;
	int bad = 0, r = parse(argc, argv, &a);

	if (r)
		return r;
	scene.device = a.device;
	if (kvb_scene_open(&scene, a.model, a.text, a.weights, a.socket, a.check))
		return 1;
	for (u32 i = VICTIM; !r && i <= OTHER; i++)
		if (a.prompts[i])
			r = kvb_scene_prompt(&scene, i, a.prompts[i]);
	out = cJSON_CreateArray();
	clean.scene = &scene;
	clean.kv = a.kv;
	if (!r)
		r = play(&clean, NULL);
	if (!a.json)
		printf("%-16s %-9s %-14s %11s\n", "fault", "detected", "only offender",
		       "wrong bytes");
	for (size_t i = 0; !r && i < KV_ARRAY_SIZE(cases); i++) {
		struct inject_run run = {
			.scene = &scene, .kv = a.kv, .kind = cases[i].kind};
		struct row row;

		if (a.only && (int)cases[i].kind != eng_inject_parse(a.only))
			continue;
		r = play(&run, &cases[i]);
		if (!r) {
			row = judge(&run, &clean, &cases[i], a.check);
			bad += !row_good(&row, &cases[i], &a);
			cJSON_AddItemToArray(out, row_json(&row, &run, &clean, a.texts));
			if (!a.json)
				print_row(&row);
		}
		free_answers(&run);
	}
	if (a.json && !r) {
		char *text = cJSON_Print(out);

		puts(text);
		free(text);
	}
	if (r)
		fprintf(stderr, "kvbench: inject: %s\n",
			r < 0 ? strerror(-r) : kv_outcome_str(r));
	cJSON_Delete(out);
	free_answers(&clean);
	kvb_scene_close(&scene);
	return r || bad ? 1 : 0;
}
