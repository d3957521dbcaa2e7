/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_route.cu - sigmoid router: biased scores choose, plain scores weigh. A warp per
 * token.
 *
 * Lanes hold every 32nd expert in registers; the best is found by a warp maximum over
 * (score, smaller id first), top_k times. Matches moe_route_ref.c up to the rounding of
 * expf. The bias, which no kernel of a step writes, is read before the kernel in front has
 * ended.
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

/* struct route_lane - experts lane, lane + 32, ... of a token */
template <int PER> struct route_lane {
	uint32_t key[PER];
	float score[PER];
};

/* The best expert that is left; ties go to the smaller id; it becomes taken. */
template <int PER>
__device__ __forceinline__ uint32_t route_best(struct route_lane<PER> &l, float &score)
{
	const uint32_t lane = threadIdx.x % 32;
	uint32_t best = 0, at = 0, id;
	float mine = 0.0f;

#pragma unroll
	for (uint32_t i = 0; i < PER; i++)
		if (l.key[i] > best) {
			best = l.key[i];
			at = i * 32 + lane;
			mine = l.score[i];
		}
	id = __reduce_min_sync(~0u, best == __reduce_max_sync(~0u, best) ? at : ~0u);
	score = __shfl_sync(~0u, mine, id % 32);
#pragma unroll
	for (uint32_t i = 0; i < PER; i++)
		l.key[i] = i * 32 + lane == id ? 0 : l.key[i];
	return id;
}

/* Experts of groups that are not among the best are taken out. @v: biased scores */
template <int PER>
__device__ __forceinline__ void route_groups(const struct kvk_moe_route_args &a,
					     struct route_lane<PER> &l, const float *v)
{
	const uint32_t size = a.nr_experts / a.nr_groups, lane = threadIdx.x % 32;
	struct route_lane<ROUTE_GROUPS / 32> group = {
	};
	uint64_t chosen = 0;
	float unused;

	__syncwarp();
#pragma unroll
	for (uint32_t i = 0; i < ROUTE_GROUPS / 32; i++) {
		const uint32_t g = i * 32 + lane;
		float first = -INFINITY, second = -INFINITY;

		if (g >= a.nr_groups)
			continue;
		for (uint32_t e = g * size; e < (g + 1) * size; e++) {
			second = fmaxf(second, fminf(first, v[e]));
			first = fmaxf(first, v[e]);
		}
		group.key[i] = route_key(size > 1 ? first + second : first);
	}
	for (uint32_t k = 0; k < a.top_groups; k++)
		chosen |= 1ull << route_best(group, unused);
#pragma unroll
	for (uint32_t i = 0; i < PER; i++)
		if (i * 32 + lane < a.nr_experts &&
		    !(chosen >> ((i * 32 + lane) / size) & 1))
			l.key[i] = 0;
}

template <int PER>
__global__ void __launch_bounds__(32 * ROUTE_WARPS)
	moe_route_kernel(const struct kvk_moe_route_args a)
{
	extern __shared__ float shared[];
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = a.nr_experts;
	const uint32_t t = blockIdx.x * ROUTE_WARPS + warp;
	const bool groups = a.top_groups < a.nr_groups;
	struct route_lane<PER> l;
	float bias[PER], weight = 0.0f, sum = 0.0f;
	uint32_t bad = 0, id = 0;

	ptx_grid_launch();
#pragma unroll
	for (uint32_t i = 0; i < PER; i++)
		bias[i] = a.bias && i * 32 + lane < n ? a.bias[i * 32 + lane] : 0.0f;
	ptx_grid_wait();
	if (t >= a.nr_tokens)
		return;
#pragma unroll
	for (uint32_t i = 0; i < PER; i++)
		l.score[i] = i * 32 + lane < n
				     ? __ldcg(&a.logits[(uint64_t)t * n + i * 32 + lane])
				     : 0.0f;
#pragma unroll
	for (uint32_t i = 0; i < PER; i++) {
		const float s = 1.0f / (1.0f + expf(-l.score[i]));
		const float v = a.bias ? s + bias[i] : s;
		const bool there = i * 32 + lane < n;

		l.score[i] = s;
		l.key[i] = there ? route_key(v) : 0;
		bad |= there && isnan(v);
		if (groups && there)
			shared[warp * n + i * 32 + lane] = v;
	}
	bad = __any_sync(~0u, bad);
	if (groups && !bad)
		route_groups<PER>(a, l, shared + warp * n);
	for (uint32_t k = 0; k < a.top_k; k++) {
		float score = __uint_as_float(0x7fc00000u);
		const uint32_t best = bad ? k : route_best(l, score);

		sum += score;
		if (lane == k) {
			id = best;
			weight = score;
		}
	}
	if (lane < a.top_k) {
		a.ret_ids[(uint64_t)t * a.top_k + lane] = id;
		a.ret_weights[(uint64_t)t * a.top_k + lane] =
			(a.norm ? weight / (sum + 1e-20f) : weight) * a.scale;
	}
}

template <int PER>
static int route_launch(const struct kvk_moe_route_args *a, kvk_stream stream)
{
	cudaLaunchAttribute attr[1] = {};
	cudaLaunchConfig_t cfg = {};

	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3((a->nr_tokens + ROUTE_WARPS - 1) / ROUTE_WARPS);
	cfg.blockDim = dim3(32 * ROUTE_WARPS);
	cfg.dynamicSmemBytes =
		a->top_groups < a->nr_groups ? ROUTE_WARPS * a->nr_experts * 4 : 0;
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = 1;
	return cudaLaunchKernelEx(&cfg, moe_route_kernel<PER>, *a) ? -EIO : 0;
}

int kvk_moe_route_cuda(const struct kvk_moe_route_args *a, kvk_stream stream)
{
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
	if (a->nr_experts <= 8 * 32)
		return route_launch<8>(a, stream);
	if (a->nr_experts <= 12 * 32)
		return route_launch<12>(a, stream);
	return route_launch<ROUTE_EXPERTS / 32>(a, stream);
}
