/* SPDX-License-Identifier: Apache-2.0 */
/*
 * harden.h - what kvmd gives up before it opens anything: its environment, root, system
 * calls that it never makes. Called by main.c, once, before any thread exists. The keeper
 * and the mover inherit all of it.
 */
#ifndef KVD_HARDEN_H
#define KVD_HARDEN_H

#include <stddef.h>

/**
 * kvd_harden_environment() - nothing that the caller's environment could steer is left
 *
 * Variables of the CUDA driver, the loader and OpenMP could send a daemon to another GPU or
 * into another library. PATH, LANG and what a service manager needs to be told (NOTIFY_SOCKET)
 * or has told (JOURNAL_STREAM) stay. Not with --private: there the caller is the only user.
 */
void kvd_harden_environment(void);

/** struct kvd_harden_paths - directories that must be the user's afterwards */
struct kvd_harden_paths {
	const char *state_dir;
	const char *socket_path;
	const char *admin_path;
};

/**
 * kvd_harden_user() - become @name: its uid, its groups, and two capabilities
 * @paths: made if missing and given to the user: the state directory (mode 0700) and the
 *	directory of each socket if it lies below /run; NULL: no directory
 * @error: why not
 *
 * CAP_KILL stays, for `on_stall: kill` and engines of other users, and CAP_IPC_LOCK, for
 * pinned memory; both also across an upgrade's exec. As that user already: nothing to do.
 *
 * Return: 0; -ENOENT no such user; -EPERM the caller is neither root nor that user; -errno.
 */
int kvd_harden_user(const char *name, const struct kvd_harden_paths *paths, char *error,
		    size_t error_bytes);

/**
 * kvd_harden_seccomp() - system calls that kvmd never makes end with EPERM from now on
 *
 * Loading kernel code, mounting, tracing and reading other processes, keys, clocks,
 * namespaces, and sockets other than AF_UNIX and AF_NETLINK. The CUDA driver may make
 * any other call: a list of what is allowed would be the driver's to break. Calls of
 * another architecture end the process.
 *
 * Return: 0; -errno: the kernel has no seccomp filters.
 */
int kvd_harden_seccomp(void);

#endif
