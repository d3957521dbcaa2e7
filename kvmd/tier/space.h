/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/space.h - the room of one tier: slots for stored pages, who pays for them, which
 * goes next, and where a key is found. The same code for DRAM and NVMe.
 *
 * Room is cut into segments of equal size; a segment holds slots of one size (one class),
 * as a slab does. A slot is one stored page with a header in front (page header: store.h).
 *
 *	FREE -> FILLING            taken; found by its key, nobody may read it
 *	FILLING -> READY | FREE    its bytes are right; or are not
 *	READY -> FREE              dropped
 *	READY -> DYING -> FREE     dropped while somebody reads it
 *
 * A slot with readers is not chosen (case O35); those that make use of it take it off its
 * LRU meanwhile, a write below leaves it where it is. Taking a slot may drop
 * others: the tenant's own when it is at its max, else those of tenants above their
 * `high`, else by weight, never below another tenant's `min`. Records lie in one lazily
 * backed mapping: nothing is allocated after kvd_space_init().
 *
 * Loop thread only.
 */
#ifndef KVD_TIER_SPACE_H
#define KVD_TIER_SPACE_H

#include <stdbool.h>

#include "kv/abi.h"
#include "kvmd/mm/pool.h"

#define KVD_SLOT_NONE	   0xffffffffu
#define KVD_SPACE_CLASSES  16u
#define KVD_SEGMENT_MIN	   (1ull << 20)
#define KVD_SEGMENT_MAX	   (64ull << 20)
#define KVD_SEGMENTS_MAX   (1u << 18)
#define KVD_SLOT_BYTES_MIN 8192u /* a header and one block */

enum kvd_slot_state { KVD_SLOT_FREE, KVD_SLOT_FILLING, KVD_SLOT_READY, KVD_SLOT_DYING };

/**
 * struct kvd_slot - one stored page
 * @key, @fingerprint, @domain: whose it is; found by these
 * @generation: of the page when it was stored; the header in the slot says the same
 * @page_bytes, @crc32c: length and digest of the page
 * @readers: copies and transfers that read the bytes
 * @tenant: who pays
 * @state: enum kvd_slot_state
 * @class: + 1; 0 = its segment has none
 * @clean: DRAM: the tier below has it, or need not
 * @indexed, @listed: in the index; on its LRU
 * @hash_next, @prev, @next: index chain; LRU or free list
 * @dirty_prev, @dirty_next: DRAM: waits to be written below, oldest first
 * @op: operation that fills it, + 1; tier.c's own
 */
struct kvd_slot {
	u8 key[KV_KEY_BYTES];
	u64 fingerprint;
	u64 generation;
	u32 domain;
	u32 page_bytes;
	u32 crc32c;
	u32 readers;
	u16 tenant;
	u16 op;
	u8 state;
	u8 class;
	bool clean;
	bool indexed;
	bool listed;
	u32 hash_next;
	u32 prev, next;
	u32 dirty_prev, dirty_next;
};

struct kvd_slot_list {
	u32 head, tail, nr;
};

/**
 * struct kvd_space_account - one tenant's part of a tier
 * @used_bytes: whole slots
 * @min_bytes, @high_bytes, @max_bytes, @weight: as struct kvd_account; max 0: may not use it
 */
struct kvd_space_account {
	u64 used_bytes;
	u64 min_bytes;
	u64 high_bytes;
	u64 max_bytes;
	u32 weight;
	u32 nr;
};

/** struct kvd_space_class - slots of one size */
struct kvd_space_class {
	u64 slot_bytes;
	u32 per_segment;
	u32 nr_segments;
	struct kvd_slot_list free;
	struct kvd_slot_list lru[KVD_TENANTS_MAX];
};

struct kvd_segment {
	u8 class; /* + 1; 0 = unused */
	u32 nr_used;
	u32 nr_busy; /* of them FILLING, DYING or with readers */
};

/**
 * struct kvd_space - one tier's room
 * @size_bytes, @segment_bytes, @nr_segments, @slots_per_segment: shape
 * @dropped: told before a READY slot loses its bytes; NULL = nobody
 * @slots: [nr_segments * slots_per_segment]; id = segment * slots_per_segment + place
 * @heads: index, [hash_mask + 1]
 * @hash_key: random: nobody outside can make chains long
 * @classes, @segments, @free_segments: see above
 * @dirty: slots to be written below
 * @acct: by tenant index
 * @used_bytes, @nr_used, @nr_ready: all tenants
 * @evictions: slots that others' need dropped
 */
struct kvd_space {
	u64 size_bytes;
	u64 segment_bytes;
	u32 nr_segments;
	u32 slots_per_segment;
	void (*dropped)(void *arg, u32 id);
	void *arg;
	struct kvd_slot *slots;
	u64 slots_bytes;
	u32 *heads;
	u32 hash_mask;
	u8 hash_key[16];
	struct kvd_space_class *classes;
	struct kvd_segment *segments;
	u32 *free_segments;
	u32 nr_free_segments;
	struct kvd_slot_list dirty;
	struct kvd_space_account acct[KVD_TENANTS_MAX];
	u64 used_bytes;
	u32 nr_used;
	u32 nr_ready;
	u64 evictions;
};

/** struct kvd_slot_name - what a stored page is found by */
struct kvd_slot_name {
	const u8 *key;
	u64 fingerprint;
	u32 domain;
};

/** kvd_segment_bytes() - segment size for a tier of @size_bytes: at least eight of them,
 * where that is possible */
u64 kvd_segment_bytes(u64 size_bytes);

/** kvd_space_init() - all free; budgets are 0. Return: 0; -EINVAL the size; -ENOMEM */
int kvd_space_init(struct kvd_space *sp, u64 size_bytes, u64 segment_bytes);
void kvd_space_fini(struct kvd_space *sp);

/** kvd_space_find() - FILLING or READY slot of that name, or KVD_SLOT_NONE */
u32 kvd_space_find(const struct kvd_space *sp, const struct kvd_slot_name *name);

/**
 * kvd_space_take() - a slot for a page that is about to be written into it
 * @slot_bytes: header and page; a multiple of 4 KiB
 *
 * Return: id, FILLING, entered under @name (which is not there yet); KVD_SLOT_NONE: no
 *	room that @tenant may have.
 */
u32 kvd_space_take(struct kvd_space *sp, const struct kvd_slot_name *name, u16 tenant,
		   u64 slot_bytes);

/**
 * kvd_space_place() - as kvd_space_take(), at a given offset: what a journal says
 *
 * What lies there already is dropped. Return: id; KVD_SLOT_NONE: not a slot's offset.
 */
u32 kvd_space_place(struct kvd_space *sp, const struct kvd_slot_name *name, u16 tenant,
		    u64 slot_bytes, u64 off);

/** kvd_space_at() - the slot in use at an offset, or KVD_SLOT_NONE */
u32 kvd_space_at(const struct kvd_space *sp, u64 off);

/** kvd_space_ready() - FILLING -> READY, the youngest of its LRU */
void kvd_space_ready(struct kvd_space *sp, u32 id);

/** kvd_space_drop() - out of the index; FREE now, or when its last reader is gone. FILLING
 * slots too: the filler calls it */
void kvd_space_drop(struct kvd_space *sp, u32 id);

/** kvd_space_get() - READY: one more reader */
void kvd_space_get(struct kvd_space *sp, u32 id);

/** kvd_space_hold() - READY: one more reader, which is no use of it: it stays as old */
void kvd_space_hold(struct kvd_space *sp, u32 id);

/** kvd_space_put() - one less of either; the last one makes a used one the youngest */
void kvd_space_put(struct kvd_space *sp, u32 id);

/** kvd_space_dirty() - READY: it waits to be written below, or does not any more */
void kvd_space_dirty(struct kvd_space *sp, u32 id, bool dirty);

/** kvd_space_drop_tenant() - up to @nr READY slots of a tenant without readers. Return:
 * how many */
u32 kvd_space_drop_tenant(struct kvd_space *sp, u16 tenant, u32 nr);

static inline struct kvd_slot *kvd_slot_at(const struct kvd_space *sp, u32 id)
{
	kv_assert(id < sp->nr_segments * sp->slots_per_segment);
	return &sp->slots[id];
}

/** kvd_slot_off() - where its header lies, in bytes */
u64 kvd_slot_off(const struct kvd_space *sp, u32 id);

/** kvd_slot_bytes() - header and page */
u64 kvd_slot_bytes(const struct kvd_space *sp, u32 id);

/** kvd_space_check() - sums, lists and index agree; for tests and the audit. Return: NULL,
 * or what does not */
const char *kvd_space_check(const struct kvd_space *sp);

#endif
