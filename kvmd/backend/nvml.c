/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend/nvml.c - see nvml.h.
 *
 * Lock: struct kvd_nvml.lock guards @asked, @quit and @answer; the thread alone uses NVML.
 */
#include "kvmd/backend/nvml.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/join.h"
#include "base/nvml_syms.h"

#define END_S	   2u
#define PIDS_FIRST 64u
#define PIDS_MAX   65536u

/**
 * struct kvd_nvml - the thread and what it shares with the loop
 * @asked: number of the last question
 * @answer: the latest; @fresh: not taken yet
 * @up: NVML is initialised and @device found; the thread's
 */
struct kvd_nvml {
	pthread_t thread;
	bool running;
	pthread_mutex_t lock;
	pthread_cond_t cond;
	u64 asked;
	bool quit;
	bool fresh;
	struct kvd_nvml_answer answer;
	int event_fd;
	char gpu[48];
	struct kv_nvml_syms nv;
	kv_nv_device device;
	bool up;
};

static int say(struct kvd_nvml_answer *a, const char *what, kv_nv_result r)
{
	snprintf(a->error, sizeof(a->error), "%s: NVML result %d", what, r);
	return kv_nvml_errno(r);
}

static int bring_up(struct kvd_nvml *n, struct kvd_nvml_answer *a)
{
	kv_nv_result nr;
	int r;

	if (n->up)
		return 0;
	if (!n->nv.lib) {
		r = kv_nvml_load(&n->nv, a->error, sizeof(a->error));
		if (r)
			return r;
	}
	nr = n->nv.init();
	if (nr)
		return say(a, "nvmlInit", nr);
	nr = n->nv.by_uuid(n->gpu, &n->device);
	if (nr) {
		n->nv.shutdown();
		return say(a, "nvmlDeviceGetHandleByUUID", nr);
	}
	n->up = true;
	return 0;
}

/* Append one of the two lists to @a. */
static int list(struct kvd_nvml *n, struct kvd_nvml_answer *a, bool mps)
{
	struct kv_nv_process *procs = NULL, *more;
	u32 *pids;
	unsigned room = PIDS_FIRST, count = 0;
	kv_nv_result nr = KV_NV_SMALL;

	while (nr == KV_NV_SMALL && room <= PIDS_MAX) {
		more = realloc(procs, room * sizeof(*procs));
		if (!more)
			goto no_memory;
		procs = more;
		count = room;
		nr = mps ? n->nv.mps_processes(n->device, &count, procs)
			 : n->nv.processes(n->device, &count, procs);
		room *= 2; /* what it says may have changed by the next call */
	}
	if (nr) {
		free(procs);
		return say(a,
			   mps ? "nvmlDeviceGetMPSComputeRunningProcesses"
			       : "nvmlDeviceGetComputeRunningProcesses",
			   nr);
	}
	pids = realloc(a->pids, (a->nr_pids + count + 1) * sizeof(*pids));
	if (!pids)
		goto no_memory;
	a->pids = pids;
	for (unsigned i = 0; i < count; i++)
		a->pids[a->nr_pids++] = procs[i].pid;
	free(procs);
	return 0;
no_memory:
	free(procs);
	snprintf(a->error, sizeof(a->error), "out of memory");
	return -ENOMEM;
}

static void answer(struct kvd_nvml *n, struct kvd_nvml_answer *a)
{
	a->result = bring_up(n, a);
	if (!a->result)
		a->result = list(n, a, false);
	a->nr_own = a->nr_pids;
	if (!a->result)
		a->result = list(n, a, true);
}

static void *nvml_thread(void *arg)
{
	struct kvd_nvml *n = arg;
	struct kvd_nvml_answer a;
	u64 done = 0;

	pthread_mutex_lock(&n->lock);
	while (!n->quit) {
		if (n->asked == done) {
			pthread_cond_wait(&n->cond, &n->lock);
			continue;
		}
		memset(&a, 0, sizeof(a));
		a.number = done = n->asked;
		pthread_mutex_unlock(&n->lock);
		answer(n, &a);
		pthread_mutex_lock(&n->lock);
		free(n->answer.pids);
		n->answer = a;
		n->fresh = true;
		eventfd_write(n->event_fd, 1);
	}
	pthread_mutex_unlock(&n->lock);
	if (n->up)
		n->nv.shutdown();
	return NULL;
}

int kvd_nvml_create(const char *gpu, struct kvd_nvml **ret_nvml)
{
	struct kvd_nvml *n = calloc(1, sizeof(*n));
	int r;

	if (!n)
		return -ENOMEM;
	n->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (n->event_fd < 0) {
		r = -errno;
		free(n);
		return r;
	}
	pthread_mutex_init(&n->lock, NULL);
	pthread_cond_init(&n->cond, NULL);
	snprintf(n->gpu, sizeof(n->gpu), "%s", gpu);
	*ret_nvml = n;
	return 0;
}

void kvd_nvml_destroy(struct kvd_nvml *nvml)
{
	if (!nvml)
		return;
	pthread_mutex_lock(&nvml->lock);
	nvml->quit = true;
	pthread_cond_signal(&nvml->cond);
	pthread_mutex_unlock(&nvml->lock);
	/* A driver that hangs is no reason for kvmd not to end. */
	if (nvml->running && kv_join_within(nvml->thread, END_S))
		return;
	if (nvml->nv.lib)
		dlclose(nvml->nv.lib);
	free(nvml->answer.pids);
	close(nvml->event_fd);
	pthread_cond_destroy(&nvml->cond);
	pthread_mutex_destroy(&nvml->lock);
	free(nvml);
}

int kvd_nvml_event_fd(const struct kvd_nvml *nvml)
{
	return nvml->event_fd;
}

u64 kvd_nvml_ask(struct kvd_nvml *nvml)
{
	u64 number;

	if (!nvml->running) {
		if (pthread_create(&nvml->thread, NULL, nvml_thread, nvml))
			return 0;
		nvml->running = true;
	}
	pthread_mutex_lock(&nvml->lock);
	number = ++nvml->asked;
	pthread_cond_signal(&nvml->cond);
	pthread_mutex_unlock(&nvml->lock);
	return number;
}

bool kvd_nvml_take(struct kvd_nvml *nvml, struct kvd_nvml_answer *ret)
{
	eventfd_t count;
	bool fresh;

	eventfd_read(nvml->event_fd, &count);
	pthread_mutex_lock(&nvml->lock);
	fresh = nvml->fresh;
	if (fresh) {
		free(ret->pids);
		*ret = nvml->answer;
		nvml->answer.pids = NULL;
		nvml->fresh = false;
	}
	pthread_mutex_unlock(&nvml->lock);
	return fresh;
}

bool kvd_nvml_lists(const struct kvd_nvml_answer *answer, u32 pid, bool *ret_mps)
{
	bool found = false;

	*ret_mps = false;
	for (u32 i = 0; i < answer->nr_pids; i++) {
		if (answer->pids[i] != pid)
			continue;
		found = true;
		*ret_mps |= i >= answer->nr_own;
	}
	return found;
}
