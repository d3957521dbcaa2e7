/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cuda backend against the fake driver: start-up in its three states, failures at
 * each step, GPUs matched by UUID. No GPU is needed.
 */
#include "tests/kvt.h"
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include "base/cuda_syms.h"
#include "base/nvml_syms.h"
#include "kvmd/backend/cuda.h"
#include "kvmd/backend/nvml.h"
#include "tests/fake/fake.h"

#ifdef CONFIG_CUDA
/* our copies of the driver's structs against the real ones */
#include <cuda.h>
KV_STATIC_ASSERT(sizeof(struct kv_cu_alloc_prop) == sizeof(CUmemAllocationProp), "prop");
KV_STATIC_ASSERT(offsetof(struct kv_cu_alloc_prop, win32) ==
			 offsetof(CUmemAllocationProp, win32HandleMetaData),
		 "prop");
KV_STATIC_ASSERT(sizeof(struct kv_cu_access) == sizeof(CUmemAccessDesc), "access");
KV_STATIC_ASSERT(sizeof(struct kv_cu_location) == sizeof(CUmemLocation), "location");
KV_STATIC_ASSERT(sizeof(struct kv_cu_ipc_handle) == sizeof(CUipcMemHandle), "ipc handle");
KV_STATIC_ASSERT(KV_CU_ATTR_COMPUTE_MODE == CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, "attr");
KV_STATIC_ASSERT(KV_CU_ATTR_VMM ==
			 CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
		 "attr");
KV_STATIC_ASSERT(KV_CU_ATTR_POSIX_FD ==
			 CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
		 "attr");
KV_STATIC_ASSERT(KV_CU_IPC_LAZY == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, "ipc flag");
KV_STATIC_ASSERT(KV_CU_STREAM_NON_BLOCKING == CU_STREAM_NON_BLOCKING, "stream flag");
KV_STATIC_ASSERT(KV_CU_EVENT_DISABLE_TIMING == CU_EVENT_DISABLE_TIMING, "event flag");
KV_STATIC_ASSERT(KV_CU_NOT_READY == CUDA_ERROR_NOT_READY, "result");
KV_STATIC_ASSERT(KV_CU_NOT_SUPPORTED == CUDA_ERROR_NOT_SUPPORTED, "result");
#if CUDA_VERSION >= 12080
KV_STATIC_ASSERT(sizeof(struct kv_cu_copy_attr) == sizeof(CUmemcpyAttributes), "copy");
KV_STATIC_ASSERT(offsetof(struct kv_cu_copy_attr, flags) ==
			 offsetof(CUmemcpyAttributes, flags),
		 "copy");
KV_STATIC_ASSERT(KV_CU_ORDER_STREAM == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, "order");
KV_STATIC_ASSERT(KV_CU_COPY_OVERLAP == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE,
		 "flag");
#endif
KV_STATIC_ASSERT(sizeof(((struct kv_legacy_extent *)0)->handle) == sizeof(CUipcMemHandle),
		 "handle in the extent's file");
KV_STATIC_ASSERT(KV_CU_RECOMMENDED == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, "option");
#if __has_include(<nvml.h>)
#include <nvml.h>
KV_STATIC_ASSERT(sizeof(struct kv_nv_process) == sizeof(nvmlProcessInfo_t), "process");
KV_STATIC_ASSERT(offsetof(struct kv_nv_process, used_bytes) ==
			 offsetof(nvmlProcessInfo_t, usedGpuMemory),
		 "process");
KV_STATIC_ASSERT(KV_NV_SMALL == NVML_ERROR_INSUFFICIENT_SIZE, "result");
#endif
#endif

#define MIB (1ull << 20)

static void use_fake(void)
{
	KVT_EXPECT_EQ(fake_use("KV_CUDA_LIB", "libcuda.so"), 0);
}

static unsigned open_handles(void)
{
	struct fake_cuda_counts n;

	KVT_EXPECT_EQ(fake_counts(&n), 0);
	return n.handles;
}

static int open_fds(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;

	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static int make(const u8 *uuid, u64 bytes, struct kvd_backend **ret)
{
	struct kvd_cuda_params p = {.uuid = uuid, .capacity_bytes = bytes};

	return kvd_cuda_create(&p, ret);
}

static enum kvd_cuda_state wait_started(struct kvd_backend *be)
{
	for (int i = 0; i < 5000 && kvd_cuda_state(be) == KVD_CUDA_STARTING; i++)
		usleep(1000);
	return kvd_cuda_state(be);
}

KVT_TEST(no_driver_is_enoent)
{
	struct kvd_backend *be = NULL;
	char error[200] = "";

	setenv("KV_CUDA_LIB", "/nonexistent/libcuda.so.1", 1);
	KVT_EXPECT_EQ(kvd_cuda_probe(error, sizeof(error)), -ENOENT);
	KVT_EXPECT_HAS(error, "libcuda");
	KVT_EXPECT_EQ(make(NULL, 64 * MIB, &be), -ENOENT);
	KVT_EXPECT(!be);
}

KVT_TEST(driver_without_an_entry_is_enosys)
{
	char error[200] = "";

	/* a library that is no CUDA driver */
	setenv("KV_CUDA_LIB", "libm.so.6", 1);
	KVT_EXPECT_EQ(kvd_cuda_probe(error, sizeof(error)), -ENOSYS);
	KVT_EXPECT_HAS(error, "cuInit");
}

KVT_TEST(driver_without_device_fails_visibly)
{
	struct kvd_extent_handle h;
	struct kvd_backend *be;

	use_fake();
	setenv("FAKE_CUDA_DEVICES", "0", 1);
	KVT_EXPECT_EQ(make(NULL, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_FAILED);
	KVT_EXPECT_HAS(kvd_cuda_error(be), "cuInit");
	KVT_EXPECT_EQ(be->ops->extent_alloc(be, 64 * MIB, &h), -EIO);
	kvd_cuda_destroy(be);
}

KVT_TEST(growth_is_pending_until_the_driver_is_up)
{
	struct kvd_extent_handle h;
	struct kvd_backend *be;

	use_fake();
	setenv("FAKE_CUDA_INIT_MS", "200", 1);
	KVT_EXPECT_EQ(make(NULL, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(be->ops->extent_alloc(be, 64 * MIB, &h), -EAGAIN);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_READY);
	KVT_EXPECT_EQ(be->ops->extent_alloc(be, 64 * MIB, &h), 0);
	be->ops->extent_free(be, &h, 64 * MIB);
	kvd_cuda_destroy(be);
}

/* Without a size the device is asked, and the size is known when it is up. */
KVT_TEST(capacity_is_a_share_of_the_device)
{
	struct kvd_backend_limits limits;
	struct kvd_backend *be;

	use_fake();
	setenv("FAKE_CUDA_INIT_MS", "50", 1);
	KVT_EXPECT_EQ(make(NULL, 0, &be), 0);
	be->ops->limits(be, &limits);
	KVT_EXPECT_EQ(limits.capacity_bytes, 0);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_READY);
	be->ops->limits(be, &limits);
	KVT_EXPECT_EQ(limits.capacity_bytes, (8192 * MIB / 100 * 90) & ~(2 * MIB - 1));
	KVT_EXPECT_EQ(kvd_cuda_get_info(be)->total_bytes, 8192 * MIB);
	kvd_cuda_destroy(be);
}

KVT_TEST(extent_fd_is_cloexec_and_the_only_reference)
{
	struct kvd_extent_handle h;
	struct kvd_backend *be;
	int fds;

	use_fake();
	KVT_EXPECT_EQ(make(NULL, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_READY);
	fds = open_fds();
	KVT_EXPECT_EQ(be->ops->extent_alloc(be, 64 * MIB, &h), 0);
	KVT_EXPECT_EQ(open_handles(), 0);
	KVT_EXPECT_EQ(open_fds(), fds + 1);
	KVT_EXPECT(fcntl(h.fd, F_GETFD) & FD_CLOEXEC);
	KVT_EXPECT_EQ(kvd_cuda_used(be), 64 * MIB);
	be->ops->extent_free(be, &h, 64 * MIB);
	KVT_EXPECT_EQ(open_fds(), fds);
	KVT_EXPECT_EQ(kvd_cuda_used(be), 0);
	kvd_cuda_destroy(be);
}

/* cases O15: whatever step fails, nothing of the attempt is left and the retry succeeds.
 */
KVT_TEST(o15_half_made_extent_is_undone)
{
	static const char *const steps[] = {
		"cuMemCreate:1", "cuMemExportToShareableHandle:1", "cuMemRelease:1"};

	use_fake();
	for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
		struct kvd_extent_handle h = {.fd = -1};
		struct kvd_backend *be;
		pid_t pid = fork(); /* the fake counts calls per process */
		int status, fds;

		if (pid) {
			waitpid(pid, &status, 0);
			KVT_EXPECT_EQ(status, 0);
			continue;
		}
		setenv("FAKE_CUDA_FAIL", steps[i], 1);
		KVT_EXPECT_EQ(make(NULL, 128 * MIB, &be), 0);
		KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_READY);
		fds = open_fds();
		KVT_EXPECT_EQ(be->ops->extent_alloc(be, 64 * MIB, &h), -ENOMEM);
		KVT_EXPECT_EQ(kvd_cuda_used(be), 0);
		/* a failed release is the driver's leak, not ours: the fd is closed */
		if (i < 2) {
			KVT_EXPECT_EQ(open_handles(), 0);
			KVT_EXPECT_EQ(open_fds(), fds);
		}
		KVT_EXPECT_EQ(h.fd, -1);
		KVT_EXPECT_EQ(be->ops->extent_alloc(be, 64 * MIB, &h), 0);
		be->ops->extent_free(be, &h, 64 * MIB);
		kvd_cuda_destroy(be);
		_exit(0);
	}
}

/* cases O10: a restricted process numbers its devices anew; only the UUID says which is
 * which. */
KVT_TEST(o10_gpu_is_matched_by_uuid)
{
	struct kvd_backend *be;
	u8 want[16], got[16];

	use_fake();
	setenv("FAKE_CUDA_DEVICES", "4", 1);
	setenv("FAKE_CUDA_VISIBLE", "2,3", 1);
	memset(want, 0x12, sizeof(want)); /* physical 2, ordinal 0 here */
	KVT_EXPECT_EQ(make(want, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_READY);
	memcpy(got, kvd_cuda_get_info(be)->uuid, sizeof(got));
	KVT_EXPECT(!memcmp(got, want, sizeof(got)));
	kvd_cuda_destroy(be);

	memset(want, 0x10, sizeof(want)); /* not visible */
	KVT_EXPECT_EQ(make(want, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_FAILED);
	KVT_EXPECT_HAS(kvd_cuda_error(be), "UUID");
	kvd_cuda_destroy(be);
}

/* cases O17: mscclpp#467. What the device cannot do is one line at the start. */
KVT_TEST(o17_missing_ability_is_named_at_the_start)
{
	struct kvd_extent_handle h;
	struct kvd_backend *be;

	use_fake();
	setenv("FAKE_CUDA_LACKS", "103", 1);
	KVT_EXPECT_EQ(make(NULL, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_FAILED);
	KVT_EXPECT_HAS(kvd_cuda_error(be), "file descriptor");
	KVT_EXPECT_EQ(be->ops->extent_alloc(be, 64 * MIB, &h), -EIO);
	kvd_cuda_destroy(be);
	setenv("FAKE_CUDA_LACKS", "102", 1);
	KVT_EXPECT_EQ(make(NULL, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_FAILED);
	KVT_EXPECT_HAS(kvd_cuda_error(be), "virtual memory");
	kvd_cuda_destroy(be);
}

KVT_TEST(two_gpus_need_a_uuid)
{
	struct kvd_backend *be;

	use_fake();
	setenv("FAKE_CUDA_DEVICES", "2", 1);
	KVT_EXPECT_EQ(make(NULL, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_FAILED);
	KVT_EXPECT_HAS(kvd_cuda_error(be), "2 devices");
	kvd_cuda_destroy(be);
}

/* facts F-keep: the exported fd alone keeps the bytes, and an importer sees them. */
KVT_TEST(imported_extent_shows_the_bytes)
{
	struct kv_cuda_syms cu;
	struct kv_cu_access rw = {{KV_CU_DEVICE, 0}, KV_CU_READWRITE};
	struct kvd_extent_handle h;
	struct kvd_backend *be;
	kv_cu_handle imported;
	kv_cu_ctx ctx;
	kv_cu_ptr va;
	int fd2;

	use_fake();
	KVT_EXPECT_EQ(make(NULL, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(wait_started(be), KVD_CUDA_READY);
	KVT_EXPECT_EQ(be->ops->extent_alloc(be, 64 * MIB, &h), 0);
	KVT_EXPECT_EQ(pwrite(h.fd, "kvmd", 4, 4096), 4);
	KVT_EXPECT_EQ(kv_cuda_load(&cu, NULL, 0), 0);
	KVT_EXPECT_EQ(cu.mem_import(&imported, (void *)(intptr_t)h.fd, KV_CU_POSIX_FD),
		      0);
	KVT_EXPECT_EQ(cu.mem_export(&fd2, imported, KV_CU_POSIX_FD, 0), 1); /* F-reexp */
	KVT_EXPECT_EQ(cu.ctx_retain(&ctx, 0), 0);
	KVT_EXPECT_EQ(cu.ctx_push(ctx), 0);
	KVT_EXPECT_EQ(cu.va_reserve(&va, 128 * MIB, 0, 0, 0), 0);
	KVT_EXPECT_EQ(cu.mem_map(va + 64 * MIB, 64 * MIB, 0, imported, 0), 0);
	KVT_EXPECT_EQ(cu.mem_access(va + 64 * MIB, 64 * MIB, &rw, 1), 0);
	be->ops->extent_free(be, &h, 64 * MIB);
	KVT_EXPECT(!memcmp((char *)(uintptr_t)va + 64 * MIB + 4096, "kvmd", 4));
	kvd_cuda_destroy(be);
}

/* Neither cuInit nor NVML comes back from a driver that is sick: kvmd ends all the same. */
KVT_TEST(driver_that_hangs_does_not_hold_up_the_end)
{
	struct kvd_backend *be;
	struct kvd_nvml *nvml;

	use_fake();
	setenv("FAKE_CUDA_INIT_MS", "600000", 1);
	KVT_EXPECT_EQ(make(NULL, 128 * MIB, &be), 0);
	KVT_EXPECT_EQ(kvd_cuda_state(be), KVD_CUDA_STARTING);
	kvd_cuda_destroy(be);

	KVT_EXPECT_EQ(fake_use("KV_NVML_LIB", "libnvml.so"), 0);
	setenv("FAKE_NVML_INIT_MS", "600000", 1);
	KVT_EXPECT_EQ(kvd_nvml_create("GPU-10101010-1010-1010-1010-101010101010", &nvml),
		      0);
	KVT_EXPECT_EQ(kvd_nvml_ask(nvml), 1);
	usleep(50000); /* it is asking */
	kvd_nvml_destroy(nvml);
}

KVT_MAIN()
