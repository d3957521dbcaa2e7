/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample_cut.cuh - where top-p cuts a row: steps 2 to 4 of sample_wide.cu. Device code.
 */
#ifndef KVK_SAMPLE_CUT_CUH
#define KVK_SAMPLE_CUT_CUH

#include "kernels/sample_wide.cuh"

/* --------------------------------------------------------------------- 2. all mass; the bracket */

/* The sum of all masses; by warp in part.warp_mass, and counted in part.count if @bins. */
template <u32 W>
KVK_DEV u64 wide_total(struct wide_shared<W> &sh, const struct wide_row &row, bool bins)
{
	u64 mass = 0, none = 0;

	for (u32 b = threadIdx.x; b < WIDE_BINS; b += W * 32)
		sh.part.count[b] = 0;
	__syncthreads();
	wide_each(row, [&](float v, u32, u32) {
		mass += wide_mass(row, v);
		if (bins)
			atomicAdd(&sh.part.count[wide_bin(row, v)], 1u);
	});
	wide_sums(sh, mass, none, bins ? NULL : sh.part.warp_mass);
	if (threadIdx.x == 0)
		sh.part.total = mass;
	tile_cluster_sync();
	return wide_sum64(&sh.part.total, row.ctas);
}

/* What the threads before this one have, and it itself, of @v: in sums of floats. */
KVK_DEV float wide_scan(float *by_warp, float v)
{
	const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	float before = 0;

	for (u32 d = 1; d < 32; d <<= 1) {
		const float w = __shfl_up_sync(~0u, v, d);

		if (lane >= d)
			v += w;
	}
	if (lane == 31)
		by_warp[warp] = v;
	__syncthreads();
	for (u32 w = 0; w < warp; w++)
		before += by_warp[w];
	return before + v;
}

/*
 * sh.first .. sh.last: bins between which the cut is, if bounds hold. By the likeliest mass that its
 * logits can have a bin may end @want at the earliest, by the least at the latest.
 */
template <u32 W>
KVK_DEV void wide_bracket(struct wide_shared<W> &sh, const struct wide_row &row, u64 want)
{
	const float target = (float)want / row.unit, fall = expf(-1.0f / WIDE_FINE);
	const u32 per = WIDE_BINS / (W * 32), b = threadIdx.x * per; /* 2 or 1 */
	const float n0 = (float)wide_sum32(&sh.part.count[b], row.ctas);
	const float n1 =
		per == 2 ? (float)wide_sum32(&sh.part.count[b + 1], row.ctas) : 0;
	const float m = expf(-(float)b / WIDE_FINE);
	/* the last bin has all that is less likely */
	const float most1 = n1 * m * fall,
		    least1 = b + per == WIDE_BINS ? 0 : most1 * fall,
		    least0 = b + 1 == WIDE_BINS ? 0 : n0 * m * fall;
	float most, least;

	if (threadIdx.x == 0)
		sh.first = sh.last = WIDE_BINS - 1;
	most = wide_scan(sh.w32[0], n0 * m + most1) * (1 + WIDE_SLACK);
	least = wide_scan(sh.w32[1], least0 + least1) * (1 - WIDE_SLACK);
	if (most >= target)
		atomicMin(&sh.first,
			  most - most1 * (1 + WIDE_SLACK) >= target ? b : b + 1);
	if (least >= target)
		atomicMin(&sh.last, least - least1 >= target ? b : b + 1);
	__syncthreads();
}

/* ------------------------------------------------------------------------------- 3. 4. the cut */

/* Bits of the logits in bins first .. last, their keys, and the exact mass above. Is the cut there? */
template <u32 W>
KVK_DEV bool wide_enter(struct wide_shared<W> &sh, struct wide_row &row,
			struct wide_cut &cut, u32 first, u32 last)
{
	u64 above = 0, inside = 0;
	u32 lo = ~0u, hi = 0;

	row.inside = 0;
	if (threadIdx.x == 0) {
		sh.part.key_min = ~0u;
		sh.part.key_max = 0;
	}
	wide_each(row, [&](float v, u32 bit, u32) {
		const u32 bin = wide_bin(row, v);

		if (bin < first) {
			above += wide_mass(row, v);
		} else if (bin <= last) {
			inside += wide_mass(row, v);
			row.inside |= 1ull << bit;
			lo = min(lo, sample_key(v));
			hi = max(hi, sample_key(v));
		}
	});
	wide_sums(sh, above, inside, sh.part.warp_mass);
	lo = ~dev_warp_max(~lo);
	hi = dev_warp_max(hi);
	if (threadIdx.x % 32 == 0) {
		atomicMin(&sh.part.key_min, lo);
		atomicMax(&sh.part.key_max, hi);
	}
	if (threadIdx.x == 0) {
		sh.part.above = above;
		sh.part.inside = inside;
	}
	tile_cluster_sync();
	cut.above = wide_sum64(&sh.part.above, row.ctas);
	inside = wide_sum64(&sh.part.inside, row.ctas);
	cut.lo = ~0u;
	cut.hi = 0;
	for (u32 c = 0; c < row.ctas; c++) {
		cut.lo = min(cut.lo, wide_get32(&sh.part.key_min, c));
		cut.hi = max(cut.hi, wide_get32(&sh.part.key_max, c));
	}
	return cut.above < cut.want && cut.above + inside >= cut.want;
}

/* By warp 0: the largest of the parts with which @above reaches @want. */
template <u32 W>
KVK_DEV void wide_choose(struct wide_shared<W> &sh, const struct wide_cut &cut)
{
	const u32 top = WIDE_PARTS - 1 - threadIdx.x * 8;
	u64 own = 0, sum;
	u32 reach;

	for (u32 i = 0; i < 8; i++)
		own += sh.bins[top - i];
	sum = own;
	for (u32 d = 1; d < 32; d <<= 1) {
		const u64 w = __shfl_up_sync(~0u, sum, d);

		if (threadIdx.x >= d)
			sum += w;
	}
	reach = __ballot_sync(~0u, cut.above + sum >= cut.want);
	if (threadIdx.x == (reach ? (u32)__ffs((int)reach) - 1 : 31u)) {
		u64 above = cut.above + sum - own;
		u32 i = 0;

		while (i < 7 && above + sh.bins[top - i] < cut.want)
			above += sh.bins[top - i++];
		sh.chosen = top - i;
		sh.above = above;
	}
}

KVK_DEV void wide_add(u64 *p, u64 v)
{
	atomicAdd((unsigned long long *)p, (unsigned long long)v);
}

/* cut.lo becomes the key of the cut, cut.above the mass of larger ones. */
template <u32 W>
KVK_DEV void wide_narrow(struct wide_shared<W> &sh, const struct wide_row &row,
			 struct wide_cut &cut)
{
	/* a bracket of equal logits is narrow enough */
	for (u32 round = 0; round < WIDE_ROUNDS && cut.lo < cut.hi; round++) {
		const u32 wide = cut.hi - cut.lo;
		const u32 bits = 32 - (u32)__clz((int)wide),
			  shift = bits > 8 ? bits - 8 : 0;
		u64 *mass = sh.part.mass[round % 2], own = 0;
		u32 at = 0;

		for (u32 b = threadIdx.x; b < WIDE_PARTS; b += W * 32)
			mass[b] = 0;
		__syncthreads();
		wide_inside(row, [&](float v, u32) {
			const u32 key = sample_key(v), b = (key - cut.lo) >> shift;

			if (key < cut.lo || key > cut.hi)
				return;
			if (b != at && own)
				wide_add(&mass[at], own);
			own = b == at ? own + wide_mass(row, v) : wide_mass(row, v);
			at = b;
		});
		if (own)
			wide_add(&mass[at], own);
		tile_cluster_sync();
		if (threadIdx.x < WIDE_PARTS)
			sh.bins[threadIdx.x] = wide_sum64(&mass[threadIdx.x], row.ctas);
		__syncthreads();
		if (threadIdx.x < 32)
			wide_choose(sh, cut);
		__syncthreads();
		cut.lo += sh.chosen << shift;
		cut.hi = min(cut.hi, cut.lo + ((1u << shift) - 1));
		cut.above = sh.above;
	}
}

#endif /* KVK_SAMPLE_CUT_CUH */
