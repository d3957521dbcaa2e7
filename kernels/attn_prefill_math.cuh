/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill_math.cuh - the prefill kernel's consumers: two warpgroups, each 64
 * query rows. A thread holds two rows' shares: row g and g + 8 of its warp's 16,
 * columns 8 j + 2 c and the next (g = lane / 4, c = lane % 4), of scores and of
 * output alike.
 */
#ifndef KVK_ATTN_PREFILL_MATH_CUH
#define KVK_ATTN_PREFILL_MATH_CUH

#include "kernels/attn_prefill.cuh"

#include <math.h>

#ifndef PF_TURNS
#define PF_TURNS(C) (C::DK <= 128)
#endif

template <class C> struct pf_state {
	float s[C::KEYS / 2]; /* scores, then probabilities */
	float o[C::OUT / 2];
	uint32_t p[C::KEYS / 4]; /* probabilities as bf16: the A operand of P V */
	float m[2];		 /* reference of the exponents */
	float l[2];		 /* this thread's share of the sums */
	float alpha[2];
	int lim[2]; /* tokens that the rows see, less this thread's first column */
};

KVK_DEV void pf_turn_wait(uint32_t wg)
{
	bar_sync(PF_BAR_TURN + wg, 256);
}

KVK_DEV void pf_turn_give(uint32_t wg)
{
	asm volatile("bar.arrive %0, 256;" ::"r"(PF_BAR_TURN + (wg ^ 1)) : "memory");
}

/* This warp is done with a stage. */
KVK_DEV void pf_release(uint64_t *empty)
{
	__syncwarp();
	if ((threadIdx.x & 31) == 0)
		mbar_arrive(empty);
}

/* s = Q K^T, one group */
template <class C> KVK_DEV void pf_qk(struct pf_state<C> &t, uint64_t q, uint64_t k)
{
	wgm_fence();
#pragma unroll
	for (int i = 0; i < C::DK / 16; i++) {
		uint32_t at = i / 4 * (PF_HALF / 16) + i % 4 * 2;

		wgm_ss<PF_KEYS, 0, C::FP8>(t.s, wgm_desc_at(q, at), wgm_desc_at(k, at),
					   i != 0);
	}
	wgm_commit();
}

/* o += P V, one group */
template <class C> KVK_DEV void pf_pv(struct pf_state<C> &t, uint64_t v, bool first)
{
	wgm_fence();
#pragma unroll
	for (int i = 0; i < PF_KEYS / 16; i++)
		wgm_rs<C::DV, 1, C::FP8>(t.o, t.p + 4 * i, wgm_desc_at(v, i * 128),
					 i != 0 || !first);
	wgm_commit();
}

template <class C> KVK_DEV void pf_mask(struct pf_state<C> &t, int tile)
{
	const int lim0 = t.lim[0] - tile * C::KEYS, lim1 = t.lim[1] - tile * C::KEYS;

#pragma unroll
	for (int j = 0; j < C::KEYS / 8; j++) {
#pragma unroll
		for (int e = 0; e < 2; e++) {
			t.s[4 * j + e] = 8 * j + e < lim0 ? t.s[4 * j + e] : -INFINITY;
			t.s[4 * j + 2 + e] =
				8 * j + e < lim1 ? t.s[4 * j + 2 + e] : -INFINITY;
		}
	}
}

/*
 * FP8: a score becomes the exponent of what its token's V codes are multiplied with, which
 * is the probability times the V scale: s K_scale scale + log2(V_scale). A row's reference is
 * the largest of these, so that products in f16 have their best range whatever the scales.
 */
template <class C>
KVK_DEV void pf_scale(struct pf_state<C> &t, const struct pf_scales<C::KEYS> &sc)
{
	const float4 *k = (const float4 *)sc.k[threadIdx.x & 3];
	const float4 *v = (const float4 *)sc.log_v[threadIdx.x & 3];

#pragma unroll
	for (int j = 0; j < C::KEYS / 16; j++) {
		const float4 x = k[j], y = v[j];

		t.s[8 * j] = fmaf(t.s[8 * j], x.x, y.x);
		t.s[8 * j + 1] = fmaf(t.s[8 * j + 1], x.y, y.y);
		t.s[8 * j + 2] = fmaf(t.s[8 * j + 2], x.x, y.x);
		t.s[8 * j + 3] = fmaf(t.s[8 * j + 3], x.y, y.y);
		t.s[8 * j + 4] = fmaf(t.s[8 * j + 4], x.z, y.z);
		t.s[8 * j + 5] = fmaf(t.s[8 * j + 5], x.w, y.w);
		t.s[8 * j + 6] = fmaf(t.s[8 * j + 6], x.z, y.z);
		t.s[8 * j + 7] = fmaf(t.s[8 * j + 7], x.w, y.w);
	}
}

/* FP8: the sums are of probabilities, what a value is multiplied with over its V scale. */
template <class C>
KVK_DEV void pf_sum(struct pf_state<C> &t, const struct pf_scales<C::KEYS> &sc)
{
	const float4 *inv = (const float4 *)sc.inv_v[threadIdx.x & 3];
	float x[4] = {0.f, 0.f, 0.f, 0.f};

#pragma unroll
	for (int j = 0; j < C::KEYS / 16; j++) {
		const float4 y = inv[j];

#pragma unroll
		for (int r = 0; r < 2; r++) {
			x[r] = fmaf(t.s[8 * j + 2 * r], y.x, x[r]);
			x[2 + r] = fmaf(t.s[8 * j + 2 * r + 1], y.y, x[2 + r]);
			x[r] = fmaf(t.s[8 * j + 4 + 2 * r], y.z, x[r]);
			x[2 + r] = fmaf(t.s[8 * j + 5 + 2 * r], y.w, x[2 + r]);
		}
	}
	t.l[0] += x[0] + x[2];
	t.l[1] += x[1] + x[3];
}

template <class C> KVK_DEV float pf_exp(float s, float scale, float neg)
{
	return exp2_fast(C::FP8 ? s + neg : fmaf(s, scale, neg));
}

/*
 * Scores to probabilities 2^(s scale - m scale). The reference m moves only when a score
 * passes it by 2^PF_SLACK: alpha is 1 nearly always. What happens to a row depends on the
 * row alone, so that a row's bits do not depend on its neighbours. FP8: scores are scaled
 * already, and pf_sum() adds them up.
 */
template <class C>
KVK_DEV void pf_softmax(struct pf_state<C> &t, float scale, float slack)
{
	float neg[2];

#pragma unroll
	for (int r = 0; r < 2; r++) {
		float x = t.s[2 * r], y = t.s[2 * r + 1], mn;

#pragma unroll
		for (int j = 1; j < C::KEYS / 8; j++) {
			x = fmaxf(x, t.s[4 * j + 2 * r]);
			y = fmaxf(y, t.s[4 * j + 2 * r + 1]);
		}
		x = fmaxf(x, y);
		x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
		x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
		mn = x > t.m[r] + slack ? x : t.m[r];
		neg[r] = mn == -INFINITY ? 0.f : -mn * scale;
		t.alpha[r] = mn == t.m[r] ? 1.f : exp2_fast(t.m[r] * scale + neg[r]);
		t.m[r] = mn;
	}
#pragma unroll
	for (int r = 0; r < 2; r++) {
		float x = 0.f, y = 0.f;

#pragma unroll
		for (int j = 0; j < C::KEYS / 8; j++) {
			float a = pf_exp<C>(t.s[4 * j + 2 * r], scale, neg[r]);
			float b = pf_exp<C>(t.s[4 * j + 2 * r + 1], scale, neg[r]);

			t.s[4 * j + 2 * r] = a;
			t.s[4 * j + 2 * r + 1] = b;
			if (!C::FP8) {
				x += a;
				y += b;
			}
		}
		t.l[r] = t.l[r] * t.alpha[r] + (x + y);
	}
}

template <class C> KVK_DEV void pf_pack(struct pf_state<C> &t)
{
#pragma unroll
	for (int i = 0; i < C::KEYS / 4; i++)
		t.p[i] = C::FP8 ? pack_f16(t.s[2 * i], t.s[2 * i + 1])
				: pack_bf16(t.s[2 * i], t.s[2 * i + 1]);
}

template <class C> KVK_DEV void pf_rescale(struct pf_state<C> &t)
{
	if (!__any_sync(~0u, t.alpha[0] != 1.f || t.alpha[1] != 1.f))
		return;
#pragma unroll
	for (int i = 0; i < C::OUT / 4; i++) {
		t.o[2 * i] *= t.alpha[i & 1];
		t.o[2 * i + 1] *= t.alpha[i & 1];
	}
}

/* ------------------------------------------------------------------------------- output
 */

/* Four lanes of a quad hold words of four blocks each; lane c gets block c's four words. */
KVK_DEV uint4 pf_transpose(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3)
{
	const uint32_t c = threadIdx.x & 3;
	uint32_t x0, x1, y0, y1, r0, r1;

	/* lanes 0, 1 keep blocks 0, 1; lanes 2, 3 keep blocks 2, 3 */
	x0 = c & 2 ? a2 : a0;
	x1 = c & 2 ? a3 : a1;
	y0 = __shfl_xor_sync(~0u, c & 2 ? a0 : a2, 2);
	y1 = __shfl_xor_sync(~0u, c & 2 ? a1 : a3, 2);
	/* x: own lane's words of the two blocks, y: of lane c ^ 2 */
	r0 = __shfl_xor_sync(~0u, c & 1 ? x0 : x1, 1);
	r1 = __shfl_xor_sync(~0u, c & 1 ? y0 : y1, 1);
	x0 = c & 1 ? x1 : x0;
	y0 = c & 1 ? y1 : y0;
	/* x0: lane c, r0: c ^ 1, y0: c ^ 2, r1: c ^ 3 */
	a0 = c & 1 ? r0 : x0;
	a1 = c & 1 ? x0 : r0;
	a2 = c & 1 ? r1 : y0;
	a3 = c & 1 ? y0 : r1;
	return c & 2 ? make_uint4(a2, a3, a0, a1) : make_uint4(a0, a1, a2, a3);
}

/* Where row @row of the item's request and kv head goes. */
template <class C>
KVK_DEV uint16_t *pf_out(const struct pf_params &p, const struct pf_item &it,
			 uint32_t row)
{
	uint32_t t = row / p.group, h = row % p.group;

	return p.out +
	       (((size_t)it.r.q0 + t) * p.nr_q_heads + it.kv_head * p.group + h) * C::DV;
}

/* What the rows' sums are divided by; a row that sees nothing: 0 * inf, NaN as the reference. */
template <class C> KVK_DEV float2 pf_inverse(const struct pf_state<C> &t)
{
	float l0 = t.l[0], l1 = t.l[1];

	l0 += __shfl_xor_sync(~0u, l0, 1);
	l1 += __shfl_xor_sync(~0u, l1, 1);
	l0 += __shfl_xor_sync(~0u, l0, 2);
	l1 += __shfl_xor_sync(~0u, l1, 2);
	return make_float2(1.f / l0, 1.f / l1);
}

/* Rows @row and @row + 8, columns from @col0 on. */
template <class C>
KVK_DEV void pf_store(const struct pf_params &p, const struct pf_item &it, uint32_t row,
		      uint32_t col0, float2 inverse, struct pf_state<C> &t)
{
	const uint32_t c = threadIdx.x & 3;

#pragma unroll
	for (int r = 0; r < 2; r++) {
		const float inv = r ? inverse.y : inverse.x;
		const bool in = row + 8 * r < it.r.nr_rows;
		uint16_t *out = in ? pf_out<C>(p, it, row + 8 * r) + col0 : p.out;

#pragma unroll
		for (int b = 0; b < C::OUT / 32; b++) {
			uint32_t w[4];
			uint4 v;

#pragma unroll
			for (int k = 0; k < 4; k++) {
				int at = (4 * b + k) * 4 + 2 * r;

				w[k] = pack_bf16(t.o[at] * inv, t.o[at + 1] * inv);
			}
			v = pf_transpose(w[0], w[1], w[2], w[3]);
			if (in)
				*(uint4 *)(out + (4 * b + c) * 8) = v;
		}
	}
}

/* A request that failed its check: NaN, no page touched. */
template <class C>
KVK_DEV void pf_store_nan(const struct pf_params &p, const struct pf_item &it,
			  uint32_t wg)
{
	const uint32_t first = it.row0 + wg * PF_WG_ROWS;

	for (uint32_t i = threadIdx.x % 128; i < PF_WG_ROWS * C::DV / 8; i += 128) {
		uint32_t row = first + i / (C::DV / 8), c = i % (C::DV / 8);

		if (row < it.r.nr_rows)
			*(uint4 *)(pf_out<C>(p, it, row) + c * 8) = make_uint4(
				0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u);
	}
}

/* -------------------------------------------------------------------------------- items
 */

KVK_DEV uint32_t pf_phase(uint32_t n)
{
	return n / PF_STAGES & 1;
}

template <class C> KVK_DEV uint64_t pf_k_desc(struct pf_smem<C> *sm, uint32_t n)
{
	return wgm_desc(smem_addr(sm->k[n % PF_STAGES]));
}

template <class C> KVK_DEV uint64_t pf_v_desc(struct pf_smem<C> *sm, uint32_t n)
{
	return wgm_desc(smem_addr(sm->v[n % PF_STAGES]), PF_HALF);
}

/*
 * Wait for what comes next: K of tile n + 1, or V of the last tile. It stands between the
 * exponentials and the wait for P V, and the loop in it keeps the assembler from moving that
 * wait up: without it P V would be waited for before the first exponential.
 */
template <class C>
KVK_DEV void pf_wait_next(struct pf_state<C> &t, uint32_t n, bool more,
			  struct pf_smem<C> *sm)
{
	const uint32_t at = more ? n + 1 : n;
	uint64_t *bar = more ? &sm->k_full[at % PF_STAGES] : &sm->v_full[at % PF_STAGES];

	wgm_keep(t.s);
	wgm_keep(t.l);
	mbar_wait(bar, pf_phase(at));
}

/*
 * One tile after the first, whose K is there: Q K^T of tile @j and P V of the one before are
 * in flight together; the warpgroups take turns to issue, so that one's exponentials run
 * beside the other's products.
 */
template <class C, bool MASK>
KVK_DEV void pf_step(float scale, struct pf_state<C> &t, uint64_t q, uint32_t wg,
		     uint32_t j, uint32_t last, uint32_t n, float slack,
		     struct pf_smem<C> *sm)
{
	const uint32_t pn = n - 1;

	if (PF_TURNS(C))
		pf_turn_wait(wg);
	pf_qk<C>(t, q, pf_k_desc<C>(sm, n));
	mbar_wait(&sm->v_full[pn % PF_STAGES], pf_phase(pn));
	pf_pv<C>(t, pf_v_desc<C>(sm, pn), j == 1);
	if (PF_TURNS(C))
		pf_turn_give(wg);
	wgm_wait<1>();
	wgm_keep(t.s);
	if constexpr (C::FP8)
		pf_scale<C>(t, sm->scales[n % PF_SCALES]);
	pf_release(&sm->k_empty[n % PF_STAGES]);
	if (MASK && j == last)
		pf_release(&sm->q_empty[wg]);
	if (MASK)
		pf_mask<C>(t, (int)j);
	pf_softmax<C>(t, scale, slack);
	if constexpr (C::FP8)
		pf_sum<C>(t, sm->scales[n % PF_SCALES]);
	pf_wait_next<C>(t, n, j < last, sm);
	wgm_wait<0>();
	wgm_keep(t.o);
	pf_release(&sm->v_empty[pn % PF_STAGES]);
	pf_rescale<C>(t);
	pf_pack<C>(t);
}

template <class C>
KVK_DEV void pf_item_rows(const struct pf_params &p, const struct pf_item &it,
			  uint32_t wg, uint32_t *row, struct pf_state<C> &t,
			  uint32_t *ret_full)
{
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
	const uint32_t first = it.row0 + wg * PF_WG_ROWS;
	int all = it.r.first + (int)(first / p.group) + 1;

	*row = first + warp * 16 + lane / 4;
#pragma unroll
	for (int r = 0; r < 2; r++) {
		t.lim[r] = it.r.first + (int)((*row + 8 * r) / p.group) + 1 -
			   2 * (int)(lane % 4);
		t.m[r] = -INFINITY;
		t.l[r] = 0.f;
	}
	*ret_full = pf_uniform(all < 0 ? 0 : (uint32_t)all / C::KEYS);
}

template <class C>
KVK_DEV void pf_item_run(const struct pf_params &p, const struct pf_item &it, uint32_t wg,
			 uint32_t n0, uint32_t qn, struct pf_smem<C> *sm,
			 struct pf_state<C> &t)
{
	const uint64_t q = wgm_desc(smem_addr(sm->q[0]) + wg * PF_WG_ROWS * 128);
	const float scale = C::FP8 ? 1.f : p.scale, slack = PF_SLACK / scale;
	const uint32_t last = it.nr - 1;
	uint32_t row, full, j = 1;

	pf_item_rows<C>(p, it, wg, &row, t, &full);
	mbar_wait(&sm->q_full[wg], qn & 1);
	mbar_wait(&sm->k_full[n0 % PF_STAGES], pf_phase(n0));
	pf_qk<C>(t, q, pf_k_desc<C>(sm, n0));
	wgm_wait<0>();
	wgm_keep(t.s);
	if constexpr (C::FP8)
		pf_scale<C>(t, sm->scales[n0 % PF_SCALES]);
	pf_release(&sm->k_empty[n0 % PF_STAGES]);
	if (last == 0)
		pf_release(&sm->q_empty[wg]);
	if (full == 0)
		pf_mask<C>(t, 0);
	pf_softmax<C>(t, scale, slack);
	if constexpr (C::FP8)
		pf_sum<C>(t, sm->scales[n0 % PF_SCALES]);
	pf_wait_next<C>(t, n0, last > 0, sm);
	pf_pack<C>(t);
	for (; j < full && j < last; j++)
		pf_step<C, false>(scale, t, q, wg, j, last, n0 + j, slack, sm);
	for (; j <= last; j++)
		pf_step<C, true>(scale, t, q, wg, j, last, n0 + j, slack, sm);
	pf_pv<C>(t, pf_v_desc<C>(sm, n0 + last), last == 0);
	wgm_wait<0>();
	wgm_keep(t.o);
	pf_release(&sm->v_empty[(n0 + last) % PF_STAGES]);
	pf_store<C>(p, it, row, 0, pf_inverse<C>(t), t);
}

template <class C>
KVK_DEV void pf_consume(const struct pf_params &p, uint32_t wg, struct pf_smem<C> *sm)
{
	struct pf_walk w = {};
	struct pf_item it;
	struct pf_state<C> t = {
	};
	uint32_t nr_q = 0, nr_kv = 0; /* consumed so far: they number the stages */

	if (PF_TURNS(C) && wg == 1)
		pf_turn_give(wg); /* the first warpgroup begins */
	while (pf_next<C>(p, &sm->sched, &w, &it)) {
		if (!it.r.ok) {
			pf_store_nan<C>(p, it, wg);
			continue;
		}
		pf_item_run<C>(p, it, wg, nr_kv, nr_q++, sm, t);
		nr_kv += it.nr;
	}
}

#endif /* KVK_ATTN_PREFILL_MATH_CUH */
