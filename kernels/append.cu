/* SPDX-License-Identifier: Apache-2.0 */
/*
 * append.cu - this step's K/V, or latent and rope, into page slots (tour 8/12).
 *
 * A page is touched only behind the verdict, and through WRITE rows only (design 5, P5).
 * Slots of different tokens never overlap.
 *
 * Few tokens are a matter of latency: everything that a token needs is loaded at once, the
 * request being guessed (token t of a batch with q tokens each is of request t / q), and
 * then the row that the position names: two trips to memory, and the store nobody waits
 * for. Many tokens are a matter of bytes on their way: a warp takes several, all loaded before
 * their places are known. Shapes that plane_fast.cuh does not build take a warp per token and
 * plane, of any size.
 */
#include "kernels/append.cuh"

#define APPEND_WARPS  4u
#define MLA_TOKENS    4u /* of a CTA: a warp for each one's latent, one for all ropes */
#define MLA_MANY_FROM 4096u /* tokens from which a warp takes several */
#define GQA_MANY_FROM 1024u

/* Load the values of plane @plane of token @t. */
KVK_DEV void append_read(const struct append_params &p, u32 plane, u32 t, u32 dim,
			 float (&x)[PLANE_GROUPS][4])
{
	const struct kv_layout &l = p.a.pages.layout;
	const void *src;
	size_t index;

	if (l.kind == KV_LAYOUT_MLA) {
		index = (size_t)t * dim;
		src = plane ? p.a.rope : p.a.latent;
	} else {
		index = ((size_t)t * l.nr_kv_heads + plane / 2) * dim;
		src = plane % 2 ? p.a.v : p.a.k;
	}
	plane_read(x, p.a.src_dtype, src, index, dim, p.vec_src);
}

/* The layer's part of the page that token @t goes to, and its slot; NULL: nowhere. */
KVK_DEV u8 *append_slot(const struct append_params &p, u32 t, u32 *ret_slot)
{
	const struct kvk_batch &b = p.a.batch;
	const u32 r = dev_request_of(b, t);
	struct kv_row row;
	u32 first;
	bool ok;
	s64 pos;
	u8 *page;

	if (r >= b.nr_requests)
		return NULL;
	pos = (s64)b.lengths[r] - b.q_start[r + 1] + t;
	first = b.row_start[r];
	ok = dev_request_ok(b, r, p.off);
	if (!ok || pos < 0)
		return NULL;
	row = b.rows[first + pos / KV_PAGE_TOKENS];
	if (!(row.flags & KV_ROW_WRITE) && !(p.off & DEV_NO_WRITE_FLAG))
		return NULL;
	page = dev_page(p.a.pages, row, p.off);
	*ret_slot = (u32)(pos % KV_PAGE_TOKENS);
	return page ? page + (u64)p.a.layer * kv_layer_stride(&p.a.pages.layout) : NULL;
}

__global__ void __launch_bounds__(32 * APPEND_WARPS)
	append_kernel(const __grid_constant__ struct append_params p)
{
	const u32 t = blockIdx.x;
	const u32 plane = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
	float x[PLANE_GROUPS][4];
	struct dev_plane pl;
	u32 slot, nr_nan;
	u8 *part;

	if (plane >= p.nr_planes)
		return;
	pl = dev_plane_get(&p.a.pages.layout, p.a.layer, plane);
	append_read(p, plane, t, pl.dim, x);
	part = append_slot(p, t, &slot);
	if (!part)
		return;
	nr_nan = plane_store(p.a.pages, part, pl, slot, p.vec_dst, x);
	if (nr_nan && p.a.nan_count && threadIdx.x % 32 == 0)
		atomicAdd((unsigned long long *)p.a.nan_count,
			  (unsigned long long)nr_nan);
}

/* ------------------------------------------------------------------ planes models have
 */

/* Plane @plane of token @t, by LANES lanes. Codes are made while the row is on its way. */
template <u32 LANES, u32 CHUNKS, bool E4M3, bool TOKEN>
KVK_DEV void append_plane(const struct append_params &p, u32 t, u32 plane)
{
	const struct dev_plane pl = dev_plane_get(&p.a.pages.layout, p.a.layer, plane);
	const bool in = t < p.a.batch.nr_tokens;
	/* nobody writes scales: they do not wait */
	const struct kvk_quant fixed = fast_fixed<E4M3, TOKEN>(p.a.pages.scales, pl);
	struct fast_values<CHUNKS> x;
	struct fast_coded<CHUNKS> coded;
	struct append_place at;
	u8 *part;

	dev_grid_wait();
	fast_read<LANES, CHUNKS>(x, append_src(p, t, plane, LANES * CHUNKS * 8), in);
	place_find(p, t, &at);
	fast_encode<LANES, CHUNKS, E4M3, TOKEN>(coded, x, fixed);
	part = place_part(p, at);
	if (!part)
		return;
	fast_store<LANES, CHUNKS, E4M3, TOKEN>(part, pl, at.slot, coded);
	append_nan(p, coded.nr_nan);
}

template <bool E4M3, bool TOKEN>
__global__ void __launch_bounds__(32 * (MLA_TOKENS + 1), 4)
	append_mla_kernel(const __grid_constant__ struct append_params p)
{
	const u32 warp = threadIdx.x / 32, t = blockIdx.x * MLA_TOKENS;

	dev_grid_launch();
	if (warp < MLA_TOKENS)
		append_plane<32, 2, E4M3, TOKEN>(p, t + warp, 0);
	else
		append_plane<8, 1, E4M3, TOKEN>(p, t + threadIdx.x % 32 / 8, 1);
}

/* N tokens of a warp, latents and ropes: all of them are on their way before their places. */
template <u32 N, bool E4M3, bool TOKEN>
__global__ void __launch_bounds__(32 * APPEND_WARPS, 4)
	append_mla_run_kernel(const __grid_constant__ struct append_params p)
{
	const struct kv_layout &l = p.a.pages.layout;
	const u32 lane = threadIdx.x % 32, nr = p.a.batch.nr_tokens;
	const u32 t = (blockIdx.x * APPEND_WARPS + threadIdx.x / 32) * N;
	const u32 left = t < nr ? nr - t : 0, mine = lane / 8;
	const struct dev_plane latent = dev_plane_get(&l, p.a.layer, 0);
	const struct dev_plane rope = dev_plane_get(&l, p.a.layer, 1);
	const struct kvk_quant fixed = fast_fixed<E4M3, TOKEN>(p.a.pages.scales, latent);
	struct fast_values<2> x[N];
	struct fast_values<1> y[1];
	struct append_place at;
	u32 nr_nan;
	u8 *part;

	static_assert(N <= 4, "a warp has four ropes at once");
	dev_grid_launch();
	dev_grid_wait();
	fast_read_run<32, 2, N>(x, append_src(p, t, 0, 512), 1024, left);
	fast_read<8, 1>(y[0], append_src(p, t + mine, 1, 64), mine < N && mine < left);
	place_find(p, t + lane % N, &at);
	part = place_part(p, at);
	nr_nan = fast_store_run<32, 2, N, E4M3, TOKEN>(part, at.slot, 0, latent, x, fixed,
						       true);
	nr_nan += fast_store_run<8, 1, 1, E4M3, TOKEN>(part, at.slot, mine, rope, y,
						       fixed, mine < N);
	append_nan(p, nr_nan);
}

/*
 * N tokens of a warp, in 32 / LANES planes: K and V of head 0, of head 1, ... A CTA has 2^split
 * neighbouring warps of the same tokens, whose values are neighbours; a warp's own slots are
 * neighbours in the page. grid: (runs of tokens, groups of planes)
 */
template <u32 LANES, u32 CHUNKS, u32 N, bool E4M3, bool TOKEN>
__global__ void __launch_bounds__(32 * APPEND_WARPS, 4)
	append_gqa_kernel(const __grid_constant__ struct append_params p)
{
	const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	const u32 run = blockIdx.x * (APPEND_WARPS >> p.split) + (warp >> p.split);
	const u32 group = (blockIdx.y << p.split) + (warp & ((1u << p.split) - 1));
	const u32 nr = p.a.batch.nr_tokens, t = run * N, left = t < nr ? nr - t : 0;
	const u32 plane = group * (32 / LANES) + lane / LANES;
	const bool in = plane < p.nr_planes;
	const struct dev_plane pl =
		dev_plane_get(&p.a.pages.layout, p.a.layer, in ? plane : 0);
	const struct kvk_quant fixed = fast_fixed<E4M3, TOKEN>(p.a.pages.scales, pl);
	struct fast_values<CHUNKS> x[N];
	struct append_place at;

	static_assert(N <= LANES, "a lane of the plane for each scale");
	dev_grid_launch();
	dev_grid_wait();
	fast_read_run<LANES, CHUNKS, N>(x, append_src(p, t, plane, LANES * CHUNKS * 8),
					p.nr_planes * LANES * CHUNKS * 8, in ? left : 0);
	place_find(p, t + lane % N, &at);
	append_nan(p, fast_store_run<LANES, CHUNKS, N, E4M3, TOKEN>(
			      place_part(p, at), at.slot, 0, pl, x, fixed, in));
}

template <u32 LANES, u32 CHUNKS, u32 N, bool E4M3, bool TOKEN>
static void append_gqa_launch(struct append_params p, kvk_stream stream)
{
	const u32 groups = (p.nr_planes + 32 / LANES - 1) / (32 / LANES);
	u32 tokens;

	p.split = groups >= 4 ? 2 : groups >= 2 ? 1 : 0;
	tokens = (APPEND_WARPS >> p.split) * N;
	DEV_LAUNCH_EARLY((append_gqa_kernel<LANES, CHUNKS, N, E4M3, TOKEN>),
			 dim3((p.a.batch.nr_tokens + tokens - 1) / tokens,
			      (groups + (1u << p.split) - 1) >> p.split),
			 32 * APPEND_WARPS, stream, p);
}

/*
 * N tokens of a warp, by us of 256 and of 32,768 tokens of 8 heads in FP8: planes of 16 lanes one
 * 2.33, eight 58.4, four 61.3; of 8 lanes one 2.23, two 55.5, four 55.0.
 */
template <u32 LANES, u32 CHUNKS, u32 MANY, bool E4M3, bool TOKEN>
static void append_gqa_choose(const struct append_params &p, kvk_stream stream)
{
	if (p.a.batch.nr_tokens < GQA_MANY_FROM)
		append_gqa_launch<LANES, CHUNKS, 1, E4M3, TOKEN>(p, stream);
	else
		append_gqa_launch<LANES, CHUNKS, MANY, E4M3, TOKEN>(p, stream);
}

template <bool E4M3, bool TOKEN>
static void append_fast_launch(const struct append_params &p, u32 shape,
			       kvk_stream stream)
{
	/* 32,768 tokens, two or four of a warp: FP8 18.8, 19.7 us, BF16 23.2, 22.6 */
	constexpr u32 RUN = E4M3 ? 2 : 4;
	const u32 nr = p.a.batch.nr_tokens, tokens = APPEND_WARPS * RUN;

	if (shape == FAST_GQA64)
		append_gqa_choose<8, 1, 8, E4M3, TOKEN>(p, stream);
	else if (shape == FAST_GQA128)
		append_gqa_choose<8, 2, 4, E4M3, TOKEN>(p, stream);
	else if (nr < MLA_MANY_FROM)
		DEV_LAUNCH_EARLY((append_mla_kernel<E4M3, TOKEN>),
				 (nr + MLA_TOKENS - 1) / MLA_TOKENS,
				 32 * (MLA_TOKENS + 1), stream, p);
	else
		DEV_LAUNCH_EARLY((append_mla_run_kernel<RUN, E4M3, TOKEN>),
				 (nr + tokens - 1) / tokens, 32 * APPEND_WARPS, stream,
				 p);
}

/* true: launched. */
static bool append_fast(const struct append_params &p, kvk_stream stream)
{
	const struct kv_layout *l = &p.a.pages.layout;
	const u32 shape = append_shape(&p);

	if (shape == FAST_NONE)
		return false;
	if (l->dtype != KV_DTYPE_E4M3)
		append_fast_launch<false, false>(p, shape, stream);
	else if (l->scale_kind == KV_SCALE_TOKEN)
		append_fast_launch<true, true>(p, shape, stream);
	else
		append_fast_launch<true, false>(p, shape, stream);
	return true;
}

int kvk_append_cuda(const struct kvk_append_args *a, kvk_stream stream)
{
	struct append_params p;
	u32 warps;
	int r = append_check(a);

	if (r || !a->batch.nr_tokens)
		return r;
	p = append_params_make(a);
	if (append_fast(p, stream))
		return dev_launched();
	warps = KV_MIN(p.nr_planes, APPEND_WARPS);
	DEV_LAUNCH(append_kernel,
		   dim3(a->batch.nr_tokens, (p.nr_planes + warps - 1) / warps),
		   32 * warps, stream, p);
	return dev_launched();
}
