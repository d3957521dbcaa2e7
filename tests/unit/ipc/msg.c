/* SPDX-License-Identifier: Apache-2.0 */
/* Socket messages: what a peer may not send, and a peer that does not read. */
#include "kvmd/ipc/msg.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "kvmd/ipc/conn.h"
#include "tests/unit/ipc/common.h"
#include "tests/kvt.h"

static u8 buf[KV_MSG_BYTES_MAX] __attribute__((aligned(8)));
static const char *why;

static int nr_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int nr = 0;

	while (readdir(dir))
		nr++;
	closedir(dir);
	return nr;
}

static void pair(int *ours, struct raw *peer)
{
	int sv[2];

	KVT_EXPECT(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv));
	*ours = sv[0];
	memset(peer, 0, sizeof(*peer));
	peer->fd = sv[1];
}

static struct kv_msg head(u32 size)
{
	return (struct kv_msg){.magic = KV_MSG_MAGIC, .type = 1, .size_bytes = size};
}

KVT_TEST(good_message_hang_up_and_nothing)
{
	struct kv_msg m = head(sizeof(m));
	struct raw peer;
	int fd;

	pair(&fd, &peer);
	KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, sizeof(buf), &why), -EAGAIN);
	raw_send(&peer, &m, sizeof(m));
	KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, sizeof(buf), &why), sizeof(m));
	close(peer.fd);
	KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, sizeof(buf), &why), 0);
}

KVT_TEST(bad_headers)
{
	struct kv_msg m = head(sizeof(m));
	struct raw peer;
	int fd;

	pair(&fd, &peer);
	raw_send(&peer, &m, sizeof(m) - 1);
	KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, sizeof(buf), &why), -EPROTO);
	KVT_EXPECT_HAS(why, "shorter");
	m.magic++;
	raw_send(&peer, &m, sizeof(m));
	KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, sizeof(buf), &why), -EPROTO);
	KVT_EXPECT_HAS(why, "magic");
	m = head(sizeof(m) + 8);
	raw_send(&peer, &m, sizeof(m));
	KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, sizeof(buf), &why), -EPROTO);
	KVT_EXPECT_HAS(why, "size_bytes");
	m = head(sizeof(m));
	m.nr_fds = 1;
	raw_send(&peer, &m, sizeof(m));
	KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, sizeof(buf), &why), -EPROTO);
	KVT_EXPECT_HAS(why, "nr_fds");
	m = head(sizeof(buf));
	memcpy(buf, &m, sizeof(m));
	raw_send(&peer, buf, sizeof(buf));
	KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, 4096, &why), -EPROTO);
	KVT_EXPECT_HAS(why, "longer");
}

KVT_TEST(o58_fds_of_a_bad_message_are_closed)
{
	struct kv_msg m = head(sizeof(m));
	int fd, i, fds[RAW_FDS_MAX], before, nr[] = {1, 3, 253};
	struct raw peer;

	pair(&fd, &peer);
	for (i = 0; i < RAW_FDS_MAX; i++)
		fds[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	before = nr_fds();
	for (i = 0; i < 3; i++) {
		KVT_EXPECT_EQ(raw_send_fds(&peer, &m, sizeof(m), fds, nr[i]), 0);
		KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, sizeof(buf), &why), -EPROTO);
		KVT_EXPECT_HAS(why, "fds");
		KVT_EXPECT_EQ(nr_fds(), before);
	}
}

/* At RLIMIT_NOFILE data arrives with fds missing. */
KVT_TEST(o58_cut_fds_are_a_fault_as_well)
{
	struct kv_msg m = head(sizeof(m));
	int fd, fds[3] = {0, 1, 2};
	struct rlimit lim;
	struct raw peer;

	pair(&fd, &peer);
	KVT_EXPECT_EQ(raw_send_fds(&peer, &m, sizeof(m), fds, 3), 0);
	KVT_EXPECT(!getrlimit(RLIMIT_NOFILE, &lim));
	lim.rlim_cur = (rlim_t)(peer.fd + 1);
	KVT_EXPECT(!setrlimit(RLIMIT_NOFILE, &lim));
	KVT_EXPECT_EQ(kvd_msg_receive(fd, buf, sizeof(buf), &why), -EPROTO);
	KVT_EXPECT_HAS(why, "fds");
}

KVT_TEST(messages_wait_in_order_for_a_slow_reader)
{
	struct kv_msg_pressure m = {.msg = head(sizeof(m))};
	struct kvd_out out;
	struct raw peer;
	u32 i, got = 0;
	int fd, r = 0;

	pair(&fd, &peer);
	fcntl(fd, F_SETFL, O_NONBLOCK);
	kvd_out_init(&out);
	for (i = 0; i < 1000000; i++) {
		m.level = i;
		r = kvd_out_send(&out, fd, &m.msg, NULL);
		if (r || out.nr == 50)
			break;
	}
	KVT_EXPECT_EQ(r, 0);
	KVT_EXPECT_EQ(out.nr, 50);
	fcntl(peer.fd, F_SETFL, O_NONBLOCK);
	while (got <= i) {
		while (recv(peer.fd, &m, sizeof(m), 0) == (ssize_t)sizeof(m))
			KVT_EXPECT_EQ(m.level, got++);
		KVT_EXPECT(kvd_out_flush(&out, fd) >= 0);
	}
	KVT_EXPECT_EQ(out.nr, 0);
	KVT_EXPECT_EQ(out.bytes, 0);
}

KVT_TEST(queue_of_a_reader_that_never_reads_is_bounded)
{
	struct kv_msg_pressure m = {.msg = head(sizeof(m))};
	struct kvd_out out;
	struct raw peer;
	int fd, r = 0;
	u32 i;

	pair(&fd, &peer);
	fcntl(fd, F_SETFL, O_NONBLOCK);
	kvd_out_init(&out);
	for (i = 0; i < 1000000 && !r; i++)
		r = kvd_out_send(&out, fd, &m.msg, NULL);
	KVT_EXPECT_EQ(r, -ENOBUFS);
	KVT_EXPECT_EQ(out.nr, KVD_OUT_MSGS_MAX);
	kvd_out_clear(&out);
	KVT_EXPECT_EQ(out.nr, 0);
}

/* O44, R8: what a message says about itself decides nothing. */
KVT_TEST(tenant_comes_from_credentials_alone)
{
	static struct kvd_config config;
	char error[KVD_CONFIG_ERROR_BYTES];
	struct ucred cred = {.pid = 1, .uid = 1002, .gid = 1};
	const char *text = "{\"tenants\":[{\"name\":\"red\",\"uids\":[1001]},"
			   "{\"name\":\"blue\",\"uids\":[1002]}]}";

	KVT_EXPECT_EQ(kvd_config_parse(text, strlen(text), &config, error), 0);
	KVT_EXPECT_EQ(kvd_conn_tenant(&config, &cred, "red"), 1);
	cred.uid = 1003;
	KVT_EXPECT_EQ(kvd_conn_tenant(&config, &cred, "red"), -EACCES);
}

KVT_MAIN()
