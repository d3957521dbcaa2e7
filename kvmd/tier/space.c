/* SPDX-License-Identifier: Apache-2.0 */
/* tier/space.c - see space.h. Loop thread only. */
#include "kvmd/tier/space.h"

#include <errno.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mutant.h"

/* Clean slots are looked for among so many of the oldest before a dirty one is dropped. */
#define CLEAN_STEPS   16u
/* More than can be written at once. */
#define VICTIM_STEPS  1024u
#define HEADS_MAX     (1u << 24)
#define SEGMENTS_WANT 8u

/* -------------------------------------------------------------------- lists */

static const struct kvd_slot_list list_empty_ = {KVD_SLOT_NONE, KVD_SLOT_NONE, 0};

static void list_push(struct kvd_space *sp, struct kvd_slot_list *l, u32 id, bool tail)
{
	struct kvd_slot *s = &sp->slots[id];

	s->prev = tail ? l->tail : KVD_SLOT_NONE;
	s->next = tail ? KVD_SLOT_NONE : l->head;
	if (s->prev != KVD_SLOT_NONE)
		sp->slots[s->prev].next = id;
	else
		l->head = id;
	if (s->next != KVD_SLOT_NONE)
		sp->slots[s->next].prev = id;
	else
		l->tail = id;
	l->nr++;
}

static void list_pull(struct kvd_space *sp, struct kvd_slot_list *l, u32 id)
{
	struct kvd_slot *s = &sp->slots[id];

	kv_assert(l->nr);
	if (s->prev != KVD_SLOT_NONE)
		sp->slots[s->prev].next = s->next;
	else
		l->head = s->next;
	if (s->next != KVD_SLOT_NONE)
		sp->slots[s->next].prev = s->prev;
	else
		l->tail = s->prev;
	l->nr--;
}

static struct kvd_space_class *class_of(const struct kvd_space *sp, u32 id)
{
	u8 class = sp->slots[id].class;

	kv_assert(class && class <= KVD_SPACE_CLASSES);
	return &sp->classes[class - 1];
}

static struct kvd_slot_list *lru_of(const struct kvd_space *sp, u32 id)
{
	return &class_of(sp, id)->lru[sp->slots[id].tenant];
}

static struct kvd_segment *segment_of(const struct kvd_space *sp, u32 id)
{
	return &sp->segments[id / sp->slots_per_segment];
}

u64 kvd_slot_bytes(const struct kvd_space *sp, u32 id)
{
	return class_of(sp, id)->slot_bytes;
}

u64 kvd_slot_off(const struct kvd_space *sp, u32 id)
{
	return id / sp->slots_per_segment * sp->segment_bytes +
	       id % sp->slots_per_segment * class_of(sp, id)->slot_bytes;
}

/* -------------------------------------------------------------------- index */

static u32 *head_of(const struct kvd_space *sp, const u8 *key)
{
	u8 hash[crypto_shorthash_BYTES];
	u32 h;

	crypto_shorthash(hash, key, KV_KEY_BYTES, sp->hash_key);
	memcpy(&h, hash, sizeof(h));
	return &sp->heads[h & sp->hash_mask];
}

static bool named(const struct kvd_slot *s, const struct kvd_slot_name *name)
{
	return !memcmp(s->key, name->key, KV_KEY_BYTES) &&
	       s->fingerprint == name->fingerprint && s->domain == name->domain;
}

u32 kvd_space_find(const struct kvd_space *sp, const struct kvd_slot_name *name)
{
	u32 id = *head_of(sp, name->key);

	while (id != KVD_SLOT_NONE && !named(&sp->slots[id], name))
		id = sp->slots[id].hash_next;
	return id;
}

static void index_add(struct kvd_space *sp, u32 id, const struct kvd_slot_name *name)
{
	struct kvd_slot *s = &sp->slots[id];
	u32 *head = head_of(sp, name->key);

	kv_assert(!s->indexed);
	memcpy(s->key, name->key, KV_KEY_BYTES);
	s->fingerprint = name->fingerprint;
	s->domain = name->domain;
	s->hash_next = *head;
	s->indexed = true;
	*head = id;
}

static void index_del(struct kvd_space *sp, u32 id)
{
	struct kvd_slot *s = &sp->slots[id];
	u32 *at = head_of(sp, s->key);

	if (!s->indexed)
		return;
	while (*at != id) {
		kv_assert(*at != KVD_SLOT_NONE);
		at = &sp->slots[*at].hash_next;
	}
	*at = s->hash_next;
	s->indexed = false;
}

/* ------------------------------------------------------------------- shape */

u64 kvd_segment_bytes(u64 size_bytes)
{
	u64 bytes = KVD_SEGMENT_MAX;

	while (bytes > KVD_SEGMENT_MIN && bytes * SEGMENTS_WANT > size_bytes)
		bytes >>= 1;
	return bytes;
}

static void *lazy_memory(u64 bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static u32 heads_for(u64 size_bytes)
{
	u32 n = 1024;

	while (n < HEADS_MAX && (u64)n * (1u << 17) < size_bytes)
		n <<= 1;
	return n;
}

int kvd_space_init(struct kvd_space *sp, u64 size_bytes, u64 segment_bytes)
{
	u64 nr = size_bytes / segment_bytes;
	u32 heads = heads_for(size_bytes);

	memset(sp, 0, sizeof(*sp));
	if (!kv_is_pow2(segment_bytes) || segment_bytes < KVD_SEGMENT_MIN ||
	    segment_bytes > KVD_SEGMENT_MAX || !nr || nr > KVD_SEGMENTS_MAX)
		return -EINVAL;
	sp->size_bytes = nr * segment_bytes;
	sp->segment_bytes = segment_bytes;
	sp->nr_segments = (u32)nr;
	sp->slots_per_segment = (u32)(segment_bytes / KVD_SLOT_BYTES_MIN);
	sp->slots_bytes = nr * sp->slots_per_segment * sizeof(struct kvd_slot);
	if (nr * sp->slots_per_segment >= KVD_SLOT_NONE)
		return -EINVAL;
	sp->slots = lazy_memory(sp->slots_bytes);
	sp->classes = calloc(KVD_SPACE_CLASSES, sizeof(*sp->classes));
	sp->segments = calloc(nr, sizeof(*sp->segments));
	sp->free_segments = calloc(nr, sizeof(u32));
	sp->heads = lazy_memory((u64)heads * sizeof(u32));
	if (!sp->slots || !sp->classes || !sp->segments || !sp->free_segments ||
	    !sp->heads) {
		kvd_space_fini(sp);
		return -ENOMEM;
	}
	sp->hash_mask = heads - 1;
	memset(sp->heads, 0xff, (u64)heads * sizeof(u32));
	randombytes_buf(sp->hash_key, sizeof(sp->hash_key));
	sp->dirty = list_empty_;
	for (u32 i = (u32)nr; i-- > 0;)
		sp->free_segments[sp->nr_free_segments++] = i;
	return 0;
}

void kvd_space_fini(struct kvd_space *sp)
{
	if (sp->slots)
		munmap(sp->slots, sp->slots_bytes);
	if (sp->heads)
		munmap(sp->heads, ((u64)sp->hash_mask + 1) * sizeof(u32));
	free(sp->classes);
	free(sp->segments);
	free(sp->free_segments);
	memset(sp, 0, sizeof(*sp));
}

/* -------------------------------------------------------- states and charges */

static void slot_free(struct kvd_space *sp, u32 id)
{
	struct kvd_slot *s = &sp->slots[id];
	struct kvd_space_account *acct = &sp->acct[s->tenant];
	u64 bytes = kvd_slot_bytes(sp, id);

	kv_assert(!s->indexed && !s->readers && acct->used_bytes >= bytes && acct->nr);
	acct->used_bytes -= bytes;
	acct->nr--;
	sp->used_bytes -= bytes;
	sp->nr_used--;
	segment_of(sp, id)->nr_used--;
	s->state = KVD_SLOT_FREE;
	s->op = 0;
	list_push(sp, &class_of(sp, id)->free, id, false);
}

static void slot_busy(struct kvd_space *sp, u32 id, bool busy)
{
	struct kvd_segment *seg = segment_of(sp, id);

	kv_assert(busy || seg->nr_busy);
	seg->nr_busy += busy ? 1 : -1u;
}

void kvd_space_dirty(struct kvd_space *sp, u32 id, bool dirty)
{
	struct kvd_slot *s = &sp->slots[id];
	struct kvd_slot_list *l = &sp->dirty;

	if (s->clean == !dirty)
		return;
	s->clean = !dirty;
	if (dirty) {
		s->dirty_prev = l->tail;
		s->dirty_next = KVD_SLOT_NONE;
		if (l->tail != KVD_SLOT_NONE)
			sp->slots[l->tail].dirty_next = id;
		else
			l->head = id;
		l->tail = id;
		l->nr++;
		return;
	}
	if (s->dirty_prev != KVD_SLOT_NONE)
		sp->slots[s->dirty_prev].dirty_next = s->dirty_next;
	else
		l->head = s->dirty_next;
	if (s->dirty_next != KVD_SLOT_NONE)
		sp->slots[s->dirty_next].dirty_prev = s->dirty_prev;
	else
		l->tail = s->dirty_prev;
	l->nr--;
}

static void lru_add(struct kvd_space *sp, u32 id)
{
	kv_assert(!sp->slots[id].listed);
	sp->slots[id].listed = true;
	list_push(sp, lru_of(sp, id), id, true);
}

static void lru_del(struct kvd_space *sp, u32 id)
{
	if (!sp->slots[id].listed)
		return;
	sp->slots[id].listed = false;
	list_pull(sp, lru_of(sp, id), id);
}

void kvd_space_ready(struct kvd_space *sp, u32 id)
{
	struct kvd_slot *s = kvd_slot_at(sp, id);

	kv_assert(s->state == KVD_SLOT_FILLING && !s->readers);
	s->state = KVD_SLOT_READY;
	s->op = 0;
	sp->nr_ready++;
	slot_busy(sp, id, false);
	lru_add(sp, id);
}

void kvd_space_drop(struct kvd_space *sp, u32 id)
{
	struct kvd_slot *s = kvd_slot_at(sp, id);

	kv_assert(s->state == KVD_SLOT_FILLING || s->state == KVD_SLOT_READY);
	index_del(sp, id);
	if (s->state == KVD_SLOT_FILLING) {
		slot_busy(sp, id, false);
		slot_free(sp, id);
		return;
	}
	if (sp->dropped)
		sp->dropped(sp->arg, id);
	kvd_space_dirty(sp, id, false);
	sp->nr_ready--;
	lru_del(sp, id);
	if (s->readers)
		s->state = KVD_SLOT_DYING;
	else
		slot_free(sp, id);
}

void kvd_space_hold(struct kvd_space *sp, u32 id)
{
	struct kvd_slot *s = kvd_slot_at(sp, id);

	kv_assert(s->state == KVD_SLOT_READY);
	if (!KV_MUTANT(tier_reader_not_counted) && !s->readers++)
		slot_busy(sp, id, true);
}

void kvd_space_get(struct kvd_space *sp, u32 id)
{
	kvd_space_hold(sp, id);
	if (!KV_MUTANT(tier_reader_not_counted))
		lru_del(sp, id);
}

void kvd_space_put(struct kvd_space *sp, u32 id)
{
	struct kvd_slot *s = kvd_slot_at(sp, id);

	if (KV_MUTANT(tier_reader_not_counted))
		return;
	kv_assert(s->readers);
	if (--s->readers)
		return;
	slot_busy(sp, id, false);
	if (s->state == KVD_SLOT_DYING)
		slot_free(sp, id);
	else if (!s->listed)
		lru_add(sp, id);
}

/* ---------------------------------------------------------------- who gives */

static bool donor_ok(const struct kvd_space *sp, u32 i, u16 tenant, u64 bytes)
{
	const struct kvd_space_account *a = &sp->acct[i];

	return i == tenant || a->used_bytes >= a->min_bytes + bytes ||
	       KV_MUTANT(tier_min_not_kept);
}

/* As mm/reclaim.c's: above high first, then furthest above min for its weight. */
static struct kvd_slot_list *donor(const struct kvd_space *sp, struct kvd_space_class *c,
				   u16 tenant)
{
	struct kvd_slot_list *best = NULL;
	u64 best_score = 0;
	bool best_high = false;

	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		const struct kvd_space_account *a = &sp->acct[i];
		u64 score;
		bool high;

		if (!c->lru[i].nr || !donor_ok(sp, i, tenant, c->slot_bytes))
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
		list_pull(sp, &c->free, first + i);
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
		list_push(sp, &c->free, first + i, false);
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
	sp->classes[unused].free = list_empty_;
	for (u32 t = 0; t < KVD_TENANTS_MAX; t++)
		sp->classes[unused].lru[t] = list_empty_;
	return unused;
}

/* What a tenant at its max gives first: pages of this size, else of any. */
static struct kvd_slot_list *own_list(struct kvd_space *sp, struct kvd_space_class *c,
				      u16 tenant)
{
	if (c->nr_segments && c->lru[tenant].nr)
		return &c->lru[tenant];
	for (u32 i = 0; i < KVD_SPACE_CLASSES; i++)
		if (sp->classes[i].nr_segments && sp->classes[i].lru[tenant].nr)
			return &sp->classes[i].lru[tenant];
	return NULL;
}

/* Within the tenant's budget, at the cost of its own oldest pages. */
static bool budget(struct kvd_space *sp, struct kvd_space_class *c, u16 tenant)
{
	struct kvd_space_account *a = &sp->acct[tenant];

	if (KV_MUTANT(tier_no_budget))
		return true;
	while (a->used_bytes + c->slot_bytes > a->max_bytes) {
		struct kvd_slot_list *own =
			c->slot_bytes > a->max_bytes ? NULL : own_list(sp, c, tenant);

		if (!own || !evict(sp, victim(sp, own)))
			return false;
	}
	return true;
}

static bool room(struct kvd_space *sp, u32 class, u16 tenant)
{
	struct kvd_space_class *c = &sp->classes[class];
	struct kvd_slot_list *lru;

	if (c->free.nr)
		return true;
	if (sp->nr_free_segments) {
		class_add_segment(sp, class, sp->free_segments[--sp->nr_free_segments]);
		return true;
	}
	lru = c->nr_segments ? donor(sp, c, tenant) : NULL;
	if (!lru)
		return segment_steal(sp, class, tenant);
	return evict(sp, victim(sp, lru));
}

static void slot_take(struct kvd_space *sp, u32 id, const struct kvd_slot_name *name,
		      u16 tenant)
{
	struct kvd_slot *s = &sp->slots[id];
	struct kvd_space_class *c = class_of(sp, id);

	kv_assert(s->state == KVD_SLOT_FREE && !s->readers);
	list_pull(sp, &c->free, id);
	s->state = KVD_SLOT_FILLING;
	s->tenant = tenant;
	s->clean = true;
	s->op = 0;
	segment_of(sp, id)->nr_used++;
	slot_busy(sp, id, true);
	sp->acct[tenant].used_bytes += c->slot_bytes;
	sp->acct[tenant].nr++;
	sp->used_bytes += c->slot_bytes;
	sp->nr_used++;
	index_add(sp, id, name);
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

/* -------------------------------------------------------------------- check */

static const char *slot_check(const struct kvd_space *sp, u32 id, u64 *used, u32 *ready)
{
	const struct kvd_slot *s = &sp->slots[id];
	struct kvd_slot_name name = {s->key, s->fingerprint, s->domain};

	if (s->state == KVD_SLOT_FREE)
		return s->indexed || s->readers ? "a free slot is in use" : NULL;
	used[s->tenant] += kvd_slot_bytes(sp, id);
	*ready += s->state == KVD_SLOT_READY;
	if (s->indexed != (s->state != KVD_SLOT_DYING))
		return "a slot is in the index, or is not, against its state";
	if (s->indexed && kvd_space_find(sp, &name) == KVD_SLOT_NONE)
		return "an indexed slot is not found";
	if (s->state == KVD_SLOT_DYING && !s->readers)
		return "a dying slot without readers";
	return NULL;
}

const char *kvd_space_check(const struct kvd_space *sp)
{
	u64 used[KVD_TENANTS_MAX] = {0}, sum = 0;
	u32 ready = 0, nr = 0;

	for (u32 seg = 0; seg < sp->nr_segments; seg++) {
		const struct kvd_segment *s = &sp->segments[seg];
		u32 first = seg * sp->slots_per_segment, in_use = 0;

		for (u32 i = 0; s->class && i < sp->classes[s->class - 1].per_segment;
		     i++) {
			const char *why = slot_check(sp, first + i, used, &ready);

			if (why)
				return why;
			in_use += sp->slots[first + i].state != KVD_SLOT_FREE;
		}
		if (in_use != s->nr_used)
			return "a segment counts other slots than it has";
		nr += in_use;
	}
	for (u32 t = 0; t < KVD_TENANTS_MAX; t++) {
		sum += used[t];
		if (used[t] != sp->acct[t].used_bytes)
			return "a tenant pays for other bytes than it has";
	}
	if (sum != sp->used_bytes || ready != sp->nr_ready || nr != sp->nr_used)
		return "the tier's sums are wrong";
	return NULL;
}
