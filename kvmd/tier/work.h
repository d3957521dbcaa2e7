/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/work.h - a few threads for what must not run on the loop: digests of pages, writes
 * of the journal, and file I/O where there is no io_uring.
 *
 * A work item is run by some thread and then finished on the loop thread. run() sees only
 * what the item points to; nobody else touches that until done() was called. The queue's
 * lock is taken for a few instructions on either side and never while run() works.
 *
 * Thread rules: run() on a worker; everything else on the loop thread.
 */
#ifndef KVD_TIER_WORK_H
#define KVD_TIER_WORK_H

#include "base/util.h"

#define KVD_WORKERS_MAX 16u

struct kvd_workers;

/**
 * struct kvd_work - embedded in what it works on
 * @run: on a worker thread; must not call into the daemon
 * @done: on the loop thread, from kvd_workers_reap()
 * @next: queue's own
 */
struct kvd_work {
	void (*run)(struct kvd_work *w);
	void (*done)(struct kvd_work *w);
	struct kvd_work *next;
};

/** kvd_workers_create() - @nr threads, 1..KVD_WORKERS_MAX. Return: 0; -ENOMEM; -EMFILE;
 * -EAGAIN */
int kvd_workers_create(u32 nr, struct kvd_workers **ret);

/** kvd_workers_destroy() - run what is queued, finish it, end the threads; or NULL */
void kvd_workers_destroy(struct kvd_workers *ws);

/** kvd_workers_fd() - readable when kvd_workers_reap() has something to do */
int kvd_workers_fd(const struct kvd_workers *ws);

/** kvd_work_submit() - queue an item; it is not queued or running */
void kvd_work_submit(struct kvd_workers *ws, struct kvd_work *w);

/** kvd_workers_reap() - done() of everything that has run. Return: how many */
u32 kvd_workers_reap(struct kvd_workers *ws);

/** kvd_workers_pending() - submitted and not done */
u32 kvd_workers_pending(const struct kvd_workers *ws);

#endif
