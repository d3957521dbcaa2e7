/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_step.cu - launcher of moe_int4_step.cuh's kernel, and the memory that is its own.
 */
#include <errno.h>
#include "base/mutant.h"
#include "moe_int4_step_use.cuh"

/* Zero at first, as counters are between calls; packets keep what their last call left. */
__device__ uint32_t moe_step_state[STEP_OWNERS][4];
__device__ alignas(16) uint64_t moe_step_packets[STEP_OWNERS][STEP_VALUES / 2];

bool moe_step_ok(const struct kvk_moe_args *a)
{
	const struct kvk_pack p = kvk_pack_make(2 * a->experts.inter, a->experts.hidden,
						a->experts.group, 1);

	const uint32_t slots = a->nr_tokens * a->top_k;

	return p.wl == 1 && p.group == 32 && slots <= STEP_SLOTS &&
	       a->nr_tokens <= STEP_LANES && slots * a->experts.inter <= STEP_VALUES;
}

/* As many as fill a stage, and not only one, so that neighbours' bricks are one piece.
 * @bricks: of a row tile */
static uint32_t step_log_rows(uint32_t bricks)
{
	return bricks > 4 ? 1 : bricks > 2 ? 2 : 5 - bricks;
}

template <int G> static int step_launch(const struct moe_step *k, cudaStream_t stream)
{
	using S = step_shape<G>;
	cudaLaunchAttribute attr[1] = {};
	cudaLaunchConfig_t cfg = {};
	int dev, sms;

	if (cudaGetDevice(&dev) ||
	    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev) ||
	    cudaFuncSetAttribute(moe_step_kernel<G>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize, S::DYNAMIC))
		return -EIO;
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(sms);
	cfg.blockDim = dim3(STEP_THREADS);
	cfg.dynamicSmemBytes = S::DYNAMIC;
	cfg.stream = stream;
	cfg.attrs = attr;
	cfg.numAttrs = 1;
	return cudaLaunchKernelEx(&cfg, moe_step_kernel<G>, *k) ? -EIO : 0;
}

int moe_step_launch(struct moe_step *k, uint32_t owner, void *stream)
{
	void *state, *packets;

	if (cudaGetSymbolAddress(&state, moe_step_state) ||
	    cudaGetSymbolAddress(&packets, moe_step_packets))
		return -EIO;
	k->state = (uint32_t *)state + 4 * owner;
	k->packets = (uint64_t *)packets + (size_t)owner * STEP_VALUES / 2;
	k->any_tag = KV_MUTANT(moe_step_any_tag);
	k->by_tiles = k->w13.mtiles > 1 ? 0xffffffffu / k->w13.mtiles + 1 : 0;
	k->log_rows = step_log_rows(k->top_k * k->w2.kbricks);
	k->by_columns = 65535 / k->w2.kbricks + 1;
	return step_launch<32>(k, (cudaStream_t)stream);
}
