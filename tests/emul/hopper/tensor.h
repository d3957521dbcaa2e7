/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor.h - tensor maps and what a copy by one puts into shared memory, for machine.cc, which
 * knows when.
 */
#ifndef HOPPER_TENSOR_H
#define HOPPER_TENSOR_H

#include "ptx.h"

enum { BOX = 128 }; /* bytes of a row */

CUresult hopper_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t nr_dims,
		       void *base, const cuuint64_t *dims, const cuuint64_t *strides,
		       const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave,
		       CUtensorMapSwizzle, CUtensorMapL2promotion,
		       CUtensorMapFloatOOBfill)
{
	const uint32_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 1;

	if ((uintptr_t)base % 16 || nr_dims < 3 || nr_dims > 5 || box[0] * bytes != BOX ||
	    !box[1] || box[1] > 256 || !box[2] || box[2] > 256)
		return CUDA_ERROR_INVALID_VALUE;
	for (cuuint32_t i = 1; i < nr_dims; i++)
		if (strides[i - 1] % 16 || (i > 2 && box[i] != 1) ||
		    (i > 2 && dims[i] != 1))
			return CUDA_ERROR_INVALID_VALUE;
	map->base = (const uint8_t *)base;
	map->row_bytes = dims[0] * bytes;
	map->rows = dims[1];
	map->batch = dims[2];
	map->row_stride = strides[0];
	map->batch_stride = strides[1];
	map->nr_dims = nr_dims;
	map->value_bytes = bytes;
	map->box_rows = box[1];
	map->box_batch = box[2];
	return CUDA_SUCCESS;
}

/* A box: piece c of 16 bytes of row r at c ^ (r & 7); zeros outside the tensor. @first: bytes */
static void tensor_box(const CUtensorMap *m, uint8_t *shared, uint64_t first,
		       uint64_t row, uint64_t batch)
{
	for (uint32_t i = 0; i < m->box_batch * m->box_rows * 8; i++) {
		const uint64_t at = i / 8, r = row + at % m->box_rows;
		const uint64_t b = batch + at / m->box_rows;
		const uint64_t piece = i % 8, col = first + piece * 16;
		uint8_t *dst = shared + at * BOX + (piece ^ (at & 7)) * 16;

		memset(dst, 0, 16);
		if (r < m->rows && b < m->batch && col + 16 <= m->row_bytes)
			memcpy(dst,
			       m->base + b * m->batch_stride + r * m->row_stride + col,
			       16);
	}
}

#endif /* HOPPER_TENSOR_H */
