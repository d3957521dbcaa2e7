/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_moe_check.cu - a layer of experts against float64 on the dequantised weights, on the
 * device, so that a line of kvbench-kernels costs milliseconds more with its check. x and h are not
 * rounded here: an error is all that the kernel's formats and sums cost. One thread.
 */
#include "kernels_moe_ref.cuh"

#include <math.h>
#include <stdlib.h>

/* INT4: y's rounding to bf16 is 1.65e-3 of it. E4M3: x and h are rounded to e4m3. */
#define ERR_INT4 2e-3
#define ERR_E4M3 6e-2

/* Values that are not finite, or not those of the run before. */
__global__ void ref_compare(const __grid_constant__ struct kvb_moe d)
{
	const size_t n = (size_t)d.nr_tokens * d.e.hidden;
	uint32_t bad = 0;

	for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
	     i += (size_t)gridDim.x * blockDim.x)
		bad += (d.y[i] & 0x7f80) == 0x7f80 || d.y[i] != d.y_again[i];
	if (bad)
		atomicAdd(d.bad, bad);
}

/* --------------------------------------------------------------------------------- check
 */

static int run_poisoned(struct kvb_ctx *ctx, struct kvb_moe *d, kvb_call call)
{
	KVB_CUDA(cudaMemsetAsync(d->y, 0xff, (size_t)d->nr_tokens * d->e.hidden * 2,
				 ctx->stream));
	KVB_CUDA(cudaMemsetAsync(d->ws, 0xff, d->ws_bytes, ctx->stream));
	return call(ctx, d, 0);
}

double kvb_moe_err(struct kvb_ctx *ctx, const struct kvb_moe *d, const uint32_t *tokens,
		   uint32_t nr)
{
	const size_t hidden = d->e.hidden;
	uint16_t *y = (uint16_t *)malloc(hidden * 2);
	float *got = (float *)malloc(hidden * sizeof(float));
	double *want = (double *)malloc(hidden * sizeof(double)), err = 0;

	for (uint32_t i = 0; i < nr; i++) {
		KVB_CUDA(cudaMemcpyAsync(y, d->y + tokens[i] * hidden, hidden * 2,
					 cudaMemcpyDeviceToHost, ctx->stream));
		KVB_CUDA(cudaMemcpyAsync(want, d->ref + i * hidden,
					 hidden * sizeof(double), cudaMemcpyDeviceToHost,
					 ctx->stream));
		KVB_CUDA(cudaStreamSynchronize(ctx->stream));
		for (size_t c = 0; c < hidden; c++)
			got[c] = kvk_bf16_to_f32(y[c]);
		err = fmax(err, kvb_rel_err(got, want, hidden));
	}
	free(y);
	free(got);
	free(want);
	return err;
}

uint32_t kvb_sample(uint32_t n, uint32_t tokens[KVB_CHECK_TOKENS])
{
	const uint32_t nr = n < KVB_CHECK_TOKENS ? n : KVB_CHECK_TOKENS;

	for (uint32_t i = 0; i < nr; i++)
		tokens[i] = (uint32_t)((uint64_t)i * (n - 1) / (nr > 1 ? nr - 1 : 1));
	return nr;
}

void kvb_moe_ref(struct kvb_ctx *ctx, const struct kvb_moe *d, const uint32_t *tokens,
		 uint32_t nr)
{
	KVB_CUDA(cudaMemcpyAsync(d->sample, tokens, nr * 4, cudaMemcpyHostToDevice,
				 ctx->stream));
	ref_first<<<dim3(d->e.inter / 8, nr * d->top_k), 256, 0, ctx->stream>>>(*d);
	ref_second<<<dim3(d->e.hidden / 8, nr), 256, 0, ctx->stream>>>(*d);
	KVB_CUDA(cudaGetLastError());
}

int kvb_moe_check(struct kvb_ctx *ctx, struct kvb_moe *d, kvb_call call, double *ret_err)
{
	/* the fewer columns, the more a token's error scatters about what it should be */
	const double most = (d->e.dtype == KVK_E4M3 ? ERR_E4M3 : ERR_INT4) *
			    (1.0 + 2.0 / sqrt((double)d->e.hidden));
	uint32_t tokens[KVB_CHECK_TOKENS], bad;
	const uint32_t nr = kvb_sample(d->nr_tokens, tokens);
	int r = run_poisoned(ctx, d, call);

	if (r)
		return r;
	KVB_CUDA(cudaMemcpyAsync(d->y_again, d->y, (size_t)d->nr_tokens * d->e.hidden * 2,
				 cudaMemcpyDeviceToDevice, ctx->stream));
	r = run_poisoned(ctx, d, call);
	if (r)
		return r;
	KVB_CUDA(cudaMemsetAsync(d->bad, 0, 4, ctx->stream));
	ref_compare<<<1056, 256, 0, ctx->stream>>>(*d);
	kvb_moe_ref(ctx, d, tokens, nr);
	KVB_CUDA(cudaMemcpyAsync(&bad, d->bad, 4, cudaMemcpyDeviceToHost, ctx->stream));
	*ret_err = kvb_moe_err(ctx, d, tokens, nr);
	if (bad)
		*ret_err = INFINITY;
	if (!(*ret_err <= most))
		ctx->failed = true;
	return 0;
}
