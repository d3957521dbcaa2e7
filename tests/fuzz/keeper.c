/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whatever answers kvmd's question to its keeper: any messages, any descriptors with them.
 * Each descriptor is handed on once or closed, and a list that is not whole is refused.
 */
#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/fuzz/fuzz.h"
#include "kvmd/keep/keep.h"

#define MESSAGES 24u

static u32 got;

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

static void take(void *arg, const struct kvd_keep_key *key, int fd)
{
	(void)arg;
	(void)key;
	FUZZ_CHECK(fcntl(fd, F_GETFD) >= 0);
	close(fd);
	got++;
}

static void say(int sock, const void *data, size_t bytes, u32 nr_fds)
{
	union {
		struct cmsghdr align;
		u8 bytes[CMSG_SPACE(4 * sizeof(int))];
	} control = {0};
	int fds[4] = {0, 0, 0, 0};
	struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *c;

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

/* Mostly right, so that the list goes on: what is wrong comes from the input. */
static void answer(struct fuzz_in *in, int sock)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_ENTRY};
	u8 how = fuzz_u8(in);
	u32 nr_fds = how & 1 ? 1 : (how >> 1) % 5;
	size_t bytes = sizeof(m);

	if (how & 0x10)
		m.op = KVD_KEEP_END;
	if (how & 0x20)
		fuzz_take(in, &m, sizeof(m));
	if (how & 0x40)
		bytes = fuzz_u8(in) % (sizeof(m) + 8);
	m.result = (s32)(how & 0x80 ? fuzz_u32(in) : (u32)fuzz_u8(in) % MESSAGES);
	if (bytes <= sizeof(m))
		say(sock, &m, bytes, nr_fds);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_in in = {data, bytes};
	struct kvd_keep k = {.fd = -1};
	u32 before;
	int pair[2], r;

	before = nr_open();
	FUZZ_CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	k.fd = pair[0];
	got = 0;
	for (u32 i = 0; i < MESSAGES && in.left; i++)
		answer(&in, pair[1]);
	shutdown(pair[1], SHUT_WR);
	r = kvd_keep_list(&k, take, NULL);
	FUZZ_CHECK(r < 0 || (u32)r == got);
	close(pair[0]);
	close(pair[1]);
	FUZZ_CHECK(nr_open() == before);
	return 0;
}
