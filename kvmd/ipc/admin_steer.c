/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/admin_steer.c - the admin verbs by which an operator steers: pin, unpin, drain,
 * limit, revoke. Each takes "dry_run": then it counts and changes nothing.
 */
#include <errno.h>
#include <string.h>

#include "kvmd/ipc/admin_priv.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/own/core.h"
#include "kvmd/own/steer.h"

static bool flag(const struct kvd_admin_call *call, const char *name)
{
	return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(call->in, name));
}

static int get_tenant(struct kvd_admin_call *call, struct kvd_tenant **ret)
{
	const cJSON *name = cJSON_GetObjectItemCaseSensitive(call->in, "tenant");

	if (!cJSON_IsString(name))
		return kvd_admin_fail(call, -EINVAL, "tenant: missing");
	*ret = kvd_tenant_find(&call->kvd->core, name->valuestring);
	if (!*ret)
		return kvd_admin_fail(call, -ENOENT, "tenant \"%s\": no such tenant",
				      name->valuestring);
	return 0;
}

/* ---------------------------------------------------------------- pin, unpin */

static int get_page(struct kvd_admin_call *call, struct kvd_pool **ret_pool, u32 *ret_pfn)
{
	int r = kvd_admin_get_pool(call, ret_pool);

	if (r)
		return r;
	r = kvd_admin_get_u32(call, "pfn", ret_pfn);
	if (r <= 0)
		return r ? r : kvd_admin_fail(call, -EINVAL, "pfn: missing");
	if (*ret_pfn >= (*ret_pool)->geo.nr_pages)
		return kvd_admin_fail(call, -ENOENT, "pfn %u: pool %u has %u pages",
				      *ret_pfn, (*ret_pool)->id,
				      (*ret_pool)->geo.nr_pages);
	return 0;
}

int kvd_admin_pin(struct kvd_admin_call *call)
{
	bool dry_run = kvd_admin_dry_run(call);
	struct kvd_pool *pool;
	u32 pfn = 0, nr = 0;
	int r;

	r = get_page(call, &pool, &pfn);
	if (r)
		return r;
	r = kvd_steer_hold(pool, pfn, dry_run, &nr);
	if (r)
		return kvd_admin_fail(
			call, r,
			"pfn %u is %s: only pages in the prefix index can be "
			"pinned",
			pfn, kvd_frame_state_str(pool->frames[pfn].state));
	cJSON_AddBoolToObject(call->out, "dry_run", dry_run);
	cJSON_AddNumberToObject(call->out, "pages", nr);
	return 0;
}

int kvd_admin_unpin(struct kvd_admin_call *call)
{
	bool dry_run = kvd_admin_dry_run(call);
	struct kvd_pool *pool;
	u32 pfn = 0, nr = 0;
	int r;

	r = get_page(call, &pool, &pfn);
	if (r)
		return r;
	r = kvd_steer_unhold(pool, pfn, dry_run, &nr);
	if (r == -ENOENT)
		return kvd_admin_fail(call, r, "pfn %u is not pinned", pfn);
	if (r)
		return r;
	cJSON_AddBoolToObject(call->out, "dry_run", dry_run);
	cJSON_AddNumberToObject(call->out, "pages", nr);
	return 0;
}

/* -------------------------------------------------------------------- drain */

int kvd_admin_drain(struct kvd_admin_call *call)
{
	bool dry_run = kvd_admin_dry_run(call), off = flag(call, "off");
	struct kvd_drained d;
	struct kvd_tenant *t;
	int r;

	r = get_tenant(call, &t);
	if (r)
		return r;
	kvd_steer_drain(&call->kvd->core, t, !off, dry_run, &d);
	cJSON_AddBoolToObject(call->out, "dry_run", dry_run);
	cJSON_AddBoolToObject(call->out, "draining",
			      dry_run ? t->account.draining : !off);
	cJSON_AddNumberToObject(call->out, "evicted", d.evicted);
	cJSON_AddNumberToObject(call->out, "left_pages", d.left_pages);
	cJSON_AddNumberToObject(call->out, "sessions", d.sessions);
	return 0;
}

/* -------------------------------------------------------------------- limit */

static int get_bytes(struct kvd_admin_call *call, const char *name, u64 *ret)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(call->in, name);
	double d;

	if (!item)
		return 0;
	d = item->valuedouble;
	if (!cJSON_IsNumber(item) || !(d >= 0 && d <= (double)(1ull << 53)) ||
	    d != (double)(u64)d)
		return kvd_admin_fail(call, -EINVAL, "%s: must be whole bytes", name);
	*ret = (u64)d;
	return 0;
}

static int get_limits(struct kvd_admin_call *call, const struct kvd_tenant *t,
		      struct kvd_limits *ret)
{
	*ret = (struct kvd_limits){
		.min_bytes = t->account.min_bytes,
		.high_bytes = t->account.high_bytes,
		.max_bytes = t->account.max_bytes,
		.weight = t->account.weight,
	};
	if (get_bytes(call, "min_bytes", &ret->min_bytes) ||
	    get_bytes(call, "high_bytes", &ret->high_bytes) ||
	    get_bytes(call, "max_bytes", &ret->max_bytes) ||
	    kvd_admin_get_u32(call, "weight", &ret->weight) < 0)
		return -EINVAL;
	/* "--max" alone means it: a high that was no mark of its own, or is above, goes along */
	if (!cJSON_HasObjectItem(call->in, "high_bytes") &&
	    (t->account.high_bytes >= t->account.max_bytes ||
	     ret->high_bytes > ret->max_bytes))
		ret->high_bytes = ret->max_bytes;
	return 0;
}

int kvd_admin_limit(struct kvd_admin_call *call)
{
	bool dry_run = kvd_admin_dry_run(call);
	struct kvd_limits limits;
	const char *field = "?";
	enum kvd_steered what;
	struct kvd_tenant *t;
	u32 revision = 0;
	int r;

	r = get_tenant(call, &t);
	if (r)
		return r;
	r = get_limits(call, t, &limits);
	if (r)
		return r;
	r = kvd_admin_get_u32(call, "revision", &revision);
	if (r <= 0)
		return r ? r : kvd_admin_fail(call, -EINVAL, "revision: missing");
	what = kvd_steer_limits(&call->kvd->core, t, &limits, revision, dry_run, &field);
	if (what == KVD_STEER_STALE)
		return kvd_admin_fail(call, KV_BUSY,
				      "stale: the limits of \"%s\" are at revision %llu, "
				      "not %u",
				      t->name, (unsigned long long)t->revision, revision);
	if (what == KVD_STEER_CONFLICT)
		return kvd_admin_fail(
			call, KV_BUSY,
			"conflict: %s: min <= high <= max, and all min "
			"together fit into %llu bytes",
			field,
			(unsigned long long)call->kvd->core.mm.limits.capacity_bytes);
	cJSON_AddBoolToObject(call->out, "dry_run", dry_run);
	cJSON_AddStringToObject(call->out, "result", kvd_steered_str(what));
	kvd_admin_u64(call->out, "revision", t->revision);
	kvd_admin_u64(call->out, "used_bytes", t->account.used_bytes);
	return 0;
}

/* ------------------------------------------------------------------- revoke */

/* Ends sessions: one by id (@tenant NULL) or all of a tenant. Return: how many */
static u32 end_sessions(struct kvd *kvd, u64 id, const struct kvd_tenant *tenant,
			bool dry_run, u32 *ret_pages)
{
	struct kvd_conn *conn;
	u32 nr = 0, i;

	list_for_each_entry (conn, &kvd->conns, node) {
		const struct kvd_session *s = conn->session;

		if (!s || s->state != KVD_SESSION_LIVE ||
		    (tenant ? s->tenant != tenant : s->id != id))
			continue;
		nr++;
		for (i = 0; i < KV_POOLS_MAX; i++)
			if (s->attach[i].pool)
				*ret_pages += s->attach[i].nr_held;
		if (!dry_run)
			kvd_conn_end(conn, -ESHUTDOWN, "revoked by the operator");
	}
	return nr;
}

int kvd_admin_revoke(struct kvd_admin_call *call)
{
	bool dry_run = kvd_admin_dry_run(call);
	struct kvd_tenant *t = NULL;
	u32 id = 0, nr, pages = 0;
	int r;

	r = kvd_admin_get_u32(call, "session", &id);
	if (r < 0)
		return r;
	if (!r) {
		r = get_tenant(call, &t);
		if (r)
			return r;
	}
	nr = end_sessions(call->kvd, id, t, dry_run, &pages);
	if (!nr && !t)
		return kvd_admin_fail(call, -ENOENT, "session %u: no such session", id);
	cJSON_AddBoolToObject(call->out, "dry_run", dry_run);
	cJSON_AddNumberToObject(call->out, "sessions", nr);
	cJSON_AddNumberToObject(call->out, "pages", pages);
	return 0;
}
