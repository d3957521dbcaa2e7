/* SPDX-License-Identifier: Apache-2.0 */
/*
 * P8 over a restart: an engine dies in a step while no kvmd is there, or before it has come
 * back to the new one. What the kvmd before saw of its process still counts, or its domain
 * would wait for that step for good. On the GPU, or over the fake driver.
 */
#include "tests/ipc/restart.h"

#include <sys/syscall.h>

#define NR_PAGES 8u

struct engine {
	int told;
	bool child; /* forks one that keeps the GPU open */
};

/* In a step, seen by NVML and kvmd; calls the library no more. */
static int engine_run(void *arg)
{
	const struct engine *e = arg;
	struct kv_grant pages[NR_PAGES];
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);
	struct kvc_step *step;
	pid_t child = 0;

	expect_within(!kvc_alloc(pool, NR_PAGES, KV_GFP_NOWAIT, pages), 10000);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	kvc_step_launched(step);
	if (e->child) {
		child = (pid_t)syscall(SYS_fork);
		if (!child) {
			for (;;)
				pause();
		}
	}
	KVT_EXPECT_EQ(write(e->told, &child, sizeof(child)), sizeof(child));
	for (;;)
		pause();
}

static pid_t engine(bool child, pid_t *ret_child)
{
	struct engine e = {.child = child};
	int told[2];
	pid_t pid;

	setenv("KVT_BACKEND", "cuda", 1);
	/* as the real driver: children are forked before this process calls cuInit */
	setenv("FAKE_CUDA_FORK_BREAKS", "1", 1);
	KVT_EXPECT_EQ(pipe(told), 0);
	e.told = told[1];
	start();
	pid = ipc_child_with(engine_run, &e, sizeof(e));
	KVT_EXPECT_EQ(read(told[0], ret_child, sizeof(*ret_child)), sizeof(*ret_child));
	close(told[0]);
	close(told[1]);
	return pid;
}

static void die(pid_t pid)
{
	kill(pid, SIGKILL);
	ipc_wait(pid);
}

/* All pages come back, and what others free does so, too. */
static void expect_all_back(void)
{
	struct kv_grant page;
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);

	expect_within(!kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 10000);
	KVT_EXPECT_EQ(kvc_free(pool, &page, 1), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	expect_within(stat_of(pool).nr_quarantine == 0 && stat_of(pool).nr_active == 0,
		      10000);
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_TEST_T(killed_in_a_step_while_kvmd_is_away, 60)
{
	pid_t none, pid = engine(false, &none);

	kill_kvmd();
	die(pid);
	again();
	expect_all_back();
}

/* Which GPU it is, and so whom NVML is to be asked of, is known when its driver has started:
 * a question that comes before is not the last one. */
KVT_TEST_T(killed_in_a_step_and_the_driver_is_slow, 60)
{
	pid_t none, pid;

	ipc_need_fake();
	pid = engine(false, &none);
	kill_kvmd();
	die(pid);
	setenv("FAKE_CUDA_INIT_MS", "500", 1);
	again();
	unsetenv("FAKE_CUDA_INIT_MS");
	expect_all_back();
}

KVT_TEST_T(killed_in_a_step_before_it_came_back, 60)
{
	pid_t none, pid = engine(false, &none);

	kill_kvmd();
	again();
	die(pid);
	expect_all_back();
}

/* Its end was being waited for when kvmd went: a forked child keeps its work alive. */
KVT_TEST_T(kvmd_is_killed_while_it_waits_for_the_proof, 60)
{
	struct kvc_pool *pool;
	pid_t child, pid;
	struct kvc *c;

	pid = engine(true, &child);
	die(pid);
	kill_kvmd();
	again();
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	expect_within(stat_of(pool).nr_quarantine == NR_PAGES, 5000);
	usleep(300000); /* NVML is asked, and lists it */
	KVT_EXPECT_EQ(stat_of(pool).nr_quarantine, NR_PAGES);
	kvc_close(c);
	kill(child, SIGKILL);
	expect_all_back();
}

KVT_MAIN()
