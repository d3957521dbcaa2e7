/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_tile_feed.cuh - the warps that fill the tiles of the wide MLA decode kernel from
 * pages; attn_mla_tile.cu explains it. Each of the four takes 16 tokens of every page and
 * walks the CTA's segments by itself; the first one also tells the consumers.
 *
 * FP8: pages are fetched into the L2 by one instruction each, three ahead, and loaded from
 * there, 16 bytes a lane and step, up to ten steps (of 18 in a page) in registers. BF16:
 * bytes go to their place unchanged, by asynchronous copies of 16.
 */
#ifndef KVK_ATTN_MLA_TILE_FEED_CUH
#define KVK_ATTN_MLA_TILE_FEED_CUH

#include "kernels/attn_mla_tile.cuh"

/* Where a warp is in the CTA's run of pages. */
struct tile_walk {
	const struct kv_row *rows; /* of the segment */
	uint64_t off[2]; /* of page pg / 32 * 32 + lane, of the page 32 behind */
	uint32_t seg;	 /* next one */
	uint32_t pg;
	uint32_t nr_pages;
	uint32_t left; /* tokens from page pg to the request's end */
};

KVK_DEV uint64_t walk_off(const struct attn_params &p, const struct tile_walk &w,
			  uint32_t i)
{
	return i < w.nr_pages ? page_offset(p, w.rows[i].pfn) : 0;
}

/* Page @i to the L2. @bytes: a multiple of 16 */
KVK_DEV void walk_fetch(const struct attn_params &p, const struct tile_walk &w,
			uint32_t i, uint32_t bytes)
{
	const bool far = i / 32 != w.pg / 32;
	const uint64_t off = __shfl_sync(~0u, far ? w.off[1] : w.off[0], i % 32);

	if (i < w.nr_pages && (threadIdx.x & 31) == 0)
		SM90_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p.base + off),
			 "r"(bytes)
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
KVK_DEV const uint8_t *tile_next(const struct attn_params &p, const struct plan_cta &cta,
				 uint64_t step, bool lead, bool wait, struct tile_walk &w,
				 uint32_t *ret_valid, struct tile_smem *sm)
{
	const uint32_t lane = threadIdx.x & 31;
	const uint8_t *at;

	while (w.pg == w.nr_pages) {
		const struct plan_seg *s;
		enum plan_state state;

		if (w.seg == cta.count)
			return NULL;
		if (lead && !wait && w.seg >= TILE_SEGS &&
		    lds_acquire(&sm->segs_done) < 8 * (w.seg - TILE_SEGS + 1))
			return NULL;
		s = w.seg ? &p.mem.segs[cta.base + w.seg] : &cta.first;
		state = plan_check(p, *s, step);
		w.rows = p.rows + s->row0 + s->page0;
		w.left = s->len - s->page0 * TOKENS;
		w.pg = 0;
		w.nr_pages = state == PLAN_OK ? s->nr_pages : 0;
		if (lead)
			tile_publish(*s, w.seg, state, sm);
		w.seg++;
	}
	if (w.pg == 0) {
		w.off[0] = walk_off(p, w, lane);
		w.off[1] = walk_off(p, w, lane + 32);
	} else if (w.pg % 32 == 0) {
		w.off[0] = w.off[1];
		w.off[1] = walk_off(p, w, w.pg + 32 + lane);
	}
	if (lead && p.flight) {
		const uint32_t bytes = p.page_bytes;

		if (w.pg == 0)
			for (uint32_t i = 1; i < p.flight; i++)
				walk_fetch(p, w, i, bytes);
		walk_fetch(p, w, w.pg + p.flight, bytes);
	}
	at = p.base + __shfl_sync(~0u, w.off[0], w.pg % 32);
	*ret_valid = min(w.left, (uint32_t)TOKENS);
	w.left -= TOKENS;
	w.pg++;
	return at;
}

/* --------------------------------------------------------------------------------- FP8
 */

/* A warp's loads for a page: 2 of rope, 8 + 8 of latent, in four batches of at most: */
#define FEED_BATCH 5

KVK_DEV uint4 feed_load(const uint8_t *at, uint64_t policy)
{
	uint4 v;

	asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 "
		     "{%0,%1,%2,%3}, [%4], %5;"
		     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
		     : "l"(at), "l"(policy)
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
 * Where a lane's bytes are in the page and go in the tile. Rope: a step is 8 tokens of 4 chunks
 * a warp; latent: 2 tokens of 16. Eight neighbouring lanes then store to eight different
 * bank groups. Everything else is constant offsets, and for the swizzle constant bits
 * exclusive-ored: 32 times the step (mod 4), 16 for the second eight values.
 */
struct feed_lane {
	uint32_t src[2]; /* rope, latent */
	uint32_t dst[2];
};

KVK_DEV struct feed_lane feed_lane_init(void)
{
	using C = tile_cfg<true, 1>;
	const uint32_t lane = threadIdx.x & 31, w = threadIdx.x / 32 - C::NR_USE;
	const uint32_t sub = lane >> 2 & 1, q = lane & 3;
	struct feed_lane f;

	f.src[0] = C::ROPE_OFF + 16 * w * C::RR + lane * 16;
	f.src[1] = (16 * w + sub) * C::RB + (lane >> 3) * 64 + q * 16;
	f.dst[0] =
		8 * TILE_BLOCK + (16 * w + lane / 4) * 128 + ((2 * q) ^ (lane / 4)) * 16;
	f.dst[1] = (lane >> 3) * TILE_BLOCK + (16 * w + sub) * 128 + ((2 * q) ^ sub) * 16;
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
	float shrink[2];  /* of both, a power of two: a rope too large for f16 */
	uint32_t shrinks; /* some token's is not 1 */
};

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
		float2 v = unpack_f16(h ? pg.sc.y : pg.sc.x);
		bool in = 2 * lane + h < pg.valid;
		float ratio;

		f.rope[h] = f.shrink[h] = 1.f;
		sl[h] = p.scales ? p.scales[0] : 1.f;
		if (!p.token_scales)
			continue;
		ratio = in ? __fdividef(v.y, v.x) : 0.f;
		sl[h] = in ? v.x : 0.f;
		if (ratio > 64.f) {
			f.shrink[h] =
				exp2_fast(fmaxf(6.f - ceilf(__log2f(ratio)), -15.f));
			sl[h] = __fdividef(sl[h], f.shrink[h]);
			f.shrinks = 1;
		}
		f.rope[h] = ratio * f.shrink[h];
		big = fmaxf(big, sl[h]);
	}
	f.shrinks = __any_sync(~0u, f.shrinks);
	if (p.token_scales) {
		big = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(big)));
		if (big > 0.f)
			unit = fmaxf(unit, ceilf(__log2f(big)));
	}
	if (lead) {
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
	const int k0 = (i - 2) & 7; /* latent: two tokens of eight pairs */
	const uint32_t off = i < 2 ? i * 1024 : (i - 2) / 8 * 4 * TILE_BLOCK + k0 * 256;
	const uint32_t at = i < 2 ? to[0] : to[1] ^ (k0 & 3) * 32;
	const uint32_t w4[4] = {v.x, v.y, v.z, v.w};
	uint32_t h[8];

#pragma unroll
	for (int k = 0; k < 4; k++)
		e4m3x4_f16(w4[k], h[2 * k], h[2 * k + 1]);
	if (i < 2) {
		const uint32_t lane = threadIdx.x & 31,
			       w = threadIdx.x / 32 - tile_cfg<true, 1>::NR_USE;
		const uint32_t t = 16 * w + 8 * i + lane / 4;
		const float a = __shfl_sync(~0u, f.rope[0], t / 2);
		const float b = __shfl_sync(~0u, f.rope[1], t / 2);

#pragma unroll
		for (int k = 0; k < 8; k++) {
			float2 x = unpack_f16(h[k]);

			h[k] = pack_f16(x.x * (t & 1 ? b : a), x.y * (t & 1 ? b : a));
		}
	}
	sts128(at + off, h);
	sts128((at ^ 16) + off, h + 4);
}

/* Steps @from .. @end - 1; v[0] is step @first. */
KVK_DEV void feed_stores(const uint32_t *to, int from, int end, int first, const uint4 *v,
			 const struct feed_factors &f, uint32_t flags)
{
	if (flags & KVK_ATTN_LOADS)
		return;
#pragma unroll
	for (int i = from; i < end; i++)
		feed_store(to, i, v[i - first], f);
}

/* Bytes of tokens behind the end to zero: 0 x NaN is NaN. Steps @first .. @end - 1. */
KVK_DEV void feed_tail(int first, int end, uint32_t valid, uint4 *v)
{
	const uint32_t lane = threadIdx.x & 31,
		       w = threadIdx.x / 32 - tile_cfg<true, 1>::NR_USE;

	if (valid == TOKENS)
		return;
#pragma unroll
	for (int i = first; i < end; i++) {
		const uint32_t t = i < 2 ? 16 * w + 8 * i + lane / 4
					 : 16 * w + 2 * ((i - 2) & 7) + (lane >> 2 & 1);

		if (t >= valid)
			v[i - first] = make_uint4(0, 0, 0, 0);
	}
}

/* A rope too large for f16 beside its latent: both are made smaller, this is the latent. */
KVK_DEV void feed_shrink(uint8_t *half, const struct feed_factors &f)
{
	const uint32_t lane = threadIdx.x & 31,
		       w = threadIdx.x / 32 - tile_cfg<true, 1>::NR_USE;

	if (!f.shrinks)
		return;
	__syncwarp();
#pragma unroll 1
	for (uint32_t t = 16 * w; t < 16 * w + 16; t++) {
		const float a = __shfl_sync(~0u, f.shrink[0], t / 2);
		const float b = __shfl_sync(~0u, f.shrink[1], t / 2);
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

/* Start on steps @first .. @end - 1 of the page @at (or none). */
KVK_DEV void feed_loads(const uint8_t *at, const struct feed_lane &ln, int first, int end,
			uint4 *v, uint64_t policy)
{
	using C = tile_cfg<true, 1>;
	const uint8_t *lat = at + ln.src[1];

	if (!at)
		return;
#pragma unroll
	for (int i = first; i < end; i++) {
		if (i < 2)
			v[i - first] = feed_load(at + ln.src[0] + i * 8 * C::RR, policy);
		else
			v[i - first] = feed_load(lat + ((i - 2) & 7) * 2 * C::RB +
							 (i - 2) / 8 * 256,
						 policy);
	}
}

KVK_DEV void feed_page_scales(const struct attn_params &p, struct feed_page &pg)
{
	pg.sc = make_uint2(0, 0);
	if (pg.at && p.token_scales)
		pg.sc = *(const uint2 *)(pg.at + tile_cfg<true, 1>::SCALE_OFF +
					 (threadIdx.x & 31) * 8);
}

/*
 * A page to its tile. @a holds the first batch; @next: whose first batch to leave there. The
 * compiler has one counter for all loads on their way, so the first use of a batch comes
 * before the loads of the next one: then it waits for that batch alone.
 */
KVK_DEV void feed_page_fp8(const struct attn_params &p, const struct feed_page &now,
			   const uint8_t *next, const struct feed_lane &ln, uint32_t seq,
			   float &unit, uint4 *a, uint4 *b, bool lead, uint64_t policy,
			   struct tile_smem *sm)
{
	const uint32_t buf = seq & 1, phase = (seq >> 1 & 1) ^ 1;
	uint32_t to[2] = {smem_addr(sm->tile[buf]) + ln.dst[0],
			  smem_addr(sm->tile[buf]) + ln.dst[1]};
	struct feed_factors f;

	/* or the compiler keeps the addresses of all steps in registers that it has not */
	asm volatile("" : "+r"(to[0]), "+r"(to[1]));
	mbar_wait(&sm->empty[buf][PART_ROPE], phase);
	feed_scales(p, now, buf, lead, unit, f, sm);
	feed_tail(0, 5, now.valid, a);
	feed_stores(to, 0, 2, 0, a, f, p.flags);
	feed_full(&sm->full[buf][PART_ROPE]);
	feed_loads(now.at, ln, 5, 10, b, policy);
	mbar_wait(&sm->empty[buf][PART_LEFT], phase);
	feed_stores(to, 2, 5, 0, a, f, p.flags);
	feed_tail(5, 10, now.valid, b);
	feed_stores(to, 5, 6, 5, b, f, p.flags);
	feed_loads(now.at, ln, 10, 14, a, policy);
	feed_stores(to, 6, 10, 5, b, f, p.flags);
	feed_shrink(sm->tile[buf][0], f);
	feed_full(&sm->full[buf][PART_LEFT]);
	mbar_wait(&sm->empty[buf][PART_RIGHT], phase);
	feed_tail(10, 14, now.valid, a);
	feed_stores(to, 10, 11, 10, a, f, p.flags);
	feed_loads(now.at, ln, 14, 18, b, policy);
	feed_stores(to, 11, 14, 10, a, f, p.flags);
	feed_tail(14, 18, now.valid, b);
	feed_stores(to, 14, 15, 14, b, f, p.flags);
	feed_loads(next, ln, 0, 5, a, policy);
	feed_stores(to, 15, 18, 14, b, f, p.flags);
	feed_shrink(sm->tile[buf][4], f);
	feed_full(&sm->full[buf][PART_RIGHT]);
}

KVK_DEV void feed_fp8(const struct attn_params &p, const struct plan_cta &cta,
		      uint64_t step, struct tile_smem *sm)
{
	const bool lead = threadIdx.x / 32 == tile_cfg<true, 1>::NR_USE;
	const struct feed_lane ln = feed_lane_init();
	const uint64_t policy = policy_evict_first();
	struct tile_walk walk = {};
	struct feed_page now = {}, next;
	uint4 a[FEED_BATCH], b[FEED_BATCH];
	uint32_t seg = 0, seq = 0;
	float unit = 0.f;

	grid_wait();
	for (;;) { /* one page ahead, if the consumers do not need this one first */
		if (seg !=
		    walk.seg) { /* a new segment's values are in units of their own */
			seg = walk.seg;
			unit = -126.f;
		}
		next.at = tile_next(p, cta, step, lead, !now.at, walk, &next.valid, sm);
		feed_page_scales(p, next);
		if (now.at)
			feed_page_fp8(p, now, next.at, ln, seq++, unit, a, b, lead,
				      policy, sm);
		else if (next.at)
			feed_loads(next.at, ln, 0, 5, a, policy);
		else
			return;
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

KVK_DEV void feed_bf16(const struct attn_params &p, const struct plan_cta &cta,
		       uint64_t step, struct tile_smem *sm)
{
	using C = tile_cfg<false, 1>;
	const uint32_t lane = threadIdx.x & 31, w = threadIdx.x / 32 - C::NR_USE;
	const uint64_t policy = policy_evict_first();
	struct tile_walk walk = {};
	const uint8_t *at;
	uint32_t valid;

	at = tile_next(p, cta, step, w == 0, true, walk, &valid, sm);
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
		at = tile_next(p, cta, step, w == 0, true, walk, &valid, sm);
	}
	asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif /* KVK_ATTN_MLA_TILE_FEED_CUH */
