/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/ipc/kept, adopt: what the keeper holds is odd, or the keeper is slow or gone. Whatever
 * it is, what was kept is not lost by it.
 */
#include "tests/unit/ipc/start.h"

#include <fcntl.h>

/* ------------------------------------------------------------------ odd things kept */

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
	static const struct {
		u32 kind;
		struct kvd_keep_key key;
		u32 bytes;
		u8 byte;
	} rows[] = {
		{KVD_KEEP_IMAGE, {.session = 1000}, 64, 0},
		{KVD_KEEP_IMAGE, {.session = 1000}, sizeof(struct kvd_image), 0x3c},
		{KVD_KEEP_FRAMES, {.pool = 7, .session = 1000}, 8192, 0},
		{KVD_KEEP_FRAMES, {.pool = 999, .session = 1000}, 8192, 0},
		{KVD_KEEP_EXTENT, {.pool = 1, .index = 3}, 4096, 0},
		{KVD_KEEP_EXTENT, {.pool = 2}, 4096, 0},
		{KVD_KEEP_PAGE, {.session = 1000}, KV_SESSION_BYTES, 0}, /* of no pid */
		{KVD_KEEP_PAGE, {.kind = KVD_KEEP_PIDFD, .session = 1000}, 1, 0},
	};

	for (u32 i = 0; i < KV_ARRAY_SIZE(rows); i++) {
		u32 nr = rows[i].key.session == 1000;

		dir_make();
		history();
		put_before(rows[i].kind, rows[i].key,
			   file_of(rows[i].bytes, rows[i].byte));
		KVT_EXPECT_EQ(nr_strange(), nr);
		KVT_EXPECT_EQ(pages_now(), 4);
		KVT_EXPECT_EQ(nr_strange(), 0);
		close(client);
		end();
	}
}

/* A page that is too short for a session, with a process: as none. */
KVT_TEST(session_page_that_is_too_short)
{
	const struct kvd_keep_key pid = {.kind = KVD_KEEP_PIDFD, .session = 1000},
				  page = {.session = 1000};

	dir_make();
	history();
	put_before(KVD_KEEP_PAGE, pid, file_of(1, 0));
	put_before(KVD_KEEP_PAGE, page, file_of(1, 0));
	KVT_EXPECT_EQ(nr_strange(), 2);
	KVT_EXPECT_EQ(pages_now(), 4);
	KVT_EXPECT_EQ(nr_strange(), 0);
	close(client);
	end();
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

static pid_t victim;

static void keeper_kill(void)
{
	char text[16];

	kill(victim, SIGKILL);
	snprintf(text, sizeof(text), "%d", victim);
	for (u32 i = 0; i < 1000 && is_keeper(text); i++)
		usleep(1000);
}

/* kvmd sees that its keeper is gone, within 200 ms. */
static void keeper_missed(void)
{
	for (u32 i = 0; i < 200 && !kvd.kept.restarts; i++) {
		turns(1);
		usleep(1000);
	}
}

static void die(void)
{
	raise(SIGKILL);
}

static int refill_and_die(u32 nth)
{
	victim = keeper_but(0);
	keeper_kill();
	calls = 0;
	at_nth = die;
	fail_nth = nth;
	keeper_missed();
	return kvd.kept.restarts ? 0 : 1;
}

/* kvmd is killed at the @nth call while it fills a new keeper. Return: whether it was */
static bool die_in_refill(u32 nth)
{
	int status = kvmd_status(refill_and_die, nth);

	KVT_EXPECT(WIFSIGNALED(status) || !status);
	return WIFSIGNALED(status);
}

static void whole_or_nothing(void)
{
	const struct kvd_pool *pool = kvd.core.mm.pools[0];

	if (!kvd.kept.found)
		KVT_EXPECT(!pool && !kvd.core.nr_sessions);
	else
		KVT_EXPECT(pool && pool->nr[KVD_ACTIVE] == 4 &&
			   kvd.core.nr_sessions == 1);
}

/* Steps of a session that the next kvmd does not know of would go on in pages that it gives
 * to others: either it knows all sessions, or it has none of their memory. */
KVT_TEST_T(killed_while_a_new_keeper_is_filled, 120)
{
	bool died = true;

	for (u32 nth = 1; died; nth++) {
		dir_make();
		history();
		died = die_in_refill(nth);
		in_kvmd(whole_or_nothing);
		KVT_EXPECT(died || nth > 10);
		close(client);
		end();
	}
}

/* The keeper is killed at the @nth call of a start; kvmd serves for a moment and goes. Return:
 * 0; 1 it did not start; 2 no call was left */
static int start_without(u32 nth)
{
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	int status, r;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		victim = keeper_but(0);
		at_nth = keeper_kill;
		calls = 0;
		fail_nth = nth;
		r = start(error);
		status = r ? 1 : calls < nth ? 2 : 0;
		fail_nth = 0;
		if (r)
			printf("# call %u: %s\n", nth, error);
		else if (!status)
			keeper_missed();
		_exit(status);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT(WIFEXITED(status));
	return WEXITSTATUS(status);
}

/* Until kvmd has it all, it goes with the keeper: a cold start. From then on a new keeper
 * gets it, and nothing is lost. */
KVT_TEST_T(keeper_killed_at_each_call_of_an_adopting_start, 120)
{
	u32 nth = 0, last_lost = 0, kept = 0, nr;
	int r;

	do {
		dir_make();
		history();
		r = start_without(++nth);
		if (r == 1)
			KVT_FAIL("killed at call %u: kvmd does not start", nth);
		nr = pages_now();
		KVT_EXPECT(nr == 0 || nr == 4);
		if (nr)
			kept++;
		else
			last_lost = nth;
		close(client);
		end();
	} while (r != 2);
	KVT_NOTE("%u calls: %u with everything, the last cold start at %u", nth - 1, kept,
		 last_lost);
	/* the keeper may have said all or not when it is killed in the middle of its list;
	 * that is in the first half of a start */
	KVT_EXPECT(last_lost > 2 && last_lost <= (nth - 1) / 2);
}

/* Two descriptors make a session, and two a pool: the keeper is killed between them, too.
 * Return: 0; 1 there was no @nth call */
static int serve_without(u32 nth)
{
	int none;

	victim = keeper_but(0);
	at_nth = keeper_kill;
	calls = 0;
	fail_nth = nth;
	turns(8);
	none = calls < nth;
	fail_nth = 0;
	KVT_EXPECT_EQ(kvd.core.nr_sessions, 2);
	KVT_EXPECT(kvd.core.mm.pools[1]);
	if (!none)
		keeper_missed();
	return none;
}

static void has_both(void)
{
	KVT_EXPECT(kvd.kept.found);
	KVT_EXPECT_EQ(kvd.core.nr_sessions, 2);
	KVT_EXPECT(kvd.core.mm.pools[0] && kvd.core.mm.pools[0]->nr[KVD_ACTIVE] == 4);
	KVT_EXPECT(kvd.core.mm.pools[1] && kvd.core.mm.pools[1]->nr_sessions == 1);
	KVT_EXPECT_EQ(kvd.kept.adopted.damage, 0);
}

/* The next kvmd has all that was given out, whenever the keeper died: a session that it does
 * not know of would go on in pages that are others' by then. */
KVT_TEST_T(keeper_killed_at_each_call_while_a_session_opens, 120)
{
	struct kv_msg_hello hello = {.msg = {.magic = KV_MSG_MAGIC,
					     .type = KV_MSG_HELLO,
					     .size_bytes = sizeof(hello)},
				     .abi_min = KV_ABI_VERSION_MIN,
				     .abi_max = KV_ABI_VERSION,
				     .client_name = "second"};
	struct kv_msg_pool_open pool = pool_open_msg();
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	u32 nth = 0;
	bool died;

	memset(pool.layout.model_id, 7,
	       sizeof(pool.layout.model_id)); /* a pool of its own */
	do {
		int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

		dir_make();
		history();
		memcpy(addr.sun_path, opt.socket_path, sizeof(addr.sun_path));
		KVT_EXPECT(!connect(s, (struct sockaddr *)&addr, sizeof(addr)));
		KVT_EXPECT_EQ(send(s, &hello, sizeof(hello), 0), sizeof(hello));
		KVT_EXPECT_EQ(send(s, &pool, sizeof(pool), 0), sizeof(pool));
		died = kvmd_nth(serve_without, ++nth);
		in_kvmd(has_both);
		close(s);
		close(client);
		end();
	} while (died);
	KVT_NOTE("%u calls", nth - 1);
	KVT_EXPECT(nth > 20);
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

/* A machine can be so busy that the keeper says nothing for seconds. */
KVT_TEST(a_start_waits_for_a_slow_keeper)
{
	pid_t slow, again;

	dir_make();
	history();
	slow = keeper_but(0);
	KVT_EXPECT(slow > 0 && !kill(slow, SIGSTOP));
	again = fork();
	if (!again) {
		setsid(); /* also when the case has failed */
		usleep(3000000);
		_exit(kill(slow, SIGCONT));
	}
	KVT_EXPECT_EQ(pages_now(), 4);
	KVT_EXPECT_EQ(keeper_but(0), slow);
	KVT_EXPECT_EQ(waitpid(again, NULL, 0), again);
	close(client);
	end();
}

static bool is_alive(pid_t pid)
{
	char text[16];

	snprintf(text, sizeof(text), "%d", pid);
	return is_keeper(text); /* a zombie has no command line */
}

/* Held memory that no kvmd can reach would be lost to the host. */
static void must_end(pid_t slow)
{
	KVT_EXPECT(keeper_but(slow) > 0);
	KVT_EXPECT(!kill(slow, SIGCONT));
	for (u32 i = 0; i < 2000 && is_alive(slow); i++)
		usleep(1000);
	if (is_alive(slow)) {
		kill(slow, SIGKILL);
		KVT_FAIL("the keeper that was replaced lives on");
	}
}

/* It answers too late, and is replaced: when it comes to itself it must go. */
static void too_slow(void)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_MOVER, .session = 5};
	pid_t slow = keeper_but(0);

	KVT_EXPECT(slow > 0 && !kill(slow, SIGSTOP));
	KVT_EXPECT_EQ(kvd_kept_put(&kvd, &key, STDIN_FILENO), 0); /* of the new one */
	must_end(slow);
	kvd_kept_del(&kvd, &key);
}

/* It takes no deletes, which nobody answers: the tick replaces it, or what they name would be
 * held for good. */
static void takes_no_deletes(void)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_MOVER, .session = 5};
	pid_t slow = keeper_but(0);
	u32 before = kvd.kept.restarts;

	KVT_EXPECT(slow > 0 && !kill(slow, SIGSTOP));
	for (u32 i = 0; i < 1000; i++)
		kvd_kept_del(&kvd, &key);
	kvd_kept_tick(&kvd);
	KVT_EXPECT_EQ(kvd.kept.restarts, before + 1);
	must_end(slow);
}

KVT_TEST(a_keeper_that_takes_no_deletes_is_replaced)
{
	dir_make();
	history();
	in_kvmd(takes_no_deletes);
	KVT_EXPECT_EQ(pages_now(), 4);
	close(client);
	end();
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

KVT_MAIN()
