/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor_map.cuh - the driver's entry point that makes tensor maps, for launchers. Looked up
 * at run time, so that nothing links against the driver. Host code; any thread.
 */
#ifndef KVK_TENSOR_MAP_CUH
#define KVK_TENSOR_MAP_CUH

#include <cuda.h>
#include <cuda_runtime.h>

typedef CUresult (*tensor_encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t,
				     void *, const cuuint64_t *, const cuuint64_t *,
				     const cuuint32_t *, const cuuint32_t *,
				     CUtensorMapInterleave, CUtensorMapSwizzle,
				     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Return: cuTensorMapEncodeTiled, or NULL: this driver has none */
static inline tensor_encode_fn tensor_encode_find(void)
{
	cudaDriverEntryPointQueryResult found;
	void *fn = NULL;

	if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000,
					     cudaEnableDefault, &found) != cudaSuccess ||
	    found != cudaDriverEntryPointSuccess) {
		(void)cudaGetLastError();
		return NULL;
	}
	return (tensor_encode_fn)fn;
}

#endif /* KVK_TENSOR_MAP_CUH */
