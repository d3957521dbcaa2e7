/* SPDX-License-Identifier: Apache-2.0 */
/* own/spill.c - see spill.h. Loop thread only. */
#include "kvmd/own/spill.h"

#include <errno.h>
#include <string.h>

#include "base/mutant.h"
#include "kvmd/own/core.h"

int kvd_spill_evict(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_core *core = kvd_core_of(pool->mm);
	int r = 0;

	if (core->cfg.spill)
		r = core->cfg.spill->evict(core->cfg.spill_arg, pool, pfn);
	if (!r)
		kvd_prefix_evict(pool, pfn);
	return r < 0 ? r : 0;
}

void kvd_spill_begin(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_frame *f = &pool->frames[pfn];

	kv_assert(f->state == KVD_CACHED && f->refs == 0);
	kvd_lru_del(pool, pfn);
	kvd_prefix_remove(pool, pfn);
	kvd_frame_set(pool, pfn, KVD_SPILLING, KVD_EV_SPILL, 0);
	pool->mm->accounts[f->tenant]->quarantine_bytes += pool->geo.stride_bytes;
	/* What goes wrong if the copier's frame may be used again (cases O21, O24). */
	if (KV_MUTANT(spill_not_held))
		kvd_spill_end(pool, pfn);
}

void kvd_spill_end(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_frame *f = &pool->frames[pfn];

	if (KV_MUTANT(spill_not_held) && f->state != KVD_SPILLING)
		return;
	kv_assert(f->state == KVD_SPILLING);
	/* The kill counts them again. */
	pool->mm->accounts[f->tenant]->quarantine_bytes -= pool->geo.stride_bytes;
	kvd_pool_kill(pool, pfn, KVD_EV_EVICT, 0);
	kvd_table_publish(&pool->table);
}

int kvd_restore_begin(struct kvd_tenant *tenant, struct kvd_pool *pool, u32 *ret_pfn)
{
	struct kvd_frame *f;
	u32 pfn;
	int r;

	if (tenant->account.draining && !KV_MUTANT(drain_grants))
		return KV_QUOTA;
	r = kvd_charge_try(tenant, pool, 1);
	if (r)
		return r;
	r = kvd_pool_nr_free(pool) ? 0 : kvd_extent_grow(pool);
	if (r) {
		kvd_charge_drop(tenant, pool, 1);
		return r;
	}
	pfn = kvd_freelist_take(pool, false);
	f = &pool->frames[pfn];
	kv_assert(f->state == KVD_FREE && f->refs == 0 && !kv_tag_live(f->tag));
	kvd_frame_touch(pool, pfn);
	f->tenant = tenant->index;
	if (!KV_MUTANT(restored_page_is_clean)) {
		f->owner = KVD_OWNER_TIER;
		f->flags = KVD_FRAME_FOREIGN;
	}
	kvd_frame_set(pool, pfn, KVD_RESTORING, KVD_EV_RESTORE, 0);
	*ret_pfn = pfn;
	return 0;
}

void kvd_restore_fail(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_frame *f = &pool->frames[pfn];

	/* Its tag was never live: no client has read or written it. */
	kv_assert(f->state == KVD_RESTORING && !kv_tag_live(f->tag));
	kvd_frame_set(pool, pfn, KVD_QUARANTINE, KVD_EV_EVICT, 0);
	pool->mm->accounts[f->tenant]->quarantine_bytes += pool->geo.stride_bytes;
	kvd_grace_add(&pool->quarantine, pfn);
}

int kvd_restore_end(struct kvd_pool *pool, u32 pfn, const struct kvd_restored *r)
{
	struct kvd_frame *f = &pool->frames[pfn];
	u32 parent = KVD_PFN_NONE;

	kv_assert(f->state == KVD_RESTORING);
	if (kvd_prefix_find_key(pool, r->key) != KVD_PFN_NONE ||
	    kvd_gens_reserve(&pool->mm->gens, 1)) {
		kvd_restore_fail(pool, pfn);
		return KV_STALE;
	}
	if (!r->root)
		parent = kvd_prefix_find_key(pool, r->parent_key);
	kvd_frame_touch(pool, pfn);
	f->tag = kv_tag_make(kvd_gens_live(&pool->mm->gens), KV_TAG_LIVE | KV_TAG_SEALED);
	f->crc32c = r->crc32c;
	kvd_prefix_insert(pool, pfn, r->key, r->tokens, parent, r->root);
	f->flags |= KVD_FRAME_FINDABLE;
	kvd_frame_set(pool, pfn, KVD_CACHED, KVD_EV_RESTORED, 0);
	kvd_table_set(&pool->table, pfn, f->tag);
	kvd_lru_add(pool, pfn);
	kvd_table_publish(&pool->table);
	return 0;
}
