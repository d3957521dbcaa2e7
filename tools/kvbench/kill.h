/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kill.h - an engine is killed in the middle of a step whose work stores on and on.
 *
 * The victim is this program again, started anew, so that neither process inherits the
 * other's context. What its work stores is seen through memory that both map.
 */
#ifndef KVB_KILL_H
#define KVB_KILL_H

#include "safety.h"

#define KILL_PAGES   64u
#define KILL_WORK_NS (20 * KV_NSEC_PER_SEC)

/**
 * enum kill_child - does the victim leave a child behind?
 * @KILL_NONE: no
 * @KILL_HANDLER: one of fork(): the library's handler has closed the GPU's descriptors
 * @KILL_BARE: one of clone(), which runs no handler: the descriptors stay open
 */
enum kill_child { KILL_NONE, KILL_HANDLER, KILL_BARE, KILL_CHILDREN };

/**
 * enum kill_work - what goes on when the victim dies
 * @KILL_KERNEL: a kernel that stores
 * @KILL_COPIES: copies into its pages by the copy engines, a hundred rounds queued
 */
enum kill_work { KILL_KERNEL, KILL_COPIES };

/** struct kill_shared - memory of watcher and victim, a memfd; @counter counts stores */
struct kill_shared {
	u64 counter;
	u64 pad[511];
};

/**
 * kill_victim() - the victim: announce a step, start its work, say so, wait
 * @fd: memfd of struct kill_shared
 * @pipe: the pid of its child, or 0, is written there when the work runs
 *
 * Return: only on failure, an exit status.
 */
int kill_victim(enum kvb_backend b, const char *socket_path, enum kill_child child,
		enum kill_work what, int fd, int pipe);

#endif
