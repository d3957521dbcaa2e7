/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd on the cuda backend, mostly over the fake driver: which memory it chooses and says so,
 * what waits for cuInit, GPUs by UUID. A raw client looks at each message.
 */
#include "tests/ipc/common.h"

#include "base/nvml_syms.h"

static struct eng_private_kvmd kvmd;
static struct ipc_raw raw;

#define GPU_0 "GPU-10101010-1010-1010-1010-101010101010"
#define GPU_1 "GPU-11111111-1111-1111-1111-111111111111"

static void start_cuda(const char *const *args)
{
	ipc_need_fake();
	setenv("KVT_BACKEND", "cuda", 1);
	ipc_start(&kvmd, args);
}

/* A kvmd with exactly these arguments. */
static void start_plain(const char *const *args)
{
	char error[512];

	if (eng_private_kvmd_start(args, &kvmd, error, sizeof(error)))
		KVT_FAIL("%s", error);
}

static void hello(struct ipc_raw *r)
{
	struct kv_msg_hello msg = raw_hello_msg();

	r->sock = raw_connect(&kvmd);
	raw_send(r, &msg, sizeof(msg), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(r, 5000), KV_MSG_HELLO_REPLY);
	KVT_EXPECT_EQ(r->in.hello.result, 0);
}

static void send_open(struct ipc_raw *r, int uuid_byte)
{
	struct kv_msg_pool_open msg = {.msg = {.magic = KV_MSG_MAGIC,
					       .type = KV_MSG_POOL_OPEN,
					       .size_bytes = sizeof(msg),
					       .sequence = 7},
				       .layout = ipc_layout()};

	memset(msg.gpu_uuid, uuid_byte, sizeof(msg.gpu_uuid));
	raw_send(r, &msg, sizeof(msg), NULL, 0);
}

static int open_pool(struct ipc_raw *r, int uuid_byte)
{
	send_open(r, uuid_byte);
	KVT_EXPECT_EQ(raw_recv(r, 5000), KV_MSG_POOL_REPLY);
	KVT_EXPECT_EQ(r->in.msg.sequence, 7);
	return r->in.pool.result;
}

static void expect_status(const char *part, bool there)
{
	char *status = ipc_admin(&kvmd, "{\"op\":\"status\"}");

	if (!strstr(status, part) == there)
		KVT_FAIL("status %s \"%s\": %s", there ? "lacks" : "has", part, status);
	free(status);
}

static bool status_has(const char *part)
{
	char *status = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	bool has = strstr(status, part) != NULL;

	free(status);
	return has;
}

/* ---------------------------------------------------------------- GPUs by UUID */

/* cases O10: nccl#1647, #1948. The refusal names the GPU and comes before any fd. */
KVT_TEST(o10_unknown_gpu_is_refused_by_uuid)
{
	start_cuda(NULL);
	hello(&raw);
	KVT_EXPECT_EQ(open_pool(&raw, 0x77), -ENODEV);
	KVT_EXPECT_EQ(raw.nr_fds, 0);
	KVT_EXPECT_HAS(raw.in.pool.error, "GPU-77777777-7777-7777-7777-777777777777");
	KVT_EXPECT_EQ(raw_recv(&raw, 50), -1); /* and no extent follows */
	KVT_EXPECT_EQ(open_pool(&raw, 0x10), 0);
	KVT_EXPECT_EQ(raw.nr_fds, 1);
	KVT_EXPECT_EQ(raw.in.pool.backend, KV_BACKEND_CUDA);
	for (int i = 0; i < 16; i++)
		KVT_EXPECT_EQ(raw.in.pool.gpu_uuid[i], 0x10);
	close(raw.sock);
	ipc_stop(&kvmd);
}

KVT_TEST(o10_named_gpu_is_found_whatever_its_ordinal)
{
	static const char *const args[] = {"--gpu", GPU_1, NULL};

	setenv("FAKE_CUDA_DEVICES", "4", 1);
	setenv("FAKE_CUDA_VISIBLE", "3,1", 1);
	start_cuda(args);
	hello(&raw);
	KVT_EXPECT_EQ(open_pool(&raw, 0x13), -ENODEV); /* here, but not this kvmd's */
	KVT_EXPECT_EQ(open_pool(&raw, 0), 0);
	KVT_EXPECT_EQ(raw.in.pool.gpu_uuid[0], 0x11);
	expect_status(GPU_1, true);
	close(raw.sock);
	ipc_stop(&kvmd);
}

KVT_TEST(one_of_several_gpus_must_be_named)
{
	setenv("FAKE_CUDA_DEVICES", "2", 1);
	start_cuda(NULL);
	hello(&raw);
	KVT_EXPECT_EQ(open_pool(&raw, 0), -ENODEV);
	KVT_EXPECT_HAS(raw.in.pool.error, "--gpu");
	expect_status("GPU_FAILED", true);
	close(raw.sock);
	ipc_stop(&kvmd);
}

/* ------------------------------------------------------------- while cuInit runs */

KVT_TEST(growth_is_pending_while_the_driver_starts)
{
	static const char *const args[] = {"--gpu", GPU_0, NULL};
	struct kv_sqe sqe;
	struct kv_cqe cqe;

	setenv("FAKE_CUDA_INIT_MS", "1500", 1);
	start_cuda(args);
	raw_open(&raw, &kvmd);		     /* the pool is there at once: */
	expect_status("GPU_STARTING", true); /* nobody waited for that */
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 1;
	sqe.ret_bytes = sizeof(struct kv_grant);
	cqe = raw_call(&raw, sqe);
	KVT_EXPECT_EQ(cqe.result, KV_PENDING);
	expect_within(status_has("\"state\":\"ready\""), 3000);
	expect_status("GPU_STARTING", false);
	raw_push(&raw, sqe);
	while (raw_recv(&raw, 3000) == KV_MSG_PRESSURE)
		;
	KVT_EXPECT_EQ(raw.in.msg.type, KV_MSG_EXTENT_ADDED);
	KVT_EXPECT_EQ(raw.nr_fds, 1);
	close(raw.fds[0]);
	KVT_EXPECT_EQ(raw_pop(&raw, &cqe, 3000), 0);
	KVT_EXPECT_EQ(cqe.result, 0);
	raw_close(&raw);
	ipc_stop(&kvmd);
}

KVT_TEST(pool_open_waits_until_the_gpu_is_known)
{
	struct ipc_raw *gone = calloc(1, sizeof(*gone));

	setenv("FAKE_CUDA_INIT_MS", "600", 1);
	start_cuda(NULL);
	hello(&raw);
	hello(gone);
	send_open(&raw, 0x10);
	send_open(gone, 0x10);
	KVT_EXPECT_EQ(raw_recv(&raw, 100), -1);
	close(gone->sock); /* a peer that does not wait leaves nothing behind */
	KVT_EXPECT_EQ(raw_recv(&raw, 5000), KV_MSG_POOL_REPLY);
	KVT_EXPECT_EQ(raw.in.pool.result, 0);
	expect_within(status_has("\"sessions\":1,"), 3000);
	/* the connection is read again */
	KVT_EXPECT_EQ(open_pool(&raw, 0x55), -ENODEV);
	close(raw.sock);
	ipc_stop(&kvmd);
}

KVT_TEST(failed_driver_is_a_health_code)
{
	setenv("FAKE_CUDA_INIT", "999", 1);
	start_cuda(NULL);
	hello(&raw);
	KVT_EXPECT_EQ(open_pool(&raw, 0), -ENODEV);
	KVT_EXPECT_HAS(raw.in.pool.error, "999");
	expect_status("GPU_FAILED", true);
	close(raw.sock);
	ipc_stop(&kvmd);
}

/* facts F-ctx, F-slice: no GPU time and no context memory for kvmd. */
KVT_TEST(kvmd_makes_no_context)
{
	char path[64], target[128];
	struct kv_sqe sqe;

	start_cuda(NULL);
	raw_open(&raw, &kvmd);
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 1;
	sqe.ret_bytes = sizeof(struct kv_grant);
	KVT_EXPECT_EQ(raw_call(&raw, sqe).result, 0);
	for (int fd = 0; fd < 256; fd++) {
		snprintf(path, sizeof(path), "/proc/%d/fd/%d", kvmd.pid, fd);
		memset(target, 0, sizeof(target));
		if (readlink(path, target, sizeof(target) - 1) > 0)
			KVT_EXPECT(!strstr(target, "fake-cuda-ctx"));
	}
	raw_close(&raw);
	ipc_stop(&kvmd);
}

/* An engine as any: a context, the pool mapped, 64 pages. */
static int engine_waits(void *arg)
{
	struct kv_grant pages[64];
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);

	for (int i = 0; i < 5000; i++) { /* KV_PENDING while cuInit runs in kvmd */
		if (!kvc_alloc(pool, 64, KV_GFP_NOWAIT, pages))
			break;
		usleep(1000);
	}
	if (!kvc_page_addr(pool, pages[63].pfn) || write((int)(intptr_t)arg, "x", 1) != 1)
		return 1;
	for (;;)
		pause();
}

static double status_number(const char *field)
{
	char *status = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	char *at = strstr(status, field);
	double v;

	KVT_EXPECT(at);
	v = strtod(at + strlen(field), NULL);
	free(status);
	return v;
}

/* What nvidia-smi shows for @pid. Return: bytes; -1 it is not listed. */
static double nvml_bytes(pid_t pid)
{
	char *status = ipc_admin(&kvmd, "{\"op\":\"status\"}"), uuid[41];
	struct kv_nv_process procs[512];
	unsigned count = KV_ARRAY_SIZE(procs);
	struct kv_nvml_syms nv;
	char error[160];
	kv_nv_device dev;

	KVT_EXPECT(strstr(status, "GPU-"));
	snprintf(uuid, sizeof(uuid), "%s", strstr(status, "GPU-"));
	free(status);
	if (kv_nvml_load(&nv, error, sizeof(error)))
		KVT_FAIL("%s", error);
	KVT_EXPECT_EQ(nv.init(), 0);
	KVT_EXPECT_EQ(nv.by_uuid(uuid, &dev), 0);
	KVT_EXPECT_EQ(nv.processes(dev, &count, procs), 0);
	for (unsigned i = 0; i < count; i++)
		if (procs[i].pid == (unsigned)pid)
			return (double)procs[i].used_bytes;
	return -1;
}

/* facts F-ctx: cuInit alone costs no memory of the GPU, a context 0.5 GB. */
KVT_TEST(nvml_attributes_to_kvmd_no_more_than_its_extents)
{
	double kvmd_bytes, engine_bytes, extents;
	pid_t engine;
	int fds[2];
	char byte;

	setenv("KVT_BACKEND", "cuda", 1);
	ipc_start(&kvmd, NULL);
	KVT_EXPECT_EQ(pipe(fds), 0);
	engine = ipc_child(engine_waits, (void *)(intptr_t)fds[1]);
	KVT_EXPECT_EQ(read(fds[0], &byte, 1), 1);
	extents = status_number("\"extent_bytes\":");
	kvmd_bytes = nvml_bytes(kvmd.pid);
	engine_bytes = nvml_bytes(engine);
	KVT_NOTE("extents %.1f MB; NVML: kvmd %.1f MB, engine %.1f MB (-1: not listed)",
		 extents / 1e6, kvmd_bytes < 0 ? -1 : kvmd_bytes / 1e6,
		 engine_bytes < 0 ? -1 : engine_bytes / 1e6);
	KVT_EXPECT(extents > 0);
	KVT_EXPECT(engine_bytes >= 0); /* else the list says nothing */
	KVT_EXPECT(kvmd_bytes <= extents);
	kill(engine, SIGKILL);
	ipc_wait(engine);
	ipc_stop(&kvmd);
}

/* The driver's threads must not be given what the loop waits for. */
static void expect_orderly_end(int sig)
{
	setenv("KVT_BACKEND", "cuda", 1);
	ipc_start(&kvmd, NULL);
	expect_within(status_has("\"state\":\"ready\""), 10000);
	kill(kvmd.pid, SIGHUP); /* without --config: a line in the log, no more */
	usleep(20000);
	KVT_EXPECT(status_has("\"state\":\"ready\""));
	kill(kvmd.pid, sig);
	usleep(100000); /* what the signal leaves alive, the SIGTERM of this ends */
	KVT_EXPECT_EQ(eng_private_kvmd_stop(&kvmd), 0);
}

KVT_TEST(signals_reach_the_loop_past_the_drivers_threads)
{
	expect_orderly_end(SIGTERM);
	expect_orderly_end(SIGINT);
}

/* ------------------------------------------------------------------- the choice */

static void expect_choice(const char *backend, const char *why, bool unused)
{
	char text[64];

	snprintf(text, sizeof(text), "\"backend\":\"%s\"", backend);
	expect_status(text, true);
	expect_status(why, true);
	expect_status("GPU_UNUSED", unused);
	ipc_stop(&kvmd);
}

KVT_TEST(auto_takes_the_gpu_if_there_is_one)
{
	/* not to see it is a fault where the kernel drives one */
	bool gpu_host = !access("/proc/driver/nvidia/version", F_OK);
	static const char *const automatic[] = {"--backend", "auto", NULL};
	static const char *const host_bytes[] = {"--backend", "auto", "--host-bytes",
						 "64MiB", NULL};

	ipc_use_fake_cuda();
	start_plain(automatic);
	expect_choice("cuda", "has a device", false);
	/* 90 % of 8 GiB, in whole 2 MiB */
	setenv("FAKE_CUDA_DEVICES", "0", 1);
	start_plain(automatic);
	expect_choice("host", "no device", gpu_host);
	setenv("FAKE_CUDA_DEVICES", "2", 1);
	start_plain(automatic);
	expect_choice("host", "--gpu", true);
	unsetenv("FAKE_CUDA_DEVICES");
	setenv("FAKE_CUDA_INIT", "803", 1);
	start_plain(automatic);
	expect_choice("host", "versions differ", true);
	unsetenv("FAKE_CUDA_INIT");
	start_plain(host_bytes);
	expect_choice("host", "--host-bytes", false);
	setenv("KV_CUDA_LIB", "/nonexistent/libcuda.so.1", 1);
	start_plain(automatic);
	expect_choice("host", "libcuda", gpu_host);
}

static void expect_refused(const char *const *args, const char *part)
{
	char error[512] = "";

	KVT_EXPECT_EQ(eng_private_kvmd_start(args, &kvmd, error, sizeof(error)), -ECHILD);
	KVT_EXPECT_HAS(error, part);
}

KVT_TEST(options_that_contradict_are_refused)
{
	static const char *const both[] = {"--backend", "cuda", "--host-bytes", "1GiB",
					   NULL};
	static const char *const host[] = {"--backend", "host", "--gpu-bytes", "1GiB",
					   NULL};
	static const char *const uuid[] = {"--backend", "auto", "--gpu", "GPU-12", NULL};
	static const char *const none[] = {"--backend", "cuda", NULL};

	ipc_use_fake_cuda();
	expect_refused(both, "--host-bytes");
	expect_refused(host, "--gpu-bytes");
	expect_refused(uuid, "GPU-12");
	setenv("KV_CUDA_LIB", "/nonexistent/libcuda.so.1", 1);
	expect_refused(none, "libcuda");
}

/* ----------------------------------------------------------------------- quotas */

static const char *config_file(const char *text)
{
	static char path[64];
	int fd;

	strcpy(path, "/tmp/kvmd-cuda-XXXXXX");
	fd = mkstemp(path);
	KVT_EXPECT(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
	return path;
}

KVT_TEST(quota_lines_name_the_gpu)
{
	const char *args[] = {"--config", NULL, NULL};
	struct kv_sqe sqe;
	char text[400];

	snprintf(text, sizeof(text),
		 "{\"gpu_bytes\":\"64MiB\",\"tenants\":[{\"name\":\"red\",\"uids\":[%u],"
		 "\"gpus\":[{\"gpu\":\"" GPU_0 "\",\"max\":\"1MiB\"}]}]}",
		 getuid());
	args[1] = config_file(text);
	start_cuda(args);
	raw_open(&raw, &kvmd);
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 15; /* of 68 KiB */
	sqe.ret_bytes = 15 * sizeof(struct kv_grant);
	KVT_EXPECT_EQ(raw_call(&raw, sqe).result, 0);
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 1;
	sqe.ret_bytes = sizeof(struct kv_grant);
	KVT_EXPECT_EQ(raw_call(&raw, sqe).result, KV_QUOTA);
	unlink(args[1]);
	raw_close(&raw);
	ipc_stop(&kvmd);
}

KVT_TEST(gpu_bytes_is_checked_and_does_not_change_by_reload)
{
	const char *args[] = {"--config", NULL, "--backend", "cuda", NULL};
	char text[300], *reply;
	FILE *f;

	ipc_use_fake_cuda();
	snprintf(
		text, sizeof(text),
		"{\"gpu_bytes\":\"4GBB\",\"tenants\":[{\"name\":\"red\",\"uids\":[%u]}]}",
		getuid());
	args[1] = config_file(text);
	expect_refused(args, "gpu_bytes");
	f = fopen(args[1], "w");
	fputs(strstr(text, "4GBB"), f); /* not JSON at all */
	fclose(f);
	expect_refused(args, "line 1");
	memcpy(strstr(text, "4GBB"), "4GiB", 4);
	f = fopen(args[1], "w");
	fputs(text, f);
	fclose(f);
	start_plain(args);
	expect_within(status_has("\"capacity_bytes\":4294967296"), 3000);
	memcpy(strstr(text, "4GiB"), "5GiB", 4);
	f = fopen(args[1], "w");
	fputs(text, f);
	fclose(f);
	reply = ipc_admin(&kvmd, "{\"op\":\"reload\"}");
	KVT_EXPECT_HAS(reply, "gpu_bytes");
	free(reply);
	unlink(args[1]);
	ipc_stop(&kvmd);
}

/* Guaranteed memory that the device does not have is no guarantee. */
KVT_TEST(min_above_the_device_refuses_pools)
{
	const char *args[] = {"--config", NULL, "--backend", "cuda", NULL};
	char text[400];

	snprintf(text, sizeof(text),
		 "{\"tenants\":[{\"name\":\"red\",\"uids\":[%u],"
		 "\"gpus\":[{\"gpu\":\"*\",\"min\":\"9GiB\",\"max\":\"10GiB\"}]}]}",
		 getuid());
	args[1] = config_file(text);
	ipc_use_fake_cuda();
	setenv("FAKE_CUDA_INIT_MS", "1500", 1);
	start_plain(args);
	hello(&raw);
	KVT_EXPECT_EQ(open_pool(&raw, 0), -ENODEV);
	KVT_EXPECT_HAS(raw.in.pool.error, "min");
	expect_status("GPU_POLICY", true);
	unlink(args[1]);
	close(raw.sock);
	ipc_stop(&kvmd);
}

KVT_MAIN()
