/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/loop.h - waiting for file descriptors, by io_uring or, where that is forbidden,
 * epoll.
 *
 * A watch is one-shot inside and level-triggered outside: after its callback ran it is
 * armed again together with the next wait, so waiting and arming are one system call. A
 * watch that was removed delivers nothing any more, also not an event the kernel had
 * already posted.
 *
 * Thread rules: the loop thread only. Callbacks may add and remove watches, their own
 * too.
 */
#ifndef KVD_IPC_LOOP_H
#define KVD_IPC_LOOP_H

#include <stdbool.h>

#include "base/util.h"

#define KVD_WATCHES_MAX 8192u

#define KVD_LOOP_IN	0x01u
#define KVD_LOOP_OUT	0x02u
#define KVD_LOOP_HUP	0x04u /* hang-up or error; always reported */

struct kvd_loop;

/**
 * struct kvd_watch - one file descriptor
 * @fd: borrowed; remove the watch before closing it
 * @events: KVD_LOOP_IN | KVD_LOOP_OUT wanted
 * @ready: called with KVD_LOOP_* bits
 * @arg: first argument of @ready
 * @id: loop's own; 0 = not added
 */
struct kvd_watch {
	int fd;
	u32 events;
	void (*ready)(void *arg, u32 events);
	void *arg;
	u32 id;
};

/**
 * kvd_loop_create() - make a loop
 * @force_epoll: do not try io_uring (tests, --loop epoll)
 * @ret_loop: the loop; kvd_loop_destroy() it
 *
 * Return: 0; -ENOMEM; -EMFILE.
 */
int kvd_loop_create(bool force_epoll, struct kvd_loop **ret_loop);

/** kvd_loop_destroy() - free a loop, or NULL; watches are not touched */
void kvd_loop_destroy(struct kvd_loop *loop);

/** kvd_loop_engine() - "io_uring", or "epoll (io_uring: <why not>)" */
const char *kvd_loop_engine(const struct kvd_loop *loop);

/** kvd_loop_is_uring() - false: the fallback is in use, which status shows */
bool kvd_loop_is_uring(const struct kvd_loop *loop);

/**
 * kvd_loop_add() - start watching
 * @watch: fd, events, ready, arg set; stays the caller's until kvd_loop_del()
 *
 * Return: 0; -ENOSPC KVD_WATCHES_MAX are in use; -errno of epoll_ctl.
 */
int kvd_loop_add(struct kvd_loop *loop, struct kvd_watch *watch);

/** kvd_loop_del() - stop watching; a watch that was not added is ignored */
void kvd_loop_del(struct kvd_loop *loop, struct kvd_watch *watch);

/** kvd_loop_modify() - change the wanted events */
void kvd_loop_modify(struct kvd_loop *loop, struct kvd_watch *watch, u32 events);

/** kvd_loop_on_wake() - call @fn after each wait and before its callbacks: to read the
 * clock */
void kvd_loop_on_wake(struct kvd_loop *loop, void (*fn)(void *arg), void *arg);

/**
 * kvd_loop_wait() - wait for events until a deadline and run their callbacks
 * @deadline_ns: monotonic; 0 = do not sleep
 *
 * At most KVD_LOOP_BATCH callbacks run.
 * Return: callbacks run; 0 at the deadline, now and then earlier (a removed watch's last
 *	word); -errno.
 */
int kvd_loop_wait(struct kvd_loop *loop, u64 deadline_ns);

#define KVD_LOOP_BATCH 64u

/** kvd_loop_pending() - cheap question while spinning: would a wait find something at
 * once? */
bool kvd_loop_pending(struct kvd_loop *loop);

/**
 * kvd_loop_kick() - add 1 to an eventfd that a client holds too; never blocks
 *
 * The client may have cleared O_NONBLOCK and filled the counter. With io_uring the write
 * goes out with the next wait and cannot block the loop. A full counter is left as it is.
 */
void kvd_loop_kick(struct kvd_loop *loop, int event_fd);

/** kvd_loop_drain() - read an eventfd's counter away; never blocks */
void kvd_loop_drain(int event_fd);

/** kvd_loop_flush() - submit what is prepared; before closing an fd that was kicked */
void kvd_loop_flush(struct kvd_loop *loop);

#endif
