/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill.cu - causal attention of chunks over their pages, on wgmma: GQA with
 * head_dim 64 or 128 over BF16 and FP8 pages, and expanded MLA (192 / 128). Chunks of
 * at most 4 tokens go to the decode kernels, what is not built to attn_any.
 *
 * Budget for a tile (128 query rows, 128 tokens, head_dim 128), in clocks of an SM:
 *
 * - matrix: 2 x 128 x 128 x 128 x 2 flops at 4,096 a clock: 2,048
 *
 * - shared memory at 128 bytes: K and V in 64 KB, Q as A operand 32 KB, K and V as B
 *	operand once per warpgroup 128 KB: 1,790
 *
 * - exponentials: 16,384 at 16 a clock: 1,024; all instructions: 420 a warp, two
 *	warps a scheduler: 840 issue slots
 *
 * - L2: 64 KB a tile: 31 bytes a clock and SM
 *
 * So the matrix units are the wall, closely followed by shared memory, and everything
 * else has to run beside them.
 *
 * Rows: the query heads that share a kv head are packed, row = token x group + head:
 * a short chunk fills its tiles, all rows share K and V, and the causal border is at
 * nearly the same token for all of them.
 *
 * Roles: a warp that keeps two rings (K, V; two tiles each) full by tensor copies,
 * one box of 64 tokens x 64 values each, which land swizzled; a warp per consumer
 * warpgroup for its queries; two consumer warpgroups of 64 rows. S stays in
 * registers, becomes P there and is the A operand of P V. In a step Q K^T of tile j
 * and P V of tile j - 1 are in flight together, and the exponentials of tile j run
 * beside P V; the warpgroups take turns to issue, so that one's exponentials also run
 * beside the other's products. FP8 pages: four warps convert instead of one that
 * copies (attn_prefill_fp8.cuh).
 *
 * Tiles go up from position 0 and start at multiples of 128, a row's arithmetic
 * depends on the row alone, and what a row does not see adds exactly 0: bits do not
 * depend on chunking, neighbours or schedule. Only the tiles at a warpgroup's causal
 * border are masked. The last page's V behind the length is replaced by zeros, since
 * 0 * NaN is NaN. A NaN in V of a token of the chunk itself does reach earlier rows
 * whose tile it is in (not in attn_ref).
 *
 * P is rounded to bf16 as V is: 1.7e-3 of the output, as much as its own rounding to
 * bf16. FP8: products in f16, and a token's V scale is in its exponent (pf_scale()): what
 * is left is the output's own rounding.
 *
 * Schedule: one CTA per SM; every CTA makes the same list of items (128 rows of a
 * request and kv head), requests by length, rows from the last, and walks it to and
 * fro; within 0.1 % of even at 8 k.
 *
 * Measured (docs/performance-attn.md, "Prefill"): 599 TFLOP/s at 8 k x 8 k, the
 * matrix units 77 % busy; 2,640 clocks a tile, and the clock falls under that load.
 */
#include "kernels/attn_prefill.cuh"
#include "kernels/attn_prefill_feed.cuh"
#include "kernels/attn_prefill_fp8.cuh"
#include "kernels/attn_prefill_host.cuh"
#include "kernels/attn_prefill_math.cuh"
#include "kernels/attn_expanded.h"
#include "kernels/attn_plan.cuh"

template <class C> KVK_DEV void pf_init(const struct pf_params &p, struct pf_smem<C> *sm)
{
	if (threadIdx.x == 0) {
		for (int i = 0; i < PF_STAGES; i++) {
			mbar_init(&sm->k_full[i], C::FEEDERS);
			mbar_init(&sm->v_full[i], C::FEEDERS);
			mbar_init(&sm->k_empty[i], 8);
			mbar_init(&sm->v_empty[i], 8);
		}
		for (int i = 0; i < 2; i++) {
			mbar_init(&sm->q_full[i], C::FP8 ? 2 : 1);
			mbar_init(&sm->q_empty[i], 4);
		}
		for (int i = 0; C::FP8 && i < 4 * PF_RAW; i++)
			mbar_init(&sm->raw_full[0][0] + i, 1);
		mbar_init_fence();
		if (!C::FP8)
			tma_prefetch_map(&p.k);
		if (!C::PAGED)
			tma_prefetch_map(&p.rope);
	}
	pf_plan<C>(p, &sm->sched);
}

template <class C>
__global__ void __launch_bounds__(PF_THREADS, 1)
	attn_prefill_kernel(const __grid_constant__ struct pf_params p)
{
	extern __shared__ __align__(1024) uint8_t smem_raw[];
	struct pf_smem<C> *sm = (struct pf_smem<C> *)smem_raw;
	const uint32_t wg = pf_uniform(threadIdx.x / 128);

	pf_init<C>(p, sm);
	if (wg == 0) {
		regs_dec<C::REGS_FEED>();
		if constexpr (C::FP8)
			pf_feed_fp8<C>(p, threadIdx.x / 32, sm);
		else if (threadIdx.x < 32)
			pf_feed_kv<C>(p, sm);
		else if (threadIdx.x < 96)
			pf_feed_q<C>(p, threadIdx.x / 32 - 1, sm);
	} else {
		regs_inc<C::REGS_USE>();
		pf_consume<C>(p, wg - 1, sm);
	}
}

/* ----------------------------------------------------------------------------- launcher
 */

template <class C>
static int pf_run(const struct kvk_batch *b, struct pf_params *p, cudaStream_t stream)
{
	static_assert(sizeof(struct pf_smem<C>) <= 232448, "shared memory of an SM");

	return pf_launch(attn_prefill_kernel<C>, sizeof(struct pf_smem<C>), C::BATCH, b,
			 p, stream);
}

/* Does the fast kernel build it? */
static bool pf_fits(const struct kvk_attn_args *a)
{
	const struct kv_layout *l = &a->pages.layout;

	return l->kind == KV_LAYOUT_GQA && l->dtype != KV_DTYPE_F32 &&
	       (l->head_dim == 64 || l->head_dim == 128) && l->nr_kv_heads &&
	       a->nr_q_heads % l->nr_kv_heads == 0 && pf_args_fit(a);
}

static int pf_paged(const struct kvk_attn_args *a, cudaStream_t stream)
{
	const struct kv_layout *l = &a->pages.layout;
	const struct kv_geometry *g = &a->pages.geometry;
	const uint64_t per = 1ull << g->shift;
	const uint64_t dim[4] = {l->head_dim, l->nr_kv_heads * 2ull * KV_PAGE_TOKENS, per,
				 (g->nr_pages + per - 1) >> g->shift};
	const uint64_t stride[3] = {l->head_dim * 2ull, g->stride_bytes, g->extent_bytes};
	struct pf_params p = {};

	pf_pages(&p, a);
	p.nr_kv_heads = l->nr_kv_heads;
	p.group = a->nr_q_heads / l->nr_kv_heads;
	if (l->scale_kind == KV_SCALE_STATIC)
		p.static_scales = a->pages.scales + (size_t)a->layer * l->nr_kv_heads * 2;
	if (l->dtype == KV_DTYPE_E4M3)
		return l->head_dim == 128
			       ? pf_run<pf_cfg<128, 128, true, true>>(&a->batch, &p,
								      stream)
			       : pf_run<pf_cfg<64, 64, true, true>>(&a->batch, &p,
								    stream);
	if (pf_map(&p.k, p.base, dim, stride))
		return -EIO;
	p.rope = p.k;
	return l->head_dim == 128
		       ? pf_run<pf_cfg<128, 128, true, false>>(&a->batch, &p, stream)
		       : pf_run<pf_cfg<64, 64, true, false>>(&a->batch, &p, stream);
}

/**
 * kvk_attn_prefill_fast_cuda() - is a kernel on wgmma built for this layout and shape?
 * Context: any thread; looks at the host side only.
 * Return: false: attn_any takes it.
 */
bool kvk_attn_prefill_fast_cuda(const struct kvk_attn_args *a)
{
	return pf_fits(a) || pf_mla_fits(a);
}

/**
 * kvk_attn_prefill_cuda() - see struct kvk_attn_args; any q_len
 * Context: any thread; the verdicts were written earlier on the same stream.
 * Return: 0, -EINVAL for a shape that is not built, -EIO.
 */
int kvk_attn_prefill_cuda(const struct kvk_attn_args *a, kvk_stream stream)
{
	bool short_chunks = a->batch.q_len_max <= 4 &&
			    a->workspace_bytes >= kvk_attn_workspace_cuda(a);

	if (short_chunks && a->pages.layout.kind == KV_LAYOUT_MLA)
		return kvk_attn_mla_cuda(a, stream);
	if (short_chunks && a->pages.layout.kind == KV_LAYOUT_GQA)
		return kvk_attn_gqa_cuda(a, stream);
	if (pf_fits(a))
		return pf_paged(a, (cudaStream_t)stream);
	if (pf_mla_fits(a))
		return pf_mla_launch(a, (cudaStream_t)stream);
	return kvk_attn_any_cuda(a, stream);
}

/**
 * kvk_attn_expanded_cuda() - see struct kvk_attn_expanded_args
 * Context: any thread; the verdicts were written earlier on the same stream.
 * Return: 0, -EINVAL for a shape that is not built, -EIO.
 */
int kvk_attn_expanded_cuda(const struct kvk_attn_expanded_args *a, kvk_stream stream)
{
	const uint64_t width = a->nope_dim + a->v_dim, cols = width * a->nr_heads;
	const uint64_t dim[4] = {cols, a->nr_kv_tokens, 1, 1};
	const uint64_t stride[3] = {cols * 2, cols * 2, cols * 2};
	const uint64_t rope_dim[4] = {64, a->nr_kv_tokens, 1, 1};
	const uint64_t rope_stride[3] = {128, 128, 128};
	struct pf_params p = {};

	if (a->nope_dim != 128 || a->rope_dim != 64 || a->v_dim != 128 || !a->nr_heads ||
	    !a->nr_kv_tokens || a->act_dtype != KVK_BF16 || !(a->sm_scale > 0.f) ||
	    !a->kv || !a->rope || !a->q || !a->out || !a->kv_start ||
	    ((uintptr_t)a->kv | (uintptr_t)a->rope | (uintptr_t)a->q |
	     (uintptr_t)a->out) %
		    16)
		return -EINVAL;
	pf_batch(&p, &a->batch);
	p.kv_start = a->kv_start;
	p.base = (const uint8_t *)a->kv;
	p.q = (const uint16_t *)a->q;
	p.out = (uint16_t *)a->out;
	p.scale = a->sm_scale * PF_LOG2E;
	p.nr_q_heads = p.nr_kv_heads = a->nr_heads;
	p.group = 1;
	if (pf_map(&p.k, a->kv, dim, stride) ||
	    pf_map(&p.rope, a->rope, rope_dim, rope_stride))
		return -EIO;
	return pf_run<pf_cfg<192, 128, false, false>>(&a->batch, &p,
						      (cudaStream_t)stream);
}
