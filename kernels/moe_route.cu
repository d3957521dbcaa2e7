/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_route.cu - sigmoid router: biased scores choose, plain scores weigh. A warp per
 * token.
 *
 * Scores lie in shared memory; lanes hold every 32nd expert and the best is found by a
 * warp maximum over (score, smaller id first), top_k times. Matches moe_route_ref.c up to
 * the rounding of expf.
 */
#include <errno.h>
#include "fp8.h"
#include "moe_cuda.h"
#include "moe_ptx.cuh"

#define ROUTE_WARPS   4u
#define ROUTE_EXPERTS 1024u
#define ROUTE_GROUPS  64u

/* Order-preserving key of a float; 0 is below all of them and marks what is taken. */
__device__ __forceinline__ uint32_t route_key(float v)
{
	uint32_t b = __float_as_uint(v == 0.0f ? 0.0f : v);

	return b & 0x80000000u ? ~b : b | 0x80000000u;
}

/* Index of the largest key; ties go to the smaller index; it becomes taken. */
__device__ __forceinline__ uint32_t route_best(uint32_t *key, uint32_t n)
{
	uint32_t best = 0, at = 0;

	for (uint32_t i = threadIdx.x % 32; i < n; i += 32)
		if (key[i] > best) {
			best = key[i];
			at = i;
		}
	uint32_t top = __reduce_max_sync(~0u, best);

	at = __reduce_min_sync(~0u, best == top ? at : ~0u);
	if (threadIdx.x % 32 == 0)
		key[at] = 0;
	__syncwarp();
	return at;
}

/* Experts of groups that are not among the best are taken out. */
__device__ __forceinline__ void route_groups(const struct kvk_moe_route_args &a,
					     const float *score, uint32_t *key,
					     uint32_t *group)
{
	const uint32_t size = a.nr_experts / a.nr_groups, lane = threadIdx.x % 32;
	uint64_t chosen = 0;

	for (uint32_t g = lane; g < a.nr_groups; g += 32) {
		float first = -INFINITY, second = -INFINITY;

		for (uint32_t i = g * size; i < (g + 1) * size; i++) {
			float v = a.bias ? score[i] + a.bias[i] : score[i];

			second = fmaxf(second, fminf(first, v));
			first = fmaxf(first, v);
		}
		group[g] = route_key(size > 1 ? first + second : first);
	}
	__syncwarp();
	for (uint32_t k = 0; k < a.top_groups; k++)
		chosen |= 1ull << route_best(group, a.nr_groups);
	for (uint32_t i = lane; i < a.nr_experts; i += 32)
		if (!(chosen >> (i / size) & 1))
			key[i] = 0;
	__syncwarp();
}

__global__ void __launch_bounds__(32 * ROUTE_WARPS)
	moe_route_kernel(const struct kvk_moe_route_args a, uint32_t padded)
{
	extern __shared__ uint32_t shared[];
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	const uint32_t t = blockIdx.x * ROUTE_WARPS + warp;
	uint32_t *key = shared + warp * (2 * padded + ROUTE_GROUPS);
	float *score = (float *)key + padded;
	uint32_t bad = 0, id = 0;
	float weight = 0.0f, sum = 0.0f;

	ptx_grid_launch();
	ptx_grid_wait();
	if (t >= a.nr_tokens)
		return;
	for (uint32_t i = lane; i < a.nr_experts; i += 32) {
		float s = 1.0f / (1.0f + expf(-a.logits[(uint64_t)t * a.nr_experts + i]));
		float b = a.bias ? s + a.bias[i] : s;

		score[i] = s;
		key[i] = route_key(b);
		bad |= isnan(b);
	}
	bad = __any_sync(~0u, bad);
	__syncwarp();
	if (a.top_groups < a.nr_groups && !bad)
		route_groups(a, score, key, key + 2 * padded);
	for (uint32_t k = 0; k < a.top_k; k++) {
		uint32_t best = bad ? k : route_best(key, a.nr_experts);

		sum += score[best];
		if (lane == k) {
			id = best;
			weight = bad ? __uint_as_float(0x7fc00000u) : score[best];
		}
	}
	if (lane < a.top_k) {
		a.ret_ids[(uint64_t)t * a.top_k + lane] = id;
		a.ret_weights[(uint64_t)t * a.top_k + lane] =
			(a.norm ? weight / (sum + 1e-20f) : weight) * a.scale;
	}
}

int kvk_moe_route_cuda(const struct kvk_moe_route_args *a, kvk_stream stream)
{
	const uint32_t padded = (a->nr_experts + 31) / 32 * 32;
	const size_t bytes = ROUTE_WARPS * (2 * padded + ROUTE_GROUPS) * sizeof(uint32_t);

	if (!a->logits || !a->ret_ids || !a->ret_weights || !a->nr_experts ||
	    a->nr_experts > ROUTE_EXPERTS || !a->top_k || a->top_k > 32)
		return -EINVAL;
	if (!a->nr_groups || a->nr_groups > ROUTE_GROUPS ||
	    a->nr_experts % a->nr_groups || !a->top_groups ||
	    a->top_groups > a->nr_groups ||
	    a->top_k > a->nr_experts / a->nr_groups * a->top_groups)
		return -EINVAL;
	if (!a->nr_tokens)
		return 0;
	moe_route_kernel<<<(a->nr_tokens + ROUTE_WARPS - 1) / ROUTE_WARPS,
			   32 * ROUTE_WARPS, bytes, (cudaStream_t)stream>>>(*a, padded);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}
