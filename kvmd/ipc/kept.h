/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/kept.h - what the daemon gives its keeper, and how it takes up what an earlier one
 * left (design 9).
 *
 * Thread rules: the loop thread only.
 */
#ifndef KVD_IPC_KEPT_H
#define KVD_IPC_KEPT_H

#include "kvmd/ipc/loop.h"
#include "kvmd/keep/keep.h"
#include "kvmd/mm/env.h"
#include "kvmd/own/adopt.h"

struct kvd;
struct kvd_image;

struct kvd_kept_fd {
	struct kvd_keep_key key;
	int fd; /* -1: taken */
};

/**
 * struct kvd_kept - the daemon's side
 * @keep: connection; @watch tells of its end
 * @image, @image_fd: mapped; NULL without a keeper
 * @ops: for the core
 * @there: the keeper is an earlier kvmd's: it is not ended because we cannot start
 * @found: it had an image
 * @serving: the start is over
 * @fds: [nr], from the keeper, while adopting; @untaken: some found no room
 * @adopted: what was taken over; @adopt_ns how long it took
 * @restarts: keepers that had to be replaced
 * @half: page of a session, or records of a pool, whose other half is put next: nothing that
 *	put_all() goes through has it yet. No kind: none
 */
struct kvd_kept {
	struct kvd_keep keep;
	struct kvd_watch watch;
	struct kvd_image *image;
	int image_fd;
	struct kvd_keep_ops ops;
	bool there;
	bool found;
	bool serving;
	bool refilling;
	struct kvd_kept_fd *fds;
	u32 nr, room;
	bool untaken;
	struct kvd_adopted adopted;
	u64 adopt_ns;
	u32 restarts;
	struct kvd_kept_fd half;
};

/** kvd_kept_start() - before the memory is chosen: connect, take what is there, map the image */
int kvd_kept_start(struct kvd *kvd, char *error);

/**
 * kvd_kept_memory() - which memory the extents that were found are made of
 *
 * Another one cannot adopt them: their pages would be lost.
 * Return: KV_BACKEND_HOST, KV_BACKEND_CUDA; -1 there are none, or it is not known.
 */
int kvd_kept_memory(const struct kvd_kept *kept);

/** kvd_kept_memory_is() - for the next kvmd: the extents are of @kind, KV_BACKEND_*, now */
void kvd_kept_memory_is(struct kvd_kept *kept, u32 kind);

/** kvd_kept_adopt() - after the core: domains, tenants, sessions, pools */
int kvd_kept_adopt(struct kvd *kvd, char *error);

/** kvd_kept_listen() - a listening socket that was kept, or -1 */
int kvd_kept_listen(struct kvd *kvd, u32 index);

/** kvd_kept_done() - what nobody asked for goes; from now on its end is noticed */
int kvd_kept_done(struct kvd *kvd);

/** kvd_kept_put() - keep a fd; replaces the keeper if it died. 0 without one */
int kvd_kept_put(struct kvd *kvd, const struct kvd_keep_key *key, int fd);

void kvd_kept_del(struct kvd *kvd, const struct kvd_keep_key *key);

/** kvd_kept_tick() - once a second: a keeper that could not be replaced is tried again */
void kvd_kept_tick(struct kvd *kvd);

/** kvd_kept_stop() - @quit: for good */
void kvd_kept_stop(struct kvd *kvd, bool quit);

#endif
