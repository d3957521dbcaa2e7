/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend/cuda.c - an extent is one cuMemCreate, exported once as a POSIX fd.
 *
 * The fd is what holds the memory: it goes to sessions and, later, to the keeper, and an
 * imported handle could not be exported again (facts F-keep, F-reexp). The driver's
 * handle is released as soon as the fd exists, so that closing the fd gives the memory
 * back when no importer is left.
 *
 * No context is ever made. cuInit runs in a thread of its own; the loop asks `state`,
 * which the thread stores last (release) after everything it prepared. All else is the
 * loop thread's.
 */
#include "kvmd/backend/cuda.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/cuda_syms.h"
#include "base/join.h"
#include "base/mutant.h"
#include "kvmd/dbg/fault.h"

#define EXTENT_ALIGN_BYTES \
	(2ull << 20) /* facts F-vmm: granularity of the target GPUs \
		      */
#define EXTENT_MIN_BYTES (64ull << 20)
#define EXTENT_MAX_BYTES (1ull << 30)
#define END_S		 2u

/**
 * struct cuda - one GPU
 * @state: enum kvd_cuda_state; written by the start thread, read by the loop
 * @any_gpu: no UUID was asked for
 * @uuid: wanted
 * @device: driver's ordinal for the GPU in this process
 * @info, @capacity_bytes, @error, @result: written by the start thread before @state
 * @no_export: as @error
 * @event_fd: written once by the start thread
 * @legacy: of cuda-legacy
 */
struct cuda {
	struct kvd_backend be;
	struct kv_cuda_syms cu;
	pthread_t thread;
	int state;
	bool any_gpu;
	u8 uuid[16];
	kv_cu_device device;
	struct kvd_cuda_info info;
	u64 want_bytes;
	u64 capacity_bytes;
	u64 extent_bytes;
	bool small_extents;
	bool is_legacy;
	bool no_export;
	struct kvd_legacy legacy;
	u64 used_bytes;
	u64 nr_made;
	int event_fd;
	kv_cu_result result;
	char error[160];
};

static struct cuda *cuda_of(const struct kvd_backend *be)
{
	return kv_container_of(be, struct cuda, be);
}

static struct kv_cu_alloc_prop alloc_prop(const struct cuda *cuda)
{
	return (struct kv_cu_alloc_prop){
		.type = KV_CU_PINNED,
		.handle_types = KV_CU_POSIX_FD,
		.location = {.type = KV_CU_DEVICE, .id = cuda->device},
	};
}

static int start_failed(struct cuda *cuda, const char *what, kv_cu_result r)
{
	cuda->result = r;
	snprintf(cuda->error, sizeof(cuda->error), "%s: CUDA result %d (%s)", what, r,
		 kv_cuda_reason(r));
	return -EIO;
}

static int find_device(struct cuda *cuda)
{
	kv_cu_result r;
	u8 uuid[16];
	int nr = 0;

	r = cuda->cu.device_count(&nr);
	if (r)
		return start_failed(cuda, "cuDeviceGetCount", r);
	if (cuda->any_gpu && nr != 1) {
		snprintf(cuda->error, sizeof(cuda->error),
			 "gpu: no UUID given and %d devices are here: one kvmd serves "
			 "one GPU, --gpu names it",
			 nr);
		return -ENODEV;
	}
	for (int i = 0; i < nr; i++) {
		r = cuda->cu.device_get(&cuda->device, i);
		if (!r)
			r = cuda->cu.device_uuid(uuid, cuda->device);
		if (r)
			return start_failed(cuda, "cuDeviceGetUuid", r);
		if (cuda->any_gpu || !memcmp(uuid, cuda->uuid, sizeof(uuid))) {
			memcpy(cuda->info.uuid, uuid, sizeof(uuid));
			return 0;
		}
	}
	snprintf(cuda->error, sizeof(cuda->error),
		 "gpu: none of %d devices has this UUID", nr);
	return -ENODEV;
}

static int read_info(struct cuda *cuda)
{
	size_t bytes = 0;
	kv_cu_result r;

	r = cuda->cu.device_bytes(&bytes, cuda->device);
	if (r)
		return start_failed(cuda, "cuDeviceTotalMem", r);
	cuda->info.total_bytes = bytes;
	r = cuda->cu.device_name(cuda->info.name, sizeof(cuda->info.name) - 1,
				 cuda->device);
	if (r)
		return start_failed(cuda, "cuDeviceGetName", r);
	r = cuda->cu.driver_version(&cuda->info.driver_version);
	if (r)
		return start_failed(cuda, "cuDriverGetVersion", r);
	cuda->capacity_bytes =
		cuda->want_bytes ? cuda->want_bytes : bytes / 100 * KVD_CUDA_SHARE;
	cuda->capacity_bytes &= ~(EXTENT_ALIGN_BYTES - 1);
	return 0;
}

/* Said here in one line, and not found out at the first export (cases O17). */
static int check_abilities(struct cuda *cuda)
{
	static const struct {
		int attr;
		const char *name;
	} needed[] = {
		{KV_CU_ATTR_VMM, "virtual memory management"},
		{KV_CU_ATTR_POSIX_FD, "export of memory as a file descriptor"},
	};
	kv_cu_result r;
	int value;

	for (size_t i = 0; i < KV_ARRAY_SIZE(needed); i++) {
		value = 0;
		r = cuda->cu.device_attr(&value, needed[i].attr, cuda->device);
		if (r)
			return start_failed(cuda, "cuDeviceGetAttribute", r);
		if (value || KV_MUTANT(ability_unasked))
			continue;
		snprintf(cuda->error, sizeof(cuda->error), "%s lacks %s", cuda->info.name,
			 needed[i].name);
		cuda->no_export = true;
		return -EOPNOTSUPP;
	}
	return 0;
}

static int start(struct cuda *cuda)
{
	struct kv_cu_alloc_prop prop;
	size_t granularity = 0;
	kv_cu_result r = cuda->cu.init(0);
	int err;

	if (r)
		return start_failed(cuda, "cuInit", r);
	err = find_device(cuda);
	if (!err)
		err = read_info(cuda);
	if (!err && !cuda->is_legacy)
		err = check_abilities(cuda);
	if (KV_MUTANT(context_in_kvmd)) {
		kv_cu_ctx ctx;

		cuda->cu.ctx_retain(&ctx, cuda->device);
	}
	if (err || cuda->is_legacy)
		return err;
	prop = alloc_prop(cuda);
	r = cuda->cu.mem_granularity(&granularity, &prop, KV_CU_RECOMMENDED);
	if (r)
		return start_failed(cuda, "cuMemGetAllocationGranularity", r);
	if (!granularity || EXTENT_ALIGN_BYTES % granularity) {
		snprintf(cuda->error, sizeof(cuda->error),
			 "granularity %zu does not divide 2 MiB", granularity);
		return -EOPNOTSUPP;
	}
	return 0;
}

static void *start_thread(void *arg)
{
	struct cuda *cuda = arg;
	int r = start(cuda);

	__atomic_store_n(&cuda->state, r ? KVD_CUDA_FAILED : KVD_CUDA_READY,
			 __ATOMIC_RELEASE);
	eventfd_write(cuda->event_fd, 1);
	return NULL;
}

/* The driver does not set O_CLOEXEC on what it exports. */
static int export_fd(struct cuda *cuda, kv_cu_handle handle, int *ret_fd)
{
	kv_cu_result r;
	int fd = -1;

	r = kvd_fault(KVD_FAULT_extent_map)
		    ? 2
		    : cuda->cu.mem_export(&fd, handle, KV_CU_POSIX_FD, 0);
	if (r)
		return kv_cuda_errno(r);
	if (fcntl(fd, F_SETFD, FD_CLOEXEC)) {
		close(fd);
		return -EMFILE;
	}
	*ret_fd = fd;
	return 0;
}

static int cuda_extent_alloc(struct kvd_backend *be, u64 size_bytes,
			     struct kvd_extent_handle *ret_handle)
{
	struct cuda *cuda = cuda_of(be);
	struct kv_cu_alloc_prop prop;
	kv_cu_handle handle;
	kv_cu_result cr;
	int fd, r;

	kv_assert(size_bytes && size_bytes % EXTENT_ALIGN_BYTES == 0);
	kv_assert(size_bytes <= EXTENT_MAX_BYTES || cuda->is_legacy);
	switch (kvd_cuda_state(be)) {
	case KVD_CUDA_STARTING:
		return -EAGAIN;
	case KVD_CUDA_FAILED:
		return -EIO;
	case KVD_CUDA_READY:
		break;
	}
	if (cuda->used_bytes + size_bytes > cuda->capacity_bytes)
		return -ENOMEM;
	if (cuda->is_legacy) {
		r = kvd_legacy_alloc(&cuda->legacy, size_bytes, ret_handle);
		if (!r)
			cuda->used_bytes += size_bytes;
		return r;
	}
	prop = alloc_prop(cuda);
	cr = kvd_fault(KVD_FAULT_extent_alloc)
		     ? 2
		     : cuda->cu.mem_create(&handle, size_bytes, &prop, 0);
	if (cr)
		return kv_cuda_errno(cr);
	r = export_fd(cuda, handle, &fd);
	/* On success the fd holds the memory; on failure this was the last reference. */
	cr = cuda->cu.mem_release(handle);
	if (r)
		return r;
	if (cr) {
		close(fd);
		return kv_cuda_errno(cr);
	}
	cuda->used_bytes += size_bytes;
	cuda->nr_made++;
	*ret_handle = (struct kvd_extent_handle){.fd = fd, .cookie = cuda->nr_made};
	return 0;
}

/* The descriptor alone holds the memory, also before the driver has started. */
static int cuda_extent_adopt(struct kvd_backend *be, int fd, u64 size_bytes,
			     struct kvd_extent_handle *ret_handle)
{
	struct cuda *cuda = cuda_of(be);

	cuda->used_bytes += size_bytes;
	cuda->nr_made++;
	*ret_handle = (struct kvd_extent_handle){.fd = fd, .cookie = cuda->nr_made};
	return 0;
}

static void cuda_extent_free(struct kvd_backend *be, struct kvd_extent_handle *handle,
			     u64 size_bytes)
{
	struct cuda *cuda = cuda_of(be);

	kv_assert(handle->fd >= 0 && cuda->used_bytes >= size_bytes);
	cuda->used_bytes -= size_bytes;
	if (cuda->is_legacy) {
		kvd_legacy_free(&cuda->legacy, handle);
		return;
	}
	close(handle->fd);
	handle->fd = -1;
}

static void cuda_limits(struct kvd_backend *be, struct kvd_backend_limits *ret_limits)
{
	const struct cuda *cuda = cuda_of(be);
	u64 least = cuda->small_extents ? EXTENT_ALIGN_BYTES : EXTENT_MIN_BYTES;
	u64 capacity = kvd_cuda_state(be) == KVD_CUDA_READY ? cuda->capacity_bytes
							    : cuda->want_bytes;
	u64 most = EXTENT_MAX_BYTES, fixed = cuda->extent_bytes;

	/* In this range there is an extent of a power of two pages that wastes little. */
	if (cuda->is_legacy) {
		most = capacity;
		least = KV_MAX(least, capacity / 2 & ~(EXTENT_ALIGN_BYTES - 1));
	}
	*ret_limits = (struct kvd_backend_limits){
		.kind = cuda->is_legacy ? KV_BACKEND_CUDA_LEGACY : KV_BACKEND_CUDA,
		.extent_min_bytes = fixed ? fixed : least,
		.extent_max_bytes = fixed ? fixed : most,
		.extent_align_bytes = EXTENT_ALIGN_BYTES,
		.capacity_bytes = capacity,
	};
}

static const struct kvd_backend_ops cuda_ops = {
	.name = "cuda",
	.extent_alloc = cuda_extent_alloc,
	.extent_free = cuda_extent_free,
	.extent_adopt = cuda_extent_adopt,
	.limits = cuda_limits,
};

static const struct kvd_backend_ops legacy_ops = {
	.name = "cuda-legacy",
	.extent_alloc = cuda_extent_alloc,
	.extent_free = cuda_extent_free,
	.limits = cuda_limits,
};

int kvd_cuda_probe(char *error, size_t error_bytes)
{
	struct kv_cuda_syms cu;
	int r = kv_cuda_load(&cu, error, error_bytes);

	if (!r)
		dlclose(cu.lib);
	return r;
}

int kvd_cuda_create(const struct kvd_cuda_params *params,
		    struct kvd_backend **ret_backend)
{
	struct cuda *cuda = calloc(1, sizeof(*cuda));
	int r;

	if (!cuda)
		return -ENOMEM;
	cuda->be.ops = params->legacy ? &legacy_ops : &cuda_ops;
	cuda->is_legacy = params->legacy;
	cuda->want_bytes = params->capacity_bytes & ~(EXTENT_ALIGN_BYTES - 1);
	cuda->extent_bytes = params->extent_bytes;
	cuda->small_extents = params->small_extents;
	cuda->any_gpu = !params->uuid;
	if (params->uuid)
		memcpy(cuda->uuid, params->uuid, sizeof(cuda->uuid));
	cuda->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	r = cuda->event_fd < 0 ? -errno : 0;
	if (r)
		goto free_cuda;
	r = kv_cuda_load(&cuda->cu, NULL, 0);
	if (r)
		goto close_event;
	r = -pthread_create(&cuda->thread, NULL, start_thread, cuda);
	if (r)
		goto close_lib;
	kvd_backend_check(&cuda->be);
	*ret_backend = &cuda->be;
	return 0;
close_lib:
	dlclose(cuda->cu.lib);
close_event:
	close(cuda->event_fd);
free_cuda:
	free(cuda);
	return r;
}

void kvd_cuda_destroy(struct kvd_backend *backend)
{
	struct cuda *cuda;

	if (!backend)
		return;
	cuda = cuda_of(backend);
	kv_assert(!cuda->used_bytes);
	/* cuInit takes 0.2 s, and with a driver that hangs all the time there is. */
	if (kv_join_within(cuda->thread, END_S))
		return;
	kvd_legacy_fini(&cuda->legacy);
	close(cuda->event_fd);
	/* The driver stays loaded: it has threads of its own after cuInit. */
	free(cuda);
}

int kvd_cuda_event_fd(const struct kvd_backend *backend)
{
	return cuda_of(backend)->event_fd;
}

enum kvd_cuda_state kvd_cuda_state(const struct kvd_backend *backend)
{
	return (enum kvd_cuda_state)__atomic_load_n(&cuda_of(backend)->state,
						    __ATOMIC_ACQUIRE);
}

const struct kvd_cuda_info *kvd_cuda_get_info(const struct kvd_backend *backend)
{
	kv_assert(kvd_cuda_state(backend) == KVD_CUDA_READY);
	return &cuda_of(backend)->info;
}

const char *kvd_cuda_error(const struct kvd_backend *backend)
{
	return kvd_cuda_state(backend) == KVD_CUDA_FAILED ? cuda_of(backend)->error : "";
}

bool kvd_cuda_no_device(const struct kvd_backend *backend)
{
	return kvd_cuda_state(backend) == KVD_CUDA_FAILED &&
	       kv_cuda_errno(cuda_of(backend)->result) == -ENODEV;
}

bool kvd_cuda_no_export(const struct kvd_backend *backend)
{
	return kvd_cuda_state(backend) == KVD_CUDA_FAILED && cuda_of(backend)->no_export;
}

void kvd_cuda_legacy_source(struct kvd_backend *backend,
			    const struct kvd_legacy_source *source)
{
	cuda_of(backend)->legacy.source = *source;
}

void kvd_cuda_legacy_alloced(struct kvd_backend *backend, u64 id, int result,
			     const u8 *handle)
{
	struct cuda *cuda = cuda_of(backend);

	kvd_legacy_alloced(&cuda->legacy, cuda->info.uuid, id, result, handle);
}

u64 kvd_cuda_used(const struct kvd_backend *backend)
{
	return cuda_of(backend)->used_bytes;
}
