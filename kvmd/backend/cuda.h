/* SPDX-License-Identifier: Apache-2.0 */
/* backend/cuda.h - extents in GPU memory by the driver's VMM calls, without a context. */
#ifndef KVD_BACKEND_CUDA_H
#define KVD_BACKEND_CUDA_H

#include "kvmd/backend/backend.h"

/** enum kvd_cuda_state - cuInit takes 0.2 s and runs beside the loop */
enum kvd_cuda_state {
	KVD_CUDA_STARTING = 0, /* extent_alloc answers -EAGAIN */
	KVD_CUDA_READY = 1,
	KVD_CUDA_FAILED = 2, /* extent_alloc answers -EIO; kvd_cuda_error() says why */
};

/**
 * kvd_cuda_probe() - is there a driver that may have devices?
 * @error: @error_bytes; why not
 *
 * Loads the driver, calls nothing in it. Return: 0; -ENOENT no driver; -ENOSYS too old a
 * one.
 */
int kvd_cuda_probe(char *error, size_t error_bytes);

/**
 * kvd_cuda_create() - the backend of one GPU; returns at once, the driver starts in a
 *thread
 * @uuid: 16 bytes, or NULL: the host's only GPU (more than one is -ENODEV, later)
 * @capacity_bytes: most that all extents may hold together
 * @ret_backend: kvd_cuda_destroy() it when no extent is left
 *
 * GPUs are matched by UUID, never by ordinal (cases O10). Nothing here makes a context:
 *kvmd takes no GPU time and no context memory (facts F-ctx, F-slice).
 *
 * Return: 0; -ENOENT, -ENOSYS as kvd_cuda_probe(); -EINVAL no capacity; -ENOMEM; -EAGAIN
 *no thread.
 */
int kvd_cuda_create(const u8 *uuid, u64 capacity_bytes, struct kvd_backend **ret_backend);

/** kvd_cuda_destroy() - or NULL; asserts that no extent is left; waits for the start
 * thread */
void kvd_cuda_destroy(struct kvd_backend *backend);

/** kvd_cuda_state() - @ret_uuid: 16 bytes, valid when READY; may be NULL */
enum kvd_cuda_state kvd_cuda_state(struct kvd_backend *backend, u8 *ret_uuid);

/** kvd_cuda_error() - one line when FAILED, else "" */
const char *kvd_cuda_error(struct kvd_backend *backend);

/** kvd_cuda_used() - bytes of all extents that exist */
u64 kvd_cuda_used(const struct kvd_backend *backend);

#endif
