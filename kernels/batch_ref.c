/* SPDX-License-Identifier: Apache-2.0 */
/*
 * batch_ref.c - who may touch pages, and where the bytes of a token lie.
 *
 * The verdict rule (design 5, P5) and the planes of a page, shared by append, attention
 * and page_move. No state; any thread.
 */
#include <string.h>
#include "ref.h"

int kvk_batch_check(const struct kvk_batch *b, bool need_tokens)
{
	if (!b->nr_requests)
		return b->nr_tokens ? -EINVAL : 0;
	if (!b->rows || !b->row_start || !b->verdicts || !b->step)
		return -EINVAL;
	if (need_tokens && (!b->lengths || !b->q_start))
		return -EINVAL;
	for (u32 r = 0; r < b->nr_requests; r++) {
		if (b->row_start[r + 1] < b->row_start[r])
			return -EINVAL;
		if (need_tokens && b->q_start[r + 1] < b->q_start[r])
			return -EINVAL;
	}
	if (need_tokens && b->q_start[b->nr_requests] != b->nr_tokens)
		return -EINVAL;
	return 0;
}

static bool scales_ok(const struct kvk_pages *p)
{
	const struct kv_layout *l = &p->layout;

	switch (l->scale_kind) {
	case KV_SCALE_NONE:
		return l->dtype == KV_DTYPE_BF16 || l->dtype == KV_DTYPE_F32;
	case KV_SCALE_TOKEN:
		return l->dtype == KV_DTYPE_E4M3;
	case KV_SCALE_STATIC:
		return l->dtype == KV_DTYPE_E4M3 && p->scales &&
		       l->nr_scales == l->nr_layers * kvk_nr_planes(l) /
					       (l->kind == KV_LAYOUT_MLA ? 2 : 1);
	default:
		return false;
	}
}

int kvk_pages_check(const struct kvk_pages *p)
{
	const struct kv_layout *l = &p->layout;

	if (!p->base || l->page_tokens != KV_PAGE_TOKENS || !l->nr_layers ||
	    !scales_ok(p))
		return -EINVAL;
	if (p->geometry.stride_bytes < kv_page_bytes(l) || p->geometry.shift > 31)
		return -EINVAL;
	if (l->kind == KV_LAYOUT_MLA)
		return l->latent_dim && l->rope_dim ? 0 : -EINVAL;
	if (l->kind == KV_LAYOUT_GQA)
		return l->nr_kv_heads && l->head_dim ? 0 : -EINVAL;
	return -EINVAL;
}

bool kvk_request_ok(const struct kvk_batch *b, const struct kvk_pages *p, u32 r)
{
	u32 nr_rows = kvk_nr_rows(b, r);

	if (!KV_MUTANT(no_verdict) && !kv_verdict_ok(b->verdicts[r], *b->step, nr_rows))
		return false;
	if (b->lengths && b->lengths[r] > (u64)nr_rows * KV_PAGE_TOKENS)
		return false;
	for (u32 i = b->row_start[r]; i < b->row_start[r + 1]; i++)
		if (b->rows[i].pfn >= p->geometry.nr_pages && !KV_MUTANT(row_range))
			return false;
	return true;
}

struct kvk_plane kvk_plane_get(const struct kv_layout *l, u32 layer, u32 index)
{
	u32 head = index / 2, second = index % 2;
	struct kvk_plane pl;

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

/* Scale of the values @x; with KV_SCALE_TOKEN it is chosen here and stored. */
static float store_scale(const struct kvk_pages *p, u8 *part, const struct kvk_plane *pl,
			 u32 slot, const float *x)
{
	u32 top = 0;
	u16 h;

	if (p->layout.scale_kind == KV_SCALE_STATIC)
		return p->scales[pl->scale_index];
	for (u32 i = 0; i < pl->dim; i++) {
		u32 a = kvk_f32_bits(x[i]) & 0x7fffffffu;

		a = a > 0x7f800000u ? 0 : a;
		top = a > top ? a : top;
	}
	h = kvk_fp8_token_scale(kvk_bits_f32(top));
	memcpy(part + pl->scale_off + (size_t)slot * pl->scale_step, &h, sizeof(h));
	return kvk_f16_to_f32(h);
}

u32 kvk_plane_store(const struct kvk_pages *p, u8 *part, const struct kvk_plane *pl,
		    u32 slot, const float *x)
{
	u32 dtype = p->layout.dtype, nr_nan = 0;
	u8 *dst = part + pl->off + (size_t)slot * pl->dim * kv_dtype_bytes(dtype);

	if (dtype == KV_DTYPE_E4M3) {
		float scale = store_scale(p, part, pl, slot, x);

		for (u32 i = 0; i < pl->dim; i++) {
			dst[i] = kvk_e4m3_encode(kvk_div_rn(x[i], scale));
			nr_nan += kvk_e4m3_is_nan(dst[i]);
		}
		return nr_nan;
	}
	for (u32 i = 0; i < pl->dim; i++)
		nr_nan += kvk_is_nan(x[i]);
	kvk_act_store(dtype == KV_DTYPE_F32 ? KVK_F32 : KVK_BF16, x, dst, 0, pl->dim);
	return nr_nan;
}

void kvk_plane_load(const struct kvk_simd *simd, const struct kvk_pages *p,
		    const u8 *part, const struct kvk_plane *pl, u32 slot, float *dst)
{
	u32 dtype = p->layout.dtype;
	const u8 *src = part + pl->off + (size_t)slot * pl->dim * kv_dtype_bytes(dtype);
	float scale;

	switch (dtype) {
	case KV_DTYPE_E4M3:
		if (p->layout.scale_kind == KV_SCALE_STATIC)
			scale = p->scales[pl->scale_index];
		else
			scale = kvk_f16_to_f32(kvk_load16(part + pl->scale_off +
							  (size_t)slot * pl->scale_step));
		simd->cvt_e4m3(src, scale, dst, pl->dim);
		break;
	case KV_DTYPE_BF16:
		simd->cvt_bf16((const u16 *)(const void *)src, dst, pl->dim);
		break;
	default:
		memcpy(dst, src, pl->dim * sizeof(float));
	}
}
