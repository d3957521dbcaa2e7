/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover/mover.h - kvmd's side of the mover, the process that copies pages between extents
 * and pinned host memory (design 3, facts F-mover).
 *
 * kvmd has no CUDA context and its one thread may not wait for a copy, so a process of its
 * own has the context and does large asynchronous copies by the copy engines: nothing
 * else, no kernels, no memsets, no small synchronous copies. On host memory the same
 * process copies between memfds. It is started at the first job and again, with a growing
 * pause, after it died. Any of its crashes costs its jobs and nothing else:
 *
 *	OFF -> STARTING -> READY -> DYING -> ENDING -> BACKOFF -> STARTING
 *
 *	STARTING  the process runs; jobs wait in kvmd. On a GPU until NVML lists it as well.
 *	          One that is not ready after 30 s, and a second for each GiB that it pins, is
 *	          killed; jobs fail as with one that cannot start
 *	READY     jobs are handed over
 *	DYING     it hung up, broke the protocol or stood still: killed; the pidfd is awaited
 *	ENDING    the process is gone; on a GPU its copies may not be: kvmd waits for NVML
 *	          (P8). Unfinished jobs keep their frames and slots until then
 *	BACKOFF   its end is proven: all unfinished jobs failed with -EPIPE, extents are put
 *
 * A job handed over is unfinished until the mover reports it or its end is proven: until
 * then a DMA may still write the frames (IN) or the slots (OUT) it names, so its owner
 * changes nothing about them before done() was called. A deadline or a cancel takes back
 * at once only what was not handed over.
 *
 * An extent is handed to the mover with the first job that names it, and is from then on
 * given (kvd_extent_given()): it is not released before kvd_mover_extent_drop() was
 * answered or the mover's end is proven. A drop waits for the extent's jobs.
 *
 * Thread rules: the loop thread only. done() may submit and cancel.
 */
#ifndef KVD_MOVER_H
#define KVD_MOVER_H

#include <stdbool.h>
#include <sys/types.h>

#include "base/util.h"
#include "kv/abi.h"

#define KVD_MOVER_JOBS_MAX   256u	 /* submitted and not done */
#define KVD_MOVER_COPIES_MAX 1024u	 /* in one job, before runs are merged */
#define KVD_MOVER_RUN_MAX    (32u << 20) /* a merged run is at most this long */
#define KVD_MOVER_NEVER	     (~0ull)

struct kvd_mover;

/** enum kvd_mover_state - see the head of this file */
enum kvd_mover_state {
	KVD_MOVER_OFF,
	KVD_MOVER_STARTING,
	KVD_MOVER_READY,
	KVD_MOVER_DYING,
	KVD_MOVER_ENDING,
	KVD_MOVER_BACKOFF,
};

/**
 * enum kvd_mover_kept - what a later kvmd needs to know of the process
 * @KVD_MOVER_FRESH: it never had a job
 * @KVD_MOVER_LISTED: it may have copies under way; NVML lists it while it lives
 * @KVD_MOVER_UNLISTED: it may, and nothing will prove their end
 */
enum kvd_mover_kept { KVD_MOVER_FRESH, KVD_MOVER_LISTED, KVD_MOVER_UNLISTED };

/** enum kvd_mover_dir - which way */
enum kvd_mover_dir {
	KVD_MOVER_OUT, /* extent -> host pool */
	KVD_MOVER_IN,  /* host pool -> extent */
};

/**
 * struct kvd_mover_extent - an extent, by the name it has in kvmd
 * @pool_id, @index, @serial: name; one that is used again has another serial
 * @fd: its descriptor (struct kvd_extent_handle), borrowed for the call
 * @bytes: its size
 */
struct kvd_mover_extent {
	u32 pool_id;
	u32 index;
	u64 serial;
	int fd;
	u64 bytes;
};

/**
 * struct kvd_mover_copy - one piece of a job, usually a page
 * @extent: borrowed for the call
 * @extent_off, @pool_off: where, in bytes, in the extent and in the host pool
 * @bytes: > 0
 */
struct kvd_mover_copy {
	const struct kvd_mover_extent *extent;
	u64 extent_off;
	u64 pool_off;
	u64 bytes;
};

/**
 * struct kvd_mover_job - a batch of copies in one direction, done or failed as a whole
 * @dir: enum kvd_mover_dir
 * @nr: of @copies, <= KVD_MOVER_COPIES_MAX; give neighbours in order, they become one run
 * @deadline_ns: monotonic; not handed over by then: -ETIMEDOUT. 0: none
 * @done: called once, never from inside kvd_mover_submit(). @status: 0 all bytes are
 *	there; -ECANCELED; -ETIMEDOUT; -EPIPE the mover died; -EIO, -ENOMEM, ... it could
 *	not map or copy. After a failure any part may have been copied
 * @arg: first argument of @done
 */
struct kvd_mover_job {
	enum kvd_mover_dir dir;
	u32 nr;
	const struct kvd_mover_copy *copies;
	u64 deadline_ns;
	void (*done)(void *arg, u64 id, int status);
	void *arg;
};

/**
 * struct kvd_mover_ops - what the daemon does for it; all mandatory
 * @arg: first argument
 * @extent_given, @extent_put: count the mover among the holders of an extent
 * @keep: the process's pidfd goes to the keeper when it starts, and again before it gets
 *	its first job. pidfd -1: its end is proven. Return: 0; -errno: no mover
 * @started: it has a context: find out whether NVML lists it, then call
 *	kvd_mover_listed(). Not called on host memory
 * @prove: the process is gone with copies unfinished: find out whether its GPU work is,
 *	then call kvd_mover_ended(). Not called on host memory, where the pidfd is the proof
 * @died: the process is gone, asked or not; @owned: with memory of kvd_mover_alloc()
 * @alloced: answer to kvd_mover_alloc(): 0 and 64 bytes of handle, or -errno and a text
 */
struct kvd_mover_ops {
	void *arg;
	void (*extent_given)(void *arg, u32 pool_id, u32 index, u64 serial);
	void (*extent_put)(void *arg, u32 pool_id, u32 index, u64 serial);
	int (*keep)(void *arg, pid_t pid, int pidfd, enum kvd_mover_kept how);
	void (*started)(void *arg);
	void (*prove)(void *arg);
	void (*died)(void *arg, bool owned);
	void (*alloced)(void *arg, u64 id, int result, const u8 *handle,
			const char *text);
};

/**
 * struct kvd_mover_params - how to make one
 * @backend: KV_BACKEND_*
 * @gpu_uuid: 16 bytes; unused on host memory
 * @program: what is started with --mover-process: "/proc/self/exe" in kvmd
 * @pool_bytes: of the host pool; 0: no copies can be made (cuda-legacy without tiers)
 * @pool_fd: the pool's memfd, taken over, or -1: a new one is made
 * @fill_later: its memory is not allocated yet: no job before kvd_mover_pool_filled()
 * @faults: armed in the mover (tests), or NULL
 */
struct kvd_mover_params {
	u32 backend;
	u8 gpu_uuid[16];
	const char *program;
	u64 pool_bytes;
	int pool_fd;
	bool fill_later;
	const char *faults;
};

/**
 * struct kvd_mover_stats - counters, since kvd_mover_create()
 * @starts: processes started; @deaths: of them ended without being asked to
 * @jobs, @failed: done with and without success
 * @copies, @runs: as submitted, and after merging
 * @out_bytes, @in_bytes: of jobs done
 * @unproven: processes whose end is not proven: 0 or 1
 */
struct kvd_mover_stats {
	u64 starts;
	u64 deaths;
	u64 jobs;
	u64 failed;
	u64 copies;
	u64 runs;
	u64 out_bytes;
	u64 in_bytes;
	u32 unproven;
};

/**
 * kvd_mover_create() - make the host pool and the object; no process yet
 * @ops: copied
 *
 * Return: 0; -ENOMEM; -EMFILE; -errno of the pool's memfd or of filling it.
 */
int kvd_mover_create(const struct kvd_mover_params *params,
		     const struct kvd_mover_ops *ops, struct kvd_mover **ret_mover);

/**
 * kvd_mover_pool_fill() - allocate all of the pool: takes a second for some GiB
 * @stop: look at it now and then, and give up when it is set; may be NULL
 *
 * Any thread, one at a time; it touches nothing but the pool. What was allocated stays, also
 * after an error: the next call goes on. So that a lack of memory is an error and not a
 * SIGBUS later (case O33). Charged to this process: facts F-memcg.
 *
 * Return: 0; -ENOMEM; -ECANCELED it was told to stop; -errno.
 */
int kvd_mover_pool_fill(struct kvd_mover *mover, const bool *stop);

/** kvd_mover_pool_filled() - @fill_later is over: kvd_mover_pool_fill() returned 0 */
void kvd_mover_pool_filled(struct kvd_mover *mover);

/**
 * kvd_mover_destroy() - end the process; or NULL
 *
 * Waits for its end, at most a second. Jobs that are left get -ECANCELED: their frames and
 * slots go away with the daemon.
 */
void kvd_mover_destroy(struct kvd_mover *mover);

/** kvd_mover_fd() - readable when kvd_mover_event() has something to do */
int kvd_mover_fd(const struct kvd_mover *mover);

/** kvd_mover_event() - the fd is readable: read what the process says, note its end */
void kvd_mover_event(struct kvd_mover *mover);

/**
 * kvd_mover_run() - take completions, hand over, start, restart; call in every turn of the
 * loop. Costs two loads when there is nothing to do
 *
 * Return: when to call again at the latest; KVD_MOVER_NEVER.
 */
u64 kvd_mover_run(struct kvd_mover *mover, u64 now_ns);

/**
 * kvd_mover_submit() - start a job; the first one starts the mover
 * @ret_id: its number, never 0
 *
 * All extents of a job must be live; the caller keeps them so until done().
 * Return: 0; KV_BUSY KVD_MOVER_JOBS_MAX are under way; -EINVAL a copy lies outside its
 *	extent or the pool, or they make more than KVD_MOVER_COPIES_MAX runs; -ENOSPC too many
 *	extents are mapped; -ESTALE an extent is being dropped; -EPIPE no mover can be
 *	started: the end of the last one is not proven.
 */
int kvd_mover_submit(struct kvd_mover *mover, const struct kvd_mover_job *job,
		     u64 *ret_id);

/**
 * kvd_mover_cancel() - a job is not wanted any more
 *
 * done() is still called, once, with -ECANCELED or with what it came to.
 */
void kvd_mover_cancel(struct kvd_mover *mover, u64 id);

/**
 * kvd_mover_extent_drop() - the mover is to unmap an extent, if it has it
 *
 * extent_put() follows, after the extent's jobs. An unknown one is ignored.
 */
void kvd_mover_extent_drop(struct kvd_mover *mover, u32 pool_id, u32 index, u64 serial);

/** kvd_mover_extents_idle() - drop those that no job has named since @before_ns */
void kvd_mover_extents_idle(struct kvd_mover *mover, u64 before_ns);

/**
 * kvd_mover_pool() - the host pool: pinned, shared with the mover
 * @ret_fd: borrowed; may be NULL
 */
void *kvd_mover_pool(const struct kvd_mover *mover, u64 *ret_bytes, int *ret_fd);

/**
 * kvd_mover_alloc() - memory of the mover's own, for extents of cuda-legacy
 * @id: the caller's, not 0
 *
 * Starts the mover. Return: 0 and ops.alloced() follows; KV_BUSY one is under way; -EPIPE.
 */
int kvd_mover_alloc(struct kvd_mover *mover, u64 id, u64 bytes);

/** kvd_mover_free() - no importer has it open and no job names it; with the process gone
 * so is the memory */
void kvd_mover_free(struct kvd_mover *mover, u64 id);

/* -------------------------------------------------- told by the owner of the proof */

/** kvd_mover_pid() - of the process that runs or whose end is awaited; 0 none */
pid_t kvd_mover_pid(const struct kvd_mover *mover);

/** kvd_mover_set_gpu() - 16 bytes of UUID, for the next start */
void kvd_mover_set_gpu(struct kvd_mover *mover, const u8 *gpu_uuid);

/** kvd_mover_keep_again() - the keeper is new: ops.keep() once more. Return: as that */
int kvd_mover_keep_again(struct kvd_mover *mover);

/** kvd_mover_listed() - NVML's answer on a STARTING mover: @listed as its own process.
 * Not listed (MPS, another pid namespace): it works all the same, but its end will not be
 * provable, and status says so */
void kvd_mover_listed(struct kvd_mover *mover, bool listed);

/** kvd_mover_was_listed() - then its absence from NVML's list is the proof */
bool kvd_mover_was_listed(const struct kvd_mover *mover);

/** kvd_mover_ended() - the GPU work of an ENDING mover is proven to be over */
void kvd_mover_ended(struct kvd_mover *mover);

/**
 * kvd_mover_adopt() - an earlier kvmd's mover, from the keeper: state ENDING or DYING
 * @pidfd: taken over
 *
 * It is killed; no mover is started before its end is proven.
 */
void kvd_mover_adopt(struct kvd_mover *mover, pid_t pid, int pidfd,
		     enum kvd_mover_kept how);

/* --------------------------------------------------------------------- questions */

enum kvd_mover_state kvd_mover_state(const struct kvd_mover *mover);
const char *kvd_mover_state_str(enum kvd_mover_state state);

/** kvd_mover_nr_jobs() - submitted and not done */
u32 kvd_mover_nr_jobs(const struct kvd_mover *mover);

/** kvd_mover_nr_extents() - that the mover holds */
u32 kvd_mover_nr_extents(const struct kvd_mover *mover);

/** kvd_mover_extent_at() - the name of one of them, or false; @i < KVD_MOVER_EXTENTS_MAX */
bool kvd_mover_extent_at(const struct kvd_mover *mover, u32 i,
			 struct kvd_mover_extent *ret_extent);

#define KVD_MOVER_EXTENTS_MAX 4096u

const struct kvd_mover_stats *kvd_mover_stats(const struct kvd_mover *mover);

/** kvd_mover_down() - the last mover failed, and since then none has become ready for what waits */
bool kvd_mover_down(const struct kvd_mover *m);

/** kvd_mover_error() - why the last one failed; "" */
const char *kvd_mover_error(const struct kvd_mover *mover);

#endif
