/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_cuda.cu - the table of the CUDA kernels, when there is a device that can run them.
 *
 * Here CUDA's answers become errno and go no further. What the hooks share and the kernels
 * leave to their caller is checked here once: the arrays without which a page must not be
 * touched. The probe runs once in a process; any thread.
 */
#include "kernels/attn_cuda.h"
#include "kernels/dev.cuh"
#include "kernels/linear_fp8.h"
#include "kernels/linear_mid.h"
#include "kernels/linear_tiled.h"
#include "kernels/moe_cuda.h"

/* From here on tiles are better than reading W again for every 32 tokens; same bits. */
#define LINEAR_FEW	   32u
/* Weights from which on a matrix takes CTAs several rounds, and tokens for which that matters. */
#define LINEAR_LONG	   (24ull << 20)
#define LINEAR_LONG_TOKENS 8u
/* E4M3: tokens up to which W again for every 64 is faster than tiles */
#define LINEAR_FP8	   512u

static int attn_check(const struct kvk_attn_args *a)
{
	if (!a->q || !a->out || dev_batch_check(&a->batch, true) ||
	    kvk_pages_check(&a->pages))
		return -EINVAL;
	return 0;
}

/*
 * The fast attention and the INT4 experts are written for Hopper alone (arch.cuh). Code
 * for it shows by its shared memory: a device of that kind may also have been given other
 * code.
 */
__global__ void probe_kernel(void)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	__shared__ volatile int mark[32];

	mark[threadIdx.x % 32] = 1;
#endif
}

static bool hopper_code; /* set once, before the table is given out */

static int attn_mla(const struct kvk_attn_args *a, kvk_stream stream)
{
	int r = attn_check(a);

	if (!r && a->pages.layout.kind != KV_LAYOUT_MLA)
		r = -EINVAL;
	if (r || !a->batch.nr_tokens)
		return r;
	return hopper_code ? kvk_attn_mla_cuda(a, stream) : kvk_attn_any_cuda(a, stream);
}

static int attn_gqa(const struct kvk_attn_args *a, kvk_stream stream)
{
	int r = attn_check(a);

	if (!r && a->pages.layout.kind != KV_LAYOUT_GQA)
		r = -EINVAL;
	if (r || !a->batch.nr_tokens)
		return r;
	return hopper_code ? kvk_attn_gqa_cuda(a, stream) : kvk_attn_any_cuda(a, stream);
}

static int attn_prefill(const struct kvk_attn_args *a, kvk_stream stream)
{
	int r = attn_check(a);

	if (r || !a->batch.nr_tokens)
		return r;
	return hopper_code ? kvk_attn_prefill_cuda(a, stream)
			   : kvk_attn_any_cuda(a, stream);
}

static int moe_int4(const struct kvk_moe_args *a, kvk_stream stream)
{
	return hopper_code ? kvk_moe_int4_cuda(a, stream) : -EINVAL;
}

/* A matrix of many rounds, a few tokens: linear_few.cu's ring runs on from tile to tile. */
static bool linear_is_long(const struct kvk_linear_args *a)
{
	return a->nr_tokens <= LINEAR_LONG_TOKENS &&
	       (u64)a->w.rows * a->w.cols * a->nr_batch >= LINEAR_LONG;
}

/* What kvk_linear_cuda() refuses, kvk_linear_mid_ok() apart. */
static bool linear_dense(const struct kvk_linear_args *a)
{
	return a->y && kvk_linear_strides_ok(a) && (!a->bias || a->nr_batch == 1) &&
	       (a->y_dtype == KVK_F32 || a->y_dtype == KVK_BF16);
}

static int linear(const struct kvk_linear_args *a, kvk_stream stream)
{
	if (hopper_code && kvk_linear_mid_ok(a) && linear_dense(a) && !linear_is_long(a))
		return kvk_linear_mid_cuda(a, stream);
	if (hopper_code && a->nr_tokens <= LINEAR_FP8 && kvk_linear_fp8_ok(a) &&
	    linear_dense(a))
		return kvk_linear_fp8_cuda(a, stream);
	if (a->nr_tokens > LINEAR_FEW && kvk_linear_tiled_ok(a))
		return kvk_linear_tiled_cuda(a, stream);
	return kvk_linear_cuda(a, stream);
}

static const struct kvk_ops cuda_ops = {
	.name = "cuda",
	.tag_check = kvk_tag_check_cuda,
	.append = kvk_append_cuda,
	.attn_mla = attn_mla,
	.attn_gqa = attn_gqa,
	.attn_prefill = attn_prefill,
	.moe_route = kvk_moe_route_cuda,
	.moe_int4 = moe_int4,
	.moe_fp8 = kvk_moe_fp8_cuda,
	.moe_bf16 = kvk_moe_bf16_cuda,
	.linear = linear,
	.norm = kvk_norm_cuda,
	.rope = kvk_rope_cuda,
	.norm_rope_append = kvk_norm_rope_append_cuda,
	.silu = kvk_silu_cuda,
	.sample = kvk_sample_cuda,
	.page_move = kvk_page_move_cuda,
	.attn_workspace = kvk_attn_workspace_cuda,
	.moe_workspace = kvk_moe_workspace_cuda,
};

/* Can the current device run this build's code? */
static bool device_usable(void)
{
	cudaFuncAttributes attr;
	int nr = 0;

	if (cudaGetDeviceCount(&nr) != cudaSuccess || nr < 1 ||
	    cudaFuncGetAttributes(&attr, (const void *)probe_kernel) != cudaSuccess) {
		(void)cudaGetLastError(); /* or the next launcher would report it */
		return false;
	}
	hopper_code = attr.sharedSizeBytes > 0;
	return true;
}

extern "C" const struct kvk_ops *kvk_cuda_ops(void)
{
	static const bool usable = device_usable();

	return usable ? &cuda_ops : NULL;
}
