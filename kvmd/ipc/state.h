/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/state.h - the few numbers that must survive a restart, and the memory given to the
 * core.
 *
 * STATE_DIR/counters holds the generation bound and the grace epoch (design 5, P1 and
 * P7): no value at or above a saved one was ever used. It is replaced by write, fsync,
 * rename, fsync of the directory, so a crash leaves the old or the new one. A damaged
 * file stops the start: guessing a bound could repeat a generation.
 *
 * STATE_DIR/lock is held by flock: one daemon per directory. The admin socket's path with
 * KVMD_ADMIN_LOCK_SUFFIX is held as well, for kvmctl, which does not know the directory: it asks who
 * has the lock (F_GETLK) and takes none. No child inherits that one, and the file stays.
 */
#ifndef KVD_IPC_STATE_H
#define KVD_IPC_STATE_H

#include "kvmd/mm/env.h"

/**
 * struct kvd_state - an open state directory
 * @dir_fd: owner
 * @lock_fd: owner; holds the lock
 * @alive_fd: owner; holds the lock beside the admin socket
 * @saved: last saved values, by enum kvd_saved
 * @nr_saves: files written
 * @foreseen_gen: generation bound that the next save writes as well, whatever it is for
 * @put, @del, @keep_arg: who keeps regions that must survive; NULL: nobody
 */
struct kvd_state {
	int dir_fd;
	int lock_fd;
	int alive_fd;
	u64 saved[2];
	u64 nr_saves;
	u64 foreseen_gen;
	int (*put)(void *arg, const struct kvd_region *r);
	void (*del)(void *arg, const struct kvd_region *r);
	void *keep_arg;
};

/**
 * kvd_state_open() - open, lock and read a state directory
 * @error: room for @error_bytes; says what and where
 *
 * A missing directory is made with mode 0700. No counters yet means both are 0.
 * Return: 0; -EBUSY another daemon holds it; -EBADMSG damaged; -EPERM others may write to
 *	it; -errno.
 */
int kvd_state_open(const char *path, struct kvd_state *state, char *error,
		   size_t error_bytes);

/**
 * kvd_state_alive() - say beside the admin socket that this process lives, until its end
 * @admin_path: of the socket; it need not be there yet
 * @error: as kvd_state_open()
 *
 * Return: 0; -EADDRINUSE another daemon does; -errno.
 */
int kvd_state_alive(struct kvd_state *state, const char *admin_path, char *error,
		    size_t error_bytes);

/** kvd_state_close() - give up the locks */
void kvd_state_close(struct kvd_state *state);

/**
 * kvd_state_foresee() - the next save of any counter raises the generation bound as well
 *
 * An adoption needs both counters at once: one write to the disk, not two.
 */
void kvd_state_foresee(struct kvd_state *state);

/** kvd_state_env() - services for the core; @state is borrowed */
struct kvd_env kvd_state_env(struct kvd_state *state);

#endif
