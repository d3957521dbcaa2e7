/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/restore.c - RESTORE: a page that a lookup misses comes back.
 *
 * From NVMe: a DRAM slot is filled from the disk first and checked, header and digest, and
 * is READY then: also when nobody waits any more. From DRAM: a frame is taken, the copier
 * fills it, and then a worker compares the slot's digest. In this order: a bit of the slot
 * that flips before or during the copy is still wrong afterwards, and kvmd need not read a
 * GPU's frame. Only when both are right does the frame become a page (own/spill.h).
 *
 * Loop thread only.
 */
#include <errno.h>
#include <string.h>

#include "base/mutant.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/tier/crc.h"
#include "kvmd/tier/tier_priv.h"

static void frame_step(struct tier_op *op);

static void restore_over(struct tier_op *op)
{
	if (op->dram != KVD_SLOT_NONE)
		kvd_space_put(&op->t->dram, op->dram);
	tier_op_put(op);
}

/* --------------------------------------------------------------- DRAM -> frame */

static void frame_publish(struct tier_op *op, struct kvd_pool *pool)
{
	struct kvd_tiers *t = op->t;
	u8 key[KV_KEY_BYTES];
	struct kvd_restored back = {
		.key = op->want.key,
		.parent_key = op->parent_key,
		.tokens = tier_hdr_at(t, op->dram)->tokens,
		.crc32c = op->want.page_crc,
		.root = op->root,
	};

	kvd_prefix_pool_key(pool, back.parent_key, back.tokens, key);
	if (memcmp(key, back.key, sizeof(key)) && !KV_MUTANT(restored_key_not_checked)) {
		op->bad = KVD_PAGE_BAD_NAME;
		tier_bad_page(op, "restore: tokens that are not the key's");
		kvd_restore_fail(pool, op->pfn);
		return;
	}
	if (kvd_restore_end(pool, op->pfn, &back)) {
		t->stats.restores_dup++;
		return;
	}
	t->stats.restores++;
	t->stats.restores_nvme += op->from_nvme;
	t->stats.restores_dram += !op->from_nvme;
}

/* Copy and digest are both done, or the copy failed. */
static void frame_done(struct tier_op *op)
{
	struct kvd_tiers *t = op->t;
	struct kvd_pool *pool = tier_pool_of(op);

	kv_assert(pool && op->pfn != KVD_PFN_NONE);
	if (op->bad) {
		tier_bad_page(op, "restore from DRAM");
		if (kvd_slot_at(&t->dram, op->dram)->state == KVD_SLOT_READY)
			kvd_space_drop(&t->dram, op->dram);
	}
	if (op->copy_status)
		t->stats.restores_failed++;
	if ((op->bad || op->copy_status) && !KV_MUTANT(restore_failed_is_done))
		kvd_restore_fail(pool, op->pfn);
	else if (op->cancelled)
		kvd_restore_fail(pool, op->pfn);
	else
		frame_publish(op, pool);
	op->pfn = KVD_PFN_NONE;
	restore_over(op);
}

static void digest_run(struct kvd_work *w)
{
	struct tier_op *op = kv_container_of(w, struct tier_op, work);

	op->bad = kvd_crc32c((u8 *)op->hdr + KVD_PAGE_HDR_BYTES, op->want.page_bytes) ==
					  op->want.page_crc ||
				  KV_MUTANT(tier_page_not_checked)
			  ? KVD_PAGE_OK
			  : KVD_PAGE_BAD_DIGEST;
}

static void digest_done(struct kvd_work *w)
{
	struct tier_op *op = kv_container_of(w, struct tier_op, work);

	if (KV_MUTANT(restore_digest_before_copy))
		tier_copy_queue(op, KVD_TIER_IN);
	else
		frame_done(op);
}

static void digest_start(struct tier_op *op)
{
	op->work.run = digest_run;
	op->work.done = digest_done;
	kvd_work_submit(op->t->workers, &op->work);
}

void tier_restore_copied(struct tier_op *op)
{
	if (op->copy_status || KV_MUTANT(restore_not_fenced) ||
	    KV_MUTANT(restore_digest_before_copy))
		frame_done(op);
	else
		digest_start(op);
}

static void frame_wait(struct tier_op *op)
{
	list_add_tail(&op->t->frames, &op->wait);
	op->t->nr_frames++;
	op->t->pool_frames[op->pool_id - 1]++;
}

static void frame_unwait(struct tier_op *op)
{
	list_del(&op->wait);
	list_init(&op->wait);
	op->t->nr_frames--;
	op->t->pool_frames[op->pool_id - 1]--;
}

/* As many pages as wait in this pool, less those that come by themselves: it is asked in every
 * turn, and a page that was evicted takes a grace period to be free. */
static void frames_wake(struct kvd_tiers *t, struct kvd_pool *pool)
{
	u32 want = t->pool_frames[pool->id - 1], coming = kvd_pool_nr_coming(pool);

	if (want > coming)
		kvd_reclaim_wake(pool, want - coming);
}

/*
 * The DRAM slot is READY and has this reader. Ids of tenants, domains and pools may be
 * others' by now: what counts is the domain's secret.
 */
static bool frame_wanted(struct tier_op *op, const struct kvd_tenant *tenant,
			 const struct kvd_pool *pool)
{
	return !op->cancelled && !op->late && pool && tenant && !op->t->stopped &&
	       tenant->account.domain_id == pool->domain_id &&
	       tier_same_domain(tenant, &op->want.ident);
}

static void frame_step(struct tier_op *op)
{
	struct kvd_tiers *t = op->t;
	struct kvd_tenant *tenant = t->core->tenants[op->tenant];
	struct kvd_pool *pool = tier_pool_of(op);
	int r = KV_MISS;

	/* A copier that stands still would keep the frame. */
	if (frame_wanted(op, tenant, pool))
		r = t->copier_stuck ? KV_PENDING
				    : kvd_restore_begin(tenant, pool, &op->pfn);
	if ((r == KV_FULL || r == KV_PENDING) && t->core->mm.now_ns < op->deadline_ns &&
	    t->pool_frames[pool->id - 1] < KVD_TIER_WAITING_MAX) {
		/* Reclaim makes room: tier_frames_retry(). */
		frame_wait(op);
		if (!t->copier_stuck)
			frames_wake(t, pool);
		return;
	}
	if (r) {
		t->stats.restores_no_room += !op->late && !op->cancelled;
		op->pfn = KVD_PFN_NONE;
		restore_over(op);
		return;
	}
	op->hdr = tier_hdr_at(t, op->dram);
	if (KV_MUTANT(restore_digest_before_copy))
		digest_start(op);
	else
		tier_copy_queue(op, KVD_TIER_IN);
}

/* In their order, as far as there is room. A tenant that a pool refuses is not asked for
 * again in this turn, and holds up nobody else: the list goes round once. */
void tier_frames_retry(struct kvd_tiers *t)
{
	u8 refused[KVD_POOLS_MAX][KVD_TENANTS_MAX / 8];

	if (!t->nr_frames)
		return;
	memset(refused, 0, sizeof(refused));
	for (u32 left = t->nr_frames; left; left--) {
		struct tier_op *op = list_first(&t->frames, struct tier_op, wait);
		u8 *byte = &refused[op->pool_id - 1][op->tenant / 8];
		u8 bit = (u8)(1u << op->tenant % 8);
		u32 had = t->nr_frames;

		frame_unwait(op);
		if (*byte & bit)
			frame_wait(op);
		else
			frame_step(op);
		if (t->nr_frames == had)
			*byte |= bit;
	}
}

static void frame_forget(struct tier_op *op)
{
	frame_unwait(op);
	op->t->stats.restores_no_room++;
	restore_over(op);
}

void tier_frames_forget(struct kvd_tiers *t)
{
	while (t->nr_frames)
		frame_forget(list_first(&t->frames, struct tier_op, wait));
}

/* ---------------------------------------------------------------- NVMe -> DRAM */

static void nvme_put(struct tier_op *op, bool drop)
{
	struct kvd_space *sp = &op->t->store->space;

	if (drop && kvd_slot_at(sp, op->nvme)->state == KVD_SLOT_READY)
		kvd_space_drop(sp, op->nvme);
	kvd_space_put(sp, op->nvme);
	op->nvme = KVD_SLOT_NONE;
}

static void read_bad(struct tier_op *op)
{
	nvme_put(op, true);
	kvd_space_drop(&op->t->dram, op->dram);
	op->dram = KVD_SLOT_NONE;
	restore_over(op);
}

static void page_check_run(struct kvd_work *w)
{
	struct tier_op *op = kv_container_of(w, struct tier_op, work);

	op->bad = kvd_page_check(op->hdr, &op->want);
}

static void page_check_done(struct kvd_work *w)
{
	struct tier_op *op = kv_container_of(w, struct tier_op, work);
	struct kvd_tiers *t = op->t;

	op->reading = false;
	if (op->bad)
		tier_bad_page(op, "restore from NVMe");
	if (op->bad || op->cancelled) {
		read_bad(op);
		return;
	}
	nvme_put(op, false);
	kvd_space_ready(&t->dram, op->dram);
	kvd_space_get(&t->dram, op->dram);
	frame_step(op);
}

static void read_done(struct kvd_io_op *io)
{
	struct tier_op *op = kv_container_of(io, struct tier_op, io);
	struct kvd_tiers *t = op->t;

	if (io->result != (s64)io->bytes) {
		t->stats.read_errors += io->result < 0;
		t->stats.read_shorts += io->result >= 0;
		op->reading = false;
		read_bad(op);
		return;
	}
	op->work.run = page_check_run;
	op->work.done = page_check_done;
	kvd_work_submit(t->workers, &op->work);
}

/* Case R7: a disk that answers with another slot's bytes. */
static u64 swapped(const struct kvd_space *sp, u32 not_this, u64 off)
{
	for (u32 i = 0; i < sp->slots_per_segment; i++) {
		u32 id = not_this / sp->slots_per_segment * sp->slots_per_segment + i;

		if (id != not_this && sp->slots[id].state == KVD_SLOT_READY)
			return kvd_slot_off(sp, id);
	}
	return off;
}

static bool read_start(struct tier_op *op, const struct kvd_slot_name *name)
{
	struct kvd_tiers *t = op->t;
	struct kvd_space *sp = &t->store->space;
	struct kvd_slot *s = kvd_slot_at(sp, op->nvme), *d;

	op->dram =
		kvd_space_take(&t->dram, name, s->tenant, kvd_slot_bytes(sp, op->nvme));
	if (op->dram == KVD_SLOT_NONE)
		return false;
	d = kvd_slot_at(&t->dram, op->dram);
	d->generation = s->generation;
	d->page_bytes = s->page_bytes;
	d->crc32c = s->crc32c;
	d->op = (u16)(op->index + 1);
	op->hdr = tier_hdr_at(t, op->dram);
	op->io = (struct kvd_io_op){
		.off = kvd_slot_off(sp, op->nvme),
		.addr = op->hdr,
		.bytes = (u32)kvd_slot_bytes(sp, op->nvme),
		.done = read_done,
	};
	if (kvd_fault(KVD_FAULT_tier_read_swap))
		op->io.off = swapped(sp, op->nvme, op->io.off);
	if (kvd_fault(KVD_FAULT_tier_read_late))
		op->deadline_ns = 1;
	kvd_space_get(sp, op->nvme);
	op->from_nvme = true;
	list_add_tail(&t->reads, &op->wait);
	t->more = true; /* kvd_io_flush() */
	tier_reads_start(t);
	return true;
}

void tier_reads_start(struct kvd_tiers *t)
{
	struct tier_op *op, *tmp;

	list_for_each_entry_safe (op, tmp, &t->reads, wait) {
		if (kvd_io_submit(t->store->io, &op->io))
			return;
		list_del(&op->wait);
		list_init(&op->wait);
		op->reading = true;
		t->stats.reads++;
	}
}

/* It waits for its turn on the disk and will not be read: the page stays where it is. */
static void read_forget(struct tier_op *op)
{
	list_del(&op->wait);
	list_init(&op->wait);
	nvme_put(op, false);
	kvd_space_drop(&op->t->dram, op->dram);
	op->dram = KVD_SLOT_NONE;
	restore_over(op);
}

void tier_reads_forget(struct kvd_tiers *t)
{
	struct tier_op *op, *tmp;

	list_for_each_entry_safe (op, tmp, &t->reads, wait)
		read_forget(op);
}

void tier_restore_deadlines(struct kvd_tiers *t)
{
	struct tier_op *op, *tmp;

	list_for_each_entry_safe (op, tmp, &t->all, node) {
		bool queued = op->from_nvme && op->nvme != KVD_SLOT_NONE && !op->reading;
		bool waiting = !queued && !op->reading && op->pfn == KVD_PFN_NONE &&
			       !list_empty(&op->wait);

		if (op->kind != OP_RESTORE || op->late ||
		    (!op->reading && !queued && !waiting) ||
		    t->core->mm.now_ns < op->deadline_ns || KV_MUTANT(tier_no_deadline))
			continue;
		if (waiting) {
			frame_forget(op);
			continue;
		}
		if (queued) {
			t->stats.read_late++;
			read_forget(op);
			continue;
		}
		/* The disk still has its buffer: it goes on, and nobody waits for it. */
		op->late = true;
		t->stats.read_late++;
		list_del(&op->pool_node);
		list_del(&op->node);
		list_add_tail(&t->late, &op->node);
	}
}

/* ------------------------------------------------------------------- the ask */

static void want_of_slot(struct tier_op *op, const struct kvd_slot *s)
{
	op->want.ident = tier_ident_of(op->t, s->tenant)->ident;
	memcpy(op->want.key, s->key, sizeof(op->want.key));
	op->want.fingerprint = s->fingerprint;
	op->want.generation = s->generation;
	op->want.page_bytes = s->page_bytes;
	op->want.page_crc = s->crc32c;
}

static struct tier_op *restore_op(struct kvd_tiers *t, const struct kvd_restore_ask *ask,
				  const struct kvd_slot *s)
{
	struct tier_op *op = t->copier_stuck ? NULL : tier_op_get(t, OP_RESTORE);

	if (!op)
		return NULL;
	want_of_slot(op, s);
	tier_op_pool(op, ask->pool);
	op->tenant = ask->tenant->index;
	tier_ident_of(t, op->tenant);
	op->root = ask->root;
	op->deadline_ns = t->core->mm.now_ns + t->p.read_deadline_ns;
	memcpy(op->parent_key, ask->parent_key, sizeof(op->parent_key));
	return op;
}

/* A page that is being copied in is in the index of no tier state: look at the frames'
 * operations. At most KVD_TIER_OPS, and only for keys that a tier has. */
static bool under_way(const struct kvd_tiers *t, const struct kvd_restore_ask *ask)
{
	const struct tier_op *op;

	list_for_each_entry (op, &t->all, node)
		if (op->kind == OP_RESTORE && op->pool_id == ask->pool->id &&
		    !memcmp(op->want.key, ask->key, KV_KEY_BYTES))
			return true;
	return false;
}

static bool from_dram(struct kvd_tiers *t, const struct kvd_restore_ask *ask, u32 id)
{
	struct kvd_slot *s = kvd_slot_at(&t->dram, id);
	struct tier_op *op;

	/* On its way to or through DRAM: by the time it is over, ask again. */
	if (s->state != KVD_SLOT_READY)
		return !t->ops[s->op - 1].late;
	if (s->readers && under_way(t, ask))
		return true;
	op = restore_op(t, ask, s);
	if (!op)
		return false;
	op->dram = id;
	kvd_space_get(&t->dram, id);
	frame_step(op);
	return true;
}

bool tier_restore(void *arg, const struct kvd_restore_ask *ask)
{
	struct kvd_tiers *t = arg;
	struct kvd_slot_name name = {ask->key, ask->pool->fingerprint,
				     ask->pool->domain_id};
	u32 id = kvd_space_find(&t->dram, &name);
	struct tier_op *op;

	if (t->copier_down)
		return false;
	if (id != KVD_SLOT_NONE)
		return from_dram(t, ask, id);
	id = t->store ? kvd_space_find(&t->store->space, &name) : KVD_SLOT_NONE;
	if (id == KVD_SLOT_NONE ||
	    kvd_slot_at(&t->store->space, id)->state != KVD_SLOT_READY)
		return false;
	op = restore_op(t, ask, kvd_slot_at(&t->store->space, id));
	if (!op)
		return false;
	op->nvme = id;
	if (read_start(op, &name))
		return true;
	t->stats.restores_no_room++;
	op->nvme = KVD_SLOT_NONE;
	tier_op_put(op);
	return false;
}
