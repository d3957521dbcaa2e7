/* SPDX-License-Identifier: Apache-2.0 */
/* common.c - see common.h. */
#include "tests/ipc/common.h"
#include "tests/fake/fake.h"
#include "base/cuda_syms.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

/* These tests link no engine; this one file of it is all they need. */
#include "engine/private.c"

#define ARGS_MAX 12

void ipc_show_log(const struct eng_private_kvmd *d)
{
	char line[300];
	FILE *f = fopen(d->log_path, "r");

	while (f && fgets(line, sizeof(line), f))
		printf("# kvmd: %s", line);
	if (f)
		fclose(f);
}

bool ipc_on_cuda(void)
{
	const char *backend = getenv("KVT_BACKEND");

	if (backend && *backend && strcmp(backend, "host") && strcmp(backend, "cuda"))
		KVT_FAIL("KVT_BACKEND=%s: host or cuda", backend);
	return backend && !strcmp(backend, "cuda");
}

bool ipc_on_card(void)
{
	const char *driver = getenv("KVT_DRIVER"), *gpu = getenv("REQUIRE_GPU");

	if (driver && strcmp(driver, "card") && strcmp(driver, "fake"))
		KVT_FAIL("KVT_DRIVER=%s: card or fake", driver);
	return driver ? !strcmp(driver, "card") : gpu && !strcmp(gpu, "1");
}

void ipc_need_fake(void)
{
	setenv("KVT_DRIVER", "fake", 1);
}

void ipc_use_driver(void)
{
	if (!ipc_on_card()) {
		ipc_use_fake_cuda();
		return;
	}
	if (access("/dev/nvidiactl", F_OK))
		KVT_SKIP("no GPU");
	unsetenv("KV_CUDA_LIB");
	unsetenv("KV_NVML_LIB");
	setenv("CUDA_VISIBLE_DEVICES", "0", 0); /* one kvmd, one GPU */
}

void ipc_use_fake_cuda(void)
{
	KVT_EXPECT_EQ(fake_use("KV_CUDA_LIB", "libcuda.so"), 0);
	KVT_EXPECT_EQ(fake_use("KV_NVML_LIB", "libnvml.so"), 0);
	setenv("FAKE_CUDA_NO_CONTEXT", "kvmd", 1);
}

void ipc_gpu_context(int ordinal)
{
	struct kv_cuda_syms cu;
	char error[200];
	kv_cu_device dev;
	kv_cu_ctx ctx, now;

	if (kv_cuda_load(&cu, error, sizeof(error)))
		KVT_FAIL("%s", error);
	KVT_EXPECT_EQ(cu.init(0), 0);
	KVT_EXPECT_EQ(cu.device_get(&dev, ordinal), 0);
	KVT_EXPECT_EQ(cu.ctx_retain(&ctx, dev), 0);
	KVT_EXPECT_EQ(cu.ctx_current(&now), 0);
	if (now != ctx)
		KVT_EXPECT_EQ(cu.ctx_push(ctx), 0);
}

/* ---------------------------------------------------------------------- the forker */

/*
 * A child of a process that called cuInit has no driver. So ipc_start() leaves behind a
 * process that never calls it and forks the children of the case; orders and answers are
 * single messages on a socket pair. The pipes of the case go along under their numbers.
 */
#define FDS_MAX	     16
#define FD_ELSEWHERE 600 /* where no case has a descriptor */

enum { FORK, WAIT };

struct order {
	int what;
	int (*fn)(void *arg);
	void *arg; /* when @bytes is 0 */
	pid_t pid;
	u32 bytes;
	u32 nr_fds;
	int numbers[FDS_MAX];
	_Alignas(16) u8 data[IPC_ARG_BYTES];
};

static int forker_sock = -1;
static pid_t forker_owner; /* who may give orders */

static u32 open_pipes(int *ret_fds)
{
	struct stat st;
	u32 nr = 0;

	for (int fd = 3; fd < 256; fd++) {
		if (fstat(fd, &st) || !S_ISFIFO(st.st_mode))
			continue;
		KVT_EXPECT(nr < FDS_MAX);
		ret_fds[nr++] = fd;
	}
	return nr;
}

static void fd_message(struct msghdr *mh, void *control, size_t room, struct iovec *iov)
{
	*mh = (struct msghdr){.msg_iov = iov,
			      .msg_iovlen = 1,
			      .msg_control = control,
			      .msg_controllen = room};
}

static int forker_ask(struct order *o)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
	} control = {0};
	struct iovec iov = {o, sizeof(*o)};
	struct msghdr mh;
	int answer;

	fflush(stdout);
	o->nr_fds = o->what == FORK ? open_pipes(o->numbers) : 0;
	fd_message(&mh, o->nr_fds ? &control : NULL,
		   o->nr_fds ? CMSG_SPACE(o->nr_fds * sizeof(int)) : 0, &iov);
	if (o->nr_fds) {
		struct cmsghdr *cm = CMSG_FIRSTHDR(&mh);

		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(o->nr_fds * sizeof(int));
		memcpy(CMSG_DATA(cm), o->numbers, o->nr_fds * sizeof(int));
	}
	KVT_EXPECT_EQ(sendmsg(forker_sock, &mh, MSG_NOSIGNAL), sizeof(*o));
	KVT_EXPECT_EQ(recv(forker_sock, &answer, sizeof(answer), 0), sizeof(answer));
	return answer;
}

static void forker_child(struct order *o, const int *fds)
{
	int moved[FDS_MAX];

	for (u32 i = 0; i < o->nr_fds; i++)
		moved[i] = fcntl(fds[i], F_DUPFD, FD_ELSEWHERE);
	for (u32 i = 0; i < o->nr_fds; i++)
		close(fds[i]);
	for (u32 i = 0; i < o->nr_fds; i++) {
		dup2(moved[i], o->numbers[i]);
		close(moved[i]);
	}
	_exit(o->fn(o->bytes ? o->data : o->arg));
}

static int forker_serve(int sock)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
	} control;
	static struct order o;
	struct iovec iov = {&o, sizeof(o)};
	int fds[FDS_MAX], answer = 0;
	struct msghdr mh;

	fd_message(&mh, &control, sizeof(control), &iov);
	if (recvmsg(sock, &mh, 0) != (ssize_t)sizeof(o))
		return -1;
	if (o.nr_fds)
		memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&mh)), o.nr_fds * sizeof(int));
	if (o.what == FORK) {
		answer = fork();
		if (!answer)
			forker_child(&o, fds);
	} else if (waitpid(o.pid, &answer, 0) != o.pid) {
		answer = 255 << 8;
	}
	for (u32 i = 0; i < o.nr_fds; i++)
		close(fds[i]);
	return send(sock, &answer, sizeof(answer), MSG_NOSIGNAL) == sizeof(answer) ? 0
										   : -1;
}

static void forker_start(void)
{
	int sv[2], sock;
	pid_t pid;

	KVT_EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv), 0);
	fflush(stdout);
	pid = fork();
	KVT_EXPECT(pid >= 0);
	if (!pid) {
		sock = fcntl(sv[1], F_DUPFD_CLOEXEC, FD_ELSEWHERE);
		close(sv[0]);
		close(sv[1]);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		while (!forker_serve(sock))
			;
		_exit(0);
	}
	close(sv[1]);
	if (forker_sock >= 0)
		close(forker_sock); /* the one of an earlier kvmd of this case ends */
	forker_sock = fcntl(sv[0], F_DUPFD_CLOEXEC, FD_ELSEWHERE);
	close(sv[0]);
	forker_owner = getpid();
}

void ipc_start(struct eng_private_kvmd *d, const char *const *args)
{
	const char *size = ipc_on_cuda() ? "--gpu-bytes" : "--host-bytes";
	const char *all[ARGS_MAX + 6] = {NULL};
	bool sized = false, named = false;
	char error[512];
	int n = 0, r;

	for (; args && args[n]; n++) {
		KVT_EXPECT(n < ARGS_MAX);
		all[n] = args[n];
		named |= !strcmp(args[n], "--backend");
		if (strcmp(args[n], "--host-bytes"))
			continue;
		sized = true;
		all[n] = size;
	}
	if (!sized) {
		all[n++] = size;
		all[n++] = "256MiB";
	}
	if (ipc_on_cuda()) {
		ipc_use_driver();
		all[n++] = "--test-extents";
		if (!named) {
			all[n++] = "--backend";
			all[n++] = "cuda";
		}
	}
	r = eng_private_kvmd_start(all, d, error, sizeof(error));
	if (r)
		KVT_FAIL("%s", error);
	if (ipc_on_cuda() && ipc_on_card())
		forker_start();
}

bool ipc_start_again(struct eng_private_kvmd *d, const char *const *args)
{
	const char *all[ARGS_MAX + 8] = {NULL};
	char path[1200], fd_text[16], byte;
	int fds[2], n = 0;
	bool serves;

	ipc_build_path("kvmd", path, sizeof(path));
	KVT_EXPECT_EQ(pipe(fds), 0);
	snprintf(fd_text, sizeof(fd_text), "%d", fds[1]);
	all[n++] = path;
	all[n++] = "--private";
	all[n++] = d->dir;
	all[n++] = "--die-with-parent";
	all[n++] = "--ready-fd";
	all[n++] = fd_text;
	for (int i = 0; args[i]; i++) {
		KVT_EXPECT(i < ARGS_MAX);
		all[n++] = args[i];
	}
	d->pid = fork();
	if (d->pid == 0) {
		int log = open(d->log_path, O_WRONLY | O_APPEND | O_CREAT, 0600);

		dup2(log, 1);
		dup2(log, 2);
		close(fds[0]);
		execv(path, (char *const *)all);
		_exit(127);
	}
	close(fds[1]);
	serves = read(fds[0], &byte, 1) == 1;
	close(fds[0]);
	return serves;
}

void ipc_stop(struct eng_private_kvmd *d)
{
	char *audit = ipc_admin(d, "{\"op\":\"audit\"}");
	int status;

	if (!strstr(audit, "\"damage\":0")) {
		ipc_show_log(d);
		KVT_FAIL("audit: %s", audit);
	}
	free(audit);
	status = eng_private_kvmd_stop(d);
	if (status)
		KVT_FAIL("kvmd ended with status %d", status);
}

void ipc_build_path(const char *name, char *ret, size_t bytes)
{
	char kvmd[1024];

	if (find_kvmd(kvmd, sizeof(kvmd)))
		KVT_FAIL("kvmd is not built");
	*strrchr(kvmd, '/') = 0;
	snprintf(ret, bytes, "%s/%s", kvmd, name);
}

struct kvc *ipc_connect(const struct eng_private_kvmd *d)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = d->socket_path,
				  .client_name = "test"};
	struct kvc *c;
	int r = kvc_open(&opt, &c);

	if (ipc_on_cuda())
		ipc_gpu_context(0);
	if (r)
		KVT_FAIL("kvc_open: %d %s", r, kvc_strerror(NULL));
	return c;
}

struct kv_layout ipc_layout(void)
{
	return (struct kv_layout){.format_version = KV_LAYOUT_VERSION,
				  .kind = KV_LAYOUT_GQA,
				  .dtype = KV_DTYPE_E4M3,
				  .scale_kind = KV_SCALE_TOKEN,
				  .page_tokens = KV_PAGE_TOKENS,
				  .nr_layers = 4,
				  .nr_kv_heads = 2,
				  .head_dim = 64};
}

struct kvc_pool *ipc_pool(struct kvc *c)
{
	struct kv_layout layout = ipc_layout();
	struct kvc_pool *pool;
	int r = kvc_pool_open(c, &layout, NULL, NULL, &pool);

	if (r)
		KVT_FAIL("kvc_pool_open: %d %s", r, kvc_strerror(c));
	return pool;
}

int ipc_connect_to(const char *path, int type)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int sock = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	if (sock < 0 || connect(sock, (void *)&addr, sizeof(addr)))
		KVT_FAIL("connect %s: %s", path, strerror(errno));
	return sock;
}

char *ipc_admin(const struct eng_private_kvmd *d, const char *request)
{
	int sock = ipc_connect_to(d->admin_path, SOCK_STREAM);
	size_t used = 0, room = 1 << 20;
	char *ret = malloc(room);
	ssize_t n;

	dprintf(sock, "%s\n", request);
	do {
		n = read(sock, ret + used, room - used - 1);
		used += n > 0 ? (size_t)n : 0;
	} while (n > 0 && ret[used - 1] != '\n' && used < room - 1);
	ret[used] = 0;
	close(sock);
	if (!used)
		KVT_FAIL("admin socket: no reply to %s", request);
	return ret;
}

pid_t ipc_fork(int (*fn)(void *arg), void *arg)
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid == 0)
		_exit(fn(arg));
	KVT_EXPECT(pid > 0);
	return pid;
}

pid_t ipc_child(int (*fn)(void *arg), void *arg)
{
	struct order o = {.what = FORK, .fn = fn, .arg = arg};

	return forker_owner == getpid() ? forker_ask(&o) : ipc_fork(fn, arg);
}

pid_t ipc_child_with(int (*fn)(void *arg), const void *arg, u32 bytes)
{
	static struct order o;

	KVT_EXPECT(bytes <= IPC_ARG_BYTES);
	o = (struct order){.what = FORK, .fn = fn, .bytes = bytes};
	memcpy(o.data, arg, bytes);
	return forker_owner == getpid() ? forker_ask(&o) : ipc_fork(fn, o.data);
}

int ipc_wait(pid_t pid)
{
	struct order o = {.what = WAIT, .pid = pid};
	int status;

	if (waitpid(pid, &status, 0) != pid) {
		KVT_EXPECT(errno == ECHILD && forker_owner == getpid());
		status = forker_ask(&o);
	}
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* -------------------------------------------------------------------- bytes of pages */

/* The driver's copies where the host has no address for the page. */
static const struct kv_cuda_syms *copies(struct kvc_pool *pool)
{
	static struct kv_cuda_syms cu;
	struct kvc_pool_info info;

	kvc_pool_get_info(pool, &info);
	if (info.backend == KV_BACKEND_HOST)
		return NULL;
	if (!cu.lib)
		KVT_EXPECT_EQ(kv_cuda_load(&cu, NULL, 0), 0);
	return &cu;
}

static u8 *page_at(struct kvc_pool *pool, u32 pfn, u64 off)
{
	u8 *at = kvc_page_addr(pool, pfn);

	if (!at)
		KVT_FAIL("page %u is not mapped", pfn);
	return at + off;
}

void ipc_page_put(struct kvc_pool *pool, u32 pfn, u64 off, const void *src, u64 bytes)
{
	const struct kv_cuda_syms *cu = copies(pool);
	u8 *at = page_at(pool, pfn, off);

	if (!cu)
		memcpy(at, src, bytes);
	else /* a copy from ordinary memory may return before its bytes are there */
		KVT_EXPECT(!cu->copy_in((kv_cu_ptr)(uintptr_t)at, src, bytes) &&
			   !cu->ctx_sync());
}

void ipc_page_get(struct kvc_pool *pool, u32 pfn, u64 off, void *dst, u64 bytes)
{
	const struct kv_cuda_syms *cu = copies(pool);
	u8 *at = page_at(pool, pfn, off);

	if (!cu)
		memcpy(dst, at, bytes);
	else
		KVT_EXPECT_EQ(cu->copy_out(dst, (kv_cu_ptr)(uintptr_t)at, bytes), 0);
}

void ipc_page_fill(struct kvc_pool *pool, u32 pfn, int byte, u64 bytes)
{
	u8 *buf = malloc(bytes);

	KVT_EXPECT(buf);
	memset(buf, byte, bytes);
	ipc_page_put(pool, pfn, 0, buf, bytes);
	free(buf);
}

u8 ipc_page_byte(struct kvc_pool *pool, u32 pfn, u64 off)
{
	u8 byte;

	ipc_page_get(pool, pfn, off, &byte, 1);
	return byte;
}

bool ipc_passes(struct kvc *c, struct kvc_pool *pool, struct kv_grant g)
{
	struct kv_row row = kv_row_make(g.pfn, g.tag, 0, 7, 0);
	struct kvc_check_request q = {
		.rows = &row, .nonce = 7, .nr_rows = 1, .length = 1};
	struct kvc_step *step;
	struct kv_verdict v;
	bool ok;

	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	ok = kv_verdict_ok(v, kvc_step_number(step), 1);
	kvc_step_retire(step);
	return ok;
}

u32 ipc_nr_fds(pid_t pid)
{
	struct dirent *e;
	char path[64];
	u32 n = 0;
	DIR *d;

	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	d = opendir(path);
	KVT_EXPECT(d != NULL);
	while ((e = readdir(d)) != NULL)
		n += e->d_name[0] != '.';
	closedir(d);
	return n;
}

double ipc_admin_number(const struct eng_private_kvmd *d, const char *request,
			const char *field)
{
	char *text = ipc_admin(d, request), *at = strstr(text, field);
	double v;

	if (!at)
		KVT_FAIL("%s lacks %s: %s", request, field, text);
	v = strtod(at + strlen(field), NULL);
	free(text);
	return v;
}
