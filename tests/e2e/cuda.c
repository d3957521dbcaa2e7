/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.c - the engine on a GPU, on pages of a kvmd with --backend cuda: against float64,
 * prefix hits, a stale page, two engines. Without a GPU all is skipped.
 */
#define DEV_KVMD    "--backend", "cuda"
#define DEV_DEVICE  ENG_DEVICE_CUDA
#define DEV_IDS_MAX 2048
#include "tests/e2e/device_cases.h"
#include "tests/e2e/layer_cases.h"
#include "tests/e2e/attention_cases.h"

#include <sys/wait.h>

static void need_gpu(void)
{
	if (!kvk_cuda_ops())
		KVT_SKIP("no GPU");
}

KVT_TEST(mla_bf16_pages_within_2e3)
{
	need_gpu();
	dev_reference("tiny-k2", ENG_KV_BF16, DEV_CASES_MAX);
}

KVT_TEST(gqa_bf16_pages_within_2e3)
{
	need_gpu();
	dev_reference("tiny-glm", ENG_KV_BF16, DEV_CASES_MAX);
}

KVT_TEST(a_layer_is_rounded_once)
{
	need_gpu();
	dev_layers_rounded_once("tiny-k2");
	dev_layers_rounded_once("tiny-glm");
}

KVT_TEST(fast_attention_is_for_decode_steps)
{
	need_gpu();
	attention_flags("tiny-k2", ENG_DEVICE_CUDA);
	attention_flags("tiny-glm", ENG_DEVICE_CUDA);
}

/* With f32 activations (tests/emul/hopper/engine.c's rig) 2.8e-2, and 0.17 on FP8 pages. */
KVT_TEST(fast_attention_on_bf16_pages)
{
	need_gpu();
	attention_errors(ENG_KV_BF16, DEV_CASES_MAX, 0.2);
}

KVT_TEST(fast_attention_on_fp8_pages)
{
	need_gpu();
	attention_errors(ENG_KV_FP8, DEV_CASES_MAX, 0.5);
}

KVT_TEST(prefix_hit_gives_the_same_tokens)
{
	need_gpu();
	dev_prefix("tiny-k2", ENG_KV_FP8);
	dev_prefix("tiny-glm", ENG_KV_FP8);
}

KVT_TEST(stale_page_ends_its_request_only)
{
	need_gpu();
	dev_stale("tiny-k2", ENG_INJECT_BAD_PFN);
	dev_stale("tiny-k2", ENG_INJECT_MIRROR_BEHIND);
	dev_stale("tiny-glm", ENG_INJECT_OLD_GEN);
}

/* Both run the same prompt; the second finds what the first has sealed, in place. */
KVT_TEST(two_engines_share_a_prefix_on_the_card)
{
	static const char *const args[] = {DEV_KVMD, NULL};
	struct eng_options opt = {.kv = ENG_KV_FP8, DEV_SIZES};
	static struct trace a, b;
	struct eng_engine *first, *second;
	u32 prompt[200];
	struct rig rig;

	need_gpu();
	rig_kvmd(&rig, args);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	rig_prompt(4, prompt, 200);
	first = rig_engine(&rig, &opt);
	second = rig_engine(&rig, &opt);
	trace_submit(first, &a, prompt, 200, 40, false);
	rig_run(first);
	trace_submit(second, &b, prompt, 200, 40, false);
	rig_run(second);
	KVT_EXPECT_EQ(b.res.nr_cached, 192);
	KVT_EXPECT_EQ(b.nr, 40);
	for (u32 i = 0; i < 40; i++)
		KVT_EXPECT_EQ(b.tokens[i], a.tokens[i]);
	eng_engine_destroy(second);
	eng_engine_destroy(first);
	rig_close(&rig);
}

KVT_MAIN()
