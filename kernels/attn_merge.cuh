/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_merge.cuh - the end of a cut unit in a decode kernel: parts are counted in, slices are shared
 * among the parts' CTAs (attn_plan.cuh says how), and slots of f32 are merged. Device code; what
 * it writes is the unit's slots, counters and output, by the warps that call it.
 */
#ifndef KVK_ATTN_MERGE_CUH
#define KVK_ATTN_MERGE_CUH

#include "kernels/attn_plan.cuh"

/*
 * A slot holds ml [rows] float2 (m in log2 units, l), padded to a multiple of 4 floats,
 * then O [rows][D] f32 in units of 2^m.
 */
KVK_DEV uint32_t slot_o_off(uint32_t rows)
{
	return (2 * rows + 3) & ~3u;
}

/* Where row @row of a unit goes in the output, in elements; rows beyond are not called.
 */
typedef size_t (*plan_row_off)(const struct attn_params &p, const struct plan_seg &s,
			       uint32_t hbs, uint32_t row);

/* A split unit of this CTA that waits for its other parts; in shared memory. */
struct plan_pending {
	struct plan_seg s;
	uint32_t epoch; /* 0: none */
	uint32_t last;	/* this CTA arrived last */
};

/* How slots are read: whether words may still be missing, and since when one waits. */
struct plan_wait {
	const uint32_t *counter;
	uint32_t target; /* *counter when all CTAs of the unit have begun */
	uint32_t half;	 /* floats to add to a slot's address */
	bool gave_up;
	long long start; /* clocks */
};

/* What a merging thread holds of an output float4. */
struct plan_part {
	float4 o;
	float m;
	float l;
};

KVK_DEV void part_add(struct plan_part &a, float4 o, float m, float l)
{
	float mn = fmaxf(a.m, m), mu = mn == -INFINITY ? 0.f : mn;
	float ca = exp2_fast(a.m - mu), cb = exp2_fast(m - mu);

	a.o.x = a.o.x * ca + o.x * cb;
	a.o.y = a.o.y * ca + o.y * cb;
	a.o.z = a.o.z * ca + o.z * cb;
	a.o.w = a.o.w * ca + o.w * cb;
	a.l = a.l * ca + l * cb;
	a.m = mn;
}

/*
 * Count in a part whose slot this warp has written; @total arrivals make the unit. All
 * lanes call it.
 */
KVK_DEV void plan_arrive(const struct attn_params &p, const struct plan_seg &s,
			 uint32_t total, struct plan_pending *pend)
{
	__syncwarp();
	if ((threadIdx.x & 31) == 0) {
		uint32_t old;

		__threadfence();
		old = atomicAdd(p.mem.counters + plan_slot(s, 0), 1);
		pend->s = s;
		pend->epoch = old / total + 1;
		if (old % total == total - 1)
			pend->last = 1;
	}
	__syncwarp();
}

/* Thread 0 waits for the unit's parts; every thread gets whether they are there. */
KVK_DEV bool plan_all_in(const struct attn_params &p, const struct plan_pending *pend,
			 uint32_t total, uint32_t *flag, int tid, int bar, int nr_threads)
{
	uint32_t *counter = p.mem.counters + plan_slot(pend->s, 0), now;

	bar_sync(bar, nr_threads); /* *flag was read */
	if (tid == 0) {
		long long start = clock64();

		do {
			now = ldg_acquire(counter);
		} while (now < pend->epoch * total && clock64() - start < PLAN_PATIENCE);
		*flag = now >= pend->epoch * total;
	}
	bar_sync(bar, nr_threads);
	return *(volatile uint32_t *)flag;
}

/*
 * A quick slot: m and l of 16 rows, then words of four values in the order in which lanes have
 * them: a warp writes and reads whole lines.
 */
#define QUICK_O	       32u
#define QUICK_WORDS(d) (16u * (d) / 4)

KVK_DEV uint32_t quick_row(uint32_t word)
{
	return word / 4 % 8 + word / 32 % 2 * 8;
}

/* First dim of the chunks of 16 that lanes have: attn_gqa_math.cuh, chunk_of(). */
KVK_DEV uint32_t quick_dim(uint32_t word)
{
	const uint32_t quad = word / 64, lane = word % 4;

	return (2 * lane + quad / 4) * 16 + quad % 4 * 4;
}

template <int D, int U, int PB>
KVK_DEV void quick_read(const struct attn_params &p, const struct plan_seg &s,
			uint32_t rows, uint32_t e, uint32_t stride, uint32_t end,
			uint32_t first, uint32_t step, struct plan_wait &w,
			struct plan_part *r);

/*
 * Parts first, first + step, ... of float4s e, e + stride, ... of a unit to r[U]; reads U x PB
 * slots at once.
 */
template <int D, int U, int PB>
KVK_DEV void plan_read(const struct attn_params &p, const struct plan_seg &s,
		       uint32_t o_off, uint32_t e, uint32_t stride, uint32_t end,
		       uint32_t first, uint32_t step, struct plan_part *r)
{
#pragma unroll
	for (int u = 0; u < U; u++) {
		r[u].o = make_float4(0.f, 0.f, 0.f, 0.f);
		r[u].m = -INFINITY;
		r[u].l = 0.f;
	}
	for (uint32_t i0 = first; i0 < s.nr_parts; i0 += PB * step) {
		float2 ml[PB][U];
		float4 o[PB][U];

#pragma unroll
		for (int j = 0; j < PB; j++) {
			const float *sl = slot_ptr(p.mem, plan_slot(s, i0 + j * step));

#pragma unroll
			for (int u = 0; u < U; u++) {
				const uint32_t at = e + u * stride;

				ml[j][u] = make_float2(-INFINITY, 0.f);
				o[j][u] = make_float4(0.f, 0.f, 0.f, 0.f);
				if (i0 + j * step < s.nr_parts && at < end) {
					ml[j][u] =
						__ldcg((const float2 *)sl + at / (D / 4));
					o[j][u] =
						__ldcg((const float4 *)(sl + o_off) + at);
				}
			}
		}
#pragma unroll
		for (int j = 0; j < PB; j++)
#pragma unroll
			for (int u = 0; u < U; u++)
				part_add(r[u], o[j][u], ml[j][u].x, ml[j][u].y);
	}
}

/*
 * Merge float4s @lo .. @hi - 1 of a unit. Teams of @ways warps share U groups of 32 float4s, each
 * warp reading every ways-th part; @scratch: [threads][U].
 */
template <int D, plan_row_off ROW, int U, int PB, bool QUICK>
KVK_DEV void plan_slice(const struct attn_params &p, const struct plan_seg &s,
			uint32_t hbs, uint32_t rows, uint32_t lo, uint32_t hi,
			uint32_t ways, struct plan_wait &w, struct plan_part *scratch,
			int tid, int bar, int nr_threads)
{
	const uint32_t lane = tid & 31, warp = tid / 32;
	const uint32_t teams = nr_threads / 32 / ways, way = warp % ways;

	for (uint32_t at = lo; at < hi; at += 32 * U * teams) {
		/* warps left over by the teams stay idle */
		uint32_t e0 =
			warp < teams * ways ? at + (warp / ways) * 32 * U + lane : hi;
		struct plan_part r[U];

		if constexpr (QUICK) {
			if (e0 < hi)
				quick_read<D, U, PB>(p, s, rows, e0, 32, hi, way, ways, w,
						     r);
		} else if (e0 < hi) {
			plan_read<D, U, PB>(p, s, slot_o_off(rows), e0, 32, hi, way, ways,
					    r);
		}
		if (ways > 1) {
#pragma unroll
			for (int u = 0; u < U; u++)
				scratch[u * nr_threads + warp * 32 + lane] = r[u];
			bar_sync(bar, nr_threads);
			for (uint32_t k = 1; k < ways && way == 0 && e0 < hi; k++)
#pragma unroll
				for (int u = 0; u < U; u++) {
					const struct plan_part *o =
						&scratch[u * nr_threads +
							 (warp + k) * 32 + lane];

					part_add(r[u], o->o, o->m, o->l);
				}
			bar_sync(bar, nr_threads);
		}
#pragma unroll
		for (int u = 0; u < U; u++) {
			const uint32_t e = e0 + 32 * u;
			const uint32_t row = QUICK ? quick_row(e) : e / (D / 4);
			const uint32_t dim = QUICK ? quick_dim(e) : 4 * (e % (D / 4));
			float inv = r[u].l > 0.f ? 1.f / r[u].l : r[u].l;

			if (e < hi && way == 0 && (!QUICK || row < rows))
				out_store4(p, ROW(p, s, hbs, row) + dim,
					   make_float4(r[u].o.x * inv, r[u].o.y * inv,
						       r[u].o.z * inv, r[u].o.w * inv));
		}
	}
}

/* Merge slice @slice of @nr_slices: with few parts more values at once. */
template <int D, plan_row_off ROW, int WIDE, bool QUICK>
KVK_DEV void plan_merge(const struct attn_params &p, const struct plan_seg &s,
			uint32_t hbs, uint32_t rows, uint32_t slice, uint32_t nr_slices,
			struct plan_wait &w, struct plan_part *scratch, int tid, int bar,
			int nr_threads)
{
	const uint32_t total = QUICK ? QUICK_WORDS(D) : rows * (D / 4);
	const uint32_t lo = slice * total / nr_slices,
		       hi = (slice + 1) * total / nr_slices;
	uint32_t ways = s.nr_parts <= 10 ? 1 : s.nr_parts <= 40 ? 4 : 8;

	if constexpr (!QUICK) {
		if (s.nr_parts <= 5 && hi - lo > (uint32_t)nr_threads) {
			if (s.nr_parts <= 2)
				plan_slice<D, ROW, 4 * WIDE, 2, QUICK>(
					p, s, hbs, rows, lo, hi, 1, w, scratch, tid, bar,
					nr_threads);
			else
				plan_slice<D, ROW, 2 * WIDE, 5, QUICK>(
					p, s, hbs, rows, lo, hi, 1, w, scratch, tid, bar,
					nr_threads);
			return;
		}
	}
	/* an empty place costs a warp as much as a part */
	if constexpr (QUICK) {
		ways = s.nr_parts <= 5	  ? 1
		       : s.nr_parts <= 20 ? 4
		       : s.nr_parts <= 80 ? 8
					  : nr_threads / 32;
		if (s.nr_parts <= 2 * ways) {
			plan_slice<D, ROW, 1, 2, QUICK>(p, s, hbs, rows, lo, hi, ways, w,
							scratch, tid, bar, nr_threads);
			return;
		}
		if (s.nr_parts <= 5 * ways) {
			plan_slice<D, ROW, 1, 5, QUICK>(p, s, hbs, rows, lo, hi, ways, w,
							scratch, tid, bar, nr_threads);
			return;
		}
	}
	plan_slice<D, ROW, WIDE, 10, QUICK>(p, s, hbs, rows, lo, hi, ways, w, scratch,
					    tid, bar, nr_threads);
}

/*
 * Finish this CTA's part of a split unit of @slices slices, at the end of the CTA: wait for the other
 * parts, then @merge(slice) of its own, and of those that nobody has taken if it came last.
 * @total: arrivals that make the unit; @flag in shared memory.
 */
template <class MERGE>
KVK_DEV void plan_share(const struct attn_params &p, const struct plan_pending *pend,
			uint32_t slices, uint32_t total, uint32_t *flag, int tid, int bar,
			int nr_threads, const MERGE &merge)
{
	const uint32_t part = pend->s.part;
	uint32_t *taken =
		p.mem.counters + PLAN_SLOTS + plan_slot(pend->s, 0) * PLAN_SLICES;
	const uint32_t epoch = pend->epoch;
	const bool last = pend->last;
	uint32_t left;

	if (part >= slices && !last)
		return;
	if (!plan_all_in(p, pend, total, flag, tid, bar, nr_threads))
		return;
	if (part < slices) {
		if (tid == 0)
			atomicMax(taken + part, epoch);
		merge(part);
	}
	for (uint32_t base = 0; last && base < slices; base += 32) {
		bar_sync(bar, nr_threads);
		if (tid < 32) {
			const uint32_t i = base + tid;
			bool open = i < slices && i != part &&
				    *(volatile uint32_t *)(taken + i) < epoch;

			*flag = __ballot_sync(~0u, open);
		}
		bar_sync(bar, nr_threads);
		for (left = *(volatile uint32_t *)flag; left; left &= left - 1)
			merge(base + __ffs(left) - 1);
		bar_sync(bar, nr_threads);
	}
}

/*
 * plan_share() with slots of f32. @scratch: [threads * WIDE] plan_part in shared memory. WIDE: 2 if
 * there are registers for 20 slots at once.
 */
template <int D, plan_row_off ROW, int WIDE>
KVK_DEV void plan_finish(const struct attn_params &p, const struct plan_pending *pend,
			 uint32_t hbs, uint32_t rows, uint32_t total,
			 struct plan_part *scratch, uint32_t *flag, int tid, int bar,
			 int nr_threads)
{
	const struct plan_seg s = pend->s;
	const uint32_t slices =
		min(min(s.nr_parts, PLAN_SLICES), (rows * (D / 4) + 31) / 32);
	struct plan_wait w = {};

	plan_share(
		p, pend, slices, total, flag, tid, bar, nr_threads, [&](uint32_t slice) {
			plan_merge<D, ROW, WIDE, false>(p, s, hbs, rows, slice, slices, w,
							scratch, tid, bar, nr_threads);
		});
}

#endif /* KVK_ATTN_MERGE_CUH */
