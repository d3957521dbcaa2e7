/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is in the keeper's way at a start.
 *
 * O59 (ii), fd store surprises (systemd 35288, 4408, 12086): the limit on descriptors was
 * lowered below what is held. kvmd does not start with a part of it: it says how many it
 * takes, and the keeper holds on.
 */
#include "tests/unit/ipc/start.h"

#include "kvmd/keep/keep.h"

static void held(void *arg, const struct kvd_keep_key *key, int fd)
{
	++*(u32 *)arg;
	close(fd);
}

/* How many the keeper has, after it got @more of them. */
static u32 keeper_holds(u32 more)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_EXTENT, .pool = 40};
	struct kvd_keep k;
	u32 nr = 0;
	bool found;

	KVT_EXPECT(!kvd_keep_open(&k, dir, getpid(), &found) && found);
	for (u32 i = 0; i < more; i++) {
		key.session = key.index = i;
		KVT_EXPECT_EQ(kvd_keep_put(&k, &key, STDIN_FILENO), 0);
	}
	KVT_EXPECT(kvd_keep_list(&k, held, &nr) > 0);
	KVT_EXPECT_EQ(k.nr_held, nr);
	kvd_keep_close(&k, false);
	return nr;
}

/* A start that may have @nr descriptors must be refused and say that it takes @takes. */
static void refused_with(u32 nr, u32 holds, u32 takes)
{
	struct rlimit lim = {nr, nr};
	char error[KVD_CONFIG_ERROR_BYTES] = "", want[128];
	int status;
	pid_t pid;

	snprintf(want, sizeof(want),
		 "holds %u descriptors and RLIMIT_NOFILE is %u: it takes %u", holds, nr,
		 takes);
	fflush(stdout);
	pid = fork();
	if (!pid) {
		KVT_EXPECT(!setrlimit(RLIMIT_NOFILE, &lim));
		KVT_EXPECT_EQ(start(error), -EMFILE);
		KVT_EXPECT_HAS(error, want);
		_exit(0);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT_EQ(status, 0);
}

KVT_TEST(o59_limit_below_what_is_held)
{
	u32 nr;

	dir_make();
	history();
	nr = keeper_holds(0);
	/* there is room for what is held, but for nothing else */
	refused_with(nr + 40, nr, nr + 64);
	refused_with(nr + 63, nr, nr + 64);
	/* not even that: a message comes with a part of its descriptors */
	nr = keeper_holds(150);
	refused_with(50, nr, nr + 64);
	refused_with(120, nr, nr + 64);
	KVT_EXPECT_EQ(keeper_holds(0), nr);
	KVT_EXPECT_EQ(pages_now(), 4);
	close(client);
	end();
}

/* ------------------------------------------------------- a keeper that dies just then */

/* Killed together with kvmd, it still takes the next one's connection: there is nothing to
 * be had any more, and that is a cold start. */
KVT_TEST(a_keeper_that_dies_as_we_come)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	struct pollfd p = {.events = POLLIN};
	int status;
	pid_t pid;

	dir_make();
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%.60s/keeper.sock", dir);
	p.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	KVT_EXPECT(!bind(p.fd, (void *)&addr, sizeof(addr)) && !listen(p.fd, 8));
	pid = fork();
	if (!pid) {
		close(p.fd);
		if (start(error)) {
			printf("# %s\n", error);
			_exit(1);
		}
		KVT_EXPECT(kvd.kept.keep.fd >= 0 && !kvd.kept.found);
		KVT_EXPECT_EQ(kvd.kept.keep.nr_started, 1);
		kvd_fini(&kvd);
		_exit(0);
	}
	KVT_EXPECT_EQ(poll(&p, 1, 5000), 1);
	close(p.fd);
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT_EQ(status, 0);
	dir_remove();
}

KVT_MAIN()
