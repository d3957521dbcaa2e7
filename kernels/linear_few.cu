/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_few.cu - y = x W^T + bias for the tokens of a decode step (1 to 16), BF16.
 *
 * Time is W's way from memory, so all that is done here is to keep requests for W on the
 * road: each of eight warps has its own ring of FEW_DEEP slots in shared memory (16 rows
 * x 128 columns each), filled by cp.async, that runs on across row tiles; no barrier
 * stands between a slot and its products. The first slots are requested before the kernel
 * in front has ended: two CTAs of different kernels fit on an SM, and a step's projections
 * follow each other without a gap in the stream. x comes from L2 to registers one block
 * ahead, once for RT row tiles.
 *
 * The order of a dot product is linear.cu's: chain c takes blocks c, c + 8, ... of 128
 * columns, the chains are added in turn. Where a matrix has fewer blocks than that, warps
 * take several row tiles instead of idle chains.
 */
#include "kernels/linear_few.h"
#include "kernels/moe_ptx.cuh"
#include "kernels/tile_ptx.cuh"

#define FEW_WARPS   8u
#define FEW_THREADS (FEW_WARPS * 32u)
#define FEW_CHAINS  8u /* of linear.cu: its warps */
#define FEW_DEEP    3u
#define FEW_DEEPEST 6u	  /* a tile a warp: nearly all of it is asked for at once */
#define FEW_SLOT    4096u /* bytes: 16 rows x 128 columns */
#define FEW_TOKENS  16u

struct few_params {
	struct kvk_linear_args a;
	u64 x_stride;
	u64 y_stride;
	u64 x_batch;
	u64 y_batch;
	u32 row_tiles; /* of one matrix */
	u32 nr_tiles;  /* of all of the batch */
	u32 nr_blocks; /* of 128 columns */
	u32 chains;    /* warps that share a row tile: 1, 2, 4, 8 */
};

/* struct few_at - a warp's next slot: block @kb of row tile @tile + @i */
struct few_at {
	u32 tile; /* first of its RT tiles in this round */
	u32 kb;
	u32 i;
};

/* Where 16-byte piece @q of row @r lies: sixteen lanes with 8 bytes meet no bank twice. */
KVK_DEV u32 few_piece(u32 r, u32 q)
{
	return r * 256 + (q ^ (r & 3) << 1) * 16;
}

/* Request a slot, if it is one of the CTA's; then the place of the next. */
template <int RT>
KVK_DEV void few_load(const struct few_params &p, struct few_at &at, u32 end, u8 *slot)
{
	const struct kvk_weight &w = p.a.w;
	const u32 lane = threadIdx.x % 32, q = lane % 16, tile = at.tile + at.i;
	const u32 col = at.kb * 128 + q * 8;
	const u32 left = col < w.cols ? (w.cols - col) * 2 : 0;

	if (tile < end) {
		const u32 batch = tile / p.row_tiles;
		const u32 row0 = (tile - batch * p.row_tiles) * 16 + lane / 16;
		const u16 *src = (const u16 *)w.data + (u64)batch * w.rows * w.cols +
				 (left ? col : 0);

#pragma unroll
		for (u32 i = 0; i < 8; i++)
			tile_copy16(slot + few_piece(i * 2 + lane / 16, q),
				    src + (u64)min(row0 + i * 2, w.rows - 1) * w.cols,
				    min(left, 16u));
	}
	tile_commit();
	if (++at.i < RT)
		return;
	at.i = 0;
	at.kb += p.chains;
	if (at.kb < p.nr_blocks)
		return;
	at.kb = threadIdx.x / 32 % p.chains;
	at.tile += FEW_WARPS / p.chains * RT;
}

/* B operands of 8 NT tokens: block @kb. x may have been written by the kernel in front, and
 * this one may have begun before: not through L1. */
template <int NT>
KVK_DEV void few_x(const struct few_params &p, u32 tile, u32 kb, uint4 (&b)[NT][4])
{
	const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
	const u32 batch = min(tile, p.nr_tiles - 1) / p.row_tiles;

#pragma unroll
	for (u32 nt = 0; nt < NT; nt++) {
		const u32 tok = nt * 8 + g;
		const u16 *x = (const u16 *)p.a.x + tok * p.x_stride + batch * p.x_batch;

#pragma unroll
		for (u32 j = 0; j < 4; j++) {
			const u32 col = kb * 128 + j * 32 + t * 4;
			uint2 lo = make_uint2(0, 0), hi = lo;

			if (tok < p.a.nr_tokens && col < p.a.w.cols)
				lo = __ldcg((const uint2 *)(x + col));
			if (tok < p.a.nr_tokens && col + 16 < p.a.w.cols)
				hi = __ldcg((const uint2 *)(x + col + 16));
			b[nt][j] = make_uint4(lo.x, lo.y, hi.x, hi.y);
		}
	}
}

/* This lane's four columns of 16-byte piece @q of row @r. */
KVK_DEV uint2 few_pair(const u8 *slot, u32 r, u32 q)
{
	return *(const uint2 *)(slot + few_piece(r, q) + threadIdx.x % 2 * 8);
}

/* acc += a slot's 16 rows x 128 columns times the tokens */
template <int NT>
KVK_DEV void few_mma(const u8 *slot, const uint4 (&b)[NT][4], float (&acc)[NT][4])
{
	const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

#pragma unroll
	for (u32 j = 0; j < 4; j++) {
		u32 a[2][4];

#pragma unroll
		for (u32 i = 0; i < 2; i++) {
			const u32 q = j * 4 + i * 2 + t / 2;
			const uint2 lo = few_pair(slot, g, q),
				    hi = few_pair(slot, g + 8, q);

			a[i][0] = lo.x, a[i][1] = hi.x, a[i][2] = lo.y, a[i][3] = hi.y;
		}

#pragma unroll
		for (u32 nt = 0; nt < NT; nt++) {
			tile_mma16<true>(acc[nt], a[0], b[nt][j].x, b[nt][j].y);
			tile_mma16<true>(acc[nt], a[1], b[nt][j].z, b[nt][j].w);
		}
	}
}

KVK_DEV void few_put(const struct few_params &p, u32 batch, u32 tok, u32 row, float v)
{
	const struct kvk_linear_args &a = p.a;
	const u64 at = tok * p.y_stride + batch * p.y_batch + row;

	if (tok >= a.nr_tokens || row >= a.w.rows)
		return;
	if (a.bias)
		v += a.bias[row];
	if (a.add)
		v += a.add[at];
	if (a.y_dtype == KVK_F32)
		((float *)a.y)[at] = v;
	else
		((u16 *)a.y)[at] = kvk_f32_to_bf16(v);
}

/* The chains' shares of a row tile in turn, then y. One barrier: red alternates. */
template <int NT>
KVK_DEV void few_reduce(const struct few_params &p, const float (&acc)[NT][4], u32 first,
			u32 step, u32 end, float (*red)[4 * NT][32])
{
	const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
	for (u32 f = 0; f < 4 * NT; f++)
		red[warp][f][lane] = acc[f / 4][f % 4];
	__syncthreads();
	for (u32 i = warp; i < FEW_WARPS / p.chains * 4 * NT; i += FEW_WARPS) {
		const u32 f = i % (4 * NT), sub = i / (4 * NT);
		const u32 tile = first + sub * step, batch = tile / p.row_tiles;
		float part[FEW_CHAINS], sum = 0.0f;

		if (tile >= end)
			continue;
#pragma unroll
		for (u32 c = 0; c < FEW_CHAINS; c++)
			part[c] = c < p.chains ? red[sub * p.chains + c][f][lane] : 0.0f;
#pragma unroll
		for (u32 c = 0; c < FEW_CHAINS; c++)
			if (c < p.chains)
				sum += part[c];
		few_put(p, batch, f / 4 * 8 + lane % 4 * 2 + f % 2,
			(tile - batch * p.row_tiles) * 16 + lane / 4 + f % 4 / 2 * 8,
			sum);
	}
}

/* grid: any; a CTA has a run of row tiles, RT per warp and round */
template <int NT, int RT, u32 DEEP>
__global__ void __launch_bounds__(FEW_THREADS,
				  DEEP == FEW_DEEP && (RT == 1 || NT == 1) ? 2 : 1)
	linear_few_kernel(const __grid_constant__ struct few_params p)
{
	DEV_DYNAMIC_SHARED(smem);
	const u32 warp = threadIdx.x / 32, chain = warp % p.chains;
	const u32 first = (u32)((u64)blockIdx.x * p.nr_tiles / gridDim.x);
	const u32 end = (u32)((u64)(blockIdx.x + 1) * p.nr_tiles / gridDim.x);
	const u32 sub = warp / p.chains * RT, step = FEW_WARPS / p.chains * RT;
	u8 *ring = smem + warp * DEEP * FEW_SLOT;
	float(*red)[4 * NT][32] =
		(float(*)[4 * NT][32])(smem + FEW_WARPS * DEEP * FEW_SLOT);
	const bool idle = chain >= p.nr_blocks;
	struct few_at at = {idle ? end : first + sub, chain, 0};
	uint4 b[NT][4], next[NT][4];
	u32 slot = 0, side = 0;

	ptx_grid_launch();
	for (u32 i = 0; i < DEEP; i++)
		few_load<RT>(p, at, end, ring + i * FEW_SLOT);
	ptx_grid_wait();
	few_x<NT>(p, first + sub, chain, next);
	for (u32 base = first; base < end; base += step) {
		float acc[RT][NT][4] = {};

		for (u32 kb = chain; kb < p.nr_blocks; kb += p.chains) {
			const bool last = kb + p.chains >= p.nr_blocks;

#pragma unroll
			for (u32 i = 0; i < NT * 4; i++)
				b[i / 4][i % 4] = next[i / 4][i % 4];
			few_x<NT>(p, base + sub + (last ? step : 0),
				  last ? chain : kb + p.chains, next);
#pragma unroll
			for (u32 i = 0; i < RT; i++) {
				u8 *s = ring + slot * FEW_SLOT;

				tile_wait_all_but<DEEP - 1>();
				__syncwarp();
				if (base + sub + i < end)
					few_mma<NT>(s, b, acc[i]);
				__syncwarp();
				few_load<RT>(p, at, end, s);
				slot = slot + 1 == DEEP ? 0 : slot + 1;
			}
		}
#pragma unroll
		for (u32 i = 0; i < RT; i++, side ^= FEW_WARPS)
			few_reduce<NT>(p, acc[i], base + i, RT, end, red + side);
	}
}

bool kvk_linear_few_ok(const struct kvk_linear_args *a)
{
	return a->x_dtype == KVK_BF16 && a->w.dtype == KVK_BF16 && a->nr_tokens &&
	       a->nr_tokens <= FEW_TOKENS;
}

template <int NT, int RT, u32 DEEP>
static int few_launch(const struct few_params *p, u32 grid, kvk_stream stream)
{
	const int bytes =
		(int)(FEW_WARPS * DEEP * FEW_SLOT) + 2 * FEW_WARPS * 4 * NT * 32 * 4;
	cudaLaunchAttribute attr[1] = {};
	cudaLaunchConfig_t cfg = {};

	if (cudaFuncSetAttribute((const void *)linear_few_kernel<NT, RT, DEEP>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 bytes) != cudaSuccess) {
		(void)cudaGetLastError();
		return -ENOSPC;
	}
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(grid);
	cfg.blockDim = dim3(FEW_THREADS);
	cfg.dynamicSmemBytes = (size_t)bytes;
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = 1;
	return cudaLaunchKernelEx(&cfg, linear_few_kernel<NT, RT, DEEP>, *p) ? -EIO : 0;
}

template <int NT>
static int few_launch_rt(const struct few_params *p, u32 sms, kvk_stream stream)
{
	const u32 per_round = FEW_WARPS / p->chains;
	const u32 grid = (p->nr_tiles + per_round - 1) / per_round;
	const u32 each = (p->nr_tiles + sms * per_round - 1) / (sms * per_round);

	/* a column of blocks much longer than the ring, and SMs to spare */
	if (each == 1 && grid <= sms && p->nr_blocks > FEW_DEEP * FEW_CHAINS)
		return few_launch<NT, 1, FEW_DEEPEST>(p, grid, stream);
	/* x is another one for each matrix of a batch */
	if (each == 1 || p->a.nr_batch > 1)
		return few_launch<NT, 1, FEW_DEEP>(p, min(grid, sms), stream);
	if (each == 2)
		return few_launch<NT, 2, FEW_DEEP>(p, min(grid, sms), stream);
	return few_launch<NT, 4, FEW_DEEP>(p, min(grid, sms), stream);
}

int kvk_linear_few_cuda(const struct kvk_linear_args *a, kvk_stream stream)
{
	struct few_params p = {};
	int dev, sms;

	if (cudaGetDevice(&dev) != cudaSuccess ||
	    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev) !=
		    cudaSuccess)
		return -EIO;
	p.a = *a;
	p.x_batch = kvk_linear_x_batch(a);
	p.y_batch = kvk_linear_y_batch(a);
	p.x_stride = kvk_linear_x_stride(a);
	p.y_stride = kvk_linear_y_stride(a);
	p.row_tiles = (a->w.rows + 15) / 16;
	p.nr_tiles = p.row_tiles * a->nr_batch;
	p.nr_blocks = (a->w.cols + 127) / 128;
	for (p.chains = 1; p.chains < min(p.nr_blocks, FEW_CHAINS);)
		p.chains *= 2;
	return a->nr_tokens <= 8 ? few_launch_rt<1>(&p, (u32)sms, stream)
				 : few_launch_rt<2>(&p, (u32)sms, stream);
}
