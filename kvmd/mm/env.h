/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/env.h - what the core is given from outside: memory regions, saved counters, a log.
 *
 * mm/ and own/ make no system call and read no clock. The daemon gives memfd mappings and
 * a state directory; unit tests and the simulator give malloc and variables. Loop thread
 * only.
 */
#ifndef KVD_ENV_H
#define KVD_ENV_H

#include <stdbool.h>
#include "base/util.h"

/**
 * enum kvd_region_kind - what a region holds
 * @KVD_REGION_TABLE: a pool's published table (kv/session.h); clients map it read-only
 * @KVD_REGION_FRAMES: a pool's page records, the only truth after a crash
 * @KVD_REGION_TOKENS: token ids of sealed pages, KV_PAGE_TOKENS u32 a frame
 * @KVD_REGION_LEASES: references one session holds in one pool
 * @KVD_REGION_SCRATCH: lists and hash heads; rebuilt after a crash
 */
enum kvd_region_kind {
	KVD_REGION_TABLE,
	KVD_REGION_FRAMES,
	KVD_REGION_TOKENS,
	KVD_REGION_LEASES,
	KVD_REGION_SCRATCH,
};

/**
 * struct kvd_region - one block of memory, zeroed, page aligned, lazily backed
 * @kind: what it holds; set by the core
 * @pool_id: pool it belongs to; set by the core
 * @session_id: KVD_REGION_LEASES: client id, else 0; set by the core
 * @size_bytes: set by the core
 * @addr: set by region_alloc
 * @fd: set by region_alloc: a memfd to pass on, or -1
 */
struct kvd_region {
	enum kvd_region_kind kind;
	u32 pool_id;
	u64 session_id;
	u64 size_bytes;
	void *addr;
	int fd;
};

/* A region as large as this is looked up at random places: huge pages save the walk of
 * the page tables. Not for LEASES, of which each session has one and touches little. */
#define KVD_REGION_HUGE (4ull << 20)

/**
 * enum kvd_saved - counters that must never repeat, saved before they are used
 * @KVD_SAVED_GENERATION: no generation at or above this was ever given out
 * @KVD_SAVED_GRACE: no grace epoch at or above this was ever published
 */
enum kvd_saved { KVD_SAVED_GENERATION, KVD_SAVED_GRACE };

/**
 * struct kvd_env - services of the outside; all hooks mandatory
 * @arg: first argument of every hook; borrowed
 * @region_alloc: fill @r->addr and @r->fd. Return: 0; -ENOMEM; -EMFILE
 * @region_free: give it back
 * @save: store @value durably before returning. Return: 0 or -errno (then it is not used)
 * @log: one line; @level as syslog's (3 err, 4 warning, 6 info)
 */
struct kvd_env {
	void *arg;
	int (*region_alloc)(void *arg, struct kvd_region *r);
	void (*region_free)(void *arg, struct kvd_region *r);
	int (*save)(void *arg, enum kvd_saved what, u64 value);
	void (*log)(void *arg, int level, const char *line);
};

/**
 * struct kvd_keep_ops - who keeps the fds of extents when this process dies
 * @arg: first argument; borrowed
 * @extent_put: keep @fd too. Return: 0; -errno: nothing is kept
 * @extent_del: forget it
 */
struct kvd_keep_ops {
	void *arg;
	int (*extent_put)(void *arg, u32 pool_id, u32 index, u64 serial, int fd);
	void (*extent_del)(void *arg, u32 pool_id, u32 index, u64 serial);
};

#endif /* KVD_ENV_H */
