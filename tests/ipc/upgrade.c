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

static char dir[] = "/tmp/kvmd-upgrade-XXXXXX", program[64], policy[64], copy_it[1400];
static char *built;

/* A copy of kvmd that can be exchanged, and a place for a policy. */
static void program_place(void)
{
	char from[1200];

	built = getenv("KV_BUILD");
	KVT_EXPECT(mkdtemp(dir));
	ipc_build_path("kvmd", from, sizeof(from));
	snprintf(program, sizeof(program), "%s/kvmd", dir);
	snprintf(policy, sizeof(policy), "%s/kvmd.json", dir);
	snprintf(copy_it, sizeof(copy_it), "cp -f %s %s", from, program);
	KVT_EXPECT_EQ(system(copy_it), 0);
	setenv("KV_BUILD", dir, 1);
}

static void program_remove(void)
{
	built ? setenv("KV_BUILD", built, 1) : unsetenv("KV_BUILD");
	unlink(program);
	unlink(policy);
	rmdir(dir);
}

static void expect_answer(const char *request, const char *part)
{
	char *answer = ipc_admin(&kvmd, request);

	KVT_EXPECT_HAS(answer, part);
	free(answer);
}

/* With and without a dry run it is refused for this reason, and kvmd serves on. */
static void expect_refused(const char *why)
{
	expect_answer("{\"op\":\"upgrade\",\"dry_run\":true}", why);
	expect_answer("{\"op\":\"upgrade\"}", why);
	usleep(50000);
	expect_answer("{\"op\":\"upgrade\"}", "\"ok\":false");
	KVT_EXPECT_EQ(waitpid(kvmd.pid, NULL, WNOHANG), 0);
	KVT_EXPECT(!log_has("adopted"));
}

/* A file that does not run in place of the program: kvmd stays, and says so. @children_ignored:
 * as a launcher leaves it that does not care for its children. */
static void refused(bool children_ignored)
{
	static const char *const junk[] = {"", "#!/bin/sh\nexit 3\n", "no program"};

	program_place();
	signal(SIGCHLD, children_ignored ? SIG_IGN : SIG_DFL);
	start();
	signal(SIGCHLD, SIG_DFL);
	for (u32 i = 0; i <= KV_ARRAY_SIZE(junk); i++) {
		if (i < KV_ARRAY_SIZE(junk))
			file_write(program, junk[i]);
		else
			unlink(program);
		expect_answer("{\"op\":\"upgrade\"}", "--version");
	}
	KVT_EXPECT_EQ(waitpid(kvmd.pid, NULL, WNOHANG), 0);
	KVT_EXPECT_EQ(system(copy_it), 0);
	free(ipc_admin(&kvmd, "{\"op\":\"upgrade\"}"));
	usleep(300000);
	ipc_stop(&kvmd);
	program_remove();
}

KVT_TEST(upgrade_to_what_does_not_run_is_refused)
{
	refused(false);
}

KVT_TEST(upgrade_is_tried_also_where_children_are_ignored)
{
	refused(true);
}

/* ----------------------------------------------------------- it runs, and would not start */

#define TENANTS \
	"\"tenants\": [{\"name\": \"red\", \"uids\": [0], \"gpus\": [{\"gpu\": \"*\", \"max\": "

static void start_with_policy_and(const char *more, const char *value)
{
	const char *args[] = {"--keeper", "--backend", "host", "--config",
			      policy,	  more,	       value,  NULL};
	char error[512];

	file_write(policy, "{\"host_bytes\": \"64MiB\", " TENANTS "\"32MiB\"}]}]}");
	if (eng_private_kvmd_start(args, &kvmd, error, sizeof(error)))
		KVT_FAIL("%s", error);
}

static void start_with_policy(void)
{
	start_with_policy_and(NULL, NULL);
}

/* The file was changed since kvmd read it; what is wrong with it is said with its place. */
KVT_TEST(upgrade_with_a_policy_that_is_refused)
{
	static const struct {
		const char *text, *why;
	} bad[] = {
		{"{\n\"tenants\": [,]}", "line 2"},
		{"{\"tenants\": [], \"no_such\": 1}", "no_such"},
		{"{" TENANTS "\"lots\"}]}]}", "tenants[0].gpus[0].max"},
		{"{" TENANTS
		 "\"1GiB\"}]}], \"tiers\": {\"dram\": {\"size\": \"999TiB\"}}}",
		 "tiers.dram.size"},
		/* what only the one that serves can know */
		{"{\"host_bytes\": \"64MiB\", " TENANTS
		 "\"1GiB\", \"min\": \"128MiB\"}]}]}",
		 "min add up to"},
		{"{\"host_bytes\": \"32MiB\", " TENANTS
		 "\"1GiB\", \"min\": \"48MiB\"}]}]}",
		 "min add up to"},
		{"{" TENANTS "\"1GiB\"}]}], \"domains\": [{\"name\": \"other\", "
		 "\"tenants\": [\"red\"]}]}",
		 "cannot move"},
	};

	program_place();
	start_with_policy();
	for (u32 i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		file_write(policy, bad[i].text);
		expect_refused(bad[i].why);
	}
	unlink(policy);
	expect_refused("No such file");
	/* a larger host, and a min that fits there */
	file_write(policy, "{\"host_bytes\": \"256MiB\", " TENANTS
			   "\"1GiB\", \"min\": \"128MiB\"}]}]}");
	expect_answer("{\"op\":\"upgrade\",\"dry_run\":true}", "\"ok\":true");
	expect_answer("{\"op\":\"upgrade\"}", "\"ok\":true");
	expect_within(log_has("adopted"), 2000);
	expect_answer("{\"op\":\"status\"}", "\"capacity_bytes\":268435456");
	ipc_stop(&kvmd);
	program_remove();
}

/* Tenants @from .. @to - 1 in one domain. */
static void write_domain(u32 from, u32 to)
{
	FILE *f = fopen(policy, "w");

	KVT_EXPECT(f);
	fprintf(f, "{\"host_bytes\": \"64MiB\", \"domains\": [{\"name\": \"all\", "
		   "\"tenants\": [");
	for (u32 i = from; i < to; i++)
		fprintf(f, "%s\"t%u\"", i > from ? ", " : "", i);
	fprintf(f, "]}], \"tenants\": [");
	for (u32 i = from; i < to; i++)
		fprintf(f,
			"%s{\"name\": \"t%u\", \"uids\": [%u], \"gpus\": [{\"gpu\": \"*\", "
			"\"max\": \"8MiB\"}]}",
			i > from ? ", " : "", i, 70000 + i);
	fprintf(f, "]}");
	fclose(f);
}

/* As many as there can be in a domain: who leaves the policy makes room, but not before. */
KVT_TEST(upgrade_needs_room_for_those_who_leave)
{
	const char *args[] = {"--keeper", "--backend", "host", "--config", policy, NULL};
	char error[512];

	program_place();
	write_domain(0, 32);
	if (eng_private_kvmd_start(args, &kvmd, error, sizeof(error)))
		KVT_FAIL("%s", error);
	write_domain(1, 33);
	expect_refused("33 with those that leave");
	expect_answer("{\"op\":\"reload\",\"dry_run\":true}", "33 with those");
	expect_answer("{\"op\":\"reload\"}", "33 with those");
	write_domain(1, 32);
	expect_answer("{\"op\":\"reload\"}", "\"ok\":true");
	write_domain(1, 33);
	expect_answer("{\"op\":\"upgrade\"}", "\"ok\":true");
	expect_within(log_has("adopted"), 2000);
	ipc_stop(&kvmd);
	program_remove();
}

/* The command line's size goes before the file's, also where they were the same by chance. */
KVT_TEST(upgrade_knows_whose_size_is_in_use)
{
	program_place();
	start_with_policy_and("--host-bytes", "64MiB");
	file_write(policy, "{\"host_bytes\": \"256MiB\", " TENANTS
			   "\"1GiB\", \"min\": \"128MiB\"}]}]}");
	expect_refused("min add up to");
	file_write(policy, "{\"host_bytes\": \"256MiB\", " TENANTS "\"1GiB\"}]}]}");
	expect_answer("{\"op\":\"upgrade\"}", "\"ok\":true");
	expect_within(log_has("adopted"), 2000);
	ipc_stop(&kvmd);
	program_remove();
}

/* "--" ends the options: what is added behind it would be none. */
KVT_TEST(upgrade_of_a_command_line_with_an_end)
{
	program_place();
	start_with_policy_and("--", NULL);
	expect_answer("{\"op\":\"upgrade\"}", "\"ok\":true");
	expect_within(log_has("adopted"), 2000);
	ipc_stop(&kvmd);
	program_remove();
}

/* Another program: it says its version, but takes no option of these, or never ends. */
KVT_TEST(upgrade_to_what_refuses_the_options)
{
	static const char refuses[] =
		"#!/bin/sh\n[ \"$1\" = --version ] && exit 0\n"
		"echo \"kvmd: unrecognized option '$7'\" >&2\nexit 2\n";
	static const char silent[] = "#!/bin/sh\n[ \"$1\" = --version ]\n";
	static const char hangs[] = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\n"
				    "exec sleep 60\n";
	static const char floods[] = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\n"
				     "exec cat /dev/zero\n";

	program_place();
	start_with_policy();
	file_write(program, refuses);
	expect_refused("unrecognized option '--backend'");
	file_write(program, silent);
	expect_refused("does not end well");
	file_write(program, hangs);
	expect_answer("{\"op\":\"upgrade\"}", "within 2 s");
	file_write(program, floods);
	expect_answer("{\"op\":\"upgrade\"}", "within 2 s");
	unlink(program);
	KVT_EXPECT_EQ(system(copy_it), 0);
	expect_answer("{\"op\":\"upgrade\"}", "\"ok\":true");
	expect_within(log_has("adopted"), 2000);
	ipc_stop(&kvmd);
	program_remove();
}

static void exec_kvmd(const char *a, const char *b, const char *c, const char *d)
{
	char path[1200];
	int null = open("/dev/null", O_WRONLY);

	dup2(null, 2);
	ipc_build_path("kvmd", path, sizeof(path));
	execl(path, path, "--config", policy, a, b, c, d, NULL);
	_exit(127);
}

static int check_with(const char *a, const char *b, const char *c)
{
	pid_t pid = fork();

	if (!pid)
		exec_kvmd("--check-policy", a, b, c);
	return ipc_wait(pid);
}

static int check_policy(const char *arg)
{
	return check_with("--state-dir", "/nonexistent/state", arg);
}

/* By hand, without a kvmd: it opens and makes nothing. */
KVT_TEST(policy_is_checked_without_a_start)
{
	char made[64];

	program_place();
	file_write(policy, "{" TENANTS "\"1GiB\"}]}]}");
	KVT_EXPECT_EQ(check_policy(NULL), 0);
	KVT_EXPECT_EQ(check_policy("--backend=cuda-legacy"), 0);
	KVT_EXPECT_EQ(check_policy("--no-such-option"), 2);
	KVT_EXPECT_EQ(check_policy("--faults=no_such_point"), 1);
	snprintf(made, sizeof(made), "%s/private", dir);
	KVT_EXPECT_EQ(check_with("--private", made, NULL), 0);
	KVT_EXPECT_EQ(access(made, F_OK), -1);
	file_write(policy, "{" TENANTS "\"1GiB\"}]}, {\"name\": \"blue\", \"uids\": [1], "
			   "\"gpus\": []}]}");
	KVT_EXPECT_EQ(check_policy(NULL), 0);
	KVT_EXPECT_EQ(check_policy("--backend=cuda-legacy"), 1); /* two domains */
	file_write(policy, "{" TENANTS "1}");
	KVT_EXPECT_EQ(check_policy(NULL), 1);
	program_remove();
}

/* It is read as the user that kvmd would be, and nothing becomes that user's. */
KVT_TEST(policy_is_checked_as_the_user)
{
	char state[64];
	struct stat st;

	program_place();
	KVT_EXPECT(!chmod(dir, 0755));
	file_write(policy, "{" TENANTS "\"1GiB\"}]}]}");
	KVT_EXPECT_EQ(check_with("--user", "no such user", NULL), 1);
	KVT_EXPECT_EQ(check_with("--user=nobody", "--private", "/nonexistent"), 1);
	if (!geteuid()) {
		snprintf(state, sizeof(state), "--state-dir=%s", dir);
		KVT_EXPECT(!chmod(policy, 0644));
		KVT_EXPECT_EQ(check_with("--user", "nobody", state), 0);
		KVT_EXPECT(!stat(dir, &st) && st.st_uid == 0);
		KVT_EXPECT(!chmod(policy, 0600));
		KVT_EXPECT_EQ(check_with("--user", "nobody", state), 1);
	}
	program_remove();
}

/* systemd starts it again at once: it takes a second. */
KVT_TEST(refused_start_under_systemd_takes_a_second)
{
	char pid[16];
	u64 began_ns;
	pid_t child;

	program_place();
	file_write(policy, "{" TENANTS "1}");
	began_ns = kv_now_ns();
	child = fork();
	if (!child) {
		snprintf(pid, sizeof(pid), "%d", (int)getpid());
		setenv("SYSTEMD_EXEC_PID", pid, 1);
		exec_kvmd("--private", dir, NULL, NULL);
	}
	KVT_EXPECT_EQ(ipc_wait(child), 1);
	KVT_EXPECT(kv_now_ns() - began_ns >= KV_NSEC_PER_SEC);
	program_remove();
}

KVT_MAIN()
