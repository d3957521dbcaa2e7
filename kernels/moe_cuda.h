/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_cuda.h - launchers of the CUDA kernels around the experts, for ops_cuda.cu, and the
 * INT4 repack.
 *
 * Launchers follow struct kvk_ops: they queue on @stream, never allocate, never wait, can
 * be captured, and return 0, -EINVAL for a shape that is not built, -EIO if a launch
 * failed.
 */
#ifndef KVK_MOE_CUDA_H
#define KVK_MOE_CUDA_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * kvk_moe_int4_cuda() - routed INT4 experts, weights in KVK_ORDER_PACKED
 * @a: act_dtype BF16; hidden and inter multiples of 128; w13 and w2 from
 *	kvk_moe_int4_repack(), s13 and s2 are not read
 */
int kvk_moe_int4_cuda(const struct kvk_moe_args *a, kvk_stream stream);

/**
 * kvk_moe_int4_loads() - the same kernel without its products: what the access pattern
 *	alone costs. For benchmarks; y is meaningless
 */
int kvk_moe_int4_loads(const struct kvk_moe_args *a, kvk_stream stream);

/** kvk_moe_int4_workspace() - bytes of workspace kvk_moe_int4_cuda() needs; 0: not built
 */
size_t kvk_moe_int4_workspace(const struct kvk_moe_args *a);

/**
 * struct kvk_repack - one expert's matrices on their way to KVK_ORDER_PACKED
 * @shape: dtype, group, hidden, inter of the layer; its pointers are not used
 * @w13, @s13, @w2, @s2: one expert in KVK_ORDER_STANDARD, device memory
 * @packed13, @packed2: where this expert goes: base + expert * kvk_moe_packed_bytes()
 */
struct kvk_repack {
	struct kvk_experts shape;
	const void *w13;
	const void *s13;
	const void *w2;
	const void *s2;
	void *packed13;
	void *packed2;
};

/**
 * kvk_moe_packed_bytes() - bytes of one expert's packed matrix; nibbles and scales, no
 * more
 * @e: shape
 * @second: 0 for w13, 1 for w2
 */
size_t kvk_moe_packed_bytes(const struct kvk_experts *e, int second);

/**
 * kvk_moe_int4_repack() - standard to packed order, one expert; a staging buffer of one
 *	expert is all that a loader needs beside the packed layer
 */
int kvk_moe_int4_repack(const struct kvk_repack *r, kvk_stream stream);

/**
 * kvk_moe_int4_verify() - count the words and scales that do not come back bit by bit
 * @ret_bad: device memory, is added to
 */
int kvk_moe_int4_verify(const struct kvk_repack *r, uint32_t *ret_bad, kvk_stream stream);

/**
 * kvk_moe_fp8_cuda(), kvk_moe_bf16_cuda() - routed experts in KVK_ORDER_STANDARD: E4M3 with
 *	block scales; BF16 or F32
 * @a: act_dtype BF16; hidden and inter multiples of 8
 */
int kvk_moe_fp8_cuda(const struct kvk_moe_args *a, kvk_stream stream);
int kvk_moe_bf16_cuda(const struct kvk_moe_args *a, kvk_stream stream);

/** kvk_moe_plain_workspace() - bytes of workspace for these two; 0: not built */
size_t kvk_moe_plain_workspace(const struct kvk_moe_args *a);

/** kvk_moe_workspace_cuda() - for any of the MoE launchers, by experts.dtype; 0: not built */
size_t kvk_moe_workspace_cuda(const struct kvk_moe_args *a);

/* The rest of a forward pass; contracts in kernels.h. linear: x, W and strides aligned to 16
 * bytes, cols a multiple of 8; W may be read before the kernel in front of it has ended, and
 * so may route's bias. */
int kvk_linear_cuda(const struct kvk_linear_args *a, kvk_stream stream);
int kvk_norm_cuda(const struct kvk_norm_args *a, kvk_stream stream);
int kvk_rope_cuda(const struct kvk_rope_args *a, kvk_stream stream);
int kvk_silu_cuda(const struct kvk_silu_args *a, kvk_stream stream);
int kvk_sample_cuda(const struct kvk_sample_args *a, kvk_stream stream);
int kvk_moe_route_cuda(const struct kvk_moe_route_args *a, kvk_stream stream);

#ifdef __cplusplus
}
#endif
#endif /* KVK_MOE_CUDA_H */
