/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_chunk.cuh - E4M3 weights times the e4m3 tokens of a prefill chunk, with wgmma on
 * e4m3: the product's kernel. moe_fp8_chunk.cu has the steps around it.
 *
 * A unit is a tile of up to 128 tokens times 256 rows of one expert: 256 rows of W2, or 128
 * gate rows and the 128 up rows of the same columns. A step is 128 columns: two tensor
 * copies of 128 rows, one bulk copy of the tokens, and a table of what each token's sums
 * are multiplied with (its own scale times the weights' block's), which a warp of its own
 * writes. Tokens are the rows of the products: a lane has two of them, and so two factors a
 * step; as columns they would be 32 factors from shared memory, which the operands fill
 * already. Each of two warpgroups has 64 tokens and all rows, box after box; of a tile of up to
 * 64 both have all tokens and half of the rows. A step's sums are added to a lane's own in
 * f32: the tensor core's keep 14 bits only. While one warpgroup adds, the other multiplies.
 *
 * The first product rounds h to e4m3, a scale per token and 128 columns, which are
 * exactly a unit's: no float of h leaves the SM. Results go to memory in whole lines through
 * 2 KB of a warp's own, so that no warp waits for another; but two that share a token's 128
 * columns of h exchange the largest (named barrier 1).
 *
 * Units are claimed in order from one counter by the copying warp of whichever CTA is free,
 * which so are near each other in time where they are near in memory.
 */
#ifndef KVK_MOE_FP8_CHUNK_CUH
#define KVK_MOE_FP8_CHUNK_CUH

#include <cuda.h>
#include <errno.h>
#include "fp8.h"
#include "moe_fp8_chunk.h"
#include "moe_loads.h"
#include "moe_plan.cuh"
#include "moe_ptx.cuh"
#include "moe_wgmma.cuh"
#include "quant.cuh"

#define FC_USERS     256u
#define FC_QUEUE     2u		       /* units the feeding warps may be ahead */
#define FC_THREADS   (FC_USERS + 128u) /* of the last warpgroup two warps feed */
#define FC_STAGES    4u
#define FC_BOX	     (128u * 128u)
#define FC_PANEL     (MOE_CHUNK_TOKENS * 128u)
#define FC_STAGE     (2u * FC_BOX + FC_PANEL)
#define FC_TURN	     (16u * 128u) /* where a warp turns its results over */
#define FC_DYNAMIC   (FC_STAGES * FC_STAGE + 8u * FC_TURN + 1024u)
#define FC_REGS_USE  216
#define FC_REGS_FEED 72

static_assert(FC_REGS_USE * 256 + FC_REGS_FEED * 128 <= 168 * 384,
	      "the CTA's register pool is 168 per thread");

/* struct fc_args - a launch's kernel parameters */
struct fc_args {
	CUtensorMap map; /* all experts' rows of one matrix */
	struct moe_chunk c;
	const float *scales;
	uint32_t rows; /* of an expert's matrix; FIRST: gate rows alone */
	uint32_t cols;
};

struct fc_shared {
	uint64_t full[FC_STAGES], empty[FC_STAGES];
	uint64_t q_full[FC_QUEUE], q_empty[FC_QUEUE];
	uint4 unit[FC_QUEUE]; /* tile, row block, 0; no tokens: the end */
	float factor[FC_STAGES][2][MOE_CHUNK_TOKENS];
	uint32_t amax[2][2][64]; /* [unit's turn][warpgroup][token] */
};

struct fc_ring {
	uint32_t base; /* shared address of stage 0: two boxes, a panel */
	uint32_t stage, phase;
	uint32_t units; /* taken from the queue */
};

__device__ __forceinline__ void fc_next(struct fc_ring &r)
{
	if (++r.stage == FC_STAGES) {
		r.stage = 0;
		r.phase ^= 1;
	}
}

__device__ __forceinline__ void fc_wait_empty(struct fc_shared &sh,
					      const struct fc_ring &r)
{
	ptx_mbar_wait(ptx_smem(&sh.empty[r.stage]), r.phase ^ 1);
}

/* ------------------------------------------------------------------------------- feeding
 */

/* Copies of a unit; one lane. */
template <bool SECOND>
__device__ __forceinline__ void fc_feed(const struct fc_args &a, struct fc_shared &sh,
					uint2 tile, uint32_t rb, struct fc_ring &r)
{
	const uint32_t n = tile.x >> 16, expert = tile.x & 0xffffu;
	const uint32_t row0 =
		SECOND ? expert * a.rows + rb * 256 : expert * 2 * a.rows + rb * 128;
	const uint32_t row1 = row0 + (SECOND ? 128 : a.rows);
	const uint64_t panel = (uint64_t)a.c.nr_slots * 128u;
	const uint8_t *x = (SECOND ? a.c.h_codes : a.c.x_codes) + tile.y * 128ull;

	for (uint32_t k = 0; k < a.cols / 128; k++, fc_next(r)) {
		const uint32_t bar = ptx_smem(&sh.full[r.stage]);
		const uint32_t at = r.base + r.stage * FC_STAGE;

		fc_wait_empty(sh, r);
		ptx_mbar_expect(bar, 2 * FC_BOX + n * 128u);
		tma_load_4d(at, &a.map, bar, (int)(k * 128), (int)row0, 0, 0);
		tma_load_4d(at + FC_BOX, &a.map, bar, (int)(k * 128), (int)row1, 0, 0);
		ptx_bulk(at + 2 * FC_BOX, x + k * panel, n * 128u, bar);
	}
}

/* struct fc_source - where a lane's share of a unit's factors comes from */
struct fc_source {
	const float *w0, *w1, *x;
	uint64_t step; /* of x */
	uint32_t n, wide;
};

/* Scales of a step: four tokens' (lane, lane + 32 ...) and the two blocks'. */
__device__ __forceinline__ void fc_scales(const struct fc_source &s, uint32_t k,
					  float (&x)[4], float (&w)[2])
{
#pragma unroll
	for (uint32_t i = 0; i < 4; i++)
		x[i] = k < s.wide && threadIdx.x % 32 + 32 * i < s.n
			       ? __ldcg(s.x + k * s.step + 32 * i)
			       : 0.0f;
	w[0] = k < s.wide ? __ldg(s.w0 + k) : 0.0f;
	w[1] = k < s.wide ? __ldg(s.w1 + k) : 0.0f;
}

/* Factors of a unit; a warp. What memory must give is asked for four steps ahead. */
template <bool SECOND>
__device__ __forceinline__ void fc_factors(const struct fc_args &a, struct fc_shared &sh,
					   uint2 tile, uint32_t rb, struct fc_ring &r)
{
	const uint32_t lane = threadIdx.x % 32, wide = a.cols / 128;
	const uint32_t expert = tile.x & 0xffffu, blocks = a.rows / 128;
	const uint32_t b0 = SECOND ? expert * blocks + rb * 2 : expert * 2 * blocks + rb;
	const uint32_t b1 =
		SECOND ? expert * blocks + min(rb * 2 + 1, blocks - 1) : b0 + blocks;
	const struct fc_source s = {a.scales + (uint64_t)b0 * wide,
				    a.scales + (uint64_t)b1 * wide,
				    (SECOND ? a.c.h_scales : a.c.x_scales) + tile.y +
					    lane,
				    a.c.nr_slots,
				    tile.x >> 16,
				    wide};
	float x[4][4], w[4][2];

#pragma unroll
	for (uint32_t j = 0; j < 4; j++)
		fc_scales(s, j, x[j], w[j]);
	for (uint32_t from = 0; from < wide; from += 4) {
#pragma unroll
		for (uint32_t j = 0; j < 4; j++) {
			if (from + j >= wide)
				continue;
			fc_wait_empty(sh, r);
#pragma unroll
			for (uint32_t i = 0; i < 4; i++) {
				sh.factor[r.stage][0][lane + 32 * i] = x[j][i] * w[j][0];
				sh.factor[r.stage][1][lane + 32 * i] = x[j][i] * w[j][1];
			}
			__syncwarp();
			if (lane == 0)
				ptx_mbar_arrive(ptx_smem(&sh.full[r.stage]));
			fc_next(r);
			fc_scales(s, from + j + 4, x[j], w[j]);
		}
	}
}

/* ------------------------------------------------------------------------------ products
 */

/* A warpgroup's tokens of the tile, and a lane's: that one and the eighth after it. */
template <int W> __device__ __forceinline__ uint32_t fc_first_token(void)
{
	return (W == 128 ? threadIdx.x / 128 * 64 : 0) + threadIdx.x % 128 / 32 * 16;
}

template <int W> __device__ __forceinline__ uint32_t fc_token(void)
{
	return fc_first_token<W>() + threadIdx.x % 32 / 4;
}

/* All columns of a unit. @acc: [box][fragment] of 64 tokens times W rows */
template <int W>
__device__ __forceinline__ void fc_unit(float (&acc)[2][W / 2], struct fc_shared &sh,
					uint32_t steps, struct fc_ring &r)
{
	const uint32_t wg = threadIdx.x / 128, half = wg * (FC_BOX / 2);

#pragma unroll
	for (int i = 0; i < W; i++)
		acc[i / (W / 2)][i % (W / 2)] = 0.0f;
	for (uint32_t k = 0; k < steps; k++, fc_next(r)) {
		const uint32_t at = r.base + r.stage * FC_STAGE;
		const uint64_t x = wgm_desc(at + 2 * FC_BOX + (W == 128 ? half : 0));

		ptx_mbar_wait(ptx_smem(&sh.full[r.stage]), r.phase);
#pragma unroll
		for (uint32_t m = 0; m < 2 && !MOE_LOADS_ONLY; m++) {
			const uint64_t w =
				wgm_desc(at + m * FC_BOX + (W == 128 ? 0 : half));
			const float *f = sh.factor[r.stage][m] + fc_token<W>();
			float part[W / 2];

			wgm_fence();
#pragma unroll
			for (int kk = 0; kk < 4; kk++)
				moe_wgmma_e4m3<W>(part, wgm_desc_at(x, kk * 2),
						  wgm_desc_at(w, kk * 2), kk);
			wgm_commit();
			const float f0 = f[0], f8 = f[8];

			wgm_wait<0>();
			wgm_keep(part);
#pragma unroll
			for (int i = 0; i < W / 2; i++)
				acc[m][i] += part[i] * (i % 4 / 2 ? f8 : f0);
		}
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			ptx_mbar_arrive(ptx_smem(&sh.empty[r.stage]));
	}
}

/* ------------------------------------------------------------------------------- results
 */

/* SwiGLU in place of the gates; the largest |h| of the lane's two tokens, NaN left out. */
template <int W>
__device__ __forceinline__ void fc_swiglu(float (&acc)[2][W / 2], uint32_t (&top)[2])
{
#pragma unroll
	for (int i = 0; i < W / 2; i++) {
		const float gate = acc[0][i];
		uint32_t bits;

		acc[0][i] = __fdividef(gate, 1.0f + __expf(-gate)) * acc[1][i];
		bits = __float_as_uint(acc[0][i]) & 0x7fffffffu;
		top[i % 4 / 2] = max(top[i % 4 / 2], bits > 0x7f800000u ? 0u : bits);
	}
#pragma unroll
	for (int h = 0; h < 2; h++) {
		top[h] = max(top[h], __shfl_xor_sync(~0u, top[h], 1));
		top[h] = max(top[h], __shfl_xor_sync(~0u, top[h], 2));
	}
}

/* The other warpgroup has the other 64 columns of the same tokens. */
__device__ __forceinline__ void fc_amax(struct fc_shared &sh, uint32_t (&top)[2],
					uint32_t turn)
{
	const uint32_t wg = threadIdx.x / 128, token = fc_token<64>();

	if (threadIdx.x % 4 == 0) {
		sh.amax[turn % 2][wg][token] = top[0];
		sh.amax[turn % 2][wg][token + 8] = top[1];
	}
	/* who is a unit ahead writes the other half of amax, and waits here for the other */
	ptx_bar_sync(1, FC_USERS);
	top[0] = max(top[0], sh.amax[turn % 2][wg ^ 1][token]);
	top[1] = max(top[1], sh.amax[turn % 2][wg ^ 1][token + 8]);
}

/* Codes of h, two at a time, to the warp's 16 rows of 128 bytes, as they are in memory. */
template <int W>
__device__ __forceinline__ void fc_turn_h(const float (&h)[W / 2], uint8_t *mine,
					  const struct kvk_quant (&q)[2])
{
	const uint32_t g = threadIdx.x % 32 / 4;
	const uint32_t first = W == 128 ? 0 : threadIdx.x / 128 * 64;

#pragma unroll
	for (uint32_t i = 0; i < W / 4; i++) {
		const uint32_t col = first + i / 2 * 8 + threadIdx.x % 4 * 2;
		float v[2] = {h[2 * i], h[2 * i + 1]};

		kvk_quant_div(v, q[i % 2]);
		*(uint16_t *)(mine + (i % 2 * 8 + g) * 128 + ((col / 16 ^ g) & 7) * 16 +
			      col % 16) = (uint16_t)arch_f32_e4m3(v[0], v[1]);
	}
}

/* h of the unit's 128 columns, its codes and scales. @mine: the warp's 2 KB */
template <int W>
__device__ __forceinline__ void
fc_store_h(const struct fc_args &a, struct fc_shared &sh, float (&acc)[2][W / 2],
	   uint2 tile, const uint4 &unit, uint32_t turn, uint8_t *mine)
{
	const uint32_t n = tile.x >> 16, rb = unit.z, wg = threadIdx.x / 128;
	const uint32_t lane = threadIdx.x % 32, from = fc_first_token<W>();
	const uint64_t at = (uint64_t)rb * a.c.nr_slots + tile.y + from;
	uint32_t top[2] = {};
	struct kvk_quant q[2];

	fc_swiglu<W>(acc, top);
	if (W == 64)
		fc_amax(sh, top, turn);
#pragma unroll
	for (uint32_t h = 0; h < 2; h++) {
		const uint32_t i = h * 8 + lane / 4;
		const float scale = kvk_fp8_act_scale(__uint_as_float(top[h]));

		q[h] = kvk_quant_make(scale);
		if (lane % 4 == 0 && from + i < n && (W == 128 || !wg))
			a.c.h_scales[at + i] = scale;
	}
	fc_turn_h<W>(acc[0], mine, q);
	__syncwarp();
#pragma unroll
	for (uint32_t j = 0; j < W / 32; j++) {
		const uint32_t i = (j * 32 + lane) / (W / 16);
		const uint32_t c = W == 128 ? lane % 8 : (wg * 4 + lane % 4) ^ (i & 7);

		if (from + i < n)
			*(uint4 *)(a.c.h_codes + (at + i) * 128 + c * 16) =
				*(const uint4 *)(mine + i * 128 + c * 16);
	}
	__syncwarp();
}

/* The slot of the warp's token number lane % 16. */
template <int W>
__device__ __forceinline__ uint32_t fc_slot(const struct fc_args &a, uint2 tile)
{
	const uint32_t token = fc_first_token<W>() + threadIdx.x % 16;

	return token < tile.x >> 16 ? __ldcg(&a.c.list[tile.y + token]) : 0;
}

/* A warp's 16 tokens, 64 columns at a time: through its 2 KB, piece c of row i at c ^ (i & 7),
 * so that whole lines are stored. */
template <int W>
__device__ __forceinline__ void fc_store_out(const struct fc_args &a,
					     const float (&acc)[2][W / 2], uint2 tile,
					     uint32_t rb, uint32_t slot, uint8_t *mine)
{
	const uint32_t n = tile.x >> 16, lane = threadIdx.x % 32;
	const uint32_t wg = threadIdx.x / 128, from = fc_first_token<W>();
	/* lane's row of an 8 x 8 matrix: token lane % 8 (+ 8), eight columns on from 16 on */
	const uint32_t row = lane % 16, to = ptx_smem(mine) + row * 128;

#pragma unroll
	for (uint32_t c = 0; c < W / 32; c++) {
		const float *v = &acc[c / (W / 64)][c % (W / 64) * 32];
		const uint32_t col =
			rb * 256 + (W == 128 ? c * 64 : c * 128 + wg * 64) + lane % 8 * 8;

#pragma unroll
		for (uint32_t j = 0; j < 4; j++)
			ptx_stmatrix(to + ((2 * j + lane / 16) ^ (row & 7)) * 16,
				     ptx_bf16x2(v[8 * j], v[8 * j + 1]),
				     ptx_bf16x2(v[8 * j + 2], v[8 * j + 3]),
				     ptx_bf16x2(v[8 * j + 4], v[8 * j + 5]),
				     ptx_bf16x2(v[8 * j + 6], v[8 * j + 7]));
		__syncwarp();
#pragma unroll
		for (uint32_t j = 0; j < 4; j++) {
			const uint32_t i = j * 4 + lane / 8;
			const uint64_t s = __shfl_sync(~0u, slot, i);

			if (from + i < n && col < a.c.hidden)
				*(uint4 *)(a.c.out + s * a.c.hidden + col) =
					*(const uint4 *)(mine + i * 128 +
							 (lane % 8 ^ (i & 7)) * 16);
		}
		__syncwarp();
	}
}

/* ------------------------------------------------------------------------------- the way
 */

template <int W, bool SECOND>
__device__ __forceinline__ void fc_whole(const struct fc_args &a, struct fc_shared &sh,
					 const uint4 &unit, struct fc_ring &r,
					 uint8_t *mine)
{
	const uint2 tile = make_uint2(unit.x, unit.y);
	const uint32_t slot = SECOND ? fc_slot<W>(a, tile) : 0;
	float acc[2][W / 2];

	fc_unit<W>(acc, sh, a.cols / 128, r);
	if constexpr (SECOND)
		fc_store_out<W>(a, acc, tile, unit.z, slot, mine);
	else
		fc_store_h<W>(a, sh, acc, tile, unit, r.units, mine);
}

/* The next unit; all lanes of a warp that is not the one that claims. */
__device__ __forceinline__ uint4 fc_take(struct fc_shared &sh, struct fc_ring &r)
{
	const uint32_t q = r.units % FC_QUEUE;
	uint4 unit;

	ptx_mbar_wait(ptx_smem(&sh.q_full[q]), r.units / FC_QUEUE % 2);
	unit = sh.unit[q];
	__syncwarp();
	if (threadIdx.x % 32 == 0)
		ptx_mbar_arrive(ptx_smem(&sh.q_empty[q]));
	r.units++;
	return unit;
}

template <bool SECOND>
__device__ __forceinline__ void fc_use(const struct fc_args &a, struct fc_shared &sh,
				       struct fc_ring r, uint8_t *turn)
{
	uint8_t *mine = turn + threadIdx.x / 32 * FC_TURN;

	for (uint4 unit; (unit = fc_take(sh, r)).x;) {
		if (unit.x >> 16 > 64)
			fc_whole<128, SECOND>(a, sh, unit, r, mine);
		else
			fc_whole<64, SECOND>(a, sh, unit, r, mine);
	}
}

/* Claim units, tell everybody, copy; one lane. */
template <bool SECOND>
__device__ __forceinline__ void fc_claim(const struct fc_args &a, struct fc_shared &sh,
					 uint32_t rblocks, struct fc_ring r)
{
	const uint32_t nr_tiles = __ldcg(a.c.nr_tiles), units = nr_tiles * rblocks;

	for (uint32_t u = blockIdx.x;; r.units++) {
		const uint32_t q = r.units % FC_QUEUE;
		const struct moe_where at = moe_unit_where(u, nr_tiles, rblocks);
		const uint2 tile =
			u < units ? __ldcg(&a.c.tiles[at.tile]) : make_uint2(0, 0);

		ptx_mbar_wait(ptx_smem(&sh.q_empty[q]), r.units / FC_QUEUE % 2 ^ 1);
		sh.unit[q] = make_uint4(tile.x, tile.y, at.rb, 0);
		ptx_mbar_arrive(ptx_smem(&sh.q_full[q]));
		if (u >= units)
			return;
		u = gridDim.x + atomicAdd(&a.c.claim[SECOND], 1u);
		fc_feed<SECOND>(a, sh, tile, at.rb, r);
	}
}

template <bool SECOND>
__global__ void __launch_bounds__(FC_THREADS, 1)
	fc_kernel(const __grid_constant__ struct fc_args a)
{
	MOE_DYNAMIC(dynamic);
	MOE_SHARED(struct fc_shared, sh);
	const uint32_t rblocks = SECOND ? (a.rows + 255) / 256 : a.rows / 128;
	const uint32_t pad = -ptx_smem(dynamic) & 1023u;
	struct fc_ring r = {};

	r.base = ptx_smem(dynamic) + pad;
	if (threadIdx.x == 0) {
		for (uint32_t i = 0; i < FC_STAGES; i++) {
			ptx_mbar_init(ptx_smem(&sh.full[i]), 2);
			ptx_mbar_init(ptx_smem(&sh.empty[i]), FC_USERS / 32);
		}
		for (uint32_t i = 0; i < FC_QUEUE; i++) {
			ptx_mbar_init(ptx_smem(&sh.q_full[i]), 1);
			ptx_mbar_init(ptx_smem(&sh.q_empty[i]), FC_USERS / 32 + 1);
		}
		ptx_fence_async();
	}
	__syncthreads();
	ptx_grid_launch();
	ptx_grid_wait();
	if (threadIdx.x < FC_USERS) {
		SM90_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(FC_REGS_USE));
		fc_use<SECOND>(a, sh, r, dynamic + pad + FC_STAGES * FC_STAGE);
		return;
	}
	SM90_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FC_REGS_FEED));
	if (threadIdx.x == FC_USERS) {
		fc_claim<SECOND>(a, sh, rblocks, r);
	} else if (threadIdx.x / 32 == FC_USERS / 32 + 1) {
		for (uint4 unit; (unit = fc_take(sh, r)).x;)
			fc_factors<SECOND>(a, sh, make_uint2(unit.x, unit.y), unit.z, r);
	}
}

#endif /* KVK_MOE_FP8_CHUNK_CUH */
