/* SPDX-License-Identifier: Apache-2.0 */
/* host.c - attacks around kvmd: its process, files, sockets, and its place on the host. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "tests/hostile/hostile.h"

static bool can_connect(const char *path)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bool ok;

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	ok = !connect(s, (struct sockaddr *)&addr, sizeof(addr));
	close(s);
	return ok;
}

static void admin_socket(const struct scene *sc)
{
	become(ATTACKER_UID);
	KVT_EXPECT(!can_connect(sc->d.admin_path));
}

static void keeper_socket(const struct scene *sc)
{
	char path[128];

	become(ATTACKER_UID);
	snprintf(path, sizeof(path), "%s/state/keeper.sock", sc->dir);
	KVT_EXPECT(!can_connect(path));
	KVT_EXPECT(open(path, O_RDWR) == -1);
}

static void state_directory(const struct scene *sc)
{
	char path[128];

	become(ATTACKER_UID);
	snprintf(path, sizeof(path), "%s/state", sc->dir);
	KVT_EXPECT(open(path, O_RDONLY | O_DIRECTORY) == -1 && errno == EACCES);
	snprintf(path, sizeof(path), "%s/state/secret", sc->dir);
	KVT_EXPECT(open(path, O_RDONLY) == -1);
	KVT_EXPECT(symlink("/etc/passwd", path) == -1);
	snprintf(path, sizeof(path), "%s/state/tier", sc->dir);
	KVT_EXPECT(symlink("/etc/passwd", path) == -1);
}

static void socket_replaced(const struct scene *sc)
{
	become(ATTACKER_UID);
	KVT_EXPECT(unlink(sc->d.socket_path) == -1);
	KVT_EXPECT(rename(sc->d.socket_path, "/tmp/kvt-stolen") == -1);
	KVT_EXPECT(chmod(sc->d.socket_path, 0) == -1);
}

static void signals(const struct scene *sc)
{
	become(ATTACKER_UID);
	KVT_EXPECT(kill(sc->d.pid, SIGKILL) == -1 && errno == EPERM);
	KVT_EXPECT(kill(sc->d.pid, SIGSTOP) == -1);
	KVT_EXPECT(kill(sc->victim, SIGKILL) == -1);
}

static void traced(const struct scene *sc)
{
	u64 word;
	struct iovec v = {&word, sizeof(word)};
	int pidfd;

	become(ATTACKER_UID);
	KVT_EXPECT(ptrace(PTRACE_SEIZE, sc->d.pid, 0, 0) == -1);
	KVT_EXPECT(process_vm_writev(sc->d.pid, &v, 1, &v, 1, 0) == -1);
	pidfd = (int)syscall(SYS_pidfd_open, sc->d.pid, 0);
	KVT_EXPECT(pidfd < 0 || syscall(SYS_pidfd_getfd, pidfd, 4, 0) == -1);
}

/* A kvmd of the attacker's on the same socket and in the same state directory. */
static void second_daemon(const struct scene *sc)
{
	char state[128];
	int status;
	pid_t pid;

	become(ATTACKER_UID);
	snprintf(state, sizeof(state), "%s/state", sc->dir);
	pid = fork();
	if (!pid) {
		int null = open("/dev/null", O_WRONLY);

		dup2(null, 1);
		dup2(null, 2);
		alarm(5);
		execl(sc->kvmd_path, "kvmd", "--socket", sc->d.socket_path,
		      "--admin-socket", sc->d.admin_path, "--state-dir", state, NULL);
		_exit(99);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT(WIFEXITED(status) && WEXITSTATUS(status) != 0);
}

/* What HELLO decided stays decided: a child with the parent's socket is the parent, and
 * a child of another uid gains nothing by it. */
static void fork_after_hello(const struct scene *sc)
{
	static struct ipc_raw r;
	struct held held;
	struct kv_sqe sqe;
	int status;
	pid_t pid;

	attacker_open(sc, &r, &held);
	pid = fork();
	if (!pid) {
		sqe = raw_sqe(&r, KV_OP_ALLOC);
		sqe.nr = 4;
		sqe.ret_bytes = 4 * sizeof(struct kv_grant);
		answers(&r, sqe, 0);
		_exit(0);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT_EQ(status, 0);
	/* the parent goes at once: nothing of it is left to be used by anybody */
}

/* Ends while a child holds everything: kvmd must not wait for the child. */
static void child_keeps_descriptors(const struct scene *sc)
{
	static struct ipc_raw r;
	struct held held;
	pid_t pid;

	attacker_open(sc, &r, &held);
	r.session->slots[0].word = 1;
	pid = fork();
	if (!pid) {
		setsid();
		alarm(4); /* longer than kvmd may keep what its parent had */
		pause();
		_exit(0);
	}
	KVT_EXPECT(pid > 0);
}

static void stopped_in_a_step(const struct scene *sc)
{
	static struct ipc_raw r;
	struct held held;
	struct kv_sqe sqe;

	attacker_open(sc, &r, &held);
	r.session->slots[0].word = 1;
	sqe = raw_sqe(&r, KV_OP_ALLOC);
	sqe.nr = 64;
	sqe.ret_bytes = 64 * sizeof(struct kv_grant);
	answers(&r, sqe, 0);
	if (!fork()) {
		usleep(400000);
		kill(getppid(), SIGCONT);
		_exit(0);
	}
	raise(SIGSTOP);
}

static void many_sessions(const struct scene *sc)
{
	static struct ipc_raw r[64];
	struct kv_msg_hello hello = raw_hello_msg();

	become(ATTACKER_UID);
	for (u32 i = 0; i < KV_ARRAY_SIZE(r); i++) {
		r[i].sock = raw_connect(&sc->d);
		raw_send(&r[i], &hello, sizeof(hello), NULL, 0);
		if (raw_recv(&r[i], 5000) != KV_MSG_HELLO_REPLY)
			break;
	}
	usleep(200000);
}

/* Every layout a pool of its own: the victim's domain still finds places for its pools. */
static void many_pools(const struct scene *sc)
{
	struct kv_msg_pool_open m = {.msg = {.magic = KV_MSG_MAGIC,
					     .type = KV_MSG_POOL_OPEN,
					     .size_bytes = sizeof(m)},
				     .layout = ipc_layout()};
	static struct ipc_raw r;
	struct held held;
	u32 refused_nr = 0;
	int type;

	attacker_open(sc, &r, &held);
	for (u32 i = 1; i < 80; i++) {
		m.msg.sequence = 10 + i;
		m.layout.lora_id = i;
		raw_send(&r, &m, sizeof(m), NULL, 0);
		/* events of the pools before may come in between */
		do {
			type = raw_recv(&r, 5000);
			for (u32 k = 0; k < r.nr_fds; k++)
				close(r.fds[k]);
		} while (type > 0 && type != KV_MSG_POOL_REPLY);
		KVT_EXPECT_EQ(type, KV_MSG_POOL_REPLY);
		refused_nr += r.in.pool.result < 0;
	}
	KVT_EXPECT(refused_nr > 0);
}

const struct attack attacks_host[] = {
	{"the admin socket", "EACCES", admin_socket},
	{"the keeper's socket", "EACCES", keeper_socket},
	{"secret and symlinks in the state directory", "EACCES", state_directory},
	{"the engine socket unlinked, renamed", "EACCES", socket_replaced},
	{"signals to kvmd and to the victim", "EPERM", signals},
	{"ptrace, process_vm_writev, pidfd_getfd", "EPERM", traced},
	{"a second daemon on the same socket", "does not start", second_daemon},
	{"fork after HELLO", "stays the parent's session", fork_after_hello},
	{"death with a child that keeps all fds", "reaped", child_keeps_descriptors},
	{"SIGSTOP in a step", "own domain only", stopped_in_a_step},
	{"64 sessions of one uid", "the victim is served", many_sessions},
	{"80 pools", "refused in the end", many_pools},
	{NULL, NULL, NULL},
};
