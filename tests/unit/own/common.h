/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tests/unit/own/common.h - a core with everything around it made up: memory, saved
 * counters, backend, notifications, time. One thread plays kvmd and all its clients.
 */
#ifndef TEST_RIG_H
#define TEST_RIG_H

#include "kvmd/own/core.h"
#include "tests/kvt.h"

#define RIG_STRIDE   73728ull /* mla_bf16, one layer */
#define RIG_SESSIONS 256u

/**
 * struct rig - a core and its surroundings
 * @fail_at: the n-th call of a hook that may fail does so; 0 = none
 * @calls: such calls so far
 * @fired: one failed
 * @extents: alive at the backend; @allocs, @frees: since the start
 */
struct rig {
	struct kvd_backend be;
	struct kvd_env env;
	struct kvd_gen_source gens;
	struct kvd_core core;
	struct kvd_backend_limits limits;
	struct kvd_domain *red, *blue;
	u64 now;
	u64 saved[2];
	u32 fail_at, calls;
	bool fired;
	int backend_error;
	u32 extents, allocs, frees, regions;
	u32 added, removed, revoked, stalls, reaped, pages_freed, pressure, pressures;
	u64 stalled_id;
	struct kv_page_ref last_revoked;
	u64 last_reaped;
	u64 next_client;
};

/* @nr_extents extents of @pages_per_extent (a power of two) pages of RIG_STRIDE bytes */
void rig_init(struct rig *r, u32 nr_extents, u32 pages_per_extent);
void rig_fini(struct rig *r);

/* limits in pages; 0 max = no limit */
struct kvd_tenant *rig_tenant(struct rig *r, struct kvd_domain *d, const char *name,
			      u32 min, u32 max);

struct kvd_session *rig_session(struct rig *r, struct kvd_tenant *t);
struct kv_layout rig_layout(u64 lora);
struct kvd_attach *rig_open(struct kvd_session *s, const struct kv_layout *l);

/* a session of a new process in the default pool */
struct kvd_attach *rig_client(struct rig *r, struct kvd_tenant *t,
			      struct kvd_session **ret_s);

/* what a client does to take a page out of a magazine's slot; false: none is there */
bool rig_pop(struct kvd_session *s, u32 mag, u32 slot, struct kv_grant *ret);

/* run turns until the core is idle or only waits */
void rig_run(struct rig *r);

/* expects a clean audit */
void rig_audit(struct rig *r);

u32 rig_quarantine(const struct kvd_pool *pool);

/* one op, expected to succeed */
struct kv_grant rig_alloc1(struct kvd_session *s, struct kvd_attach *a);
int rig_alloc(struct kvd_session *s, struct kvd_attach *a, u32 nr, u32 gfp,
	      struct kv_grant *g);
int rig_free1(struct kvd_session *s, struct kvd_attach *a, struct kv_grant g);

/* tokens of page @page of sequence @seq: the same for the same numbers */
void rig_tokens(u64 seq, u32 page, u32 *ret);

/* seal pages[nr] as pages first.. of @seq; @parent: key of the page before, NULL = root
 */
int rig_seal(struct kvd_session *s, struct kvd_attach *a, const struct kv_grant *pages,
	     u32 nr, u64 seq, u32 first, const u8 *parent, struct kv_seal_ret *rets);
int rig_lookup(struct kvd_session *s, struct kvd_attach *a, u64 seq, u32 nr_pages,
	       struct kv_hit *hits, u32 *ret_nr);

/* alloc, seal and let go a run of @nr pages: CACHED afterwards */
void rig_cache(struct rig *r, struct kvd_session *s, struct kvd_attach *a, u64 seq,
	       u32 nr);

/* client's side of a step */
void rig_announce(struct kvd_session *s, u32 slot, struct kvd_pool *pool);
int rig_retire(struct kvd_session *s, u32 slot);

#endif
