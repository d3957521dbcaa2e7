/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/listen.h - the two listening sockets. Loop thread only.
 *
 * On the engines' socket each uid has a pace (pace.h). A connection that comes too early
 * waits in a room, as a descriptor that nobody looks at; one that finds no place there is
 * closed. While anybody waits, kvmd does not watch the socket: it looks every KVD_PAUSE_NS,
 * takes KVD_PAUSE_BATCH at most, and the rest stays in the kernel's queue. So a uid that
 * connects without end costs the others a fraction of a millisecond in 20, and they still
 * get in within a few pauses.
 */
#ifndef KVD_IPC_LISTEN_H
#define KVD_IPC_LISTEN_H

#include "base/util.h"
#include "kvmd/ipc/loop.h"
#include "kvmd/ipc/pace.h"

#define KVD_PAUSE_NS	    20000000ull
#define KVD_PAUSE_BATCH	    32u
#define KVD_WAITING_MAX	    128u
#define KVD_WAITING_UID_MAX (KVD_WAITING_MAX / 4)

struct kvd;

/**
 * struct kvd_listen - a listening Unix socket
 * @fd: owner; -1 = closed
 * @path: borrowed; removed by kvd_listen_close() if it is still ours
 * @inode: of the path, to recognise it
 * @paced: by uid
 * @again_ns: when to look again; 0: it is watched
 * @pace, @waiting, @nr_waiting: connections that came too early, oldest first; owner of
 *	their fds
 */
struct kvd_listen {
	int fd;
	const char *path;
	u64 inode;
	struct kvd *kvd;
	struct kvd_watch watch;
	void (*accepted)(struct kvd *kvd, int fd);
	bool paced;
	u64 again_ns;
	struct kvd_pace pace;
	u32 nr_waiting;
	struct {
		int fd;
		u32 uid;
	} waiting[KVD_WAITING_MAX];
};

/**
 * kvd_listen_open() - bind, listen, watch
 * @type: SOCK_SEQPACKET or SOCK_STREAM
 * @mode: of the path
 * @accepted: owns the fd it gets
 * @error: KVD_CONFIG_ERROR_BYTES
 *
 * A path that a dead daemon left is removed; one that somebody answers on is -EADDRINUSE;
 * one that is no socket is left alone (-EEXIST). Return: 0; -errno.
 */
int kvd_listen_open(struct kvd *kvd, struct kvd_listen *l, const char *path, int type,
		    u32 mode, void (*accepted)(struct kvd *kvd, int fd), int kept_fd,
		    char *error);

/** kvd_listen_next_ns() - when kvd_listen_turn() has something to do; ~0: never */
static inline u64 kvd_listen_next_ns(const struct kvd_listen *l)
{
	return l->again_ns ? l->again_ns : ~0ull;
}

/** kvd_listen_turn() - a pause is over: those who waited, then new ones */
void kvd_listen_turn(struct kvd_listen *l);

/** kvd_listen_tick() - listen again after a lack of fds */
void kvd_listen_tick(struct kvd_listen *l);

/** kvd_listen_close() - stop listening and remove the path */
void kvd_listen_close(struct kvd_listen *l);

#endif
