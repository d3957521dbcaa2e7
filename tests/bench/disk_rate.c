/* SPDX-License-Identifier: Apache-2.0 */
/* disk_rate.c - see disk_rate.h: a bare loop with registered buffers, nothing else. */
#include "tests/bench/disk_rate.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"

#define STEP 7919u /* a prime: each place once */

struct raw {
	const struct disk_rate *d;
	struct io_uring ring;
	u8 *buf;
	int fd;
	u64 next, step;
};

static void raw_next(struct raw *w, u32 i)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&w->ring);
	u64 at = w->next * w->step % w->d->nr;
	u64 off = at / w->d->per_group * w->d->group_bytes +
		  at % w->d->per_group * w->d->bytes;
	u8 *p = w->buf + (u64)i * w->d->bytes;

	w->next++;
	if (w->d->write)
		io_uring_prep_write_fixed(sqe, w->fd, p, w->d->bytes, off, 0);
	else
		io_uring_prep_read_fixed(sqe, w->fd, p, w->d->bytes, off, 0);
	io_uring_sqe_set_data64(sqe, i);
}

static int raw_loop(struct raw *w)
{
	u32 busy = 0;
	int r = 0;

	for (; busy < w->d->depth && w->next < w->d->nr; busy++)
		raw_next(w, busy);
	while (busy && !r) {
		struct io_uring_cqe *cqe;

		io_uring_submit(&w->ring);
		r = io_uring_wait_cqe(&w->ring, &cqe);
		if (!r && cqe->res != (int)w->d->bytes)
			r = cqe->res < 0 ? cqe->res : -EIO;
		if (r)
			break;
		if (w->next < w->d->nr)
			raw_next(w, (u32)io_uring_cqe_get_data64(cqe));
		else
			busy--;
		io_uring_cqe_seen(&w->ring, cqe);
	}
	return r;
}

static int raw_timed(struct raw *w, double *ret_gb_s)
{
	struct iovec iov = {w->buf, (size_t)w->d->depth * w->d->bytes};
	u64 start;
	int r = io_uring_queue_init(w->d->depth, &w->ring, 0);

	if (r)
		return r;
	r = io_uring_register_buffers(&w->ring, &iov, 1);
	start = kv_now_ns();
	if (!r)
		r = raw_loop(w);
	*ret_gb_s = (double)w->d->nr * w->d->bytes / (double)(kv_now_ns() - start);
	io_uring_queue_exit(&w->ring);
	return r;
}

static int pass(const char *path, const struct disk_rate *d, u64 step, double *ret_gb_s)
{
	struct raw w = {.d = d, .step = step};
	size_t bytes = (size_t)d->depth * d->bytes;
	int r;

	w.fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
	if (w.fd < 0)
		return -errno;
	/* The same kind of memory as the tiers': how scattered it is decides how a transfer
	 * is cut. */
	w.buf = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		     0);
	r = w.buf == MAP_FAILED ? -ENOMEM : 0;
	if (!r) {
		memset(w.buf, 0x5a, bytes);
		r = raw_timed(&w, ret_gb_s);
		munmap(w.buf, bytes);
	}
	close(w.fd);
	return r;
}

int disk_rate(const char *path, const struct disk_rate *d, double *ret_gb_s)
{
	double apart = 0;
	int r = pass(path, d, 1, ret_gb_s);

	if (!r && d->nr % STEP)
		r = pass(path, d, STEP, &apart);
	*ret_gb_s = KV_MAX(*ret_gb_s, apart);
	return r;
}
