/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover/extents.c - which extents the mover holds: found by their names, given with the
 * first job, put when the process has let go or is gone. Loop thread only.
 */
#include "base/assert.h"
#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/mover/mover_priv.h"

static u32 *hash_head(struct kvd_mover *m, u32 pool_id, u32 index)
{
	return &m->hash[(pool_id * 2654435761u + index) % MOVER_HASH];
}

struct mover_extent *mover_extent_find(struct kvd_mover *m, u32 pool_id, u32 index,
				       u64 serial)
{
	u32 i = *hash_head(m, pool_id, index);

	while (i) {
		struct mover_extent *e = &m->extents[i - 1];

		if (e->name.pool_id == pool_id && e->name.index == index &&
		    e->name.serial == serial)
			return e;
		i = e->next;
	}
	return NULL;
}

struct mover_extent *mover_extent_add(struct kvd_mover *m,
				      const struct kvd_mover_extent *name)
{
	u32 *head = hash_head(m, name->pool_id, name->index), i;
	struct mover_extent *e;

	if (m->extent_free) {
		i = m->extent_free - 1;
		m->extent_free = m->extents[i].next;
	} else if (m->extents_used < KVD_MOVER_EXTENTS_MAX) {
		i = m->extents_used++;
	} else {
		return NULL;
	}
	e = &m->extents[i];
	*e = (struct mover_extent){.name = *name, .next = *head};
	*head = i + 1;
	m->nr_extents++;
	m->ops.extent_given(m->ops.arg, name->pool_id, name->index, name->serial);
	return e;
}

void mover_extent_put(struct kvd_mover *m, struct mover_extent *e)
{
	u32 *link = hash_head(m, e->name.pool_id, e->name.index);
	u32 self = (u32)(e - m->extents) + 1;
	struct kvd_mover_extent name = e->name;

	kv_assert(name.bytes && !e->nr_runs);
	while (*link != self)
		link = &m->extents[*link - 1].next;
	*link = e->next;
	m->nr_unmaps -= e->unmap_sent;
	*e = (struct mover_extent){.next = m->extent_free};
	m->extent_free = self;
	m->nr_extents--;
	m->ops.extent_put(m->ops.arg, name.pool_id, name.index, name.serial);
}

/* Nothing of it is under way: the process lets go, or never had it. */
void mover_extent_unmap(struct kvd_mover *m, struct mover_extent *e)
{
	if (!e->dropping || e->nr_runs || e->unmap_sent)
		return;
	if (!e->sent) {
		mover_extent_put(m, e);
		return;
	}
	if (m->state != KVD_MOVER_READY)
		return; /* its end will do */
	if (mover_send(m, KVD_MV_UNMAP, (u32)(e - m->extents), 0, 0, -1)) {
		m->resend = true;
		return;
	}
	e->unmap_sent = true;
	if (!m->nr_unmaps++ && !m->nr_handed)
		m->progress_ns = kv_now_ns();
	if (KV_MUTANT(mover_put_unasked)) {
		e->sent = false;
		mover_extent_put(m, e);
	}
}

void kvd_mover_extent_drop(struct kvd_mover *m, u32 pool_id, u32 index, u64 serial)
{
	struct mover_extent *e = mover_extent_find(m, pool_id, index, serial);

	if (!e || e->dropping)
		return;
	e->dropping = true;
	if (KV_MUTANT(mover_drop_under_job) && e->sent) {
		mover_send(m, KVD_MV_UNMAP, (u32)(e - m->extents), 0, 0, -1);
		e->unmap_sent = true;
		m->nr_unmaps++;
		return;
	}
	mover_extent_unmap(m, e);
}

void kvd_mover_extents_idle(struct kvd_mover *m, u64 before_ns)
{
	for (u32 i = 0; m->nr_extents && i < m->extents_used; i++) {
		struct mover_extent *e = &m->extents[i];

		if (e->name.bytes && !e->nr_runs && e->used_ns < before_ns)
			kvd_mover_extent_drop(m, e->name.pool_id, e->name.index,
					      e->name.serial);
	}
}

/* The process that had them is gone, and so are its mappings. */
void mover_extents_forget(struct kvd_mover *m)
{
	m->nr_unmaps = 0;
	for (u32 i = 0; i < m->extents_used; i++) {
		struct mover_extent *e = &m->extents[i];

		e->sent = e->unmap_sent = false;
		if (e->name.bytes && !e->nr_runs)
			mover_extent_put(m, e);
	}
}
