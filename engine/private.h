/* SPDX-License-Identifier: Apache-2.0 */
/*
 * private.h - a kvmd of one's own: commands without --socket start one and stop it again.
 *
 * Any user may do this; the daemon dies with its parent, its sockets lie in a fresh 0700
 * directory. Not thread-safe: start and stop from the main thread.
 */
#ifndef ENG_PRIVATE_H
#define ENG_PRIVATE_H

#include <stddef.h>
#include <sys/types.h>

/**
 * struct eng_private_kvmd - a running private daemon
 * @pid: its process; a child of ours
 * @dir: temporary directory; removed by eng_private_kvmd_stop()
 * @socket_path: engines' socket, for struct kvc_options
 * @admin_path: kvmctl's socket
 * @log_path: what the daemon wrote to stdout and stderr
 */
struct eng_private_kvmd {
	pid_t pid;
	char dir[64];
	char socket_path[108];
	char admin_path[108];
	char log_path[108];
};

/**
 * eng_private_kvmd_start() - start a daemon and wait until it serves
 * @extra_args: more arguments for kvmd, NULL-terminated (at most 15); NULL = none. It
 * serves host memory unless "--backend" is among them
 * @ret_kvmd: the daemon; eng_private_kvmd_stop() it
 * @ret_error: on failure, one line that says what went wrong; may be NULL
 * @error_bytes: room at @ret_error
 *
 * kvmd is $KV_BUILD/kvmd, else it is looked for beside this program and in the
 *	directories above it. Waits 10 s at most.
 *
 * Return: 0; -ENOENT no kvmd found; -ETIMEDOUT; -ECHILD it ended before it served (the
 *	end of its log is in @ret_error); another -errno of mkdtemp, pipe or spawn.
 */
int eng_private_kvmd_start(const char *const *extra_args,
			   struct eng_private_kvmd *ret_kvmd, char *ret_error,
			   size_t error_bytes);

/**
 * eng_private_kvmd_stop() - SIGTERM, wait (SIGKILL after 5 s), remove the directory
 *
 * Return: the daemon's exit status; 128 + signal if a signal ended it.
 */
int eng_private_kvmd_stop(struct eng_private_kvmd *kvmd);

#endif /* ENG_PRIVATE_H */
