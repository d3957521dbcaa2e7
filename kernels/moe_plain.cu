/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_plain.cu - routed experts with weights in their standard order: FP8 block scales, BF16,
 * F32. FP8 of whole blocks is moe_fp8_step.cu's for the few tokens of a decode step, then
 * moe_fp8_wide.cu's (both as exact as this), for many tokens an expert moe_fp8_chunk.cu's (products
 * on e4m3).
 *
 * Kernels: plan (sort by expert, moe_plan.cu), first product with SwiGLU, second
 * product, sum over slots in order. The products are moe_rows.cuh's: 16 rows a CTA, the
 * first product pairs 8 gate rows with the 8 up rows of the same columns. h and the slots'
 * results are f32. E4M3: two small kernels round x and h to e4m3 per token and 128 columns
 * first.
 */
#include <errno.h>
#include "moe_cuda.h"
#include "moe_fp8_chunk.h"
#include "moe_fp8_step.h"
#include "moe_fp8_wide.h"
#include "moe_plan.cuh"
#include "moe_rows.cuh"

#define ALIGN_UP(x) (((x) + 255) & ~(size_t)255)
#define WIDE_INTER  1024u /* with fewer, one token gives moe_fp8_wide.cu too few units */
/* Slots an expert from which moe_fp8_chunk.cu is better; with fewer it gains too little for what
 * it loses in accuracy. */
#define CHUNK_MEAN  3u

/* struct plain - argument block; pointers are device memory */
struct plain {
	struct kvk_moe_args a;
	const uint32_t *nr_tiles;
	const uint2 *tiles;   /* expert | tokens << 16, first position in list */
	const uint32_t *list; /* slots sorted by expert */
	float *h;	      /* [slot][inter] */
	uint8_t *xq, *hq;     /* E4M3: codes of x [token][hidden] and h [slot][inter] */
	float *xs, *hs;	      /* and their scales, one per 128 */
	float *out;	      /* [slot][hidden] */
};

/* struct plain_layout - offsets in the workspace */
struct plain_layout {
	size_t tiles, list, h, out, xq, xs, hq, hs, place, bytes;
	uint32_t nt, tile_tokens, tiles_max;
	uint32_t wide;	/* tokens of a tile of moe_fp8_wide.cu; then hq, hs, xs are its */
	uint32_t chunk; /* the same of moe_fp8_chunk.cu; then all but tiles and list */
};

static uint32_t chunk_tile(const struct kvk_moe_args *a)
{
	const uint32_t slots = a->nr_tokens * a->top_k, e = a->experts.nr_experts;

	return moe_fp8_wide_ok(&a->experts) && slots >= CHUNK_MEAN * e ? MOE_CHUNK_TOKENS
								       : 0;
}

/* Tokens of a tile where moe_fp8_wide.cu is better; or 0. */
static uint32_t wide_tile(const struct kvk_moe_args *a)
{
	if (!moe_fp8_wide_ok(&a->experts) || chunk_tile(a) ||
	    (a->nr_tokens < 2 && a->experts.inter < WIDE_INTER))
		return 0;
	return MOE_FP8_WIDE_TOKENS;
}

/* What moe_fp8_chunk.cu and moe_fp8_wide.cu need beside tiles and list. */
static void plain_layout_wgmma(const struct kvk_moe_args *a, struct plain_layout *l)
{
	const size_t slots = (size_t)a->nr_tokens * a->top_k;
	const size_t h_scales = slots * kvk_fp8_blocks(a->experts.inter) * 4,
		     x_scales = slots * kvk_fp8_blocks(a->experts.hidden) * 4;

	if (l->chunk) {
		l->out = l->h; /* x's codes are read before out is written */
		l->hq = ALIGN_UP(l->out + slots * a->experts.hidden * 2);
		l->hs = ALIGN_UP(l->hq + slots * a->experts.inter);
	} else {
		l->hq = l->bytes;
		l->hs = ALIGN_UP(l->hq + slots * a->experts.inter * 2);
	}
	l->xs = ALIGN_UP(l->hs + h_scales);
	l->place = ALIGN_UP(l->xs + x_scales);
	l->bytes = l->place + (l->chunk ? ALIGN_UP(slots * 4) : 0);
}

static struct plain_layout plain_layout_make(const struct kvk_moe_args *a)
{
	const uint32_t slots = a->nr_tokens * a->top_k, e = a->experts.nr_experts;
	struct plain_layout l;

	l.nt = slots > 4 * e ? 4 : 1;
	l.chunk = chunk_tile(a);
	l.wide = wide_tile(a);
	l.tile_tokens = l.chunk ? l.chunk : l.wide ? l.wide : 8 * l.nt;
	l.tiles_max = (slots < e ? slots : e) + slots / l.tile_tokens;
	l.tiles = 256;
	l.list = ALIGN_UP(l.tiles + (size_t)l.tiles_max * 8);
	l.h = ALIGN_UP(l.list + (size_t)slots * 4);
	l.out = ALIGN_UP(l.h + (size_t)slots * a->experts.inter * 4);
	l.xq = l.xs = l.hq = l.hs = l.bytes =
		ALIGN_UP(l.out + (size_t)slots * a->experts.hidden * 4);
	if (l.chunk || l.wide) {
		plain_layout_wgmma(a, &l);
		return l;
	}
	if (a->experts.dtype != KVK_E4M3)
		return l;
	l.xs = ALIGN_UP(l.xq + (size_t)a->nr_tokens * a->experts.hidden);
	l.hq = ALIGN_UP(l.xs +
			(size_t)a->nr_tokens * kvk_fp8_blocks(a->experts.hidden) * 4);
	l.hs = ALIGN_UP(l.hq + (size_t)slots * a->experts.inter);
	l.bytes = ALIGN_UP(l.hs + (size_t)slots * kvk_fp8_blocks(a->experts.inter) * 4);
	return l;
}

/* Bytes that are enough for this many tokens and for any fewer: just below a chunk a slot
 * needs more than in it. */
static size_t plain_bytes(const struct kvk_moe_args *a)
{
	const size_t bytes = plain_layout_make(a).bytes;
	struct kvk_moe_args fewer = *a;
	size_t other;

	if (!chunk_tile(a))
		return bytes;
	fewer.nr_tokens = (CHUNK_MEAN * a->experts.nr_experts - 1) / a->top_k;
	other = plain_layout_make(&fewer).bytes;
	return bytes > other ? bytes : other;
}

/* What a product reads: e4m3 codes, or T as it is */
template <uint32_t DTYPE, typename T> struct plain_x {
	using type = T;
};
template <typename T> struct plain_x<KVK_E4M3, T> {
	using type = uint8_t;
};

template <uint32_t DTYPE> __device__ __forceinline__ uint64_t weight_bytes(uint64_t n)
{
	return DTYPE == KVK_F32 ? n * 4 : DTYPE == KVK_BF16 ? n * 2 : n;
}

/* Rows @lo and @hi of matrix number @index (rows x cols each) of @data. */
template <uint32_t DTYPE>
__device__ __forceinline__ struct rows_w plain_w(const void *data, const void *scales,
						 uint64_t index, uint32_t rows,
						 uint32_t cols, uint32_t lo, uint32_t hi)
{
	const uint64_t wide = kvk_fp8_blocks(cols), blocks = kvk_fp8_blocks(rows);
	struct rows_w w = {};

	w.cols = cols;
	for (int r = 0; r < 2; r++) {
		uint64_t row = r ? hi : lo, m = index + (row >= rows);

		row %= rows;
		w.row[r] = (const uint8_t *)data +
			   weight_bytes<DTYPE>((m * rows + row) * cols);
		w.scale[r] = (const uint8_t *)scales +
			     (m * blocks + row / KVK_FP8_BLOCK) * wide * 4;
	}
	return w;
}

/* Codes and scales of 128 columns of a row; a warp each. grid: (blocks / 8, rows) */
template <typename X>
__global__ void __launch_bounds__(256)
	plain_round(const X *x, uint32_t cols, uint8_t *codes, float *scales)
{
	const uint32_t block = blockIdx.x * 8 + threadIdx.x / 32,
		       blocks = kvk_fp8_blocks(cols);
	const uint32_t k = block * KVK_FP8_BLOCK + threadIdx.x % 32 * 4;
	const uint64_t row = blockIdx.y;
	float v[4] = {}, scale;
	uint32_t top = 0, out = 0;

	if (block >= blocks)
		return;
	for (uint32_t i = 0; i < 4 && k < cols; i++) {
		if constexpr (sizeof(X) == 4)
			v[i] = x[row * cols + k + i];
		else
			v[i] = kvk_bf16_to_f32(x[row * cols + k + i]);
		uint32_t a = __float_as_uint(v[i]) & 0x7fffffffu;

		top = max(top, a > 0x7f800000u ? 0u : a);
	}
	top = __reduce_max_sync(~0u, top);
	scale = kvk_fp8_act_scale(__uint_as_float(top));
	for (uint32_t i = 0; i < 4; i++)
		out |= (uint32_t)kvk_e4m3_encode(__fdiv_rn(v[i], scale)) << (8 * i);
	if (k < cols)
		*(uint32_t *)(codes + row * cols + k) = out;
	if (threadIdx.x % 32 == 0)
		scales[row * blocks + block] = scale;
}

/* grid: (inter / 8, tiles) */
template <uint32_t DTYPE, int NT>
__global__ void __launch_bounds__(256) plain_first(const struct plain p)
{
	MOE_SHARED(rows_red<NT>, red);
	const struct kvk_experts &e = p.a.experts;
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const uint32_t j = blockIdx.x * 8 + g;
	using X = typename plain_x<DTYPE, uint16_t>::type;
	struct rows_x<X> x[NT];
	float acc[NT][4];

	if (blockIdx.y >= *p.nr_tiles)
		return;
	const uint2 tile = p.tiles[blockIdx.y];
	const uint32_t n = tile.x >> 16;
	struct rows_w w = plain_w<DTYPE>(e.w13, e.s13, (uint64_t)(tile.x & 0xffffu) * 2,
					 e.inter, e.hidden, min(j, e.inter - 1),
					 e.inter + min(j, e.inter - 1));

#pragma unroll
	for (int nt = 0; nt < NT; nt++) {
		uint64_t tok = p.list[tile.y + min(nt * 8u + g, n - 1)] / p.a.top_k;

		x[nt].x = (const X *)(DTYPE == KVK_E4M3 ? p.xq : p.a.x) + tok * e.hidden;
		x[nt].scale = p.xs + tok * kvk_fp8_blocks(e.hidden);
	}
	rows_dot<DTYPE, X, NT>(acc, w, x);
	rows_reduce<NT>(acc, red);
#pragma unroll
	for (int i = 0; i < 2 * NT; i++) {
		const int nt = i / 2, c = i % 2;
		uint32_t tok = nt * 8 + 2 * t + c;
		float gate = acc[nt][c], up = acc[nt][c + 2];

		if (i % ROWS_WARPS == threadIdx.x / 32 && tok < n && j < e.inter)
			p.h[(uint64_t)p.list[tile.y + tok] * e.inter + j] =
				gate / (1.0f + __expf(-gate)) * up;
	}
}

/* grid: (hidden / 16, tiles) */
template <uint32_t DTYPE, int NT>
__global__ void __launch_bounds__(256) plain_second(const struct plain p)
{
	MOE_SHARED(rows_red<NT>, red);
	const struct kvk_experts &e = p.a.experts;
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const uint32_t row = blockIdx.x * 16 + g;
	using X = typename plain_x<DTYPE, float>::type;
	struct rows_x<X> x[NT];
	float acc[NT][4];

	if (blockIdx.y >= *p.nr_tiles)
		return;
	const uint2 tile = p.tiles[blockIdx.y];
	const uint32_t n = tile.x >> 16;
	struct rows_w w =
		plain_w<DTYPE>(e.w2, e.s2, tile.x & 0xffffu, e.hidden, e.inter,
			       min(row, e.hidden - 1), min(row + 8, e.hidden - 1));

#pragma unroll
	for (int nt = 0; nt < NT; nt++) {
		uint64_t slot = p.list[tile.y + min(nt * 8u + g, n - 1)];

		x[nt].x = (const X *)(DTYPE == KVK_E4M3 ? (const void *)p.hq : p.h) +
			  slot * e.inter;
		x[nt].scale = p.hs + slot * kvk_fp8_blocks(e.inter);
	}
	rows_dot<DTYPE, X, NT>(acc, w, x);
	rows_reduce<NT>(acc, red);
#pragma unroll
	for (int i = 0; i < 4 * NT; i++) {
		uint32_t tok = i / 4 * 8 + 2 * t + i % 2, r = row + i % 4 / 2 * 8;

		if (i % ROWS_WARPS == threadIdx.x / 32 && tok < n && r < e.hidden)
			p.out[(uint64_t)p.list[tile.y + tok] * e.hidden + r] =
				acc[i / 4][i % 4];
	}
}

/* A slot whose id is out of range makes its token NaN. grid: (hidden / 256, tokens) */
__global__ void __launch_bounds__(256) plain_sum(const struct plain p)
{
	const uint32_t row = blockIdx.x * 256 + threadIdx.x, k = p.a.top_k;
	const uint64_t tok = blockIdx.y, at = tok * p.a.experts.hidden + row;
	float sum = 0.0f;

	if (row >= p.a.experts.hidden)
		return;
	for (uint32_t j = 0; j < k; j++) {
		uint64_t slot = tok * k + j;
		float w =
			p.a.ids[slot] < p.a.experts.nr_experts ? p.a.weights[slot] : NAN;

		sum += w * p.out[slot * p.a.experts.hidden + row];
	}
	if (p.a.y_f32) {
		float *y = (float *)p.a.y + at;

		*y = p.a.accumulate ? *y + sum : sum;
		return;
	}
	if (p.a.accumulate)
		sum += kvk_bf16_to_f32(((uint16_t *)p.a.y)[at]);
	((uint16_t *)p.a.y)[at] = kvk_f32_to_bf16(sum);
}

template <uint32_t DTYPE, int NT>
static void plain_launch(const struct plain &p, uint32_t tiles, cudaStream_t stream)
{
	const struct kvk_experts &e = p.a.experts;
	const uint32_t slots = p.a.nr_tokens * p.a.top_k;

	if (DTYPE == KVK_E4M3)
		MOE_LAUNCH(plain_round,
			   dim3((kvk_fp8_blocks(e.hidden) + 7) / 8, p.a.nr_tokens), 256,
			   stream, (const uint16_t *)p.a.x, e.hidden, p.xq, p.xs);
	MOE_LAUNCH((plain_first<DTYPE, NT>), dim3((e.inter + 7) / 8, tiles), 256, stream,
		   p);
	if (DTYPE == KVK_E4M3)
		for (uint32_t at = 0, n; at < slots; at += n) {
			n = slots - at < 65535 ? slots - at : 65535;
			MOE_LAUNCH(plain_round,
				   dim3((kvk_fp8_blocks(e.inter) + 7) / 8, n), 256,
				   stream, (const float *)p.h + (size_t)at * e.inter,
				   e.inter, p.hq + (size_t)at * e.inter,
				   p.hs + (size_t)at * kvk_fp8_blocks(e.inter));
		}

	MOE_LAUNCH((plain_second<DTYPE, NT>), dim3((e.hidden + 15) / 16, tiles), 256,
		   stream, p);
	MOE_LAUNCH(plain_sum, dim3((e.hidden + 255) / 256, p.a.nr_tokens), 256, stream,
		   p);
}

static int chunk_run(const struct kvk_moe_args *a, const struct plain_layout *l,
		     const struct moe_plan *plan, kvk_stream stream)
{
	uint8_t *ws = (uint8_t *)a->workspace;
	struct moe_chunk c = {};

	c.x = (const uint16_t *)a->x;
	c.y = moe_y_make(a);
	c.ids = a->ids;
	c.weights = a->weights;
	c.nr_tiles = plan->nr_tiles;
	c.tiles = plan->tiles;
	c.list = plan->list;
	c.place = plan->place;
	c.claim = plan->zero;
	c.x_codes = ws + l->out;
	c.x_scales = (float *)(ws + l->xs);
	c.h_codes = ws + l->hq;
	c.h_scales = (float *)(ws + l->hs);
	c.out = (uint16_t *)(ws + l->out);
	c.hidden = a->experts.hidden;
	c.inter = a->experts.inter;
	c.nr_tokens = a->nr_tokens;
	c.top_k = a->top_k;
	c.nr_experts = a->experts.nr_experts;
	c.nr_slots = plan->nr_slots;
	c.tiles_max = l->tiles_max;
	return moe_chunk_launch(&c, &a->experts, stream);
}

static int wide_run(const struct kvk_moe_args *a, const struct plain_layout *l,
		    const struct moe_plan *plan, kvk_stream stream)
{
	uint8_t *ws = (uint8_t *)a->workspace;
	struct moe_fp8_wide f = {};
	struct moe_wide *w = &f.w;

	f.experts = &a->experts;
	w->x = (const uint16_t *)a->x;
	w->y = moe_y_make(a);
	w->ids = a->ids;
	w->weights = a->weights;
	w->nr_tiles = plan->nr_tiles;
	w->tiles = plan->tiles;
	w->list = plan->list;
	w->h = (float *)(ws + l->h);
	w->out = (float *)(ws + l->out);
	w->x_panels = ws + l->out; /* read before out is written */
	w->h_panels = ws + l->hq;
	w->x_back = (float *)(ws + l->xs);
	w->h_back = (float *)(ws + l->hs);
	w->hidden = a->experts.hidden;
	w->inter = a->experts.inter;
	w->nr_tokens = a->nr_tokens;
	w->top_k = a->top_k;
	w->nr_experts = a->experts.nr_experts;
	w->nr_slots = plan->nr_slots;
	w->tiles_max = l->tiles_max;
	w->tile_tokens = l->wide;
	return moe_fp8_wide_launch(&f, stream);
}

template <uint32_t DTYPE>
static int plain_run(const struct kvk_moe_args *a, kvk_stream stream)
{
	const struct plain_layout l = plain_layout_make(a);
	uint8_t *ws = (uint8_t *)a->workspace;
	struct moe_plan plan = {};
	struct plain p = {};
	int r;

	if (a->workspace_bytes < plain_bytes(a))
		return -EINVAL;
	if (DTYPE == KVK_E4M3 && moe_fp8_step_ok(a)) {
		r = moe_fp8_step_launch(a, stream);
		if (r <= 0)
			return r;
	}
	plan.ids = a->ids;
	plan.nr_slots = a->nr_tokens * a->top_k;
	plan.nr_experts = a->experts.nr_experts;
	plan.tile_tokens = l.tile_tokens;
	if (l.chunk) {
		plan.place = (uint32_t *)(ws + l.place);
		plan.zero = (uint32_t *)ws + 2;
		plan.nr_zero = 2;
	}
	plan.counts = (uint32_t *)(ws + l.out); /* nothing is there yet */
	plan.nr_tiles = (uint32_t *)ws;
	plan.tiles = (uint2 *)(ws + l.tiles);
	plan.list = (uint32_t *)(ws + l.list);
	r = moe_plan_launch(&plan, stream);
	if (!r && l.chunk)
		return chunk_run(a, &l, &plan, stream);
	if (r || l.wide)
		return r ? r : wide_run(a, &l, &plan, stream);
	p.a = *a;
	p.nr_tiles = plan.nr_tiles;
	p.tiles = plan.tiles;
	p.list = plan.list;
	p.h = (float *)(ws + l.h);
	p.out = (float *)(ws + l.out);
	p.xq = ws + l.xq;
	p.xs = (float *)(ws + l.xs);
	p.hq = ws + l.hq;
	p.hs = (float *)(ws + l.hs);
	if (l.nt == 4)
		plain_launch<DTYPE, 4>(p, l.tiles_max, (cudaStream_t)stream);
	else
		plain_launch<DTYPE, 1>(p, l.tiles_max, (cudaStream_t)stream);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

static int plain_check(const struct kvk_moe_args *a)
{
	const struct kvk_experts *e = &a->experts;

	if (e->order != KVK_ORDER_STANDARD || a->act_dtype != KVK_BF16 || e->hidden % 8 ||
	    e->inter % 8 || !e->hidden || !e->inter || !e->nr_experts ||
	    e->nr_experts > MOE_PLAN_EXPERTS || !a->top_k || a->top_k > 32 ||
	    a->nr_tokens > 65535 || (uint64_t)a->nr_tokens * a->top_k > 1u << 20)
		return -EINVAL;
	return 0;
}

size_t kvk_moe_plain_workspace(const struct kvk_moe_args *a)
{
	return plain_check(a) ? 0 : plain_bytes(a);
}

size_t kvk_moe_workspace_cuda(const struct kvk_moe_args *a)
{
	return a->experts.dtype == KVK_INT4 ? kvk_moe_int4_workspace(a)
					    : kvk_moe_plain_workspace(a);
}

int kvk_moe_fp8_cuda(const struct kvk_moe_args *a, kvk_stream stream)
{
	int r = plain_check(a);

	if (!r && (a->experts.dtype != KVK_E4M3 || !a->experts.s13 || !a->experts.s2))
		r = -EINVAL;
	return r || !a->nr_tokens ? r : plain_run<KVK_E4M3>(a, stream);
}

#if !MOE_LOADS_ONLY
int kvk_moe_bf16_cuda(const struct kvk_moe_args *a, kvk_stream stream)
{
	int r = plain_check(a);

	if (r)
		return r;
	if (a->experts.dtype == KVK_BF16)
		return a->nr_tokens ? plain_run<KVK_BF16>(a, stream) : 0;
	if (a->experts.dtype == KVK_F32)
		return a->nr_tokens ? plain_run<KVK_F32>(a, stream) : 0;
	return -EINVAL;
}
#endif
