/* SPDX-License-Identifier: Apache-2.0 */
/*
 * P8 on a GPU: an engine that dies in a step keeps its pages in quarantine until pidfd and
 * NVML together prove that its work has ended. On a GPU, or over fake driver and NVML.
 */
#include "tests/ipc/common.h"

#include <sys/prctl.h>
#include <sys/syscall.h>

static struct eng_private_kvmd kvmd;
static struct kvc *c;
static struct kvc_pool *pool;

static void start(void)
{
	setenv("KVT_BACKEND", "cuda", 1);
	/* as the real driver: victims are forked before this process calls cuInit */
	setenv("FAKE_CUDA_FORK_BREAKS", "1", 1);
	ipc_start(&kvmd, NULL);
}

static void watch(void)
{
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
}

static void stop(void)
{
	kvc_close(c);
	ipc_stop(&kvmd);
}

struct victim {
	int ready[2];
	bool in_step;
	bool child; /* forks one that lives on */
	bool raw;   /* without the library's handler, which closes devices in the child */
	pid_t child_pid;
};

static int victim_run(void *arg)
{
	struct victim *v = arg;
	struct kv_grant pages[8];
	struct kvc_step *step;
	struct kvc_pool *p;
	struct kvc *mine;
	pid_t pid = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	mine = ipc_connect(&kvmd);
	p = ipc_pool(mine);
	if (kvc_alloc(p, 8, KV_GFP_NOWAIT, pages))
		return 2;
	if (v->in_step) {
		if (kvc_step_begin(mine, &step))
			return 3;
		kvc_step_launched(step);
	}
	if (v->child) {
		pid = v->raw ? (pid_t)syscall(SYS_fork) : fork();
		if (!pid) {
			for (;;)
				pause();
		}
	}
	usleep(300000); /* kvmd has seen by now what NVML says */
	if (write(v->ready[1], &pid, sizeof(pid)) != sizeof(pid))
		return 4;
	for (;;)
		pause();
}

static pid_t victim(struct victim *v)
{
	pid_t pid;

	KVT_EXPECT_EQ(pipe(v->ready), 0);
	pid = ipc_child_with(victim_run, v, sizeof(*v));
	close(v->ready[1]);
	if (read(v->ready[0], &v->child_pid, sizeof(pid)) != sizeof(pid))
		KVT_FAIL("victim: exit %d", ipc_wait(pid));
	return pid;
}

static void kill_it(pid_t pid)
{
	kill(pid, SIGKILL);
	ipc_wait(pid);
}

static u32 in_quarantine(void)
{
	struct kv_stat s;

	KVT_EXPECT_EQ(kvc_stat(pool, &s), 0);
	return s.nr_quarantine;
}

static bool status_has(const char *part)
{
	char *status = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	bool has = strstr(status, part) != NULL;

	free(status);
	return has;
}

static void expect_kept(u32 nr, const char *why)
{
	expect_within(in_quarantine() == nr, 1000);
	for (int i = 0; i < 40; i++) {
		KVT_EXPECT_EQ(in_quarantine(), nr);
		usleep(10000);
	}
	KVT_EXPECT(status_has("GPU_WORK_UNPROVEN"));
	KVT_EXPECT(status_has(why));
}

KVT_TEST(killed_in_a_step_is_over_when_nvml_says_so)
{
	struct victim v = {.in_step = true};
	pid_t pid;
	u64 t0;

	start();
	pid = victim(&v);
	watch();
	kill_it(pid);
	t0 = kv_now_ns();
	expect_within(status_has("\"sessions\":1,"), 1000);
	expect_within(in_quarantine() == 0, 1000);
	KVT_NOTE("pages back after %.1f ms", (double)(kv_now_ns() - t0) / 1e6);
	KVT_EXPECT(!status_has("GPU_WORK_UNPROVEN"));
	stop();
}

/* cases O19, facts F-fork-gpu: the socket and the pidfd fire, and the kernel writes on. */
KVT_TEST(o19_fork_keeps_gpu_work_alive)
{
	struct victim v = {.in_step = true, .child = true, .raw = true};
	pid_t pid;

	start();
	pid = victim(&v);
	watch();
	kill_it(pid);
	expect_kept(8, "forked child");
	kill(v.child_pid, SIGKILL);
	expect_within(in_quarantine() == 0, 1000);
	KVT_EXPECT(!status_has("GPU_WORK_UNPROVEN"));
	stop();
}

/* The library's fork handler closes the devices, so the child holds nothing up. */
KVT_TEST(o19_forked_child_lets_go_of_the_gpu)
{
	struct victim v = {.in_step = true, .child = true};
	pid_t pid;

	if (!ipc_on_card())
		KVT_SKIP("the fake driver has no device files");
	start();
	pid = victim(&v);
	watch();
	kill_it(pid);
	expect_within(in_quarantine() == 0 && status_has("\"sessions\":1,"), 1000);
	kill(v.child_pid, SIGKILL);
	stop();
}

/* With all slots IDLE its work had retired, whoever holds the descriptors. */
KVT_TEST(o19_killed_between_steps_needs_no_proof)
{
	struct victim v = {.child = true};
	pid_t pid;

	start();
	pid = victim(&v);
	watch();
	kill_it(pid);
	expect_within(in_quarantine() == 0 && status_has("\"sessions\":1,"), 1000);
	kill(v.child_pid, SIGKILL);
	stop();
}

/* Absence from a list that never had it proves nothing. */
KVT_TEST(process_that_nvml_never_listed_is_not_proven)
{
	struct victim v = {.in_step = true};
	pid_t pid;

	ipc_need_fake();
	setenv("FAKE_NVML_BLIND", "1", 1);
	start();
	pid = victim(&v);
	watch();
	kill_it(pid);
	expect_kept(8, "never listed");
	stop();
}

KVT_TEST(client_of_mps_is_not_proven)
{
	struct victim v = {.in_step = true};
	pid_t pid;

	ipc_need_fake();
	setenv("FAKE_NVML_MPS", "1", 1);
	start();
	pid = victim(&v);
	watch();
	kill_it(pid);
	expect_kept(8, "MPS");
	stop();
}

static void without_nvml(void)
{
	struct victim v = {.in_step = true}, idle = {.in_step = false};
	pid_t pid, idle_pid;

	start();
	pid = victim(&v);
	idle_pid = victim(&idle);
	watch();
	kill_it(idle_pid);
	/* reaped at once; its pages wait for the other one's step as any page would */
	expect_within(status_has("\"sessions\":2,"), 1000);
	kill_it(pid);
	expect_kept(16, "NVML cannot say");
	KVT_EXPECT(status_has("GPU_NO_NVML"));
	stop();
}

KVT_TEST(without_nvml_nothing_is_proven)
{
	pid_t pid = fork();

	ipc_need_fake();
	if (!pid) {
		setenv("FAKE_NVML_FAIL", "nvmlInit_v2:9", 1);
		without_nvml();
		_exit(0);
	}
	KVT_EXPECT_EQ(ipc_wait(pid), 0);
	setenv("FAKE_NVML_FAIL", "nvmlDeviceGetMPSComputeRunningProcesses_v3:999", 1);
	without_nvml();
}

KVT_MAIN()
