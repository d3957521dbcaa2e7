/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend/host.c - an extent is a sealed memfd with all its pages allocated.
 *
 * fallocate() at creation makes a lack of memory an error here instead of a SIGBUS in the
 * process that touches the page first (cases O33), and charges the pages to the daemon's
 * memory cgroup, not to an engine's. kvmd never maps an extent.
 */
#include "kvmd/backend/host.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvmd/backend/memfd.h"
#include "kvmd/dbg/fault.h"

#define EXTENT_ALIGN_BYTES (2ull << 20)
#define EXTENT_MAX_BYTES   (1ull << 30)

struct host {
	struct kvd_backend be;
	u64 capacity_bytes;
	u64 extent_bytes; /* 0 = any */
	u64 used_bytes;
	u64 nr_made;
};

static struct host *host_of(const struct kvd_backend *be)
{
	return kv_container_of(be, struct host, be);
}

/*
 * "MemTotal:   123 kB". Not MemAvailable: a pool's geometry follows from the capacity, and a
 * restarted daemon has to come to the same one.
 */
static u64 meminfo_total(void)
{
	unsigned long long kb = 0;
	char line[128];
	FILE *f = fopen("/proc/meminfo", "re");

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "MemTotal: %llu kB", &kb) == 1)
			break;
	if (f)
		fclose(f);
	return (u64)kb << 10;
}

static u64 cgroup_limit(void)
{
	char path[320], line[256], value[64];
	unsigned long long v = ~0ull;
	FILE *f = fopen("/proc/self/cgroup", "re");

	path[0] = 0;
	while (f && fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, "0::", 3))
			snprintf(path, sizeof(path), "/sys/fs/cgroup%s/memory.max",
				 line + 3);
	}
	if (f)
		fclose(f);
	f = path[0] ? fopen(path, "re") : NULL;
	if (f && fgets(value, sizeof(value), f) && strncmp(value, "max", 3))
		v = strtoull(value, NULL, 10);
	if (f)
		fclose(f);
	return v;
}

static int host_extent_alloc(struct kvd_backend *be, u64 size_bytes,
			     struct kvd_extent_handle *ret_handle)
{
	struct host *host = host_of(be);
	char name[32];
	int fd, r;

	kv_assert(size_bytes && size_bytes % EXTENT_ALIGN_BYTES == 0);
	kv_assert(size_bytes <= EXTENT_MAX_BYTES);
	/* More may be used than there is now: adopted by a kvmd with a smaller limit. */
	if (host->used_bytes + size_bytes > host->capacity_bytes)
		return -ENOMEM;
	if (kvd_fault(KVD_FAULT_extent_alloc))
		return -ENOMEM;
	snprintf(name, sizeof(name), "kvmd-extent-%llu",
		 (unsigned long long)host->nr_made);
	r = kvd_memfd_create(name, size_bytes, KVD_MEMFD_SIZE, NULL, &fd);
	if (r)
		return r == -ENFILE ? -EMFILE : r;
	do {
		r = fallocate(fd, 0, 0, (off_t)size_bytes) ? -errno : 0;
	} while (r == -EINTR);
	if (r) {
		close(fd);
		return r == -ENOSPC ? -ENOMEM : r;
	}
	host->used_bytes += size_bytes;
	host->nr_made++;
	*ret_handle = (struct kvd_extent_handle){.fd = fd, .cookie = host->nr_made};
	return 0;
}

static int host_extent_adopt(struct kvd_backend *be, int fd, u64 size_bytes,
			     struct kvd_extent_handle *ret_handle)
{
	struct host *host = host_of(be);
	struct stat st;

	if (fstat(fd, &st))
		return -errno;
	if ((u64)st.st_size != size_bytes)
		return -EBADMSG;
	host->used_bytes += size_bytes;
	host->nr_made++;
	*ret_handle = (struct kvd_extent_handle){.fd = fd, .cookie = host->nr_made};
	return 0;
}

static void host_extent_free(struct kvd_backend *be, struct kvd_extent_handle *handle,
			     u64 size_bytes)
{
	struct host *host = host_of(be);

	kv_assert(handle->fd >= 0 && host->used_bytes >= size_bytes);
	close(handle->fd);
	handle->fd = -1;
	host->used_bytes -= size_bytes;
}

static void host_limits(struct kvd_backend *be, struct kvd_backend_limits *ret_limits)
{
	u64 fixed = host_of(be)->extent_bytes;

	*ret_limits = (struct kvd_backend_limits){
		.kind = KV_BACKEND_HOST,
		.extent_min_bytes = fixed ? fixed : EXTENT_ALIGN_BYTES,
		.extent_max_bytes = fixed ? fixed : EXTENT_MAX_BYTES,
		.extent_align_bytes = EXTENT_ALIGN_BYTES,
		.capacity_bytes = host_of(be)->capacity_bytes,
	};
}

static const struct kvd_backend_ops host_ops = {
	.name = "host",
	.extent_alloc = host_extent_alloc,
	.extent_free = host_extent_free,
	.limits = host_limits,
	.extent_adopt = host_extent_adopt,
};

int kvd_host_create(u64 capacity_bytes, u64 extent_bytes,
		    struct kvd_backend **ret_backend)
{
	struct host *host = calloc(1, sizeof(*host));

	if (!host)
		return -ENOMEM;
	if (!capacity_bytes)
		capacity_bytes = KV_MIN(meminfo_total(), cgroup_limit()) / 2;
	host->be.ops = &host_ops;
	host->extent_bytes = extent_bytes;
	host->capacity_bytes = capacity_bytes & ~(EXTENT_ALIGN_BYTES - 1);
	kvd_backend_check(&host->be);
	*ret_backend = &host->be;
	return 0;
}

void kvd_host_destroy(struct kvd_backend *backend)
{
	struct host *host;

	if (!backend)
		return;
	host = host_of(backend);
	kv_assert(!host->used_bytes);
	free(host);
}

u64 kvd_host_used(const struct kvd_backend *backend)
{
	return host_of(backend)->used_bytes;
}
