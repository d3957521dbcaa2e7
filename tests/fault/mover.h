/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover.h - a mover with a pool, extents and the daemon's part of it, played here. For
 * tests/fault/mover*.c, included once by each.
 */
#ifndef TESTS_FAULT_MOVER_H
#define TESTS_FAULT_MOVER_H

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

static inline void done(void *arg, u64 id, int status)
{
	struct result *r = arg;

	r->status = status;
	r->calls++;
	r->order = ++order;
}

static inline void given(void *arg, u32 pool_id, u32 index, u64 serial)
{
	((struct rig *)arg)->nr_given++;
}

static inline void put(void *arg, u32 pool_id, u32 index, u64 serial)
{
	((struct rig *)arg)->nr_put++;
}

static inline int keep(void *arg, pid_t pid, int pidfd, enum kvd_mover_kept how)
{
	((struct rig *)arg)->kept += pidfd >= 0 && how == KVD_MOVER_FRESH;
	return 0;
}

static inline void started(void *arg)
{
	struct rig *rig = arg;

	rig->started++;
	kvd_mover_listed(rig->m, true);
}

static inline void prove(void *arg)
{
	struct rig *rig = arg;

	rig->proofs++;
	rig->want_proof = true;
}

static inline void died(void *arg, bool owned)
{
	((struct rig *)arg)->deaths++;
}

static inline void alloced(void *arg, u64 id, int result, const u8 *handle,
			   const char *text)
{
}

static inline void find_program(void)
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

static inline void use_gpu(void)
{
	if (getenv("KV_REAL_GPU"))
		return;
	KVT_EXPECT_EQ(fake_use("KV_CUDA_LIB", "libcuda.so"), 0);
	setenv("FAKE_CUDA_NO_SYNC", "kvmd-mover", 1);
	setenv("FAKE_CUDA_NO_CONTEXT", "mover", 1); /* this program is the daemon here */
}

static inline void make_extents(struct rig *rig, bool gpu, u8 *ret_uuid)
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

static inline void rig_open_with(struct rig *rig, bool gpu, const char *faults,
				 const char *prog)
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

static inline void rig_open(struct rig *rig, bool gpu, const char *faults)
{
	find_program();
	rig_open_with(rig, gpu, faults, program);
}

static inline void rig_close(struct rig *rig)
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

static inline void turn(struct rig *rig, int wait_ms)
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

static inline void turns(struct rig *rig, u32 ms)
{
	u64 end_ns = kv_now_ns() + ms * KV_NSEC_PER_MSEC;

	while (kv_now_ns() < end_ns)
		turn(rig, 2);
}

static inline void wait_done(struct rig *rig, const struct result *r)
{
	u64 end_ns = kv_now_ns() + 20 * KV_NSEC_PER_SEC;

	while (!r->calls && kv_now_ns() < end_ns)
		turn(rig, 5);
	KVT_EXPECT_EQ(r->calls, 1);
}

static inline void wait_state(struct rig *rig, enum kvd_mover_state state)
{
	u64 end_ns = kv_now_ns() + 10 * KV_NSEC_PER_SEC;

	while (kvd_mover_state(rig->m) != state && kv_now_ns() < end_ns)
		turn(rig, 5);
	KVT_EXPECT_STR(kvd_mover_state_str(kvd_mover_state(rig->m)),
		       kvd_mover_state_str(state));
}

/* Pages of one extent, one after the other, from @pool_off on. */
static inline u64 submit_run(struct rig *rig, struct result *r, enum kvd_mover_dir dir,
			     u32 x, u32 nr, u64 pool_off)
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

static inline int copy_run(struct rig *rig, enum kvd_mover_dir dir, u32 x, u32 nr,
			   u64 pool_off)
{
	struct result r;

	submit_run(rig, &r, dir, x, nr, pool_off);
	wait_done(rig, &r);
	return r.status;
}

static inline void fill(u8 *at, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 8) {
		u64 v = kvt_rand64();

		memcpy(at + i, &v, 8);
	}
}

/* In, out to another place, and it is the same. */
static inline void round_trip(struct rig *rig, u32 x)
{
	u8 *from = rig->pool, *to = rig->pool + 8 * MIB;

	fill(from, 16 * PAGE);
	memset(to, 0, 16 * PAGE);
	KVT_EXPECT_EQ(copy_run(rig, KVD_MOVER_IN, x, 16, 0), 0);
	KVT_EXPECT_EQ(copy_run(rig, KVD_MOVER_OUT, x, 16, 8 * MIB), 0);
	KVT_EXPECT_EQ(memcmp(from, to, 16 * PAGE), 0);
}

#endif
