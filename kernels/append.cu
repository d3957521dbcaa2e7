/* SPDX-License-Identifier: Apache-2.0 */
/*
 * append.cu - this step's K/V, or latent and rope, into page slots (tour 8/12).
 *
 * A warp per token and plane: its values stay in registers, their scale is a warp maximum.
 * The values are loaded while the warp still looks for the token's request; a page is
 * touched only behind the verdict, and through WRITE rows only (design 5, P5). Slots of
 * different tokens never overlap.
 */
#include "kernels/attn_cuda.h"
#include "kernels/plane.cuh"

#define APPEND_WARPS 4u

struct append_params {
	struct kvk_append_args a;
	u32 nr_planes;
	u32 vec_src;
	u32 vec_dst;
	u32 off;
};

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

static int append_check(const struct kvk_append_args *a)
{
	const struct kv_layout *l = &a->pages.layout;

	if (dev_batch_check(&a->batch, true) || kvk_pages_check(&a->pages))
		return -EINVAL;
	if (a->layer >= l->nr_layers || !plane_dims_ok(l) ||
	    (a->src_dtype != KVK_F32 && a->src_dtype != KVK_BF16))
		return -EINVAL;
	if (l->kind == KV_LAYOUT_MLA)
		return a->latent && a->rope ? 0 : -EINVAL;
	return a->k && a->v ? 0 : -EINVAL;
}

int kvk_append_cuda(const struct kvk_append_args *a, kvk_stream stream)
{
	struct append_params p = {};
	u32 warps;
	int r = append_check(a);

	if (r || !a->batch.nr_tokens)
		return r;
	p.a = *a;
	p.nr_planes = dev_nr_planes(&a->pages.layout);
	p.vec_dst = plane_dims_vec(&a->pages.layout) && dev_pages_aligned(&a->pages);
	p.vec_src = plane_dims_vec(&a->pages.layout) && dev_aligned(a->latent, 16) &&
		    dev_aligned(a->rope, 16) && dev_aligned(a->k, 16) &&
		    dev_aligned(a->v, 16);
	p.off = (DEV_MUTANT(no_verdict) ? DEV_NO_VERDICT : 0) |
		(DEV_MUTANT(row_range) ? DEV_NO_ROW_RANGE : 0) |
		(DEV_MUTANT(append_no_write_flag) ? DEV_NO_WRITE_FLAG : 0);
	warps = KV_MIN(p.nr_planes, APPEND_WARPS);
	DEV_LAUNCH(append_kernel,
		   dim3(a->batch.nr_tokens, (p.nr_planes + warps - 1) / warps),
		   32 * warps, stream, p);
	return dev_launched();
}
