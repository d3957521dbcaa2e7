/* SPDX-License-Identifier: Apache-2.0 */
/* backend/host.h - extents in ordinary memory, for hosts without a GPU and for tests. */
#ifndef KVD_BACKEND_HOST_H
#define KVD_BACKEND_HOST_H

#include "kvmd/backend/backend.h"

/**
 * kvd_host_create() - the host backend
 * @capacity_bytes: most that all extents may hold together; 0: half of the memory that
 *	this process may use (machine and memory cgroup)
 * @extent_bytes: size of every extent; 0 = the core chooses one for each layout
 * @ret_backend: kvd_host_destroy() it when no extent is left
 *
 * Return: 0; -ENOMEM.
 */
int kvd_host_create(u64 capacity_bytes, u64 extent_bytes,
		    struct kvd_backend **ret_backend);

/** kvd_host_destroy() - free the backend, or NULL; asserts that no extent is left */
void kvd_host_destroy(struct kvd_backend *backend);

/** kvd_host_used() - bytes of all extents that exist */
u64 kvd_host_used(const struct kvd_backend *backend);

#endif
