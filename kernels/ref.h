/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref.h - what the C references share: batch rules, page addresses, activations, gemm.
 *
 * The rule of every page-touching reference (design 5, P5): kvk_request_ok() of a request
 * is asked before the first access to one of its pages; if it says no, outputs are NaN
 * and no page byte is read or written. A row is turned into an address by kvk_row_layer()
 * only.
 *
 * All functions work on the caller's memory without locks; any thread.
 */
#ifndef KVK_REF_H
#define KVK_REF_H

#include <errno.h>
#include "base/mutant.h"
#include "base/util.h"
#include "fp8.h"
#include "int4.h"
#include "kernels.h"
#include "simd.h"

/* Hooks of the host table; each one's contract stands in kernels.h. */
int kvk_tag_check_ref(const struct kvk_tag_check_args *a, kvk_stream stream);
int kvk_append_ref(const struct kvk_append_args *a, kvk_stream stream);
int kvk_attn_mla_ref(const struct kvk_attn_args *a, kvk_stream stream);
int kvk_attn_gqa_ref(const struct kvk_attn_args *a, kvk_stream stream);
int kvk_attn_prefill_ref(const struct kvk_attn_args *a, kvk_stream stream);
int kvk_moe_route_ref(const struct kvk_moe_route_args *a, kvk_stream stream);
int kvk_moe_int4_ref(const struct kvk_moe_args *a, kvk_stream stream);
int kvk_moe_fp8_ref(const struct kvk_moe_args *a, kvk_stream stream);
int kvk_moe_bf16_ref(const struct kvk_moe_args *a, kvk_stream stream);
int kvk_linear_ref(const struct kvk_linear_args *a, kvk_stream stream);
int kvk_norm_ref(const struct kvk_norm_args *a, kvk_stream stream);
int kvk_rope_ref(const struct kvk_rope_args *a, kvk_stream stream);
int kvk_norm_rope_append_ref(const struct kvk_norm_rope_append_args *a,
			     kvk_stream stream);
int kvk_silu_ref(const struct kvk_silu_args *a, kvk_stream stream);
int kvk_sample_ref(const struct kvk_sample_args *a, kvk_stream stream);
int kvk_page_move_ref(const struct kvk_move_args *a, kvk_stream stream);
size_t kvk_attn_workspace_ref(const struct kvk_attn_args *a);
size_t kvk_moe_workspace_ref(const struct kvk_moe_args *a);

/* --------------------------------------------------------------------- batch_ref.c */

/**
 * kvk_batch_check() - are the host-side facts of a batch usable?
 * @b: batch
 * @need_tokens: q_start, lengths and nr_tokens are used as well
 *
 * Return: 0; -EINVAL when an array is missing or offsets do not grow.
 */
int kvk_batch_check(const struct kvk_batch *b, bool need_tokens);

/**
 * kvk_pages_check() - is this layout built, and do its numbers fit together?
 * @p: pages
 *
 * Return: 0 or -EINVAL.
 */
int kvk_pages_check(const struct kvk_pages *p);

/**
 * kvk_append_check() - is this an append? In append_ref.c
 * @a: arguments
 *
 * Return: 0 or -EINVAL.
 */
int kvk_append_check(const struct kvk_append_args *a);

/**
 * kvk_request_ok() - may this request's pages be touched?
 * @b: batch
 * @p: pages the rows point into
 * @r: request
 *
 * The verdict decides. On top of it no row may point outside the reserved range and no
 * length outside the rows, so that even with checks switched off a row never becomes a
 * wild address.
 *
 * Return: true when the request passed.
 */
bool kvk_request_ok(const struct kvk_batch *b, const struct kvk_pages *p, u32 r);

static inline u32 kvk_nr_rows(const struct kvk_batch *b, u32 r)
{
	return b->row_start[r + 1] - b->row_start[r];
}

static inline u32 kvk_q_len(const struct kvk_batch *b, u32 r)
{
	return b->q_start[r + 1] - b->q_start[r];
}

/* Position of the request's first token of this step; negative = the batch is nonsense.
 */
static inline s64 kvk_first_position(const struct kvk_batch *b, u32 r)
{
	return (s64)b->lengths[r] - kvk_q_len(b, r);
}

/* Start of @layer's part of the page of a row. */
static inline u8 *kvk_row_layer(const struct kvk_pages *p, const struct kv_row *row,
				u32 layer)
{
	return (u8 *)p->base + kv_page_offset(&p->geometry, row->pfn) +
	       (u64)layer * kv_layer_stride(&p->layout);
}

static inline u16 kvk_load16(const u8 *p)
{
	u16 v;

	__builtin_memcpy(&v, p, sizeof(v));
	return v;
}

/* ----------------------------------------------------------------------- act_ref.c */

/**
 * kvk_act_load() - activations to f32
 * @dtype: KVK_F32 or KVK_BF16
 * @src: start of the array
 * @index: first element
 * @dst: [n]
 * @n: elements
 */
void kvk_act_load(u32 dtype, const void *src, size_t index, float *dst, u32 n);

/* f32 to activations; as kvk_act_load(). */
void kvk_act_store(u32 dtype, const float *src, void *dst, size_t index, u32 n);

/* Fill activations with NaN. */
void kvk_act_nan(u32 dtype, void *dst, size_t index, size_t n);

static inline bool kvk_act_dtype_ok(u32 dtype)
{
	return dtype == KVK_F32 || dtype == KVK_BF16;
}

/**
 * kvk_act_fp8() - round activations to e4m3 per 128 values and back
 * @x: [n], in place: e4m3(x / scale) * scale, scale = amax / 448 of each 128
 * @n: values
 */
void kvk_act_fp8(float *x, u32 n);

/* ---------------------------------------------------------------------- gemm_ref.c */

/**
 * kvk_weight_check() - is this matrix well formed?
 * @w: matrix
 *
 * Return: 0 or -EINVAL.
 */
int kvk_weight_check(const struct kvk_weight *w);

/* Matrix @index of an array of matrices like @w, one after the other. */
struct kvk_weight kvk_weight_at(const struct kvk_weight *w, size_t index);

/* Row length in floats that kvk_gemm16() wants its x rows padded to (with zeros). */
static inline u32 kvk_padded(u32 cols)
{
	return (u32)kv_round_up(cols, KVK_LANES);
}

/**
 * kvk_gemm16() - 16 rows of a matrix times up to KVK_GEMM_TOKENS activation rows
 * @w: matrix
 * @row: first row; rows past the end give zero
 * @x: [nr_tokens] f32 rows of kvk_padded(cols) values
 * @nr_tokens: 1 .. KVK_GEMM_TOKENS
 * @out: [nr_tokens][16]
 *
 * E4M3 weights: the caller rounded x with kvk_act_fp8().
 */
void kvk_gemm16(const struct kvk_weight *w, u32 row, const float *const *x, u32 nr_tokens,
		float *out);

/* ------------------------------------------- planes: batch_ref.c; digest: crc32c.c */

/**
 * struct kvk_plane - one run of equal values of a token in a page: latent, rope, a head's
 * K or V
 * @off: byte offset of slot 0 in the layer's part
 * @dim: values per slot
 * @scale_off: offset of slot 0's fp16 scale
 * @scale_step: bytes between slots' scales
 * @scale_index: index of its static scale
 */
struct kvk_plane {
	u32 off;
	u32 dim;
	u32 scale_off;
	u32 scale_step;
	u32 scale_index;
};

/* Planes of a layer: MLA 2 (latent, rope), GQA 2 per kv head (K, V). */
static inline u32 kvk_nr_planes(const struct kv_layout *l)
{
	return l->kind == KV_LAYOUT_MLA ? 2 : 2 * l->nr_kv_heads;
}

struct kvk_plane kvk_plane_get(const struct kv_layout *l, u32 layer, u32 index);

/**
 * kvk_plane_store() - quantise one token's values of a plane into its slot
 * @p: pages
 * @part: the layer's part of the page
 * @pl: plane
 * @slot: slot in the page
 * @x: [pl->dim]
 *
 * Return: number of NaN values stored.
 */
u32 kvk_plane_store(const struct kvk_pages *p, u8 *part, const struct kvk_plane *pl,
		    u32 slot, const float *x);

/**
 * kvk_plane_load() - one token's values of a plane, scaled, to f32
 * @simd: inner loops
 * @p: pages
 * @part: the layer's part of the page
 * @pl: plane
 * @slot: slot in the page
 * @dst: [pl->dim]
 */
void kvk_plane_load(const struct kvk_simd *simd, const struct kvk_pages *p,
		    const u8 *part, const struct kvk_plane *pl, u32 slot, float *dst);

/**
 * kvk_crc32c() - CRC-32C (Castagnoli), as SSE4.2 and iSCSI compute it
 * @data: bytes
 * @n: number
 *
 * Return: the checksum; 0xe3069283 for "123456789".
 */
u32 kvk_crc32c(const void *data, size_t n);

/* The same without CPU support; kvk_crc32c() chooses. */
u32 kvk_crc32c_portable(const void *data, size_t n);

#endif /* KVK_REF_H */
