/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mover lies, is given nonsense, is not there, or its driver fails: jobs fail, nothing
 * else does.
 */
#include "tests/fault/mover.h"

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

KVT_MAIN()
