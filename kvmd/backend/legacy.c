/* SPDX-License-Identifier: Apache-2.0 */
/* backend/legacy.c - see legacy.h. */
#include "kvmd/backend/legacy.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvmd/backend/memfd.h"
#include "kvmd/dbg/fault.h"

static void forget_ready(struct kvd_legacy *l)
{
	if (!l->ready)
		return;
	close(l->ready_fd);
	l->source.free(l->source.arg, l->ready);
	l->ready = 0;
}

int kvd_legacy_alloc(struct kvd_legacy *l, u64 size_bytes,
		     struct kvd_extent_handle *ret_handle)
{
	int r = l->result;

	if (kvd_fault(KVD_FAULT_extent_alloc))
		return -ENOMEM;
	l->result = 0;
	if (r)
		return r;
	if (l->ready && l->ready_bytes != size_bytes)
		forget_ready(l); /* the pool it was for has gone */
	if (l->ready) {
		*ret_handle =
			(struct kvd_extent_handle){.fd = l->ready_fd, .cookie = l->ready};
		l->ready = 0;
		return 0;
	}
	if (l->pending || !l->source.alloc)
		return -EAGAIN;
	r = l->source.alloc(l->source.arg, l->next_id + 1, size_bytes);
	if (r < 0)
		return r;
	if (!r) {
		l->pending = ++l->next_id;
		l->pending_bytes = size_bytes;
	}
	return -EAGAIN;
}

/* The file that stands for the extent. Sealed against writing: all sessions get it. */
static int make_descriptor(const struct kv_legacy_extent *e, int *ret_fd)
{
	void *addr;
	int fd, r;

	r = kvd_memfd_create("kvmd-legacy", sizeof(*e), KVD_MEMFD_TABLE, &addr, &fd);
	if (r)
		return r;
	memcpy(addr, e, sizeof(*e));
	munmap(addr, kv_round_up(sizeof(*e), 4096));
	*ret_fd = fd;
	return 0;
}

void kvd_legacy_alloced(struct kvd_legacy *l, const u8 *gpu_uuid, u64 id, int result,
			const u8 *handle)
{
	struct kv_legacy_extent e = {.magic = KV_LEGACY_MAGIC, .id = id};

	if (id != l->pending)
		return;
	e.size_bytes = l->pending_bytes;
	l->pending = 0;
	if (!result) {
		memcpy(e.gpu_uuid, gpu_uuid, sizeof(e.gpu_uuid));
		memcpy(e.handle, handle, sizeof(e.handle));
		result = make_descriptor(&e, &l->ready_fd);
		if (result)
			l->source.free(l->source.arg, id);
	}
	if (result) {
		l->result = result;
		return;
	}
	l->ready = id;
	l->ready_bytes = e.size_bytes;
}

void kvd_legacy_free(struct kvd_legacy *l, struct kvd_extent_handle *handle)
{
	close(handle->fd);
	handle->fd = -1;
	l->source.free(l->source.arg, handle->cookie);
}

void kvd_legacy_fini(struct kvd_legacy *l)
{
	forget_ready(l);
}
