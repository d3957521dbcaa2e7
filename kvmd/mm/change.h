/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/change.h - one change of a page record, held in registers: for loops over the pages
 *	of one request.   (tour 6/12)
 *
 * A request of 100 pages makes 300 such changes, and what they cost is instructions, not
 * memory. So the record's first 64 bytes are read once, as eight words; the undo image,
 * the new record and its check word come from those registers; counters of pool and
 * tenant move once a run (kvd_frames_moved()). Order of the stores, undo entry, crash
 * points, legality and history are those of kvd_frame_set(), which everything else uses.
 *
 *	kvd_change_begin(pool, pfn, w);
 *	w[KVD_W_TAG] = ...;			and what belongs to it in a lease
 *	kvd_change_end(pool, pfn, w, 1u << KVD_W_TAG, KVD_QUARANTINE, KVD_EV_FREE, session);
 *
 * Loop thread only.
 */
#ifndef KVD_CHANGE_H
#define KVD_CHANGE_H

#include <string.h>
#include "base/once.h"
#include "kvmd/mm/pool.h"

/* Words of a record, little endian as everything here. */
enum {
	KVD_W_TAG,
	KVD_W_OWNER,
	KVD_W_KEY0,
	KVD_W_KEY1,
	KVD_W_PFN_REFS,
	KVD_W_CRC_PARENT,
	KVD_W_STATE, /* tenant, state, flags, nr_events */
	KVD_W_GEN_CHECK,
	KVD_WORDS
};
_Static_assert(offsetof(struct kvd_frame, past) == KVD_WORDS * sizeof(u64), "words");
_Static_assert(offsetof(struct kvd_frame, owner) == KVD_W_OWNER * 8, "owner");
_Static_assert(offsetof(struct kvd_frame, key) == KVD_W_KEY0 * 8, "key");
_Static_assert(offsetof(struct kvd_frame, refs) == KVD_W_PFN_REFS * 8 + 4, "refs");
_Static_assert(offsetof(struct kvd_frame, parent) == KVD_W_CRC_PARENT * 8 + 4, "parent");
_Static_assert(offsetof(struct kvd_frame, tenant) == KVD_W_STATE * 8, "tenant");
_Static_assert(offsetof(struct kvd_frame, state) == KVD_W_STATE * 8 + 2, "state");
_Static_assert(offsetof(struct kvd_frame, flags) == KVD_W_STATE * 8 + 3, "flags");
_Static_assert(offsetof(struct kvd_frame, nr_events) == KVD_W_STATE * 8 + 4, "events");
_Static_assert(offsetof(struct kvd_page_past, session) == 8, "session");
_Static_assert(offsetof(struct kvd_page_past, event) == 12, "event");
_Static_assert(offsetof(struct kvd_page_past, state) == 14, "state after it");
_Static_assert(offsetof(struct kvd_frame, parent_gen) == KVD_W_GEN_CHECK * 8, "gen");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "fields of words");

/* A record seen as words. Each is loaded and stored by itself: two stores and one wider
 * load of both, which compilers like to make, would wait for the store buffer. */
typedef u64 __attribute__((may_alias)) kvd_word;

static inline u32 kvd_w_refs(const u64 *w)
{
	return (u32)(w[KVD_W_PFN_REFS] >> 32);
}

static inline u32 kvd_w_tenant(const u64 *w)
{
	return (u16)w[KVD_W_STATE];
}

static inline u32 kvd_w_state(const u64 *w)
{
	return (u8)(w[KVD_W_STATE] >> 16);
}

static inline u32 kvd_w_flags(const u64 *w)
{
	return (u8)(w[KVD_W_STATE] >> 24);
}

static inline void kvd_w_set_refs(u64 *w, u32 refs)
{
	w[KVD_W_PFN_REFS] = (u64)refs << 32 | (u32)w[KVD_W_PFN_REFS];
}

static inline void kvd_w_set_tenant(u64 *w, u32 tenant)
{
	w[KVD_W_STATE] = (w[KVD_W_STATE] & ~0xffffull) | (u16)tenant;
}

static inline void kvd_w_set_flags(u64 *w, u32 flags)
{
	w[KVD_W_STATE] = (w[KVD_W_STATE] & ~0xff000000ull) | (u64)(u8)flags << 24;
}

static inline void kvd_w_set_parent(u64 *w, u32 parent)
{
	w[KVD_W_CRC_PARENT] = (u64)parent << 32 | (u32)w[KVD_W_CRC_PARENT];
}

static inline u64 kvd_fold(u64 a, u64 b)
{
	unsigned __int128 product = (unsigned __int128)a * b;

	return (u64)product ^ (u64)(product >> 64);
}

/*
 * Check word: four folded 128-bit products of the 60 bytes before it under random
 * constants: any two records differ here but for one in 2^32, and the products do not
 * wait for one another, on a path that has 15 ns in all.
 */
static inline u32 kvd_words_check(const u64 *w)
{
	u64 sum = kvd_fold(w[KVD_W_TAG] ^ 0x9e3779b97f4a7c15ull,
			   w[KVD_W_OWNER] ^ 0xbf58476d1ce4e5b9ull);

	sum += kvd_fold(w[KVD_W_KEY0] ^ 0x94d049bb133111ebull,
			w[KVD_W_KEY1] ^ 0xd6e8feb86659fd93ull);
	sum += kvd_fold(w[KVD_W_PFN_REFS] ^ 0xa0761d6478bd642full,
			w[KVD_W_CRC_PARENT] ^ 0xe7037ed1a0b428dbull);
	sum += kvd_fold(w[KVD_W_STATE] ^ 0x8ebc6af09c88c6e3ull,
			(u32)w[KVD_W_GEN_CHECK] ^ 0x589965cc75374cc3ull);
	return (u32)(sum >> 32) ^ (u32)sum;
}

/* A process that is killed has done all stores up to some point of the program and none
 * behind it: what the compiler keeps in order is in order. */
static inline void kvd_in_order(void)
{
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/**
 * kvd_change_begin() - read a record, and note it as the one under change
 * @w: KVD_WORDS words
 */
static inline void kvd_change_begin(const struct kvd_pool *pool, u32 pfn, u64 *w)
{
	struct kvd_undo *undo = pool->mm->undo;
	const kvd_word *f = (const kvd_word *)&pool->frames[pfn];

	for (u32 i = 0; i < KVD_WORDS; i++)
		w[i] = f[i];
	kv_assert((u32)w[KVD_W_PFN_REFS] == pfn);
	if (undo && undo->valid) {
		/* kvd_frame_touch() has begun it. */
		kv_assert(undo->pfn == pfn && undo->pool_id == pool->id);
	} else if (undo) {
		undo->pool_id = pool->id;
		undo->pfn = pfn;
		memcpy(undo->image, f, sizeof(undo->image));
		kvd_in_order();
		if (!KV_MUTANT(no_undo))
			undo->valid = 1;
		kvd_in_order();
	}
	kvd_crash_point();
}

/**
 * kvd_change_end() - store the record, its history and check word; the change is over
 * @w: as it is to be but for state, number of events and check word
 * @words_changed: constant: a bit for each of TAG, OWNER, PFN_REFS, CRC_PARENT that changed;
 *	key and parent_gen may not
 * @state: a legal step: the caller has looked at kvd_w_state() and tells it to
 *	kvd_frames_moved()
 * @event, @session: as in kvd_frame_set()
 */
static inline void kvd_change_end(struct kvd_pool *pool, u32 pfn, u64 *w,
				  u32 words_changed, u32 state, u32 event, u64 session)
{
	struct kvd_frame *f = &pool->frames[pfn];
	struct kvd_undo *undo = pool->mm->undo;
	kvd_word *words = (kvd_word *)f, *past;
	u32 nr_events = (u32)(w[KVD_W_STATE] >> 32), check;

	past = (kvd_word *)&f->past[nr_events % KVD_PAST_NR];
	if (__builtin_expect(pool->mm->recount != NULL, 0))
		kvd_recount_moved(pool->mm->recount, pool, pfn, kvd_w_state(w), state,
				  kvd_w_tenant(w));
	past[0] = pool->mm->now_ns;
	past[1] = (u64)state << 48 | (u64)event << 32 | (u32)session;
	w[KVD_W_STATE] = (w[KVD_W_STATE] & 0xff00ffffull) | (u64)state << 16 |
			 (u64)(nr_events + 1) << 32;
	if (words_changed & 1u << KVD_W_TAG)
		kv_write_once(words[KVD_W_TAG], w[KVD_W_TAG]);
	if (words_changed & 1u << KVD_W_OWNER)
		kv_write_once(words[KVD_W_OWNER], w[KVD_W_OWNER]);
	if (words_changed & 1u << KVD_W_PFN_REFS)
		kv_write_once(words[KVD_W_PFN_REFS], w[KVD_W_PFN_REFS]);
	if (words_changed & 1u << KVD_W_CRC_PARENT)
		kv_write_once(words[KVD_W_CRC_PARENT], w[KVD_W_CRC_PARENT]);
	kv_write_once(words[KVD_W_STATE], w[KVD_W_STATE]);
	check = kvd_words_check(w);
	kvd_in_order();
	kvd_crash_point();
	f->check = check;
	if (undo) {
		kvd_in_order();
		undo->valid = 0;
		kvd_crash_point();
	}
}

/** kvd_change_prefetch() - what a change of @pfn will touch, unless it is none */
static inline void kvd_change_prefetch(const struct kvd_pool *pool, u32 pfn)
{
	if (pfn == KVD_PFN_NONE)
		return;
	__builtin_prefetch(&pool->frames[pfn], 1);
	__builtin_prefetch(&pool->frames[pfn].past, 1);
	__builtin_prefetch(&pool->links[pfn], 1);
	__builtin_prefetch(&pool->table.tags[pfn], 1);
}

/* Pages that nobody pays for. */
#define KVD_UNOWNED (1u << KVD_ABSENT | 1u << KVD_FREE | 1u << KVD_POISONED)

/** kvd_frames_moved() - @nr pages that @tenant pays for went from one state to another */
static inline void kvd_frames_moved(struct kvd_pool *pool, u32 tenant, u32 from, u32 to,
				    u32 nr)
{
	struct kvd_account *acct = pool->mm->accounts[tenant];

	kv_assert(kvd_frame_may(from, to) && pool->nr[from] >= nr);
	pool->nr[from] -= nr;
	pool->nr[to] += nr;
	if (!(KVD_UNOWNED & 1u << from)) {
		kv_assert(acct->nr[from] >= nr);
		acct->nr[from] -= nr;
	}
	if (!(KVD_UNOWNED & 1u << to))
		acct->nr[to] += nr;
}

#endif /* KVD_CHANGE_H */
