/* SPDX-License-Identifier: Apache-2.0 */
/*
 * op_page.c - acts of a client: what it asks of kvmd about pages, and its steps.
 *
 * What a client gives up it gives up before it asks, and what it gets it has only when it
 * has read the completion: kvmd may be killed anywhere in between.
 */
#include "tests/sim/world/world.h"

#include <string.h>

#define SEQS	   8u
#define SEAL_MAX   4u
#define LOOKUP_MAX 6u

static const u32 gfps[] = {KV_GFP_NOWAIT, KV_GFP_PREFILL, KV_GFP_ATOMIC,
			   KV_GFP_PREFILL | KV_GFP_ZERO};

struct sim_client *sim_op_client(u32 k)
{
	return &sim.clients[k % sim.o.clients];
}

/* Number of page @i of sequence @seq: four sequences of a group share their first 0 .. 3
 * pages. Never 0. */
static u64 prefix_page(u32 seq, u32 i)
{
	u32 who = i < (seq & 3) ? 0x100 | seq >> 2 : seq;

	return (u64)who << 8 | i | 1ull << 32;
}

static void tokens_fill(u32 seq, u32 first, u32 nr, u32 *ret)
{
	for (u32 i = 0; i < nr; i++)
		for (u32 k = 0; k < KV_PAGE_TOKENS; k++)
			*ret++ = (u32)prefix_page(seq, first + i) * 2654435761u + k;
}

static u32 waiting_grants(const struct sim_client *c)
{
	u32 nr = 0;

	for (u32 i = 0; i < c->nr_inbox; i++)
		nr += c->inbox[i].nr;
	return nr;
}

/* Ready, with room for @nr more pages. */
static bool may_ask(struct sim_client *c, u32 nr)
{
	if (!sim_client_ready(c))
		return false;
	if (c->nr_inbox == SIM_INBOX)
		sim_letter_take(c, 0);
	return c->nr + waiting_grants(c) + nr <= SIM_HELD;
}

static struct sim_held *pick(struct sim_client *c, u32 k)
{
	return c->nr ? &c->held[k % c->nr] : NULL;
}

/* I10: a refusal leaves the caller as it was. I7: a grant is within the quota. */
static void outcome_check(const struct sim_conn *n, int r, u32 had, u64 used)
{
	const struct kvd_account *acct = &sim.tenants[n->tenant]->account;

	if (r == -EOVERFLOW)
		sim.stats.overflows++;
	if (r < 0 && r != -EOVERFLOW && r != -EIO && r != -ENOMEM && r != -EPIPE)
		sim_fail("allocation: %d", r);
	if (r == -EOVERFLOW && !sim.o.gen_left)
		sim_fail("generations are used up");
	if (r && n->a->nr_held != had && !sim_client_hostile(&sim.clients[n->client]))
		sim_fail("I10: refused with %d, and holds %u pages, %u before", r,
			 n->a->nr_held, had);
	if (r && acct->used_bytes > used)
		sim_fail("I10: refused with %d, and charged", r);
	if (!r && acct->used_bytes > acct->max_bytes)
		sim_fail("I7: granted above max");
}

void sim_op_alloc(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	u32 nr = 1 + a[1] % SIM_GRANTS, pending, had;
	struct sim_letter l = {.nr = nr};
	u64 used;
	int r;

	if (!may_ask(c, nr))
		return;
	had = c->conn->a->nr_held;
	used = sim.tenants[c->conn->tenant]->account.used_bytes;
	sim_core_enter();
	r = kvd_lease_alloc(c->conn->s, c->conn->a, nr, gfps[a[2] % 4], l.grants,
			    &pending);
	sim_core_leave();
	/* Its own magazines may have been recalled for it. */
	if (r && (gfps[a[2] % 4] & KV_GFP_RECLAIM))
		had = c->conn->a->nr_held;
	outcome_check(c->conn, r, had, used);
	if (r)
		return;
	if (sim.tenants[c->conn->tenant]->account.draining)
		sim_fail("a draining tenant gets memory");
	c->inbox[c->nr_inbox++] = l;
	sim.stats.grants += nr;
}

void sim_op_stock(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	u32 nr, pending, had;
	u64 used;
	int r;

	if (!may_ask(c, 0))
		return;
	used = sim.tenants[c->conn->tenant]->account.used_bytes;
	sim_core_enter();
	r = kvd_lease_stock(c->conn->s, c->conn->a, a[1] % 2, 1 + a[2] % 8,
			    gfps[a[3] % 4], &nr, &pending);
	sim_core_leave();
	had = c->conn->a->nr_held;
	if (r != -EINVAL || !sim_client_hostile(c))
		outcome_check(c->conn, r, had, used);
}

/* No request: the session page is all it needs, also while kvmd is away. */
void sim_op_pop(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	struct sim_letter l = {.nr = 1};
	struct kv_mag_slot *slot;
	/* in the middle of a call: what that will grant wants its room */
	u32 coming = sim.peek.under ? SIM_GRANTS : 0;
	int dirty;

	if (!c->conn || c->nr_inbox == SIM_INBOX ||
	    c->nr + waiting_grants(c) + coming + 1 > SIM_HELD || sim_client_hostile(c))
		return;
	slot = &c->conn->page->magazines[a[1] % 2].slots[a[2] % 8];
	if (!kv_mag_pop(slot, &l.grants[0].pfn, &l.grants[0].tag, &dirty))
		return;
	l.grants[0].flags = dirty ? KV_GRANT_DIRTY : 0;
	/* What was damaged may have been its page: a step will find out. */
	l.revoked[0] = sim.lossy;
	sim.stats.popped++;
	/* Nothing has to be read for it. */
	c->inbox[c->nr_inbox++] = l;
	sim_letter_take(c, c->nr_inbox - 1);
}

void sim_op_take(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);

	if (c->conn && c->nr_inbox && sim.up)
		sim_letter_take(c, a[1] % c->nr_inbox);
}

void sim_op_free(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	struct kv_page_ref refs[SIM_GRANTS];
	bool revoked = false;
	u32 nr = 0, done, first;
	struct sim_conn *n;
	int r;

	if (!sim_client_ready(c))
		return;
	n = c->conn;
	for (u32 i = 0; i < 1 + a[2] % SIM_GRANTS; i++) {
		struct sim_held *h = pick(c, a[1]);

		if (!h || h->sealing || sim_conn_busy(n, h->pfn))
			break;
		refs[nr++] = (struct kv_page_ref){
			.pfn = h->pfn, .tag = kv_tag_make(h->gen, KV_TAG_LIVE)};
		revoked |= h->revoked;
		sim_held_put(c, h);
	}
	if (!nr)
		return;
	sim_core_enter();
	r = kvd_lease_free(n->s, n->a, refs, nr, &done, &first);
	sim_core_leave();
	if (r && !revoked && !sim_client_hostile(c))
		sim_fail("free: %d, %u of %u done, page %u", r, done, nr, refs[0].pfn);
}

void sim_op_pin(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	struct kv_page_ref ref;
	struct sim_held *h;
	int r;

	if (!sim_client_ready(c))
		return;
	h = pick(c, a[1]);
	if (!h)
		return;
	ref = (struct kv_page_ref){.pfn = h->pfn,
				   .tag = kv_tag_make(h->gen, KV_TAG_LIVE)};
	sim_core_enter();
	r = kvd_lease_pin(c->conn->s, c->conn->a, &ref, 1);
	sim_core_leave();
	if (r && !h->revoked && !sim_client_hostile(c))
		sim_fail("pin: %d, page %u", r, h->pfn);
	if (!r)
		h->refs++;
}

/* Steps announced before now that have the page for writing: they may until they retire.
 */
static bool being_written(struct sim_conn *n, u32 pfn, u64 gen)
{
	bool any = false;

	for (u32 s = 0; s < KV_ANNOUNCE_SLOTS; s++) {
		struct sim_step *st = &n->steps[s];

		for (u32 i = 0; i < st->nr_rows && st->phase >= SIM_STORED_SLOT; i++) {
			if (st->rows[i].pfn != pfn || st->rows[i].gen != gen ||
			    !st->rows[i].write)
				continue;
			st->rows[i].late = true;
			any = true;
		}
	}
	return any;
}

/* Pages it wrote and no step has (or one has: a confused engine that does not wait): seal them, as the next of its prefix or a new one. */
static u32 seal_pick(struct sim_client *c, u32 from, u32 want, bool early,
		     struct sim_held **ret)
{
	u32 nr = 0;

	for (u32 i = 0; i < c->nr && nr < want; i++) {
		struct sim_held *h = &c->held[(from + i) % c->nr];

		if (h->write && h->written && !h->sealing &&
		    (early || !sim_conn_busy(c->conn, h->pfn)))
			ret[nr++] = h;
	}
	return nr;
}

static int seal_run(struct kvd_seal_op *op)
{
	int r;

	sim_core_enter();
	r = kvd_seal_start(op);
	if (!r) {
		do {
			r = kvd_seal_step(op);
		} while (r == -EAGAIN);
	}
	sim_core_leave();
	return r;
}

static void bytes_final(struct sim_conn *n, const struct sim_held *h, u64 sealed)
{
	u32 index = h->pfn / (u32)sim.o.extent_pages;
	struct sim_cell *cell;

	if (sim_client_hostile(&sim.clients[n->client]))
		return;
	SIM_EXPECT(n->map[index]);
	cell = &sim.exts[n->map[index] - 1].cells[h->pfn % sim.o.extent_pages];
	if (cell->gen == h->gen)
		cell->sealed = sealed && being_written(n, h->pfn, h->gen)
				       ? sealed | SIM_UNFINISHED
				       : sealed;
	else if (!h->revoked)
		sim_fail("page %u is sealed: generation %#llx, it has bytes of session "
			 "%llu",
			 h->pfn, (unsigned long long)h->gen,
			 (unsigned long long)cell->writer);
}

void sim_op_seal(const u16 *a)
{
	static u32 tokens[SEAL_MAX * KV_PAGE_TOKENS];
	struct sim_client *c = sim_op_client(a[0]);
	struct sim_held *held[SEAL_MAX];
	struct kv_seal_page pages[SEAL_MAX];
	struct kv_seal_ret rets[SEAL_MAX];
	struct kvd_seal_op op = {.pages = pages, .tokens = tokens, .rets = rets};
	bool on = c->chain_next && (a[3] & 1), revoked = false;
	u32 seq = on ? c->chain_seq : a[2] % SEQS, first = on ? c->chain_next : 0, nr;
	int r;

	if (!sim_client_ready(c))
		return;
	if (!c->chain_next) {
		on = false;
		first = 0;
	}
	nr = seal_pick(c, a[1], 1 + (a[3] >> 1) % SEAL_MAX, a[3] & 8, held);
	if (!nr || first + nr > 200)
		return;
	for (u32 i = 0; i < nr; i++) {
		pages[i] = (struct kv_seal_page){
			.pfn = held[i]->pfn,
			.tag = kv_tag_make(held[i]->gen, KV_TAG_LIVE)};
		bytes_final(c->conn, held[i], prefix_page(seq, first + i));
		held[i]->sealing = true;
		revoked |= held[i]->revoked;
	}
	tokens_fill(seq, first, nr, tokens);
	op.s = c->conn->s;
	op.a = c->conn->a;
	op.nr = nr;
	if (on)
		memcpy(op.arg.parent_key, c->chain_key, KV_KEY_BYTES);
	else
		op.arg.flags = KV_SEAL_ROOT;
	r = seal_run(&op);
	if (r && !revoked && !sim_client_hostile(c))
		sim_fail("seal: %d", r);
	for (u32 i = 0; i < nr; i++) {
		held[i]->sealing = false;
		if (r) {
			bytes_final(c->conn, held[i], 0);
			continue;
		}
		held[i]->write = false;
		held[i]->sealed = prefix_page(seq, first + i);
		sim.stats.seals++;
	}
	if (r)
		return;
	c->chain_seq = seq;
	c->chain_next = first + nr;
	memcpy(c->chain_key, rets[nr - 1].key, KV_KEY_BYTES);
}

void sim_op_lookup(const u16 *a)
{
	static u32 tokens[LOOKUP_MAX * KV_PAGE_TOKENS];
	struct sim_client *c = sim_op_client(a[0]);
	u32 seq = a[1] % SEQS, want = 1 + a[2] % LOOKUP_MAX;
	struct kv_hit hits[LOOKUP_MAX];
	struct kvd_lookup_op op = {.tokens = tokens,
				   .nr_tokens = want * KV_PAGE_TOKENS,
				   .hits = hits,
				   .hits_max = want};
	struct sim_letter l = {.shared = true};
	int r;

	if (!may_ask(c, want))
		return;
	tokens_fill(seq, 0, want, tokens);
	op.s = c->conn->s;
	op.a = c->conn->a;
	sim_core_enter();
	r = kvd_lookup_start(&op);
	if (!r) {
		do {
			r = kvd_lookup_step(&op);
		} while (r == -EAGAIN);
	}
	sim_core_leave();
	if (r != (op.nr ? 0 : KV_MISS))
		sim_fail("lookup: %d with %u hits", r, op.nr);
	if (!op.nr)
		return;
	for (u32 i = 0; i < op.nr; i++) {
		l.grants[i] = hits[i].grant;
		l.sealed[i] = prefix_page(seq, i);
	}
	l.nr = op.nr;
	sim.stats.hits += op.nr;
	c->inbox[c->nr_inbox++] = l;
	c->chain_seq = seq;
	c->chain_next = op.nr;
	memcpy(c->chain_key, hits[op.nr - 1].key, KV_KEY_BYTES);
}

void sim_op_fork(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	struct sim_letter l = {.nr = 1};
	struct kv_page_ref ref;
	struct sim_held *h;
	u32 pending;
	int r;

	if (!may_ask(c, 1))
		return;
	h = pick(c, a[1]);
	if (!h)
		return;
	ref = (struct kv_page_ref){.pfn = h->pfn,
				   .tag = kv_tag_make(h->gen, KV_TAG_LIVE)};
	sim_core_enter();
	r = kvd_fork(c->conn->s, c->conn->a, &ref, 1, gfps[a[2] % 4], l.grants, &pending);
	sim_core_leave();
	if (r == KV_STALE && !h->revoked && !sim_client_hostile(c))
		sim_fail("fork: stale");
	if (!r)
		c->inbox[c->nr_inbox++] = l;
}

/* FREE of a page that is not its own any more, or never was: nothing happens. */
void sim_op_badfree(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	u32 pages = (u32)(sim.o.extents * sim.o.extent_pages), done, first;
	struct kv_page_ref ref = {.pfn = a[1] % pages};
	int r;

	if (!sim_client_ready(c))
		return;
	ref.tag = kv_tag_make(a[2], KV_TAG_LIVE);
	if (c->nr_stale && a[3] & 1) {
		const struct sim_row *s =
			&c->stale[a[1] % KV_MIN(c->nr_stale, SIM_STALE)];

		ref = (struct kv_page_ref){.pfn = s->pfn,
					   .tag = kv_tag_make(s->gen, KV_TAG_LIVE)};
	}
	/* By chance it may be one that it has or will hear of. */
	if (c->conn->a->refs[ref.pfn])
		return;
	sim_core_enter();
	r = kvd_lease_free(c->conn->s, c->conn->a, &ref, 1, &done, &first);
	sim_core_leave();
	if (r != KV_STALE || done)
		sim_fail("page %u is freed by one that does not hold it: %d", ref.pfn, r);
}

/* --------------------------------------------------------------------------- steps */

void sim_op_step(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	u32 slot = a[1] % 3;

	if (!c->conn)
		return;
	if (c->conn->steps[slot].phase == SIM_IDLE && sim.up && !sim_client_ready(c))
		return;
	for (u32 i = 0; i < 1 + a[2] % 8u && c->conn; i++)
		sim_step_go(c->conn, slot, a[3]);
}

void sim_op_finish(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);

	if (c->conn)
		sim_step_finish(c->conn, a[1] % 3);
}

/* All that a request does when nothing comes between: a prefix is looked up, what it lacks
 * is allocated, written and sealed, and perhaps all is let go. */
void sim_op_request(const u16 *a)
{
	const u16 get[] = {a[0], a[1], a[2], a[3]}, look[] = {a[0], a[2], 5, 0};
	const u16 steps[] = {a[0], a[3], 0, 8}, seal[] = {a[0], 0, a[2], 7};
	const u16 done[] = {a[0], 0, SIM_GRANTS - 1, 0};
	struct sim_client *c = sim_op_client(a[0]);

	sim_op_lookup(look);
	sim_op_alloc(get);
	while (c->nr_inbox)
		sim_letter_take(c, 0);
	sim_op_finish(steps);
	sim_op_step(steps);
	sim_op_finish(steps);
	sim_op_seal(seal);
	/* Its pages stay in the cache, if there is room for them. */
	for (u32 i = 0; i < SIM_HELD && a[3] & 4; i++)
		sim_op_free(done);
}

/* Work of sessions that are over: it goes on until it retires or is proven to be gone. */
void sim_op_late(const u16 *a)
{
	for (u32 k = 0; k < sim.nr_conns; k++) {
		struct sim_conn *n = &sim.conns[(a[0] + k) % sim.nr_conns];
		u32 slot = a[1] % 3;

		if (n == sim.clients[n->client].conn || !n->given || n->proof ||
		    n->steps[slot].phase == SIM_IDLE)
			continue;
		if (n->dead && n->steps[slot].phase != SIM_RUNNING)
			continue;
		for (u32 i = 0; i < 1 + a[2] % 8u && n->steps[slot].phase != SIM_IDLE;
		     i++)
			sim_step_go(n, slot, 0);
		return;
	}
}
