/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/io.h - reads and writes of the NVMe tier's file, many at a time, none waited for.
 *
 * io_uring with registered buffers and O_DIRECT; where io_uring is not to be had, a few
 * threads. kvd_io_engine() says which, and why. Buffers lie in one pool of memory that is
 * registered once. Faults (kvmd/dbg/fault.h) are injected here: what comes back is
 * what a bad disk would give.
 *
 * Thread rules: the loop thread only; the kernel or a worker touches an op's buffer until
 * its done() was called.
 */
#ifndef KVD_TIER_IO_H
#define KVD_TIER_IO_H

#include <stdbool.h>

#include "kvmd/tier/work.h"

#define KVD_IO_DEPTH_MAX 512u

struct kvd_io;

/**
 * struct kvd_io_op - one transfer, embedded in what it is for
 * @write: or read
 * @off, @addr, @bytes: multiples of 4 KiB; @addr in the pool
 * @result: bytes moved, or -errno; set before done()
 * @done: on the loop thread, from kvd_io_reap()
 * @ask_bytes: what is asked of the kernel: less than @bytes where a torn write is injected
 * @io, @work: engine's own
 */
struct kvd_io_op {
	bool write;
	u64 off;
	void *addr;
	u32 bytes;
	s64 result;
	void (*done)(struct kvd_io_op *op);
	u32 ask_bytes;
	struct kvd_io *io;
	struct kvd_work work;
};

/**
 * struct kvd_io_params - how to make an engine
 * @fd: the file; borrowed
 * @pool, @pool_bytes: memory of all buffers; borrowed
 * @depth: transfers under way, <= KVD_IO_DEPTH_MAX
 * @force_threads: do not try io_uring
 */
struct kvd_io_params {
	int fd;
	void *pool;
	u64 pool_bytes;
	u32 depth;
	bool force_threads;
};

/** kvd_io_create() - Return: 0; -ENOMEM; -EMFILE */
int kvd_io_create(const struct kvd_io_params *p, struct kvd_io **ret);

/** kvd_io_destroy() - nothing is under way; or NULL */
void kvd_io_destroy(struct kvd_io *io);

/** kvd_io_engine() - "io_uring, registered buffers", or what is missing */
const char *kvd_io_engine(const struct kvd_io *io);

/** kvd_io_degraded() - not io_uring with registered buffers */
bool kvd_io_degraded(const struct kvd_io *io);

/** kvd_io_fd() - readable when kvd_io_reap() has something to do */
int kvd_io_fd(const struct kvd_io *io);

/** kvd_io_submit() - start a transfer with the next kvd_io_flush(). Return: 0; KV_BUSY
 * @depth are under way */
int kvd_io_submit(struct kvd_io *io, struct kvd_io_op *op);

/** kvd_io_flush() - hand over what was submitted: one system call */
void kvd_io_flush(struct kvd_io *io);

/** kvd_io_reap() - done() of what has ended. Return: how many */
u32 kvd_io_reap(struct kvd_io *io);

/** kvd_io_pending() - transfers under way */
u32 kvd_io_pending(const struct kvd_io *io);

#endif
