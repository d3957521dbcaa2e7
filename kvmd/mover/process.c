/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover/process.c - the mover: one thread that takes runs from the ring, gives them to
 * the copy engines and says when jobs are done.
 *
 * A job's runs go to one stream, in order; the streams of a direction take turns, so that
 * one job's end does not idle the copy engine. Runs are issued in groups with a mark at
 * the end (a job's end, or GROUP_BYTES), and at most WINDOW_BYTES are out on a stream:
 * what waits here can still be cancelled or be late. Jobs are reported in the order in
 * which they finish.
 *
 * It ends when its socket does, and whenever it does not know how to go on: kvmd takes
 * that for the death that it is. Nothing here survives it.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/mover/copy.h"
#include "kvmd/mover/mover.h"

#define GROUP_BYTES  (32ull << 20)
#define WINDOW_BYTES (128ull << 20)
#define POLL_NS	     50000 /* between looks at marks: a 2 MiB run takes about 40 us */
#define TURN_RUNS    64	   /* issued before the socket is looked at again */

/**
 * struct extent - one slot
 * @at: 0: not mapped. Then @fd is kept, and the next job that names it tries again
 * @fd: + 1; 0 none
 */
struct extent {
	u64 at;
	u64 bytes;
	int fd;
};

/* Runs with one mark behind them; @last: the job ends with it. */
struct group {
	u64 job;
	u64 bytes;
	s32 status;
	bool last;
};

/**
 * struct stream - what waits and what is out on one stream
 * @queue: [KVD_MV_SQ], copied out of the ring; head and tail run free
 * @groups: oldest first; head and tail run free
 * @open: the group being filled; @job: 0 = none
 * @out_bytes: issued, mark not seen
 */
struct stream {
	struct kvd_mv_entry queue[KVD_MV_SQ];
	u32 queue_head, queue_tail;
	struct group groups[KVD_MV_GROUPS];
	u32 group_head, group_tail;
	struct group open;
	u64 out_bytes;
};

struct mover {
	int sock, sq_event, cq_event;
	struct kvd_mv_ring *ring;
	u8 *pool;
	u64 pool_bytes;
	struct kvd_copier *copier;
	struct extent extents[KVD_MV_EXTENTS];
	struct stream streams[KVD_MV_STREAMS];
	u32 turn[2]; /* stream of a direction that the job now read goes to */
	u64 cancelled[KVD_MOVER_JOBS_MAX];
};

/* ----------------------------------------------------------------------- messages */

static void answer(struct mover *m, struct kvd_mv_msg *msg)
{
	struct pollfd p = {.fd = m->sock, .events = POLLOUT};
	int r;

	msg->magic = KVD_MV_MAGIC;
	do {
		r = kvd_mv_send(m->sock, msg, NULL, 0);
	} while (r == -EAGAIN && poll(&p, 1, -1) == 1);
	if (r)
		exit(0); /* kvmd is gone */
}

static int map_pool(struct mover *m, int fd, u64 bytes, char *text)
{
	struct stat st;

	if (!bytes)
		return 0;
	if (fstat(fd, &st) || (u64)st.st_size < bytes)
		return -EINVAL;
	m->pool = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (m->pool == MAP_FAILED)
		return -errno;
	m->pool_bytes = bytes;
	return m->copier->ops->pool(m->copier, m->pool, bytes, text);
}

static int start(struct mover *m, const struct kvd_mv_msg *hello, const int *fds,
		 char *text)
{
	int r;

	m->ring = mmap(NULL, sizeof(*m->ring), PROT_READ | PROT_WRITE, MAP_SHARED, fds[0],
		       0);
	if (m->ring == MAP_FAILED)
		return -errno;
	m->sq_event = fds[2];
	m->cq_event = fds[3];
	m->copier = hello->backend == KV_BACKEND_HOST
			    ? kvd_copier_host()
			    : kvd_copier_cuda(hello->backend == KV_BACKEND_CUDA_LEGACY);
	if (!m->copier)
		return -ENOMEM;
	kvd_crash_point();
	r = m->copier->ops->open(m->copier, hello->gpu_uuid, text);
	kvd_crash_point();
	return r ? r : map_pool(m, fds[1], hello->bytes, text);
}

static void hello(struct mover *m, const struct kvd_mv_msg *msg, const int *fds, u32 nr)
{
	struct kvd_mv_msg ready = {.type = KVD_MV_READY};

	if (nr != 4 || m->ring)
		exit(1);
	ready.result = start(m, msg, fds, ready.text);
	if (ready.result && !ready.text[0])
		snprintf(ready.text, sizeof(ready.text), "%s", strerror(-ready.result));
	answer(m, &ready);
	if (ready.result)
		exit(1);
	kvd_crash_point();
}

/* Takes over the descriptor. */
static int map_extent(struct mover *m, struct extent *e)
{
	int r;

	if (!e->fd)
		return -ENOENT;
	r = m->copier->ops->map(m->copier, e->fd - 1, e->bytes, &e->at);
	kvd_crash_point();
	if (r)
		return r;
	close(e->fd - 1);
	e->fd = 0;
	return 0;
}

static void unmap_extent(struct mover *m, const struct kvd_mv_msg *msg)
{
	struct kvd_mv_msg done = {.type = KVD_MV_UNMAPPED, .slot = msg->slot};
	struct extent *e = &m->extents[msg->slot];

	kvd_crash_point();
	/* Memory that cannot be given back goes with the process. */
	if (e->at && m->copier->ops->unmap(m->copier, e->at, e->bytes))
		exit(1);
	if (e->fd)
		close(e->fd - 1);
	*e = (struct extent){0};
	answer(m, &done);
	kvd_crash_point();
}

static void alloc(struct mover *m, const struct kvd_mv_msg *msg)
{
	struct kvd_mv_msg done = {.type = KVD_MV_ALLOCED, .id = msg->id};

	done.result = m->copier->ops->alloc(m->copier, msg->id, msg->bytes, done.handle,
					    done.text);
	kvd_crash_point();
	answer(m, &done);
}

static void message(struct mover *m, const struct kvd_mv_msg *msg, int *fds, u32 nr)
{
	if (msg->type != KVD_MV_HELLO && !m->ring)
		exit(1);
	switch (msg->type) {
	case KVD_MV_HELLO:
		hello(m, msg, fds, nr);
		return; /* keeps them */
	case KVD_MV_MAP:
		if (nr != 1 || msg->slot >= KVD_MV_EXTENTS)
			exit(1);
		m->extents[msg->slot] =
			(struct extent){.bytes = msg->bytes, .fd = fds[0] + 1};
		map_extent(m, &m->extents[msg->slot]);
		return; /* keeps it */
	case KVD_MV_UNMAP:
		if (msg->slot >= KVD_MV_EXTENTS)
			exit(1);
		unmap_extent(m, msg);
		break;
	case KVD_MV_CANCEL:
		m->cancelled[msg->id % KVD_MOVER_JOBS_MAX] = msg->id;
		break;
	case KVD_MV_ALLOC:
		alloc(m, msg);
		break;
	case KVD_MV_FREE:
		m->copier->ops->free(m->copier, msg->id);
		break;
	default:
		exit(1);
	}
	for (u32 i = 0; i < nr; i++)
		close(fds[i]);
}

static void read_socket(struct mover *m)
{
	struct kvd_mv_msg msg;
	int fds[4], r;
	u32 nr;

	while ((r = kvd_mv_receive(m->sock, &msg, fds, &nr)) > 0)
		message(m, &msg, fds, nr);
	if (r != -EAGAIN)
		exit(0);
}

/* --------------------------------------------------------------------------- ring */

/* Entries go to the queue of their job's stream; what does not fit stays in the ring. */
static bool read_ring(struct mover *m)
{
	u32 tail = __atomic_load_n(&m->ring->sq_tail, __ATOMIC_ACQUIRE);
	u32 head = m->ring->sq_head, first = head;

	if (tail == head)
		return false;
	if (tail - head > KVD_MV_SQ)
		exit(1);
	read_socket(m); /* the extents that these entries name; see wire.h */
	while (head != tail) {
		struct kvd_mv_entry e = m->ring->sq[head % KVD_MV_SQ];
		struct stream *s = &m->streams[(e.dir & 1) * 2 + m->turn[e.dir & 1]];

		if (s->queue_tail - s->queue_head == KVD_MV_SQ)
			break;
		s->queue[s->queue_tail++ % KVD_MV_SQ] = e;
		if (e.flags & KVD_MV_LAST)
			m->turn[e.dir & 1] ^= 1;
		head++;
	}
	__atomic_store_n(&m->ring->sq_head, head, __ATOMIC_RELEASE);
	return head != first;
}

static void complete(struct mover *m, u64 job, s32 status)
{
	u32 tail = m->ring->cq_tail;

	kvd_crash_point();
	if (tail - __atomic_load_n(&m->ring->cq_head, __ATOMIC_ACQUIRE) >= KVD_MV_CQ)
		exit(1);
	m->ring->cq[tail % KVD_MV_CQ] =
		(struct kvd_mv_done){.job = job, .status = status};
	__atomic_store_n(&m->ring->cq_tail, tail + 1, __ATOMIC_RELEASE);
	eventfd_write(m->cq_event, 1);
	kvd_crash_point();
}

/* ------------------------------------------------------------------------- copies */

static int run_check(struct mover *m, const struct kvd_mv_entry *e)
{
	struct extent *x;
	int r;

	if (e->slot >= KVD_MV_EXTENTS || e->dir > KVD_MOVER_IN || !e->bytes)
		return -EINVAL;
	x = &m->extents[e->slot];
	r = x->at ? 0 : map_extent(m, x);
	if (r)
		return r;
	if (e->extent_off > x->bytes || e->bytes > x->bytes - e->extent_off ||
	    e->pool_off > m->pool_bytes || e->bytes > m->pool_bytes - e->pool_off)
		return -EINVAL;
	return 0;
}

/* After a job's first failure its other runs are passed over. */
static void issue_run(struct mover *m, u32 i, const struct kvd_mv_entry *e)
{
	struct stream *s = &m->streams[i];
	struct group *g = &s->open;

	if (g->job != e->job) {
		*g = (struct group){.job = e->job};
		if (e->deadline_ns && kv_now_ns() > e->deadline_ns)
			g->status = -ETIMEDOUT;
	}
	if (m->cancelled[e->job % KVD_MOVER_JOBS_MAX] == e->job && !g->status)
		g->status = -ECANCELED;
	if (!g->status)
		g->status = run_check(m, e);
	if (g->status)
		return;
	kvd_crash_point();
	g->status = m->copier->ops->copy(
		m->copier, i, m->extents[e->slot].at + e->extent_off,
		m->pool + e->pool_off, e->bytes, e->dir == KVD_MOVER_IN);
	if (!g->status) {
		g->bytes += e->bytes;
		s->out_bytes += e->bytes;
	}
}

/* A mark behind what was issued. A device that takes none is of no use any more. */
static void close_group(struct mover *m, u32 i, bool last)
{
	struct stream *s = &m->streams[i];
	int r = 0;

	if (!KV_MUTANT(mover_batch_kept))
		r = m->copier->ops->issue(m->copier, i);
	if (r && !s->open.status && !KV_MUTANT(mover_batch_error_lost))
		s->open.status = r;
	if (m->copier->ops->mark(m->copier, i, s->group_tail % KVD_MV_GROUPS))
		exit(2);
	kvd_crash_point();
	s->open.last = last;
	s->groups[s->group_tail++ % KVD_MV_GROUPS] = s->open;
	s->open.bytes = 0;
	if (last)
		s->open.job = 0;
}

static bool issue(struct mover *m, u32 i)
{
	struct stream *s = &m->streams[i];
	u32 nr = 0;

	while (s->queue_head != s->queue_tail && nr < TURN_RUNS &&
	       s->out_bytes < WINDOW_BYTES &&
	       s->group_tail - s->group_head < KVD_MV_GROUPS) {
		const struct kvd_mv_entry *e = &s->queue[s->queue_head++ % KVD_MV_SQ];
		bool last = e->flags & KVD_MV_LAST;

		issue_run(m, i, e);
		if (last || s->open.bytes >= GROUP_BYTES)
			close_group(m, i, last);
		nr++;
	}
	return nr;
}

static bool collect(struct mover *m, u32 i)
{
	struct stream *s = &m->streams[i];
	bool found = false;

	while (s->group_head != s->group_tail) {
		const struct group *g = &s->groups[s->group_head % KVD_MV_GROUPS];
		int r = m->copier->ops->query(m->copier, i,
					      s->group_head % KVD_MV_GROUPS);

		if (r < 0)
			exit(2); /* the copies' fate is unknown */
		if (!r)
			break;
		s->out_bytes -= g->bytes;
		if (g->last)
			complete(m, g->job, g->status);
		s->group_head++;
		found = true;
	}
	return found;
}

/* Asleep when nothing is out, else for a moment. */
static void wait_work(struct mover *m)
{
	struct pollfd p[2] = {{.fd = m->sock, .events = POLLIN},
			      {.fd = m->sq_event, .events = POLLIN}};
	struct timespec moment = {.tv_nsec = POLL_NS};
	bool out = false;
	eventfd_t count;

	for (u32 i = 0; i < KVD_MV_STREAMS; i++)
		out |= m->streams[i].group_head != m->streams[i].group_tail ||
		       m->streams[i].queue_head != m->streams[i].queue_tail;
	if (ppoll(p, m->ring ? 2 : 1, out ? &moment : NULL, NULL) < 0 && errno != EINTR)
		exit(1);
	if (p[0].revents)
		read_socket(m);
	if (p[1].revents & POLLIN)
		eventfd_read(m->sq_event, &count);
}

int kvd_mover_main(int sock, const char *faults)
{
	struct mover *m = calloc(1, sizeof(*m));
	char error[160];
	bool busy;

	if (!m || (faults && kvd_fault_arm_text(faults, error, sizeof(error))))
		return 1;
	signal(SIGPIPE, SIG_IGN);
	/* kvmd's end is seen on the socket; this is for a copier that hangs. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	prctl(PR_SET_NAME, "kvmd-mover");
	m->sock = sock;
	for (;;) {
		busy = m->ring && read_ring(m);
		for (u32 i = 0; m->ring && i < KVD_MV_STREAMS; i++) {
			busy |= issue(m, i);
			busy |= collect(m, i);
		}
		if (busy)
			read_socket(m);
		else
			wait_work(m);
	}
}
