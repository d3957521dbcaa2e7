/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_moe_ref.cuh - float64 on the dequantised weights of a layer of experts: the device's half of
 * kernels_moe_check.cu. tests/emul/hopper runs it on the CPU against the host references.
 */
#ifndef KVB_KERNELS_MOE_REF_CUH
#define KVB_KERNELS_MOE_REF_CUH

#include "kernels_moe.h"
#include "kernels/fp8.h"
#include "kernels/moe_pack.h"

/* Weights of columns 8 @c8 .. + 7 of an expert: row @row of W2, or of its gate or up rows (@half) */
__device__ __forceinline__ void ref_word(const struct kvb_moe &d, bool second,
					 uint32_t expert, uint32_t row, uint32_t half,
					 uint32_t c8, double (&w)[8])
{
	const struct kvk_pack p =
		second ? kvk_pack_make(d.e.hidden, d.e.inter, d.e.group, 0)
		       : kvk_pack_make(2 * d.e.inter, d.e.hidden, d.e.group, 1);
	const uint32_t m = row / (second ? 32 : 16);
	const uint32_t r = second ? row % 32 : row % 16 / 8 * 16 + half * 8 + row % 8;
	const uint8_t *brick = (second ? d.w2 : d.w13) + expert * kvk_pack_bytes(&p) +
			       kvk_pack_brick(&p, m, c8 / 16);
	const uint32_t v =
		kvk_unpack_word(((const uint32_t *)brick)[kvk_brick_word(r, c8 % 16)]);
	const uint16_t s =
		((const uint16_t *)(brick + KVK_BRICK_NIBBLES))[kvk_brick_scale(
			&p, r, c8 % 16 * 8 / p.group)];
	const double scale = (double)kvk_bf16_to_f32(s);

	for (uint32_t i = 0; i < 8; i++)
		w[i] = kvk_int4_get(v, i) * scale;
}

/* The same of E4M3 with a scale per 128 x 128. */
__device__ __forceinline__ void ref_codes(const struct kvb_moe &d, bool second,
					  uint32_t expert, uint32_t row, uint32_t half,
					  uint32_t c8, double (&w)[8])
{
	const uint32_t rows = second ? d.e.hidden : d.e.inter,
		       cols = second ? d.e.inter : d.e.hidden;
	const uint64_t matrix = second ? expert : expert * 2ull + half;
	const uint8_t *code =
		(second ? d.w2 : d.w13) + (matrix * rows + row) * cols + c8 * 8;
	const uint64_t block = matrix * kvk_fp8_blocks(rows) + row / KVK_FP8_BLOCK;
	const double scale = ((
		const float *)(second ? d.e.s2 : d.e.s13))[block * kvk_fp8_blocks(cols) +
							   c8 * 8 / KVK_FP8_BLOCK];

	for (uint32_t i = 0; i < 8; i++)
		w[i] = kvk_e4m3_decode(code[i]) * scale;
}

__device__ __forceinline__ void ref_row(const struct kvb_moe &d, bool second,
					uint32_t expert, uint32_t row, uint32_t half,
					uint32_t c8, double (&w)[8])
{
	if (d.e.dtype == KVK_E4M3)
		ref_codes(d, second, expert, row, half, c8, w);
	else
		ref_word(d, second, expert, row, half, c8, w);
}

__device__ __forceinline__ double warp_sum(double v)
{
	for (int i = 16; i; i /= 2)
		v += __shfl_xor_sync(~0u, v, i);
	return v;
}

/* h[sampled slot][j]; one warp per value */
__global__ void ref_first(const __grid_constant__ struct kvb_moe d)
{
	const uint32_t j = blockIdx.x * 8 + threadIdx.x / 32, s = blockIdx.y;
	const uint32_t tok = d.sample[s / d.top_k],
		       id = d.ids[(size_t)tok * d.top_k + s % d.top_k];
	double gate = 0, up = 0;

	for (uint32_t c8 = threadIdx.x % 32; c8 < d.e.hidden / 8; c8 += 32) {
		double g[8], u[8];

		ref_row(d, false, id, j, 0, c8, g);
		ref_row(d, false, id, j, 1, c8, u);
		for (uint32_t i = 0; i < 8; i++) {
			double x = kvk_bf16_to_f32(
				d.x[(size_t)tok * d.e.hidden + c8 * 8 + i]);

			gate += g[i] * x;
			up += u[i] * x;
		}
	}
	gate = warp_sum(gate);
	up = warp_sum(up);
	if (threadIdx.x % 32 == 0)
		d.h[(size_t)s * d.e.inter + j] = gate / (1.0 + exp(-gate)) * up;
}

/* y of a sampled token; one warp per value */
__global__ void ref_second(const __grid_constant__ struct kvb_moe d)
{
	const uint32_t row = blockIdx.x * 8 + threadIdx.x / 32,
		       tok = d.sample[blockIdx.y];
	double y = 0;

	for (uint32_t k = 0; k < d.top_k; k++) {
		const size_t slot = (size_t)tok * d.top_k + k;
		const double *h = d.h + (size_t)(blockIdx.y * d.top_k + k) * d.e.inter;
		double sum = 0;

		for (uint32_t c8 = threadIdx.x % 32; c8 < d.e.inter / 8; c8 += 32) {
			double w[8];

			ref_row(d, true, d.ids[slot], row, 0, c8, w);
			for (uint32_t i = 0; i < 8; i++)
				sum += w[i] * h[c8 * 8 + i];
		}
		y += d.weights[slot] * sum;
	}
	y = warp_sum(y);
	if (threadIdx.x % 32 == 0)
		d.ref[(size_t)blockIdx.y * d.e.hidden + row] = y;
}

#endif /* KVB_KERNELS_MOE_REF_CUH */
