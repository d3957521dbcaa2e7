/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/admin_do.c - the admin verbs that act, and the daemon's own figures.
 *
 * Everything that changes pages takes "dry_run": then it counts and changes nothing.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef KV_SANITIZED
#include <jemalloc/jemalloc.h>
#endif

#include "base/mutant.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"
#include "kvmd/dbg/trace.h"
#include "kvmd/dbg/tree.h"
#include "kvmd/ipc/admin_priv.h"
#include "kvmd/own/core.h"
#include "kvmd/own/verify.h"

#define AUDIT_FINDINGS 256u
#define TRACE_MAX      4096u

/* Slots, charges and indexes of the tiers; their bytes prove themselves when they are read. */
static void audit_tiers(const struct kvd *kvd, struct kvd_findings *fs)
{
	static const char *const names[KVD_TIER_NR] = {"DRAM", "NVMe"};

	for (u32 i = 0; kvd->tiering.tiers && i < KVD_TIER_NR; i++) {
		const struct kvd_space *sp = kvd_tier_space(kvd->tiering.tiers, i);
		const char *why = sp ? kvd_space_check(sp) : NULL;

		if (why)
			kvd_finding_add(fs, 1, 0, KVD_PFN_NONE, "%s tier: %s", names[i],
					why);
	}
}

static void audit_reply(struct kvd *kvd, struct kvd_findings *fs, cJSON *out)
{
	cJSON *list, *o;

	audit_tiers(kvd, fs);
	if (fs->nr) {
		kvd->audit_errors += fs->nr;
		kvd->audit_last = fs->list[0];
	}
	kvd_admin_u64(out, "checked", fs->checked);
	cJSON_AddNumberToObject(out, "damage", fs->nr);
	list = cJSON_AddArrayToObject(out, "findings");
	for (u32 i = 0; i < KV_MIN(fs->nr, fs->max); i++) {
		o = cJSON_CreateObject();
		cJSON_AddNumberToObject(o, "invariant", fs->list[i].invariant);
		cJSON_AddNumberToObject(o, "pool", fs->list[i].pool_id);
		if (fs->list[i].pfn == KVD_PFN_NONE)
			cJSON_AddNullToObject(o, "pfn");
		else
			cJSON_AddNumberToObject(o, "pfn", fs->list[i].pfn);
		cJSON_AddStringToObject(o, "text", fs->list[i].text);
		cJSON_AddItemToArray(list, o);
	}
}

/* All of it now: for those who have no connection that could wait (kvd_admin_handle()). */
int kvd_admin_audit(struct kvd_admin_call *call)
{
	struct kvd_findings fs = {.max = AUDIT_FINDINGS};
	int r;

	fs.list = calloc(AUDIT_FINDINGS, sizeof(*fs.list));
	if (!fs.list)
		return -ENOMEM;
	r = kvd_audit(&call->kvd->core, &fs);
	if (r >= 0)
		audit_reply(call->kvd, &fs, call->out);
	free(fs.list);
	return KV_MIN(r, 0);
}

int kvd_admin_audit_begin(struct kvd *kvd)
{
	struct kvd_audit_run *run = calloc(1, sizeof(*run));
	int r = -ENOMEM;

	if (!run)
		return r;
	run->findings.max = AUDIT_FINDINGS;
	run->findings.list = calloc(AUDIT_FINDINGS, sizeof(*run->findings.list));
	if (run->findings.list)
		r = kvd_audit_begin(&kvd->core, run);
	if (!r) {
		kvd->audit_run = run;
		return 0;
	}
	free(run->findings.list);
	free(run);
	return r;
}

void kvd_admin_audit_end(struct kvd *kvd)
{
	struct kvd_audit_run *run = kvd->audit_run;

	if (!run)
		return;
	kvd_audit_end(&kvd->core, run);
	free(run->findings.list);
	free(run);
	kvd->audit_run = NULL;
}

int kvd_admin_audit_step(struct kvd *kvd, cJSON *out)
{
	struct kvd_audit_run *run = kvd->audit_run;
	int r;

	if (!kvd_audit_step(&kvd->core, run, KVD_AUDIT_SLICE))
		return -EAGAIN;
	r = run->error;
	if (!r)
		audit_reply(kvd, &run->findings, out);
	kvd_admin_audit_end(kvd);
	return r;
}

/* -------------------------------------------------------------------- evict */

/*
 * CACHED pages of one pool, of one tenant or of all (@tenant < 0); pinned ones stay. The
 * work is in proportion to what is dropped, not to the pool.
 */
static u32 pool_evict(struct kvd_pool *pool, int tenant, bool dry_run)
{
	u32 nr = 0, pfn;
	int i;

	for (i = 0; i < (int)KVD_TENANTS_MAX; i++) {
		const struct kvd_account *acct = pool->mm->accounts[i];
		struct kvd_lru *lru;

		if (!acct || acct->domain_id != pool->domain_id ||
		    (tenant >= 0 && i != tenant))
			continue;
		lru = &pool->lru[acct->slot];
		if (dry_run)
			nr += kvd_lru_nr(lru);
		while (!dry_run && (pfn = kvd_lru_victim(lru)) != KVD_PFN_NONE) {
			kvd_prefix_evict(pool, pfn);
			nr++;
		}
	}
	return nr;
}

/* What lies on NVMe is known only when the tiers are there: it would be back afterwards. */
static bool stored_unknown(const struct kvd *kvd)
{
	return kvd->tiering.filling.wanted && kvd->config.tiers.nvme_bytes &&
	       !KV_MUTANT(evict_while_filling);
}

/* An operator's eviction means the page, not one copy of it. */
static void forget_stored(struct kvd *kvd, const struct kvd_pool *pool, u32 pfn)
{
	const struct kvd_frame *f = &pool->frames[pfn];
	struct kvd_slot_name name = {f->key, pool->fingerprint, pool->domain_id};

	if (kvd->tiering.tiers)
		kvd_tier_drop_page(kvd->tiering.tiers, &name);
}

static int evict_page(struct kvd_admin_call *call, struct kvd_pool *pool, bool dry_run)
{
	bool revoke = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(call->in, "revoke"));
	u32 pfn = 0, state;
	bool indexed;
	int r;

	r = kvd_admin_get_u32(call, "pfn", &pfn);
	if (r <= 0)
		return r ? r : kvd_admin_fail(call, -EINVAL, "pfn: missing");
	if (pfn >= pool->geo.nr_pages)
		return kvd_admin_fail(call, -ENOENT, "pfn %u: pool %u has %u pages", pfn,
				      pool->id, pool->geo.nr_pages);
	state = pool->frames[pfn].state;
	indexed = pool->frames[pfn].flags & KVD_FRAME_INDEXED;
	if (state == KVD_CACHED && (pool->frames[pfn].flags & KVD_FRAME_HELD) && !revoke)
		return kvd_admin_fail(call, KV_BUSY,
				      "pfn %u is pinned: unpin it, or --revoke", pfn);
	if (state == KVD_CACHED) {
		if (!dry_run)
			kvd_prefix_evict(pool, pfn);
	} else if (revoke && (state == KVD_ACTIVE || state == KVD_SEALED ||
			      state == KVD_MAGAZINE)) {
		r = dry_run ? 0 : kvd_lease_revoke(pool, pfn, 0);
		if (r)
			return r;
	} else {
		return kvd_admin_fail(
			call, KV_BUSY, "pfn %u is %s%s", pfn, kvd_frame_state_str(state),
			state == KVD_ACTIVE || state == KVD_SEALED
				? ": held; --revoke takes it from its holders"
				: "");
	}
	if (indexed && !dry_run)
		forget_stored(call->kvd, pool, pfn);
	cJSON_AddNumberToObject(call->out, "evicted", 1);
	cJSON_AddNumberToObject(call->out, "unindexed", 0);
	return 0;
}

static int evict_domain(struct kvd_admin_call *call, const char *name, bool dry_run)
{
	struct kvd_domain *domain = kvd_domain_find(&call->kvd->core, name);
	struct kvd_tiers *tiers = call->kvd->tiering.tiers;
	struct kvd_evicted done;
	u32 stored;

	if (!domain)
		return kvd_admin_fail(call, -ENOENT, "domain \"%s\": no such domain",
				      name);
	kvd_domain_evict(&call->kvd->core, domain, dry_run, &done);
	stored = tiers && dry_run ? kvd_tier_count_domain(tiers, domain->id)
		 : tiers	  ? kvd_tier_drop_domain(tiers, domain->id)
				  : 0;
	cJSON_AddNumberToObject(call->out, "stored", stored);
	cJSON_AddNumberToObject(call->out, "evicted", done.cached);
	cJSON_AddNumberToObject(call->out, "unindexed", done.unindexed);
	return 0;
}

static int evict_tenant(struct kvd_admin_call *call, const char *name, bool dry_run)
{
	struct kvd_tenant *tenant = kvd_tenant_find(&call->kvd->core, name);
	u32 i, nr = 0;

	if (!tenant)
		return kvd_admin_fail(call, -ENOENT, "tenant \"%s\": no such tenant",
				      name);
	for (i = 0; i < KVD_POOLS_MAX; i++)
		if (call->kvd->core.mm.pools[i])
			nr += pool_evict(call->kvd->core.mm.pools[i], tenant->index,
					 dry_run);
	cJSON_AddNumberToObject(call->out, "evicted", nr);
	cJSON_AddNumberToObject(call->out, "unindexed", 0);
	return 0;
}

int kvd_admin_evict(struct kvd_admin_call *call)
{
	const cJSON *target = cJSON_GetObjectItemCaseSensitive(call->in, "target");
	const cJSON *name = cJSON_GetObjectItemCaseSensitive(call->in, "name");
	bool dry_run = kvd_admin_dry_run(call) && !KV_MUTANT(dry_run_evicts);
	const char *what = cJSON_IsString(target) ? target->valuestring : "";
	struct kvd_pool *pool;
	int r;

	cJSON_AddBoolToObject(call->out, "dry_run", dry_run);
	if ((!strcmp(what, "domain") || !strcmp(what, "page")) &&
	    stored_unknown(call->kvd))
		return kvd_admin_fail(
			call, -EBUSY,
			"%s: the tiers are not there yet, and what they hold "
			"would come back: see `kvmctl tier`",
			what);
	if (!strcmp(what, "domain") || !strcmp(what, "tenant")) {
		if (!cJSON_IsString(name))
			return kvd_admin_fail(call, -EINVAL, "name: missing");
		r = what[0] == 'd' ? evict_domain(call, name->valuestring, dry_run)
				   : evict_tenant(call, name->valuestring, dry_run);
		return r;
	}
	if (strcmp(what, "pool") && strcmp(what, "page"))
		return kvd_admin_fail(call, -EINVAL,
				      "target: \"%s\": domain, tenant, pool or page",
				      what);
	r = kvd_admin_get_pool(call, &pool);
	if (r)
		return r;
	if (what[1] == 'a')
		return evict_page(call, pool, dry_run);
	cJSON_AddNumberToObject(call->out, "evicted", pool_evict(pool, -1, dry_run));
	cJSON_AddNumberToObject(call->out, "unindexed", 0);
	return 0;
}

/* ------------------------------------------------------------------- others */

int kvd_admin_version(struct kvd_admin_call *call)
{
	cJSON_AddStringToObject(call->out, "version", KVD_VERSION);
	cJSON_AddNumberToObject(call->out, "abi", KV_ABI_VERSION);
	cJSON_AddNumberToObject(call->out, "abi_min", KV_ABI_VERSION_MIN);
	return 0;
}

bool kvd_admin_dry_run(const struct kvd_admin_call *call)
{
	return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(call->in, "dry_run")) &&
	       !KV_MUTANT(dry_run_acts);
}

int kvd_admin_reload(struct kvd_admin_call *call)
{
	bool dry_run = kvd_admin_dry_run(call);
	u32 deferred = 0;
	int r;

	r = kvd_reload(call->kvd, dry_run, call->error, &deferred);
	if (r)
		return r;
	cJSON_AddBoolToObject(call->out, "dry_run", dry_run);
	kvd_admin_u64(call->out, "revision", call->kvd->config_revision);
	cJSON_AddNumberToObject(call->out, "deferred", deferred);
	return 0;
}

static void add_counter(void *arg, const char *name, u64 value)
{
	kvd_admin_u64(arg, name, value);
}

static void add_heap(cJSON *out)
{
#ifndef KV_SANITIZED
	static const char *const names[] = {"allocated", "active", "metadata",
					    "resident",	 "mapped", "retained"};
	cJSON *heap = cJSON_AddObjectToObject(out, "heap");
	uint64_t epoch = 1;
	size_t len = sizeof(epoch), value, i;
	char path[32], field[40];

	/* jemalloc's figures are as of the last epoch. */
	mallctl("epoch", &epoch, &len, &epoch, sizeof(epoch));
	for (i = 0; i < KV_ARRAY_SIZE(names); i++) {
		snprintf(path, sizeof(path), "stats.%s", names[i]);
		snprintf(field, sizeof(field), "%s_bytes", names[i]);
		len = sizeof(value);
		if (!mallctl(path, &value, &len, NULL, 0))
			kvd_admin_u64(heap, field, value);
	}
#endif
}

int kvd_admin_stat(struct kvd_admin_call *call)
{
	cJSON *counters = cJSON_AddObjectToObject(call->out, "counters");
	cJSON *ops = cJSON_AddArrayToObject(call->out, "ops"), *o;
	u64 written, suppressed;
	u32 i, k;

	kvd_stats_each(add_counter, counters);
	kvd_log_lines(&written, &suppressed);
	kvd_admin_u64(counters, "log_lines", written);
	kvd_admin_u64(counters, "log_lines_left_out", suppressed);
	kvd_admin_u64(counters, "state_saves", call->kvd->state.nr_saves);
	for (i = 0; i < KV_OP_NR; i++) {
		const struct kvd_op_stats *s = &call->kvd->op_stats[i];

		o = cJSON_CreateObject();
		cJSON_AddStringToObject(o, "op", kvd_op_row(i)->name);
		kvd_admin_u64(o, "calls", s->calls);
		kvd_admin_u64(o, "errors", s->errors);
		for (k = 0; k < KV_OUTCOME_NR; k++)
			kvd_admin_u64(o, kv_outcome_str((int)k), s->results[k]);
		kvd_admin_u64(o, "p50_ns", kvd_hist_quantile(&s->time, 500));
		kvd_admin_u64(o, "p99_ns", kvd_hist_quantile(&s->time, 990));
		cJSON_AddItemToArray(ops, o);
	}
	add_heap(call->out);
	return 0;
}

static int state_text(struct kvd_admin_call *call, const char *path)
{
	char *text = NULL;
	size_t bytes = 0;
	FILE *f = open_memstream(&text, &bytes);
	int r;

	if (!f)
		return -ENOMEM;
	r = kvd_tree_read(path, f);
	fclose(f);
	if (!r)
		cJSON_AddStringToObject(call->out, "text", text);
	else
		kvd_admin_fail(call, r, "state \"%s\": no such file", path);
	free(text);
	return r;
}

/* An operation by its name, a result with its sign: -EINVAL is not 2^64 - 22. */
static void add_arg(cJSON *o, const char *name, u64 value)
{
	const struct kvd_op *op = strcmp(name, "opcode") ? NULL : kvd_op_row((u32)value);

	if (op)
		cJSON_AddStringToObject(o, "op", op->name);
	else if (!strcmp(name, "result"))
		cJSON_AddNumberToObject(o, name, (double)(s64)value);
	else
		kvd_admin_u64(o, name, value);
}

int kvd_admin_trace(struct kvd_admin_call *call)
{
	const cJSON *state = cJSON_GetObjectItemCaseSensitive(call->in, "state");
	struct kvd_trace_entry *entries;
	u32 nr = 100, i, k;
	cJSON *list, *o;

	if (cJSON_IsString(state))
		return state_text(call, state->valuestring);
	if (kvd_admin_get_u32(call, "limit", &nr) < 0)
		return -EINVAL;
	nr = KV_MIN(nr, TRACE_MAX);
	entries = calloc(nr + 1, sizeof(*entries));
	if (!entries)
		return -ENOMEM;
	nr = kvd_trace_read(entries, nr);
	list = cJSON_AddArrayToObject(call->out, "trace");
	for (i = 0; i < nr; i++) {
		o = cJSON_CreateObject();
		kvd_admin_u64(o, "ago_us",
			      (call->kvd->now_ns - entries[i].time_ns) / 1000);
		cJSON_AddStringToObject(o, "event", kvd_trace_name(entries[i].event));
		for (k = 0; k < 3; k++)
			add_arg(o, kvd_trace_arg_name(entries[i].event, k),
				entries[i].args[k]);
		cJSON_AddItemToArray(list, o);
	}
	free(entries);
	return 0;
}

int kvd_admin_fault(struct kvd_admin_call *call)
{
	const cJSON *spec = cJSON_GetObjectItemCaseSensitive(call->in, "spec");
	u32 nth = 0;

	if (!call->kvd->opt.faults)
		return kvd_admin_fail(call, -EPERM, "started without --faults");
	if (cJSON_IsString(spec) &&
	    kvd_fault_arm_text(spec->valuestring, call->error, sizeof(call->error)))
		return -EINVAL;
	kvd_admin_u64(call->out, "fired", kvd_fault_fired());
	if (kvd_admin_get_u32(call, "fail_nth", &nth) > 0)
		kvd_fault_fail_nth(nth);
	return 0;
}
