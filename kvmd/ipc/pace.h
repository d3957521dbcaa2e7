/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/pace.h - how fast one uid may make connections.
 *
 * A bucket a uid: KVD_PACE_BURST connections at once (as many as one uid may have: all its
 * engines come back together after a restart), then one every KVD_PACE_EACH_NS. A bucket
 * is one number, the time at which it will be full again. Thread rules: the loop thread
 * only; pure, time is handed in.
 */
#ifndef KVD_IPC_PACE_H
#define KVD_IPC_PACE_H

#include <stdbool.h>

#include "base/util.h"

#define KVD_PACE_BURST	 512u
#define KVD_PACE_EACH_NS 8000000ull /* 125 a second */
#define KVD_PACE_UIDS	 64u

/**
 * struct kvd_pace - buckets of the uids that connected last
 * @nr: entries in use
 * @who: @full_ns is when the bucket is full again; in the past: full
 */
struct kvd_pace {
	u32 nr;
	struct {
		u32 uid;
		u64 full_ns;
	} who[KVD_PACE_UIDS];
};

/**
 * kvd_pace_take() - may @uid have a connection now?
 *
 * A uid that has no bucket gets the one that is fullest. Were all of them in use it
 * starts with what that bucket lacks: nobody gains by coming with ever more uids.
 *
 * Return: true: it is counted; false: not before KVD_PACE_EACH_NS have passed.
 */
bool kvd_pace_take(struct kvd_pace *pace, u32 uid, u64 now_ns);

#endif
