/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill_feed.cuh - the prefill kernel's producers: one warp keeps the rings of K and
 * V tiles full, one warp per consumer warpgroup fetches its queries.
 */
#ifndef KVK_ATTN_PREFILL_FEED_CUH
#define KVK_ATTN_PREFILL_FEED_CUH

#include "kernels/attn_prefill.cuh"

/* Byte offset of 16-byte piece @c of row @row, swizzled. */
template <class C> KVK_DEV uint32_t pf_swizzle(uint32_t row, uint32_t c)
{
	return c / 8 * C::HALF + row * 128 + ((c ^ row) % 8) * 16;
}

/* ------------------------------------------------------------------------------ queries
 */

KVK_DEV void pf_copy16(uint32_t dst, const void *src, uint32_t bytes)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
		     "r"(bytes)
		     : "memory");
}

/* Where a row's query starts, in 16-byte pieces from the request's; ~0: no such row. */
template <class C>
KVK_DEV uint32_t pf_q_at(const struct pf_params &p, const struct pf_item &it,
			 uint32_t row)
{
	if (row >= it.r.nr_rows)
		return ~0u;
	return (row / p.group * p.nr_q_heads + it.kv_head * p.group + row % p.group) *
	       (C::DK / 8);
}

KVK_DEV void pf_sts(uint32_t dst, uint4 v)
{
	asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(dst), "r"(v.x),
		     "r"(v.y), "r"(v.z), "r"(v.w)
		     : "memory");
}

KVK_DEV uint2 pf_e4m3_f16(uint32_t v)
{
	uint2 r;

	e4m3x4_f16(v, r.x, r.y);
	return r;
}

/*
 * Token @t's scales (K, V) for the consumers. A V scale of 0 becomes one that no sum will
 * see: its values vanish and its probability still counts.
 */
template <int KEYS>
KVK_DEV void pf_put_scales(float2 s, float scale, uint32_t t, struct pf_scales<KEYS> *sc)
{
	const uint32_t row = t / 2 % 4, at = t / 8 * 2 + t % 2;
	const float v = s.y == 0.f ? 0x1p-54f : s.y;

	sc->k[row][at] = s.x * scale;
	sc->log_v[row][at] = __log2f(v);
	sc->inv_v[row][at] = 1.f / v;
}

/* Eight bf16 to f16. */
KVK_DEV uint4 pf_f16_piece(uint4 v)
{
	const float2 a = unpack_bf16(v.x), b = unpack_bf16(v.y), c = unpack_bf16(v.z),
		     d = unpack_bf16(v.w);

	return make_uint4(pack_f16(a.x, a.y), pack_f16(b.x, b.y), pack_f16(c.x, c.y),
			  pack_f16(d.x, d.y));
}

/* Where piece @i of a warp's query rows comes from; ~0: nowhere. */
template <class C> KVK_DEV uint32_t pf_q_from(uint32_t i, uint32_t at0, uint32_t at1)
{
	const uint32_t row = i / (C::DK / 8);
	const uint32_t a = __shfl_sync(~0u, at0, row % 32);
	const uint32_t b = __shfl_sync(~0u, at1, row % 32);
	const uint32_t at = row < 32 ? a : b;

	return at == ~0u ? at : at + i % (C::DK / 8);
}

/* ... and goes. */
template <class C> KVK_DEV uint32_t pf_q_to(uint32_t i, uint32_t row0)
{
	return pf_swizzle<C>(row0 + i / (C::DK / 8), i % (C::DK / 8));
}

/*
 * @nr (16, 32 or 64) rows of the item from row @row0 on; rows behind the last one become zero.
 * One warp, which then arrives at @full. FP8: as f16, which holds what bf16 does between
 * 2^-14 and 65,504.
 */
template <class C>
KVK_DEV void pf_load_q(const struct pf_params &p, const struct pf_item &it, uint32_t row0,
		       uint32_t nr, uint64_t *full, uint32_t q)
{
	constexpr uint32_t PIECES = C::DK / 8;
	constexpr uint32_t STEP = !C::FP8 ? 8 : PIECES % 9 ? 4 : 6; /* loads at once */
	const uint32_t lane = threadIdx.x & 31;
	const uint32_t at0 = pf_q_at<C>(p, it, it.row0 + row0 + lane);
	const uint32_t at1 = pf_q_at<C>(p, it, it.row0 + row0 + 32 + lane);
	const uint4 *src = (const uint4 *)(p.q + (size_t)it.r.q0 * p.nr_q_heads * C::DK);

#pragma unroll 1
	for (uint32_t k = lane; k < nr * PIECES; k += STEP * 32) {
		uint4 v[STEP];

#pragma unroll
		for (uint32_t i = 0; i < STEP; i++) {
			const uint32_t at = pf_q_from<C>(k + i * 32, at0, at1);

			v[i] = make_uint4(0, 0, 0, 0);
			if (!C::FP8)
				pf_copy16(q + pf_q_to<C>(k + i * 32, row0),
					  src + (at == ~0u ? 0 : at), at == ~0u ? 0 : 16);
			else if (at != ~0u)
				v[i] = src[at];
		}
#pragma unroll
		for (uint32_t i = 0; C::FP8 && i < STEP; i++)
			pf_sts(q + pf_q_to<C>(k + i * 32, row0), pf_f16_piece(v[i]));
	}
	if (!C::FP8)
		asm volatile("cp.async.wait_all;" ::: "memory");
	fence_proxy_async();
	__syncwarp();
	if (lane == 0)
		mbar_arrive(full);
}

template <class C>
KVK_DEV void pf_feed_q(const struct pf_params &p, uint32_t wg, struct pf_smem<C> *sm)
{
	struct pf_walk w = {};
	struct pf_item it;
	uint32_t n = 0;

	while (pf_next<C>(p, &sm->sched, &w, &it)) {
		if (!it.r.ok)
			continue;
		mbar_wait(&sm->q_empty[wg], (n++ & 1) ^ 1);
		pf_load_q<C>(p, it, wg * PF_WG_ROWS, PF_WG_ROWS, &sm->q_full[wg],
			     smem_addr(sm->q[0]));
	}
}

/* --------------------------------------------------------------------------- K and V
 */

/* The kv warp's view of an item: pfn holds page numbers, a lane each, from page pfn0 on. */
struct pf_feed {
	struct pf_item it;
	uint32_t nr_pages; /* that hold tokens of the request */
	uint32_t kn;	   /* tiles issued so far */
	uint32_t vn;
	uint32_t pfn;
	uint32_t pfn0;
};

/* A new item: how many pages, and the first page numbers. All lanes. */
template <class C>
KVK_DEV void pf_feed_start(const struct pf_params &p, struct pf_feed *f)
{
	const uint32_t lane = threadIdx.x & 31;

	f->nr_pages = (f->it.r.len + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	f->pfn0 = 0;
	f->pfn = C::PAGED && lane < f->nr_pages ? p.rows[f->it.r.src + lane].pfn : 0;
}

/* Page number of page @page, in all lanes. Pages are asked for in ascending order. */
KVK_DEV uint32_t pf_pfn(const struct pf_params &p, struct pf_feed *f, uint32_t page)
{
	/* V runs a tile behind K: keep the last one */
	if (page >= f->pfn0 + 32) {
		uint32_t at = (page & ~1u) - 2 + (threadIdx.x & 31);

		f->pfn0 = (page & ~1u) - 2;
		f->pfn = at < f->nr_pages ? p.rows[f->it.r.src + at].pfn : 0;
	}
	return __shfl_sync(~0u, f->pfn, (int)(page - f->pfn0));
}

/* Plain bytes; multiples of 16. */
KVK_DEV void pf_bulk(void *dst, const void *src, uint32_t bytes, uint64_t *bar)
{
	tma_bulk_load(smem_addr(dst), src, bytes, smem_addr(bar));
}

/* One box of 64 tokens. */
KVK_DEV void pf_box(const CUtensorMap *map, void *dst, uint64_t *bar, int c0, int c1,
		    int c2, int c3)
{
	tma_load_4d(smem_addr(dst), map, smem_addr(bar), c0, c1, c2, c3);
}

template <class C>
KVK_DEV void pf_load_k(const struct pf_params &p, struct pf_feed *f, uint32_t tile,
		       struct pf_smem<C> *sm)
{
	const uint32_t s = f->kn % PF_STAGES, page0 = tile * 2;
	const uint32_t nr = f->nr_pages <= page0 ? 0 : min(f->nr_pages - page0, 2u);
	const uint32_t kvh = f->it.kv_head;
	uint64_t *bar = &sm->k_full[s];

	mbar_wait(&sm->k_empty[s], (f->kn++ / PF_STAGES & 1) ^ 1);
	if ((threadIdx.x & 31) == 0)
		mbar_arrive_expect(bar, nr * C::KH * PF_BOX);
	for (uint32_t i = 0; i < nr; i++) {
		uint32_t pfn = C::PAGED ? pf_pfn(p, f, page0 + i) : 0;
		int tok = (int)(f->it.r.src + (page0 + i) * KV_PAGE_TOKENS);

		if (threadIdx.x & 31)
			continue;
#pragma unroll
		for (int h = 0; h < C::KH; h++) {
			uint8_t *dst = sm->k[s][h] + i * PF_BOX;

			if (C::PAGED)
				pf_box(&p.k, dst, bar, h * 64, (int)kvh * 128,
				       (int)(pfn & ((1u << p.shift) - 1)),
				       (int)(pfn >> p.shift));
			else if (h < C::KH - 1)
				pf_box(&p.k, dst, bar,
				       (int)kvh * (C::DK - 64 + C::DV) + h * 64, tok, 0,
				       0);
			else
				pf_box(&p.rope, dst, bar, 0, tok, 0, 0);
		}
	}
}

/* Token @t's V of the item's head in global memory. */
template <class C>
KVK_DEV const uint4 *pf_v_row(const struct pf_params &p, const struct pf_feed *f,
			      uint32_t pfn, uint32_t t)
{
	if (C::PAGED)
		return (const uint4 *)(p.base +
				       (uint64_t)(pfn >> p.shift) * p.extent_bytes +
				       (uint64_t)(pfn & ((1u << p.shift) - 1)) *
					       p.stride_bytes +
				       ((f->it.kv_head * 2 + 1) * KV_PAGE_TOKENS +
					t % KV_PAGE_TOKENS) *
					       C::DV * 2);
	return (const uint4 *)(p.base +
			       (((uint64_t)f->it.r.src + t) * p.nr_kv_heads +
				f->it.kv_head) *
				       (C::DK - 64 + C::DV) * 2 +
			       (C::DK - 64) * 2);
}

/*
 * V of a page that is not full: zeros where no token is, since 0 * NaN is NaN. All lanes.
 */
template <class C>
KVK_DEV void pf_fill_v(const struct pf_params &p, const struct pf_feed *f, uint32_t page,
		       uint32_t pfn, uint32_t dst)
{
	constexpr uint32_t PIECES = C::DV / 8;
	const uint32_t row0 = page % 2 * KV_PAGE_TOKENS, t0 = page * KV_PAGE_TOKENS;

#pragma unroll 4
	for (uint32_t i = threadIdx.x & 31; i < KV_PAGE_TOKENS * PIECES; i += 32) {
		uint32_t row = i / PIECES, c = i % PIECES;
		uint4 v = make_uint4(0, 0, 0, 0);

		if (t0 + row < f->it.r.len)
			v = pf_v_row<C>(p, f, pfn, t0 + row)[c];
		pf_sts(dst + pf_swizzle<C>(row0 + row, c), v);
	}
	fence_proxy_async();
	__syncwarp();
}

template <class C>
KVK_DEV void pf_load_v(const struct pf_params &p, struct pf_feed *f, uint32_t tile,
		       struct pf_smem<C> *sm)
{
	const uint32_t s = f->vn % PF_STAGES, page0 = tile * 2;
	const uint32_t nr_full = f->it.r.len / KV_PAGE_TOKENS;
	const uint32_t nr = nr_full <= page0 ? 0 : min(nr_full - page0, 2u);
	const uint32_t kvh = f->it.kv_head;
	uint64_t *bar = &sm->v_full[s];

	mbar_wait(&sm->v_empty[s], (f->vn++ / PF_STAGES & 1) ^ 1);
	for (uint32_t i = nr; i < 2; i++) {
		bool some = C::PAGED && page0 + i < f->nr_pages;
		uint32_t pfn = some ? pf_pfn(p, f, page0 + i) : 0;

		pf_fill_v<C>(p, f, page0 + i, pfn, smem_addr(sm->v[s]));
	}
	if ((threadIdx.x & 31) == 0)
		mbar_arrive_expect(bar, nr * C::VH * PF_BOX);
	for (uint32_t i = 0; i < nr; i++) {
		uint32_t pfn = C::PAGED ? pf_pfn(p, f, page0 + i) : 0;
		int tok = (int)(f->it.r.src + (page0 + i) * KV_PAGE_TOKENS);

		if (threadIdx.x & 31)
			continue;
#pragma unroll
		for (int h = 0; h < C::VH; h++) {
			uint8_t *dst = sm->v[s][h] + i * PF_BOX;

			if (C::PAGED)
				pf_box(&p.k, dst, bar, h * 64, (int)kvh * 128 + 64,
				       (int)(pfn & ((1u << p.shift) - 1)),
				       (int)(pfn >> p.shift));
			else
				pf_box(&p.k, dst, bar,
				       (int)kvh * (C::DK - 64 + C::DV) + C::DK - 64 +
					       h * 64,
				       tok, 0, 0);
		}
	}
}

/* All tiles in the order in which the consumers take them: K a tile ahead of V. */
template <class C>
KVK_DEV void pf_feed_kv(const struct pf_params &p, struct pf_smem<C> *sm)
{
	struct pf_walk w = {};
	struct pf_feed f = {};

	while (pf_next<C>(p, &sm->sched, &w, &f.it)) {
		if (!f.it.r.ok)
			continue;
		pf_feed_start<C>(p, &f);
		pf_load_k<C>(p, &f, 0, sm);
		for (uint32_t j = 1; j < f.it.nr; j++) {
			pf_load_k<C>(p, &f, j, sm);
			pf_load_v<C>(p, &f, j - 1, sm);
		}
		pf_load_v<C>(p, &f, f.it.nr - 1, sm);
	}
}

#endif /* KVK_ATTN_PREFILL_FEED_CUH */
