/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill_mla_fp8.cuh - the producers of the MLA prefill kernel for FP8 pages: four
 * warps read 16 tokens each of a page, convert them to f16 and write the swizzled tile.
 *
 * A tile is K and V in one, so its rows are in units of one scale per token, the latent's;
 * the rope's codes are multiplied with the ratio of the two scales, which rounds them to
 * 2^-12. No ring of raw bytes: shared memory is full, and a page's loads (two waves of
 * about 900 clocks) are shorter than its products.
 */
#ifndef KVK_ATTN_PREFILL_MLA_FP8_CUH
#define KVK_ATTN_PREFILL_MLA_FP8_CUH

#include "kernels/attn_prefill_mla.cuh"

#define PF_MLA_TOKENS 16u		  /* of a warp */
#define PF_MLA_LATENT (PF_MLA_TOKENS / 2) /* rows of latent in a wave of loads */

/* How a token's codes become values in units of one scale. */
struct pf_units {
	float latent;
	float rope;
	float unit;
};

/*
 * Of the scales (latent, rope). A rope too large for f16 beside its latent: both are made
 * smaller, by a power of two. A latent scale of 0: the rope's is the unit.
 */
KVK_DEV struct pf_units pf_mla_units(float2 s)
{
	const float ratio = s.y / s.x;
	struct pf_units u = {1.f, ratio, s.x};

	if (s.x == 0.f) {
		u = {0.f, s.y == 0.f ? 0.f : 1.f, s.y == 0.f ? 1.f : s.y};
	} else if (ratio > 64.f) {
		u.latent = exp2_fast(6.f - ceilf(__log2f(ratio)));
		u.rope = ratio * u.latent;
		u.unit = s.x / u.latent;
	}
	return u;
}

/* A warp's share of a page: lane's pieces of rope (token 8 i + lane / 4) and latent. */
struct pf_mla_page {
	const uint8_t *at; /* the warp's first token's latent; NULL: no token */
	const uint8_t *rope;
	uint32_t nr;	   /* tokens of the warp that are there */
	struct pf_units u; /* of token lane % 16 */
	bool shrinks;	   /* some token's latent factor is not 1 */
};

template <class C>
KVK_DEV void pf_mla_page_at(const struct pf_params &p, struct pf_feed *f, uint32_t tile,
			    uint32_t warp, struct pf_mla_page *ret)
{
	const uint32_t t0 = tile * KV_PAGE_TOKENS + warp * PF_MLA_TOKENS;
	const uint32_t lane = threadIdx.x & 31, t = lane % PF_MLA_TOKENS;
	const uint32_t pfn = tile < f->nr_pages ? pf_pfn(p, f, tile) : 0;
	const uint8_t *page = p.base + (uint64_t)(pfn >> p.shift) * p.extent_bytes +
			      (uint64_t)(pfn & ((1u << p.shift) - 1)) * p.stride_bytes;
	float2 s = make_float2(1.f, 1.f);

	ret->nr = f->it.r.len <= t0 ? 0 : min(f->it.r.len - t0, PF_MLA_TOKENS);
	ret->at = page + warp * PF_MLA_TOKENS * 512;
	ret->rope = page + KV_PAGE_TOKENS * 512 + warp * PF_MLA_TOKENS * 64;
	if (p.static_scales)
		s.x = s.y = p.static_scales[0];
	else if (t < ret->nr)
		s = unpack_f16(
			((const uint32_t *)(page +
					    KV_PAGE_TOKENS *
						    C::DK))[warp * PF_MLA_TOKENS + t]);
	ret->u = pf_mla_units(s);
	ret->shrinks = __any_sync(~0u, ret->u.latent != 1.f);
}

/* A wave of loads: rows @first .. of the latent. */
KVK_DEV void pf_mla_ask(const struct pf_mla_page &pg, uint32_t first, uint4 *v)
{
	const uint32_t lane = threadIdx.x & 31;

#pragma unroll
	for (uint32_t i = 0; i < PF_MLA_LATENT; i++)
		v[i] = first + i < pg.nr
			       ? ((const uint4 *)(pg.at + (first + i) * 512))[lane]
			       : make_uint4(0, 0, 0, 0);
}

KVK_DEV void pf_mla_ask_rope(const struct pf_mla_page &pg, uint4 *v)
{
	const uint32_t lane = threadIdx.x & 31;

#pragma unroll
	for (uint32_t i = 0; i < 2; i++)
		v[i] = 8 * i + lane / 4 < pg.nr ? ((const uint4 *)pg.rope)[i * 32 + lane]
						: make_uint4(0, 0, 0, 0);
}

/* Sixteen codes times @by to two pieces of the tile; @odd: the second one first. */
KVK_DEV void pf_mla_put(uint4 v, bool scaled, float by, uint32_t dst, uint32_t piece,
			uint32_t row, bool odd)
{
	const uint32_t w[4] = {v.x, v.y, v.z, v.w};
	uint32_t h[8];

#pragma unroll
	for (int k = 0; k < 4; k++)
		e4m3x4_f16(w[k], h[2 * k], h[2 * k + 1]);
#pragma unroll
	for (int k = 0; scaled && k < 8; k++) {
		float2 x = unpack_f16(h[k]);

		h[k] = pack_f16(x.x * by, x.y * by);
	}
	dst += row * 128;
	pf_sts(dst + ((piece + odd) ^ row % 8) * 16,
	       odd ? make_uint4(h[4], h[5], h[6], h[7])
		   : make_uint4(h[0], h[1], h[2], h[3]));
	pf_sts(dst + ((piece + !odd) ^ row % 8) * 16,
	       odd ? make_uint4(h[0], h[1], h[2], h[3])
		   : make_uint4(h[4], h[5], h[6], h[7]));
}

template <bool SHRINK>
KVK_DEV void pf_mla_put_rows(const struct pf_mla_page &pg, uint32_t first, const uint4 *v,
			     uint32_t warp, uint32_t tile)
{
	const uint32_t lane = threadIdx.x & 31;
	const uint32_t dst = tile + lane / 4 * PF_BOX, piece = lane % 4 * 2;

#pragma unroll
	for (uint32_t i = 0; i < PF_MLA_LATENT; i++) {
		const float by =
			SHRINK ? __shfl_sync(~0u, pg.u.latent, (int)(first + i)) : 1.f;

		pf_mla_put(v[i], SHRINK, by, dst, piece, warp * PF_MLA_TOKENS + first + i,
			   lane / 4 & 1);
	}
}

KVK_DEV void pf_mla_put_latent(const struct pf_mla_page &pg, uint32_t first,
			       const uint4 *v, uint32_t warp, uint32_t tile)
{
	if (pg.shrinks)
		pf_mla_put_rows<true>(pg, first, v, warp, tile);
	else
		pf_mla_put_rows<false>(pg, first, v, warp, tile);
}

KVK_DEV void pf_mla_put_rope(const struct pf_mla_page &pg, const uint4 *v, uint32_t warp,
			     uint32_t tile)
{
	const uint32_t lane = threadIdx.x & 31;

#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		const uint32_t t = 8 * i + lane / 4;

		pf_mla_put(v[i], true, __shfl_sync(~0u, pg.u.rope, (int)t),
			   tile + 8 * PF_BOX, lane % 4 * 2, warp * PF_MLA_TOKENS + t,
			   false);
	}
}

/* One tile's share of a warp. The first wave of loads goes out before the stage is free. */
template <class C>
KVK_DEV void pf_mla_make(const struct pf_params &p, struct pf_feed *f, uint32_t tile,
			 uint32_t warp, struct pf_mla_smem<C> *sm)
{
	const uint32_t s = f->kn % PF_STAGES, lane = threadIdx.x & 31;
	const uint32_t to = smem_addr(sm->kv[s][0]);
	uint4 v[PF_MLA_LATENT], r[2];
	struct pf_mla_page pg;

	pf_mla_page_at<C>(p, f, tile, warp, &pg);
	pf_mla_ask_rope(pg, r);
	pf_mla_ask(pg, 0, v);
	mbar_wait(&sm->empty[s], (f->kn++ / PF_STAGES & 1) ^ 1);
	pf_mla_put_rope(pg, r, warp, to);
	pf_mla_put_latent(pg, 0, v, warp, to);
	pf_mla_ask(pg, PF_MLA_LATENT, v);
	if (lane < PF_MLA_TOKENS)
		pf_put_scales(make_float2(pg.u.unit, pg.u.unit), p.scale,
			      warp * PF_MLA_TOKENS + lane, &sm->scales[s]);
	pf_mla_put_latent(pg, PF_MLA_LATENT, v, warp, to);
	fence_proxy_async();
	__syncwarp();
	if (lane == 0)
		mbar_arrive(&sm->full[s]);
}

/* All tiles of all items; warp 0..3. Queries go behind the first tile of an item. */
template <class C>
KVK_DEV void pf_mla_feed_fp8(const struct pf_params &p, uint32_t warp,
			     struct pf_mla_smem<C> *sm)
{
	struct pf_walk w = {};
	struct pf_feed f = {};
	uint32_t nr_q = 0;

	while (pf_next<C>(p, &sm->sched, &w, &f.it)) {
		if (!f.it.r.ok)
			continue;
		pf_feed_start<C>(p, &f);
		for (uint32_t j = 0; j < f.it.nr; j++) {
			pf_mla_make<C>(p, &f, j, warp, sm);
			if (j)
				continue;
			mbar_wait(&sm->q_empty, (nr_q++ & 1) ^ 1);
			pf_load_q<C>(p, f.it, warp * 16, 16, &sm->q_full,
				     smem_addr(sm->q[0]));
		}
	}
}

#endif /* KVK_ATTN_PREFILL_MLA_FP8_CUH */
