/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_tiled.cu - y = x W^T + bias for many tokens: a CTA takes 128 rows of W times 64
 * tokens, so that W leaves L2 once for 64 tokens and x once for 128 rows.
 *
 * W in BF16 or E4M3, x in BF16. A dot product has the bits that linear.cu gives it: blocks
 * of 128 columns in the same order (0, 8, 16, ..., then 1, 9, ...), each of these eight
 * chains in an accumulator of its own, the chains added up in turn, the same columns in
 * the same places of the same matrix instruction. A token's result does not depend on how
 * many others are computed with it.
 *
 * Columns travel through two buffers in shared memory by cp.async. A lane of the matrix
 * instruction reads columns 8 c .. 8 c + 7 of a row at once (c = lane % 4), BF16 4 c .. 4 c + 3
 * of two times 16; pieces are swapped by row so that no bank is met twice. E4M3 rounds x to e4m3
 * per token and 128 columns in place, before the products.
 */
#include "kernels/attn_cuda.h"
#include "kernels/dev.cuh"
#include "kernels/linear_tiled.h"
#include "kernels/quant.cuh"
#include "kernels/tile_ptx.cuh"

#define TILE_ROWS    128u
#define TILE_TOKENS  64u
#define TILE_COLS    128u
#define TILE_THREADS 256u
#define TILE_CHAINS  8u /* of linear.cu: its warps */

struct tiled_params {
	struct kvk_linear_args a;
	u64 x_stride;
	u64 y_stride;
	u64 x_batch;
	u64 y_batch;
};

/* Bytes of a stage: W, then x (BF16, later e4m3 codes as f16), then x's scales. */
template <u32 DTYPE> struct tile_size {
	static const u32 w_row = DTYPE == KVK_BF16 ? 256 : 128;
	static const u32 x_row = 256;
	static const u32 x_at = TILE_ROWS * w_row;
	static const u32 scale_at = x_at + TILE_TOKENS * x_row;
	static const u32 stage = scale_at + TILE_TOKENS * 4;
};

/* Where 16-byte piece @q of row @r of 256 bytes lies: neither eight lanes with whole pieces nor
 * sixteen with halves meet a bank twice. */
KVK_DEV u32 wide_at(u32 r, u32 q)
{
	return r * 256 + (q ^ ((r & 1) << 2 | (r & 2))) * 16;
}

/* The same of a row of 128 bytes. */
KVK_DEV u32 narrow_at(u32 r, u32 q)
{
	return r * 128 + (q ^ (r & 3) << 1) * 16;
}

/* Blocks of columns in linear.cu's order. @ret_last: a chain ends with @kb. */
KVK_DEV u32 block_next(u32 kb, u32 nr_blocks, bool *ret_last)
{
	*ret_last = kb + TILE_CHAINS >= nr_blocks;
	return *ret_last ? kb % TILE_CHAINS + 1 : kb + TILE_CHAINS;
}

/* Start loading block @kb of this CTA's rows and tokens. */
template <u32 DTYPE>
KVK_DEV void tile_load(const struct tiled_params &p, u8 *stage, u32 kb)
{
	using size = tile_size<DTYPE>;
	const struct kvk_weight &w = p.a.w;
	const u32 elem = DTYPE == KVK_BF16 ? 2 : 1, per = size::w_row / 16;
	const u64 w_base = (u64)blockIdx.z * w.rows;

#pragma unroll
	for (u32 i = threadIdx.x; i < TILE_ROWS * per; i += TILE_THREADS) {
		const u32 r = i / per, q = i % per;
		const u32 row = min(blockIdx.x * TILE_ROWS + r, w.rows - 1);
		const u32 col = kb * TILE_COLS + q * (16 / elem);
		const u32 left = col < w.cols ? (w.cols - col) * elem : 0;
		const u8 *src = (const u8 *)w.data + ((w_base + row) * w.cols) * elem;

		tile_copy16(stage + (DTYPE == KVK_BF16 ? wide_at(r, q) : narrow_at(r, q)),
			    src + (left ? (u64)col * elem : 0), min(left, 16u));
	}
#pragma unroll
	for (u32 i = threadIdx.x; i < TILE_TOKENS * 16; i += TILE_THREADS) {
		const u32 r = i / 16, q = i % 16;
		const u32 t = min(blockIdx.y * TILE_TOKENS + r, p.a.nr_tokens - 1);
		const u32 col = kb * TILE_COLS + q * 8;
		const u32 left = col < w.cols ? (w.cols - col) * 2 : 0;
		const u16 *src =
			(const u16 *)p.a.x + t * p.x_stride + blockIdx.z * p.x_batch;

		tile_copy16(stage + size::x_at + wide_at(r, q), src + (left ? col : 0),
			    min(left, 16u));
	}
	tile_commit();
}

/* x of a stage to e4m3 codes, as f16, in place; four threads share a token. */
KVK_DEV void tile_round_x(u8 *stage)
{
	using size = tile_size<KVK_E4M3>;
	const u32 r = threadIdx.x / 4, part = threadIdx.x % 4;
	uint4 *at[4];
	struct kvk_quant quant;
	float v[4][8], scale;
	u32 top = 0;

#pragma unroll
	for (u32 i = 0; i < 4; i++) {
		at[i] = (uint4 *)(stage + size::x_at + wide_at(r, i * 4 + part));
		const uint4 q = *at[i];
		const u32 w[4] = {q.x, q.y, q.z, q.w};

#pragma unroll
		for (u32 e = 0; e < 8; e++) {
			u32 b = e % 2 ? w[e / 2] & 0xffff0000u : w[e / 2] << 16;
			u32 mag = b & 0x7fffffffu;

			v[i][e] = kvk_bits_f32(b);
			top = max(top, mag > 0x7f800000u ? 0u : mag);
		}
	}
	top = max(top, __shfl_xor_sync(~0u, top, 1));
	top = max(top, __shfl_xor_sync(~0u, top, 2));
	scale = kvk_fp8_act_scale(kvk_bits_f32(top));
	quant = kvk_quant_make(scale);
#pragma unroll
	for (u32 i = 0; i < 4; i++) {
		u32 w[4];

		kvk_quant_div(v[i], quant);
#pragma unroll
		for (u32 e = 0; e < 4; e++)
			w[e] = arch_e4m3_f16(arch_f32_e4m3(v[i][2 * e], v[i][2 * e + 1]));
		*at[i] = make_uint4(w[0], w[1], w[2], w[3]);
	}
	if (part == 0)
		((float *)(stage + size::scale_at))[r] = scale;
}

/* BF16: columns 4 c .. 4 c + 3 of each 16 of a row's 32, as four pairs. */
KVK_DEV void tile_wide(const u8 *rows, u32 r, u32 j, u32 c, u32 (&v)[4])
{
	const uint2 lo = *(const uint2 *)(rows + wide_at(r, j * 4 + c / 2) + c % 2 * 8);
	const uint2 hi =
		*(const uint2 *)(rows + wide_at(r, j * 4 + 2 + c / 2) + c % 2 * 8);

	v[0] = lo.x, v[1] = lo.y, v[2] = hi.x, v[3] = hi.y;
}

/* Eight columns of a row of x as four pairs. */
template <u32 DTYPE> KVK_DEV void tile_x(const u8 *rows, u32 r, u32 j, u32 c, u32 (&v)[4])
{
	if (DTYPE == KVK_BF16) {
		tile_wide(rows, r, j, c, v);
	} else {
		const uint4 q = *(const uint4 *)(rows + wide_at(r, j * 4 + c));

		v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
	}
}

/* Eight columns of a row of W as four pairs. */
template <u32 DTYPE>
KVK_DEV void tile_w(const u8 *stage, u32 r, u32 j, u32 c, u32 (&v)[4])
{
	if (DTYPE == KVK_BF16) {
		tile_wide(stage, r, j, c, v);
	} else {
		uint2 q =
			*(const uint2 *)(stage + narrow_at(r, j * 2 + c / 2) + c % 2 * 8);

		v[0] = arch_e4m3_f16(q.x & 0xffff);
		v[1] = arch_e4m3_f16(q.x >> 16);
		v[2] = arch_e4m3_f16(q.y & 0xffff);
		v[3] = arch_e4m3_f16(q.y >> 16);
	}
}

/* The warp's 32 rows times 32 tokens: 128 columns of a stage are added to @acc. */
template <u32 DTYPE> KVK_DEV void tile_mma(const u8 *stage, float (&acc)[2][4][4])
{
	using size = tile_size<DTYPE>;
	const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
	const u32 row = warp % 4 * 32 + g, tok = warp / 4 * 32 + g;

#pragma unroll
	for (u32 j = 0; j < 4; j++) {
		u32 b[4][4];

#pragma unroll
		for (u32 nt = 0; nt < 4; nt++)
			tile_x<DTYPE>(stage + size::x_at, tok + nt * 8, j, c, b[nt]);
#pragma unroll
		for (u32 mt = 0; mt < 2; mt++) {
			u32 lo[4], hi[4];

			tile_w<DTYPE>(stage, row + mt * 16, j, c, lo);
			tile_w<DTYPE>(stage, row + mt * 16 + 8, j, c, hi);
#pragma unroll
			for (u32 i = 0; i < 2; i++) {
				const u32 a[4] = {lo[2 * i], hi[2 * i], lo[2 * i + 1],
						  hi[2 * i + 1]};

#pragma unroll
				for (u32 nt = 0; nt < 4; nt++)
					tile_mma16<DTYPE == KVK_BF16>(acc[mt][nt], a,
								      b[nt][2 * i],
								      b[nt][2 * i + 1]);
			}
		}
	}
}

/* acc += scale of W * scale of x * the block's sum */
KVK_DEV void tile_scale(const u8 *stage, float s, const float (&sum)[2][4][4],
			float (&acc)[2][4][4])
{
	const float *xs = (const float *)(stage + tile_size<KVK_E4M3>::scale_at);
	const u32 tok = threadIdx.x / 128 * 32 + threadIdx.x % 4 * 2;

#pragma unroll
	for (u32 i = 0; i < 8; i++) {
		const u32 mt = i / 4, nt = i % 4;
		const float x0 = xs[tok + nt * 8], x1 = xs[tok + nt * 8 + 1];

		acc[mt][nt][0] += s * x0 * sum[mt][nt][0];
		acc[mt][nt][1] += s * x1 * sum[mt][nt][1];
		acc[mt][nt][2] += s * x0 * sum[mt][nt][2];
		acc[mt][nt][3] += s * x1 * sum[mt][nt][3];
	}
}

KVK_DEV void tile_put(const struct tiled_params &p, u32 t, u32 row, float v)
{
	const struct kvk_linear_args &a = p.a;
	const u64 at = t * p.y_stride + blockIdx.z * p.y_batch + row;

	if (t >= a.nr_tokens || row >= a.w.rows)
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

KVK_DEV void tile_add(float (&to)[2][4][4], const float (&v)[2][4][4])
{
#pragma unroll
	for (u32 i = 0; i < 32; i++)
		to[i / 16][i / 4 % 4][i % 4] += v[i / 16][i / 4 % 4][i % 4];
}

KVK_DEV void tile_zero(float (&v)[2][4][4])
{
#pragma unroll
	for (u32 i = 0; i < 32; i++)
		v[i / 16][i / 4 % 4][i % 4] = 0.0f;
}

/* Scale of W's block @kb of this CTA's rows: 128 rows share it. */
KVK_DEV float tile_w_scale(const struct kvk_weight &w, u32 kb)
{
	const u64 block = (u64)blockIdx.z * kvk_fp8_blocks(w.rows) + blockIdx.x;

	return ((const float *)w.scales)[block * kvk_fp8_blocks(w.cols) + kb];
}

/* grid: (row tiles, token tiles, batch) */
template <u32 DTYPE>
__global__ void __launch_bounds__(TILE_THREADS, 2)
	linear_tiled_kernel(const __grid_constant__ struct tiled_params p)
{
	DEV_DYNAMIC_SHARED(smem);
	using size = tile_size<DTYPE>;
	const u32 nr_blocks = (p.a.w.cols + TILE_COLS - 1) / TILE_COLS;
	const u32 nr_chains = min(nr_blocks, TILE_CHAINS);
	const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
	float acc[2][4][4], total[2][4][4];
	u32 kb = 0, buf = 0;

	tile_zero(acc);
	tile_zero(total);
	tile_load<DTYPE>(p, smem, 0);
	while (kb < nr_blocks) {
		u8 *stage = smem + buf * size::stage;
		bool last;
		u32 next = block_next(kb, nr_blocks, &last);

		if (last && next >= nr_chains)
			next = nr_blocks;
		if (next < nr_blocks)
			tile_load<DTYPE>(p, smem + (buf ^ 1) * size::stage, next);
		else
			tile_commit();
		tile_wait_all_but<1>();
		__syncthreads();
		if constexpr (DTYPE == KVK_E4M3) {
			float sum[2][4][4];

			tile_round_x(stage);
			__syncthreads();
			tile_zero(sum);
			tile_mma<DTYPE>(stage, sum);
			tile_scale(stage, tile_w_scale(p.a.w, kb), sum, acc);
		} else {
			tile_mma<DTYPE>(stage, acc);
		}
		if (last) {
			tile_add(total, acc);
			tile_zero(acc);
		}
		__syncthreads();
		kb = next;
		buf ^= 1;
	}
#pragma unroll
	for (u32 i = 0; i < 32; i++) {
		const u32 mt = i / 16, nt = i / 4 % 4, e = i % 4;

		tile_put(p,
			 blockIdx.y * TILE_TOKENS + warp / 4 * 32 + nt * 8 + c * 2 +
				 e % 2,
			 blockIdx.x * TILE_ROWS + warp % 4 * 32 + mt * 16 + g + e / 2 * 8,
			 total[mt][nt][e]);
	}
}

bool kvk_linear_tiled_ok(const struct kvk_linear_args *a)
{
	const u32 per = a->w.dtype == KVK_E4M3 ? 16 : 8;

	return a->x_dtype == KVK_BF16 && a->w.cols && a->w.cols % per == 0 && a->w.rows &&
	       (a->w.dtype == KVK_BF16 || (a->w.dtype == KVK_E4M3 && a->w.scales)) &&
	       (a->y_dtype == KVK_F32 || a->y_dtype == KVK_BF16) && a->x && a->y &&
	       a->nr_batch && a->nr_batch <= 65535 && !(a->bias && a->nr_batch != 1) &&
	       kvk_linear_x_stride(a) % 8 == 0 && kvk_linear_x_batch(a) % 8 == 0 &&
	       dev_aligned(a->x, 16) && kvk_linear_strides_ok(a) &&
	       dev_aligned(a->w.data, 16) && a->nr_tokens &&
	       a->nr_tokens <= 65535 * TILE_TOKENS;
}

template <u32 DTYPE>
static int tiled_launch(const struct tiled_params *p, kvk_stream stream)
{
	const u32 bytes = 2 * tile_size<DTYPE>::stage;
	const dim3 grid((p->a.w.rows + TILE_ROWS - 1) / TILE_ROWS,
			(p->a.nr_tokens + TILE_TOKENS - 1) / TILE_TOKENS, p->a.nr_batch);

	if (cudaFuncSetAttribute((const void *)linear_tiled_kernel<DTYPE>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)bytes) != cudaSuccess)
		return -EIO;
	DEV_LAUNCH_SHARED(linear_tiled_kernel<DTYPE>, grid, TILE_THREADS, bytes, stream,
			  *p);
	return dev_launched();
}

int kvk_linear_tiled_cuda(const struct kvk_linear_args *a, kvk_stream stream)
{
	struct tiled_params p = {};

	if (!kvk_linear_tiled_ok(a))
		return -EINVAL;
	p.a = *a;
	p.x_batch = kvk_linear_x_batch(a);
	p.y_batch = kvk_linear_y_batch(a);
	p.x_stride = kvk_linear_x_stride(a);
	p.y_stride = kvk_linear_y_stride(a);
	if (a->w.dtype == KVK_BF16)
		return tiled_launch<KVK_BF16>(&p, stream);
	return tiled_launch<KVK_E4M3>(&p, stream);
}
