/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_wide.cuh - E4M3 weights with block scales times many tokens an expert, with
 * wgmma: the product's kernel. moe_fp8_wide.cu has the steps around it.
 *
 * A unit is 256 rows of one expert times a tile of up to N tokens: 256 rows of W2, or 128
 * gate rows and the 128 up rows of the same columns. A step is 128 columns, two tensor
 * copies of 128 rows each. A lane takes 16 neighbouring columns of a row at once and makes
 * f16 of them in registers (exact); tokens' codes are f16 already, in the order that
 * follows from that (fp8_pack). After each step its sums, times the scales of the weights'
 * block and of the token, are added in f32, as the reference does. The products of both
 * scales come from a warp of their own, through shared memory: fetched by who multiplies,
 * they would hold up every step by the latency of L2.
 */
#ifndef KVK_MOE_FP8_WIDE_CUH
#define KVK_MOE_FP8_WIDE_CUH

#include <cuda.h>
#include <errno.h>
#include "fp8.h"
#include "moe_fp8_wide.h"
#include "moe_loads.h"
#include "moe_ptx.cuh"
#include "moe_wgmma.cuh"

#define F8_WARPS     8u
#define F8_USERS     (F8_WARPS * 32u)
#define F8_THREADS   (F8_USERS + 128u) /* of the last warpgroup two warps feed */
#define F8_BOX	     (128u * 128u)
#define F8_SMEM	     (220u * 1024u)
#define F8_REGS_USE  232
#define F8_REGS_FEED 40
#define F8_STAGES    6u /* at most */

static_assert(F8_REGS_USE * 256 + F8_REGS_FEED * 128 <= 168 * 384,
	      "the CTA's register pool is 168 per thread");

/* struct f8_args - a launch's kernel parameters */
struct f8_args {
	CUtensorMap map; /* all experts' rows of one matrix */
	struct moe_wide w;
	const float *scales;
	uint32_t rows; /* of an expert's matrix; FIRST: gate rows alone */
	uint32_t cols;
};

template <int N> struct f8_size {
	static constexpr uint32_t PANEL = N * 128u;
	static constexpr uint32_t STAGE = 2u * F8_BOX + 2u * PANEL;
	static constexpr uint32_t FIT = F8_SMEM / STAGE;
	static constexpr uint32_t STAGES = FIT > F8_STAGES ? F8_STAGES : FIT;
	static constexpr uint32_t DYNAMIC = STAGES * STAGE + 1024u;
};

struct f8_shared {
	uint64_t full[F8_STAGES], empty[F8_STAGES];
	/* what a step's sums are multiplied with: [block of weights][token] */
	alignas(16) float factor[F8_STAGES][2][MOE_FP8_WIDE_TOKENS];
};

struct f8_ring {
	uint32_t base; /* shared address of stage 0: two boxes, two panels */
	uint32_t full, empty;
	uint32_t stage, phase;
};

template <uint32_t STAGES> __device__ __forceinline__ void f8_next(struct f8_ring &r)
{
	if (++r.stage == STAGES) {
		r.stage = 0;
		r.phase ^= 1;
	}
}

/* All stages of a unit; one lane. */
template <int N, bool SECOND>
__device__ __forceinline__ void f8_feed(const struct f8_args &a, uint2 tile, uint32_t rb,
					struct f8_ring &r)
{
	using S = f8_size<N>;
	const uint32_t n = tile.x >> 16, expert = tile.x & 0xffffu;
	const uint32_t row0 =
		SECOND ? expert * a.rows + rb * 256 : expert * 2 * a.rows + rb * 128;
	const uint32_t row1 = row0 + (SECOND ? 128 : a.rows);
	const uint64_t panel = (uint64_t)a.w.nr_slots * 128u;
	const uint8_t *x = (SECOND ? a.w.h_panels : a.w.x_panels) + tile.y * 128ull;

	for (uint32_t k = 0; k < a.cols / 128; k++, f8_next<S::STAGES>(r)) {
		const uint32_t bar = r.full + 8 * r.stage,
			       at = r.base + r.stage * S::STAGE;

		ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
		ptx_mbar_expect(bar, 2 * F8_BOX + 2 * n * 128u);
		tma_load_4d(at, &a.map, bar, (int)(k * 128), (int)row0, 0, 0);
		tma_load_4d(at + F8_BOX, &a.map, bar, (int)(k * 128), (int)row1, 0, 0);
		ptx_bulk(at + 2 * F8_BOX, x + 2 * k * panel, n * 128u, bar);
		ptx_bulk(at + 2 * F8_BOX + S::PANEL, x + (2 * k + 1) * panel, n * 128u,
			 bar);
	}
}

/* struct f8_source - where a lane's factors of a unit come from: a block's scales (null: no
 * such token) and a token's */
struct f8_source {
	const float *w, *x;
	uint32_t step; /* of x */
};

/* Lane i of each half warp has token i. */
template <int N, bool SECOND>
__device__ __forceinline__ struct f8_source f8_from(const struct f8_args &a, uint2 tile,
						    uint32_t rb)
{
	const uint32_t lane = threadIdx.x % 32, token = lane % N, box = lane / N;
	const uint32_t expert = tile.x & 0xffffu, blocks = kvk_fp8_blocks(a.rows);
	const uint32_t b = SECOND ? expert * blocks + min(rb * 2 + box, blocks - 1)
				  : (expert * 2 + box) * blocks + rb;

	return {token < tile.x >> 16 ? a.scales + (uint64_t)b * (a.cols / 128) : nullptr,
		(SECOND ? a.w.h_back : a.w.x_back) + tile.y + token, a.w.nr_slots};
}

/* Both scales of step @k. */
__device__ __forceinline__ float2 f8_scales(const struct f8_source &s, uint32_t k,
					    uint32_t wide)
{
	if (!s.w || k >= wide)
		return make_float2(0.0f, 0.0f);
	return make_float2(__ldg(s.w + k), __ldcg(s.x + (uint64_t)k * s.step));
}

/* Factors of a unit; a warp. What memory must give is asked for four steps ahead. */
template <int N, bool SECOND>
__device__ __forceinline__ void f8_factors(const struct f8_args &a, struct f8_shared &sh,
					   uint2 tile, uint32_t rb, struct f8_ring &r)
{
	using S = f8_size<N>;
	static_assert(2 * N == 32, "a lane has one token and one block");
	const struct f8_source s = f8_from<N, SECOND>(a, tile, rb);
	const uint32_t lane = threadIdx.x % 32, wide = a.cols / 128;
	float2 f[4];

#pragma unroll
	for (uint32_t j = 0; j < 4; j++)
		f[j] = f8_scales(s, j, wide);
	for (uint32_t from = 0; from < wide; from += 4) {
#pragma unroll
		for (uint32_t j = 0; j < 4; j++) {
			if (from + j >= wide)
				continue;
			ptx_mbar_wait(r.empty + 8 * r.stage, r.phase ^ 1);
			sh.factor[r.stage][lane / N][lane % N] = f[j].x * f[j].y;
			__syncwarp();
			if (lane == 0)
				ptx_mbar_arrive(r.full + 8 * r.stage);
			f8_next<S::STAGES>(r);
			f[j] = f8_scales(s, from + j + 4, wide);
		}
	}
}

/* Fragment row g is row f8_row(g) of eight: so that two rows of a quarter warp lie in
 * different halves of the swizzle. */
__device__ __forceinline__ uint32_t f8_row(uint32_t g)
{
	return (g & 2) | (g & 1) << 2 | g >> 2;
}

/* Sixteen columns of a row, the lane's share of columns 64 kk .. + 63. */
__device__ __forceinline__ uint4 f8_load(uint32_t base, uint32_t row, uint32_t kk)
{
	const uint32_t piece = kk * 4 + threadIdx.x % 4;

	return ptx_lds128(base + row * 128 + (piece ^ (row & 7)) * 16);
}

/* A operands of 64 columns: [k16][register] */
__device__ __forceinline__ void f8_operand(const uint4 &lo, const uint4 &hi,
					   uint32_t (&a)[4][4])
{
	const uint32_t l[4] = {lo.x, lo.y, lo.z, lo.w}, h[4] = {hi.x, hi.y, hi.z, hi.w};

#pragma unroll
	for (int s = 0; s < 4; s++) {
		a[s][0] = arch_e4m3_f16(l[s]);
		a[s][1] = arch_e4m3_f16(h[s]);
		a[s][2] = arch_e4m3_f16(l[s] >> 16);
		a[s][3] = arch_e4m3_f16(h[s] >> 16);
	}
}

/* The sums of a step's 128 columns. @part: [row half][fragment]. All are complete when it
 * returns. */
template <int N, bool SECOND>
__device__ __forceinline__ void f8_step(float (&part)[2][N / 2], uint32_t at)
{
	using S = f8_size<N>;
	const uint32_t warp = threadIdx.x / 32, row = f8_row(threadIdx.x % 32 / 4);
	const uint64_t desc = wgm_desc(at + 2 * F8_BOX);
	uint32_t a[2][4][4];

#pragma unroll
	for (int i = 0; i < 4; i++) {
		const int kk = i / 2, m = i % 2;
		const uint32_t r0 =
			SECOND ? warp * 32 + m * 16 + row : warp * 16 + m * 8 + row;
		const uint4 lo = f8_load(at, r0, kk);
		const uint4 hi = f8_load(at, r0 + (SECOND ? 8 : 128), kk);

		f8_operand(lo, hi, a[m]);
		wgm_fence();
#pragma unroll
		for (int s = 0; s < 4; s++)
			moe_wgmma<N>(part[m], a[m][s],
				     wgm_desc_at(desc, kk * (S::PANEL / 16) + s * 2),
				     kk || s);
		wgm_commit();
		wgm_wait<1>();
	}
	wgm_wait<0>();
	wgm_keep(part[0]);
	wgm_keep(part[1]);
}

/* acc += part * factor; lower rows may have another block than upper ones. */
template <int N, bool SECOND>
__device__ __forceinline__ void
f8_add(float (&acc)[2][N / 2], const float (&part)[2][N / 2], const float (&factor)[2][N])
{
	const uint32_t t = threadIdx.x % 4, box = SECOND ? threadIdx.x / 128 : 0;

#pragma unroll
	for (int i = 0; i < N / 4; i++) {
		const int f = i / 2 * 4 + i % 2, token = i / 2 * 8 + 2 * t + i % 2;
		const float f0 = factor[box][token];
		const float f1 = SECOND ? f0 : factor[1][token];

#pragma unroll
		for (int m = 0; m < 2; m++) {
			acc[m][f] += part[m][f] * f0;
			acc[m][f + 2] += part[m][f + 2] * f1;
		}
	}
}

template <int N, bool SECOND>
__device__ __forceinline__ void f8_unit(float (&acc)[2][N / 2],
					const struct f8_shared &sh, uint32_t wide,
					struct f8_ring &r)
{
	using S = f8_size<N>;

#pragma unroll
	for (int i = 0; i < N; i++)
		acc[i / (N / 2)][i % (N / 2)] = 0.0f;
	for (uint32_t k = 0; k < wide; k++, f8_next<S::STAGES>(r)) {
		float part[2][N / 2];

		ptx_mbar_wait(r.full + 8 * r.stage, r.phase);
		if constexpr (!MOE_LOADS_ONLY) {
			f8_step<N, SECOND>(part, r.base + r.stage * S::STAGE);
			f8_add<N, SECOND>(acc, part, sh.factor[r.stage]);
		}
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			ptx_mbar_arrive(r.empty + 8 * r.stage);
	}
}

/* The slots of a lane's tokens. */
template <int N>
__device__ __forceinline__ void f8_slots(const struct f8_args &a, uint2 tile,
					 uint32_t (&slot)[N / 4])
{
#pragma unroll
	for (int i = 0; i < N / 4; i++) {
		const uint32_t token = i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2;

		slot[i] = token < tile.x >> 16 ? __ldcg(&a.w.list[tile.y + token]) : 0;
	}
}

template <int N, bool SECOND>
__device__ __forceinline__ void f8_store(const struct f8_args &a,
					 const float (&acc)[2][N / 2], uint2 tile,
					 uint32_t rb, const uint32_t (&slot)[N / 4])
{
	const uint32_t warp = threadIdx.x / 32, t = threadIdx.x % 4;
	const uint32_t row = f8_row(threadIdx.x % 32 / 4);

#pragma unroll
	for (int i = 0; i < N / 4; i++) {
		const uint32_t token = i / 2 * 8 + 2 * t + i % 2, pos = tile.y + token;
		const int f = i / 2 * 4 + i % 2;

		if (token >= tile.x >> 16)
			continue;
#pragma unroll
		for (int m = 0; m < 2; m++) {
			const float v0 = acc[m][f], v1 = acc[m][f + 2];

			if (SECOND) {
				const uint32_t r0 = rb * 256 + warp * 32 + m * 16 + row;
				float *o = a.w.out + (uint64_t)slot[i] * a.w.hidden + r0;

				if (r0 < a.rows)
					o[0] = v0;
				if (r0 + 8 < a.rows)
					o[8] = v1;
			} else {
				a.w.h[(uint64_t)pos * a.w.inter + rb * 128 + warp * 16 +
				      m * 8 + row] = v0 / (1.0f + __expf(-v0)) * v1;
			}
		}
	}
}

/* Tile of unit @u; asked for a unit ahead. */
__device__ __forceinline__ uint2 f8_tile(const struct f8_args &a, uint32_t u,
					 uint32_t units, uint32_t rblocks)
{
	return u < units ? __ldcg(&a.w.tiles[u / rblocks]) : make_uint2(0, 0);
}

/* What a warp does with all units of its CTA. */
enum f8_role { F8_USE, F8_COPY, F8_FACTOR };

template <int N, bool SECOND, enum f8_role ROLE>
__device__ __forceinline__ void f8_units(const struct f8_args &a, struct f8_shared &sh,
					 uint32_t rblocks, struct f8_ring r)
{
	const uint32_t units = __ldcg(a.w.nr_tiles) * rblocks;
	uint2 next = f8_tile(a, blockIdx.x, units, rblocks);

	for (uint32_t u = blockIdx.x; u < units; u += gridDim.x) {
		const uint2 tile = next;
		const uint32_t rb = u % rblocks;

		next = f8_tile(a, u + gridDim.x, units, rblocks);
		if constexpr (ROLE == F8_COPY) {
			f8_feed<N, SECOND>(a, tile, rb, r);
		} else if constexpr (ROLE == F8_FACTOR) {
			f8_factors<N, SECOND>(a, sh, tile, rb, r);
		} else {
			float acc[2][N / 2];
			uint32_t slot[N / 4] = {};

			if (SECOND)
				f8_slots<N>(a, tile, slot);
			f8_unit<N, SECOND>(acc, sh, a.cols / 128, r);
			f8_store<N, SECOND>(a, acc, tile, rb, slot);
		}
	}
}

template <int N, bool SECOND>
__global__ void __launch_bounds__(F8_THREADS, 1)
	f8_kernel(const __grid_constant__ struct f8_args a)
{
	using S = f8_size<N>;
	MOE_DYNAMIC(dynamic);
	MOE_SHARED(struct f8_shared, sh);
	const uint32_t rblocks = SECOND ? (a.rows + 255) / 256 : a.rows / 128;
	struct f8_ring r = {};

	r.base = (ptx_smem(dynamic) + 1023u) & ~1023u;
	r.full = ptx_smem(sh.full);
	r.empty = ptx_smem(sh.empty);
	if (threadIdx.x == 0) {
		for (uint32_t i = 0; i < S::STAGES; i++) {
			ptx_mbar_init(r.full + 8 * i, 2);
			ptx_mbar_init(r.empty + 8 * i, F8_WARPS);
		}
		ptx_fence_async();
	}
	__syncthreads();
	ptx_grid_launch();
	ptx_grid_wait();
	if (threadIdx.x >= F8_USERS) {
		SM90_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(F8_REGS_FEED));
		if (threadIdx.x == F8_USERS)
			f8_units<N, SECOND, F8_COPY>(a, sh, rblocks, r);
		else if (threadIdx.x / 32 == F8_WARPS + 1)
			f8_units<N, SECOND, F8_FACTOR>(a, sh, rblocks, r);
	} else {
		SM90_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(F8_REGS_USE));
		f8_units<N, SECOND, F8_USE>(a, sh, rblocks, r);
	}
}

#endif /* KVK_MOE_FP8_WIDE_CUH */
