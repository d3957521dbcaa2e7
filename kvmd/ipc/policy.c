/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/policy.c - see policy.h. */
#include "kvmd/ipc/policy.h"

#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/mutant.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"

#define SECRET_BYTES 32

/*
 * A domain's secret is derived from one secret of the host, kept in the state directory,
 * so that it is the same after a restart (a stored tier stays readable) and differs per
 * domain.
 */
static int host_secret(struct kvd *kvd, u8 *secret)
{
	ssize_t n;
	int fd, r;

	fd = openat(kvd->state.dir_fd, "secret", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	if (fd >= 0) {
		n = read(fd, secret, SECRET_BYTES);
		close(fd);
		return n == SECRET_BYTES ? 0 : -EBADMSG;
	}
	if (errno != ENOENT)
		return -errno;
	randombytes_buf(secret, SECRET_BYTES);
	fd = openat(kvd->state.dir_fd, "secret.new",
		    O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return -errno;
	r = write(fd, secret, SECRET_BYTES) == SECRET_BYTES && !fsync(fd) ? 0 : -EIO;
	close(fd);
	if (r)
		return r;
	return renameat(kvd->state.dir_fd, "secret.new", kvd->state.dir_fd, "secret")
		       ? -errno
		       : 0;
}

int kvd_policy_secret(struct kvd *kvd, const char *name, u8 *ret_secret)
{
	u8 host[SECRET_BYTES];
	int r = host_secret(kvd, host);

	if (r)
		return r;
	crypto_generichash(ret_secret, KVD_DOMAIN_SECRET_BYTES, (const u8 *)name,
			   strlen(name), host, sizeof(host));
	sodium_memzero(host, sizeof(host));
	return 0;
}

static int domain_get(struct kvd *kvd, const char *name, struct kvd_domain **ret)
{
	u8 secret[KVD_DOMAIN_SECRET_BYTES];
	int r;

	*ret = kvd_domain_find(&kvd->core, name);
	if (*ret)
		return 0;
	r = kvd_policy_secret(kvd, name, secret);
	if (r)
		return r;
	r = kvd_domain_create(&kvd->core, name, secret, ret);
	sodium_memzero(secret, sizeof(secret));
	return r;
}

/* No quota line for this backend: the tenant may connect; no page fits into one byte. */
static const struct kvd_limits no_memory = {.high_bytes = 1, .max_bytes = 1, .weight = 1};

static struct kvd_limits limits_of(const struct kvd *kvd,
				   const struct kvd_config_tenant *t)
{
	char name[KVD_UUID_TEXT];
	const struct kvd_config_gpu *q =
		kvd_config_quota(t, kvd_memory_quota_name(kvd, name));

	if (!q)
		return no_memory;
	return (struct kvd_limits){
		.min_bytes = q->min_bytes,
		.high_bytes = q->high_bytes,
		.max_bytes = q->max_bytes,
		.weight = q->weight,
	};
}

/* Pages that there would be room for under a policy: its size of the memory may be another one than
 * that of the policy in force. 0: not known before the next start. */
static u64 capacity_under(const struct kvd *kvd, const struct kvd_config *config)
{
	bool host = kvd->memory.kind == KV_BACKEND_HOST;
	u64 want = host ? config->host_bytes : config->gpu_bytes;
	u64 have = host ? kvd->config.host_bytes : kvd->config.gpu_bytes;
	bool fixed = host ? kvd->opt.host_bytes : kvd->opt.gpu_bytes; /* command line */

	if (fixed || want == have || !kvd->config_revision)
		return kvd->core.mm.limits.capacity_bytes;
	return want;
}

static const struct kvd_config_tenant *config_find(const struct kvd_config *config,
						   const char *name)
{
	u32 t;

	for (t = 0; t < config->nr_tenants; t++)
		if (!strcmp(config->tenants[t].name, name))
			return &config->tenants[t];
	return NULL;
}

/* One without tenants is not made. */
static bool domain_is_new(struct kvd *kvd, const struct kvd_config *config, u32 d)
{
	u32 t = 0;

	while (t < config->nr_tenants && config->tenants[t].domain != d)
		t++;
	return t < config->nr_tenants &&
	       !kvd_domain_find(&kvd->core, config->domains[d].name);
}

/* Who leaves the policy goes behind those who come, and not before its last page. @domain: NULL all.
 * Return: tenants that there are together */
static u32 nr_tenants_under(const struct kvd *kvd, const struct kvd_config *config,
			    const char *domain)
{
	u32 nr = 0;

	for (u32 t = 0; t < config->nr_tenants; t++)
		nr += !domain ||
		      !strcmp(config->domains[config->tenants[t].domain].name, domain);
	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		const struct kvd_tenant *have = kvd->core.tenants[i];

		nr += have && (!domain || !strcmp(have->domain->name, domain)) &&
		      !config_find(config, have->name);
	}
	return nr;
}

/* Without it the start that is refused would be the first to know: after an upgrade's exec(). */
static int room_check(struct kvd *kvd, const struct kvd_config *config, char *error)
{
	const char *in = "", *what = "domains";
	u32 nr = 0, max = KVD_DOMAINS_MAX;

	for (u32 i = 0; i < KVD_DOMAINS_MAX; i++)
		nr += kvd->core.domains[i] != NULL;
	for (u32 d = 0; d < config->nr_domains; d++)
		nr += domain_is_new(kvd, config, d);
	if (nr <= max) {
		what = "tenants";
		nr = nr_tenants_under(kvd, config, NULL);
		max = KVD_TENANTS_MAX;
	}
	for (u32 d = 0; d < config->nr_domains && nr <= max; d++) {
		in = config->domains[d].name;
		nr = nr_tenants_under(kvd, config, in);
		max = KVD_DOMAIN_TENANTS_MAX;
	}
	if (nr <= max)
		return 0;
	snprintf(error, KVD_CONFIG_ERROR_BYTES,
		 "%s: \"%s\": %u with those that leave, %u is the most: a reload "
		 "without those first, then the new ones",
		 what, in, nr, max);
	return -EINVAL;
}

/* What the file alone cannot tell: sums against this host, tenants that change domain. */
static int policy_check(struct kvd *kvd, const struct kvd_config *config, char *error)
{
	u64 sum = 0, capacity = capacity_under(kvd, config);
	u32 t;

	for (t = 0; t < config->nr_tenants; t++) {
		const struct kvd_config_tenant *ct = &config->tenants[t];
		struct kvd_tenant *have = kvd_tenant_find(&kvd->core, ct->name);
		const char *domain = config->domains[ct->domain].name;

		sum += limits_of(kvd, ct).min_bytes;
		/* 0: a GPU that has not started yet */
		if (capacity && sum > capacity) {
			snprintf(
				error, KVD_CONFIG_ERROR_BYTES,
				"tenants[%u].gpus: \"%s\": the tenants' min add up to %llu, "
				"this host has %llu bytes",
				t, ct->name, (unsigned long long)sum,
				(unsigned long long)capacity);
			return -EINVAL;
		}
		if (have && strcmp(have->domain->name, domain)) {
			snprintf(
				error, KVD_CONFIG_ERROR_BYTES,
				"tenants[%u]: \"%s\": is in domain \"%s\" and cannot move to "
				"\"%s\" while it exists",
				t, ct->name, have->domain->name, domain);
			return -EINVAL;
		}
	}
	return room_check(kvd, config, error);
}

/* Gives up every min first: the new ones may be larger here and smaller there. */
static void mins_drop(struct kvd *kvd, const struct kvd_config *config, u32 *ret_deferred)
{
	bool deferred;
	u32 i;

	for (i = 0; i < KVD_TENANTS_MAX; i++) {
		struct kvd_tenant *have = kvd->core.tenants[i];
		const struct kvd_config_tenant *ct;
		struct kvd_limits l = no_memory;
		int r;

		if (!have)
			continue;
		ct = config_find(config, have->name);
		if (ct)
			l = limits_of(kvd, ct);
		l.min_bytes = 0;
		r = kvd_tenant_set_limits(&kvd->core, have, &l, &deferred);
		kv_assert(!r);
		if (!ct && (have->nr_sessions || have->account.used_bytes))
			(*ret_deferred)++;
	}
}

/* All that can fail: domains and tenants that are new, without memory for now. */
static int tenant_make(struct kvd *kvd, const struct kvd_config *config, u32 t)
{
	const struct kvd_config_tenant *ct = &config->tenants[t];
	struct kvd_limits l = limits_of(kvd, ct);
	struct kvd_domain *domain;
	struct kvd_tenant *tenant;
	const char *field;
	int r;

	if (l.min_bytes > l.high_bytes)
		return -EINVAL;
	l.min_bytes = 0;
	r = kvd_limits_check(&kvd->core, NULL, &l, &field);
	if (r || kvd_tenant_find(&kvd->core, ct->name))
		return r;
	r = kvd_fault(KVD_FAULT_tenant_alloc) ? -ENOMEM : 0;
	if (!r)
		r = domain_get(kvd, config->domains[ct->domain].name, &domain);
	if (r)
		return r;
	return kvd_tenant_create(&kvd->core, domain, ct->name, &no_memory, &tenant);
}

static void limits_apply(struct kvd *kvd, const struct kvd_config *config, u32 t,
			 u32 *ret_deferred)
{
	const struct kvd_config_tenant *ct = &config->tenants[t];
	struct kvd_tenant *tenant = kvd_tenant_find(&kvd->core, ct->name);
	struct kvd_limits l = limits_of(kvd, ct);
	bool deferred = false;

	/* Nothing can be promised before the size is known; then this is called again. */
	if (!kvd->core.mm.limits.capacity_bytes)
		l.min_bytes = 0;
	kv_assert(tenant && !kvd_tenant_set_limits(&kvd->core, tenant, &l, &deferred));
	*ret_deferred += deferred;
}

int kvd_policy_would(struct kvd *kvd, const struct kvd_config *config, char *error,
		     u32 *ret_deferred)
{
	*ret_deferred = 0;
	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		const struct kvd_tenant *have = kvd->core.tenants[i];
		const struct kvd_config_tenant *ct;

		if (!have)
			continue;
		ct = config_find(config, have->name);
		if (ct)
			*ret_deferred +=
				have->account.used_bytes > limits_of(kvd, ct).max_bytes;
		else
			*ret_deferred += have->nr_sessions || have->account.used_bytes;
	}
	return policy_check(kvd, config, error);
}

int kvd_policy_apply(struct kvd *kvd, const struct kvd_config *config, char *error,
		     u32 *ret_deferred)
{
	u32 t;
	int r;

	*ret_deferred = 0;
	r = policy_check(kvd, config, error);
	if (r)
		return r;
	for (t = 0; t < config->nr_tenants && !r; t++)
		r = tenant_make(kvd, config, t);
	if (r) {
		t--;
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "tenants[%u]: \"%s\": %s", t,
			 config->tenants[t].name, strerror(-r));
		if (!KV_MUTANT(policy_half_applied))
			kvd_policy_sweep(
				kvd); /* what was made just now is in no policy */
		return r;
	}
	mins_drop(kvd, config, ret_deferred);
	for (t = 0; t < config->nr_tenants; t++)
		limits_apply(kvd, config, t, ret_deferred);
	kvd->config = *config;
	kvd->config_revision++;
	kvd_tiering_limits(kvd);
	kvd_policy_sweep(kvd);
	return 0;
}

void kvd_policy_sweep(struct kvd *kvd)
{
	struct kvd_domain *domain;
	struct kvd_tenant *tenant;
	u32 i, d;

	for (i = 0; i < KVD_TENANTS_MAX; i++) {
		tenant = kvd->core.tenants[i];
		if (tenant && !config_find(&kvd->config, tenant->name) &&
		    !kvd_tenant_destroy(&kvd->core, tenant))
			kvd_info("ipc/policy", "a tenant that left the policy is gone");
	}
	for (i = 0; i < KVD_DOMAINS_MAX; i++) {
		domain = kvd->core.domains[i];
		for (d = 0; domain && d < kvd->config.nr_domains; d++)
			if (!strcmp(kvd->config.domains[d].name, domain->name))
				domain = NULL;
		if (domain)
			kvd_domain_destroy(&kvd->core, domain);
	}
}
