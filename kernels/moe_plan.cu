/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_plan.cu - counting sort of a step's slots by expert, in one CTA.
 *
 * Each warp owns a run of slots: it counts them per expert, the counts become offsets
 * (warps before, experts before), and the warp walks its run again to place them. Inside
 * 32 slots match.any gives equal experts, lower lanes first: a stable sort without
 * atomics.
 */
#include <errno.h>
#include "moe_plan.cuh"
#include "moe_ptx.cuh"

#define WARPS (MOE_PLAN_THREADS / 32u)

struct plan_shared {
	uint16_t count[WARPS][MOE_PLAN_EXPERTS];
	uint32_t first[MOE_PLAN_EXPERTS];
	uint64_t warp_sum[WARPS];
};

/* An id outside the table would read other memory: the last expert takes it. */
__device__ __forceinline__ uint32_t plan_id(const struct moe_plan &p, uint32_t slot)
{
	return min(p.ids[slot], p.nr_experts - 1);
}

/* Exclusive scan over the CTA of two counts at once (tokens low, tiles high). */
__device__ __forceinline__ uint64_t block_scan(struct plan_shared &sh, uint64_t v)
{
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	uint64_t sum = v, before = 0;

	for (uint32_t i = 1; i < 32; i *= 2) {
		uint64_t o = __shfl_up_sync(~0u, sum, i);

		if (lane >= i)
			sum += o;
	}
	if (lane == 31)
		sh.warp_sum[warp] = sum;
	__syncthreads();
	for (uint32_t w = 0; w < warp; w++)
		before += sh.warp_sum[w];
	return before + sum - v;
}

/* Count (place = false) or place the warp's run of slots. Ids are read eight ahead. */
__device__ __forceinline__ void plan_walk(const struct moe_plan &p,
					  struct plan_shared &sh, uint32_t from,
					  uint32_t to, bool place)
{
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

	for (uint32_t i = from; i < to; i += 32 * 8) {
		uint32_t ids[8];

#pragma unroll
		for (uint32_t j = 0; j < 8; j++)
			ids[j] = i + 32 * j + lane < to ? plan_id(p, i + 32 * j + lane)
							: ~0u;
#pragma unroll
		for (uint32_t j = 0; j < 8; j++) {
			const uint32_t id = ids[j], slot = i + 32 * j + lane;
			uint32_t same = __match_any_sync(~0u, id);
			uint32_t rank = __popc(same & ((1u << lane) - 1));
			uint32_t base = slot < to ? sh.count[warp][id] : 0;

			__syncwarp();
			if (slot < to && place) {
				p.list[sh.first[id] + base + rank] = slot;
				if (p.place)
					p.place[slot] = (sh.first[id] + base + rank) |
							(base + rank) << MOE_PLACE_ROW;
			}
			if (slot < to && rank == 0)
				sh.count[warp][id] = (uint16_t)(base + __popc(same));
			__syncwarp();
		}
	}
}

__device__ __forceinline__ void plan_zero(const struct moe_plan &p)
{
	for (uint32_t i = threadIdx.x; i < p.nr_zero; i += blockDim.x)
		p.zero[i] = 0;
}

__global__ void moe_zero_kernel(const struct moe_plan p)
{
	ptx_grid_wait();
	ptx_grid_launch();
	plan_zero(p);
}

/* Tokens of each of an expert's tiles but the last. Equal ones, if they are few: with more
 * the rounding to 8 could leave nothing for the last. */
__device__ __forceinline__ uint32_t plan_tile(const struct moe_plan &p, uint32_t total,
					      uint32_t tiles)
{
	if (!p.even || tiles < 2 || tiles > 8)
		return p.tile_tokens;
	return ((total + tiles - 1) / tiles + 7) / 8 * 8;
}

__global__ void __launch_bounds__(MOE_PLAN_THREADS, 1)
	moe_plan_kernel(const struct moe_plan p)
{
	MOE_SHARED(struct plan_shared, sh);
	const uint32_t e = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	const uint32_t warps = min((p.nr_slots + 31) / 32, WARPS);
	const uint32_t run = (p.nr_slots + warps * 32 - 1) / (warps * 32) * 32;
	const uint32_t from = min(warp * run, p.nr_slots),
		       to = min(from + run, p.nr_slots);
	uint32_t total = 0, tiles, places;
	uint64_t at;

	ptx_grid_wait();
	ptx_grid_launch();
	if (warp < warps) {
		for (uint32_t i = lane; i < p.nr_experts; i += 32)
			sh.count[warp][i] = 0;
		__syncwarp();
		plan_walk(p, sh, from, to, false);
	}
	plan_zero(p);
	__syncthreads();
	for (uint32_t w = 0; w < warps && e < p.nr_experts; w++) {
		uint32_t c = sh.count[w][e];

		sh.count[w][e] = (uint16_t)total;
		total += c;
	}
	tiles = (total + p.tile_tokens - 1) / p.tile_tokens;
	places = p.pairs ? (tiles + 1) / 2 * 2 : tiles;
	at = block_scan(sh, (uint64_t)places << 32 | total);
	if (e < p.nr_experts)
		sh.first[e] = (uint32_t)at;
	if (e == MOE_PLAN_THREADS - 1)
		*p.nr_tiles = (uint32_t)(at >> 32) + places;
	__syncthreads();
	const uint32_t each = plan_tile(p, total, tiles);

	for (uint32_t i = 0; i < tiles; i++)
		p.tiles[(at >> 32) + i] = make_uint2(
			e | min(each, total - i * each) << 16, (uint32_t)at + i * each);
	if (places > tiles)
		p.tiles[(at >> 32) + tiles] = make_uint2(e, 0);
	if (warp < warps)
		plan_walk(p, sh, from, to, true);
}

int moe_plan_launch(const struct moe_plan *p, void *stream)
{
	cudaLaunchAttribute attr[1] = {};
	cudaLaunchConfig_t cfg = {};

	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(1);
	cfg.blockDim = dim3(p->only_zero ? 256 : MOE_PLAN_THREADS);
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = 1;
	if (cudaLaunchKernelEx(&cfg, p->only_zero ? moe_zero_kernel : moe_plan_kernel,
			       *p))
		return -EIO;
	return 0;
}
