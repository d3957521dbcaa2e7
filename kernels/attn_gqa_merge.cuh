/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_gqa_merge.cuh - a segment's end in the GQA decode kernel: what its warps made of one head
 * becomes one result, in warp order, and goes to the output or to the unit's slot.
 *
 * One head a CTA (few units, or one kv head): all warps meet and each folds a slice of the
 * output (merge_wide()). More heads: a head's warps leave their results and go on, the last
 * one folds alone (merge_warps()).
 */
#ifndef KVK_ATTN_GQA_MERGE_CUH
#define KVK_ATTN_GQA_MERGE_CUH

#include "kernels/attn_gqa_math.cuh"

#include <math.h>

/* Fold a warp's result from shared memory into @acc. */
template <int HD> KVK_DEV void fold(gqa_acc<HD> &acc, const float4 *o, const float2 *ml)
{
	const int lane = threadIdx.x & 31, g = lane / 4;
	float ca[2], cb[2];

#pragma unroll
	for (int h = 0; h < 2; h++) {
		float2 b = ml[g + 8 * h];
		float mn = fmaxf(acc.m[h], b.x), mu = mn == -INFINITY ? 0.f : mn;

		ca[h] = exp2_fast(acc.m[h] - mu);
		cb[h] = exp2_fast(b.x - mu);
		acc.l[h] = acc.l[h] * ca[h] + b.y * cb[h];
		acc.m[h] = mn;
	}
#pragma unroll
	for (int i = 0; i < HD / 8; i++) {
		float4 v = o[i * 32 + lane];

		acc.o[i][0] = acc.o[i][0] * ca[0] + v.x * cb[0];
		acc.o[i][1] = acc.o[i][1] * ca[0] + v.y * cb[0];
		acc.o[i][2] = acc.o[i][2] * ca[1] + v.z * cb[1];
		acc.o[i][3] = acc.o[i][3] * ca[1] + v.w * cb[1];
	}
}

/* Bring o to true units and l to the row's sum. */
template <int HD> KVK_DEV void settle(gqa_acc<HD> &acc, float sv)
{
#pragma unroll
	for (int i = 0; i < HD / 8; i++)
#pragma unroll
		for (int e = 0; e < 4; e++)
			acc.o[i][e] *= sv;
#pragma unroll
	for (int h = 0; h < 2; h++) {
		acc.l[h] += __shfl_xor_sync(~0u, acc.l[h], 1);
		acc.l[h] += __shfl_xor_sync(~0u, acc.l[h], 2);
	}
}

/* First dim of lane @c's @q-th quad: word q % 4 of chunk q / 4, BF16 words 2 q, 2 q + 1. */
template <int HD, bool FP8> KVK_DEV int quad_dim(int c, int q)
{
	using C = gqa_cfg<HD, FP8>;

	return FP8 ? chunk_of<C::NJ>(c, q / 4) * 16 + 4 * (q % 4)
		   : chunk_of<C::NJ>(c, q / 2) * 8 + 4 * (q % 2);
}

/* Four neighbouring values of row half @h, the @q-th of a lane, and the dim of the first.
 */
template <int HD, bool FP8>
KVK_DEV float4 out_quad(const gqa_acc<HD> &acc, int h, int q, int *ret_dim)
{
	const int c = threadIdx.x & 3;

	*ret_dim = quad_dim<HD, FP8>(c, q);
	if (FP8) /* n-tiles hold even and odd dims */
		return make_float4(acc.o[2 * q][2 * h], acc.o[2 * q + 1][2 * h],
				   acc.o[2 * q][2 * h + 1], acc.o[2 * q + 1][2 * h + 1]);
	return make_float4(acc.o[2 * q][2 * h], acc.o[2 * q][2 * h + 1],
			   acc.o[2 * q + 1][2 * h], acc.o[2 * q + 1][2 * h + 1]);
}

KVK_DEV size_t gqa_row_off(const struct attn_params &p, const struct plan_seg &s,
			   uint32_t hbs, uint32_t row)
{
	uint32_t per = s.q_len * p.group;
	uint32_t head = s.hblk * hbs + row / per, r = row % per;

	return ((size_t)(s.q0 + r / p.group) * p.nr_q_heads + head * p.group +
		r % p.group);
}

template <int HD>
KVK_DEV size_t gqa_row_elem(const struct attn_params &p, const struct plan_seg &s,
			    uint32_t hbs, uint32_t row)
{
	return gqa_row_off(p, s, hbs, row) * HD;
}

/* Write a warp's rows to the output (normalised) or to the unit's slot. */
template <int HD, bool FP8>
KVK_DEV void write_rows(const struct attn_params &p, const struct gqa_seg &g,
			const gqa_acc<HD> &acc, uint32_t head_in_block,
			uint32_t row_first)
{
	const int lane = threadIdx.x & 31;
	uint32_t per = g.s.q_len * p.group, rows = per * g.hbs;
	float *slot = g.s.nr_parts > 1 ? slot_ptr(p.mem, plan_slot(g.s, g.s.part)) : NULL;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		uint32_t r = row_first + lane / 4 + 8 * h, row = head_in_block * per + r;
		float inv = acc.l[h] > 0.f ? 1.f / acc.l[h] : 0.f;
		size_t off;

		if (r >= per)
			continue;
		if (slot && lane % 4 == 0)
			((float2 *)slot)[row] = make_float2(acc.m[h], acc.l[h]);
		off = slot ? slot_o_off(rows) + (size_t)row * HD
			   : gqa_row_elem<HD>(p, g.s, g.hbs, row);
#pragma unroll
		for (int q = 0; q < HD / 16; q++) {
			int d;
			float4 v = out_quad<HD, FP8>(acc, h, q, &d);

			if (slot) {
				*(float4 *)(slot + off + d) = v;
			} else {
				v.x *= inv;
				v.y *= inv;
				v.z *= inv;
				v.w *= inv;
				out_store4(p, off + d, v);
			}
		}
	}
}

/* Write the lane's @q-th quads (acc.o[0], acc.o[1]) to the output or to the unit's slot. */
template <int HD, bool FP8, bool QUICK>
KVK_DEV void write_quads(const struct attn_params &p, const struct gqa_seg &g, uint32_t q,
			 const gqa_acc<HD> &acc, gqa_smem<HD, FP8> *sm)
{
	const uint32_t lane = threadIdx.x & 31, rows = g.s.q_len * p.group;
	float *slot = QUICK		 ? quick_dest(p, g.s, sm->quick)
		      : g.s.nr_parts > 1 ? slot_ptr(p.mem, plan_slot(g.s, g.s.part))
					 : NULL;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		const uint32_t row = lane / 4 + 8 * h;
		const float inv = acc.l[h] > 0.f ? 1.f / acc.l[h] : acc.l[h];
		float4 v = make_float4(acc.o[0][2 * h], acc.o[1][2 * h],
				       acc.o[0][2 * h + 1], acc.o[1][2 * h + 1]);
		const int d = quad_dim<HD, FP8>(lane & 3, (int)q);

		if (!FP8)
			v = make_float4(v.x, v.z, v.y, v.w);
		if (row >= rows)
			continue;
		if (QUICK && slot && lane % 4 == 0 && q == 0)
			slot_store2(slot + 2 * row, acc.m[h], acc.l[h]);
		else if (slot && lane % 4 == 0 && q == 0)
			((float2 *)slot)[row] = make_float2(acc.m[h], acc.l[h]);
		if (QUICK && slot)
			slot_store4(slot + QUICK_O + 4 * (64 * q + 32 * h + lane), v);
		else if (slot)
			*(float4 *)(slot + slot_o_off(rows) + (size_t)row * HD + d) = v;
		else
			out_store4(
				p, gqa_row_elem<HD>(p, g.s, 1, row) + d,
				make_float4(v.x * inv, v.y * inv, v.z * inv, v.w * inv));
	}
}

/* Fold quads @q of all lanes over the warps and write them; merge_wide() says how. */
template <int HD, bool FP8, bool QUICK>
KVK_DEV void merge_quads(const struct attn_params &p, const struct gqa_seg &g, uint32_t q,
			 gqa_smem<HD, FP8> *sm)
{
	const uint32_t lane = threadIdx.x & 31;
	gqa_acc<HD> acc;
	float2 ml[NR_WARPS][2];

#pragma unroll
	for (int h = 0; h < 2; h++) {
		acc.m[h] = -INFINITY;
		acc.l[h] = 0.f;
#pragma unroll
		for (int w = 0; w < NR_WARPS; w++) {
			ml[w][h] = sm->ml[w][lane / 4 + 8 * h];
			acc.m[h] = fmaxf(acc.m[h], ml[w][h].x);
		}
	}
#pragma unroll
	for (int i = 0; i < 2; i++)
#pragma unroll
		for (int e = 0; e < 4; e++)
			acc.o[i][e] = g.poisoned ? NAN : 0.f;
#pragma unroll
	for (int w = 0; w < NR_WARPS; w++) {
		float c[2];

#pragma unroll
		for (int h = 0; h < 2; h++) {
			c[h] = exp2_fast(ml[w][h].x -
					 (acc.m[h] == -INFINITY ? 0.f : acc.m[h]));
			acc.l[h] += c[h] * ml[w][h].y;
		}
#pragma unroll
		for (int i = 0; i < 2; i++) {
			const float4 v = sm->part[w][(2 * q + i) * 32 + lane];

			acc.o[i][0] += v.x * c[0];
			acc.o[i][1] += v.y * c[0];
			acc.o[i][2] += v.z * c[1];
			acc.o[i][3] += v.w * c[1];
		}
	}
	if (g.poisoned)
		acc.l[0] = acc.l[1] = NAN;
	write_quads<HD, FP8, QUICK>(p, g, q, acc, sm);
}

/* NaN for a request that failed its check. */
template <int HD>
KVK_DEV void write_nan(const struct attn_params &p, const struct gqa_seg &g)
{
	uint32_t rows = g.s.q_len * p.group * g.hbs;
	float nan = __int_as_float(0x7fffffff);

	if (g.s.part != 0)
		return;
	for (uint32_t e = threadIdx.x; e < rows * (HD / 4); e += NR_WARPS * 32)
		out_store4(p,
			   gqa_row_elem<HD>(p, g.s, g.hbs, e / (HD / 4)) +
				   4 * (e % (HD / 4)),
			   make_float4(nan, nan, nan, nan));
}

/*
 * Merge the warps of a head and row block. A warp leaves its result and goes on; the one
 * that comes last folds all of them in warp order. @nth: segments merged before. Return:
 * this warp holds the result.
 */
template <int HD, bool FP8>
KVK_DEV bool merge_warps(const struct gqa_role &role, uint32_t hbs, uint32_t nth,
			 bool worked, gqa_acc<HD> &acc, gqa_smem<HD, FP8> *sm)
{
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
	const uint32_t peers = role.slots / hbs, head = role.slot % hbs,
		       mt = role.row0 / 16;
	const uint32_t id = head * role.nm + mt;
	uint32_t last = 0;

	if (peers == 1)
		return true;
	while (lds_acquire(&sm->merged[id]) < nth)
		;
	if (worked)
#pragma unroll
		for (int i = 0; i < HD / 8; i++)
			sm->part[warp][i * 32 + lane] = make_float4(
				acc.o[i][0], acc.o[i][1], acc.o[i][2], acc.o[i][3]);
#pragma unroll
	for (int h = 0; h < 2; h++)
		if (lane % 4 == 0)
			sm->ml[warp][lane / 4 + 8 * h] =
				make_float2(acc.m[h], worked ? acc.l[h] : -1.f);
	__syncwarp();
	if (lane == 0)
		last = atoms_add_acq_rel(&sm->arrived[id], 1) % peers == peers - 1;
	if (!__shfl_sync(~0u, last, 0))
		return false;
	__syncwarp();
	acc = {};
	acc.m[0] = acc.m[1] = -INFINITY;
	for (uint32_t i = 0; i < peers; i++) {
		uint32_t w = (i * hbs + head) * role.nm + mt;

		if (sm->ml[w][0].y >= 0.f || sm->ml[w][0].y != sm->ml[w][0].y)
			fold<HD>(acc, sm->part[w], sm->ml[w]);
	}
	__syncwarp();
	if (lane == 0)
		sts_release(&sm->merged[id], nth + 1);
	return true;
}

/*
 * All warps of a CTA have one head's rows: merge them side by side instead. Each thread folds the
 * values of a lane's @q-th quads over all warps, in warp order, and writes them; a warp
 * without a piece brings zeros, so that nobody has to ask. Ends with the CTA's slot (or output)
 * written and part[] free.
 */
template <int HD, bool FP8, bool QUICK>
KVK_DEV void merge_wide(const struct attn_params &p, const struct gqa_seg &g,
			gqa_acc<HD> &acc, gqa_smem<HD, FP8> *sm)
{
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;

#pragma unroll
	for (int i = 0; i < HD / 8; i++)
		sm->part[warp][i * 32 + lane] =
			make_float4(acc.o[i][0], acc.o[i][1], acc.o[i][2], acc.o[i][3]);
#pragma unroll
	for (int h = 0; h < 2; h++)
		if (lane % 4 == 0)
			sm->ml[warp][lane / 4 + 8 * h] = make_float2(acc.m[h], acc.l[h]);
	bar_sync(BAR_ALL, NR_WARPS * 32);
	for (uint32_t q = warp; q < HD / 16; q += NR_WARPS)
		merge_quads<HD, FP8, QUICK>(p, g, q, sm);
	bar_sync(BAR_ALL, NR_WARPS * 32);
}

/* A row of this part is outside the pool: no number comes of the unit. */
template <int HD> KVK_DEV void spoil(gqa_acc<HD> &acc)
{
	acc.l[0] = acc.l[1] = NAN;
#pragma unroll
	for (int i = 0; i < HD / 2; i++)
		acc.o[i / 4][i % 4] = NAN;
}

#endif /* KVK_ATTN_GQA_MERGE_CUH */
