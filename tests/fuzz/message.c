/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any message of a client, with descriptors of every number: kvmd keeps none, takes only
 * whole messages with a right header, and a HELLO it takes is one that its rules allow.
 */
#include <dirent.h>
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/fuzz/fuzz.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/ipc/msg.h"

#define FDS_MAX 8u

static u32 nr_open(void)
{
	DIR *d = opendir("/proc/self/fd");
	u32 nr = 0;

	FUZZ_CHECK(d);
	while (readdir(d))
		nr++;
	closedir(d);
	return nr;
}

static void send_it(int sock, const uint8_t *data, size_t bytes, u32 nr_fds)
{
	union {
		struct cmsghdr align;
		u8 bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
	} control = {0};
	struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	int fds[FDS_MAX];
	struct cmsghdr *c;

	for (u32 i = 0; i < FDS_MAX; i++)
		fds[i] = sock;
	if (nr_fds) {
		mh.msg_control = &control;
		mh.msg_controllen = CMSG_SPACE(nr_fds * sizeof(int));
		c = CMSG_FIRSTHDR(&mh);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(nr_fds * sizeof(int));
		memcpy(CMSG_DATA(c), fds, nr_fds * sizeof(int));
	}
	sendmsg(sock, &mh, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void check_hello(const void *buf, size_t bytes)
{
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	struct kv_msg_hello hello;

	if (bytes != sizeof(hello))
		return;
	memcpy(&hello, buf, sizeof(hello));
	if (kvd_hello_check(&hello, error)) {
		FUZZ_CHECK(memchr(error, 0, sizeof(error)));
		return;
	}
	FUZZ_CHECK(hello.abi_min <= KV_ABI_VERSION &&
		   hello.abi_max >= KV_ABI_VERSION_MIN);
	FUZZ_CHECK(memchr(hello.client_name, 0, sizeof(hello.client_name)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	static u8 buf[4096] __attribute__((aligned(8)));
	u32 nr_fds = bytes ? data[0] % (FDS_MAX + 1) : 0, before = nr_open();
	const char *why = NULL;
	int pair[2], r;

	if (!bytes || bytes > sizeof(buf) + 64)
		return 0;
	FUZZ_CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	send_it(pair[1], data + 1, bytes - 1, nr_fds);
	r = kvd_msg_receive(pair[0], buf, sizeof(buf), &why);
	FUZZ_CHECK(r >= 0 || r == -EPROTO || r == -EAGAIN);
	FUZZ_CHECK(r != -EPROTO || why);
	if (r > 0) {
		const struct kv_msg *m = (const struct kv_msg *)buf;

		FUZZ_CHECK(!nr_fds && m->magic == KV_MSG_MAGIC);
		FUZZ_CHECK(m->size_bytes == (u32)r && (size_t)r == bytes - 1);
		check_hello(buf, (size_t)r);
	}
	close(pair[0]);
	close(pair[1]);
	FUZZ_CHECK(nr_open() == before);
	return 0;
}
