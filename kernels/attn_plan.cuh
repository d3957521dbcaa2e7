/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_plan.cuh - the schedule of a decode step and what both decode kernels share: the
 * kernel parameters and the walk over a CTA's segments. attn_merge.cuh has the merge.
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
 * GQA steps of few units do without counting; attn_quick.cuh says how. What lies in a slot and how
 * a slice is merged: attn_merge.cuh for GQA and MLA with 16 rows, attn_mla_few.cuh for 8 and
 * attn_mla_slot.cuh for more.
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
#define PLAN_FIRST    12u	  /* pages whose numbers a CTA finds in its entry */
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

/*
 * One line of 128 bytes with all that a CTA needs to start its first copies: whether the first
 * segment's pages may be read, as plan_check() said when the schedule was made, and where they
 * are. Rows and verdicts of a step do not change (design 5, P4), so this holds in the step
 * whose number is here, and in no other.
 */
struct plan_cta {
	uint32_t base;	       /* in segs[] */
	uint32_t count;	       /* segments */
	uint32_t hbs;	       /* heads of a block */
	uint32_t state;	       /* enum plan_state of the first segment */
	struct plan_seg first; /* copy of segs[base] */
	uint32_t pfn[PLAN_FIRST];
	uint64_t step;
	uint64_t reserved;
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
#define PLAN_NO_STEP   0x400u
#define PLAN_NO_ANSWER 0x800u

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
	static_assert(sizeof(struct plan_cta) == 128, "a word a lane");
	return ((const uint32_t *)(p.mem.ctas + blockIdx.x))[threadIdx.x & 31];
}

/* A field of it, by all lanes. */
#define PLAN_WORD(touched, field) \
	__shfl_sync(~0u, touched, offsetof(struct plan_cta, field) / 4)

KVK_DEV uint32_t plan_count(uint32_t touched)
{
	return PLAN_WORD(touched, count);
}

/* What a segment's rows and verdict say. */
enum plan_state {
	PLAN_FAILED, /* the request failed: every part of the unit sees it, output is NaN */
	PLAN_OK,     /* its pages may be read */
	PLAN_POISONED, /* a row of this part is outside the pool: read nothing, l is NaN */
};

/*
 * May the pages of a segment be read (design 5, P5)? By all lanes of a warp, before the first
 * page access: of a CTA's first segment when the schedule is made, of the others here and now.
 * The check kernel has looked at all of it; this keeps a bad verdict, length or row from
 * ever becoming an address. @p: attn_params or what the schedule's kernel has of it.
 */
template <class P>
KVK_DEV enum plan_state plan_check(const P &p, const struct plan_seg &s, uint64_t step)
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

/*
 * Segment @i of a CTA: what plan_check() said of the first one, or says. The schedule of another
 * step is good for no request.
 */
KVK_DEV enum plan_state plan_state_of(const struct attn_params &p,
				      const struct plan_cta &cta, uint32_t i,
				      const struct plan_seg &s, uint64_t step)
{
	if (cta.step != step && !(p.off & PLAN_NO_STEP))
		return PLAN_FAILED;
	return i ? plan_check(p, s, step) : (enum plan_state)cta.state;
}

/* The same of the first segment, from the entry as plan_touch() has it. */
KVK_DEV enum plan_state plan_state_first(const struct attn_params &p, uint32_t touched,
					 uint64_t step)
{
	const uint32_t lo = PLAN_WORD(touched, step);
	const uint32_t hi =
		__shfl_sync(~0u, touched, offsetof(struct plan_cta, step) / 4 + 1);
	const uint32_t state = PLAN_WORD(touched, state);

	if ((lo | (uint64_t)hi << 32) != step && !(p.off & PLAN_NO_STEP))
		return PLAN_FAILED;
	return (enum plan_state)state;
}

/* Address of page @i of the first segment, i < PLAN_FIRST, likewise; each lane its own. */
KVK_DEV const uint8_t *plan_page_first(const struct attn_params &p, uint32_t touched,
				       uint32_t i)
{
	const uint32_t at = offsetof(struct plan_cta, pfn) / 4 + min(i, PLAN_FIRST - 1);

	return p.base + page_offset(p, __shfl_sync(~0u, touched, at));
}

/* The first segment's description: by all lanes, each its words. */
KVK_DEV void plan_seg_first(uint32_t touched, struct plan_seg *ret_s)
{
	const uint32_t at = offsetof(struct plan_cta, first) / 4;
	const uint32_t lane = threadIdx.x & 31;

	if (lane >= at && lane < at + sizeof(struct plan_seg) / 4)
		((uint32_t *)ret_s)[lane - at] = touched;
}

/*
 * Number of page @first + lane of a segment's @ps, @n of them at hand: of the CTA's first ones
 * from its entry, so that copies start one trip to memory after the CTA has begun.
 */
KVK_DEV uint32_t plan_pages(const struct attn_params &p, const struct plan_cta &cta,
			    uint32_t i, const struct plan_seg &s, uint32_t *ret_n)
{
	const uint32_t lane = threadIdx.x & 31;
	const struct kv_row *rows = p.rows + s.row0 + s.page0;

	*ret_n = i ? 32 : PLAN_FIRST;
	if (lane >= min(*ret_n, s.nr_pages) || s.page0 + lane >= s.nr_rows)
		return 0;
	return i ? rows[lane].pfn : cta.pfn[lane];
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
	bool halves;	    /* of the SMs if twice tiles_min is enough then */
	bool quick_able;    /* units may merge as attn_quick.cuh says */
	bool quick;	    /* ... and do: hbs is 1 */
};

/** plan_workspace() - bytes; with @ret_mem also where the parts lie in a->workspace */
size_t plan_workspace(const struct kvk_attn_args *a, const struct plan_shape *s,
		      struct plan_mem *ret_mem);
/** plan_launch() - queue the schedule's kernel, before decode's. Return: 0 or -EIO */
int plan_launch(const struct kvk_attn_args *a, const struct plan_shape *s,
		const struct plan_mem *mem, cudaStream_t stream);
/** plan_slot_size() - floats of a slot of a unit of @rows rows */
uint32_t plan_slot_size(uint32_t rows, uint32_t dim);
/** plan_nr_ctas() - of a decode kernel: one per SM of the current device; 0: no device */
int plan_nr_ctas(void);
/** kvk_attn_gqa_workspace(), kvk_attn_mla_workspace() - bytes; 0: not a shape of theirs */
size_t kvk_attn_gqa_workspace(const struct kvk_attn_args *a);
size_t kvk_attn_mla_workspace(const struct kvk_attn_args *a);
/** plan_params() - what does not depend on the kind. Return: 0 or -EINVAL */
int plan_params(const struct kvk_attn_args *a, struct attn_params *ret_p);

#endif /* KVK_ATTN_PLAN_CUH */
