/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/adopt_frame.c - the records of an adopted pool: each is whole, undone or poisoned,
 * then finds its place by its state and by what sessions hold (see adopt.h).
 *
 * Every operation changes one record at a time (kvd_frame_touch() .. kvd_frame_set()) and
 * any prefix of these changes is a state that is put right here: that is why no operation
 * needs a longer intent than struct kvd_undo and an extent's word.
 *
 * Loop thread only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "base/mutant.h"
#include "kvmd/own/adopt.h"
#include "kvmd/own/image.h"

#define LIVE_STATES   (1u << KVD_MAGAZINE | 1u << KVD_ACTIVE | SEALED_STATES)
#define SEALED_STATES (1u << KVD_SEALED | 1u << KVD_CACHED | 1u << KVD_SPILLING)

struct aged {
	u64 when_ns;
	u32 pfn;
};

/**
 * struct work - one pool being gone through
 * @refs: by pfn: what sessions hold
 * @bad: bit per pfn: record or references are damaged
 * @cached: pages for the LRU
 * @last: record that was being changed: its references may differ
 */
struct work {
	struct kvd_core *core;
	struct kvd_pool *pool;
	struct kvd_adopted *ad;
	u32 *refs;
	u64 *bad;
	struct aged *cached;
	u32 nr_cached;
	u32 last;
	bool lossy;
};

/* A damaged record takes the place of a live one: it needs a generation to die, too. */
static bool is_bad(const struct work *w, u32 pfn)
{
	return w->bad[pfn / 64] >> (pfn % 64) & 1;
}

static void set_bad(struct work *w, u32 pfn)
{
	w->bad[pfn / 64] |= 1ull << (pfn % 64);
	w->ad->damage++;
}

/* No extent has covered it yet. */
static bool untouched(const struct kvd_frame *f)
{
	return !f->nr_events && !f->check;
}

static bool backed(const struct kvd_pool *pool, u32 pfn)
{
	return pool->extents[kvd_pool_extent_of(pool, pfn)].state == KVD_EXTENT_LIVE;
}

/* All that a whole record says must fit together, or it is not believed. */
static bool sensible(const struct work *w, const struct kvd_frame *f)
{
	const struct kvd_pool *pool = w->pool;
	const struct kvd_tenant *t =
		f->tenant < KVD_TENANTS_MAX ? w->core->tenants[f->tenant] : NULL;
	bool owned = f->state != KVD_ABSENT && f->state != KVD_FREE &&
		     f->state != KVD_POISONED;

	if (owned && (!t || t->domain != pool->owner))
		return false;
	if (f->parent != KVD_PFN_NONE && f->parent >= pool->geo.nr_pages)
		return false;
	if (kv_tag_gen(f->tag) >= pool->mm->gens.source->next)
		return false;
	if (((LIVE_STATES >> f->state) & 1) != (u32)kv_tag_live(f->tag))
		return false;
	return ((SEALED_STATES >> f->state) & 1) == (u32)kv_tag_sealed(f->tag);
}

/* A page with a writer is its writer's alone. A damaged record says nothing about it. */
static bool foreign(const struct kvd_frame *f, const struct kvd_session *s)
{
	return (f->state == KVD_ACTIVE || f->state == KVD_MAGAZINE) &&
	       f->owner != s->id && f->check == kvd_frame_check_word(f) &&
	       !KV_MUTANT(any_holder);
}

static void lease_drop(struct kvd_attach *a, u32 pfn)
{
	a->refs[pfn] = 0;
	a->held[pfn / 64] &= ~(1ull << (pfn % 64));
	a->nr_held--;
}

static void leases_sum(struct work *w)
{
	struct kvd_session *s;

	list_for_each_entry (s, &w->core->sessions, node) {
		struct kvd_attach *a = kvd_session_attach(s, w->pool->id);

		for (u32 pfn = 0; a && pfn < w->pool->geo.nr_pages; pfn++) {
			const struct kvd_frame *f = &w->pool->frames[pfn];

			if (a->refs[pfn] && pfn != w->last && foreign(f, s)) {
				w->ad->damage++;
				lease_drop(a, pfn);
			}
			w->refs[pfn] += a->refs[pfn];
		}
	}
}

/* A page nobody may hold any more. */
static void leases_drop(struct work *w, u32 pfn)
{
	struct kvd_session *s;

	if (!w->refs[pfn])
		return;
	list_for_each_entry (s, &w->core->sessions, node) {
		struct kvd_attach *a = kvd_session_attach(s, w->pool->id);

		if (!a || !a->refs[pfn])
			continue;
		lease_drop(a, pfn);
	}
	w->refs[pfn] = 0;
}

/* The record under change has gone back: is it held by those who may? */
static void holders_check(struct work *w, u32 pfn)
{
	struct kvd_session *s;

	list_for_each_entry (s, &w->core->sessions, node) {
		struct kvd_attach *a = kvd_session_attach(s, w->pool->id);

		if (!a || !a->refs[pfn] || !foreign(&w->pool->frames[pfn], s))
			continue;
		w->ad->damage++;
		w->refs[pfn] -= a->refs[pfn];
		lease_drop(a, pfn);
	}
}

/* Nothing has been taken from the page's extent yet: kvmd died while it made the records. */
static bool extent_new(const struct kvd_pool *pool, u32 pfn)
{
	u32 first = pfn >> pool->geo.shift << pool->geo.shift;

	for (u32 i = first; i < first + (1u << pool->geo.shift); i++) {
		const struct kvd_frame *f = &pool->frames[i];

		if (!untouched(f) && (f->state != KVD_FREE || f->nr_events != 1))
			return false;
	}
	return true;
}

/* A record of zeros: nothing has been here yet, or a record is gone. Return: it is gone */
static bool record_gone(struct work *w, u32 pfn)
{
	bool held = w->refs[pfn] != 0;

	if (held) {
		w->ad->damage++;
		leases_drop(w, pfn);
	}
	return backed(w->pool, pfn) && (held || !extent_new(w->pool, pfn));
}

/* Pass 1: which records can be believed? Return: pages with a live tag. */
static u64 records_check(struct work *w)
{
	struct kvd_pool *pool = w->pool;
	u64 nr_live = 0;

	for (u32 pfn = 0; pfn < pool->geo.nr_pages; pfn++) {
		struct kvd_frame *f = &pool->frames[pfn];
		u8 was[offsetof(struct kvd_frame, past)];
		u32 sealing, mine;

		pool->links[pfn].next = KVD_PFN_NONE;
		if (pfn == w->last)
			memcpy(was, f, sizeof(was));
		if (!kvd_frame_restore(pool->mm->undo, pool, pfn)) {
			set_bad(w, pfn);
			nr_live++;
			continue;
		}
		if (pfn == w->last) {
			w->ad->undone += memcmp(was, f, sizeof(was)) != 0;
			holders_check(w, pfn);
		}
		if (untouched(f) ? record_gone(w, pfn) && !KV_MUTANT(gone_record_is_new)
				 : !sensible(w, f)) {
			set_bad(w, pfn);
			nr_live++;
			continue;
		}
		if (untouched(f))
			continue;
		sealing = f->flags & KVD_FRAME_SEALING ? 1 : 0;
		mine = w->refs[pfn] + sealing;
		if (mine != f->refs && pfn != w->last && !(w->lossy && mine < f->refs)) {
			w->ad->damage++;
			leases_drop(w, pfn);
		}
		nr_live += kv_tag_live(f->tag);
	}
	return nr_live;
}

/* Pass 2: stocked pages still in their slots. The shared words are hostile: only one that
 * names a MAGAZINE page of its session, with its tag, counts, and only once. */
static void magazines_find(struct work *w, struct kvd_session *s)
{
	struct kvd_pool *pool = w->pool;

	for (u32 i = 0; i < KV_MAGAZINES * KV_MAGAZINE_SLOTS; i++) {
		u32 mag = i / KV_MAGAZINE_SLOTS, slot = i % KV_MAGAZINE_SLOTS;
		struct kv_mag_slot *shared = &s->page->magazines[mag].slots[slot];
		u64 word = kv_load_acquire64(&shared->word);
		u32 pfn = KV_MAG_PFN(word);

		if (!(word & KV_MAG_STOCKED) || pfn >= pool->geo.nr_pages ||
		    is_bad(w, pfn) || !w->refs[pfn] ||
		    (!backed(pool, pfn) && !KV_MUTANT(stocked_without_extent)) ||
		    pool->frames[pfn].state != KVD_MAGAZINE ||
		    pool->frames[pfn].owner != s->id ||
		    pool->frames[pfn].tag != kv_load_relaxed64(&shared->tag) ||
		    pool->links[pfn].next != KVD_PFN_NONE ||
		    (s->mags[mag].nr && s->mags[mag].pool != pool))
			continue;
		s->mags[mag].pool = pool;
		s->mags[mag].slots[slot].word = word;
		s->mags[mag].nr++;
		pool->links[pfn].next = mag << 8 | slot;
	}
}

static void page_dead(struct work *w, struct kvd_frame *f, u32 state)
{
	struct kvd_pool *pool = w->pool;

	leases_drop(w, f->pfn);
	if (kv_tag_live(f->tag) || is_bad(w, f->pfn))
		f->tag = kv_tag_make(kvd_gens_dead(&pool->mm->gens), 0);
	f->refs = 0;
	f->flags &= KVD_FRAME_FOREIGN;
	f->parent = KVD_PFN_NONE;
	f->state = (u8)state;
}

/* What state does a believed record go on in? */
static u32 state_of(struct work *w, struct kvd_frame *f)
{
	u32 refs = w->refs[f->pfn];
	bool findable = (f->flags & (KVD_FRAME_INDEXED | KVD_FRAME_FINDABLE)) ==
			(KVD_FRAME_INDEXED | KVD_FRAME_FINDABLE);

	switch (f->state) {
	case KVD_MAGAZINE:
		if (!refs)
			return KVD_QUARANTINE;
		return w->pool->links[f->pfn].next == KVD_PFN_NONE ? KVD_ACTIVE
								   : KVD_MAGAZINE;
	case KVD_ACTIVE:
		return refs ? KVD_ACTIVE : KVD_QUARANTINE;
	case KVD_SEALED:
	case KVD_CACHED:
		if (refs || (f->flags & KVD_FRAME_SEALING))
			return KVD_SEALED;
		return findable ? KVD_CACHED : KVD_QUARANTINE;
	case KVD_ABSENT:
	case KVD_FREE:
	case KVD_POISONED:
		return f->state;
	default: /* SPILLING, RESTORING: the copier's end is awaited: kvd_grace.held */
		return KVD_QUARANTINE;
	}
}

static void page_free(struct kvd_frame *f, u32 pfn)
{
	f->pfn = pfn;
	f->owner = 0;
	f->flags = 0;
	f->refs = 0;
	f->parent = KVD_PFN_NONE;
	if (!f->nr_events)
		f->nr_events = 1;
}

/* Is the record as it would be written? Most are: nothing of them is stored. */
static bool stays(const struct work *w, u32 pfn, u32 state)
{
	const struct kvd_frame *f = &w->pool->frames[pfn];
	u32 refs = w->refs[pfn] + (f->flags & KVD_FRAME_SEALING ? 1 : 0);

	return pfn != w->last && state == f->state && refs == f->refs &&
	       (1u << state & LIVE_STATES) && backed(w->pool, pfn);
}

/* Pass 3: one page gets its state; its record says so, with a right check word. */
static void page_place(struct work *w, u32 pfn)
{
	struct kvd_pool *pool = w->pool;
	struct kvd_frame *f = &pool->frames[pfn];
	u32 was = f->state, state;

	if (untouched(f) && !is_bad(w, pfn) && !backed(pool, pfn)) {
		kvd_frame_adopt(pool, pfn, KVD_ABSENT);
		return;
	}
	if (!untouched(f) && !is_bad(w, pfn) && stays(w, pfn, state_of(w, f))) {
		kvd_frame_adopt_same(pool, pfn);
		pool->table.tags[pfn] = f->tag;
		w->ad->pages++;
		return;
	}
	kvd_frame_touch(pool, pfn);
	if (untouched(f) && !is_bad(w, pfn)) {
		w->ad->finished++; /* its extent came, its record not yet */
		page_free(f, pfn);
		state = KVD_FREE;
	} else if (is_bad(w, pfn)) {
		w->ad->poisoned += backed(pool, pfn);
		f->pfn = pfn;
		f->nr_events = KV_MAX(f->nr_events, 1u);
		if (!KV_MUTANT(poisoned_keeps_its_tenant))
			f->tenant = 0; /* nothing that it says is to be believed */
		f->owner = 0;
		page_dead(w, f, backed(pool, pfn) ? KVD_POISONED : KVD_ABSENT);
		state = f->state;
	} else {
		state = state_of(w, f);
		if (!backed(pool, pfn))
			state = KVD_ABSENT;
		else if (state == KVD_ABSENT)
			state = KVD_FREE;
		w->ad->finished += state != was;
		if (state == KVD_FREE && was == KVD_ABSENT)
			page_free(f, pfn);
		else if (state == KVD_QUARANTINE || state == KVD_ABSENT ||
			 state == KVD_FREE || state == KVD_POISONED) {
			w->ad->killed += was != state && was != KVD_FREE;
			page_dead(w, f, state);
		} else {
			f->refs = w->refs[pfn] + (f->flags & KVD_FRAME_SEALING ? 1 : 0);
		}
	}
	if (KV_MUTANT(forget_quarantine) && state == KVD_QUARANTINE)
		state = KVD_FREE;
	kvd_frame_adopt(pool, pfn, state);
	if (f->tag)
		pool->table.tags[pfn] = f->tag;
	w->ad->pages += state != KVD_ABSENT;
}

/* Pass 4: lists and charges, from the records as they are now. */
static void page_list(struct work *w, u32 pfn)
{
	struct kvd_pool *pool = w->pool;
	struct kvd_frame *f = &pool->frames[pfn];
	struct kvd_tenant *t = w->core->tenants[f->tenant % KVD_TENANTS_MAX];

	if (f->state == KVD_ABSENT)
		return;
	if (f->state == KVD_FREE) {
		kvd_freelist_put(pool, pfn);
		return;
	}
	/* A poisoned page is nobody's, and stays until its extent goes. */
	if (f->state == KVD_POISONED)
		return;
	t->account.used_bytes += pool->geo.stride_bytes;
	if (f->state == KVD_QUARANTINE) {
		t->account.quarantine_bytes += pool->geo.stride_bytes;
		kvd_grace_add(&pool->quarantine, pfn);
	} else if (f->flags & KVD_FRAME_SEALING) {
		/* The sealing session is not known any more: wait for its whole domain.
		 */
		kvd_grace_add(&pool->seals, pfn);
	}
	if (f->flags & KVD_FRAME_INDEXED)
		kvd_prefix_adopt(pool, pfn);
	if (f->state == KVD_CACHED)
		w->cached[w->nr_cached++] = (struct aged){
			.when_ns = f->past[(f->nr_events - 1) % KVD_PAST_NR].when_ns,
			.pfn = pfn};
}

static int cmp_age(const void *a, const void *b)
{
	const struct aged *x = a, *y = b;

	return x->when_ns < y->when_ns ? -1 : x->when_ns > y->when_ns;
}

static int work_run(struct work *w)
{
	struct kvd_pool *pool = w->pool;
	struct kvd_session *s;
	int r;

	leases_sum(w);
	r = kvd_gens_adopt(&pool->mm->gens, records_check(w));
	if (r)
		return r;
	list_for_each_entry (s, &w->core->sessions, node) {
		if (kvd_session_attach(s, pool->id))
			magazines_find(w, s);
	}
	/* First the one whose references may differ: nobody else's may, if we die here. */
	if (w->last < pool->geo.nr_pages)
		page_place(w, w->last);
	/* Its record is whole by now, or it was none of ours: the entry may be damaged. */
	if (!KV_MUTANT(undo_believed))
		pool->mm->undo->valid = 0;
	for (u32 pfn = 0; pfn < pool->geo.nr_pages; pfn++) {
		if (pfn != w->last)
			page_place(w, pfn);
	}
	/* From the end: free lists are LIFO and low pfns go out first. */
	for (u32 pfn = pool->geo.nr_pages; pfn-- > 0;)
		page_list(w, pfn);
	qsort(w->cached, w->nr_cached, sizeof(*w->cached), cmp_age);
	for (u32 i = 0; i < w->nr_cached; i++)
		kvd_lru_add(pool, w->cached[i].pfn);
	return 0;
}

int kvd_adopt_frames(struct kvd_core *core, struct kvd_pool *pool, bool lossy,
		     struct kvd_adopted *ad)
{
	struct kvd_undo *undo = pool->mm->undo;
	u32 n = pool->geo.nr_pages;
	struct work w = {
		.core = core,
		.pool = pool,
		.ad = ad,
		.lossy = lossy,
		.last = undo->pool_id == pool->id ? undo->pfn : KVD_PFN_NONE,
	};
	u64 bad_bytes = kv_div_round_up(n, 64) * sizeof(u64);
	u64 bytes = bad_bytes + n * (sizeof(struct aged) + sizeof(u32));
	/* All of it is used: one call, not a fault for each 4 KiB. */
	u8 *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	int r;

	if (block == MAP_FAILED)
		return -ENOMEM;
	w.bad = (u64 *)block;
	w.cached = (struct aged *)(block + bad_bytes);
	w.refs = (u32 *)(w.cached + n);
	r = work_run(&w);
	munmap(block, bytes);
	return r;
}
