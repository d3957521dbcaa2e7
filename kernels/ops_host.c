/* SPDX-License-Identifier: Apache-2.0 */
/* ops_host.c - the table of the plain C references: the host backend. Constant; any
 * thread. */
#include "ref.h"

static const struct kvk_ops host_ops = {
	.name = "host",
	.tag_check = kvk_tag_check_ref,
	.append = kvk_append_ref,
	.attn_mla = kvk_attn_mla_ref,
	.attn_gqa = kvk_attn_gqa_ref,
	.attn_prefill = kvk_attn_prefill_ref,
	.moe_route = kvk_moe_route_ref,
	.moe_int4 = kvk_moe_int4_ref,
	.moe_fp8 = kvk_moe_fp8_ref,
	.moe_bf16 = kvk_moe_bf16_ref,
	.linear = kvk_linear_ref,
	.norm = kvk_norm_ref,
	.rope = kvk_rope_ref,
	.norm_rope_append = kvk_norm_rope_append_ref,
	.silu = kvk_silu_ref,
	.sample = kvk_sample_ref,
	.page_move = kvk_page_move_ref,
	.attn_workspace = kvk_attn_workspace_ref,
	.moe_workspace = kvk_moe_workspace_ref,
};

const struct kvk_ops *kvk_host_ops(void)
{
	return &host_ops;
}
