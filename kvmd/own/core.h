/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/core.h - the pure core of one loop (one GPU): everything mm/ and own/ know, and the
 *	calls by which the daemon, the simulator and benchmarks drive it.
 *
 * The core makes no system call, reads no clock and starts no thread. Time goes in
 *	through kvd_core_now(), memory and saved counters through struct kvd_env, extents
 *	through struct kvd_backend; what others must be told comes out through struct
 *	kvd_notify. One thread drives it:
 *
 *	kvd_core_now(core, now);
 *	... session calls: kvd_lease_alloc(), kvd_seal_step(), ... for everything that
 *	arrived ... next = kvd_core_run(core);      closes the turn: grace periods, reclaim,
 *	reaping
 *
 * A grant may be told to its client as soon as the call returned: tags are published by
 *	then.
 */
#ifndef KVD_CORE_H
#define KVD_CORE_H

#include "kvmd/mm/audit.h"
#include "kvmd/mm/pool.h"
#include "kvmd/mm/reclaim.h"
#include "kvmd/own/charge.h"
#include "kvmd/own/domain.h"
#include "kvmd/own/fork.h"
#include "kvmd/own/incident.h"
#include "kvmd/own/layout.h"
#include "kvmd/own/lease.h"
#include "kvmd/own/prefix.h"
#include "kvmd/own/session.h"
#include "kvmd/own/spill.h"
#include "kvmd/own/tenant.h"

/**
 * struct kvd_notify - what the core tells; all mandatory; called inside core calls, must
 *	not call back into the core
 * @extent_added: @s must get the fd of @pool->extents[index] before its next completion
 * @extent_removed: @s must unmap it and answer kvd_session_unmapped()
 * @revoked: pages of @s are gone: one message for [nr] pages
 * @pressure: level 0 none, 1 some (reclaim runs), 2 full (allocations fail); on change
 * @pages_freed: @pool has free pages again after an allocation had failed
 * @stalled: @s has held back a grace period for longer than stall_ms
 * @session_reaped: @s is freed when this returns: its page may be unmapped, its fds
 *	closed
 */
struct kvd_notify {
	void (*extent_added)(void *arg, struct kvd_session *s, struct kvd_pool *pool,
			     u32 index);
	void (*extent_removed)(void *arg, struct kvd_session *s, struct kvd_pool *pool,
			       u32 index, u64 serial);
	void (*revoked)(void *arg, struct kvd_session *s, struct kvd_pool *pool,
			const struct kv_page_ref *pages, u32 nr);
	void (*pressure)(void *arg, struct kvd_session *s, struct kvd_pool *pool,
			 u32 level);
	void (*pages_freed)(void *arg, struct kvd_pool *pool, u32 nr);
	void (*stalled)(void *arg, struct kvd_session *s, u64 stalled_ns);
	void (*session_reaped)(void *arg, struct kvd_session *s);
};

struct kvd_image;

/**
 * struct kvd_core_config - how to start
 * @env, @backend, @gen_source: borrowed for the core's life
 * @notify, @notify_arg: borrowed
 * @table_epoch: this instance of kvmd; not 0
 * @saved_grace: value of KVD_SAVED_GRACE; 0 on a fresh host
 * @capacity_bytes: all extents together; 0 = the backend's
 * @stall_ns: 0 = 10 s
 * @idle_shrink_ns: an extent that is FREE for so long goes back while another one is FREE
 *	too; 0 = 60 s
 * @test_layouts: KV_DTYPE_F32 is allowed
 * @spill, @spill_arg: the tiers below (spill.h); NULL: evicted pages are gone
 * @image, @keep: what outlives this process (image.h, env.h); both or none; borrowed
 */
struct kvd_core_config {
	const struct kvd_env *env;
	struct kvd_backend *backend;
	struct kvd_gen_source *gen_source;
	const struct kvd_notify *notify;
	void *notify_arg;
	u64 table_epoch;
	u64 saved_grace;
	u64 capacity_bytes;
	u64 stall_ns;
	u64 idle_shrink_ns;
	bool test_layouts;
	struct kvd_image *image;
	const struct kvd_keep_ops *keep;
	const struct kvd_spill_ops *spill;
	void *spill_arg;
};

/**
 * struct kvd_core - one loop's state
 * @mm: memory half
 * @cfg: as given
 * @image: NULL: nothing outlives this process
 * @epochs_stored: kvd_adopt_epochs() has run: tags may change
 * @domains: by id; NULL = unused; owned
 * @tenants: by index; owned
 * @sessions: struct kvd_session.node, LIVE and ENDED
 * @nr_sessions: length of @sessions
 * @nr_ended: ENDED ones among them
 * @incidents: ring
 * @min_bytes_total: sum of all tenants' min; 0 spares the look at promises
 * @sweep_pool: where kvd_audit_slice() goes on
 * @nr_turns: turns given (own/turn.h)
 * @nr_left_pages: held, not in stock, by sessions when they ended
 * @unmet_bytes, @unmet_valid: sum of the domains' unmet_bytes, if it is right
 * @second_ns: when the once-a-second work was done last
 * @calm_scans: mm.grace.scans when nothing waited at the end of a turn: readers that were
 *	looked at since may still show a stall, or wish to be kicked
 */
struct kvd_core {
	struct kvd_mm mm;
	struct kvd_core_config cfg;
	struct kvd_image *image;
	bool epochs_stored;
	struct kvd_domain *domains[KVD_DOMAINS_MAX];
	u32 domains_end;
	struct kvd_tenant *tenants[KVD_TENANTS_MAX];
	struct list_node sessions;
	u32 nr_sessions;
	u32 nr_ended;
	struct kvd_incidents incidents;
	u64 min_bytes_total;
	u64 unmet_bytes;
	bool unmet_valid;
	u64 nr_turns;
	u64 nr_left_pages;
	u64 second_ns;
	u64 calm_scans;
	u32 sweep_pool;
};

static inline struct kvd_core *kvd_core_of(const struct kvd_mm *mm)
{
	return kv_container_of(mm, struct kvd_core, mm);
}

/** kvd_core_init() - Return: 0; -EINVAL the config; -ENOMEM; -errno of the save hook */
int kvd_core_init(struct kvd_core *core, const struct kvd_core_config *cfg);

/** kvd_core_fini() - ends and reaps all sessions, frees everything */
void kvd_core_fini(struct kvd_core *core);

/** kvd_core_now() - tell the time; it never goes back */
void kvd_core_now(struct kvd_core *core, u64 now_ns);

#define KVD_CORE_IDLE (~0ull)

/**
 * kvd_core_run() - close a turn
 *
 * Advances the grace epoch if pages were killed or sealed, reads the announce slots if
 *	something waits, frees what is over, runs a slice of background reclaim, gives idle
 *	extents back, reports stalls and reaps quiet sessions.
 *
 * Return: core time at which it wants to be called again: now = at once (more work), now
 *	+ 10 ms while quarantine is not empty, KVD_CORE_IDLE. A kick of a retiring client is a
 *	reason to call earlier.
 */
u64 kvd_core_run(struct kvd_core *core);

/** kvd_stat() - figures of a pool and of the session's tenant, as STAT answers them */
void kvd_stat(const struct kvd_session *s, const struct kvd_attach *a,
	      struct kv_stat *ret);

/**
 * kvd_audit() - check I1-I8 over everything, now
 * @fs: list, max set by the caller
 *
 * Context: O(pages * sessions of the domain); allocates scratch memory; not a request
 * path. Return: findings (0 = clean), or -ENOMEM.
 */
int kvd_audit(struct kvd_core *core, struct kvd_findings *fs);

/**
 * kvd_audit_quick() - what a sum over the pools can show: counters, lists, ledger
 *
 * After kvd_adopt_pool() nothing else can be wrong: it looked at every record itself, and
 * index and references were made from the records.
 *
 * Return: findings.
 */
int kvd_audit_quick(struct kvd_core *core, struct kvd_findings *fs);

/* Records that an audit looks at in one turn: about 50 us. */
#define KVD_AUDIT_SLICE 128u

/**
 * kvd_audit_slice() - check counters, and the records of the next @nr pages
 *
 * Return: true when this slice ended a sweep over all pools.
 */
bool kvd_audit_slice(struct kvd_core *core, u32 nr, struct kvd_findings *fs);

#endif /* KVD_CORE_H */
