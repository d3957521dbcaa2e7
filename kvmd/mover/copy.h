/* SPDX-License-Identifier: Apache-2.0 */
/* mover/copy.h - how the mover copies: one ops table, for memfds and for a GPU. */
#ifndef KVD_MOVER_COPY_H
#define KVD_MOVER_COPY_H

#include <stdbool.h>

#include "kvmd/mover/wire.h"

#define KVD_MV_STREAMS 4u  /* two a direction: the next job's copies wait in the driver */
#define KVD_MV_GROUPS  64u /* completion marks a stream may have out */

struct kvd_copier;

/**
 * struct kvd_copy_ops - all mandatory; alloc and free on cuda-legacy only
 * @open: context, streams, marks. Return: 0; -errno and @text (128 bytes) says why
 * @pool: pin the host pool
 * @map: @fd stays the caller's. @ret_at: the extent's address
 * @unmap: nothing touches it any more
 * @copy: one run on a stream, not waiting; @pool_addr in the host pool. It may be gathered
 *	with others until
 * @issue: what copy() has gathered goes to the device. Return: 0; -errno of one of them, any
 *	part of them is on its way
 * @mark: @group becomes done when everything before it on @stream is
 * @query: Return: 1 done; 0 not yet; -errno: the device is of no use any more
 * @alloc: memory of this process; @ret_handle: 64 bytes
 */
struct kvd_copy_ops {
	int (*open)(struct kvd_copier *c, const u8 *gpu_uuid, char *text);
	int (*pool)(struct kvd_copier *c, void *addr, u64 bytes, char *text);
	int (*map)(struct kvd_copier *c, int fd, u64 bytes, u64 *ret_at);
	int (*unmap)(struct kvd_copier *c, u64 at, u64 bytes);
	int (*copy)(struct kvd_copier *c, u32 stream, u64 at, void *pool_addr, u64 bytes,
		    bool in);
	int (*issue)(struct kvd_copier *c, u32 stream);
	int (*mark)(struct kvd_copier *c, u32 stream, u32 group);
	int (*query)(struct kvd_copier *c, u32 stream, u32 group);
	int (*alloc)(struct kvd_copier *c, u64 id, u64 bytes, u8 *ret_handle, char *text);
	int (*free)(struct kvd_copier *c, u64 id);
};

/** struct kvd_copier - embedded first in each kind's own object */
struct kvd_copier {
	const struct kvd_copy_ops *ops;
};

/** kvd_copier_host(), kvd_copier_cuda() - NULL: no memory. They live as long as the
 * process */
struct kvd_copier *kvd_copier_host(void);
struct kvd_copier *kvd_copier_cuda(bool legacy);

#endif
