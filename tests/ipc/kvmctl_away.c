/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmctl while kvmd is away and its keeper holds the socket on which commands come in: it is not
 * running (3), which is something else than that it does not answer (124); and one that comes back in
 * time answers.
 */
#include "tests/ipc/restart.h"

static char out[4096];

/* kvmctl in a process of its own, which starts at once. */
static FILE *ctl_start(const char *args)
{
	char path[1200], command[1500];
	FILE *in;

	ipc_build_path("kvmctl", path, sizeof(path));
	snprintf(command, sizeof(command), "exec %s --socket %s %s 2>&1", path,
		 kvmd.admin_path, args);
	in = popen(command, "r");
	KVT_EXPECT(in);
	return in;
}

static int ctl_wait(FILE *in)
{
	size_t used = fread(out, 1, sizeof(out) - 1, in);
	int status = pclose(in);

	out[used] = 0;
	KVT_EXPECT(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static int ctl(const char *args)
{
	return ctl_wait(ctl_start(args));
}

static void keeper_alone(void)
{
	kill_kvmd();
	KVT_EXPECT(ipc_keeper_pid() > 0);
}

KVT_TEST(with_the_keeper_alone_it_is_3)
{
	start();
	KVT_EXPECT_EQ(ctl("version"), 0);
	keeper_alone();
	KVT_EXPECT_EQ(ctl("ps --timeout 0.3"), 3);
	KVT_EXPECT_HAS(out, "not running");
	KVT_EXPECT_HAS(out, kvmd.admin_path);
	KVT_EXPECT_EQ(ctl("events --timeout 0.3"), 3);
	again();
	KVT_EXPECT_EQ(ctl("version"), 0);
	ipc_stop(&kvmd);
}

KVT_TEST(one_that_hangs_is_124)
{
	start();
	kill(kvmd.pid, SIGSTOP);
	KVT_EXPECT_EQ(ctl("ps --timeout 0.3"), 124);
	kill(kvmd.pid, SIGCONT);
	/* the next one, which serves the sockets of the first */
	keeper_alone();
	again();
	kill(kvmd.pid, SIGSTOP);
	KVT_EXPECT_EQ(ctl("ps --timeout 0.3"), 124);
	kill(kvmd.pid, SIGCONT);
	free(ipc_admin(&kvmd, "{\"op\":\"upgrade\"}"));
	expect_within(log_has("adopted"), 2000);
	KVT_EXPECT_EQ(ctl("version"), 0);
	kill(kvmd.pid, SIGSTOP);
	KVT_EXPECT_EQ(ctl("ps --timeout 0.3"), 124);
	kill(kvmd.pid, SIGCONT);
	ipc_stop(&kvmd);
}

KVT_TEST(a_restart_is_waited_for)
{
	FILE *waits;

	start();
	keeper_alone();
	waits = ctl_start("version");
	usleep(300000);
	again();
	KVT_EXPECT_EQ(ctl_wait(waits), 0);
	ipc_stop(&kvmd);
}

/* 3 says that nothing was done: nor is it later, by the next one, which finds the command waiting. */
KVT_TEST(what_was_given_up_is_not_done_later)
{
	start();
	keeper_alone();
	KVT_EXPECT_EQ(ctl("drain default --yes --timeout 0.3"), 3);
	again();
	KVT_EXPECT_EQ(ctl("tenant default --json"), 0);
	KVT_EXPECT_HAS(out, "\"draining\":false");
	/* the same where one hangs for a while */
	kill(kvmd.pid, SIGSTOP);
	KVT_EXPECT_EQ(ctl("drain default --yes --timeout 0.3"), 124);
	kill(kvmd.pid, SIGCONT);
	KVT_EXPECT_EQ(ctl("tenant default --json"), 0);
	KVT_EXPECT_HAS(out, "\"draining\":false");
	ipc_stop(&kvmd);
}

/* A link to the socket: the lock is beside what it leads to. */
KVT_TEST(through_a_link_it_is_3_as_well)
{
	char args[200], path[100];

	start();
	snprintf(path, sizeof(path), "%s/link", kvmd.dir);
	KVT_EXPECT(!symlink(kvmd.admin_path, path));
	snprintf(args, sizeof(args), "ps --timeout 0.3 --socket %s", path);
	KVT_EXPECT_EQ(ctl(args), 0);
	keeper_alone();
	KVT_EXPECT_EQ(ctl(args), 3);
	again();
	ipc_stop(&kvmd);
}

/* So many have asked and given up that nobody gets into its queue any more. */
KVT_TEST(with_a_full_queue_it_is_3)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fds[200], nr = 0;

	start();
	keeper_alone();
	strcpy(addr.sun_path, kvmd.admin_path);
	do {
		fds[nr] = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	} while (!connect(fds[nr], (struct sockaddr *)&addr, sizeof(addr)) && ++nr < 200);
	KVT_EXPECT(nr < 200);
	KVT_EXPECT_EQ(errno, EAGAIN);
	while (nr >= 0)
		close(fds[nr--]);
	KVT_EXPECT_EQ(ctl("ps --timeout 0.3"), 3);
	again();
	expect_within(ctl("version") == 0, 5000);
	ipc_stop(&kvmd);
}

KVT_MAIN()
