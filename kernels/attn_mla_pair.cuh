/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_pair.cuh - how the MLA decode kernels for 17 to 64 query rows merge a unit of two parts
 * without slots: its CTAs are a cluster of two, and read each other's shared memory.
 *
 * CTAs 2 k and 2 k + 1 are a cluster. Where a unit is cut into an even number of parts, none of whose
 * CTAs has anything else, and the first of them is even, parts 2 i and 2 i + 1 are a pair: each keeps half of
 * the rows (or dims), puts its sums of the other half into its own ring, which is empty by then, and reads
 * what the other one put there. A unit of two parts is then complete (a batch of 64 equal requests on 128
 * CTAs); of more, the pair writes one slot where there were two. 64 KB come from a neighbour's shared
 * memory instead of 128 KB from the L2, where they went before, and at best no fence, count and poll.
 * Neither CTA leaves before the other one has read. The order of the sum is fixed.
 */
#ifndef KVK_ATTN_MLA_PAIR_CUH
#define KVK_ATTN_MLA_PAIR_CUH

#include "kernels/attn_plan.cuh"

#include <math.h>

/*
 * Is this CTA's only segment one of a pair? All CTAs of the unit get the same answer. Behind
 * plan_enter().
 */
KVK_DEV bool pair_is(const struct attn_params &p)
{
	const struct plan_cta &mine = p.mem.ctas[blockIdx.x];
	const struct plan_seg &s = mine.first;
	uint32_t size = 1;

	SM90_ASM("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
	if (size != 2 || mine.count != 1 || s.nr_parts < 2 ||
	    (s.nr_parts | s.first_cta) & 1)
		return false;
	return p.mem.ctas[s.first_cta].count == 1 &&
	       p.mem.ctas[s.first_cta + s.nr_parts - 1].count == 1;
}

/* All threads of both CTAs that have not left: what they wrote before is there to be read behind it. */
KVK_DEV void pair_arrive(void)
{
	SM90_ASM("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

KVK_DEV void pair_wait(void)
{
	SM90_ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The neighbour's shared memory at what is @addr here. */
KVK_DEV uint32_t pair_addr(uint32_t addr)
{
	uint32_t r = 0;

	SM90_ASM("mapa.shared::cluster.u32 %0, %1, %2;"
		 : "=r"(r)
		 : "r"(addr), "r"((blockIdx.x & 1) ^ 1));
	return r;
}

KVK_DEV float4 pair_read4(uint32_t addr)
{
	float4 v = make_float4(0.f, 0.f, 0.f, 0.f);

	SM90_ASM("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
		 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
		 : "r"(addr)
		 : "memory");
	return v;
}

KVK_DEV float2 pair_read2(uint32_t addr)
{
	float2 v = make_float2(0.f, 0.f);

	SM90_ASM("ld.shared::cluster.v2.f32 {%0,%1}, [%2];"
		 : "=f"(v.x), "=f"(v.y)
		 : "r"(addr)
		 : "memory");
	return v;
}

/*
 * What a row's sums here and there are multiplied by, if @whole so that the result is normalised.
 * @a, @b: m (log2) and l; @ret: those of both
 */
KVK_DEV float2 pair_factors(float2 a, float2 b, bool whole, float2 *ret)
{
	const float m = fmaxf(a.x, b.x), mu = m == -INFINITY ? 0.f : m;
	const float fa = exp2_fast(a.x - mu), fb = exp2_fast(b.x - mu);
	const float l = a.y * fa + b.y * fb, inv = l > 0.f ? 1.f / l : l;

	*ret = make_float2(m, l);
	return whole ? make_float2(fa * inv, fb * inv) : make_float2(fa, fb);
}

/* A pair's slot, and the segment as the merge sees it: a part is a pair's. */
KVK_DEV float *pair_slot(const struct attn_params &p, const struct plan_seg &s,
			 struct plan_seg *ret)
{
	*ret = s;
	ret->nr_parts /= 2;
	return slot_ptr(p.mem, plan_slot(s, s.part / 2));
}

/*
 * 4 x 4 words of four lanes (a lane's number differs in bits @step and 2 @step) change places: lane
 * k's w[i] becomes lane i's w[k].
 */
KVK_DEV void pair_transpose(uint32_t step, float &w0, float &w1, float &w2, float &w3)
{
	const bool odd = threadIdx.x & step, upper = threadIdx.x & 2 * step;
	float a = __shfl_xor_sync(~0u, odd ? w0 : w1, step);
	float b = __shfl_xor_sync(~0u, odd ? w2 : w3, step);

	w0 = odd ? a : w0;
	w1 = odd ? w1 : a;
	w2 = odd ? b : w2;
	w3 = odd ? w3 : b;
	a = __shfl_xor_sync(~0u, upper ? w0 : w2, 2 * step);
	b = __shfl_xor_sync(~0u, upper ? w1 : w3, 2 * step);
	w0 = upper ? a : w0;
	w2 = upper ? w2 : a;
	w1 = upper ? b : w1;
	w3 = upper ? w3 : b;
}

/*
 * How the three kernels are launched: PDL, and clusters of two where the grid can be cut so. @attr: two
 */
static inline void pair_launch_attrs(uint32_t nr_ctas, cudaLaunchAttribute *attr,
				     cudaLaunchConfig_t *cfg)
{
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	attr[1].id = cudaLaunchAttributeClusterDimension;
	attr[1].val.clusterDim.x = 2;
	attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
	cfg->gridDim = dim3(nr_ctas);
	cfg->attrs = attr;
	cfg->numAttrs = nr_ctas % 2 ? 1 : 2;
}

#endif /* KVK_ATTN_MLA_PAIR_CUH */
