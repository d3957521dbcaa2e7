/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dbg/fault.h - named places where tests make things fail.
 *
 * A point fails when it is armed and its probability, interval, times and space agree (as
 * in the kernel's fault injection), or when it is the n-th check since
 * kvd_fault_fail_nth(n). Checks sit in the wrapper that can fail, never in its callers; a
 * failure that the caller may shrug off (a magazine refill) is marked benign, and
 * fail-nth sweeps pass over it.
 *
 * Off by default at the cost of one predicted branch. kvmd arms points only when it was
 * started with --faults, and says so in its status. Thread rules: the loop thread only.
 */
#ifndef KVD_DBG_FAULT_H
#define KVD_DBG_FAULT_H

#include <stdbool.h>

#include "base/util.h"

/* X(point, benign) */
#define KVD_FAULT_POINTS(X)   \
	X(page_alloc, 0)      \
	X(extent_alloc, 0)    \
	X(extent_map, 0)      \
	X(table_alloc, 0)     \
	X(record_alloc, 0)    \
	X(session_alloc, 0)   \
	X(memfd, 0)           \
	X(accept, 0)          \
	X(pidfd, 0)           \
	X(send, 0)            \
	X(state_write, 0)     \
	X(tenant_alloc, 0)    \
	X(tier_copy, 0)       \
	X(tier_fill, 0)       \
	X(tier_fill_stuck, 1) \
	X(tier_journal, 0)    \
	X(tier_read_eio, 0)   \
	X(tier_read_short, 0) \
	X(tier_read_flip, 0)  \
	X(tier_read_swap, 0)  \
	X(tier_read_late, 0)  \
	X(tier_write_eio, 0)  \
	X(tier_write_full, 0) \
	X(tier_write_torn, 0) \
	X(magazine_refill, 1)

#define KVD_FAULT_ENUM(name, benign) KVD_FAULT_##name,
enum kvd_fault_point { KVD_FAULT_POINTS(KVD_FAULT_ENUM) KVD_FAULT_NR };
#undef KVD_FAULT_ENUM

/**
 * struct kvd_fault_spec - when an armed point fails
 * @probability: of 1,000,000
 * @interval: only every n-th check; 0 and 1 = each
 * @times: failures left; 0 = no limit
 * @space: checks that succeed first
 */
struct kvd_fault_spec {
	u32 probability;
	u32 interval;
	u32 times;
	u32 space;
};

extern bool kvd_fault_active;

/** kvd_fault_check() - used by kvd_fault() */
bool kvd_fault_check(enum kvd_fault_point point);

/* Is this the time to fail? */
static inline bool kvd_fault(enum kvd_fault_point point)
{
	return __builtin_expect(kvd_fault_active, 0) && kvd_fault_check(point);
}

/** kvd_fault_arm() - arm one point; @spec NULL disarms it */
void kvd_fault_arm(enum kvd_fault_point point, const struct kvd_fault_spec *spec);

/**
 * kvd_fault_arm_text() - arm from text
 * @text: "point[:key=value[,key=value]...][;point...]", keys as in struct kvd_fault_spec;
 *	"crash=N" as a point: die at the N-th kvd_crash_point() from now; 0: do not
 * @error: message that names point, key and value; @error_bytes room
 *
 * Return: 0; -EINVAL, and nothing was armed.
 */
int kvd_fault_arm_text(const char *text, char *error, size_t error_bytes);

/** kvd_fault_fail_nth() - fail the n-th check of a point that is not benign; 0 = off */
void kvd_fault_fail_nth(u64 nth);

/** kvd_fault_fired() - failures injected since the last kvd_fault_fail_nth() */
u64 kvd_fault_fired(void);

/* Crash points left until the process dies; 0 = off. See kvd_crash_point(). */
extern u64 kvd_crash_left;

/** kvd_crash_now() - die as by kill -9 */
void kvd_crash_now(void);

/* Out of line: a point that is off is a compare and a branch. Here, not in fault.c: tests
 * put their own kvd_crash_now() in its place. */
static __attribute__((noinline, cold, unused)) void kvd_crash_count(void)
{
	if (--kvd_crash_left == 0)
		kvd_crash_now();
}

/*
 * Stands at every store that must survive and at every system call that changes what
 * survives: a test says "die at the n-th" ("crash=N" in --faults) and looks at what the
 * next kvmd makes of it.
 */
static inline void kvd_crash_point(void)
{
	if (__builtin_expect(kvd_crash_left != 0, 0))
		kvd_crash_count();
}

/** kvd_fault_seed() - seed of the probabilities */
void kvd_fault_seed(u64 seed);

#endif
