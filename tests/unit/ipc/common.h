/* SPDX-License-Identifier: Apache-2.0 */
/*
 * common.h - a daemon in a child process and a bare client of it, for the tests of
 * kvmd/ipc.
 *
 * The client writes every byte itself, so that it can write wrong ones.
 */
#ifndef TESTS_UNIT_IPC_COMMON_H
#define TESTS_UNIT_IPC_COMMON_H

#include <cjson/cJSON.h>

#include "kvmd/daemon.h"

/**
 * struct daemon - a kvmd of the test's own, in a child process
 * @dir: its directory: kvmd.sock, admin.sock, state
 */
struct daemon {
	pid_t pid;
	char dir[64];
	char socket_path[108];
	char admin_path[108];
};

/* The daemon lies here, in its own process: same address, other memory. */
extern struct kvd daemon_kvd;

/** daemon_start() - start with --private's paths; @tweak may change options; waits for
 * ready */
void daemon_start(struct daemon *d, void (*tweak)(struct kvd_options *opt));

/** daemon_stop() - SIGTERM; asserts that it ended well; removes the directory */
void daemon_stop(struct daemon *d);

/**
 * daemon_here() - a daemon in this process, whose turns are the test's: kvd_turn(&daemon_kvd)
 *
 * Not for daemon_stop() and what asks a child.
 */
void daemon_here(struct daemon *d, u64 host_bytes);

/** daemon_here_turns() - from now on (@on) a thread makes its turns, or again nobody does */
void daemon_here_turns(bool on);

/** daemon_here_end() - end it; removes the directory */
void daemon_here_end(struct daemon *d);

/** daemon_nr_fds() - open fds of the daemon */
int daemon_nr_fds(const struct daemon *d);

/** daemon_free_fd() - lowest fd number that is not in use */
int daemon_free_fd(const struct daemon *d);

/** daemon_ask() - one admin request, given as JSON text; the caller deletes the reply */
cJSON *daemon_ask(const struct daemon *d, const char *request);

/** daemon_number() - a number of the reply to @request by path "memory.pages.free" */
double daemon_number(const struct daemon *d, const char *request, const char *path);

/** daemon_wait() - wait up to @ms until daemon_number() is @want; asserts it */
void daemon_wait(const struct daemon *d, const char *request, const char *path,
		 double want, int ms);

#define RAW_FDS_MAX 253

/**
 * struct raw - a bare client
 * @fds, @nr_fds: of the last message received
 */
struct raw {
	int fd;
	int fds[RAW_FDS_MAX];
	int nr_fds;
	struct kv_msg_hello_reply hello;
	struct kv_ring_hdr *ring;
	struct kv_sqe *sq;
	struct kv_cqe *cq;
	u8 *args;
	int sq_event, cq_event;
	struct kv_session_page *page;
	struct kv_msg_pool_reply pool;
	u32 cq_head;
};

/** raw_connect() - connect, say nothing */
void raw_connect(struct raw *c, const struct daemon *d);

/** raw_hello_fill() - a good HELLO */
void raw_hello_fill(struct kv_msg_hello *hello);

/** raw_send(), raw_send_fds() - one message; @fds may be NULL */
void raw_send(struct raw *c, const void *msg, size_t bytes);
int raw_send_fds(struct raw *c, const void *msg, size_t bytes, const int *fds,
		 int nr_fds);

/** raw_receive() - one message within 5 s, fds go to c->fds. Return: bytes; 0 hang-up */
int raw_receive(struct raw *c, void *buf, size_t room);

/** raw_hello() - HELLO and map what comes. Return: reply.result */
int raw_hello(struct raw *c, const char *name);

/** raw_hello_try() - the same; -ECONNRESET: the connection was closed instead */
int raw_hello_try(struct raw *c, const char *name);

/** raw_layout() - a small MLA layout */
void raw_layout(struct kv_layout *layout);

/** raw_pool_open() - Return: reply.result; -ECONNRESET as above */
int raw_pool_open(struct raw *c, const struct kv_layout *layout);

/** raw_open() - connect, HELLO, POOL_OPEN, all good */
void raw_open(struct raw *c, const struct daemon *d);

/** raw_submit() - put an entry into the ring and kick */
void raw_submit(struct raw *c, struct kv_sqe sqe);

/** raw_wait() - next completion within 5 s */
struct kv_cqe raw_wait(struct raw *c);

/** raw_alloc() - ALLOC; grants in @grants. Return: result */
int raw_alloc(struct raw *c, u32 nr, u32 gfp, struct kv_grant *grants);

/** raw_free() - FREE; Return: result */
int raw_free(struct raw *c, const struct kv_grant *grants, u32 nr);

/** raw_hung_up() - does the daemon close the connection within 5 s? Skips messages */
bool raw_hung_up(struct raw *c);

/** raw_close() - close everything */
void raw_close(struct raw *c);

#endif
