/* SPDX-License-Identifier: Apache-2.0 */
/*
 * append.cuh - what append.cu and norm_rope_append.cu share: where a token of this step goes, and
 * whether it may go there. Device code and a few host functions.
 *
 * A page is touched only behind the verdict, and through WRITE rows only (design 5, P5).
 */
#ifndef KVK_APPEND_CUH
#define KVK_APPEND_CUH

#include "kernels/attn_cuda.h"
#include "kernels/plane_fast.cuh"

struct append_params {
	struct kvk_append_args a;
	u32 nr_planes;
	u32 q_inverse; /* 2^32 / tokens that a request probably has; 0: one */
	u32 split;     /* GQA: 2^split warps of a CTA have the same tokens */
	u32 vec_src;
	u32 vec_dst;
	u32 off;
};

/* What is known of a token's request before its row. */
struct append_request {
	u32 q_first, q_end; /* tokens */
	u32 first, end;	    /* rows */
	u32 length;
	struct kv_verdict verdict;
};

/*
 * Words that are asked for here and now. Of plain loads the compiler puts those behind a branch
 * that are only needed there: what should be one trip to memory became three (0.4 us).
 */
KVK_DEV u32 load_now(const u32 *p)
{
#ifdef __CUDA_ARCH__
	u32 v;

	asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
	return v;
#else
	return *p;
#endif
}

KVK_DEV u64 load_now(const u64 *p)
{
#ifdef __CUDA_ARCH__
	u64 v;

	asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p));
	return v;
#else
	return *p;
#endif
}

KVK_DEV void request_read(const struct kvk_batch &b, u32 r, struct append_request *q)
{
	const struct kv_verdict *v = b.verdicts + r;
	u64 rest;

	q->first = load_now(b.row_start + r);
	q->end = load_now(b.row_start + r + 1);
	q->length = load_now(b.lengths + r);
	q->verdict.step = load_now(&v->step);
	rest = load_now((const u64 *)&v->bits); /* and rows_checked */
	q->verdict.bits = (u32)rest;
	q->verdict.rows_checked = (u32)(rest >> 32);
	/* what is looked at first is asked for last: nothing is asked for behind a wait */
	q->q_first = load_now(b.q_start + r);
	q->q_end = load_now(b.q_start + r + 1);
}

/* The last request that begins at or before token @t. */
KVK_DEV u32 request_search(const struct kvk_batch &b, u32 t)
{
	u32 lo = 0, hi = b.nr_requests;

	while (hi - lo > 1) {
		u32 mid = (lo + hi) / 2;

		if (b.q_start[mid] <= t)
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}

/* Where a token goes, as far as it is known before its row has come. */
struct append_place {
	struct kv_row row;
	u32 slot;
	bool ok;
};

/* As append_slot(), for each lane's token by itself. */
KVK_DEV void place_find(const struct append_params &p, u32 t, struct append_place *ret)
{
	const struct kvk_batch &b = p.a.batch;
	/* for a guess a quotient may be one too large */
	const u32 guess = p.q_inverse ? (u32)((u64)t * p.q_inverse >> 32) : t;
	const u64 step = load_now(b.step);
	struct append_request q;
	s64 pos;

	ret->ok = false;
	if (t >= b.nr_tokens)
		return;
	request_read(b, guess < b.nr_requests ? guess : b.nr_requests - 1, &q);
	if (t < q.q_first || t >= q.q_end) {
		request_read(b, request_search(b, t), &q);
		if (t < q.q_first || t >= q.q_end)
			return;
	}
	pos = (s64)q.length - q.q_end + t;
	ret->ok = q.end >= q.first && pos >= 0 &&
		  q.length <= (u64)(q.end - q.first) * KV_PAGE_TOKENS &&
		  (kv_verdict_ok(q.verdict, step, q.end - q.first) ||
		   (p.off & DEV_NO_VERDICT));
	ret->slot = (u32)(pos % KV_PAGE_TOKENS);
	if (ret->ok)
		ret->row = b.rows[q.first + pos / KV_PAGE_TOKENS];
}

/* The layer's part of the page; NULL: nowhere. */
KVK_DEV u8 *place_part(const struct append_params &p, const struct append_place &at)
{
	u8 *page;

	if (!at.ok || (!(at.row.flags & KV_ROW_WRITE) && !(p.off & DEV_NO_WRITE_FLAG)))
		return NULL;
	page = dev_page(p.a.pages, at.row, p.off);
	return page ? page + (u64)p.a.layer * kv_layer_stride(&p.a.pages.layout) : NULL;
}

/* BF16 values of a plane of token @t. */
KVK_DEV const u8 *append_src(const struct append_params &p, u32 t, u32 plane, u32 dim)
{
	size_t at = (size_t)t * dim;
	const void *src = plane ? p.a.rope : p.a.latent;

	if (p.a.pages.layout.kind != KV_LAYOUT_MLA) {
		at = ((size_t)t * (p.nr_planes / 2) + plane / 2) * dim;
		src = plane % 2 ? p.a.v : p.a.k;
	}
	return (const u8 *)src + at * 2;
}

KVK_DEV void append_nan(const struct append_params &p, u32 nr)
{
	if (nr && p.a.nan_count)
		atomicAdd((unsigned long long *)p.a.nan_count, (unsigned long long)nr);
}

static inline int append_check(const struct kvk_append_args *a)
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

/* What kernels get of checked arguments. */
static inline struct append_params append_params_make(const struct kvk_append_args *a)
{
	struct append_params p = {};

	p.a = *a;
	p.nr_planes = dev_nr_planes(&a->pages.layout);
	p.vec_dst = plane_dims_vec(&a->pages.layout) && dev_pages_aligned(&a->pages);
	p.vec_src = plane_dims_vec(&a->pages.layout) && dev_aligned(a->latent, 16) &&
		    dev_aligned(a->rope, 16) && dev_aligned(a->k, 16) &&
		    dev_aligned(a->v, 16);
	p.off = (DEV_MUTANT(no_verdict) ? DEV_NO_VERDICT : 0) |
		(DEV_MUTANT(row_range) ? DEV_NO_ROW_RANGE : 0) |
		(DEV_MUTANT(append_no_write_flag) ? DEV_NO_WRITE_FLAG : 0);
	if (a->batch.q_len_max > 1)
		p.q_inverse = UINT32_MAX / a->batch.q_len_max + 1;
	return p;
}

/* enum fast_shape of this append; FAST_NONE: planes are stored by plane.cuh. */
static inline u32 append_shape(const struct append_params *p)
{
	return p->vec_dst && p->vec_src && p->a.src_dtype == KVK_BF16
		       ? fast_shape_of(&p->a.pages.layout)
		       : (u32)FAST_NONE;
}

#endif /* KVK_APPEND_CUH */
