/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_bf16_cuda.c - decode attention on CUDA with BF16 activations, which attn_cuda.c leaves alone: queries
 * that BF16 holds give the F32 answer, rounded once. Every element is compared, so that a value in a
 * neighbour's place shows.
 */
#include "tests/kvt.h"
#include "common.h"

#ifdef CONFIG_CUDA
#include "attn_world.h"

/* From one part of a unit to more, a tail, and (MLA with 64 rows) rows that a block does not fill. */
static const u32 lengths[] = {1, 130, 64, 700, 63}, q_lens[] = {1, 2, 1, 1, 2};
#define NR_REQ KV_ARRAY_SIZE(lengths)

static void check(const struct kv_layout *l, u32 heads, u32 flags)
{
	const double limit = !(flags & KVK_ATTN_FAST)	 ? 1e-3
			     : l->dtype == KV_DTYPE_BF16 ? 2.1e-3
							 : FAST_FP8;
	u32 nr_wrong = 0;
	struct world w;
	u16 *q, *out;

	world_init(&w, l, heads, 20, lengths, q_lens, NR_REQ);
	run_host(&w, heads, 0);
	run_device(&w, flags, false);
	expect_close(&w, "f32 activations: heads/flags", heads, flags, limit);
	memcpy(w.ref, w.out, w.nr_out * sizeof(float));
	q = malloc(w.nr_q * sizeof(u16));
	out = malloc(w.nr_out * sizeof(u16));
	for (size_t i = 0; i < w.nr_q; i++)
		q[i] = kvt_to_bf16(w.q[i]);
	w.dev.q = to_device(&w, 8, q, w.nr_q * sizeof(u16));
	w.dev.act_dtype = KVK_BF16;
	run_device(&w, flags,
		   false); /* the first half of what it fetches is the answer */
	memcpy(out, w.out, w.nr_out * sizeof(u16));
	for (size_t i = 0; i < w.nr_out; i++)
		nr_wrong += out[i] != kvt_to_bf16(w.ref[i]);
	if (nr_wrong)
		KVT_FAIL("%u heads, dtype %u, flags %u: %u of %zu values are not the "
			 "F32 ones, rounded",
			 heads, l->dtype, flags, nr_wrong, w.nr_out);
	free(q);
	free(out);
	world_fini(&w);
}

KVT_TEST_T(gqa_bf16_activations_round_the_f32_answer, 120)
{
	static const u32 shapes[][2] = {{96, 8}, {12, 1}, {6, 6}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(shapes); i++) {
		struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1,
						    shapes[i][1], 128);

		check(&l, shapes[i][0], 0);
		l = kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 1, shapes[i][1], 64);
		check(&l, shapes[i][0], 0);
	}
}

KVT_TEST_T(mla_bf16_activations_round_the_f32_answer, 120)
{
	static const u32 heads[] = {8, 5, 20, 64, 100};

	for (u32 i = 0; i < KV_ARRAY_SIZE(heads); i++) {
		struct kv_layout l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);

		check(&l, heads[i], 0);
		check(&l, heads[i], KVK_ATTN_FAST);
		l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
		check(&l, heads[i], 0);
		check(&l, heads[i], KVK_ATTN_FAST);
	}
}
#endif /* CONFIG_CUDA */

KVT_MAIN()
