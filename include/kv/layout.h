/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv/layout.h - what gives the bytes of a page meaning, and where each byte lies.
 *
 * A page holds page_tokens tokens of all layers of one layout, planar per layer; a layer's
 * part starts 256-byte aligned. Formats (design section 4), for 64 tokens and one layer:
 *
 *   MLA  latent [64][latent_dim], rope [64][rope_dim], then with KV_SCALE_TOKEN
 *        scales [64][2] fp16 (latent, rope)
 *   GQA  per kv head: K [64][head_dim], V [64][head_dim]; then with KV_SCALE_TOKEN
 *        scales [kv_heads][2][64] fp16 (K, V)
 *
 * KV_SCALE_STATIC keeps the scales in the layout: MLA one per layer; GQA [layers][kv_heads][2].
 * All index math is here, once, for host and device.
 */
#ifndef KV_LAYOUT_H
#define KV_LAYOUT_H

#include "types.h"

#define KV_PAGE_TOKENS	  64u
#define KV_LAYER_ALIGN	  256u
#define KV_STRIDE_ALIGN	  4096u
#define KV_LAYOUT_VERSION 1u
#define KV_MODEL_ID_BYTES 32u
#define KV_LAYERS_MAX	  256u
#define KV_KV_HEADS_MAX	  128u
#define KV_SCALES_MAX	  (KV_LAYERS_MAX * 64u)

enum kv_layout_kind { KV_LAYOUT_MLA = 1, KV_LAYOUT_GQA = 2 };

enum kv_dtype {
	KV_DTYPE_BF16 = 1,
	KV_DTYPE_E4M3 = 2,
	KV_DTYPE_F32 = 3, /* tests only: refused by kvmd unless started with --test-layouts */
};

enum kv_scale_kind {
	KV_SCALE_NONE = 0,   /* BF16, F32 */
	KV_SCALE_TOKEN = 1,  /* fp16 per token, in the page */
	KV_SCALE_STATIC = 2, /* fp32, in the layout */
};

/**
 * struct kv_layout - everything that gives a page's bytes meaning
 * @format_version: KV_LAYOUT_VERSION; covers rounding (RNE), saturation (448) and NaN rules
 * @kind: enum kv_layout_kind
 * @dtype: enum kv_dtype of K/V, latent and rope
 * @scale_kind: enum kv_scale_kind
 * @page_tokens: tokens of a page (64)
 * @nr_layers: layers
 * @nr_kv_heads: GQA: kv heads; MLA: 0
 * @head_dim: GQA: 64 or 128; MLA: 0
 * @latent_dim: MLA: 512; GQA: 0
 * @rope_dim: MLA: 64; GQA: 0
 * @plane_order: 0 (the order of this header)
 * @nr_scales: STATIC: MLA nr_layers, GQA nr_layers * nr_kv_heads * 2; else 0
 * @lora_id: 0 = base model
 * @model_id: BLAKE2b-256 of the model's revision; equal weights, equal id
 *
 * nr_scales fp32 values follow on the wire and in memory. The fingerprint is the first 8
 * bytes, little endian, of the BLAKE2b-128 of every field in this order, each as
 * {u32 length, bytes}, then {u32 length, scales}.
 */
struct kv_layout {
	uint32_t format_version;
	uint32_t kind;
	uint32_t dtype;
	uint32_t scale_kind;
	uint32_t page_tokens;
	uint32_t nr_layers;
	uint32_t nr_kv_heads;
	uint32_t head_dim;
	uint32_t latent_dim;
	uint32_t rope_dim;
	uint32_t plane_order;
	uint32_t nr_scales;
	uint64_t lora_id;
	uint8_t model_id[KV_MODEL_ID_BYTES];
};
KV_ABI_SIZE(kv_layout, 88);
KV_ABI_FIELD(kv_layout, format_version, 0, 4);
KV_ABI_FIELD(kv_layout, kind, 4, 4);
KV_ABI_FIELD(kv_layout, dtype, 8, 4);
KV_ABI_FIELD(kv_layout, scale_kind, 12, 4);
KV_ABI_FIELD(kv_layout, page_tokens, 16, 4);
KV_ABI_FIELD(kv_layout, nr_layers, 20, 4);
KV_ABI_FIELD(kv_layout, nr_kv_heads, 24, 4);
KV_ABI_FIELD(kv_layout, head_dim, 28, 4);
KV_ABI_FIELD(kv_layout, latent_dim, 32, 4);
KV_ABI_FIELD(kv_layout, rope_dim, 36, 4);
KV_ABI_FIELD(kv_layout, plane_order, 40, 4);
KV_ABI_FIELD(kv_layout, nr_scales, 44, 4);
KV_ABI_FIELD(kv_layout, lora_id, 48, 8);
KV_ABI_FIELD(kv_layout, model_id, 56, 32);

KV_INLINE uint32_t kv_dtype_bytes(uint32_t dtype)
{
	return dtype == KV_DTYPE_F32 ? 4u : dtype == KV_DTYPE_BF16 ? 2u : 1u;
}

/* Bytes of one layer's part of a page, before alignment. */
KV_INLINE uint32_t kv_layer_bytes(const struct kv_layout *l)
{
	uint32_t elems, scales;

	if (l->kind == KV_LAYOUT_MLA) {
		elems = l->page_tokens * (l->latent_dim + l->rope_dim);
		scales = l->page_tokens * 2;
	} else {
		elems = l->page_tokens * l->head_dim * 2 * l->nr_kv_heads;
		scales = l->page_tokens * 2 * l->nr_kv_heads;
	}
	return elems * kv_dtype_bytes(l->dtype) +
	       (l->scale_kind == KV_SCALE_TOKEN ? scales * 2 : 0);
}

KV_INLINE uint32_t kv_layer_stride(const struct kv_layout *l)
{
	return (kv_layer_bytes(l) + KV_LAYER_ALIGN - 1) & ~(KV_LAYER_ALIGN - 1);
}

/* Bytes of a page that carry meaning: digests and copies cover these. */
KV_INLINE uint64_t kv_page_bytes(const struct kv_layout *l)
{
	return (uint64_t)kv_layer_stride(l) * l->nr_layers;
}

KV_INLINE uint64_t kv_page_stride(const struct kv_layout *l)
{
	return (kv_page_bytes(l) + KV_STRIDE_ALIGN - 1) & ~(uint64_t)(KV_STRIDE_ALIGN - 1);
}

/* Offsets inside a layer's part, in bytes. */
KV_INLINE uint32_t kv_mla_latent_off(const struct kv_layout *l, uint32_t slot)
{
	return slot * l->latent_dim * kv_dtype_bytes(l->dtype);
}

KV_INLINE uint32_t kv_mla_rope_off(const struct kv_layout *l, uint32_t slot)
{
	return (l->page_tokens * l->latent_dim + slot * l->rope_dim) * kv_dtype_bytes(l->dtype);
}

/* fp16 pair (latent, rope) of a slot */
KV_INLINE uint32_t kv_mla_scale_off(const struct kv_layout *l, uint32_t slot)
{
	return l->page_tokens * (l->latent_dim + l->rope_dim) * kv_dtype_bytes(l->dtype) +
	       slot * 4;
}

/* @is_v: 0 = K, 1 = V */
KV_INLINE uint32_t kv_gqa_off(const struct kv_layout *l, uint32_t head, uint32_t is_v,
			      uint32_t slot)
{
	return ((head * 2 + is_v) * l->page_tokens + slot) * l->head_dim *
	       kv_dtype_bytes(l->dtype);
}

KV_INLINE uint32_t kv_gqa_scale_off(const struct kv_layout *l, uint32_t head, uint32_t is_v,
				    uint32_t slot)
{
	return l->nr_kv_heads * 2 * l->page_tokens * l->head_dim * kv_dtype_bytes(l->dtype) +
	       ((head * 2 + is_v) * l->page_tokens + slot) * 2;
}

/**
 * struct kv_geometry - how a pool's pages lie in its extents
 * @extent_bytes: distance of two extents in the reserved address range
 * @stride_bytes: distance of two pages in an extent
 * @shift: log2 of pages per extent
 * @nr_pages: most pages the pool can ever hold
 */
struct kv_geometry {
	uint64_t extent_bytes;
	uint64_t stride_bytes;
	uint32_t shift;
	uint32_t nr_pages;
};
KV_ABI_SIZE(kv_geometry, 24);
KV_ABI_FIELD(kv_geometry, extent_bytes, 0, 8);
KV_ABI_FIELD(kv_geometry, stride_bytes, 8, 8);
KV_ABI_FIELD(kv_geometry, shift, 16, 4);
KV_ABI_FIELD(kv_geometry, nr_pages, 20, 4);

/* Byte offset of a page from the base of the pool's reserved range. */
KV_INLINE uint64_t kv_page_offset(const struct kv_geometry *g, uint32_t pfn)
{
	return (uint64_t)(pfn >> g->shift) * g->extent_bytes +
	       (uint64_t)(pfn & ((1u << g->shift) - 1)) * g->stride_bytes;
}

#endif /* KV_LAYOUT_H */
