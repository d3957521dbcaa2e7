/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/listen.h - the two listening sockets. Loop thread only. */
#ifndef KVD_IPC_LISTEN_H
#define KVD_IPC_LISTEN_H

#include "base/util.h"
#include "kvmd/ipc/loop.h"

struct kvd;

/**
 * struct kvd_listen - a listening Unix socket
 * @fd: owner; -1 = closed
 * @path: borrowed; removed by kvd_listen_close() if it is still ours
 * @inode: of the path, to recognise it
 */
struct kvd_listen {
	int fd;
	const char *path;
	u64 inode;
	struct kvd *kvd;
	struct kvd_watch watch;
	void (*accepted)(struct kvd *kvd, int fd);
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

/** kvd_listen_tick() - listen again after a lack of fds */
void kvd_listen_tick(struct kvd_listen *l);

/** kvd_listen_close() - stop listening and remove the path */
void kvd_listen_close(struct kvd_listen *l);

#endif
