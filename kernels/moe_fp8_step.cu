/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_step.cu - launcher of moe_fp8_step.cuh's kernel, and the memory that is its own.
 */
#include <errno.h>
#include "base/mutant.h"
#include "moe_fp8_step_use.cuh"
#include "moe_fp8_wide.h"
#include "moe_owner.h"
#include "moe_start.cuh"
#include "tensor_map.cuh"

#define F8S_BLOCKS 32u /* of h's 128 columns */

/* Zero at first, as counters are between calls; packets keep what their last call left. */
__device__ uint32_t f8s_state[F8S_OWNERS][4];
__device__ alignas(16) uint64_t f8s_packets[F8S_OWNERS][F8S_VALUES];

bool moe_fp8_step_ok(const struct kvk_moe_args *a)
{
	const uint32_t slots = a->nr_tokens * a->top_k;

	return moe_fp8_wide_ok(&a->experts) && slots <= F8S_SLOTS &&
	       slots * a->experts.inter <= F8S_VALUES &&
	       a->experts.inter <= F8S_BLOCKS * 128;
}

/* Boxes of @box_rows rows and @blocks blocks of 128 columns, one block behind the other. 0 or
 * -EIO. */
static int f8s_map(CUtensorMap *map, const void *base, uint64_t rows, uint64_t cols,
		   uint32_t box_rows, uint32_t blocks)
{
	static const tensor_encode_fn encode = tensor_encode_find();
	const cuuint32_t box[4] = {128, box_rows, blocks, 1}, one[4] = {1, 1, 1, 1};
	const cuuint64_t dim[4] = {128, rows, cols / 128, 1};
	const cuuint64_t stride[3] = {cols, 128, cols * rows};

	if (!encode ||
	    encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, (void *)base, dim, stride, box,
		   one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
		   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
		   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
		return -EIO;
	return 0;
}

/* Row tiles of a SECOND unit, so that it fills a stage: log2. */
static uint32_t f8s_log_rows(const struct kvk_moe_args *a)
{
	const uint32_t bricks = a->top_k * (a->experts.inter / 128); /* of a row tile */

	return bricks >= 16 ? 0 : bricks >= 8 ? 1 : bricks >= 4 ? 2 : 3;
}

/* Column blocks that a copy of W2 brings: as many as a slot's bricks of a stage are made of. */
static uint32_t f8s_blocks(const struct kvk_moe_args *a, uint32_t log_rows)
{
	const uint32_t blocks = a->experts.inter / 128, two = blocks & -blocks;

	return log_rows ? 1 : two < F8S_WARPS ? two : F8S_WARPS;
}

/* May units, of which there are @units, be twice as long, with no CTA having more to do? */
static bool f8s_two(uint32_t units)
{
	const uint32_t sms = moe_sms();

	return sms && 2 * ((units / 2 + sms - 1) / sms) <= (units + sms - 1) / sms;
}

/* log2 of the turns of FIRST and SECOND units. SECOND units of many stages must be two rounds of the CTAs
 * at least. Return: are there two of any? */
static bool f8s_turns(const struct kvk_moe_args *a, uint32_t log_rows, uint32_t *ret_log)
{
	const struct kvk_experts *e = &a->experts;
	const uint32_t first = a->nr_tokens * a->top_k * (e->inter / 16);
	const uint32_t second = a->nr_tokens * (e->hidden / 32 >> log_rows);
	const bool one_stage = a->top_k * (e->inter / 128) << log_rows <= F8S_WARPS;

	/* row tiles of a unit have the scale of 128 rows in common */
	ret_log[1] =
		log_rows < 2 && f8s_two(second) && (one_stage || second / 2 >= moe_sms());
	ret_log[0] = ret_log[1] && f8s_two(first);
	return ret_log[1];
}

int moe_fp8_step_launch(const struct kvk_moe_args *a, void *stream)
{
	const struct kvk_experts *e = &a->experts;
	static struct moe_owners<F8S_OWNERS> owners;
	const int owner = moe_owner(&owners, a->workspace);
	struct f8s_args k = {};
	void *state, *packets;
	bool two;
	int r;

	if (owner < 0)
		return 1;
	if (cudaGetSymbolAddress(&state, f8s_state) ||
	    cudaGetSymbolAddress(&packets, f8s_packets))
		return -EIO;
	k.log_rows = f8s_log_rows(a);
	k.w2_blocks = f8s_blocks(a, k.log_rows);
	two = f8s_turns(a, k.log_rows, k.log_turns);
	r = f8s_map(&k.w13, e->w13, (uint64_t)e->nr_experts * 2 * e->inter, e->hidden, 16,
		    F8S_WARPS);
	if (!r)
		r = f8s_map(&k.w2, e->w2, (uint64_t)e->nr_experts * e->hidden, e->inter,
			    32, k.w2_blocks);
	if (r)
		return r;
	k.s13 = (const float *)e->s13;
	k.s2 = (const float *)e->s2;
	k.x = (const uint16_t *)a->x;
	k.y = moe_y_make(a);
	k.ids = a->ids;
	k.weights = a->weights;
	k.state = (uint32_t *)state + 4 * owner;
	k.packets = (uint64_t *)packets + (size_t)owner * F8S_VALUES;
	k.hidden = e->hidden;
	k.inter = e->inter;
	k.nr_tokens = a->nr_tokens;
	k.top_k = a->top_k;
	k.nr_experts = e->nr_experts;
	k.by_columns = 65535 / (e->inter / 128) + 1;
	k.by_tiles = 0xffffffffu / (e->inter / 16 >> k.log_turns[0]) + 1;
	k.by_tokens = a->nr_tokens > 1 ? 0xffffffffu / a->nr_tokens + 1 : 0;
	k.any_tag = KV_MUTANT(moe_fp8_step_any_tag);
	return moe_start(two ? f8s_kernel<true> : f8s_kernel<false>, dim3(moe_sms()),
			 F8S_THREADS, F8S_DYNAMIC, &k, stream);
}
