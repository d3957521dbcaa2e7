/* SPDX-License-Identifier: Apache-2.0 */
/* mover/wire.c - messages between kvmd and the mover. See wire.h. Any thread. */
#include "kvmd/mover/wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define FDS_MAX 4

int kvd_mv_send(int sock, const struct kvd_mv_msg *msg, const int *fds, u32 nr_fds)
{
	union {
		struct cmsghdr align;
		u8 bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
	} control;
	struct iovec iov = {.iov_base = (void *)msg, .iov_len = sizeof(*msg)};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *cm;
	ssize_t n;

	memset(&control, 0, sizeof(control));
	if (nr_fds) {
		mh.msg_control = &control;
		mh.msg_controllen = CMSG_SPACE(sizeof(int) * nr_fds);
		cm = CMSG_FIRSTHDR(&mh);
		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(sizeof(int) * nr_fds);
		memcpy(CMSG_DATA(cm), fds, sizeof(int) * nr_fds);
	}
	do {
		n = sendmsg(sock, &mh, MSG_DONTWAIT | MSG_NOSIGNAL);
	} while (n < 0 && errno == EINTR);
	/* ETOOMANYREFS: some are taken when the peer reads. */
	if (n < 0)
		return errno == ETOOMANYREFS ? -EAGAIN : -errno;
	return 0;
}

static u32 take_fds(struct msghdr *mh, int *fds)
{
	struct cmsghdr *cm = CMSG_FIRSTHDR(mh);
	u32 nr;

	if (!cm || cm->cmsg_level != SOL_SOCKET || cm->cmsg_type != SCM_RIGHTS)
		return 0;
	nr = (u32)((cm->cmsg_len - CMSG_LEN(0)) / sizeof(int));
	nr = KV_MIN(nr, FDS_MAX);
	memcpy(fds, CMSG_DATA(cm), nr * sizeof(int));
	return nr;
}

int kvd_mv_receive(int sock, struct kvd_mv_msg *ret_msg, int *fds, u32 *ret_nr)
{
	union {
		struct cmsghdr align;
		u8 bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
	} control;
	struct iovec iov = {.iov_base = ret_msg, .iov_len = sizeof(*ret_msg)};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control)};
	ssize_t n;

	*ret_nr = 0;
	do {
		n = recvmsg(sock, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno == ECONNRESET ? 0 : -errno;
	*ret_nr = take_fds(&mh, fds);
	if (n == 0 && !*ret_nr)
		return 0;
	if (n != (ssize_t)sizeof(*ret_msg) || ret_msg->magic != KVD_MV_MAGIC ||
	    (mh.msg_flags & (MSG_CTRUNC | MSG_TRUNC))) {
		for (u32 i = 0; i < *ret_nr; i++)
			close(fds[i]);
		*ret_nr = 0;
		return -EPROTO;
	}
	ret_msg->text[sizeof(ret_msg->text) - 1] = 0;
	return 1;
}
