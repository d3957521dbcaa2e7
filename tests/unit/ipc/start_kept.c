/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/ipc/kept, adopt, resume: what the keeper holds is odd, the keeper is slow, or the
 * peer that comes back is another than it says. Whatever it is, what was kept is not lost by
 * it, and nobody is given what is another's.
 */
#include "tests/unit/ipc/start.h"

#include <fcntl.h>
#include <sys/syscall.h>

#include "kvmd/ipc/conn.h"

/* ------------------------------------------------------------------ odd things kept */

static struct {
	struct kvd_keep_key key;
	int fd;
} real; /* what the keeper has of one kind */

static u32 want_kind;

static void see(void *arg, const struct kvd_keep_key *key, int fd)
{
	u32 *strange = arg;

	if (strange && key->session >= 1000)
		++*strange;
	if (key->kind != want_kind || key->session >= 1000 || real.fd >= 0) {
		close(fd);
		return;
	}
	real.key = *key;
	real.fd = fd;
}

static void keep_open(struct kvd_keep *k)
{
	bool found;

	KVT_EXPECT(!kvd_keep_open(k, dir, getpid(), &found) && found);
}

static int file_of(size_t bytes, u8 byte)
{
	u8 data[4096];
	int fd = memfd_create("odd", MFD_CLOEXEC);

	memset(data, byte, sizeof(data));
	for (size_t n; bytes; bytes -= n) {
		n = KV_MIN(bytes, sizeof(data));
		KVT_EXPECT(write(fd, data, n) == (ssize_t)n);
	}
	return fd;
}

/* Something strange, and then the real one, which is listed after it. */
static void put_before(u32 kind, struct kvd_keep_key strange, int fd)
{
	struct kvd_keep k;

	want_kind = kind;
	real.fd = -1;
	keep_open(&k);
	KVT_EXPECT(kvd_keep_list(&k, see, NULL) > 0);
	KVT_EXPECT(real.fd >= 0);
	kvd_keep_del(&k, &real.key);
	strange.kind = strange.kind ? strange.kind : kind;
	if (kind == KVD_KEEP_EXTENT)
		strange.session = real.key.session;
	KVT_EXPECT_EQ(kvd_keep_put(&k, &strange, fd), 0);
	KVT_EXPECT_EQ(kvd_keep_put(&k, &real.key, real.fd), 0);
	close(real.fd);
	close(fd);
	kvd_keep_close(&k, false);
}

static u32 nr_strange(void)
{
	struct kvd_keep k;
	u32 nr = 0;

	want_kind = 0;
	real.fd = -1;
	keep_open(&k);
	KVT_EXPECT(kvd_keep_list(&k, see, &nr) > 0);
	kvd_keep_close(&k, false);
	return nr;
}

/* It is not used, costs nothing, and is let go. */
KVT_TEST(strange_things_in_the_keeper)
{
	const struct kvd_keep_key image = {.session = 1000}, image2 = {.session = 1001},
				  pool = {.pool = 7, .session = 1002},
				  far = {.pool = 999, .session = 1003},
				  extent = {.pool = 1, .index = 3},
				  page = {.session = 1004}, page2 = {.session = 1005},
				  pid = {.kind = KVD_KEEP_PIDFD, .session = 1005};

	dir_make();
	history();
	put_before(KVD_KEEP_IMAGE, image, file_of(64, 0));
	put_before(KVD_KEEP_IMAGE, image2, file_of(sizeof(struct kvd_image), 0x3c));
	put_before(KVD_KEEP_FRAMES, pool, file_of(8192, 0));
	put_before(KVD_KEEP_FRAMES, far, file_of(8192, 0));
	put_before(KVD_KEEP_EXTENT, extent, file_of(4096, 0));
	put_before(KVD_KEEP_PAGE, page, file_of(KV_SESSION_BYTES, 0)); /* of no pid */
	put_before(KVD_KEEP_PAGE, page2, file_of(1, 0));
	put_before(KVD_KEEP_PAGE, pid, file_of(1, 0));
	KVT_EXPECT_EQ(nr_strange(), 7);
	KVT_EXPECT_EQ(pages_now(), 4);
	KVT_EXPECT_EQ(nr_strange(), 0);
	close(client);
	end();
}

static struct kvd_image *image_map(void)
{
	struct kvd_image *image;
	struct kvd_keep k;

	want_kind = KVD_KEEP_IMAGE;
	real.fd = -1;
	keep_open(&k);
	KVT_EXPECT(kvd_keep_list(&k, see, NULL) > 0);
	kvd_keep_close(&k, false);
	image = mmap(NULL, sizeof(*image), PROT_READ | PROT_WRITE, MAP_SHARED, real.fd,
		     0);
	KVT_EXPECT(image != MAP_FAILED);
	close(real.fd);
	return image;
}

KVT_TEST(undo_entry_of_no_pool)
{
	struct kvd_image *image;

	dir_make();
	history();
	image = image_map();
	image->undo.pool_id = KVD_POOLS_MAX + 77;
	image->undo.valid = 1;
	KVT_EXPECT_EQ(pages_now(), 4);
	KVT_EXPECT_EQ(image->undo.valid, 0);
	munmap(image, sizeof(*image));
	close(client);
	end();
}

/* The pool that is adopted is not the first one that is tried: no memory for it either way. */
KVT_TEST_T(each_call_fails_and_no_record_was_under_change, 120)
{
	struct kvd_image *image;
	u32 nth = 1;
	int r;

	dir_make();
	history();
	image = image_map();
	do {
		memset(&image->undo, 0, sizeof(image->undo));
		r = try_nth(nth++);
		if (r == 3)
			KVT_FAIL("call %u failed, and nothing says why", nth - 1);
		if (pages_now() != 4)
			KVT_FAIL("call %u failed, and pages are gone", nth - 1);
	} while (r != 2);
	munmap(image, sizeof(*image));
	close(client);
	end();
}

/* Fail closed: a host secret that cannot be read is no reason to make another one. */
KVT_TEST(unreadable_secret_is_no_start)
{
	char error[KVD_CONFIG_ERROR_BYTES] = "", path[128], was[32];
	pid_t pid;
	int status, fd;

	dir_make();
	history();
	snprintf(path, sizeof(path), "%s/secret", dir);
	fd = open(path, O_RDWR | O_CLOEXEC);
	KVT_EXPECT(fd >= 0 && read(fd, was, sizeof(was)) == sizeof(was));
	KVT_EXPECT(!ftruncate(fd, 5));
	pid = fork();
	if (!pid)
		_exit(start(error) ? 1 : 0);
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 1);
	KVT_EXPECT(pwrite(fd, was, sizeof(was), 0) == sizeof(was));
	close(fd);
	KVT_EXPECT_EQ(pages_now(), 4);
	close(client);
	end();
}

/* ---------------------------------------------------------------- a keeper in trouble */

/* As try_nth(), and every call after the n-th fails, too. */
KVT_TEST_T(all_calls_from_one_on_fail_in_an_adopting_start, 120)
{
	u32 nth = 1, refused = 0;
	int r;

	dir_make();
	history();
	for (;;) {
		fail_on = true;
		r = try_nth(nth++);
		fail_on = false;
		if (r == 2)
			break;
		if (r == 3)
			KVT_FAIL("call %u failed, and nothing says why", nth - 1);
		refused += r == 1;
		if (pages_now() != 4)
			KVT_FAIL("calls from %u on failed, and pages are gone", nth - 1);
	}
	KVT_NOTE("%u calls, %u starts refused", nth - 2, refused);
	KVT_EXPECT(refused > 2);
	close(client);
	end();
}

/* Is @pid a keeper of this case? Its command line says with whom it ends. */
static bool is_keeper(const char *pid)
{
	char path[300], text[200] = "", want[32];
	u32 nr = 0;
	ssize_t n;
	int fd;

	snprintf(path, sizeof(path), "/proc/%s/cmdline", pid);
	snprintf(want, sizeof(want), "%d", opt.keeper_die_with);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : 0;
	if (fd >= 0)
		close(fd);
	for (ssize_t at = 0; at < n; at += (ssize_t)strlen(text + at) + 1, nr++)
		if ((nr == 1 && strcmp(text + at, "--keeper-process")) ||
		    (nr == 3 && strcmp(text + at, want)))
			return false;
	return nr == 4;
}

/* The keeper, or another one than @but. Return: 0: there is none */
static pid_t keeper_but(pid_t but)
{
	DIR *proc = opendir("/proc");
	struct dirent *e;
	pid_t pid = 0;

	while (!pid && (e = readdir(proc)))
		if (atoi(e->d_name) > 0 && atoi(e->d_name) != but && is_keeper(e->d_name))
			pid = atoi(e->d_name);
	closedir(proc);
	return pid;
}

static void turns(u32 nr)
{
	while (nr--) {
		kvd.core_next_ns = 0; /* do not sleep */
		KVT_EXPECT_EQ(kvd_turn(&kvd), 0);
	}
}

/* Run @fn in a kvmd that has adopted; it ends as by kill -9. */
static void in_kvmd(void (*fn)(void))
{
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	int status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		KVT_EXPECT_EQ(start(error), 0);
		fn();
		_exit(0);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT_EQ(status, 0);
}

static void nothing_to_be_had(void)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_MOVER, .session = 5};

	shutdown(kvd.kept.keep.fd, SHUT_RDWR);
	calls = 0;
	fail_on = true;
	fail_nth = 1;
	KVT_EXPECT_EQ(kvd_kept_put(&kvd, &key, STDIN_FILENO), -EPIPE);
	fail_nth = 0;
	fail_on = false;
	KVT_EXPECT_EQ(kvd.kept.keep.fd, -1);
	kvd_kept_tick(&kvd); /* a second later */
	KVT_EXPECT(kvd.kept.keep.fd >= 0);
	KVT_EXPECT_EQ(kvd_kept_put(&kvd, &key, STDIN_FILENO), 0);
	kvd_kept_del(&kvd, &key);
}

KVT_TEST(no_keeper_can_be_had_for_a_while)
{
	dir_make();
	history();
	in_kvmd(nothing_to_be_had);
	KVT_EXPECT_EQ(pages_now(), 4);
	close(client);
	end();
}

/* Somebody who has said nothing yet, and an extent that is not there, are not kept. */
static void replaced(void)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int silent = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	memcpy(addr.sun_path, opt.socket_path, sizeof(addr.sun_path));
	KVT_EXPECT(!connect(silent, (struct sockaddr *)&addr, sizeof(addr)));
	turns(2);
	KVT_EXPECT_EQ(kvd.nr_unknown, 1);
	kvd_kept_del(&kvd, &(struct kvd_keep_key){.kind = KVD_KEEP_MOVER, .session = 9});
	kill(keeper_but(0), SIGKILL);
	for (u32 i = 0; i < 100 && !kvd.kept.restarts; i++) {
		usleep(1000);
		turns(1);
	}
	KVT_EXPECT_EQ(kvd.kept.restarts, 1);
	KVT_EXPECT(kvd.kept.keep.fd >= 0);
}

KVT_TEST(replaced_with_a_silent_peer_and_a_lost_extent)
{
	struct kvd_keep k;

	dir_make();
	history();
	in_kvmd(replaced);
	KVT_EXPECT_EQ(pages_now(), 4);
	want_kind = KVD_KEEP_EXTENT;
	real.fd = -1;
	keep_open(&k);
	KVT_EXPECT(kvd_keep_list(&k, see, NULL) > 0);
	kvd_keep_del(&k, &real.key);
	close(real.fd);
	kvd_keep_close(&k, false);
	in_kvmd(replaced);
	KVT_EXPECT_EQ(pages_now(), 0);
	close(client);
	end();
}

static bool is_alive(pid_t pid)
{
	char text[16];

	snprintf(text, sizeof(text), "%d", pid);
	return is_keeper(text); /* a zombie has no command line */
}

/* It answers too late, and is replaced: when it comes to itself it must go. Held memory that
 * no kvmd can reach would be lost to the host. */
static void too_slow(void)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_MOVER, .session = 5};
	pid_t slow = keeper_but(0);

	KVT_EXPECT(slow > 0 && !kill(slow, SIGSTOP));
	KVT_EXPECT_EQ(kvd_kept_put(&kvd, &key, STDIN_FILENO), 0); /* of the new one */
	KVT_EXPECT(keeper_but(slow) > 0);
	KVT_EXPECT(!kill(slow, SIGCONT));
	for (u32 i = 0; i < 2000 && is_alive(slow); i++)
		usleep(1000);
	if (is_alive(slow)) {
		kill(slow, SIGKILL);
		KVT_FAIL("the keeper that was replaced lives on");
	}
	kvd_kept_del(&kvd, &key);
}

KVT_TEST(a_keeper_that_was_too_slow_ends)
{
	dir_make();
	history();
	in_kvmd(too_slow);
	KVT_EXPECT_EQ(pages_now(), 4);
	close(client);
	end();
}

/* --------------------------------------------------------------------- who comes back */

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

static void counts_sessions(void)
{
	struct kvd_finding list[4];
	struct kvd_findings fs = {.list = list, .max = 4};

	turns(8);
	KVT_EXPECT_EQ(kvd.core.nr_sessions, 0);
	KVT_EXPECT_EQ(kvd.nr_conns, 0);
	KVT_EXPECT(!kvd_audit(&kvd.core, &fs));
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

/* It has its session again and goes before it is told so: the session ends as any. */
KVT_TEST(a_peer_that_goes_while_it_is_told)
{
	struct kvd_image *image;
	struct kv_msg_hello hello;

	dir_make();
	history();
	image = image_map();
	hello = hello_of(image);
	close(knock(&hello));
	in_kvmd(counts_sessions);
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
