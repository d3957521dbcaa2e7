/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/admin_status.c - `status`: one screen, and a health line with coded reasons.
 *
 * Every way in which the daemon gives less than it promises has a code here (design 1,
 * G5).
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kvmd/backend/cuda.h"
#include "kvmd/ipc/admin_priv.h"
#include "kvmd/ipc/conn.h"

#define INCIDENT_FRESH_NS 600000000000ull
#define HELD_NS		  500000000ull

void kvd_admin_lower(const char *in, char *out, size_t room)
{
	size_t i;

	for (i = 0; in[i] && i + 1 < room; i++)
		out[i] = in[i] >= 'A' && in[i] <= 'Z' ? (char)(in[i] + 32) : in[i];
	out[i] = 0;
}

void kvd_admin_states(cJSON *object, const u32 *nr)
{
	char name[16];
	u32 i;

	for (i = 0; i < KVD_FRAME_STATES; i++) {
		kvd_admin_lower(kvd_frame_state_str(i), name, sizeof(name));
		cJSON_AddNumberToObject(object, name, nr[i]);
	}
}

static void reason(cJSON *reasons, const char *code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

static void reason(cJSON *reasons, const char *code, const char *fmt, ...)
{
	cJSON *r = cJSON_CreateObject();
	char text[256];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	cJSON_AddStringToObject(r, "code", code);
	cJSON_AddStringToObject(r, "text", text);
	cJSON_AddItemToArray(reasons, r);
}

static void reasons_sessions(struct kvd *kvd, cJSON *reasons)
{
	struct kvd_conn *conn;
	u32 raced = 0, unread = 0, ended = 0, unchecked = 0;

	list_for_each_entry (conn, &kvd->conns, node) {
		const char *proof = kvd_proof_text(conn);

		if (proof)
			reason(reasons, "GPU_WORK_UNPROVEN",
			       "session %llu pid %d (%s) is gone with a step in flight: %s",
			       (unsigned long long)conn->client_id, conn->cred.pid,
			       conn->name, proof);
		raced += conn->pidfd_raced;
		unchecked += conn->unchecked && conn->state != KVD_CONN_CLOSED;
		unread += conn->undispatched_ns &&
			  kvd->now_ns - conn->undispatched_ns > 100000000ull;
		ended += conn->state == KVD_CONN_CLOSED && conn->session;
		if (conn->session && conn->session->reader.stalled)
			reason(reasons, "STEP_STALLED",
			       "session %llu pid %d (%s): a step has not retired",
			       (unsigned long long)conn->client_id, conn->cred.pid,
			       conn->name);
	}
	if (unchecked && kvd->config.check != KV_CHECK_OFF)
		reason(reasons, "CHECK_OFF",
		       "%u session(s) connected when check was off, and read without it",
		       unchecked);
	if (raced)
		reason(reasons, "PIDFD_RACED",
		       "%u session(s): no SO_PEERPIDFD here, the pidfd was made from the pid",
		       raced);
	if (unread)
		reason(reasons, "EVENTS_UNREAD",
		       "%u session(s) do not call kvc_dispatch()", unread);
	if (ended)
		reason(reasons, "SESSION_LINGERS",
		       "%u ended session(s) whose last steps are not over", ended);
}

/* Extents that this session was asked to unmap and has not. */
static u32 nr_held_extents(const struct kvd_session *s)
{
	u32 nr = 0;

	for (u32 p = 0; p < KV_POOLS_MAX; p++) {
		const struct kvd_attach *a = &s->attach[p];

		for (u32 i = 0; a->pool && i < a->pool->nr_extents; i++)
			nr += a->pool->extents[i].state == KVD_EXTENT_DRAINING &&
			      (a->given[i / 64] >> (i % 64) & 1);
	}
	return nr;
}

/* Memory that is charged and of no use to anybody (cases O04, O16). */
static void reasons_draining(struct kvd *kvd, cJSON *reasons)
{
	const struct kvd_session *s;
	u32 nr;

	if (!kvd->draining_ns || kvd->now_ns - kvd->draining_ns < HELD_NS ||
	    !kvd->core.mm.draining_bytes)
		return;
	list_for_each_entry (s, &kvd->core.sessions, node) {
		nr = nr_held_extents(s);
		if (nr)
			reason(reasons, "EXTENTS_HELD",
			       "session %llu pid %d (%s) has not unmapped %u extent(s)",
			       (unsigned long long)s->id, s->pid, s->name, nr);
	}
}

static void reasons_gpu(struct kvd *kvd, cJSON *reasons)
{
	const struct kvd_memory *m = &kvd->memory;

	if (m->kind == KV_BACKEND_HOST && m->fault[0])
		reason(reasons, "GPU_UNUSED", "serving host memory: %s", m->fault);
	if (m->kind == KV_BACKEND_HOST)
		return;
	if (m->fault[0])
		reason(reasons, "GPU_POLICY", "pools are refused: %s", m->fault);
	if (kvd->proof.last.result)
		reason(reasons, "GPU_NO_NVML",
		       "%s: an engine killed in a step keeps its pages from use",
		       kvd->proof.last.error);
	if (kvd_cuda_state(kvd->backend) == KVD_CUDA_FAILED)
		reason(reasons, "GPU_FAILED", "no GPU memory: %s",
		       kvd_cuda_error(kvd->backend));
	if (kvd_cuda_state(kvd->backend) == KVD_CUDA_STARTING)
		reason(reasons, "GPU_STARTING",
		       "the driver has been starting for %llu ms",
		       (unsigned long long)((kvd->now_ns - m->since_ns) / 1000000));
}

static void reasons_mover(struct kvd *kvd, cJSON *reasons)
{
	const char *code, *text = kvd_moving_reason(kvd, &code);

	if (text)
		reason(reasons, code, "%s", text);
	if (kvd->memory.kind == KV_BACKEND_CUDA_LEGACY)
		reason(reasons, "LEGACY_ISOLATION",
		       "cuda-legacy: one domain only, a handle opens until its memory is "
		       "freed, and every page is lost with kvmd or its mover");
}

static void tier_reason(void *arg, const char *code, const char *text)
{
	reason(arg, code, "%s", text);
}

static void reasons_all(struct kvd *kvd, cJSON *reasons)
{
	const struct kvd_incident *last;
	u32 i, over = 0, draining = 0;

	if (kvd->config.check == KV_CHECK_OFF)
		reason(reasons, "CHECK_OFF",
		       "check=off: a stale page would be read without notice");
	if (!kvd_loop_is_uring(kvd->loop))
		reason(reasons, "LOOP_EPOLL", "%s", kvd_loop_engine(kvd->loop));
	if (kvd->opt.as_root)
		reason(reasons, "RUNS_AS_ROOT",
		       "started as root without --user: give it a user of its own");
	if (kvd->opt.seccomp_error)
		reason(reasons, "NO_SECCOMP", "system calls are not filtered: %s",
		       strerror(-kvd->opt.seccomp_error));
	if (kvd->opt.test_layouts)
		reason(reasons, "TEST_LAYOUTS",
		       "--test-layouts: float32 pages are allowed");
	if (kvd->opt.faults)
		reason(reasons, "FAULTS_ARMED", "--faults %s", kvd->opt.faults);
	reasons_gpu(kvd, reasons);
	reasons_mover(kvd, reasons);
	kvd_tiering_reasons(kvd, tier_reason, reasons);
	if (kvd->kept.image && kvd->kept.keep.fd < 0)
		reason(reasons, "NO_KEEPER",
		       "the keeper is gone and cannot be replaced: a kill -9 loses "
		       "everything");
	if (kvd->kept.adopted.damage)
		reason(reasons, "ADOPT_DAMAGE",
		       "%u damaged record(s) were found when kvmd was restarted, %u pages "
		       "are poisoned",
		       kvd->kept.adopted.damage, kvd->kept.adopted.poisoned);
	reasons_sessions(kvd, reasons);
	reasons_draining(kvd, reasons);
	last = kvd_incident_get(&kvd->core.incidents, kvd->core.incidents.total);
	if (last && kvd->now_ns - last->when_ns < INCIDENT_FRESH_NS)
		reason(reasons, "INCIDENTS", "%llu failed check(s), the last %llu s ago",
		       (unsigned long long)kvd->core.incidents.total,
		       (unsigned long long)((kvd->now_ns - last->when_ns) / 1000000000));
	for (i = 0; i < KVD_TENANTS_MAX; i++) {
		if (!kvd->core.tenants[i])
			continue;
		over += kvd->core.tenants[i]->account.used_bytes >
			kvd->core.tenants[i]->account.max_bytes;
		draining += kvd->core.tenants[i]->account.draining;
	}
	if (draining)
		reason(reasons, "TENANT_DRAINING",
		       "%u tenant(s) are drained by an operator and get no memory",
		       draining);
	if (over)
		reason(reasons, "QUOTA_DEFERRED",
		       "%u tenant(s) hold more than their new max", over);
}

static void add_health(struct kvd *kvd, cJSON *out)
{
	cJSON *health = cJSON_AddObjectToObject(out, "health");
	cJSON *reasons = cJSON_CreateArray();
	const char *state;

	reasons_all(kvd, reasons);
	if (kvd->audit_errors) {
		state = "damage";
		reason(reasons, "AUDIT_DAMAGE",
		       "%llu finding(s), the last: I%u pool %u: %s",
		       (unsigned long long)kvd->audit_errors, kvd->audit_last.invariant,
		       kvd->audit_last.pool_id, kvd->audit_last.text);
	} else {
		state = cJSON_GetArraySize(reasons) ? "warn" : "ok";
	}
	cJSON_AddStringToObject(health, "state", state);
	cJSON_AddItemToObject(health, "reasons", reasons);
}

static void add_memory(struct kvd *kvd, cJSON *out)
{
	cJSON *mem = cJSON_AddObjectToObject(out, "memory");
	u32 nr[KVD_FRAME_STATES] = {0}, i, s, pools = 0;

	for (i = 0; i < KVD_POOLS_MAX; i++) {
		if (!kvd->core.mm.pools[i])
			continue;
		pools++;
		for (s = 0; s < KVD_FRAME_STATES; s++)
			nr[s] += kvd->core.mm.pools[i]->nr[s];
	}
	kvd_admin_u64(mem, "capacity_bytes", kvd->core.mm.limits.capacity_bytes);
	kvd_admin_u64(mem, "extent_bytes", kvd->core.mm.extent_bytes_used);
	cJSON_AddNumberToObject(mem, "pools", pools);
	kvd_admin_states(cJSON_AddObjectToObject(mem, "pages"), nr);
}

static void add_gpu(struct kvd *kvd, cJSON *out)
{
	static const char *const states[] = {"starting", "ready", "failed"};
	enum kvd_cuda_state state;
	char text[KVD_UUID_TEXT];
	cJSON *gpu;

	if (kvd->memory.kind == KV_BACKEND_HOST) {
		cJSON_AddNullToObject(out, "gpu");
		return;
	}
	state = kvd_cuda_state(kvd->backend);
	gpu = cJSON_AddObjectToObject(out, "gpu");
	cJSON_AddStringToObject(gpu, "uuid", kvd_memory_quota_name(kvd, text));
	cJSON_AddStringToObject(gpu, "state", states[state]);
	cJSON_AddStringToObject(gpu, "error", kvd_cuda_error(kvd->backend));
	kvd_admin_u64(gpu, "used_bytes", kvd_cuda_used(kvd->backend));
	if (state != KVD_CUDA_READY)
		return;
	cJSON_AddStringToObject(gpu, "name", kvd_cuda_get_info(kvd->backend)->name);
	kvd_admin_u64(gpu, "total_bytes", kvd_cuda_get_info(kvd->backend)->total_bytes);
	cJSON_AddNumberToObject(gpu, "driver_cuda",
				kvd_cuda_get_info(kvd->backend)->driver_version);
}

int kvd_admin_status(struct kvd_admin_call *call)
{
	static const char *const checks[] = {"batch", "off", "strict"};
	struct kvd *kvd = call->kvd;
	cJSON *out = call->out;
	u32 i, tenants = 0;

	for (i = 0; i < KVD_TENANTS_MAX; i++)
		tenants += kvd->core.tenants[i] != NULL;
	add_health(kvd, out);
	cJSON_AddStringToObject(out, "version", KVD_VERSION);
	cJSON_AddNumberToObject(out, "abi", KV_ABI_VERSION);
	cJSON_AddNumberToObject(out, "pid", getpid());
	kvd_admin_u64(out, "uptime_ms", (kvd->now_ns - kvd->started_ns) / 1000000);
	cJSON_AddStringToObject(out, "backend", kvd->backend->ops->name);
	cJSON_AddStringToObject(out, "backend_why", kvd->memory.why);
	add_gpu(kvd, out);
	kvd_moving_status(kvd, out);
	kvd_tiering_status(kvd, out);
	cJSON_AddStringToObject(out, "loop", kvd_loop_engine(kvd->loop));
	cJSON_AddStringToObject(out, "check", checks[kvd->config.check]);
	cJSON_AddBoolToObject(out, "spin", kvd->spins);
	cJSON_AddStringToObject(out, "socket", kvd->opt.socket_path);
	if (kvd->opt.config_path)
		cJSON_AddStringToObject(out, "config", kvd->opt.config_path);
	else
		cJSON_AddNullToObject(out, "config");
	kvd_admin_u64(out, "config_revision", kvd->config_revision);
	kvd_admin_hex(out, "table_epoch", kvd->table_epoch);
	kvd_admin_u64(out, "grace_epoch", kvd->core.mm.grace.epoch);
	cJSON_AddNumberToObject(out, "sessions", kvd->core.nr_sessions);
	cJSON_AddNumberToObject(out, "tenants", tenants);
	add_memory(kvd, out);
	kvd_admin_u64(out, "incidents", kvd->core.incidents.total);
	kvd_admin_u64(out, "audit_sweeps", kvd->audit_sweeps);
	kvd_admin_u64(out, "audit_errors", kvd->audit_errors);
	return 0;
}
