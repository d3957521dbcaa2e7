/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmctl doctor over the fake driver and the fake NVML: every finding about a GPU in both
 * of its states. What it says of this machine's limits is not looked at.
 */
#include "tests/ipc/common.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#define GPU_0 "GPU-10101010-1010-1010-1010-101010101010"

static struct eng_private_kvmd kvmd;
static char out[64 << 10];
static int exit_code;

static void doctor(const char *args)
{
	char path[512], cmd[800];
	size_t used = 0, got;
	ssize_t n;
	FILE *in;
	int status;

	n = readlink("/proc/self/exe", path, sizeof(path) - 64);
	KVT_EXPECT(n > 0);
	path[n] = 0;
	for (int i = 0; i < 3; i++) /* build/tests/ipc/cuda_doctor -> build */
		*strrchr(path, '/') = 0;
	snprintf(cmd, sizeof(cmd), "%s/kvmctl doctor %s 2>&1", path, args);
	in = popen(cmd, "r");
	KVT_EXPECT(in);
	while ((got = fread(out + used, 1, sizeof(out) - 1 - used, in)) > 0)
		used += got;
	out[used] = 0;
	status = pclose(in);
	KVT_EXPECT(WIFEXITED(status));
	exit_code = WEXITSTATUS(status);
	if (exit_code != 0 && exit_code != 7)
		KVT_FAIL("kvmctl doctor: exit %d: %s", exit_code, out);
}

static void doctor_json(void)
{
	doctor("--json --socket /nonexistent/admin.sock");
	KVT_EXPECT_HAS(out, "\"schema\":\"kvmctl.doctor/1\"");
}

/* The finding @check is in @state, and says and advises these. */
static void expect(const char *check, const char *state, const char *text)
{
	char head[128], *at, *end, one[2048];

	snprintf(head, sizeof(head), "{\"check\":\"%s\",\"state\":\"%s\"", check, state);
	at = strstr(out, head);
	if (!at)
		KVT_FAIL("no %s in %s", head, out);
	end = strchr(at, '}');
	KVT_EXPECT(end && (size_t)(end - at) < sizeof(one));
	memcpy(one, at, (size_t)(end - at));
	one[end - at] = 0;
	KVT_EXPECT_HAS(one, text);
	if (!strcmp(state, "warn") || !strcmp(state, "fail")) {
		KVT_EXPECT(!strstr(one, "\"todo\":\"\""));
		KVT_EXPECT_EQ(exit_code, 7);
	}
}

KVT_TEST(good_gpu_passes_every_probe)
{
	ipc_use_fake_cuda();
	doctor_json();
	expect("driver", "ok", "CUDA 13.0");
	expect("device", "ok", GPU_0);
	expect("vmm", "ok", "written by one process");
	expect("scrub", "ok", "zeroed");
	expect("legacy", "ok", "work");
	expect("nvml-pids", "ok", "lists");
	expect("persistence", "ok", "on");
	expect("mig", "ok", "off");
	expect("compute-mode", "ok", "default");
	KVT_EXPECT_HAS(out, "\"devices\":[{\"uuid\":\"" GPU_0 "\"");
	doctor("--socket /nonexistent/admin.sock");
	KVT_EXPECT_HAS(out, "ok    vmm");
	KVT_EXPECT_EQ(exit_code, strstr(out, "all is well") ? 0 : 7);
}

KVT_TEST(old_bytes_in_fresh_memory_fail_the_scrub_probe)
{
	ipc_use_fake_cuda();
	setenv("FAKE_CUDA_NO_SCRUB", "1", 1);
	doctor_json();
	expect("vmm", "ok", "");
	expect("scrub", "fail", "each other's pages");
}

KVT_TEST(failing_calls_are_named)
{
	ipc_use_fake_cuda();
	setenv("FAKE_CUDA_FAIL", "cuMemExportToShareableHandle:1", 1);
	doctor_json();
	expect("vmm", "fail", "cuMemExportToShareableHandle");
	expect("scrub", "skip", "vmm");
	setenv("FAKE_CUDA_FAIL", "cuMemImportFromShareableHandle:1", 1);
	doctor_json();
	expect("vmm", "fail", "cuMemImportFromShareableHandle");
	setenv("FAKE_CUDA_FAIL", "cuIpcOpenMemHandle_v2:1", 1);
	doctor_json();
	expect("vmm", "ok", "");
	expect("legacy", "ok", "cuIpcOpenMemHandle");
	setenv("FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain:1", 1);
	doctor_json();
	expect("vmm", "fail", "no context");
	expect("scrub", "skip", "");
}

KVT_TEST(modes_of_the_device)
{
	ipc_use_fake_cuda();
	setenv("FAKE_NVML_PERSISTENCE", "0", 1);
	setenv("FAKE_NVML_MIG", "1", 1);
	setenv("FAKE_CUDA_MODE", "3", 1);
	doctor_json();
	expect("persistence", "warn", "nvidia-smi -pm 1");
	expect("mig", "warn", "-mig 0");
	expect("compute-mode", "warn", "exclusive");
	setenv("FAKE_CUDA_MODE", "2", 1);
	doctor_json();
	expect("compute-mode", "fail", "prohibited");
}

KVT_TEST(nvml_that_is_of_no_use)
{
	ipc_use_fake_cuda();
	setenv("FAKE_NVML_BLIND", "1", 1);
	doctor_json();
	expect("nvml-pids", "warn", "pid namespace");
	setenv("FAKE_NVML_FAIL", "nvmlInit_v2:9", 1);
	doctor_json();
	expect("nvml", "warn", "nvmlInit");
	setenv("KV_NVML_LIB", "/nonexistent/libnvml.so", 1);
	doctor_json();
	expect("nvml", "warn", "libnvml.so");
}

KVT_TEST(mps_is_detected)
{
	char dir[] = "/tmp/kvmd-mps-XXXXXX", path[64];
	int fd;

	ipc_use_fake_cuda();
	KVT_EXPECT(mkdtemp(dir));
	setenv("CUDA_MPS_PIPE_DIRECTORY", dir, 1);
	doctor_json();
	expect("mps", "ok", "not running");
	snprintf(path, sizeof(path), "%s/control", dir);
	fd = creat(path, 0600);
	KVT_EXPECT(fd >= 0);
	close(fd);
	doctor_json();
	expect("mps", "warn", "fail together");
	unlink(path);
	rmdir(dir);
}

KVT_TEST(driver_states)
{
	ipc_use_fake_cuda();
	setenv("FAKE_CUDA_INIT", "803", 1);
	doctor_json();
	expect("driver", "fail", "versions differ");
	unsetenv("FAKE_CUDA_INIT");
	setenv("FAKE_CUDA_DEVICES", "3", 1);
	doctor_json();
	expect("devices", "ok", "--gpu");
	setenv("KV_CUDA_LIB", "libm.so.6", 1);
	doctor_json();
	expect("driver", "fail", "cuInit");
}

/* cases O06: ucx#11288. A probe leaves nothing behind: no process, no memory. */
KVT_TEST(o06_probe_leaves_nothing)
{
	ipc_use_fake_cuda();
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	doctor_json();
	KVT_EXPECT_EQ(waitpid(-1, NULL, WNOHANG), -1);
	KVT_EXPECT_EQ(errno, ECHILD);
}

KVT_TEST(running_kvmd_is_looked_at)
{
	char args[200];

	ipc_need_fake();
	setenv("KVT_BACKEND", "cuda", 1);
	ipc_start(&kvmd, NULL);
	expect_within(strstr(ipc_admin(&kvmd, "{\"op\":\"status\"}"), "ready"), 3000);
	snprintf(args, sizeof(args), "--json --socket %s", kvmd.admin_path);
	doctor(args);
	KVT_EXPECT_HAS(out, "cuda backend");
	KVT_EXPECT_HAS(out, "kvmd's limit");
	ipc_stop(&kvmd);
	setenv("FAKE_CUDA_INIT", "999", 1);
	ipc_start(&kvmd, NULL);
	snprintf(args, sizeof(args), "--json --socket %s", kvmd.admin_path);
	doctor(args);
	expect("kvmd", "ok", "cuda backend");
	expect("kvmd", "warn", "GPU_FAILED");
	ipc_stop(&kvmd);
}

KVT_MAIN()
