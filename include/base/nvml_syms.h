/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvml_syms.h - NVML entry points, found at run time by dlopen.
 *
 * As cuda_syms.h: nothing links against libnvidia-ml and no header of it is needed.
 * KV_NVML_LIB names another library: the fake of the tests. NVML results become errno in
 * kv_nvml_errno() and go no further.
 */
#ifndef BASE_NVML_SYMS_H
#define BASE_NVML_SYMS_H

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "util.h"

typedef int kv_nv_result; /* nvmlReturn_t; 0 = NVML_SUCCESS */
typedef void *kv_nv_device;

/* nvmlProcessInfo_t of the _v3 calls */
struct kv_nv_process {
	unsigned pid;
	u64 used_bytes;
	unsigned gpu_instance;
	unsigned compute_instance;
};

#define KV_NV_SMALL 7 /* NVML_ERROR_INSUFFICIENT_SIZE */

/* name in the library, member, arguments */
#define KV_NVML_SYMS(X)                                                              \
	X(nvmlInit_v2, init, (void))                                                 \
	X(nvmlShutdown, shutdown, (void))                                            \
	X(nvmlSystemGetDriverVersion, driver_version, (char *text, unsigned bytes))  \
	X(nvmlDeviceGetHandleByUUID, by_uuid, (const char *uuid, kv_nv_device *dev)) \
	X(nvmlDeviceGetComputeRunningProcesses_v3, processes,                        \
	  (kv_nv_device dev, unsigned *count, struct kv_nv_process *list))           \
	X(nvmlDeviceGetMPSComputeRunningProcesses_v3, mps_processes,                 \
	  (kv_nv_device dev, unsigned *count, struct kv_nv_process *list))           \
	X(nvmlDeviceGetPersistenceMode, persistence, (kv_nv_device dev, int *mode))  \
	X(nvmlDeviceGetComputeMode, compute_mode, (kv_nv_device dev, int *mode))     \
	X(nvmlDeviceGetMigMode, mig, (kv_nv_device dev, unsigned *now, unsigned *later))

/**
 * struct kv_nvml_syms - NVML, or nothing
 * @lib: dlopen handle; NULL = not loaded
 */
struct kv_nvml_syms {
	void *lib;
#define KV_NVML_MEMBER(sym, member, args) kv_nv_result(*member) args;
	KV_NVML_SYMS(KV_NVML_MEMBER)
#undef KV_NVML_MEMBER
};

/**
 * kv_nvml_load() - find NVML and all entries; calls nothing
 * @error: @error_bytes; says what is missing; may be NULL
 *
 * Return: 0; -ENOENT no NVML on this machine; -ENOSYS it lacks an entry.
 */
static inline int kv_nvml_load(struct kv_nvml_syms *s, char *error, size_t error_bytes)
{
	const char *name = getenv("KV_NVML_LIB");

	memset(s, 0, sizeof(*s));
	s->lib = dlopen(name ? name : "libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!s->lib) {
		if (error)
			snprintf(error, error_bytes, "%s", dlerror());
		return -ENOENT;
	}
#define KV_NVML_FIND(sym, member, args)                                      \
	*(void **)&s->member = dlsym(s->lib, #sym);                          \
	if (!s->member) {                                                    \
		if (error)                                                   \
			snprintf(error, error_bytes, "NVML lacks %s", #sym); \
		goto missing;                                                \
	}
	KV_NVML_SYMS(KV_NVML_FIND)
#undef KV_NVML_FIND
	return 0;
missing:
	dlclose(s->lib);
	s->lib = NULL;
	return -ENOSYS;
}

static inline int kv_nvml_errno(kv_nv_result r)
{
	switch (r) {
	case 0:
		return 0;
	case 2: /* INVALID_ARGUMENT */
		return -EINVAL;
	case 3: /* NOT_SUPPORTED */
		return -EOPNOTSUPP;
	case 4: /* NO_PERMISSION */
		return -EPERM;
	case 6: /* NOT_FOUND */
		return -ENODEV;
	case KV_NV_SMALL:
		return -ENOSPC;
	case 9: /* DRIVER_NOT_LOADED */
		return -ENOENT;
	default:
		return -EIO;
	}
}

#endif /* BASE_NVML_SYMS_H */
