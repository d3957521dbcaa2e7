/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_prefill.cu - causal attention of chunks over their pages. Short chunks (drafts, the
 * last tokens of a prompt) go to the decode kernels, all others to attn_any.
 */
#include "kernels/attn_plan.cuh"

#include <errno.h>

/**
 * kvk_attn_prefill_cuda() - see struct kvk_attn_args; any q_len
 * Context: any thread; the verdicts were written earlier on the same stream.
 * Return: 0, -EINVAL for a shape that is not built, -EIO.
 */
int kvk_attn_prefill_cuda(const struct kvk_attn_args *a, kvk_stream stream)
{
	bool short_chunks = a->batch.q_len_max <= 4 &&
			    a->workspace_bytes >= kvk_attn_workspace_cuda(a);

	if (short_chunks && a->pages.layout.kind == KV_LAYOUT_MLA)
		return kvk_attn_mla_cuda(a, stream);
	if (short_chunks && a->pages.layout.kind == KV_LAYOUT_GQA)
		return kvk_attn_gqa_cuda(a, stream);
	return kvk_attn_any_cuda(a, stream);
}
