/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_cuda.h - CUDA launchers of the families that touch pages; hooks of struct kvk_ops.
 *
 * All: queue on the stream and return; no allocation, no wait; may be captured in a
 * graph. They return 0, -EINVAL for a shape that is not built or a workspace that is too
 * small, -EIO if the launch failed.
 *
 * The decode kernels split a step's pages evenly over the SMs by a schedule in the
 * workspace, which also says where each SM's first pages are and whether they may be read. It
 * is the same for all layers of a step, so those after the first reuse it (KVK_ATTN_PLAN).
 */
#ifndef KVK_ATTN_CUDA_H
#define KVK_ATTN_CUDA_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

int kvk_tag_check_cuda(const struct kvk_tag_check_args *a, kvk_stream stream);
int kvk_append_cuda(const struct kvk_append_args *a, kvk_stream stream);
int kvk_norm_rope_append_cuda(const struct kvk_norm_rope_append_args *a,
			      kvk_stream stream);
int kvk_attn_mla_cuda(const struct kvk_attn_args *a, kvk_stream stream);
int kvk_attn_gqa_cuda(const struct kvk_attn_args *a, kvk_stream stream);
int kvk_attn_prefill_cuda(const struct kvk_attn_args *a, kvk_stream stream);
bool kvk_attn_prefill_fast_cuda(const struct kvk_attn_args *a);
int kvk_page_move_cuda(const struct kvk_move_args *a, kvk_stream stream);
size_t kvk_attn_workspace_cuda(const struct kvk_attn_args *a);

/* Any shape, slowly: one CTA per query row, f32. What the fast kernels do not build. */
int kvk_attn_any_cuda(const struct kvk_attn_args *a, kvk_stream stream);

/* Bench only: stream the pages through the same ring and do no arithmetic. */
#define KVK_ATTN_LOADS	      0x40000000u
/* Tests only: some CTAs of a GQA step of few units begin 150 us late. */
#define KVK_ATTN_LATE	      0x20000000u
/* Bench and tests: MLA with 17 to 64 query rows, no clusters of two CTAs. */
#define KVK_ATTN_NO_PAIRS     0x10000000u
#define KVK_ATTN_HBS(n)	      ((uint32_t)(n) << 24) /* kv heads of a tile, 1, 2, 4 or 8 */

#define KVK_ATTN_FLIGHT(n)    ((uint32_t)(n) << 16) /* most pieces in flight, 1..15 */

/*
 * Bench only, kvk_attn_args.reserved: the workspace is that of @nr steps with tables of their own and
 * the same lengths, and this call is of step @i. They share all but the schedule's entries.
 */
#define KVK_ATTN_STEPS(nr, i) ((uint32_t)(nr) << 16 | (uint32_t)(i))

#ifdef __cplusplus
}
#endif
#endif /* KVK_ATTN_CUDA_H */
