/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention_cases.h - eng_options.attention: which kernels hear of it, and what a token's
 * log-probability is off by. Included by device.c and cuda.c behind layer_cases.h.
 */
#ifndef TESTS_E2E_ATTENTION_CASES_H
#define TESTS_E2E_ATTENTION_CASES_H

#include <math.h>

/* struct attention_look - what the engine's attention is called with; @nr_decode, @nr_chunk: calls
 * (also those that are recorded), @nr_mixed: chunks beside other sequences */
static struct attention_look {
	const struct kvk_ops *real;
	struct kvk_ops table;
	bool fast;
	u32 nr_decode, nr_chunk, nr_mixed;
} attention_look;

static void attention_expect(const struct kvk_attn_args *a, bool decode)
{
	const u32 fast = decode && attention_look.fast ? KVK_ATTN_FAST : 0;

	KVT_EXPECT_EQ(a->flags, fast | (a->layer ? KVK_ATTN_PLAN : 0));
	KVT_EXPECT_EQ(decode, a->batch.q_len_max == 1);
	attention_look.nr_decode += decode;
	attention_look.nr_chunk += !decode;
	attention_look.nr_mixed += !decode && a->batch.nr_requests > 1;
}

static int attention_mla(const struct kvk_attn_args *a, kvk_stream stream)
{
	attention_expect(a, true);
	return attention_look.real->attn_mla(a, stream);
}

static int attention_gqa(const struct kvk_attn_args *a, kvk_stream stream)
{
	attention_expect(a, true);
	return attention_look.real->attn_gqa(a, stream);
}

static int attention_prefill(const struct kvk_attn_args *a, kvk_stream stream)
{
	attention_expect(a, false);
	return attention_look.real->attn_prefill(a, stream);
}

/* One decodes, alone and then beside the other one's prompt and decode. */
static void attention_run(struct rig *rig, u32 device, u32 attention, struct trace ret[2])
{
	struct attention_look *l = &attention_look;
	struct eng_options opt = {DEV_SIZES, .no_prefix = true, .no_seal = true,
				  .attention = attention};
	struct eng_request *r;
	struct eng_engine *e;
	u32 prompt[100];

	opt.device = device;
	e = rig_engine(rig, &opt);
	*l = (struct attention_look){.real = e->ops,
				     .table = *e->ops,
				     .fast = attention == ENG_ATTENTION_FAST};
	l->table.attn_mla = attention_mla;
	l->table.attn_gqa = attention_gqa;
	l->table.attn_prefill = attention_prefill;
	e->ops = &l->table;
	rig_prompt(8, prompt, 100);
	r = trace_submit(e, &ret[0], prompt, 100, 24, true);
	rig_turns(e, r, 6);
	rig_prompt(9, prompt, 100);
	trace_submit(e, &ret[1], prompt, 100, 24, true);
	rig_run(e);
	KVT_EXPECT_EQ(ret[0].nr, 24);
	KVT_EXPECT_EQ(ret[1].nr, 24);
	/* steps of one and of two sequences, as they are and as they are captured */
	KVT_EXPECT(l->nr_decode >= 4 * e->m->config.nr_layers);
	KVT_EXPECT(l->nr_chunk > l->nr_mixed && l->nr_mixed > 0);
	eng_engine_destroy(e);
}

/* With 8 heads and in GQA it is a flag, no more. */
static void attention_flags(const char *model, u32 device)
{
	static const char *const args[] = {DEV_KVMD, NULL};
	static struct trace exact[2], fast[2];
	struct rig rig;

	memset(exact, 0, sizeof(exact));
	memset(fast, 0, sizeof(fast));
	rig_kvmd(&rig, args);
	rig_model(&rig, model, ENG_WEIGHTS_AS_IS);
	attention_run(&rig, device, ENG_ATTENTION_EXACT, exact);
	attention_run(&rig, device, ENG_ATTENTION_FAST, fast);
	for (u32 i = 0; i < 2; i++)
		trace_expect_equal(&exact[i], &fast[i], "fast attention");
	rig_close(&rig);
}

/*
 * Greedy tokens with exact and with fast attention, against float64 where the choice is clear, and
 * their log-probabilities against each other as long as the texts are one.
 */
static void attention_errors(u32 kv, u32 nr_max, double limit)
{
	static const char *const args[] = {DEV_KVMD, NULL};
	struct eng_options opt = {
		.kv = kv, DEV_SIZES, .no_prefix = true, .no_seal = true};
	static struct dev_case exact[DEV_CASES_MAX];
	u32 nr, nr_same = 0;
	double worst = 0;
	struct rig rig;

	rig_kvmd(&rig, args);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	rig_more_heads(&rig, 4); /* 8 heads no device decodes otherwise */
	nr = dev_load("tiny-k2", nr_max);
	for (; opt.attention <= ENG_ATTENTION_FAST; opt.attention++) {
		struct eng_engine *e = rig_engine(&rig, &opt);

		dev_greedy(e, nr, kv == ENG_KV_BF16 ? DEV_GAP_MIN : (double)RIG_LEAD_MIN);
		eng_engine_destroy(e);
		if (opt.attention == ENG_ATTENTION_EXACT)
			memcpy(exact, dev_cases, sizeof(exact));
		for (u32 c = 0; c < nr && opt.attention == ENG_ATTENTION_EXACT; c++)
			dev_cases[c].nr_got = 0;
	}
	for (u32 c = 0; c < nr; c++) {
		const struct dev_case *x = &dev_cases[c], *y = &exact[c];

		for (u32 i = 0; i < x->nr_got && x->got[i] == y->got[i]; i++, nr_same++)
			worst = KV_MAX(worst, fabs((double)x->logprob[i] -
						   (double)y->logprob[i]));
	}
	KVT_NOTE("%u tokens are the same, log-probabilities %.2e off at most", nr_same,
		 worst);
	KVT_EXPECT_LE(worst, limit);
	KVT_EXPECT(nr_same >= 2 * nr);
	/* the kernel of few rows would be as exact as itself */
	KVT_EXPECT((worst > 0) == (limit > 0));
	rig_close(&rig);
}

#endif
