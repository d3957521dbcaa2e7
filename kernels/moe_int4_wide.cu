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

/* One row to its places; a CTA, with a barrier in pack_top() before they are used. A thread has up to PACK_PIECES pieces of eight columns. */
template <typename X>
__device__ __forceinline__ void pack_row(const X &row, uint32_t cols, uint8_t *panels,
					 float *backs, uint32_t nr_slots,
					 const uint32_t *place, uint32_t nr_places)
{
	const uint64_t panel = (uint64_t)nr_slots * 128u;
	using places = uint32_t[PLACES_MAX];
	MOE_SHARED(places, places_of);
	float2 v[PACK_PIECES][4];
	uint32_t top = 0;
	float scale;

	if (threadIdx.x < nr_places)
		places_of[threadIdx.x] = __ldcg(place + threadIdx.x);
#pragma unroll
	for (uint32_t k = 0; k < PACK_PIECES; k++) {
		const uint32_t i = threadIdx.x + k * PACK_WARPS * 32;

#pragma unroll
		for (uint32_t t = 0; t < 4 && i < cols / 8; t++) {
			v[k][t] = pack_two(row, i / 4 * 16 + 4 * t + i % 4);
			top = max(top, max(__float_as_uint(v[k][t].x) & 0x7fffffffu,
					   __float_as_uint(v[k][t].y) & 0x7fffffffu));
		}
	}
	scale = moe_wide_scale(pack_top(top));
#pragma unroll
	for (uint32_t k = 0; k < PACK_PIECES; k++) {
		const uint32_t i = threadIdx.x + k * PACK_WARPS * 32;
		uint32_t p[4];

		if (i >= cols / 8)
			continue;
#pragma unroll
		for (uint32_t t = 0; t < 4; t++)
			p[t] = ptx_f16x2(v[k][t].x * scale, v[k][t].y * scale);
		for (uint32_t j = 0; j < nr_places; j++) {
			const uint32_t at = places_of[j];
			const uint64_t pos = at & ((1u << MOE_PLACE_ROW) - 1);

			*(uint4 *)(panels + i / 8 * panel + pos * 128u +
				   ((i ^ at >> MOE_PLACE_ROW) & 7) * 16) =
				make_uint4(p[0], p[1], p[2], p[3]);
		}
	}
	/* its inverse, exactly */
	if (threadIdx.x < nr_places)
		backs[places_of[threadIdx.x] & ((1u << MOE_PLACE_ROW) - 1)] =
			moe_wide_inverse(scale) / 64.0f;
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
		const uint32_t pos = __ldcg(place) & ((1u << MOE_PLACE_ROW) - 1);

		const struct pack_h h = {a.h_f16 + (uint64_t)pos * a.inter,
					 a.h_scale + (uint64_t)pos * (a.inter / 16)};

		pack_row(h, a.inter, a.h_panels, a.h_back, a.nr_slots, place, 1);
	} else {
		pack_row((const uint16_t *)a.x + row * a.hidden, a.hidden, a.x_panels,
			 a.x_back, a.nr_slots, a.place + row * a.top_k, a.top_k);
	}
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
	uint2 *y = (uint2 *)(a.y + tok * a.hidden + col);

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
	if (a.accumulate) {
		const uint2 old = *y;

		s[0] += __uint_as_float(old.x << 16);
		s[1] += __uint_as_float(old.x & 0xffff0000u);
		s[2] += __uint_as_float(old.y << 16);
		s[3] += __uint_as_float(old.y & 0xffff0000u);
	}
	*y = make_uint2(ptx_bf16x2(s[0], s[1]), ptx_bf16x2(s[2], s[3]));
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
	uint4 *y = (uint4 *)(a.y + tok * a.hidden + col);

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
	if (a.accumulate) {
		const uint4 old = *y;
		const uint32_t p[4] = {old.x, old.y, old.z, old.w};

#pragma unroll
		for (int i = 0; i < 4; i++) {
			s[2 * i] += __uint_as_float(p[i] << 16);
			s[2 * i + 1] += __uint_as_float(p[i] & 0xffff0000u);
		}
	}
	*y = make_uint4(ptx_bf16x2(s[0], s[1]), ptx_bf16x2(s[2], s[3]),
			ptx_bf16x2(s[4], s[5]), ptx_bf16x2(s[6], s[7]));
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

	r = moe_start(wide_pack<false>, dim3(a->nr_tokens), PACK_WARPS * 32, 0, a,
		      stream);
	if (!r)
		r = wide_product(a, 0, stream);
	if (!r)
		r = moe_start(wide_pack<true>, dim3(a->nr_slots), PACK_WARPS * 32, 0, a,
			      stream);
	if (!r)
		r = wide_product(a, 1, stream);
	return r ? r : moe_start(wide_sum_f16, sums, 256, 0, a, stream);
}
