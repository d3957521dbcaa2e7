/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake/cuda.c - a CUDA driver in memfds, for tests on machines without a GPU.
 *
 * Built as a shared library and loaded through KV_CUDA_LIB in place of libcuda.so.1.
 * Device memory is a memfd, so that import, map and the bytes themselves work between
 * processes. It obeys the measured rules of docs/facts.md: an imported handle cannot be
 * exported again (F-reexp), an exported fd keeps the memory (F-keep), exported fds lack
 * O_CLOEXEC, and nothing works before cuInit, which starts a thread that stays. Mapping
 * needs a current context.
 *
 *	FAKE_CUDA_DEVICES	number of devices (1); device i has a UUID of 16 bytes 0x10 + i
 *	FAKE_CUDA_VISIBLE	devices this process sees, in order, as CUDA_VISIBLE_DEVICES
 *	FAKE_CUDA_FAIL		"cuMemCreate:3": the third call of that entry fails (out of
 *				memory); "cuMemCreate:3+": the third and all later ones
 *	FAKE_CUDA_INIT		CUDA result of cuInit (0)
 *	FAKE_CUDA_INIT_MS	time that cuInit takes
 *	FAKE_CUDA_NO_SCRUB	fresh memory holds old bytes (0xd1)
 *	FAKE_CUDA_NO_CONTEXT	"kvmd": a context made by a program of that name aborts it
 *	FAKE_CUDA_FORK_BREAKS	a child of a process that called cuInit has no driver, as with
 *				the real one
 *	FAKE_CUDA_LACKS		number of a device attribute that is 0
 *	FAKE_CUDA_MODE		compute mode (0)
 *
 * Copies and legacy memory: cuda_copy.c.
 *
 * A context is an open memfd named after its process, which the fake NVML finds.
 * fake_cuda_get() tells what is open and how often an entry was called.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "tests/fake/cuda_fake.h"

#define DEVICES_MAX 8
#define HANDLES_MAX 4096

struct handle {
	int fd; /* -1 = free entry */
	size_t bytes;
	bool imported;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle handles[HANDLES_MAX];
static unsigned nr_handles; /* entries ever used */
static bool initialised;
static pid_t init_pid; /* that called cuInit */
static struct fake_cuda_counts counts;
static __thread kv_cu_ctx stack[8];
static __thread unsigned depth;
static pid_t ctx_pid;
static int ctx_fds[DEVICES_MAX] = {-1, -1, -1, -1, -1, -1, -1, -1};
static int visible[DEVICES_MAX], nr_visible;

kv_cu_result fake_cuda_may(const char *entry, int *calls)
{
	const char *env = getenv("FAKE_CUDA_FAIL");
	size_t n = strlen(entry);
	bool fails = false;

	++*calls;
	if (env && !strncmp(env, entry, n) && env[n] == ':')
		fails = strchr(env, '+') ? *calls >= atoi(env + n + 1)
					 : *calls == atoi(env + n + 1);
	if (fails)
		return NO_MEMORY;
	return initialised ? OK : NOT_INIT;
}

bool fake_cuda_context(void)
{
	return depth;
}

/* As the real one after cuInit: a thread with the signal mask of its maker. */
static void *driver_thread(void *arg)
{
	(void)arg;
	for (;;)
		pause();
	return NULL;
}

static int start_driver_thread(void)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, driver_thread, NULL))
		return -1;
	return pthread_detach(thread);
}

API kv_cu_result cuInit(unsigned flags);
API kv_cu_result cuInit(unsigned flags)
{
	const char *ms = getenv("FAKE_CUDA_INIT_MS"), *vis = getenv("FAKE_CUDA_VISIBLE");
	const char *nr = getenv("FAKE_CUDA_DEVICES");
	int devices = nr ? atoi(nr) : 1;

	if (getenv("FAKE_CUDA_INIT"))
		return atoi(getenv("FAKE_CUDA_INIT"));
	/* A child of a process that had called cuInit never gets a driver. */
	if (initialised && init_pid != getpid() && getenv("FAKE_CUDA_FORK_BREAKS"))
		return NOT_INIT;
	if (ms)
		usleep((useconds_t)atoi(ms) * 1000);
	if (devices <= 0)
		return NO_DEVICE;
	nr_visible = 0;
	for (int i = 0; i < devices && i < DEVICES_MAX; i++)
		if (!vis)
			visible[nr_visible++] = i;
	for (const char *p = vis; p && *p && nr_visible < DEVICES_MAX; p++)
		if (*p >= '0' && *p <= '9')
			visible[nr_visible++] = *p - '0';
	if (init_pid != getpid() && start_driver_thread())
		return 304;
	initialised = true;
	init_pid = getpid();
	return flags ? INVALID : OK;
}

API kv_cu_result cuDriverGetVersion(int *version);
API kv_cu_result cuDriverGetVersion(int *version)
{
	*version = 13000;
	return OK;
}

API kv_cu_result cuDeviceGetCount(int *count);
API kv_cu_result cuDeviceGetCount(int *count)
{
	MAYBE_FAIL("cuDeviceGetCount");
	*count = nr_visible;
	return OK;
}

API kv_cu_result cuDeviceGet(kv_cu_device *dev, int ordinal);
API kv_cu_result cuDeviceGet(kv_cu_device *dev, int ordinal)
{
	MAYBE_FAIL("cuDeviceGet");
	if (ordinal < 0 || ordinal >= nr_visible)
		return 101;
	*dev = ordinal;
	return OK;
}

API kv_cu_result cuDeviceGetName(char *name, int len, kv_cu_device dev);
API kv_cu_result cuDeviceGetName(char *name, int len, kv_cu_device dev)
{
	MAYBE_FAIL("cuDeviceGetName");
	snprintf(name, (size_t)len, "fake GPU %d", visible[dev]);
	return OK;
}

API kv_cu_result cuDeviceGetUuid_v2(u8 *uuid, kv_cu_device dev);
API kv_cu_result cuDeviceGetUuid_v2(u8 *uuid, kv_cu_device dev)
{
	MAYBE_FAIL("cuDeviceGetUuid_v2");
	memset(uuid, 0x10 + visible[dev], 16);
	return OK;
}

API kv_cu_result cuDeviceTotalMem_v2(size_t *bytes, kv_cu_device dev);
API kv_cu_result cuDeviceTotalMem_v2(size_t *bytes, kv_cu_device dev)
{
	MAYBE_FAIL("cuDeviceTotalMem_v2");
	(void)dev;
	*bytes = (size_t)8 << 30;
	return OK;
}

API kv_cu_result cuDeviceGetAttribute(int *value, int attr, kv_cu_device dev);
API kv_cu_result cuDeviceGetAttribute(int *value, int attr, kv_cu_device dev)
{
	MAYBE_FAIL("cuDeviceGetAttribute");
	(void)dev;
	*value = 1;
	if (attr == KV_CU_ATTR_POSIX_FD || attr == KV_CU_ATTR_VMM)
		*value = !getenv("FAKE_CUDA_LACKS") ||
			 atoi(getenv("FAKE_CUDA_LACKS")) != attr;
	if (attr == KV_CU_ATTR_COMPUTE_MODE)
		*value = getenv("FAKE_CUDA_MODE") ? atoi(getenv("FAKE_CUDA_MODE")) : 0;
	return OK;
}

API kv_cu_result cuMemGetAllocationGranularity(size_t *bytes,
					       const struct kv_cu_alloc_prop *prop,
					       int option);
API kv_cu_result cuMemGetAllocationGranularity(size_t *bytes,
					       const struct kv_cu_alloc_prop *prop,
					       int option)
{
	MAYBE_FAIL("cuMemGetAllocationGranularity");
	(void)prop;
	(void)option;
	*bytes = 2u << 20;
	return OK;
}

/* Takes over @fd. Return: a handle, 0 when the table is full. */
static kv_cu_handle handle_add(int fd, size_t bytes, bool imported)
{
	kv_cu_handle h = 0;

	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < nr_handles && !h; i++)
		if (handles[i].fd < 0)
			h = i + 1;
	if (!h && nr_handles < HANDLES_MAX)
		h = ++nr_handles;
	if (h)
		handles[h - 1] = (struct handle){fd, bytes, imported};
	pthread_mutex_unlock(&lock);
	return h;
}

static struct handle *handle_get(kv_cu_handle h)
{
	return h && h <= nr_handles && handles[h - 1].fd >= 0 ? &handles[h - 1] : NULL;
}

static int make_dirty(int fd, size_t bytes)
{
	static const u8 old[4096] = {[7] = 0xd1};

	for (size_t at = 0; at < bytes; at += 1u << 20)
		if (pwrite(fd, old, sizeof(old), (off_t)at) != (ssize_t)sizeof(old))
			return -1;
	return 0;
}

API kv_cu_result cuMemCreate(kv_cu_handle *handle, size_t bytes,
			     const struct kv_cu_alloc_prop *prop, u64 flags);
API kv_cu_result cuMemCreate(kv_cu_handle *handle, size_t bytes,
			     const struct kv_cu_alloc_prop *prop, u64 flags)
{
	int fd;

	MAYBE_FAIL("cuMemCreate");
	if (bytes % (2u << 20) || prop->type != KV_CU_PINNED || flags)
		return INVALID;
	fd = memfd_create("fake-cuda", MFD_CLOEXEC);
	if (fd < 0)
		return 304;
	if (getenv("FAKE_CUDA_NO_SCRUB") && make_dirty(fd, bytes)) {
		close(fd);
		return NO_MEMORY;
	}
	if (ftruncate(fd, (off_t)bytes) || !(*handle = handle_add(fd, bytes, false))) {
		close(fd);
		return NO_MEMORY;
	}
	return OK;
}

API kv_cu_result cuMemRelease(kv_cu_handle handle);
API kv_cu_result cuMemRelease(kv_cu_handle handle)
{
	struct handle *h = handle_get(handle);

	MAYBE_FAIL("cuMemRelease");
	if (!h)
		return INVALID;
	close(h->fd);
	h->fd = -1;
	return OK;
}

API kv_cu_result cuMemExportToShareableHandle(void *fd, kv_cu_handle handle, int type,
					      u64 flags);
API kv_cu_result cuMemExportToShareableHandle(void *fd, kv_cu_handle handle, int type,
					      u64 flags)
{
	struct handle *h = handle_get(handle);
	int copy;

	MAYBE_FAIL("cuMemExportToShareableHandle");
	if (!h || h->imported || type != KV_CU_POSIX_FD || flags)
		return INVALID;
	copy = dup(h->fd); /* as the driver: without O_CLOEXEC */
	if (copy < 0)
		return 304;
	memcpy(fd, &copy, sizeof(copy));
	return OK;
}

API kv_cu_result cuMemImportFromShareableHandle(kv_cu_handle *handle, void *fd, int type);
API kv_cu_result cuMemImportFromShareableHandle(kv_cu_handle *handle, void *fd, int type)
{
	int copy;
	off_t bytes;

	MAYBE_FAIL("cuMemImportFromShareableHandle");
	if (type != KV_CU_POSIX_FD)
		return INVALID;
	copy = fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 0);
	if (copy < 0)
		return INVALID;
	counts.imports++;
	bytes = lseek(copy, 0, SEEK_END);
	if (bytes <= 0 || !(*handle = handle_add(copy, (size_t)bytes, true))) {
		close(copy);
		return INVALID;
	}
	return OK;
}

API kv_cu_result cuMemAddressReserve(kv_cu_ptr *ptr, size_t bytes, size_t align,
				     kv_cu_ptr hint, u64 flags);
API kv_cu_result cuMemAddressReserve(kv_cu_ptr *ptr, size_t bytes, size_t align,
				     kv_cu_ptr hint, u64 flags)
{
	void *p;

	MAYBE_FAIL("cuMemAddressReserve");
	NEED_CONTEXT();
	(void)align;
	(void)hint;
	(void)flags;
	p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
		 0);
	if (p == MAP_FAILED)
		return NO_MEMORY;
	*ptr = (kv_cu_ptr)(uintptr_t)p;
	counts.reserved_bytes += bytes;
	return OK;
}

API kv_cu_result cuMemAddressFree(kv_cu_ptr ptr, size_t bytes);
API kv_cu_result cuMemAddressFree(kv_cu_ptr ptr, size_t bytes)
{
	MAYBE_FAIL("cuMemAddressFree");
	if (munmap((void *)(uintptr_t)ptr, bytes))
		return INVALID;
	counts.reserved_bytes -= bytes;
	return OK;
}

API kv_cu_result cuMemMap(kv_cu_ptr ptr, size_t bytes, size_t offset, kv_cu_handle handle,
			  u64 flags);
API kv_cu_result cuMemMap(kv_cu_ptr ptr, size_t bytes, size_t offset, kv_cu_handle handle,
			  u64 flags)
{
	struct handle *h = handle_get(handle);

	MAYBE_FAIL("cuMemMap");
	NEED_CONTEXT();
	if (!h || offset || flags || bytes > h->bytes)
		return INVALID;
	if (mmap((void *)(uintptr_t)ptr, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, h->fd,
		 0) == MAP_FAILED)
		return NO_MEMORY;
	counts.mapped++;
	counts.mapped_bytes += bytes;
	return OK;
}

API kv_cu_result cuMemUnmap(kv_cu_ptr ptr, size_t bytes);
API kv_cu_result cuMemUnmap(kv_cu_ptr ptr, size_t bytes)
{
	MAYBE_FAIL("cuMemUnmap");
	if (mmap((void *)(uintptr_t)ptr, bytes, PROT_NONE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
		 0) == MAP_FAILED)
		return INVALID;
	counts.mapped--;
	counts.mapped_bytes -= bytes;
	return OK;
}

API kv_cu_result cuMemSetAccess(kv_cu_ptr ptr, size_t bytes,
				const struct kv_cu_access *desc, size_t nr);
API kv_cu_result cuMemSetAccess(kv_cu_ptr ptr, size_t bytes,
				const struct kv_cu_access *desc, size_t nr)
{
	int prot = PROT_READ | (desc[0].flags == KV_CU_READWRITE ? PROT_WRITE : 0);

	MAYBE_FAIL("cuMemSetAccess");
	NEED_CONTEXT();
	if (nr != 1)
		return INVALID;
	return mprotect((void *)(uintptr_t)ptr, bytes, prot) ? INVALID : OK;
}

/* ----------------------------------------------------------------- contexts */

/* kvmd must never make one (facts F-ctx). */
static void forbidden(void)
{
	const char *name = getenv("FAKE_CUDA_NO_CONTEXT");

	if (name && !strcmp(name, program_invocation_short_name))
		abort();
}

API kv_cu_result cuDevicePrimaryCtxRetain(kv_cu_ctx *ctx, kv_cu_device dev);
API kv_cu_result cuDevicePrimaryCtxRetain(kv_cu_ctx *ctx, kv_cu_device dev)
{
	char name[64];

	MAYBE_FAIL("cuDevicePrimaryCtxRetain");
	forbidden();
	if (dev < 0 || dev >= nr_visible)
		return 101;
	/* A forked child has its parent's descriptors and a context of its own. */
	if (ctx_pid != getpid())
		memset(ctx_fds, 0xff, sizeof(ctx_fds));
	ctx_pid = getpid();
	if (ctx_fds[dev] < 0) {
		snprintf(name, sizeof(name), "fake-cuda-ctx-%d", getpid());
		ctx_fds[dev] = memfd_create(name, MFD_CLOEXEC);
		if (ctx_fds[dev] < 0)
			return 304;
		counts.contexts++;
	}
	*ctx = (kv_cu_ctx)(uintptr_t)(dev + 1);
	return OK;
}

API kv_cu_result cuDevicePrimaryCtxRelease_v2(kv_cu_device dev);
API kv_cu_result cuDevicePrimaryCtxRelease_v2(kv_cu_device dev)
{
	MAYBE_FAIL("cuDevicePrimaryCtxRelease_v2");
	if (dev < 0 || dev >= nr_visible || ctx_fds[dev] < 0)
		return 101;
	close(ctx_fds[dev]);
	ctx_fds[dev] = -1;
	counts.contexts--;
	return OK;
}

API kv_cu_result cuCtxGetCurrent(kv_cu_ctx *ctx);
API kv_cu_result cuCtxGetCurrent(kv_cu_ctx *ctx)
{
	MAYBE_FAIL("cuCtxGetCurrent");
	*ctx = depth ? stack[depth - 1] : NULL;
	return OK;
}

API kv_cu_result cuCtxGetDevice(kv_cu_device *dev);
API kv_cu_result cuCtxGetDevice(kv_cu_device *dev)
{
	MAYBE_FAIL("cuCtxGetDevice");
	NEED_CONTEXT();
	*dev = (int)(uintptr_t)stack[depth - 1] - 1;
	return OK;
}

API kv_cu_result cuCtxPushCurrent_v2(kv_cu_ctx ctx);
API kv_cu_result cuCtxPushCurrent_v2(kv_cu_ctx ctx)
{
	MAYBE_FAIL("cuCtxPushCurrent_v2");
	if (depth == 8 || !ctx)
		return INVALID;
	stack[depth++] = ctx;
	return OK;
}

API kv_cu_result cuCtxPopCurrent_v2(kv_cu_ctx *ctx);
API kv_cu_result cuCtxPopCurrent_v2(kv_cu_ctx *ctx)
{
	MAYBE_FAIL("cuCtxPopCurrent_v2");
	NEED_CONTEXT();
	depth--;
	if (ctx)
		*ctx = stack[depth];
	return OK;
}

API void fake_cuda_get(struct fake_cuda_counts *ret);
API void fake_cuda_get(struct fake_cuda_counts *ret)
{
	pthread_mutex_lock(&lock);
	*ret = counts;
	ret->handles = 0;
	for (unsigned i = 0; i < nr_handles; i++)
		ret->handles += handles[i].fd >= 0;
	pthread_mutex_unlock(&lock);
}
