/* SPDX-License-Identifier: Apache-2.0 */
/*
 * world.h - the simulated host: kvmd's production core, its keeper, its clients and the
 * bytes of every page, all in one thread and driven by a list of acts.
 *
 * The core (kvmd/mm, kvmd/own) is the code that runs in production; everything around it
 * is made up here. What outlives kvmd (regions, image, counters, session pages, extents)
 * is kept apart from what dies with it, so that it can be killed at any store and adopted
 * again. A page's bytes are one struct cell: the generation under which they were written.
 * A step that passes the check and then meets another generation is a wrong read.
 *
 * Nothing here reads a clock or draws a number while a schedule runs: the same options
 * and acts give the same run.
 */
#ifndef SIM_WORLD_H
#define SIM_WORLD_H

#include <setjmp.h>

#include "kvmd/own/adopt.h"
#include "kvmd/own/core.h"
#include "kvmd/own/image.h"
#include "kvmd/own/steer.h"

#define SIM_CLIENTS  32u
#define SIM_CONNS    256u
#define SIM_EXTS     1024u
#define SIM_REGIONS  1024u
#define SIM_HELD     64u
#define SIM_ROWS     8u
#define SIM_STALE    8u
#define SIM_INBOX    4u
#define SIM_GRANTS   8u
#define SIM_TENANTS  6u
#define SIM_DOMAINS  3u
#define SIM_COPIES   8u
#define SIM_MARKS    16u
#define SIM_STORED   64u
#define SIM_STRIDE   73728ull /* mla_bf16, one layer */
#define SIM_ARGS     4u
#define SIM_ACTS_MAX 4096u

/**
 * struct sim_opts - what a schedule starts from; printed with it
 * @seed: it was drawn from; 0 in a case written by hand
 * @gen_left: generations left below 2^56; 0: start at 1
 * @key_bits: of prefix keys; few, so that other prefixes have the same key
 * @hostile: the last domain's clients lie in their session pages
 * @tier: evicted pages are copied to a made-up tier
 */
struct sim_opts {
	u64 seed;
	u64 clients, tenants, domains;
	u64 extents, extent_pages;
	u64 gen_left;
	u64 key_bits;
	u64 hostile;
	u64 tier;
};

/** struct sim_act - one act; @a: arguments, taken modulo what there is */
struct sim_act {
	u16 op;
	u16 a[SIM_ARGS];
};

#define SIM_UNFINISHED (1ull << 40)

/**
 * struct sim_cell - one page's bytes
 * @gen: generation they were written under; 0: zeroes
 * @writer: session that wrote them
 * @sealed: 0, or number of the prefix page they were sealed as; SIM_UNFINISHED: a step that
 *	its writer had under way then may still write it
 */
struct sim_cell {
	u64 gen;
	u64 writer;
	u64 sealed;
};

/**
 * struct sim_ext - an extent: lives as long as anybody refers to it
 * @kvmd, @keeper: descriptors; @maps: sessions that have it mapped
 */
struct sim_ext {
	bool used, kvmd, keeper;
	u32 maps;
	u32 pool_id, index, domain;
	u64 serial;
	u32 nr_pages;
	struct sim_cell *cells;
};

/** struct sim_region - memory given to the core; @kept: the keeper has it too */
struct sim_region {
	bool used, kept, orphan;
	struct kvd_region r;
};

/** struct sim_row - a row of a step, with what the engine expects to find */
struct sim_row {
	u32 pfn;
	u64 gen;
	u64 sealed;
	bool write, written, held, touched;
	bool late; /* announced before its page was sealed: may write it still */
	u8 request;
};

enum sim_phase {
	SIM_IDLE,
	SIM_LOADED, /* grace epoch loaded */
	SIM_STORED_SLOT,
	SIM_ATTACHED, /* table_epoch compared */
	SIM_COPIED,   /* log_head loaded, block copied */
	SIM_RUNNING,  /* checked */
};

/**
 * struct sim_step - a step in one announce slot (P3 .. P6)
 * @nr_rows: rows; @bad: bit per request that failed the check
 * @block: [nr_block] log entries, or tags if @full
 */
struct sim_step {
	enum sim_phase phase;
	u64 epoch, epoch_seen;
	u64 head, from;
	bool full;
	u32 nr_block;
	void *block;
	u32 nr_rows, bad;
	struct sim_row rows[SIM_ROWS];
};

/** struct sim_held - references of a client to one generation of a page */
struct sim_held {
	u32 pfn;
	u64 gen;
	u32 refs;
	bool write, written, sealing, revoked;
	u64 sealed;
};

/** struct sim_letter - a completion on its way; @grants: pages it brings */
struct sim_letter {
	u32 nr;
	bool shared;
	struct kv_grant grants[SIM_GRANTS];
	u64 sealed[SIM_GRANTS];
	bool revoked[SIM_GRANTS];
};

/** struct sim_mark - a page that an operator holds: no eviction takes it */
struct sim_mark {
	u32 pool_id, pfn;
	u64 gen;
};

/**
 * struct sim_peek - what a client does in the middle of the core's next calls
 * @armed: at the core's n-th crash point from now it does it, instead of a crash
 * @under: it is doing it: records may be half changed
 */
struct sim_peek {
	bool armed, under;
	u16 a[SIM_ARGS];
};

/**
 * struct sim_conn - a session: its page, its mapped extents, its steps
 * @s: the core's part; NULL while kvmd is away or after it was reaped
 * @closed: the library starts no step any more
 * @client: whose; @dead: that process is gone; @proof: and its work, too
 * @map: extent + 1 by index; @leaving: serial to be unmapped, 0: none
 * @mirror, @position: the engine's own copy of the tags
 */
struct sim_conn {
	bool used, given, dead, proof, kept, closed;
	u64 id;
	u32 client, tenant, tenant_index;
	struct kv_session_page *page;
	struct kvd_session *s;
	struct kvd_attach *a;
	u64 attached_epoch;
	struct kv_table *table;
	u32 pool_id;
	u16 *map;
	u64 *leaving;
	u64 *mirror;
	u64 position;
	bool fresh;
	struct sim_step steps[KV_ANNOUNCE_SLOTS];
};

/** struct sim_client - a process: what it believes */
struct sim_client {
	struct sim_conn *conn;
	struct sim_held held[SIM_HELD];
	u32 nr;
	struct sim_row stale[SIM_STALE]; /* rows of pages it let go */
	u32 nr_stale;
	struct sim_letter inbox[SIM_INBOX];
	u32 nr_inbox;
	u32 chain_seq, chain_next;
	u8 chain_key[KV_KEY_BYTES];
};

/** struct sim_copy - the copier at work; @ext: where, kept mapped by it */
struct sim_copy {
	bool used, restore, lost;
	u32 pool_id, pfn, ext;
	u64 gen;
	u32 stored;
};

/** struct sim_stored - a page in the tier */
struct sim_stored {
	bool used;
	u32 domain;
	u8 key[KV_KEY_BYTES], parent_key[KV_KEY_BYTES];
	u32 tokens[KV_PAGE_TOKENS];
	u64 sealed;
	bool root;
};

enum sim_hook {
	SIM_HOOK_REGION,
	SIM_HOOK_SAVE,
	SIM_HOOK_EXTENT,
	SIM_HOOK_KEEP,
	SIM_HOOK_HEAP,
	SIM_HOOK_NR
};

struct sim_stats {
	u64 acts, kills, store_kills, adoptions, grants, seals, hits, deaths, reads,
		writes, stale_found, damages, faults, spills, restores, overflows, popped,
		cold;
};

/**
 * struct sim_world - everything
 * @core: kvmd; @up: it lives; @in_core: a call is under way
 * @lossy: damage was done: leases and pages may be lost, bytes may not
 * @over: the run ends early without a failure (no generation is left to adopt with)
 */
struct sim_world {
	struct sim_opts o;
	struct kvd_core core;
	struct kvd_backend be;
	struct kvd_env env;
	struct kvd_gen_source gens;
	struct kvd_backend_limits limits;
	struct kvd_image *image;
	volatile bool in_core; /* gcc takes malloc() for a function that reads nothing */
	bool up, lossy, calm, over;
	u64 now_ns;
	u64 next_epoch;
	u64 saved[2];
	u64 next_id;
	u32 fail_left[SIM_HOOK_NR];
	u32 backend_eagain;
	struct kvd_tenant *tenants[SIM_TENANTS];
	struct kvd_domain *domains[SIM_DOMAINS];
	u32 nr_exts;
	u32 nr_conns;
	struct sim_copy copies[SIM_COPIES];
	struct sim_stored stored[SIM_STORED];
	u32 nr_stored;
	struct sim_mark marks[SIM_MARKS];
	u32 nr_marks;
	struct sim_peek peek;
	u32 act_at;
	struct sim_stats stats;
	char failure[320];
	/* Cleared by those who use them: they are large. */
	struct sim_client clients[SIM_CLIENTS];
	struct sim_conn conns[SIM_CONNS];
	struct sim_region regions[SIM_REGIONS];
	struct sim_ext exts[SIM_EXTS];
};

extern struct sim_world sim;

/* ------------------------------------------------------------------------- heap.c */

/** sim_core_enter() - the core is called from here on: its memory is noted, it may be
 * killed at any store. sim_core_leave() ends it */
void sim_core_enter(void);
void sim_core_leave(void);

/** sim_heap_drop() - what the core had allocated goes with it */
void sim_heap_drop(void);

/** sim_heap_blocks() - blocks the core has now */
u32 sim_heap_blocks(void);

/** enum sim_end - how a guarded call ended */
enum sim_end { SIM_DONE, SIM_KILLED, SIM_FAILED };

/** sim_peek_now() - a client acts while the core is in the middle of something */
void sim_peek_now(void);

/** sim_guard() - run @fn; a kill of the core and a failure come back here */
enum sim_end sim_guard(void (*fn)(const void *arg), const void *arg);

/** sim_fail() - the schedule has failed; does not return */
void sim_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));

#define SIM_EXPECT(cond)                                                            \
	do {                                                                        \
		if (!(cond))                                                        \
			sim_fail("%s:%d: expected: %s", __FILE__, __LINE__, #cond); \
	} while (0)

/* -------------------------------------------------------------------------- env.c */

/** sim_env_init() - hooks, backend, limits; no core yet */
void sim_env_init(void);

/** sim_hook_fails() - is it this call's turn? */
bool sim_hook_fails(enum sim_hook hook);

/** sim_env_fini() - give back all memory of a schedule */
void sim_env_fini(void);

/** sim_env_died() - kvmd's own descriptors and mappings are gone */
void sim_env_died(void);

/** sim_region_find() - a kept region, or NULL */
struct sim_region *sim_region_find(enum kvd_region_kind kind, u32 pool, u64 session);

void sim_region_drop(struct sim_region *r);

/** sim_ext_put() - one reference less was counted: free it if that was the last */
void sim_ext_put(struct sim_ext *e);

/** sim_ext_of() - number of the extent behind a page of a live pool */
struct sim_ext *sim_ext_of(const struct kvd_pool *pool, u32 pfn);

/** sim_cell_of() - bytes of a page of a live pool */
struct sim_cell *sim_cell_of(const struct kvd_pool *pool, u32 pfn);

extern const struct kvd_notify sim_notify;
extern const struct kvd_keep_ops sim_keep_ops;
extern const struct kvd_spill_ops sim_spill_ops;

/** sim_copy_end() - the copier finishes its @k-th copy, @good or not */
void sim_copy_end(u32 k, bool good);

/* ------------------------------------------------------------------------- kvmd.c */

/** sim_kvmd_start() - a kvmd takes up what is in the keeper, or starts cold. May be
 * killed or fail on the way: then there is none */
void sim_kvmd_start(void);

/** sim_kvmd_died() - everything that was not kept is gone */
void sim_kvmd_died(void);

/** sim_kvmd_turn() - kvd_core_run() at the present time; true: wants another at once */
bool sim_kvmd_turn(void);

/* ----------------------------------------------------------------------- client.c */

/** sim_conn_open() - the client gets a session and opens its pool; false: refused */
bool sim_conn_open(struct sim_client *c);

/** sim_client_ready() - has a session that kvmd knows, with its table; takes it up again
 * if kvmd is another one. Return: false: not now */
bool sim_client_ready(struct sim_client *c);

/** sim_conn_free() - the process that had it is gone and so is its work */
void sim_conn_free(struct sim_conn *n);

/** sim_conn_busy() - a step is under way that has @pfn in its rows (or any: ~0) */
bool sim_conn_busy(const struct sim_conn *n, u32 pfn);

/** sim_conn_unmap() - drop the mapping at @index */
void sim_conn_unmap(struct sim_conn *n, u32 index);

/** sim_held_find() - the client's entry for a generation of a page, or NULL */
struct sim_held *sim_held_find(struct sim_client *c, u32 pfn, u64 gen);

/** sim_held_add() - one more reference; NULL: no room */
struct sim_held *sim_held_add(struct sim_client *c, u32 pfn, u64 gen);

/** sim_held_revoked() - the page was or may be taken away, also one that the client has
 * not heard of yet */
void sim_held_revoked(struct sim_client *c, u32 pfn, u64 gen);

/** sim_held_put() - one reference less; the row may be used once too often later */
void sim_held_put(struct sim_client *c, struct sim_held *h);

/** sim_letter_take() - the client reads the @k-th completion that waits */
void sim_letter_take(struct sim_client *c, u32 k);

/** sim_client_hostile() - may this one lie? */
bool sim_client_hostile(const struct sim_client *c);

/* ------------------------------------------------------------------------- step.c */

/** sim_step_go() - the step in @slot does its next thing; @r picks rows */
void sim_step_go(struct sim_conn *n, u32 slot, u32 r);

/** sim_step_finish() - it does all that is left and retires */
void sim_step_finish(struct sim_conn *n, u32 slot);

/** sim_step_vanish() - its process's work is proven to be over */
void sim_step_vanish(struct sim_conn *n, struct sim_step *st);

/* ------------------------------------------------------------------------ check.c */

/** sim_check() - every invariant and the model's own; @whole: kvd_audit() too */
void sim_check(bool whole);

/* --------------------------------------------------------- acts.c, op_page.c, op_kvmd.c */

struct sim_op {
	const char *name;
	void (*run)(const u16 *a);
	u32 weight;
	u16 range[SIM_ARGS];
};

extern const struct sim_op sim_ops[];
extern const u32 sim_nr_ops;

/** sim_op_pick() - client of an argument */
struct sim_client *sim_op_client(u32 k);

void sim_op_alloc(const u16 *a);
void sim_op_stock(const u16 *a);
void sim_op_pop(const u16 *a);
void sim_op_take(const u16 *a);
void sim_op_free(const u16 *a);
void sim_op_pin(const u16 *a);
void sim_op_seal(const u16 *a);
void sim_op_lookup(const u16 *a);
void sim_op_fork(const u16 *a);
void sim_op_request(const u16 *a);
void sim_op_step(const u16 *a);
void sim_op_finish(const u16 *a);
void sim_op_late(const u16 *a);
void sim_op_run(const u16 *a);
void sim_op_clock(const u16 *a);
void sim_op_evict(const u16 *a);
void sim_op_hold(const u16 *a);
void sim_op_unhold(const u16 *a);
void sim_op_drain(const u16 *a);
void sim_op_limits(const u16 *a);
void sim_op_revoke(const u16 *a);
void sim_op_recall(const u16 *a);
void sim_op_shrink(const u16 *a);
void sim_op_unmap(const u16 *a);
void sim_op_bye(const u16 *a);
void sim_op_close(const u16 *a);
void sim_op_die(const u16 *a);
void sim_op_proof(const u16 *a);
void sim_op_copy(const u16 *a);
void sim_op_mover(const u16 *a);
void sim_op_peek(const u16 *a);
void sim_op_kill(const u16 *a);
void sim_op_crash(const u16 *a);
void sim_op_start(const u16 *a);
void sim_op_damage(const u16 *a);
void sim_op_fault(const u16 *a);
void sim_op_lie(const u16 *a);
void sim_op_badfree(const u16 *a);

/* --------------------------------------------------------------------- schedule.c */

/** struct sim_schedule - options and acts */
struct sim_schedule {
	struct sim_opts o;
	u32 nr;
	struct sim_act acts[SIM_ACTS_MAX];
};

/** sim_draw() - a schedule from a seed */
void sim_draw(struct sim_schedule *s, u64 seed);

/** sim_run() - safety phase, liveness phase. Return: true it held; else sim.failure */
bool sim_run(const struct sim_schedule *s);

/** sim_write() - as text. sim_read() - Return: 0, or the line that is wrong */
void sim_write(const struct sim_schedule *s, FILE *f, const char *why);
u32 sim_read(struct sim_schedule *s, FILE *f);

/** sim_shrink() - the fewest acts that still fail. Return: schedules run */
u32 sim_shrink(struct sim_schedule *s);

#endif
