/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla.cu - paged decode attention on the absorbed latent cache, FP8 and BF16 pages,
 * up to 16 query rows a CTA (8 or 16 heads; more rows are cut into blocks of 16).
 *
 * Budget (H200: 18.6 bytes per clock and SM). A *piece* is a page: latent [64][512], rope
 * [64][64] and scales, 37,120 bytes of FP8, one bulk copy, 2,000 clocks of memory time.
 * For 8 query rows: matrix   144 mma.m16n8k16 for the scores, 128 for the values: about
 * 450 clocks convert  36,864 + 32,768 values at 96 per clock: 725 clocks shared   37 KB
 * in, 36 KB out as keys, 32 KB out as values: 830 of 128 bytes per clock so memory is the
 * wall; 16 rows double the first line only.
 *
 * Structure. One CTA per SM walks its segments (attn_plan.cuh). The operands are swapped:
 * tokens are M, query rows are N, so that 8 rows waste nothing. Three roles, no barrier
 * between the warps inside a segment: producer  one warp copies pieces into the ring;
 *   scores    4 warps, 16 tokens of the piece each: S = K Q^T with Q in registers,
 * scales, mask, own reference (an integer, in log2 units, raised to the largest score when
 * one is more than 2^6 above it), P to shared memory; values    4 warps, 128 latent dims
 * each: O^T += V^T P^T. The score warps' references differ by whole powers of two, so
 * bringing P to a common one is exact. P has two buffers, so scores of the next piece run
 * beside values of this one. With 8 rows there are 8 and 8 warps, and two teams of score
 * warps take pieces in turn. Not memory but the value warps set the pace where pages come
 * together, so only two are on their way then.
 *
 * Keys become the M operand by plain 16-byte reads and conversion (the order of dims in
 * the k-steps is permuted, Q alike); odd token rows read their two chunks in the other
 * order, which keeps the reads free of bank conflicts. Values: bytes as 16-bit pairs
 * through movmatrix, one byte permute and two conversions. The latent scale multiplies
 * score and probability (relative to a power of two near the largest scale so far), the rope
 * scale its part of the score. Slots and their merge with 8 rows: attn_mla_few.cuh. Tour 10/12.
 */
#include "kernels/attn_mla_value.cuh"

#include <errno.h>
#include <math.h>

/*
 * The CTA's end: its cut units. With 8 rows by the value warps, with 16 by all. Then the ring is
 * empty and serves as scratch.
 */
template <int NTL, bool FP8>
KVK_DEV void finish_cta(const struct attn_params &p, mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;
	constexpr int FIRST = NTL == 1 ? C::NR_SCORE * 32 : 0;
	constexpr int NR = C::NR_WARPS * 32 - FIRST;
	const int tid = threadIdx.x - FIRST;

	bar_sync(BAR_ALL, NR);
	for (int i = 0; i < 2; i++) {
		const struct plan_pending *pend = &sm->pend[i];
		uint32_t rows = pend->s.q_len * p.nr_q_heads - pend->s.hblk * 8 * NTL;

		if (!pend->epoch)
			continue;
		if constexpr (NTL == 1)
			few_finish<FP8>(p, pend, (struct few_scratch *)sm->ring,
					&sm->flag, tid, BAR_ALL);
		else
			plan_finish<LATENT, mla_row_elem, 1>(
				p, pend, 8 * NTL, min(8u * NTL, rows),
				pend->s.nr_parts * C::NR_VALUE,
				(struct plan_part *)sm->ring, &sm->flag, tid, BAR_ALL,
				NR);
	}
}

/* One thread. */
template <int NTL, bool FP8> KVK_DEV void init_shared(mla_smem<NTL, FP8> *sm)
{
	using C = mla_cfg<NTL, FP8>;

	for (int i = 0; i < C::STAGES; i++) {
		mbar_init(&sm->full[i], 1);
		mbar_init(&sm->empty[i], 4 + C::NR_VALUE);
	}
	for (int i = 0; i < 2; i++) {
		mbar_init(&sm->p_full[i], 4);
		mbar_init(&sm->p_empty[i], C::NR_VALUE);
		mbar_init(&sm->fin_full[i], C::NR_SCORE);
		mbar_init(&sm->fin_empty[i], C::NR_VALUE);
		sm->pend[i].epoch = sm->pend[i].last = 0;
	}
	sm->issued = sm->segs_in = sm->q_read = 0;
	sm->written[0] = sm->written[1] = 0;
	for (int i = 0; i < C::NR_WARPS; i++)
		sm->segs_done[i] = 0;
	mbar_init_fence();
}

template <int NTL, bool FP8>
__global__ void __launch_bounds__(mla_cfg<NTL, FP8>::NR_THREADS, 1)
	attn_mla_kernel(const __grid_constant__ struct attn_params p)
{
	using C = mla_cfg<NTL, FP8>;
	DEV_DYNAMIC_SHARED_1K(smem_raw);
	/* a constant, so that addresses are: nothing to compute or keep in the loops */
	mla_smem<NTL, FP8> *sm = (mla_smem<NTL, FP8> *)__cvta_shared_to_generic(SMEM_AT);
	const uint32_t warp = threadIdx.x / 32;
	uint32_t touched = 0;
	uint64_t step = 0;

	if (smem_addr(smem_raw) != SMEM_AT)
		__trap();
	plan_enter(p);
	if (warp == C::NR_WARPS) {
		touched = plan_touch(p);
		step = *p.step;
		if (threadIdx.x % 32 == 0)
			init_shared<NTL, FP8>(sm);
	}
	__syncthreads();
	if (warp >= C::NR_WARPS) {
		regs_dec<C::REGS_REST>();
		if (warp == C::NR_WARPS) {
			const uint32_t early = begin(p, touched, step, sm);

			produce(p, p.mem.ctas[blockIdx.x], plan_count(touched), step,
				early, sm);
		}
	} else if (warp < C::NR_SCORE) {
		regs_inc<C::REGS_SCORE>();
		score_warp<NTL, FP8>(p, sm);
		if constexpr (NTL != 1)
			finish_cta<NTL, FP8>(p, sm);
	} else {
		if constexpr (C::TEAMS == 1)
			regs_inc<C::REGS_VALUE>();
		else
			regs_dec<C::REGS_VALUE>();
		value_warp<NTL, FP8>(p, sm);
		finish_cta<NTL, FP8>(p, sm);
	}
}

/* ------------------------------------------------------------------------------ launcher
 */

template <int NTL, bool FP8>
static int launch(const struct attn_params *p, uint32_t nr_ctas, cudaStream_t stream)
{
	const size_t smem = sizeof(mla_smem<NTL, FP8>);
	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};

	static_assert(sizeof(mla_smem<NTL, FP8>) <= 227 * 1024, "too much shared memory");
	if (cudaFuncSetAttribute(attn_mla_kernel<NTL, FP8>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)smem) != cudaSuccess)
		return -EIO;
	attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr.val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(nr_ctas);
	cfg.blockDim = dim3(mla_cfg<NTL, FP8>::NR_THREADS);
	cfg.dynamicSmemBytes = smem;
	cfg.stream = stream;
	cfg.attrs = &attr;
	cfg.numAttrs = 1;
	if (cudaLaunchKernelEx(&cfg, attn_mla_kernel<NTL, FP8>, *p) != cudaSuccess)
		return -EIO;
	return 0;
}

/* The schedule's shape; false if the fast kernel does not build it. */
static bool mla_shape(const struct kvk_attn_args *a, struct plan_shape *ret_s)
{
	const struct kv_layout *l = &a->pages.layout;
	uint32_t rows = a->nr_q_heads * a->batch.q_len_max;
	struct plan_shape s = {};

	if (l->kind != KV_LAYOUT_MLA || !rows || a->nr_q_heads > 128 ||
	    a->batch.q_len_max > 4 || l->latent_dim != LATENT || l->rope_dim != ROPE ||
	    l->dtype == KV_DTYPE_F32)
		return false;
	s.nr_ctas = (uint32_t)plan_nr_ctas();
	s.unit_rows = rows <= 8 ? 8 : rows <= 16 ? 16 : 64; /* wgmma wants 64 rows */
	s.nr_heads = (rows + s.unit_rows - 1) / s.unit_rows;
	s.hbs_max = 1;
	s.tiles_min = a->flags >> 24 & 15;
	if (!s.tiles_min)
		s.tiles_min = 1;
	s.q_rows = a->nr_q_heads;
	s.row_dim = s.unit_rows == 64 ? LATENT / 2 : LATENT; /* attn_mla_slot.cuh */
	*ret_s = s;
	return s.nr_ctas > 0;
}

/*
 * May the schedule cut every unit in two, as it does where run borders can fall on unit borders
 * (choose_ctas())? Lengths are not known here; a step that is cut in another way is merged by slots.
 */
static bool mla_pairs(const struct kvk_attn_args *a, const struct plan_shape *s)
{
	const uint32_t units = a->batch.nr_requests * s->nr_heads;

	return s->nr_ctas % 2 == 0 && 2 * units <= s->nr_ctas &&
	       2 * units > s->nr_ctas - s->nr_ctas / 8 && !(a->flags & KVK_ATTN_NO_PAIRS);
}

size_t kvk_attn_mla_workspace(const struct kvk_attn_args *a)
{
	struct plan_shape s;

	return mla_shape(a, &s) ? plan_workspace(a, &s, NULL) : 0;
}

/**
 * kvk_attn_mla_cuda() - see struct kvk_attn_args
 * Context: any thread; the verdicts were written earlier on the same stream.
 * Return: 0, -EINVAL for a shape that is not built or a short workspace, -EIO.
 */
int kvk_attn_mla_cuda(const struct kvk_attn_args *a, kvk_stream stream)
{
	const bool fp8 = a->pages.layout.dtype == KV_DTYPE_E4M3;
	cudaStream_t st = (cudaStream_t)stream;
	struct attn_params p;
	struct plan_shape s;
	int r;

	if (a->pages.layout.kind != KV_LAYOUT_MLA || a->batch.q_len_max > 4)
		return -EINVAL;
	/* masked scores are -Inf before they are scaled */
	if (!mla_shape(a, &s) || !(a->sm_scale > 0.f))
		return kvk_attn_any_cuda(a, stream);
	r = plan_params(a, &p);
	if (r)
		return r;
	/* measured: pages that are asked for together come together, behind them all the queries, and
	 * who adds them up takes as long for one as memory; so few keep memory as busy as three */
	if (s.unit_rows == 8 && !(a->flags >> 16 & 15))
		p.flight = fp8 ? 2 : 1;
	if (a->workspace_bytes < plan_workspace(a, &s, &p.mem))
		return -EINVAL;
	if (!(a->flags & KVK_ATTN_PLAN))
		r = plan_launch(a, &s, &p.mem, st);
	if (r)
		return r;
	if (s.unit_rows == 64 && fp8 && p.flags & KVK_ATTN_FAST)
		return mla_fast_launch(&p, s.nr_ctas, mla_pairs(a, &s), st);
	if (s.unit_rows == 64 && fp8)
		return mla_reg_launch(&p, s.nr_ctas, mla_pairs(a, &s), st);
	if (s.unit_rows == 64)
		return mla_tile_launch(&p, s.nr_ctas, mla_pairs(a, &s), st);
	if (s.unit_rows == 8)
		return fp8 ? launch<1, true>(&p, s.nr_ctas, st)
			   : launch<1, false>(&p, s.nr_ctas, st);
	return fp8 ? launch<2, true>(&p, s.nr_ctas, st)
		   : launch<2, false>(&p, s.nr_ctas, st);
}
