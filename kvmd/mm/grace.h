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
 * quarantine waits for the whole group, SEAL for the sealing reader only. Batches are
 * embedded in what they belong to (pool, session in a pool), so there is always one: when
 * all are in use, the youngest is opened again, which only makes its pages wait longer.
 *
 * Loop thread only; the barrier before slots are read pairs with kv_slot_announce(), the
 * one after the wake word is set with kv_slot_retire().
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
 * @scanned: number of the last call of kvd_grace_advance() in which something waited for it
 * @looked: the last one that read its slots
 */
struct kvd_reader_group {
	struct list_node readers;
	u64 quiet;
	u64 scanned;
	u64 looked;
};

/**
 * struct kvd_reader - announce slots of one session
 * @node: in @group
 * @group: its domain's; borrowed
 * @page: the shared session page; hostile: each word is read once a scan
 * @seen: per slot: seen past this epoch
 * @quiet: least of @seen
 * @busy_since_ns: since when @quiet has held back a batch without moving; 0 = it does not
 * @busy_slots: bit per slot that was not IDLE in the last scan
 * @quiet_slots: @ended: bit per slot that was seen IDLE since: quiet for good (P8)
 * @wake: the wake word we stored last
 * @ended: table_epoch 0 was stored
 * @gone: proof of death: no work of it can be running
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
	u32 quiet_slots;
	bool wake;
	bool ended;
	bool gone;
	bool stalled;
};

struct kvd_batch_set;

/** enum kvd_batch_kind - what happens to its pages when the batch is over */
enum kvd_batch_kind { KVD_BATCH_QUARANTINE, KVD_BATCH_SEAL, KVD_BATCH_KINDS };

/**
 * struct kvd_batch - pages that wait for one epoch
 * @node: in kvd_grace.open or .waiting; empty: unused
 * @set: it belongs to
 * @pool: pool of the pages; borrowed
 * @reader: whose slots count; NULL: the whole group's
 * @epoch: 0 while open; then the epoch that slots must have been seen past
 * @pages: members
 * @kind: see enum kvd_batch_kind
 */
struct kvd_batch {
	struct list_node node;
	struct kvd_batch_set *set;
	struct kvd_pool *pool;
	struct kvd_reader *reader;
	u64 epoch;
	struct kvd_pfn_list pages;
	enum kvd_batch_kind kind;
};

/* Batches of one owner and kind. Two are enough to make progress, more are finer. */
#define KVD_BATCH_SET 4u

/**
 * struct kvd_batch_set - batches of one pool, or of one session in one pool
 * @open: the one that takes pages in this turn, or NULL
 */
struct kvd_batch_set {
	struct kvd_batch *open;
	struct kvd_batch b[KVD_BATCH_SET];
};

/* Pages that one kvd_grace_advance() lets go; the rest follows in the next turn. */
#define KVD_GRACE_SLICE 1024u

/* Pages that a turn lets go while no more than KVD_GRACE_FEW wait: 0.4 us. Who frees a
 * hundred pages soon asks for others, and would wait for all of it. Where many come and
 * go, as many go as came: pages that are used again soon are still in the cache. */
#define KVD_GRACE_SHORT 32u
#define KVD_GRACE_FEW	128u

/* Epochs are saved this far ahead of their use. */
#define KVD_GRACE_AHEAD (1ull << 32)

/**
 * struct kvd_grace - the loop's grace periods
 * @epoch: published in every table's grace_epoch; starts at 1
 * @bound: saved: no epoch at or above was published
 * @open: batches of this turn, epoch not advanced yet
 * @waiting: advanced, oldest first
 * @nr_pages: pages in @open and @waiting, by kind
 * @scans: counts calls of kvd_grace_advance() that found something
 * @held: nothing leaves quarantine: a mover of an earlier kvmd may still write there
 */
struct kvd_grace {
	u64 epoch;
	u64 bound;
	struct list_node open;
	struct list_node waiting;
	u32 nr_pages[KVD_BATCH_KINDS];
	u64 scans;
	bool held;
};

/**
 * kvd_grace_init() - start after the epochs that were ever published
 * @saved_epoch: value of KVD_SAVED_GRACE; 0 = none
 *
 * Return: 0 or -errno of the save hook.
 */
int kvd_grace_init(struct kvd_mm *mm, u64 saved_epoch);

/** kvd_reader_group_init() - a domain without sessions: quiet up to @epoch */
void kvd_reader_group_init(struct kvd_reader_group *g, u64 epoch);

/** kvd_reader_add() - a session joins; @page is zero: none of its slots is busy */
void kvd_reader_add(struct kvd_mm *mm, struct kvd_reader_group *g, struct kvd_reader *r,
		    struct kv_session_page *page);

/** kvd_reader_adopt() - a session of an earlier kvmd: its slots may be busy since any
 * epoch */
void kvd_reader_adopt(struct kvd_mm *mm, struct kvd_reader_group *g, struct kvd_reader *r,
		      struct kv_session_page *page);

/** kvd_reader_del() - leaves the scan; only when kvd_reader_quiet() */
void kvd_reader_del(struct kvd_mm *mm, struct kvd_reader *r);

/** kvd_reader_end() - table_epoch 0 was stored, full barrier done (P8) */
void kvd_reader_end(struct kvd_reader *r);

/** kvd_reader_gone() - proof of death: all its slots are quiet for good */
void kvd_reader_gone(struct kvd_mm *mm, struct kvd_reader *r);

/** kvd_reader_scan() - read the slots now */
void kvd_reader_scan(struct kvd_mm *mm, struct kvd_reader *r);

/** kvd_reader_quiet() - ended, and no step of it can be running */
bool kvd_reader_quiet(const struct kvd_reader *r);

/** kvd_batch_set_init() - unused batches of @pool; @reader as in struct kvd_batch */
void kvd_batch_set_init(struct kvd_batch_set *set, struct kvd_pool *pool,
			struct kvd_reader *reader, enum kvd_batch_kind kind);

/** kvd_batch_set_empty() - is no page waiting in it? */
bool kvd_batch_set_empty(const struct kvd_batch_set *set);

/** kvd_batch_set_move() - its pages wait for the whole group from now on, in @to */
void kvd_batch_set_move(struct kvd_batch_set *from, struct kvd_batch_set *to);

/** kvd_grace_open() - the set's batch that takes pages in this turn; put at least one on */
struct kvd_batch *kvd_grace_open(struct kvd_batch_set *set);

/** kvd_grace_cancel() - the page waits no more (a sealed page is revoked) */
void kvd_grace_cancel(struct kvd_pool *pool, u32 pfn);

/**
 * kvd_grace_advance() - close the open batches under a new epoch and read the slots
 *
 * Pages whose batch is over go on: kvd_pool_release() or mm->ops->seal_done(), at most
 * KVD_GRACE_SLICE of them. Wake words are set while something waits. Does nothing when
 * nothing is open or waiting.
 *
 * Return: true: pages were left over that could go on now: call again.
 */
bool kvd_grace_advance(struct kvd_mm *mm);

/** kvd_grace_turn() - the same as a turn of the loop does it: KVD_GRACE_SHORT pages unless
 * many wait */
bool kvd_grace_turn(struct kvd_mm *mm);

/** kvd_grace_stalls() - tell mm->ops->stalled() of readers that hold back a batch for too
 * long; those of a group that the last scan did not need hold back nothing */
void kvd_grace_stalls(struct kvd_mm *mm, struct kvd_reader_group *g);

static inline u32 kvd_grace_nr_waiting(const struct kvd_grace *g)
{
	return g->nr_pages[KVD_BATCH_QUARANTINE] + g->nr_pages[KVD_BATCH_SEAL];
}

#endif /* KVD_GRACE_H */
