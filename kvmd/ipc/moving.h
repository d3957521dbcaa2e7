/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/moving.h - the mover in the daemon: in the loop, in the keeper, in status, and the
 * proof of its end (design 5, P8: it counts as a session).
 *
 * Thread rules: the loop thread only.
 */
#ifndef KVD_IPC_MOVING_H
#define KVD_IPC_MOVING_H

#include <cjson/cJSON.h>

#include "kvmd/backend/nvml.h"
#include "kvmd/ipc/loop.h"
#include "kvmd/mover/mover.h"

struct kvd;

/**
 * struct kvd_moving - the daemon's side
 * @mover: jobs are submitted here; NULL before kvd_moving_open()
 * @next_ns: when kvd_moving_turn() has something to do
 * @since, @hold_ns: NVML was asked whether it lists the process; until when to wait
 * @proving, @after, @ask_ns: NVML is asked whether it still does; 0: not asked yet
 */
struct kvd_moving {
	struct kvd_mover *mover;
	struct kvd_watch watch;
	u64 next_ns;
	u64 since;
	u64 hold_ns;
	bool proving;
	u64 after;
	u64 ask_ns;
};

/**
 * kvd_moving_open() - make the mover's object; no process before the first job
 * @pool_bytes, @fill_later: of the host pool, as in struct kvd_mover_params
 *
 * After kvd_kept_adopt(): a mover of an earlier kvmd is ended, and nothing leaves
 * quarantine before its end is proven, because frames that it was filling are there.
 * Return: 0; -errno as kvd_mover_create(), kvd_loop_add().
 */
int kvd_moving_open(struct kvd *kvd, u64 pool_bytes, bool fill_later);

/** kvd_moving_close() - before kvd_core_fini(): its extents are put */
void kvd_moving_close(struct kvd *kvd);

/** kvd_moving_turn() - in every turn of the loop */
void kvd_moving_turn(struct kvd *kvd);

/** kvd_moving_tick() - every second: extents that are not used go back */
void kvd_moving_tick(struct kvd *kvd);

/** kvd_moving_answer() - NVML's list */
void kvd_moving_answer(struct kvd *kvd, const struct kvd_nvml_answer *answer);

/** kvd_moving_keep() - once more, to a keeper that is new. Return: 0; -errno */
int kvd_moving_keep(struct kvd *kvd);

/** kvd_moving_status() - "mover" of `status` */
void kvd_moving_status(struct kvd *kvd, cJSON *out);

/** kvd_moving_reason() - why the mover is of no use now, with a code; NULL: it is well */
const char *kvd_moving_reason(struct kvd *kvd, const char **ret_code);

#endif
