/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_gqa.cu - paged decode attention for grouped queries, FP8 and BF16 pages.
 *
 * Budget (H200, 132 SMs at about 1.9 GHz, 4.66 TB/s: 18.6 bytes per clock and SM). A
 * *piece* is one kv head of a page: K [64][128] and V [64][128] of e4m3 are 16 KB and
 * take 880 clocks of memory time. Work per piece, for up to 16 query rows of the kv head:
 *   matrix   64 mma.m16n8k16 for Q K^T and 64 for P V: about 210 clocks at the mma.sync
 * rate convert  16,384 values at 96 per clock: 171 clocks shared   16 KB in by the copy
 * engine, 16 KB out as operands: 256 of 128 bytes per clock issue    about 760 warp
 * instructions of 3,520 issue slots so memory is the wall and everything else has room,
 * if nothing stalls the copies.
 *
 * Structure. One CTA per SM walks its segments of the step's schedule (attn_plan.cuh). A
 * producer warp copies pieces into a ring of stages (one bulk copy of 16 KB, 256 bytes of
 * scales by a second). Tensor copies would land swizzled, but they were measured 7 %
 * slower than plain bulk copies of the same bytes. Eight consumer warps take pieces in
 * turn, a whole piece each, and keep their own m, l and O: no barrier between warps
 * inside a segment, and while they work ten more pieces are on their way. More than 16
 * query rows (drafts) use 2 to 4 warps a piece. Copies may land out of order, so a warp
 * first sees that its piece was issued (then the stage's barrier is in the right round)
 * and then waits for its bytes.
 *
 * FP8 operands are built in registers. Lane (g, c) reads 16-byte chunks of token row g. Q
 * K^T: heads are M, tokens are N; the order of head_dim values inside the k-steps is
 * permuted, and Q is permuted alike. P V: bytes taken as 16-bit pairs go through
 * movmatrix, which gives tokens 2c, 2c + 1 and two dims; one byte permute and two
 * conversions make the (k, k + 1) pairs of two operand registers. The K scale multiplies
 * the score, the V scale the probability, relative to one near the largest so far, so that
 * P stays in the good range of f16.
 *
 * At a segment's end the warps of a head merge through shared memory in a fixed order
 * (attn_gqa_merge.cuh). A unit cut between CTAs goes on in plan_finish(), in steps of
 * few units in quick_finish(). There a segment's last pieces have two warps each, half the tokens
 * a warp, and all warps take the queries from shared memory. The next segment's
 * description and queries are read while the last one is being merged. Tour 10/12.
 */
#include "kernels/attn_gqa_merge.cuh"

#include <errno.h>
#include <math.h>

/* The warp's end of a segment: merge, write, and count a split unit's part in. */
template <int HD, bool FP8, bool QUICK>
KVK_DEV void finish_segment(const struct attn_params &p, const struct gqa_seg &g,
			    const struct gqa_role &role, uint32_t nth, gqa_acc<HD> &acc,
			    gqa_smem<HD, FP8> *sm, float sv)
{
	const struct plan_seg &s = g.s;

	settle<HD>(acc, sv);
	if (g.hbs == 1 && role.nm == 1) {
		merge_wide<HD, FP8, QUICK>(p, g, acc, sm);
		if (QUICK && s.nr_parts > 1 && threadIdx.x < 32)
			quick_arrive(s, &sm->quick[s.part == 0]);
		else if (s.nr_parts > 1 && threadIdx.x < 32)
			plan_arrive(p, s, s.nr_parts, &sm->pend[s.part == 0]);
		return;
	}
	if (QUICK) /* one head, 16 rows */
		return;
	if (!merge_warps<HD, FP8>(role, g.hbs, nth, role.slot < g.nr_pieces, acc, sm))
		return;
	if (g.poisoned)
		spoil<HD>(acc);
	write_rows<HD, FP8>(p, g, acc, role.slot % g.hbs, role.row0);
	if (s.nr_parts > 1)
		plan_arrive(p, s, s.nr_parts * g.hbs * role.nm, &sm->pend[s.part == 0]);
}

/*
 * One warp's pieces of a segment among @from .. @to - 1; a warp takes 8 JT tokens of a piece. @seq: ring
 * position of the segment's first piece.
 */
template <int HD, bool FP8, bool QUICK, int JT>
KVK_DEV void consume_pieces(const struct attn_params &p, const struct gqa_seg &g,
			    const struct gqa_role &role, uint32_t seq, uint32_t from,
			    uint32_t to, const uint32_t (*qf)[4], gqa_acc<HD> &acc,
			    struct gqa_piece &pc, gqa_smem<HD, FP8> *sm)
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31;

	for (uint32_t i = from + role.slot; i < to && !role.idle; i += role.slots) {
		const struct ring_at at = ring_pos<HD, FP8>(seq + i, g.hbs == role.slots);
		uint32_t stage = at.stage, phase = at.round & 1;
		int32_t first = (int32_t)((g.s.page0 + i / g.hbs) * KV_PAGE_TOKENS);
		int32_t valid = (int32_t)g.s.len - first;

		spin_until(&sm->issued, seq + i);
		mbar_wait(&sm->full[C::PAIR && g.hbs >= 2 ? stage & ~1u : stage], phase);
		if (!(p.flags & KVK_ATTN_LOADS)) {
			float s[JT][4];
			uint32_t a[JT / 2][4], lo[JT / 2][4];

			pc.k_addr = smem_addr(sm->ring[stage]) + role.tok0 * C::RB;
			pc.v_addr = pc.k_addr + C::PIECE / 2;
			pc.sc_addr = smem_addr(sm->scales[stage]) + role.tok0 * 2;
			pc.tail =
				valid - (int32_t)g.s.q_len + 1 < (int32_t)KV_PAGE_TOKENS;
#pragma unroll
			for (int h = 0; h < 2; h++) {
				uint32_t row = role.row0 + lane / 4 + 8 * h;

				pc.limit[h] = valid - (int32_t)g.s.q_len + 1 -
					      (int32_t)role.tok0 +
					      (int32_t)(row / p.group);
			}
			if (valid < (int32_t)KV_PAGE_TOKENS)
				zero_tail<HD, FP8>(sm->ring[stage], sm->scales[stage],
						   valid, role.tok0, role.tok0 + 8 * JT);
			scores<HD, FP8, JT>(pc.k_addr, qf, s);
			softmax<HD, FP8, JT>(p, pc, s, acc, a, lo);
			values<HD, FP8, JT>(pc.v_addr, a, lo, acc.o);
		}
		__syncwarp();
		if (lane == 0)
			mbar_arrive(&sm->empty[stage]);
		if (QUICK && JT == 8 && lane == 0) /* for the other half */
			mbar_arrive(&sm->empty[stage]);
	}
}

/*
 * The first pieces of a segment that have a warp each: all, but in a step of few units the last 9 to 16
 * have two, so that the very last one takes half the time. (Two for all: 1 x 4k 2 % slower.)
 */
template <bool QUICK> KVK_DEV uint32_t whole_pieces(uint32_t nr)
{
	if (!QUICK)
		return nr;
	return nr > 2 * NR_WARPS ? (nr - 1) / NR_WARPS * NR_WARPS - NR_WARPS : 0;
}

/* The CTA's end: its cut units, by all consumers. */
template <int HD, bool FP8, bool QUICK>
KVK_DEV void finish_cta(const struct attn_params &p, const struct gqa_role &role,
			gqa_smem<HD, FP8> *sm)
{
	bar_sync(BAR_ALL, NR_WARPS * 32);
	for (int i = 0; i < 2; i++) {
		const struct plan_pending *pend = &sm->pend[i];
		uint32_t hbs = sm->hbs;

		if (QUICK && sm->quick[i].arrived)
			quick_finish<HD, gqa_row_elem<HD>, 1>(
				p, &sm->quick[i], sm->quick[i].s.q_len * p.group,
				(struct plan_part *)sm->part, &sm->flag, threadIdx.x,
				BAR_ALL, NR_WARPS * 32);
		if (!QUICK && pend->epoch)
			plan_finish<HD, gqa_row_elem<HD>, 1>(
				p, pend, hbs, pend->s.q_len * p.group * hbs,
				pend->s.nr_parts * hbs * role.nm,
				(struct plan_part *)sm->part, &sm->flag, threadIdx.x,
				BAR_ALL, NR_WARPS * 32);
	}
}

/* A consumer warp: all segments of the CTA. */
template <int HD, bool FP8, bool QUICK>
KVK_DEV void consume(const struct attn_params &p, uint32_t count, gqa_smem<HD, FP8> *sm)
{
	using C = gqa_cfg<HD, FP8>;
	const struct gqa_role role = role_of(p, threadIdx.x / 32, false);
	uint32_t qf[C::KS][4], seq = 0, nth = 0;
	struct gqa_seg g;
	uint2 raw[2];

	for (uint32_t i = 0; i < count; i++) {
		gqa_acc<HD> acc = {};
		struct gqa_piece pc;
		uint32_t head, whole;

		if (i == 0) {
			spin_until(&sm->segs_in, 0);
			g = sm->segs[0];
			grid_wait();
			if constexpr (QUICK)
				load_q_share<HD>(p, g.s, raw);
			else
				load_q<HD, FP8>(p, g.s,
						g.s.hblk * g.hbs + role.slot % g.hbs,
						role.row0, qf);
		}
		head = g.s.hblk * g.hbs + role.slot % g.hbs;
		acc.m[0] = acc.m[1] = -INFINITY;
		pc.sk = p.scales && FP8 ? p.scales[2 * head] : 1.f;
		pc.sv = p.scales && FP8 ? p.scales[2 * head + 1] : 1.f;
		if constexpr (QUICK)
			share_q<HD>(raw, sm->q, qf);
		else
			convert_q<HD, FP8>(qf);
		whole = whole_pieces<QUICK>(g.nr_pieces);
		consume_pieces<HD, FP8, QUICK, 8>(p, g, role, seq, 0, whole, qf, acc, pc,
						  sm);
		if constexpr (QUICK)
			consume_pieces<HD, FP8, QUICK, 4>(
				p, g, role_of(p, threadIdx.x / 32, true), seq, whole,
				g.nr_pieces, qf, acc, pc, sm);
		seq += g.nr_pieces;
		if (i + 1 < count) { /* on its way while this one is finished */
			const struct gqa_seg *n = &sm->segs[(i + 1) % SEG_RING];

			spin_until(&sm->segs_in, i + 1);
			if constexpr (QUICK)
				load_q_share<HD>(p, n->s, raw);
			else
				load_q<HD, FP8>(p, n->s,
						n->s.hblk * n->hbs + role.slot % n->hbs,
						role.row0, qf);
		}
		if (QUICK && !g.ok) /* all have read sm->q */
			bar_sync(BAR_ALL, NR_WARPS * 32);
		if (!g.ok)
			write_nan<HD>(p, g);
		else if (!role.idle)
			finish_segment<HD, FP8, QUICK>(
				p, g, role, nth++, acc, sm,
				FP8 ? (p.token_scales ? acc.sv_max : pc.sv) : 1.f);
		g = sm->segs[(i + 1) % SEG_RING];
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			sts_release(&sm->segs_done[threadIdx.x / 32], i + 1);
	}
	finish_cta<HD, FP8, QUICK>(p, role, sm);
}

/* One thread. */
template <int HD, bool FP8, bool QUICK>
KVK_DEV void init_shared(const struct attn_params &p, gqa_smem<HD, FP8> *sm)
{
	const uint32_t nm = QUICK ? 2 : role_of(p, 0, false).nm;

	for (int i = 0; i < gqa_cfg<HD, FP8>::LONG; i++) {
		mbar_init(&sm->full[i], 1);
		mbar_init(&sm->empty[i], nm);
	}
	sm->issued = sm->segs_in = 0;
	for (int i = 0; i < NR_WARPS; i++)
		sm->segs_done[i] = sm->arrived[i] = sm->merged[i] = 0;
	for (int i = 0; i < 2; i++)
		sm->pend[i].epoch = sm->pend[i].last = 0;
	for (int i = 0; QUICK && i < 2; i++)
		sm->quick[i].epoch = sm->quick[i].arrived = sm->quick[i].known = 0;
	mbar_init_fence();
}

template <int HD, bool FP8, bool QUICK>
__global__ void __launch_bounds__(NR_THREADS, 1)
	attn_gqa_kernel(const __grid_constant__ struct attn_params p)
{
	DEV_DYNAMIC_SHARED_1K(smem_raw);
	/* a constant, so that addresses are: nothing to compute or keep in the loops */
	gqa_smem<HD, FP8> *sm = (gqa_smem<HD, FP8> *)__cvta_shared_to_generic(SMEM_AT);
	const uint32_t warp = threadIdx.x / 32;
	uint32_t touched = 0;
	uint64_t step = 0;

	if (smem_addr(smem_raw) != SMEM_AT)
		__trap();
	if (QUICK && (p.flags & KVK_ATTN_LATE) && blockIdx.x % 8 == 3)
		for (long long start = clock64(); clock64() - start < 10 * PLAN_PATIENCE;)
			;
	plan_enter(p);
	if (warp == NR_WARPS) {
		touched = plan_touch(p);
		step = *p.step;
		if (threadIdx.x % 32 == 0)
			init_shared<HD, FP8, QUICK>(p, sm);
	}
	__syncthreads();
	if (warp >= NR_WARPS) {
		regs_dec<40>();
		if (warp == NR_WARPS)
			produce<HD, FP8>(p, p.mem.ctas[blockIdx.x], plan_count(touched),
					 step, sm);
		else if (QUICK && warp <= NR_WARPS + 2)
			quick_enlist<HD>(p, p.mem.ctas[blockIdx.x], warp - NR_WARPS - 1,
					 &sm->quick[warp - NR_WARPS - 1]);
	} else {
		regs_inc<232>();
		consume<HD, FP8, QUICK>(p, p.mem.ctas[blockIdx.x].count, sm);
	}
}

/* ----------------------------------------------------------------------------- launcher
 */

template <int HD, bool FP8, bool QUICK>
static int launch(const struct kvk_attn_args *a, const struct attn_params *p,
		  uint32_t nr_ctas, cudaStream_t stream)
{
	using C = gqa_cfg<HD, FP8>;
	const size_t smem = sizeof(gqa_smem<HD, FP8>);
	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};

	static_assert(C::STAGES >= 4, "the ring is too short");
	if (cudaFuncSetAttribute(attn_gqa_kernel<HD, FP8, QUICK>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)smem) != cudaSuccess)
		return -EIO;
	attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr.val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(nr_ctas);
	cfg.blockDim = dim3(NR_THREADS);
	cfg.dynamicSmemBytes = smem;
	cfg.stream = stream;
	cfg.attrs = &attr;
	cfg.numAttrs = 1;
	if (cudaLaunchKernelEx(&cfg, attn_gqa_kernel<HD, FP8, QUICK>, *p) != cudaSuccess)
		return -EIO;
	return 0;
}

/* The schedule's shape; false if the fast kernel does not build it. */
static bool gqa_shape(const struct kvk_attn_args *a, struct plan_shape *ret_s)
{
	const struct kv_layout *l = &a->pages.layout;
	struct plan_shape s = {};
	uint32_t group = l->nr_kv_heads ? a->nr_q_heads / l->nr_kv_heads : 0, slots;

	if (l->kind != KV_LAYOUT_GQA || !group || group > 16 ||
	    group * l->nr_kv_heads != a->nr_q_heads || a->batch.q_len_max > 4 ||
	    (l->head_dim != 64 && l->head_dim != 128) || l->dtype == KV_DTYPE_F32)
		return false;
	s.nr_ctas = (uint32_t)plan_nr_ctas();
	s.nr_heads = l->nr_kv_heads;
	s.unit_rows = group * a->batch.q_len_max;
	slots = s.unit_rows <= 16 ? 8 : s.unit_rows <= 32 ? 4 : 2;
	for (s.hbs_max = slots; l->nr_kv_heads % s.hbs_max; s.hbs_max /= 2)
		;
	s.row_dim = l->head_dim;
	s.hbs_force = a->flags >> 24 & 15;
	s.tiles_min = 4; /* less is not worth a part to merge */
	/* Few units: all are cut, and merging is what counts; choose_hbs() says 1 then, as it
	 * does of one kv head. Measured slower with BF16 pages. */
	s.quick_able =
		l->dtype == KV_DTYPE_E4M3 && l->head_dim == 128 && s.unit_rows <= 16;
	s.quick = s.quick_able && !s.hbs_force &&
		  (s.nr_heads == 1 || a->batch.nr_requests <= s.nr_ctas / 2 / s.nr_heads);
	s.halves = s.quick;
	*ret_s = s;
	return s.nr_ctas > 0;
}

size_t kvk_attn_gqa_workspace(const struct kvk_attn_args *a)
{
	struct plan_shape s;

	return gqa_shape(a, &s) ? plan_workspace(a, &s, NULL) : 0;
}

/**
 * kvk_attn_gqa_cuda() - see struct kvk_attn_args
 * Context: any thread; the verdicts were written earlier on the same stream.
 * Return: 0, -EINVAL for a shape that is not built or a short workspace, -EIO.
 */
int kvk_attn_gqa_cuda(const struct kvk_attn_args *a, kvk_stream stream)
{
	const struct kv_layout *l = &a->pages.layout;
	cudaStream_t st = (cudaStream_t)stream;
	struct attn_params p;
	struct plan_shape s;
	int r;

	if (l->kind != KV_LAYOUT_GQA || a->batch.q_len_max > 4)
		return -EINVAL;
	if (!gqa_shape(a, &s))
		return kvk_attn_any_cuda(a, stream);
	r = plan_params(a, &p);
	if (r)
		return r;
	p.group = a->nr_q_heads / l->nr_kv_heads;
	if (a->workspace_bytes < plan_workspace(a, &s, &p.mem))
		return -EINVAL;
	if (!(a->flags & KVK_ATTN_PLAN))
		r = plan_launch(a, &s, &p.mem, st);
	if (r)
		return r;
	if (s.quick)
		return launch<128, true, true>(a, &p, s.nr_ctas, st);
	if (l->dtype == KV_DTYPE_E4M3)
		return l->head_dim == 128 ? launch<128, true, false>(a, &p, s.nr_ctas, st)
					  : launch<64, true, false>(a, &p, s.nr_ctas, st);
	return l->head_dim == 128 ? launch<128, false, false>(a, &p, s.nr_ctas, st)
				  : launch<64, false, false>(a, &p, s.nr_ctas, st);
}
