/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/seal.c - SEAL: full pages become immutable, and findable after the grace period of
 * the sealing session (P6). See prefix.h for keys and cursors.
 *
 * Keys are hashed in slices first; then one act checks every page and seals them all, or
 * none. Loop thread only.
 */
#include <errno.h>
#include <string.h>
#include "base/mutant.h"
#include "kvmd/own/core.h"
#include "kvmd/own/prefix.h"

int kvd_seal_start(struct kvd_seal_op *op)
{
	const struct kv_seal_arg *arg = &op->arg;

	if (op->nr == 0 || op->nr > KV_BATCH_MAX ||
	    (arg->flags & ~(KV_SEAL_ROOT | KV_SEAL_AGAIN)) || arg->reserved[0] ||
	    arg->reserved[1] || arg->reserved[2])
		return -EINVAL;
	for (u32 i = 0; i < op->nr; i++) {
		if (op->pages[i].pfn >= op->a->pool->geo.nr_pages)
			return -EINVAL;
	}
	op->hashed = 0;
	memset(op->rets, 0, op->nr * sizeof(*op->rets));
	if ((arg->flags & KV_SEAL_ROOT) || KV_MUTANT(relative_parent))
		memcpy(op->key, op->a->pool->root_key, KV_KEY_BYTES);
	else
		memcpy(op->key, arg->parent_key, KV_KEY_BYTES);
	return 0;
}

/*
 * Held for writing; or sealed already by this very session, which asks again because kvmd
 * went before it had answered (KV_SEAL_AGAIN).
 */
static bool may_seal(const struct kvd_seal_op *op, const struct kvd_frame *f)
{
	return f->state == KVD_ACTIVE ||
	       ((op->arg.flags & KV_SEAL_AGAIN) && f->state == KVD_SEALED &&
		f->owner == op->s->id);
}

/* Every page is held for writing, and named once. */
static bool seal_valid(struct kvd_seal_op *op)
{
	struct kvd_pool *pool = op->a->pool;
	u64 mark = ++pool->mm->lru_clock;

	for (u32 i = 0; i < op->nr; i++) {
		u32 pfn = op->pages[i].pfn;

		if (!kvd_lease_holds(op->s, op->a, pfn, op->pages[i].tag) &&
		    !KV_MUTANT(seal_any_page))
			return false;
		if (!may_seal(op, &pool->frames[pfn]) || pool->links[pfn].stamp == mark)
			return false;
		pool->links[pfn].stamp = mark;
	}
	return true;
}

/* What SEAL's grace period ends in; also at once where the rule is taken out. */
void kvd_prefix_seal_done(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_frame *f = &pool->frames[pfn];

	kv_assert(f->state == KVD_SEALED && f->refs > 0);
	kv_assert((f->flags & KVD_FRAME_SEALING) && (f->flags & KVD_FRAME_INDEXED));
	kvd_frame_touch(pool, pfn);
	f->flags &= (u8)~KVD_FRAME_SEALING;
	f->flags |= KVD_FRAME_FINDABLE;
	f->refs--;
	if (f->refs) {
		kvd_frame_set(pool, pfn, KVD_SEALED, KVD_EV_FINDABLE, 0);
		return;
	}
	kvd_frame_set(pool, pfn, KVD_CACHED, KVD_EV_FINDABLE, 0);
	kvd_lru_add(pool, pfn);
}

/* Seal one page; return the pfn that stands for it in the index. */
static u32 seal_page(struct kvd_seal_op *op, u32 i, u32 parent, bool root)
{
	struct kvd_pool *pool = op->a->pool;
	const u32 *tokens = op->tokens + (u64)i * KV_PAGE_TOKENS;
	const u8 *key = op->rets[i].key;
	u32 pfn = op->pages[i].pfn, dup;
	struct kvd_frame *f = &pool->frames[pfn];

	dup = kvd_prefix_find(pool, key, tokens, parent, root);
	if (f->state == KVD_SEALED) { /* KV_SEAL_AGAIN */
		if (dup != pfn)
			op->rets[i].flags |= KV_SEALED_DUP;
		return dup != KVD_PFN_NONE ? dup : pfn;
	}
	kvd_frame_touch(pool, pfn);
	f->tag |= KV_TAG_SEALED;
	f->crc32c = op->pages[i].crc32c;
	/* Written from end to end by its owner: nothing of another session is left in it.
	 */
	f->flags &= (u8)~KVD_FRAME_FOREIGN;
	if (dup != KVD_PFN_NONE && dup != pfn) {
		op->rets[i].flags |= KV_SEALED_DUP;
	} else if (dup != pfn) {
		kvd_prefix_insert(pool, pfn, key, tokens, parent, root);
		f->flags |= KVD_FRAME_SEALING;
		f->refs++; /* SEAL's grace period holds one */
		dup = pfn;
	}
	kvd_frame_set(pool, pfn, KVD_SEALED, KVD_EV_SEAL, op->s->id);
	kvd_table_set(&pool->table, pfn, f->tag);
	pool->nr_seals++;
	if (!(f->flags & KVD_FRAME_SEALING))
		return dup;
	if (KV_MUTANT(seal_no_grace))
		kvd_prefix_seal_done(pool, pfn);
	else
		kvd_grace_add(&op->a->seals, pfn);
	return dup;
}

/* What goes wrong if entries are made before the run is known to be good (case O30). */
static void index_early(struct kvd_seal_op *op)
{
	for (u32 i = 0; i < op->nr; i++) {
		u32 pfn = op->pages[i].pfn;

		if (!kvd_lease_holds(op->s, op->a, pfn, op->pages[i].tag))
			break;
		kvd_prefix_insert(op->a->pool, pfn, op->rets[i].key,
				  op->tokens + (u64)i * KV_PAGE_TOKENS, KVD_PFN_NONE,
				  i == 0);
		op->a->pool->frames[pfn].flags |= KVD_FRAME_FINDABLE;
	}
}

static int seal_commit(struct kvd_seal_op *op)
{
	struct kvd_pool *pool = op->a->pool;
	bool root = op->arg.flags & KV_SEAL_ROOT;
	u32 parent = KVD_PFN_NONE;

	if (KV_MUTANT(index_before_commit))
		index_early(op);
	if (!seal_valid(op))
		return KV_STALE;
	if (!root)
		parent = kvd_prefix_find_key(pool, op->arg.parent_key);
	for (u32 i = 0; i < op->nr; i++) {
		parent = seal_page(op, i, parent, root);
		root = false;
	}
	kvd_table_publish(&pool->table);
	return 0;
}

int kvd_seal_step(struct kvd_seal_op *op)
{
	u32 end = KV_MIN(op->nr, op->hashed + KVD_HASH_SLICE);

	kv_assert(op->s->state == KVD_SESSION_LIVE && op->a->pool);
	for (; op->hashed < end; op->hashed++) {
		kvd_prefix_pool_key(op->a->pool, op->key,
				    op->tokens + (u64)op->hashed * KV_PAGE_TOKENS,
				    op->rets[op->hashed].key);
		memcpy(op->key, op->rets[op->hashed].key, KV_KEY_BYTES);
	}
	return op->hashed < op->nr ? -EAGAIN : seal_commit(op);
}
