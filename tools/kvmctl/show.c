/* SPDX-License-Identifier: Apache-2.0 */
/* show.c - the verbs that look. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvmctl/kvmctl.h"

static const char *const state_names[] = {"free",     "active",	   "sealed",
					  "cached",   "magazine",  "quarantine",
					  "spilling", "restoring", "poisoned"};

/* Return: 1 and @ret; 0 not a number */
static int parse_id(const char *text, u32 *ret)
{
	char *end;
	unsigned long v = strtoul(text, &end, 10);

	if (end == text || *end || *text == '-' || v > 0xffffffffu)
		return 0;
	*ret = (u32)v;
	return 1;
}

void ctl_filter(struct ctl *ctl, cJSON *request)
{
	if (ctl->args.pool >= 0)
		cJSON_AddNumberToObject(request, "pool", (double)ctl->args.pool);
	if (ctl->args.limit >= 0)
		cJSON_AddNumberToObject(request, "limit", (double)ctl->args.limit);
	if (ctl->args.state)
		cJSON_AddStringToObject(request, "state", ctl->args.state);
}

int ctl_show(struct ctl *ctl, cJSON *request, const char *name,
	     int (*text)(struct ctl *ctl, const cJSON *reply))
{
	cJSON *reply = NULL;
	int r = ctl_ask(ctl, request, &reply);

	if (r)
		return r;
	r = ctl->args.json ? ctl_json(ctl, reply, name) : text(ctl, reply);
	cJSON_Delete(reply);
	return r;
}

/* ------------------------------------------------------------------- status */

static void health_text(const cJSON *reply)
{
	const cJSON *health = cJSON_GetObjectItemCaseSensitive(reply, "health");
	const cJSON *reasons = cJSON_GetObjectItemCaseSensitive(health, "reasons"), *r;
	const char *state = ctl_str(health, "state");

	printf("health     %s", !strcmp(state, "ok")	 ? "HEALTH_OK"
				: !strcmp(state, "warn") ? "HEALTH_WARN"
							 : "HEALTH_DAMAGE");
	cJSON_ArrayForEach(r, reasons)
		printf("%s%s: %s", r == reasons->child ? " " : "\n           ",
		       ctl_str(r, "code"), ctl_str(r, "text"));
	printf("\n");
}

static void pages_line(const cJSON *pages)
{
	size_t i;

	printf("pages     ");
	for (i = 0; i < KV_ARRAY_SIZE(state_names); i++)
		if (i < 6 || ctl_num(pages, state_names[i]) > 0)
			printf(" %.0f %s%s", ctl_num(pages, state_names[i]),
			       state_names[i],
			       i + 1 < KV_ARRAY_SIZE(state_names) && i < 5 ? "," : "");
	printf("\n");
}

static void gpu_line(struct ctl *ctl, const cJSON *gpu)
{
	char a[32];

	if (!cJSON_IsObject(gpu))
		return;
	printf("GPU        %s, %s", ctl_str(gpu, "uuid"), ctl_str(gpu, "state"));
	if (cJSON_HasObjectItem(gpu, "name"))
		printf(", %s, %s in all", ctl_str(gpu, "name"),
		       ctl_size(ctl, ctl_num(gpu, "total_bytes"), a, sizeof(a)));
	printf("\n");
}

static void mover_line(struct ctl *ctl, const cJSON *mover)
{
	char a[32], b[32];

	if (!cJSON_IsObject(mover))
		return;
	printf("mover      %s", ctl_str(mover, "state"));
	if (ctl_num(mover, "pid") > 0)
		printf(", pid %.0f", ctl_num(mover, "pid"));
	if (ctl_num(mover, "starts") > 0)
		printf(", started %.0f times, died %.0f; moved %s out, %s in, %.0f jobs, "
		       "%.0f failed",
		       ctl_num(mover, "starts"), ctl_num(mover, "deaths"),
		       ctl_size(ctl, ctl_num(mover, "out_bytes"), a, sizeof(a)),
		       ctl_size(ctl, ctl_num(mover, "in_bytes"), b, sizeof(b)),
		       ctl_num(mover, "jobs"), ctl_num(mover, "failed"));
	printf("\n");
}

static int status_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *mem = cJSON_GetObjectItemCaseSensitive(reply, "memory");
	char a[32], b[32], age[32];

	printf("kvmd %s  pid %.0f  up %s  check %s\n", ctl_str(reply, "version"),
	       ctl_num(reply, "pid"),
	       ctl_age(ctl_num(reply, "uptime_ms"), age, sizeof(age)),
	       ctl_str(reply, "check"));
	health_text(reply);
	printf("backend    %s (%s)\n", ctl_str(reply, "backend"),
	       ctl_str(reply, "backend_why"));
	gpu_line(ctl, cJSON_GetObjectItemCaseSensitive(reply, "gpu"));
	mover_line(ctl, cJSON_GetObjectItemCaseSensitive(reply, "mover"));
	printf("memory     %s of %s in extents\n",
	       ctl_size(ctl, ctl_num(mem, "extent_bytes"), a, sizeof(a)),
	       ctl_size(ctl, ctl_num(mem, "capacity_bytes"), b, sizeof(b)));
	pages_line(cJSON_GetObjectItemCaseSensitive(mem, "pages"));
	ctl_tier_lines(ctl, cJSON_GetObjectItemCaseSensitive(reply, "tiers"));
	printf("clients    %.0f sessions, %.0f tenants, %.0f pools\n",
	       ctl_num(reply, "sessions"), ctl_num(reply, "tenants"),
	       ctl_num(mem, "pools"));
	printf("checks     %.0f incidents; audit: %.0f sweeps, %.0f findings\n",
	       ctl_num(reply, "incidents"), ctl_num(reply, "audit_sweeps"),
	       ctl_num(reply, "audit_errors"));
	printf("loop       %s%s, grace epoch %.0f, policy revision %.0f\n",
	       ctl_str(reply, "loop"),
	       cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(reply, "spin")) ? ", spins"
									     : "",
	       ctl_num(reply, "grace_epoch"), ctl_num(reply, "config_revision"));
	return CTL_OK;
}

int ctl_status(struct ctl *ctl)
{
	const cJSON *health;
	cJSON *reply = NULL;
	const char *state;
	int r, level;

	r = ctl_ask(ctl, ctl_request("status"), &reply);
	if (r)
		return r;
	health = cJSON_GetObjectItemCaseSensitive(reply, "health");
	state = ctl_str(health, "state");
	level = !strcmp(state, "ok")	 ? CTL_OK
		: !strcmp(state, "warn") ? CTL_WARNINGS
					 : CTL_DAMAGE;
	if (ctl->args.quiet)
		printf("%s\n", state);
	else
		r = ctl->args.json ? ctl_json(ctl, reply, "status")
				   : status_text(ctl, reply);
	cJSON_Delete(reply);
	return r ? r : level;
}

/* ----------------------------------------------------------------- sessions */

static const struct ctl_column ps_columns[] = {
	{"id", "ID", CTL_COUNT, false},
	{"pid", "PID", CTL_COUNT, false},
	{"uid", "UID", CTL_COUNT, false},
	{"tenant", "TENANT", CTL_TEXT, false},
	{"name", "NAME", CTL_TEXT, false},
	{"state", "STATE", CTL_TEXT, false},
	{"age_ms", "AGE", CTL_AGE, false},
	{"pages", "PAGES", CTL_COUNT, false},
	{"magazine", "MAGAZINE", CTL_COUNT, false},
	{"ops", "OPS", CTL_COUNT, false},
	{"steps", "STEPS IN FLIGHT", CTL_STEPS, false},
	{"gid", "GID", CTL_COUNT, true},
	{"domain", "DOMAIN", CTL_TEXT, true},
	{"role", "ROLE", CTL_TEXT, true},
	{"pools", "POOLS", CTL_COUNT, true},
	{"requests", "REQUESTS", CTL_COUNT, true},
	{"incidents", "INCIDENTS", CTL_COUNT, true},
	{"unread_ms", "UNREAD", CTL_AGE, true},
	{NULL, NULL, CTL_TEXT, false},
};

static int ps_text(struct ctl *ctl, const cJSON *reply)
{
	return ctl_list(ctl, cJSON_GetObjectItemCaseSensitive(reply, "sessions"),
			ps_columns);
}

int ctl_ps(struct ctl *ctl)
{
	return ctl_show(ctl, ctl_request("ps"), "ps", ps_text);
}

/* -------------------------------------------------------------------- pages */

static const struct ctl_column pools_columns[] = {
	{"id", "POOL", CTL_COUNT, false},
	{"domain", "DOMAIN", CTL_TEXT, false},
	{"free", "FREE", CTL_COUNT, false},
	{"magazine", "MAGAZINE", CTL_COUNT, false},
	{"active", "ACTIVE", CTL_COUNT, false},
	{"sealed", "SEALED", CTL_COUNT, false},
	{"cached", "CACHED", CTL_COUNT, false},
	{"quarantine", "QUARANTINE", CTL_COUNT, false},
	{"poisoned", "POISONED", CTL_COUNT, false},
	{"absent", "ABSENT", CTL_COUNT, false},
	{"nr_pages", "MOST", CTL_COUNT, false},
	{"stride_bytes", "PAGE", CTL_SIZE, false},
	{"spilling", "SPILLING", CTL_COUNT, true},
	{"restoring", "RESTORING", CTL_COUNT, true},
	{NULL, NULL, CTL_TEXT, false},
};

static const struct ctl_column pages_columns[] = {
	{"pfn", "PFN", CTL_COUNT, false},     {"state", "STATE", CTL_TEXT, false},
	{"tag", "TAG", CTL_TEXT, false},      {"refs", "REFS", CTL_COUNT, false},
	{"owner", "OWNER", CTL_COUNT, false}, {"tenant", "TENANT", CTL_TEXT, false},
	{NULL, NULL, CTL_TEXT, false},
};

static int pages_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *pages = cJSON_GetObjectItemCaseSensitive(reply, "pages");
	int r;

	if (!pages)
		return ctl_list(ctl, cJSON_GetObjectItemCaseSensitive(reply, "pools"),
				pools_columns);
	r = ctl_list(ctl, pages, pages_columns);
	if (!r && cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(reply, "more")) &&
	    ctl->args.format == CTL_TABLE && !ctl->args.quiet)
		printf("(more: --limit N)\n");
	return r;
}

int ctl_pages(struct ctl *ctl)
{
	cJSON *request = ctl_request("pages");

	ctl_filter(ctl, request);
	return ctl_show(ctl, request, "pages", pages_text);
}

static const struct ctl_column history_columns[] = {
	{"ago_ms", "AGO", CTL_AGE, false},  {"event", "EVENT", CTL_TEXT, false},
	{"state", "THEN", CTL_TEXT, false}, {"session", "SESSION", CTL_COUNT, false},
	{NULL, NULL, CTL_TEXT, false},
};

static const struct ctl_column holder_columns[] = {
	{"session", "SESSION", CTL_COUNT, false}, {"pid", "PID", CTL_COUNT, false},
	{"name", "NAME", CTL_TEXT, false},	  {"tenant", "TENANT", CTL_TEXT, false},
	{"refs", "REFS", CTL_COUNT, false},	  {NULL, NULL, CTL_TEXT, false},
};

/* Sub-tables use their own columns whatever --fields and --format say. */
static void sub_table(struct ctl *ctl, const cJSON *array,
		      const struct ctl_column *columns)
{
	struct ctl plain = *ctl;

	plain.args.nr_fields = 0;
	plain.args.format = CTL_TABLE;
	plain.args.quiet = false;
	ctl_list(&plain, array, columns);
}

static int page_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *p = cJSON_GetObjectItemCaseSensitive(reply, "page");
	const cJSON *extent = cJSON_GetObjectItemCaseSensitive(p, "extent"), *list;

	printf("page %.0f of pool %.0f: %s, tenant %s, last writer session %.0f\n",
	       ctl_num(p, "pfn"), ctl_num(p, "pool"), ctl_str(p, "state"),
	       ctl_str(p, "tenant"), ctl_num(p, "owner"));
	printf("tag      %s (generation %.0f%s%s), published %s\n", ctl_str(p, "tag"),
	       ctl_num(p, "generation"),
	       cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(p, "live")) ? ", LIVE"
									 : ", dead",
	       cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(p, "sealed")) ? ", SEALED"
									   : "",
	       ctl_str(p, "published_tag"));
	printf("refs     %.0f    extent %.0f serial %.0f    crc32c %s\n",
	       ctl_num(p, "refs"), ctl_num(extent, "index"), ctl_num(extent, "serial"),
	       ctl_str(p, "crc32c"));
	printf("key      %s%s\n", ctl_str(p, "key"),
	       cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(p, "findable"))
		       ? " (findable)"
		       : "");
	list = cJSON_GetObjectItemCaseSensitive(p, "holders");
	printf("\nholders:%s\n", cJSON_GetArraySize(list) ? "" : " none");
	if (cJSON_GetArraySize(list))
		sub_table(ctl, list, holder_columns);
	list = cJSON_GetObjectItemCaseSensitive(p, "history");
	printf("\nhistory:%s\n", cJSON_GetArraySize(list) ? "" : " none");
	if (cJSON_GetArraySize(list))
		sub_table(ctl, list, history_columns);
	return CTL_OK;
}

int ctl_page(struct ctl *ctl)
{
	cJSON *request;
	u32 pfn;

	if (!parse_id(ctl->args.words[1], &pfn))
		return ctl_error(ctl, CTL_USAGE, "page \"%s\": a pfn is a whole number",
				 ctl->args.words[1]);
	request = ctl_request("page");
	cJSON_AddNumberToObject(request, "pfn", pfn);
	ctl_filter(ctl, request);
	return ctl_show(ctl, request, "page", page_text);
}

/* -------------------------------------------------------- pools and tenants */

static const struct ctl_column pool_columns[] = {
	{"id", "POOL", CTL_COUNT, false},
	{"domain", "DOMAIN", CTL_TEXT, false},
	{"stride_bytes", "PAGE", CTL_SIZE, false},
	{"extents", "EXTENTS", CTL_COUNT, false},
	{"extent_bytes", "EXTENT", CTL_SIZE, false},
	{"nr_pages", "MOST PAGES", CTL_COUNT, false},
	{"free", "FREE", CTL_COUNT, false},
	{"active", "ACTIVE", CTL_COUNT, false},
	{"cached", "CACHED", CTL_COUNT, false},
	{"allocs", "ALLOCS", CTL_COUNT, false},
	{"lookups", "LOOKUPS", CTL_COUNT, false},
	{"hits", "HITS", CTL_COUNT, false},
	{"evictions", "EVICTED", CTL_COUNT, false},
	{"fingerprint", "LAYOUT", CTL_TEXT, false},
	{"frees", "FREES", CTL_COUNT, true},
	{"seals", "SEALS", CTL_COUNT, true},
	{"page_bytes", "BYTES IN A PAGE", CTL_SIZE, true},
	{"extents_max", "MOST EXTENTS", CTL_COUNT, true},
	{"va_bytes", "ADDRESSES", CTL_SIZE, true},
	{"sealed", "SEALED", CTL_COUNT, true},
	{"quarantine", "QUARANTINE", CTL_COUNT, true},
	{"magazine", "MAGAZINE", CTL_COUNT, true},
	{"log_head", "LOG HEAD", CTL_COUNT, true},
	{NULL, NULL, CTL_TEXT, false},
};

static int pool_text(struct ctl *ctl, const cJSON *reply)
{
	return ctl_list(ctl, cJSON_GetObjectItemCaseSensitive(reply, "pools"),
			pool_columns);
}

int ctl_pool(struct ctl *ctl)
{
	cJSON *request;
	u32 id = 0;

	if (ctl->args.nr_words > 1 && !parse_id(ctl->args.words[1], &id))
		return ctl_error(ctl, CTL_USAGE,
				 "pool \"%s\": a pool id is a whole number",
				 ctl->args.words[1]);
	request = ctl_request("pool");
	if (ctl->args.nr_words > 1)
		ctl->args.pool = id;
	ctl_filter(ctl, request);
	return ctl_show(ctl, request, "pool", pool_text);
}

static const struct ctl_column tenant_columns[] = {
	{"name", "TENANT", CTL_TEXT, false},
	{"domain", "DOMAIN", CTL_TEXT, false},
	{"sessions", "SESSIONS", CTL_COUNT, false},
	{"used_bytes", "USED", CTL_SIZE, false},
	{"min_bytes", "MIN", CTL_SIZE, false},
	{"high_bytes", "HIGH", CTL_SIZE, false},
	{"max_bytes", "MAX", CTL_SIZE, false},
	{"active", "ACTIVE", CTL_COUNT, false},
	{"sealed", "SEALED", CTL_COUNT, false},
	{"cached", "CACHED", CTL_COUNT, false},
	{"quota_refusals", "OVER QUOTA", CTL_COUNT, false},
	{"full_refusals", "FULL", CTL_COUNT, false},
	{"weight", "WEIGHT", CTL_COUNT, true},
	{"draining", "DRAINING", CTL_TEXT, true},
	{"pinned", "PINNED", CTL_COUNT, true},
	{"magazine", "MAGAZINE", CTL_COUNT, true},
	{"quarantine", "QUARANTINE", CTL_COUNT, true},
	{"allocs", "ALLOCS", CTL_COUNT, true},
	{"revision", "REVISION", CTL_COUNT, true},
	{"domain_extent_bytes", "DOMAIN EXTENTS", CTL_SIZE, true},
	{NULL, NULL, CTL_TEXT, false},
};

/* Keeps the tenant that @name names, whole or by a unique beginning. Return: exit code */
static int tenant_filter(struct ctl *ctl, cJSON *list, const char *name)
{
	const cJSON *t, *found = NULL;
	int i, nr = 0;

	cJSON_ArrayForEach(t, list)
	{
		if (!strcmp(ctl_str(t, "name"), name)) {
			found = t;
			nr = 1;
			break;
		}
		if (!strncmp(ctl_str(t, "name"), name, strlen(name))) {
			found = t;
			nr++;
		}
	}
	if (nr != 1)
		return ctl_error(ctl, CTL_NO_OBJECT, "tenant \"%s\": %s", name,
				 nr ? "several begin like this" : "no such tenant");
	for (i = cJSON_GetArraySize(list) - 1; i >= 0; i--)
		if (cJSON_GetArrayItem(list, i) != found)
			cJSON_DeleteItemFromArray(list, i);
	return CTL_OK;
}

int ctl_tenant(struct ctl *ctl)
{
	cJSON *reply = NULL, *list;
	int r;

	r = ctl_ask(ctl, ctl_request("tenant"), &reply);
	if (r)
		return r;
	list = cJSON_GetObjectItemCaseSensitive(reply, "tenants");
	if (ctl->args.nr_words > 1)
		r = tenant_filter(ctl, list, ctl->args.words[1]);
	if (!r)
		r = ctl->args.json ? ctl_json(ctl, reply, "tenant")
				   : ctl_list(ctl, list, tenant_columns);
	cJSON_Delete(reply);
	return r;
}

/* ---------------------------------------------------------------- incidents */

static const struct ctl_column incident_columns[] = {
	{"id", "ID", CTL_COUNT, false},
	{"ago_ms", "AGO", CTL_AGE, false},
	{"tenant", "TENANT", CTL_TEXT, false},
	{"client", "CLIENT", CTL_TEXT, false},
	{"request", "REQUEST", CTL_COUNT, false},
	{"row", "ROW", CTL_COUNT, false},
	{"pool", "POOL", CTL_COUNT, false},
	{"pfn", "PFN", CTL_COUNT, false},
	{"reasons", "REASONS", CTL_LIST, false},
	{"expected", "EXPECTED", CTL_TEXT, false},
	{"found", "FOUND", CTL_TEXT, false},
	{"session", "SESSION", CTL_COUNT, true},
	{"step", "STEP", CTL_COUNT, true},
	{NULL, NULL, CTL_TEXT, false},
};

static void incident_text(struct ctl *ctl, const cJSON *in)
{
	const cJSON *page = cJSON_GetObjectItemCaseSensitive(in, "page"), *r;
	const cJSON *reasons = cJSON_GetObjectItemCaseSensitive(in, "reasons");
	char age[32];

	printf("incident %.0f, %s ago: client %s (session %.0f, tenant %s)\n",
	       ctl_num(in, "id"), ctl_age(ctl_num(in, "ago_ms"), age, sizeof(age)),
	       ctl_str(in, "client"), ctl_num(in, "session"), ctl_str(in, "tenant"));
	printf("  request %.0f, row %.0f, step %.0f: page %.0f of pool %.0f failed:",
	       ctl_num(in, "request"), ctl_num(in, "row"), ctl_num(in, "step"),
	       ctl_num(in, "pfn"), ctl_num(in, "pool"));
	cJSON_ArrayForEach(r, reasons) printf(" %s", r->valuestring);
	printf("\n  expected %s, found %s\n", ctl_str(in, "expected"),
	       ctl_str(in, "found"));
	printf("  the page then: %s, tag %s, %.0f refs, last writer session %.0f; history:\n",
	       ctl_str(page, "state"), ctl_str(page, "tag"), ctl_num(page, "refs"),
	       ctl_num(page, "owner"));
	sub_table(ctl, cJSON_GetObjectItemCaseSensitive(page, "history"),
		  history_columns);
}

static int incidents_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(reply, "incidents"), *in;

	if (ctl->args.quiet || ctl->args.nr_fields || ctl->args.format == CTL_CSV)
		return ctl_list(ctl, list, incident_columns);
	if (!cJSON_GetArraySize(list)) {
		printf("no incidents\n");
		return CTL_OK;
	}
	sub_table(ctl, list, incident_columns);
	cJSON_ArrayForEach(in, list)
	{
		/* The newest in full; older ones when asked for by id. */
		printf("\n");
		incident_text(ctl, in);
		break;
	}
	return CTL_OK;
}

int ctl_incidents(struct ctl *ctl)
{
	cJSON *request;
	u32 id = 0;

	if (ctl->args.nr_words > 1 && !parse_id(ctl->args.words[1], &id))
		return ctl_error(ctl, CTL_USAGE,
				 "incident \"%s\": an id is a whole number",
				 ctl->args.words[1]);
	request = ctl_request("incidents");
	if (ctl->args.nr_words > 1)
		cJSON_AddNumberToObject(request, "id", id);
	ctl_filter(ctl, request);
	return ctl_show(ctl, request, "incidents", incidents_text);
}

/* ----------------------------------------------------------------- the rest */

static const struct ctl_column op_columns[] = {
	{"op", "OPERATION", CTL_TEXT, false},
	{"calls", "CALLS", CTL_COUNT, false},
	{"KV_OK", "OK", CTL_COUNT, false},
	{"KV_FULL", "FULL", CTL_COUNT, false},
	{"KV_QUOTA", "QUOTA", CTL_COUNT, false},
	{"KV_PENDING", "PENDING", CTL_COUNT, false},
	{"KV_STALE", "STALE", CTL_COUNT, false},
	{"KV_MISS", "MISS", CTL_COUNT, false},
	{"errors", "ERRORS", CTL_COUNT, false},
	{"p50_ns", "P50 NS", CTL_COUNT, false},
	{"p99_ns", "P99 NS", CTL_COUNT, false},
	{NULL, NULL, CTL_TEXT, false},
};

static int stat_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *counters = cJSON_GetObjectItemCaseSensitive(reply, "counters"), *c;
	const cJSON *heap = cJSON_GetObjectItemCaseSensitive(reply, "heap");
	char size[32];
	int r;

	r = ctl_list(ctl, cJSON_GetObjectItemCaseSensitive(reply, "ops"), op_columns);
	if (r || ctl->args.quiet || ctl->args.format == CTL_CSV)
		return r;
	printf("\n");
	cJSON_ArrayForEach(c, counters)
		printf("%-22s %12.0f\n", c->string, c->valuedouble);
	cJSON_ArrayForEach(c, heap)
		printf("heap %-17s %12s\n", c->string,
		       ctl_size(ctl, c->valuedouble, size, sizeof(size)));
	return CTL_OK;
}

int ctl_stat(struct ctl *ctl)
{
	return ctl_show(ctl, ctl_request("stat"), "stat", stat_text);
}

static int trace_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(reply, "trace"), *e, *a;

	if (cJSON_HasObjectItem(reply, "text")) {
		printf("%s", ctl_str(reply, "text"));
		return CTL_OK;
	}
	cJSON_ArrayForEach(e, list)
	{
		printf("%12.0f us ago  %-16s", ctl_num(e, "ago_us"), ctl_str(e, "event"));
		cJSON_ArrayForEach(a, e)
		{
			if (!strcmp(a->string, "ago_us") || !strcmp(a->string, "event"))
				continue;
			if (cJSON_IsString(a))
				printf(" %s=%s", a->string, a->valuestring);
			else
				printf(" %s=%.0f", a->string, a->valuedouble);
		}
		printf("\n");
	}
	return CTL_OK;
}

int ctl_trace(struct ctl *ctl)
{
	cJSON *request = ctl_request("trace");

	ctl_filter(ctl, request);
	return ctl_show(ctl, request, "trace", trace_text);
}
