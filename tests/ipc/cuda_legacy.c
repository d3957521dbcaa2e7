/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend cuda-legacy and the mover inside a real kvmd, on a GPU or over the fake driver,
 * which aborts a process that frees memory another one has open.
 */
#include "tests/ipc/common.h"

#include <sys/socket.h>

#include "base/cuda_syms.h"
#include "tests/fake/fake.h"

static struct eng_private_kvmd kvmd;

static const char *const legacy_args[] = {"--backend", "cuda-legacy", NULL};

static void start(const char *const *args)
{
	setenv("KVT_BACKEND", "cuda", 1);
	setenv("FAKE_CUDA_NO_SYNC", "kvmd-mover", 1);
	ipc_start(&kvmd, args);
}

static double number_in(const char *request, const char *field)
{
	char *text = ipc_admin(&kvmd, request), *at = strstr(text, field);
	double v;

	if (!at)
		KVT_FAIL("%s lacks %s: %s", request, field, text);
	v = strtod(at + strlen(field), NULL);
	free(text);
	return v;
}

static bool status_has(const char *what)
{
	char *text = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	bool has = strstr(text, what);

	free(text);
	return has;
}

static void temp_dir(char *path)
{
	strcpy(path, "/tmp/kvt-legacy-XXXXXX");
	KVT_EXPECT(mkdtemp(path));
}

static void write_file(const char *path, const char *text)
{
	FILE *f = fopen(path, "we");

	KVT_EXPECT(f && fputs(text, f) >= 0 && !fclose(f));
}

static void remove_dir(const char *dir)
{
	char command[200];

	snprintf(command, sizeof(command), "rm -rf %s", dir);
	KVT_EXPECT_EQ(system(command), 0);
}

#define STATUS "{\"op\":\"status\"}"

/* Two processes, one page: the bytes that one wrote are what the other one reads. */
static int reader(void *arg)
{
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool_info info;
	struct kvc_pool *pool;
	u8 byte;

	ipc_gpu_context(0);
	pool = ipc_pool(c);
	kvc_pool_get_info(pool, &info);
	if (info.backend != KV_BACKEND_CUDA_LEGACY)
		return 1;
	byte = ipc_page_byte(pool, *(u32 *)arg, 100);
	kvc_close(c);
	return byte == 0x5a ? 0 : 2;
}

KVT_TEST(legacy_pages_are_shared_between_processes)
{
	struct kv_grant g[4];
	struct kvc_pool *pool;
	struct kvc *c;

	start(legacy_args);
	KVT_EXPECT(status_has("\"backend\":\"cuda-legacy\""));
	KVT_EXPECT(status_has("LEGACY_ISOLATION"));
	KVT_EXPECT(status_has("\"state\":\"off\"")); /* the mover is lazy */
	c = ipc_connect(&kvmd);
	ipc_gpu_context(0);
	pool = ipc_pool(c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, 0, g), 0);
	ipc_page_fill(pool, g[2].pfn, 0x5a, 1024);
	KVT_EXPECT_EQ(ipc_wait(ipc_child_with(reader, &g[2].pfn, sizeof(u32))), 0);
	KVT_EXPECT_EQ(number_in(STATUS, "\"starts\":"), 1);
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_TEST(legacy_extent_goes_after_its_last_importer)
{
	struct kvc_pool *pool;
	struct kvc *c, *other;

	start(legacy_args);
	ipc_gpu_context(0);
	for (u32 i = 0; i < 3; i++) {
		c = ipc_connect(&kvmd);
		other = ipc_connect(&kvmd);
		pool = ipc_pool(c);
		ipc_pool(other);
		kvc_pool_close(pool);
		kvc_close(c);
		KVT_EXPECT_EQ(number_in(STATUS, "\"deaths\":"), 0);
		kvc_close(other);
	}
	KVT_EXPECT_EQ(number_in(STATUS, "\"deaths\":"), 0);
	ipc_stop(&kvmd);
}

/* The connection goes, the process and what it has open stay. */
static void lose_connection(void)
{
	int type, hung_up = 0;
	socklen_t len;

	for (int fd = 3; fd < 256; fd++) {
		len = sizeof(type);
		if (!getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) &&
		    type == SOCK_SEQPACKET)
			hung_up += !shutdown(fd, SHUT_RDWR);
	}
	KVT_EXPECT(hung_up);
}

/* Its only session ends; it goes on with its handle open until it is told to end. */
static int loser(void *arg)
{
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool;
	int *end = arg;
	char byte;

	ipc_gpu_context(0);
	pool = ipc_pool(c);
	if (!kvc_page_addr(pool, 0))
		return 1;
	lose_connection();
	return read(end[0], &byte, 1) == 1 ? 0 : 2;
}

KVT_TEST(legacy_handle_of_a_lost_session_is_waited_for)
{
	char dir[64], config[128], text[512];
	const char *const args[] = {"--backend", "cuda-legacy", "--config", config, NULL};
	int end[2];
	pid_t pid;

	temp_dir(dir);
	snprintf(config, sizeof(config), "%s/kvmd.json", dir);
	snprintf(text, sizeof(text),
		 "{\"pool\":{\"idle_shrink_ms\":1},"
		 "\"tenants\":[{\"name\":\"a\",\"uids\":[%u]}]}",
		 getuid());
	write_file(config, text);
	start(args);
	KVT_EXPECT_EQ(pipe(end), 0);
	pid = ipc_child_with(loser, end, sizeof(end));
	expect_within(number_in(STATUS, "\"extent_bytes\":") > 0, 5000);
	expect_within(number_in(STATUS, "\"sessions\":") == 1, 5000);
	usleep(2500000);
	/* It would be freed by now, if the steps of the session were all that counts. */
	KVT_EXPECT(number_in(STATUS, "\"extent_bytes\":") > 0);
	KVT_EXPECT_EQ(number_in(STATUS, "\"starts\":"), 1);
	KVT_EXPECT_EQ(number_in(STATUS, "\"deaths\":"), 0);
	KVT_EXPECT_EQ(write(end[1], "x", 1), 1);
	KVT_EXPECT_EQ(ipc_wait(pid), 0);
	expect_within(number_in(STATUS, "\"extent_bytes\":") == 0, 8000);
	KVT_EXPECT_EQ(number_in(STATUS, "\"deaths\":"), 0);
	ipc_stop(&kvmd);
	remove_dir(dir);
}

/* ------------------------------------------------------------------------ refusals */

/* kvmd with @args; its output. Return: exit status */
static int run_kvmd(const char *args, char *ret_out, size_t room)
{
	char command[6000], path[4096];
	size_t n;
	FILE *f;

	ipc_build_path("kvmd", path, sizeof(path));
	snprintf(command, sizeof(command), "timeout 10 %s %s 2>&1", path, args);
	f = popen(command, "re");
	KVT_EXPECT(f);
	n = fread(ret_out, 1, room - 1, f);
	ret_out[n] = 0;
	return WEXITSTATUS(pclose(f));
}

static const char two_tenants[] = "{\"tenants\":["
				  "{\"name\":\"a\",\"uids\":[%u]},"
				  "{\"name\":\"b\",\"uids\":[54321]}]}";

/* facts F-legacy: a handle opens in whatever process has it. */
KVT_TEST(legacy_refuses_more_than_one_domain)
{
	char dir[64], config[128], text[512], args[512], out[4096];

	ipc_need_fake();
	ipc_use_fake_cuda();
	temp_dir(dir);
	snprintf(config, sizeof(config), "%s/kvmd.json", dir);
	snprintf(text, sizeof(text), two_tenants, getuid());
	write_file(config, text);
	snprintf(args, sizeof(args), "--private %s/run --config %s --backend cuda-legacy",
		 dir, config);
	KVT_EXPECT_EQ(run_kvmd(args, out, sizeof(out)), 1);
	KVT_EXPECT_HAS(out, "domains: 2");
	KVT_EXPECT_HAS(out, "cuda-legacy");
	remove_dir(dir);
}

/* Nor does it come to have them later. */
KVT_TEST(legacy_reload_with_more_domains_is_refused)
{
	char dir[64], config[128], text[512], *answer;
	const char *const args[] = {"--backend", "cuda-legacy", "--config", config, NULL};

	temp_dir(dir);
	snprintf(config, sizeof(config), "%s/kvmd.json", dir);
	snprintf(text, sizeof(text), "{\"tenants\":[{\"name\":\"a\",\"uids\":[%u]}]}",
		 getuid());
	write_file(config, text);
	start(args);
	snprintf(text, sizeof(text), two_tenants, getuid());
	write_file(config, text);
	answer = ipc_admin(&kvmd, "{\"op\":\"reload\"}");
	KVT_EXPECT_HAS(answer, "domains: 2");
	free(answer);
	KVT_EXPECT_EQ(number_in(STATUS, "\"tenants\":"), 1);
	ipc_stop(&kvmd);
	remove_dir(dir);
}

/* auto takes it only where memory cannot be exported, and says so. */
KVT_TEST(auto_falls_back_to_legacy_where_export_is_missing)
{
	static const char *const args[] = {"--backend", "auto", NULL};

	ipc_need_fake();
	ipc_use_fake_cuda();
	setenv("FAKE_CUDA_LACKS", "103", 1); /* KV_CU_ATTR_POSIX_FD */
	start(args);
	KVT_EXPECT(status_has("\"backend\":\"cuda-legacy\""));
	KVT_EXPECT(status_has("lacks export of memory as a file descriptor"));
	KVT_EXPECT(status_has("LEGACY_ISOLATION"));
	ipc_stop(&kvmd);
	unsetenv("FAKE_CUDA_LACKS");
	start(args);
	KVT_EXPECT(status_has("\"backend\":\"cuda\""));
	ipc_stop(&kvmd);
}

/* A pool needs its extent at once; what cannot be had is an error that says what to do. */
KVT_TEST(legacy_pool_without_memory_is_refused)
{
	struct kv_layout l = ipc_layout();
	struct kvc_pool *pool;
	struct kvc *c;

	ipc_need_fake();
	setenv("FAKE_CUDA_FAIL", "cuMemAlloc_v2:1", 1);
	start(legacy_args);
	unsetenv("FAKE_CUDA_FAIL");
	c = ipc_connect(&kvmd);
	ipc_gpu_context(0);
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &pool), -ENOMEM);
	KVT_EXPECT_HAS(kvc_strerror(c), "pool's extent of");
	KVT_EXPECT_HAS(kvc_strerror(c), "FULL");
	/* The next one is another call. */
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &pool), 0);
	kvc_close(c);
	ipc_stop(&kvmd);
}

static void client_call_fails(const char *what)
{
	struct kv_layout l = ipc_layout();
	struct fake_cuda_counts before, after;
	struct kvc_pool *pool;
	struct kvc *c;

	start(legacy_args);
	c = ipc_connect(&kvmd);
	ipc_gpu_context(0);
	KVT_EXPECT_EQ(fake_counts(&before), 0);
	setenv("FAKE_CUDA_FAIL", what, 1);
	KVT_EXPECT(kvc_pool_open(c, &l, NULL, NULL, &pool) < 0);
	unsetenv("FAKE_CUDA_FAIL");
	KVT_EXPECT_EQ(fake_counts(&after), 0);
	KVT_EXPECT_EQ(after.mapped, before.mapped);
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &pool), 0);
	kvc_close(c);
	KVT_EXPECT_EQ(number_in(STATUS, "\"deaths\":"), 0);
	ipc_stop(&kvmd);
}

KVT_TEST(legacy_open_fails_at_each_step)
{
	ipc_need_fake();
	client_call_fails("cuIpcOpenMemHandle_v2:1+");
	client_call_fails("cuCtxGetCurrent:1+");
}

/* --------------------------------------------------------------------- the mover's death */

/* The memory is the mover's: a new beginning, and the old addresses are no pool's. */
KVT_TEST(legacy_memory_dies_with_its_mover)
{
	struct kv_layout l = ipc_layout();
	struct kvc_pool *pool, *again;
	struct kv_grant g[2];
	struct kvc *c;
	pid_t mover;
	int r;

	start(legacy_args);
	c = ipc_connect(&kvmd);
	ipc_gpu_context(0);
	pool = ipc_pool(c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 2, 0, g), 0);
	KVT_EXPECT_EQ(number_in(STATUS, "\"starts\":"), 1);
	mover = (pid_t)number_in(STATUS, "\"state\":\"ready\",\"pid\":");
	KVT_EXPECT(mover > 1 && mover != kvmd.pid);
	KVT_EXPECT_EQ(kill(mover, SIGKILL), 0);
	for (int i = 0; i < 400; i++) {
		r = kvc_alloc(pool, 1, 0, g);
		if (r < 0)
			break;
		usleep(10000);
	}
	KVT_EXPECT(r < 0);
	/* The daemon is there again under the same pid, with nothing. */
	expect_within(!access(kvmd.admin_path, F_OK), 5000);
	KVT_EXPECT_EQ(number_in(STATUS, "\"deaths\":"), 0);
	KVT_EXPECT_EQ(kill(kvmd.pid, 0), 0);
	kvc_pool_close(pool);
	kvc_close(c);
	c = ipc_connect(&kvmd);
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &again), 0);
	KVT_EXPECT_EQ(kvc_alloc(again, 2, 0, g), 0);
	ipc_page_fill(again, g[0].pfn, 0x11, 64);
	KVT_EXPECT_EQ(ipc_page_byte(again, g[0].pfn, 63), 0x11);
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_MAIN()
