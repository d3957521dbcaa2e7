/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample_cut.cuh - where top-p cuts a row: steps 2 to 4 of sample_wide.cu, and of 5 what warps
 * keep. Device code.
 */
#ifndef KVK_SAMPLE_CUT_CUH
#define KVK_SAMPLE_CUT_CUH

#include "kernels/sample_wide.cuh"

/* --------------------------------------------------------------------- 2. all mass; the bracket */

/*
 * As many bins as there are span what the cut of a long row can be in: behind them the whole row
 * would have less than the 1 - @top_p of all mass that may be left out.
 */
KVK_DEV void wide_bins(struct wide_row &row, float top_p)
{
	const float span =
		row.vocab < WIDE_LONG
			? WIDE_NATS
			: __logf((float)row.vocab / ((1.0f - top_p) * row.some)) + 0.05f;

	row.nats = fmaxf(fminf(span, WIDE_NATS), 1.0f) / (float)(WIDE_BINS - 1);
	row.bin = row.temperature * row.nats;
	row.fine = fminf(1.0f / row.bin, 3e38f);
}

/* The sum of all masses; by warp in part.warp_mass, or where top-p can cut counted in part.count */
template <u32 W>
KVK_DEV u64 wide_total(struct wide_shared<W> &sh, const struct wide_row &row, float top_p)
{
	const bool bins = top_p < 1.0f;
	u64 mass = 0;
	const auto take = [&](float v) {
		mass += wide_mass(row, v);
		if (bins)
			atomicAdd(&sh.part.count[wide_bin(row, v)], 1u);
	};

	for (u32 b = threadIdx.x; b < WIDE_BINS; b += W * 32)
		sh.part.count[b] = 0;
	__syncthreads();
	wide_each<W>(row, [&](float4 v) {
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
	wide_share();
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

/* The least @bin of the warp's lanes for which @is holds, to *@p: one of its threads does it. */
KVK_DEV void wide_first(u32 *p, bool is, u32 bin)
{
	const u32 which = __ballot_sync(~0u, is);

	if (which && threadIdx.x % 32 == (u32)__ffs((int)which) - 1)
		atomicMin(p, bin);
}

/*
 * sh.first .. sh.last: bins between which the cut most probably is. A logit's place in its bin is
 * taken for random: so the mass up to a bin's end is known within four standard deviations. (By
 * bounds that always hold it is known by a bin, and ten times as many logits are between them.)
 */
template <u32 W>
KVK_DEV void wide_bracket(struct wide_shared<W> &sh, const struct wide_row &row, u64 want)
{
	const u32 per = WIDE_BINS / (W * 32), b = threadIdx.x * per; /* 2 or 1 */
	const u64 both = per == 2 ? wide_sum64((const u64 *)&sh.part.count[b], row.ctas)
				  : wide_sum32(&sh.part.count[b], row.ctas);
	const float target = (float)want / row.unit, fall = expf(-row.nats);
	/* of a bin's masses, in parts of its largest: their mean, and their variance */
	const float mean = 1.0f - row.nats * (0.5f - row.nats * (1.0f / 6));
	const float var = row.nats * row.nats * (1.0f / 12);
	float2 sum[per], before, all = make_float2(0, 0);
	float most = expf(-(float)b * row.nats); /* mass of one */

#pragma unroll
	for (u32 i = 0; i < per; i++, most *= fall) {
		const u32 top = b + i == 0; /* the largest one, which has mass 1 */
		/* no count of a row reaches 2^32, so a pair of them can be added as one */
		const float n = (float)((u32)(both >> 32 * i) - top);

		sum[i] = make_float2(n * most * mean + (float)top, n * most * most * var);
		all.x += sum[i].x, all.y += sum[i].y;
	}
	if (threadIdx.x == 0)
		sh.first = sh.last = WIDE_BINS - 1;
	before = wide_scan(sh, all);
#pragma unroll
	for (u32 i = 0; i < per; i++) {
		before.x += sum[i].x, before.y += sum[i].y;

		const float off = 4 * sqrtf(before.y) + WIDE_SLACK * before.x;

		wide_first(&sh.first, before.x + off >= target, b + i);
		wide_first(&sh.last, before.x - off >= target, b + i);
	}
	__syncthreads();
}

/* ------------------------------------------------------------------------------- 3. 4. the cut */

/* A logit in the bracket; of more than there is room for, their number. */
template <u32 W> KVK_DEV void wide_list(struct wide_shared<W> &sh, u32 key, u32 id)
{
	const u32 at = atomicAdd(&sh.part.listed, 1u);

	if (at < WIDE_LIST)
		sh.part.list[at] = (u64)key << 32 | id;
}

/* Where logit e of step @first + k lies, for @bit 1 << (4 k + e). */
KVK_DEV u32 wide_at(u32 first, u32 bit)
{
	const u32 i = (u32)__ffs((int)bit) - 1;

	return (first + i / 4) * WIDE_STEP + i % 4;
}

/* That logit, if it is in shared memory. */
KVK_DEV float wide_here(const struct wide_row &row, u32 first, u32 bit)
{
	return row.logits[wide_at(first, bit)];
}

/* Bits of eight steps from @first on, of those below @here: logits of at least @lo. */
KVK_DEV u32 wide_at_least(const struct wide_row &row, u32 first, u32 here, float lo)
{
	u32 bits = 0;

#pragma unroll
	for (u32 k = 0; k < WIDE_CHUNK; k++) {
		if (first + k >= here)
			break;
		const float4 v = *(const float4 *)(row.logits + (first + k) * WIDE_STEP);

		bits |= v.x >= lo ? 1u << (4 * k) : 0;
		bits |= v.y >= lo ? 2u << (4 * k) : 0;
		bits |= v.z >= lo ? 4u << (4 * k) : 0;
		bits |= v.w >= lo ? 8u << (4 * k) : 0;
	}
	return bits;
}

/* The masses of those of sixteen logits that are at least @hi, to @most; bits of those in between. */
KVK_DEV u32 wide_split(const struct wide_row &row, const float4 (&v)[4], float lo,
		       float hi, struct wide_acc &most)
{
	u32 bits = 0;
	const auto take = [&](float logit, u32 i) {
		const bool over = logit >= hi;

		wide_acc_add(most, row,
			     over ? arch_exp2((logit - row.max) * row.scale) : 0.0f);
		bits |= logit >= lo && !over ? 1u << i : 0;
	};

#pragma unroll
	for (u32 k = 0; k < 4; k++) {
		take(v[k].x, 4 * k);
		take(v[k].y, 4 * k + 1);
		take(v[k].z, 4 * k + 2);
		take(v[k].w, 4 * k + 3);
	}
	return bits;
}

/* Number @i of sixteen in registers. */
KVK_DEV float wide_pick(const float4 (&v)[4], u32 i)
{
	float x = v[0].x;

#pragma unroll
	for (u32 k = 0; k < 4; k++) {
		x = i == 4 * k ? v[k].x : x;
		x = i == 4 * k + 1 ? v[k].y : x;
		x = i == 4 * k + 2 ? v[k].z : x;
		x = i == 4 * k + 3 ? v[k].w : x;
	}
	return x;
}

/*
 * The bracket, bins first .. last: its logits are listed; the exact mass of those above. Is the
 * cut there? @cut.hi: a key above all of the bracket's. @last ~0: everything, and no list.
 */
template <u32 W>
KVK_DEV bool wide_enter(struct wide_shared<W> &sh, const struct wide_row &row,
			struct wide_cut &cut, u32 first, u32 last)
{
	const float hi = first ? row.max - (float)first * row.bin
			       : sample_logit(sample_key(row.max) + 1);
	/* the last bin has all that is less likely, but what has no mass */
	const float lo =
		last < WIDE_BINS - 1 ? row.max - (float)(last + 1) * row.bin : WIDE_LEAST;
	const u32 here = W < WIDE_BIG ? row.steps : row.here;
	struct wide_acc most = {};
	u64 above = 0, inside = 0;
	const auto list = [&](float logit, u32 id) {
		inside += wide_mass(row, logit);
		if (~last)
			wide_list(sh, sample_key(logit), id);
	};

	cut.lo = sample_key(lo);
	cut.hi = sample_key(hi);
	if (threadIdx.x == 0)
		sh.part.listed = ~last ? 0 : WIDE_LIST + 1;
	__syncthreads();
	/* what is in the bracket apart: a lane that lists a key would hold up all those of its
	 * warp that add up */
#pragma unroll 1
	for (u32 s = 0; s < here; s += WIDE_CHUNK) {
		u32 bits = wide_at_least(row, s, here, lo), within = 0;

#pragma unroll 1
		for (; bits; bits &= bits - 1) {
			const u32 bit = bits & -bits;
			const float logit = wide_here(row, s, bit);

			above += logit >= hi ? wide_mass(row, logit) : 0;
			within |= logit >= hi ? 0 : bit;
		}
#pragma unroll 1
		for (; within; within &= within - 1)
			list(wide_here(row, s, within & -within),
			     row.id + wide_at(s, within & -within));
	}
#pragma unroll 1
	for (u32 s = here; W == WIDE_BIG && s < row.steps; s += 4) {
		float4 v[4];
		u32 within;

		wide_four_steps<W>(row, s, v);
		within = wide_split(row, v, lo, hi, most);
#pragma unroll 1
		for (; within; within &= within - 1)
			list(wide_pick(v, (u32)__ffs((int)within) - 1),
			     row.id + wide_at(s, within & -within));
	}
	above += wide_acc_sum(most, row, (row.steps - here + 3) / 4 * 16);
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
	wide_share();
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

/* struct wide_entries - a thread's logits of those that all CTAs have listed; key 0: none */
template <u32 W> struct wide_entries {
	static const u32 nr = WIDE_LISTED / (W * 32);
	u32 key[nr];
	u32 id[nr];
	u64 mass[nr];
};

/* Number @at of what all CTAs have listed. @nr: how many each has, by lane. Return: 0, or none */
template <u32 W> KVK_DEV u64 wide_listed(struct wide_shared<W> &sh, u32 nr, u32 at)
{
	u32 rank = WIDE_CTAS, own = 0, all = 0;

#pragma unroll
	for (u32 c = 0; c < WIDE_CTAS; c++) {
		const u32 n = __shfl_sync(~0u, nr, (int)c);

		if (at >= all && at < all + n)
			rank = c, own = at - all;
		all += n;
	}
	return rank < WIDE_CTAS ? tile_cluster_get64(&sh.part.list[own], rank) : 0;
}

/* The cut among @nr keys, which are no more than a warp has lanes: by warp 0. */
template <u32 W>
KVK_DEV void wide_choose_left(struct wide_shared<W> &sh, const struct wide_cut &cut,
			      u32 nr)
{
	const u32 lane = threadIdx.x;
	const u32 key = lane < nr ? sh.left_key[lane] : 0;
	const u64 mass = lane < nr ? sh.left_mass[lane] : 0;
	u64 above = cut.above, same = 0;

	for (u32 i = 0; i < nr; i++) {
		const u32 k = __shfl_sync(~0u, key, (int)i);
		const u64 m = __shfl_sync(~0u, mass, (int)i);

		above += k > key ? m : 0;
		same += k == key ? m : 0;
	}
	/* the same by all lanes of the cut's key */
	if (lane < nr && above < cut.want && above + same >= cut.want) {
		sh.chosen = key;
		sh.above = above;
	}
}

/* Behind a round: are few enough keys left for one warp? Then cut is known. */
template <u32 W>
KVK_DEV bool wide_take_left(struct wide_shared<W> &sh, struct wide_cut &cut,
			    const struct wide_entries<W> &e, u32 *nr_left)
{
	u32 nr;

#pragma unroll
	for (u32 i = 0; i < e.nr; i++)
		if (e.mass[i] && e.key[i] >= cut.lo && e.key[i] <= cut.hi) {
			const u32 at = atomicAdd(nr_left, 1u);

			if (at < WIDE_FEW_LEFT) {
				sh.left_key[at] = e.key[i];
				sh.left_mass[at] = e.mass[i];
			}
		}
	__syncthreads();
	nr = *nr_left;
	if (!nr || nr > WIDE_FEW_LEFT)
		return false;
	if (threadIdx.x < 32)
		wide_choose_left(sh, cut, nr);
	__syncthreads();
	cut.lo = cut.hi = sh.chosen;
	cut.above = sh.above;
	return true;
}

/*
 * cut.lo becomes the key of the cut, cut.above the mass of larger ones: by each CTA for itself, of
 * the keys that all of them have listed, one or two of a thread. False: they are too many.
 */
template <u32 W>
KVK_DEV bool wide_narrow_list(struct wide_shared<W> &sh, const struct wide_row &row,
			      struct wide_cut &cut, struct wide_entries<W> &e)
{
	const u32 nr = wide_get_all32(&sh.part.listed, row.ctas);
	u32 all = nr, most = nr;

#pragma unroll
	for (int o = WIDE_CTAS / 2; o; o >>= 1) {
		all += __shfl_xor_sync(~0u, all, o);
		most = max(most, __shfl_xor_sync(~0u, most, o));
	}
	if (most > WIDE_LIST || all > WIDE_LISTED)
		return false;
#pragma unroll
	for (u32 i = 0; i < e.nr; i++) {
		const u64 word = wide_listed(sh, nr, threadIdx.x + i * W * 32);

		e.key[i] = (u32)(word >> 32);
		e.id[i] = (u32)word;
		e.mass[i] = word ? wide_mass(row, sample_logit(e.key[i])) : 0;
	}
#pragma unroll 1
	for (u32 round = 0; round < WIDE_ROUNDS && cut.lo < cut.hi; round++) {
		const u32 shift = wide_shift(cut);

		if (threadIdx.x < WIDE_PARTS)
			sh.bins[threadIdx.x] = 0;
		if (threadIdx.x == 0)
			sh.nr_left[round % 2] = 0;
		__syncthreads();
#pragma unroll
		for (u32 i = 0; i < e.nr; i++)
			if (e.mass[i] && e.key[i] >= cut.lo && e.key[i] <= cut.hi)
				wide_add(&sh.bins[(e.key[i] - cut.lo) >> shift],
					 e.mass[i]);
		__syncthreads();
		wide_take(sh, cut, shift);
		if (wide_take_left(sh, cut, e, &sh.nr_left[round % 2]))
			break;
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
		const float lo = sample_logit(cut.lo), hi = sample_logit(cut.hi);
		const auto take = [&](float v) {
			const u32 key = sample_key(v), b = (key - cut.lo) >> shift;

			/* the floats first: most are out, and keys cost more */
			if (!(v >= lo && v <= hi) || key < cut.lo || key > cut.hi)
				return;
			if (b != at && own)
				wide_add(&mass[at], own);
			own = b == at ? own + wide_mass(row, v) : wide_mass(row, v);
			at = b;
		};

		for (u32 b = threadIdx.x; b < WIDE_PARTS; b += W * 32)
			mass[b] = 0;
		__syncthreads();
		wide_each<W>(row, [&](float4 v) {
			take(v.x);
			take(v.y);
			take(v.z);
			take(v.w);
		});
		if (own)
			wide_add(&mass[at], own);
		wide_share();
		if (threadIdx.x < WIDE_PARTS)
			sh.bins[threadIdx.x] = wide_sum64(&mass[threadIdx.x], row.ctas);
		__syncthreads();
		wide_take(sh, cut, shift);
	}
}

/* ------------------------------------------------------------------ 5. what is kept, by warp */

/* sh.all_mass, all_cut: every warp's words, of all CTAs. @cuts: those at the cut were counted */
template <u32 W>
KVK_DEV void wide_get_runs(struct wide_shared<W> &sh, const struct wide_row &row,
			   bool cuts)
{
	const u32 t = threadIdx.x;
	const bool there = t / W < row.ctas;

	if (t >= WIDE_RUNS)
		return;
	sh.all_mass[t] = there ? tile_cluster_get64(&sh.part.warp_mass[t % W], t / W) : 0;
	sh.all_cut[t] =
		there && cuts ? tile_cluster_get32(&sh.part.warp_cut[t % W], t / W) : 0;
}

/* The warps' words had what is above the bracket: what is listed comes to it. */
template <u32 W>
KVK_DEV void wide_add_listed(struct wide_shared<W> &sh, const struct wide_row &row,
			     const struct wide_cut &cut, const struct wide_entries<W> &e)
{
	__syncthreads();
#pragma unroll
	for (u32 i = 0; i < e.nr; i++) {
		const u32 run = e.id[i] / (row.steps * WIDE_STEP);

		if (e.key[i] > cut.lo && e.mass[i])
			wide_add(&sh.all_mass[run], e.mass[i]);
		if (e.key[i] == cut.lo)
			atomicAdd(&sh.all_cut[run], 1u);
	}
}

/* Where there is no list each warp looks through its logits again; a barrier of the cluster. */
template <u32 W>
KVK_DEV void wide_recount(struct wide_shared<W> &sh, const struct wide_row &row,
			  const struct wide_cut &cut)
{
	const float lo = sample_logit(cut.lo);
	u32 cuts = 0;
	u64 mass = 0;
	const auto take = [&](float v) {
		const u32 key = sample_key(v);

		if (!(v >= lo))
			return;
		cuts += key == cut.lo;
		mass += key > cut.lo ? wide_mass(row, v) : 0;
	};

	wide_each<W>(row, [&](float4 v) {
		take(v.x);
		take(v.y);
		take(v.z);
		take(v.w);
	});
	mass = dev_warp_sum(mass);
	cuts = dev_warp_sum(cuts);
	if (threadIdx.x % 32 == 0) {
		sh.part.warp_mass[threadIdx.x / 32] = mass;
		sh.part.warp_cut[threadIdx.x / 32] = cuts;
	}
	wide_share();
	wide_get_runs(sh, row, true);
}

#endif /* KVK_SAMPLE_CUT_CUH */
