/* SPDX-License-Identifier: Apache-2.0 */
/* kvmctl upgrade when something else than a kvmd is installed. (restart.c: when all is well.) */
#include "tests/ipc/restart.h"

#include <signal.h>

static void file_write(const char *path, const char *text)
{
	FILE *f;

	unlink(path);
	f = fopen(path, "w");
	KVT_EXPECT(f && fputs(text, f) >= 0 && !fchmod(fileno(f), 0755));
	fclose(f);
}

/* A file that does not run in place of the program: kvmd stays, and says so. @children_ignored:
 * as a launcher leaves it that does not care for its children. */
static void refused(bool children_ignored)
{
	char from[1200], dir[] = "/tmp/kvmd-upgrade-XXXXXX", path[64], command[1400];
	const char *built = getenv("KV_BUILD");
	static const char *const junk[] = {"", "#!/bin/sh\nexit 3\n", "no program"};
	char *answer;

	KVT_EXPECT(mkdtemp(dir));
	ipc_build_path("kvmd", from, sizeof(from));
	snprintf(path, sizeof(path), "%s/kvmd", dir);
	snprintf(command, sizeof(command), "cp %s %s", from, path);
	KVT_EXPECT_EQ(system(command), 0);
	setenv("KV_BUILD", dir, 1);
	signal(SIGCHLD, children_ignored ? SIG_IGN : SIG_DFL);
	start();
	signal(SIGCHLD, SIG_DFL);
	for (u32 i = 0; i <= KV_ARRAY_SIZE(junk); i++) {
		if (i < KV_ARRAY_SIZE(junk))
			file_write(path, junk[i]);
		else
			unlink(path);
		answer = ipc_admin(&kvmd, "{\"op\":\"upgrade\"}");
		KVT_EXPECT_HAS(answer, "--version");
		free(answer);
	}
	KVT_EXPECT_EQ(waitpid(kvmd.pid, NULL, WNOHANG), 0);
	KVT_EXPECT_EQ(system(command), 0);
	free(ipc_admin(&kvmd, "{\"op\":\"upgrade\"}"));
	usleep(300000);
	ipc_stop(&kvmd);
	built ? setenv("KV_BUILD", built, 1) : unsetenv("KV_BUILD");
	unlink(path);
	rmdir(dir);
}

KVT_TEST(upgrade_to_what_does_not_run_is_refused)
{
	refused(false);
}

KVT_TEST(upgrade_is_tried_also_where_children_are_ignored)
{
	refused(true);
}

KVT_MAIN()
