/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/adopt.c - from the keeper's fds to a serving daemon: maps them, gives each session
 * a connection that is away, and lets own/adopt.c do the rest in its order (design 5 P7).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/ipc/policy.h"
#include "kvmd/own/image.h"

#define FINDINGS 16u

static struct kvd_kept_fd *find(struct kvd_kept *kept, u32 kind, u32 pool, u64 session,
				u32 index)
{
	for (u32 i = 0; i < kept->nr; i++) {
		struct kvd_kept_fd *k = &kept->fds[i];

		if (k->fd >= 0 && k->key.kind == kind && k->key.pool == pool &&
		    k->key.session == session && k->key.index == index)
			return k;
	}
	return NULL;
}

/* Map a region of the keeper's. Return: 0; -ENOENT; -ENOMEM */
static int region_map(struct kvd_kept *kept, u32 keep_kind, enum kvd_region_kind kind,
		      u32 pool, u64 session, struct kvd_region *ret)
{
	struct kvd_kept_fd *k = find(kept, keep_kind, pool, session, 0);
	off_t bytes = k ? lseek(k->fd, 0, SEEK_END) : -1;
	int flags = MAP_SHARED;
	void *addr;

	if (bytes <= 0)
		return -ENOENT;
	/* Records and leases are read from end to end: not a fault for each page. */
	if (kind != KVD_REGION_TOKENS)
		flags |= MAP_POPULATE;
	addr = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, k->fd, 0);
	if (addr == MAP_FAILED)
		return -ENOMEM;
	madvise(addr, (size_t)bytes, MADV_DONTFORK);
	madvise(addr, (size_t)bytes, MADV_DONTDUMP);
	*ret = (struct kvd_region){.kind = kind,
				   .pool_id = pool,
				   .session_id = session,
				   .size_bytes = (u64)bytes,
				   .addr = addr,
				   .fd = k->fd};
	k->fd = -1;
	return 0;
}

static void region_drop(struct kvd_kept *kept, const struct kvd_region *r, u32 kind)
{
	struct kvd_keep_key key = {
		.kind = kind, .pool = r->pool_id, .session = r->session_id};

	munmap(r->addr, r->size_bytes);
	close(r->fd);
	kvd_keep_del(&kept->keep, &key);
}

static int find_leases(void *arg, u32 pool_id, u64 session_id, struct kvd_region *ret)
{
	struct kvd *kvd = arg;

	return region_map(&kvd->kept, KVD_KEEP_LEASES, KVD_REGION_LEASES, pool_id,
			  session_id, ret);
}

static int find_extent(void *arg, u32 pool_id, u32 index, u64 serial)
{
	struct kvd *kvd = arg;
	struct kvd_kept_fd *k = find(&kvd->kept, KVD_KEEP_EXTENT, pool_id, serial, index);

	return k ? k->fd : -1;
}

static void extent_taken(void *arg, u32 pool_id, u32 index, u64 serial)
{
	struct kvd *kvd = arg;

	find(&kvd->kept, KVD_KEEP_EXTENT, pool_id, serial, index)->fd = -1;
}

static int adopt_pool(struct kvd *kvd, u32 id)
{
	struct kvd_kept *kept = &kvd->kept;
	struct kvd_adopt_pool_params p = {.id = id,
					  .leases = find_leases,
					  .extent = find_extent,
					  .extent_taken = extent_taken,
					  .arg = kvd};
	int r;

	r = region_map(kept, KVD_KEEP_FRAMES, KVD_REGION_FRAMES, id, 0, &p.frames);
	if (!r)
		r = region_map(kept, KVD_KEEP_TOKENS, KVD_REGION_TOKENS, id, 0,
			       &p.tokens);
	if (r == -ENOMEM) /* the next kvmd may have it */
		return r;
	if (r && !p.frames.addr)
		return 0;
	if (r) {
		/* Being made or destroyed when the daemon died: it has no page. */
		region_drop(kept, &p.frames, KVD_KEEP_FRAMES);
		return 0;
	}
	r = kvd_adopt_pool(&kvd->core, &p, &kept->adopted);
	if (r != -EBADMSG)
		return r;
	region_drop(kept, &p.tokens, KVD_KEEP_TOKENS);
	region_drop(kept, &p.frames, KVD_KEEP_FRAMES);
	return 0;
}

static int adopt_domains(struct kvd *kvd)
{
	struct kvd_image *image = kvd->kept.image;
	u8 secret[KVD_DOMAIN_SECRET_BYTES];
	int r = 0;

	for (u32 i = 0; i < KVD_DOMAINS_MAX && !r; i++) {
		if (!image->domains[i].check)
			continue;
		if (!kvd_image_domain_ok(&image->domains[i])) {
			kvd->kept.adopted.damage++;
			continue;
		}
		r = kvd_policy_secret(kvd, image->domains[i].name, secret);
		if (!r)
			r = kvd_adopt_domain(&kvd->core, i, secret);
	}
	memset(secret, 0, sizeof(secret));
	return r ? r : kvd_adopt_tenants(&kvd->core, &kvd->kept.adopted);
}

static int adopt_session(struct kvd *kvd, struct kvd_kept_fd *page)
{
	struct kvd_adopt_session_params p = {.id = page->key.session,
					     .tenant = page->key.index};
	struct kvd_kept_fd *pid =
		find(&kvd->kept, KVD_KEEP_PIDFD, 0, page->key.session, 0);
	struct kvd_conn *conn;
	int r;

	if (!pid || lseek(page->fd, 0, SEEK_END) < (off_t)KV_SESSION_BYTES)
		return -ENODATA; /* never given out */
	conn = kvd_conn_away(kvd, page->key.session, page->fd, pid->fd);
	if (!conn)
		return -ENOMEM;
	p.page = conn->page;
	p.owner = conn;
	r = kvd_adopt_session(&kvd->core, &p, &conn->session, &kvd->kept.adopted);
	if (r) {
		kvd_conn_away_drop(conn);
		return r;
	}
	page->fd = -1;
	pid->fd = -1;
	kvd_conn_away_ready(conn);
	return 0;
}

static int adopt_pools(struct kvd *kvd)
{
	/* The pool of the record that was being changed comes first: the others' records
	 * take its place in the undo entry. */
	u32 first = kvd->kept.image->undo.pool_id, id;
	int r = 0;

	if (first && first <= KVD_POOLS_MAX)
		r = adopt_pool(kvd, first);
	if (r)
		return r;		 /* the next kvmd needs it again */
	kvd->kept.image->undo.valid = 0; /* used, or its pool is gone */
	for (id = 1; id <= KVD_POOLS_MAX && !r; id++)
		if (id != first)
			r = adopt_pool(kvd, id);
	return r;
}

static int adopt_all(struct kvd *kvd)
{
	struct kvd_kept *kept = &kvd->kept;
	bool late = KV_MUTANT(tag_before_epoch_store);
	int r = adopt_domains(kvd);

	for (u32 i = 0; i < kept->nr && !r; i++) {
		if (kept->fds[i].key.kind == KVD_KEEP_PAGE && kept->fds[i].fd >= 0)
			r = adopt_session(kvd, &kept->fds[i]);
		if (r == -ENODATA)
			r = 0;
	}
	if (r)
		return r;
	if (!late)
		kvd_adopt_epochs(&kvd->core);
	r = adopt_pools(kvd);
	if (late)
		kvd_adopt_epochs(&kvd->core);
	if (r)
		return r;
	kvd_adopt_done(&kvd->core);
	kvd->next_client_id = kept->image->next_client_id;
	return 0;
}

/* Invariants that do not hold after all that cannot be served: the keeper is told to let
 * go, and the next start is a cold one. */
static int adopt_audit(struct kvd *kvd, char *error)
{
	struct kvd_finding found[FINDINGS];
	struct kvd_findings fs = {.list = found, .max = FINDINGS};
	int r = kvd_audit_quick(&kvd->core, &fs);

	if (!r)
		return 0;
	for (u32 i = 0; i < KV_MIN(fs.nr, fs.max); i++)
		kvd_err("ipc/adopt", "I%u pool %u pfn %u: %s", found[i].invariant,
			found[i].pool_id, found[i].pfn, found[i].text);
	snprintf(error, KVD_CONFIG_ERROR_BYTES,
		 "adopt: the audit has %u findings: nothing of it is used", fs.nr);
	return -EBADMSG;
}

int kvd_kept_adopt(struct kvd *kvd, char *error)
{
	struct kvd_adopted *ad = &kvd->kept.adopted;
	u64 start_ns = kv_now_ns();
	int r;

	if (!kvd->kept.found)
		return 0;
	r = adopt_all(kvd);
	if (!r)
		r = adopt_audit(kvd, error);
	kvd->kept.adopt_ns = kv_now_ns() - start_ns;
	if (r)
		return r;
	kvd_info("ipc/adopt",
		 "adopted %u pools, %u pages, %u sessions (%u ended) in %llu us: %u "
		 "undone, %u finished, %u killed, damage %u (%u poisoned)",
		 ad->pools, ad->pages, ad->sessions, ad->ended,
		 (unsigned long long)(kvd->kept.adopt_ns / 1000), ad->undone,
		 ad->finished, ad->killed, ad->damage, ad->poisoned);
	return 0;
}
