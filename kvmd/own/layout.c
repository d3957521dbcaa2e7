/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/layout.c - checking layouts, their fingerprint, and when two of them may not meet.
 *
 * Pure functions.
 */
#include "kvmd/own/layout.h"
#include <errno.h>
#include <math.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include "base/mutant.h"

static int refuse(struct kvd_refusal *why, const char *field, unsigned long long value,
		  const char *reason)
{
	snprintf(why->field, sizeof(why->field), "%s", field);
	snprintf(why->text, sizeof(why->text), "layout.%s=%llu: %s", field, value,
		 reason);
	return -EINVAL;
}

static int check_dtype(const struct kv_layout *l, bool test_layouts,
		       struct kvd_refusal *why)
{
	if (l->dtype != KV_DTYPE_BF16 && l->dtype != KV_DTYPE_E4M3 &&
	    l->dtype != KV_DTYPE_F32)
		return refuse(why, "dtype", l->dtype, "unknown dtype");
	if (l->dtype == KV_DTYPE_F32 && !test_layouts)
		return refuse(why, "dtype", l->dtype, "fp32 pages are for tests only");
	if (l->scale_kind > KV_SCALE_STATIC)
		return refuse(why, "scale_kind", l->scale_kind, "unknown scale kind");
	if (l->dtype != KV_DTYPE_E4M3 && l->scale_kind != KV_SCALE_NONE)
		return refuse(why, "scale_kind", l->scale_kind,
			      "this dtype has no scales");
	if (l->dtype == KV_DTYPE_E4M3 && l->scale_kind == KV_SCALE_NONE)
		return refuse(why, "scale_kind", l->scale_kind,
			      "e4m3 needs scales per token or static ones");
	return 0;
}

static int check_dims(const struct kv_layout *l, struct kvd_refusal *why)
{
	if (l->kind == KV_LAYOUT_MLA) {
		if (l->nr_kv_heads)
			return refuse(why, "nr_kv_heads", l->nr_kv_heads,
				      "must be 0 for MLA");
		if (l->head_dim)
			return refuse(why, "head_dim", l->head_dim, "must be 0 for MLA");
		if (l->latent_dim != 512)
			return refuse(why, "latent_dim", l->latent_dim, "must be 512");
		if (l->rope_dim != 64)
			return refuse(why, "rope_dim", l->rope_dim, "must be 64");
		return 0;
	}
	if (l->nr_kv_heads == 0 || l->nr_kv_heads > KV_KV_HEADS_MAX)
		return refuse(why, "nr_kv_heads", l->nr_kv_heads, "must be 1..128");
	if (l->head_dim != 64 && l->head_dim != 128)
		return refuse(why, "head_dim", l->head_dim, "must be 64 or 128");
	if (l->latent_dim)
		return refuse(why, "latent_dim", l->latent_dim, "must be 0 for GQA");
	if (l->rope_dim)
		return refuse(why, "rope_dim", l->rope_dim, "must be 0 for GQA");
	return 0;
}

static int check_scales(const struct kv_layout *l, const float *scales,
			struct kvd_refusal *why)
{
	u32 want = 0;

	if (l->scale_kind == KV_SCALE_STATIC)
		want = l->kind == KV_LAYOUT_MLA ? l->nr_layers
						: l->nr_layers * l->nr_kv_heads * 2;
	if (want > KV_SCALES_MAX)
		return refuse(why, "nr_scales", l->nr_scales,
			      "more scales than a layout may have");
	if (l->nr_scales != want)
		return refuse(why, "nr_scales", l->nr_scales,
			      "does not fit kind and dimensions");
	for (u32 i = 0; i < want; i++) {
		if (!isfinite(scales[i]) || !(scales[i] > 0))
			return refuse(why, "scales", i,
				      "this scale is not finite and positive");
	}
	return 0;
}

int kvd_layout_check(const struct kv_layout *layout, const float *scales,
		     bool test_layouts, struct kvd_refusal *ret_why)
{
	int r;

	if (layout->format_version != KV_LAYOUT_VERSION)
		return refuse(ret_why, "format_version", layout->format_version,
			      "this kvmd knows version 1");
	if (layout->kind != KV_LAYOUT_MLA && layout->kind != KV_LAYOUT_GQA)
		return refuse(ret_why, "kind", layout->kind, "unknown kind");
	r = check_dtype(layout, test_layouts, ret_why);
	if (r)
		return r;
	if (layout->page_tokens != KV_PAGE_TOKENS)
		return refuse(ret_why, "page_tokens", layout->page_tokens, "must be 64");
	if (layout->nr_layers == 0 || layout->nr_layers > KV_LAYERS_MAX)
		return refuse(ret_why, "nr_layers", layout->nr_layers, "must be 1..256");
	r = check_dims(layout, ret_why);
	if (r)
		return r;
	if (layout->plane_order)
		return refuse(ret_why, "plane_order", layout->plane_order, "must be 0");
	return check_scales(layout, scales, ret_why);
}

/*
 * Every field is written as {u32 length, bytes}: no two different layouts make the same
 * byte string, however their variable parts are cut (case O43).
 */
static void put(crypto_generichash_blake2b_state *st, const void *data, u32 bytes)
{
	u8 len[4] = {(u8)bytes, (u8)(bytes >> 8), (u8)(bytes >> 16), (u8)(bytes >> 24)};

	if (!KV_MUTANT(fingerprint_no_length))
		crypto_generichash_blake2b_update(st, len, sizeof(len));
	crypto_generichash_blake2b_update(st, data, bytes);
}

u64 kvd_layout_fingerprint(const struct kv_layout *l, const float *scales)
{
	crypto_generichash_blake2b_state st;
	u64 fingerprint = 0;
	u8 hash[16];

	crypto_generichash_blake2b_init(&st, NULL, 0, sizeof(hash));
	put(&st, &l->format_version, 4);
	put(&st, &l->kind, 4);
	put(&st, &l->dtype, 4);
	put(&st, &l->scale_kind, 4);
	put(&st, &l->page_tokens, 4);
	put(&st, &l->nr_layers, 4);
	put(&st, &l->nr_kv_heads, 4);
	put(&st, &l->head_dim, 4);
	put(&st, &l->latent_dim, 4);
	put(&st, &l->rope_dim, 4);
	put(&st, &l->plane_order, 4);
	put(&st, &l->nr_scales, 4);
	put(&st, &l->lora_id, 8);
	put(&st, l->model_id, KV_MODEL_ID_BYTES);
	put(&st, scales, l->nr_scales * (u32)sizeof(float));
	crypto_generichash_blake2b_final(&st, hash, sizeof(hash));
	for (u32 i = 0; i < 8; i++)
		fingerprint |= (u64)hash[i] << (8 * i);
	return fingerprint;
}

/*
 * Two layouts compete if an engine that holds the one would take itself for compatible
 * with the other: same model, LoRA, kind, dtype and scale kind. BF16 beside FP8, or
 * per-token beside static scales, are different caches of one model and simply other
 * pools.
 */
int kvd_layout_differs(const struct kv_layout *have, const float *have_scales,
		       const struct kv_layout *want, const float *want_scales,
		       struct kvd_refusal *ret_why)
{
	static const char other[] = "differs from the pool that is in use for this model";

	if (memcmp(have->model_id, want->model_id, KV_MODEL_ID_BYTES) ||
	    have->lora_id != want->lora_id || have->kind != want->kind ||
	    have->dtype != want->dtype || have->scale_kind != want->scale_kind)
		return 0;
	if (have->format_version != want->format_version)
		return refuse(ret_why, "format_version", want->format_version, other);
	if (have->page_tokens != want->page_tokens)
		return refuse(ret_why, "page_tokens", want->page_tokens, other);
	if (have->nr_layers != want->nr_layers)
		return refuse(ret_why, "nr_layers", want->nr_layers, other);
	if (have->nr_kv_heads != want->nr_kv_heads)
		return refuse(ret_why, "nr_kv_heads", want->nr_kv_heads, other);
	if (have->head_dim != want->head_dim)
		return refuse(ret_why, "head_dim", want->head_dim, other);
	if (have->latent_dim != want->latent_dim)
		return refuse(ret_why, "latent_dim", want->latent_dim, other);
	if (have->rope_dim != want->rope_dim)
		return refuse(ret_why, "rope_dim", want->rope_dim, other);
	if (have->plane_order != want->plane_order)
		return refuse(ret_why, "plane_order", want->plane_order, other);
	if (have->nr_scales != want->nr_scales)
		return refuse(ret_why, "nr_scales", want->nr_scales, other);
	for (u32 i = 0; i < have->nr_scales; i++) {
		if (memcmp(&have_scales[i], &want_scales[i], sizeof(float)))
			return refuse(
				ret_why, "scales", i,
				"this scale differs from the pool that is in use for this model");
	}
	return 0;
}
