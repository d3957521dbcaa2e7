/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_mma.cuh - products of the INT4 kernel: nibbles to floats, bricks times tokens,
 * and the exchange of sums between warps.
 *
 * Named barriers: 1 group 0 alone, 2 group 1's sums are in shared memory, 3 they were
 * read, 4 group 1 alone.
 */
#ifndef KVK_MOE_INT4_MMA_CUH
#define KVK_MOE_INT4_MMA_CUH

#include "moe_int4_few.cuh"

/* acc += scale * sum, for a scale group's columns of 32 rows and 8 tokens */
__device__ __forceinline__ void add_group(float (&acc)[4], const float (&sum)[4],
					  const float *s, const float (&back)[2])
{
#pragma unroll
	for (int i = 0; i < 4; i++)
		acc[i] += s[i / 2] * back[i % 2] * sum[i];
}

/* acc += h's scale * the brick's sum */
template <int NT>
__device__ __forceinline__ void add_brick(float (&acc)[2][NT][4],
					  const float (&part)[2][NT][4], uint32_t x,
					  uint32_t xrow)
{
#pragma unroll
	for (int i = 0; i < 2 * NT; i++) {
		const uint32_t token = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
		const float back = ptx_lds32(x + token * xrow + 256u);

#pragma unroll
		for (int m = 0; m < 2; m++) {
			acc[m][i / 2][i % 2] += back * part[m][i / 2][i % 2];
			acc[m][i / 2][i % 2 + 2] += back * part[m][i / 2][i % 2 + 2];
		}
	}
}

/* One brick (32 rows x 128 columns) times 8 NT tokens: acc[m tile][n tile][fragment]. */
template <int NT, int G, enum moe_mode MODE>
__device__ __forceinline__ void brick_mma(float (&acc)[2][NT][4], uint32_t brick,
					  uint32_t x, uint32_t xrow, uint32_t n,
					  uint32_t is_f16)
{
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	float zero[4] = {};
	/* h's scale: once per brick, or (no registers left for that) with the group's */
	constexpr bool PART = MODE == MOE_H16 && NT <= 2;
	float s[128 / G][4], sum[2][NT][4], part[2][NT][4] = {};

	load_scales<G>(brick + KVK_BRICK_NIBBLES, g, is_f16, s);
#pragma unroll
	for (int kb = 0; kb < 4; kb++) {
		const bool begin = kb * 32 % G == 0, end = (kb + 1) * 32 % G == 0;
		uint4 w = ptx_lds128(brick + kb * 512u + lane * 16u);
		uint32_t p[4][4];

		dequant<MODE, true>(w.x, p[0]);
		dequant<MODE, true>(w.y, p[1]);
		dequant<MODE, true>(w.z, p[2]);
		dequant<MODE, true>(w.w, p[3]);
#pragma unroll
		for (int nt = 0; nt < NT; nt++) {
			uint4 b = load_tokens<MODE>(x + (nt * 8u + g) * xrow, kb, t, 1.0f,
						    nt * 8u + g < n);
			float back[2] = {1.0f, 1.0f};

			if (MODE == MOE_H16 && !PART && end)
				for (int i = 0; i < 2; i++)
					back[i] = ptx_lds32(
						x + (nt * 8 + 2 * t + i) * xrow + 256u);
#pragma unroll
			for (int m = 0; m < 2; m++) {
				uint32_t a0[4] = {p[2 * m][0], p[2 * m + 1][0],
						  p[2 * m][1], p[2 * m + 1][1]};
				uint32_t a1[4] = {p[2 * m][2], p[2 * m + 1][2],
						  p[2 * m][3], p[2 * m + 1][3]};
				float(&c)[4] = sum[m][nt];

				tile_mma<MODE>(c, a0, b.x, b.y, begin ? zero : c);
				tile_mma<MODE>(c, a1, b.z, b.w, c);
				if (end)
					add_group(PART ? part[m][nt] : acc[m][nt], c,
						  &s[kb * 32 / G][2 * m], back);
			}
		}
	}
	if constexpr (PART)
		add_brick<NT>(acc, part, x, xrow);
}

/* One brick times 8 NT tokens, or 8 / P where a tile is 8 columns. */
template <int NT, int P, int G, enum moe_mode MODE>
__device__ __forceinline__ void
brick_any(float (&acc)[2][NT][4], uint32_t brick, uint32_t x, uint32_t xrow,
	  const struct few_lane<P> &f, uint32_t n, uint32_t is_f16)
{
	if constexpr (NT == 1)
		brick_few<P, G, MODE>(acc, brick, x, xrow, f, is_f16);
	else
		brick_mma<NT, G, MODE>(acc, brick, x, xrow, n, is_f16);
}

/* Before a unit's first brick. */
template <int NT, int P, int G, enum moe_mode MODE>
__device__ __forceinline__ struct few_lane<P>
unit_begin(float (&acc)[2][NT][4], const float *inv, uint32_t n, uint32_t xrow)
{
#pragma unroll
	for (int i = 0; i < 8 * NT; i++)
		acc[i / (4 * NT)][i / 4 % NT][i % 4] = 0.0f;
	return few_lane_make<P, G, MODE>(inv, n, xrow);
}

/* After its last one: a token's sums come together in the lanes where they belong. */
template <int NT, int P, enum moe_mode MODE>
__device__ __forceinline__ void unit_end(float (&acc)[2][NT][4])
{
#pragma unroll
	for (int i = 0; i < 8 * NT; i++) {
		float &v = acc[i / (4 * NT)][i / 4 % NT][i % 4];

		if (P > 1)
			v += __shfl_xor_sync(~0u, v, 2);
		if (P > 2)
			v += __shfl_xor_sync(~0u, v, 1);
		if (MODE == MOE_X)
			v *= NT == 1 ? MOE_X_BACK : MOE_X_BACK2;
	}
}

/* The group's stages of row block @rb into acc. */
template <int NT, int P, int WK, enum moe_mode MODE, int G, class S>
__device__ __forceinline__ void
unit_mma(float (&acc)[2][NT][4], const struct moe_i4 &a, uint32_t rb, uint32_t n,
	 const float *inv, bool keep, struct moe_ring &r, struct moe_ring &rx)
{
	constexpr uint32_t WM = MOE_GROUP / WK, XC = MODE == MOE_X ? S::XC1 : S::XC2;
	constexpr uint32_t XROW = MODE == MOE_X ? S::XROW1 : S::XROW2;
	constexpr uint32_t STEP = MODE == MOE_X ? 256u : S::H_STEP;
	const struct moe_mat &m = MODE == MOE_X ? a.w13 : a.w2;
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % MOE_GROUP;
	const uint32_t group = threadIdx.x / 32 / MOE_GROUP, wk = warp % WK;
	const bool mine = rb * WM + warp / WK < m.mtiles && !a.loads_only;
	const struct few_lane<P> f = unit_begin<NT, P, G, MODE>(acc, inv, n, XROW);

	for (uint32_t c = 0; c < m.kbricks; c += XC) {
		const uint32_t nr = (min(XC, m.kbricks - c) + WK - 1) / WK;
		const uint32_t i = r.stage % 2 != group;
		uint32_t k = c + i * WK + wk;
		uint32_t x = rx.base + rx.stage * S::CHUNK + (i * WK + wk) * STEP;
		struct moe_ring s = r;

		static_assert(XC / WK <= S::STAGES, "ring_skip() wraps once");
		ring_skip<S::STAGES>(s, i);
		ring_skip<S::STAGES>(r, nr);
		ptx_mbar_wait(rx.full + 8 * rx.stage, rx.phase);
#pragma unroll 1
		for (int left = (int)(nr - i); left > 0; left -= 2) {
			ptx_mbar_wait(s.full + 8 * s.stage, s.phase);
			if (mine && (WK == 1 || k < m.kbricks))
				brick_any<NT, P, G, MODE>(acc,
							  s.base + s.stage * S::STAGE +
								  warp * S::BRICK,
							  x, XROW, f, n, a.scale_f16);
			__syncwarp();
			if (lane == 0)
				ptx_mbar_arrive(s.empty + 8 * s.stage);
			ring_skip<S::STAGES>(s, 2);
			k += 2 * WK;
			x += 2 * WK * STEP;
		}
		if (keep) /* one chunk, and the next part of the row block needs it too */
			continue;
		__syncwarp();
		if (lane == 0)
			ptx_mbar_arrive(rx.empty + 8 * rx.stage);
		ring_next<S::CHUNKS>(rx);
	}
	unit_end<NT, P, MODE>(acc);
}

/* Two row blocks at once, a group each; returns the one that is this group's. */
template <int NT, int P, enum moe_mode MODE, int G, class S>
__device__ __forceinline__ uint32_t pair_mma(float (&acc)[2][NT][4],
					     const struct moe_i4 &a, uint32_t rb,
					     uint32_t n, const float *inv, bool keep,
					     struct moe_ring &r, struct moe_ring &rx)
{
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % MOE_GROUP;
	const uint32_t group = threadIdx.x / 32 / MOE_GROUP;
	const struct few_lane<P> f = unit_begin<NT, P, G, MODE>(acc, inv, n, S::XROW2);
	uint32_t x = rx.base + rx.stage * S::CHUNK;
	struct moe_ring s = r;

	const bool second = r.stage % 2 != group;
	const bool mine = (rb + second) * MOE_GROUP + warp < a.w2.mtiles && !a.loads_only;

	ring_skip<S::STAGES>(s, second);
	ring_skip<S::STAGES>(r, 2 * a.w2.kbricks); /* of one chunk, so of one turn */
	ptx_mbar_wait(rx.full + 8 * rx.stage, rx.phase);
#pragma unroll 1
	for (uint32_t k = a.w2.kbricks; k; k--, x += S::H_STEP) {
		ptx_mbar_wait(s.full + 8 * s.stage, s.phase);
		if (mine)
			brick_any<NT, P, G, MODE>(
				acc, s.base + s.stage * S::STAGE + warp * S::BRICK, x,
				S::XROW2, f, n, a.scale_f16);
		__syncwarp();
		if (lane == 0)
			ptx_mbar_arrive(s.empty + 8 * s.stage);
		ring_skip<S::STAGES>(s, 2);
	}
	if (!keep) {
		__syncwarp();
		if (lane == 0)
			ptx_mbar_arrive(rx.empty + 8 * rx.stage);
		ring_next<S::CHUNKS>(rx);
	}
	unit_end<NT, P, MODE>(acc);
	return rb + second;
}

/* Fragment i of warp @w in the exchange buffer. */
template <int NT>
__device__ __forceinline__ uint32_t red_at(uint32_t red, uint32_t w, int i)
{
	return red + ((w * 8 * NT + i) * 32 + threadIdx.x % 32) * 4;
}

/* Sum both groups' and the WK warps' shares in fixed order. Afterwards group 0's warps
 * hold the fragments whose pair (c and c + 2: gate and up) is wk modulo WK. */
template <int NT, int WK>
__device__ __forceinline__ void unit_reduce(float (&acc)[2][NT][4], uint32_t red)
{
	const uint32_t warp = threadIdx.x / 32, w8 = warp % MOE_GROUP,
		       group = warp / MOE_GROUP;

	if (group)
		ptx_bar_sync(3, MOE_CONSUMERS * 32);
	else if (WK > 1)
		ptx_bar_sync(1, MOE_GROUP * 32);
	if (group || WK > 1) {
#pragma unroll
		for (int i = 0; i < 8 * NT; i++)
			ptx_sts32(red_at<NT>(red, WK > 1 ? warp : w8, i),
				  acc[i / (4 * NT)][i / 4 % NT][i % 4]);
	}
	if (group) {
		ptx_bar_arrive(2, MOE_CONSUMERS * 32);
		return;
	}
	ptx_bar_sync(2, MOE_CONSUMERS * 32);
#pragma unroll
	for (int i = 0; i < 8 * NT; i++) {
		float &v = acc[i / (4 * NT)][i / 4 % NT][i % 4];

		if (WK == 1) {
			v += ptx_lds32(red_at<NT>(red, w8, i));
		} else if ((i / 4 * 2 + i % 2) % WK == w8 % WK) {
			/* which group had which stages varies: add them first */
			v = 0.0f;
#pragma unroll
			for (uint32_t w = 0; w < WK; w++)
				v += ptx_lds32(red_at<NT>(red, w8 / WK * WK + w, i)) +
				     ptx_lds32(red_at<NT>(
					     red, MOE_GROUP + w8 / WK * WK + w, i));
		}
	}
	ptx_bar_arrive(3, MOE_CONSUMERS * 32);
}

#endif /* KVK_MOE_INT4_MMA_CUH */
