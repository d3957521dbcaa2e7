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
#define WIDE_FINE      32.0f	      /* bins of a factor e */
#define WIDE_LEAST     -3.4028235e38f /* the least number */
#define WIDE_PARTS     256u
#define WIDE_ROUNDS    4u
#define WIDE_LIST      512u	/* logits of a CTA in the bracket that are listed */
#define WIDE_MEAN      0.98454f /* a bin's mean mass of its largest: 32 (1 - e^(-1/32)) */
#define WIDE_VAR \
	8.14e-5f /* 1 / (12 * 32^2): of the masses in a bin, of their mean squared */
#define WIDE_SLACK 0.0005f /* of a sum: more than float sums are wrong by */

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
	float sum;
	u64 total;
	u64 above;
	u64 inside;
	u64 warp_mass[W]; /* above the cut */
	u32 warp_cut[W];  /* logits at the cut */
	u32 count[WIDE_BINS];
	u32 listed;
	u32 list[WIDE_LIST]; /* keys in the bracket, in any order */
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

/* Every CTA's word in lanes 0 to 7, and in each eight behind; 0 where there is no CTA. */
KVK_DEV u32 wide_get_all32(const u32 *p, u32 ctas)
{
	const u32 c = threadIdx.x % WIDE_CTAS;

	return c < ctas ? tile_cluster_get32(p, c) : 0;
}

/* Sum over the CTAs, by all lanes of a warp. */
KVK_DEV u64 wide_all_sum64(const u64 *p, u32 ctas)
{
	const u32 c = threadIdx.x % WIDE_CTAS;
	u64 v = c < ctas ? tile_cluster_get64(p, c) : 0;

#pragma unroll
	for (int o = WIDE_CTAS / 2; o; o >>= 1)
		v += __shfl_xor_sync(~0u, v, o);
	return v;
}

/* Sums over the CTAs of a word of each thread's own: loads of all CTAs on their way at once. */
KVK_DEV u64 wide_sum64(const u64 *p, u32 ctas)
{
	u64 v[WIDE_CTAS], sum = 0;

#pragma unroll
	for (u32 c = 0; c < WIDE_CTAS; c++)
		v[c] = c < ctas ? tile_cluster_get64(p, c) : 0;
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
		v[c] = c < ctas ? tile_cluster_get32(p, c) : 0;
#pragma unroll
	for (u32 c = 0; c < WIDE_CTAS; c++)
		sum += v[c];
	return sum;
}

/* ---------------------------------------------------------------------------- a thread's share */

/* Out of line: rows of whole groups of four do not have its instructions between theirs. */
static __device__ __attribute__((noinline)) float4 wide_fetch_odd(const float *src,
								  u32 at, u32 vocab)
{
	float v[4];

#pragma unroll
	for (u32 e = 0; e < 4; e++)
		v[e] = at + e < vocab ? src[at + e] : -INFINITY;
	return make_float4(v[0], v[1], v[2], v[3]);
}

/* Four logits of step @s; -INFINITY behind the row. */
KVK_DEV float4 wide_fetch(const struct wide_params &p, const struct wide_row &row,
			  const float *src, u32 s)
{
	const u32 at = row.id + s * WIDE_STEP;

	if (s >= row.steps || at >= row.vocab)
		return make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
	if (p.s.vec)
		return __ldcs((const float4 *)(src + at));
	return wide_fetch_odd(src, at, row.vocab);
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

/* f(four logits, step) for this thread's steps: -INFINITY behind the row, which has no mass */
template <class F> KVK_DEV void wide_each(const struct wide_row &row, F f)
{
#pragma unroll 2
	for (u32 s = 0; s < row.steps; s++)
		f(*(const float4 *)(row.logits + s * WIDE_STEP), s);
}

/* f(logit) for those of @bits */
template <class F> KVK_DEV void wide_some(const struct wide_row &row, u64 bits, F f)
{
#pragma unroll 1
	for (; bits; bits &= bits - 1) {
		const u32 bit = (u32)__ffsll((long long)bits) - 1;

		f(row.logits[bit / 4 * WIDE_STEP + bit % 4]);
	}
}

KVK_DEV u64 wide_mass(const struct wide_row &row, float logit)
{
	return sample_mass(logit, row.max, row.scale, row.unit);
}

/* By an addition that leaves whole numbers: conversions take turns with the exponentials. */
KVK_DEV u32 wide_bin(const struct wide_row &row, float logit)
{
	const float b = fminf((row.max - logit) * row.fine, (float)(WIDE_BINS - 1));

	return kvk_f32_bits(__fadd_rz(b, 8388608.0f)) % WIDE_BINS;
}

/* A warp's sum of @v to place @which; behind the next barrier warp 0 has the CTA's. */
template <u32 W>
KVK_DEV void wide_put_sum(struct wide_shared<W> &sh, u32 which, u64 v, u64 *by_warp)
{
	v = dev_warp_sum(v);
	if (threadIdx.x % 32)
		return;
	sh.w64[which][threadIdx.x / 32] = v;
	if (by_warp)
		by_warp[threadIdx.x / 32] = v;
}

template <u32 W> KVK_DEV u64 wide_cta_sum64(struct wide_shared<W> &sh, u32 which)
{
	return dev_warp_sum(threadIdx.x < W ? sh.w64[which][threadIdx.x] : 0ull);
}

#endif /* KVK_SAMPLE_WIDE_CUH */
