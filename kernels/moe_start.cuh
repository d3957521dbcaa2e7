/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_start.cuh - launch a kernel of one argument block early (programmatic dependent launch):
 * its start hides behind the kernel before.
 */
#ifndef KVK_MOE_START_CUH
#define KVK_MOE_START_CUH

#include <cuda_runtime.h>
#include <errno.h>

/* @shared: dynamic, in bytes. 0 or -EIO. */
template <typename A>
static int moe_start(void (*kernel)(A), dim3 grid, uint32_t threads, uint32_t shared,
		     const A *a, void *stream)
{
	cudaLaunchAttribute attr[1] = {};
	cudaLaunchConfig_t cfg = {};

	if (shared &&
	    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)shared))
		return -EIO;
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = grid;
	cfg.blockDim = dim3(threads);
	cfg.dynamicSmemBytes = shared;
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = 1;
	return cudaLaunchKernelEx(&cfg, kernel, *a) ? -EIO : 0;
}

/* SMs of the current device; 0: it cannot be asked */
static inline uint32_t moe_sms(void)
{
	int dev, sms;

	if (cudaGetDevice(&dev) ||
	    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev))
		return 0;
	return (uint32_t)sms;
}

#endif /* KVK_MOE_START_CUH */
