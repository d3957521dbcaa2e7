/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reload.c - the policy file: read at the start and again, and tried for a start that is to come.
 *
 * Loop thread only.
 */
#include "kvmd/daemon.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/trace.h"
#include "kvmd/ipc/policy.h"

int kvd_config_start(const struct kvd *kvd, struct kvd_config *config, char *error)
{
	int r = 0;

	if (kvd->opt.config_path)
		r = kvd_config_load(kvd->opt.config_path, config, error);
	else
		kvd_config_single(config, geteuid());
	if (!r && kvd->opt.check >= 0)
		config->check = (u32)kvd->opt.check;
	return r;
}

/* Memory that exists does not change its shape under its users. */
static int restart_needed(const struct kvd *kvd, const struct kvd_config *config,
			  char *error)
{
	const struct {
		const char *field;
		u64 want, have;
	} fixed[] = {
		{"host_bytes", config->host_bytes, kvd->config.host_bytes},
		{"gpu_bytes", config->gpu_bytes, kvd->config.gpu_bytes},
		{"pool.extent", config->extent_bytes, kvd->config.extent_bytes},
		{"tiers.dram.size", config->tiers.dram_bytes,
		 kvd->config.tiers.dram_bytes},
		{"tiers.nvme.size", config->tiers.nvme_bytes,
		 kvd->config.tiers.nvme_bytes},
		{"tiers.nvme.depth", config->tiers.nvme_depth,
		 kvd->config.tiers.nvme_depth},
		{"tiers.nvme.write_from", config->tiers.write_from,
		 kvd->config.tiers.write_from},
		{"tiers.nvme.read_ms", config->tiers.read_ms, kvd->config.tiers.read_ms},
	};

	for (size_t i = 0; i < KV_ARRAY_SIZE(fixed); i++) {
		if (fixed[i].want == fixed[i].have)
			continue;
		snprintf(error, KVD_CONFIG_ERROR_BYTES,
			 "%s: %llu: in force is %llu, and changing it takes a restart",
			 fixed[i].field, (unsigned long long)fixed[i].want,
			 (unsigned long long)fixed[i].have);
		return -EINVAL;
	}
	if (strcmp(config->tiers.nvme_path, kvd->config.tiers.nvme_path)) {
		snprintf(
			error, KVD_CONFIG_ERROR_BYTES,
			"tiers.nvme.path: \"%.80s\": in force is \"%.80s\", and changing "
			"it takes a restart",
			config->tiers.nvme_path, kvd->config.tiers.nvme_path);
		return -EINVAL;
	}
	return 0;
}

int kvd_reload(struct kvd *kvd, bool dry_run, char *error, u32 *ret_deferred)
{
	struct kvd_config *config;
	int r;

	*ret_deferred = 0;
	if (!kvd->opt.config_path) {
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "started without --config");
		return -EOPNOTSUPP;
	}
	config = calloc(1, sizeof(*config));
	if (!config)
		return -ENOMEM;
	r = kvd_config_start(kvd, config, error);
	if (!r)
		r = restart_needed(kvd, config, error);
	if (!r)
		r = kvd_memory_domains(kvd, config, error);
	if (!r && dry_run) {
		r = kvd_policy_would(kvd, config, error, ret_deferred);
		goto free_config;
	}
	if (!r)
		r = kvd_policy_apply(kvd, config, error, ret_deferred);
	if (!r) {
		kvd->core.mm.stall_ns = config->stall_ms * KV_NSEC_PER_MSEC;
		kvd->core.cfg.idle_shrink_ns = config->idle_shrink_ms * KV_NSEC_PER_MSEC;
	}
	kvd_trace_config_reload(kvd->config_revision, (u64)(s64)r,
				kvd->config.nr_tenants);
free_config:
	free(config);
	return r;
}

/* ------------------------------------------------------------- a start to come */

int kvd_try(struct kvd *kvd, const struct kvd_options *opt, char *error)
{
	struct kvd_config *config = calloc(1, sizeof(*config));
	int r;

	error[0] = 0;
	kvd->opt = *opt;
	if (opt->backend == KVD_BACKEND_CUDA_LEGACY)
		kvd->memory.kind = KV_BACKEND_CUDA_LEGACY;
	r = config ? kvd_config_start(kvd, config, error) : -ENOMEM;
	if (!r)
		r = kvd_memory_domains(kvd, config, error);
	if (!r)
		r = kvd_tiering_fits(config, error);
	if (!r && opt->faults &&
	    kvd_fault_arm_text(opt->faults, error, KVD_CONFIG_ERROR_BYTES))
		r = -EINVAL;
	free(config);
	if (r && !error[0])
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "%s", strerror(-r));
	return r;
}

int kvd_try_next(struct kvd *kvd, char *error)
{
	struct kvd_config *config = calloc(1, sizeof(*config));
	u32 deferred;
	int r = -ENOMEM;

	error[0] = 0;
	if (!config)
		goto out;
	/* What this program cannot read the next one may: it was asked itself. */
	r = kvd_config_start(kvd, config, error);
	if (r) {
		r = 0;
		goto out;
	}
	r = kvd_memory_domains(kvd, config, error);
	if (!r)
		r = kvd_policy_would(kvd, config, error, &deferred);
out:
	free(config);
	if (r && !error[0])
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "%s", strerror(-r));
	return r;
}
