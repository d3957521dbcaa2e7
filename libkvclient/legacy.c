/* SPDX-License-Identifier: Apache-2.0 */
/*
 * legacy.c - extents of backend cuda-legacy: the descriptor that kvmd sends is a file with
 * a handle in it, and the driver says where the memory appears (facts F-legacy).
 *
 * A pool is one extent, so that its page addresses are still one row. The memory dies with
 * kvmd's mover: after a lost connection the pool does not come back (-ESHUTDOWN).
 *
 * Lock: kvc.lock (2 in internal.h).
 */
#include "internal.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/** kvc_legacy_check() - the reply's geometry is one extent. Return: 0; -EPROTO */
int kvc_legacy_check(const struct kv_geometry *g)
{
	if (g->nr_pages == 1ull << g->shift)
		return 0;
	return kvc_fail(-EPROTO,
			"geometry: %u pages in extents of %llu: cuda-legacy has one",
			g->nr_pages, 1ull << g->shift);
}

/**
 * kvc_legacy_map() - open the handle in @fd, which stays the caller's
 * @uuid: of the GPU that the pool lies on
 * @ret_base: where it is
 *
 * Return: 0; -EPROTO not what an extent's file must be; -errno of the driver.
 */
int kvc_legacy_map(struct kvc_gpu *gpu, const u8 *uuid, int fd, size_t bytes,
		   u8 **ret_base)
{
	struct kv_legacy_extent e;

	if (pread(fd, &e, sizeof(e), 0) != (ssize_t)sizeof(e))
		return kvc_fail(-EPROTO, "extent: its file is too short for a handle");
	if (e.magic != KV_LEGACY_MAGIC || e.reserved || e.size_bytes < bytes)
		return kvc_fail(
			-EPROTO,
			"extent: magic %#x, %llu bytes of %zu: not a handle's file",
			e.magic, (unsigned long long)e.size_bytes, bytes);
	if (memcmp(e.gpu_uuid, uuid, sizeof(e.gpu_uuid)))
		return kvc_fail(-EPROTO, "extent: its handle is another GPU's");
	return kvc_gpu_open_handle(gpu, e.handle, ret_base);
}

/* Return: 0; -EAGAIN the extent is on its way; -ENOMEM it cannot be opened. */
static int address(const struct kvc_pool *pool)
{
	const struct kvc_extent *e = pool->extents;

	if (e->state == KVC_EXTENT_MAPPED)
		return 0;
	return e->fd < 0 ? -EAGAIN : kvc_fail(-ENOMEM, "%s", kvc_strerror(pool->c));
}

/**
 * kvc_legacy_wait_locked() - the pool is open: wait for its extent, which has the address
 *
 * Return: 0; -ENOMEM it cannot be opened here; -ETIMEDOUT; -ECONNRESET; -EPROTO.
 */
int kvc_legacy_wait_locked(struct kvc_pool *pool, struct kvc_link *link, u64 deadline_ns)
{
	struct kvc *c = pool->c;
	int r = address(pool);

	kvc_pool_place_locked(c, pool->slot, pool); /* so that messages find it */
	while (r == -EAGAIN) {
		r = kvc_sock_recv_until(link->sock, c->msg, deadline_ns);
		if (r)
			break;
		if (c->msg->msg.type != KV_MSG_POOL_REPLY)
			r = kvc_msg_handle_locked(c, c->msg);
		kvc_msg_close_fds(c->msg);
		if (!r)
			r = address(pool);
	}
	if (!r)
		return 0;
	kvc_pool_place_locked(c, pool->slot, NULL);
	if (r == -ENOMEM)
		return r;
	if (r == -ETIMEDOUT)
		return kvc_fail(r, "pool_open: no extent from kvmd");
	kvc_link_dead_locked(link, r);
	return kvc_fail(r == -EPROTO ? r : -ECONNRESET, "pool_open: %s", strerror(-r));
}
