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
#define SCALE_MIN	  0x1p-126f   /* below this f32 scales lose bits */
#define GROUP_ZERO	  0x1p-100f   /* a group below this is zero */
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

/* A scale as it will be stored. */
static float stored_scale(float s)
{
	return kvk_bf16_to_f32(kvk_f32_to_bf16(s));
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

/* The scale for a group whose largest value is in [1, 2). */
static float search_scale(const float *x, u32 group)
{
	float amax = group_amax(x, group), best = 1.0f, best_error = INFINITY;

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
	return best;
}

/*
 * The group times a power of two, so that its largest value is in [1, 2): exact, and
 * squares neither overflow nor vanish whatever the magnitude. Return: the exponent taken
 * out; for a group that is as good as zero INT32_MIN.
 */
static s32 normalise(const float *x, u32 group, float *ret)
{
	float amax = group_amax(x, group), first, second;
	s32 e;

	if (amax < GROUP_ZERO)
		return INT32_MIN;
	frexpf(amax, &e);
	e--;
	/* 2^-e itself may be out of range */
	first = ldexpf(1.0f, -e / 2);
	second = ldexpf(1.0f, -e - -e / 2);
	for (u32 i = 0; i < group; i++)
		ret[i] = x[i] * first * second;
	return e;
}

static double group_energy(const float *x, u32 group)
{
	double sum = 0;

	for (u32 i = 0; i < group; i++)
		sum += (double)x[i] * (double)x[i];
	return sum;
}

/* Codes and scale of one group. Return: squared error. */
static double quant_group(const float *x, u32 group, s8 *ret_q, u16 *ret_scale)
{
	float norm[GROUP_MAX], scale;
	s32 e = normalise(x, group, norm);

	if (e == INT32_MIN) {
		memset(ret_q, 0, group);
		*ret_scale = kvk_f32_to_bf16(1.0f);
		return group_energy(x, group);
	}
	scale = search_scale(norm, group);
	/* divided, not multiplied by a rounded inverse: any reader's round(x / scale)
	 * agrees */
	for (u32 i = 0; i < group; i++)
		ret_q[i] = (s8)int4_code(norm[i] / scale, 1.0f);
	*ret_scale = kvk_f32_to_bf16(ldexpf(scale, e));
	return ldexp((double)group_error(norm, group, scale), 2 * e);
}

double eng_quant_int4_row(const float *x, u32 cols, u32 group, u32 *ret_words,
			  u16 *ret_scales)
{
	double error = 0;
	s8 q[GROUP_MAX];

	for (u32 g = 0; g < cols / group; g++) {
		error += quant_group(x + (size_t)g * group, group, q, &ret_scales[g]);
		for (u32 i = 0; i < group; i += KVK_INT4_PER_WORD)
			*ret_words++ = kvk_int4_pack8(q + i);
	}
	return error;
}

double eng_quant_int4_absmax(const float *x, u32 cols, u32 group)
{
	float norm[GROUP_MAX];
	double error = 0;

	for (u32 g = 0; g < cols / group; g++) {
		const float *xg = x + (size_t)g * group;
		s32 e = normalise(xg, group, norm);
		float s;

		if (e == INT32_MIN) {
			error += group_energy(xg, group);
			continue;
		}
		s = stored_scale(group_amax(norm, group) / INT4_ABSMAX_SCALE);
		error += ldexp((double)group_error(norm, group, s), 2 * e);
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
