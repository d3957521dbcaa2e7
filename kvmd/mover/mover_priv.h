/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover/mover_priv.h - shared by mover.c (jobs, extents) and life.c (the process).
 * Loop thread only.
 */
#ifndef KVD_MOVER_PRIV_H
#define KVD_MOVER_PRIV_H

#include "base/list.h"
#include "kvmd/mover/mover.h"
#include "kvmd/mover/wire.h"

enum mover_job_state { JOB_NONE, JOB_QUEUED, JOB_HANDED, JOB_FINISHED };

/**
 * struct mover_job - one batch
 * @node: in free, queued, handed or finished
 * @id: sequence << 8 | index
 * @status: of a FINISHED one
 */
struct mover_job {
	struct list_node node;
	enum mover_job_state state;
	bool cancelled;
	u64 id;
	u64 deadline_ns;
	u64 bytes;
	int status;
	u32 nr_copies;
	u32 nr_runs;
	enum kvd_mover_dir dir;
	void (*done)(void *arg, u64 id, int status);
	void *arg;
};

/**
 * struct mover_extent - one that is given to the mover
 * @name: .bytes 0 = free slot; .fd stays open while it is given
 * @nr_runs: of jobs that are not finished; @used_ns: when a job last named it
 * @sent: the present process has it; @unmap_sent: and was told to let go
 * @dropping: no new jobs
 * @next: in the hash chain or the free list, + 1
 */
struct mover_extent {
	struct kvd_mover_extent name;
	u32 nr_runs;
	u64 used_ns;
	bool sent;
	bool unmap_sent;
	bool dropping;
	u32 next;
};

#define MOVER_HASH 1024u

struct kvd_mover {
	struct kvd_mover_params params;
	char program[256];
	struct kvd_mover_ops ops;
	enum kvd_mover_state state;
	u8 *pool;
	/* the process */
	int epoll_fd;
	pid_t pid;
	int pidfd, sock, ring_fd, sq_event, cq_event;
	struct kvd_mv_ring *ring;
	u32 sq_tail, cq_head; /* ours: what the ring says is only a copy */
	bool listed;
	bool was_ready;
	bool unwatched; /* no memory for that: tried again in every turn */
	bool adopted;	/* of an earlier kvmd; @had_jobs says whether it may copy */
	bool had_jobs;
	bool owns; /* memory of kvd_mover_alloc() */
	bool quitting;
	int start_result;
	u64 backoff_ns;
	u64 retry_ns;
	u64 progress_ns; /* it began, answered, or was asked when it had nothing to do */
	u64 ending_ns;
	u64 now_ns;
	/* cuda-legacy: the allocation under way; 0 none */
	u64 alloc_id, alloc_bytes;
	bool alloc_sent;
	/* jobs */
	struct list_node free, queued, handed, finished;
	u32 nr_jobs, nr_handed;
	u64 next_sequence;
	u32 nr_extents, extent_free, extents_used;
	u32 nr_unmaps; /* sent, and not answered */
	bool resend;   /* the socket was full */
	struct kvd_mover_stats stats;
	char error[192];
	u32 hash[MOVER_HASH];
	struct mover_job jobs[KVD_MOVER_JOBS_MAX];
	struct mover_extent extents[KVD_MOVER_EXTENTS_MAX];
	struct kvd_mv_entry runs[KVD_MOVER_JOBS_MAX][KVD_MOVER_COPIES_MAX];
};

/* Jobs, or the end of mappings: an extent that it does not let go takes no job any more. */
static inline bool mover_owes(const struct kvd_mover *m)
{
	return m->nr_handed || m->nr_unmaps;
}

/* mover.c */
void mover_job_finish(struct kvd_mover *m, struct mover_job *job, int status);
void mover_jobs_fail(struct kvd_mover *m, struct list_node *list, int status);

/* extents.c */
struct mover_extent *mover_extent_find(struct kvd_mover *m, u32 pool_id, u32 index,
				       u64 serial);
struct mover_extent *mover_extent_add(struct kvd_mover *m,
				      const struct kvd_mover_extent *name);
void mover_extent_put(struct kvd_mover *m, struct mover_extent *e);
void mover_extent_unmap(struct kvd_mover *m, struct mover_extent *e);
void mover_extents_forget(struct kvd_mover *m);

/* life.c */
void mover_start(struct kvd_mover *m, u64 now_ns);
void mover_kill(struct kvd_mover *m, const char *why);
int mover_send(struct kvd_mover *m, u32 type, u32 slot, u64 id, u64 bytes, int fd);
void mover_stop(struct kvd_mover *m);
void mover_watch_again(struct kvd_mover *m);

#endif
