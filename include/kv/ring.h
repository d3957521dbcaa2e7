/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv/ring.h - submission and completion ring of a session, and the ordering of shared memory.
 *
 * One memfd per session, sealed SHRINK|GROW|SEAL, mode 0600:
 *
 *   0                 struct kv_ring_hdr (one 4 KiB page)
 *   sq_off            sq_depth x struct kv_sqe   written by client, read by kvmd
 *   cq_off            cq_depth x struct kv_cqe   written by kvmd, read by client
 *   arg_off           arg_bytes of argument area: the client lays arrays here; kvmd reads its
 *                     inputs once and writes its results
 *
 * head and tail are free-running u32 on cache lines of their own. The consumer of either side
 * copies an entry once into private memory, checks the copy, acts on the copy. kvmd keeps its
 * own copy of the geometry and never reads it back. Together with kv/session.h this is the only
 * file with memory ordering.
 *
 * Sleep: store need_wakeup, full barrier, re-check, sleep on the eventfd; the other side stores
 * its index (release), full barrier, reads need_wakeup.
 */
#ifndef KV_RING_H
#define KV_RING_H

#include "types.h"

#define KV_RING_MAGIC	  0x676e697276766bull /* "kvvring" */
#define KV_RING_DEPTH_MAX 4096u
#define KV_RING_DEPTH	  256u	    /* default */
#define KV_ARG_BYTES	  (2u << 20) /* default argument area */

/**
 * struct kv_ring_hdr - first page of a ring
 * @magic: KV_RING_MAGIC
 * @client_id: never reused within a table_epoch
 * @table_epoch: instance of kvmd that made the ring
 * @nonce: every sqe repeats it; a ring of yesterday has no effect (cases O56)
 */
struct kv_ring_hdr {
	/* written by kvmd before the client gets the fd; constant */
	uint64_t magic;
	uint64_t client_id;
	uint64_t table_epoch;
	uint32_t nonce;
	uint32_t sq_depth;
	uint32_t cq_depth;
	uint32_t sq_off;
	uint32_t cq_off;
	uint32_t arg_off;
	uint32_t arg_bytes;
	uint32_t reserved0;
	uint8_t pad0[64 - 56];
	/* written by client, read by kvmd */
	uint32_t sq_tail;
	uint8_t pad1[60];
	uint32_t cq_head;
	uint8_t pad2[60];
	uint32_t cq_need_wakeup;
	uint8_t pad3[60];
	/* written by kvmd, read by client */
	uint32_t sq_head;
	uint8_t pad4[60];
	uint32_t cq_tail;
	uint8_t pad5[60];
	uint32_t sq_need_wakeup;
	uint8_t pad6[60];
};
KV_ABI_SIZE(kv_ring_hdr, 448);
KV_ABI_FIELD(kv_ring_hdr, magic, 0, 8);
KV_ABI_FIELD(kv_ring_hdr, client_id, 8, 8);
KV_ABI_FIELD(kv_ring_hdr, table_epoch, 16, 8);
KV_ABI_FIELD(kv_ring_hdr, nonce, 24, 4);
KV_ABI_FIELD(kv_ring_hdr, sq_depth, 28, 4);
KV_ABI_FIELD(kv_ring_hdr, cq_depth, 32, 4);
KV_ABI_FIELD(kv_ring_hdr, sq_off, 36, 4);
KV_ABI_FIELD(kv_ring_hdr, cq_off, 40, 4);
KV_ABI_FIELD(kv_ring_hdr, arg_off, 44, 4);
KV_ABI_FIELD(kv_ring_hdr, arg_bytes, 48, 4);
KV_ABI_FIELD(kv_ring_hdr, reserved0, 52, 4);
KV_ABI_FIELD(kv_ring_hdr, sq_tail, 64, 4);
KV_ABI_FIELD(kv_ring_hdr, cq_head, 128, 4);
KV_ABI_FIELD(kv_ring_hdr, cq_need_wakeup, 192, 4);
KV_ABI_FIELD(kv_ring_hdr, sq_head, 256, 4);
KV_ABI_FIELD(kv_ring_hdr, cq_tail, 320, 4);
KV_ABI_FIELD(kv_ring_hdr, sq_need_wakeup, 384, 4);

/**
 * struct kv_sqe - one request
 * @opcode: enum kv_opcode
 * @flags: KV_SQE_*; other bits must be 0
 * @magazine: KV_SQE_MAGAZINE: index of the magazine to stock
 * @ring_nonce: kv_ring_hdr.nonce
 * @user_data: comes back in the completion
 * @pool_id: pool of the request
 * @nr: pages (ALLOC, FREE, SEAL, PIN, UNPIN, FORK) or tokens (LOOKUP)
 * @gfp: KV_GFP_* (ALLOC, FORK)
 * @arg_bytes: bytes of input at @arg_off
 * @arg_off: input, offset in the argument area
 * @ret_off: results, offset in the argument area
 * @ret_bytes: room at @ret_off
 * @reserved: must be 0
 */
struct kv_sqe {
	uint8_t opcode;
	uint8_t flags;
	uint16_t magazine;
	uint32_t ring_nonce;
	uint64_t user_data;
	uint32_t pool_id;
	uint32_t nr;
	uint32_t gfp;
	uint32_t arg_bytes;
	uint32_t arg_off;
	uint32_t ret_off;
	uint32_t ret_bytes;
	uint32_t reserved[5];
};
KV_ABI_SIZE(kv_sqe, 64);
KV_ABI_FIELD(kv_sqe, opcode, 0, 1);
KV_ABI_FIELD(kv_sqe, flags, 1, 1);
KV_ABI_FIELD(kv_sqe, magazine, 2, 2);
KV_ABI_FIELD(kv_sqe, ring_nonce, 4, 4);
KV_ABI_FIELD(kv_sqe, user_data, 8, 8);
KV_ABI_FIELD(kv_sqe, pool_id, 16, 4);
KV_ABI_FIELD(kv_sqe, nr, 20, 4);
KV_ABI_FIELD(kv_sqe, gfp, 24, 4);
KV_ABI_FIELD(kv_sqe, arg_bytes, 28, 4);
KV_ABI_FIELD(kv_sqe, arg_off, 32, 4);
KV_ABI_FIELD(kv_sqe, ret_off, 36, 4);
KV_ABI_FIELD(kv_sqe, ret_bytes, 40, 4);
KV_ABI_FIELD(kv_sqe, reserved, 44, 20);

#define KV_SQE_MAGAZINE 0x01u /* ALLOC: stock sqe.magazine instead of writing grants */
#define KV_SQE_FLAGS	0x01u

/**
 * struct kv_cqe - one completion
 * @user_data: of the request
 * @result: 0, -errno or enum kv_outcome
 * @nr: pages really served (FREE, LOOKUP, magazine ALLOC); KV_PENDING: pages in quarantine
 * @a: operation's own (abi.h)
 * @ring_nonce: kv_ring_hdr.nonce: memory that was never written is no completion (O57)
 * @sequence: low 32 bits of the completion's position
 */
struct kv_cqe {
	uint64_t user_data;
	int32_t result;
	uint32_t nr;
	uint64_t a;
	uint32_t ring_nonce;
	uint32_t sequence;
};
KV_ABI_SIZE(kv_cqe, 32);
KV_ABI_FIELD(kv_cqe, user_data, 0, 8);
KV_ABI_FIELD(kv_cqe, result, 8, 4);
KV_ABI_FIELD(kv_cqe, nr, 12, 4);
KV_ABI_FIELD(kv_cqe, a, 16, 8);
KV_ABI_FIELD(kv_cqe, ring_nonce, 24, 4);
KV_ABI_FIELD(kv_cqe, sequence, 28, 4);

/* ------------------------------------------------------------------ ordering, host only */

static inline uint32_t kv_load_acquire32(const uint32_t *p)
{
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static inline uint64_t kv_load_acquire64(const uint64_t *p)
{
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static inline uint32_t kv_load_relaxed32(const uint32_t *p)
{
	return __atomic_load_n(p, __ATOMIC_RELAXED);
}

static inline uint64_t kv_load_relaxed64(const uint64_t *p)
{
	return __atomic_load_n(p, __ATOMIC_RELAXED);
}

static inline void kv_store_release32(uint32_t *p, uint32_t v)
{
	__atomic_store_n(p, v, __ATOMIC_RELEASE);
}

static inline void kv_store_release64(uint64_t *p, uint64_t v)
{
	__atomic_store_n(p, v, __ATOMIC_RELEASE);
}

static inline void kv_store_relaxed32(uint32_t *p, uint32_t v)
{
	__atomic_store_n(p, v, __ATOMIC_RELAXED);
}

static inline void kv_store_relaxed64(uint64_t *p, uint64_t v)
{
	__atomic_store_n(p, v, __ATOMIC_RELAXED);
}

/* Full barrier: orders a store before a later load, which release/acquire does not. */
static inline void kv_full_barrier(void)
{
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline void kv_acquire_fence(void)
{
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
}

static inline int kv_cas64(uint64_t *p, uint64_t expected, uint64_t desired)
{
	return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_ACQ_REL,
					   __ATOMIC_ACQUIRE);
}

#endif /* KV_RING_H */
