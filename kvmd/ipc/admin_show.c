/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/admin_show.c - the admin verbs that only look.
 *
 * Bytes are integers, 64-bit words (tags, fingerprints) hex strings, arrays always
 * arrays.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kvmd/ipc/admin_priv.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/own/core.h"
#include "kvmd/own/steer.h"

#define PAGES_LIMIT 65536u

/* ----------------------------------------------------------------- sessions */

static void add_steps(struct kvd *kvd, struct kvd_conn *conn, cJSON *out)
{
	cJSON *steps = cJSON_AddArrayToObject(out, "steps"), *step;
	u32 i;

	kvd_conn_look_slots(conn);
	for (i = 0; conn->page && i < KV_ANNOUNCE_SLOTS; i++) {
		if (conn->slots[i].epoch == KV_SLOT_IDLE)
			continue;
		step = cJSON_CreateObject();
		cJSON_AddNumberToObject(step, "slot", i);
		kvd_admin_u64(step, "epoch", conn->slots[i].epoch);
		kvd_admin_u64(step, "seen_ms",
			      (kvd->now_ns - conn->slots[i].since_ns) / 1000000);
		cJSON_AddItemToArray(steps, step);
	}
}

/* Stocked and not popped yet; held pages count both. */
static u32 magazine_count(const struct kvd_session *s)
{
	u32 m, i, nr = 0;

	for (m = 0; m < KV_MAGAZINES; m++)
		for (i = 0; i < KV_MAGAZINE_SLOTS; i++)
			nr += s->mags[m].slots[i].word &&
			      !kvd_mag_popped(&s->mags[m], &s->page->magazines[m], i);
	return nr;
}

static void add_session(struct kvd *kvd, struct kvd_conn *conn, cJSON *list)
{
	const struct kvd_session *s = conn->session;
	u32 held = 0, pools = 0, stocked, i;
	cJSON *o;

	if (!s)
		return;
	o = cJSON_CreateObject();
	stocked = magazine_count(s);
	for (i = 0; i < KV_POOLS_MAX; i++) {
		if (!s->attach[i].pool)
			continue;
		pools++;
		held += s->attach[i].nr_held;
	}
	kvd_admin_u64(o, "id", conn->client_id);
	cJSON_AddNumberToObject(o, "pid", conn->cred.pid);
	cJSON_AddNumberToObject(o, "uid", conn->cred.uid);
	cJSON_AddNumberToObject(o, "gid", conn->cred.gid);
	cJSON_AddStringToObject(o, "tenant", s->tenant->name);
	cJSON_AddStringToObject(o, "domain", s->tenant->domain->name);
	cJSON_AddStringToObject(o, "name", conn->name);
	cJSON_AddStringToObject(o, "role",
				conn->role == KV_ROLE_MONITOR ? "monitor" : "engine");
	cJSON_AddStringToObject(o, "state",
				s->state == KVD_SESSION_ENDED ? "ended"
				: s->reader.stalled	      ? "stalled"
							      : "live");
	kvd_admin_u64(o, "age_ms", (kvd->now_ns - conn->opened_ns) / 1000000);
	add_steps(kvd, conn, o);
	cJSON_AddNumberToObject(o, "pages", held - stocked);
	cJSON_AddNumberToObject(o, "magazine", stocked);
	cJSON_AddNumberToObject(o, "pools", pools);
	cJSON_AddNumberToObject(o, "requests", conn->nr_requests);
	kvd_admin_u64(o, "ops", conn->nr_ops);
	kvd_admin_u64(o, "incidents", s->stale_reports);
	kvd_admin_u64(o, "unread_ms",
		      conn->undispatched_ns
			      ? (kvd->now_ns - conn->undispatched_ns) / 1000000
			      : 0);
	cJSON_AddItemToArray(list, o);
}

int kvd_admin_ps(struct kvd_admin_call *call)
{
	cJSON *list = cJSON_AddArrayToObject(call->out, "sessions");
	struct kvd_conn *conn;

	list_for_each_entry (conn, &call->kvd->conns, node)
		add_session(call->kvd, conn, list);
	return 0;
}

/* -------------------------------------------------------------------- pages */

static cJSON *pool_brief(struct kvd *kvd, const struct kvd_pool *pool)
{
	cJSON *o = cJSON_CreateObject();
	const struct kvd_domain *domain = kvd->core.domains[pool->domain_id];

	cJSON_AddNumberToObject(o, "id", pool->id);
	cJSON_AddStringToObject(o, "domain", domain ? domain->name : "?");
	kvd_admin_u64(o, "stride_bytes", pool->geo.stride_bytes);
	cJSON_AddNumberToObject(o, "nr_pages", pool->geo.nr_pages);
	kvd_admin_states(o, pool->nr);
	return o;
}

static int state_filter(struct kvd_admin_call *call, int *ret_state)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(call->in, "state");
	char name[16];
	int i;

	*ret_state = -1;
	if (!item)
		return 0;
	for (i = 0; i < KVD_FRAME_STATES; i++) {
		kvd_admin_lower(kvd_frame_state_str((u32)i), name, sizeof(name));
		if (cJSON_IsString(item) && !strcmp(item->valuestring, name)) {
			*ret_state = i;
			return 0;
		}
	}
	return kvd_admin_fail(call, -EINVAL, "state: \"%s\": no such page state",
			      cJSON_IsString(item) ? item->valuestring : "?");
}

static const char *tenant_name(struct kvd *kvd, u32 index)
{
	return index < KVD_TENANTS_MAX && kvd->core.tenants[index]
		       ? kvd->core.tenants[index]->name
		       : "?";
}

static cJSON *page_brief(struct kvd *kvd, const struct kvd_frame *f)
{
	cJSON *o = cJSON_CreateObject();
	char state[16];

	kvd_admin_lower(kvd_frame_state_str(f->state), state, sizeof(state));
	cJSON_AddNumberToObject(o, "pfn", f->pfn);
	cJSON_AddStringToObject(o, "state", state);
	kvd_admin_hex(o, "tag", f->tag);
	kvd_admin_u64(o, "owner", f->owner);
	cJSON_AddNumberToObject(o, "refs", f->refs);
	if (f->state != KVD_FREE && f->state != KVD_ABSENT)
		cJSON_AddStringToObject(o, "tenant", tenant_name(kvd, f->tenant));
	else
		cJSON_AddNullToObject(o, "tenant");
	return o;
}

int kvd_admin_pages(struct kvd_admin_call *call)
{
	struct kvd *kvd = call->kvd;
	cJSON *pools = cJSON_AddArrayToObject(call->out, "pools"), *pages;
	u32 i, limit = 1000, from = 0, nr = 0;
	struct kvd_pool *pool;
	int r, state;

	for (i = 0; i < KVD_POOLS_MAX; i++)
		if (kvd->core.mm.pools[i])
			cJSON_AddItemToArray(pools,
					     pool_brief(kvd, kvd->core.mm.pools[i]));
	r = state_filter(call, &state);
	if (r)
		return r;
	if (!cJSON_HasObjectItem(call->in, "pool") && state < 0)
		return 0;
	r = kvd_admin_get_pool(call, &pool);
	if (r)
		return r;
	if (kvd_admin_get_u32(call, "limit", &limit) < 0 ||
	    kvd_admin_get_u32(call, "from", &from) < 0)
		return -EINVAL;
	limit = KV_MIN(limit, PAGES_LIMIT);
	pages = cJSON_AddArrayToObject(call->out, "pages");
	for (i = from; i < pool->geo.nr_pages && nr < limit; i++) {
		if (state < 0 ? pool->frames[i].state == KVD_ABSENT
			      : pool->frames[i].state != state)
			continue;
		cJSON_AddItemToArray(pages, page_brief(kvd, &pool->frames[i]));
		nr++;
	}
	cJSON_AddNumberToObject(call->out, "next", i);
	cJSON_AddBoolToObject(call->out, "more", i < pool->geo.nr_pages);
	return 0;
}

static void add_history(struct kvd *kvd, cJSON *out, const struct kvd_page_past *past,
			u32 nr)
{
	cJSON *list = cJSON_AddArrayToObject(out, "history"), *o;
	char state[16];
	u32 i;

	for (i = 0; i < nr; i++) {
		o = cJSON_CreateObject();
		kvd_admin_lower(kvd_frame_state_str(past[i].state), state, sizeof(state));
		kvd_admin_u64(o, "ago_ms", (kvd->now_ns - past[i].when_ns) / 1000000);
		cJSON_AddStringToObject(o, "event", kvd_page_event_str(past[i].event));
		cJSON_AddStringToObject(o, "state", state);
		cJSON_AddNumberToObject(o, "session", past[i].session);
		cJSON_AddItemToArray(list, o);
	}
}

static void add_holders(struct kvd *kvd, cJSON *out, struct kvd_pool *pool, u32 pfn)
{
	cJSON *list = cJSON_AddArrayToObject(out, "holders"), *o;
	const struct kvd_attach *a;
	struct kvd_session *s;

	list_for_each_entry (s, &kvd->core.sessions, node) {
		a = kvd_session_attach(s, pool->id);
		if (!a || !a->refs[pfn])
			continue;
		o = cJSON_CreateObject();
		kvd_admin_u64(o, "session", s->id);
		cJSON_AddNumberToObject(o, "pid", s->pid);
		cJSON_AddStringToObject(o, "name", s->name);
		cJSON_AddStringToObject(o, "tenant", s->tenant->name);
		cJSON_AddNumberToObject(o, "refs", a->refs[pfn]);
		cJSON_AddItemToArray(list, o);
	}
}

static void add_page_detail(cJSON *o, const struct kvd_pool *pool,
			    const struct kvd_frame *f)
{
	u32 extent = kvd_pool_extent_of(pool, f->pfn), i;
	char key[2 * KV_KEY_BYTES + 1];
	cJSON *e;

	for (i = 0; i < KV_KEY_BYTES; i++)
		snprintf(key + 2 * i, 3, "%02x", f->key[i]);
	cJSON_AddNumberToObject(o, "pool", pool->id);
	kvd_admin_u64(o, "generation", kv_tag_gen(f->tag));
	cJSON_AddBoolToObject(o, "live", kv_tag_live(f->tag));
	cJSON_AddBoolToObject(o, "sealed", kv_tag_sealed(f->tag));
	cJSON_AddBoolToObject(o, "indexed", f->flags & KVD_FRAME_INDEXED);
	cJSON_AddBoolToObject(o, "findable", f->flags & KVD_FRAME_FINDABLE);
	cJSON_AddBoolToObject(o, "pinned", f->flags & KVD_FRAME_HELD);
	if (f->flags & KVD_FRAME_INDEXED)
		cJSON_AddStringToObject(o, "key", key);
	else
		cJSON_AddNullToObject(o, "key");
	kvd_admin_hex(o, "crc32c", f->crc32c);
	e = cJSON_AddObjectToObject(o, "extent");
	cJSON_AddNumberToObject(e, "index", extent);
	kvd_admin_u64(e, "serial", pool->extents[extent].serial);
	kvd_admin_hex(o, "published_tag", kv_load_acquire64(&pool->table.tags[f->pfn]));
}

int kvd_admin_page(struct kvd_admin_call *call)
{
	struct kvd_page_past past[KVD_PAST_NR];
	struct kvd_pool *pool;
	u32 pfn = 0;
	cJSON *o;
	int r;

	r = kvd_admin_get_pool(call, &pool);
	if (r)
		return r;
	r = kvd_admin_get_u32(call, "pfn", &pfn);
	if (r <= 0)
		return r ? r : kvd_admin_fail(call, -EINVAL, "pfn: missing");
	if (pfn >= pool->geo.nr_pages)
		return kvd_admin_fail(call, -ENOENT, "pfn %u: pool %u has %u pages", pfn,
				      pool->id, pool->geo.nr_pages);
	o = page_brief(call->kvd, &pool->frames[pfn]);
	add_page_detail(o, pool, &pool->frames[pfn]);
	add_holders(call->kvd, o, pool, pfn);
	add_history(call->kvd, o, past, kvd_frame_history(&pool->frames[pfn], past));
	cJSON_AddItemToObject(call->out, "page", o);
	return 0;
}

/* -------------------------------------------------------- pools and tenants */

static cJSON *layout_json(const struct kv_layout *l)
{
	static const char *const kinds[] = {"?", "mla", "gqa"};
	static const char *const dtypes[] = {"?", "bf16", "e4m3", "f32"};
	static const char *const scales[] = {"none", "token", "static"};
	cJSON *o = cJSON_CreateObject();

	cJSON_AddStringToObject(o, "kind", kinds[l->kind <= KV_LAYOUT_GQA ? l->kind : 0]);
	cJSON_AddStringToObject(o, "dtype",
				dtypes[l->dtype <= KV_DTYPE_F32 ? l->dtype : 0]);
	cJSON_AddStringToObject(
		o, "scales",
		scales[l->scale_kind <= KV_SCALE_STATIC ? l->scale_kind : 0]);
	cJSON_AddNumberToObject(o, "layers", l->nr_layers);
	cJSON_AddNumberToObject(o, "kv_heads", l->nr_kv_heads);
	cJSON_AddNumberToObject(o, "head_dim", l->head_dim);
	cJSON_AddNumberToObject(o, "latent_dim", l->latent_dim);
	cJSON_AddNumberToObject(o, "rope_dim", l->rope_dim);
	cJSON_AddNumberToObject(o, "page_tokens", l->page_tokens);
	kvd_admin_u64(o, "lora_id", l->lora_id);
	return o;
}

int kvd_admin_pool(struct kvd_admin_call *call)
{
	cJSON *list = cJSON_AddArrayToObject(call->out, "pools"), *o;
	struct kvd *kvd = call->kvd;
	struct kvd_pool *one = NULL;
	u32 i;
	int r;

	if (cJSON_HasObjectItem(call->in, "pool")) {
		r = kvd_admin_get_pool(call, &one);
		if (r)
			return r;
	}
	for (i = 0; i < KVD_POOLS_MAX; i++) {
		struct kvd_pool *pool = kvd->core.mm.pools[i];

		if (!pool || (one && pool != one))
			continue;
		o = pool_brief(kvd, pool);
		kvd_admin_hex(o, "fingerprint", pool->fingerprint);
		cJSON_AddItemToObject(o, "layout", layout_json(&pool->layout));
		kvd_admin_u64(o, "page_bytes", kv_page_bytes(&pool->layout));
		kvd_admin_u64(o, "extent_bytes", pool->geo.extent_bytes);
		cJSON_AddNumberToObject(o, "extents", pool->nr_live_extents);
		cJSON_AddNumberToObject(o, "extents_max", pool->nr_extents);
		/* what each of its sessions reserves (cases O11) */
		kvd_admin_u64(o, "va_bytes", pool->nr_extents * pool->geo.extent_bytes);
		kvd_admin_u64(o, "allocs", pool->nr_allocs);
		kvd_admin_u64(o, "frees", pool->nr_frees);
		kvd_admin_u64(o, "seals", pool->nr_seals);
		kvd_admin_u64(o, "lookups", pool->nr_lookups);
		kvd_admin_u64(o, "hits", pool->nr_hits);
		kvd_admin_u64(o, "evictions", pool->nr_evictions);
		kvd_admin_u64(o, "log_head", pool->table.published);
		cJSON_AddItemToArray(list, o);
	}
	return 0;
}

static u32 tenant_held(const struct kvd *kvd, const struct kvd_tenant *t)
{
	u32 nr = 0;

	for (u32 i = 0; i < KVD_POOLS_MAX; i++)
		if (kvd->core.mm.pools[i])
			nr += kvd_steer_nr_held(kvd->core.mm.pools[i], t);
	return nr;
}

int kvd_admin_tenant(struct kvd_admin_call *call)
{
	const cJSON *name = cJSON_GetObjectItemCaseSensitive(call->in, "name");
	cJSON *list = cJSON_AddArrayToObject(call->out, "tenants"), *o;
	u32 i, found = 0;

	for (i = 0; i < KVD_TENANTS_MAX; i++) {
		const struct kvd_tenant *t = call->kvd->core.tenants[i];

		if (!t || (cJSON_IsString(name) && strcmp(name->valuestring, t->name)))
			continue;
		found++;
		o = cJSON_CreateObject();
		cJSON_AddStringToObject(o, "name", t->name);
		cJSON_AddStringToObject(o, "domain", t->domain->name);
		cJSON_AddNumberToObject(o, "sessions", t->nr_sessions);
		kvd_admin_u64(o, "used_bytes", t->account.used_bytes);
		kvd_admin_u64(o, "min_bytes", t->account.min_bytes);
		kvd_admin_u64(o, "high_bytes", t->account.high_bytes);
		kvd_admin_u64(o, "max_bytes", t->account.max_bytes);
		cJSON_AddNumberToObject(o, "weight", t->account.weight);
		cJSON_AddBoolToObject(o, "draining", t->account.draining);
		cJSON_AddNumberToObject(o, "pinned", tenant_held(call->kvd, t));
		kvd_admin_u64(o, "domain_extent_bytes", t->domain->extent_bytes);
		kvd_admin_states(o, t->account.nr);
		kvd_admin_u64(o, "allocs", t->allocs);
		kvd_admin_u64(o, "quota_refusals", t->quota_refusals);
		kvd_admin_u64(o, "full_refusals", t->full_refusals);
		kvd_admin_u64(o, "revision", t->revision);
		cJSON_AddItemToArray(list, o);
	}
	if (cJSON_IsString(name) && !found)
		return kvd_admin_fail(call, -ENOENT, "tenant \"%s\": no such tenant",
				      name->valuestring);
	return 0;
}

/* ---------------------------------------------------------------- incidents */

static void add_bits(cJSON *o, u32 bits)
{
	static const char *const names[] = {"PFN",    "HASH",	"GEN",	  "DEAD",
					    "SEALED", "LENGTH", "MIRROR", "NOCHECK"};
	cJSON *list = cJSON_AddArrayToObject(o, "reasons");
	u32 i;

	cJSON_AddNumberToObject(o, "bits", bits);
	for (i = 0; i < KV_ARRAY_SIZE(names); i++)
		if (bits >> i & 1)
			cJSON_AddItemToArray(list, cJSON_CreateString(names[i]));
}

static cJSON *incident_json(struct kvd *kvd, const struct kvd_incident *in)
{
	cJSON *o = cJSON_CreateObject(), *page;
	char state[16];

	kvd_admin_u64(o, "id", in->id);
	kvd_admin_u64(o, "ago_ms", (kvd->now_ns - in->when_ns) / 1000000);
	kvd_admin_u64(o, "session", in->client_id);
	cJSON_AddStringToObject(o, "client", in->client);
	cJSON_AddStringToObject(o, "tenant", in->tenant);
	cJSON_AddNumberToObject(o, "pool", in->pool_id);
	kvd_admin_u64(o, "request", in->report.request_id);
	kvd_admin_u64(o, "step", in->report.step);
	cJSON_AddNumberToObject(o, "row", in->report.row);
	cJSON_AddNumberToObject(o, "pfn", in->report.pfn);
	kvd_admin_hex(o, "expected", in->report.expected);
	kvd_admin_hex(o, "found", in->report.found);
	add_bits(o, in->report.bits);
	page = cJSON_AddObjectToObject(o, "page");
	kvd_admin_lower(kvd_frame_state_str(in->state), state, sizeof(state));
	cJSON_AddStringToObject(page, "state", state);
	kvd_admin_hex(page, "tag", in->tag);
	kvd_admin_u64(page, "owner", in->owner);
	cJSON_AddNumberToObject(page, "refs", in->refs);
	add_history(kvd, page, in->past, in->nr_past);
	return o;
}

int kvd_admin_incidents(struct kvd_admin_call *call)
{
	struct kvd_incidents *ring = &call->kvd->core.incidents;
	cJSON *list = cJSON_AddArrayToObject(call->out, "incidents");
	const struct kvd_incident *in;
	u32 id = 0, limit = KVD_INCIDENTS;
	u64 i;
	int r;

	kvd_admin_u64(call->out, "total", ring->total);
	if (kvd_admin_get_u32(call, "limit", &limit) < 0)
		return -EINVAL;
	r = kvd_admin_get_u32(call, "id", &id);
	if (r < 0)
		return r;
	if (r) {
		in = kvd_incident_get(ring, id);
		if (!in)
			return kvd_admin_fail(call, -ENOENT, "incident %u: not kept", id);
		cJSON_AddItemToArray(list, incident_json(call->kvd, in));
		return 0;
	}
	for (i = ring->total; i > 0 && limit; i--, limit--) {
		in = kvd_incident_get(ring, i);
		if (!in)
			break;
		cJSON_AddItemToArray(list, incident_json(call->kvd, in));
	}
	return 0;
}
