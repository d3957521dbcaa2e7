/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4.cu - launcher of the routed INT4 experts: workspace, choice of variant,
 * launch.
 *
 * Many tokens an expert are moe_int4_wide.cu's. For the others two kernels: the plan (sort, tiles, counters) and the persistent kernel of moe_int4.cuh, the second
 * started early (programmatic dependent launch) so that its start-up hides behind the first.
 * The variant depends on the number of tokens alone, never on routing, which only the
 * device knows.
 */
#include <errno.h>
#include "moe_cuda.h"
#include "moe_int4.cuh"
#include "moe_int4_step.h"
#include "moe_int4_wide.h"
#include "moe_owner.h"
#include "moe_plan.cuh"

#define CLEAN_BLOCKS 64u
#define CLEAN_WORDS  1024u
/* Slots an expert: from which moe_int4_wide.cu is better; up to which its tiles are of 32, 64
 * and 112 tokens, so that hardly an expert needs two */
#define WIDE_MEAN    10u
#define WIDE_FEW     26u
#define WIDE_MIDDLE  52u
#define WIDE_MANY    92u
/* From so many slots on most sums are made before the last products, where those are short */
#define EARLY_SLOTS  256u
#define ALIGN_UP(x)  (((x) + 255) & ~(size_t)255)

/* struct i4_layout - offsets in the workspace */
struct i4_layout {
	size_t tiles, list, done1, done2, amax, h, out, h_panels, x_back, h_back, place,
		bytes;
	uint32_t tiles_max, nr_zero, rblocks2;
};

static struct i4_variant i4_choose(const struct kvk_moe_args *a)
{
	const struct kvk_experts *e = &a->experts;
	const uint32_t slots = a->nr_tokens * a->top_k;
	const struct kvk_pack p = kvk_pack_make(2 * e->inter, e->hidden, e->group, 1);
	struct i4_variant v = {1, 1, 1};

	/* Few row tiles: up to 4 slots an expert two warps share one, since units twice as many
	 * end together better, and half of the SMs had none where experts are few. With 5 slots
	 * an expert, its ninth token is better a tile of its own. */
	if (p.wl == 1 && slots < 4 * e->nr_experts)
		v.wk = 2;
	else if (slots > 8 * e->nr_experts)
		v.ntmax = 4;
	else if (slots > (p.wl == 1 ? 6 : 4) * e->nr_experts)
		v.ntmax = 2;
	/* Short rows: a unit of 37 KB would cost more to hand out than to read. */
	if (e->inter / KVK_BRICK_COLS <= 2)
		v.rsub = slots < 32 ? 2 : 4;
	return v;
}

/* Tokens of a tile where an expert has so many that moe_int4_wide.cu is better; or 0. */
static uint32_t wide_tile(const struct kvk_moe_args *a)
{
	const uint32_t slots = a->nr_tokens * a->top_k, e = a->experts.nr_experts;

	if (a->experts.hidden > MOE_WIDE_COLS || a->experts.inter > MOE_WIDE_COLS)
		return 0;
	if (slots < WIDE_MEAN * e)
		return 0;
	if (slots <= WIDE_MIDDLE * e)
		return slots <= WIDE_FEW * e ? 32 : 64;
	return slots <= WIDE_MANY * e ? 112 : 128;
}

static struct i4_layout i4_layout_make(const struct kvk_moe_args *a,
				       const struct i4_variant *v)
{
	const uint32_t slots = a->nr_tokens * a->top_k;
	struct i4_layout l;

	l.tiles_max = (slots < a->experts.nr_experts ? slots : a->experts.nr_experts) +
		      slots / 8;
	l.rblocks2 = (a->experts.hidden / 32 + 8 * v->rsub - 1) / (8 * v->rsub);
	l.nr_zero = 4 + l.tiles_max + l.rblocks2 + slots;
	l.done1 = 16; /* after claim, exits, nr_tiles */
	l.done2 = l.done1 + l.tiles_max * 4;
	l.amax = l.done2 + l.rblocks2 * 4;
	l.tiles = ALIGN_UP(l.amax + slots * 4);
	l.list = ALIGN_UP(l.tiles + l.tiles_max * 8);
	l.h = ALIGN_UP(l.list + slots * 4);
	/* f32 or bricks of f16: four bytes a value are enough for both */
	l.out = ALIGN_UP(l.h + (size_t)slots * a->experts.inter * 4);
	/* from here on: moe_int4_wide.cu's */
	l.h_panels = l.bytes = ALIGN_UP(l.out + (size_t)slots * a->experts.hidden * 4);
	if (!wide_tile(a))
		return l;
	l.x_back = ALIGN_UP(l.h_panels + (size_t)slots * a->experts.inter * 2);
	l.h_back = ALIGN_UP(l.x_back + (size_t)slots * 4);
	l.place = ALIGN_UP(l.h_back + (size_t)slots * 4);
	l.bytes = ALIGN_UP(l.place + (size_t)slots * 4);
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
	struct i4_variant v;

	if (i4_check(a))
		return 0;
	v = i4_choose(a);
	return i4_layout_make(a, &v).bytes;
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
	m.rsub = 1;
	return m;
}

static struct wide_mat wide_mat_make(const struct kvk_experts *e, int second)
{
	const struct moe_mat m = mat_make(e, second);
	const struct wide_mat f = {m.base, m.expert_bytes, m.mtiles, m.kbricks, m.wl};

	return f;
}

/* Counters that are zero between launches: static device memory, one block per workspace
 * (two launches that share a workspace cannot overlap), cleared by the kernel's last CTA.
 * No kernel is then needed before, only to clear them. */
__device__ uint32_t moe_clean[CLEAN_BLOCKS][CLEAN_WORDS];

static int workspace_owner(const void *workspace)
{
	static struct moe_owners<CLEAN_BLOCKS> owners;

	return moe_owner(&owners, workspace);
}

static uint8_t *clean_counters(const void *workspace)
{
	const int i = workspace_owner(workspace);
	void *base;

	if (i < 0 || cudaGetSymbolAddress(&base, moe_clean))
		return NULL;
	return (uint8_t *)base + (size_t)i * CLEAN_WORDS * 4;
}

static struct moe_i4 i4_args(const struct kvk_moe_args *a, const struct i4_layout *l,
			     const struct i4_variant *v)
{
	uint8_t *ws = (uint8_t *)a->workspace, *clean = NULL, *counters = ws;
	struct moe_i4 k = {};

	k.own_plan = a->nr_tokens * a->top_k <= MOE_INLINE;
	if (k.own_plan && l->nr_zero <= CLEAN_WORDS)
		clean = clean_counters(ws);
	if (clean) {
		counters = clean;
		k.nr_clear = l->nr_zero;
	}

	k.w13 = mat_make(&a->experts, 0);
	k.w2 = mat_make(&a->experts, 1);
	k.w2.rblocks = l->rblocks2;
	k.w2.rsub = v->rsub;
	k.x = (const uint16_t *)a->x;
	k.y = moe_y_make(a);
	k.ids = a->ids;
	k.weights = a->weights;
	k.nr_tiles = (uint32_t *)ws + 2;
	k.tiles = (const uint2 *)(ws + l->tiles);
	k.list = (const uint32_t *)(ws + l->list);
	k.claim = (uint32_t *)counters;
	k.exits = (uint32_t *)counters + 1;
	k.done1 = (uint32_t *)(counters + l->done1);
	k.done2 = (uint32_t *)(counters + l->done2);
	k.amax = (uint32_t *)(counters + l->amax);
	k.h = ws + l->h;
	k.out = (uint16_t *)(ws + l->out);
	k.out_scale =
		(float *)(k.out + (size_t)a->nr_tokens * a->top_k * a->experts.hidden);
	k.hidden = a->experts.hidden;
	k.inter = a->experts.inter;
	k.nr_tokens = a->nr_tokens;
	k.top_k = a->top_k;
	k.nr_experts = a->experts.nr_experts;
	/* about two SUM units for each of 132 SMs, none too long at the end */
	k.sum_toks = (a->nr_tokens * l->rblocks2 + 263) / 264;
	k.sum_toks = k.sum_toks < 8 ? k.sum_toks : 8;
	k.sum_chunks = (a->nr_tokens + k.sum_toks - 1) / k.sum_toks;
	if (v->rsub > 1 && a->nr_tokens * a->top_k >= EARLY_SLOTS)
		k.early = l->rblocks2 - (l->rblocks2 + 3) / 4;
	k.scale_f16 = a->experts.scale_dtype == KVK_F16;
	return k;
}

/* A decode step of few tokens; > 0: not for this call. */
static int step_run(const struct kvk_moe_args *a, uint32_t loads_only, kvk_stream stream)
{
	const int owner = moe_step_ok(a) ? workspace_owner(a->workspace) : -1;
	struct moe_step k = {};

	static_assert(STEP_OWNERS == CLEAN_BLOCKS, "one each");
	if (owner < 0)
		return 1;
	k.w13 = mat_make(&a->experts, 0);
	k.w2 = mat_make(&a->experts, 1);
	k.x = (const uint16_t *)a->x;
	k.y = moe_y_make(a);
	k.ids = a->ids;
	k.weights = a->weights;
	k.hidden = a->experts.hidden;
	k.inter = a->experts.inter;
	k.nr_tokens = a->nr_tokens;
	k.top_k = a->top_k;
	k.nr_experts = a->experts.nr_experts;
	k.scale_f16 = a->experts.scale_dtype == KVK_F16;
	k.loads_only = loads_only;
	return moe_step_launch(&k, (uint32_t)owner, stream);
}

static int wide_run(const struct kvk_moe_args *a, const struct i4_layout *l,
		    kvk_stream stream)
{
	const struct kvk_experts *e = &a->experts;
	uint8_t *ws = (uint8_t *)a->workspace;
	struct moe_plan plan = {};
	struct moe_wide w = {};
	int r;

	w.w13 = wide_mat_make(e, 0);
	w.w2 = wide_mat_make(e, 1);
	w.x = (const uint16_t *)a->x;
	w.y = moe_y_make(a);
	w.ids = plan.ids = a->ids;
	w.weights = a->weights;
	w.nr_tiles = plan.nr_tiles = (uint32_t *)ws + 2;
	w.tiles = plan.tiles = (uint2 *)(ws + l->tiles);
	w.list = plan.list = (uint32_t *)(ws + l->list);
	w.place = plan.place = (uint32_t *)(ws + l->place);
	w.h_f16 = (uint16_t *)(ws + l->h);
	w.h_scale = (float *)(w.h_f16 + (size_t)a->nr_tokens * a->top_k * e->inter);
	w.out_f16 = (uint16_t *)(ws + l->out);
	w.out_back = (float *)(w.out_f16 + (size_t)a->nr_tokens * a->top_k * e->hidden);
	w.x_panels = ws + l->out; /* read before out is written */
	w.h_panels = ws + l->h_panels;
	w.x_back = (float *)(ws + l->x_back);
	w.h_back = (float *)(ws + l->h_back);
	w.hidden = e->hidden;
	w.inter = e->inter;
	w.nr_tokens = a->nr_tokens;
	w.top_k = a->top_k;
	w.nr_experts = plan.nr_experts = e->nr_experts;
	w.nr_slots = plan.nr_slots = a->nr_tokens * a->top_k;
	w.tile_tokens = plan.tile_tokens = wide_tile(a);
	plan.even = w.tile_tokens > 64;
	w.claim = plan.zero = (uint32_t *)(ws + l->done1); /* nobody counts there now */
	plan.nr_zero = 2;
	plan.counts = (uint32_t *)(ws + l->out); /* nothing is there yet */
	w.tiles_max = l->tiles_max;
	w.group = e->group;
	w.scale_f16 = e->scale_dtype == KVK_F16;
	r = moe_plan_launch(&plan, stream);
	return r ? r : moe_wide_launch(&w, stream);
}

static int i4_run(const struct kvk_moe_args *a, uint32_t loads_only, kvk_stream stream)
{
	int r = i4_check(a);
	struct moe_plan plan = {};
	struct i4_variant v;
	struct i4_layout l;
	struct moe_i4 k;

	if (r || !a->nr_tokens)
		return r;
	v = i4_choose(a);
	l = i4_layout_make(a, &v);
	if (a->workspace_bytes < l.bytes)
		return -EINVAL;
	r = step_run(a, loads_only, stream);
	if (r <= 0)
		return r;
	if (wide_tile(a) && !loads_only)
		return wide_run(a, &l, stream);
	r = 0;
	k = i4_args(a, &l, &v);
	k.loads_only = loads_only;
	plan.ids = a->ids;
	plan.nr_slots = a->nr_tokens * a->top_k;
	plan.nr_experts = a->experts.nr_experts;
	plan.tile_tokens = 8 * v.ntmax;
	plan.zero = k.claim;
	plan.nr_zero = l.nr_zero;

	plan.only_zero = k.own_plan;
	plan.nr_tiles = k.nr_tiles;
	plan.tiles = (uint2 *)k.tiles;
	plan.list = (uint32_t *)k.list;
	if (!k.nr_clear)
		r = moe_plan_launch(&plan, stream);
	if (r)
		return r;
	switch (a->experts.group) {
	case 32:
		return moe_i4_launch_g32(&k, &v, stream);
	case 64:
		return moe_i4_launch_g64(&k, &v, stream);
	default:
		return moe_i4_launch_g128(&k, &v, stream);
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
