/* SPDX-License-Identifier: Apache-2.0 */
/* keep/talk.c - see talk.h. */
#include "kvmd/keep/talk.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mutant.h"

/* Padding lets one more in than there is room for: each that comes is looked at. */
#define FDS_ROOM 3u

/*
 * Was the call interrupted, and may it be made again? A socket with a time limit says EINTR where
 * any other goes on by itself, and not only for signals: io_uring's completions interrupt the
 * loop thread as well. Each call has all of the limit again, so it is kept here, from the first
 * interruption on: @until, 0 before.
 */
static bool again(int conn, int limit, u64 *until)
{
	struct timeval tv;
	socklen_t len = sizeof(tv);
	u64 ns;

	if (errno != EINTR)
		return false;
	if (!*until) {
		if (getsockopt(conn, SOL_SOCKET, limit, &tv, &len))
			return false;
		ns = (u64)tv.tv_sec * KV_NSEC_PER_SEC +
		     (u64)tv.tv_usec * KV_NSEC_PER_USEC;
		*until = ns ? kv_now_ns() + ns : ~0ull;
	}
	return kv_now_ns() < *until;
}

static int say(int conn, const struct msghdr *mh, size_t bytes)
{
	u64 until = 0;
	ssize_t n;

	do {
		n = sendmsg(conn, mh, MSG_NOSIGNAL);
	} while (n < 0 && again(conn, SO_SNDTIMEO, &until));
	if (n == (ssize_t)bytes)
		return 0;
	return n < 0 && errno == ETOOMANYREFS ? -ENFILE : -EPIPE;
}

static ssize_t hear(int conn, struct msghdr *mh, int flags)
{
	u64 until = 0;
	ssize_t n;

	do {
		n = recvmsg(conn, mh, flags | MSG_CMSG_CLOEXEC);
	} while (n < 0 && again(conn, SO_RCVTIMEO, &until));
	return n;
}

int kvd_keep_say(int conn, const struct kvd_keep_msg *m, int fd)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = (void *)(uintptr_t)m, .iov_len = sizeof(*m)};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *cm;

	if (fd >= 0) {
		memset(&control, 0, sizeof(control));
		mh.msg_control = &control;
		mh.msg_controllen = sizeof(control.bytes);
		cm = CMSG_FIRSTHDR(&mh);
		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(cm), &fd, sizeof(int));
	}
	return say(conn, &mh, sizeof(*m));
}

int kvd_keep_say_many(int conn, const struct kvd_keep_many *many, const int *fds)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(KVD_KEEP_BATCH * sizeof(int))];
	} control;
	u32 nr = (u32)many->m.result;
	size_t bytes = sizeof(many->m) + nr * sizeof(many->keys[0]);
	struct iovec iov = {.iov_base = (void *)(uintptr_t)many, .iov_len = bytes};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = CMSG_SPACE(nr * sizeof(int))};
	struct cmsghdr *cm;

	memset(&control, 0, sizeof(control));
	cm = CMSG_FIRSTHDR(&mh);
	cm->cmsg_level = SOL_SOCKET;
	cm->cmsg_type = SCM_RIGHTS;
	cm->cmsg_len = CMSG_LEN(nr * sizeof(int));
	memcpy(CMSG_DATA(cm), fds, nr * sizeof(int));
	return say(conn, &mh, bytes);
}

/* Descriptors of a message, at most @room of them, into @fds. Return: how many */
static u32 fds_of(struct msghdr *mh, int *fds, u32 room)
{
	struct cmsghdr *c;
	u32 nr = 0;

	for (c = CMSG_FIRSTHDR(mh); c; c = CMSG_NXTHDR(mh, c)) {
		size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < n && nr < room; i++)
			memcpy(&fds[nr++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
	}
	return nr;
}

int kvd_keep_hear(int conn, struct kvd_keep_msg *m, int flags, int *ret_fd)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(FDS_ROOM * sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = m, .iov_len = sizeof(*m)};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control.bytes)};
	int fds[FDS_ROOM + 1];
	ssize_t n;
	u32 nr;

	*ret_fd = -1;
	n = hear(conn, &mh, flags);
	if (n < 0)
		return errno == EAGAIN && (flags & MSG_DONTWAIT) ? -EAGAIN : -EPIPE;
	nr = fds_of(&mh, fds, FDS_ROOM + 1);
	if (n == (ssize_t)sizeof(*m) && m->magic == KVD_KEEP_MAGIC && nr <= 1 &&
	    !(mh.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
		if (nr)
			*ret_fd = fds[0];
		return 0;
	}
	/* whole, but for a descriptor that found no number here */
	if (n == (ssize_t)sizeof(*m) && m->magic == KVD_KEEP_MAGIC && !nr &&
	    (mh.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == MSG_CTRUNC)
		return -EMFILE;
	while (nr && !KV_MUTANT(keeper_fd_leak))
		close(fds[--nr]);
	return -EPIPE;
}

/* Keys and descriptors must be as many as the message says. */
static bool many_whole(const struct kvd_keep_many *many, size_t bytes, u32 nr)
{
	u32 keys = 0;

	if (bytes < sizeof(many->m) || many->m.magic != KVD_KEEP_MAGIC)
		return false;
	if (many->m.op == KVD_KEEP_ENTRIES) {
		keys = (u32)many->m.result;
		if (!keys || keys > KVD_KEEP_BATCH || keys != nr)
			return false;
	}
	return bytes == sizeof(many->m) + keys * sizeof(many->keys[0]);
}

int kvd_keep_hear_many(int conn, struct kvd_keep_many *many, int *fds, u32 *ret_nr)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(KVD_KEEP_BATCH * sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = many, .iov_len = sizeof(*many)};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control.bytes)};
	ssize_t n;
	u32 nr;

	*ret_nr = 0;
	n = hear(conn, &mh, 0);
	if (n < 0)
		return -EPIPE;
	nr = fds_of(&mh, fds, KVD_KEEP_BATCH);
	if (!(mh.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) &&
	    many_whole(many, (size_t)n, nr)) {
		*ret_nr = nr;
		return 0;
	}
	while (nr && !KV_MUTANT(keeper_fd_leak))
		close(fds[--nr]);
	/* whole, but for descriptors that found no number here */
	if ((mh.msg_flags & MSG_CTRUNC) && (size_t)n >= sizeof(many->m) &&
	    many->m.magic == KVD_KEEP_MAGIC)
		return -EMFILE;
	return -EPIPE;
}
