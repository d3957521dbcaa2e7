/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_fast.cu - MLA decode on FP8 pages for 17 to 64 query rows a CTA with KVK_ATTN_FAST: the
 * bytes of a page are operands of the matrix units as they are. attn_mla_reg.cu is the exact form.
 *
 * Budget for a page (64 tokens) and 64 rows, in clocks of an SM: memory 2,000; matrix 20 + 2 x 8
 * products of m64n64k32, 1,150; shared memory 1,600.
 *
 * Scores: S = Q K^T, both from shared memory. Q is in e4m3 with one scale a row. The rope's part comes
 * with what rounding left of it, as a second product: it costs little and makes it good for 8 bits.
 * It goes first, behind the values of the page before, and is multiplied by rope scale over latent scale,
 * which a warp of the producers prepares for every token (as it clears values behind the end), before the
 * latent's are added.
 *
 * Values: O^T += V^T P^T with V^T in registers. ldmatrix transposes pairs of bytes and four byte
 * permutations put four tokens of a dim side by side, in the order in which lanes hold P: no
 * conversion. P is in e4m3.
 *
 * Two warpgroups. Each makes scores and softmax of every other page and sums the values of all
 * pages for its half of the latent dims: scores and softmax of page i, then values of pages i - 1 and i.
 * P of four pages fits into shared memory, so none waits for the other to have summed the one before.
 *
 * References as in attn_mla_reg.cu, but e4m3 ends at 448, and has three bits down to 2^-6. A page's
 * softmax takes those that it finds and looks, before others see its P, whether the page before
 * has raised them; if so (rare), once more. O and l shrink where the page that raised them is added.
 *
 * Error: Q in e4m3 makes scores uncertain by 2.6 % of what scatters them, P in e4m3 is the same again.
 * The matrix units add e4m3 products with fewer bits than those of f16. docs/performance-attn.md has
 * what was measured.
 */
#include "kernels/attn_mla_fast_math.cuh"
#include "kernels/attn_mla_reg_end.cuh"
#include "kernels/tensor_map.cuh"

#include <errno.h>

/* ----------------------------------------------------------------------------- segments
 */

/* This warp has read all of page @seq: its words are in registers, and scores and sums do not need them. */
KVK_DEV void fast_page_done(uint32_t seq, struct fast_smem *sm)
{
	__syncwarp();
	if ((threadIdx.x & 31) == 0)
		mbar_arrive(&sm->empty[seq % fast_cfg::STAGES]);
}

/* Its products with P of page @seq are complete. */
KVK_DEV void fast_p_done(uint32_t seq, struct fast_smem *sm)
{
	__syncwarp();
	if ((threadIdx.x & 31) == 0)
		mbar_arrive(&sm->p_empty[seq % FAST_PS]);
}

/*
 * Rope scores of page @next, the next one that this warpgroup scores, behind the products that are
 * under way; with them it waits for all. If there is none (@more), products of queries with queries:
 * a branch between products would make the assembler wait for each.
 */
KVK_DEV void fast_rope(uint32_t next, bool more, float (&s)[32], struct reg_state &st,
		       struct fast_smem *sm)
{
	const uint32_t stage = next % fast_cfg::STAGES;

	if (more)
		mbar_wait(&sm->full[stage], next / fast_cfg::STAGES & 1);
	fast_rope_products(sm, more ? sm->rope[stage] : sm->q[4], s);
	wgm_wait<0>();
	reg_keep(st.o);
	wgm_keep<32>(s);
	if (!more)
		return;
	mbar_wait(&sm->ready[stage], next / fast_cfg::STAGES & 1);
	fast_ratio(sm->f[stage], s);
}

/*
 * Values of the page before @at, if it is of this segment, and of @at, then the rope's scores of
 * @at + 2. Sums shrink where a reference was raised (@raised: by the one before): rare, so there the
 * products wait for each other.
 */
KVK_DEV void fast_sum(const struct fast_lane &r, uint32_t at, bool prev, bool raised,
		      bool raise, bool more, float (&s)[32], struct reg_state &st,
		      struct fast_smem *sm)
{
	struct fast_feed f;

	if (prev)
		mbar_wait(&sm->full[(at - 1) % fast_cfg::STAGES],
			  (at - 1) / fast_cfg::STAGES & 1);
	if (prev && !raised && !raise) {
		fast_value_start(r, (at - 1) % fast_cfg::STAGES, f);
		fast_values<true, true>(r, at - 1, sm, f, st.o);
		fast_page_done(at - 1, sm);
		fast_values<false, false>(r, at, sm, f, st.o);
		fast_page_done(at, sm);
		fast_rope(at + 2, more, s, st, sm);
		return;
	}
	if (raised)
		fast_shrink(sm->shrink[(at - 1) % FAST_PS], st);
	if (prev) {
		fast_value_start(r, (at - 1) % fast_cfg::STAGES, f);
		fast_values<true, false>(r, at - 1, sm, f, st.o);
		fast_page_done(at - 1, sm);
		wgm_wait<0>();
		reg_keep(st.o);
	}
	if (raise && prev) /* else there are none */
		fast_shrink(sm->shrink[at % FAST_PS], st);
	fast_value_start(r, at % fast_cfg::STAGES, f);
	fast_values<true, false>(r, at, sm, f, st.o);
	fast_page_done(at, sm);
	fast_rope(at + 2, more, s, st, sm);
}

/* A segment's last page, which the other one scored. @first: the only one, so there are no sums */
KVK_DEV void fast_last(const struct fast_lane &r, uint32_t at, bool first,
		       struct reg_state &st, struct fast_smem *sm)
{
	const uint32_t stage = at % fast_cfg::STAGES, phase = at / fast_cfg::STAGES & 1;
	struct fast_feed f;

	mbar_wait(&sm->full[stage], phase);
	mbar_wait(&sm->ready[stage], phase);
	mbar_wait(&sm->p_full[at % FAST_PS], at / FAST_PS & 1);
	if (*(volatile uint32_t *)&sm->raised[at % FAST_PS] && !first)
		fast_shrink(sm->shrink[at % FAST_PS], st);
	fast_value_start(r, stage, f);
	fast_values<true, false>(r, at, sm, f, st.o);
	fast_page_done(at, sm);
	wgm_wait<0>();
	reg_keep(st.o);
	fast_p_done(at, sm);
}

/* A segment's pages. @seq: its first one in the order of the CTA */
KVK_DEV void fast_pages(const struct attn_params &p, const struct plan_seg &g,
			uint32_t nr, uint32_t seq, int own, struct reg_state &st,
			struct fast_smem *sm)
{
	const struct fast_lane r = fast_lane_init(sm, own);
	const uint32_t end = seq + nr;
	/* tokens from page @at on, at most */
	int32_t left = (int32_t)(g.len - (g.page0 + own) * TOKENS);

	float s[32];

	if (seq + own < end)
		fast_rope(seq + own, true, s, st, sm);
	for (uint32_t at = seq + own; at < end; at += 2, left -= 2 * TOKENS) {
		const bool prev = at != seq;
		bool raise, raised;
		float ls[2];

		fast_latent_products(sm, at % fast_cfg::STAGES, s);
		wgm_wait<0>();
		wgm_keep<32>(s);
		if (left < (int32_t)(TOKENS + g.q_len - 1))
			fast_mask(p, g, left, s);
		raise = fast_softmax(p, r, at, prev, s, ls, &raised, sm);
		/* the segment's first page had no sums to shrink */
		fast_sum(r, at, prev, raised && at - 1 != seq, raise, at + 2 < end, s, st,
			 sm);
		st.l[0] += ls[0];
		st.l[1] += ls[1];
		if (prev)
			fast_p_done(at - 1, sm);
		fast_p_done(at, sm);
	}
	if (nr && ((nr - 1) & 1) != own)
		fast_last(r, end - 1, nr == 1, st, sm);
}

/* Bench only: the pages come and go. */
KVK_DEV void fast_skip(uint32_t nr, uint32_t seq, struct fast_smem *sm)
{
	for (uint32_t n = 0; n < nr; n++) {
		const uint32_t stage = (seq + n) % fast_cfg::STAGES;

		mbar_wait(&sm->ready[stage], (seq + n) / fast_cfg::STAGES & 1);
		__syncwarp();
		if ((threadIdx.x & 31) == 0)
			mbar_arrive(&sm->empty[stage]);
	}
}

/* The segment's rows to the output, normalised. @ml: m and l of rows */
KVK_DEV void fast_write(const struct attn_params &p, const struct plan_seg &s,
			const struct reg_state &st, uint32_t rows, const float2 *ml)
{
	const uint32_t lane = threadIdx.x & 31;
	const uint32_t dim = threadIdx.x / 32 * 64 + lane / 4 * 2;

#pragma unroll
	for (int i = 0; i < 16; i++) {
		const uint32_t row = i / 2 * 8 + 2 * (lane & 3) + (i & 1);
		float l;

		if (row >= rows)
			continue;
		l = ml[row].y;
		l = l > 0.f ? 1.f / l : l;
#pragma unroll
		for (int b = 0; b < 4; b++) {
			const float x = st.o[b][i / 2 * 4 + (i & 1)] * l;
			const float y = st.o[b][i / 2 * 4 + 2 + (i & 1)] * l;

			out_store2(p, mla_row_elem(p, s, REG_ROWS, row) + dim + 16 * b, x,
				   y);
		}
	}
}

/* After a segment's last page. */
template <bool PAIR>
KVK_DEV void fast_end(const struct attn_params &p, const struct mla_seg &g,
		      struct reg_state &st, struct fast_smem *sm)
{
	const uint32_t lane = threadIdx.x & 31, tid = threadIdx.x;
	const uint32_t rows =
		min((uint32_t)REG_ROWS, g.s.q_len * p.nr_q_heads - g.s.hblk * REG_ROWS);
	const bool slot = g.s.nr_parts > 1 && !(PAIR && sm->pair);
	struct reg_ends *e = (struct reg_ends *)sm->p[0];

	bar_sync(BAR_ALL, 256); /* both are done with P */
#pragma unroll
	for (int h = 0; h < 2; h++) {
		float l = st.l[h];

		l += __shfl_xor_sync(~0u, l, 1);
		l += __shfl_xor_sync(~0u, l, 2);
		if ((lane & 3) == 0)
			e->l[tid / 128][tid / 32 % 4 * 16 + lane / 4 + 8 * h] = l;
	}
	if (slot)
		*(float2 *)&e->top[tid / 32][lane * 2] = reg_tops(st);
	bar_sync(BAR_ALL, 256);
	if (tid < REG_ROWS) {
		float l = e->l[0][tid] + e->l[1][tid];

		if (g.poisoned)
			l = NAN;
		reg_row_end(e, tid, sm->m[tid], l, slot);
		sm->m[tid] = REG_NONE;
	}
	bar_sync(BAR_ALL, 256);
	if constexpr (PAIR) {
		if (g.ok && sm->pair) {
			reg_pair<true>(p, g.s, st, rows, e->ml, (float4 *)sm->latent);
			return;
		}
	}
	if (g.ok && slot)
		reg_slot(p, g.s, st, rows, e);
	else if (g.ok)
		fast_write(p, g.s, st, rows, e->ml);
	else if (g.s.part == 0)
		for (uint32_t k = tid; k < rows * (LATENT / 2); k += 256)
			out_store2(p, mla_row_elem(p, g.s, REG_ROWS, 0) + 2 * k, NAN,
				   NAN);
	if (g.ok && slot)
		slot_arrive(p, g.s, &sm->pend[g.s.part == 0], BAR_ALL);
}

template <bool PAIR>
KVK_DEV void fast_consume(const struct attn_params &p, uint32_t count,
			  struct fast_smem *sm)
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
		fast_load_q(p, g.s, sm);
		nr = __shfl_sync(~0u, g.nr_pieces, 0);
		if (p.flags & KVK_ATTN_LOADS)
			fast_skip(nr, seq, sm);
		else
			fast_pages(p, g.s, nr, seq, own, st, sm);
		seq += nr;
		fast_end<PAIR>(p, g, st, sm);
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			atoms_add_release(&sm->segs_done[threadIdx.x / 32], 1);
	}
}

/* The CTA's end: its split units, by all consumers. The ring is empty and serves as scratch. */
KVK_DEV void fast_finish(const struct attn_params &p, struct fast_smem *sm)
{
	bar_sync(BAR_ALL, 256);
	for (int i = 0; i < 2; i++)
		if (sm->pend[i].epoch)
			slot_finish<reg_words<true>>(p, &sm->pend[i], (float *)sm->latent,
						     &sm->flag, threadIdx.x, BAR_ALL);
}

/* ----------------------------------------------------------------------------- producer
 */

/* Page @pfn to stage @stage. One lane. */
KVK_DEV void fast_page_load(const struct fast_params &fp, struct fast_smem *sm,
			    uint32_t stage, uint32_t pfn, uint64_t policy)
{
	const struct attn_params &p = fp.a;
	const uint32_t scales = p.token_scales ? REG_SCALES : 0;
	const int page = (int)(pfn & ((1u << p.shift) - 1)),
		  extent = (int)(pfn >> p.shift);
	const int at[5] = {0, 0, 0, page, extent};

	mbar_arrive_expect(&sm->full[stage], TOKENS * LATENT + REG_ROPE + scales);
	tma_load_5d(smem_addr(sm->latent[stage]), &fp.latent, smem_addr(&sm->full[stage]),
		    at, policy);
	tma_load_4d(smem_addr(sm->rope[stage]), &fp.rope, smem_addr(&sm->full[stage]), 0,
		    0, page, extent);
	if (scales)
		bulk_load(sm->scales[stage],
			  p.base + page_offset(p, pfn) + TOKENS * (LATENT + ROPE), scales,
			  &sm->full[stage], policy);
}

/* The factors of a page's tokens, and zeros for values behind the end: 0 x NaN is NaN. */
KVK_DEV void fast_factors_make(const struct attn_params &p, uint32_t stage, int32_t valid,
			       struct fast_smem *sm)
{
	const uint32_t lane = threadIdx.x & 31;
	struct fast_factors *f = &sm->f[stage];

#pragma unroll
	for (uint32_t t = lane; t < TOKENS; t += 32) {
		float2 v = make_float2(1.f, 1.f);

		if (!p.token_scales)
			v.x = v.y = p.scales ? p.scales[0] : 1.f;
		else if ((int32_t)t < valid)
			v = unpack_f16(*(const uint32_t *)(sm->scales[stage] + t * 4));
		v.x = v.x == 0.f ? 0x1p-24f : v.x; /* a latent of zeros: 0 / 0 is NaN */
		f->ratio[t] = __fdividef(v.y, v.x);
		f->sl[t] = v.x;
	}
	if (valid < (int32_t)TOKENS)
		for (uint32_t i = lane + valid * 32; i < TOKENS * 32; i += 32)
			*(uint4 *)(sm->latent[stage][i % 4] + i / 32 * 128 +
				   i / 4 % 8 * 16) = make_uint4(0, 0, 0, 0);
	if (valid < (int32_t)TOKENS)
		fence_proxy_async();
	__syncwarp();
	if (lane == 0)
		mbar_arrive(&sm->ready[stage]);
}

/* A warp of its own prepares the pages. */
KVK_DEV void fast_prepare(const struct attn_params &p, uint32_t count,
			  struct fast_smem *sm)
{
	uint32_t seq = 0;

	for (uint32_t i = 0; i < count; i++) {
		const struct mla_seg &g = sm->segs[i % SEG_RING];
		int32_t left;
		uint32_t nr;

		spin_until(&sm->segs_in, i);
		nr = g.nr_pieces;
		left = (int32_t)(g.s.len - g.s.page0 * TOKENS);
		for (uint32_t n = 0; n < nr; n++, seq++, left -= TOKENS) {
			const uint32_t stage = seq % fast_cfg::STAGES;

			mbar_wait(&sm->full[stage], seq / fast_cfg::STAGES & 1);
			fast_factors_make(p, stage, left, sm);
		}
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			atoms_add_release(&sm->segs_done[fast_cfg::NR_USE], 1);
	}
}

/* ------------------------------------------------------------------------------- kernel
 */

KVK_DEV void fast_init(struct fast_smem *sm)
{
	if (threadIdx.x == 0) {
		for (int i = 0; i < fast_cfg::STAGES; i++) {
			mbar_init(&sm->full[i], 1);
			mbar_init(&sm->ready[i], 1);
			mbar_init(&sm->empty[i], fast_cfg::NR_USE);
		}
		for (int i = 0; i < FAST_PS; i++) {
			mbar_init(&sm->p_full[i], 1);
			mbar_init(&sm->p_empty[i], fast_cfg::NR_USE);
		}
		sm->pend[0].epoch = sm->pend[0].last = 0;
		sm->pend[1].epoch = sm->pend[1].last = 0;
		sm->segs_in = 0;
		for (int i = 0; i < fast_cfg::NR_WARPS; i++)
			sm->segs_done[i] = 0;
		mbar_init_fence();
	}
	if (threadIdx.x < REG_ROWS)
		sm->m[threadIdx.x] = REG_NONE;
	__syncthreads();
}

template <bool PAIR>
__global__ void __launch_bounds__(fast_cfg::NR_THREADS, 1)
	attn_mla_fast_kernel(const __grid_constant__ struct fast_params p)
{
	DEV_DYNAMIC_SHARED_1K(smem_raw);
	/* a constant, so that addresses and descriptors are; of a pair but for the high bits */
	const uint32_t base = PAIR ? pair_base(REG_AT) : REG_AT;
	struct fast_smem *sm = (struct fast_smem *)__cvta_shared_to_generic(base);
	uint32_t touched = 0;

	if (smem_addr(smem_raw) != base)
		__trap();
	plan_enter(p.a);
	if (threadIdx.x / 32 == fast_cfg::NR_USE)
		touched = plan_touch(p.a);
	fast_init(sm);
	if (threadIdx.x >= fast_cfg::NR_USE * 32) {
		regs_dec<fast_cfg::REGS_FEED>();
		if (threadIdx.x / 32 == fast_cfg::NR_USE)
			slot_produce(p.a, touched, *p.a.step, sm,
				     [&](uint32_t stage, uint32_t pfn, uint64_t policy) {
					     fast_page_load(p, sm, stage, pfn, policy);
				     });
		else if (threadIdx.x / 32 == fast_cfg::NR_USE + 1)
			fast_prepare(p.a, p.a.mem.ctas[blockIdx.x].count, sm);
	} else {
		regs_inc<fast_cfg::REGS_USE>();
		fast_consume<PAIR>(p.a, p.a.mem.ctas[blockIdx.x].count, sm);
		fast_finish(p.a, sm);
	}
}

/* ------------------------------------------------------------------------------ launcher
 */

/* The layer's latent parts of all pages; a box is one page's, as [block][token][128]. */
static int fast_map_latent(const struct attn_params *p, tensor_encode_fn encode,
			   CUtensorMap *map)
{
	const uint64_t per = 1ull << p->shift;
	const cuuint64_t dim[5] = {128, TOKENS, LATENT / 128, per,
				   (p->nr_pages + per - 1) >> p->shift};
	const cuuint64_t stride[4] = {LATENT, 128, p->stride_bytes, p->extent_bytes};
	const cuuint32_t box[5] = {128, TOKENS, LATENT / 128, 1, 1},
			 one[5] = {1, 1, 1, 1, 1};

	if (encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5,
		   (void *)(p->base + p->layer_off), dim, stride, box, one,
		   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
		   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
		   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
		return -EIO;
	return 0;
}

/* ... their rope parts, as [token][64] */
static int fast_map_rope(const struct attn_params *p, tensor_encode_fn encode,
			 CUtensorMap *map)
{
	const uint64_t per = 1ull << p->shift;
	const cuuint64_t dim[4] = {ROPE, TOKENS, per,
				   (p->nr_pages + per - 1) >> p->shift};
	const cuuint64_t stride[3] = {ROPE, p->stride_bytes, p->extent_bytes};
	const cuuint32_t box[4] = {ROPE, TOKENS, 1, 1}, one[4] = {1, 1, 1, 1};

	if (encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4,
		   (void *)(p->base + p->layer_off + TOKENS * LATENT), dim, stride, box,
		   one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B,
		   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
		   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
		return -EIO;
	return 0;
}

int mla_fast_launch(const struct attn_params *p, uint32_t nr_ctas, bool pairs,
		    cudaStream_t stream)
{
	static const tensor_encode_fn encode = tensor_encode_find();
	struct fast_params k = {};
	void (*kernel)(struct fast_params) =
		pairs ? attn_mla_fast_kernel<true> : attn_mla_fast_kernel<false>;
	cudaLaunchAttribute attr[2] = {};
	cudaLaunchConfig_t cfg = {};

	static_assert(sizeof(struct fast_smem) <= 226 * 1024, "too much shared memory");
	k.a = *p;
	k.a.flight = p->flags >> 16 & 15 ? p->flight : fast_cfg::STAGES;
	if (!encode || fast_map_latent(p, encode, &k.latent) ||
	    fast_map_rope(p, encode, &k.rope) ||
	    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)sizeof(struct fast_smem)) != cudaSuccess)
		return -EIO;
	pair_launch_attrs(pairs, attr, &cfg);
	cfg.gridDim = dim3(nr_ctas);
	cfg.blockDim = dim3(fast_cfg::NR_THREADS);
	cfg.dynamicSmemBytes = sizeof(struct fast_smem);
	cfg.stream = stream;
	return cudaLaunchKernelEx(&cfg, kernel, k) == cudaSuccess ? 0 : -EIO;
}
