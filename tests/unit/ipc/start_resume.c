/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/ipc/resume: the peer that comes back after a restart is another than it says, goes
 * meanwhile, or has used its magazine. Nobody is given what is another's.
 */
#include "tests/unit/ipc/start.h"

#include <fcntl.h>
#include <sys/syscall.h>

#include "kvmd/ipc/conn.h"

static struct kvd_conn *away(void)
{
	struct kvd_conn *conn;

	list_for_each_entry (conn, &kvd.conns, node)
		if (conn->state == KVD_CONN_AWAY)
			return conn;
	KVT_FAIL("no session waits for its process");
}

static void the_same(void)
{
	turns(6);
}

static void another_uids(void)
{
	away()->cred.uid++;
	turns(6);
}

/* Its process is gone, and the loop has not been told yet. */
static void a_dead_ones(void)
{
	struct kvd_conn *conn = away();
	pid_t pid = fork();
	int pidfd;

	if (!pid)
		_exit(0);
	pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	KVT_EXPECT(pidfd >= 0 && waitpid(pid, NULL, 0) == pid);
	kvd_loop_del(kvd.loop, &conn->pid_watch);
	KVT_EXPECT_EQ(dup3(pidfd, conn->pidfd, O_CLOEXEC), conn->pidfd);
	turns(6);
}

static void another_tenants(void)
{
	struct kvd_limits lim = {.high_bytes = 1, .max_bytes = 1, .weight = 1};
	struct kvd_session *s = away()->session;
	struct kvd_tenant *t;

	KVT_EXPECT(!kvd_tenant_create(&kvd.core, s->tenant->domain, "other", &lim, &t));
	s->tenant = t;
	turns(6);
}

static struct kv_mag_slot *stocked_slot(void)
{
	struct kv_session_page *page = away()->page;

	for (u32 i = 0; i < KV_MAGAZINES * KV_MAGAZINE_SLOTS; i++) {
		struct kv_mag_slot *slot = &page->magazines[i / KV_MAGAZINE_SLOTS]
						    .slots[i % KV_MAGAZINE_SLOTS];

		if (slot->word & KV_MAG_STOCKED)
			return slot;
	}
	KVT_FAIL("no page is stocked");
}

/* A page of its magazine goes between the adoption and its HELLO. */
static void pops_one(void)
{
	u32 pfn;
	u64 tag;
	int dirty;

	KVT_EXPECT(kv_mag_pop(stocked_slot(), &pfn, &tag, &dirty));
	turns(8);
}

static void counts_sessions(u32 nr)
{
	struct kvd_finding list[4];
	struct kvd_findings fs = {.list = list, .max = 4};

	turns(8);
	KVT_EXPECT_EQ(kvd.core.nr_sessions, nr);
	KVT_EXPECT_EQ(kvd.nr_conns, nr);
	KVT_EXPECT(!kvd_audit(&kvd.core, &fs));
}

static void one_session(void)
{
	counts_sessions(1);
}

static void no_session(void)
{
	counts_sessions(0);
}

/* Waits for its process, with all that it holds. */
static void one_away(void)
{
	counts_sessions(1);
	KVT_EXPECT_EQ(kvd.core.mm.pools[0]->nr[KVD_ACTIVE], 4);
	KVT_EXPECT(away()->session->attach[0].pool == kvd.core.mm.pools[0]);
}

static struct kv_msg_hello hello_of(const struct kvd_image *image)
{
	struct kv_msg_hello hello = {.msg = {.magic = KV_MSG_MAGIC,
					     .type = KV_MSG_HELLO,
					     .size_bytes = sizeof(hello)},
				     .abi_min = KV_ABI_VERSION_MIN,
				     .abi_max = KV_ABI_VERSION,
				     .client_name = "start"};

	for (u32 i = 0; i < KVD_IMAGE_SESSIONS; i++)
		if (image->sessions[i].state == KVD_IMAGE_LIVE)
			memcpy(hello.cookie, image->sessions[i].cookie, KV_COOKIE_BYTES);
	return hello;
}

/* The listening socket is kept, so somebody may connect while there is no kvmd. */
static int knock(const struct kv_msg_hello *hello)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	memcpy(addr.sun_path, opt.socket_path, sizeof(addr.sun_path));
	KVT_EXPECT(!connect(s, (struct sockaddr *)&addr, sizeof(addr)));
	KVT_EXPECT_EQ(send(s, hello, sizeof(*hello), 0), sizeof(*hello));
	return s;
}

KVT_TEST(a_session_is_taken_up_by_its_own_process_only)
{
	static const struct {
		void (*fn)(void);
		u32 role;
		bool resumed;
	} rows[] = {{the_same, KV_ROLE_ENGINE, true},
		    {another_uids, KV_ROLE_ENGINE, false},
		    {a_dead_ones, KV_ROLE_ENGINE, false},
		    {another_tenants, KV_ROLE_ENGINE, false},
		    {the_same, KV_ROLE_MONITOR, false}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(rows); i++) {
		struct kv_msg_hello_reply reply;
		struct kvd_image *image;
		struct kv_msg_hello hello;
		int s;

		dir_make();
		history();
		image = image_map();
		hello = hello_of(image);
		hello.role = rows[i].role;
		s = knock(&hello);
		in_kvmd(rows[i].fn);
		KVT_EXPECT_EQ(recv(s, &reply, sizeof(reply), 0), sizeof(reply));
		KVT_EXPECT_EQ(reply.result, 0);
		KVT_EXPECT_EQ(!!(reply.flags & KV_HELLO_RESUMED), rows[i].resumed);
		KVT_EXPECT_EQ(memcmp(reply.cookie, hello.cookie, KV_COOKIE_BYTES) == 0,
			      rows[i].resumed);
		munmap(image, sizeof(*image));
		close(s);
		close(client);
		end();
	}
}

static int asker; /* a socket of the session that is taken up */

static bool ask(u32 *sent)
{
	const struct kv_msg_pool_open pool = pool_open_msg();
	bool went = send(asker, &pool, sizeof(pool), MSG_DONTWAIT) == sizeof(pool);

	*sent += went;
	turns(1);
	return went;
}

/* Opens its pool again and again, a few times more than the socket takes answers. */
static void asks_before_it_reads(void)
{
	static union {
		struct kv_msg msg;
		struct kv_msg_leases leases;
		u8 bytes[KV_MSG_BYTES_MAX];
	} in;
	u32 sent = 0, replies = 0, last = 0, waiting = 0;
	struct kvd_conn *conn;

	turns(6);
	conn = list_first(&kvd.conns, struct kvd_conn, node);
	KVT_EXPECT(conn->resumed);
	while (ask(&sent) && waiting < 5)
		waiting += conn->out.nr > 0;
	for (u32 quiet = 0; quiet < 50; quiet++) {
		while (recv(asker, &in, sizeof(in), MSG_DONTWAIT) > 0) {
			replies += in.msg.type == KV_MSG_POOL_REPLY;
			last += in.msg.type == KV_MSG_LEASES &&
				(in.leases.flags & KV_LEASES_LAST);
			quiet = 0;
		}
		turns(1);
	}
	KVT_EXPECT(sent > 10);
	KVT_EXPECT_EQ(replies, sent);
	KVT_EXPECT_EQ(last, sent);
}

/* LEASES that the socket does not take are not the end of them: each POOL_OPEN is told all. */
KVT_TEST(each_open_of_a_session_taken_up_is_told_its_leases)
{
	struct kvd_image *image;
	struct kv_msg_hello hello;

	dir_make();
	history();
	image = image_map();
	hello = hello_of(image);
	asker = knock(&hello);
	in_kvmd(asks_before_it_reads);
	munmap(image, sizeof(*image));
	close(asker);
	close(client);
	end();
}

/* As many sessions as one uid may have, or as there may be, wait for their processes. */
static u32 crowd_nr, crowd_uid;

static void in_a_crowd(void)
{
	int fd = memfd_create("page", MFD_CLOEXEC);
	struct kvd_conn *conn;

	KVT_EXPECT(fd >= 0 && !ftruncate(fd, KV_SESSION_BYTES));
	for (u32 i = 1; i < crowd_nr; i++) {
		conn = kvd_conn_away(&kvd, 100000 + i, fd, -1);
		KVT_EXPECT(conn);
		conn->cred.uid = crowd_uid;
	}
	turns(6);
}

/* Each of them comes back by a connection more. */
KVT_TEST(the_last_session_that_a_uid_may_have_is_taken_up)
{
	struct kv_msg_hello_reply reply;
	struct kvd_image *image;
	struct kv_msg_hello hello;
	int s;

	for (u32 i = 0; i < 2; i++) {
		crowd_nr = i ? KVD_CONNS_MAX : KVD_CONNS_EACH_MAX;
		crowd_uid = getuid() + i;
		dir_make();
		history();
		image = image_map();
		hello = hello_of(image);
		s = knock(&hello);
		in_kvmd(in_a_crowd);
		KVT_EXPECT_EQ(recv(s, &reply, sizeof(reply), 0), sizeof(reply));
		KVT_EXPECT_EQ(reply.result, 0);
		KVT_EXPECT(reply.flags & KV_HELLO_RESUMED);
		close(s);
		/* one session more is none of them */
		memset(hello.cookie, 0, sizeof(hello.cookie));
		s = knock(&hello);
		in_kvmd(in_a_crowd);
		KVT_EXPECT_EQ(recv(s, &reply, sizeof(reply), 0), sizeof(reply));
		KVT_EXPECT(reply.result == -EUSERS);
		munmap(image, sizeof(*image));
		close(s);
		close(client);
		end();
	}
}

/* One that it gave up waiting for, or that it has been told a part of: it comes again. */
static void knock_and_go(const struct kv_msg_hello *hello, bool opens)
{
	const struct kv_msg_pool_open pool = pool_open_msg();
	int s = knock(hello);

	if (opens)
		KVT_EXPECT_EQ(send(s, &pool, sizeof(pool), 0), sizeof(pool));
	close(s);
}

/* Its deadline passes while kvmd takes it up: the session waits for its process, as before. */
KVT_TEST(a_peer_that_gives_up_gets_its_session_the_next_time)
{
	struct kv_msg_hello_reply reply;
	struct kvd_image *image;
	struct kv_msg_hello hello;
	int s;

	dir_make();
	history();
	image = image_map();
	hello = hello_of(image);
	knock_and_go(&hello, false);
	in_kvmd(one_away);
	knock_and_go(&hello, false);
	knock_and_go(&hello, true);
	knock_and_go(&hello, false);
	s = knock(&hello);
	in_kvmd(one_session);
	KVT_EXPECT_EQ(recv(s, &reply, sizeof(reply), 0), sizeof(reply));
	KVT_EXPECT(reply.flags & KV_HELLO_RESUMED);
	KVT_EXPECT_EQ(memcmp(reply.cookie, hello.cookie, KV_COOKIE_BYTES), 0);
	munmap(image, sizeof(*image));
	close(s);
	close(client);
	end();
}

/* Where nobody can say whether its process lives (poll) the peer has another session as well. */
static void holds_its_pages(void)
{
	struct kvd_finding list[4];
	struct kvd_findings fs = {.list = list, .max = 4};

	KVT_EXPECT(kvd.core.nr_sessions);
	KVT_EXPECT_EQ(kvd.core.mm.pools[0]->nr[KVD_ACTIVE], 4);
	KVT_EXPECT(!kvd_audit(&kvd.core, &fs));
}

/* The @nth call fails while a session is taken up. Return: 0; 1 there was none */
static int resume_without(u32 nth)
{
	int none;

	calls = 0;
	fail_nth = nth;
	for (u32 i = 0; i < 8; i++) {
		kvd.core_next_ns = 0;
		kvd_turn(&kvd);
	}
	none = calls < nth;
	fail_nth = 0;
	holds_its_pages();
	return none;
}

/* No memory, no descriptor, no peer: whatever fails, the session waits for the next try. */
KVT_TEST_T(each_call_fails_while_a_session_is_taken_up, 120)
{
	const struct kv_msg_pool_open pool = pool_open_msg();
	u32 nth = 0;
	bool failed;

	do {
		struct kvd_image *image;
		struct kv_msg_hello hello;
		int s;

		dir_make();
		history();
		image = image_map();
		hello = hello_of(image);
		s = knock(&hello);
		KVT_EXPECT_EQ(send(s, &pool, sizeof(pool), 0), sizeof(pool));
		failed = kvmd_nth(resume_without, ++nth);
		in_kvmd(holds_its_pages);
		munmap(image, sizeof(*image));
		close(s);
		close(client);
		end();
	} while (failed);
	KVT_NOTE("%u calls", nth - 1);
	KVT_EXPECT(nth > 8);
}

/* It has closed its session, or its process is no more: nobody will come. */
static void closes_it(void)
{
	kv_store_release64(&away()->page->closed, 1);
	no_session();
}

KVT_TEST(a_peer_that_closes_while_it_is_told)
{
	struct kvd_image *image;
	struct kv_msg_hello hello;

	dir_make();
	history();
	image = image_map();
	hello = hello_of(image);
	knock_and_go(&hello, true);
	in_kvmd(closes_it);
	munmap(image, sizeof(*image));
	close(client);
	end();
}

/* Pages of a magazine are told as such; one that was popped meanwhile is its holder's. */
KVT_TEST(a_page_popped_before_hello_is_a_lease)
{
	static struct {
		struct kv_msg_leases head;
		struct kv_lease leases[16];
	} m;
	struct kv_msg_pool_open pool = pool_open_msg();
	u32 stocked = 0, held = 0;
	struct kvd_image *image;
	struct kv_msg_hello hello;
	int s;

	dir_make();
	history();
	image = image_map();
	hello = hello_of(image);
	s = knock(&hello);
	KVT_EXPECT_EQ(send(s, &pool, sizeof(pool), 0), sizeof(pool));
	in_kvmd(pops_one);
	while (recv(s, &m, sizeof(m), MSG_DONTWAIT) > 0) {
		if (m.head.msg.type != KV_MSG_LEASES)
			continue;
		for (u32 i = 0; i < m.head.nr; i++) {
			stocked += m.leases[i].flags == KV_LEASE_STOCKED;
			held += !m.leases[i].flags;
		}
	}
	KVT_EXPECT_EQ(stocked, 2);
	KVT_EXPECT_EQ(held, 5);
	munmap(image, sizeof(*image));
	close(s);
	close(client);
	end();
}

KVT_MAIN()
