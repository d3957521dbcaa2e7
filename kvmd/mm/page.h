/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/page.h - the page record (frame), its states, and who may touch a page in each of
 *	them.
 *
 * A pool's records lie in one region, one fixed 128-byte record per pfn, naturally
 *	aligned, behind a self-describing header. Records are the only truth after a crash:
 *	lists, counters and charges are rebuilt from them. Volatile links live beside them in
 *	struct kvd_link.
 *
 * State is changed by kvd_frame_set(), which checks the step against the legality table in
 *	page.c, moves the counters of pool and tenant, notes the event and renews the check
 *	word; and, for the pages of one request, by the loops over mm/change.h, which do the
 *	same with the counters moved once.
 *
 *	ABSENT -> FREE                     extent added
 *	FREE -> ACTIVE | MAGAZINE          alloc, stock
 *	MAGAZINE -> ACTIVE                 popped (seen later)
 *	MAGAZINE, ACTIVE -> QUARANTINE     recall, free, death
 *	ACTIVE -> SEALED                   seal
 *	SEALED <-> CACHED                  last reference gone, first one back
 *	SEALED, CACHED -> QUARANTINE       revoke, evict
 *	QUARANTINE -> FREE                 grace period over
 *	FREE -> ABSENT                     extent removed
 *	CACHED -> SPILLING -> QUARANTINE, FREE -> RESTORING -> CACHED    tiers
 *	any but ABSENT -> POISONED         damage found
 */
#ifndef KVD_PAGE_H
#define KVD_PAGE_H

#include <stdbool.h>
#include "base/assert.h"
#include "base/list.h"
#include "base/util.h"
#include "kv/abi.h"

#define KVD_PFN_NONE 0xffffffffu

/**
 * enum kvd_frame_state - what a page is, and who may touch its bytes
 * @KVD_ABSENT: no extent backs the pfn. Nobody
 * @KVD_FREE: on a free list. Nobody: no step, copy or write may be left over (I5)
 * @KVD_MAGAZINE: tagged, charged, stocked at a session. The session, once it popped the
 * slot
 * @KVD_ACTIVE: one writer, the owner: reads and writes
 * @KVD_SEALED: immutable: every session that holds a lease reads, nobody writes
 * @KVD_CACHED: sealed, no lease: nobody; lookup may bring it back
 * @KVD_QUARANTINE: killed; steps announced before the kill may still read and write it
 * @KVD_SPILLING: being copied out: the copier reads, nobody else
 * @KVD_RESTORING: being filled: the copier writes, nobody else
 * @KVD_POISONED: damaged record or bytes: nobody, until its extent goes
 */
enum kvd_frame_state {
	KVD_ABSENT = 0,
	KVD_FREE = 1,
	KVD_MAGAZINE = 2,
	KVD_ACTIVE = 3,
	KVD_SEALED = 4,
	KVD_CACHED = 5,
	KVD_QUARANTINE = 6,
	KVD_SPILLING = 7,
	KVD_RESTORING = 8,
	KVD_POISONED = 9,
	KVD_FRAME_STATES
};

/**
 * enum kvd_page_event - what happened to a page; kept per page (page history)
 */
enum kvd_page_event {
	KVD_EV_NONE = 0,
	KVD_EV_EXTENT_ADDED,
	KVD_EV_EXTENT_REMOVED,
	KVD_EV_ALLOC,
	KVD_EV_STOCK,
	KVD_EV_POP,
	KVD_EV_RECALL,
	KVD_EV_SEAL,
	KVD_EV_FINDABLE,
	KVD_EV_PIN,
	KVD_EV_UNPIN,
	KVD_EV_HIT,
	KVD_EV_FREE,
	KVD_EV_DEATH,
	KVD_EV_REVOKE,
	KVD_EV_EVICT,
	KVD_EV_RELEASE, /* grace period over */
	KVD_EV_POISON,
	KVD_EV_HOLD, /* by an operator */
	KVD_EV_UNHOLD,
	KVD_EV_SPILL,
	KVD_EV_RESTORE,
	KVD_EV_RESTORED,
	KVD_EV_NR
};

/**
 * struct kvd_page_past - one entry of a page's history
 * @when_ns: core time
 * @session: low 32 bits of the client id that caused it; 0 = kvmd itself
 * @event: enum kvd_page_event
 * @state: state after it
 */
struct kvd_page_past {
	u64 when_ns;
	u32 session;
	u16 event;
	u16 state;
};

#define KVD_PAST_NR 4u

/**
 * struct kvd_frame - page record, 128 bytes, persistent
 * @tag: the page's tag word; the published table shows the same
 * @owner: client id that was last allowed to write; kept after free (DIRTY)
 * @key: prefix key while KVD_FRAME_INDEXED
 * @pfn: own number
 * @refs: references held by sessions, and one by SEAL's grace period
 * @crc32c: digest of the bytes, from the sealing engine
 * @parent: pfn of the page before it in its prefix, or KVD_PFN_NONE
 * @tenant: who pays; index into the core's tenants
 * @state: enum kvd_frame_state
 * @flags: KVD_FRAME_*
 * @nr_events: events ever; the newest is past[(nr_events - 1) % KVD_PAST_NR]
 * @parent_gen: low 32 bits of the parent's generation
 * @check: kvd_frame_check() of everything before it
 * @past: page history, not covered by @check
 */
struct kvd_frame {
	u64 tag;
	u64 owner;
	u8 key[KV_KEY_BYTES];
	u32 pfn;
	u32 refs;
	u32 crc32c;
	u32 parent;
	u16 tenant;
	u8 state;
	u8 flags;
	u32 nr_events;
	u32 parent_gen;
	u32 check;
	struct kvd_page_past past[KVD_PAST_NR];
} __attribute__((aligned(128)));
KV_ABI_SIZE(kvd_frame, 128);
KV_ABI_FIELD(kvd_frame, check, 60, 4);

#define KVD_FRAME_FOREIGN  0x01u /* may hold bytes of a session other than owner */
#define KVD_FRAME_INDEXED  0x02u /* in the pool's prefix index */
#define KVD_FRAME_FINDABLE 0x04u /* lookups may return it: SEAL's grace is over */
#define KVD_FRAME_SEALING  0x08u /* waits for SEAL's grace, which holds one reference */
#define KVD_FRAME_ROOT	   0x10u /* starts its sequence: has no parent by right */
#define KVD_FRAME_HELD	   0x20u /* an operator holds it in the cache (own/steer.h) */

/**
 * struct kvd_frames_hdr - head of a record region (4 KiB); records follow at @record_off
 */
struct kvd_frames_hdr {
	u64 magic;
	u32 version;
	u32 record_bytes;
	u32 record_off;
	u32 nr_pages;
	u32 pool_id;
	u32 domain_id;
	u64 fingerprint;
	struct kv_geometry geometry;
	struct kv_layout layout;
	u64 extents_off; /* one word per extent: kvd_extent_word() */
	u64 scales_off;	 /* float[layout.nr_scales] */
	u64 check;	 /* kvd_check_bytes() of what is before it */
};
#define KVD_FRAMES_MAGIC   0x73656d617266766bull /* "kvframes" */
#define KVD_FRAMES_VERSION 2u
#define KVD_FRAMES_OFF	   4096u

/**
 * struct kvd_undo - the one record that may be half changed when kvmd dies; persistent
 * @pool_id, @pfn: the record changed last. Its references in records and in leases may
 *	differ after a crash: both are changed between two kvd_frame_touch()
 * @valid: @image is the record before the change, and the change is not over
 * @image: the record's first 64 bytes
 *
 * Every change of a record begins with kvd_frame_touch() and ends with kvd_frame_set().
 * A wrong check word in between is no damage: the record goes back to @image. Nothing was
 * published before the new check word was there, so going back contradicts nobody.
 */
struct kvd_undo {
	u32 pool_id;
	u32 pfn;
	u32 valid;
	u32 reserved;
	u8 image[64];
};

struct kvd_batch;

/**
 * struct kvd_link - volatile part of a frame: every frame is on at most one list
 * @next: free list, LRU or batch. MAGAZINE: magazine << 8 | slot
 * @prev: same list
 * @hash_next: next entry of the prefix index's chain
 * @nr_children: indexed pages whose parent this is
 * @stamp: LRU clock of the last use
 * @batch: QUARANTINE, or KVD_FRAME_SEALING: the batch it waits in
 * @walk: own/walk.h: hash of all tokens up to and with this page; 0 = not in the table
 * @walk_parent: generation of the parent it was entered under; 0 = none
 * @walk_next: next entry of the walk table's chain
 * @key_hash: other half of the hash that chose the index's chain: passes over entries of
 *	other keys without a look at their records
 *
 * One cache line: what a list, the index and a walk touch of a page comes at once.
 */
struct kvd_link {
	u32 next;
	u32 prev;
	u32 hash_next;
	u32 nr_children;
	u64 stamp;
	struct kvd_batch *batch;
	u64 walk;
	u64 walk_parent;
	u32 walk_next;
	u32 key_hash;
} __attribute__((aligned(64)));
KV_ABI_SIZE(kvd_link, 64);

#define KVD_CACHE_USE_ONE 1024u

/**
 * struct kvd_account - what one tenant has, by state; embedded in struct kvd_tenant
 * @used_bytes: charged: every state but ABSENT and FREE; own/charge.c alone changes it
 * @quarantine_bytes: part of it that comes back by itself
 * @min_bytes: guaranteed, never reclaimed for others
 * @high_bytes: reclaim takes from tenants above this first
 * @max_bytes: hard
 * @weight: 1..1000; who gives first among those above min
 * @slot: the tenant's place in its domain: picks the LRU list
 * @domain_id: its domain
 * @reclaim_debt: bytes of its own CACHED pages that background reclaim was asked to free
 * @cache_use: how often its CACHED pages are found again rather than evicted, 0 ..
 *	KVD_CACHE_USE_ONE, an average over its last few hundred pages (mm/reclaim.c)
 * @draining: an operator lets it have nothing more
 * @nr: pages by state, all pools
 */
struct kvd_account {
	u64 used_bytes;
	u64 quarantine_bytes;
	u64 min_bytes;
	u64 high_bytes;
	u64 max_bytes;
	u32 weight;
	u32 slot;
	u32 domain_id;
	u64 reclaim_debt;
	u32 cache_use;
	bool draining;
	u32 nr[KVD_FRAME_STATES];
};

struct kvd_pool;

/** kvd_frame_state_str() - "FREE", "ACTIVE", ...; "?" for a number that is no state */
const char *kvd_frame_state_str(u32 state);

/** kvd_page_event_str() - "alloc", "seal", ...; "?" for a number that is no event */
const char *kvd_page_event_str(u32 event);

/** kvd_frame_check_word() - check word of a record's first 60 bytes */
u32 kvd_frame_check_word(const struct kvd_frame *f);

/** kvd_check_bytes() - check word of @bytes bytes (a multiple of 4) of a record */
u64 kvd_check_bytes(const void *data, size_t bytes);

/** kvd_frame_may() - is @from -> @to a legal step? */
bool kvd_frame_may(u32 from, u32 to);

/**
 * kvd_frame_set() - the one way a page changes state
 * @pool: pool
 * @pfn: page
 * @state: new state; may equal the old one (then only event and check word are renewed)
 * @event: enum kvd_page_event, goes into the page's history
 * @session: client id that caused it, 0 = kvmd
 *
 * Moves the counters of pool and tenant (f->tenant must already be the payer). Asserts
 * that the step is legal. Callers change the record's other fields first.
 */
void kvd_frame_set(struct kvd_pool *pool, u32 pfn, u32 state, u32 event, u64 session);

/** kvd_frame_touch_slow() - used by kvd_frame_touch() */
void kvd_frame_touch_slow(struct kvd_undo *undo, const struct kvd_pool *pool, u32 pfn);

/**
 * kvd_frame_restore() - a record whose change was cut short goes back to what it was
 *
 * Return: true: its check word is right now (or was).
 */
bool kvd_frame_restore(const struct kvd_undo *undo, struct kvd_pool *pool, u32 pfn);

/**
 * kvd_frame_adopt() - a record of an earlier kvmd enters the counters
 * @state: what it is from now on; the legality table does not apply
 */
void kvd_frame_adopt(struct kvd_pool *pool, u32 pfn, u32 state);

/** kvd_frame_adopt_same() - the same for one that stays as it is: nothing is stored */
void kvd_frame_adopt_same(struct kvd_pool *pool, u32 pfn);

/**
 * kvd_frame_history() - copy a page's history, oldest first
 * @ret: KVD_PAST_NR entries
 *
 * Return: entries written.
 */
u32 kvd_frame_history(const struct kvd_frame *f, struct kvd_page_past *ret);

#endif /* KVD_PAGE_H */
