/* SPDX-License-Identifier: Apache-2.0 */
/*
 * race_engine.h - the inside of an engine process of kvbench race: its state, and a step
 * from its rows to its launch (race_step.c). One thread a process.
 */
#ifndef KVB_RACE_ENGINE_H
#define KVB_RACE_ENGINE_H

#include "race.h"

#define LANES	     2u
#define LATE	     8u /* single rows of old pages for reading, as many for writing */
#define SEAL	     4u /* pages of a run that are sealed */
#define GRAVES	     32u
#define LIVE_MAX     64u
#define REQUESTS_MAX (3 + 2 * LATE + 1)
#define ROWS_MAX     (3 * RACE_PER_MAX + 2 * LATE + SEAL)

enum request_kind { OWN, FREED, OLD, SHARED };

/**
 * struct run - pages that were taken together
 * @step: number of the step that wrote it
 */
struct run {
	struct kv_grant pages[RACE_PER_MAX];
	u64 step;
	bool sealed;
};

/**
 * struct lane - a stream and what a step on it needs
 * @dev: the same as @host in the kernels' memory
 * @in, @out: pages to write and pages read, dense, in row order
 * @owner: engine whose pattern row i must show
 * @nr_w, @nr_r: requests that write and that read; the former come first
 */
struct lane {
	struct eng_mem *m;
	u32 id;
	struct kvc_step *step;
	u64 number;
	struct kv_mirror *mirror;
	struct lane_data {
		struct kv_step_block *block;
		struct kv_row *rows;
		u32 *row_start;
		u32 *lengths;
		u64 *nonces;
		struct kv_verdict *verdicts;
		u8 *in;
		u8 *out;
	} host, dev;
	size_t block_bytes;
	u8 kind[REQUESTS_MAX];
	u8 owner[REQUESTS_MAX];
	u32 nr_w, nr_r;
	struct kv_hit hits[SEAL];
	u32 nr_hits;
};

struct engine {
	const struct race_options *opt;
	struct race_shared *shared;
	struct race_count *count;
	u32 me;
	u32 per;
	u64 random;
	struct kvc *c;
	struct kvc_pool *pool;
	struct kvc_pool_info info;
	struct kvk_pages pages;
	u32 check_mode;
	u64 page_bytes;
	struct lane lanes[LANES];
	struct run live[LIVE_MAX];
	u32 nr_live, live_max;
	struct kv_grant graves[GRAVES];
	u64 nr_graves;
	u64 step;
	u64 seen; /* newest run of the other engine that was looked for */
};

/** race_below() - a random number below @n */
u32 race_below(struct engine *e, u32 n);

/** race_pattern_of() - first word of the pattern of a lease of @engine */
u64 race_pattern_of(u32 engine, u32 pfn, u64 tag);

/** race_pattern_differs() - words of a page that are not the pattern's */
u32 race_pattern_differs(struct engine *e, const u8 *from, u64 first);

/**
 * race_look_up() - pages that the other engine has sealed, perhaps before it wrote them
 *
 * Return: 0, found or not; -errno.
 */
int race_look_up(struct engine *e, struct lane *l);

/**
 * race_make_rows() - all rows of the step
 * @run: the new pages
 * @old: the run that is freed in this step, or NULL
 */
void race_make_rows(struct engine *e, struct lane *l, const struct run *run,
		    const struct run *old);

/**
 * race_middle() - between announce and launch: the block, and the end of the oldest run, in
 * either order
 *
 * Return: 0; -errno.
 */
int race_middle(struct engine *e, struct lane *l, struct run *run, const struct run *old);

/** race_free_run() - give a run back; some of its pages go to the graves. Return: 0; -errno */
int race_free_run(struct engine *e, const struct run *run);

/** race_launch() - queue the step's work; it is announced and has its rows. Return: 0; -errno */
int race_launch(struct engine *e, struct lane *l);

#endif
