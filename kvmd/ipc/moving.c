/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/moving.c - see moving.h. */
#include "kvmd/ipc/moving.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/backend/cuda.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/ipc/admin_priv.h"
#include "kvmd/ipc/conn.h"

#define PROOF_POLL_NS (10 * KV_NSEC_PER_MSEC)
#define IDLE_NS	      (10 * KV_NSEC_PER_SEC)

/* ------------------------------------------------------------------- what it asks for */

/* Ids begin at 1. */
static struct kvd_pool *pool_of(const struct kvd *kvd, u32 pool_id)
{
	kv_assert(pool_id && pool_id <= KVD_POOLS_MAX);
	return kvd->core.mm.pools[pool_id - 1];
}

static void extent_given(void *arg, u32 pool_id, u32 index, u64 serial)
{
	struct kvd_pool *pool = pool_of(arg, pool_id);

	kv_assert(pool && pool->extents[index].serial == serial);
	kvd_extent_given(pool, index);
}

static void extent_put(void *arg, u32 pool_id, u32 index, u64 serial)
{
	struct kvd_pool *pool = pool_of(arg, pool_id);

	kv_assert(pool && pool->extents[index].serial == serial);
	kvd_extent_put(pool, index);
}

static struct kvd_keep_key keep_key(pid_t pid, enum kvd_mover_kept how)
{
	return (struct kvd_keep_key){
		.kind = KVD_KEEP_MOVER, .session = (u64)pid, .index = how};
}

/* The new key is there before the old one goes. */
static int keep(void *arg, pid_t pid, int pidfd, enum kvd_mover_kept how)
{
	struct kvd_keep_key key;
	struct kvd *kvd = arg;
	int r = 0;

	if (pidfd >= 0) {
		key = keep_key(pid, how);
		r = kvd_kept_put(kvd, &key, pidfd);
	}
	for (u32 i = 0; !r && i <= KVD_MOVER_UNLISTED; i++) {
		key = keep_key(pid, i);
		if (pidfd < 0 || i != how)
			kvd_kept_del(kvd, &key);
	}
	if (pidfd < 0) {
		kvd->moving.proving = false;
		kvd->core.mm.grace.held = false;
	}
	return r;
}

static void started(void *arg)
{
	struct kvd *kvd = arg;
	struct kvd_moving *mv = &kvd->moving;

	mv->since = kvd_proof_ask(kvd);
	mv->hold_ns = kvd->now_ns + KVD_PROOF_WAIT_NS;
	mv->next_ns = KV_MIN(mv->next_ns, mv->hold_ns);
	if (!mv->since)
		kvd_mover_listed(mv->mover, false);
}

static void prove(void *arg)
{
	struct kvd *kvd = arg;
	struct kvd_moving *mv = &kvd->moving;

	mv->proving = true;
	mv->after = kvd_proof_ask(kvd);
	mv->ask_ns = kvd->now_ns + PROOF_POLL_NS;
	mv->next_ns = KV_MIN(mv->next_ns, mv->ask_ns);
}

/* Legacy memory is the mover's: every page is gone, and so is all that was said of it. */
static void died(void *arg, bool owned)
{
	struct kvd *kvd = arg;
	cJSON *fields = cJSON_CreateObject();

	cJSON_AddStringToObject(fields, "error", kvd_mover_error(kvd->moving.mover));
	cJSON_AddBoolToObject(fields, "memory_lost", owned);
	kvd_admin_event(kvd, "mover_died", fields);
	if (!owned || !kvd_cuda_used(kvd->backend))
		return;
	kvd_err("ipc/moving", "the memory of cuda-legacy died with its process: kvmd "
			      "starts anew, every lease is revoked");
	kvd->stop = kvd->again = true;
}

static void alloced(void *arg, u64 id, int result, const u8 *handle, const char *text)
{
	struct kvd *kvd = arg;
	struct kvd_conn *conn, *tmp;

	if (result)
		kvd_warn("ipc/moving", "extent of cuda-legacy: %s",
			 *text ? text : strerror(-result));
	kvd_cuda_legacy_alloced(kvd->backend, id, result, handle);
	/* Whoever waits for an extent may go on, or learn that there is none. */
	kvd->pages_freed = true;
	list_for_each_entry_safe (conn, tmp, &kvd->conns, node)
		kvd_conn_unhold(conn);
}

/* ----------------------------------------------------------------------- start and stop */

static void mover_ready(void *arg, u32 events)
{
	kvd_mover_event(((struct kvd *)arg)->moving.mover);
}

/* What an earlier kvmd's mover was filling is in quarantine now. */
static void adopt(struct kvd *kvd)
{
	struct kvd_moving *mv = &kvd->moving;

	for (u32 i = 0; i < kvd->kept.nr; i++) {
		struct kvd_kept_fd *k = &kvd->kept.fds[i];

		if (k->key.kind != KVD_KEEP_MOVER || k->fd < 0 ||
		    k->key.index > KVD_MOVER_UNLISTED)
			continue;
		if (kvd_mover_pid(mv->mover))
			continue; /* the same one twice: killed between two keys */
		if (!KV_MUTANT(mover_forgotten))
			kvd->core.mm.grace.held = true;
		kvd_mover_adopt(mv->mover, (pid_t)k->key.session, k->fd,
				(enum kvd_mover_kept)k->key.index);
		k->fd = -1;
	}
}

static int legacy_alloc(void *arg, u64 id, u64 bytes)
{
	return kvd_mover_alloc(((struct kvd *)arg)->moving.mover, id, bytes);
}

static void legacy_free(void *arg, u64 id)
{
	struct kvd *kvd = arg;

	if (kvd->moving.mover)
		kvd_mover_free(kvd->moving.mover, id);
}

int kvd_moving_open(struct kvd *kvd, u64 pool_bytes, bool fill_later)
{
	const struct kvd_legacy_source source = {kvd, legacy_alloc, legacy_free};
	const struct kvd_mover_ops ops = {
		.arg = kvd,
		.extent_given = extent_given,
		.extent_put = extent_put,
		.keep = keep,
		.started = started,
		.prove = prove,
		.died = died,
		.alloced = alloced,
	};
	struct kvd_mover_params params = {
		.backend = kvd->memory.kind,
		.program = kvd->opt.mover_program ? kvd->opt.mover_program
						  : "/proc/self/exe",
		.pool_bytes = pool_bytes,
		.pool_fd = -1,
		.fill_later = fill_later,
	};
	struct kvd_moving *mv = &kvd->moving;
	int r;

	r = kvd_mover_create(&params, &ops, &mv->mover);
	if (r)
		return r;
	mv->next_ns = KVD_MOVER_NEVER;
	mv->watch.fd = kvd_mover_fd(mv->mover);
	mv->watch.events = KVD_LOOP_IN;
	mv->watch.ready = mover_ready;
	mv->watch.arg = kvd;
	r = kvd_loop_add(kvd->loop, &mv->watch);
	if (r) {
		kvd_mover_destroy(mv->mover);
		mv->mover = NULL;
		return r;
	}
	adopt(kvd);
	if (params.backend == KV_BACKEND_CUDA_LEGACY)
		kvd_cuda_legacy_source(kvd->backend, &source);
	return 0;
}

void kvd_moving_close(struct kvd *kvd)
{
	struct kvd_moving *mv = &kvd->moving;

	if (!mv->mover)
		return;
	kvd_loop_del(kvd->loop, &mv->watch);
	kvd_mover_destroy(mv->mover);
	mv->mover = NULL;
	/* Everything ends with the daemon; nobody is given a frame any more. */
	kvd->core.mm.grace.held = false;
}

/* --------------------------------------------------------------------------- the turns */

static void drop_draining(struct kvd *kvd)
{
	struct kvd_mover *m = kvd->moving.mover;
	struct kvd_mover_extent e;

	for (u32 i = 0; i < KVD_MOVER_EXTENTS_MAX; i++) {
		if (!kvd_mover_extent_at(m, i, &e))
			continue;
		if (pool_of(kvd, e.pool_id)->extents[e.index].state ==
		    KVD_EXTENT_DRAINING)
			kvd_mover_extent_drop(m, e.pool_id, e.index, e.serial);
	}
}

void kvd_moving_turn(struct kvd *kvd)
{
	struct kvd_moving *mv = &kvd->moving;
	u8 uuid[16];

	if (!mv->mover)
		return;
	/* The GPU's name is known when its driver has started. */
	kvd_memory_uuid(kvd, uuid);
	kvd_mover_set_gpu(mv->mover, uuid);
	if (mv->since && kvd->now_ns >= mv->hold_ns) {
		mv->since = 0;
		kvd_mover_listed(mv->mover, false);
	}
	if (mv->proving && kvd->now_ns >= mv->ask_ns) {
		u64 number = kvd_proof_ask(kvd);

		if (!mv->after)
			mv->after = number;
		mv->ask_ns = kvd->now_ns + PROOF_POLL_NS;
	}
	if (kvd->core.mm.draining_bytes && kvd_mover_nr_extents(mv->mover))
		drop_draining(kvd);
	mv->next_ns = kvd_mover_run(mv->mover, kvd->now_ns);
	if (mv->since)
		mv->next_ns = KV_MIN(mv->next_ns, mv->hold_ns);
	if (mv->proving)
		mv->next_ns = KV_MIN(mv->next_ns, mv->ask_ns);
}

void kvd_moving_tick(struct kvd *kvd)
{
	if (kvd->moving.mover && kvd->now_ns > IDLE_NS)
		kvd_mover_extents_idle(kvd->moving.mover, kvd->now_ns - IDLE_NS);
}

void kvd_moving_answer(struct kvd *kvd, const struct kvd_nvml_answer *a)
{
	struct kvd_moving *mv = &kvd->moving;
	bool mps = false, listed;

	if (!mv->mover)
		return;
	listed = !a->result && kvd_nvml_lists(a, (u32)kvd_mover_pid(mv->mover), &mps);
	if (mv->since && a->number >= mv->since) {
		mv->since = 0;
		kvd_mover_listed(mv->mover, listed && !mps);
	}
	if (mv->proving && mv->after && a->number >= mv->after && !a->result && !listed &&
	    kvd_mover_was_listed(mv->mover))
		kvd_mover_ended(mv->mover);
}

int kvd_moving_keep(struct kvd *kvd)
{
	struct kvd_moving *mv = &kvd->moving;

	return mv->mover ? kvd_mover_keep_again(mv->mover) : 0;
}

/* ------------------------------------------------------------------------------ status */

void kvd_moving_status(struct kvd *kvd, cJSON *out)
{
	struct kvd_mover *m = kvd->moving.mover;
	const struct kvd_mover_stats *s;
	u64 pool_bytes;
	cJSON *o;

	if (!m) {
		cJSON_AddNullToObject(out, "mover");
		return;
	}
	s = kvd_mover_stats(m);
	kvd_mover_pool(m, &pool_bytes, NULL);
	o = cJSON_AddObjectToObject(out, "mover");
	cJSON_AddStringToObject(o, "state", kvd_mover_state_str(kvd_mover_state(m)));
	cJSON_AddNumberToObject(o, "pid", kvd_mover_pid(m));
	cJSON_AddStringToObject(o, "error", kvd_mover_error(m));
	kvd_admin_u64(o, "starts", s->starts);
	kvd_admin_u64(o, "deaths", s->deaths);
	cJSON_AddNumberToObject(o, "jobs_now", kvd_mover_nr_jobs(m));
	kvd_admin_u64(o, "jobs", s->jobs);
	kvd_admin_u64(o, "failed", s->failed);
	kvd_admin_u64(o, "copies", s->copies);
	kvd_admin_u64(o, "runs", s->runs);
	kvd_admin_u64(o, "out_bytes", s->out_bytes);
	kvd_admin_u64(o, "in_bytes", s->in_bytes);
	cJSON_AddNumberToObject(o, "extents", kvd_mover_nr_extents(m));
	kvd_admin_u64(o, "pool_bytes", pool_bytes);
	cJSON_AddBoolToObject(o, "unproven", s->unproven != 0);
}

const char *kvd_moving_reason(struct kvd *kvd, const char **ret_code)
{
	struct kvd_mover *m = kvd->moving.mover;

	if (!m)
		return NULL;
	if (kvd_mover_stats(m)->unproven) {
		*ret_code = "MOVER_UNPROVEN";
		return "the mover died with copies under way and nothing proves yet that "
		       "they ended: their pages wait, no mover is started";
	}
	if (kvd_mover_down(m)) {
		*ret_code = "MOVER_DOWN";
		return kvd_mover_error(m);
	}
	return NULL;
}
