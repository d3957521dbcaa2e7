/* SPDX-License-Identifier: Apache-2.0 */
/* tier/io.c - see io.h. Loop thread only, but for run() of the fallback. */
#include "kvmd/tier/io.h"

#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/mutant.h"
#include "kv/outcome.h"
#include "kvmd/dbg/fault.h"

#define REGISTER_TRIES 7u	    /* 127 ms in all */
#define BUFFER_BYTES   (1ull << 30) /* the kernel's limit for one registered buffer */
#define BUFFERS_MAX    1024u
#define SECTOR_BYTES   4096u
#define REAP_BATCH     64u
#define THREADS	       8u

struct kvd_io {
	struct kvd_io_params p;
	bool uring;
	bool fixed;
	char engine[128];
	struct io_uring ring;
	int event_fd;
	struct kvd_workers *workers; /* the fallback's; else NULL */
	u32 nr_pending;
};

/* ------------------------------------------------------------------- faults */

static void fault_start(struct kvd_io_op *op)
{
	op->ask_bytes = op->bytes;
	if (op->write && kvd_fault(KVD_FAULT_tier_write_torn))
		op->ask_bytes = KV_MAX(op->bytes / 2 & ~(SECTOR_BYTES - 1), SECTOR_BYTES);
}

static void fault_end(struct kvd_io_op *op)
{
	if (op->result != (s64)op->ask_bytes)
		return;
	op->result = op->bytes; /* a torn write says that all went well */
	if (op->write) {
		if (kvd_fault(KVD_FAULT_tier_write_eio))
			op->result = -EIO;
		if (kvd_fault(KVD_FAULT_tier_write_full))
			op->result = -ENOSPC;
		return;
	}
	if (kvd_fault(KVD_FAULT_tier_read_eio))
		op->result = -EIO;
	if (kvd_fault(KVD_FAULT_tier_read_short))
		op->result = op->bytes - SECTOR_BYTES;
	if (kvd_fault(KVD_FAULT_tier_read_flip))
		((u8 *)op->addr)[op->bytes / 2] ^= 0x10;
}

static void op_end(struct kvd_io *io, struct kvd_io_op *op, s64 result)
{
	kv_assert(io->nr_pending);
	io->nr_pending--;
	op->result = result;
	fault_end(op);
	op->done(op);
}

/* ----------------------------------------------------------------- io_uring */

static int buffers_register(struct kvd_io *io)
{
	struct iovec iov[BUFFERS_MAX];
	u64 off = 0;
	u32 nr = 0;

	while (off < io->p.pool_bytes && nr < BUFFERS_MAX) {
		u64 n = KV_MIN(BUFFER_BYTES, io->p.pool_bytes - off);

		iov[nr++] = (struct iovec){(u8 *)io->p.pool + off, n};
		off += n;
	}
	return off < io->p.pool_bytes ? -E2BIG
				      : io_uring_register_buffers(&io->ring, iov, nr);
}

/* The kernel gives locked memory back some time after its ring has gone: what fits the limit is
 * asked for again (O60). At a start only. */
static int buffers_register_again(struct kvd_io *io)
{
	struct rlimit lim = {0};
	int r = buffers_register(io);

	if (getrlimit(RLIMIT_MEMLOCK, &lim) || lim.rlim_cur < io->p.pool_bytes)
		return r;
	for (u32 i = 0; r == -ENOMEM && i < REGISTER_TRIES; i++) {
		usleep(1000u << i);
		r = buffers_register(io);
	}
	return r;
}

static int uring_start(struct kvd_io *io)
{
	struct io_uring_params params;
	int r;

	if (io->p.force_threads)
		return -ECANCELED;
	memset(&params, 0, sizeof(params));
	params.flags = IORING_SETUP_CLAMP;
	r = io_uring_queue_init_params(io->p.depth, &io->ring, &params);
	if (r)
		return r;
	io_uring_ring_dontfork(&io->ring);
	io->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	r = io->event_fd < 0 ? -errno
			     : io_uring_register_eventfd(&io->ring, io->event_fd);
	if (r)
		goto exit_ring;
	r = buffers_register_again(io);
	if (r && KV_MUTANT(tier_register_or_nothing))
		goto exit_ring;
	io->fixed = !r;
	if (r)
		snprintf(io->engine, sizeof(io->engine),
			 "io_uring, buffers not registered: %s", strerror(-r));
	else
		snprintf(io->engine, sizeof(io->engine), "io_uring, registered buffers");
	io->uring = true;
	return 0;
exit_ring:
	if (io->event_fd >= 0)
		close(io->event_fd);
	io->event_fd = -1;
	io_uring_queue_exit(&io->ring);
	return r;
}

static void uring_submit(struct kvd_io *io, struct kvd_io_op *op)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);
	u32 buffer = (u32)((u64)((u8 *)op->addr - (u8 *)io->p.pool) / BUFFER_BYTES);

	if (!sqe) {
		io_uring_submit(&io->ring);
		sqe = io_uring_get_sqe(&io->ring);
	}
	kv_assert(sqe);
	if (io->fixed && op->write)
		io_uring_prep_write_fixed(sqe, io->p.fd, op->addr, op->ask_bytes, op->off,
					  (int)buffer);
	else if (io->fixed)
		io_uring_prep_read_fixed(sqe, io->p.fd, op->addr, op->ask_bytes, op->off,
					 (int)buffer);
	else if (op->write)
		io_uring_prep_write(sqe, io->p.fd, op->addr, op->ask_bytes, op->off);
	else
		io_uring_prep_read(sqe, io->p.fd, op->addr, op->ask_bytes, op->off);
	io_uring_sqe_set_data(sqe, op);
}

static u32 uring_reap(struct kvd_io *io)
{
	struct io_uring_cqe *batch[REAP_BATCH];
	struct kvd_io_op *ops[REAP_BATCH];
	s64 results[REAP_BATCH];
	u32 nr, all = 0;
	u64 count;
	ssize_t n = read(io->event_fd, &count, sizeof(count));

	(void)n;
	do {
		nr = io_uring_peek_batch_cqe(&io->ring, batch, REAP_BATCH);
		/* Copied first: done() submits, which may move the ring. */
		for (u32 i = 0; i < nr; i++) {
			ops[i] = io_uring_cqe_get_data(batch[i]);
			results[i] = batch[i]->res;
		}
		io_uring_cq_advance(&io->ring, nr);
		for (u32 i = 0; i < nr; i++)
			op_end(io, ops[i], results[i]);
		all += nr;
	} while (nr == REAP_BATCH);
	return all;
}

/* ------------------------------------------------------------------ threads */

static void thread_run(struct kvd_work *w)
{
	struct kvd_io_op *op = kv_container_of(w, struct kvd_io_op, work);
	ssize_t n;

	do {
		n = op->write ? pwrite(op->io->p.fd, op->addr, op->ask_bytes,
				       (off_t)op->off)
			      : pread(op->io->p.fd, op->addr, op->ask_bytes,
				      (off_t)op->off);
	} while (n < 0 && errno == EINTR);
	op->result = n < 0 ? -errno : n;
}

static void thread_done(struct kvd_work *w)
{
	struct kvd_io_op *op = kv_container_of(w, struct kvd_io_op, work);

	op_end(op->io, op, op->result);
}

/* ---------------------------------------------------------------------- api */

int kvd_io_create(const struct kvd_io_params *p, struct kvd_io **ret)
{
	struct kvd_io *io = calloc(1, sizeof(*io));
	int r;

	kv_assert(p->depth && p->depth <= KVD_IO_DEPTH_MAX);
	if (!io)
		return -ENOMEM;
	io->p = *p;
	io->event_fd = -1;
	r = uring_start(io);
	if (r)
		snprintf(io->engine, sizeof(io->engine), "threads (io_uring: %s)",
			 p->force_threads ? "switched off" : strerror(-r));
	if (r)
		r = kvd_workers_create(KV_MIN(p->depth, THREADS), &io->workers);
	if (r) {
		free(io);
		return r;
	}
	*ret = io;
	return 0;
}

void kvd_io_destroy(struct kvd_io *io)
{
	if (!io)
		return;
	kv_assert(!io->nr_pending);
	if (io->uring) {
		io_uring_queue_exit(&io->ring);
		close(io->event_fd);
	}
	kvd_workers_destroy(io->workers);
	free(io);
}

const char *kvd_io_engine(const struct kvd_io *io)
{
	return io->engine;
}

bool kvd_io_degraded(const struct kvd_io *io)
{
	return !io->uring || !io->fixed;
}

int kvd_io_fd(const struct kvd_io *io)
{
	return io->uring ? io->event_fd : kvd_workers_fd(io->workers);
}

int kvd_io_submit(struct kvd_io *io, struct kvd_io_op *op)
{
	kv_assert(op->bytes && !(op->bytes % SECTOR_BYTES) && !(op->off % SECTOR_BYTES));
	kv_assert((u8 *)op->addr >= (u8 *)io->p.pool &&
		  (u8 *)op->addr + op->bytes <= (u8 *)io->p.pool + io->p.pool_bytes);
	if (io->nr_pending == io->p.depth)
		return KV_BUSY;
	io->nr_pending++;
	op->io = io;
	fault_start(op);
	if (io->uring) {
		uring_submit(io, op);
		return 0;
	}
	op->work.run = thread_run;
	op->work.done = thread_done;
	kvd_work_submit(io->workers, &op->work);
	return 0;
}

void kvd_io_flush(struct kvd_io *io)
{
	/* What the kernel does not take now, for want of memory, is there the next time. */
	if (io->uring && io_uring_sq_ready(&io->ring))
		io_uring_submit(&io->ring);
}

u32 kvd_io_reap(struct kvd_io *io)
{
	return io->uring ? uring_reap(io) : kvd_workers_reap(io->workers);
}

u32 kvd_io_pending(const struct kvd_io *io)
{
	return io->nr_pending;
}
