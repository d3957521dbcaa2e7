/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/room.c - slots are taken: whose page goes for it, and how segments pass from one
 * size to another. See space.h.
 *
 * Loop thread only.
 */
#include "base/mutant.h"
#include "kvmd/tier/space_priv.h"

/* Clean slots are looked for among so many of the oldest before a dirty one is dropped. */
#define CLEAN_STEPS  16u
/* More than can be written at once. */
#define VICTIM_STEPS 1024u

/* ---------------------------------------------------------------- who gives */

static bool donor_ok(const struct kvd_space *sp, u32 i, u16 tenant, u64 bytes)
{
	const struct kvd_space_account *a = &sp->acct[i];

	return i == tenant || a->used_bytes >= a->min_bytes + bytes ||
	       KV_MUTANT(tier_min_not_kept);
}

/* As mm/reclaim.c's: above high first, then furthest above min for its weight; none of @asked. */
static struct kvd_slot_list *donor(const struct kvd_space *sp, struct kvd_space_class *c,
				   u16 tenant, const bool *asked)
{
	struct kvd_slot_list *best = NULL;
	u64 best_score = 0;
	bool best_high = false;

	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		const struct kvd_space_account *a = &sp->acct[i];
		u64 score;
		bool high;

		if (asked[i] || !c->lru[i].nr || !donor_ok(sp, i, tenant, c->slot_bytes))
			continue;
		high = a->used_bytes > a->high_bytes;
		score = (a->used_bytes - KV_MIN(a->used_bytes, a->min_bytes)) /
			KV_MAX(a->weight, 1u);
		if (!best || (high && !best_high) ||
		    (high == best_high && score > best_score)) {
			best = &c->lru[i];
			best_score = score;
			best_high = high;
		}
	}
	return best;
}

/* The oldest that nobody reads, or a clean one that is not much younger: dropping it loses
 * nothing. */
static u32 victim(const struct kvd_space *sp, const struct kvd_slot_list *lru)
{
	u32 id = lru->head, oldest = KVD_SLOT_NONE;

	for (u32 i = 0; i < VICTIM_STEPS && id != KVD_SLOT_NONE; i++) {
		const struct kvd_slot *s = &sp->slots[id];

		if (!s->readers && s->clean)
			return id;
		if (!s->readers && oldest == KVD_SLOT_NONE)
			oldest = id;
		if (oldest != KVD_SLOT_NONE && i >= CLEAN_STEPS)
			break;
		id = s->next;
	}
	return oldest;
}

static bool evict(struct kvd_space *sp, u32 id)
{
	if (id == KVD_SLOT_NONE)
		return false;
	sp->evictions++;
	kvd_space_drop(sp, id);
	return true;
}

/* -------------------------------------------------------------- segments */

static void class_empty_segment(struct kvd_space *sp, struct kvd_space_class *c, u32 seg)
{
	u32 first = seg * sp->slots_per_segment;

	kv_assert(!sp->segments[seg].nr_used);
	for (u32 i = 0; i < c->per_segment; i++) {
		kvd_space_list_pull(sp, &c->free, first + i);
		sp->slots[first + i].class = 0;
	}
	c->nr_segments--;
	sp->segments[seg].class = 0;
}

static void class_add_segment(struct kvd_space *sp, u32 class, u32 seg)
{
	struct kvd_space_class *c = &sp->classes[class];
	u32 first = seg * sp->slots_per_segment;

	kv_assert(!sp->segments[seg].class);
	sp->segments[seg].class = (u8)(class + 1);
	c->nr_segments++;
	for (u32 i = c->per_segment; i-- > 0;) {
		struct kvd_slot *s = &sp->slots[first + i];

		s->class = (u8)(class + 1);
		s->state = KVD_SLOT_FREE;
		s->clean = true;
		kvd_space_list_push(sp, &c->free, first + i, false);
	}
}

/* All of a segment's pages may go, also for those who pay for them. */
static bool segment_can_go(const struct kvd_space *sp, u32 seg, u16 tenant)
{
	u32 first = seg * sp->slots_per_segment;
	const struct kvd_segment *s = &sp->segments[seg];
	const struct kvd_space_class *c = &sp->classes[s->class - 1];

	if (s->nr_busy)
		return false;
	for (u32 i = 0; s->nr_used && i < c->per_segment; i++) {
		if (sp->slots[first + i].state != KVD_SLOT_FREE &&
		    !donor_ok(sp, sp->slots[first + i].tenant, tenant, sp->segment_bytes))
			return false;
	}
	return true;
}

/* A segment of another class that costs least. */
static bool segment_steal(struct kvd_space *sp, u32 class, u16 tenant)
{
	u32 best = KVD_SLOT_NONE, first;
	struct kvd_space_class *c;

	for (u32 i = 0; i < sp->nr_segments; i++) {
		const struct kvd_segment *s = &sp->segments[i];

		if (!s->class || s->class == class + 1 ||
		    (best != KVD_SLOT_NONE && s->nr_used >= sp->segments[best].nr_used))
			continue;
		if (segment_can_go(sp, i, tenant))
			best = i;
	}
	if (best == KVD_SLOT_NONE)
		return false;
	c = &sp->classes[sp->segments[best].class - 1];
	first = best * sp->slots_per_segment;
	for (u32 i = 0; i < c->per_segment; i++) {
		if (sp->slots[first + i].state == KVD_SLOT_READY)
			evict(sp, first + i);
	}
	class_empty_segment(sp, c, best);
	class_add_segment(sp, class, best);
	return true;
}

/* Class of a slot size, a new one if need be. Return: index; KVD_SPACE_CLASSES: none. */
static u32 class_get(struct kvd_space *sp, u64 slot_bytes)
{
	u32 unused = KVD_SPACE_CLASSES;

	if (slot_bytes < KVD_SLOT_BYTES_MIN || slot_bytes > sp->segment_bytes)
		return KVD_SPACE_CLASSES;
	for (u32 i = 0; i < KVD_SPACE_CLASSES; i++) {
		struct kvd_space_class *c = &sp->classes[i];

		if (c->nr_segments && c->slot_bytes == slot_bytes)
			return i;
		if (!c->nr_segments && unused == KVD_SPACE_CLASSES)
			unused = i;
	}
	if (unused == KVD_SPACE_CLASSES)
		return unused;
	sp->classes[unused].slot_bytes = slot_bytes;
	sp->classes[unused].per_segment = (u32)(sp->segment_bytes / slot_bytes);
	sp->classes[unused].free = KVD_SLOT_LIST_EMPTY;
	for (u32 t = 0; t < KVD_TENANTS_MAX; t++)
		sp->classes[unused].lru[t] = KVD_SLOT_LIST_EMPTY;
	return unused;
}

/* What a tenant at its max gives first: pages of this size, else of any. */
static u32 own_victim(struct kvd_space *sp, struct kvd_space_class *c, u16 tenant)
{
	u32 id = c->nr_segments ? victim(sp, &c->lru[tenant]) : KVD_SLOT_NONE;

	for (u32 i = 0; i < KVD_SPACE_CLASSES && id == KVD_SLOT_NONE; i++)
		if (sp->classes[i].nr_segments)
			id = victim(sp, &sp->classes[i].lru[tenant]);
	return id;
}

/* Within the tenant's budget, at the cost of its own oldest pages. */
static bool budget(struct kvd_space *sp, struct kvd_space_class *c, u16 tenant)
{
	struct kvd_space_account *a = &sp->acct[tenant];

	if (KV_MUTANT(tier_no_budget))
		return true;
	while (a->used_bytes + c->slot_bytes > a->max_bytes) {
		if (c->slot_bytes > a->max_bytes || !evict(sp, own_victim(sp, c, tenant)))
			return false;
	}
	return true;
}

static bool room(struct kvd_space *sp, u32 class, u16 tenant)
{
	struct kvd_space_class *c = &sp->classes[class];
	bool asked[KVD_TENANTS_MAX] = {false};
	struct kvd_slot_list *lru;

	if (c->free.nr)
		return true;
	if (sp->nr_free_segments) {
		class_add_segment(sp, class, sp->free_segments[--sp->nr_free_segments]);
		return true;
	}
	lru = c->nr_segments ? donor(sp, c, tenant, asked) : NULL;
	if (!lru)
		return segment_steal(sp, class, tenant);
	/* All of one's may be written at the moment: then the next one gives. */
	while (lru && !evict(sp, victim(sp, lru))) {
		asked[lru - c->lru] = true;
		lru = donor(sp, c, tenant, asked);
	}
	return lru != NULL;
}

static void slot_take(struct kvd_space *sp, u32 id, const struct kvd_slot_name *name,
		      u16 tenant)
{
	struct kvd_slot *s = &sp->slots[id];
	struct kvd_space_class *c = kvd_space_class_of(sp, id);

	kv_assert(s->state == KVD_SLOT_FREE && !s->readers);
	kvd_space_list_pull(sp, &c->free, id);
	s->state = KVD_SLOT_FILLING;
	s->tenant = tenant;
	s->clean = true;
	s->op = 0;
	kvd_space_segment_of(sp, id)->nr_used++;
	kvd_space_slot_busy(sp, id, true);
	sp->acct[tenant].used_bytes += c->slot_bytes;
	sp->acct[tenant].nr++;
	sp->used_bytes += c->slot_bytes;
	sp->nr_used++;
	kvd_space_index_add(sp, id, name);
}

u32 kvd_space_take(struct kvd_space *sp, const struct kvd_slot_name *name, u16 tenant,
		   u64 slot_bytes)
{
	u32 class = class_get(sp, slot_bytes), id;

	kv_assert(!(slot_bytes % 4096) && tenant < KVD_TENANTS_MAX);
	if (class == KVD_SPACE_CLASSES || !budget(sp, &sp->classes[class], tenant) ||
	    !room(sp, class, tenant))
		return KVD_SLOT_NONE;
	id = sp->classes[class].free.head;
	slot_take(sp, id, name, tenant);
	return id;
}

/* The journal's last word on a segment counts: what an earlier class left there is gone. */
static void segment_clear(struct kvd_space *sp, u32 seg)
{
	struct kvd_space_class *c = &sp->classes[sp->segments[seg].class - 1];
	u32 first = seg * sp->slots_per_segment;

	for (u32 i = 0; i < c->per_segment; i++) {
		if (sp->slots[first + i].state != KVD_SLOT_FREE)
			kvd_space_drop(sp, first + i);
	}
	class_empty_segment(sp, c, seg);
}

static bool segment_for(struct kvd_space *sp, u32 class, u32 seg)
{
	if (sp->segments[seg].class == class + 1)
		return true;
	if (sp->segments[seg].class) {
		segment_clear(sp, seg);
	} else {
		u32 i = 0;

		while (i < sp->nr_free_segments && sp->free_segments[i] != seg)
			i++;
		if (i == sp->nr_free_segments)
			return false;
		sp->free_segments[i] = sp->free_segments[--sp->nr_free_segments];
	}
	class_add_segment(sp, class, seg);
	return true;
}

u32 kvd_space_place(struct kvd_space *sp, const struct kvd_slot_name *name, u16 tenant,
		    u64 slot_bytes, u64 off)
{
	u64 seg = off / sp->segment_bytes, in = off % sp->segment_bytes;
	u32 class, id;

	if (seg >= sp->nr_segments || slot_bytes % 4096 ||
	    slot_bytes < KVD_SLOT_BYTES_MIN || in % slot_bytes ||
	    in + slot_bytes > sp->segment_bytes)
		return KVD_SLOT_NONE;
	class = class_get(sp, slot_bytes);
	if (class == KVD_SPACE_CLASSES || !segment_for(sp, class, (u32)seg))
		return KVD_SLOT_NONE;
	id = (u32)seg * sp->slots_per_segment + (u32)(in / slot_bytes);
	if (sp->slots[id].state != KVD_SLOT_FREE)
		kvd_space_drop(sp, id);
	slot_take(sp, id, name, tenant);
	return id;
}

u32 kvd_space_at(const struct kvd_space *sp, u64 off)
{
	u64 seg = off / sp->segment_bytes, in = off % sp->segment_bytes;
	const struct kvd_space_class *c;
	u32 id;

	if (seg >= sp->nr_segments || !sp->segments[seg].class)
		return KVD_SLOT_NONE;
	c = &sp->classes[sp->segments[seg].class - 1];
	if (in % c->slot_bytes || in / c->slot_bytes >= c->per_segment)
		return KVD_SLOT_NONE;
	id = (u32)seg * sp->slots_per_segment + (u32)(in / c->slot_bytes);
	return sp->slots[id].state == KVD_SLOT_FREE ? KVD_SLOT_NONE : id;
}

u32 kvd_space_drop_tenant(struct kvd_space *sp, u16 tenant, u32 nr)
{
	u32 done = 0;

	for (u32 i = 0; i < KVD_SPACE_CLASSES; i++) {
		struct kvd_space_class *c = &sp->classes[i];

		while (c->nr_segments && c->lru[tenant].nr && done < nr) {
			kvd_space_drop(sp, c->lru[tenant].head);
			done++;
		}
	}
	return done;
}
