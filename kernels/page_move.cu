/* SPDX-License-Identifier: Apache-2.0 */
/*
 * page_move.cu - whole pages on the device: zero, fork copy, gather, scatter, BF16 -> FP8,
 * CRC-32C.
 *
 * How many rows there are stands in device memory, so grids are fixed and CTAs walk over
 * (row, piece) with a stride. Semantics are those of page_move_ref.c: failed requests and
 * rows without WRITE are left alone, GATHER fills with 0xff, CRC gives 0. What the host
 * cannot see, two sides with different numbers of rows, moves nothing.
 *
 * CRC: a page's checksum is the exclusive or of its pieces' remainders, each times
 * x^(8 * bytes behind it), and of a constant; so pieces may come in any order.
 */
#include "kernels/attn_cuda.h"
#include "kernels/plane_fast.cuh"

#define MOVE_THREADS 256u
#define MOVE_CTAS    528u /* four per SM of the largest GPU we know */
#define MOVE_PIECE   32768u
#define MOVE_ILP     4u
#define CRC_SEGMENT  64u /* bytes of a thread; divides every page */
#define CRC_PIECE    (MOVE_THREADS * CRC_SEGMENT)
#define CRC_POLY     0x82f63b78u

struct move_params {
	struct kvk_move_args a;
	u64 bytes; /* of a page */
	u32 off;
	u32 vec; /* CONVERT */
	u32 crc_const;
	u32 x2n[32]; /* x^(2^k) mod the polynomial */
};

/* -------------------------------------------------------------------------------- rows
 */

KVK_DEV bool op_reads(u32 op)
{
	return op != KVK_MOVE_ZERO && op != KVK_MOVE_SCATTER;
}

KVK_DEV bool op_writes(u32 op)
{
	return op != KVK_MOVE_GATHER && op != KVK_MOVE_CRC;
}

KVK_DEV u32 batch_rows(const struct kvk_batch &b)
{
	u32 first, end;

	if (!b.nr_requests)
		return 0;
	first = b.row_start[0];
	end = b.row_start[b.nr_requests];
	return end > first ? end - first : 0;
}

KVK_DEV u32 move_rows(const struct move_params &p)
{
	u32 src, dst;

	if (!op_writes(p.a.op))
		return batch_rows(p.a.src_batch);
	dst = batch_rows(p.a.dst_batch);
	if (!op_reads(p.a.op))
		return dst;
	src = batch_rows(p.a.src_batch);
	return src == dst ? dst : 0;
}

/* Page of row @i of all rows; NULL: it may not be touched that way. */
KVK_DEV u8 *move_page(const struct move_params &p, u32 i, bool write)
{
	const struct kvk_batch &b = write ? p.a.dst_batch : p.a.src_batch;
	const u32 at = b.row_start[0] + i;
	u32 lo = 0, hi = b.nr_requests;
	struct kv_row row;

	while (hi - lo > 1) {
		u32 mid = (lo + hi) / 2;

		if (b.row_start[mid] <= at)
			lo = mid;
		else
			hi = mid;
	}
	if (!dev_request_ok(b, lo, p.off))
		return NULL;
	row = b.rows[at];
	if (write && !(row.flags & KV_ROW_WRITE) && !(p.off & DEV_NO_WRITE_FLAG))
		return NULL;
	return dev_page(write ? p.a.dst : p.a.src, row, p.off);
}

KVK_DEV u32 move_tokens(const struct move_params &p, u32 i)
{
	u32 n = p.a.nr_tokens ? p.a.nr_tokens[i] : KV_PAGE_TOKENS;

	return n < KV_PAGE_TOKENS ? n : KV_PAGE_TOKENS;
}

/* ------------------------------------------------------------------------ plain bytes
 */

/* Does byte @at of a layer's part belong to one of the first @n slots? */
KVK_DEV bool slot_keeps(const struct kv_layout &l, u32 at, u32 n)
{
	const u32 elem = kv_dtype_bytes(l.dtype);
	const bool scales = l.scale_kind == KV_SCALE_TOKEN;
	u32 slot, planes;

	if (l.kind == KV_LAYOUT_MLA) {
		slot = l.latent_dim * elem;
		if (at < KV_PAGE_TOKENS * slot)
			return at < n * slot;
		at -= KV_PAGE_TOKENS * slot;
		slot = l.rope_dim * elem;
		if (at < KV_PAGE_TOKENS * slot)
			return at < n * slot;
		at -= KV_PAGE_TOKENS * slot;
		return scales && at < n * 4;
	}
	slot = l.head_dim * elem;
	planes = 2 * l.nr_kv_heads;
	if (at < planes * KV_PAGE_TOKENS * slot)
		return at % (KV_PAGE_TOKENS * slot) < n * slot;
	at -= planes * KV_PAGE_TOKENS * slot;
	return scales && at < planes * KV_PAGE_TOKENS * 2 &&
	       at % (KV_PAGE_TOKENS * 2) < n * 2;
}

/*
 * 16 bytes at @at of a page with @n tokens. A plane begins and ends at a multiple of 64
 * bytes, so 16 bytes lie in one plane, and what is kept is their beginning.
 */
KVK_DEV uint4 tail_clear(const struct kv_layout &l, u64 at, u32 n, uint4 v)
{
	const u32 in_part = (u32)(at % kv_layer_stride(&l));
	u32 w[4] = {v.x, v.y, v.z, v.w};

	if (n >= KV_PAGE_TOKENS || slot_keeps(l, in_part + 15, n))
		return v;
#pragma unroll
	for (u32 i = 0; i < 16; i++)
		if (!slot_keeps(l, in_part + i, n))
			w[i / 4] &= ~(0xffu << (i % 4 * 8));
	return make_uint4(w[0], w[1], w[2], w[3]);
}

/* One piece of one row. */
KVK_DEV void move_piece(const struct move_params &p, u32 i, u64 from, u64 end)
{
	const u32 op = p.a.op;
	const u32 n = op == KVK_MOVE_COPY ? move_tokens(p, i) : KV_PAGE_TOKENS;
	const u32 fill = op == KVK_MOVE_GATHER ? 0xffffffffu : 0;
	u8 *dst = op == KVK_MOVE_GATHER ? (u8 *)p.a.buf + i * p.bytes
					: move_page(p, i, true);
	const u8 *src = NULL;

	if (op == KVK_MOVE_SCATTER)
		src = (const u8 *)p.a.buf + i * p.bytes;
	else if (op != KVK_MOVE_ZERO)
		src = move_page(p, i, false);
	if (!dst || (op == KVK_MOVE_COPY && !src))
		return;
	for (u64 at = from + threadIdx.x * 16u; at < end;
	     at += MOVE_THREADS * MOVE_ILP * 16u) {
		uint4 v[MOVE_ILP];

#pragma unroll
		for (u32 k = 0; k < MOVE_ILP; k++) {
			v[k] = make_uint4(fill, fill, fill, fill);
			if (src && at + k * MOVE_THREADS * 16u < end)
				v[k] = *(const uint4 *)(src + at +
							k * MOVE_THREADS * 16u);
		}
#pragma unroll
		for (u32 k = 0; k < MOVE_ILP; k++) {
			u64 to = at + k * MOVE_THREADS * 16u;

			if (to < end)
				*(uint4 *)(dst + to) =
					n < KV_PAGE_TOKENS
						? tail_clear(p.a.dst.layout, to, n, v[k])
						: v[k];
		}
	}
}

__global__ void __launch_bounds__(MOVE_THREADS)
	move_kernel(const __grid_constant__ struct move_params p)
{
	const u64 pieces = (p.bytes + MOVE_PIECE - 1) / MOVE_PIECE;
	const u64 total = move_rows(p) * pieces;

	for (u64 item = blockIdx.x; item < total; item += gridDim.x) {
		u64 from = item % pieces * MOVE_PIECE;

		move_piece(p, (u32)(item / pieces), from,
			   from + MOVE_PIECE < p.bytes ? from + MOVE_PIECE : p.bytes);
	}
}

/* ----------------------------------------------------------------------- BF16 -> FP8
 */

/* UNROLL slots' values of the planes from @first on, @nr slots in all. */
template <u32 LANES, u32 CHUNKS, u32 UNROLL>
KVK_DEV void convert_read(const struct move_params &p, u32 layer, u32 first, u32 base,
			  u32 nr, u32 n, const u8 *in,
			  struct fast_values<CHUNKS> (&x)[UNROLL])
{
	const struct kv_layout &from = p.a.src.layout;
	const u32 step = MOVE_THREADS / LANES;
#pragma unroll
	for (u32 k = 0; k < UNROLL; k++) {
		const u32 i = base + k * step + threadIdx.x / LANES;
		const u32 plane = first + i / KV_PAGE_TOKENS, slot = i % KV_PAGE_TOKENS;
		const u32 off = dev_plane_get(&from, layer, plane).off;
		fast_read<LANES, CHUNKS>(x[k], in + off + slot * LANES * CHUNKS * 16,
					 i < nr && slot < n);
	}
}
/*
 * Planes @first .. @end - 1 of @n slots each. UNROLL of a warp's are coded while the next are on their
 * way: 512 pages of 8 layers 130 us without, 124 with two.
 */
template <u32 LANES, u32 CHUNKS, u32 UNROLL, bool TOKEN>
KVK_DEV void convert_fast(const struct move_params &p, u32 layer, u32 first, u32 end,
			  u32 n, const u8 *in, u8 *out)
{
	const struct kv_layout &to = p.a.dst.layout;
	const u32 step = MOVE_THREADS / LANES, nr = (end - first) * KV_PAGE_TOKENS;
	struct fast_values<CHUNKS> x[UNROLL], next[UNROLL];

	convert_read<LANES, CHUNKS, UNROLL>(p, layer, first, 0, nr, n, in, x);
#pragma unroll
	for (u32 base = 0; base < nr; base += step * UNROLL) {
		if (base + step * UNROLL < nr)
			convert_read<LANES, CHUNKS, UNROLL>(
				p, layer, first, base + step * UNROLL, nr, n, in, next);
#pragma unroll
		for (u32 k = 0; k < UNROLL; k++) {
			const u32 i = base + k * step + threadIdx.x / LANES;
			const u32 plane = first + i / KV_PAGE_TOKENS,
				  slot = i % KV_PAGE_TOKENS;
			const struct dev_plane pl =
				dev_plane_get(&to, layer, i < nr ? plane : first);
			const bool keep = i < nr && slot < n;
			struct fast_coded<CHUNKS> coded;
			fast_encode<LANES, CHUNKS, true, TOKEN>(
				coded, x[k], fast_fixed<true, TOKEN>(p.a.dst.scales, pl));
			if (keep)
				fast_store<LANES, CHUNKS, true, TOKEN>(out, pl, slot,
								       coded);
		}
#pragma unroll
		for (u32 k = 0; k < UNROLL; k++)
			x[k] = next[k];
	}
}

template <u32 SHAPE, bool TOKEN>
KVK_DEV void convert_shape(const struct move_params &p, u32 layer, u32 n, const u8 *in,
			   u8 *out)
{
	const u32 nr = dev_nr_planes(&p.a.dst.layout);

	if (SHAPE == FAST_MLA) {
		convert_fast<32, 2, 2, TOKEN>(p, layer, 0, 1, n, in, out);
		convert_fast<8, 1, 2, TOKEN>(p, layer, 1, 2, n, in, out);
	} else if (SHAPE == FAST_GQA64) {
		convert_fast<8, 1, 4, TOKEN>(p, layer, 0, nr, n, in, out);
	} else {
		convert_fast<16, 1, 4, TOKEN>(p, layer, 0, nr, n, in, out);
	}
}

/* Planes of any size, a warp each. */
KVK_DEV void convert_any(const struct move_params &p, u32 layer, u32 n, const u8 *in,
			 u8 *out)
{
	const struct kv_layout &from = p.a.src.layout, &to = p.a.dst.layout;

	for (u32 i = threadIdx.x / 32; i < dev_nr_planes(&to) * n;
	     i += MOVE_THREADS / 32) {
		const u32 plane = i / n, slot = i % n;
		struct dev_plane pf = dev_plane_get(&from, layer, plane);
		struct dev_plane pt = dev_plane_get(&to, layer, plane);
		float x[PLANE_GROUPS][4];

		plane_read(x, KVK_BF16, in + pf.off, (size_t)slot * pf.dim, pf.dim,
			   p.vec);
		plane_store(p.a.dst, out, pt, slot, p.vec, x);
	}
}

/* One layer of one page: what append would have written for the same BF16 values. */
template <u32 SHAPE, bool TOKEN>
KVK_DEV void convert_layer(const struct move_params &p, u32 layer, const u8 *src, u8 *dst,
			   u32 n)
{
	const struct kv_layout &to = p.a.dst.layout;
	const u8 *in = src + (u64)layer * kv_layer_stride(&p.a.src.layout);
	u8 *out = dst + (u64)layer * kv_layer_stride(&to);

	if (SHAPE == FAST_NONE)
		convert_any(p, layer, n, in, out);
	else
		convert_shape<SHAPE, TOKEN>(p, layer, n, in, out);
	/* what no slot holds becomes zero, the padding too */
	for (u32 at = threadIdx.x + (n < KV_PAGE_TOKENS ? 0 : kv_layer_bytes(&to));
	     at < kv_layer_stride(&to); at += MOVE_THREADS)
		if (!slot_keeps(to, at, n))
			out[at] = 0;
}

/*
 * All CTAs of the grid on the SMs at once: a second round would be one of few. A lane looks up the
 * pages of an item each, for 32 items to come.
 */
template <u32 SHAPE, bool TOKEN>
__global__ void __launch_bounds__(MOVE_THREADS, 4)
	convert_kernel(const __grid_constant__ struct move_params p)
{
	const u32 nr_layers = p.a.dst.layout.nr_layers, lane = threadIdx.x % 32;
	const u64 total = (u64)move_rows(p) * nr_layers;

	for (u64 base = blockIdx.x; base < total; base += 32u * gridDim.x) {
		const u64 mine = base + lane * gridDim.x;
		u64 src = 0, dst = 0;
		u32 n = 0;

		if (mine < total) {
			const u32 i = (u32)(mine / nr_layers);

			src = (u64)move_page(p, i, false);
			dst = (u64)move_page(p, i, true);
			n = move_tokens(p, i);
		}
		for (u32 k = 0; k < 32 && base + k * gridDim.x < total; k++) {
			const u32 layer = (u32)((base + k * gridDim.x) % nr_layers);
			const u8 *in = (const u8 *)__shfl_sync(~0u, src, (int)k);
			u8 *out = (u8 *)__shfl_sync(~0u, dst, (int)k);
			const u32 tokens = __shfl_sync(~0u, n, (int)k);

			if (in && out)
				convert_layer<SHAPE, TOKEN>(p, layer, in, out, tokens);
		}
	}
}

/* ---------------------------------------------------------------------------- CRC-32C
 */

/* a * b modulo the polynomial; bit 31 is x^0. */
KV_INLINE u32 crc_mul(u32 a, u32 b)
{
	u32 p = 0;

	for (u32 bit = 0x80000000u; bit; bit >>= 1) {
		p ^= a & bit ? b : 0;
		b = (b >> 1) ^ (b & 1 ? CRC_POLY : 0);
	}
	return p;
}

/* x^(8 n); @x2n: x^(2^k) for k = 0 .. 31, n below 2^29 */
KV_INLINE u32 crc_power(const u32 *x2n, u64 n)
{
	u32 p = 0x80000000u;

	for (u32 k = 3; n; n >>= 1, k++)
		if (n & 1)
			p = crc_mul(x2n[k], p);
	return p;
}

/* Tables for four bytes at a time. */
KVK_DEV void crc_tables(u32 (&table)[4][256])
{
	for (u32 i = threadIdx.x; i < 256; i += MOVE_THREADS) {
		u32 c = i;

		for (u32 bit = 0; bit < 8; bit++)
			c = (c >> 1) ^ (c & 1 ? CRC_POLY : 0);
		table[0][i] = c;
	}
	__syncthreads();
	for (u32 i = threadIdx.x; i < 256; i += MOVE_THREADS) {
		u32 c = table[0][i];

		for (u32 k = 1; k < 4; k++)
			table[k][i] = c = (c >> 8) ^ table[0][c & 255];
	}
	__syncthreads();
}

/* Remainder of CRC_SEGMENT bytes, nothing before them. */
KVK_DEV u32 crc_segment(const u32 (&table)[4][256], const u8 *src)
{
	uint4 v[CRC_SEGMENT / 16];
	u32 c = 0;

#pragma unroll
	for (u32 i = 0; i < CRC_SEGMENT / 16; i++)
		v[i] = ((const uint4 *)src)[i];
#pragma unroll
	for (u32 i = 0; i < CRC_SEGMENT / 4; i++) {
		const uint4 q = v[i / 4];

		c ^= i % 4 == 0 ? q.x : i % 4 == 1 ? q.y : i % 4 == 2 ? q.z : q.w;
		c = table[3][c & 255] ^ table[2][c >> 8 & 255] ^ table[1][c >> 16 & 255] ^
		    table[0][c >> 24];
	}
	return c;
}

/* The constant part; 0 for pages that may not be read. */
__global__ void __launch_bounds__(MOVE_THREADS)
	crc_start_kernel(const __grid_constant__ struct move_params p)
{
	const u32 nr = move_rows(p);

	for (u32 i = blockIdx.x * MOVE_THREADS + threadIdx.x; i < nr;
	     i += gridDim.x * MOVE_THREADS)
		p.a.ret_crc[i] = move_page(p, i, false) ? p.crc_const : 0;
}

/* Pieces are counted from the page's end: all have the same distance to it, and what lies
 * before its beginning is nothing. */
__global__ void __launch_bounds__(MOVE_THREADS)
	crc_kernel(const __grid_constant__ struct move_params p)
{
	__shared__ u32 table[4][256], all;
	const u64 pieces = (p.bytes + CRC_PIECE - 1) / CRC_PIECE;
	const u64 total = move_rows(p) * pieces;
	const u32 behind = (MOVE_THREADS - 1 - threadIdx.x) * CRC_SEGMENT;
	const u32 power = crc_power(p.x2n, behind);

	crc_tables(table);
	for (u64 item = blockIdx.x; item < total; item += gridDim.x) {
		const u32 i = (u32)(item / pieces);
		const u64 k = item % pieces, skip = k * CRC_PIECE + behind + CRC_SEGMENT;
		const u8 *src = move_page(p, i, false);
		u32 c = 0;

		if (!src)
			continue;
		if (threadIdx.x == 0)
			all = 0;
		__syncthreads();
		if (skip <= p.bytes)
			c = crc_mul(power, crc_segment(table, src + (p.bytes - skip)));
		for (int o = 16; o; o >>= 1)
			c ^= __shfl_xor_sync(~0u, c, o);
		if (threadIdx.x % 32 == 0)
			atomicXor(&all, c);
		__syncthreads();
		if (threadIdx.x == 0)
			atomicXor(&p.a.ret_crc[i],
				  crc_mul(crc_power(p.x2n, k * CRC_PIECE), all));
		__syncthreads();
	}
}

/* --------------------------------------------------------------------------- launcher
 */

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

static int move_side_check(const struct kvk_batch *b, const struct kvk_pages *p)
{
	return dev_batch_check(b, false) || kvk_pages_check(p) || !dev_pages_aligned(p)
		       ? -EINVAL
		       : 0;
}

static int move_check(const struct kvk_move_args *a)
{
	const struct kv_layout *s = &a->src.layout, *d = &a->dst.layout;
	const bool buf = a->op == KVK_MOVE_GATHER || a->op == KVK_MOVE_SCATTER;
	const bool reads = a->op != KVK_MOVE_ZERO && a->op != KVK_MOVE_SCATTER;
	const bool writes = a->op != KVK_MOVE_GATHER && a->op != KVK_MOVE_CRC;

	if (a->op < KVK_MOVE_ZERO || a->op > KVK_MOVE_CRC)
		return -EINVAL;
	if (reads && move_side_check(&a->src_batch, &a->src))
		return -EINVAL;
	if (writes && move_side_check(&a->dst_batch, &a->dst))
		return -EINVAL;
	if (reads && writes && !layouts_match(s, d, a->op == KVK_MOVE_COPY))
		return -EINVAL;
	if (a->op == KVK_MOVE_CONVERT &&
	    (s->dtype != KV_DTYPE_BF16 || d->dtype != KV_DTYPE_E4M3 || !plane_dims_ok(d)))
		return -EINVAL;
	if (buf && (!a->buf || !dev_aligned(a->buf, 16)))
		return -EINVAL;
	/* crc_power() knows distances up to 2^29 */
	return a->op == KVK_MOVE_CRC && (!a->ret_crc || kv_page_bytes(s) >> 29) ? -EINVAL
										: 0;
}

static void crc_params(struct move_params *p)
{
	u32 v = 0x40000000u; /* x */

	for (u32 k = 0; k < 32; k++) {
		p->x2n[k] = v;
		v = crc_mul(v, v);
	}
	/* all ones before the first byte, and everything turned over behind the last */
	p->crc_const = ~crc_mul(crc_power(p->x2n, p->bytes), 0xffffffffu);
}

template <bool TOKEN>
static void convert_launch(const struct move_params &p, kvk_stream stream)
{
	switch (fast_shape_of(&p.a.dst.layout)) {
	case FAST_MLA:
		DEV_LAUNCH((convert_kernel<FAST_MLA, TOKEN>), MOVE_CTAS, MOVE_THREADS,
			   stream, p);
		break;
	case FAST_GQA64:
		DEV_LAUNCH((convert_kernel<FAST_GQA64, TOKEN>), MOVE_CTAS, MOVE_THREADS,
			   stream, p);
		break;
	case FAST_GQA128:
		DEV_LAUNCH((convert_kernel<FAST_GQA128, TOKEN>), MOVE_CTAS, MOVE_THREADS,
			   stream, p);
		break;
	default:
		DEV_LAUNCH((convert_kernel<FAST_NONE, TOKEN>), MOVE_CTAS, MOVE_THREADS,
			   stream, p);
	}
}

int kvk_page_move_cuda(const struct kvk_move_args *a, kvk_stream stream)
{
	struct move_params p = {};
	int r = move_check(a);

	if (r)
		return r;
	p.a = *a;
	p.off = (DEV_MUTANT(no_verdict) ? DEV_NO_VERDICT : 0) |
		(DEV_MUTANT(row_range) ? DEV_NO_ROW_RANGE : 0) |
		(DEV_MUTANT(move_no_write_flag) ? DEV_NO_WRITE_FLAG : 0);
	p.bytes = a->op == KVK_MOVE_GATHER || a->op == KVK_MOVE_CRC
			  ? kv_page_bytes(&a->src.layout)
			  : kv_page_bytes(&a->dst.layout);
	if (a->op == KVK_MOVE_CONVERT) {
		p.vec = plane_dims_vec(&a->dst.layout);
		if (a->dst.layout.scale_kind == KV_SCALE_TOKEN)
			convert_launch<true>(p, stream);
		else
			convert_launch<false>(p, stream);
	} else if (a->op == KVK_MOVE_CRC) {
		crc_params(&p);
		DEV_LAUNCH(crc_start_kernel, 8, MOVE_THREADS, stream, p);
		r = dev_launched();
		if (r)
			return r;
		DEV_LAUNCH(crc_kernel, MOVE_CTAS, MOVE_THREADS, stream, p);
	} else {
		DEV_LAUNCH(move_kernel, MOVE_CTAS, MOVE_THREADS, stream, p);
	}
	return dev_launched();
}
