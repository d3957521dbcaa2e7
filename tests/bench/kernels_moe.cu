/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_moe.cu - the routed experts' lines of kvbench-kernels.
 *
 * Weights are random bytes in packed order (the repack has its own test), routing is
 * drawn per call so that a graph's calls use different experts, and a line is checked
 * against float64 on the dequantised weights (kernels_moe_check.cu). All lines
 * stand beside their own loads: the same kernel in the same run with its products left
 * out, what the access pattern alone costs. One thread.
 */
#include "kernels_moe.h"
#include "base/util.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/moe_cuda.h"
#include "kernels/moe_pack.h"

#define TOP_K	    8u
#define NR_COLUMNS  12u
#define LOADS_MAX   256u /* tokens of which the kernel itself can leave its products out */
#define LOADS_REPS  5u	 /* their spread is a fraction of a percent */
#define SETS_MAX    96u
#define FP8_SETS    8u
#define FP8_STREAM  0.85
#define FP8_FLOPS   900e12
#define EXPERTS_MAX 512u

enum routing { UNIFORM, ZIPF, SINGLE };

static const uint32_t columns[NR_COLUMNS] = {1,	 2,   4,   8,	 16,   32,
					     64, 128, 256, 1024, 2048, 4096};

/* struct model - a layer and the stored figures of peers, floors and targets, one per column */
struct model {
	const char *name;
	uint32_t nr_experts, hidden, inter, group;
	double peer[NR_COLUMNS], floor[NR_COLUMNS], ours[NR_COLUMNS];
};

static const struct model models[] = {
	{"k2 full",
	 384,
	 7168,
	 2048,
	 32,
	 {76, 133, 254, 469, 1102, 1466, 2281, 2922, 3352, 5173},
	 {42, 84, 165, 317, 584, 1001, 1511, 1903, 2032, 2048},
	 {56, 104, 196, 370, 680, 1160, 1750, 2200, 2350, 2900}},
	{"k2 tp8",
	 384,
	 7168,
	 256,
	 32,
	 {28, 36, 54, 86, 142, 230, 339, 427, 495, 824},
	 {5.3, 10.5, 20.7, 39.6, 73, 125, 189, 239, 256, 261},
	 {14, 19, 30, 52, 90, 150, 222, 280, 305, 420}},
	{"glm5 full",
	 256,
	 6144,
	 2048,
	 128,
	 {63, 127, 213, 379, 666, 1162, 1456, 1743, 2043, 4311},
	 {},
	 {}},
	{"glm46 full",
	 160,
	 5120,
	 1536,
	 128,
	 {48, 73, 129, 228, 394, 551, 677, 796, 904, 1861},
	 {},
	 {}},
	{"tiny", 16, 256, 128, 32, {}, {}, {}},
};

/* ------------------------------------------------------------------------ random weights
 */

__device__ __forceinline__ uint32_t hash32(uint64_t z)
{
	z = (z + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 29)) * 0x94d049bb133111ebull;
	return (uint32_t)(z >> 32);
}

/* Bricks of random nibbles and of bf16 scales in 0.75 / 64 .. 1.25 / 64 (times @gain). */
__global__ void fill_bricks(uint32_t *dst, size_t nr_words, uint32_t brick_words,
			    uint64_t seed, float gain)
{
	size_t step = (size_t)gridDim.x * blockDim.x;

	for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < nr_words;
	     i += step) {
		uint32_t r = hash32(seed + i), lo, hi;

		if (i % brick_words < KVK_BRICK_NIBBLES / 4) {
			dst[i] = r;
			continue;
		}
		lo = __float_as_uint((0.75f + (float)(r & 0xffff) / 131072.0f) * gain) >>
		     16;
		hi = __float_as_uint((0.75f + (float)(r >> 16) / 131072.0f) * gain) >> 16;
		dst[i] = lo | hi << 16;
	}
}

/* --------------------------------------------------------------------------------- calls
 */

static int call_int4(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct kvb_moe *d = (struct kvb_moe *)arg;
	const size_t slots = (size_t)d->nr_tokens * d->top_k;
	struct kvk_moe_args a = {};

	a.experts = d->e;
	a.x = d->x;
	a.y = d->y;
	a.ids = d->ids + set * slots;
	a.weights = d->weights + set * slots;
	a.nr_tokens = d->nr_tokens;
	a.top_k = d->top_k;
	a.act_dtype = KVK_BF16;
	a.workspace = d->ws;
	a.workspace_bytes = d->ws_bytes;
	if (!d->loads_only)
		return kvk_moe_int4_cuda(&a, ctx->stream);
	return (d->nr_tokens <= LOADS_MAX ? kvk_moe_int4_loads
					  : kvk_moe_int4_wide_loads)(&a, ctx->stream);
}

/* Draw an expert: all alike, or with weight 1 / (1 + rank). */
static uint32_t draw(uint64_t *rng, uint32_t nr_experts, enum routing routing)
{
	double u, sum = 0, total = 0;
	uint32_t i;

	if (routing == UNIFORM)
		return (uint32_t)(kvb_random(rng) % nr_experts);
	for (i = 0; i < nr_experts; i++)
		total += 1.0 / (1 + i);
	u = (double)(kvb_random(rng) >> 11) / 9007199254740992.0 * total;
	for (i = 0; i < nr_experts - 1; i++) {
		sum += 1.0 / (1 + i);
		if (u < sum)
			break;
	}
	return i * 37 % nr_experts; /* popular experts are not neighbours */
}

/* Ids and weights of all sets; returns the mean number of distinct experts. */
static double route_sets(struct kvb_ctx *ctx, struct kvb_moe *d, enum routing routing,
			 uint32_t nr_sets)
{
	const size_t slots = (size_t)d->nr_tokens * d->top_k, n = slots * nr_sets;
	uint32_t *ids = (uint32_t *)malloc(n * 4), used[EXPERTS_MAX];
	float *w = (float *)malloc(n * 4);
	uint64_t rng = 7 + d->nr_tokens;
	double distinct = 0;

	for (uint32_t set = 0; set < nr_sets; set++) {
		uint32_t *s = ids + set * slots;

		memset(used, 0, sizeof(used));
		for (uint32_t i = 0; i < slots; i++) {
			uint32_t k = i % d->top_k, j, id;

			do {
				id = routing == SINGLE
					     ? (set * d->top_k + k) % d->e.nr_experts
					     : draw(&rng, d->e.nr_experts, routing);
				for (j = 0; j < k && s[i - k + j] != id; j++)
					;
			} while (j < k);
			s[i] = id;
			distinct += !used[id];
			used[id] = 1;
			w[set * slots + i] =
				0.1f + (float)(kvb_random(&rng) % 1000) / 2000.0f;
		}
	}
	KVB_CUDA(
		cudaMemcpyAsync(d->ids, ids, n * 4, cudaMemcpyHostToDevice, ctx->stream));
	KVB_CUDA(cudaMemcpyAsync(d->weights, w, n * 4, cudaMemcpyHostToDevice,
				 ctx->stream));
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	free(ids);
	free(w);
	return distinct / nr_sets;
}

/* ------------------------------------------------------------------------------- a layer
 */

uint8_t *kvb_bricks_new(struct kvb_ctx *ctx, const struct kvk_experts *e, int second)
{
	const size_t bytes = kvk_moe_packed_bytes(e, second) * e->nr_experts;
	uint8_t *p;

	KVB_CUDA(cudaMalloc((void **)&p, bytes));
	fill_bricks<<<1056, 256, 0, ctx->stream>>>(
		(uint32_t *)p, bytes / 4, (2048 + 8192 / e->group) / 4, 1 + second,
		second ? 1.0f / 128 : 1.0f / 256);
	KVB_CUDA(cudaGetLastError());
	return p;
}

static size_t data_alloc(struct kvb_ctx *ctx, struct kvb_moe *d, const struct model *m,
			 uint32_t tokens_max)
{
	struct kvk_moe_args a = {};

	memset(d, 0, sizeof(*d));
	d->top_k = m->nr_experts < 64 ? 4 : TOP_K;
	d->e.dtype = KVK_INT4;
	d->e.group = m->group;
	d->e.scale_dtype = KVK_BF16;
	d->e.order = KVK_ORDER_PACKED;
	d->e.nr_experts = m->nr_experts;
	d->e.hidden = m->hidden;
	d->e.inter = m->inter;
	d->w13 = kvb_bricks_new(ctx, &d->e, 0);
	d->w2 = kvb_bricks_new(ctx, &d->e, 1);
	d->e.w13 = d->w13;
	d->e.w2 = d->w2;
	KVB_CUDA(cudaMalloc((void **)&d->x, (size_t)tokens_max * m->hidden * 2));
	KVB_CUDA(cudaMalloc((void **)&d->y, (size_t)tokens_max * m->hidden * 2));
	kvb_fill_bf16(ctx, d->x, (size_t)tokens_max * m->hidden, 3, 1.0f);
	KVB_CUDA(cudaMalloc((void **)&d->ids, (size_t)SETS_MAX * tokens_max * TOP_K * 4));
	KVB_CUDA(cudaMalloc((void **)&d->weights,
			    (size_t)SETS_MAX * tokens_max * TOP_K * 4));
	KVB_CUDA(cudaMalloc((void **)&d->y_again, (size_t)tokens_max * m->hidden * 2));
	KVB_CUDA(cudaMalloc((void **)&d->sample, KVB_CHECK_TOKENS * 4));
	KVB_CUDA(cudaMalloc((void **)&d->bad, 4));
	KVB_CUDA(cudaMalloc((void **)&d->h,
			    (size_t)KVB_CHECK_TOKENS * TOP_K * m->inter * 8));
	KVB_CUDA(cudaMalloc((void **)&d->ref, (size_t)KVB_CHECK_TOKENS * m->hidden * 8));
	a.experts = d->e;
	a.nr_tokens = tokens_max;
	a.top_k = d->top_k;
	a.act_dtype = KVK_BF16;
	d->ws_bytes = kvk_moe_int4_workspace(&a);
	KVB_CUDA(cudaMalloc(&d->ws, d->ws_bytes));
	return kvk_moe_packed_bytes(&d->e, 0) + kvk_moe_packed_bytes(&d->e, 1);
}

static void data_free(struct kvb_moe *d)
{
	void *all[] = {d->w13,	   d->w2,     d->x,   d->y, d->y_again, d->ids,
		       d->weights, d->sample, d->bad, d->h, d->ref,	d->ws};

	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		KVB_CUDA(cudaFree(all[i]));
}

static int time_loads(struct kvb_ctx *ctx, struct kvb_moe *d, kvb_call call,
		      uint32_t nr_sets, uint32_t nr_calls, struct kvb_row *row)
{
	struct kvb_row loads = {};
	int r;

	d->loads_only = true;
	ctx->replays = LOADS_REPS;
	r = kvb_time(ctx, call, d, nr_sets, nr_calls, &loads);
	ctx->replays = 0;
	d->loads_only = false;
	row->loads_us = loads.us;
	return r;
}

/* One line: check, time, and time the loads alone. */
static int line(struct kvb_ctx *ctx, struct kvb_moe *d, const struct model *m,
		uint32_t column, enum routing routing, size_t expert_bytes)
{
	static const char *const names[] = {"uniform", "zipf", "single"};
	struct kvb_row row = {};
	uint32_t nr_calls;
	double distinct;
	int r;

	d->nr_tokens = columns[column];
	snprintf(row.family, sizeof(row.family), "moe");
	snprintf(row.name, sizeof(row.name), "int4 %s %s", m->name, names[routing]);
	snprintf(row.shape, sizeof(row.shape), "%u", d->nr_tokens);
	if (!kvb_selected(ctx, row.name, row.shape))
		return 0;
	distinct = d->nr_tokens * d->top_k < m->nr_experts ? d->nr_tokens * d->top_k
							   : m->nr_experts;
	nr_calls = kvb_calls(routing == SINGLE ? d->top_k * expert_bytes
					       : distinct * expert_bytes);
	distinct = route_sets(ctx, d, routing, nr_calls);
	row.bytes = distinct * expert_bytes;
	row.flops = 6.0 * d->nr_tokens * d->top_k * m->hidden * m->inter;
	row.err = -1;
	if (routing == UNIFORM) {
		row.peer_us = m->peer[column];
		row.floor_us = m->floor[column];
		row.ours_us = m->ours[column];
	}
	r = ctx->check ? kvb_moe_check(ctx, d, call_int4, &row.err) : 0;
	if (!r)
		r = kvb_time(ctx, call_int4, d, nr_calls, nr_calls, &row);
	if (!r)
		r = time_loads(ctx, d, call_int4, nr_calls, nr_calls, &row);
	if (!r)
		kvb_row_add(ctx, &row);
	return r;
}

/* -------------------------------------------------------------------- FP8 experts */

static int call_fp8(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct kvb_moe *d = (struct kvb_moe *)arg;
	const size_t slots = (size_t)d->nr_tokens * d->top_k;
	struct kvk_moe_args a = {};

	a.experts = d->e;
	a.x = d->x;
	a.y = d->y;
	a.ids = d->ids + set * slots;
	a.weights = d->weights + set * slots;
	a.nr_tokens = d->nr_tokens;
	a.top_k = d->top_k;
	a.act_dtype = KVK_BF16;
	a.workspace = d->ws;
	a.workspace_bytes = d->ws_bytes;
	return (d->loads_only ? kvk_moe_fp8_loads : kvk_moe_fp8_cuda)(&a, ctx->stream);
}

/* What is asked of a line, on a card of the stored ceiling: 85 % of it while weights stream, 900
 * TFLOP/s where products take longer. */
static void fp8_target(struct kvb_row *row)
{
	const double bytes = row->bytes / (FP8_STREAM * KVB_TARGET_CEILING);
	const double products = row->flops / FP8_FLOPS;

	row->ours_us = 1e6 * fmax(bytes, products);
	row->products = products > bytes;
}

/* One line, with the loads of as many calls. */
static int fp8_line(struct kvb_ctx *ctx, struct kvb_moe *d, const char *name,
		    double expert_bytes)
{
	struct kvb_row row = {};
	uint32_t nr_calls;
	int r;

	snprintf(row.family, sizeof(row.family), "moe");
	snprintf(row.name, sizeof(row.name), "%s", name);
	snprintf(row.shape, sizeof(row.shape), "%u", d->nr_tokens);
	if (!kvb_selected(ctx, row.name, row.shape))
		return 0;
	row.bytes = route_sets(ctx, d, UNIFORM, FP8_SETS) * expert_bytes;
	row.flops = 6.0 * d->nr_tokens * d->top_k * d->e.hidden * d->e.inter;
	fp8_target(&row);
	row.err = -1;
	nr_calls = kvb_calls(row.bytes);
	r = ctx->check ? kvb_moe_check(ctx, d, call_fp8, &row.err) : 0;
	if (!r)
		r = kvb_time(ctx, call_fp8, d, FP8_SETS, nr_calls, &row);
	if (!r)
		r = time_loads(ctx, d, call_fp8, FP8_SETS, nr_calls, &row);
	if (!r)
		kvb_row_add(ctx, &row);
	return r;
}

/* E4M3 experts in their standard order. */
static int fp8_model(struct kvb_ctx *ctx, const struct model *m)
{
	static const uint32_t counts[] = {1,   2,   4,	 8,    16,   32,   64,
					  128, 256, 512, 1024, 2048, 4096, 16384};
	const size_t w13 = 2ul * m->inter * m->hidden, w2 = w13 / 2;
	const size_t scales = w13 / 128 / 128 * 4;
	struct kvk_moe_args a = {};
	struct kvb_moe d;
	char name[KVB_NAME_MAX], shape[KVB_NAME_MAX];
	bool wanted = false;
	float *s;
	int r = 0;

	snprintf(name, sizeof(name), "fp8 %s uniform", m->name);
	for (size_t c = 0; c < KV_ARRAY_SIZE(counts); c++) {
		snprintf(shape, sizeof(shape), "%u", counts[c]);
		wanted |= kvb_selected(ctx, name, shape);
	}
	if (!wanted)
		return 0;
	data_alloc(ctx, &d, m, 16384);
	KVB_CUDA(cudaFree(d.w13));
	KVB_CUDA(cudaFree(d.w2));
	KVB_CUDA(cudaFree(d.ws));
	KVB_CUDA(cudaMalloc((void **)&d.w13, w13 * m->nr_experts));
	KVB_CUDA(cudaMalloc((void **)&d.w2, w2 * m->nr_experts));
	KVB_CUDA(cudaMalloc((void **)&s, scales * m->nr_experts));
	kvb_fill_e4m3(ctx, d.w13, w13 * m->nr_experts, 11);
	kvb_fill_e4m3(ctx, d.w2, w2 * m->nr_experts, 12);
	kvb_fill_f32(ctx, s, scales / 4 * m->nr_experts, 13, 1e-4f);
	d.e.dtype = KVK_E4M3;
	d.e.order = KVK_ORDER_STANDARD;
	d.e.w13 = d.w13;
	d.e.w2 = d.w2;
	d.e.s13 = d.e.s2 = s;
	a.experts = d.e;
	a.nr_tokens = 16384;
	a.top_k = d.top_k;
	a.act_dtype = KVK_BF16;
	d.ws_bytes = kvk_moe_workspace_cuda(&a);
	KVB_CUDA(cudaMalloc(&d.ws, d.ws_bytes));
	kvb_settle(ctx);
	for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]) && !r; c++) {
		d.nr_tokens = counts[c];
		r = fp8_line(ctx, &d, name, (double)(w13 + w2));
	}
	data_free(&d);
	KVB_CUDA(cudaFree(s));
	return r;
}

static int fp8_lines(struct kvb_ctx *ctx)
{
	static const struct model fp8[] = {
		{"glm5 full", 256, 6144, 2048, 128, {}, {}, {}},
		{"glm5 tp8", 256, 6144, 256, 128, {}, {}, {}},
		{"k2 full", 384, 7168, 2048, 128, {}, {}, {}},
	};
	int r = 0;

	for (size_t i = 0; i < sizeof(fp8) / sizeof(fp8[0]) && !r; i++)
		r = fp8_model(ctx, &fp8[i]);
	return r;
}

int kvb_kernels_moe(struct kvb_ctx *ctx)
{
	int r = 0;

	for (size_t i = 0; i < sizeof(models) / sizeof(models[0]) && !r; i++) {
		const struct model *m = &models[i];
		struct kvb_moe d;
		size_t bytes;

		if (ctx->filter && !strstr(ctx->filter, m->name) &&
		    !strstr(m->name, ctx->filter) &&
		    !strstr("uniform zipf single", ctx->filter))
			continue;
		bytes = data_alloc(ctx, &d, m, columns[NR_COLUMNS - 1]);
		kvb_settle(ctx);
		for (uint32_t c = 0; c < NR_COLUMNS && !r; c++)
			r = line(ctx, &d, m, c, UNIFORM, bytes);
		for (uint32_t c = 4; c < NR_COLUMNS && !r; c += 3)
			r = line(ctx, &d, m, c, ZIPF, bytes);
		for (uint32_t c = 4; c < 8 && !r; c += 3)
			r = line(ctx, &d, m, c, SINGLE, bytes);
		data_free(&d);
	}
	if (!r)
		r = fp8_lines(ctx);
	if (!r)
		r = kvb_layer_lines(ctx);
	if (!r)
		r = kvb_dense_lines(ctx);
	return r;
}
