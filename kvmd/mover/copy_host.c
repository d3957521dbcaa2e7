/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover/copy_host.c - copies between memfds: the host backend's mover.
 *
 * A copy is done when copy() returns, so that marks are done as soon as they are set; the
 * mover's loop looks at its socket between runs, which are at most 32 MiB long.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "kvmd/mover/copy.h"

static int host_open(struct kvd_copier *c, const u8 *gpu_uuid, char *text)
{
	return 0;
}

static int host_pool(struct kvd_copier *c, void *addr, u64 bytes, char *text)
{
	return 0;
}

static int host_map(struct kvd_copier *c, int fd, u64 bytes, u64 *ret_at)
{
	struct stat st;
	void *p;

	/* A file shorter than its mapping is a SIGBUS in the middle of a copy. */
	if (fstat(fd, &st))
		return -errno;
	if ((u64)st.st_size < bytes)
		return -EINVAL;
	p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		return -errno;
	*ret_at = (u64)(uintptr_t)p;
	return 0;
}

static int host_unmap(struct kvd_copier *c, u64 at, u64 bytes)
{
	return munmap((void *)(uintptr_t)at, bytes) ? -errno : 0;
}

static int host_copy(struct kvd_copier *c, u32 stream, u64 at, void *pool_addr, u64 bytes,
		     bool in)
{
	void *extent = (void *)(uintptr_t)at;

	if (in)
		memcpy(extent, pool_addr, bytes);
	else
		memcpy(pool_addr, extent, bytes);
	return 0;
}

static int host_issue(struct kvd_copier *c, u32 stream)
{
	return 0;
}

static int host_mark(struct kvd_copier *c, u32 stream, u32 group)
{
	return 0;
}

static int host_query(struct kvd_copier *c, u32 stream, u32 group)
{
	return 1;
}

static int host_alloc(struct kvd_copier *c, u64 id, u64 bytes, u8 *ret_handle, char *text)
{
	return -EOPNOTSUPP;
}

static int host_free(struct kvd_copier *c, u64 id)
{
	return -EOPNOTSUPP;
}

static const struct kvd_copy_ops host_ops = {
	.open = host_open,
	.pool = host_pool,
	.map = host_map,
	.unmap = host_unmap,
	.copy = host_copy,
	.issue = host_issue,
	.mark = host_mark,
	.query = host_query,
	.alloc = host_alloc,
	.free = host_free,
};

struct kvd_copier *kvd_copier_host(void)
{
	struct kvd_copier *c = calloc(1, sizeof(*c));

	if (c)
		c->ops = &host_ops;
	return c;
}
