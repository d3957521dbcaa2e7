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
 *		c, c + 8, ...), or c and c + 4. The chains are added in turn out of each other's
 *		shared memory, each CTA adding up as many tokens as any other.
 *	alone - a tile of rows for (almost) every SM: a CTA takes the chains in turn.
 *
 * Either way the bits are linear.cu's: the same 16 columns in a matrix instruction, the blocks
 * of a chain in turn, then the chains.
 */
#include "kernels/linear_mid.h"
#include "kernels/linear_end.cuh"
#include "kernels/moe_ptx.cuh"
#include "kernels/wgmma.cuh"

#define MID_USERS   128u /* threads that multiply; one more warp fetches */
#define MID_THREADS (MID_USERS + 32u)
#define MID_ROWS    64u
#define MID_HALF    (MID_ROWS * 128u) /* bytes of 64 columns of W */
#define MID_TOKENS  64u
#define MID_MORE    256u /* in runs of 64 */
#define MID_SMS	    132u
#define MID_ALONE   64u /* tiles of 64 rows from which a CTA takes one alone */

struct mid_params {
	CUtensorMap w; /* [batch][rows][cols] in boxes of 64 x 64 */
	CUtensorMap x; /* [batch][tokens][cols] in boxes of N x 64 */
	struct end_params e;
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
	const u32 row0 = blockIdx.x / p.e.ctas * MID_ROWS;
	const u64 policy = ptx_policy_stream();
	u32 w_kb = chain, w_slot = 0, x_slot = 0, turn = 0;
	const auto next_w = [&]() {
		if (w_kb >= p.e.nr_blocks)
			return;
		mid_fetch_w(p, smem + w_slot * 2 * MID_HALF,
			    smem + size::w_full + w_slot * 8, w_kb, row0, policy);
		w_slot = w_slot + 1 == size::w_deep ? 0 : w_slot + 1;
		w_kb = end_next(p.e, w_kb);
	};

	for (u32 i = 0; i < size::w_deep; i++)
		next_w();
	ptx_grid_wait();
	for (u32 kb = chain; kb < p.e.nr_blocks; kb = end_next(p.e, kb)) {
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

/* total = the chains' sums, added in turn; of two parts the second one in acc */
template <u32 N>
KVK_DEV void mid_multiply(const struct mid_params &p, u32 smem, u32 chain,
			  float (&total)[N / 2], float (&acc)[N / 2])
{
	using size = mid_size<N>;
	u32 w_slot = 0, x_slot = 0, w_turn = 0, x_turn = 0;
	int more = 0;

	for (u32 kb = chain; kb < p.e.nr_blocks; kb = end_next(p.e, kb)) {
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
		if (kb + END_CHAINS < p.e.nr_blocks)
			continue;
		end_chain(p.e, kb, acc, total);
		more = 0;
	}
}

/* grid: (CTAs of a cluster x tiles of 64 rows, matrices, runs of N tokens) */
template <u32 N>
__global__ void __launch_bounds__(MID_THREADS, 2)
	linear_mid_kernel(const __grid_constant__ struct mid_params p)
{
	using size = mid_size<N>;
	DEV_DYNAMIC_SHARED_1K(mid_smem);
	const u32 smem = ptx_smem(mid_smem), chain = blockIdx.x % p.e.ctas;
	const u32 tile = blockIdx.x / p.e.ctas;
	float total[N / 2] = {}, acc[N / 2] = {};

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
		mid_multiply<N>(p, smem, chain, total, acc);
	}
	__syncthreads(); /* the rings are used up: sums take their place */
	if (threadIdx.x >= MID_USERS)
		tile_cluster_sync();
	else
		end_finish<MID_ROWS, N>(p.e, (float *)mid_smem, tile, chain,
					threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4,
					total, acc);
	tile_cluster_leave(); /* nobody leaves while its memory is read */
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

template <u32 N> static int mid_launch(struct mid_params *p, kvk_stream stream)
{
	const int r = end_maps(&p->e.a, &p->w, &p->x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
			       MID_ROWS, N);

	return r ? r
		 : end_launch(linear_mid_kernel<N>, *p, MID_ROWS, N, MID_THREADS,
			      mid_size<N>::all, stream);
}

int kvk_linear_mid_cuda(const struct kvk_linear_args *a, kvk_stream stream)
{
	const u64 tiles = end_tiles(a, MID_ROWS, a->nr_tokens); /* of one run */
	struct mid_params p = {};

	p.e = end_make(a);
	if (tiles < MID_ALONE)
		end_split(&p.e, tiles, END_EIGHTS);
	if (a->nr_tokens <= 8)
		return mid_launch<8>(&p, stream);
	if (a->nr_tokens <= 16)
		return mid_launch<16>(&p, stream);
	if (a->nr_tokens <= 32)
		return mid_launch<32>(&p, stream);
	return mid_launch<64>(&p, stream);
}
