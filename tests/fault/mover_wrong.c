/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mover lies, is given nonsense, is not there, or its driver fails: jobs fail, nothing
 * else does.
 */
#include "tests/fault/mover.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>

/* Calls of this process that fail, in place of the library's: the @at-th of one kind. */
enum call { CALL_WATCH, CALL_EVENTFD, CALL_SOCKETPAIR, CALL_FALLOCATE, CALLS };

static struct {
	u32 at, times;
	int error;
} fails[CALLS];

static bool fails_now(enum call c)
{
	if (!fails[c].times || (fails[c].at > 1 && fails[c].at--))
		return false;
	fails[c].times--;
	errno = fails[c].error;
	return true;
}

int epoll_ctl(int epfd, int op, int fd, struct epoll_event *ev)
{
	if (op == EPOLL_CTL_ADD && fails_now(CALL_WATCH))
		return -1;
	return (int)syscall(SYS_epoll_ctl, epfd, op, fd, ev);
}

int eventfd(unsigned int count, int flags)
{
	if (fails_now(CALL_EVENTFD))
		return -1;
	return (int)syscall(SYS_eventfd2, count, flags);
}

int socketpair(int domain, int type, int protocol, int fds[2])
{
	if (fails_now(CALL_SOCKETPAIR))
		return -1;
	return (int)syscall(SYS_socketpair, domain, type, protocol, fds);
}

int fallocate(int fd, int mode, off_t offset, off_t len)
{
	if (fails_now(CALL_FALLOCATE))
		return -1;
	return (int)syscall(SYS_fallocate, fd, mode, offset, len);
}

KVT_TEST(mover_that_lies_is_killed)
{
	struct result r;
	struct rig rig;
	u64 id;

	rig_open(&rig, false, NULL);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 1, 0), 0);
	kill(kvd_mover_pid(rig.m), SIGSTOP);
	id = submit_run(&rig, &r, KVD_MOVER_OUT, 0, 8, 0);
	/* "It is done", before it was handed over. */
	rig.m->ring->cq[rig.m->ring->cq_tail % KVD_MV_CQ] =
		(struct kvd_mv_done){.job = id};
	__atomic_add_fetch(&rig.m->ring->cq_tail, 1, __ATOMIC_RELEASE);
	turn(&rig, 0);
	KVT_EXPECT_EQ(r.calls, 0);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_DYING);
	wait_done(&rig, &r); /* by the next one */
	KVT_EXPECT_EQ(r.status, 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->deaths, 1);
	KVT_EXPECT_HAS(kvd_mover_error(rig.m), "which it does not have");
	/* More than there is room for. */
	__atomic_add_fetch(&rig.m->ring->cq_tail, KVD_MV_CQ + 1, __ATOMIC_RELEASE);
	turns(&rig, 50);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->deaths, 2);
	rig_close(&rig);
}

KVT_TEST(bad_jobs_are_refused_whole)
{
	struct rig rig;
	struct kvd_mover_copy c[2];
	struct kvd_mover_job job = {.nr = 2, .copies = c, .done = done};
	const struct kvd_mover_copy bad[] = {
		{&rig.extents[1], EXTENT_BYTES, 0, 1},
		{&rig.extents[1], 1, 0, EXTENT_BYTES},
		{&rig.extents[1], ~0ull, 0, 2},
		{&rig.extents[1], 0, POOL_BYTES, 1},
		{&rig.extents[1], 0, POOL_BYTES - 1, 2},
		{&rig.extents[1], 0, ~0ull, 2},
		{&rig.extents[1], 0, 0, 0},
	};
	u64 id = 0;

	rig_open(&rig, false, NULL);
	c[0] = (struct kvd_mover_copy){&rig.extents[0], 0, 0, PAGE};
	for (u32 i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		c[1] = bad[i];
		KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), -EINVAL);
	}
	job.nr = 0;
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), -EINVAL);
	job.nr = KVD_MOVER_COPIES_MAX + 1;
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), -EINVAL);
	KVT_EXPECT_EQ(id, 0);
	KVT_EXPECT_EQ(rig.nr_given, rig.nr_put);
	KVT_EXPECT_EQ(kvd_mover_nr_jobs(rig.m), 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->starts, 0);
	rig_close(&rig);
}

KVT_TEST(too_many_jobs_are_busy)
{
	static struct result r[KVD_MOVER_JOBS_MAX];
	struct kvd_mover_copy c;
	struct kvd_mover_job job = {.nr = 1, .copies = &c, .done = done};
	struct rig rig;
	u64 id;

	rig_open(&rig, false, NULL);
	c = (struct kvd_mover_copy){&rig.extents[0], 0, 0, PAGE};
	for (u32 i = 0; i < KVD_MOVER_JOBS_MAX; i++) {
		job.arg = &r[i];
		KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), 0);
	}
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), KV_BUSY);
	for (u32 i = 0; i < KVD_MOVER_JOBS_MAX; i++) {
		wait_done(&rig, &r[i]);
		KVT_EXPECT_EQ(r[i].status, 0);
	}
	rig_close(&rig);
}

static int open_fds(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;

	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

KVT_TEST(missing_program_is_an_error_and_is_tried_again_slowly)
{
	struct rig rig;
	int fds;

	rig_open_with(&rig, false, NULL, "/nonexistent/kvmd");
	fds = open_fds();
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 1, 0), -ENOENT);
	KVT_EXPECT_HAS(kvd_mover_error(rig.m), "/nonexistent/kvmd: No such file");
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_BACKOFF);
	KVT_EXPECT_EQ(open_fds(), fds);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 1, 0), -ENOENT);
	KVT_EXPECT(rig.m->backoff_ns >= 200 * KV_NSEC_PER_MSEC);
	KVT_EXPECT_EQ(open_fds(), fds);
	KVT_EXPECT_EQ(rig.nr_given, rig.nr_put);
	rig_close(&rig);
}

/* Each call by which it is started fails once: the job is told, nothing is left, and the next
 * one is served. */
static void start_call_fails(enum call c, u32 at, int error)
{
	struct rig rig;
	int fds;

	rig_open(&rig, false, NULL);
	fds = open_fds();
	fails[c].at = at;
	fails[c].times = 1;
	fails[c].error = error;
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 1, 0), -error);
	KVT_EXPECT_EQ(fails[c].times, 0);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_BACKOFF);
	KVT_EXPECT_EQ(kvd_mover_pid(rig.m), 0);
	KVT_EXPECT_EQ(open_fds(), fds);
	rig.m->retry_ns = 0;
	round_trip(&rig, 0);
	rig_close(&rig);
}

KVT_TEST_T(each_call_of_a_start_may_fail, 120)
{
	for (u32 at = 1; at <= 3; at++)
		start_call_fails(CALL_WATCH, at, ENOSPC);
	for (u32 at = 1; at <= 2; at++)
		start_call_fails(CALL_EVENTFD, at, EMFILE);
	start_call_fails(CALL_SOCKETPAIR, 1, EMFILE);
}

/* fallocate() is not started again by itself: a frozen cgroup, a debugger, ... */
KVT_TEST(interrupted_pool_is_filled_all_the_same)
{
	struct rig rig;

	fails[CALL_FALLOCATE].error = EINTR;
	fails[CALL_FALLOCATE].times = 0;
	rig_open(&rig, false, NULL);
	fails[CALL_FALLOCATE].times = 5;
	KVT_EXPECT_EQ(kvd_mover_pool_fill(rig.m, NULL), 0);
	KVT_EXPECT_EQ(fails[CALL_FALLOCATE].times, 0);
	rig_close(&rig);
}

/* Each driver call of the mover fails once; then the next try works, and nothing is left. */
static void driver_call_fails(const char *entry, u32 n)
{
	struct result in;
	char text[64];
	struct rig rig;
	int fds;

	rig_open(&rig, true, NULL);
	fds = open_fds();
	snprintf(text, sizeof(text), "%s:%u", entry, n);
	setenv("FAKE_CUDA_FAIL", text, 1);
	submit_run(&rig, &in, KVD_MOVER_IN, 0, 8, 0);
	wait_done(&rig, &in);
	unsetenv("FAKE_CUDA_FAIL");
	turns(&rig, 10);
	if (rig.m->state == KVD_MOVER_BACKOFF)
		KVT_EXPECT_EQ(open_fds(), fds);
	rig.m->retry_ns = 0;
	kvd_mover_extent_drop(rig.m, 1, 0,
			      7); /* what could not be mapped is tried anew */
	turns(&rig, 20);
	round_trip(&rig, 0);
	rig_close(&rig);
}

KVT_TEST(each_driver_call_may_fail)
{
	static const char *const entries[] = {
		"cuDeviceGetCount",
		"cuDeviceGet",
		"cuDeviceGetUuid_v2",
		"cuDevicePrimaryCtxRetain",
		"cuCtxPushCurrent_v2",
		"cuStreamCreate",
		"cuEventCreate",
		"cuMemHostRegister_v2",
		"cuMemImportFromShareableHandle",
		"cuMemAddressReserve",
		"cuMemMap",
		"cuMemSetAccess",
		"cuMemRelease",
		"cuMemcpyHtoDAsync_v2",
		"cuEventRecord",
		"cuEventQuery",
	};

	for (u32 i = 0; i < KV_ARRAY_SIZE(entries); i++)
		driver_call_fails(entries[i], 1);
	driver_call_fails("cuStreamCreate", 3);
	driver_call_fails("cuEventCreate", 100);
}

/* A run that the driver refuses fails its job and no other. */
KVT_TEST(refused_copy_fails_its_job_only)
{
	struct rig rig;

	setenv("FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:2", 1);
	rig_open(&rig, true, NULL);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_IN, 0, 8, 0), 0);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_IN, 0, 8, 0), -ENOMEM);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_IN, 0, 8, 0), 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->deaths, 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->failed, 1);
	rig_close(&rig);
}

/* Runs that go as a batch, and those of a driver that has none. */
KVT_TEST(refused_batch_fails_its_job_only)
{
	struct rig rig;

	setenv("FAKE_CUDA_FAIL", "cuMemcpyBatchAsync_v2:2", 1);
	rig_open(&rig, true, NULL);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_IN, 0, 16, 0), 0);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_IN, 0, 16, 0), -ENOMEM);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->deaths, 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->failed, 1);
	round_trip(&rig, 0);
	rig_close(&rig);
}

KVT_TEST(driver_without_batches_copies_one_by_one)
{
	struct rig rig;

	setenv("FAKE_CUDA_NO_BATCH", "1", 1);
	rig_open(&rig, true, NULL);
	round_trip(&rig, 0);
	round_trip(&rig, 1);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->failed, 0);
	rig_close(&rig);
}

/* An earlier kvmd's mover is ended, and nothing starts before its end is proven. */
KVT_TEST(mover_of_an_earlier_kvmd_is_ended_first)
{
	struct result r;
	struct rig rig;
	pid_t pid;
	int fd;

	rig_open(&rig, true, NULL);
	rig.prove_at_once = false;
	pid = fork();
	if (!pid) {
		pause();
		_exit(0);
	}
	fd = (int)syscall(434 /* pidfd_open */, pid, 0);
	KVT_EXPECT(fd >= 0);
	kvd_mover_adopt(rig.m, pid, fd, KVD_MOVER_LISTED);
	submit_run(&rig, &r, KVD_MOVER_IN, 0, 4, 0);
	wait_state(&rig, KVD_MOVER_ENDING);
	turns(&rig, 50);
	KVT_EXPECT_EQ(rig.proofs, 1);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->starts, 0);
	kvd_mover_ended(rig.m);
	wait_done(&rig, &r);
	KVT_EXPECT_EQ(r.status, 0);
	rig_close(&rig);
}

/* Its end cannot be watched for at first: it is noticed all the same. */
KVT_TEST(end_of_an_earlier_kvmds_mover_is_watched_for_later)
{
	struct result r;
	struct rig rig;
	pid_t pid;
	int fd;

	rig_open(&rig, false, NULL);
	pid = fork();
	if (!pid) {
		pause();
		_exit(0);
	}
	fd = (int)syscall(SYS_pidfd_open, pid, 0);
	KVT_EXPECT(fd >= 0);
	fails[CALL_WATCH].at = 1;
	fails[CALL_WATCH].times = 3;
	fails[CALL_WATCH].error = ENOMEM;
	kvd_mover_adopt(rig.m, pid, fd, KVD_MOVER_LISTED);
	submit_run(&rig, &r, KVD_MOVER_IN, 0, 4, 0);
	wait_done(&rig, &r);
	KVT_EXPECT_EQ(r.status, 0);
	rig_close(&rig);
}

KVT_MAIN()
