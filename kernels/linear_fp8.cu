/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_fp8.cu - y = x W^T + bias for the tokens of a decode step, W in E4M3 with block scales,
 * on Hopper. linear_mid.cu in another dress: linear_end.cuh is what they share.
 *
 * A CTA takes 128 rows of W, a warp 16 of them. One thread has W fetched, blocks of 128 columns, as
 * many as the ring holds before the kernel in front has ended. All of them:
 *
 *	round	x comes in steps of 64 vectors of 128 values: a block of 64 tokens, or more
 *		blocks of fewer. Four threads make e4m3 codes of a vector, as f16, in place, with
 *		products instead of divisions (fp8_quotient.h).
 *	multiply a lane takes eight neighbouring columns of a row at once and makes f16 of them in
 *		registers (exact): A of wgmma; B is x. The columns of an instruction are
 *		linear.cu's, hence the order of x's pairs (fp8_round).
 *	scale	after each block its sums, times the scales of W's block and of the token's,
 *		are added in f32, as everywhere else.
 *
 * While the last block of a step is multiplied the next step is rounded. The bits are those of
 * linear.cu for any number of tokens.
 *
 * Predicted: 2048 x 6144 in 6 us at 64 tokens, 5 at one (W's bytes 3, then 2.5 from the end of the
 * kernel in front to the end of y). Measured 25 and 12: a block costs a warp 650 instructions at
 * 64 tokens and eight warps issue one in three clocks; docs/performance.md, "One rank".
 */
#include "kernels/linear_fp8.h"
#include "kernels/fp8_quotient.h"
#include "kernels/linear_end.cuh"
#include "kernels/moe_ptx.cuh"
#include "kernels/moe_wgmma.cuh"

#define F8_ROWS	   128u
#define F8_VECTORS 64u		       /* of x in a step */
#define F8_STEP	   (F8_VECTORS * 256u) /* their bytes */
#define F8_TOKENS  64u
#define F8_BLOCKS  96u /* of 128 columns, at most: 12,288 */
#define F8_ALONE   66u /* tiles from which a CTA takes one alone */

struct fp8_params {
	CUtensorMap w; /* [batch][rows][cols] in boxes of 128 x 128 */
	CUtensorMap x; /* [batch][tokens][cols] in boxes of N x 64 */
	struct end_params e;
};

/* Shared memory for tiles of 128 rows x N tokens: the rings of W and x, x's scales, barriers. But
 * for 128 rows of 64 tokens, which take the registers too, two CTAs fit on an SM. */
template <u32 N> struct fp8_size {
	static const bool whole = N == 64;
	static const u32 threads = 2 * F8_ROWS;
	static const u32 w_box = F8_ROWS * 128;
	static const u32 x_half = N * 128; /* bytes of 64 columns of a block */
	static const u32 blocks = F8_VECTORS / N;
	static const u32 x_deep = N == 64 ? 3 : 2;
	static const u32 w_deep = N == 64 ? 6 : 5;
	static const u32 x_at = w_deep * w_box;
	static const u32 scales = x_at + x_deep * F8_STEP;
	static const u32 w_scales = scales + x_deep * F8_VECTORS * 4;
	static const u32 w_full = w_scales + F8_BLOCKS * 4;
	static const u32 w_used = w_full + w_deep * 8;
	static const u32 x_full = w_used + w_deep * 8;
	static const u32 all = x_full + x_deep * 8;
};

/* ------------------------------------------------------------------------------- fetching */

/* struct fp8_feed - what one thread has fetched of W: the next block, its slot */
struct fp8_feed {
	u32 kb;
	u32 slot;
	u32 turn; /* times that the ring was filled */
	int row0;
	u64 policy;
};

/* The next block of W; to a slot that was used when the warps are through with it. */
template <u32 N>
KVK_DEV void fp8_fetch_w(const struct fp8_params &p, u32 smem, struct fp8_feed *f)
{
	using size = fp8_size<N>;
	const u32 bar = smem + size::w_full + f->slot * 8;
	const int at[5] = {(int)(f->kb * 128), f->row0, (int)blockIdx.y, 0, 0};

	if (f->kb >= p.e.nr_blocks)
		return;
	if (f->turn)
		ptx_mbar_wait(smem + size::w_used + f->slot * 8, (f->turn - 1) & 1);
	ptx_mbar_expect(bar, size::w_box);
	tma_load_5d(smem + f->slot * size::w_box, &p.w, bar, at, f->policy);
	f->kb = end_next(p.e, f->kb);
	if (++f->slot == size::w_deep)
		f->slot = 0, f->turn++;
}

/* The first block of the step behind the one that begins with @kb. */
template <u32 N> KVK_DEV u32 fp8_next_step(const struct end_params &p, u32 kb)
{
#pragma unroll 1
	for (u32 i = 0; i < fp8_size<N>::blocks && kb < p.nr_blocks; i++)
		kb = end_next(p, kb);
	return kb;
}

/* A step of x, from block @kb on: a thread of each warp takes a block. */
template <u32 N>
KVK_DEV void fp8_fetch_x(const struct fp8_params &p, u32 smem, u32 slot, u32 kb)
{
	using size = fp8_size<N>;
	const u32 bar = smem + size::x_full + slot * 8, mine = threadIdx.x / 32;
	const u32 at = smem + size::x_at + slot * F8_STEP;

	if (threadIdx.x % 32 || mine >= size::blocks)
		return;
#pragma unroll 1
	for (u32 b = 0; b < size::blocks; b++) {
		if (b % (size::threads / 32) == mine) {
			if (kb >= p.e.nr_blocks) {
				ptx_mbar_arrive(bar);
				continue;
			}
			ptx_mbar_expect(bar, 2 * size::x_half);
#pragma unroll
			for (u32 h = 0; h < 2; h++)
				tma_load_4d(at + (b * 2 + h) * size::x_half, &p.x, bar,
					    (int)(kb * 128 + h * 64),
					    (int)(blockIdx.z * N), (int)blockIdx.y, 0);
		}
		if (kb < p.e.nr_blocks)
			kb = end_next(p.e, kb);
	}
}

/* --------------------------------------------------------------------------- rounding x */

/* 32 values' codes as f16, in place. UP: they are multiplied by d.up first. */
template <bool UP> KVK_DEV void fp8_codes(u32 (&q)[4][4], const struct kvk_fp8_divisor &d)
{
#pragma unroll
	for (u32 i = 0; i < 16; i++) {
		u32 *two = &q[i / 4][i % 4];
		float lo = kvk_bits_f32(*two << 16);
		float hi = kvk_bits_f32(*two & 0xffff0000u);

		if (UP)
			lo *= d.up, hi *= d.up;
		*two = arch_e4m3_f16(
			arch_f32_e4m3(kvk_fp8_quotient(lo, d), kvk_fp8_quotient(hi, d)));
	}
}

/* Thread @i of a warp's eight vectors: no two of a quarter warp are in the same banks. */
KVK_DEV u32 fp8_vector(u32 i)
{
	return (i & 1) << 2 | i >> 1;
}

/*
 * Codes for a step's first @nr vectors. Thread c of four has columns 8 c .. 8 c + 7 of each 32
 * of a vector. Its pairs are numbers 0 to 3; pair i becomes word c of piece i of the 32: so an
 * instruction's 16 columns are 8 c + 0 .. 3 of all four threads, the next one's 8 c + 4 .. 7, and
 * each thread's columns are where A's registers have them.
 */
template <u32 N> KVK_DEV void fp8_round(u8 *x, float *scales, u32 nr)
{
	using size = fp8_size<N>;
	const u32 c = threadIdx.x % 4;

#pragma unroll
	for (u32 first = 0; first < F8_VECTORS; first += size::threads / 4) {
		const u32 v =
			first + threadIdx.x / 32 * 8 + fp8_vector(threadIdx.x % 32 / 4);
		u8 *row = x + v / N * (2 * size::x_half) + v % N * 128;
		u32 q[4][4], top = 0;

		if (v >= nr) /* none of the warp's */
			continue;
#pragma unroll
		for (u32 j = 0; j < 4; j++) {
			const uint4 f = *(const uint4 *)(row + j / 2 * size::x_half +
							 ((j % 2 * 4 + c) ^ v % 8) * 16);

			q[j][0] = f.x, q[j][1] = f.y, q[j][2] = f.z, q[j][3] = f.w;
#pragma unroll
			for (u32 i = 0; i < 4; i++)
				top = tile_max_bf16x2(top, q[j][i] & 0x7fff7fffu);
		}
		top = tile_max_bf16x2(top, __shfl_xor_sync(~0u, top, 1));
		top = tile_max_bf16x2(top, __shfl_xor_sync(~0u, top, 2));
		top = max(top << 16, top & 0xffff0000u);

		const float scale = kvk_fp8_act_scale(kvk_bits_f32(top));
		const struct kvk_fp8_divisor d = kvk_fp8_divide_by(scale);

		if (__ballot_sync(~0u, d.up != 1.0f)) /* hardly ever */
			fp8_codes<true>(q, d);
		else
			fp8_codes<false>(q, d);
#pragma unroll
		for (u32 i = 0; i < 16; i++)
			*(u32 *)(row + i / 8 * size::x_half +
				 ((i / 4 % 2 * 4 + i % 4) ^ v % 8) * 16 + c * 4) =
				q[i / 4][i % 4];
		if (c == 0)
			scales[v] = scale;
	}
}

/* ---------------------------------------------------------------------------- multiplying */

/* Fragment row @g is row fp8_row(g) of eight: half a warp reads different banks. */
KVK_DEV u32 fp8_row(u32 g)
{
	return (g & 3) << 1 | g >> 2;
}

/* Start the products of a block. @w: its slot; @x: of the step's share */
template <u32 N>
KVK_DEV void fp8_products(float (&sum)[N / 2], const u8 *w, u32 x, u32 (&a)[8][4])
{
	const u32 g = fp8_row(threadIdx.x % 32 / 4), c = threadIdx.x % 4;
	const u8 *row = w + (threadIdx.x / 32 * 16 + g) * 128 + c % 2 * 8;
	const u64 desc = wgm_desc(x);

#pragma unroll
	for (u32 half = 0; half < 2; half++) {
#pragma unroll
		for (u32 j = half * 2; j < half * 2 + 2; j++) {
			const u8 *at = row + ((j * 2 + c / 2) ^ g) * 16;
			const uint2 lo = *(const uint2 *)at;
			const uint2 hi = *(const uint2 *)(at + 8 * 128);

			a[2 * j][0] = arch_e4m3_f16(lo.x & 0xffff);
			a[2 * j][1] = arch_e4m3_f16(hi.x & 0xffff);
			a[2 * j][2] = arch_e4m3_f16(lo.x >> 16);
			a[2 * j][3] = arch_e4m3_f16(hi.x >> 16);
			a[2 * j + 1][0] = arch_e4m3_f16(lo.y & 0xffff);
			a[2 * j + 1][1] = arch_e4m3_f16(hi.y & 0xffff);
			a[2 * j + 1][2] = arch_e4m3_f16(lo.y >> 16);
			a[2 * j + 1][3] = arch_e4m3_f16(hi.y >> 16);
		}
		wgm_fence();
#pragma unroll
		for (u32 i = half * 4; i < half * 4 + 4; i++) {
			const u64 b =
				wgm_desc_at(desc, half * (N * 128 / 16) + i % 4 * 2);

			if constexpr (N == 8)
				tile_wgmma8(sum, a[i], b, i > 0);
			else
				moe_wgmma<N>(sum, a[i], b, i > 0);
		}
		wgm_commit();
	}
}

/* acc += scale of W * scale of x * the block's sums */
template <u32 N>
KVK_DEV void fp8_scale(float (&acc)[N / 2], const float (&sum)[N / 2],
		       const float *scales, float s)
{
#pragma unroll
	for (u32 i = 0; i < N / 8; i++) {
		const float2 x = *(const float2 *)(scales + i * 8 + threadIdx.x % 4 * 2);

		acc[i * 4] += s * x.x * sum[i * 4];
		acc[i * 4 + 1] += s * x.y * sum[i * 4 + 1];
		acc[i * 4 + 2] += s * x.x * sum[i * 4 + 2];
		acc[i * 4 + 3] += s * x.y * sum[i * 4 + 3];
	}
}

/* The scales of W's blocks in this CTA's rows, by block of columns, to shared memory: a load for
 * each block on the way took as long as the rest of it. */
template <u32 N> KVK_DEV void fp8_take_scales(const struct end_params &p, float *to)
{
	const u32 block = blockIdx.x / p.ctas * F8_ROWS / KVK_FP8_BLOCK;
	const float *from =
		(const float *)p.a.w.scales +
		((u64)blockIdx.y * kvk_fp8_blocks(p.a.w.rows) + block) * p.nr_blocks;

	for (u32 i = threadIdx.x; i < p.nr_blocks; i += fp8_size<N>::threads)
		to[i] = __ldg(from + i);
}

/* struct fp8_step - where a step of x lies */
struct fp8_step {
	u32 slot;
	u32 turn; /* parity of its barrier */
	u32 kb;	  /* its first block */
};

/* Wait for a step and round it. */
template <u32 N>
KVK_DEV void fp8_take_x(const struct end_params &p, u8 *smem, const struct fp8_step &s)
{
	using size = fp8_size<N>;
	u32 nr = 0;

	for (u32 k = s.kb; nr < F8_VECTORS && k < p.nr_blocks; k = end_next(p, k))
		nr += N;
	ptx_mbar_wait(ptx_smem(smem) + size::x_full + s.slot * 8, s.turn);
	fp8_round<N>(smem + size::x_at + s.slot * F8_STEP,
		     (float *)(smem + size::scales) + s.slot * F8_VECTORS, nr);
	tile_fence_async(); /* these stores before the products' reads */
}

/* total = the chains' sums, added in turn; of two parts the second one in acc */
template <u32 N>
KVK_DEV void fp8_multiply(const struct fp8_params &p, u8 *smem, u32 chain,
			  float (&total)[N / 2], float (&acc)[N / 2])
{
	using size = fp8_size<N>;
	const u32 base = ptx_smem(smem), nr_blocks = p.e.nr_blocks;
	float *w_scales = (float *)(smem + size::w_scales);
	struct fp8_step step = {0, 0, chain};
	struct fp8_feed feed = {chain, 0, 0, (int)(blockIdx.x / p.e.ctas * F8_ROWS),
				ptx_policy_stream()};
	u32 w_slot = 0, w_turn = 0, x_kb = chain, kb = chain;

	if (threadIdx.x == 0) {
#pragma unroll 1
		for (u32 i = 0; i < size::w_deep; i++)
			fp8_fetch_w<N>(p, base, &feed);
	}
	fp8_take_scales<N>(p.e, w_scales);
	ptx_grid_wait();
#pragma unroll 1
	for (u32 i = 0; i < size::x_deep; i++) {
		if (x_kb < nr_blocks)
			fp8_fetch_x<N>(p, base, i, x_kb);
		x_kb = fp8_next_step<N>(p.e, x_kb);
	}
	__syncwarp();
	if (kb < nr_blocks)
		fp8_take_x<N>(p.e, smem, step);
	__syncthreads();
	while (kb < nr_blocks) {
		const u32 slot = step.slot;
		const float *scales =
			(const float *)(smem + size::scales) + slot * F8_VECTORS;

		for (u32 b = 0; b < size::blocks && kb < nr_blocks; b++) {
			const u32 next = end_next(p.e, kb), w_bar = base + w_slot * 8;
			u32 a[8][4];
			float sum[N / 2];

			ptx_mbar_wait(w_bar + size::w_full, w_turn);
			fp8_products<N>(sum, smem + w_slot * size::w_box,
					base + size::x_at + slot * F8_STEP +
						b * 2 * size::x_half,
					a);
			/* the slot of the block before */
			if (threadIdx.x == 0 && kb != chain)
				fp8_fetch_w<N>(p, base, &feed);
			__syncwarp();
			if (b + 1 == size::blocks && next < nr_blocks) {
				step.slot = slot + 1 == size::x_deep ? 0 : slot + 1;
				step.turn ^= step.slot == 0;
				step.kb = next;
				fp8_take_x<N>(p.e, smem, step);
			}
			wgm_wait<0>();
			wgm_keep(sum);
			if (threadIdx.x % 32 == 0)
				ptx_mbar_arrive(w_bar + size::w_used);
			if (++w_slot == size::w_deep)
				w_slot = 0, w_turn ^= 1;
			fp8_scale<N>(acc, sum, scales + b * N, w_scales[kb]);
			end_chain(p.e, kb, acc, total);
			kb = next;
		}
		/* the next step is rounded, and everybody is through with this one */
		__syncthreads();
		if (x_kb < nr_blocks)
			fp8_fetch_x<N>(p, base, slot, x_kb);
		__syncwarp();
		x_kb = fp8_next_step<N>(p.e, x_kb);
	}
}

/* grid: (CTAs of a cluster x tiles of 128 rows, matrices, runs of N tokens) */
template <u32 N>
__global__ void __launch_bounds__(fp8_size<N>::threads, fp8_size<N>::whole ? 1 : 2)
	linear_fp8_kernel(const __grid_constant__ struct fp8_params p)
{
	using size = fp8_size<N>;
	DEV_DYNAMIC_SHARED_1K(fp8_smem);
	const u32 smem = ptx_smem(fp8_smem), chain = blockIdx.x % p.e.ctas;
	const u32 lane_row = threadIdx.x / 32 * 16 + fp8_row(threadIdx.x % 32 / 4);
	float total[N / 2] = {}, acc[N / 2] = {};

	ptx_grid_launch();
	if (threadIdx.x == 0) {
		for (u32 i = 0; i < size::w_deep; i++) {
			ptx_mbar_init(smem + size::w_full + i * 8, 1);
			ptx_mbar_init(smem + size::w_used + i * 8, size::threads / 32);
		}
		for (u32 i = 0; i < size::x_deep; i++)
			ptx_mbar_init(smem + size::x_full + i * 8, size::blocks);
		SM90_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
	}
	__syncthreads();
	fp8_multiply<N>(p, fp8_smem, chain, total, acc);
	__syncthreads(); /* the rings are used up: sums take their place */
	end_finish<F8_ROWS, N>(p.e, (float *)fp8_smem, chain, lane_row, total, acc);
	tile_cluster_leave(); /* nobody leaves while its memory is read */
}

/* ------------------------------------------------------------------------------ launching */

bool kvk_linear_fp8_ok(const struct kvk_linear_args *a)
{
	const u64 xs = kvk_linear_x_stride(a), xb = kvk_linear_x_batch(a);

	return a->x_dtype == KVK_BF16 && a->w.dtype == KVK_E4M3 && a->w.scales &&
	       a->nr_tokens && a->nr_tokens <= 65535 * F8_TOKENS && a->w.cols % 16 == 0 &&
	       a->w.cols <= F8_BLOCKS * KVK_FP8_BLOCK && xs % 8 == 0 &&
	       (a->nr_batch == 1 || xb % 8 == 0) && dev_aligned(a->x, 16) &&
	       dev_aligned(a->w.data, 16) && a->w.rows && a->w.cols && a->nr_batch &&
	       a->nr_batch <= 65535;
}

template <u32 N> static int fp8_run(struct fp8_params *p, kvk_stream stream)
{
	const struct kvk_linear_args *a = &p->e.a;
	const u64 tiles = end_tiles(a, F8_ROWS, N);
	const int r =
		end_maps(a, &p->w, &p->x, CU_TENSOR_MAP_DATA_TYPE_UINT8, F8_ROWS, N);

	if (r)
		return r;
	if (tiles < F8_ALONE)
		end_split(&p->e, tiles, N == 64 ? END_EIGHTS / 2 : END_EIGHTS);
	return end_launch(linear_fp8_kernel<N>, *p, F8_ROWS, N, fp8_size<N>::threads,
			  fp8_size<N>::all, stream);
}

int kvk_linear_fp8_cuda(const struct kvk_linear_args *a, kvk_stream stream)
{
	struct fp8_params p = {};

	p.e = end_make(a);
	if (a->nr_tokens <= 8)
		return fp8_run<8>(&p, stream);
	if (a->nr_tokens <= 16)
		return fp8_run<16>(&p, stream);
	if (a->nr_tokens <= 32)
		return fp8_run<32>(&p, stream);
	return fp8_run<64>(&p, stream);
}
