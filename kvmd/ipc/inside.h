/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/inside.h - the daemon's state files for `kvmctl trace --state PATH`. */
#ifndef KVD_IPC_INSIDE_H
#define KVD_IPC_INSIDE_H

struct kvd;

/** kvd_inside_add() - register the files; @kvd is borrowed until kvd_inside_remove() */
void kvd_inside_add(struct kvd *kvd);

/** kvd_inside_remove() - take them out again */
void kvd_inside_remove(void);

#endif
