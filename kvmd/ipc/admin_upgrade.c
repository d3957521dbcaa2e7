/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/admin_upgrade.c - the program that is installed now takes over from this one.
 *
 * After exec() there is no way back: a file that does not run would leave engines with a
 * keeper and no kvmd. So it has to say its version first, in a child. Loop thread only; the
 * loop waits for that child.
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

#define RUN_MS_MAX 2000u /* a version takes some ms */

/* Return: the child's pid; -errno, nothing was started */
static pid_t version_start(const char *program)
{
	char *argv[] = {(char *)(uintptr_t)program, "--version", NULL};
	posix_spawn_file_actions_t actions;
	pid_t pid = 0;
	int r;

	r = -posix_spawn_file_actions_init(&actions);
	if (r)
		return r;
	r = -posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
	if (!r)
		r = -posix_spawn_file_actions_adddup2(&actions, 1, 2);
	if (!r)
		r = kv_spawn(program, &actions, argv, &pid);
	posix_spawn_file_actions_destroy(&actions);
	return r ? r : pid;
}

/* Return: 0; -ETIMEDOUT it was killed; -ENOEXEC it ended with another status */
static int version_wait(pid_t pid)
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

static int program_runs(struct kvd_admin_call *call, const char *program)
{
	pid_t pid = version_start(program);
	int r = pid < 0 ? (int)pid : version_wait(pid);

	if (r)
		return kvd_admin_fail(
			call, -ENOEXEC, "upgrade: \"%.150s --version\": %s", program,
			r == -ENOEXEC && pid > 0 ? "it does not end well" : strerror(-r));
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
