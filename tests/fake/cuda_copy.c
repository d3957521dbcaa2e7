/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake/cuda_copy.c - the fake driver's copies, streams and legacy memory. See cuda.c.
 *
 * An asynchronous copy needs pinned host memory; it moves its bytes in the middle of the
 * time it takes, so that a process killed under way leaves either state. Memory that is
 * freed while another process has its legacy handle open aborts the freeing process:
 * with the real driver that is undefined (facts F-legacy).
 *
 *	FAKE_CUDA_COPY_MS	time from an event's record to its being done (0)
 *	FAKE_CUDA_NO_SYNC	"kvmd-mover": a synchronous copy or wait by a program of that
 *				name aborts it (facts F-mover)
 *	FAKE_CUDA_NO_BATCH	copies cannot go as a batch
 *	FAKE_CUDA_LATE		the events fail: "a device error" after this many queries
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tests/fake/cuda_fake.h"

#define LEGACY_MAX 64
#define RANGES_MAX 16
#define STREAMS	   16
#define EVENTS	   4096
#define PIN_LIMIT  (512ull << 30) /* of one registration, as drivers have it (cases O61) */

/* A synchronous call would stall the engines' GPU for milliseconds. */
static void synchronous(void)
{
	const char *name = getenv("FAKE_CUDA_NO_SYNC");

	if (name && !strcmp(name, program_invocation_short_name))
		abort();
}

static u64 now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (u64)ts.tv_sec * 1000 + (u64)ts.tv_nsec / 1000000;
}

/* ------------------------------------------------------------------ plain copies */

API kv_cu_result cuCtxSynchronize(void);
API kv_cu_result cuCtxSynchronize(void)
{
	MAYBE_FAIL("cuCtxSynchronize");
	NEED_CONTEXT();
	synchronous();
	return OK;
}

API kv_cu_result cuMemcpyHtoD_v2(kv_cu_ptr dst, const void *src, size_t bytes);
API kv_cu_result cuMemcpyHtoD_v2(kv_cu_ptr dst, const void *src, size_t bytes)
{
	MAYBE_FAIL("cuMemcpyHtoD_v2");
	NEED_CONTEXT();
	synchronous();
	memcpy((void *)(uintptr_t)dst, src, bytes);
	return OK;
}

API kv_cu_result cuMemcpyDtoH_v2(void *dst, kv_cu_ptr src, size_t bytes);
API kv_cu_result cuMemcpyDtoH_v2(void *dst, kv_cu_ptr src, size_t bytes)
{
	MAYBE_FAIL("cuMemcpyDtoH_v2");
	NEED_CONTEXT();
	synchronous();
	memcpy(dst, (void *)(uintptr_t)src, bytes);
	return OK;
}

/* -------------------------------------------------- pinned memory, streams, events */

static struct {
	const u8 *addr;
	size_t bytes;
} pinned[RANGES_MAX];
static struct fake_pins pins;
static unsigned nr_streams, nr_events, nr_queries;
static u64 due_ms[EVENTS];

API kv_cu_result cuMemHostRegister_v2(void *addr, size_t bytes, unsigned flags);
API kv_cu_result cuMemHostRegister_v2(void *addr, size_t bytes, unsigned flags)
{
	MAYBE_FAIL("cuMemHostRegister_v2");
	NEED_CONTEXT();
	if (!bytes || (uintptr_t)addr % 4096 || flags || bytes >= PIN_LIMIT)
		return INVALID;
	for (unsigned i = 0; i < RANGES_MAX; i++) {
		if (pinned[i].addr)
			continue;
		pinned[i].addr = addr;
		pinned[i].bytes = bytes;
		pins.nr++;
		pins.bytes += bytes;
		pins.largest = bytes > pins.largest ? bytes : pins.largest;
		return OK;
	}
	return NO_MEMORY;
}

API kv_cu_result cuMemHostUnregister(void *addr);
API kv_cu_result cuMemHostUnregister(void *addr)
{
	MAYBE_FAIL("cuMemHostUnregister");
	NEED_CONTEXT();
	for (unsigned i = 0; i < RANGES_MAX; i++) {
		if (!addr || pinned[i].addr != addr)
			continue;
		/* slots are filled in order: the last of them goes first */
		pins.out_of_order += i + 1 != pins.nr;
		pins.nr--;
		pins.bytes -= pinned[i].bytes;
		pinned[i].addr = NULL;
		return OK;
	}
	return INVALID;
}

API void fake_pins_get(struct fake_pins *ret);
API void fake_pins_get(struct fake_pins *ret)
{
	*ret = pins;
}

static bool is_pinned(const void *addr, size_t bytes)
{
	const u8 *p = addr;

	for (unsigned i = 0; i < RANGES_MAX; i++)
		if (pinned[i].addr && p >= pinned[i].addr &&
		    p + bytes <= pinned[i].addr + pinned[i].bytes)
			return true;
	return false;
}

API kv_cu_result cuStreamCreate(void **stream, unsigned flags);
API kv_cu_result cuStreamCreate(void **stream, unsigned flags)
{
	MAYBE_FAIL("cuStreamCreate");
	NEED_CONTEXT();
	if (nr_streams == STREAMS || flags != KV_CU_STREAM_NON_BLOCKING)
		return INVALID;
	*stream = (void *)(uintptr_t)++nr_streams;
	return OK;
}

API kv_cu_result cuEventCreate(void **event, unsigned flags);
API kv_cu_result cuEventCreate(void **event, unsigned flags)
{
	MAYBE_FAIL("cuEventCreate");
	NEED_CONTEXT();
	if (nr_events == EVENTS - 1 || flags != KV_CU_EVENT_DISABLE_TIMING)
		return INVALID;
	*event = (void *)(uintptr_t)++nr_events;
	return OK;
}

API kv_cu_result cuEventRecord(void *event, void *stream);
API kv_cu_result cuEventRecord(void *event, void *stream)
{
	const char *ms = getenv("FAKE_CUDA_COPY_MS");

	MAYBE_FAIL("cuEventRecord");
	NEED_CONTEXT();
	if (!event || !stream)
		return INVALID;
	due_ms[(uintptr_t)event] = now_ms() + (ms ? (u64)atoi(ms) : 0);
	return OK;
}

API kv_cu_result cuEventQuery(void *event);
API kv_cu_result cuEventQuery(void *event)
{
	const char *late = getenv("FAKE_CUDA_LATE");

	MAYBE_FAIL("cuEventQuery");
	NEED_CONTEXT();
	if (late && ++nr_queries > (unsigned)atoi(late))
		return 700;
	return now_ms() < due_ms[(uintptr_t)event] ? KV_CU_NOT_READY : OK;
}

API kv_cu_result cuMemcpyHtoDAsync_v2(kv_cu_ptr dst, const void *src, size_t bytes,
				      void *stream);
API kv_cu_result cuMemcpyHtoDAsync_v2(kv_cu_ptr dst, const void *src, size_t bytes,
				      void *stream)
{
	MAYBE_FAIL("cuMemcpyHtoDAsync_v2");
	NEED_CONTEXT();
	if (!stream || !is_pinned(src, bytes))
		return INVALID;
	memcpy((void *)(uintptr_t)dst, src, bytes);
	return OK;
}

API kv_cu_result cuMemcpyDtoHAsync_v2(void *dst, kv_cu_ptr src, size_t bytes,
				      void *stream);
API kv_cu_result cuMemcpyDtoHAsync_v2(void *dst, kv_cu_ptr src, size_t bytes,
				      void *stream)
{
	MAYBE_FAIL("cuMemcpyDtoHAsync_v2");
	NEED_CONTEXT();
	if (!stream || !is_pinned(dst, bytes))
		return INVALID;
	memcpy(dst, (void *)(uintptr_t)src, bytes);
	return OK;
}

API kv_cu_result cuMemcpyBatchAsync_v2(const kv_cu_ptr *dsts, const kv_cu_ptr *srcs,
				       const size_t *bytes, size_t nr,
				       const struct kv_cu_copy_attr *attrs,
				       const size_t *attr_from, size_t nr_attrs,
				       void *stream);
API kv_cu_result cuMemcpyBatchAsync_v2(const kv_cu_ptr *dsts, const kv_cu_ptr *srcs,
				       const size_t *bytes, size_t nr,
				       const struct kv_cu_copy_attr *attrs,
				       const size_t *attr_from, size_t nr_attrs,
				       void *stream)
{
	MAYBE_FAIL("cuMemcpyBatchAsync_v2");
	NEED_CONTEXT();
	if (getenv("FAKE_CUDA_NO_BATCH"))
		return KV_CU_NOT_SUPPORTED;
	if (!stream || !nr || nr_attrs != 1 || attr_from[0] ||
	    attrs->order != KV_CU_ORDER_STREAM || attrs->flags != KV_CU_COPY_OVERLAP)
		return INVALID;
	for (size_t i = 0; i < nr; i++) {
		void *dst = (void *)(uintptr_t)dsts[i];
		const void *src = (const void *)(uintptr_t)srcs[i];

		if (!is_pinned(dst, bytes[i]) && !is_pinned(src, bytes[i]))
			return INVALID;
		memcpy(dst, src, bytes[i]);
	}
	return OK;
}

/* ------------------------------------------- memory with a legacy IPC handle */

/* Of this process: made here (opened: false) or another's. */
static struct {
	u8 *addr;
	size_t bytes;
	int fd;
	bool opened;
} legacy[LEGACY_MAX];

static unsigned legacy_find(kv_cu_ptr ptr, bool opened)
{
	unsigned i = 0;

	while (i < LEGACY_MAX &&
	       (legacy[i].addr != (u8 *)(uintptr_t)ptr || legacy[i].opened != opened))
		i++;
	return i;
}

static kv_cu_result legacy_add(kv_cu_ptr *ptr, int fd, size_t bytes, bool opened)
{
	unsigned i = 0;
	void *p;

	while (i < LEGACY_MAX && legacy[i].addr)
		i++;
	p = i < LEGACY_MAX && fd >= 0
		    ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
		    : MAP_FAILED;
	if (p == MAP_FAILED) {
		if (fd >= 0)
			close(fd);
		return NO_MEMORY;
	}
	legacy[i].addr = p;
	legacy[i].bytes = bytes;
	legacy[i].fd = fd;
	legacy[i].opened = opened;
	*ptr = (kv_cu_ptr)(uintptr_t)p;
	return OK;
}

static void legacy_del(unsigned i)
{
	munmap(legacy[i].addr, legacy[i].bytes);
	close(legacy[i].fd);
	legacy[i].addr = NULL;
}

API kv_cu_result cuMemAlloc_v2(kv_cu_ptr *ptr, size_t bytes);
API kv_cu_result cuMemAlloc_v2(kv_cu_ptr *ptr, size_t bytes)
{
	int fd;

	MAYBE_FAIL("cuMemAlloc_v2");
	NEED_CONTEXT();
	fd = memfd_create("fake-cuda-legacy", MFD_CLOEXEC);
	if (fd >= 0 && ftruncate(fd, (off_t)bytes)) {
		close(fd);
		return NO_MEMORY;
	}
	return legacy_add(ptr, fd, bytes, false);
}

API kv_cu_result cuMemFree_v2(kv_cu_ptr ptr);
API kv_cu_result cuMemFree_v2(kv_cu_ptr ptr)
{
	unsigned i = legacy_find(ptr, false);

	MAYBE_FAIL("cuMemFree_v2");
	if (!ptr || i == LEGACY_MAX)
		return INVALID;
	if (flock(legacy[i].fd, LOCK_EX | LOCK_NB))
		abort(); /* an importer has it open */
	legacy_del(i);
	return OK;
}

/* The handle is "pid fd bytes": the importer goes through /proc. */
API kv_cu_result cuIpcGetMemHandle(struct kv_cu_ipc_handle *handle, kv_cu_ptr ptr);
API kv_cu_result cuIpcGetMemHandle(struct kv_cu_ipc_handle *handle, kv_cu_ptr ptr)
{
	unsigned i = legacy_find(ptr, false);

	MAYBE_FAIL("cuIpcGetMemHandle");
	if (!ptr || i == LEGACY_MAX)
		return INVALID;
	memset(handle, 0, sizeof(*handle));
	snprintf(handle->reserved, sizeof(handle->reserved), "%d %d %zu", getpid(),
		 legacy[i].fd, legacy[i].bytes);
	return OK;
}

API kv_cu_result cuIpcOpenMemHandle_v2(kv_cu_ptr *ptr, struct kv_cu_ipc_handle handle,
				       unsigned flags);
API kv_cu_result cuIpcOpenMemHandle_v2(kv_cu_ptr *ptr, struct kv_cu_ipc_handle handle,
				       unsigned flags)
{
	char path[64];
	size_t bytes;
	int pid, fd;

	MAYBE_FAIL("cuIpcOpenMemHandle_v2");
	NEED_CONTEXT();
	if (flags != KV_CU_IPC_LAZY ||
	    sscanf(handle.reserved, "%d %d %zu", &pid, &fd, &bytes) != 3)
		return INVALID;
	if (pid == getpid())
		return 201; /* facts F-legacy: not in the exporting process */
	snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
	fd = open(path, O_RDWR | O_CLOEXEC);
	/* One process may open it from several threads or twice: all share the lock. */
	if (fd >= 0 && flock(fd, LOCK_SH | LOCK_NB)) {
		close(fd);
		fd = -1;
	}
	return fd < 0 ? INVALID : legacy_add(ptr, fd, bytes, true);
}

API kv_cu_result cuIpcCloseMemHandle(kv_cu_ptr ptr);
API kv_cu_result cuIpcCloseMemHandle(kv_cu_ptr ptr)
{
	unsigned i = legacy_find(ptr, true);

	MAYBE_FAIL("cuIpcCloseMemHandle");
	if (!ptr || i == LEGACY_MAX)
		return INVALID;
	legacy_del(i);
	return OK;
}
