/* SPDX-License-Identifier: Apache-2.0 */
/* kill_victim.c - the engine that kvbench kill kills (kill.h). */
#include "kill.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "gpu_work.h"

#define CHILD_LIFE_S 60	    /* of a child that nobody ends */
#define SEEN_US	     200000 /* by then kvmd has asked NVML about a new process */

struct work {
	struct eng_mem *m;
	void *pages[KILL_PAGES];
	size_t page_bytes;
	u64 *counter;
	u64 *dev_counter; /* the same, as a kernel sees it */
};

/* Without a GPU the work is a thread's. */
static void *store_thread(void *arg)
{
	struct work *w = arg;

	for (u64 i = 1;; i++) {
		__atomic_store_n((u64 *)w->pages[0], i, __ATOMIC_RELEASE);
		__atomic_store_n(w->counter, i, __ATOMIC_RELEASE);
	}
	return NULL;
}

/* Queues copies as long as it lives; those that are queued go on without it. */
static void *copy_thread(void *arg)
{
	struct work *w = arg;
	struct kvb_gpu_copies c = {.pages = w->pages,
				   .nr_pages = KILL_PAGES,
				   .page_bytes = w->page_bytes,
				   .counter = w->counter};
	int r;

	do {
		r = kvb_gpu_copies(w->m, &c);
	} while (!r);
	kvb_said("the copies", r);
	exit(1);
}

static int work_start(enum kvb_backend b, struct work *w, struct kill_shared *shared,
		      enum kill_work what)
{
	pthread_t thread;
	void *counter;
	int r;

	w->counter = &shared->counter;
	if (b != KVB_CUDA)
		return -pthread_create(&thread, NULL, store_thread, w);
	r = kvb_gpu_share(shared, sizeof(*shared), &counter);
	if (r)
		return r;
	w->dev_counter = counter;
	return what == KILL_COPIES
		       ? -pthread_create(&thread, NULL, copy_thread, w)
		       : kvb_gpu_store(w->m, w->pages[0], w->dev_counter, KILL_WORK_NS);
}

/* The child knows nothing; it only lives on. System calls alone: see KILL_BARE. */
static void child_run(int pipe)
{
	close(pipe);
	alarm(CHILD_LIFE_S);
	for (;;)
		pause();
}

static pid_t child_start(enum kill_child child, int pipe)
{
	pid_t pid = 0;

	if (child == KILL_HANDLER)
		pid = fork();
	else if (child == KILL_BARE)
		pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	else
		return 0;
	if (pid == 0)
		child_run(pipe);
	return pid;
}

static int step_start(enum kvb_backend b, struct eng_mem *m, struct kvc *c,
		      struct kill_shared *shared, enum kill_work what)
{
	static struct work w;
	struct kv_layout layout = kvb_layout(0);
	struct kv_grant pages[KILL_PAGES];
	struct kvc_pool *pool;
	struct kvc_step *step;
	int r = kvc_pool_open(c, &layout, NULL, NULL, &pool);

	if (r)
		return kvb_said("kvc_pool_open", r);
	r = kvc_alloc(pool, KILL_PAGES, KV_GFP_NOWAIT, pages);
	if (r)
		return kvb_said("kvc_alloc", r);
	usleep(SEEN_US);
	r = kvc_step_begin(c, &step);
	if (r)
		return kvb_said("kvc_step_begin", r);
	w.m = m;
	w.page_bytes = kv_page_bytes(&layout);
	for (u32 i = 0; i < KILL_PAGES; i++)
		w.pages[i] = kvc_page_addr(pool, pages[i].pfn);
	r = work_start(b, &w, shared, what);
	if (r)
		return kvb_said("the long work", r);
	kvc_step_launched(step);
	return 0;
}

int kill_victim(enum kvb_backend b, const char *socket_path, enum kill_child child,
		enum kill_work what, int fd, int pipe)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = socket_path,
				  .client_name = "kvbench-victim"};
	struct kill_shared *shared;
	struct eng_mem *m;
	struct kvc *c;
	pid_t pid;
	int r;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (shared == MAP_FAILED || kvb_device_open(b, &m))
		return 1;
	r = kvc_open(&opt, &c);
	if (r) {
		kvb_said("kvc_open", r);
		return 1;
	}
	if (step_start(b, m, c, shared, what))
		return 1;
	while (!__atomic_load_n(&shared->counter, __ATOMIC_ACQUIRE))
		usleep(100);
	pid = child_start(child, pipe);
	if (write(pipe, &pid, sizeof(pid)) != sizeof(pid))
		return 1;
	for (;;)
		pause();
}
