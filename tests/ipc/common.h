/* SPDX-License-Identifier: Apache-2.0 */
/*
 * common.h - tests against a real kvmd: start one, connect, look into it, speak raw
 * messages.
 *
 * Everything fails the case with a message (KVT_FAIL) instead of returning an error.
 */
#ifndef TESTS_IPC_COMMON_H
#define TESTS_IPC_COMMON_H

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include "kvclient.h"
#include "base/clock.h"
#include "base/util.h"
#include "engine/private.h"
#include "tests/kvt.h"

/**
 * ipc_on_cuda() - KVT_BACKEND=cuda: the cases run on the cuda backend, so that both
 * backends pass the same tests
 */
bool ipc_on_cuda(void);

/**
 * ipc_on_card() - the driver is the real one: KVT_DRIVER=card, or REQUIRE_GPU=1 and no
 * KVT_DRIVER; else the fake one (tests/fake)
 */
bool ipc_on_card(void);

/** ipc_need_fake() - first in a case that tells the driver what to do: calls that fail,
 * many GPUs, a slow start. It runs over the fake driver, on a machine with a GPU as well */
void ipc_need_fake(void);

/** ipc_use_fake_cuda() - kvmd and this process load the fake driver; a context that kvmd
 * makes aborts it */
void ipc_use_fake_cuda(void);

/** ipc_use_driver() - the fake driver, or the GPU of this machine (ipc_on_card()) */
void ipc_use_driver(void);

/** ipc_gpu_context() - what an engine has done before it opens a pool: a current context */
void ipc_gpu_context(int ordinal);

/**
 * ipc_start() - a private kvmd for this case
 * @args: more arguments, NULL-terminated, or NULL
 *
 * Without "--host-bytes" among @args the backend gets 256 MiB; on cuda the same size is
 * its "--gpu-bytes".
 */
void ipc_start(struct eng_private_kvmd *d, const char *const *args);

/**
 * ipc_start_again() - a daemon in the directory of one that has ended
 * @args: all but directory, log and readiness, NULL-terminated
 *
 * Its keeper, the host's secret and its tiers are still there. Return: whether it serves.
 */
bool ipc_start_again(struct eng_private_kvmd *d, const char *const *args);

/** ipc_stop() - stop it; it must end with status 0 and an audit without errors */
void ipc_stop(struct eng_private_kvmd *d);

/** ipc_show_log() - the daemon's log as notes */
void ipc_show_log(const struct eng_private_kvmd *d);

/** ipc_build_path() - @name in the build directory that ipc_start() takes kvmd from */
void ipc_build_path(const char *name, char *ret, size_t bytes);

struct kvc *ipc_connect(const struct eng_private_kvmd *d);

/** ipc_layout() - a small GQA FP8 layout: 4 layers, 2 kv heads of 64 */
struct kv_layout ipc_layout(void);
struct kvc_pool *ipc_pool(struct kvc *c);

/** ipc_connect_to() - a connected socket of @type */
int ipc_connect_to(const char *path, int type);

/** ipc_passes() - does a step still find the page to be the one that was granted? */
bool ipc_passes(struct kvc *c, struct kvc_pool *pool, struct kv_grant g);

/** ipc_admin() - one request to the admin socket; @ret is the reply's text, malloc'ed */
char *ipc_admin(const struct eng_private_kvmd *d, const char *request);
/* the number behind @field, colon and all, in the answer */
double ipc_admin_number(const struct eng_private_kvmd *d, const char *request,
			const char *field);

/* open descriptors of a process */
u32 ipc_nr_fds(pid_t pid);

/**
 * ipc_child() - a process that runs @fn and exits with its result
 * @arg: a number or NULL; ipc_child_with() copies @bytes of it, at most IPC_ARG_BYTES
 *
 * It has what there was at the end of ipc_start(), and the pipes that are open now. A
 * child of a process that called cuInit has no driver, so on a GPU these are forked by a
 * process that never does. ipc_fork() is a fork of this very process.
 */
#define IPC_ARG_BYTES 256
pid_t ipc_child(int (*fn)(void *arg), void *arg);
pid_t ipc_child_with(int (*fn)(void *arg), const void *arg, u32 bytes);
pid_t ipc_fork(int (*fn)(void *arg), void *arg);
int ipc_wait(pid_t pid);

/** ipc_page_put(), ipc_page_get(), ipc_page_fill() - bytes of a page, wherever they are;
 * the caller is in a step */
void ipc_page_put(struct kvc_pool *pool, u32 pfn, u64 off, const void *src, u64 bytes);
void ipc_page_get(struct kvc_pool *pool, u32 pfn, u64 off, void *dst, u64 bytes);
void ipc_page_fill(struct kvc_pool *pool, u32 pfn, int byte, u64 bytes);
u8 ipc_page_byte(struct kvc_pool *pool, u32 pfn, u64 off);

/* ------------------------------------------------------------------------ raw
 * connections */

/**
 * struct ipc_raw - a client that says what it likes
 * @fds: of the last message: HELLO's ring, sq, cq, session; POOL_REPLY's table
 */
struct ipc_raw {
	int sock;
	u32 sequence;
	int fds[250];
	u32 nr_fds;
	union {
		struct kv_msg msg;
		struct kv_msg_hello_reply hello;
		struct kv_msg_pool_reply pool;
		struct kv_msg_extents extents;
		struct kv_msg_error error;
		u64 words[KV_MSG_BYTES_MAX / 8];
	} in;
	u64 client_id;
	struct kv_ring_hdr *ring;
	struct kv_session_page *session;
	u32 sq_tail, cq_head;
	int sq_efd, cq_efd;
	u32 pool_id;
};

int raw_connect(const struct eng_private_kvmd *d);
struct kv_msg_hello raw_hello_msg(void);
void raw_send(struct ipc_raw *r, const void *msg, size_t bytes, const int *fds,
	      u32 nr_fds);

/** raw_recv() - next message. Return: its type; 0 = kvmd hung up; -1 = nothing for @ms */
int raw_recv(struct ipc_raw *r, int ms);

/** raw_open() - connect, HELLO, map ring and session page, open the small pool */
void raw_open(struct ipc_raw *r, const struct eng_private_kvmd *d);
void raw_close(struct ipc_raw *r);
void *raw_arg(struct ipc_raw *r, u32 off);

/** raw_sqe() - a request that is right: nonce, pool; the test changes what it wants */
struct kv_sqe raw_sqe(struct ipc_raw *r, u8 opcode);
void raw_push(struct ipc_raw *r, struct kv_sqe sqe);
void raw_kick(struct ipc_raw *r);

/** raw_pop() - next completion. Return: 0; -1 = none for @ms; -2 = kvmd hung up */
int raw_pop(struct ipc_raw *r, struct kv_cqe *ret, int ms);
struct kv_cqe raw_call(struct ipc_raw *r, struct kv_sqe sqe);

/* Keepers end with us: their command line names us. */
static inline pid_t ipc_keeper_pid(void)
{
	char path[300], text[200], want[32];
	DIR *dir = opendir("/proc");
	struct dirent *d;
	pid_t pid = 0;

	snprintf(want, sizeof(want), "%d", getpid());
	while (!pid && (d = readdir(dir))) {
		const char *arg[4] = {NULL};
		ssize_t n;
		int fd, nr = 0;

		snprintf(path, sizeof(path), "/proc/%s/cmdline", d->d_name);
		fd = atoi(d->d_name) > 0 ? open(path, O_RDONLY) : -1;
		n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
		if (fd >= 0)
			close(fd);
		for (ssize_t i = 0; i < n && nr < 4; i += (ssize_t)strlen(text + i) + 1) {
			text[n] = 0;
			arg[nr++] = text + i;
		}
		if (nr == 4 && !strcmp(arg[1], "--keeper-process") &&
		    !strcmp(arg[3], want))
			pid = atoi(d->d_name);
	}
	closedir(dir);
	return pid;
}

#endif
