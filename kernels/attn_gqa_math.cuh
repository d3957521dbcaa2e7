/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_gqa_math.cuh - one piece on one warp of the GQA decode kernel: operands, scores, softmax,
 * values. attn_gqa.cu explains it.
 */
#ifndef KVK_ATTN_GQA_MATH_CUH
#define KVK_ATTN_GQA_MATH_CUH

#include "kernels/attn_gqa_feed.cuh"

/* ----------------------------------------------------------------------------- consumers
 */

/* A warp's state for its 16 query rows of one kv head; [0] is row g, [1] row g + 8. */
template <int HD> struct gqa_acc {
	float o[HD / 8][4];
	float m[2];
	float l[2];   /* this lane's share until gqa_reduce_l() */
	float sv_max; /* o is in units of this */
};

/* The 16-byte chunk of a token's row that lane c reads as its @j-th. */
template <int NJ> KVK_DEV int chunk_of(int c, int j)
{
	return NJ == 1 ? c : (j >> 1) * 8 + 2 * c + (j & 1);
}

/* Start reading a warp's queries: raw bf16 pairs (f32 activations are rounded to bf16).
 */
template <int HD, bool FP8>
KVK_DEV void load_q(const struct attn_params &p, const struct plan_seg &s, uint32_t head,
		    uint32_t row_first, uint32_t (*qf)[4])
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;

#pragma unroll
	for (int half = 0; half < 2; half++) {
		uint32_t row = row_first + g + 8 * half, t = row / p.group,
			 h = row % p.group;
		bool in = row < s.q_len * p.group;
		size_t base =
			((size_t)(s.q0 + t) * p.nr_q_heads + head * p.group + h) * HD;

#pragma unroll
		for (int ks = 0; ks < C::KS; ks++) {
			size_t d = base + chunk_of<C::NJ>(c, ks / C::KPC) * C::E +
				   (ks % C::KPC) * 4;
			uint2 v = make_uint2(0, 0);

			if (in && !p.act_f32) {
				const __nv_bfloat16 *src = (const __nv_bfloat16 *)p.q + d;

				/* not one 8-byte load: that would tie x and y to neighbouring
				 * registers, where the matrix unit does not want them */
				v = make_uint2(ldg32(src), ldg32(src + 2));
			}
			if (in && p.act_f32) {
				float4 f = *(const float4 *)((const float *)p.q + d);

				v = make_uint2(pack_bf16(f.x, f.y), pack_bf16(f.z, f.w));
			}
			qf[ks][half] = v.x;
			qf[ks][half + 2] = v.y;
		}
	}
}

/* ... and make operands of them. */
template <int HD, bool FP8> KVK_DEV void convert_q(uint32_t (*qf)[4])
{
	if constexpr (FP8) {
#pragma unroll
		for (int i = 0; i < HD / 4; i++) {
			float2 v = unpack_bf16(qf[i / 4][i % 4]);

			qf[i / 4][i % 4] = pack_f16(v.x, v.y);
		}
	}
}

/*
 * A step of few units: all warps have the same queries. Each would read 32 sectors a load, which
 * takes 2 us; so each reads one k-step's share, and they meet in shared memory, as operands.
 */
template <int HD>
KVK_DEV void load_q_share(const struct attn_params &p, const struct plan_seg &s,
			  uint2 *ret_raw)
{
	const uint32_t lane = threadIdx.x & 31, ks = threadIdx.x / 32;

	static_assert(HD / 16 == NR_WARPS, "a k-step a warp");
#pragma unroll
	for (int half = 0; half < 2; half++) {
		const uint32_t row = lane / 4 + 8 * half;
		const size_t at = ((size_t)(s.q0 + row / p.group) * p.nr_q_heads +
				   s.hblk * p.group + row % p.group) *
					  HD +
				  chunk_of<2>(lane & 3, ks / 4) * 16 + ks % 4 * 4;

		ret_raw[half] = make_uint2(0, 0);
		if (row >= s.q_len * p.group)
			continue;
		if (p.act_f32) {
			const float4 f = *(const float4 *)((const float *)p.q + at);

			ret_raw[half] =
				make_uint2(pack_bf16(f.x, f.y), pack_bf16(f.z, f.w));
		} else {
			ret_raw[half] = *(const uint2 *)((const __nv_bfloat16 *)p.q + at);
		}
	}
}

/* All consumers: their shares to @q [k-step][lane], and all of it to qf. */
template <int HD>
KVK_DEV void share_q(const uint2 *raw, uint4 (*q)[32], uint32_t (*qf)[4])
{
	const uint32_t lane = threadIdx.x & 31;

	q[threadIdx.x / 32][lane] = make_uint4(bf16_f16(raw[0].x), bf16_f16(raw[1].x),
					       bf16_f16(raw[0].y), bf16_f16(raw[1].y));
	bar_sync(BAR_ALL, NR_WARPS * 32);
#pragma unroll
	for (int ks = 0; ks < HD / 16; ks++) {
		const uint4 v = q[ks][lane];

		qf[ks][0] = v.x;
		qf[ks][1] = v.y;
		qf[ks][2] = v.z;
		qf[ks][3] = v.w;
	}
}

/* s = Q K^T of 8 JT tokens; s[jt] are tokens 8 jt + 2c, + 1. */
template <int HD, bool FP8, int JT = 8>
KVK_DEV void scores(uint32_t k_addr, const uint32_t (*qf)[4], float (*s)[4])
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;

	k_addr += g * C::RB;
#pragma unroll
	for (int j0 = 0; j0 < JT; j0 += 4) {
#pragma unroll
		for (int jt = j0; jt < j0 + 4; jt++)
			s[jt][0] = s[jt][1] = s[jt][2] = s[jt][3] = 0.f;
#pragma unroll
		for (int j = 0; j < C::NJ; j++) {
			uint4 v[4];

#pragma unroll
			for (int t = 0; t < 4; t++)
				v[t] = lds128(k_addr + (j0 + t) * 8 * C::RB +
					      chunk_of<C::NJ>(c, j) * 16);
#pragma unroll
			for (int i = 0; i < C::KPC; i++) {
#pragma unroll
				for (int t = 0; t < 4; t++) {
					const uint32_t w[4] = {v[t].x, v[t].y, v[t].z,
							       v[t].w};
					uint32_t b0, b1;

					if (FP8) {
						e4m3x4_f16(w[i], b0, b1);
					} else {
						b0 = w[2 * i & 3];
						b1 = w[(2 * i + 1) & 3];
					}
					mma_16816<!FP8>(s[j0 + t], qf[j * C::KPC + i], b0,
							b1);
				}
			}
		}
	}
}

/*
 * o += P V of 8 JT tokens; a[ks] is P of tokens 16 ks .. 16 ks + 15. Word i of chunk j
 * makes n-tile(s) o[]: FP8 o[8 j + 2 i], o[8 j + 2 i + 1] (even and odd dims), BF16 o[4 j
 * + i].
 */
template <int HD, bool FP8, int JT = 8>
KVK_DEV void values(uint32_t v_addr, const uint32_t (*a)[4], const uint32_t (*lo)[4],
		    float (*o)[4])
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;

	v_addr += g * C::RB;
#pragma unroll
	for (int ks = 0; ks < JT / 2; ks++) {
#pragma unroll
		for (int j = 0; j < C::NJ; j++) {
			const uint32_t at =
				v_addr + 16 * ks * C::RB + chunk_of<C::NJ>(c, j) * 16;
			const uint4 v0 = lds128(at), v1 = lds128(at + 8 * C::RB);
			const uint32_t w0[4] = {v0.x, v0.y, v0.z, v0.w};
			const uint32_t w1[4] = {v1.x, v1.y, v1.z, v1.w};

#pragma unroll
			for (int i = 0; i < 4; i++) {
				uint32_t r0 = movmatrix_trans(w0[i]),
					 r1 = movmatrix_trans(w1[i]);

				if (FP8) {
					uint32_t lo0, hi0, lo1, hi1;
					float(*t)[4] = o + 8 * j + 2 * i;

					e4m3x4_f16(__byte_perm(r0, 0, 0x3120), lo0, hi0);
					e4m3x4_f16(__byte_perm(r1, 0, 0x3120), lo1, hi1);
					mma_16816<false>(t[0], a[ks], lo0, lo1);
					mma_16816<false>(t[1], a[ks], hi0, hi1);
				} else {
					mma_16816<true>(o[4 * j + i], a[ks], r0, r1);
					mma_16816<true>(o[4 * j + i], lo[ks], r0, r1);
				}
			}
		}
	}
}

/*
 * Rows of V (and scales) past the end among tokens @lo .. @hi - 1 become zero: their bytes never
 * reach arithmetic.
 */
template <int HD, bool FP8>
KVK_DEV void zero_tail(uint8_t *stage, uint8_t *scales, uint32_t valid, uint32_t lo,
		       uint32_t hi)
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31;

	valid = max(valid, lo);
	for (uint32_t i = valid * (C::RB / 16) + lane; i < hi * (C::RB / 16); i += 32)
		*(uint4 *)(stage + C::PIECE / 2 + i * 16) = make_uint4(0, 0, 0, 0);
	if (FP8)
		for (uint32_t i = valid + lane; i < hi; i += 32)
			((uint16_t *)scales)[i] = ((uint16_t *)scales)[64 + i] = 0;
	fence_proxy_async();
	__syncwarp();
}

/* What one piece needs beside the ring. */
struct gqa_piece {
	uint32_t k_addr;
	uint32_t v_addr;
	uint32_t sc_addr;
	int32_t limit[2]; /* tokens from the warp's first on that row g, g + 8 may see */
	bool tail;	  /* some token of the page is out of sight */
	float sk;	  /* static scales */
	float sv;
};

/* The V scales of a lane's tokens, and the largest of them. */
template <int JT> KVK_DEV float largest_scale(const struct gqa_piece &pc, uint32_t *svw)
{
	const int c = threadIdx.x & 3;
	__half2 big = __float2half2_rn(0.f);

#pragma unroll
	for (int jt = 0; jt < JT; jt++) {
		__half2 h;

		svw[jt] = lds32(pc.sc_addr + 128 + 16 * jt + 4 * c);
		memcpy(&h, &svw[jt], 4);
		big = __hmax2(big, h);
	}
	return fmaxf(__low2float(big), __high2float(big));
}

/* Scores times scales, masked; mx: the rows' largest. */
template <int JT>
KVK_DEV void scale_scores(const struct attn_params &p, const struct gqa_piece &pc,
			  bool tok, float (*s)[4], float *mx)
{
	const int c = threadIdx.x & 3;

#pragma unroll
	for (int jt = 0; jt < JT; jt++) {
		float2 k = make_float2(pc.sk, pc.sk);

		if (tok)
			k = unpack_f16(lds32(pc.sc_addr + 16 * jt + 4 * c));
		k.x *= p.scale;
		k.y *= p.scale;
#pragma unroll
		for (int e = 0; e < 4; e++)
			s[jt][e] *= e & 1 ? k.y : k.x;
	}
	if (pc.tail) {
#pragma unroll
		for (int i = 0; i < 4 * JT; i++)
			if (i / 4 * 8 + 2 * c + (i & 1) >= pc.limit[i / 2 & 1])
				s[i / 4][i % 4] = -INFINITY;
	}
#pragma unroll
	for (int i = 0; i < 4 * JT; i++)
		mx[i / 2 & 1] = fmaxf(mx[i / 2 & 1], s[i / 4][i % 4]);
}

/* P as M operands (BF16: in two parts, one alone is off by 1e-3), and the rows' sums. */
template <bool FP8, int JT>
KVK_DEV void probs(float (*s)[4], const float *mu, bool tok, const uint32_t *svw,
		   float inv_sv, float *l, uint32_t (*a)[4], uint32_t (*lo)[4])
{
#pragma unroll
	for (int jt = 0; jt < JT; jt++) {
		float2 v = make_float2(1.f, 1.f);

		if (tok) {
			v = unpack_f16(svw[jt]);
			v.x *= inv_sv;
			v.y *= inv_sv;
		}
#pragma unroll
		for (int h = 0; h < 2; h++) {
			float e0 = exp2_fast(s[jt][2 * h] - mu[h]);
			float e1 = exp2_fast(s[jt][2 * h + 1] - mu[h]);
			uint32_t *dst = &a[jt / 2][2 * (jt & 1) + h];

			l[h] += e0 + e1;
			if (FP8) {
				*dst = pack_f16(e0 * v.x, e1 * v.y);
			} else {
				float2 f;

				*dst = pack_bf16(e0, e1);
				f = unpack_bf16(*dst);
				lo[jt / 2][2 * (jt & 1) + h] =
					pack_bf16(e0 - f.x, e1 - f.y);
			}
		}
	}
}

KVK_DEV float quad_max(float v)
{
	v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
	return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

/*
 * What P is relative to is raised when a score is more than 2^ROOM_M above it or a V scale more than
 * ROOM_SV times it: rarely after the first pieces, so that a piece costs one vote and no
 * trips between the lanes. P in f16 stays below 2^ROOM_M ROOM_SV, and is as exact there as below 1.
 */
#define ROOM_M	6.f
#define ROOM_SV 16.f

/* Bring the references up to this piece's largest scores @mx and V scale @sv. */
template <int HD>
KVK_DEV void raise(gqa_acc<HD> &acc, bool tok, const float *mx, float sv)
{
	float corr[2];

	sv = fmaxf(acc.sv_max, quad_max(sv));
#pragma unroll
	for (int h = 0; h < 2; h++) {
		const float m = fmaxf(acc.m[h], quad_max(mx[h]));

		corr[h] = exp2_fast(acc.m[h] - (m == -INFINITY ? 0.f : m));
		acc.l[h] *= corr[h];
		acc.m[h] = m;
		if (tok)
			corr[h] *= sv > 0.f ? acc.sv_max / sv : 0.f;
	}
	if (tok)
		acc.sv_max = sv;
#pragma unroll
	for (int i = 0; i < HD / 8; i++) {
		acc.o[i][0] *= corr[0];
		acc.o[i][1] *= corr[0];
		acc.o[i][2] *= corr[1];
		acc.o[i][3] *= corr[1];
	}
}

/* Scores to probabilities: scales, mask, references; returns with P in a[][]. */
template <int HD, bool FP8, int JT = 8>
KVK_DEV void softmax(const struct attn_params &p, const struct gqa_piece &pc,
		     float (*s)[4], gqa_acc<HD> &acc, uint32_t (*a)[4], uint32_t (*lo)[4])
{
	const bool tok = FP8 && p.token_scales;
	float mx[2] = {-INFINITY, -INFINITY}, mu[2], sv = 0.f, inv_sv = 1.f;
	uint32_t svw[JT];

	if (tok)
		sv = largest_scale<JT>(pc, svw);
	scale_scores<JT>(p, pc, tok, s, mx);
	if (__any_sync(~0u, mx[0] > acc.m[0] + ROOM_M || mx[1] > acc.m[1] + ROOM_M ||
				    sv > acc.sv_max * ROOM_SV))
		raise<HD>(acc, tok, mx, sv);
	if (tok)
		inv_sv = acc.sv_max > 0.f ? 1.f / acc.sv_max : 0.f;
	mu[0] = acc.m[0] == -INFINITY ? 0.f : acc.m[0];
	mu[1] = acc.m[1] == -INFINITY ? 0.f : acc.m[1];
	probs<FP8, JT>(s, mu, tok, svw, inv_sv, acc.l, a, lo);
}

#endif /* KVK_ATTN_GQA_MATH_CUH */
