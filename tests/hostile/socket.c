/* SPDX-License-Identifier: Apache-2.0 */
/* socket.c - attacks through the engine socket. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "tests/hostile/hostile.h"

static void unknown_uid(const struct scene *sc)
{
	struct kv_msg_hello hello = raw_hello_msg();

	become(STRANGER_UID);
	refused(sc, &hello, "tenant");
}

static void hello_with(const struct scene *sc, void (*change)(struct kv_msg_hello *h),
		       const char *word)
{
	struct kv_msg_hello hello = raw_hello_msg();

	become(ATTACKER_UID);
	change(&hello);
	refused(sc, &hello, word);
}

static void no_abi(struct kv_msg_hello *h)
{
	h->abi_min = h->abi_max = 9999;
}

static void name_bytes(struct kv_msg_hello *h)
{
	memcpy(h->client_name, "a\033[2J\nb", 8);
}

static void name_endless(struct kv_msg_hello *h)
{
	memset(h->client_name, 'x', sizeof(h->client_name));
}

static void role_unknown(struct kv_msg_hello *h)
{
	h->role = 77;
}

static void depth_odd(struct kv_msg_hello *h)
{
	h->ring_depth = 3;
}

static void depth_huge(struct kv_msg_hello *h)
{
	h->ring_depth = 1u << 31;
}

static void abi_range(const struct scene *sc)
{
	hello_with(sc, no_abi, "abi");
}

static void control_characters(const struct scene *sc)
{
	hello_with(sc, name_bytes, "client_name");
}

static void name_without_end(const struct scene *sc)
{
	hello_with(sc, name_endless, "client_name");
}

static void bad_role(const struct scene *sc)
{
	hello_with(sc, role_unknown, "role");
}

static void odd_depth(const struct scene *sc)
{
	hello_with(sc, depth_odd, "ring_depth");
}

static void huge_depth(const struct scene *sc)
{
	hello_with(sc, depth_huge, "ring_depth");
}

/* Sends @bytes of a HELLO that @change made wrong; kvmd hangs up. */
static void broken(const struct scene *sc, size_t bytes,
		   void (*change)(struct kv_msg_hello *h))
{
	struct kv_msg_hello hello = raw_hello_msg();
	struct ipc_raw r = {0};

	become(ATTACKER_UID);
	if (change)
		change(&hello);
	r.sock = raw_connect(&sc->d);
	raw_send(&r, &hello, bytes, NULL, 0);
	raw_ends(&r);
}

static void wrong_magic(struct kv_msg_hello *h)
{
	h->msg.magic = 0x31337;
}

static void wrong_size(struct kv_msg_hello *h)
{
	h->msg.size_bytes = 1u << 20;
}

static void claims_fds(struct kv_msg_hello *h)
{
	h->msg.nr_fds = 250;
}

static void wrong_type(struct kv_msg_hello *h)
{
	h->msg.type = 4711;
}

static void pool_first(struct kv_msg_hello *h)
{
	h->msg.type = KV_MSG_POOL_OPEN;
}

static void bad_magic(const struct scene *sc)
{
	broken(sc, sizeof(struct kv_msg_hello), wrong_magic);
}

static void lying_size(const struct scene *sc)
{
	broken(sc, sizeof(struct kv_msg_hello), wrong_size);
}

static void lying_fds(const struct scene *sc)
{
	broken(sc, sizeof(struct kv_msg_hello), claims_fds);
}

static void unknown_type(const struct scene *sc)
{
	broken(sc, sizeof(struct kv_msg_hello), wrong_type);
}

static void pool_before_hello(const struct scene *sc)
{
	broken(sc, sizeof(struct kv_msg_hello), pool_first);
}

static void half_message(const struct scene *sc)
{
	broken(sc, 9, NULL);
}

static void empty_message(const struct scene *sc)
{
	struct ipc_raw r = {0};

	become(ATTACKER_UID);
	r.sock = raw_connect(&sc->d);
	raw_send(&r, "", 0, NULL, 0);
	raw_ends(&r);
}

static void giant_message(const struct scene *sc)
{
	struct ipc_raw r = {0};
	static u8 big[KV_MSG_BYTES_MAX + 4096];

	become(ATTACKER_UID);
	r.sock = raw_connect(&sc->d);
	setsockopt(r.sock, SOL_SOCKET, SO_SNDBUF, &(int){1 << 20}, sizeof(int));
	memcpy(big, &(struct kv_msg){.magic = KV_MSG_MAGIC, .type = KV_MSG_HELLO},
	       sizeof(struct kv_msg));
	if (send(r.sock, big, sizeof(big), MSG_NOSIGNAL) < 0)
		return; /* the kernel would not even carry it */
	raw_ends(&r);
}

static void hello_twice(const struct scene *sc)
{
	struct kv_msg_hello hello = raw_hello_msg();
	struct ipc_raw r = {0};

	become(ATTACKER_UID);
	raw_open(&r, &sc->d);
	raw_send(&r, &hello, sizeof(hello), NULL, 0);
	raw_ends(&r);
}

/* Descriptors of every kind, as many as a message can carry. */
static void descriptors(const struct scene *sc)
{
	struct kv_msg_hello hello = raw_hello_msg();
	int fds[16], pipefd[2];

	become(ATTACKER_UID);
	KVT_EXPECT(!pipe(pipefd));
	for (u32 i = 0; i < 16; i++)
		fds[i] = i & 1 ? pipefd[0] : open("/dev/zero", O_RDWR | O_CLOEXEC);
	for (u32 i = 0; i < 100; i++) {
		struct ipc_raw r = {.sock = raw_connect(&sc->d)};

		raw_send(&r, &hello, sizeof(hello), fds, 16);
		raw_ends(&r);
		close(r.sock);
	}
}

/* 250 descriptors in one message, each one a socket that holds descriptors in flight. */
static void descriptor_bomb(const struct scene *sc)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(250 * sizeof(int))];
	} control = {0};
	struct kv_msg_hello hello = raw_hello_msg();
	struct iovec iov = {.iov_base = &hello, .iov_len = sizeof(hello)};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control)};
	struct cmsghdr *c = CMSG_FIRSTHDR(&mh);
	struct ipc_raw r = {0};
	int fds[250], pair[2];

	become(ATTACKER_UID);
	KVT_EXPECT(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
	for (u32 i = 0; i < 250; i++)
		fds[i] = pair[i & 1];
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(fds));
	memcpy(CMSG_DATA(c), fds, sizeof(fds));
	r.sock = raw_connect(&sc->d);
	KVT_EXPECT(sendmsg(r.sock, &mh, MSG_NOSIGNAL) > 0);
	raw_ends(&r);
}

/* Another user's connection, made when a byte comes. */
static int get_in(const struct scene *sc, int when)
{
	struct kv_msg_hello hello = raw_hello_msg();
	static struct ipc_raw r;
	char byte;

	become(VICTIM_UID);
	if (read(when, &byte, 1) != 1)
		return 1;
	r.sock = raw_connect(&sc->d);
	raw_send(&r, &hello, sizeof(hello), NULL, 0);
	return raw_recv(&r, 5000) == KV_MSG_HELLO_REPLY && !r.in.hello.result ? 0 : 2;
}

/* More connections than one user may have: the rest of the host still gets in. */
static void connection_flood(const struct scene *sc)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct rlimit lim = {4096, 4096};
	int when[2];
	u32 nr = 0;
	pid_t other;

	setrlimit(RLIMIT_NOFILE, &lim);
	KVT_EXPECT(!pipe(when));
	other = fork();
	if (!other)
		_exit(get_in(sc, when[0]));
	become(ATTACKER_UID);
	strcpy(addr.sun_path, sc->d.socket_path);
	for (; nr < 1500; nr++) {
		int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

		for (u32 try = 0; s >= 0 && try < 50; try++) {
			if (!connect(s, (struct sockaddr *)&addr, sizeof(addr)))
				break;
			usleep(200); /* the backlog is full: kvmd is at it */
		}
	}
	KVT_EXPECT(nr > 64);
	usleep(200000); /* kvmd has seen them all */
	KVT_EXPECT_EQ(write(when[1], "!", 1), 1);
	KVT_EXPECT_EQ(ipc_wait(other), 0);
}

static void churn(const struct scene *sc, u64 end_ns)
{
	while (kv_now_ns() < end_ns)
		close(raw_connect(&sc->d));
}

/* Three processes connect and leave without end: others get in within a second, and those
 * who do it are told of in the counters. */
static void connection_churn(const struct scene *sc)
{
	u64 start_ns = kv_now_ns(), took_ns;
	char *stat;
	int when[2];
	pid_t other;

	KVT_EXPECT(!pipe(when));
	for (u32 i = 0; i < 3; i++)
		if (!fork()) {
			become(ATTACKER_UID);
			churn(sc, start_ns + 1500000000ull);
			_exit(0);
		}
	usleep(500000); /* what they may do at once is over */
	for (u32 i = 0; i < 5; i++) {
		took_ns = kv_now_ns();
		other = fork();
		if (!other)
			_exit(get_in(sc, when[0]));
		KVT_EXPECT_EQ(write(when[1], "!", 1), 1);
		KVT_EXPECT_EQ(ipc_wait(other), 0);
		took_ns = kv_now_ns() - took_ns;
		if (took_ns > 1000000000ull)
			KVT_FAIL("%.0f ms to get in", (double)took_ns / 1e6);
	}
	stat = ipc_admin(&sc->d, "{\"op\":\"vmstat\"}");
	KVT_EXPECT(strstr(stat, "\"connections_too_fast\":") &&
		   !strstr(stat, "\"connections_too_fast\":0"));
	free(stat);
	while (wait(NULL) > 0)
		;
}

static void never_reads(const struct scene *sc)
{
	struct kv_msg_pool_open open_msg = {.msg = {.magic = KV_MSG_MAGIC,
						    .type = KV_MSG_POOL_OPEN,
						    .size_bytes = sizeof(open_msg),
						    .sequence = 3},
					    .layout = ipc_layout()};
	struct ipc_raw r = {0};
	u32 sent = 0;

	become(ATTACKER_UID);
	raw_open(&r, &sc->d);
	while (sent < 20000 &&
	       send(r.sock, &open_msg, sizeof(open_msg), MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
		sent++;
	KVT_EXPECT(sent > 16);
}

static void layout_with(const struct scene *sc, void (*change)(struct kv_layout *l),
			const char *word)
{
	struct kv_msg_hello hello = raw_hello_msg();
	struct kv_msg_pool_open m = {.msg = {.magic = KV_MSG_MAGIC,
					     .type = KV_MSG_POOL_OPEN,
					     .size_bytes = sizeof(m),
					     .sequence = 2},
				     .layout = ipc_layout()};
	struct ipc_raw r = {0};

	become(ATTACKER_UID);
	r.sock = raw_connect(&sc->d);
	raw_send(&r, &hello, sizeof(hello), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(&r, 5000), KV_MSG_HELLO_REPLY);
	change(&m.layout);
	raw_send(&r, &m, sizeof(m), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(&r, 5000), KV_MSG_POOL_REPLY);
	KVT_EXPECT(r.in.pool.result < 0);
	(void)word;
}

static void endless_layers(struct kv_layout *l)
{
	l->nr_layers = ~0u;
}

static void no_tokens(struct kv_layout *l)
{
	l->page_tokens = 0;
}

static void overflowing(struct kv_layout *l)
{
	l->nr_layers = 0x10001;
	l->nr_kv_heads = 0x10001;
	l->head_dim = 0x10001;
}

static void layout_of_4_billion_layers(const struct scene *sc)
{
	layout_with(sc, endless_layers, "nr_layers");
}

static void layout_without_tokens(const struct scene *sc)
{
	layout_with(sc, no_tokens, "page_tokens");
}

static void layout_that_overflows(const struct scene *sc)
{
	layout_with(sc, overflowing, "nr_layers");
}

/* A cookie that is guessed, and one that is another process's. */
static void guessed_cookie(const struct scene *sc)
{
	struct kv_msg_hello hello = raw_hello_msg();
	struct ipc_raw r = {0};

	become(ATTACKER_UID);
	for (u32 i = 0; i < 50; i++) {
		for (u32 k = 0; k < KV_COOKIE_BYTES; k++)
			hello.cookie[k] = (u8)(rand() >> 3);
		r.sock = raw_connect(&sc->d);
		raw_send(&r, &hello, sizeof(hello), NULL, 0);
		/* a session of its own at most, never somebody's */
		if (raw_recv(&r, 5000) == KV_MSG_HELLO_REPLY && !r.in.hello.result) {
			struct kv_session_page *page;

			KVT_EXPECT_EQ(r.nr_fds, 4);
			page = mmap(NULL, KV_SESSION_BYTES, PROT_READ, MAP_SHARED,
				    r.fds[3], 0);
			KVT_EXPECT(page != MAP_FAILED);
			KVT_EXPECT_EQ(page->slots[0].word, KV_SLOT_IDLE);
		}
		for (u32 k = 0; k < r.nr_fds; k++)
			close(r.fds[k]);
		close(r.sock);
	}
}

const struct attack attacks_socket[] = {
	{"HELLO of a uid in no tenant", "refused by name", unknown_uid},
	{"HELLO for ABI 9999", "refused by name", abi_range},
	{"escape codes in the client's name", "refused by name", control_characters},
	{"a name without an end", "refused by name", name_without_end},
	{"an unknown role", "refused by name", bad_role},
	{"a ring of depth 3", "refused by name", odd_depth},
	{"a ring of 2^31 entries", "refused by name", huge_depth},
	{"a guessed session cookie", "a new session or none", guessed_cookie},
	{"bad magic", "hang-up", bad_magic},
	{"size_bytes that lies", "hang-up", lying_size},
	{"nr_fds that lies", "hang-up", lying_fds},
	{"an unknown message", "hang-up", unknown_type},
	{"POOL_OPEN before HELLO", "hang-up", pool_before_hello},
	{"half a message", "hang-up", half_message},
	{"an empty message", "hang-up", empty_message},
	{"a message of 132 KiB", "hang-up", giant_message},
	{"HELLO twice", "hang-up", hello_twice},
	{"100 x 16 descriptors", "closed, hang-up", descriptors},
	{"250 descriptors of sockets", "closed, hang-up", descriptor_bomb},
	{"1,500 connections of one uid", "others get in", connection_flood},
	{"connections without end", "slowed down, others get in", connection_churn},
	{"20,000 requests, no reply read", "dropped or paused", never_reads},
	{"a layout of 2^32 layers", "refused", layout_of_4_billion_layers},
	{"a layout without tokens", "refused", layout_without_tokens},
	{"a layout whose size overflows", "refused", layout_that_overflows},
	{NULL, NULL, NULL},
};
