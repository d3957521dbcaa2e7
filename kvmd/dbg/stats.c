/* SPDX-License-Identifier: Apache-2.0 */
/* dbg/stats.c - see stats.h. */
#include "kvmd/dbg/stats.h"

struct kvd_stats kvd_stats;

void kvd_hist_add(struct kvd_hist *hist, u64 ns)
{
	u32 bucket = ns ? 64u - (u32)__builtin_clzll(ns) : 0;

	hist->count++;
	hist->sum_ns += ns;
	hist->buckets[KV_MIN(bucket, KVD_HIST_BUCKETS - 1)]++;
}

u64 kvd_hist_quantile(const struct kvd_hist *hist, u32 permille)
{
	u64 want, seen = 0;
	u32 i;

	if (!hist->count)
		return 0;
	want = kv_div_round_up(hist->count * permille, 1000);
	for (i = 0; i < KVD_HIST_BUCKETS; i++) {
		seen += hist->buckets[i];
		if (seen >= want)
			return 1ull << i;
	}
	return 1ull << (KVD_HIST_BUCKETS - 1);
}

void kvd_stats_each(void (*fn)(void *arg, const char *name, u64 value), void *arg)
{
#define STATS_CALL(name) fn(arg, #name, kvd_stats.name);
	KVD_STATS_COUNTERS(STATS_CALL)
#undef STATS_CALL
}
