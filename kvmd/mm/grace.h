/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/grace.h - grace periods (P6, P8): when may a killed page be used again, a sealed one
 * be found?   (tour 11/12)
 *
 * kill -> log -> advance the epoch -> full barrier -> read the slots. Pages of one turn
 * share one batch and one epoch; nothing is scanned per page. For each slot we remember
 * the highest epoch it has been *seen* past (IDLE, or announcing that epoch or a later
 * one); a batch of epoch e is over when every slot of its readers has been seen past e.
 *
 * A reader is one session's announce slots. Readers of one domain form a group:
 * quarantine waits for the whole group, SEAL for the sealing reader only. Loop thread
 * only; the barrier in kvd_grace_advance() pairs with kv_slot_announce().
 */
#ifndef KVD_GRACE_H
#define KVD_GRACE_H

#include "base/list.h"
#include "kv/session.h"
#include "kvmd/mm/freelist.h"

struct kvd_mm;
struct kvd_pool;

/**
 * struct kvd_reader_group - the readers of a domain
 * @readers: struct kvd_reader.node
 * @quiet: every slot of every reader has been seen past this epoch
 */
struct kvd_reader_group {
	struct list_node readers;
	u64 quiet;
};

/**
 * struct kvd_reader - announce slots of one session
 * @node: in @group
 * @group: its domain's; borrowed
 * @page: the shared session page; hostile: each word is read once a scan
 * @seen: per slot: seen past this epoch
 * @quiet: least of @seen
 * @busy_since_ns: since when some slot has held back a batch; 0 = none does
 * @busy_slots: bit per slot seen not IDLE in the last scan
 * @ended: table_epoch 0 was stored: an IDLE slot is quiet for good (P8)
 * @gone: proof of death: all slots are quiet
 * @stalled: reported
 */
struct kvd_reader {
	struct list_node node;
	struct kvd_reader_group *group;
	struct kv_session_page *page;
	u64 seen[KV_ANNOUNCE_SLOTS];
	u64 quiet;
	u64 busy_since_ns;
	u32 busy_slots;
	bool ended;
	bool gone;
	bool stalled;
};

/** enum kvd_batch_kind - what happens to its pages when the batch is over */
enum kvd_batch_kind { KVD_BATCH_QUARANTINE, KVD_BATCH_SEAL };

/**
 * struct kvd_batch - pages that wait for one epoch
 * @node: in kvd_grace.waiting, oldest first, or kvd_grace.spare
 * @pool: pool of the pages; borrowed
 * @reader: KVD_BATCH_SEAL: whose slots count; NULL: that session is gone and quiet
 * @epoch: 0 while open; then the epoch that slots must have been seen past
 * @pages: members
 * @kind: see enum kvd_batch_kind
 */
struct kvd_batch {
	struct list_node node;
	struct kvd_pool *pool;
	struct kvd_reader *reader;
	u64 epoch;
	struct kvd_pfn_list pages;
	enum kvd_batch_kind kind;
};

#define KVD_BATCHES 1024u

/**
 * struct kvd_grace - the loop's grace periods
 * @epoch: published in every table's grace_epoch; starts at 1
 * @bound: saved: no epoch at or above was published
 * @open: batches of this turn, epoch not advanced yet
 * @waiting: advanced, oldest first
 * @spare: unused batches
 * @batches: all of them; none is ever allocated later
 * @nr_waiting_pages: pages in @open and @waiting, by kind
 */
struct kvd_grace {
	u64 epoch;
	u64 bound;
	struct list_node open;
	struct list_node waiting;
	struct list_node spare;
	struct kvd_batch *batches;
	u32 nr_waiting_pages[2];
};

int kvd_grace_init(struct kvd_mm *mm, u64 saved_epoch);
void kvd_grace_fini(struct kvd_mm *mm);

void kvd_reader_group_init(struct kvd_reader_group *g);

/** kvd_reader_add() - a session joins; its slots count from the next scan on */
void kvd_reader_add(struct kvd_mm *mm, struct kvd_reader_group *g, struct kvd_reader *r,
		    struct kv_session_page *page);

/** kvd_reader_del() - leaves the scan; only when kvd_reader_quiet() */
void kvd_reader_del(struct kvd_mm *mm, struct kvd_reader *r);

/** kvd_reader_quiet() - ended, and no step of it can be running */
bool kvd_reader_quiet(const struct kvd_reader *r);

/**
 * kvd_grace_quarantine() - a killed page waits for its domain
 *
 * The page is in QUARANTINE, its tag is killed and logged, and it is on no list.
 */
void kvd_grace_quarantine(struct kvd_pool *pool, u32 pfn);

/** kvd_grace_seal() - a sealed page waits for its session @r */
void kvd_grace_seal(struct kvd_pool *pool, u32 pfn, struct kvd_reader *r);

/**
 * kvd_grace_advance() - close the open batches under a new epoch and read all slots
 *
 * Pages whose batch is over go on: pool->mm->ops->quarantine_done() or seal_done(). Wake
 * words are set while something waits. Cheap when nothing is open or waiting.
 *
 * Return: pages still waiting.
 */
u32 kvd_grace_advance(struct kvd_mm *mm);

#endif /* KVD_GRACE_H */
