/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_wide_store.cuh - what a warp of moe_int4_wide.cuh does with a unit's sums: h, or a
 * slot's results, to memory.
 *
 * A warp has 32 packed rows of up to N tokens, and shares nothing with others: it turns eight
 * tokens at a time over in memory of its own, so that a token's values are stored together. Both
 * are f16, with a power of two for the 16 columns of h that a warp has of a token, or for all that a
 * warp has of a unit's results: h of each token was brought near 2^14, so these are alike.
 */
#ifndef KVK_MOE_INT4_WIDE_STORE_CUH
#define KVK_MOE_INT4_WIDE_STORE_CUH

#include "moe_int4_wide.h"
#include "moe_ptx.cuh"

#define WIDE_TURN 1024u /* where a warp turns its results over: two times 512 bytes */

/* The warp's share of where results are turned over: before the ring. */
__device__ __forceinline__ uint8_t *wide_turn(void)
{
	MOE_DYNAMIC(dynamic);

	return dynamic + (-ptx_smem(dynamic) & 1023u) + threadIdx.x / 32 * WIDE_TURN;
}

__device__ __forceinline__ uint32_t wide_top(float v0, float v1)
{
	return max(__float_as_uint(v0) & 0x7fffffffu, __float_as_uint(v1) & 0x7fffffffu);
}

/* Powers of two for the values of two tokens that eight lanes g have, whose largest of a lane
 * is given. Exponents alone matter, so both go in one word. */
__device__ __forceinline__ void wide_round(uint32_t top0, uint32_t top1, float (&f)[2])
{
	uint32_t both = (top1 & 0xffff0000u) | top0 >> 16;

#pragma unroll
	for (int o = 4; o < 32; o *= 2)
		both = ptx_max_u16x2(both, __shfl_xor_sync(~0u, both, o));
	f[0] = moe_wide_scale(both << 16);
	f[1] = moe_wide_scale(both & 0xffff0000u);
}

/* That of token number @token of eight. */
__device__ __forceinline__ float wide_round_of(const float (&f)[2], uint32_t token)
{
	const float even = __shfl_sync(~0u, f[0], token / 2);
	const float odd = __shfl_sync(~0u, f[1], token / 2);

	return token % 2 ? odd : even;
}

/* struct wide_names - of 32 tokens of a tile, a lane one: what its sums are multiplied with,
 * and its slot. Asked for long before they are used: they come from L2. */
struct wide_names {
	float back;
	uint32_t slot;
};

template <bool SECOND, bool GATHER>
__device__ __forceinline__ void wide_name(const struct moe_wide &a, uint2 tile,
					  uint32_t first, struct wide_names &names)
{
	const uint32_t token = first + threadIdx.x % 32;

	names.back = 0.0f;
	names.slot = 0;
	if (token >= tile.x >> 16)
		return;
	if (SECOND || GATHER)
		names.slot = __ldcg(&a.list[tile.y + token]);
	if (GATHER)
		names.back = __ldcg(&a.x_back[names.slot / a.top_k]);
	else
		names.back = __ldcg((SECOND ? a.h_back : a.x_back) + tile.y + token);
}

/* h of the warp's 16 columns, 8 tokens at a time, as f16 of a power of two; through the
 * warp's own memory, so that a token's columns are stored together. Piece q of a token is at
 * q ^ token / 4. */
template <int N>
__device__ __forceinline__ void wide_store_h(const struct moe_wide &a,
					     const float (&acc)[2][N / 2], uint2 tile,
					     uint32_t mtile, struct wide_names first)
{
	const uint32_t lane = threadIdx.x % 32, n = tile.x >> 16, token = lane % 16 / 2;
	const uint8_t *turn = wide_turn();
	struct wide_names all[2] = {first};

#pragma unroll
	for (uint32_t c = 0; c < N / 8; c++) {
		const uint8_t *mine = turn + c % 2 * 512;
		const uint64_t pos = tile.y + c * 8 + token;
		float v[2][2], f[2];

		if (c * 8 >= n)
			continue;
		if (c % 4 == 0 && c + 4 < N / 8)
			wide_name<false, false>(a, tile, c * 8 + 32,
						all[(c / 4 + 1) % 2]);
#pragma unroll
		for (uint32_t e = 0; e < 2; e++) {
			const float b = __shfl_sync(~0u, all[c / 4 % 2].back,
						    c % 4 * 8 + lane % 4 * 2 + e);

#pragma unroll
			for (uint32_t i = 0; i < 2; i++) {
				const float gate = acc[i][c * 4 + e] * b;

				v[i][e] = __fdividef(gate, 1.0f + __expf(-gate)) *
					  (acc[i][c * 4 + 2 + e] * b);
			}
		}
		wide_round(wide_top(v[0][0], v[1][0]), wide_top(v[0][1], v[1][1]), f);
		ptx_stmatrix2_turned(ptx_smem(mine) + lane % 8 * 32 +
					     ((lane / 8 ^ lane % 8 / 4) & 1) * 16,
				     ptx_f16x2(v[0][0] * f[0], v[0][1] * f[1]),
				     ptx_f16x2(v[1][0] * f[0], v[1][1] * f[1]));
		const float inverse = moe_wide_inverse(wide_round_of(f, token));

		__syncwarp();
		if (lane >= 16 || c * 8 + token >= n)
			continue;
		*(uint4 *)(a.h_f16 + pos * a.inter + mtile * 16 + lane % 2 * 8) = *(
			const uint4 *)(mine + token * 32 + ((lane ^ token / 4) & 1) * 16);
		if (lane % 2 == 0)
			a.h_scale[pos * (a.inter / 16) + mtile] = inverse;
	}
}

/* Bits of the largest |value| of the warp's 32 rows and @n tokens. Columns without a token hold
 * anything. NaN does not count; nor Inf, but only where @finite asks: it takes one more instruction
 * a value. */
template <int N>
__device__ __forceinline__ uint32_t wide_largest(const float (&acc)[2][N / 2], uint32_t n,
						 bool finite)
{
	float top = 0.0f;

#pragma unroll
	for (uint32_t c = 0; c < N / 8; c++) {
#pragma unroll
		for (uint32_t e = 0; e < 2; e++) {
			float v = 0.0f;

#pragma unroll
			for (uint32_t i = 0; i < 4; i++) {
				const float w = fabsf(acc[i / 2][c * 4 + i % 2 * 2 + e]);

				v = fmaxf(v, finite && w > 3.4e38f ? 0.0f : w);
			}
			if (c * 8 + threadIdx.x % 4 * 2 + e < n)
				top = fmaxf(top, v);
		}
	}
	return ptx_redux_max(__float_as_uint(top));
}

/*
 * The power of two for all results of a warp, whatever the token: one reduction instead of three
 * shuffles for each eight tokens and two more to hand its inverse on. f16 keeps 11 bits of what is 2^28
 * below the largest.
 */
template <int N>
__device__ __forceinline__ float wide_scale_of(const float (&acc)[2][N / 2], uint32_t n)
{
	uint32_t top = wide_largest<N>(acc, n, false);

	if (top >= 0x7f800000u) /* a token with Inf must not disturb the others */
		top = wide_largest<N>(acc, n, true);
	return moe_wide_scale(top);
}

/* The warp's 32 rows, 8 tokens at a time, as h above. Piece q of a token is at q ^ token / 2. */
template <int N>
__device__ __forceinline__ void wide_store_out(const struct moe_wide &a,
					       const float (&acc)[2][N / 2], uint2 tile,
					       uint32_t mtile, struct wide_names first)
{
	const uint32_t lane = threadIdx.x % 32, n = tile.x >> 16, token = lane / 4;
	const uint8_t *turn = wide_turn();
	const float f = wide_scale_of<N>(acc, n);
	struct wide_names all[2] = {first};

#pragma unroll
	for (uint32_t c = 0; c < N / 8; c++) {
		const uint8_t *mine = turn + c % 2 * 512;
		const struct wide_names &names = all[c / 4 % 2];
		uint32_t p[4];

		if (c * 8 >= n)
			continue;
		if (c % 4 == 0 && c + 4 < N / 8)
			wide_name<true, false>(a, tile, c * 8 + 32, all[(c / 4 + 1) % 2]);
#pragma unroll
		for (uint32_t q = 0; q < 4; q++)
			p[q] = ptx_f16x2(acc[q / 2][c * 4 + q % 2 * 2] * f,
					 acc[q / 2][c * 4 + q % 2 * 2 + 1] * f);
		ptx_stmatrix_turned(ptx_smem(mine) + lane % 8 * 64 +
					    ((lane / 8 ^ lane % 8 / 2) & 3) * 16,
				    p[0], p[1], p[2], p[3]);
		const float inverse = moe_wide_inverse(f) *
				      __shfl_sync(~0u, names.back, c % 4 * 8 + token);
		const uint64_t to = __shfl_sync(~0u, names.slot, c % 4 * 8 + token);

		__syncwarp();
		if (c * 8 + token >= n)
			continue;
		*(uint4 *)(a.out_f16 + to * a.hidden + mtile * 32 + lane % 4 * 8) = *(
			const uint4 *)(mine + token * 64 + ((lane ^ token / 2) & 3) * 16);
		if (lane % 4 == 0)
			a.out_back[to * (a.hidden / 32) + mtile] = inverse;
	}
}

#endif /* KVK_MOE_INT4_WIDE_STORE_CUH */
