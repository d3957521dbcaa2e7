/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_few.cuh - products of the INT4 kernel for a tile of up to eight tokens: nibbles to
 * floats, tokens from shared memory, bricks times tokens. Consumer warps of moe_int4.cuh only.
 */
#ifndef KVK_MOE_INT4_FEW_CUH
#define KVK_MOE_INT4_FEW_CUH

#include "moe_int4_feed.cuh"

/* A nibble n = q + 8 becomes a 16-bit float by an and-or. The columns 2, 3, 6 and 7 of eight stay
 * four bits higher in their half of the word, which saves half of the shifts.
 *
 * f16 (h): 1024 + n, and 1024 + 16 n times h / 16.
 * bf16 (x): 2^-64 (128 + n). The higher nibble does not fit beside an exponent, but the bits alone,
 * a number below 256, are that number times 2^-133 - exact, since exponent 1 continues where
 * subnormal ones end; so 2^-129 n times 2^65 x. Exact weights are q / 64 both.
 *
 * What is too much is the same for every row of W, so it is cheaper taken off once for all rows:
 * by a product of the tokens with constants (up to eight tokens), or from each weight (more). */
#define MOE_X_HIGH  0x60006000u /* 2^65 */
#define MOE_X_BACK  0x1p64f
#define MOE_X_BACK2 64.0f

template <enum moe_mode MODE, bool EXACT>
__device__ __forceinline__ void dequant(uint32_t w, uint32_t (&p)[4])
{
#pragma unroll
	for (int j = 0; j < 4; j++) {
		const uint32_t mask = j % 2 ? 0x00f000f0u : 0x000f000fu;

		w = j == 2 ? w >> 8 : w;
		if constexpr (MODE == MOE_X && EXACT) /* times 2^127 or 2^123, - 2^-3 */
			p[j] = ptx_fma_bf16x2(w & mask, j % 2 ? 0x7d007d00u : 0x7f007f00u,
					      0xbe00be00u);
		else if constexpr (MODE == MOE_X)
			p[j] = j % 2 ? w & mask : ptx_and_or(w, mask, 0x23002300u);
		else
			p[j] = ptx_and_or(w, mask, 0x64006400u);
		if constexpr (MODE != MOE_X && EXACT) /* - 1032, - 1152 */
			p[j] = ptx_fma_f16x2(p[j], 0x3c003c00u,
					     j % 2 ? 0xe480e480u : 0xe408e408u);
	}
}

__device__ __forceinline__ float swiglu(float gate, float up)
{
	return gate / (1.0f + __expf(-gate)) * up;
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

/* Scales of the rows g, g + 8, g + 16, g + 24 for one group of a brick. */
__device__ __forceinline__ void group_scales(uint32_t addr, uint32_t is_f16,
					     float (&s)[4])
{
	const uint2 v = ptx_lds64(addr);

	if (is_f16) {
		s[0] = ptx_f16_f32(v.x & 0xffffu);
		s[1] = ptx_f16_f32(v.x >> 16);
		s[2] = ptx_f16_f32(v.y & 0xffffu);
		s[3] = ptx_f16_f32(v.y >> 16);
	} else {
		s[0] = __uint_as_float(v.x << 16);
		s[1] = __uint_as_float(v.x & 0xffff0000u);
		s[2] = __uint_as_float(v.y << 16);
		s[3] = __uint_as_float(v.y & 0xffff0000u);
	}
}

/* Two registers of the B operand by @f. */
template <enum moe_mode MODE>
__device__ __forceinline__ uint32_t token_times(uint32_t b, uint32_t f)
{
	if constexpr (MODE == MOE_X)
		return ptx_fma_bf16x2(b, f, 0x80008000u);
	else
		return ptx_mul_f16x2(b, f);
}

/* struct few_lane - what a lane multiplies its tokens by, for the columns of each set: zero but for
 * its own set and a token that is there (by the FMA pipe, the one with room). What is read where no
 * token is stays in columns that nobody looks at. */
template <int P> struct few_lane {
	uint32_t low[P], high[P];
	uint32_t own; /* high[] of its own set */
	uint32_t at;  /* its token's columns, from where a brick's tokens begin */
	float inv;    /* MOE_H32: of its token */
	bool there;
};

/* Neighbouring blocks of 32 columns that a set has: a scale group's, or its share of one. */
template <int P, int G> constexpr int few_run(void)
{
	return G / 32 < 4 / P ? G / 32 : 4 / P;
}

/* The block of 32 columns that a lane's operand @i is of. */
template <int P, int G> __device__ __forceinline__ uint32_t few_block(int i)
{
	constexpr int RUN = few_run<P, G>();
	const uint32_t set = threadIdx.x % 32 / 4 / (8 / P);

	return (i / RUN * P + set) * RUN + i % RUN;
}

template <int P, int G, enum moe_mode MODE>
__device__ __forceinline__ struct few_lane<P> few_lane_make(const float *inv, uint32_t n,
							    uint32_t xrow) {
	constexpr uint32_t ONE = MODE == MOE_X ? 0x3f803f80u : 0x3c003c00u;
	constexpr uint32_t HIGH = MODE == MOE_X ? MOE_X_HIGH : ONE;
	constexpr uint32_t BYTES = MODE == MOE_H32 ? 4 : 2;
	const uint32_t g = threadIdx.x % 32 / 4;
	struct few_lane<P> f;

	f.there = g % (8 / P) < n;
	f.own = f.there ? HIGH : 0;
	f.at = g % (8 / P) * xrow +
	       (few_block<P, G>(0) * 32 + threadIdx.x % 4 * 8) * BYTES;
#pragma unroll
	for (uint32_t i = 0; i < P; i++) {
		const bool mine = g / (8 / P) == i && f.there;

		f.low[i] = mine ? ONE : 0;
		f.high[i] = mine ? HIGH : 0;
		/* or they would be made anew for each brick */
		if (P > 1 || MODE == MOE_X)
			asm volatile("" : "+r"(f.low[i]), "+r"(f.high[i]));
		if (MODE != MOE_X)
			f.high[i] = f.low[i];
	}
	asm volatile("" : "+r"(f.own), "+r"(f.at));
	f.inv = MODE == MOE_H32 ? inv[g % (8 / P)] : 1.0f;
	return f;
}

/* The B operand for 32 columns of set @i. */
template <int P, enum moe_mode MODE>
__device__ __forceinline__ uint4 token_part(uint4 b, const struct few_lane<P> &f, int i)
{
	if (P > 1) {
		b.x = token_times<MODE>(b.x, f.low[i]);
		b.z = token_times<MODE>(b.z, f.low[i]);
	}
	if (P > 1 || MODE == MOE_X) {
		b.y = token_times<MODE>(b.y, f.high[i]);
		b.w = token_times<MODE>(b.w, f.high[i]);
	}
	return b;
}

/* acc += scales * (sums + what is too much), h's scale of the brick included. */
template <int P, int SUMS, enum moe_mode MODE, bool EARLY>
__device__ __forceinline__ void
few_add(float (&acc)[2][1][4], const float (&s)[SUMS][4], const float (&sum)[SUMS][2][4],
	const float (&off)[SUMS][4], uint32_t x, uint32_t xrow)
{
	const uint32_t t = threadIdx.x % 4;
	float part[2][4] = {};

#pragma unroll
	for (int i = 0; i < 8 * SUMS; i++) {
		const int q = i / 8, m = i / 4 % 2, c = i % 4;
		float &to = MODE == MOE_H16 ? part[m][c] : acc[m][0][c];

		to += s[q][2 * m + c / 2] *
		      (EARLY ? sum[q][m][c] : sum[q][m][c] + off[q][c]);
	}
#pragma unroll
	for (int c = 0; MODE == MOE_H16 && c < 2; c++) {
		const float back = ptx_lds32(x + (2 * t + c) % (8 / P) * xrow + 256u);

#pragma unroll
		for (int m = 0; m < 2; m++) {
			acc[m][0][c] += back * part[m][c];
			acc[m][0][c + 2] += back * part[m][c + 2];
		}
	}
}

/* What is too much, for the columns of a span: a lane's blocks @b are those of its set and no
 * other set has them, so they need no mask. */
template <int P, int RUN, enum moe_mode MODE>
__device__ __forceinline__ void few_offset(float (&off)[4], const uint4 *b,
					   const struct few_lane<P> &f)
{
	constexpr uint32_t O0 =
		MODE == MOE_X ? 0xa308a308u : 0xe408e408u; /* - 136, - 1032 */
	constexpr uint32_t O1 =
		MODE == MOE_X ? 0x80808080u : 0xe480e480u; /* - 128, - 1152 */
	const uint32_t offset[4] = {O0, O0, O1, O1};
	const uint32_t own =
		P > 1 ? f.own : f.high[0]; /* the same, but the compiler knows */
	float zero[4] = {};

#pragma unroll
	for (int i = 0; i < RUN; i++) {
		uint4 v = b[i];

		if (MODE == MOE_X) {
			v.y = token_times<MODE>(v.y, own);
			v.w = token_times<MODE>(v.w, own);
		}
		tile_mma<MODE>(off, offset, v.x, v.y, i ? off : zero);
		tile_mma<MODE>(off, offset, v.z, v.w, off);
	}
}

/*
 * One brick (32 rows x 128 columns) times up to 8 / P tokens. The eight columns of the tile
 * are P sets of 8 / P tokens, and each set takes part in columns of its own, those of a scale
 * group or a share of them: P groups are added up in one accumulator, side by side, and a lane
 * multiplies by the scales of one of them only. @b: the lane's columns of block few_block().
 * acc[m tile][0][fragment] is what the sets have; unit_end() adds them.
 */
template <int P, int G, enum moe_mode MODE>
__device__ __forceinline__ void
brick_few_of(float (&acc)[2][1][4], uint32_t brick, const uint4 (&b)[4 / P], uint32_t x,
	     uint32_t xrow, const struct few_lane<P> &f, uint32_t is_f16)
{
	/* blocks of 32 columns that follow each other in a set, and in a sum; sums */
	constexpr int RUN = few_run<P, G>(), SPAN = RUN * P, SUMS = 4 / SPAN;
	/* what is too much first, or at the end: no chain gets too long */
	constexpr bool EARLY = SPAN < 4 || P > 1;
	constexpr uint32_t TOK = 8 / P;
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const uint32_t scale_set = 2 * t / TOK;
	float zero[4] = {};
	float s[SUMS][4], sum[SUMS][2][4], off[SUMS][4];

#pragma unroll
	for (int i = 0; i < SUMS; i++)
		group_scales(brick + KVK_BRICK_NIBBLES +
				     (g * (128 / G) +
				      (i * SPAN + scale_set * RUN) / (G / 32)) *
					     8u,
			     is_f16, s[i]);
#pragma unroll
	for (int kb = 0; kb < 4; kb++) {
		const int q = kb / SPAN;
		const bool begin = kb % SPAN == 0;
		const uint4 w = ptx_lds128(brick + kb * 512u + lane * 16u);
		const uint4 v =
			token_part<P, MODE>(b[q * RUN + kb % RUN], f, kb / RUN % P);
		uint32_t p[4][4];

		dequant<MODE, false>(w.x, p[0]);
		dequant<MODE, false>(w.y, p[1]);
		dequant<MODE, false>(w.z, p[2]);
		dequant<MODE, false>(w.w, p[3]);
		if (begin)
			few_offset<P, RUN, MODE>(off[q], &b[q * RUN], f);
#pragma unroll
		for (int m = 0; m < 2; m++) {
			const uint32_t a0[4] = {p[2 * m][0], p[2 * m + 1][0], p[2 * m][1],
						p[2 * m + 1][1]};
			const uint32_t a1[4] = {p[2 * m][2], p[2 * m + 1][2], p[2 * m][3],
						p[2 * m + 1][3]};
			float(&c)[4] = sum[q][m];

			if (EARLY)
				tile_mma<MODE>(c, a0, v.x, v.y, begin ? off[q] : c);
			else
				tile_mma<MODE>(c, a0, v.x, v.y, begin ? zero : c);
			tile_mma<MODE>(c, a1, v.z, v.w, c);
		}
	}
	few_add<P, SUMS, MODE, EARLY>(acc, s, sum, off, x, xrow);
}

/* The same with tokens in shared memory, @xrow bytes apart. */
template <int P, int G, enum moe_mode MODE>
__device__ __forceinline__ void brick_few(float (&acc)[2][1][4], uint32_t brick,
					  uint32_t x, uint32_t xrow,
					  const struct few_lane<P> &f, uint32_t is_f16)
{
	constexpr int RUN = few_run<P, G>();
	uint4 b[4 / P];

#pragma unroll
	for (int i = 0; i < 4 / P; i++)
		b[i] = load_tokens<MODE>(x + f.at, i / RUN * P * RUN + i % RUN, 0, f.inv,
					 P > 1 || f.there);
	brick_few_of<P, G, MODE>(acc, brick, b, x, xrow, f, is_f16);
}

#endif /* KVK_MOE_INT4_FEW_CUH */
