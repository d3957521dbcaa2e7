/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_mid.cu - y = x W^T + bias for 17 to 64 tokens, BF16: the projections of a decode step of
 * many requests.
 *
 * W has to come from memory once, and x, 64 tokens of some thousand values, from L2 once for
 * every tile of rows. Two ways to share the work out:
 *
 *	cluster - few tiles of rows: the CTAs of a cluster take a tile together, CTA c being
 *		chain c of linear.cu's order (blocks c, c + 8, ... of 128 columns). The chains are
 *		added in turn out of each other's shared memory.
 *	alone - a tile of rows for every SM: a CTA takes the chains in turn, and nothing has to
 *		be fetched from anybody.
 *
 * Either way the bits are those of one token. A ring of three blocks (W 16 KB, x 8 or 16 KB)
 * is filled by cp.async; its first blocks of W are requested before the kernel in front has ended.
 * Eight warps, four by rows and two by tokens: with four a block took 2,400 clocks, most of
 * them one warp's way through its own loads.
 */
#include "kernels/linear_mid.h"
#include "kernels/moe_ptx.cuh"
#include "kernels/tile_ptx.cuh"

#define MID_THREADS 256u
#define MID_ROWS    64u
#define MID_W_BYTES (MID_ROWS * 256u)
#define MID_CHAINS  8u /* of linear.cu: its warps */
#define MID_DEEP    3u
#define MID_TOKENS  64u
#define MID_FEW	    80u /* CTAs up to which the tokens are shared out as well */
#define MID_ALONE   96u /* tiles of 64 rows from which a CTA takes one alone */

struct mid_params {
	struct kvk_linear_args a;
	u64 x_stride;
	u64 y_stride;
	u64 x_batch;
	u64 y_batch;
	u32 nr_blocks; /* of 128 columns */
	u32 ctas;      /* of a cluster; 1: alone */
};

/* The block behind @kb in its chain; alone also the next chain's first; nr_blocks: none. */
KVK_DEV u32 mid_next(const struct mid_params &p, u32 kb)
{
	const u32 first = kb % MID_CHAINS + 1;

	if (kb + MID_CHAINS < p.nr_blocks)
		return kb + MID_CHAINS;
	return p.ctas == 1 && first < min(p.nr_blocks, MID_CHAINS) ? first : p.nr_blocks;
}

/* Where 16-byte piece @q of row @r lies: eight lanes meet no bank twice. */
KVK_DEV u32 mid_piece(u32 r, u32 q)
{
	return r * 256 + (q ^ (r & 1) << 2) * 16;
}

/* Rows @row0 .. of a matrix, block @kb, as NR pieces of each thread. */
template <u32 NR>
KVK_DEV void mid_load(u8 *dst, const u16 *src, u64 stride, u32 row0, u32 rows, u32 kb,
		      u32 cols)
{
	const u32 q = threadIdx.x % 16, col = kb * 128 + q * 8;
	const u32 left = col < cols ? min((cols - col) * 2, 16u) : 0;

#pragma unroll
	for (u32 i = 0; i < NR; i++) {
		const u32 r = threadIdx.x / 16 + i * (MID_THREADS / 16), row = row0 + r;
		const bool in = row < rows && left;

		tile_copy16(dst + mid_piece(r, q), src + (in ? row * stride + col : 0),
			    in ? left : 0);
	}
}

/* acc += 16 rows x 128 columns of W times 8 NT tokens: a warp's share of a block */
template <u32 NT> KVK_DEV void mid_mma(const u8 *w, const u8 *x, float (&acc)[NT][4])
{
	const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

#pragma unroll
	for (u32 j = 0; j < 4; j++) {
		const uint4 lo = *(const uint4 *)(w + mid_piece(g, j * 4 + t));
		const uint4 hi = *(const uint4 *)(w + mid_piece(g + 8, j * 4 + t));
		const u32 a0[4] = {lo.x, hi.x, lo.y, hi.y};
		const u32 a1[4] = {lo.z, hi.z, lo.w, hi.w};
		uint4 b[NT];

#pragma unroll
		for (u32 nt = 0; nt < NT; nt++)
			b[nt] = *(const uint4 *)(x + mid_piece(nt * 8 + g, j * 4 + t));
#pragma unroll
		for (u32 nt = 0; nt < NT; nt++)
			tile_mma16<true>(acc[nt], a0, b[nt].x, b[nt].y);
#pragma unroll
		for (u32 nt = 0; nt < NT; nt++)
			tile_mma16<true>(acc[nt], a1, b[nt].z, b[nt].w);
	}
}

KVK_DEV void mid_put(const struct mid_params &p, u32 tok, u32 row, float v)
{
	const struct kvk_linear_args &a = p.a;
	const u64 at = tok * p.y_stride + blockIdx.y * p.y_batch + row;

	if (tok >= a.nr_tokens || row >= a.w.rows)
		return;
	if (a.bias)
		v += a.bias[row];
	if (a.accumulate)
		v += dev_act_get(a.y_dtype, a.y, at);
	if (a.y_dtype == KVK_F32)
		((float *)a.y)[at] = v;
	else
		((u16 *)a.y)[at] = kvk_f32_to_bf16(v);
}

/* What a matrix instruction gave this thread: rows @row and @row + 8, tokens @tok, @tok + 1. */
KVK_DEV void mid_put4(const struct mid_params &p, u32 tok, u32 row, float4 v)
{
	mid_put(p, tok, row, v.x);
	mid_put(p, tok + 1, row, v.y);
	mid_put(p, tok, row + 8, v.z);
	mid_put(p, tok + 1, row + 8, v.w);
}

/* Token and row of the first of the four values that thread @t has of matrix instruction @i. */
template <u32 NT> KVK_DEV u32 mid_token(u32 t, u32 i)
{
	return t / 128 * NT * 8 + i * 8 + t % 4 * 2;
}

KVK_DEV u32 mid_row(u32 t)
{
	return t / 32 % 4 * 16 + t % 32 / 4;
}

/*
 * The chains' shares in turn, then y. Each CTA of the cluster adds up as many fours as any other:
 * what comes from the others' shared memory is slow, and slower if it is all fetched by a few.
 */
template <u32 NT>
KVK_DEV void mid_reduce(const struct mid_params &p, const float (&acc)[NT][4], u32 chain,
			u32 token0, u32 row0, float4 *red)
{
	const u32 share = NT * MID_THREADS / p.ctas;

#pragma unroll
	for (u32 i = 0; i < NT; i++)
		red[i * MID_THREADS + threadIdx.x] =
			make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
	tile_cluster_sync();
	for (u32 at = chain * share + threadIdx.x; at < (chain + 1) * share;
	     at += MID_THREADS) {
		float4 part[MID_CHAINS], sum = make_float4(0, 0, 0, 0);

#pragma unroll
		for (u32 c = 0; c < MID_CHAINS; c++)
			if (c < p.ctas)
				part[c] = tile_cluster_get(red + at, c);
#pragma unroll
		for (u32 c = 0; c < MID_CHAINS; c++) {
			if (c >= p.ctas)
				continue;
			sum.x += part[c].x;
			sum.y += part[c].y;
			sum.z += part[c].z;
			sum.w += part[c].w;
		}
		mid_put4(p, token0 + mid_token<NT>(at % MID_THREADS, at / MID_THREADS),
			 row0 + mid_row(at % MID_THREADS), sum);
	}
	tile_cluster_sync(); /* nobody leaves while its memory is read */
}

/* total += acc, in the order of the chains */
template <u32 NT> KVK_DEV void mid_chain_end(float (&total)[NT][4], float (&acc)[NT][4])
{
#pragma unroll
	for (u32 i = 0; i < NT * 4; i++) {
		total[i / 4][i % 4] += acc[i / 4][i % 4];
		acc[i / 4][i % 4] = 0.0f;
	}
}

/* grid: (CTAs of a cluster x tiles of 64 rows, matrices, runs of 16 NT tokens); a warp has 16
 * rows and 8 NT tokens */
template <u32 NT>
__global__ void __launch_bounds__(MID_THREADS, 2)
	linear_mid_kernel(const __grid_constant__ struct mid_params p)
{
	DEV_DYNAMIC_SHARED(smem);
	const u32 slot = MID_W_BYTES + NT * 16 * 256;
	const u32 w_warp = threadIdx.x / 32 % 4 * 16 * 256;
	const u32 x_warp = MID_W_BYTES + threadIdx.x / 128 * NT * 8 * 256;
	const struct kvk_weight &w = p.a.w;
	const u32 chain = blockIdx.x % p.ctas, row0 = blockIdx.x / p.ctas * MID_ROWS;
	const u16 *w_src = (const u16 *)w.data + (u64)blockIdx.y * w.rows * w.cols;
	const u32 token0 = blockIdx.z * NT * 16, nr_tokens = p.a.nr_tokens - token0;
	const u16 *x_src =
		(const u16 *)p.a.x + blockIdx.y * p.x_batch + token0 * p.x_stride;
	float acc[NT][4] = {}, total[NT][4] = {};
	u32 at = 0, load = chain;

	ptx_grid_launch();
#pragma unroll
	for (u32 i = 0; i < MID_DEEP - 1; i++) {
		if (load >= p.nr_blocks)
			continue;
		mid_load<4>(smem + i * slot, w_src, w.cols, row0, w.rows, load, w.cols);
		load = mid_next(p, load);
	}
	ptx_grid_wait();
	load = chain;
#pragma unroll
	for (u32 i = 0; i < MID_DEEP - 1; i++) {
		if (load < p.nr_blocks) {
			mid_load<NT>(smem + i * slot + MID_W_BYTES, x_src, p.x_stride, 0,
				     nr_tokens, load, w.cols);
			load = mid_next(p, load);
		}
		tile_commit();
	}
	for (u32 kb = chain; kb < p.nr_blocks; kb = mid_next(p, kb)) {
		u8 *to = smem + (at + MID_DEEP - 1) % MID_DEEP * slot;

		tile_wait_all_but<MID_DEEP - 2>();
		__syncthreads(); /* the block is here, and the one before is used up */
		if (load < p.nr_blocks) {
			mid_load<4>(to, w_src, w.cols, row0, w.rows, load, w.cols);
			mid_load<NT>(to + MID_W_BYTES, x_src, p.x_stride, 0, nr_tokens,
				     load, w.cols);
			load = mid_next(p, load);
		}
		tile_commit();
		mid_mma<NT>(smem + at * slot + w_warp, smem + at * slot + x_warp, acc);
		at = at + 1 == MID_DEEP ? 0 : at + 1;
		if (kb + MID_CHAINS >= p.nr_blocks)
			mid_chain_end<NT>(total, acc);
	}
	tile_wait_all_but<0>();
	if (p.ctas > 1) {
		__syncthreads();
		mid_reduce<NT>(p, total, chain, token0, row0, (float4 *)smem);
		return;
	}
#pragma unroll
	for (u32 i = 0; i < NT; i++) {
		const float(&v)[4] = total[i];

		mid_put4(p, token0 + mid_token<NT>(threadIdx.x, i),
			 row0 + mid_row(threadIdx.x),
			 make_float4(v[0], v[1], v[2], v[3]));
	}
}

bool kvk_linear_mid_ok(const struct kvk_linear_args *a)
{
	const u64 xs = kvk_linear_x_stride(a), xb = kvk_linear_x_batch(a);

	return a->x_dtype == KVK_BF16 && a->w.dtype == KVK_BF16 && a->nr_tokens > 16 &&
	       a->nr_tokens <= MID_TOKENS && a->w.cols % 8 == 0 && xs % 8 == 0 &&
	       (a->nr_batch == 1 || xb % 8 == 0) && dev_aligned(a->x, 16) &&
	       dev_aligned(a->w.data, 16) && a->w.rows && a->w.cols && a->nr_batch &&
	       a->nr_batch <= 65535;
}

template <u32 NT> static int mid_launch(const struct mid_params *p, kvk_stream stream)
{
	const u32 tiles = (p->a.w.rows + MID_ROWS - 1) / MID_ROWS;
	const int bytes = (int)(MID_DEEP * (MID_ROWS + NT * 16) * 256);
	cudaLaunchAttribute attr[2] = {};
	cudaLaunchConfig_t cfg = {};

	if (cudaFuncSetAttribute((const void *)linear_mid_kernel<NT>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 bytes) != cudaSuccess) {
		(void)cudaGetLastError();
		return -EIO;
	}
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	attr[1].id = cudaLaunchAttributeClusterDimension;
	attr[1].val.clusterDim.x = p->ctas;
	attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
	cfg.gridDim = dim3(tiles * p->ctas, p->a.nr_batch,
			   (p->a.nr_tokens + NT * 16 - 1) / (NT * 16));
	cfg.blockDim = dim3(MID_THREADS);
	cfg.dynamicSmemBytes = (size_t)bytes;
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = p->ctas > 1 ? 2 : 1;
	return cudaLaunchKernelEx(&cfg, linear_mid_kernel<NT>, *p) ? -EIO : 0;
}

int kvk_linear_mid_cuda(const struct kvk_linear_args *a, kvk_stream stream)
{
	const u64 tiles = (u64)((a->w.rows + MID_ROWS - 1) / MID_ROWS) * a->nr_batch;
	struct mid_params p = {};

	p.a = *a;
	p.x_batch = kvk_linear_x_batch(a);
	p.y_batch = kvk_linear_y_batch(a);
	p.x_stride = kvk_linear_x_stride(a);
	p.y_stride = kvk_linear_y_stride(a);
	p.nr_blocks = (a->w.cols + 127) / 128;
	p.ctas = 1;
	while (tiles < MID_ALONE && p.ctas < KV_MIN(p.nr_blocks, MID_CHAINS))
		p.ctas *= 2;
	/* work for the other SMs: W's rows come from L2 a second time, for the other tokens */
	if (a->nr_tokens <= 32 || tiles * p.ctas <= MID_FEW)
		return mid_launch<2>(&p, stream);
	return mid_launch<4>(&p, stream);
}
