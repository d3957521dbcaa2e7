/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mover, on host memory and on the fake GPU: bytes, order, cancelling, deadlines, and
 * its death at every point of a job. The daemon's part (NVML, the keeper) is played here.
 */
#include "tests/kvt.h"
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include "base/clock.h"
#include "kv/outcome.h"
#include "kvmd/backend/cuda.h"
#include "kvmd/backend/host.h"
#include "kvmd/mover/mover_priv.h"
#include "tests/fake/fake.h"

#define MIB	     (1ull << 20)
#define EXTENT_BYTES (4 * MIB)
#define POOL_BYTES   (16 * MIB)
#define PAGE	     65536u
#define NR_EXTENTS   3u

static char program[4096];

struct rig {
	struct kvd_mover *m;
	struct kvd_backend *be;
	struct kvd_extent_handle handles[NR_EXTENTS];
	struct kvd_mover_extent extents[NR_EXTENTS];
	u32 nr_given, nr_put, kept, started, proofs, deaths;
	bool prove_at_once;
	bool want_proof;
	u8 *pool;
};

struct result {
	int status;
	u32 calls;
	u32 order;
};

static u32 order;

static void done(void *arg, u64 id, int status)
{
	struct result *r = arg;

	r->status = status;
	r->calls++;
	r->order = ++order;
}

static void given(void *arg, u32 pool_id, u32 index, u64 serial)
{
	((struct rig *)arg)->nr_given++;
}

static void put(void *arg, u32 pool_id, u32 index, u64 serial)
{
	((struct rig *)arg)->nr_put++;
}

static int keep(void *arg, pid_t pid, int pidfd, enum kvd_mover_kept how)
{
	((struct rig *)arg)->kept += pidfd >= 0 && how == KVD_MOVER_FRESH;
	return 0;
}

static void started(void *arg)
{
	struct rig *rig = arg;

	rig->started++;
	kvd_mover_listed(rig->m, true);
}

static void prove(void *arg)
{
	struct rig *rig = arg;

	rig->proofs++;
	rig->want_proof = true;
}

static void died(void *arg, bool owned)
{
	((struct rig *)arg)->deaths++;
}

static void alloced(void *arg, u64 id, int result, const u8 *handle, const char *text)
{
}

static void find_program(void)
{
	ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - 64);
	char *cut = NULL;

	KVT_EXPECT(n > 0);
	program[n] = 0;
	for (char *p = program; (p = strstr(p, "/tests/")); p++)
		cut = p;
	KVT_EXPECT(cut);
	strcpy(cut, "/kvmd");
}

static void use_gpu(void)
{
	if (getenv("KV_REAL_GPU"))
		return;
	KVT_EXPECT_EQ(fake_use("KV_CUDA_LIB", "libcuda.so"), 0);
	setenv("FAKE_CUDA_NO_SYNC", "kvmd-mover", 1);
	setenv("FAKE_CUDA_NO_CONTEXT", "mover", 1); /* this program is the daemon here */
}

static void make_extents(struct rig *rig, bool gpu, u8 *ret_uuid)
{
	struct kvd_cuda_params p = {.capacity_bytes = 64 * MIB, .small_extents = true};
	struct pollfd pfd = {.events = POLLIN};

	if (gpu) {
		KVT_EXPECT_EQ(kvd_cuda_create(&p, &rig->be), 0);
		pfd.fd = kvd_cuda_event_fd(rig->be);
		KVT_EXPECT_EQ(poll(&pfd, 1, 10000), 1);
		KVT_EXPECT_EQ(kvd_cuda_state(rig->be), KVD_CUDA_READY);
		memcpy(ret_uuid, kvd_cuda_get_info(rig->be)->uuid, 16);
	} else {
		KVT_EXPECT_EQ(kvd_host_create(64 * MIB, 0, &rig->be), 0);
	}
	for (u32 i = 0; i < NR_EXTENTS; i++) {
		KVT_EXPECT_EQ(rig->be->ops->extent_alloc(rig->be, EXTENT_BYTES,
							 &rig->handles[i]),
			      0);
		rig->extents[i] = (struct kvd_mover_extent){
			.pool_id = 1,
			.index = i,
			.serial = 7 + i,
			.fd = rig->handles[i].fd,
			.bytes = EXTENT_BYTES,
		};
	}
}

static void rig_open_with(struct rig *rig, bool gpu, const char *faults, const char *prog)
{
	const struct kvd_mover_ops ops = {rig,	   given, put,	keep,
					  started, prove, died, alloced};
	struct kvd_mover_params p = {
		.backend = gpu ? KV_BACKEND_CUDA : KV_BACKEND_HOST,
		.program = prog,
		.pool_bytes = POOL_BYTES,
		.pool_fd = -1,
		.faults = faults,
	};
	u64 bytes;

	memset(rig, 0, sizeof(*rig));
	rig->prove_at_once = true;
	if (gpu)
		use_gpu();
	make_extents(rig, gpu, p.gpu_uuid);
	KVT_EXPECT_EQ(kvd_mover_create(&p, &ops, &rig->m), 0);
	rig->pool = kvd_mover_pool(rig->m, &bytes, NULL);
	KVT_EXPECT_EQ(bytes, POOL_BYTES);
}

static void rig_open(struct rig *rig, bool gpu, const char *faults)
{
	find_program();
	rig_open_with(rig, gpu, faults, program);
}

static void rig_close(struct rig *rig)
{
	kvd_mover_destroy(rig->m);
	KVT_EXPECT_EQ(rig->nr_given, rig->nr_put);
	for (u32 i = 0; i < NR_EXTENTS; i++)
		rig->be->ops->extent_free(rig->be, &rig->handles[i], EXTENT_BYTES);
	if (rig->be->ops->name[0] == 'c')
		kvd_cuda_destroy(rig->be);
	else
		kvd_host_destroy(rig->be);
}

static void turn(struct rig *rig, int wait_ms)
{
	struct pollfd p = {.fd = kvd_mover_fd(rig->m), .events = POLLIN};

	if (poll(&p, 1, wait_ms) == 1)
		kvd_mover_event(rig->m);
	if (rig->want_proof && rig->prove_at_once) {
		rig->want_proof = false;
		kvd_mover_ended(rig->m);
	}
	kvd_mover_run(rig->m, kv_now_ns());
}

static void turns(struct rig *rig, u32 ms)
{
	u64 end_ns = kv_now_ns() + ms * KV_NSEC_PER_MSEC;

	while (kv_now_ns() < end_ns)
		turn(rig, 2);
}

static void wait_done(struct rig *rig, const struct result *r)
{
	u64 end_ns = kv_now_ns() + 20 * KV_NSEC_PER_SEC;

	while (!r->calls && kv_now_ns() < end_ns)
		turn(rig, 5);
	KVT_EXPECT_EQ(r->calls, 1);
}

static void wait_state(struct rig *rig, enum kvd_mover_state state)
{
	u64 end_ns = kv_now_ns() + 10 * KV_NSEC_PER_SEC;

	while (kvd_mover_state(rig->m) != state && kv_now_ns() < end_ns)
		turn(rig, 5);
	KVT_EXPECT_STR(kvd_mover_state_str(kvd_mover_state(rig->m)),
		       kvd_mover_state_str(state));
}

/* Pages of one extent, one after the other, from @pool_off on. */
static u64 submit_run(struct rig *rig, struct result *r, enum kvd_mover_dir dir, u32 x,
		      u32 nr, u64 pool_off)
{
	struct kvd_mover_copy copies[64];
	struct kvd_mover_job job = {
		.dir = dir, .nr = nr, .copies = copies, .done = done, .arg = r};
	u64 id = 0;

	memset(r, 0, sizeof(*r));
	for (u32 i = 0; i < nr; i++)
		copies[i] = (struct kvd_mover_copy){&rig->extents[x], i * PAGE,
						    pool_off + i * PAGE, PAGE};
	KVT_EXPECT_EQ(kvd_mover_submit(rig->m, &job, &id), 0);
	KVT_EXPECT(id);
	return id;
}

static int copy_run(struct rig *rig, enum kvd_mover_dir dir, u32 x, u32 nr, u64 pool_off)
{
	struct result r;

	submit_run(rig, &r, dir, x, nr, pool_off);
	wait_done(rig, &r);
	return r.status;
}

static void fill(u8 *at, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 8) {
		u64 v = kvt_rand64();

		memcpy(at + i, &v, 8);
	}
}

/* In, out to another place, and it is the same. */
static void round_trip(struct rig *rig, u32 x)
{
	u8 *from = rig->pool, *to = rig->pool + 8 * MIB;

	fill(from, 16 * PAGE);
	memset(to, 0, 16 * PAGE);
	KVT_EXPECT_EQ(copy_run(rig, KVD_MOVER_IN, x, 16, 0), 0);
	KVT_EXPECT_EQ(copy_run(rig, KVD_MOVER_OUT, x, 16, 8 * MIB), 0);
	KVT_EXPECT_EQ(memcmp(from, to, 16 * PAGE), 0);
}

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
	KVT_EXPECT_EQ(fired, kvd_mover_stats(rig.m)->deaths);
	KVT_EXPECT(fired || (!in.status && !out.status));
	/* The next one does it. */
	rig.m->params.faults = NULL;
	rig.m->retry_ns = 0;
	KVT_EXPECT_EQ(kvd_mover_nr_jobs(rig.m), 0);
	if (fired)
		round_trip(&rig, 0);
	KVT_EXPECT_EQ(kvd_mover_stats(rig.m)->starts, fired ? 2 : 1);
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

	setenv("FAKE_CUDA_FAIL", "cuMemcpyDtoHAsync_v2:2", 1);
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
	u64 id, began_ns;
	struct rig rig;

	setenv("FAKE_CUDA_INIT_MS", "1000", 1);
	use_gpu();
	rig_open(&rig, true, NULL);
	c = (struct kvd_mover_copy){&rig.extents[0], 0, 0, PAGE};
	began_ns = kv_now_ns();
	job.deadline_ns = began_ns + 50 * KV_NSEC_PER_MSEC;
	KVT_EXPECT_EQ(kvd_mover_submit(rig.m, &job, &id), 0);
	wait_done(&rig, &r);
	KVT_EXPECT_EQ(r.status, -ETIMEDOUT);
	KVT_EXPECT(kv_now_ns() - began_ns < 500 * KV_NSEC_PER_MSEC);
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

/* ------------------------------------------------------------------- wrong and missing */

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
