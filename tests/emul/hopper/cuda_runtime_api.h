/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_runtime_api.h - the calls that tests of kernels make to the CUDA runtime, where device
 * memory is host memory and a launch runs at once (machine.cc). C. Found in place of the
 * toolkit's header of this name.
 */
#ifndef HOPPER_CUDA_RUNTIME_API_H
#define HOPPER_CUDA_RUNTIME_API_H

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef enum cudaError { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 } cudaError_t;
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };

/* Aligned as a device's memory is; NaN in every dtype until somebody writes. */
static inline cudaError_t cudaMalloc(void **ret_p, size_t bytes)
{
	const size_t room = (bytes + 255) / 256 * 256;

	*ret_p = aligned_alloc(256, room);
	if (!*ret_p)
		return cudaErrorMemoryAllocation;
	memset(*ret_p, 0xff, room);
	return cudaSuccess;
}

static inline cudaError_t cudaFree(void *p)
{
	free(p);
	return cudaSuccess;
}

static inline cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes,
				     enum cudaMemcpyKind kind)
{
	(void)kind;
	memcpy(dst, src, bytes);
	return cudaSuccess;
}

static inline cudaError_t cudaMemset(void *p, int value, size_t bytes)
{
	memset(p, value, bytes);
	return cudaSuccess;
}

static inline cudaError_t cudaGetDeviceCount(int *ret_nr)
{
	*ret_nr = 1;
	return cudaSuccess;
}

static inline cudaError_t cudaDeviceSynchronize(void)
{
	return cudaSuccess;
}

static inline const char *cudaGetErrorString(cudaError_t error)
{
	return error == cudaErrorMemoryAllocation ? "out of memory" : "no error";
}

#endif /* HOPPER_CUDA_RUNTIME_API_H */
