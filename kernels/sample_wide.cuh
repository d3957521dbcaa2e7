/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample_wide.cuh - what the steps of sample_wide.cu share: a row as its threads see it, and what
 * the CTAs of a cluster read out of each other's shared memory. Device code.
 */
#ifndef KVK_SAMPLE_WIDE_CUH
#define KVK_SAMPLE_WIDE_CUH

#include "kernels/sample.cuh"
#include "kernels/tile_ptx.cuh"

#define WIDE_STEP      128u /* logits a warp takes at once */
#define WIDE_STEPS     16u  /* 64 logits of a thread: a bit each */
#define WIDE_BIG_STEPS 13u  /* what fits an SM's memory with 32 warps */
#define WIDE_ILP       5u   /* steps on their way at once */
#define WIDE_CTAS      8u
#define WIDE_RUNS      128u   /* warps of a cluster */
#define WIDE_FEW       4096u  /* logits that are worth a CTA */
#define WIDE_MOST      20480u /* logits of a CTA: two CTAs on an SM */
#define WIDE_AT_ONCE   216u /* CTAs: two an SM, where their clusters find room in a GPC */
#define WIDE_BINS      1024u
#define WIDE_FINE      32.0f /* bins of a factor e */
#define WIDE_PARTS     256u
#define WIDE_ROUNDS    4u
#define WIDE_SLACK     0.001f /* of a bound: more than float sums are wrong by */

/* The largest logit of a CTA's part, its smallest id; NaN; sum of exp(logit - top). */
struct __align__(16) wide_best
{
	float top;
	u32 id;
	u32 bad;
	float sum;
};

/* Read by the other CTAs behind the barrier that follows its writing, and not written again. */
template <u32 W> struct wide_part {
	struct wide_best best;
	u32 key_min;
	u32 key_max;
	float sum;
	u64 total;
	u64 above;
	u64 inside;
	u64 warp_mass[W]; /* above the cut */
	u32 warp_cut[W];  /* logits at the cut */
	u32 count[WIDE_BINS];
	u64 mass[2]
		[WIDE_PARTS]; /* of a round and of the next: two are enough between barriers */
};

/* A warp's run of ids, and the draw in it. */
struct wide_place {
	u64 target; /* mass before the one that is drawn, from the start of the run on */
	u32 quota;  /* logits at the cut that the run may keep */
	u32 run;    /* of the cluster's warps */
};

template <u32 W> struct __align__(16) wide_shared
{
	struct wide_part<W> part;
	struct wide_best best[WIDE_CTAS]; /* greedy: the first CTA's, written by all */
	u64 all_mass[WIDE_RUNS];
	u32 all_cut[WIDE_RUNS];
	struct wide_place place;
	u64 bins[WIDE_PARTS];
	u64 w64[2][W];
	float w32[2][W];
	u32 wid[W];
	u32 first;
	u32 last;
	u32 chosen;
	u64 above;
	u64 step_mass[WIDE_STEPS];
	u32 step_cut[WIDE_STEPS];
};

struct wide_params {
	struct sample_params s;
	u32 ctas;
	u32 steps; /* of a warp */
};

/* A row as a thread sees it; the same in all threads but for the last three. */
struct wide_row {
	u32 vocab;
	u32 ctas;
	u32 steps;
	float max;
	float temperature;
	float unit;
	float scale;	     /* sample_scale() */
	float fine;	     /* bins of a difference to the largest */
	const float *logits; /* this lane's four of the warp's first 128 */
	u32 id;		     /* of the first of them */
	u64 inside;	     /* bit 4 s + e: logit e of step s is in the bracket */
};

/* Where the cut is known to be: keys lo .. hi; @above: mass of larger ones. */
struct wide_cut {
	u64 want;
	u64 above;
	u32 lo;
	u32 hi;
};

/* ------------------------------------------------------------------------- other CTAs' words */

KVK_DEV u32 wide_peer(const void *p, u32 rank)
{
	u32 at = 0;

	SM90_ASM("mapa.shared::cluster.u32 %0, %1, %2;"
		 : "=r"(at)
		 : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
	return at;
}

KVK_DEV u32 wide_get32(const void *p, u32 rank)
{
	u32 v = 0;

	SM90_ASM("ld.shared::cluster.u32 %0, [%1];"
		 : "=r"(v)
		 : "r"(wide_peer(p, rank))
		 : "memory");
	return v;
}

KVK_DEV u64 wide_get64(const void *p, u32 rank)
{
	u64 v = 0;

	SM90_ASM("ld.shared::cluster.u64 %0, [%1];"
		 : "=l"(v)
		 : "r"(wide_peer(p, rank))
		 : "memory");
	return v;
}

KVK_DEV void wide_put_best(const struct wide_best *to, u32 rank,
			   const struct wide_best &b)
{
	SM90_ASM("st.shared::cluster.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(
			 wide_peer(to, rank)),
		 "r"(kvk_f32_bits(b.top)), "r"(b.id), "r"(b.bad), "r"(kvk_f32_bits(b.sum))
		 : "memory");
}

/* The halves of tile_cluster_sync(). */
KVK_DEV void wide_arrive(void)
{
	SM90_ASM("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

KVK_DEV void wide_wait(void)
{
	SM90_ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Sum over the CTAs. */
KVK_DEV u64 wide_sum64(const u64 *p, u32 ctas)
{
	u64 v[WIDE_CTAS], sum = 0;

#pragma unroll
	for (u32 c = 0; c < WIDE_CTAS; c++)
		v[c] = c < ctas ? wide_get64(p, c) : 0;
#pragma unroll
	for (u32 c = 0; c < WIDE_CTAS; c++)
		sum += v[c];
	return sum;
}

KVK_DEV u32 wide_sum32(const u32 *p, u32 ctas)
{
	u32 v[WIDE_CTAS], sum = 0;

#pragma unroll
	for (u32 c = 0; c < WIDE_CTAS; c++)
		v[c] = c < ctas ? wide_get32(p, c) : 0;
#pragma unroll
	for (u32 c = 0; c < WIDE_CTAS; c++)
		sum += v[c];
	return sum;
}

/* ---------------------------------------------------------------------------- a thread's share */

/* Four logits of step @s; -INFINITY behind the row. */
KVK_DEV float4 wide_fetch(const struct wide_params &p, const struct wide_row &row,
			  const float *src, u32 s)
{
	const u32 at = row.id + s * WIDE_STEP;
	float v[4];

	if (s >= row.steps || at >= row.vocab)
		return make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
	if (p.s.vec)
		return __ldcs((const float4 *)(src + at));
#pragma unroll
	for (u32 e = 0; e < 4; e++)
		v[e] = at + e < row.vocab ? src[at + e] : -INFINITY;
	return make_float4(v[0], v[1], v[2], v[3]);
}

/* The best of a warp's lanes, in all of them. */
KVK_DEV void wide_warp_best(float &top, u32 &id)
{
	for (int o = 16; o; o >>= 1) {
		const float v = __shfl_xor_sync(~0u, top, o);
		const u32 i = __shfl_xor_sync(~0u, id, o);

		sample_best(top, id, v, i);
	}
}

/* f(logit, bit, id) for each of this thread's logits */
template <class F> KVK_DEV void wide_each(const struct wide_row &row, F f)
{
	for (u32 s = 0; s < row.steps; s++) {
		const u32 id = row.id + s * WIDE_STEP;
		const float4 v = *(const float4 *)(row.logits + s * WIDE_STEP);

		if (id < row.vocab)
			f(v.x, s * 4, id);
		if (id + 1 < row.vocab)
			f(v.y, s * 4 + 1, id + 1);
		if (id + 2 < row.vocab)
			f(v.z, s * 4 + 2, id + 2);
		if (id + 3 < row.vocab)
			f(v.w, s * 4 + 3, id + 3);
	}
}

/* f(logit, bit) for those in the bracket */
template <class F> KVK_DEV void wide_inside(const struct wide_row &row, F f)
{
	for (u64 left = row.inside; left; left &= left - 1) {
		const u32 bit = (u32)__ffsll((long long)left) - 1;

		f(row.logits[bit / 4 * WIDE_STEP + bit % 4], bit);
	}
}

KVK_DEV u64 wide_mass(const struct wide_row &row, float logit)
{
	return sample_mass(logit, row.max, row.scale, row.unit);
}

KVK_DEV u32 wide_bin(const struct wide_row &row, float logit)
{
	return min((u32)((row.max - logit) * row.fine), WIDE_BINS - 1);
}

/* Sums of a and b over the CTA, in every thread of warp 0 only; a's by warp to @by_warp. */
template <u32 W>
KVK_DEV void wide_sums(struct wide_shared<W> &sh, u64 &a, u64 &b, u64 *by_warp)
{
	const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

	a = dev_warp_sum(a);
	b = dev_warp_sum(b);
	__syncthreads();
	if (lane == 0) {
		sh.w64[0][warp] = a;
		sh.w64[1][warp] = b;
		if (by_warp)
			by_warp[warp] = a;
	}
	__syncthreads();
	a = dev_warp_sum(lane < W ? sh.w64[0][lane] : 0);
	b = dev_warp_sum(lane < W ? sh.w64[1][lane] : 0);
}

#endif /* KVK_SAMPLE_WIDE_CUH */
