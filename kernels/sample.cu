/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample.cu - next token of each row: greedy, temperature, top-p. One CTA per row.
 *
 * Masses are 40-bit fixed point: integer sums are the same in any order, so the draw is a
 * function of logits and seed alone although threads add in parallel. As in sample_ref.c,
 * top-p's cut is found byte by byte of an order-preserving key, and the draw walks the kept
 * tokens by id (each thread a run of ids).
 */
#include <errno.h>
#include "fp8.h"
#include "moe_cuda.h"
#include "moe_ptx.cuh"

#define SAMPLE_THREADS 1024u

typedef unsigned long long u64;

struct sample_shared {
	u64 hist[256];
	u64 part[32];
	double dpart[32];
	u64 want, above, total, cut_mass;
	uint32_t cut, nr_cut, id, bad;
};

struct sample_row {
	const float *logits;
	uint32_t vocab;
	float max;
	float temperature;
};

__device__ __forceinline__ uint32_t sample_key(float x)
{
	uint32_t b = __float_as_uint(x);

	return b & 0x80000000u ? ~b : b | 0x80000000u;
}

__device__ __forceinline__ u64 sample_mass(const struct sample_row &r, uint32_t i)
{
	return (u64)(expf((r.logits[i] - r.max) / r.temperature) * 0x1p40f);
}

/* Sum over the CTA; the same value for all threads. */
__device__ __forceinline__ u64 sum_u64(struct sample_shared &sh, u64 v)
{
	u64 sum = 0;

	for (int i = 16; i; i /= 2)
		v += __shfl_xor_sync(~0u, v, i);
	__syncthreads();
	if (threadIdx.x % 32 == 0)
		sh.part[threadIdx.x / 32] = v;
	__syncthreads();
	for (int w = 0; w < 32; w++)
		sum += sh.part[w];
	return sum;
}

/* Sum of the threads before this one. */
__device__ __forceinline__ u64 scan_u64(struct sample_shared &sh, u64 v)
{
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	u64 sum = v;

	for (uint32_t i = 1; i < 32; i *= 2) {
		u64 o = __shfl_up_sync(~0u, sum, i);

		sum += lane >= i ? o : 0;
	}
	__syncthreads();
	if (lane == 31)
		sh.part[warp] = sum;
	__syncthreads();
	sum -= v;
	for (uint32_t w = 0; w < warp; w++)
		sum += sh.part[w];
	return sum;
}

/* Largest logit, smallest id among equals; NaN seen. */
__device__ __forceinline__ void sample_top(struct sample_shared &sh,
					   const struct sample_row &r)
{
	u64 best = 0;
	uint32_t bad = 0;

	if (threadIdx.x == 0)
		sh.bad = 0;
	for (uint32_t i = threadIdx.x; i < r.vocab; i += SAMPLE_THREADS) {
		float v = r.logits[i];
		u64 k = (u64)sample_key(v == 0.0f ? 0.0f : v) << 32 | (uint32_t)~i;

		bad |= isnan(v);
		best = k > best ? k : best;
	}
	for (int i = 16; i; i /= 2) {
		u64 o = __shfl_xor_sync(~0u, best, i);

		best = o > best ? o : best;
	}
	__syncthreads();
	if (threadIdx.x % 32 == 0)
		sh.part[threadIdx.x / 32] = best;
	if (bad)
		sh.bad = 1;
	__syncthreads();
	for (int w = 0; w < 32; w++)
		best = sh.part[w] > best ? sh.part[w] : best;
	if (threadIdx.x == 0)
		sh.id = sh.bad ? 0 : ~(uint32_t)best;
	__syncthreads();
}

/* The key of the least likely kept token and how many tokens with that key are kept. */
__device__ __forceinline__ void sample_cut(struct sample_shared &sh,
					   const struct sample_row &r)
{
	uint32_t nr = 0;

	for (int shift = 24; shift >= 0; shift -= 8) {
		if (threadIdx.x < 256)
			sh.hist[threadIdx.x] = 0;
		__syncthreads();
		for (uint32_t i = threadIdx.x; i < r.vocab; i += SAMPLE_THREADS) {
			uint32_t key = sample_key(r.logits[i]);

			if (shift == 24 || key >> (shift + 8) == sh.cut)
				atomicAdd(&sh.hist[key >> shift & 255],
					  sample_mass(r, i));
		}
		__syncthreads();
		if (threadIdx.x == 0) {
			uint32_t chosen = 256;

			for (uint32_t b = 256; b-- > 0;) {
				if (!sh.hist[b])
					continue;
				if (chosen < 256)
					sh.above += sh.hist[chosen];
				chosen = b;
				if (sh.above + sh.hist[b] >= sh.want)
					break;
			}
			sh.cut = shift == 24 ? chosen : sh.cut << 8 | chosen;
		}
		__syncthreads();
	}
	for (uint32_t i = threadIdx.x; i < r.vocab; i += SAMPLE_THREADS)
		if (sample_key(r.logits[i]) == sh.cut) {
			sh.cut_mass = sample_mass(r, i); /* the same for all of them */
			nr++;
		}
	nr = (uint32_t)sum_u64(sh, nr);
	if (threadIdx.x == 0) {
		u64 need = sh.want > sh.above ? sh.want - sh.above : 1;

		need = (need + sh.cut_mass - 1) / sh.cut_mass;
		sh.nr_cut = need < nr ? (uint32_t)need : nr;
		sh.total = sh.above + sh.cut_mass * sh.nr_cut;
	}
	__syncthreads();
}

/* Walk the kept tokens by id until the mass passes @target. */
__device__ __forceinline__ void sample_walk(struct sample_shared &sh,
					    const struct sample_row &r, u64 target)
{
	const uint32_t run = (r.vocab + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
	const uint32_t from = min(threadIdx.x * run, r.vocab),
		       to = min(from + run, r.vocab);
	uint32_t at_cut = 0, before_cut;
	u64 mass = 0, before;

	for (uint32_t i = from; i < to; i++)
		at_cut += sample_key(r.logits[i]) == sh.cut;
	before_cut = (uint32_t)scan_u64(sh, at_cut);
	for (int pass = 0; pass < 2; pass++) {
		uint32_t left = before_cut < sh.nr_cut ? sh.nr_cut - before_cut : 0;
		u64 sum = 0;

		if (pass && (target < before || target >= before + mass))
			return;
		for (uint32_t i = from; i < to; i++) {
			uint32_t key = sample_key(r.logits[i]);

			if (key < sh.cut || (key == sh.cut && !left))
				continue;
			left -= key == sh.cut;
			sum += sample_mass(r, i);
			if (pass && before + sum > target) {
				sh.id = i;
				return;
			}
		}
		if (pass)
			return;
		mass = sum;
		before = scan_u64(sh, mass);
	}
}

__device__ __forceinline__ void sample_draw(struct sample_shared &sh,
					    const struct sample_row &r, float top_p,
					    uint64_t seed)
{
	u64 total = 0, target;

	for (uint32_t i = threadIdx.x; i < r.vocab; i += SAMPLE_THREADS)
		total += sample_mass(r, i);
	total = sum_u64(sh, total);
	if (threadIdx.x == 0) {
		sh.total = total;
		sh.cut = 0;
		sh.nr_cut = ~0u;
		sh.above = 0;
		sh.want = (u64)((double)top_p * (double)total);
	}
	__syncthreads();
	if (top_p < 1.0f)
		sample_cut(sh, r);
	target = (u64)((double)(seed >> 11) * 0x1p-53 * (double)sh.total);
	sample_walk(sh, r, target < sh.total ? target : sh.total - 1);
}

__device__ __forceinline__ float sample_logprob(struct sample_shared &sh,
						const struct sample_row &r)
{
	double v = 0.0, sum = 0.0;

	for (uint32_t i = threadIdx.x; i < r.vocab; i += SAMPLE_THREADS)
		v += (double)expf(r.logits[i] - r.max);
	for (int i = 16; i; i /= 2)
		v += __shfl_xor_sync(~0u, v, i);
	if (threadIdx.x % 32 == 0)
		sh.dpart[threadIdx.x / 32] = v;
	__syncthreads();
	for (int w = 0; w < 32; w++)
		sum += sh.dpart[w];
	return sh.bad ? __uint_as_float(0x7fc00000u)
		      : (float)((double)r.logits[sh.id] - r.max - log(sum));
}

__global__ void __launch_bounds__(SAMPLE_THREADS)
	sample_kernel(const struct kvk_sample_args a)
{
	__shared__ struct sample_shared sh;
	const uint32_t row = blockIdx.x;
	struct sample_row r = {a.logits + (uint64_t)row * a.vocab, a.vocab, 0.0f, 0.0f};

	ptx_grid_launch();
	ptx_grid_wait();
	r.temperature = a.temperature[row];
	sample_top(sh, r);
	r.max = r.logits[sh.id];
	/* an infinite maximum leaves nothing to draw from */
	if (!sh.bad && r.temperature > 0.0f && isfinite(r.max) && a.top_p[row] > 0.0f)
		sample_draw(sh, r, a.top_p[row], a.seeds[row]);
	__syncthreads();
	if (threadIdx.x == 0)
		a.ret_ids[row] = sh.id;
	if (!a.ret_logprob)
		return;
	float lp = sample_logprob(sh, r);

	if (threadIdx.x == 0)
		a.ret_logprob[row] = lp;
}

int kvk_sample_cuda(const struct kvk_sample_args *a, kvk_stream stream)
{
	if (!a->logits || !a->temperature || !a->top_p || !a->seeds || !a->ret_ids ||
	    !a->vocab)
		return -EINVAL;
	if (!a->nr_rows)
		return 0;
	sample_kernel<<<a->nr_rows, SAMPLE_THREADS, 0, (cudaStream_t)stream>>>(*a);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}
