/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_plan.cuh - the schedule of a decode step and what both decode kernels share: the
 * kernel parameters, the walk over a CTA's segments, and the merge of partial results.
 *
 * A *unit* is what has one softmax: a request and a block of heads (GQA: hbs kv heads;
 * MLA: a block of query rows). A *tile* is one page of a unit. Tiles of all units lie in
 * one flat order and each CTA gets an equal run of them; the part of a run that lies in
 * one unit is a *segment*. A unit cut by run borders has parts; each part leaves (m, l,
 * O) in a slot, and the CTA that arrives last merges them in part order, so reruns are
 * bit-equal. Units with more than PLAN_GROUP parts merge in two levels, lest one CTA read
 * a hundred slots.
 *
 * Slots: CTA c's first segment (part > 0) uses slot 2c, its last (part 0) slot 2c + 1.
 * Group results lie in a second array with the slot number of the group's first part.
 */
#ifndef KVK_ATTN_PLAN_CUH
#define KVK_ATTN_PLAN_CUH

#include "kernels/common.cuh"
#include "kernels/attn_cuda.h"

#define PLAN_CTAS_MAX 160u
#define PLAN_GROUP    20u
#define PLAN_BATCH    10 /* slots read at once by a merging thread */

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
	uint32_t *counters;    /* [4 * PLAN_CTAS_MAX]: groups, then units */
	uint32_t *prefix;      /* [nr_requests + 1] */
	float *slots;	       /* [4 * PLAN_CTAS_MAX][slot_floats] */
	uint32_t slot_floats;
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
	bool act_f32;
	bool token_scales;
	struct plan_mem mem;
};

#define PLAN_LOG2E 1.4426950408889634f

KVK_DEV uint64_t page_offset(const struct attn_params &p, uint32_t pfn)
{
	return (uint64_t)(pfn >> p.shift) * p.extent_bytes +
	       (uint64_t)(pfn & ((1u << p.shift) - 1)) * p.stride_bytes + p.layer_off;
}

KVK_DEV bool seg_passes(const struct attn_params &p, const struct plan_seg &s)
{
	return kv_verdict_ok(p.verdicts[s.req], *p.step, s.nr_rows);
}

/* Slot (and counter) of a unit's part. */
KVK_DEV uint32_t plan_slot(const struct plan_seg &s, uint32_t part)
{
	return 2 * (s.first_cta + part) + (part == 0);
}

KVK_DEV float *slot_ptr(const struct plan_mem &m, uint32_t slot, uint32_t level)
{
	return m.slots + (size_t)(slot + level * 2 * PLAN_CTAS_MAX) * m.slot_floats;
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

/*
 * Merge @count parts (slots first, first + step parts on) of a unit into the output, or
 * into a group slot. Called by @nr_threads threads; each owns float4s of the rows.
 */
template <int D, plan_row_off ROW>
KVK_DEV void plan_merge(const struct attn_params &p, const struct plan_seg &s,
			uint32_t hbs, uint32_t rows, uint32_t part, uint32_t count,
			uint32_t part_step, uint32_t level, float *dst, int tid,
			int nr_threads)
{
	const uint32_t o_off = slot_o_off(rows);

	for (uint32_t e = tid; e < rows * (D / 4); e += nr_threads) {
		uint32_t row = e / (D / 4);
		float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
		float m = -INFINITY, l = 0.f;

		for (uint32_t i0 = 0; i0 < count; i0 += PLAN_BATCH) {
			float2 ml[PLAN_BATCH];
			float4 o[PLAN_BATCH];
			float mn = m, mu, c;

#pragma unroll
			for (int j = 0; j < PLAN_BATCH; j++) {
				const float *sl = slot_ptr(
					p.mem, plan_slot(s, part + (i0 + j) * part_step),
					level);

				ml[j] = make_float2(-INFINITY, 0.f);
				o[j] = make_float4(0.f, 0.f, 0.f, 0.f);
				if (i0 + j < count) {
					ml[j] = __ldcg((const float2 *)sl + row);
					o[j] = __ldcg((const float4 *)(sl + o_off) + e);
				}
			}
#pragma unroll
			for (int j = 0; j < PLAN_BATCH; j++)
				mn = fmaxf(mn, ml[j].x);
			mu = mn == -INFINITY ? 0.f : mn;
			c = exp2_fast(m - mu);
			acc.x *= c;
			acc.y *= c;
			acc.z *= c;
			acc.w *= c;
			l *= c;
#pragma unroll
			for (int j = 0; j < PLAN_BATCH; j++) {
				c = exp2_fast(ml[j].x - mu);
				acc.x += o[j].x * c;
				acc.y += o[j].y * c;
				acc.z += o[j].z * c;
				acc.w += o[j].w * c;
				l += ml[j].y * c;
			}
			m = mn;
		}
		if (dst) {
			*((float4 *)(dst + o_off) + e) = acc;
			if (e % (D / 4) == 0)
				((float2 *)dst)[row] = make_float2(m, l);
		} else {
			float inv = l > 0.f ? 1.f / l : 0.f;

			acc.x *= inv;
			acc.y *= inv;
			acc.z *= inv;
			acc.w *= inv;
			out_store4(p, ROW(p, s, hbs, row) + 4 * (e % (D / 4)), acc);
		}
	}
}

/* Arrive at a counter; true for the last of @count. The counter is then 0 again. */
KVK_DEV bool plan_arrive(uint32_t *counter, uint32_t count, uint32_t *flag, int tid,
			 int bar, int nr_threads)
{
	bool last;

	bar_sync(bar, nr_threads);
	if (tid == 0) {
		uint32_t old;

		__threadfence();
		old = atomicAdd(counter, 1);
		__threadfence();
		if (old == count - 1)
			*counter = 0;
		*flag = old == count - 1;
	}
	bar_sync(bar, nr_threads);
	last = *(volatile uint32_t *)flag;
	return last;
}

/*
 * After the part's slot was written by these threads: count it in, and merge if it was
 * the last. @flag: a word of shared memory.
 */
template <int D, plan_row_off ROW>
KVK_DEV void plan_finish(const struct attn_params &p, const struct plan_seg &s,
			 uint32_t hbs, uint32_t rows, uint32_t *flag, int tid, int bar,
			 int nr_threads)
{
	uint32_t *groups = p.mem.counters, *units = p.mem.counters + 2 * PLAN_CTAS_MAX;
	uint32_t np = s.nr_parts, g, first, count, ng;

	if (np <= PLAN_GROUP) {
		if (plan_arrive(groups + plan_slot(s, 0), np, flag, tid, bar, nr_threads))
			plan_merge<D, ROW>(p, s, hbs, rows, 0, np, 1, 0, NULL, tid,
					   nr_threads);
		return;
	}
	ng = (np + PLAN_GROUP - 1) / PLAN_GROUP;
	g = s.part / PLAN_GROUP;
	first = g * PLAN_GROUP;
	count = min(PLAN_GROUP, np - first);
	if (!plan_arrive(groups + plan_slot(s, first), count, flag, tid, bar, nr_threads))
		return;
	plan_merge<D, ROW>(p, s, hbs, rows, first, count, 1, 0,
			   slot_ptr(p.mem, plan_slot(s, first), 1), tid, nr_threads);
	if (plan_arrive(units + plan_slot(s, 0), ng, flag, tid, bar, nr_threads))
		plan_merge<D, ROW>(p, s, hbs, rows, 0, ng, PLAN_GROUP, 1, NULL, tid,
				   nr_threads);
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
	uint32_t row_dim; /* values of an output row */
	uint32_t hbs_force; /* bench: 0 = choose */
};

size_t plan_workspace(const struct kvk_attn_args *a, const struct plan_shape *s,
		      struct plan_mem *ret_mem);
int plan_launch(const struct kvk_attn_args *a, const struct plan_shape *s,
		const struct plan_mem *mem, cudaStream_t stream);
int plan_nr_ctas(void);
size_t kvk_attn_gqa_workspace(const struct kvk_attn_args *a);
size_t kvk_attn_mla_workspace(const struct kvk_attn_args *a);
int plan_params(const struct kvk_attn_args *a, struct attn_params *ret_p);

#endif /* KVK_ATTN_PLAN_CUH */
