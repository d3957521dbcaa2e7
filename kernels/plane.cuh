/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plane.cuh - one token's values of a plane (latent, rope, a head's K or V) in a warp's
 * registers: from activations or a BF16 page, and into a page slot. The bytes are those of
 * kvk_plane_store().
 */
#ifndef KVK_PLANE_CUH
#define KVK_PLANE_CUH

#include "kernels/arch.cuh"
#include "kernels/dev.cuh"
#include "kernels/quant.cuh"

#define PLANE_DIM_MAX 1024u
#define PLANE_GROUPS  (PLANE_DIM_MAX / 128) /* of four values in each lane */

/* As struct kvk_plane. */
struct dev_plane {
	u32 off;
	u32 dim;
	u32 scale_off;
	u32 scale_step;
	u32 scale_index;
};

/* Planes of a layer: MLA 2 (latent, rope), GQA 2 per kv head (K, V). */
KV_INLINE u32 dev_nr_planes(const struct kv_layout *l)
{
	return l->kind == KV_LAYOUT_MLA ? 2 : 2 * l->nr_kv_heads;
}

KVK_DEV struct dev_plane dev_plane_get(const struct kv_layout *l, u32 layer, u32 index)
{
	u32 head = index / 2, second = index % 2;
	struct dev_plane pl;

	if (l->kind == KV_LAYOUT_MLA) {
		pl.off = second ? kv_mla_rope_off(l, 0) : kv_mla_latent_off(l, 0);
		pl.dim = second ? l->rope_dim : l->latent_dim;
		pl.scale_off = kv_mla_scale_off(l, 0) + second * 2;
		pl.scale_step = 4;
		pl.scale_index = layer;
	} else {
		pl.off = kv_gqa_off(l, head, second, 0);
		pl.dim = l->head_dim;
		pl.scale_off = kv_gqa_scale_off(l, head, second, 0);
		pl.scale_step = 2;
		pl.scale_index = (layer * l->nr_kv_heads + head) * 2 + second;
	}
	return pl;
}

/* Are all planes of a layout made of whole groups of four values, and not too long? */
static inline bool plane_dims_ok(const struct kv_layout *l)
{
	return l->latent_dim <= PLANE_DIM_MAX && l->rope_dim <= PLANE_DIM_MAX &&
	       l->head_dim <= PLANE_DIM_MAX;
}

static inline bool plane_dims_vec(const struct kv_layout *l)
{
	return l->latent_dim % 4 == 0 && l->rope_dim % 4 == 0 && l->head_dim % 4 == 0;
}

/* First value of group @j in this lane. */
KVK_DEV u32 plane_at(u32 j)
{
	return (threadIdx.x % 32 + 32 * j) * 4;
}

/**
 * plane_read() - @dim values of an array; zeros behind them
 * @dtype: KVK_F32 or KVK_BF16
 * @index: first element
 * @vec: dim and index are multiples of 4 and the array is aligned to 16 bytes
 */
KVK_DEV void plane_read(float (&x)[PLANE_GROUPS][4], u32 dtype, const void *src,
			size_t index, u32 dim, bool vec)
{
#pragma unroll
	for (u32 j = 0; j < PLANE_GROUPS; j++) {
		const u32 i = plane_at(j);

		x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.0f;
		if (vec && i < dim && dtype == KVK_F32) {
			float4 v = *(const float4 *)((const float *)src + index + i);

			x[j][0] = v.x, x[j][1] = v.y, x[j][2] = v.z, x[j][3] = v.w;
		} else if (vec && i < dim) {
			uint2 v = *(const uint2 *)((const u16 *)src + index + i);

			x[j][0] = kvk_bf16_to_f32((u16)v.x);
			x[j][1] = kvk_bf16_to_f32((u16)(v.x >> 16));
			x[j][2] = kvk_bf16_to_f32((u16)v.y);
			x[j][3] = kvk_bf16_to_f32((u16)(v.y >> 16));
		} else if (!vec) {
#pragma unroll
			for (u32 e = 0; e < 4; e++)
				if (i + e < dim)
					x[j][e] = dev_act_get(dtype, src, index + i + e);
		}
	}
}

/* Scale of the values; with KV_SCALE_TOKEN it is chosen here and stored by one lane. */
KVK_DEV float plane_scale(const struct kvk_pages &p, u8 *part, const struct dev_plane &pl,
			  u32 slot, const float (&x)[PLANE_GROUPS][4])
{
	u32 top = 0;
	u16 h;

	if (p.layout.scale_kind == KV_SCALE_STATIC)
		return p.scales[pl.scale_index];
#pragma unroll
	for (u32 j = 0; j < PLANE_GROUPS * 4; j++) {
		u32 a = kvk_f32_bits(x[j / 4][j % 4]) & 0x7fffffffu;

		a = a > 0x7f800000u ? 0 : a;
		top = a > top ? a : top;
	}
	h = kvk_fp8_token_scale(kvk_bits_f32(dev_warp_max(top)));
	if (threadIdx.x % 32 == 0)
		*(u16 *)(part + pl.scale_off + (size_t)slot * pl.scale_step) = h;
	return kvk_f16_to_f32(h);
}

/* Two codes, the first in the low byte; kvk_e4m3_encode() of both. */
KVK_DEV u32 plane_codes(float lo, float hi)
{
	if (kvk_is_nan(lo) || kvk_is_nan(hi))
		return kvk_e4m3_encode(lo) | (u32)kvk_e4m3_encode(hi) << 8;
	return arch_f32_e4m3(lo, hi);
}

/* e4m3 codes of one group. */
KVK_DEV void plane_put_e4m3(u8 *dst, const float (&x)[4], u32 nr,
			    const struct kvk_quant &q, bool vec, u32 *nr_nan)
{
	float v[4] = {x[0], x[1], x[2], x[3]};
	u32 word;

	kvk_quant_div(v, q);
	word = plane_codes(v[0], v[1]) | plane_codes(v[2], v[3]) << 16;
#pragma unroll
	for (u32 e = 0; e < 4; e++)
		*nr_nan += e < nr && kvk_e4m3_is_nan((u8)(word >> (8 * e)));
	if (vec) {
		*(u32 *)dst = word;
		return;
	}
	for (u32 e = 0; e < nr; e++)
		dst[e] = (u8)(word >> (8 * e));
}

/* BF16 or F32 values of one group. */
KVK_DEV void plane_put_plain(u8 *dst, const float (&x)[4], u32 nr, bool f32, bool vec,
			     u32 *nr_nan)
{
	u16 h[4];

#pragma unroll
	for (u32 e = 0; e < 4; e++) {
		*nr_nan += e < nr && kvk_is_nan(x[e]);
		h[e] = kvk_f32_to_bf16(x[e]);
	}
	if (vec && f32) {
		*(float4 *)dst = make_float4(x[0], x[1], x[2], x[3]);
		return;
	}
	if (vec) {
		*(uint2 *)dst =
			make_uint2(h[0] | (u32)h[1] << 16, h[2] | (u32)h[3] << 16);
		return;
	}
#pragma unroll
	for (u32 e = 0; e < 4; e++) {
		if (e < nr && f32)
			((float *)dst)[e] = x[e];
		else if (e < nr)
			((u16 *)dst)[e] = h[e];
	}
}

/**
 * plane_store() - one token's values of a plane into its slot, by all lanes of a warp
 * @p: pages
 * @part: the layer's part of the page
 * @vec: plane_dims_vec() and pages aligned to 16 bytes
 *
 * Return: number of NaN values stored, the same in all lanes.
 */
KVK_DEV u32 plane_store(const struct kvk_pages &p, u8 *part, const struct dev_plane &pl,
			u32 slot, bool vec, const float (&x)[PLANE_GROUPS][4])
{
	const u32 dtype = p.layout.dtype, elem = kv_dtype_bytes(dtype);
	u8 *dst = part + pl.off + (size_t)slot * pl.dim * elem;
	struct kvk_quant q = {};
	u32 nr_nan = 0;

	if (dtype == KV_DTYPE_E4M3)
		q = kvk_quant_make(plane_scale(p, part, pl, slot, x));
#pragma unroll
	for (u32 j = 0; j < PLANE_GROUPS; j++) {
		const u32 i = plane_at(j);
		const u32 nr = i >= pl.dim ? 0 : pl.dim - i < 4 ? pl.dim - i : 4;

		if (!nr)
			continue;
		if (dtype == KV_DTYPE_E4M3)
			plane_put_e4m3(dst + i, x[j], nr, q, vec, &nr_nan);
		else
			plane_put_plain(dst + (size_t)i * elem, x[j], nr,
					dtype == KV_DTYPE_F32, vec, &nr_nan);
	}
	return dev_warp_sum(nr_nan);
}

#endif /* KVK_PLANE_CUH */
