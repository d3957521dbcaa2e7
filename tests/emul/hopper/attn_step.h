/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_step.h - shapes and steps of decode attention for the tests on the CPU. Included behind
 * tests/kvt.h.
 */
#ifndef HOPPER_ATTN_STEP_H
#define HOPPER_ATTN_STEP_H

#include "machine.h"
#include "tests/kernels/common.h"
#include "tests/kernels/attn_world.h"

#define STEP_MAX 48u

/* Tokens of each request, and how many of them ask. */
struct step {
	u32 nr;
	u32 lengths[STEP_MAX], q[STEP_MAX];
};

struct shape {
	u32 dtype, scale_kind;
	u32 heads;
	u32 kv_heads; /* 0: MLA */
	u32 head_dim;
	u32 q_max;
	u32 flags;
};

#define GQA(dtype, scales, heads, kv_heads, dim)                                \
	{                                                                       \
		KV_DTYPE_##dtype, KV_SCALE_##scales, heads, kv_heads, dim, 4, 0 \
	}
#define MLA(dtype, scales, heads, q_max, flags)                                \
	{                                                                      \
		KV_DTYPE_##dtype, KV_SCALE_##scales, heads, 0, 0, q_max, flags \
	}

static struct kv_layout layout_of(const struct shape *s)
{
	return s->kv_heads ? kvt_layout_gqa(s->dtype, s->scale_kind, 2, s->kv_heads,
					    s->head_dim)
			   : kvt_layout_mla(s->dtype, s->scale_kind, 2);
}

/* Of the bytes behind the output none changes. */
static void run(struct world *w, const struct shape *s, u32 flags)
{
	const u8 *end = (const u8 *)w->dev.out + w->nr_out * sizeof(float);

	hopper_seed(kvt_rand64());
	run_device(w, s->flags | flags, false);
	for (u32 i = 0; i < 64; i++)
		KVT_EXPECT_EQ(end[i], 0xff);
}

#endif /* HOPPER_ATTN_STEP_H */
