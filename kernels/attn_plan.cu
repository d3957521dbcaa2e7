/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_plan.cu - the schedule of a decode step (see attn_plan.cuh), made on the device
 * because lengths live there, by one CTA, once per step for all layers; and what the
 * launchers of both decode kernels share. Any thread;
 * no state.
 */
#include "kernels/attn_plan.cuh"

#include <errno.h>

struct plan_args {
	const uint32_t *lengths;
	const uint32_t *q_start;
	const uint32_t *row_start;
	const struct kv_row *rows;
	const struct kv_verdict *verdicts;
	const uint64_t *step;
	uint32_t nr_requests;
	uint32_t nr_pages; /* of the pool */
	uint32_t off;
	struct plan_shape shape;
	struct plan_mem mem;
};

#define PLAN_THREADS 1024
#define PLAN_FILLERS 32 /* CTAs that empty the slots of a quick step */

/* Blocks of heads (query rows) of a request with @q_len tokens. */
KVK_DEV uint32_t blocks_of(const struct plan_args &a, uint32_t q_len, uint32_t hbs)
{
	if (q_len == 0)
		return 0;
	if (a.shape.q_rows)
		return (q_len * a.shape.q_rows + a.shape.unit_rows - 1) /
		       a.shape.unit_rows;
	return a.shape.nr_heads / hbs;
}

KVK_DEV uint32_t tiles_of(uint32_t len)
{
	return max(1u, (len + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS);
}

struct warp_sums {
	uint32_t of[PLAN_THREADS / 32];
};

/* Sum of @v over the CTA's threads before this one; *ret_total over all. */
KVK_DEV uint32_t scan_exclusive(uint32_t v, uint32_t *ret_total)
{
	DEV_SHARED(struct warp_sums, sums);
	uint32_t *warps = sums.of;
	int lane = threadIdx.x & 31, w = threadIdx.x >> 5;
	uint32_t x = v;

	for (int d = 1; d < 32; d <<= 1) {
		uint32_t y = __shfl_up_sync(~0u, x, d);

		if (lane >= d)
			x += y;
	}
	__syncthreads();
	if (lane == 31)
		warps[w] = x;
	__syncthreads();
	if (w == 0) {
		uint32_t t = warps[lane];

		for (int d = 1; d < 32; d <<= 1) {
			uint32_t y = __shfl_up_sync(~0u, t, d);

			if (lane >= d)
				t += y;
		}
		warps[lane] = t;
	}
	__syncthreads();
	*ret_total = warps[31];
	return x - v + (w ? warps[w - 1] : 0);
}

/*
 * Heads of a block: few units want single heads (more parts to merge side by side), many
 * units want neighbouring heads of a page read together.
 */
KVK_DEV uint32_t choose_hbs(const struct plan_args &a, uint32_t nr_active)
{
	uint32_t hbs = a.shape.hbs_max;

	if (a.shape.hbs_force)
		return min(a.shape.hbs_force, hbs);
	while (hbs > 1 && nr_active * (a.shape.nr_heads / hbs) < a.shape.nr_ctas / 2)
		hbs >>= 1;
	return hbs;
}

/* The request that tile @x belongs to: the last r with prefix[r] <= x that has tiles. */
KVK_DEV uint32_t find_request(const uint32_t *prefix, uint32_t nr, uint32_t x)
{
	uint32_t lo = 0, hi = nr;

	while (hi - lo > 1) {
		uint32_t mid = (lo + hi) / 2;

		if (prefix[mid] <= x)
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}

/*
 * The rest of a CTA's entry, by a warp: @s, its first segment; may its pages be read, and which
 * are they?
 */
KVK_DEV void write_first(const struct plan_args &a, const struct plan_seg &s,
			 uint64_t step, struct plan_cta *cta)
{
	const uint32_t lane = threadIdx.x & 31;
	const bool in = lane < s.nr_pages && s.page0 + lane < s.nr_rows;
	const enum plan_state state = plan_check(a, s, step);

	if (lane < PLAN_FIRST)
		cta->pfn[lane] = in ? a.rows[s.row0 + s.page0 + lane].pfn : 0;
	if (lane)
		return;
	cta->first = s;
	cta->state = state;
	cta->step = step;
	cta->reserved = 0; /* plan_touch() reads all of it */
}

/* Segments of CTA @cta, tiles [start, end): one lane per unit. */
KVK_DEV void write_segments(const struct plan_args &a, uint32_t cta, uint32_t nr_ctas,
			    uint32_t total, uint32_t hbs)
{
	const uint32_t *prefix = a.mem.prefix;
	uint32_t start = (uint32_t)((uint64_t)cta * total / nr_ctas);
	uint32_t end = (uint32_t)((uint64_t)(cta + 1) * total / nr_ctas);
	uint32_t per_req = a.shape.nr_heads, lane = threadIdx.x & 31, count = 0;
	uint32_t r0 = find_request(prefix, a.nr_requests, start);
	uint32_t r1 = find_request(prefix, a.nr_requests, end - 1);
	uint32_t u0 = r0 * per_req + (start - prefix[r0]) / tiles_of(a.lengths[r0]);
	uint32_t u1 = r1 * per_req + (end - 1 - prefix[r1]) / tiles_of(a.lengths[r1]);
	uint32_t base = u0 + cta;
	const uint64_t step = *a.step;

	for (uint32_t ub = u0; ub <= u1; ub += 32) {
		uint32_t u = ub + lane, r = min(u / per_req, a.nr_requests - 1),
			 h = u % per_req;
		uint32_t len = a.lengths[r], nt = tiles_of(len), q0 = a.q_start[r];
		uint32_t q_len = a.q_start[r + 1] - q0, mask, x0, lo, hi;
		bool in = u <= u1 && h < blocks_of(a, q_len, hbs);
		struct plan_seg s;

		mask = __ballot_sync(~0u, in);
		x0 = prefix[r] + h * nt;
		lo = max(start, x0);
		hi = min(end, x0 + nt);
		if (in) {
			s.req = r;
			s.hblk = h;
			s.page0 = lo - x0;
			s.nr_pages = len ? hi - lo : 0;
			s.len = len;
			s.row0 = a.row_start[r];
			s.nr_rows = a.row_start[r + 1] - s.row0;
			s.q0 = q0;
			s.q_len = q_len;
			s.first_cta =
				(uint32_t)(((uint64_t)(x0 + 1) * nr_ctas - 1) / total);
			s.part = cta - s.first_cta;
			s.nr_parts =
				(uint32_t)(((uint64_t)(x0 + nt) * nr_ctas - 1) / total) -
				s.first_cta + 1;
			hi = count + __popc(mask & ((1u << lane) - 1));
			a.mem.segs[base + hi] = s;
		}
		if (mask && !count) {
			__syncwarp(); /* wrote it */
			write_first(a, a.mem.segs[base], step, a.mem.ctas + cta);
		}
		count += __popc(mask);
	}
	if (lane == 0) {
		a.mem.ctas[cta].base = base;
		a.mem.ctas[cta].count = count;
		a.mem.ctas[cta].hbs = hbs;
	}
}

/*
 * CTAs to use. With equal requests a few CTAs less may make run borders fall on unit
 * borders: fewer splits are worth more than three SMs in a hundred, which memory does not
 * miss.
 */
KVK_DEV uint32_t choose_ctas(const struct plan_args &a, uint32_t units, uint32_t total,
			     bool uniform)
{
	uint32_t n =
		min(a.shape.nr_ctas, (total + a.shape.tiles_min - 1) / a.shape.tiles_min);

	/* half of the SMs: the others take the next launch's CTAs, which then begin before this one
	 * has ended; measured worth twice the pages where they are few */
	if (a.shape.halves && n > a.shape.nr_ctas / 2 &&
	    total <= 2 * a.shape.tiles_min * (a.shape.nr_ctas / 2))
		n = a.shape.nr_ctas / 2;
	for (uint32_t c = n; uniform && c > n - n / 8; c--)
		if (units % c == 0 || c % units == 0)
			return min(c, total);
	return min(n, total);
}

/* The half of the slots that the first launch writes becomes empty. */
KVK_DEV void empty_slots(const struct plan_args &a)
{
	const uint32_t quads = a.mem.quick_floats / 4;
	const float hole = __uint_as_float(PLAN_HOLE);

	for (uint32_t i = blockIdx.x - 1; i < 2 * a.shape.nr_ctas; i += PLAN_FILLERS) {
		float4 *slot = (float4 *)slot_ptr(a.mem, i);

		for (uint32_t e = threadIdx.x; e < quads; e += PLAN_THREADS)
			slot[e] = make_float4(hole, hole, hole, hole);
	}
}

__global__ void __launch_bounds__(PLAN_THREADS)
	attn_plan_kernel(const __grid_constant__ struct plan_args a)
{
	uint32_t active = 0, sum = 0, total, units, hbs, nr_ctas;
	bool same = true;
	uint32_t per = (a.nr_requests + PLAN_THREADS - 1) / PLAN_THREADS;
	uint32_t r_lo = min(threadIdx.x * per, a.nr_requests);
	uint32_t r_hi = min(r_lo + per, a.nr_requests);

	if (blockIdx.x) {
		empty_slots(a);
		return;
	}
	for (uint32_t i = threadIdx.x; i < PLAN_SLOTS * (1 + PLAN_SLICES);
	     i += PLAN_THREADS)
		a.mem.counters[i] = 0;
	for (uint32_t r = r_lo; r < r_hi; r++) {
		active += a.q_start[r + 1] != a.q_start[r];
		same &= tiles_of(a.lengths[r]) == tiles_of(a.lengths[0]) &&
			a.q_start[r + 1] - a.q_start[r] == a.q_start[1] - a.q_start[0];
	}
	same = __syncthreads_and(same);
	scan_exclusive(active, &total);
	hbs = choose_hbs(a, total);
	units = total * blocks_of(a, a.q_start[1] - a.q_start[0], hbs);
	for (uint32_t r = r_lo; r < r_hi; r++)
		sum += tiles_of(a.lengths[r]) *
		       blocks_of(a, a.q_start[r + 1] - a.q_start[r], hbs);
	sum = scan_exclusive(sum, &total);
	for (uint32_t r = r_lo; r < r_hi; r++) {
		a.mem.prefix[r] = sum;
		sum += tiles_of(a.lengths[r]) *
		       blocks_of(a, a.q_start[r + 1] - a.q_start[r], hbs);
	}
	if (threadIdx.x == 0)
		a.mem.prefix[a.nr_requests] = total;
	__syncthreads();
	nr_ctas = choose_ctas(a, units, total, same && units);
	for (uint32_t c = threadIdx.x / 32; c < a.shape.nr_ctas; c += PLAN_THREADS / 32) {
		if (c < nr_ctas)
			write_segments(a, c, nr_ctas, total, hbs);
		else if ((threadIdx.x & 31) == 0) /* all of it: plan_touch() */
			a.mem.ctas[c] = {};
	}
}

/* ---------------------------------------------------------------------------- host side
 */

static size_t take(size_t *at, size_t bytes)
{
	size_t off = *at;

	*at = (off + bytes + 255) & ~(size_t)255;
	return off;
}

uint32_t plan_slot_size(uint32_t rows, uint32_t dim)
{
	return ((2 * rows + 3) & ~3u) + rows * dim;
}

size_t plan_workspace(const struct kvk_attn_args *a, const struct plan_shape *s,
		      struct plan_mem *ret_mem)
{
	size_t at = 0, units = (size_t)a->batch.nr_requests * s->nr_heads + PLAN_CTAS_MAX;
	uint32_t slot = plan_slot_size(s->hbs_max * s->unit_rows, s->row_dim);
	uint32_t quick = 0;
	size_t ctas, counters, prefix, segs, slots;

	/* as much in every step, few units or not: who allocates may do so once */
	if (s->quick_able) {
		quick = plan_slot_size(16, s->row_dim); /* QUICK_O, QUICK_WORDS */
		slot = slot > 2 * quick ? slot : 2 * quick;
	}
	ctas = take(&at, KV_MAX(1u, a->reserved >> 16) * PLAN_CTAS_MAX *
				 sizeof(struct plan_cta));
	counters = take(&at, PLAN_SLOTS * (1 + PLAN_SLICES) * sizeof(uint32_t));
	prefix = take(&at, ((size_t)a->batch.nr_requests + 1) * sizeof(uint32_t));
	segs = take(&at, units * sizeof(struct plan_seg));
	slots = take(&at, (size_t)PLAN_SLOTS * slot * sizeof(float));

	if (ret_mem) {
		uint8_t *w = (uint8_t *)a->workspace;

		ret_mem->ctas = (struct plan_cta *)(w + ctas) +
				(a->reserved & 0xffff) * PLAN_CTAS_MAX;
		ret_mem->counters = (uint32_t *)(w + counters);
		ret_mem->prefix = (uint32_t *)(w + prefix);
		ret_mem->segs = (struct plan_seg *)(w + segs);
		ret_mem->slots = (float *)(w + slots);
		ret_mem->slot_floats = slot;
		ret_mem->quick_floats = s->quick ? quick : 0;
	}
	return at;
}

/* Safety rules that a test build takes out. */
static uint32_t plan_off(void)
{
	uint32_t off = 0;

	if (KV_MUTANT(no_verdict) || KV_MUTANT(cuda_attn_no_verdict))
		off |= DEV_NO_VERDICT;
	if (KV_MUTANT(row_range) || KV_MUTANT(cuda_attn_row_range))
		off |= DEV_NO_ROW_RANGE;
	if (KV_MUTANT(cuda_attn_no_length))
		off |= PLAN_NO_LENGTH;
	if (KV_MUTANT(cuda_attn_no_marks))
		off |= PLAN_NO_MARKS;
	if (KV_MUTANT(cuda_attn_no_step))
		off |= PLAN_NO_STEP;
	if (KV_MUTANT(cuda_attn_no_answer))
		off |= PLAN_NO_ANSWER;
	return off;
}

int plan_launch(const struct kvk_attn_args *a, const struct plan_shape *s,
		const struct plan_mem *mem, cudaStream_t stream)
{
	struct plan_args args = {};

	args.lengths = a->batch.lengths;
	args.q_start = a->batch.q_start;
	args.row_start = a->batch.row_start;
	args.rows = a->batch.rows;
	args.verdicts = a->batch.verdicts;
	args.step = a->batch.step;
	args.nr_requests = a->batch.nr_requests;
	args.nr_pages = a->pages.geometry.nr_pages;
	args.off = plan_off();
	args.shape = *s;
	args.mem = *mem;
	DEV_LAUNCH(attn_plan_kernel, 1 + (mem->quick_floats ? PLAN_FILLERS : 0),
		   PLAN_THREADS, stream, args);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

int plan_nr_ctas(void)
{
	int dev, n;

	if (cudaGetDevice(&dev) != cudaSuccess ||
	    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, dev) !=
		    cudaSuccess)
		return 0;
	return n < (int)PLAN_CTAS_MAX ? n : (int)PLAN_CTAS_MAX;
}

int plan_params(const struct kvk_attn_args *a, struct attn_params *ret_p)
{
	const struct kv_layout *l = &a->pages.layout;
	struct attn_params p = {};

	if (a->layer >= l->nr_layers || !a->batch.nr_requests || !a->batch.q_len_max ||
	    l->page_tokens != KV_PAGE_TOKENS ||
	    (a->act_dtype != KVK_F32 && a->act_dtype != KVK_BF16))
		return -EINVAL;
	if (l->scale_kind == KV_SCALE_STATIC && !a->pages.scales)
		return -EINVAL;
	if (!dev_aligned(a->q, 16) || !dev_aligned(a->out, 16)) /* act_load8() */
		return -EINVAL;
	p.base = (const uint8_t *)a->pages.base;
	p.extent_bytes = a->pages.geometry.extent_bytes;
	p.stride_bytes = a->pages.geometry.stride_bytes;
	p.shift = a->pages.geometry.shift;
	p.nr_pages = a->pages.geometry.nr_pages;
	p.page_bytes = (uint32_t)kv_layer_bytes(l);
	p.off = plan_off();
	p.layer = a->layer;
	p.layer_off = (uint64_t)kv_layer_stride(l) * a->layer;
	p.rows = a->batch.rows;
	p.verdicts = a->batch.verdicts;
	p.step = a->batch.step;
	p.q = a->q;
	p.out = a->out;
	p.scale = a->sm_scale * PLAN_LOG2E;
	p.nr_q_heads = a->nr_q_heads;
	p.nr_kv_heads = l->nr_kv_heads;
	p.q_len_max = a->batch.q_len_max;
	p.flags = a->flags;
	/* measured: more on their way than this and DRAM loses rows */
	p.flight = a->flags >> 16 & 15;
	if (!p.flight)
		p.flight = l->kind == KV_LAYOUT_MLA ? 3 : 4;
	p.act_f32 = a->act_dtype == KVK_F32;
	p.token_scales = l->scale_kind == KV_SCALE_TOKEN;
	if (l->scale_kind == KV_SCALE_STATIC)
		p.scales = a->pages.scales +
			   (size_t)a->layer *
				   (l->kind == KV_LAYOUT_MLA ? 1 : l->nr_kv_heads * 2);
	*ret_p = p;
	return 0;
}

/**
 * kvk_attn_workspace_cuda() - bytes that attention needs for this shape and batch
 * Return: bytes; 0 if the fallback takes it.
 */
size_t kvk_attn_workspace_cuda(const struct kvk_attn_args *a)
{
	return a->pages.layout.kind == KV_LAYOUT_MLA ? kvk_attn_mla_workspace(a)
						     : kvk_attn_gqa_workspace(a);
}
