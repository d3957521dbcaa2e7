/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.h - which memory this daemon serves: the choice of the backend, its start, and
 * what has to wait for it.
 *
 * One kvmd serves one GPU (docs/decisions.md). cuInit runs in a thread: until it has
 * answered, the GPU's UUID and size may be unknown, and what depends on them waits.
 * Loop thread only.
 */
#ifndef KVD_MEMORY_H
#define KVD_MEMORY_H

#include <stdbool.h>

#include "kvmd/ipc/loop.h"

struct kvd;
struct kvd_config;

#define KVD_UUID_TEXT 48u /* "GPU-" and 36 characters */

enum kvd_backend_choice {
	KVD_BACKEND_AUTO,
	KVD_BACKEND_HOST,
	KVD_BACKEND_CUDA,
	KVD_BACKEND_CUDA_LEGACY,
};

/**
 * struct kvd_memory - the backend's beginning
 * @kind: KV_BACKEND_*
 * @why: how it was chosen
 * @fault: a GPU is here and not used, or its pools are refused: why; "" = all is well
 * @watch: the GPU's start; @since_ns: when it began
 * @started: the loop has taken over what the driver said
 */
struct kvd_memory {
	u32 kind;
	char why[192];
	char fault[256];
	struct kvd_watch watch;
	u64 since_ns;
	bool started;
};

/**
 * kvd_memory_open() - choose and make kvd->backend
 * @error: KVD_CONFIG_ERROR_BYTES
 *
 * auto takes the GPU when the driver loads and has a device, else host memory; it waits
 * for cuInit to know. An explicit cuda does not wait. cuda-legacy is for devices that do
 * not export memory by descriptor; its state does not outlive kvmd, so no keeper is used.
 * Behind kvd_kept_start(): where an earlier kvmd left pages auto takes the memory that they
 * are in, and nothing else is served.
 *
 * Return: 0; -ENOENT, -ENOSYS cuda was asked for and there is no driver; -EINVAL
 *	cuda-legacy with several domains; -EBUSY the keeper holds pages that are in another
 *	memory; -ENOMEM; -EMFILE.
 */
int kvd_memory_open(struct kvd *kvd, const struct kvd_config *config, char *error);

/** kvd_memory_domains() - may the memory serve these domains? @error names the field.
 * Return: 0; -EINVAL */
int kvd_memory_domains(const struct kvd *kvd, const struct kvd_config *config,
		       char *error);

/** kvd_memory_watch() - act when the GPU has started. Return: 0; -errno */
int kvd_memory_watch(struct kvd *kvd);

/** kvd_memory_close() - destroy kvd->backend; no extent is left */
void kvd_memory_close(struct kvd *kvd);

/** kvd_memory_quota_name() - the name under which quotas list this memory: "host",
 * "GPU-<uuid>", or "GPU" while the UUID is unknown, which only "*" lines match */
const char *kvd_memory_quota_name(const struct kvd *kvd, char text[KVD_UUID_TEXT]);

/**
 * kvd_memory_check() - may a pool be opened on the GPU that a client names?
 * @uuid: 16 bytes; zero = the only GPU, or host memory
 * @error: [128]; names the GPU on refusal
 *
 * Return: 0; -EAGAIN not known yet: ask again when the GPU has started; -ENODEV.
 */
int kvd_memory_check(const struct kvd *kvd, const u8 *uuid, char *error);

/** kvd_memory_uuid() - UUID of the GPU for replies; zero on host memory or unknown */
void kvd_memory_uuid(const struct kvd *kvd, u8 *ret_uuid);

/** kvd_uuid_text() - 16 bytes to "GPU-..." */
void kvd_uuid_text(const u8 *uuid, char text[KVD_UUID_TEXT]);

/** kvd_uuid_parse() - "GPU-..." to 16 bytes. Return: 0; -EINVAL */
int kvd_uuid_parse(const char *text, u8 *ret_uuid);

#endif
