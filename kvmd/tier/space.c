/* SPDX-License-Identifier: Apache-2.0 */
/* tier/space.c - see space.h. Loop thread only. */
#include "kvmd/tier/space.h"

#include <errno.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mutant.h"
#include "kvmd/tier/space_priv.h"

#define HEADS_MAX     (1u << 24)
#define SEGMENTS_WANT 8u

/* -------------------------------------------------------------------- lists */

void kvd_space_list_push(struct kvd_space *sp, struct kvd_slot_list *l, u32 id, bool tail)
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

void kvd_space_list_pull(struct kvd_space *sp, struct kvd_slot_list *l, u32 id)
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

struct kvd_space_class *kvd_space_class_of(const struct kvd_space *sp, u32 id)
{
	u8 class = sp->slots[id].class;

	kv_assert(class && class <= KVD_SPACE_CLASSES);
	return &sp->classes[class - 1];
}

static struct kvd_slot_list *lru_of(const struct kvd_space *sp, u32 id)
{
	return &kvd_space_class_of(sp, id)->lru[sp->slots[id].tenant];
}

struct kvd_segment *kvd_space_segment_of(const struct kvd_space *sp, u32 id)
{
	return &sp->segments[id / sp->slots_per_segment];
}

u64 kvd_slot_bytes(const struct kvd_space *sp, u32 id)
{
	return kvd_space_class_of(sp, id)->slot_bytes;
}

u64 kvd_slot_off(const struct kvd_space *sp, u32 id)
{
	return id / sp->slots_per_segment * sp->segment_bytes +
	       id % sp->slots_per_segment * kvd_space_class_of(sp, id)->slot_bytes;
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

void kvd_space_index_add(struct kvd_space *sp, u32 id, const struct kvd_slot_name *name)
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
	sp->dirty = KVD_SLOT_LIST_EMPTY;
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
	kvd_space_segment_of(sp, id)->nr_used--;
	s->state = KVD_SLOT_FREE;
	s->op = 0;
	kvd_space_list_push(sp, &kvd_space_class_of(sp, id)->free, id, false);
}

void kvd_space_slot_busy(struct kvd_space *sp, u32 id, bool busy)
{
	struct kvd_segment *seg = kvd_space_segment_of(sp, id);

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
	kvd_space_list_push(sp, lru_of(sp, id), id, true);
}

static void lru_del(struct kvd_space *sp, u32 id)
{
	if (!sp->slots[id].listed)
		return;
	sp->slots[id].listed = false;
	kvd_space_list_pull(sp, lru_of(sp, id), id);
}

void kvd_space_ready(struct kvd_space *sp, u32 id)
{
	struct kvd_slot *s = kvd_slot_at(sp, id);

	kv_assert(s->state == KVD_SLOT_FILLING && !s->readers);
	s->state = KVD_SLOT_READY;
	s->op = 0;
	sp->nr_ready++;
	kvd_space_slot_busy(sp, id, false);
	lru_add(sp, id);
}

void kvd_space_drop(struct kvd_space *sp, u32 id)
{
	struct kvd_slot *s = kvd_slot_at(sp, id);

	kv_assert(s->state == KVD_SLOT_FILLING || s->state == KVD_SLOT_READY);
	index_del(sp, id);
	if (s->state == KVD_SLOT_FILLING) {
		kvd_space_slot_busy(sp, id, false);
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
		kvd_space_slot_busy(sp, id, true);
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
	kvd_space_slot_busy(sp, id, false);
	if (s->state == KVD_SLOT_DYING)
		slot_free(sp, id);
	else if (!s->listed)
		lru_add(sp, id);
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
