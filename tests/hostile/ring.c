/* SPDX-License-Identifier: Apache-2.0 */
/* ring.c - attacks through the words of the attacker's own ring. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include "tests/hostile/hostile.h"

static struct ipc_raw r;

static struct held held;

static void open_ring(const struct scene *sc)
{
	attacker_open(sc, &r, &held);
}

static struct kv_sqe alloc_sqe(u32 nr)
{
	struct kv_sqe sqe = raw_sqe(&r, KV_OP_ALLOC);

	sqe.nr = nr;
	sqe.ret_bytes = nr * (u32)sizeof(struct kv_grant);
	return sqe;
}

static void tail_jump(const struct scene *sc)
{
	open_ring(sc);
	kv_store_release32(&r.ring->sq_tail, 0x7fffffff);
	raw_kick(&r);
	raw_ends(&r);
}

static void tail_back(const struct scene *sc)
{
	open_ring(sc);
	answers(&r, alloc_sqe(1), 0);
	kv_store_release32(&r.ring->sq_tail, 0);
	raw_kick(&r);
	raw_ends(&r);
}

static void cq_head_jump(const struct scene *sc)
{
	open_ring(sc);
	kv_store_release32(&r.ring->cq_head, 0x10000);
	raw_push(&r, alloc_sqe(1));
	raw_ends(&r);
}

static void other_nonce(const struct scene *sc)
{
	struct kv_sqe sqe;

	open_ring(sc);
	sqe = alloc_sqe(1);
	sqe.ring_nonce ^= 1;
	raw_push(&r, sqe);
	raw_ends(&r);
}

static void unknown_operations(const struct scene *sc)
{
	struct kv_sqe sqe;

	open_ring(sc);
	for (u32 op = KV_OP_NR; op < 256; op++) {
		sqe = alloc_sqe(1);
		sqe.opcode = (u8)op;
		answers(&r, sqe, -EOPNOTSUPP);
	}
}

static void reserved_fields(const struct scene *sc)
{
	struct kv_sqe sqe;

	open_ring(sc);
	for (u32 i = 0; i < 5; i++) {
		sqe = alloc_sqe(1);
		sqe.reserved[i] = 0x80000000u >> i;
		answers(&r, sqe, -EINVAL);
	}
}

static void flags_unknown(const struct scene *sc)
{
	struct kv_sqe sqe;

	open_ring(sc);
	for (u32 bit = 2; bit < 8; bit++) {
		sqe = alloc_sqe(1);
		sqe.flags = (u8)(1u << bit);
		KVT_EXPECT(raw_call(&r, sqe).result < 0);
	}
	for (u32 bit = 4; bit < 32; bit++) {
		sqe = alloc_sqe(1);
		sqe.gfp = 1u << bit;
		answers(&r, sqe, -EINVAL);
	}
}

static void counts(const struct scene *sc)
{
	static const u32 nrs[] = {0, KV_BATCH_MAX + 1, 0x80000000u, ~0u};
	struct kv_sqe sqe;

	open_ring(sc);
	for (u32 op = 1; op < KV_OP_NR; op++) {
		if (op == KV_OP_STAT || op == KV_OP_REPORT || op == KV_OP_UNMAPPED ||
		    op == KV_OP_NOP)
			continue;
		for (u32 i = 0; i < KV_ARRAY_SIZE(nrs); i++) {
			sqe = raw_sqe(&r, (u8)op);
			sqe.nr = nrs[i];
			sqe.arg_bytes = 64;
			sqe.ret_bytes = 64;
			KVT_EXPECT(raw_call(&r, sqe).result < 0);
		}
	}
}

static void offsets(const struct scene *sc)
{
	static const u32 offs[] = {KV_ARG_BYTES, KV_ARG_BYTES - 8, ~0u, 0x80000000u,
				   0u - 16};
	struct kv_sqe sqe;

	open_ring(sc);
	for (u32 i = 0; i < KV_ARRAY_SIZE(offs); i++) {
		sqe = alloc_sqe(4);
		sqe.ret_off = offs[i];
		answers(&r, sqe, -EFAULT);
		sqe = raw_sqe(&r, KV_OP_FREE);
		sqe.nr = 4;
		sqe.arg_bytes = 4 * sizeof(struct kv_page_ref);
		sqe.arg_off = offs[i];
		answers(&r, sqe, -EFAULT);
	}
}

static void lengths(const struct scene *sc)
{
	struct kv_sqe sqe;

	open_ring(sc);
	sqe = raw_sqe(&r, KV_OP_FREE);
	sqe.nr = 1;
	sqe.arg_bytes = ~0u;
	KVT_EXPECT(raw_call(&r, sqe).result < 0);
	sqe = alloc_sqe(4);
	sqe.ret_bytes = ~0u;
	answers(&r, sqe, -EFAULT);
	sqe.ret_bytes = 1;
	answers(&r, sqe, -ENOSPC);
}

static void other_pools(const struct scene *sc)
{
	struct kv_sqe sqe;

	open_ring(sc);
	for (u32 id = 0; id < 70; id++) {
		if (id == r.pool_id)
			continue;
		sqe = alloc_sqe(1);
		sqe.pool_id = id;
		KVT_EXPECT(raw_call(&r, sqe).result < 0);
	}
	sqe = alloc_sqe(1);
	sqe.pool_id = ~0u;
	KVT_EXPECT(raw_call(&r, sqe).result < 0);
}

/* kvmd keeps geometry to itself: what the client makes of the header harms the client. */
static void header_rewritten(const struct scene *sc)
{
	struct kv_ring_hdr saved;

	open_ring(sc);
	answers(&r, alloc_sqe(1), 0);
	saved = *r.ring;
	r.ring->sq_off = 0xfffff000u;
	r.ring->cq_off = 0xfffff000u;
	r.ring->sq_depth = 1u << 31;
	r.ring->cq_depth = 3;
	r.ring->arg_off = ~0u;
	kv_full_barrier();
	usleep(20000);
	r.ring->sq_off = saved.sq_off;
	r.ring->cq_off = saved.cq_off;
	r.ring->sq_depth = saved.sq_depth;
	r.ring->cq_depth = saved.cq_depth;
	r.ring->arg_off = saved.arg_off;
	answers(&r, alloc_sqe(1), 0);
}

static void truncated(const struct scene *sc)
{
	open_ring(sc);
	KVT_EXPECT(ftruncate(held.ring_fd, 0) == -1 && errno == EPERM);
	KVT_EXPECT(ftruncate(held.ring_fd, 1 << 30) == -1 && errno == EPERM);
	KVT_EXPECT(ftruncate(held.session_fd, 4096) == -1 && errno == EPERM);
	KVT_EXPECT(fcntl(held.ring_fd, F_ADD_SEALS, F_SEAL_WRITE) == -1);
	answers(&r, alloc_sqe(1), 0);
}

/* Bytes turn to zero under kvmd's eyes: no SIGBUS, the session ends at the latest when an
 * entry has no nonce. */
static void holes_in_the_ring(const struct scene *sc)
{
	open_ring(sc);
	for (u32 i = 0; i < 200; i++) {
		raw_push(&r, alloc_sqe(1));
		if (fallocate(held.ring_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
			      1 << 20))
			KVT_FAIL("fallocate: %s", strerror(errno));
		raw_kick(&r);
		usleep(500);
	}
}

static void holes_in_the_session_page(const struct scene *sc)
{
	open_ring(sc);
	for (u32 i = 0; i < 100; i++) {
		KVT_EXPECT(!fallocate(held.session_fd,
				      FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
				      4096 * 3));
		raw_push(&r, alloc_sqe(1));
		usleep(500);
	}
}

static volatile bool flipping;

static void *flip(void *arg)
{
	volatile u32 *words = arg;

	while (flipping)
		for (u32 i = 0; i < 64 * 16; i++)
			words[i] ^= 0x00ff0001u << (i % 8);
	return NULL;
}

/* Entries change all the time, also between check and use, if there were such a time. */
static void entries_that_change(const struct scene *sc)
{
	struct kv_sqe *sq;
	pthread_t thread;

	open_ring(sc);
	sq = (void *)((u8 *)r.ring + r.ring->sq_off);
	for (u32 i = 0; i < r.ring->sq_depth; i++)
		sq[i] = alloc_sqe(2);
	flipping = true;
	KVT_EXPECT(!pthread_create(&thread, NULL, flip, sq));
	for (u32 i = 0; i < 3000; i++) {
		kv_store_release32(&r.ring->sq_tail, ++r.sq_tail);
		kv_store_release32(&r.ring->cq_head, kv_load_acquire32(&r.ring->cq_tail));
		if (i % 16 == 0)
			raw_kick(&r);
	}
	usleep(50000);
	flipping = false;
	pthread_join(thread, NULL);
}

static void arguments_that_change(const struct scene *sc)
{
	struct kv_sqe sqe;
	pthread_t thread;
	struct kv_cqe cqe;

	open_ring(sc);
	flipping = true;
	KVT_EXPECT(!pthread_create(&thread, NULL, flip, raw_arg(&r, 0)));
	for (u32 i = 0; i < 500; i++) {
		static const u8 ops[] = {KV_OP_FREE, KV_OP_PIN, KV_OP_SEAL, KV_OP_FORK,
					 KV_OP_LOOKUP};
		u8 op = ops[i % KV_ARRAY_SIZE(ops)];

		sqe = raw_sqe(&r, op);
		sqe.nr = op == KV_OP_LOOKUP ? 256 : 4;
		sqe.arg_bytes = op == KV_OP_SEAL     ? 32 + 4 * 16 + 4 * 256
				: op == KV_OP_LOOKUP ? 16 + 1024
						     : 4 * 16;
		sqe.ret_off = 65536;
		sqe.ret_bytes = 4096;
		cqe = raw_call(&r, sqe);
		KVT_EXPECT(cqe.result != 0);
	}
	flipping = false;
	pthread_join(thread, NULL);
}

/* Completions that nobody takes: this session stands still, nobody else does. */
static void full_completion_ring(const struct scene *sc)
{
	struct kv_sqe *sq;

	open_ring(sc);
	sq = (void *)((u8 *)r.ring + r.ring->sq_off);
	for (u32 i = 0; i < r.ring->sq_depth; i++)
		sq[i] = raw_sqe(&r, KV_OP_STAT);
	for (u32 i = 0; i < 5000; i++) {
		if (r.sq_tail - kv_load_acquire32(&r.ring->sq_head) < r.ring->sq_depth)
			kv_store_release32(&r.ring->sq_tail, ++r.sq_tail);
		if (i % 64 == 0)
			raw_kick(&r);
	}
	usleep(100000);
}

static void kicks(const struct scene *sc)
{
	u64 most = ~0ull - 1;

	open_ring(sc);
	fcntl(r.sq_efd, F_SETFL, O_NONBLOCK);
	for (u32 i = 0; i < 20000; i++)
		if (write(r.sq_efd, &most, sizeof(most)) < 0 && errno != EAGAIN)
			KVT_FAIL("eventfd: %s", strerror(errno));
	fcntl(r.sq_efd, F_SETFL, 0); /* kvmd empties it: the next kick goes through */
	answers(&r, alloc_sqe(1), 0);
}

const struct attack attacks_ring[] = {
	{"sq_tail jumps 2^31 ahead", "session ends", tail_jump},
	{"sq_tail goes back", "session ends", tail_back},
	{"cq_head beyond what was completed", "session ends", cq_head_jump},
	{"an entry with another nonce", "session ends", other_nonce},
	{"all unknown operations", "EOPNOTSUPP each", unknown_operations},
	{"reserved fields", "EINVAL each", reserved_fields},
	{"unknown flags and gfp bits", "EINVAL each", flags_unknown},
	{"counts of 0, 2^31, 2^32 - 1", "refused each", counts},
	{"offsets outside the argument area", "EFAULT each", offsets},
	{"lengths that lie", "refused each", lengths},
	{"all other pool ids", "refused each", other_pools},
	{"the ring's header rewritten", "no effect", header_rewritten},
	{"ftruncate of ring and session page", "EPERM: sealed", truncated},
	{"holes punched into the ring", "session ends, no SIGBUS", holes_in_the_ring},
	{"holes in the session page", "no SIGBUS", holes_in_the_session_page},
	{"entries that change while they are read", "one load each: no damage",
	 entries_that_change},
	{"arguments that change while they are read", "refused, no damage",
	 arguments_that_change},
	{"completions never taken", "only this session waits", full_completion_ring},
	{"20,000 kicks", "no effect", kicks},
	{NULL, NULL, NULL},
};
