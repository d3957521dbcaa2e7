/* SPDX-License-Identifier: Apache-2.0 */
/*
 * page_move_ref.c - whole pages on the host: zero, fork copy, gather, scatter, BF16 ->
 * FP8, CRC-32C.
 *
 * Row i of all rows of a batch is page i of the move. A request whose verdict fails has
 * its pages left alone: GATHER fills its part of buf with 0xff (NaN in every page dtype),
 * CRC gives 0, and nothing is written to or from its pages. Pages are written through
 * WRITE rows only; a dst row without WRITE is skipped. Any thread.
 */
#include <string.h>
#include "ref.h"

#define MOVE_CHUNK	64u /* rows whose permission is looked up before threads move them */
#define CONVERT_DIM_MAX 1024u

/* One end of a move of one row. */
struct move_end {
	const struct kv_row *row;
	bool ok;
};

/* Walks the rows of a batch in order and knows the verdict of each. */
struct move_cursor {
	const struct kvk_batch *batch;
	const struct kvk_pages *pages;
	u32 request;
	u32 row;
	bool ok;
};

static u32 batch_rows(const struct kvk_batch *b)
{
	return b->nr_requests ? b->row_start[b->nr_requests] - b->row_start[0] : 0;
}

static struct move_cursor cursor_start(const struct kvk_batch *b,
				       const struct kvk_pages *p)
{
	struct move_cursor c = {.batch = b, .pages = p};

	if (b->nr_requests) {
		c.row = b->row_start[0];
		c.ok = kvk_request_ok(b, p, 0);
	}
	return c;
}

static struct move_end cursor_next(struct move_cursor *c)
{
	struct move_end end;

	while (c->row >= c->batch->row_start[c->request + 1]) {
		c->request++;
		c->ok = kvk_request_ok(c->batch, c->pages, c->request);
	}
	end.row = &c->batch->rows[c->row++];
	end.ok = c->ok;
	return end;
}

static u8 *page_of(const struct kvk_pages *p, const struct move_end *end)
{
	return kvk_row_layer(p, end->row, 0);
}

/* Zero what lies behind slot @n of a layer's part, its padding included. */
static void tail_clear(const struct kv_layout *l, u8 *part, u32 layer, u32 n)
{
	u32 elem = kv_dtype_bytes(l->dtype), bytes = kv_layer_bytes(l);

	for (u32 i = 0; i < kvk_nr_planes(l); i++) {
		struct kvk_plane pl = kvk_plane_get(l, layer, i);

		memset(part + pl.off + (size_t)n * pl.dim * elem, 0,
		       (size_t)(KV_PAGE_TOKENS - n) * pl.dim * elem);
		for (u32 s = n; s < KV_PAGE_TOKENS && l->scale_kind == KV_SCALE_TOKEN;
		     s++)
			memset(part + pl.scale_off + (size_t)s * pl.scale_step, 0, 2);
	}
	memset(part + bytes, 0, kv_layer_stride(l) - bytes);
}

static void page_copy(const struct kvk_move_args *a, const u8 *src, u8 *dst, u32 n)
{
	const struct kv_layout *l = &a->dst.layout;
	u32 elem = kv_dtype_bytes(l->dtype);

	if (n >= KV_PAGE_TOKENS) {
		memmove(dst, src, kv_page_bytes(l));
		return;
	}
	for (u32 layer = 0; layer < l->nr_layers; layer++) {
		size_t at = (size_t)layer * kv_layer_stride(l);

		for (u32 i = 0; i < kvk_nr_planes(l); i++) {
			struct kvk_plane pl = kvk_plane_get(l, layer, i);

			memmove(dst + at + pl.off, src + at + pl.off,
				(size_t)n * pl.dim * elem);
			for (u32 s = 0; s < n && l->scale_kind == KV_SCALE_TOKEN; s++) {
				size_t off =
					at + pl.scale_off + (size_t)s * pl.scale_step;

				memmove(dst + off, src + off, 2);
			}
		}
		tail_clear(l, dst + at, layer, n);
	}
}

/* What append would have written for the same BF16 values. */
static void page_convert(const struct kvk_move_args *a, const u8 *src, u8 *dst, u32 n)
{
	const struct kv_layout *from = &a->src.layout, *to = &a->dst.layout;
	const struct kvk_simd *simd = kvk_simd_get();
	float x[CONVERT_DIM_MAX];

	n = KV_MIN(n, KV_PAGE_TOKENS);
	for (u32 layer = 0; layer < to->nr_layers; layer++) {
		const u8 *in = src + (size_t)layer * kv_layer_stride(from);
		u8 *out = dst + (size_t)layer * kv_layer_stride(to);

		for (u32 i = 0; i < kvk_nr_planes(to); i++) {
			struct kvk_plane pf = kvk_plane_get(from, layer, i);
			struct kvk_plane pt = kvk_plane_get(to, layer, i);

			for (u32 s = 0; s < n; s++) {
				kvk_plane_load(simd, &a->src, in, &pf, s, x);
				kvk_plane_store(&a->dst, out, &pt, s, x);
			}
		}
		tail_clear(to, out, layer, n);
	}
}

static bool may_write(const struct move_end *dst)
{
	return dst->ok &&
	       ((dst->row->flags & KV_ROW_WRITE) || KV_MUTANT(move_no_write_flag));
}

static void move_row(const struct kvk_move_args *a, u32 i, const struct move_end *src,
		     const struct move_end *dst)
{
	u32 n = a->nr_tokens ? a->nr_tokens[i] : KV_PAGE_TOKENS;
	u64 src_bytes = kv_page_bytes(&a->src.layout),
	    dst_bytes = kv_page_bytes(&a->dst.layout);

	switch (a->op) {
	case KVK_MOVE_ZERO:
		if (may_write(dst))
			memset(page_of(&a->dst, dst), 0, dst_bytes);
		break;
	case KVK_MOVE_SCATTER:
		if (may_write(dst))
			memcpy(page_of(&a->dst, dst), (u8 *)a->buf + i * dst_bytes,
			       dst_bytes);
		break;
	case KVK_MOVE_COPY:
		if (src->ok && may_write(dst))
			page_copy(a, page_of(&a->src, src), page_of(&a->dst, dst), n);
		break;
	case KVK_MOVE_CONVERT:
		if (src->ok && may_write(dst))
			page_convert(a, page_of(&a->src, src), page_of(&a->dst, dst), n);
		break;
	case KVK_MOVE_GATHER:
		if (src->ok)
			memcpy((u8 *)a->buf + i * src_bytes, page_of(&a->src, src),
			       src_bytes);
		else
			memset((u8 *)a->buf + i * src_bytes, 0xff, src_bytes);
		break;
	default:
		a->ret_crc[i] =
			src->ok ? kvk_crc32c(page_of(&a->src, src), src_bytes) : 0;
	}
}

static bool op_reads(u32 op)
{
	return op == KVK_MOVE_COPY || op == KVK_MOVE_GATHER || op == KVK_MOVE_CONVERT ||
	       op == KVK_MOVE_CRC;
}

static bool op_writes(u32 op)
{
	return op == KVK_MOVE_ZERO || op == KVK_MOVE_COPY || op == KVK_MOVE_SCATTER ||
	       op == KVK_MOVE_CONVERT;
}

/* Same planes of the same sizes; @same_bytes: same dtype and scales as well. */
static bool layouts_match(const struct kv_layout *s, const struct kv_layout *d,
			  bool same_bytes)
{
	if (s->kind != d->kind || s->nr_layers != d->nr_layers ||
	    s->nr_kv_heads != d->nr_kv_heads || s->head_dim != d->head_dim ||
	    s->latent_dim != d->latent_dim || s->rope_dim != d->rope_dim)
		return false;
	return !same_bytes || (s->dtype == d->dtype && s->scale_kind == d->scale_kind);
}

static int move_check(const struct kvk_move_args *a)
{
	const struct kv_layout *s = &a->src.layout, *d = &a->dst.layout;
	bool reads = op_reads(a->op), writes = op_writes(a->op);

	if (!reads && !writes)
		return -EINVAL;
	if (reads && (kvk_batch_check(&a->src_batch, false) || kvk_pages_check(&a->src)))
		return -EINVAL;
	if (writes && (kvk_batch_check(&a->dst_batch, false) || kvk_pages_check(&a->dst)))
		return -EINVAL;
	if (reads && writes &&
	    (batch_rows(&a->src_batch) != batch_rows(&a->dst_batch) ||
	     !layouts_match(s, d, a->op == KVK_MOVE_COPY)))
		return -EINVAL;
	if (a->op == KVK_MOVE_CONVERT &&
	    (s->dtype != KV_DTYPE_BF16 || d->dtype != KV_DTYPE_E4M3 ||
	     KV_MAX(s->latent_dim, s->head_dim) > CONVERT_DIM_MAX ||
	     s->rope_dim > CONVERT_DIM_MAX))
		return -EINVAL;
	if ((a->op == KVK_MOVE_GATHER || a->op == KVK_MOVE_SCATTER) && !a->buf)
		return -EINVAL;
	return a->op == KVK_MOVE_CRC && !a->ret_crc ? -EINVAL : 0;
}

int kvk_page_move_ref(const struct kvk_move_args *a, kvk_stream stream)
{
	bool reads = op_reads(a->op), writes = op_writes(a->op);
	struct move_end src[MOVE_CHUNK], dst[MOVE_CHUNK];
	struct move_cursor from, to;
	u32 nr;
	int r = move_check(a);

	if (r)
		return r;
	nr = batch_rows(reads ? &a->src_batch : &a->dst_batch);
	if (!nr)
		return 0;
	if (reads)
		from = cursor_start(&a->src_batch, &a->src);
	if (writes)
		to = cursor_start(&a->dst_batch, &a->dst);
	for (u32 at = 0; at < nr; at += MOVE_CHUNK) {
		u32 n = KV_MIN(nr - at, MOVE_CHUNK);

		for (u32 i = 0; i < n && reads; i++)
			src[i] = cursor_next(&from);
		for (u32 i = 0; i < n && writes; i++)
			dst[i] = cursor_next(&to);
#pragma omp parallel for schedule(dynamic) if (n > 1)
		for (u32 i = 0; i < n; i++)
			move_row(a, at + i, &src[i], &dst[i]);
	}
	return 0;
}
