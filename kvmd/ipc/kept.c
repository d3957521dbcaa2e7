/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/kept.c - see kept.h. Taking up what an earlier kvmd left is in ipc/adopt.c.
 */
#include "kvmd/ipc/kept.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/mutant.h"
#include "kvmd/backend/memfd.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/own/image.h"

#define FDS_OWN 64u /* loop, sockets, state, ...: what kvmd has without any engine */

static void take(void *arg, const struct kvd_keep_key *key, int fd)
{
	struct kvd_kept *kept = arg;

	if (kept->nr == kept->room) {
		u32 room = kept->room ? kept->room * 2 : 256;
		struct kvd_kept_fd *fds = realloc(kept->fds, room * sizeof(*fds));

		if (!fds) {
			close(fd); /* stays in the keeper, for the next try */
			kept->untaken = true;
			return;
		}
		kept->fds = fds;
		kept->room = room;
	}
	kept->fds[kept->nr++] = (struct kvd_kept_fd){.key = *key, .fd = fd};
}

/* ------------------------------------------------------------------------ refilling */

static int put_region(struct kvd *kvd, u32 kind, const struct kvd_region *r)
{
	struct kvd_keep_key key = {
		.kind = kind, .pool = r->pool_id, .session = r->session_id};

	return kvd_keep_put(&kvd->kept.keep, &key, r->fd);
}

static int put_pool(struct kvd *kvd, struct kvd_pool *pool)
{
	int r = put_region(kvd, KVD_KEEP_FRAMES, &pool->frames_region);

	if (!r)
		r = put_region(kvd, KVD_KEEP_TOKENS, &pool->tokens_region);
	for (u32 i = 0; i < pool->nr_extents && !r; i++) {
		struct kvd_extent *e = &pool->extents[i];
		struct kvd_keep_key key = {.kind = KVD_KEEP_EXTENT,
					   .pool = pool->id,
					   .session = e->serial,
					   .index = i};

		if (e->state != KVD_EXTENT_NONE)
			r = kvd_keep_put(&kvd->kept.keep, &key, e->handle.fd);
	}
	return r;
}

static int put_conn(struct kvd *kvd, const struct kvd_conn *conn)
{
	struct kvd_session *s = conn->session;
	struct kvd_keep_key key = {.session = conn->client_id, .index = s->tenant->index};
	int r;

	key.kind = KVD_KEEP_PAGE;
	r = kvd_keep_put(&kvd->kept.keep, &key, conn->page_fd);
	key.kind = KVD_KEEP_PIDFD;
	key.index = 0;
	if (!r)
		r = kvd_keep_put(&kvd->kept.keep, &key, conn->pidfd);
	for (u32 i = 0; i < KV_POOLS_MAX && !r; i++)
		if (s->attach[i].pool)
			r = put_region(kvd, KVD_KEEP_LEASES, &s->attach[i].region);
	return r;
}

/* The image last: without it nothing of a keeper is believed. A kvmd that died half way
 * would leave one that knows pools and not all their sessions, whose steps go on. */
static int put_all(struct kvd *kvd)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_IMAGE};
	struct kvd_conn *conn;
	int r = 0;

	if (KV_MUTANT(image_first))
		r = kvd_keep_put(&kvd->kept.keep, &key, kvd->kept.image_fd);
	if (kvd->kept.half.key.kind && !KV_MUTANT(half_forgotten))
		r = kvd_keep_put(&kvd->kept.keep, &kvd->kept.half.key, kvd->kept.half.fd);
	for (u32 i = 0; i < KVD_POOLS_MAX && !r; i++)
		if (kvd->core.mm.pools[i])
			r = put_pool(kvd, kvd->core.mm.pools[i]);
	list_for_each_entry (conn, &kvd->conns, node)
		if (conn->session && !r)
			r = put_conn(kvd, conn);
	if (!r)
		r = kvd_moving_keep(kvd);
	if (!r)
		r = kvd_filling_keep(kvd);
	key.kind = KVD_KEEP_LISTEN;
	if (!r && kvd->engine_listen.fd >= 0)
		r = kvd_keep_put(&kvd->kept.keep, &key, kvd->engine_listen.fd);
	key.index = 1;
	if (!r && kvd->admin_listen.fd >= 0)
		r = kvd_keep_put(&kvd->kept.keep, &key, kvd->admin_listen.fd);
	key = (struct kvd_keep_key){.kind = KVD_KEEP_IMAGE};
	return r ? r : kvd_keep_put(&kvd->kept.keep, &key, kvd->kept.image_fd);
}

static void watch_keeper(struct kvd *kvd);

static int refill(struct kvd *kvd)
{
	struct kvd_kept *kept = &kvd->kept;
	int r;

	if (kept->refilling)
		return -EPIPE;
	/* Before we serve, a keeper that lives has all there is: this start is over, and the
	 * next one finds it. */
	if (!kept->serving && kept->there && !KV_MUTANT(replaced_at_start) &&
	    kvd_keep_lives(&kept->keep))
		return -EPIPE;
	kept->refilling = true;
	kept->restarts++;
	kvd_loop_del(kvd->loop, &kept->watch);
	r = kvd_keep_restart(&kept->keep);
	if (!r)
		r = put_all(kvd);
	if (r &&
	    !KV_MUTANT(part_of_refill)) /* a part of it is of no use: kvd_kept_tick() */
		kvd_keep_close(&kept->keep, true);
	if (r)
		kvd_err("ipc/kept", "the keeper is gone and cannot be replaced: %s",
			strerror(-r));
	else
		kvd_warn("ipc/kept", "the keeper was gone: a new one holds everything");
	kept->refilling = false;
	watch_keeper(kvd);
	return r;
}

/* The keeper says nothing by itself, but the answer to a put wakes us as well. */
static void keeper_ready(void *arg, u32 events)
{
	struct kvd *kvd = arg;
	char byte;

	if (recv(kvd->kept.keep.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
	    errno == EAGAIN)
		return;
	refill(kvd);
}

static void watch_keeper(struct kvd *kvd)
{
	struct kvd_kept *kept = &kvd->kept;

	if (kept->keep.fd < 0 || kept->watch.id)
		return; /* watched already, by refill() */
	kept->watch.fd = kept->keep.fd;
	kept->watch.events = KVD_LOOP_IN;
	kept->watch.ready = keeper_ready;
	kept->watch.arg = kvd;
	kvd_loop_add(kvd->loop, &kept->watch);
}

void kvd_kept_tick(struct kvd *kvd)
{
	if (kvd->kept.image && (kvd->kept.keep.fd < 0 || kvd->kept.keep.silent))
		refill(kvd);
}

int kvd_kept_put(struct kvd *kvd, const struct kvd_keep_key *key, int fd)
{
	int r;

	if (!kvd->kept.image)
		return 0;
	r = kvd_keep_put(&kvd->kept.keep, key, fd);
	if (r == -EPIPE && !refill(kvd))
		r = kvd_keep_put(&kvd->kept.keep, key, fd);
	if (!r && (key->kind == KVD_KEEP_PAGE || key->kind == KVD_KEEP_FRAMES))
		kvd->kept.half = (struct kvd_kept_fd){.key = *key, .fd = fd};
	return r;
}

void kvd_kept_del(struct kvd *kvd, const struct kvd_keep_key *key)
{
	if (!kvd->kept.image)
		return;
	if (!memcmp(&kvd->kept.half.key, key, sizeof(*key)))
		kvd->kept.half.key.kind = 0;
	kvd_keep_del(&kvd->kept.keep, key);
}

static int extent_put(void *arg, u32 pool_id, u32 index, u64 serial, int fd)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_EXTENT,
				   .pool = pool_id,
				   .session = serial,
				   .index = index};

	return kvd_kept_put(arg, &key, fd);
}

static void extent_del(void *arg, u32 pool_id, u32 index, u64 serial)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_EXTENT,
				   .pool = pool_id,
				   .session = serial,
				   .index = index};

	kvd_kept_del(arg, &key);
}

static u32 region_kind(const struct kvd_region *r)
{
	switch (r->kind) {
	case KVD_REGION_FRAMES:
		return KVD_KEEP_FRAMES;
	case KVD_REGION_TOKENS:
		return KVD_KEEP_TOKENS;
	case KVD_REGION_LEASES:
		return KVD_KEEP_LEASES;
	default:
		return 0;
	}
}

static int region_put(void *arg, const struct kvd_region *r)
{
	struct kvd_keep_key key = {
		.kind = region_kind(r), .pool = r->pool_id, .session = r->session_id};

	return key.kind ? kvd_kept_put(arg, &key, r->fd) : 0;
}

static void region_del(void *arg, const struct kvd_region *r)
{
	struct kvd_keep_key key = {
		.kind = region_kind(r), .pool = r->pool_id, .session = r->session_id};

	if (key.kind)
		kvd_kept_del(arg, &key);
}

/* ------------------------------------------------------------------ start and stop */

static int image_new(struct kvd *kvd)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_IMAGE};
	struct kvd_kept *kept = &kvd->kept;
	void *addr;
	int r;

	r = kvd_memfd_create("kvmd-image", sizeof(struct kvd_image), KVD_MEMFD_PRIVATE,
			     &addr, &kept->image_fd);
	if (r)
		return r;
	kept->image = addr;
	kvd_image_format(kept->image);
	return kvd_keep_put(&kept->keep, &key, kept->image_fd);
}

/* Return: 1 there is one; 0 none that is whole; -errno it cannot be looked at */
static int image_take(struct kvd_kept *kept)
{
	for (u32 i = 0; i < kept->nr; i++) {
		off_t bytes = lseek(kept->fds[i].fd, 0, SEEK_END);
		void *addr;

		if (kept->fds[i].key.kind != KVD_KEEP_IMAGE ||
		    bytes < (off_t)sizeof(struct kvd_image))
			continue;
		addr = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
			    kept->fds[i].fd, 0);
		if (addr == MAP_FAILED)
			return -errno;
		if (!kvd_image_whole(addr, (u64)bytes)) {
			munmap(addr, (size_t)bytes);
			kept->adopted.damage++;
			continue;
		}
		kept->image = addr;
		kept->image_fd = kept->fds[i].fd;
		kept->fds[i].fd = -1;
		return 1;
	}
	return 0;
}

/* What is held must find numbers beside what kvmd opens itself, or a part of it is lost on
 * the way (cases O59). Return: 0; -EMFILE, and @error says how many it takes */
static int room_check(struct kvd_kept *kept, int listed, char *error)
{
	u32 held = KV_MAX(kept->keep.nr_held, kept->nr);
	struct rlimit lim;

	if (getrlimit(RLIMIT_NOFILE, &lim))
		return -errno;
	if (listed != -EMFILE &&
	    (held + FDS_OWN <= lim.rlim_cur || KV_MUTANT(fd_limit_unchecked)))
		return 0;
	snprintf(error, KVD_CONFIG_ERROR_BYTES,
		 "keeper %s holds %u descriptors and RLIMIT_NOFILE is %llu: it takes %u",
		 kept->keep.path, held, (unsigned long long)lim.rlim_cur, held + FDS_OWN);
	return -EMFILE;
}

static void fds_drop(struct kvd_kept *kept)
{
	for (u32 i = 0; i < kept->nr; i++)
		if (kept->fds[i].fd >= 0)
			close(kept->fds[i].fd);
	free(kept->fds);
	kept->fds = NULL;
	kept->nr = kept->room = 0;
}

/* Return: as kvd_keep_list(); 0 also where the keeper died as we came: a new one is there,
 * and nothing is left to be taken. */
static int list_all(struct kvd_kept *kept)
{
	int r = kvd_keep_list(&kept->keep, take, kept);

	if (r != -EPIPE || KV_MUTANT(dying_keeper_is_there) ||
	    kvd_keep_lives(&kept->keep))
		return r;
	fds_drop(kept);
	kept->untaken = kept->there = false;
	return kvd_keep_restart(&kept->keep);
}

int kvd_kept_start(struct kvd *kvd, char *error)
{
	struct kvd_kept *kept = &kvd->kept;
	int r;

	if (!kvd->opt.keeper)
		return 0;
	r = kvd_keep_open(&kept->keep, kvd->opt.state_dir, kvd->opt.keeper_die_with,
			  &kept->there);
	if (!r && kept->there)
		r = list_all(kept);
	if ((r >= 0 || r == -EMFILE) && room_check(kept, r, error))
		return -EMFILE;
	if (r >= 0 && kept->untaken && !KV_MUTANT(part_of_kept))
		r = -ENOMEM; /* a part of it would be the end of the rest */
	if (r >= 0)
		r = image_take(kept);
	kept->found = r > 0;
	if (r >= 0)
		r = r ? 0 : image_new(kvd);
	if (r) {
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "keeper %s: %s", kept->keep.path,
			 strerror(-r));
		return r;
	}
	kept->ops = (struct kvd_keep_ops){
		.arg = kvd, .extent_put = extent_put, .extent_del = extent_del};
	kvd->state.put = region_put;
	kvd->state.del = region_del;
	kvd->state.keep_arg = kvd;
	return 0;
}

int kvd_kept_memory(const struct kvd_kept *kept)
{
	bool any = false;

	if (!kept->found || KV_MUTANT(kept_memory_ignored))
		return -1;
	for (u32 i = 0; i < kept->nr && !any; i++)
		any = kept->fds[i].key.kind == KVD_KEEP_EXTENT;
	if (any && kept->image->memory == KVD_IMAGE_HOST)
		return KV_BACKEND_HOST;
	if (any && kept->image->memory == KVD_IMAGE_CUDA)
		return KV_BACKEND_CUDA;
	return -1;
}

void kvd_kept_memory_is(struct kvd_kept *kept, u32 kind)
{
	if (kept->image)
		kept->image->memory =
			kind == KV_BACKEND_HOST ? KVD_IMAGE_HOST : KVD_IMAGE_CUDA;
}

int kvd_kept_listen(struct kvd *kvd, u32 index)
{
	for (u32 i = 0; i < kvd->kept.nr; i++) {
		struct kvd_kept_fd *k = &kvd->kept.fds[i];
		int fd = k->fd;

		if (k->key.kind != KVD_KEEP_LISTEN || k->key.index != index || fd < 0)
			continue;
		k->fd = -1;
		return fd;
	}
	return -1;
}

int kvd_kept_done(struct kvd *kvd)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_LISTEN};
	struct kvd_kept *kept = &kvd->kept;
	int r;

	if (!kept->image)
		return 0;
	for (u32 i = 0; i < kept->nr; i++) {
		if (kept->fds[i].fd < 0)
			continue;
		close(kept->fds[i].fd);
		kvd_keep_del(&kept->keep, &kept->fds[i].key);
	}
	free(kept->fds);
	kept->fds = NULL;
	kept->nr = kept->room = 0;
	r = kvd_kept_put(kvd, &key, kvd->engine_listen.fd);
	key.index = 1;
	if (!r)
		r = kvd_kept_put(kvd, &key, kvd->admin_listen.fd);
	kept->serving = !r;
	kvd_keep_serving(&kept->keep);
	watch_keeper(kvd);
	return r;
}

void kvd_kept_stop(struct kvd *kvd, bool quit)
{
	struct kvd_kept *kept = &kvd->kept;

	if (kept->watch.id)
		kvd_loop_del(kvd->loop, &kept->watch);
	kvd_keep_close(&kept->keep, quit);
	fds_drop(kept);
	if (kept->image)
		kvd_memfd_destroy(kept->image, sizeof(struct kvd_image), kept->image_fd);
	kept->image = NULL;
}
