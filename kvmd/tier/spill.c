/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/spill.c - SPILL: a page that reclaim takes goes to DRAM.
 *
 * The frame is the copier's until the copy is done, and then dies as any evicted page. The
 * slot is found by its key from the start, as FILLING, so that a lookup can wait for it,
 * and is READY when a worker has compared its digest with the sealing engine's.
 *
 * Loop thread only.
 */
#include <errno.h>
#include <string.h>

#include "base/mutant.h"
#include "kvmd/tier/crc.h"
#include "kvmd/tier/tier_priv.h"

#define SPILL_PART  4u
#define SPILL_LEAST 8u

static void want_fill(struct tier_op *op, const struct kvd_pool *pool,
		      const struct kvd_frame *f)
{
	op->want.ident = tier_ident_of(op->t, f->tenant)->ident;
	memcpy(op->want.key, f->key, sizeof(op->want.key));
	op->want.fingerprint = pool->fingerprint;
	op->want.generation = kv_tag_gen(f->tag);
	op->want.page_bytes = kv_page_bytes(&pool->layout);
	op->want.page_crc = f->crc32c;
}

static void header_fill(struct tier_op *op, const struct kvd_pool *pool, u32 pfn)
{
	struct kvd_page_hdr *hdr = tier_hdr_at(op->t, op->dram);

	memset(hdr, 0, sizeof(*hdr));
	hdr->fingerprint = op->want.fingerprint;
	hdr->ident = op->want.ident;
	memcpy(hdr->key, op->want.key, sizeof(hdr->key));
	hdr->generation = op->want.generation;
	hdr->page_bytes = op->want.page_bytes;
	hdr->page_crc = op->want.page_crc;
	memcpy(hdr->tokens, pool->tokens + (u64)pfn * KV_PAGE_TOKENS,
	       sizeof(hdr->tokens));
	op->hdr = hdr;
}

static void slot_fill(struct tier_op *op)
{
	struct kvd_slot *s = kvd_slot_at(&op->t->dram, op->dram);

	s->generation = op->want.generation;
	s->page_bytes = (u32)op->want.page_bytes;
	s->crc32c = op->want.page_crc;
	s->op = (u16)(op->index + 1);
}

/* A tier has it, or is getting it: as good as its last use. */
static bool stored(struct kvd_tiers *t, const struct kvd_slot_name *name)
{
	u32 id = kvd_space_find(&t->dram, name);

	if (id != KVD_SLOT_NONE) {
		if (kvd_slot_at(&t->dram, id)->state == KVD_SLOT_READY) {
			kvd_space_get(&t->dram, id);
			kvd_space_put(&t->dram, id);
		}
		return true;
	}
	return t->store && kvd_space_find(&t->store->space, name) != KVD_SLOT_NONE;
}

/* A part of the pool at a time: a copier that stands still takes no more with it. */
static bool may_spill(const struct kvd_tiers *t, const struct kvd_pool *pool)
{
	u32 backed = pool->geo.nr_pages - pool->nr[KVD_ABSENT];

	return t->nr_spills < KVD_TIER_SPILLS_MAX &&
	       pool->nr[KVD_SPILLING] < KV_MAX(backed / SPILL_PART, SPILL_LEAST);
}

int tier_evict(void *arg, struct kvd_pool *pool, u32 pfn)
{
	struct kvd_tiers *t = arg;
	const struct kvd_frame *f = &pool->frames[pfn];
	struct kvd_slot_name name = {f->key, pool->fingerprint, pool->domain_id};
	u64 slot_bytes = pool->geo.stride_bytes + KVD_PAGE_HDR_BYTES;
	struct tier_op *op;

	if (stored(t, &name)) {
		t->stats.spills_had++;
		return 0;
	}
	if (t->stopped || t->copier_down || t->copier_stuck ||
	    !t->dram.acct[f->tenant].max_bytes)
		return 0;
	op = may_spill(t, pool) ? tier_op_get(t, OP_SPILL) : NULL;
	if (!op) {
		t->stats.spills_waited++;
		return -EAGAIN;
	}
	op->tenant = f->tenant;
	want_fill(op, pool, f);
	op->dram = kvd_space_take(&t->dram, &name, f->tenant, slot_bytes);
	if (op->dram == KVD_SLOT_NONE) {
		t->stats.spills_no_room++;
		tier_op_put(op);
		return 0;
	}
	slot_fill(op);
	header_fill(op, pool, pfn);
	tier_op_pool(op, pool);
	op->pfn = pfn;
	kvd_spill_begin(pool, pfn);
	tier_copy_queue(op, KVD_TIER_OUT);
	return 1;
}

/* ----------------------------------------------------------------- its end */

static void digest_run(struct kvd_work *w)
{
	struct tier_op *op = kv_container_of(w, struct tier_op, work);

	kvd_page_hdr_seal(op->hdr);
	op->bad = kvd_page_check(op->hdr, &op->want);
}

static void digest_done(struct kvd_work *w)
{
	struct tier_op *op = kv_container_of(w, struct tier_op, work);
	struct kvd_tiers *t = op->t;

	if (op->bad || op->cancelled) {
		if (op->bad)
			tier_bad_page(op, "spill");
		kvd_space_drop(&t->dram, op->dram);
		t->stats.dropped++;
	} else {
		kvd_space_ready(&t->dram, op->dram);
		kvd_space_dirty(&t->dram, op->dram, t->store != NULL);
		t->stats.spills++;
	}
	tier_op_put(op);
}

void tier_spill_copied(struct tier_op *op)
{
	struct kvd_tiers *t = op->t;
	struct kvd_pool *pool = tier_pool_of(op);

	kv_assert(pool);
	kvd_spill_end(pool, op->pfn);
	op->pfn = KVD_PFN_NONE;
	if (op->copy_status) {
		kvd_space_drop(&t->dram, op->dram);
		t->stats.spills_failed++;
		t->stats.dropped++;
		tier_op_put(op);
		return;
	}
	op->work.run = digest_run;
	op->work.done = digest_done;
	kvd_work_submit(t->workers, &op->work);
}
