/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep/keep.h - the keeper: a process that holds kvmd's fds while there is no kvmd.
 *
 * It listens on STATE_DIR/keeper.sock, holds what it is given under a fixed-size key, and
 * gives it back to the next kvmd of the same uid. It maps nothing, parses nothing else
 * and never touches a GPU. One kvmd at a time: a new connection is served after
 * everything the old one had sent was taken, which is what a kvmd that died had sent
 * last.
 *
 * kvmd waits for the answer to a put: a fd is in the keeper before anybody is given it.
 * Thread rules: the loop thread only.
 */
#ifndef KVD_KEEP_H
#define KVD_KEEP_H

#include <stdbool.h>
#include "base/util.h"

#define KVD_KEEP_MAX 65536u

/**
 * enum kvd_keep_kind - what a fd is
 * @KVD_KEEP_IMAGE: own/image.h
 * @KVD_KEEP_FRAMES, @KVD_KEEP_TOKENS: pool
 * @KVD_KEEP_LEASES: pool, session
 * @KVD_KEEP_EXTENT: pool, index, serial in @session
 * @KVD_KEEP_PAGE: session page; index: tenant
 * @KVD_KEEP_PIDFD: session
 * @KVD_KEEP_LISTEN: index 0 engines, 1 admin
 * @KVD_KEEP_DEVICE: index: an open device, so that its driver stays loaded
 * @KVD_KEEP_MOVER: pidfd; session: the pid, index: enum kvd_mover_kept
 * @KVD_KEEP_POOL: memory of a DRAM tier (ipc/filling.h); session: when that kvmd started
 */
enum kvd_keep_kind {
	KVD_KEEP_IMAGE = 1,
	KVD_KEEP_FRAMES,
	KVD_KEEP_TOKENS,
	KVD_KEEP_LEASES,
	KVD_KEEP_EXTENT,
	KVD_KEEP_PAGE,
	KVD_KEEP_PIDFD,
	KVD_KEEP_LISTEN,
	KVD_KEEP_DEVICE,
	KVD_KEEP_MOVER,
	KVD_KEEP_POOL,
	KVD_KEEP_KINDS
};

struct kvd_keep_key {
	u32 kind;
	u32 pool;
	u64 session;
	u32 index;
	u32 reserved;
};

enum kvd_keep_op {
	KVD_KEEP_PUT = 1, /* + fd; answered by PUT with result */
	KVD_KEEP_DEL,	  /* not answered */
	KVD_KEEP_LIST,	  /* answered by ENTRY + fd each, or ENTRIES, then END */
	KVD_KEEP_ENTRY,
	KVD_KEEP_END,
	KVD_KEEP_QUIT,	  /* kvmd has ended: close everything and end */
	KVD_KEEP_ENTRIES, /* result keys behind the message, as many fds */
};

#define KVD_KEEP_MAGIC 0x7065656bu /* "keep" */

/*
 * LIST says in its key's index how many fds a message may carry at most; 0, as of a kvmd of
 * before, is one each. A queue of Unix messages holds ten by default: one each, keeper and
 * kvmd wait for one another at every tenth.
 */
#define KVD_KEEP_BATCH 64u

/* The only message there is, but for the keys of ENTRIES. */
struct kvd_keep_msg {
	u32 magic;
	u32 op;
	struct kvd_keep_key key;
	s32 result;
	u32 reserved;
};

/** kvd_keeper_main() - be the keeper: @listen_fd listens, ends when pid @die_with ends (0 =
 * never). Return: exit status */
int kvd_keeper_main(int listen_fd, int die_with);

/**
 * struct kvd_keep - kvmd's side
 * @fd: connection; -1 = no keeper is wanted
 * @path: of its socket
 * @die_with: passed to a keeper that is started
 * @nr_started: keepers started by this process
 * @nr_held: what it said that it holds, when it was asked for the list; 0 it did not say
 * @answer_s: one that is silent for so long counts as dead
 * @silent: it did not take a delete in that time: it is to be replaced, and is asked no more
 */
struct kvd_keep {
	int fd;
	char path[108];
	int die_with;
	u32 nr_started;
	u32 nr_held;
	u32 answer_s;
	bool silent;
};

/**
 * kvd_keep_open() - connect to the keeper of a state directory, or start one
 * @ret_found: one was there already: kvd_keep_list() has something to say
 *
 * Return: 0; -errno.
 */
int kvd_keep_open(struct kvd_keep *k, const char *state_dir, int die_with,
		  bool *ret_found);

/**
 * kvd_keep_serving() - the start is over: others wait for us from now on
 *
 * At a start it is the other way round: what the keeper has is worth waiting for, also on a
 * machine that is so busy that it does not answer for seconds.
 */
void kvd_keep_serving(struct kvd_keep *k);

/** kvd_keep_put() - keep a fd. Return: 0; -EPIPE there is no keeper any more; -ENFILE it
 * has no room, or none is left on the way to it */
int kvd_keep_put(struct kvd_keep *k, const struct kvd_keep_key *key, int fd);

/** kvd_keep_del() - forget a fd; not an error if the keeper is away */
void kvd_keep_del(struct kvd_keep *k, const struct kvd_keep_key *key);

/**
 * kvd_keep_list() - get everything back
 * @fn: gets each fd, which is its own
 *
 * Return: fds; -EMFILE this process may not have so many (@nr_held); -errno. @fn has had
 * some.
 */
int kvd_keep_list(struct kvd_keep *k,
		  void (*fn)(void *arg, const struct kvd_keep_key *key, int fd),
		  void *arg);

/** kvd_keep_lives() - is a keeper at its place, though it does not answer? */
bool kvd_keep_lives(const struct kvd_keep *k);

/** kvd_keep_restart() - the keeper died, or does not answer: start a new one, which is
 * empty. The old one ends when it comes to itself */
int kvd_keep_restart(struct kvd_keep *k);

/** kvd_keep_close() - @quit: kvmd ends for good: so does the keeper */
void kvd_keep_close(struct kvd_keep *k, bool quit);

#endif /* KVD_KEEP_H */
