/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_wide.cu - the routed E4M3 experts of a batch, in their standard order; as exact as
 * f32 sums are.
 *
 * After the plan: round x, first product and SwiGLU, round h, second product, sum.
 * Rounding gives each slot its row, in the plan's order, as e4m3 codes with a scale per
 * 128 columns, the codes as f16 in the layout that moe_fp8_wide.cuh copies to shared memory
 * as it is:
 *
 *	[64 columns][row][128 bytes], 16-byte piece c of the r-th row of an expert at c ^ (r & 7)
 *	column 16 t + 4 s + 2 h + e of the 64 at 16 s + 8 h + 2 t + e
 */
#include "moe_fp8_wide.cuh"
#include "moe_start.cuh"
#include "quant.cuh"
#include "tensor_map.cuh"

#define PACK_WARPS 8u

/* Two neighbours of a row. */
__device__ __forceinline__ float2 round_two(const uint16_t *row, uint32_t i)
{
	const uint32_t v = __ldcg((const uint32_t *)row + i);

	return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

__device__ __forceinline__ float2 round_two(const float *row, uint32_t i)
{
	return __ldcg((const float2 *)row + i);
}

/* 256 columns of a row from the @at-th on; a warp, a lane a 16-byte piece of eight. */
template <typename X>
__device__ __forceinline__ void round_part(const X *row, uint32_t cols, uint32_t at,
					   uint8_t *dst, uint64_t panel, uint32_t r,
					   float *scales, uint32_t nr_slots)
{
	const uint32_t i = at * 32 + threadIdx.x % 32;
	const bool there = i < cols / 8;
	float v[8] = {}, scale;
	uint32_t top = 0, p[4];

#pragma unroll
	for (uint32_t t = 0; t < 4 && there; t++) {
		const float2 two = round_two(row, i / 8 * 32 + 8 * t + i % 8);

		v[2 * t] = two.x;
		v[2 * t + 1] = two.y;
	}
#pragma unroll
	for (int e = 0; e < 8; e++) {
		const uint32_t m = __float_as_uint(v[e]) & 0x7fffffffu;

		top = max(top, m > 0x7f800000u ? 0u : m);
	}
#pragma unroll
	for (int o = 1; o < 16; o *= 2)
		top = max(top, __shfl_xor_sync(~0u, top, o));
	scale = kvk_fp8_act_scale(__uint_as_float(top));
	kvk_quant_div(v, kvk_quant_make(scale));
#pragma unroll
	for (int t = 0; t < 4; t++)
		p[t] = arch_e4m3_f16(arch_f32_e4m3(v[2 * t], v[2 * t + 1]));
	if (!there)
		return;
	*(uint4 *)(dst + i / 8 * panel + ((i ^ r) & 7) * 16) =
		make_uint4(p[0], p[1], p[2], p[3]);
	if (i % 16 == 0)
		scales[(uint64_t)(i / 16) * nr_slots] = scale;
}

/* A warp takes 256 columns of a row at a time: a row in a go would be a chain of as many
 * fetches. grid: (tiles, parts of a tile) */
template <bool SECOND>
__global__ void __launch_bounds__(PACK_WARPS * 32)
	fp8_pack(const __grid_constant__ struct moe_wide a)
{
	const uint32_t cols = SECOND ? a.inter : a.hidden, parts = (cols + 255) / 256;
	const uint64_t panel = (uint64_t)a.nr_slots * 128u;

	ptx_grid_launch();
	ptx_grid_wait();
	if (blockIdx.x >= __ldcg(a.nr_tiles))
		return;
	const uint2 tile = __ldcg(&a.tiles[blockIdx.x]);

	for (uint32_t i = blockIdx.y * PACK_WARPS + threadIdx.x / 32;
	     i < (tile.x >> 16) * parts; i += gridDim.y * PACK_WARPS) {
		const uint32_t r = i / parts, at = i % parts;
		const uint64_t pos = tile.y + r;

		if (SECOND)
			round_part(a.h + pos * cols, cols, at, a.h_panels + pos * 128u,
				   panel, r, a.h_back + pos, a.nr_slots);
		else
			round_part(a.x + (uint64_t)(__ldcg(&a.list[pos]) / a.top_k) *
						   cols,
				   cols, at, a.x_panels + pos * 128u, panel, r,
				   a.x_back + pos, a.nr_slots);
	}
}

/* -------------------------------------------------------------------------------- launch
 */

int moe_fp8_map(CUtensorMap *map, const void *base, uint64_t rows, uint64_t cols)
{
	static const tensor_encode_fn encode = tensor_encode_find();
	const cuuint32_t box[4] = {128, 128, 1, 1}, one[4] = {1, 1, 1, 1};
	const cuuint64_t dim[4] = {cols, rows, 1, 1};
	const cuuint64_t stride[3] = {cols, cols * rows, cols * rows};

	if (!encode ||
	    encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, (void *)base, dim, stride, box,
		   one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
		   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
		   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
		return -EIO;
	return 0;
}

template <int N>
static int f8_product(const struct moe_fp8_wide *a, bool second, void *stream)
{
	const struct kvk_experts *e = a->experts;
	struct f8_args k = {};
	int r;

	k.w = a->w;
	k.scales = (const float *)(second ? e->s2 : e->s13);
	k.rows = second ? e->hidden : e->inter;
	k.cols = second ? e->inter : e->hidden;
	r = moe_fp8_map(&k.map, second ? e->w2 : e->w13,
			(uint64_t)e->nr_experts * k.rows * (second ? 1 : 2), k.cols);
	if (r)
		return r;
	return second ? moe_start(f8_kernel<N, true>, dim3(moe_sms()), F8_THREADS,
				  f8_size<N>::DYNAMIC, &k, stream)
		      : moe_start(f8_kernel<N, false>, dim3(moe_sms()), F8_THREADS,
				  f8_size<N>::DYNAMIC, &k, stream);
}

/* Does the device run this build's Hopper code? It shows by its shared memory. */
__global__ void f8_probe(void)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	__shared__ volatile int mark[32];

	mark[threadIdx.x % 32] = 1;
#endif
}

static bool f8_hopper(void)
{
	cudaFuncAttributes attr;

	if (cudaFuncGetAttributes(&attr, (const void *)f8_probe) == cudaSuccess)
		return attr.sharedSizeBytes > 0;
	(void)cudaGetLastError();
	return false;
}

bool moe_fp8_wide_ok(const struct kvk_experts *e)
{
	static const bool hopper = f8_hopper();

	return hopper && e->dtype == KVK_E4M3 && e->hidden % 128 == 0 &&
	       e->inter % 128 == 0 && (uintptr_t)e->w13 % 16 == 0 &&
	       (uintptr_t)e->w2 % 16 == 0;
}

int moe_fp8_wide_launch(const struct moe_fp8_wide *a, void *stream)
{
	const uint32_t per_cta = 256 * PACK_WARPS; /* columns of a row */
	const dim3 x_parts(a->w.tiles_max, (a->w.hidden + per_cta - 1) / per_cta);
	const dim3 h_parts(a->w.tiles_max, (a->w.inter + per_cta - 1) / per_cta);
	int r;

	r = moe_start(fp8_pack<false>, x_parts, PACK_WARPS * 32, 0, &a->w, stream);
	if (!r)
		r = f8_product<MOE_FP8_WIDE_TOKENS>(a, false, stream);
	if (!r)
		r = moe_start(fp8_pack<true>, h_parts, PACK_WARPS * 32, 0, &a->w, stream);
	if (!r)
		r = f8_product<MOE_FP8_WIDE_TOKENS>(a, true, stream);
	return r ? r : moe_wide_sum(&a->w, stream);
}
