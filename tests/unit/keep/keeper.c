/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keeper.c - the keeper alone: it holds what it was given, whatever its peer does.
 */
#include "tests/kvt.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "kvmd/keep/keep.h"
#include "kvmd/keep/talk.h"

static char dir[64];
static pid_t pid;

static int socket_at(struct sockaddr_un *addr)
{
	memset(addr, 0, sizeof(*addr));
	addr->sun_family = AF_UNIX;
	snprintf(addr->sun_path, sizeof(addr->sun_path), "%.60s/keeper.sock", dir);
	return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
}

static void keeper_start_for(int die_with)
{
	struct sockaddr_un addr;
	int fd;

	strcpy(dir, "/tmp/kvmd-keep-XXXXXX");
	KVT_EXPECT(mkdtemp(dir) != NULL);
	fd = socket_at(&addr);
	KVT_EXPECT(fd >= 0 && !bind(fd, (void *)&addr, sizeof(addr)) && !listen(fd, 8));
	pid = fork();
	if (pid == 0)
		_exit(kvd_keeper_main(fd, die_with));
	close(fd);
}

static void keeper_start(void)
{
	keeper_start_for(getpid());
}

static void dir_remove(void)
{
	struct sockaddr_un addr;

	close(socket_at(&addr));
	unlink(addr.sun_path);
	rmdir(dir);
}

static void keeper_end(void)
{
	int status;

	dir_remove();
	for (int i = 0; i < 2000; i++) {
		if (waitpid(pid, &status, WNOHANG) == pid) {
			KVT_EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
			return;
		}
		usleep(1000);
	}
	KVT_FAIL("the keeper does not end");
}

static void open_keep(struct kvd_keep *k)
{
	bool found;

	memset(k, 0, sizeof(*k));
	KVT_EXPECT_EQ(kvd_keep_open(k, dir, 0, &found), 0);
	KVT_EXPECT(found);
}

static int file_with(char byte)
{
	int fd = memfd_create("t", MFD_CLOEXEC);

	KVT_EXPECT(write(fd, &byte, 1) == 1);
	return fd;
}

struct seen {
	u32 nr;
	char bytes[64];
};

static void see(void *arg, const struct kvd_keep_key *key, int fd)
{
	struct seen *s = arg;

	KVT_EXPECT(key->index < sizeof(s->bytes));
	KVT_EXPECT(pread(fd, &s->bytes[key->index], 1, 0) == 1);
	s->nr++;
	close(fd);
}

static struct kvd_keep_key key_of(u32 index)
{
	return (struct kvd_keep_key){.kind = KVD_KEEP_EXTENT, .pool = 1, .index = index};
}

static int put(struct kvd_keep *k, u32 index, char byte)
{
	struct kvd_keep_key key = key_of(index);
	int fd = file_with(byte), r = kvd_keep_put(k, &key, fd);

	close(fd);
	return r;
}

KVT_TEST(what_was_put_is_listed_until_deleted)
{
	struct kvd_keep_key key = key_of(1);
	struct seen s = {0};
	struct kvd_keep k;

	keeper_start();
	open_keep(&k);
	for (u32 i = 0; i < 8; i++)
		KVT_EXPECT_EQ(put(&k, i, (char)('a' + i)), 0);
	KVT_EXPECT_EQ(put(&k, 3, 'z'), 0); /* the same key again */
	kvd_keep_del(&k, &key);
	key.session = 5;
	kvd_keep_del(&k, &key); /* there is no such thing */
	kvd_keep_close(&k, false);
	open_keep(&k); /* the next kvmd */
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, &s), 7);
	KVT_EXPECT(s.bytes[0] == 'a' && s.bytes[3] == 'z' && !s.bytes[1]);
	kvd_keep_close(&k, true);
	keeper_end();
}

/* What a kvmd sent before it was killed is taken before the next one is served. */
KVT_TEST(what_a_dead_kvmd_had_sent_counts)
{
	struct kvd_keep_key key = key_of(2);
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_DEL, .key = key};
	struct seen s = {0};
	struct kvd_keep k, next;

	keeper_start();
	open_keep(&k);
	KVT_EXPECT_EQ(put(&k, 2, 'b') + put(&k, 4, 'd'), 0);
	kill(pid, SIGSTOP);
	KVT_EXPECT_EQ(send(k.fd, &m, sizeof(m), 0), (ssize_t)sizeof(m));
	open_keep(&next);
	kvd_keep_close(&k, false);
	kill(pid, SIGCONT);
	KVT_EXPECT_EQ(kvd_keep_list(&next, see, &s), 1);
	KVT_EXPECT(s.bytes[4] == 'd');
	kvd_keep_close(&next, true);
	keeper_end();
}

/* A peer that talks nonsense loses its connection, and nothing else. */
KVT_TEST(nonsense_ends_the_connection_only)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = 77};
	struct seen s = {0};
	struct kvd_keep k;
	char byte;

	keeper_start();
	open_keep(&k);
	KVT_EXPECT_EQ(put(&k, 6, 'f'), 0);
	for (u32 i = 0; i < 4; i++) {
		if (i == 1)
			m.magic = 1;
		m.op = i == 2 ? KVD_KEEP_PUT : m.op; /* and no fd with it */
		m.magic = i == 2 ? KVD_KEEP_MAGIC : m.magic;
		KVT_EXPECT(send(k.fd, &m, i == 3 ? 5 : sizeof(m), 0) > 0);
		if (i == 2) { /* refused, not fatal */
			KVT_EXPECT_EQ(recv(k.fd, &m, sizeof(m), 0), (ssize_t)sizeof(m));
			KVT_EXPECT_EQ(m.result, -EBADF);
			continue;
		}
		KVT_EXPECT_EQ(recv(k.fd, &byte, 1, 0), 0); /* hang-up */
		kvd_keep_close(&k, false);
		open_keep(&k);
	}
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, &s), 1);
	KVT_EXPECT(s.bytes[6] == 'f');
	kvd_keep_close(&k, true);
	keeper_end();
}

/* The same for what it had put, and for what it asked: nobody is there to be told. */
KVT_TEST(a_dead_kvmd_is_not_answered)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_LIST};
	struct kvd_keep_msg p = {
		.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_PUT, .key = key_of(5)};
	struct kvd_keep_msg d = {
		.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_DEL, .key = key_of(3)};
	int fd = file_with('e');
	struct seen s = {0};
	struct kvd_keep k, next;

	keeper_start_for(0); /* it is told of nobody to end with */
	open_keep(&k);
	KVT_EXPECT_EQ(put(&k, 2, 'b') + put(&k, 3, 'c') + put(&k, 4, 'd'), 0);
	kill(pid, SIGSTOP);
	open_keep(&next);
	/* the first is read from the old connection, the rest as it is given up */
	d.key.index = 3;
	KVT_EXPECT_EQ(kvd_keep_say(k.fd, &d, -1), 0);
	KVT_EXPECT_EQ(kvd_keep_say(k.fd, &p, fd), 0);
	KVT_EXPECT_EQ(kvd_keep_say(k.fd, &m, -1), 0);
	d.key.index = 2;
	KVT_EXPECT_EQ(kvd_keep_say(k.fd, &d, -1), 0);
	kvd_keep_close(&k, false);
	close(fd);
	kill(pid, SIGCONT);
	KVT_EXPECT_EQ(kvd_keep_list(&next, see, &s), 2);
	KVT_EXPECT(s.bytes[4] == 'd' && s.bytes[5] == 'e');
	kvd_keep_close(&next, true);
	keeper_end();
}

/* As a kvmd of before asks: an entry a message. */
KVT_TEST(listed_one_by_one)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_LIST};
	struct seen s = {0};
	struct kvd_keep k;
	int fd;

	keeper_start();
	open_keep(&k);
	for (u32 i = 0; i < 9; i++)
		KVT_EXPECT_EQ(put(&k, i, (char)('a' + i)), 0);
	KVT_EXPECT_EQ(kvd_keep_say(k.fd, &m, -1), 0);
	for (;;) {
		KVT_EXPECT_EQ(kvd_keep_hear(k.fd, &m, 0, &fd), 0);
		if (m.op == KVD_KEEP_END)
			break;
		KVT_EXPECT_EQ(m.op, KVD_KEEP_ENTRY);
		see(&s, &m.key, fd);
	}
	KVT_EXPECT(fd == -1 && m.result == 9 && s.nr == 9);
	for (u32 i = 0; i < 9; i++)
		KVT_EXPECT_EQ(s.bytes[i], 'a' + i);
	kvd_keep_close(&k, true);
	keeper_end();
}

KVT_TEST(a_descriptor_with_a_message_that_has_none)
{
	struct kvd_keep_msg m = {
		.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_DEL, .key = key_of(6)};
	struct seen s = {0};
	struct kvd_keep k;
	char byte;

	keeper_start();
	open_keep(&k);
	KVT_EXPECT_EQ(put(&k, 6, 'f'), 0);
	KVT_EXPECT_EQ(kvd_keep_say(k.fd, &m, STDIN_FILENO), 0);
	KVT_EXPECT_EQ(recv(k.fd, &byte, 1, 0), 0); /* hang-up, and nothing is deleted */
	kvd_keep_close(&k, false);
	open_keep(&k);
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, &s), 1);
	kvd_keep_close(&k, true);
	keeper_end();
}

/* Another user's connection is closed, and the one that is served goes on. */
KVT_TEST(another_uid_is_not_served)
{
	struct sockaddr_un addr;
	struct kvd_keep k;
	int status;
	pid_t other;

	if (geteuid())
		KVT_SKIP("needs root: another uid connects");
	keeper_start();
	open_keep(&k);
	KVT_EXPECT(!chmod(dir, 0755));
	socket_at(&addr);
	KVT_EXPECT(!chmod(addr.sun_path, 0777));
	other = fork();
	if (!other) {
		char byte;
		int fd = socket_at(&addr);

		if (setuid(4242) || connect(fd, (void *)&addr, sizeof(addr)))
			_exit(2);
		_exit(recv(fd, &byte, 1, 0) != 0);
	}
	KVT_EXPECT_EQ(waitpid(other, &status, 0), other);
	KVT_EXPECT_EQ(status, 0);
	KVT_EXPECT_EQ(put(&k, 1, 'a'), 0);
	kvd_keep_close(&k, true);
	keeper_end();
}

/* Who serves does not wait for a keeper that does not answer. */
KVT_TEST(silent_keeper_counts_as_dead)
{
	struct kvd_keep k;

	keeper_start();
	open_keep(&k);
	kvd_keep_serving(&k);
	kill(pid, SIGSTOP);
	KVT_EXPECT_EQ(put(&k, 1, 'a'), -EPIPE);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	KVT_EXPECT_EQ(put(&k, 1, 'a'), -EPIPE);
	dir_remove();
}

static int keeper_of_a_dead(void)
{
	keeper_start();
	usleep(200000); /* it looks for us */
	dir_remove();
	_exit(0);
}

KVT_TEST(keeper_ends_with_whom_it_was_told_to)
{
	char path[128];
	pid_t parent;
	int fds[2];

	KVT_EXPECT_EQ(pipe(fds), 0);
	parent = fork();
	if (parent == 0) {
		close(fds[0]);
		keeper_of_a_dead();
	}
	/* one that is told of somebody who is gone already does not begin */
	KVT_EXPECT_EQ(kvd_keeper_main(-1, 0x3fffffff), 1);
	close(fds[1]); /* the keeper has the other one: end of file is its end */
	waitpid(parent, NULL, 0);
	KVT_EXPECT_EQ(read(fds[0], path, 1), 0);
}

/*
 * O59, fd store surprises (systemd 35288, 4408, 12086): (i) forty fds outlive a kvmd that is
 * killed; (ii) a keeper that may hold fewer than it is given says so, and keeps what it said yes
 * to; (iii) a held socket whose other end is gone, with data unread, is held on; (iv) two fds of
 * one name: what tells them apart is in the key.
 */
KVT_TEST(o59_forty_fds_outlive_a_killed_kvmd)
{
	struct seen s = {0};
	struct kvd_keep k;
	int status;
	pid_t kvmd;

	keeper_start();
	kvmd = fork();
	if (kvmd == 0) {
		open_keep(&k);
		for (u32 i = 0; i < 40; i++)
			if (put(&k, i, (char)('0' + i)))
				_exit(1);
		raise(SIGKILL);
	}
	KVT_EXPECT_EQ(waitpid(kvmd, &status, 0), kvmd);
	KVT_EXPECT(WIFSIGNALED(status));
	open_keep(&k);
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, &s), 40);
	for (u32 i = 0; i < 40; i++)
		KVT_EXPECT_EQ(s.bytes[i], '0' + i);
	kvd_keep_close(&k, true);
	keeper_end();
}

KVT_TEST(o59_fewer_than_it_is_given)
{
	struct rlimit few = {30, 30}, all;
	struct seen s = {0};
	struct kvd_keep k;
	u32 held = 0;

	KVT_EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &all), 0);
	keeper_start();
	KVT_EXPECT_EQ(prlimit(pid, RLIMIT_NOFILE, &few, NULL), 0);
	open_keep(&k);
	while (held < 60 && !put(&k, held, (char)('0' + held)))
		held++;
	KVT_EXPECT(held > 10 && held < 30);
	kvd_keep_close(&k, false);
	open_keep(&k);
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, &s), (int)held);
	for (u32 i = 0; i < held; i++)
		KVT_EXPECT_EQ(s.bytes[i], '0' + i);
	kvd_keep_close(&k, true);
	keeper_end();
}

static int held_socket = -1;

static void take_socket(void *arg, const struct kvd_keep_key *key, int fd)
{
	held_socket = fd;
}

KVT_TEST(o59_socket_that_hung_up_is_held_on)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_LISTEN};
	char data[8] = {0};
	struct kvd_keep k;
	int pair[2];

	keeper_start();
	open_keep(&k);
	KVT_EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	KVT_EXPECT_EQ(kvd_keep_put(&k, &key, pair[0]), 0);
	KVT_EXPECT_EQ(write(pair[1], "unread", 6), 6);
	close(pair[0]);
	close(pair[1]);
	usleep(50000);
	kvd_keep_close(&k, false);
	open_keep(&k);
	KVT_EXPECT_EQ(kvd_keep_list(&k, take_socket, NULL), 1);
	KVT_EXPECT_EQ(read(held_socket, data, sizeof(data)), 6);
	KVT_EXPECT_STR(data, "unread");
	close(held_socket);
	kvd_keep_close(&k, true);
	keeper_end();
}

struct pair_seen {
	char byte[3];
};

static void see_serial(void *arg, const struct kvd_keep_key *key, int fd)
{
	struct pair_seen *s = arg;

	KVT_EXPECT(key->session < 3);
	KVT_EXPECT_EQ(pread(fd, &s->byte[key->session], 1, 0), 1);
	close(fd);
}

KVT_TEST(o59_two_of_one_name)
{
	struct pair_seen s = {{0}};
	struct kvd_keep k;

	keeper_start();
	open_keep(&k);
	for (u64 serial = 1; serial <= 2; serial++) {
		struct kvd_keep_key key = key_of(7);
		int fd = file_with((char)('a' + serial));

		key.session = serial;
		KVT_EXPECT_EQ(kvd_keep_put(&k, &key, fd), 0);
		close(fd);
	}
	KVT_EXPECT_EQ(kvd_keep_list(&k, see_serial, &s), 2);
	KVT_EXPECT(s.byte[1] == 'b' && s.byte[2] == 'c');
	kvd_keep_close(&k, true);
	keeper_end();
}

/* Who asks for the list and goes does not take the keeper along. */
KVT_TEST(peer_that_goes_while_it_is_told)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_LIST};
	struct seen s = {0};
	struct kvd_keep k;

	keeper_start();
	open_keep(&k);
	for (u32 i = 0; i < 40; i++)
		KVT_EXPECT_EQ(put(&k, i, (char)i), 0);
	for (u32 i = 0; i < 20; i++) {
		m.key.index = i % 2 ? 7 : 0; /* many a message, or one */
		kill(pid, SIGSTOP);
		KVT_EXPECT_EQ(send(k.fd, &m, sizeof(m), 0), (ssize_t)sizeof(m));
		shutdown(k.fd, SHUT_RD);
		kill(pid, SIGCONT);
		kvd_keep_close(&k, false);
		open_keep(&k);
	}
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, &s), 40);
	kvd_keep_close(&k, true);
	keeper_end();
}

KVT_TEST(calls_without_a_keeper)
{
	struct kvd_keep_key key = key_of(1);
	struct kvd_keep k = {.fd = -1};
	char path[200];
	bool found;

	KVT_EXPECT_EQ(kvd_keep_put(&k, &key, 0), -EPIPE);
	kvd_keep_del(&k, &key);
	kvd_keep_close(&k, true);
	memset(path, 'x', sizeof(path));
	path[sizeof(path) - 1] = 0;
	KVT_EXPECT_EQ(kvd_keep_open(&k, path, 0, &found), -ENAMETOOLONG);
	KVT_EXPECT(kvd_keep_open(&k, "/proc/none", 0, &found) <
		   0); /* nothing can be there */
}

/* An answer that is not one to a put, or brings a descriptor, is no answer. */
KVT_TEST(answers_that_are_none)
{
	static const u32 ops[] = {KVD_KEEP_END, KVD_KEEP_PUT, KVD_KEEP_ENTRY, 99};
	struct kvd_keep_key key = key_of(1);

	for (u32 i = 0; i < KV_ARRAY_SIZE(ops); i++) {
		struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = ops[i]};
		struct kvd_keep k = {0};
		int pair[2], lowest, again;

		KVT_EXPECT(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
		k.fd = pair[0];
		KVT_EXPECT_EQ(send(pair[1], &m, sizeof(m), 0), (ssize_t)sizeof(m));
		KVT_EXPECT_EQ(kvd_keep_put(&k, &key, 0),
			      ops[i] == KVD_KEEP_PUT ? 0 : -EPIPE);
		KVT_EXPECT_EQ(kvd_keep_say(pair[1], &m, STDIN_FILENO), 0);
		lowest = dup(0);
		close(lowest);
		kvd_keep_put(&k, &key, 0);
		KVT_EXPECT_EQ(again = dup(0), lowest); /* it is closed */
		close(again);
		close(pair[0]);
		close(pair[1]);
	}
}

/* A message without a byte brings descriptors, too: they are closed. */
KVT_TEST(empty_answer_with_a_descriptor)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec iov = {.iov_base = &control, .iov_len = 0};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control.bytes)};
	struct cmsghdr *cm = CMSG_FIRSTHDR(&mh);
	struct kvd_keep k = {0};
	struct seen s = {0};
	int pair[2], fd, before, after;

	KVT_EXPECT(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	k.fd = pair[0];
	fd = file_with('x');
	cm->cmsg_level = SOL_SOCKET;
	cm->cmsg_type = SCM_RIGHTS;
	cm->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(cm), &fd, sizeof(fd));
	KVT_EXPECT_EQ(sendmsg(pair[1], &mh, 0), 0);
	before = dup(fd); /* the lowest number that is free */
	close(before);
	KVT_EXPECT_EQ(kvd_keep_list(&k, see, &s), -EPIPE);
	after = dup(fd);
	KVT_EXPECT_EQ(after, before);
	close(after);
	close(fd);
	close(pair[0]);
	close(pair[1]);
}

KVT_MAIN()
