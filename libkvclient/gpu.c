/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.c - extents in GPU memory: the driver's calls behind map.c.
 *
 * An extent is imported, mapped and made accessible in one go; then neither its handle nor
 * the received descriptor is needed, and the mapping alone holds the memory, so that
 * unmapping gives it back. What fails in the middle is undone whole (cases O15, O16): no
 * driver object outlives a failed kvc_gpu_map().
 *
 * Mapping needs a CUDA context. The library makes none: it takes the one that is current
 * where the pool is opened, which the engine keeps until it closes the pool, and makes it
 * current around its own driver calls, whichever thread they are on.
 *
 * Lock: kvc.lock (2 in internal.h).
 */
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cuda_syms.h"

/**
 * struct kvc_gpu - the GPU of a pool in this process
 * @cu: the driver
 * @ctx: the engine's context; borrowed
 * @device: the GPU's number here
 */
struct kvc_gpu {
	struct kv_cuda_syms cu;
	kv_cu_ctx ctx;
	kv_cu_device device;
};

static void uuid_text(const u8 *uuid, char *text)
{
	int i, n = sprintf(text, "GPU-");

	for (i = 0; i < 16; i++)
		n += sprintf(text + n, "%s%02x",
			     i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}

/* One call's result as an error; nothing of it is kept for the next call (cases O16). */
static int cuda_fail(const char *what, kv_cu_result cr)
{
	return kvc_fail(kv_cuda_errno(cr), "%s: CUDA result %d (%s)", what, cr,
			kv_cuda_reason(cr));
}

/* Ordinals differ between processes (cases O10). Return: 0; -ENODEV not visible here. */
static int find_device(const struct kv_cuda_syms *cu, const u8 *uuid,
		       kv_cu_device *ret_device)
{
	char name[48];
	kv_cu_result cr;
	u8 have[16];
	int nr = 0;

	uuid_text(uuid, name);
	cr = cu->init(0);
	if (!cr)
		cr = cu->device_count(&nr);
	if (cr)
		return kvc_fail(-ENODEV, "gpu_uuid=%s: CUDA result %d (%s)", name, cr,
				kv_cuda_reason(cr));
	for (int i = 0; i < nr; i++) {
		cr = cu->device_get(ret_device, i);
		if (!cr)
			cr = cu->device_uuid(have, *ret_device);
		if (!cr && !memcmp(have, uuid, sizeof(have)))
			return 0;
	}
	return kvc_fail(-ENODEV,
			"gpu_uuid=%s: not among the %d devices this process sees (is "
			"CUDA_VISIBLE_DEVICES set?)",
			name, nr);
}

static int load(struct kv_cuda_syms *cu, const u8 *uuid)
{
	char name[48], error[160];

	uuid_text(uuid, name);
	if (kv_cuda_load(cu, error, sizeof(error)))
		return kvc_fail(-ENODEV, "gpu_uuid=%s: %s", name, error);
	return 0;
}

/** kvc_gpu_visible() - does this process see the GPU? Return: 0; -ENODEV, named */
int kvc_gpu_visible(const u8 *uuid)
{
	struct kv_cuda_syms cu;
	kv_cu_device device;
	int r;

	r = load(&cu, uuid);
	/* The driver stays loaded: after cuInit it has threads of its own. */
	return r ? r : find_device(&cu, uuid, &device);
}

static int take_context(struct kvc_gpu *gpu, const u8 *uuid)
{
	kv_cu_device current = -1;
	kv_cu_result cr;
	char name[48];

	cr = gpu->cu.ctx_current(&gpu->ctx);
	if (cr)
		return cuda_fail("cuCtxGetCurrent", cr);
	if (!gpu->ctx)
		return kvc_fail(-EINVAL,
				"no CUDA context is current in this thread: make one "
				"before kvc_pool_open() (cudaSetDevice, cudaFree(0))");
	cr = gpu->cu.ctx_device(&current);
	if (cr)
		return cuda_fail("cuCtxGetDevice", cr);
	uuid_text(uuid, name);
	if (current != gpu->device)
		return kvc_fail(-EINVAL,
				"the current CUDA context is of device %d, the pool lies "
				"on device %d (%s)",
				current, gpu->device, name);
	return 0;
}

/**
 * kvc_gpu_open() - the GPU of a pool, and the calling thread's context on it
 *
 * Return: 0; -ENODEV the process does not see it; -EINVAL no context of it is current;
 * -ENOMEM.
 */
int kvc_gpu_open(const u8 *uuid, struct kvc_gpu **ret_gpu)
{
	struct kvc_gpu *gpu = calloc(1, sizeof(*gpu));
	int r;

	if (!gpu)
		return kvc_fail(-ENOMEM, "out of memory");
	r = load(&gpu->cu, uuid);
	if (!r)
		r = find_device(&gpu->cu, uuid, &gpu->device);
	if (!r)
		r = take_context(gpu, uuid);
	if (r) {
		free(gpu);
		return r;
	}
	*ret_gpu = gpu;
	return 0;
}

/* Make the engine's context current; leave() puts the thread back as it was. */
static int enter(struct kvc_gpu *gpu)
{
	kv_cu_result cr = gpu->cu.ctx_push(gpu->ctx);

	return cr ? cuda_fail("cuCtxPushCurrent", cr) : 0;
}

static void leave(struct kvc_gpu *gpu)
{
	kv_cu_ctx ctx;

	gpu->cu.ctx_pop(&ctx);
}

/** kvc_gpu_reserve() - addresses for a whole pool, without memory. Return: 0; -ENOMEM */
int kvc_gpu_reserve(struct kvc_gpu *gpu, size_t bytes, u8 **ret_base)
{
	kv_cu_ptr ptr = 0;
	kv_cu_result cr;
	int r = enter(gpu);

	if (r)
		return r;
	cr = gpu->cu.va_reserve(&ptr, bytes, 0, 0, 0);
	leave(gpu);
	if (cr)
		return kvc_fail(-ENOMEM, "reserving %zu bytes of GPU addresses: %d (%s)",
				bytes, cr, kv_cuda_reason(cr));
	*ret_base = (u8 *)(uintptr_t)ptr;
	return 0;
}

/** kvc_gpu_unreserve() - give the addresses back; nothing is mapped there */
int kvc_gpu_unreserve(struct kvc_gpu *gpu, u8 *base, size_t bytes)
{
	kv_cu_result cr;
	int r = enter(gpu);

	if (r)
		return r;
	cr = gpu->cu.va_free((kv_cu_ptr)(uintptr_t)base, bytes);
	leave(gpu);
	return cr ? cuda_fail("cuMemAddressFree", cr) : 0;
}

static int map_entered(struct kvc_gpu *gpu, int fd, kv_cu_ptr at, size_t bytes)
{
	const struct kv_cu_access access = {
		.location = {.type = KV_CU_DEVICE, .id = gpu->device},
		.flags = KV_CU_READWRITE,
	};
	const struct kv_cuda_syms *cu = &gpu->cu;
	kv_cu_handle handle;
	kv_cu_result cr;
	int r;

	cr = cu->mem_import(&handle, (void *)(intptr_t)fd, KV_CU_POSIX_FD);
	if (cr)
		return cuda_fail("cuMemImportFromShareableHandle", cr);
	cr = cu->mem_map(at, bytes, 0, handle, 0);
	if (cr) {
		r = cuda_fail("cuMemMap", cr);
		goto release_handle;
	}
	cr = cu->mem_access(at, bytes, &access, 1);
	if (cr) {
		r = cuda_fail("cuMemSetAccess", cr);
		goto unmap;
	}
	/* The mapping holds the memory from here on. */
	cr = KV_MUTANT(gpu_keep_handle) ? 0 : cu->mem_release(handle);
	if (cr) {
		r = cuda_fail("cuMemRelease", cr);
		goto unmap;
	}
	return 0;
unmap:
	if (KV_MUTANT(gpu_half_mapped))
		return r;
	cu->mem_unmap(at, bytes);
release_handle:
	cu->mem_release(handle);
	return r;
}

/**
 * kvc_gpu_map() - import @fd and map it at @addr, whole or not at all
 *
 * @fd stays the caller's.
 * Return: 0; -ENOMEM, -EMFILE, -EINVAL, -EIO of the step that failed, named.
 */
int kvc_gpu_map(struct kvc_gpu *gpu, int fd, u8 *addr, size_t bytes)
{
	int r = enter(gpu);

	if (r)
		return r;
	r = map_entered(gpu, fd, (kv_cu_ptr)(uintptr_t)addr, bytes);
	leave(gpu);
	return r;
}

/** kvc_gpu_unmap() - no work on the GPU touches it any more. Return: 0; -errno, and it is
 * still mapped */
int kvc_gpu_unmap(struct kvc_gpu *gpu, u8 *addr, size_t bytes)
{
	kv_cu_result cr;
	int r = enter(gpu);

	if (r)
		return r;
	cr = gpu->cu.mem_unmap((kv_cu_ptr)(uintptr_t)addr, bytes);
	leave(gpu);
	return cr ? cuda_fail("cuMemUnmap", cr) : 0;
}

/** kvc_gpu_open_handle() - memory behind a legacy handle of 64 bytes. Return: 0; -errno */
int kvc_gpu_open_handle(struct kvc_gpu *gpu, const u8 *handle, u8 **ret_addr)
{
	struct kv_cu_ipc_handle h;
	kv_cu_result cr;
	kv_cu_ptr at;
	int r = enter(gpu);

	if (r)
		return r;
	memcpy(&h, handle, sizeof(h));
	cr = gpu->cu.ipc_open(&at, h, KV_CU_IPC_LAZY);
	leave(gpu);
	if (cr)
		return cuda_fail("cuIpcOpenMemHandle", cr);
	*ret_addr = (u8 *)(uintptr_t)at;
	return 0;
}

/** kvc_gpu_close_handle() - as kvc_gpu_unmap() */
int kvc_gpu_close_handle(struct kvc_gpu *gpu, u8 *addr)
{
	kv_cu_result cr;
	int r = enter(gpu);

	if (r)
		return r;
	cr = gpu->cu.ipc_close((kv_cu_ptr)(uintptr_t)addr);
	leave(gpu);
	return cr ? cuda_fail("cuIpcCloseMemHandle", cr) : 0;
}
