/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_chunk.cu - the routed E4M3 experts of a prefill chunk, in their standard order.
 *
 * After the plan: round x, first product with SwiGLU and the rounding of h, second product,
 * sum. Rounding gives each slot its row, in the plan's order, as e4m3 codes with a scale
 * per 128 columns, in the layout that moe_fp8_chunk.cuh copies to shared memory as it is:
 *
 *	[128 columns][row][128 bytes], 16-byte piece c of the r-th row of a tile at c ^ (r & 7)
 *
 * A slot's result is kept as bf16: its rounding is a tenth of what rounding x to e4m3 costs,
 * and f32 would take as long to write and read as a tenth of the products.
 */
#include "moe_fp8_chunk.cuh"
#include "moe_fp8_wide.h"
#include "moe_start.cuh"

#define PACK_THREADS 128u
#define TOP_K_MAX    32u

/* The largest |value| of eight bf16, NaN left out; and the values. */
__device__ __forceinline__ uint32_t chunk_open(const uint4 &raw, float *v)
{
	const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
	uint32_t top = 0;

#pragma unroll
	for (int e = 0; e < 8; e++) {
		const uint32_t m = e % 2 ? w[e / 2] & 0x7fff0000u : w[e / 2] << 17 >> 1;

		v[e] = __uint_as_float(e % 2 ? w[e / 2] & 0xffff0000u : w[e / 2] << 16);
		top = max(top, m > 0x7f800000u ? 0u : m);
	}
	return top;
}

/* Sixteen columns' codes and, from eight lanes' 128 columns, their scale. */
__device__ __forceinline__ uint4 chunk_round(const uint4 &lo, const uint4 &hi,
					     float *ret_scale)
{
	uint32_t top, codes[4];
	struct kvk_quant q;
	float v[2][8];

	top = max(chunk_open(lo, v[0]), chunk_open(hi, v[1]));
#pragma unroll
	for (int o = 1; o < 8; o *= 2)
		top = max(top, __shfl_xor_sync(~0u, top, o));
	*ret_scale = kvk_fp8_act_scale(__uint_as_float(top));
	q = kvk_quant_make(*ret_scale);
#pragma unroll
	for (int i = 0; i < 4; i++) {
		float *p = &v[i / 2][i % 2 * 4];
		float four[4] = {p[0], p[1], p[2], p[3]};

		kvk_quant_div(four, q);
		codes[i] = arch_f32_e4m3(four[0], four[1]) |
			   arch_f32_e4m3(four[2], four[3]) << 16;
	}
	return make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

/* A token's row goes to each of its slots' places; a lane has 16 columns of it at a time.
 * grid: (tokens) */
__global__ void __launch_bounds__(PACK_THREADS)
	chunk_pack(const __grid_constant__ struct moe_chunk a)
{
	const uint4 *x = (const uint4 *)(a.x + (uint64_t)blockIdx.x * a.hidden);
	const uint64_t panel = (uint64_t)a.nr_slots * 128u;
	using places = uint32_t[TOP_K_MAX];
	MOE_SHARED(places, place);

	ptx_grid_launch();
	ptx_grid_wait();
	if (threadIdx.x < a.top_k)
		place[threadIdx.x] = __ldcg(&a.place[blockIdx.x * a.top_k + threadIdx.x]);
	__syncthreads();
	for (uint32_t i = threadIdx.x; i < (a.hidden / 16 + 31) / 32 * 32;
	     i += PACK_THREADS) {
		const bool there = i < a.hidden / 16;
		const uint4 zero = make_uint4(0, 0, 0, 0);
		float scale;
		const uint4 codes =
			chunk_round(there ? __ldg(x + 2 * i) : zero,
				    there ? __ldg(x + 2 * i + 1) : zero, &scale);

		for (uint32_t j = 0; j < a.top_k && there; j++) {
			const uint32_t pos = place[j] & ((1u << MOE_PLACE_ROW) - 1);
			const uint32_t row = place[j] >> MOE_PLACE_ROW;

			*(uint4 *)(a.x_codes + i / 8 * panel + pos * 128ull +
				   ((i ^ row) & 7) * 16) = codes;
			if (i % 8 == 0)
				a.x_scales[(uint64_t)(i / 8) * a.nr_slots + pos] = scale;
		}
	}
}

/* s += w * eight bf16 */
__device__ __forceinline__ void chunk_add(float (&s)[8], float w, const uint4 &v)
{
	const uint32_t p[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
	for (int i = 0; i < 4; i++) {
		s[2 * i] += w * __uint_as_float(p[i] << 16);
		s[2 * i + 1] += w * __uint_as_float(p[i] & 0xffff0000u);
	}
}

/* y of eight columns of a token. A slot whose id is out of range makes its token NaN. grid:
 * (hidden / 2048, tokens) */
__global__ void __launch_bounds__(256)
	chunk_sum(const __grid_constant__ struct moe_chunk a)
{
	const uint32_t col = (blockIdx.x * 256 + threadIdx.x) * 8;
	const uint64_t tok = blockIdx.y;
	float s[8] = {};

	ptx_grid_launch();
	ptx_grid_wait();
	if (col >= a.hidden)
		return;
#pragma unroll 8
	for (uint32_t j = 0; j < a.top_k; j++) {
		const uint64_t slot = tok * a.top_k + j;
		const float w = __ldcg(&a.ids[slot]) < a.nr_experts
					? __ldcg(&a.weights[slot])
					: __uint_as_float(0x7fc00000u);

		chunk_add(s, w, __ldcg((const uint4 *)(a.out + slot * a.hidden + col)));
	}
	moe_y_put(a.y, tok * a.hidden + col, s);
}

static int chunk_product(const struct moe_chunk *a, const struct kvk_experts *e,
			 bool second, void *stream)
{
	struct fc_args k = {};
	int r;

	k.c = *a;
	k.scales = (const float *)(second ? e->s2 : e->s13);
	k.rows = second ? e->hidden : e->inter;
	k.cols = second ? e->inter : e->hidden;
	r = moe_fp8_map(&k.map, second ? e->w2 : e->w13,
			(uint64_t)e->nr_experts * k.rows * (second ? 1 : 2), k.cols);
	if (r)
		return r;
	return moe_start(second ? fc_kernel<true> : fc_kernel<false>, dim3(moe_sms()),
			 FC_THREADS, FC_DYNAMIC, &k, stream);
}

int moe_chunk_launch(const struct moe_chunk *a, const struct kvk_experts *e, void *stream)
{
	const dim3 sums((a->hidden + 2047) / 2048, a->nr_tokens);
	int r = moe_start(chunk_pack, dim3(a->nr_tokens), PACK_THREADS, 0, a, stream);

	if (!r)
		r = chunk_product(a, e, false, stream);
	if (!r)
		r = chunk_product(a, e, true, stream);
	return r ? r : moe_start(chunk_sum, sums, 256, 0, a, stream);
}
