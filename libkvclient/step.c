/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - announce and retire, and what a step's mirror needs (design 5, P3 and P6).
 *	Tour 9/12.
 *
 * The order in kvc_step_begin() is the protocol:
 *
 *	load grace_epoch				any table of the session's pools
 *	store it in the claimed slot, full barrier	kv_slot_announce()
 *	load table_epoch of the session page		other than the link's: IDLE,
 *	attach, again load log_head					kvc_step_block(), per pool
 *
 * kvmd's half: kill the tag, log it, advance grace_epoch, full barrier, read the slots
 * (kvd_grace_advance()). Either kvmd sees the slot, and the page's bytes stay until it
 *	retires, or the step sees the log entry, and its check fails.
 *
 * Threads: no lock. A slot is claimed by setting its bit in kvc.slot_mask; one that is
 *	claimed but not yet begun is waited for by whoever wants to unmap a table
 *	(kvc_wait_begun()). Stream positions are under kvc_pool.lock.
 */
#include "internal.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------- fences
 */

/**
 * kvc_fence_passed() - have all steps retired whose launch number is @launch or less?
 *
 * A step that has not been launched does not count: nothing of it runs yet.
 */
bool kvc_fence_passed(struct kvc *c, u64 launch)
{
	if (KV_MUTANT(free_no_fence))
		return true;
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++) {
		u64 l = __atomic_load_n(&c->steps[i].launch, __ATOMIC_ACQUIRE);

		if (l && l <= launch)
			return false;
	}
	return true;
}

/** kvc_begin_fence_passed() - have all steps retired whose number is @number or less? */
bool kvc_begin_fence_passed(struct kvc *c, u64 number)
{
	u32 mask = __atomic_load_n(&c->slot_mask, __ATOMIC_SEQ_CST);

	if (KV_MUTANT(unmap_no_fence))
		return true;
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		if ((mask >> i & 1) &&
		    __atomic_load_n(&c->steps[i].number, __ATOMIC_ACQUIRE) <= number)
			return false; /* number 0: claimed, its number is not known yet */
	return true;
}

/**
 * kvc_wait_begun() - wait for slots that are claimed but have not finished begin
 *
 * Such a step may be reading a table that the caller has just taken out of sight.
 */
void kvc_wait_begun(struct kvc *c)
{
	u32 mask;

	kv_full_barrier();
	mask = __atomic_load_n(&c->slot_mask, __ATOMIC_SEQ_CST);
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		while ((mask >> i & 1) &&
		       (__atomic_load_n(&c->slot_mask, __ATOMIC_SEQ_CST) >> i & 1) &&
		       !__atomic_load_n(&c->steps[i].begun, __ATOMIC_ACQUIRE))
			sched_yield();
}

/** kvc_deferred_run_locked() - what waited for a retire: unmaps, full batches, old links
 */
void kvc_deferred_run_locked(struct kvc *c)
{
	struct kvc_link *link = c->link;

	kv_store_relaxed32(&c->deferred, 0);
	if (!link->dead)
		kvc_ring_reap(link);
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		if (!c->pools[i])
			continue;
		kvc_extents_run_locked(c->pools[i]);
		kvc_ret_post(c->pools[i], link);
	}
	kvc_links_collect_locked(c, false);
}

/** kvc_deferred_run() - the same, if nobody else is at it */
void kvc_deferred_run(struct kvc *c)
{
	if (pthread_mutex_trylock(&c->lock))
		return;
	kvc_deferred_run_locked(c);
	pthread_mutex_unlock(&c->lock);
}

/* ------------------------------------------------------------- announce and retire */

static int slot_claim(struct kvc *c)
{
	u32 mask = __atomic_load_n(&c->slot_mask, __ATOMIC_RELAXED);

	if (KV_MUTANT(slot_shared)) {
		__atomic_fetch_or(&c->slot_mask, 1, __ATOMIC_SEQ_CST);
		return 0;
	}
	for (;;) {
		u32 slot = (u32)__builtin_ctz(~mask);

		if (slot >= KV_ANNOUNCE_SLOTS)
			return -1;
		if (__atomic_compare_exchange_n(&c->slot_mask, &mask, mask | 1u << slot,
						false, __ATOMIC_SEQ_CST,
						__ATOMIC_RELAXED))
			return (int)slot;
	}
}

static void slot_release(struct kvc_step *step)
{
	struct kvc *c = step->c;

	__atomic_store_n(&step->launch, 0, __ATOMIC_RELEASE);
	__atomic_store_n(&step->link, NULL, __ATOMIC_RELEASE);
	__atomic_store_n(&step->begun, 0, __ATOMIC_RELEASE);
	__atomic_store_n(&step->number, 0, __ATOMIC_RELEASE);
	__atomic_fetch_and(&c->slot_mask, ~(1u << step->slot), __ATOMIC_RELEASE);
}

/* Any table gives a value of the one counter; an older one only makes kvmd wait longer.
 */
static u64 load_grace_epoch(struct kvc_link *link)
{
	const struct kv_table *t = __atomic_load_n(&link->grace_table, __ATOMIC_ACQUIRE);
	u64 epoch = t ? kv_load_acquire64(&t->grace_epoch.word) : 1;

	return epoch ? epoch : 1; /* 0 would say IDLE */
}

static void load_early_heads(struct kvc_step *step, struct kvc_link *link)
{
	for (u32 i = 0; i < KV_POOLS_MAX; i++)
		if (link->tables[i].map)
			step->early_head[i] =
				kv_load_acquire64(&link->tables[i].map->log_head.word);
}

/* Return: 0 announced; -ESHUTDOWN the session was ended; -EAGAIN another kvmd is there.
 */
static int announce(struct kvc_step *step, struct kvc_link *link)
{
	struct kv_session_page *page = link->session;
	u64 epoch = load_grace_epoch(link), table_epoch;

	if (KV_MUTANT(mirror_announced))
		load_early_heads(step, link);
	if (KV_MUTANT(late_announce)) {
		table_epoch = kv_load_acquire64(&page->table_epoch.word);
		kv_slot_announce(page, step->slot, epoch);
	} else if (KV_MUTANT(announce_no_barrier)) {
		kv_store_relaxed64(&page->slots[step->slot].word, epoch);
		table_epoch = kv_load_relaxed64(&page->table_epoch.word);
	} else {
		kv_slot_announce(page, step->slot, epoch);
		table_epoch = kv_load_acquire64(&page->table_epoch.word);
	}
	if (table_epoch == link->table_epoch)
		return 0;
	if (kv_slot_retire(page, step->slot) && !link->dead)
		kvc_ring_kick(&link->ring);
	return table_epoch ? -EAGAIN : -ESHUTDOWN;
}

int kvc_step_begin(struct kvc *c, struct kvc_step **ret_step)
{
	struct kvc_step *step;
	int slot, r;

	if (kvc_poisoned(c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	for (;;) {
		struct kvc_link *link;

		slot = slot_claim(c);
		if (slot < 0)
			return KV_BUSY;
		step = &c->steps[slot];
		link = __atomic_load_n(&c->link, __ATOMIC_SEQ_CST);
		__atomic_store_n(&step->link, link, __ATOMIC_RELEASE);
		__atomic_store_n(&step->number,
				 __atomic_add_fetch(&c->step_number, 1, __ATOMIC_SEQ_CST),
				 __ATOMIC_RELEASE);
		r = announce(step, link);
		__atomic_store_n(&step->begun, 1, __ATOMIC_RELEASE);
		if (!r)
			break;
		slot_release(step);
		if (r == -ESHUTDOWN)
			return kvc_fail(r, "kvmd has ended the session");
		/* the slot is not held while waiting: other steps need it */
		r = kvc_attach_again(c, link, kvc_deadline(c));
		if (r)
			return r;
	}
	step->nr_blocks = 0;
	step->nr_walks = 0;
	*ret_step = step;
	return 0;
}

uint64_t kvc_step_number(const struct kvc_step *step)
{
	return step->number;
}

void kvc_step_launched(struct kvc_step *step)
{
	struct kvc *c = step->c;

	if (kvc_poisoned(c))
		return;
	if (!step->launch)
		__atomic_store_n(
			&step->launch,
			__atomic_add_fetch(&c->launch_number, 1, __ATOMIC_SEQ_CST),
			__ATOMIC_RELEASE);
	for (u32 i = 0; i < step->nr_blocks; i++) {
		struct kvc_pool *pool = step->blocks[i].pool;
		struct kvc_position *p = &pool->positions[step->blocks[i].stream];

		pthread_mutex_lock(&pool->lock);
		if (p->link_serial != step->link->serial) {
			p->link_serial = step->link->serial;
			p->position = step->blocks[i].position;
		}
		p->position = KV_MAX(p->position, step->blocks[i].position);
		pthread_mutex_unlock(&pool->lock);
	}
	step->nr_blocks = 0;
}

static int slot_retire(struct kv_session_page *page, u32 slot)
{
	if (!KV_MUTANT(retire_no_barrier))
		return kv_slot_retire(page, slot);
	kv_store_release64(&page->slots[slot].word, KV_SLOT_IDLE);
	return kv_load_relaxed64(&page->wake.word) != 0;
}

void kvc_step_retire(struct kvc_step *step)
{
	struct kvc *c = step->c;
	struct kvc_link *link = step->link;

	if (kvc_poisoned(c))
		return;
	if (step->nr_walks)
		kvc_walk_again(step);
	if (slot_retire(link->session, step->slot) && !link->dead)
		kvc_ring_kick(&link->ring);
	slot_release(step);
	if (kv_load_relaxed32(&c->deferred))
		kvc_deferred_run(c);
}

/* -------------------------------------------------------------------------------- blocks
 */

size_t kvc_step_block_bytes(const struct kvc_pool *pool)
{
	/* a delta is sent only when it is shorter than the full table */
	return sizeof(struct kv_step_block) + pool->geometry.nr_pages * sizeof(u64);
}

static void fill_full(const struct kv_table *table, struct kv_step_block *ret_block)
{
	const u64 *tags = (const void *)((const u8 *)table + KV_TABLE_TAG_OFF);
	u64 *out = (u64 *)(ret_block + 1);
	u64 used = kv_load_acquire64(&table->used_pages.word);

	used = KV_MIN(used, ret_block->nr_pages);
	for (u64 i = 0; i < used; i++)
		out[i] = kv_load_relaxed64(&tags[i]);
	ret_block->kind = KV_BLOCK_FULL;
	ret_block->nr_entries = (u32)used;
}

/* Return: false if kvmd may have overwritten entries while they were copied. */
static bool fill_delta(const struct kv_table *table, struct kv_step_block *ret_block)
{
	const struct kv_log_entry *log =
		(const void *)((const u8 *)table + kv_table_log_off(ret_block->nr_pages));
	struct kv_log_entry *out = (struct kv_log_entry *)(ret_block + 1);
	u32 nr = (u32)(ret_block->log_to - ret_block->log_from);

	for (u32 i = 0; i < nr; i++) {
		u64 at = ret_block->log_from + i;
		const struct kv_log_entry *e = &log[at % KV_LOG_ENTRIES];

		out[i].tag = kv_load_relaxed64(&e->tag);
		out[i].pfn = kv_load_relaxed32(&e->pfn);
		out[i].sequence = kv_load_relaxed32(&e->sequence);
		if (out[i].sequence != (u32)at)
			return false;
	}
	kv_acquire_fence(); /* the copies come before this load of log_head */
	if (kv_load_relaxed64(&table->log_head.word) - ret_block->log_from >=
	    KV_LOG_USABLE)
		return false;
	ret_block->kind = KV_BLOCK_DELTA;
	ret_block->nr_entries = nr;
	return true;
}

/**
 * kvc_block_fill() - write what brings a mirror from @from to @head, or the whole table
 * @table: published table; its nr_pages was checked when it was mapped
 * @step: number of the step
 * @has_position: the mirror stands at @from; false = first use, or a new table
 * @head: log_head, loaded after the announce
 * @ret_block: the block
 * @bytes: room
 *
 * Return: 0; -ENOSPC.
 */
int kvc_block_fill(const struct kv_table *table, u64 step, bool has_position, u64 from,
		   u64 head, struct kv_step_block *ret_block, size_t bytes)
{
	u64 nr_pages = table->nr_pages, nr = head - from;

	if (bytes < sizeof(*ret_block) + nr_pages * sizeof(u64))
		return kvc_fail(-ENOSPC, "block: %zu bytes of room for %llu pages", bytes,
				(unsigned long long)nr_pages);
	*ret_block = (struct kv_step_block){.step = step,
					    .log_from = from,
					    .log_to = head,
					    .nr_pages = (u32)nr_pages};
	if (has_position && nr < KV_LOG_USABLE &&
	    nr * sizeof(struct kv_log_entry) <= nr_pages * sizeof(u64) &&
	    fill_delta(table, ret_block))
		return 0;
	/* newer words than @head's do no harm: words only grow (P1) */
	fill_full(table, ret_block);
	return 0;
}

int kvc_step_block(struct kvc_step *step, struct kvc_pool *pool, uint32_t stream,
		   void *buf, size_t buf_bytes)
{
	const struct kv_table *table = step->link->tables[pool->slot].map;
	struct kvc_position p;
	u64 head;
	int r;

	if (kvc_poisoned(step->c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	if (stream >= KVC_STREAMS)
		return kvc_fail(-EINVAL, "stream=%u: 0 to %u are possible", stream,
				KVC_STREAMS - 1);
	if (step->nr_blocks == KVC_STEP_BLOCKS)
		return kvc_fail(-ENOSPC, "%u blocks in one step", KVC_STEP_BLOCKS);
	if (!table)
		return kvc_fail(-ESHUTDOWN, "the pool is not open in the step's session");
	head = kv_load_acquire64(&table->log_head.word);
	if (KV_MUTANT(mirror_announced))
		head = step->early_head[pool->slot];
	pthread_mutex_lock(&pool->lock);
	p = pool->positions[stream];
	pthread_mutex_unlock(&pool->lock);
	r = kvc_block_fill(table, step->number, p.link_serial == step->link->serial,
			   p.position, head, buf, buf_bytes);
	if (r)
		return r;
	step->blocks[step->nr_blocks].pool = pool;
	step->blocks[step->nr_blocks].stream = stream;
	step->blocks[step->nr_blocks].position = head;
	step->nr_blocks++;
	return 0;
}
