/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_wide.cu - the routed INT4 experts of a prefill chunk or a large batch.
 *
 * After the plan: pack x, first product and SwiGLU, pack h, second product, sum. Packing
 * gives each slot its row, in the plan's order, as f16 times a power of two that brings its
 * largest value near 2^14 (x: exact), in the layout that moe_int4_wide.cuh copies to shared
 * memory as it is:
 *
 *	[64 columns][row][128 bytes], 16-byte piece c of the r-th row of an expert at c ^ (r & 7)
 *	inside 32 columns: column 8 t + 4 i + 2 h + e at 16 i + 8 h + 2 t + e
 */
#include "fp8.h"
#include "moe_int4_wide.h"
#include "moe_ptx.cuh"
#include "moe_start.cuh"

#define PACK_WARPS 8u

/* Power of two that brings a largest value near 2^14; 1 for Inf and NaN. */
__device__ __forceinline__ float pack_scale(uint32_t amax_bits)
{
	const uint32_t e = amax_bits >> 23;

	return e == 255 ? 1.0f : __uint_as_float((268u - (e < 15 ? 15u : e)) << 23);
}

/* Two neighbours of a row. */
__device__ __forceinline__ float2 pack_two(const uint16_t *row, uint32_t i)
{
	const uint32_t v = __ldcg((const uint32_t *)row + i);

	return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

__device__ __forceinline__ float2 pack_two(const float *row, uint32_t i)
{
	return __ldcg((const float2 *)row + i);
}

/* One row; a warp. @r: its number among its expert's rows */
template <typename X>
__device__ __forceinline__ float pack_row(const X *row, uint32_t cols, uint8_t *dst,
					  uint64_t panel, uint32_t r)
{
	const uint32_t lane = threadIdx.x % 32;
	uint32_t top = 0;

#pragma unroll 4
	for (uint32_t i = lane; i < cols / 2; i += 32) {
		const float2 v = pack_two(row, i);

		top = max(top, max(__float_as_uint(v.x) & 0x7fffffffu,
				   __float_as_uint(v.y) & 0x7fffffffu));
	}
	const float scale = pack_scale(__reduce_max_sync(~0u, top));

#pragma unroll 2
	for (uint32_t i = lane; i < cols / 8; i += 32) {
		uint32_t p[4];

#pragma unroll
		for (uint32_t t = 0; t < 4; t++) {
			const float2 v = pack_two(row, i / 4 * 16 + 4 * t + i % 4);

			p[t] = ptx_f16x2(v.x * scale, v.y * scale);
		}
		*(uint4 *)(dst + i / 8 * panel + ((i ^ r) & 7) * 16) =
			make_uint4(p[0], p[1], p[2], p[3]);
	}
	/* its inverse, exactly */
	return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

/* grid: (tiles, parts of a tile) */
template <bool SECOND>
__global__ void __launch_bounds__(PACK_WARPS * 32)
	wide_pack(const __grid_constant__ struct moe_wide a)
{
	const uint32_t warp = blockIdx.y * PACK_WARPS + threadIdx.x / 32;
	const uint64_t panel = (uint64_t)a.nr_slots * 128u;

	ptx_grid_launch();
	ptx_grid_wait();
	if (blockIdx.x >= __ldcg(a.nr_tiles))
		return;
	const uint2 tile = __ldcg(&a.tiles[blockIdx.x]);

	for (uint32_t r = warp; r < tile.x >> 16; r += gridDim.y * PACK_WARPS) {
		const uint64_t pos = tile.y + r;
		float back;

		if (SECOND)
			back = pack_row(a.h + pos * a.inter, a.inter,
					a.h_panels + pos * 128u, panel, r);
		else
			back = pack_row(a.x + (uint64_t)(__ldcg(&a.list[pos]) / a.top_k) *
							a.hidden,
					a.hidden, a.x_panels + pos * 128u, panel, r);
		if (threadIdx.x % 32 == 0)
			(SECOND ? a.h_back : a.x_back)[pos] = back / 64.0f;
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
	const dim3 tiles(a->tiles_max,
			 (a->tile_tokens + 2 * PACK_WARPS - 1) / (2 * PACK_WARPS));
	int r;

	r = moe_start(wide_pack<false>, tiles, PACK_WARPS * 32, 0, a, stream);
	if (!r)
		r = wide_product(a, 0, stream);
	if (!r)
		r = moe_start(wide_pack<true>, tiles, PACK_WARPS * 32, 0, a, stream);
	if (!r)
		r = wide_product(a, 1, stream);
	return r ? r : moe_wide_sum(a, stream);
}
