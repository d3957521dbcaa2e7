/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/tiering.h - the tiers in the daemon: made from the configuration, in the loop, fed by
 * the mover, in status.
 *
 * Thread rules: the loop thread only.
 */
#ifndef KVD_IPC_TIERING_H
#define KVD_IPC_TIERING_H

#include <cjson/cJSON.h>

#include "kvmd/config.h"
#include "kvmd/ipc/filling.h"
#include "kvmd/ipc/loop.h"
#include "kvmd/tier/tier.h"

struct kvd;

/** struct kvd_tiering_job - argument of one job of the mover */
struct kvd_tiering_job {
	struct kvd *kvd;
	u32 cookie;
};

/**
 * struct kvd_tiering - the daemon's side
 * @tiers: NULL: none configured, or @filling
 * @watches: of kvd_tier_fds()
 * @jobs: one for each batch
 * @more: the last turn left work that waits for nothing; also kvd_tiering_more()
 * @bad_ns: when a stored page was found damaged last; 0 = never
 */
struct kvd_tiering {
	struct kvd_tiers *tiers;
	struct kvd_filling filling;
	struct kvd_watch watches[KVD_TIER_FDS];
	u32 nr_watches;
	struct kvd_tiering_job jobs[KVD_TIER_BATCHES];
	bool more;
	u64 bad_ns;
};

/** kvd_tiering_fits() - could this host have the DRAM tier? Return: 0; -ENOMEM, @error names the
 * field */
int kvd_tiering_fits(const struct kvd_config *config, char *error);

/** kvd_tiering_pool() - kvd_moving_open() with the DRAM tier's memory, or the promise of it
 * (filling.h). Return: as that; @error names the field */
int kvd_tiering_pool(struct kvd *kvd, const struct kvd_config *config, char *error);

/** kvd_tiering_open() - after kvd_tiering_pool(), whose pool is the DRAM tier; nothing while
 * that is filled. Return: 0; -errno, @error names the field */
int kvd_tiering_open(struct kvd *kvd, const struct kvd_config *config, char *error);

/** kvd_tiering_stop() - before the mover ends: nothing touches its pool any more */
void kvd_tiering_stop(struct kvd *kvd);

/** kvd_tiering_close() - after kvd_moving_close(): its jobs are over */
void kvd_tiering_close(struct kvd *kvd);

/** kvd_tiering_leave() - before another program takes over: end what is under way, close the
 * journal cleanly */
void kvd_tiering_leave(struct kvd *kvd);

/** kvd_tiering_limits() - the tenants' budgets, from the policy in force */
void kvd_tiering_limits(struct kvd *kvd);

/** kvd_tiering_turn() - in every turn, after kvd_core_run() */
void kvd_tiering_turn(struct kvd *kvd);

/** kvd_tiering_more() - is there something that a turn goes on with? Parked requests and the mover
 * make it after kvd_tiering_turn() in the same turn of the loop, which may not sleep then */
bool kvd_tiering_more(const struct kvd *kvd);

/** kvd_tiering_tick() - every second */
void kvd_tiering_tick(struct kvd *kvd);

/** kvd_tiering_status() - "tiers" of `status` */
void kvd_tiering_status(struct kvd *kvd, cJSON *out);

/** kvd_tiering_reasons() - what is not as it should be: @add is called for each */
void kvd_tiering_reasons(struct kvd *kvd,
			 void (*add)(void *arg, const char *code, const char *text),
			 void *arg);

#endif
