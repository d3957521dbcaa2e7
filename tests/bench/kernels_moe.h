/* SPDX-License-Identifier: Apache-2.0 */
/* kernels_moe.h - between the files of kvbench-kernels' moe family. */
#ifndef KVB_KERNELS_MOE_H
#define KVB_KERNELS_MOE_H

#include "gpu_bench.h"
#include "kernels/kernels.h"

#define KVB_CHECK_TOKENS 8u

/**
 * struct kvb_moe - device memory of a layer of experts; borrowed by the calls
 * @y_again: y of the run before
 * @sample, @h, @ref: of kvb_moe_check(): tokens, their slots' h and their y
 * @bad: values that are not as they should be
 * @loads_only: the calls leave their products out
 */
struct kvb_moe {
	struct kvk_experts e;
	uint8_t *w13, *w2;
	uint16_t *x, *y, *y_again;
	uint32_t *ids;
	float *weights;
	uint32_t *sample, *bad;
	double *h, *ref;
	void *ws;
	size_t ws_bytes;
	uint32_t nr_tokens, top_k, nr_sets;
	bool loads_only;
};

/**
 * kvb_moe_check() - run a call twice on NaN and compare with float64 on the dequantised weights
 * @ret_err: the largest |y - ref| / |ref| of the tokens looked at (up to KVB_CHECK_TOKENS, all
 *	rows); infinite if any value of y is not finite or the second run's differs. ctx->failed is
 *	set if it is more than the dtype explains
 *
 * Return: 0 or -errno of the call.
 */
int kvb_moe_check(struct kvb_ctx *ctx, struct kvb_moe *d, kvb_call call, double *ret_err);

/**
 * kvk_moe_fp8_loads() - kvk_moe_fp8_cuda() without its products: what its access pattern costs
 * alone; y is meaningless
 */
extern "C" int kvk_moe_fp8_loads(const struct kvk_moe_args *a, kvk_stream stream);

/**
 * kvk_moe_int4_wide_loads() - kvk_moe_int4_cuda() where moe_int4_wide.cuh works, without its
 * products; y is meaningless
 */
extern "C" int kvk_moe_int4_wide_loads(const struct kvk_moe_args *a, kvk_stream stream);

/**
 * kvb_moe_ref() - queue float64 on the dequantised weights of tokens @tokens (up to
 *	KVB_CHECK_TOKENS), of data set 0: to d->ref, [token][hidden]
 */
void kvb_moe_ref(struct kvb_ctx *ctx, const struct kvb_moe *d, const uint32_t *tokens,
		 uint32_t nr);

/** kvb_moe_err() - the largest |y - ref| / |ref| of these tokens; waits */
double kvb_moe_err(struct kvb_ctx *ctx, const struct kvb_moe *d, const uint32_t *tokens,
		   uint32_t nr);

/** kvb_sample() - up to KVB_CHECK_TOKENS of @n, the first and the last among them; how many */
uint32_t kvb_sample(uint32_t n, uint32_t tokens[KVB_CHECK_TOKENS]);

/* Error of a call of data set 0, which it makes; infinite if it fails. */
typedef double (*kvb_err)(struct kvb_ctx *ctx, kvb_call call, void *arg);

/**
 * struct kvb_dense - a line of kvb_dense_line()
 * @arg: of @call and @err
 * @n: tokens, the row's shape
 * @most: more than the formats explain: the run has failed
 */
struct kvb_dense {
	const char *name;
	kvb_call call;
	kvb_err err;
	void *arg;
	uint32_t n, nr_sets;
	double bytes, flops, most;
};

/** kvb_dense_line() - check and time a call, add its row */
int kvb_dense_line(struct kvb_ctx *ctx, const struct kvb_dense *line);

/** kvb_dense_lines() - linear and the router */
int kvb_dense_lines(struct kvb_ctx *ctx);

/** kvb_bricks_new() - all experts' packed matrix (moe_pack.h), random; device memory
 * @second: 0 for w13, 1 for w2
 */
uint8_t *kvb_bricks_new(struct kvb_ctx *ctx, const struct kvk_experts *e, int second);

/** kvb_layer_lines() - norm, router, routed and shared experts as one graph */
int kvb_layer_lines(struct kvb_ctx *ctx);

#endif /* KVB_KERNELS_MOE_H */
