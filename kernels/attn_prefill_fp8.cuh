/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill_fp8.cuh - the prefill kernel's producers for FP8 pages: each of four warps
 * bulk copies its share of the bytes to a ring of its own, converts it to f16 (exact) and
 * writes the swizzled tiles. Scales of tokens go to a small ring; consumers apply them to
 * scores and exponents, so no value is rounded before the products. Products in f16, not
 * bf16: half the instructions to convert, and P is rounded to 2^-12.
 *
 * A part is K or V of a tile; a warp makes 32 tokens of it. The copies run PF_RAW parts
 * ahead. They are copies and not loads into registers because the fence that publishes a
 * part to wgmma would wait for such loads.
 *
 * Shared memory for a tile: 64 KB of bytes in and out, 64 KB of tile written, where BF16
 * pages take 64 KB: 2,300 clocks with the products' reads, so it is the wall here.
 */
#ifndef KVK_ATTN_PREFILL_FP8_CUH
#define KVK_ATTN_PREFILL_FP8_CUH

#include "kernels/attn_prefill_feed.cuh"

/* Which part; the item has nr tiles. */
struct pf_part {
	uint32_t tile;
	bool is_v;
	bool valid;
};

/* Parts in the order in which the consumers take them: K0 K1 V0 K2 V1 ... */
KVK_DEV struct pf_part pf_part_next(struct pf_part x, uint32_t nr)
{
	struct pf_part r = {x.tile, true, true};

	if (!x.is_v && x.tile > 0)
		r.tile = x.tile - 1;
	else if (!x.is_v && nr > 1)
		r = {1, false, true};
	else if (x.is_v && x.tile + 2 < nr)
		r = {x.tile + 2, false, true};
	else if (x.is_v)
		r = {x.tile + 1, true, x.tile + 1 < nr};
	return r;
}

/* What a warp keeps: its place in the raw ring and in the item. */
struct pf_conv {
	struct pf_feed f;
	uint32_t warp;
	uint32_t issued; /* parts, of all items */
	uint32_t done;
	float2 unit; /* static scales (K, V) */
};

/* Tokens of the warp's 32 that are there. */
KVK_DEV uint32_t pf_tokens(const struct pf_conv &v, uint32_t tile)
{
	const uint32_t t0 = tile * PF_KEYS + v.warp * PF_WARP_KEYS;

	return t0 >= v.f.it.r.len ? 0 : min(v.f.it.r.len - t0, PF_WARP_KEYS);
}

/* Ask for a part's bytes: 32 tokens, whole even if not all are there. All lanes. */
template <class C>
KVK_DEV void pf_ask(const struct pf_params &p, struct pf_conv &v, struct pf_part x,
		    struct pf_smem<C> *sm)
{
	const uint32_t t0 = x.tile * PF_KEYS + v.warp * PF_WARP_KEYS;
	const uint32_t slot = t0 % KV_PAGE_TOKENS, kvh = v.f.it.kv_head;
	const uint32_t n = v.issued++ % PF_RAW, bytes = PF_WARP_KEYS * C::DK;
	const bool scales = !x.is_v && !p.static_scales;
	uint64_t *bar = &sm->raw_full[v.warp][n];
	uint8_t *dst = sm->raw[v.warp][n];
	const uint8_t *page, *sc;
	uint32_t pfn;

	if (!pf_tokens(v, x.tile)) {
		if ((threadIdx.x & 31) == 0)
			mbar_arrive(bar);
		return;
	}
	pfn = pf_pfn(p, &v.f, t0 / KV_PAGE_TOKENS);
	if (threadIdx.x & 31)
		return;
	page = p.base + (uint64_t)(pfn >> p.shift) * p.extent_bytes +
	       (uint64_t)(pfn & ((1u << p.shift) - 1)) * p.stride_bytes;
	mbar_arrive_expect(bar, bytes + (scales ? PF_WARP_KEYS * 4 : 0));
	pf_bulk(dst, page + ((kvh * 2 + x.is_v) * KV_PAGE_TOKENS + slot) * C::DK, bytes,
		bar);
	if (!scales)
		return;
	sc = page + p.nr_kv_heads * 2 * KV_PAGE_TOKENS * C::DK +
	     (kvh * 2 * KV_PAGE_TOKENS + slot) * 2;
	pf_bulk(dst + bytes, sc, PF_WARP_KEYS * 2, bar);
	pf_bulk(dst + bytes + PF_WARP_KEYS * 2, sc + KV_PAGE_TOKENS * 2, PF_WARP_KEYS * 2,
		bar);
}

/*
 * What a lane does of a part: pieces of 16 values, of tokens STEP apart. off[i % 2]: where
 * the two halves of piece i go in the tile, less i * STEP rows. Lanes 4..7 of a token write
 * their second half first: eight lanes, all banks.
 */
template <class C> struct pf_lane {
	static constexpr uint32_t ROW = C::DK / 16; /* pieces of a token */
	static constexpr uint32_t STEP = 32 / ROW;
	uint32_t off[2][2];
	uint32_t row; /* first token of the warp's 32 */
	bool odd;
};

template <class C> KVK_DEV struct pf_lane<C> pf_lane_make(uint32_t warp) {
	using L = struct pf_lane<C>;
	const uint32_t lane = threadIdx.x & 31, c = lane % L::ROW;
	L r;

	r.row = lane / L::ROW;
	r.odd = c / 4;
#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		uint32_t row = warp * PF_WARP_KEYS + r.row + i * L::STEP;

		r.off[i][0] = pf_swizzle<C>(row, 2 * c + r.odd) - i * L::STEP * 128;
		r.off[i][1] = pf_swizzle<C>(row, 2 * c + 1 - r.odd) - i * L::STEP * 128;
	}
	return r;
}

/* 32 tokens from the raw ring to a tile; zeros where no token is. */
template <class C>
KVK_DEV void pf_convert(const struct pf_lane<C> &l, uint32_t raw, uint32_t tile,
			uint32_t nr)
{
#pragma unroll
	for (uint32_t i = 0; i < C::DK / 16; i++) {
		const uint32_t at = tile + i * l.STEP * 128;
		uint4 v = lds128(raw + ((threadIdx.x & 31) + i * 32) * 16);
		uint2 a, b, c, d;

		if (l.row + i * l.STEP >= nr)
			v = make_uint4(0, 0, 0, 0);
		a = pf_e4m3_f16(v.x);
		b = pf_e4m3_f16(v.y);
		c = pf_e4m3_f16(v.z);
		d = pf_e4m3_f16(v.w);
		pf_sts(at + l.off[i % 2][0], l.odd ? make_uint4(c.x, c.y, d.x, d.y)
						   : make_uint4(a.x, a.y, b.x, b.y));
		pf_sts(at + l.off[i % 2][1], l.odd ? make_uint4(a.x, a.y, b.x, b.y)
						   : make_uint4(c.x, c.y, d.x, d.y));
	}
}

/* Scales (K, V) of the lane's token. */
template <class C>
KVK_DEV float2 pf_token_scales(const struct pf_params &p, const struct pf_conv &v,
			       const uint8_t *raw, uint32_t nr)
{
	const uint16_t *s = (const uint16_t *)(raw + PF_WARP_KEYS * C::DK);
	const uint32_t lane = threadIdx.x & 31;

	if (lane >= nr)
		return make_float2(0.f, 0.f);
	if (p.static_scales)
		return v.unit;
	return unpack_f16(s[lane] | (uint32_t)s[lane + PF_WARP_KEYS] << 16);
}

/* Make a part from its bytes. */
template <class C>
KVK_DEV void pf_make(const struct pf_params &p, struct pf_conv &v, struct pf_part x,
		     const struct pf_lane<C> &l, struct pf_smem<C> *sm)
{
	const uint32_t n = x.is_v ? v.f.vn++ : v.f.kn++, s = n % PF_STAGES;
	const uint32_t r = v.done % PF_RAW, nr = pf_tokens(v, x.tile);
	const uint32_t tile = smem_addr(x.is_v ? sm->v[s][0] : sm->k[s][0]);
	const uint8_t *raw = sm->raw[v.warp][r];

	mbar_wait(&sm->raw_full[v.warp][r], v.done++ / PF_RAW & 1);
	mbar_wait(x.is_v ? &sm->v_empty[s] : &sm->k_empty[s], (n / PF_STAGES & 1) ^ 1);
	pf_convert<C>(l, smem_addr(raw), tile, nr);
	if (!x.is_v)
		pf_put_scales(pf_token_scales<C>(p, v, raw, nr), p.scale,
			      v.warp * PF_WARP_KEYS + (threadIdx.x & 31),
			      &sm->scales[n % PF_SCALES]);
	fence_proxy_async();
	__syncwarp();
	if ((threadIdx.x & 31) == 0)
		mbar_arrive(x.is_v ? &sm->v_full[s] : &sm->k_full[s]);
}

/* All parts of all items; warp 0..3. Queries go behind the first K of an item. */
template <class C>
KVK_DEV void pf_feed_fp8(const struct pf_params &p, uint32_t warp, struct pf_smem<C> *sm)
{
	const struct pf_lane<C> l = pf_lane_make<C>(warp);
	struct pf_walk w = {};
	struct pf_conv v = {};
	uint32_t nr_q = 0;

	v.warp = warp;
	while (pf_next<C>(p, &sm->sched, &w, &v.f.it)) {
		struct pf_part x = {0, false, true}, ask = x;

		if (!v.f.it.r.ok)
			continue;
		pf_feed_start<C>(p, &v.f);
		if (p.static_scales)
			v.unit = make_float2(p.static_scales[v.f.it.kv_head * 2],
					     p.static_scales[v.f.it.kv_head * 2 + 1]);
		for (int i = 0; i < PF_RAW && ask.valid; i++) {
			pf_ask<C>(p, v, ask, sm);
			ask = pf_part_next(ask, v.f.it.nr);
		}
		for (; x.valid; x = pf_part_next(x, v.f.it.nr)) {
			pf_make<C>(p, v, x, l, sm);
			if (ask.valid) {
				pf_ask<C>(p, v, ask, sm);
				ask = pf_part_next(ask, v.f.it.nr);
			}
			if (x.is_v || x.tile)
				continue;
			mbar_wait(&sm->q_empty[warp / 2], (nr_q++ & 1) ^ 1);
			pf_load_q<C>(p, v.f.it, warp * 32, 32, &sm->q_full[warp / 2],
				     smem_addr(sm->q[0]));
		}
	}
}

#endif /* KVK_ATTN_PREFILL_FP8_CUH */
