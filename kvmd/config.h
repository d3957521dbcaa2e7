/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.h - the operator's policy: domains, tenants, quotas, modes.
 *
 * A file is read, parsed and validated as a whole into a fresh struct kvd_config; only a
 * faultless one is ever applied. An error names line, field path and value:
 * "line 7: tenants[1].gpus[0].max: \"4GBB\": not a size". Unknown fields are errors.
 *
 * Plain data; who owns a struct kvd_config is said where it is kept.
 */
#ifndef KVD_CONFIG_H
#define KVD_CONFIG_H

#include <stdbool.h>
#include <sys/types.h>

#include "base/util.h"
#include "kv/abi.h"

#define KVD_CONFIG_BYTES_MAX	      (1u << 20)
#define KVD_CONFIG_TENANTS_MAX	      128u
#define KVD_CONFIG_DOMAINS_MAX	      64u
#define KVD_CONFIG_DOMAIN_TENANTS_MAX 32u
#define KVD_CONFIG_IDS_MAX	      32u /* uids or gids of a tenant */
#define KVD_CONFIG_GPUS_MAX	      16u
#define KVD_CONFIG_TIERS	      2u
#define KVD_CONFIG_ERROR_BYTES	      256u

/* One line of a tenant's quota table. */
struct kvd_config_gpu {
	char gpu[48]; /* "host", "GPU-<uuid>" or "*" */
	u64 min_bytes;
	u64 high_bytes;
	u64 max_bytes;
	u32 weight;
};

struct kvd_config_tenant {
	char name[KV_NAME_BYTES];
	u32 domain; /* index in kvd_config.domains */
	u32 nr_uids;
	u32 nr_gids;
	u32 nr_gpus;
	uid_t uids[KVD_CONFIG_IDS_MAX];
	gid_t gids[KVD_CONFIG_IDS_MAX];
	struct kvd_config_gpu gpus[KVD_CONFIG_GPUS_MAX];
	struct kvd_config_gpu tiers[KVD_CONFIG_TIERS]; /* dram, nvme */
};

struct kvd_config_domain {
	char name[KV_NAME_BYTES];
};

/**
 * struct kvd_config_tiers - below the pools (kvmd/tier)
 * @dram_bytes: 0 = no tiers
 * @nvme_path, @nvme_bytes: "" and 0 = no NVMe tier
 * @nvme_depth: transfers under way
 * @write_from: percent of DRAM in use from which pages are written to NVMe
 * @read_ms: a page that the disk has not given by then is a miss
 */
struct kvd_config_tiers {
	u64 dram_bytes;
	char nvme_path[256];
	u64 nvme_bytes;
	u32 nvme_depth;
	u32 write_from;
	u32 read_ms;
};

enum kvd_on_stall { KVD_STALL_WARN, KVD_STALL_KILL };

/**
 * struct kvd_config - the whole policy
 * @host_bytes: most that all extents of the host backend may hold together; 0 = not set
 * @gpu_bytes: the same of the cuda backend; 0 = a share of the device's memory
 * @extent_bytes: extent size; 0 = chosen per layout
 * @idle_shrink_ms: a wholly free extent goes back to the system after that
 * @check: KV_CHECK_*
 * @tiers: DRAM and NVMe
 * @stall_ms: a step older than this is reported
 */
struct kvd_config {
	u32 nr_domains;
	u32 nr_tenants;
	u64 host_bytes;
	u64 gpu_bytes;
	u64 extent_bytes;
	u32 idle_shrink_ms;
	u32 check;
	u32 stall_ms;
	enum kvd_on_stall on_stall;
	struct kvd_config_tiers tiers;
	struct kvd_config_domain domains[KVD_CONFIG_DOMAINS_MAX];
	struct kvd_config_tenant tenants[KVD_CONFIG_TENANTS_MAX];
};

/** kvd_config_defaults() - everything but tenants set to its default */
void kvd_config_defaults(struct kvd_config *config);

/** cfg_tiers_defaults(), cfg_tiers_tenant_defaults() - no tiers; no limits in them */
void cfg_tiers_defaults(struct kvd_config *config);
void cfg_tiers_tenant_defaults(struct kvd_config_tenant *tenant);

/** kvd_config_single() - one domain and tenant "default" that @uid pays for */
void kvd_config_single(struct kvd_config *config, uid_t uid);

/**
 * kvd_config_parse() - validate a policy text
 * @text: @bytes bytes, not NUL-terminated
 * @ret_config: written on success only
 * @error: KVD_CONFIG_ERROR_BYTES; line, field path and value
 *
 * Return: 0; -EINVAL; -ENOMEM.
 */
int kvd_config_parse(const char *text, size_t bytes, struct kvd_config *ret_config,
		     char *error);

/**
 * kvd_config_load() - read a file and parse it
 *
 * Return: 0; -EINVAL; -EFBIG above KVD_CONFIG_BYTES_MAX; -ENOMEM; -errno of open and
 * read.
 */
int kvd_config_load(const char *path, struct kvd_config *ret_config, char *error);

/**
 * kvd_config_tenant_of() - whose a process is
 * @uid, @gid: from SO_PEERCRED, never from a message
 *
 * A uid decides before a gid.
 * Return: index of the tenant; -EACCES nobody's.
 */
int kvd_config_tenant_of(const struct kvd_config *config, uid_t uid, gid_t gid);

/**
 * kvd_config_quota() - the quota line of a tenant for a GPU
 * @gpu: "host" or "GPU-<uuid>"
 *
 * Return: the line for @gpu, else the one for "*", else NULL (no quota: nothing may be
 * held).
 */
const struct kvd_config_gpu *kvd_config_quota(const struct kvd_config_tenant *tenant,
					      const char *gpu);

/**
 * kvd_size_parse() - "4GiB", "512 MB", "4096"
 * @ret_bytes: untouched on failure
 *
 * Return: 0; -EINVAL; -ERANGE above 2^63.
 */
int kvd_size_parse(const char *text, u64 *ret_bytes);

#endif
