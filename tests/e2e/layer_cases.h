/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer_cases.h - a layer's output as a device rounds it: routed and shared experts together once.
 * Included by device.c and cuda.c behind device_cases.h.
 *
 * The engine's kernels are called through a table of the test's own. Each layer is computed again with
 * nothing rounded in between and at the end, and compared when the next norm takes its output.
 */
#ifndef TESTS_E2E_LAYER_CASES_H
#define TESTS_E2E_LAYER_CASES_H

#include "engine/run/internal.h"
#include "kernels/fp8.h"

/* struct layer_look - @routed, @sum: device memory, f32 [T][hidden]; @want, @got: the last layer's
 * output as it should be and as it is; @down: its last product, which is looked at again */
static struct layer_look {
	struct eng_engine *e;
	const struct kvk_ops *real;
	struct kvk_ops table;
	float *routed, *sum, *want;
	u16 *got;
	struct kvk_linear_args down;
	bool due;
	u32 nr_layers;
	double worst;
} layer_look;

static int layer_again(int (*moe)(const struct kvk_moe_args *a, kvk_stream stream),
		       const struct kvk_moe_args *a, kvk_stream stream)
{
	struct kvk_moe_args f32 = *a;
	int rc = moe(a, stream);

	f32.y = layer_look.routed;
	f32.y_f32 = true;
	layer_look.due = true;
	return rc ? rc : moe(&f32, stream);
}

static int layer_int4(const struct kvk_moe_args *a, kvk_stream stream)
{
	return layer_again(layer_look.real->moe_int4, a, stream);
}

static int layer_fp8(const struct kvk_moe_args *a, kvk_stream stream)
{
	return layer_again(layer_look.real->moe_fp8, a, stream);
}

static int layer_bf16(const struct kvk_moe_args *a, kvk_stream stream)
{
	return layer_again(layer_look.real->moe_bf16, a, stream);
}

static int layer_linear(const struct kvk_linear_args *a, kvk_stream stream)
{
	if (a->y == layer_look.e->act.y)
		layer_look.down = *a;
	return layer_look.real->linear(a, stream);
}

static int layer_compare(const struct kvk_norm_args *a, kvk_stream stream)
{
	struct layer_look *l = &layer_look;
	const struct eng_mem_ops *ops = l->e->mem->ops;
	struct kvk_linear_args down = l->down;
	size_t n = (size_t)a->nr_rows * a->cols;
	double num = 0, den = 0;
	int rc;

	down.y = l->sum;
	down.y_dtype = KVK_F32;
	down.add = l->routed;
	rc = l->real->linear(&down, stream);
	if (!rc)
		rc = ops->download(l->e->mem, l->want, l->sum, 4 * n);
	if (!rc)
		rc = ops->download(l->e->mem, l->got, l->e->act.y, 2 * n);
	if (!rc)
		rc = ops->sync(l->e->mem);
	for (size_t i = 0; i < n && !rc; i++) {
		double d = kvk_bf16_to_f32(l->got[i]) - l->want[i];

		num += d * d;
		den += (double)l->want[i] * l->want[i];
	}
	l->worst = KV_MAX(l->worst, sqrt(num / den));
	l->nr_layers++;
	l->due = false;
	return rc;
}

static int layer_norm(const struct kvk_norm_args *a, kvk_stream stream)
{
	int rc = 0;

	if (layer_look.due && a->x == layer_look.e->act.y)
		rc = layer_compare(a, stream);
	return rc ? rc : layer_look.real->norm(a, stream);
}

static void layer_look_begin(struct eng_engine *e)
{
	size_t n = (size_t)e->tokens_max * e->m->config.hidden;
	struct layer_look *l = &layer_look;
	void *p[4];

	*l = (struct layer_look){.e = e, .real = e->ops, .table = *e->ops};
	KVT_EXPECT_EQ(e->mem->ops->alloc(e->mem, 4 * n, &p[0]), 0);
	KVT_EXPECT_EQ(e->mem->ops->alloc(e->mem, 4 * n, &p[1]), 0);
	KVT_EXPECT_EQ(e->mem->ops->alloc_host(e->mem, 4 * n, &p[2]), 0);
	KVT_EXPECT_EQ(e->mem->ops->alloc_host(e->mem, 2 * n, &p[3]), 0);
	l->routed = p[0];
	l->sum = p[1];
	l->want = p[2];
	l->got = p[3];
	l->table.moe_int4 = layer_int4;
	l->table.moe_fp8 = layer_fp8;
	l->table.moe_bf16 = layer_bf16;
	l->table.linear = layer_linear;
	l->table.norm = layer_norm;
	e->ops = &l->table;
}

/* One rounding to bf16 is 1.7e-3, two are 2.4e-3. A prompt's step alone: a decode step's calls are
 * recorded. */
static void dev_layers_rounded_once(const char *model)
{
	static const char *const args[] = {DEV_KVMD, NULL};
	struct eng_options opt = {DEV_SIZES, .no_prefix = true, .no_seal = true};
	static struct trace t;
	struct eng_engine *e;
	u32 prompt[100];
	struct rig rig;

	rig_kvmd(&rig, args);
	rig_model(&rig, model, ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, &opt);
	rig_prompt(7, prompt, 100);
	layer_look_begin(e);
	trace_submit(e, &t, prompt, 100, 1, true);
	rig_run(e);
	KVT_NOTE("%s: %u layers, error at most %.2e", model, layer_look.nr_layers,
		 layer_look.worst);
	KVT_EXPECT(layer_look.nr_layers > 0);
	KVT_EXPECT_LE(layer_look.worst, 2e-3);
	eng_engine_destroy(e);
	rig_close(&rig);
}

#endif
