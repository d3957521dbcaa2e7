/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/write.c - WRITE: DRAM slots go to NVMe in the background, oldest first.
 *
 * Header and page lie together in DRAM as they do on the disk, so a write is one transfer
 * without a copy. A disk that is full or fails stops the writes for a while; what was not
 * written stays in DRAM as long as there is room.
 *
 * Loop thread only.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "kvmd/tier/tier_priv.h"

#define RETRY_NS (10ull * KV_NSEC_PER_SEC)

static void writes_off(struct kvd_tiers *t, s64 result)
{
	char line[160];
	int e = result < 0 ? (int)-result : EIO;

	if (!t->fault[0]) {
		snprintf(t->fault, sizeof(t->fault), "writes are off: %s", strerror(e));
		snprintf(line, sizeof(line), "NVMe tier: %s; reads go on", t->fault);
		if (t->p.tell)
			t->p.tell(t->p.tell_arg, line);
	}
	t->writes_off_until_ns = t->core->mm.now_ns + RETRY_NS;
}

static void write_ok(struct tier_op *op)
{
	struct kvd_tiers *t = op->t;
	struct kvd_space *sp = &t->store->space;

	t->fault[0] = 0;
	t->stats.writes++;
	/* Forgotten while it was written: in DRAM, so here as well. */
	if (op->cancelled || kvd_slot_at(&t->dram, op->dram)->state == KVD_SLOT_DYING) {
		kvd_space_drop(sp, op->nvme);
		return;
	}
	kvd_space_ready(sp, op->nvme);
	kvd_store_put(t->store, op->nvme);
}

static void write_done(struct kvd_io_op *io)
{
	struct tier_op *op = kv_container_of(io, struct tier_op, io);
	struct kvd_tiers *t = op->t;
	struct kvd_slot *s = kvd_slot_at(&t->dram, op->dram);

	op->reading = false;
	if (io->result == (s64)io->bytes) {
		write_ok(op);
	} else {
		t->stats.write_full += io->result == -ENOSPC;
		t->stats.write_errors += io->result != -ENOSPC;
		kvd_space_drop(&t->store->space, op->nvme);
		if (s->state == KVD_SLOT_READY)
			kvd_space_dirty(&t->dram, op->dram, true);
		writes_off(t, io->result);
	}
	/* Written, not used: it stays as old as it is. */
	kvd_space_put(&t->dram, op->dram);
	tier_op_put(op);
}

static void write_header(struct tier_op *op)
{
	op->hdr = tier_hdr_at(op->t, op->dram);
	op->hdr->slot_off = kvd_slot_off(&op->t->store->space, op->nvme);
	kvd_page_hdr_seal(op->hdr);
}

/* Return: false: no more of them now. */
static bool write_start(struct kvd_tiers *t, u32 id)
{
	struct kvd_slot *s = kvd_slot_at(&t->dram, id), *n;
	struct kvd_slot_name name = {s->key, s->fingerprint, s->domain};
	struct kvd_space *sp = &t->store->space;
	struct tier_op *op;

	if (kvd_space_find(sp, &name) != KVD_SLOT_NONE) {
		kvd_space_dirty(&t->dram, id, false);
		return true;
	}
	op = tier_op_get(t, OP_WRITE);
	if (!op)
		return false;
	op->tenant = s->tenant;
	op->dram = id;
	op->nvme = kvd_space_take(sp, &name, s->tenant, kvd_slot_bytes(&t->dram, id));
	kvd_space_dirty(&t->dram, id, false);
	if (op->nvme == KVD_SLOT_NONE) {
		t->stats.writes_no_room++;
		tier_op_put(op);
		return true;
	}
	n = kvd_slot_at(sp, op->nvme);
	n->generation = s->generation;
	n->page_bytes = s->page_bytes;
	n->crc32c = s->crc32c;
	write_header(op);
	op->io = (struct kvd_io_op){
		.write = true,
		.off = kvd_slot_off(sp, op->nvme),
		.addr = op->hdr,
		.bytes = (u32)kvd_slot_bytes(sp, op->nvme),
		.done = write_done,
	};
	kv_assert(!kvd_io_submit(t->store->io, &op->io));
	op->reading = true;
	kvd_space_hold(&t->dram, id);
	return true;
}

void tier_writes_start(struct kvd_tiers *t)
{
	u32 depth = KV_MAX(t->p.nvme_depth / 2, 1u);

	if (t->stopped || t->core->mm.now_ns < t->writes_off_until_ns)
		return;
	/* After a failure one page at a time, until one has gone well. */
	if (t->fault[0])
		depth = 1;
	while (t->dram.dirty.nr && t->nr_writes < depth &&
	       kvd_io_pending(t->store->io) < t->p.nvme_depth &&
	       t->dram.used_bytes * 100 >= t->dram.size_bytes * t->p.write_from) {
		if (!write_start(t, t->dram.dirty.head))
			break;
	}
}
