/* SPDX-License-Identifier: Apache-2.0 */
/*
 * core_rig.h - the daemon's core in this process, for benchmarks: no socket, no ring, no
 * page memory; records, tags, log, charges and grace periods are the real ones.
 */
#ifndef CORE_RIG_H
#define CORE_RIG_H

#include "kvmd/own/core.h"

#define CORE_RIG_CLIENTS 32u

/**
 * struct core_rig - a core and its surroundings
 * @layout: of all pools: one layer, so that a page is small; @stride_bytes of a page
 */
struct core_rig {
	struct kvd_backend be;
	struct kvd_env env;
	struct kvd_gen_source gens;
	struct kvd_core core;
	struct kvd_backend_limits limits;
	struct kvd_domain *domain;
	struct kv_layout layout;
	u64 stride_bytes;
	u64 last_client;
	void *pages_kept[CORE_RIG_CLIENTS];
	u32 nr_pages_kept;
};

/** struct core_client - a session and its part of the pool */
struct core_client {
	struct kvd_session *session;
	struct kvd_attach *attach;
};

/** core_rig_init() - capacity for @nr_pages in extents of @extent_pages (a power of two).
 * Return: 0; -errno, nothing to undo */
int core_rig_init(struct core_rig *r, u32 nr_pages, u32 extent_pages);

/** core_rig_tenant() - @high_pages 0 = no limit. Return: as kvd_tenant_create() */
int core_rig_tenant(struct core_rig *r, const char *name, u64 min_pages, u64 high_pages,
		    struct kvd_tenant **ret_tenant);

/** core_rig_client() - Return: 0; -ENOSPC, -ENOMEM, -errno: core_rig_fini() undoes */
int core_rig_client(struct core_rig *r, struct kvd_tenant *tenant,
		    struct core_client *ret_client);

void core_rig_fini(struct core_rig *r);

#endif
