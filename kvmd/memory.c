/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c - see memory.h. */
#include "kvmd/memory.h"

#include <ctype.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/backend/cuda.h"
#include "kvmd/backend/host.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/ipc/policy.h"

/* auto has to know; a driver that takes longer than this is kept and waited for later. */
#define AUTO_WAIT_MS 10000

static bool is_cuda(const struct kvd *kvd)
{
	return kvd->memory.kind != KV_BACKEND_HOST;
}

/* -------------------------------------------------------------------- UUIDs */

void kvd_uuid_text(const u8 *uuid, char text[KVD_UUID_TEXT])
{
	int i, n = sprintf(text, "GPU-");

	for (i = 0; i < 16; i++)
		n += sprintf(text + n, "%s%02x",
			     i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}

int kvd_uuid_parse(const char *text, u8 *ret_uuid)
{
	char back[KVD_UUID_TEXT], byte[3] = "";
	u8 uuid[16];
	u32 n = 0;

	if (strlen(text) != 40 || strncmp(text, "GPU-", 4))
		return -EINVAL;
	for (const char *p = text + 4; *p && n < 16; p++) {
		if (*p == '-')
			continue;
		if (!isxdigit((unsigned char)p[0]) || !isxdigit((unsigned char)p[1]))
			return -EINVAL;
		byte[0] = *p++;
		byte[1] = *p;
		uuid[n++] = (u8)strtoul(byte, NULL, 16);
	}
	if (n != 16)
		return -EINVAL;
	/* The dashes are where they belong if it reads the same again. */
	kvd_uuid_text(uuid, back);
	if (strcasecmp(back, text))
		return -EINVAL;
	memcpy(ret_uuid, uuid, sizeof(uuid));
	return 0;
}

/* ----------------------------------------------------------------- starting */

static int open_host(struct kvd *kvd, const struct kvd_config *config)
{
	u64 bytes = kvd->opt.host_bytes ? kvd->opt.host_bytes : config->host_bytes;

	kvd->memory.kind = KV_BACKEND_HOST;
	return kvd_host_create(bytes, config->extent_bytes, &kvd->backend);
}

static int open_cuda(struct kvd *kvd, const struct kvd_config *config, bool legacy)
{
	struct kvd_cuda_params params = {
		.uuid = kvd->opt.gpu_named ? kvd->opt.gpu_uuid : NULL,
		.capacity_bytes = kvd->opt.gpu_bytes,
		.extent_bytes = config->extent_bytes,
		.small_extents = kvd->opt.test_extents,
		.legacy = legacy,
	};

	if (!params.capacity_bytes)
		params.capacity_bytes = config->gpu_bytes;
	kvd->memory.kind = legacy ? KV_BACKEND_CUDA_LEGACY : KV_BACKEND_CUDA;
	kvd->memory.since_ns = kvd->now_ns;
	return kvd_cuda_create(&params, &kvd->backend);
}

/* The kernel drives a GPU, so that not seeing one is a fault of this process's world. */
static bool gpu_on_host(void)
{
	return !access("/proc/driver/nvidia/version", F_OK);
}

int kvd_memory_domains(const struct kvd *kvd, const struct kvd_config *config,
		       char *error)
{
	if (kvd->memory.kind != KV_BACKEND_CUDA_LEGACY || config->nr_domains <= 1 ||
	    KV_MUTANT(legacy_any_domains))
		return 0;
	snprintf(
		error, KVD_CONFIG_ERROR_BYTES,
		"domains: %u: backend cuda-legacy serves one domain only, because a handle "
		"opens in any process",
		config->nr_domains);
	return -EINVAL;
}

/* Loud: it promises less. Return: 0; -ENODEV use host memory */
static int auto_legacy(struct kvd *kvd, const struct kvd_config *config)
{
	struct kvd_memory *m = &kvd->memory;
	char text[KVD_CONFIG_ERROR_BYTES];

	snprintf(m->fault, sizeof(m->fault), "%s", kvd_cuda_error(kvd->backend));
	snprintf(m->why, sizeof(m->why), "auto: %.150s", m->fault);
	kvd_cuda_destroy(kvd->backend);
	kvd->backend = NULL;
	if (open_cuda(kvd, config, true))
		return -ENODEV;
	if (!kvd_memory_domains(kvd, config, text)) {
		kvd_warn("memory", "%s: falling back to cuda-legacy, which isolates less",
			 m->fault);
		m->fault[0] = 0;
		return 0;
	}
	snprintf(m->fault, sizeof(m->fault), "%.200s", text);
	kvd_cuda_destroy(kvd->backend);
	kvd->backend = NULL;
	return -ENODEV;
}

/* Return: 0 keep it; -ENODEV use host memory, @why (and fault) say why. */
static int auto_wait(struct kvd *kvd, const struct kvd_config *config)
{
	struct kvd_memory *m = &kvd->memory;
	struct pollfd p = {.fd = kvd_cuda_event_fd(kvd->backend), .events = POLLIN};
	const char *text;

	while (poll(&p, 1, AUTO_WAIT_MS) < 0 && errno == EINTR)
		;
	if (kvd_cuda_state(kvd->backend) != KVD_CUDA_FAILED) {
		snprintf(m->why, sizeof(m->why), "auto: the driver %s",
			 kvd_cuda_state(kvd->backend) == KVD_CUDA_READY
				 ? "has a device"
				 : "loads and has not answered yet");
		return 0;
	}
	if (kvd_cuda_no_export(kvd->backend))
		return auto_legacy(kvd, config);
	text = kvd_cuda_error(kvd->backend);
	snprintf(m->why, sizeof(m->why), "auto: %.170s", text);
	if (!kvd_cuda_no_device(kvd->backend) || gpu_on_host())
		snprintf(m->fault, sizeof(m->fault), "%s", text);
	kvd_cuda_destroy(kvd->backend);
	kvd->backend = NULL;
	return -ENODEV;
}

static int open_auto(struct kvd *kvd, const struct kvd_config *config)
{
	struct kvd_memory *m = &kvd->memory;
	char text[160] = "";
	int r;

	if (kvd->opt.host_bytes) {
		snprintf(m->why, sizeof(m->why), "auto: --host-bytes names host memory");
		return open_host(kvd, config);
	}
	if (kvd_kept_memory(&kvd->kept) == KV_BACKEND_HOST) {
		snprintf(m->why, sizeof(m->why),
			 "auto: the keeper holds pages in host memory");
		if (gpu_on_host())
			snprintf(m->fault, sizeof(m->fault),
				 "%s; a stop and a start give them up", m->why);
		return open_host(kvd, config);
	}
	r = kvd_cuda_probe(text, sizeof(text));
	if (!r)
		r = open_cuda(kvd, config, false);
	if (!r && !auto_wait(kvd, config))
		return 0;
	/* No driver is a machine without a GPU; one that is no use is a fault. */
	if (r == -ENOENT && !gpu_on_host()) {
		snprintf(m->why, sizeof(m->why),
			 "auto: no GPU driver (libcuda.so.1) here");
		return open_host(kvd, config);
	}
	if (!m->why[0])
		snprintf(m->why, sizeof(m->why), "auto: %.170s",
			 text[0] ? text : strerror(-r));
	if (r)
		snprintf(m->fault, sizeof(m->fault), "%s", m->why);
	return open_host(kvd, config);
}

static int open_named(struct kvd *kvd, const struct kvd_config *config, bool legacy,
		      char *error)
{
	struct kvd_memory *m = &kvd->memory;
	char text[160] = "";
	int r;

	snprintf(m->why, sizeof(m->why), "--backend cuda%s", legacy ? "-legacy" : "");
	r = kvd_cuda_probe(text, sizeof(text));
	if (!r)
		r = open_cuda(kvd, config, legacy);
	if (r) {
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "%s: %s", m->why,
			 text[0] ? text : strerror(-r));
		return r;
	}
	r = kvd_memory_domains(kvd, config, error);
	if (r)
		kvd_memory_close(kvd);
	return r;
}

static int open_chosen(struct kvd *kvd, const struct kvd_config *config, char *error)
{
	struct kvd_memory *m = &kvd->memory;

	switch (kvd->opt.backend) {
	case KVD_BACKEND_HOST:
		strcpy(m->why, "--backend host");
		return open_host(kvd, config);
	case KVD_BACKEND_CUDA:
		return open_named(kvd, config, false, error);
	case KVD_BACKEND_CUDA_LEGACY:
		return open_named(kvd, config, true, error);
	case KVD_BACKEND_AUTO:
		break;
	}
	return open_auto(kvd, config);
}

/* Extents that are not of this memory would be dropped with all their pages. */
static int kept_fits(struct kvd *kvd, char *error)
{
	int kept = kvd_kept_memory(&kvd->kept);
	bool host = kept == KV_BACKEND_HOST;

	if (kept < 0 || kept == (int)kvd->memory.kind)
		return 0;
	snprintf(error, KVD_CONFIG_ERROR_BYTES,
		 "%.100s, but the keeper holds pages %s. They are left as they are for a "
		 "start with %s. To give them up end the process kvmd-keeper",
		 kvd->memory.why, host ? "in host memory" : "of the GPU",
		 host ? "--backend host" : "its driver");
	return -EBUSY;
}

int kvd_memory_open(struct kvd *kvd, const struct kvd_config *config, char *error)
{
	int r = open_chosen(kvd, config, error);

	if (r)
		return r;
	r = kept_fits(kvd, error);
	if (r)
		kvd_memory_close(kvd);
	return r;
}

void kvd_memory_close(struct kvd *kvd)
{
	if (kvd->loop)
		kvd_loop_del(kvd->loop, &kvd->memory.watch);
	if (is_cuda(kvd))
		kvd_cuda_destroy(kvd->backend);
	else
		kvd_host_destroy(kvd->backend);
	kvd->backend = NULL;
}

/* ------------------------------------------------------------ it has started */

/* Quotas that name the GPU, and the tenants' min against what is there. */
static void apply_policy(struct kvd *kvd)
{
	struct kvd_config *config = malloc(sizeof(*config));
	u64 revision = kvd->config_revision;
	u32 deferred;

	if (!config) {
		snprintf(kvd->memory.fault, sizeof(kvd->memory.fault), "out of memory");
		return;
	}
	*config = kvd->config;
	if (kvd_policy_apply(kvd, config, kvd->memory.fault, &deferred))
		kvd_err("memory", "pools are refused: %s", kvd->memory.fault);
	kvd->config_revision = revision;
	free(config);
}

static void gpu_started(void *arg, u32 events)
{
	struct kvd *kvd = arg;
	const struct kvd_cuda_info *info;
	struct kvd_conn *conn, *tmp;
	char uuid[KVD_UUID_TEXT];

	kvd_loop_del(kvd->loop, &kvd->memory.watch);
	kvd->memory.started = true;
	if (kvd_cuda_state(kvd->backend) == KVD_CUDA_READY) {
		info = kvd_cuda_get_info(kvd->backend);
		kvd->backend->ops->limits(kvd->backend, &kvd->core.mm.limits);
		kvd_uuid_text(info->uuid, uuid);
		kvd_info("memory", "%s, %s: %llu MiB, for pages %llu MiB", uuid,
			 info->name, (unsigned long long)(info->total_bytes >> 20),
			 (unsigned long long)(kvd->core.mm.limits.capacity_bytes >> 20));
		apply_policy(kvd);
	} else {
		kvd_err("memory", "no GPU memory: %s", kvd_cuda_error(kvd->backend));
	}
	/* Parked allocations and held POOL_OPENs may go on, or learn that they cannot. */
	kvd->pages_freed = true;
	list_for_each_entry_safe (conn, tmp, &kvd->conns, node)
		kvd_conn_unhold(conn);
}

int kvd_memory_watch(struct kvd *kvd)
{
	struct kvd_watch *w = &kvd->memory.watch;

	if (!is_cuda(kvd))
		return 0;
	w->fd = kvd_cuda_event_fd(kvd->backend);
	w->events = KVD_LOOP_IN;
	w->ready = gpu_started;
	w->arg = kvd;
	return kvd_loop_add(kvd->loop, w);
}

/* ---------------------------------------------------------------- questions */

void kvd_memory_uuid(const struct kvd *kvd, u8 *ret_uuid)
{
	memset(ret_uuid, 0, 16);
	if (is_cuda(kvd) && kvd_cuda_state(kvd->backend) == KVD_CUDA_READY)
		memcpy(ret_uuid, kvd_cuda_get_info(kvd->backend)->uuid, 16);
	else if (is_cuda(kvd) && kvd->opt.gpu_named)
		memcpy(ret_uuid, kvd->opt.gpu_uuid, 16);
}

const char *kvd_memory_quota_name(const struct kvd *kvd, char text[KVD_UUID_TEXT])
{
	static const u8 zero[16];
	u8 uuid[16];

	if (!is_cuda(kvd))
		return "host";
	kvd_memory_uuid(kvd, uuid);
	if (!memcmp(uuid, zero, sizeof(zero)))
		return "GPU";
	kvd_uuid_text(uuid, text);
	return text;
}

int kvd_memory_check(const struct kvd *kvd, const u8 *uuid, char *error)
{
	static const u8 zero[16];
	bool any = !memcmp(uuid, zero, sizeof(zero));
	char name[KVD_UUID_TEXT];
	u8 ours[16];

	kvd_uuid_text(uuid, name);
	kvd_memory_uuid(kvd, ours);
	if (!is_cuda(kvd) && !any) {
		snprintf(error, 128,
			 "gpu_uuid=%s: no such GPU on this host (host memory)", name);
		return -ENODEV;
	}
	if (!is_cuda(kvd))
		return 0;
	if (kvd_cuda_state(kvd->backend) == KVD_CUDA_FAILED || kvd->memory.fault[0]) {
		snprintf(error, 128, "GPU: %.120s",
			 kvd->memory.fault[0] ? kvd->memory.fault
					      : kvd_cuda_error(kvd->backend));
		return -ENODEV;
	}
	if (!any && memcmp(ours, zero, sizeof(zero)) &&
	    memcmp(ours, uuid, sizeof(ours)) && !KV_MUTANT(any_gpu_will_do)) {
		snprintf(error, 128,
			 "gpu_uuid=%s: no such GPU on this host, or another kvmd's",
			 name);
		return -ENODEV;
	}
	if (!kvd->memory.started &&
	    !(kvd->opt.gpu_named && (kvd->opt.gpu_bytes || kvd->config.gpu_bytes)))
		return -EAGAIN;
	return 0;
}
