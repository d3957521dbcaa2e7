/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mover in a daemon: who holds extents, what status says, NVML as the proof, and a
 * kvmd that comes after one whose mover was copying. The daemon runs in this process, its
 * client in another one.
 */
#include "tests/kvt.h"
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include "base/clock.h"
#include "base/cuda_syms.h"
#include "kvclient.h"
#include "kvmd/daemon.h"
#include "kvmd/keep/keep.h"
#include "kvmd/mover/mover_priv.h"
#include "tests/fake/fake.h"

#define MIB (1ull << 20)

static struct kvd kvd;
static char dir[64];
static pid_t main_pid;
static char program[4096];

/* This program is the keeper's as well: the daemon starts /proc/self/exe for it. */
__attribute__((constructor)) static void be_keeper(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "--keeper-process"))
		_exit(kvd_keeper_main(atoi(argv[2]), atoi(argv[3])));
}

static void find_program(void)
{
	ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - 64);
	char *cut = NULL;

	KVT_EXPECT(n > 0);
	program[n] = 0;
	for (char *p = program; (p = strstr(p, "/tests/")); p++)
		cut = p;
	KVT_EXPECT(cut);
	strcpy(cut, "/kvmd");
}

static void daemon_open(bool gpu, bool keeper)
{
	struct kvd_options opt = {
		.backend = gpu ? KVD_BACKEND_CUDA : KVD_BACKEND_HOST,
		.socket_mode = 0600,
		.test_extents = true,
		.check = -1,
		.ready_fd = -1,
		.keeper = keeper,
		.keeper_die_with = main_pid,
		.mover_program = program,
	};
	char error[KVD_CONFIG_ERROR_BYTES];

	find_program();
	if (gpu) {
		opt.gpu_bytes = 256 * MIB;
		KVT_EXPECT_EQ(fake_use("KV_CUDA_LIB", "libcuda.so"), 0);
		KVT_EXPECT_EQ(fake_use("KV_NVML_LIB", "libnvml.so"), 0);
		setenv("FAKE_CUDA_NO_SYNC", "kvmd-mover", 1);
	} else {
		opt.host_bytes = 256 * MIB;
	}
	snprintf(opt.socket_path, sizeof(opt.socket_path), "%s/kvmd.sock", dir);
	snprintf(opt.admin_path, sizeof(opt.admin_path), "%s/admin.sock", dir);
	snprintf(opt.state_dir, sizeof(opt.state_dir), "%s", dir);
	if (kvd_init(&kvd, &opt, error))
		KVT_FAIL("%s", error);
}

static void make_dir(void)
{
	strcpy(dir, "/tmp/kvt-moving-XXXXXX");
	KVT_EXPECT(mkdtemp(dir));
	main_pid = getpid();
}

static void remove_dir(void)
{
	char command[128];

	snprintf(command, sizeof(command), "rm -rf %s", dir);
	KVT_EXPECT_EQ(system(command), 0);
}

static void turns(u32 ms)
{
	u64 end_ns = kv_now_ns() + ms * KV_NSEC_PER_MSEC;

	while (kv_now_ns() < end_ns) {
		kvd.tick_ns = KV_MIN(kvd.tick_ns, kv_now_ns() + 10 * KV_NSEC_PER_MSEC);
		KVT_EXPECT_EQ(kvd_turn(&kvd), 0);
	}
}

#define wait_until(cond)                                     \
	do {                                                 \
		for (int i_ = 0; !(cond) && i_ < 2000; i_++) \
			turns(5);                            \
		KVT_EXPECT(cond);                            \
	} while (0)

/* ---------------------------------------------------------------------- its client */

static struct {
	pid_t pid;
	int to[2], from[2];
	u32 pfn[2];
} client;

static void context(void)
{
	static struct kv_cuda_syms cu;
	kv_cu_device dev;
	kv_cu_ctx ctx;

	if (kv_cuda_load(&cu, NULL, 0) || cu.init(0) || cu.device_get(&dev, 0) ||
	    cu.ctx_retain(&ctx, dev) || cu.ctx_push(ctx))
		_exit(9);
}

/* Two pages; the first is filled, and the second must come to be like it. */
static int client_run(bool gpu)
{
	struct kv_layout l = {.format_version = KV_LAYOUT_VERSION,
			      .kind = KV_LAYOUT_GQA,
			      .dtype = KV_DTYPE_E4M3,
			      .scale_kind = KV_SCALE_TOKEN,
			      .page_tokens = KV_PAGE_TOKENS,
			      .nr_layers = 4,
			      .nr_kv_heads = 2,
			      .head_dim = 64};
	struct kvc_options opt = {.size_bytes = sizeof(opt), .client_name = "moving"};
	struct kvc_pool *pool;
	struct kv_grant g[2];
	char path[128], byte;
	struct kvc *c;
	int r;

	snprintf(path, sizeof(path), "%s/kvmd.sock", dir);
	opt.socket_path = path;
	if (gpu)
		context();
	/* the path is there a moment before anybody listens */
	for (int i = 0; (r = kvc_open(&opt, &c)) && i < 5000; i++)
		usleep(1000);
	if (r) {
		KVT_NOTE("client: open: %d", r);
		return 8;
	}
	r = kvc_pool_open(c, &l, NULL, NULL, &pool);
	if (!r)
		r = kvc_alloc(pool, 2, KV_GFP_PREFILL, g);
	if (r) {
		KVT_NOTE("client: %d %s", r, kvc_strerror(c));
		return 8;
	}
	memset(kvc_page_addr(pool, g[0].pfn), 0x3c, 4096);
	memset(kvc_page_addr(pool, g[1].pfn), 0, 4096);
	if (write(client.from[1], &g[0].pfn, 4) != 4 ||
	    write(client.from[1], &g[1].pfn, 4) != 4 || read(client.to[0], &byte, 1) != 1)
		return 7;
	return memcmp(kvc_page_addr(pool, g[0].pfn), kvc_page_addr(pool, g[1].pfn), 4096)
		       ? 1
		       : 0;
}

static void client_start(bool gpu)
{
	find_program();
	if (gpu)
		KVT_EXPECT_EQ(fake_use("KV_CUDA_LIB", "libcuda.so"), 0);
	KVT_EXPECT(!pipe(client.to) && !pipe(client.from));
	client.pid = fork();
	if (!client.pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* a case that fails leaves nobody */
		_exit(client_run(gpu));
	}
}

static struct kvd_pool *the_pool(void)
{
	for (u32 i = 0; i < KVD_POOLS_MAX; i++)
		if (kvd.core.mm.pools[i])
			return kvd.core.mm.pools[i];
	return NULL;
}

static struct kvd_pool *client_ready(void)
{
	struct pollfd p = {.fd = client.from[0], .events = POLLIN};

	for (int i = 0; i < 1000 && poll(&p, 1, 0) != 1; i++)
		turns(5);
	KVT_EXPECT_EQ(poll(&p, 1, 0), 1);
	KVT_EXPECT_EQ(read(client.from[0], &client.pfn[0], 4), 4);
	KVT_EXPECT_EQ(read(client.from[0], &client.pfn[1], 4), 4);
	KVT_EXPECT(the_pool());
	return the_pool();
}

static int client_end(void)
{
	int status;

	KVT_EXPECT_EQ(write(client.to[1], "x", 1), 1);
	while (waitpid(client.pid, &status, WNOHANG) == 0)
		turns(2);
	turns(50);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* --------------------------------------------------------------------------- a copy */

struct result {
	u32 calls;
	int status;
};

static void done(void *arg, u64 id, int status)
{
	struct result *r = arg;

	r->calls++;
	r->status = status;
}

static void pool_reopen(void)
{
	kvd_moving_close(&kvd);
	KVT_EXPECT_EQ(kvd_moving_open(&kvd, 8 * MIB, false), 0);
}

/* Page @pfn and the start of the host pool. */
static void copy_start(struct kvd_pool *pool, enum kvd_mover_dir way, u32 pfn,
		       struct result *r)
{
	u32 index = pfn >> pool->geo.shift;
	const struct kvd_mover_extent extent = {
		.pool_id = pool->id,
		.index = index,
		.serial = pool->extents[index].serial,
		.fd = pool->extents[index].handle.fd,
		.bytes = pool->geo.extent_bytes,
	};
	const struct kvd_mover_copy copy = {
		.extent = &extent,
		.extent_off =
			(pfn & ((1u << pool->geo.shift) - 1)) * pool->geo.stride_bytes,
		.bytes = pool->geo.stride_bytes,
	};
	const struct kvd_mover_job job = {
		.dir = way, .nr = 1, .copies = &copy, .done = done, .arg = r};
	u64 id;

	memset(r, 0, sizeof(*r));
	KVT_EXPECT_EQ(kvd_mover_submit(kvd.moving.mover, &job, &id), 0);
}

static int copy(struct kvd_pool *pool, enum kvd_mover_dir way, u32 pfn)
{
	struct result r;

	copy_start(pool, way, pfn, &r);
	for (int i = 0; i < 1000 && !r.calls; i++)
		turns(5);
	KVT_EXPECT_EQ(r.calls, 1);
	return r.status;
}

static void status_has(const char *what)
{
	cJSON *out = cJSON_CreateObject();
	char *text;

	kvd_moving_status(&kvd, out);
	text = cJSON_PrintUnformatted(out);
	KVT_EXPECT_HAS(text, what);
	free(text);
	cJSON_Delete(out);
}

static void daemon_moves_pages(bool gpu)
{
	struct kvd_pool *pool;
	u32 given;

	make_dir();
	client_start(gpu);
	daemon_open(gpu, false);
	pool_reopen();
	status_has("\"state\":\"off\"");
	pool = client_ready();
	given = pool->extents[0].nr_given;
	KVT_EXPECT_EQ(copy(pool, KVD_MOVER_OUT, client.pfn[0]), 0);
	KVT_EXPECT_EQ(pool->extents[0].nr_given, given + 1);
	KVT_EXPECT_EQ(copy(pool, KVD_MOVER_IN, client.pfn[1]), 0);
	status_has("\"state\":\"ready\"");
	status_has("\"starts\":1,\"deaths\":0");
	status_has("\"jobs\":2,\"failed\":0");
	/* The extent goes back when nobody has it any more: the mover as well. */
	KVT_EXPECT_EQ(client_end(), 0);
	KVT_EXPECT_EQ(pool->extents[0].nr_given, 1);
	kvd.core.cfg.idle_shrink_ns = 1;
	for (int i = 0; i < 500 && kvd.core.mm.extent_bytes_used; i++)
		turns(10);
	KVT_EXPECT_EQ(kvd_mover_nr_extents(kvd.moving.mover), 0);
	KVT_EXPECT_EQ(kvd.core.mm.extent_bytes_used, 0);
	kvd_fini(&kvd);
	remove_dir();
}

KVT_TEST(host_daemon_moves_pages)
{
	daemon_moves_pages(false);
}

KVT_TEST(cuda_daemon_moves_pages)
{
	daemon_moves_pages(true);
}

/* -------------------------------------------------------------------------- its death */

/* What makes the fake NVML go on listing a process: a child that has its descriptors. */
static int still_listed(pid_t pid)
{
	char name[64];
	int fd;

	snprintf(name, sizeof(name), "fake-cuda-ctx-%d", pid);
	fd = memfd_create(name, MFD_CLOEXEC);
	KVT_EXPECT(fd >= 0);
	return fd;
}

KVT_TEST(frames_of_a_dead_mover_wait_for_nvml)
{
	struct kvd_pool *pool;
	const char *code;
	struct result r;
	pid_t pid;
	int fd;

	setenv("FAKE_CUDA_COPY_MS", "60000", 1);
	make_dir();
	client_start(true);
	daemon_open(true, false);
	pool_reopen();
	pool = client_ready();
	copy_start(pool, KVD_MOVER_IN, client.pfn[1], &r);
	wait_until(kvd.moving.mover->nr_handed == 1);
	turns(30);
	pid = kvd_mover_pid(kvd.moving.mover);
	KVT_EXPECT(pid && kvd_mover_was_listed(kvd.moving.mover));
	fd = still_listed(pid);
	kill(pid, SIGKILL);
	wait_until(kvd_mover_state(kvd.moving.mover) == KVD_MOVER_ENDING);
	turns(300);
	KVT_EXPECT_EQ(r.calls, 0);
	KVT_EXPECT(kvd_moving_reason(&kvd, &code));
	KVT_EXPECT_STR(code, "MOVER_UNPROVEN");
	status_has("\"unproven\":true");
	close(fd);
	wait_until(r.calls == 1);
	KVT_EXPECT_EQ(r.status, -EPIPE);
	status_has("\"unproven\":false");
	client_end();
	kvd_fini(&kvd);
	remove_dir();
}

/* kvmd dies with a copy under way. What it was filling is in quarantine at the next one,
 * and stays there until the old mover's end is proven. */
KVT_TEST(next_kvmd_waits_for_the_last_ones_mover)
{
	int told[2], status, fd;
	pid_t old, mover;
	struct result r;

	setenv("FAKE_CUDA_COPY_MS", "60000", 1);
	make_dir();
	KVT_EXPECT(!pipe(told));
	client_start(true);
	old = fork();
	if (!old) {
		struct kvd_pool *pool;

		daemon_open(true, true);
		pool_reopen();
		pool = client_ready();
		copy_start(pool, KVD_MOVER_IN, client.pfn[1], &r);
		wait_until(kvd.moving.mover->nr_handed == 1);
		turns(30);
		mover = kvd_mover_pid(kvd.moving.mover);
		status = write(told[1], &mover, sizeof(mover));
		turns(100000);
		_exit(1);
	}
	KVT_EXPECT_EQ(read(told[0], &mover, sizeof(mover)), sizeof(mover));
	KVT_EXPECT(mover > 1);
	fd = still_listed(mover);
	kill(old, SIGKILL);
	waitpid(old, &status, 0);
	daemon_open(true, true);
	KVT_EXPECT(kvd.kept.found);
	KVT_EXPECT(kvd.core.mm.grace.held);
	KVT_EXPECT_EQ(kvd_mover_pid(kvd.moving.mover), mover);
	kill(client.pid, SIGKILL); /* its pages go into quarantine */
	wait_until(kvd_mover_state(kvd.moving.mover) == KVD_MOVER_ENDING);
	wait_until(the_pool()->nr[KVD_QUARANTINE] > 0);
	turns(300);
	KVT_EXPECT(kvd.core.mm.grace.held);
	KVT_EXPECT(the_pool()->nr[KVD_QUARANTINE] > 0);
	close(fd);
	wait_until(!kvd.core.mm.grace.held);
	KVT_EXPECT_EQ(kvd_mover_pid(kvd.moving.mover), 0);
	wait_until(the_pool()->nr[KVD_QUARANTINE] == 0);
	waitpid(client.pid, &status, 0);
	kvd_fini(&kvd);
	remove_dir();
}

KVT_MAIN()
