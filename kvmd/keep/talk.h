/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep/talk.h - one message and at most one descriptor, each way between kvmd and its
 * keeper. Shared by both sides; no state.
 */
#ifndef KVD_KEEP_TALK_H
#define KVD_KEEP_TALK_H

#include "kvmd/keep/keep.h"

/** kvd_keep_say() - @fd -1: none. Return: 0; -EPIPE */
int kvd_keep_say(int conn, const struct kvd_keep_msg *m, int fd);

/**
 * kvd_keep_hear() - one whole message
 * @flags: MSG_DONTWAIT or 0
 * @ret_fd: the descriptor that came with it, or -1; the caller's
 *
 * Anything else than one message with at most one descriptor is not our peer's: its
 * descriptors are closed.
 *
 * Return: 0; -EAGAIN (with MSG_DONTWAIT); -EPIPE.
 */
int kvd_keep_hear(int conn, struct kvd_keep_msg *m, int flags, int *ret_fd);

#endif
