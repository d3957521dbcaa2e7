/* SPDX-License-Identifier: Apache-2.0 */
/* backend/cuda.h - extents in GPU memory by the driver's VMM calls, without a context. */
#ifndef KVD_BACKEND_CUDA_H
#define KVD_BACKEND_CUDA_H

#include <stdbool.h>

#include "kvmd/backend/backend.h"
#include "kvmd/backend/legacy.h"

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
 * struct kvd_cuda_params - how to start
 * @uuid: 16 bytes, or NULL: the host's only GPU (more than one is -ENODEV, later)
 * @capacity_bytes: most that all extents may hold together; 0: KVD_CUDA_SHARE percent of
 * the device's memory, asked for when the driver is up
 * @extent_bytes: size of every extent; 0 = the core chooses one for each layout
 * @small_extents: from 2 MiB on, as the host backend has them (tests)
 * @legacy: extents by handles, see legacy.h. A pool is one extent, because a handle opens
 *	where the driver wants it: between half of the capacity and all of it, or
 *	@extent_bytes where several pools are to share the GPU
 */
struct kvd_cuda_params {
	const u8 *uuid;
	u64 capacity_bytes;
	u64 extent_bytes;
	bool small_extents;
	bool legacy;
};

#define KVD_CUDA_SHARE 90

/**
 * struct kvd_cuda_info - what the driver said; valid when READY
 */
struct kvd_cuda_info {
	u8 uuid[16];
	char name[64];
	u64 total_bytes;
	int driver_version; /* 1000 * major + 10 * minor of the CUDA it speaks */
};

/**
 * kvd_cuda_create() - the backend of one GPU; returns at once, the driver starts in a
 * thread
 * @ret_backend: kvd_cuda_destroy() it when no extent is left
 *
 * GPUs are matched by UUID, never by ordinal (cases O10). Nothing here makes a context:
 * kvmd takes no GPU time and no context memory (facts F-ctx, F-slice).
 *
 * Return: 0; -ENOENT, -ENOSYS as kvd_cuda_probe(); -ENOMEM; -EMFILE; -EAGAIN no thread.
 */
int kvd_cuda_create(const struct kvd_cuda_params *params,
		    struct kvd_backend **ret_backend);

/** kvd_cuda_event_fd() - becomes readable, for good, when the state leaves STARTING */
int kvd_cuda_event_fd(const struct kvd_backend *backend);

/** kvd_cuda_destroy() - or NULL; asserts that no extent is left; waits for the start
 * thread, 2 s at most: then it and what it uses stay until the process ends */
void kvd_cuda_destroy(struct kvd_backend *backend);

enum kvd_cuda_state kvd_cuda_state(const struct kvd_backend *backend);

/** kvd_cuda_get_info() - valid when READY */
const struct kvd_cuda_info *kvd_cuda_get_info(const struct kvd_backend *backend);

/** kvd_cuda_error() - one line when FAILED, else "" */
const char *kvd_cuda_error(const struct kvd_backend *backend);

/** kvd_cuda_no_export() - FAILED because the device does not export memory by descriptor;
 * cuda-legacy may work */
bool kvd_cuda_no_export(const struct kvd_backend *backend);

/** kvd_cuda_legacy_source() - who makes the memory of cuda-legacy, once */
void kvd_cuda_legacy_source(struct kvd_backend *backend,
			    const struct kvd_legacy_source *source);

/** kvd_cuda_legacy_alloced() - the source's answer; @handle: 64 bytes when @result is 0 */
void kvd_cuda_legacy_alloced(struct kvd_backend *backend, u64 id, int result,
			     const u8 *handle);

/** kvd_cuda_no_device() - FAILED because no GPU is here, not because one is out of order */
bool kvd_cuda_no_device(const struct kvd_backend *backend);

/** kvd_cuda_used() - bytes of all extents that exist */
u64 kvd_cuda_used(const struct kvd_backend *backend);

#endif
