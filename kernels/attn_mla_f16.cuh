/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_f16.cuh - a part of a cut unit of MLA in f16: what both kinds of slots (attn_mla_few.cuh,
 * attn_mla_slot.cuh) write and add up. Device code on values in registers; touches no memory.
 *
 * f16 has no range, so what a slot has of a row is shifted by a power of two until its largest value is
 * near 2^15. The slot's m and l are those of the shifted values: who merges need not know. Rounding
 * adds 2e-4 of a part's row, parts apart; values 2^-29 of the row's largest and below are rounded to
 * 2^-40 of it.
 */
#ifndef KVK_ATTN_MLA_F16_CUH
#define KVK_ATTN_MLA_F16_CUH

#include "kernels/common.cuh"

#include <math.h>

/*
 * A row's shift from the largest magnitude of its O: what m grows by. Zeros have none and small values
 * a bounded one: m far below those of other parts would take l along, as a factor below 2^-126 is 0.
 */
KVK_DEV float slot_shift(float top)
{
	const int e = (int)(__float_as_uint(top) >> 23) - 127 - 14;

	return top == 0.f ? 0.f : (float)max(e, -60);
}

/* A row's m and l as the slot has them; l is 0: nothing seen, m must not count. */
KVK_DEV float2 slot_ml(float m, float l, float shift)
{
	return make_float2(l == 0.f ? -INFINITY : m + shift, l * exp2_fast(-shift));
}

/* Eight values of a row, in units of 2^m. */
struct slot_sum {
	float o[8];
	float m;
	float l;
};

/* Add N parts. */
template <int N>
KVK_DEV void slot_add(struct slot_sum &a, const uint4 (&w)[N], const float2 (&ml)[N])
{
	float m = a.m, f;

#pragma unroll
	for (int j = 0; j < N; j++)
		m = fmaxf(m, ml[j].x);
	f = exp2_fast(a.m - (m == -INFINITY ? 0.f : m));
	a.l *= f;
#pragma unroll
	for (int k = 0; k < 8; k++)
		a.o[k] *= f;
	a.m = m;
	m = m == -INFINITY ? 0.f : m;
#pragma unroll
	for (int j = 0; j < N; j++) {
		const uint32_t two[4] = {w[j].x, w[j].y, w[j].z, w[j].w};

		f = exp2_fast(ml[j].x - m);
		a.l += ml[j].y * f;
#pragma unroll
		for (int k = 0; k < 4; k++) {
			const float2 v = unpack_f16(two[k]);

			a.o[2 * k] += v.x * f;
			a.o[2 * k + 1] += v.y * f;
		}
	}
}

#endif /* KVK_ATTN_MLA_F16_CUH */
