/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/journal.h - what of the NVMe tier survives a restart: an append-only file of
 * checksummed records, one a change.
 *
 *	OPEN   first record: which store, which host's secret, which shape
 *	PUT    a page lies at an offset; DEL: it does not any more
 *	CLOSE  last record of a clean end
 *
 * A record counts if its CRC is right and its number follows the one before; the first
 * that does not ends the journal, wherever a crash cut it. Nothing here decides whether a
 * page is right: its own header and digest do, when it is read (store.h). So records need
 * no order against the pages' writes, and are written in batches by a worker thread.
 *
 * Compaction writes the live entries into a second file, in slices between other work,
 * together with all changes that come meanwhile, and renames it over the first: for each
 * offset the last record counts.
 *
 * Thread rules: the loop thread only; a batch belongs to the worker until it is done.
 */
#ifndef KVD_TIER_JOURNAL_H
#define KVD_TIER_JOURNAL_H

#include <stdbool.h>

#include "kv/abi.h"
#include "kvmd/tier/work.h"

#define KVD_JOURNAL_MAGIC	0x6a74766bu /* "kvtj" */
#define KVD_JOURNAL_BATCH_BYTES (256u << 10)
#define KVD_JOURNAL_SLACK	4096u /* dead records that are not worth a compaction */

enum kvd_journal_type {
	KVD_JOURNAL_OPEN = 1,
	KVD_JOURNAL_PUT = 2,
	KVD_JOURNAL_DEL = 3,
	KVD_JOURNAL_CLOSE = 4,
};

/**
 * struct kvd_journal_record - 120 bytes, little endian
 * @number: 1, 2, 3, ... in the file
 * @off, @slot_bytes: where. OPEN: size of the store and of a segment
 * @domain, @key, @fingerprint, @tenant: whose (store.h). OPEN: @domain is the host's mark,
 *	@fingerprint and @generation are the device and inode of the file of pages
 * @crc: of the bytes before it
 */
struct kvd_journal_record {
	u32 magic;
	u32 type;
	u64 number;
	u64 off;
	u64 slot_bytes;
	u64 fingerprint;
	u64 generation;
	u8 domain[16];
	u8 key[KV_KEY_BYTES];
	u64 tenant;
	u64 page_bytes;
	u32 page_crc;
	u32 reserved[4];
	u32 crc;
};
KV_ABI_SIZE(kvd_journal_record, 120);
KV_ABI_FIELD(kvd_journal_record, crc, 116, 4);

struct kvd_journal;

/**
 * struct kvd_journal_params - how to open one
 * @dir_fd: directory; borrowed
 * @name: of the file
 * @open: the OPEN record this kvmd writes, and expects
 * @replay: called for each PUT and DEL of a journal that begins with @open
 * @workers: borrowed
 */
struct kvd_journal_params {
	int dir_fd;
	const char *name;
	struct kvd_journal_record open;
	void (*replay)(void *arg, const struct kvd_journal_record *rec);
	void *arg;
	struct kvd_workers *workers;
};

/**
 * struct kvd_journal_found - what kvd_journal_open() met
 * @existed: there was a file; @matched: it began with our OPEN record
 * @clean: it ended with CLOSE; @records: that counted; @lost_bytes: behind the last one
 */
struct kvd_journal_found {
	bool existed;
	bool matched;
	bool clean;
	u64 records;
	u64 lost_bytes;
};

/** kvd_journal_open() - replay, cut off what does not count, go on behind it. Return: 0;
 * -ELOOP a symbolic link; -ENOMEM; -errno */
int kvd_journal_open(const struct kvd_journal_params *p, struct kvd_journal_found *found,
		     struct kvd_journal **ret);

/** kvd_journal_close() - @clean: write what is left and CLOSE, and wait for the disk; or
 * NULL */
void kvd_journal_close(struct kvd_journal *j, bool clean);

/** kvd_journal_add() - one change; magic, number and crc are filled in. Never blocks: what
 * does not fit is counted as lost, and a compaction is due, which makes it good */
void kvd_journal_add(struct kvd_journal *j, const struct kvd_journal_record *rec);

/** kvd_journal_flush() - hand what was added to a worker, unless one is at work */
void kvd_journal_flush(struct kvd_journal *j);

/** kvd_journal_tick() - once a second: what failed is tried again, with the next flush */
void kvd_journal_tick(struct kvd_journal *j);

/** kvd_journal_wants() - are so many records dead, or any missing, that a compaction is due? */
bool kvd_journal_wants(const struct kvd_journal *j, u64 live);

/** kvd_journal_compact() - begin one. Return: 0; -errno */
int kvd_journal_compact(struct kvd_journal *j);

/** kvd_journal_compacting() - it has begun and not ended */
bool kvd_journal_compacting(const struct kvd_journal *j);

/** kvd_journal_live() - one live entry for the new file. Return: false: not now */
bool kvd_journal_live(struct kvd_journal *j, const struct kvd_journal_record *rec);

/** kvd_journal_compacted() - all live entries are in: the new file takes over */
void kvd_journal_compacted(struct kvd_journal *j);

/** struct kvd_journal_stats - since it was opened */
struct kvd_journal_stats {
	u64 records; /* in the file */
	u64 written;
	u64 errors;
	u64 lost;
	u64 missing; /* of them, until a compaction has ended that began later */
	u64 compactions;
	int last_error;
};

const struct kvd_journal_stats *kvd_journal_stats(const struct kvd_journal *j);

#endif
