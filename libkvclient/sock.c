/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sock.c - whole messages to and from kvmd's socket.
 *
 * SOCK_SEQPACKET keeps message borders. A message is accepted only if its head is right
 * and exactly the descriptors that it names came along; of any other message all
 * descriptors are closed. Received descriptors are close-on-exec from the start.
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/** kvc_sleep_ns() - sleep for a while; signals may shorten it */
void kvc_sleep_ns(u64 ns)
{
	struct timespec ts = {(time_t)(ns / KV_NSEC_PER_SEC),
			      (long)(ns % KV_NSEC_PER_SEC)};

	nanosleep(&ts, NULL);
}

/**
 * kvc_lock_until() - take a lock that another thread may hold while it talks to kvmd
 *
 * Return: 0; -ETIMEDOUT.
 */
int kvc_lock_until(pthread_mutex_t *lock, u64 deadline_ns)
{
	struct timespec ts = {(time_t)(deadline_ns / KV_NSEC_PER_SEC),
			      (long)(deadline_ns % KV_NSEC_PER_SEC)};

	if (!pthread_mutex_trylock(lock))
		return 0;
	return -pthread_mutex_clocklock(lock, CLOCK_MONOTONIC, &ts);
}

/* Return: 1 ready, 0 the deadline passed, -errno. */
static int wait_for(int fd, short events, u64 deadline_ns)
{
	for (;;) {
		struct pollfd p = {.fd = fd, .events = events};
		u64 now_ns = kv_now_ns();
		int r;

		if (now_ns >= deadline_ns)
			return 0;
		r = poll(&p, 1, (int)((deadline_ns - now_ns) / KV_NSEC_PER_MSEC) + 1);
		if (r > 0)
			return 1;
		if (r < 0 && errno != EINTR)
			return -errno;
	}
}

/**
 * kvc_sock_connect() - connect to kvmd's socket
 *
 * Return: 0; -ENOENT, -ECONNREFUSED, -EACCES as connect(); -ENAMETOOLONG; -ETIMEDOUT the
 *	daemon's queue of connections stayed full; -EMFILE.
 */
int kvc_sock_connect(const char *path, u64 deadline_ns, int *ret_sock)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int sock, r;

	if (strlen(path) >= sizeof(addr.sun_path))
		return -ENAMETOOLONG;
	strcpy(addr.sun_path, path);
	sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (sock < 0)
		return -errno;
	while (connect(sock, (struct sockaddr *)&addr, sizeof(addr))) {
		r = errno == EAGAIN || errno == EINTR ? 0 : -errno;
		if (!r && kv_now_ns() >= deadline_ns)
			r = -ETIMEDOUT;
		if (r) {
			close(sock);
			return r;
		}
		kvc_sleep_ns(KV_NSEC_PER_MSEC);
	}
	*ret_sock = sock;
	return 0;
}

/** kvc_sock_send() - send one message. Return: 0; -ETIMEDOUT; -EPIPE, -ECONNRESET gone */
int kvc_sock_send(int sock, const void *msg, size_t bytes, u64 deadline_ns)
{
	for (;;) {
		ssize_t n = send(sock, msg, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
		int r;

		if (n == (ssize_t)bytes)
			return 0;
		if (n >= 0)
			return -EPROTO;
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN)
			return -errno;
		r = wait_for(sock, POLLOUT, deadline_ns);
		if (r <= 0)
			return r ? r : -ETIMEDOUT;
	}
}

/** kvc_msg_close_fds() - close what no handler has taken */
void kvc_msg_close_fds(struct kvc_msg_in *in)
{
	for (u32 i = 0; i < in->nr_fds; i++)
		if (in->fds[i] >= 0)
			close(in->fds[i]);
	in->nr_fds = 0;
}

static void take_fds(struct kvc_msg_in *in, struct msghdr *mh)
{
	struct cmsghdr *cm;

	in->nr_fds = 0;
	for (cm = CMSG_FIRSTHDR(mh); cm; cm = CMSG_NXTHDR(mh, cm)) {
		size_t bytes = cm->cmsg_len - CMSG_LEN(0);

		if (cm->cmsg_level != SOL_SOCKET || cm->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < bytes / sizeof(int); i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(cm) + i * sizeof(int), sizeof(int));
			if (in->nr_fds < KV_MSG_FDS_MAX)
				in->fds[in->nr_fds++] = fd;
			else
				close(fd);
		}
	}
}

/*
 * Descriptors that find no room are lost, and with them the session. So a message that has
 * some is looked at first. Return: 0 take what is there; -EAGAIN nothing is; -EMFILE this
 * process could not open as many now.
 */
static int look_first(int sock)
{
	int fds[KV_MSG_FDS_MAX];
	struct kv_msg head;
	u32 nr = 0;
	ssize_t n;

	do {
		n = recv(sock, &head, sizeof(head), MSG_PEEK | MSG_DONTWAIT);
	} while (n < 0 && errno == EINTR);
	if (n < 0 && errno == EAGAIN)
		return -EAGAIN;
	if (n != (ssize_t)sizeof(head) || head.nr_fds > KV_MSG_FDS_MAX)
		return 0; /* kvc_sock_recv() says what is wrong */
	while (nr < head.nr_fds) {
		fds[nr] = fcntl(sock, F_DUPFD_CLOEXEC, 0);
		if (fds[nr] < 0)
			break;
		nr++;
	}
	for (u32 i = 0; i < nr; i++)
		close(fds[i]);
	return nr == head.nr_fds ? 0 : -EMFILE;
}

/**
 * kvc_sock_recv() - receive one message, do not wait
 * @in: the message; kvc_msg_close_fds() it
 *
 * Return: 0; -EAGAIN none is there; -ECONNRESET kvmd hung up, or descriptors were lost;
 *	-EPROTO not a message of ours; -EMFILE this process has no room for the descriptors
 *	of the next message, which stays.
 */
int kvc_sock_recv(int sock, struct kvc_msg_in *in)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(KV_MSG_FDS_MAX * sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = in->words, .iov_len = sizeof(in->words)};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control)};
	ssize_t n;
	int r;

	in->nr_fds = 0;
	r = look_first(sock);
	if (r)
		return r;
	do {
		n = recvmsg(sock, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno == EAGAIN ? -EAGAIN : -ECONNRESET;
	if (n == 0)
		return -ECONNRESET;
	take_fds(in, &mh);
	if (mh.msg_flags & MSG_CTRUNC) {
		kvc_msg_close_fds(in);
		return -ECONNRESET;
	}
	if ((mh.msg_flags & MSG_TRUNC) || n < (ssize_t)sizeof(struct kv_msg) ||
	    in->msg.magic != KV_MSG_MAGIC || in->msg.size_bytes != (u32)n ||
	    in->msg.nr_fds != in->nr_fds) {
		kvc_msg_close_fds(in);
		return -EPROTO;
	}
	return 0;
}

/** kvc_sock_recv_until() - as kvc_sock_recv(), but wait. Return: also -ETIMEDOUT */
int kvc_sock_recv_until(int sock, struct kvc_msg_in *in, u64 deadline_ns)
{
	for (;;) {
		int r = kvc_sock_recv(sock, in);

		if (r != -EAGAIN)
			return r;
		r = wait_for(sock, POLLIN, deadline_ns);
		if (r <= 0)
			return r ? r : -ETIMEDOUT;
	}
}
