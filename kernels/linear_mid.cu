/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_mid.cu - y = x W^T + bias for 17 to 64 tokens, BF16: the projections of a decode step of
 * many requests.
 *
 * W has to come from memory once, and x, 64 tokens of 7,168 values, from L2 once for every
 * tile of rows. A CTA with all columns would read 0.9 MB of x for its share of W; so the
 * columns are shared out: the CTAs of a cluster take a tile of 64 rows together, CTA c being
 * chain c of linear.cu's order (blocks c, c + 8, ... of 128 columns). Then x costs as many
 * bytes as W does. The chains are added in turn out of each other's shared memory, so that
 * the bits are those of one token.
 *
 * A ring of three blocks (W 16 KB, x 16 KB) filled by cp.async; two CTAs on an SM. The first
 * blocks of W are requested before the kernel in front has ended.
 */
#include "kernels/linear_mid.h"
#include "kernels/moe_ptx.cuh"
#include "kernels/tile_ptx.cuh"

#define MID_WARPS   4u
#define MID_THREADS (MID_WARPS * 32u)
#define MID_ROWS    64u
#define MID_CHAINS  8u /* of linear.cu: its warps */
#define MID_DEEP    3u
#define MID_W_BYTES (MID_ROWS * 256u)
#define MID_TOKENS  64u

struct mid_params {
	struct kvk_linear_args a;
	u64 x_stride;
	u64 y_stride;
	u32 nr_blocks; /* of 128 columns */
	u32 chains;    /* CTAs of a cluster */
};

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

/* acc += 16 rows x 128 columns of W times 8 NT tokens */
template <u32 NT> KVK_DEV void mid_mma(const u8 *w, const u8 *x, float (&acc)[NT][4])
{
	const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4,
		  row = threadIdx.x / 32 * 16;

#pragma unroll
	for (u32 j = 0; j < 4; j++) {
		const uint4 lo = *(const uint4 *)(w + mid_piece(row + g, j * 4 + t));
		const uint4 hi = *(const uint4 *)(w + mid_piece(row + g + 8, j * 4 + t));
		const u32 a0[4] = {lo.x, hi.x, lo.y, hi.y};
		const u32 a1[4] = {lo.z, hi.z, lo.w, hi.w};

#pragma unroll
		for (u32 nt = 0; nt < NT; nt++) {
			const uint4 b =
				*(const uint4 *)(x + mid_piece(nt * 8 + g, j * 4 + t));

			tile_mma16<true>(acc[nt], a0, b.x, b.y);
			tile_mma16<true>(acc[nt], a1, b.z, b.w);
		}
	}
}

KVK_DEV void cluster_barrier(void)
{
	SM90_ASM("barrier.cluster.arrive.release.aligned;\n"
		 "barrier.cluster.wait.acquire.aligned;" ::
			 : "memory");
}

/* A float of CTA @rank of the cluster, at this CTA's address @p. */
KVK_DEV float cluster_get(const float *p, u32 rank)
{
	float v = 0.0f;
	u32 at = 0;

	SM90_ASM("mapa.shared::cluster.u32 %0, %1, %2;"
		 : "=r"(at)
		 : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
	SM90_ASM("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
	return v;
}

KVK_DEV void mid_put(const struct mid_params &p, u32 tok, u32 row, float v)
{
	const struct kvk_linear_args &a = p.a;
	const u64 at = tok * p.y_stride + (u64)blockIdx.y * a.w.rows + row;

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

/* The chains' shares in turn, then y; the values are shared out to the cluster's CTAs. */
template <u32 NT>
KVK_DEV void mid_reduce(const struct mid_params &p, const float (&acc)[NT][4], u32 chain,
			u32 row0, float *red)
{
	const u32 row = row0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;

#pragma unroll
	for (u32 f = 0; f < NT * 4; f++)
		red[f * MID_THREADS + threadIdx.x] = acc[f / 4][f % 4];
	cluster_barrier();
	for (u32 f = chain; f < NT * 4; f += p.chains) {
		float part[MID_CHAINS], sum = 0.0f;

#pragma unroll
		for (u32 c = 0; c < MID_CHAINS; c++)
			part[c] =
				c < p.chains
					? cluster_get(red + f * MID_THREADS + threadIdx.x,
						      c)
					: 0.0f;
#pragma unroll
		for (u32 c = 0; c < MID_CHAINS; c++)
			if (c < p.chains)
				sum += part[c];
		mid_put(p, f / 4 * 8 + threadIdx.x % 4 * 2 + f % 2, row + f % 4 / 2 * 8,
			sum);
	}
	cluster_barrier(); /* nobody leaves while its memory is read */
}

/* grid: (chains x tiles of 64 rows, matrices) */
template <u32 NT>
__global__ void __launch_bounds__(MID_THREADS, 2)
	linear_mid_kernel(const __grid_constant__ struct mid_params p)
{
	DEV_DYNAMIC_SHARED(smem);
	const u32 x_bytes = NT * 8 * 256, slot = MID_W_BYTES + x_bytes;
	const struct kvk_weight &w = p.a.w;
	const u32 chain = blockIdx.x % p.chains, row0 = blockIdx.x / p.chains * MID_ROWS;
	const u16 *w_src = (const u16 *)w.data + (u64)blockIdx.y * w.rows * w.cols;
	const u16 *x_src = (const u16 *)p.a.x + (u64)blockIdx.y * w.cols;
	float acc[NT][4] = {};
	u32 at = 0;

	ptx_grid_launch();
#pragma unroll
	for (u32 i = 0; i < MID_DEEP - 1; i++)
		if (chain + i * p.chains < p.nr_blocks)
			mid_load<8>(smem + i * slot, w_src, w.cols, row0, w.rows,
				    chain + i * p.chains, w.cols);
	ptx_grid_wait();
#pragma unroll
	for (u32 i = 0; i < MID_DEEP - 1; i++) {
		if (chain + i * p.chains < p.nr_blocks)
			mid_load<NT>(smem + i * slot + MID_W_BYTES, x_src, p.x_stride, 0,
				     p.a.nr_tokens, chain + i * p.chains, w.cols);
		tile_commit();
	}
	for (u32 kb = chain; kb < p.nr_blocks; kb += p.chains) {
		const u32 next = kb + (MID_DEEP - 1) * p.chains;
		u8 *to = smem + (at + MID_DEEP - 1) % MID_DEEP * slot;

		tile_wait_all_but<MID_DEEP - 2>();
		__syncthreads(); /* the block is here, and the one before is used up */
		if (next < p.nr_blocks) {
			mid_load<8>(to, w_src, w.cols, row0, w.rows, next, w.cols);
			mid_load<NT>(to + MID_W_BYTES, x_src, p.x_stride, 0,
				     p.a.nr_tokens, next, w.cols);
		}
		tile_commit();
		mid_mma<NT>(smem + at * slot, smem + at * slot + MID_W_BYTES, acc);
		at = at + 1 == MID_DEEP ? 0 : at + 1;
	}
	tile_wait_all_but<0>();
	__syncthreads();
	mid_reduce<NT>(p, acc, chain, row0, (float *)smem);
}

bool kvk_linear_mid_ok(const struct kvk_linear_args *a)
{
	const u64 xs = a->x_stride ? a->x_stride : (u64)a->nr_batch * a->w.cols;

	return a->x_dtype == KVK_BF16 && a->w.dtype == KVK_BF16 && a->nr_tokens > 16 &&
	       a->nr_tokens <= MID_TOKENS && a->w.cols % 8 == 0 && xs % 8 == 0 &&
	       dev_aligned(a->x, 16) && dev_aligned(a->w.data, 16) && a->w.rows &&
	       a->w.cols && a->nr_batch && a->nr_batch <= 65535;
}

template <u32 NT> static int mid_launch(const struct mid_params *p, kvk_stream stream)
{
	const int bytes = (int)(MID_DEEP * (MID_W_BYTES + NT * 8 * 256));
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
	attr[1].val.clusterDim.x = p->chains;
	attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
	cfg.gridDim =
		dim3((p->a.w.rows + MID_ROWS - 1) / MID_ROWS * p->chains, p->a.nr_batch);
	cfg.blockDim = dim3(MID_THREADS);
	cfg.dynamicSmemBytes = (size_t)bytes;
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = 2;
	return cudaLaunchKernelEx(&cfg, linear_mid_kernel<NT>, *p) ? -EIO : 0;
}

int kvk_linear_mid_cuda(const struct kvk_linear_args *a, kvk_stream stream)
{
	struct mid_params p = {};

	p.a = *a;
	p.x_stride = a->x_stride ? a->x_stride : (u64)a->nr_batch * a->w.cols;
	p.y_stride = a->y_stride ? a->y_stride : (u64)a->nr_batch * a->w.rows;
	p.nr_blocks = (a->w.cols + 127) / 128;
	for (p.chains = 1; p.chains < KV_MIN(p.nr_blocks, MID_CHAINS);)
		p.chains *= 2;
	return a->nr_tokens <= 32 ? mid_launch<4>(&p, stream) : mid_launch<8>(&p, stream);
}
