/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_wide.cuh - INT4 weights times many tokens an expert, with wgmma: the product's
 * kernel; included once per group size. moe_int4_wide.cu has the steps around it,
 * moe_int4_wide_store.cuh what becomes of a unit's sums.
 *
 * A unit is 256 rows of one expert (eight packed row tiles), or 512 where tiles are of up to
 * 32 tokens, times a tile of up to N tokens; what is multiplied is the tile's tokens rounded
 * up (wide_pick). Each consumer warp has a brick of 32 rows per step of 128 columns, makes f16
 * of it in registers, with its scale times 64 (exact: 3 bits of q and 8 of a bf16 scale),
 * and a warpgroup multiplies its two halves as 64 rows each. Tokens lie in shared memory in
 * two swizzled panels of 64 columns, put in the order in which a lane's word holds its
 * weights (wide_pack), and come as they are by bulk copies, as do the bricks: one warp
 * feeds a ring of stages that never drains between units.
 *
 * With tiles of up to 32 tokens the sixteen warps that make f16 are what is busy, not the
 * tensor cores. There x is not put in the plan's order, which would be as many bytes as a
 * seventh of a narrow expert's first matrix: three warps bring each token's 16-byte pieces.
 *
 * Units are claimed in the order of moe_unit_where() from one counter by the feeding warp of
 * whichever CTA is free.
 */
#ifndef KVK_MOE_INT4_WIDE_CUH
#define KVK_MOE_INT4_WIDE_CUH

#include "moe_int4_wide.h"
#include "moe_int4_wide_store.cuh"
#include "moe_loads.h"
#include "moe_pack.h"
#include "moe_plan.cuh"
#include "moe_ptx.cuh"
#include "moe_start.cuh"
#include "moe_wgmma.cuh"

#define WIDE_SMEM   (224u * 1024u)
#define WIDE_SCALE  64.0f
#define WIDE_QUEUE  2u	/* units the feeding warp may be ahead */
#define WIDE_GATHER 96u /* threads that bring tokens where tiles are small */

template <int N, int G> struct wide_size {
	/* Few tokens: who multiplies waits more than he works, so there are more of them. */
	static constexpr uint32_t WARPS = N <= 32 ? 16u : 8u;
	static constexpr uint32_t USERS = WARPS * 32u;
	static constexpr uint32_t THREADS =
		USERS + 128u; /* a warpgroup's first warp feeds, the others gather */
	static constexpr bool FEW = N <= 32;
	static constexpr int REGS_USE = N <= 32 ? 104 : 232;
	static constexpr int REGS_FEED = 40;
	static_assert(REGS_USE * USERS + REGS_FEED * 128u <=
			      (65536u / THREADS / 8u * 8u) * THREADS,
		      "more registers than the CTA starts with");
	static constexpr uint32_t BRICK = KVK_BRICK_NIBBLES + 64u * (KVK_BRICK_COLS / G);
	static constexpr uint32_t PANEL = N * 128u;
	static constexpr uint32_t TOKENS = 2u * PANEL;
	static constexpr uint32_t STAGE = TOKENS + WARPS * BRICK;
	static constexpr uint32_t FIT = (WIDE_SMEM - WARPS * WIDE_TURN) / STAGE;
	static constexpr uint32_t STAGES = FIT > 8u ? 8u : FIT;
	static constexpr uint32_t DYNAMIC = STAGES * STAGE + WARPS * WIDE_TURN + 1024u;
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

/* All stages of a unit; a warp. @GATHER: others bring the tokens. */
template <int N, int G, bool GATHER>
__device__ __forceinline__ void wide_feed(const struct moe_wide &a,
					  const struct wide_mat &m, const uint8_t *panels,
					  uint2 tile, uint32_t rb, struct wide_ring &r)
{
	using S = wide_size<N, G>;
	const uint32_t lane = threadIdx.x % 32, n = tile.x >> 16;
	const uint32_t m0 = rb * S::WARPS, nm = min(S::WARPS, m.mtiles - m0);
	/* row tiles that lie side by side: mtiles is a multiple */
	const uint32_t copies = nm / m.wl, bytes = m.wl * S::BRICK;
	const uint8_t *w = m.base + (tile.x & 0xffffu) * m.expert_bytes +
			   (uint64_t)(m0 / m.wl + lane) * m.kbricks * bytes;
	const uint64_t panel = (uint64_t)a.nr_slots * 128u;
	const uint8_t *x = panels + tile.y * 128ull;

	for (uint32_t k = 0; k < m.kbricks; k++, wide_next<S::STAGES>(r)) {
		const uint32_t bar = r.full + 8 * r.stage;
		const uint32_t bricks = r.bricks + r.stage * S::WARPS * S::BRICK;

		ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
		if (lane == 0)
			ptx_mbar_expect(bar, nm * S::BRICK + (GATHER ? 0 : 2 * n * 128u));
		__syncwarp();
		if (lane < copies)
			ptx_bulk(bricks + lane * bytes, w + (uint64_t)k * bytes, bytes,
				 bar);
		if (!GATHER && lane >= 30)
			ptx_bulk(r.tokens + r.stage * S::TOKENS + (lane - 30) * S::PANEL,
				 x + (2 * k + lane - 30) * panel, n * 128u, bar);
	}
}

/* Stage @stage has the lane's pieces: say so. What comes by ordinary copies must be made known
 * to the tensor cores first. */
template <uint32_t STAGES>
__device__ __forceinline__ void wide_gathered(const struct wide_ring &r, uint32_t back)
{
	ptx_fence_async();
	ptx_mbar_arrive(r.full + 8 * ((r.stage + STAGES - back) % STAGES));
}

/* The tokens of all stages of a unit, from x as it is in memory but for the order inside 32
 * columns; three warps. A lane has one of the 16 pieces of a row, of each sixth row; its
 * pieces of a stage are waited for when those of the next one are under way. */
template <int N, int G>
__device__ __forceinline__ void wide_gather(const struct moe_wide &a, uint2 tile,
					    struct wide_ring &r)
{
	using S = wide_size<N, G>;
	constexpr uint32_t STEP = WIDE_GATHER / 16, NR = (N + STEP - 1) / STEP;
	const uint32_t i = threadIdx.x - S::USERS - 32, n = tile.x >> 16;
	const uint32_t piece = i % 16, row = i / 16;
	const uint8_t *x = a.x_panels + piece * 16;
	uint32_t from[NR];

#pragma unroll
	for (uint32_t j = 0; j < NR; j++)
		from[j] = row + j * STEP < n ? __ldcg(&a.list[tile.y + row + j * STEP]) /
						       a.top_k * (a.hidden * 2)
					     : 0;
	for (uint32_t k = 0; k < a.w13.kbricks; k++, wide_next<S::STAGES>(r)) {
		const uint32_t to = r.tokens + r.stage * S::TOKENS + piece / 8 * S::PANEL;

		ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
#pragma unroll
		for (uint32_t j = 0; j < NR; j++) {
			const uint32_t at = row + j * STEP;

			if (at < n)
				ptx_copy16(to + at * 128 + ((piece ^ at) & 7) * 16,
					   x + from[j] + k * 256);
		}
		ptx_copy_commit();
		if (k) {
			ptx_copy_wait<1>();
			wide_gathered<S::STAGES>(r, 1);
		}
	}
	ptx_copy_wait<0>();
	wide_gathered<S::STAGES>(r, 1);
}

/* ------------------------------------------------------------------------------ products
 */

/* A word of eight weights of a row, times the row's scale (half @HIGH of a pair of scales):
 * pairs of neighbours. */
template <bool HIGH>
__device__ __forceinline__ void wide_weights(uint32_t w, uint32_t scales,
					     uint32_t (&p)[4])
{
#pragma unroll
	for (int j = 0; j < 4; j++) {
		/* 1024 + n, or 1024 + 16 n: to n - 8 */
		uint32_t v = ptx_and_or(w >> (j / 2 * 8),
					j % 2 ? 0x00f000f0u : 0x000f000fu, 0x64006400u);

		v = j % 2 ? ptx_fma_f16x2(v, 0x2c002c00u, 0xd480d480u)
			  : ptx_fma_f16x2(v, 0x3c003c00u, 0xe408e408u);
		p[j] = ptx_mul_f16x2_half<HIGH>(v, scales);
	}
}

/* struct wide_raw - a lane's part of 32 columns of a brick: words of its four rows, and their
 * scales where a group begins */
struct wide_raw {
	uint4 w;
	uint2 s;
};

template <int G>
__device__ __forceinline__ void wide_fetch(struct wide_raw &v, uint32_t brick, int kb)
{
	const uint32_t lane = threadIdx.x % 32;

	v.w = ptx_lds128(brick + kb * 512u + lane * 16u);
	if (kb * 32 % G == 0)
		v.s = ptx_lds64(brick + KVK_BRICK_NIBBLES +
				(lane / 4 * (128 / G) + kb * 32 / G) * 8u);
}

/* Two rows' scales times 64, as f16. */
template <bool F16> __device__ __forceinline__ uint32_t wide_scales(uint32_t two)
{
	static_assert(WIDE_SCALE == 64.0f, "0x4280 and 0x5400 are 64");
	if (F16)
		return ptx_mul_f16x2(two, 0x54005400u);
	two = ptx_fma_bf16x2(two, 0x42804280u, 0x80008000u);
	return ptx_f16x2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}

/* A warp's A operands of 32 columns: [row half][k16][register] */
template <int G, bool F16>
__device__ __forceinline__ void wide_operand(const struct wide_raw &v, int kb,
					     uint32_t (&s)[2], uint32_t (&a)[2][2][4])
{
	uint32_t p[4][4];

	if (kb * 32 % G == 0) {
		s[0] = wide_scales<F16>(v.s.x);
		s[1] = wide_scales<F16>(v.s.y);
	}
	wide_weights<false>(v.w.x, s[0], p[0]);
	wide_weights<true>(v.w.y, s[0], p[1]);
	wide_weights<false>(v.w.z, s[1], p[2]);
	wide_weights<true>(v.w.w, s[1], p[3]);
#pragma unroll
	for (int i = 0; i < 16; i++) /* register: row + 8 first, then column + 8 */
		a[i / 8][i / 4 % 2][i % 4] =
			p[i / 8 * 2 + i % 2][i / 4 % 2 * 2 + i % 4 / 2];
}

/* All columns of a unit. @acc: [row half][fragment]. With many warps a product is waited for at
 * once, and operands have one place: others multiply meanwhile, and registers are few. */
template <int N, int NMAX, int G, bool F16>
__device__ __forceinline__ void wide_unit(float (&acc)[2][N / 2], uint32_t kbricks,
					  struct wide_ring &r)
{
	using S = wide_size<NMAX, G>;
	constexpr int PLACES = S::WARPS > 8 ? 1 : 2;
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	uint32_t a[PLACES][2][2][4], s[2] = {}, before = 0;
	struct wide_raw raw[2];

#pragma unroll
	for (int i = 0; i < N; i++)
		acc[i / (N / 2)][i % (N / 2)] = 0.0f;
	for (uint32_t k = 0; k < kbricks; k++) {
		const uint32_t brick = r.bricks + (r.stage * S::WARPS + warp) * S::BRICK;
		/* the same in all lanes; said so, descriptors take no instructions */
		const uint64_t desc =
			wgm_desc(__shfl_sync(~0u, r.tokens + r.stage * S::TOKENS, 0));

		ptx_mbar_wait(r.full + 8 * r.stage, r.phase);
		if (MOE_LOADS_ONLY && k && lane == 0)
			ptx_mbar_arrive(before);
		wide_fetch<G>(raw[0], brick, 0);
#pragma unroll
		for (int kb = 0; kb < 4 && !MOE_LOADS_ONLY; kb++) {
			uint32_t(&op)[2][2][4] = a[kb % PLACES];

			if (kb < 3)
				wide_fetch<G>(raw[(kb + 1) % 2], brick, kb + 1);
			wide_operand<G, F16>(raw[kb % 2], kb, s, op);
			wgm_fence();
#pragma unroll
			for (int i = 0; i < 4; i++)
				moe_wgmma<N>(acc[i % 2], op[i % 2][i / 2],
					     wgm_desc_at(desc, kb / 2 * (S::PANEL / 16) +
								       kb % 2 * 4 +
								       i / 2 * 2),
					     1);
			wgm_commit();
			wgm_wait<PLACES - 1>();
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

/* ------------------------------------------------------------------------------- the way
 */

/* A unit of up to N tokens in a ring for NMAX. */
template <int N, int NMAX, int G, bool SECOND, bool F16>
__device__ __forceinline__ void wide_whole(const struct moe_wide &a, uint2 tile,
					   uint32_t rb, struct wide_ring &r)
{
	const struct wide_mat &m = SECOND ? a.w2 : a.w13;
	const uint32_t mtile = rb * wide_size<NMAX, G>::WARPS + threadIdx.x / 32;
	struct wide_names first;
	float acc[2][N / 2];

	wide_name<SECOND, !SECOND && wide_size<NMAX, G>::FEW>(a, tile, 0, first);
	wide_unit<N, NMAX, G, F16>(acc, m.kbricks, r);
	if (mtile >= m.mtiles)
		return;
	if constexpr (SECOND)
		wide_store_out<N>(a, acc, tile, mtile, first);
	else
		wide_store_h<N>(a, acc, tile, mtile, first);
}

/* As many tokens as are there, rounded up. With one more variant the compiler finds no
 * registers for any of them. */
template <int NMAX, int G, bool SECOND, bool F16>
__device__ __forceinline__ void wide_pick(const struct moe_wide &a, uint2 tile,
					  uint32_t rb, struct wide_ring &r)
{
	constexpr int LOW = NMAX > 64 ? 80 : NMAX / 2;
	constexpr int HIGH = NMAX > 64 ? 96 : NMAX / 4 * 3;
	const uint32_t n = tile.x >> 16;

	if (n <= LOW)
		wide_whole<LOW, NMAX, G, SECOND, F16>(a, tile, rb, r);
	else if (n <= HIGH)
		wide_whole<HIGH, NMAX, G, SECOND, F16>(a, tile, rb, r);
	else
		wide_whole<NMAX, NMAX, G, SECOND, F16>(a, tile, rb, r);
}

/* Claim units, tell the others, copy; a warp. The next claim is under way meanwhile. */
template <int N, int G, bool SECOND>
__device__ __forceinline__ void wide_claim(const struct moe_wide &a,
					   struct wide_bars &bars, struct wide_ring &r)
{
	const struct wide_mat &m = SECOND ? a.w2 : a.w13;
	const uint32_t nr_tiles = __ldcg(a.nr_tiles), lane = threadIdx.x % 32;
	constexpr uint32_t WARPS = wide_size<N, G>::WARPS;
	const uint32_t rblocks = (m.mtiles + WARPS - 1) / WARPS;

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
		wide_feed<N, G, !SECOND && wide_size<N, G>::FEW>(
			a, m, SECOND ? a.h_panels : a.x_panels, tile, at.rb, r);
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

template <int N, int G, bool SECOND, bool F16>
__global__ void __launch_bounds__(wide_size<N, G>::THREADS, 1)
	wide_kernel(const __grid_constant__ struct moe_wide a)
{
	using S = wide_size<N, G>;
	constexpr bool GATHER = S::FEW && !SECOND;
	MOE_DYNAMIC(dynamic);
	MOE_SHARED(struct wide_bars, bars);
	struct wide_ring r = {};

	r.tokens = ((ptx_smem(dynamic) + 1023u) & ~1023u) + S::WARPS * WIDE_TURN;
	r.bricks = r.tokens + S::STAGES * S::TOKENS;
	r.full = ptx_smem(bars.full);
	r.empty = ptx_smem(bars.empty);
	if (threadIdx.x == 0) {
		for (uint32_t i = 0; i < S::STAGES; i++) {
			ptx_mbar_init(r.full + 8 * i, GATHER ? 1 + WIDE_GATHER : 1);
			ptx_mbar_init(r.empty + 8 * i, S::WARPS);
		}
		for (uint32_t i = 0; i < WIDE_QUEUE; i++) {
			ptx_mbar_init(ptx_smem(&bars.q_full[i]), 1);
			ptx_mbar_init(ptx_smem(&bars.q_empty[i]),
				      S::WARPS + (GATHER ? WIDE_GATHER / 32 : 0));
		}
		ptx_fence_async();
	}
	__syncthreads();
	ptx_grid_launch();
	ptx_grid_wait();
	if (threadIdx.x >= S::USERS) {
		SM90_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::REGS_FEED));
		if (threadIdx.x < S::USERS + 32) {
			wide_claim<N, G, SECOND>(a, bars, r);
		} else if constexpr (GATHER) {
			for (uint4 unit; (unit = wide_take(bars, r)).x;)
				wide_gather<N, G>(a, make_uint2(unit.x, unit.y), r);
		}
	} else {
		SM90_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGS_USE));
		for (uint4 unit; (unit = wide_take(bars, r)).x;)
			wide_pick<N, G, SECOND, F16>(a, make_uint2(unit.x, unit.y),
						     unit.z, r);
	}
}

template <int N, int G>
static int wide_launch(const struct moe_wide *a, int second, void *stream)
{
	using S = wide_size<N, G>;
	void (*const kernels[2][2])(const struct moe_wide) = {
		{wide_kernel<N, G, false, false>, wide_kernel<N, G, false, true>},
		{wide_kernel<N, G, true, false>, wide_kernel<N, G, true, true>}};

	return moe_start(kernels[second != 0][a->scale_f16 != 0], dim3(moe_sms()),
			 S::THREADS, S::DYNAMIC, a, stream);
}

template <int G> static int wide_gemm(const struct moe_wide *a, int second, void *stream)
{
	switch (a->tile_tokens) {
	case 32:
		return wide_launch<32, G>(a, second, stream);
	case 64:
		return wide_launch<64, G>(a, second, stream);
	case 112:
		return wide_launch<112, G>(a, second, stream);
	default:
		return wide_launch<128, G>(a, second, stream);
	}
}

#endif /* KVK_MOE_INT4_WIDE_CUH */
