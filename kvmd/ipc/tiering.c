/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/tiering.c - see tiering.h. */
#include "kvmd/ipc/tiering.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/ipc/admin_priv.h"
#include "kvmd/ipc/policy.h"

#define LEAVE_NS     (2 * KV_NSEC_PER_SEC)
#define BAD_FRESH_NS (600 * KV_NSEC_PER_SEC)
#define WORKERS_MAX  12u
#define DRAM_SHARE   90u
/* No domain has such a name: a secret of the host's own, as domains have theirs. */
#define HOST_MARK    "/tiers"

/* ------------------------------------------------------------------- the copier */

static void job_done(void *arg, u64 id, int status)
{
	struct kvd_tiering_job *j = arg;

	kvd_tier_copied(j->kvd->tiering.tiers, j->cookie, status);
}

static int submit(void *arg, enum kvd_tier_dir dir, const struct kvd_tier_copy *copies,
		  u32 nr, u64 deadline_ns, u32 cookie)
{
	struct kvd *kvd = arg;
	struct kvd_mover_extent extents[KVD_TIER_BATCH];
	struct kvd_mover_copy mc[KVD_TIER_BATCH];
	struct kvd_mover_job job = {
		.dir = dir == KVD_TIER_OUT ? KVD_MOVER_OUT : KVD_MOVER_IN,
		.nr = nr,
		.copies = mc,
		.deadline_ns = deadline_ns,
		.done = job_done,
		.arg = &kvd->tiering.jobs[cookie],
	};
	u64 id;

	kv_assert(nr <= KVD_TIER_BATCH);
	for (u32 i = 0; i < nr; i++) {
		const struct kvd_pool *pool = copies[i].pool;
		u32 index = kvd_pool_extent_of(pool, copies[i].pfn);
		const struct kvd_extent *e = &pool->extents[index];
		u32 in = copies[i].pfn & ((1u << pool->geo.shift) - 1);

		extents[i] = (struct kvd_mover_extent){
			.pool_id = pool->id,
			.index = index,
			.serial = e->serial,
			.fd = e->handle.fd,
			.bytes = pool->geo.extent_bytes,
		};
		mc[i] = (struct kvd_mover_copy){
			.extent = &extents[i],
			.extent_off = in * pool->geo.stride_bytes,
			.pool_off = copies[i].off,
			.bytes = copies[i].bytes,
		};
	}
	return kvd_mover_submit(kvd->moving.mover, &job, &id);
}

static bool copier_down(const struct kvd *kvd)
{
	enum kvd_mover_state state = kvd_mover_state(kvd->moving.mover);

	return state == KVD_MOVER_DYING || state == KVD_MOVER_ENDING ||
	       state == KVD_MOVER_BACKOFF;
}

/* -------------------------------------------------------------- start and stop */

static void tiers_ready(void *arg, u32 events)
{
	kvd_tier_ready(((struct kvd *)arg)->tiering.tiers);
}

static void tell(void *arg, const char *line)
{
	struct kvd *kvd = arg;
	cJSON *fields = cJSON_CreateObject();

	kvd_warn("ipc/tiering", "%s", line);
	kvd->tiering.bad_ns = kvd->now_ns;
	cJSON_AddStringToObject(fields, "text", line);
	kvd_admin_event(kvd, "tier", fields);
}

static u32 nr_workers(void)
{
	cpu_set_t set;
	u32 cpus = sched_getaffinity(0, sizeof(set), &set) ? 2 : (u32)CPU_COUNT(&set);

	return KV_MAX(1u, KV_MIN(cpus * 3 / 4, WORKERS_MAX));
}

static int watches_add(struct kvd *kvd)
{
	struct kvd_tiering *tg = &kvd->tiering;
	int fds[KVD_TIER_FDS], r = 0;

	tg->nr_watches = kvd_tier_fds(tg->tiers, fds);
	for (u32 i = 0; i < tg->nr_watches && !r; i++) {
		tg->watches[i] = (struct kvd_watch){.fd = fds[i],
						    .events = KVD_LOOP_IN,
						    .ready = tiers_ready,
						    .arg = kvd};
		r = kvd_loop_add(kvd->loop, &tg->watches[i]);
	}
	return r;
}

static void say(const struct kvd *kvd)
{
	const struct kvd_tiering *tg = &kvd->tiering;
	const struct kvd_space *dram = kvd_tier_space(tg->tiers, KVD_TIER_DRAM);
	const struct kvd_store *st = kvd_tier_store(tg->tiers);

	kvd_info("ipc/tiering", "DRAM tier: %llu MiB",
		 (unsigned long long)(dram->size_bytes >> 20));
	if (!st)
		return;
	kvd_info("ipc/tiering",
		 "NVMe tier: %s, %llu MiB, %s%s; %llu pages taken up (%s), %llu of "
		 "nobody here",
		 kvd->config.tiers.nvme_path,
		 (unsigned long long)(st->space.size_bytes >> 20), kvd_io_engine(st->io),
		 st->direct ? "" : ", no O_DIRECT", (unsigned long long)st->adopted,
		 !st->found.existed ? "new"
		 : st->found.clean  ? "clean end"
				    : "unclean end",
		 (unsigned long long)st->orphans);
	if (st->found.existed && !st->found.matched)
		kvd_warn("ipc/tiering", "NVMe tier: emptied: its journal is not of this "
					"host's secret, file or size");
}

/*
 * All of the pool is allocated at once, so that a lack of memory is an error now and not a
 * SIGBUS later (case O33); more than there is would end in the OOM killer.
 */
static u64 dram_most(void)
{
	u64 have = (u64)sysconf(_SC_PHYS_PAGES) * (u64)sysconf(_SC_PAGESIZE);

	return have / 100 * DRAM_SHARE;
}

static int dram_fails(u64 want, int r, char *error)
{
	snprintf(error, KVD_CONFIG_ERROR_BYTES,
		 "tiers.dram.size: %llu: %s (%u %% of this host's memory are %llu)",
		 (unsigned long long)want, strerror(-r), DRAM_SHARE,
		 (unsigned long long)dram_most());
	return r;
}

int kvd_tiering_fits(const struct kvd_config *config, char *error)
{
	u64 want = config->tiers.dram_bytes;

	return want <= dram_most() ? 0 : dram_fails(want, -ENOMEM, error);
}

int kvd_tiering_pool(struct kvd *kvd, const struct kvd_config *config, char *error)
{
	u64 want = config->tiers.dram_bytes;
	bool later = kvd->kept.found && want > KVD_FILL_AT_ONCE;
	int r;

	if (KV_MUTANT(fill_at_restart))
		later = false;
	kvd_filling_take(kvd);
	r = kvd_tiering_fits(config, error);
	if (r)
		return r;
	r = kvd_moving_open(kvd, want, later);
	kvd->tiering.filling.wanted = !r && later;
	if (r)
		return want ? dram_fails(want, r, error) : r;
	r = kvd_filling_keep(kvd);
	if (r)
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "keeper %s: %s",
			 kvd->kept.keep.path, strerror(-r));
	return r;
}

static void tiers_stop(struct kvd *kvd)
{
	struct kvd_tiering *tg = &kvd->tiering;

	if (!tg->tiers)
		return;
	kvd->core.cfg.spill = NULL;
	for (u32 i = 0; i < tg->nr_watches; i++)
		kvd_loop_del(kvd->loop, &tg->watches[i]);
	kvd_tier_drain(tg->tiers);
}

int kvd_tiering_open(struct kvd *kvd, const struct kvd_config *config, char *error)
{
	const struct kvd_config_tiers *c = &config->tiers;
	struct kvd_tiering *tg = &kvd->tiering;
	struct kvd_tier_params p = {
		.core = &kvd->core,
		.copier = {kvd, submit},
		.nvme_path = c->nvme_path[0] ? c->nvme_path : NULL,
		.nvme_bytes = c->nvme_bytes,
		.nvme_depth = c->nvme_depth,
		.write_from = c->write_from,
		.read_deadline_ns = c->read_ms * KV_NSEC_PER_MSEC,
		.force_threads = kvd->opt.force_epoll,
		.nr_workers = nr_workers(),
		.tell = tell,
		.tell_arg = kvd,
	};
	u8 secret[KVD_DOMAIN_SECRET_BYTES];
	int r;

	if (!c->dram_bytes || tg->filling.wanted)
		return 0;
	for (u32 i = 0; i < KVD_TIER_BATCHES; i++)
		tg->jobs[i] = (struct kvd_tiering_job){kvd, i};
	r = kvd_policy_secret(kvd, HOST_MARK, secret);
	if (r)
		return r;
	memcpy(p.host_mark, secret, sizeof(p.host_mark));
	p.pool = kvd_mover_pool(kvd->moving.mover, &p.dram_bytes, NULL);
	r = kvd_tier_create(&p, error, &tg->tiers);
	if (r)
		return r;
	r = watches_add(kvd);
	if (r) { /* called from the filling's own end: that goes on */
		tiers_stop(kvd);
		kvd_tiering_close(kvd);
		return r;
	}
	kvd_tiering_limits(kvd);
	kvd->core.cfg.spill = kvd_tier_ops();
	kvd->core.cfg.spill_arg = tg->tiers;
	say(kvd);
	return 0;
}

void kvd_tiering_stop(struct kvd *kvd)
{
	kvd_filling_stop(kvd);
	tiers_stop(kvd);
}

void kvd_tiering_close(struct kvd *kvd)
{
	kvd_tier_destroy(kvd->tiering.tiers);
	kvd->tiering.tiers = NULL;
}

void kvd_tiering_leave(struct kvd *kvd)
{
	struct kvd_tiering *tg = &kvd->tiering;
	u64 until = kv_now_ns() + LEAVE_NS;

	kvd_filling_stop(kvd);
	if (!tg->tiers)
		return;
	kvd_tiering_stop(kvd);
	while (kvd_mover_nr_jobs(kvd->moving.mover) && kv_now_ns() < until) {
		struct pollfd p = {.fd = kvd_mover_fd(kvd->moving.mover),
				   .events = POLLIN};

		kvd_mover_run(kvd->moving.mover, kv_now_ns());
		if (poll(&p, 1, 5) > 0)
			kvd_mover_event(kvd->moving.mover);
		kvd_tier_drain(tg->tiers);
	}
	/* A job that does not end leaves its frame to the next kvmd, which waits for the
	 * mover's end; the journal was written up to here. */
	if (!kvd_tier_busy(tg->tiers))
		kvd_tiering_close(kvd);
}

/* --------------------------------------------------------------------- budgets */

void kvd_tiering_limits(struct kvd *kvd)
{
	static const struct kvd_tier_limits nothing = {.weight = 1};
	const struct kvd_config *c = &kvd->config;
	struct kvd_tiers *t = kvd->tiering.tiers;

	for (u16 i = 0; t && i < KVD_TENANTS_MAX; i++) {
		const struct kvd_tenant *tenant = kvd->core.tenants[i];
		const struct kvd_config_tenant *ct = NULL;

		for (u32 k = 0; tenant && k < c->nr_tenants; k++)
			if (!strcmp(c->tenants[k].name, tenant->name))
				ct = &c->tenants[k];
		for (u32 tier = 0; tier < KVD_TIER_NR; tier++) {
			const struct kvd_config_gpu *q = ct ? &ct->tiers[tier] : NULL;
			struct kvd_tier_limits l = nothing;

			if (q)
				l = (struct kvd_tier_limits){q->min_bytes, q->high_bytes,
							     q->max_bytes, q->weight};
			kvd_tier_set_limits(t, tier, i, &l);
		}
	}
}

/* ------------------------------------------------------------------------ turns */

void kvd_tiering_turn(struct kvd *kvd)
{
	struct kvd_tiering *tg = &kvd->tiering;

	u32 nr_jobs;

	tg->more = false;
	kvd_filling_turn(kvd);
	if (!tg->tiers)
		return;
	nr_jobs = kvd_mover_nr_jobs(kvd->moving.mover);
	kvd_tier_copier(tg->tiers, copier_down(kvd));
	tg->more = kvd_tier_turn(tg->tiers);
	/* Jobs that were submitted just now are handed over. */
	if (kvd_mover_nr_jobs(kvd->moving.mover) != nr_jobs)
		kvd_moving_turn(kvd);
}

bool kvd_tiering_more(const struct kvd *kvd)
{
	const struct kvd_tiering *tg = &kvd->tiering;

	return tg->more || (tg->tiers && kvd_tier_more(tg->tiers));
}

void kvd_tiering_tick(struct kvd *kvd)
{
	if (kvd->tiering.tiers)
		kvd_tier_tick(kvd->tiering.tiers);
}

/* ----------------------------------------------------------------------- status */

static void space_status(cJSON *o, const struct kvd_space *sp)
{
	kvd_admin_u64(o, "size_bytes", sp->size_bytes);
	kvd_admin_u64(o, "used_bytes", sp->used_bytes);
	cJSON_AddNumberToObject(o, "pages", sp->nr_ready);
	cJSON_AddNumberToObject(o, "moving", sp->nr_used - sp->nr_ready);
	kvd_admin_u64(o, "evictions", sp->evictions);
}

static void store_status(struct kvd *kvd, cJSON *o, const struct kvd_store *st)
{
	const struct kvd_journal_stats *js = kvd_journal_stats(st->journal);
	cJSON *j;

	cJSON_AddStringToObject(o, "path", kvd->config.tiers.nvme_path);
	cJSON_AddStringToObject(o, "engine", kvd_io_engine(st->io));
	cJSON_AddBoolToObject(o, "direct", st->direct);
	cJSON_AddStringToObject(o, "fault", kvd_tier_fault(kvd->tiering.tiers));
	cJSON_AddNumberToObject(o, "transfers_now", kvd_io_pending(st->io));
	kvd_admin_u64(o, "adopted", st->adopted);
	kvd_admin_u64(o, "orphans", st->orphans);
	cJSON_AddBoolToObject(o, "clean_start", st->found.clean);
	j = cJSON_AddObjectToObject(o, "journal");
	kvd_admin_u64(j, "records", js->records);
	kvd_admin_u64(j, "written", js->written);
	kvd_admin_u64(j, "errors", js->errors);
	kvd_admin_u64(j, "lost", js->lost);
	kvd_admin_u64(j, "compactions", js->compactions);
}

static void counter(void *arg, const char *name, u64 value)
{
	kvd_admin_u64(arg, name, value);
}

void kvd_tiering_status(struct kvd *kvd, cJSON *out)
{
	struct kvd_tiers *t = kvd->tiering.tiers;
	cJSON *o, *nvme;

	if (kvd->tiering.filling.wanted) {
		o = cJSON_AddObjectToObject(out, "tiers");
		cJSON_AddStringToObject(o, "state", "filling");
		cJSON_AddNullToObject(o, "dram");
		cJSON_AddNullToObject(o, "nvme");
		return;
	}
	if (!t) {
		cJSON_AddNullToObject(out, "tiers");
		return;
	}
	o = cJSON_AddObjectToObject(out, "tiers");
	cJSON_AddStringToObject(o, "state", "ready");
	space_status(cJSON_AddObjectToObject(o, "dram"),
		     kvd_tier_space(t, KVD_TIER_DRAM));
	if (kvd_tier_store(t)) {
		nvme = cJSON_AddObjectToObject(o, "nvme");
		space_status(nvme, kvd_tier_space(t, KVD_TIER_NVME));
		store_status(kvd, nvme, kvd_tier_store(t));
	} else {
		cJSON_AddNullToObject(o, "nvme");
	}
	cJSON_AddNumberToObject(o, "busy", kvd_tier_busy(t));
	kvd_tier_stats_each(t, counter, cJSON_AddObjectToObject(o, "counters"));
}

static void store_reasons(struct kvd *kvd, const struct kvd_store *st,
			  void (*add)(void *arg, const char *code, const char *text),
			  void *arg)
{
	const char *fault = kvd_tier_fault(kvd->tiering.tiers);
	const struct kvd_journal_stats *js = kvd_journal_stats(st->journal);

	if (fault[0])
		add(arg, "TIER_NVME_WRITES_OFF", fault);
	if (kvd_io_degraded(st->io))
		add(arg, "TIER_NVME_SLOW_IO", kvd_io_engine(st->io));
	if (!st->direct && !KV_MUTANT(no_direct_unsaid))
		add(arg, "TIER_NVME_NO_DIRECT",
		    "the file system does not do O_DIRECT: pages pass through the page cache");
	if (js->missing)
		add(arg, "TIER_JOURNAL_LOST",
		    "changes of the NVMe tier could not be noted yet: after a crash it would be "
		    "a little emptier, or have pages that were dropped");
}

void kvd_tiering_reasons(struct kvd *kvd,
			 void (*add)(void *arg, const char *code, const char *text),
			 void *arg)
{
	struct kvd_tiering *tg = &kvd->tiering;
	const struct kvd_tier_stats *s;
	char text[160];

	if (tg->filling.wanted)
		add(arg, "TIER_FILLING",
		    tg->filling.error[0]
			    ? tg->filling.error
			    : "the DRAM tier's memory is being allocated: "
			      "until then pages that are evicted are dropped");
	if (!tg->tiers)
		return;
	s = kvd_tier_stats(tg->tiers);
	if (kvd_tier_store(tg->tiers))
		store_reasons(kvd, kvd_tier_store(tg->tiers), add, arg);
	if (!tg->bad_ns || kvd->now_ns - tg->bad_ns > BAD_FRESH_NS)
		return;
	snprintf(
		text, sizeof(text),
		"%llu stored page(s) were not what they should be and became misses, the "
		"last %llu s ago",
		(unsigned long long)(s->bad_headers + s->bad_names + s->bad_old +
				     s->bad_digests),
		(unsigned long long)((kvd->now_ns - tg->bad_ns) / KV_NSEC_PER_SEC));
	add(arg, "TIER_BAD_PAGES", text);
}
