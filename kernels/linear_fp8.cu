/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_fp8.cu - y = x W^T + bias for the tokens of a decode step, W in E4M3 with block scales,
 * on Hopper. linear_mid.cu in another dress: linear_end.cuh is what they share.
 *
 * A CTA takes 128 rows of W, a warp 16 of them. One thread has W fetched, blocks of 128 columns, as
 * many as the ring holds before the kernel in front has ended. All of them:
 *
 *	round	x comes in steps of 32 or 64 vectors of 128 values: a block of 64 tokens, or more
 *		blocks of fewer. Four or eight threads make e4m3 codes of a vector, as f16, in
 *		place, with products instead of divisions (fp8_quotient.h).
 *	multiply a lane takes eight neighbouring columns of a row at once and makes f16 of them in
 *		registers (exact): A of wgmma; B is x. The columns of an instruction are
 *		linear.cu's, hence the order of x's pairs (fp8_round).
 *	scale	each block's sums, times the scales of W's block and of the token's, are added
 *		in f32, as everywhere else.
 *
 * While the last block of a step is multiplied the next step is rounded. The bits are those of
 * linear.cu for any number of tokens.
 *
 * Predicted: W's bytes at 19 a clock and SM, 2.5 us from the end of the kernel in front to the end
 * of y. At 64 tokens a block has 512 clocks of products and 8,192 values of x to round: about 600
 * instructions of each warp, 1,200 clocks of issue on an SM. So 2048 x 6144 (6 blocks in each of
 * 128 CTAs) 6 us, 5 at one token. Measured: docs/performance.md, "One rank"; more, because eight
 * warps issue a third of that.
 */
#include "kernels/linear_fp8.h"
#include "kernels/fp8_quotient.h"
#include "kernels/linear_end.cuh"
#include "kernels/moe_ptx.cuh"
#include "kernels/moe_wgmma.cuh"

#define F8_ROWS	   128u
#define F8_THREADS (2 * F8_ROWS)
#define F8_BOX	   (F8_ROWS * 128u) /* bytes of a block of W */
#define F8_TOKENS  64u
#define F8_BLOCKS  96u /* of 128 columns, at most: 12,288 */
#define F8_ALONE   66u /* tiles from which a CTA takes one alone */

struct fp8_params {
	CUtensorMap w; /* [batch][rows][cols] in boxes of 128 x 128 */
	CUtensorMap x; /* [batch][tokens][cols] in boxes of N x 64 */
	struct end_params e;
};

/* Shared memory for N tokens: the rings of W and x, scales, barriers. Two CTAs fit on an SM; 64
 * tokens take the registers of two. */
template <u32 N> struct fp8_size {
	static constexpr u32 vectors = N <= 16 ? 32 : 64; /* of x in a step */
	static constexpr u32 blocks = vectors / N;
	static constexpr u32 group = N <= 16 ? blocks : 1; /* products run together */
	static constexpr u32 per = F8_THREADS / vectors; /* threads that share a vector */
	static constexpr u32 x_half = N * 128; /* bytes of 64 columns of a block */
	static constexpr u32 x_step = vectors * 256;
	static constexpr u32 x_deep = N == 64 ? 3 : 2;
	static constexpr u32 w_deep = N == 32 ? 5 : 6;
	static constexpr u32 x_at = w_deep * F8_BOX;
	static constexpr u32 scales = x_at + x_deep * x_step;
	static constexpr u32 w_scales = scales + x_deep * vectors * 4;
	static constexpr u32 w_full = w_scales + F8_BLOCKS * 4;
	static constexpr u32 w_used = w_full + w_deep * 8;
	static constexpr u32 x_full = w_used + w_deep * 8;
	static constexpr u32 all = x_full + x_deep * 8;
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
	ptx_mbar_expect(bar, F8_BOX);
	tma_load_5d(smem + f->slot * F8_BOX, &p.w, bar, at, f->policy);
	f->kb = end_next(p.e, f->kb);
	if (++f->slot == size::w_deep)
		f->slot = 0, f->turn++;
}

/* To the slots of the group before. */
template <u32 N>
KVK_DEV void fp8_refill(const struct fp8_params &p, u32 smem, struct fp8_feed *f,
			u32 *freed)
{
	if (threadIdx.x == 0) {
#pragma unroll 1
		for (; *freed; (*freed)--)
			fp8_fetch_w<N>(p, smem, f);
	}
	__syncwarp();
}

/* struct fp8_ahead - which block of x this warp has fetched next: number @i from @chain on. Alone,
 * a CTA has eight chains: to count from the first one each time took 0.3 us a block. */
struct fp8_ahead {
	u32 chain;
	u32 i;
};

/* 128 columns of x, from @col on, to shared address @at; one thread. */
template <u32 N>
KVK_DEV void fp8_ask_x(const struct fp8_params &p, u32 bar, u32 at, u32 col)
{
	using size = fp8_size<N>;

	ptx_mbar_expect(bar, 2 * size::x_half);
	tma_load_4d(at, &p.x, bar, (int)col, (int)(blockIdx.z * N), (int)blockIdx.y, 0);
	tma_load_4d(at + size::x_half, &p.x, bar, (int)col + 64, (int)(blockIdx.z * N),
		    (int)blockIdx.y, 0);
}

/* A step of x, from the CTA's block number @first of @count on: a thread of a warp per block. */
template <u32 N>
KVK_DEV void fp8_fetch_x(const struct fp8_params &p, u32 smem, u32 slot,
			 struct fp8_ahead *ahead, u32 first, u32 count)
{
	using size = fp8_size<N>;
	const u32 bar = smem + size::x_full + slot * 8, b = threadIdx.x / 32;
	const u32 at = smem + size::x_at + slot * size::x_step + b * 2 * size::x_half;

	if (threadIdx.x % 32 || b >= size::blocks || first >= count)
		return;
	if (first + b >= count) {
		ptx_mbar_arrive(bar);
		return;
	}
	const u32 col = end_block(p.e, &ahead->chain, &ahead->i) * 128;

	ahead->i += size::blocks;
	fp8_ask_x<N>(p, bar, at, col);
}

/* --------------------------------------------------------------------------- rounding x */

/* Values' codes as f16, in place. UP: they are multiplied by d.up first. */
template <bool UP, u32 M>
KVK_DEV void fp8_codes(u32 (&q)[M][4], const struct kvk_fp8_divisor &d)
{
#pragma unroll
	for (u32 i = 0; i < M * 4; i++) {
		u32 *two = &q[i / 4][i % 4];
		float lo = kvk_bits_f32(*two << 16);
		float hi = kvk_bits_f32(*two & 0xffff0000u);

		if (UP)
			lo *= d.up, hi *= d.up;
		*two = arch_e4m3_f16(
			arch_f32_e4m3(kvk_fp8_quotient(lo, d), kvk_fp8_quotient(hi, d)));
	}
}

/* This thread's vector. Four threads each: no two of a quarter warp are in the same banks. */
template <u32 N> KVK_DEV u32 fp8_vector(void)
{
	const u32 t = threadIdx.x, i = t % 32 / 4;

	if (fp8_size<N>::per == 4)
		return t / 32 * 8 + ((i & 1) << 2 | i >> 1);
	return t / fp8_size<N>::per;
}

/*
 * Codes for a step's first @nr vectors. Four threads share a vector; if it is eight, half of it.
 * Thread c of four has columns 8 c .. 8 c + 7 of each 32. Its pairs are numbers 0 to 3; pair i
 * becomes word c of piece i of the 32: so an instruction's 16 columns are 8 c + 0 .. 3 of all
 * four, the next one's 8 c + 4 .. 7, and each thread's columns are where A's registers have them.
 */
template <u32 N> KVK_DEV void fp8_round(u8 *x, float *scales, u32 nr)
{
	using size = fp8_size<N>;
	const u32 v = fp8_vector<N>(), c = threadIdx.x % 4, mine = 16 / size::per;
	const u32 half = size::per == 8 ? threadIdx.x / 4 % 2 : 0;
	u8 *row = x + v / N * (2 * size::x_half) + v % N * 128 + half * size::x_half;
	u32 q[mine][4], top = 0;

	if (v / 8 * 8 >= nr) /* none of the warp's: N is a multiple of 8 */
		return;
#pragma unroll
	for (u32 j = 0; j < mine; j++) {
		const uint4 f = *(const uint4 *)(row + j / 2 * size::x_half +
						 ((j % 2 * 4 + c) ^ v % 8) * 16);

		q[j][0] = f.x, q[j][1] = f.y, q[j][2] = f.z, q[j][3] = f.w;
#pragma unroll
		for (u32 i = 0; i < 4; i++)
			top = tile_max_bf16x2(top, q[j][i] & 0x7fff7fffu);
	}
#pragma unroll
	for (u32 i = 1; i < size::per; i *= 2)
		top = tile_max_bf16x2(top, __shfl_xor_sync(~0u, top, i));
	top = max(top << 16, top & 0xffff0000u);

	const float scale = kvk_fp8_act_scale(kvk_bits_f32(top));
	const struct kvk_fp8_divisor d = kvk_fp8_divide_by(scale);

	if (__ballot_sync(~0u, d.up != 1.0f)) /* hardly ever */
		fp8_codes<true>(q, d);
	else
		fp8_codes<false>(q, d);
#pragma unroll
	for (u32 i = 0; i < mine * 4; i++)
		*(u32 *)(row + i / 8 * size::x_half +
			 ((i / 4 % 2 * 4 + i % 4) ^ v % 8) * 16 + c * 4) =
			q[i / 4][i % 4];
	if (threadIdx.x % size::per == 0)
		scales[v] = scale;
}

/* ---------------------------------------------------------------------------- multiplying */

/* Fragment row @g is row fp8_row(g) of eight: half a warp reads different banks. */
KVK_DEV u32 fp8_row(u32 g)
{
	return (g & 3) << 1 | g >> 2;
}

/* Start the products of a block. @w: its slot; @x: of the step's share; @a: of the halves */
template <u32 N>
KVK_DEV void fp8_products(float (&sum)[N / 2], const u8 *w, u32 x, u32 (&a)[2][4][4])
{
	const u32 g = fp8_row(threadIdx.x % 32 / 4), c = threadIdx.x % 4;
	const u8 *row = w + (threadIdx.x / 32 * 16 + g) * 128 + c % 2 * 8;
	const u64 desc = wgm_desc(x);

#pragma unroll
	for (u32 half = 0; half < 2; half++) {
		uint2 lo[2], hi[2];

#pragma unroll
		for (u32 j = 0; j < 2; j++) {
			const u8 *at = row + (((half * 2 + j) * 2 + c / 2) ^ g) * 16;

			lo[j] = *(const uint2 *)at;
			hi[j] = *(const uint2 *)(at + 8 * 128);
		}
		/* those of the block before that used this half's registers */
		if constexpr (fp8_size<N>::group > 1)
			wgm_wait<1>();
#pragma unroll
		for (u32 i = 0; i < 4; i++) {
			const u32 l = i % 2 ? lo[i / 2].y : lo[i / 2].x;
			const u32 h = i % 2 ? hi[i / 2].y : hi[i / 2].x;

			a[half][i][0] = arch_e4m3_f16(l & 0xffff);
			a[half][i][1] = arch_e4m3_f16(h & 0xffff);
			a[half][i][2] = arch_e4m3_f16(l >> 16);
			a[half][i][3] = arch_e4m3_f16(h >> 16);
		}
		wgm_fence();
#pragma unroll
		for (u32 i = 0; i < 4; i++) {
			const u64 b = wgm_desc_at(desc, half * (N * 128 / 16) + i * 2);

			if constexpr (N == 8)
				tile_wgmma8(sum, a[half][i], b, half + i > 0);
			else
				moe_wgmma<N>(sum, a[half][i], b, half + i > 0);
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
KVK_DEV void fp8_take_scales(const struct end_params &p, float *to, u32 tile)
{
	const float *from =
		(const float *)p.a.w.scales +
		((u64)blockIdx.y * kvk_fp8_blocks(p.a.w.rows) + tile) * p.nr_blocks;

	if (threadIdx.x < p.nr_blocks)
		to[threadIdx.x] = __ldg(from + threadIdx.x);
}

/* struct fp8_at - how far a CTA is */
struct fp8_at {
	u32 kb;	    /* block that is scaled next */
	u32 w_slot; /* whose products start next */
	u32 w_turn;
	u32 w_done; /* slot that is given back next */
	u32 x_slot; /* step of x that is rounded next */
	u32 x_turn;
};

/* Wait for a step of x and round it; @nr: its blocks. Return: its slot */
template <u32 N> KVK_DEV u32 fp8_take_x(u8 *smem, struct fp8_at *at, u32 nr)
{
	using size = fp8_size<N>;
	const u32 slot = at->x_slot;

	ptx_mbar_wait(ptx_smem(smem) + size::x_full + slot * 8, at->x_turn);
	fp8_round<N>(smem + size::x_at + slot * size::x_step,
		     (float *)(smem + size::scales) + slot * size::vectors, nr * N);
	tile_fence_async(); /* these stores before the products' reads */
	if (++at->x_slot == size::x_deep)
		at->x_slot = 0, at->x_turn ^= 1;
	return slot;
}

/* Start the products of @nr blocks. @x: of the step, as a shared address */
template <u32 N>
KVK_DEV void fp8_start(u8 *smem, struct fp8_at *at, u32 x, u32 nr,
		       float (&sum)[fp8_size<N>::group][N / 2], u32 (&a)[2][4][4])
{
	using size = fp8_size<N>;

#pragma unroll
	for (u32 g = 0; g < size::group; g++) {
		if (g >= nr)
			break;
		ptx_mbar_wait(ptx_smem(smem) + size::w_full + at->w_slot * 8, at->w_turn);
		fp8_products<N>(sum[g], smem + at->w_slot * F8_BOX,
				x + g * 2 * size::x_half, a);
		if (++at->w_slot == size::w_deep)
			at->w_slot = 0, at->w_turn ^= 1;
	}
}

/* Their sums to the chain's. @scales: of x */
template <u32 N>
KVK_DEV void fp8_end(const struct end_params &p, u8 *smem, struct fp8_at *at,
		     const float *scales, u32 nr,
		     const float (&sum)[fp8_size<N>::group][N / 2], float (&total)[N / 2],
		     float (&acc)[N / 2])
{
	using size = fp8_size<N>;
	const float *w_scales = (const float *)(smem + size::w_scales);

#pragma unroll
	for (u32 g = 0; g < size::group; g++) {
		if (g >= nr)
			break;
		if (threadIdx.x % 32 == 0)
			ptx_mbar_arrive(ptx_smem(smem) + size::w_used + at->w_done * 8);
		at->w_done = at->w_done + 1 == size::w_deep ? 0 : at->w_done + 1;
		fp8_scale<N>(acc, sum[g], scales + g * N, w_scales[at->kb]);
		end_chain(p, at->kb, acc, total);
		at->kb = end_next(p, at->kb);
	}
}

/* total = the chains' sums, added in turn; of two parts the second one in acc */
template <u32 N>
KVK_DEV void fp8_multiply(const struct fp8_params &p, u8 *smem, u32 chain, u32 count,
			  struct fp8_feed *feed, struct fp8_ahead *ahead,
			  float (&total)[N / 2], float (&acc)[N / 2])
{
	using size = fp8_size<N>;
	const u32 base = ptx_smem(smem);
	struct fp8_at at = {chain, 0, 0, 0, 0, 0};
	u32 next = 0, freed = 0, a[2][4][4];
	float sum[size::group][N / 2];

	if (count)
		next = fp8_take_x<N>(smem, &at, min(count, size::blocks));
	__syncthreads();
	for (u32 first = 0; first < count; first += size::blocks) {
		const u32 slot = next, nr = min(count - first, size::blocks);
		const u32 behind = count - first - nr; /* blocks */
		const float *scales =
			(const float *)(smem + size::scales) + slot * size::vectors;

#pragma unroll 1
		for (u32 b = 0; b < nr; b += size::group) {
			/* several: they may be what is fetched now */
			if (size::group > 1)
				fp8_refill<N>(p, base, feed, &freed);
			fp8_start<N>(smem, &at,
				     base + size::x_at + slot * size::x_step +
					     b * 2 * size::x_half,
				     nr - b, sum, a);
			if (size::group == 1)
				fp8_refill<N>(p, base, feed, &freed);
			if (b + size::group >= nr && behind)
				next = fp8_take_x<N>(smem, &at,
						     min(behind, size::blocks));
			wgm_wait<0>();
#pragma unroll
			for (u32 g = 0; g < size::group; g++)
				wgm_keep(sum[g]);
			fp8_end<N>(p.e, smem, &at, scales + b * N, nr - b, sum, total,
				   acc);
			freed = min(nr - b, size::group);
		}
		/* the next step is rounded, and everybody is through with this one */
		__syncthreads();
		fp8_fetch_x<N>(p, base, slot, ahead, first + size::x_deep * size::blocks,
			       count);
		__syncwarp();
	}
}

/*
 * The same where a step of x is one block, its products are alone and a CTA may have all chains of
 * its rows: no more around a block than it needs. With the loops above 512 tokens took 14 % longer:
 * the warp that asks for W and x is the one that all wait for.
 */
template <u32 N>
KVK_DEV void fp8_multiply_one(const struct fp8_params &p, u8 *smem, u32 chain,
			      struct fp8_feed *feed, float (&total)[N / 2],
			      float (&acc)[N / 2])
{
	using size = fp8_size<N>;
	const u32 base = ptx_smem(smem), nr_blocks = p.e.nr_blocks;
	const float *w_scales = (const float *)(smem + size::w_scales);
	struct fp8_at at = {chain, 0, 0, 0, 0, 0};
	u32 next = 0, x_kb = chain;

	for (u32 i = 0; i < size::x_deep && x_kb < nr_blocks; i++)
		x_kb = end_next(p.e, x_kb);
	if (chain < nr_blocks)
		next = fp8_take_x<N>(smem, &at, 1);
	__syncthreads();
	while (at.kb < nr_blocks) {
		const u32 kb = at.kb, slot = next, bar = base + at.w_slot * 8;
		u32 a[2][4][4];
		float sum[N / 2];

		at.kb = end_next(p.e, kb);
		ptx_mbar_wait(bar + size::w_full, at.w_turn);
		fp8_products<N>(sum, smem + at.w_slot * F8_BOX,
				base + size::x_at + slot * size::x_step, a);
		if (threadIdx.x == 0 && kb != chain) /* the slot of the block before */
			fp8_fetch_w<N>(p, base, feed);
		__syncwarp();
		if (at.kb < nr_blocks)
			next = fp8_take_x<N>(smem, &at, 1);
		wgm_wait<0>();
		wgm_keep(sum);
		if (threadIdx.x % 32 == 0)
			ptx_mbar_arrive(bar + size::w_used);
		if (++at.w_slot == size::w_deep)
			at.w_slot = 0, at.w_turn ^= 1;
		fp8_scale<N>(acc, sum,
			     (const float *)(smem + size::scales) + slot * size::vectors,
			     w_scales[kb]);
		end_chain(p.e, kb, acc, total);
		/* the next block is rounded, and everybody is through with this one */
		__syncthreads();
		if (x_kb < nr_blocks) {
			/* not by the warp that asks for W */
			if (threadIdx.x == F8_THREADS / 2)
				fp8_ask_x<N>(p, base + size::x_full + slot * 8,
					     base + size::x_at + slot * size::x_step,
					     x_kb * 128);
			x_kb = end_next(p.e, x_kb);
		}
		__syncwarp();
	}
}

/* grid: (CTAs of a cluster x tiles of 128 rows, matrices, runs of N tokens) */
template <u32 N>
__global__ void __launch_bounds__(F8_THREADS, N == 64 ? 1 : 2)
	linear_fp8_kernel(const __grid_constant__ struct fp8_params p)
{
	using size = fp8_size<N>;
	DEV_DYNAMIC_SHARED_1K(fp8_smem);
	const u32 smem = ptx_smem(fp8_smem), chain = blockIdx.x % p.e.ctas;
	const u32 tile = blockIdx.x / p.e.ctas, count = end_count(p.e, chain);
	const u32 lane_row = threadIdx.x / 32 * 16 + fp8_row(threadIdx.x % 32 / 4);
	struct fp8_feed feed = {chain, 0, 0, (int)(tile * F8_ROWS), 0};
	struct fp8_ahead ahead = {chain, threadIdx.x / 32};
	float total[N / 2] = {}, acc[N / 2] = {};

	ptx_grid_launch();
	if (threadIdx.x == 0) {
		for (u32 i = 0; i < size::w_deep; i++) {
			ptx_mbar_init(smem + size::w_full + i * 8, 1);
			ptx_mbar_init(smem + size::w_used + i * 8, F8_THREADS / 32);
		}
		for (u32 i = 0; i < size::x_deep; i++)
			ptx_mbar_init(smem + size::x_full + i * 8, size::blocks);
		SM90_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
		feed.policy = ptx_policy_stream();
#pragma unroll 1
		for (u32 i = 0; i < size::w_deep; i++)
			fp8_fetch_w<N>(p, smem, &feed);
	}
	fp8_take_scales(p.e, (float *)(fp8_smem + size::w_scales), tile);
	__syncthreads();
	ptx_grid_wait();
#pragma unroll
	for (u32 i = 0; i < size::x_deep; i++)
		fp8_fetch_x<N>(p, smem, i, &ahead, i * size::blocks, count);
	__syncwarp();
	if constexpr (size::blocks == 1)
		fp8_multiply_one<N>(p, fp8_smem, chain, &feed, total, acc);
	else
		fp8_multiply<N>(p, fp8_smem, chain, count, &feed, &ahead, total, acc);
	/* the rings are used up: sums take their place */
	end_finish<F8_ROWS, N>(p.e, (float *)fp8_smem, tile, chain, lane_row, total, acc);
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
	return end_launch(linear_fp8_kernel<N>, *p, F8_ROWS, N, F8_THREADS,
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
