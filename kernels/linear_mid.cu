/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_mid.cu - y = x W^T + bias for the tokens of a decode step, BF16, on Hopper.
 *
 * W has to come from memory once; x, up to 64 tokens of some thousand values, comes from L2 once
 * for every 64 rows of W. One thread of a CTA asks the copy engine for both, in blocks of 128
 * columns: W four to six blocks ahead, the first of them before the kernel in front has ended;
 * four warps multiply (wgmma: 64 rows of W are A, the tokens are B, both from shared memory). Half
 * an SM's memory is enough, so that the next kernel's first blocks are under way meanwhile.
 *
 * Two ways to share the work out:
 *
 *	cluster - few tiles of rows: CTA c of a cluster is chain c of linear.cu's order (blocks
 *		c, c + 8, ...). The chains are added in turn out of each other's shared memory,
 *		each CTA adding up as many tokens as any other.
 *	alone - a tile of rows for (almost) every SM: a CTA takes the chains in turn.
 *
 * Either way the bits are linear.cu's: the same 16 columns in a matrix instruction, the blocks
 * of a chain in turn, then the chains.
 */
#include "kernels/linear_mid.h"
#include "kernels/moe_ptx.cuh"
#include "kernels/tensor_map.cuh"
#include "kernels/tile_ptx.cuh"
#include "kernels/wgmma.cuh"

#define MID_USERS   128u /* threads that multiply; one more warp fetches */
#define MID_THREADS (MID_USERS + 32u)
#define MID_ROWS    64u
#define MID_HALF    (MID_ROWS * 128u) /* bytes of 64 columns of W */
#define MID_CHAINS  8u		      /* of linear.cu: its warps */
#define MID_TOKENS  64u
#define MID_MORE    256u /* in runs of 64 */
#define MID_SMS	    132u
#define MID_ALONE   64u /* tiles of 64 rows from which a CTA takes one alone */
#define MID_LINE    68u /* floats from token to token of a tile's sums: no bank twice */

/* y in whole, aligned groups of four, or as it comes */
#define MID_ANY	    0u
#define MID_BF16    1u
#define MID_F32	    2u

struct mid_params {
	CUtensorMap w; /* [batch][rows][cols] in boxes of 64 x 64 */
	CUtensorMap x; /* [batch][tokens][cols] in boxes of N x 64 */
	struct kvk_linear_args a;
	u64 y_stride;
	u64 y_batch;
	u32 nr_blocks; /* of 128 columns */
	u32 ctas;      /* of a cluster; 1: alone */
	u32 kind;      /* of y: MID_BF16, MID_F32, MID_ANY */
};

/* Shared memory for N tokens: the rings of W and x, then barriers. Two CTAs fit on an SM. */
template <u32 N> struct mid_size {
	static const u32 x_half = N * 128;
	static const u32 x_deep = N == 64 ? 3 : 4;
	static const u32 w_deep = N == 64 ? 4 : N == 32 ? 5 : 6;
	static const u32 x_at = w_deep * 2 * MID_HALF;
	static const u32 w_full = x_at + x_deep * 2 * x_half;
	static const u32 x_full = w_full + w_deep * 8;
	static const u32 used = x_full + x_deep * 8;
	static const u32 all = used + x_deep * 8;
};

/* The block behind @kb in its chain; alone also the next chain's first; nr_blocks: none. */
KVK_DEV u32 mid_next(const struct mid_params &p, u32 kb)
{
	const u32 first = kb % MID_CHAINS + 1;

	if (kb + MID_CHAINS < p.nr_blocks)
		return kb + MID_CHAINS;
	return p.ctas == 1 && first < min(p.nr_blocks, MID_CHAINS) ? first : p.nr_blocks;
}

/* ------------------------------------------------------------------------------- fetching */

KVK_DEV void mid_fetch_w(const struct mid_params &p, u32 slot, u32 bar, u32 kb, u32 row0,
			 u64 policy)
{
	ptx_mbar_expect(bar, 2 * MID_HALF);
#pragma unroll
	for (u32 h = 0; h < 2; h++) {
		const int at[5] = {(int)(kb * 128 + h * 64), (int)row0, (int)blockIdx.y,
				   0, 0};

		tma_load_5d(slot + h * MID_HALF, &p.w, bar, at, policy);
	}
}

template <u32 N>
KVK_DEV void mid_fetch_x(const struct mid_params &p, u32 slot, u32 bar, u32 kb)
{
	ptx_mbar_expect(bar, 2 * mid_size<N>::x_half);
#pragma unroll
	for (u32 h = 0; h < 2; h++)
		tma_load_4d(slot + h * mid_size<N>::x_half, &p.x, bar,
			    (int)(kb * 128 + h * 64), (int)(blockIdx.z * N),
			    (int)blockIdx.y, 0);
}

/* One thread: everything the CTA reads. A slot is filled again when the four warps are through. */
template <u32 N> KVK_DEV void mid_fetch(const struct mid_params &p, u32 smem, u32 chain)
{
	using size = mid_size<N>;
	const u32 row0 = blockIdx.x / p.ctas * MID_ROWS;
	const u64 policy = ptx_policy_stream();
	u32 w_kb = chain, w_slot = 0, x_slot = 0, turn = 0;
	const auto next_w = [&]() {
		if (w_kb >= p.nr_blocks)
			return;
		mid_fetch_w(p, smem + w_slot * 2 * MID_HALF,
			    smem + size::w_full + w_slot * 8, w_kb, row0, policy);
		w_slot = w_slot + 1 == size::w_deep ? 0 : w_slot + 1;
		w_kb = mid_next(p, w_kb);
	};

	for (u32 i = 0; i < size::w_deep; i++)
		next_w();
	ptx_grid_wait();
	for (u32 kb = chain; kb < p.nr_blocks; kb = mid_next(p, kb)) {
		if (turn)
			ptx_mbar_wait(smem + size::used + x_slot * 8, (turn - 1) & 1);
		mid_fetch_x<N>(p, smem + size::x_at + x_slot * 2 * size::x_half,
			       smem + size::x_full + x_slot * 8, kb);
		if (turn)
			next_w();
		x_slot = x_slot + 1 == size::x_deep ? 0 : x_slot + 1;
		turn += x_slot == 0;
	}
}

/* ---------------------------------------------------------------------------- multiplying */

/* total = the chains' sums, added in turn */
template <u32 N>
KVK_DEV void mid_multiply(const struct mid_params &p, u32 smem, u32 chain,
			  float (&total)[N / 2])
{
	using size = mid_size<N>;
	u32 w_slot = 0, x_slot = 0, w_turn = 0, x_turn = 0;
	float acc[N / 2];
	int more = 0;

	for (u32 kb = chain; kb < p.nr_blocks; kb = mid_next(p, kb)) {
		const u64 w = wgm_desc(smem + w_slot * 2 * MID_HALF);
		const u64 x = wgm_desc(smem + size::x_at + x_slot * 2 * size::x_half);

		ptx_mbar_wait(smem + size::w_full + w_slot * 8, w_turn);
		ptx_mbar_wait(smem + size::x_full + x_slot * 8, x_turn);
		wgm_fence();
#pragma unroll
		for (u32 k = 0; k < 8; k++) {
			wgm_ss_few<N>(
				acc, wgm_desc_at(w, k / 4 * (MID_HALF / 16) + k % 4 * 2),
				wgm_desc_at(x, k / 4 * (size::x_half / 16) + k % 4 * 2),
				more);
			more = 1;
		}
		wgm_commit();
		wgm_wait<0>();
		wgm_keep(acc);
		if (threadIdx.x % 32 == 0)
			ptx_mbar_arrive(smem + size::used + x_slot * 8);
		if (++w_slot == size::w_deep)
			w_slot = 0, w_turn ^= 1;
		if (++x_slot == size::x_deep)
			x_slot = 0, x_turn ^= 1;
		if (kb + MID_CHAINS < p.nr_blocks)
			continue;
#pragma unroll
		for (u32 i = 0; i < N / 2; i++)
			total[i] += acc[i];
		more = 0;
	}
}

/* ----------------------------------------------------------------------------- adding up */

/* Four rows of y, from @at on; of MID_ANY those from @nr on are not there. BF16: two words. */
template <u32 KIND>
KVK_DEV void mid_get4(const void *y, u32 dtype, u64 at, u32 nr, u32 (&v)[4])
{
	if (KIND == MID_F32) {
		const uint4 f = *(const uint4 *)((const float *)y + at);

		v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
	} else if (KIND == MID_BF16) {
		const uint2 f = *(const uint2 *)((const u16 *)y + at);

		v[0] = f.x, v[1] = f.y;
	} else {
#pragma unroll
		for (u32 i = 0; i < 4; i++)
			if (i < nr)
				v[i] = __float_as_uint(dev_act_get(dtype, y, at + i));
	}
}

template <u32 KIND> KVK_DEV float mid_float(const u32 (&v)[4], u32 i)
{
	if (KIND == MID_BF16)
		return __uint_as_float(i % 2 ? v[i / 2] & 0xffff0000u : v[i / 2] << 16);
	return __uint_as_float(v[i]);
}

template <u32 KIND>
KVK_DEV void mid_put4(void *y, u32 dtype, u64 at, u32 nr, const float (&v)[4])
{
	if (KIND == MID_F32) {
		*(float4 *)((float *)y + at) = make_float4(v[0], v[1], v[2], v[3]);
	} else if (KIND == MID_BF16) {
		*(uint2 *)((u16 *)y + at) =
			make_uint2(ptx_bf16x2(v[0], v[1]), ptx_bf16x2(v[2], v[3]));
	} else {
#pragma unroll
		for (u32 i = 0; i < 4; i++) {
			if (i < nr && dtype == KVK_F32)
				((float *)y)[at + i] = v[i];
			else if (i < nr)
				((u16 *)y)[at + i] = kvk_f32_to_bf16(v[i]);
		}
	}
}

/* Four rows of a token, summed over the chains in turn. @part: [N][MID_LINE] of each CTA */
KVK_DEV float4 mid_sum(const struct mid_params &p, const float4 *part)
{
	float4 v[MID_CHAINS], sum = make_float4(0, 0, 0, 0);

	if (p.ctas == 1)
		return *part;
#pragma unroll
	for (u32 c = 0; c < MID_CHAINS; c++)
		if (c < p.ctas)
			v[c] = tile_cluster_get(part, c);
#pragma unroll
	for (u32 c = 0; c < MID_CHAINS; c++) {
		if (c >= p.ctas)
			continue;
		sum.x += v[c].x;
		sum.y += v[c].y;
		sum.z += v[c].z;
		sum.w += v[c].w;
	}
	return sum;
}

/*
 * The sums to shared memory, then y: this CTA's share of the tokens. What was in y comes before
 * the barrier, all of it at once: a load behind each store took 6 us. No sum is -0, so nothing
 * changes by adding a bias or a y that are not there.
 */
template <u32 N, u32 KIND>
KVK_DEV void mid_finish(const struct mid_params &p, float *part, u32 chain,
			const float (&total)[N / 2])
{
	const u32 t = threadIdx.x, share = max(N / p.ctas, 1u), first = chain * share;
	const u32 row = blockIdx.x / p.ctas * MID_ROWS + t % 16 * 4;
	const u32 nr = row < p.a.w.rows ? min(p.a.w.rows - row, 4u) : 0;
	const u32 left = p.a.nr_tokens - min(p.a.nr_tokens, blockIdx.z * N);
	const u32 end = nr && first < N ? min(left, first + share) : 0;
	const u64 base = blockIdx.z * N * p.y_stride + blockIdx.y * p.y_batch + row;
	const u32 lane_row = t / 32 * 16 + t % 32 / 4, dtype = p.a.y_dtype;
	u32 old[N / 8][4] = {};
	float bias[4] = {};

#pragma unroll
	for (u32 k = 0; k < N / 8; k++) {
		const u32 tok = first + t / 16 + k * 8;

		if (p.a.accumulate && tok < end)
			mid_get4<KIND>(p.a.y, dtype, base + tok * p.y_stride, nr, old[k]);
	}
#pragma unroll
	for (u32 i = 0; i < 4; i++)
		if (p.a.bias && i < nr)
			bias[i] = p.a.bias[row + i];
#pragma unroll
	for (u32 i = 0; i < N / 2; i++)
		part[(i / 4 * 8 + t % 4 * 2 + i % 2) * MID_LINE + lane_row +
		     i % 4 / 2 * 8] = total[i];
	tile_cluster_sync();
#pragma unroll
	for (u32 k = 0; k < N / 8; k++) {
		const u32 tok = first + t / 16 + k * 8;

		if (tok < end) {
			const float4 sum = mid_sum(
				p, (const float4 *)(part + tok * MID_LINE + t % 16 * 4));
			float v[4] = {sum.x, sum.y, sum.z, sum.w};

#pragma unroll
			for (u32 i = 0; i < 4; i++)
				v[i] = v[i] + bias[i] + mid_float<KIND>(old[k], i);
			mid_put4<KIND>(p.a.y, dtype, base + tok * p.y_stride, nr, v);
		}
	}
}

/* grid: (CTAs of a cluster x tiles of 64 rows, matrices, runs of N tokens) */
template <u32 N>
__global__ void __launch_bounds__(MID_THREADS, 2)
	linear_mid_kernel(const __grid_constant__ struct mid_params p)
{
	using size = mid_size<N>;
	DEV_DYNAMIC_SHARED_1K(mid_smem);
	const u32 smem = ptx_smem(mid_smem), chain = blockIdx.x % p.ctas;
	float total[N / 2] = {};

	ptx_grid_launch();
	if (threadIdx.x == 0) {
		for (u32 i = 0; i < size::w_deep + size::x_deep; i++)
			ptx_mbar_init(smem + size::w_full + i * 8, 1);
		for (u32 i = 0; i < size::x_deep; i++)
			ptx_mbar_init(smem + size::used + i * 8, MID_USERS / 32);
		SM90_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
	}
	__syncthreads();
	if (threadIdx.x == MID_USERS)
		mid_fetch<N>(p, smem, chain);
	__syncwarp();
	if (threadIdx.x < MID_USERS) {
		ptx_grid_wait();
		mid_multiply<N>(p, smem, chain, total);
	}
	__syncthreads(); /* the rings are used up: sums take their place */
	if (threadIdx.x >= MID_USERS)
		tile_cluster_sync();
	else if (p.kind == MID_BF16)
		mid_finish<N, MID_BF16>(p, (float *)mid_smem, chain, total);
	else if (p.kind == MID_F32)
		mid_finish<N, MID_F32>(p, (float *)mid_smem, chain, total);
	else
		mid_finish<N, MID_ANY>(p, (float *)mid_smem, chain, total);
	tile_cluster_sync(); /* nobody leaves while its memory is read */
}

/* ------------------------------------------------------------------------------ launching */

/* More tokens, where linear_tiled.cu's tiles of 128 rows by 64 tokens leave SMs without work. */
static bool mid_more(const struct kvk_linear_args *a)
{
	return a->nr_tokens <= MID_MORE &&
	       (a->w.rows + 127ull) / 128 * ((a->nr_tokens + 63) / 64) * a->nr_batch <
		       MID_SMS;
}

bool kvk_linear_mid_ok(const struct kvk_linear_args *a)
{
	const u64 xs = kvk_linear_x_stride(a), xb = kvk_linear_x_batch(a);

	return a->x_dtype == KVK_BF16 && a->w.dtype == KVK_BF16 && a->nr_tokens &&
	       (a->nr_tokens <= MID_TOKENS || mid_more(a)) && a->w.cols % 8 == 0 &&
	       xs % 8 == 0 && (a->nr_batch == 1 || xb % 8 == 0) &&
	       dev_aligned(a->x, 16) && dev_aligned(a->w.data, 16) && a->w.rows &&
	       a->w.cols && a->nr_batch && a->nr_batch <= 65535;
}

/* [batch][rows][cols] in boxes of @box_rows x 64 columns; strides in elements */
static int mid_map(tensor_encode_fn encode, CUtensorMap *map, const void *data,
		   const u64 (&dim)[3], u64 row_stride, u64 batch_stride, u32 box_rows,
		   u32 rank)
{
	const cuuint64_t dims[5] = {dim[0], dim[1], dim[2], 1, 1};
	const cuuint64_t strides[4] = {row_stride * 2, batch_stride * 2, batch_stride * 2,
				       batch_stride * 2};
	const cuuint32_t box[5] = {64, box_rows, 1, 1, 1}, step[5] = {1, 1, 1, 1, 1};

	return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, (void *)data, dims,
		      strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
		      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
		      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
		       ? 0
		       : -EIO;
}

static int mid_maps(struct mid_params *p, u32 n)
{
	const struct kvk_linear_args *a = &p->a;
	const u64 w_dim[3] = {a->w.cols, a->w.rows, a->nr_batch};
	const u64 x_dim[3] = {a->w.cols, a->nr_tokens, a->nr_batch};
	const u64 xs = kvk_linear_x_stride(a);
	const tensor_encode_fn encode = tensor_encode_find();
	int r;

	if (!encode)
		return -EIO;
	r = mid_map(encode, &p->w, a->w.data, w_dim, a->w.cols,
		    (u64)a->w.rows * a->w.cols, MID_ROWS, 5);
	/* one matrix: its stride to the next one is not used, and any will do */
	return r ? r
		 : mid_map(encode, &p->x, a->x, x_dim, xs,
			   a->nr_batch == 1 ? xs : kvk_linear_x_batch(a), n, 4);
}

template <u32 N> static int mid_launch(struct mid_params *p, kvk_stream stream)
{
	const u32 tiles = (p->a.w.rows + MID_ROWS - 1) / MID_ROWS;
	cudaLaunchAttribute attr[2] = {};
	cudaLaunchConfig_t cfg = {};
	int r = mid_maps(p, N);

	if (r)
		return r;
	if (cudaFuncSetAttribute((const void *)linear_mid_kernel<N>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)mid_size<N>::all) != cudaSuccess) {
		(void)cudaGetLastError();
		return -EIO;
	}
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	attr[1].id = cudaLaunchAttributeClusterDimension;
	attr[1].val.clusterDim.x = p->ctas;
	attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
	cfg.gridDim = dim3(tiles * p->ctas, p->a.nr_batch, (p->a.nr_tokens + N - 1) / N);
	cfg.blockDim = dim3(MID_THREADS);
	cfg.dynamicSmemBytes = mid_size<N>::all;
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = p->ctas > 1 ? 2 : 1;
	return cudaLaunchKernelEx(&cfg, linear_mid_kernel<N>, *p) ? -EIO : 0;
}

int kvk_linear_mid_cuda(const struct kvk_linear_args *a, kvk_stream stream)
{
	const u64 tiles = (u64)((a->w.rows + MID_ROWS - 1) / MID_ROWS) * a->nr_batch;
	const u32 vec_bytes = a->y_dtype == KVK_F32 ? 16 : 8;
	struct mid_params p = {};

	p.a = *a;
	p.y_batch = kvk_linear_y_batch(a);
	p.y_stride = kvk_linear_y_stride(a);
	if (a->w.rows % 4 == 0 && p.y_stride % 4 == 0 && p.y_batch % 4 == 0 &&
	    dev_aligned(a->y, vec_bytes))
		p.kind = a->y_dtype == KVK_F32 ? MID_F32 : MID_BF16;
	p.nr_blocks = (a->w.cols + 127) / 128;
	p.ctas = 1;
	while (tiles < MID_ALONE && p.ctas < KV_MIN(p.nr_blocks, MID_CHAINS))
		p.ctas *= 2;
	if (a->nr_tokens <= 8)
		return mid_launch<8>(&p, stream);
	if (a->nr_tokens <= 16)
		return mid_launch<16>(&p, stream);
	if (a->nr_tokens <= 32)
		return mid_launch<32>(&p, stream);
	return mid_launch<64>(&p, stream);
}
