/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/filling.h - the DRAM tier's memory after a restart: engines do not wait for it.
 *
 * To allocate it takes a second for some GiB. At a cold start kvmd waits, so that a lack of
 * memory is an error there; when it comes back under living engines (a crash, an upgrade)
 * they would wait as well. So a thread allocates, and until it has there are no tiers: what
 * is evicted is dropped, what lies on NVMe is not found yet. If memory is short it is tried
 * again; status says so.
 *
 * To free it takes a third of that, and a process that was killed is not gone before its
 * memory is: nobody starts the next kvmd so long. So the keeper holds it as well, and the
 * next kvmd's thread frees it, piece by piece, so that it can be killed as well. Its bytes are
 * never used again: a dead kvmd's disk may still write there (decisions 47).
 *
 * Thread rules: the loop thread only, but for the thread's own function.
 */
#ifndef KVD_IPC_FILLING_H
#define KVD_IPC_FILLING_H

#include <stdbool.h>

#include "kvmd/ipc/kept.h"
#include "kvmd/ipc/loop.h"
#include "kvmd/tier/work.h"

struct kvd;

/* So much takes no time worth a thread. */
#define KVD_FILL_AT_ONCE (64ull << 20)
/* One each that was killed before it had freed the one before. */
#define KVD_FILL_OLD	 8u

/**
 * struct kvd_filling - memory that is on its way
 * @wanted: the pool is not all there yet
 * @worker: NULL: nobody is at it
 * @work, @fill, @result: of the thread; @stop: it shall give up; @stuck: it does nothing else
 *	(the fault tier_fill_stuck)
 * @old: [nr_old], memory of earlier kvmds, to be freed, and its names in the keeper
 * @next_ns: not before
 * @error: why the last try failed; "" there was none
 */
struct kvd_filling {
	bool wanted;
	struct kvd *kvd;
	struct kvd_workers *worker;
	struct kvd_watch watch;
	struct kvd_work work;
	struct kvd_kept_fd old[KVD_FILL_OLD];
	u32 nr_old;
	bool fill;
	int result;
	bool stop;
	bool stuck;
	u64 next_ns;
	char error[160];
};

/** kvd_filling_take() - at the start, before the pool is made: what the keeper has of it */
void kvd_filling_take(struct kvd *kvd);

/** kvd_filling_keep() - give the pool to the keeper. Return: 0, also without; as
 * kvd_kept_put() */
int kvd_filling_keep(struct kvd *kvd);

/** kvd_filling_turn() - start the thread as soon as the earlier kvmd's mover, which has as
 * much memory, is gone */
void kvd_filling_turn(struct kvd *kvd);

/** kvd_filling_stop() - before the pool goes; waits for the thread, some 10 ms */
void kvd_filling_stop(struct kvd *kvd);

#endif
