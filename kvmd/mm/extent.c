/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/extent.c - geometry, growing and shrinking of pools by extents. See extent.h.
 *
 * Loop thread only.
 */
#include "kvmd/mm/extent.h"
#include <errno.h>
#include "base/mutant.h"
#include "kvmd/mm/pool.h"

/* Page padding may waste 1/33 of an extent: just under 3 %. */
#define WASTE_DIV 34u

#define SHIFT_MAX 20u

int kvd_geometry_choose(u64 stride_bytes, const struct kvd_backend_limits *limits,
			struct kv_geometry *ret)
{
	u64 max_bytes = KV_MIN(limits->extent_max_bytes, limits->capacity_bytes);
	u64 best_bytes = 0, best_waste = 0, nr_pages;
	u32 best_shift = 0;

	kv_assert(stride_bytes && kv_is_pow2(limits->extent_align_bytes));
	for (u32 shift = 0; shift <= SHIFT_MAX; shift++) {
		u64 used = stride_bytes << shift;
		u64 bytes = kv_round_up(KV_MAX(used, limits->extent_min_bytes),
					limits->extent_align_bytes);
		u64 waste;

		if (bytes > max_bytes)
			break;
		/* In 1/65536 of the extent; smaller extents win when both are good
		 * enough. */
		waste = ((bytes - used) << 16) / bytes;
		if (!best_bytes || waste < best_waste) {
			best_bytes = bytes;
			best_waste = waste;
			best_shift = shift;
		}
		if (waste <= (1u << 16) / WASTE_DIV)
			break;
	}
	if (!best_bytes)
		return -E2BIG;
	nr_pages = (limits->capacity_bytes / best_bytes) << best_shift;
	ret->extent_bytes = best_bytes;
	ret->stride_bytes = stride_bytes;
	ret->shift = best_shift;
	if (kvd_backend_one_extent(limits))
		nr_pages = 1ull << best_shift;
	ret->nr_pages = (u32)KV_MIN(nr_pages, (1ull << 31));
	return 0;
}

#define WORD_MAGIC 0x65787465ull

static u64 word_hash(u64 body)
{
	u64 z = (body ^ WORD_MAGIC) * 0x9e3779b97f4a7c15ull;

	return ((z ^ (z >> 29)) * 0xbf58476d1ce4e5b9ull) >> 44;
}

u64 kvd_extent_word(u64 serial, u32 state)
{
	u64 body = serial << 2 | state;

	return body << 20 | word_hash(body);
}

bool kvd_extent_word_ok(u64 word)
{
	return !word || word_hash(word >> 20) == (word & 0xfffff);
}

u64 kvd_extent_word_serial(u64 word)
{
	return word >> 22;
}

u32 kvd_extent_word_state(u64 word)
{
	return word >> 20 & 3;
}

static void extent_note(struct kvd_pool *pool, u32 index, u64 serial, u32 state)
{
	kv_store_release64(&pool->extent_words[index], kvd_extent_word(serial, state));
	kvd_crash_point();
}

static void extent_frames_add(struct kvd_pool *pool, u32 index)
{
	u32 first = index << pool->geo.shift, nr = 1u << pool->geo.shift;

	kvd_table_use(&pool->table, first + nr);
	/* From the end: the list is LIFO and low pfns go out first. */
	for (u32 pfn = first + nr; pfn-- > first;) {
		struct kvd_frame *f = &pool->frames[pfn];

		kv_assert(f->state == KVD_ABSENT);
		kvd_frame_touch(pool, pfn);
		/* The tag stays: a pfn's words only grow, also from extent to extent
		 * (P1). */
		f->pfn = pfn;
		f->owner = 0;
		f->flags = 0;
		f->refs = 0;
		f->parent = KVD_PFN_NONE;
		kvd_frame_set(pool, pfn, KVD_FREE, KVD_EV_EXTENT_ADDED, 0);
		kvd_freelist_put(pool, pfn);
	}
}

/* Another pool's extent that nobody needs may make room; true if one went at once. */
static bool shrink_elsewhere(struct kvd_pool *pool)
{
	struct kvd_mm *mm = pool->mm;
	u64 before = mm->extent_bytes_used;

	for (u32 p = 0; p < KVD_POOLS_MAX; p++) {
		struct kvd_pool *other = mm->pools[p];

		if (!other || other == pool ||
		    other->nr[KVD_FREE] < 1u << other->geo.shift)
			continue;
		if (other->domain_id != pool->domain_id && !mm->ops->may_shrink(other))
			continue;
		for (u32 i = 0; i < other->nr_extents; i++) {
			if (other->extents[i].state == KVD_EXTENT_LIVE &&
			    !kvd_extent_shrink(other, i))
				return mm->extent_bytes_used < before;
		}
	}
	return false;
}

static int extent_room(struct kvd_pool *pool)
{
	struct kvd_mm *mm = pool->mm;
	u64 bytes = pool->geo.extent_bytes;

	if (!mm->limits.capacity_bytes)
		return KV_PENDING;
	if (!mm->ops->may_grow(pool))
		return KV_FULL;
	while (mm->extent_bytes_used + bytes > mm->limits.capacity_bytes) {
		if (mm->extent_bytes_used - mm->draining_bytes + bytes <=
		    mm->limits.capacity_bytes)
			return KV_PENDING;
		if (!shrink_elsewhere(pool))
			return mm->draining_bytes ? KV_PENDING : KV_FULL;
	}
	return 0;
}

static u32 extent_unused(const struct kvd_pool *pool)
{
	for (u32 i = 0; i < pool->nr_extents; i++) {
		if (pool->extents[i].state == KVD_EXTENT_NONE)
			return i;
	}
	return pool->nr_extents;
}

int kvd_extent_grow(struct kvd_pool *pool)
{
	struct kvd_mm *mm = pool->mm;
	u32 index = extent_unused(pool);
	struct kvd_extent_handle handle;
	struct kvd_extent *e;
	int r;

	if (index == pool->nr_extents)
		return KV_FULL;
	r = extent_room(pool);
	if (r)
		return r;
	r = mm->backend->ops->extent_alloc(mm->backend, pool->geo.extent_bytes, &handle);
	if (r == -ENOMEM)
		return KV_FULL;
	if (r == -EAGAIN)
		return KV_PENDING;
	if (r)
		return r;
	e = &pool->extents[index];
	kv_assert(e->nr_given == 0 && e->nr_free == 0);
	e->serial = ++pool->next_serial;
	/* In the keeper before anybody is given it. */
	r = mm->keep && !KV_MUTANT(fd_after_grant)
		    ? mm->keep->extent_put(mm->keep->arg, pool->id, index, e->serial,
					   handle.fd)
		    : 0;
	if (r) {
		mm->backend->ops->extent_free(mm->backend, &handle,
					      pool->geo.extent_bytes);
		e->serial = 0;
		return r;
	}
	extent_note(pool, index, e->serial, KVD_EXTENT_LIVE);
	e->handle = handle;
	e->domain_id = pool->domain_id;
	e->state = KVD_EXTENT_LIVE;
	mm->extent_bytes_used += pool->geo.extent_bytes;
	pool->nr_live_extents++;
	extent_frames_add(pool, index);
	mm->ops->extent_live(pool, index);
	return 0;
}

static void extent_release(struct kvd_pool *pool, u32 index)
{
	struct kvd_extent *e = &pool->extents[index];
	struct kvd_mm *mm = pool->mm;

	kv_assert(e->state == KVD_EXTENT_DRAINING && e->nr_given == 0);
	/* The serial stays in the word: the next one is larger. */
	extent_note(pool, index, e->serial, KVD_EXTENT_NONE);
	if (mm->keep)
		mm->keep->extent_del(mm->keep->arg, pool->id, index, e->serial);
	mm->backend->ops->extent_free(mm->backend, &e->handle, pool->geo.extent_bytes);
	mm->extent_bytes_used -= pool->geo.extent_bytes;
	mm->adopted_bytes = KV_MIN(mm->adopted_bytes, mm->extent_bytes_used);
	mm->draining_bytes -= pool->geo.extent_bytes;
	e->state = KVD_EXTENT_NONE;
	e->serial = 0;
	mm->ops->extent_gone(pool, index);
}

static u32 extent_poisoned(const struct kvd_pool *pool, u32 index)
{
	u32 first = index << pool->geo.shift, nr = 0;

	if (!pool->nr[KVD_POISONED])
		return 0;
	for (u32 pfn = first; pfn < first + (1u << pool->geo.shift); pfn++)
		nr += pool->frames[pfn].state == KVD_POISONED;
	return nr;
}

int kvd_extent_shrink(struct kvd_pool *pool, u32 index)
{
	u32 first = index << pool->geo.shift, nr = 1u << pool->geo.shift;
	struct kvd_extent *e = &pool->extents[index];

	kv_assert(index < pool->nr_extents && e->state == KVD_EXTENT_LIVE);
	/* Its sessions take their addresses from the one that is there. */
	if (kvd_backend_one_extent(&pool->mm->limits) && pool->nr_sessions)
		return KV_BUSY;
	/* A poisoned page goes with its extent. */
	if (e->nr_free != nr && e->nr_free + extent_poisoned(pool, index) != nr)
		return KV_BUSY;
	extent_note(pool, index, e->serial, KVD_EXTENT_DRAINING);
	for (u32 pfn = first; pfn < first + nr; pfn++) {
		if (pool->frames[pfn].state == KVD_FREE)
			kvd_freelist_del(pool, pfn);
		kvd_frame_set(pool, pfn, KVD_ABSENT, KVD_EV_EXTENT_REMOVED, 0);
	}
	e->state = KVD_EXTENT_DRAINING;
	e->idle_since_ns = 0;
	pool->nr_live_extents--;
	pool->mm->draining_bytes += pool->geo.extent_bytes;
	pool->mm->ops->extent_draining(pool, index);
	if (KV_MUTANT(unmap_no_ack))
		e->nr_given = 0;
	if (e->nr_given == 0)
		extent_release(pool, index);
	return 0;
}

void kvd_extent_given(struct kvd_pool *pool, u32 index)
{
	kv_assert(pool->extents[index].state == KVD_EXTENT_LIVE);
	pool->extents[index].nr_given++;
}

void kvd_extent_put(struct kvd_pool *pool, u32 index)
{
	struct kvd_extent *e = &pool->extents[index];

	kv_assert(e->state != KVD_EXTENT_NONE && e->nr_given > 0);
	e->nr_given--;
	if (e->nr_given == 0 && e->state == KVD_EXTENT_DRAINING)
		extent_release(pool, index);
}

int kvd_extent_adopt(struct kvd_pool *pool, u32 index, int fd)
{
	u64 word = pool->extent_words[index];
	struct kvd_extent *e = &pool->extents[index];
	u32 state = kvd_extent_word_state(word);
	struct kvd_mm *mm = pool->mm;

	if (kvd_extent_word_ok(word))
		pool->next_serial =
			KV_MAX(pool->next_serial, kvd_extent_word_serial(word));
	if (kvd_extent_word_ok(word) && state == KVD_EXTENT_NONE)
		return -ENODATA;
	if (!kvd_extent_word_ok(word) || state > KVD_EXTENT_DRAINING || fd < 0 ||
	    !mm->backend->ops->extent_adopt ||
	    mm->backend->ops->extent_adopt(mm->backend, fd, pool->geo.extent_bytes,
					   &e->handle)) {
		extent_note(pool, index, pool->next_serial, KVD_EXTENT_NONE);
		return -ENODATA;
	}
	e->serial = kvd_extent_word_serial(word);
	e->domain_id = pool->domain_id;
	e->state = state;
	mm->extent_bytes_used += pool->geo.extent_bytes;
	mm->adopted_bytes = mm->extent_bytes_used;
	if (state == KVD_EXTENT_LIVE) {
		pool->nr_live_extents++;
		kvd_table_use(&pool->table, (index + 1) << pool->geo.shift);
	} else {
		mm->draining_bytes += pool->geo.extent_bytes;
	}
	return 0;
}

void kvd_extent_adopt_done(struct kvd_pool *pool)
{
	for (u32 i = 0; i < pool->nr_extents; i++) {
		if (pool->extents[i].state == KVD_EXTENT_DRAINING &&
		    !pool->extents[i].nr_given)
			extent_release(pool, i);
	}
}
