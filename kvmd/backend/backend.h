/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend/backend.h - where page memory comes from: one ops table per kind of memory.
 *
 * An extent is one device allocation: the unit of export, mapping and isolation. The core
 * asks for whole extents and never looks at their bytes. `host` gives sealed memfds; the
 * CUDA backends give cuMemCreate handles with a POSIX fd, or legacy handles.
 *
 * All hooks are mandatory; kvd_backend_check() asserts it once at start. They are called
 * from the loop thread only and must not call back into the core.
 */
#ifndef KVD_BACKEND_H
#define KVD_BACKEND_H

#include <stdbool.h>

#include "base/assert.h"
#include "base/util.h"
#include "kv/abi.h"

struct kvd_backend;

/**
 * struct kvd_extent_handle - what a backend knows about one extent
 * @fd: given to sessions by SCM_RIGHTS; owned by the backend until extent_free(); -1 =
 * none
 * @addr: CPU address if the backend mapped it (tests of the host backend), else NULL
 * @cookie: backend's own
 */
struct kvd_extent_handle {
	int fd;
	void *addr;
	u64 cookie;
};

/**
 * struct kvd_backend_limits - geometry the core must stay inside
 * @kind: KV_BACKEND_*
 * @extent_min_bytes: smallest extent
 * @extent_max_bytes: largest extent
 * @extent_align_bytes: extent sizes are a multiple of this (power of two)
 * @capacity_bytes: all extents together; a pool never asks for more
 */
struct kvd_backend_limits {
	u32 kind;
	u64 extent_min_bytes;
	u64 extent_max_bytes;
	u64 extent_align_bytes;
	u64 capacity_bytes;
};

/**
 * struct kvd_backend_ops - hooks of a backend
 * @name: "host", "cuda", "cuda-legacy"
 * @extent_alloc: create an extent of @size_bytes, zeroed by the driver or kernel. Return:
 *	0; -ENOMEM no memory left (the core answers KV_FULL); -EMFILE; -EAGAIN the backend is
 *	not ready yet (the core answers KV_PENDING); -EIO the device failed. On failure nothing
 *	is left
 * @extent_free: release it to the driver. Every session has unmapped it or is dead.
 *	Cannot fail
 * @limits: geometry; constant for the life of the backend
 * @extent_adopt: NULL, or take over an extent that an earlier kvmd made: @fd is the
 *	handle's on success. Return: 0; -errno it is not such an extent
 */
struct kvd_backend_ops {
	const char *name;
	int (*extent_alloc)(struct kvd_backend *be, u64 size_bytes,
			    struct kvd_extent_handle *ret_handle);
	void (*extent_free)(struct kvd_backend *be, struct kvd_extent_handle *handle,
			    u64 size_bytes);
	void (*limits)(struct kvd_backend *be, struct kvd_backend_limits *ret_limits);
	int (*extent_adopt)(struct kvd_backend *be, int fd, u64 size_bytes,
			    struct kvd_extent_handle *ret_handle);
};

/**
 * struct kvd_backend - embedded first in each backend's own object
 * @ops: hooks
 */
struct kvd_backend {
	const struct kvd_backend_ops *ops;
};

/* A pool is one extent, there from its first opening to its last closing: its address is
 * not ours to choose. */
static inline bool kvd_backend_one_extent(const struct kvd_backend_limits *limits)
{
	return limits->kind == KV_BACKEND_CUDA_LEGACY;
}

static inline void kvd_backend_check(const struct kvd_backend *be)
{
	kv_assert(be->ops->name && be->ops->extent_alloc && be->ops->extent_free);
	kv_assert(be->ops->limits);
}

#endif /* KVD_BACKEND_H */
