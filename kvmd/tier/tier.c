/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/tier.c - the tiers: operations, copy jobs, budgets, the turn. See tier.h; what each
 * kind of operation does is in spill.c, restore.c and write.c.
 *
 * Loop thread only.
 */
#include "kvmd/tier/tier.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/trace.h"
#include "kvmd/tier/tier_priv.h"

#define COPY_DEADLINE_NS (10ull * KV_NSEC_PER_SEC)
#define COPIER_STUCK_NS	 (250 * KV_NSEC_PER_MSEC)

/* ---------------------------------------------------------------- operations */

struct tier_op *tier_op_get(struct kvd_tiers *t, enum op_kind kind)
{
	struct tier_op *op = list_first(&t->free, struct tier_op, node);
	u16 index;

	if (!op || t->stopped ||
	    (kind == OP_RESTORE && t->nr_restores == KVD_TIER_RESTORES_MAX))
		return NULL;
	index = op->index;
	list_del(&op->node);
	memset(op, 0, sizeof(*op));
	op->t = t;
	op->index = index;
	op->kind = kind;
	op->serial = ++t->serial;
	op->pfn = KVD_PFN_NONE;
	op->dram = op->nvme = KVD_SLOT_NONE;
	list_init(&op->wait);
	list_init(&op->pool_node);
	list_add_tail(kind == OP_WRITE ? &t->writing : &t->all, &op->node);
	t->nr_busy++;
	t->nr_spills += kind == OP_SPILL;
	t->nr_restores += kind == OP_RESTORE;
	t->nr_writes += kind == OP_WRITE;
	return op;
}

/* Whose frame it is about: those who wait for it ask by the pool. */
void tier_op_pool(struct tier_op *op, const struct kvd_pool *pool)
{
	kv_assert(list_empty(&op->pool_node));
	op->pool_id = pool->id;
	list_add_tail(&op->t->pool_ops[pool->id - 1], &op->pool_node);
}

void tier_op_put(struct tier_op *op)
{
	struct kvd_tiers *t = op->t;

	kv_assert(op->kind != OP_FREE && list_empty(&op->wait) && !op->reading);
	t->nr_spills -= op->kind == OP_SPILL;
	t->nr_restores -= op->kind == OP_RESTORE;
	t->nr_writes -= op->kind == OP_WRITE;
	t->nr_busy--;
	op->kind = OP_FREE;
	list_del(&op->pool_node);
	list_del(&op->node);
	list_add_tail(&t->free, &op->node);
	t->more = true;
}

struct kvd_page_hdr *tier_hdr_at(const struct kvd_tiers *t, u32 dram)
{
	return (void *)((u8 *)t->p.pool + kvd_slot_off(&t->dram, dram));
}

/* NULL: it is gone, or its id is another one's; only while the op holds no frame of it. */
struct kvd_pool *tier_pool_of(const struct tier_op *op)
{
	struct kvd_pool *pool = op->t->core->mm.pools[op->pool_id - 1];

	return pool && pool->fingerprint == op->want.fingerprint ? pool : NULL;
}

struct kvd_space *tier_space_of(struct kvd_tiers *t, enum kvd_tier_id tier)
{
	if (tier == KVD_TIER_DRAM)
		return &t->dram;
	return t->store ? &t->store->space : NULL;
}

/* -------------------------------------------------------------------- copies */

void tier_copy_queue(struct tier_op *op, enum kvd_tier_dir dir)
{
	kv_assert(list_empty(&op->wait) && op->pfn != KVD_PFN_NONE);
	list_add_tail(&op->t->copies[dir], &op->wait);
	op->t->nr_copies[dir]++;
	op->t->more = true;
}

static void copied(struct tier_op *op, int status)
{
	list_del(&op->wait);
	list_init(&op->wait);
	op->copy_status = status;
	if (!status && kvd_fault(KVD_FAULT_tier_copy))
		op->copy_status = -EIO;
	if (op->kind == OP_SPILL)
		tier_spill_copied(op);
	else
		tier_restore_copied(op);
}

void kvd_tier_copied(struct kvd_tiers *t, u32 cookie, int status)
{
	struct tier_batch *b = &t->batches[cookie];
	struct tier_op *op, *tmp;

	kv_assert(cookie < KVD_TIER_BATCHES && b->nr);
	list_for_each_entry_safe (op, tmp, &b->ops, wait)
		copied(op, status);
	kv_assert(list_empty(&b->ops));
	b->nr = 0;
	t->progress_ns = t->core->mm.now_ns;
	t->more = true;
}

static struct tier_batch *batch_get(struct kvd_tiers *t)
{
	for (u32 i = 0; i < KVD_TIER_BATCHES; i++)
		if (!t->batches[i].nr)
			return &t->batches[i];
	return NULL;
}

static u32 batch_fill(struct kvd_tiers *t, struct tier_batch *b, enum kvd_tier_dir dir,
		      struct kvd_tier_copy *copies)
{
	struct tier_op *op, *tmp;
	u64 bytes = 0;

	b->dir = dir;
	list_init(&b->ops);
	list_for_each_entry_safe (op, tmp, &t->copies[dir], wait) {
		struct kvd_pool *pool = tier_pool_of(op);

		if (b->nr == KVD_TIER_BATCH || bytes >= t->p.job_bytes)
			break;
		kv_assert(pool);
		copies[b->nr++] = (struct kvd_tier_copy){
			.pool = pool,
			.pfn = op->pfn,
			.off = kvd_slot_off(&t->dram, op->dram) + KVD_PAGE_HDR_BYTES,
			.bytes = kv_round_up(op->want.page_bytes, 4) -
				 (KV_MUTANT(page_tail_not_copied) ? 256 : 0),
		};
		bytes += op->want.page_bytes;
		list_del(&op->wait);
		list_add_tail(&b->ops, &op->wait);
		t->nr_copies[dir]--;
	}
	return b->nr;
}

/* They wait in front of the queue, in their order. */
static void batch_undo(struct kvd_tiers *t, struct tier_batch *b)
{
	while (!list_empty(&b->ops)) {
		struct tier_op *op = kv_container_of(b->ops.prev, struct tier_op, wait);

		list_del(&op->wait);
		list_add(&t->copies[b->dir], &op->wait);
		t->nr_copies[b->dir]++;
	}
	b->nr = 0;
}

static u32 nr_batches(const struct kvd_tiers *t)
{
	u32 nr = 0;

	for (u32 i = 0; i < KVD_TIER_BATCHES; i++)
		nr += t->batches[i].nr != 0;
	return nr;
}

/* Allocations must not wait for a copier that may never answer: what is evicted meanwhile
 * is gone, and what it has does not count as on its way back. */
static void copier_watch(struct kvd_tiers *t)
{
	u64 now = t->core->mm.now_ns;

	if (!nr_batches(t))
		t->progress_ns = now;
	t->copier_stuck = now - t->progress_ns > COPIER_STUCK_NS &&
			  !KV_MUTANT(stuck_copier_awaited);
	t->core->mm.spill_stuck = t->copier_stuck || t->copier_down;
}

static void copies_start(struct kvd_tiers *t, enum kvd_tier_dir dir)
{
	struct kvd_tier_copy copies[KVD_TIER_BATCH];
	struct tier_batch *b;
	u32 nr;
	int r;

	while (!list_empty(&t->copies[dir])) {
		b = batch_get(t);
		if (!b)
			return;
		nr = batch_fill(t, b, dir, copies);
		r = t->p.copier.submit(t->p.copier.arg, dir, copies, nr,
				       t->core->mm.now_ns + COPY_DEADLINE_NS,
				       (u32)(b - t->batches));
		if (r == KV_BUSY) {
			batch_undo(t, b);
			return;
		}
		if (r)
			kvd_tier_copied(t, (u32)(b - t->batches), r < 0 ? r : -EIO);
	}
}

/* ------------------------------------------------------------------ incidents */

void tier_bad_page(struct tier_op *op, const char *where)
{
	static const char *const why[] = {
		[KVD_PAGE_BAD_HEADER] = "header damaged",
		[KVD_PAGE_BAD_NAME] = "another page's header",
		[KVD_PAGE_OLD] = "an older page",
		[KVD_PAGE_BAD_DIGEST] = "wrong digest",
	};
	struct kvd_tiers *t = op->t;
	char line[160];

	t->stats.bad_headers += op->bad == KVD_PAGE_BAD_HEADER;
	t->stats.bad_names += op->bad == KVD_PAGE_BAD_NAME;
	t->stats.bad_old += op->bad == KVD_PAGE_OLD;
	t->stats.bad_digests += op->bad == KVD_PAGE_BAD_DIGEST;
	snprintf(line, sizeof(line), "%s: pool %u, key %02x%02x%02x%02x..: %s: a miss",
		 where, op->pool_id, op->want.key[0], op->want.key[1], op->want.key[2],
		 op->want.key[3], why[op->bad]);
	if (t->p.tell)
		t->p.tell(t->p.tell_arg, line);
}

/* Is this the last tier that had the page? The pool's copy does not count. */
void tier_dropped_last(struct kvd_tiers *t, const struct kvd_slot *s,
		       enum kvd_tier_id from)
{
	const struct kvd_space *other =
		tier_space_of(t, from == KVD_TIER_DRAM ? KVD_TIER_NVME : KVD_TIER_DRAM);
	struct kvd_slot_name name = {s->key, s->fingerprint, s->domain};

	t->stats.dropped += !other || kvd_space_find(other, &name) == KVD_SLOT_NONE;
}

static void dram_dropped(void *arg, u32 id)
{
	struct kvd_tiers *t = arg;

	tier_dropped_last(t, kvd_slot_at(&t->dram, id), KVD_TIER_DRAM);
}

/* ---------------------------------------------------------------------- admin */

static u32 domain_walk(struct kvd_space *sp, u32 domain_id, bool drop)
{
	u32 nr = 0;

	for (u32 seg = 0; sp && seg < sp->nr_segments; seg++) {
		u32 first = seg * sp->slots_per_segment, nr_slots = 0;

		if (sp->segments[seg].nr_used)
			nr_slots = sp->classes[sp->segments[seg].class - 1].per_segment;
		for (u32 i = 0; i < nr_slots; i++) {
			const struct kvd_slot *s = &sp->slots[first + i];

			if (s->state != KVD_SLOT_READY || s->domain != domain_id)
				continue;
			nr++;
			if (drop)
				kvd_space_drop(sp, first + i);
		}
	}
	return nr;
}

u32 kvd_tier_drop_domain(struct kvd_tiers *t, u32 domain_id)
{
	struct tier_op *op;

	/* What is on its way is not stored, or found, either. */
	list_for_each_entry (op, &t->all, node)
		op->cancelled |= t->idents[op->tenant].domain_id == domain_id &&
				 !KV_MUTANT(reset_spares_moving);
	list_for_each_entry (op, &t->late, node)
		op->cancelled |= t->idents[op->tenant].domain_id == domain_id;
	list_for_each_entry (op, &t->writing, node)
		op->cancelled |= t->idents[op->tenant].domain_id == domain_id;
	return domain_walk(&t->dram, domain_id, true) +
	       domain_walk(tier_space_of(t, KVD_TIER_NVME), domain_id, true);
}

u32 kvd_tier_count_domain(const struct kvd_tiers *t, u32 domain_id)
{
	struct kvd_tiers *mutable = (struct kvd_tiers *)t;

	return domain_walk(&mutable->dram, domain_id, false) +
	       domain_walk(tier_space_of(mutable, KVD_TIER_NVME), domain_id, false);
}

/* A WRITE ends with its DRAM slot: write.c. */
static bool ops_cancel(struct kvd_tiers *t, struct list_node *ops,
		       const struct kvd_slot_name *name)
{
	struct tier_op *op;
	bool had = false;

	list_for_each_entry (op, ops, node) {
		if (memcmp(op->want.key, name->key, sizeof(op->want.key)) ||
		    op->want.fingerprint != name->fingerprint ||
		    t->idents[op->tenant].domain_id != name->domain)
			continue;
		op->cancelled = had = true;
	}
	return had;
}

bool kvd_tier_drop_page(struct kvd_tiers *t, const struct kvd_slot_name *name)
{
	bool had = false;

	if (!KV_MUTANT(reset_spares_moving)) {
		had |= ops_cancel(t, &t->all, name);
		had |= ops_cancel(t, &t->late, name);
	}
	for (u32 i = 0; i < KVD_TIER_NR; i++) {
		struct kvd_space *sp = tier_space_of(t, i);
		u32 id = sp ? kvd_space_find(sp, name) : KVD_SLOT_NONE;

		if (id == KVD_SLOT_NONE || kvd_slot_at(sp, id)->state != KVD_SLOT_READY)
			continue;
		kvd_space_drop(sp, id);
		had = true;
	}
	return had;
}

/* ------------------------------------------------------------------- lifetime */

static const struct kvd_spill_ops spill_ops = {
	.evict = tier_evict,
	.restore = tier_restore,
};

const struct kvd_spill_ops *kvd_tier_ops(void)
{
	return &spill_ops;
}

static int store_start(struct kvd_tiers *t, char *error)
{
	struct kvd_store_params sp = {
		.path = t->p.nvme_path,
		.size_bytes = t->p.nvme_bytes,
		.depth = t->p.nvme_depth,
		.pool = t->p.pool,
		.pool_bytes = t->p.dram_bytes,
		.force_threads = t->p.force_threads,
		.identify = tier_identify,
		.describe = tier_describe,
		.arg = t,
	};

	memcpy(sp.host_mark, t->p.host_mark, sizeof(sp.host_mark));
	return kvd_store_open(&sp, error, &t->store);
}

int kvd_tier_create(const struct kvd_tier_params *p, char *error, struct kvd_tiers **ret)
{
	struct kvd_tiers *t = calloc(1, sizeof(*t));
	int r;

	error[0] = 0;
	if (!t)
		return -ENOMEM;
	t->p = *p;
	if (!t->p.job_bytes)
		t->p.job_bytes = KVD_TIER_JOB_BYTES;
	t->core = p->core;
	list_init(&t->free);
	list_init(&t->all);
	list_init(&t->writing);
	list_init(&t->late);
	list_init(&t->reads);
	list_init(&t->frames);
	list_init(&t->copies[0]);
	list_init(&t->copies[1]);
	for (u32 i = 0; i < KVD_POOLS_MAX; i++)
		list_init(&t->pool_ops[i]);
	for (u16 i = 0; i < KVD_TIER_OPS; i++) {
		t->ops[i].index = i;
		list_add_tail(&t->free, &t->ops[i].node);
	}
	r = kvd_space_init(&t->dram, p->dram_bytes, kvd_segment_bytes(p->dram_bytes));
	if (r) {
		snprintf(error, KVD_STORE_ERROR, "tiers.dram.size: %llu: %s",
			 (unsigned long long)p->dram_bytes, strerror(-r));
		goto free_tiers;
	}
	t->dram.dropped = dram_dropped;
	t->dram.arg = t;
	r = kvd_workers_create(p->nr_workers, &t->workers);
	if (r)
		goto fini_dram;
	r = p->nvme_path ? store_start(t, error) : 0;
	if (r)
		goto destroy_workers;
	*ret = t;
	return 0;
destroy_workers:
	kvd_workers_destroy(t->workers);
fini_dram:
	kvd_space_fini(&t->dram);
free_tiers:
	if (!error[0])
		snprintf(error, KVD_STORE_ERROR, "tiers: %s", strerror(-r));
	free(t);
	return r;
}

void kvd_tier_copier(struct kvd_tiers *t, bool down)
{
	t->copier_down = down;
}

void kvd_tier_stop(struct kvd_tiers *t)
{
	t->stopped = true;
	t->core->mm.spill_stuck = false;
	tier_reads_forget(t);
	tier_frames_forget(t);
	/* What was not handed to the copier will not be. */
	for (u32 dir = 0; dir < 2; dir++) {
		struct tier_op *op, *tmp;

		list_for_each_entry_safe (op, tmp, &t->copies[dir], wait) {
			t->nr_copies[dir]--;
			copied(op, -ECANCELED);
		}
	}
}

void kvd_tier_drain(struct kvd_tiers *t)
{
	u32 nr = 1;

	kvd_tier_stop(t);
	while (nr) {
		kvd_tier_ready(t);
		if (t->store)
			kvd_io_flush(t->store->io);
		nr = kvd_workers_pending(t->workers) +
		     (t->store ? kvd_store_pending(t->store) : 0);
		if (nr)
			usleep(100);
	}
}

void kvd_tier_destroy(struct kvd_tiers *t)
{
	if (!t)
		return;
	kvd_tier_drain(t);
	kv_assert(!t->nr_busy);
	kvd_store_close(t->store, true);
	kvd_workers_destroy(t->workers);
	kvd_space_fini(&t->dram);
	free(t);
}

/* ----------------------------------------------------------------------- turn */

u32 kvd_tier_fds(const struct kvd_tiers *t, int fds[KVD_TIER_FDS])
{
	fds[0] = kvd_workers_fd(t->workers);
	if (!t->store)
		return 1;
	fds[1] = kvd_io_fd(t->store->io);
	fds[2] = kvd_workers_fd(t->store->writer);
	return 3;
}

void kvd_tier_ready(struct kvd_tiers *t)
{
	kvd_workers_reap(t->workers);
	if (t->store)
		kvd_store_reap(t->store);
}

bool kvd_tier_turn(struct kvd_tiers *t)
{
	bool more = false;

	t->more = false;
	copier_watch(t);
	tier_frames_retry(t);
	copies_start(t, KVD_TIER_OUT);
	copies_start(t, KVD_TIER_IN);
	if (t->store) {
		tier_reads_start(t); /* somebody waits for these */
		tier_writes_start(t);
		kvd_io_flush(t->store->io);
		more = kvd_store_turn(t->store);
	}
	return more || t->more;
}

bool kvd_tier_more(const struct kvd_tiers *t)
{
	return t->more;
}

void kvd_tier_tick(struct kvd_tiers *t)
{
	tier_restore_deadlines(t);
	tier_tenants_check(t);
	if (t->store)
		kvd_store_tick(t->store);
}

u64 kvd_tier_serial(const struct kvd_tiers *t)
{
	return t->serial;
}

u64 kvd_tier_oldest(const struct kvd_tiers *t, const struct kvd_pool *pool)
{
	const struct tier_op *op =
		list_first(&t->pool_ops[pool->id - 1], struct tier_op, pool_node);

	return op ? op->serial : KVD_TIER_NONE;
}

/* ------------------------------------------------------------------- questions */

const struct kvd_tier_stats *kvd_tier_stats(const struct kvd_tiers *t)
{
	return &t->stats;
}

void kvd_tier_stats_each(const struct kvd_tiers *t,
			 void (*fn)(void *arg, const char *name, u64 value), void *arg)
{
#define TIER_EACH(name) fn(arg, #name, t->stats.name);
	KVD_TIER_COUNTERS(TIER_EACH)
#undef TIER_EACH
}

const struct kvd_space *kvd_tier_space(const struct kvd_tiers *t, enum kvd_tier_id tier)
{
	return tier_space_of((struct kvd_tiers *)t, tier);
}

const struct kvd_store *kvd_tier_store(const struct kvd_tiers *t)
{
	return t->store;
}

const char *kvd_tier_fault(const struct kvd_tiers *t)
{
	return t->fault;
}

u32 kvd_tier_busy(const struct kvd_tiers *t)
{
	return t->nr_busy;
}
