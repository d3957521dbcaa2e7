/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill.cuh - parameters, shared memory and the schedule of the prefill kernel;
 * attn_prefill.cu explains it.
 */
#ifndef KVK_ATTN_PREFILL_CUH
#define KVK_ATTN_PREFILL_CUH

#include <cuda.h>
#include "base/util.h"
#include "kernels/attn_cuda.h"
#include "kernels/common.cuh"
#include "kernels/wgmma.cuh"

#include <errno.h>

#define PF_ROWS		128 /* query rows of a CTA */
#define PF_WG_ROWS	64  /* ... of a consumer warpgroup */
#define PF_KEYS		128 /* tokens of a tile: two pages */
#define PF_STAGES	2
#define PF_SCALES	4   /* slots of token scales: outlive the stage of their K */
#define PF_RAW		3   /* FP8: parts on their way */
#define PF_WARP_KEYS	32u /* FP8: tokens of a tile that one warp makes */
#define PF_THREADS	384
#define PF_REGS		504u /* of three threads, one of each warpgroup: 168 at launch */
#define PF_BATCH_MAX	128u /* requests of a launch */
#define PF_HALF		16384u /* bytes of 128 rows of 64 values */
#define PF_BOX		8192u  /* bytes of 64 rows of 64 values: one tensor copy */
#define PF_SLACK	8.f    /* P may grow to 2^8 before its reference is raised */
#define PF_LOG2E	1.4426950408889634f
#define PF_NO_ROW_RANGE 1u /* pf_params.off */
#define PF_BAR_TURN	1  /* and 2: which warpgroup may issue its products */

/*
 * Where K and V come from. PAGED: K and V of a kv head in pages. Else ("expanded" MLA): one
 * array of all tokens with K's first part and V of a head side by side, and one with K's
 * last 64 values, which all heads share.
 */
template <int DK_, int DV_, bool PAGED_, bool FP8_> struct pf_cfg {
	static constexpr int DK = DK_;
	static constexpr int DV = DV_;
	static constexpr bool PAGED = PAGED_;
	static constexpr bool FP8 = FP8_;	    /* pages in e4m3 */
	static constexpr int FEEDERS = FP8 ? 4 : 1; /* warps that fill a tile */
	static constexpr uint32_t REGS_FEED = FP8 ? 72 : 56;
	static constexpr uint32_t REGS_USE = FP8 ? 216 : 224;
	static_assert(REGS_FEED + 2 * REGS_USE <= PF_REGS, "they would wait for ever");
	static constexpr int ROWS = PF_ROWS;
	static constexpr int KEYS = PF_KEYS;
	static constexpr int OUT = DV;
	static constexpr uint32_t HALF = PF_HALF;
	static constexpr uint32_t BATCH = PF_BATCH_MAX;
	static constexpr int KH = DK / 64;
	static constexpr int VH = DV / 64;
};

struct pf_params {
	CUtensorMap k; /* paged: K and V; else K's first part and V */
	CUtensorMap rope;
	const uint8_t *base; /* of the layer in page 0; else the array with V */
	uint64_t extent_bytes;
	uint64_t stride_bytes;
	const float *static_scales; /* [kv heads][2] of the layer, or NULL */
	const struct kv_row *rows;
	const uint32_t *row_start;
	const uint32_t *lengths;
	const uint32_t *q_start;
	const uint32_t *kv_start;
	const struct kv_verdict *verdicts;
	const uint64_t *step;
	const uint16_t *q;
	uint16_t *out;
	float scale; /* sm_scale * log2(e) */
	uint32_t shift;
	uint32_t nr_requests;
	uint32_t nr_q_heads;
	uint32_t nr_kv_heads;
	uint32_t group;	   /* query heads that share a kv head */
	uint32_t nr_pages; /* of the pool */
	uint32_t off;	   /* safety rules that a test build takes out */
};

/* A request as the schedule has it. */
struct pf_req {
	uint32_t item0; /* first item */
	uint32_t q0;
	uint32_t nr_rows; /* query rows of a kv head: tokens x group */
	uint32_t len;
	int32_t first; /* position of the first query */
	uint32_t src;  /* first row of the page table, or of the arrays */
	uint32_t ok;
};

/*
 * FP8: what a tile's tokens bring. Token 8 j + 2 c + e, column 2 c + e of block j of the
 * scores, is at [c][2 j + e]: a thread's own lie together, and the four rows start in banks
 * of their own.
 */
template <int KEYS> struct pf_scales {
	float k[4][KEYS / 4 + 4];     /* K scale x softmax scale */
	float log_v[4][KEYS / 4 + 4]; /* log2 of the V scale */
	float inv_v[4][KEYS / 4 + 4]; /* 1 / V scale */
};

/* The schedule in shared memory. */
template <class C> struct pf_sched {
	struct pf_req reqs[C::BATCH + 1]; /* longest first; the last one only ends */
	uint32_t order[C::BATCH];	  /* while the schedule is made: keys */
	uint8_t bad[C::BATCH];		  /* ... rows that are no pages */
};

template <class C> struct pf_smem {
	uint8_t q[C::KH][PF_HALF];
	uint8_t k[PF_STAGES][C::KH][PF_HALF];
	uint8_t v[PF_STAGES][C::VH][PF_HALF];
	struct pf_scales<C::KEYS> scales[C::FP8 ? PF_SCALES : 1];
	/* FP8: bytes on their way to the tiles, a ring per warp; scales behind them */
	uint8_t raw[C::FP8 ? 4 : 1][C::FP8 ? PF_RAW : 1]
		   [C::FP8 ? PF_WARP_KEYS * (C::DK + 4) : 16];
	struct pf_sched<C> sched;
	uint64_t raw_full[C::FP8 ? 4 : 1][PF_RAW];
	uint64_t q_full[2];
	uint64_t q_empty[2];
	uint64_t k_full[PF_STAGES];
	uint64_t k_empty[PF_STAGES];
	uint64_t v_full[PF_STAGES];
	uint64_t v_empty[PF_STAGES];
};

/* ---------------------------------------------------------------------------- schedule
 */

/*
 * Work of a CTA: PF_ROWS rows of one request and kv head. Items of a request go from its
 * last rows, which see most, to its first, kv heads inside: neighbours read the same tokens
 * at the same time.
 */
struct pf_item {
	struct pf_req r;
	uint32_t kv_head;
	uint32_t row0; /* first row */
	uint32_t nr;   /* tiles of tokens that the rows need */
};

/* A CTA's walk over its items, to and fro over the sorted list. */
struct pf_walk {
	uint32_t round;
	uint32_t req;
};

/* Tokens that rows up to @row see, rounded up to tiles; at least one. */
template <class C>
KVK_DEV uint32_t pf_tiles(const struct pf_req &r, uint32_t group, uint32_t row)
{
	int32_t sees = r.first + (int32_t)(row / group) + 1;

	return sees <= C::KEYS ? 1 : (uint32_t)(sees + C::KEYS - 1) / C::KEYS;
}

/* The same in every lane, and the compiler knows. */
KVK_DEV uint32_t pf_uniform(uint32_t v)
{
	return __shfl_sync(~0u, v, 0);
}

template <class C>
KVK_DEV bool pf_next(const struct pf_params &p, const struct pf_sched<C> *sm,
		     struct pf_walk *w, struct pf_item *ret)
{
	const uint32_t base = w->round * gridDim.x;
	uint32_t i = base + (w->round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x), r;

	if (i >= pf_uniform(sm->reqs[p.nr_requests].item0))
		return false;
	w->round++;
	while (base >= sm->reqs[w->req + 1].item0)
		w->req++;
	for (r = w->req; i >= sm->reqs[r + 1].item0; r++)
		;
	ret->r = sm->reqs[r];
	i -= ret->r.item0;
	ret->kv_head = i % p.nr_kv_heads;
	ret->row0 = ((sm->reqs[r + 1].item0 - ret->r.item0) / p.nr_kv_heads - 1 -
		     i / p.nr_kv_heads) *
		    C::ROWS;
	ret->nr = pf_uniform(pf_tiles<C>(ret->r, p.group,
					 min(ret->row0 + C::ROWS, ret->r.nr_rows) - 1));
	ret->r.ok = pf_uniform(ret->r.ok);
	return true;
}

KVK_DEV bool pf_request_ok(const struct pf_params &p, uint32_t r)
{
	const uint32_t first = p.row_start[r], end = p.row_start[r + 1];

	return end >= first && kv_verdict_ok(p.verdicts[r], *p.step, end - first) &&
	       p.lengths[r] <= (uint64_t)(end - first) * KV_PAGE_TOKENS;
}

/* A row outside the pool fails its request, as in the reference. All threads. */
template <class C>
KVK_DEV void pf_check_rows(const struct pf_params &p, struct pf_sched<C> *sm)
{
	const uint32_t end = p.row_start[p.nr_requests];

#pragma unroll 4
	for (uint32_t i = p.row_start[0] + threadIdx.x; i < end; i += PF_THREADS) {
		if (p.rows[i].pfn < p.nr_pages || (p.off & PF_NO_ROW_RANGE))
			continue;
		for (uint32_t r = 0; r < p.nr_requests; r++)
			if (i >= p.row_start[r] && i < p.row_start[r + 1])
				sm->bad[r] = 1;
	}
}

/*
 * Every CTA sorts the requests by length, longest first, and numbers the items. All threads;
 * ends with a CTA barrier.
 */
template <class C> KVK_DEV void pf_plan(const struct pf_params &p, struct pf_sched<C> *sm)
{
	const uint32_t n = p.nr_requests, r = threadIdx.x;
	struct pf_req q = {};
	uint32_t rank = 0, items = 0;

	if (r < n) {
		q.q0 = p.q_start[r];
		q.nr_rows = (p.q_start[r + 1] - q.q0) * p.group;
		q.len = p.lengths[r];
		q.first = (int32_t)q.len - (int32_t)(p.q_start[r + 1] - q.q0);
		q.src = C::PAGED ? p.row_start[r] : p.kv_start[r];
		q.ok = pf_request_ok(p, r);
		items = (q.nr_rows + C::ROWS - 1) / C::ROWS * p.nr_kv_heads;
		sm->order[r] = q.len;
		sm->bad[r] = 0;
	}
	__syncthreads();
	if (C::PAGED)
		pf_check_rows<C>(p, sm);
	for (uint32_t i = 0; i < n && r < n; i++)
		rank += sm->order[i] > q.len || (sm->order[i] == q.len && i < r);
	__syncthreads();
	if (r < n)
		sm->order[rank] = items;
	__syncthreads();
	for (uint32_t i = 0; i < rank; i++)
		q.item0 += sm->order[i];
	if (r < n) {
		q.ok = q.ok && !sm->bad[r];
		sm->reqs[rank] = q;
	}
	if (r < n && rank == n - 1)
		sm->reqs[n].item0 = q.item0 + items;
	__syncthreads();
}

#endif /* KVK_ATTN_PREFILL_CUH */
