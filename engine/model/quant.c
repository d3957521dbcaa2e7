/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quant.c - choosing scales and rounding (quant.h). Any thread.
 *
 * INT4: of a group's values the largest decides absmax scales, so that a single outlier
 * costs all others resolution. Clipping it a little is often cheaper. Candidates amax / d
 * for d from 5 (outlier inside) to 10 (outlier clipped at 8/10) are tried; each is
 * improved once by the scale that is best for its own codes (sum xq / sum qq), rounded to
 * bf16 as it will be stored, and judged by the squared error with the stored scale.
 */
#include "engine/model/quant.h"

#include <math.h>
#include <string.h>
#include "kernels/fp8.h"
#include "kernels/int4.h"

#define GROUP_MAX	  128u
#define NR_CANDIDATES	  26u
#define CANDIDATE_FIRST	  5.0f
#define CANDIDATE_STEP	  0.2f
#define ROUND_MAGIC	  12582912.0f /* 1.5 * 2^23: adding it leaves no fraction bits */
#define SCALE_MIN	  0x1p-126f   /* below this bf16 scales lose bits */
#define INT4_ABSMAX_SCALE 7.0f

/* Nearest code, ties to even; branch-free so that the loops around it vectorise. */
static inline float int4_code(float x, float inv)
{
	float y = x * inv;

	y = y < -8.0f ? -8.0f : y;
	y = y > 7.0f ? 7.0f : y;
	return (y + ROUND_MAGIC) - ROUND_MAGIC;
}

static float group_error(const float *x, u32 group, float scale)
{
	float inv = 1.0f / scale, sum = 0;

	for (u32 i = 0; i < group; i++) {
		float d = x[i] - int4_code(x[i], inv) * scale;

		sum += d * d;
	}
	return sum;
}

/* A positive scale as it will be stored. */
static float stored_scale(float s)
{
	s = kvk_bf16_to_f32(kvk_f32_to_bf16(s));
	return s < SCALE_MIN ? SCALE_MIN : s;
}

/* The best scale for the codes that @scale gives. */
static float refit_scale(const float *x, u32 group, float scale)
{
	float inv = 1.0f / scale, xq = 0, qq = 0;

	for (u32 i = 0; i < group; i++) {
		float q = int4_code(x[i], inv);

		xq += x[i] * q;
		qq += q * q;
	}
	return qq > 0 && xq > 0 ? xq / qq : scale;
}

static float group_amax(const float *x, u32 group)
{
	float amax = 0;

	for (u32 i = 0; i < group; i++)
		amax = fmaxf(amax, fabsf(x[i]));
	return amax;
}

static float search_scale(const float *x, u32 group, float *ret_error)
{
	float amax = group_amax(x, group), best = 1.0f, best_error = INFINITY;

	*ret_error = 0;
	if (amax == 0)
		return 1.0f;
	for (u32 c = 0; c < NR_CANDIDATES; c++) {
		float s = stored_scale(amax /
				       (CANDIDATE_FIRST + CANDIDATE_STEP * (float)c));
		float refit = stored_scale(refit_scale(x, group, s));
		float e = group_error(x, group, s),
		      e_refit = group_error(x, group, refit);

		if (e < best_error) {
			best = s;
			best_error = e;
		}
		if (e_refit < best_error) {
			best = refit;
			best_error = e_refit;
		}
	}
	*ret_error = best_error;
	return best;
}

double eng_quant_int4_row(const float *x, u32 cols, u32 group, u32 *ret_words,
			  u16 *ret_scales)
{
	double error = 0;
	s8 q[GROUP_MAX];

	for (u32 g = 0; g < cols / group; g++) {
		const float *xg = x + (size_t)g * group;
		float e, scale = search_scale(xg, group, &e), inv = 1.0f / scale;

		error += (double)e;
		ret_scales[g] = kvk_f32_to_bf16(scale);
		for (u32 i = 0; i < group; i++)
			q[i] = (s8)int4_code(xg[i], inv);
		for (u32 i = 0; i < group; i += KVK_INT4_PER_WORD)
			*ret_words++ = kvk_int4_pack8(q + i);
	}
	return error;
}

double eng_quant_int4_absmax(const float *x, u32 cols, u32 group)
{
	double error = 0;

	for (u32 g = 0; g < cols / group; g++) {
		float amax = group_amax(x + (size_t)g * group, group);

		if (amax > 0)
			error += (double)group_error(
				x + (size_t)g * group, group,
				stored_scale(amax / INT4_ABSMAX_SCALE));
	}
	return error;
}

void eng_dequant_int4_row(const u32 *words, const u16 *scales, bool scale_is_f16,
			  u32 cols, u32 group, float *ret)
{
	for (u32 i = 0; i < cols; i++) {
		float s = kvk_scale16_to_f32(scales[i / group], scale_is_f16);

		ret[i] = (float)kvk_int4_get(words[i / KVK_INT4_PER_WORD],
					     i % KVK_INT4_PER_WORD) *
			 s;
	}
}

void eng_quant_fp8_rows(const float *x, u32 rows, u32 cols, u8 *ret, float *ret_scales)
{
	for (u32 b = 0; b < kvk_fp8_blocks(cols); b++) {
		u32 c0 = b * KVK_FP8_BLOCK, nr = KV_MIN(KVK_FP8_BLOCK, cols - c0);
		float amax = 0, scale;

		for (u32 r = 0; r < rows; r++)
			amax = fmaxf(amax, group_amax(x + (size_t)r * cols + c0, nr));
		scale = kvk_fp8_act_scale(amax);
		if (scale < SCALE_MIN)
			scale = SCALE_MIN;
		ret_scales[b] = scale;
		for (u32 r = 0; r < rows; r++)
			for (u32 c = c0; c < c0 + nr; c++)
				ret[(size_t)r * cols + c] =
					kvk_e4m3_encode(x[(size_t)r * cols + c] / scale);
	}
}

void eng_dequant_fp8_row(const u8 *codes, const float *scales, u32 cols, float *ret)
{
	for (u32 i = 0; i < cols; i++)
		ret[i] = kvk_e4m3_decode(codes[i]) * scales[i / KVK_FP8_BLOCK];
}

bool eng_all_finite(const float *x, size_t n)
{
	u32 bad = 0;

	for (size_t i = 0; i < n; i++)
		bad |= (kvk_f32_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
	return !bad;
}
