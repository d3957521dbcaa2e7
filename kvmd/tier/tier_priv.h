/* SPDX-License-Identifier: Apache-2.0 */
/* tier/tier_priv.h - shared by tier.c, budget.c, spill.c, restore.c and write.c only. Loop
 * thread. */
#ifndef KVD_TIER_PRIV_H
#define KVD_TIER_PRIV_H

#include "base/list.h"
#include "kvmd/tier/tier.h"

enum op_kind { OP_FREE, OP_SPILL, OP_RESTORE, OP_WRITE };

/**
 * struct tier_op - one page on its way
 * @node: free list; by age while under way (SPILL, RESTORE: @all, WRITE: @writing)
 * @pool_node: SPILL and RESTORE: by age in struct kvd_tiers.pool_ops, while awaited
 * @wait: in a queue of copies, reads or for frames, or in a batch
 * @serial: number, ascending
 * @pool_id, @pfn: frame; KVD_PFN_NONE: none yet, none any more
 * @dram, @nvme: slots; KVD_SLOT_NONE
 * @want: what the bytes must be
 * @parent_key, @root: RESTORE: for the index
 * @tenant: RESTORE: who pays for the frame
 * @deadline_ns: RESTORE: of its read and its wait for a frame
 * @copy_status, @bad: what they came to; @bad is written by a worker
 * @from_nvme: RESTORE: @dram was filled for it
 * @reading: the disk has its buffer
 * @late: RESTORE: nobody waits for it any more
 * @cancelled: the page was forgotten meanwhile: nothing is to come of it
 * @hdr: header of @dram; what a worker needs to know of it
 */
struct tier_op {
	struct kvd_tiers *t;
	struct list_node node;
	struct list_node pool_node;
	struct list_node wait;
	enum op_kind kind;
	u16 index;
	u64 serial;
	u32 pool_id;
	u32 pfn;
	u32 dram;
	u32 nvme;
	struct kvd_page_want want;
	u8 parent_key[KV_KEY_BYTES];
	bool root;
	u16 tenant;
	u64 deadline_ns;
	int copy_status;
	enum kvd_page_bad bad;
	bool from_nvme;
	bool reading;
	bool late;
	bool cancelled;
	struct kvd_page_hdr *hdr;
	struct kvd_work work;
	struct kvd_io_op io;
};

/** struct tier_batch - pages of one job of the copier */
struct tier_batch {
	struct list_node ops; /* struct tier_op.wait */
	u32 nr;		      /* 0 = unused */
	enum kvd_tier_dir dir;
};

/** struct tier_ident - whose a tenant index is; renewed when the tenant changes */
struct tier_ident {
	bool valid;
	u32 domain_id;
	struct kvd_ident ident;
};

struct kvd_tiers {
	struct kvd_tier_params p;
	struct kvd_core *core;
	struct kvd_space dram;
	struct kvd_store *store;
	struct kvd_workers *workers;
	struct tier_op ops[KVD_TIER_OPS];
	struct list_node free;
	struct list_node all;			  /* SPILL and RESTORE, oldest first */
	struct list_node writing;		  /* WRITE */
	struct list_node pool_ops[KVD_POOLS_MAX]; /* @all, by pool */
	struct list_node late;	 /* RESTORE whose reader is not awaited */
	struct list_node reads;	 /* RESTORE that waits for its turn on the disk */
	struct list_node frames; /* RESTORE that waits for a free frame */
	u32 nr_frames;
	u32 pool_frames[KVD_POOLS_MAX]; /* of these, by pool */
	struct list_node copies[2];
	u32 nr_copies[2];
	struct tier_batch batches[KVD_TIER_BATCHES];
	u32 nr_busy;
	u32 nr_spills;
	u32 nr_restores;
	u32 nr_writes;
	u64 serial;
	bool stopped;
	bool copier_down;
	bool copier_stuck; /* it has jobs, and none has ended for COPIER_STUCK_NS */
	u64 progress_ns;   /* a job ended, or the first one began */
	bool more;	   /* something was queued, or ended that others wait for */
	u64 writes_off_until_ns;
	char fault[128];
	struct tier_ident idents[KVD_TENANTS_MAX];
	struct kvd_tier_stats stats;
};

/* tier.c */
struct tier_op *tier_op_get(struct kvd_tiers *t, enum op_kind kind);
void tier_op_pool(struct tier_op *op, const struct kvd_pool *pool);
void tier_op_put(struct tier_op *op);
struct kvd_space *tier_space_of(struct kvd_tiers *t, enum kvd_tier_id tier);
struct kvd_pool *tier_pool_of(const struct tier_op *op);
struct kvd_page_hdr *tier_hdr_at(const struct kvd_tiers *t, u32 dram);
void tier_copy_queue(struct tier_op *op, enum kvd_tier_dir dir);
void tier_bad_page(struct tier_op *op, const char *where);
void tier_dropped_last(struct kvd_tiers *t, const struct kvd_slot *s,
		       enum kvd_tier_id from);

/* budget.c */
const struct tier_ident *tier_ident_of(struct kvd_tiers *t, u16 tenant);
bool tier_same_domain(const struct kvd_tenant *tenant, const struct kvd_ident *ident);
bool tier_identify(void *arg, const struct kvd_ident *ident, u32 *ret_domain,
		   u16 *ret_tenant);
void tier_describe(void *arg, u16 tenant, struct kvd_ident *ret);
void tier_tenants_check(struct kvd_tiers *t);

/* spill.c */
int tier_evict(void *arg, struct kvd_pool *pool, u32 pfn);
void tier_spill_copied(struct tier_op *op);

/* restore.c */
bool tier_restore(void *arg, const struct kvd_restore_ask *ask);
void tier_restore_copied(struct tier_op *op);
void tier_restore_deadlines(struct kvd_tiers *t);
void tier_frames_retry(struct kvd_tiers *t);
void tier_frames_forget(struct kvd_tiers *t);
void tier_reads_start(struct kvd_tiers *t);
void tier_reads_forget(struct kvd_tiers *t);

/* write.c */
void tier_writes_start(struct kvd_tiers *t);

#endif
