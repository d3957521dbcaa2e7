/* SPDX-License-Identifier: Apache-2.0 */
/*
 * source.h - one matrix of a checkpoint, in whichever of the four forms it is stored.
 *
 *   X.weight BF16 or F32 [rows][cols]
 *   X.weight F8_E4M3 [rows][cols] with X.weight_scale_inv F32
 * [ceil(rows/128)][ceil(cols/128)] X.weight_packed I32 [rows][cols/8] with X.weight_scale
 * BF16 or F16 [rows][cols/group] and X.weight_shape I32 or I64 [2] = rows, cols
 *
 * A source borrows the mapped file; eng_source_put() makes the kernels' form of it.
 */
#ifndef ENG_MODEL_SOURCE_H
#define ENG_MODEL_SOURCE_H

#include "engine/model/config.h"
#include "engine/model/safetensors.h"
#include "kernels/kernels.h"

/**
 * struct eng_source - a matrix, checked
 * @name: of its tensor; owned by the set
 * @file: for messages
 * @dtype: enum kvk_dtype
 * @rows, @cols: as asked for
 * @group, @scale_dtype: INT4
 * @transposed: INT4: GPTQ's layout
 * @data, @scales: as stored, any alignment
 */
struct eng_source {
	const char *name;
	const char *file;
	u32 dtype;
	u32 rows;
	u32 cols;
	u32 group;
	u32 scale_dtype;
	bool transposed;
	const u8 *data;
	const u8 *scales;
};

/**
 * eng_source_find() - look a matrix up and compare it with what the configuration needs
 * @ts: tensors; those taken are marked used
 * @c: quant and quant_group say what may be stored
 * @base: name without ".weight"
 * @rows, @cols: needed shape
 *
 * Return: 0; -EINVAL (missing, wrong dtype or shape) naming file and tensor.
 */
int eng_source_find(struct eng_tensors *ts, const struct eng_config *c, const char *base,
		    u32 rows, u32 cols, struct eng_source *ret, struct eng_err *err);

/** eng_source_rows() - rows [row, row + nr) as f32 [nr][cols] */
void eng_source_rows(const struct eng_source *s, u32 row, u32 nr, float *ret);

/** eng_source_put_check() - can @s become @dtype (INT4: with @group)? Return: 0 or
 * -EINVAL */
int eng_source_put_check(const struct eng_source *s, u32 dtype, u32 group,
			 struct eng_err *err);

/**
 * eng_source_put() - write the matrix in a kernels' form
 * @s: checked with eng_source_put_check()
 * @dtype: KVK_F32 (widened, dequantised), KVK_BF16 (kept, or rounded from a quantised
 *	form), KVK_E4M3 or KVK_INT4 (kept or quantised)
 * @group: INT4
 * @data, @scales: as struct kvk_weight wants them, rows * cols
 *
 * Context: any thread; parallel over rows unless called in a parallel region.
 * Return: 0; -EDOM a value is infinite or NaN and is to be quantised; -ENOMEM.
 */
int eng_source_put(const struct eng_source *s, u32 dtype, u32 group, void *data,
		   void *scales);

#endif
