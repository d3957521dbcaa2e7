/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_chunk.cuh - E4M3 weights times the e4m3 tokens of a prefill chunk, with wgmma on
 * e4m3: the product's kernel. moe_fp8_chunk.cu has the steps around it.
 *
 * A unit is 256 rows of one expert times a tile of up to 128 tokens: 256 rows of W2, or 128
 * gate rows and the 128 up rows of the same columns. A step is 128 columns: two tensor
 * copies of 128 rows, one bulk copy of the tokens, and a table of what each token's sums
 * are multiplied with (its own scale times the weights' block's), which a warp of its own
 * writes. Each of two warpgroups has 64 gate and 64 up rows, or 128 rows; it multiplies 64
 * rows after the other, with as many tokens as are there (rounded up), and adds a step's sums
 * to its own in f32: the tensor core's keep 14 bits only. While one adds, the other multiplies.
 *
 * The first product rounds h to e4m3, a scale per token and 128 columns, which are
 * exactly a unit's: no float of h leaves the SM. The second one turns its results over in
 * shared memory to store whole rows.
 *
 * Units are claimed in order from one counter by the copying warp of whichever CTA is free,
 * which so are near each other in time where they are near in memory.
 *
 * Named barriers: 1 both warpgroups, 2 and 3 one of them.
 */
#ifndef KVK_MOE_FP8_CHUNK_CUH
#define KVK_MOE_FP8_CHUNK_CUH

#include <cuda.h>
#include <errno.h>
#include "fp8.h"
#include "moe_fp8_chunk.h"
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
#define FC_TURN	     (2u * 32u * 256u) /* where results are turned over */
#define FC_DYNAMIC   (FC_STAGES * FC_STAGE + FC_TURN + 1024u)
#define FC_LANE	     (MOE_CHUNK_TOKENS / 4u + 4u) /* banks of lanes differ */
#define FC_EARLY     4 /* times 16 tokens whose factors are read early */
#define FC_REGS_USE  216
#define FC_REGS_FEED 72

static_assert(FC_REGS_USE * 256 + FC_REGS_FEED * 128 <= 168 * 384,
	      "the CTA's register pool is 168 per thread");
static_assert(FC_PANEL <= FC_TURN, "codes of h are turned over at once");

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
	/* the tokens of a quad's lane t (8 i + 2 t, + 1) follow each other from FC_LANE t on */
	alignas(16) float factor[FC_STAGES][2][4 * FC_LANE];
	uint32_t amax[MOE_CHUNK_TOKENS];
	uint4 quant[MOE_CHUNK_TOKENS]; /* struct kvk_quant */
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
				const uint32_t at = lane % 8 / 2 * FC_LANE +
						    (lane / 8 + 4 * i) * 2 + lane % 2;

				sh.factor[r.stage][0][at] = x[j][i] * w[j][0];
				sh.factor[r.stage][1][at] = x[j][i] * w[j][1];
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

/* acc += part * factor, for 64 rows and 16 tokens */
__device__ __forceinline__ void fc_add(float *acc, const float *part, const uint4 &f)
{
	const float v[4] = {__uint_as_float(f.x), __uint_as_float(f.y),
			    __uint_as_float(f.z), __uint_as_float(f.w)};

#pragma unroll
	for (int i = 0; i < 8; i++)
		acc[i] += part[i] * v[i / 4 * 2 + i % 2];
}

/* All columns of a unit. @acc: [64 rows][fragment] */
template <int N, bool SECOND>
__device__ __forceinline__ void fc_unit(float (&acc)[2][N / 2], struct fc_shared &sh,
					uint32_t steps, struct fc_ring &r)
{
	constexpr int EARLY = N / 16 < FC_EARLY ? N / 16 : FC_EARLY;
	const uint32_t wg = threadIdx.x / 128;

#pragma unroll
	for (int i = 0; i < N; i++)
		acc[i / (N / 2)][i % (N / 2)] = 0.0f;
	for (uint32_t k = 0; k < steps; k++, fc_next(r)) {
		const uint32_t at = r.base + r.stage * FC_STAGE;
		const uint64_t b = wgm_desc(at + 2 * FC_BOX);

		ptx_mbar_wait(ptx_smem(&sh.full[r.stage]), r.phase);
#pragma unroll
		for (uint32_t m = 0; m < 2; m++) {
			const uint32_t box = SECOND ? wg : m, half = SECOND ? m : wg;
			const uint64_t w =
				wgm_desc(at + box * FC_BOX + half * (FC_BOX / 2));
			const uint32_t factor = ptx_smem(sh.factor[r.stage][box]) +
						threadIdx.x % 4 * FC_LANE * 4;
			float part[N / 2];
			uint4 f[EARLY];

			wgm_fence();
#pragma unroll
			for (int kk = 0; kk < 4; kk++)
				moe_wgmma_e4m3<N>(part, wgm_desc_at(w, kk * 2),
						  wgm_desc_at(b, kk * 2), kk);
			wgm_commit();
			/* the first factors come while the product runs: shared memory is
			 * busy then, and the sums wait for nothing else */
#pragma unroll
			for (int i = 0; i < EARLY; i++)
				f[i] = ptx_lds128(factor + i * 16);
			wgm_wait<0>();
			wgm_keep(part);
#pragma unroll
			for (int i = 0; i < N / 16; i++) {
				fc_add(&acc[m][8 * i], &part[8 * i], f[i % EARLY]);
				if (i + EARLY < N / 16)
					f[i % EARLY] =
						ptx_lds128(factor + (i + EARLY) * 16);
			}
		}
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			ptx_mbar_arrive(ptx_smem(&sh.empty[r.stage]));
	}
}

/* ------------------------------------------------------------------------------- results
 */

/* One step of fc_amax(): a lane keeps half of 2 HALF tokens. The first token it keeps. */
template <int HALF, int ALL>
__device__ __forceinline__ uint32_t fc_halve(uint32_t (&top)[ALL], uint32_t lane_bit)
{
	const bool upper = threadIdx.x & lane_bit;

#pragma unroll
	for (int j = 0; j < HALF; j++) {
		const uint32_t keep = upper ? top[j + HALF] : top[j];
		const uint32_t give = upper ? top[j] : top[j + HALF];

		top[j] = max(keep, __shfl_xor_sync(~0u, give, lane_bit));
	}
	return upper ? HALF : 0;
}

/* The largest of each token's 16 columns of a warp: eight lanes share a token, and at each
 * of three steps a lane hands over half of the tokens it has. @top: of tokens i / 2 * 8 +
 * 2 t + i % 2 */
template <int N, int ALL>
__device__ __forceinline__ void fc_amax(struct fc_shared &sh, uint32_t (&top)[ALL])
{
	uint32_t first = fc_halve<ALL / 2>(top, 4);

	first += fc_halve<ALL / 4>(top, 8);
	first += fc_halve<ALL / 8>(top, 16);
#pragma unroll
	for (uint32_t j = 0; j < ALL / 8; j++) {
		const uint32_t i = first + j;

		if (i < N / 4)
			atomicMax(&sh.amax[i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2],
				  top[j]);
	}
}

/* h of the unit's 128 columns, its codes and scales. @turn: FC_TURN bytes */
template <int N>
__device__ __forceinline__ void fc_store_h(const struct fc_args &a, struct fc_shared &sh,
					   float (&acc)[2][N / 2], uint2 tile,
					   uint32_t rb, uint8_t *turn)
{
	const uint32_t n = tile.x >> 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
	/* warp w of a warpgroup has 16 of its 64 columns */
	const uint32_t col = threadIdx.x / 128 * 64 + threadIdx.x % 128 / 32 * 16 + g;
	uint32_t top[(N / 4 + 7) / 8 * 8] = {};
	uint8_t *codes = a.c.h_codes + ((uint64_t)rb * a.c.nr_slots + tile.y) * 128u;

#pragma unroll
	for (uint32_t i = 0; i < N / 4; i++) {
		const uint32_t f = i / 2 * 4 + i % 2;

#pragma unroll
		for (uint32_t j = f; j < f + 4; j += 2) {
			const float gate = acc[0][j];
			uint32_t bits;

			acc[0][j] = __fdividef(gate, 1.0f + __expf(-gate)) * acc[1][j];
			bits = __float_as_uint(acc[0][j]) & 0x7fffffffu;
			top[i] = max(top[i], bits > 0x7f800000u ? 0u : bits);
		}
	}
	fc_amax<N>(sh, top);
	ptx_bar_sync(1, FC_USERS);
	if (threadIdx.x < MOE_CHUNK_TOKENS) {
		const float scale =
			kvk_fp8_act_scale(__uint_as_float(sh.amax[threadIdx.x]));
		const struct kvk_quant q = kvk_quant_make(scale);

		sh.quant[threadIdx.x] = make_uint4(
			__float_as_uint(q.scale), __float_as_uint(q.inverse), q.quick, 0);
		sh.amax[threadIdx.x] = 0;
		if (threadIdx.x < n)
			a.c.h_scales[(uint64_t)rb * a.c.nr_slots + tile.y + threadIdx.x] =
				scale;
	}
	ptx_bar_sync(1, FC_USERS);
#pragma unroll
	for (uint32_t i = 0; i < N / 4; i++) {
		const uint32_t f = i / 2 * 4 + i % 2, token = i / 2 * 8 + 2 * t + i % 2;
		float v[2] = {acc[0][f], acc[0][f + 2]};
		uint8_t *row = turn + token * 128u;

		if (i / 2 * 8 >= n)
			continue;
		const uint4 q = sh.quant[token];

		kvk_quant_div(v, {__uint_as_float(q.x), __uint_as_float(q.y), q.z != 0});
		const uint32_t two = arch_f32_e4m3(v[0], v[1]);

		row[((col / 16 ^ token) & 7) * 16 + col % 16] = (uint8_t)two;
		row[((col / 16 ^ token) & 7) * 16 + col % 16 + 8] = (uint8_t)(two >> 8);
	}
	ptx_bar_sync(1, FC_USERS);
	for (uint32_t i = threadIdx.x; i < n * 8; i += FC_USERS)
		*(uint4 *)(codes + i * 16) = *(const uint4 *)(turn + i * 16);
	ptx_bar_sync(1, FC_USERS);
}

/* The slots that a warp stores: lane 8 c + i has that of token 32 c + 8 warp + i. */
__device__ __forceinline__ uint32_t fc_slots(const struct fc_args &a, uint2 tile)
{
	const uint32_t lane = threadIdx.x % 32;
	const uint32_t token = lane / 8 * 32 + threadIdx.x / 32 % 4 * 8 + lane % 8;

	return token < tile.x >> 16 ? __ldcg(&a.c.list[tile.y + token]) : 0;
}

/* A warpgroup's 128 columns, 32 tokens at a time: a token has 16 pieces of 16 bytes, piece c
 * of token i at c ^ (i & 7). The other warpgroup may be elsewhere. */
template <int N>
__device__ __forceinline__ void fc_store_out(const struct fc_args &a,
					     const float (&acc)[2][N / 2], uint2 tile,
					     uint32_t rb, uint32_t slots, uint8_t *turn)
{
	const uint32_t n = tile.x >> 16, lane = threadIdx.x % 32;
	const uint32_t wg = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
	const uint32_t col = rb * 256 + wg * 128 + lane % 16 * 8;
	/* lane's row of an 8 x 8 matrix: token lane % 8 (+ 8), columns + 8 in odd ones */
	const uint32_t token = lane / 16 * 8 + lane % 8;
	uint8_t *mine = turn + wg * (FC_TURN / 2);

#pragma unroll
	for (uint32_t c = 0; c < (N + 31) / 32; c++) {
		if (c * 32 >= n)
			continue;
#pragma unroll
		for (uint32_t i = 0; i < 4; i++) {
			const uint32_t m = i / 2, half = i % 2;
			const uint32_t piece = m * 8 + warp * 2 + lane / 8 % 2;
			const float *v = &acc[m][c * 16 + half * 8];

			if (c * 32 + half * 16 >= N)
				continue;
			ptx_stmatrix_trans(ptx_smem(mine) + (half * 16 + token) * 256 +
						   (piece ^ (token & 7)) * 16,
					   ptx_bf16x2(v[0], v[1]), ptx_bf16x2(v[2], v[3]),
					   ptx_bf16x2(v[4], v[5]),
					   ptx_bf16x2(v[6], v[7]));
		}
		ptx_bar_sync(2 + wg, FC_USERS / 2);
#pragma unroll
		for (uint32_t i = 0; i < 4; i++) {
			const uint32_t j = 2 * i + lane / 16, k = warp * 8 + j;
			const uint64_t slot = __shfl_sync(~0u, slots, c * 8 + j);

			if (c * 32 + k >= n || col >= a.c.hidden)
				continue;
			*(uint4 *)(a.c.out + slot * a.c.hidden + col) =
				*(const uint4 *)(mine + k * 256u +
						 (lane % 16 ^ (k & 7)) * 16);
		}
		ptx_bar_sync(2 + wg, FC_USERS / 2);
	}
}

/* ------------------------------------------------------------------------------- the way
 */

template <int N, bool SECOND>
__device__ __forceinline__ void fc_whole(const struct fc_args &a, struct fc_shared &sh,
					 uint2 tile, uint32_t rb, struct fc_ring &r,
					 uint8_t *turn)
{
	const uint32_t slots = SECOND ? fc_slots(a, tile) : 0;
	float acc[2][N / 2];

	fc_unit<N, SECOND>(acc, sh, a.cols / 128, r);
	if constexpr (SECOND)
		fc_store_out<N>(a, acc, tile, rb, slots, turn);
	else
		fc_store_h<N>(a, sh, acc, tile, rb, turn);
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
	for (;;) {
		const uint4 unit = fc_take(sh, r);
		const uint2 tile = make_uint2(unit.x, unit.y);

		switch (((tile.x >> 16) + 15) / 16) {
		case 0:
			return;
		case 1:
		case 2:
			fc_whole<32, SECOND>(a, sh, tile, unit.z, r, turn);
			break;
		case 3:
		case 4:
			fc_whole<64, SECOND>(a, sh, tile, unit.z, r, turn);
			break;
		case 5:
			fc_whole<80, SECOND>(a, sh, tile, unit.z, r, turn);
			break;
		case 6:
			fc_whole<96, SECOND>(a, sh, tile, unit.z, r, turn);
			break;
		case 7:
			fc_whole<112, SECOND>(a, sh, tile, unit.z, r, turn);
			break;
		default:
			fc_whole<128, SECOND>(a, sh, tile, unit.z, r, turn);
		}
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
	if (threadIdx.x < MOE_CHUNK_TOKENS)
		sh.amax[threadIdx.x] = 0;
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
