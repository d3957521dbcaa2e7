/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover/life.c - the mover process as kvmd sees it: started, heard, found dead, proven
 * gone. States in mover.h.
 *
 * The process is a child, made by posix_spawn (no copy of kvmd's page tables) and exec
 * (kvmd has called cuInit, and its children would have no driver).
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mutant.h"
#include "base/spawn.h"
#include "kvmd/backend/memfd.h"
#include "kvmd/dbg/log.h"
#include "kvmd/mover/mover_priv.h"

#define BACKOFF_MIN_NS (100 * KV_NSEC_PER_MSEC)
#define BACKOFF_MAX_NS (30 * KV_NSEC_PER_SEC)
#define STOP_MS	       1000

enum { TAG_SOCK, TAG_CQ, TAG_PID };

/* ------------------------------------------------------------------------- starting */

static int watch(struct kvd_mover *m, int fd, u32 tag)
{
	struct epoll_event ev = {.events = EPOLLIN, .data.u32 = tag};

	return epoll_ctl(m->epoll_fd, EPOLL_CTL_ADD, fd, &ev) ? -errno : 0;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* What belongs to one process. Closing takes the descriptors out of the epoll set. */
static void release(struct kvd_mover *m)
{
	if (m->ring)
		munmap(m->ring, sizeof(*m->ring));
	m->ring = NULL;
	close_fd(&m->ring_fd);
	close_fd(&m->sock);
	close_fd(&m->sq_event);
	close_fd(&m->cq_event);
	close_fd(&m->pidfd);
	m->pid = 0;
	m->sq_tail = m->cq_head = 0;
	m->listed = m->was_ready = m->resend = m->adopted = false;
	m->owns = m->alloc_sent = m->unwatched = false;
}

static int spawn(struct kvd_mover *m, int sock)
{
	char *argv[5] = {"kvmd-mover", "--mover-process", "3", NULL, NULL};
	posix_spawn_file_actions_t actions;
	int r;

	argv[3] = (char *)(uintptr_t)m->params.faults;
	r = -posix_spawn_file_actions_init(&actions);
	if (r)
		return r;
	r = -posix_spawn_file_actions_adddup2(&actions, sock, 3);
	if (!r)
		r = kv_spawn(m->program, &actions, argv, &m->pid);
	posix_spawn_file_actions_destroy(&actions);
	if (r)
		m->pid = 0;
	return r;
}

static int make_channel(struct kvd_mover *m, int *ret_theirs)
{
	void *ring;
	int sv[2], r;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv))
		return -errno;
	m->sock = sv[0];
	*ret_theirs = sv[1];
	r = kvd_memfd_create("kvmd-mover-ring", sizeof(*m->ring), KVD_MEMFD_SIZE, &ring,
			     &m->ring_fd);
	if (r)
		return r;
	m->ring = ring;
	m->sq_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	m->cq_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (m->sq_event < 0 || m->cq_event < 0)
		return -errno;
	r = watch(m, m->sock, TAG_SOCK);
	return r ? r : watch(m, m->cq_event, TAG_CQ);
}

static int say_hello(struct kvd_mover *m)
{
	struct kvd_mv_msg msg = {
		.magic = KVD_MV_MAGIC,
		.type = KVD_MV_HELLO,
		.backend = m->params.backend,
		.bytes = m->params.pool_bytes,
	};
	/* Without a pool something has to be in its place. */
	int fds[4] = {m->ring_fd, m->params.pool_bytes ? m->params.pool_fd : m->ring_fd,
		      m->sq_event, m->cq_event};

	memcpy(msg.gpu_uuid, m->params.gpu_uuid, sizeof(msg.gpu_uuid));
	return kvd_mv_send(m->sock, &msg, fds, 4);
}

static void backoff(struct kvd_mover *m, u64 now_ns)
{
	m->backoff_ns = KV_MIN(KV_MAX(m->backoff_ns * 2, BACKOFF_MIN_NS), BACKOFF_MAX_NS);
	m->retry_ns = now_ns + m->backoff_ns;
	m->state = KVD_MOVER_BACKOFF;
}

static void alloc_failed(struct kvd_mover *m, int result)
{
	u64 id = m->alloc_id;

	m->alloc_id = 0;
	if (id)
		m->ops.alloced(m->ops.arg, id, result, NULL, m->error);
}

/* Nothing was started, or it never got ready: whoever waits is told. */
static void start_failed(struct kvd_mover *m, int result, u64 now_ns)
{
	backoff(m, now_ns);
	kvd_warn("mover", "not started: %s; again in %llu ms", m->error,
		 (unsigned long long)(m->backoff_ns / 1000000));
	mover_jobs_fail(m, &m->queued, result);
	alloc_failed(m, result);
	mover_extents_forget(m);
}

void mover_start(struct kvd_mover *m, u64 now_ns)
{
	int theirs = -1, r;

	kv_assert(m->state == KVD_MOVER_OFF && !m->pid);
	m->start_result = 0;
	r = make_channel(m, &theirs);
	if (!r)
		r = spawn(m, theirs);
	close_fd(&theirs);
	if (r)
		goto fail;
	m->stats.starts++;
	m->state = KVD_MOVER_STARTING;
	m->progress_ns = now_ns;
	m->pidfd = (int)syscall(SYS_pidfd_open, m->pid, 0);
	r = m->pidfd < 0 ? -errno : watch(m, m->pidfd, TAG_PID);
	if (r) {
		/* Nobody would hear of its end. A child that nobody has waited for keeps
		 * its number. */
		kill(m->pid, SIGKILL);
		waitpid(m->pid, NULL, 0);
		goto fail;
	}
	r = m->ops.keep(m->ops.arg, m->pid, m->pidfd, KVD_MOVER_FRESH);
	if (!r)
		r = say_hello(m);
	if (r) {
		m->start_result = r;
		mover_kill(m, strerror(-r));
	}
	return;
fail:
	snprintf(m->error, sizeof(m->error), "%.120s: %s", m->program, strerror(-r));
	release(m);
	start_failed(m, r, now_ns);
}

/* -------------------------------------------------------------------------- hearing */

int mover_send(struct kvd_mover *m, u32 type, u32 slot, u64 id, u64 bytes, int fd)
{
	struct kvd_mv_msg msg = {
		.magic = KVD_MV_MAGIC,
		.type = type,
		.slot = slot,
		.id = id,
		.bytes = bytes,
	};

	return kvd_mv_send(m->sock, &msg, &fd, fd >= 0);
}

static void heard_ready(struct kvd_mover *m, const struct kvd_mv_msg *msg)
{
	if (msg->result) {
		m->start_result = msg->result < 0 ? msg->result : -EPROTO;
		mover_kill(m, msg->text);
		return;
	}
	m->was_ready = true;
	if (m->params.backend != KV_BACKEND_HOST) {
		m->ops.started(m->ops.arg);
		return;
	}
	kvd_mover_listed(m, true); /* on host memory the pidfd is the proof */
}

void kvd_mover_set_gpu(struct kvd_mover *m, const u8 *gpu_uuid)
{
	memcpy(m->params.gpu_uuid, gpu_uuid, sizeof(m->params.gpu_uuid));
}

int kvd_mover_keep_again(struct kvd_mover *m)
{
	enum kvd_mover_kept how = m->listed ? KVD_MOVER_LISTED : KVD_MOVER_UNLISTED;

	if (!m->pid)
		return 0;
	if (m->state == KVD_MOVER_STARTING || (m->adopted && !m->had_jobs))
		how = KVD_MOVER_FRESH;
	return m->ops.keep(m->ops.arg, m->pid, m->pidfd, how);
}

void kvd_mover_listed(struct kvd_mover *m, bool listed)
{
	if (m->state != KVD_MOVER_STARTING || !m->was_ready)
		return;
	m->listed = listed;
	if (m->ops.keep(m->ops.arg, m->pid, m->pidfd,
			listed ? KVD_MOVER_LISTED : KVD_MOVER_UNLISTED)) {
		mover_kill(m, "the keeper does not take it");
		return;
	}
	m->state = KVD_MOVER_READY;
}

static bool heard(struct kvd_mover *m, const struct kvd_mv_msg *msg)
{
	struct mover_extent *e;

	switch (msg->type) {
	case KVD_MV_READY:
		if (m->state != KVD_MOVER_STARTING || m->was_ready)
			return false;
		heard_ready(m, msg);
		return true;
	case KVD_MV_UNMAPPED:
		if (msg->slot >= m->extents_used)
			return false;
		e = &m->extents[msg->slot];
		if (KV_MUTANT(mover_put_unasked))
			return true;
		if (!e->name.bytes || !e->unmap_sent)
			return false;
		m->progress_ns = kv_now_ns();
		mover_extent_put(m, e);
		return true;
	case KVD_MV_ALLOCED:
		if (!m->alloc_id || !m->alloc_sent || msg->id != m->alloc_id)
			return false;
		m->alloc_id = 0;
		m->ops.alloced(m->ops.arg, msg->id,
			       msg->result > 0 ? -EPROTO : msg->result, msg->handle,
			       msg->text);
		return true;
	default:
		return false;
	}
}

static void hear(struct kvd_mover *m)
{
	struct kvd_mv_msg msg;
	int fds[4], r;
	u32 nr;

	while (m->state == KVD_MOVER_STARTING || m->state == KVD_MOVER_READY) {
		r = kvd_mv_receive(m->sock, &msg, fds, &nr);
		if (r == -EAGAIN)
			return;
		for (u32 i = 0; r > 0 && i < nr; i++)
			close(fds[i]);
		if (r <= 0)
			mover_kill(m,
				   r ? "its message is not one of ours" : "it hung up");
		else if (nr || !heard(m, &msg))
			mover_kill(m, "it says what nobody asked for");
	}
}

/* ------------------------------------------------------------------------ its end */

void mover_kill(struct kvd_mover *m, const char *why)
{
	struct epoll_event ev = {0};

	if (m->state != KVD_MOVER_STARTING && m->state != KVD_MOVER_READY)
		return;
	snprintf(m->error, sizeof(m->error), "mover %d: %s", m->pid, why);
	m->state = KVD_MOVER_DYING;
	syscall(SYS_pidfd_send_signal, m->pidfd, SIGKILL, NULL, 0);
	/* A hung-up socket would wake us until the pidfd is ready. */
	epoll_ctl(m->epoll_fd, EPOLL_CTL_DEL, m->sock, &ev);
}

void kvd_mover_ended(struct kvd_mover *m)
{
	u64 now_ns = kv_now_ns();
	bool started = m->was_ready || m->adopted;
	int result = m->start_result ? m->start_result : -EPIPE;

	if (m->state != KVD_MOVER_ENDING)
		return;
	m->stats.unproven = 0;
	m->ending_ns = 0;
	m->ops.keep(m->ops.arg, m->pid, -1, KVD_MOVER_FRESH);
	release(m);
	mover_jobs_fail(m, &m->handed, -EPIPE);
	if (!started) {
		start_failed(m, result, now_ns);
		return;
	}
	alloc_failed(m, -EPIPE);
	mover_extents_forget(m);
	backoff(m, now_ns);
}

static void exited(struct kvd_mover *m)
{
	siginfo_t info;
	bool unfinished;

	/* A process of an earlier kvmd is not our child, or is: both are fine. */
	waitid(P_PIDFD, (id_t)m->pidfd, &info, WEXITED | WNOHANG);
	if (m->state == KVD_MOVER_STARTING || m->state == KVD_MOVER_READY) {
		snprintf(m->error, sizeof(m->error), "mover %d: it died", m->pid);
		m->state = KVD_MOVER_DYING;
	}
	if (m->state != KVD_MOVER_DYING)
		return;
	epoll_ctl(m->epoll_fd, EPOLL_CTL_DEL, m->pidfd, NULL);
	unfinished = m->nr_handed || (m->adopted && m->had_jobs);
	m->state = KVD_MOVER_ENDING;
	m->ending_ns = kv_now_ns();
	m->stats.deaths++;
	if (!m->quitting)
		kvd_warn("mover", "%s, %u jobs were under way", m->error, m->nr_handed);
	m->ops.died(m->ops.arg, m->owns);
	if (!unfinished || m->params.backend == KV_BACKEND_HOST ||
	    KV_MUTANT(mover_dead_is_done)) {
		kvd_mover_ended(m);
		return;
	}
	m->stats.unproven = 1;
	m->ops.prove(m->ops.arg);
}

void kvd_mover_adopt(struct kvd_mover *m, pid_t pid, int pidfd, enum kvd_mover_kept how)
{
	kv_assert(m->state == KVD_MOVER_OFF);
	m->pid = pid;
	m->pidfd = pidfd;
	m->listed = how == KVD_MOVER_LISTED;
	m->adopted = true;
	m->had_jobs = how != KVD_MOVER_FRESH;
	snprintf(m->error, sizeof(m->error), "mover %d: of an earlier kvmd", pid);
	m->state = KVD_MOVER_DYING;
	syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0);
	m->unwatched = true;
	mover_watch_again(m);
	if (m->unwatched)
		kvd_err("mover", "cannot watch mover %d yet", pid);
}

void mover_watch_again(struct kvd_mover *m)
{
	if (m->unwatched)
		m->unwatched = watch(m, m->pidfd, TAG_PID) != 0;
}

void kvd_mover_event(struct kvd_mover *m)
{
	struct epoll_event ev[4];
	eventfd_t count;
	int nr = epoll_wait(m->epoll_fd, ev, KV_ARRAY_SIZE(ev), 0);
	bool gone = false;

	for (int i = 0; i < nr; i++) {
		if (ev[i].data.u32 == TAG_SOCK)
			hear(m);
		else if (ev[i].data.u32 == TAG_CQ)
			eventfd_read(m->cq_event, &count);
		else
			gone = true;
	}
	if (gone)
		exited(m);
}

/* For good: it is asked by the end of its socket, then made to. */
void mover_stop(struct kvd_mover *m)
{
	struct pollfd p = {.fd = m->pidfd, .events = POLLIN};
	siginfo_t info;

	m->quitting = true;
	if (m->pid && m->pidfd >= 0) {
		close_fd(&m->sock);
		if (poll(&p, 1, STOP_MS) == 0) {
			syscall(SYS_pidfd_send_signal, m->pidfd, SIGKILL, NULL, 0);
			poll(&p, 1, STOP_MS);
		}
		waitid(P_PIDFD, (id_t)m->pidfd, &info, WEXITED | WNOHANG);
		m->ops.keep(m->ops.arg, m->pid, -1, KVD_MOVER_FRESH);
	}
	release(m);
	m->state = KVD_MOVER_OFF;
}
