/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/policy.h - puts a validated configuration into force: domains, tenants, limits.
 *
 * Loop thread only.
 */
#ifndef KVD_IPC_POLICY_H
#define KVD_IPC_POLICY_H

#include "kvmd/config.h"

struct kvd;

/**
 * kvd_policy_would() - what kvd_policy_apply() would answer; changes nothing
 *
 * Return: 0; -EINVAL.
 */
int kvd_policy_would(struct kvd *kvd, const struct kvd_config *config, char *error,
		     u32 *ret_deferred);

/**
 * kvd_policy_apply() - make core's tenants and limits what @config says
 * @error: KVD_CONFIG_ERROR_BYTES
 * @ret_deferred: tenants that use more than their new max, or that are gone from the file
 *	but still have sessions or pages
 *
 * Everything that can be refused is refused before the first change.
 * Return: 0; -EINVAL; -ENOMEM; -ENOSPC.
 */
int kvd_policy_apply(struct kvd *kvd, const struct kvd_config *config, char *error,
		     u32 *ret_deferred);

/** kvd_policy_sweep() - remove tenants and domains that the policy does not know any more
 * and that hold nothing now */
void kvd_policy_sweep(struct kvd *kvd);

/** kvd_policy_secret() - a domain's secret. Return: 0; -errno of the host's secret */
int kvd_policy_secret(struct kvd *kvd, const char *name, u8 *ret_secret);

#endif
