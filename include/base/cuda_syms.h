/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_syms.h - CUDA driver entry points, found at run time by dlopen.
 *
 * One binary starts with no driver, with a driver and no device, and with a device:
 * nothing links against libcuda, and no CUDA header is needed to build (tests/abi
 * compares the layouts below with cuda.h where there is one). KV_CUDA_LIB names another
 * library: the fault-injecting driver of the tests.
 *
 * kvmd uses only the entries that need no context (facts F-ctx). CUDA results become
 * errno in kv_cuda_errno() and go no further.
 */
#ifndef BASE_CUDA_SYMS_H
#define BASE_CUDA_SYMS_H

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "util.h"

typedef int kv_cu_result; /* CUresult; 0 = CUDA_SUCCESS */
typedef int kv_cu_device;
typedef u64 kv_cu_handle; /* CUmemGenericAllocationHandle */
typedef u64 kv_cu_ptr;	  /* CUdeviceptr */
typedef void *kv_cu_ctx;  /* CUcontext */

/* CUmemLocation, CUmemAllocationProp, CUmemAccessDesc */
struct kv_cu_location {
	int type; /* 1 = device */
	int id;
};

struct kv_cu_alloc_prop {
	int type;	  /* 1 = pinned */
	int handle_types; /* 1 = POSIX fd */
	struct kv_cu_location location;
	void *win32;
	u8 compression, rdma;
	u16 usage;
	u8 reserved[4];
};

struct kv_cu_access {
	struct kv_cu_location location;
	int flags; /* 1 = read, 3 = read and write */
};

/* CUipcMemHandle */
struct kv_cu_ipc_handle {
	char reserved[64];
};

#define KV_CU_DEVICE		   1
#define KV_CU_PINNED		   1
#define KV_CU_POSIX_FD		   1
#define KV_CU_READ		   1
#define KV_CU_READWRITE		   3
#define KV_CU_RECOMMENDED	   1
#define KV_CU_IPC_LAZY		   1 /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS */
#define KV_CU_STREAM_NON_BLOCKING  1
#define KV_CU_EVENT_DISABLE_TIMING 2
#define KV_CU_NOT_READY		   600 /* of an event */
#define KV_CU_NOT_SUPPORTED	   801

/* CUmemcpyAttributes */
struct kv_cu_copy_attr {
	int order; /* 1 = the sources are read in the stream's order */
	struct kv_cu_location src_hint, dst_hint;
	unsigned flags;
};

#define KV_CU_ORDER_STREAM	1
/* By the copy engines, also where the driver would think a kernel quicker. */
#define KV_CU_COPY_OVERLAP	1

/* CUdevice_attribute */
#define KV_CU_ATTR_COMPUTE_MODE 20
#define KV_CU_ATTR_VMM		102
#define KV_CU_ATTR_POSIX_FD	103

/* name in the library, member, arguments */
#define KV_CUDA_SYMS(X)                                                                  \
	X(cuInit, init, (unsigned flags))                                                \
	X(cuDriverGetVersion, driver_version, (int *version))                            \
	X(cuDeviceGetCount, device_count, (int *count))                                  \
	X(cuDeviceGet, device_get, (kv_cu_device * dev, int ordinal))                    \
	X(cuDeviceGetName, device_name, (char *name, int len, kv_cu_device dev))         \
	X(cuDeviceGetUuid_v2, device_uuid, (u8 * uuid, kv_cu_device dev))                \
	X(cuDeviceTotalMem_v2, device_bytes, (size_t * bytes, kv_cu_device dev))         \
	X(cuDeviceGetAttribute, device_attr, (int *value, int attr, kv_cu_device dev))   \
	X(cuMemGetAllocationGranularity, mem_granularity,                                \
	  (size_t * bytes, const struct kv_cu_alloc_prop *prop, int option))             \
	X(cuMemCreate, mem_create,                                                       \
	  (kv_cu_handle * handle, size_t bytes, const struct kv_cu_alloc_prop *prop,     \
	   u64 flags))                                                                   \
	X(cuMemRelease, mem_release, (kv_cu_handle handle))                              \
	X(cuMemExportToShareableHandle, mem_export,                                      \
	  (void *fd, kv_cu_handle handle, int type, u64 flags))                          \
	X(cuMemImportFromShareableHandle, mem_import,                                    \
	  (kv_cu_handle * handle, void *fd, int type))                                   \
	X(cuMemAddressReserve, va_reserve,                                               \
	  (kv_cu_ptr * ptr, size_t bytes, size_t align, kv_cu_ptr hint, u64 flags))      \
	X(cuMemAddressFree, va_free, (kv_cu_ptr ptr, size_t bytes))                      \
	X(cuMemMap, mem_map,                                                             \
	  (kv_cu_ptr ptr, size_t bytes, size_t offset, kv_cu_handle handle, u64 flags))  \
	X(cuMemUnmap, mem_unmap, (kv_cu_ptr ptr, size_t bytes))                          \
	X(cuMemSetAccess, mem_access,                                                    \
	  (kv_cu_ptr ptr, size_t bytes, const struct kv_cu_access *desc, size_t nr))     \
	/* what follows needs or makes a context: never called by kvmd */                \
	X(cuDevicePrimaryCtxRetain, ctx_retain, (kv_cu_ctx * ctx, kv_cu_device dev))     \
	X(cuDevicePrimaryCtxRelease_v2, ctx_release, (kv_cu_device dev))                 \
	X(cuCtxGetCurrent, ctx_current, (kv_cu_ctx * ctx))                               \
	X(cuCtxGetDevice, ctx_device, (kv_cu_device * dev))                              \
	X(cuCtxPushCurrent_v2, ctx_push, (kv_cu_ctx ctx))                                \
	X(cuCtxPopCurrent_v2, ctx_pop, (kv_cu_ctx * ctx))                                \
	X(cuCtxSynchronize, ctx_sync, (void))                                            \
	X(cuMemAlloc_v2, alloc, (kv_cu_ptr * ptr, size_t bytes))                         \
	X(cuMemFree_v2, free, (kv_cu_ptr ptr))                                           \
	X(cuMemcpyHtoD_v2, copy_in, (kv_cu_ptr dst, const void *src, size_t bytes))      \
	X(cuMemcpyDtoH_v2, copy_out, (void *dst, kv_cu_ptr src, size_t bytes))           \
	X(cuMemHostRegister_v2, host_register,                                           \
	  (void *addr, size_t bytes, unsigned flags))                                    \
	X(cuMemHostUnregister, host_unregister, (void *addr))                            \
	X(cuStreamCreate, stream_create, (void **stream, unsigned flags))                \
	X(cuEventCreate, event_create, (void **event, unsigned flags))                   \
	X(cuEventRecord, event_record, (void *event, void *stream))                      \
	X(cuEventQuery, event_query, (void *event))                                      \
	X(cuMemcpyHtoDAsync_v2, copy_in_async,                                           \
	  (kv_cu_ptr dst, const void *src, size_t bytes, void *stream))                  \
	X(cuMemcpyDtoHAsync_v2, copy_out_async,                                          \
	  (void *dst, kv_cu_ptr src, size_t bytes, void *stream))                        \
	X(cuIpcGetMemHandle, ipc_get, (struct kv_cu_ipc_handle * handle, kv_cu_ptr ptr)) \
	X(cuIpcOpenMemHandle_v2, ipc_open,                                               \
	  (kv_cu_ptr * ptr, struct kv_cu_ipc_handle handle, unsigned flags))             \
	X(cuIpcCloseMemHandle, ipc_close, (kv_cu_ptr ptr))

/* Not in every driver: NULL there. */
#define KV_CUDA_OPTIONAL(X)                                                              \
	X(cuMemcpyBatchAsync_v2, copy_batch_async, /* from CUDA 13.0 on */               \
	  (const kv_cu_ptr *dsts, const kv_cu_ptr *srcs, const size_t *bytes, size_t nr, \
	   const struct kv_cu_copy_attr *attrs, const size_t *attr_from,                 \
	   size_t nr_attrs, void *stream))

/**
 * struct kv_cuda_syms - the driver, or nothing
 * @lib: dlopen handle; NULL = not loaded
 */
struct kv_cuda_syms {
	void *lib;
#define KV_CUDA_MEMBER(sym, member, args) kv_cu_result(*member) args;
	KV_CUDA_SYMS(KV_CUDA_MEMBER)
	KV_CUDA_OPTIONAL(KV_CUDA_MEMBER)
#undef KV_CUDA_MEMBER
};

/**
 * kv_cuda_load() - find the driver and all entries
 * @error: @error_bytes; says what is missing; may be NULL
 *
 * Calls nothing: kv_cuda_syms.init is the caller's, since it takes 0.2 s and opens
 * devices.
 *
 * Return: 0; -ENOENT no driver on this machine; -ENOSYS the driver lacks an entry.
 */
static inline int kv_cuda_load(struct kv_cuda_syms *s, char *error, size_t error_bytes)
{
	const char *name = getenv("KV_CUDA_LIB");

	memset(s, 0, sizeof(*s));
	s->lib = dlopen(name ? name : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!s->lib) {
		if (error)
			snprintf(error, error_bytes, "%s", dlerror());
		return -ENOENT;
	}
#define KV_CUDA_FIND(sym, member, args)                                        \
	*(void **)&s->member = dlsym(s->lib, #sym);                            \
	if (!s->member) {                                                      \
		if (error)                                                     \
			snprintf(error, error_bytes, "driver lacks %s", #sym); \
		goto missing;                                                  \
	}
	KV_CUDA_SYMS(KV_CUDA_FIND)
#undef KV_CUDA_FIND
#define KV_CUDA_TRY(sym, member, args) *(void **)&s->member = dlsym(s->lib, #sym);
	KV_CUDA_OPTIONAL(KV_CUDA_TRY)
#undef KV_CUDA_TRY
	return 0;
missing:
	dlclose(s->lib);
	s->lib = NULL;
	return -ENOSYS;
}

/* The few results that callers tell apart; everything else is -EIO. */
static inline int kv_cuda_errno(kv_cu_result r)
{
	switch (r) {
	case 0:
		return 0;
	case 1:	  /* INVALID_VALUE */
	case 400: /* INVALID_HANDLE */
		return -EINVAL;
	case 2: /* OUT_OF_MEMORY */
		return -ENOMEM;
	case 3:	 /* NOT_INITIALIZED */
	case 46: /* DEVICE_UNAVAILABLE */
		return -EAGAIN;
	case 100: /* NO_DEVICE */
	case 101: /* INVALID_DEVICE */
		return -ENODEV;
	case 304: /* OPERATING_SYSTEM: a limit of the process, mostly of fds */
		return -EMFILE;
	case 800: /* NOT_PERMITTED */
		return -EPERM;
	case 801: /* NOT_SUPPORTED */
		return -EOPNOTSUPP;
	default:
		return -EIO;
	}
}

/* In words, for the results that people meet at start-up. */
static inline const char *kv_cuda_reason(kv_cu_result r)
{
	switch (r) {
	case 0:
		return "no error";
	case 2:
		return "out of memory";
	case 3:
		return "not initialised";
	case 34:
		return "the toolkit's libcuda for linking, not a driver's";
	case 46:
		return "device busy or in exclusive mode";
	case 100:
		return "no device";
	case 101:
		return "no such device";
	case 304:
		return "the system refused; are fds or device files short?";
	case 800:
		return "not permitted";
	case 801:
		return "not supported";
	case 802:
		return "system not ready: is the fabric manager running?";
	case 803:
		return "driver and library versions differ: reboot or reload the driver";
	case 804:
		return "no forward compatibility here";
	case 999:
		return "unknown error";
	default:
		return "see CUresult";
	}
}

#endif /* BASE_CUDA_SYMS_H */
