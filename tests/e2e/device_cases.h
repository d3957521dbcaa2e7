/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device_cases.h - what must hold on any device that computes with BF16 activations:
 * guarded memory (device.c, everywhere) and a GPU (cuda.c). Included by both.
 */
#ifndef TESTS_E2E_DEVICE_CASES_H
#define TESTS_E2E_DEVICE_CASES_H

#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>

#define DEV_CASES_MAX 32
#define DEV_LOSS_MAX  2e-3 /* mean over the prompts, against float64 */
#define DEV_GAP_MIN   0.1  /* a greedy token with a clearer lead must not change */

/* DEV_KVMD, DEV_DEVICE and DEV_IDS_MAX (longest prompt taken) are set by the includer.
 * Small steps: guarded memory pays for its size. */
#define DEV_SIZES \
	.device = DEV_DEVICE, .length_max = 2048, .batch_max = 8, .chunk_tokens = 128

struct dev_case {
	u32 ids[2048];
	u32 nr_ids;
	u32 greedy[64];
	double gap[64];
	u32 nr_greedy;
	double nll;
	u32 got[64];
	float logprob[64];
	u32 nr_got;
	struct eng_request *r;
};

static struct dev_case dev_cases[DEV_CASES_MAX];

static u32 dev_u32s(const cJSON *array, u32 *ret, u32 max)
{
	const cJSON *v;
	u32 n = 0;

	cJSON_ArrayForEach(v, array)
	{
		KVT_EXPECT(n < max);
		ret[n++] = (u32)v->valuedouble;
	}
	return n;
}

static u32 dev_load(const char *model, u32 nr_max)
{
	char name[128];
	cJSON *root, *c, *v;
	u32 nr = 0;

	snprintf(name, sizeof(name), "%s/reference_exact.json", model);
	root = rig_json(name);
	cJSON_ArrayForEach(c, cJSON_GetObjectItem(root, "cases"))
	{
		const cJSON *ids = cJSON_GetObjectItem(c, "prompt_ids");
		struct dev_case *x = &dev_cases[nr];
		u32 i = 0;

		if (cJSON_GetArraySize(ids) > DEV_IDS_MAX)
			continue;
		if (nr++ == nr_max)
			break;
		x->nr_ids = dev_u32s(ids, x->ids, 2048);
		x->nr_greedy = dev_u32s(cJSON_GetObjectItem(c, "greedy"), x->greedy, 64);
		cJSON_ArrayForEach(v, cJSON_GetObjectItem(c, "greedy_gap"))
		{
			KVT_EXPECT(i < 64);
			x->gap[i++] = v->valuedouble;
		}
		x->nll = cJSON_GetObjectItem(c, "prompt_nll_mean")->valuedouble;
	}
	cJSON_Delete(root);
	return KV_MIN(nr, nr_max);
}

static void dev_token(void *arg, struct eng_request *r, u32 token, float logprob)
{
	struct dev_case *x = arg;

	KVT_EXPECT(x->nr_got < 64);
	x->logprob[x->nr_got] = logprob;
	x->got[x->nr_got++] = token;
}

/* A token that leads by @gap_min is float64's. */
static void dev_greedy(struct eng_engine *e, u32 nr, double gap_min)
{
	u32 nr_same = 0;

	for (u32 c = 0; c < nr; c++) {
		struct eng_params p = {
			.prompt = dev_cases[c].ids,
			.nr_prompt = dev_cases[c].nr_ids,
			.max_tokens = KV_MIN(dev_cases[c].nr_greedy, 16u),
			.ignore_eos = true,
			.on_token = dev_token,
			.arg = &dev_cases[c],
		};
		struct eng_err err;

		if (eng_request_submit(e, &p, &dev_cases[c].r, &err))
			KVT_FAIL("submit: %s", err.text);
	}
	rig_run(e);
	for (u32 c = 0; c < nr; c++) {
		const struct dev_case *x = &dev_cases[c];

		for (u32 i = 0; i < x->nr_got && x->gap[i] >= gap_min; i++) {
			if (x->got[i] != x->greedy[i])
				KVT_FAIL("case %u: token %u is %u, expected %u (gap %g)",
					 c, i, x->got[i], x->greedy[i], x->gap[i]);
			nr_same++;
		}
	}
	KVT_NOTE("%u greedy tokens with a lead of %g are the same", nr_same, gap_min);
	KVT_EXPECT(nr_same >= nr);
}

static void dev_losses(struct eng_engine *e, u32 nr)
{
	struct eng_request *r[DEV_CASES_MAX];
	double mean = 0, worst = 0, tokens = 0;

	for (u32 c = 0; c < nr; c++) {
		struct eng_params p = {
			.prompt = dev_cases[c].ids,
			.targets = dev_cases[c].ids + 1,
			.nr_prompt = dev_cases[c].nr_ids - 1,
		};
		struct eng_err err;

		if (eng_request_submit(e, &p, &r[c], &err))
			KVT_FAIL("submit: %s", err.text);
	}
	rig_run(e);
	for (u32 c = 0; c < nr; c++) {
		struct eng_result res;
		double nll = 0;

		eng_request_result(r[c], &res);
		KVT_EXPECT_EQ(res.finish, ENG_FINISH_LENGTH);
		for (u32 i = 0; i < res.nr_prompt; i++)
			nll -= (double)res.target_logprobs[i];
		mean += nll - dev_cases[c].nll * res.nr_prompt;
		tokens += res.nr_prompt;
		nll = nll / res.nr_prompt - dev_cases[c].nll;
		worst = nll < 0 ? KV_MAX(worst, -nll) : KV_MAX(worst, nll);
		eng_request_free(r[c]);
	}
	mean /= tokens;
	KVT_NOTE("loss differs by %.2e over %.0f tokens; worst prompt %.2e", mean, tokens,
		 worst);
	if (!(mean < DEV_LOSS_MAX && mean > -DEV_LOSS_MAX))
		KVT_FAIL("loss differs by %g", mean);
}

static void dev_reference(const char *model, u32 kv, u32 nr_max)
{
	static const char *const args[] = {DEV_KVMD, NULL};
	struct eng_options opt = {
		.kv = kv, DEV_SIZES, .no_prefix = true, .no_seal = true};
	struct eng_engine *e;
	struct rig rig;
	u32 nr;

	rig_kvmd(&rig, args);
	rig_model(&rig, model, ENG_WEIGHTS_AS_IS);
	nr = dev_load(model, nr_max);
	e = rig_engine(&rig, &opt);
	dev_greedy(e, nr, DEV_GAP_MIN);
	dev_losses(e, nr);
	eng_engine_destroy(e);
	rig_close(&rig);
}

/* A prefix in sealed pages gives the same tokens from the same logits; so does a batch. */
static void dev_prefix(const char *model, u32 kv)
{
	static const char *const args[] = {DEV_KVMD, NULL};
	struct eng_options opt = {.kv = kv, DEV_SIZES};
	static struct trace first, again;
	struct eng_engine *e;
	u32 prompt[200];
	struct rig rig;

	rig_kvmd(&rig, args);
	rig_model(&rig, model, ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, &opt);
	rig_prompt(1, prompt, 200);
	trace_submit(e, &first, prompt, 200, 70, false);
	rig_run(e);
	KVT_EXPECT_EQ(first.res.nr_cached, 0);
	trace_submit(e, &again, prompt, 200, 70, false);
	rig_run(e);
	KVT_EXPECT_EQ(again.res.nr_cached, 192);
	KVT_EXPECT_EQ(first.nr, 70);
	for (u32 i = 0; i < 70; i++)
		KVT_EXPECT_EQ(again.tokens[i], first.tokens[i]);
	eng_engine_destroy(e);
	rig_close(&rig);
}

/* A stale page ends its request in KV_STALE, its neighbours go on with the tokens they
 * would have had. */
static void dev_stale(const char *model, enum eng_inject_kind kind)
{
	static const char *const args[] = {DEV_KVMD, NULL};
	struct eng_options opt = {DEV_SIZES, .no_prefix = true, .no_seal = true};
	static struct trace alone, victim, neighbour;
	struct eng_inject in = {.kind = kind};
	struct eng_request *other;
	struct eng_engine *e;
	u32 a[100], b[100];
	struct rig rig;

	rig_kvmd(&rig, args);
	rig_model(&rig, model, ENG_WEIGHTS_AS_IS);
	rig_prompt(2, a, 100);
	rig_prompt(3, b, 100);
	e = rig_engine(&rig, &opt);
	trace_submit(e, &alone, b, 100, 24, true);
	rig_run(e);
	eng_engine_destroy(e);
	opt.inject = true;
	e = rig_engine(&rig, &opt);
	in.victim = trace_submit(e, &victim, a, 100, 24, true);
	other = trace_submit(e, &neighbour, b, 100, 24, true);
	rig_turns(e, other, 4);
	KVT_EXPECT_EQ(eng_inject_arm(e, &in), 0);
	rig_run(e);
	KVT_EXPECT_EQ(victim.res.finish, ENG_FINISH_STALE);
	KVT_EXPECT_EQ(victim.res.code, KV_STALE);
	KVT_EXPECT_EQ(neighbour.nr, 24);
	for (u32 i = 0; i < 24; i++)
		KVT_EXPECT_EQ(neighbour.tokens[i], alone.tokens[i]);
	eng_engine_destroy(e);
	rig_close(&rig);
}

#endif
