/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd_impl.h - body of simd.c, included once per instruction set.
 *
 * The includer defines KVK_T(name) (a suffix), KVK_TARGET (a function attribute) and
 * KVK_BLOCK (4 or 2: rows and columns of the register block; narrow machines have fewer
 * registers). The additions of a dot product: lane l adds the products of elements l, l +
 * 16, ... in order; lanes are then added as (i, i + 8), (i, i + 4), (i, i + 2), (0, 1).
 */

#define KVK_PARTS (KVK_LANES / KVK_NATIVE)
#define KVK_PASS  (KVK_BLOCK == 4 ? 16 : 8) /* accumulators of a gemm pass */
#define NV	  KVK_T(reg)

#define FN	  static inline __attribute__((always_inline)) KVK_TARGET

FN vf KVK_T(ld)(const float *p)
{
	vf v;

	__builtin_memcpy(&v, p, sizeof(v));
	return v;
}

FN void KVK_T(st)(float *p, vf v)
{
	__builtin_memcpy(p, &v, sizeof(v));
}

typedef float NV __attribute__((vector_size(KVK_NATIVE * 4)));

FN NV KVK_T(rld)(const float *p)
{
	NV v;

	__builtin_memcpy(&v, p, sizeof(v));
	return v;
}

FN void KVK_T(rst)(float *p, NV v)
{
	__builtin_memcpy(p, &v, sizeof(v));
}

FN vf KVK_T(splat)(float x)
{
	return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

FN vf KVK_T(fold)(vf a, vf b, const int step)
{
	if (step == 8)
		return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18,
					       19, 20, 21, 22, 23) +
		       __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25,
					       26, 27, 28, 29, 30, 31);
	if (step == 4)
		return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18,
					       19, 24, 25, 26, 27) +
		       __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21,
					       22, 23, 28, 29, 30, 31);
	if (step == 2)
		return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20,
					       21, 24, 25, 28, 29) +
		       __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19,
					       22, 23, 26, 27, 30, 31);
	return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22,
				       24, 26, 28, 30) +
	       __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23,
				       25, 27, 29, 31);
}

/* Lane i of the result = all lanes of a[i] added. Bit-reversed order in gives plain order
 * out. */
FN vf KVK_T(reduce16)(const vf *a)
{
	vf c0 = KVK_T(fold)(a[0], a[1], 8), c1 = KVK_T(fold)(a[8], a[9], 8);
	vf c2 = KVK_T(fold)(a[4], a[5], 8), c3 = KVK_T(fold)(a[12], a[13], 8);
	vf c4 = KVK_T(fold)(a[2], a[3], 8), c5 = KVK_T(fold)(a[10], a[11], 8);
	vf c6 = KVK_T(fold)(a[6], a[7], 8), c7 = KVK_T(fold)(a[14], a[15], 8);
	vf d0 = KVK_T(fold)(c0, c4, 4), d1 = KVK_T(fold)(c1, c5, 4);
	vf d2 = KVK_T(fold)(c2, c6, 4), d3 = KVK_T(fold)(c3, c7, 4);
	vf e0 = KVK_T(fold)(d0, d2, 2), e1 = KVK_T(fold)(d1, d3, 2);

	return KVK_T(fold)(e0, e1, 1);
}

FN float KVK_T(hsum)(vf v)
{
	float t[KVK_LANES];

	KVK_T(st)(t, v);
	for (u32 step = 8; step; step /= 2)
		for (u32 i = 0; i < step; i++)
			t[i] += t[i + step];
	return t[0];
}

FN vf KVK_T(select)(vi mask, vf a, vf b)
{
	return (vf)((mask & (vi)a) | (~mask & (vi)b));
}

/*
 * exp: x = n ln 2 + r, Taylor to r^7 (rest below 1e-8), 2^n in two factors so that large
 * results reach infinity and small ones pass through the subnormals. Error below 2 ulp.
 */
FN vf KVK_T(vexp)(vf x)
{
	const vf magic = KVK_T(splat)(12582912.0f);
	vf t, n, r, p;
	vi ni, half;

	x = KVK_T(select)(x < KVK_T(splat)(-104.0f), KVK_T(splat)(-104.0f), x);
	x = KVK_T(select)(x > KVK_T(splat)(89.0f), KVK_T(splat)(89.0f), x);
	t = x * 1.44269504f + magic;
	n = t - magic;
	r = x - n * 0.693359375f;
	r = r - n * -2.12194440e-4f;
	p = r * 1.98412698e-4f + 1.38888889e-3f;
	p = p * r + 8.33333333e-3f;
	p = p * r + 4.16666667e-2f;
	p = p * r + 1.66666667e-1f;
	p = p * r + 0.5f;
	p = p * (r * r) + r;
	p = p + 1.0f;
	ni = (vi)t - (vi)magic;
	half = ni >> 1;
	return p * (vf)((half + 127) << 23) * (vf)((ni - half + 127) << 23);
}

/* --------------------------------------------------------------------- conversions */

/* Plain loops where gcc 12 takes them apart better than a vector conversion. */
KVK_TARGET static void KVK_T(cvt_bf16)(const u16 *restrict src, float *restrict dst,
				       u32 n)
{
	for (u32 i = 0; i < n; i++)
		dst[i] = kvk_bits_f32((u32)src[i] << 16);
}

/* Exponent and mantissa land in the f32 fields; times 2^120 mends the bias, also for
 * subnormals. 0x7f has no such value and becomes NaN. */
KVK_TARGET static void KVK_T(cvt_e4m3)(const u8 *restrict src, float scale,
				       float *restrict dst, u32 n)
{
	for (u32 i = 0; i < n; i++) {
		u32 w = ((u32)(s32)(s8)src[i] << 20) & 0x87f00000u;
		u32 x = kvk_f32_bits(kvk_bits_f32(w) * 0x1p120f);

		x = (w & 0x07f00000u) == 0x07f00000u ? 0x7fc00000u : x;
		dst[i] = kvk_bits_f32(x) * scale;
	}
}

KVK_TARGET static void KVK_T(cvt_int4)(const u32 *src, float scale, float *dst, u32 n)
{
	const vu shift = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
	const vu upper = {0, 0, 0, 0, 0, 0, 0, 0, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};

	for (u32 i = 0; i < n; i += KVK_LANES) {
		u32 a = src[i / 8], b = src[i / 8 + 1];
		vu w = (((vu){0} + a) & ~upper) | (((vu){0} + b) & upper);

		w = (w >> shift) & 15u;
		KVK_T(st)(dst + i, __builtin_convertvector((vi)w - 8, vf) * scale);
	}
}

/* ----------------------------------------------------------------------- attention */

/* A register block of KVK_BLOCK x KVK_BLOCK dot products; lanes go to a[i * 4 + j][16].
 */
FN void KVK_T(dots)(const float *q, u32 q_stride, const float *k, u32 k_stride, u32 dim,
		    float *a)
{
	NV acc[KVK_BLOCK * KVK_BLOCK][KVK_PARTS];

	KVK_UNROLL
	for (u32 i = 0; i < KVK_BLOCK * KVK_BLOCK * KVK_PARTS; i++)
		acc[i / KVK_PARTS][i % KVK_PARTS] = (NV){0};
	for (u32 d = 0; d < dim; d += KVK_LANES) {
		KVK_UNROLL
		for (u32 p = 0; p < KVK_PARTS; p++) {
			NV kv[KVK_BLOCK];

			KVK_UNROLL
			for (u32 j = 0; j < KVK_BLOCK; j++)
				kv[j] = KVK_T(rld)(k + (size_t)j * k_stride + d +
						   p * KVK_NATIVE);
			KVK_UNROLL
			for (u32 i = 0; i < KVK_BLOCK; i++) {
				NV qv = KVK_T(rld)(q + (size_t)i * q_stride + d +
						   p * KVK_NATIVE);

				KVK_UNROLL
				for (u32 j = 0; j < KVK_BLOCK; j++)
					acc[i * KVK_BLOCK + j][p] += qv * kv[j];
			}
		}
	}
	KVK_UNROLL
	for (u32 i = 0; i < KVK_BLOCK * KVK_BLOCK; i++)
		KVK_UNROLL
	for (u32 p = 0; p < KVK_PARTS; p++)
		KVK_T(rst)
	(a + (i / KVK_BLOCK * 4 + i % KVK_BLOCK) * KVK_LANES + p * KVK_NATIVE, acc[i][p]);
}

/* reduce16() of lanes in memory */
FN void KVK_T(reduce_to)(const float *lanes, float *t)
{
	vf a[16];

	KVK_UNROLL
	for (u32 i = 0; i < 16; i++)
		a[i] = KVK_T(ld)(lanes + i * KVK_LANES);
	KVK_T(st)(t, KVK_T(reduce16)(a));
}

KVK_TARGET static void KVK_T(scores)(const float *q, u32 q_stride, const float *k,
				     u32 k_stride, u32 dim, u32 nr_tokens, float *s)
{
	for (u32 j = 0; j < nr_tokens; j += 4) {
		const float *kj = k + (size_t)j * k_stride;
		float a[16 * KVK_LANES] __attribute__((aligned(64))), t[KVK_LANES];

		for (u32 i = 0; i < 4; i += KVK_BLOCK)
			for (u32 m = 0; m < 4; m += KVK_BLOCK)
				KVK_T(dots)
		(q + (size_t)i * q_stride, q_stride, kj + (size_t)m * k_stride, k_stride,
		 dim, a + (i * 4 + m) * KVK_LANES);
		KVK_T(reduce_to)(a, t);
		for (u32 i = 0; i < 4; i++)
			__builtin_memcpy(s + (size_t)i * KVK_PAGE_SLOTS + j, t + i * 4,
					 16);
	}
}

KVK_TARGET static float KVK_T(softmax)(float *s, u32 n, float scale, float *max,
				       float *sum)
{
	const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
	const vf none = KVK_T(splat)(-__builtin_inff());
	float t[KVK_LANES], top = *max, alpha;
	vf v[4], m = none;

	for (u32 i = 0; i < 4; i++) {
		v[i] = KVK_T(ld)(s + i * KVK_LANES) * scale;
		v[i] = KVK_T(select)(lane + (int)(i * KVK_LANES) < (int)n, v[i], none);
		m = KVK_T(select)(v[i] > m, v[i], m);
	}
	KVK_T(st)(t, m);
	for (u32 i = 0; i < KVK_LANES; i++)
		top = t[i] > top ? t[i] : top;
	alpha = KVK_T(vexp)(KVK_T(splat)(*max - top))[0];
	for (u32 i = 0; i < 4; i++) {
		v[i] = KVK_T(vexp)(v[i] - top);
		KVK_T(st)(s + i * KVK_LANES, v[i]);
	}
	*sum = *sum * alpha + KVK_T(hsum)((v[0] + v[1]) + (v[2] + v[3]));
	*max = top;
	return alpha;
}

/* acc[i][b] += p[i] * v[b]: a token's values into the rows [i0, i1) of a block */
FN void KVK_T(mix_token)(NV acc[KVK_BLOCK][KVK_BLOCK * KVK_PARTS], const float *p,
			 const float *v, u32 i0, u32 i1)
{
	NV vv[KVK_BLOCK * KVK_PARTS];

	KVK_UNROLL
	for (u32 b = 0; b < KVK_BLOCK * KVK_PARTS; b++)
		vv[b] = KVK_T(rld)(v + b * KVK_NATIVE);
	KVK_UNROLL
	for (u32 i = i0; i < i1; i++)
		KVK_UNROLL
	for (u32 b = 0; b < KVK_BLOCK * KVK_PARTS; b++)
		acc[i][b] += p[i * KVK_PAGE_SLOTS] * vv[b];
}

/* KVK_BLOCK rows by KVK_BLOCK vectors of o at @d. Rows may see different numbers of
 * tokens: what all see comes first, the rest row by row, each row's additions in token
 * order. */
FN void KVK_T(mix_block)(const struct kvk_mix *m, u32 r0, u32 d)
{
	const float *p = m->p + (size_t)r0 * KVK_PAGE_SLOTS, *v = m->v + d;
	NV acc[KVK_BLOCK][KVK_BLOCK * KVK_PARTS];
	u32 common = m->n[r0], j;

	KVK_UNROLL
	for (u32 i = 0; i < KVK_BLOCK; i++) {
		common = KV_MIN(common, m->n[r0 + i]);
		KVK_UNROLL
		for (u32 b = 0; b < KVK_BLOCK * KVK_PARTS; b++)
			acc[i][b] = (NV){0};
	}
	for (j = 0; j < common; j++)
		KVK_T(mix_token)(acc, p + j, v + (size_t)j * m->v_stride, 0, KVK_BLOCK);
	KVK_UNROLL
	for (u32 i = 0; i < KVK_BLOCK; i++) {
		float *o = m->o + (size_t)(r0 + i) * m->o_stride + d;

		for (j = common; j < m->n[r0 + i]; j++)
			KVK_T(mix_token)
		(acc, p + j, v + (size_t)j * m->v_stride, i, i + 1);
		if (!m->n[r0 + i])
			continue;
		KVK_UNROLL
		for (u32 b = 0; b < KVK_BLOCK * KVK_PARTS; b++)
			KVK_T(rst)
		(o + b * KVK_NATIVE,
		 KVK_T(rld)(o + b * KVK_NATIVE) * m->alpha[r0 + i] + acc[i][b]);
	}
}

KVK_TARGET static void KVK_T(mix)(const struct kvk_mix *m)
{
	for (u32 d = 0; d < m->dim; d += KVK_BLOCK * KVK_LANES)
		for (u32 r = 0; r < 4; r += KVK_BLOCK)
			KVK_T(mix_block)(m, r, d);
}

/* ---------------------------------------------------------------------------- gemm */

/*
 * One part of the lanes of @mt tokens by @nr rows over a panel, mt * nr = KVK_PASS. Lanes
 * of (token, row) start from zero, or from @lanes, @t_step and KVK_LANES floats apart.
 */
FN void KVK_T(gemm_pass)(const struct kvk_gemm_panel *g, const float *const *x,
			 const float *w, const float *lanes, u32 t_step, const u32 mt,
			 const u32 nr, NV *a)
{
	KVK_UNROLL
	for (u32 i = 0; i < KVK_PASS; i++)
		a[i] = g->first
			       ? (NV){0}
			       : KVK_T(rld)(lanes + i / nr * t_step + i % nr * KVK_LANES);
	for (u32 c = 0; c < g->nr_vecs * KVK_LANES; c += KVK_LANES) {
		NV xv[4];

		KVK_UNROLL
		for (u32 i = 0; i < mt; i++)
			xv[i] = KVK_T(rld)(x[i] + c);
		KVK_UNROLL
		for (u32 j = 0; j < nr; j++) {
			NV wv = KVK_T(rld)(w + (size_t)j * KVK_TILE_COLS + c);

			KVK_UNROLL
			for (u32 i = 0; i < mt; i++)
				a[i * nr + j] += xv[i] * wv;
		}
	}
}

/* @mt tokens by @nr rows (mt * nr = 16) over a panel. */
FN void KVK_T(gemm_block)(const struct kvk_gemm_panel *g, u32 t0, u32 r0, const u32 mt,
			  const u32 nr)
{
	const u32 pass_mt = KVK_PASS >= nr ? KVK_PASS / nr : 1,
		  pass_nr = KVK_PASS / pass_mt;
	float *acc = g->acc + ((size_t)t0 * KVK_TILE_ROWS + r0) * KVK_LANES;
	const u32 a_step = KVK_TILE_ROWS * KVK_LANES;
	float local[16 * KVK_LANES] __attribute__((aligned(64))), t[KVK_LANES] = {0};

	KVK_UNROLL
	for (u32 i = 0; i < 16 * KVK_PARTS; i += KVK_PASS) {
		u32 at = i / 16 * KVK_NATIVE, j = i % 16;
		float *to = g->last ? local + j * KVK_LANES + at
				    : acc + j / nr * a_step + j % nr * KVK_LANES + at;
		u32 to_step = g->last ? nr * KVK_LANES : a_step;
		const float *x[4];
		NV a[KVK_PASS];

		for (u32 k = 0; k < pass_mt; k++)
			x[k] = g->x[t0 + j / nr + k] + g->col + at;
		KVK_T(gemm_pass)
		(g, x, g->tile + (size_t)(r0 + j % nr) * KVK_TILE_COLS + at,
		 acc + j / nr * a_step + j % nr * KVK_LANES + at, a_step, pass_mt,
		 pass_nr, a);
#if KVK_NATIVE == 16
		if (g->last) { /* straight from the registers */
			KVK_T(st)(t, KVK_T(reduce16)(a));
			continue;
		}
#endif
		KVK_UNROLL
		for (u32 k = 0; k < KVK_PASS; k++)
			KVK_T(rst)
		(to + k / pass_nr * to_step + k % pass_nr * KVK_LANES, a[k]);
	}
	if (!g->last)
		return;
	if (KVK_NATIVE != 16)
		KVK_T(reduce_to)(local, t);
	for (u32 i = 0; i < mt; i++)
		__builtin_memcpy(g->out + (size_t)(t0 + i) * KVK_TILE_ROWS + r0,
				 t + i * nr, nr * sizeof(float));
}

KVK_TARGET static void KVK_T(gemm)(const struct kvk_gemm_panel *g)
{
	u32 t = 0;

	for (; t + 4 <= g->nr_tokens; t += 4)
		for (u32 r = 0; r < KVK_TILE_ROWS; r += 4)
			KVK_T(gemm_block)(g, t, r, 4, 4);
	for (; t + 2 <= g->nr_tokens; t += 2)
		for (u32 r = 0; r < KVK_TILE_ROWS; r += 8)
			KVK_T(gemm_block)(g, t, r, 2, 8);
	for (; t < g->nr_tokens; t++)
		KVK_T(gemm_block)(g, t, 0, 1, 16);
}

/* ------------------------------------------------------------------------ the rest */

KVK_TARGET static void KVK_T(silu_mul)(const float *g, const float *u, float *y, u32 n)
{
	for (u32 i = 0; i < n; i += KVK_LANES) {
		u32 part = KV_MIN(n - i, KVK_LANES);
		float tg[KVK_LANES] = {0}, tu[KVK_LANES] = {0};
		vf a, b;

		__builtin_memcpy(tg, g + i, part * sizeof(float));
		__builtin_memcpy(tu, u + i, part * sizeof(float));
		a = KVK_T(ld)(tg);
		b = KVK_T(ld)(tu);
		KVK_T(st)(tg, a / (KVK_T(vexp)(-a) + 1.0f) * b);
		__builtin_memcpy(y + i, tg, part * sizeof(float));
	}
}

KVK_TARGET static float KVK_T(sum_squares)(const float *x, u32 n)
{
	vf acc = KVK_T(splat)(0);
	float t[KVK_LANES] = {0};
	u32 i = 0;

	for (; i + KVK_LANES <= n; i += KVK_LANES) {
		vf v = KVK_T(ld)(x + i);

		acc += v * v;
	}
	if (i < n) {
		__builtin_memcpy(t, x + i, (n - i) * sizeof(float));
		acc += KVK_T(ld)(t) * KVK_T(ld)(t);
	}
	return KVK_T(hsum)(acc);
}

static const struct kvk_simd KVK_T(simd) = {
	.name = KVK_NAME,
	.cvt_bf16 = KVK_T(cvt_bf16),
	.cvt_e4m3 = KVK_T(cvt_e4m3),
	.cvt_int4 = KVK_T(cvt_int4),
	.scores = KVK_T(scores),
	.softmax = KVK_T(softmax),
	.mix = KVK_T(mix),
	.gemm = KVK_T(gemm),
	.silu_mul = KVK_T(silu_mul),
	.sum_squares = KVK_T(sum_squares),
};

#undef FN
#undef NV
#undef KVK_PARTS
#undef KVK_PASS
#undef KVK_NATIVE
#undef KVK_T
#undef KVK_TARGET
#undef KVK_BLOCK
#undef KVK_NAME
