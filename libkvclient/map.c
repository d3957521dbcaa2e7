/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map.c - pools, their tables, and extents in a reserved address range. Tour 7/12.
 *
 * A pool reserves addresses for all pages it can ever hold, once, without memory behind
 *	them. An extent is mapped at index * extent_bytes once per (index, serial), when
 *	EXTENT_ADDED brings its descriptor:
 *
 *	NONE -> MAPPED -> REMOVING -> UNACKED -> NONE
 *
 * EXTENT_REMOVED makes it REMOVING; it is unmapped when every step that had begun by then
 *	has retired, and only then is UNMAPPED sent: kvmd uses an extent index again only after
 *	that, so a page whose extent is MAPPED always lies in the extent kvmd means. Extents of
 *	a lost connection go the same way, without UNMAPPED.
 *
 * Lock: kvc.lock (2 in internal.h) for all changes; the state word is read without.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NR_PAGES_LIMIT	   (1u << 28)
#define KV_GPU_GRANULARITY (2ull << 20) /* facts F-vmm */

/* ------------------------------------------------------------------------------ extents
 */

/* Give an extent's addresses back to the reservation. */
static int unmap_extent(struct kvc_pool *pool, u32 index)
{
	u8 *addr = pool->base + index * pool->geometry.extent_bytes;

	if (pool->backend == KV_BACKEND_CUDA_LEGACY)
		return kvc_gpu_close_handle(pool->gpu, addr);
	if (pool->gpu)
		return kvc_gpu_unmap(pool->gpu, addr, pool->geometry.extent_bytes);
	if (mmap(addr, pool->geometry.extent_bytes, PROT_NONE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
		 0) == MAP_FAILED)
		return -errno;
	return 0;
}

static int map_memory(struct kvc_pool *pool, u32 index)
{
	struct kvc_extent *e = &pool->extents[index];
	u64 bytes = pool->geometry.extent_bytes;
	u8 *addr = pool->base + index * bytes;
	struct stat st;

	if (fstat(e->fd, &st) || (u64)st.st_size < bytes)
		return kvc_fail(-EPROTO, "extent %u: %lld bytes, expected %llu", index,
				(long long)st.st_size, (unsigned long long)bytes);
	if (mmap(addr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, e->fd, 0) ==
	    MAP_FAILED) {
		int r = kvc_fail(-ENOMEM, "extent %u: mmap of %llu bytes: %s", index,
				 (unsigned long long)bytes, strerror(errno));

		unmap_extent(pool, index);
		return r;
	}
	madvise(addr, bytes, MADV_DONTFORK);
	return 0;
}

/* Map the received descriptor, if there is one and the addresses are free. */
static int map_extent(struct kvc_pool *pool, u32 index)
{
	struct kvc_extent *e = &pool->extents[index];
	u64 bytes = pool->geometry.extent_bytes;
	int r;

	if (e->fd < 0 || e->state != KVC_EXTENT_NONE)
		return 0;
	if (pool->backend == KV_BACKEND_CUDA_LEGACY)
		r = kvc_legacy_map(pool->gpu, pool->gpu_uuid, e->fd, bytes, &pool->base);
	else if (pool->gpu)
		r = kvc_gpu_map(pool->gpu, e->fd, pool->base + index * bytes, bytes);
	else
		r = map_memory(pool, index);
	if (r)
		return r;
	close(e->fd);
	e->fd = -1;
	e->serial = e->fd_serial;
	kv_store_release32(&e->state, KVC_EXTENT_MAPPED);
	return 0;
}

static int post_unmapped(struct kvc_pool *pool, u32 index)
{
	struct kv_extent_ref ref = {.index = index,
				    .serial = pool->extents[index].serial};
	struct kvc_req req = {.opcode = KV_OP_UNMAPPED,
			      .pool = pool,
			      .nr = 1,
			      .arg_bytes = sizeof(ref),
			      .src = &ref};

	return kvc_ring_post(pool->c->link, &req, KVC_FIRE);
}

/* One step of an extent's way out. Return: true when it needs no further look. */
static bool run_extent(struct kvc_pool *pool, u32 index)
{
	struct kvc_extent *e = &pool->extents[index];

	if (e->state == KVC_EXTENT_REMOVING) {
		if (!kvc_begin_fence_passed(pool->c, e->fence))
			return false;
		if (unmap_extent(pool, index) && !KV_MUTANT(unmap_believed))
			return false;
		kv_store_release32(&e->state,
				   e->ack ? KVC_EXTENT_UNACKED : KVC_EXTENT_NONE);
	}
	if (e->state == KVC_EXTENT_UNACKED) {
		if (post_unmapped(pool, index))
			return false;
		kv_store_release32(&e->state, KVC_EXTENT_NONE);
	}
	map_extent(pool, index);
	return true;
}

/** kvc_extents_run_locked() - unmap what waited for steps, acknowledge, map what waited
 */
void kvc_extents_run_locked(struct kvc_pool *pool)
{
	for (u32 i = 0; i < pool->nr_extents; i++)
		if (!run_extent(pool, i))
			kv_store_relaxed32(&pool->c->deferred, 1);
}

/* Goes like a removed one, without UNMAPPED. */
static void orphan(struct kvc_pool *pool, struct kvc_extent *e)
{
	e->ack = false;
	e->fence = __atomic_load_n(&pool->c->step_number, __ATOMIC_SEQ_CST);
	kv_store_release32(&e->state, KVC_EXTENT_REMOVING);
}

/** kvc_extents_sweep_locked() - kvmd has named all that it has: the rest is gone */
void kvc_extents_sweep_locked(struct kvc_pool *pool)
{
	for (u32 i = 0; i < pool->nr_extents; i++)
		if (pool->extents[i].state == KVC_EXTENT_MAPPED && !pool->extents[i].seen)
			orphan(pool, &pool->extents[i]);
	kvc_extents_run_locked(pool);
}

/**
 * kvc_extents_added_locked() - EXTENT_ADDED: map what is new
 * @in: the message; descriptors that are kept are replaced by -1
 *
 * A mapping that fails for want of memory is tried again when a page of it is needed.
 * Return: 0; -EPROTO index out of range, or reused before UNMAPPED.
 */
int kvc_extents_added_locked(struct kvc_pool *pool, struct kvc_msg_in *in)
{
	const struct kv_msg_extents *m = &in->extents;

	if (m->nr != in->nr_fds)
		return kvc_fail(-EPROTO, "extent_added.nr=%u with %u descriptors", m->nr,
				in->nr_fds);
	for (u32 i = 0; i < m->nr; i++) {
		u32 index = m->extents[i].index;
		struct kvc_extent *e;
		int r;

		if (index >= pool->nr_extents)
			return kvc_fail(-EPROTO, "extent_added.index=%u: pool has %u",
					index, pool->nr_extents);
		e = &pool->extents[index];
		e->seen = true;
		if (e->state == KVC_EXTENT_MAPPED &&
		    (e->serial == m->extents[i].serial || KV_MUTANT(serial_ignored)) &&
		    !KV_MUTANT(duplicate_is_new))
			continue; /* a second descriptor of the same memory (cases O12) */
		if (e->state == KVC_EXTENT_MAPPED && pool->leases_due)
			orphan(pool, e); /* the pool was made anew */
		if (e->state == KVC_EXTENT_MAPPED ||
		    (e->state != KVC_EXTENT_NONE && e->ack))
			return kvc_fail(-EPROTO, "extent %u was reused before UNMAPPED",
					index);
		if (e->fd >= 0)
			close(e->fd);
		e->fd = in->fds[i];
		e->fd_serial = m->extents[i].serial;
		in->fds[i] = -1;
		r = map_extent(pool, index);
		if (r == -EPROTO)
			return r;
		if (r)
			kvc_log(pool->c, KVC_LOG_WARN, "extent %u is not mapped: %s",
				index, kvc_strerror(pool->c));
	}
	return 0;
}

/* One extent of EXTENT_REMOVED. Return: false: kvmd has not given it to this session. */
static bool remove_extent(struct kvc_pool *pool, struct kvc_extent *e, u64 serial)
{
	bool waits = e->fd >= 0 && e->fd_serial == serial, gone;

	if (e->state == KVC_EXTENT_MAPPED && e->serial == serial) {
		e->fence = __atomic_load_n(&pool->c->step_number, __ATOMIC_SEQ_CST);
		e->ack = true;
		kv_store_release32(&e->state, KVC_EXTENT_REMOVING);
		return true;
	}
	/* Asked again by the next kvmd; it may not have heard us, nor we the last one. */
	gone = pool->c->link->resumed &&
	       (e->serial == serial || (e->state == KVC_EXTENT_NONE && e->fd < 0));
	if (!waits && !gone)
		return false;
	if (waits) {
		close(e->fd);
		e->fd = -1;
	}
	/* an older extent that steps use at this place goes first */
	e->serial = serial;
	e->ack = true;
	if (e->state == KVC_EXTENT_NONE)
		kv_store_release32(&e->state, KVC_EXTENT_UNACKED);
	return true;
}

/** kvc_extents_removed_locked() - EXTENT_REMOVED. Return: 0; -EPROTO no such extent */
int kvc_extents_removed_locked(struct kvc_pool *pool, const struct kv_msg_extents *m)
{
	for (u32 i = 0; i < m->nr; i++) {
		u32 index = m->extents[i].index;
		u64 serial = m->extents[i].serial;

		if (index >= pool->nr_extents)
			return kvc_fail(-EPROTO, "extent_removed.index=%u: pool has %u",
					index, pool->nr_extents);
		if (!remove_extent(pool, &pool->extents[index], serial))
			return kvc_fail(-EPROTO, "extent_removed: index %u serial %llu",
					index, (unsigned long long)serial);
	}
	kvc_extents_run_locked(pool);
	return 0;
}

/** kvc_extents_orphan_locked() - the connection they came by is gone; so are their pages
 */
void kvc_extents_orphan_locked(struct kvc_pool *pool)
{
	for (u32 i = 0; i < pool->nr_extents; i++) {
		struct kvc_extent *e = &pool->extents[i];

		if (e->fd >= 0)
			close(e->fd);
		e->fd = -1;
		e->ack = false;
		if (e->state == KVC_EXTENT_MAPPED) {
			e->fence =
				__atomic_load_n(&pool->c->step_number, __ATOMIC_SEQ_CST);
			kv_store_release32(&e->state, KVC_EXTENT_REMOVING);
		} else if (e->state == KVC_EXTENT_UNACKED) {
			kv_store_release32(&e->state, KVC_EXTENT_NONE);
		}
	}
	kvc_extents_run_locked(pool);
}

/* --------------------------------------------------------------------------------- pool
 */

static int check_geometry(const struct kvc_pool *pool, const struct kv_geometry *g)
{
	const struct kv_layout *layout = &pool->layout;

	if (!g->nr_pages || g->nr_pages > NR_PAGES_LIMIT || g->shift > 28 ||
	    g->stride_bytes < kv_page_bytes(layout) || g->extent_bytes % 4096 ||
	    (pool->gpu && g->extent_bytes % KV_GPU_GRANULARITY) ||
	    g->extent_bytes > 1ull << 40 || g->stride_bytes << g->shift > g->extent_bytes)
		return kvc_fail(-EPROTO,
				"geometry: %u pages, stride %llu, extent %llu, shift %u",
				g->nr_pages, (unsigned long long)g->stride_bytes,
				(unsigned long long)g->extent_bytes, g->shift);
	return 0;
}

/* Addresses for the most the pool can ever hold. */
static int reserve(struct kvc_pool *pool)
{
	const struct kv_geometry *g = &pool->geometry;

	pool->nr_extents = (u32)kv_div_round_up(g->nr_pages, 1ull << g->shift);
	pool->va_bytes = pool->nr_extents * g->extent_bytes;
	if (KV_MUTANT(reserve_more)) /* cases O11 */
		pool->va_bytes += kv_round_up(pool->va_bytes / 8, g->extent_bytes);
	pool->extents = calloc(pool->nr_extents, sizeof(*pool->extents));
	if (!pool->extents)
		return kvc_fail(-ENOMEM, "out of memory");
	for (u32 i = 0; i < pool->nr_extents; i++)
		pool->extents[i].fd = -1;
	if (kvc_ledger_init(pool))
		return -ENOMEM;
	if (pool->backend == KV_BACKEND_CUDA_LEGACY)
		return kvc_legacy_check(g); /* the address comes with the extent */
	if (pool->gpu)
		return kvc_gpu_reserve(pool->gpu, pool->va_bytes, &pool->base);
	pool->base = mmap(NULL, pool->va_bytes, PROT_NONE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (pool->base == MAP_FAILED) {
		pool->base = NULL;
		return kvc_fail(-ENOMEM, "reserving %zu bytes of addresses: %s",
				pool->va_bytes, strerror(errno));
	}
	return 0;
}

static int map_table(struct kvc_pool *pool, struct kvc_link *link, int fd, u64 bytes)
{
	u32 nr_pages = pool->geometry.nr_pages;
	const struct kv_table *t;
	struct stat st;

	if (bytes < kv_table_bytes(nr_pages) || fstat(fd, &st) || (u64)st.st_size < bytes)
		return kvc_fail(-EPROTO, "table: %llu bytes for %u pages",
				(unsigned long long)bytes, nr_pages);
	t = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
	if (t == MAP_FAILED)
		return kvc_fail(-ENOMEM, "table: mmap: %s", strerror(errno));
	madvise((void *)(uintptr_t)t, bytes, MADV_DONTFORK);
	if (t->magic != KV_TABLE_MAGIC || t->pool_id != pool->pool_id ||
	    t->fingerprint != pool->fingerprint || t->table_epoch != link->table_epoch ||
	    t->nr_pages != nr_pages || t->tag_off != KV_TABLE_TAG_OFF ||
	    t->log_off != kv_table_log_off(nr_pages)) {
		munmap((void *)(uintptr_t)t, bytes);
		return kvc_fail(-EPROTO, "table: not the table of this pool");
	}
	link->tables[pool->slot].bytes = bytes;
	__atomic_store_n(&link->tables[pool->slot].map, t, __ATOMIC_RELEASE);
	if (!link->grace_table)
		__atomic_store_n(&link->grace_table, t, __ATOMIC_RELEASE);
	return 0;
}

/* Return: 0; as kvc_gpu_open(); -ESHUTDOWN the pool came back on other memory. */
static int take_backend(struct kvc_pool *pool, const struct kv_msg_pool_reply *m)
{
	if (m->backend > KV_BACKEND_CUDA_LEGACY)
		return kvc_fail(-ENODEV,
				"backend=%u: this library maps host memory and CUDA's",
				m->backend);
	if (pool->base && m->backend == KV_BACKEND_CUDA_LEGACY)
		return kvc_fail(-ESHUTDOWN,
				"backend cuda-legacy: the memory died with kvmd");
	if (pool->base && (m->backend != pool->backend ||
			   memcmp(m->gpu_uuid, pool->gpu_uuid, sizeof(m->gpu_uuid))))
		return kvc_fail(-ESHUTDOWN, "the pool came back on other memory");
	if (m->backend == KV_BACKEND_HOST || pool->gpu)
		return 0;
	return kvc_gpu_open(m->gpu_uuid, &pool->gpu);
}

static int take_reply(struct kvc_pool *pool, struct kvc_link *link, struct kvc_msg_in *in)
{
	const struct kv_msg_pool_reply *m = &in->pool;
	char error[sizeof(m->error) + 1] = "";
	int r;

	if (m->msg.size_bytes < sizeof(*m))
		return kvc_fail(-EPROTO, "pool_reply of %u bytes", m->msg.size_bytes);
	memcpy(error, m->error, sizeof(m->error));
	if (m->result)
		return kvc_fail(m->result < 0 ? m->result : -EPROTO, "%s", error);
	pool->pool_id = m->pool_id;
	pool->opened = true;
	if (in->nr_fds != 1)
		return kvc_fail(-EPROTO, "pool_reply with %u descriptors", in->nr_fds);
	r = take_backend(pool, m);
	if (!r)
		r = check_geometry(pool, &m->geometry);
	if (r)
		return r;
	if (pool->base && (memcmp(&m->geometry, &pool->geometry, sizeof(m->geometry)) ||
			   m->fingerprint != pool->fingerprint))
		return kvc_fail(-ESHUTDOWN, "the pool came back with another geometry");
	pool->fingerprint = m->fingerprint;
	pool->backend = m->backend;
	memcpy(pool->gpu_uuid, m->gpu_uuid, sizeof(pool->gpu_uuid));
	pool->geometry = m->geometry;
	r = pool->extents ? 0 : reserve(pool);
	return r ? r : map_table(pool, link, in->fds[0], m->table_bytes);
}

static int send_open(struct kvc_pool *pool, struct kvc_link *link, u32 sequence,
		     u64 deadline_ns)
{
	size_t scale_bytes = pool->layout.nr_scales * sizeof(float);
	size_t bytes = sizeof(struct kv_msg_pool_open) + scale_bytes;
	struct kv_msg_pool_open *m = calloc(1, bytes);
	int r;

	if (!m)
		return -ENOMEM;
	m->msg.magic = KV_MSG_MAGIC;
	m->msg.type = KV_MSG_POOL_OPEN;
	m->msg.size_bytes = (u32)bytes;
	m->msg.sequence = sequence;
	memcpy(m->gpu_uuid, pool->gpu_uuid, sizeof(m->gpu_uuid));
	m->layout = pool->layout;
	if (scale_bytes)
		memcpy(m + 1, pool->scales, scale_bytes);
	r = kvc_sock_send(link->sock, m, bytes, deadline_ns);
	free(m);
	return r;
}

/**
 * kvc_pool_attach_locked() - POOL_OPEN on a link, at first open and after a reconnect
 *
 * Context: kvc.lock; waits for kvmd. Events that arrive meanwhile are handled.
 * Return: as kvc_pool_open(); -ESHUTDOWN the pool came back different; -ECONNRESET.
 */
int kvc_pool_attach_locked(struct kvc_pool *pool, struct kvc_link *link, u64 deadline_ns)
{
	struct kvc_msg_in *in = pool->c->msg;
	u32 sequence = ++link->next_sequence;
	int r;

	r = send_open(pool, link, sequence, deadline_ns);
	while (!r) {
		r = kvc_sock_recv_until(link->sock, in, deadline_ns);
		if (r)
			break;
		if (in->msg.type == KV_MSG_POOL_REPLY && in->msg.sequence == sequence) {
			r = take_reply(pool, link, in);
			kvc_msg_close_fds(in);
			if (!r && pool->backend == KV_BACKEND_CUDA_LEGACY)
				return kvc_legacy_wait_locked(pool, link, deadline_ns);
			return !r && link->resumed
				       ? kvc_leases_wait_locked(pool, link, deadline_ns)
				       : r;
		}
		/* the reply to an open that timed out may well be for the same pool */
		if (in->msg.type != KV_MSG_POOL_REPLY)
			r = kvc_msg_handle_locked(pool->c, in);
		kvc_msg_close_fds(in);
	}
	if (r == -ETIMEDOUT)
		return kvc_fail(r, "pool_open: no answer from kvmd");
	/* a reply that comes too late closes the pool; in a reconnect all is tried anew */
	if (r == -EMFILE && pool->c->pools[pool->slot] != pool)
		return kvc_fail(r, "pool_open: no room for descriptors from kvmd");
	kvc_link_dead_locked(link, r);
	return kvc_fail(r == -EPROTO ? r : -ECONNRESET, "pool_open: %s", strerror(-r));
}

/* A step that is just beginning may be reading the table; later ones see that it is gone.
 */
static void drop_table(struct kvc_pool *pool, struct kvc_link *link)
{
	struct kvc_table *t = &link->tables[pool->slot];
	const struct kv_table *other = NULL;

	if (!t->map || link->gone)
		return;
	for (u32 i = 0; i < KV_POOLS_MAX; i++)
		if (i != pool->slot && link->tables[i].map)
			other = link->tables[i].map;
	if (link->grace_table == t->map)
		__atomic_store_n(&link->grace_table, other, __ATOMIC_SEQ_CST);
	kvc_wait_begun(pool->c);
	munmap((void *)(uintptr_t)t->map, t->bytes);
	t->map = NULL;
}

/** kvc_pool_send_close_locked() - kvmd drops what the session held in the pool, and tells no
 * more of it */
void kvc_pool_send_close_locked(struct kvc_pool *pool, struct kvc_link *link)
{
	struct kv_msg_pool_close m = {.msg = {.magic = KV_MSG_MAGIC,
					      .type = KV_MSG_POOL_CLOSE,
					      .size_bytes = sizeof(m)},
				      .pool_id = pool->pool_id};

	if (pool->opened && !link->dead)
		kvc_sock_send(link->sock, &m, sizeof(m), kvc_deadline(pool->c));
	pool->opened = false;
}

/* No step names the pool. Addresses that the driver does not give up stay ours. */
static int unreserve(struct kvc_pool *pool)
{
	int r = 0;

	if (!pool->gpu) {
		munmap(pool->base, pool->va_bytes);
		return 0;
	}
	for (u32 i = 0; i < pool->nr_extents; i++)
		if (pool->extents[i].state == KVC_EXTENT_MAPPED ||
		    pool->extents[i].state == KVC_EXTENT_REMOVING)
			r |= unmap_extent(pool, i);
	if (!r && pool->backend != KV_BACKEND_CUDA_LEGACY)
		r = kvc_gpu_unreserve(pool->gpu, pool->base, pool->va_bytes);
	if (r)
		kvc_log(pool->c, KVC_LOG_ERR, "pool %u: %s", pool->pool_id,
			kvc_strerror(pool->c));
	return r;
}

/** kvc_pool_destroy_locked() - tell kvmd, unmap, forget */
void kvc_pool_destroy_locked(struct kvc_pool *pool)
{
	struct kvc *c = pool->c;
	struct kvc_link *link = c->link;
	/* one that never got a slot has no table in it */
	bool attached = !c->pools[pool->slot] || c->pools[pool->slot] == pool;

	if (attached)
		kvc_pool_place_locked(c, pool->slot, NULL);
	kvc_events_drop_pool_locked(c, pool);
	if (!link->gone)
		kvc_ring_forget_pool(&link->ring, pool);
	/* POOL_CLOSE says that no handle is open: kvmd may free the memory. */
	if (pool->base && pool->backend == KV_BACKEND_CUDA_LEGACY && unreserve(pool))
		pool->opened = false;
	kvc_pool_send_close_locked(pool, link);
	for (struct kvc_link *l = attached ? link : NULL; l; l = l->older)
		drop_table(pool, l);
	for (u32 i = 0; i < pool->nr_extents; i++)
		if (pool->extents[i].fd >= 0)
			close(pool->extents[i].fd);
	if (pool->base && pool->backend != KV_BACKEND_CUDA_LEGACY)
		unreserve(pool);
	kvc_pool_free_memory(pool);
}
