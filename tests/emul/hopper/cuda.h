/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.h - in place of the toolkit's: a tensor map is what hopper_encode() was given. Boxes are
 * rows of 128 bytes with the 128-byte swizzle, or of 64 with that of 64.
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
typedef enum { CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B } CUtensorMapSwizzle;
typedef enum { CU_TENSOR_MAP_L2_PROMOTION_L2_256B } CUtensorMapL2promotion;
typedef enum { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE } CUtensorMapFloatOOBfill;

struct alignas(64) CUtensorMap {
	const uint8_t *base;
	uint32_t dims[5];    /* of the first: bytes */
	uint32_t box[3];     /* the same; 1 of further ones */
	uint64_t strides[4]; /* bytes */
	uint32_t nr_dims, value_bytes;
	uint32_t unused[12];
};

CUresult hopper_encode(CUtensorMap *map, CUtensorMapDataType, cuuint32_t nr_dims,
		       void *base, const cuuint64_t *dims, const cuuint64_t *strides,
		       const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave,
		       CUtensorMapSwizzle, CUtensorMapL2promotion,
		       CUtensorMapFloatOOBfill);

#endif /* HOPPER_CUDA_H */
