/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - a step of an engine in one announce slot, as libkvclient/step.c does it (P3 ..
 * P6), one thing at a time, so that anything may happen in between.
 *
 *	IDLE -> LOADED -> STORED_SLOT -> ATTACHED -> COPIED -> RUNNING -> IDLE
 *
 * RUNNING touches one row at a time, as late as the schedule likes. Each touch compares
 * the bytes with what the row was given for: this is where a wrong read shows.
 */
#include "tests/sim/world/world.h"

#include <stdlib.h>
#include <string.h>

#define NONCE 0x5eedull

static u32 pages_total(void)
{
	return (u32)(sim.o.extents * sim.o.extent_pages);
}

static bool late_row(const struct sim_step *st, u32 pfn, u64 gen)
{
	for (u32 i = 0; i < st->nr_rows; i++)
		if (st->rows[i].late && st->rows[i].pfn == pfn && st->rows[i].gen == gen)
			return true;
	return false;
}

/* A page that was sealed under this step is finished when its last writer is. */
static void writes_end(struct sim_conn *n, const struct sim_step *st)
{
	for (u32 i = 0; i < st->nr_rows; i++) {
		const struct sim_row *row = &st->rows[i];
		u32 at = n->map[row->pfn / (u32)sim.o.extent_pages];
		struct sim_cell *cell;
		bool more = false;

		if (!row->late || !at)
			continue;
		cell = &sim.exts[at - 1].cells[row->pfn % sim.o.extent_pages];
		for (u32 s = 0; s < KV_ANNOUNCE_SLOTS; s++)
			more |= &n->steps[s] != st &&
				late_row(&n->steps[s], row->pfn, row->gen);
		if (cell->gen == row->gen && !more)
			cell->sealed &= ~SIM_UNFINISHED;
	}
}

void sim_step_vanish(struct sim_conn *n, struct sim_step *st)
{
	writes_end(n, st);
	free(st->block);
	*st = (struct sim_step){.phase = SIM_IDLE};
}

static bool row_known(const struct sim_step *st, u32 pfn)
{
	for (u32 i = 0; i < st->nr_rows; i++)
		if (st->rows[i].pfn == pfn)
			return true;
	return false;
}

/* Rows of two requests: pages the client holds, and sometimes one it should have
 * forgotten, in a request of its own: a confused engine. */
static void rows_pick(struct sim_step *st, struct sim_client *c, u32 r)
{
	for (u32 i = 0; i < c->nr && st->nr_rows < SIM_ROWS - 1; i++) {
		const struct sim_held *h = &c->held[(i + r) % c->nr];

		if (((r >> (i % 8)) & 3) == 3 || h->sealing || row_known(st, h->pfn))
			continue;
		st->rows[st->nr_rows++] = (struct sim_row){
			.pfn = h->pfn,
			.gen = h->gen,
			.sealed = h->sealed,
			.write = h->write,
			.written = h->written,
			.request = (u8)(h->revoked ? 1 : 0),
			.held = !h->revoked,
		};
	}
	if (c->nr_stale && (r & 3) == 1) {
		struct sim_row row = c->stale[r % KV_MIN(c->nr_stale, SIM_STALE)];

		row.request = 1;
		if (!row_known(st, row.pfn))
			st->rows[st->nr_rows++] = row;
	}
}

static void block_copy(struct sim_conn *n, struct sim_step *st)
{
	const u8 *base = (const u8 *)n->table;
	const u64 *tags = (const u64 *)(base + n->table->tag_off);
	const struct kv_log_entry *log =
		(const struct kv_log_entry *)(base + n->table->log_off);
	struct kv_log_entry *e;

	st->head = kv_load_acquire64(&n->table->log_head.word);
	st->from = n->position;
	st->full = n->fresh || st->head - n->position >= KV_LOG_USABLE;
	st->nr_block =
		st->full ? (u32)n->table->used_pages.word : (u32)(st->head - n->position);
	st->block = malloc((st->nr_block + 1ull) * sizeof(*e));
	SIM_EXPECT(st->block);
	e = st->block;
	if (st->full)
		memcpy(st->block, tags, st->nr_block * sizeof(u64));
	for (u32 i = 0; i < st->nr_block && !st->full; i++)
		e[i] = log[(n->position + i) % KV_LOG_ENTRIES];
}

/* The first kernel: words only grow, in whatever order blocks come (P1). */
static void mirror_update(struct sim_conn *n, struct sim_step *st)
{
	const struct kv_log_entry *e = st->block;
	const u64 *tags = st->block;

	for (u32 i = 0; i < st->nr_block; i++) {
		u32 pfn = st->full ? i : e[i].pfn;
		u64 tag = st->full ? tags[i] : e[i].tag;

		if (!st->full && e[i].sequence != (u32)(st->from + i))
			sim_fail("log entry %llu has sequence %u",
				 (unsigned long long)(st->from + i), e[i].sequence);
		if (n->mirror[pfn] < tag)
			n->mirror[pfn] = tag;
	}
	n->position = KV_MAX(n->position, st->head);
	n->fresh = false;
}

static void check(struct sim_conn *n, struct sim_step *st)
{
	bool hostile = sim_client_hostile(&sim.clients[n->client]);

	if (st->epoch_seen != n->attached_epoch ||
	    (!st->full && st->from > n->position)) {
		st->bad = 3; /* its block is of another table: the mirror is behind */
		return;
	}
	mirror_update(n, st);
	for (u32 i = 0; i < st->nr_rows; i++) {
		const struct sim_row *row = &st->rows[i];
		struct kv_row kr =
			kv_row_make(row->pfn, kv_tag_make(row->gen, KV_TAG_LIVE),
				    row->write ? KV_ROW_WRITE : 0, NONCE, i);
		u32 bits = kv_row_check(kr, i, NONCE, n->mirror[row->pfn], pages_total());

		if (!bits)
			continue;
		st->bad |= 1u << row->request;
		sim.stats.stale_found++;
		/* Revoked since it was picked? Then it is right that it fails. */
		if (row->held && !sim.lossy && !hostile &&
		    n == sim.clients[n->client].conn) {
			const struct sim_held *h = sim_held_find(&sim.clients[n->client],
								 row->pfn, row->gen);

			if (h && !h->revoked && !h->sealing && h->write == row->write)
				sim_fail("a good row fails the check: page %u generation "
					 "%#llx, the mirror has %#llx",
					 row->pfn, (unsigned long long)row->gen,
					 (unsigned long long)n->mirror[row->pfn]);
		}
	}
}

/* I5, as the record has it. */
static void frame_check(const struct sim_conn *n, const struct sim_row *row)
{
	const struct kvd_pool *pool;
	const struct kvd_frame *f;

	if (!sim.up || !n->s || sim.peek.under)
		return;
	pool = sim.core.mm.pools[n->pool_id - 1];
	if (!pool || !kvd_session_attach(n->s, n->pool_id))
		return;
	/* An extent that was lost lives on where it is mapped; another one has its index. */
	if (sim.lossy && sim_ext_of(pool, row->pfn) !=
				 &sim.exts[n->map[row->pfn / sim.o.extent_pages] - 1])
		return;
	f = &pool->frames[row->pfn];
	if (f->state == KVD_FREE || f->state == KVD_RESTORING ||
	    (f->state == KVD_ABSENT && !sim.lossy))
		sim_fail("I5: page %u is %s under a step of session %llu", row->pfn,
			 kvd_frame_state_str(f->state), (unsigned long long)n->id);
	if (kv_tag_live(f->tag) && kv_tag_gen(f->tag) != row->gen)
		sim_fail("page %u went on to generation %#llx under a step on %#llx",
			 row->pfn, (unsigned long long)kv_tag_gen(f->tag),
			 (unsigned long long)row->gen);
}

static void touch(struct sim_conn *n, struct sim_row *row)
{
	u32 index = row->pfn / (u32)sim.o.extent_pages;
	struct sim_held *h = sim_held_find(&sim.clients[n->client], row->pfn, row->gen);
	struct sim_cell *cell;

	row->touched = true;
	if (sim_client_hostile(&sim.clients[n->client]))
		return;
	if (!n->map[index])
		sim_fail("a step touches page %u, whose extent is not mapped", row->pfn);
	cell = &sim.exts[n->map[index] - 1].cells[row->pfn % sim.o.extent_pages];
	frame_check(n, row);
	if (!row->write) {
		u64 mine = cell->writer == n->id ? SIM_UNFINISHED : 0;

		sim.stats.reads++;
		if (cell->gen != row->gen || (cell->sealed & ~mine) != row->sealed)
			sim_fail(
				"wrong read: page %u generation %#llx prefix page %#llx: "
				"has %#llx of session %llu, prefix page %#llx",
				row->pfn, (unsigned long long)row->gen,
				(unsigned long long)row->sealed,
				(unsigned long long)cell->gen,
				(unsigned long long)cell->writer,
				(unsigned long long)cell->sealed);
		return;
	}
	sim.stats.writes++;
	if (row->written && cell->gen != row->gen)
		sim_fail("page %u generation %#llx of session %llu was overwritten by "
			 "session %llu",
			 row->pfn, (unsigned long long)row->gen,
			 (unsigned long long)n->id, (unsigned long long)cell->writer);
	if (cell->sealed && cell->gen == row->gen && !(cell->sealed & SIM_UNFINISHED))
		sim_fail("I6: page %u is sealed and written", row->pfn);
	if (cell->gen == row->gen && cell->sealed)
		return;
	*cell = (struct sim_cell){.gen = row->gen, .writer = n->id};
	if (h && n == sim.clients[n->client].conn)
		h->written = true;
}

static void retire(struct sim_conn *n, u32 slot)
{
	sim_step_vanish(n, &n->steps[slot]);
	kv_slot_retire(n->page, slot);
}

/* Return: true: a row was touched. */
static bool touch_next(struct sim_conn *n, struct sim_step *st)
{
	for (u32 i = 0; i < st->nr_rows; i++) {
		struct sim_row *row = &st->rows[i];

		if (row->touched || (st->bad >> row->request & 1))
			continue;
		touch(n, row);
		return true;
	}
	return false;
}

/* A SEAL of its page is on its way, with no answer yet: perhaps it is not published. */
static void late_mark(struct sim_conn *n, struct sim_step *st)
{
	for (u32 i = 0; i < st->nr_rows; i++) {
		struct sim_row *row = &st->rows[i];
		const struct sim_held *h =
			sim_held_find(&sim.clients[n->client], row->pfn, row->gen);
		u32 at = n->map[row->pfn / (u32)sim.o.extent_pages];
		struct sim_cell *cell;

		if (!h || !h->sealing || !row->write || !at)
			continue;
		cell = &sim.exts[at - 1].cells[row->pfn % sim.o.extent_pages];
		row->late = true;
		if (cell->gen == row->gen && cell->sealed)
			cell->sealed |= SIM_UNFINISHED;
	}
}

void sim_step_go(struct sim_conn *n, u32 slot, u32 r)
{
	struct sim_step *st = &n->steps[slot];

	switch (st->phase) {
	case SIM_IDLE:
		if (n->closed)
			return;
		rows_pick(st, &sim.clients[n->client], r);
		if (!st->nr_rows)
			return;
		st->epoch = kv_load_acquire64(&n->table->grace_epoch.word);
		st->phase = SIM_LOADED;
		return;
	case SIM_LOADED:
		late_mark(n, st);
		kv_slot_announce(n->page, slot, st->epoch);
		st->phase = SIM_STORED_SLOT;
		return;
	case SIM_STORED_SLOT:
		if (kv_load_acquire64(&n->page->table_epoch.word) != n->attached_epoch) {
			retire(n, slot);
			return;
		}
		st->epoch_seen = n->attached_epoch;
		st->phase = SIM_ATTACHED;
		return;
	case SIM_ATTACHED:
		if (st->epoch_seen != n->attached_epoch) {
			retire(n, slot); /* it attached anew meanwhile */
			return;
		}
		block_copy(n, st);
		st->phase = SIM_COPIED;
		return;
	case SIM_COPIED:
		check(n, st);
		st->phase = SIM_RUNNING;
		return;
	case SIM_RUNNING:
		if (!touch_next(n, st))
			retire(n, slot);
		return;
	}
}

void sim_step_finish(struct sim_conn *n, u32 slot)
{
	for (u32 i = 0; i < SIM_ROWS + 8 && n->steps[slot].phase != SIM_IDLE; i++)
		sim_step_go(n, slot, 0);
}
