/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/ring.c - see ring.h. (tour 3/12)
 *
 * Barriers: publish (store cq_tail, full barrier, read cq_need_wakeup) pairs with the
 * client's store of cq_need_wakeup, full barrier, re-check of cq_tail. Sleep (store
 * sq_need_wakeup, full barrier, re-check of sq_tail) pairs with the client's store of
 * sq_tail, full barrier, read of sq_need_wakeup.
 */
#include "kvmd/ipc/ring.h"

#include <errno.h>
#include <string.h>

#include "base/assert.h"
#include "base/mutant.h"
#include "base/once.h"
#include "kvmd/backend/memfd.h"

#define RING_PAGE    4096u
/* Results of 128 pages: more would push out what the request itself needs. */
#define EXPECT_BYTES 2048u

int kvd_ring_create(struct kvd_ring *ring, u64 client_id, u64 table_epoch, u32 depth,
		    u32 nonce)
{
	struct kv_ring_hdr *hdr;
	void *addr;
	int r;

	kv_assert(kv_is_pow2(depth) && depth <= KV_RING_DEPTH_MAX);
	memset(ring, 0, sizeof(*ring));
	ring->sq_depth = depth;
	ring->cq_depth = depth * 2;
	ring->arg_bytes = KV_ARG_BYTES;
	ring->nonce = nonce;
	ring->map_bytes =
		RING_PAGE +
		kv_round_up((u64)ring->sq_depth * sizeof(struct kv_sqe), RING_PAGE) +
		kv_round_up((u64)ring->cq_depth * sizeof(struct kv_cqe), RING_PAGE) +
		ring->arg_bytes;
	r = kvd_memfd_create("kvmd-ring", ring->map_bytes, KVD_MEMFD_SIZE, &addr,
			     &ring->fd);
	if (r)
		return r;
	hdr = addr;
	hdr->client_id = client_id;
	hdr->table_epoch = table_epoch;
	hdr->nonce = nonce;
	hdr->sq_depth = ring->sq_depth;
	hdr->cq_depth = ring->cq_depth;
	hdr->sq_off = RING_PAGE;
	hdr->cq_off =
		hdr->sq_off +
		(u32)kv_round_up((u64)ring->sq_depth * sizeof(struct kv_sqe), RING_PAGE);
	hdr->arg_off =
		hdr->cq_off +
		(u32)kv_round_up((u64)ring->cq_depth * sizeof(struct kv_cqe), RING_PAGE);
	hdr->arg_bytes = ring->arg_bytes;
	hdr->sq_need_wakeup = 1;
	ring->hdr = hdr;
	ring->sq = (void *)((u8 *)addr + hdr->sq_off);
	ring->cq = (void *)((u8 *)addr + hdr->cq_off);
	ring->args = (u8 *)addr + hdr->arg_off;
	kv_store_release64(&hdr->magic, KV_RING_MAGIC);
	return 0;
}

void kvd_ring_destroy(struct kvd_ring *ring)
{
	if (!ring->hdr)
		return;
	kvd_memfd_destroy(ring->hdr, ring->map_bytes, ring->fd);
	memset(ring, 0, sizeof(*ring));
	ring->fd = -1;
}

static int ring_fault(struct kvd_ring *ring, enum kvd_ring_fault fault, u32 value)
{
	ring->fault = fault;
	ring->fault_value = value;
	return -EPROTO;
}

/* Is there room in the CQ for one more entry's completion, beside those promised? */
static int cq_room(struct kvd_ring *ring)
{
	u32 used = ring->cq_published - kv_load_acquire32(&ring->hdr->cq_head);
	u32 unpublished = ring->cq_tail - ring->cq_published;

	if (used > ring->cq_depth && !KV_MUTANT(ring_jump_ok))
		return ring_fault(ring, KVD_RING_CQ_JUMP, used);
	return used + unpublished + ring->nr_parked < ring->cq_depth ||
	       KV_MUTANT(cq_overrun);
}

/* The client may write between the two: the copy is what counts. */
static void sqe_copy(struct kvd_ring *ring, struct kv_sqe *ret_sqe)
{
	const struct kv_sqe *shared = &ring->sq[ring->sq_head & (ring->sq_depth - 1)];
	const volatile u64 *src = (const volatile u64 *)shared;
	u64 words[sizeof(struct kv_sqe) / sizeof(u64)];
	size_t i;

	for (i = 0; i < KV_ARRAY_SIZE(words); i++) {
		words[i] = src[i];
#ifdef KV_FUZZ
		kv_fuzz_loaded(&src[i]);
#endif
	}
	memcpy(ret_sqe, words, sizeof(*ret_sqe));
}

static int sqe_check(struct kvd_ring *ring, const struct kv_sqe *sqe)
{
	if (sqe->ring_nonce != ring->nonce && !KV_MUTANT(no_nonce_check))
		return ring_fault(ring, KVD_RING_NONCE, sqe->ring_nonce);
	return 0;
}

int kvd_ring_fetch(struct kvd_ring *ring, struct kv_sqe *ret_sqe)
{
	u32 ready = kv_load_acquire32(&ring->hdr->sq_tail) - ring->sq_head;
	int r;

	if (ring->fault)
		return -EPROTO;
	if (!ready)
		return 0;
	if (ready > ring->sq_depth && !KV_MUTANT(ring_jump_ok))
		return ring_fault(ring, KVD_RING_SQ_JUMP, ready);
	r = cq_room(ring);
	if (r <= 0)
		return r;
	sqe_copy(ring, ret_sqe);
	r = sqe_check(ring, ret_sqe);
	if (r)
		return r;
	if (KV_MUTANT(double_fetch))
		sqe_copy(ring, ret_sqe);
	ring->sq_head++;
	ring->nr_parked++;
	return 1;
}

u32 kvd_ring_peek(const struct kvd_ring *ring)
{
	return kv_read_once(ring->sq[ring->sq_head & (ring->sq_depth - 1)].opcode);
}

bool kvd_ring_waiting(const struct kvd_ring *ring)
{
	return kv_load_acquire32(&ring->hdr->sq_tail) != ring->sq_head;
}

bool kvd_ring_choked(const struct kvd_ring *ring)
{
	u32 used = ring->cq_tail - kv_load_acquire32(&ring->hdr->cq_head);

	return kvd_ring_waiting(ring) && used + ring->nr_parked >= ring->cq_depth;
}

void kvd_ring_complete(struct kvd_ring *ring, u64 user_data, int result, u32 nr, u64 a)
{
	struct kv_cqe *cqe = &ring->cq[ring->cq_tail & (ring->cq_depth - 1)];

	kv_assert(ring->nr_parked > 0);
	*cqe = (struct kv_cqe){
		.user_data = user_data,
		.result = result,
		.nr = nr,
		.a = a,
		.ring_nonce = ring->nonce,
		.sequence = ring->cq_tail,
	};
	ring->cq_tail++;
	ring->nr_parked--;
}

bool kvd_ring_publish(struct kvd_ring *ring)
{
	bool completed = ring->cq_published != ring->cq_tail;

	kv_store_release32(&ring->hdr->sq_head, ring->sq_head);
	if (!completed)
		return false;
	kv_store_release32(&ring->hdr->cq_tail, ring->cq_tail);
	ring->cq_published = ring->cq_tail;
	kv_full_barrier();
	return kv_load_relaxed32(&ring->hdr->cq_need_wakeup) != 0;
}

int kvd_ring_args(const struct kvd_ring *ring, u32 off, u32 bytes, void *dst)
{
	if ((off > ring->arg_bytes || bytes > ring->arg_bytes - off) &&
	    !KV_MUTANT(args_outside_ok))
		return -EFAULT;
	memcpy(dst, ring->args + off, bytes);
	/* The compiler must not go back to the shared area later. */
	__asm__ volatile("" ::: "memory");
	return 0;
}

int kvd_ring_room(const struct kvd_ring *ring, u32 off, u32 room, u64 bytes)
{
	if (off > ring->arg_bytes || room > ring->arg_bytes - off)
		return -EFAULT;
	return bytes > room ? -ENOSPC : 0;
}

void kvd_ring_expect(const struct kvd_ring *ring, u32 off, u32 bytes)
{
	const u8 *at = ring->args + off;

	for (u32 i = 0; i < KV_MIN(bytes, EXPECT_BYTES); i += 64)
		__builtin_prefetch(at + i, 1);
}

void kvd_ring_results(struct kvd_ring *ring, u32 off, const void *src, u32 bytes)
{
	kv_assert(off <= ring->arg_bytes && bytes <= ring->arg_bytes - off);
	memcpy(ring->args + off, src, bytes);
}

void kvd_ring_sleep(struct kvd_ring *ring)
{
	ring->awake = false;
	kv_store_relaxed32(&ring->hdr->sq_need_wakeup, 1);
}

void kvd_ring_wake(struct kvd_ring *ring)
{
	ring->awake = true;
	kv_store_relaxed32(&ring->hdr->sq_need_wakeup, 0);
}

const char *kvd_ring_fault_str(enum kvd_ring_fault fault)
{
	switch (fault) {
	case KVD_RING_SQ_JUMP:
		return "sq_tail jumped out of the ring";
	case KVD_RING_CQ_JUMP:
		return "cq_head jumped out of the ring";
	case KVD_RING_NONCE:
		return "entry with another ring's nonce";
	case KVD_RING_CHANGED:
		return "entry that changed while it was looked at";
	case KVD_RING_OK:
		break;
	}
	return "none";
}
