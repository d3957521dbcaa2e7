/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/incident.c - the ring of failed checks. See incident.h. Loop thread only.
 */
#include "kvmd/own/incident.h"
#include <errno.h>
#include <string.h>
#include "kvmd/own/core.h"

int kvd_incident_report(struct kvd_session *s, struct kvd_attach *a,
			const struct kv_incident *in)
{
	struct kvd_incidents *ring = &s->core->incidents;
	struct kvd_incident *i = &ring->ring[ring->total % KVD_INCIDENTS];

	if (in->reserved)
		return -EINVAL;
	memset(i, 0, sizeof(*i));
	i->id = ++ring->total;
	i->when_ns = s->core->mm.now_ns;
	i->client_id = s->id;
	memcpy(i->client, s->name, sizeof(i->client));
	memcpy(i->tenant, s->tenant->name, sizeof(i->tenant));
	i->pool_id = a->pool->id;
	i->report = *in;
	i->state = KVD_FRAME_STATES;
	/* KV_BAD_PFN: the row named a page that does not exist, so there is no history.
	 */
	if (in->pfn < a->pool->geo.nr_pages) {
		const struct kvd_frame *f = &a->pool->frames[in->pfn];

		i->state = f->state;
		i->refs = f->refs;
		i->tag = f->tag;
		i->owner = f->owner;
		i->nr_past = kvd_frame_history(f, i->past);
	}
	s->stale_reports++;
	return 0;
}

const struct kvd_incident *kvd_incident_get(const struct kvd_incidents *ring, u64 id)
{
	if (id == 0 || id > ring->total || ring->total - id >= KVD_INCIDENTS)
		return NULL;
	return &ring->ring[(id - 1) % KVD_INCIDENTS];
}
