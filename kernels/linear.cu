/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear.cu - y = x W^T + bias for few tokens, all weight types.
 *
 * BF16 for up to 16 tokens is linear_few.cu's. For the rest moe_rows.cuh does the products:
 * weights stream once from memory for up to 32 tokens; more tokens take the weights again
 * from L2. x rows and W rows must start at 16-byte boundaries and cols be a multiple of 8.
 */
#include <errno.h>
#include "linear_few.h"
#include "moe_cuda.h"
#include "moe_rows.cuh"

#define LINEAR_NT 4

struct linear_rows {
	struct kvk_linear_args a;
	uint64_t x_stride, y_stride;
	uint64_t x_batch, y_batch;
};

template <uint32_t DTYPE>
__device__ __forceinline__ struct rows_w linear_w(const struct kvk_linear_args &a,
						  uint32_t row, uint32_t batch)
{
	const struct kvk_weight &m = a.w;
	struct rows_w w = {};

	w.cols = m.cols;
	w.group = m.group;
	w.scale_f16 = m.scale_dtype == KVK_F16;
	for (int r = 0; r < 2; r++) {
		const uint32_t my = min(row + 8 * r, m.rows - 1);
		uint64_t at = (uint64_t)batch * m.rows + my;

		if (DTYPE == KVK_INT4) {
			w.row[r] = (const uint8_t *)m.data + at * m.cols / 2;
			w.scale[r] =
				(const uint8_t *)m.scales + at * (m.cols / m.group) * 2;
		} else if (DTYPE == KVK_E4M3) {
			uint64_t blocks = kvk_fp8_blocks(m.rows),
				 wide = kvk_fp8_blocks(m.cols);

			w.row[r] = (const uint8_t *)m.data + at * m.cols;
			w.scale[r] = (const uint8_t *)m.scales +
				     (batch * blocks + my / KVK_FP8_BLOCK) * wide * 4;
		} else {
			w.row[r] = (const uint8_t *)m.data +
				   at * m.cols * (DTYPE == KVK_F32 ? 4 : 2);
		}
	}
	return w;
}

__device__ __forceinline__ void linear_put(const struct linear_rows &l, uint32_t tok,
					   uint32_t row, uint32_t batch, float v)
{
	const uint64_t at = tok * l.y_stride + batch * l.y_batch + row;

	if (l.a.bias)
		v += l.a.bias[row];
	if (l.a.add)
		v += l.a.add[at];
	if (l.a.y_dtype == KVK_F32)
		((float *)l.a.y)[at] = v;
	else
		((uint16_t *)l.a.y)[at] = kvk_f32_to_bf16(v);
}

/* grid: (row blocks, token tiles, batch) */
template <uint32_t DTYPE, typename X, int NT>
__global__ void __launch_bounds__(256) linear_kernel(const struct linear_rows l)
{
	__shared__ float red[ROWS_WARPS][4 * NT][32];
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const uint32_t row = blockIdx.x * 16 + g, tok0 = blockIdx.y * 8 * NT,
		       batch = blockIdx.z;
	const struct rows_w w = linear_w<DTYPE>(l.a, row, batch);
	struct rows_x<X> x[NT] = {
	};
	float acc[NT][4];

	ptx_grid_launch();
	ptx_grid_wait();
#pragma unroll
	for (int nt = 0; nt < NT; nt++) {
		uint32_t tok = min(tok0 + nt * 8 + g, l.a.nr_tokens - 1);

		x[nt].x = (const X *)l.a.x + tok * l.x_stride + batch * l.x_batch;
	}
	rows_dot<DTYPE, X, NT>(acc, w, x);
	rows_reduce<NT>(acc, red);
#pragma unroll
	for (int i = 0; i < 4 * NT; i++) {
		uint32_t tok = tok0 + i / 4 * 8 + 2 * t + i % 2, r = row + i % 4 / 2 * 8;

		if (i % ROWS_WARPS == threadIdx.x / 32 && tok < l.a.nr_tokens &&
		    r < l.a.w.rows)
			linear_put(l, tok, r, batch, acc[i / 4][i % 4]);
	}
}

template <uint32_t DTYPE, typename X>
static int linear_launch(const struct linear_rows *l, cudaStream_t stream)
{
	const uint32_t rows = (l->a.w.rows + 15) / 16, n = l->a.nr_tokens;

	if (n <= 8)
		linear_kernel<DTYPE, X, 1>
			<<<dim3(rows, 1, l->a.nr_batch), 256, 0, stream>>>(*l);
	else if (n <= 16)
		linear_kernel<DTYPE, X, 2>
			<<<dim3(rows, 1, l->a.nr_batch), 256, 0, stream>>>(*l);
	else
		linear_kernel<DTYPE, X, LINEAR_NT>
			<<<dim3(rows, (n + 8 * LINEAR_NT - 1) / (8 * LINEAR_NT),
				l->a.nr_batch),
			   256, 0, stream>>>(*l);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

template <typename X>
static int linear_run(const struct linear_rows *l, cudaStream_t stream)
{
	switch (l->a.w.dtype) {
	case KVK_F32:
		return linear_launch<KVK_F32, X>(l, stream);
	case KVK_BF16:
		return linear_launch<KVK_BF16, X>(l, stream);
	case KVK_E4M3:
		return linear_launch<KVK_E4M3, X>(l, stream);
	case KVK_INT4:
		return linear_launch<KVK_INT4, X>(l, stream);
	default:
		return -EINVAL;
	}
}

static bool aligned16(const void *p)
{
	return p && (uintptr_t)p % 16 == 0;
}

int kvk_linear_cuda(const struct kvk_linear_args *a, kvk_stream stream)
{
	struct linear_rows l = {};

	l.a = *a;
	l.x_batch = kvk_linear_x_batch(a);
	l.y_batch = kvk_linear_y_batch(a);
	l.x_stride = kvk_linear_x_stride(a);
	l.y_stride = kvk_linear_y_stride(a);
	if (!aligned16(a->x) || !aligned16(a->w.data) || !a->y || !a->nr_batch ||
	    !a->w.rows || !a->w.cols || a->w.cols % 8 || l.x_stride % 8 ||
	    (a->nr_batch > 1 && l.x_batch % 8) || a->nr_batch > 65535 ||
	    a->nr_tokens > 65535u * 32)
		return -EINVAL;
	if (!kvk_linear_strides_ok(a) || (a->bias && a->nr_batch != 1))
		return -EINVAL;
	if (a->w.dtype == KVK_INT4 &&
	    (!kvk_int4_shape_ok(a->w.cols, a->w.group) || !a->w.scales ||
	     (a->w.scale_dtype != KVK_BF16 && a->w.scale_dtype != KVK_F16)))
		return -EINVAL;
	if (a->w.dtype == KVK_E4M3 && !a->w.scales)
		return -EINVAL;
	if ((a->x_dtype != KVK_F32 && a->x_dtype != KVK_BF16) ||
	    (a->y_dtype != KVK_F32 && a->y_dtype != KVK_BF16))
		return -EINVAL;
	if (!a->nr_tokens)
		return 0;
	if (kvk_linear_few_ok(a)) {
		int r = kvk_linear_few_cuda(a, stream);

		if (r != -ENOSPC)
			return r;
	}
	if (a->x_dtype == KVK_F32)
		return linear_run<float>(&l, (cudaStream_t)stream);
	return linear_run<uint16_t>(&l, (cudaStream_t)stream);
}
