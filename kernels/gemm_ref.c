/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm_ref.c - the matrix product behind linear and the experts.
 *
 * Weights stay as they are stored; 16 rows by up to 512 columns at a time become an f32
 * tile on the stack, which all tokens of the call use. A dot product's order depends on
 * the number of columns alone (simd_impl.h). No state; any thread.
 */
#include <string.h>
#include "ref.h"

/* Values [c0, c0 + n) of row @row to f32; the caller clears up to the next 16. */
typedef void row_fn(const struct kvk_simd *simd, const struct kvk_weight *w, u32 row,
		    u32 c0, u32 n, float *dst);

static void row_f32(const struct kvk_simd *simd, const struct kvk_weight *w, u32 row,
		    u32 c0, u32 n, float *dst)
{
	memcpy(dst, (const float *)w->data + (size_t)row * w->cols + c0,
	       n * sizeof(float));
}

static void row_bf16(const struct kvk_simd *simd, const struct kvk_weight *w, u32 row,
		     u32 c0, u32 n, float *dst)
{
	simd->cvt_bf16((const u16 *)w->data + (size_t)row * w->cols + c0, dst, n);
}

static void row_e4m3(const struct kvk_simd *simd, const struct kvk_weight *w, u32 row,
		     u32 c0, u32 n, float *dst)
{
	const u8 *src = (const u8 *)w->data + (size_t)row * w->cols + c0;
	const float *scales = w->scales;

	for (u32 c = 0; c < n; c += KVK_FP8_BLOCK)
		simd->cvt_e4m3(src + c, scales[kvk_fp8_scale_index(row, c0 + c, w->cols)],
			       dst + c, KV_MIN(n - c, KVK_FP8_BLOCK));
}

static void row_int4(const struct kvk_simd *simd, const struct kvk_weight *w, u32 row,
		     u32 c0, u32 n, float *dst)
{
	const u32 *src = (const u32 *)w->data +
			 (size_t)row * kvk_int4_row_words(w->cols) +
			 c0 / KVK_INT4_PER_WORD;
	const u16 *scales = (const u16 *)w->scales +
			    (size_t)row * kvk_int4_row_scales(w->cols, w->group) +
			    c0 / w->group;
	int is_f16 = w->scale_dtype == KVK_F16;

	for (u32 c = 0; c < n; c += w->group, scales++)
		simd->cvt_int4(src + c / KVK_INT4_PER_WORD,
			       kvk_scale16_to_f32(*scales, is_f16), dst + c, w->group);
}

static row_fn *row_fn_of(u32 dtype)
{
	switch (dtype) {
	case KVK_F32:
		return row_f32;
	case KVK_BF16:
		return row_bf16;
	case KVK_E4M3:
		return row_e4m3;
	case KVK_INT4:
		return row_int4;
	default:
		return NULL;
	}
}

int kvk_weight_check(const struct kvk_weight *w)
{
	if (!w->data || !w->rows || !w->cols || !row_fn_of(w->dtype))
		return -EINVAL;
	if ((w->dtype == KVK_E4M3 || w->dtype == KVK_INT4) && !w->scales)
		return -EINVAL;
	if (w->dtype == KVK_INT4 &&
	    (!kvk_int4_shape_ok(w->cols, w->group) ||
	     (w->scale_dtype != KVK_BF16 && w->scale_dtype != KVK_F16)))
		return -EINVAL;
	return 0;
}

struct kvk_weight kvk_weight_at(const struct kvk_weight *w, size_t index)
{
	size_t elems = (size_t)w->rows * w->cols * index;
	struct kvk_weight at = *w;
	size_t data_bytes = 0, scale_bytes = 0;

	switch (w->dtype) {
	case KVK_F32:
		data_bytes = elems * 4;
		break;
	case KVK_BF16:
		data_bytes = elems * 2;
		break;
	case KVK_E4M3:
		data_bytes = elems;
		scale_bytes =
			index * kvk_fp8_blocks(w->rows) * kvk_fp8_blocks(w->cols) * 4;
		break;
	default:
		data_bytes = elems / 2;
		scale_bytes = elems / w->group * 2;
	}
	at.data = (const u8 *)w->data + data_bytes;
	if (w->scales)
		at.scales = (const u8 *)w->scales + scale_bytes;
	return at;
}

void kvk_gemm16(const struct kvk_weight *w, u32 row, const float *const *x, u32 nr_tokens,
		float *out)
{
	float tile[KVK_TILE_ROWS * KVK_TILE_COLS] __attribute__((aligned(64)));
	float acc[KVK_GEMM_TOKENS * KVK_TILE_ROWS * KVK_LANES]
		__attribute__((aligned(64)));
	const struct kvk_simd *simd = kvk_simd_get();
	row_fn *load = row_fn_of(w->dtype);
	struct kvk_gemm_panel g = {
		.tile = tile, .x = x, .nr_tokens = nr_tokens, .acc = acc, .out = out};

	for (u32 c = 0; c < w->cols; c += KVK_TILE_COLS) {
		u32 n = KV_MIN(w->cols - c, KVK_TILE_COLS), padded = kvk_padded(n);

		for (u32 i = 0; i < KVK_TILE_ROWS; i++) {
			float *dst = tile + (size_t)i * KVK_TILE_COLS;

			if (row + i < w->rows) {
				load(simd, w, row + i, c, n, dst);
				memset(dst + n, 0, (padded - n) * sizeof(float));
			} else {
				memset(dst, 0, padded * sizeof(float));
			}
		}
		g.col = c;
		g.nr_vecs = padded / KVK_LANES;
		g.first = c == 0;
		g.last = c + n == w->cols;
		simd->gemm(&g);
	}
}
