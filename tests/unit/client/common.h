/* SPDX-License-Identifier: Apache-2.0 */
/*
 * common.h - a kvmd that does exactly what a test tells it: one session, one pool, one
 * thread.
 *
 * It speaks the wire protocol over a real socket and real memfds, so that the library
 * under test runs unchanged, and lets a test send what a right daemon never would. What
 * it hands out follows P1: generations rise, a kill stores a further one without LIVE.
 */
#ifndef TESTS_CLIENT_COMMON_H
#define TESTS_CLIENT_COMMON_H

#include <pthread.h>
#include "kvclient.h"
#include "base/util.h"
#include "tests/kvt.h"

#define FAKE_PAGES   1024u
#define FAKE_SHIFT   4u
#define FAKE_EXTENTS (FAKE_PAGES >> FAKE_SHIFT)

struct fake;

/** fake_serve_fn() - answer one request. Return: true post @cqe, false say nothing (yet)
 */
typedef bool fake_serve_fn(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe);

/**
 * struct fake - the daemon and what it shares with its client
 * @serve: set before kvc_open(); NULL = fake_serve()
 * @check_mode, @hello_result, @silent: what HELLO says; @silent: nothing
 * @withhold_extents: no EXTENT_ADDED is sent for pages handed out
 * @poison_ring: fill the ring with 0xa5 before its set-up (cases O57)
 * @silent_pools: so many POOL_OPENs get no answer
 * @resume: the next HELLO takes the session up: same page, tags and extents; @leases are
 *	what it is said to hold
 * @hang_up_pools: so many POOL_OPENs are answered by a hang-up, and the next kvmd takes the
 *	session up
 * @pools_closed: POOL_CLOSE seen
 * @half_extents: pools are opened with extents of half the size
 * @served: requests by opcode
 */
struct fake {
	char dir[64];
	char path[108];
	int listen_fd, sock;
	pthread_t thread;
	bool stop;
	fake_serve_fn *serve;
	u32 check_mode;
	int hello_result;
	bool silent;
	bool withhold_extents;
	bool poison_ring;
	u32 silent_pools;
	bool resume;
	struct kv_lease leases[16];
	u32 nr_leases;
	u32 hang_up_pools;
	u32 pools_closed;
	bool half_extents;
	u32 backend;
	u64 table_epoch;
	int ring_fd, sq_efd, cq_efd, session_fd, table_fd;
	struct kv_ring_hdr *ring;
	struct kv_session_page *session;
	struct kv_table *table;
	struct kv_layout layout;
	struct kv_geometry geometry;
	u32 sq_head, cq_tail;
	u32 next_pfn;
	u64 generation;
	u64 extent_serial[FAKE_EXTENTS]; /* 0 = not sent */
	u64 next_serial;
	u32 served[KV_OP_NR];
	u32 unmapped; /* UNMAPPED seen */
	u32 pages_freed, free_batches;
	pthread_mutex_t lock; /* log and table: test and thread both write them */
};

struct kv_layout fake_layout(void);
void fake_start(struct fake *f);
void fake_stop(struct fake *f);
struct kvc *fake_connect(struct fake *f, u32 timeout_ms);
struct kvc_pool *fake_pool(struct fake *f, struct kvc *c);

fake_serve_fn fake_serve;
void fake_post(struct fake *f, struct kv_cqe cqe);
void *fake_arg(struct fake *f, u32 off);
u64 *fake_tag(struct fake *f, u32 pfn);
void fake_log(struct fake *f, u32 pfn, u64 tag);
u64 fake_give(struct fake *f, u32 pfn);
void fake_kill(struct fake *f, u32 pfn);
void fake_extent_add(struct fake *f, u32 index);
void fake_extent_remove(struct fake *f, u32 index);
void fake_send_revoke(struct fake *f, const struct kv_page_ref *refs, u32 nr);

#endif
