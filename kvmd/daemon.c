/* SPDX-License-Identifier: Apache-2.0 */
/*
 * daemon.c - building, running and ending struct kvd.
 *
 * A turn: wait for events (or not, when there is work), serve rings, hash a slice, close
 * the core's turn (grace periods, reclaim), try parked requests, free what died. Idle
 * means asleep until the next tick: the core asks for 10 ms turns only while something
 * waits in quarantine.
 */
#include "kvmd/daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/mutant.h"
#include "base/clock.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"
#include "kvmd/dbg/trace.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/ipc/event.h"
#include "kvmd/ipc/inside.h"
#include "kvmd/ipc/policy.h"

#define CHOKED_NS     10000000ull
#define SPIN_CPUS     4
#define AUDIT_SWEEP_S 60u

/* ------------------------------------------------------------------ signals */

static void reload_on_signal(struct kvd *kvd)
{
	char error[KVD_CONFIG_ERROR_BYTES];
	u32 deferred;

	if (kvd_reload(kvd, false, error, &deferred))
		kvd_err("config", "not applied: %s", error);
	else
		kvd_info("config", "revision %llu applied, %u deferred",
			 (unsigned long long)kvd->config_revision, deferred);
}

static void signal_ready(void *arg, u32 events)
{
	struct signalfd_siginfo si;
	struct kvd *kvd = arg;

	while (read(kvd->signal_fd, &si, sizeof(si)) == (ssize_t)sizeof(si)) {
		if (si.ssi_signo == SIGHUP)
			reload_on_signal(kvd);
		else
			kvd->stop = true;
	}
}

static void signal_set(sigset_t *set)
{
	sigemptyset(set);
	sigaddset(set, SIGTERM);
	sigaddset(set, SIGINT);
	sigaddset(set, SIGHUP);
}

/* Before anything can make a thread: the driver, NVML and liburing have threads of their
 * own, which inherit the mask. One that lacks it would be given the signal, and the
 * default action ends the process. */
static int signals_block(void)
{
	sigset_t set;

	signal(SIGPIPE, SIG_IGN);
	/* Ignored, as some launchers leave it, a child's end could not be told from a good one. */
	signal(SIGCHLD, SIG_DFL);
	signal_set(&set);
	return sigprocmask(SIG_BLOCK, &set, NULL) ? -errno : 0;
}

static int signals_open(struct kvd *kvd)
{
	sigset_t set;

	signal_set(&set);
	kvd->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (kvd->signal_fd < 0)
		return -errno;
	kvd->signal_watch.fd = kvd->signal_fd;
	kvd->signal_watch.events = KVD_LOOP_IN;
	kvd->signal_watch.ready = signal_ready;
	kvd->signal_watch.arg = kvd;
	return kvd_loop_add(kvd->loop, &kvd->signal_watch);
}

/* ----------------------------------------------------------------- starting */

static int core_start(struct kvd *kvd, const struct kvd_config *config, char *error)
{
	struct kvd_core_config cfg;
	int r;

	kvd->env = kvd_state_env(&kvd->state);
	kvd_gen_source_init(&kvd->gens, &kvd->env,
			    kvd->state.saved[KVD_SAVED_GENERATION]);
	if (kvd->kept.found)
		kvd_state_foresee(&kvd->state);
	randombytes_buf(&kvd->table_epoch, sizeof(kvd->table_epoch));
	kvd->table_epoch |= 1;
	cfg = (struct kvd_core_config){
		.env = &kvd->env,
		.backend = kvd->backend,
		.gen_source = &kvd->gens,
		.notify = &kvd_event_notify,
		.notify_arg = kvd,
		.table_epoch = kvd->table_epoch,
		.saved_grace = kvd->state.saved[KVD_SAVED_GRACE],
		.stall_ns = config->stall_ms * KV_NSEC_PER_MSEC,
		.idle_shrink_ns = config->idle_shrink_ms * KV_NSEC_PER_MSEC,
		.test_layouts = kvd->opt.test_layouts,
		.image = kvd->kept.image,
		.keep = kvd->kept.image ? &kvd->kept.ops : NULL,
	};
	r = kvd_core_init(&kvd->core, &cfg);
	if (r) {
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "core: %s", strerror(-r));
		return r;
	}
	kvd_core_now(&kvd->core, kvd->now_ns);
	return 0;
}

static int sockets_open(struct kvd *kvd, char *error)
{
	int r;

	r = kvd_listen_open(kvd, &kvd->engine_listen, kvd->opt.socket_path,
			    SOCK_SEQPACKET, kvd->opt.socket_mode, kvd_conn_accepted,
			    kvd_kept_listen(kvd, 0), error);
	if (r)
		return r;
	r = kvd_listen_open(kvd, &kvd->admin_listen, kvd->opt.admin_path, SOCK_STREAM,
			    0600, kvd_admin_accepted, kvd_kept_listen(kvd, 1), error);
	if (!r)
		r = kvd_kept_done(kvd);
	else
		kvd_listen_close(&kvd->engine_listen);
	return r;
}

static bool may_spin(const struct kvd *kvd)
{
	cpu_set_t set;

	if (kvd->opt.spin)
		return true;
	return !sched_getaffinity(0, sizeof(set), &set) && CPU_COUNT(&set) >= SPIN_CPUS;
}

static void read_clock(void *arg)
{
	struct kvd *kvd = arg;

	kvd->now_ns = kv_now_ns();
	kvd_core_now(&kvd->core, kvd->now_ns);
}

static void kvd_prepare(struct kvd *kvd, const struct kvd_options *opt)
{
	memset(kvd, 0, sizeof(*kvd));
	kvd->opt = *opt;
	kvd->signal_fd = kvd->spare_fd = -1;
	kvd->engine_listen.fd = kvd->admin_listen.fd = -1;
	kvd->state.dir_fd = kvd->state.lock_fd = kvd->state.alive_fd = -1;
	kvd->kept.keep.fd = kvd->kept.image_fd = -1;
	kvd->started_ns = kvd->now_ns = kv_now_ns();
	kvd->tick_ns = kvd->now_ns + KVD_TICK_NS;
	kvd->core_next_ns = KVD_CORE_IDLE;
	kvd->proof.next_ns = ~0ull;
	kvd->moving.next_ns = ~0ull;
	kvd->next_client_id = 1;
	kvd->spins = may_spin(kvd);
	list_init(&kvd->conns);
	list_init(&kvd->dead);
	list_init(&kvd->awake);
	kvd_admin_init(&kvd->admin);
}

static int doors_open(struct kvd *kvd, char *error)
{
	int r = signals_open(kvd);

	if (!r)
		r = kvd_memory_watch(kvd);
	if (r)
		return r;
	kvd->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	return sockets_open(kvd, error);
}

/* Legacy memory dies with the mover, which dies with kvmd: nothing to keep. What an earlier kvmd left
 * has no pages; its sockets would answer in place of ours. */
static void keeper_leave(struct kvd *kvd)
{
	kvd->opt.keeper = false;
	if (kvd->kept.image)
		kvd_kept_stop(kvd, true);
	kvd->kept.found = kvd->kept.there = false;
}

/* The core, on what may have outlived an earlier kvmd. */
static int core_take(struct kvd *kvd, const struct kvd_config *config, char *error)
{
	int r = kvd_kept_start(kvd, error);

	if (!r)
		r = kvd_memory_open(kvd, config, error);
	if (r)
		goto stop_kept;
	if (kvd->memory.kind == KV_BACKEND_CUDA_LEGACY)
		keeper_leave(kvd);
	kvd_kept_memory_is(&kvd->kept, kvd->memory.kind);
	r = core_start(kvd, config, error);
	if (!r)
		return 0;
	kvd_memory_close(kvd);
stop_kept:
	kvd_kept_stop(kvd, !kvd->kept.there || KV_MUTANT(quit_keeper));
	return r;
}

/* Nobody else's, and kvmctl is told that we live. */
static int state_take(struct kvd *kvd, char *error)
{
	int r = kvd_state_open(kvd->opt.state_dir, &kvd->state, error,
			       KVD_CONFIG_ERROR_BYTES);

	if (r)
		return r;
	r = kvd_state_alive(&kvd->state, kvd->opt.admin_path, error,
			    KVD_CONFIG_ERROR_BYTES);
	if (r)
		kvd_state_close(&kvd->state);
	return r;
}

int kvd_init(struct kvd *kvd, const struct kvd_options *opt, char *error)
{
	struct kvd_config *config = calloc(1, sizeof(*config));
	u32 deferred;
	int r;

	error[0] = 0;
	kvd_prepare(kvd, opt);
	kvd_optable_check();
	r = signals_block();
	if (r)
		goto free_config;
	if (sodium_init() < 0 || !config)
		r = -ENOMEM;
	else if (opt->faults &&
		 kvd_fault_arm_text(opt->faults, error, KVD_CONFIG_ERROR_BYTES))
		r = -EINVAL;
	else
		r = kvd_config_start(kvd, config, error);
	if (r)
		goto free_config;
	r = state_take(kvd, error);
	if (r)
		goto free_config;
	r = kvd_requests_init(&kvd->requests);
	if (r)
		goto close_state;
	kvd->msg_buf = malloc(KV_MSG_BYTES_MAX);
	r = kvd->msg_buf ? kvd_loop_create(kvd->opt.force_epoll, &kvd->loop) : -ENOMEM;
	if (r)
		goto free_requests;
	r = core_take(kvd, config, error);
	if (r)
		goto destroy_loop;
	r = kvd_kept_adopt(kvd, error);
	if (!r)
		r = kvd_policy_apply(kvd, config, error, &deferred);
	if (!r)
		r = kvd_tiering_pool(kvd, config, error);
	if (!r)
		r = kvd_tiering_open(kvd, config, error);
	if (r)
		goto fini_core;
	r = doors_open(kvd, error);
	if (r)
		goto fini_core;
	kvd_loop_on_wake(kvd->loop, read_clock, kvd);
	kvd_inside_add(kvd);
	free(config);
	return 0;
fini_core:
	/* What was adopted is left as it is, for a kvmd that can serve it: the process
	 * ends now, and the keeper has everything. */
	if (kvd->kept.found)
		goto free_config;
	kvd_tiering_stop(kvd);
	kvd_moving_close(kvd);
	kvd_tiering_close(kvd);
	kvd_core_fini(&kvd->core);
	kvd_memory_close(kvd);
	kvd_kept_stop(kvd, true);
destroy_loop:
	kvd_loop_destroy(kvd->loop);
free_requests:
	kvd_requests_fini(&kvd->requests);
	free(kvd->msg_buf);
close_state:
	kvd_state_close(&kvd->state);
free_config:
	free(config);
	if (kvd->signal_fd >= 0)
		close(kvd->signal_fd);
	if (kvd->spare_fd >= 0)
		close(kvd->spare_fd);
	if (!error[0])
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "%s", strerror(-r));
	return r;
}

/* ------------------------------------------------------------------ running */

/* One pass over all records takes a minute: this second's share of it. */
static void audit_tick(struct kvd *kvd)
{
	u32 pages = 0, i;

	for (i = 0; i < KVD_POOLS_MAX; i++)
		if (kvd->core.mm.pools[i])
			pages += kvd->core.mm.pools[i]->geo.nr_pages;
	kvd->audit_left = KV_MAX(KVD_AUDIT_SLICE, pages / AUDIT_SWEEP_S + 1);
}

/* Slices of about 50 us, so that nobody waits for the share of a large pool. */
static void audit_turn(struct kvd *kvd)
{
	struct kvd_finding found[4];
	struct kvd_findings fs = {.list = found, .max = KV_ARRAY_SIZE(found)};
	u32 nr = KV_MIN(kvd->audit_left, KVD_AUDIT_SLICE);

	kvd->audit_left -= nr;
	if (kvd_audit_slice(&kvd->core, nr, &fs)) {
		kvd->audit_sweeps++;
		kvd->audit_left = 0;
	}
	if (!fs.nr)
		return;
	kvd->audit_errors += fs.nr;
	kvd->audit_last = found[0];
	kvd_err("audit", "I%u pool %u pfn %u: %s", found[0].invariant, found[0].pool_id,
		found[0].pfn, found[0].text);
}

/* In every turn: who looks at the health is told half a second after it began. */
static void draining_note(struct kvd *kvd)
{
	if (!kvd->core.mm.draining_bytes)
		kvd->draining_ns = 0;
	else if (!kvd->draining_ns)
		kvd->draining_ns = kvd->now_ns;
}

static void tick(struct kvd *kvd)
{
	kvd_stats.ticks++;
	kvd->tick_ns = kvd->now_ns + KVD_TICK_NS;
	kvd_conn_tick(kvd);
	kvd_policy_sweep(kvd);
	kvd_moving_tick(kvd);
	kvd_tiering_tick(kvd);
	kvd_kept_tick(kvd);
	audit_tick(kvd);
	if (kvd->spare_fd < 0)
		kvd->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	kvd_listen_tick(&kvd->engine_listen);
	kvd_listen_tick(&kvd->admin_listen);
}

/* 0: there is work now. */
static u64 next_deadline(struct kvd *kvd)
{
	u64 deadline = KV_MIN(KV_MIN(kvd->tick_ns, kvd->core_next_ns),
			      KV_MIN(kvd->proof.next_ns, kvd->moving.next_ns));

	deadline = KV_MIN(deadline, kvd_listen_next_ns(&kvd->engine_listen));
	if (kvd->refs_ns)
		deadline = KV_MIN(deadline, kvd->refs_ns);
	if (!list_empty(&kvd->requests.hashing) || kvd->core_next_ns <= kvd->now_ns ||
	    kvd_tiering_more(kvd) || kvd->nr_closing || kvd->audit_left ||
	    kvd->admin_more)
		return 0;
	if (!kvd_serve_sleep(kvd))
		return 0;
	/* Still awake: a full CQ holds them back, and its owner does not kick. */
	if (!list_empty(&kvd->awake) || kvd->requests.nr_parked)
		deadline = KV_MIN(deadline, kvd->now_ns + CHOKED_NS);
	return deadline;
}

/* A short look at the rings before going to sleep. Answers whether there is something to
 * do. */
static bool spin(struct kvd *kvd)
{
	struct kvd_conn *conn;
	u32 i = 0;

	if (!kvd->spins || list_empty(&kvd->awake))
		return false;
	/* A request that goes on over several turns waits for nothing from outside. */
	if (!list_empty(&kvd->requests.hashing) || kvd->nr_closing || kvd->admin_more ||
	    kvd->core_next_ns <= kvd->now_ns)
		return true;
	while (kv_now_ns() - kvd->last_entry_ns < KVD_SPIN_NS) {
		list_for_each_entry (conn, &kvd->awake, awake_node)
			if (kvd_ring_waiting(&conn->ring) &&
			    !kvd_ring_choked(&conn->ring))
				return true;
		if (i++ % 8 == 0 && kvd_loop_pending(kvd->loop))
			return true;
		__builtin_ia32_pause();
	}
	kvd_stats.spins++;
	return false;
}

int kvd_turn(struct kvd *kvd)
{
	u64 deadline = spin(kvd) ? 0 : next_deadline(kvd);
	int r;

	if (deadline)
		kvd_stats.wakeups++;
	r = kvd_loop_wait(kvd->loop, deadline);
	if (r < 0)
		return r;
	if (kvd_serve_awake(kvd))
		kvd->last_entry_ns = kvd->now_ns;
	kvd_serve_hashing(kvd);
	kvd_proof_turn(kvd);
	kvd_moving_turn(kvd);
	kvd_conn_refs_turn(kvd);
	if (kvd->nr_closing)
		kvd_conn_closing_turn(kvd);
	kvd->core_next_ns = kvd_core_run(&kvd->core);
	draining_note(kvd);
	kvd_tiering_turn(kvd);
	if (kvd->requests.nr_parked)
		kvd_serve_parked(kvd);
	kvd_listen_turn(&kvd->engine_listen);
	if (kvd->now_ns >= kvd->tick_ns)
		tick(kvd);
	if (kvd->audit_left)
		audit_turn(kvd);
	kvd->admin_more = kvd_admin_turn(kvd);
	kvd_conn_reap_dead(kvd);
	return 0;
}

static void say_ready(struct kvd *kvd)
{
	u64 mib = kvd->core.mm.limits.capacity_bytes >> 20;
	char size[32] = "the driver starts"; /* its size follows in a line of its own */
	ssize_t n;

	if (mib)
		snprintf(size, sizeof(size), "%llu MiB", (unsigned long long)mib);
	kvd_info("main", "serving %s, %s backend (%s), %s, loop: %s",
		 kvd->opt.socket_path, kvd->backend->ops->name, kvd->memory.why, size,
		 kvd_loop_engine(kvd->loop));
	if (kvd->opt.ready_fd < 0)
		return;
	n = write(kvd->opt.ready_fd, "ready\n", 6);
	(void)n;
	close(kvd->opt.ready_fd);
	kvd->opt.ready_fd = -1;
}

int kvd_run(struct kvd *kvd)
{
	int r = 0;

	say_ready(kvd);
	while (!kvd->stop && !r)
		r = kvd_turn(kvd);
	kvd->failed = r != 0;
	return r;
}

void kvd_fini(struct kvd *kvd)
{
	struct kvd_conn *conn, *tmp;

	/* Nobody wanted this end: as after kill -9 the next kvmd has what is kept. */
	if (kvd->failed && kvd->kept.image) {
		kvd_kept_stop(kvd, false);
		return;
	}
	if (kvd->upgrade) { /* the keeper has it all; exec closes the rest */
		kvd_tiering_leave(kvd);
		kvd_kept_stop(kvd, false);
		return;
	}
	kvd_inside_remove();
	kvd_listen_close(&kvd->engine_listen);
	kvd_listen_close(&kvd->admin_listen);
	kvd_admin_fini(kvd);
	list_for_each_entry_safe (conn, tmp, &kvd->conns, node)
		kvd_conn_end(conn, 0, "kvmd ends");
	kvd_tiering_stop(kvd);
	kvd_moving_close(kvd);
	kvd_tiering_close(kvd);
	/* Reaps what still had a step in flight: with the daemon its tables are over as
	 * well. */
	kvd_core_fini(&kvd->core);
	kvd_conn_reap_dead(kvd);
	kvd_kept_stop(kvd, true);
	kvd_proof_fini(kvd);
	kvd_loop_del(kvd->loop, &kvd->signal_watch);
	kvd_memory_close(kvd);
	kvd_loop_destroy(kvd->loop);
	kvd_requests_fini(&kvd->requests);
	free(kvd->msg_buf);
	kvd_state_close(&kvd->state);
	close(kvd->signal_fd);
	if (kvd->spare_fd >= 0)
		close(kvd->spare_fd);
}
