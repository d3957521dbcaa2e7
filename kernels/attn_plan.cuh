/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_plan.cuh - the schedule of a decode step and what both decode kernels share: the
 * kernel parameters, the walk over a CTA's segments, and the merge of partial results.
 *
 * A *unit* is what has one softmax: a request and a block of heads (GQA: hbs kv heads;
 * MLA: a block of query rows). A *tile* is one page of a unit. Tiles of all units lie in
 * one flat order and each CTA gets an equal run of them; the part of a run that lies in
 * one unit is a *segment*. A unit cut by run borders has parts; each part leaves (m, l,
 * O) in a slot and counts itself in. At the end of a CTA its units are merged: the output
 * is cut into slices, part i owns slice i, waits until all parts are in and merges its
 * slice in part order, so reruns are bit-equal and no CTA reads all the slots. Waiting
 * has a bound: the CTA that arrived last does what others gave up, so no CTA depends on
 * another one being scheduled.
 *
 * Counters only grow (within a step; the schedule's kernel zeroes them): arrivals of the
 * n-th launch go from (n - 1) * total to n * total, and n, the epoch, marks slices taken.
 * GQA steps of few units do without counting; attn_quick.cuh says how.
 *
 * Slots: CTA c's first segment (part > 0) uses slot 2c, its last (part 0) slot 2c + 1.
 */
#ifndef KVK_ATTN_PLAN_CUH
#define KVK_ATTN_PLAN_CUH

#include <stddef.h>

#include "kernels/common.cuh"
#include "kernels/attn_cuda.h"
#include "kernels/attn_ptx.cuh"
#include "kernels/dev.cuh"

#define PLAN_CTAS_MAX 160u
#define PLAN_SLOTS    (2 * PLAN_CTAS_MAX)
#define PLAN_SLICES   64u
#define PLAN_HOLE     0xffffffffu /* a word of a quick slot that is not written yet */
#define SMEM_AT	      1024  /* where dynamic shared memory starts; kernels check it */
#define PLAN_PATIENCE 30000 /* clocks that a CTA waits for a unit's other parts */

/* One CTA's share of one unit. */
struct plan_seg {
	uint32_t req;
	uint32_t hblk;	   /* block of heads; first head is hblk * hbs */
	uint32_t page0;	   /* first page */
	uint32_t nr_pages; /* 0: nothing to read (length 0), output is zero */
	uint32_t len;
	uint32_t row0;	  /* row_start[req] */
	uint32_t nr_rows; /* rows of the request */
	uint32_t q0;	  /* q_start[req] */
	uint32_t q_len;
	uint32_t part;
	uint32_t nr_parts;
	uint32_t first_cta; /* CTA of part 0 */
};

struct plan_cta {
	uint32_t base;	/* in segs[] */
	uint32_t count; /* segments */
	uint32_t hbs;	/* heads of a block */
	uint32_t reserved;
	struct plan_seg first; /* copy of segs[base]: saves a round trip at the start */
};

/* Offsets into the workspace, the same for launchers and kernels. */
struct plan_mem {
	struct plan_cta *ctas; /* [PLAN_CTAS_MAX] */
	struct plan_seg *segs; /* [units + PLAN_CTAS_MAX] */
	uint32_t *counters;    /* [PLAN_SLOTS] arrivals, then [PLAN_SLOTS][PLAN_SLICES] */
	uint32_t *prefix;      /* [nr_requests + 1] */
	float *slots;	       /* [PLAN_SLOTS][slot_floats] */
	uint32_t slot_floats;
	uint32_t quick_floats; /* of half a slot; 0: ordinary slots */
};

struct attn_params {
	const uint8_t *base;
	uint64_t extent_bytes;
	uint64_t stride_bytes;
	uint64_t layer_off;
	uint32_t shift;
	uint32_t layer;
	const struct kv_row *rows;
	const struct kv_verdict *verdicts;
	const uint64_t *step;
	const float *scales; /* static ones of the layer, or NULL */
	const void *q;
	void *out;
	float scale; /* sm_scale * log2(e) */
	uint32_t nr_q_heads;
	uint32_t nr_kv_heads;
	uint32_t group; /* GQA: query heads per kv head */
	uint32_t q_len_max;
	uint32_t flags;
	uint32_t flight;     /* most pieces on their way to an SM */
	uint32_t nr_pages;   /* of the pool */
	uint32_t page_bytes; /* of a layer's part of a page */
	uint32_t off;	     /* DEV_NO_*: safety rules that a test build takes out */
	bool act_f32;
	bool token_scales;
	struct plan_mem mem;
};

#define PLAN_NO_LENGTH 0x100u /* beside DEV_NO_* */
#define PLAN_NO_MARKS  0x200u

#define PLAN_LOG2E     1.4426950408889634f

KVK_DEV uint64_t page_offset(const struct attn_params &p, uint32_t pfn)
{
	return (uint64_t)(pfn >> p.shift) * p.extent_bytes +
	       (uint64_t)(pfn & ((1u << p.shift) - 1)) * p.stride_bytes + p.layer_off;
}

/*
 * Start of a decode kernel. With KVK_ATTN_PLAN the schedule, rows and verdicts are old: the
 * launch that made the schedule let its successors start only after it had waited itself, so
 * they may be read before grid_wait(). Queries, pages, slots and output may not.
 */
KVK_DEV void plan_enter(const struct attn_params &p)
{
	if (!(p.flags & KVK_ATTN_PLAN))
		grid_wait();
	grid_launch_next();
}

/*
 * Start reading the CTA's share of the schedule: a word a lane, so that the rest of it is near when
 * the count is there. By the producer, which then prepares shared memory.
 */
KVK_DEV uint32_t plan_touch(const struct attn_params &p)
{
	static_assert(sizeof(struct plan_cta) == 64, "16 words");
	return ((const uint32_t *)(p.mem.ctas + blockIdx.x))[threadIdx.x & 15];
}

KVK_DEV uint32_t plan_count(uint32_t touched)
{
	return __shfl_sync(~0u, touched, offsetof(struct plan_cta, count) / 4);
}

/* What a segment's rows and verdict say. */
enum plan_state {
	PLAN_FAILED, /* the request failed: every part of the unit sees it, output is NaN */
	PLAN_OK,     /* its pages may be read */
	PLAN_POISONED, /* a row of this part is outside the pool: read nothing, l is NaN */
};

/*
 * May the pages of a segment be read (design 5, P5)? By all lanes of a warp, before the first
 * page access. The check kernel has looked at all of it; this keeps a bad verdict, length
 * or row from ever becoming an address.
 */
KVK_DEV enum plan_state plan_check(const struct attn_params &p, const struct plan_seg &s,
				   uint64_t step)
{
	const struct kv_verdict v = p.verdicts[s.req];
	const struct kv_row *rows = p.rows + s.row0 + s.page0;
	const uint32_t there = s.nr_rows > s.page0 ? s.nr_rows - s.page0 : 0;
	const uint32_t n = min(s.nr_pages, there);
	bool bad = false;

#pragma unroll 4
	for (uint32_t i = threadIdx.x & 31; i < n; i += 32)
		bad |= rows[i].pfn >= p.nr_pages;
	if (!kv_verdict_ok(v, step, s.nr_rows) && !(p.off & DEV_NO_VERDICT))
		return PLAN_FAILED;
	if (s.len > (uint64_t)s.nr_rows * KV_PAGE_TOKENS && !(p.off & PLAN_NO_LENGTH))
		return PLAN_FAILED;
	if (p.off & DEV_NO_ROW_RANGE)
		return PLAN_OK;
	return __any_sync(~0u, bad) ? PLAN_POISONED : PLAN_OK;
}

/* Slot (and counter) of a unit's part. */
KVK_DEV uint32_t plan_slot(const struct plan_seg &s, uint32_t part)
{
	return 2 * (s.first_cta + part) + (part == 0);
}

KVK_DEV float *slot_ptr(const struct plan_mem &m, uint32_t slot)
{
	return m.slots + (size_t)slot * m.slot_floats;
}

/* One value of a query row or an output row. */
KVK_DEV float act_load(const struct attn_params &p, size_t i)
{
	return p.act_f32 ? ((const float *)p.q)[i]
			 : __bfloat162float(((const __nv_bfloat16 *)p.q)[i]);
}

KVK_DEV float2 act_load2(const struct attn_params &p, size_t i)
{
	if (p.act_f32)
		return *(const float2 *)((const float *)p.q + i);
	return unpack_bf16(*(const uint32_t *)((const __nv_bfloat16 *)p.q + i));
}

/* Eight neighbouring values as bf16. */
KVK_DEV uint4 act_load8(const struct attn_params &p, size_t i)
{
	const float4 *f = (const float4 *)((const float *)p.q + i);

	if (!p.act_f32)
		return *(const uint4 *)((const __nv_bfloat16 *)p.q + i);
	return make_uint4(pack_bf16(f[0].x, f[0].y), pack_bf16(f[0].z, f[0].w),
			  pack_bf16(f[1].x, f[1].y), pack_bf16(f[1].z, f[1].w));
}

/* Two bf16 values to f16. */
KVK_DEV uint32_t bf16_f16(uint32_t two)
{
	const float2 v = unpack_bf16(two);

	return pack_f16(v.x, v.y);
}

KVK_DEV void out_store2(const struct attn_params &p, size_t i, float a, float b)
{
	if (p.act_f32)
		*(float2 *)((float *)p.out + i) = make_float2(a, b);
	else
		*(uint32_t *)((__nv_bfloat16 *)p.out + i) = pack_bf16(a, b);
}

KVK_DEV void out_store1(const struct attn_params &p, size_t i, float v)
{
	if (p.act_f32)
		((float *)p.out)[i] = v;
	else
		((__nv_bfloat16 *)p.out)[i] = __float2bfloat16(v);
}

KVK_DEV void out_store4(const struct attn_params &p, size_t i, float4 v)
{
	if (p.act_f32)
		*(float4 *)((float *)p.out + i) = v;
	else
		*(uint2 *)((__nv_bfloat16 *)p.out + i) =
			make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}

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

template <int D, int U, int PB>
KVK_DEV void quick_read(const struct attn_params &p, const struct plan_seg &s,
			uint32_t o_off, uint32_t e, uint32_t stride, uint32_t end,
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
				quick_read<D, U, PB>(p, s, slot_o_off(rows), e0, 32, hi,
						     way, ways, w, r);
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
			float inv = r[u].l > 0.f ? 1.f / r[u].l : r[u].l;

			if (e < hi && way == 0)
				out_store4(p,
					   ROW(p, s, hbs, e / (D / 4)) +
						   4 * (e % (D / 4)),
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
	const uint32_t total = rows * (D / 4);
	const uint32_t lo = slice * total / nr_slices,
		       hi = (slice + 1) * total / nr_slices;
	uint32_t ways = s.nr_parts <= 10 ? 1 : s.nr_parts <= 40 ? 4 : 8;

	if constexpr (WIDE > 0 && !QUICK) {
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
	if constexpr (WIDE < 0 || QUICK) {
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
	plan_slice<D, ROW, (WIDE > 0 ? WIDE : 1), 10, QUICK>(
		p, s, hbs, rows, lo, hi, ways, w, scratch, tid, bar, nr_threads);
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
 * there are registers for 20 slots at once, -1 to choose by parts how many slots a warp reads.
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

/* ------------------------------------------------------------------------- launcher side
 */

/* What the schedule depends on beside the batch. */
struct plan_shape {
	uint32_t nr_ctas;
	uint32_t nr_heads;  /* GQA: kv heads; MLA: blocks of query rows (hbs is 1) */
	uint32_t hbs_max;   /* largest block of heads a CTA may take: 1, 2, 4, 8 */
	uint32_t unit_rows; /* GQA: query rows of a kv head; MLA: rows of a block */
	uint32_t q_rows;  /* MLA: query rows of a token (blocks = ceil(rows / unit_rows));
			     0 */
	uint32_t row_dim; /* floats of a row in a slot */
	uint32_t hbs_force; /* bench: 0 = choose */
	uint32_t tiles_min; /* of a CTA: less is not worth a part */
	bool quick_able;    /* units may merge as attn_quick.cuh says */
	bool quick;	    /* ... and do: hbs is 1 */
};

size_t plan_workspace(const struct kvk_attn_args *a, const struct plan_shape *s,
		      struct plan_mem *ret_mem);
int plan_launch(const struct kvk_attn_args *a, const struct plan_shape *s,
		const struct plan_mem *mem, cudaStream_t stream);
uint32_t plan_slot_size(uint32_t rows, uint32_t dim);
int plan_nr_ctas(void);
size_t kvk_attn_gqa_workspace(const struct kvk_attn_args *a);
size_t kvk_attn_mla_workspace(const struct kvk_attn_args *a);
int plan_params(const struct kvk_attn_args *a, struct attn_params *ret_p);

#endif /* KVK_ATTN_PLAN_CUH */
