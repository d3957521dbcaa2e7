/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mirror.c - the engine's own copy of the pool's tags, in the kernels' memory (P3).
 *
 * Only tag_check writes to it. What is here looks at it or starts it anew, between steps,
 * and waits.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int head_store(struct eng_engine *e)
{
	struct kv_mirror head = {.nr_pages = e->mirror_pages};

	return e->mem->ops->load(e->mem, e->mirror, &head, sizeof(head));
}

/** eng_mirror_alloc() - an empty mirror of the open pool. Return: 0; -ENOMEM; -EIO */
int eng_mirror_alloc(struct eng_engine *e)
{
	u64 nr_pages = e->pool_info.geometry.nr_pages;
	void *p;
	int rc = e->mem->ops->alloc(e->mem, sizeof(*e->mirror) + nr_pages * sizeof(u64),
				    &p);

	if (rc)
		return rc;
	e->mirror = p;
	e->mirror_pages = (u32)nr_pages;
	return head_store(e);
}

/** eng_mirror_reset() - forget all words: a new table's may be lower. Return: 0; -EIO */
int eng_mirror_reset(struct eng_engine *e)
{
	int rc = e->mem->ops->zero(e->mem, e->mirror,
				   sizeof(*e->mirror) + e->mirror_pages * sizeof(u64));

	return rc ? rc : head_store(e);
}

/* Into ordinary memory, by way of memory that copies may run from. */
static int fetch(struct eng_engine *e, void *dst, size_t at, size_t bytes)
{
	struct eng_step *s = &e->step;
	size_t room = s->block_bytes;
	int rc = 0;

	for (size_t done = 0; done < bytes && !rc; done += room) {
		size_t n = KV_MIN(bytes - done, room);

		rc = e->mem->ops->download(e->mem, s->block,
					   (char *)e->mirror + at + done, n);
		if (!rc)
			rc = e->mem->ops->sync(e->mem);
		if (!rc)
			memcpy((char *)dst + done, s->block, n);
	}
	return rc;
}

/**
 * eng_mirror_position() - log position of the mirror; 0 if the device failed
 *
 * Context: the step's block is not in use; it is written over (not on the host).
 */
u64 eng_mirror_position(struct eng_engine *e)
{
	struct kv_mirror head = {0};

	if (!e->mem->separate)
		return e->mirror->position;
	return fetch(e, &head, 0, sizeof(head)) ? 0 : head.position;
}

/** eng_mirror_tags() - all words; context as eng_mirror_position(). Return: 0; -EIO */
int eng_mirror_tags(struct eng_engine *e, u64 *ret_tags)
{
	if (!e->mem->separate) {
		memcpy(ret_tags, e->mirror + 1, e->mirror_pages * sizeof(u64));
		return 0;
	}
	return fetch(e, ret_tags, sizeof(struct kv_mirror),
		     e->mirror_pages * sizeof(u64));
}
