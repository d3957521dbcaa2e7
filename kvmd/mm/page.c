/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/page.c - the page state machine: one function, one legality table. See page.h.
 *
 * Loop thread only.
 */
#include <string.h>
#include "base/once.h"
#include "kvmd/mm/change.h"
#include "kvmd/mm/page.h"
#include "base/mutant.h"

#define BIT(state) (1u << (state))

/* may[from] = set of states that may follow */
static const u32 may[KVD_FRAME_STATES] = {
	[KVD_ABSENT] = BIT(KVD_FREE),
	[KVD_FREE] = BIT(KVD_ABSENT) | BIT(KVD_MAGAZINE) | BIT(KVD_ACTIVE) |
		     BIT(KVD_RESTORING) | BIT(KVD_POISONED),
	[KVD_MAGAZINE] = BIT(KVD_ACTIVE) | BIT(KVD_QUARANTINE) | BIT(KVD_POISONED),
	[KVD_ACTIVE] = BIT(KVD_SEALED) | BIT(KVD_QUARANTINE) | BIT(KVD_POISONED),
	[KVD_SEALED] = BIT(KVD_CACHED) | BIT(KVD_QUARANTINE) | BIT(KVD_POISONED),
	[KVD_CACHED] = BIT(KVD_SEALED) | BIT(KVD_QUARANTINE) | BIT(KVD_SPILLING) |
		       BIT(KVD_POISONED),
	[KVD_QUARANTINE] = BIT(KVD_FREE) | BIT(KVD_POISONED),
	[KVD_SPILLING] = BIT(KVD_QUARANTINE) | BIT(KVD_POISONED),
	[KVD_RESTORING] = BIT(KVD_CACHED) | BIT(KVD_QUARANTINE) | BIT(KVD_POISONED),
	[KVD_POISONED] = BIT(KVD_ABSENT),
};

static const char *const state_names[KVD_FRAME_STATES] = {
	"ABSENT", "FREE",	"MAGAZINE", "ACTIVE",	 "SEALED",
	"CACHED", "QUARANTINE", "SPILLING", "RESTORING", "POISONED",
};

static const char *const event_names[KVD_EV_NR] = {
	"none",	  "extent-added", "extent-removed", "alloc",   "stock",	   "pop",
	"recall", "seal",	  "findable",	    "pin",     "unpin",	   "hit",
	"free",	  "death",	  "revoke",	    "evict",   "release",  "poison",
	"hold",	  "unhold",	  "spill",	    "restore", "restored",
};

const char *kvd_frame_state_str(u32 state)
{
	return state < KVD_FRAME_STATES ? state_names[state] : "?";
}

const char *kvd_page_event_str(u32 event)
{
	return event < KVD_EV_NR ? event_names[event] : "?";
}

bool kvd_frame_may(u32 from, u32 to)
{
	return from < KVD_FRAME_STATES && to < KVD_FRAME_STATES && (may[from] & BIT(to));
}

/*
 * Fields that were stored a moment ago are loaded as they were stored: one wider load,
 * which compilers like to make of them, would wait until those stores have left the store
 * buffer.
 */
static inline u32 check_word(const struct kvd_frame *f)
{
	u32 refs = kv_read_once(f->refs), parent = kv_read_once(f->parent);
	u32 tenant = kv_read_once(f->tenant), state = kv_read_once(f->state);
	u32 flags = kv_read_once(f->flags), nr_events = kv_read_once(f->nr_events);
	u64 w[KVD_WORDS];

	w[KVD_W_TAG] = f->tag;
	w[KVD_W_OWNER] = f->owner;
	memcpy(&w[KVD_W_KEY0], f->key, sizeof(f->key));
	w[KVD_W_PFN_REFS] = (u64)refs << 32 | f->pfn;
	w[KVD_W_CRC_PARENT] = (u64)parent << 32 | f->crc32c;
	w[KVD_W_STATE] = (u64)nr_events << 32 | flags << 24 | state << 16 | tenant;
	w[KVD_W_GEN_CHECK] = f->parent_gen;
	return kvd_words_check(w);
}

u32 kvd_frame_check_word(const struct kvd_frame *f)
{
	return check_word(f);
}

u64 kvd_check_bytes(const void *data, size_t bytes)
{
	const u8 *p = data;
	u64 sum = 0x6b76636865636b32ull;
	u32 word;

	for (size_t i = 0; i + sizeof(word) <= bytes; i += sizeof(word)) {
		memcpy(&word, p + i, sizeof(word));
		sum = (sum ^ word) * 0x9e3779b97f4a7c15ull;
		sum ^= sum >> 29;
	}
	return sum;
}

void kvd_frame_touch_slow(struct kvd_undo *undo, const struct kvd_pool *pool, u32 pfn)
{
	if (undo->valid && undo->pfn == pfn && undo->pool_id == pool->id)
		return;
	kv_assert(!undo->valid);
	undo->pool_id = pool->id;
	undo->pfn = pfn;
	memcpy(undo->image, &pool->frames[pfn], sizeof(undo->image));
	kvd_in_order();
	if (!KV_MUTANT(no_undo))
		undo->valid = 1;
	kvd_in_order();
	kvd_crash_point();
}

static bool frame_whole(const struct kvd_frame *f, u32 pfn)
{
	static const struct kvd_frame zero;

	if (!f->nr_events && !f->check)
		return !memcmp(f, &zero, offsetof(struct kvd_frame, past));
	return f->pfn == pfn && f->state < KVD_FRAME_STATES && f->check == check_word(f);
}

bool kvd_frame_restore(const struct kvd_undo *undo, struct kvd_pool *pool, u32 pfn)
{
	struct kvd_frame *f = &pool->frames[pfn], image;

	if (frame_whole(f, pfn))
		return true;
	if (undo->valid != 1 || undo->pool_id != pool->id || undo->pfn != pfn)
		return false;
	image = *f;
	memcpy(&image, undo->image, sizeof(undo->image));
	if (!frame_whole(&image, pfn))
		return false;
	memcpy(f, undo->image, sizeof(undo->image));
	return true;
}

void kvd_frame_adopt_same(struct kvd_pool *pool, u32 pfn)
{
	const struct kvd_frame *f = &pool->frames[pfn];

	pool->nr[f->state]++;
	if (!(BIT(f->state) & KVD_UNOWNED))
		pool->mm->accounts[f->tenant]->nr[f->state]++;
}

void kvd_frame_adopt(struct kvd_pool *pool, u32 pfn, u32 state)
{
	struct kvd_undo *undo = pool->mm->undo;
	struct kvd_frame *f = &pool->frames[pfn];

	pool->nr[state]++;
	if (!(BIT(state) & KVD_UNOWNED))
		pool->mm->accounts[f->tenant]->nr[state]++;
	if (!f->nr_events && state == KVD_ABSENT) {
		/* Never covered by an extent: stays as it is. */
		if (undo->pool_id == pool->id && undo->pfn == pfn)
			undo->valid = 0;
		return;
	}
	f->state = (u8)state;
	f->check = kvd_frame_check_word(f);
	kvd_in_order();
	undo->valid = 0;
	kvd_crash_point();
}

void kvd_frame_set(struct kvd_pool *pool, u32 pfn, u32 state, u32 event, u64 session)
{
	struct kvd_frame *f = &pool->frames[pfn];
	u32 from = f->state;

	kv_assert(pfn < pool->geo.nr_pages && f->pfn == pfn);
	kv_assert(from < KVD_FRAME_STATES && state < KVD_FRAME_STATES);
	kvd_frame_touch(pool, pfn);
	kvd_crash_point();
	if (from != state) {
		kv_assert(may[from] & BIT(state));
		if (__builtin_expect(pool->mm->recount != NULL, 0))
			kvd_recount_moved(pool->mm->recount, pool, pfn, from, state,
					  f->tenant);
		pool->nr[from]--;
		pool->nr[state]++;
		if (!(BIT(from) & KVD_UNOWNED)) {
			kv_assert(pool->mm->accounts[f->tenant]->nr[from] > 0);
			pool->mm->accounts[f->tenant]->nr[from]--;
		}
		if (!(BIT(state) & KVD_UNOWNED))
			pool->mm->accounts[f->tenant]->nr[state]++;
		f->state = (u8)state;
	}
	f->past[f->nr_events % KVD_PAST_NR] = (struct kvd_page_past){
		.when_ns = pool->mm->now_ns,
		.session = (u32)session,
		.event = (u16)event,
		.state = (u16)state,
	};
	f->nr_events++;
	kvd_crash_point();
	f->check = check_word(f);
	if (pool->mm->undo) {
		kvd_in_order();
		pool->mm->undo->valid = 0;
		kvd_crash_point();
	}
}

u32 kvd_frame_history(const struct kvd_frame *f, struct kvd_page_past *ret)
{
	u32 nr = KV_MIN(f->nr_events, KVD_PAST_NR);

	for (u32 i = 0; i < nr; i++)
		ret[i] = f->past[(f->nr_events - nr + i) % KVD_PAST_NR];
	return nr;
}
