/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill_mla.cuh - parts of the prefill kernel for MLA pages in absorbed form;
 * attn_prefill_mla.cu explains it.
 */
#ifndef KVK_ATTN_PREFILL_MLA_CUH
#define KVK_ATTN_PREFILL_MLA_CUH

#include "kernels/attn_prefill_feed.cuh"
#include "kernels/attn_prefill_math.cuh"

template <bool FP8_> struct pf_mla {
	static constexpr int DK = 576; /* latent, rope */
	static constexpr int DV = 512;
	static constexpr bool PAGED = true;
	static constexpr bool FP8 = FP8_;
	static constexpr int ROWS = 64;
	static constexpr int KEYS = 64; /* a page */
	static constexpr int OUT = 256; /* values of a row that a warpgroup holds */
	static constexpr int KH = DK / 64;
	static constexpr uint32_t HALF = PF_BOX;
	static constexpr uint32_t BATCH = FP8 ? 20 : 64; /* what is left of an SM */
	static constexpr uint32_t FEEDERS = FP8 ? 4 : 1; /* warps that fill a tile */
	static constexpr uint32_t Q_FEEDERS = FP8 ? 4 : 2;
	static constexpr uint32_t REGS_FEED = FP8 ? 96 : 40;
	static constexpr uint32_t REGS_SCORE = 232;
	static constexpr uint32_t REGS_VALUE = FP8 ? 176 : 232;
	static_assert(REGS_FEED + REGS_SCORE + REGS_VALUE <= PF_REGS,
		      "they would wait for ever");
};

template <class C> struct pf_mla_smem {
	uint8_t q[C::KH][PF_BOX];
	uint8_t kv[PF_STAGES][C::KH][PF_BOX];
	uint8_t p[PF_BOX]; /* [row][token] */
	float factor[64];  /* of the rows: alpha, behind the last tile 1 / sum */
	struct pf_scales<C::FP8 ? C::KEYS : 4> scales[C::FP8 ? PF_STAGES : 1];
	struct pf_sched<C> sched;
	uint64_t full[PF_STAGES];
	uint64_t empty[PF_STAGES];
	uint64_t tail; /* a page that is not full has landed */
	uint64_t q_full;
	uint64_t q_empty;
	uint64_t p_full; /* p and factor */
	uint64_t p_empty;
};

/* -------------------------------------------------------------------------- producers */

/* Rows [valid, 64) of a tile become zero: as V they meet probabilities of 0. All lanes. */
template <class C> KVK_DEV void pf_mla_clear(uint32_t tile, uint32_t valid)
{
	for (uint32_t i = threadIdx.x & 31; i < (64 - valid) * (C::DK / 8); i += 32)
		asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(
				     tile + pf_swizzle<C>(valid + i / (C::DK / 8),
							  i % (C::DK / 8))),
			     "r"(0)
			     : "memory");
	fence_proxy_async();
	__syncwarp();
}

template <class C>
KVK_DEV void pf_mla_load(const struct pf_params &p, struct pf_feed *f, uint32_t tile,
			 struct pf_mla_smem<C> *sm)
{
	const uint32_t s = f->kn % PF_STAGES, t0 = tile * KV_PAGE_TOKENS;
	const uint32_t valid = f->it.r.len <= t0 ? 0 : min(f->it.r.len - t0, 64u);
	uint64_t *bar = valid == 64 ? &sm->full[s] : &sm->tail;
	const bool one = (threadIdx.x & 31) == 0;

	mbar_wait(&sm->empty[s], (f->kn++ / PF_STAGES & 1) ^ 1);
	if (valid) {
		uint32_t pfn = pf_pfn(p, f, tile);
		int c2 = (int)(pfn & ((1u << p.shift) - 1)), c3 = (int)(pfn >> p.shift);

		if (one) {
			mbar_arrive_expect(bar, C::KH * PF_BOX);
#pragma unroll
			for (int h = 0; h < C::KH - 1; h++)
				pf_box(&p.k, sm->kv[s][h], bar, h * 64, 0, c2, c3);
			pf_box(&p.rope, sm->kv[s][C::KH - 1], bar, 0, 0, c2, c3);
		}
		if (valid < 64)
			mbar_wait(&sm->tail, f->vn++ & 1);
	}
	if (valid == 64)
		return;
	pf_mla_clear<C>(smem_addr(sm->kv[s][0]), valid);
	if (one)
		mbar_arrive(&sm->full[s]);
}

template <class C>
KVK_DEV void pf_mla_feed(const struct pf_params &p, struct pf_mla_smem<C> *sm)
{
	struct pf_walk w = {};
	struct pf_feed f = {};

	while (pf_next<C>(p, &sm->sched, &w, &f.it)) {
		if (!f.it.r.ok)
			continue;
		pf_feed_start<C>(p, &f);
		for (uint32_t j = 0; j < f.it.nr; j++)
			pf_mla_load<C>(p, &f, j, sm);
	}
}

/* Half @half of the queries' rows. */
template <class C>
KVK_DEV void pf_mla_feed_q(const struct pf_params &p, uint32_t half,
			   struct pf_mla_smem<C> *sm)
{
	struct pf_walk w = {};
	struct pf_item it;
	uint32_t n = 0;

	while (pf_next<C>(p, &sm->sched, &w, &it)) {
		if (!it.r.ok)
			continue;
		mbar_wait(&sm->q_empty, (n++ & 1) ^ 1);
		pf_load_q<C>(p, it, half * 32, 32, &sm->q_full, smem_addr(sm->q[0]));
	}
}

/* -------------------------------------------------------------------------- consumers */

/* s = Q K^T, one group */
template <class C> KVK_DEV void pf_mla_qk(struct pf_state<C> &t, uint64_t q, uint64_t k)
{
	wgm_fence();
#pragma unroll
	for (int i = 0; i < C::DK / 16; i++) {
		uint32_t at = i / 4 * (PF_BOX / 16) + i % 4 * 2;

		wgm_ss<64, 0, C::FP8>(t.s, wgm_desc_at(q, at), wgm_desc_at(k, at),
				      i != 0);
	}
	wgm_commit();
}

/* Probabilities and the rows' factors to the other warpgroup. */
template <class C>
KVK_DEV void pf_mla_give(const struct pf_state<C> &t, float2 factor, bool probs,
			 uint32_t n, struct pf_mla_smem<C> *sm)
{
	const uint32_t lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
	const uint32_t row = threadIdx.x / 32 % 4 * 16 + g;
	const uint32_t at = smem_addr(sm->p) + row * 128 + c * 4;

	mbar_wait(&sm->p_empty, (n & 1) ^ 1);
#pragma unroll
	for (uint32_t j = 0; probs && j < 8; j++) {
		asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + (j ^ g) * 16),
			     "r"(t.p[2 * j])
			     : "memory");
		asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + 8 * 128 + (j ^ g) * 16),
			     "r"(t.p[2 * j + 1])
			     : "memory");
	}
	if (c == 0) {
		sm->factor[row] = factor.x;
		sm->factor[row + 8] = factor.y;
	}
	fence_proxy_async();
	pf_release(&sm->p_full);
}

/* First warpgroup: scores, and values 0..255. */
template <class C>
KVK_DEV void pf_mla_score(const struct pf_params &p, struct pf_mla_smem<C> *sm)
{
	const uint64_t q = wgm_desc(smem_addr(sm->q[0]));
	const float scale = C::FP8 ? 1.f : p.scale, slack = PF_SLACK / scale;
	uint32_t n = 0, np = 0, nr_q = 0, row, full;
	struct pf_state<C> t = {
	};
	struct pf_walk w = {};
	struct pf_item it;

	while (pf_next<C>(p, &sm->sched, &w, &it)) {
		if (!it.r.ok) {
			pf_store_nan<C>(p, it, 0);
			continue;
		}
		pf_item_rows<C>(p, it, 0, &row, t, &full);
		mbar_wait(&sm->q_full, nr_q++ & 1);
		for (uint32_t j = 0; j < it.nr; j++, n++) {
			const uint32_t kv = smem_addr(sm->kv[n % PF_STAGES][0]);

			mbar_wait(&sm->full[n % PF_STAGES], pf_phase(n));
			pf_mla_qk<C>(t, q, wgm_desc(kv));
			wgm_wait<0>();
			wgm_keep(t.s);
			wgm_keep(t.o);
			if (j > 0)
				pf_release(&sm->empty[(n - 1) % PF_STAGES]);
			if (j == it.nr - 1)
				pf_release(&sm->q_empty);
			if constexpr (C::FP8)
				pf_scale<C>(t, sm->scales[n % PF_STAGES]);
			if (j >= full)
				pf_mask<C>(t, (int)j);
			pf_softmax<C>(t, scale, slack);
			pf_pack<C>(t);
			pf_mla_give<C>(t, make_float2(t.alpha[0], t.alpha[1]), true, np++,
				       sm);
			if (j > 0)
				pf_rescale<C>(t);
			wgm_fence();
#pragma unroll
			for (int i = 0; i < 4; i++)
				wgm_rs<256, 1, C::FP8>(
					t.o, t.p + 4 * i,
					wgm_desc_at(wgm_desc(kv, PF_BOX), i * 128),
					i != 0 || j != 0);
			wgm_commit();
			if constexpr (C::FP8)
				pf_sum<C>(t, sm->scales[n % PF_STAGES]);
		}
		wgm_wait<0>();
		wgm_keep(t.o);
		pf_release(&sm->empty[(n - 1) % PF_STAGES]);
		pf_mla_give<C>(t, pf_inverse<C>(t), false, np++, sm);
		pf_store<C>(p, it, row, 0, pf_inverse<C>(t), t);
	}
}

/* Second warpgroup: values 256..511. */
template <class C>
KVK_DEV void pf_mla_value(const struct pf_params &p, struct pf_mla_smem<C> *sm)
{
	const uint32_t local = threadIdx.x / 32 % 4 * 16 + (threadIdx.x & 31) / 4;
	const uint64_t probs = wgm_desc(smem_addr(sm->p));
	uint32_t n = 0, np = 0;
	struct pf_state<C> t = {
	};
	struct pf_walk w = {};
	struct pf_item it;
	float2 f;

	while (pf_next<C>(p, &sm->sched, &w, &it)) {
		if (!it.r.ok)
			continue;
		for (uint32_t j = 0; j < it.nr; j++, n++) {
			const uint32_t v = smem_addr(sm->kv[n % PF_STAGES][4]);

			mbar_wait(&sm->p_full, np++ & 1);
			mbar_wait(&sm->full[n % PF_STAGES], pf_phase(n));
			t.alpha[0] = sm->factor[local];
			t.alpha[1] = sm->factor[local + 8];
			if (j > 0)
				pf_rescale<C>(t);
			wgm_fence();
#pragma unroll
			for (int i = 0; i < 4; i++)
				wgm_ss<256, 1, C::FP8>(
					t.o, wgm_desc_at(probs, i * 2),
					wgm_desc_at(wgm_desc(v, PF_BOX), i * 128),
					i != 0 || j != 0);
			wgm_commit();
			wgm_wait<0>();
			wgm_keep(t.o);
			pf_release(&sm->p_empty);
			pf_release(&sm->empty[n % PF_STAGES]);
		}
		mbar_wait(&sm->p_full, np++ & 1);
		f = make_float2(sm->factor[local], sm->factor[local + 8]);
		pf_release(&sm->p_empty);
		pf_store<C>(p, it, it.row0 + local, 256, f, t);
	}
}

#endif /* KVK_ATTN_PREFILL_MLA_CUH */
