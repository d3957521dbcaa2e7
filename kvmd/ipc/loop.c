/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/loop.c - see loop.h.
 *
 * Each watch lives in a slot with a generation; the kernel gets generation << 32 | slot,
 * so a completion of a removed watch is recognised. io_uring: one-shot POLL_ADD per
 * watch, armed again from the re-arm list at the next wait. epoll: plain level-triggered.
 */
#include "kvmd/ipc/loop.h"

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mutant.h"

#define RING_ENTRIES 512u
#define NO_SLOT	     0xffffffffu

struct slot {
	struct kvd_watch *watch; /* borrowed; NULL = free */
	u32 generation;
	u32 next_free;
	bool armed;  /* io_uring: a POLL_ADD is out */
	bool queued; /* on the re-arm list */
};

struct kvd_loop {
	bool uring;
	char engine[96];
	struct io_uring ring;
	int epoll_fd;
	u32 nr_used; /* slots ever used */
	u32 first_free;
	u32 nr_rearm;
	u32 nr_kicks; /* prepared, not submitted */
	void (*on_wake)(void *arg);
	void *on_wake_arg;
	u32 rearm[KVD_WATCHES_MAX];
	struct slot slots[KVD_WATCHES_MAX];
};

static u64 slot_data(const struct kvd_loop *loop, u32 index)
{
	return (u64)loop->slots[index].generation << 32 | index;
}

static int uring_start(struct kvd_loop *loop)
{
	struct io_uring_params params;
	int r;

	memset(&params, 0, sizeof(params));
	params.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
	params.cq_entries = KVD_WATCHES_MAX;
	r = io_uring_queue_init_params(RING_ENTRIES, &loop->ring, &params);
	if (r)
		return r;
	if (!(params.features & IORING_FEAT_EXT_ARG) ||
	    !(params.features & IORING_FEAT_NODROP)) {
		io_uring_queue_exit(&loop->ring);
		return -ENOSYS;
	}
	/* Children and later exec must not inherit the ring. liburing opens it O_CLOEXEC.
	 */
	io_uring_ring_dontfork(&loop->ring);
	return 0;
}

int kvd_loop_create(bool force_epoll, struct kvd_loop **ret_loop)
{
	struct kvd_loop *loop = calloc(1, sizeof(*loop));
	int r;

	if (!loop)
		return -ENOMEM;
	loop->first_free = NO_SLOT;
	loop->epoll_fd = -1;
	r = force_epoll ? -ECANCELED : uring_start(loop);
	if (!r) {
		loop->uring = true;
		snprintf(loop->engine, sizeof(loop->engine), "io_uring");
		*ret_loop = loop;
		return 0;
	}
	snprintf(loop->engine, sizeof(loop->engine), "epoll (io_uring: %s)",
		 force_epoll ? "switched off" : strerror(-r));
	loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (loop->epoll_fd < 0) {
		r = -errno;
		free(loop);
		return r;
	}
	*ret_loop = loop;
	return 0;
}

void kvd_loop_destroy(struct kvd_loop *loop)
{
	if (!loop)
		return;
	if (loop->uring)
		io_uring_queue_exit(&loop->ring);
	else
		close(loop->epoll_fd);
	free(loop);
}

const char *kvd_loop_engine(const struct kvd_loop *loop)
{
	return loop->engine;
}

bool kvd_loop_is_uring(const struct kvd_loop *loop)
{
	return loop->uring;
}

static u32 poll_mask(u32 events)
{
	return (events & KVD_LOOP_IN ? POLLIN | POLLRDHUP : 0) |
	       (events & KVD_LOOP_OUT ? POLLOUT : 0);
}

static u32 loop_events(u32 mask)
{
	return (mask & POLLIN ? KVD_LOOP_IN : 0) | (mask & POLLOUT ? KVD_LOOP_OUT : 0) |
	       (mask & (POLLHUP | POLLERR | POLLRDHUP | POLLNVAL) ? KVD_LOOP_HUP : 0);
}

static struct io_uring_sqe *sqe_get(struct kvd_loop *loop)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&loop->ring);

	if (!sqe) {
		io_uring_submit(&loop->ring);
		sqe = io_uring_get_sqe(&loop->ring);
	}
	kv_assert(sqe); /* a submit empties the queue */
	return sqe;
}

/* Nobody waits for its success: no completion, no wake-up. */
static void sqe_quiet(struct kvd_loop *loop, struct io_uring_sqe *sqe)
{
	if (loop->ring.features & IORING_FEAT_CQE_SKIP)
		sqe->flags |= IOSQE_CQE_SKIP_SUCCESS;
}

static void rearm_queue(struct kvd_loop *loop, u32 index)
{
	struct slot *slot = &loop->slots[index];

	if (slot->queued)
		return;
	kv_assert(loop->nr_rearm < KVD_WATCHES_MAX);
	slot->queued = true;
	loop->rearm[loop->nr_rearm++] = index;
}

/* Everything that was queued becomes a POLL_ADD of the next submission. */
static void rearm_flush(struct kvd_loop *loop)
{
	u32 i;

	for (i = 0; i < loop->nr_rearm; i++) {
		u32 index = loop->rearm[i];
		struct slot *slot = &loop->slots[index];
		struct io_uring_sqe *sqe;

		slot->queued = false;
		if (!slot->watch || slot->armed)
			continue;
		sqe = sqe_get(loop);
		io_uring_prep_poll_add(sqe, slot->watch->fd,
				       poll_mask(slot->watch->events));
		io_uring_sqe_set_data64(sqe, slot_data(loop, index));
		slot->armed = true;
	}
	loop->nr_rearm = 0;
}

static void uring_disarm(struct kvd_loop *loop, u32 index)
{
	struct slot *slot = &loop->slots[index];
	struct io_uring_sqe *sqe;

	if (!slot->armed)
		return;
	sqe = sqe_get(loop);
	io_uring_prep_poll_remove(sqe, slot_data(loop, index));
	sqe_quiet(loop, sqe);
	io_uring_sqe_set_data64(sqe, ~0ull);
	slot->armed = false;
}

static int epoll_set(struct kvd_loop *loop, int op, u32 index)
{
	struct kvd_watch *watch = loop->slots[index].watch;
	struct epoll_event ev;

	memset(&ev, 0, sizeof(ev));
	ev.events = poll_mask(watch->events); /* POLL* and EPOLL* agree on Linux */
	ev.data.u64 = slot_data(loop, index);
	return epoll_ctl(loop->epoll_fd, op, watch->fd, &ev) ? -errno : 0;
}

int kvd_loop_add(struct kvd_loop *loop, struct kvd_watch *watch)
{
	u32 index = loop->first_free;
	struct slot *slot;
	int r;

	kv_assert(!watch->id && watch->ready && watch->fd >= 0);
	if (index == NO_SLOT) {
		if (loop->nr_used == KVD_WATCHES_MAX)
			return -ENOSPC;
		index = loop->nr_used++;
	} else {
		loop->first_free = loop->slots[index].next_free;
	}
	slot = &loop->slots[index];
	slot->watch = watch;
	if (loop->uring) {
		rearm_queue(loop, index);
	} else {
		r = epoll_set(loop, EPOLL_CTL_ADD, index);
		if (r) {
			slot->watch = NULL;
			slot->next_free = loop->first_free;
			loop->first_free = index;
			return r;
		}
	}
	watch->id = index + 1;
	return 0;
}

void kvd_loop_del(struct kvd_loop *loop, struct kvd_watch *watch)
{
	u32 index = watch->id - 1;
	struct slot *slot;

	if (!watch->id)
		return;
	slot = &loop->slots[index];
	kv_assert(slot->watch == watch);
	if (loop->uring)
		uring_disarm(loop, index);
	else
		epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, watch->fd, NULL);
	slot->watch = NULL;
	slot->generation++;
	slot->next_free = loop->first_free;
	loop->first_free = index;
	watch->id = 0;
}

void kvd_loop_modify(struct kvd_loop *loop, struct kvd_watch *watch, u32 events)
{
	u32 index = watch->id - 1;

	if (!watch->id || watch->events == events)
		return;
	watch->events = events;
	if (!loop->uring) {
		epoll_set(loop, EPOLL_CTL_MOD, index);
		return;
	}
	uring_disarm(loop, index);
	/* What the old poll may still deliver must not count for the new one. */
	loop->slots[index].generation++;
	rearm_queue(loop, index);
}

void kvd_loop_on_wake(struct kvd_loop *loop, void (*fn)(void *arg), void *arg)
{
	loop->on_wake = fn;
	loop->on_wake_arg = arg;
}

static void woke(struct kvd_loop *loop)
{
	if (loop->on_wake)
		loop->on_wake(loop->on_wake_arg);
}

static int dispatch(struct kvd_loop *loop, u64 data, u32 mask)
{
	u32 index = (u32)data;
	struct slot *slot;

	if (index >= loop->nr_used)
		return 0; /* completion of a POLL_REMOVE */
	slot = &loop->slots[index];
	if (slot->generation != (u32)(data >> 32) || !slot->watch)
		return 0;
	if (loop->uring) {
		slot->armed = false;
		rearm_queue(loop, index);
	}
	slot->watch->ready(slot->watch->arg, loop_events(mask));
	return 1;
}

static int uring_wait(struct kvd_loop *loop, u64 deadline_ns)
{
	struct io_uring_cqe *cqe, *batch[KVD_LOOP_BATCH];
	u64 data[KVD_LOOP_BATCH], now;
	u32 mask[KVD_LOOP_BATCH], nr, i;
	struct __kernel_timespec ts;
	int r, ran = 0;

	rearm_flush(loop);
	loop->nr_kicks = 0;
	now = deadline_ns ? kv_now_ns() : 0;
	if (deadline_ns > now) {
		ts.tv_sec = (long long)((deadline_ns - now) / KV_NSEC_PER_SEC);
		ts.tv_nsec = (long long)((deadline_ns - now) % KV_NSEC_PER_SEC);
		r = io_uring_submit_and_wait_timeout(&loop->ring, &cqe, 1, &ts, NULL);
	} else {
		r = io_uring_submit(&loop->ring);
	}
	if (r < 0 && r != -ETIME && r != -EINTR && r != -EBUSY && r != -EAGAIN)
		return r;
	woke(loop);
	nr = io_uring_peek_batch_cqe(&loop->ring, batch, KVD_LOOP_BATCH);
	/* Copied first: callbacks submit, which may move the ring. */
	for (i = 0; i < nr; i++) {
		data[i] = batch[i]->user_data;
		mask[i] = batch[i]->res < 0 ? POLLERR : (u32)batch[i]->res;
	}
	io_uring_cq_advance(&loop->ring, nr);
	for (i = 0; i < nr; i++)
		ran += dispatch(loop, data[i], mask[i]);
	return ran;
}

static int epoll_wait_once(struct kvd_loop *loop, u64 deadline_ns)
{
	struct epoll_event ev[KVD_LOOP_BATCH];
	struct timespec ts = {0, 0};
	u64 now = deadline_ns ? kv_now_ns() : 0;
	int nr, i, ran = 0;

	if (deadline_ns > now) {
		ts.tv_sec = (time_t)((deadline_ns - now) / KV_NSEC_PER_SEC);
		ts.tv_nsec = (long)((deadline_ns - now) % KV_NSEC_PER_SEC);
	}
	nr = epoll_pwait2(loop->epoll_fd, ev, KVD_LOOP_BATCH, &ts, NULL);
	if (nr < 0 && errno != EINTR)
		return -errno;
	woke(loop);
	for (i = 0; i < nr; i++)
		ran += dispatch(loop, ev[i].data.u64, ev[i].events);
	return ran;
}

int kvd_loop_wait(struct kvd_loop *loop, u64 deadline_ns)
{
	return loop->uring ? uring_wait(loop, deadline_ns)
			   : epoll_wait_once(loop, deadline_ns);
}

bool kvd_loop_pending(struct kvd_loop *loop)
{
	/* Re-arms that were not submitted yet cannot report anything: submit them first.
	 */
	if (!loop->uring)
		return true;
	return loop->nr_rearm || loop->nr_kicks || io_uring_cq_ready(&loop->ring);
}

static const u64 kick_one = 1;

void kvd_loop_kick(struct kvd_loop *loop, int event_fd)
{
	struct pollfd p = {.fd = event_fd, .events = POLLOUT};
	struct io_uring_sqe *sqe;
	ssize_t n;

	/* Full: whoever waits for it has been told. A write would stay in the kernel until
	 * there is room, and the next one beside it, without end. */
	if ((poll(&p, 1, 0) != 1 || !(p.revents & POLLOUT)) && !KV_MUTANT(kicks_pile_up))
		return;
	if (!loop->uring) {
		/* A client that fills the counter between the two can delay us: it is
		 * said in status that io_uring is missing. */
		n = write(event_fd, &kick_one, sizeof(kick_one));
		(void)n;
		return;
	}
	sqe = sqe_get(loop);
	io_uring_prep_write(sqe, event_fd, &kick_one, sizeof(kick_one), 0);
	sqe_quiet(loop, sqe);
	io_uring_sqe_set_data64(sqe, ~0ull);
	loop->nr_kicks++;
}

void kvd_loop_drain(int event_fd)
{
	struct iovec iov;
	u64 count;
	ssize_t n;

	iov.iov_base = &count;
	iov.iov_len = sizeof(count);
	n = preadv2(event_fd, &iov, 1, -1, RWF_NOWAIT);
	(void)n;
}

void kvd_loop_flush(struct kvd_loop *loop)
{
	if (loop->uring && loop->nr_kicks) {
		io_uring_submit(&loop->ring);
		loop->nr_kicks = 0;
	}
}
