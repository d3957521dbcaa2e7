/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/keep/talk: a message is whole, with the descriptors it should have, or it is no
 * message and every descriptor that came with it is closed.
 */
#include "kvmd/keep/talk.h"

#include <fcntl.h>
#include <sys/socket.h>

#include "tests/kvt.h"

static int ends[2];

static void pair_open(void)
{
	KVT_EXPECT(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
}

static void pair_close(void)
{
	close(ends[0]);
	close(ends[1]);
}

/* The lowest number that is free: the same before and after where nothing stays open. */
static int free_number(void)
{
	int fd = dup(0);

	close(fd);
	return fd;
}

/* @bytes of @data with @nr descriptors. */
static void say(const void *data, size_t bytes, u32 nr)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(100 * sizeof(int))];
	} control = {0};
	struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *cm;
	int fds[100] = {0};

	if (nr) {
		mh.msg_control = &control;
		mh.msg_controllen = CMSG_SPACE(nr * sizeof(int));
		cm = CMSG_FIRSTHDR(&mh);
		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(nr * sizeof(int));
		memcpy(CMSG_DATA(cm), fds, nr * sizeof(int)); /* stdin, many times */
	}
	KVT_EXPECT_EQ(sendmsg(ends[1], &mh, 0), (ssize_t)bytes);
}

KVT_TEST(one_message_with_one_descriptor_at_most)
{
	static const struct {
		u32 magic, nr_fds;
		size_t bytes;
		bool whole;
	} rows[] = {
		{KVD_KEEP_MAGIC, 0, sizeof(struct kvd_keep_msg), true},
		{KVD_KEEP_MAGIC, 1, sizeof(struct kvd_keep_msg), true},
		{KVD_KEEP_MAGIC, 2, sizeof(struct kvd_keep_msg), false},
		{KVD_KEEP_MAGIC, 4, sizeof(struct kvd_keep_msg), false},
		{KVD_KEEP_MAGIC, 9, sizeof(struct kvd_keep_msg), false}, /* no room */
		{KVD_KEEP_MAGIC, 1, sizeof(struct kvd_keep_msg) + 1, false},
		{KVD_KEEP_MAGIC, 1, sizeof(struct kvd_keep_msg) - 1, false},
		{KVD_KEEP_MAGIC + 1, 1, sizeof(struct kvd_keep_msg), false},
	};

	for (u32 i = 0; i < KV_ARRAY_SIZE(rows); i++) {
		char bytes[sizeof(struct kvd_keep_msg) + 1] = {0};
		struct kvd_keep_msg m = {.magic = rows[i].magic, .op = 5};
		int was, fd, r;

		pair_open();
		was = free_number();
		memcpy(bytes, &m, sizeof(m));
		say(bytes, rows[i].bytes, rows[i].nr_fds);
		r = kvd_keep_hear(ends[0], &m, 0, &fd);
		KVT_EXPECT_EQ(r, rows[i].whole ? 0 : -EPIPE);
		KVT_EXPECT_EQ(fd >= 0, rows[i].whole && rows[i].nr_fds);
		if (fd >= 0)
			close(fd);
		KVT_EXPECT_EQ(free_number(), was);
		pair_close();
	}
}

/* Keys and descriptors are as many as the message says, and there is room for them. */
KVT_TEST(many_keys_with_as_many_descriptors)
{
	static const struct {
		s32 says;
		u32 keys, nr_fds;
		bool whole;
	} rows[] = {
		{1, 1, 1, true},     {64, 64, 64, true},  {0, 0, 0, false},
		{0, 1, 1, false},    {2, 1, 2, false},	  {2, 2, 1, false},
		{1, 1, 2, false},    {65, 65, 65, false}, {-1, 3, 3, false},
		{64, 64, 80, false}, /* more than there is room for */
	};

	KVT_EXPECT_EQ(KVD_KEEP_BATCH, 64);
	for (u32 i = 0; i < KV_ARRAY_SIZE(rows); i++) {
		static struct {
			struct kvd_keep_many many;
			struct kvd_keep_key more[4];
		} out;
		static struct kvd_keep_many in;
		int fds[KVD_KEEP_BATCH], was, r;
		u32 nr;

		pair_open();
		was = free_number();
		out.many.m = (struct kvd_keep_msg){.magic = KVD_KEEP_MAGIC,
						   .op = KVD_KEEP_ENTRIES,
						   .result = rows[i].says};
		say(&out, sizeof(out.many.m) + rows[i].keys * sizeof(struct kvd_keep_key),
		    rows[i].nr_fds);
		r = kvd_keep_hear_many(ends[0], &in, fds, &nr);
		KVT_EXPECT_EQ(r, rows[i].whole	       ? 0
				 : rows[i].nr_fds > 64 ? -EMFILE
						       : -EPIPE);
		KVT_EXPECT_EQ(nr, rows[i].whole ? rows[i].nr_fds : 0);
		while (nr)
			close(fds[--nr]);
		KVT_EXPECT_EQ(free_number(), was);
		pair_close();
	}
}

/* What else a socket may bring along is passed over. */
KVT_TEST(credentials_are_no_descriptors)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = 5};
	int on = 1, fd, was;

	pair_open();
	was = free_number();
	KVT_EXPECT(!setsockopt(ends[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)));
	say(&m, sizeof(m), 0);
	m.op = 0;
	KVT_EXPECT_EQ(kvd_keep_hear(ends[0], &m, 0, &fd), 0);
	KVT_EXPECT_EQ(fd, -1);
	KVT_EXPECT_EQ(m.op, 5);
	KVT_EXPECT_EQ(free_number(), was);
	pair_close();
}

KVT_TEST(nothing_there_and_nobody_there)
{
	struct kvd_keep_msg m;
	int fd;

	pair_open();
	KVT_EXPECT_EQ(kvd_keep_hear(ends[0], &m, MSG_DONTWAIT, &fd), -EAGAIN);
	close(ends[1]);
	KVT_EXPECT_EQ(kvd_keep_hear(ends[0], &m, MSG_DONTWAIT, &fd), -EPIPE);
	KVT_EXPECT_EQ(kvd_keep_say(ends[0], &m, -1), -EPIPE);
	close(ends[0]);
}

KVT_MAIN()
