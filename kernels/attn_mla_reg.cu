/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_reg.cu - MLA decode on FP8 pages for 17 to 64 query rows a CTA (64 heads; 128 heads
 * and drafts are cut into blocks of 64), on wgmma with the page's operands built in registers.
 *
 * Budget for a page (64 tokens) and 64 rows, in clocks of an SM:
 *
 * - matrix: 64 x 64 x (576 + 512) x 2 flops at 4,096 a clock: 2,176
 *
 * - memory: 37,120 bytes at 18.6: 2,000
 *
 * - shared memory at 128 bytes: 36 KB of page in, 36 KB out as keys, 32 KB as values, 72 KB of
 *   queries, 8 KB of P in and 64 KB out: 1,990
 *
 * - conversion: 69,632 values at 96: 725; exponentials: 4,096 at 16: 256
 *
 * Structure. A ring of four pages as they lie in memory, but for the 128-byte swizzle that
 * tensor copies give the latent part: so lanes of one column of a page, 512 bytes apart, read
 * different banks. Both products have the page as A operand, in registers, and 64 rows as
 * columns: S^T = K Q^T, O^T += V^T P^T. One byte of a page is thus converted once for the
 * scores and once for the values, and never stored.
 *
 * Two warpgroups. Each makes the scores and the softmax of every other page, and sums the
 * values of all pages for its half of the latent dims: scores and softmax of page i, then values of
 * pages i - 1 and i in one stream. Each has a P of its own, half of it where the page's rope was, so
 * neither waits for the other to have summed the one before: they drift half a period apart, and
 * one's matrix products cover the other's softmax. (Values of page i - 1 before the softmax of page i
 * made both sum at the same time, and scores wait for the other one's P.)
 *
 * A page's softmax takes the references that it finds and looks, before others see its P, whether the
 * page before has raised them; if so (rare), once more. Sums shrink where that page is added.
 *
 * Softmax is without a search for the maximum: P = 2^(s - m) times the token's scale of the
 * latent, with a reference m for each row. Only if some P exceeds 2^8 are the references raised, and what
 * was summed shrinks; on a segment's first page they are made. m is of the product, so a page
 * with larger scales needs nothing of its own.
 *
 * The scores of the rope come first; they are multiplied by rope scale over latent scale
 * before the latent's are added to them.
 *
 * The ring's first pages are asked for one after the other: all SMs begin at once, and pages
 * that are asked for together come together, late.
 */
#include "kernels/attn_mla_reg_math.cuh"
#include "kernels/attn_mla_reg_end.cuh"
#include "kernels/tensor_map.cuh"

#include <errno.h>

/* ----------------------------------------------------------------------------- segments
 */

/*
 * Values of the page before @at, if it is of this segment, and of @at; then the first words of stage
 * @next's scores are read. Sums shrink where a reference was raised (@raised: by the one before): rare,
 * so there the products wait for each other.
 */
KVK_DEV void reg_sum(const struct reg_lane &r, uint32_t at, uint32_t next, bool prev,
		     bool raised, bool raise, struct reg_feed &f, float (&ls)[16],
		     struct reg_state &st, struct reg_smem *sm)
{
	if (prev)
		mbar_wait(&sm->full[(at - 1) % reg_cfg::STAGES],
			  (at - 1) / reg_cfg::STAGES & 1);
	if (prev && !raised && !raise) {
		reg_value_start(r, (at - 1) % reg_cfg::STAGES, f);
		reg_values<true, REG_VALUES, false>(r, sm, at - 1, at % reg_cfg::STAGES,
						    f, ls, st.o);
		reg_values<false, REG_SCORES, true>(r, sm, at, next, f, ls, st.o);
	} else {
		if (raised)
			reg_shrink(sm->shrink[(at - 1) & 1], st);
		if (prev) {
			reg_value_start(r, (at - 1) % reg_cfg::STAGES, f);
			reg_values<true, REG_END, false>(r, sm, at - 1, 0, f, ls, st.o);
			wgm_wait<0>();
			reg_keep(st.o);
			reg_page_done(at - 1, sm);
		}
		if (raise && prev) /* else there are none */
			reg_shrink(sm->shrink[at & 1], st);
		reg_value_start(r, at % reg_cfg::STAGES, f);
		reg_values<true, REG_SCORES, true>(r, sm, at, next, f, ls, st.o);
	}
	wgm_wait<0>();
	reg_keep(st.o);
	st.l[0] += ls[0];
	st.l[1] += ls[1];
}

/* A segment's last page, which the other one scored. @first: the only one, so there are no sums */
KVK_DEV void reg_last(const struct reg_lane &r, uint32_t at, bool first,
		      struct reg_state &st, struct reg_smem *sm)
{
	struct reg_feed f;
	float none[16];

	mbar_wait(&sm->full[at % reg_cfg::STAGES], at / reg_cfg::STAGES & 1);
	mbar_wait(&sm->p_full[at & 1], at / 2 & 1); /* its owner has cleared the tail */
	if (*(volatile uint32_t *)&sm->raised[at & 1] && !first)
		reg_shrink(sm->shrink[at & 1], st);
	reg_value_start(r, at % reg_cfg::STAGES, f);
	reg_values<true, REG_END, false>(r, sm, at, 0, f, none, st.o);
	wgm_wait<0>();
	reg_keep(st.o);
	reg_page_done(at, sm);
}

/* A segment's pages. @seq: its first one in the order of the CTA */
KVK_DEV void reg_pages(const struct attn_params &p, const struct plan_seg &g, uint32_t nr,
		       uint32_t seq, int own, struct reg_state &st, struct reg_smem *sm)
{
	const struct reg_lane r = reg_lane_init(sm, own);
	const uint32_t end = seq + nr;
	uint32_t at = seq + own;
	/* tokens from page @at on, at most */
	int32_t left = (int32_t)(g.len - (g.page0 + own) * TOKENS);
	struct reg_feed f;

	if (at < end) {
		mbar_wait(&sm->full[at % reg_cfg::STAGES], at / reg_cfg::STAGES & 1);
		reg_score_start(r, at % reg_cfg::STAGES, f);
	}
	for (; at < end; at += 2, left -= 2 * TOKENS) {
		const uint32_t stage = at % reg_cfg::STAGES;
		const uint32_t next = (at + 2) % reg_cfg::STAGES;
		const bool prev = at != seq;
		struct reg_tokens t;
		bool raise, raised;
		float s[32], ls[16];

		if (left < (int32_t)TOKENS)
			reg_tail(sm, stage, left);
		reg_scores(p, r, left, stage, sm, f, s);
		t = reg_scales(p, left, sm, stage);
		if (left < (int32_t)(TOKENS + g.q_len - 1))
			reg_mask(p, g, left, s);
		raise = reg_softmax(sm, at, prev, s, t, ls, &raised);
		if (at + 2 < end)
			mbar_wait(&sm->full[next], (at + 2) / reg_cfg::STAGES & 1);
		/* the segment's first page had no sums to shrink */
		reg_sum(r, at, next, prev, raised && at - 1 != seq, raise, f, ls, st, sm);
		reg_page_done(at, sm);
	}
	if (nr && ((nr - 1) & 1) != own)
		reg_last(r, end - 1, nr == 1, st, sm);
}

/* Bench only: the pages come and go. */
KVK_DEV void reg_skip(uint32_t nr, uint32_t seq, struct reg_smem *sm)
{
	for (uint32_t n = 0; n < nr; n++) {
		const uint32_t stage = (seq + n) % reg_cfg::STAGES;

		mbar_wait(&sm->full[stage], (seq + n) / reg_cfg::STAGES & 1);
		__syncwarp();
		if ((threadIdx.x & 31) == 0)
			mbar_arrive(&sm->empty[stage]);
	}
}

/* The segment's rows to the output, normalised. @ml: m and l of rows */
KVK_DEV void reg_write(const struct attn_params &p, const struct plan_seg &s,
		       const struct reg_state &st, uint32_t rows, const float2 *ml)
{
	const uint32_t lane = threadIdx.x & 31;
	const uint32_t dim = threadIdx.x / 32 * 64 + lane / 4 * 8;

#pragma unroll
	for (int i = 0; i < 16; i++) {
		const uint32_t row = i / 2 * 8 + 2 * (lane & 3) + (i & 1);
		const bool in = row < rows;
		float l = ml[row].y, x[8];

		l = l > 0.f ? 1.f / l : l;
#pragma unroll
		for (int k = 0; k < 8; k++)
			x[k] = st.o[k / 2][i / 2 * 4 + 2 * (k & 1) + (i & 1)] * l;
		if (p.act_f32)
			reg_store_f32((float *)p.out + mla_row_elem(p, s, REG_ROWS, row) +
					      dim,
				      x, in);
		else if (in)
			*(uint4 *)((__nv_bfloat16 *)p.out +
				   mla_row_elem(p, s, REG_ROWS, row) + dim) =
				make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
					   pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
	}
}

/* After a segment's last page. */
template <bool PAIR>
KVK_DEV void reg_end(const struct attn_params &p, const struct mla_seg &g,
		     struct reg_state &st, struct reg_smem *sm)
{
	const uint32_t lane = threadIdx.x & 31, tid = threadIdx.x;
	const uint32_t rows =
		min((uint32_t)REG_ROWS, g.s.q_len * p.nr_q_heads - g.s.hblk * REG_ROWS);
	const bool slot = g.s.nr_parts > 1 && !(PAIR && sm->pair);
	struct reg_ends *e = (struct reg_ends *)sm->p;

	bar_sync(BAR_ALL, 256); /* both are done with P */
	*(float2 *)&e->l[tid / 32][lane * 2] = make_float2(st.l[0], st.l[1]);
	if (slot)
		*(float2 *)&e->top[tid / 32][lane * 2] = reg_tops(st);
	bar_sync(BAR_ALL, 256);
	if (tid < REG_ROWS) {
		float l = 0.f;

		for (int w = 0; w < 8; w++)
			l += e->l[w][tid];
		if (g.poisoned)
			l = NAN;
		reg_row_end(e, tid, sm->m[tid], l, slot);
		sm->m[tid] = REG_NONE;
	}
	bar_sync(BAR_ALL, 256);
	if constexpr (PAIR) {
		if (g.ok && sm->pair) {
			reg_pair<false>(p, g.s, st, rows, e->ml, (float4 *)sm->latent);
			return;
		}
	}
	if (g.ok && slot)
		reg_slot(p, g.s, st, rows, e);
	else if (g.ok)
		reg_write(p, g.s, st, rows, e->ml);
	else if (g.s.part == 0)
		for (uint32_t k = tid; k < rows * (LATENT / 2); k += 256)
			out_store2(p, mla_row_elem(p, g.s, REG_ROWS, 0) + 2 * k, NAN,
				   NAN);
	if (g.ok && slot)
		slot_arrive(p, g.s, &sm->pend[g.s.part == 0], BAR_ALL);
}

template <bool PAIR>
KVK_DEV void reg_consume(const struct attn_params &p, uint32_t count, struct reg_smem *sm)
{
	/* the compiler must see that whole warps take a branch with wgmma in it */
	const int own = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
	uint32_t seq = 0;

	if (PAIR && threadIdx.x == 0) /* kept there, not in a register */
		sm->pair = pair_is(p);
	for (uint32_t i = 0; i < count; i++) {
		const struct mla_seg &g = sm->segs[i % SEG_RING];
		struct reg_state st = {};
		uint32_t nr;

		spin_until(&sm->segs_in, i);
		reg_load_q(p, g.s, sm);
		nr = __shfl_sync(~0u, g.nr_pieces, 0);
		if (p.flags & KVK_ATTN_LOADS)
			reg_skip(nr, seq, sm);
		else
			reg_pages(p, g.s, nr, seq, own, st, sm);
		seq += nr;
		reg_end<PAIR>(p, g, st, sm);
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			atoms_add_release(&sm->segs_done, 1);
	}
}

/* The CTA's end: its split units, by all consumers. The ring is empty and serves as scratch. */
KVK_DEV void reg_finish(const struct attn_params &p, struct reg_smem *sm)
{
	bar_sync(BAR_ALL, 256);
	for (int i = 0; i < 2; i++)
		if (sm->pend[i].epoch)
			slot_finish<reg_words<false>>(p, &sm->pend[i],
						      (float *)sm->latent, &sm->flag,
						      threadIdx.x, BAR_ALL);
}

/* ----------------------------------------------------------------------------- producer
 */

/* Page @pfn to stage @stage. One lane. */
KVK_DEV void reg_page_load(const struct reg_params &rp, struct reg_smem *sm,
			   uint32_t stage, uint32_t pfn, uint64_t policy)
{
	const struct attn_params &p = rp.a;
	const uint32_t scales = p.token_scales ? REG_SCALES : 0;
	const uint8_t *rope = p.base + page_offset(p, pfn) + TOKENS * LATENT;
	const int at[5] = {0, 0, 0, (int)(pfn & ((1u << p.shift) - 1)),
			   (int)(pfn >> p.shift)};

	mbar_arrive_expect(&sm->full[stage], TOKENS * LATENT + REG_ROPE + scales);
	tma_load_5d(smem_addr(sm->latent[stage]), &rp.latent, smem_addr(&sm->full[stage]),
		    at, policy);
	bulk_load(sm->rope[stage], rope, REG_ROPE, &sm->full[stage], policy);
	if (scales)
		bulk_load(sm->scales[stage], rope + REG_ROPE, scales, &sm->full[stage],
			  policy);
}

/* ------------------------------------------------------------------------------- kernel
 */

KVK_DEV void reg_init(const struct attn_params &p, struct reg_smem *sm)
{
	if (threadIdx.x == 0) {
		for (int i = 0; i < reg_cfg::STAGES; i++) {
			mbar_init(&sm->full[i], 1);
			mbar_init(&sm->empty[i], reg_cfg::NR_WARPS);
		}
		for (int i = 0; i < 2; i++) {
			mbar_init(&sm->p_full[i], 1);
			mbar_init(&sm->p_empty[i], reg_cfg::NR_WARPS);
		}
		sm->pend[0].epoch = sm->pend[0].last = 0;
		sm->pend[1].epoch = sm->pend[1].last = 0;
		sm->segs_in = sm->segs_done = 0;
		sm->fixed = p.scales ? p.scales[0] : 1.f;
		mbar_init_fence();
	}
	if (threadIdx.x < REG_ROWS)
		sm->m[threadIdx.x] = REG_NONE;
	__syncthreads();
}

template <bool PAIR>
__global__ void __launch_bounds__(reg_cfg::NR_THREADS, 1)
	attn_mla_reg_kernel(const __grid_constant__ struct reg_params p)
{
	DEV_DYNAMIC_SHARED_1K(smem_raw);
	/* a constant but for the high bits, so that descriptors are; without pairs they are 0, but
	 * the compiler then folds so much that the loop over pages takes 160 instructions more */
	const uint32_t base = pair_base(REG_AT);
	struct reg_smem *sm = (struct reg_smem *)__cvta_shared_to_generic(base);
	uint32_t touched = 0;

	if (smem_addr(smem_raw) != base)
		__trap();
	plan_enter(p.a);
	if (threadIdx.x / 32 == reg_cfg::NR_WARPS)
		touched = plan_touch(p.a);
	reg_init(p.a, sm);
	if (threadIdx.x >= reg_cfg::NR_WARPS * 32) {
		regs_dec<reg_cfg::REGS_FEED>();
		if (threadIdx.x / 32 == reg_cfg::NR_WARPS)
			slot_produce(p.a, touched, *p.a.step, sm,
				     [&](uint32_t stage, uint32_t pfn, uint64_t policy) {
					     reg_page_load(p, sm, stage, pfn, policy);
				     });
	} else {
		regs_inc<reg_cfg::REGS_USE>();
		reg_consume<PAIR>(p.a, p.a.mem.ctas[blockIdx.x].count, sm);
		reg_finish(p.a, sm);
	}
}

/* ------------------------------------------------------------------------------ launcher
 */

/* The layer's latent parts of all pages; a box is one page's, as [block][token][128]. */
static int reg_map(const struct attn_params *p, CUtensorMap *map)
{
	static const tensor_encode_fn encode = tensor_encode_find();
	const uint64_t per = 1ull << p->shift;
	const cuuint64_t dim[5] = {128, TOKENS, LATENT / 128, per,
				   (p->nr_pages + per - 1) >> p->shift};
	const cuuint64_t stride[4] = {LATENT, 128, p->stride_bytes, p->extent_bytes};
	const cuuint32_t box[5] = {128, TOKENS, LATENT / 128, 1, 1},
			 one[5] = {1, 1, 1, 1, 1};

	if (!encode || encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5,
			      (void *)(p->base + p->layer_off), dim, stride, box, one,
			      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
			      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
			      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
		return -EIO;
	return 0;
}

int mla_reg_launch(const struct attn_params *p, uint32_t nr_ctas, bool pairs,
		   cudaStream_t stream)
{
	struct reg_params k = {};
	void (*kernel)(struct reg_params) =
		pairs ? attn_mla_reg_kernel<true> : attn_mla_reg_kernel<false>;
	cudaLaunchAttribute attr[2] = {};
	cudaLaunchConfig_t cfg = {};

	static_assert(sizeof(struct reg_smem) <= 227 * 1024, "too much shared memory");
	k.a = *p;
	k.a.flight = p->flags >> 16 & 15 ? p->flight : reg_cfg::STAGES;
	if (reg_map(p, &k.latent) ||
	    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)sizeof(struct reg_smem)) != cudaSuccess)
		return -EIO;
	pair_launch_attrs(pairs, attr, &cfg);
	cfg.gridDim = dim3(nr_ctas);
	cfg.blockDim = dim3(reg_cfg::NR_THREADS);
	cfg.dynamicSmemBytes = sizeof(struct reg_smem);
	cfg.stream = stream;
	return cudaLaunchKernelEx(&cfg, kernel, k) == cudaSuccess ? 0 : -EIO;
}
