/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.c - the public calls that open, close and describe a pool.
 *
 * Opening a layout that is open already gives the same pool again, counted: one layout
 * has one address range in a process however many of its parts ask for it (cases O01).
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define USERS_NS (100 * KV_NSEC_PER_USEC)

static int check_args(const struct kv_layout *layout, const float *scales)
{
	if (!layout)
		return kvc_fail(-EINVAL, "layout: NULL");
	if (layout->nr_scales > KV_SCALES_MAX)
		return kvc_fail(-EINVAL, "layout.nr_scales=%u: at most %u",
				layout->nr_scales, KV_SCALES_MAX);
	if (layout->nr_scales && !scales)
		return kvc_fail(-EINVAL, "scales: NULL with layout.nr_scales=%u",
				layout->nr_scales);
	return 0;
}

static bool no_uuid(const u8 *uuid)
{
	static const u8 zero[16];

	return !memcmp(uuid, zero, sizeof(zero));
}

/** kvc_pool_free_memory() - the part that a forked child may do as well */
void kvc_pool_free_memory(struct kvc_pool *pool)
{
	if (!pool)
		return;
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		free(pool->stamps[i]);
	free(pool->ledger);
	free(pool->ledger_tags);
	free(pool->leases);
	free(pool->ret);
	free(pool->mirror);
	free(pool->mirror_block);
	free(pool->extents);
	free(pool->gpu);
	free(pool->scales);
	pthread_mutex_destroy(&pool->lock);
	pthread_mutex_destroy(&pool->mirror_lock);
	free(pool);
}

static struct kvc_pool *pool_create(struct kvc *c, const struct kv_layout *layout,
				    const float *scales, const uint8_t *gpu_uuid)
{
	static u64 next_serial;
	struct kvc_pool *pool = calloc(1, sizeof(*pool));

	if (!pool)
		return NULL;
	pool->c = c;
	pool->serial = __atomic_add_fetch(&next_serial, 1, __ATOMIC_RELAXED);
	pool->refs = 1;
	pool->layout = *layout;
	pthread_mutex_init(&pool->lock, NULL);
	pthread_mutex_init(&pool->mirror_lock, NULL);
	if (gpu_uuid)
		memcpy(pool->gpu_uuid, gpu_uuid, sizeof(pool->gpu_uuid));
	if (layout->nr_scales) {
		pool->scales = malloc(layout->nr_scales * sizeof(float));
		if (!pool->scales) {
			kvc_pool_free_memory(pool);
			return NULL;
		}
		memcpy(pool->scales, scales, layout->nr_scales * sizeof(float));
	}
	return pool;
}

/* A pool that is open knows its GPU, also when it was asked for as "the only one". */
static bool same_pool(const struct kvc_pool *a, const struct kvc_pool *wanted)
{
	const struct kvc_pool *b = wanted;

	return !memcmp(&a->layout, &b->layout, sizeof(a->layout)) &&
	       (no_uuid(b->gpu_uuid) ||
		!memcmp(a->gpu_uuid, b->gpu_uuid, sizeof(a->gpu_uuid))) &&
	       (!a->layout.nr_scales ||
		!memcmp(a->scales, b->scales, a->layout.nr_scales * sizeof(float)));
}

/* Return: 0 and a slot; -EEXIST and the pool that is open already; -EMFILE. */
static int find_slot(struct kvc *c, const struct kvc_pool *pool, u32 *ret_slot)
{
	u32 slot = KV_POOLS_MAX;

	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		if (!c->pools[i])
			slot = KV_MIN(slot, i);
		else if (same_pool(c->pools[i], pool) && !KV_MUTANT(pool_open_twice)) {
			*ret_slot = i;
			return -EEXIST;
		}
	}
	if (slot == KV_POOLS_MAX)
		return kvc_fail(-EMFILE, "%u pools are open", KV_POOLS_MAX);
	*ret_slot = slot;
	return 0;
}

/*
 * kvc_link_alive_locked() gives the lock up while it waits, so the slot is looked for
 * after it. Return: 0; -EEXIST @ret_pool is another pool, open already; as
 * kvc_pool_open().
 */
static int open_locked(struct kvc *c, struct kvc_pool *pool, u64 deadline_ns,
		       struct kvc_pool **ret_pool)
{
	u32 slot = 0;
	int r;

	do {
		r = kvc_link_alive_locked(c, deadline_ns);
		if (r)
			return r;
		r = find_slot(c, pool, &slot);
		if (r == -EEXIST) {
			*ret_pool = c->pools[slot];
			c->pools[slot]->refs++;
		}
		if (r)
			return r;
		pool->slot = slot;
		r = kvc_pool_attach_locked(pool, c->link, deadline_ns);
	} while (r == -ECONNRESET);
	if (r)
		return r;
	kvc_pool_place_locked(c, slot, pool);
	kvc_sock_read_locked(c);
	*ret_pool = pool;
	return 0;
}

int kvc_pool_open(struct kvc *c, const struct kv_layout *layout, const float *scales,
		  const uint8_t *gpu_uuid, struct kvc_pool **ret_pool)
{
	u64 deadline_ns;
	struct kvc_pool *pool;
	int r;

	if (kvc_poisoned(c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	r = check_args(layout, scales);
	/* Not visible here: refused before kvmd hands out a descriptor (cases O10). */
	if (!r && gpu_uuid && !no_uuid(gpu_uuid))
		r = kvc_gpu_visible(gpu_uuid);
	if (r)
		return r;
	pool = pool_create(c, layout, scales, gpu_uuid);
	if (!pool)
		return kvc_fail(-ENOMEM, "out of memory");
	deadline_ns = kvc_deadline(c);
	r = kvc_lock_until(&c->lock, deadline_ns);
	if (r) {
		kvc_pool_free_memory(pool);
		return kvc_fail(r, "pool_open: another call holds the connection");
	}
	r = open_locked(c, pool, deadline_ns, ret_pool);
	if (r)
		kvc_pool_destroy_locked(pool);
	pthread_mutex_unlock(&c->lock);
	return r == -EEXIST ? 0 : r;
}

/**
 * kvc_pool_use() - the pool in @slot, which is not closed before kvc_pool_unuse()
 * @ret_pool: NULL: none is there
 *
 * Return: 0; -ETIMEDOUT.
 */
int kvc_pool_use(struct kvc *c, u32 slot, u64 deadline_ns, struct kvc_pool **ret_pool)
{
	struct kvc_pool *pool;
	int r;

	r = kvc_lock_until(&c->lock, deadline_ns);
	if (r)
		return kvc_fail(r, "another call is waiting for kvmd");
	pool = c->pools[slot];
	if (pool && !pool->refs)
		pool = NULL; /* its close waits for others */
	if (pool)
		__atomic_add_fetch(&pool->users, 1, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&c->lock);
	*ret_pool = pool;
	return 0;
}

/** kvc_pool_unuse() - the call is over */
void kvc_pool_unuse(struct kvc_pool *pool)
{
	__atomic_sub_fetch(&pool->users, 1, __ATOMIC_RELEASE);
}

/* Calls that name no pool may be at this one. Return: false: it was opened again, or
 * another close waits already. */
static bool last_user_gone(struct kvc_pool *pool)
{
	struct kvc *c = pool->c;

	if (pool->closing)
		return false;
	pool->closing = true;
	while (__atomic_load_n(&pool->users, __ATOMIC_ACQUIRE)) {
		pthread_mutex_unlock(&c->lock);
		kvc_sleep_ns(USERS_NS);
		pthread_mutex_lock(&c->lock);
	}
	pool->closing = false;
	return !pool->refs;
}

void kvc_pool_close(struct kvc_pool *pool)
{
	struct kvc *c;

	if (!pool || kvc_poisoned(pool->c))
		return;
	c = pool->c;
	pthread_mutex_lock(&c->lock);
	if (--pool->refs == 0 && last_user_gone(pool)) {
		kvc_mag_forget_pool_locked(pool);
		kvc_pool_destroy_locked(pool);
	}
	pthread_mutex_unlock(&c->lock);
}

void kvc_pool_get_info(struct kvc_pool *pool, struct kvc_pool_info *ret_info)
{
	*ret_info = (struct kvc_pool_info){
		.pool_id = pool->pool_id,
		.backend = pool->backend,
		.fingerprint = pool->fingerprint,
		.geometry = pool->geometry,
		.base = pool->base,
		.layout = pool->layout,
		.scales = pool->scales,
	};
}

void *kvc_page_addr(struct kvc_pool *pool, uint32_t pfn)
{
	u32 state;

	if (kvc_poisoned(pool->c) || pfn >= pool->geometry.nr_pages)
		return NULL;
	state = kv_load_acquire32(&pool->extents[pfn >> pool->geometry.shift].state);
	if (state != KVC_EXTENT_MAPPED && state != KVC_EXTENT_REMOVING)
		return NULL;
	if (KV_MUTANT(page_is_its_extent)) /* cases O18 */
		pfn = pfn >> pool->geometry.shift << pool->geometry.shift;
	return pool->base + kv_page_offset(&pool->geometry, pfn);
}
