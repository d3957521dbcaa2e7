/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/tier.h - pages below the pools: GPU -> pinned DRAM -> NVMe -> gone (design 4, 8).
 *
 * A page that reclaim takes is copied into a DRAM slot (SPILL), later written to the disk
 * (WRITE), and comes back when a lookup misses it (RESTORE). Each such operation is one
 * struct in a fixed array. The loop starts its steps, and completions of the mover, of
 * worker threads and of the disk end them:
 *
 *	SPILL    copy out -> digest -> DRAM slot READY           the frame goes after the copy
 *	WRITE    header -> disk -> NVMe slot READY, journal
 *	RESTORE  [disk -> header and digest -> DRAM slot READY] -> copy in, digest -> CACHED
 *
 * Nobody reads a restored page before its bytes were checked against the digest that the
 * sealing engine gave. Whatever fails - a copy, a read, a check, a deadline, no room - is a
 * miss, counted; a wrong digest is told as well. A copy in a tier stays there when the
 * page comes back: evicting it again costs nothing.
 *
 * DRAM slots lie in the mover's host pool. They end with this process; the NVMe tier
 * survives it (store.h, journal.h).
 *
 * Loop thread only; workers see an operation's page and header while it says so.
 */
#ifndef KVD_TIER_H
#define KVD_TIER_H

#include "kvmd/own/core.h"
#include "kvmd/own/spill.h"
#include "kvmd/tier/store.h"

/* SPILLING pages, and a quarter of a pool: reclaim waits */
#define KVD_TIER_SPILLS_MAX   256u
#define KVD_TIER_WRITES_MAX   (KVD_IO_DEPTH_MAX / 2)
#define KVD_TIER_RESTORES_MAX 512u
#define KVD_TIER_WAITING_MAX  (KVD_TIER_RESTORES_MAX / 2) /* for frames of one pool */
/* Each has its own: pages that wait for a frame must not take what makes frames free. */
#define KVD_TIER_OPS	      (KVD_TIER_SPILLS_MAX + KVD_TIER_WRITES_MAX + KVD_TIER_RESTORES_MAX)
#define KVD_TIER_BATCH	      64u /* pages in one copy job */
#define KVD_TIER_BATCHES      64u
/* Long enough for a bus, and a job's pages wait for its end. */
#define KVD_TIER_JOB_BYTES    (32ull << 20)
#define KVD_TIER_FDS	      3u
#define KVD_TIER_NONE	      (~0ull)

/** Counters; each only grows. */
#define KVD_TIER_COUNTERS(X)                                                 \
	X(spills)	    /* pages stored in DRAM */                       \
	X(spills_had)	    /* evicted pages that a tier had already */      \
	X(spills_waited)    /* so many under way that reclaim had to wait */ \
	X(spills_no_room)   /* no slot within the tenant's budget */         \
	X(spills_failed)    /* the copy failed */                            \
	X(restores)	    /* pages that came back */                       \
	X(restores_dram)    /* of them from DRAM */                          \
	X(restores_nvme)    /* of them from NVMe */                          \
	X(restores_dup)	    /* sealed anew meanwhile */                      \
	X(restores_no_room) /* no frame, slot or quota */                    \
	X(restores_failed)  /* the copy failed */                            \
	X(reads)	    /* from NVMe */                                  \
	X(read_errors)	    /* EIO and the like */                           \
	X(read_shorts)                                                       \
	X(read_late)	  /* not there by the deadline */                    \
	X(bad_headers)	  /* magic or digest of a header */                  \
	X(bad_names)	  /* another page's header: a swapped offset */      \
	X(bad_old)	  /* another generation or length */                 \
	X(bad_digests)	  /* the page's bytes */                             \
	X(writes)	  /* to NVMe */                                      \
	X(write_errors)	  /* EIO and the like */                             \
	X(write_full)	  /* ENOSPC */                                       \
	X(writes_no_room) /* no slot within the tenant's budget */           \
	X(dropped)	  /* pages that left the last tier that had them */

#define KVD_TIER_FIELD(name) u64 name;
struct kvd_tier_stats {
	KVD_TIER_COUNTERS(KVD_TIER_FIELD)
};
#undef KVD_TIER_FIELD

/** enum kvd_tier_dir - a copy */
enum kvd_tier_dir { KVD_TIER_OUT, KVD_TIER_IN };

/**
 * struct kvd_tier_copy - one page
 * @pool, @pfn: the frame; SPILLING or RESTORING until the job is done
 * @off: of the page in the DRAM pool; @bytes
 */
struct kvd_tier_copy {
	struct kvd_pool *pool;
	u32 pfn;
	u64 off;
	u64 bytes;
};

/**
 * struct kvd_tier_copier - who moves bytes between frames and the DRAM pool
 * @submit: start a job. Afterwards, never from inside, kvd_tier_copied(@cookie) is called
 *	once. Return: 0; KV_BUSY later; -errno: it will not be
 */
struct kvd_tier_copier {
	void *arg;
	int (*submit)(void *arg, enum kvd_tier_dir dir,
		      const struct kvd_tier_copy *copies, u32 nr, u64 deadline_ns,
		      u32 cookie);
};

/**
 * struct kvd_tier_params - how to make the tiers
 * @core: borrowed
 * @copier: copied
 * @pool, @dram_bytes: DRAM tier: memory of the mover's pool; borrowed
 * @nvme_path: NULL: no NVMe tier
 * @nvme_bytes, @nvme_depth: of it
 * @write_from: percent of the DRAM tier in use from which pages are written; 0 at once
 * @read_deadline_ns: a restore is a miss when its read takes longer
 * @host_mark: store.h
 * @force_threads: no io_uring
 * @nr_workers: threads for digests
 * @job_bytes: a copy job of so many bytes gets no more pages; 0: KVD_TIER_JOB_BYTES
 * @tell: a page's bytes were not what its digest says; may be NULL
 */
struct kvd_tier_params {
	struct kvd_core *core;
	struct kvd_tier_copier copier;
	void *pool;
	u64 dram_bytes;
	const char *nvme_path;
	u64 nvme_bytes;
	u32 nvme_depth;
	u32 write_from;
	u64 read_deadline_ns;
	u8 host_mark[16];
	bool force_threads;
	u32 nr_workers;
	u64 job_bytes;
	void (*tell)(void *arg, const char *line);
	void *tell_arg;
};

enum kvd_tier_id { KVD_TIER_DRAM, KVD_TIER_NVME, KVD_TIER_NR };

/** struct kvd_tier_limits - one tenant's budget in one tier */
struct kvd_tier_limits {
	u64 min_bytes;
	u64 high_bytes;
	u64 max_bytes;
	u32 weight;
};

struct kvd_tiers;

/** kvd_tier_create() - @error: KVD_STORE_ERROR. Return: 0; -ENOMEM; as kvd_store_open() */
int kvd_tier_create(const struct kvd_tier_params *p, char *error, struct kvd_tiers **ret);

/**
 * kvd_tier_destroy() - kvd_tier_drain(), write the journal, free everything; or NULL
 *
 * The copier has ended its jobs: kvd_tier_copied() was called for each.
 */
void kvd_tier_destroy(struct kvd_tiers *t);

/** kvd_tier_drain() - stop, and wait until neither disk nor workers have anything: at the
 * daemon's end, before the copier's jobs are cancelled and its pool goes */
void kvd_tier_drain(struct kvd_tiers *t);

/** kvd_tier_copier() - the copier is down: what is evicted is gone, nothing comes back */
void kvd_tier_copier(struct kvd_tiers *t, bool down);

/** kvd_tier_stop() - start no more operations: reclaim drops pages, lookups miss */
void kvd_tier_stop(struct kvd_tiers *t);

/** kvd_tier_ops() - for kvd_core_config.spill; argument: the tiers */
const struct kvd_spill_ops *kvd_tier_ops(void);

/** kvd_tier_set_limits() - a tenant's budget; without it: nothing may be stored. Lowering
 * under use drops the oldest pages */
void kvd_tier_set_limits(struct kvd_tiers *t, enum kvd_tier_id tier, u16 tenant,
			 const struct kvd_tier_limits *limits);

/** kvd_tier_copied() - a job of the copier has ended. @status: 0 or -errno */
void kvd_tier_copied(struct kvd_tiers *t, u32 cookie, int status);

/** kvd_tier_fds() - readable when kvd_tier_ready() has something to do. Return: how many */
u32 kvd_tier_fds(const struct kvd_tiers *t, int fds[KVD_TIER_FDS]);

/** kvd_tier_ready() - take completions */
void kvd_tier_ready(struct kvd_tiers *t);

/** kvd_tier_turn() - start what waits; once a loop turn. Return: more to do at once */
bool kvd_tier_turn(struct kvd_tiers *t);

/** kvd_tier_more() - since the last turn began something was asked for, or ended, that a turn
 * goes on with: do not sleep before it */
bool kvd_tier_more(const struct kvd_tiers *t);

/** kvd_tier_tick() - once a second: deadlines, tenants that are gone, retries */
void kvd_tier_tick(struct kvd_tiers *t);

/** kvd_tier_serial() - number of the operation that was started last */
u64 kvd_tier_serial(const struct kvd_tiers *t);

/** kvd_tier_oldest() - of the oldest SPILL or RESTORE of a pool under way; KVD_TIER_NONE. Not of
 * all pools: one that has no frame to give is nothing to wait for in another */
u64 kvd_tier_oldest(const struct kvd_tiers *t, const struct kvd_pool *pool);

/** kvd_tier_drop_domain() - forget all stored pages of a domain. Return: slots */
u32 kvd_tier_drop_domain(struct kvd_tiers *t, u32 domain_id);

/** kvd_tier_count_domain() - slots that it would drop */
u32 kvd_tier_count_domain(const struct kvd_tiers *t, u32 domain_id);

/** kvd_tier_drop_page() - forget one page. Return: it was there */
bool kvd_tier_drop_page(struct kvd_tiers *t, const struct kvd_slot_name *name);

/* ----------------------------------------------------------------- questions */

const struct kvd_tier_stats *kvd_tier_stats(const struct kvd_tiers *t);
void kvd_tier_stats_each(const struct kvd_tiers *t,
			 void (*fn)(void *arg, const char *name, u64 value), void *arg);

/** kvd_tier_space() - of a tier; NULL: there is none */
const struct kvd_space *kvd_tier_space(const struct kvd_tiers *t, enum kvd_tier_id tier);

/** kvd_tier_store() - NULL: no NVMe tier */
const struct kvd_store *kvd_tier_store(const struct kvd_tiers *t);

/** kvd_tier_fault() - why the NVMe tier takes no pages now; "" it does */
const char *kvd_tier_fault(const struct kvd_tiers *t);

/** kvd_tier_busy() - operations under way */
u32 kvd_tier_busy(const struct kvd_tiers *t);

#endif
