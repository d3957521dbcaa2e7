/* SPDX-License-Identifier: Apache-2.0 */
/*
 * race.h - two engine processes race for the pages of one small pool.
 *
 * Every page that is written holds a pattern of its owner: engine, generation and page
 * number decide each of its 64-bit words. Every word that a request with a good verdict reads is
 * compared with the pattern of the lease that the request was given; a word that differs
 * counts as eight foreign bytes.
 *
 * What races, each step choosing at random (cases O22, O25, O37, R4):
 *
 *	read	a step names pages, then frees them, then reads them: the other engine's
 *		write must not come before this step has retired
 *	write	the same, and the step writes them: what the other engine writes into a
 *		page that it was given must stay
 *	late	rows of pages that were freed many steps ago, for reading and writing: the
 *		check must fail them
 *	share	pages are sealed after the announce and before the step that writes them
 *		is launched; the other engine looks them up all the while
 */
#ifndef KVB_RACE_H
#define KVB_RACE_H

#include "safety.h"

#define RACE_ENGINES   2u
#define RACE_PER_MAX   512u
#define RACE_PAGES_MAX 65536u
#define RACE_READ      0x1u
#define RACE_WRITE     0x2u
#define RACE_LATE      0x4u
#define RACE_SHARE     0x8u
#define RACE_ALL       0xfu

/**
 * struct race_options - what to run
 * @reissues: pages that were somebody's before, of both engines together
 * @per_step: pages that a step takes and writes
 * @pages: of the pool
 * @seed: of all that is random; scheduling is not
 * @kinds: RACE_*
 * @seconds: a run that takes longer has failed
 */
struct race_options {
	enum kvb_backend backend;
	u64 reissues;
	u64 per_step;
	u64 pages;
	u64 seed;
	u64 seconds;
	u32 kinds;
	const char *check;
	bool json;
};

/** struct race_count - what an engine counted; written by it, read after its end */
struct race_count {
	u64 steps;
	u64 grants;
	u64 cross;  /* re-issues of the other engine's pages */
	u64 races;  /* requests whose pages were freed between announce and launch */
	u64 ok[4];  /* requests that passed: own pages, freed, late, shared */
	u64 bad[4]; /* requests that the check failed */
	u64 hits;   /* pages of the other engine found */
	u64 seals;  /* runs sealed before they were written */
	u64 words;  /* compared */
	u64 foreign_bytes;
	u64 foreign_pages[4];
};

/**
 * struct race_shared - anonymous memory of all three processes
 * @owner: [pfn] engine + 1 that was given the page last
 * @reissues: so far
 * @published: [engine] number of its newest sealed run, from 1
 */
struct race_shared {
	u32 owner[RACE_PAGES_MAX];
	u64 reissues;
	u64 published[RACE_ENGINES];
	struct race_count count[RACE_ENGINES];
};

/** race_engine() - one engine process's whole life. Return: its exit status */
int race_engine(const struct race_options *opt, const char *socket_path, u32 engine,
		struct race_shared *shared);

#endif
