/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_plan.cu - counting sort of a step's slots by expert, in one CTA or in many.
 *
 * Each warp owns a run of slots: it counts them per expert, the counts become offsets
 * (warps before, experts before), and the warp walks its run again to place them. Inside
 * 32 slots match.any gives equal experts, lower lanes first: a stable sort without
 * atomics. Many CTAs have a share of the slots each, and a kernel before counts all shares
 * (there with atomics: the order does not matter).
 */
#include <errno.h>
#include "moe_plan.cuh"
#include "moe_ptx.cuh"
#include "moe_start.cuh"

#define WARPS (MOE_PLAN_THREADS / 32u)

struct plan_shared {
	uint16_t count[WARPS][MOE_PLAN_EXPERTS];
	uint32_t first[MOE_PLAN_EXPERTS];
	uint32_t row[MOE_PLAN_EXPERTS]; /* slots of the expert in the CTAs before */
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
				const uint32_t pos = sh.first[id] + base + rank;

				p.list[pos] = slot;
				if (p.place)
					p.place[slot] = pos | (sh.row[id] + base + rank)
								      << MOE_PLACE_ROW;
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

/* A CTA's slots. */
__device__ __forceinline__ uint2 plan_share(const struct moe_plan &p)
{
	const uint32_t each = ((p.nr_slots + gridDim.x - 1) / gridDim.x + 31) / 32 * 32;

	return make_uint2(min(blockIdx.x * each, p.nr_slots),
			  min((blockIdx.x + 1) * each, p.nr_slots));
}

/* Counts of all shares. */
__global__ void __launch_bounds__(MOE_PLAN_THREADS)
	moe_count_kernel(const struct moe_plan p)
{
	using counts = uint32_t[MOE_PLAN_EXPERTS];
	MOE_SHARED(counts, count);
	const uint2 share = plan_share(p);

	for (uint32_t e = threadIdx.x; e < p.nr_experts; e += MOE_PLAN_THREADS)
		count[e] = 0;
	ptx_grid_launch();
	ptx_grid_wait();
	__syncthreads();
	for (uint32_t i = share.x + threadIdx.x; i < share.y; i += MOE_PLAN_THREADS)
		atomicAdd(&count[plan_id(p, i)], 1u);
	__syncthreads();
	for (uint32_t e = threadIdx.x; e < p.nr_experts; e += MOE_PLAN_THREADS)
		p.counts[blockIdx.x * p.nr_experts + e] = count[e];
}

/* An expert's slots in all shares; @before: in those before this CTA's */
__device__ __forceinline__ uint32_t plan_total(const struct moe_plan &p, uint32_t e,
					       uint32_t *before)
{
	uint32_t total = 0;

	*before = 0;
#pragma unroll 8
	for (uint32_t c = 0; c < gridDim.x; c++) {
		const uint32_t n = __ldcg(&p.counts[c * p.nr_experts + e]);

		total += n;
		*before += c < blockIdx.x ? n : 0;
	}
	return total;
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
	const uint2 share = plan_share(p);
	const uint32_t warps = min((share.y - share.x + 31) / 32, WARPS);
	const uint32_t run =
		warps ? (share.y - share.x + warps * 32 - 1) / (warps * 32) * 32 : 0;
	const uint32_t from = min(share.x + warp * run, share.y),
		       to = min(from + run, share.y);
	uint32_t total = 0, before = 0, tiles;
	uint64_t at;

	ptx_grid_wait();
	ptx_grid_launch();
	if (warp < warps) {
		for (uint32_t i = lane; i < p.nr_experts; i += 32)
			sh.count[warp][i] = 0;
		__syncwarp();
		plan_walk(p, sh, from, to, false);
	}
	if (blockIdx.x == 0)
		plan_zero(p);
	__syncthreads();
	for (uint32_t w = 0; w < warps && e < p.nr_experts; w++) {
		uint32_t c = sh.count[w][e];

		sh.count[w][e] = (uint16_t)total;
		total += c;
	}
	if (gridDim.x > 1 && e < p.nr_experts)
		total = plan_total(p, e, &before);
	tiles = (total + p.tile_tokens - 1) / p.tile_tokens;
	at = block_scan(sh, (uint64_t)tiles << 32 | total);
	if (e < p.nr_experts) {
		sh.first[e] = (uint32_t)at + before;
		sh.row[e] = before;
	}
	if (e == MOE_PLAN_THREADS - 1 && blockIdx.x == 0)
		*p.nr_tiles = (uint32_t)(at >> 32) + tiles;
	__syncthreads();
	const uint32_t each = plan_tile(p, total, tiles);

	for (uint32_t i = 0; i < tiles && blockIdx.x == 0; i++)
		p.tiles[(at >> 32) + i] = make_uint2(
			e | min(each, total - i * each) << 16, (uint32_t)at + i * each);
	if (warp < warps)
		plan_walk(p, sh, from, to, true);
}

/* CTAs that sort so many slots. */
static uint32_t plan_ctas(uint32_t nr_slots)
{
	const uint32_t nr = nr_slots / MOE_PLAN_SHARE;

	return nr < 2 ? 1 : nr < MOE_PLAN_CTAS ? nr : MOE_PLAN_CTAS;
}

int moe_plan_launch(const struct moe_plan *p, void *stream)
{
	const uint32_t ctas = p->counts ? plan_ctas(p->nr_slots) : 1;
	int r;

	if (p->only_zero)
		return moe_start(moe_zero_kernel, dim3(1), 256, 0, p, stream);
	if (ctas > 1) {
		r = moe_start(moe_count_kernel, dim3(ctas), MOE_PLAN_THREADS, 0, p,
			      stream);
		if (r)
			return r;
	}
	return moe_start(moe_plan_kernel, dim3(ctas), MOE_PLAN_THREADS, 0, p, stream);
}
