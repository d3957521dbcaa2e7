/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/ring.h - kvmd's side of a session's rings (kv/ring.h).
 *
 * Everything in the shared memory is hostile and may change at any time. kvmd keeps
 * geometry, sq_head and cq_tail privately and never reads them back; it copies each entry
 * once, checks the copy and acts on the copy. An index that jumps out of the ring, or an
 * entry of another ring (nonce), ends the session.
 *
 * Thread rules: the loop thread only.
 */
#ifndef KVD_IPC_RING_H
#define KVD_IPC_RING_H

#include <stdbool.h>

#include "base/util.h"
#include "kv/abi.h"

/** enum kvd_ring_fault - why a session was ended; the name goes into log and trace */
enum kvd_ring_fault {
	KVD_RING_OK,
	KVD_RING_SQ_JUMP, /* sq_tail further than sq_depth ahead */
	KVD_RING_CQ_JUMP, /* cq_head beyond what was completed */
	KVD_RING_NONCE,	  /* an entry of another ring */
	KVD_RING_CHANGED, /* an entry changed between two looks at it */
};

/**
 * struct kvd_ring - one session's rings as kvmd sees them
 * @hdr, @sq, @cq, @args: shared memory
 * @map_bytes, @fd: owner of mapping and memfd
 * @sq_depth, @cq_depth, @arg_bytes, @nonce: private, constant
 * @sq_head: entries taken
 * @cq_tail: completions written; @cq_published: made visible
 * @nr_parked: taken entries whose completion is still to come
 * @fault: why the ring is dead
 * @fault_value: the value that was wrong
 * @awake: kvmd looks at the ring by itself; need_wakeup is 0
 */
struct kvd_ring {
	struct kv_ring_hdr *hdr;
	struct kv_sqe *sq;
	struct kv_cqe *cq;
	u8 *args;
	u64 map_bytes;
	int fd;
	u32 sq_depth;
	u32 cq_depth;
	u32 arg_bytes;
	u32 nonce;
	u32 sq_head;
	u32 cq_tail;
	u32 cq_published;
	u32 nr_parked;
	enum kvd_ring_fault fault;
	u32 fault_value;
	bool awake;
};

/**
 * kvd_ring_create() - make a ring's memfd and fill its header
 * @depth: power of two, 1..KV_RING_DEPTH_MAX; the CQ has twice as many
 * @nonce: random
 *
 * Return: 0; -ENOMEM; -EMFILE.
 */
int kvd_ring_create(struct kvd_ring *ring, u64 client_id, u64 table_epoch, u32 depth,
		    u32 nonce);

/** kvd_ring_destroy() - unmap and close */
void kvd_ring_destroy(struct kvd_ring *ring);

/**
 * kvd_ring_fetch() - copy the next entry
 * @ret_sqe: private copy; its nonce is right, everything else is for the caller to check
 *
 * Counts the entry as parked until kvd_ring_complete(). Room in the CQ for every parked
 * entry is kept, so completing cannot fail; without room nothing is taken.
 *
 * Return: 1 an entry; 0 none, or the CQ is full; -EPROTO and @ring->fault.
 */
int kvd_ring_fetch(struct kvd_ring *ring, struct kv_sqe *ret_sqe);

/** kvd_ring_peek() - opcode of the entry that would be fetched, when kvd_ring_waiting(); the
 * copy may say another */
u32 kvd_ring_peek(const struct kvd_ring *ring);

/** kvd_ring_waiting() - are there entries? Also true when a look would find a fault */
bool kvd_ring_waiting(const struct kvd_ring *ring);

/** kvd_ring_choked() - are there entries that a full CQ holds back? */
bool kvd_ring_choked(const struct kvd_ring *ring);

/**
 * kvd_ring_complete() - write a completion for a fetched entry; kvd_ring_publish() shows
 * it
 * @result: 0, -errno or enum kv_outcome
 */
void kvd_ring_complete(struct kvd_ring *ring, u64 user_data, int result, u32 nr, u64 a);

/**
 * kvd_ring_publish() - show completions and taken entries to the client
 *
 * Return: true: the client sleeps and must be kicked through the CQ's eventfd.
 */
bool kvd_ring_publish(struct kvd_ring *ring);

/**
 * kvd_ring_args() - copy arguments out of the shared area, once
 *
 * Return: 0; -EFAULT when [@off, @off + @bytes) is not inside the area.
 */
int kvd_ring_args(const struct kvd_ring *ring, u32 off, u32 bytes, void *dst);

/** kvd_ring_room() - may @bytes of results go to @off, where the client left @room?
 * Return: 0; -EFAULT outside the area; -ENOSPC not enough room */
int kvd_ring_room(const struct kvd_ring *ring, u32 off, u32 room, u64 bytes);

/**
 * kvd_ring_expect() - results will go to @off soon: have their cache lines come meanwhile
 *
 * They are the client's since it read its last answer. kvd_ring_room() was asked before.
 */
void kvd_ring_expect(const struct kvd_ring *ring, u32 off, u32 bytes);

/** kvd_ring_results() - copy results into the shared area; kvd_ring_room() was asked
 * before */
void kvd_ring_results(struct kvd_ring *ring, u32 off, const void *src, u32 bytes);

/** kvd_ring_sleep() - store need_wakeup; the caller then makes a full barrier and asks
 * kvd_ring_waiting() again before it sleeps */
void kvd_ring_sleep(struct kvd_ring *ring);

/** kvd_ring_wake() - kvmd looks at the ring by itself again */
void kvd_ring_wake(struct kvd_ring *ring);

#ifdef KV_FUZZ
/** kv_fuzz_loaded() - a word of an entry was loaded: fuzz targets count and mutate */
void kv_fuzz_loaded(const volatile void *addr);
#endif

/** kvd_ring_fault_str() - "sq_tail jump", ... */
const char *kvd_ring_fault_str(enum kvd_ring_fault fault);

#endif
