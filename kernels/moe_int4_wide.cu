/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_wide.cu - the routed INT4 experts of a prefill chunk or a large batch.
 *
 * After the plan: pack x, first product and SwiGLU, pack h, second product, sum. Packing
 * gives each slot its row, in the plan's order, as f16 times a power of two that brings its
 * largest value near 2^14 (x: exact), in the layout that moe_int4_wide.cuh copies to shared
 * memory as it is:
 *
 *	[64 columns][row][128 bytes], 16-byte piece c of the r-th row of a tile at c ^ (r & 7)
 *	inside 32 columns: column 8 t + 4 i + 2 h + e at 16 i + 8 h + 2 t + e
 */
#include "fp8.h"
#include "moe_int4_wide.h"
#include "moe_plan.cuh"
#include "moe_ptx.cuh"
#include "moe_start.cuh"

#define PACK_WARPS  8u
#define PLACES_MAX  32u /* top_k at most */
#define PACK_PIECES (MOE_WIDE_COLS / 8 / PACK_WARPS / 32)
#define PACK_SHORT  (PACK_PIECES * 8 * 32) /* columns that a warp has at once */

/* Two neighbours of a row. */
__device__ __forceinline__ float2 pack_two(const uint16_t *row, uint32_t i)
{
	const uint32_t v = __ldcg((const uint32_t *)row + i);

	return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

/* struct pack_h - a row of h */
struct pack_h {
	const uint16_t *f16;
	const float *scale;
};

__device__ __forceinline__ float2 pack_two(const struct pack_h &row, uint32_t i)
{
	const uint32_t v = __ldcg((const uint32_t *)row.f16 + i);
	const float scale = __ldcg(row.scale + i / 8);

	return make_float2(ptx_f16_f32(v & 0xffffu) * scale,
			   ptx_f16_f32(v >> 16) * scale);
}

/* The largest value's bits of the CTA's threads. */
__device__ __forceinline__ uint32_t pack_top(uint32_t top)
{
	using tops = uint32_t[PACK_WARPS];
	MOE_SHARED(tops, all);

	top = __reduce_max_sync(~0u, top);
	if (threadIdx.x % 32 == 0)
		all[threadIdx.x / 32] = top;
	__syncthreads();
#pragma unroll
	for (uint32_t w = 0; w < PACK_WARPS; w++)
		top = max(top, all[w]);
	return top;
}

/* A thread's pieces of eight columns of a row: the i-th, and each @step-th after it. Returns
 * the bits of the largest value. */
template <typename X>
__device__ __forceinline__ uint32_t pack_load(const X &row, uint32_t cols, uint32_t i,
					      uint32_t step, float2 (&v)[PACK_PIECES][4])
{
	uint32_t top = 0;

#pragma unroll
	for (uint32_t k = 0; k < PACK_PIECES; k++, i += step) {
#pragma unroll
		for (uint32_t t = 0; t < 4 && i < cols / 8; t++) {
			v[k][t] = pack_two(row, i / 4 * 16 + 4 * t + i % 4);
			top = max(top, max(__float_as_uint(v[k][t].x) & 0x7fffffffu,
					   __float_as_uint(v[k][t].y) & 0x7fffffffu));
		}
	}
	return top;
}

/* A piece, times @scale, to where the plan wants the row: @at of its list of places. */
__device__ __forceinline__ uint4 pack_round(const float2 (&v)[4], float scale)
{
	uint32_t p[4];

#pragma unroll
	for (uint32_t t = 0; t < 4; t++)
		p[t] = ptx_f16x2(v[t].x * scale, v[t].y * scale);
	return make_uint4(p[0], p[1], p[2], p[3]);
}

__device__ __forceinline__ uint32_t pack_pos(uint32_t place)
{
	return place & ((1u << MOE_PLACE_ROW) - 1);
}

__device__ __forceinline__ void pack_store(uint8_t *panels, uint32_t nr_slots, uint32_t i,
					   uint32_t place, const uint4 &p)
{
	*(uint4 *)(panels + (uint64_t)(i / 8) * nr_slots * 128u +
		   pack_pos(place) * 128ull + ((i ^ place >> MOE_PLACE_ROW) & 7) * 16) =
		p;
}

/* One row to its places; a CTA, with a barrier in pack_top() before they are used. */
template <typename X>
__device__ __forceinline__ void pack_row(const X &row, uint32_t cols, uint8_t *panels,
					 float *backs, uint32_t nr_slots,
					 const uint32_t *place, uint32_t nr_places)
{
	using places = uint32_t[PLACES_MAX];
	MOE_SHARED(places, places_of);
	float2 v[PACK_PIECES][4];
	float scale;

	if (threadIdx.x < nr_places)
		places_of[threadIdx.x] = __ldcg(place + threadIdx.x);
	scale = moe_wide_scale(
		pack_top(pack_load(row, cols, threadIdx.x, PACK_WARPS * 32, v)));
#pragma unroll
	for (uint32_t k = 0; k < PACK_PIECES; k++) {
		const uint32_t i = threadIdx.x + k * PACK_WARPS * 32;
		const uint4 p = pack_round(v[k], scale);

		for (uint32_t j = 0; j < nr_places && i < cols / 8; j++)
			pack_store(panels, nr_slots, i, places_of[j], p);
	}
	/* its inverse, exactly */
	if (threadIdx.x < nr_places)
		backs[pack_pos(places_of[threadIdx.x])] = moe_wide_inverse(scale) / 64.0f;
}

/* grid: (tokens), or (slots) */
template <bool SECOND>
__global__ void __launch_bounds__(PACK_WARPS * 32)
	wide_pack(const __grid_constant__ struct moe_wide a)
{
	const uint64_t row = blockIdx.x;

	ptx_grid_launch();
	ptx_grid_wait();
	if (SECOND) {
		const uint32_t *place = a.place + row;
		const uint64_t pos = pack_pos(__ldcg(place));
		const struct pack_h h = {a.h_f16 + pos * a.inter,
					 a.h_scale + pos * (a.inter / 16)};

		pack_row(h, a.inter, a.h_panels, a.h_back, a.nr_slots, place, 1);
	} else {
		pack_row((const uint16_t *)a.x + row * a.hidden, a.hidden, a.x_panels,
			 a.x_back, a.nr_slots, a.place + row * a.top_k, a.top_k);
	}
}

/* x for tiles of few tokens: rows stay where they are. grid: (tokens) */
__global__ void __launch_bounds__(PACK_WARPS * 32)
	wide_pack_rows(const __grid_constant__ struct moe_wide a)
{
	const uint64_t row = blockIdx.x;
	float2 v[PACK_PIECES][4];
	float scale;

	ptx_grid_launch();
	ptx_grid_wait();
	scale = moe_wide_scale(
		pack_top(pack_load((const uint16_t *)a.x + row * a.hidden, a.hidden,
				   threadIdx.x, PACK_WARPS * 32, v)));
#pragma unroll
	for (uint32_t k = 0; k < PACK_PIECES; k++) {
		const uint32_t i = threadIdx.x + k * PACK_WARPS * 32;

		if (i < a.hidden / 8)
			*(uint4 *)(a.x_panels + row * a.hidden * 2 + i * 16) =
				pack_round(v[k], scale);
	}
	if (threadIdx.x == 0)
		a.x_back[row] = moe_wide_inverse(scale) / 64.0f;
}

/* h of few columns: a warp a row. grid: (slots / PACK_WARPS) */
__global__ void __launch_bounds__(PACK_WARPS * 32)
	wide_pack_short(const __grid_constant__ struct moe_wide a)
{
	const uint32_t lane = threadIdx.x % 32;
	const uint32_t slot = blockIdx.x * PACK_WARPS + threadIdx.x / 32;
	float2 v[PACK_PIECES][4];

	ptx_grid_launch();
	ptx_grid_wait();
	if (slot >= a.nr_slots)
		return;
	const uint32_t place = __ldcg(&a.place[slot]);
	const uint64_t pos = pack_pos(place);
	const struct pack_h h = {a.h_f16 + pos * a.inter,
				 a.h_scale + pos * (a.inter / 16)};
	const float scale = moe_wide_scale(
		__reduce_max_sync(~0u, pack_load(h, a.inter, lane, 32, v)));

#pragma unroll
	for (uint32_t k = 0; k < PACK_PIECES; k++)
		if (lane + k * 32 < a.inter / 8)
			pack_store(a.h_panels, a.nr_slots, lane + k * 32, place,
				   pack_round(v[k], scale));
	if (lane == 0)
		a.h_back[pos] = moe_wide_inverse(scale) / 64.0f;
}

/* y of four columns of a token. A slot whose id is out of range makes its token NaN. grid:
 * (hidden / 1024, tokens) */
__global__ void __launch_bounds__(256) wide_sum(const __grid_constant__ struct moe_wide a)
{
	const uint32_t col = (blockIdx.x * 256 + threadIdx.x) * 4;
	const uint64_t tok = blockIdx.y;
	float s[4] = {};

	ptx_grid_launch();
	ptx_grid_wait();
	if (col >= a.hidden)
		return;
#pragma unroll 8
	for (uint32_t j = 0; j < a.top_k; j++) {
		const uint64_t slot = tok * a.top_k + j;
		const float4 o = __ldcg((const float4 *)(a.out + slot * a.hidden + col));
		const float w = __ldcg(&a.ids[slot]) < a.nr_experts
					? __ldcg(&a.weights[slot])
					: __uint_as_float(0x7fc00000u);

		s[0] += w * o.x;
		s[1] += w * o.y;
		s[2] += w * o.z;
		s[3] += w * o.w;
	}
	moe_y_put(a.y, tok * a.hidden + col, s);
}

/* The same of eight columns, from f16. grid: (hidden / 2048, tokens) */
__global__ void __launch_bounds__(256)
	wide_sum_f16(const __grid_constant__ struct moe_wide a)
{
	const uint32_t col = (blockIdx.x * 256 + threadIdx.x) * 8;
	const uint64_t tok = blockIdx.y;
	float s[8] = {};

	ptx_grid_launch();
	ptx_grid_wait();
	if (col >= a.hidden)
		return;
#pragma unroll 8
	for (uint32_t j = 0; j < a.top_k; j++) {
		const uint64_t slot = tok * a.top_k + j;
		const uint4 o =
			__ldcg((const uint4 *)(a.out_f16 + slot * a.hidden + col));
		const float back = __ldcg(&a.out_back[slot * (a.hidden / 32) + col / 32]);
		const float w = __ldcg(&a.ids[slot]) < a.nr_experts
					? __ldcg(&a.weights[slot]) * back
					: __uint_as_float(0x7fc00000u);
		const uint32_t p[4] = {o.x, o.y, o.z, o.w};

#pragma unroll
		for (int i = 0; i < 4; i++) {
			s[2 * i] += w * ptx_f16_f32(p[i] & 0xffffu);
			s[2 * i + 1] += w * ptx_f16_f32(p[i] >> 16);
		}
	}
	moe_y_put(a.y, tok * a.hidden + col, s);
}

static int wide_product(const struct moe_wide *a, int second, void *stream)
{
	switch (a->group) {
	case 32:
		return moe_wide_gemm_g32(a, second, stream);
	case 64:
		return moe_wide_gemm_g64(a, second, stream);
	default:
		return moe_wide_gemm_g128(a, second, stream);
	}
}

int moe_wide_sum(const struct moe_wide *a, void *stream)
{
	const dim3 grid((a->hidden + 1023) / 1024, a->nr_tokens);

	return moe_start(wide_sum, grid, 256, 0, a, stream);
}

int moe_wide_launch(const struct moe_wide *a, void *stream)
{
	const dim3 sums((a->hidden + 2047) / 2048, a->nr_tokens);
	int r;

	r = moe_start(a->tile_tokens <= 32 ? wide_pack_rows : wide_pack<false>,
		      dim3(a->nr_tokens), PACK_WARPS * 32, 0, a, stream);
	if (!r)
		r = wide_product(a, 0, stream);
	if (!r && a->inter <= PACK_SHORT)
		r = moe_start(wide_pack_short,
			      dim3((a->nr_slots + PACK_WARPS - 1) / PACK_WARPS),
			      PACK_WARPS * 32, 0, a, stream);
	else if (!r)
		r = moe_start(wide_pack<true>, dim3(a->nr_slots), PACK_WARPS * 32, 0, a,
			      stream);
	if (!r)
		r = wide_product(a, 1, stream);
	return r ? r : moe_start(wide_sum_f16, sums, 256, 0, a, stream);
}
