/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_y.cuh - where the sum over a token's experts goes: y in BF16, or in f32 for a shared expert
 * to be added before y is rounded. Device code only.
 */
#ifndef KVK_MOE_Y_CUH
#define KVK_MOE_Y_CUH

#include "fp8.h"
#include "kernels.h"
#include "moe_ptx.cuh"

/* struct moe_y - [nr_tokens][hidden] */
struct moe_y {
	void *data;
	uint32_t f32;
	uint32_t accumulate;
};

static inline struct moe_y moe_y_make(const struct kvk_moe_args *a)
{
	const struct moe_y y = {a->y, kvk_moe_y_dtype(a) == KVK_F32, a->accumulate};

	return y;
}

/* N neighbours, in one access each as BF16 */
template <int N> struct alignas(2 * N) moe_y_bf16 {
	uint32_t two[N / 2];
};
template <int N> struct alignas(N < 4 ? 8 : 16) moe_y_f32 {
	float one[N < 4 ? N : 4];
};

/* Elements @at .. @at + N - 1 of y, @at a multiple of N, become @s or grow by it; @s is used up. */
template <int N>
__device__ __forceinline__ void moe_y_put(const struct moe_y &y, uint64_t at,
					  float (&s)[N])
{
	constexpr int PIECE = N < 4 ? N : 4;

	if (y.f32) {
#pragma unroll
		for (int p = 0; p < N; p += PIECE) {
			struct moe_y_f32<N> *to =
				(struct moe_y_f32<N> *)((float *)y.data + at + p);
			struct moe_y_f32<N> v;

			if (y.accumulate) {
				v = *to;
#pragma unroll
				for (int i = 0; i < PIECE; i++)
					s[p + i] += v.one[i];
			}
#pragma unroll
			for (int i = 0; i < PIECE; i++)
				v.one[i] = s[p + i];
			*to = v;
		}
		return;
	}
	struct moe_y_bf16<N> *to = (struct moe_y_bf16<N> *)((uint16_t *)y.data + at);
	struct moe_y_bf16<N> v;

	if (y.accumulate) {
		v = *to;
#pragma unroll
		for (int i = 0; i < N / 2; i++) {
			s[2 * i] += __uint_as_float(v.two[i] << 16);
			s[2 * i + 1] += __uint_as_float(v.two[i] & 0xffff0000u);
		}
	}
#pragma unroll
	for (int i = 0; i < N / 2; i++)
		v.two[i] = ptx_bf16x2(s[2 * i], s[2 * i + 1]);
	*to = v;
}

/* The same of four pairs, s[i] and s[i + 4], eight elements from one to the next. One branch for all:
 * with one each the decode step's kernel runs out of registers. */
__device__ __forceinline__ void moe_y_put_pairs(const struct moe_y &y, uint64_t at,
						float (&s)[8])
{
	if (y.f32) {
		float2 *to = (float2 *)((float *)y.data + at);

#pragma unroll
		for (int i = 0; i < 4; i++) {
			if (y.accumulate) {
				s[i] += to[i * 4].x;
				s[i + 4] += to[i * 4].y;
			}
			to[i * 4] = make_float2(s[i], s[i + 4]);
		}
		return;
	}
	uint32_t *to = (uint32_t *)((uint16_t *)y.data + at);

#pragma unroll
	for (int i = 0; i < 4; i++) {
		if (y.accumulate) {
			s[i] += __uint_as_float(to[i * 4] << 16);
			s[i + 4] += __uint_as_float(to[i * 4] & 0xffff0000u);
		}
		to[i * 4] = ptx_bf16x2(s[i], s[i + 4]);
	}
}

#endif /* KVK_MOE_Y_CUH */
