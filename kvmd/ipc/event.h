/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/event.h - what the core tells, turned into messages. Loop thread only. */
#ifndef KVD_IPC_EVENT_H
#define KVD_IPC_EVENT_H

#include "kvmd/ipc/conn.h"
#include "kvmd/own/core.h"

/** kvd_event_notify() - hooks for the core; the argument is struct kvd */
extern const struct kvd_notify kvd_event_notify;

/** kvd_event_extent_added() - collect an extent for the next EXTENT_ADDED */
void kvd_event_extent_added(struct kvd_conn *conn, struct kvd_pool *pool, u32 index);

/** kvd_event_flush() - send collected extents. Return: 0; -errno and the peer was dropped
 */
int kvd_event_flush(struct kvd_conn *conn);

#endif
