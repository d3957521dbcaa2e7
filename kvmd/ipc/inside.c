/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/inside.c - see inside.h. Text for people, no promise of stability. */
#include "kvmd/ipc/inside.h"

#include <stdio.h>

#include "base/assert.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/tree.h"
#include "kvmd/ipc/conn.h"

static void pools_read(void *arg, FILE *out)
{
	struct kvd *kvd = arg;
	u32 i, s;

	for (i = 0; i < KVD_POOLS_MAX; i++) {
		struct kvd_pool *pool = kvd->core.mm.pools[i];

		if (!pool)
			continue;
		fprintf(out, "pool %u", pool->id);
		for (s = 0; s < KVD_FRAME_STATES; s++)
			fprintf(out, " %s %u", kvd_frame_state_str(s), pool->nr[s]);
		fprintf(out, " log %llu/%llu\n",
			(unsigned long long)pool->table.published,
			(unsigned long long)pool->table.head);
	}
}

static void grace_read(void *arg, FILE *out)
{
	struct kvd *kvd = arg;
	const struct kvd_grace *g = &kvd->core.mm.grace;

	fprintf(out, "epoch %llu saved below %llu quarantine %u seal %u scans %llu\n",
		(unsigned long long)g->epoch, (unsigned long long)g->bound,
		g->nr_pages[KVD_BATCH_QUARANTINE], g->nr_pages[KVD_BATCH_SEAL],
		(unsigned long long)g->scans);
}

static void readers_read(void *arg, FILE *out)
{
	struct kvd *kvd = arg;
	struct kvd_session *s;
	u32 i;

	list_for_each_entry (s, &kvd->core.sessions, node) {
		fprintf(out, "session %llu %s%s quiet %llu busy 0x%02x slots",
			(unsigned long long)s->id, s->reader.ended ? "ended" : "live",
			s->reader.stalled ? " stalled" : "",
			(unsigned long long)s->reader.quiet, s->reader.busy_slots);
		for (i = 0; i < KV_ANNOUNCE_SLOTS; i++)
			fprintf(out, " %llu",
				(unsigned long long)kv_load_relaxed64(
					&s->page->slots[i].word));
		fprintf(out, "\n");
	}
}

static void rings_read(void *arg, FILE *out)
{
	struct kvd *kvd = arg;
	struct kvd_conn *conn;

	list_for_each_entry (conn, &kvd->conns, node) {
		if (conn->state != KVD_CONN_OPEN)
			continue;
		fprintf(out,
			"session %llu sq %u of %u cq %u parked %u%s out %u messages\n",
			(unsigned long long)conn->client_id, conn->ring.sq_head,
			kv_load_relaxed32(&conn->ring.hdr->sq_tail), conn->ring.cq_tail,
			conn->ring.nr_parked, conn->ring.awake ? " awake" : "",
			conn->out.nr);
	}
	fprintf(out, "parked %u%s\n", kvd->requests.nr_parked,
		list_empty(&kvd->requests.hashing) ? "" : " hashing");
}

static const struct {
	const char *path;
	void (*read)(void *arg, FILE *out);
} files[] = {
	{"pools/states", pools_read},
	{"grace", grace_read},
	{"sessions/readers", readers_read},
	{"sessions/rings", rings_read},
};

void kvd_inside_add(struct kvd *kvd)
{
	size_t i;
	int r;

	for (i = 0; i < KV_ARRAY_SIZE(files); i++) {
		r = kvd_tree_add(files[i].path, files[i].read, kvd);
		kv_assert(!r);
	}
}

void kvd_inside_remove(void)
{
	size_t i;

	for (i = 0; i < KV_ARRAY_SIZE(files); i++)
		kvd_tree_remove(files[i].path);
}
