/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_tile_feed.cuh - the warps that fill the tiles of the wide MLA decode kernel from
 * pages; attn_mla_tile.cu explains it. Each takes the same tokens of every page and walks the
 * CTA's segments by itself; the first one also tells the consumers.
 *
 * FP8: pages are fetched into the L2 by one instruction each, some pages ahead. Eight warps load
 * them from there, 16 bytes a lane and step; nine steps, a warp's part of a page, are on
 * their way in registers while the tile is still in use. BF16: bytes go to their place
 * unchanged, by asynchronous copies of 16 of four warps.
 */
#ifndef KVK_ATTN_MLA_TILE_FEED_CUH
#define KVK_ATTN_MLA_TILE_FEED_CUH

#include "kernels/attn_mla_tile.cuh"

/* Where a warp is in the CTA's run of pages. */
struct tile_walk {
	uint32_t row;	 /* of the segment's first page */
	uint32_t pfn[2]; /* of page pg / 32 * 32 + lane, of the page 32 behind */
	uint32_t seg;	 /* next one */
	uint32_t pg;
	uint32_t nr_pages;
	uint32_t left; /* tokens from page pg to the request's end */
};

KVK_DEV uint32_t walk_pfn(const struct attn_params &p, const struct tile_walk &w,
			  uint32_t i)
{
	return i < w.nr_pages ? p.rows[w.row + i].pfn : 0;
}

/* Page @i to the L2. */
KVK_DEV void walk_fetch(const struct attn_params &p, const struct tile_walk &w,
			uint32_t i)
{
	const bool far = i / 32 != w.pg / 32;
	const uint32_t pfn = __shfl_sync(~0u, far ? w.pfn[1] : w.pfn[0], i % 32);

	if (i < w.nr_pages && (threadIdx.x & 31) == 0)
		SM90_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
				 p.base + page_offset(p, pfn)),
			 "r"(p.page_bytes)
			 : "memory");
}

/* Tell the consumers about segment @i. */
KVK_DEV void tile_publish(const struct plan_seg &s, uint32_t i, enum plan_state state,
			  struct tile_smem *sm)
{
	struct mla_seg g = {};

	g.s = s;
	g.ok = state != PLAN_FAILED;
	g.poisoned = state == PLAN_POISONED;
	g.nr_pieces = state == PLAN_OK ? s.nr_pages : 0;
	if (i >= TILE_SEGS)
		spin_until(&sm->segs_done, 8 * (i - TILE_SEGS + 1) - 1);
	if ((threadIdx.x & 31) == 0) {
		sm->segs[i % TILE_SEGS] = g;
		sts_release(&sm->segs_in, i + 1);
	}
}

/*
 * The next page, or NULL; *ret_valid: its tokens. @lead: publishes segments. Without @wait also
 * NULL while the consumers have not taken earlier segments: they may need this warp first.
 */
KVK_DEV const uint8_t *tile_next(const struct attn_params &p, bool lead, bool wait,
				 struct tile_walk &w, uint32_t *ret_valid,
				 struct tile_smem *sm)
{
	const struct plan_cta &cta = p.mem.ctas[blockIdx.x];
	const uint32_t lane = threadIdx.x & 31;
	uint32_t pfn;

	while (w.pg == w.nr_pages) {
		const struct plan_seg *s;
		enum plan_state state;

		if (w.seg == cta.count)
			return NULL;
		if (lead && !wait && w.seg >= TILE_SEGS &&
		    lds_acquire(&sm->segs_done) < 8 * (w.seg - TILE_SEGS + 1))
			return NULL;
		s = w.seg ? &p.mem.segs[cta.base + w.seg] : &cta.first;
		state = plan_check(p, *s, *p.step);
		w.row = s->row0 + s->page0;
		w.left = s->len - s->page0 * TOKENS;
		w.pg = 0;
		w.nr_pages = state == PLAN_OK ? s->nr_pages : 0;
		if (lead)
			tile_publish(*s, w.seg, state, sm);
		w.seg++;
	}
	if (w.pg == 0) {
		w.pfn[0] = walk_pfn(p, w, lane);
		w.pfn[1] = walk_pfn(p, w, lane + 32);
	} else if (w.pg % 32 == 0) {
		w.pfn[0] = w.pfn[1];
		w.pfn[1] = walk_pfn(p, w, w.pg + 32 + lane);
	}
	if (lead && p.flight) {
		if (w.pg == 0)
			for (uint32_t i = 1; i < p.flight; i++)
				walk_fetch(p, w, i);
		walk_fetch(p, w, w.pg + p.flight);
	}
	pfn = __shfl_sync(~0u, w.pfn[0], w.pg % 32);
	*ret_valid = min(w.left, (uint32_t)TOKENS);
	w.left -= TOKENS;
	w.pg++;
	return p.base + page_offset(p, pfn);
}

/* --------------------------------------------------------------------------------- FP8
 */

#define FEED_STEPS 9 /* a warp's loads for a page: one of rope, 4 + 4 of latent */

KVK_DEV uint4 feed_load(const uint8_t *at)
{
	uint4 v;

	asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
		     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
		     : "l"(at)
		     : "memory");
	return v;
}

/* What a lane needs to know of a page, beside its bytes. */
struct feed_page {
	const uint8_t *at; /* NULL: none */
	uint32_t valid;
	uint2 sc; /* latent, rope scales of tokens 2 lane, 2 lane + 1 */
};

/*
 * Where a lane's bytes are in the page and go in the tile, rope and latent. A warp has 8 tokens;
 * a step is the rope of all of them (4 chunks each) or 16 chunks of the latent of 2. Eight
 * neighbouring lanes then store to eight different bank groups. Everything else is constant
 * offsets, and for the swizzle constant bits exclusive-ored: 32 times the pair, 16 for the
 * second eight values.
 */
struct feed_lane {
	uint32_t src[2];
	uint32_t dst[2];
};

KVK_DEV uint32_t feed_token(void)
{
	return 8 * (threadIdx.x / 32 - tile_cfg<true, 1>::NR_USE);
}

/* Anew for each page: cheaper than the registers. */
KVK_DEV uint32_t feed_lane_id(void)
{
	uint32_t r;

	asm volatile("mov.u32 %0, %%laneid;" : "=r"(r));
	return r;
}

KVK_DEV struct feed_lane feed_lane_init(void)
{
	using C = tile_cfg<true, 1>;
	const uint32_t lane = feed_lane_id(), t0 = feed_token();
	const uint32_t sub = lane >> 2 & 1, q = lane & 3;
	struct feed_lane f;

	f.src[0] = C::ROPE_OFF + t0 * C::RR + lane * 16;
	f.src[1] = (t0 + sub) * C::RB + (lane >> 3) * 64 + q * 16;
	f.dst[0] = 8 * TILE_BLOCK + (t0 + lane / 4) * 128 + ((2 * q) ^ (lane / 4)) * 16;
	f.dst[1] = (lane >> 3) * TILE_BLOCK + (t0 + sub) * 128 + ((2 * q) ^ sub) * 16;
	return f;
}

KVK_DEV void sts128(uint32_t at, const uint32_t *v)
{
	asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v[0]),
		     "r"(v[1]), "r"(v[2]), "r"(v[3])
		     : "memory");
}

/* Factors of a page: what a lane keeps of its two tokens for the conversion. */
struct feed_factors {
	float rope[2];	  /* of the rope bytes, in units of the latent ones */
	uint32_t shrinks; /* some rope is too large for f16 */
};

/* A rope @ratio times as large as f16 can hold beside its latent: both times a power of two */
KVK_DEV float feed_smaller(float ratio)
{
	return ratio > 64.f ? exp2_fast(fmaxf(6.f - ceilf(__log2f(ratio)), -15.f)) : 1.f;
}

KVK_DEV float feed_ratio(const struct feed_page &pg, int h)
{
	const float2 v = unpack_f16(h ? pg.sc.y : pg.sc.x);

	return 2 * (threadIdx.x & 31) + h < pg.valid ? __fdividef(v.y, v.x) : 0.f;
}

/*
 * Scales of the page to factors, and by the first warp to the consumers. @unit: log2 of the
 * largest latent scale so far, rounded up.
 */
KVK_DEV void feed_scales(const struct attn_params &p, const struct feed_page &pg,
			 uint32_t buf, bool lead, float &unit, struct feed_factors &f,
			 struct tile_smem *sm)
{
	const uint32_t lane = threadIdx.x & 31;
	float sl[2], big = 0.f;

	f.shrinks = 0;
#pragma unroll
	for (int h = 0; h < 2; h++) {
		float ratio, smaller;

		f.rope[h] = 1.f;
		sl[h] = p.scales ? p.scales[0] : 1.f;
		if (!p.token_scales)
			continue;
		ratio = feed_ratio(pg, h);
		smaller = feed_smaller(ratio);
		sl[h] = unpack_f16(h ? pg.sc.y : pg.sc.x).x;
		sl[h] = 2 * lane + h < pg.valid ? __fdividef(sl[h], smaller) : 0.f;
		f.shrinks |= smaller != 1.f;
		f.rope[h] = ratio * smaller;
		big = fmaxf(big, sl[h]);
	}
	f.shrinks = __any_sync(~0u, f.shrinks);
	if (p.token_scales) {
		big = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(big)));
		if (big > 0.f)
			unit = fmaxf(unit, ceilf(__log2f(big)));
	}
	if (lead && p.flight) {
		const float u = p.token_scales ? exp2_fast(-unit) : 0.f;

		*(float2 *)&sm->ks[buf][2 * lane] =
			make_float2(sl[0] * p.scale, sl[1] * p.scale);
		*(float2 *)&sm->vs[buf][2 * lane] =
			p.token_scales ? make_float2(sl[0] * u, sl[1] * u)
				       : make_float2(1.f, 1.f);
		if (lane == 0)
			sm->unit[buf] = p.token_scales ? unit : 0.f;
	}
}

/* Sixteen bytes of step @i to two chunks of the tile. */
KVK_DEV void feed_store(const uint32_t *to, int i, uint4 v, const struct feed_factors &f)
{
	const int k = (i - 1) & 3; /* pair */
	const uint32_t off = i < 1 ? 0 : (i - 1) / 4 * 4 * TILE_BLOCK + k * 256;
	const uint32_t at = i < 1 ? to[0] : to[1] ^ k * 32;
	const uint32_t w[4] = {v.x, v.y, v.z, v.w};
	uint32_t h[8];

#pragma unroll
	for (int j = 0; j < 4; j++)
		e4m3x4_f16(w[j], h[2 * j], h[2 * j + 1]);
	if (i < 1) {
		const uint32_t t = feed_token() + (threadIdx.x & 31) / 4;
		const float x = __shfl_sync(~0u, f.rope[0], t / 2);
		const float y = __shfl_sync(~0u, f.rope[1], t / 2);

#pragma unroll
		for (int j = 0; j < 8; j++) {
			float2 r = unpack_f16(h[j]);

			h[j] = pack_f16(r.x * (t & 1 ? y : x), r.y * (t & 1 ? y : x));
		}
	}
	sts128(at + off, h);
	sts128((at ^ 16) + off, h + 4);
}

/* Bytes of tokens behind the end to zero: 0 x NaN is NaN. */
KVK_DEV void feed_tail(uint32_t valid, uint4 *v)
{
	const uint32_t lane = threadIdx.x & 31, t0 = feed_token();

	if (valid == TOKENS)
		return;
#pragma unroll
	for (int i = 0; i < FEED_STEPS; i++) {
		const uint32_t t =
			t0 + (i < 1 ? lane / 4 : 2 * ((i - 1) & 3) + (lane >> 2 & 1));

		if (t >= valid)
			v[i] = make_uint4(0, 0, 0, 0);
	}
}

/* A rope too large for f16 beside its latent: both are made smaller, this is the latent. */
KVK_DEV void feed_shrink(uint8_t *half, const struct feed_page &pg)
{
	const uint32_t lane = threadIdx.x & 31, t0 = feed_token();
	const float mine[2] = {feed_smaller(feed_ratio(pg, 0)),
			       feed_smaller(feed_ratio(pg, 1))};

	__syncwarp();
#pragma unroll 1
	for (uint32_t t = t0; t < t0 + 8; t++) {
		const float a = __shfl_sync(~0u, mine[0], t / 2);
		const float b = __shfl_sync(~0u, mine[1], t / 2);
		uint32_t *at = (uint32_t *)(half + lane / 8 * TILE_BLOCK + t * 128) +
			       lane % 8 * 4;

		for (int k = 0; k < 4; k++) {
			float2 x = unpack_f16(at[k]);

			at[k] = pack_f16(x.x * (t & 1 ? b : a), x.y * (t & 1 ? b : a));
		}
	}
}

/* The tile's part is complete. */
KVK_DEV void feed_full(uint64_t *full)
{
	fence_proxy_async();
	__syncwarp();
	if ((threadIdx.x & 31) == 0)
		mbar_arrive(full);
}

/* Start on step @i of the page @at. */
KVK_DEV uint4 feed_step(const uint8_t *at, const struct feed_lane &ln, int i)
{
	using C = tile_cfg<true, 1>;

	if (i < 1)
		return feed_load(at + ln.src[0]);
	return feed_load(at + ln.src[1] + ((i - 1) & 3) * 2 * C::RB + (i - 1) / 4 * 256);
}

KVK_DEV void feed_page_scales(const struct attn_params &p, struct feed_page &pg)
{
	pg.sc = make_uint2(0, 0);
	if (pg.at && p.token_scales)
		pg.sc = *(const uint2 *)(pg.at + tile_cfg<true, 1>::SCALE_OFF +
					 (threadIdx.x & 31) * 8);
}

/*
 * A page to its tile. @v holds this warp's part of it; the place of each step is filled with
 * the @next page's (NULL: nothing) at once.
 */
KVK_DEV void feed_page_fp8(const struct attn_params &p, const struct feed_page &now,
			   const uint8_t *next, uint32_t seq, float &unit, uint4 *v,
			   bool lead, struct tile_smem *sm)
{
	const struct feed_lane ln = feed_lane_init();
	const uint32_t buf = seq & 1, phase = (seq >> 1 & 1) ^ 1;
	uint32_t to[2] = {smem_addr(sm->tile[buf]) + ln.dst[0],
			  smem_addr(sm->tile[buf]) + ln.dst[1]};
	struct feed_factors f;

	/* or the compiler keeps the addresses of all steps in registers that it has not */
	asm volatile("" : "+r"(to[0]), "+r"(to[1]));
	mbar_wait(&sm->empty[buf][PART_ROPE], phase);
	feed_scales(p, now, buf, lead, unit, f, sm);
	feed_tail(now.valid, v);
#pragma unroll
	for (int i = 0; i < FEED_STEPS; i++) {
		const int part = i < 1 ? PART_ROPE : i < 5 ? PART_LEFT : PART_RIGHT;

		if (i == 1 || i == 5)
			mbar_wait(&sm->empty[buf][part], phase);
		if (!(p.flags & KVK_ATTN_LOADS))
			feed_store(to, i, v[i], f);
		if (next)
			v[i] = feed_step(next, ln, i);
		if ((i == 4 || i == 8) && f.shrinks)
			feed_shrink(sm->tile[buf][part == PART_LEFT ? 0 : 4], now);
		if (i == 0 || i == 4 || i == 8)
			feed_full(&sm->full[buf][part]);
	}
}

KVK_DEV void feed_fp8(const struct attn_params &p, struct tile_smem *sm)
{
	const bool lead = threadIdx.x / 32 == tile_cfg<true, 1>::NR_USE;
	struct tile_walk walk = {};
	struct feed_page now = {}, next;
	uint4 v[FEED_STEPS];
	uint32_t seg = 0, seq = 0;
	float unit = 0.f;

	grid_wait();
	for (;;) { /* one page ahead, if the consumers do not need this one first */
		if (seg !=
		    walk.seg) { /* a new segment's values are in units of their own */
			seg = walk.seg;
			unit = -126.f;
		}
		next.at = tile_next(p, lead, !now.at, walk, &next.valid, sm);
		feed_page_scales(p, next);
		if (now.at) {
			feed_page_fp8(p, now, next.at, seq++, unit, v, lead, sm);
		} else if (next.at) {
			const struct feed_lane ln = feed_lane_init();

#pragma unroll
			for (int i = 0; i < FEED_STEPS; i++)
				v[i] = feed_step(next.at, ln, i);
		} else {
			return;
		}
		now = next;
	}
}

/* -------------------------------------------------------------------------------- BF16
 */

/* 16 bytes from @src, or zeros. */
KVK_DEV void feed_copy(uint32_t dst, const uint8_t *src, bool in, uint64_t policy)
{
	asm volatile(
		"cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
			dst),
		"l"(src), "r"(in ? 16 : 0), "l"(policy)
		: "memory");
}

/* This thread's copies so far count as one arrival when they have landed. */
KVK_DEV void feed_copied(uint64_t *bar)
{
	asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
			     smem_addr(bar))
		     : "memory");
}

KVK_DEV void feed_bf16(const struct attn_params &p, struct tile_smem *sm)
{
	using C = tile_cfg<false, 1>;
	const uint32_t lane = threadIdx.x & 31, w = threadIdx.x / 32 - C::NR_USE;
	const uint64_t policy = policy_evict_first();
	struct tile_walk walk = {};
	const uint8_t *at;
	uint32_t valid;

	at = tile_next(p, w == 0, true, walk, &valid, sm);
	grid_wait();
	for (uint32_t seq = 0; at; seq++) {
		const uint32_t buf = seq & 1, phase = (seq >> 1 & 1) ^ 1;
		const uint32_t tile = smem_addr(sm->tile[buf]);

		mbar_wait(&sm->empty[buf][PART_ROPE], phase);
#pragma unroll
		for (int i = 0; i < 4; i++) { /* 4 tokens of 8 chunks */
			const uint32_t t = 16 * w + 4 * i + lane / 8;

			feed_copy(tile + 8 * TILE_BLOCK + t * 128 + ((lane ^ t) & 7) * 16,
				  at + C::ROPE_OFF + t * C::RR + (lane & 7) * 16,
				  t < valid, policy);
		}
		feed_copied(&sm->full[buf][PART_ROPE]);
#pragma unroll
		for (int half = 0; half < 2; half++) {
			mbar_wait(&sm->empty[buf][PART_LEFT + half], phase);
#pragma unroll 4
			for (int i = 0; i < 16; i++) { /* half a token's latent */
				const uint32_t t = 16 * w + i;

				feed_copy(tile + (4 * half + lane / 8) * TILE_BLOCK +
						  t * 128 + ((lane ^ t) & 7) * 16,
					  at + t * C::RB + half * 512 + lane * 16,
					  t < valid, policy);
			}
			feed_copied(&sm->full[buf][PART_LEFT + half]);
		}
		at = tile_next(p, w == 0, true, walk, &valid, sm);
	}
	asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif /* KVK_ATTN_MLA_TILE_FEED_CUH */
