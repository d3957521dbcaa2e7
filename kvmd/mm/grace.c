/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/grace.c - grace periods (P6, P8). See grace.h for the rule.   (tour 11/12)
 *
 * Loop thread only; the slots are written by clients at the same time.
 */
#include "kvmd/mm/grace.h"
#include <string.h>
#include "base/mutant.h"
#include "kvmd/mm/pool.h"

#define ALL_SLOTS ((1u << KV_ANNOUNCE_SLOTS) - 1)

static int grace_raise(struct kvd_mm *mm)
{
	struct kvd_grace *g = &mm->grace;
	int r;

	r = mm->env->save(mm->env->arg, KVD_SAVED_GRACE, g->epoch + KVD_GRACE_AHEAD);
	if (r)
		return r;
	g->bound = g->epoch + KVD_GRACE_AHEAD;
	return 0;
}

int kvd_grace_init(struct kvd_mm *mm, u64 saved_epoch)
{
	struct kvd_grace *g = &mm->grace;

	g->epoch = saved_epoch && !KV_MUTANT(epoch_reset) ? saved_epoch : 1;
	g->bound = g->epoch;
	g->nr_pages[KVD_BATCH_QUARANTINE] = 0;
	g->nr_pages[KVD_BATCH_SEAL] = 0;
	g->scans = 0;
	list_init(&g->open);
	list_init(&g->waiting);
	return grace_raise(mm);
}

void kvd_reader_group_init(struct kvd_reader_group *g, u64 epoch)
{
	list_init(&g->readers);
	g->quiet = epoch;
	g->scanned = 0;
	g->looked = 0;
}

void kvd_reader_add(struct kvd_mm *mm, struct kvd_reader_group *g, struct kvd_reader *r,
		    struct kv_session_page *page)
{
	memset(r, 0, sizeof(*r));
	r->group = g;
	r->page = page;
	/* It had no step before now, so it is past every epoch published so far. */
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		r->seen[i] = mm->grace.epoch;
	r->quiet = mm->grace.epoch;
	list_add_tail(&g->readers, &r->node);
}

void kvd_reader_adopt(struct kvd_mm *mm, struct kvd_reader_group *g, struct kvd_reader *r,
		      struct kv_session_page *page)
{
	kvd_reader_add(mm, g, r, page);
	memset(r->seen, 0, sizeof(r->seen));
	r->quiet = 0;
	/* The dead kvmd may have set it; the first scan clears or sets it anew. */
	r->wake = kv_load_relaxed64(&page->wake.word) != 0;
	g->quiet = 0;
}

void kvd_reader_del(struct kvd_mm *mm, struct kvd_reader *r)
{
	kv_assert(kvd_reader_quiet(r));
	list_del(&r->node);
	r->group = NULL;
}

void kvd_reader_end(struct kvd_reader *r)
{
	r->ended = true;
	if (KV_MUTANT(trust_hangup))
		r->gone = true;
}

void kvd_reader_gone(struct kvd_mm *mm, struct kvd_reader *r)
{
	kv_assert(r->ended);
	r->gone = true;
	kvd_reader_scan(mm, r);
}

bool kvd_reader_quiet(const struct kvd_reader *r)
{
	return r->gone || (r->ended && r->quiet_slots == ALL_SLOTS);
}

void kvd_reader_scan(struct kvd_mm *mm, struct kvd_reader *r)
{
	u64 epoch = mm->grace.epoch, quiet = epoch, word;

	r->busy_slots = 0;
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++) {
		if (r->gone || (r->quiet_slots & (1u << i)) ||
		    (i && KV_MUTANT(first_slot_only))) {
			r->seen[i] = epoch;
			continue;
		}
		word = kv_load_acquire64(&r->page->slots[i].word);
		if (word == KV_SLOT_IDLE) {
			r->seen[i] = epoch;
			if (r->ended)
				r->quiet_slots |= 1u << i;
			continue;
		}
		r->busy_slots |= 1u << i;
		/* An epoch that was never published cannot have been announced. */
		word = KV_MIN(word, epoch);
		r->seen[i] = KV_MAX(r->seen[i], word);
		quiet = KV_MIN(quiet, r->seen[i]);
	}
	if (quiet != r->quiet)
		r->busy_since_ns = 0;
	r->quiet = quiet;
}

/* After this store and a full barrier, a retire either kicks us or is seen by the next
 * scan. */
static void reader_set_wake(struct kvd_reader *r, bool wake)
{
	if (r->wake == wake || KV_MUTANT(no_wake))
		return;
	r->wake = wake;
	kv_store_relaxed64(&r->page->wake.word, wake);
}

static void group_scan(struct kvd_mm *mm, struct kvd_reader_group *g)
{
	u64 epoch = mm->grace.epoch, quiet = epoch;
	struct kvd_reader *r;
	bool blocked = false;

	list_for_each_entry (r, &g->readers, node) {
		kvd_reader_scan(mm, r);
		if (r->quiet < epoch && !r->wake) {
			reader_set_wake(r, true);
			blocked = true;
		}
	}
	if (blocked)
		kv_full_barrier(); /* pairs with kv_slot_retire() */
	list_for_each_entry (r, &g->readers, node) {
		if (blocked && r->quiet < epoch)
			kvd_reader_scan(mm, r);
		if (r->quiet == epoch) {
			reader_set_wake(r, false);
			r->busy_since_ns = 0;
			r->stalled = false;
		} else if (!r->busy_since_ns) {
			r->busy_since_ns = mm->now_ns;
			r->stalled = false;
		}
		quiet = KV_MIN(quiet, r->quiet);
	}
	g->quiet = quiet;
}

/* Nothing waits for this domain's steps: what its readers do is nobody's business. */
static void group_calm(struct kvd_reader_group *g)
{
	struct kvd_reader *r;

	list_for_each_entry (r, &g->readers, node) {
		reader_set_wake(r, false);
		r->busy_since_ns = 0;
		r->stalled = false;
	}
}

void kvd_grace_stalls(struct kvd_mm *mm, struct kvd_reader_group *g)
{
	struct kvd_reader *r;

	if (g->scanned != mm->grace.scans || !kvd_grace_nr_waiting(&mm->grace)) {
		group_calm(g);
		return;
	}
	list_for_each_entry (r, &g->readers, node) {
		if (!r->busy_since_ns || r->stalled || r->quiet == mm->grace.epoch)
			continue;
		if (mm->now_ns - r->busy_since_ns < mm->stall_ns)
			continue;
		r->stalled = true;
		mm->ops->stalled(mm, r);
	}
}

void kvd_batch_set_init(struct kvd_batch_set *set, struct kvd_pool *pool,
			struct kvd_reader *reader, enum kvd_batch_kind kind)
{
	set->open = NULL;
	for (u32 i = 0; i < KVD_BATCH_SET; i++) {
		struct kvd_batch *b = &set->b[i];

		list_init(&b->node);
		b->set = set;
		b->pool = pool;
		b->reader = reader;
		b->kind = kind;
		b->epoch = 0;
		kvd_pfn_list_init(&b->pages);
	}
}

bool kvd_batch_set_empty(const struct kvd_batch_set *set)
{
	for (u32 i = 0; i < KVD_BATCH_SET; i++) {
		if (set->b[i].pages.nr)
			return false;
	}
	return true;
}

/* Open a batch of a set: an unused one, or the youngest again. */
static struct kvd_batch *set_open(struct kvd_batch_set *set, struct kvd_grace *g)
{
	struct kvd_batch *unused = NULL, *youngest = NULL;

	for (u32 i = 0; i < KVD_BATCH_SET; i++) {
		struct kvd_batch *b = &set->b[i];

		if (list_empty(&b->node))
			unused = b;
		else if (!youngest || b->epoch > youngest->epoch)
			youngest = b;
	}
	if (!unused) {
		unused = youngest;
		list_del(&unused->node);
	}
	unused->epoch = 0;
	list_add_tail(&g->open, &unused->node);
	set->open = unused;
	return unused;
}

/* A batch leaves the lists; it may have been the open one. */
static void batch_unlist(struct kvd_batch *b)
{
	list_del(&b->node);
	if (b->set->open == b)
		b->set->open = NULL;
}

struct kvd_batch *kvd_grace_open(struct kvd_batch_set *set)
{
	return set->open ? set->open : set_open(set, &set->b[0].pool->mm->grace);
}

static u32 batch_pop(struct kvd_batch *b)
{
	u32 pfn = kvd_pfn_list_pop(b->pool->links, &b->pages);

	kv_assert(pfn != KVD_PFN_NONE && b->pool->links[pfn].batch == b);
	b->pool->links[pfn].batch = NULL;
	b->pool->mm->grace.nr_pages[b->kind]--;
	return pfn;
}

void kvd_grace_cancel(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_batch *b = pool->links[pfn].batch;

	kv_assert(b && b->pool == pool && b->kind == KVD_BATCH_SEAL);
	kvd_pfn_list_del(pool->links, &b->pages, pfn);
	pool->links[pfn].batch = NULL;
	pool->mm->grace.nr_pages[b->kind]--;
	if (!b->pages.nr)
		batch_unlist(b);
}

void kvd_batch_set_move(struct kvd_batch_set *from, struct kvd_batch_set *to)
{
	for (u32 i = 0; i < KVD_BATCH_SET; i++) {
		struct kvd_batch *b = &from->b[i];

		while (b->pages.nr)
			kvd_grace_add(to, batch_pop(b));
		batch_unlist(b);
	}
}

/* New epoch for the open batches; published in every table after its log_head (P2, P6).
 */
static bool epoch_advance(struct kvd_mm *mm)
{
	struct kvd_grace *g = &mm->grace;
	struct kvd_batch *b, *tmp;

	if (g->epoch + 1 >= g->bound && grace_raise(mm)) {
		mm->env->log(mm->env->arg, 3,
			     "grace: cannot save the epoch; pages stay in quarantine");
		return false;
	}
	g->epoch++;
	for (u32 i = 0; i < mm->pools_end; i++) {
		if (!mm->pools[i])
			continue;
		kvd_table_publish(&mm->pools[i]->table);
		kv_store_release64(&mm->pools[i]->table.shared->grace_epoch.word,
				   g->epoch);
	}
	list_for_each_entry_safe (b, tmp, &g->open, node) {
		b->epoch = g->epoch;
		batch_unlist(b);
		list_add_tail(&g->waiting, &b->node);
	}
	return true;
}

static u32 batch_finish(struct kvd_mm *mm, struct kvd_batch *b, u32 budget)
{
	u32 done = 0;

	if (b->kind == KVD_BATCH_QUARANTINE) {
		done = kvd_pool_release(b->pool, &b->pages, budget);
		mm->grace.nr_pages[b->kind] -= done;
	}
	for (; b->pages.nr && done < budget; done++)
		mm->ops->seal_done(b->pool, batch_pop(b));
	if (!b->pages.nr)
		batch_unlist(b);
	return done;
}

/*
 * Have the steps that @b waits for retired? What a group was seen past it stays past, so
 * that a batch that is let go over several turns costs one look at the slots; one look a
 * call is enough for all batches of a group.
 */
static bool batch_over(struct kvd_mm *mm, const struct kvd_batch *b)
{
	struct kvd_reader_group *group = b->pool->group;
	const u64 *quiet = b->reader ? &b->reader->quiet : &group->quiet;

	group->scanned = mm->grace.scans;
	if (b->epoch <= *quiet)
		return true;
	if (group->looked == mm->grace.scans)
		return false;
	group->looked = mm->grace.scans;
	kv_full_barrier(); /* pairs with kv_slot_announce() */
	group_scan(mm, group);
	return b->epoch <= *quiet;
}

/* The hooks called from here add nothing to a batch, so the walk over the list is safe.
 */
static bool advance(struct kvd_mm *mm, u32 budget)
{
	struct kvd_grace *g = &mm->grace;
	struct kvd_batch *b, *tmp;

	if (list_empty(&g->open) && list_empty(&g->waiting))
		return false;
	if (!list_empty(&g->open) && !epoch_advance(mm))
		return false;
	g->scans++;
	list_for_each_entry_safe (b, tmp, &g->waiting, node) {
		if ((g->held && b->kind == KVD_BATCH_QUARANTINE) || !batch_over(mm, b))
			continue;
		budget -= batch_finish(mm, b, budget);
		if (b->pages.nr)
			return true;
	}
	return false;
}

bool kvd_grace_advance(struct kvd_mm *mm)
{
	return advance(mm, KVD_GRACE_SLICE);
}

bool kvd_grace_turn(struct kvd_mm *mm)
{
	u32 nr = kvd_grace_nr_waiting(&mm->grace);

	if (nr > KVD_GRACE_FEW)
		return advance(mm, KV_MIN(nr - KVD_GRACE_FEW / 2, KVD_GRACE_SLICE));
	return advance(mm, KVD_GRACE_SHORT);
}
