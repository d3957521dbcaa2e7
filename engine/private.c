/* SPDX-License-Identifier: Apache-2.0 */
/*
 * private.c - start and stop a private kvmd (see private.h).
 *
 * The child is made with posix_spawn(): the process may already hold a large model or a
 * GPU context, neither of which should be copied by fork.
 */
#include "engine/private.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/spawn.h"
#include "base/util.h"

#define READY_WAIT_MS	10000
#define STOP_WAIT_MS	5000
#define EXTRA_ARGS_MAX	15
#define PARENT_DIRS_MAX 4

__attribute__((format(printf, 4, 5))) static int fail(int r, char *ret_error,
						      size_t bytes, const char *fmt, ...)
{
	va_list ap;

	if (ret_error && bytes) {
		va_start(ap, fmt);
		vsnprintf(ret_error, bytes, fmt, ap);
		va_end(ap);
	}
	return r;
}

/* Beside this program, or above it: test programs lie in build/tests/<kind>/. */
static int find_kvmd(char *ret_path, size_t bytes)
{
	const char *env = getenv("KV_BUILD");
	char exe[1024];
	ssize_t n;

	if (env) {
		n = snprintf(ret_path, bytes, "%s/kvmd", env);
		return (size_t)n < bytes && !access(ret_path, X_OK) ? 0 : -ENOENT;
	}
	n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
	if (n < 0)
		return -errno;
	exe[n] = 0;
	for (int i = 0; i < PARENT_DIRS_MAX; i++) {
		char *slash = strrchr(exe, '/');

		if (!slash)
			break;
		*slash = 0;
		n = snprintf(ret_path, bytes, "%s/kvmd", exe);
		if ((size_t)n < bytes && !access(ret_path, X_OK))
			return 0;
	}
	return -ENOENT;
}

/* The end of the log is the daemon's own word on why it did not start. */
static void log_tail(const char *path, char *ret, size_t bytes)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = 0;
	off_t size;

	if (fd >= 0) {
		size = lseek(fd, 0, SEEK_END);
		n = pread(fd, ret, bytes - 1,
			  size < (off_t)bytes ? 0 : size - (off_t)bytes + 1);
		close(fd);
	}
	ret[n < 0 ? 0 : n] = 0;
	while (n > 0 && (ret[n - 1] == '\n' || ret[n - 1] == ' '))
		ret[--n] = 0;
}

static int remove_entry(const char *path, const struct stat *st, int type,
			struct FTW *ftw)
{
	remove(path);
	return 0;
}

static void remove_dir(const char *dir)
{
	nftw(dir, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

static int spawn_kvmd(struct eng_private_kvmd *k, const char *path,
		      const char *const *extra, int ready_fd)
{
	const char *argv[9 + EXTRA_ARGS_MAX];
	posix_spawn_file_actions_t actions;
	char fd_text[16];
	int n = 0, r;

	snprintf(fd_text, sizeof(fd_text), "%d", ready_fd);
	argv[n++] = path;
	argv[n++] = "--private";
	argv[n++] = k->dir;
	argv[n++] = "--die-with-parent";
	argv[n++] = "--ready-fd";
	argv[n++] = fd_text;
	argv[n++] = "--backend";
	argv[n++] = "host"; /* unless the caller names another one: the last counts */
	for (int i = 0; extra && extra[i]; i++) {
		if (i == EXTRA_ARGS_MAX)
			return -E2BIG;
		argv[n++] = extra[i];
	}
	argv[n] = NULL;
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, 1, k->log_path,
					 O_WRONLY | O_CREAT | O_APPEND, 0600);
	posix_spawn_file_actions_adddup2(&actions, 1, 2);
	/* dup2 onto itself clears close-on-exec, in the child only */
	posix_spawn_file_actions_adddup2(&actions, ready_fd, ready_fd);
	r = kv_spawn(path, &actions, (char *const *)argv, &k->pid);
	posix_spawn_file_actions_destroy(&actions);
	return r;
}

/* One byte on the pipe: ready. End of file: the daemon is gone. */
static int wait_ready(int fd)
{
	u64 end_ns = kv_now_ns() + READY_WAIT_MS * KV_NSEC_PER_MSEC;

	for (;;) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		u64 now_ns = kv_now_ns();
		char byte;
		int r;

		if (now_ns >= end_ns)
			return -ETIMEDOUT;
		r = poll(&p, 1, (int)((end_ns - now_ns) / KV_NSEC_PER_MSEC) + 1);
		if (r < 0 && errno != EINTR)
			return -errno;
		if (r > 0)
			return read(fd, &byte, 1) == 1 ? 0 : -ECHILD;
	}
}

int eng_private_kvmd_start(const char *const *extra_args,
			   struct eng_private_kvmd *ret_kvmd, char *ret_error,
			   size_t error_bytes)
{
	struct eng_private_kvmd k = {.pid = -1};
	char path[1100], tail[400];
	int fds[2], r;

	r = find_kvmd(path, sizeof(path));
	if (r)
		return fail(r, ret_error, error_bytes,
			    "kvmd not found: not beside this program, not in $KV_BUILD");
	snprintf(k.dir, sizeof(k.dir), "/tmp/kvmd-XXXXXX");
	if (!mkdtemp(k.dir))
		return fail(-errno, ret_error, error_bytes, "mkdtemp %s: %s", k.dir,
			    strerror(errno));
	snprintf(k.socket_path, sizeof(k.socket_path), "%s/kvmd.sock", k.dir);
	snprintf(k.admin_path, sizeof(k.admin_path), "%s/admin.sock", k.dir);
	snprintf(k.log_path, sizeof(k.log_path), "%s/kvmd.log", k.dir);
	if (pipe2(fds, O_CLOEXEC)) {
		r = fail(-errno, ret_error, error_bytes, "pipe: %s", strerror(errno));
		goto remove;
	}
	r = spawn_kvmd(&k, path, extra_args, fds[1]);
	close(fds[1]);
	if (r) {
		fail(r, ret_error, error_bytes, "%s: %s", path, strerror(-r));
		goto close_pipe;
	}
	r = wait_ready(fds[0]);
	if (r) {
		log_tail(k.log_path, tail, sizeof(tail));
		fail(r, ret_error, error_bytes, "kvmd did not start (%s): %s",
		     strerror(-r), tail);
		kill(k.pid, SIGKILL);
		waitpid(k.pid, NULL, 0);
		goto close_pipe;
	}
	close(fds[0]);
	*ret_kvmd = k;
	return 0;
close_pipe:
	close(fds[0]);
remove:
	remove_dir(k.dir);
	return r;
}

int eng_private_kvmd_stop(struct eng_private_kvmd *kvmd)
{
	u64 end_ns = kv_now_ns() + STOP_WAIT_MS * KV_NSEC_PER_MSEC;
	int status = 0;

	if (kvmd->pid <= 0)
		return 0;
	kill(kvmd->pid, SIGTERM);
	while (waitpid(kvmd->pid, &status, WNOHANG) == 0) {
		struct timespec ts = {0, 2000000};

		if (kv_now_ns() > end_ns)
			kill(kvmd->pid, SIGKILL);
		nanosleep(&ts, NULL);
	}
	kvmd->pid = -1;
	remove_dir(kvmd->dir);
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
