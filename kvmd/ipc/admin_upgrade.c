/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/admin_upgrade.c - the program that is installed now takes over from this one.
 *
 * After exec() there is no way back: a file that does not run, or that refuses options or policy,
 * would leave engines with a keeper and no kvmd. So it has to say its version first, then what it
 * thinks of both, each time in a child; and this kvmd adds what the new one cannot know before it
 * serves. Loop thread only; the loop waits for the children.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "base/spawn.h"
#include "kvmd/ipc/admin_priv.h"

#define RUN_MS_MAX 2000u /* each takes some ms */
#define ARGS_MAX   64u
#define SAID_BYTES 200u

/* What it says comes out of @out. Return: the child's pid; -errno, nothing was started */
static pid_t child_start(const char *program, char *const *argv, int out)
{
	posix_spawn_file_actions_t actions;
	pid_t pid = 0;
	int r;

	r = -posix_spawn_file_actions_init(&actions);
	if (r)
		return r;
	r = -posix_spawn_file_actions_adddup2(&actions, out, 1);
	if (!r)
		r = -posix_spawn_file_actions_adddup2(&actions, out, 2);
	if (!r)
		r = kv_spawn(program, &actions, argv, &pid);
	posix_spawn_file_actions_destroy(&actions);
	return r ? r : pid;
}

/* Return: 0; -ETIMEDOUT it was killed; -ENOEXEC it ended with another status */
static int child_wait(pid_t pid)
{
	u64 end_ns = kv_now_ns() + RUN_MS_MAX * KV_NSEC_PER_MSEC;
	int status = 0;

	while (waitpid(pid, &status, WNOHANG) == 0) {
		struct timespec ts = {0, 1000000};

		if (kv_now_ns() > end_ns) {
			kill(pid, SIGKILL);
			waitpid(pid, NULL, 0);
			return -ETIMEDOUT;
		}
		nanosleep(&ts, NULL);
	}
	return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -ENOEXEC;
}

/* The first line, of an unknown program: only what can be read. It may have children that live. */
static void child_said(int fd, char *said)
{
	ssize_t n = read(fd, said, SAID_BYTES - 1);
	char *c;

	said[n > 0 ? n : 0] = 0;
	for (c = said; *c && *c != '\n'; c++)
		if (*c < ' ' || *c > '~')
			*c = '?';
	*c = 0;
}

/* Return: 0 it ended well; -ENOEXEC, @said says why not. */
static int child_run(const char *program, char *const *argv, char *said)
{
	int out[2], r;
	pid_t pid;

	said[0] = 0;
	if (pipe2(out, O_CLOEXEC)) {
		strcpy(said, strerror(errno));
		return -ENOEXEC;
	}
	fcntl(out[0], F_SETFL, O_NONBLOCK);
	pid = child_start(program, argv, out[1]);
	close(out[1]);
	r = pid < 0 ? (int)pid : child_wait(pid);
	if (r == -ENOEXEC && pid > 0)
		child_said(out[0], said);
	close(out[0]);
	if (!said[0])
		strcpy(said, pid < 0	       ? strerror(-r)
			     : r == -ETIMEDOUT ? "no end within 2 s"
					       : "it does not end well");
	return r ? -ENOEXEC : 0;
}

static int program_runs(struct kvd_admin_call *call, const char *program)
{
	char *argv[] = {(char *)(uintptr_t)program, "--version", NULL};
	char said[SAID_BYTES];

	if (!child_run(program, argv, said))
		return 0;
	return kvd_admin_fail(call, -ENOEXEC, "upgrade: \"%.100s --version\": %.100s",
			      program, said);
}

/* With the arguments of this process, as main() will execute it. The new one goes before them: a "--"
 * among them ends the options. */
static int policy_passes(struct kvd_admin_call *call, const struct kvd_options *opt)
{
	char *argv[ARGS_MAX + 2], said[SAID_BYTES], error[KVD_CONFIG_ERROR_BYTES];
	u32 n;

	argv[0] = opt->argv[0];
	argv[1] = "--check-policy";
	for (n = 1; opt->argv[n] && n < ARGS_MAX; n++)
		argv[n + 1] = opt->argv[n];
	argv[n + 1] = NULL;
	if (opt->argv[n])
		return kvd_admin_fail(call, -E2BIG, "upgrade: more than %u arguments",
				      ARGS_MAX);
	if (child_run(opt->program, argv, said))
		return kvd_admin_fail(call, -ENOEXEC, "upgrade: it would not start: %s",
				      said);
	if (kvd_try_next(call->kvd, error))
		return kvd_admin_fail(call, -ENOEXEC,
				      "upgrade: it would not start: %.200s", error);
	return 0;
}

/* Ends this turn; main() executes the program again, which adopts from the keeper. */
int kvd_admin_upgrade(struct kvd_admin_call *call)
{
	bool dry_run = kvd_admin_dry_run(call);
	struct kvd *kvd = call->kvd;
	int r;

	if (!kvd->kept.image)
		return kvd_admin_fail(call, -EOPNOTSUPP,
				      "upgrade: started without a keeper");
	if (kvd->opt.program && !KV_MUTANT(upgrade_untried)) {
		r = program_runs(call, kvd->opt.program);
		if (!r && !KV_MUTANT(upgrade_policy_untried))
			r = policy_passes(call, &kvd->opt);
		if (r)
			return r;
	}
	cJSON_AddBoolToObject(call->out, "dry_run", dry_run);
	if (!dry_run) {
		kvd->upgrade = true;
		kvd->stop = true;
	}
	kvd_admin_hex(call->out, "table_epoch", kvd->table_epoch);
	return 0;
}
