/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base/spawn.h - a child by posix_spawn: no copy of the parent's page tables, and the parent may
 * have threads. Any thread may call it.
 */
#ifndef KV_BASE_SPAWN_H
#define KV_BASE_SPAWN_H

#include <signal.h>
#include <spawn.h>
#include <sys/types.h>

extern char **environ;

/**
 * kv_spawn() - start @program with this process's environment and no signal blocked
 * @program: path, not looked for in PATH
 * @actions: what becomes of descriptors; the caller's to destroy
 * @argv: NULL-terminated
 * @ret_pid: the child; undefined on failure
 *
 * kvmd blocks the signals that it reads from a signalfd; a child would keep that over its exec
 * and never hear a SIGTERM.
 * Return: 0; -errno: nothing was started.
 */
static inline int kv_spawn(const char *program, const posix_spawn_file_actions_t *actions,
			   char *const *argv, pid_t *ret_pid)
{
	posix_spawnattr_t attr;
	sigset_t none;
	int r;

	sigemptyset(&none);
	r = posix_spawnattr_init(&attr);
	if (r)
		return -r;
	r = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK);
	if (!r)
		r = posix_spawnattr_setsigmask(&attr, &none);
	if (!r)
		r = posix_spawn(ret_pid, program, actions, &attr, argv, environ);
	posix_spawnattr_destroy(&attr);
	return -r;
}

#endif
