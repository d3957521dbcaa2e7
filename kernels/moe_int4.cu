/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4.cu - launcher of the routed INT4 experts: workspace, choice of variant,
 * launch.
 *
 * Two kernels: the plan (sort, tiles, counters) and the persistent kernel of
 * moe_int4.cuh, the second started early (programmatic dependent launch) so that its
 * start-up hides behind the first. The variant depends on the number of tokens alone,
 * never on routing, which only the device knows.
 */
#include <errno.h>
#include "moe_cuda.h"
#include "moe_int4_use.cuh"
#include "moe_plan.cuh"

#define ALIGN_UP(x) (((x) + 255) & ~(size_t)255)

/* struct i4_layout - offsets in the workspace */
struct i4_layout {
	size_t tiles, list, done1, done2, amax, h, out, bytes;
	uint32_t tiles_max, nr_zero, rblocks2;
};

static uint32_t tile_tokens(uint32_t nr_tokens)
{
	return nr_tokens <= 8 ? 8 : nr_tokens <= 16 ? 16 : 32;
}

static struct i4_layout i4_layout_make(const struct kvk_moe_args *a)
{
	const uint32_t slots = a->nr_tokens * a->top_k;
	struct i4_layout l;

	l.tiles_max = (slots < a->experts.nr_experts ? slots : a->experts.nr_experts) +
		      slots / 8;
	l.rblocks2 = (a->experts.hidden / 32 + 7) / 8;
	l.nr_zero = 2 + l.tiles_max + l.rblocks2 + slots;
	l.done1 = 8; /* after claim and nr_tiles */
	l.done2 = l.done1 + l.tiles_max * 4;
	l.amax = l.done2 + l.rblocks2 * 4;
	l.tiles = ALIGN_UP(l.amax + slots * 4);
	l.list = ALIGN_UP(l.tiles + l.tiles_max * 8);
	l.h = ALIGN_UP(l.list + slots * 4);
	/* f32 or bricks of f16: four bytes a value are enough for both */
	l.out = ALIGN_UP(l.h + (size_t)slots * a->experts.inter * 4);
	l.bytes = ALIGN_UP(l.out + (size_t)slots * a->experts.hidden * 4);
	return l;
}

static int i4_check(const struct kvk_moe_args *a)
{
	const struct kvk_experts *e = &a->experts;

	if (e->dtype != KVK_INT4 || e->order != KVK_ORDER_PACKED ||
	    a->act_dtype != KVK_BF16)
		return -EINVAL;
	if (e->scale_dtype != KVK_BF16 && e->scale_dtype != KVK_F16)
		return -EINVAL;
	if (!kvk_pack_ok(2 * e->inter, e->hidden, e->group) ||
	    !kvk_pack_ok(e->hidden, e->inter, e->group))
		return -EINVAL;
	if (!e->nr_experts || e->nr_experts > MOE_PLAN_EXPERTS || !a->top_k ||
	    a->top_k > 32 || a->top_k > e->nr_experts ||
	    (uint64_t)a->nr_tokens * a->top_k > 1u << 20)
		return -EINVAL;
	return 0;
}

size_t kvk_moe_int4_workspace(const struct kvk_moe_args *a)
{
	return i4_check(a) ? 0 : i4_layout_make(a).bytes;
}

static struct moe_mat mat_make(const struct kvk_experts *e, int second)
{
	const struct kvk_pack p =
		second ? kvk_pack_make(e->hidden, e->inter, e->group, 0)
		       : kvk_pack_make(2 * e->inter, e->hidden, e->group, 1);
	struct moe_mat m;

	m.base = (const uint8_t *)(second ? e->w2 : e->w13);
	m.expert_bytes = kvk_pack_bytes(&p);
	m.mtiles = p.mtiles;
	m.kbricks = p.kbricks;
	m.wl = p.wl;
	m.rblocks = 0;
	return m;
}

static struct moe_i4 i4_args(const struct kvk_moe_args *a, const struct i4_layout *l)
{
	uint8_t *ws = (uint8_t *)a->workspace;
	struct moe_i4 k = {};

	k.w13 = mat_make(&a->experts, 0);
	k.w2 = mat_make(&a->experts, 1);
	k.w2.rblocks = l->rblocks2;
	k.x = (const uint16_t *)a->x;
	k.y = (uint16_t *)a->y;
	k.ids = a->ids;
	k.weights = a->weights;
	k.claim = (uint32_t *)ws;
	k.nr_tiles = (uint32_t *)ws + 1;
	k.tiles = (const uint2 *)(ws + l->tiles);
	k.list = (const uint32_t *)(ws + l->list);
	k.done1 = (uint32_t *)(ws + l->done1);
	k.done2 = (uint32_t *)(ws + l->done2);
	k.amax = (uint32_t *)(ws + l->amax);
	k.h = ws + l->h;
	k.out = (float *)(ws + l->out);
	k.hidden = a->experts.hidden;
	k.inter = a->experts.inter;
	k.nr_tokens = a->nr_tokens;
	k.top_k = a->top_k;
	k.nr_experts = a->experts.nr_experts;
	k.own_plan = a->nr_tokens * a->top_k <= MOE_INLINE;
	k.sum_chunks = (a->nr_tokens + MOE_SUM_TOKS - 1) / MOE_SUM_TOKS;
	k.scale_f16 = a->experts.scale_dtype == KVK_F16;
	k.accumulate = a->accumulate;
	return k;
}

static int nr_sms(void)
{
	int dev, n;

	if (cudaGetDevice(&dev) ||
	    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, dev))
		return 0;
	return n;
}

template <int NTMAX, int WK, int G>
static int i4_launch(struct moe_i4 *k, cudaStream_t stream)
{
	using S = moe_shape<NTMAX, WK, G>;
	const int sms = nr_sms();
	cudaLaunchAttribute attr[1] = {};
	cudaLaunchConfig_t cfg = {};

	if (!sms ||
	    cudaFuncSetAttribute(moe_i4_kernel<NTMAX, WK, G>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize, S::DYNAMIC))
		return -EIO;
	k->w13.rblocks = (k->w13.mtiles + S::WM - 1) / S::WM;
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(sms);
	cfg.blockDim = dim3(MOE_THREADS);
	cfg.dynamicSmemBytes = S::DYNAMIC;
	cfg.stream = stream;
	cfg.attrs = attr;
	cfg.numAttrs = 1;
	return cudaLaunchKernelEx(&cfg, moe_i4_kernel<NTMAX, WK, G>, *k) ? -EIO : 0;
}

template <int G> static int i4_launch_group(struct moe_i4 *k, cudaStream_t stream)
{
	/* Few row tiles: warps split the columns, or most SMs would have no unit. */
	if (k->w13.wl == 1 && k->nr_tokens <= 16)
		return i4_launch<1, 8, G>(k, stream);
	switch (tile_tokens(k->nr_tokens)) {
	case 8:
		return i4_launch<1, 1, G>(k, stream);
	case 16:
		return i4_launch<2, 1, G>(k, stream);
	default:
		return i4_launch<4, 1, G>(k, stream);
	}
}

static int i4_run(const struct kvk_moe_args *a, uint32_t loads_only, kvk_stream stream)
{
	int r = i4_check(a);
	struct moe_plan plan = {};
	struct i4_layout l;
	struct moe_i4 k;

	if (r || !a->nr_tokens)
		return r;
	l = i4_layout_make(a);
	if (a->workspace_bytes < l.bytes)
		return -EINVAL;
	k = i4_args(a, &l);
	k.loads_only = loads_only;
	plan.ids = a->ids;
	plan.nr_slots = a->nr_tokens * a->top_k;
	plan.nr_experts = a->experts.nr_experts;
	plan.tile_tokens =
		k.w13.wl == 1 && k.nr_tokens <= 16 ? 8 : tile_tokens(a->nr_tokens);
	plan.zero = k.claim;
	plan.nr_zero = l.nr_zero;
	plan.claim = (uint32_t)nr_sms();
	plan.only_zero = k.own_plan;
	plan.nr_tiles = k.nr_tiles;
	plan.tiles = (uint2 *)k.tiles;
	plan.list = (uint32_t *)k.list;
	r = moe_plan_launch(&plan, stream);
	if (r)
		return r;
	switch (a->experts.group) {
	case 32:
		return i4_launch_group<32>(&k, (cudaStream_t)stream);
	case 64:
		return i4_launch_group<64>(&k, (cudaStream_t)stream);
	default:
		return i4_launch_group<128>(&k, (cudaStream_t)stream);
	}
}

int kvk_moe_int4_cuda(const struct kvk_moe_args *a, kvk_stream stream)
{
	return i4_run(a, 0, stream);
}

int kvk_moe_int4_loads(const struct kvk_moe_args *a, kvk_stream stream)
{
	return i4_run(a, 1, stream);
}
