/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd.h - the inner loops of the C references, built for several instruction sets.
 *
 * simd_impl.h is compiled once per instruction set by simd.c and chosen at run time, so
 * the library needs no ISA build flags. A vector always has 16 lanes (a narrower machine
 * uses several registers), and each result has one fixed order of additions that does not
 * depend on how many tokens, rows or requests are worked on together: this is what makes
 * the host backend batch invariant. Instruction sets may differ from each other by FMA
 * contraction; one process uses one of them.
 *
 * Pure functions on the caller's memory; any thread.
 */
#ifndef KVK_SIMD_H
#define KVK_SIMD_H

#include "base/util.h"

#define KVK_LANES	16u
#define KVK_TILE_ROWS	16u  /* matrix rows of a gemm tile */
#define KVK_TILE_COLS	512u /* columns of a gemm tile: 32 KiB of f32 */
#define KVK_GEMM_TOKENS 32u  /* most tokens of one gemm call */
#define KVK_PAGE_SLOTS	64u

/**
 * struct kvk_gemm_panel - 16 matrix rows times some tokens over a panel of columns
 * @tile: [16][KVK_TILE_COLS] f32
 * @x: a row of activations per token
 * @col: first column of the panel in x
 * @nr_vecs: vectors of 16 columns in the panel
 * @nr_tokens: <= KVK_GEMM_TOKENS
 * @first, @last: first panel starts from zero, last one writes out
 * @acc: [nr_tokens][16][16] lanes between panels
 * @out: [nr_tokens][16]
 */
struct kvk_gemm_panel {
	const float *tile;
	const float *const *x;
	u32 col;
	u32 nr_vecs;
	u32 nr_tokens;
	u32 first;
	u32 last;
	float *acc;
	float *out;
};

/**
 * struct kvk_mix - o[r] = o[r] * alpha[r] + sum over j < n[r] of p[r][j] v[j]
 * @o: 4 rows, o_stride apart
 * @p: 4 rows of 64
 * @v: rows v_stride apart; dim values, a multiple of 64
 * @n: tokens a row sees; 0 leaves its o untouched
 */
struct kvk_mix {
	float *o;
	const float *p;
	const float *v;
	u32 o_stride;
	u32 v_stride;
	u32 dim;
	u32 n[4];
	float alpha[4];
};

/**
 * struct kvk_simd - the loops of one instruction set
 * @name: "avx512", "avx2", "base"
 * @cvt_bf16: dst[i] = src[i]; n a multiple of 16
 * @cvt_e4m3: dst[i] = src[i] * scale; n a multiple of 16
 * @cvt_int4: dst[i] = q[i] * scale from packed nibbles; n a multiple of 16
 * @scores: s[r][j] = q[r] . k[j] for 4 rows and nr_tokens (a multiple of 4) tokens; dim a
 *	multiple of 16; s rows are 64 apart
 * @softmax: one page of online softmax of a row: s (dots) becomes p, *max and *sum move
 *	on; returns the factor for what was summed before
 * @mix: see struct kvk_mix
 * @gemm: see struct kvk_gemm_panel
 * @silu_mul: y[i] = silu(g[i]) * u[i]; any n
 * @sum_squares: sum of x[i]^2; any n
 */
struct kvk_simd {
	const char *name;
	void (*cvt_bf16)(const u16 *src, float *dst, u32 n);
	void (*cvt_e4m3)(const u8 *src, float scale, float *dst, u32 n);
	void (*cvt_int4)(const u32 *src, float scale, float *dst, u32 n);
	void (*scores)(const float *q, u32 q_stride, const float *k, u32 k_stride,
		       u32 dim, u32 nr_tokens, float *s);
	float (*softmax)(float *s, u32 n, float scale, float *max, float *sum);
	void (*mix)(const struct kvk_mix *m);
	void (*gemm)(const struct kvk_gemm_panel *g);
	void (*silu_mul)(const float *g, const float *u, float *y, u32 n);
	float (*sum_squares)(const float *x, u32 n);
};

/**
 * kvk_simd_get() - the loops for this machine
 *
 * Return: the widest instruction set that the CPU has; never NULL.
 */
const struct kvk_simd *kvk_simd_get(void);

/**
 * kvk_simd_at() - the variants one by one, for tests
 * @index: 0 = base, then wider ones
 *
 * Return: NULL if there is no such variant or the CPU lacks it.
 */
const struct kvk_simd *kvk_simd_at(u32 index);

#endif /* KVK_SIMD_H */
