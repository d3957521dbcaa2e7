/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attach.h - from the start of a process to its first usable page.
 *
 * Every measured process is this program again, started anew. There are two kinds: one
 * that uses the client library as an engine does, and one that speaks the protocol itself
 * and so can time each driver call of each extent.
 */
#ifndef KVB_ATTACH_H
#define KVB_ATTACH_H

#include "safety.h"

/**
 * struct attach_times - what a measured process reports; ns from the parent's spawn
 * @main: main() was reached
 * @init: cuInit has returned (0 on the host)
 * @context: a context is current
 * @open: HELLO is answered
 * @pool: the pool is open, its table mapped
 * @first: a page was given and its extent is mapped
 * @used: the page was written and read
 * @all: every extent of the pool is mapped
 * @import, @map, @access: sums over all extents (only the raw kind)
 */
struct attach_times {
	u64 main;
	u64 init;
	u64 context;
	u64 open;
	u64 pool;
	u64 first;
	u64 used;
	u64 all;
	u64 import;
	u64 map;
	u64 access;
	u64 extent_bytes;
	u32 nr_extents;
	u32 failed;
};

/** attach_layout() - Kimi K2's pages in FP8: 61 layers, 2.27 MB */
struct kv_layout attach_layout(void);

/** attach_owner() - fill the pool, say so on @fd, hold it until @fd is closed */
int attach_owner(enum kvb_backend b, const char *socket_path, int fd);

/** attach_engine() - the library's way; struct attach_times goes to @fd */
int attach_engine(enum kvb_backend b, const char *socket_path, int fd, u64 start_ns);

/** attach_raw() - the protocol by hand, each driver call timed */
int attach_raw(enum kvb_backend b, const char *socket_path, int fd, u64 start_ns);

#endif
