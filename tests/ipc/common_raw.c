/* SPDX-License-Identifier: Apache-2.0 */
/* common_raw.c - see common.h: a client that writes every byte itself. */
#include "tests/ipc/common.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

int raw_connect(const struct eng_private_kvmd *d)
{
	return ipc_connect_to(d->socket_path, SOCK_SEQPACKET);
}

struct kv_msg_hello raw_hello_msg(void)
{
	return (struct kv_msg_hello){.msg = {.magic = KV_MSG_MAGIC,
					     .type = KV_MSG_HELLO,
					     .size_bytes = sizeof(struct kv_msg_hello),
					     .sequence = 1},
				     .abi_min = KV_ABI_VERSION_MIN,
				     .abi_max = KV_ABI_VERSION,
				     .client_name = "raw"};
}

void raw_send(struct ipc_raw *r, const void *msg, size_t bytes, const int *fds,
	      u32 nr_fds)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(16 * sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = (void *)(uintptr_t)msg, .iov_len = bytes};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *cm;

	if (nr_fds) {
		memset(&control, 0, sizeof(control));
		mh.msg_control = &control;
		mh.msg_controllen = CMSG_SPACE(nr_fds * sizeof(int));
		cm = CMSG_FIRSTHDR(&mh);
		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(nr_fds * sizeof(int));
		memcpy(CMSG_DATA(cm), fds, nr_fds * sizeof(int));
	}
	if (sendmsg(r->sock, &mh, MSG_NOSIGNAL) < 0 && errno != EPIPE &&
	    errno != ECONNRESET)
		KVT_FAIL("sendmsg: %s", strerror(errno));
}

int raw_recv(struct ipc_raw *r, int ms)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(250 * sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = &r->in, .iov_len = sizeof(r->in)};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control)};
	struct pollfd p = {.fd = r->sock, .events = POLLIN};
	struct cmsghdr *cm;
	ssize_t n;

	if (poll(&p, 1, ms) == 0)
		return -1;
	n = recvmsg(r->sock, &mh, MSG_CMSG_CLOEXEC);
	if (n <= 0)
		return 0;
	r->nr_fds = 0;
	cm = CMSG_FIRSTHDR(&mh);
	if (cm && cm->cmsg_type == SCM_RIGHTS) {
		r->nr_fds = (u32)((cm->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(r->fds, CMSG_DATA(cm), r->nr_fds * sizeof(int));
	}
	return r->in.msg.type;
}

static void *map_fd(int fd, size_t bytes)
{
	void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (map == MAP_FAILED)
		KVT_FAIL("mmap: %s", strerror(errno));
	return map;
}

void raw_open(struct ipc_raw *r, const struct eng_private_kvmd *d)
{
	struct kv_msg_hello hello = raw_hello_msg();
	struct kv_msg_pool_open open_msg = {.msg = {.magic = KV_MSG_MAGIC,
						    .type = KV_MSG_POOL_OPEN,
						    .size_bytes = sizeof(open_msg),
						    .sequence = 2},
					    .layout = ipc_layout()};

	r->sock = raw_connect(d);
	raw_send(r, &hello, sizeof(hello), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(r, 5000), KV_MSG_HELLO_REPLY);
	KVT_EXPECT_EQ(r->in.hello.result, 0);
	KVT_EXPECT_EQ(r->nr_fds, 4);
	r->client_id = r->in.hello.client_id;
	r->ring = map_fd(r->fds[0], r->in.hello.ring_bytes);
	r->sq_efd = r->fds[1];
	r->cq_efd = r->fds[2];
	r->session = map_fd(r->fds[3], KV_SESSION_BYTES);
	r->sq_tail = 0;
	r->cq_head = 0;
	raw_send(r, &open_msg, sizeof(open_msg), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(r, 5000), KV_MSG_POOL_REPLY);
	KVT_EXPECT_EQ(r->in.pool.result, 0);
	r->pool_id = r->in.pool.pool_id;
	close(r->fds[0]);
}

void raw_close(struct ipc_raw *r)
{
	close(r->sock);
	close(r->sq_efd);
	close(r->cq_efd);
}

void *raw_arg(struct ipc_raw *r, u32 off)
{
	return (u8 *)r->ring + r->ring->arg_off + off;
}

struct kv_sqe raw_sqe(struct ipc_raw *r, u8 opcode)
{
	return (struct kv_sqe){
		.opcode = opcode,
		.ring_nonce = r->ring->nonce,
		.user_data = 0x1000 + r->sq_tail,
		.pool_id = r->pool_id,
		.gfp = opcode == KV_OP_ALLOC || opcode == KV_OP_FORK ? KV_GFP_NOWAIT : 0};
}

void raw_kick(struct ipc_raw *r)
{
	u64 one = 1;

	if (write(r->sq_efd, &one, sizeof(one)) < 0)
		KVT_FAIL("sq eventfd: %s", strerror(errno));
}

void raw_push(struct ipc_raw *r, struct kv_sqe sqe)
{
	struct kv_sqe *sq = (void *)((u8 *)r->ring + r->ring->sq_off);

	sq[r->sq_tail & (r->ring->sq_depth - 1)] = sqe;
	r->sq_tail++;
	kv_store_release32(&r->ring->sq_tail, r->sq_tail);
	kv_full_barrier();
	if (kv_load_relaxed32(&r->ring->sq_need_wakeup))
		raw_kick(r);
}

int raw_pop(struct ipc_raw *r, struct kv_cqe *ret, int ms)
{
	const struct kv_cqe *cq = (void *)((u8 *)r->ring + r->ring->cq_off);
	u64 end_ns = kv_now_ns() + (u64)ms * KV_NSEC_PER_MSEC;

	while (kv_load_acquire32(&r->ring->cq_tail) == r->cq_head) {
		struct pollfd p = {.fd = r->sock, .events = POLLRDHUP};

		if (poll(&p, 1, 0) > 0)
			return -2;
		if (kv_now_ns() > end_ns)
			return -1;
		usleep(100);
	}
	*ret = cq[r->cq_head & (r->ring->cq_depth - 1)];
	KVT_EXPECT_EQ(ret->sequence, r->cq_head);
	KVT_EXPECT_EQ(ret->ring_nonce, r->ring->nonce);
	r->cq_head++;
	kv_store_release32(&r->ring->cq_head, r->cq_head);
	return 0;
}

struct kv_cqe raw_call(struct ipc_raw *r, struct kv_sqe sqe)
{
	struct kv_cqe cqe = {0};
	int got;

	raw_push(r, sqe);
	got = raw_pop(r, &cqe, 5000);
	if (got)
		KVT_FAIL("opcode %u: %s", sqe.opcode,
			 got == -1 ? "no answer" : "hang-up");
	KVT_EXPECT_EQ(cqe.user_data, sqe.user_data);
	return cqe;
}
