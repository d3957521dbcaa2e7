/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor_probe.c - probes of GPU memory, each in a process that does what an engine does.
 *
 * A spawner is forked before anybody calls cuInit; it never calls it either, and forks one
 * process for each probe. Requests and answers are single messages on a socket pair.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/nvml_syms.h"
#include "tools/kvmctl/doctor.h"

#define PROBE_MS    60000
#define CHUNK_BYTES (1u << 20)
#define PATTERN	    0xb7

struct request {
	enum doc_probe kind;
	int ordinal;
};

/* A context on a device, as an engine has one. */
struct gpu {
	struct kv_cuda_syms cu;
	kv_cu_device dev;
	u8 *buf; /* CHUNK_BYTES */
};

static int say(struct doc_answer *a, const char *what, kv_cu_result cr)
{
	snprintf(a->text, sizeof(a->text), "%s: CUDA result %d (%s)", what, cr,
		 kv_cuda_reason(cr));
	return kv_cuda_errno(cr);
}

static int gpu_open(struct gpu *g, int ordinal, struct doc_answer *a)
{
	kv_cu_result cr;
	kv_cu_ctx ctx;
	int r;

	prctl(PR_SET_PDEATHSIG, SIGKILL); /* one that hangs goes with its spawner */
	g->buf = malloc(CHUNK_BYTES);
	if (!g->buf)
		return -ENOMEM;
	r = kv_cuda_load(&g->cu, a->text, sizeof(a->text));
	if (r)
		return r;
	cr = g->cu.init(0);
	if (!cr)
		cr = g->cu.device_get(&g->dev, ordinal);
	if (cr)
		return say(a, "cuInit", cr);
	cr = g->cu.ctx_retain(&ctx, g->dev);
	if (!cr)
		cr = g->cu.ctx_push(ctx);
	return cr ? say(a, "no context", cr) : 0;
}

/* ------------------------------------------------------------------- the bytes */

static int write_all(struct gpu *g, kv_cu_ptr at, struct doc_answer *a)
{
	kv_cu_result cr = 0;

	memset(g->buf, PATTERN, CHUNK_BYTES);
	for (u64 off = 0; !cr && off < DOC_PROBE_BYTES; off += CHUNK_BYTES)
		cr = g->cu.copy_in(at + off, g->buf, CHUNK_BYTES);
	if (!cr)
		cr = g->cu.ctx_sync();
	return cr ? say(a, "cuMemcpyHtoD", cr) : 0;
}

static int compare_all(struct gpu *g, kv_cu_ptr at, u8 want, struct doc_answer *a)
{
	kv_cu_result cr = 0;

	for (u64 off = 0; !cr && off < DOC_PROBE_BYTES; off += CHUNK_BYTES) {
		cr = g->cu.copy_out(g->buf, at + off, CHUNK_BYTES);
		/* All alike is the usual case, and memcmp sees it at memory speed. */
		if (cr ||
		    (g->buf[0] == want && !memcmp(g->buf, g->buf + 1, CHUNK_BYTES - 1)))
			continue;
		for (u32 i = 0; i < CHUNK_BYTES; i++)
			a->nr_bad += g->buf[i] != want;
	}
	if (cr)
		return say(a, "cuMemcpyDtoH", cr);
	return a->nr_bad ? 1 : 0;
}

static int with_mapping(struct gpu *g, enum doc_probe kind, int fd, struct doc_answer *a)
{
	struct kv_cu_access rw = {{KV_CU_DEVICE, g->dev}, KV_CU_READWRITE};
	kv_cu_handle handle;
	kv_cu_result cr;
	kv_cu_ptr at;
	int r;

	cr = g->cu.mem_import(&handle, (void *)(intptr_t)fd, KV_CU_POSIX_FD);
	if (cr)
		return say(a, "cuMemImportFromShareableHandle", cr);
	cr = g->cu.va_reserve(&at, DOC_PROBE_BYTES, 0, 0, 0);
	if (cr)
		return say(a, "cuMemAddressReserve", cr);
	cr = g->cu.mem_map(at, DOC_PROBE_BYTES, 0, handle, 0);
	if (cr)
		return say(a, "cuMemMap", cr);
	cr = g->cu.mem_access(at, DOC_PROBE_BYTES, &rw, 1);
	if (cr)
		return say(a, "cuMemSetAccess", cr);
	r = kind == DOC_WRITE ? write_all(g, at, a)
			      : compare_all(g, at, kind == DOC_READ ? PATTERN : 0, a);
	g->cu.mem_unmap(at, DOC_PROBE_BYTES);
	g->cu.mem_release(handle);
	return r;
}

/* Does NVML list this very process, which has a context? (design 5, P8) */
static int nvml_lists_us(const struct gpu *g)
{
	struct kv_nv_process procs[512];
	unsigned count = KV_ARRAY_SIZE(procs);
	struct kv_nvml_syms nv;
	kv_nv_device dev;
	char text[48];
	u8 uuid[16];
	int n = 4, listed = 0;

	if (g->cu.device_uuid(uuid, g->dev) || kv_nvml_load(&nv, NULL, 0) || nv.init())
		return -1;
	strcpy(text, "GPU-");
	for (int i = 0; i < 16; i++)
		n += sprintf(text + n, "%s%02x",
			     i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
	if (nv.by_uuid(text, &dev) || nv.processes(dev, &count, procs))
		return -1;
	for (unsigned i = 0; i < count; i++)
		listed |= procs[i].pid == (unsigned)getpid();
	return listed;
}

/* -------------------------------------------------------- the legacy handle's two ends */

struct legacy {
	int handle[2]; /* pipe: maker -> spawner */
	int end[2];    /* pipe: closed by the spawner when the maker may go */
};

static void legacy_maker(int ordinal, struct legacy *l)
{
	struct kv_cu_ipc_handle handle;
	struct doc_answer a = {0};
	struct gpu g = {0};
	kv_cu_ptr at;
	char byte;

	close(l->end[1]);
	if (gpu_open(&g, ordinal, &a))
		_exit(1);
	if (g.cu.alloc(&at, DOC_PROBE_BYTES) || write_all(&g, at, &a) ||
	    g.cu.ipc_get(&handle, at))
		_exit(2);
	if (write(l->handle[1], &handle, sizeof(handle)) != sizeof(handle))
		_exit(3);
	while (read(l->end[0], &byte, 1) < 0 && errno == EINTR)
		;
	_exit(g.cu.free(at) ? 4 : 0);
}

static void legacy_opener(int ordinal, const struct kv_cu_ipc_handle *handle,
			  struct doc_answer *a)
{
	struct gpu g = {0};
	kv_cu_result cr;
	kv_cu_ptr at;

	a->result = gpu_open(&g, ordinal, a);
	if (a->result)
		return;
	cr = g.cu.ipc_open(&at, *handle, KV_CU_IPC_LAZY);
	if (cr) {
		a->result = say(a, "cuIpcOpenMemHandle", cr);
		return;
	}
	a->result = compare_all(&g, at, PATTERN, a);
	g.cu.ipc_close(at);
}

/* ---------------------------------------------------------------------- the spawner */

static void answer_and_exit(int sock, const struct doc_answer *a)
{
	_exit(send(sock, a, sizeof(*a), MSG_NOSIGNAL) == sizeof(*a) ? 0 : 1);
}

static void run_legacy(int sock, int ordinal)
{
	struct doc_answer a = {.listed = -1};
	struct kv_cu_ipc_handle handle;
	struct legacy l;
	pid_t maker, opener;

	if (pipe(l.handle) || pipe(l.end))
		_exit(1);
	maker = fork();
	if (!maker)
		legacy_maker(ordinal, &l);
	close(l.handle[1]);
	close(l.end[0]);
	if (read(l.handle[0], &handle, sizeof(handle)) != sizeof(handle)) {
		a.result = -EOPNOTSUPP;
		snprintf(a.text, sizeof(a.text), "no handle could be made");
		send(sock, &a, sizeof(a), MSG_NOSIGNAL);
	} else {
		opener = fork();
		if (!opener) {
			close(l.end[1]);
			legacy_opener(ordinal, &handle, &a);
			answer_and_exit(sock, &a);
		}
		waitpid(opener, NULL, 0);
	}
	close(l.handle[0]);
	close(l.end[1]);
	waitpid(maker, NULL, 0);
}

static void run_import(int sock, const struct request *req, int fd)
{
	pid_t pid = fork();

	if (!pid) {
		struct doc_answer a = {.listed = -1};
		struct gpu g = {0};

		a.result = gpu_open(&g, req->ordinal, &a);
		if (!a.result)
			a.listed = nvml_lists_us(&g);
		if (!a.result)
			a.result = with_mapping(&g, req->kind, fd, &a);
		answer_and_exit(sock, &a);
	}
	waitpid(pid, NULL, 0);
}

static ssize_t receive(int sock, struct request *req, int *ret_fd)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = req, .iov_len = sizeof(*req)};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control)};
	struct cmsghdr *cm;
	ssize_t n = recvmsg(sock, &mh, MSG_CMSG_CLOEXEC);

	*ret_fd = -1;
	cm = n > 0 ? CMSG_FIRSTHDR(&mh) : NULL;
	if (cm && cm->cmsg_type == SCM_RIGHTS)
		memcpy(ret_fd, CMSG_DATA(cm), sizeof(*ret_fd));
	return n;
}

static void spawner(int sock)
{
	struct request req;
	int fd;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (receive(sock, &req, &fd) == (ssize_t)sizeof(req)) {
		if (req.kind == DOC_LEGACY)
			run_legacy(sock, req.ordinal);
		else
			run_import(sock, &req, fd);
		if (fd >= 0)
			close(fd);
	}
	_exit(0);
}

int doc_spawner_start(struct doctor *doc)
{
	int sv[2];

	doc->spawner = -1;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv))
		return -errno;
	fflush(stdout);
	doc->spawner_pid = fork();
	if (doc->spawner_pid < 0) {
		int r = -errno;

		close(sv[0]);
		close(sv[1]);
		return r;
	}
	if (!doc->spawner_pid) {
		close(sv[0]);
		spawner(sv[1]);
	}
	close(sv[1]);
	doc->spawner = sv[0];
	return 0;
}

void doc_spawner_stop(struct doctor *doc)
{
	if (doc->spawner < 0)
		return;
	close(doc->spawner);
	doc->spawner = -1;
	waitpid(doc->spawner_pid, NULL, 0);
}

int doc_probe_run(struct doctor *doc, enum doc_probe kind, int ordinal, int fd,
		  struct doc_answer *ret)
{
	struct request req = {.kind = kind, .ordinal = ordinal};
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = &req, .iov_len = sizeof(req)};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct pollfd p = {.fd = doc->spawner, .events = POLLIN};
	struct cmsghdr *cm;

	memset(ret, 0, sizeof(*ret));
	memset(&control, 0, sizeof(control));
	if (fd >= 0) {
		mh.msg_control = &control;
		mh.msg_controllen = sizeof(control);
		cm = CMSG_FIRSTHDR(&mh);
		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(cm), &fd, sizeof(fd));
	}
	snprintf(ret->text, sizeof(ret->text), "the probe's process died");
	if (sendmsg(doc->spawner, &mh, MSG_NOSIGNAL) < 0)
		return ret->result = -EIO;
	if (poll(&p, 1, PROBE_MS) == 0) {
		snprintf(ret->text, sizeof(ret->text), "no answer in %d s",
			 PROBE_MS / 1000);
		/* what hangs in the driver is not waited for */
		kill(doc->spawner_pid, SIGKILL);
		return ret->result = -ETIMEDOUT;
	}
	if (recv(doc->spawner, ret, sizeof(*ret), 0) != (ssize_t)sizeof(*ret))
		return ret->result = -EIO;
	return 0;
}
