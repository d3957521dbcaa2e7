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
 * the score, the V scale the probability, relative to the largest V scale so far, so that
 * P stays in the good range of f16.
 *
 * At a segment's end the warps of a head merge through shared memory by a fixed tree; a
 * unit cut between CTAs goes on in plan_finish(). The next segment's description and
 * queries are read while the last one is being merged. Tour 10/12.
 */
#include "kernels/attn_gqa_math.cuh"

#include <errno.h>
#include <math.h>

/* --------------------------------------------------------------------------- segment end
 */

/* Fold a warp's result from shared memory into @acc. */
template <int HD> KVK_DEV void fold(gqa_acc<HD> &acc, const float4 *o, const float2 *ml)
{
	const int lane = threadIdx.x & 31, g = lane / 4;
	float ca[2], cb[2];

#pragma unroll
	for (int h = 0; h < 2; h++) {
		float2 b = ml[g + 8 * h];
		float mn = fmaxf(acc.m[h], b.x), mu = mn == -INFINITY ? 0.f : mn;

		ca[h] = exp2_fast(acc.m[h] - mu);
		cb[h] = exp2_fast(b.x - mu);
		acc.l[h] = acc.l[h] * ca[h] + b.y * cb[h];
		acc.m[h] = mn;
	}
#pragma unroll
	for (int i = 0; i < HD / 8; i++) {
		float4 v = o[i * 32 + lane];

		acc.o[i][0] = acc.o[i][0] * ca[0] + v.x * cb[0];
		acc.o[i][1] = acc.o[i][1] * ca[0] + v.y * cb[0];
		acc.o[i][2] = acc.o[i][2] * ca[1] + v.z * cb[1];
		acc.o[i][3] = acc.o[i][3] * ca[1] + v.w * cb[1];
	}
}

/* Bring o to true units and l to the row's sum. */
template <int HD> KVK_DEV void settle(gqa_acc<HD> &acc, float sv)
{
#pragma unroll
	for (int i = 0; i < HD / 8; i++)
#pragma unroll
		for (int e = 0; e < 4; e++)
			acc.o[i][e] *= sv;
#pragma unroll
	for (int h = 0; h < 2; h++) {
		acc.l[h] += __shfl_xor_sync(~0u, acc.l[h], 1);
		acc.l[h] += __shfl_xor_sync(~0u, acc.l[h], 2);
	}
}

/* Four neighbouring values of row half @h, the @q-th of a lane, and the dim of the first.
 */
template <int HD, bool FP8>
KVK_DEV float4 out_quad(const gqa_acc<HD> &acc, int h, int q, int *ret_dim)
{
	using C = gqa_cfg<HD, FP8>;
	const int c = threadIdx.x & 3;

	if (FP8) { /* q is word q % 4 of chunk q / 4; n-tiles hold even and odd dims */
		*ret_dim = chunk_of<C::NJ>(c, q / 4) * 16 + 4 * (q % 4);
		return make_float4(acc.o[2 * q][2 * h], acc.o[2 * q + 1][2 * h],
				   acc.o[2 * q][2 * h + 1], acc.o[2 * q + 1][2 * h + 1]);
	}
	/* words 2 q, 2 q + 1 */
	*ret_dim = chunk_of<C::NJ>(c, q / 2) * 8 + 4 * (q % 2);
	return make_float4(acc.o[2 * q][2 * h], acc.o[2 * q][2 * h + 1],
			   acc.o[2 * q + 1][2 * h], acc.o[2 * q + 1][2 * h + 1]);
}

KVK_DEV size_t gqa_row_off(const struct attn_params &p, const struct plan_seg &s,
			   uint32_t hbs, uint32_t row)
{
	uint32_t per = s.q_len * p.group;
	uint32_t head = s.hblk * hbs + row / per, r = row % per;

	return ((size_t)(s.q0 + r / p.group) * p.nr_q_heads + head * p.group +
		r % p.group);
}

template <int HD>
KVK_DEV size_t gqa_row_elem(const struct attn_params &p, const struct plan_seg &s,
			    uint32_t hbs, uint32_t row)
{
	return gqa_row_off(p, s, hbs, row) * HD;
}

/* Write a warp's rows to the output (normalised) or to the unit's slot. */
template <int HD, bool FP8>
KVK_DEV void write_rows(const struct attn_params &p, const struct gqa_seg &g,
			const gqa_acc<HD> &acc, uint32_t head_in_block,
			uint32_t row_first)
{
	const int lane = threadIdx.x & 31;
	uint32_t per = g.s.q_len * p.group, rows = per * g.hbs;
	float *slot = g.s.nr_parts > 1 ? slot_ptr(p.mem, plan_slot(g.s, g.s.part)) : NULL;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		uint32_t r = row_first + lane / 4 + 8 * h, row = head_in_block * per + r;
		float inv = acc.l[h] > 0.f ? 1.f / acc.l[h] : 0.f;
		size_t off;

		if (r >= per)
			continue;
		if (slot && lane % 4 == 0)
			((float2 *)slot)[row] = make_float2(acc.m[h], acc.l[h]);
		off = slot ? slot_o_off(rows) + (size_t)row * HD
			   : gqa_row_elem<HD>(p, g.s, g.hbs, row);
#pragma unroll
		for (int q = 0; q < HD / 16; q++) {
			int d;
			float4 v = out_quad<HD, FP8>(acc, h, q, &d);

			if (slot) {
				*(float4 *)(slot + off + d) = v;
			} else {
				v.x *= inv;
				v.y *= inv;
				v.z *= inv;
				v.w *= inv;
				out_store4(p, off + d, v);
			}
		}
	}
}

/* NaN for a request that failed its check. */
template <int HD>
KVK_DEV void write_nan(const struct attn_params &p, const struct gqa_seg &g)
{
	uint32_t rows = g.s.q_len * p.group * g.hbs;
	float nan = __int_as_float(0x7fffffff);

	if (g.s.part != 0)
		return;
	for (uint32_t e = threadIdx.x; e < rows * (HD / 4); e += NR_WARPS * 32)
		out_store4(p,
			   gqa_row_elem<HD>(p, g.s, g.hbs, e / (HD / 4)) +
				   4 * (e % (HD / 4)),
			   make_float4(nan, nan, nan, nan));
}

/*
 * Merge the warps of a head and row block. A warp leaves its result and goes on; the one
 * that comes last folds all of them in warp order. @nth: segments merged before. Return:
 * this warp holds the result.
 */
template <int HD, bool FP8>
KVK_DEV bool merge_warps(const struct gqa_role &role, uint32_t hbs, uint32_t nth,
			 bool worked, gqa_acc<HD> &acc, gqa_smem<HD, FP8> *sm)
{
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
	const uint32_t peers = role.slots / hbs, head = role.slot % hbs,
		       mt = role.row0 / 16;
	const uint32_t id = head * role.nm + mt;
	uint32_t last = 0;

	if (peers == 1)
		return true;
	while (lds_acquire(&sm->merged[id]) < nth)
		;
	if (worked)
#pragma unroll
		for (int i = 0; i < HD / 8; i++)
			sm->part[warp][i * 32 + lane] = make_float4(
				acc.o[i][0], acc.o[i][1], acc.o[i][2], acc.o[i][3]);
#pragma unroll
	for (int h = 0; h < 2; h++)
		if (lane % 4 == 0)
			sm->ml[warp][lane / 4 + 8 * h] =
				make_float2(acc.m[h], worked ? acc.l[h] : -1.f);
	__syncwarp();
	if (lane == 0)
		last = atoms_add_acq_rel(&sm->arrived[id], 1) % peers == peers - 1;
	if (!__shfl_sync(~0u, last, 0))
		return false;
	__syncwarp();
	acc = {};
	acc.m[0] = acc.m[1] = -INFINITY;
	for (uint32_t i = 0; i < peers; i++) {
		uint32_t w = (i * hbs + head) * role.nm + mt;

		if (sm->ml[w][0].y >= 0.f || sm->ml[w][0].y != sm->ml[w][0].y)
			fold<HD>(acc, sm->part[w], sm->ml[w]);
	}
	__syncwarp();
	if (lane == 0)
		sts_release(&sm->merged[id], nth + 1);
	return true;
}

/* A row of this part is outside the pool: no number comes of the unit. */
template <int HD> KVK_DEV void spoil(gqa_acc<HD> &acc)
{
	acc.l[0] = acc.l[1] = NAN;
#pragma unroll
	for (int i = 0; i < HD / 2; i++)
		acc.o[i / 4][i % 4] = NAN;
}

/* The warp's end of a segment: merge, write, and count a split unit's part in. */
template <int HD, bool FP8>
KVK_DEV void finish_segment(const struct attn_params &p, const struct gqa_seg &g,
			    const struct gqa_role &role, uint32_t nth, gqa_acc<HD> &acc,
			    gqa_smem<HD, FP8> *sm, float sv)
{
	const struct plan_seg &s = g.s;

	settle<HD>(acc, sv);
	if (!merge_warps<HD, FP8>(role, g.hbs, nth, role.slot < g.nr_pieces, acc, sm))
		return;
	if (g.poisoned)
		spoil<HD>(acc);
	write_rows<HD, FP8>(p, g, acc, role.slot % g.hbs, role.row0);
	if (s.nr_parts > 1)
		plan_arrive(p, s, s.nr_parts * g.hbs * role.nm, &sm->pend[s.part == 0]);
}

/* One warp's pieces of a segment. @seq: ring position of the segment's first piece. */
template <int HD, bool FP8>
KVK_DEV void consume_pieces(const struct attn_params &p, const struct gqa_seg &g,
			    const struct gqa_role &role, uint32_t seq,
			    const uint32_t (*qf)[4], gqa_acc<HD> &acc,
			    struct gqa_piece &pc, gqa_smem<HD, FP8> *sm)
{
	using C = gqa_cfg<HD, FP8>;
	const int lane = threadIdx.x & 31;

	for (uint32_t i = role.slot; i < g.nr_pieces && !role.idle; i += role.slots) {
		const struct ring_at at = ring_pos<HD, FP8>(seq + i, g.hbs == role.slots);
		uint32_t stage = at.stage, phase = at.round & 1;
		int32_t first = (int32_t)((g.s.page0 + i / g.hbs) * KV_PAGE_TOKENS);
		int32_t valid = (int32_t)g.s.len - first;

		spin_until(&sm->issued, seq + i);
		mbar_wait(&sm->full[C::PAIR && g.hbs >= 2 ? stage & ~1u : stage], phase);
		if (!(p.flags & KVK_ATTN_LOADS)) {
			float s[8][4];
			uint32_t a[4][4], lo[4][4];

			pc.k_addr = smem_addr(sm->ring[stage]);
			pc.v_addr = pc.k_addr + C::PIECE / 2;
			pc.sc_addr = smem_addr(sm->scales[stage]);
			pc.tail =
				valid - (int32_t)g.s.q_len + 1 < (int32_t)KV_PAGE_TOKENS;
#pragma unroll
			for (int h = 0; h < 2; h++) {
				uint32_t row = role.row0 + lane / 4 + 8 * h;

				pc.limit[h] = valid - (int32_t)g.s.q_len + 1 +
					      (int32_t)(row / p.group);
			}
			if (valid < (int32_t)KV_PAGE_TOKENS)
				zero_tail<HD, FP8>(sm->ring[stage], sm->scales[stage],
						   valid);
			scores<HD, FP8>(pc.k_addr, qf, s);
			softmax<HD, FP8>(p, pc, s, acc, a, lo);
			values<HD, FP8>(pc.v_addr, a, lo, acc.o);
		}
		__syncwarp();
		if (lane == 0)
			mbar_arrive(&sm->empty[stage]);
	}
}

/* A consumer warp: all segments of the CTA. */
template <int HD, bool FP8>
KVK_DEV void consume(const struct attn_params &p, uint32_t count, gqa_smem<HD, FP8> *sm)
{
	using C = gqa_cfg<HD, FP8>;
	const struct gqa_role role = role_of(p, threadIdx.x / 32);
	uint32_t qf[C::KS][4], seq = 0, nth = 0;
	struct gqa_seg g;

	for (uint32_t i = 0; i < count; i++) {
		gqa_acc<HD> acc = {};
		struct gqa_piece pc;
		uint32_t head;

		if (i == 0) {
			spin_until(&sm->segs_in, 0);
			g = sm->segs[0];
			grid_wait();
			load_q<HD, FP8>(p, g.s, g.s.hblk * g.hbs + role.slot % g.hbs,
					role.row0, qf);
		}
		head = g.s.hblk * g.hbs + role.slot % g.hbs;
		acc.m[0] = acc.m[1] = -INFINITY;
		pc.sk = p.scales && FP8 ? p.scales[2 * head] : 1.f;
		pc.sv = p.scales && FP8 ? p.scales[2 * head + 1] : 1.f;
		convert_q<HD, FP8>(qf);
		consume_pieces<HD, FP8>(p, g, role, seq, qf, acc, pc, sm);
		seq += g.nr_pieces;
		if (i + 1 < count) { /* on its way while this one is finished */
			const struct gqa_seg *n = &sm->segs[(i + 1) % SEG_RING];

			spin_until(&sm->segs_in, i + 1);
			load_q<HD, FP8>(p, n->s, n->s.hblk * n->hbs + role.slot % n->hbs,
					role.row0, qf);
		}
		if (!g.ok)
			write_nan<HD>(p, g);
		else if (!role.idle)
			finish_segment<HD, FP8>(
				p, g, role, nth++, acc, sm,
				FP8 ? (p.token_scales ? acc.sv_max : pc.sv) : 1.f);
		g = sm->segs[(i + 1) % SEG_RING];
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			atoms_add_release(&sm->segs_done, 1);
	}
	bar_sync(BAR_ALL, NR_WARPS * 32);
	for (int i = 0; i < 2; i++) {
		const struct plan_pending *pend = &sm->pend[i];
		uint32_t hbs = sm->hbs;

		if (pend->epoch)
			plan_finish<HD, gqa_row_elem<HD>, 1>(
				p, pend, hbs, pend->s.q_len * p.group * hbs,
				pend->s.nr_parts * hbs * role.nm,
				(struct plan_part *)sm->part, &sm->flag, threadIdx.x,
				BAR_ALL, NR_WARPS * 32);
	}
}

template <int HD, bool FP8>
__global__ void __launch_bounds__(NR_THREADS, 1)
	attn_gqa_kernel(const __grid_constant__ struct attn_params p)
{
	using C = gqa_cfg<HD, FP8>;
	extern __shared__ __align__(128) uint8_t smem_raw[];
	gqa_smem<HD, FP8> *sm = (gqa_smem<HD, FP8> *)smem_raw;
	const uint32_t warp = threadIdx.x / 32;

	if (threadIdx.x == 0) {
		uint32_t nm = role_of(p, 0).nm;

		for (int i = 0; i < C::LONG; i++) {
			mbar_init(&sm->full[i], 1);
			mbar_init(&sm->empty[i], nm);
		}
		sm->issued = sm->segs_in = sm->segs_done = 0;
		for (int i = 0; i < NR_WARPS; i++)
			sm->arrived[i] = sm->merged[i] = 0;
		for (int i = 0; i < 2; i++)
			sm->pend[i].epoch = sm->pend[i].last = 0;
		mbar_init_fence();
	}
	__syncthreads();
	plan_enter(p);
	if (warp >= NR_WARPS) {
		regs_dec<40>();
		if (warp == NR_WARPS)
			produce<HD, FP8>(p, p.mem.ctas[blockIdx.x], *p.step, sm);
	} else {
		regs_inc<232>();
		consume<HD, FP8>(p, p.mem.ctas[blockIdx.x].count, sm);
	}
}

/* ----------------------------------------------------------------------------- launcher
 */

template <int HD, bool FP8>
static int launch(const struct kvk_attn_args *a, const struct attn_params *p,
		  uint32_t nr_ctas, cudaStream_t stream)
{
	using C = gqa_cfg<HD, FP8>;
	const size_t smem = sizeof(gqa_smem<HD, FP8>);
	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};

	static_assert(C::STAGES >= 4, "the ring is too short");
	if (cudaFuncSetAttribute(attn_gqa_kernel<HD, FP8>,
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
	if (cudaLaunchKernelEx(&cfg, attn_gqa_kernel<HD, FP8>, *p) != cudaSuccess)
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
	s.tiles_min = 1;
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
	if (l->dtype == KV_DTYPE_E4M3)
		return l->head_dim == 128 ? launch<128, true>(a, &p, s.nr_ctas, st)
					  : launch<64, true>(a, &p, s.nr_ctas, st);
	return l->head_dim == 128 ? launch<128, false>(a, &p, s.nr_ctas, st)
				  : launch<64, false>(a, &p, s.nr_ctas, st);
}
