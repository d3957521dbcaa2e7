/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/admin.h - the admin socket: one JSON request a line, one JSON reply a line.
 *
 *	{"op":"page","pool":1,"pfn":17}      -> {"ok":true, ...}
 *	                                     -> {"ok":false,"code":-2,"error":"..."}
 *
 * code is -errno, or a positive enum kv_outcome for a refusal. {"op":"events"} streams
 *	one JSON object a line until the peer hangs up. Only root and the daemon's own uid get
 *	in, by SO_PEERCRED, whatever the socket's mode.
 *
 * Thread rules: the loop thread only.
 */
#ifndef KVD_IPC_ADMIN_H
#define KVD_IPC_ADMIN_H

#include <stdbool.h>

#include "base/list.h"
#include "base/util.h"

struct cJSON;
struct kvd;
struct kvd_incident;

#define KVD_ADMIN_CONNS_MAX	32u
#define KVD_ADMIN_REQUEST_BYTES 8192u
#define KVD_ADMIN_OUT_BYTES_MAX (64u << 20)

/**
 * struct kvd_admin - the admin side
 * @conns: struct admin_conn.node
 * @nr_conns: length
 * @nr_streams: conns that watch events
 */
struct kvd_admin {
	struct list_node conns;
	u32 nr_conns;
	u32 nr_streams;
};

/** kvd_admin_init() - no connection yet */
void kvd_admin_init(struct kvd_admin *admin);

/** kvd_admin_fini() - close all connections */
void kvd_admin_fini(struct kvd *kvd);

/** kvd_admin_accepted() - a new connection; owns @fd */
void kvd_admin_accepted(struct kvd *kvd, int fd);

/**
 * kvd_admin_turn() - a slice of the audit that somebody waits for
 *
 * Return: true: there may be more to do in the next turn.
 */
bool kvd_admin_turn(struct kvd *kvd);

/**
 * kvd_admin_event() - one line for everybody who streams events
 * @type: "session_open", "incident", ...
 * @fields: consumed; may be NULL
 */
void kvd_admin_event(struct kvd *kvd, const char *type, struct cJSON *fields);

/**
 * kvd_admin_handle() - answer one request
 * @request: a JSON object
 * @ret_stream: the connection becomes an event stream
 *
 * Return: the reply, to be freed by the caller; NULL out of memory.
 */
struct cJSON *kvd_admin_handle(struct kvd *kvd, const struct cJSON *request,
			       bool *ret_stream);

#endif
