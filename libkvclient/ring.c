/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring.c - requests to kvmd through the shared ring (include/kv/ring.h).
 *
 * A request takes a slot and a piece of the argument area, is published on the submission
 * ring, and is matched to its completion by user_data = serial << 32 | slot. A completion
 * that does not match a sent request, or carries another nonce or sequence than its place
 * demands, ends the connection with -EPROTO before any array is indexed with what it says
 * (cases O57).
 *
 * Any number of threads may call. Of those that wait, one (ring.polling) spins or sleeps
 * on the completion eventfd for all, the others sleep on ring.cond; whoever takes
 * completions off the ring or makes room in it while another thread polls wakes that
 * thread through the same eventfd (tests/model/wait.pml).
 *
 * kvmd is not an enemy of its clients, so arguments and results are plain copies; what is
 * guarded against is memory that is not what we think it is.
 *
 * Lock: ring.lock (4 in internal.h); ring.lock is not held while arguments are copied.
 */
#include "internal.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

static void cpu_relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static void wake_fd(int fd)
{
	u64 one = 1;
	ssize_t n = write(fd, &one, sizeof(one));

	/* A full counter wakes as well as a new one. */
	(void)n;
}

/** kvc_ring_kick() - wake kvmd: there is something to look at */
void kvc_ring_kick(struct kvc_ring *ring)
{
	wake_fd(ring->sq_efd);
}

static void fail_locked(struct kvc_ring *ring, int error)
{
	if (!ring->error)
		ring->error = error;
	if (ring->polling)
		wake_fd(ring->cq_efd);
	pthread_cond_broadcast(&ring->cond);
}

/** kvc_ring_fail() - no completion will come any more; every waiting call ends with
 * @error */
void kvc_ring_fail(struct kvc_ring *ring, int error)
{
	pthread_mutex_lock(&ring->lock);
	fail_locked(ring, error);
	pthread_mutex_unlock(&ring->lock);
}

/* ------------------------------------------------------------------------ argument area
 */

static bool chunk_taken(const struct kvc_ring *ring, u32 i)
{
	return ring->arg_map[i / 64] >> (i % 64) & 1;
}

/* First fit: small requests gather at the front, so that a big LOOKUP finds its run
 * behind. */
static bool chunks_take(struct kvc_ring *ring, u32 nr, u32 *ret_first)
{
	u32 run = 0;

	for (u32 i = 0; i < ring->nr_chunks; i++) {
		if (!(i % 64) && ring->arg_map[i / 64] == ~0ull) {
			run = 0;
			i += 63;
			continue;
		}
		run = chunk_taken(ring, i) ? 0 : run + 1;
		if (run < nr)
			continue;
		*ret_first = i + 1 - nr;
		for (u32 k = *ret_first; k <= i; k++)
			ring->arg_map[k / 64] |= 1ull << (k % 64);
		return true;
	}
	return false;
}

static void slot_free_locked(struct kvc_ring *ring, struct kvc_slot *slot)
{
	for (u32 k = slot->chunk; k < slot->chunk + slot->nr_chunks; k++)
		ring->arg_map[k / 64] &= ~(1ull << (k % 64));
	slot->nr_chunks = 0;
	slot->state = KVC_SLOT_FREE;
	slot->user_data = 0;
	slot->pool = NULL;
	slot->next_free = ring->free_slot;
	ring->free_slot = (u32)(slot - ring->slots);
	if (!ring->nr_waiting)
		return;
	/* one of them may be the thread that polls, and sleeps elsewhere */
	if (ring->polling && !KV_MUTANT(room_unsaid))
		wake_fd(ring->cq_efd);
	pthread_cond_broadcast(&ring->cond);
}

/* -------------------------------------------------------------------------- completions
 */

static void give_back_page(struct kvc_pool *pool, u32 pfn, u64 tag)
{
	struct kv_grant g = {.pfn = pfn, .tag = tag};

	kvc_hold(pool, pfn, tag);
	if (kvc_ret_add(pool, &g, 1))
		kvc_log(pool->c, KVC_LOG_ERR, "pfn %u of a late answer is lost", pfn);
}

/* References for a caller that has gone: they must not stay with a session that forgot
 * them. PIN's are its arguments. */
static void give_back_locked(struct kvc_ring *ring, struct kvc_slot *slot)
{
	const struct kv_page_ref *pinned = (const void *)(ring->arg + slot->arg_off);
	const u8 *ret = ring->arg + slot->ret_off;
	u32 nr = slot->opcode == KV_OP_LOOKUP ? slot->cqe.nr : slot->nr;
	size_t unit = slot->opcode == KV_OP_LOOKUP ? sizeof(struct kv_hit)
						   : sizeof(struct kv_grant);

	if (!slot->pool || slot->cqe.result || (slot->flags & KV_SQE_MAGAZINE))
		return;
	if (slot->opcode == KV_OP_PIN) {
		for (u32 i = 0; i < nr; i++)
			give_back_page(slot->pool, pinned[i].pfn, pinned[i].tag);
		return;
	}
	if (slot->opcode != KV_OP_ALLOC && slot->opcode != KV_OP_FORK &&
	    slot->opcode != KV_OP_LOOKUP)
		return;
	nr = KV_MIN(nr, slot->ret_bytes / (u32)unit);
	for (u32 i = 0; i < nr; i++) {
		struct kv_grant g;

		memcpy(&g, ret + (i + 1) * unit - sizeof(g), sizeof(g));
		give_back_page(slot->pool, g.pfn, g.tag);
	}
}

static void complete_locked(struct kvc_link *link, struct kvc_slot *slot)
{
	struct kvc_ring *ring = &link->ring;
	struct kvc_mag *m;

	switch (slot->kind) {
	case KVC_SYNC:
		slot->state = KVC_SLOT_DONE;
		return;
	case KVC_ABANDONED:
		give_back_locked(ring, slot);
		break;
	case KVC_REFILL:
		m = &link->mags[slot->magazine];
		if (slot->cqe.result)
			kv_store_relaxed32(&m->pause, KV_MAGAZINE_SLOTS);
		else
			kv_store_relaxed32(&m->stocked,
					   m->stocked + KV_MIN(slot->cqe.nr, slot->nr));
		kv_store_release32(&m->refilling, 0);
		break;
	case KVC_FREE_ASYNC:
		ring->frees_in_flight--;
		if (slot->cqe.result == KV_STALE)
			ring->stale_frees += slot->nr - KV_MIN(slot->cqe.nr, slot->nr);
		break;
	default:
		break;
	}
	slot_free_locked(ring, slot);
}

/* Take what is there. Nothing of a completion is used before all of it is believed. */
static void reap_locked(struct kvc_link *link)
{
	struct kvc_ring *ring = &link->ring;
	u32 head = ring->cq_head;
	bool any = false;

	while (!ring->error) {
		u32 tail = kv_load_acquire32(&ring->hdr->cq_tail);
		struct kvc_slot *slot;
		struct kv_cqe cqe;
		u32 index;

		if (tail == head)
			break;
		cqe = ring->cq[head & (ring->cq_depth - 1)];
		index = (u32)cqe.user_data;
		if (!KV_MUTANT(cqe_unchecked) &&
		    (tail - head > ring->cq_depth || cqe.ring_nonce != ring->nonce ||
		     cqe.sequence != head || index >= ring->nr_slots ||
		     ring->slots[index].state != KVC_SLOT_SENT ||
		     ring->slots[index].user_data != cqe.user_data ||
		     cqe.result >= KV_OUTCOME_NR)) {
			fail_locked(ring, -EPROTO);
			break;
		}
		slot = &ring->slots[index];
		slot->cqe = cqe;
		complete_locked(link, slot);
		head++;
		any = true;
	}
	if (!any)
		return;
	kv_store_relaxed32(&ring->cq_head, head);
	kv_store_release32(&ring->hdr->cq_head, head);
	if (ring->polling)
		wake_fd(ring->cq_efd);
	pthread_cond_broadcast(&ring->cond);
}

/** kvc_ring_reap() - take completions that are there; cheap when there are none */
void kvc_ring_reap(struct kvc_link *link)
{
	struct kvc_ring *ring = &link->ring;

	if (kv_load_relaxed32(&ring->hdr->cq_tail) == kv_load_relaxed32(&ring->cq_head))
		return;
	pthread_mutex_lock(&ring->lock);
	reap_locked(link);
	pthread_mutex_unlock(&ring->lock);
}

/* ------------------------------------------------------------------------------ waiting
 */

static bool completion_there(struct kvc_ring *ring)
{
	return kv_load_acquire32(&ring->hdr->cq_tail) !=
	       kv_load_relaxed32(&ring->cq_head);
}

/* @work_ns: what the caller's own request will take about */
static bool spin_for_completion(struct kvc_ring *ring, u64 work_ns, u64 deadline_ns)
{
	u64 now_ns = kv_now_ns();
	u64 end_ns = KV_MIN(now_ns + work_ns + KVC_SPIN_NS, deadline_ns);

	while (now_ns < end_ns) {
		for (int i = 0; i < 32; i++) {
			if (completion_there(ring))
				return true;
			cpu_relax();
		}
		now_ns = kv_now_ns();
	}
	return false;
}

/* kvmd holds completions back while its messages to us find no room: read them. */
static void read_socket(struct kvc_link *link)
{
	struct kvc *c = link->c;
	int r = 0;

	if (pthread_mutex_trylock(&c->lock)) {
		kvc_sleep_ns(20 *
			     KV_NSEC_PER_USEC); /* its holder reads, or is done soon */
		return;
	}
	if (link == c->link)
		r = kvc_sock_read_locked(c);
	pthread_mutex_unlock(&c->lock);
	if (r == -EMFILE)
		kvc_sleep_ns(KV_NSEC_PER_MSEC); /* what cannot be read stays readable */
}

/*
 * Sleep until kvmd completes something or says something. Store need_wakeup, full
 * barrier, re-check: pairs with kvmd's store of cq_tail, full barrier, load of
 * need_wakeup. Return: 0 look again; -ETIMEDOUT; -ECONNRESET.
 */
static int sleep_for_completion(struct kvc_link *link, u64 deadline_ns)
{
	struct kvc_ring *ring = &link->ring;
	bool read_it = kv_load_relaxed32(&link->c->nr_events) < KVC_EVENTS_MAX;
	struct pollfd p[2] = {
		{.fd = ring->cq_efd, .events = POLLIN},
		{.fd = link->sock, .events = read_it ? POLLIN | POLLRDHUP : POLLRDHUP}};
	u64 now_ns = kv_now_ns(), left_ns, count;
	struct timespec ts;
	int r = 0;

	if (now_ns >= deadline_ns)
		return -ETIMEDOUT;
	left_ns = deadline_ns - now_ns;
	ts.tv_sec = (time_t)(left_ns / KV_NSEC_PER_SEC);
	ts.tv_nsec = (long)(left_ns % KV_NSEC_PER_SEC);
	kv_store_relaxed32(&ring->hdr->cq_need_wakeup, 1);
	kv_full_barrier();
	if (!completion_there(ring))
		r = ppoll(p, 2, &ts, NULL);
	kv_store_relaxed32(&ring->hdr->cq_need_wakeup, 0);
	if (r <= 0)
		return 0;
	if ((p[0].revents & POLLIN) && read(ring->cq_efd, &count, sizeof(count)) < 0)
		return 0; /* another wake-up took it */
	if (p[1].revents & POLLIN)
		read_socket(link);
	else if (p[1].revents && !completion_there(ring))
		return -ECONNRESET;
	return 0;
}

/*
 * Wait until something changed: as the one that polls for all, or on the condition.
 * Return: 0 look again; -ETIMEDOUT; the ring's error.
 */
static int wait_change_locked(struct kvc_link *link, u64 work_ns, u64 deadline_ns)
{
	struct kvc_ring *ring = &link->ring;
	int r = 0;

	if (ring->error)
		return ring->error;
	if (ring->polling) {
		struct timespec ts = {(time_t)(deadline_ns / KV_NSEC_PER_SEC),
				      (long)(deadline_ns % KV_NSEC_PER_SEC)};

		return -pthread_cond_clockwait(&ring->cond, &ring->lock, CLOCK_MONOTONIC,
					       &ts);
	}
	ring->polling = true;
	pthread_mutex_unlock(&ring->lock);
	if (!ring->spin || !spin_for_completion(ring, work_ns, deadline_ns))
		r = sleep_for_completion(link, deadline_ns);
	pthread_mutex_lock(&ring->lock);
	ring->polling = false;
	reap_locked(link);
	if (r == -ECONNRESET)
		fail_locked(ring, r);
	pthread_cond_broadcast(&ring->cond);
	return ring->error ? ring->error : r;
}

/* ----------------------------------------------------------------------------- requests
 */

/* @deadline_ns: 0 = do not wait. Return: 0; KV_BUSY; -ETIMEDOUT; -E2BIG; the ring's
 * error. */
static int slot_get(struct kvc_link *link, const struct kvc_req *req, u32 kind,
		    u64 deadline_ns, struct kvc_slot **ret_slot)
{
	struct kvc_ring *ring = &link->ring;
	u64 bytes = kv_round_up(req->arg_bytes, KV_CACHE_LINE) + req->ret_bytes;
	u32 nr = (u32)kv_div_round_up(bytes, KVC_ARG_CHUNK), first = 0;
	struct kvc_slot *slot;
	int r = 0;

	if (nr > ring->nr_chunks)
		return kvc_fail(-E2BIG, "request of %llu bytes, ring has room for %u",
				(unsigned long long)bytes,
				ring->nr_chunks * KVC_ARG_CHUNK);
	pthread_mutex_lock(&ring->lock);
	while (!ring->error) {
		if (ring->free_slot < ring->nr_slots &&
		    (!nr || chunks_take(ring, nr, &first)))
			break;
		r = KV_BUSY;
		if (!deadline_ns)
			goto unlock;
		ring->nr_waiting++;
		r = wait_change_locked(link, 0, deadline_ns);
		ring->nr_waiting--;
		if (r)
			goto unlock;
	}
	r = ring->error;
	if (r)
		goto unlock;
	slot = &ring->slots[ring->free_slot];
	ring->free_slot = slot->next_free;
	slot->state = KVC_SLOT_RESERVED;
	slot->kind = kind;
	slot->serial++;
	slot->user_data = ((u64)slot->serial << 32) | (u64)(slot - ring->slots);
	slot->chunk = first;
	slot->nr_chunks = nr;
	slot->arg_off = first * KVC_ARG_CHUNK;
	slot->ret_off = slot->arg_off + (u32)kv_round_up(req->arg_bytes, KV_CACHE_LINE);
	slot->ret_bytes = req->ret_bytes;
	slot->opcode = req->opcode;
	slot->flags = req->flags;
	slot->magazine = req->magazine;
	slot->nr = req->nr;
	slot->pool = req->pool;
	if (kind == KVC_FREE_ASYNC)
		ring->frees_in_flight++;
	*ret_slot = slot;
unlock:
	pthread_mutex_unlock(&ring->lock);
	return r;
}

/* The slots are at most the ring's depth, so that the ring has room for every one of
 * them. */
static void submit(struct kvc_link *link, const struct kvc_req *req,
		   struct kvc_slot *slot)
{
	struct kvc_ring *ring = &link->ring;
	struct kv_sqe sqe = {
		.opcode = req->opcode,
		.flags = req->flags,
		.magazine = req->magazine,
		.ring_nonce = ring->nonce,
		.user_data = slot->user_data,
		.pool_id = req->pool ? req->pool->pool_id : 0,
		.nr = req->nr,
		.gfp = req->gfp,
		.arg_bytes = req->arg_bytes,
		.arg_off = req->arg_bytes ? slot->arg_off : 0,
		.ret_off = req->ret_bytes ? slot->ret_off : 0,
		.ret_bytes = req->ret_bytes,
	};

	if (req->fill)
		req->fill(ring->arg + slot->arg_off, req);
	else if (req->arg_bytes)
		memcpy(ring->arg + slot->arg_off, req->src, req->arg_bytes);
	pthread_mutex_lock(&ring->lock);
	slot->state = KVC_SLOT_SENT;
	ring->sq[ring->sq_tail & (ring->sq_depth - 1)] = sqe;
	ring->sq_tail++;
	kv_store_release32(&ring->hdr->sq_tail, ring->sq_tail);
	pthread_mutex_unlock(&ring->lock);
	/* pairs with kvmd's store of sq_need_wakeup, full barrier, load of sq_tail */
	kv_full_barrier();
	if (kv_load_relaxed32(&ring->hdr->sq_need_wakeup))
		kvc_ring_kick(ring);
}

/* Copy a completed request's results out. Return: the request's answer, or -EPROTO. */
static int take_result(struct kvc_ring *ring, struct kvc_req *req,
		       const struct kvc_slot *slot)
{
	u64 bytes = req->ret_bytes;

	req->ret_nr = slot->cqe.nr;
	req->ret_a = slot->cqe.a;
	if (slot->cqe.result || !req->ret)
		return slot->cqe.result;
	if (req->ret_unit)
		bytes = (u64)slot->cqe.nr * req->ret_unit;
	if (bytes > req->ret_bytes) {
		kvc_ring_fail(ring, -EPROTO);
		return kvc_fail(-EPROTO, "opcode %u: %u results in room for %u bytes",
				req->opcode, slot->cqe.nr, req->ret_bytes);
	}
	memcpy(req->ret, ring->arg + slot->ret_off, bytes);
	return 0;
}

/**
 * kvc_ring_call() - send a request and wait for its answer
 * @req: the request; results and @req->ret_nr are written on completion
 *
 * Context: the caller holds a reference to @link and no lock.
 * Return: the request's answer; -ETIMEDOUT; -ECONNRESET kvmd hung up, the request may or
 *	may not have been served; -EPROTO a completion that is none; -E2BIG.
 */
int kvc_ring_call(struct kvc_link *link, struct kvc_req *req, u64 deadline_ns)
{
	bool freeing = req->opcode == KV_OP_FREE && !req->sent;
	struct kvc_ring *ring = &link->ring;
	struct kvc_slot *slot;
	int r;

	r = slot_get(link, req, KVC_SYNC, deadline_ns, &slot);
	if (r)
		return r;
	req->sent = true;
	submit(link, req, slot);
	if (freeing) /* while kvmd works */
		kvc_ledger_freeing(req);
	pthread_mutex_lock(&ring->lock);
	for (;;) {
		reap_locked(link);
		if (slot->state == KVC_SLOT_DONE)
			break;
		/* kvmd reads, hashes or compares each byte of the arguments: 1 ns at most */
		r = r ? r : wait_change_locked(link, req->arg_bytes, deadline_ns);
		if (r && slot->state != KVC_SLOT_DONE) {
			slot->kind = KVC_ABANDONED;
			pthread_mutex_unlock(&ring->lock);
			return r == -EPROTO
				       ? kvc_fail(r, "a completion that matches nothing")
				       : r;
		}
	}
	pthread_mutex_unlock(&ring->lock);
	r = take_result(ring, req, slot);
	pthread_mutex_lock(&ring->lock);
	slot_free_locked(ring, slot);
	pthread_mutex_unlock(&ring->lock);
	return r;
}

/**
 * kvc_ring_post() - send a request that nobody waits for
 * @kind: KVC_REFILL, KVC_FREE_ASYNC or KVC_FIRE
 *
 * Context: never waits; the caller holds a reference to @link or kvc.lock.
 * Return: 0 sent; KV_BUSY no slot or no argument room; the ring's error.
 */
int kvc_ring_post(struct kvc_link *link, const struct kvc_req *req, u32 kind)
{
	struct kvc_slot *slot;
	int r;

	r = slot_get(link, req, kind, 0, &slot);
	if (!r)
		submit(link, req, slot);
	return r;
}

/**
 * kvc_ring_settle_frees() - wait for the frees that were sent without waiting
 *
 * Return: 0; KV_STALE some page was found gone since the last call; -ETIMEDOUT; the
 *	ring's error.
 */
int kvc_ring_settle_frees(struct kvc_link *link, u64 deadline_ns)
{
	struct kvc_ring *ring = &link->ring;
	int r = 0;

	pthread_mutex_lock(&ring->lock);
	reap_locked(link);
	while (ring->frees_in_flight && !r)
		r = wait_change_locked(link, 0, deadline_ns);
	if (!r && ring->stale_frees) {
		ring->stale_frees = 0;
		r = KV_STALE;
	}
	pthread_mutex_unlock(&ring->lock);
	return r;
}

/** kvc_ring_forget_pool() - late answers for @pool have nobody to go to any more */
void kvc_ring_forget_pool(struct kvc_ring *ring, const struct kvc_pool *pool)
{
	pthread_mutex_lock(&ring->lock);
	for (u32 i = 0; i < ring->nr_slots; i++)
		if (ring->slots[i].pool == pool)
			ring->slots[i].pool = NULL;
	pthread_mutex_unlock(&ring->lock);
}
