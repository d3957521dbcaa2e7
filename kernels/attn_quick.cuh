/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_quick.cuh - how a unit's parts meet in an FP8 GQA step of few units or one kv head: the data is
 * its own signal. Device code of attn_gqa.cu.
 *
 * A slot, its fence, the count, the look at the count and the read of the slots are four trips
 * to the L2, one after the other, a good part of a small launch. Here a slot is empty
 * (all words PLAN_HOLE, a NaN that no part writes) until its part comes, and who merges reads
 * the slots until none of its words is empty: one trip.
 *
 * Words of a slot lie in the order in which lanes have them (quick_row(), quick_dim()): row by row a
 * warp's store would touch 32 lines.
 *
 * A slot has two halves. The n-th launch after the schedule writes half n % 2 and
 * empties the other one for the next; the schedule's kernel emptied half 0.
 *
 * No CTA may depend on another one being scheduled. So each CTA enlists in its units when it
 * begins, in their counters. Who waits longer than PLAN_PATIENCE asks whether all CTAs of the
 * unit have begun: then they will write, since a CTA waits for others only after it has
 * written everything. If not, it marks its slice as given up, asks once more and leaves. A CTA
 * that begins looks for marks after it has enlisted: one of the two sees the other. The CTA
 * that begins last thus knows all slices left, and merges them. Slices merged twice get the
 * same bits twice.
 *
 * Every CTA of a unit writes its part: one that finds the request failed writes NaN (publish_seg()). So
 * the wait ends even if parts should not agree about that, and nobody has to read a verdict again.
 */
#ifndef KVK_ATTN_QUICK_CUH
#define KVK_ATTN_QUICK_CUH

#include "kernels/attn_merge.cuh"

/* What a CTA knows of the cut units of its first and last segment; in shared memory. */
struct quick_pending {
	struct plan_seg s;
	uint32_t epoch;	  /* launch after the schedule; 0: not known yet */
	uint32_t arrived; /* this CTA's part is written */
	uint32_t known;	  /* left[] is */
	uint32_t left[2]; /* slices that others gave up before this CTA began */
};

KVK_DEV float quick_word(float v)
{
	return __float_as_uint(v) == PLAN_HOLE ? __uint_as_float(0x7fffffffu) : v;
}

/* Stores to a slot: never a hole. */
KVK_DEV void slot_store2(float *at, float x, float y)
{
	stg_relaxed2(at, make_float2(quick_word(x), quick_word(y)));
}

KVK_DEV void slot_store4(float *at, float4 v)
{
	stg_relaxed4(at, make_float4(quick_word(v.x), quick_word(v.y), quick_word(v.z),
				     quick_word(v.w)));
}

/* Marks of slices given up; where the unit of an ordinary merge marks slices taken. */
KVK_DEV uint32_t *quick_marks(const struct attn_params &p, const struct plan_seg &s)
{
	return p.mem.counters + PLAN_SLOTS + plan_slot(s, 0) * PLAN_SLICES;
}

/*
 * Enlist the CTA in the unit of its first (@which 0) or last (@which 1) segment if that is cut,
 * and empty the half of its slot that the next launch writes. By a warp that has nothing else
 * to do.
 */
template <int D>
KVK_DEV void quick_enlist(const struct attn_params &p, const struct plan_cta &cta,
			  uint32_t which, struct quick_pending *pend)
{
	const uint32_t lane = threadIdx.x & 31;
	const float hole = __uint_as_float(PLAN_HOLE);
	const uint32_t count = cta.count;
	const struct plan_seg &s =
		which && count ? p.mem.segs[cta.base + count - 1] : cta.first;
	uint32_t epoch = 0, rows, left[2];
	const uint32_t *marks;
	float4 *slot;

	if (!count)
		return;
	rows = s.q_len * p.group;
	if (s.nr_parts < 2 || (s.part == 0) != (which == 1))
		return;
	grid_wait(); /* the launch before is over: all its CTAs have enlisted */
	if (lane == 0) {
		epoch = atomicAdd(p.mem.counters + plan_slot(s, 0), 1) / s.nr_parts + 1;
		sts_release(&pend->epoch, epoch);
		__threadfence(); /* enlisted, then looked for marks */
	}
	epoch = __shfl_sync(~0u, epoch, 0);
	marks = quick_marks(p, s);
#pragma unroll
	for (int i = 0; i < 2; i++)
		left[i] =
			__ballot_sync(~0u, *(const volatile uint32_t *)(marks + 32 * i +
									lane) == epoch &&
						   !(p.off & PLAN_NO_MARKS));
	if (lane == 0) {
		pend->left[0] = left[0];
		pend->left[1] = left[1];
		sts_release(&pend->known, 1);
	}
	slot = (float4 *)(slot_ptr(p.mem, plan_slot(s, s.part)) +
			  (epoch & 1) * p.mem.quick_floats);
	for (uint32_t i = lane; i < QUICK_O / 4 + QUICK_WORDS(D); i += 32)
		if (i < QUICK_O / 4 || quick_row(i - QUICK_O / 4) < rows)
			slot[i] = make_float4(hole, hole, hole, hole);
}

/* Where a part of a unit leaves its result; NULL: it is the whole unit. @pend: [2] */
KVK_DEV float *quick_dest(const struct attn_params &p, const struct plan_seg &s,
			  const struct quick_pending *pend)
{
	uint32_t epoch;

	if (s.nr_parts < 2)
		return NULL;
	while (!(epoch = lds_acquire(&pend[s.part == 0].epoch)))
		;
	return slot_ptr(p.mem, plan_slot(s, s.part)) +
	       ((epoch - 1) & 1) * p.mem.quick_floats;
}

/* This warp has written its share of the part. */
KVK_DEV void quick_arrive(const struct plan_seg &s, struct quick_pending *pend)
{
	if ((threadIdx.x & 31) == 0) {
		pend->s = s;
		pend->arrived = 1;
	}
	__syncwarp();
}

KVK_DEV bool quick_hole4(float4 v)
{
	return __float_as_uint(v.x) == PLAN_HOLE || __float_as_uint(v.y) == PLAN_HOLE ||
	       __float_as_uint(v.z) == PLAN_HOLE || __float_as_uint(v.w) == PLAN_HOLE;
}

KVK_DEV bool quick_hole2(float2 v)
{
	return __float_as_uint(v.x) == PLAN_HOLE || __float_as_uint(v.y) == PLAN_HOLE;
}

/*
 * Parts first, first + step, ... of float4s e, e + stride, ... of a unit to r[U]; reads U x PB
 * slots at once.
 */
template <int D, int U, int PB>
KVK_DEV void quick_read(const struct attn_params &p, const struct plan_seg &s,
			uint32_t rows, uint32_t e, uint32_t stride, uint32_t end,
			uint32_t first, uint32_t step, struct plan_wait &w,
			struct plan_part *r)
{
	static_assert(U * PB <= 32, "a bit for each");
#pragma unroll
	for (int u = 0; u < U; u++) {
		r[u].o = make_float4(0.f, 0.f, 0.f, 0.f);
		r[u].m = -INFINITY;
		r[u].l = 0.f;
	}
	for (uint32_t i0 = first; i0 < s.nr_parts; i0 += PB * step) {
		float2 ml[PB][U];
		float4 o[PB][U];
		uint32_t holes = ~0u;

#pragma unroll
		for (int k = 0; k < PB * U; k++) {
			ml[k / U][k % U] = make_float2(-INFINITY, 0.f);
			o[k / U][k % U] = make_float4(0.f, 0.f, 0.f, 0.f);
		}
		do { /* again those that were not there */
			const uint32_t missing = holes;

			holes = 0;
#pragma unroll
			for (int j = 0; j < PB; j++) {
				const float *sl =
					slot_ptr(p.mem, plan_slot(s, i0 + j * step)) +
					w.half;

#pragma unroll
				for (int u = 0; u < U; u++) {
					const uint32_t at = e + u * stride;
					const uint32_t row = quick_row(at);
					const bool in = i0 + j * step < s.nr_parts &&
							at < end && row < rows &&
							(missing >> (j * U + u) & 1);

					ldg_relaxed2(sl + 2 * row, in, ml[j][u]);
					ldg_relaxed4(sl + QUICK_O + 4 * at, in, o[j][u]);
				}
			}
#pragma unroll
			for (int k = 0; k < PB * U; k++)
				if (quick_hole2(ml[k / U][k % U]) ||
				    quick_hole4(o[k / U][k % U]))
					holes |= 1u << k;
			if (holes && clock64() - w.start > PLAN_PATIENCE &&
			    ldg_acquire(w.counter) < w.target) {
				w.gave_up = true;
				break;
			}
		} while (holes);
#pragma unroll
		for (int j = 0; j < PB; j++)
#pragma unroll
			for (int u = 0; u < U; u++)
				part_add(r[u], o[j][u], ml[j][u].x, ml[j][u].y);
	}
}

/* Merge a slice, or mark it if some CTA of the unit has not begun. */
template <int D, plan_row_off ROW, int WIDE>
KVK_DEV void quick_slice(const struct attn_params &p, const struct quick_pending *pend,
			 uint32_t rows, uint32_t slice, uint32_t slices,
			 struct plan_part *scratch, uint32_t *flag, int tid, int bar,
			 int nr_threads)
{
	const struct plan_seg s = pend->s;
	struct plan_wait w;

	w.counter = p.mem.counters + plan_slot(s, 0);
	w.target = pend->epoch * s.nr_parts;
	w.half = ((pend->epoch - 1) & 1) * p.mem.quick_floats;
	for (;;) {
		w.gave_up = false;
		w.start = clock64();
		plan_merge<D, ROW, WIDE, true>(p, s, 1, rows, slice, slices, w, scratch,
					       tid, bar, nr_threads);
		if (!bar_or(bar, nr_threads, w.gave_up))
			return;
		if (tid == 0) {
			quick_marks(p, s)[slice] = pend->epoch;
			__threadfence(); /* marked, then looked who has begun */
			*flag = ldg_acquire(w.counter) >= w.target;
		}
		bar_sync(bar, nr_threads);
		if (!*(volatile uint32_t *)flag)
			return;
		bar_sync(bar, nr_threads); /* *flag was read */
	}
}

/* Finish this CTA's part of a cut unit, as plan_finish(). */
template <int D, plan_row_off ROW, int WIDE>
KVK_DEV void quick_finish(const struct attn_params &p, const struct quick_pending *pend,
			  uint32_t rows, struct plan_part *scratch, uint32_t *flag,
			  int tid, int bar, int nr_threads)
{
	const struct plan_seg s = pend->s;
	const uint32_t slices = min(min(s.nr_parts, PLAN_SLICES), QUICK_WORDS(D) / 32);

	for (uint32_t n = 0; n <= slices; n++) { /* its own, then those left */
		const uint32_t i = n ? n - 1 : s.part;

		if (n == 1) {
			while (!lds_acquire(&pend->known))
				;
			if (!(pend->left[0] | pend->left[1])) /* as good as always */
				return;
		}
		if (n ? i == s.part || !(pend->left[i / 32] >> i % 32 & 1) : i >= slices)
			continue;
		quick_slice<D, ROW, WIDE>(p, pend, rows, i, slices, scratch, flag, tid,
					  bar, nr_threads);
	}
}

#endif /* KVK_ATTN_QUICK_CUH */
