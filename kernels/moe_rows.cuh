/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_rows.cuh - sixteen rows of a matrix in its standard order times a few tokens.
 *
 * What linear.cu and moe_plain.cu share. A CTA of eight warps takes 16 rows; the warps
 * take blocks of 128 columns in turn and their sums are added in warp order, so that a
 * dot product's order follows from cols alone: the same bits for any number of tokens.
 * Weights go from memory to the A operand of mma.m16n8k16 without a stop in shared
 * memory: lane 4 g + t reads columns 8 t .. + 7 of a block of 32 for rows g and g + 8,
 * and x in the same order is B. BF16: columns 4 t .. + 3 of each half, so that a product takes
 * 16 columns that lie together, as wgmma does from shared memory (linear_mid.cu). Within those 16
 * their order does not matter, and both instructions give the same bits (measured on the H200,
 * 60 matrices of up to 80 binary orders of magnitude).
 *
 * Weights F32 and activations F32 are split in two bf16 (16 bits of mantissa); BF16, INT4
 * and E4M3 are exact. E4M3 rounds x to e4m3 per token and 128 columns first, as the
 * reference does.
 */
#ifndef KVK_MOE_ROWS_CUH
#define KVK_MOE_ROWS_CUH

#include "int4.h"
#include "kernels.h"
#include "moe_loads.h"
#include "moe_ptx.cuh"
#include "quant.cuh"

#define ROWS_WARPS 8u
#define ROWS_BLOCK 128u /* columns */

/* The warps' shares of 16 rows times 8 NT tokens */
template <int NT> using rows_red = float[ROWS_WARPS][4 * NT][32];

/* struct rows_w - two rows of a matrix as a lane sees them; rows that are not there are
 * somebody else's, their results are thrown away */
struct rows_w {
	const uint8_t *row[2];
	const uint8_t *scale[2]; /* INT4: row's scales; E4M3: f32 of the row's block */
	uint32_t cols;
	uint32_t group;
	uint32_t scale_f16;
};

/* A operand of 32 columns: [k16][register]; lo holds what bf16 leaves of F32 weights */
struct rows_a {
	uint32_t hi[2][4];
	uint32_t lo[2][4];
};

struct rows_b {
	uint32_t hi[4];
	uint32_t lo[4];
};

__device__ __forceinline__ void split_pair(float a, float b, uint32_t &hi, uint32_t &lo)
{
	hi = ptx_bf16x2(a, b);
	lo = ptx_bf16x2(a - __uint_as_float(hi << 16),
			b - __uint_as_float(hi & 0xffff0000u));
}

__device__ __forceinline__ uint32_t e4m3_pair(uint32_t two)
{
	return arch_e4m3_f16(two);
}

/* Where lane t's eight columns of 32 begin, and how far from the first its last four lie. */
template <uint32_t DTYPE> __device__ __forceinline__ uint32_t lane_col(void)
{
	return threadIdx.x % 4 * (DTYPE == KVK_BF16 ? 4 : 8);
}

template <uint32_t DTYPE> __device__ __forceinline__ uint32_t lane_far(void)
{
	return DTYPE == KVK_BF16 ? 16 : 4;
}

/* The lane's columns of a row, from k on; zero beyond the end (INT4's zero is 8). */
template <uint32_t DTYPE, bool FULL>
__device__ __forceinline__ void load_row(const struct rows_w &w, int r, uint32_t k,
					 uint4 (&v)[2])
{
	const uint8_t *p = w.row[r];

	if (DTYPE == KVK_BF16) {
		uint2 a = make_uint2(0, 0), b = a;

		if (FULL || k < w.cols)
			a = __ldcs((const uint2 *)(p + k * 2));
		if (FULL || k + 16 < w.cols)
			b = __ldcs((const uint2 *)(p + k * 2 + 32));
		v[0] = make_uint4(a.x, a.y, b.x, b.y);
	} else if (!FULL && k >= w.cols) {
		v[0] = v[1] = make_uint4(DTYPE == KVK_INT4 ? 0x88888888u : 0u, 0, 0, 0);
	} else if (DTYPE == KVK_F32) {
		v[0] = __ldcs((const uint4 *)(p + k * 4));
		v[1] = __ldcs((const uint4 *)(p + k * 4) + 1);
	} else if (DTYPE == KVK_E4M3) {
		uint2 a = __ldcs((const uint2 *)(p + k));

		v[0].x = a.x;
		v[0].y = a.y;
	} else {
		v[0].x = __ldcs((const uint32_t *)(p + k / 2));
	}
}

/* Eight weights of row @r to the lane's registers of the A operand. */
template <uint32_t DTYPE>
__device__ __forceinline__ void put_row(struct rows_a &a, int r, const uint4 (&v)[2])
{
	const uint32_t w[8] = {v[0].x, v[0].y, v[0].z, v[0].w,
			       v[1].x, v[1].y, v[1].z, v[1].w};

#pragma unroll
	for (int j = 0; j < 4; j++) {
		uint32_t &hi = a.hi[j / 2][j % 2 * 2 + r],
			 &lo = a.lo[j / 2][j % 2 * 2 + r];

		if (DTYPE == KVK_BF16) {
			hi = w[j];
		} else if (DTYPE == KVK_F32) {
			split_pair(__uint_as_float(w[2 * j]),
				   __uint_as_float(w[2 * j + 1]), hi, lo);
		} else if (DTYPE == KVK_E4M3) {
			hi = e4m3_pair(w[j / 2] >> (j % 2 * 16));
		} else {
			uint32_t two = w[0] >> (8 * j);

			hi = ptx_fma_bf16x2((two & 0xfu) | (two & 0xf0u) << 12 |
						    0x43004300u,
					    0x3f803f80u, 0xc308c308u);
		}
	}
}

/* Four activations of a token; zeros beyond the end. */
template <typename X>
__device__ __forceinline__ void load_x4(const X *x, uint32_t k, uint32_t cols, float *v)
{
	float4 a = make_float4(0, 0, 0, 0);

	if constexpr (sizeof(X) == 4) {
		if (k < cols)
			a = *(const float4 *)(x + k);
	} else if (k < cols) {
		uint2 b = *(const uint2 *)(x + k);

		a = make_float4(
			__uint_as_float(b.x << 16), __uint_as_float(b.x & 0xffff0000u),
			__uint_as_float(b.y << 16), __uint_as_float(b.y & 0xffff0000u));
	}
	v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
}

/* The lane's eight activations of a token, from @k on. */
template <uint32_t DTYPE, typename X>
__device__ __forceinline__ void load_x(const X *x, uint32_t k, uint32_t cols,
				       float (&v)[8])
{
	if constexpr (sizeof(X) == 4 || DTYPE == KVK_BF16) {
		load_x4(x, k, cols, v);
		load_x4(x, k + lane_far<DTYPE>(), cols, v + 4);
	} else if (k >= cols) {
#pragma unroll
		for (int i = 0; i < 8; i++)
			v[i] = 0.0f;
	} else {
		uint4 a = *(const uint4 *)(x + k);
		const uint32_t w[4] = {a.x, a.y, a.z, a.w};

#pragma unroll
		for (int i = 0; i < 4; i++) {
			v[2 * i] = __uint_as_float(w[i] << 16);
			v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
		}
	}
}

__device__ __forceinline__ uint32_t e4m3_two(float lo, float hi)
{
	return arch_e4m3_f16(arch_f32_e4m3(lo, hi));
}

/* struct rows_x - a token's activations; @scale: of codes (X is uint8_t), one per 128 */
template <typename X> struct rows_x {
	const X *x;
	const float *scale;
};

/* B operands of 128 columns that are e4m3 codes already. */
__device__ __forceinline__ void load_codes(const struct rows_x<uint8_t> &x, uint32_t k,
					   uint32_t cols, struct rows_b (&b)[4],
					   float &scale)
{
	const uint32_t t = threadIdx.x % 4;

	scale = x.scale[k / ROWS_BLOCK];
#pragma unroll
	for (int j = 0; j < 4; j++) {
		uint32_t at = k + j * 32 + t * 8;
		uint2 v = at < cols ? *(const uint2 *)(x.x + at) : make_uint2(0, 0);

		b[j].hi[0] = e4m3_pair(v.x);
		b[j].hi[1] = e4m3_pair(v.x >> 16);
		b[j].hi[2] = e4m3_pair(v.y);
		b[j].hi[3] = e4m3_pair(v.y >> 16);
	}
}

/* B operands of a token's 128 columns. E4M3: rounded, with their scale. */
template <uint32_t DTYPE, typename X>
__device__ __forceinline__ void load_b(const X *x, uint32_t k, uint32_t cols,
				       struct rows_b (&b)[4], float &scale)
{
	float v[4][8];
	uint32_t top = 0;

#pragma unroll
	for (int j = 0; j < 4; j++)
		load_x<DTYPE>(x, k + j * 32 + lane_col<DTYPE>(), cols, v[j]);
	scale = 1.0f;
	if (DTYPE == KVK_E4M3) {
#pragma unroll
		for (int i = 0; i < 32; i++) {
			uint32_t a = __float_as_uint(v[i / 8][i % 8]) & 0x7fffffffu;

			top = max(top, a > 0x7f800000u ? 0u : a);
		}
		top = max(top, __shfl_xor_sync(~0u, top, 1));
		top = max(top, __shfl_xor_sync(~0u, top, 2));
		scale = kvk_fp8_act_scale(__uint_as_float(top));
		const struct kvk_quant q = kvk_quant_make(scale);

#pragma unroll
		for (int j = 0; j < 4; j++)
			kvk_quant_div(v[j], q);
	}
#pragma unroll
	for (int i = 0; i < 16; i++) {
		float lo = v[i / 4][i % 4 * 2], hi = v[i / 4][i % 4 * 2 + 1];
		struct rows_b &d = b[i / 4];

		if (DTYPE == KVK_E4M3)
			d.hi[i % 4] = e4m3_two(lo, hi);
		else if (sizeof(X) == 4)
			split_pair(lo, hi, d.hi[i % 4], d.lo[i % 4]);
		else
			d.hi[i % 4] = ptx_bf16x2(lo, hi);
	}
}

template <uint32_t DTYPE, bool X32>
__device__ __forceinline__ void rows_mma(float (&c)[4], const struct rows_a &a,
					 const struct rows_b &b)
{
#pragma unroll
	for (int i = 0; i < 2; i++) {
		if constexpr (DTYPE == KVK_E4M3) {
			ptx_mma_f16(c, a.hi[i], b.hi[2 * i], b.hi[2 * i + 1], c);
		} else {
			ptx_mma_bf16(c, a.hi[i], b.hi[2 * i], b.hi[2 * i + 1], c);
			if (X32)
				ptx_mma_bf16(c, a.hi[i], b.lo[2 * i], b.lo[2 * i + 1], c);
			if (DTYPE == KVK_F32)
				ptx_mma_bf16(c, a.lo[i], b.hi[2 * i], b.hi[2 * i + 1], c);
		}
	}
}

/* acc += scales * sum of 32 (INT4) or 128 (E4M3) columns from @k on. @xs: scale of token
 * g. */
template <uint32_t DTYPE>
__device__ __forceinline__ void rows_scale(float (&acc)[4], const float (&c)[4],
					   const struct rows_w &w, uint32_t k, float xs)
{
	const uint32_t t = threadIdx.x % 4;
	float s[2] = {}, x0 = 1.0f, x1 = 1.0f;

#pragma unroll
	for (int r = 0; r < 2; r++) {
		if (k >= w.cols)
			continue;
		if (DTYPE == KVK_E4M3)
			s[r] = ((const float *)w.scale[r])[k / ROWS_BLOCK];
		else
			s[r] = kvk_scale16_to_f32(
				((const uint16_t *)w.scale[r])[k / w.group], w.scale_f16);
	}
	if (DTYPE == KVK_E4M3) {
		x0 = __shfl_sync(~0u, xs, 8 * t);
		x1 = __shfl_sync(~0u, xs, 8 * t + 4);
	}
	acc[0] += s[0] * x0 * c[0];
	acc[1] += s[0] * x1 * c[1];
	acc[2] += s[1] * x0 * c[2];
	acc[3] += s[1] * x1 * c[3];
}

/* Columns k .. k + 127 of 16 rows, as loaded, times 8 NT tokens. */
template <uint32_t DTYPE, typename X, int NT>
__device__ __forceinline__ void rows_block(float (&acc)[NT][4], const struct rows_w &w,
					   const struct rows_x<X> (&x)[NT],
					   const uint4 (&raw)[4][2][2], uint32_t k)
{
	constexpr bool X32 = sizeof(X) == 4;

#pragma unroll
	for (int nt = 0; nt < NT; nt++) {
		struct rows_b b[4];
		float c[4] = {}, xs;

		if constexpr (sizeof(X) == 1)
			load_codes(x[nt], k, w.cols, b, xs);
		else
			load_b<DTYPE>(x[nt].x, k, w.cols, b, xs);
#pragma unroll
		for (int j = 0; j < 4; j++) {
			struct rows_a a;

			put_row<DTYPE>(a, 0, raw[j][0]);
			put_row<DTYPE>(a, 1, raw[j][1]);
			if (DTYPE == KVK_INT4) {
				float one[4] = {};

				rows_mma<DTYPE, X32>(one, a, b[j]);
				rows_scale<DTYPE>(acc[nt], one, w, k + j * 32, xs);
			} else if (DTYPE == KVK_E4M3) {
				rows_mma<DTYPE, false>(c, a, b[j]);
			} else {
				rows_mma<DTYPE, X32>(acc[nt], a, b[j]);
			}
		}
		if (DTYPE == KVK_E4M3)
			rows_scale<DTYPE>(acc[nt], c, w, k, xs);
	}
}

/* The same, or (moe_loads.h) no more than that what was loaded is there. */
template <uint32_t DTYPE, typename X, int NT>
__device__ __forceinline__ void rows_use(float (&acc)[NT][4], const struct rows_w &w,
					 const struct rows_x<X> (&x)[NT],
					 const uint4 (&raw)[4][2][2], uint32_t k)
{
	if constexpr (MOE_LOADS_ONLY) {
		uint32_t all = 0;

#pragma unroll
		for (int j = 0; j < 8; j++)
			all ^= raw[j / 2][j % 2][0].x ^ raw[j / 2][j % 2][0].y;
		if (all == 0x9e3779b9u) /* nobody may leave the loads out */
			acc[0][0] += 1.0f;
	} else {
		rows_block<DTYPE, X, NT>(acc, w, x, raw, k);
	}
}

/* The warp's share of 16 rows x 8 NT tokens. @x: token g of each n tile. DEEP blocks are
 * under way at once. */
template <uint32_t DTYPE, typename X, int NT>
__device__ __forceinline__ void rows_dot(float (&acc)[NT][4], const struct rows_w &w,
					 const struct rows_x<X> (&x)[NT])
{
	constexpr int DEEP = DTYPE == KVK_F32 || NT > 2 ? 1 : 2;
	constexpr uint32_t STEP = ROWS_WARPS * ROWS_BLOCK;
	const uint32_t col = lane_col<DTYPE>();
	uint32_t k = threadIdx.x / 32 * ROWS_BLOCK;

#pragma unroll
	for (int i = 0; i < 4 * NT; i++)
		acc[i / 4][i % 4] = 0.0f;
	for (; k + (DEEP - 1) * STEP + ROWS_BLOCK <= w.cols; k += DEEP * STEP) {
		uint4 raw[DEEP][4][2][2];

#pragma unroll
		for (int j = 0; j < 8 * DEEP; j++)
			load_row<DTYPE, true>(w, j % 2,
					      k + j / 8 * STEP + j / 2 % 4 * 32 + col,
					      raw[j / 8][j / 2 % 4][j % 2]);
#pragma unroll
		for (int d = 0; d < DEEP; d++)
			rows_use<DTYPE, X, NT>(acc, w, x, raw[d], k + d * STEP);
	}
	for (; k < w.cols; k += STEP) {
		uint4 raw[4][2][2];

#pragma unroll
		for (int j = 0; j < 8; j++)
			load_row<DTYPE, false>(w, j % 2, k + j / 2 * 32 + col,
					       raw[j / 2][j % 2]);
		rows_use<DTYPE, X, NT>(acc, w, x, raw, k);
	}
}

/* Add the warps' shares in warp order; warp w keeps fragments w, w + 8, ... of 4 NT. The
 * result of fragment i goes to out[i]; others are left alone. */
template <int NT>
__device__ __forceinline__ void rows_reduce(float (&acc)[NT][4],
					    float (&red)[ROWS_WARPS][4 * NT][32])
{
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
	for (int i = 0; i < 4 * NT; i++)
		red[warp][i][lane] = acc[i / 4][i % 4];
	__syncthreads();
#pragma unroll
	for (int i = 0; i < 4 * NT; i++) {
		float sum = 0.0f;

		for (uint32_t w = 0; w < ROWS_WARPS; w++)
			sum += red[w][i][lane];
		acc[i / 4][i % 4] = sum;
	}
	__syncthreads();
}

#endif /* KVK_MOE_ROWS_CUH */
