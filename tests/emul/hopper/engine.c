/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.c - an engine on host memory whose decode attention is the GPU's, on the CPU (machine.cc):
 * what eng_options.attention asks for arrives in the kernels of more than 16 heads, and their error on
 * a model's own queries and pages is what kernels.h promises.
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <math.h>

#include "engine/run/internal.h"
#include "kernels/attn_cuda.h"
#include "kernels/fp8.h"
#include "machine.h"

#define PROMPT 90u
#define NEW    5u
#define ROW    576u /* latent and rope of a query */

/* Nothing else of a build with CUDA is asked for. */
__attribute__((weak)) const struct kvk_ops *kvk_cuda_ops(void)
{
	return NULL;
}

__attribute__((weak)) int eng_mem_open_cuda(const u8 *gpu_uuid, struct eng_mem **ret,
					    struct eng_err *err)
{
	return -ENODEV;
}

static struct look {
	const struct kvk_ops *real;
	struct kvk_ops table;
	float *q; /* as a GPU has them */
	float *want;
	double worst; /* error of a step's output in a layer */
	u32 nr;
} look;

static int decode(const struct kvk_attn_args *a, kvk_stream stream)
{
	const size_t n =
		(size_t)a->batch.nr_tokens * a->nr_q_heads * a->pages.layout.latent_dim;
	const float *got = a->out;
	struct kvk_attn_args dev = *a, ref;
	double num = 0, den = 0;
	int rc;

	for (size_t i = 0; i < n / a->pages.layout.latent_dim * ROW; i++)
		look.q[i] = kvk_bf16_to_f32(kvk_f32_to_bf16(((const float *)a->q)[i]));
	dev.q = look.q;
	ref = dev;
	ref.out = look.want;
	rc = look.real->attn_mla(&ref, stream);
	if (!rc)
		rc = kvk_attn_mla_cuda(&dev, stream);
	for (size_t i = 0; i < n; i++) {
		const double d = (double)got[i] - (double)look.want[i];

		num += d * d;
		den += (double)look.want[i] * (double)look.want[i];
	}
	KVT_EXPECT(den > 0);
	look.worst = fmax(look.worst, sqrt(num / den));
	look.nr++;
	return rc;
}

/* The engine has asked host kernels how much they want. */
static void give_workspace(struct eng_engine *e)
{
	const struct kvk_attn_args a = {
		.pages = e->pages,
		.batch = {.nr_requests = e->opt.batch_max,
			  .nr_tokens = e->opt.batch_max,
			  .q_len_max = 1},
		.nr_q_heads = e->m->config.nr_q_heads,
		.act_dtype = e->mem->act_dtype,
	};

	e->act.attn_ws_bytes = kvk_attn_workspace_cuda(&a);
	e->act.attn_ws = aligned_alloc(256, kv_round_up(e->act.attn_ws_bytes, 256));
	KVT_EXPECT(e->act.attn_ws_bytes && e->act.attn_ws);
}

/* Two requests, first one, then both. Return: the largest error */
static double run(struct rig *rig, u32 kv, u32 attention, struct trace *ret)
{
	struct eng_options opt = {.kv = kv,
				  .attention = attention,
				  .batch_max = 2,
				  .length_max = 256,
				  .no_prefix = true,
				  .no_seal = true};
	struct eng_engine *e = rig_engine(rig, &opt);
	const struct eng_config *c = &e->m->config;
	struct eng_request *r;
	u32 prompt[PROMPT];

	look = (struct look){.real = e->ops, .table = *e->ops};
	look.q = malloc(2 * c->nr_q_heads * ROW * sizeof(float));
	look.want = malloc(2 * c->nr_q_heads * c->latent_dim * sizeof(float));
	look.table.attn_mla = decode;
	e->ops = &look.table;
	give_workspace(e);
	rig_prompt(1, prompt, PROMPT);
	r = trace_submit(e, &ret[0], prompt, PROMPT, NEW, true);
	rig_turns(e, r, 3);
	rig_prompt(2, prompt, PROMPT - 30);
	trace_submit(e, &ret[1], prompt, PROMPT - 30, NEW, true);
	rig_run(e);
	KVT_EXPECT(ret[0].nr == NEW && ret[1].nr == NEW);
	KVT_EXPECT(look.nr > c->nr_layers);
	free(look.q);
	free(look.want);
	free(e->act.attn_ws);
	eng_engine_destroy(e);
	return look.worst;
}

/* Where the choice was clear, tokens are the same. */
static void check_tokens(const struct trace *a, const struct trace *b)
{
	for (u32 i = 0; i < NEW && a->leads[i] >= RIG_LEAD_MIN; i++)
		KVT_EXPECT_EQ(a->tokens[i], b->tokens[i]);
}

static void check(u32 kv, double limit)
{
	static struct trace exact[2], fast[2];
	double worst[2];
	struct rig rig;

	hopper_has_sms(4);
	rig_kvmd(&rig, NULL);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	rig_more_heads(&rig, 4);
	worst[0] = run(&rig, kv, ENG_ATTENTION_EXACT, exact);
	worst[1] = run(&rig, kv, ENG_ATTENTION_FAST, fast);
	KVT_NOTE("%s: exact %.1e off, fast %.1e", eng_kv_str(kv), worst[0], worst[1]);
	KVT_EXPECT_LE(worst[0], 1e-3);
	KVT_EXPECT(worst[1] > 3 * worst[0]);
	KVT_EXPECT_LE(worst[1], limit);
	for (u32 i = 0; i < 2; i++)
		check_tokens(&exact[i], &fast[i]);
	rig_close(&rig);
}

KVT_TEST(hopper_engine_fast_attention_on_bf16_pages)
{
	check(ENG_KV_BF16, 2.1e-3);
}

KVT_TEST(hopper_engine_fast_attention_on_fp8_pages)
{
	check(ENG_KV_FP8, 8e-2);
}

KVT_MAIN()
