/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.h - the kernel families, their arguments and the ops tables.
 *
 * One family = x.h (arguments), x_ref.c (plain C: the truth and the host backend), x.cu. A
 * launcher takes a stream, never allocates, never waits, can be captured in a CUDA graph,
 * checks shapes and returns 0 or -errno. With the host ops the stream is ignored and the call
 * returns when the work is done.
 *
 * Every family that touches page bytes embeds struct kvk_batch, and with it the verdicts: it
 * reads a request's verdict before its first access to a page. kvk_families[] says which; a
 * test walks it and fails for a page-touching family that ignores a failed verdict.
 *
 * Activations are act_dtype: F32 (host engine) or BF16 (GPU engine). Shapes are written
 * outermost first.
 */
#ifndef KVK_KERNELS_H
#define KVK_KERNELS_H

#include <stdbool.h>
#include "kv/layout.h"
#include "kv/tag.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void *kvk_stream; /* cudaStream_t, or NULL */

enum kvk_dtype { KVK_F32 = 1, KVK_BF16 = 2, KVK_F16 = 3, KVK_E4M3 = 4, KVK_INT4 = 5 };

/**
 * struct kvk_pages - where a pool's bytes are and what they mean
 * @base: start of the reserved range (CPU or device address)
 * @geometry: kv_page_offset()
 * @layout: host memory; read by the launcher
 * @scales: layout.nr_scales static scales, in the kernels' memory; NULL without
 */
struct kvk_pages {
	void *base;
	struct kv_geometry geometry;
	struct kv_layout layout;
	const float *scales;
};

/**
 * struct kvk_batch - the requests of a step
 * @rows: [row_start[nr_requests]] page tables, one after the other
 * @row_start: [nr_requests + 1]
 * @lengths: [nr_requests] tokens in the pages after this step's append
 * @q_start: [nr_requests + 1] a request's tokens in the step's flat token arrays; the tokens
 *	are the last q_start[r + 1] - q_start[r] of its lengths[r]
 * @verdicts: [nr_requests], written by tag_check
 * @step: the step's number, in the argument block
 * @nr_requests: requests
 * @nr_tokens: q_start[nr_requests]
 * @q_len_max: most tokens of one request
 *
 * All arrays are in the kernels' memory. A request passes if kv_verdict_ok(verdicts[r], *step,
 * row_start[r + 1] - row_start[r]); of others no page is touched and the output is NaN.
 */
struct kvk_batch {
	const struct kv_row *rows;
	const uint32_t *row_start;
	const uint32_t *lengths;
	const uint32_t *q_start;
	const struct kv_verdict *verdicts;
	const uint64_t *step;
	uint32_t nr_requests;
	uint32_t nr_tokens;
	uint32_t q_len_max;
};

/* ------------------------------------------------------------------------------ tag_check */

/**
 * struct kvk_tag_check_args - mirror update (P3) and batch check (P4)
 * @block: struct kv_step_block and entries
 * @mirror: struct kv_mirror and nr_pages tags; words are applied with max()
 * @batch: rows, row_start, lengths, nr_requests are used
 * @nonces: [nr_requests]
 * @page_tokens: tokens of a page
 * @ret_verdicts: [nr_requests]; batch.verdicts of the other families
 */
struct kvk_tag_check_args {
	const struct kv_step_block *block;
	struct kv_mirror *mirror;
	struct kvk_batch batch;
	const uint64_t *nonces;
	uint32_t page_tokens;
	struct kv_verdict *ret_verdicts;
};

/* --------------------------------------------------------------------------------- append */

/**
 * struct kvk_append_args - quantise this step's K/V into page slots
 * @pages, @batch: token t of request r goes to position lengths[r] - q_len(r) + t, through a
 *	WRITE row only
 * @layer: layer of the page
 * @latent: MLA [nr_tokens][latent_dim]
 * @rope: MLA [nr_tokens][rope_dim], rotated
 * @k, @v: GQA [nr_tokens][nr_kv_heads][head_dim], K rotated
 * @src_dtype: KVK_F32 or KVK_BF16
 * @nan_count: number of NaN values stored is added here; may be NULL
 *
 * e4m3: round to nearest even, saturate at 448, NaN kept. Token scale = amax / 448 rounded up
 * to fp16 (1 when amax is 0); value = e4m3(x / scale).
 */
struct kvk_append_args {
	struct kvk_pages pages;
	struct kvk_batch batch;
	uint32_t layer;
	uint32_t src_dtype;
	const void *latent;
	const void *rope;
	const void *k;
	const void *v;
	uint64_t *nan_count;
};

/* ------------------------------------------------------------------------------ attention */

/**
 * struct kvk_attn_args - attention of the step's tokens over their pages
 * @pages, @batch: token t of request r sees positions 0 .. lengths[r] - q_len(r) + t
 * @layer: layer of the page
 * @nr_q_heads: MLA 1..128; GQA nr_kv_heads * (1..16)
 * @sm_scale: multiplies scores
 * @q: MLA [nr_tokens][nr_q_heads][latent_dim + rope_dim] (absorbed latent query, then rope);
 *	GQA [nr_tokens][nr_q_heads][head_dim]; on a GPU used as bf16, on FP8 pages as f16
 * @out: MLA [nr_tokens][nr_q_heads][latent_dim]; GQA as q
 * @act_dtype: of q and out
 * @flags: KVK_ATTN_*
 * @workspace: kvk_attn_workspace() bytes in the kernels' memory; the reference needs none
 *
 * attn_mla and attn_gqa: decode, q_len_max <= 4. attn_prefill: either kind, any q_len.
 * A token's result does not depend on other requests, page placement or chunking.
 */
struct kvk_attn_args {
	struct kvk_pages pages;
	struct kvk_batch batch;
	uint32_t layer;
	uint32_t nr_q_heads;
	float sm_scale;
	uint32_t act_dtype;
	uint32_t flags;
	uint32_t reserved;
	const void *q;
	void *out;
	void *workspace;
	size_t workspace_bytes;
};

/*
 * MLA, more than 16 query rows. BF16 pages: P in 8 bits, error <= 2.1e-3, of a row alone 4e-3. FP8
 * pages: P and the latent part of Q in e4m3, the latter with a scale a row; error <= 8e-2 where
 * scores scatter by less than 2.
 */
#define KVK_ATTN_FAST 0x01u
#define KVK_ATTN_PLAN \
	0x02u /* the schedule in workspace is this step's already (layers > 0) */

/* ------------------------------------------------------------------------------------ MoE */

/**
 * struct kvk_moe_route_args - sigmoid router with bias-corrected choice
 * @logits: [nr_tokens][nr_experts] f32
 * @bias: [nr_experts] f32; chooses, does not weigh; may be NULL
 * @ret_ids: [nr_tokens][top_k]; ties go to the smaller id
 * @ret_weights: [nr_tokens][top_k] f32
 * @nr_groups, @top_groups: DeepSeek group limit: a group's score is the sum of its two best
 *	biased scores; 1, 1 = off
 * @norm: weights divided by (their sum + 1e-20)
 * @scale: routed_scaling_factor
 *
 * A token whose logits hold NaN gets ids 0..top_k-1 and NaN weights: ids are always valid.
 */
struct kvk_moe_route_args {
	const float *logits;
	const float *bias;
	uint32_t *ret_ids;
	float *ret_weights;
	uint32_t nr_tokens;
	uint32_t nr_experts;
	uint32_t top_k;
	uint32_t nr_groups;
	uint32_t top_groups;
	bool norm;
	float scale;
};

enum kvk_w_order {
	KVK_ORDER_STANDARD = 0, /* as the checkpoint has it */
	KVK_ORDER_PACKED = 1,	/* kvk_moe_int4_repack(): the GPU kernel's own */
};

/**
 * struct kvk_experts - weights of a layer's routed experts, one dtype
 * @dtype: KVK_F32, KVK_BF16, KVK_E4M3 (block scales) or KVK_INT4
 * @w13: [nr_experts][2][inter][hidden]: gate rows, then up rows
 * @w2: [nr_experts][hidden][inter]
 * @s13: INT4 [nr_experts][2][inter][hidden / group]; E4M3 f32
 *	[nr_experts][2][ceil(inter / 128)][ceil(hidden / 128)]
 * @s2: INT4 [nr_experts][hidden][inter / group]; E4M3 f32
 *	[nr_experts][ceil(hidden / 128)][ceil(inter / 128)]
 * @group: INT4: 32, 64 or 128; divides hidden and inter
 * @scale_dtype: INT4: KVK_BF16 or KVK_F16
 * @order: enum kvk_w_order
 *
 * INT4 is compressed-tensors pack-quantized: along the last axis eight nibbles per int32, lowest
 * nibble first, nibble = q + 8.
 */
struct kvk_experts {
	uint32_t dtype;
	uint32_t group;
	uint32_t scale_dtype;
	uint32_t order;
	uint32_t nr_experts;
	uint32_t hidden;
	uint32_t inter;
	uint32_t reserved;
	const void *w13;
	const void *w2;
	const void *s13;
	const void *s2;
};

/**
 * struct kvk_moe_args - routed experts: y[t] = sum_k weight * W2(silu(W1 x) * W3 x)
 * @x: [nr_tokens][hidden] of act_dtype
 * @y: [nr_tokens][hidden] of act_dtype, at a 16-byte boundary
 * @ids, @weights: of moe_route
 * @accumulate: y += instead of y =
 * @y_f32: y is f32 whatever act_dtype is: what a shared expert's linear adds (its @add), so that a
 *	layer's output is rounded once
 * @workspace: kvk_moe_workspace() bytes
 *
 * moe_fp8 quantises x and the inner activation to e4m3 per token per 128 values (scale =
 * amax / 448). The sum over k runs in slot order: deterministic.
 */
struct kvk_moe_args {
	struct kvk_experts experts;
	const void *x;
	void *y;
	const uint32_t *ids;
	const float *weights;
	uint32_t nr_tokens;
	uint32_t top_k;
	uint32_t act_dtype;
	bool accumulate;
	bool y_f32;
	void *workspace;
	size_t workspace_bytes;
};

static inline uint32_t kvk_moe_y_dtype(const struct kvk_moe_args *a)
{
	return a->y_f32 ? (uint32_t)KVK_F32 : a->act_dtype;
}

/* --------------------------------------------------------------------- linear, norm, rope */

/**
 * struct kvk_weight - one matrix [rows][cols], y = x W^T
 * @dtype: KVK_F32, KVK_BF16, KVK_E4M3 or KVK_INT4
 * @data: [rows][cols]; INT4 packed as in struct kvk_experts
 * @scales: E4M3: f32 [ceil(rows / 128)][ceil(cols / 128)]; INT4: [rows][cols / group]
 */
struct kvk_weight {
	uint32_t dtype;
	uint32_t rows;
	uint32_t cols;
	uint32_t group;
	uint32_t scale_dtype;
	uint32_t reserved;
	const void *data;
	const void *scales;
};

/**
 * struct kvk_linear_args - y[nr_tokens][rows] = x[nr_tokens][cols] W^T + bias + add
 * @bias: [rows] in bias_dtype F32, or NULL
 * @x_stride, @y_stride: elements between tokens; 0 = dense
 * @x_batch, @y_batch: elements between a token's vectors of a batch; 0 = cols, rows
 * @x_dtype, @y_dtype: KVK_F32 or KVK_BF16
 * @add: NULL, or f32 with the strides of y, also where y is BF16: added before y is rounded. May be
 *	y itself where that is F32
 * @nr_batch: 1, or a batch of matrices: W is [nr_batch][rows][cols], x
 *	[nr_tokens][nr_batch][cols], y [nr_tokens][nr_batch][rows] (MLA absorption, per head)
 *
 * E4M3 weights quantise x to e4m3 per token per 128 first, as FP8 GPU kernels do. The dot
 * product's order depends on cols alone: bit-equal for any batch.
 */
struct kvk_linear_args {
	struct kvk_weight w;
	const void *x;
	void *y;
	const float *bias;
	uint32_t nr_tokens;
	uint32_t x_stride;
	uint32_t y_stride;
	uint32_t x_dtype;
	uint32_t y_dtype;
	uint32_t nr_batch;
	uint32_t x_batch;
	uint32_t y_batch;
	const float *add;
};

static inline uint64_t kvk_linear_x_batch(const struct kvk_linear_args *a)
{
	return a->x_batch ? a->x_batch : a->w.cols;
}

static inline uint64_t kvk_linear_y_batch(const struct kvk_linear_args *a)
{
	return a->y_batch ? a->y_batch : a->w.rows;
}

static inline uint64_t kvk_linear_x_stride(const struct kvk_linear_args *a)
{
	return a->x_stride ? a->x_stride : a->nr_batch * kvk_linear_x_batch(a);
}

static inline uint64_t kvk_linear_y_stride(const struct kvk_linear_args *a)
{
	return a->y_stride ? a->y_stride : a->nr_batch * kvk_linear_y_batch(a);
}

/* No vector overlaps the next one, of the batch or of the next token. */
static inline bool kvk_linear_strides_ok(const struct kvk_linear_args *a)
{
	const uint64_t xb = kvk_linear_x_batch(a), yb = kvk_linear_y_batch(a);

	return a->nr_batch && xb >= a->w.cols && yb >= a->w.rows &&
	       kvk_linear_x_stride(a) >= (a->nr_batch - 1) * xb + a->w.cols &&
	       kvk_linear_y_stride(a) >= (a->nr_batch - 1) * yb + a->w.rows;
}

/**
 * struct kvk_norm_args - y = rms(x [+ residual]) * weight
 * @x: [nr_rows][cols], stride x_stride elements
 * @residual: NULL, or [nr_rows][cols]: residual += x first, then the norm reads residual
 * @weight: f32 [cols]
 * @y: [nr_rows][cols], stride y_stride; may be x
 */
struct kvk_norm_args {
	const void *x;
	void *residual;
	const float *weight;
	void *y;
	float eps;
	uint32_t nr_rows;
	uint32_t cols;
	uint32_t x_stride;
	uint32_t y_stride;
	uint32_t act_dtype;
};

/**
 * struct kvk_rope_args - rotate the first rope_dim values of each head
 * @x: [nr_tokens][nr_heads][head_stride], token stride token_stride elements
 * @offset: first rotated element in a head
 * @y: where they go: head strides, token strides and offset of its own; NULL: where they were
 * @positions: [nr_tokens]
 * @cos_sin: f32 [max_position][rope_dim]: rope_dim / 2 cosines, then sines (YaRN's factor in)
 * @interleaved: pairs (2i, 2i+1) in, halves out (DeepSeek); else halves in, halves out
 */
struct kvk_rope_args {
	void *x;
	const uint32_t *positions;
	const float *cos_sin;
	uint32_t nr_tokens;
	uint32_t nr_heads;
	uint32_t head_stride;
	uint32_t token_stride;
	uint32_t offset;
	uint32_t rope_dim;
	uint32_t act_dtype;
	bool interleaved;
	void *y;
	uint32_t y_head_stride;
	uint32_t y_token_stride;
	uint32_t y_offset;
};

/* Do a place's heads and tokens lie apart? */
static inline bool kvk_rope_place_ok(const struct kvk_rope_args *a, uint32_t head_stride,
				     uint32_t token_stride, uint32_t offset)
{
	if (a->nr_heads > 1 && (uint64_t)offset + a->rope_dim > head_stride)
		return false;
	return a->nr_tokens <= 1 ||
	       (uint64_t)(a->nr_heads - 1) * head_stride + offset + a->rope_dim <=
		       token_stride;
}

static inline bool kvk_rope_places_ok(const struct kvk_rope_args *a)
{
	return kvk_rope_place_ok(a, a->head_stride, a->token_stride, a->offset) &&
	       (!a->y ||
		kvk_rope_place_ok(a, a->y_head_stride, a->y_token_stride, a->y_offset));
}

/**
 * struct kvk_norm_rope_append_args - query and key of a step from their projections to where
 *	attention reads them
 * @q_norm, @k_norm: weight NULL: this model has none
 * @q_rope, @k_rope: over what the norms wrote
 * @append: of what k_norm and k_rope wrote
 *
 * The five calls one after the other, bit by bit, in one kernel for the shapes models have. So
 * what k_norm and k_rope write is room: it may hold anything afterwards but with the host table,
 * which leaves what the calls leave. Failed requests: their pages are not touched (append), their
 * queries are as those of others.
 */
struct kvk_norm_rope_append_args {
	struct kvk_norm_args q_norm;
	struct kvk_norm_args k_norm;
	struct kvk_rope_args q_rope;
	struct kvk_rope_args k_rope;
	struct kvk_append_args append;
};

/** struct kvk_silu_args - y[i][j] = silu(gate[i][j]) * up[i][j]; gate and up lie side by side:
 * gu [nr_tokens][2][inter] */
struct kvk_silu_args {
	const void *gu;
	void *y;
	uint32_t nr_tokens;
	uint32_t inter;
	uint32_t act_dtype;
};

/**
 * struct kvk_sample_args - next token of each request
 * @logits: [nr_rows][vocab] f32
 * @temperature: [nr_rows]; 0 = greedy, ties to the smaller id
 * @top_p: [nr_rows]; 1 = off
 * @seeds: [nr_rows] one random u64 per token: the draw is a function of logits and seed
 * @ret_ids: [nr_rows]; a row with NaN gives id 0: always a valid id
 * @ret_logprob: [nr_rows] log-probability (temperature 1) of the chosen id; may be NULL
 */
struct kvk_sample_args {
	const float *logits;
	const float *temperature;
	const float *top_p;
	const uint64_t *seeds;
	uint32_t *ret_ids;
	float *ret_logprob;
	uint32_t nr_rows;
	uint32_t vocab;
};

/* ------------------------------------------------------------------------------ page_move */

enum kvk_move_op {
	KVK_MOVE_ZERO = 1,    /* zero dst pages (DIRTY grants) */
	KVK_MOVE_COPY = 2,    /* fork: src page -> dst page of one pool */
	KVK_MOVE_GATHER = 3,  /* pages -> dense buffer, kv_page_bytes() each */
	KVK_MOVE_SCATTER = 4, /* dense buffer -> pages */
	KVK_MOVE_CONVERT = 5, /* BF16 page -> FP8 page of the sister layout */
	KVK_MOVE_CRC = 6,     /* CRC-32C of src pages */
};

/**
 * struct kvk_move_args - whole pages: zero, fork copy, transfer, conversion, digest
 * @op: enum kvk_move_op
 * @src, @src_batch: pages read, as rows; one request (nr_requests 1) or many, row i of all rows
 *	is page i of the move
 * @dst, @dst_batch: pages written, WRITE rows only
 * @buf: GATHER, SCATTER: [nr rows][kv_page_bytes()]
 * @ret_crc: CRC: [nr rows] u32
 * @nr_tokens: COPY, CONVERT: [rows] tokens of the page that hold data; NULL = all. The tail of
 *	dst becomes zero
 */
struct kvk_move_args {
	uint32_t op;
	uint32_t reserved;
	struct kvk_pages src;
	struct kvk_pages dst;
	struct kvk_batch src_batch;
	struct kvk_batch dst_batch;
	const uint32_t *nr_tokens;
	void *buf;
	uint32_t *ret_crc;
};

/* -------------------------------------------------------------------------------- tables */

/**
 * struct kvk_ops - one implementation of every family
 *
 * All hooks are there; kvk_host_ops() and kvk_cuda_ops() return one each. Common results: 0,
 * -EINVAL a shape that is not built, -EIO the launch failed.
 */
struct kvk_ops {
	const char *name; /* "host", "cuda" */
	int (*tag_check)(const struct kvk_tag_check_args *a, kvk_stream stream);
	int (*append)(const struct kvk_append_args *a, kvk_stream stream);
	int (*attn_mla)(const struct kvk_attn_args *a, kvk_stream stream);
	int (*attn_gqa)(const struct kvk_attn_args *a, kvk_stream stream);
	int (*attn_prefill)(const struct kvk_attn_args *a, kvk_stream stream);
	int (*moe_route)(const struct kvk_moe_route_args *a, kvk_stream stream);
	int (*moe_int4)(const struct kvk_moe_args *a, kvk_stream stream);
	int (*moe_fp8)(const struct kvk_moe_args *a, kvk_stream stream);
	int (*moe_bf16)(const struct kvk_moe_args *a,
			kvk_stream stream); /* BF16 and F32 */
	int (*linear)(const struct kvk_linear_args *a, kvk_stream stream);
	int (*norm)(const struct kvk_norm_args *a, kvk_stream stream);
	int (*rope)(const struct kvk_rope_args *a, kvk_stream stream);
	int (*norm_rope_append)(const struct kvk_norm_rope_append_args *a,
				kvk_stream stream);
	int (*silu)(const struct kvk_silu_args *a, kvk_stream stream);
	int (*sample)(const struct kvk_sample_args *a, kvk_stream stream);
	int (*page_move)(const struct kvk_move_args *a, kvk_stream stream);
	size_t (*attn_workspace)(const struct kvk_attn_args *a);
	size_t (*moe_workspace)(const struct kvk_moe_args *a);
};

/** kvk_host_ops() - the plain C references; always there */
const struct kvk_ops *kvk_host_ops(void);

/** kvk_cuda_ops() - CUDA kernels; NULL when built without CUDA or without a usable device */
const struct kvk_ops *kvk_cuda_ops(void);

/**
 * struct kvk_family - what a test needs to walk the table
 * @name: hook's name
 * @ops_offset: offset of the hook in struct kvk_ops
 * @args_bytes: size of its arguments
 * @batch_offset: offset of the (source) struct kvk_batch in the arguments; valid if @pages
 * @pages: KVK_READS_PAGES | KVK_WRITES_PAGES, or 0
 */
struct kvk_family {
	const char *name;
	size_t ops_offset;
	size_t args_bytes;
	size_t batch_offset;
	uint32_t pages;
};

#define KVK_READS_PAGES	 1u
#define KVK_WRITES_PAGES 2u

extern const struct kvk_family kvk_families[];
extern const size_t kvk_nr_families;

#ifdef __cplusplus
}
#endif
#endif /* KVK_KERNELS_H */
