/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/session.h - the core's part of a session: its pools, leases, magazines and its end
 *	(P8).
 *
 *	LIVE -> ENDED -> reaped
 *
 * LIVE: may do everything. ENDED (kvd_session_end()): table_epoch 0 was stored, leases
 *	are dropped; its announce slots still hold back grace periods until each is quiet, by
 *	retiring or by proof of death (kvd_session_work_ended()). Reaped:
 *	notify->session_reaped() was called; the object and the session page are not touched any
 *	more. Loop thread only.
 */
#ifndef KVD_SESSION_H
#define KVD_SESSION_H

#include "base/list.h"
#include "kv/session.h"
#include "kvmd/mm/grace.h"
#include "kvmd/mm/magazine.h"
#include "kvmd/mm/pool.h"

struct kvd_core;
struct kvd_image_session;
struct kvd_tenant;

/**
 * struct kvd_attach - one session in one pool: what it holds there
 * @pool: borrowed; NULL = unused entry
 * @seals: pages it sealed that wait for its own steps (P6)
 * @region: owned: refs, then the bitmaps
 * @refs: [nr_pages] references the session holds on each page
 * @held: bit per page with refs != 0
 * @given: bit per extent whose fd the session was given and has not acknowledged
 * @nr_held: pages with refs != 0
 * @drop_word: word of @held where dropping goes on
 */
struct kvd_attach {
	struct kvd_pool *pool;
	struct kvd_batch_set seals;
	struct kvd_region region;
	u16 *refs;
	u64 *held;
	u64 *given;
	u32 nr_held;
	u32 drop_word;
};

#define KVD_LEASE_REFS_MAX 65535u

enum kvd_session_state { KVD_SESSION_LIVE, KVD_SESSION_ENDED };

/**
 * struct kvd_session - one connected process
 * @node: in core->sessions
 * @id: client id, never reused
 * @owner: caller's own object (its connection); borrowed
 * @tenant: borrowed
 * @pid, @name: for people
 * @state: see above
 * @page: session page; hostile; borrowed from the caller until session_reaped()
 * @reader: announce slots
 * @image: its entry in the image, or NULL
 * @attach: open pools; entries do not move
 * @mags: kvmd's side of the magazines
 * @stale_reports: incidents reported
 * @asked_ns, @asking, @stalled: of own/pressure.h
 * @stalled_ns, @stepped_back: since when @stalled, and gave back since; of own/turn.h
 */
struct kvd_session {
	struct list_node node;
	u64 id;
	void *owner;
	struct kvd_core *core;
	struct kvd_tenant *tenant;
	s32 pid;
	char name[KV_NAME_BYTES];
	enum kvd_session_state state;
	struct kv_session_page *page;
	struct kvd_reader reader;
	struct kvd_image_session *image;
	struct kvd_attach attach[KV_POOLS_MAX];
	struct kvd_magazine mags[KV_MAGAZINES];
	u64 stale_reports;
	u64 asked_ns;
	bool asking, stalled;
	u64 stalled_ns;
	bool stepped_back;
};

/* Pages that ended sessions and closed pools give back in one turn. */
#define KVD_DROP_SLICE 1024u

/**
 * struct kvd_session_params - a new session
 * @client_id: never used before under this table_epoch; not 0
 * @tenant: decided from credentials
 * @page: zeroed memory of KV_SESSION_BYTES; the core writes its constants and table_epoch
 * @owner: see struct kvd_session
 * @pid, @name: for people
 * @uid, @role, @cookie: kept in the image; @cookie may be NULL
 */
struct kvd_session_params {
	u64 client_id;
	struct kvd_tenant *tenant;
	struct kv_session_page *page;
	void *owner;
	s32 pid;
	const char *name;
	u32 uid;
	u32 role;
	const u8 *cookie;
};

/** kvd_session_create() - Return: 0; -ENOMEM; -EINVAL client_id 0 or in use */
int kvd_session_create(struct kvd_core *core, const struct kvd_session_params *p,
		       struct kvd_session **ret_session);

/**
 * kvd_session_end() - hang-up, protocol fault or a good bye: P8 in order
 * @why: a few words for log and history
 *
 * table_epoch 0, full barrier; magazines are recalled; ACTIVE pages die, pins drop.
 * Extents count as given until the session is reaped. Twice is a no-op. May reap at once.
 */
void kvd_session_end(struct kvd_session *s, const char *why);

/**
 * kvd_session_work_ended() - proof that no GPU work of the session is left
 *
 * On the host backend: its pidfd is readable. Ends the session if it has not ended. The
 * session is reaped by this call.
 */
void kvd_session_work_ended(struct kvd_session *s);

/** kvd_session_nr_held() - pages it holds, stocked ones included */
u32 kvd_session_nr_held(const struct kvd_session *s);

/** kvd_session_find() - by client id, or NULL; ENDED ones too */
struct kvd_session *kvd_session_find(struct kvd_core *core, u64 client_id);

/** kvd_session_attach() - the session's part of pool @pool_id, or NULL if it has not
 * opened it */
struct kvd_attach *kvd_session_attach(struct kvd_session *s, u32 pool_id);

/**
 * struct kvd_refusal - why a layout was refused
 * @field: name of the field in struct kv_layout, or "scales"
 * @text: field, value and reason
 */
struct kvd_refusal {
	char field[32];
	char text[128];
};

/**
 * kvd_session_open_pool() - open the pool of a layout in the session's domain
 * @scales: layout->nr_scales values
 * @ret_attach: the session's part; ret_attach->pool is the pool
 * @ret_why: filled on -EINVAL
 *
 * A pool of the same model, LoRA, kind, dtype and scale kind must agree in every other
 *	field. LIVE extents are announced through notify->extent_added() before this returns.
 *	Opening it twice answers the same pool.
 *
 * Return: 0; -EINVAL refused, see @ret_why; -EMFILE KV_POOLS_MAX reached; -ENOSPC;
 *	-E2BIG; -ENOMEM.
 */
int kvd_session_open_pool(struct kvd_session *s, const struct kv_layout *layout,
			  const float *scales, struct kvd_attach **ret_attach,
			  struct kvd_refusal *ret_why);

/**
 * kvd_session_close_pool() - free everything the session holds in a pool
 *
 * At most KVD_DROP_SLICE pages in one call, so that others are served in between.
 * Its extents count as unmapped: the caller has been told by POOL_CLOSE.
 * Return: 0; -EAGAIN there is more: call again in the next turn; -ENOENT it is not open.
 */
int kvd_session_close_pool(struct kvd_session *s, u32 pool_id);

/**
 * kvd_session_unmapped() - the session acknowledges EXTENT_REMOVED
 *
 * Return: 0; -ENOENT no such extent was given to it; -EINVAL it is not being removed.
 */
int kvd_session_unmapped(struct kvd_session *s, u32 pool_id,
			 const struct kv_extent_ref *ref);

/** kvd_attach_layout() - set up @a's pointers into @region, which becomes its own.
 * Return: 0; -EBADMSG it is too small */
int kvd_attach_layout(struct kvd_attach *a, struct kvd_pool *pool,
		      const struct kvd_region *region);

/** kvd_session_give_extents() - give LIVE extents that the session was not given */
void kvd_session_give_extents(struct kvd_session *s, struct kvd_attach *a);

/** kvd_session_extent_live() - kvd_mm_ops.extent_live */
void kvd_session_extent_live(struct kvd_pool *pool, u32 index);

/** kvd_session_extent_draining() - kvd_mm_ops.extent_draining */
void kvd_session_extent_draining(struct kvd_pool *pool, u32 index);

/** kvd_session_extent_gone() - kvd_mm_ops.extent_gone */
void kvd_session_extent_gone(struct kvd_pool *pool, u32 index);

/**
 * kvd_session_turn() - drop more of what ended sessions held, reap those that are quiet
 *
 * Return: true when there is more to drop.
 */
bool kvd_session_turn(struct kvd_core *core);

#endif /* KVD_SESSION_H */
