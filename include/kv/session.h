/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv/session.h - session page and published table (design P2, P3, P6).
 *
 * Session page: one per session and loop, a memfd sealed SHRINK|GROW|SEAL, writable by both
 * sides. A lying session harms its own domain only. kvmd re-reads every word it uses once.
 *
 * Published table: one per pool and table_epoch, a memfd sealed
 * SHRINK|GROW|FUTURE_WRITE|SEAL, mode 0600; clients map it read-only. kvmd stores tag, log
 * entry, log_head, grace_epoch in this order, each with release.
 */
#ifndef KV_SESSION_H
#define KV_SESSION_H

#include "ring.h"
#include "tag.h"

#define KV_SESSION_MAGIC    0x737365737676ull
#define KV_TABLE_MAGIC	    0x656c62617476766bull /* "kvvtable" */
#define KV_ANNOUNCE_SLOTS   8u
#define KV_SLOT_IDLE	    0ull
#define KV_MAGAZINES	    8u
#define KV_MAGAZINE_SLOTS   64u
#define KV_SESSION_BYTES    16384u

/**
 * struct kv_mag_slot - one stocked page (design section 4)
 * @word: 0 = empty, else KV_MAG_STOCKED | dirty | sequence << 32 | pfn. Pop (client) and recall
 *	(kvmd) are one compare-and-swap of this word to 0: whoever wins has the page
 * @tag: the page's tag, stored by kvmd before @word; read it before the compare-and-swap
 */
struct kv_mag_slot {
	uint64_t word;
	uint64_t tag;
};
KV_ABI_SIZE(kv_mag_slot, 16);
KV_ABI_FIELD(kv_mag_slot, word, 0, 8);
KV_ABI_FIELD(kv_mag_slot, tag, 8, 8);

#define KV_MAG_STOCKED	  (1ull << 63)
#define KV_MAG_DIRTY	  (1ull << 62)
#define KV_MAG_SEQ_SHIFT  32
#define KV_MAG_SEQ_MASK	  0x3fffffffull
#define KV_MAG_PFN(word)  ((uint32_t)(word))

/**
 * struct kv_magazine - pages stocked for one thread of a session
 * @pool_id: pool the magazine belongs to; written by client before its first refill
 * @reserved: zero
 * @slots: see struct kv_mag_slot
 */
struct kv_magazine {
	uint32_t pool_id;
	uint32_t reserved[15];
	struct kv_mag_slot slots[KV_MAGAZINE_SLOTS];
};
KV_ABI_SIZE(kv_magazine, 1088);
KV_ABI_FIELD(kv_magazine, pool_id, 0, 4);
KV_ABI_FIELD(kv_magazine, reserved, 4, 60);
KV_ABI_FIELD(kv_magazine, slots, 64, 1024);

struct kv_line64 {
	uint64_t word;
	uint64_t pad[7];
};
KV_ABI_SIZE(kv_line64, 64);
KV_ABI_FIELD(kv_line64, word, 0, 8);
KV_ABI_FIELD(kv_line64, pad, 8, 56);

/**
 * struct kv_session_page - announce slots and magazines
 * @magic: KV_SESSION_MAGIC; constant
 * @client_id: constant
 * @closed: written by client: 1 = it closed the session, perhaps while no kvmd heard it
 * @table_epoch: written by kvmd, read by client: the instance whose tables are valid; 0 = the
 *	session has ended, no step may start
 * @wake: written by kvmd: 1 while it waits for a slot to go IDLE; a retiring client that reads
 *	1 kicks the ring's eventfd
 * @slots: written by client, read by kvmd: KV_SLOT_IDLE or the announced grace epoch
 * @magazines: see struct kv_magazine
 */
struct kv_session_page {
	uint64_t magic;
	uint64_t client_id;
	uint64_t closed;
	uint64_t pad0[5];
	struct kv_line64 table_epoch;
	struct kv_line64 wake;
	struct kv_line64 slots[KV_ANNOUNCE_SLOTS];
	uint8_t pad1[4096 - 704];
	struct kv_magazine magazines[KV_MAGAZINES];
};
KV_ABI_SIZE(kv_session_page, 4096 + 8704);
KV_ABI_FIELD(kv_session_page, magic, 0, 8);
KV_ABI_FIELD(kv_session_page, client_id, 8, 8);
KV_ABI_FIELD(kv_session_page, closed, 16, 8);
KV_ABI_FIELD(kv_session_page, table_epoch, 64, 64);
KV_ABI_FIELD(kv_session_page, wake, 128, 64);
KV_ABI_FIELD(kv_session_page, slots, 192, 512);
KV_ABI_FIELD(kv_session_page, magazines, 4096, 8704);

/**
 * struct kv_table - head of a pool's published table
 * @magic: KV_TABLE_MAGIC
 * @abi: KV_ABI_VERSION
 * @pool_id: pool
 * @fingerprint: of the pool's layout
 * @table_epoch: instance of kvmd that published it
 * @nr_pages: tags that follow at tag_off
 * @log_off: offset of the KV_LOG_ENTRIES log entries
 * @used_pages: tags ever used are below this; only grows; stored before the tags it uncovers
 * @log_head: entries ever logged; entry i lies at i % KV_LOG_ENTRIES
 * @grace_epoch: of the loop; steps announce it
 */
struct kv_table {
	uint64_t magic;
	uint32_t abi;
	uint32_t pool_id;
	uint64_t fingerprint;
	uint64_t table_epoch;
	uint32_t nr_pages;
	uint32_t tag_off;
	uint32_t log_off;
	uint32_t reserved0;
	uint64_t pad0[2];
	struct kv_line64 used_pages;
	struct kv_line64 log_head;
	struct kv_line64 grace_epoch;
};
KV_ABI_SIZE(kv_table, 256);
KV_ABI_FIELD(kv_table, magic, 0, 8);
KV_ABI_FIELD(kv_table, abi, 8, 4);
KV_ABI_FIELD(kv_table, pool_id, 12, 4);
KV_ABI_FIELD(kv_table, fingerprint, 16, 8);
KV_ABI_FIELD(kv_table, table_epoch, 24, 8);
KV_ABI_FIELD(kv_table, nr_pages, 32, 4);
KV_ABI_FIELD(kv_table, tag_off, 36, 4);
KV_ABI_FIELD(kv_table, log_off, 40, 4);
KV_ABI_FIELD(kv_table, reserved0, 44, 4);
KV_ABI_FIELD(kv_table, used_pages, 64, 64);
KV_ABI_FIELD(kv_table, log_head, 128, 64);
KV_ABI_FIELD(kv_table, grace_epoch, 192, 64);

#define KV_TABLE_TAG_OFF 4096u

/* Layout of a table with @nr_pages tags: tags, then the log, 4 KiB aligned. */
static inline uint64_t kv_table_log_off(uint32_t nr_pages)
{
	return KV_TABLE_TAG_OFF + (((uint64_t)nr_pages * 8 + 4095) & ~4095ull);
}

static inline uint64_t kv_table_bytes(uint32_t nr_pages)
{
	return kv_table_log_off(nr_pages) + (uint64_t)KV_LOG_ENTRIES * sizeof(struct kv_log_entry);
}

/* ------------------------------------------------------------ accessors of the protocol */

/**
 * kv_slot_announce() - store an epoch in a claimed slot, full barrier (P3)
 *
 * Pairs with the barrier between "advance grace_epoch" and "read the slots" in kvmd
 * (kvd_grace_advance()).
 */
static inline void kv_slot_announce(struct kv_session_page *page, uint32_t slot, uint64_t epoch)
{
	kv_store_relaxed64(&page->slots[slot].word, epoch);
	kv_full_barrier();
}

/**
 * kv_slot_retire() - the step's work on pages is complete (P6)
 *
 * Return: nonzero if kvmd waits and must be kicked through the ring's eventfd.
 */
static inline int kv_slot_retire(struct kv_session_page *page, uint32_t slot)
{
	kv_store_release64(&page->slots[slot].word, KV_SLOT_IDLE);
	kv_full_barrier();
	return kv_load_relaxed64(&page->wake.word) != 0;
}

/**
 * kv_mag_pop() - take a stocked page, as a client does; libkvclient's slot_pop() notes it in the
 *	ledger as well
 * @ret_pfn, @ret_tag, @ret_dirty: written on success only
 *
 * Return: 1 when the caller got the page, 0 when the slot is empty or was recalled.
 */
static inline int kv_mag_pop(struct kv_mag_slot *slot, uint32_t *ret_pfn, uint64_t *ret_tag,
			     int *ret_dirty)
{
	uint64_t word = kv_load_acquire64(&slot->word);
	uint64_t tag;

	if (!(word & KV_MAG_STOCKED))
		return 0;
	tag = kv_load_relaxed64(&slot->tag);
	if (!kv_cas64(&slot->word, word, 0))
		return 0;
	*ret_pfn = KV_MAG_PFN(word);
	*ret_tag = tag;
	*ret_dirty = (word & KV_MAG_DIRTY) != 0;
	return 1;
}

#endif /* KV_SESSION_H */
