/* SPDX-License-Identifier: Apache-2.0 */
/* listen.h - the listening socket of `kv-engine serve`: loopback TCP or a Unix socket. */
#ifndef ENG_HTTP_LISTEN_H
#define ENG_HTTP_LISTEN_H

#include <stdbool.h>
#include "base/util.h"
#include "engine/model/err.h"

/**
 * struct eng_listener - an open listening socket
 * @fd: it
 * @port: TCP port, 0 on a Unix socket
 * @path: Unix socket to remove at the end; empty = none
 */
struct eng_listener {
	int fd;
	u32 port;
	char path[108];
};

/**
 * eng_listen() - open one
 * @address: "127.0.0.1:PORT", "[::1]:PORT" or "localhost:PORT"; other addresses are
 *	refused, there is no authentication here. NULL with @path
 * @path: Unix socket; an old socket that nobody listens on is replaced. NULL with
 *	@address
 *
 * Return: 0; -EINVAL; -EADDRINUSE; another -errno of socket, bind, listen.
 */
int eng_listen(const char *address, const char *path, struct eng_listener *ret,
	       struct eng_err *err);

/** eng_listener_close() - remove the Unix socket; close the fd too if @close_fd */
void eng_listener_close(struct eng_listener *l, bool close_fd);

#endif /* ENG_HTTP_LISTEN_H */
