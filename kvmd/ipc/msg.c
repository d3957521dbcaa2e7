/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/msg.c - see msg.h. */
#include "kvmd/ipc/msg.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/stats.h"

struct out_message {
	struct list_node node;
	u32 bytes;
	u32 nr_fds;
	int fds[KV_MSG_FDS_MAX]; /* borrowed: see kvd_out_forget() */
	u8 data[] __attribute__((aligned(8)));
};

/* Closes every fd that came along; answers how many. */
static u32 close_fds(struct msghdr *mh)
{
	struct cmsghdr *c;
	u32 nr = 0;

	for (c = CMSG_FIRSTHDR(mh); c; c = CMSG_NXTHDR(mh, c)) {
		size_t n, i;

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (i = 0; i < n; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			close(fd);
			nr++;
		}
	}
	return nr;
}

static const char *header_check(const struct kv_msg *msg, size_t bytes)
{
	if (bytes < sizeof(*msg))
		return "message shorter than its header";
	if (msg->magic != KV_MSG_MAGIC)
		return "bad magic";
	if (msg->size_bytes != bytes)
		return "size_bytes is not the message's size";
	if (msg->nr_fds)
		return "nr_fds not 0: clients send no fds";
	return NULL;
}

int kvd_msg_receive(int fd, void *buf, size_t room, const char **ret_why)
{
	union {
		struct cmsghdr align;
		u8 bytes[CMSG_SPACE(sizeof(int) * (KV_MSG_FDS_MAX + 3))];
	} control;
	struct iovec iov = {.iov_base = buf, .iov_len = room};
	struct msghdr mh;
	u32 nr_fds;
	ssize_t n;

	memset(&mh, 0, sizeof(mh));
	mh.msg_iov = &iov;
	mh.msg_iovlen = 1;
	mh.msg_control = &control;
	mh.msg_controllen = sizeof(control);
	do {
		n = recvmsg(fd, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return -errno;
	if (n == 0 && !mh.msg_controllen)
		return 0;
	kvd_stats.messages_in++;
	if (!KV_MUTANT(ignore_ctrunc)) {
		nr_fds = close_fds(&mh);
		if (nr_fds || (mh.msg_flags & MSG_CTRUNC)) {
			*ret_why = "fds sent by a client";
			return -EPROTO;
		}
	}
	if (mh.msg_flags & MSG_TRUNC) {
		*ret_why = "message longer than any we know";
		return -EPROTO;
	}
	*ret_why = header_check(buf, (size_t)n);
	return *ret_why ? -EPROTO : (int)n;
}

/* Return: 0; -EAGAIN; -ETOOMANYREFS fds in flight are limited, some are taken when their
 * peers read; -errno */
static int send_now(int fd, const void *data, size_t bytes, const int *fds, u32 nr_fds)
{
	union {
		struct cmsghdr align;
		u8 bytes[CMSG_SPACE(sizeof(int) * KV_MSG_FDS_MAX)];
	} control;
	struct iovec iov = {.iov_base = (void *)data, .iov_len = bytes};
	struct cmsghdr *c;
	struct msghdr mh;
	ssize_t n;

	if (kvd_fault(KVD_FAULT_send))
		return -ENOBUFS;
	memset(&mh, 0, sizeof(mh));
	mh.msg_iov = &iov;
	mh.msg_iovlen = 1;
	if (nr_fds) {
		memset(&control, 0, CMSG_SPACE(sizeof(int) * nr_fds));
		mh.msg_control = &control;
		mh.msg_controllen = CMSG_SPACE(sizeof(int) * nr_fds);
		c = CMSG_FIRSTHDR(&mh);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int) * nr_fds);
		memcpy(CMSG_DATA(c), fds, sizeof(int) * nr_fds);
	}
	do {
		n = sendmsg(fd, &mh, MSG_DONTWAIT | MSG_NOSIGNAL);
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return -errno;
	kvd_stats.messages_out++;
	return 0;
}

void kvd_out_init(struct kvd_out *out)
{
	memset(out, 0, sizeof(*out));
	list_init(&out->messages);
}

static void message_free(struct kvd_out *out, struct out_message *m)
{
	list_del(&m->node);
	out->nr--;
	out->bytes -= m->bytes;
	free(m);
}

void kvd_out_clear(struct kvd_out *out)
{
	struct out_message *m, *tmp;

	list_for_each_entry_safe (m, tmp, &out->messages, node)
		message_free(out, m);
	kv_assert(!out->nr && !out->bytes);
	out->refs = false;
}

static int out_queue(struct kvd_out *out, const struct kv_msg *msg, const int *fds)
{
	struct out_message *m;

	if (out->nr == KVD_OUT_MSGS_MAX ||
	    msg->size_bytes > KVD_OUT_BYTES_MAX - out->bytes)
		return -ENOBUFS;
	m = malloc(sizeof(*m) + msg->size_bytes);
	if (!m)
		return -ENOBUFS;
	m->bytes = msg->size_bytes;
	m->nr_fds = msg->nr_fds;
	if (msg->nr_fds)
		memcpy(m->fds, fds, sizeof(int) * msg->nr_fds);
	memcpy(m->data, msg, msg->size_bytes);
	if (!out->nr)
		out->stuck_since_ns = kv_now_ns();
	list_add_tail(&out->messages, &m->node);
	out->nr++;
	out->bytes += m->bytes;
	return 0;
}

int kvd_out_send(struct kvd_out *out, int fd, const struct kv_msg *msg, const int *fds)
{
	int r;

	kv_assert(msg->nr_fds <= KV_MSG_FDS_MAX && msg->size_bytes <= KV_MSG_BYTES_MAX);
	if (out->nr)
		return out_queue(out, msg, fds);
	r = send_now(fd, msg, msg->size_bytes, fds, msg->nr_fds);
	out->refs = r == -ETOOMANYREFS;
	return r == -EAGAIN || out->refs ? out_queue(out, msg, fds) : r;
}

/* The pool whose descriptors a message carries; 0 = none. */
static u32 message_pool(const struct out_message *m)
{
	const struct kv_msg *msg = (const void *)m->data;

	if (!m->nr_fds)
		return 0;
	if (msg->type == KV_MSG_EXTENT_ADDED)
		return ((const struct kv_msg_extents *)msg)->pool_id;
	return msg->type == KV_MSG_POOL_REPLY
		       ? ((const struct kv_msg_pool_reply *)msg)->pool_id
		       : 0;
}

void kvd_out_forget(struct kvd_out *out, u32 pool_id)
{
	struct out_message *m, *tmp;

	list_for_each_entry_safe (m, tmp, &out->messages, node)
		if (message_pool(m) == pool_id && !KV_MUTANT(queued_fds_kept))
			message_free(out, m);
}

bool kvd_out_has_extent(const struct kvd_out *out, u32 pool_id, u32 index)
{
	const struct kv_msg_extents *added;
	struct out_message *m;
	u32 i;

	list_for_each_entry (m, &out->messages, node) {
		added = (const void *)m->data;
		if (added->msg.type != KV_MSG_EXTENT_ADDED || message_pool(m) != pool_id)
			continue;
		for (i = 0; i < added->nr; i++)
			if (added->extents[i].index == index)
				return true;
	}
	return false;
}

int kvd_out_flush(struct kvd_out *out, int fd)
{
	struct out_message *m, *tmp;
	int r;

	list_for_each_entry_safe (m, tmp, &out->messages, node) {
		r = send_now(fd, m->data, m->bytes, m->fds, m->nr_fds);
		out->refs = r == -ETOOMANYREFS;
		if (r == -EAGAIN || out->refs)
			break;
		if (r)
			return r;
		message_free(out, m);
		out->stuck_since_ns = kv_now_ns();
	}
	return (int)out->nr;
}
