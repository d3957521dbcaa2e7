/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.h - in place of the toolkit's: a tensor map is what hopper_encode() was given. Up to
 * three dimensions, boxes of rows of 128 bytes, 128-byte swizzle.
 */
#ifndef HOPPER_CUDA_H
#define HOPPER_CUDA_H

#include <stdint.h>

typedef enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 } CUresult;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef enum {
	CU_TENSOR_MAP_DATA_TYPE_UINT8,
	CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
} CUtensorMapDataType;
typedef enum { CU_TENSOR_MAP_INTERLEAVE_NONE } CUtensorMapInterleave;
typedef enum { CU_TENSOR_MAP_SWIZZLE_128B } CUtensorMapSwizzle;
typedef enum { CU_TENSOR_MAP_L2_PROMOTION_L2_256B } CUtensorMapL2promotion;
typedef enum { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE } CUtensorMapFloatOOBfill;

struct alignas(64) CUtensorMap {
	const uint8_t *base;
	uint64_t row_bytes, rows, batch;
	uint64_t row_stride, batch_stride; /* bytes */
	uint32_t nr_dims, value_bytes, box_rows, box_batch;
	uint32_t unused[17];
};

CUresult hopper_encode(CUtensorMap *map, CUtensorMapDataType, cuuint32_t nr_dims,
		       void *base, const cuuint64_t *dims, const cuuint64_t *strides,
		       const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave,
		       CUtensorMapSwizzle, CUtensorMapL2promotion,
		       CUtensorMapFloatOOBfill);

#endif /* HOPPER_CUDA_H */
