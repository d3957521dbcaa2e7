/* SPDX-License-Identifier: Apache-2.0 */
/*
 * norm_rope_ref.c - RMS norm with residual, rotary embedding, silu on the host; and these with append
 * behind them, one after the other.
 *
 * Rows and tokens on their own; no state; any thread.
 */
#include <math.h>
#include "ref.h"

#define NORM_COLS_MAX 32768u
#define ROPE_DIM_MAX  512u
#define SILU_STEP     256u

static void norm_row(const struct kvk_norm_args *a, u32 row)
{
	size_t x_stride = a->x_stride ? a->x_stride : a->cols;
	size_t y_stride = a->y_stride ? a->y_stride : a->cols;
	const struct kvk_simd *simd = kvk_simd_get();
	float x[NORM_COLS_MAX], part[SILU_STEP], inv;

	kvk_act_load(a->act_dtype, a->x, row * x_stride, x, a->cols);
	if (a->residual) {
		size_t at = (size_t)row * a->cols;

		for (u32 c = 0; c < a->cols; c += SILU_STEP) {
			u32 n = KV_MIN(a->cols - c, SILU_STEP);

			kvk_act_load(a->act_dtype, a->residual, at + c, part, n);
			for (u32 i = 0; i < n; i++)
				x[c + i] += part[i];
		}
		/* the norm reads what was stored: a BF16 residual is rounded */
		kvk_act_store(a->act_dtype, x, a->residual, at, a->cols);
		kvk_act_load(a->act_dtype, a->residual, at, x, a->cols);
	}
	inv = 1.0f / sqrtf(simd->sum_squares(x, a->cols) / (float)a->cols + a->eps);
	for (u32 c = 0; c < a->cols; c++)
		x[c] = x[c] * inv * a->weight[c];
	kvk_act_store(a->act_dtype, x, a->y, row * y_stride, a->cols);
}

int kvk_norm_ref(const struct kvk_norm_args *a, kvk_stream stream)
{
	if (!a->x || !a->y || !a->weight || !a->cols || a->cols > NORM_COLS_MAX ||
	    !kvk_act_dtype_ok(a->act_dtype) || (a->x_stride && a->x_stride < a->cols) ||
	    (a->y_stride && a->y_stride < a->cols))
		return -EINVAL;
#pragma omp parallel for schedule(static) if ((u64)a->nr_rows * a->cols > 32768)
	for (u32 r = 0; r < a->nr_rows; r++)
		norm_row(a, r);
	return 0;
}

static void rope_token(const struct kvk_rope_args *a, u32 t)
{
	const u32 half = a->rope_dim / 2;
	void *y = a->y ? a->y : a->x;
	const float *cs = a->cos_sin + (size_t)a->positions[t] * a->rope_dim;
	float in[ROPE_DIM_MAX], out[ROPE_DIM_MAX];

	for (u32 h = 0; h < a->nr_heads; h++) {
		size_t at = (size_t)t * a->token_stride + (size_t)h * a->head_stride +
			    a->offset;
		size_t to = !a->y ? at
				  : (size_t)t * a->y_token_stride +
					    (size_t)h * a->y_head_stride + a->y_offset;

		kvk_act_load(a->act_dtype, a->x, at, in, a->rope_dim);
		for (u32 i = 0; i < half; i++) {
			float p = a->interleaved ? in[2 * i] : in[i];
			float q = a->interleaved ? in[2 * i + 1] : in[half + i];

			out[i] = p * cs[i] - q * cs[half + i];
			out[half + i] = q * cs[i] + p * cs[half + i];
		}
		kvk_act_store(a->act_dtype, out, y, to, a->rope_dim);
	}
}

int kvk_rope_ref(const struct kvk_rope_args *a, kvk_stream stream)
{
	if (!a->x || !a->positions || !a->cos_sin || !a->nr_heads || !a->rope_dim ||
	    a->rope_dim % 2 || a->rope_dim > ROPE_DIM_MAX ||
	    !kvk_act_dtype_ok(a->act_dtype) || !kvk_rope_places_ok(a))
		return -EINVAL;
#pragma omp parallel for schedule(static) if (a->nr_tokens > 16)
	for (u32 t = 0; t < a->nr_tokens; t++)
		rope_token(a, t);
	return 0;
}

int kvk_silu_ref(const struct kvk_silu_args *a, kvk_stream stream)
{
	const struct kvk_simd *simd = kvk_simd_get();

	if (!a->gu || !a->y || !a->inter || !kvk_act_dtype_ok(a->act_dtype))
		return -EINVAL;
#pragma omp parallel for schedule(static) if ((u64)a->nr_tokens * a->inter > 8192)
	for (u32 t = 0; t < a->nr_tokens; t++) {
		size_t at = (size_t)t * 2 * a->inter;

		for (u32 c = 0; c < a->inter; c += SILU_STEP) {
			u32 n = KV_MIN(a->inter - c, SILU_STEP);
			float g[SILU_STEP], u[SILU_STEP];

			kvk_act_load(a->act_dtype, a->gu, at + c, g, n);
			kvk_act_load(a->act_dtype, a->gu, at + a->inter + c, u, n);
			simd->silu_mul(g, u, g, n);
			kvk_act_store(a->act_dtype, g, a->y, (size_t)t * a->inter + c, n);
		}
	}
	return 0;
}

int kvk_norm_rope_append_ref(const struct kvk_norm_rope_append_args *a, kvk_stream stream)
{
	int r = kvk_append_check(&a->append); /* before anything is written */

	if (!r && a->q_norm.weight)
		r = kvk_norm_ref(&a->q_norm, stream);
	if (!r && a->k_norm.weight)
		r = kvk_norm_ref(&a->k_norm, stream);
	if (!r)
		r = kvk_rope_ref(&a->q_rope, stream);
	if (!r)
		r = kvk_rope_ref(&a->k_rope, stream);
	return r ? r : kvk_append_ref(&a->append, stream);
}
