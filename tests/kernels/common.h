/* SPDX-License-Identifier: Apache-2.0 */
/*
 * common.h - pages, batches and float64 truths for the kernel tests.
 *
 * The truths are written from the formats' definitions (ldexp, hand-written offsets), not
 * with the helpers of kernels/, so that an error there cannot hide. Host memory only.
 */
#ifndef KVT_KERNELS_COMMON_H
#define KVT_KERNELS_COMMON_H

#include "base/util.h"
#include "kernels/kernels.h"

/* A generator of one's own: kvt.h's state is private to the file that includes it. */
struct kvt_rng {
	u64 state;
};

u64 kvt_rng_next(struct kvt_rng *g);
u32 kvt_rng_below(struct kvt_rng *g, u32 n);
float kvt_rng_normal(struct kvt_rng *g); /* mean 0, deviation 1 */
void kvt_rng_fill(struct kvt_rng *g, float *x, size_t n, float scale);

/* Values of the formats, from their definitions. */
double kvt_e4m3(u8 c);
double kvt_f16(u16 h);
double kvt_bf16(u16 h);
u16 kvt_to_bf16(float x); /* nearest, ties to even */

/**
 * struct kvt_paged - a pool of pages in host memory and a batch over it
 * @pages: pages.base is owned; all bytes 0xff (NaN in every dtype) at the start
 * @batch: its arrays are owned; verdicts pass
 * @verdicts, @lengths, @rows: the same arrays, writable
 * @nonces: [nr_requests]
 * @bytes: of pages.base
 */
struct kvt_paged {
	struct kvk_pages pages;
	struct kvk_batch batch;
	struct kv_verdict *verdicts;
	u32 *lengths;
	struct kv_row *rows;
	u64 *nonces;
	u64 step;
	size_t bytes;
	float scales[1024];
	u32 row_start[257];
	u32 q_start[257];
};

struct kv_layout kvt_layout_mla(u32 dtype, u32 scale_kind, u32 nr_layers);
struct kv_layout kvt_layout_gqa(u32 dtype, u32 scale_kind, u32 nr_layers, u32 nr_kv_heads,
				u32 head_dim);

/* Pages lie in extents of 4 with gaps between; static scales are random. */
void kvt_paged_init(struct kvt_paged *f, struct kvt_rng *g, const struct kv_layout *l,
		    u32 nr_pages);

/**
 * kvt_paged_batch() - a batch of requests, each on its own randomly placed pages
 * @lengths: tokens of each request, this step's included
 * @q_lens: tokens of this step
 * @nr: requests, at most 256
 *
 * All rows have WRITE; pages of different requests differ. May be called again for
 * another batch over the same pages.
 */
void kvt_paged_batch(struct kvt_paged *f, struct kvt_rng *g, const u32 *lengths,
		     const u32 *q_lens, u32 nr);
void kvt_paged_fini(struct kvt_paged *f);

/**
 * kvt_paged_append() - the batch's tokens into its pages, the same in each layer, by the host's
 * append
 * @first, @second: f32, a token's values in a row: latent and rope, or K and V
 */
void kvt_paged_append(struct kvt_paged *f, const float *first, const float *second);

/** kvt_paged_ask() - the same batch and pages, but only the last @q_lens tokens ask */
void kvt_paged_ask(struct kvt_paged *f, const u32 *q_lens, u32 nr);

/**
 * kvt_key_args() - norm_rope_append over MLA pages, one head of q
 * @acts: memory of the kernels: four arrays of 576 floats for each token; everything is in there
 * @positions: [batch->nr_tokens], below 16
 * @dtype: KVK_F32 or KVK_BF16
 */
struct kvk_norm_rope_append_args kvt_key_args(const struct kvk_pages *pages,
					      const struct kvk_batch *batch, void *acts,
					      const u32 *positions, u32 dtype);

/* Start of a layer's part of the page of a request's position. */
u8 *kvt_paged_part(const struct kvt_paged *f, u32 request, u32 position, u32 layer);

/**
 * kvt_paged_value() - a stored value by the format's definition
 * @part: kvt_paged_part()
 * @plane: MLA 0 latent, 1 rope; GQA 2 * head + (0 K, 1 V)
 * @slot: slot in the page
 * @i: value
 */
double kvt_paged_value(const struct kvt_paged *f, const u8 *part, u32 layer, u32 plane,
		       u32 slot, u32 i);

/**
 * kvt_attn_truth() - attention of one query row in float64
 * @request: request
 * @plane_k, @plane_v: planes of K and V; MLA 0, 0 (rope is added)
 * @sees: positions 0 .. sees - 1
 * @q: query values
 * @out: [dim of plane_v]
 */
void kvt_attn_truth(const struct kvt_paged *f, u32 request, u32 layer, u32 plane_k,
		    u32 plane_v, u32 sees, const float *q, double sm_scale, double *out);

/* Largest difference of two arrays, and NaN if either holds one. */
double kvt_max_diff(const float *a, const double *b, size_t n);
/* Number of values that are not NaN. */
size_t kvt_nr_finite(const float *x, size_t n);

/**
 * struct kvt_matrix - random matrices of a weight dtype, and what they mean in float64
 * @w: the first one, as linear takes it
 * @data, @scales: owned, of all matrices, one after the other
 * @truth: owned, [nr][rows][cols]
 */
struct kvt_matrix {
	struct kvk_weight w;
	u8 *data;
	u8 *scales;
	double *truth;
};

struct kvt_matrix kvt_matrix_make(struct kvt_rng *g, u32 dtype, u32 nr, u32 rows,
				  u32 cols, u32 group, u32 scale_dtype);
void kvt_matrix_fini(struct kvt_matrix *m);

/* What an FP8 kernel sees of its activations: e4m3 per 128, by search for the nearest
 * code. */
void kvt_act_fp8(const float *x, double *y, u32 n);
/* What a kernel with weights of @dtype sees of its activations. */
void kvt_acts(u32 dtype, const float *x, double *y, u32 n);

#endif /* KVT_KERNELS_COMMON_H */
