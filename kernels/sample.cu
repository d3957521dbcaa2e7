/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample.cu - next token of each row: greedy, temperature, top-p. Here a CTA per row; on Hopper
 * rows that fit go to sample_wide.cu, which gives the same ids.
 *
 * As sample_ref.c, with one difference: a token's mass is a whole number, exp((logit -
 * max) / temperature) in units of 2^-mass_bits. Whole numbers may be added in any order,
 * so the draw is the same in every run, and a token below one unit is never drawn. Among
 * 2^17 tokens a unit is 2^-44 of the most likely one.
 *
 * Top-p finds the key of the least likely kept logit three bits at a time: each thread
 * adds up mass for eight digits of its own in shared memory, nobody waits on a word of
 * another (a histogram with atomics took 2.4 ms for 163,840 tokens: most logits share
 * their upper byte). The draw halves the row by 16 until one warp can walk the rest by id.
 */
#include "kernels/moe_cuda.h"
#include "kernels/sample.cuh"

#define SAMPLE_THREADS 512u
#define SAMPLE_WARPS   (SAMPLE_THREADS / 32)
#define SAMPLE_ILP     4u
#define DIGIT_BITS     3u
#define DIGITS	       (1u << DIGIT_BITS)
#define MASS_BITS_MAX  44u

/* A row, and what is kept of it. The same in all threads. */
struct sample_row {
	const float *logits;
	u32 vocab;
	u32 vec;
	float max;
	float temperature;
	float scale; /* sample_scale() */
	float unit;  /* 2^mass_bits */
	u32 cut;     /* key of the least likely kept logit */
	u32 last;    /* largest kept id among the logits at the cut */
};

/* Each member is written behind a barrier that its last readers have passed. */
struct sample_shared {
	u64 mass[DIGITS][SAMPLE_THREADS];
	u64 digit[DIGITS];
	u64 part[SAMPLE_WARPS];
	double sum[SAMPLE_WARPS];
	float top[SAMPLE_WARPS];
	u32 id[SAMPLE_WARPS];
	u32 used;
	u32 bad;
	u32 found;
};

KVK_DEV u64 mass_of(const struct sample_row &row, float logit)
{
	return sample_mass(logit, row.max, row.scale, row.unit);
}

/*
 * Call f(id, logit) for ids first .. last - 1, shared out to @nr threads of which this is
 * number @me. Several loads are on their way at once: a row comes out of L2 many times.
 * @first is a multiple of four.
 */
template <class F>
KVK_DEV void row_each(const struct sample_row &row, u32 first, u32 last, u32 me, u32 nr,
		      F f)
{
	const u32 step = nr * 4;

	for (u32 at = first + me * 4; at < last && row.vec; at += step * SAMPLE_ILP) {
		float4 v[SAMPLE_ILP];

#pragma unroll
		for (u32 k = 0; k < SAMPLE_ILP; k++)
			if (at + k * step < last)
				v[k] = *(const float4 *)(row.logits + at + k * step);
#pragma unroll
		for (u32 k = 0; k < SAMPLE_ILP; k++) {
			const u32 i = at + k * step;

			if (i < last)
				f(i, v[k].x);
			if (i + 1 < last)
				f(i + 1, v[k].y);
			if (i + 2 < last)
				f(i + 2, v[k].z);
			if (i + 3 < last)
				f(i + 3, v[k].w);
		}
	}
	for (u32 i = first + me; i < last && !row.vec; i += nr)
		f(i, row.logits[i]);
}

template <class F> KVK_DEV void row_all(const struct sample_row &row, F f)
{
	row_each(row, 0, row.vocab, threadIdx.x, SAMPLE_THREADS, f);
}

/* ------------------------------------------------------------------ largest, and its sum
 */

/* Largest logit, smallest id of it; *ret_bad: the row holds NaN. */
KVK_DEV float row_max(struct sample_shared &sh, const struct sample_row &row, u32 *ret_id,
		      bool *ret_bad)
{
	float top = -INFINITY;
	u32 id = ~0u, bad = 0;

	if (threadIdx.x == 0)
		sh.bad = 0;
	row_all(row, [&](u32 i, float v) {
		bad |= kvk_is_nan(v);
		sample_best(top, id, v, i);
	});
	for (int o = 16; o; o >>= 1) {
		float v = __shfl_xor_sync(~0u, top, o);
		u32 i = __shfl_xor_sync(~0u, id, o);

		sample_best(top, id, v, i);
	}
	if (threadIdx.x % 32 == 0) {
		sh.top[threadIdx.x / 32] = top;
		sh.id[threadIdx.x / 32] = id;
	}
	__syncthreads();
	if (bad)
		atomicOr(&sh.bad, 1u);
	for (u32 w = 0; w < SAMPLE_WARPS; w++)
		sample_best(top, id, sh.top[w], sh.id[w]);
	__syncthreads();
	*ret_bad = sh.bad != 0;
	*ret_id = id < row.vocab ? id : 0;
	return top;
}

/* Sum of exp(logit - max), always in the same order. */
KVK_DEV double row_sum(struct sample_shared &sh, const struct sample_row &row)
{
	double sum = 0, all = 0;

	row_all(row, [&](u32, float v) { sum += (double)expf(v - row.max); });
	sum = dev_warp_sum(sum);
	__syncthreads();
	if (threadIdx.x % 32 == 0)
		sh.sum[threadIdx.x / 32] = sum;
	__syncthreads();
	for (u32 w = 0; w < SAMPLE_WARPS; w++)
		all += sh.sum[w];
	return all;
}

/* ---------------------------------------------------------------------------- whole sums
 */

/* Sum of @v over the CTA, in every thread. */
KVK_DEV u64 block_sum(struct sample_shared &sh, u64 v)
{
	u64 all = 0;

	v = dev_warp_sum(v);
	__syncthreads();
	if (threadIdx.x % 32 == 0)
		sh.part[threadIdx.x / 32] = v;
	__syncthreads();
	for (u32 w = 0; w < SAMPLE_WARPS; w++)
		all += sh.part[w];
	return all;
}

/* What a search adds up: the mass of kept tokens, or the number of those at the cut. */
KVK_DEV u64 search_value(const struct sample_row &row, u32 i, float logit, bool ties)
{
	u32 key = sample_key(logit);

	if (ties)
		return key == row.cut;
	if (key < row.cut || (key == row.cut && i > row.last))
		return 0;
	return mass_of(row, logit);
}

/* Smallest id whose values up to and with it exceed @target, by one warp. */
KVK_DEV u32 search_few(const struct sample_row &row, u32 from, u32 end, u64 target,
		       bool ties)
{
	const u32 i = from + threadIdx.x % 32;
	u64 v = i < end ? search_value(row, i, row.logits[i], ties) : 0;
	u32 over;

	for (u32 d = 1; d < 32; d <<= 1) {
		u64 w = __shfl_up_sync(~0u, v, d);

		if (threadIdx.x % 32 >= d)
			v += w;
	}
	over = __ballot_sync(~0u, v > target);
	return over ? from + (u32)__ffs((int)over) - 1 : end - 1;
}

/*
 * Smallest id whose values up to and with it exceed @target, which is smaller than their
 * sum. Each round a warp adds up one of 16 parts of what is left.
 */
KVK_DEV u32 row_search(struct sample_shared &sh, const struct sample_row &row, u64 target,
		       bool ties)
{
	const u32 warp = threadIdx.x / 32;
	u32 from = 0, end = row.vocab;

	while (end - from > 32) {
		const u32 step =
			((end - from + SAMPLE_WARPS - 1) / SAMPLE_WARPS + 3) & ~3u;
		const u32 first = min(from + warp * step, end),
			  last = min(first + step, end);
		u32 w = 0;
		u64 v = 0;

		row_each(row, first, last, threadIdx.x % 32, 32,
			 [&](u32 i, float x) { v += search_value(row, i, x, ties); });
		v = dev_warp_sum(v);
		__syncthreads();
		if (threadIdx.x % 32 == 0)
			sh.part[warp] = v;
		__syncthreads();
		while (w < SAMPLE_WARPS - 1 && sh.part[w] <= target)
			target -= sh.part[w++];
		from += w * step;
		end = min(from + step, end);
		if (from >= end) /* cannot be: the parts add up to more than target */
			return row.vocab - 1;
	}
	__syncthreads();
	if (threadIdx.x < 32) {
		u32 id = search_few(row, from, end, target, ties);

		if (threadIdx.x == 0)
			sh.found = id;
	}
	__syncthreads();
	return sh.found;
}

/* --------------------------------------------------------------------------------- top-p
 */

/* Mass of each digit at @shift, of keys whose bits in @above_mask are row.cut's. */
KVK_DEV void cut_digits(struct sample_shared &sh, const struct sample_row &row, u32 shift,
			u32 above_mask)
{
	u32 used = 0;

#pragma unroll
	for (u32 d = 0; d < DIGITS; d++)
		sh.mass[d][threadIdx.x] = 0;
	if (threadIdx.x == 0)
		sh.used = 0;
	row_all(row, [&](u32, float v) {
		const u32 key = sample_key(v), d = (key >> shift) & (DIGITS - 1);

		if ((key & above_mask) != (row.cut & above_mask))
			return;
		sh.mass[d][threadIdx.x] += mass_of(row, v);
		used |= 1u << d;
	});
	__syncthreads();
	if (used)
		atomicOr(&sh.used, used);
	if (threadIdx.x / 32 < DIGITS) {
		u64 v = 0;

		for (u32 i = threadIdx.x % 32; i < SAMPLE_THREADS; i += 32)
			v += sh.mass[threadIdx.x / 32][i];
		v = dev_warp_sum(v);
		if (threadIdx.x % 32 == 0)
			sh.digit[threadIdx.x / 32] = v;
	}
	__syncthreads();
}

/*
 * Find row.cut and row.last so that the kept tokens are the fewest whose mass is at least
 * @want. Return: their mass.
 */
KVK_DEV u64 row_cut(struct sample_shared &sh, struct sample_row &row, u64 want)
{
	u64 above = 0, one, nr = 0;
	u32 above_mask = 0;

	row.cut = 0;
	for (int shift = 30; shift >= 0; shift -= (int)DIGIT_BITS) {
		u32 chosen = DIGITS;

		cut_digits(sh, row, (u32)shift, above_mask);
		for (u32 d = DIGITS; d-- > 0;) {
			if (!(sh.used >> d & 1))
				continue;
			if (chosen < DIGITS)
				above += sh.digit[chosen];
			chosen = d;
			if (above + sh.digit[d] >= want)
				break;
		}
		row.cut |= chosen << shift;
		above_mask |= (DIGITS - 1) << shift;
		__syncthreads();
	}
	/* all tokens at the cut have the same mass; the smaller ids come first */
	row_all(row, [&](u32, float v) { nr += sample_key(v) == row.cut; });
	nr = block_sum(sh, nr);
	one = mass_of(row, sample_logit(row.cut));
	if (one && want > above)
		nr = min(nr, (want - above + one - 1) / one);
	else if (one)
		nr = 1;
	row.last = row_search(sh, row, nr - 1, true);
	return above + one * nr;
}

/* -------------------------------------------------------------------------------- kernel
 */

KVK_DEV u32 row_draw(struct sample_shared &sh, struct sample_row &row, float top_p,
		     u64 seed)
{
	u64 total = 0;

	row.cut = 0;
	row.last = row.vocab;
	row_all(row, [&](u32, float v) { total += mass_of(row, v); });
	total = block_sum(sh, total);
	if (top_p < 1.0f)
		total = row_cut(sh, row, (u64)ceil((double)top_p * (double)total));
	/* 53 bits of the seed, as a part of the whole */
	return row_search(sh, row, __umul64hi(seed >> 11 << 11, total), false);
}

__global__ void __launch_bounds__(SAMPLE_THREADS)
	sample_kernel(const __grid_constant__ struct sample_params p)
{
	DEV_SHARED(struct sample_shared, sh);
	const u32 r = blockIdx.x;
	struct sample_row row = {};
	double sum;
	bool bad;
	u32 id;

	row.logits = p.a.logits + (size_t)r * p.a.vocab;
	row.vocab = p.a.vocab;
	row.vec = p.vec;
	row.max = row_max(sh, row, &id, &bad);
	row.temperature = p.a.temperature[r];
	row.scale = sample_scale(row.temperature);
	row.unit = (float)(1ull << p.mass_bits);
	/* an infinite maximum leaves nothing to draw from */
	if (bad && !(p.off & SAMPLE_NO_NAN))
		id = 0;
	else if (row.temperature > 0 && kvk_absf(row.max) < INFINITY && p.a.top_p[r] > 0)
		id = row_draw(sh, row, p.a.top_p[r], p.a.seeds[r]);
	if (threadIdx.x == 0)
		p.a.ret_ids[r] = id;
	if (!p.a.ret_logprob)
		return;
	sum = row_sum(sh, row);
	if (threadIdx.x == 0)
		p.a.ret_logprob[r] = bad ? kvk_bits_f32(0x7fc00000u)
					 : (float)((double)row.logits[id] -
						   (double)row.max - log(sum));
}

int kvk_sample_cuda(const struct kvk_sample_args *a, kvk_stream stream)
{
	struct sample_params p = {};
	int r;

	if (!a->logits || !a->temperature || !a->top_p || !a->seeds || !a->ret_ids ||
	    !a->vocab)
		return -EINVAL;
	if (!a->nr_rows)
		return 0;
	p.a = *a;
	p.vec = a->vocab % 4 == 0 && dev_aligned(a->logits, 16);
	p.off = DEV_MUTANT(sample_nan) ? SAMPLE_NO_NAN : 0;
	/* the mass of a whole row fits into 62 bits */
	p.mass_bits = KV_MIN(MASS_BITS_MAX, 30u + (u32)__builtin_clz(a->vocab));
	r = kvk_sample_wide(&p, stream);
	if (r != -ENOSPC)
		return r;
	DEV_LAUNCH(sample_kernel, a->nr_rows, SAMPLE_THREADS, stream, p);
	return dev_launched();
}
