/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample_cut.cuh - where top-p cuts a row: steps 2 to 4 of sample_wide.cu. Device code.
 */
#ifndef KVK_SAMPLE_CUT_CUH
#define KVK_SAMPLE_CUT_CUH

#include "kernels/sample_wide.cuh"

/* --------------------------------------------------------------------- 2. all mass; the bracket */

/* The sum of all masses; by warp in part.warp_mass, or counted in part.count if @bins. */
template <u32 W>
KVK_DEV u64 wide_total(struct wide_shared<W> &sh, const struct wide_row &row, bool bins)
{
	u64 mass = 0;
	const auto take = [&](float v) {
		mass += wide_mass(row, v);
		if (bins)
			atomicAdd(&sh.part.count[wide_bin(row, v)], 1u);
	};

	for (u32 b = threadIdx.x; b < WIDE_BINS; b += W * 32)
		sh.part.count[b] = 0;
	__syncthreads();
	wide_each(row, [&](float4 v, u32) {
		take(v.x);
		take(v.y);
		take(v.z);
		take(v.w);
	});
	wide_put_sum(sh, 0, mass, bins ? NULL : sh.part.warp_mass);
	__syncthreads();
	if (threadIdx.x < 32)
		mass = wide_cta_sum64(sh, 0);
	if (threadIdx.x == 0)
		sh.part.total = mass;
	tile_cluster_sync();
	return wide_all_sum64(&sh.part.total, row.ctas);
}

/* What the threads before this one have of @v, in sums of floats; a barrier. */
template <u32 W> KVK_DEV float2 wide_scan(struct wide_shared<W> &sh, float2 v)
{
	const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	float2 sum = v, before;

	for (u32 d = 1; d < 32; d <<= 1) {
		const float x = __shfl_up_sync(~0u, sum.x, d);
		const float y = __shfl_up_sync(~0u, sum.y, d);

		if (lane >= d)
			sum.x += x, sum.y += y;
	}
	if (lane == 31) {
		sh.w32[0][warp] = sum.x;
		sh.w32[1][warp] = sum.y;
	}
	__syncthreads();
	before.x = dev_warp_sum(lane < warp ? sh.w32[0][lane] : 0.0f);
	before.y = dev_warp_sum(lane < warp ? sh.w32[1][lane] : 0.0f);
	return make_float2(before.x + sum.x - v.x, before.y + sum.y - v.y);
}

/*
 * sh.first .. sh.last: bins between which the cut most probably is. A logit's place in its bin is
 * taken for random: so the mass up to a bin's end is known within four standard deviations. (By
 * bounds that always hold it is known by 3 %, and ten times as many logits are between them.)
 */
template <u32 W>
KVK_DEV void wide_bracket(struct wide_shared<W> &sh, const struct wide_row &row, u64 want)
{
	const u32 per = WIDE_BINS / (W * 32), b = threadIdx.x * per; /* 2 or 1 */
	const float target = (float)want / row.unit, fall = expf(-1.0f / WIDE_FINE);
	float2 sum[per], before, all = make_float2(0, 0);
	float most = expf(-(float)b / WIDE_FINE); /* mass of one */

#pragma unroll
	for (u32 i = 0; i < per; i++, most *= fall) {
		const u32 top = b + i == 0; /* the largest one, which has mass 1 */
		const float n =
			(float)(wide_sum32(&sh.part.count[b + i], row.ctas) - top);

		sum[i] = make_float2(n * most * WIDE_MEAN + (float)top,
				     n * most * most * WIDE_VAR);
		all.x += sum[i].x, all.y += sum[i].y;
	}
	if (threadIdx.x == 0)
		sh.first = sh.last = WIDE_BINS - 1;
	before = wide_scan(sh, all);
#pragma unroll
	for (u32 i = 0; i < per; i++) {
		before.x += sum[i].x, before.y += sum[i].y;

		const float off = 4 * sqrtf(before.y) + WIDE_SLACK * before.x;

		if (before.x + off >= target)
			atomicMin(&sh.first, b + i);
		if (before.x - off >= target)
			atomicMin(&sh.last, b + i);
	}
	__syncthreads();
}

/* ------------------------------------------------------------------------------- 3. 4. the cut */

/* A key in the bracket; of more than there is room for, their number. */
template <u32 W> KVK_DEV void wide_list(struct wide_shared<W> &sh, u32 key)
{
	const u32 at = atomicAdd(&sh.part.listed, 1u);

	if (at < WIDE_LIST)
		sh.part.list[at] = key;
}

/*
 * The bracket, bins first .. last: bits and list of its logits, the exact mass of those above. Is
 * the cut there? @cut.hi: a key above all of the bracket's.
 */
template <u32 W>
KVK_DEV bool wide_enter(struct wide_shared<W> &sh, struct wide_row &row,
			struct wide_cut &cut, u32 first, u32 last)
{
	const float bin = row.temperature * (1.0f / WIDE_FINE);
	const float hi = first ? row.max - (float)first * bin
			       : sample_logit(sample_key(row.max) + 1);
	/* the last bin has all that is less likely, but what has no mass */
	const float lo =
		last < WIDE_BINS - 1 ? row.max - (float)(last + 1) * bin : WIDE_LEAST;
	u64 above = 0, inside = 0, bits = 0;

	cut.lo = sample_key(lo);
	cut.hi = sample_key(hi);
	if (threadIdx.x == 0)
		sh.part.listed = 0;
	__syncthreads();
	row.inside = 0;
	wide_each(row, [&](float4 v, u32 s) {
		const u32 from_lo = (v.x >= lo) | (v.y >= lo) << 1 | (v.z >= lo) << 2 |
				    (v.w >= lo) << 3;
		const u32 from_hi = (v.x >= hi) | (v.y >= hi) << 1 | (v.z >= hi) << 2 |
				    (v.w >= hi) << 3;

		row.inside |= (u64)(from_lo ^ from_hi) << (s * 4);
		bits |= (u64)from_hi << (s * 4);
	});
	/* apart: a lane that lists a key would hold up all those of its warp that add up */
	wide_some(row, bits, [&](float v) { above += wide_mass(row, v); });
	wide_some(row, row.inside, [&](float v) {
		inside += wide_mass(row, v);
		wide_list(sh, sample_key(v));
	});
	wide_put_sum(sh, 0, above, sh.part.warp_mass);
	wide_put_sum(sh, 1, inside, NULL);
	__syncthreads();
	if (threadIdx.x < 32) {
		above = wide_cta_sum64(sh, 0);
		inside = wide_cta_sum64(sh, 1);
	}
	if (threadIdx.x == 0) {
		sh.part.above = above;
		sh.part.inside = inside;
	}
	tile_cluster_sync();
	cut.above = wide_all_sum64(&sh.part.above, row.ctas);
	inside = wide_all_sum64(&sh.part.inside, row.ctas);
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

/* How a round divides keys lo .. hi: @return bits of a part. */
KVK_DEV u32 wide_shift(const struct wide_cut &cut)
{
	const u32 bits = 32 - (u32)__clz((int)(cut.hi - cut.lo));

	return bits > 8 ? bits - 8 : 0;
}

/* Behind a round: sh.bins has the masses of its parts. */
template <u32 W>
KVK_DEV void wide_take(struct wide_shared<W> &sh, struct wide_cut &cut, u32 shift)
{
	if (threadIdx.x < 32)
		wide_choose(sh, cut);
	__syncthreads();
	cut.lo += sh.chosen << shift;
	cut.hi = min(cut.hi, cut.lo + ((1u << shift) - 1));
	cut.above = sh.above;
}

/*
 * cut.lo becomes the key of the cut, cut.above the mass of larger ones: by each CTA for itself, of
 * the keys that all of them have listed, one of a thread. False: they are too many.
 */
template <u32 W>
KVK_DEV bool wide_narrow_list(struct wide_shared<W> &sh, const struct wide_row &row,
			      struct wide_cut &cut)
{
	const u32 nr = wide_get_all32(&sh.part.listed, row.ctas);
	u32 all = 0, most = 0, rank = WIDE_CTAS, at = 0, key = 0;
	u64 mass = 0;

#pragma unroll
	for (u32 c = 0; c < WIDE_CTAS; c++) {
		const u32 n = __shfl_sync(~0u, nr, (int)c);

		if (threadIdx.x >= all && threadIdx.x < all + n)
			rank = c, at = threadIdx.x - all;
		all += n;
		most = max(most, n);
	}
	if (most > WIDE_LIST || all > W * 32)
		return false;
	if (rank < WIDE_CTAS) {
		key = tile_cluster_get32(&sh.part.list[at], rank);
		mass = wide_mass(row, sample_logit(key));
	}
#pragma unroll 1
	for (u32 round = 0; round < WIDE_ROUNDS && cut.lo < cut.hi; round++) {
		const u32 shift = wide_shift(cut);

		if (threadIdx.x < WIDE_PARTS)
			sh.bins[threadIdx.x] = 0;
		__syncthreads();
		if (mass && key >= cut.lo && key <= cut.hi)
			wide_add(&sh.bins[(key - cut.lo) >> shift], mass);
		__syncthreads();
		wide_take(sh, cut, shift);
	}
	return true;
}

/* The same where they are too many: by all CTAs, each with its own logits. */
template <u32 W>
KVK_DEV void wide_narrow(struct wide_shared<W> &sh, const struct wide_row &row,
			 struct wide_cut &cut)
{
#pragma unroll 1
	for (u32 round = 0; round < WIDE_ROUNDS && cut.lo < cut.hi; round++) {
		const u32 shift = wide_shift(cut);
		u64 *mass = sh.part.mass[round % 2], own = 0;
		u32 at = 0;

		for (u32 b = threadIdx.x; b < WIDE_PARTS; b += W * 32)
			mass[b] = 0;
		__syncthreads();
		wide_some(row, row.inside, [&](float v) {
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
		wide_take(sh, cut, shift);
	}
}

#endif /* KVK_SAMPLE_CUT_CUH */
