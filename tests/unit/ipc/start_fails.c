/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd starts with its keeper, or gets a new one, while one call after another fails: a system call or an
 * allocation, the first, the second, ... Each time it starts, or says why not; and the next
 * start, with nothing in the way, has every session, page and lease.
 */
#include "tests/unit/ipc/start.h"

KVT_TEST_T(each_call_of_a_first_start_fails, 120)
{
	u32 nth = 1, refused = 0;
	int r;

	do {
		dir_make(); /* where no kvmd has been */
		r = try_nth(nth++);
		if (r == 3)
			KVT_FAIL("call %u failed, and nothing says why", nth - 1);
		refused += r == 1;
		KVT_EXPECT_EQ(pages_now(), 0);
		end();
	} while (r != 2);
	KVT_NOTE("%u calls, %u starts refused", nth - 2, refused);
	KVT_EXPECT(refused > 2); /* more where allocations fail, too */
}

KVT_TEST_T(each_call_of_an_adopting_start_fails, 120)
{
	u32 nth = 1, refused = 0;
	int r;

	dir_make();
	history();
	KVT_EXPECT_EQ(pages_now(), 4);
	while ((r = try_nth(nth++)) != 2) {
		if (r == 3)
			KVT_FAIL("call %u failed, and nothing says why", nth - 1);
		refused += r == 1;
		if (pages_now() != 4)
			KVT_FAIL("call %u failed, and pages are gone", nth - 1);
	}
	KVT_NOTE("%u calls, %u starts refused", nth - 2, refused);
	KVT_EXPECT(refused > 2); /* more where allocations fail, too */
	close(client);
	end();
}

/* The keeper goes while kvmd serves, and a call of giving all to a new one fails: once a
 * second it is tried again. Return: as try_nth() */
static int refill_nth(u32 nth)
{
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	pid_t pid;
	int status;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		if (start(error))
			_exit(4);
		shutdown(kvd.kept.keep.fd, SHUT_RDWR);
		calls = 0;
		fail_nth = nth;
		for (u32 i = 0; i < 4; i++) {
			kvd.core_next_ns = 0; /* do not sleep */
			kvd_turn(&kvd);
		}
		fail_nth = 0;
		for (u32 i = 0; i < 2; i++)
			kvd_kept_tick(&kvd);
		kvd.core_next_ns = 0;
		kvd_turn(&kvd);
		_exit(kvd.kept.keep.fd < 0 || !kvd.kept.restarts ? 5
		      : calls < nth				 ? 2
								 : 0);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	if (!WIFEXITED(status))
		KVT_FAIL("call %u failed: killed by signal %d", nth, WTERMSIG(status));
	return WEXITSTATUS(status);
}

KVT_TEST_T(each_call_of_replacing_the_keeper_fails, 120)
{
	u32 nth = 1;
	int r;

	dir_make();
	history();
	while ((r = refill_nth(nth++)) != 2) {
		if (r)
			KVT_FAIL("call %u failed: status %d", nth - 1, r);
		if (pages_now() != 4)
			KVT_FAIL("call %u failed, and pages are gone", nth - 1);
	}
	KVT_NOTE("%u calls", nth - 2);
	KVT_EXPECT(nth > 5);
	close(client);
	end();
}

/* ------------------------------------------------------------------- what is missing */

static struct {
	u32 kind;
	bool damage;
	struct kvd_keep_key key;
	bool found;
} part;

static void part_see(void *arg, const struct kvd_keep_key *key, int fd)
{
	struct kvd_image *image;

	if (key->kind == part.kind) {
		part.key = *key;
		part.found = true;
	}
	if (part.damage && key->kind == part.kind) {
		image = mmap(NULL, sizeof(*image), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
			     0);
		KVT_EXPECT(image != MAP_FAILED);
		image->domains[0].name[0] ^= 4;
		munmap(image, sizeof(*image));
	}
	close(fd);
}

/* One thing is not in the keeper, or is damaged: what hangs on it is gone, and kvmd serves. */
KVT_TEST(one_kept_thing_is_missing)
{
	static const u32 kinds[] = {KVD_KEEP_PIDFD,  KVD_KEEP_PAGE,   KVD_KEEP_TOKENS,
				    KVD_KEEP_FRAMES, KVD_KEEP_LEASES, KVD_KEEP_EXTENT,
				    KVD_KEEP_IMAGE,  KVD_KEEP_IMAGE};

	for (u32 i = 0; i < KV_ARRAY_SIZE(kinds); i++) {
		struct kvd_keep k;
		bool found;

		dir_make();
		history();
		memset(&part, 0, sizeof(part));
		part.kind = kinds[i];
		part.damage = i + 1 == KV_ARRAY_SIZE(kinds);
		KVT_EXPECT(!kvd_keep_open(&k, dir, getpid(), &found) && found);
		KVT_EXPECT(kvd_keep_list(&k, part_see, NULL) > 0);
		KVT_EXPECT(part.found);
		if (!part.damage)
			kvd_keep_del(&k, &part.key);
		kvd_keep_close(&k, false);
		KVT_EXPECT_EQ(pages_now(), 0);
		close(client);
		end();
	}
}

/* ------------------------------------------------------------------------- the keeper */

static void take_fd(void *arg, const struct kvd_keep_key *key, int fd)
{
	close(fd);
}

static struct sockaddr_un keeper_addr;

/* Does not start one where none is. Return: false: there is none */
static bool keeper_meet(struct kvd_keep *k)
{
	struct timeval tv = {.tv_usec = 100000};

	k->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	setsockopt(k->fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
	if (!connect(k->fd, (void *)&keeper_addr, sizeof(keeper_addr)))
		return true;
	close(k->fd);
	k->fd = -1;
	return false;
}

/* What a kvmd does, as far as it comes. */
static void keeper_use(struct kvd_keep *k)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_EXTENT, .pool = 1};

	for (key.index = 0; key.index < 3; key.index++)
		if (kvd_keep_put(k, &key, STDIN_FILENO))
			return;
	kvd_keep_list(k, take_fd, NULL);
	kvd_keep_del(k, &key);
}

/* A keeper in which the n-th call fails. Return: its status; 2: no call was left */
static int keeper_nth(u32 nth)
{
	struct kvd_keep k = {.fd = -1};
	int fd, status;
	pid_t pid;

	unlink(keeper_addr.sun_path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	KVT_EXPECT(!bind(fd, (void *)&keeper_addr, sizeof(keeper_addr)) &&
		   !listen(fd, 8));
	pid = fork();
	if (!pid) {
		calls = 0;
		fail_nth = nth;
		status = kvd_keeper_main(fd, getppid());
		fail_nth = 0;
		_exit(calls < nth ? 2 : status);
	}
	close(fd);
	for (u32 i = 0; i < 3 && keeper_meet(&k); i++) {
		keeper_use(&k);
		kvd_keep_close(&k, i == 2);
	}
	for (u32 i = 0; waitpid(pid, &status, WNOHANG) != pid; i++) {
		if (i > 200)
			KVT_FAIL("call %u failed: the keeper does not end", nth);
		if (keeper_meet(&k))
			kvd_keep_close(&k, true);
		usleep(1000);
	}
	if (!WIFEXITED(status))
		KVT_FAIL("call %u failed: killed by signal %d", nth, WTERMSIG(status));
	return WEXITSTATUS(status);
}

/* It ends, or goes on; its peer is told, or hung up on. */
KVT_TEST_T(each_call_of_the_keeper_fails, 120)
{
	u32 nth = 1;

	dir_make();
	keeper_addr.sun_family = AF_UNIX;
	snprintf(keeper_addr.sun_path, sizeof(keeper_addr.sun_path), "%.60s/keeper.sock",
		 dir);
	while (keeper_nth(nth) != 2)
		nth++;
	KVT_NOTE("%u calls", nth - 1);
	KVT_EXPECT(nth > 20);
	dir_remove();
}

KVT_MAIN()
