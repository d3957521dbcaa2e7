/* SPDX-License-Identifier: Apache-2.0 */
/*
 * start.h - a kvmd in a process of the test's own, with its keeper, of whose system calls and
 * allocations the n-th fails, or all from the n-th on. For tests/unit/ipc/start_*.c, included
 * once by each.
 *
 * Calls are failed by functions of libc's names in this program.
 */
#ifndef TESTS_UNIT_IPC_START_H
#define TESTS_UNIT_IPC_START_H

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/own/image.h"
#include "tests/kvt.h"

static u32 fail_nth, calls;  /* 0: none fails */
static bool fail_on;	     /* and all after it */
static void (*at_nth)(void); /* is called instead, and nothing fails */
static bool show;

static bool fails_in(int error, const char *what)
{
	if (!fail_nth || ++calls < fail_nth || (calls > fail_nth && !fail_on))
		return false;
	if (at_nth) {
		if (calls == fail_nth)
			at_nth();
		return false;
	}
	if (show) /* for a look */
		dprintf(2, "# %u: %s\n", calls, what);
	errno = error;
	return true;
}

/* -------------------------------------------------------------- libc, with a limit */

#define REAL(name) ((__typeof__(&(name)))dlsym(RTLD_NEXT, #name))

#ifndef KV_SANITIZED /* it has its own */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t nr, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void __libc_free(void *p);

void *malloc(size_t bytes)
{
	return fails_in(ENOMEM, __func__) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t nr, size_t bytes)
{
	return fails_in(ENOMEM, __func__) ? NULL : __libc_calloc(nr, bytes);
}

void *realloc(void *p, size_t bytes)
{
	return fails_in(ENOMEM, __func__) ? NULL : __libc_realloc(p, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
	return fails_in(ENOMEM, __func__) ? NULL : __libc_memalign(align, bytes);
}

int posix_memalign(void **ret, size_t align, size_t bytes)
{
	*ret = fails_in(ENOMEM, __func__) ? NULL : __libc_memalign(align, bytes);
	return *ret ? 0 : ENOMEM;
}

void free(void *p)
{
	__libc_free(p);
}
void *mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t off)
{
	return fails_in(ENOMEM, __func__) ? MAP_FAILED
					  : REAL(mmap)(at, bytes, prot, flags, fd, off);
}
#endif

int memfd_create(const char *name, unsigned int flags)
{
	return fails_in(EMFILE, __func__) ? -1 : REAL(memfd_create)(name, flags);
}

int socket(int family, int type, int protocol)
{
	return fails_in(EMFILE, __func__) ? -1 : REAL(socket)(family, type, protocol);
}

int bind(int fd, const struct sockaddr *addr, socklen_t len)
{
	return fails_in(EACCES, __func__) ? -1 : REAL(bind)(fd, addr, len);
}

int listen(int fd, int backlog)
{
	return fails_in(EADDRINUSE, __func__) ? -1 : REAL(listen)(fd, backlog);
}

int connect(int fd, const struct sockaddr *addr, socklen_t len)
{
	return fails_in(EACCES, __func__) ? -1 : REAL(connect)(fd, addr, len);
}

ssize_t sendmsg(int fd, const struct msghdr *mh, int flags)
{
	return fails_in(ECONNRESET, __func__) ? -1 : REAL(sendmsg)(fd, mh, flags);
}

ssize_t recvmsg(int fd, struct msghdr *mh, int flags)
{
	/* nobody is interrupted for ever */
	return fails_in(fail_on ? ECONNRESET : EINTR, __func__)
		       ? -1
		       : REAL(recvmsg)(fd, mh, flags);
}

/* A child is on its own: nothing fails in it. */
pid_t fork(void)
{
	pid_t pid = fails_in(EAGAIN, __func__) ? -1 : REAL(fork)();

	if (!pid)
		fail_nth = 0;
	return pid;
}

int accept4(int fd, struct sockaddr *addr, socklen_t *len, int flags)
{
	return fails_in(EMFILE, __func__) ? -1 : REAL(accept4)(fd, addr, len, flags);
}

int getsockopt(int fd, int level, int name, void *ret, socklen_t *len)
{
	return fails_in(EBADF, __func__) ? -1
					 : REAL(getsockopt)(fd, level, name, ret, len);
}

int getrlimit(__rlimit_resource_t what, struct rlimit *ret)
{
	return fails_in(EPERM, __func__) ? -1 : REAL(getrlimit)(what, ret);
}

int poll(struct pollfd *fds, nfds_t nr, int ms)
{
	return fails_in(calls & 1 ? EINTR : ENOMEM, __func__) ? -1
							      : REAL(poll)(fds, nr, ms);
}

/* --------------------------------------------------------------------- the daemon */

static struct kvd kvd;
static struct kvd_options opt;
static char dir[64];
static int client = -1;

/* This program is the keeper's as well: the daemon starts /proc/self/exe for it. */
__attribute__((constructor)) static void be_keeper(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "--keeper-process"))
		_exit(kvd_keeper_main(atoi(argv[2]), atoi(argv[3])));
}

static void dir_make(void)
{
	strcpy(dir, "/tmp/kvt-start.XXXXXX");
	KVT_EXPECT(mkdtemp(dir));
	opt = (struct kvd_options){.check = -1,
				   .socket_mode = 0600,
				   .host_bytes = 16u << 20,
				   .force_epoll = true,
				   .ready_fd = -1,
				   .keeper = true,
				   .keeper_die_with = getpid()};
	snprintf(opt.socket_path, sizeof(opt.socket_path), "%s/kvmd.sock", dir);
	snprintf(opt.admin_path, sizeof(opt.admin_path), "%s/admin.sock", dir);
	snprintf(opt.state_dir, sizeof(opt.state_dir), "%s", dir);
	kvd_log_setup(STDERR_FILENO, KVD_LOG_ERR);
	show = getenv("KVT_VERBOSE") != NULL;
}

static void dir_remove(void)
{
	struct dirent *e;
	char path[400];
	DIR *d = opendir(dir);

	while (d && (e = readdir(d))) {
		snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
		unlink(path);
	}
	if (d)
		closedir(d);
	rmdir(dir);
}

static void settle(void)
{
	char drop[4096];

	for (u32 i = 0; i < 3; i++) {
		kvd.core_next_ns = 0; /* do not sleep */
		KVT_EXPECT_EQ(kvd_turn(&kvd), 0);
	}
	while (recv(client, drop, sizeof(drop), MSG_DONTWAIT) > 0)
		;
}

/* A keeper that is just being started still has its parent's lock for a moment. */
static int start(char *error)
{
	int r = kvd_init(&kvd, &opt, error);

	for (u32 i = 0; i < 100 && r && !fail_nth && strstr(error, "lock"); i++) {
		usleep(5000);
		r = kvd_init(&kvd, &opt, error);
	}
	return r;
}

static struct kv_msg_pool_open pool_open_msg(void)
{
	return (struct kv_msg_pool_open){
		.msg = {.magic = KV_MSG_MAGIC,
			.type = KV_MSG_POOL_OPEN,
			.size_bytes = sizeof(struct kv_msg_pool_open)},
		.layout = {.format_version = KV_LAYOUT_VERSION,
			   .kind = KV_LAYOUT_MLA,
			   .dtype = KV_DTYPE_BF16,
			   .page_tokens = KV_PAGE_TOKENS,
			   .nr_layers = 1,
			   .latent_dim = 512,
			   .rope_dim = 64}};
}

/* A session with pages, in a kvmd that goes as by kill -9. */
static void first_kvmd(int told, int connected)
{
	struct kv_msg_hello hello = {.msg = {.magic = KV_MSG_MAGIC,
					     .type = KV_MSG_HELLO,
					     .size_bytes = sizeof(hello)},
				     .abi_min = KV_ABI_VERSION_MIN,
				     .abi_max = KV_ABI_VERSION,
				     .client_name = "start"};
	struct kv_msg_pool_open open_it = pool_open_msg();
	char error[KVD_CONFIG_ERROR_BYTES];
	struct kvd_session *s;
	struct kv_grant g[4];
	u32 pending, stocked;

	KVT_EXPECT_EQ(start(error), 0);
	KVT_EXPECT_EQ(write(told, "s", 1), 1);
	KVT_EXPECT_EQ(read(connected, error, 1), 1);
	settle();
	settle();
	KVT_EXPECT(send(client, &hello, sizeof(hello), 0) == sizeof(hello));
	settle();
	KVT_EXPECT(send(client, &open_it, sizeof(open_it), 0) == sizeof(open_it));
	settle();
	KVT_EXPECT_EQ(kvd.core.nr_sessions, 1);
	s = kv_container_of(kvd.core.sessions.next, struct kvd_session, node);
	KVT_EXPECT_EQ(kvd_lease_alloc(s, kvd_session_attach(s, 1), 4, KV_GFP_PREFILL, g,
				      &pending),
		      0);
	KVT_EXPECT_EQ(kvd_lease_stock(s, kvd_session_attach(s, 1), 2, 3, KV_GFP_NOWAIT,
				      &stocked, &pending),
		      0);
	_exit(0);
}

/* The session's process is the one that connects, and lives. */
static void history(void)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int told[2], connected[2], status;
	char byte;
	pid_t pid;

	KVT_EXPECT(!pipe(told) && !pipe(connected));
	memcpy(addr.sun_path, opt.socket_path, sizeof(addr.sun_path));
	client = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	pid = fork();
	if (!pid)
		first_kvmd(told[1], connected[0]);
	KVT_EXPECT_EQ(read(told[0], &byte, 1), 1);
	KVT_EXPECT(!connect(client, (struct sockaddr *)&addr, sizeof(addr)));
	KVT_EXPECT_EQ(write(connected[1], "c", 1), 1);
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT_EQ(status, 0);
	close(told[0]);
	close(told[1]);
}

/* One start in which the n-th call fails. Return: 0 it started, and was killed; 1 it said
 * why not; 2 no call was left to fail */
static inline int try_nth(u32 nth)
{
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	pid_t pid;
	int status, r;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		calls = 0;
		fail_nth = nth;
		r = start(error);
		fail_nth = 0;
		if (r < 0 && !error[0])
			_exit(3);
		_exit(r ? 1 : calls < nth ? 2 : 0);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	if (!WIFEXITED(status))
		KVT_FAIL("call %u failed: killed by signal %d", nth, WTERMSIG(status));
	return WEXITSTATUS(status);
}

/* A start with nothing in the way. Return: pages that are held */
static inline u32 pages_now(void)
{
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	int p[2], status;
	u32 nr = 0;
	pid_t pid;

	KVT_EXPECT(!pipe(p));
	pid = fork();
	if (!pid) {
		struct kvd_finding list[4];
		struct kvd_findings fs = {.list = list, .max = 4};

		if (start(error)) {
			printf("# %s\n", error);
			_exit(1);
		}
		if (kvd_audit(&kvd.core, &fs))
			_exit(2);
		nr = kvd.core.mm.pools[0] ? kvd.core.mm.pools[0]->nr[KVD_ACTIVE] : 0;
		status = write(p[1], &nr, sizeof(nr)) == sizeof(nr) ? 0 : 3;
		_exit(status);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT_EQ(status, 0);
	KVT_EXPECT_EQ(read(p[0], &nr, sizeof(nr)), sizeof(nr));
	close(p[0]);
	close(p[1]);
	return nr;
}

static void end(void)
{
	char error[KVD_CONFIG_ERROR_BYTES];
	pid_t pid = fork();
	int status;

	if (!pid) { /* so that the keeper ends too */
		_exit(start(error) ? 1 : (kvd_fini(&kvd), 0));
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT_EQ(status, 0);
	dir_remove();
}

/* ------------------------------------------------------------------ for start_kept, start_resume */

static struct {
	struct kvd_keep_key key;
	int fd;
} real; /* what the keeper has of one kind */

static u32 want_kind;

static inline void see(void *arg, const struct kvd_keep_key *key, int fd)
{
	u32 *strange = arg;

	if (strange && key->session >= 1000)
		++*strange;
	if (key->kind != want_kind || key->session >= 1000 || real.fd >= 0) {
		close(fd);
		return;
	}
	real.key = *key;
	real.fd = fd;
}

static inline void keep_open(struct kvd_keep *k)
{
	bool found;

	KVT_EXPECT(!kvd_keep_open(k, dir, getpid(), &found) && found);
}

static inline struct kvd_image *image_map(void)
{
	struct kvd_image *image;
	struct kvd_keep k;

	want_kind = KVD_KEEP_IMAGE;
	real.fd = -1;
	keep_open(&k);
	KVT_EXPECT(kvd_keep_list(&k, see, NULL) > 0);
	kvd_keep_close(&k, false);
	image = mmap(NULL, sizeof(*image), PROT_READ | PROT_WRITE, MAP_SHARED, real.fd,
		     0);
	KVT_EXPECT(image != MAP_FAILED);
	close(real.fd);
	return image;
}

static inline void turns(u32 nr)
{
	while (nr--) {
		kvd.core_next_ns = 0; /* do not sleep */
		KVT_EXPECT_EQ(kvd_turn(&kvd), 0);
	}
}

/* Run @fn in a kvmd that has adopted; it ends as by kill -9. Return: how it was waited for;
 * what @fn returns is its exit status. */
static inline int kvmd_status(int (*fn)(u32 arg), u32 arg)
{
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	int status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		KVT_EXPECT_EQ(start(error), 0);
		_exit(fn(arg));
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	return status;
}

/* The same of @fn that does something at its @nth call only. Return: whether there was one */
static inline bool kvmd_nth(int (*fn)(u32 nth), u32 nth)
{
	int status = kvmd_status(fn, nth);

	KVT_EXPECT(WIFEXITED(status) && WEXITSTATUS(status) < 2);
	return !WEXITSTATUS(status);
}

static void (*in_kvmd_fn)(void);

static inline int in_kvmd_run(u32 arg)
{
	in_kvmd_fn();
	return 0;
}

static inline void in_kvmd(void (*fn)(void))
{
	in_kvmd_fn = fn;
	KVT_EXPECT_EQ(kvmd_status(in_kvmd_run, 0), 0);
}

#endif
