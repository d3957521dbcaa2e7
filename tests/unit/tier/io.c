/* SPDX-License-Identifier: Apache-2.0 */
/* kvmd/tier/io: transfers that the kernel does not take at once. */
#include "kvmd/tier/io.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kv/outcome.h"
#include "tests/unit/tier/common.h"

#define BLOCK 4096u
#define NR    8u

static int refuse; /* so many times, with @refuse_with */
static int refuse_with;
static u32 refused;

/* In place of liburing's. */
int io_uring_submit(struct io_uring *ring)
{
	static int (*real)(struct io_uring * ring);

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "io_uring_submit");
	KVT_EXPECT(real);
	if (!refuse)
		return real(ring);
	refuse--;
	refused++;
	return refuse_with;
}

static u8 *pool;
static u32 ended;

static void done(struct kvd_io_op *op)
{
	KVT_EXPECT_EQ(op->result, op->bytes);
	ended++;
}

static struct kvd_io *io_open(int *ret_fd)
{
	struct kvd_io_params p = {.pool_bytes = NR * BLOCK, .depth = NR};
	struct kvd_io *io;

	pool = mmap(NULL, NR * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
		    -1, 0);
	KVT_EXPECT(pool != MAP_FAILED);
	p.pool = pool;
	p.fd = *ret_fd = open(scratch("file"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	KVT_EXPECT(p.fd >= 0);
	KVT_EXPECT_EQ(kvd_io_create(&p, &io), 0);
	if (!strncmp(kvd_io_engine(io), "threads", 7))
		KVT_SKIP("no io_uring");
	return io;
}

static void reap_until(struct kvd_io *io, u32 nr)
{
	while (ended < nr)
		kvd_io_reap(io);
}

/* Refused once or often, with any of what the kernel says: it goes out with the next flush,
 * though nothing is added meanwhile. */
KVT_TEST(refused_transfers_go_out_with_the_next_flush)
{
	static const int reasons[] = {-EAGAIN, -EBUSY, -ENOMEM, -EINTR};
	struct kvd_io_op ops[NR];
	struct kvd_io *io;
	int fd;

	io = io_open(&fd);
	for (u32 r = 0; r < KV_ARRAY_SIZE(reasons); r++) {
		ended = refused = 0;
		refuse = (int)r + 1;
		refuse_with = reasons[r];
		for (u32 i = 0; i < NR; i++) {
			memset(pool + i * BLOCK, (int)(16 * r + i), BLOCK);
			ops[i] = (struct kvd_io_op){.write = true,
						    .off = i * BLOCK,
						    .addr = pool + i * BLOCK,
						    .bytes = BLOCK,
						    .done = done};
			KVT_EXPECT_EQ(kvd_io_submit(io, &ops[i]), 0);
		}
		KVT_EXPECT_EQ(kvd_io_submit(io, &ops[0]), KV_BUSY);
		for (u32 i = 0; i <= r + 1; i++)
			kvd_io_flush(io);
		KVT_EXPECT_EQ(refused, r + 1);
		reap_until(io, NR);
		KVT_EXPECT_EQ(kvd_io_pending(io), 0);
		for (u32 i = 0; i < NR; i++) {
			u8 byte;

			KVT_EXPECT_EQ(pread(fd, &byte, 1, i * BLOCK), 1);
			KVT_EXPECT_EQ(byte, 16 * r + i);
		}
	}
	kvd_io_destroy(io);
	close(fd);
}

TIER_MAIN("/tmp")
