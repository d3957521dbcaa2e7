/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor.h - tensor maps and what a copy by one puts into shared memory, for machine.cc, which
 * knows when.
 */
#ifndef HOPPER_TENSOR_H
#define HOPPER_TENSOR_H

#include "ptx.h"

CUresult hopper_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t nr_dims,
		       void *base, const cuuint64_t *dims, const cuuint64_t *strides,
		       const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave,
		       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
		       CUtensorMapFloatOOBfill)
{
	const uint32_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 1;

	const uint32_t row = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 64;

	if ((uintptr_t)base % 16 || nr_dims < 3 || nr_dims > 5 || box[0] * bytes != row)
		return CUDA_ERROR_INVALID_VALUE;
	map->base = (const uint8_t *)base;
	map->nr_dims = nr_dims;
	map->value_bytes = bytes;
	for (cuuint32_t i = 0; i < 5; i++) {
		map->dims[i] = i < nr_dims ? (uint32_t)dims[i] * (i ? 1 : bytes) : 1;
		if (i < 3)
			map->box[i] = box[i] * (i ? 1 : bytes);
		if (i >= nr_dims)
			continue;
		if (!box[i] || box[i] > 256 || (i > 2 && box[i] != 1) ||
		    (i && strides[i - 1] % 16))
			return CUDA_ERROR_INVALID_VALUE;
		if (i)
			map->strides[i - 1] = strides[i - 1];
	}
	return CUDA_SUCCESS;
}

static uint32_t tensor_box_bytes(const CUtensorMap *m)
{
	return m->box[0] * m->box[1] * m->box[2];
}

/*
 * A box from @at on (the first in bytes): piece c of 16 bytes of row r at c ^ (r & 7), in rows of
 * 64 bytes at c ^ (r / 2 & 3); zeros outside the tensor.
 */
static void tensor_box(const CUtensorMap *m, uint8_t *shared, const uint64_t (&at)[5])
{
	const uint32_t pieces = m->box[0] / 16;

	for (uint32_t i = 0; i < tensor_box_bytes(m) / 16; i++) {
		const uint32_t r = i / pieces, piece = i % pieces;
		const uint64_t x[5] = {at[0] + piece * 16, at[1] + r % m->box[1],
				       at[2] + r / m->box[1], at[3], at[4]};
		const uint32_t turn = pieces == 8 ? r & 7 : r / 2 & 3;
		uint8_t *dst = shared + r * m->box[0] + (piece ^ turn) * 16;
		bool in = x[0] + 16 <= m->dims[0];
		uint64_t from = x[0];

		for (uint32_t k = 1; k < m->nr_dims; k++) {
			in &= x[k] < m->dims[k];
			from += x[k] * m->strides[k - 1];
		}
		memset(dst, 0, 16);
		if (in)
			memcpy(dst, m->base + from, 16);
	}
}

#endif /* HOPPER_TENSOR_H */
