/* SPDX-License-Identifier: Apache-2.0 */
/* config.c - defaults, reading the file, look-ups. config_parse.c validates. */
#include "kvmd/config.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int kvd_size_parse(const char *text, u64 *ret_bytes)
{
	static const struct {
		const char *name;
		u64 factor;
	} units[] = {
		{"", 1},
		{"B", 1},
		{"KiB", 1ull << 10},
		{"MiB", 1ull << 20},
		{"GiB", 1ull << 30},
		{"TiB", 1ull << 40},
		{"KB", 1000},
		{"MB", 1000000},
		{"GB", 1000000000},
		{"TB", 1000000000000},
	};
	u64 v = 0;
	size_t i;

	if (!isdigit((unsigned char)*text))
		return -EINVAL;
	for (; isdigit((unsigned char)*text); text++) {
		if (v > (1ull << 63) / 10)
			return -ERANGE;
		v = v * 10 + (u64)(*text - '0');
	}
	while (*text == ' ')
		text++;
	for (i = 0; i < KV_ARRAY_SIZE(units); i++) {
		if (strcmp(units[i].name, text))
			continue;
		if (v > (1ull << 63) / units[i].factor)
			return -ERANGE;
		*ret_bytes = v * units[i].factor;
		return 0;
	}
	return -EINVAL;
}

void kvd_config_defaults(struct kvd_config *config)
{
	memset(config, 0, sizeof(*config));
	config->idle_shrink_ms = 60000;
	config->check = KV_CHECK_BATCH;
	config->stall_ms = 1000;
	config->on_stall = KVD_STALL_WARN;
	cfg_tiers_defaults(config);
}

void kvd_config_single(struct kvd_config *config, uid_t uid)
{
	struct kvd_config_tenant *t = &config->tenants[0];

	kvd_config_defaults(config);
	config->nr_domains = 1;
	config->nr_tenants = 1;
	strcpy(config->domains[0].name, "default");
	strcpy(t->name, "default");
	cfg_tiers_tenant_defaults(t);
	t->nr_uids = 1;
	t->uids[0] = uid;
	t->nr_gpus = 1;
	strcpy(t->gpus[0].gpu, "*");
	t->gpus[0].weight = 100;
	t->gpus[0].high_bytes = t->gpus[0].max_bytes = 1ull << 53;
}

/* Errors begin with the file's name, as a compiler's do. */
static int parse_named(const char *path, const char *text, size_t bytes,
		       struct kvd_config *ret_config, char *error)
{
	char why[KVD_CONFIG_ERROR_BYTES];
	int r = kvd_config_parse(text, bytes, ret_config, why);

	if (r)
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "%.60s: %.190s", path, why);
	return r;
}

int kvd_config_load(const char *path, struct kvd_config *ret_config, char *error)
{
	size_t used = 0;
	char *text;
	ssize_t n;
	int fd, r;

	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) {
		r = -errno;
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "%s: %s", path, strerror(-r));
		return r;
	}
	text = malloc(KVD_CONFIG_BYTES_MAX + 1);
	r = text ? 0 : -ENOMEM;
	while (!r && used <= KVD_CONFIG_BYTES_MAX) {
		n = read(fd, text + used, KVD_CONFIG_BYTES_MAX + 1 - used);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			r = -errno;
		if (n <= 0)
			break;
		used += (size_t)n;
	}
	if (!r && used > KVD_CONFIG_BYTES_MAX)
		r = -EFBIG;
	if (r)
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "%s: %s", path, strerror(-r));
	else
		r = parse_named(path, text, used, ret_config, error);
	free(text);
	close(fd);
	return r;
}

int kvd_config_tenant_of(const struct kvd_config *config, uid_t uid, gid_t gid)
{
	u32 t, i;

	for (t = 0; t < config->nr_tenants; t++)
		for (i = 0; i < config->tenants[t].nr_uids; i++)
			if (config->tenants[t].uids[i] == uid)
				return (int)t;
	for (t = 0; t < config->nr_tenants; t++)
		for (i = 0; i < config->tenants[t].nr_gids; i++)
			if (config->tenants[t].gids[i] == gid)
				return (int)t;
	return -EACCES;
}

const struct kvd_config_gpu *kvd_config_quota(const struct kvd_config_tenant *tenant,
					      const char *gpu)
{
	const struct kvd_config_gpu *any = NULL;
	u32 i;

	for (i = 0; i < tenant->nr_gpus; i++) {
		if (!strcmp(tenant->gpus[i].gpu, gpu))
			return &tenant->gpus[i];
		if (!strcmp(tenant->gpus[i].gpu, "*"))
			any = &tenant->gpus[i];
	}
	return any;
}
