/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep/talk.h - one message and at most one descriptor, each way between kvmd and its
 * keeper. Shared by both sides; no state.
 */
#ifndef KVD_KEEP_TALK_H
#define KVD_KEEP_TALK_H

#include "kvmd/keep/keep.h"

/** struct kvd_keep_many - ENTRIES, or any message without keys */
struct kvd_keep_many {
	struct kvd_keep_msg m;
	struct kvd_keep_key keys[KVD_KEEP_BATCH];
};

/**
 * kvd_keep_say() - waits, for as long as the socket's limit
 * @fd: -1: none
 *
 * Return: 0; -ENFILE: this user has too many descriptors under way in sockets, which is no fault
 * of the peer's: somebody does not read what kvmd sent; -EPIPE.
 */
int kvd_keep_say(int conn, const struct kvd_keep_msg *m, int fd);

/** kvd_keep_say_many() - @many->m.result keys, each with its fd. Return: 0; -EPIPE */
int kvd_keep_say_many(int conn, const struct kvd_keep_many *many, const int *fds);

/**
 * kvd_keep_hear_many() - one whole message of either length; waits
 * @fds: room for KVD_KEEP_BATCH; the caller's
 * @ret_nr: how many came
 *
 * Return: 0; -EPIPE: not our peer's, its descriptors are closed; -EMFILE: there was no room
 * for all of them, and they are closed. @many can be read.
 */
int kvd_keep_hear_many(int conn, struct kvd_keep_many *many, int *fds, u32 *ret_nr);

/**
 * kvd_keep_hear() - one whole message
 * @flags: MSG_DONTWAIT or 0
 * @ret_fd: the descriptor that came with it, or -1; the caller's
 *
 * Anything else than one message with at most one descriptor is not our peer's: its
 * descriptors are closed.
 *
 * Return: 0; -EAGAIN (with MSG_DONTWAIT); -EMFILE: there was no room for its descriptor, @m can
 * be read; -EPIPE.
 */
int kvd_keep_hear(int conn, struct kvd_keep_msg *m, int flags, int *ret_fd);

#endif
