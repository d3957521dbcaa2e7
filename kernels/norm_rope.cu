/* SPDX-License-Identifier: Apache-2.0 */
/*
 * norm_rope.cu - RMS norm with residual, rotary embedding, silu. F32 or BF16 activations,
 * f32 arithmetic; sums in a fixed order.
 */
#include <errno.h>
#include "dev.cuh"
#include "fp8.h"
#include "moe_cuda.h"
#include "norm_rope.cuh"

#define NORM_THREADS	512u
#define NORM_PER_THREAD 64u /* values; 32768 columns */

struct norm_params {
	struct kvk_norm_args a;
	uint64_t x_stride;
	uint64_t y_stride;
};

__device__ __forceinline__ float act_get(uint32_t dtype, const void *p, uint64_t i)
{
	if (dtype == KVK_F32)
		return ((const float *)p)[i];
	return kvk_bf16_to_f32(((const uint16_t *)p)[i]);
}

__device__ __forceinline__ float act_put(uint32_t dtype, void *p, uint64_t i, float v)
{
	if (dtype == KVK_F32) {
		((float *)p)[i] = v;
		return v;
	}
	uint16_t b = kvk_f32_to_bf16(v);

	((uint16_t *)p)[i] = b;
	return kvk_bf16_to_f32(b);
}

/* Sum over the CTA, the same for all threads. */
__device__ __forceinline__ float block_sum(float v)
{
	__shared__ float part[NORM_THREADS / 32];
	float sum = 0.0f;

	for (int i = 16; i; i /= 2)
		v += __shfl_xor_sync(~0u, v, i);
	if (threadIdx.x % 32 == 0)
		part[threadIdx.x / 32] = v;
	__syncthreads();
	for (uint32_t w = 0; w < NORM_THREADS / 32; w++)
		sum += part[w];
	return sum;
}

/* One row per CTA; N values of it per thread, in registers. */
template <uint32_t N>
__global__ void __launch_bounds__(NORM_THREADS)
	norm_kernel(const __grid_constant__ struct norm_params p)
{
	const struct kvk_norm_args &a = p.a;
	const uint64_t row = blockIdx.x;
	float v[N], w[N], sum = 0.0f, inv;

	dev_grid_launch();
	dev_grid_wait();
	/* loads of their own loop: behind a store each would wait for the one before */
#pragma unroll
	for (uint32_t j = 0; j < N; j++) {
		uint32_t c = threadIdx.x + j * NORM_THREADS;

		v[j] = w[j] = 0.0f;
		if (c >= a.cols)
			continue;
		v[j] = act_get(a.act_dtype, a.x, row * p.x_stride + c);
		if (a.residual)
			v[j] += act_get(a.act_dtype, a.residual, row * a.cols + c);
		if (N <= 16)
			w[j] = a.weight[c];
	}
#pragma unroll
	for (uint32_t j = 0; j < N; j++) {
		uint32_t c = threadIdx.x + j * NORM_THREADS;

		/* the norm reads what was stored: a BF16 residual is rounded */
		if (c < a.cols && a.residual)
			v[j] = act_put(a.act_dtype, a.residual, row * a.cols + c, v[j]);
		sum += v[j] * v[j];
	}
	inv = 1.0f / sqrtf(block_sum(sum) / (float)a.cols + a.eps);
#pragma unroll
	for (uint32_t j = 0; j < N; j++) {
		uint32_t c = threadIdx.x + j * NORM_THREADS;

		if (c < a.cols)
			act_put(a.act_dtype, a.y, row * p.y_stride + c,
				v[j] * inv * (N <= 16 ? w[j] : a.weight[c]));
	}
}

/*
 * The same for BF16 rows of whole, aligned groups of eight, a group or a few per thread: one trip
 * to memory. The weights do not wait for the kernel in front.
 */
template <uint32_t N>
__global__ void __launch_bounds__(1024)
	norm_bf16_kernel(const __grid_constant__ struct norm_params p)
{
	const struct kvk_norm_args &a = p.a;
	const uint64_t row = blockIdx.x;
	const uint32_t groups = a.cols / 8, warps = blockDim.x / 32;
	__shared__ float part[32];
	float v[N][8], w[N][8], sum = 0.0f, inv;
	uint4 x[N], r[N];

	dev_grid_launch();
#pragma unroll
	for (uint32_t j = 0; j < N; j++) {
		const uint32_t c = threadIdx.x + j * blockDim.x;
		const float4 *from = (const float4 *)a.weight + (c < groups ? c : 0) * 2;

		*(float4 *)&w[j][0] = from[0];
		*(float4 *)&w[j][4] = from[1];
	}
	dev_grid_wait();
#pragma unroll
	for (uint32_t j = 0; j < N; j++) {
		const uint32_t c = threadIdx.x + j * blockDim.x;
		const bool in = c < groups;

		x[j] = r[j] = make_uint4(0, 0, 0, 0);
		if (in)
			x[j] = ((const uint4 *)((const uint16_t *)a.x +
						row * p.x_stride))[c];
		if (in && a.residual)
			r[j] = ((const uint4 *)((const uint16_t *)a.residual +
						row * a.cols))[c];
	}
#pragma unroll
	for (uint32_t j = 0; j < N; j++) {
		const uint32_t c = threadIdx.x + j * blockDim.x;
		const uint32_t xs[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
		uint32_t rs[4] = {r[j].x, r[j].y, r[j].z, r[j].w};

#pragma unroll
		for (uint32_t i = 0; i < 4; i++) {
			float lo = kvk_bf16_to_f32((uint16_t)xs[i]);
			float hi = kvk_bf16_to_f32((uint16_t)(xs[i] >> 16));

			if (a.residual) {
				/* the norm reads what is stored, rounded */
				rs[i] = kvk_f32_to_bf16(
						lo + kvk_bf16_to_f32((uint16_t)rs[i])) |
					(uint32_t)kvk_f32_to_bf16(
						hi +
						kvk_bf16_to_f32((uint16_t)(rs[i] >> 16)))
						<< 16;
				lo = kvk_bf16_to_f32((uint16_t)rs[i]);
				hi = kvk_bf16_to_f32((uint16_t)(rs[i] >> 16));
			}
			v[j][2 * i] = lo;
			v[j][2 * i + 1] = hi;
			sum = norm_add(sum, lo, hi);
		}
		if (a.residual && c < groups)
			((uint4 *)((uint16_t *)a.residual + row * a.cols))[c] =
				make_uint4(rs[0], rs[1], rs[2], rs[3]);
	}
	for (int i = 16; i; i /= 2)
		sum += __shfl_xor_sync(~0u, sum, i);
	if (threadIdx.x % 32 == 0)
		part[threadIdx.x / 32] = sum;
	__syncthreads();
	/* by every warp: one after the other 28 loads would take 0.4 us */
	sum = threadIdx.x % 32 < warps ? part[threadIdx.x % 32] : 0.0f;
	for (int i = 16; i; i /= 2)
		sum += __shfl_xor_sync(~0u, sum, i);
	inv = norm_inverse(sum, a.cols, a.eps);
#pragma unroll
	for (uint32_t j = 0; j < N; j++) {
		const uint32_t c = threadIdx.x + j * blockDim.x;
		uint32_t out[4];

#pragma unroll
		for (uint32_t i = 0; i < 4; i++)
			out[i] = kvk_f32_to_bf16(v[j][2 * i] * inv * w[j][2 * i]) |
				 (uint32_t)kvk_f32_to_bf16(v[j][2 * i + 1] * inv *
							   w[j][2 * i + 1])
					 << 16;
		if (c < groups)
			((uint4 *)((uint16_t *)a.y + row * p.y_stride))[c] =
				make_uint4(out[0], out[1], out[2], out[3]);
	}
}

/* true: launched. */
static bool norm_bf16(const struct norm_params &p, kvk_stream stream)
{
	const struct kvk_norm_args *a = &p.a;
	const uint32_t groups = a->cols / 8, per = (groups + 1023) / 1024;
	const uint32_t threads = ((groups + per - 1) / per + 31) / 32 * 32;

	if (a->act_dtype != KVK_BF16 || a->cols % 8 || p.x_stride % 8 || p.y_stride % 8 ||
	    per > 2 || !dev_aligned(a->x, 16) || !dev_aligned(a->residual, 16) ||
	    !dev_aligned(a->y, 16) || !dev_aligned(a->weight, 16))
		return false;
	if (per == 1)
		DEV_LAUNCH_EARLY(norm_bf16_kernel<1>, a->nr_rows, threads, stream, p);
	else
		DEV_LAUNCH_EARLY(norm_bf16_kernel<2>, a->nr_rows, threads, stream, p);
	return true;
}

static bool act_ok(uint32_t dtype)
{
	return dtype == KVK_F32 || dtype == KVK_BF16;
}

int kvk_norm_cuda(const struct kvk_norm_args *a, kvk_stream stream)
{
	const uint64_t xs = a->x_stride ? a->x_stride : a->cols;
	const uint64_t ys = a->y_stride ? a->y_stride : a->cols;
	struct norm_params p = {*a, xs, ys};

	if (!a->x || !a->y || !a->weight || !a->cols ||
	    a->cols > NORM_THREADS * NORM_PER_THREAD || !act_ok(a->act_dtype) ||
	    xs < a->cols || ys < a->cols)
		return -EINVAL;
	if (!a->nr_rows)
		return 0;
	if (norm_bf16(p, stream))
		return dev_launched();
	if (a->cols <= NORM_THREADS)
		DEV_LAUNCH(norm_kernel<1>, a->nr_rows, NORM_THREADS, stream, p);
	else if (a->cols <= NORM_THREADS * 4)
		DEV_LAUNCH(norm_kernel<4>, a->nr_rows, NORM_THREADS, stream, p);
	else if (a->cols <= NORM_THREADS * 16)
		DEV_LAUNCH(norm_kernel<16>, a->nr_rows, NORM_THREADS, stream, p);
	else
		DEV_LAUNCH(norm_kernel<NORM_PER_THREAD>, a->nr_rows, NORM_THREADS, stream,
			   p);
	return dev_launched();
}

/* A warp per (token, head): all values are read before any is written. */
__global__ void __launch_bounds__(256) rope_kernel(const struct kvk_rope_args a)
{
	const uint32_t unit = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
	const uint32_t t = unit / a.nr_heads, half = a.rope_dim / 2;
	const uint64_t at = (uint64_t)t * a.token_stride +
			    (uint64_t)(unit % a.nr_heads) * a.head_stride + a.offset;
	const uint64_t to =
		!a.y ? at
		     : (uint64_t)t * a.y_token_stride +
				(uint64_t)(unit % a.nr_heads) * a.y_head_stride +
				a.y_offset;
	void *y = a.y ? a.y : a.x;
	float p[8], q[8];

	dev_grid_launch();
	dev_grid_wait();
	if (t >= a.nr_tokens)
		return;
	const float *cs = a.cos_sin + (uint64_t)a.positions[t] * a.rope_dim;

#pragma unroll
	for (uint32_t j = 0; j < 8; j++) {
		uint32_t i = lane + 32 * j;

		if (i >= half)
			continue;
		p[j] = act_get(a.act_dtype, a.x, at + (a.interleaved ? 2 * i : i));
		q[j] = act_get(a.act_dtype, a.x,
			       at + (a.interleaved ? 2 * i + 1 : half + i));
	}
	__syncwarp();
#pragma unroll
	for (uint32_t j = 0; j < 8; j++) {
		uint32_t i = lane + 32 * j;

		if (i >= half)
			continue;
		act_put(a.act_dtype, y, to + i,
			rope_first(p[j], q[j], cs[i], cs[half + i]));
		act_put(a.act_dtype, y, to + half + i,
			rope_second(p[j], q[j], cs[i], cs[half + i]));
	}
}

int kvk_rope_cuda(const struct kvk_rope_args *a, kvk_stream stream)
{
	const uint64_t units = (uint64_t)a->nr_tokens * a->nr_heads;

	if (!a->x || !a->positions || !a->cos_sin || !a->nr_heads || !a->rope_dim ||
	    a->rope_dim % 2 || a->rope_dim > 512 || !act_ok(a->act_dtype) ||
	    units > 1u << 31 || !kvk_rope_places_ok(a))
		return -EINVAL;
	if (!units)
		return 0;
	DEV_LAUNCH_EARLY(rope_kernel, (uint32_t)((units + 7) / 8), 256, stream, *a);
	return dev_launched();
}

__global__ void __launch_bounds__(256) silu_kernel(const struct kvk_silu_args a)
{
	const uint64_t t = blockIdx.y;
	const uint32_t c = blockIdx.x * 256 + threadIdx.x;

	dev_grid_launch();
	dev_grid_wait();
	if (c >= a.inter)
		return;
	float g = act_get(a.act_dtype, a.gu, t * 2 * a.inter + c);
	float u = act_get(a.act_dtype, a.gu, t * 2 * a.inter + a.inter + c);

	act_put(a.act_dtype, a.y, t * a.inter + c, g / (1.0f + expf(-g)) * u);
}

int kvk_silu_cuda(const struct kvk_silu_args *a, kvk_stream stream)
{
	if (!a->gu || !a->y || !a->inter || !act_ok(a->act_dtype) || a->nr_tokens > 65535)
		return -EINVAL;
	if (!a->nr_tokens)
		return 0;
	DEV_LAUNCH_EARLY(silu_kernel, dim3((a->inter + 255) / 256, a->nr_tokens), 256,
			 stream, *a);
	return dev_launched();
}
