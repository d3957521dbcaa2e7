/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_pair.cuh - how the MLA decode kernels for 17 to 64 query rows merge a unit of two parts
 * without slots: its CTAs are a cluster, and read each other's shared memory.
 *
 * Where a step may have twice as many CTAs as units (59 to 66 units on 132 SMs), CTAs 2 k and 2 k + 1
 * are launched as a cluster of two. If the schedule gives them one unit and nothing else, each
 * keeps half of the dims (or rows), puts its sums of the other half into its own ring, which is empty
 * by then, and reads what the other one put there. 64 KB come from a neighbour's shared memory
 * instead of 128 KB through the L2, and a barrier of the cluster is there in place of fence, count, poll and
 * read. Any other unit of such a launch merges by slots (attn_plan.cuh). Both CTAs come to the
 * same answer, since schedule, rows' number and verdict are the same for both. The order of the
 * sum is fixed, so reruns are bit-equal. Neither CTA leaves before the other one has read.
 *
 * In a cluster the CTA's shared memory does not start at a constant address: instances for pairs take it
 * from pair_base().
 */
#ifndef KVK_ATTN_MLA_PAIR_CUH
#define KVK_ATTN_MLA_PAIR_CUH

#include "kernels/attn_mla_pair_ptx.cuh"
#include "kernels/attn_plan.cuh"

#include <math.h>

/* Is this CTA's segment half of a unit that its cluster has alone? Behind plan_enter(). */
KVK_DEV bool pair_is(const struct attn_params &p)
{
	const struct plan_cta &mine = p.mem.ctas[blockIdx.x];
	const struct plan_cta &other = p.mem.ctas[blockIdx.x ^ 1];

	return mine.count == 1 && other.count == 1 && mine.first.nr_parts == 2 &&
	       mine.first.first_cta % 2 == 0;
}

/*
 * What a row's sums here and there are multiplied by so that the result is normalised. @a, @b: m
 * (log2) and l, here and there
 */
KVK_DEV float2 pair_factors(float2 a, float2 b)
{
	const float m = fmaxf(a.x, b.x), mu = m == -INFINITY ? 0.f : m;
	const float fa = exp2_fast(a.x - mu), fb = exp2_fast(b.x - mu);
	const float l = a.y * fa + b.y * fb, inv = l > 0.f ? 1.f / l : l;

	return make_float2(fa * inv, fb * inv);
}

/*
 * Where the CTA's shared memory lies that without a cluster is at @at: low bits are a constant, so
 * descriptors of products are too.
 */
KVK_DEV uint32_t pair_base(uint32_t at)
{
	return at + (pair_rank() << 24);
}

/* PDL, and (@pairs) clusters of two. @attr: [2] */
static inline void pair_launch_attrs(bool pairs, cudaLaunchAttribute *attr,
				     cudaLaunchConfig_t *cfg)
{
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	attr[1].id = cudaLaunchAttributeClusterDimension;
	attr[1].val.clusterDim.x = 2;
	attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
	cfg->attrs = attr;
	cfg->numAttrs = pairs ? 2 : 1;
}

#endif /* KVK_ATTN_MLA_PAIR_CUH */
