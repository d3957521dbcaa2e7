/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_runtime_api.h - the few CUDA runtime calls that the kernels' tests make, for emul.cc.
 *
 * Found in place of the toolkit's header of this name. C and C++; "device" memory is host
 * memory, a stream has no queue of its own, a graph is the list of its launches.
 */
#ifndef EMUL_CUDA_RUNTIME_API_H
#define EMUL_CUDA_RUNTIME_API_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError {
	cudaSuccess = 0,
	cudaErrorInvalidValue = 1,
	cudaErrorMemoryAllocation = 2
} cudaError_t;
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };

typedef struct emul_stream *cudaStream_t;
typedef struct emul_graph *cudaGraph_t;
typedef struct emul_graph *cudaGraphExec_t;

struct cudaFuncAttributes {
	size_t sharedSizeBytes;
};

cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int *ret_nr);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaMalloc(void **ret_p, size_t bytes);
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes,
		       enum cudaMemcpyKind kind);
cudaError_t cudaMemset(void *p, int value, size_t bytes);
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret_attr,
				  const void *kernel);
cudaError_t cudaStreamCreate(cudaStream_t *ret_stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret_graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret_exec, cudaGraph_t graph,
				 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* EMUL_CUDA_RUNTIME_API_H */
