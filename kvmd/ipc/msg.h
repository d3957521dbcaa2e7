/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/msg.h - socket messages: receiving them whole, sending them without waiting.
 *
 * A client sends no fds. Whatever arrives with fds, cut short, or with a header that does
 * not fit ends that connection, and every fd that came along is closed first.
 *
 * Sending never blocks: what the socket does not take waits in a bounded queue; a peer
 * that lets it overflow is dropped. Queued fds are borrowed: an extent's fd lives until
 * the session has acknowledged its removal, which comes later in the same queue.
 *
 * Thread rules: the loop thread only.
 */
#ifndef KVD_IPC_MSG_H
#define KVD_IPC_MSG_H

#include <stdbool.h>

#include "base/list.h"
#include "base/util.h"
#include "kv/abi.h"

#define KVD_OUT_BYTES_MAX (1u << 20)
#define KVD_OUT_MSGS_MAX  256u

/**
 * struct kvd_out - messages that the socket did not take yet
 * @messages: struct out_message.node, oldest first
 * @nr, @bytes: what waits
 * @stuck_since_ns: since when the first one waits
 * @refs: it waits because too many descriptors are in flight, of all peers together: its
 *	socket is writable, and nobody says when to try again
 */
struct kvd_out {
	struct list_node messages;
	u32 nr;
	u32 bytes;
	u64 stuck_since_ns;
	bool refs;
};

/**
 * kvd_msg_receive() - take one message from a socket
 * @buf: @room bytes, 8-byte aligned
 * @ret_why: static text on -EPROTO
 *
 * Return: bytes (>= sizeof(struct kv_msg), magic and size checked); 0 hang-up; -EAGAIN;
 *	-EPROTO the peer is to be dropped; -errno of recvmsg.
 */
int kvd_msg_receive(int fd, void *buf, size_t room, const char **ret_why);

/** kvd_out_init() - an empty queue */
void kvd_out_init(struct kvd_out *out);

/** kvd_out_clear() - drop what waits */
void kvd_out_clear(struct kvd_out *out);

/**
 * kvd_out_send() - send a message, or queue it behind those that wait
 * @msg: header filled; size_bytes and nr_fds count
 * @fds: msg->nr_fds, borrowed
 *
 * Return: 0 sent or queued; -ENOBUFS the queue is full: drop the peer; -errno of sendmsg.
 */
int kvd_out_send(struct kvd_out *out, int fd, const struct kv_msg *msg, const int *fds);

/**
 * kvd_out_forget() - drop what waits with descriptors of a pool
 *
 * A waiting message borrows its descriptors. The peer closes the pool, so they may be
 * closed and their numbers be somebody else's before the message goes out.
 */
void kvd_out_forget(struct kvd_out *out, u32 pool_id);

/** kvd_out_has_extent() - does an extent's descriptor still wait? Then it must stay open */
bool kvd_out_has_extent(const struct kvd_out *out, u32 pool_id, u32 index);

/**
 * kvd_out_flush() - the socket may be writable again
 *
 * Return: messages that still wait; -errno of sendmsg.
 */
int kvd_out_flush(struct kvd_out *out, int fd);

#endif
