/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_wide.cuh - INT4 weights times many tokens an expert, with wgmma: the product's
 * kernel; included once per group size. moe_int4_wide.cu has the steps around it.
 *
 * A unit is 256 rows of one expert (eight packed row tiles) times a tile of up to N tokens;
 * what is multiplied is the tile's tokens rounded up (wide_pick).
 * Each of eight consumer warps has a brick of 32 rows per step of 128 columns, makes f16
 * of it in registers, with its scale times 64 (exact: 3 bits of q and 8 of a bf16 scale),
 * and a warpgroup multiplies its two halves as 64 rows each. Tokens lie in shared memory in
 * two swizzled panels of 64 columns, put in the order in which a lane's word holds its
 * weights (wide_pack), and come as they are by bulk copies, as do the bricks: one lane
 * feeds a ring of stages that never drains between units.
 *
 * Units are claimed in the order of moe_unit_where() from one counter by the feeding warp of
 * whichever CTA is free.
 */
#ifndef KVK_MOE_INT4_WIDE_CUH
#define KVK_MOE_INT4_WIDE_CUH

#include "moe_int4_wide.h"
#include "moe_pack.h"
#include "moe_plan.cuh"
#include "moe_ptx.cuh"
#include "moe_start.cuh"
#include "moe_wgmma.cuh"

#define WIDE_WARPS     8u
#define WIDE_USERS     (WIDE_WARPS * 32u)
#define WIDE_THREADS   (WIDE_USERS + 128u) /* a warpgroup feeds, or one lane of it */
#define WIDE_SMEM      (224u * 1024u)
#define WIDE_TURN      (16u * 128u) /* where a warp turns its results over */
#define WIDE_SCALE     64.0f
#define WIDE_QUEUE     2u /* units the feeding warp may be ahead */
#define WIDE_REGS_USE  232
#define WIDE_REGS_FEED 40

static_assert(WIDE_REGS_USE * 256 + WIDE_REGS_FEED * 128 <= 168 * 384,
	      "the CTA's register pool is 168 per thread");

template <int N, int G> struct wide_size {
	static constexpr uint32_t BRICK = KVK_BRICK_NIBBLES + 64u * (KVK_BRICK_COLS / G);
	static constexpr uint32_t PANEL = N * 128u;
	static constexpr uint32_t TOKENS = 2u * PANEL;
	static constexpr uint32_t STAGE = TOKENS + WIDE_WARPS * BRICK;
	static constexpr uint32_t FIT = (WIDE_SMEM - WIDE_WARPS * WIDE_TURN) / STAGE;
	static constexpr uint32_t STAGES = FIT > 8u ? 8u : FIT;
	static constexpr uint32_t DYNAMIC =
		STAGES * STAGE + WIDE_WARPS * WIDE_TURN + 1024u;
};

struct wide_bars {
	uint64_t full[8], empty[8];
	uint64_t q_full[WIDE_QUEUE], q_empty[WIDE_QUEUE];
	uint4 unit[WIDE_QUEUE]; /* tile, row block, 0; no tokens: the end */
};

struct wide_ring {
	uint32_t tokens, bricks; /* shared addresses of stage 0 */
	uint32_t full, empty;
	uint32_t stage, phase;
	uint32_t units; /* taken from the queue */
};

template <uint32_t STAGES> __device__ __forceinline__ void wide_next(struct wide_ring &r)
{
	if (++r.stage == STAGES) {
		r.stage = 0;
		r.phase ^= 1;
	}
}

/* ------------------------------------------------------------------------------- feeding
 */

/* All stages of a unit; a warp. */
template <int N, int G>
__device__ __forceinline__ void wide_feed(const struct moe_wide &a,
					  const struct wide_mat &m, const uint8_t *panels,
					  uint2 tile, uint32_t rb, struct wide_ring &r)
{
	using S = wide_size<N, G>;
	const uint32_t lane = threadIdx.x % 32, n = tile.x >> 16;
	const uint32_t m0 = rb * WIDE_WARPS, nm = min(WIDE_WARPS, m.mtiles - m0);
	const uint8_t *w = m.base + (tile.x & 0xffffu) * m.expert_bytes;
	const uint64_t panel = (uint64_t)a.nr_slots * 128u;
	const uint8_t *x = panels + tile.y * 128ull;

	for (uint32_t k = 0; k < m.kbricks; k++, wide_next<S::STAGES>(r)) {
		const uint32_t bar = r.full + 8 * r.stage;
		const uint32_t bricks = r.bricks + r.stage * WIDE_WARPS * S::BRICK;

		ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
		if (lane == 0)
			ptx_mbar_expect(bar, nm * S::BRICK + 2 * n * 128u);
		__syncwarp();
		if (m.wl == WIDE_WARPS) {
			if (lane == 0)
				ptx_bulk(bricks,
					 w + (uint64_t)(m0 * m.kbricks + k * WIDE_WARPS) *
							 S::BRICK,
					 nm * S::BRICK, bar);
		} else if (lane < nm) {
			ptx_bulk(bricks + lane * S::BRICK,
				 w + (uint64_t)((m0 + lane) * m.kbricks + k) * S::BRICK,
				 S::BRICK, bar);
		}
		if (lane >= 30)
			ptx_bulk(r.tokens + r.stage * S::TOKENS + (lane - 30) * S::PANEL,
				 x + (2 * k + lane - 30) * panel, n * 128u, bar);
	}
}

/* ------------------------------------------------------------------------------ products
 */

/* A word of eight weights of a row, times the row's scale: pairs of neighbours. */
__device__ __forceinline__ void wide_weights(uint32_t w, uint32_t scale, uint32_t (&p)[4])
{
#pragma unroll
	for (int j = 0; j < 4; j++) {
		/* 1024 + n, or 1024 + 16 n: to n - 8 */
		uint32_t v = ptx_and_or(w >> (j / 2 * 8),
					j % 2 ? 0x00f000f0u : 0x000f000fu, 0x64006400u);

		v = j % 2 ? ptx_fma_f16x2(v, 0x2c002c00u, 0xd480d480u)
			  : ptx_fma_f16x2(v, 0x3c003c00u, 0xe408e408u);
		p[j] = ptx_mul_f16x2(v, scale);
	}
}

/* Scales of a lane's four rows for columns 32 kb .., as f16 pairs. */
template <int G>
__device__ __forceinline__ void wide_scales(uint32_t addr, int kb, uint32_t is_f16,
					    uint32_t (&s)[4])
{
	const uint32_t g = threadIdx.x % 32 / 4;
	const uint2 v = ptx_lds64(addr + (g * (128 / G) + kb * 32 / G) * 8u);
	const uint32_t raw[4] = {v.x & 0xffffu, v.x >> 16, v.y & 0xffffu, v.y >> 16};

#pragma unroll
	for (int i = 0; i < 4; i++) {
		const float f = WIDE_SCALE * (is_f16 ? ptx_f16_f32(raw[i])
						     : __uint_as_float(raw[i] << 16));

		s[i] = ptx_f16x2(f, f);
	}
}

/* A warp's A operands of 32 columns: [row half][k16][register] */
template <int G>
__device__ __forceinline__ void wide_operand(uint32_t brick, int kb, uint32_t is_f16,
					     uint32_t (&s)[4], uint32_t (&a)[2][2][4])
{
	const uint4 w = ptx_lds128(brick + kb * 512u + threadIdx.x % 32 * 16u);
	uint32_t p[4][4];

	if (kb * 32 % G == 0)
		wide_scales<G>(brick + KVK_BRICK_NIBBLES, kb, is_f16, s);
	wide_weights(w.x, s[0], p[0]);
	wide_weights(w.y, s[1], p[1]);
	wide_weights(w.z, s[2], p[2]);
	wide_weights(w.w, s[3], p[3]);
#pragma unroll
	for (int i = 0; i < 16; i++) /* register: row + 8 first, then column + 8 */
		a[i / 8][i / 4 % 2][i % 4] =
			p[i / 8 * 2 + i % 2][i / 4 % 2 * 2 + i % 4 / 2];
}

/* All columns of a unit. @acc: [row half][fragment] */
template <int N, int NMAX, int G>
__device__ __forceinline__ void wide_unit(float (&acc)[2][N / 2], uint32_t kbricks,
					  uint32_t is_f16, struct wide_ring &r)
{
	using S = wide_size<NMAX, G>;
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	uint32_t a[2][2][2][4], s[4], before = 0;

#pragma unroll
	for (int i = 0; i < N; i++)
		acc[i / (N / 2)][i % (N / 2)] = 0.0f;
	for (uint32_t k = 0; k < kbricks; k++) {
		const uint32_t brick =
			r.bricks + (r.stage * WIDE_WARPS + warp) * S::BRICK;
		const uint64_t desc = wgm_desc(r.tokens + r.stage * S::TOKENS);

		ptx_mbar_wait(r.full + 8 * r.stage, r.phase);
#pragma unroll
		for (int kb = 0; kb < 4; kb++) {
			wide_operand<G>(brick, kb, is_f16, s, a[kb % 2]);
			wgm_fence();
#pragma unroll
			for (int i = 0; i < 4; i++)
				moe_wgmma<N>(acc[i % 2], a[kb % 2][i % 2][i / 2],
					     wgm_desc_at(desc, kb / 2 * (S::PANEL / 16) +
								       kb % 2 * 4 +
								       i / 2 * 2),
					     1);
			wgm_commit();
			wgm_wait<1>();
			/* the stage before has been read to its end */
			if (kb == 0 && k && lane == 0)
				ptx_mbar_arrive(before);
		}
		before = r.empty + 8 * r.stage;
		wide_next<S::STAGES>(r);
	}
	wgm_wait<0>();
	if (lane == 0)
		ptx_mbar_arrive(before);
	wgm_keep(acc[0]);
	wgm_keep(acc[1]);
}

/* ------------------------------------------------------------------------------- results
 */

/* The warp's share of where results are turned over: before the ring. */
__device__ __forceinline__ float *wide_turn(void)
{
	MOE_DYNAMIC(dynamic);

	return (float *)(dynamic + (-ptx_smem(dynamic) & 1023u) +
			 threadIdx.x / 32 * WIDE_TURN);
}

/* As f16: four values of one of NR lanes that share a scale, times it, and its inverse. */
template <int NR>
__device__ __forceinline__ uint2 wide_round(const float4 &v, float *ret_inverse)
{
	uint32_t top = max(max(__float_as_uint(v.x) & 0x7fffffffu,
			       __float_as_uint(v.y) & 0x7fffffffu),
			   max(__float_as_uint(v.z) & 0x7fffffffu,
			       __float_as_uint(v.w) & 0x7fffffffu));
	float scale;

#pragma unroll
	for (int o = 1; o < NR; o *= 2)
		top = max(top, __shfl_xor_sync(~0u, top, o));
	scale = moe_wide_scale(top);
	*ret_inverse = moe_wide_inverse(scale);
	return make_uint2(ptx_f16x2(v.x * scale, v.y * scale),
			  ptx_f16x2(v.z * scale, v.w * scale));
}

/* h of the warp's 16 columns, 16 tokens at a time through its own 2 KB: piece c of a token is
 * at c ^ half its number. */
template <int N>
__device__ __forceinline__ void wide_store_h(const struct moe_wide &a,
					     const float (&acc)[2][N / 2], uint2 tile,
					     uint32_t mtile)
{
	const uint32_t lane = threadIdx.x % 32, n = tile.x >> 16;
	float *mine = wide_turn(), back = 0.0f;

#pragma unroll
	for (uint32_t c = 0; c < N / 16; c++) {
		if (c * 16 >= n)
			continue;
		if (c % 2 == 0 && c * 16 + lane < n)
			back = __ldcg(&a.x_back[tile.y + c * 16 + lane]);
#pragma unroll
		for (uint32_t i = 0; i < 8; i++) {
			const uint32_t token = i / 4 * 8 + lane % 4 * 2 + i / 2 % 2;
			const uint32_t col = i % 2 * 8 + lane / 4;
			const uint32_t f = c * 8 + i / 4 * 4 + i / 2 % 2;
			const float b = __shfl_sync(~0u, back, c % 2 * 16 + token);
			const float gate = acc[i % 2][f] * b, up = acc[i % 2][f + 2] * b;

			mine[token * 16 + ((col / 4 ^ token / 2) & 3) * 4 + col % 4] =
				gate / (1.0f + __expf(-gate)) * up;
		}
		__syncwarp();
#pragma unroll
		for (uint32_t j = 0; j < 2; j++) {
			const uint32_t i = j * 8 + lane / 4, piece = lane % 4;
			const uint64_t pos = tile.y + c * 16 + i;
			float inverse;
			const uint2 v = wide_round<4>(
				*(const float4 *)(mine + i * 16 +
						  ((piece ^ i / 2) & 3) * 4),
				&inverse);

			if (c * 16 + i >= n)
				continue;
			*(uint2 *)(a.h_f16 + pos * a.inter + mtile * 16 + piece * 4) = v;
			if (piece == 0)
				a.h_scale[pos * (a.inter / 16) + mtile] = inverse;
		}
		__syncwarp();
	}
}

/* Tokens 16 at a time through the warp's own 2 KB: a lane has four rows of a token each, and
 * stored from there they would be sectors of 32 bytes. Piece c of a token is at c ^ its number. */
template <int N>
__device__ __forceinline__ void wide_store_out(const struct moe_wide &a,
					       const float (&acc)[2][N / 2], uint2 tile,
					       uint32_t mtile)
{
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, n = tile.x >> 16;
	float *mine = wide_turn();
	uint32_t slot = 0;
	float back = 0.0f;

#pragma unroll
	for (uint32_t c = 0; c < N / 16; c++) {
		if (c * 16 >= n)
			continue;
		if (c % 2 == 0 && c * 16 + lane < n) {
			slot = __ldcg(&a.list[tile.y + c * 16 + lane]);
			back = __ldcg(&a.h_back[tile.y + c * 16 + lane]);
		}
#pragma unroll
		for (uint32_t i = 0; i < 16; i++) {
			const uint32_t token = i / 8 * 8 + lane % 4 * 2 + i % 2;
			const uint32_t row = i / 4 % 2 * 16 + i / 2 % 2 * 8 + g;

			mine[token * 32 + ((row / 4 ^ token) & 7) * 4 + row % 4] =
				acc[i / 4 % 2][c * 8 + i / 8 * 4 + i / 2 % 2 * 2 + i % 2];
		}
		__syncwarp();
#pragma unroll
		for (uint32_t j = 0; j < 4; j++) {
			const uint32_t i = j * 4 + lane / 8;
			const uint64_t to = __shfl_sync(~0u, slot, c % 2 * 16 + i);
			const float f = __shfl_sync(~0u, back, c % 2 * 16 + i);
			float inverse;
			float4 v = *(const float4 *)(mine + i * 32 +
						     (lane % 8 ^ (i & 7)) * 4);

			v = make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
			const uint2 two = wide_round<8>(v, &inverse);

			if (c * 16 + i >= n)
				continue;
			*(uint2 *)(a.out_f16 + to * a.hidden + mtile * 32 +
				   lane % 8 * 4) = two;
			if (lane % 8 == 0)
				a.out_back[to * (a.hidden / 32) + mtile] = inverse;
		}
		__syncwarp();
	}
}

/* A unit of up to N tokens in a ring for NMAX. */
template <int N, int NMAX, int G, bool SECOND>
__device__ __forceinline__ void wide_whole(const struct moe_wide &a, uint2 tile,
					   uint32_t rb, struct wide_ring &r)
{
	const struct wide_mat &m = SECOND ? a.w2 : a.w13;
	const uint32_t mtile = rb * WIDE_WARPS + threadIdx.x / 32;
	float acc[2][N / 2];

	wide_unit<N, NMAX, G>(acc, m.kbricks, a.scale_f16, r);
	if (mtile >= m.mtiles)
		return;
	if constexpr (SECOND)
		wide_store_out<N>(a, acc, tile, mtile);
	else
		wide_store_h<N>(a, acc, tile, mtile);
}

/* As many tokens as are there, rounded up. With one more variant the compiler finds no
 * registers for any of them. */
template <int NMAX, int G, bool SECOND>
__device__ __forceinline__ void wide_pick(const struct moe_wide &a, uint2 tile,
					  uint32_t rb, struct wide_ring &r)
{
	constexpr int LOW = NMAX == 128 ? 80 : 32, HIGH = NMAX == 128 ? 96 : 48;
	const uint32_t n = tile.x >> 16;

	if (n <= LOW)
		wide_whole<LOW, NMAX, G, SECOND>(a, tile, rb, r);
	else if (n <= HIGH)
		wide_whole<HIGH, NMAX, G, SECOND>(a, tile, rb, r);
	else
		wide_whole<NMAX, NMAX, G, SECOND>(a, tile, rb, r);
}

/* Claim units, tell the others, copy; a warp. The next claim is under way meanwhile. */
template <int N, int G, bool SECOND>
__device__ __forceinline__ void wide_claim(const struct moe_wide &a,
					   struct wide_bars &bars, struct wide_ring &r)
{
	const struct wide_mat &m = SECOND ? a.w2 : a.w13;
	const uint32_t nr_tiles = __ldcg(a.nr_tiles), lane = threadIdx.x % 32;
	const uint32_t rblocks = (m.mtiles + WIDE_WARPS - 1) / WIDE_WARPS;

	for (uint32_t u = blockIdx.x, next = 0;; r.units++) {
		const uint32_t q = r.units % WIDE_QUEUE;
		const bool work = u < nr_tiles * rblocks;
		const struct moe_where at =
			moe_unit_where(work ? u : 0, nr_tiles, rblocks);
		const uint2 tile = work ? __ldcg(&a.tiles[at.tile]) : make_uint2(0, 0);

		ptx_mbar_wait(ptx_smem(&bars.q_empty[q]), r.units / WIDE_QUEUE % 2 ^ 1);
		if (lane == 0) {
			bars.unit[q] = make_uint4(tile.x, tile.y, at.rb, 0);
			ptx_mbar_arrive(ptx_smem(&bars.q_full[q]));
			next = gridDim.x + atomicAdd(&a.claim[SECOND], 1u);
		}
		if (!work)
			return;
		wide_feed<N, G>(a, m, SECOND ? a.h_panels : a.x_panels, tile, at.rb, r);
		u = __shfl_sync(~0u, next, 0);
	}
}

/* The next unit; a warp. */
__device__ __forceinline__ uint4 wide_take(struct wide_bars &bars, struct wide_ring &r)
{
	const uint32_t q = r.units % WIDE_QUEUE;
	uint4 unit;

	ptx_mbar_wait(ptx_smem(&bars.q_full[q]), r.units / WIDE_QUEUE % 2);
	unit = bars.unit[q];
	__syncwarp();
	if (threadIdx.x % 32 == 0)
		ptx_mbar_arrive(ptx_smem(&bars.q_empty[q]));
	r.units++;
	return unit;
}

template <int N, int G, bool SECOND>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
	wide_kernel(const __grid_constant__ struct moe_wide a)
{
	using S = wide_size<N, G>;
	MOE_DYNAMIC(dynamic);
	MOE_SHARED(struct wide_bars, bars);
	struct wide_ring r = {};

	r.tokens = ((ptx_smem(dynamic) + 1023u) & ~1023u) + WIDE_WARPS * WIDE_TURN;
	r.bricks = r.tokens + S::STAGES * S::TOKENS;
	r.full = ptx_smem(bars.full);
	r.empty = ptx_smem(bars.empty);
	if (threadIdx.x == 0) {
		for (uint32_t i = 0; i < S::STAGES; i++) {
			ptx_mbar_init(r.full + 8 * i, 1);
			ptx_mbar_init(r.empty + 8 * i, WIDE_WARPS);
		}
		for (uint32_t i = 0; i < WIDE_QUEUE; i++) {
			ptx_mbar_init(ptx_smem(&bars.q_full[i]), 1);
			ptx_mbar_init(ptx_smem(&bars.q_empty[i]), WIDE_WARPS);
		}
		ptx_fence_async();
	}
	__syncthreads();
	ptx_grid_launch();
	ptx_grid_wait();
	if (threadIdx.x >= WIDE_USERS) {
		SM90_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WIDE_REGS_FEED));
		if (threadIdx.x < WIDE_USERS + 32)
			wide_claim<N, G, SECOND>(a, bars, r);
	} else {
		SM90_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WIDE_REGS_USE));
		for (uint4 unit; (unit = wide_take(bars, r)).x;)
			wide_pick<N, G, SECOND>(a, make_uint2(unit.x, unit.y), unit.z, r);
	}
}

template <int N, int G>
static int wide_launch(const struct moe_wide *a, int second, void *stream)
{
	return moe_start(second ? wide_kernel<N, G, true> : wide_kernel<N, G, false>,
			 dim3(moe_sms()), WIDE_THREADS, wide_size<N, G>::DYNAMIC, a,
			 stream);
}

template <int G> static int wide_gemm(const struct moe_wide *a, int second, void *stream)
{
	return a->tile_tokens == 64 ? wide_launch<64, G>(a, second, stream)
				    : wide_launch<128, G>(a, second, stream);
}

#endif /* KVK_MOE_INT4_WIDE_CUH */
