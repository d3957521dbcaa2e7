/* SPDX-License-Identifier: Apache-2.0 */
/* kernels_moe.h - between kernels_moe.cu and kernels_dense.cu. */
#ifndef KVB_KERNELS_MOE_H
#define KVB_KERNELS_MOE_H

#include "gpu_bench.h"
#include "kernels/kernels.h"

/**
 * kvb_dense_line() - time a call and add its row; nothing to check against
 * @n: tokens, the row's shape
 */
int kvb_dense_line(struct kvb_ctx *ctx, kvb_call call, void *arg, const char *name,
		   uint32_t n, double bytes, double flops, uint32_t nr_sets);

/** kvb_dense_lines() - linear and the router */
int kvb_dense_lines(struct kvb_ctx *ctx);

/** kvb_bricks_new() - all experts' packed matrix (moe_pack.h), random; device memory
 * @second: 0 for w13, 1 for w2
 */
uint8_t *kvb_bricks_new(struct kvb_ctx *ctx, const struct kvk_experts *e, int second);

/** kvb_layer_lines() - norm, router, routed and shared experts as one graph */
int kvb_layer_lines(struct kvb_ctx *ctx);

#endif /* KVB_KERNELS_MOE_H */
