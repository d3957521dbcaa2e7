/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ringmap.c - mapping a ring and unmapping it; ring.c has what happens on it.
 *
 * The geometry is checked against the file once and copied; the header in shared memory
 * is not asked again. Threads: the link is not published yet, or nobody uses it any more.
 */
#include "internal.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPIN_CPUS 4 /* with fewer, spinning takes the CPU that the answer needs */

static bool many_cpus(void)
{
	cpu_set_t set;

	return !sched_getaffinity(0, sizeof(set), &set) && CPU_COUNT(&set) >= SPIN_CPUS;
}

/* Is the header what HELLO's reply promised, and does it fit into @bytes? */
static int check_header(const struct kv_ring_hdr *h,
			const struct kv_msg_hello_reply *reply, u64 bytes)
{
	if (h->magic != KV_RING_MAGIC || h->client_id != reply->client_id ||
	    h->table_epoch != reply->table_epoch || h->nonce != reply->ring_nonce)
		return kvc_fail(-EPROTO, "ring: not the ring of this session");
	if (!kv_is_pow2(h->sq_depth) || h->sq_depth > KV_RING_DEPTH_MAX ||
	    !kv_is_pow2(h->cq_depth) || h->cq_depth > KV_RING_DEPTH_MAX)
		return kvc_fail(-EPROTO, "ring: depth %u/%u", h->sq_depth, h->cq_depth);
	if (h->sq_off < sizeof(*h) || h->cq_off < sizeof(*h) || h->arg_off < sizeof(*h) ||
	    (h->sq_off | h->cq_off | h->arg_off) % KV_CACHE_LINE ||
	    h->sq_off + (u64)h->sq_depth * sizeof(struct kv_sqe) > bytes ||
	    h->cq_off + (u64)h->cq_depth * sizeof(struct kv_cqe) > bytes ||
	    h->arg_off + (u64)h->arg_bytes > bytes || h->arg_bytes < KVC_ARG_CHUNK)
		return kvc_fail(-EPROTO, "ring: parts lie outside its %llu bytes",
				(unsigned long long)bytes);
	return 0;
}

static int alloc_slots(struct kvc_ring *ring, u32 arg_bytes)
{
	ring->nr_chunks = KV_MIN(arg_bytes / KVC_ARG_CHUNK, KVC_ARG_CHUNKS_MAX);
	ring->arg_map = calloc(kv_div_round_up(ring->nr_chunks, 64), sizeof(u64));
	ring->slots = calloc(ring->nr_slots, sizeof(*ring->slots));
	if (!ring->arg_map || !ring->slots) {
		free(ring->arg_map);
		free(ring->slots);
		return -ENOMEM;
	}
	for (u32 i = ring->nr_chunks; i % 64;
	     i++) /* chunks that do not exist are taken */
		ring->arg_map[i / 64] |= 1ull << (i % 64);
	for (u32 i = 0; i < ring->nr_slots; i++)
		ring->slots[i].next_free = i + 1;
	ring->free_slot = 0;
	return 0;
}

/**
 * kvc_ring_init() - map the ring that came with HELLO's reply
 * @ring: zeroed
 * @fds: ring, submission eventfd, completion eventfd; on success the eventfds are the
 *	ring's, the first stays the caller's
 *
 * Return: 0; -EPROTO the ring is not as promised; -ENOMEM.
 */
int kvc_ring_init(struct kvc_ring *ring, const struct kv_msg_hello_reply *reply,
		  const int *fds)
{
	struct kv_ring_hdr *h;
	struct stat st;
	int r;

	if (fstat(fds[0], &st) || (u64)st.st_size < reply->ring_bytes ||
	    reply->ring_bytes < sizeof(*h))
		return kvc_fail(-EPROTO, "ring: %u bytes promised, file has %lld",
				reply->ring_bytes, (long long)st.st_size);
	h = mmap(NULL, reply->ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	if (h == MAP_FAILED)
		return kvc_fail(-ENOMEM, "ring: mmap of %u bytes: %s", reply->ring_bytes,
				strerror(errno));
	madvise(h, reply->ring_bytes, MADV_DONTFORK);
	r = check_header(h, reply, reply->ring_bytes);
	if (r)
		goto unmap;
	ring->hdr = h;
	ring->bytes = reply->ring_bytes;
	ring->sq = (struct kv_sqe *)((u8 *)h + h->sq_off);
	ring->cq = (const struct kv_cqe *)((u8 *)h + h->cq_off);
	ring->arg = (u8 *)h + h->arg_off;
	ring->nonce = h->nonce;
	ring->sq_depth = h->sq_depth;
	ring->cq_depth = h->cq_depth;
	ring->nr_slots = KV_MIN(h->sq_depth, h->cq_depth);
	ring->sq_tail = kv_load_relaxed32(&h->sq_tail);
	ring->cq_head = kv_load_relaxed32(&h->cq_head);
	ring->spin = (reply->flags & KV_HELLO_SPIN) || many_cpus();
	r = alloc_slots(ring, h->arg_bytes);
	if (r)
		goto unmap;
	pthread_mutex_init(&ring->lock, NULL);
	pthread_cond_init(&ring->cond, NULL);
	ring->sq_efd = fds[1];
	ring->cq_efd = fds[2];
	return 0;
unmap:
	munmap(h, reply->ring_bytes);
	return r;
}

/** kvc_ring_fini() - unmap a ring that no call uses */
void kvc_ring_fini(struct kvc_ring *ring)
{
	munmap(ring->hdr, ring->bytes);
	close(ring->sq_efd);
	close(ring->cq_efd);
	free(ring->slots);
	free(ring->arg_map);
	pthread_cond_destroy(&ring->cond);
	pthread_mutex_destroy(&ring->lock);
}
