/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/layout.h - is a layout one we can keep, and what is its fingerprint?
 */
#ifndef KVD_LAYOUT_H
#define KVD_LAYOUT_H

#include "kv/layout.h"
#include "kvmd/own/session.h"

/**
 * kvd_layout_check() - validate every field
 * @scales: layout->nr_scales values: finite and > 0
 * @test_layouts: KV_DTYPE_F32 is allowed
 * @ret_why: names the first bad field and its value
 *
 * Return: 0; -EINVAL.
 */
int kvd_layout_check(const struct kv_layout *layout, const float *scales,
		     bool test_layouts, struct kvd_refusal *ret_why);

/** kvd_layout_fingerprint() - as struct kv_layout defines it */
u64 kvd_layout_fingerprint(const struct kv_layout *layout, const float *scales);

/**
 * kvd_layout_differs() - first field in which two layouts of one model differ
 * @field: [32]
 *
 * Return: 0: they do not compete (another model, LoRA, kind, dtype or scale kind) or are
 *	equal; -EINVAL: @ret_why names the field.
 */
int kvd_layout_differs(const struct kv_layout *have, const float *have_scales,
		       const struct kv_layout *want, const float *want_scales,
		       struct kvd_refusal *ret_why);

#endif /* KVD_LAYOUT_H */
