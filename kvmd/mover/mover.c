/* SPDX-License-Identifier: Apache-2.0 */
/* mover/mover.c - jobs and extents on kvmd's side. See mover.h; the process is life.c's. */
#include "kvmd/mover/mover.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mutant.h"
#include "kv/outcome.h"
#include "kvmd/backend/memfd.h"
#include "kvmd/mover/mover_priv.h"

#define STUCK_NS    (30 * KV_NSEC_PER_SEC) /* a job of 8 GiB takes 0.2 s */
#define UNPROVEN_NS (2 * KV_NSEC_PER_SEC)
#define RETRY_NS    KV_NSEC_PER_MSEC
#define FILL_BYTES  (64ull << 20)

/* --------------------------------------------------------------------------- jobs */

static void extents_unref(struct kvd_mover *m, const struct mover_job *job)
{
	const struct kvd_mv_entry *runs = m->runs[job - m->jobs];

	for (u32 i = 0; i < job->nr_runs; i++) {
		struct mover_extent *e = &m->extents[runs[i].slot];

		kv_assert(e->nr_runs);
		if (!--e->nr_runs)
			mover_extent_unmap(m, e);
	}
}

/* done() is called from kvd_mover_run(), in this order. */
void mover_job_finish(struct kvd_mover *m, struct mover_job *job, int status)
{
	kv_assert(job->state == JOB_QUEUED || job->state == JOB_HANDED);
	m->nr_handed -= job->state == JOB_HANDED;
	job->state = JOB_FINISHED;
	job->status = status;
	list_del(&job->node);
	list_add_tail(&m->finished, &job->node);
	extents_unref(m, job);
	if (status) {
		m->stats.failed++;
		return;
	}
	m->stats.jobs++;
	if (job->dir == KVD_MOVER_OUT)
		m->stats.out_bytes += job->bytes;
	else
		m->stats.in_bytes += job->bytes;
}

void mover_jobs_fail(struct kvd_mover *m, struct list_node *list, int status)
{
	struct mover_job *job, *tmp;

	list_for_each_entry_safe (job, tmp, list, node)
		mover_job_finish(m, job, status);
}

static void call_done(struct kvd_mover *m)
{
	struct mover_job *job;

	while (!list_empty(&m->finished)) {
		void (*done)(void *, u64, int);
		u64 id;

		job = kv_container_of(m->finished.next, struct mover_job, node);
		id = job->id;
		done = job->done;
		list_del(&job->node);
		list_add_tail(&m->free, &job->node);
		job->state = JOB_NONE;
		job->id = 0;
		m->nr_jobs--;
		done(job->arg, id, job->status);
	}
}

static bool outside(u64 off, u64 bytes, u64 room)
{
	return off > room || bytes > room - off;
}

static int copy_check(const struct kvd_mover *m, const struct kvd_mover_copy *c)
{
	if (!c->bytes || !c->extent->bytes || c->extent->fd < 0 ||
	    outside(c->extent_off, c->bytes, c->extent->bytes) ||
	    outside(c->pool_off, c->bytes, m->params.pool_bytes))
		return -EINVAL;
	return 0;
}

/* Append to the last run if it goes on there, else begin another. Return: false: full */
static bool add_run(struct kvd_mv_entry *runs, u32 *nr, const struct kvd_mv_entry *piece)
{
	struct kvd_mv_entry *last = *nr ? &runs[*nr - 1] : NULL;

	if (last && last->slot == piece->slot &&
	    last->extent_off + last->bytes == piece->extent_off &&
	    last->pool_off + last->bytes == piece->pool_off &&
	    last->bytes + piece->bytes <= KVD_MOVER_RUN_MAX &&
	    !KV_MUTANT(mover_no_merge)) {
		last->bytes += piece->bytes;
		return true;
	}
	if (*nr == KVD_MOVER_COPIES_MAX)
		return false;
	runs[(*nr)++] = *piece;
	return true;
}

/* Fills the job's runs. Return: 0; -errno, and extents that were new stay, unused. */
static int add_runs(struct kvd_mover *m, struct mover_job *job,
		    const struct kvd_mover_job *want)
{
	struct kvd_mv_entry *runs = m->runs[job - m->jobs];
	const struct kvd_mover_extent *before = NULL;
	struct mover_extent *e = NULL;

	for (u32 i = 0; i < want->nr; i++) {
		const struct kvd_mover_copy *c = &want->copies[i];
		struct kvd_mv_entry piece = {.dir = (u16)want->dir};
		u64 done = 0;

		if (copy_check(m, c))
			return -EINVAL;
		if (c->extent != before)
			e = mover_extent_find(m, c->extent->pool_id, c->extent->index,
					      c->extent->serial);
		before = c->extent;
		if (e && e->dropping)
			return -ESTALE;
		if (!e)
			e = mover_extent_add(m, c->extent);
		if (!e)
			return -ENOSPC;
		e->used_ns = m->now_ns;
		for (; done < c->bytes; done += piece.bytes) {
			piece.slot = (u32)(e - m->extents);
			piece.extent_off = c->extent_off + done;
			piece.pool_off = c->pool_off + done;
			piece.bytes = (u32)KV_MIN(c->bytes - done, KVD_MOVER_RUN_MAX);
			if (!add_run(runs, &job->nr_runs, &piece))
				return -EINVAL;
		}
		job->bytes += c->bytes;
	}
	return 0;
}

/* Extents that a refused job brought and nobody uses. */
static void drop_unused(struct kvd_mover *m, const struct kvd_mover_job *want)
{
	for (u32 i = 0; i < want->nr; i++) {
		const struct kvd_mover_extent *x = want->copies[i].extent;
		struct mover_extent *e =
			mover_extent_find(m, x->pool_id, x->index, x->serial);

		if (e && !e->nr_runs && !e->sent)
			mover_extent_put(m, e);
	}
}

int kvd_mover_submit(struct kvd_mover *m, const struct kvd_mover_job *want, u64 *ret_id)
{
	struct mover_job *job;
	struct kvd_mv_entry *runs;
	int r;

	kv_assert(want->done && !m->params.fill_later);
	if (!want->nr || want->nr > KVD_MOVER_COPIES_MAX || want->dir > KVD_MOVER_IN)
		return -EINVAL;
	if (m->state == KVD_MOVER_ENDING && m->ending_ns &&
	    kv_now_ns() - m->ending_ns > UNPROVEN_NS)
		return -EPIPE;
	if (list_empty(&m->free))
		return KV_BUSY;
	job = kv_container_of(m->free.next, struct mover_job, node);
	job->nr_runs = 0;
	job->bytes = 0;
	r = add_runs(m, job, want);
	if (r) {
		drop_unused(m, want);
		return r;
	}
	runs = m->runs[job - m->jobs];
	job->id = ++m->next_sequence << 8 | (u64)(job - m->jobs);
	for (u32 i = 0; i < job->nr_runs; i++) {
		runs[i].job = job->id;
		runs[i].deadline_ns = want->deadline_ns;
		runs[i].flags = i + 1 == job->nr_runs ? KVD_MV_LAST : 0;
		m->extents[runs[i].slot].nr_runs++;
	}
	job->state = JOB_QUEUED;
	job->cancelled = false;
	job->deadline_ns = want->deadline_ns;
	job->nr_copies = want->nr;
	job->dir = want->dir;
	job->done = want->done;
	job->arg = want->arg;
	list_del(&job->node);
	list_add_tail(&m->queued, &job->node);
	m->nr_jobs++;
	m->stats.copies += want->nr;
	m->stats.runs += job->nr_runs;
	*ret_id = job->id;
	return 0;
}

void kvd_mover_cancel(struct kvd_mover *m, u64 id)
{
	struct mover_job *job = &m->jobs[id % KVD_MOVER_JOBS_MAX];

	if (!id || job->id != id || job->cancelled)
		return;
	job->cancelled = true;
	if (job->state == JOB_QUEUED ||
	    (KV_MUTANT(mover_cancel_at_once) && job->state == JOB_HANDED))
		mover_job_finish(m, job, -ECANCELED);
	else if (job->state == JOB_HANDED && m->state == KVD_MOVER_READY)
		mover_send(m, KVD_MV_CANCEL, 0, id, 0, -1); /* a full socket: too late */
}

/* ------------------------------------------------------------------------ hand-over */

/* Return: 0; -errno the socket does not take it now. */
static int send_extents(struct kvd_mover *m, const struct mover_job *job)
{
	const struct kvd_mv_entry *runs = m->runs[job - m->jobs];

	for (u32 i = 0; i < job->nr_runs; i++) {
		struct mover_extent *e = &m->extents[runs[i].slot];
		int r;

		if (e->sent)
			continue;
		r = mover_send(m, KVD_MV_MAP, runs[i].slot, 0, e->name.bytes, e->name.fd);
		if (r)
			return r;
		e->sent = true;
	}
	return 0;
}

static void hand_over(struct kvd_mover *m, u64 now_ns)
{
	struct mover_job *job, *tmp;
	bool any = false;

	list_for_each_entry_safe (job, tmp, &m->queued, node) {
		const struct kvd_mv_entry *runs = m->runs[job - m->jobs];
		u32 head = __atomic_load_n(&m->ring->sq_head, __ATOMIC_ACQUIRE);

		if (m->sq_tail - head > KVD_MV_SQ) {
			mover_kill(m, "its place in the ring is wrong");
			return;
		}
		if (job->nr_runs > KVD_MV_SQ - (m->sq_tail - head))
			break;
		if (send_extents(m, job)) {
			m->resend = true;
			break;
		}
		for (u32 i = 0; i < job->nr_runs; i++)
			m->ring->sq[(m->sq_tail + i) % KVD_MV_SQ] = runs[i];
		m->sq_tail += job->nr_runs;
		__atomic_store_n(&m->ring->sq_tail, m->sq_tail, __ATOMIC_RELEASE);
		list_del(&job->node);
		list_add_tail(&m->handed, &job->node);
		job->state = JOB_HANDED;
		if (!m->nr_handed++ && !m->nr_unmaps)
			m->progress_ns = now_ns;
		any = true;
	}
	if (any)
		eventfd_write(m->sq_event, 1);
}

/* The mover may be confused: only a job that it has can be done, and once. */
static bool take_done(struct kvd_mover *m, const struct kvd_mv_done *d)
{
	struct mover_job *job = &m->jobs[d->job % KVD_MOVER_JOBS_MAX];

	if (job->id != d->job || job->state != JOB_HANDED || d->status > 0 ||
	    d->status < -4095 || d->reserved) {
		if (!KV_MUTANT(mover_trusted) || job->state != JOB_QUEUED)
			return false;
	}
	if (!d->status)
		m->backoff_ns = 0;
	mover_job_finish(m, job, d->status);
	return true;
}

static void take_completions(struct kvd_mover *m, u64 now_ns)
{
	u32 tail;

	if (!m->ring || m->state != KVD_MOVER_READY)
		return;
	tail = __atomic_load_n(&m->ring->cq_tail, __ATOMIC_ACQUIRE);
	if (tail == m->cq_head)
		return;
	if (tail - m->cq_head > KVD_MV_CQ) {
		mover_kill(m, "more completions than there is room for");
		return;
	}
	while (m->cq_head != tail) {
		struct kvd_mv_done d = m->ring->cq[m->cq_head++ % KVD_MV_CQ];

		if (!take_done(m, &d)) {
			mover_kill(m,
				   "it says that a job is done which it does not have");
			return;
		}
		m->progress_ns = now_ns;
	}
	__atomic_store_n(&m->ring->cq_head, m->cq_head, __ATOMIC_RELEASE);
}

static u64 expire(struct kvd_mover *m, u64 now_ns)
{
	struct mover_job *job, *tmp;
	u64 next = KVD_MOVER_NEVER;

	list_for_each_entry_safe (job, tmp, &m->queued, node) {
		if (!job->deadline_ns)
			continue;
		if (job->deadline_ns <= now_ns)
			mover_job_finish(m, job, -ETIMEDOUT);
		else
			next = KV_MIN(next, job->deadline_ns);
	}
	return next;
}

static void resend(struct kvd_mover *m)
{
	m->resend = false;
	for (u32 i = 0; i < m->extents_used; i++)
		if (m->extents[i].name.bytes)
			mover_extent_unmap(m, &m->extents[i]);
	if (m->alloc_id && !m->alloc_sent &&
	    !mover_send(m, KVD_MV_ALLOC, 0, m->alloc_id, m->alloc_bytes, -1))
		m->alloc_sent = m->owns = true;
}

/* How long it may stand still; KVD_MOVER_NEVER: nothing is expected of it. As it starts it pins the
 * pool, which takes its time. */
static u64 patience_ns(const struct kvd_mover *m)
{
	if (m->state == KVD_MOVER_STARTING && !KV_MUTANT(mover_starts_for_ever))
		return STUCK_NS + (m->params.pool_bytes >> 30) * KV_NSEC_PER_SEC;
	if (m->state == KVD_MOVER_READY && mover_owes(m))
		return STUCK_NS;
	return KVD_MOVER_NEVER;
}

u64 kvd_mover_run(struct kvd_mover *m, u64 now_ns)
{
	u64 next = KVD_MOVER_NEVER;
	bool wanted;

	m->now_ns = now_ns;
	if (m->state == KVD_MOVER_OFF && !m->nr_jobs && !m->alloc_id)
		return KVD_MOVER_NEVER;
	mover_watch_again(m);
	take_completions(m, now_ns);
	if (!list_empty(&m->queued))
		next = expire(m, now_ns);
	wanted = !list_empty(&m->queued) || m->alloc_id;
	if (m->state == KVD_MOVER_BACKOFF && now_ns >= m->retry_ns)
		m->state = KVD_MOVER_OFF;
	if (m->state == KVD_MOVER_OFF && wanted)
		mover_start(m, now_ns);
	if (m->state == KVD_MOVER_READY) {
		hand_over(m, now_ns);
		if (m->resend || (m->alloc_id && !m->alloc_sent))
			resend(m);
	}
	if (now_ns > m->progress_ns && now_ns - m->progress_ns > patience_ns(m))
		mover_kill(m, m->state == KVD_MOVER_STARTING ? "not ready in time"
							     : "no progress for 30 s");
	/* Whoever waits learns that there is no telling when. */
	if (m->state == KVD_MOVER_ENDING && now_ns - m->ending_ns > UNPROVEN_NS)
		mover_jobs_fail(m, &m->queued, -EPIPE);
	call_done(m);
	if (m->state == KVD_MOVER_BACKOFF && wanted)
		next = KV_MIN(next, m->retry_ns);
	if (patience_ns(m) != KVD_MOVER_NEVER)
		next = KV_MIN(next, m->progress_ns + patience_ns(m) + 1);
	if (m->state == KVD_MOVER_ENDING && !list_empty(&m->queued))
		next = KV_MIN(next, m->ending_ns + UNPROVEN_NS + 1);
	if (m->resend || (m->state == KVD_MOVER_READY && !list_empty(&m->queued)))
		next = KV_MIN(next, now_ns + RETRY_NS);
	return list_empty(&m->finished) ? next : now_ns;
}

/* ---------------------------------------------------------------- cuda-legacy memory */

int kvd_mover_alloc(struct kvd_mover *m, u64 id, u64 bytes)
{
	kv_assert(id && bytes);
	if (m->alloc_id)
		return KV_BUSY;
	m->alloc_id = id;
	m->alloc_bytes = bytes;
	m->alloc_sent = false;
	return 0;
}

void kvd_mover_free(struct kvd_mover *m, u64 id)
{
	if (m->state != KVD_MOVER_READY)
		return;
	/* The memory would be lost until the process ends. */
	if (mover_send(m, KVD_MV_FREE, 0, id, 0, -1))
		mover_kill(m, "it does not read its socket");
}

/* ------------------------------------------------------------------ create, destroy */

static int pool_make(struct kvd_mover *m)
{
	u64 bytes = m->params.pool_bytes;
	int fd = m->params.pool_fd, r;
	bool fill = false;
	struct stat st;

	if (fd < 0) {
		r = kvd_memfd_create("kvmd-mover-pool", bytes, KVD_MEMFD_SIZE, NULL, &fd);
		if (r)
			return r;
		m->params.pool_fd = fd;
		fill = !m->params.fill_later;
	}
	if (fstat(fd, &st) || (u64)st.st_size < bytes)
		return -EINVAL;
	m->pool = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (m->pool == MAP_FAILED) {
		m->pool = NULL;
		return -errno;
	}
	madvise(m->pool, bytes, MADV_DONTFORK);
	madvise(m->pool, bytes, MADV_DONTDUMP);
	return fill ? kvd_mover_pool_fill(m, NULL) : 0;
}

int kvd_mover_pool_fill(struct kvd_mover *m, const bool *stop)
{
	u64 bytes = m->params.pool_bytes, at, n;
	int r;

	if (KV_MUTANT(memory_not_backed))
		return 0;
	for (at = 0; at < bytes; at += n) {
		n = KV_MIN(bytes - at, FILL_BYTES);
		do { /* a cgroup that was frozen interrupts it, too */
			if (stop && __atomic_load_n(stop, __ATOMIC_RELAXED))
				return -ECANCELED;
			r = fallocate(m->params.pool_fd, 0, (off_t)at, (off_t)n) ? -errno
										 : 0;
		} while (r == -EINTR);
		if (r)
			return r == -ENOSPC ? -ENOMEM : r;
	}
	return 0;
}

void kvd_mover_pool_filled(struct kvd_mover *m)
{
	m->params.fill_later = false;
}

static void pool_unmake(struct kvd_mover *m)
{
	if (m->pool)
		munmap(m->pool, m->params.pool_bytes);
	if (m->params.pool_fd >= 0)
		close(m->params.pool_fd);
}

int kvd_mover_create(const struct kvd_mover_params *params,
		     const struct kvd_mover_ops *ops, struct kvd_mover **ret_mover)
{
	struct kvd_mover *m = calloc(1, sizeof(*m));
	int r = 0;

	if (!m)
		return -ENOMEM;
	m->params = *params;
	m->ops = *ops;
	snprintf(m->program, sizeof(m->program), "%s", params->program);
	m->pidfd = m->sock = m->ring_fd = m->sq_event = m->cq_event = -1;
	list_init(&m->free);
	list_init(&m->queued);
	list_init(&m->handed);
	list_init(&m->finished);
	for (u32 i = 0; i < KVD_MOVER_JOBS_MAX; i++)
		list_add_tail(&m->free, &m->jobs[i].node);
	m->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (m->epoll_fd < 0)
		r = -errno;
	if (!r && params->pool_bytes)
		r = pool_make(m);
	if (r) {
		pool_unmake(m);
		if (m->epoll_fd >= 0)
			close(m->epoll_fd);
		free(m);
		return r;
	}
	*ret_mover = m;
	return 0;
}

void kvd_mover_destroy(struct kvd_mover *m)
{
	if (!m)
		return;
	mover_stop(m);
	mover_jobs_fail(m, &m->queued, -ECANCELED);
	mover_jobs_fail(m, &m->handed, -ECANCELED);
	mover_extents_forget(m);
	call_done(m);
	pool_unmake(m);
	close(m->epoll_fd);
	free(m);
}

/* ------------------------------------------------------------------------ questions */

void *kvd_mover_pool(const struct kvd_mover *m, u64 *ret_bytes, int *ret_fd)
{
	*ret_bytes = m->params.pool_bytes;
	if (ret_fd)
		*ret_fd = m->params.pool_fd;
	return m->pool;
}

int kvd_mover_fd(const struct kvd_mover *m)
{
	return m->epoll_fd;
}

pid_t kvd_mover_pid(const struct kvd_mover *m)
{
	return m->pid;
}

bool kvd_mover_was_listed(const struct kvd_mover *m)
{
	return m->listed;
}

enum kvd_mover_state kvd_mover_state(const struct kvd_mover *m)
{
	return m->state;
}

bool kvd_mover_down(const struct kvd_mover *m)
{
	return m->state == KVD_MOVER_BACKOFF ||
	       (m->backoff_ns && m->state != KVD_MOVER_OFF &&
		m->state != KVD_MOVER_READY);
}

const char *kvd_mover_state_str(enum kvd_mover_state state)
{
	static const char *const names[] = {"off",   "starting", "ready",
					    "dying", "ending",	 "backoff"};

	return state < KV_ARRAY_SIZE(names) ? names[state] : "?";
}

u32 kvd_mover_nr_jobs(const struct kvd_mover *m)
{
	return m->nr_jobs;
}

u32 kvd_mover_nr_extents(const struct kvd_mover *m)
{
	return m->nr_extents;
}

bool kvd_mover_extent_at(const struct kvd_mover *m, u32 i, struct kvd_mover_extent *ret)
{
	if (i >= m->extents_used || !m->extents[i].name.bytes)
		return false;
	*ret = m->extents[i].name;
	return true;
}

const struct kvd_mover_stats *kvd_mover_stats(const struct kvd_mover *m)
{
	return &m->stats;
}

const char *kvd_mover_error(const struct kvd_mover *m)
{
	return m->error;
}
