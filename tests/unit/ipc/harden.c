/* SPDX-License-Identifier: Apache-2.0 */
/* What kvmd gives up before it opens anything: environment, root, system calls. */
#include "base/util.h"
#include "kvmd/harden.h"

#include <linux/capability.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "tests/kvt.h"

/* Each case is a process of its own, but what is given up is given up for good. */
static void in_child(void (*fn)(void))
{
	int status = 0;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		fn();
		fflush(stdout);
		_exit(0);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	if (status)
		KVT_FAIL("the child ended with %d", status);
}

static void field(const char *name, char *ret, size_t room)
{
	char line[256];
	FILE *f = fopen("/proc/self/status", "r");
	size_t n = strlen(name);

	ret[0] = 0;
	while (f && fgets(line, sizeof(line), f)) {
		if (!strncmp(line, name, n) && line[n] == ':') {
			line[strcspn(line, "\n")] = 0;
			snprintf(ret, room, "%s",
				 line + n + 1 + strspn(line + n + 1, "\t "));
		}
	}
	if (f)
		fclose(f);
}

static void calls_are_denied(void)
{
	struct iovec v = {.iov_base = &v, .iov_len = 1};
	char text[64];

	KVT_EXPECT_EQ(kvd_harden_seccomp(), 0);
	field("Seccomp", text, sizeof(text));
	KVT_EXPECT_STR(text, "2");
	field("NoNewPrivs", text, sizeof(text));
	KVT_EXPECT_STR(text, "1");
	KVT_EXPECT(ptrace(PTRACE_TRACEME, 0, 0, 0) == -1 && errno == EPERM);
	KVT_EXPECT(process_vm_readv(getpid(), &v, 1, &v, 1, 0) == -1 && errno == EPERM);
	KVT_EXPECT(syscall(SYS_pidfd_getfd, 0, 0, 0) == -1 && errno == EPERM);
	KVT_EXPECT(mount("none", "/mnt", "tmpfs", 0, NULL) == -1 && errno == EPERM);
	KVT_EXPECT(syscall(SYS_bpf, 0, NULL, 0) == -1 && errno == EPERM);
	KVT_EXPECT(syscall(SYS_lookup_dcookie, 0, NULL, 0) == -1 && errno == EPERM);
	KVT_EXPECT(socket(AF_INET, SOCK_STREAM, 0) == -1 && errno == EAFNOSUPPORT);
	KVT_EXPECT(socket(AF_INET6, SOCK_DGRAM, 0) == -1 && errno == EAFNOSUPPORT);
	/* what it lives by */
	KVT_EXPECT(socket(AF_UNIX, SOCK_SEQPACKET, 0) >= 0);
	KVT_EXPECT(socket(AF_NETLINK, SOCK_RAW, 0) >= 0);
	KVT_EXPECT(syscall(SYS_io_uring_setup, 4, NULL) == -1 && errno != EAFNOSUPPORT);
	KVT_EXPECT(!access("/proc/self/exe", F_OK));
}

KVT_TEST(system_calls_it_never_makes_are_denied)
{
	in_child(calls_are_denied);
}

static void environment_goes(void)
{
	setenv("CUDA_VISIBLE_DEVICES", "3", 1);
	setenv("KV_CUDA_LIB", "/tmp/evil.so", 1);
	setenv("LD_LIBRARY_PATH", "/tmp", 1);
	setenv("PATH", "/usr/bin", 1);
	setenv("JOURNAL_STREAM", "8:1234", 1); /* or the journal shows errors as news */
	kvd_harden_environment();
	KVT_EXPECT(!getenv("CUDA_VISIBLE_DEVICES"));
	KVT_EXPECT(!getenv("KV_CUDA_LIB"));
	KVT_EXPECT(!getenv("LD_LIBRARY_PATH"));
	KVT_EXPECT_STR(getenv("PATH"), "/usr/bin");
	KVT_EXPECT(getenv("JOURNAL_STREAM"));
}

KVT_TEST(the_callers_environment_steers_nothing)
{
	in_child(environment_goes);
}

static char dir[64];

static void root_goes(void)
{
	struct kvd_harden_paths paths = {
		.state_dir = dir, .socket_path = "/x/s", .admin_path = "/x/a"};
	char error[256] = "", text[64];
	struct stat st;

	if (kvd_harden_user("nobody", &paths, error, sizeof(error)))
		KVT_FAIL("%s", error);
	KVT_EXPECT(getuid() != 0 && geteuid() != 0 && getgid() != 0);
	KVT_EXPECT(setuid(0) == -1 && seteuid(0) == -1);
	KVT_EXPECT_EQ(stat(dir, &st), 0);
	KVT_EXPECT_EQ(st.st_uid, getuid());
	KVT_EXPECT_EQ(st.st_mode & 0777, 0700);
	field("CapEff", text, sizeof(text));
	KVT_EXPECT_EQ(strtoull(text, NULL, 16), 1ull << CAP_KILL | 1ull << CAP_IPC_LOCK);
	field("CapAmb", text, sizeof(text));
	KVT_EXPECT_EQ(strtoull(text, NULL, 16), 1ull << CAP_KILL | 1ull << CAP_IPC_LOCK);
	/* once more, as an upgrade does: it is that user already */
	KVT_EXPECT_EQ(kvd_harden_user("nobody", &paths, error, sizeof(error)), 0);
	KVT_EXPECT_EQ(kvd_harden_user("daemon", &paths, error, sizeof(error)), -EPERM);
	KVT_EXPECT_HAS(error, "only root");
}

KVT_TEST(root_is_given_up_for_good)
{
	struct kvd_harden_paths paths = {
		.state_dir = dir, .socket_path = "/x/s", .admin_path = "/x/a"};
	char error[256] = "";

	if (geteuid())
		KVT_SKIP("only root can give up root");
	snprintf(dir, sizeof(dir), "/tmp/kvt-harden-%d", getpid());
	KVT_EXPECT_EQ(kvd_harden_user("no-such-user", &paths, error, sizeof(error)),
		      -ENOENT);
	KVT_EXPECT_HAS(error, "no-such-user");
	KVT_EXPECT_EQ(kvd_harden_user("root", &paths, error, sizeof(error)), -EPERM);
	in_child(root_goes);
	KVT_EXPECT_EQ(rmdir(dir), 0);
}

/* Other names of /run: it stays root's, and so does what lies there already. */
static void run_stays(void)
{
	static const char *const names[] = {
		"/run//s", "/run/./s",		 "/run/x/../s",
		"/run/s",  "/run/x/../../run/s", "/run/../run//s"};
	char error[256] = "";
	struct stat st;

	/* a /run of this process's own */
	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("tmpfs", "/run", "tmpfs", 0, "mode=0755") || mkdir("/run/x", 0755))
		return;
	for (u32 i = 0; i < KV_ARRAY_SIZE(names); i++) {
		struct kvd_harden_paths paths = {.state_dir = dir,
						 .socket_path = names[i],
						 .admin_path = "/run/kvmd/a"};
		int status;
		pid_t pid = fork();

		if (!pid)
			_exit(kvd_harden_user("nobody", &paths, error, sizeof(error)) !=
			      0);
		KVT_EXPECT(waitpid(pid, &status, 0) == pid && !status);
		KVT_EXPECT(!stat("/run", &st) && st.st_uid == 0);
		KVT_EXPECT(!stat("/run/x", &st) && st.st_uid == 0);
		KVT_EXPECT(!stat("/run/kvmd", &st) && st.st_uid != 0);
	}
}

KVT_TEST(run_is_not_given_away_by_another_name)
{
	if (geteuid())
		KVT_SKIP("only root can give up root");
	snprintf(dir, sizeof(dir), "/tmp/kvt-harden-%d", getpid());
	in_child(run_stays);
	rmdir(dir);
}

KVT_MAIN()
