/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill_host.cuh - what the launchers of the prefill kernels share: tensor maps,
 * parameters, launches. Any thread; nothing is kept but the driver's entry point.
 */
#ifndef KVK_ATTN_PREFILL_HOST_CUH
#define KVK_ATTN_PREFILL_HOST_CUH

#include "base/mutant.h"
#include "kernels/attn_prefill.cuh"
#include "kernels/tensor_map.cuh"

/* Boxes of 64 rows of 64 values; @dim: columns, rows, then two outer ones. */
static int pf_map(CUtensorMap *map, const void *base, const uint64_t dim[4],
		  const uint64_t stride[3])
{
	static const tensor_encode_fn encode = tensor_encode_find();
	const cuuint32_t box[4] = {64, KV_PAGE_TOKENS, 1, 1}, one[4] = {1, 1, 1, 1};
	cuuint64_t d[4], s[3];

	for (int i = 0; i < 4; i++)
		d[i] = dim[i];
	for (int i = 0; i < 3; i++)
		s[i] = stride[i];
	if (!encode ||
	    encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)base, d, s, box, one,
		   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
		   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
		   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
		return -EIO;
	return 0;
}

/* One CTA per SM; 0: the kernel cannot run here. */
template <class K> static int pf_nr_ctas(K kernel, size_t smem)
{
	int dev, sms = 0;

	if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)smem) != cudaSuccess ||
	    cudaGetDevice(&dev) != cudaSuccess ||
	    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev) !=
		    cudaSuccess)
		return 0;
	return sms;
}

/* Queue it, @most requests a launch. */
template <class K>
static int pf_launch(K kernel, size_t smem, uint32_t most, const struct kvk_batch *b,
		     struct pf_params *p, cudaStream_t stream)
{
	const int nr_ctas = pf_nr_ctas(kernel, smem);

	if (nr_ctas <= 0)
		return -EIO;
	for (uint32_t r = 0; r < b->nr_requests; r += most) {
		p->nr_requests = min(b->nr_requests - r, most);
		kernel<<<(unsigned)nr_ctas, PF_THREADS, smem, stream>>>(*p);
		if (cudaGetLastError() != cudaSuccess)
			return -EIO;
		p->row_start += most;
		p->lengths += most;
		p->q_start += most;
		p->verdicts += most;
		if (p->kv_start)
			p->kv_start += most;
	}
	return 0;
}

static void pf_batch(struct pf_params *p, const struct kvk_batch *b)
{
	p->off = KV_MUTANT(row_range) || KV_MUTANT(cuda_prefill_row_range)
			 ? PF_NO_ROW_RANGE
			 : 0;
	p->rows = b->rows;
	p->row_start = b->row_start;
	p->lengths = b->lengths;
	p->q_start = b->q_start;
	p->verdicts = b->verdicts;
	p->step = b->step;
}

/* Pages and activations; @p is zero before. */
static void pf_pages(struct pf_params *p, const struct kvk_attn_args *a)
{
	const struct kv_layout *l = &a->pages.layout;
	const struct kv_geometry *g = &a->pages.geometry;

	pf_batch(p, &a->batch);
	p->base =
		(const uint8_t *)a->pages.base + (uint64_t)kv_layer_stride(l) * a->layer;
	p->extent_bytes = g->extent_bytes;
	p->stride_bytes = g->stride_bytes;
	p->shift = g->shift;
	p->nr_pages = g->nr_pages;
	p->q = (const uint16_t *)a->q;
	p->out = (uint16_t *)a->out;
	p->scale = a->sm_scale * PF_LOG2E;
	p->nr_q_heads = a->nr_q_heads;
}

/* What both kinds of pages have to be. */
static bool pf_args_fit(const struct kvk_attn_args *a)
{
	const struct kv_layout *l = &a->pages.layout;
	const struct kv_geometry *g = &a->pages.geometry;

	return l->page_tokens == KV_PAGE_TOKENS && a->act_dtype == KVK_BF16 &&
	       a->nr_q_heads && a->layer < l->nr_layers &&
	       (l->scale_kind != KV_SCALE_STATIC || a->pages.scales) &&
	       a->sm_scale > 0.f && g->nr_pages &&
	       ((uintptr_t)a->pages.base | (uintptr_t)a->q | (uintptr_t)a->out |
		g->stride_bytes | g->extent_bytes) %
			       16 ==
		       0;
}

/* MLA pages in absorbed form: attn_prefill_mla.cu */
bool pf_mla_fits(const struct kvk_attn_args *a);
int pf_mla_launch(const struct kvk_attn_args *a, cudaStream_t stream);

#endif /* KVK_ATTN_PREFILL_HOST_CUH */
