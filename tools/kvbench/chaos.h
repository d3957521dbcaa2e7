/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chaos.h - what kvbench restarts, crashes and soak share: a kvmd that is killed and
 * started again in its directory, and engine processes that know what each byte must be.
 *
 * Host backend only. Engines are forked; what they count is in memory that all of them
 * map. Their tokens come from CHAOS_RUNS runs of pages, the same in all engines, so that
 * they find each other's pages.
 */
#ifndef KVB_CHAOS_H
#define KVB_CHAOS_H

#include <signal.h>
#include <sys/wait.h>

#include "safety.h"

#define CHAOS_RUNS	256u
#define CHAOS_RUN_PAGES 8u
#define CHAOS_HELD	32u /* pages that an engine holds all the time */

/* What an engine was doing when it was killed. */
enum chaos_phase {
	CHAOS_HELLO,
	CHAOS_OPEN,
	CHAOS_ALLOC,
	CHAOS_STEP,
	CHAOS_FORKED,
	CHAOS_SEAL,
	CHAOS_LOOKUP,
	CHAOS_FREE,
	CHAOS_PHASES
};

/**
 * struct chaos_count - one engine's, in shared memory
 * @stop: the engine ends when this is set
 * @phase: enum chaos_phase
 * @child: pid of its forked child, or 0
 * @rounds: rounds of the loop
 * @pages, @bytes: compared
 * @wrong: bytes that differ in pages that passed the check
 * @refused: pages that the engine holds and that fail the check
 * @sessions: the session was lost, and all leases with it
 * @hits, @misses: of lookups
 * @full: no page for now
 * @away: kvmd did not answer in time
 * @stale: KV_STALE from free, flush or seal
 * @errors: other answers
 * @gap_ns: longest round
 */
struct chaos_count {
	u32 stop;
	u32 phase;
	s32 child;
	u32 reserved;
	u64 rounds, pages, bytes, wrong, refused, sessions, hits, misses, full, away,
		stale, errors, gap_ns;
};

/**
 * struct chaos_engine - what an engine process is to do
 * @fork_in_step: every so many steps, fork a child that lives on; 0 = never
 * @tolerant: bytes and pages may be damaged by others: refused pages are let go
 */
struct chaos_engine {
	const char *socket_path;
	struct chaos_count *count;
	u64 seed;
	u32 fork_in_step;
	bool tolerant;
};

/**
 * struct chaos_kvmd - a private daemon with a keeper, that can be killed
 * @realtime: chaos_again() runs it before all other work of the machine (SCHED_FIFO): what a
 *	start takes where nobody else wants its CPU
 */
struct chaos_kvmd {
	struct eng_private_kvmd k;
	char path[1100];
	const char *args[24];
	u32 nr_args;
	bool realtime;
};

/** chaos_layout() - pages of 8 KiB */
struct kv_layout chaos_layout(void);

/**
 * chaos_start() - start it
 * @bytes: most memory for pages
 * @c: zeroed, but for @realtime
 * @args: more arguments, NULL-terminated, at most 8; they must stay
 *
 * Return: 0, or -errno after a line on stderr.
 */
int chaos_start(struct chaos_kvmd *c, const char *bytes, const char *const *args);

/** chaos_kill() - kill -9, and wait until it is gone */
void chaos_kill(struct chaos_kvmd *c);

/**
 * chaos_again() - the next kvmd in the same directory
 * @ret_ms: from before its exec to its word that it serves
 *
 * Return: 0; -ECHILD it did not start, said on stderr.
 */
int chaos_again(struct chaos_kvmd *c, double *ret_ms);

/** chaos_stop() - in order. Return: its status, 0 = fine */
int chaos_stop(struct chaos_kvmd *c);

/** chaos_admin() - one request. Return: the reply's text, malloc'ed; NULL */
char *chaos_admin(const struct chaos_kvmd *c, const char *request);

/** chaos_admin_number() - a number of a reply by its name, also in nested objects, or by
 * "object.name"; -1 */
double chaos_admin_number(const struct chaos_kvmd *c, const char *request,
			  const char *name);

/** chaos_keeper() - the keeper of this process's kvmd. Return: its pid; 0 */
pid_t chaos_keeper(void);

u32 chaos_fds(pid_t pid);

/** chaos_anon_kib() - memory of its own; what it maps of memfds is faulted in by and by, by the
 * audit for one */
u64 chaos_anon_kib(pid_t pid);

/** chaos_counts() - @nr zeroed counters in shared memory; NULL */
struct chaos_count *chaos_counts(u32 nr);

/** chaos_sum() - of all but @stop, @phase, @child; the largest @gap_ns */
struct chaos_count chaos_sum(const struct chaos_count *counts, u32 nr);

/** chaos_fork() - an engine process. Return: its pid; -errno */
pid_t chaos_fork(const struct chaos_engine *e);

/** chaos_fill() - what page @i of run @run must hold */
void chaos_fill(u64 *page, u64 words, u64 run, u32 i);

/** chaos_tokens() - the run's token ids, CHAOS_RUN_PAGES pages of them */
void chaos_tokens(u32 *ret, u64 run);

/** chaos_random() - the next of a sequence */
u64 chaos_random(u64 *state);

int kvb_restarts(int argc, char **argv);
int kvb_crashes(int argc, char **argv);
int kvb_soak(int argc, char **argv);

#endif
