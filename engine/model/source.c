/* SPDX-License-Identifier: Apache-2.0 */
/*
 * source.c - find a checkpoint's matrices and bring them into the kernels' form
 * (source.h).
 *
 * Finding: one thread (it marks tensors as used). Putting: any thread.
 */
#include "engine/model/source.h"

#include <errno.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include "base/mutant.h"
#include "engine/model/quant.h"
#include "kernels/fp8.h"
#include "kernels/int4.h"

#define NAME_MAX_BYTES 256u

static int refuse_shape(const struct eng_tensor *t, const char *want, u64 a, u64 b,
			struct eng_err *err)
{
	char have[160];

	return eng_refuse(err, -EINVAL,
			  "%s: tensor %.200s is %s, expected %s [%llu,%llu]", t->file,
			  t->name, eng_tensor_describe(t, have, sizeof(have)), want,
			  (unsigned long long)a, (unsigned long long)b);
}

/* The tensor "@base.@suffix", or a refusal. */
static int find_part(struct eng_tensors *ts, const char *base, const char *suffix,
		     const struct eng_tensor **ret, struct eng_err *err)
{
	char name[NAME_MAX_BYTES];

	snprintf(name, sizeof(name), "%s.%s", base, suffix);
	*ret = eng_tensors_use(ts, name);
	if (!*ret)
		return eng_refuse(err, -EINVAL, "%s: tensor %s is missing", ts->path,
				  name);
	return 0;
}

static int check_shape_tensor(const struct eng_tensor *t, u32 rows, u32 cols,
			      struct eng_err *err)
{
	s64 v[2] = {0};
	s32 v32[2];

	if (t->dtype == ENG_ST_I64 && t->bytes == 16) {
		memcpy(v, t->data, 16);
	} else if (t->dtype == ENG_ST_I32 && t->bytes == 8) {
		memcpy(v32, t->data, 8);
		v[0] = v32[0];
		v[1] = v32[1];
	} else {
		return eng_refuse(err, -EINVAL,
				  "%s: tensor %.200s is not two I64 or I32 values",
				  t->file, t->name);
	}
	if (v[0] != (s64)rows || v[1] != (s64)cols)
		return eng_refuse(err, -EINVAL,
				  "%s: tensor %.200s says [%lld,%lld], expected [%u,%u]",
				  t->file, t->name, (long long)v[0], (long long)v[1],
				  rows, cols);
	return 0;
}

static int find_int4(struct eng_tensors *ts, const struct eng_config *c, const char *base,
		     const struct eng_tensor *packed, struct eng_source *s,
		     struct eng_err *err)
{
	const struct eng_tensor *scale = NULL, *shape = NULL;
	char name[NAME_MAX_BYTES];
	int r;

	if (c->quant != ENG_QUANT_INT4)
		return eng_refuse(err, -EINVAL,
				  "%s: tensor %.200s is packed, but config.json has no "
				  "pack-quantized quantization_config",
				  packed->file, packed->name);
	snprintf(name, sizeof(name), "%s.weight_zero_point", base);
	if (eng_tensors_find(ts, name))
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %s: zero points are not built (symmetric only)",
			packed->file, name);
	if (!kvk_int4_shape_ok(s->cols, c->quant_group))
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s: rows of %u are no multiple of group %u",
			packed->file, packed->name, s->cols, c->quant_group);
	if (!eng_tensor_is(packed, ENG_ST_I32, s->rows, s->cols / 8))
		return refuse_shape(packed, "I32", s->rows, s->cols / 8, err);
	r = find_part(ts, base, "weight_scale", &scale, err);
	r = r ?: find_part(ts, base, "weight_shape", &shape, err);
	r = r ?: check_shape_tensor(shape, s->rows, s->cols, err);
	if (r)
		return r;
	if (!eng_tensor_is(scale, ENG_ST_BF16, s->rows, s->cols / c->quant_group) &&
	    !eng_tensor_is(scale, ENG_ST_F16, s->rows, s->cols / c->quant_group))
		return refuse_shape(scale, "BF16 or F16", s->rows,
				    s->cols / c->quant_group, err);
	s->dtype = KVK_INT4;
	s->group = c->quant_group;
	s->scale_dtype = scale->dtype == ENG_ST_F16 ? KVK_F16 : KVK_BF16;
	s->name = packed->name;
	s->file = packed->file;
	s->data = packed->data;
	s->scales = scale->data;
	return 0;
}

/* Every nibble of qzeros is the one that means "8"; groups are in order. */
static int check_gptq(const struct eng_config *c, const struct eng_tensor *zeros,
		      const struct eng_tensor *order, struct eng_err *err)
{
	u8 want = (u8)(c->quant_zero * 0x11);

	for (u64 i = 0; i < zeros->bytes; i++)
		if (zeros->data[i] != want && !KV_MUTANT(gptq_zero))
			return eng_refuse(
				err, -EINVAL,
				"%s: tensor %.200s holds zero points %#x, expected %#x: "
				"not symmetric, or another checkpoint_format",
				zeros->file, zeros->name, zeros->data[i], want);
	for (u64 i = 0; order && i < order->bytes / 4; i++) {
		s32 group;

		memcpy(&group, order->data + 4 * i, 4);
		if (group != (s32)(i / c->quant_group))
			return eng_refuse(
				err, -ENOTSUP,
				"%s: tensor %.200s: column %llu is in group %d: reordered "
				"columns are not built",
				order->file, order->name, (unsigned long long)i, group);
	}
	return 0;
}

static int find_gptq(struct eng_tensors *ts, const struct eng_config *c, const char *base,
		     const struct eng_tensor *words, struct eng_source *s,
		     struct eng_err *err)
{
	const struct eng_tensor *scale = NULL, *zeros = NULL, *order;
	char name[NAME_MAX_BYTES];
	u64 groups;
	int r;

	if (c->quant != ENG_QUANT_GPTQ)
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s is GPTQ's, but config.json has no gptq "
			"quantization_config",
			words->file, words->name);
	if (!kvk_int4_shape_ok(s->cols, c->quant_group) || s->rows % 8)
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s: [%u,%u] does not divide into groups of %u and "
			"rows of 8",
			words->file, words->name, s->rows, s->cols, c->quant_group);
	if (!eng_tensor_is(words, ENG_ST_I32, s->cols / 8, s->rows))
		return refuse_shape(words, "I32", s->cols / 8, s->rows, err);
	groups = s->cols / c->quant_group;
	r = find_part(ts, base, "scales", &scale, err);
	r = r ?: find_part(ts, base, "qzeros", &zeros, err);
	if (r)
		return r;
	if (!eng_tensor_is(scale, ENG_ST_F16, groups, s->rows) &&
	    !eng_tensor_is(scale, ENG_ST_BF16, groups, s->rows))
		return refuse_shape(scale, "F16 or BF16", groups, s->rows, err);
	if (!eng_tensor_is(zeros, ENG_ST_I32, groups, s->rows / 8))
		return refuse_shape(zeros, "I32", groups, s->rows / 8, err);
	snprintf(name, sizeof(name), "%s.g_idx", base);
	order = eng_tensors_use(ts, name);
	if (order && !eng_tensor_is(order, ENG_ST_I32, s->cols, 0))
		return refuse_shape(order, "I32", 1, s->cols, err);
	s->dtype = KVK_INT4;
	s->group = c->quant_group;
	s->scale_dtype = scale->dtype == ENG_ST_F16 ? KVK_F16 : KVK_BF16;
	s->transposed = true;
	s->name = words->name;
	s->file = words->file;
	s->data = words->data;
	s->scales = scale->data;
	return check_gptq(c, zeros, order, err);
}

static int find_fp8(struct eng_tensors *ts, const struct eng_config *c, const char *base,
		    struct eng_source *s, struct eng_err *err)
{
	u64 br = kvk_fp8_blocks(s->rows), bc = kvk_fp8_blocks(s->cols);
	const struct eng_tensor *scale = NULL;
	int r;

	if (c->quant != ENG_QUANT_FP8)
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s is F8_E4M3, but config.json has no fp8 "
			"quantization_config",
			s->file, s->name);
	r = find_part(ts, base, "weight_scale_inv", &scale, err);
	if (r)
		return r;
	if (!eng_tensor_is(scale, ENG_ST_F32, br, bc))
		return refuse_shape(scale, "F32", br, bc, err);
	s->dtype = KVK_E4M3;
	s->scales = scale->data;
	return 0;
}

int eng_source_find(struct eng_tensors *ts, const struct eng_config *c, const char *base,
		    u32 rows, u32 cols, struct eng_source *ret, struct eng_err *err)
{
	struct eng_source s = {.rows = rows, .cols = cols};
	const struct eng_tensor *t = NULL;
	char name[NAME_MAX_BYTES];
	int r;

	snprintf(name, sizeof(name), "%s.weight_packed", base);
	t = eng_tensors_use(ts, name);
	if (t) {
		r = find_int4(ts, c, base, t, &s, err);
		goto out;
	}
	snprintf(name, sizeof(name), "%s.qweight", base);
	t = eng_tensors_use(ts, name);
	if (t) {
		r = find_gptq(ts, c, base, t, &s, err);
		goto out;
	}
	r = find_part(ts, base, "weight", &t, err);
	if (r)
		return r;
	s.name = t->name;
	s.file = t->file;
	s.data = t->data;
	if (t->nr_dims != 2 || t->shape[0] != rows || t->shape[1] != cols)
		return refuse_shape(t, "BF16, F32 or F8_E4M3", rows, cols, err);
	if (t->dtype == ENG_ST_E4M3)
		r = find_fp8(ts, c, base, &s, err);
	else if (t->dtype == ENG_ST_BF16)
		s.dtype = KVK_BF16;
	else if (t->dtype == ENG_ST_F32)
		s.dtype = KVK_F32;
	else
		r = refuse_shape(t, "BF16, F32 or F8_E4M3", rows, cols, err);
out:
	if (!r)
		*ret = s;
	return r;
}

/* --------------------------------------------------------------- rows as f32 */

/* Mapped data has any alignment: copy before looking at more than a byte. */
static float load_f32(const u8 *p)
{
	float f;

	memcpy(&f, p, sizeof(f));
	return f;
}

static u16 load_u16(const u8 *p)
{
	u16 h;

	memcpy(&h, p, sizeof(h));
	return h;
}

/* Places of word and scale @i of a row, in bytes. */
static size_t word_at(const struct eng_source *s, u32 row, u32 i)
{
	return 4 * (s->transposed ? (size_t)i * s->rows + row
				  : (size_t)row * kvk_int4_row_words(s->cols) + i);
}

static size_t scale_at(const struct eng_source *s, u32 row, u32 i)
{
	return 2 * (s->transposed ? (size_t)i * s->rows + row
				  : (size_t)row * (s->cols / s->group) + i);
}

static void int4_row(const struct eng_source *s, u32 row, float *ret)
{
	for (u32 i = 0; i < s->cols; i++) {
		const u8 *w = s->data + word_at(s, row, i / KVK_INT4_PER_WORD);
		u32 nibble = w[i % KVK_INT4_PER_WORD / 2] >> (i % 2 * 4) & 0xf;
		u16 scale = load_u16(s->scales + scale_at(s, row, i / s->group));

		ret[i] = (float)((s32)nibble - KVK_INT4_ZERO) *
			 kvk_scale16_to_f32(scale, s->scale_dtype == KVK_F16);
	}
}

static void fp8_row(const struct eng_source *s, u32 row, float *ret)
{
	const u8 *codes = s->data + (size_t)row * s->cols;

	for (u32 i = 0; i < s->cols; i++)
		ret[i] = kvk_e4m3_decode(codes[i]) *
			 load_f32(s->scales + 4 * kvk_fp8_scale_index(row, i, s->cols));
}

void eng_source_rows(const struct eng_source *s, u32 row, u32 nr, float *ret)
{
	for (u32 r = row; r < row + nr; r++, ret += s->cols) {
		const u8 *p =
			s->data + (size_t)r * s->cols * (s->dtype == KVK_F32 ? 4 : 2);

		if (s->dtype == KVK_INT4)
			int4_row(s, r, ret);
		else if (s->dtype == KVK_E4M3)
			fp8_row(s, r, ret);
		else if (s->dtype == KVK_F32)
			memcpy(ret, p, (size_t)s->cols * 4);
		else
			for (u32 i = 0; i < s->cols; i++)
				ret[i] = kvk_bf16_to_f32(load_u16(p + 2 * i));
	}
}

/* ------------------------------------------------------------ kernels' forms */

/* A word holds eight columns of one row in both layouts: only places change. */
static void put_transposed(const struct eng_source *s, u8 *data, u8 *scales)
{
	for (u32 row = 0; row < s->rows; row++) {
		for (u32 i = 0; i < kvk_int4_row_words(s->cols); i++, data += 4)
			memcpy(data, s->data + word_at(s, row, i), 4);
		for (u32 i = 0; i < s->cols / s->group; i++, scales += 2)
			memcpy(scales, s->scales + scale_at(s, row, i), 2);
	}
}

static void put_same(const struct eng_source *s, void *data, void *scales)
{
	size_t n = (size_t)s->rows * s->cols;

	if (s->dtype == KVK_F32 || s->dtype == KVK_BF16) {
		memcpy(data, s->data, n * (s->dtype == KVK_F32 ? 4 : 2));
	} else if (s->dtype == KVK_E4M3) {
		memcpy(data, s->data, n);
		memcpy(scales, s->scales,
		       (size_t)kvk_fp8_blocks(s->rows) * kvk_fp8_blocks(s->cols) * 4);
	} else if (s->transposed) {
		put_transposed(s, data, scales);
	} else {
		memcpy(data, s->data, n / 2);
		memcpy(scales, s->scales, n / s->group * 2);
	}
}

/* Rows [row, row + nr), all inside one block row of 128. @x: [nr][cols] scratch. */
static int put_rows(const struct eng_source *s, u32 dtype, u32 group, u32 row, u32 nr,
		    float *x, void *data, void *scales)
{
	size_t at = (size_t)row * s->cols, n = (size_t)nr * s->cols;

	eng_source_rows(s, row, nr, x);
	if (dtype == KVK_F32) {
		memcpy((float *)data + at, x, n * 4);
		return 0;
	}
	if (dtype == KVK_BF16) {
		for (size_t i = 0; i < n; i++)
			((u16 *)data)[at + i] = kvk_f32_to_bf16(x[i]);
		return 0;
	}
	if (!eng_all_finite(x, n))
		return -EDOM;
	if (dtype == KVK_E4M3) {
		eng_quant_fp8_rows(x, nr, s->cols, (u8 *)data + at,
				   (float *)scales +
					   kvk_fp8_scale_index(row, 0, s->cols));
		return 0;
	}
	for (u32 r = 0; r < nr; r++)
		eng_quant_int4_row(x + (size_t)r * s->cols, s->cols, group,
				   (u32 *)data +
					   (at + (size_t)r * s->cols) / KVK_INT4_PER_WORD,
				   (u16 *)scales + (at + (size_t)r * s->cols) / group);
	return 0;
}

int eng_source_put_check(const struct eng_source *s, u32 dtype, u32 group,
			 struct eng_err *err)
{
	bool quantised = s->dtype == KVK_INT4 || s->dtype == KVK_E4M3;

	if (dtype == KVK_INT4 && s->dtype != KVK_INT4 &&
	    !kvk_int4_shape_ok(s->cols, group))
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s: rows of %u cannot be quantised in groups of %u",
			s->file, s->name, s->cols, group);
	if (quantised && dtype != s->dtype && dtype != KVK_F32 && dtype != KVK_BF16)
		return eng_refuse(err, -EINVAL, "%s: tensor %.200s is already quantised",
				  s->file, s->name);
	return 0;
}

int eng_source_put(const struct eng_source *s, u32 dtype, u32 group, void *data,
		   void *scales)
{
	u32 nr_blocks = kvk_fp8_blocks(s->rows);
	int result = 0;

	if (s->dtype == dtype) {
		put_same(s, data, scales);
		return 0;
	}
#pragma omp parallel for schedule(dynamic) if (!omp_in_parallel() && nr_blocks > 1)
	for (u32 b = 0; b < nr_blocks; b++) {
		u32 row = b * KVK_FP8_BLOCK, nr = KV_MIN(KVK_FP8_BLOCK, s->rows - row);
		float *x = malloc((size_t)nr * s->cols * sizeof(*x));
		int r = x ? put_rows(s, dtype, group, row, nr, x, data, scales) : -ENOMEM;

		free(x);
		if (r)
#pragma omp atomic write
			result = r;
	}
	return result;
}
