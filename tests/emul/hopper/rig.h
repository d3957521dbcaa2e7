/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rig.h - what moe.c and linear.c have in common: operands at addresses that the copy engine takes,
 * experts in the kernels' order. Included by each once.
 */
#ifndef TESTS_EMUL_HOPPER_RIG_H
#define TESTS_EMUL_HOPPER_RIG_H

#include "tests/kvt.h"
#include "kernels/moe_cuda.h"
#include "kernels/moe_pack.h"
#include "machine.h"
#include "tests/kernels/common.h"

static struct kvt_rng rng;

/* @bytes, at an address that the copy engine takes; all 0xff (NaN in every dtype) */
static inline void *nan_new(size_t bytes)
{
	void *p = aligned_alloc(256, (bytes + 511) / 256 * 256);

	KVT_EXPECT(p != NULL);
	memset(p, 0xff, (bytes + 511) / 256 * 256);
	return p;
}

static inline u16 *bf16_new(size_t n)
{
	u16 *x = nan_new(2 * n);

	for (size_t i = 0; i < n; i++)
		x[i] = kvt_to_bf16(kvt_rng_normal(&rng));
	return x;
}

static inline float *f32_new(size_t n)
{
	float *x = nan_new(4 * n);

	kvt_rng_fill(&rng, x, n, 1.0f);
	return x;
}

struct moe_case {
	u32 dtype, hidden, inter, group, scale_dtype, nr_experts, top_k, nr_tokens;
	bool accumulate, bad_id;
};

/* One expert's matrix to the kernels' order (moe_pack.h). */
static inline void pack(const struct kvk_pack *p, const u32 *w, const u16 *s, u8 *packed)
{
	u32 words = p->kbricks * 16, groups = KVK_BRICK_COLS / p->group;

	for (u32 i = 0; i < p->mtiles * p->kbricks * 32; i++) {
		u32 m = i / 32 / p->kbricks, k = i / 32 % p->kbricks, r = i % 32;
		u8 *brick = packed + kvk_pack_brick(p, m, k);
		size_t row = kvk_pack_row(p, m, r);

		for (u32 c8 = 0; c8 < 16; c8++)
			((u32 *)brick)[kvk_brick_word(r, c8)] =
				kvk_pack_word(w[row * words + k * 16 + c8]);
		for (u32 j = 0; j < groups; j++)
			((u16 *)(brick + KVK_BRICK_NIBBLES))[kvk_brick_scale(p, r, j)] =
				s[(row * p->kbricks + k) * groups + j];
	}
}

static inline void *pack_all(const struct kvk_pack *p, const struct kvt_matrix *m, u32 nr)
{
	size_t bytes = kvk_pack_bytes(p);
	size_t nr_weights =
		(size_t)p->mtiles * p->kbricks * KVK_BRICK_ROWS * KVK_BRICK_COLS;
	u8 *packed = nan_new(bytes * nr);

	for (u32 i = 0; i < nr; i++)
		pack(p, (const u32 *)m->data + i * nr_weights / 8,
		     (const u16 *)m->scales + i * nr_weights / p->group,
		     packed + i * bytes);
	return packed;
}

/* Expert 0 is crowded, the last one sees nobody. */
static inline void routing(const struct moe_case *c, u32 *ids, float *weights)
{
	for (u32 i = 0; i < c->nr_tokens * c->top_k; i++) {
		u32 k = i % c->top_k;

		ids[i] = k ? 1 + (i / c->top_k * 5 + k * 3) % (c->nr_experts - 2) : 0;
		weights[i] = 0.1f + kvt_randf();
	}
	if (c->bad_id)
		ids[c->nr_tokens * c->top_k / 2] = c->nr_experts + 3;
}

/* The experts as the kernels take them. */
static inline void experts_move(struct kvk_experts *e, const struct kvt_matrix *w13,
				const struct kvt_matrix *w2)
{
	size_t n = (size_t)e->nr_experts * e->hidden * e->inter;

	if (e->dtype == KVK_INT4) {
		const struct kvk_pack p13 =
			kvk_pack_make(2 * e->inter, e->hidden, e->group, 1);
		const struct kvk_pack p2 =
			kvk_pack_make(e->hidden, e->inter, e->group, 0);

		e->order = KVK_ORDER_PACKED;
		e->w13 = pack_all(&p13, w13, e->nr_experts);
		e->w2 = pack_all(&p2, w2, e->nr_experts);
		e->s13 = e->s2 = NULL;
	} else {
		e->w13 = memcpy(nan_new(2 * n), w13->data, 2 * n);
		e->w2 = memcpy(nan_new(n), w2->data, n);
	}
}

static inline int moe_call(const struct kvk_ops *host, const struct kvk_moe_args *a)
{
	if (a->experts.dtype == KVK_INT4)
		return host ? host->moe_int4(a, NULL) : kvk_moe_int4_cuda(a, NULL);
	return host ? host->moe_fp8(a, NULL) : kvk_moe_fp8_cuda(a, NULL);
}

/* bench_ref.cc */
void hopper_bench_ref(const struct kvk_moe_args *a, double *y);

#endif
