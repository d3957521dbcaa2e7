/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/lease.c - references: hold, drop, free, pin, revoke, recall.   (tour 5/12, 11/12)
 *
 * Allocation is in alloc.c. Every path that takes the last reference of a page ends in
 * page_last_ref(), and every kill in kvd_pool_kill(). Loop thread only.
 */
#include "kvmd/own/lease.h"
#include <errno.h>
#include <string.h>
#include "base/mutant.h"
#include "kvmd/mm/change.h"
#include "kvmd/own/core.h"
#include "kvmd/own/turn.h"

/* Pages that a batch fetches ahead of the one it works on. */
#define PREFETCH_AHEAD 4u

static inline void lease_unhold(struct kvd_attach *a, u32 pfn, u32 nr)
{
	kv_assert(a->refs[pfn] >= nr);
	a->refs[pfn] -= (u16)nr;
	if (!a->refs[pfn]) {
		a->held[pfn / 64] &= ~(1ull << (pfn % 64));
		a->nr_held--;
	}
}

/* The last reference is gone: writers' pages die, findable ones are kept. */
static void page_last_ref(struct kvd_pool *pool, u32 pfn, u32 event, u64 session)
{
	struct kvd_frame *f = &pool->frames[pfn];

	kv_assert(f->refs == 0);
	if (f->flags & KVD_FRAME_INDEXED) {
		kv_assert(f->state == KVD_SEALED && !(f->flags & KVD_FRAME_SEALING));
		kvd_frame_set(pool, pfn, KVD_CACHED, event, session);
		kvd_lru_add(pool, pfn);
		return;
	}
	kvd_pool_kill(pool, pfn, event, session);
	pool->nr_frees++;
}

/* Drop @nr references of one session. */
static void lease_put(struct kvd_session *s, struct kvd_attach *a, u32 pfn, u32 nr,
		      u32 event)
{
	struct kvd_frame *f = &a->pool->frames[pfn];

	kv_assert(f->refs >= nr);
	kvd_frame_touch(a->pool, pfn);
	lease_unhold(a, pfn, nr);
	kvd_crash_point();
	f->refs -= nr;
	if (f->refs)
		kvd_frame_set(a->pool, pfn, f->state, event, s->id);
	else
		page_last_ref(a->pool, pfn, event, s->id);
}

void kvd_lease_popped(struct kvd_session *s, struct kvd_magazine *m, u32 slot)
{
	u32 pfn = KV_MAG_PFN(m->slots[slot].word);

	kvd_mag_clear(m, slot);
	kvd_frame_set(m->pool, pfn, KVD_ACTIVE, KVD_EV_POP, s->id);
}

bool kvd_lease_holds(struct kvd_session *s, struct kvd_attach *a, u32 pfn, u64 tag)
{
	const struct kvd_frame *f = &a->pool->frames[pfn];
	/* Both words are looked at, whatever the first one says: a page of somebody else
	 * and one that is not there take the same time. */
	u64 bad = (kv_tag_gen(f->tag) ^ kv_tag_gen(tag)) | !kv_tag_live(f->tag);
	u32 where, slot;

	if (!KV_MUTANT(any_owner))
		bad |= a->refs[pfn] == 0;
	if (bad)
		return false;
	if (f->state != KVD_MAGAZINE)
		return true;
	where = a->pool->links[pfn].next;
	slot = where & 0xff;
	if (!kvd_mag_popped(&s->mags[where >> 8], &s->page->magazines[where >> 8], slot))
		return false;
	kvd_lease_popped(s, &s->mags[where >> 8], slot);
	return true;
}

static bool refs_in_range(const struct kvd_attach *a, const struct kv_page_ref *refs,
			  u32 nr)
{
	for (u32 i = 0; i < nr; i++) {
		if (refs[i].pfn >= a->pool->geo.nr_pages || refs[i].reserved)
			return false;
	}
	return nr > 0 && nr <= KV_BATCH_MAX;
}

/* A page that was held for long is in no cache: fetch all that its end touches at once.
 */
static inline void lease_prefetch(const struct kvd_attach *a, u32 pfn)
{
	kvd_change_prefetch(a->pool, pfn);
	__builtin_prefetch(&a->refs[pfn], 1);
	__builtin_prefetch(&a->held[pfn / 64], 1);
}

/* The session's own page, its one reference, in no index: what most frees name. As in
 * kvd_lease_holds() all is looked at, whatever the first word says. */
static inline bool lease_is_plain(const struct kvd_session *s, const struct kvd_attach *a,
				  u32 pfn, u64 tag)
{
	const struct kvd_frame *f = &a->pool->frames[pfn];
	u64 other = (kv_tag_gen(f->tag) ^ kv_tag_gen(tag)) | !kv_tag_live(f->tag);

	other |= (f->state ^ KVD_ACTIVE) | (f->refs ^ 1) | (a->refs[pfn] ^ 1u);
	other |= (f->flags & ~KVD_FRAME_FOREIGN) | (f->tenant ^ s->tenant->index);
	return !other && !KV_MUTANT(no_quarantine);
}

/* Such a page's end, as lease_put() and kvd_pool_kill() make it, but for what is counted
 * once for all (plain_end()). */
static inline void plain_free(struct kvd_session *s, struct kvd_attach *a, u32 pfn)
{
	struct kvd_pool *pool = a->pool;
	struct kvd_batch *b;
	u64 w[KVD_WORDS];

	kvd_change_begin(pool, pfn, w);
	lease_unhold(a, pfn, 1);
	kvd_crash_point();
	w[KVD_W_TAG] = kv_tag_make(kvd_gens_dead(&pool->mm->gens), 0);
	kvd_w_set_refs(w, 0);
	kvd_w_set_parent(w, KVD_PFN_NONE);
	kvd_change_end(pool, pfn, w,
		       1u << KVD_W_TAG | 1u << KVD_W_PFN_REFS | 1u << KVD_W_CRC_PARENT,
		       KVD_QUARANTINE, KVD_EV_FREE, s->id);
	kvd_table_set(&pool->table, pfn, w[KVD_W_TAG]);
	b = kvd_grace_open(&pool->quarantine);
	kvd_pfn_list_add_tail(pool->links, &b->pages, pfn);
	pool->links[pfn].batch = b;
}

static void plain_end(struct kvd_session *s, struct kvd_pool *pool, u32 nr)
{
	kvd_frames_moved(pool, s->tenant->index, KVD_ACTIVE, KVD_QUARANTINE, nr);
	s->tenant->account.quarantine_bytes += nr * pool->geo.stride_bytes;
	pool->mm->grace.nr_pages[KVD_BATCH_QUARANTINE] += nr;
	pool->nr_frees += nr;
}

int kvd_lease_free(struct kvd_session *s, struct kvd_attach *a,
		   const struct kv_page_ref *refs, u32 nr, u32 *ret_nr, u32 *ret_first)
{
	u32 done = 0, plain = 0, first = nr;

	kv_assert(s->state == KVD_SESSION_LIVE && a->pool);
	if (!refs_in_range(a, refs, nr))
		return -EINVAL;
	for (u32 i = 0; i < KV_MIN(nr, PREFETCH_AHEAD); i++)
		lease_prefetch(a, refs[i].pfn);
	for (u32 i = 0; i < nr; i++) {
		u32 pfn = refs[i].pfn, event;

		if (i + PREFETCH_AHEAD < nr)
			lease_prefetch(a, refs[i + PREFETCH_AHEAD].pfn);
		if (lease_is_plain(s, a, pfn, refs[i].tag)) {
			plain_free(s, a, pfn);
			plain++;
			continue;
		}
		if (!kvd_lease_holds(s, a, pfn, refs[i].tag)) {
			first = KV_MIN(first, i);
			if (KV_MUTANT(double_free_ok))
				done++;
			continue;
		}
		event = a->pool->frames[pfn].state == KVD_ACTIVE ? KVD_EV_FREE
								 : KVD_EV_UNPIN;
		lease_put(s, a, pfn, 1, event);
		done++;
	}
	plain_end(s, a->pool, plain);
	done += plain;
	kvd_table_publish(&a->pool->table);
	if (done)
		kvd_turn_gave(s);
	*ret_nr = done;
	*ret_first = first;
	return done == nr ? 0 : KV_STALE;
}

int kvd_lease_get(struct kvd_session *s, struct kvd_attach *a, u32 pfn, u32 event)
{
	struct kvd_pool *pool = a->pool;
	struct kvd_frame *f = &pool->frames[pfn];
	u32 was = f->state, state = was;
	u64 w[KVD_WORDS];

	kv_assert(was == KVD_SEALED || was == KVD_CACHED || was == KVD_ACTIVE);
	if (a->refs[pfn] >= KVD_LEASE_REFS_MAX)
		return -EOVERFLOW;
	if (was == KVD_CACHED && !KV_MUTANT(evict_pinned)) {
		kvd_lru_del(pool, pfn);
		kvd_reclaim_hit(pool->mm->accounts[f->tenant]);
		state = KVD_SEALED;
	}
	kvd_change_begin(pool, pfn, w);
	kvd_lease_hold(a, pfn);
	kvd_crash_point();
	if (!KV_MUTANT(pin_not_counted))
		kvd_w_set_refs(w, kvd_w_refs(w) + 1);
	kvd_change_end(pool, pfn, w, 1u << KVD_W_PFN_REFS, state, event, s->id);
	if (state != was)
		kvd_frames_moved(pool, kvd_w_tenant(w), was, state, 1);
	return 0;
}

int kvd_lease_pin(struct kvd_session *s, struct kvd_attach *a,
		  const struct kv_page_ref *refs, u32 nr)
{
	kv_assert(s->state == KVD_SESSION_LIVE && a->pool);
	if (!refs_in_range(a, refs, nr))
		return -EINVAL;
	for (u32 i = 0; i < nr; i++) {
		if (!kvd_lease_holds(s, a, refs[i].pfn, refs[i].tag))
			return KV_STALE;
		/* Room for all of the batch, even if it names one page nr times. */
		if (a->refs[refs[i].pfn] + nr > KVD_LEASE_REFS_MAX)
			return -EOVERFLOW;
	}
	for (u32 i = 0; i < nr; i++)
		kv_assert(kvd_lease_get(s, a, refs[i].pfn, KVD_EV_PIN) == 0);
	return 0;
}

u32 kvd_lease_mags_recall(struct kvd_session *s, const struct kvd_pool *pool)
{
	u32 nr = 0;

	for (u32 i = 0; i < KV_MAGAZINES; i++) {
		struct kvd_magazine *m = &s->mags[i];
		struct kvd_attach *a;

		if (!m->nr || (pool && m->pool != pool))
			continue;
		a = kvd_session_attach(s, m->pool->id);
		kv_assert(a);
		for (u32 slot = 0; slot < KV_MAGAZINE_SLOTS && m->nr; slot++) {
			u64 word = m->slots[slot].word;

			if (!word)
				continue;
			if (kvd_mag_recall(m, &s->page->magazines[i], slot)) {
				lease_put(s, a, KV_MAG_PFN(word), 1, KVD_EV_RECALL);
				nr++;
			} else {
				kvd_lease_popped(s, m, slot);
			}
		}
		kvd_table_publish(&m->pool->table);
	}
	return nr;
}

u32 kvd_lease_recall(struct kvd_pool *pool)
{
	struct kvd_core *core = kvd_core_of(pool->mm);
	struct kvd_session *s;
	u32 nr = 0;

	if (!pool->nr[KVD_MAGAZINE])
		return 0;
	list_for_each_entry (s, &core->sessions, node) {
		if (s->state == KVD_SESSION_LIVE)
			nr += kvd_lease_mags_recall(s, pool);
	}
	return nr;
}

u32 kvd_lease_recall_idle(struct kvd_pool *for_pool)
{
	struct kvd_core *core = kvd_core_of(for_pool->mm);
	u64 now_ns = for_pool->mm->now_ns;
	struct kvd_session *s;
	u32 nr = 0;

	list_for_each_entry (s, &core->sessions, node) {
		if (s->state == KVD_SESSION_LIVE && s->tenant->account.nr[KVD_MAGAZINE] &&
		    now_ns - s->asked_ns >= KVD_STOCK_IDLE_NS && !KV_MUTANT(stock_kept))
			nr += kvd_lease_mags_recall(s, NULL);
	}
	return nr;
}

u32 kvd_lease_drop_some(struct kvd_session *s, struct kvd_attach *a, u32 event,
			u32 budget)
{
	u32 words = (u32)kv_div_round_up(a->pool->geo.nr_pages, 64), done = 0;

	for (; a->nr_held && done < budget; a->drop_word++) {
		kv_assert(a->drop_word < words);
		while (a->held[a->drop_word] && done < budget) {
			u32 bit = (u32)__builtin_ctzll(a->held[a->drop_word]);
			u32 pfn = a->drop_word * 64 + bit;

			lease_put(s, a, pfn, a->refs[pfn], event);
			done++;
		}
		if (a->held[a->drop_word])
			break;
	}
	kvd_table_publish(&a->pool->table);
	return done;
}

/* All references of one session to a page that is about to die. */
static void revoke_from(struct kvd_session *s, struct kvd_attach *a, u32 pfn, u64 tag)
{
	struct kvd_core *core = s->core;
	struct kv_page_ref ref = {.pfn = pfn, .tag = tag};
	struct kvd_frame *f = &a->pool->frames[pfn];

	kvd_frame_touch(a->pool, pfn);
	f->refs -= a->refs[pfn];
	lease_unhold(a, pfn, a->refs[pfn]);
	if (s->state == KVD_SESSION_LIVE)
		core->cfg.notify->revoked(core->cfg.notify_arg, s, a->pool, &ref, 1);
}

int kvd_lease_revoke(struct kvd_pool *pool, u32 pfn, u64 tag)
{
	struct kvd_core *core = kvd_core_of(pool->mm);
	struct kvd_frame *f = &pool->frames[pfn];
	struct kvd_session *s;
	u64 old = f->tag;

	if (!kv_tag_live(f->tag) || (tag && kv_tag_gen(tag) != kv_tag_gen(f->tag)))
		return KV_STALE;
	/* Nobody has it or can find it, and the copier's end kills it. */
	if (f->state == KVD_SPILLING)
		return 0;
	if (f->state == KVD_MAGAZINE) {
		s = kvd_session_find(core, f->owner);
		kv_assert(s);
		kvd_lease_mags_recall(s, pool);
		if (f->tag != old)
			return 0; /* it was still in stock */
	}
	if (f->state == KVD_CACHED)
		kvd_lru_del(pool, pfn);
	kvd_frame_touch(pool, pfn);
	if (f->flags & KVD_FRAME_SEALING) {
		kvd_grace_cancel(pool, pfn);
		f->flags &= (u8)~KVD_FRAME_SEALING;
		f->refs--;
	}
	list_for_each_entry (s, &core->sessions, node) {
		struct kvd_attach *a = kvd_session_attach(s, pool->id);

		if (a && a->refs[pfn])
			revoke_from(s, a, pfn, old);
	}
	if (f->flags & KVD_FRAME_INDEXED)
		kvd_prefix_remove(pool, pfn);
	kvd_pool_kill(pool, pfn, KVD_EV_REVOKE, 0);
	kvd_table_publish(&pool->table);
	return 0;
}

void kvd_lease_released(struct kvd_pool *pool, u32 tenant, u32 nr)
{
	struct kvd_tenant *t = kvd_core_of(pool->mm)->tenants[tenant];

	kv_assert(t);
	if (!KV_MUTANT(charge_leak))
		kvd_charge_drop(t, pool, nr);
}
