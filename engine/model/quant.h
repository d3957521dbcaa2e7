/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quant.h - BF16 or F32 rows to INT4 groups or FP8 blocks, and back.
 *
 * INT4 is symmetric, q in -8 .. 7, one bf16 scale per group; the scale is searched for
 * the least squared error of the group. FP8 is e4m3 with one f32 scale per 128 x 128
 * block: amax / 448. Pure functions, deterministic: same input, same bits, whatever the
 * thread count.
 */
#ifndef ENG_MODEL_QUANT_H
#define ENG_MODEL_QUANT_H

#include <stdbool.h>
#include "base/util.h"

/**
 * eng_quant_int4_row() - one row
 * @x: [cols] finite values
 * @cols: multiple of @group
 * @group: 32, 64 or 128
 * @ret_words: [cols / 8] packed as kernels/int4.h says
 * @ret_scales: [cols / group] bf16
 *
 * Return: squared error of the row.
 */
double eng_quant_int4_row(const float *x, u32 cols, u32 group, u32 *ret_words,
			  u16 *ret_scales);

/**
 * eng_quant_int4_absmax() - squared error that plain absmax scales (amax / 7) would give
 *
 * What the search is compared with in tests and by kvquant.
 */
double eng_quant_int4_absmax(const float *x, u32 cols, u32 group);

/** eng_dequant_int4_row() - the values back, exactly: q * scale */
void eng_dequant_int4_row(const u32 *words, const u16 *scales, bool scale_is_f16,
			  u32 cols, u32 group, float *ret);

/**
 * eng_quant_fp8_rows() - up to 128 rows, one row of blocks
 * @x: [rows][cols] finite values
 * @rows: 1 .. 128
 * @ret: [rows][cols] e4m3
 * @ret_scales: [ceil(cols / 128)]
 */
void eng_quant_fp8_rows(const float *x, u32 rows, u32 cols, u8 *ret, float *ret_scales);

/** eng_dequant_fp8_row() - one row back; @scales: [ceil(cols / 128)] of its block row */
void eng_dequant_fp8_row(const u8 *codes, const float *scales, u32 cols, float *ret);

/** eng_all_finite() - is no value infinite or NaN? */
bool eng_all_finite(const float *x, size_t n);

#endif
