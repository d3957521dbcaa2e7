/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill_fp8.cuh - the prefill kernel's producers for FP8 pages: four warps read the
 * bytes, convert them to bf16 (exact) and write the swizzled tiles. Scales of tokens go to
 * a small ring of their own; consumers apply them to scores and probabilities, so no value
 * is rounded before the products.
 *
 * A part is K or V of a tile; a warp makes 32 tokens of it. The next part's bytes are
 * asked for piece by piece while this one's are converted. The fence that publishes a
 * part to wgmma is a MEMBAR in machine code and should wait for those loads too: their
 * latency would not be hidden. About 6,000 clocks a tile; BF16 pages take 2,640.
 */
#ifndef KVK_ATTN_PREFILL_FP8_CUH
#define KVK_ATTN_PREFILL_FP8_CUH

#include "kernels/attn_prefill_feed.cuh"

#define PF_WARP_KEYS 32u /* tokens of a tile that one warp makes */

/* Which part; nr parts of a kind: the item's tiles. */
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

/* Where a warp's tokens of a part are. */
struct pf_src {
	const uint8_t *bytes; /* of the first token */
	const uint16_t *k_scale;
	const uint16_t *v_scale;
	uint32_t nr; /* tokens that are there: 0..32 */
};

template <class C>
KVK_DEV struct pf_src pf_locate(const struct pf_params &p, struct pf_feed *f,
				struct pf_part x, uint32_t warp)
{
	const uint32_t t0 = x.tile * PF_KEYS + warp * PF_WARP_KEYS;
	const uint32_t slot = t0 % KV_PAGE_TOKENS, kvh = f->it.kv_head;
	struct pf_src r = {};
	const uint8_t *page;
	uint32_t pfn;

	if (!x.valid || t0 >= f->it.r.len)
		return r;
	pfn = pf_pfn(p, f, t0 / KV_PAGE_TOKENS);
	page = p.base + (uint64_t)(pfn >> p.shift) * p.extent_bytes +
	       (uint64_t)(pfn & ((1u << p.shift) - 1)) * p.stride_bytes;
	r.bytes = page + ((kvh * 2 + x.is_v) * KV_PAGE_TOKENS + slot) * C::DK;
	r.k_scale =
		(const uint16_t *)(page + p.nr_kv_heads * 2 * KV_PAGE_TOKENS * C::DK) +
		kvh * 2 * KV_PAGE_TOKENS + slot;
	r.v_scale = r.k_scale + KV_PAGE_TOKENS;
	r.nr = min(f->it.r.len - t0, PF_WARP_KEYS);
	return r;
}

/*
 * What a lane does of a part: PIECES pieces of 16 values, of tokens STEP apart. off[i % 2]:
 * where the two halves of piece i go in the tile, less i * STEP rows.
 */
template <class C> struct pf_lane {
	static constexpr uint32_t ROW = C::DK / 16; /* pieces of a token */
	static constexpr uint32_t STEP = 32 / ROW;
	static constexpr int PIECES = C::DK / 16;
	uint32_t off[2][2];
	uint32_t row; /* first token of the warp's 32 */
	bool odd;
};

/* Lanes 4..7 of a row write their second half first: eight lanes, all banks. */
template <class C> KVK_DEV struct pf_lane<C> pf_lane_make(uint32_t warp) {
	using L = struct pf_lane<C>;
	const uint32_t lane = threadIdx.x & 31, c = lane % L::ROW;
	L r;

	r.row = lane / L::ROW;
	r.odd = c / 4;
#pragma unroll
	for (uint32_t i = 0; i < 2; i++) {
		uint32_t row = warp * PF_WARP_KEYS + r.row + i * L::STEP;

		r.off[i][0] = pf_swizzle(row, 2 * c + r.odd) - i * L::STEP * 128;
		r.off[i][1] = pf_swizzle(row, 2 * c + 1 - r.odd) - i * L::STEP * 128;
	}
	return r;
}

/* Piece @i: 16 values; zeros where no token is. */
template <class C>
KVK_DEV uint4 pf_piece(const struct pf_lane<C> &l, const struct pf_src &s, uint32_t i)
{
	if (l.row + i * l.STEP >= s.nr)
		return make_uint4(0, 0, 0, 0);
	return __ldg((const uint4 *)s.bytes + (threadIdx.x & 31) + i * 32);
}

KVK_DEV uint2 pf_e4m3_bf16(uint32_t v)
{
	uint32_t lo, hi;
	float2 a, b;

	e4m3x4_f16(v, lo, hi);
	a = unpack_f16(lo);
	b = unpack_f16(hi);
	return make_uint2(pack_bf16(a.x, a.y), pack_bf16(b.x, b.y));
}

KVK_DEV void pf_sts(uint32_t dst, uint2 a, uint2 b)
{
	asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(dst), "r"(a.x),
		     "r"(a.y), "r"(b.x), "r"(b.y)
		     : "memory");
}

/* Piece @i to the tile. */
template <class C>
KVK_DEV void pf_convert(const struct pf_lane<C> &l, uint4 v, uint32_t i, uint32_t tile)
{
	const uint32_t at = tile + i * l.STEP * 128;
	const uint2 a = pf_e4m3_bf16(v.x), b = pf_e4m3_bf16(v.y);
	const uint2 c = pf_e4m3_bf16(v.z), d = pf_e4m3_bf16(v.w);

	pf_sts(at + l.off[i % 2][0], l.odd ? c : a, l.odd ? d : b);
	pf_sts(at + l.off[i % 2][1], l.odd ? a : c, l.odd ? b : d);
}

/* The lane's token's scales as f32 (K, V). */
KVK_DEV float2 pf_scales(const struct pf_params &p, const struct pf_src &s, uint32_t kvh)
{
	const uint32_t lane = threadIdx.x & 31;

	if (lane >= s.nr)
		return make_float2(0.f, 0.f);
	if (p.static_scales)
		return make_float2(p.static_scales[kvh * 2],
				   p.static_scales[kvh * 2 + 1]);
	return unpack_f16(__ldg(s.k_scale + lane) | (uint32_t)__ldg(s.v_scale + lane)
							    << 16);
}

/* Make a part from @r, its bytes, and fetch the bytes of the next one. */
template <class C>
KVK_DEV void pf_make(const struct pf_params &p, struct pf_feed *f, struct pf_part x,
		     const struct pf_src &next, const struct pf_lane<C> &l, uint32_t warp,
		     uint4 *r, float2 sc, struct pf_smem<C> *sm)
{
	const uint32_t n = x.is_v ? f->vn++ : f->kn++, s = n % PF_STAGES;
	const uint32_t tile = smem_addr(x.is_v ? sm->v[s][0] : sm->k[s][0]);
	const uint32_t at = warp * PF_WARP_KEYS + (threadIdx.x & 31);

	mbar_wait(x.is_v ? &sm->v_empty[s] : &sm->k_empty[s], (n / PF_STAGES & 1) ^ 1);
#pragma unroll
	for (int i = 0; i < l.PIECES; i++) {
		pf_convert<C>(l, r[i], i, tile);
		r[i] = pf_piece<C>(l, next, i);
	}
	if (!x.is_v)
		sm->scales[n % PF_SCALES][at] = sc;
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
	struct pf_feed f = {};
	uint32_t nr_q = 0;

	while (pf_next<C>(p, sm, &w, &f.it)) {
		struct pf_part x = {0, false, true}, nx;
		struct pf_src src;
		uint4 r[l.PIECES];
		float2 sc;

		if (!f.it.r.ok)
			continue;
		pf_feed_start<C>(p, &f);
		src = pf_locate<C>(p, &f, x, warp);
#pragma unroll
		for (int i = 0; i < l.PIECES; i++)
			r[i] = pf_piece<C>(l, src, i);
		sc = pf_scales(p, src, f.it.kv_head);
		for (; x.valid; x = nx) {
			float2 nsc = sc;

			nx = pf_part_next(x, f.it.nr);
			src = pf_locate<C>(p, &f, nx, warp);
			if (!nx.is_v)
				nsc = pf_scales(p, src, f.it.kv_head);
			pf_make<C>(p, &f, x, src, l, warp, r, sc, sm);
			sc = nsc;
			if (x.is_v || x.tile)
				continue;
			mbar_wait(&sm->q_empty[warp / 2], (nr_q++ & 1) ^ 1);
			pf_load_q<C>(p, f.it, warp * 32, 32, &sm->q_full[warp / 2], sm);
		}
	}
}

#endif /* KVK_ATTN_PREFILL_FP8_CUH */
