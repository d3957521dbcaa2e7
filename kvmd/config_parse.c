/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config_parse.c - JSON text to struct kvd_config, or an error with line, field and
 * value.
 *
 * cJSON gives no line numbers. A field is therefore named by its path from the root, and
 * json_line.c finds the line of a path in the text, once, when an error is to be written.
 */
#include "kvmd/config_value.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mutant.h"

#define EXTENT_BYTES_MIN (2ull << 20)
#define EXTENT_BYTES_MAX (1ull << 30)
#define STALL_MS_MAX	 3600000u
#define WEIGHT_MAX	 1000u

/* ------------------------------------------------------------------ tenants */

static bool is_gpu_name(const char *s)
{
	size_t i;

	if (!strcmp(s, "host") || !strcmp(s, "*"))
		return true;
	if (strncmp(s, "GPU-", 4) || strlen(s) != 40)
		return false;
	for (i = 4; i < 40; i++) {
		bool dash = i == 12 || i == 17 || i == 22 || i == 27;

		if (dash ? s[i] != '-' : !isxdigit((unsigned char)s[i]))
			return false;
	}
	return true;
}

static int parse_gpu_field(struct cfg_parser *p, const cJSON *item,
			   struct kvd_config_gpu *gpu)
{
	int r;

	if (!strcmp(item->string, "min"))
		return cfg_get_size(p, item, &gpu->min_bytes);
	if (!strcmp(item->string, "high"))
		return cfg_get_size(p, item, &gpu->high_bytes);
	if (!strcmp(item->string, "max")) {
		r = cfg_get_size(p, item, &gpu->max_bytes);
		return r || gpu->max_bytes ? r : cfg_fail(p, item, "must be more than 0");
	}
	if (!strcmp(item->string, "weight"))
		return cfg_get_uint(p, item, 1, WEIGHT_MAX, &gpu->weight);
	if (!cJSON_IsString(item) || !is_gpu_name(item->valuestring))
		return cfg_fail(p, item, "must be \"host\", \"*\" or \"GPU-<uuid>\"");
	snprintf(gpu->gpu, sizeof(gpu->gpu), "%s", item->valuestring);
	return 0;
}

static int parse_gpu(struct cfg_parser *p, const cJSON *object,
		     struct kvd_config_tenant *tenant)
{
	static const char *const known[] = {"gpu", "min", "high", "max", "weight", NULL};
	struct kvd_config_gpu *gpu = &tenant->gpus[tenant->nr_gpus];
	const cJSON *item;
	u32 i;
	int r;

	*gpu = (struct kvd_config_gpu){.weight = 100};
	r = cfg_check_fields(p, object, known);
	if (r)
		return r;
	if (!cJSON_HasObjectItem(object, "gpu"))
		return cfg_fail(p, NULL, "field \"gpu\" is missing");
	if (!cJSON_HasObjectItem(object, "max"))
		return cfg_fail(p, NULL, "field \"max\" is missing");
	cJSON_ArrayForEach(item, object)
	{
		json_path_push_key(&p->path, item->string);
		r = parse_gpu_field(p, item, gpu);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	if (!cJSON_HasObjectItem(object, "high"))
		gpu->high_bytes = gpu->max_bytes;
	if (gpu->high_bytes > gpu->max_bytes)
		return cfg_fail_at(p, "high",
				   cJSON_GetObjectItemCaseSensitive(object, "high"),
				   "above max");
	if (gpu->min_bytes > gpu->high_bytes && !KV_MUTANT(min_above_high))
		return cfg_fail_at(p, "min",
				   cJSON_GetObjectItemCaseSensitive(object, "min"),
				   "above high (or max)");
	for (i = 0; i < tenant->nr_gpus; i++)
		if (!strcmp(tenant->gpus[i].gpu, gpu->gpu))
			return cfg_fail_at(
				p, "gpu", cJSON_GetObjectItemCaseSensitive(object, "gpu"),
				"this tenant has a line for it already");
	tenant->nr_gpus++;
	return 0;
}

static int parse_gpus(struct cfg_parser *p, const cJSON *array,
		      struct kvd_config_tenant *tenant)
{
	const cJSON *item;
	int r, i = 0;

	if (!cJSON_IsArray(array))
		return cfg_fail(p, array, "must be an array");
	cJSON_ArrayForEach(item, array)
	{
		json_path_push_index(&p->path, i++);
		if (tenant->nr_gpus == KVD_CONFIG_GPUS_MAX)
			return cfg_fail(p, NULL, "more than %u lines",
					KVD_CONFIG_GPUS_MAX);
		r = parse_gpu(p, item, tenant);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	return 0;
}

/* uids or gids; one id belongs to one tenant, or admission would depend on file order */
static int parse_ids(struct cfg_parser *p, const cJSON *array, bool gids,
		     struct kvd_config_tenant *tenant)
{
	const struct kvd_config *c = p->config;
	u32 *nr = gids ? &tenant->nr_gids : &tenant->nr_uids;
	const cJSON *item;
	u32 id, t, k;
	int r, i = 0;

	if (!cJSON_IsArray(array))
		return cfg_fail(p, array, "must be an array of numbers");
	cJSON_ArrayForEach(item, array)
	{
		json_path_push_index(&p->path, i++);
		r = cfg_get_uint(p, item, 0, 0xfffffffeu, &id);
		if (r)
			return r;
		for (t = 0; t <= c->nr_tenants; t++) {
			const struct kvd_config_tenant *o = &c->tenants[t];
			u32 n = gids ? o->nr_gids : o->nr_uids;

			for (k = 0; k < n; k++)
				if ((gids ? o->gids[k] : o->uids[k]) == id)
					return cfg_fail(
						p, item,
						"belongs to tenant \"%s\" already",
						o->name[0] ? o->name : "(this)");
		}
		if (*nr == KVD_CONFIG_IDS_MAX)
			return cfg_fail(p, item, "more than %u ids", KVD_CONFIG_IDS_MAX);
		if (gids)
			tenant->gids[(*nr)++] = id;
		else
			tenant->uids[(*nr)++] = id;
		json_path_pop(&p->path);
	}
	return 0;
}

static int parse_tenant(struct cfg_parser *p, const cJSON *object)
{
	static const char *const known[] = {"name", "uids",  "gids",
					    "gpus", "tiers", NULL};
	struct kvd_config *c = p->config;
	struct kvd_config_tenant *tenant = &c->tenants[c->nr_tenants];
	const cJSON *item;
	u32 i;
	int r;

	memset(tenant, 0, sizeof(*tenant));
	tenant->domain = KVD_CONFIG_DOMAINS_MAX;
	cfg_tiers_tenant_defaults(tenant);
	r = cfg_check_fields(p, object, known);
	if (r)
		return r;
	item = cJSON_GetObjectItemCaseSensitive(object, "name");
	if (!item)
		return cfg_fail(p, NULL, "field \"name\" is missing");
	json_path_push_key(&p->path, "name");
	r = cfg_get_name(p, item, tenant->name);
	if (r)
		return r;
	for (i = 0; i < c->nr_tenants; i++)
		if (!strcmp(c->tenants[i].name, tenant->name))
			return cfg_fail(p, item, "this name is taken by tenants[%u]", i);
	json_path_pop(&p->path);
	cJSON_ArrayForEach(item, object)
	{
		if (!strcmp(item->string, "name"))
			continue;
		json_path_push_key(&p->path, item->string);
		if (!strcmp(item->string, "gpus"))
			r = parse_gpus(p, item, tenant);
		else if (!strcmp(item->string, "tiers"))
			r = cfg_parse_tenant_tiers(p, item, tenant);
		else
			r = parse_ids(p, item, item->string[0] == 'g', tenant);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	if (!tenant->nr_uids && !tenant->nr_gids)
		return cfg_fail(p, NULL, "tenant \"%s\" has neither uids nor gids",
				tenant->name);
	c->nr_tenants++;
	return 0;
}

static int parse_tenants(struct cfg_parser *p, const cJSON *array)
{
	const cJSON *item;
	int r, i = 0;

	if (!cJSON_IsArray(array))
		return cfg_fail(p, array, "must be an array");
	cJSON_ArrayForEach(item, array)
	{
		json_path_push_index(&p->path, i++);
		if (p->config->nr_tenants == KVD_CONFIG_TENANTS_MAX)
			return cfg_fail(p, NULL, "more than %u tenants",
					KVD_CONFIG_TENANTS_MAX);
		r = parse_tenant(p, item);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	if (!p->config->nr_tenants)
		return cfg_fail(p, array, "no tenant: nobody could connect");
	return 0;
}

/* ------------------------------------------------------------------ domains */

static struct kvd_config_tenant *tenant_find(struct kvd_config *c, const char *name)
{
	u32 i;

	for (i = 0; i < c->nr_tenants; i++)
		if (!strcmp(c->tenants[i].name, name))
			return &c->tenants[i];
	return NULL;
}

static int parse_domain_tenants(struct cfg_parser *p, const cJSON *array, u32 domain)
{
	struct kvd_config_tenant *tenant;
	const cJSON *item;
	int i = 0;

	if (!cJSON_IsArray(array) || !array->child)
		return cfg_fail(p, array, "must be a non-empty array of tenant names");
	cJSON_ArrayForEach(item, array)
	{
		json_path_push_index(&p->path, i++);
		tenant = cJSON_IsString(item) ? tenant_find(p->config, item->valuestring)
					      : NULL;
		if (!tenant)
			return cfg_fail(p, item, "no such tenant");
		if (tenant->domain != KVD_CONFIG_DOMAINS_MAX)
			return cfg_fail(p, item, "is in domain \"%s\" already",
					p->config->domains[tenant->domain].name);
		if ((u32)i > KVD_CONFIG_DOMAIN_TENANTS_MAX)
			return cfg_fail(p, item, "more than %u tenants in a domain",
					KVD_CONFIG_DOMAIN_TENANTS_MAX);
		tenant->domain = domain;
		json_path_pop(&p->path);
	}
	return 0;
}

static int parse_domain(struct cfg_parser *p, const cJSON *object)
{
	static const char *const known[] = {"name", "tenants", NULL};
	struct kvd_config *c = p->config;
	char name[KV_NAME_BYTES];
	const cJSON *item;
	u32 i;
	int r;

	r = cfg_check_fields(p, object, known);
	if (r)
		return r;
	item = cJSON_GetObjectItemCaseSensitive(object, "name");
	if (!item)
		return cfg_fail(p, NULL, "field \"name\" is missing");
	json_path_push_key(&p->path, "name");
	r = cfg_get_name(p, item, name);
	if (r)
		return r;
	for (i = 0; i < c->nr_domains; i++)
		if (!strcmp(c->domains[i].name, name))
			return cfg_fail(p, item, "this name is taken by domains[%u]", i);
	json_path_pop(&p->path);
	item = cJSON_GetObjectItemCaseSensitive(object, "tenants");
	if (!item)
		return cfg_fail(p, NULL, "field \"tenants\" is missing");
	strcpy(c->domains[c->nr_domains].name, name);
	json_path_push_key(&p->path, "tenants");
	r = parse_domain_tenants(p, item, c->nr_domains);
	if (r)
		return r;
	json_path_pop(&p->path);
	c->nr_domains++;
	return 0;
}

static int parse_domains(struct cfg_parser *p, const cJSON *array)
{
	const cJSON *item;
	int r, i = 0;

	if (!cJSON_IsArray(array))
		return cfg_fail(p, array, "must be an array");
	cJSON_ArrayForEach(item, array)
	{
		json_path_push_index(&p->path, i++);
		if (p->config->nr_domains == KVD_CONFIG_DOMAINS_MAX)
			return cfg_fail(p, NULL, "more than %u domains",
					KVD_CONFIG_DOMAINS_MAX);
		r = parse_domain(p, item);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	return 0;
}

/* A tenant that no domain lists is a domain alone (design 2). */
static int lone_domains(struct cfg_parser *p)
{
	struct kvd_config *c = p->config;
	u32 t, d;

	for (t = 0; t < c->nr_tenants; t++) {
		if (c->tenants[t].domain != KVD_CONFIG_DOMAINS_MAX)
			continue;
		for (d = 0; d < c->nr_domains; d++) {
			if (strcmp(c->domains[d].name, c->tenants[t].name))
				continue;
			json_path_push_key(&p->path, "domains");
			json_path_push_index(&p->path, (int)d);
			json_path_push_key(&p->path, "name");
			return cfg_fail(p, NULL,
					"\"%s\" is also a tenant outside this domain",
					c->domains[d].name);
		}
		if (c->nr_domains == KVD_CONFIG_DOMAINS_MAX)
			return cfg_fail(p, NULL, "more than %u domains",
					KVD_CONFIG_DOMAINS_MAX);
		strcpy(c->domains[c->nr_domains].name, c->tenants[t].name);
		c->tenants[t].domain = c->nr_domains++;
	}
	return 0;
}

/* ----------------------------------------------------------------- the rest */

static int parse_pool_field(struct cfg_parser *p, const cJSON *item)
{
	struct kvd_config *c = p->config;
	int r;

	if (!strcmp(item->string, "idle_shrink_ms"))
		return cfg_get_uint(p, item, 1, STALL_MS_MAX, &c->idle_shrink_ms);
	r = cfg_get_size(p, item, &c->extent_bytes);
	if (!r && (!kv_is_pow2(c->extent_bytes) || c->extent_bytes < EXTENT_BYTES_MIN ||
		   c->extent_bytes > EXTENT_BYTES_MAX))
		return cfg_fail(p, item, "must be a power of two from 2MiB to 1GiB");
	return r;
}

static int parse_pool(struct cfg_parser *p, const cJSON *object)
{
	static const char *const known[] = {"extent", "idle_shrink_ms", NULL};

	return cfg_each_field(p, object, known, parse_pool_field);
}

/* Of less than an extent nobody could have a page. */
static int get_capacity(struct cfg_parser *p, const cJSON *item, u64 *ret)
{
	int r = cfg_get_size(p, item, ret);

	return r || *ret >= EXTENT_BYTES_MIN ? r
					     : cfg_fail(p, item, "must be at least 2MiB");
}

static int parse_root_field(struct cfg_parser *p, const cJSON *item)
{
	static const char *const checks[] = {"batch", "off", "strict"};
	static const char *const stalls[] = {"warn", "kill"};
	struct kvd_config *c = p->config;
	u32 v = 0;
	int r;

	if (!strcmp(item->string, "tenants"))
		return parse_tenants(p, item);
	if (!strcmp(item->string, "pool"))
		return parse_pool(p, item);
	if (!strcmp(item->string, "tiers"))
		return cfg_parse_tiers(p, item);
	if (!strcmp(item->string, "check"))
		return cfg_get_choice(p, item, checks, 3, &c->check);
	if (!strcmp(item->string, "stall_ms"))
		return cfg_get_uint(p, item, 1, STALL_MS_MAX, &c->stall_ms);
	if (!strcmp(item->string, "host_bytes"))
		return get_capacity(p, item, &c->host_bytes);
	if (!strcmp(item->string, "gpu_bytes"))
		return get_capacity(p, item, &c->gpu_bytes);
	r = cfg_get_choice(p, item, stalls, 2, &v);
	if (!r)
		c->on_stall = v ? KVD_STALL_KILL : KVD_STALL_WARN;
	return r;
}

/* Guaranteed memory that does not exist is no guarantee. */
static int check_sums(struct cfg_parser *p)
{
	const struct kvd_config *c = p->config;
	u64 sum = 0;
	u32 t;

	if (!c->host_bytes)
		return 0;
	for (t = 0; t < c->nr_tenants; t++) {
		const struct kvd_config_gpu *q = kvd_config_quota(&c->tenants[t], "host");

		sum += q ? q->min_bytes : 0;
		if (sum <= c->host_bytes)
			continue;
		json_path_push_key(&p->path, "tenants");
		json_path_push_index(&p->path, (int)t);
		json_path_push_key(&p->path, "gpus");
		return cfg_fail(
			p, NULL,
			"with it the tenants' min add up to %llu, host_bytes is %llu",
			(unsigned long long)sum, (unsigned long long)c->host_bytes);
	}
	return 0;
}

static int parse_root(struct cfg_parser *p, const cJSON *root)
{
	static const char *const known[] = {
		"domains",  "tenants",	  "pool",      "check", "stall_ms",
		"on_stall", "host_bytes", "gpu_bytes", "tiers", NULL};
	const cJSON *item;
	int r;

	r = cfg_check_fields(p, root, known);
	if (r)
		return r;
	if (!cJSON_HasObjectItem(root, "tenants"))
		return cfg_fail(p, NULL, "field \"tenants\" is missing");
	cJSON_ArrayForEach(item, root)
	{
		if (!strcmp(item->string, "domains"))
			continue; /* names tenants: after them */
		json_path_push_key(&p->path, item->string);
		r = parse_root_field(p, item);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	item = cJSON_GetObjectItemCaseSensitive(root, "domains");
	if (item) {
		json_path_push_key(&p->path, "domains");
		r = parse_domains(p, item);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	r = lone_domains(p);
	if (!r)
		r = check_sums(p);
	return r ? r : cfg_tiers_sums(p);
}

int kvd_config_parse(const char *text, size_t bytes, struct kvd_config *ret_config,
		     char *error)
{
	struct cfg_parser p = {.text = text, .bytes = bytes, .error = error};
	const char *end = NULL;
	cJSON *root = NULL;
	int r;

	error[0] = 0;
	p.config = calloc(1, sizeof(*p.config));
	if (!p.config) {
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "out of memory");
		return -ENOMEM;
	}
	kvd_config_defaults(p.config);
	if (!memchr(text, 0, bytes))
		root = cJSON_ParseWithLengthOpts(text, bytes, &end, 0);
	else
		end = memchr(text, 0, bytes);
	while (root && end < text + bytes && isspace((unsigned char)*end))
		end++;
	if (!root || end != text + bytes) {
		size_t at = end ? (size_t)(end - text) : 0;
		int show = (int)KV_MIN(bytes - at, (size_t)24);

		snprintf(error, KVD_CONFIG_ERROR_BYTES, "line %u: not JSON near \"%.*s\"",
			 json_offset_line(text, bytes, at), show, text + at);
		for (char *c = error; *c; c++)
			*c = iscntrl((unsigned char)*c) ? ' ' : *c;
		r = -EINVAL;
	} else {
		r = parse_root(&p, root);
	}
	if (!r)
		*ret_config = *p.config;
	cJSON_Delete(root);
	free(p.config);
	return r;
}
