/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/store.h - pages on a disk: one file of slots, one journal, and what makes a stored
 * page prove what it is.
 *
 *	DIR/pages    slots, preallocated, O_DIRECT, 0600; a symbolic link is refused
 *	DIR/journal  journal.h
 *	DIR/lock     held by flock: one kvmd per directory
 *
 * A slot is a header of 4 KiB and a page. The header says whose page it is and carries its
 * own digest and the page's; both are checked after every read, against what the index
 * says should be there. So a torn write, a swapped offset, an old page behind a lost
 * journal record or a flipped bit is a miss, and so is a page of another layout.
 *
 * Domains and tenants are named by keyed hashes under the domain's secret: a store whose
 * host secret changed is emptied, entries of a domain or tenant that is gone are skipped.
 *
 * Loop thread only.
 */
#ifndef KVD_TIER_STORE_H
#define KVD_TIER_STORE_H

#include "kvmd/tier/io.h"
#include "kvmd/tier/journal.h"
#include "kvmd/tier/space.h"

#define KVD_PAGE_HDR_MAGIC   0x67706765726f7473ull /* "storepg" */
#define KVD_PAGE_HDR_VERSION 1u
#define KVD_PAGE_HDR_BYTES   4096u /* in a slot; struct kvd_page_hdr lies at its start */
#define KVD_STORE_ERROR	     256u

/**
 * struct kvd_ident - a tenant, by names that mean nothing outside its domain
 * @domain: keyed hash of the domain; @tenant: of the tenant's name
 */
struct kvd_ident {
	u8 domain[16];
	u64 tenant;
};

/**
 * struct kvd_page_hdr - the head of a slot, 512 bytes, little endian
 * @magic .. @header_bytes: what this is
 * @fingerprint: layout
 * @ident, @key: whose page
 * @generation: of the page when it was stored
 * @page_bytes, @page_crc: length and CRC-32C of the page, scales and all
 * @slot_off: where on the disk; 0 in DRAM
 * @tokens: the page's token ids
 * @crc: of the bytes before it
 */
struct kvd_page_hdr {
	u64 magic;
	u32 version;
	u32 header_bytes;
	u64 fingerprint;
	struct kvd_ident ident;
	u8 key[KV_KEY_BYTES];
	u64 generation;
	u64 page_bytes;
	u32 page_crc;
	u32 nr_tokens;
	u64 slot_off;
	u32 tokens[KV_PAGE_TOKENS];
	u8 reserved[156];
	u32 crc;
};
KV_ABI_SIZE(kvd_page_hdr, 512);
KV_ABI_FIELD(kvd_page_hdr, crc, 508, 4);

/** kvd_page_hdr_seal() - all fields are there: compute the header's digest */
void kvd_page_hdr_seal(struct kvd_page_hdr *hdr);

/** enum kvd_page_bad - why a stored page is not what it should be */
enum kvd_page_bad {
	KVD_PAGE_OK,
	KVD_PAGE_BAD_HEADER, /* magic, version or digest of the header */
	KVD_PAGE_BAD_NAME,   /* another key, domain or layout: a swapped offset */
	KVD_PAGE_OLD,	     /* another generation or length */
	KVD_PAGE_BAD_DIGEST, /* of the page */
};

/**
 * struct kvd_page_want - what a slot should hold
 */
struct kvd_page_want {
	struct kvd_ident ident;
	u8 key[KV_KEY_BYTES];
	u64 fingerprint;
	u64 generation;
	u64 page_bytes;
	u32 page_crc;
};

/** kvd_page_check() - any thread: is the slot at @hdr (header and page) what it should be? */
enum kvd_page_bad kvd_page_check(const struct kvd_page_hdr *hdr,
				 const struct kvd_page_want *want);

struct kvd_store;

/**
 * struct kvd_store_params - how to open one
 * @path: directory; made with mode 0700 when it is missing
 * @size_bytes: of the file of pages
 * @depth: transfers under way
 * @pool, @pool_bytes: where all buffers lie
 * @host_mark: differs when the host's secret does
 * @force_threads: no io_uring
 * @identify: domain id and tenant index of an entry. Return: false: nobody's
 * @describe: fill the ident of a slot's tenant
 */
struct kvd_store_params {
	const char *path;
	u64 size_bytes;
	u32 depth;
	void *pool;
	u64 pool_bytes;
	u8 host_mark[16];
	bool force_threads;
	bool (*identify)(void *arg, const struct kvd_ident *ident, u32 *ret_domain,
			 u16 *ret_tenant);
	void (*describe)(void *arg, u16 tenant, struct kvd_ident *ret);
	void *arg;
};

/**
 * struct kvd_store - an open store
 * @space: slots
 * @io, @journal: owned
 * @writer: one thread, which waits for the disk when it writes the journal
 * @direct: O_DIRECT works here; without it status says so
 * @found: what was there; @adopted: entries taken up, @orphans: of nobody who is here
 * @compact_id: where a compaction goes on
 */
struct kvd_store {
	struct kvd_space space;
	struct kvd_io *io;
	struct kvd_journal *journal;
	struct kvd_workers *writer;
	struct kvd_store_params p;
	int dir_fd, fd, lock_fd;
	bool direct;
	struct kvd_journal_found found;
	u64 adopted;
	u64 orphans;
	u32 compact_id;
};

/**
 * kvd_store_open() - take up what is there, or start empty
 * @error: KVD_STORE_ERROR; names the field of the configuration, its value and what is wrong
 *
 * Return: 0; -ELOOP a symbolic link; -EPERM others may read or write it; -EBUSY another
 *	kvmd has it; -ENOSPC; -ENOMEM; -errno.
 */
int kvd_store_open(const struct kvd_store_params *p, char *error, struct kvd_store **ret);

/** kvd_store_close() - nothing is under way; @clean: the journal says so; or NULL */
void kvd_store_close(struct kvd_store *st, bool clean);

/** kvd_store_reap() - take completions of both */
void kvd_store_reap(struct kvd_store *st);

/** kvd_store_pending() - transfers and batches of the journal under way */
u32 kvd_store_pending(const struct kvd_store *st);

/** kvd_store_put() - a slot is READY: note it in the journal */
void kvd_store_put(struct kvd_store *st, u32 id);

/** kvd_store_tick() - once a second: what failed in the journal is tried again */
void kvd_store_tick(struct kvd_store *st);

/** kvd_store_turn() - write the journal, go on with a compaction. Return: more to do at
 * once */
bool kvd_store_turn(struct kvd_store *st);

#endif
