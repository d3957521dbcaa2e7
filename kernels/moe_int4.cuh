/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4.cuh - one persistent kernel for the routed INT4 experts of a layer.
 *
 * Work is a list of units, claimed in order from one counter by whichever CTA is free:
 *
 *	FIRST	(token tile, row block) of h = silu(W1 x) * (W3 x)
 *	SECOND	(token tile, row block) of out[slot] = W2 h; waits for the tile's FIRST
 *units SUM	(row block, 16 tokens) of y = sum_k weight * out; waits for the block's
 *SECONDs
 *
 * A unit waits only for units claimed before it, and those never wait for later ones: no
 * deadlock whatever the order in which CTAs run. A token tile is up to 8 NTMAX tokens of
 * one expert; experts without tokens have no tile and cost nothing.
 *
 * A CTA is eight consumer warps and two producer warps around one ring of stages. The
 * weight producer runs ahead through units of all kinds, so the stream never drains at
 *the end of an expert or of a GEMM; the token producer brings rows of x (bf16) or h (f32)
 *to the same stages and does the waiting. Weights are the A operand (rows on M), tokens
 *the narrow N side. Products are exact (bf16 or f16 times integers), sums f32, the
 *group's scale multiplies the group's sum.
 *
 * h stays f32 in memory and becomes f16 on its way into the second product, scaled by a
 * power of two from the slot's largest value: no overflow, no loss to bf16 rounding.
 */
#ifndef KVK_MOE_INT4_CUH
#define KVK_MOE_INT4_CUH

#include "moe_pack.h"
#include "moe_ptx.cuh"

#define MOE_CONSUMERS 8u
#define MOE_THREADS   320u
#define MOE_QUEUE     4u  /* units a producer may be ahead */
#define MOE_SUM_TOKS  16u /* tokens of a SUM unit */
#define MOE_SMEM      (226u * 1024u)

enum moe_unit_type { MOE_FIRST, MOE_SECOND, MOE_SUM, MOE_END };

/* struct moe_mat - a packed matrix of all experts */
struct moe_mat {
	const uint8_t *base;
	uint64_t expert_bytes;
	uint32_t mtiles;
	uint32_t kbricks;
	uint32_t wl;
	uint32_t rblocks; /* row blocks of 32 * WM rows */
};

/* struct moe_i4 - argument block; all pointers are device memory */
struct moe_i4 {
	struct moe_mat w13;
	struct moe_mat w2;
	const uint16_t *x;    /* [nr_tokens][hidden] bf16 */
	uint16_t *y;	      /* [nr_tokens][hidden] bf16 */
	const float *weights; /* [nr_slots] */
	uint32_t *claim;      /* next unit */
	uint32_t *nr_tiles;   /* written by the prep kernel */
	const uint4 *tiles;   /* expert, first position in list, tokens */
	const uint32_t *list; /* slots sorted by expert */
	uint32_t *done1;      /* [tile] FIRST units finished */
	uint32_t *done2;      /* [w2.rblocks] SECOND units finished */
	uint32_t *amax;	      /* [slot] bits of the largest |h| */
	float *h;	      /* [slot][inter] */
	float *out;	      /* [slot][hidden] */
	uint32_t hidden;
	uint32_t inter;
	uint32_t nr_tokens;
	uint32_t top_k;
	uint32_t sum_chunks; /* SUM units of a row block */
	uint32_t scale_f16;
	uint32_t accumulate;
	uint32_t loads_only; /* bench: stream everything, multiply nothing */
};

struct moe_unit {
	uint32_t type, tile, rb, expert, start, n, pad[2];
};

template <int NTMAX> struct moe_shared {
	uint64_t full[16], empty[16];
	uint64_t q_full[MOE_QUEUE], q_ready[MOE_QUEUE], q_empty[MOE_QUEUE];
	struct moe_unit unit[MOE_QUEUE];
	uint32_t slot[MOE_QUEUE][8 * NTMAX];
	float inv[MOE_QUEUE][8 * NTMAX];
};

/* Sizes that follow from the template arguments; x rows are padded so that the eight
 * lanes of a quarter warp hit different banks. */
template <int NTMAX, int WK, int G> struct moe_shape {
	static constexpr uint32_t WM = MOE_CONSUMERS / WK;
	static constexpr uint32_t BRICK = KVK_BRICK_NIBBLES + 64u * (KVK_BRICK_COLS / G);
	static constexpr uint32_t XROW1 = WK * 256u + 64u;
	static constexpr uint32_t XROW2 = 512u + 16u;
	static constexpr uint32_t XROW = XROW1 > XROW2 ? XROW1 : XROW2;
	static constexpr uint32_t STAGE =
		(8u * BRICK + 8u * NTMAX * XROW + 127u) / 128u * 128u;
	static constexpr uint32_t RED = WK > 1 ? 8u * 1024u * NTMAX : 0u;
	static constexpr uint32_t STAGES_FIT =
		(MOE_SMEM - RED - (uint32_t)sizeof(struct moe_shared<NTMAX>) - 256u) /
		STAGE;
	static constexpr uint32_t STAGES = STAGES_FIT > 16u ? 16u : STAGES_FIT;
	static constexpr uint32_t DYNAMIC = STAGES * STAGE + RED + 128u;
};

/* struct moe_ring - a warp's place in the ring of stages */
struct moe_ring {
	uint32_t base; /* shared address of stage 0 */
	uint32_t full, empty;
	uint32_t stage, phase;
};

template <uint32_t STAGES> __device__ __forceinline__ void ring_next(struct moe_ring &r)
{
	if (++r.stage == STAGES) {
		r.stage = 0;
		r.phase ^= 1;
	}
}

/* ------------------------------------------------------------------------------ products
 */

/* Eight nibbles to four pairs: bf16 (first product) or f16 (second), exact integers. */
template <bool FIRST>
__device__ __forceinline__ void dequant(uint32_t w, uint32_t (&p)[4])
{
	if constexpr (FIRST) {
#pragma unroll
		for (int j = 0; j < 4; j++)
			p[j] = ptx_fma_bf16x2(
				ptx_and_or(w >> (4 * j), 0x000f000fu, 0x43004300u),
				0x3f803f80u, 0xc308c308u); /* 128 + q + 8 */
	} else {
#pragma unroll
		for (int j = 0; j < 4; j += 2) {
			uint32_t v = w >> (4 * j);

			p[j] = ptx_fma_f16x2(ptx_and_or(v, 0x000f000fu, 0x64006400u),
					     0x3c003c00u, 0xe408e408u); /* 1024 + q + 8 */
			p[j + 1] = ptx_fma_f16x2(
				ptx_and_or(v, 0x00f000f0u, 0x64006400u), 0x2c002c00u,
				0xd480d480u); /* (1024 + 16 (q + 8)) / 16 */
		}
	}
}

/* The B operand of 32 columns for token @g: eight neighbours of its row. */
template <bool FIRST>
__device__ __forceinline__ uint4 load_tokens(uint32_t row, uint32_t kb, uint32_t t,
					     float inv)
{
	uint4 lo, hi, b;

	if (FIRST)
		return ptx_lds128(row + kb * 64u + t * 16u);
	lo = ptx_lds128(row + kb * 128u + t * 32u);
	hi = ptx_lds128(row + kb * 128u + t * 32u + 16u);
	b.x = ptx_f16x2(__uint_as_float(lo.x) * inv, __uint_as_float(lo.y) * inv);
	b.y = ptx_f16x2(__uint_as_float(lo.z) * inv, __uint_as_float(lo.w) * inv);
	b.z = ptx_f16x2(__uint_as_float(hi.x) * inv, __uint_as_float(hi.y) * inv);
	b.w = ptx_f16x2(__uint_as_float(hi.z) * inv, __uint_as_float(hi.w) * inv);
	return b;
}

/* Two 16-bit scales to f32. */
__device__ __forceinline__ void scale_pair(uint32_t v, uint32_t is_f16, float &lo,
					   float &hi)
{
	if (is_f16) {
		lo = kvk_f16_to_f32((uint16_t)v);
		hi = kvk_f16_to_f32((uint16_t)(v >> 16));
	} else {
		lo = __uint_as_float(v << 16);
		hi = __uint_as_float(v & 0xffff0000u);
	}
}

template <int G>
__device__ __forceinline__ void load_scales(uint32_t addr, uint32_t g, uint32_t is_f16,
					    float (&s)[128 / G][4])
{
	uint32_t v[128 / G * 2];

	if (G == 128) {
		uint2 a = ptx_lds64(addr + g * 8u);
		v[0] = a.x;
		v[1] = a.y;
	} else {
		for (int i = 0; i < 128 / G * 2; i += 4) {
			uint4 a = ptx_lds128(addr + g * (1024u / G) + i * 4u);
			v[i] = a.x;
			v[i + 1] = a.y;
			v[i + 2] = a.z;
			v[i + 3] = a.w;
		}
	}
	for (int i = 0; i < 128 / G; i++) {
		scale_pair(v[2 * i], is_f16, s[i][0], s[i][1]);
		scale_pair(v[2 * i + 1], is_f16, s[i][2], s[i][3]);
	}
}

/* One brick (32 rows x 128 columns) times 8 NT tokens: acc[m tile][n tile][fragment]. */
template <int NT, int G, bool FIRST>
__device__ __forceinline__ void brick_mma(float (&acc)[2][NT][4], uint32_t brick,
					  uint32_t x, uint32_t xrow,
					  const float (&inv)[NT], uint32_t is_f16)
{
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	float s[128 / G][4], sum[2][NT][4];

	load_scales<G>(brick + KVK_BRICK_NIBBLES, g, is_f16, s);
#pragma unroll
	for (int kb = 0; kb < 4; kb++) {
		uint4 w = ptx_lds128(brick + kb * 512u + lane * 16u);
		uint32_t p[4][4];

		dequant<FIRST>(w.x, p[0]);
		dequant<FIRST>(w.y, p[1]);
		dequant<FIRST>(w.z, p[2]);
		dequant<FIRST>(w.w, p[3]);
#pragma unroll
		for (int nt = 0; nt < NT; nt++) {
			uint4 b = load_tokens<FIRST>(x + (nt * 8u + g) * xrow, kb, t,
						     inv[nt]);
#pragma unroll
			for (int m = 0; m < 2; m++) {
				uint32_t a0[4] = {p[2 * m][0], p[2 * m + 1][0],
						  p[2 * m][1], p[2 * m + 1][1]};
				uint32_t a1[4] = {p[2 * m][2], p[2 * m + 1][2],
						  p[2 * m][3], p[2 * m + 1][3]};
				float(&c)[4] = sum[m][nt];

				if (kb * 32 % G == 0)
					c[0] = c[1] = c[2] = c[3] = 0.0f;
				if (FIRST) {
					ptx_mma_bf16(c, a0, b.x, b.y);
					ptx_mma_bf16(c, a1, b.z, b.w);
				} else {
					ptx_mma_f16(c, a0, b.x, b.y);
					ptx_mma_f16(c, a1, b.z, b.w);
				}
				if ((kb + 1) * 32 % G == 0) {
					const float *sg = s[kb * 32 / G];

					acc[m][nt][0] += sg[2 * m] * c[0];
					acc[m][nt][1] += sg[2 * m] * c[1];
					acc[m][nt][2] += sg[2 * m + 1] * c[2];
					acc[m][nt][3] += sg[2 * m + 1] * c[3];
				}
			}
		}
	}
}

/* ----------------------------------------------------------------------------- producers
 */

/* Unit number @c of the list, as the counter gave it. */
template <uint32_t NTOK>
__device__ __forceinline__ struct moe_unit unit_decode(const struct moe_i4 &a,
						       uint32_t nr_tiles, uint32_t c)
{
	struct moe_unit u = {};
	const uint32_t nr_first = nr_tiles * a.w13.rblocks;
	const uint32_t nr_second = nr_tiles * a.w2.rblocks;

	if (c < nr_first + nr_second) {
		uint32_t first = c < nr_first;
		uint32_t i = first ? c : c - nr_first;
		uint32_t r = first ? a.w13.rblocks : a.w2.rblocks;
		uint4 tile = __ldcg(&a.tiles[i / r]);

		u.type = first ? MOE_FIRST : MOE_SECOND;
		u.tile = i / r;
		u.rb = i % r;
		u.expert = tile.x;
		u.start = tile.y;
		u.n = tile.z;
		return u;
	}
	c -= nr_first + nr_second;
	u.type = c < a.w2.rblocks * a.sum_chunks ? MOE_SUM : MOE_END;
	u.rb = c % a.w2.rblocks;
	u.tile = c / a.w2.rblocks;
	return u;
}

/* Stream the unit's rows of one matrix: a stage is WM row tiles x WK bricks. */
template <int WK, uint32_t BRICK, uint32_t STAGE, uint32_t STAGES>
__device__ __forceinline__ void stream_weights(const struct moe_mat &m,
					       const struct moe_unit &u,
					       struct moe_ring &r, uint64_t policy)
{
	constexpr uint32_t WM = MOE_CONSUMERS / WK;
	const uint32_t lane = threadIdx.x % 32;
	const uint8_t *w = m.base + u.expert * m.expert_bytes;
	const uint32_t m0 = u.rb * WM, nm = min(WM, m.mtiles - m0);
	/* Pieces: a whole stage, a row tile's bricks, or single bricks. */
	const bool whole = m.wl == WM && nm == WM, rows = m.wl == 1;
	const uint32_t lm = lane / WK, lk = lane % WK, mt = m0 + lm;
	const uint32_t bmt = mt / m.wl * m.wl * m.kbricks + mt % m.wl;

	for (uint32_t k = 0; k < m.kbricks; k += WK) {
		uint32_t nk = min((uint32_t)WK, m.kbricks - k);
		uint32_t bar = r.full + 8 * r.stage, dst = r.base + r.stage * STAGE;
		const uint8_t *src = w + (uint64_t)(bmt + (k + lk) * m.wl) * BRICK;

		ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
		if (lane == 0)
			ptx_mbar_expect(bar, nm * nk * BRICK);
		__syncwarp();
		if (whole) {
			if (lane == 0)
				ptx_bulk_stream(dst, src, WM * nk * BRICK, bar, policy);
		} else if (rows) {
			if (lm < nm && lk == 0)
				ptx_bulk_stream(dst + lane * BRICK, src, nk * BRICK, bar,
						policy);
		} else if (lm < nm && lk < nk) {
			ptx_bulk_stream(dst + lane * BRICK, src, BRICK, bar, policy);
		}
		ring_next<STAGES>(r);
	}
}

/* Warp 8: claims units two ahead, hands them on, streams their weights. */
template <int NTMAX, int WK, int G>
__device__ void weight_producer(const struct moe_i4 &a, struct moe_shared<NTMAX> &sh,
				struct moe_ring r)
{
	using S = moe_shape<NTMAX, WK, G>;
	const uint32_t lane = threadIdx.x % 32, nr_tiles = __ldcg(a.nr_tiles);
	const uint64_t policy = ptx_policy_stream();
	uint32_t q = 0, qphase = 0, c1 = 0, c2 = 0;
	struct moe_unit u, next;

	if (lane == 0)
		c1 = atomicAdd(a.claim, 1);
	if (lane == 0)
		c2 = atomicAdd(a.claim, 1);
	u = unit_decode<8 * NTMAX>(a, nr_tiles, __shfl_sync(~0u, c1, 0));
	for (;;) {
		c1 = __shfl_sync(~0u, c2, 0);
		if (lane == 0)
			c2 = atomicAdd(a.claim, 1);
		next = unit_decode<8 * NTMAX>(a, nr_tiles, c1);
		ptx_mbar_wait(ptx_smem(&sh.q_empty[q]), qphase ^ 1);
		if (lane == 0) {
			sh.unit[q] = u;
			ptx_mbar_arrive(ptx_smem(&sh.q_full[q]));
		}
		__syncwarp();
		if (u.type == MOE_END)
			return;
		if (u.type == MOE_FIRST)
			stream_weights<WK, S::BRICK, S::STAGE, S::STAGES>(a.w13, u, r,
									  policy);
		else if (u.type == MOE_SECOND)
			stream_weights<1, S::BRICK, S::STAGE, S::STAGES>(a.w2, u, r,
									 policy);
		u = next;
		if (++q == MOE_QUEUE) {
			q = 0;
			qphase ^= 1;
		}
	}
}

/* Bring the tile's rows (slot / per_row), @step bytes of each for every stage. */
template <uint32_t STAGE, uint32_t STAGES, uint32_t NTOK>
__device__ __forceinline__ void stream_tokens(const uint8_t *rows, uint32_t row_bytes,
					      const uint32_t *slot, uint32_t per_row,
					      uint32_t n, uint32_t step, uint32_t pad,
					      uint32_t offset, struct moe_ring &r)
{
	const uint32_t lane = threadIdx.x % 32;
	const uint8_t *src[(NTOK + 31) / 32];

#pragma unroll
	for (uint32_t i = 0; i < (NTOK + 31) / 32; i++)
		src[i] = lane + 32 * i < n
				 ? rows + (uint64_t)(slot[lane + 32 * i] / per_row) *
						   row_bytes
				 : nullptr;
	for (uint32_t at = 0; at < row_bytes; at += step) {
		uint32_t bytes = min(step, row_bytes - at), bar = r.full + 8 * r.stage;
		uint32_t dst = r.base + r.stage * STAGE + offset + lane * pad;

		ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
		if (lane == 0)
			ptx_mbar_expect(bar, n * bytes);
		__syncwarp();
#pragma unroll
		for (uint32_t i = 0; i < (NTOK + 31) / 32; i++)
			if (src[i])
				ptx_bulk(dst + i * 32 * pad, src[i] + at, bytes, bar);
		ring_next<STAGES>(r);
	}
}

/* Power of two that brings the slot's largest |h| near 2^14; 1 for Inf and NaN. */
__device__ __forceinline__ float h_scale(uint32_t amax_bits)
{
	uint32_t e = amax_bits >> 23;

	if (e == 255)
		return 1.0f;
	return __uint_as_float((268u - (e < 15 ? 15u : e)) << 23);
}

/* Warp 9: waits for what a unit depends on, brings its tokens, tells the consumers. */
template <int NTMAX, int WK, int G>
__device__ void token_producer(const struct moe_i4 &a, struct moe_shared<NTMAX> &sh,
			       struct moe_ring r)
{
	using S = moe_shape<NTMAX, WK, G>;
	constexpr uint32_t NTOK = 8 * NTMAX, OFFSET = 8 * S::BRICK;
	const uint32_t lane = threadIdx.x % 32;
	uint32_t q = 0, qphase = 0;

	for (;;) {
		ptx_mbar_wait(ptx_smem(&sh.q_full[q]), qphase);
		const struct moe_unit u = sh.unit[q];

		if (u.type == MOE_SECOND) {
			if (lane == 0)
				while (ptx_ld_acquire(&a.done1[u.tile]) < a.w13.rblocks)
					;
			__syncwarp();
			ptx_fence_async();
		}
		if (u.type <= MOE_SECOND) {
			for (uint32_t i = lane; i < u.n; i += 32) {
				uint32_t slot = __ldcg(&a.list[u.start + i]);

				sh.slot[q][i] = slot;
				if (u.type == MOE_SECOND)
					sh.inv[q][i] = h_scale(__ldcg(&a.amax[slot]));
			}
		}
		__syncwarp();
		if (lane == 0)
			ptx_mbar_arrive(ptx_smem(&sh.q_ready[q]));
		if (u.type == MOE_END)
			return;
		if (u.type == MOE_FIRST)
			stream_tokens<S::STAGE, S::STAGES, NTOK>(
				(const uint8_t *)a.x, a.hidden * 2, sh.slot[q], a.top_k,
				u.n, WK * 256u, S::XROW1, OFFSET, r);
		else if (u.type == MOE_SECOND)
			stream_tokens<S::STAGE, S::STAGES, NTOK>(
				(const uint8_t *)a.h, a.inter * 4, sh.slot[q], 1, u.n,
				512u, S::XROW2, OFFSET, r);
		if (++q == MOE_QUEUE) {
			q = 0;
			qphase ^= 1;
		}
	}
}

/* ----------------------------------------------------------------------------- consumers
 */

/* All stages of a unit into acc. */
template <int NT, int WK, bool FIRST, int G, class S>
__device__ __forceinline__ void unit_mma(float (&acc)[2][NT][4], const struct moe_mat &m,
					 const struct moe_unit &u, const float *inv,
					 const struct moe_i4 &a, struct moe_ring &r)
{
	constexpr uint32_t WM = MOE_CONSUMERS / WK;
	constexpr uint32_t XROW = FIRST ? S::XROW1 : S::XROW2;
	const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, wk = warp % WK;
	const bool mine = u.rb * WM + warp / WK < m.mtiles && !a.loads_only;
	float scale[NT];

#pragma unroll
	for (int nt = 0; nt < NT; nt++) {
		scale[nt] = FIRST ? 1.0f : inv[nt * 8 + g];
#pragma unroll
		for (int i = 0; i < 4; i++)
			acc[0][nt][i] = acc[1][nt][i] = 0.0f;
	}
	for (uint32_t k = 0; k < m.kbricks; k += WK) {
		uint32_t at = r.base + r.stage * S::STAGE;

		ptx_mbar_wait(r.full + 8 * r.stage, r.phase);
		if (mine && k + wk < m.kbricks)
			brick_mma<NT, G, FIRST>(acc, at + warp * S::BRICK,
						at + 8 * S::BRICK +
							wk * (FIRST ? 256u : 512u),
						XROW, scale, a.scale_f16);
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			ptx_mbar_arrive(r.empty + 8 * r.stage);
		ring_next<S::STAGES>(r);
	}
}

/* Sum the WK warps' shares in fixed order; afterwards each warp holds the fragments
 * (m, nt, pair c) with index % WK == wk, others are garbage. */
template <int NT, int WK>
__device__ __forceinline__ void unit_reduce(float (&acc)[2][NT][4], uint32_t red)
{
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	const uint32_t mine = red + (warp * 8 * NT * 32 + lane) * 4;

#pragma unroll
	for (int i = 0; i < 8 * NT; i++)
		asm volatile("st.shared.f32 [%0], %1;" ::"r"(mine + i * 128),
			     "f"(acc[i / (4 * NT)][i / 4 % NT][i % 4])
			     : "memory");
	ptx_bar_sync(1, MOE_CONSUMERS * 32);
#pragma unroll
	for (int i = 0; i < 8 * NT; i++) {
		/* c and c + 2 (gate and up) belong to the same pair */
		uint32_t pair = i / 4 * 2 + i % 2;
		float sum = 0.0f, v;

		if (pair % WK != warp % WK)
			continue;
		for (uint32_t w = 0; w < WK; w++) {
			asm volatile(
				"ld.shared.f32 %0, [%1];"
				: "=f"(v)
				: "r"(red + (((warp / WK * WK + w) * 8 * NT + i) * 32 +
					     lane) * 4));
			sum += v;
		}
		acc[i / (4 * NT)][i / 4 % NT][i % 4] = sum;
	}
}

__device__ __forceinline__ float swiglu(float gate, float up)
{
	return gate / (1.0f + __expf(-gate)) * up;
}

/* h[slot][column] and the slot's largest value. */
template <int NT, int WK>
__device__ __forceinline__ void
store_first(const struct moe_i4 &a, const float (&acc)[2][NT][4],
	    const struct moe_unit &u, const uint32_t *slot)
{
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4,
		       t = lane % 4;
	const uint32_t mtile = u.rb * (MOE_CONSUMERS / WK) + warp / WK;

	if (mtile >= a.w13.mtiles)
		return;
#pragma unroll
	for (int nt = 0; nt < NT; nt++) {
#pragma unroll
		for (int c = 0; c < 2; c++) {
			uint32_t token = nt * 8 + 2 * t + c, top = 0;
			bool any = false;

#pragma unroll
			for (int m = 0; m < 2; m++) {
				if (((m * NT + nt) * 2 + c) % WK != warp % WK)
					continue;
				float v = swiglu(acc[m][nt][c], acc[m][nt][c + 2]);

				any = true;
				top = max(top, __float_as_uint(v) & 0x7fffffffu);
				if (token < u.n)
					a.h[(uint64_t)slot[token] * a.inter + mtile * 16 +
					    m * 8 + g] = v;
			}
			if (!any)
				continue;
#pragma unroll
			for (int i = 4; i < 32; i *= 2)
				top = max(top, __shfl_xor_sync(~0u, top, i));
			if (g == 0 && token < u.n)
				atomicMax(&a.amax[slot[token]], top);
		}
	}
}

/* out[slot][row] */
template <int NT>
__device__ __forceinline__ void
store_second(const struct moe_i4 &a, const float (&acc)[2][NT][4],
	     const struct moe_unit &u, const uint32_t *slot, const float *inv)
{
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4,
		       t = lane % 4;
	const uint32_t row = (u.rb * MOE_CONSUMERS + warp) * 32 + g;

	if (row >= a.hidden)
		return;
#pragma unroll
	for (int nt = 0; nt < NT; nt++) {
#pragma unroll
		for (int c = 0; c < 2; c++) {
			uint32_t token = nt * 8 + 2 * t + c;

			if (token >= u.n)
				continue;
			float *o = a.out + (uint64_t)slot[token] * a.hidden + row;
			/* inverse of a power of two, exactly */
			float back = __uint_as_float((254u << 23) -
						     __float_as_uint(inv[token]));

			o[0] = acc[0][nt][c] * back;
			o[8] = acc[0][nt][c + 2] * back;
			o[16] = acc[1][nt][c] * back;
			o[24] = acc[1][nt][c + 2] * back;
		}
	}
}

template <int NT, int NTMAX, int WK, int G>
__device__ __forceinline__ void
unit_run(const struct moe_i4 &a, struct moe_shared<NTMAX> &sh, const struct moe_unit &u,
	 uint32_t q, uint32_t red, struct moe_ring &r)
{
	using S = moe_shape<NTMAX, WK, G>;
	float acc[2][NT][4];

	if (u.type == MOE_FIRST) {
		unit_mma<NT, WK, true, G, S>(acc, a.w13, u, nullptr, a, r);
		if (WK > 1)
			unit_reduce<NT, WK>(acc, red);
		store_first<NT, WK>(a, acc, u, sh.slot[q]);
	} else {
		unit_mma<NT, 1, false, G, S>(acc, a.w2, u, sh.inv[q], a, r);
		store_second<NT>(a, acc, u, sh.slot[q], sh.inv[q]);
	}
}

/* y of MOE_SUM_TOKS tokens in a row block, slots in order. */
__device__ __forceinline__ void unit_sum(const struct moe_i4 &a, const struct moe_unit &u,
					 uint32_t nr_tiles)
{
	const uint32_t row = u.rb * 256u + threadIdx.x % 64 * 4;
	const uint32_t last = min((u.tile + 1) * MOE_SUM_TOKS, a.nr_tokens);

	if (threadIdx.x == 0)
		while (ptx_ld_acquire(&a.done2[u.rb]) < nr_tiles)
			;
	ptx_bar_sync(1, MOE_CONSUMERS * 32);
	if (row >= a.hidden)
		return;
	for (uint32_t tok = u.tile * MOE_SUM_TOKS + threadIdx.x / 64; tok < last;
	     tok += 4) {
		float s[4] = {};
		uint2 *y = (uint2 *)(a.y + (uint64_t)tok * a.hidden + row);

#pragma unroll 8
		for (uint32_t j = 0; j < a.top_k; j++) {
			uint64_t slot = (uint64_t)tok * a.top_k + j;
			float4 o =
				__ldcg((const float4 *)(a.out + slot * a.hidden + row));
			float w = a.weights[slot];

			s[0] += w * o.x;
			s[1] += w * o.y;
			s[2] += w * o.z;
			s[3] += w * o.w;
		}
		if (a.accumulate) {
			uint2 old = *y;

			s[0] += __uint_as_float(old.x << 16);
			s[1] += __uint_as_float(old.x & 0xffff0000u);
			s[2] += __uint_as_float(old.y << 16);
			s[3] += __uint_as_float(old.y & 0xffff0000u);
		}
		*y = make_uint2(ptx_bf16x2(s[0], s[1]), ptx_bf16x2(s[2], s[3]));
	}
}

/* Warps 0 .. 7 */
template <int NTMAX, int WK, int G>
__device__ void consumer(const struct moe_i4 &a, struct moe_shared<NTMAX> &sh,
			 uint32_t red, struct moe_ring r)
{
	const uint32_t nr_tiles = __ldcg(a.nr_tiles);
	uint32_t q = 0, qphase = 0;

	for (;;) {
		ptx_mbar_wait(ptx_smem(&sh.q_ready[q]), qphase);
		const struct moe_unit u = sh.unit[q];

		if (u.type == MOE_END)
			return;
		if (u.type == MOE_SUM) {
			unit_sum(a, u, nr_tiles);
		} else {
			if (NTMAX == 1 || u.n <= 8)
				unit_run<1, NTMAX, WK, G>(a, sh, u, q, red, r);
			else if (NTMAX <= 2 || u.n <= 16)
				unit_run<(NTMAX >= 2 ? 2 : 1), NTMAX, WK, G>(a, sh, u, q,
									     red, r);
			else if (NTMAX <= 4 || u.n <= 32)
				unit_run<(NTMAX >= 4 ? 4 : 1), NTMAX, WK, G>(a, sh, u, q,
									     red, r);
			else
				unit_run<NTMAX, NTMAX, WK, G>(a, sh, u, q, red, r);
			ptx_fence_async();
			ptx_bar_sync(1, MOE_CONSUMERS * 32);
			if (threadIdx.x == 0) {
				__threadfence();
				ptx_red_release(u.type == MOE_FIRST ? &a.done1[u.tile]
								    : &a.done2[u.rb],
						1);
			}
		}
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			ptx_mbar_arrive(ptx_smem(&sh.q_empty[q]));
		if (++q == MOE_QUEUE) {
			q = 0;
			qphase ^= 1;
		}
	}
}

template <int NTMAX, int WK, int G>
__global__ void __launch_bounds__(MOE_THREADS, 1) moe_i4_kernel(const struct moe_i4 a)
{
	using S = moe_shape<NTMAX, WK, G>;
	extern __shared__ uint8_t dynamic[];
	__shared__ struct moe_shared<NTMAX> sh;
	const uint32_t warp = threadIdx.x / 32;
	struct moe_ring r;

	r.base = (ptx_smem(dynamic) + 127u) & ~127u;
	r.full = ptx_smem(sh.full);
	r.empty = ptx_smem(sh.empty);
	r.stage = r.phase = 0;
	if (threadIdx.x == 0) {
		for (uint32_t i = 0; i < S::STAGES; i++) {
			ptx_mbar_init(r.full + 8 * i, 2);
			ptx_mbar_init(r.empty + 8 * i, MOE_CONSUMERS);
		}
		for (uint32_t i = 0; i < MOE_QUEUE; i++) {
			ptx_mbar_init(ptx_smem(&sh.q_full[i]), 1);
			ptx_mbar_init(ptx_smem(&sh.q_ready[i]), 1);
			ptx_mbar_init(ptx_smem(&sh.q_empty[i]), MOE_CONSUMERS);
		}
		ptx_fence_async();
	}
	__syncthreads();
	ptx_grid_wait();
	if (warp < MOE_CONSUMERS)
		consumer<NTMAX, WK, G>(a, sh, r.base + S::STAGES * S::STAGE, r);
	else if (warp == MOE_CONSUMERS)
		weight_producer<NTMAX, WK, G>(a, sh, r);
	else
		token_producer<NTMAX, WK, G>(a, sh, r);
}

#endif /* KVK_MOE_INT4_CUH */
