/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_slot.cuh - the slots of the MLA decode kernels for 17 to 64 query rows, and the merge of a
 * unit's parts from them. Other kernels: attn_plan.cuh, which also says who merges what and when.
 *
 * All SMs write their slots at once and then read others', so a split unit pays for bytes: O is
 * there in f16 (attn_mla_f16.cuh), a word of 16 bytes for 8 values of a row, and words lie in the order in which the threads
 * have them: neighbouring lanes write and read neighbouring words. The 256 threads that
 * use the pages have 16 words each; a word holds one row.
 */
#ifndef KVK_ATTN_MLA_SLOT_CUH
#define KVK_ATTN_MLA_SLOT_CUH

#include "kernels/attn_mla.cuh"
#include "kernels/attn_mla_f16.cuh"

#define SLOT_ROWS    64
#define SLOT_THREADS 256
#define SLOT_WORDS   16				      /* of a thread */
#define SLOT_GROUPS  (SLOT_WORDS * SLOT_THREADS / 32) /* words of a warp side by side */
#define SLOT_O	     (2 * SLOT_ROWS)		      /* floats in front of O: m and l */

/* ----------------------------------------------------------------------------- producer
 */

/* A segment as the producer walks it: a lane has a page. */
struct slot_walk {
	const struct kv_row *rows; /* of the first page */
	uint32_t pages;		   /* to read */
	uint32_t pfn;		   /* of page @lane */
	uint32_t have;		   /* lanes that have one */
};

/*
 * publish_seg() with a word of the segment a lane: the producer has few registers, and what it spills
 * delays the first page. @touched: the CTA's entry (plan_touch()), with all of the first segment
 */
template <class SM>
KVK_DEV struct slot_walk slot_publish(const struct attn_params &p, uint32_t touched,
				      uint32_t i, uint64_t step, SM *sm)
{
	const uint32_t lane = threadIdx.x & 31, nr = sizeof(struct plan_seg) / 4;
	const uint32_t base = PLAN_WORD(touched, base);
	const uint32_t at = offsetof(struct plan_cta, first) / 4 + lane;
	const uint32_t first = offsetof(struct plan_cta, pfn) / 4 + lane;
	uint32_t word = __shfl_sync(~0u, touched, at & 31);
	enum plan_state state;
	struct slot_walk w;
	struct plan_seg s;

	w.pfn = __shfl_sync(~0u, touched, min(first, 31u));
	w.have = i ? 32 : PLAN_FIRST;
	if (i && lane < nr)
		word = ((const uint32_t *)&p.mem.segs[base + i])[lane];
#define SLOT_FIELD(f) s.f = __shfl_sync(~0u, word, offsetof(struct plan_seg, f) / 4)
	SLOT_FIELD(req);
	SLOT_FIELD(page0);
	SLOT_FIELD(nr_pages);
	SLOT_FIELD(len);
	SLOT_FIELD(row0);
	SLOT_FIELD(nr_rows);
#undef SLOT_FIELD
	w.rows = p.rows + s.row0 + s.page0;
	if (i)
		w.pfn = lane < s.nr_pages && s.page0 + lane < s.nr_rows ? w.rows[lane].pfn
									: 0;
	state = i ? plan_state_of(p, p.mem.ctas[blockIdx.x], i, s, step)
		  : plan_state_first(p, touched, step);
	w.pages = state == PLAN_OK ? s.nr_pages : 0;
	static_assert(offsetof(struct mla_seg, ok) == sizeof(struct plan_seg) &&
			      offsetof(struct mla_seg, nr_pieces) ==
				      sizeof(struct plan_seg) + 4 &&
			      offsetof(struct mla_seg, poisoned) ==
				      sizeof(struct plan_seg) + 8,
		      "words behind the segment's");
	word = lane == nr	? state != PLAN_FAILED
	       : lane == nr + 1 ? w.pages
	       : lane == nr + 2 ? state == PLAN_POISONED
				: word;
	if (i >= SEG_RING)
		segs_wait(sm->segs_done, SM::C::NR_WARPS, i);
	if (lane < sizeof(struct mla_seg) / 4)
		((uint32_t *)&sm->segs[i % SEG_RING])[lane] = word;
	__syncwarp();
	if (lane == 0)
		sts_release(&sm->segs_in, i + 1);
	return w;
}

/*
 * All copies of a CTA in its order, by the producer; @load (stage, page, policy) starts those of a page,
 * one lane. @touched: plan_touch()
 */
template <class SM, class LOAD>
KVK_DEV void slot_produce(const struct attn_params &p, uint32_t touched, uint64_t step,
			  SM *sm, const LOAD &load)
{
	using C = typename SM::C;
	const uint64_t policy = policy_evict_first();
	const uint32_t lane = threadIdx.x & 31, count = plan_count(touched);
	uint32_t seq = 0;

	for (uint32_t i = 0; i < count; i++) {
		struct slot_walk w = slot_publish(p, touched, i, step, sm);
		uint32_t n;

		for (uint32_t pg = 0; pg < w.pages; pg += n) {
			const uint32_t now = w.pfn;

			n = min(w.have, w.pages - pg);
			w.have = 32;
			if (pg + n + lane < w.pages)
				w.pfn = w.rows[pg + n + lane].pfn;
			for (uint32_t j = 0; j < n; j++, seq++) {
				const uint32_t at = __shfl_sync(~0u, now, j);
				const uint32_t stage = seq % C::STAGES;

				if (seq == 0)
					grid_wait();
				if (lane == 0) {
					ring_wait(sm, seq, p.flight);
					mbar_wait(&sm->empty[stage],
						  (seq / C::STAGES & 1) ^ 1);
					load(stage, at, policy);
				}
				__syncwarp();
			}
		}
	}
}

/* --------------------------------------------------------------------------------- slots
 */

KVK_DEV uint4 *slot_word(float *slot, uint32_t i)
{
	return (uint4 *)(slot + SLOT_O) + i * SLOT_THREADS + threadIdx.x;
}

/* ------------------------------------------------------------------------------- merge
 */

/*
 * Parts @first, @first + @step, ... of words e, e + stride, ... (< @end) of a unit; U x N slots are read at
 * once. ROWS: row of a word, as the kernel's threads have them.
 */
template <class ROWS, int U, int N>
KVK_DEV void slot_read(const struct attn_params &p, const struct plan_seg &s,
		       uint32_t rows, uint32_t e, uint32_t stride, uint32_t end,
		       uint32_t first, uint32_t step, struct slot_sum (&r)[U])
{
#pragma unroll
	for (int u = 0; u < U; u++)
		r[u] = {{}, -INFINITY, 0.f};
	for (uint32_t i = first; i < s.nr_parts; i += N * step) {
		uint4 w[U][N];
		float2 ml[U][N];

#pragma unroll
		for (int j = 0; j < N; j++) {
			const float *slot = slot_ptr(p.mem, plan_slot(s, i + j * step));

#pragma unroll
			for (int u = 0; u < U; u++) {
				const uint32_t at = e + u * stride, row = ROWS::row(at);

				ml[u][j] = make_float2(-INFINITY, 0.f);
				w[u][j] = make_uint4(0, 0, 0, 0);
				if (i + j * step < s.nr_parts && at < end && row < rows) {
					ml[u][j] = __ldcg((const float2 *)slot + row);
					w[u][j] = __ldcg((const uint4 *)(slot + SLOT_O) +
							 at);
				}
			}
		}
#pragma unroll
		for (int u = 0; u < U; u++)
			slot_add<N>(r[u], w[u], ml[u]);
	}
}

/* What other warps have of the same words. @scratch: [10][SLOT_THREADS] */
KVK_DEV void slot_gather(struct slot_sum &a, uint32_t way, uint32_t ways, float *scratch,
			 int tid, int bar)
{
	float *mine = scratch + tid;

#pragma unroll
	for (int k = 0; k < 8; k++)
		mine[k * SLOT_THREADS] = a.o[k];
	mine[8 * SLOT_THREADS] = a.m;
	mine[9 * SLOT_THREADS] = a.l;
	bar_sync(bar, SLOT_THREADS);
	for (uint32_t i = 1; i < ways && way == 0; i++) {
		const float *o = mine + i * 32, mo = o[8 * SLOT_THREADS];
		const float m = fmaxf(a.m, mo), mu = m == -INFINITY ? 0.f : m;
		const float fa = exp2_fast(a.m - mu), fo = exp2_fast(mo - mu);

#pragma unroll
		for (int k = 0; k < 8; k++)
			a.o[k] = a.o[k] * fa + o[k * SLOT_THREADS] * fo;
		a.l = a.l * fa + o[9 * SLOT_THREADS] * fo;
		a.m = m;
	}
	bar_sync(bar, SLOT_THREADS);
}

/* Groups @lo .. @hi - 1 of a unit's words; teams of @ways warps share U groups and split the parts. */
template <class ROWS, int U, int N>
KVK_DEV void slot_slice(const struct attn_params &p, const struct plan_seg &s,
			uint32_t rows, uint32_t lo, uint32_t hi, uint32_t ways,
			float *scratch, int tid, int bar)
{
	const uint32_t warp = tid / 32, way = warp % ways, lane = tid & 31;

	for (uint32_t at = lo; at < hi; at += SLOT_THREADS / 32 / ways * U) {
		const uint32_t e0 = (at + warp / ways * U) * 32 + lane;
		struct slot_sum r[U];

		slot_read<ROWS, U, N>(p, s, rows, e0, 32, hi * 32, way, ways, r);
#pragma unroll
		for (int u = 0; u < U; u++) {
			const uint32_t e = e0 + u * 32;
			float inv;

			if (ways > 1)
				slot_gather(r[u], way, ways, scratch, tid, bar);
			inv = r[u].l > 0.f ? 1.f / r[u].l : r[u].l;
#pragma unroll
			for (int k = 0; k < 8; k++)
				r[u].o[k] *= inv;
			if (way == 0 && e < hi * 32 && ROWS::row(e) < rows)
				ROWS::out(p, mla_row_elem(p, s, SLOT_ROWS, ROWS::row(e)),
					  e, r[u].o);
		}
	}
}

/* Merge slice @slice of @nr_slices: as many slots at once as there are registers for. */
template <class ROWS>
KVK_DEV void slot_merge(const struct attn_params &p, const struct plan_seg &s,
			uint32_t rows, uint32_t slice, uint32_t nr_slices, float *scratch,
			int tid, int bar)
{
	const uint32_t lo = slice * SLOT_GROUPS / nr_slices;
	const uint32_t hi = (slice + 1) * SLOT_GROUPS / nr_slices, nr = hi - lo;
	const uint32_t ways = nr > 4 ? 1 : nr > 2 ? 2 : nr > 1 ? 4 : 8;

	if (s.nr_parts <= 2)
		slot_slice<ROWS, 4, 2>(p, s, rows, lo, hi, 1, scratch, tid, bar);
	else if (s.nr_parts <= 5)
		slot_slice<ROWS, 2, 5>(p, s, rows, lo, hi, 1, scratch, tid, bar);
	else if (s.nr_parts <= 10 * ways)
		slot_slice<ROWS, 1, 10>(p, s, rows, lo, hi, ways, scratch, tid, bar);
	else /* one round for 16 parts (of 8 requests), and for 64 of one */
		slot_slice<ROWS, 1, 17>(p, s, rows, lo, hi, ways, scratch, tid, bar);
}

/*
 * The next slice of a unit that this CTA merges: its own (@n 0), then, if it came last, those that nobody
 * has taken; PLAN_SLICES: there is none. *left: of the 32 looked at last
 */
KVK_DEV uint32_t slot_next(const struct attn_params &p, const struct plan_pending *pend,
			   uint32_t slices, uint32_t n, uint32_t *left, uint32_t *base,
			   uint32_t *flag, int bar)
{
	uint32_t *taken =
		p.mem.counters + PLAN_SLOTS + plan_slot(pend->s, 0) * PLAN_SLICES;
	const uint32_t part = pend->s.part, tid = threadIdx.x;

	if (n == 0 && part < slices) {
		if (tid == 0)
			atomicMax(taken + part, pend->epoch);
		return part;
	}
	while (!*left && pend->last && *base < slices) {
		bar_sync(bar, SLOT_THREADS);
		if (tid < 32) {
			const uint32_t i = *base + tid;
			const bool open = i < slices && i != part &&
					  *(volatile uint32_t *)(taken + i) < pend->epoch;

			*flag = __ballot_sync(~0u, open);
		}
		bar_sync(bar, SLOT_THREADS);
		*left = *(volatile uint32_t *)flag;
		*base += 32;
	}
	if (!*left)
		return PLAN_SLICES;
	n = *base - 32 + __ffs((int)*left) - 1;
	*left &= *left - 1;
	return n;
}

/*
 * plan_finish() for these slots, with one place that merges: what is there twice costs the loops over
 * pages registers. @scratch: [10][SLOT_THREADS]
 */
template <class ROWS>
KVK_DEV void slot_finish(const struct attn_params &p, const struct plan_pending *pend,
			 float *scratch, uint32_t *flag, int tid, int bar)
{
	const struct plan_seg s = pend->s;
	const uint32_t rows =
		min((uint32_t)SLOT_ROWS, s.q_len * p.nr_q_heads - s.hblk * SLOT_ROWS);
	const uint32_t slices = min(s.nr_parts, PLAN_SLICES);
	uint32_t left = 0, base = 0, slice;

	if (s.part >= slices && !pend->last)
		return;
	if (!plan_all_in(p, pend, s.nr_parts, flag, tid, bar, SLOT_THREADS))
		return;
	for (uint32_t n = 0;; n++) {
		slice = slot_next(p, pend, slices, n, &left, &base, flag, bar);
		if (slice == PLAN_SLICES)
			break;
		slot_merge<ROWS>(p, s, rows, slice, slices, scratch, tid, bar);
	}
}

/* Count in a part whose slot all consumers have written. All of them call it. */
KVK_DEV void slot_arrive(const struct attn_params &p, const struct plan_seg &s,
			 struct plan_pending *pend, int bar)
{
	bar_sync(bar, SLOT_THREADS);
	if (threadIdx.x < 32)
		plan_arrive(p, s, s.nr_parts, pend);
}

#endif /* KVK_ATTN_MLA_SLOT_CUH */
