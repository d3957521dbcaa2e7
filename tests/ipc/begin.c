/* SPDX-License-Identifier: Apache-2.0 */
/* How kvmd begins: what its caller gave it, and what it was not given. */
#include "tests/ipc/common.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char base[64];

static void base_make(void)
{
	strcpy(base, "/tmp/kvmd-begin-XXXXXX");
	KVT_EXPECT(mkdtemp(base) && !chmod(base, 0777));
}

static void base_remove(void)
{
	char command[96];

	snprintf(command, sizeof(command), "rm -rf %s", base);
	KVT_EXPECT_EQ(system(command), 0);
}

/**
 * struct begun - a kvmd that was started
 * @ready: readable when it serves, or is gone
 * @err: its stderr; -1 it has none
 */
struct begun {
	pid_t pid;
	int ready, err;
};

/* @closed: a bit for each of 0, 1 and 2 */
static void begin(struct begun *b, u32 closed, const char *const *args)
{
	const char *all[24] = {NULL};
	char path[1200], ready[16];
	int up[2], err[2], kept, n = 0;

	ipc_build_path("kvmd", path, sizeof(path));
	KVT_EXPECT(!pipe2(up, O_CLOEXEC) && !pipe2(err, O_CLOEXEC));
	kept = fcntl(up[1], F_DUPFD, 20); /* over exec */
	close(up[1]);
	snprintf(ready, sizeof(ready), "%d", kept);
	all[n++] = path;
	all[n++] = "--ready-fd";
	all[n++] = ready;
	while (*args)
		all[n++] = *args++;
	b->pid = fork();
	if (b->pid == 0) {
		dup2(err[1], 2);
		for (int fd = 0; fd < 3; fd++)
			if (closed & 1u << fd)
				close(fd);
		execv(path, (char *const *)all);
		_exit(127);
	}
	close(kept);
	close(err[1]);
	b->ready = up[0];
	b->err = err[0];
}

static bool serves(struct begun *b)
{
	char byte;

	return read(b->ready, &byte, 1) == 1;
}

/* Return: its exit status; @text: what it said */
static int end(struct begun *b, char *text, size_t room)
{
	size_t at = 0;
	int status;
	ssize_t n;

	kill(b->pid, SIGTERM);
	while (at < room - 1 && (n = read(b->err, text + at, room - 1 - at)) > 0)
		at += (size_t)n;
	text[at] = 0;
	KVT_EXPECT_EQ(waitpid(b->pid, &status, 0), b->pid);
	close(b->ready);
	close(b->err);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* A launcher that closed what it has: any of stdin, stdout and stderr. */
KVT_TEST_T(any_of_the_standard_descriptors_is_closed, 60)
{
	char dir[96], text[4096];
	const char *args[] = {"--private",    dir,     "--keeper", "--die-with-parent",
			      "--host-bytes", "16MiB", NULL};
	struct begun b;

	base_make();
	for (u32 closed = 1; closed < 8; closed++) {
		snprintf(dir, sizeof(dir), "%s/%u", base, closed);
		begin(&b, closed, args);
		if (!serves(&b))
			KVT_FAIL("closed %u: it does not serve", closed);
		KVT_EXPECT_EQ(end(&b, text, sizeof(text)), 0);
	}
	base_remove();
}

static bool is_socket(const char *dir, const char *name)
{
	char path[256];
	struct stat st;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return !stat(path, &st) && S_ISSOCK(st.st_mode);
}

/* Its sockets lie in the directory that was named, or it says that they do not fit. */
KVT_TEST_T(private_directory_of_any_length, 60)
{
	char dir[160], text[4096];
	const char *args[] = {"--private",    dir,     "--keeper", "--die-with-parent",
			      "--host-bytes", "16MiB", NULL};
	u32 served = 0, refused = 0;
	struct begun b;

	base_make();
	for (size_t bytes = 88; bytes <= 100; bytes++) {
		snprintf(dir, sizeof(dir), "%s/", base);
		memset(dir + strlen(base) + 1, 'd', bytes - strlen(base) - 1);
		dir[bytes] = 0;
		begin(&b, 0, args);
		if (serves(&b)) {
			if (!is_socket(dir, "kvmd.sock") ||
			    !is_socket(dir, "admin.sock") ||
			    !is_socket(dir, "keeper.sock"))
				KVT_FAIL("%zu bytes: the sockets are elsewhere", bytes);
			KVT_EXPECT_EQ(refused, 0);
			KVT_EXPECT_EQ(end(&b, text, sizeof(text)), 0);
			served++;
			continue;
		}
		KVT_EXPECT_EQ(end(&b, text, sizeof(text)), 2);
		KVT_EXPECT_HAS(text, "too long for a socket path");
		refused++;
	}
	KVT_EXPECT_EQ(served,
		      8); /* 95 + "/keeper.sock" + 0 is what a socket's name takes */
	KVT_EXPECT_EQ(refused, 5);
	base_remove();
}

/* A launcher that dies: kvmd ends with it, whoever it has become meanwhile. */
static void dies_with_its_parent(const char *const *args)
{
	struct pollfd p = {.events = POLLIN};
	int told[2], alive[2];
	struct begun b;
	pid_t launcher, pid = 0;
	char byte;

	KVT_EXPECT(!pipe2(told, O_CLOEXEC) && !pipe(alive));
	launcher = fork();
	if (launcher == 0) {
		close(alive[0]);
		begin(&b, 0, args);
		if (serves(&b) && write(told[1], &b.pid, sizeof(b.pid)) > 0)
			pause();
		_exit(1);
	}
	close(told[1]);
	close(alive[1]); /* the launcher and kvmd have it */
	KVT_EXPECT_EQ(read(told[0], &pid, sizeof(pid)), sizeof(pid));
	KVT_EXPECT(!kill(launcher, SIGKILL) && waitpid(launcher, NULL, 0) == launcher);
	p.fd = alive[0];
	if (poll(&p, 1, 20000) != 1) {
		kill(pid, SIGKILL);
		KVT_FAIL("kvmd outlives its parent");
	}
	KVT_EXPECT_EQ(read(alive[0], &byte, 1), 0);
	close(told[0]);
	close(alive[0]);
}

KVT_TEST_T(ends_with_its_parent_as_any_user, 60)
{
	char sock[96], admin[96], state[96];
	const char *as_it_is[] = {
		"--socket", sock,	   "--admin-socket", admin,   "--state-dir",
		state,	    "--no-keeper", "--host-bytes",   "16MiB", "--die-with-parent",
		NULL};
	const char *as_nobody[] = {"--socket",
				   sock,
				   "--admin-socket",
				   admin,
				   "--state-dir",
				   state,
				   "--no-keeper",
				   "--host-bytes",
				   "16MiB",
				   "--die-with-parent",
				   "--user",
				   "nobody",
				   NULL};

	base_make();
	snprintf(sock, sizeof(sock), "%s/s", base);
	snprintf(admin, sizeof(admin), "%s/a", base);
	snprintf(state, sizeof(state), "%s/state", base);
	dies_with_its_parent(as_it_is);
	base_remove();
	if (geteuid())
		KVT_SKIP("only root can become another user");
	base_make();
	snprintf(sock, sizeof(sock), "%s/s", base);
	snprintf(admin, sizeof(admin), "%s/a", base);
	snprintf(state, sizeof(state), "%s/state", base);
	dies_with_its_parent(as_nobody);
	base_remove();
}

KVT_MAIN()
