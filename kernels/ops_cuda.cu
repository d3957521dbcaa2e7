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
#include "kernels/linear_mid.h"
#include "kernels/linear_tiled.h"
#include "kernels/moe_cuda.h"

/* From here on tiles are better than reading W again for every 32 tokens; same bits. */
#define LINEAR_FEW	  32u
/* W so small that it stays in L2 while it is read once for each 16 tokens: better than tiles
 * that are too few for the SMs. Tokens of one call of linear_few.cu. */
#define LINEAR_FEW_ROWS	  4096u
#define LINEAR_FEW_COLS	  1024u
#define LINEAR_FEW_TOKENS 16u
#define LINEAR_MID	  64u

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

/* Some tokens after the others; every token is computed by itself, so the bits are the same. */
static int linear_by_16(const struct kvk_linear_args *a, kvk_stream stream)
{
	const u64 xs = kvk_linear_x_stride(a), ys = kvk_linear_y_stride(a);
	int r = 0;

	for (u32 t = 0; t < a->nr_tokens && !r; t += LINEAR_FEW_TOKENS) {
		struct kvk_linear_args part = *a;

		part.nr_tokens = KV_MIN(a->nr_tokens - t, LINEAR_FEW_TOKENS);
		part.x = (const u16 *)a->x + t * xs;
		part.y = (u8 *)a->y + t * ys * (a->y_dtype == KVK_F32 ? 4 : 2);
		r = kvk_linear_cuda(&part, stream);
	}
	return r;
}

static bool linear_is_mid(const struct kvk_linear_args *a)
{
	return a->nr_tokens > LINEAR_FEW_TOKENS && a->nr_tokens <= LINEAR_MID &&
	       a->nr_batch == 1 && a->x_dtype == KVK_BF16 && a->w.dtype == KVK_BF16 &&
	       a->w.rows <= LINEAR_FEW_ROWS && a->w.cols >= LINEAR_FEW_COLS && a->x &&
	       a->y;
}

/* What kvk_linear_cuda() refuses, kvk_linear_mid_ok() apart. */
static bool linear_dense(const struct kvk_linear_args *a)
{
	return a->y && kvk_linear_strides_ok(a) && (!a->bias || a->nr_batch == 1) &&
	       (a->y_dtype == KVK_F32 || a->y_dtype == KVK_BF16);
}

static int linear(const struct kvk_linear_args *a, kvk_stream stream)
{
	if (hopper_code && kvk_linear_mid_ok(a) && linear_dense(a))
		return kvk_linear_mid_cuda(a, stream);
	if (hopper_code && linear_is_mid(a))
		return linear_by_16(a, stream);
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
