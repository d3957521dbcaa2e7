/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample_wide.cuh - what the steps of sample_wide.cu share: a row as its threads see it, and what
 * the CTAs of a cluster read out of each other's shared memory. Device code.
 */
#ifndef KVK_SAMPLE_WIDE_CUH
#define KVK_SAMPLE_WIDE_CUH

#include "kernels/sample.cuh"
#include "kernels/sample_ptx.cuh"

#define WIDE_STEP      128u /* logits a warp takes at once */
#define WIDE_STEPS     16u  /* of a CTA with 16 warps */
#define WIDE_CHUNK     8u   /* steps whose logits in a thread have a bit each */
#define WIDE_BIG       32u  /* warps of a CTA that shares a row with one other */
#define WIDE_BIG_STEPS 32u  /* of such a one */
#define WIDE_BIG_HERE  13u  /* what fits an SM's memory with them */
#define WIDE_BIG_PART  12u  /* of more, what lies there: whole fours */
#define WIDE_ILP       5u   /* steps on their way at once */
#define WIDE_CTAS      8u
#define WIDE_RUNS      128u   /* warps of a cluster */
#define WIDE_FEW       4096u  /* logits that are worth a CTA */
#define WIDE_MOST      20480u /* logits of a CTA: two CTAs on an SM */
#define WIDE_AT_ONCE   216u /* CTAs: two an SM, where their clusters find room in a GPC */
#define WIDE_LONG \
	65536u /* logits of a row from which on finer bins are worth their words */
#define WIDE_BINS     1024u
#define WIDE_NATS     32.0f	     /* that all bins may span, in factors e */
#define WIDE_LEAST    -3.4028235e38f /* the least number */
#define WIDE_PARTS    256u
#define WIDE_ROUNDS   4u
#define WIDE_FEW_LEFT 32u     /* keys among which a warp finds the cut */
#define WIDE_LIST     512u    /* logits of a CTA in the bracket that are listed */
#define WIDE_LISTED   1024u   /* of a row */
#define WIDE_SLACK    0.0005f /* of a sum: more than float sums are wrong by */

/* The largest logit of a CTA's part, its smallest id; NaN; sum of exp(logit - top), where there
 * is a draw of each thread's largest one's alone. */
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
	alignas(8) u32 count[WIDE_BINS];
	u32 listed;
	u64 list[WIDE_LIST]; /* keys in the bracket above their ids, in any order */
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
	u32 nr_left[2]; /* of keys in the part with the cut, of a round and of the next */
	u32 left_key[WIDE_FEW_LEFT];
	u64 left_mass[WIDE_FEW_LEFT];
	u64 step_mass[W];
	u32 step_cut[W];
};

struct wide_params {
	struct sample_params s;
	u32 ctas;
	u32 steps; /* of a warp, no more than a CTA has warps */
	u32 here; /* of them, the first ones that are kept in shared memory; all, or whole fours */
};

/* A row as a thread sees it; the same in all threads but for the last four. */
struct wide_row {
	u32 vocab;
	u32 ctas;
	u32 steps;
	u32 here; /* steps in shared memory */
	u32 vec;
	float max;
	float temperature;
	float unit;
	float small;	  /* bits of wide_acc.low: 2^23 units */
	u32 shift;	  /* of wide_acc.high in units */
	float scale;	  /* sample_scale() */
	float some;	  /* mass that is there, in parts of the largest one's */
	float nats;	  /* of a bin: its masses fall by exp(nats) */
	float bin;	  /* the same as a difference of logits */
	float fine;	  /* 1 / bin */
	float *logits;	  /* this lane's four of the warp's first 128, shared memory */
	const float *far; /* the same in the row */
	u32 id;		  /* of the first of them */
	float top;	  /* the largest that this thread has */
};

/* Where the cut is known to be: keys lo .. hi; @above: mass of larger ones. */
struct wide_cut {
	u64 want;
	u64 above;
	u32 lo;
	u32 hi;
};

/* ------------------------------------------------------------------------- other CTAs' words */

/* What the CTA's threads have stored is there for all of the cluster. By one fence: a release by
 * each thread is a MEMBAR.GPU in every warp. */
KVK_DEV void wide_share(void)
{
	__syncthreads();
	if (threadIdx.x == 0)
		sample_cluster_fence();
	__syncwarp();
	sample_cluster_arrive();
	tile_cluster_wait();
}

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
		v[e] = at + e < vocab ? src[e] : -INFINITY;
	return make_float4(v[0], v[1], v[2], v[3]);
}

/* Four logits of the row, from @src on, which have ids from @at on; -INFINITY behind the row.
 * @again: they will be read again, from the L2 cache */
KVK_DEV float4 wide_fetch(const struct wide_row &row, const float *src, u32 at,
			  bool again)
{
	if (at >= row.vocab)
		return make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
	if (!row.vec)
		return wide_fetch_odd(src, at, row.vocab);
	return again ? __ldcg((const float4 *)src) : __ldcs((const float4 *)src);
}

/* This thread's logits of step @s out of the row; @again: as wide_fetch() */
KVK_DEV float4 wide_step(const struct wide_row &row, u32 s, bool again)
{
	if (s >= row.steps)
		return make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
	return wide_fetch(row, row.far + s * WIDE_STEP, row.id + s * WIDE_STEP, again);
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

/* Four steps from @first on: all of them under way at once. -INFINITY behind the row. Of a pair
 * (W is 32) whole fours are in shared memory or in L2. */
template <u32 W>
KVK_DEV void wide_four_steps(const struct wide_row &row, u32 first, float4 (&v)[4])
{
	if (W < WIDE_BIG || first < row.here) {
#pragma unroll
		for (u32 k = 0; k < 4; k++)
			v[k] = first + k < row.steps
				       ? *(const float4 *)(row.logits +
							   (first + k) * WIDE_STEP)
				       : make_float4(-INFINITY, -INFINITY, -INFINITY,
						     -INFINITY);
	} else {
#pragma unroll
		for (u32 k = 0; k < 4; k++)
			v[k] = wide_step(row, first + k, true);
	}
}

/*
 * f(four logits) for this thread's steps: -INFINITY behind the row, which has no mass. A pair's
 * warps of a scheduler start at different steps: while one waits for L2 another has what is here.
 */
template <u32 W, class F> KVK_DEV void wide_each(const struct wide_row &row, F f)
{
	if constexpr (W < WIDE_BIG) {
#pragma unroll 2
		for (u32 s = 0; s < row.steps; s++)
			f(*(const float4 *)(row.logits + s * WIDE_STEP));
	} else {
		const u32 nr = (row.steps + 3) / 4;
		u32 at = threadIdx.x / 128 % nr * 4;

#pragma unroll 1
		for (u32 i = 0; i < nr; i++) {
			float4 v[4];

			wide_four_steps<W>(row, at, v);
#pragma unroll
			for (u32 k = 0; k < 4; k++)
				if (at + k < row.steps)
					f(v[k]);
			at = at + 4 < row.steps ? at + 4 : 0;
		}
	}
}

KVK_DEV u64 wide_mass(const struct wide_row &row, float logit)
{
	return sample_mass(logit, row.max, row.scale, row.unit);
}

/*
 * struct wide_acc - a sum of masses by additions, which leave whole numbers in the lower bits of what
 * they give: conversions to 64 bits take turns with the exponentials, 16 clocks a warp. Of up to
 * 128 logits.
 */
struct wide_acc {
	u32 high; /* of 2 + e: 2^22 e without its fraction */
	u32 low;  /* of small + the rest: units, without their fraction */
};

/* @e: a logit's mass before it is a whole number, at most 1 */
KVK_DEV void wide_acc_add(struct wide_acc &acc, const struct wide_row &row, float e)
{
	const float high = __fadd_rz(e, 2.0f);
	const float rest = e + (2.0f - high); /* exact, and less than row.small */

	acc.high += kvk_f32_bits(high);
	acc.low += kvk_f32_bits(__fadd_rz(rest, row.small));
}

/* The sum in units. @nr: how many were added */
KVK_DEV u64 wide_acc_sum(const struct wide_acc &acc, const struct wide_row &row, u32 nr)
{
	const u64 high = acc.high - nr * kvk_f32_bits(2.0f);

	return (high << row.shift) + (acc.low - nr * kvk_f32_bits(row.small));
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
