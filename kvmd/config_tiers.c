/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config_tiers.c - "tiers" of the policy: sizes of the tiers, and each tenant's budget.
 *
 *	"tiers": {"dram": {"size": "64GiB"},
 *		  "nvme": {"path": "/var/lib/kvmd/nvme", "size": "1TiB", "depth": 64,
 *			   "write_from": 50, "read_ms": 1000}}
 *	"tenants": [{..., "tiers": [{"tier": "nvme", "min": 0, "max": "100GiB"}]}]
 *
 * A tenant without a line for a tier may use all of it.
 */
#include "kvmd/config_value.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define SIZE_MIN       (2ull << 20)
#define SIZE_MAX_BYTES (16ull << 40)
#define DEPTH_MAX      512u
#define READ_MS_MAX    600000u
#define WEIGHT_MAX     1000u
#define UNLIMITED      (1ull << 53)

void cfg_tiers_defaults(struct kvd_config *c)
{
	c->tiers.nvme_depth = 64;
	c->tiers.write_from = 50;
	c->tiers.read_ms = 1000;
}

void cfg_tiers_tenant_defaults(struct kvd_config_tenant *tenant)
{
	static const char *const names[] = {"dram", "nvme"};

	for (u32 i = 0; i < KVD_CONFIG_TIERS; i++) {
		struct kvd_config_gpu *q = &tenant->tiers[i];

		*q = (struct kvd_config_gpu){
			.high_bytes = UNLIMITED, .max_bytes = UNLIMITED, .weight = 100};
		strcpy(q->gpu, names[i]);
	}
}

static int tier_size(struct cfg_parser *p, const cJSON *item, u64 *ret)
{
	u64 bytes;
	int r = cfg_get_size(p, item, &bytes);

	if (r)
		return r;
	if (bytes < SIZE_MIN || bytes > SIZE_MAX_BYTES)
		return cfg_fail(p, item, "must be from 2MiB to 16TiB");
	/* whole segments: kvmd/tier/space.h */
	*ret = bytes;
	return 0;
}

static int nvme_path(struct cfg_parser *p, const cJSON *item)
{
	const char *s = cJSON_IsString(item) ? item->valuestring : "";

	if (s[0] != '/')
		return cfg_fail(p, item, "must be an absolute path of a directory");
	if (strlen(s) >= sizeof(p->config->tiers.nvme_path))
		return cfg_fail(p, item, "longer than %zu bytes",
				sizeof(p->config->tiers.nvme_path) - 1);
	strcpy(p->config->tiers.nvme_path, s);
	return 0;
}

static int nvme_field(struct cfg_parser *p, const cJSON *item)
{
	struct kvd_config_tiers *t = &p->config->tiers;

	if (!strcmp(item->string, "path"))
		return nvme_path(p, item);
	if (!strcmp(item->string, "size"))
		return tier_size(p, item, &t->nvme_bytes);
	if (!strcmp(item->string, "depth"))
		return cfg_get_uint(p, item, 1, DEPTH_MAX, &t->nvme_depth);
	if (!strcmp(item->string, "write_from"))
		return cfg_get_uint(p, item, 0, 100, &t->write_from);
	return cfg_get_uint(p, item, 1, READ_MS_MAX, &t->read_ms);
}

static int dram_field(struct cfg_parser *p, const cJSON *item)
{
	return tier_size(p, item, &p->config->tiers.dram_bytes);
}

static int parse_tier(struct cfg_parser *p, const cJSON *object)
{
	static const char *const dram_known[] = {"size", NULL};
	static const char *const nvme_known[] = {"path",       "size",	  "depth",
						 "write_from", "read_ms", NULL};
	bool nvme = !strcmp(object->string, "nvme");
	int r = cfg_each_field(p, object, nvme ? nvme_known : dram_known,
			       nvme ? nvme_field : dram_field);

	if (r)
		return r;
	if (!cJSON_HasObjectItem(object, "size"))
		return cfg_fail(p, NULL, "field \"size\" is missing");
	if (nvme && !cJSON_HasObjectItem(object, "path"))
		return cfg_fail(p, NULL, "field \"path\" is missing");
	return 0;
}

int cfg_parse_tiers(struct cfg_parser *p, const cJSON *object)
{
	static const char *const known[] = {"dram", "nvme", NULL};
	int r = cfg_each_field(p, object, known, parse_tier);

	if (r)
		return r;
	/* What is on its way to or from the disk lies in DRAM slots. */
	if (p->config->tiers.nvme_bytes && !p->config->tiers.dram_bytes)
		return cfg_fail(p, NULL, "\"nvme\" needs \"dram\": its pages pass there");
	return 0;
}

/* ---------------------------------------------------------------------- budgets */

static int budget_field(struct cfg_parser *p, const cJSON *item, struct kvd_config_gpu *q)
{
	static const char *const names[] = {"dram", "nvme"};
	u32 tier;

	if (!strcmp(item->string, "min"))
		return cfg_get_size(p, item, &q->min_bytes);
	if (!strcmp(item->string, "high"))
		return cfg_get_size(p, item, &q->high_bytes);
	if (!strcmp(item->string, "max"))
		return cfg_get_size(p, item, &q->max_bytes);
	if (!strcmp(item->string, "weight"))
		return cfg_get_uint(p, item, 1, WEIGHT_MAX, &q->weight);
	return cfg_get_choice(p, item, names, 2, &tier);
}

static int parse_budget(struct cfg_parser *p, const cJSON *object,
			struct kvd_config_tenant *tenant, u32 *seen)
{
	static const char *const known[] = {"tier", "min", "high", "max", "weight", NULL};
	const cJSON *item, *tier;
	struct kvd_config_gpu *q;
	u32 at;
	int r = cfg_check_fields(p, object, known);

	if (r)
		return r;
	tier = cJSON_GetObjectItemCaseSensitive(object, "tier");
	if (!tier)
		return cfg_fail(p, NULL, "field \"tier\" is missing");
	at = cJSON_IsString(tier) && !strcmp(tier->valuestring, "nvme");
	q = &tenant->tiers[at];
	cJSON_ArrayForEach(item, object)
	{
		json_path_push_key(&p->path, item->string);
		r = budget_field(p, item, q);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	if (*seen & 1u << at)
		return cfg_fail_at(p, "tier", tier,
				   "this tenant has a line for it already");
	*seen |= 1u << at;
	if (!cJSON_HasObjectItem(object, "high"))
		q->high_bytes = q->max_bytes;
	if (q->high_bytes > q->max_bytes)
		return cfg_fail_at(p, "high",
				   cJSON_GetObjectItemCaseSensitive(object, "high"),
				   "above max");
	if (q->min_bytes > q->high_bytes)
		return cfg_fail_at(p, "min",
				   cJSON_GetObjectItemCaseSensitive(object, "min"),
				   "above high (or max)");
	return 0;
}

int cfg_parse_tenant_tiers(struct cfg_parser *p, const cJSON *array,
			   struct kvd_config_tenant *tenant)
{
	const cJSON *item;
	u32 seen = 0;
	int r, i = 0;

	if (!cJSON_IsArray(array))
		return cfg_fail(p, array, "must be an array");
	cJSON_ArrayForEach(item, array)
	{
		json_path_push_index(&p->path, i++);
		r = parse_budget(p, item, tenant, &seen);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	return 0;
}

int cfg_tiers_sums(struct cfg_parser *p)
{
	const struct kvd_config *c = p->config;
	const u64 sizes[] = {c->tiers.dram_bytes, c->tiers.nvme_bytes};

	for (u32 tier = 0; tier < KVD_CONFIG_TIERS; tier++) {
		u64 sum = 0;

		for (u32 t = 0; t < c->nr_tenants; t++) {
			sum += c->tenants[t].tiers[tier].min_bytes;
			if (sum <= sizes[tier])
				continue;
			json_path_push_key(&p->path, "tenants");
			json_path_push_index(&p->path, (int)t);
			json_path_push_key(&p->path, "tiers");
			return cfg_fail(
				p, NULL,
				"with it the tenants' min of %s add up to %llu, it has "
				"%llu",
				tier ? "nvme" : "dram", (unsigned long long)sum,
				(unsigned long long)sizes[tier]);
		}
	}
	return 0;
}
