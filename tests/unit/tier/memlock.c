/* SPDX-License-Identifier: Apache-2.0 */
/*
 * O60, memlock accounting (liburing 365, 157): buffers that may not be registered are used
 * unregistered, and kvd_io_engine() says so; a hundred starts in a row all work, although the
 * kernel gives locked memory back some time after its ring has gone.
 */
#include "tests/unit/tier/common.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvmd/tier/io.h"

#define LIMIT  (8ull << 20)
#define NOBODY 65534
#define STARTS 100u

static bool done;

static void is_done(struct kvd_io_op *op)
{
	done = true;
}

static bool one_write(struct kvd_io *io, void *addr)
{
	struct kvd_io_op op = {
		.write = true, .addr = addr, .bytes = 4096, .done = is_done};

	done = false;
	memset(addr, 0x5a, 4096);
	if (kvd_io_submit(io, &op))
		return false;
	kvd_io_flush(io);
	for (u32 i = 0; i < 2000 && !done; i++) {
		struct pollfd p = {.fd = kvd_io_fd(io), .events = POLLIN};

		poll(&p, 1, 10);
		kvd_io_reap(io);
	}
	return done && op.result == 4096;
}

/* As a user whose locked memory is counted. Return: exit status; unregistered starts by pipe */
static int starts(int fd, u64 pool_bytes, int tell)
{
	struct rlimit lim = {LIMIT, LIMIT};
	u8 *pool = mmap(NULL, pool_bytes, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	u32 unregistered = 0;

	if (pool == MAP_FAILED || setrlimit(RLIMIT_MEMLOCK, &lim) ||
	    (!getuid() && (setgid(NOBODY) || setuid(NOBODY))))
		return 2;
	for (u32 i = 0; i < STARTS; i++) {
		struct kvd_io_params p = {
			.fd = fd, .pool = pool, .pool_bytes = pool_bytes, .depth = 4};
		struct kvd_io *io;

		if (kvd_io_create(&p, &io))
			return 3;
		if (strstr(kvd_io_engine(io), "threads"))
			return strstr(kvd_io_engine(io), "Cannot allocate") ? 4 : 77;
		if (kvd_io_degraded(io)) {
			unregistered++;
			if (!strstr(kvd_io_engine(io), "buffers not registered: Cannot"))
				return 5;
		}
		if (!one_write(io, pool + 4096))
			return 6;
		kvd_io_destroy(io);
	}
	return write(tell, &unregistered, sizeof(unregistered)) == sizeof(unregistered)
		       ? 0
		       : 7;
}

static u32 starts_as_child(u64 pool_bytes)
{
	char path[] = "/tmp/kvmd-o60-XXXXXX";
	int fd = mkstemp(path), tell[2], status;
	u32 unregistered = ~0u;
	pid_t pid;

	KVT_EXPECT(fd >= 0 && !unlink(path) && !pipe(tell));
	pid = fork();
	if (pid == 0)
		_exit(starts(fd, pool_bytes, tell[1]));
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	close(fd);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		KVT_SKIP("no io_uring here");
	KVT_EXPECT_EQ(status, 0);
	KVT_EXPECT_EQ(read(tell[0], &unregistered, sizeof(unregistered)),
		      (ssize_t)sizeof(unregistered));
	close(tell[0]);
	close(tell[1]);
	return unregistered;
}

KVT_TEST_T(o60_memlock_is_short, 60)
{
	KVT_EXPECT_EQ(starts_as_child(2 * LIMIT), STARTS);
}

KVT_TEST_T(o60_a_hundred_starts_in_a_row, 60)
{
	u32 unregistered = starts_as_child(LIMIT / 2);

	KVT_NOTE("%u of %u starts found the last one's memory still counted",
		 unregistered, STARTS);
	KVT_EXPECT_LE(unregistered, STARTS / 2); /* none on a quiet machine */
}

KVT_MAIN()
