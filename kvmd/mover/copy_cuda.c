/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover/copy_cuda.c - copies by the copy engines, in the only context that belongs to
 * kvmd; on cuda-legacy also the owner of all extents.
 *
 * Everything here that the GPU sees is an asynchronous copy from or to pinned memory or an
 * event: no kernel, no memset, no synchronous copy (facts F-mover).
 *
 * Between two copies of a stream a copy engine rests for 2 us, 5 % of a copy of 2 MiB; it
 * does not between those of a batch. So long copies are gathered and go as one batch, by
 * drivers that can. Short ones do not: nobody has seen how a driver copies many of them.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cuda_syms.h"
#include "base/mutant.h"
#include "kvmd/mover/copy.h"

#define ALLOCS_MAX  256u
#define PIN_MAX	    (64ull << 30) /* one registration; drivers refuse 512 GiB (cases O61) */
#define BATCH	    64u
#define BATCH_LEAST (1ull << 20) /* bytes of a copy in a batch */

/** struct batch - copies of one stream and direction that are not issued yet */
struct batch {
	u32 nr;
	bool in;
	kv_cu_ptr there[BATCH], here[BATCH];
	size_t bytes[BATCH];
};

/**
 * struct cuda_copier - one GPU
 * @legacy: extents are this process's own memory, named by a descriptor's id
 * @pool: the host pool, pinned in pieces of PIN_MAX
 * @batches: by stream
 * @no_batches: the driver has none
 * @allocs: of legacy; at 0 = free entry
 */
struct cuda_copier {
	struct kvd_copier c;
	struct kv_cuda_syms cu;
	kv_cu_device device;
	kv_cu_ctx ctx;
	bool legacy;
	u8 *pool;
	void *streams[KVD_MV_STREAMS];
	void *events[KVD_MV_STREAMS][KVD_MV_GROUPS];
	struct batch batches[KVD_MV_STREAMS];
	bool no_batches;
	struct {
		u64 id;
		u64 bytes;
		kv_cu_ptr at;
	} allocs[ALLOCS_MAX];
};

static struct cuda_copier *cuda_of(struct kvd_copier *c)
{
	return kv_container_of(c, struct cuda_copier, c);
}

static int say(char *text, const char *what, kv_cu_result cr)
{
	snprintf(text, 128, "%s: CUDA result %d (%s)", what, cr, kv_cuda_reason(cr));
	return kv_cuda_errno(cr);
}

static int find_device(struct cuda_copier *g, const u8 *uuid, char *text)
{
	kv_cu_result cr;
	u8 have[16];
	int nr = 0;

	cr = g->cu.device_count(&nr);
	for (int i = 0; !cr && i < nr; i++) {
		cr = g->cu.device_get(&g->device, i);
		if (!cr)
			cr = g->cu.device_uuid(have, g->device);
		if (!cr && !memcmp(have, uuid, sizeof(have)))
			return 0;
	}
	if (cr)
		return say(text, "cuDeviceGetUuid", cr);
	snprintf(text, 128, "none of %d devices has the GPU's UUID", nr);
	return -ENODEV;
}

static int make_streams(struct cuda_copier *g, char *text)
{
	kv_cu_result cr = 0;

	for (u32 s = 0; s < KVD_MV_STREAMS && !cr; s++) {
		cr = g->cu.stream_create(&g->streams[s], KV_CU_STREAM_NON_BLOCKING);
		if (cr)
			return say(text, "cuStreamCreate", cr);
		for (u32 i = 0; i < KVD_MV_GROUPS && !cr; i++)
			cr = g->cu.event_create(&g->events[s][i],
						KV_CU_EVENT_DISABLE_TIMING);
	}
	return cr ? say(text, "cuEventCreate", cr) : 0;
}

static int cuda_open(struct kvd_copier *c, const u8 *gpu_uuid, char *text)
{
	struct cuda_copier *g = cuda_of(c);
	kv_cu_result cr;
	int r;

	r = kv_cuda_load(&g->cu, text, 128);
	if (r)
		return r;
	g->no_batches = !g->cu.copy_batch_async;
	cr = g->cu.init(0);
	if (cr)
		return say(text, "cuInit", cr);
	r = find_device(g, gpu_uuid, text);
	if (r)
		return r;
	cr = g->cu.ctx_retain(&g->ctx, g->device);
	if (cr)
		return say(text, "cuDevicePrimaryCtxRetain", cr);
	cr = g->cu.ctx_push(g->ctx);
	if (cr)
		return say(text, "cuCtxPushCurrent", cr);
	return make_streams(g, text);
}

/* In pieces, and undone from the last to the first: all of the pool is pinned or nothing. */
static int cuda_pool(struct kvd_copier *c, void *addr, u64 bytes, char *text)
{
	u64 max = KV_MUTANT(pin_at_once) ? bytes : PIN_MAX, at, n;
	struct cuda_copier *g = cuda_of(c);
	kv_cu_result cr;

	g->pool = addr;
	for (at = 0; at < bytes; at += n) {
		n = KV_MIN(bytes - at, max);
		cr = g->cu.host_register(g->pool + at, n, 0);
		if (cr)
			goto unpin;
	}
	return 0;
unpin:
	while (at) {
		at -= max; /* only the last piece is shorter, and it is not pinned */
		g->cu.host_unregister(g->pool + at);
	}
	return say(text, "cuMemHostRegister", cr);
}

/* The descriptor names memory that this process made. */
static int legacy_map(struct cuda_copier *g, int fd, u64 bytes, u64 *ret_at)
{
	struct kv_legacy_extent e;

	if (pread(fd, &e, sizeof(e), 0) != (ssize_t)sizeof(e) ||
	    e.magic != KV_LEGACY_MAGIC)
		return -EINVAL;
	if (KV_MUTANT(own_handle_opened)) { /* cases O07: the driver refuses */
		struct kv_cu_ipc_handle h;

		memcpy(&h, e.handle, sizeof(h));
		return kv_cuda_errno(
			g->cu.ipc_open((kv_cu_ptr *)ret_at, h, KV_CU_IPC_LAZY));
	}
	for (u32 i = 0; i < ALLOCS_MAX; i++) {
		if (!g->allocs[i].at || g->allocs[i].id != e.id)
			continue;
		if (g->allocs[i].bytes < bytes)
			return -EINVAL;
		*ret_at = g->allocs[i].at;
		return 0;
	}
	return -ENOENT;
}

static int cuda_map(struct kvd_copier *c, int fd, u64 bytes, u64 *ret_at)
{
	struct cuda_copier *g = cuda_of(c);
	const struct kv_cu_access rw = {{KV_CU_DEVICE, g->device}, KV_CU_READWRITE};
	kv_cu_handle handle;
	kv_cu_result cr;
	kv_cu_ptr at;

	if (g->legacy)
		return legacy_map(g, fd, bytes, ret_at);
	cr = g->cu.mem_import(&handle, (void *)(intptr_t)fd, KV_CU_POSIX_FD);
	if (cr)
		return kv_cuda_errno(cr);
	cr = g->cu.va_reserve(&at, bytes, 0, 0, 0);
	if (cr)
		goto release_handle;
	cr = g->cu.mem_map(at, bytes, 0, handle, 0);
	if (cr)
		goto free_va;
	cr = g->cu.mem_access(at, bytes, &rw, 1);
	if (cr)
		goto unmap;
	/* The mapping alone holds the memory: unmapping gives it back. */
	cr = g->cu.mem_release(handle);
	if (cr) {
		g->cu.mem_unmap(at, bytes);
		g->cu.va_free(at, bytes);
		return kv_cuda_errno(cr);
	}
	*ret_at = at;
	return 0;
unmap:
	g->cu.mem_unmap(at, bytes);
free_va:
	g->cu.va_free(at, bytes);
release_handle:
	g->cu.mem_release(handle);
	return kv_cuda_errno(cr);
}

static int cuda_unmap(struct kvd_copier *c, u64 at, u64 bytes)
{
	struct cuda_copier *g = cuda_of(c);
	kv_cu_result cr;

	if (g->legacy)
		return 0;
	cr = g->cu.mem_unmap(at, bytes);
	if (!cr)
		cr = g->cu.va_free(at, bytes);
	return kv_cuda_errno(cr);
}

static kv_cu_result copy_one(struct cuda_copier *g, u32 stream, u64 at, u8 *host,
			     u64 bytes, bool in)
{
	return in ? g->cu.copy_in_async(at, host, bytes, g->streams[stream])
		  : g->cu.copy_out_async(host, at, bytes, g->streams[stream]);
}

static kv_cu_result copy_each(struct cuda_copier *g, u32 stream, const struct batch *b)
{
	kv_cu_result cr = 0;

	for (u32 i = 0; i < b->nr && !cr; i++)
		cr = copy_one(g, stream, b->there[i], (u8 *)(uintptr_t)b->here[i],
			      b->bytes[i], b->in);
	return cr;
}

static int cuda_issue(struct kvd_copier *c, u32 stream)
{
	static const struct kv_cu_copy_attr attr = {.order = KV_CU_ORDER_STREAM,
						    .flags = KV_CU_COPY_OVERLAP};
	struct cuda_copier *g = cuda_of(c);
	struct batch *b = &g->batches[stream];
	kv_cu_result cr = KV_CU_NOT_SUPPORTED;
	const size_t from = 0;

	if (!b->nr)
		return 0;
	if (!g->no_batches)
		cr = g->cu.copy_batch_async(b->in ? b->there : b->here,
					    b->in ? b->here : b->there, b->bytes, b->nr,
					    &attr, &from, 1, g->streams[stream]);
	if (cr == KV_CU_NOT_SUPPORTED) {
		g->no_batches = true;
		cr = copy_each(g, stream, b);
	}
	b->nr = 0;
	return kv_cuda_errno(cr);
}

/* All that a batch has goes one way. */
static int batch_add(struct cuda_copier *g, u32 stream, u64 at, u8 *host, u64 bytes,
		     bool in)
{
	struct batch *b = &g->batches[stream];
	int r = 0;

	if (b->nr == BATCH || (b->nr && b->in != in))
		r = cuda_issue(&g->c, stream);
	b->in = in;
	b->there[b->nr] = at;
	b->here[b->nr] = (kv_cu_ptr)(uintptr_t)host;
	b->bytes[b->nr++] = bytes;
	return r;
}

/* A copy may not cross from one registration into the next. */
static int cuda_copy(struct kvd_copier *c, u32 stream, u64 at, void *pool_addr, u64 bytes,
		     bool in)
{
	struct cuda_copier *g = cuda_of(c);
	u8 *host = pool_addr;
	int r = 0;

	while (bytes && !r) {
		u64 n = KV_MIN(bytes, PIN_MAX - (u64)(host - g->pool) % PIN_MAX);

		if (n >= BATCH_LEAST && !g->no_batches)
			r = batch_add(g, stream, at, host, n, in);
		else
			r = kv_cuda_errno(copy_one(g, stream, at, host, n, in));
		at += n;
		host += n;
		bytes -= n;
	}
	return r;
}

static int cuda_mark(struct kvd_copier *c, u32 stream, u32 group)
{
	struct cuda_copier *g = cuda_of(c);

	return kv_cuda_errno(
		g->cu.event_record(g->events[stream][group], g->streams[stream]));
}

static int cuda_query(struct kvd_copier *c, u32 stream, u32 group)
{
	struct cuda_copier *g = cuda_of(c);
	kv_cu_result cr = g->cu.event_query(g->events[stream][group]);

	if (cr == KV_CU_NOT_READY)
		return 0;
	return cr ? kv_cuda_errno(cr) : 1;
}

static int cuda_alloc(struct kvd_copier *c, u64 id, u64 bytes, u8 *ret_handle, char *text)
{
	struct cuda_copier *g = cuda_of(c);
	struct kv_cu_ipc_handle handle;
	kv_cu_result cr;
	kv_cu_ptr at;
	u32 i = 0;

	if (!g->legacy)
		return -EOPNOTSUPP;
	while (i < ALLOCS_MAX && g->allocs[i].at)
		i++;
	if (i == ALLOCS_MAX)
		return -ENOSPC;
	cr = g->cu.alloc(&at, bytes);
	if (cr)
		return say(text, "cuMemAlloc", cr);
	cr = g->cu.ipc_get(&handle, at);
	if (cr) {
		g->cu.free(at);
		return say(text, "cuIpcGetMemHandle", cr);
	}
	g->allocs[i].id = id;
	g->allocs[i].bytes = bytes;
	g->allocs[i].at = at;
	memcpy(ret_handle, &handle, sizeof(handle));
	return 0;
}

static int cuda_free(struct kvd_copier *c, u64 id)
{
	struct cuda_copier *g = cuda_of(c);
	kv_cu_result cr;

	for (u32 i = 0; i < ALLOCS_MAX; i++) {
		if (!g->allocs[i].at || g->allocs[i].id != id)
			continue;
		cr = g->cu.free(g->allocs[i].at);
		g->allocs[i].at = 0;
		return kv_cuda_errno(cr);
	}
	return -ENOENT;
}

static const struct kvd_copy_ops cuda_ops = {
	.open = cuda_open,
	.pool = cuda_pool,
	.map = cuda_map,
	.unmap = cuda_unmap,
	.copy = cuda_copy,
	.issue = cuda_issue,
	.mark = cuda_mark,
	.query = cuda_query,
	.alloc = cuda_alloc,
	.free = cuda_free,
};

struct kvd_copier *kvd_copier_cuda(bool legacy)
{
	struct cuda_copier *g = calloc(1, sizeof(*g));

	if (!g)
		return NULL;
	g->c.ops = &cuda_ops;
	g->legacy = legacy;
	return &g->c;
}
