/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_step.cu - the small kernels of a decode step in kvbench-kernels: norm, rope, silu,
 * sample. Each is compared with the C reference on the same input. One thread.
 */
#include "gpu_bench.h"
#include "kernels/fp8.h"
#include "kernels/moe_cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HIDDEN	   7168u
#define Q_HEADS	   8u
#define Q_STRIDE   192u
#define ROPE_DIM   64u
#define INTER	   256u
#define VOCAB	   163840u
#define TOKENS_MAX 256u

/* struct step_data - device memory of all lines; owner */
struct step_data {
	struct kvk_norm_args norm;
	struct kvk_rope_args rope;
	struct kvk_silu_args silu;
	struct kvk_sample_args sample;
	void *act[3]; /* [TOKENS_MAX][HIDDEN] bf16 */
	float *weight, *cos_sin, *logits, *temperature, *top_p;
	uint32_t *positions, *ids;
	uint64_t *seeds;
};

static int call_norm(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	(void)set;
	return kvk_norm_cuda(&((struct step_data *)arg)->norm, ctx->stream);
}

static int call_rope(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	(void)set;
	return kvk_rope_cuda(&((struct step_data *)arg)->rope, ctx->stream);
}

static int call_silu(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	(void)set;
	return kvk_silu_cuda(&((struct step_data *)arg)->silu, ctx->stream);
}

static int call_sample(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	(void)set;
	return kvk_sample_cuda(&((struct step_data *)arg)->sample, ctx->stream);
}

static void *fetch(const void *src, size_t bytes)
{
	void *p = malloc(bytes);

	KVB_CUDA(cudaMemcpy(p, src, bytes, cudaMemcpyDeviceToHost));
	return p;
}

static double bf16_err(const uint16_t *got, const uint16_t *want, size_t n)
{
	float *a = (float *)malloc(n * sizeof(*a));
	double *b = (double *)malloc(n * sizeof(*b)), err;

	for (size_t i = 0; i < n; i++) {
		a[i] = kvk_bf16_to_f32(got[i]);
		b[i] = kvk_bf16_to_f32(want[i]);
	}
	err = kvb_rel_err(a, b, n);
	free(a);
	free(b);
	return err;
}

/* ------------------------------------------------------------------- against reference */

static double norm_err(struct kvb_ctx *ctx, struct step_data *d)
{
	const size_t bytes = (size_t)d->norm.nr_rows * HIDDEN * 2;
	struct kvk_norm_args a = d->norm;
	void *x = fetch(a.x, bytes), *res = fetch(a.residual, bytes), *y = malloc(bytes),
	     *got;
	float *w = (float *)fetch(a.weight, HIDDEN * 4);
	double err = INFINITY;

	a.x = x;
	a.residual = res;
	a.weight = w;
	a.y = y;
	if (!call_norm(ctx, d, 0) && !kvk_host_ops()->norm(&a, NULL)) {
		KVB_CUDA(cudaStreamSynchronize(ctx->stream));
		got = fetch(d->norm.y, bytes);
		err = bf16_err((uint16_t *)got, (uint16_t *)y, bytes / 2);
		free(got);
	}
	free(x);
	free(res);
	free(w);
	free(y);
	return err;
}

static double rope_err(struct kvb_ctx *ctx, struct step_data *d)
{
	const size_t bytes = (size_t)d->rope.nr_tokens * Q_HEADS * Q_STRIDE * 2;
	struct kvk_rope_args a = d->rope;
	void *x = fetch(a.x, bytes), *got;
	double err = INFINITY;

	a.x = x;
	a.positions = (uint32_t *)fetch(a.positions, a.nr_tokens * 4);
	a.cos_sin = (float *)fetch(a.cos_sin, (size_t)TOKENS_MAX * ROPE_DIM * 4);
	if (!call_rope(ctx, d, 0) && !kvk_host_ops()->rope(&a, NULL)) {
		KVB_CUDA(cudaStreamSynchronize(ctx->stream));
		got = fetch(d->rope.x, bytes);
		err = bf16_err((uint16_t *)got, (uint16_t *)x, bytes / 2);
		free(got);
	}
	free((void *)a.positions);
	free((void *)a.cos_sin);
	free(x);
	return err;
}

static double silu_err(struct kvb_ctx *ctx, struct step_data *d)
{
	const size_t n = (size_t)d->silu.nr_tokens * INTER;
	struct kvk_silu_args a = d->silu;
	void *gu = fetch(a.gu, n * 4), *y = malloc(n * 2), *got;
	double err = INFINITY;

	a.gu = gu;
	a.y = y;
	if (!call_silu(ctx, d, 0) && !kvk_host_ops()->silu(&a, NULL)) {
		KVB_CUDA(cudaStreamSynchronize(ctx->stream));
		got = fetch(d->silu.y, n * 2);
		err = bf16_err((uint16_t *)got, (uint16_t *)y, n);
		free(got);
	}
	free(gu);
	free(y);
	return err;
}

/* Part of the rows whose id is another one than the reference's. */
static double sample_err(struct kvb_ctx *ctx, struct step_data *d)
{
	const uint32_t n = d->sample.nr_rows;
	struct kvk_sample_args a = d->sample;
	uint32_t *want = (uint32_t *)calloc(n, 4), *got, wrong = 0;
	int r = call_sample(ctx, d, 0);

	a.logits = (float *)fetch(a.logits, (size_t)n * a.vocab * 4);
	a.temperature = (float *)fetch(a.temperature, n * 4);
	a.top_p = (float *)fetch(a.top_p, n * 4);
	a.seeds = (uint64_t *)fetch(a.seeds, n * 8);
	a.ret_ids = want;
	a.ret_logprob = NULL;
	if (!r)
		r = kvk_host_ops()->sample(&a, NULL);
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	got = (uint32_t *)fetch(d->sample.ret_ids, n * 4);
	for (uint32_t i = 0; i < n; i++)
		wrong += got[i] != want[i];
	free((void *)a.logits);
	free((void *)a.temperature);
	free((void *)a.top_p);
	free((void *)a.seeds);
	free(want);
	free(got);
	return r ? INFINITY : (double)wrong / n;
}

/* ------------------------------------------------------------------------------- lines */

struct step_line {
	const char *name;
	kvb_call call;
	double (*err)(struct kvb_ctx *ctx, struct step_data *d);
	double bytes; /* of a token */
	float temperature, top_p;
	uint32_t vocab;
};

static const struct step_line lines[] = {
	{"norm 7168 +residual", call_norm, norm_err, HIDDEN * 2.0 * 4, 0, 0, 1},
	{"rope 8x64", call_rope, rope_err, Q_HEADS *ROPE_DIM * 2.0 * 2, 0, 0, 1},
	{"silu 256", call_silu, silu_err, INTER * 2.0 * 3, 0, 0, 1},
	{"sample greedy", call_sample, sample_err, VOCAB * 4.0, 0, 1, VOCAB},
	{"sample top_p 0.9", call_sample, sample_err, VOCAB * 4.0, 1, 0.9f, VOCAB},
	/* a rank of eight */
	{"sample 20480 greedy", call_sample, sample_err, VOCAB / 2.0, 0, 1, VOCAB / 8},
	{"sample 20480 top_p 0.9", call_sample, sample_err, VOCAB / 2.0, 1, 0.9f,
	 VOCAB / 8},
};

static void data_make(struct kvb_ctx *ctx, struct step_data *d)
{
	const size_t n = (size_t)TOKENS_MAX * HIDDEN;
	static float cos_sin[TOKENS_MAX * ROPE_DIM];
	uint32_t positions[TOKENS_MAX];

	memset(d, 0, sizeof(*d));
	for (int i = 0; i < 3; i++) {
		KVB_CUDA(cudaMalloc(&d->act[i], n * 2));
		kvb_fill_bf16(ctx, d->act[i], n, 41 + i, 1.0f);
	}
	KVB_CUDA(cudaMalloc((void **)&d->weight, HIDDEN * 4));
	KVB_CUDA(cudaMalloc((void **)&d->cos_sin, TOKENS_MAX * ROPE_DIM * 4));
	KVB_CUDA(cudaMalloc((void **)&d->logits, 64ul * VOCAB * 4));
	KVB_CUDA(cudaMalloc((void **)&d->temperature, 64 * 4));
	KVB_CUDA(cudaMalloc((void **)&d->top_p, 64 * 4));
	KVB_CUDA(cudaMalloc((void **)&d->positions, sizeof(positions)));
	KVB_CUDA(cudaMalloc((void **)&d->ids, 64 * 4));
	KVB_CUDA(cudaMalloc((void **)&d->seeds, 64 * 8));
	kvb_fill_f32(ctx, d->weight, HIDDEN, 44, 1.0f);
	/* Lengths stay: the same x is rotated in place thousands of times. */
	for (uint32_t i = 0; i < TOKENS_MAX * ROPE_DIM; i++)
		cos_sin[i] = i % ROPE_DIM < ROPE_DIM / 2 ? 0.8f : 0.6f;
	KVB_CUDA(
		cudaMemcpy(d->cos_sin, cos_sin, sizeof(cos_sin), cudaMemcpyHostToDevice));
	kvb_fill_f32(ctx, d->logits, 64ul * VOCAB, 46, 3.0f);
	kvb_fill_bytes(ctx, d->seeds, 64 * 8, 47);
	for (uint32_t i = 0; i < TOKENS_MAX; i++)
		positions[i] = i;
	KVB_CUDA(cudaMemcpy(d->positions, positions, sizeof(positions),
			    cudaMemcpyHostToDevice));
}

static void data_args(struct step_data *d, const struct step_line *l, uint32_t n)
{
	float t[64], p[64];

	d->norm = (struct kvk_norm_args){d->act[0], d->act[1], d->weight, d->act[2],
					 1e-6f,	    n,	       HIDDEN,	  HIDDEN,
					 HIDDEN,    KVK_BF16};
	d->rope = (struct kvk_rope_args){};
	d->rope.x = d->act[0];
	d->rope.positions = d->positions;
	d->rope.cos_sin = d->cos_sin;
	d->rope.nr_tokens = n;
	d->rope.nr_heads = Q_HEADS;
	d->rope.head_stride = Q_STRIDE;
	d->rope.token_stride = Q_HEADS * Q_STRIDE;
	d->rope.offset = Q_STRIDE - ROPE_DIM;
	d->rope.rope_dim = ROPE_DIM;
	d->rope.act_dtype = KVK_BF16;
	d->rope.interleaved = true;
	d->silu = (struct kvk_silu_args){d->act[0], d->act[2], n, INTER, KVK_BF16};
	d->sample.logits = d->logits;
	d->sample.temperature = d->temperature;
	d->sample.top_p = d->top_p;
	d->sample.seeds = d->seeds;
	d->sample.ret_ids = d->ids;
	d->sample.nr_rows = n < 64 ? n : 64;
	d->sample.vocab = l->vocab;
	for (uint32_t i = 0; i < 64; i++) {
		t[i] = l->temperature;
		p[i] = l->top_p;
	}
	KVB_CUDA(cudaMemcpy(d->temperature, t, sizeof(t), cudaMemcpyHostToDevice));
	KVB_CUDA(cudaMemcpy(d->top_p, p, sizeof(p), cudaMemcpyHostToDevice));
}

static int step_line(struct kvb_ctx *ctx, struct step_data *d, const struct step_line *l,
		     uint32_t n)
{
	struct kvb_row row = {};
	int r;

	snprintf(row.family, sizeof(row.family), "step");
	snprintf(row.name, sizeof(row.name), "%s", l->name);
	snprintf(row.shape, sizeof(row.shape), "%u", n);
	if (!kvb_selected(ctx, row.name, row.shape))
		return 0;
	data_args(d, l, n);
	row.bytes = l->bytes * n;
	row.err = l->err(ctx, d);
	/* one BF16 rounding apart at most; ids are the reference's */
	if (!(row.err <= 4e-3))
		ctx->failed = true;
	r = kvb_time(ctx, l->call, d, 1, 24, &row);
	if (!r)
		kvb_row_add(ctx, &row);
	return r;
}

/**
 * kvb_kernels_step() - all lines of this file
 * Return: 0 or -errno of a launcher.
 */
int kvb_kernels_step(struct kvb_ctx *ctx)
{
	static const uint32_t counts[] = {1, 16, 32, 64};
	struct step_data d;
	int r = 0;

	data_make(ctx, &d);
	for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
		for (uint32_t k = 0; k < 4 && !r; k++)
			r = step_line(ctx, &d, &lines[i], counts[k]);
	for (int i = 0; i < 3; i++)
		KVB_CUDA(cudaFree(d.act[i]));
	KVB_CUDA(cudaFree(d.weight));
	KVB_CUDA(cudaFree(d.cos_sin));
	KVB_CUDA(cudaFree(d.logits));
	KVB_CUDA(cudaFree(d.temperature));
	KVB_CUDA(cudaFree(d.top_p));
	KVB_CUDA(cudaFree(d.positions));
	KVB_CUDA(cudaFree(d.ids));
	KVB_CUDA(cudaFree(d.seeds));
	return r;
}
