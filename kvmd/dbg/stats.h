/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dbg/stats.h - daemon-wide counters and time histograms.
 *
 * Counters only grow (readers take differences). A histogram has one bucket per power of
 * two of nanoseconds. Thread rules: the loop thread only.
 */
#ifndef KVD_DBG_STATS_H
#define KVD_DBG_STATS_H

#include "base/util.h"

#define KVD_STATS_COUNTERS(X)   \
	X(wakeups)              \
	X(ticks)                \
	X(spins)                \
	X(connections)          \
	X(connections_refused)  \
	X(connections_delayed)  \
	X(connections_too_fast) \
	X(messages_in)          \
	X(messages_out)         \
	X(protocol_faults)      \
	X(fd_shortages)         \
	X(slow_readers_dropped) \
	X(ring_entries)         \
	X(ring_faults)          \
	X(ring_kicks)           \
	X(requests_parked)      \
	X(sessions_opened)      \
	X(sessions_ended)       \
	X(incidents)            \
	X(admin_requests)

#define KVD_STATS_FIELD(name) u64 name;
struct kvd_stats {
	KVD_STATS_COUNTERS(KVD_STATS_FIELD)
};
#undef KVD_STATS_FIELD

extern struct kvd_stats kvd_stats;

#define KVD_HIST_BUCKETS 40u

struct kvd_hist {
	u64 count;
	u64 sum_ns;
	u64 buckets[KVD_HIST_BUCKETS]; /* bucket i: below 2^i ns */
};

/** kvd_hist_add() - count one duration */
void kvd_hist_add(struct kvd_hist *hist, u64 ns);

/**
 * kvd_hist_quantile() - upper bound of the bucket that holds a quantile
 * @permille: 500 = median
 *
 * Return: ns; 0 when empty.
 */
u64 kvd_hist_quantile(const struct kvd_hist *hist, u32 permille);

/** kvd_stats_each() - call @fn for every counter */
void kvd_stats_each(void (*fn)(void *arg, const char *name, u64 value), void *arg);

#endif
