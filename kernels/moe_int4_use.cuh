/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_use.cuh - the consumer warps of moe_int4.cuh: products, results, and the
 * kernel.
 *
 * Named barriers: 1 group 0 alone, 2 group 1's sums are in shared memory, 3 they were
 * read, 4 group 1 alone.
 */
#ifndef KVK_MOE_INT4_USE_CUH
#define KVK_MOE_INT4_USE_CUH

#include "moe_int4_feed.cuh"

/* ------------------------------------------------------------------------------ products
 */

/* A nibble n = q + 8 becomes a 16-bit float by and-or alone: 128 + n in bf16 (x), 1024 +
 * n or 1024 + 16 n in f16 (h; columns 2, 3, 6, 7 of eight, whose h is stored as h / 16).
 * What is too much is the same for every row of W, so it is cheaper taken off once for
 * all rows: by a product of the tokens with constants (few tokens), or from each weight
 * (many). */
template <enum moe_mode MODE, bool EXACT>
__device__ __forceinline__ void dequant(uint32_t w, uint32_t (&p)[4])
{
#pragma unroll
	for (int j = 0; j < 4; j++) {
		if constexpr (MODE == MOE_X) {
			p[j] = ptx_and_or(w >> (4 * j), 0x000f000fu, 0x43004300u);
			if (EXACT)
				p[j] = ptx_fma_bf16x2(p[j], 0x3f803f80u,
						      0xc308c308u); /* - 136 */
		} else {
			p[j] = ptx_and_or(w >> (j / 2 * 8),
					  j % 2 ? 0x00f000f0u : 0x000f000fu, 0x64006400u);
			if (EXACT) /* - 1032, - 1152 */
				p[j] = ptx_fma_f16x2(p[j], 0x3c003c00u,
						     j % 2 ? 0xe480e480u : 0xe408e408u);
		}
	}
}

template <enum moe_mode MODE>
__device__ __forceinline__ void tile_mma(float (&d)[4], const uint32_t (&a)[4],
					 uint32_t b0, uint32_t b1, const float (&c)[4])
{
	if constexpr (MODE == MOE_X)
		ptx_mma_bf16(d, a, b0, b1, c);
	else
		ptx_mma_f16(d, a, b0, b1, c);
}

/* The B operand of 32 columns for one token: eight neighbours of its row. */
template <enum moe_mode MODE>
__device__ __forceinline__ uint4 load_tokens(uint32_t row, uint32_t kb, uint32_t t,
					     float inv, bool there)
{
	if (!there) /* zeros cost the least power */
		return make_uint4(0, 0, 0, 0);
	if constexpr (MODE != MOE_H32) {
		return ptx_lds128(row + kb * 64u + t * 16u);
	} else {
		uint4 lo = ptx_lds128(row + kb * 128u + t * 32u);
		uint4 hi = ptx_lds128(row + kb * 128u + t * 32u + 16u);
		float high = inv * MOE_H_HIGH;
		uint4 b;

		b.x = ptx_f16x2(__uint_as_float(lo.x) * inv, __uint_as_float(lo.y) * inv);
		b.y = ptx_f16x2(__uint_as_float(lo.z) * high,
				__uint_as_float(lo.w) * high);
		b.z = ptx_f16x2(__uint_as_float(hi.x) * inv, __uint_as_float(hi.y) * inv);
		b.w = ptx_f16x2(__uint_as_float(hi.z) * high,
				__uint_as_float(hi.w) * high);
		return b;
	}
}

template <int G>
__device__ __forceinline__ void load_scales(uint32_t addr, uint32_t g, uint32_t is_f16,
					    float (&s)[128 / G][4])
{
	uint32_t v[128 / G * 2];

	if constexpr (G == 128) {
		uint2 a = ptx_lds64(addr + g * 8u);
		v[0] = a.x;
		v[1] = a.y;
	} else {
#pragma unroll
		for (int i = 0; i < 128 / G * 2; i += 4) {
			uint4 a = ptx_lds128(addr + g * (1024u / G) + i * 4u);
			v[i] = a.x;
			v[i + 1] = a.y;
			v[i + 2] = a.z;
			v[i + 3] = a.w;
		}
	}
	if (is_f16) {
#pragma unroll
		for (int i = 0; i < 128 / G * 2; i++) {
			s[i / 2][i % 2 * 2] = ptx_f16_f32(v[i] & 0xffffu);
			s[i / 2][i % 2 * 2 + 1] = ptx_f16_f32(v[i] >> 16);
		}
	} else {
#pragma unroll
		for (int i = 0; i < 128 / G * 2; i++) {
			s[i / 2][i % 2 * 2] = __uint_as_float(v[i] << 16);
			s[i / 2][i % 2 * 2 + 1] = __uint_as_float(v[i] & 0xffff0000u);
		}
	}
}

/* acc += scale * sum, for a scale group's columns of 32 rows and 8 tokens */
template <enum moe_mode MODE>
__device__ __forceinline__ void add_group(float (&acc)[4], const float (&sum)[4],
					  const float *s, const float (&back)[2],
					  const float *offset)
{
#pragma unroll
	for (int i = 0; i < 4; i++) {
		float f = s[i / 2];

		if constexpr (MODE == MOE_H16)
			f *= back[i % 2];
		acc[i] += f * (offset ? sum[i] + offset[i] : sum[i]);
	}
}

/* One brick (32 rows x 128 columns) times 8 NT tokens: acc[m tile][n tile][fragment]. */
template <int NT, int G, enum moe_mode MODE>
__device__ __forceinline__ void
brick_mma(float (&acc)[2][NT][4], uint32_t brick, uint32_t x, uint32_t xrow,
	  const float (&inv)[NT], uint32_t n, uint32_t is_f16)
{
	constexpr bool EXACT = NT > MOE_OFFSET_NT;
	constexpr uint32_t O0 =
		MODE == MOE_X ? 0xc308c308u : 0xe408e408u; /* - 136, - 1032 */
	constexpr uint32_t O1 =
		MODE == MOE_X ? 0xc308c308u : 0xe480e480u; /* - 136, - 1152 */
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const uint32_t offset[4] = {O0, O0, O1, O1};
	float zero[4] = {};
	float s[128 / G][4], sum[2][NT][4], off[NT][4], back[NT][2] = {};

	load_scales<G>(brick + KVK_BRICK_NIBBLES, g, is_f16, s);
	if constexpr (MODE == MOE_H16) {
#pragma unroll
		for (int i = 0; i < 2 * NT; i++)
			back[i / 2][i % 2] =
				ptx_lds32(x + (i / 2 * 8 + 2 * t + i % 2) * xrow + 256u);
	}
#pragma unroll
	for (int kb = 0; kb < 4; kb++) {
		const bool begin = kb * 32 % G == 0, end = (kb + 1) * 32 % G == 0;
		uint4 w = ptx_lds128(brick + kb * 512u + lane * 16u);
		uint32_t p[4][4];

		dequant<MODE, EXACT>(w.x, p[0]);
		dequant<MODE, EXACT>(w.y, p[1]);
		dequant<MODE, EXACT>(w.z, p[2]);
		dequant<MODE, EXACT>(w.w, p[3]);
#pragma unroll
		for (int nt = 0; nt < NT; nt++) {
			uint4 b = load_tokens<MODE>(x + (nt * 8u + g) * xrow, kb, t,
						    inv[nt], nt * 8u + g < n);

			if constexpr (!EXACT) {
				tile_mma<MODE>(off[nt], offset, b.x, b.y,
					       begin ? zero : off[nt]);
				tile_mma<MODE>(off[nt], offset, b.z, b.w, off[nt]);
			}
#pragma unroll
			for (int m = 0; m < 2; m++) {
				uint32_t a0[4] = {p[2 * m][0], p[2 * m + 1][0],
						  p[2 * m][1], p[2 * m + 1][1]};
				uint32_t a1[4] = {p[2 * m][2], p[2 * m + 1][2],
						  p[2 * m][3], p[2 * m + 1][3]};
				float(&c)[4] = sum[m][nt];

				if constexpr (!EXACT && G == 32)
					tile_mma<MODE>(c, a0, b.x, b.y, off[nt]);
				else
					tile_mma<MODE>(c, a0, b.x, b.y, begin ? zero : c);
				tile_mma<MODE>(c, a1, b.z, b.w, c);
				if (end)
					add_group<MODE>(acc[m][nt], c,
							&s[kb * 32 / G][2 * m], back[nt],
							!EXACT && G != 32 ? off[nt]
									  : nullptr);
			}
		}
	}
}

/* The group's stages of row block @rb into acc. */
template <int NT, int WK, enum moe_mode MODE, int G, class S>
__device__ __forceinline__ void
unit_mma(float (&acc)[2][NT][4], const struct moe_i4 &a, uint32_t rb, uint32_t n,
	 const float *inv, bool keep, struct moe_ring &r, struct moe_ring &rx)
{
	constexpr uint32_t WM = MOE_GROUP / WK, XC = MODE == MOE_X ? S::XC1 : S::XC2;
	constexpr uint32_t XROW = MODE == MOE_X ? S::XROW1 : S::XROW2;
	constexpr uint32_t STEP = MODE == MOE_X ? 256u : S::H_STEP;
	const struct moe_mat &m = MODE == MOE_X ? a.w13 : a.w2;
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % MOE_GROUP;
	const uint32_t group = threadIdx.x / 32 / MOE_GROUP, wk = warp % WK;
	const bool mine = rb * WM + warp / WK < m.mtiles && !a.loads_only;
	float scale[NT];

#pragma unroll
	for (int nt = 0; nt < NT; nt++) {
		scale[nt] = MODE == MOE_H32 ? inv[nt * 8 + lane / 4] : 1.0f;
#pragma unroll
		for (int i = 0; i < 4; i++)
			acc[0][nt][i] = acc[1][nt][i] = 0.0f;
	}
	for (uint32_t c = 0; c < m.kbricks; c += XC) {
		const uint32_t x = rx.base + rx.stage * S::CHUNK + wk * STEP;
		const uint32_t end = min(c + XC, m.kbricks);

		ptx_mbar_wait(rx.full + 8 * rx.stage, rx.phase);
		for (uint32_t k = c; k < end; k += WK) {
			if (r.stage % 2 == group) {
				ptx_mbar_wait(r.full + 8 * r.stage, r.phase);
				if (mine && k + wk < m.kbricks)
					brick_mma<NT, G, MODE>(
						acc,
						r.base + r.stage * S::STAGE +
							warp * S::BRICK,
						x + (k - c) * STEP, XROW, scale, n,
						a.scale_f16);
				__syncwarp();
				if (lane == 0)
					ptx_mbar_arrive(r.empty + 8 * r.stage);
			}
			ring_next<S::STAGES>(r);
		}
		if (keep) /* one chunk, and the next part of the row block needs it too */
			continue;
		__syncwarp();
		if (lane == 0)
			ptx_mbar_arrive(rx.empty + 8 * rx.stage);
		ring_next<S::CHUNKS>(rx);
	}
}

/* Two row blocks at once, a group each; returns the one that is this group's. */
template <int NT, enum moe_mode MODE, int G, class S>
__device__ __forceinline__ uint32_t pair_mma(float (&acc)[2][NT][4],
					     const struct moe_i4 &a, uint32_t rb,
					     uint32_t n, const float *inv, bool keep,
					     struct moe_ring &r, struct moe_ring &rx)
{
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % MOE_GROUP;
	const uint32_t group = threadIdx.x / 32 / MOE_GROUP;
	const uint32_t x = rx.base + rx.stage * S::CHUNK;
	float scale[NT];

	rb += r.stage % 2 != group;
#pragma unroll
	for (int nt = 0; nt < NT; nt++) {
		scale[nt] = MODE == MOE_H32 ? inv[nt * 8 + lane / 4] : 1.0f;
#pragma unroll
		for (int i = 0; i < 4; i++)
			acc[0][nt][i] = acc[1][nt][i] = 0.0f;
	}
	ptx_mbar_wait(rx.full + 8 * rx.stage, rx.phase);
	for (uint32_t i = 0; i < 2 * a.w2.kbricks; i++, ring_next<S::STAGES>(r)) {
		if (r.stage % 2 != group)
			continue;
		ptx_mbar_wait(r.full + 8 * r.stage, r.phase);
		if (rb * MOE_GROUP + warp < a.w2.mtiles && !a.loads_only)
			brick_mma<NT, G, MODE>(
				acc, r.base + r.stage * S::STAGE + warp * S::BRICK,
				x + i / 2 * S::H_STEP, S::XROW2, scale, n, a.scale_f16);
		__syncwarp();
		if (lane == 0)
			ptx_mbar_arrive(r.empty + 8 * r.stage);
	}
	if (!keep) {
		__syncwarp();
		if (lane == 0)
			ptx_mbar_arrive(rx.empty + 8 * rx.stage);
		ring_next<S::CHUNKS>(rx);
	}
	return rb;
}

/* Fragment i of warp @w in the exchange buffer. */
template <int NT>
__device__ __forceinline__ uint32_t red_at(uint32_t red, uint32_t w, int i)
{
	return red + ((w * 8 * NT + i) * 32 + threadIdx.x % 32) * 4;
}

/* Sum both groups' and the WK warps' shares in fixed order. Afterwards group 0's warps
 * hold the fragments whose pair (c and c + 2: gate and up) is wk modulo WK. */
template <int NT, int WK>
__device__ __forceinline__ void unit_reduce(float (&acc)[2][NT][4], uint32_t red)
{
	const uint32_t warp = threadIdx.x / 32, w8 = warp % MOE_GROUP,
		       group = warp / MOE_GROUP;

	if (group)
		ptx_bar_sync(3, MOE_CONSUMERS * 32);
	else if (WK > 1)
		ptx_bar_sync(1, MOE_GROUP * 32);
	if (group || WK > 1) {
#pragma unroll
		for (int i = 0; i < 8 * NT; i++)
			ptx_sts32(red_at<NT>(red, WK > 1 ? warp : w8, i),
				  acc[i / (4 * NT)][i / 4 % NT][i % 4]);
	}
	if (group) {
		ptx_bar_arrive(2, MOE_CONSUMERS * 32);
		return;
	}
	ptx_bar_sync(2, MOE_CONSUMERS * 32);
#pragma unroll
	for (int i = 0; i < 8 * NT; i++) {
		float &v = acc[i / (4 * NT)][i / 4 % NT][i % 4];

		if (WK == 1) {
			v += ptx_lds32(red_at<NT>(red, w8, i));
		} else if ((i / 4 * 2 + i % 2) % WK == w8 % WK) {
			/* which group had which stages varies: add them first */
			v = 0.0f;
#pragma unroll
			for (uint32_t w = 0; w < WK; w++)
				v += ptx_lds32(red_at<NT>(red, w8 / WK * WK + w, i)) +
				     ptx_lds32(red_at<NT>(
					     red, MOE_GROUP + w8 / WK * WK + w, i));
		}
	}
	ptx_bar_arrive(3, MOE_CONSUMERS * 32);
}

/* ------------------------------------------------------------------------------- results
 */

__device__ __forceinline__ float swiglu(float gate, float up)
{
	return gate / (1.0f + __expf(-gate)) * up;
}

/* Largest bits over the eight lanes that share a token. */
__device__ __forceinline__ uint32_t octet_max(uint32_t v)
{
#pragma unroll
	for (int i = 4; i < 32; i *= 2)
		v = max(v, __shfl_xor_sync(~0u, v, i));
	return v;
}

/* h as f16: a unit is the 128 columns that share a scale. */
template <int NT>
__device__ __forceinline__ void store_h16(const struct moe_i4 &a, float (&acc)[2][NT][4],
					  const struct moe_unit &u, const uint32_t *slot,
					  uint32_t *amax)
{
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4,
		       t = lane % 4;
	const uint32_t row_bytes = a.w2.kbricks * MOE_H_BRICK;
	const bool mine = u.rb * MOE_GROUP + warp < a.w13.mtiles;
	uint8_t *h = a.h + u.rb * MOE_H_BRICK;

#pragma unroll
	for (int i = 0; i < 2 * NT && mine; i++) {
		const int nt = i / 2, c = i % 2;
		uint32_t token = nt * 8 + 2 * t + c, top;

		acc[0][nt][c] = swiglu(acc[0][nt][c], acc[0][nt][c + 2]);
		acc[1][nt][c] = swiglu(acc[1][nt][c], acc[1][nt][c + 2]);
		top = octet_max(max(__float_as_uint(acc[0][nt][c]) & 0x7fffffffu,
				    __float_as_uint(acc[1][nt][c]) & 0x7fffffffu));
		if (g == 0 && token < u.n)
			atomicMax(&amax[token], top);
	}
	ptx_bar_sync(1, MOE_GROUP * 32);
#pragma unroll
	for (int i = 0; i < 2 * NT && mine; i++) {
		const int nt = i / 2, c = i % 2;
		uint32_t token = nt * 8 + 2 * t + c;
		float inv;

		if (token >= u.n)
			continue;
		uint8_t *row = h + (uint64_t)slot[token] * row_bytes;
		uint16_t *col = (uint16_t *)row + warp * 16 + g;

		inv = h_scale(amax[token]);
		if (warp == 0 && g == 0)
			*(float *)(row + 256) = h_back(inv);
		inv *= g & 2 ? MOE_H_HIGH : 1.0f;
		col[0] = (uint16_t)ptx_f16x2(acc[0][nt][c] * inv, 0.0f);
		col[8] = (uint16_t)ptx_f16x2(acc[1][nt][c] * inv, 0.0f);
	}
}

/* h as f32 and the slot's largest value: a unit is 16 WM columns. */
template <int NT, int WK>
__device__ __forceinline__ void store_h32(const struct moe_i4 &a,
					  const float (&acc)[2][NT][4],
					  const struct moe_unit &u, const uint32_t *slot)
{
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4,
		       t = lane % 4;
	const uint32_t mtile = u.rb * (MOE_GROUP / WK) + warp / WK;
	float *h = (float *)a.h + mtile * 16 + g;

	if (mtile >= a.w13.mtiles)
		return;
#pragma unroll
	for (int i = 0; i < 4 * NT; i++) {
		const int m = i / (2 * NT), nt = i / 2 % NT, c = i % 2;
		uint32_t token = nt * 8 + 2 * t + c, top;
		float v;

		if (i % WK != warp % WK)
			continue;
		v = swiglu(acc[m][nt][c], acc[m][nt][c + 2]);
		top = octet_max(__float_as_uint(v) & 0x7fffffffu);
		if (token >= u.n)
			continue;
		h[(uint64_t)slot[token] * a.inter + m * 8] = v;
		if (g == 0)
			atomicMax(&a.amax[slot[token]], top);
	}
}

/* out[slot][row] */
template <int NT, enum moe_mode MODE>
__device__ __forceinline__ void
store_out(const struct moe_i4 &a, const float (&acc)[2][NT][4], uint32_t rb, uint32_t n,
	  const uint32_t *slot, const float *inv)
{
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const uint32_t row = (rb * MOE_GROUP + threadIdx.x / 32 % MOE_GROUP) * 32 + g;

	if (row >= a.hidden)
		return;
#pragma unroll
	for (int i = 0; i < 2 * NT; i++) {
		const int nt = i / 2, c = i % 2;
		uint32_t token = nt * 8 + 2 * t + c;

		if (token >= n)
			continue;
		float *o = a.out + (uint64_t)slot[token] * a.hidden + row;
		float back = MODE == MOE_H32 ? h_back(inv[token]) : 1.0f;

		o[0] = acc[0][nt][c] * back;
		o[8] = acc[0][nt][c + 2] * back;
		o[16] = acc[1][nt][c] * back;
		o[24] = acc[1][nt][c + 2] * back;
	}
}

template <int NT, int NTMAX, int WK, int G>
__device__ __forceinline__ void
unit_run(const struct moe_i4 &a, struct moe_shared<NTMAX> &sh, const struct moe_unit &u,
	 uint32_t q, uint32_t red, struct moe_ring &r, struct moe_ring &rx)
{
	using S = moe_shape<NTMAX, WK, G>;
	const bool store = threadIdx.x < MOE_GROUP * 32;
	float acc[2][NT][4];

	if (u.type == MOE_FIRST) {
		unit_mma<NT, WK, MOE_X, G, S>(acc, a, u.rb, u.n, nullptr, false, r, rx);
		unit_reduce<NT, WK>(acc, red);
		if (store && WK == 1)
			store_h16<NT>(a, acc, u, sh.slot[q], sh.amax[q]);
		else if (store)
			store_h32<NT, WK>(a, acc, u, sh.slot[q]);
		return;
	}
	for (uint32_t i = 0, nr = rsub_of<1>(a.w2, u.rb); i < nr; i += 2) {
		uint32_t rb = u.rb * a.w2.rsub + i;
		const bool keep = i + 2 < nr, pair = i + 1 < nr;

		if (pair) {
			rb = pair_mma<NT, S::MODE2, G, S>(acc, a, rb, u.n, sh.inv[q],
							  keep, r, rx);
		} else {
			unit_mma<NT, 1, S::MODE2, G, S>(acc, a, rb, u.n, sh.inv[q], keep,
							r, rx);
			unit_reduce<NT, 1>(acc, red);
		}
		if (store || pair)
			store_out<NT, S::MODE2>(a, acc, rb, u.n, sh.slot[q], sh.inv[q]);
	}
}

/* y of four rows: slots in order. */
__device__ __forceinline__ void sum_four(const struct moe_i4 &a, uint32_t tok,
					 uint32_t row)
{
	float s[4] = {};
	uint2 *y = (uint2 *)(a.y + (uint64_t)tok * a.hidden + row);

#pragma unroll 8
	for (uint32_t j = 0; j < a.top_k; j++) {
		uint64_t slot = (uint64_t)tok * a.top_k + j;
		float4 o = __ldcg((const float4 *)(a.out + slot * a.hidden + row));
		float w = a.ids[slot] < a.nr_experts ? a.weights[slot] : NAN;

		s[0] += w * o.x;
		s[1] += w * o.y;
		s[2] += w * o.z;
		s[3] += w * o.w;
	}
	if (a.accumulate) {
		uint2 old = *y;

		s[0] += __uint_as_float(old.x << 16);
		s[1] += __uint_as_float(old.x & 0xffff0000u);
		s[2] += __uint_as_float(old.y << 16);
		s[3] += __uint_as_float(old.y & 0xffff0000u);
	}
	*y = make_uint2(ptx_bf16x2(s[0], s[1]), ptx_bf16x2(s[2], s[3]));
}

/* y of MOE_SUM_TOKS tokens in a row block. */
__device__ __forceinline__ void unit_sum(const struct moe_i4 &a, const struct moe_unit &u,
					 uint32_t nr_tiles)
{
	const uint32_t group = threadIdx.x / 256, rows = 256u * a.w2.rsub;
	const uint32_t first = u.tile * MOE_SUM_TOKS;
	const uint32_t n = min(MOE_SUM_TOKS, a.nr_tokens - first);

	if (threadIdx.x % 256 == 0)
		while (ptx_ld_acquire(&a.done2[u.rb]) < nr_tiles)
			;
	ptx_bar_sync(group ? 4 : 1, MOE_GROUP * 32);
	for (uint32_t i = threadIdx.x; i < n * rows / 4; i += MOE_CONSUMERS * 32) {
		uint32_t row = u.rb * rows + i % (rows / 4) * 4;

		if (row < a.hidden)
			sum_four(a, first + i / (rows / 4), row);
	}
}

template <int NTMAX, int WK, int G>
__device__ __forceinline__ void consumer(const struct moe_i4 &a,
					 struct moe_shared<NTMAX> &sh, uint32_t red,
					 struct moe_ring r, struct moe_ring rx)
{
	struct moe_place p = {};

	if (threadIdx.x < MOE_GROUP * 32)
		ptx_bar_arrive(3, MOE_CONSUMERS * 32);
	for (;;) {
		ptx_mbar_wait(ptx_smem(&sh.q_ready[p.q]), p.phase);
		const struct moe_unit u = sh.unit[p.q];

		if (u.type == MOE_END)
			return;
		if (u.type == MOE_SUM)
			unit_sum(a, u, sh.nr_tiles);
		else if (NTMAX == 1 || u.n <= 8)
			unit_run<1, NTMAX, WK, G>(a, sh, u, p.q, red, r, rx);
		else if (NTMAX == 2 || u.n <= 16)
			unit_run<(NTMAX >= 2 ? 2 : 1), NTMAX, WK, G>(a, sh, u, p.q, red,
								     r, rx);
		else if (u.n <= 24)
			unit_run<(NTMAX >= 4 ? 3 : 1), NTMAX, WK, G>(a, sh, u, p.q, red,
								     r, rx);
		else
			unit_run<NTMAX, NTMAX, WK, G>(a, sh, u, p.q, red, r, rx);
		__syncwarp();
		if (threadIdx.x % 32 == 0) {
			ptx_mbar_arrive(ptx_smem(&sh.q_done[p.q]));
			ptx_mbar_arrive(ptx_smem(&sh.q_empty[p.q]));
		}
		place_next(p);
	}
}

/* -------------------------------------------------------------------------------- kernel
 */

template <int NTMAX, class S>
__device__ __forceinline__ void init_barriers(struct moe_shared<NTMAX> &sh)
{
	for (uint32_t i = 0; i < S::STAGES; i++) {
		ptx_mbar_init(ptx_smem(&sh.full[i]), 1);
		ptx_mbar_init(ptx_smem(&sh.empty[i]), MOE_GROUP);
	}
	for (uint32_t i = 0; i < S::CHUNKS; i++) {
		ptx_mbar_init(ptx_smem(&sh.xfull[i]),
			      S::BULK ? 1 : 32); /* lanes that copy */
		ptx_mbar_init(ptx_smem(&sh.xempty[i]), MOE_CONSUMERS);
	}
	for (uint32_t i = 0; i < 2; i++)
		ptx_mbar_init(ptx_smem(&sh.turn[i]), 1);
	for (uint32_t i = 0; i < MOE_QUEUE; i++) {
		ptx_mbar_init(ptx_smem(&sh.q_full[i]), 1);
		ptx_mbar_init(ptx_smem(&sh.q_ready[i]), 1);
		ptx_mbar_init(ptx_smem(&sh.q_done[i]), MOE_CONSUMERS);
		ptx_mbar_init(ptx_smem(&sh.q_empty[i]), MOE_CONSUMERS + 3);
	}
	ptx_fence_async();
}

template <int NTMAX, int WK, int G>
__global__ void __launch_bounds__(MOE_THREADS, 1)
	moe_i4_kernel(const __grid_constant__ struct moe_i4 a)
{
	using S = moe_shape<NTMAX, WK, G>;
	extern __shared__ uint8_t dynamic[];
	__shared__ struct moe_shared<NTMAX> sh;
	const uint32_t warp = threadIdx.x / 32;
	struct moe_ring r = {}, rx = {};

	r.base = (ptx_smem(dynamic) + 127u) & ~127u;
	r.full = ptx_smem(sh.full);
	r.empty = ptx_smem(sh.empty);
	rx.base = r.base + S::STAGES * S::STAGE;
	rx.full = ptx_smem(sh.xfull);
	rx.empty = ptx_smem(sh.xempty);
	if (threadIdx.x == MOE_THREADS - 1)
		init_barriers<NTMAX, S>(sh);
	ptx_grid_launch();
	ptx_grid_wait();
	if (a.own_plan)
		own_plan<NTMAX>(a, sh);
	if (!a.own_plan && threadIdx.x == 0)
		sh.nr_tiles = __ldcg(a.nr_tiles);
	__syncthreads();
	if (warp < MOE_CONSUMERS) {
		asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOE_REGS_USE));
		consumer<NTMAX, WK, G>(a, sh, rx.base + S::CHUNKS * S::CHUNK, r, rx);
	} else {
		asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MOE_REGS_FEED));
		if (warp == MOE_CONSUMERS)
			weight_warp<NTMAX, WK, G>(a, sh, r);
		else if (warp == MOE_CONSUMERS + 3)
			signal_warp<NTMAX, S::BULK>(a, sh);
		else
			token_warp<NTMAX, WK, G>(a, sh, rx, warp - MOE_CONSUMERS - 1);
	}
}

#endif /* KVK_MOE_INT4_USE_CUH */
