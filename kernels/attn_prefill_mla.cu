/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill_mla.cu - causal attention of chunks over MLA pages in BF16 and FP8, absorbed
 * form (latent 512 + rope 64), on wgmma.
 *
 * Rows are packed as in attn_prefill.cu: row = token x heads + head. Budget for a tile (64
 * rows, a page of 64 tokens), in clocks of an SM:
 *
 * - matrix: 64 x 64 x (576 + 512) x 2 flops at 4,096 a clock: 2,176
 *
 * - shared memory at 128 bytes: tile in 72 KB, Q and K as operands 144 KB, the latents as
 *	values 64 KB, P 16 KB: 2,370
 *
 * The output of 64 rows is 128 KB: two warpgroups hold half of each row. The first makes the
 * scores and the probabilities, keeps them as register operand for its half and leaves them
 * in shared memory for the second. The latents are loaded once and read twice: as K with rows
 * of 64 values, as V across them. While P V of tile j runs, Q K^T of tile j + 1 is queued
 * behind it; only the exponentials and the hand-over of P stand between the products.
 *
 * FP8 pages become tiles of f16 (attn_prefill_mla_fp8.cuh); scales as in attn_prefill.cu.
 *
 * For long chunks the expanded form (kvk_attn_expanded_cuda()) takes a third of the
 * operations, but needs K and V of all heads in memory.
 *
 * Everything else (schedule, masks, tails, what bits depend on) as in attn_prefill.cu.
 */
#include "kernels/attn_prefill_host.cuh"
#include "kernels/attn_prefill_mla.cuh"
#include "kernels/attn_prefill_mla_fp8.cuh"

template <class C>
__global__ void __launch_bounds__(PF_THREADS, 1)
	attn_prefill_mla_kernel(const __grid_constant__ struct pf_params p)
{
	extern __shared__ __align__(1024) uint8_t smem_raw[];
	struct pf_mla_smem<C> *sm = (struct pf_mla_smem<C> *)smem_raw;
	const uint32_t wg = pf_uniform(threadIdx.x / 128);

	if (threadIdx.x == 0) {
		for (int i = 0; i < PF_STAGES; i++) {
			mbar_init(&sm->full[i], C::FEEDERS);
			mbar_init(&sm->empty[i], 8);
		}
		mbar_init(&sm->tail, 1);
		mbar_init(&sm->q_full, C::Q_FEEDERS);
		mbar_init(&sm->q_empty, 4);
		mbar_init(&sm->p_full, 4);
		mbar_init(&sm->p_empty, 4);
		mbar_init_fence();
	}
	pf_plan<C>(p, &sm->sched);
	if (wg == 0) {
		regs_dec<C::REGS_FEED>();
		if constexpr (C::FP8)
			pf_mla_feed_fp8<C>(p, threadIdx.x / 32, sm);
		else if (threadIdx.x < 32)
			pf_mla_feed<C>(p, sm);
		else if (threadIdx.x < 96)
			pf_mla_feed_q<C>(p, threadIdx.x / 32 - 1, sm);
	} else if (wg == 1) {
		regs_inc<C::REGS_SCORE>();
		pf_mla_score<C>(p, sm);
	} else {
		regs_inc<C::REGS_VALUE>();
		pf_mla_value<C>(p, sm);
	}
}

/* Does this kernel build it? */
bool pf_mla_fits(const struct kvk_attn_args *a)
{
	const struct kv_layout *l = &a->pages.layout;

	return l->kind == KV_LAYOUT_MLA && l->dtype != KV_DTYPE_F32 &&
	       l->latent_dim == 512 && l->rope_dim == 64 && a->nr_q_heads <= 128 &&
	       pf_args_fit(a);
}

template <class C>
static int pf_mla_run(const struct kvk_attn_args *a, struct pf_params *p,
		      cudaStream_t stream)
{
	static_assert(sizeof(struct pf_mla_smem<C>) <= 232448, "shared memory of an SM");

	return pf_launch(attn_prefill_mla_kernel<C>, sizeof(struct pf_mla_smem<C>),
			 C::BATCH, &a->batch, p, stream);
}

/* Queue it; 0 or -EIO. */
int pf_mla_launch(const struct kvk_attn_args *a, cudaStream_t stream)
{
	const struct kv_layout *l = &a->pages.layout;
	const struct kv_geometry *g = &a->pages.geometry;
	const uint64_t per = 1ull << g->shift, nr = (g->nr_pages + per - 1) >> g->shift;
	const uint64_t dim[4] = {512, KV_PAGE_TOKENS, per, nr};
	const uint64_t stride[3] = {1024, g->stride_bytes, g->extent_bytes};
	const uint64_t rope_dim[4] = {64, KV_PAGE_TOKENS, per, nr};
	const uint64_t rope_stride[3] = {128, g->stride_bytes, g->extent_bytes};
	struct pf_params p = {};

	pf_pages(&p, a);
	p.group = a->nr_q_heads;
	p.nr_kv_heads = 1;
	if (l->scale_kind == KV_SCALE_STATIC)
		p.static_scales = a->pages.scales + a->layer;
	if (l->dtype == KV_DTYPE_E4M3)
		return pf_mla_run<pf_mla<true>>(a, &p, stream);
	if (pf_map(&p.k, p.base, dim, stride) ||
	    pf_map(&p.rope, p.base + kv_mla_rope_off(l, 0), rope_dim, rope_stride))
		return -EIO;
	return pf_mla_run<pf_mla<false>>(a, &p, stream);
}
