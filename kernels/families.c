/* SPDX-License-Identifier: Apache-2.0 */
/*
 * families.c - every hook of struct kvk_ops, and whether it touches page bytes.
 *
 * A test walks this table (kernels.h); a family that reads or writes pages and is not
 * marked here cannot get past it, because the test also compares the list with struct
 * kvk_ops. Constant.
 */
#include "base/util.h"
#include "kernels.h"

#define FAMILY(hook, args, batch, flags)                                     \
	{                                                                    \
		.name = #hook, .ops_offset = offsetof(struct kvk_ops, hook), \
		.args_bytes = sizeof(struct args), .batch_offset = (batch),  \
		.pages = (flags)                                             \
	}
#define PAGES(hook, args, batch, flags) \
	FAMILY(hook, args, offsetof(struct args, batch), flags)
#define PLAIN(hook, args) FAMILY(hook, args, 0, 0)

const struct kvk_family kvk_families[] = {
	PLAIN(tag_check, kvk_tag_check_args), /* tags and rows, no page bytes */
	PAGES(append, kvk_append_args, batch, KVK_WRITES_PAGES),
	PAGES(attn_mla, kvk_attn_args, batch, KVK_READS_PAGES),
	PAGES(attn_gqa, kvk_attn_args, batch, KVK_READS_PAGES),
	PAGES(attn_prefill, kvk_attn_args, batch, KVK_READS_PAGES),
	PLAIN(moe_route, kvk_moe_route_args),
	PLAIN(moe_int4, kvk_moe_args),
	PLAIN(moe_fp8, kvk_moe_args),
	PLAIN(moe_bf16, kvk_moe_args),
	PLAIN(linear, kvk_linear_args),
	PLAIN(norm, kvk_norm_args),
	PLAIN(rope, kvk_rope_args),
	FAMILY(norm_rope_append, kvk_norm_rope_append_args,
	       offsetof(struct kvk_norm_rope_append_args, append.batch),
	       KVK_WRITES_PAGES),
	PLAIN(silu, kvk_silu_args),
	PLAIN(sample, kvk_sample_args),
	PAGES(page_move, kvk_move_args, src_batch, KVK_READS_PAGES | KVK_WRITES_PAGES),
};

const size_t kvk_nr_families = KV_ARRAY_SIZE(kvk_families);
