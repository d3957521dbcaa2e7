/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mover, on host memory and on the fake GPU: bytes, order, cancelling, deadlines, and
 * its death at every point of a job. The daemon's part (NVML, the keeper) is played here.
 */
#include "tests/fault/mover.h"

/* Scattered pages of all extents in one batch, there and back in another order. */
static void scattered(struct rig *rig)
{
	struct kvd_mover_copy copies[48];
	struct kvd_mover_job job = {
		.dir = KVD_MOVER_IN, .nr = 48, .copies = copies, .done = done};
	struct result r = {0};
	u64 id;

	job.arg = &r;
	fill(rig->pool, 48 * PAGE);
	for (u32 i = 0; i < 48; i++)
		copies[i] = (struct kvd_mover_copy){&rig->extents[i % 3],
						    (i * 7 % 64) * PAGE, i * PAGE, PAGE};
	KVT_EXPECT_EQ(kvd_mover_submit(rig->m, &job, &id), 0);
	wait_done(rig, &r);
	KVT_EXPECT_EQ(r.status, 0);
	for (u32 i = 0; i < 48; i++)
		copies[i].pool_off = 8 * MIB + (47 - i) * PAGE;
	memset(&r, 0, sizeof(r));
	job.dir = KVD_MOVER_OUT;
	KVT_EXPECT_EQ(kvd_mover_submit(rig->m, &job, &id), 0);
	wait_done(rig, &r);
	KVT_EXPECT_EQ(r.status, 0);
	for (u32 i = 0; i < 48; i++)
		KVT_EXPECT_EQ(memcmp(rig->pool + i * PAGE,
				     rig->pool + 8 * MIB + (47 - i) * PAGE, PAGE),
			      0);
}

static void moves(bool gpu)
{
	const struct kvd_mover_stats *s;
	struct rig rig;

	rig_open(&rig, gpu, NULL);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_OFF); /* lazy */
	turns(&rig, 5);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->starts, 0);
	for (u32 i = 0; i < NR_EXTENTS; i++)
		round_trip(&rig, i);
	scattered(&rig);
	s = kvd_mover_stats(rig.m);
	KVT_EXPECT_EQ(s->starts, 1);
	KVT_EXPECT_EQ(s->jobs, 8);
	KVT_EXPECT_EQ(s->failed, 0);
	KVT_EXPECT_EQ(s->in_bytes, (3 * 16 + 48) * PAGE);
	KVT_EXPECT_EQ(s->out_bytes, s->in_bytes);
	KVT_EXPECT_EQ(rig.nr_given, 3);
	KVT_EXPECT_EQ(rig.nr_put, 0);
	rig_close(&rig);
}

KVT_TEST(host_bytes_go_out_and_in)
{
	moves(false);
}

KVT_TEST(cuda_bytes_go_out_and_in)
{
	moves(true);
}

/* facts F-mover: neighbours become one copy. */
KVT_TEST(neighbours_become_one_run)
{
	struct rig rig;

	rig_open(&rig, false, NULL);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 16, 0), 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->copies, 16);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->runs, 1);
	rig_close(&rig);
}

KVT_TEST(jobs_are_reported_as_they_finish)
{
	struct kvd_mover_copy copies[KVD_MOVER_COPIES_MAX];
	struct kvd_mover_job big = {.dir = KVD_MOVER_OUT,
				    .nr = KV_ARRAY_SIZE(copies),
				    .copies = copies,
				    .done = done};
	struct result a = {0}, b;
	struct rig rig;
	u64 id;

	rig_open(&rig, true, NULL);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_IN, 0, 1, 0), 0); /* it is up */
	/* 1,024 runs that do not touch each other, then one small one the other way. */
	for (u32 i = 0; i < KV_ARRAY_SIZE(copies); i++)
		copies[i] = (struct kvd_mover_copy){&rig.extents[1], i * 4096ull,
						    i * 8192ull, 4096};
	big.arg = &a;
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &big, &id), 0);
	submit_run(&rig, &b, KVD_MOVER_IN, 0, 1, 8 * MIB);
	wait_done(&rig, &a);
	wait_done(&rig, &b);
	KVT_EXPECT_EQ(a.status, 0);
	KVT_EXPECT_EQ(b.status, 0);
	KVT_EXPECT(b.order < a.order);
	rig_close(&rig);
}

/* ----------------------------------------------------------------------------- death */

/* Return: it died there. */
static bool killed_at(bool gpu, u32 n)
{
	struct result in, out;
	char faults[32];
	struct rig rig;
	bool fired;

	snprintf(faults, sizeof(faults), "crash=%u", n);
	rig_open(&rig, gpu, faults);
	fill(rig.pool, 32 * PAGE);
	submit_run(&rig, &in, KVD_MOVER_IN, 0, 32, 0);
	submit_run(&rig, &out, KVD_MOVER_OUT, 1, 32, 8 * MIB);
	kvd_mover_run(rig.m, kv_now_ns());
	wait_done(&rig, &in);
	wait_done(&rig, &out);
	KVT_EXPECT(in.status == 0 || in.status == -EPIPE);
	KVT_EXPECT(out.status == 0 || out.status == -EPIPE);
	kvd_mover_extent_drop(rig.m, 1, 1, 8);
	for (int i = 0; i < 100 && !rig.nr_put && !rig.deaths; i++)
		turns(&rig, 10);
	turns(&rig, 20);
	fired = rig.deaths;
	KVT_EXPECT_EQ(rig.deaths,
		      kvd_mover_stats(rig.m)
			      ->deaths); /* on a busy machine the next one died, too */
	KVT_EXPECT(fired || (!in.status && !out.status));
	/* The next one does it. */
	rig.m->params.faults = NULL;
	rig.m->retry_ns = 0;
	KVT_EXPECT_EQ(kvd_mover_nr_jobs(rig.m), 0);
	if (fired)
		round_trip(&rig, 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->starts, (u64)rig.deaths + 1);
	KVT_EXPECT_EQ(in.calls, 1);
	KVT_EXPECT_EQ(out.calls, 1);
	rig_close(&rig);
	return fired;
}

static void killed_at_every_point(bool gpu)
{
	u32 n = 1;

	while (n < 100 && killed_at(gpu, n))
		n++;
	KVT_NOTE("%u points", n - 1);
	KVT_EXPECT(n > 12 && n < 100);
}

KVT_TEST(host_mover_killed_at_every_point)
{
	killed_at_every_point(false);
}

KVT_TEST(cuda_mover_killed_at_every_point)
{
	killed_at_every_point(true);
}

/* P8: the process is gone, its copies may not be. */
KVT_TEST(dead_mover_keeps_frames_until_proven)
{
	struct result r;
	struct rig rig;

	setenv("FAKE_CUDA_COPY_MS", "5000", 1);
	rig_open(&rig, true, NULL);
	rig.prove_at_once = false;
	submit_run(&rig, &r, KVD_MOVER_IN, 0, 4, 0);
	wait_state(&rig, KVD_MOVER_READY);
	turns(&rig, 20);
	KVT_EXPECT_EQ(rig.m->nr_handed, 1);
	kill(kvd_mover_pid(rig.m), SIGKILL);
	turns(&rig, 150);
	KVT_EXPECT_EQ(rig.deaths, 1);
	KVT_EXPECT_EQ(rig.proofs, 1);
	KVT_EXPECT_EQ(r.calls, 0);
	KVT_EXPECT_EQ(rig.nr_put, 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->unproven, 1);
	kvd_mover_extent_drop(rig.m, 1, 0, 7);
	KVT_EXPECT_EQ(rig.nr_put, 0);
	kvd_mover_ended(rig.m);
	turn(&rig, 0);
	KVT_EXPECT_EQ(r.calls, 1);
	KVT_EXPECT_EQ(r.status, -EPIPE);
	KVT_EXPECT_EQ(rig.nr_put, 1);
	rig_close(&rig);
}

KVT_TEST(without_a_proof_nobody_waits_for_ever)
{
	struct result r, later;
	struct kvd_mover_copy c;
	struct kvd_mover_job job = {.nr = 1, .copies = &c, .done = done, .arg = &later};
	struct rig rig;
	u64 id;

	setenv("FAKE_CUDA_COPY_MS", "5000", 1);
	rig_open(&rig, true, NULL);
	rig.prove_at_once = false;
	submit_run(&rig, &r, KVD_MOVER_IN, 0, 4, 0);
	wait_state(&rig, KVD_MOVER_READY);
	turns(&rig, 20);
	kill(kvd_mover_pid(rig.m), SIGKILL);
	wait_state(&rig, KVD_MOVER_ENDING);
	submit_run(&rig, &later, KVD_MOVER_IN, 1, 4, 0);
	wait_done(&rig, &later);
	KVT_EXPECT_EQ(later.status, -EPIPE);
	c = (struct kvd_mover_copy){&rig.extents[1], 0, 0, PAGE};
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), -EPIPE);
	KVT_EXPECT_EQ(r.calls, 0);
	rig_close(&rig);
	KVT_EXPECT_EQ(r.calls, 1); /* with the daemon's end */
}

/* A device error leaves the fate of everything open: it is the mover's end. */
KVT_TEST(device_error_ends_the_mover)
{
	struct rig rig;

	setenv("FAKE_CUDA_LATE", "2", 1);
	rig_open(&rig, true, NULL);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_IN, 0, 8, 0), 0);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_IN, 0, 8, 0), 0);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_IN, 0, 8, 0), -EPIPE);
	KVT_EXPECT_EQ(rig.proofs, 1);
	unsetenv("FAKE_CUDA_LATE");
	rig.m->retry_ns = 0;
	round_trip(&rig, 0);
	rig_close(&rig);
}

/* ---------------------------------------------------------------------------- extents */

KVT_TEST(extent_stays_given_until_unmapped)
{
	struct rig rig;

	rig_open(&rig, false, NULL);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 4, 0), 0);
	kill(kvd_mover_pid(rig.m), SIGSTOP);
	kvd_mover_extent_drop(rig.m, 1, 0, 7);
	turns(&rig, 50);
	KVT_EXPECT_EQ(rig.nr_put, 0); /* it is still mapped there */
	kill(kvd_mover_pid(rig.m), SIGCONT);
	turns(&rig, 50);
	KVT_EXPECT_EQ(rig.nr_put, 1);
	KVT_EXPECT_EQ(kvd_mover_nr_extents(rig.m), 0);
	round_trip(&rig, 0); /* and can come again */
	rig_close(&rig);
}

/* It stands still with nothing but that to do: it is killed as with jobs, and what it held is
 * free and can come again. */
KVT_TEST(mover_that_does_not_let_go_is_killed)
{
	struct kvd_mover_copy c;
	struct result r = {0};
	struct kvd_mover_job job = {.nr = 1, .copies = &c, .done = done, .arg = &r};
	struct rig rig;
	u64 id, later;

	rig_open(&rig, false, NULL);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 4, 0), 0);
	kill(kvd_mover_pid(rig.m), SIGSTOP);
	kvd_mover_extent_drop(rig.m, 1, 0, 7);
	c = (struct kvd_mover_copy){&rig.extents[0], 0, 0, PAGE};
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), -ESTALE);
	later = kvd_mover_run(rig.m, kv_now_ns());
	KVT_EXPECT(later != KVD_MOVER_NEVER);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_READY);
	kvd_mover_run(rig.m, later);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_DYING);
	wait_state(&rig, KVD_MOVER_BACKOFF);
	KVT_EXPECT_EQ(rig.nr_put, 1);
	rig.m->retry_ns = 0;
	round_trip(&rig, 0);
	/* one that answers, though late, lives */
	kill(kvd_mover_pid(rig.m), SIGSTOP);
	kvd_mover_extent_drop(rig.m, 1, 0, 7);
	kill(kvd_mover_pid(rig.m), SIGCONT);
	while (rig.nr_put < 2)
		turn(&rig, 5);
	KVT_EXPECT_EQ(kvd_mover_run(rig.m, kv_now_ns() + 60 * KV_NSEC_PER_SEC),
		      KVD_MOVER_NEVER);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_READY);
	rig_close(&rig);
}

/* It stands still before it is ready, with jobs that have no deadline: it is killed, they fail, the
 * next one does others. */
static void hangs_as_it_starts(bool gpu)
{
	struct result a, b;
	u64 start_ns, later;
	struct rig rig;

	if (gpu)
		setenv("FAKE_CUDA_INIT_MS", "600000", 1);
	rig_open(&rig, false, NULL);
	rig.m->params.backend = gpu ? KV_BACKEND_CUDA : KV_BACKEND_HOST;
	if (gpu)
		use_gpu();
	submit_run(&rig, &a, KVD_MOVER_IN, 0, 4, 0);
	submit_run(&rig, &b, KVD_MOVER_OUT, 1, 4, 8 * MIB);
	start_ns = kv_now_ns();
	later = kvd_mover_run(rig.m, start_ns);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_STARTING);
	if (!gpu)
		kill(kvd_mover_pid(rig.m), SIGSTOP);
	KVT_EXPECT(later > start_ns + 20 * KV_NSEC_PER_SEC); /* a driver may be slow */
	KVT_EXPECT(later < start_ns + 60 * KV_NSEC_PER_SEC);
	kvd_mover_run(rig.m, later - KV_NSEC_PER_SEC);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_STARTING);
	kvd_mover_run(rig.m, later);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_DYING);
	wait_state(&rig, KVD_MOVER_BACKOFF);
	turn(&rig, 0);
	KVT_EXPECT(a.calls == 1 && a.status == -EPIPE);
	KVT_EXPECT(b.calls == 1 && b.status == -EPIPE);
	KVT_EXPECT_HAS(kvd_mover_error(rig.m), "not ready");
	KVT_EXPECT(kvd_mover_down(rig.m));
	KVT_EXPECT_EQ(rig.nr_put, rig.nr_given);
	rig.m->params.backend = KV_BACKEND_HOST;
	rig.m->retry_ns = 0;
	/* the next one may hang for as long: until it is ready the first one's end counts */
	submit_run(&rig, &a, KVD_MOVER_IN, 0, 4, 0);
	kvd_mover_run(rig.m, kv_now_ns());
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_STARTING);
	KVT_EXPECT(kvd_mover_down(rig.m));
	KVT_EXPECT_HAS(kvd_mover_error(rig.m), "not ready");
	wait_done(&rig, &a);
	KVT_EXPECT(!kvd_mover_down(rig.m));
	round_trip(&rig, 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->starts, 2);
	/* ready, and with nothing to do, it may stand still */
	KVT_EXPECT_EQ(kvd_mover_run(rig.m, kv_now_ns() + 3600 * KV_NSEC_PER_SEC),
		      KVD_MOVER_NEVER);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m), KVD_MOVER_READY);
	rig_close(&rig);
}

KVT_TEST(mover_that_hangs_as_it_starts_is_killed)
{
	hangs_as_it_starts(false);
}

KVT_TEST(mover_whose_driver_hangs_as_it_starts_is_killed)
{
	hangs_as_it_starts(true);
}

KVT_TEST(drop_waits_for_the_jobs_of_an_extent)
{
	struct kvd_mover_copy c;
	struct result r;
	struct kvd_mover_job job = {.nr = 1, .copies = &c, .done = done, .arg = &r};
	struct rig rig;
	u64 id;

	rig_open(&rig, true, NULL);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 1, 0), 0);
	kill(kvd_mover_pid(rig.m), SIGSTOP);
	submit_run(&rig, &r, KVD_MOVER_OUT, 0, 8, 0);
	turn(&rig, 0);
	KVT_EXPECT_EQ(rig.m->nr_handed, 1);
	kvd_mover_extent_drop(rig.m, 1, 0, 7);
	c = (struct kvd_mover_copy){&rig.extents[0], 0, 0, PAGE};
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), -ESTALE);
	turns(&rig, 20);
	KVT_EXPECT_EQ(rig.nr_put, 0);
	kill(kvd_mover_pid(rig.m), SIGCONT);
	wait_done(&rig, &r);
	KVT_EXPECT_EQ(r.status, 0);
	turns(&rig, 50);
	KVT_EXPECT_EQ(rig.nr_put, 1);
	rig_close(&rig);
}

/*
 * ucx PR#4599, #4431 (O05): a transfer in three operations on one extent, one of them fails
 * and the extent is let go. It is closed once, when all three have ended.
 */
KVT_TEST(o05_close_during_a_transfer)
{
	struct result r[3];
	struct rig rig;
	u32 nr = 0;

	setenv("FAKE_CUDA_FAIL", "cuMemcpyBatchAsync_v2:2", 1);
	setenv("FAKE_CUDA_COPY_MS", "200", 1);
	rig_open(&rig, true, NULL);
	for (u32 i = 0; i < 3; i++)
		submit_run(&rig, &r[i], KVD_MOVER_OUT, 0, 16, i * 16 * PAGE);
	for (u32 ms = 0; ms < 10000 && rig.m->nr_handed < 3; ms++)
		turn(&rig, 1);
	KVT_EXPECT_EQ(rig.m->nr_handed, 3);
	kvd_mover_extent_drop(rig.m, 1, 0, 7);
	for (u32 ms = 0; ms < 10000 && nr < 3; ms++) {
		KVT_EXPECT_EQ(rig.nr_put, 0);
		turn(&rig, 1);
		nr = r[0].calls + r[1].calls + r[2].calls;
	}
	KVT_EXPECT_EQ(nr, 3);
	KVT_EXPECT_EQ(r[0].status + r[1].status + r[2].status, -ENOMEM); /* of one */
	turns(&rig, 100);
	KVT_EXPECT_EQ(rig.nr_put, 1);
	KVT_EXPECT_EQ(kvd_mover_nr_extents(rig.m), 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->deaths, 0);
	rig_close(&rig);
}

/* ------------------------------------------------------------- cancelling, deadlines */

KVT_TEST(cancelled_job_keeps_its_frames_while_it_may_run)
{
	struct result queued, handed;
	struct rig rig;
	u64 id;

	rig_open(&rig, false, NULL);
	id = submit_run(&rig, &queued, KVD_MOVER_OUT, 0, 4, 0);
	kvd_mover_cancel(rig.m, id);
	KVT_EXPECT_EQ(queued.calls, 0); /* never from inside */
	turn(&rig, 0);
	KVT_EXPECT_EQ(queued.calls, 1);
	KVT_EXPECT_EQ(queued.status, -ECANCELED);
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 1, 0), 0);
	kill(kvd_mover_pid(rig.m), SIGSTOP);
	id = submit_run(&rig, &handed, KVD_MOVER_IN, 0, 4, 0);
	turn(&rig, 0);
	kvd_mover_cancel(rig.m, id);
	turns(&rig, 30);
	KVT_EXPECT_EQ(handed.calls, 0);
	kill(kvd_mover_pid(rig.m), SIGCONT);
	wait_done(&rig, &handed);
	KVT_EXPECT(handed.status == -ECANCELED || handed.status == 0);
	kvd_mover_cancel(rig.m, id); /* over: nothing */
	turns(&rig, 5);
	KVT_EXPECT_EQ(handed.calls, 1);
	rig_close(&rig);
}

KVT_TEST(late_jobs_are_given_back_at_their_deadline)
{
	struct kvd_mover_copy c;
	struct result r = {0};
	struct kvd_mover_job job = {.nr = 1, .copies = &c, .done = done, .arg = &r};
	struct rig rig;
	u64 id;

	setenv("FAKE_CUDA_INIT_MS", "1000", 1);
	use_gpu();
	rig_open(&rig, true, NULL);
	c = (struct kvd_mover_copy){&rig.extents[0], 0, 0, PAGE};
	job.deadline_ns = kv_now_ns() + 50 * KV_NSEC_PER_MSEC;
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), 0);
	wait_done(&rig, &r);
	KVT_EXPECT_EQ(r.status, -ETIMEDOUT);
	KVT_EXPECT_EQ(kvd_mover_state(rig.m),
		      KVD_MOVER_STARTING); /* nobody waited for it */
	KVT_EXPECT_EQ(copy_run(&rig, KVD_MOVER_OUT, 0, 1, 0), 0);
	/* One that is late when the mover gets to it. */
	kill(kvd_mover_pid(rig.m), SIGSTOP);
	memset(&r, 0, sizeof(r));
	job.deadline_ns = kv_now_ns() + 20 * KV_NSEC_PER_MSEC;
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), 0);
	turns(&rig, 60);
	KVT_EXPECT_EQ(r.calls, 0);
	kill(kvd_mover_pid(rig.m), SIGCONT);
	wait_done(&rig, &r);
	KVT_EXPECT_EQ(r.status, -ETIMEDOUT);
	rig_close(&rig);
}

KVT_MAIN()
