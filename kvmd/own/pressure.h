/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/pressure.h - how long a tenant's engines wait for memory, in the manner of Linux PSI.
 *
 * A session asks when it sends ALLOC, and is stalled from a refusal (KV_QUOTA, KV_FULL,
 * KV_PENDING) until it is served or has not asked for KVD_PRESSURE_QUIET_NS. A tenant is
 * under pressure `some` while one of its sessions is stalled, `full` while every session
 * that asks is. The time spent in each is summed, and its share of the last 10, 60 and
 * 300 seconds kept as averages that decay exponentially every two seconds, as
 * kernel/sched/psi.c does. Loop thread only.
 */
#ifndef KVD_PRESSURE_H
#define KVD_PRESSURE_H

#include <stdbool.h>

#include "base/util.h"

struct kvd_core;
struct kvd_session;

enum kvd_pressure_kind { KVD_PRESSURE_SOME, KVD_PRESSURE_FULL, KVD_PRESSURE_KINDS };

#define KVD_PRESSURE_AVGS      3u	     /* 10, 60, 300 s */
#define KVD_PRESSURE_PERIOD_NS 2000000000ull /* averages move this often */
#define KVD_PRESSURE_QUIET_NS  2000000000ull /* a session that asked longer ago asks not */
#define KVD_PRESSURE_ONE       1000000u /* 100 %: averages are in parts per million */

/**
 * struct kvd_pressure - one tenant's
 * @nr_asking: sessions that have asked lately, stalled ones included
 * @nr_stalled: of these, refused and not served since
 * @total_ns: time in each kind
 * @avg: share of the last 10, 60, 300 s, in parts per million
 * @since_ns: @total_ns is right up to here
 * @avg_ns: @avg is right up to here
 * @avg_total_ns: @total_ns then
 */
struct kvd_pressure {
	u32 nr_asking, nr_stalled;
	u64 total_ns[KVD_PRESSURE_KINDS];
	u32 avg[KVD_PRESSURE_KINDS][KVD_PRESSURE_AVGS];
	u64 since_ns;
	u64 avg_ns;
	u64 avg_total_ns[KVD_PRESSURE_KINDS];
};

/** kvd_pressure_init() - a new tenant: nobody asks */
void kvd_pressure_init(struct kvd_pressure *p, u64 now_ns);

/** kvd_pressure_asked() - @s asked for memory; @served: and got all it asked for */
void kvd_pressure_asked(struct kvd_session *s, bool served);

/** kvd_pressure_leave() - @s asks no more: it ends, or has been quiet */
void kvd_pressure_leave(struct kvd_session *s);

/** kvd_pressure_update() - bring totals and averages up to @now_ns */
void kvd_pressure_update(struct kvd_pressure *p, u64 now_ns);

/** kvd_pressure_turn() - once a second: quiet sessions leave, averages move */
void kvd_pressure_turn(struct kvd_core *core);

#endif /* KVD_PRESSURE_H */
