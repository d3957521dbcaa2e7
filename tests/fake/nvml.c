/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake/nvml.c - an NVML that knows the fake driver's contexts (see fake/cuda.c).
 *
 * A process is listed while any process has the memfd of its context open: so a forked
 * child that keeps the descriptor keeps its dead parent listed, as on a GPU (facts
 * F-fork-gpu). Loaded through KV_NVML_LIB.
 *
 *	FAKE_NVML_FAIL	"nvmlInit_v2:999": that entry returns this
 *	FAKE_NVML_INIT_MS	time that nvmlInit_v2 takes
 *	FAKE_NVML_MPS	contexts are clients of MPS
 *	FAKE_NVML_BLIND	contexts are not listed
 *	FAKE_NVML_MIG, FAKE_NVML_PERSISTENCE, FAKE_NVML_MODE	what the device says
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/nvml_syms.h"

#define API __attribute__((visibility("default")))

static int must_fail(const char *entry)
{
	const char *env = getenv("FAKE_NVML_FAIL");
	size_t n = strlen(entry);

	return env && !strncmp(env, entry, n) && env[n] == ':' ? atoi(env + n + 1) : 0;
}

#define MAYBE_FAIL(entry)                        \
	do {                                     \
		if (must_fail(entry))            \
			return must_fail(entry); \
	} while (0)

static int setting(const char *name, int otherwise)
{
	return getenv(name) ? atoi(getenv(name)) : otherwise;
}

API kv_nv_result nvmlInit_v2(void);
API kv_nv_result nvmlInit_v2(void)
{
	MAYBE_FAIL("nvmlInit_v2");
	for (int ms = setting("FAKE_NVML_INIT_MS", 0); ms > 0; ms--)
		usleep(1000);
	return 0;
}

API kv_nv_result nvmlShutdown(void);
API kv_nv_result nvmlShutdown(void)
{
	return 0;
}

API kv_nv_result nvmlSystemGetDriverVersion(char *text, unsigned bytes);
API kv_nv_result nvmlSystemGetDriverVersion(char *text, unsigned bytes)
{
	snprintf(text, bytes, "999.99");
	return 0;
}

API kv_nv_result nvmlDeviceGetHandleByUUID(const char *uuid, kv_nv_device *dev);
API kv_nv_result nvmlDeviceGetHandleByUUID(const char *uuid, kv_nv_device *dev)
{
	MAYBE_FAIL("nvmlDeviceGetHandleByUUID");
	/* GPU-10101010-...: byte 0x10 + the device's number */
	if (strlen(uuid) != 40 || uuid[4] != '1')
		return 6;
	*dev = (kv_nv_device)(uintptr_t)(uuid[5] - '0' + 1);
	return 0;
}

/* "/memfd:fake-cuda-ctx-123 (deleted)" behind any fd of @pid */
static void scan_process(const char *pid, unsigned *nr, unsigned max,
			 struct kv_nv_process *list)
{
	char path[300], link[128];
	struct dirent *d;
	unsigned owner, i;
	ssize_t n;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%.200s/fd", pid);
	dir = opendir(path);
	while (dir && (d = readdir(dir))) {
		snprintf(path, sizeof(path), "/proc/%.100s/fd/%.100s", pid, d->d_name);
		n = readlink(path, link, sizeof(link) - 1);
		if (n <= 0)
			continue;
		link[n] = 0;
		if (sscanf(link, "/memfd:fake-cuda-ctx-%u", &owner) != 1)
			continue;
		for (i = 0; i < *nr && i < max && list[i].pid != owner; i++)
			;
		if (i < *nr && i < max)
			continue;
		if (*nr < max)
			list[*nr] = (struct kv_nv_process){.pid = owner};
		++*nr;
	}
	if (dir)
		closedir(dir);
}

static kv_nv_result list_all(unsigned *count, struct kv_nv_process *list)
{
	unsigned max = *count;
	DIR *proc = opendir("/proc");
	struct dirent *d;

	*count = 0;
	while (proc && (d = readdir(proc)))
		if (d->d_name[0] >= '0' && d->d_name[0] <= '9')
			scan_process(d->d_name, count, max, list);
	if (proc)
		closedir(proc);
	return *count > max ? KV_NV_SMALL : 0;
}

API kv_nv_result nvmlDeviceGetComputeRunningProcesses_v3(kv_nv_device dev,
							 unsigned *count,
							 struct kv_nv_process *list);
API kv_nv_result nvmlDeviceGetComputeRunningProcesses_v3(kv_nv_device dev,
							 unsigned *count,
							 struct kv_nv_process *list)
{
	MAYBE_FAIL("nvmlDeviceGetComputeRunningProcesses_v3");
	(void)dev;
	if (!getenv("FAKE_NVML_BLIND"))
		return list_all(count, list);
	*count = 0;
	return 0;
}

API kv_nv_result nvmlDeviceGetMPSComputeRunningProcesses_v3(kv_nv_device dev,
							    unsigned *count,
							    struct kv_nv_process *list);
API kv_nv_result nvmlDeviceGetMPSComputeRunningProcesses_v3(kv_nv_device dev,
							    unsigned *count,
							    struct kv_nv_process *list)
{
	MAYBE_FAIL("nvmlDeviceGetMPSComputeRunningProcesses_v3");
	(void)dev;
	if (getenv("FAKE_NVML_MPS"))
		return list_all(count, list);
	*count = 0;
	return 0;
}

API kv_nv_result nvmlDeviceGetPersistenceMode(kv_nv_device dev, int *mode);
API kv_nv_result nvmlDeviceGetPersistenceMode(kv_nv_device dev, int *mode)
{
	(void)dev;
	*mode = setting("FAKE_NVML_PERSISTENCE", 1);
	return 0;
}

API kv_nv_result nvmlDeviceGetComputeMode(kv_nv_device dev, int *mode);
API kv_nv_result nvmlDeviceGetComputeMode(kv_nv_device dev, int *mode)
{
	(void)dev;
	*mode = setting("FAKE_NVML_MODE", 0);
	return 0;
}

API kv_nv_result nvmlDeviceGetMigMode(kv_nv_device dev, unsigned *now, unsigned *later);
API kv_nv_result nvmlDeviceGetMigMode(kv_nv_device dev, unsigned *now, unsigned *later)
{
	(void)dev;
	*now = *later = (unsigned)setting("FAKE_NVML_MIG", 0);
	return 0;
}
