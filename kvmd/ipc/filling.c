/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/filling.c - see filling.h. */
#include "kvmd/ipc/filling.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/config.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"

#define RETRY_NS   (2 * KV_NSEC_PER_SEC)
#define FILL_NICE  10
#define FREE_BYTES (64ll << 20)

/* Its holes can be told from its pages by nobody: the next one may find it half done. */
static void free_old(struct kvd_filling *f, int fd)
{
	struct stat st;

	if (fstat(fd, &st))
		return;
	for (off_t at = 0; at < st.st_size; at += FREE_BYTES)
		if (__atomic_load_n(&f->stop, __ATOMIC_RELAXED) ||
		    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at,
			      FREE_BYTES))
			return;
}

static void fill_run(struct kvd_work *w)
{
	struct kvd_filling *f = kv_container_of(w, struct kvd_filling, work);

	/* Engines and the loop come first; this thread does nothing else. */
	setpriority(PRIO_PROCESS, (id_t)gettid(), FILL_NICE);
	while (f->stuck && !__atomic_load_n(&f->stop, __ATOMIC_RELAXED))
		usleep(1000);
	for (u32 i = 0; i < f->nr_old; i++)
		free_old(f, f->old[i].fd);
	if (f->fill)
		f->result = kvd_mover_pool_fill(f->kvd->moving.mover, &f->stop);
}

static void failed(struct kvd *kvd, const char *why)
{
	struct kvd_filling *f = &kvd->tiering.filling;

	if (strcmp(f->error, why))
		kvd_warn("ipc/filling", "no tiers yet: %s", why);
	snprintf(f->error, sizeof(f->error), "%s", why);
	f->next_ns = kvd->now_ns + RETRY_NS;
}

static void fill_done(struct kvd_work *w)
{
	struct kvd_filling *f = kv_container_of(w, struct kvd_filling, work);
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	struct kvd *kvd = f->kvd;
	int r = f->result;

	if (f->stop)
		return;
	for (; f->nr_old; f->nr_old--) {
		struct kvd_kept_fd *old = &f->old[f->nr_old - 1];

		kvd_kept_del(kvd, &old->key);
		close(old->fd);
	}
	if (!f->fill)
		return;
	if (kvd_fault(KVD_FAULT_tier_fill))
		r = -ENOMEM;
	if (r && !KV_MUTANT(fill_unchecked)) {
		snprintf(error, sizeof(error), "tiers.dram.size: %llu: %s",
			 (unsigned long long)kvd->config.tiers.dram_bytes, strerror(-r));
		failed(kvd, error);
		return;
	}
	kvd_mover_pool_filled(kvd->moving.mover);
	f->wanted = false;
	r = kvd_tiering_open(kvd, &kvd->config, error);
	if (!r)
		return;
	/* A directory that is not there, a journal of another: it may be put right. */
	f->wanted = true;
	failed(kvd, error[0] ? error : strerror(-r));
}

static void worker_end(struct kvd *kvd)
{
	struct kvd_filling *f = &kvd->tiering.filling;

	if (!f->worker)
		return;
	kvd_loop_del(kvd->loop, &f->watch);
	kvd_workers_destroy(f->worker); /* done() is called here, if not yet */
	f->worker = NULL;
}

static void worker_ready(void *arg, u32 events)
{
	struct kvd *kvd = arg;

	if (kvd_workers_reap(kvd->tiering.filling.worker))
		worker_end(kvd);
}

static void start(struct kvd *kvd)
{
	struct kvd_filling *f = &kvd->tiering.filling;
	int r = kvd_workers_create(1, &f->worker);

	if (r) {
		failed(kvd, strerror(-r));
		return;
	}
	f->kvd = kvd;
	f->fill = f->wanted;
	f->stuck = kvd_fault(KVD_FAULT_tier_fill_stuck);
	f->work = (struct kvd_work){.run = fill_run, .done = fill_done};
	f->watch = (struct kvd_watch){.fd = kvd_workers_fd(f->worker),
				      .events = KVD_LOOP_IN,
				      .ready = worker_ready,
				      .arg = kvd};
	r = kvd_loop_add(kvd->loop, &f->watch);
	if (r) {
		kvd_workers_destroy(f->worker);
		f->worker = NULL;
		failed(kvd, strerror(-r));
		return;
	}
	kvd_work_submit(f->worker, &f->work);
}

void kvd_filling_turn(struct kvd *kvd)
{
	struct kvd_filling *f = &kvd->tiering.filling;

	if ((f->wanted || f->nr_old) && !f->worker && kvd->now_ns >= f->next_ns &&
	    !kvd_mover_pid(kvd->moving.mover))
		start(kvd);
}

void kvd_filling_take(struct kvd *kvd)
{
	struct kvd_filling *f = &kvd->tiering.filling;

	for (u32 i = 0; i < kvd->kept.nr && f->nr_old < KVD_FILL_OLD; i++) {
		struct kvd_kept_fd *k = &kvd->kept.fds[i];

		if (k->key.kind != KVD_KEEP_POOL || k->fd < 0)
			continue;
		f->old[f->nr_old++] = *k;
		k->fd = -1;
	}
}

int kvd_filling_keep(struct kvd *kvd)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_POOL, .session = kvd->started_ns};
	u64 bytes = 0;
	int fd = -1;

	if (kvd->moving.mover)
		kvd_mover_pool(kvd->moving.mover, &bytes, &fd);
	return bytes && !KV_MUTANT(pool_not_kept) ? kvd_kept_put(kvd, &key, fd) : 0;
}

void kvd_filling_stop(struct kvd *kvd)
{
	struct kvd_filling *f = &kvd->tiering.filling;

	if (!KV_MUTANT(fill_not_told))
		__atomic_store_n(&f->stop, true, __ATOMIC_RELAXED);
	f->wanted = false;
	worker_end(kvd);
	while (f->nr_old) /* what is left of it the keeper has: for the next one */
		close(f->old[--f->nr_old].fd);
}
