/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/admin_priv.h - shared by the admin_*.c files only. Loop thread only. */
#ifndef KVD_IPC_ADMIN_PRIV_H
#define KVD_IPC_ADMIN_PRIV_H

#include <cjson/cJSON.h>

#include "kvmd/daemon.h"

/** struct kvd_admin_call - one request: what was asked, where the answer goes */
struct kvd_admin_call {
	struct kvd *kvd;
	const cJSON *in;
	cJSON *out;
	char error[KVD_CONFIG_ERROR_BYTES];
};

/** kvd_admin_u64() - an integer as an exact JSON number up to 2^53, above as a string */
void kvd_admin_u64(cJSON *object, const char *name, u64 value);

/** kvd_admin_hex() - a 64-bit word as "0x..." */
void kvd_admin_hex(cJSON *object, const char *name, u64 value);

/** kvd_admin_fail() - refuse with a message. Return: @r */
int kvd_admin_fail(struct kvd_admin_call *call, int r, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/**
 * kvd_admin_get_u32() - an optional integer field
 *
 * Return: 1 and @ret; 0 not there; -EINVAL and the call's error.
 */
int kvd_admin_get_u32(struct kvd_admin_call *call, const char *name, u32 *ret);

/** kvd_admin_get_pool() - field "pool": by id; without it the only pool there is. Return:
 * 0; -ENOENT; -EINVAL */
int kvd_admin_get_pool(struct kvd_admin_call *call, struct kvd_pool **ret_pool);

/** kvd_admin_lower() - "ACTIVE" to "active" */
void kvd_admin_lower(const char *in, char *out, size_t room);

/** kvd_admin_states() - pages by state, one field each */
void kvd_admin_states(cJSON *object, const u32 *nr);

/* admin_status.c */
int kvd_admin_status(struct kvd_admin_call *call);

/* admin_tier.c */
int kvd_admin_tier(struct kvd_admin_call *call);

/* admin_show.c: read only */
int kvd_admin_ps(struct kvd_admin_call *call);
int kvd_admin_pages(struct kvd_admin_call *call);
int kvd_admin_page(struct kvd_admin_call *call);
int kvd_admin_pool(struct kvd_admin_call *call);
int kvd_admin_tenant(struct kvd_admin_call *call);
int kvd_admin_incidents(struct kvd_admin_call *call);

/* admin_mm.c: read only */
int kvd_admin_meminfo(struct kvd_admin_call *call);
int kvd_admin_slabinfo(struct kvd_admin_call *call);
int kvd_admin_vmstat(struct kvd_admin_call *call);
int kvd_admin_pressure(struct kvd_admin_call *call);
int kvd_admin_pagemap(struct kvd_admin_call *call);

/* admin_steer.c */
int kvd_admin_pin(struct kvd_admin_call *call);
int kvd_admin_unpin(struct kvd_admin_call *call);
int kvd_admin_drain(struct kvd_admin_call *call);
int kvd_admin_limit(struct kvd_admin_call *call);
int kvd_admin_revoke(struct kvd_admin_call *call);

/* admin_do.c */
int kvd_admin_audit(struct kvd_admin_call *call);
/** kvd_admin_audit_begin() - an audit beside the work. Return: 0; -ENOMEM */
int kvd_admin_audit_begin(struct kvd *kvd);
/** kvd_admin_audit_step() - a slice. Return: -EAGAIN; 0: over, @out has the answer; -ENOMEM:
 * over */
int kvd_admin_audit_step(struct kvd *kvd, cJSON *out);
/** kvd_admin_audit_end() - nobody waits for it any more */
void kvd_admin_audit_end(struct kvd *kvd);
int kvd_admin_evict(struct kvd_admin_call *call);
int kvd_admin_version(struct kvd_admin_call *call);
int kvd_admin_reload(struct kvd_admin_call *call);
int kvd_admin_stat(struct kvd_admin_call *call);
int kvd_admin_trace(struct kvd_admin_call *call);
int kvd_admin_upgrade(struct kvd_admin_call *call);

/** kvd_admin_dry_run() - is it only to be said? */
bool kvd_admin_dry_run(const struct kvd_admin_call *call);

int kvd_admin_fault(struct kvd_admin_call *call);

#endif
