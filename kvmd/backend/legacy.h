/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend/legacy.h - extents of cuda-legacy: memory that a process with a context makes
 * by cuMemAlloc and that others open by a handle (facts F-legacy).
 *
 * For drivers and containers where memory cannot be exported as a descriptor. What is
 * passed to sessions is a descriptor all the same: of a sealed file with the handle in it
 * (struct kv_legacy_extent), so that all else is as with real ones. The memory is the
 * mover's: it dies with that process and with kvmd, and whoever has the handle can open
 * it until it is freed, so that one host has one domain.
 *
 * Making one takes milliseconds in another process: the first call starts it and answers
 * -EAGAIN, a later one gets it. Loop thread only.
 */
#ifndef KVD_BACKEND_LEGACY_H
#define KVD_BACKEND_LEGACY_H

#include "kvmd/backend/backend.h"

/**
 * struct kvd_legacy_source - who makes the memory
 * @alloc: begin; kvd_legacy_alloced() follows. Return: 0; KV_BUSY; -errno
 * @free: nobody has it open. An unknown id is ignored
 */
struct kvd_legacy_source {
	void *arg;
	int (*alloc)(void *arg, u64 id, u64 bytes);
	void (*free)(void *arg, u64 id);
};

/**
 * struct kvd_legacy - one GPU's
 * @source: .alloc NULL until the daemon has one
 * @pending, @pending_bytes: id under way; 0 none
 * @ready: id that waits to be taken, its descriptor in @ready_fd
 * @result: of the last one that failed, for the next call
 */
struct kvd_legacy {
	struct kvd_legacy_source source;
	u64 next_id;
	u64 pending, pending_bytes;
	u64 ready, ready_bytes;
	int ready_fd;
	int result;
};

/** kvd_legacy_alloc() - extent_alloc() of the backend. Return: as that */
int kvd_legacy_alloc(struct kvd_legacy *l, u64 size_bytes,
		     struct kvd_extent_handle *ret_handle);

/** kvd_legacy_alloced() - the source's answer */
void kvd_legacy_alloced(struct kvd_legacy *l, const u8 *gpu_uuid, u64 id, int result,
			const u8 *handle);

/** kvd_legacy_free() - extent_free() of the backend */
void kvd_legacy_free(struct kvd_legacy *l, struct kvd_extent_handle *handle);

/** kvd_legacy_fini() - give back what nobody took */
void kvd_legacy_fini(struct kvd_legacy *l);

#endif
